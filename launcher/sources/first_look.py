"""What the first row of data says about it: the kind of the rows, and why they cannot be used.

A recipe without data.kind has the kind of its first row. This module does not import torch.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from launcher.errors import suggestion
from launcher.sources.finding import first_row
from launcher.sources.layouts import guess, lost_meaning, no_layout


@dataclass(frozen=True)
class FirstLook:
    """What is seen of data before it is read."""

    kind: str | None
    """data.kind of the first row, or of the named columns where no row can be seen; None: unknown."""
    file: str | None = None
    """The file of the first row; None: no row can be seen."""
    problem: str | None = None
    """Why its rows cannot be used."""


def look_at(
    files: Sequence[str],
    named: Mapping[str, str],
    *,
    kinds: Collection[str],
    ignored: Collection[str],
    to_check: Collection[str],
    attachments: Collection[str],
    hub: bool,
) -> FirstLook:
    """Looks at the first row that files (patterns, or data sets of the hub) name.

    named: the column of each role that the recipe names. kinds: those that the objective learns
    from. ignored: data.ignore_columns; to_check: those of them that the row must have.
    attachments: the kinds that the run sees. hub: also fetch a data set of the hub. Raises
    RecipeError as `first_row`.
    """
    first = first_row(files, hub=hub)
    if first is None:
        found = guess(dict.fromkeys(named.values()), named, kinds=kinds) if named else None
        return FirstLook(None if found is None else found.layout.kind)
    file, row = first
    found = guess(row, named, kinds=kinds, ignored=ignored)
    if found is None:
        return FirstLook(None, file, no_layout(row, named, ignored=ignored))
    problem = lost_meaning(row, found, ignored, attachments=attachments)
    for column in () if problem else to_check:
        near = suggestion(column, row)
        # Rows of a .jsonl file may have other columns than the first: only a misspelt name is wrong
        if column not in row and (near or ".json" not in file):
            problem = f"data.ignore_columns names a column that is not there: {column}{near}; "
            problem += f"columns: {', '.join(map(str, row))}"
            break
    return FirstLook(found.layout.kind, file, problem)
