"""Activation offload: inputs of blocks in host memory between their forward and backward pass.

Copies run on a separate stream, unlike the copies of `torch.autograd.graph.save_on_cpu`: the input
of a block is copied to the host while the block computes, and freed when the next block starts.
When a block starts its backward pass, the input of the block before it is copied back. The device
holds two inputs at a time, and the host never waits.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.autograd.graph import saved_tensors_hooks

from launcher.libraries.private import storage_id

_T = TypeVar("_T")


class _Input:
    def __init__(self, tensor: torch.Tensor, buffer: torch.Tensor) -> None:
        self.tensor: torch.Tensor | None = tensor
        """The input on the device; None between the copy to the host and the copy back."""
        self.device, self.buffer = tensor.device, buffer
        self.host = buffer[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        self.copied: torch.cuda.Event | None = None
        """The event that ends the last copy, in either direction."""


class ActivationOffload:
    """Offloads the inputs of all blocks of a model. Tensors that are not on a GPU are not moved."""

    device_type = "cuda"

    def __init__(self) -> None:
        self._inputs: list[weakref.ref[_Input]] = []
        """Inputs in the order of the forward passes. Autograd holds the only strong references, so
        that inputs are freed if a backward pass fails."""
        self._buffers: list[torch.Tensor] = []
        """Host buffers of inputs that were copied back, for reuse; at most one for each block. A
        buffer can be reused as soon as its last copy is enqueued: all copies are on one stream."""
        self._stream: torch.cuda.Stream | None = None

    def forward(self, forward: Callable[..., _T], *args: Any, **kwargs: object) -> _T:
        """Calls the forward of a checkpointed block and offloads its first argument. Other
        arguments, such as position embeddings, are shared by all blocks and stay on the device."""
        first = storage_id(args[0].untyped_storage()) if args else None

        def pack(tensor: torch.Tensor) -> torch.Tensor | _Input:
            offloads = tensor.device.type == self.device_type
            offloads = offloads and storage_id(tensor.untyped_storage()) == first
            return self._to_host(tensor) if offloads else tensor

        def unpack(packed: torch.Tensor | _Input) -> torch.Tensor:
            return self._to_device(packed) if isinstance(packed, _Input) else packed

        with saved_tensors_hooks(pack, unpack):
            return forward(*args, **kwargs)

    def _to_host(self, tensor: torch.Tensor) -> _Input:
        before = self._inputs[-1]() if self._inputs else None
        if before is not None:
            # The current stream waits for the copy before this memory is reused, so record_stream
            # is not needed
            self._wait(before.copied)
            before.tensor = None
        buffer = self._buffers.pop() if self._buffers else None
        if buffer is None or buffer.nbytes < tensor.nbytes:
            buffer = self._host_memory(tensor.nbytes)
        offloaded = _Input(tensor, buffer)
        offloaded.copied = self._copy(tensor, offloaded.host)
        self._inputs.append(weakref.ref(offloaded))
        return offloaded

    def _to_device(self, offloaded: _Input) -> torch.Tensor:
        self._upload(offloaded)
        self._wait(offloaded.copied)
        tensor, offloaded.tensor = offloaded.tensor, None
        assert tensor is not None
        self._buffers.append(offloaded.buffer)
        self._inputs = [ref for ref in self._inputs if ref() not in (None, offloaded)]
        if self._inputs and (before := self._inputs[-1]()) is not None:
            self._upload(before)
        return tensor

    def _upload(self, offloaded: _Input) -> None:
        if offloaded.tensor is None:  # allocated on the compute stream, where it is also freed
            offloaded.tensor = torch.empty_like(offloaded.host, device=offloaded.device)
            offloaded.copied = self._copy(offloaded.host, offloaded.tensor)

    # Methods that a trace overrides (launcher/planner/fake.py)

    def _host_memory(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def _copy(self, source: torch.Tensor, target: torch.Tensor) -> torch.cuda.Event | None:
        """Starts a copy after the work enqueued on the current stream. Returns the event that ends
        it."""
        if self._stream is None:
            self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
            end: torch.cuda.Event = self._stream.record_event()
        return end

    def _wait(self, event: torch.cuda.Event | None) -> None:
        if event is not None:
            torch.cuda.current_stream().wait_event(event)
