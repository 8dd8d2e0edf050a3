"""What `launcher inspect` prints."""

from __future__ import annotations

import base64
import html as html_text
import io
import itertools
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from rich.console import Console
from rich.rule import Rule
from rich.style import Style
from rich.text import Text

from launcher.cli.tables import make_table, plain
from launcher.data.batching import NO_SAMPLE, Blend, make_batch_sampler
from launcher.data.dataset import MixtureDataset, SequenceDataset
from launcher.data.loader import expected_padding
from launcher.data.opening import blend_of_sequences, make_order, open_dataset
from launcher.data.problems import causes
from launcher.data.streaming import StreamingDataset
from launcher.data.tokenizer import hugging_face_tokenizer, tokenizer_name
from launcher.errors import RecipeError
from launcher.models.micro_batch import IGNORED
from launcher.objectives.base import count_attachments, dataset_objective
from launcher.objectives.make import make_objective
from launcher.planner.sizes import traits_from_recipe
from launcher.recipe.data_sets import DataFiles
from launcher.recipe.schema import Batch, Recipe
from launcher.sources.layouts import ATTACHMENTS
from launcher.training.model import width_multiple

if TYPE_CHECKING:
    import PIL.Image

_WIDTH = 120
_STREAMED = 1000
"""Rows of a stream that are inspected."""
_BAR = 44
_THUMBNAIL, _STRIP = 240, 720
"""Most pixels of a side of a picture in the HTML page."""
_HTML = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>{title}</title>
<style>
{{stylesheet}}
body {{{{ margin: 16px; color: {{foreground}}; background: {{background}}; }}}}
pre {{{{ max-width: 120ch; white-space: pre-wrap; overflow-wrap: anywhere;
  font: 13px/1.45 ui-monospace, monospace; }}}}
img {{{{ display: block; max-width: 100%; margin: 6px 0 2px; }}}}
</style>
</head>
<body><pre>{{code}}</pre></body>
</html>
"""
"""The page as rich fills it; `title` is filled first."""
_MEASURED = {
    "documents": "a document",
    "answers": "an answer",
    "pairs": "the longer answer with the prompt",
    "queries": "the longest text of a row",
}
"""What lengths are of, by what the rows are."""
"""What data.sequence_length limits of a pair."""
_SYMBOLS: dict[int, str] = {
    **{code: chr(0x2400 + code) for code in range(0x20)},
    **{code: f"<{code:02x}>" for code in range(0x80, 0xA0)},
    ord("\n"): "↵\n",
    ord("\t"): "→   ",
    0x7F: "␡",
}
"""How control characters are shown."""


def print_page(
    recipe: Recipe,
    name: str,
    sets: dict[str, DataFiles],
    *,
    samples: int,
    tokens: int,
    html: Path | None = None,
) -> None:
    """Prints samples, totals and histograms of sets, which are given by their names. html: a file
    to which they are also written, with pictures. Raises RecipeError."""
    data, seed = recipe.data, recipe.run.seed
    opened = {part: _open(recipe, files) for part, files in sets.items()}
    validates = any(files.validation or files.held_out for files in sets.values())
    shuffle, several = data.shuffle and not validates, len(opened) > 1
    blend = Blend((1.0,) * len(opened)) if several else None  # of validation sets: in turn
    mixed = name == "train" and isinstance(data.train, dict)
    if mixed:
        blend = blend_of_sequences(opened, data)
    page = Page(as_html=html is not None)
    streamed = f"the first {_STREAMED:,} rows" if data.streaming else "in the order of the run"
    page.title(
        f"{recipe.run.name} · {name}",
        "validation" if validates else streamed,
        marks=all(dataset_objective(each).predicts_tokens for each in opened.values()),
        weighted=any(dataset.store.weights is not None for dataset in opened.values()),
    )
    name_of_tokenizer = tokenizer_name(data, recipe.model)
    decoder = load_decoder(data.tokenizer and name_of_tokenizer, name_of_tokenizer)
    size = recipe.batch.global_batch_size
    order = _order(opened, blend, seed, shuffle=shuffle, step_samples=size)
    shown = itertools.islice(order, samples)
    for number, (part, index) in enumerate(shown, start=1):
        heading = [f"sample {number}", part] if several else [f"sample {number}"]
        page.sample(heading, index, opened[part], decoder, data.labels, most=tokens)
    shares = MixtureDataset(opened, blend).shares
    page.totals(
        {
            part: {f"share of the {data.batch_unit}": f"{share:.1%}" if mixed else ""}
            | _facts(dataset, padding=_padding(dataset, recipe, shuffle=shuffle))
            for (part, dataset), share in zip(opened.items(), shares, strict=True)
        }
    )
    for part, dataset in opened.items():
        page.histogram(f"{part}: " if several else "", dataset)
        page.lines(dataset.notes)
        page.skipped(dataset.skipped)
    if html is not None:
        page.write(html, f"{recipe.run.name} · {name}")


def _open(recipe: Recipe, files: DataFiles) -> SequenceDataset:
    """Tokenizes a set. Of a stream, the first rows are a shard."""
    data, model = (
        files.data,
        replace(traits_from_recipe(recipe), width_multiple=_width_multiple(recipe)),
    )
    tokenizer, patterns = tokenizer_name(data, recipe.model), files.patterns
    objective = make_objective(replace(recipe, data=data), trained=False).for_validation()
    if not (files.validation or files.held_out):
        objective = objective.with_seed(recipe.run.seed)  # of the first epoch
    if files.validation or not data.streaming:
        opened = open_dataset(
            data,
            patterns,
            objective=objective,
            tokenizer=tokenizer,
            model=model,
            build=True,
            validation=files.validation,
            held_out=files.held_out,
        )
        assert not isinstance(opened, MixtureDataset)  # of one set
        return opened
    stream = StreamingDataset(
        replace(data, limit=min(data.limit or _STREAMED, _STREAMED)),
        objective=objective,
        tokenizer=tokenizer,
        model=model,
        seed=recipe.run.seed,
        build=True,
    )
    first = stream.held_out(objective) if files.held_out else stream.shard(0).dataset
    assert not isinstance(first, MixtureDataset)
    return first


def _order(
    opened: dict[str, SequenceDataset],
    blend: Blend | None,
    seed: int,
    *,
    shuffle: bool,
    step_samples: int,
) -> Iterator[tuple[str, int]]:
    """Set and index of each sample in the order of the run; of several sets in turn."""
    mixture = MixtureDataset(opened, blend)
    order = make_order(mixture, seed=seed, shuffle=shuffle, epochs=None, step_samples=step_samples)
    drawn = map(order.sample, itertools.count())
    return map(mixture.locate, itertools.takewhile(lambda sample: sample != NO_SAMPLE, drawn))


def _width_multiple(recipe: Recipe) -> int:
    """That of the run's rows, if it trains here."""
    cuda = recipe.run.device == "cuda" or (
        recipe.run.device == "auto" and torch.cuda.is_available()
    )
    return width_multiple(torch.device("cuda" if cuda else "cpu"))


