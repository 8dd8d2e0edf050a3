"""Finds and reads checkpoints. They hold JSON and raw numbers: no pickle is ever opened."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from launcher.checkpoint import files
from launcher.checkpoint.files import DamagedCheckpointError
from launcher.checkpoint.layout import LOCAL, Part, StoredTensor, as_bytes, read_index
from launcher.errors import RecipeError
from launcher.models.safetensors_files import Shape
from launcher.models.shards import local_rows


def find_checkpoint(
    folder: Path, *, group: dist.ProcessGroup, at_most: int | None = None
) -> Path | None:
    """`files.newest_valid`, with the verification shared among the ranks.

    All ranks must call it. All return the same path, or raise NoneLeftError.
    """

    def check(path: Path) -> str | None:
        return verify_together(path, group=group)

    # Rank 0's list: another node may see the folder a little later
    listed: list[Any] = [files.list_checkpoints(folder) if dist.get_rank(group) == 0 else None]
    dist.broadcast_object_list(listed, group=group, group_src=0)
    return files.newest_valid(folder, checkpoints=listed[0], at_most=at_most, check=check)


def verify_together(path: Path, *, group: dist.ProcessGroup) -> str | None:
    """`files.verify`, shared among the ranks. All must call it; all return the same."""
    ranks = dist.get_world_size(group)
    return _first(files.verify(path, rank=dist.get_rank(group), ranks=ranks), group)


def _first(problem: str | None, group: dist.ProcessGroup) -> str | None:
    """The first rank's problem, if any rank has one."""
    found: list[str | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, problem, group=group)
    return next((problem for problem in found if problem is not None), None)


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
        with (
            _Files(path) as opened,
            ThreadPoolExecutor(min(8, len(os.sched_getaffinity(0)))) as pool,
        ):
            for _ in pool.map(
                lambda name: opened.read_into(tensors[name], stored[name]), in_file_order
            ):
                pass
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
    if not isinstance(state, dict):
        raise DamagedCheckpointError(path, f"{files.STATE} cannot be read: it is not a JSON object")
    return state


def read_local(path: Path, rank: int) -> dict[str, torch.Tensor]:
    """A rank's own tensors. Raises DamagedCheckpointError, also if that rank wrote none."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path / files.rank_file(rank), framework="pt") as file:
            own = [name for name in file.keys() if name.startswith(LOCAL)]  # noqa: SIM118
            return {name.removeprefix(LOCAL): file.get_tensor(name).clone() for name in own}
    except (OSError, SafetensorError) as error:
        raise DamagedCheckpointError(
            path, f"{files.rank_file(rank)} cannot be read: {error}"
        ) from None


def open_tensors(path: Path) -> tuple[set[str], Callable[[str], torch.Tensor]]:
    """The names of a checkpoint's tensors, and a function that reads one of them.

    Needs no process group. Raises DamagedCheckpointError.
    """
    stored = _open_index(path)

    def read(name: str) -> torch.Tensor:
        shape = stored[name].shape
        tensor = torch.empty(shape.shape, dtype=shape.dtype)
        with _Files(path) as opened:
            opened.read_into(tensor, stored[name])
        return tensor

    return set(stored), read


def _open_index(path: Path) -> dict[str, StoredTensor]:
    try:
        stored = read_index((path / files.INDEX).read_bytes())
    except OSError as error:
        raise DamagedCheckpointError(
            path, f"{files.INDEX} cannot be read: {error.strerror}"
        ) from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedCheckpointError(path, f"{files.INDEX} cannot be read: {error}") from None
    known = files.read_marker(path).files
    unknown = {part.file for tensor in stored.values() for part in tensor.parts} - known.keys()
    if unknown:
        problem = f"{files.INDEX} names {min(unknown)!r}, which the marker does not"
        raise DamagedCheckpointError(path, problem)
    return stored


def _compare(
    path: Path, stored: Mapping[str, StoredTensor], tensors: Mapping[str, torch.Tensor]
) -> None:
    problems = [f"it lacks {name}" for name in tensors.keys() - stored.keys()]
    problems += [
        f"it holds {name}, which the model does not have" for name in stored.keys() - tensors.keys()
    ]
    for name in tensors.keys() & stored.keys():
        theirs, ours = stored[name].shape, Shape.of(tensors[name])
        if theirs != ours:
            problems.append(
                f"{name} is {theirs.shape} {theirs.dtype} there and {ours.shape} {ours.dtype} in "
                "the model"
            )
    if problems:
        more = f" (and {len(problems) - 5} more)" if len(problems) > 5 else ""
        raise RecipeError(
            f"checkpoint {path} is of another model: {'; '.join(sorted(problems)[:5])}{more}"
        )


class _Files:
    """The files of a checkpoint, each opened once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptors: dict[str, int] = {}
        self._lock = threading.Lock()

    def __enter__(self) -> _Files:
        return self

    def __exit__(self, *_: object) -> None:
        for descriptor in self._descriptors.values():
            os.close(descriptor)

    @torch.no_grad()
    def read_into(self, tensor: torch.Tensor, stored: StoredTensor) -> None:
        """Reads this rank's rows of a tensor."""
        local, first = local_rows(tensor.detach())
        if not local.numel():
            return
        rows = local.reshape(1) if not local.ndim else local
        row_bytes = rows[0].numel() * rows.itemsize
        for part in stored.parts:
            start, stop = max(first, part.first), min(first + len(rows), part.first + part.rows)
            if start < stop:
                target = rows[start - first : stop - first]
                self._read(target, part, part.at + (start - part.first) * row_bytes)

    def _read(self, target: torch.Tensor, part: Part, at: int) -> None:
        direct = target.device.type == "cpu" and target.is_contiguous()
        buffer = target if direct else torch.empty(target.shape, dtype=target.dtype)
        view = as_bytes(buffer)
        try:
            with self._lock:
                if part.file not in self._descriptors:
                    self._descriptors[part.file] = os.open(self._path / part.file, os.O_RDONLY)
            while len(view):
                count = os.preadv(self._descriptors[part.file], [view[: 2**30]], at)
                if not count:
                    raise EOFError(f"it ends before byte {at + len(view):,}")
                view, at = view[count:], at + count
        except (OSError, EOFError) as error:
            raise DamagedCheckpointError(
                self._path, f"{part.file} cannot be read: {error}"
            ) from None
        if not direct:
            target.copy_(buffer)
