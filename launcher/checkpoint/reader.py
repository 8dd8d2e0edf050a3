"""Finds and reads checkpoints. What is read is JSON and raw numbers: no pickle is ever opened."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.state_dict_loader import load as load_tensors
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from launcher.checkpoint import files
from launcher.checkpoint.files import DamagedCheckpointError
from launcher.checkpoint.layout import LOCAL, as_bytes, read_index
from launcher.errors import RecipeError


def find_checkpoint(folder: Path, *, group: dist.ProcessGroup, at_most: int | None = None) -> Path | None:
    """`files.newest_valid` for ranks together, each of which reads a part of each checkpoint. All must call it; all get the
    same answer, or raise NoneLeftError.
    """
    rank = dist.get_rank(group)

    def check(path: Path) -> str | None:
        return verify_together(path, group=group)

    # Rank 0's list: another node may see the folder a little later
    shared: list[Any] = [files.list_checkpoints(folder) if rank == 0 else None]
    dist.broadcast_object_list(shared, group=group, group_src=0)
    return files.newest_valid(folder, checkpoints=shared[0], at_most=at_most, check=check)


def verify_together(path: Path, *, group: dist.ProcessGroup) -> str | None:
    """`files.verify` of all of it, shared among the ranks; all must call it and get the same answer."""
    ranks = dist.get_world_size(group)
    found: list[str | None] = [None] * ranks
    dist.all_gather_object(found, files.verify(path, rank=dist.get_rank(group), ranks=ranks), group=group)
    return next((problem for problem in found if problem is not None), None)


def load(path: Path, tensors: Mapping[str, torch.Tensor], *, group: dist.ProcessGroup) -> None:
    """Reads a checkpoint into tensors, in place, whatever strategy and number of ranks wrote it. All ranks must call it.

    tensors: of `model_and_optimizer`. Raises RecipeError where the checkpoint is that of another model, with names
    and shapes, and DamagedCheckpointError for what cannot be read. It does not verify: `find_checkpoint` has.
    """
    reader = _Reader(path)
    _compare(path, reader.metadata, tensors)
    try:
        load_tensors(dict(tensors), storage_reader=reader, planner=_Planner(), process_group=group)
    except CheckpointException as error:
        causes = {str(failure[0]) for failure in error.failures.values()}
        raise DamagedCheckpointError(path, "; ".join(sorted(causes))) from None


def read_state(path: Path) -> dict[str, Any]:
    """What state.json holds. Raises DamagedCheckpointError."""
    try:
        state: dict[str, Any] = json.loads((path / files.STATE).read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise DamagedCheckpointError(path, f"{files.STATE} cannot be read: {error}") from None
    if not isinstance(state, dict):
        raise DamagedCheckpointError(path, f"{files.STATE} cannot be read: it is not what was written")
    return state


def read_local(path: Path, rank: int) -> dict[str, torch.Tensor]:
    """A rank's own tensors. Raises DamagedCheckpointError, as where that rank did not take part."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path / files.rank_file(rank), framework="pt") as file:
            return {name.removeprefix(LOCAL): file.get_tensor(name).clone() for name in file.keys() if name.startswith(LOCAL)}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise DamagedCheckpointError(path, f"{files.rank_file(rank)} cannot be read: {error}") from None


def open_tensors(path: Path) -> tuple[set[str], Callable[[str], torch.Tensor]]:
    """The names of a checkpoint's tensors, and what reads one of them, whole. For one process alone.

    Raises DamagedCheckpointError.
    """
    stored = _Reader(path).metadata.state_dict_metadata

    def read(name: str) -> torch.Tensor:
        entry = stored[name]
        assert isinstance(entry, TensorStorageMetadata)
        tensor = torch.empty(entry.size, dtype=entry.properties.dtype)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            load_tensors({name: tensor}, storage_reader=_Reader(path), planner=_Planner(), no_dist=True)
        return tensor

    return set(stored), read


