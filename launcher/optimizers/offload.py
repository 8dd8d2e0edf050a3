"""Optimizer state in host memory or in a file. A step streams it through the device.

For each bucket of parameters, a step copies the state to the device, lets the optimizer update them
by the same operators as without offload, and copies the state back. On CUDA, copies in both
directions run at the same time, on streams of their own. If the state is in a file, threads read
the next buckets and write earlier ones.
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from launcher.checkpoint.staging import aligned_buffer, page_lock, page_unlock
from launcher.console import bytes_as_text
from launcher.errors import RecipeError, TrainingError
from launcher.files import ALIGNMENT, DirectFile
from launcher.libraries.private import dtensor_of, spec_of
from launcher.models.shards import local_bytes, local_rows
from launcher.optimizers.low_precision import State
from launcher.recipe import schema

BUCKET = 2**26
"""Bytes of state in a bucket; more if one parameter has more."""
SLOTS, FILE_BUFFERS = 2, 4
"""Buckets on the device, and in host memory if the state is in a file."""


CopyEvent = torch.cuda.Event | None
"""The event that ends a copy; None on CPUs, where copies end at once."""


class _Piece(NamedTuple):
    """A tensor of a parameter's state, as bytes of a bucket."""

    parameter: torch.Tensor
    key: str
    span: slice
    shape: torch.Size
    dtype: torch.dtype
    spec: Any
    """See `spec_of`."""

    def view(self, memory: torch.Tensor) -> torch.Tensor:
        """The tensor, in the memory of its bucket."""
        local = memory[self.span].view(self.dtype).view(self.shape)
        if self.spec is None:
            return local
        return dtensor_of(local, self.spec)


@dataclass
class _Bucket:
    start: int
    """Offset in the whole state, in bytes."""
    size: int = 0
    members: dict[int, list[int]] = field(default_factory=dict)
    """Parameters: indices in each parameter group."""
    pieces: list[_Piece] = field(default_factory=list)

    def add(self, parameter: torch.Tensor, key: str, value: torch.Tensor) -> None:
        """Adds a tensor of a parameter's state."""
        local, spec = local_rows(value)[0], spec_of(value)
        span = slice(self.size, self.size + local.nbytes)
        self.pieces.append(_Piece(parameter, key, span, local.shape, local.dtype, spec))
        self.size += _padded(value)

    def states(self, memory: torch.Tensor) -> dict[torch.Tensor, State]:
        """The state of each parameter, in the memory of the bucket."""
        states: dict[torch.Tensor, State] = {}
        for piece in self.pieces:
            states.setdefault(piece.parameter, {})[piece.key] = piece.view(memory)
        return states


