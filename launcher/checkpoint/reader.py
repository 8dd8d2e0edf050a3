"""Finds and reads checkpoints. They hold JSON and raw numbers: no pickle is ever opened."""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open

from launcher.checkpoint import files
from launcher.checkpoint.files import DamagedCheckpointError
from launcher.checkpoint.layout import LOCAL
from launcher.errors import RecipeError
from launcher.metrics.console import task
from launcher.models.safetensors_files import DTYPES, Part, StoredTensors, Tensors


def find_checkpoint(
    folder: Path, *, group: dist.ProcessGroup, at_most: int | None = None
) -> Path | None:
    """`files.newest_valid` up to this step, with the verification shared among the ranks.

    All ranks must call it. All return the same path, or raise NoneLeftError.
    """
    # Rank 0's list: another node may see the folder a little later
    listed: list[Any] = [files.list_checkpoints(folder) if dist.get_rank(group) == 0 else None]
    dist.broadcast_object_list(listed, group=group, group_src=0)
    wanted = [path for path in listed[0] if at_most is None or files.step_of(path) <= at_most]
    return files.newest_valid(wanted, partial(verify_together, group=group))


def verify_together(path: Path, *, group: dist.ProcessGroup) -> str | None:
    """`files.verify`, shared among the ranks. All must call it; all return the same."""
    ranks = dist.get_world_size(group)
    return _first(files.verify(path, rank=dist.get_rank(group), ranks=ranks), group)


def _first(problem: str | None, group: dist.ProcessGroup) -> str | None:
    """The first rank's problem, if any rank has one."""
    found: list[str | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, problem, group=group)
    return next(filter(None, found), None)


@torch.no_grad()
def load(path: Path, tensors: Tensors, *, group: dist.ProcessGroup) -> None:
    """Reads a checkpoint into tensors, in place. Any strategy and number of ranks may have written
    it.

    All ranks must call it. tensors: of `model_and_optimizer`. It does not verify: call
    `find_checkpoint` before. Raises RecipeError if the checkpoint is of another model, with names
    and shapes, and DamagedCheckpointError if it cannot be read.
    """
    stored = open_tensors(path)
    _compare(path, stored.tensors, tensors)
    problem = None
    try:
        pool = ThreadPoolExecutor(min(8, len(os.sched_getaffinity(0))))
        with pool, task(f"loading {path.name}", len(tensors)) as advance:
            for _ in pool.map(lambda item: stored.copy_rows(*item), tensors.items()):
                advance(1)
    except Exception as error:  # the other ranks wait for this one
        problem = str(error) if isinstance(error, OSError) else repr(error)
    stored.close()
    if problem := _first(problem, group):
        raise DamagedCheckpointError(path, problem)


def read_state(path: Path) -> dict[str, Any]:
    """Content of state.json. Raises DamagedCheckpointError."""
    try:
        state: dict[str, Any] = json.loads((path / files.STATE).read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise DamagedCheckpointError(path, f"{files.STATE} cannot be read: {error}") from None
    return state


def read_local(path: Path, rank: int) -> dict[str, torch.Tensor]:
    """A rank's own tensors. Raises DamagedCheckpointError, also if that rank wrote none."""
    name = files.rank_file(rank)
    try:
        with safe_open(path / name, framework="pt") as file:
            own = [name for name in file.keys() if name.startswith(LOCAL)]  # noqa: SIM118
            return {name.removeprefix(LOCAL): file.get_tensor(name).clone() for name in own}
    except (OSError, SafetensorError) as error:
        raise DamagedCheckpointError(path, f"{name} cannot be read: {error}") from None


def open_tensors(path: Path) -> StoredTensors:
    """A checkpoint's tensors. Needs no process group. Raises DamagedCheckpointError."""
    parts, tensors = {}, {}
    try:
        for name, entry in json.loads((path / files.INDEX).read_bytes()).items():
            parts[name] = [Part(path / file, first, rows) for file, first, rows in entry["parts"]]
            dtype = DTYPES[entry["dtype"]]
            tensors[name] = torch.empty(entry["shape"], dtype=dtype, device="meta")
    except Exception as error:  # JSON of any content
        raise DamagedCheckpointError(path, f"{files.INDEX} cannot be read: {error}") from None
    return StoredTensors(parts, tensors)


def _compare(path: Path, stored: Tensors, tensors: Tensors) -> None:
    problems = [f"it lacks {name}" for name in tensors.keys() - stored.keys()]
    problems += [
        f"it holds {name}, which the model does not have" for name in stored.keys() - tensors.keys()
    ]
    for name in tensors.keys() & stored.keys():
        old, new = ((tuple(t.shape), t.dtype) for t in (stored[name], tensors[name]))
        if old != new:
            problems.append(f"{name} is {old[0]} {old[1]}, not {new[0]} {new[1]}")
    if problems:
        more = f" (and {len(problems) - 5} more)" if len(problems) > 5 else ""
        raise RecipeError(
            f"checkpoint {path} is of another model or optimizer: "
            f"{'; '.join(sorted(problems)[:5])}{more}"
        )
