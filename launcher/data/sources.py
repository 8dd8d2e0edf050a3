"""Files and hub data sets as rows: which files a pattern matches, how they are split, and reading.

A row that cannot be read is a Row with its problem; the caller decides whether to go on. Files are
read here and not through pyarrow or `datasets`, whose errors name neither the line nor the column.
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
    *(".pyc", ".so", ".png", ".jpg", ".gif", ".zip", ".gz"),
    *(".safetensors", ".bin", ".npy", ".exe", ".a", ".o"),
}
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class Part:
    """A file or hub data set, or a range of its rows."""

    name: str
    """Path, or hub id with its split."""
    form: Literal["text", "jsonl", "json", "parquet", "csv", "hub", "hub_stream"]
    start: int = 0
    """jsonl: a byte, where a line starts; parquet: a row group; hub: a row; hub_stream: the index
    of a shard. Others are not split."""
    end: int | None = None
    """Exclusive, in the same unit; None: to the end. hub_stream: the number of shards."""
    size: int = 0
    """Bytes, about; 0 for a hub data set that is not loaded."""
    named: bool = True
    """The recipe names this file itself, rather than a folder or glob."""
    validation: bool = False
    """Which split of a hub data set to use if its id names none."""

    def where(self, place: int) -> str:
        """The row at `place`, for a message: `file:line`, `file row number`, or the file."""
        if self.form == "jsonl":
            return f"{self.name}:{_line_number(self.name, place)}"
        if self.form == "text":
            return self.name
        if self.form == "hub_stream":
            return f"{self.name} shard {self.start + 1} of {self.end} row {place}"
        return f"{self.name}:{place}" if self.form == "csv" else f"{self.name} row {place}"


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a part, or its problem."""

    part: Part
    place: int
    """jsonl: the byte where its line starts; csv: its line; others: its number from 1."""
    values: dict[str, Any] | None
    """None: it cannot be read."""
    problem: str = ""
    at: str | None = None
    """Overrides `part.where(place)`."""

    @property
    def where(self) -> str:
        """For a message. Counting the lines of a .jsonl reads the file up to the row."""
        return self.part.where(self.place) if self.at is None else self.at


_counted: tuple[str, int, int] = ("", 0, 1)
"""File, byte and line of the last count, where the next count in the same file continues."""


def _line_number(file: str, place: int) -> int:
    global _counted
    name, at, line = _counted
    if name != file or at > place:
        at, line = 0, 1
    with open(file, "rb") as stream:
        stream.seek(at)
        while block := stream.read(min(1 << 20, place - at)):
            at += len(block)
            line += block.count(b"\n")
    _counted = (file, at, line)
    return line


# Finding files