def _padded(value: torch.Tensor) -> int:
    return -(-local_bytes([value]) // 256) * 256


class OffloadedOptimizer(torch.optim.Optimizer):
    """Takes the place of an optimizer; its state is elsewhere, except for scalars.

    After a step on CUDA, the state in host memory is complete when the current stream is.
    """

    grad_scale: torch.Tensor | None = None
    found_inf = torch.zeros(())

    def __init__(
        self,
        inner: Any,  # an optimizer of `_make`, with `initial_state`
        cpu_offload: schema.CpuOffload,
        *,
        state_file: Callable[[Path, int], StateFile] | None = None,
    ) -> None:
        """The inner optimizer has `initial_state(group, parameter)`, which returns scalars, and
        tensors of zeros. state_file: makes the file of a folder and a size, as `StateFile`, which
        is the default. Raises as `StateFile` if the file cannot be made."""
        super().__init__(inner.param_groups, inner.defaults)
        self._inner = inner
        self._buckets = self._lay_out()
        size = self._buckets[-1].start + self._buckets[-1].size
        self._largest = max(bucket.size for bucket in self._buckets)
        self.file: StateFile | None = None
        if cpu_offload.optimizer_path is not None:
            self.file = (state_file or StateFile)(Path(cpu_offload.optimizer_path), size)
            count = min(FILE_BUFFERS, len(self._buckets))
            self.host_buffers = [self.file.buffer(self._largest) for _ in range(count)]
        else:
            self.host_buffers = [torch.zeros(size, dtype=torch.uint8)]
        whole = self.host_buffers[0] if self.file is None else self.file.tensor
        for bucket in self._buckets:
            for parameter, state in bucket.states(whole[bucket.start :]).items():
                self.state[parameter] |= state
        self._device = local_rows(self.param_groups[0]["params"][0])[0].device
        self._streams: tuple[torch.cuda.Stream | None, torch.cuda.Stream | None] = (None, None)
        self._stored: CopyEvent = None
        """The event that ends the last copy to the host."""
        if self._device.type == "cuda":
            make = partial(torch.cuda.Stream, self._device)
            self._streams = make(), make()
            for buffer in self.host_buffers if cpu_offload.pin_memory else ():
                _pin(buffer, owner=self)

    def _lay_out(self) -> list[_Bucket]:
        buckets = [_Bucket(0)]
        for number, group in enumerate(self.param_groups):
            for index, parameter in enumerate(group["params"]):
                state, bucket = self._inner.initial_state(group, parameter), buckets[-1]
                moved = {key: state.pop(key) for key in list(state) if state[key].ndim}
                self.state[parameter] = state
                size = sum(map(_padded, moved.values()))
                if bucket.size and bucket.size + size > BUCKET:
                    bucket.size += -bucket.size % ALIGNMENT
                    bucket = _Bucket(bucket.start + bucket.size)
                    buckets.append(bucket)
                bucket.members.setdefault(number, []).append(index)
                for key, value in moved.items():
                    bucket.add(parameter, key, value)
        buckets[-1].size += -buckets[-1].size % ALIGNMENT or ALIGNMENT  # a rank may have no rows
        return buckets

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Waits for the disk if there is a file."""
        inner = self._inner
        inner.grad_scale, inner.found_inf = self.grad_scale, self.found_inf
        for bucket, memory in self._on_device():
            inner.state = {p: self.state[p] | state for p, state in bucket.states(memory).items()}
            inner.param_groups = [
                group | {key: [group[key][i] for i in members] for key in ("params", "param_names")}
                for number, members in bucket.members.items()
                for group in [self.param_groups[number]]
            ]
            inner.step()
        inner.state, inner.param_groups = {}, self.param_groups

    def _on_device(self) -> Iterator[tuple[_Bucket, torch.Tensor]]:
        """Each bucket with its state, which may be changed until the next one."""
        if self.file is not None:
            pairs = self._through_buffers(self.file)
            if self._device.type == "cpu":
                yield from pairs
                return
        else:
            whole = self.host_buffers[0]
            pairs = ((bucket, whole[bucket.start :][: bucket.size]) for bucket in self._buckets)
        slots = [
            torch.empty(self._largest, dtype=torch.uint8, device=self._device)
            for _ in range(min(SLOTS, len(self._buckets)))
        ]
        ready, (load, store) = [self._event()] * SLOTS, self._streams
        for number, (bucket, host) in enumerate(pairs):
            index = number % SLOTS
            slot = slots[index][: bucket.size]
            self._wait(_copy(host, slot, load, ready[index]))
            yield bucket, slot
            ready[index] = self._stored = _copy(slot, host, store, self._event())
        self._wait(self._stored)

    def _event(self) -> CopyEvent:
        """An event of the stream that computes."""
        return torch.cuda.current_stream().record_event() if self._streams[0] else None

    def _wait(self, event: CopyEvent) -> None:
        if event is not None:
            torch.cuda.current_stream().wait_event(event)

    def _through_buffers(self, file: StateFile) -> Iterator[tuple[_Bucket, torch.Tensor]]:
        """Reads ahead. Writes a buffer when the copy into it has ended, and all before it ends."""
        count, buckets = len(self.host_buffers), self._buckets
        parts = [
            self.host_buffers[number % count][: bucket.size]
            for number, bucket in enumerate(buckets)
        ]

        def read(number: int, written: Future[None] | None = None) -> None:
            if written is not None:
                written.result()
            file.read(parts[number], buckets[number].start)

        def write(number: int, stored: CopyEvent) -> None:
            if stored is not None:
                stored.synchronize()
            file.write(parts[number], buckets[number].start)

        # A new thread starts on device 0
        on_gpu = self._device.type == "cuda"
        start = partial(torch.cuda.set_device, self._device) if on_gpu else None
        with ThreadPoolExecutor(2, initializer=start) as pool:
            reads = [pool.submit(read, number) for number in range(count)]
            writes = []
            for number, bucket in enumerate(buckets):
                reads[number].result()
                yield bucket, parts[number]
                writes.append(pool.submit(write, number, self._stored))
                if number + count < len(buckets):
                    reads.append(pool.submit(read, number + count, writes[number]))
            for each in writes:
                each.result()


def _copy(
    source: torch.Tensor, target: torch.Tensor, stream: torch.cuda.Stream | None, after: CopyEvent
) -> CopyEvent:
    """Copies on a stream after an event. Returns the event that ends the copy."""
    if stream is None:
        target.copy_(source)
        return None
    assert after is not None
    stream.wait_event(after)
    with torch.cuda.stream(stream):
        target.copy_(source, non_blocking=True)
        end: torch.cuda.Event = stream.record_event()
    return end


def _pin(tensor: torch.Tensor, *, owner: object) -> None:
    """Page-locks a tensor until the owner is deleted."""
    torch.cuda.check_error(page_lock(tensor))
    weakref.finalize(owner, page_unlock, tensor.data_ptr())


class StateFile:
    """A file of zeros without a name, which the kernel deletes however this process ends."""

    def __init__(self, folder: Path, size: int) -> None:
        """Raises TrainingError if the disk is full, RecipeError if the folder cannot be used."""
        self.size = size
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115
            free = shutil.disk_usage(folder).free
            if size > free:  # otherwise the disk would be filled first
                raise OSError(errno.ENOSPC, f"only {bytes_as_text(free)} are free")
            os.posix_fallocate(self._file.fileno(), 0, size)
        except OSError as problem:
            text = (
                f"strategy.cpu_offload.optimizer_path: {folder}: {problem.strerror}; a rank needs "
                f"{bytes_as_text(size)} there. Name a folder on another disk, or shard over more "
                "ranks"
            )
            if problem.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise RecipeError(text) from None
            raise TrainingError(text, reason="optimizer_path") from None
        path = f"/proc/self/fd/{self._file.fileno()}"
        self.tensor = torch.from_file(path, shared=True, size=size, dtype=torch.uint8)
        """The file's bytes, for checkpoints: not to be used while `read` or `write` run."""
        self._direct = DirectFile(self._file)

    def buffer(self, size: int) -> torch.Tensor:
        """Host memory that can be read from the file, and written to it."""
        return aligned_buffer(size)

    def read(self, buffer: torch.Tensor, start: int) -> None:
        """Reads from an offset in bytes."""

        def read(file: int, memory: memoryview, at: int) -> int:
            return os.preadv(file, [memory], at)

        self._direct.move(read, buffer.numpy().data, start)

    def write(self, buffer: torch.Tensor, start: int) -> None:
        """Writes to an offset in bytes."""
        self._direct.move(os.pwrite, buffer.numpy().data, start)