def _padding(dataset: SequenceDataset, recipe: Recipe, *, shuffle: bool) -> str:
    """Share of padding; estimated over 64 micro-batches if rows are padded to the longest."""
    if dataset.packed:
        return f"{1 - dataset.tokens / (len(dataset) * dataset.length):.1%}"
    batch = recipe.batch
    if batch.micro_batch_size == "auto":
        batch = Batch(global_batch_size=batch.global_batch_size, micro_batch_size=1)
    order = make_order(
        dataset,
        seed=recipe.run.seed,
        shuffle=shuffle,
        epochs=None,
        similar_lengths=recipe.data.similar_lengths,
    )
    joined = dataset.length if dataset.joined else None
    sampler = make_batch_sampler(
        batch,
        order=order,
        lengths=dataset.lengths,
        width=dataset.width,
        joined=joined,
        steps=64,
    )
    return f"{expected_padding(dataset, sampler):.1%}"


class Decoder(NamedTuple):
    """Turns ids into text."""

    text: Callable[[Sequence[int]], str]
    special: frozenset[int]


def load_decoder(tokenizer: str | None, model: str | None = None) -> Decoder:
    """The decoder of data.tokenizer, or of the tokenizer in model.path. Without either, as token
    rows may be, it shows ids as numbers."""
    loaded: Any = None
    try:
        loaded = hugging_face_tokenizer(tokenizer or model) if tokenizer or model else None
    except RecipeError:
        if tokenizer is not None:
            raise
    if loaded is None:
        return Decoder(lambda ids: "".join(f"{token} " for token in ids), frozenset())

    def text(ids: Sequence[int]) -> str:
        parts = []
        for known, group in itertools.groupby(ids, key=lambda token: token < len(loaded)):
            if known:
                options = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
                parts.append(str(loaded.decode(list(group), **options)))
            else:  # token rows may hold any id
                parts += [f"<{token}>" for token in group]
        return "".join(parts)

    added = loaded.added_tokens_decoder.items()
    special = {number for number, token in added if token.special}
    return Decoder(text, frozenset({*loaded.all_special_ids, *special}))


