"""Finds and reads checkpoints. They hold JSON and raw numbers: no pickle is ever opened."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open

from launcher.checkpoint import files
from launcher.checkpoint.files import DamagedCheckpointError
from launcher.checkpoint.layout import LOCAL, StoredTensor, as_bytes, read_index
from launcher.errors import RecipeError
from launcher.models.safetensors_files import Shape
from launcher.models.shards import local_rows


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


def load(path: Path, tensors: Mapping[str, torch.Tensor], *, group: dist.ProcessGroup) -> None:
    """Reads a checkpoint into tensors, in place. Any strategy and number of ranks may have written
    it.

    All ranks must call it. tensors: of `model_and_optimizer`. It does not verify: call
    `find_checkpoint` before. Raises RecipeError if the checkpoint is of another model, with names
    and shapes, and DamagedCheckpointError if it cannot be read.
    """
    stored = _open_index(path)
    _compare(path, stored, tensors)
    in_file_order = sorted(
        tensors, key=lambda name: [(part.file, part.at) for part in stored[name].parts[:1]]
    )
    problem = None
    try:
        with ThreadPoolExecutor(min(8, len(os.sched_getaffinity(0)))) as pool:
            list(pool.map(lambda name: _read(path, stored[name], tensors[name]), in_file_order))
    except Exception as error:  # the other ranks wait for this one
        problem = error.problem if isinstance(error, DamagedCheckpointError) else repr(error)
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


def open_tensors(path: Path) -> tuple[set[str], Callable[[str], torch.Tensor]]:
    """The names of a checkpoint's tensors, and a function that reads one of them.

    Needs no process group. Raises DamagedCheckpointError.
    """
    stored = _open_index(path)

    def read(name: str) -> torch.Tensor:
        shape = stored[name].shape
        tensor = torch.empty(shape.shape, dtype=shape.dtype)
        _read(path, stored[name], tensor)
        return tensor

    return set(stored), read


def _open_index(path: Path) -> dict[str, StoredTensor]:
    try:
        return read_index((path / files.INDEX).read_bytes())
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedCheckpointError(path, f"{files.INDEX} cannot be read: {error}") from None


def _compare(
    path: Path, stored: Mapping[str, StoredTensor], tensors: Mapping[str, torch.Tensor]
) -> None:
    problems = [f"it lacks {name}" for name in tensors.keys() - stored.keys()]
    problems += [
        f"it holds {name}, which the model does not have" for name in stored.keys() - tensors.keys()
    ]
    for name in tensors.keys() & stored.keys():
        old, new = stored[name].shape, Shape.of(tensors[name])
        if old != new:
            problems.append(f"{name} is {old.shape} {old.dtype}, not {new.shape} {new.dtype}")
    if problems:
        more = f" (and {len(problems) - 5} more)" if len(problems) > 5 else ""
        raise RecipeError(
            f"checkpoint {path} is of another model: {'; '.join(sorted(problems)[:5])}{more}"
        )


@torch.no_grad()
def _read(path: Path, stored: StoredTensor, tensor: torch.Tensor) -> None:
    """Reads this rank's rows of a tensor. Raises DamagedCheckpointError."""
    local, first = local_rows(tensor.detach())
    if not local.numel():
        return
    rows = local if local.ndim else local.reshape(1)
    row_bytes = rows[0].numel() * rows.itemsize
    for part in stored.parts:
        start, stop = max(first, part.first), min(first + len(rows), part.first + part.rows)
        if start >= stop:
            continue
        target = rows[start - first : stop - first]
        direct = target.device.type == "cpu" and target.is_contiguous()
        buffer = target if direct else torch.empty(target.shape, dtype=target.dtype)
        view = as_bytes(buffer)
        try:
            with (path / part.file).open("rb", buffering=0) as file:
                file.seek(part.at + (start - part.first) * row_bytes)
                while len(view):
                    count = file.readinto(view[: 2**30])
                    if not count:
                        raise EOFError(f"it lacks {len(view):,} bytes")
                    view = view[count:]
        except (OSError, EOFError) as error:
            problem = f"{part.file} cannot be read: {error}"
            raise DamagedCheckpointError(path, problem) from None
        if not direct:
            target.copy_(buffer)