def find_files(patterns: tuple[str, ...], *, rows_only: bool = False) -> list[Path]:
    """The files that match, in the order of the patterns and sorted by path, each file once.

    A folder means all files below it, except hidden files, caches and binaries.
    rows_only: of a folder, take only files of rows (a data set's folder often has a README).
    Raises RecipeError if a pattern matches no file.
    """
    found: dict[Path, None] = {}
    for pattern in patterns:
        files: list[Path] = []
        for match in sorted(glob.glob(pattern, recursive=True)) or [pattern]:
            path = Path(match)
            if path.is_dir():
                inside = sorted(file for file in path.rglob("*") if file.is_file())
                files += [file for file in inside if _wanted(file.relative_to(path), rows_only)]
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

    kind: data.kind; only kind text reads text files.
    Raises RecipeError if a pattern matches nothing, or matches a text file where rows are needed.
    """
    parts: dict[str, Part] = {}
    for pattern in patterns:
        if is_hub_id(pattern) and not glob.glob(pattern, recursive=True):
            parts.setdefault(pattern, Part(pattern, "hub", validation=validation))
            continue
        for file in find_files((pattern,), rows_only=kind != "text"):
            part = file_part(file, named=str(file) == str(Path(pattern)))
            if part.form == "text" and kind != "text":
                forms = ", ".join(ROW_FILES)
                raise RecipeError(
                    f"{file}: kind {kind} reads {forms}; use kind text for text files"
                )
            parts.setdefault(part.name, part)
    return list(parts.values())


def file_part(file: Path, *, named: bool = True) -> Part:
    """A whole file. Raises RecipeError if it cannot be read."""
    suffix = file.suffix.lower()
    try:
        size = file.stat().st_size
    except OSError as error:
        raise RecipeError(f"{file}: cannot be read: {error.strerror}") from None
    form: Any = suffix[1:] if suffix in ROW_FILES else "text"
    return Part(str(file), form, size=size, named=named)


# Splitting


def split(part: Part, size: int) -> list[Part]:
    """The same rows in the same order, as parts of about `size` bytes.

    A .jsonl is split by lines, a .parquet by row groups, a hub data set by rows; others stay whole.
    """
    if part.form == "jsonl" and part.size > size:
        cuts = [part.start, *_line_starts(part, size)]
        ends = [*cuts[1:], part.start + part.size]
        return [
            replace(part, start=a, end=b, size=b - a)
            for a, b in zip(cuts, ends, strict=True)
            if b > a
        ]
    if part.end is not None or part.form not in ("parquet", "hub"):
        return [part]
    if part.form == "hub":
        rows = load_data_set(part.name, validation=part.validation)
        each = max(1, int(rows.data.nbytes / max(1, len(rows))))
        count = max(1, size // each)
        ends = [min(start + count, len(rows)) for start in range(0, len(rows), count)]
        return [
            replace(part, start=start, end=end, size=(end - start) * each)
            for start, end in zip([0, *ends], ends, strict=False)
        ] or [part]
    parts, first, held = [], 0, 0
    sizes = _row_group_sizes(Path(part.name))
    for group, bytes_ in enumerate(sizes):
        held += bytes_
        if held >= size or group == len(sizes) - 1:
            parts.append(replace(part, start=first, end=group + 1, size=held))
            first, held = group + 1, 0
    return parts or [part]


def _line_starts(part: Part, size: int) -> Iterator[int]:
    """The start of the first line after each `size` bytes."""
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
        return []  # `_parquet` reports the problem
    return [meta.row_group(group).total_byte_size for group in range(meta.num_row_groups)]


# Reading


def read_rows(part: Part, *, column: str = "text") -> Iterator[Row]:
    """The rows of a part. A text file is one row, its content in `column`.

    A file without rows is a problem, except for an empty text file that a folder or glob matched.
    Raises RecipeError if the file cannot be opened.
    """
    empty = True
    try:
        for row in _text(part, column) if part.form == "text" else _READERS[part.form](part):
            empty = False
            yield row
    except OSError as error:
        raise RecipeError(f"{part.name}: cannot be read: {error.strerror or error}") from None
    if not empty or part.start or part.form == "hub_stream":
        return
    if part.named or part.form != "text":
        no_bytes = part.form != "hub" and part.size == 0
        what = "the file is empty" if no_bytes else "there is no row in it"
        problem = f"{what}; remove it, or leave it out of the patterns"
        yield Row(part, 0, None, problem, at=part.name)


def read_all(parts: Iterable[Part], *, column: str = "text") -> Iterator[Row]:
    """The rows of all parts."""
    for part in parts:
        yield from read_rows(part, column=column)


def _text(part: Part, column: str) -> Iterator[Row]:
    content = Path(part.name).read_bytes()  # read_text would translate line ends
    if not content:
        return
    try:
        yield Row(part, 1, {column: content.decode()})
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        advice = "convert it, or leave it out of the patterns"
        problem = f"not UTF-8 text (byte {error.start}); {advice}"
        yield Row(part, 1, None, problem, at=f"{part.name}:{line}")


def _object(part: Part, place: int, row: Any) -> Row:
    if isinstance(row, dict):
        return Row(part, place, row)
    problem = f'must be an object such as {{"text": ...}}; got {type(row).__name__}'
    return Row(part, place, None, problem)


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
    content = Path(part.name).read_bytes().removeprefix(_BYTE_ORDER_MARK)
    at, problem = part.name, ""
    try:
        rows = json.loads(content.decode())
        if not isinstance(rows, list):
            problem = f"must be a list of objects; got {type(rows).__name__}"
    except UnicodeDecodeError as error:
        problem = f"not UTF-8 text (byte {error.start})"
    except json.JSONDecodeError as error:
        lines = error.msg == "Extra data"
        hint = "; is it one object a line? Then name it .jsonl" if lines else ""
        at, problem = f"{at}:{error.lineno}", f"not JSON: {error.msg} (column {error.colno}){hint}"
    except (ValueError, RecursionError) as error:
        problem = f"not JSON that can be read: {error}"
    if problem:
        yield Row(part, 0, None, problem, at=at)
        return
    for number, row in enumerate(rows, start=1):
        yield _object(part, number, row)


def _csv(part: Part) -> Iterator[Row]:
    csv.field_size_limit(sys.maxsize)
    # Invalid UTF-8 becomes lone surrogates, so that the row with it can be named
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
            joined = "".join(fields)
            if not joined.isascii() and any("\udc80" <= one <= "\udcff" for one in joined):
                yield Row(part, place, None, "not UTF-8 text")
                if header is None:
                    return
            elif header is None:
                header = fields
                if twice := sorted({name for name in header if header.count(name) > 1}):
                    problem = f"the header names a column twice: {', '.join(twice)}"
                    yield Row(part, place, None, problem)
                    return
            elif len(fields) != len(header):
                problem = f"{len(fields)} fields, but the header in line 1 has {len(header)}"
                yield Row(part, place, None, problem)
            else:
                yield Row(part, place, dict(zip(header, fields, strict=True)))


def _parquet(part: Part) -> Iterator[Row]:
    import pyarrow
    import pyarrow.parquet

    try:
        # Without a buffer size, each open file of a stream holds the columns of a whole row group
        with pyarrow.parquet.ParquetFile(part.name, buffer_size=1 << 20) as file:
            end = file.metadata.num_row_groups if part.end is None else part.end
            number = sum(file.metadata.row_group(group).num_rows for group in range(part.start))
            for batch in file.iter_batches(128, row_groups=list(range(part.start, end))):
                for values in batch.to_pylist():
                    number += 1
                    yield Row(part, number, values)
    except FileNotFoundError:
        raise
    except (pyarrow.ArrowException, OSError) as error:
        problem = f"not a parquet file, or a damaged one: {str(error).splitlines()[0]}"
        yield Row(part, 0, None, problem, at=part.name)


def _hub(part: Part) -> Iterator[Row]:
    rows = load_data_set(part.name, validation=part.validation)
    end = len(rows) if part.end is None else part.end
    for first in range(part.start, end, 1000):
        columns = rows[first : min(first + 1000, end)]
        for number, values in enumerate(zip(*columns.values(), strict=True), start=first + 1):
            yield Row(part, number, dict(zip(columns, values, strict=True)))


def _hub_stream(part: Part) -> Iterator[Row]:
    rows = load_data_set(part.name, validation=part.validation, streaming=True)
    shard = rows.shard(num_shards=part.end, index=part.start)
    for number, values in enumerate(shard, start=1):
        yield Row(part, number, values)


_READERS = {
    "jsonl": _jsonl,
    "json": _json,
    "parquet": _parquet,
    "csv": _csv,
    "hub": _hub,
    "hub_stream": _hub_stream,
}
