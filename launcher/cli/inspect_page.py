"""What `launcher inspect` prints."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from rich import box
from rich.console import Console
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from launcher.data.tokenizer import hugging_face_tokenizer
from launcher.models.chunked_loss import IGNORED
from launcher.recipe.schema import Data

_BAR = 44
_EIGHTHS = " ▏▎▍▌▋▊▉"
_SPECIAL = "black on bright_black"
_SPECIAL_LOSS = "black on green"
_SYMBOLS: dict[int, str] = {
    **{code: chr(0x2400 + code) for code in range(0x20)},
    **{code: f"<{code:02x}>" for code in range(0x80, 0xA0)},
    ord("\n"): "↵\n",
    ord("\t"): "→   ",
    0x7F: "␡",
}
"""How control characters are shown."""


class Span(NamedTuple):
    """Consecutive tokens of one sort, as text."""

    text: str
    loss: bool
    """The tokens are targets."""
    special: bool


class Decoder(NamedTuple):
    """Ids to text."""

    text: Callable[[Sequence[int]], str]
    special: frozenset[int]


def load_decoder(tokenizer: str | None) -> Decoder:
    """tokenizer: `bytes`, a folder or a hub id; None shows ids as numbers."""
    if tokenizer is None:
        return Decoder(lambda ids: "".join(f"{token} " for token in ids), frozenset())
    loaded = hugging_face_tokenizer(tokenizer)

    def text(ids: Sequence[int]) -> str:
        parts = []
        for known, group in itertools.groupby(ids, key=lambda token: token < len(loaded)):
            if known:
                options = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
                parts.append(str(loaded.decode(list(group), **options)))
            else:  # token rows may hold any id
                parts += [f"<{token}>" for token in group]
        return "".join(parts)

    return Decoder(text, frozenset(loaded.all_special_ids))


def spans(ids: Sequence[int], loss: Sequence[bool], decoder: Decoder) -> Iterator[Span]:
    """Runs of tokens with and without loss; a special token is a run of its own."""
    sorts = [
        (learned, place if token in decoder.special else None)
        for place, (token, learned) in enumerate(zip(ids, loss, strict=True))
    ]
    end, before = 0, ""
    for (learned, special), run in itertools.groupby(sorts):
        end += len(list(run))
        # The text of a token may depend on those before it, so all of them are decoded
        whole = decoder.text(ids[:end])
        if end < len(ids):
            whole = whole.rstrip("\ufffd")  # the first half of a character; the next span has it
        yield Span(whole[len(before) :].translate(_SYMBOLS), learned, special is not None)
        before = whole


class Page:
    """Prints samples and totals: in colour on a terminal, with brackets elsewhere."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._colours = (
            console.is_terminal and console.color_system is not None and not console.no_color
        )

    def _print(self, text: Text | str = "", style: str = "") -> None:
        self._console.print(text, style=style, soft_wrap=not self._colours)

    def _rule(self, *parts: str | tuple[str, str], characters: str = "━") -> None:
        title = Text.assemble(*parts)
        rule = Rule(title, align="left", characters=characters, style="bright_black")
        self._console.print(rule)

    def title(self, run: str, name: str, what: str) -> None:
        """Prints run and set, and how to read the samples."""
        self._print()
        order = f"   {what or 'in the order of the run'}"
        self._print(Text.assemble((f"{run} · {name}", "bold"), (order, "dim")))
        if not self._colours:
            self._print("⟦tokens with loss⟧, and tokens without")
            return
        special = (("<special>", _SPECIAL_LOSS), " ", ("<special>", _SPECIAL))
        names = (("  loss ", "green"), ("  no loss  ", "dim"))
        self._print(Text.assemble(*names, *special, ("  with and without", "dim")))

    def sample(
        self, title: str, index: int, dataset: Any, decoder: Decoder, data: Data, *, most: int
    ) -> None:
        """Prints a sample: its tokens as text, up to `most` of them, document by document."""
        row, store = dataset[index], dataset.store
        pieces, ids = list(dataset.pieces(index)), row["input_ids"]
        name, _, part = title.partition(" · ")
        facts = [part] if part else []
        facts += _describe(row, data.labels)
        if len(pieces) > 1:
            facts.append(f"{len(pieces)} documents")
        if dataset.packed and len(ids) < dataset.length:
            facts.append(f"{dataset.length - len(ids):,} padding")
        self._print()
        self._rule((name, "bold"), f" · {' · '.join(facts)}")
        shown = 0
        for document, start, end in pieces:
            if shown >= most:
                break
            if shown:
                self._rule((f"next document, {end - start:,} tokens", "cyan"), characters="┈")
            before = start - int(store.offsets[document])
            after = int(store.offsets[document + 1]) - end
            if before:
                self._print(f"… {before:,} tokens of it are in another sequence", "cyan")
            # A token has loss if it is a target of the one before, maybe in another sequence
            loss = [before > 0 and (store.labels is None or store.labels[start] != IGNORED)]
            if "position_ids" in row:
                loss += (row["targets"][shown : shown + end - start - 1] != IGNORED).tolist()
            else:
                loss = [False] * (end - start)
            decoded = ids[shown : min(most, shown + end - start)].tolist()
            self._print(self._decoded(spans(decoded, loss[: len(decoded)], decoder)))
            shown += end - start
            if after and shown <= most:
                cut = dataset.sequences.cut_documents
                where = "are cut off" if cut else "of it are in another sequence"
                self._print(f"… {after:,} tokens {where}", "yellow" if cut else "cyan")
        if len(ids) > most:
            text = f"… {len(ids) - most:,} more tokens (tokens={len(ids)} shows them)"
            self._print(text, "yellow")

    def _decoded(self, found: Iterator[Span]) -> Text:
        text, inside = Text(), False
        for span in found:
            if self._colours:
                plain, special = ("green", _SPECIAL_LOSS) if span.loss else ("dim", _SPECIAL)
                text.append(span.text, style=special if span.special else plain)
                continue
            if span.loss != inside:
                text.append("⟦" if span.loss else "⟧")
            inside = span.loss
            text.append(span.text)
        return text.append("⟧") if inside else text

    def totals(self, columns: dict[str, dict[str, str]]) -> None:
        """Prints a table with a column of `facts` per set."""
        several = len(columns) > 1
        style = box.SIMPLE_HEAD if several else None
        table = Table(box=style, show_header=several, pad_edge=False)
        table.add_column("", style="dim" if self._colours else "")
        for part in columns:
            table.add_column(part, justify="right" if several else "left")
        for name in next(iter(columns.values())):
            values = [column[name] for column in columns.values()]
            if any(values):
                table.add_row(name, *values)
        self._print()
        self._rule(("in all", "bold"))
        self._console.print(table)

    def histogram(self, part: str, dataset: Any) -> None:
        """Prints how many documents have how many tokens."""
        most = dataset.length
        rows = bins(np.diff(dataset.store.offsets), mark=most)
        width, largest = len(f"{rows[-1][1]:,}"), max(count for _, _, count in rows)
        self._print()
        self._rule((f"{part + ': ' if part else ''}documents by tokens", "bold"))
        for low, high, count in rows:
            if low == most + 1:
                line = f"{'':>{2 * width + 3}} ╌╌╌ data.sequence_length {most:,} ╌╌╌"
                self._print(line, "yellow")
            bar = count * _BAR * 8 // largest
            drawn = "█" * (bar // 8) + _EIGHTHS[bar % 8].strip() or ("▏" if count else "")
            style = "yellow" if low > most else "green"
            row = (f"{low:>{width},} – {high:>{width},} ", (f"{drawn:<{_BAR}}", style))
            self._print(Text.assemble(*row, f" {count:>{len(f'{largest:,}')},}"))

    def skipped(self, rows: list[dict[str, str]], most: int = 5) -> None:
        """Prints the rows that cannot be used."""
        if rows:
            self._print()
        for row in rows[:most]:
            self._print(f"skipped: {row['where']}: {row['problem']}")
        if len(rows) > most:
            left = len(rows) - most
            self._print(f"... and {left:,} more; a run lists them in skipped_rows.jsonl")


def bins(lengths: npt.NDArray[Any], *, mark: int) -> list[tuple[int, int, int]]:
    """A histogram: first length, last length and count of each bin. Bins end at powers of two and
    at `mark`."""
    powers = range(int(lengths.max() - 1).bit_length() + 1)
    ends = sorted({mark, *(2**power for power in powers)})
    counts = np.bincount(np.searchsorted(ends, lengths), minlength=len(ends)).tolist()
    rows = list(zip([1, *(end + 1 for end in ends)], ends, counts, strict=False))
    used = [number for number, count in enumerate(counts) if count]
    return rows[used[0] : used[-1] + 1]


def facts(dataset: Any, *, padding: str) -> dict[str, str]:
    """The totals of a set. Empty text: not shown. padding: share of padding."""
    store, sequences = dataset.store, dataset.sequences
    lengths, tokens, with_loss = np.diff(store.offsets), dataset.tokens, tokens_with_loss(dataset)
    median, most = np.quantile(lengths, [0.5, 0.9], method="nearest").tolist()
    lost = f"{sequences.cut_documents:,}  ({sequences.cut_tokens:,} tokens)"
    return {
        "documents": f"{len(lengths):,}",
        "tokens of a document, median": f"{median:,}",
        "tokens of a document, 90 % up to": f"{most:,}",
        "tokens of a document, longest": f"{int(lengths.max()):,}",
        f"sequences of up to {dataset.length:,}": f"{len(sequences):,}",
        "tokens in them": f"{tokens:,}",
        "tokens with loss": f"{with_loss:,}  ({with_loss / tokens:.1%})",
        "padding": padding,
        "documents that continue in another sequence": _some(sequences.split_documents),
        "documents that lose their end": lost if sequences.cut_documents else "",
        "rows skipped": _some(len(dataset.skipped)),
    }


def tokens_with_loss(dataset: Any) -> int:
    """Targets in all sequences."""
    store, sequences = dataset.store, dataset.sequences
    # The targets of a piece are the tokens after each of its own, within the document
    first = sequences.starts + 1
    ends = store.offsets[np.searchsorted(store.offsets, sequences.starts, side="right")]
    last = np.minimum(first + sequences.lengths, ends)
    if store.labels is None:
        return int((last - first).sum())
    # 32 bits may overflow; the differences are still right
    trained = np.cumsum(store.labels != IGNORED, dtype=np.uint32)
    return int((trained[last - 1] - trained[first - 1]).sum())


def _some(count: int) -> str:
    return f"{count:,}" if count else ""


def _describe(row: Any, labels: tuple[str, ...] | None) -> list[str]:
    """Tokens of a row, and how many have a loss, or its class."""
    tokens = len(row["input_ids"])
    if "position_ids" in row:
        trained = int((row["targets"] != IGNORED).sum())
        return [f"{tokens:,} tokens", f"{trained:,} with loss ({trained / max(1, tokens):.0%})"]
    label = int(row["targets"][0])
    name = f", {labels[label]}" if labels and label < len(labels) else ""
    return [f"{tokens:,} tokens", f"class {label}{name}"]
