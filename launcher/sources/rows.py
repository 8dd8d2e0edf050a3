"""Reads files and hub data sets as rows: one reader for each format.

Files are not read through `datasets`, whose errors name neither line nor column. A row that cannot
be read is a Row with its problem.
"""

from __future__ import annotations

import contextlib
import csv
import functools
import io
import itertools
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from launcher.console import bytes_as_text
from launcher.errors import RecipeError
from launcher.sources.formats import (
    COMPRESSED,
    READ_ERRORS,
    RowForm,
    arrow_batches,
    open_binary,
    other_content,
    suffixes,
)
from launcher.sources.hub import load_data_set
from launcher.sources.location import Location
from launcher.sources.store_requests import StoreError
from launcher.sources.stores import AHEAD, Known

MAX_DOCUMENT = 64 << 20
"""Bytes; see data.max_document."""
COMPRESSED_ROWS = 16
"""A compressed .json file, which is read as a whole, has at most this many times data.max_document."""
_FEW_ROWS = 16
"""Rows that are read for their columns alone."""
_MOST_ROWS, _MOST_BYTES = 128, 16 << 20
"""Of a .parquet file or data set that are read at once."""

Form = RowForm | Literal["text", "tokens", "hub", "hub_stream"]
"""tokens: token ids of another tool (`token_files.py`)."""
_OF_TEXT = ("text", "jsonl", "json", "csv", "tsv")
Values = dict[str, Any]
"""A row: the value of each column."""


