"""Files and folders that are written atomically, flushed to the disk, or stored with a checksum.

A reader of an atomic write finds the old content or the new content, never a part of it, whenever
the writer is killed. Other modules call these functions and no fsync of their own. Imports no
torch.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import hashlib
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import xxhash
from pydantic import BaseModel

from launcher.distributed.processes import is_running, process_start, this_machine

logger = logging.getLogger(__name__)

ALIGNMENT = 4096
"""Bytes; of buffers, and of positions in a file, for direct I/O."""
_BLOCK = 4096
"""Bytes for which a full disk has room in a file that exists."""
_READ = 4 << 20
"""Bytes that are read at once for a checksum."""
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
_LEFTOVER = re.compile(
    r"\.(?P<purpose>writing|old)-(?P<machine>[0-9a-f]{8})-(?P<pid>\d+)-(?P<start>\d+)-[0-9a-f]{4}"
)
"""The end of the name of a folder that `replace_folder` writes or replaces, with its process."""


# Atomic replacement


@contextmanager
def replace_file(file: Path, *, only_writer: bool = False) -> Iterator[Path]:
    """Yields the path of a scratch file. It replaces `file` at the end of the block, and is removed
    if the block fails. Raises OSError.

    only_writer: no other process writes this file at the same time. The scratch file of a process
    that was killed is then overwritten by the next one.
    """
    process = "" if only_writer else f".{os.getpid()}"
    scratch = file.with_name(f".{file.name}{process}")
    try:
        yield scratch
        scratch.replace(file)
    except BaseException:
        with contextlib.suppress(OSError):
            scratch.unlink(missing_ok=True)
        raise


def replace_text(file: Path, text: str, *, durable: bool = False) -> None:
    """Replaces a file atomically. durable: it is on the disk before it has its name: without it, a
    crash of the machine may leave an empty file. On a full disk the file is overwritten instead, if the text fits
    into the blocks that the file has. Raises OSError."""
    data = text.encode()
    try:
        with replace_file(file) as scratch:
            scratch.write_bytes(data)
            if durable:
                flush_path(scratch)
    except OSError as problem:
        size = file.stat().st_size if file.exists() else 0
        if problem.errno not in _NO_SPACE or not size or len(data) > max(size, _BLOCK):
            raise
        with file.open("r+b") as stream:
            stream.write(data)
            stream.truncate()


@contextmanager
def replace_folder(folder: Path, *, written: Sequence[str]) -> Iterator[Path]:
    """Yields a scratch folder that replaces `folder` at the end of the block.

    written: patterns of the names that writers of this folder write. The new folder keeps the
    other files of the old one, such as a model card of the user.

    A process that is killed meanwhile leaves the new folder, or the old one, perhaps as
    FOLDER.old-PROCESS. The next call removes what is left. A crash of the machine leaves the same,
    because the new folder is flushed to the disk before the old one makes room. Raises OSError.
    """
    folder = folder.resolve()  # of a link: what it points to
    remove_leftovers(folder)
    process = f"{_machine()}-{os.getpid()}-{process_start(os.getpid())}-{os.urandom(2).hex()}"
    old = folder.with_name(f"{folder.name}.old-{process}")
    scratch = folder.with_name(f"{folder.name}.writing-{process}")
    scratch.mkdir(parents=True)
    try:
        yield scratch
        if folder.exists():
            _keep_other_files(folder, scratch, written)
        _flush_contents(scratch)
        if folder.exists():
            folder.rename(old)
        commit_folder(scratch, folder)
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def remove_leftovers(folder: Path, *, owned: bool = False) -> None:
    """Removes the scratch folders and old folders that killed processes have left beside `folder`
    (`replace_folder`). The processes of another machine may still run: a warning names their
    folders. With `owned`, where the caller has the lock of the run folder, they are removed too."""
    folder = folder.resolve()
    for path in sorted(folder.parent.glob(f"{glob.escape(folder.name)}.*")):
        found = _LEFTOVER.fullmatch(path.name.removeprefix(folder.name))
        if found is None:
            continue
        if found["machine"] != _machine() and not owned:
            what = "was left by an export on another machine, or before this one was restarted"
            logger.warning(f"{path} {what}; if that export does not run any more, delete it")
        elif found["machine"] == _machine() and is_running(int(found["pid"]), int(found["start"])):
            continue  # it is being written
        elif found["purpose"] == "old" and not folder.exists():
            path.rename(folder)
        else:
            shutil.rmtree(path, ignore_errors=True)


def _machine() -> str:
    return hashlib.sha256(this_machine().encode()).hexdigest()[:8]


def _keep_other_files(folder: Path, scratch: Path, written: Sequence[str]) -> None:
    for path in folder.iterdir():
        kept = scratch / path.name
        if kept.exists() or any(path.match(pattern) for pattern in written):
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.copytree(path, kept, symlinks=True, copy_function=_link)
        else:
            _link(path, kept)


def _link(source: str | Path, target: str | Path) -> None:
    """A second name of a file, or a copy where the file system has no such links."""
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:
        shutil.copy2(source, target, follow_symlinks=False)


@contextmanager
def mode_of_umask(file: Path) -> Iterator[None]:
    """Gives the file that the block writes the mode of other new files. A library may give it
    another one: safetensors makes files that only their owner can read. Raises OSError."""
    file.unlink(missing_ok=True)
    file.touch()
    mode = file.stat().st_mode
    yield
    file.chmod(mode)


# Flushing to the disk


def flush(stream: IO[bytes]) -> None:
    """Flushes what was written to an open file to the disk. Raises OSError."""
    stream.flush()
    os.fsync(stream.fileno())


def flush_path(path: Path) -> None:
    """Flushes a file, or the list of the files of a folder, to the disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as problem:
        if problem.errno != errno.EINVAL:  # this file system does not flush such files
            raise
    finally:
        os.close(descriptor)


