"""data.kind from the columns of the data, where the recipe does not give it."""

from __future__ import annotations

import csv
import glob
import gzip
import io
import json
import os
from collections.abc import Collection, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, cast

from launcher.recipe.hub import SAVED_DICT, is_hub_id, is_saved_data_set, load_data_set

_FIRST_LINE = 1 << 28
"""Most bytes of a line that are read: a small compressed file may hold many gigabytes."""
_FIRST_BYTES = 1 << 24
"""Bytes of a .json file that are searched for the end of its first row."""


def kind_of(
    columns: Collection[str], data: Mapping[str, Any], *, task: object = None, pairs: bool = False
) -> str | None:
    """The kind of data that has these columns, or None.

    data: the keys data.*_column. task: model.task. pairs: training is on pairs.
    """

    def has(key: str, *names: str) -> bool:
        given = data.get(f"{key}_column")
        return not set(columns).isdisjoint([given] if isinstance(given, str) else names)

    chat = has("messages", "messages", "conversations")
    if has("chosen", "chosen") and has("rejected", "rejected") and (pairs or not chat):
        return "preference"
    if chat:
        return "chat"
    if "input_ids" in columns:
        return "tokens"
    if task == "sequence_classification" and has("text", "text"):
        return "classification"
    if has("prompt", "prompt", "instruction") and has(
        "response", "response", "completion", "output"
    ):
        return "instruct"
    return "text" if has("text", "text") else None


def first_columns(patterns: Iterable[str], *, hub: bool = False) -> tuple[str, list[str]] | None:
    """The first file that the patterns name, and the columns of its first row; None if that is not
    a file of rows, or cannot be read. hub: also fetch a data set of the hub."""
    for pattern in patterns:
        if is_of_system(pattern):
            return None
        matches = sorted(glob.glob(pattern, recursive=True))
        if not matches and is_hub_id(pattern):
            return (pattern, load_data_set(pattern).column_names) if hub else None
        for match in map(Path, matches):
            try:
                for file in _files(match) if match.is_dir() else [match]:
                    columns = _columns(file)
                    return None if columns is None else (str(file), columns)
            except Exception:  # of damaged files: many classes, reported when they are read
                return None
    return None


def is_of_system(pattern: str) -> bool:
    """Whether a pattern names files of the system, which are endless or change."""
    return os.path.abspath(pattern).split("/")[1] in ("proc", "sys")


def _files(folder: Path) -> Iterable[Path]:
    if is_saved_data_set(folder):
        return [folder]
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return [path for path in files if not path.name.startswith(".") and _suffix(path) in _READERS]


def _suffix(file: Path) -> str:
    return Path(file.stem if file.suffix in (".gz", ".zst") else file.name).suffix.lower()


def _columns(file: Path) -> list[str] | None:
    if file.is_dir():  # of save_to_disk
        if (file / SAVED_DICT).is_file():
            file /= "train"
        return list(json.loads((file / "dataset_info.json").read_text())["features"])
    read = _READERS.get(_suffix(file))
    if read is None or not file.is_file():  # a named pipe is read only once
        return None
    with _open(file) as stream:
        return read(stream)


def _open(file: Path) -> BinaryIO:
    if file.suffix == ".gz":
        return cast(BinaryIO, gzip.open(file))
    if file.suffix == ".zst":
        import pyarrow

        return io.BufferedReader(pyarrow.input_stream(os.fspath(file), compression="zstd"))
    return file.open("rb")


def _jsonl(stream: BinaryIO) -> list[str]:
    line = next(line for line in iter(partial(stream.readline, _FIRST_LINE), b"") if line.strip())
    return list(json.loads(line.decode("utf-8-sig")).keys())


def _json(stream: BinaryIO) -> list[str]:
    text = stream.read(_FIRST_BYTES).decode("utf-8-sig", errors="ignore")
    row, _ = json.JSONDecoder().raw_decode(text, text.index("{"))
    return list(row)


def _csv(stream: BinaryIO) -> list[str]:
    text = io.TextIOWrapper(stream, encoding="utf-8-sig", newline="")
    return next(csv.reader(iter(partial(text.readline, _FIRST_LINE), "")))


def _parquet(stream: BinaryIO) -> list[str]:
    import pyarrow.parquet

    names: list[str] = pyarrow.parquet.read_schema(stream).names
    return names


_READERS = {".jsonl": _jsonl, ".json": _json, ".csv": _csv, ".parquet": _parquet}
