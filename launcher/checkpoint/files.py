"""The files of a checkpoint: writing, validity, the newest one, pruning. Imports no torch.

    checkpoints/step_00000500/
      rank_00000.safetensors   what this rank wrote: parts of tensors, its random states
      index.json               where each part of each tensor lies
      state.json               everything else: counters, loss scale, recipe
      commit.json              the marker: size and checksums of all other files

A checkpoint is written into a scratch folder, `step_00000500.writing-...`, which is renamed at the
end.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Literal

import xxhash
from pydantic import BaseModel, Field, ValidationError

from launcher.errors import RecipeError, TrainingError

logger = logging.getLogger(__name__)

MARKER, INDEX, STATE = "commit.json", "index.json", "state.json"
BLOCK = 256 * 2**20
"""Each block of a file has its own checksum, so that threads and ranks share the check."""
ALIGNMENT = 4096
"""Of buffers, and of positions in a file, for direct I/O."""
_NAME = re.compile(r"step_\d{8,}")
_SCRATCH = re.compile(r"step_\d{8,}\.(writing|replaced|deleting)-\w+")
_READ = 2**20
"""Bytes to read at once for a checksum: small enough for a core's cache."""


class DamagedCheckpointError(ValueError):
    """This checkpoint cannot be used. The message says why."""

    def __init__(self, path: Path, problem: str) -> None:
        self.problem = problem
        super().__init__(f"checkpoint {path} is damaged: {problem}")


class NoneLeftError(TrainingError):
    """There are checkpoints, but none is valid."""

    def __init__(self, folder: Path, problems: Sequence[str]) -> None:
        super().__init__(
            "\n  ".join(
                [f"none of the {len(problems)} checkpoints in {folder} is valid:", *problems]
            )
            + "\nrepair one, or remove that folder to start from scratch",
            reason="no_valid_checkpoint",
        )


class StoredFile(BaseModel):
    """A file's entry in the marker."""

    bytes: int
    checksums: list[str]
    """xxh3_128 of each block of `BLOCK` bytes; empty for an empty file."""


class Marker(BaseModel):
    """Content of commit.json. A checkpoint without it is not valid."""

    format: Literal[1] = 1
    step: int
    ranks: int
    """How many ranks wrote it."""
    time: float
    """When it was complete, in seconds since 1970."""
    files: dict[Annotated[str, Field(pattern=r"^\w[\w.]*$")], StoredFile]


def checkpoint_name(step: int) -> str:
    return f"step_{step:08d}"


def step_of(path: Path) -> int:
    """The step in the name of a checkpoint."""
    return int(path.name.removeprefix("step_"))


def rank_file(rank: int) -> str:
    return f"rank_{rank:05d}.safetensors"


def list_checkpoints(folder: Path) -> list[Path]:
    """All checkpoints in a folder, valid or not, oldest first. Empty if there is no such folder."""
    found = [path for path in folder.glob("step_*") if _NAME.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=step_of)


# Writing


class Checksums:
    """Computes the checksums of a file from its bytes, in order."""

    def __init__(self) -> None:
        self._bytes = 0
        self._done: list[str] = []
        self._hash = xxhash.xxh3_128()

    def update(self, data: memoryview) -> None:
        while len(data):
            part = data[: BLOCK - self._bytes % BLOCK]
            self._hash.update(part)
            self._bytes += len(part)
            if self._bytes % BLOCK == 0:
                self._done.append(self._hash.hexdigest())
                self._hash.reset()
            data = data[len(part) :]

    def file(self) -> StoredFile:
        last = [self._hash.hexdigest()] if self._bytes % BLOCK else []
        return StoredFile(bytes=self._bytes, checksums=[*self._done, *last])


