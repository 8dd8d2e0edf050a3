"""The files of a checkpoint: validity, the newest one, pruning. Imports no torch, for `launcher
status`.

    checkpoints/step_00000500/
      rank_00000.safetensors   what this rank wrote: parts of tensors, its random states
      index.json               where each part of each tensor lies
      state.json               everything else: counters, loss scale, recipe
      commit.json              the marker: size and checksums of all other files

A checkpoint is written into a scratch folder, `step_00000500.writing-...`, which is renamed at the
end.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import xxhash

from launcher.errors import RecipeError, TrainingError

logger = logging.getLogger(__name__)

FORMAT = 1
MARKER, INDEX, STATE = "commit.json", "index.json", "state.json"
BLOCK = 256 * 2**20
"""Each block of a file has its own checksum, so that threads and ranks share the check."""
_NAME = re.compile(r"step_(\d{8,})")
_SCRATCH = re.compile(r"step_\d{8,}\.(writing|replaced|deleting)-\w+")
_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.]*")
_READ = 2**20
"""Bytes to read at once for a checksum: small enough for a core's cache."""


class DamagedCheckpointError(ValueError):
    """This checkpoint cannot be used. The message says why."""

    def __init__(self, path: Path, problem: str) -> None:
        self.path, self.problem = path, problem
        super().__init__(f"checkpoint {path} is damaged: {problem}")


class NoneLeftError(TrainingError):
    """There are checkpoints, but none is valid."""

    def __init__(self, folder: Path, problems: Sequence[str]) -> None:
        super().__init__(
            f"none of the {len(problems)} checkpoints in {folder} is valid, and the run does not "
            "start from scratch by itself:\n"
            + "\n".join(f"  {problem}" for problem in problems)
            + "\nrepair one, or remove that folder to start from scratch",
            reason="no_valid_checkpoint",
        )


@dataclass(frozen=True)
class StoredFile:
    """A file's entry in the marker."""

    bytes: int
    checksums: list[str]
    """xxh3_128 of each block of `BLOCK` bytes; empty for an empty file."""


@dataclass(frozen=True)
class Marker:
    """Content of commit.json. A checkpoint without it is not valid."""

    step: int
    ranks: int
    """How many ranks wrote it."""
    time: float
    """When it was complete, in seconds since 1970."""
    files: dict[str, StoredFile]


def checkpoint_name(step: int) -> str:
    """Name of the folder."""
    return f"step_{step:08d}"


def step_of(path: Path) -> int:
    """The step in the name of a checkpoint. Raises DamagedCheckpointError if it is no such name."""
    match = _NAME.fullmatch(path.name)
    if match is None:
        raise DamagedCheckpointError(
            path, "its name is not that of a checkpoint, such as step_00000500"
        )
    return int(match[1])


def rank_file(rank: int) -> str:
    """Name of the file that a rank writes."""
    return f"rank_{rank:05d}.safetensors"


def list_checkpoints(folder: Path) -> list[Path]:
    """All checkpoints in a folder, valid or not, oldest first. Empty if there is no such folder."""
    try:
        found = [
            Path(entry.path)
            for entry in os.scandir(folder)
            if _NAME.fullmatch(entry.name) and entry.is_dir()
        ]
    except FileNotFoundError:
        return []
    return sorted(found, key=step_of)


class Checksums:
    """Computes the checksums of a file from its bytes, in order."""

    def __init__(self) -> None:
        self.bytes = 0
        self._done: list[str] = []
        self._hash = xxhash.xxh3_128()

    def update(self, data: memoryview) -> None:
        """Adds the next bytes."""
        while len(data):
            part = data[: BLOCK - self.bytes % BLOCK]
            self._hash.update(part)
            self.bytes += len(part)
            if self.bytes % BLOCK == 0:
                self._done.append(self._hash.hexdigest())
                self._hash.reset()
            data = data[len(part) :]

    def file(self) -> StoredFile:
        """The file's entry in the marker."""
        last = [self._hash.hexdigest()] if self.bytes % BLOCK else []
        return StoredFile(self.bytes, [*self._done, *last])