class Span(NamedTuple):
    """Consecutive tokens of one sort, as text."""

    text: str
    loss: bool
    """The tokens are targets."""
    special: bool
    weight: float = 1.0
    """Of each target in the loss."""


def spans(
    ids: Sequence[int],
    loss: Sequence[bool],
    decoder: Decoder,
    weights: Sequence[float] | None = None,
) -> Iterator[Span]:
    """Spans of tokens with and without loss, and of one weight; a special token is a span of its own,
    and so are equal ones in a row, such as those of an attachment. weights: of the targets; None: 1."""
    sorts = [
        (learned, token if token in decoder.special else None, weight if learned else 1.0)
        for token, learned, weight in zip(ids, loss, weights or [1.0] * len(ids), strict=True)
    ]
    end, before = 0, ""
    for (learned, special, weight), run in itertools.groupby(sorts):
        count = len(list(run))
        end += count
        # The text of a token may depend on those before it, so all of them are decoded
        whole = decoder.text(ids[:end])
        if end < len(ids):
            whole = whole.rstrip("\ufffd")  # the first half of a character; the next span has it
        text = whole[len(before) :]
        if special is not None and count > 1:
            text = f"{text[: len(text) // count]}×{count:,}"
        yield Span(text.translate(_SYMBOLS), learned, special is not None, weight)
        before = whole


def _marked(all_spans: Iterator[Span]) -> Text:
    """Tokens with loss in brackets, after their weight if it is not 1; on a terminal also in color."""
    text = Text()
    for (loss, weight), group in itertools.groupby(all_spans, key=lambda s: (s.loss, s.weight)):
        color = "green" if weight == 1 else "yellow" if weight < 1 else "magenta"
        usual, special = (color, f"black on {color}") if loss else ("dim", "black on white")
        text.append("⟦" if loss else "")
        if weight != 1:
            text.append(f"{weight:g}×", style=f"bold {color}")
        for span in group:
            text.append(span.text, style=special if span.special else usual)
        text.append("⟧" if loss else "")
    return text


