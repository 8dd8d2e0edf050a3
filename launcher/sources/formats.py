"""Files of rows: the suffixes by which they are known, their compression, and their first bytes."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import re
import zlib
from collections.abc import Iterator
from pathlib import PurePath
from typing import Any, BinaryIO, Literal

from launcher.sources.location import Location
from launcher.sources.store_names import path_of
from launcher.sources.store_requests import StoreError
from launcher.sources.stores import AHEAD

RowForm = Literal["jsonl", "json", "parquet", "csv", "tsv", "arrow"]
FORMS: dict[str, RowForm] = {
    ".jsonl": "jsonl",
    ".json": "json",
    ".parquet": "parquet",
    ".csv": "csv",
    ".tsv": "tsv",
    ".arrow": "arrow",
    ".feather": "arrow",
    ".ndjson": "jsonl",
    ".jl": "jsonl",
    ".jsonlines": "jsonl",
}
"""By suffix. Every other file is one document."""
ROW_FILES = ", ".join(FORMS)
COMPRESSED = (".gz", ".zst", ".xz", ".bz2")
"""Any file may have one of these suffixes after its own."""
OF_BLOCKS = (".parquet", ".arrow", ".feather")
"""Files that compress their own columns, and are read in any order."""
READ_ERRORS = (OSError, EOFError, lzma.LZMAError, zlib.error)
"""What reading a damaged file raises."""
_HEAD, _HEAD_AHEAD = 64, 1 << 16
_BINARY = re.compile(rb"[\x00-\x08\x0e-\x1f\x80-\xff]")
_SIGNATURES = {
    b"\x1f\x8b": "gzip data; add .gz to its name",
    b"\x28\xb5\x2f\xfd": "Zstandard data; add .zst to its name",
    b"\xfd7zXZ\x00": "xz data; add .xz to its name",
    b"BZh": "bzip2 data; add .bz2 to its name",
    b"PK\x03\x04": "a zip archive, or a file of an office program; write its content to files of rows",
    b"7z\xbc\xaf": "a 7z archive; unpack it",
    b"PAR1": "Parquet data; name it .parquet",
    b"ARROW1": "Arrow data; name it .arrow",
    b"\xff\xff\xff\xff": "Arrow data; name it .arrow",
    b"%PDF-": "a PDF document; extract its text",
    b"SQLite format 3": "an SQLite database; write its rows to a .jsonl",
    b"\x89HDF": "HDF5 data; write its rows to a .parquet or .jsonl",
    b"\xff\xfe\x00\x00": "UTF-32 text; convert it (iconv -f UTF-32 -t UTF-8 FILE >NEW)",
}
_UTF_16 = "UTF-16 text; convert it (iconv -f UTF-16{} -t UTF-8 FILE >NEW)"
_FIRST_LINE = 1 << 20
"""Most bytes of a line of a text file that is looked at."""


def suffixes(name: str) -> tuple[str, str]:
    """The suffix of a file's content, and that of its compression or an empty one."""
    path = PurePath(path_of(name))
    suffix = path.suffix.lower()
    return (PurePath(path.stem).suffix.lower(), suffix) if suffix in COMPRESSED else (suffix, "")


def row_form(name: str) -> RowForm | None:
    """The form of the rows in a file; None: it is no file of rows."""
    return FORMS.get(suffixes(name)[0])


class _Decompressed(io.BufferedReader):
    """What a compressed file holds. Closes the file, too."""

    def __init__(self, content: Any, file: BinaryIO) -> None:
        super().__init__(content)
        self._file = file

    def close(self) -> None:
        super().close()
        self._file.close()


def open_binary(file: Location, *, ahead: int = AHEAD) -> BinaryIO:
    """The content of a file. ahead: see `Location.open`. Raises OSError; while a damaged file is read,
    one of READ_ERRORS."""
    compression, stream = suffixes(file.name)[1], file.open(ahead=ahead)
    if not compression:
        return stream
    if compression == ".xz":
        return _Decompressed(lzma.open(stream), stream)
    if compression == ".bz2":
        return _Decompressed(bz2.open(stream), stream)
    if compression == ".gz":
        return _Decompressed(gzip.open(stream), stream)
    import pyarrow

    return _Decompressed(pyarrow.input_stream(stream, compression="zstd"), stream)


def other_content(file: Location) -> str:
    """What a file holds by its first bytes, if that is neither UTF-8 text nor what its compression
    says, and what to do; empty: it may be text. Raises one of READ_ERRORS."""
    with open_binary(file, ahead=_HEAD_AHEAD) as stream:
        head = stream.read(_HEAD)
    found = (what for mark, what in _SIGNATURES.items() if head.startswith(mark))
    if (what := next(found, None)) is not None:
        return what if _BINARY.search(head) else ""
    if head[:2] in (b"\xff\xfe", b"\xfe\xff"):
        return _UTF_16.format("")
    for first, order in ((0, "BE"), (1, "LE")):
        zeros, others = head[first::2], head[1 - first :: 2]
        if len(zeros) > 1 and not any(zeros) and all(others):
            return _UTF_16.format(order)
    return ""


def holds_json_lines(file: Location) -> bool:
    """Whether the first two lines of a text file that are not empty, or its only one, are JSON
    objects."""
    found = 0
    try:
        with open_binary(file, ahead=_HEAD_AHEAD) as stream:
            while found < 2 and (line := stream.readline(_FIRST_LINE)):
                if line.strip():
                    if not isinstance(row := json.loads(line.decode("utf-8-sig")), dict) or not row:
                        return False
                    found += 1
    except StoreError:
        raise
    except (*READ_ERRORS, ValueError, RecursionError):
        return False
    return found > 0


def arrow_batches(stream: Any) -> Iterator[Any]:
    """The batches of an open Arrow file, also of Feather version 2, or of an Arrow stream. Raises
    pyarrow.ArrowException if it is neither."""
    import pyarrow.ipc

    magic = stream.read(6)
    stream.seek(0)
    if magic != b"ARROW1":
        yield from pyarrow.ipc.open_stream(stream)
        return
    file = pyarrow.ipc.open_file(stream)
    for number in range(file.num_record_batches):
        yield file.get_batch(number)
