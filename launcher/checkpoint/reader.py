"""Finds and reads checkpoints. They hold JSON and raw numbers: no pickle is ever opened.

All ranks of a group must call the functions that take one, and all get the same result.
"""

from __future__ import annotations

import json
import logging
import os
import time
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open

from launcher.checkpoint import files
from launcher.checkpoint.copies import CopiedCheckpoint, RunCopy, fetch_missing, fetch_small
from launcher.checkpoint.files import DamagedCheckpointError
from launcher.checkpoint.layout import LOCAL
from launcher.console import bytes_as_text, task
from launcher.distributed.process_group import from_rank_0, gather
from launcher.errors import RecipeError
from launcher.models.safetensors_files import DTYPES, StoredRows, StoredTensors, Tensors
from launcher.models.shards import local_rows
from launcher.reliability.json_files import Json

logger = logging.getLogger(__name__)


def find_checkpoint(
    folder: Path,
    *,
    group: dist.ProcessGroup,
    at_most: int | None = None,
    copy: RunCopy | None = None,
) -> Path | None:
    """`files.newest_valid` up to a step, with the verification shared among the ranks. copy: has the
    files of those that are not valid, and other checkpoints. Raises UnreadableError on all ranks if
    the folder cannot be read."""
    listed: list[Path] | str = []
    if dist.get_rank(group) == 0:
        try:
            listed = files.list_checkpoints(folder)
            if copy is not None:
                listed = _with_copies(listed, folder, copy)
        except OSError as error:
            listed = str(error)
    listed = from_rank_0(listed, group)  # other nodes may see a new checkpoint later
    if isinstance(listed, str):
        raise files.UnreadableError(folder, listed)
    wanted = [path for path in listed if at_most is None or files.step_of(path) <= at_most]
    return files.newest_valid(wanted, partial(verify_or_fetch, group=group, copy=copy))


def _with_copies(listed: list[Path], folder: Path, copy: RunCopy) -> list[Path]:
    """The checkpoints of a run folder and of its copy, oldest first."""
    try:
        steps = [step for step, found in copy.listed().items() if files.MARKER in found]
    except OSError as error:
        logger.warning(f"{error.filename}: {error.strerror}; it is not searched for checkpoints")
        return listed
    copied = {folder / files.checkpoint_name(step) for step in steps}
    return sorted({*listed, *copied}, key=files.step_of)


def verify_together(path: Path, *, group: dist.ProcessGroup) -> str | None:
    """`files.verify`, shared among the ranks."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    return files.worst(gather(files.verify(path, rank=rank, ranks=ranks), group))


def verify_or_fetch(path: Path, *, group: dist.ProcessGroup, copy: RunCopy | None) -> str | None:
    """`verify_together`, once what is missing or damaged has been fetched from the copy of the run."""
    problem = verify_together(path, group=group)
    if copy is None or problem is None or isinstance(problem, files.Unreadable):
        return problem
    copied: CopiedCheckpoint | None = None
    failed: str | None = None
    if dist.get_rank(group) == 0:
        try:
            copied = copy.find(files.step_of(path))
            if copied is not None:
                path.mkdir(exist_ok=True)
                failed = fetch_small(copied, path)
        except OSError as error:
            why = f"{error.filename}: {error.strerror or error}"
            failed = files.Unreadable(f"{problem}; its copy cannot be read: {why}")
    copied, failed = from_rank_0((copied, failed), group)
    if copied is None or failed is not None:
        return failed or problem
    rank, ranks, started = dist.get_rank(group), dist.get_world_size(group), time.perf_counter()
    every = gather(fetch_missing(copied, path, rank=rank, ranks=ranks), group)
    fetched, seconds = sum(size for size, _ in every), time.perf_counter() - started
    if (failed := files.worst(each for _, each in every)) is not None:
        return failed
    logger.info(f"fetched {bytes_as_text(fetched)} from {copied.folder.name} in {seconds:.1f} s")
    return verify_together(path, group=group)


@torch.no_grad()
def load(
    path: Path, tensors: Tensors, *, group: dist.ProcessGroup, every: Tensors | None = None
) -> None:
    """Reads a verified checkpoint into the tensors of `model_and_optimizer`, in place. Any strategy
    and number of ranks may have written it. every: the tensors of all ranks (`Holders.every`); None:
    each rank has all. Raises RecipeError if it is of another model, and DamagedCheckpointError if it
    cannot be read."""
    stored = open_tensors(path, tensors)
    _compare(path, stored.tensors, tensors if every is None else every)
    problem = None
    try:
        pool = ThreadPoolExecutor(min(8, len(os.sched_getaffinity(0))))
        with pool, task(f"loading {path.name}", len(tensors)) as advance:
            for _ in pool.map(lambda item: stored.copy_rows(*item), tensors.items()):
                advance(1)
    except Exception as error:  # the other ranks wait for this rank
        problem = str(error) if isinstance(error, OSError) else repr(error)
    stored.close()
    if problem := files.worst(gather(problem, group)):
        raise DamagedCheckpointError(path, problem)


def read_state(path: Path) -> Json:
    """Content of state.json. Raises DamagedCheckpointError."""
    try:
        state = json.loads((path / files.STATE).read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise DamagedCheckpointError(path, f"{files.STATE} cannot be read: {error}") from None
    if not isinstance(state, dict):
        raise DamagedCheckpointError(path, f"{files.STATE} holds no object")
    return state


def read_local(path: Path, rank: int) -> dict[str, torch.Tensor]:
    """A rank's own tensors. Raises DamagedCheckpointError, also if its file is missing."""
    name = files.rank_file(rank)
    try:
        with safe_open(path / name, framework="pt") as file:
            own = [name for name in file.keys() if name.startswith(LOCAL)]  # noqa: SIM118
            return {name.removeprefix(LOCAL): file.get_tensor(name).clone() for name in own}
    except (OSError, SafetensorError) as error:
        raise DamagedCheckpointError(path, f"{name} cannot be read: {error}") from None


