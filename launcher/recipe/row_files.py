"""Files compressed with gzip or Zstandard: any file may have their suffix after its own."""

from __future__ import annotations

import io
from pathlib import Path
from typing import BinaryIO

COMPRESSED = {".gz": "gzip", ".zst": "zstd"}


def suffixes(file: Path) -> tuple[str, str]:
    """The suffix of a file's content, and that of its compression or an empty one."""
    suffix = file.suffix.lower()
    return (Path(file.stem).suffix.lower(), suffix) if suffix in COMPRESSED else (suffix, "")


def open_binary(name: str) -> BinaryIO:
    """The content of a file. Raises OSError, also while a damaged file is read."""
    compression = COMPRESSED.get(suffixes(Path(name))[1])
    if compression is None:
        return open(name, "rb")
    import pyarrow

    return io.BufferedReader(pyarrow.input_stream(name, compression=compression))
