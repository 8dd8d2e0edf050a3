"""Writes files past the page cache where the file system can."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

import torch

from launcher.checkpoint.files import Checksums, StoredFile

ALIGNMENT = 4096
"""Of buffers, and of positions in a file, for direct I/O."""


def aligned_buffer(size: int, *, pinned: bool = False) -> torch.Tensor:
    """Bytes in host memory, aligned for direct I/O."""
    whole = torch.empty(size + ALIGNMENT, dtype=torch.uint8, pin_memory=pinned)
    skip = -whole.data_ptr() % ALIGNMENT
    return whole[skip : skip + size]


def write_chunks(path: Path, chunks: Iterator[memoryview], *, size: int) -> StoredFile:
    """Writes a new file and flushes it to the disk. Raises OSError.

    Writes past the page cache where the file system can: copying into that cache would cost CPU
    time that training needs. All chunks start at multiples of 4,096 bytes; all but the last have
    such a size.
    """
    checksums, at = Checksums(), 0
    descriptor = _open(path)
    try:
        for chunk in chunks:
            checksums.update(chunk[: size - at])
            while len(chunk):
                try:
                    written = os.pwrite(descriptor, chunk, at)
                except OSError as problem:
                    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
                    if problem.errno not in (errno.EINVAL, errno.EFAULT) or not flags & os.O_DIRECT:
                        raise
                    # EINVAL: wrong alignment for this file system, for example after a short write.
                    # EFAULT: the disk cannot read this memory, for example if some drivers pinned
                    # it.
                    fcntl.fcntl(descriptor, fcntl.F_SETFL, flags & ~os.O_DIRECT)
                    continue
                chunk, at = chunk[written:], at + written
        os.ftruncate(descriptor, size)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return checksums.file()


def _open(path: Path) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    try:
        return os.open(path, flags | os.O_DIRECT, 0o666)
    except OSError as problem:
        if problem.errno != errno.EINVAL:
            raise
    path.unlink(missing_ok=True)  # some file systems create the file before they refuse
    return os.open(path, flags, 0o666)