def open_tensors(path: Path, own: Tensors | None = None) -> StoredTensors:
    """A checkpoint's tensors. own: this rank reads only its parts of these tensors; None: all can be
    read. Raises DamagedCheckpointError.

    index.json has the dtype, the shape and a list of parts of each tensor. A part is the rank that
    wrote it, its first row and its number of rows, and unless it has all columns, its first column
    and their number. Tensors with the same parts have the number of one list. In format 2 each tensor
    has a list of its own, with names of files instead of ranks.
    """
    parts, tensors = {}, {}
    try:
        index = json.loads((path / files.INDEX).read_bytes())
        lists, entries = index.get("parts"), index.get("tensors")
        if lists is None:
            lists = [entry["parts"] for entry in index.values()]
            entries = {name: entry | {"parts": i} for i, (name, entry) in enumerate(index.items())}

        @cache
        def read_parts(number: int, wanted: range | None) -> list[StoredRows]:
            """Those with rows that are wanted. None: all."""
            return [
                StoredRows(_file(path, writer), first, rows, *columns)
                for writer, first, rows, *columns in lists[number]
                if wanted is None or (first < wanted.stop and wanted.start < first + rows)
            ]

        for name, entry in entries.items():
            dtype = DTYPES[entry["dtype"]]
            tensors[name] = torch.empty(entry["shape"], dtype=dtype, device="meta")
            if own is None or name in own:
                parts[name] = read_parts(entry["parts"], None if own is None else _rows(own[name]))
    except Exception as error:  # the file may hold any JSON
        raise DamagedCheckpointError(path, f"{files.INDEX} cannot be read: {error}") from None
    return StoredTensors(parts, tensors)


def _file(path: Path, writer: int | str) -> Path:
    file = path / (writer if isinstance(writer, str) else files.rank_file(writer))
    if file.parent != path:
        raise ValueError(f"it names {writer}, outside of the checkpoint")
    return file


def _rows(tensor: torch.Tensor) -> range | None:
    """The rows that this rank has of a tensor; None for a scalar."""
    local, first = local_rows(tensor)
    return range(first, first + len(local)) if local.ndim else None


def _compare(path: Path, stored: Tensors, tensors: Tensors) -> None:
    problems = [f"it lacks {name}" for name in tensors.keys() - stored.keys()]
    added = stored.keys() - tensors.keys()
    problems += [f"it holds {name}, which the model does not have" for name in added]
    for name in tensors.keys() & stored.keys():
        old, new = (f"{tuple(t.shape)} {t.dtype}" for t in (stored[name], tensors[name]))
        if old != new:
            problems.append(f"{name} is {old}, not {new}")
    if problems:
        listed = "; ".join(sorted(problems)[:5])
        more = f" (and {len(problems) - 5} more)" if len(problems) > 5 else ""
        raise RecipeError(f"checkpoint {path} is of another model or optimizer: {listed}{more}")
