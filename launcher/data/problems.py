"""Messages about rows that cannot be used: the first ones, and how many there are by cause."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

SHOWN = 5
"""Rows, and causes, that a message lists."""


def problem_lines(
    skipped: Sequence[dict[str, str]], *, rows: int | None, complete: bool = True
) -> Iterator[str]:
    """The first rows with their problems; if there are more, then the number of rows by cause.

    skipped: `where` and `problem` of each. rows: that were read; None: not known. complete: these
    are all rows.
    """
    for row in skipped[:SHOWN]:
        yield f"{row['where']}: {row['problem']}"
    if len(skipped) > SHOWN:
        of = ""
        if rows is not None:
            of = f" of {rows:,}" if complete else f" of the first {rows:,}"
        skip = " (data.on_error=skip leaves them out)"
        yield f"{len(skipped):,}{of} rows cannot be used{'' if len(skipped) == rows else skip}:"
        yield from (f"  {line}" for line in causes(skipped))


def causes(skipped: Sequence[dict[str, str]]) -> Iterator[str]:
    """The number of rows with each cause, the most frequent first, each with its first row."""
    counts: dict[str, int] = {}
    first: dict[str, dict[str, str]] = {}
    for row in skipped:
        cause = re.sub(r"\d[\d,.]*", "0", row["problem"])  # lines, positions and lengths differ
        counts[cause] = counts.get(cause, 0) + 1
        first.setdefault(cause, row)
    ordered = sorted(counts, key=lambda cause: -counts[cause])
    for cause in ordered[:SHOWN]:
        row = first[cause]
        yield f"{counts[cause]:,} like {row['where']}: {row['problem']}"
    if others := ordered[SHOWN:]:
        yield f"{sum(counts[cause] for cause in others):,} with {len(others):,} other causes"
