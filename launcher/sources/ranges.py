"""Parts of files and hub data sets."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from launcher.sources.formats import suffixes
from launcher.sources.hub import load_data_set
from launcher.sources.location import Location
from launcher.sources.rows import SourcePart, open_parquet, read_rows
from launcher.sources.store_requests import StoreError

_LINE_AHEAD = 1 << 16
"""Bytes that are asked of a store to find the end of a line."""


def first_rows(parts: Iterable[SourcePart], limit: int) -> Iterator[SourcePart]:
    """The parts with the first `limit` rows."""
    for part in parts:
        if limit <= 0:
            return
        first = replace(part, most=limit)
        limit -= sum(1 for _ in read_rows(first))
        yield first


def split(part: SourcePart, size: int) -> list[SourcePart]:
    """The same rows in the same order, as parts of about `size` bytes.

    A .jsonl is split by lines, a .parquet by row groups, a hub data set by rows; others,
    compressed files and those of a web server that sends whole files only stay whole. Raises StoreError.
    """
    if part.form in ("jsonl", "parquet") and not part.file.has_ranges:
        return [part]
    if part.form == "jsonl" and part.size > size and not suffixes(part.name)[1]:
        cuts = [part.start, *_line_starts(part, size), part.start + part.size]
        ends: Sequence[int] = range(cuts[-1] + 1)
    elif part.form == "parquet" and part.end is None:
        ends = [0, *itertools.accumulate(_row_group_sizes(part.file))]
        cuts = [0]
        for group in range(1, len(ends)):
            if ends[group] - ends[cuts[-1]] >= size or group == len(ends) - 1:
                cuts.append(group)
    elif part.form == "hub" and part.end is None:
        rows = load_data_set(part.name, validation=part.validation)
        row_bytes = max(1, rows.data.nbytes // max(1, len(rows)))
        cuts = [*range(0, len(rows), max(1, size // row_bytes)), len(rows)]
        ends = range(0, (len(rows) + 1) * row_bytes, row_bytes)
    else:
        return [part]
    # ends[i]: bytes before unit i
    return [
        replace(part, start=start, end=end, size=ends[end] - ends[start])
        for start, end in itertools.pairwise(cuts)
        if end > start
    ] or [part]


def _line_starts(part: SourcePart, size: int) -> Iterator[int]:
    """The start of the first line after each `size` bytes."""
    at, end = part.start + size, part.start + part.size
    with part.file.open(ahead=_LINE_AHEAD) as stream:
        while at < end:
            stream.seek(at - 1)
            while (line := stream.readline(1 << 20)) and not line.endswith(b"\n"):
                pass
            if (start := stream.tell()) >= end:
                return
            yield start
            at = start + size


def _row_group_sizes(file: Location) -> list[int]:
    import pyarrow

    try:
        with open_parquet(file) as opened:
            meta = opened.metadata
    except StoreError:
        raise
    except (pyarrow.ArrowException, OSError):
        return []  # `_parquet` reports the problem
    return [meta.row_group(group).total_byte_size for group in range(meta.num_row_groups)]
