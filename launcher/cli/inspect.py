"""`launcher inspect recipe=... [set=train] [samples=3] [tokens=600]`: samples as the model will see them, and what they come to."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from launcher.cli.options import take_options
from launcher.errors import EXIT_DONE, RecipeError
from launcher.metrics.console import configure_logging
from launcher.recipe.decode import suggestion
from launcher.recipe.load import load_recipe

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from launcher.data.samples import Decoder, Piece
    from launcher.recipe.schema import Data, DataKind, Model, Recipe

    Parts = dict[str, tuple[tuple[str, ...], DataKind]]
    """The sets to show: files and kind of each."""

_WIDTH = 120
_BAR = 44
_EIGHTHS = " ▏▎▍▌▋▊▉"


def main(arguments: Sequence[str]) -> int:
    """Tokenizes what is not in the cache, and prints. Builds no model and trains nothing."""
    configure_logging(stream="stderr")
    options, rest = take_options(arguments, {"samples": 3, "tokens": 600})
    sets = [argument.partition("=")[2] for argument in rest if argument.startswith("set=")]
    recipe = load_recipe([argument for argument in rest if not argument.startswith("set=")], ranks=None).recipe
    if recipe.data.builder is not None:
        raise RecipeError("data.builder: its samples are its own; inspect shows those of data.train and data.validation")
    name = sets[-1] if sets else "train"
    parts, weights = _parts(recipe.data, name)

    from rich.console import Console

    terminal = sys.stdout.isatty()
    console = Console(highlight=False, width=None if terminal else _WIDTH, emoji=False, markup=False)
    if terminal and console.width > _WIDTH:
        console.width = _WIDTH
    _Page(console).show(recipe, name, parts, weights, samples=int(options["samples"] or 0), tokens=int(options["tokens"] or 0))
    return EXIT_DONE


def _parts(data: Data, name: str) -> tuple[Parts, list[float]]:
    """What a set's name stands for, and the weights where it is a mixture."""
    train = data.train if isinstance(data.train, dict) else {}
    whole: dict[str, Parts] = {"train": {part: (source.files, source.kind or data.kind) for part, source in train.items()}}
    if isinstance(data.train, tuple):
        whole["train"] = {"train": (data.train, data.kind)}
    if isinstance(data.validation, tuple):
        whole["validation"] = {"validation": (data.validation, data.kind)}
    elif data.validation is not None:
        whole["validation"] = {part: (files, data.kind) for part, files in data.validation.items()}
    if name in whole:
        return whole[name], [source.weight for source in train.values()] if name == "train" and train else []
    single = {part: found for sets in whole.values() for part, found in sets.items()}
    if name not in single:
        known = list(dict.fromkeys([*whole, *single]))
        raise RecipeError(f"command line: set={name}: no set of that name{suggestion(name, known)}; there are {', '.join(known)}")
    return {name: single[name]}, []


def _vocabulary(model: Model) -> int | None:
    """Rows of the embedding, from the config alone; None where it does not say."""
    config: Any = model.config
    if model.path is not None:
        import json

        from launcher.recipe.hub import model_folder

        config = json.loads((model_folder(model.path, key="model.path", weights=False) / "config.json").read_text(encoding="utf-8"))
        config = config.get("text_config", config)
    size = (config or {}).get("vocab_size")
    return size if isinstance(size, int) else None


