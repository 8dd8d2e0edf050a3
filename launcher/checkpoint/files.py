"""The files of a checkpoint: writing, validity, the newest one, pruning. Imports no torch.

    checkpoints/step_00000500/
      rank_00000.safetensors   what this rank wrote: parts of tensors, its random states
      index.json               where each part of each tensor lies (`reader.open_tensors`)
      state.json               everything else: counters, loss scale, recipe
      commit.json              the marker: size and checksums of all other files

A checkpoint is written into a scratch folder, `step_00000500.writing-...`, and renamed at the end.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, Field, ValidationError

from launcher.console import bytes_as_text, task
from launcher.errors import RecipeError, TrainingError
from launcher.files import StoredFile, checksum_of_file, commit_folder, write_file

logger = logging.getLogger(__name__)

MARKER, INDEX, STATE = "commit.json", "index.json", "state.json"
FORMAT: Literal[3] = 3
"""Format 2 has another index.json, which can be read, too."""
_NAME = re.compile(r"step_\d{8,}")
_OTHER_VERSION = "another version of launcher wrote it"
_RETRY_SECONDS = (2.0, 10.0)
"""Pauses before a checkpoint that cannot be read is read again."""
_SCRATCH = re.compile(r"step_\d{8,}\.(writing|deleting)-\w+")


class DamagedCheckpointError(ValueError):
    """This checkpoint cannot be used. The message says why."""

    def __init__(self, path: Path, problem: str) -> None:
        self.problem = problem
        what = "cannot be used" if problem.startswith(_OTHER_VERSION) else "is damaged"
        super().__init__(f"checkpoint {path} {what}: {problem}")


class Unreadable(str):
    """What is wrong with a checkpoint that cannot be read now. It may be undamaged."""


class UnreadableError(TrainingError):
    """The newest checkpoint cannot be read, and may be undamaged."""

    def __init__(self, path: Path, problem: str) -> None:
        text = f"checkpoint {path} cannot be verified: {problem}. Nothing was changed. Start again "
        text += "once it can be read, or move it to another folder to resume from an older one"
        super().__init__(text, reason="unreadable_checkpoint")


class NoneLeftError(TrainingError):
    """There are checkpoints, but none is valid."""

    def __init__(self, folder: Path, problems: Sequence[str]) -> None:
        first = f"none of the {len(problems)} checkpoints in {folder} is valid:"
        text = "\n  ".join([first, *problems])
        text += "\nrepair one, or remove that folder to start from scratch"
        super().__init__(text, reason="no_valid_checkpoint")


class Marker(BaseModel):
    """Content of commit.json. A checkpoint without it is not valid."""

    format: Literal[2, 3] = FORMAT
    step: int
    ranks: int
    """How many ranks wrote it."""
    time: float
    files: dict[Annotated[str, Field(pattern=r"^\w[\w.]*$")], StoredFile]


def checkpoint_name(step: int) -> str:
    """The name of a checkpoint's folder."""
    return f"step_{step:08d}"


def step_of(path: Path) -> int:
    """The step in the name of a checkpoint."""
    return int(path.name.removeprefix("step_"))


def step_in(name: str) -> int | None:
    """The step in a name, if it is the name of a checkpoint."""
    return int(name.removeprefix("step_")) if _NAME.fullmatch(name) else None


def rank_file(rank: int) -> str:
    """The name of the file that a rank writes."""
    return f"rank_{rank:05d}.safetensors"