def _flush_contents(folder: Path) -> None:
    """Flushes all files and folders in a folder to the disk. Raises OSError."""
    for path in folder.rglob("*"):
        if not path.is_symlink() and (path.is_file() or path.is_dir()):
            with contextlib.suppress(PermissionError):  # of a user's file, which was only linked
                flush_path(path)


def commit_folder(scratch: Path, folder: Path) -> None:
    """Renames a scratch folder whose files are flushed to the disk already. After a crash of the
    machine there is the whole folder or none. Raises OSError."""
    flush_path(scratch)
    scratch.rename(folder)
    flush_path(folder.parent)


# Checksums


class StoredFile(BaseModel):
    """Size and checksum of a file."""

    bytes: int
    checksum: str
    """xxh3_128, in hexadecimal digits."""


def write_file(path: Path, data: bytes, *, new: bool = False, mode: int = 0o666) -> StoredFile:
    """Writes a small file and flushes it to the disk.

    new: raises FileExistsError if the file exists. One of several processes succeeds, on NFS too.
    mode: permissions of a new file, before the umask. Raises OSError.
    """
    flags = os.O_EXCL if new else os.O_TRUNC
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | flags, mode)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
        flush(file)
    return StoredFile(bytes=len(data), checksum=checksum_of([data]))


def write_chunks(
    path: Path, chunks: Iterable[memoryview], *, size: int, advance: Callable[[float], None]
) -> StoredFile:
    """Writes a new file and flushes it to the disk. Calls `advance` with the bytes of each chunk.
    Raises OSError.

    Bypasses the page cache if the file system can and the chunks' addresses and sizes are multiples
    of ALIGNMENT: copying into it would cost CPU time that training needs.
    """
    checksum, at = xxhash.xxh3_128(), 0
    with path.open("xb", buffering=0) as file:
        direct = DirectFile(file)
        for chunk in chunks:
            checksum.update(chunk[: size - at])
            direct.move(os.pwrite, chunk, at)
            at += len(chunk)
            advance(len(chunk))
        file.truncate(size)
        flush(file)
    return StoredFile(bytes=size, checksum=checksum.hexdigest())


def checksum_of(parts: Iterable[bytes | memoryview]) -> str:
    """xxh3_128 of these bytes, one after another, in hexadecimal digits."""
    checksum = xxhash.xxh3_128()
    for part in parts:
        checksum.update(part)
    return checksum.hexdigest()


def checksum_of_file(
    file: Path, *, size: int | None = None, advance: Callable[[float], None] = lambda _: None
) -> xxhash.xxh3_128:
    """xxh3_128 of the first `size` bytes of a file, or of the whole file. More bytes can be added to
    the result. Calls `advance` with the bytes of each block. Raises OSError."""
    checksum, left = xxhash.xxh3_128(), size
    with file.open("rb", buffering=0) as stream:
        while block := stream.read(_READ if left is None else min(left, _READ)):
            checksum.update(block)
            advance(len(block))
            left = None if left is None else left - len(block)
    return checksum


def blocks(
    file: Path, *, stored: StoredFile | None = None, sent: Callable[[int], None] = lambda _: None
) -> Iterator[bytes]:
    """The bytes of a file, block by block. sent: is given the bytes of each block. Raises OSError, and
    ValueError at the end if they are not those of `stored`."""
    checksum = xxhash.xxh3_128()
    with file.open("rb", buffering=0) as stream:
        while block := stream.read(_READ):
            checksum.update(block)
            sent(len(block))
            yield block
    if stored is not None and checksum.hexdigest() != stored.checksum:
        raise ValueError(f"{file.name} has changed since it was written")


class DirectFile:
    """Reads and writes an open file, bypassing the page cache where the file system can."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self._flags = file, fcntl.fcntl(file, fcntl.F_GETFL)
        with contextlib.suppress(OSError):
            fcntl.fcntl(file, fcntl.F_SETFL, self._flags | os.O_DIRECT)

    def move(self, call: Callable[..., int], memory: memoryview, at: int) -> None:
        """Reads or writes all of `memory` from byte `at` of the file on, with a function such as
        os.pwrite. Raises OSError."""
        while len(memory):
            try:
                moved = call(self._file.fileno(), memory, at)
            except OSError as problem:
                # EINVAL: the file system requires another alignment, or a short write broke it.
                # EFAULT: the disk cannot access this memory, such as some pinned memory
                unsuitable = problem.errno in (errno.EINVAL, errno.EFAULT)
                if not unsuitable or fcntl.fcntl(self._file, fcntl.F_GETFL) == self._flags:
                    raise
                fcntl.fcntl(self._file, fcntl.F_SETFL, self._flags)
                continue
            if not moved:
                raise OSError(errno.EIO, "the file ends early")
            memory, at = memory[moved:], at + moved
