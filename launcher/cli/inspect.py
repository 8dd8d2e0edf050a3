"""`launcher inspect`: samples as the model will see them, totals and a histogram of lengths."""

from __future__ import annotations

import dataclasses
import itertools
import json
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from launcher.cli.prepare import data_sets
from launcher.errors import EXIT_DONE, RecipeError, suggestion
from launcher.metrics.console import configure_logging
from launcher.recipe.hub import model_folder
from launcher.recipe.load import load_recipe
from launcher.recipe.schema import Batch, Data, Model, Recipe

if TYPE_CHECKING:
    from rich.console import Console

_WIDTH = 120
_STREAMED = 1000
"""Rows of a stream that are inspected."""


def main(overrides: Sequence[str], *, name: str, samples: int, tokens: int) -> int:
    """Tokenizes what is not in the cache, and prints. Builds no model.

    name: of the set. samples, tokens: how many to print, and how many of each sample.
    """
    configure_logging(stream="stderr")
    recipe = load_recipe(overrides, ranks=None).recipe
    data = recipe.data
    if data.builder is not None:
        what = "inspect shows the samples of data.train and data.validation, not its own"
        raise RecipeError(f"data.builder: {what}")
    sets = _sets_of(data, name)

    # After all errors of the recipe, because they import numpy
    from launcher.cli.inspect_page import Page, facts, load_decoder

    tokenizer = data.tokenizer or recipe.model.path
    opened, validates = _open(recipe, sets, tokenizer)
    weights: tuple[float, ...] = ()
    if name == "train" and isinstance(data.train, dict):
        weights = tuple(source.weight for source in data.train.values())
    shuffle = data.shuffle and not validates
    page, several = Page(_console()), len(opened) > 1
    streamed = f"the first {_STREAMED:,} rows" if data.streaming else ""
    page.title(recipe.run.name, name, "validation" if validates else streamed)
    decoder = load_decoder(tokenizer)
    shown = itertools.islice(_order(opened, weights, recipe.run.seed, shuffle=shuffle), samples)
    for number, (part, index) in enumerate(shown, start=1):
        title = f"sample {number} · {part}" if several else f"sample {number}"
        page.sample(title, index, opened[part], decoder, data, most=tokens)
    shares = [f"{weight / sum(weights):.1%}" for weight in weights] or [""] * len(opened)
    page.totals(
        {
            part: {"share of the sequences": share}
            | facts(dataset, padding=_padding(dataset, recipe, shuffle=shuffle))
            for (part, dataset), share in zip(opened.items(), shares, strict=True)
        }
    )
    for part, dataset in opened.items():
        page.histogram(part if several else "", dataset)
        page.skipped(dataset.skipped)
    return EXIT_DONE


def _console() -> Console:
    from rich.console import Console

    width = None if sys.stdout.isatty() else _WIDTH
    console = Console(highlight=False, width=width, emoji=False, markup=False)
    console.width = min(console.width, _WIDTH)
    return console


def _sets_of(data: Data, name: str) -> dict[str, Any]:
    """The sets of a name (`train`, `validation` or one of theirs): kind, files, validation."""
    sets = {tuple(full.split(".", 2)[1:]): rest for full, *rest in data_sets(data)}
    found = {path[-1]: one for path, one in sets.items() if name in path}
    if not found:
        known = list(dict.fromkeys([path[0] for path in sets] + [path[-1] for path in sets]))
        what = f"no set of that name{suggestion(name, known)}; there are {', '.join(known)}"
        raise RecipeError(f"command line: set={name}: {what}")
    return found


def _open(
    recipe: Recipe, sets: dict[str, Any], tokenizer: str | None
) -> tuple[dict[str, Any], bool]:
    """Each set, tokenized; of a stream its first rows. Whether they are for validation."""
    from launcher.data.dataset import open_dataset
    from launcher.data.token_store import ModelInputs

    model = ModelInputs(vocabulary=_vocabulary(recipe.model))
    opened: dict[str, Any] = {}
    validates = False
    for name, (kind, files, validates) in sets.items():
        data = dataclasses.replace(recipe.data, kind=kind)
        if data.streaming and not validates:
            opened[name] = _first_documents(data, files, tokenizer, seed=recipe.run.seed)
        else:
            opened[name] = open_dataset(
                data, files, tokenizer=tokenizer, model=model, build=True, validation=validates
            )
    return opened, validates


def _first_documents(
    data: Data, files: tuple[str, ...], tokenizer: str | None, *, seed: int
) -> Any:
    """The first documents of a stream, packed as they are without streaming."""
    from launcher.data.dataset import SequenceDataset
    from launcher.data.encoder import make_encoder
    from launcher.data.packing import pack
    from launcher.data.sources import find_parts, read_all
    from launcher.data.streaming import assign_shards
    from launcher.data.token_store import store_rows

    encoder = make_encoder(data.kind, data, tokenizer=tokenizer)
    parts = find_parts(files, kind=data.kind)
    shard = assign_shards(parts, shards=1, seed=seed, shuffle=data.shuffle)[0]
    rows = itertools.islice(read_all(shard, column=encoder.text_column), _STREAMED)
    store = store_rows(list(encoder.encode_rows(rows)), data.on_error)
    if not store.documents:
        raise RecipeError(f"data: {', '.join(files)}: no documents in the first {_STREAMED:,} rows")
    length = data.sequence_length
    sequences = pack(store.offsets, data.kind, packing=data.packing, sequence_length=length)
    return SequenceDataset(store, sequences, length, data.packing)


def _vocabulary(model: Model) -> int | None:
    """Vocabulary of the model by its config; None if the config has none."""
    config: Any = model.config or {}
    if model.path is not None:
        folder = model_folder(model.path, key="model.path", weights=False)
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        config = config.get("text_config", config)
    size = config.get("vocab_size")
    return size if isinstance(size, int) else None


def _order(
    opened: dict[str, Any], weights: tuple[float, ...], seed: int, *, shuffle: bool
) -> Iterator[tuple[str, int]]:
    """Set and index of each sample in the order of the run; of several sets in turn."""
    from launcher.data.dataset import MixtureDataset, make_order

    names = list(opened)
    if weights:
        mixture = MixtureDataset(opened, weights)
        order = make_order(mixture, seed=seed, shuffle=shuffle, epochs=None)
        for position in itertools.count():
            yield mixture.locate(order.sample(position))
    orders = [
        make_order(dataset, seed=seed, shuffle=shuffle, epochs=None) for dataset in opened.values()
    ]
    for position in itertools.count():
        turn, part = divmod(position, len(names))
        yield names[part], orders[part].sample(turn)


def _padding(dataset: Any, recipe: Recipe, *, shuffle: bool) -> str:
    """Share of padding; estimated over 64 steps if rows are padded to their micro-batch."""
    from launcher.data.batching import make_batch_sampler
    from launcher.data.dataset import make_order
    from launcher.data.loader import expected_padding

    if dataset.packed:
        return f"{1 - dataset.tokens / (len(dataset) * dataset.length):.1%}"
    batch = recipe.batch
    if batch.micro_batch_size == "auto":
        batch = Batch(global_batch_size=batch.global_batch_size, micro_batch_size=1)
    order = make_order(dataset, seed=recipe.run.seed, shuffle=shuffle, epochs=None)
    sampler = make_batch_sampler(batch, order=order, lengths=dataset.lengths, steps=64)
    share = expected_padding(dataset, sampler)
    return "" if share is None else f"{share:.1%}"
