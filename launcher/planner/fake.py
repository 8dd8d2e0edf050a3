"""Replacements for a trace: fake tensors cannot run DDP, FSDP's copies or offload."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.profiler import record_function

from launcher.models.description import describe
from launcher.objectives.synthetic import SyntheticData
from launcher.optimizers.offload import StateFile
from launcher.planner.tracker import HOST, Tracker
from launcher.strategies.activation_offload import ActivationOffload
from launcher.strategies.wrap import Wrappers
from launcher.training.fake_tensors import Replacements, computing_as_on


def keep_blocks(model: nn.Module, indices: Sequence[int]) -> bool:
    """Deletes all blocks but those at `indices`.

    Returns False, without a change, if the blocks are not all in one `nn.ModuleList`.
    """
    blocks = describe(model).blocks
    names = list(blocks)
    parents = {name.rpartition(".")[0] for name in names}
    prefix = next(iter(parents), "")
    parent = model.get_submodule(prefix) if len(parents) == 1 else None
    if not isinstance(parent, nn.ModuleList) or len(parent) != len(names):
        return False
    for index in reversed(range(len(names))):
        if index not in indices:
            del parent[index]
    blocks.clear()
    blocks.update({f"{prefix}.{index}": block for index, block in enumerate(parent)})
    owner = prefix.rpartition(".")[0]
    configs: dict[int, Any] = {}
    for name, module in model.named_modules():
        # Not of a tower, which may have as many blocks
        inside, around = f"{name}.".startswith(f"{owner}."), f"{owner}.".startswith(f"{name}.")
        if (inside or around or not name) and (config := getattr(module, "config", None)):
            configs[id(config)] = vars(config)
    for config in configs.values():
        kinds = config.get("layer_types")
        if isinstance(kinds, list) and len(kinds) == len(names):
            config["layer_types"] = [kinds[index] for index in sorted(indices)]
        # Gemma 3n and 4 divide one embedding into parts for all layers, whose number they read
        if config.get("hidden_size_per_layer_input"):
            continue
        for key in ("num_hidden_layers", "n_layer", "num_layers"):
            if config.get(key) == len(names):
                config[key] = len(parent)
    return True


@contextmanager
def replaced_for_tracing(
    tracker: Tracker, data: SyntheticData, *, device: str, pinned: bool | None
) -> Iterator[None]:
    """Replaces what fake tensors do not support, or do differently from the device.

    `pinned` says whether CPU offload pins its host memory; None: there is no offload.
    """
    storage = torch.UntypedStorage
    resize = storage.resize_

    def recorded_resize(storage: torch.UntypedStorage, size: int) -> object:
        result = resize(storage, size)
        tracker.resize(storage, size)
        return result

    on_gpu = device == "cuda" and pinned is None
    with computing_as_on(device, data, updates_on_gpu=on_gpu), Replacements() as replaced:
        if pinned is not None:
            replaced.set(torch.Tensor, "to", _copies(tracker, pinned=pinned))
        # Names for the profiler, which take as long as operators on fake tensors
        replaced.set(record_function, "__enter__", lambda scope: scope)
        replaced.set(record_function, "__exit__", lambda scope, *error: None)
        # FSDP frees unsharded weights by resizing their storage, which no dispatch mode sees
        replaced.set(storage, "resize_", recorded_resize)
        # Stages of a pipeline keep what they send until it is received
        replaced.set(dist, "isend", lambda tensor, **where: _Received())
        # A ring keeps what it sends until the next step
        replaced.set(dist, "P2POp", lambda operation, tensor, **where: tensor)
        replaced.set(dist, "batch_isend_irecv", lambda operations: [_Received()])
        yield


class _Received:
    """A transfer that has ended."""

    def is_completed(self) -> bool:
        return True

    def wait(self) -> bool:
        return True


def traced_wrappers(tracker: Tracker, *, device: str) -> Wrappers:
    """The classes that wrap a model on fake tensors."""
    if device == "cuda":
        return Wrappers(Reducer, partial(TracedOffload, tracker))
    return Wrappers(Reducer)


class Reducer(nn.Module):
    """Takes the place of DistributedDataParallel: buckets as large as the gradients. Reduced gradients are
    views of the buckets."""

    def __init__(self, module: nn.Module, **settings: object) -> None:
        super().__init__()
        self.module = module
        self.buckets: list[torch.Tensor] = []
        self._reduces = True
        for parameter in module.parameters():
            if parameter.requires_grad:
                bucket = torch.empty_like(parameter.detach())
                self.buckets.append(bucket)
                hook = partial(self._reduce, bucket)
                parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    def forward(self, *args: object, **kwargs: object) -> object:
        return self.module(*args, **kwargs)

    def _set_ddp_runtime_logging_sample_rate(self, rate: int) -> None:
        """Part of DDP's interface."""

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients are not reduced inside of this context."""
        self._reduces = False
        try:
            yield
        finally:
            self._reduces = True

    def _reduce(self, bucket: torch.Tensor, parameter: torch.Tensor) -> None:
        if self._reduces and parameter.grad is not bucket:
            assert parameter.grad is not None
            bucket.copy_(parameter.grad)
            parameter.grad = bucket


def _copies(tracker: Tracker, *, pinned: bool) -> Callable[..., torch.Tensor]:
    """`Tensor.to` between host and device for CPU offload, which always copies: all fake tensors
    are on one device, so the original would return the tensor itself."""
    plain = torch.Tensor.to

    def to(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if "non_blocking" not in kwargs:
            return plain(tensor, *args, **kwargs)
        copied = tensor.clone()
        if tracker.see(tensor).label == HOST:
            tracker.mark([copied], "communication")
        else:
            tracker.mark_host([copied], pinned=pinned)
        return copied

    return to


class TracedOffload(ActivationOffload):
    """Activation offload between tensors of one device, which labels the copies."""

    device_type = "cpu"

    def __init__(self, tracker: Tracker) -> None:
        super().__init__()
        self._tracker = tracker

    def _host_memory(self, size: int) -> torch.Tensor:
        buffer = torch.empty(size, dtype=torch.uint8)
        self._tracker.mark_host([buffer], pinned=True)
        return buffer

    def _copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        if self._tracker.see(target).label != HOST:
            self._tracker.mark([target], "activations")
        target.copy_(source)

    def _wait(self, event: object) -> None:
        """Does nothing: fake tensors are not computed."""


class TracedFile(StateFile):
    """A file of optimizer state without memory for its content."""

    def __init__(self, tracker: Tracker, folder: Path, size: int) -> None:
        self.size, self.tensor = size, torch.empty(size, dtype=torch.uint8)
        tracker.see(self.tensor)
        tracker.resize(self.tensor.untyped_storage(), 0)

    def buffer(self, size: int) -> torch.Tensor:
        """Host memory of the size that an aligned buffer takes."""
        return torch.empty(size + 4096, dtype=torch.uint8)[:size]

    def read(self, buffer: torch.Tensor, start: int) -> None:
        """Does nothing: there is no content."""

    def write(self, buffer: torch.Tensor, start: int) -> None:
        """Does nothing: there is no content."""
