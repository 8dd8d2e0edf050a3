"""What `launcher inspect` prints."""

from __future__ import annotations

from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from launcher.data.samples import Decoder, Piece, bins, pieces, statistics
from launcher.recipe.schema import Data

_BAR = 44
_EIGHTHS = " ▏▎▍▌▋▊▉"
_SPECIAL = "black on bright_black"
_SPECIAL_LOSS = "black on green"
_IGNORED = -100


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
        row = dataset[index]
        found = pieces(dataset.store, dataset.sequences, index, row, decoder, most=most)
        tokens = len(row["input_ids"])
        name, _, part = title.partition(" · ")
        facts = [part] if part else []
        facts += _describe(row, data.labels)
        if len(found) > 1:
            facts.append(f"{len(found)} documents")
        if dataset.packed and tokens < dataset.length:
            facts.append(f"{dataset.length - tokens:,} padding")
        self._print()
        self._rule((name, "bold"), f" · {' · '.join(facts)}")
        shown = 0
        for place, piece in enumerate(found):
            if shown >= most:
                break
            if place:
                text = f"next document, {piece.tokens:,} tokens"
                self._rule((text, "cyan"), characters="┈")
            if piece.before:
                self._print(f"… {piece.before:,} tokens of it are in another sequence", "cyan")
            self._print(self._decoded(piece))
            shown += piece.tokens
            if piece.after and shown <= most:
                cut = dataset.sequences.cut_documents
                where = "are cut off" if cut else "of it are in another sequence"
                self._print(f"… {piece.after:,} tokens {where}", "yellow" if cut else "cyan")
        if tokens > most:
            text = f"… {tokens - most:,} more tokens (tokens={tokens} shows them)"
            self._print(text, "yellow")

    def _decoded(self, piece: Piece) -> Text:
        text, inside = Text(), False
        for span in piece.spans:
            shown = span.text.replace("\t", "→   ").replace("\n", "↵\n")
            if self._colours:
                plain, special = ("green", _SPECIAL_LOSS) if span.loss else ("dim", _SPECIAL)
                text.append(shown, style=special if span.special else plain)
                continue
            if span.loss != inside:
                text.append("⟦" if span.loss else "⟧")
            inside = span.loss
            text.append(shown)
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
        lengths, most = np.diff(dataset.store.offsets), dataset.length
        if not len(lengths):
            return
        edges, counts = bins(lengths, mark=most)
        width, digits = len(f"{edges[-1]:,}"), len(f"{max(counts):,}")
        self._print()
        self._rule((f"{part + ': ' if part else ''}documents by tokens", "bold"))
        marked = False
        for low, high, count in zip(edges[:-1], edges[1:], counts, strict=True):
            if low > most and not marked:
                marked = True
                line = f"{'':>{2 * width + 3}} ╌╌╌ data.sequence_length {most:,} ╌╌╌"
                self._print(line, "yellow")
            bar = count * _BAR * 8 // max(counts)
            drawn = "█" * (bar // 8) + _EIGHTHS[bar % 8].strip() or ("▏" if count else "")
            style = "yellow" if low > most else "green"
            row = (f"{low:>{width},} – {high - 1:>{width},} ", (f"{drawn:<{_BAR}}", style))
            self._print(Text.assemble(*row, f" {count:>{digits},}"))

    def skipped(self, rows: list[dict[str, str]], most: int = 5) -> None:
        """Prints the rows that cannot be used."""
        if rows:
            self._print()
        for row in rows[:most]:
            self._print(f"skipped: {row['where']}: {row['problem']}")
        if len(rows) > most:
            left = len(rows) - most
            self._print(f"... and {left:,} more; a run lists them in skipped_rows.jsonl")


def facts(dataset: Any, *, share: str, padding: str) -> dict[str, str]:
    """The totals of a set. Empty text: not shown.

    share: of the sequences of a mixture. padding: share of padding.
    """
    found, sequences = statistics(dataset.store, dataset.sequences), dataset.sequences
    median, most = np.quantile(found.lengths, [0.5, 0.9], method="nearest").tolist()
    lost = f"{sequences.cut_documents:,}  ({sequences.cut_tokens:,} tokens)"
    return {
        "share of the sequences": share,
        "documents": f"{len(found.lengths):,}",
        "tokens of a document, median": f"{median:,}",
        "tokens of a document, 90 % up to": f"{most:,}",
        "tokens of a document, longest": f"{int(found.lengths.max()):,}",
        f"sequences of up to {dataset.length:,}": f"{found.sequences:,}",
        "tokens in them": f"{found.tokens:,}",
        "tokens with loss": f"{found.loss_tokens:,}  ({found.loss_tokens / found.tokens:.1%})",
        "padding": padding,
        "documents that continue in another sequence": _some(sequences.split_documents),
        "documents that lose their end": lost if sequences.cut_documents else "",
        "rows skipped": _some(len(dataset.skipped)),
    }


def _some(count: int) -> str:
    return f"{count:,}" if count else ""


def _describe(row: Any, labels: tuple[str, ...] | None) -> list[str]:
    """Tokens of a row, and how many have a loss, or its class."""
    tokens = len(row["input_ids"])
    if "position_ids" in row:
        trained = int((row["targets"] != _IGNORED).sum())
        return [f"{tokens:,} tokens", f"{trained:,} with loss ({trained / max(1, tokens):.0%})"]
    label = int(row["targets"][0])
    name = f", {labels[label]}" if labels and label < len(labels) else ""
    return [f"{tokens:,} tokens", f"class {label}{name}"]
