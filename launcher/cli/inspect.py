"""`launcher inspect`: samples as the model will see them, totals and a histogram of lengths."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from launcher.errors import EXIT_DONE, RecipeError, suggestion
from launcher.metrics.console import configure_logging
from launcher.recipe.hub import model_folder
from launcher.recipe.load import load_recipe
from launcher.recipe.schema import Data, DataKind, Model, Recipe

if TYPE_CHECKING:
    from rich.console import Console

Parts = dict[str, tuple[tuple[str, ...], DataKind]]
"""The sets to show: files and kind of each."""

_WIDTH = 120
_STREAMED = 1000
"""Rows of a stream to look at."""


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
    parts, weights = _parts(data, name)

    # After all errors of the recipe, because they import numpy
    from launcher.cli.inspect_page import Page, facts
    from launcher.data.samples import load_decoder

    tokenizer = data.tokenizer or recipe.model.path
    validates = name != "train" and not (isinstance(data.train, dict) and name in data.train)
    opened = _open(recipe, parts, tokenizer, validates=validates)
    order = _Order(opened, weights, recipe, validates=validates)
    page, several = Page(_console()), len(opened) > 1
    streamed = f"the first {_STREAMED:,} rows" if data.streaming else ""
    page.title(recipe.run.name, name, "validation" if validates else streamed)
    decoder = load_decoder(tokenizer)
    for number, (part, index) in enumerate(order.first(samples), start=1):
        title = f"sample {number} · {part}" if several else f"sample {number}"
        page.sample(title, index, opened[part], decoder, data, most=tokens)
    shares = [f"{weight / sum(weights):.1%}" for weight in weights] or [""] * len(opened)
    page.totals(
        {
            part: facts(dataset, share=share, padding=order.padding(part))
            for (part, dataset), share in zip(opened.items(), shares, strict=True)
        }
    )
    for part, dataset in opened.items():
        page.histogram(part if several else "", dataset)
        page.skipped(dataset.skipped)
    return EXIT_DONE


def _console() -> Console:
    from rich.console import Console

    terminal = sys.stdout.isatty()
    console = Console(
        highlight=False, width=None if terminal else _WIDTH, emoji=False, markup=False
    )
    console.width = min(console.width, _WIDTH)
    return console


def _open(
    recipe: Recipe, parts: Parts, tokenizer: str | None, *, validates: bool
) -> dict[str, Any]:
    """Each set, tokenized; of a stream its first rows."""
    from launcher.data.dataset import open_dataset
    from launcher.data.samples import first_documents
    from launcher.data.token_store import ModelInputs

    model = ModelInputs(vocabulary=_vocabulary(recipe.model))
    opened: dict[str, Any] = {}
    for part, (files, kind) in parts.items():
        data = dataclasses.replace(recipe.data, kind=kind)
        if data.streaming and not validates:
            opened[part] = first_documents(
                data, files, tokenizer=tokenizer, seed=recipe.run.seed, most=_STREAMED
            )
        else:
            opened[part] = open_dataset(
                data, files, tokenizer=tokenizer, model=model, build=True, validation=validates
            )
    return opened


def _parts(data: Data, name: str) -> tuple[Parts, list[float]]:
    """The sets of a name, and their weights in a mixture."""
    weights: list[float] = []
    sets: dict[str, Parts] = {"train": {}}
    if isinstance(data.train, dict):
        for part, source in data.train.items():
            sets["train"][part] = (source.files, source.kind or data.kind)
        weights = [source.weight for source in data.train.values()] if name == "train" else []
    elif data.train is not None:
        sets["train"] = {"train": (data.train, data.kind)}
    if isinstance(data.validation, dict):
        sets["validation"] = {part: (files, data.kind) for part, files in data.validation.items()}
    elif data.validation is not None:
        sets["validation"] = {"validation": (data.validation, data.kind)}
    if name in sets:
        return sets[name], weights
    single = {part: found for parts in sets.values() for part, found in parts.items()}
    if name not in single:
        known = list(dict.fromkeys([*sets, *single]))
        what = f"no set of that name{suggestion(name, known)}; there are {', '.join(known)}"
        raise RecipeError(f"command line: set={name}: {what}")
    return {name: single[name]}, []


def _vocabulary(model: Model) -> int | None:
    """Vocabulary of the model by its config; None if the config has none."""
    config: Any = model.config or {}
    if model.path is not None:
        folder = model_folder(model.path, key="model.path", weights=False)
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        config = config.get("text_config", config)
    size = config.get("vocab_size")
    return size if isinstance(size, int) else None


class _Order:
    """The order of the run: training data shuffled, validation data in order."""

    def __init__(
        self, opened: dict[str, Any], weights: list[float], recipe: Recipe, *, validates: bool
    ) -> None:
        from launcher.data.batching import MixtureOrder, SampleOrder

        self._opened, self._batch = opened, recipe.batch
        seed, shuffle = recipe.run.seed, recipe.data.shuffle and not validates
        sizes = {part: len(dataset) for part, dataset in opened.items()}
        self._orders = {
            part: SampleOrder(samples=size, seed=seed, shuffle=shuffle)
            for part, size in sizes.items()
        }
        self._mixed = None
        if weights:
            self._mixed = MixtureOrder(
                sizes=list(sizes.values()), weights=weights, seed=seed, shuffle=shuffle
            )

    def first(self, samples: int) -> list[tuple[str, int]]:
        """Set and index of the first samples; of several sets in turn."""
        names, found = list(self._opened), []
        for position in range(samples):
            if self._mixed is None:
                turn, part = divmod(position, len(names))
                found.append((names[part], self._orders[names[part]].sample(turn)))
                continue
            index = self._mixed.sample(position)
            for name in names:
                if index < len(self._opened[name]):
                    found.append((name, index))
                    break
                index -= len(self._opened[name])
        return found

    def padding(self, part: str) -> str:
        """Share of padding; estimated over 64 steps if rows are padded to their micro-batch."""
        from launcher.data.batching import BatchSampler, RankBatchSampler, TokenBatchSampler
        from launcher.data.loader import expected_padding

        dataset, batch, order = self._opened[part], self._batch, self._orders[part]
        if dataset.packed:
            filled = int(dataset.sequences.lengths.sum())
            return f"{1 - filled / (len(dataset) * dataset.length):.1%}"
        size, tokens = batch.micro_batch_size, batch.micro_batch_tokens
        one: dict[str, Any] = {"rank": 0, "ranks": 1, "first_step": 0, "steps": 64}
        one |= {"order": order, "global_batch_size": batch.global_batch_size}
        sampler: BatchSampler
        if tokens is not None:
            sampler = TokenBatchSampler(lengths=dataset.lengths, micro_batch_tokens=tokens, **one)
        else:
            size = size if isinstance(size, int) else 1
            sampler = RankBatchSampler(micro_batch_size=size, **one)
        share = expected_padding(dataset, sampler)
        return "" if share is None else f"{share:.1%}"