def read_marker(path: Path) -> Marker:
    """Reads commit.json. Raises DamagedCheckpointError if it is missing or wrong."""

    def damaged(problem: str) -> DamagedCheckpointError:
        return DamagedCheckpointError(path, problem)

    if not path.is_dir():
        raise damaged("there is no such folder")
    try:
        found = json.loads((path / MARKER).read_bytes())
        if found["format"] != FORMAT:
            raise damaged(f"{MARKER} has format {found['format']!r}; this version reads {FORMAT}")
        files = {
            str(name): StoredFile(int(entry["bytes"]), list(map(str, entry["checksums"])))
            for name, entry in found["files"].items()
        }
        marker = Marker(int(found["step"]), int(found["ranks"]), float(found["time"]), files)
    except FileNotFoundError:
        started = any(path.iterdir())
        problem = (
            f"no {MARKER}: it was not written to its end" if started else "the folder is empty"
        )
        raise damaged(problem) from None
    except OSError as error:
        raise damaged(f"{MARKER} cannot be read: {error.strerror}") from None
    except DamagedCheckpointError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise damaged(f"{MARKER} cannot be read: it is not the marker of a checkpoint") from None
    expected = {INDEX, STATE, *map(rank_file, range(min(marker.ranks, len(files))))}
    if strange := [name for name in files if not _FILE.fullmatch(name)]:
        raise damaged(f"{MARKER} names {strange[0]!r}, which cannot be a file of a checkpoint")
    if absent := sorted(expected - files.keys()):
        raise damaged(f"{MARKER} does not name {absent[0]}")
    if _NAME.fullmatch(path.name) and marker.step != step_of(path):
        raise damaged(f"{MARKER} is that of step {marker.step}")
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
    blocks: list[tuple[str, int, int, str]] = []
    for name, stored in marker.files.items():
        try:
            size = (path / name).stat().st_size
        except FileNotFoundError:
            return f"{name} is missing"
        except OSError as error:
            return f"{name} cannot be read: {error.strerror}"
        if size != stored.bytes:
            truncated = ": it is truncated" if size < stored.bytes else ""
            return f"{name} has {size:,} bytes instead of {stored.bytes:,}{truncated}"
        if len(stored.checksums) != -(-size // BLOCK):
            count = len(stored.checksums)
            return f"{MARKER} has {count} checksums for {name}, which has {size:,} bytes"
        blocks += [
            (name, index * BLOCK, min(BLOCK, size - index * BLOCK), checksum)
            for index, checksum in enumerate(stored.checksums)
        ]
    if not deep:
        return None
    mine = blocks[rank::ranks]
    with ThreadPoolExecutor(max(1, min(8, len(mine), len(os.sched_getaffinity(0))))) as pool:
        problems = list(pool.map(lambda block: _check_block(path, *block), mine))
    return next(filter(None, problems), None)


def _check_block(path: Path, name: str, start: int, size: int, checksum: str) -> str | None:
    found, buffer = xxhash.xxh3_128(), memoryview(bytearray(min(_READ, size)))
    try:
        with (path / name).open("rb", buffering=0) as file:
            file.seek(start)
            while size:
                read = file.readinto(buffer[: min(len(buffer), size)]) or 0
                if not read:
                    return f"{name} is truncated"
                found.update(buffer[:read])
                size -= read
    except OSError as error:
        return f"{name} cannot be read: {error.strerror}"
    if found.hexdigest() != checksum:
        return (
            f"{name} has changed since it was written: its checksum differs from byte {start:,} on"
        )
    return None


def newest_valid(
    folder: Path,
    *,
    checkpoints: Sequence[Path] | None = None,
    at_most: int | None = None,
    check: Callable[[Path], str | None] = verify,
) -> Path | None:
    """The newest valid checkpoint; None if the folder has no checkpoint. Logs each damaged one.

    checkpoints: those of the folder, oldest first; None: lists them. at_most: only up to this step.
    check: returns what is wrong with a checkpoint, or None. Raises NoneLeftError if all are
    damaged.
    """
    problems = []
    for path in reversed(list_checkpoints(folder) if checkpoints is None else checkpoints):
        if at_most is not None and step_of(path) > at_most:
            continue
        problem = check(path)
        if problem is None:
            return path
        problems.append(str(DamagedCheckpointError(path, problem)))
        logger.warning(f"{problems[-1]}; trying an older one")
    if problems:
        raise NoneLeftError(folder, problems)
    return None


def write_file(path: Path, data: bytes) -> StoredFile:
    """Writes a small file and flushes it to the disk."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    checksums = Checksums()
    checksums.update(memoryview(data))
    return checksums.file()


def scratch_folder(folder: Path, step: int) -> Path:
    """Makes a folder with a unique name, in which a checkpoint is written."""
    scratch = folder / f"{checkpoint_name(step)}.writing-{os.urandom(4).hex()}"
    scratch.mkdir(parents=True)
    return scratch


def commit(scratch: Path, *, step: int, ranks: int, files: Mapping[str, StoredFile]) -> Path:
    """Turns a scratch folder into a checkpoint: writes the marker, then renames the folder.

    files: all files, already flushed to the disk. Replaces a checkpoint of the same step. Returns
    the checkpoint.
    """
    marker = {"format": FORMAT, "step": step, "ranks": ranks, "time": time.time()}
    text = json.dumps(
        marker | {"files": {name: asdict(stored) for name, stored in files.items()}}, indent=1
    )
    write_file(scratch / MARKER, text.encode())
    _sync_folder(scratch)
    path = scratch.with_name(checkpoint_name(step))
    replaced = None
    if path.exists():
        replaced = path.with_name(f"{path.name}.replaced-{os.urandom(4).hex()}")
        path.rename(replaced)
    scratch.rename(path)
    _sync_folder(path.parent)
    if replaced is not None:
        shutil.rmtree(replaced, ignore_errors=True)
    return path


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def discard(path: Path) -> None:
    """Deletes a checkpoint, renaming it first: it is never seen half deleted. Raises OSError."""
    doomed = path.with_name(f"{path.name}.deleting-{os.urandom(4).hex()}")
    path.rename(doomed)
    shutil.rmtree(doomed)


def discard_newer(folder: Path, step: int) -> list[Path]:
    """Deletes the checkpoints after a step, newest first, and returns them. Raises OSError."""
    newer = [path for path in reversed(list_checkpoints(folder)) if step_of(path) > step]
    for path in newer:
        discard(path)
    return newer


def prune(
    folder: Path, keep_last: int, keep_every: int | None = None, best_step: int | None = None
) -> list[Path]:
    """Deletes old checkpoints and abandoned scratch folders. Returns the deleted checkpoints.

    Keeps the newest `keep_last` valid ones (by marker and sizes), multiples of `keep_every`, and
    `best_step`. Deletes a damaged one if it is older than those of `keep_last`. No save may be in
    progress. Raises OSError.
    """
    assert keep_last >= 1
    for entry in list(os.scandir(folder)):
        if _SCRATCH.fullmatch(entry.name):
            shutil.rmtree(entry.path)
    checkpoints = list_checkpoints(folder)
    valid = [path for path in checkpoints if verify(path, deep=False) is None]
    if not valid:
        return []
    deleted = []
    for path in checkpoints:
        step = step_of(path)
        kept = path in valid and (
            (keep_every is not None and step % keep_every == 0) or step == best_step
        )
        if step < step_of(valid[-keep_last:][0]) and not kept:
            discard(path)
            deleted.append(path)
    return deleted


def check_space(folder: Path, bytes_needed: int) -> None:
    """Makes the folder. Raises RecipeError if it is not writable or lacks the space."""
    probe = folder / f".probe-{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.write_bytes(b"")
        probe.unlink()
        space = os.statvfs(folder)
    except OSError as error:
        raise RecipeError(
            f"checkpoint: {folder} cannot be written to: {error.strerror}; give another run.dir, "
            "or checkpoint.every_steps=null"
        ) from None
    free = space.f_bavail * space.f_frsize
    if free < bytes_needed:
        raise RecipeError(
            f"checkpoint: one checkpoint takes {bytes_needed / 2**30:,.2f} GiB, and {folder} has "
            f"{free / 2**30:,.2f} GiB free; free some, give another run.dir, or "
            "checkpoint.every_steps=null"
        )