def list_checkpoints(folder: Path) -> list[Path]:
    """All checkpoints in a folder, valid or not, oldest first. Raises OSError if the folder exists
    and cannot be read: it may have checkpoints."""
    try:
        entries = list(os.scandir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return []
    folders = (entry for entry in entries if _NAME.fullmatch(entry.name) and entry.is_dir())
    return sorted((folder / entry.name for entry in folders), key=step_of)


# Writing


def scratch_folder(folder: Path, step: int) -> Path:
    """Makes a folder in which a checkpoint is written."""
    scratch = _renamed(folder / checkpoint_name(step), "writing")
    scratch.mkdir(parents=True)
    return scratch


def _renamed(path: Path, purpose: str) -> Path:
    return path.with_name(f"{path.name}.{purpose}-{os.urandom(4).hex()}")


def commit(scratch: Path, *, step: int, ranks: int, files: Mapping[str, StoredFile]) -> Path:
    """Turns a scratch folder into a checkpoint, which it returns: writes the marker, then renames
    the folder. The files are flushed to the disk already. Raises OSError."""
    marker = Marker(step=step, ranks=ranks, time=time.time(), files=dict(files))
    write_file(scratch / MARKER, marker.model_dump_json(indent=1).encode())
    path = scratch.with_name(checkpoint_name(step))
    commit_folder(scratch, path)
    return path


# Validity


def read_marker(path: Path) -> Marker:
    """Reads commit.json. Raises DamagedCheckpointError if it is missing or wrong."""
    content = b""
    try:
        if (path / MARKER).exists() and not (path / MARKER).is_file():
            raise DamagedCheckpointError(path, f"{MARKER} is not a regular file")
        content = (path / MARKER).read_bytes()
        marker = Marker.model_validate_json(content, strict=True)
    except FileNotFoundError:
        problem = f"there is no {MARKER}: it was not written to its end"
    except OSError as error:
        problem = _not_read(MARKER, error)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        problem = ": ".join(filter(None, (f"{MARKER} cannot be read", where, first["msg"])))
        with contextlib.suppress(ValueError, TypeError, KeyError, RecursionError):
            if (version := json.loads(content)["format"]) not in (2, FORMAT):
                problem = f"{_OTHER_VERSION}: it has format {str(version)[:20]}, and this version "
                problem += f"reads format {FORMAT}"
    else:
        if not _NAME.fullmatch(path.name) or marker.step == step_of(path):
            return marker
        problem = f"{MARKER} is that of step {marker.step}"
    raise DamagedCheckpointError(path, problem)


def why_not_resumed(path: Path, problem: str) -> str:
    """Why a path in checkpoint.resume cannot be resumed from. problem: what is wrong with the
    checkpoint there."""
    if not path.is_dir():
        return "does not exist"
    if (path / MARKER).exists() or _NAME.fullmatch(path.name):
        return f"cannot be resumed from: {problem}"
    known = [*list_checkpoints(path), *list_checkpoints(path / "checkpoints")]
    return "is not a checkpoint" + (f"; one is {known[-1]}" if known else "")


def _not_read(name: str, error: OSError) -> str:
    text = f"{name} cannot be read: {error.strerror}"
    return text if isinstance(error, FileNotFoundError) else Unreadable(text)


def verify(path: Path, deep: bool = True, *, rank: int = 0, ranks: int = 1) -> str | None:
    """Returns what is wrong with a checkpoint, or None; `Unreadable` if that cannot be known.

    deep: compares checksums, not only sizes. This rank verifies every ranks-th file.
    """
    try:
        stored = read_marker(path).files
    except DamagedCheckpointError as error:
        return error.problem
    mine = sorted(stored, key=lambda name: -stored[name].bytes)[rank::ranks]
    for name in mine:
        try:
            status = (path / name).stat()
        except OSError as error:
            return _not_read(name, error)
        if not stat.S_ISREG(status.st_mode):
            return f"{name} is not a regular file"
        if status.st_size != stored[name].bytes:
            return f"{name} has {status.st_size:,} bytes instead of {stored[name].bytes:,}"
    if not deep:
        return None
    size = sum(stored[name].bytes for name in mine)
    pool = ThreadPoolExecutor(min(8, len(os.sched_getaffinity(0))))
    with pool, task(f"verifying {path.name}", size) as advance:
        sums = (stored[name].checksum for name in mine)
        problems = pool.map(partial(_check_file, advance), (path / name for name in mine), sums)
        return worst(problems)


def worst(problems: Iterable[str | None]) -> str | None:
    """The first problem that shows damage, else the first problem; None without problems."""
    known = [problem for problem in problems if problem is not None]
    damage = (problem for problem in known if not isinstance(problem, Unreadable))
    return next(damage, known[0] if known else None)


def _check_file(advance: Callable[[float], None], file: Path, checksum: str) -> str | None:
    try:
        same = checksum_of_file(file, advance=advance).hexdigest() == checksum
    except OSError as error:
        return _not_read(file.name, error)
    return None if same else f"{file.name} has changed since it was written"


def newest_valid(
    checkpoints: Sequence[Path], check: Callable[[Path], str | None] = verify
) -> Path | None:
    """The newest valid checkpoint of a list, oldest first; None if the list is empty. Logs each
    damaged one. Raises NoneLeftError if all are damaged, and UnreadableError for one that
    cannot be read: an older one would repeat steps whose result may be there."""
    problems = []
    for path in reversed(checkpoints):
        problem = check(path)
        for seconds in _RETRY_SECONDS:
            if not isinstance(problem, Unreadable):
                break
            logger.warning(f"checkpoint {path}: {problem}; trying again in {seconds:g} s")
            time.sleep(seconds)
            problem = check(path)
        if problem is None:
            return path
        if isinstance(problem, Unreadable):
            raise UnreadableError(path, problem)
        problems.append(str(DamagedCheckpointError(path, problem)))
        logger.warning(f"{problems[-1]}; trying an older one")
    if problems:
        raise NoneLeftError(checkpoints[0].parent, problems)
    return None


# Reading and deleting at the same time


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """A context for reading a checkpoint: meanwhile no machine deletes it by `prune`.

    It holds a shared lock (flock) of the marker, which ends with its process. A checkpoint without
    a marker, or on a file system without locks, is not protected.
    """
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            if (path / MARKER).is_file():
                marker = stack.enter_context((path / MARKER).open("rb"))
                fcntl.flock(marker, fcntl.LOCK_SH | fcntl.LOCK_NB)
        yield


def _discard_unread(path: Path) -> None:
    """Deletes a checkpoint unless a process reads it (`reading`). Raises OSError."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # no locks, or no right to write: it is deleted
            marker = stack.enter_context((path / MARKER).open("r+b"))  # NFS locks such files only
            try:
                fcntl.flock(marker, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return
        discard(path)


# Deleting


def discard(path: Path) -> None:
    """Deletes a checkpoint, renaming it first so that it is never seen half deleted. If the path is
    a link, only the link is deleted. Raises OSError."""
    _remove(path.rename(_renamed(path, "deleting")))


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def discard_newer(folder: Path, step: int, *, refused: float = -1) -> None:
    """Removes the checkpoints after a step, newest first. Deletes only valid ones; others are
    renamed, and stay until a user deletes them. Checkpoints up to the step `refused` did not pass a
    full verification. Of later checkpoints, the marker and the sizes of the files are checked."""
    for path in reversed(list_checkpoints(folder)):
        if step_of(path) <= step:
            continue
        if step_of(path) > refused and verify(path, deep=False) is None:
            aside = path.rename(_renamed(path, "deleting"))
            try:
                _remove(aside)
            except OSError as error:  # it does not count any more, and the next prune tries again
                logger.warning(f"{aside} cannot be deleted: {error.strerror or error}")
            continue
        aside = path.rename(_renamed(path, "invalid"))
        logger.warning(f"{path.name} is not valid, and was renamed to {aside}; delete it yourself")


def prune(
    folder: Path,
    keep_last: int,
    keep_every: int | None = None,
    best_step: int | None = None,
    earlier_best: Collection[int] = (),
) -> dict[str, str]:
    """Deletes scratch folders and old checkpoints. No save may be in progress. Returns what could
    not be deleted, and why. Raises OSError if the folder cannot be read.

    Keeps the `keep_last` newest valid checkpoints (by marker and file sizes), the checkpoints of
    `best_step`, of `earlier_best` and of multiples of `keep_every`, and all checkpoints that are not valid. Keeps a
    checkpoint that another process reads (`reading`) until the next call. Deletes a link, and not
    what it points to.
    """
    leftovers = [Path(entry.path) for entry in os.scandir(folder) if _SCRATCH.fullmatch(entry.name)]
    old: list[Path] = []
    valid = 0
    for path in reversed(list_checkpoints(folder)):
        step = step_of(path)
        kept = step in (best_step, *earlier_best) or (keep_every and step % keep_every == 0)
        # A verification looks at each file of a checkpoint: not those that are kept in any case
        if (valid >= keep_last and kept) or verify(path, deep=False) is not None:
            continue
        if valid >= keep_last:
            old.insert(0, path)
        valid += 1
    problems = {}
    for path in (*leftovers, *old):
        try:
            if path in old:
                _discard_unread(path)
            else:
                _remove(path)
        except OSError as error:  # the others are deleted all the same
            problems[path.name] = error.strerror or str(error)
    return problems


def check_space(folder: Path, bytes_needed: int) -> None:
    """Makes the folder. Raises RecipeError if it is not writable or has too little space."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
        free = shutil.disk_usage(folder).free
    except OSError as error:
        text = f"checkpoint: {folder} cannot be written to: {error.strerror}"
        raise RecipeError(f"{text}; give another run.dir") from None
    if free < bytes_needed:
        raise RecipeError(
            f"checkpoint: one checkpoint takes {bytes_as_text(bytes_needed)}, and {folder} has "
            f"{bytes_as_text(free)} free; free some, give another run.dir, or set "
            "checkpoint.every_steps=null"
        )
