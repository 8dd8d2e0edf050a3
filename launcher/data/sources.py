"""Files into documents: which files a pattern means, and what is in them."""

from __future__ import annotations

import glob
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from launcher.errors import RecipeError

ROW_FILES = (".jsonl", ".json", ".parquet")
"""Files of rows. Every other file is one document."""

_NOT_TEXT = {".pyc", ".so", ".png", ".jpg", ".gif", ".zip", ".gz", ".safetensors", ".bin", ".npy", ".exe", ".a", ".o"}


def find_files(patterns: tuple[str, ...]) -> list[Path]:
    """The files that the patterns mean, in the order of the patterns, each pattern's sorted by path, each file once.

    A folder stands for all files below it but hidden ones and, in a tree of source, caches and binaries.
    Raises RecipeError where a pattern means no file.
    """
    found: dict[Path, None] = {}
    for pattern in patterns:
        files: list[Path] = []
        for match in sorted(glob.glob(pattern, recursive=True)) or [pattern]:
            path = Path(match)
            if path.is_dir():
                files += sorted(file for file in path.rglob("*") if file.is_file() and _wanted(file.relative_to(path)))
            elif path.is_file():
                files.append(path)
        if not files:
            raise RecipeError(f"data: {pattern!r} means no file (looked for in {Path.cwd()})")
        found |= dict.fromkeys(files)
    return list(found)


def _wanted(relative: Path) -> bool:
    hidden = any(part.startswith(".") or part == "__pycache__" for part in relative.parts)
    return not hidden and relative.suffix.lower() not in _NOT_TEXT


def read_documents(file: Path, *, column: str) -> Iterator[str]:
    """The documents of a file: one a row, from `column`, or the whole of a text file.

    Raises RecipeError naming file and row where one has no such column, is malformed, not UTF-8 or cannot be read.
    """
    if file.suffix.lower() not in ROW_FILES:
        try:
            text = file.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise RecipeError(f"{file}: not UTF-8 text (byte {error.start}); convert it, or leave it out of the patterns") from None
        except OSError as error:
            raise RecipeError(f"{file}: cannot be read: {error.strerror}") from None
        if text:
            yield text
        return
    for where, row in read_rows(file):
        value = row.get(column)
        if not isinstance(value, str):
            got = "no such column" if column not in row else f"got {type(value).__name__}"
            raise RecipeError(f"{where}: column {column!r} must hold text; {got}; columns: {', '.join(row)} (data.text_column names it)")
        if not _encodable(value):
            raise RecipeError(f"{where}: column {column!r} holds half a surrogate pair (\\ud800 to \\udfff), which is no character")
        if value:
            yield value


def _encodable(text: str) -> bool:
    try:
        return text.isascii() or bool(text.encode())
    except UnicodeEncodeError:
        return False


def read_rows(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The rows of a .jsonl, .json or .parquet file, each with `file:line` (or row) to name it by."""
    suffix = file.suffix.lower()
    if suffix == ".parquet":
        yield from _parquet_rows(file)
        return
    try:
        if suffix == ".jsonl":
            with file.open(encoding="utf-8") as lines:
                for number, text in enumerate(lines, start=1):
                    if text.strip():
                        yield _row(f"{file}:{number}", json.loads(text.rstrip()))
        else:
            rows = json.loads(file.read_text(encoding="utf-8"))
            if not isinstance(rows, list):
                raise RecipeError(f"{file}: must be a list of objects; got {type(rows).__name__}")
            for index, row in enumerate(rows, start=1):
                yield _row(f"{file} row {index}", row)
    except json.JSONDecodeError as error:
        line = number if suffix == ".jsonl" else error.lineno
        raise RecipeError(f"{file}:{line}: not JSON: {error.msg} (column {error.colno})") from None
    except UnicodeDecodeError as error:
        raise RecipeError(f"{file}: not UTF-8 text (byte {error.start} of a block)") from None
    except OSError as error:
        raise RecipeError(f"{file}: cannot be read: {error.strerror}") from None


def _row(where: str, row: Any) -> tuple[str, dict[str, Any]]:
    if not isinstance(row, dict):
        raise RecipeError(f'{where}: must be an object such as {{"text": ...}}; got {type(row).__name__}')
    return where, row


def _parquet_rows(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    import pyarrow
    import pyarrow.parquet

    try:
        number = 0
        for batch in pyarrow.parquet.ParquetFile(file).iter_batches(batch_size=1024):
            for row in batch.to_pylist():
                number += 1
                yield f"{file} row {number}", row
    except (pyarrow.ArrowException, OSError) as error:
        raise RecipeError(f"{file}: not a parquet file, or a damaged one: {str(error).splitlines()[0]}") from None
