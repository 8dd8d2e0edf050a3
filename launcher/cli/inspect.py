"""`launcher inspect`: samples as the model will see them, totals and a histogram of lengths."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from launcher.cli.inspect_page import Page
from launcher.errors import EXIT_DONE, RecipeError, suggestion
from launcher.metrics.console import configure_logging
from launcher.recipe.load import load_recipe

if TYPE_CHECKING:
    from launcher.recipe.schema import Data, DataKind, Model, Recipe

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
    if recipe.data.builder is not None:
        what = "inspect shows the samples of data.train and data.validation, not its own"
        raise RecipeError(f"data.builder: {what}")
    parts, weights = _parts(recipe.data, name)

    from rich.console import Console

    from launcher.data.samples import load_decoder

    terminal = sys.stdout.isatty()
    console = Console(
        highlight=False, width=None if terminal else _WIDTH, emoji=False, markup=False
    )
    if terminal and console.width > _WIDTH:
        console.width = _WIDTH
    page = Page(console)
    tokenizer = recipe.data.tokenizer or recipe.model.path
    validates = not _trained(recipe.data, name)
    opened = _open(recipe, parts, tokenizer, validates=validates)
    order = _Order(opened, weights, recipe, validates=validates)
    streamed = f"the first {_STREAMED:,} rows" if recipe.data.streaming else ""
    page.title(recipe.run.name, name, "validation" if validates else streamed)
    decoder = load_decoder(tokenizer)
    for number, (part, index) in enumerate(order.first(samples), start=1):
        title = f"sample {number} · {part}" if len(opened) > 1 else f"sample {number}"
        page.sample(title, index, opened[part], decoder, recipe.data, most=tokens)
    padding = [order.padding(part) for part in opened]
    page.totals(opened, weights, padding, recipe.data.sequence_length)
    for part, dataset in opened.items():
        page.histogram(part if len(opened) > 1 else "", dataset)
        page.skipped(dataset)
    return EXIT_DONE


def _open(
    recipe: Recipe, parts: Parts, tokenizer: str | None, *, validates: bool
) -> dict[str, Any]:
    """Each set, tokenized; of a stream its first rows."""
    from launcher.data.dataset import open_dataset
    from launcher.data.samples import first_documents
    from launcher.data.token_store import ModelInputs

    vocabulary = _vocabulary(recipe.model)
    opened: dict[str, Any] = {}
    for part, (files, kind) in parts.items():
        data = dataclasses.replace(recipe.data, kind=kind)
        if data.streaming and not validates:
            opened[part] = first_documents(
                data, files, tokenizer=tokenizer, seed=recipe.run.seed, most=_STREAMED
            )
        else:
            opened[part] = open_dataset(
                data,
                files,
                tokenizer=tokenizer,
                model=ModelInputs(vocabulary=vocabulary),
                build=True,
                validation=validates,
            )
    return opened


def _parts(data: Data, name: str) -> tuple[Parts, list[float]]:
    """The sets of a name, and their weights in a mixture."""
    train = data.train if isinstance(data.train, dict) else {}
    whole: dict[str, Parts] = {
        "train": {part: (source.files, source.kind or data.kind) for part, source in train.items()}
    }
    if isinstance(data.train, tuple):
        whole["train"] = {"train": (data.train, data.kind)}
    if isinstance(data.validation, tuple):
        whole["validation"] = {"validation": (data.validation, data.kind)}
    elif data.validation is not None:
        whole["validation"] = {part: (files, data.kind) for part, files in data.validation.items()}
    if name in whole:
        return whole[name], [
            source.weight for source in train.values()
        ] if name == "train" and train else []
    single = {part: found for sets in whole.values() for part, found in sets.items()}
    if name not in single:
        known = list(dict.fromkeys([*whole, *single]))
        what = f"no set of that name{suggestion(name, known)}; there are {', '.join(known)}"
        raise RecipeError(f"command line: set={name}: {what}")
    return {name: single[name]}, []


def _vocabulary(model: Model) -> int | None:
    """Vocabulary of the model by its config; None where the config has none."""
    config: Any = model.config
    if model.path is not None:
        import json

        from launcher.recipe.hub import model_folder

        config = json.loads(
            (model_folder(model.path, key="model.path", weights=False) / "config.json").read_text(
                encoding="utf-8"
            )
        )
        config = config.get("text_config", config)
    size = (config or {}).get("vocab_size")
    return size if isinstance(size, int) else None


class _Order:
    """The order of the run: training data shuffled, validation data as it is."""

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
        self._mixed = (
            MixtureOrder(sizes=list(sizes.values()), weights=weights, seed=seed, shuffle=shuffle)
            if weights
            else None
        )

    def first(self, samples: int) -> list[tuple[str, int]]:
        """Set and index of the first samples; of several sets in turn."""
        names = list(self._opened)
        if self._mixed is None:
            return [
                (names[i % len(names)], self._orders[names[i % len(names)]].sample(i // len(names)))
                for i in range(samples)
            ]
        found = []
        for position in range(samples):
            index = self._mixed.sample(position)
            for part, dataset in self._opened.items():
                if index < len(dataset):
                    found.append((part, index))
                    break
                index -= len(dataset)
        return found

    def padding(self, part: str) -> str:
        """Share of padding; estimated over 64 steps where rows are padded to their micro-batch."""
        from launcher.data.batching import BatchSampler, RankBatchSampler, TokenBatchSampler
        from launcher.data.loader import expected_padding

        dataset, batch = self._opened[part], self._batch
        if dataset.packed:
            return (
                f"{1 - int(dataset.sequences.lengths.sum()) / (len(dataset) * dataset.length):.1%}"
            )
        one = {
            "global_batch_size": batch.global_batch_size,
            "rank": 0,
            "ranks": 1,
            "first_step": 0,
            "steps": 64,
        }
        sampler: BatchSampler
        if batch.micro_batch_tokens is not None:
            sampler = TokenBatchSampler(
                order=self._orders[part],
                lengths=dataset.lengths,
                micro_batch_tokens=batch.micro_batch_tokens,
                **one,
            )
        else:
            micro_batch_size = (
                batch.micro_batch_size if isinstance(batch.micro_batch_size, int) else 1
            )
            sampler = RankBatchSampler(
                order=self._orders[part], micro_batch_size=micro_batch_size, **one
            )
        share = expected_padding(dataset, sampler)
        return "" if share is None else f"{share:.1%}"


def _trained(data: Data, name: str) -> bool:
    return name == "train" or (isinstance(data.train, dict) and name in data.train)
