"""How commands print tables and texts from files: with colors on a terminal, elsewhere plain."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from launcher.recipe.decode import shown

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text


def plain(text: str, style: str = "") -> Text:
    """A text from a file: neither markup of rich nor what a terminal obeys has an effect."""
    from rich.text import Text

    return Text("\n".join(shown(line, 4000) for line in text.splitlines()), style=style)


def make_table(columns: Sequence[str], rows: Iterable[Sequence[str | Text]]) -> Table:
    """A table for `print_parts`. The name of a right-aligned column begins with >. If no column has
    a name, there is no line with the names. Only the last column may have several lines."""
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    table.show_header = any(columns)
    for number, name in enumerate(columns, start=1):
        table.add_column(
            name.removeprefix(">"),
            justify="right" if name.startswith(">") else "left",
            no_wrap=number < len(columns),
        )
    for row in rows:
        table.add_row(*(plain(cell) if isinstance(cell, str) else cell for cell in row))
    return table


def fitting_table(
    columns: Sequence[str], rows: Sequence[Sequence[str | Text]], optional: Sequence[str]
) -> Table:
    """A table without empty columns; on a terminal that is too narrow, also without those of
    `optional`, the first ones first."""
    from rich.console import Console

    console = Console()
    kept = [n for n in range(len(columns)) if any(str(row[n]) for row in rows)]
    dropped = iter(optional)
    while True:
        table = make_table([columns[n] for n in kept], [[row[n] for n in kept] for row in rows])
        width = console.measure(table, options=console.options.update(width=1000)).maximum
        if not console.is_terminal or width <= console.width or (name := next(dropped, "")) == "":
            return table
        kept = [n for n in kept if columns[n].removeprefix(">") != name]


def print_parts(*parts: Table | Text) -> None:
    """Prints tables and texts. Lines stay whole where the output is not a terminal."""
    from rich.console import Console

    console = Console(highlight=False)
    if console.is_terminal:
        console.print(*parts, sep="\n")
        return
    console.width = 1000
    with console.capture() as captured:
        console.print(*parts, sep="\n")
    print("\n".join(line.rstrip() for line in captured.get().splitlines()))
