"""Files and hub data sets into rows: which files a pattern means, how a large one is divided, and what is in it.

A row that cannot be read is still a row: it carries its problem, so that the reader decides whether to go on.
"""

from __future__ import annotations

import csv
import glob
import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from launcher.errors import RecipeError
from launcher.recipe.hub import is_hub_id, load_data_set

ROW_FILES = (".jsonl", ".json", ".parquet", ".csv")
"""Files of rows. Every other file is one document."""

_NOT_TEXT = {
    ".pyc",
    ".so",
    ".png",
    ".jpg",
    ".gif",
    ".zip",
    ".gz",
    ".safetensors",
    ".bin",
    ".npy",
    ".exe",
    ".a",
    ".o",
}
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class Part:
    """A file or hub data set, or a run of its rows."""

    name: str
    """Path, or hub id with its split."""
    form: Literal["text", "jsonl", "json", "parquet", "csv", "hub"]
    start: int = 0
    """Of .jsonl: a byte, where a line starts; of .parquet: a row group; of a hub data set: a row. Others are whole."""
    end: int | None = None
    """The same, excluded; None: the end."""
    size: int = 0
    """Bytes, about; of a hub data set that is not loaded: 0."""
    named: bool = True
    """The recipe names this very file: it is not one of many that a folder or glob found."""
    validation: bool = False
    """Which split of a hub data set is meant where its id names none."""

    def where(self, place: int) -> str:
        """`file:line`, `file row number`, or the file alone: what a message calls the row at `place`."""
        if self.form == "jsonl":
            return f"{self.name}:{_line_number(self.name, place)}"
        if self.form == "text":
            return self.name
        return f"{self.name}:{place}" if self.form == "csv" else f"{self.name} row {place}"


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a part, or what is wrong with it."""

    part: Part
    place: int
    """.jsonl: the byte its line starts at (a Part that starts there goes on with this row); .csv: its line; others: its number from 1."""
    values: dict[str, Any] | None
    """None: it cannot be read."""
    problem: str = ""
    at: str | None = None
    """Where it is, if that is no place in the part."""

    @property
    def where(self) -> str:
        """What a message calls it. Costs a pass over the file for a .jsonl."""
        return self.part.where(self.place) if self.at is None else self.at


_counted: tuple[str, int, int] = ("", 0, 1)
"""File, byte and line of the last count: where many rows of one file are bad, each count goes on from the one before."""


def _line_number(file: str, place: int) -> int:
    global _counted
    name, at, line = _counted
    if name != file or at > place:
        at, line = 0, 1
    with open(file, "rb") as stream:
        stream.seek(at)
        while at < place:
            block = stream.read(min(1 << 20, place - at))
            if not block:
                break
            at += len(block)
            line += block.count(b"\n")
    _counted = (file, at, line)
    return line


# Which files


def find_files(patterns: tuple[str, ...], *, rows_only: bool = False) -> list[Path]:
    """The files that the patterns mean, in the order of the patterns, each pattern's sorted by path, each file once.

    A folder stands for all files below it but hidden ones and, in a tree of source, caches and binaries.
    rows_only: of a folder, take the files of rows alone (a data set's folder has a README too).
    Raises RecipeError where a pattern means no file.
    """
    found: dict[Path, None] = {}
    for pattern in patterns:
        files: list[Path] = []
        for match in sorted(glob.glob(pattern, recursive=True)) or [pattern]:
            path = Path(match)
            if path.is_dir():
                files += sorted(
                    file
                    for file in path.rglob("*")
                    if file.is_file() and _wanted(file.relative_to(path), rows_only)
                )
            elif path.is_file():
                files.append(path)
        if not files:
            raise RecipeError(f"data: {pattern!r} means no file (looked for in {Path.cwd()})")
        found |= dict.fromkeys(files)
    return list(found)


def _wanted(relative: Path, rows_only: bool) -> bool:
    hidden = any(part.startswith(".") or part == "__pycache__" for part in relative.parts)
    suffix = relative.suffix.lower()
    return not hidden and (suffix in ROW_FILES if rows_only else suffix not in _NOT_TEXT)


def find_parts(patterns: tuple[str, ...], *, kind: str, validation: bool = False) -> list[Part]:
    """Whole files and hub data sets, in the order of the patterns, each once.

    kind: of data.kind; all but text read rows alone.
    Raises RecipeError where a pattern means nothing, or a text file where rows are needed.
    """
    parts: dict[str, Part] = {}
    for pattern in patterns:
        if is_hub_id(pattern) and not glob.glob(pattern, recursive=True):
            parts.setdefault(pattern, Part(pattern, "hub", validation=validation))
            continue
        for file in find_files((pattern,), rows_only=kind != "text"):
            part = file_part(file, named=str(file) == str(Path(pattern)))
            if part.form == "text" and kind != "text":
                raise RecipeError(
                    f"{file}: kind {kind} reads {', '.join(ROW_FILES)}; use kind text for text files"
                )
            parts.setdefault(part.name, part)
    return list(parts.values())


def file_part(file: Path, *, named: bool = True) -> Part:
    """A whole file. Raises RecipeError where it cannot be read."""
    suffix = file.suffix.lower()
    try:
        size = file.stat().st_size
    except OSError as error:
        raise RecipeError(f"{file}: cannot be read: {error.strerror}") from None
    return Part(str(file), suffix[1:] if suffix in ROW_FILES else "text", size=size, named=named)  # type: ignore[arg-type]


# Large ones in parts


def split(part: Part, size: int) -> list[Part]:
    """The same rows in the same order, as parts of about `size` bytes where the format allows it: lines of a .jsonl, row
    groups of a .parquet, rows of a hub data set. A .json, a .csv (text in quotes may hold line ends) and a text stay whole."""
    if part.form == "jsonl" and part.size > size:
        cuts = [part.start, *_line_starts(part, size)]
        ends = [*cuts[1:], part.start + part.size]
        return [
            replace(part, start=a, end=b, size=b - a)
            for a, b in zip(cuts, ends, strict=True)
            if b > a
        ]
    if part.end is not None:  # divided already
        return [part]
    if part.form == "parquet":
        sizes = _row_group_sizes(Path(part.name))
    elif part.form == "hub":
        rows = load_data_set(part.name, validation=part.validation)
        each = max(1, int(rows.data.nbytes / max(1, len(rows))))
        unit = max(1, size // each)
        starts = range(0, len(rows), unit)
        return [
            replace(
                part,
                start=a,
                end=min(a + unit, len(rows)),
                size=(min(a + unit, len(rows)) - a) * each,
            )
            for a in starts
        ] or [part]
    else:
        return [part]
    parts, first, held = [], 0, 0
    for group, bytes_ in enumerate(sizes):
        held += bytes_
        if held >= size or group == len(sizes) - 1:
            parts.append(replace(part, start=first, end=group + 1, size=held))
            first, held = group + 1, 0
    return parts or [part]


def _line_starts(part: Part, size: int) -> Iterator[int]:
    """The first line's start after each `size` bytes."""
    end = part.start + part.size
    with open(part.name, "rb") as stream:
        at = part.start + size
        while at < end:
            stream.seek(at - 1)
            stream.readline()
            start = stream.tell()
            if start >= end:
                return
            yield start
            at = start + size


def _row_group_sizes(file: Path) -> list[int]:
    import pyarrow
    import pyarrow.parquet

    try:
        meta = pyarrow.parquet.read_metadata(file)
    except (pyarrow.ArrowException, OSError):
        return []  # told by who reads it
    return [meta.row_group(group).total_byte_size for group in range(meta.num_row_groups)]


# What is in them


def read_rows(part: Part, *, column: str = "text") -> Iterator[Row]:
    """The rows of a part, those that cannot be read with their problem.

    A text file is one row, its content in `column`. A file without a row is a problem, but for an empty text file that a
    folder or glob found among others. Raises RecipeError where the file cannot be opened at all.
    """
    readers = {"jsonl": _jsonl, "json": _json, "parquet": _parquet, "csv": _csv, "hub": _hub}
    empty = True
    try:
        for row in _text(part, column) if part.form == "text" else readers[part.form](part):
            empty = False
            yield row
    except OSError as error:
        raise RecipeError(f"{part.name}: cannot be read: {error.strerror or error}") from None
    if empty and part.start == 0 and (part.named or part.form != "text"):
        what = (
            "the file is empty"
            if part.form == "text" or (part.form != "hub" and part.size == 0)
            else "there is no row in it"
        )
        yield Row(
            part, 0, None, f"{what}; remove it, or leave it out of the patterns", at=part.name
        )


def read_all(parts: Iterable[Part], *, column: str = "text") -> Iterator[Row]:
    """The rows of all parts."""
    for part in parts:
        yield from read_rows(part, column=column)


def _text(part: Part, column: str) -> Iterator[Row]:
    content = Path(part.name).read_bytes()  # as it is: no line end is translated
    if not content:
        return
    try:
        yield Row(part, 1, {column: content.decode()})
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        problem = (
            f"not UTF-8 text (byte {error.start}); convert it, or leave it out of the patterns"
        )
        yield Row(part, 1, None, problem, at=f"{part.name}:{line}")


def _object(part: Part, place: int, row: Any) -> Row:
    if isinstance(row, dict):
        return Row(part, place, row)
    return Row(
        part, place, None, f'must be an object such as {{"text": ...}}; got {type(row).__name__}'
    )


def _jsonl(part: Part) -> Iterator[Row]:
    with open(part.name, "rb") as stream:
        stream.seek(part.start)
        at = part.start
        while part.end is None or at < part.end:
            line = stream.readline()
            if not line:
                return
            place, at = at, at + len(line)
            if place == 0:
                line = line.removeprefix(_BYTE_ORDER_MARK)
            if not line.strip():
                continue
            try:
                yield _object(part, place, json.loads(line.rstrip().decode()))
            except UnicodeDecodeError as error:
                yield Row(part, place, None, f"not UTF-8 text (byte {error.start} of the line)")
            except json.JSONDecodeError as error:
                yield Row(part, place, None, f"not JSON: {error.msg} (column {error.colno})")
            except (ValueError, RecursionError) as error:
                yield Row(part, place, None, f"not JSON that can be read: {error}")


def _json(part: Part) -> Iterator[Row]:
    try:
        rows = json.loads(Path(part.name).read_bytes().removeprefix(_BYTE_ORDER_MARK).decode())
    except UnicodeDecodeError as error:
        yield Row(part, 0, None, f"not UTF-8 text (byte {error.start})", at=part.name)
    except json.JSONDecodeError as error:
        hint = "; is it one object a line? Then name it .jsonl" if error.msg == "Extra data" else ""
        yield Row(
            part,
            0,
            None,
            f"not JSON: {error.msg} (column {error.colno}){hint}",
            at=f"{part.name}:{error.lineno}",
        )
    except (ValueError, RecursionError) as error:
        yield Row(part, 0, None, f"not JSON that can be read: {error}", at=part.name)
    else:
        if not isinstance(rows, list):
            yield Row(
                part, 0, None, f"must be a list of objects; got {type(rows).__name__}", at=part.name
            )
            return
        for number, row in enumerate(rows, start=1):
            yield _object(part, number, row)


def _csv(part: Part) -> Iterator[Row]:
    csv.field_size_limit(sys.maxsize)
    # Bytes that are no UTF-8 become halves of surrogate pairs, so that the row they stand in can be named.
    with open(part.name, encoding="utf-8-sig", errors="surrogateescape", newline="") as stream:
        reader = csv.reader(stream, strict=True)
        header: list[str] | None = None
        while True:
            place = reader.line_num + 1
            try:
                fields = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                yield Row(part, place, None, f"not CSV: {error}")
                continue
            if not fields:
                continue
            if any(
                "\udc80" <= character <= "\udcff"
                for field in fields
                if not field.isascii()
                for character in field
            ):
                yield Row(part, place, None, "not UTF-8 text")
                if header is None:
                    return
            elif header is None:
                header = fields
                if twice := sorted({name for name in header if header.count(name) > 1}):
                    yield Row(
                        part, place, None, f"the header names a column twice: {', '.join(twice)}"
                    )
                    return
            elif len(fields) != len(header):
                yield Row(
                    part,
                    place,
                    None,
                    f"{len(fields)} fields, but the header in line 1 has {len(header)}",
                )
            else:
                yield Row(part, place, dict(zip(header, fields, strict=True)))


def _parquet(part: Part) -> Iterator[Row]:
    import pyarrow
    import pyarrow.parquet

    try:
        # A stream has many files open: without a buffer size each holds the columns of a whole row group
        with pyarrow.parquet.ParquetFile(part.name, buffer_size=1 << 20) as file:
            groups = range(
                part.start, file.metadata.num_row_groups if part.end is None else part.end
            )
            number = sum(file.metadata.row_group(group).num_rows for group in range(part.start))
            for batch in file.iter_batches(batch_size=128, row_groups=list(groups)):
                for values in batch.to_pylist():
                    number += 1
                    yield Row(part, number, values)
    except FileNotFoundError:
        raise
    except (pyarrow.ArrowException, OSError) as error:
        yield Row(
            part,
            0,
            None,
            f"not a parquet file, or a damaged one: {str(error).splitlines()[0]}",
            at=part.name,
        )


def _hub(part: Part) -> Iterator[Row]:
    rows = load_data_set(part.name, validation=part.validation)
    end = len(rows) if part.end is None else part.end
    for first in range(part.start, end, 1000):
        columns = rows[first : min(first + 1000, end)]
        for number, values in enumerate(zip(*columns.values(), strict=True), start=first + 1):
            yield Row(part, number, dict(zip(columns, values, strict=True)))