@dataclass(frozen=True)
class SourcePart:
    """A file or hub data set, or a range of its rows."""

    name: str
    """Path, or hub id with its split. A folder of `save_to_disk` has the form of a hub data set."""
    form: Form
    start: int = 0
    """jsonl: a byte, where a line starts; parquet: a row group; hub: a row; hub_stream: a shard."""
    end: int | None = None
    """Exclusive, in the same unit; None: to the end. hub_stream: the number of shards."""
    size: int = 0
    """Bytes, about; 0 for a hub data set."""
    validation: bool = False
    """Which split of a hub data set to use if its id names none."""
    most: int | None = None
    """Rows that are read at most; None: all."""
    max_document: int = MAX_DOCUMENT
    """Bytes, without compression; a larger document, line or row cannot be used."""
    known: Known | None = None
    """What a store has said of the file when it was listed. Another version of it is not read."""

    @property
    def file(self) -> Location:
        """The file, of which this may be a part."""
        return Location(self.name, self.known)

    @property
    def ahead(self) -> int:
        """Bytes that are asked of a store at once to read it from `start`."""
        if self.most is not None and self.most <= _FEW_ROWS:
            return 1 << 16
        if self.end is None or self.form != "jsonl":
            return AHEAD
        size = self.end - self.start  # what follows belongs to another part
        return max(1, -(-size // max(1, size // AHEAD)))

    def too_large(self, what: str, size: int | None = None) -> str:
        """The problem of a larger document. size: in bytes; None: not known."""
        has = "more" if size is None else f"{bytes_as_text(size)}, more"
        limit = bytes_as_text(self.max_document)
        return f"{what} has {has} than {limit} (data.max_document); divide it, or raise that key"


@dataclass(frozen=True, slots=True)
class Row:
    """A row of a file or hub data set, or why it cannot be read."""

    part: SourcePart
    number: int
    """From 1: the line in the part (jsonl), the line in the file (csv, tsv, text), the document (tokens),
    else the row. 0: the whole file."""
    values: Values | None
    """None: it cannot be read."""
    problem: str = ""
    size: int = 0
    """Bytes, about."""
    no_rows: bool = False
    """Whether the file cannot hold rows as it is written: JSON that is no list, or a header that
    names no columns."""

    @property
    def where(self) -> str:
        """`file:line`, `file row number` or `file document number`."""
        part = self.part
        if not self.number:
            return part.name
        if part.form == "jsonl":
            return f"{part.name}:{_lines_before(part.file, part.start) + self.number}"
        if part.form in ("csv", "tsv", "text"):
            return f"{part.name}:{self.number}"
        shard = f" shard {part.start + 1} of {part.end}" if part.form == "hub_stream" else ""
        unit = "document" if part.form == "tokens" else "row"
        return f"{part.name}{shard} {unit} {self.number}"


_COUNTED_BYTES = 1 << 24


def _lines_before(file: Location, byte: int) -> int:
    blocks = [min(_COUNTED_BYTES, byte - start) for start in range(0, byte, _COUNTED_BYTES)]
    return sum(_count_lines(file, number, size) for number, size in enumerate(blocks))


@functools.lru_cache(maxsize=1 << 14)
def _count_lines(file: Location, block: int, size: int) -> int:
    with file.open(ahead=0) as stream:
        stream.seek(block * _COUNTED_BYTES)
        return stream.read(size).count(b"\n")


# Reading

_Item = TypeVar("_Item")


def in_batches(
    items: Iterable[_Item], *, most: int, size: Callable[[_Item], int]
) -> Iterator[list[_Item]]:
    """Lists of up to `most` items, with fewer if these have 16 MiB together. size: of an item, in
    bytes."""
    batch: list[_Item] = []
    held = 0
    for item in items:
        batch.append(item)
        held += size(item)
        if len(batch) == most or held >= _MOST_BYTES:
            yield batch
            batch, held = [], 0
    if batch:
        yield batch


def read_rows(part: SourcePart, *, column: str = "text", arrays: bool = False) -> Iterator[Row]:
    """A text file is one row, its content in `column`. A file without rows is a problem, except for
    an empty text file. arrays: lists of numbers in a .parquet file or data set are numpy arrays,
    not lists, which take many times longer. Raises RecipeError if the file cannot be opened."""
    empty = True
    try:
        if part.form in _OF_TEXT and not part.start and (what := other_content(part.file)):
            yield Row(part, 0, None, f"it holds {what}")
            return
        if part.form == "text":
            rows = _text(part, column)
        elif arrays and part.form in _ARRAY_READERS:
            rows = _ARRAY_READERS[part.form](part)
        else:
            rows = _READERS[part.form](part)
        for row in itertools.islice(rows, part.most):
            empty = False
            yield row
    except READ_ERRORS as error:
        why = getattr(error, "strerror", None) or error
        raise RecipeError(f"{part.name}: cannot be read: {why}") from None
    if empty and part.form not in ("text", "hub_stream") and not part.start:
        yield Row(part, 0, None, "it has no rows; remove it, or leave it out of the patterns")


def read_all(
    parts: Iterable[SourcePart], *, column: str = "text", arrays: bool = False
) -> Iterator[Row]:
    """The rows of all parts, one part after the other (`read_rows`)."""
    for part in parts:
        yield from read_rows(part, column=column, arrays=arrays)


def _content(part: SourcePart, most: int | None) -> bytes | None:
    """None: more than `most` bytes. A small compressed file may hold many gigabytes."""
    with open_binary(part.file) as stream:
        content = stream.read(-1 if most is None else most + 1)
    return content if most is None or len(content) <= most else None


def _text(part: SourcePart, column: str) -> Iterator[Row]:
    content = _content(part, part.max_document)
    if content is None:
        yield Row(part, 0, None, part.too_large("the file, one document,"))
        return
    try:
        if text := content.decode("utf-8-sig"):
            yield Row(part, 0, {column: text}, size=len(content))
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        yield Row(part, line, None, f"{_not_utf8(error.start)}, or leave it out")


def _not_utf8(byte: int | None = None) -> str:
    at = "" if byte is None else f" (byte {byte})"
    convert = "iconv -f WINDOWS-1252 -t UTF-8 FILE >NEW, if Windows wrote it"
    return f"not UTF-8 text{at}; convert the file ({convert})"


def _parse_json(content: bytes) -> tuple[Any, str]:
    """The value, or the problem."""
    try:
        return json.loads(content.decode("utf-8-sig")), ""
    except UnicodeDecodeError as error:
        return None, _not_utf8(error.start)
    except json.JSONDecodeError as error:
        line = f"line {error.lineno}, " if error.lineno > 1 else ""
        return None, f"not JSON: {error.msg} ({line}column {error.colno}){_comma(error)}"
    except (ValueError, RecursionError) as error:
        return None, f"not JSON that can be read: {error}"


def _comma(error: json.JSONDecodeError) -> str:
    """What to do about a comma that is too many."""
    rest = error.doc[error.pos :].strip()
    if error.msg == "Extra data" and rest == ",":
        return "; remove the comma at the end of the line"
    before = error.doc[: error.pos].rstrip()
    if (rest[:1] in ("]", "}") and before.endswith(",")) or error.msg.startswith(
        "Illegal trailing"
    ):
        return "; remove the comma before it"
    return ""


def _object(
    part: SourcePart, number: int, value: object, problem: str = "", *, size: int = 0
) -> Row:
    if not problem and isinstance(value, dict):
        return Row(part, number, value, size=size)
    wrong = f'must be an object such as {{"text": ...}}; got {type(value).__name__}'
    return Row(part, number, None, problem or wrong)


def _jsonl(part: SourcePart) -> Iterator[Row]:
    with open_binary(part.file, ahead=part.ahead) as stream:
        if part.start:
            stream.seek(part.start)
        left = sys.maxsize if part.end is None else part.end - part.start
        for number in itertools.count(1):
            if left <= 0 or not (line := stream.readline(part.max_document + 1)):
                return
            left -= len(line)
            if len(line) > part.max_document:
                while line and not line.endswith(b"\n"):
                    line = stream.readline(1 << 20)
                    left -= len(line)
                yield Row(part, number, None, part.too_large("the line"))
            elif line.strip():
                value, problem = _parse_json(line.rstrip())
                if problem and line.lstrip().startswith(b"["):
                    problem += "; if the file is one list of rows, name it .json"
                yield _object(part, number, value, problem, size=len(line))


def _json(part: SourcePart) -> Iterator[Row]:
    compressed = suffixes(part.name)[1] in COMPRESSED
    most = COMPRESSED_ROWS * part.max_document
    content = _content(part, most if compressed else None)
    if content is None:
        what = f"the compressed file has more than {bytes_as_text(most)}, and is read as a whole"
        yield Row(part, 0, None, f"{what}; write one object per line, as .jsonl.gz")
        return
    rows, problem = _parse_json(content)
    if "Extra data" in problem:
        problem += "; if it has one object per line, name it .jsonl"
    elif not problem and not isinstance(rows, list):
        yield Row(part, 0, None, no_list(rows), no_rows=True)
        return
    if problem:
        yield Row(part, 0, None, problem)
        return
    for number, row in enumerate(rows, start=1):
        if isinstance(row, dict) and (size := _text_size(row)) > part.max_document:
            yield Row(part, number, None, part.too_large("the row", size))
        else:
            yield _object(part, number, row, size=len(content) // len(rows))


def no_list(value: object) -> str:
    """The problem of a .json file with this value, which is no list, and where its rows may be."""
    got = "one object" if isinstance(value, dict) else type(value).__name__
    problem = f"must hold a list of objects, one for each row; got {got}"
    if not isinstance(value, dict):
        return problem
    rows = [key for key, held in value.items() if _holds_objects(held)]
    columns = [held for held in value.values() if isinstance(held, list)]
    if len(rows) == 1:
        return f"{problem}; its key {rows[0]!r} holds such a list: write that list to a file alone"
    if len(columns) > 1 and len(columns) == len(value) and len(set(map(len, columns))) == 1:
        return f"{problem} that holds each column as a list; write each row as an object"
    if rows:
        return f"{problem} with several lists ({', '.join(rows)}); write each to a file of its own"
    return f"{problem}; if each line is a row, name the file .jsonl"


def _holds_objects(value: object) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict)


def _csv(part: SourcePart) -> Iterator[Row]:
    csv.field_size_limit(part.max_document)
    # Invalid UTF-8 becomes lone surrogates, so that the row with it can be named
    with io.TextIOWrapper(
        open_binary(part.file), encoding="utf-8-sig", errors="surrogateescape", newline=""
    ) as stream:
        dialect = "excel-tab" if part.form == "tsv" else "excel"
        reader = csv.reader(_csv_lines(part, stream), dialect, strict=True)
        header: list[str] = []
        while True:
            line, problem = reader.line_num + 1, ""
            try:
                fields = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                fields, problem = [""], f"not CSV: {error}"
            no_rows = False
            if re.search("[\udc80-\udcff]", "".join(fields)):
                problem = _not_utf8()
            elif not header and not problem:
                problem = problem_of_header(fields)
                no_rows = bool(problem)
            elif header and fields and not problem and len(fields) != len(header):
                problem = f"{len(fields)} fields, but the header in line 1 has {len(header)}"
            if problem:
                yield Row(part, line, None, problem, no_rows=no_rows)
                if not header:
                    return
            elif header and fields:
                values = dict(zip(header, fields, strict=True))
                yield Row(part, line, values, size=sum(map(len, fields)))
            header = header or fields


def problem_of_header(names: list[str]) -> str:
    """Why the first line of a .csv or .tsv file cannot name its columns; empty if it can."""
    if twice := sorted({name for name in names if names.count(name) > 1}):
        listed = ", ".join(map(repr, twice))
        return f"the header names a column twice ({listed}); rename one, or remove it"
    for mark, name in (
        (";", "semicolons"),
        ("\t", "tabs"),
        ("|", "vertical bars"),
        (",", "commas"),
    ):
        if len(names) == 1 and mark in names[0]:
            what = "write the file with commas, or with tabs as .tsv"
            return f"the header is one column, {names[0]!r}; if {name} divide the columns, {what}"
    return ""


def _csv_lines(part: SourcePart, stream: io.TextIOWrapper) -> Iterator[str]:
    while line := stream.readline(part.max_document + 1):
        if len(line) > part.max_document:
            what = part.too_large("the line")
            raise csv.Error(f"{what}; the rest of the file is not read")
        yield line


def _parquet(part: SourcePart, *, arrays: bool = False) -> Iterator[Row]:
    import pyarrow
    import pyarrow.parquet

    try:
        with open_parquet(part.file, ahead=0 if part.most is None else part.ahead) as file:
            end = file.metadata.num_row_groups if part.end is None else part.end
            number = sum(file.metadata.row_group(group).num_rows for group in range(part.start))
            groups = list(range(part.start, end))
            at_once = _rows_at_once(file.metadata.row_group(group) for group in groups)
            for some in _read_together(file, groups, in_store=part.file.in_store):
                for batch in file.iter_batches(at_once, row_groups=some):
                    yield from _arrow_rows(part, batch, number, arrays=arrays)
                    number += batch.num_rows
    except (FileNotFoundError, StoreError):
        raise
    except (pyarrow.ArrowException, OSError) as error:
        problem = f"not a parquet file, or a damaged one: {str(error).splitlines()[0]}"
        yield Row(part, 0, None, problem)


def open_parquet(file: Location, *, ahead: int = 0) -> Any:
    """A `pyarrow.parquet.ParquetFile`. ahead: bytes of each column that are asked of a store at once; 0: the
    columns of row groups, those side by side by one request. Raises OSError and pyarrow.ArrowException."""
    import pyarrow
    import pyarrow.parquet

    # Without a buffer size, each open file of a stream holds the columns of a whole row group
    if not file.in_store:
        return pyarrow.parquet.ParquetFile(file.name, buffer_size=1 << 20)
    return pyarrow.parquet.ParquetFile(
        pyarrow.PythonFile(file.open(ahead=0), mode="r"),
        metadata=_parquet_metadata(file),
        buffer_size=ahead,
        pre_buffer=not ahead,
    )


@functools.lru_cache(maxsize=8)
def _parquet_metadata(file: Location) -> Any:
    """The end of the file, which each of its parts needs."""
    import pyarrow
    import pyarrow.parquet

    with file.open(ahead=0) as stream:
        return pyarrow.parquet.read_metadata(pyarrow.PythonFile(stream, mode="r"))


def _read_together(file: Any, groups: list[int], *, in_store: bool) -> Iterable[list[int]]:
    """Row groups whose columns are held in memory at a time: of a local file, none are."""
    if not in_store:
        return [groups]
    metadata = file.metadata
    sizes = {group: metadata.row_group(group).total_byte_size for group in groups}
    return in_batches(groups, most=max(1, len(groups)), size=sizes.__getitem__)


@contextlib.contextmanager
def open_arrow(file: Location) -> Iterator[Any]:
    """A file of Arrow for `arrow_batches`. Raises OSError."""
    import pyarrow

    if not file.in_store:
        with pyarrow.memory_map(file.name) as stream:
            yield stream
    else:
        with file.open() as opened, pyarrow.PythonFile(opened, mode="r") as stream:
            yield stream


def _arrow(part: SourcePart, *, arrays: bool = False) -> Iterator[Row]:
    import pyarrow

    number = 0
    try:
        with open_arrow(part.file) as stream:
            for batch in arrow_batches(stream):
                size = batch.nbytes / max(1, batch.num_rows)
                at_once = max(1, min(_MOST_ROWS, int(_MOST_BYTES / max(1.0, size))))
                for start in range(0, batch.num_rows, at_once):
                    rows = batch.slice(start, at_once)
                    if arrays:  # alone: `_column` looks at all numbers that a column holds
                        rows = batch.take(pyarrow.array(range(start, start + rows.num_rows)))
                    yield from _arrow_rows(part, rows, number, arrays=arrays)
                    number += rows.num_rows
    except (FileNotFoundError, StoreError):
        raise
    except (pyarrow.ArrowException, OSError) as error:
        problem = f"not an Arrow file, or a damaged one: {str(error).splitlines()[0]}"
        yield Row(part, 0, None, problem)


def _rows_at_once(groups: Iterable[Any]) -> int:
    """Rows of these row groups that have about _MOST_BYTES."""
    sizes = [group.total_byte_size / max(1, group.num_rows) for group in groups]
    return max(1, min(_MOST_ROWS, int(_MOST_BYTES / max(1.0, *sizes, 0.0))))


def _arrow_rows(part: SourcePart, batch: Any, before: int, *, arrays: bool) -> Iterator[Row]:
    """The rows of a batch of Arrow, the first of which follows `before` others."""
    if batch.nbytes > part.max_document:
        for index in range(batch.num_rows):
            row = batch.slice(index, 1)
            if row.nbytes > part.max_document:
                yield Row(part, before + index + 1, None, part.too_large("the row", row.nbytes))
            else:
                values = _without_nulls(row.to_pylist()[0])
                yield Row(part, before + index + 1, values, size=row.nbytes)
        return
    size = batch.nbytes // max(1, batch.num_rows)
    if not arrays:
        for number, values in enumerate(batch.to_pylist(), start=before + 1):
            yield Row(part, number, _without_nulls(values), size=size)
        return
    columns = [_column(column) for column in batch.columns]
    for number, of_row in enumerate(zip(*columns, strict=True), start=before + 1):
        yield Row(part, number, dict(zip(batch.schema.names, of_row, strict=True)), size=size)


def _column(column: Any) -> Sequence[Any]:
    """The values of a column of Arrow: lists of numbers as numpy arrays, of int32 where the
    integers of all rows fit."""
    import pyarrow

    of_lists = pyarrow.types.is_list(column.type) or pyarrow.types.is_large_list(column.type)
    kind = column.type.value_type if of_lists else None
    numbers = of_lists and (pyarrow.types.is_integer(kind) or pyarrow.types.is_floating(kind))
    if not numbers or column.values.null_count:
        return [_clean(value) for value in column.to_pylist()]
    values, bounds = column.values.to_numpy(), column.offsets.to_numpy().tolist()
    if values.dtype.kind in "iu" and values.size:
        if values.min() >= -(2**31) and values.max() < 2**31:
            values = values.astype("int32", copy=False)
    lists = [values[start:end] for start, end in itertools.pairwise(bounds)]
    if column.null_count:
        valid = column.is_valid().to_pylist()  # a scalar of pyarrow 17 is always true
        lists = [one if there else None for one, there in zip(lists, valid, strict=True)]
    return lists


def _hub(part: SourcePart) -> Iterator[Row]:
    rows = load_data_set(part.name, validation=part.validation)
    if _is_decoded(rows.features):  # as their files
        yield from _hub_arrays(part, arrays=False)
        return
    end = len(rows) if part.end is None else part.end
    for number, values in enumerate(rows.select(range(part.start, end)), start=part.start + 1):
        yield _hub_row(part, number, values)


def _is_decoded(feature: Any) -> bool:
    """Whether `datasets` decodes a feature, or one inside, as it is read: images, sounds, videos."""
    if isinstance(feature, dict):
        return any(map(_is_decoded, feature.values()))
    inner = getattr(feature, "feature", None)  # of a list
    return hasattr(feature, "decode_example") or (inner is not None and _is_decoded(inner))


def _hub_arrays(part: SourcePart, *, arrays: bool = True) -> Iterator[Row]:
    rows = load_data_set(part.name, validation=part.validation)
    end, number = len(rows) if part.end is None else part.end, part.start
    rows = rows.select(range(part.start, end)).with_format("arrow")
    for table in rows.iter(batch_size=_MOST_ROWS):
        for batch in table.combine_chunks().to_batches():
            yield from _arrow_rows(part, batch, number, arrays=arrays)
            number += batch.num_rows


def _hub_row(part: SourcePart, number: int, values: Values) -> Row:
    size = _text_size(values)
    if size > part.max_document:
        return Row(part, number, None, part.too_large("the row", size))
    return Row(part, number, _without_nulls(values), size=size)


def _text_size(values: Values) -> int:
    """Characters of the texts of a row."""
    return sum(len(value) for value in values.values() if isinstance(value, str))


def _hub_stream(part: SourcePart) -> Iterator[Row]:
    rows = load_data_set(part.name, validation=part.validation, streaming=True)
    shard = rows.shard(num_shards=part.end, index=part.start)
    if shard.features is not None and _is_decoded(shard.features):
        shard = shard.decode(False)
    for number, values in enumerate(shard, start=1):
        yield _hub_row(part, number, values)


def _without_nulls(row: Values) -> Values:
    """A row of Arrow without the null fields of its structs, at every depth. All structs of a
    column have the same fields, so most of these nulls were not in the data that was converted.
    Null columns and null items of lists stay."""
    return {column: _clean(value) for column, value in row.items()}


def _clean(value: object) -> object:
    if isinstance(value, dict):
        return {key: _clean(item) for key, item in value.items() if item is not None}
    return [_clean(item) for item in value] if isinstance(value, list) else value


_READERS = {
    "jsonl": _jsonl,
    "json": _json,
    "parquet": _parquet,
    "arrow": _arrow,
    "csv": _csv,
    "tsv": _csv,
    "hub": _hub,
    "hub_stream": _hub_stream,
}
_ARRAY_READERS: dict[str, Callable[[SourcePart], Iterator[Row]]] = {
    "parquet": functools.partial(_parquet, arrays=True),
    "arrow": functools.partial(_arrow, arrays=True),
    "hub": _hub_arrays,
}