class _Page:
    """What is printed, in a terminal with colours and elsewhere with brackets."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._colours = console.is_terminal and console.color_system is not None and not console.no_color

    def show(
        self,
        recipe: Recipe,
        name: str,
        parts: Parts,
        weights: list[float],
        *,
        samples: int,
        tokens: int,
    ) -> None:
        from launcher.data.dataset import open_dataset
        from launcher.data.samples import first_documents, load_decoder
        from launcher.data.token_store import ModelInputs

        tokenizer = recipe.data.tokenizer if recipe.data.tokenizer is not None else recipe.model.path
        vocabulary, validates = _vocabulary(recipe.model), not _trained(recipe.data, name)
        opened: dict[str, Any] = {}
        for part, (files, kind) in parts.items():
            data = dataclasses.replace(recipe.data, kind=kind)
            if data.streaming and not validates:
                opened[part] = first_documents(data, files, tokenizer=tokenizer, seed=recipe.run.seed, most=_STREAMED)
            else:
                model = ModelInputs(vocabulary=vocabulary)
                opened[part] = open_dataset(data, files, tokenizer=tokenizer, model=model, build=True, validation=validates)
        decoder = load_decoder(tokenizer)
        data, order = recipe.data, _Order(opened, weights, recipe, validates=validates)
        self._title(recipe.run.name, name, "validation" if validates else f"the first {_STREAMED:,} rows" if data.streaming else "")
        for number, (part, index) in enumerate(order.first(samples), start=1):
            self._sample(number, part if len(opened) > 1 else "", index, opened[part], decoder, data, most=tokens)
        self._totals(opened, weights, order, recipe)
        for part, dataset in opened.items():
            self._histogram(part if len(opened) > 1 else "", dataset)
            self._skipped(dataset)

    def _print(self, text: Text | str = "") -> None:
        self._console.print(text, soft_wrap=not self._colours)

    def _title(self, run: str, name: str, what: str) -> None:
        from rich.text import Text

        self._print()
        line = Text.assemble((f"{run} · {name}", "bold"), (f"   {what or 'in the order of the run'}", "dim"))
        self._print(line)
        self._print(
            Text.assemble(
                ("  loss ", "green"),
                ("  no loss  ", "dim"),
                ("<special>", _SPECIAL_LOSS),
                " ",
                ("<special>", _SPECIAL),
                ("  with and without", "dim"),
            )
            if self._colours
            else "⟦what carries loss⟧, and what does not"
        )

    def _sample(self, number: int, part: str, index: int, dataset: Any, decoder: Decoder, data: Data, *, most: int) -> None:
        from rich.text import Text

        from launcher.data.samples import pieces

        row = dataset[index]
        found = pieces(dataset.store, dataset.sequences, index, row, decoder, most=most)
        tokens, trained = len(row["input_ids"]), int((row["targets"] != _IGNORED).sum())
        words = [f"{tokens:,} tokens"]
        if "position_ids" in row:
            words.append(f"{trained:,} with loss ({trained / max(1, tokens):.0%})")
        else:
            label = int(row["targets"][0])
            words.append(f"class {label}" + (f", {data.labels[label]}" if data.labels and label < len(data.labels) else ""))
        if len(found) > 1:
            words.append(f"{len(found)} documents")
        if dataset.packed and tokens < dataset.length:
            words.append(f"{dataset.length - tokens:,} padding")
        self._print()
        self._rule(Text.assemble((f"sample {number}", "bold"), f"{' · ' + part if part else ''} · {' · '.join(words)}"), strong=True)
        shown = 0
        for place, piece in enumerate(found):
            if shown >= most:
                break
            if place:
                self._rule(Text(f"next document, {piece.tokens:,} tokens", style="cyan"), strong=False)
            if piece.before:
                self._print(Text(f"… {piece.before:,} tokens of it stand in another sequence", style="cyan"))
            self._print(self._decoded(piece))
            shown += piece.tokens
            if piece.after and shown <= most:
                cut = dataset.sequences.cut_documents
                where = "are cut off and lost" if cut else "of it stand in another sequence"
                self._print(Text(f"… {piece.after:,} tokens {where}", style="yellow" if cut else "cyan"))
        if tokens > most:
            self._print(Text(f"… {tokens - most:,} more tokens (tokens={tokens} shows them)", style="yellow"))

    def _rule(self, text: Text, *, strong: bool) -> None:
        from rich.rule import Rule

        self._console.print(Rule(text, align="left", characters="━" if strong else "┈", style="bright_black"))

    def _decoded(self, piece: Piece) -> Text:
        from rich.text import Text

        text, inside = Text(), False
        for span in piece.spans:
            shown = span.text.replace("\t", "→   ").replace("\n", "↵\n")
            if self._colours:
                style = (_SPECIAL_LOSS if span.loss else _SPECIAL) if span.special else ("green" if span.loss else "dim")
                text.append(shown, style=style)
                continue
            if span.loss != inside:
                text.append("⟦" if span.loss else "⟧")
            inside = span.loss
            text.append(shown)
        if inside:
            text.append("⟧")
        return text

    def _totals(self, opened: dict[str, Any], weights: list[float], order: _Order, recipe: Recipe) -> None:
        from rich import box
        from rich.table import Table

        from launcher.data.samples import statistics

        table = Table(box=box.SIMPLE_HEAD if len(opened) > 1 else None, show_header=len(opened) > 1, pad_edge=False)
        table.add_column("", style="dim" if self._colours else "")
        for part in opened:
            table.add_column(part, justify="right" if len(opened) > 1 else "left")
        found = {part: statistics(dataset.store, dataset.sequences) for part, dataset in opened.items()}
        length = recipe.data.sequence_length

        def row(title: str, values: list[str]) -> None:
            if any(value for value in values):
                table.add_row(title, *values)

        if weights:
            row("share of the sequences", [f"{weight / sum(weights):.1%}" for weight in weights])
        row("documents", [f"{len(one.lengths):,}" for one in found.values()])
        quantiles = [_quantiles(one.lengths) for one in found.values()]
        if len(opened) == 1:
            row("tokens of a document", [", ".join(f"{what} {number}" for what, number in quantiles[0].items())])
        else:
            for what in quantiles[0]:
                row(f"tokens of a document, {what}", [one[what] for one in quantiles])
        row(f"sequences of up to {length:,}", [f"{one.sequences:,}" for one in found.values()])
        row("tokens in them", [f"{one.tokens:,}" for one in found.values()])
        row("tokens with loss", [f"{one.loss_tokens:,}  ({one.loss_tokens / one.tokens:.1%})" for one in found.values()])
        row("padding", [order.padding(part) for part in opened])
        row("documents that go on in another sequence", [_some(dataset.sequences.split_documents) for dataset in opened.values()])
        row("documents that lose their end", [_lost(dataset.sequences) for dataset in opened.values()])
        row("rows skipped", [_some(len(dataset.skipped)) for dataset in opened.values()])
        self._print()
        self._rule_line("in all")
        self._console.print(table)

    def _rule_line(self, text: str) -> None:
        from rich.text import Text

        self._rule(Text(text, style="bold"), strong=True)

    def _histogram(self, part: str, dataset: Any) -> None:
        import numpy as np
        from rich.text import Text

        from launcher.data.samples import bins

        lengths = np.diff(dataset.store.offsets)
        if not len(lengths):
            return
        edges, counts = bins(lengths, mark=dataset.length)
        width = len(f"{edges[-1]:,}")
        self._print()
        self._rule_line(f"{part + ': ' if part else ''}documents by tokens")
        marked = False
        for low, high, count in zip(edges[:-1], edges[1:], counts, strict=True):
            if low > dataset.length and not marked:
                marked = True
                line = f"{'':>{2 * width + 3}} ╌╌╌ data.sequence_length {dataset.length:,} ╌╌╌"
                self._print(Text(line, style="yellow"))
            bar = count * _BAR * 8 // max(counts)
            drawn = "█" * (bar // 8) + _EIGHTHS[bar % 8].strip() or ("▏" if count else "")
            line_text = Text(f"{low:>{width},} – {high - 1:>{width},} ")
            line_text.append(f"{drawn:<{_BAR}}", style="yellow" if low > dataset.length else "green")
            line_text.append(f" {count:>{len(f'{max(counts):,}')},}")
            self._print(line_text)

    def _skipped(self, dataset: Any, most: int = 5) -> None:
        skipped = dataset.skipped
        if skipped:
            self._print()
        for row in skipped[:most]:
            self._print(f"skipped: {row['where']}: {row['problem']}")
        if len(skipped) > most:
            self._print(f"... and {len(skipped) - most:,} more; a run lists them in skipped_rows.jsonl")


_SPECIAL = "black on bright_black"
_SPECIAL_LOSS = "black on green"
_IGNORED = -100
_STREAMED = 1000
"""Rows of a stream to look at."""


class _Order:
    """In which order the run sees the samples: of the training data shuffled, of a validation set as they are."""

    def __init__(self, opened: dict[str, Any], weights: list[float], recipe: Recipe, *, validates: bool) -> None:
        from launcher.data.batching import MixtureOrder, SampleOrder

        self._opened, self._batch = opened, recipe.batch
        seed, shuffle = recipe.run.seed, recipe.data.shuffle and not validates
        sizes = {part: len(dataset) for part, dataset in opened.items()}
        self._orders = {part: SampleOrder(samples=size, seed=seed, shuffle=shuffle) for part, size in sizes.items()}
        self._mixed = MixtureOrder(sizes=list(sizes.values()), weights=weights, seed=seed, shuffle=shuffle) if weights else None

    def first(self, samples: int) -> list[tuple[str, int]]:
        """(set, index) of so many samples; of several sets in turn."""
        names = list(self._opened)
        if self._mixed is None:
            return [(names[i % len(names)], self._orders[names[i % len(names)]].sample(i // len(names))) for i in range(samples)]
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
        """Its share; where rows are padded to the longest of a micro-batch, in the first of them."""
        from launcher.data.batching import BatchSampler, RankBatchSampler, TokenBatchSampler
        from launcher.data.loader import expected_padding

        dataset, batch = self._opened[part], self._batch
        if dataset.packed:
            return f"{1 - int(dataset.sequences.lengths.sum()) / (len(dataset) * dataset.length):.1%}"
        one = {"global_batch_size": batch.global_batch_size, "rank": 0, "ranks": 1, "first_step": 0, "steps": 64}
        sampler: BatchSampler
        if batch.micro_batch_tokens is not None:
            sampler = TokenBatchSampler(
                order=self._orders[part], lengths=dataset.lengths, micro_batch_tokens=batch.micro_batch_tokens, **one
            )
        else:
            micro_batch_size = batch.micro_batch_size if isinstance(batch.micro_batch_size, int) else 1
            sampler = RankBatchSampler(order=self._orders[part], micro_batch_size=micro_batch_size, **one)
        share = expected_padding(dataset, sampler)
        return "" if share is None else f"{share:.1%}"


def _trained(data: Data, name: str) -> bool:
    return name == "train" or (isinstance(data.train, dict) and name in data.train)


def _quantiles(lengths: Any) -> dict[str, str]:
    import numpy as np

    middle, most = np.quantile(lengths, [0.5, 0.9], method="nearest").tolist()
    return {"median": f"{middle:,}", "90 % up to": f"{most:,}", "longest": f"{int(lengths.max()):,}"}


def _some(count: int) -> str:
    return f"{count:,}" if count else ""


def _lost(sequences: Any) -> str:
    return f"{sequences.cut_documents:,}  ({sequences.cut_tokens:,} tokens)" if sequences.cut_documents else ""
