"""The first row of the data, by which data.kind is found where the recipe does not give it."""

from __future__ import annotations

import csv
import glob
import io
import itertools
import json
import os
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from launcher.errors import RecipeError
from launcher.sources.formats import (
    FORMS,
    ROW_FILES,
    RowForm,
    arrow_batches,
    holds_json_lines,
    open_binary,
    suffixes,
)
from launcher.sources.hub import SAVED_DICT, is_hub_id, is_saved_data_set, load_data_set

_FIRST_LINE = 1 << 28
"""Most bytes of a line that are read: a small compressed file may hold many gigabytes."""
_FIRST_BYTES = 1 << 24
"""Bytes of a .json file that are searched for the end of its first row."""


def first_row(
    patterns: Iterable[str], *, hub: bool = False
) -> tuple[str, Mapping[str, Any]] | None:
    """The first file that the patterns name, and its first row; None if that is not a file of rows,
    or cannot be read. hub: also fetch a data set of the hub. Raises RecipeError if a .json file
    holds no list, or if the header of a .csv file names no columns."""
    for pattern in patterns:
        if is_of_system(pattern):
            return None
        matches = matching(pattern)
        if not matches and is_hub_id(pattern):
            return _first_of_hub(pattern) if hub else None
        for match in map(Path, matches):
            try:
                for file in _files(match) if match.is_dir() else [match]:
                    row = _row(file)
                    return None if row is None else (str(file), row)
            except NotRowsError as error:
                raise RecipeError(f"{file}: {error}") from None
            except Exception:  # of damaged files: many classes, reported when they are read
                return None
    return None


def matching(pattern: str) -> list[str]:
    """The files and folders that a pattern names, sorted. A path that exists is that file, also if it
    holds `[`, `*` or `?`."""
    return [pattern] if os.path.exists(pattern) else sorted(glob.glob(pattern, recursive=True))


def why_text(patterns: Iterable[str]) -> str | None:
    """Why the data is text: the first file that the patterns name is there, and is no file of rows.
    None: it is one, or there is none."""
    for pattern in patterns:
        if is_of_system(pattern):
            return None
        for match in map(Path, matching(pattern)):
            if not match.is_dir():
                return (
                    None
                    if _form(match) is not None
                    else f"{match} is no file of rows ({ROW_FILES})"
                )
            return None if _files(match) else f"{match} holds no file of rows ({ROW_FILES})"
    return None


def rows_as_text(patterns: Iterable[str]) -> str | None:
    """A text file among these files whose lines are JSON objects, one of each suffix is looked at:
    it would be trained with its braces. None: there is none."""
    seen: set[str] = set()
    for pattern in patterns:
        if is_of_system(pattern):
            continue
        for match in map(Path, matching(pattern)):
            inside = match.is_dir() and not is_saved_data_set(match)
            for file in sorted(match.rglob("*")) if inside else [match]:
                hidden = any(part.startswith(".") for part in file.relative_to(match).parts)
                suffix = "".join(suffixes(file))
                if hidden or suffix in seen or _form(file) is not None or not file.is_file():
                    continue
                seen.add(suffix)
                if holds_json_lines(file):
                    return str(file)
    return None


def _first_of_hub(name: str) -> tuple[str, Mapping[str, Any]]:
    rows = load_data_set(name)
    columns = dict.fromkeys(rows.column_names)
    return name, columns | (dict(rows[0]) if len(rows) else {})


def is_of_system(pattern: str) -> bool:
    """Whether a pattern names files of the system, which are endless or change."""
    return os.path.abspath(pattern).split("/")[1] in ("proc", "sys")


def _files(folder: Path) -> list[Path]:
    if is_saved_data_set(folder):
        return [folder]
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return [path for path in files if not path.name.startswith(".") and _form(path) is not None]


def _form(file: Path) -> RowForm | None:
    """None: it is no file of rows."""
    return FORMS.get(suffixes(file)[0])


def _row(file: Path) -> Mapping[str, Any] | None:
    if file.is_dir():  # of save_to_disk
        if (file / SAVED_DICT).is_file():
            file /= "train"
        names = json.loads((file / "dataset_info.json").read_text())["features"]
        return dict.fromkeys(names) | _first_of_arrow(file)
    form = _form(file)
    if form is None or not file.is_file():  # a named pipe is read only once
        return None
    with open_binary(os.fspath(file)) as stream:
        return _READERS[form](stream)


def _first_of_arrow(folder: Path) -> dict[str, Any]:
    """The first row of a folder of `save_to_disk`; nothing if it cannot be read like this."""
    import pyarrow

    for file in sorted(folder.glob("*.arrow")):
        try:
            batch = pyarrow.ipc.open_stream(file).read_next_batch()
        except (pyarrow.ArrowException, OSError, StopIteration):
            return {}
        if batch.num_rows:
            row: dict[str, Any] = batch.slice(0, 1).to_pylist()[0]
            return row
    return {}


def _jsonl(stream: BinaryIO) -> Mapping[str, Any]:
    line = next(line for line in iter(partial(stream.readline, _FIRST_LINE), b"") if line.strip())
    return _object(json.loads(line.decode("utf-8-sig")))


def _json(stream: BinaryIO) -> Mapping[str, Any]:
    text = stream.read(_FIRST_BYTES).decode("utf-8-sig", errors="ignore")
    start = text.index("{")
    if text[:start].strip() != "[":
        value, end = json.JSONDecoder().raw_decode(text, start)  # raises if the file is larger
        raise NotRowsError(no_list(value if not text[end:].strip() else {}))
    row, _ = json.JSONDecoder().raw_decode(text, start)
    return _object(row)


class NotRowsError(Exception):
    """A file that holds no rows as it is written."""


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


def _object(row: object) -> Mapping[str, Any]:
    if not isinstance(row, dict):
        raise ValueError("a row must be an object")
    return row


def _csv(stream: BinaryIO, *, dialect: str = "excel") -> Mapping[str, Any]:
    text = io.TextIOWrapper(stream, encoding="utf-8-sig", newline="")
    rows = csv.reader(iter(partial(text.readline, _FIRST_LINE), ""), dialect)
    header = next(rows)
    if problem := problem_of_header(header):
        raise NotRowsError(problem)
    return dict(itertools.zip_longest(header, next(rows, [])[: len(header)]))


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


def _parquet(stream: BinaryIO) -> Mapping[str, Any]:
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(stream) as file:
        row: dict[str, Any] = dict.fromkeys(file.schema_arrow.names)
        for batch in file.iter_batches(1):
            row |= batch.to_pylist()[0]
            break
        return row


def _arrow(stream: BinaryIO) -> Mapping[str, Any]:
    for batch in arrow_batches(stream):
        if batch.num_rows:
            row: dict[str, Any] = batch.slice(0, 1).to_pylist()[0]
            return row
    raise ValueError("it has no rows")


_READERS: dict[RowForm, Callable[[BinaryIO], Mapping[str, Any]]] = {
    "jsonl": _jsonl,
    "json": _json,
    "csv": _csv,
    "tsv": partial(_csv, dialect="excel-tab"),
    "parquet": _parquet,
    "arrow": _arrow,
}