def _compare(path: Path, metadata: Metadata, tensors: Mapping[str, torch.Tensor]) -> None:
    stored = metadata.state_dict_metadata
    problems = [f"it lacks {name}" for name in tensors if name not in stored]
    problems += [f"it holds {name}, which the model does not have" for name in stored if name not in tensors]
    for name in tensors.keys() & stored.keys():
        theirs, ours = stored[name], tensors[name]
        assert isinstance(theirs, TensorStorageMetadata)
        if theirs.size != ours.shape or theirs.properties.dtype != ours.dtype:
            problems.append(
                f"{name} is {tuple(theirs.size)} {theirs.properties.dtype} there and {tuple(ours.shape)} {ours.dtype} in the model"
            )
    if problems:
        more = f" (and {len(problems) - 5} more)" if len(problems) > 5 else ""
        raise RecipeError(f"checkpoint {path} is of another model: {'; '.join(sorted(problems)[:5])}{more}")


class _Planner(DefaultLoadPlanner):
    """Tensors only: torch's own would unpickle anything else."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        raise AssertionError("a checkpoint of ours holds tensors")


class _Reader(StorageReader):
    """Finds parts through index.json and reads just their bytes, straight into host tensors."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self.metadata = read_index((path / files.INDEX).read_bytes())
        except OSError as error:
            raise DamagedCheckpointError(path, f"{files.INDEX} cannot be read: {error.strerror}") from None
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise DamagedCheckpointError(path, f"{files.INDEX} cannot be read: {error}") from None
        known = files.read_marker(path).files
        if strange := next((file for file, _ in self.metadata.storage_data.values() if file not in known), None):
            raise DamagedCheckpointError(path, f"{files.INDEX} names {strange!r}, which the marker does not")

    def reset(self, checkpoint_id: Any = None) -> None:
        """Nothing is kept between loads."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """From index.json."""
        return self.metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing to set up."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """As it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """As they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Reads all items, some at a time."""
        descriptors: dict[str, int] = {}
        try:
            for item in plan.items:
                file, _ = self.metadata.storage_data[item.storage_index]
                if file not in descriptors:
                    descriptors[file] = os.open(self._path / file, os.O_RDONLY)
            items = sorted(plan.items, key=lambda item: self.metadata.storage_data[item.storage_index])
            with ThreadPoolExecutor(min(8, len(os.sched_getaffinity(0)))) as pool:
                for _ in pool.map(lambda item: self._read(item, planner, descriptors), items):
                    pass
        finally:
            for descriptor in descriptors.values():
                os.close(descriptor)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @torch.no_grad()
    def _read(self, item: ReadItem, planner: LoadPlanner, descriptors: Mapping[str, int]) -> None:
        file, at = self.metadata.storage_data[item.storage_index]
        entry = self.metadata.state_dict_metadata[item.storage_index.fqn]
        assert isinstance(entry, TensorStorageMetadata)
        chunk = next(chunk for chunk in entry.chunks if chunk.offsets == item.storage_index.offset)
        target = planner.resolve_tensor(item).detach()
        if 0 in item.lengths:
            return
        dtype = entry.properties.dtype
        # Whole rows are read; what else is cut away is cut from them
        row = dtype.itemsize * int(torch.Size(chunk.sizes[1:]).numel())
        rows = [item.lengths[0], *chunk.sizes[1:]] if item.lengths else []
        start = at + (item.storage_offsets[0] * row if item.lengths else 0)
        if target.device.type == "cpu" and target.is_contiguous() and list(target.shape) == rows:
            _read_into(descriptors[file], target, start, file)
        else:
            read = torch.empty(rows, dtype=dtype)
            _read_into(descriptors[file], read, start, file)
            for dimension in range(1, len(rows)):
                read = read.narrow(dimension, item.storage_offsets[dimension], item.lengths[dimension])
            target.copy_(read)
        planner.commit_tensor(item, target)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """A folder."""
        return Path(checkpoint_id).is_dir()


def _read_into(descriptor: int, target: torch.Tensor, at: int, file: str) -> None:
    view = as_bytes(target)
    while len(view):
        count = os.preadv(descriptor, [view[: 2**30]], at)
        if not count:
            raise EOFError(f"{file} ends before byte {at + len(view):,}")
        view, at = view[count:], at + count