class Page:
    """Prints with colors on a terminal, at most 120 characters wide."""

    def __init__(self, *, as_html: bool) -> None:
        """as_html: `write` will be called."""
        width = None if sys.stdout.isatty() else _WIDTH
        plain_text: dict[str, Any] = {"highlight": False, "emoji": False, "markup": False}
        self._console = Console(width=width, **plain_text)
        self._console.width = min(self._console.width, _WIDTH)
        self._html: Console | None = None
        if as_html:
            self._html = Console(width=_WIDTH, record=True, file=io.StringIO(), **plain_text)

    def _print(self, text: Text | str = "", style: str = "") -> None:
        for console in filter(None, (self._console, self._html)):
            console.print(text, style=style, soft_wrap=True)

    def _rule(self, *parts: str | tuple[str, str], characters: str = "━") -> None:
        title = Text.assemble(*parts)
        rule = Rule(title, align="left", characters=characters, style="bright_black")
        self._console.print(rule)
        if self._html is not None:  # whose width is not known
            self._html.print(title, soft_wrap=True)

    def write(self, file: Path, title: str) -> None:
        """Writes what was printed as an HTML page. Raises RecipeError."""
        assert self._html is not None
        escaped = html_text.escape(title).replace("{", "{{").replace("}", "}}")
        text = self._html.export_html(code_format=_HTML.format(title=escaped))
        # rich knows links, but no pictures
        link = r'<a class="\w+" href="(data:image[^"]*)">(.*?)</a>'
        text = re.sub(link, r'<img src="\1" alt="">\2', text)
        try:
            file.write_text(text, encoding="utf-8")
        except OSError as error:
            problem = f"command line: {file}: cannot be written: {error.strerror}"
            raise RecipeError(problem) from None

    def title(self, title: str, what: str, *, marks: bool = True, weighted: bool = False) -> None:
        """Prints what is inspected. marks: tokens with loss are marked. weighted: with weights."""
        self._print()
        self._print(Text.assemble((title, "bold"), (f"   {what}", "dim")))
        if marks:
            line = Text.assemble(("⟦tokens with loss⟧", "green"), ", ")
            if weighted:
                line.append("⟦0.5×those with half the weight⟧", style="yellow").append(", ")
            self._print(line.append("and tokens without"))

    def part(self, heading: Sequence[str]) -> None:
        """Prints a heading."""
        name, *facts = heading
        self._print()
        self._rule((name, "bold"), f" · {' · '.join(facts)}" if facts else "")

    def line(self, line: str, picture: PIL.Image.Image | None = None, color: str = "") -> None:
        """Prints a line; the HTML page has the picture above it."""
        self._console.print(line, style=color, soft_wrap=True)
        if self._html is not None:
            link = None if picture is None else _data_uri(picture)
            self._html.print(line, style=Style(color=color or None, link=link), soft_wrap=True)

    def sample(
        self,
        heading: list[str],
        index: int,
        dataset: SequenceDataset,
        decoder: Decoder,
        labels: tuple[str, ...] | None,
        *,
        most: int,
    ) -> None:
        """Prints up to `most` tokens of a sample as text, document by document."""
        row, store = dataset[index], dataset.store
        if "error" in row:  # an attachment has changed since its row was tokenized
            raise RecipeError(f"data: {row['error']}")
        pieces, ids = list(dataset.pieces(index)), row["input_ids"]
        facts = _describe(row, labels)
        if len(pieces) > 1 or "answers" in row:
            facts.append(f"{len(pieces)} {dataset.unit}")
        if dataset.packed and len(ids) < dataset.length:
            facts.append(f"{dataset.length - len(ids):,} padding")
        self.part([*heading, *facts])
        shown = 0
        for document, start, end in pieces:
            if shown >= most:
                break
            if shown:
                what = f"next {dataset.unit.removesuffix('s')}, {end - start:,} tokens"
                self._rule((what, "cyan"), characters="┈")
            before = start - int(store.offsets[document])
            after = int(store.offsets[document + 1]) - end
            if before:
                self._print(f"… {before:,} tokens of it come before these", "cyan")
            objective = dataset_objective(dataset)
            loss = objective.marks(dataset, row, start, end)
            weights = None
            if store.weights is not None and objective.predicts_tokens:
                weights = store.weights[start:end].tolist()
            first = 0
            for part, end_of_part in objective.parts(dataset, document):
                last = min(end_of_part - before, end - start)
                if part and shown + first < most:
                    self._print(f"{part}:", "cyan")
                decoded = ids[shown + first : min(most, shown + last)].tolist()
                here = slice(first, first + len(decoded))
                of_part = None if weights is None else weights[here]
                self._print(_marked(spans(decoded, loss[here], decoder, of_part)))
                first = last
            shown += end - start
            for one in store.attachments_between(start, end):
                self.line(*one.shown(), "cyan")
            if after and shown <= most:
                cut = dataset.sequences.cut_documents
                where = "are cut off" if cut else "of it come after these"
                self._print(f"… {after:,} tokens {where}", "yellow" if cut else "cyan")
        if len(ids) > most:
            text = f"… {len(ids) - most:,} more tokens (tokens={len(ids)} shows them)"
            self._print(text, "yellow")

    def totals(self, columns: dict[str, dict[str, str]]) -> None:
        """Prints the `_facts` of each set."""
        names = [""]
        if len(columns) > 1:
            names = [f">{part}" for part in columns]
        rows: list[Sequence[str | Text]] = [
            (plain(name, "dim"), *(facts[name] for facts in columns.values()))
            for name in next(iter(columns.values()))
            if any(facts[name] for facts in columns.values())
        ]
        self._print()
        self._rule(("in all", "bold"))
        for console in filter(None, (self._console, self._html)):
            console.print(make_table(["", *names], rows))

    def histogram(self, part: str, dataset: SequenceDataset) -> None:
        """Prints how many documents have how many tokens."""
        most = dataset.text_length
        rows = bins(dataset.document_lengths, mark=most)
        width, largest = len(f"{rows[-1][1]:,}"), max(count for _, _, count in rows)
        self._print()
        longest = dataset.unit in ("pairs", "queries")
        by = f"tokens of {_MEASURED[dataset.unit]}" if longest else "tokens"
        self._rule((f"{part}{dataset.unit} by {by}", "bold"))
        for low, high, count in rows:
            if low == most + 1:
                line = f"{'':>{2 * width + 3}} ╌╌╌ data.sequence_length {most:,} ╌╌╌"
                self._print(line, "yellow")
            drawn = "█" * (count * _BAR // largest) or ("▏" if count else "")
            style = "yellow" if low > most else "green"
            row = (f"{low:>{width},} – {high:>{width},} ", (f"{drawn:<{_BAR}}", style))
            self._print(Text.assemble(*row, f" {count:>{len(f'{largest:,}')},}"))

    def lines(self, lines: Sequence[str]) -> None:
        """Prints lines."""
        for line in lines:
            self._print(line)

    def skipped(self, rows: list[dict[str, str]]) -> None:
        """Prints how many rows cannot be used, by cause."""
        if rows:
            self._print(f"{len(rows):,} rows are skipped; a run lists them in skipped_rows.jsonl:")
        for line in causes(rows):
            self._print(f"  {line}")


def bins(lengths: npt.NDArray[np.integer[Any]], *, mark: int) -> list[tuple[int, int, int]]:
    """A histogram: first length, last length and count of each bin. Bins end at powers of two and
    at `mark`."""
    powers = range(int(lengths.max() - 1).bit_length() + 1)
    ends = sorted({mark, *(2**power for power in powers)})
    counts = np.bincount(np.searchsorted(ends, lengths), minlength=len(ends)).tolist()
    starts = [1] + [end + 1 for end in ends[:-1]]
    rows = list(zip(starts, ends, counts, strict=True))
    used = [number for number, count in enumerate(counts) if count]
    return rows[used[0] : used[-1] + 1]


def _facts(dataset: SequenceDataset, *, padding: str) -> dict[str, str]:
    """The totals of a set. Empty text: not shown."""
    sequences, lengths = dataset.sequences, dataset.document_lengths
    tokens, with_loss = dataset.tokens, ""
    if dataset_objective(dataset).targets_are_fixed:
        trained = sequences.targets
        with_loss = f"{trained:,}  ({trained / tokens:.1%})"
    none = dict.fromkeys(ATTACHMENTS.values(), (0, 0))
    attachments = none | count_attachments(dataset)
    median, most = np.quantile(lengths, [0.5, 0.9], method="nearest").tolist()
    many = dataset.unit
    measured = _MEASURED[many]
    sequences_of = {f"sequences of up to {dataset.length:,}": f"{len(sequences):,}"}
    if many != "documents":  # each of which is a sample
        sequences_of = {f"{many} that are trained": f"{len(sequences):,}"}
    lost = f"{sequences.cut_documents:,}  ({sequences.cut_tokens:,} tokens)"
    return {
        many: f"{len(lengths):,}",
        f"tokens of {measured}, median": f"{median:,}",
        f"tokens of {measured}, 90 % up to": f"{most:,}",
        f"tokens of {measured}, longest": f"{int(lengths.max()):,}",
        **sequences_of,
        "tokens in them": f"{tokens:,}",
        "tokens with loss": with_loss,
        **{
            nouns: f"{used:,}" if used or lost else ""
            for nouns, (used, lost) in attachments.items()
        },
        "padding": padding,
        "documents that continue in another sequence": _some(sequences.split_documents),
        "documents that lose their end": lost if sequences.cut_documents else "",
        **{
            f"{nouns} that are dropped or cut off": _some(lost)
            for nouns, (_, lost) in attachments.items()
        },
        f"{many} without loss, dropped": _some(sequences.dropped_documents),
        f"{dataset.unit} longer than a sequence, dropped": _some(sequences.long_documents),
        "rows skipped": _some(len(dataset.skipped)),
    }


def _data_uri(picture: PIL.Image.Image) -> str:
    """A small copy of a picture, for a page."""
    picture, stream = picture.copy(), io.BytesIO()
    strip = picture.width > 3 * picture.height
    picture.thumbnail((_STRIP if strip else _THUMBNAIL, _THUMBNAIL))
    picture.save(stream, format="PNG")
    return f"data:image/png;base64,{base64.b64encode(stream.getvalue()).decode()}"


def _some(count: int) -> str:
    return f"{count:,}" if count else ""


def _describe(row: Any, labels: tuple[str, ...] | None) -> list[str]:
    """Tokens of a row, and how many have a loss, or its class."""
    tokens = len(row["input_ids"])
    if "hashes" in row:
        return [f"{tokens:,} tokens", f"{len(row['hashes'])} texts"]
    if "position_ids" in row:
        trained = int((row["targets"] != IGNORED).sum())
        return [f"{tokens:,} tokens", f"{trained:,} with loss ({trained / max(1, tokens):.0%})"]
    label = int(row["targets"][0])
    name = f", {labels[label]}" if labels and label < len(labels) else ""
    return [f"{tokens:,} tokens", f"class {label}{name}"]
