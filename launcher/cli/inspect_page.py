"""What `launcher inspect` prints."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from launcher.data.samples import Decoder, Piece
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

    def _print(self, text: Text | str = "") -> None:
        self._console.print(text, soft_wrap=not self._colours)

    def title(self, run: str, name: str, what: str) -> None:
        """Prints run and set, and how to read the samples."""
        from rich.text import Text

        self._print()
        line = Text.assemble(
            (f"{run} · {name}", "bold"), (f"   {what or 'in the order of the run'}", "dim")
        )
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

    def sample(
        self, title: str, index: int, dataset: Any, decoder: Decoder, data: Data, *, most: int
    ) -> None:
        """Prints a sample: its tokens as text, up to `most` of them, document by document."""
        from rich.text import Text

        from launcher.data.samples import pieces

        row = dataset[index]
        found = pieces(dataset.store, dataset.sequences, index, row, decoder, most=most)
        tokens = len(row["input_ids"])
        words = _describe(row, data.labels)
        if len(found) > 1:
            words.append(f"{len(found)} documents")
        if dataset.packed and tokens < dataset.length:
            words.append(f"{dataset.length - tokens:,} padding")
        name, _, part = title.partition(" · ")
        what = " · ".join([part, *words] if part else words)
        self._print()
        self._rule(Text.assemble((name, "bold"), f" · {what}"), strong=True)
        shown = 0
        for place, piece in enumerate(found):
            if shown >= most:
                break
            if place:
                self._rule(self._cyan(f"next document, {piece.tokens:,} tokens"), strong=False)
            if piece.before:
                text = f"… {piece.before:,} tokens of it stand in another sequence"
                self._print(self._cyan(text))
            self._print(self._decoded(piece))
            shown += piece.tokens
            if piece.after and shown <= most:
                cut = dataset.sequences.cut_documents
                where = "are cut off and lost" if cut else "of it stand in another sequence"
                text = f"… {piece.after:,} tokens {where}"
                self._print(Text(text, style="yellow" if cut else "cyan"))
        if tokens > most:
            text = f"… {tokens - most:,} more tokens (tokens={tokens} shows them)"
            self._print(Text(text, style="yellow"))

    def _cyan(self, text: str) -> Text:
        from rich.text import Text

        return Text(text, style="cyan")

    def _rule(self, text: Text, *, strong: bool) -> None:
        from rich.rule import Rule

        self._console.print(
            Rule(text, align="left", characters="━" if strong else "┈", style="bright_black")
        )

    def _decoded(self, piece: Piece) -> Text:
        from rich.text import Text

        text, inside = Text(), False
        for span in piece.spans:
            shown = span.text.replace("\t", "→   ").replace("\n", "↵\n")
            if self._colours:
                style = (
                    (_SPECIAL_LOSS if span.loss else _SPECIAL)
                    if span.special
                    else ("green" if span.loss else "dim")
                )
                text.append(shown, style=style)
                continue
            if span.loss != inside:
                text.append("⟦" if span.loss else "⟧")
            inside = span.loss
            text.append(shown)
        if inside:
            text.append("⟧")
        return text

    def totals(
        self, opened: dict[str, Any], weights: list[float], padding: list[str], length: int
    ) -> None:
        """Prints a table with a column for each set.

        padding: share of each set. length: data.sequence_length.
        """
        from rich import box
        from rich.table import Table

        from launcher.data.samples import statistics

        table = Table(
            box=box.SIMPLE_HEAD if len(opened) > 1 else None,
            show_header=len(opened) > 1,
            pad_edge=False,
        )
        table.add_column("", style="dim" if self._colours else "")
        for part in opened:
            table.add_column(part, justify="right" if len(opened) > 1 else "left")
        found = {
            part: statistics(dataset.store, dataset.sequences) for part, dataset in opened.items()
        }

        def row(title: str, values: list[str]) -> None:
            if any(value for value in values):
                table.add_row(title, *values)

        if weights:
            row("share of the sequences", [f"{weight / sum(weights):.1%}" for weight in weights])
        row("documents", [f"{len(one.lengths):,}" for one in found.values()])
        quantiles = [_quantiles(one.lengths) for one in found.values()]
        if len(opened) == 1:
            row(
                "tokens of a document",
                [", ".join(f"{what} {number}" for what, number in quantiles[0].items())],
            )
        else:
            for what in quantiles[0]:
                row(f"tokens of a document, {what}", [one[what] for one in quantiles])
        row(f"sequences of up to {length:,}", [f"{one.sequences:,}" for one in found.values()])
        row("tokens in them", [f"{one.tokens:,}" for one in found.values()])
        row(
            "tokens with loss",
            [
                f"{one.loss_tokens:,}  ({one.loss_tokens / one.tokens:.1%})"
                for one in found.values()
            ],
        )
        row("padding", padding)
        row(
            "documents that go on in another sequence",
            [_some(dataset.sequences.split_documents) for dataset in opened.values()],
        )
        row(
            "documents that lose their end",
            [_lost(dataset.sequences) for dataset in opened.values()],
        )
        row("rows skipped", [_some(len(dataset.skipped)) for dataset in opened.values()])
        self._print()
        self._rule_line("in all")
        self._console.print(table)

    def _rule_line(self, text: str) -> None:
        from rich.text import Text

        self._rule(Text(text, style="bold"), strong=True)

    def histogram(self, part: str, dataset: Any) -> None:
        """Prints how many documents have how many tokens."""
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
            line_text.append(
                f"{drawn:<{_BAR}}", style="yellow" if low > dataset.length else "green"
            )
            line_text.append(f" {count:>{len(f'{max(counts):,}')},}")
            self._print(line_text)

    def skipped(self, dataset: Any, most: int = 5) -> None:
        """Prints the rows that cannot be used."""
        skipped = dataset.skipped
        if skipped:
            self._print()
        for row in skipped[:most]:
            self._print(f"skipped: {row['where']}: {row['problem']}")
        if len(skipped) > most:
            self._print(
                f"... and {len(skipped) - most:,} more; a run lists them in skipped_rows.jsonl"
            )


def _describe(row: Any, labels: tuple[str, ...] | None) -> list[str]:
    """Tokens of a row, and how many carry loss, or its class."""
    tokens = len(row["input_ids"])
    words = [f"{tokens:,} tokens"]
    if "position_ids" in row:
        trained = int((row["targets"] != _IGNORED).sum())
        return [*words, f"{trained:,} with loss ({trained / max(1, tokens):.0%})"]
    label = int(row["targets"][0])
    name = f", {labels[label]}" if labels and label < len(labels) else ""
    return [*words, f"class {label}{name}"]


def _quantiles(lengths: Any) -> dict[str, str]:
    import numpy as np

    middle, most = np.quantile(lengths, [0.5, 0.9], method="nearest").tolist()
    return {
        "median": f"{middle:,}",
        "90 % up to": f"{most:,}",
        "longest": f"{int(lengths.max()):,}",
    }


def _some(count: int) -> str:
    return f"{count:,}" if count else ""


def _lost(sequences: Any) -> str:
    return (
        f"{sequences.cut_documents:,}  ({sequences.cut_tokens:,} tokens)"
        if sequences.cut_documents
        else ""
    )