def write_file(path: Path, data: bytes) -> StoredFile:
    """Writes a small file and flushes it to the disk."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    checksums = Checksums()
    checksums.update(memoryview(data))
    return checksums.file()


def write_chunks(path: Path, chunks: Iterator[memoryview], *, size: int) -> StoredFile:
    """Writes a new file and flushes it to the disk. Raises OSError.

    Bypasses the page cache where the file system can: copying into it would cost CPU time that
    training needs. All chunks start at multiples of ALIGNMENT; all but the last have such a size.
    """
    checksums, at = Checksums(), 0
    descriptor = _open_direct(path)
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
                    # EINVAL: this file system wants another alignment, or a short write broke it.
                    # EFAULT: the disk cannot read this memory, such as some pinned memory
                    fcntl.fcntl(descriptor, fcntl.F_SETFL, flags & ~os.O_DIRECT)
                    continue
                chunk, at = chunk[written:], at + written
        os.ftruncate(descriptor, size)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return checksums.file()


def _open_direct(path: Path) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    try:
        return os.open(path, flags | os.O_DIRECT, 0o666)
    except OSError as problem:
        if problem.errno != errno.EINVAL:
            raise
    path.unlink(missing_ok=True)  # some file systems create the file before they refuse
    return os.open(path, flags, 0o666)


def scratch_folder(folder: Path, step: int) -> Path:
    """Makes a folder with a unique name, in which a checkpoint is written."""
    scratch = _renamed(folder / checkpoint_name(step), "writing")
    scratch.mkdir(parents=True)
    return scratch


def _renamed(path: Path, purpose: str) -> Path:
    return path.with_name(f"{path.name}.{purpose}-{os.urandom(4).hex()}")


def commit(scratch: Path, *, step: int, ranks: int, files: Mapping[str, StoredFile]) -> Path:
    """Turns a scratch folder into a checkpoint: writes the marker, then renames the folder.

    files: all files, already flushed to the disk. Replaces a checkpoint of the same step. Returns
    the checkpoint.
    """
    marker = Marker(step=step, ranks=ranks, time=time.time(), files=dict(files))
    write_file(scratch / MARKER, marker.model_dump_json(indent=1).encode())
    _sync_folder(scratch)
    path = scratch.with_name(checkpoint_name(step))
    replaced = _renamed(path, "replaced")
    if path.exists():
        path.rename(replaced)
    scratch.rename(path)
    _sync_folder(path.parent)
    shutil.rmtree(replaced, ignore_errors=True)
    return path


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# Validity


def read_marker(path: Path) -> Marker:
    """Reads commit.json. Raises DamagedCheckpointError if it is missing or wrong."""
    try:
        marker = Marker.model_validate_json((path / MARKER).read_bytes(), strict=True)
    except FileNotFoundError:
        problem = f"there is no {MARKER}: it was not written to its end"
        raise DamagedCheckpointError(path, problem) from None
    except OSError as error:
        problem = f"{MARKER} cannot be read: {error.strerror}"
        raise DamagedCheckpointError(path, problem) from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        problem = f"{MARKER} cannot be read: {where}: {first['msg']}"
        raise DamagedCheckpointError(path, problem) from None
    expected = {INDEX, STATE, *map(rank_file, range(min(marker.ranks, len(marker.files))))}
    if absent := sorted(expected - marker.files.keys()):
        raise DamagedCheckpointError(path, f"{MARKER} does not name {absent[0]}")
    if _NAME.fullmatch(path.name) and marker.step != step_of(path):
        raise DamagedCheckpointError(path, f"{MARKER} is that of step {marker.step}")
    return marker


def verify(path: Path, deep: bool = True, *, rank: int = 0, ranks: int = 1) -> str | None:
    """Returns what is wrong with a checkpoint, or None.

    deep: reads all of it and compares checksums; otherwise reads only the marker and file sizes.
    rank, ranks: this rank checks every ranks-th block. The checkpoint is valid if no rank finds a
    problem.
    """
    try:
        marker = read_marker(path)
    except DamagedCheckpointError as error:
        return error.problem
    blocks: list[tuple[Path, int, str]] = []
    for name, stored in marker.files.items():
        try:
            size = (path / name).stat().st_size
        except OSError as error:
            return f"{name} cannot be read: {error.strerror}"
        if size != stored.bytes:
            return f"{name} has {size:,} bytes instead of {stored.bytes:,}"
        if len(stored.checksums) != -(-size // BLOCK):
            return f"{MARKER} has {len(stored.checksums)} checksums for {name}"
        starts = range(0, size, BLOCK)
        blocks += [(path / name, *block) for block in zip(starts, stored.checksums, strict=True)]
    if not deep:
        return None
    mine = blocks[rank::ranks]
    with ThreadPoolExecutor(max(1, min(8, len(mine), len(os.sched_getaffinity(0))))) as pool:
        problems = pool.map(lambda block: _check_block(*block), mine)
        return next(filter(None, problems), None)


def _check_block(file: Path, start: int, checksum: str) -> str | None:
    found, buffer, left = xxhash.xxh3_128(), memoryview(bytearray(_READ)), BLOCK
    try:
        with file.open("rb", buffering=0) as stream:
            stream.seek(start)
            while read := stream.readinto(buffer[: min(_READ, left)]):
                found.update(buffer[:read])
                left -= read
    except OSError as error:
        return f"{file.name} cannot be read: {error.strerror}"
    if found.hexdigest() != checksum:
        return f"{file.name} has changed since it was written, in the block at byte {start:,}"
    return None


def newest_valid(
    checkpoints: Sequence[Path], check: Callable[[Path], str | None] = verify
) -> Path | None:
    """The newest valid one of `list_checkpoints`; None if there are none. Logs each damaged one.

    check: returns what is wrong with a checkpoint, or None. Raises NoneLeftError if all are
    damaged.
    """
    problems = []
    for path in reversed(checkpoints):
        problem = check(path)
        if problem is None:
            return path
        problems.append(str(DamagedCheckpointError(path, problem)))
        logger.warning(f"{problems[-1]}; trying an older one")
    if problems:
        raise NoneLeftError(checkpoints[0].parent, problems)
    return None


# Deleting


def discard(path: Path) -> None:
    """Deletes a checkpoint, renaming it first: it is never seen half deleted. Raises OSError."""
    shutil.rmtree(path.rename(_renamed(path, "deleting")))


def discard_newer(folder: Path, step: int) -> None:
    """Deletes the checkpoints after a step, newest first. Raises OSError."""
    for path in reversed(list_checkpoints(folder)):
        if step_of(path) > step:
            discard(path)


def prune(
    folder: Path, keep_last: int, keep_every: int | None = None, best_step: int | None = None
) -> None:
    """Deletes old checkpoints and abandoned scratch folders.

    Keeps the newest `keep_last` valid ones (by marker and sizes), multiples of `keep_every`, and
    `best_step`. Deletes a damaged one if it is older than those of `keep_last`. No save may be in
    progress. Raises OSError.
    """
    for entry in list(os.scandir(folder)):
        if _SCRATCH.fullmatch(entry.name):
            shutil.rmtree(entry.path)
    checkpoints = list_checkpoints(folder)
    valid = [path for path in checkpoints if verify(path, deep=False) is None]
    for path in checkpoints:
        step = step_of(path)
        milestone = (keep_every is not None and step % keep_every == 0) or step == best_step
        old = valid and step < step_of(valid[-keep_last:][0])
        if old and not (path in valid and milestone):
            discard(path)


def check_space(folder: Path, bytes_needed: int) -> None:
    """Makes the folder. Raises RecipeError if it is not writable or lacks the space."""
    probe, advice = folder / f".probe-{os.getpid()}", "give another run.dir"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.write_bytes(b"")
        probe.unlink()
        space = os.statvfs(folder)
    except OSError as error:
        text = f"checkpoint: {folder} cannot be written to: {error.strerror}; {advice}"
        raise RecipeError(text) from None
    free = space.f_bavail * space.f_frsize
    if free < bytes_needed:
        raise RecipeError(
            f"checkpoint: one checkpoint takes {bytes_needed / 2**30:,.2f} GiB, and {folder} has "
            f"{free / 2**30:,.2f} GiB free; free some, {advice}, or set checkpoint.every_steps=null"
        )
