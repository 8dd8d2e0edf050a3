"""Follows every storage of a step from allocation to release.

The purpose of a storage is often known only later: activations are the storages that still exist
when the forward pass has ended. So labels are read when the recorded allocations and releases are
replayed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from launcher.libraries.private import (
    CAST,
    SAFE_SOFTMAX,
    SOFTMAX_BACKWARD,
    PlainDispatch,
    TorchDispatchMode,
    tree_leaves,
)
from launcher.planner.memory import COMPONENTS, Component, Phase
from launcher.planner.memory import pinned as pinned_bytes

Label = Component | Literal["host"]
"""The purpose of a storage."""
HOST: Literal["host"] = "host"
"""The label of storages in host memory while the device is a GPU."""

_COPIED = {"c10d::_allgather_base_": 0, "c10d::_reduce_scatter_base_": 1}
"""Collectives of which gloo copies an argument, and the index of this argument."""
_COMMUNICATES = ("fsdp::all_gather_copy_in", "fsdp::chunk_cat", *_COPIED)
"""Operators whose arguments are buffers of FSDP, except for arguments that have another label."""
_COPIES: Mapping[Label, Component] = {
    "parameters": "gathered",
    "gradients": "gradients",
    "communication": "communication",
}
"""Labels of copies, by the label of what is copied: FSDP and autocast copy to change the dtype."""
Held = dict[Label, int]
"""Bytes by component, and those labelled HOST."""


@dataclass(slots=True, eq=False)
class Record:
    """One storage."""

    size: int
    label: Label | None
    born: int
    weak: weakref.ref[torch.UntypedStorage] | None = None


class Place(NamedTuple):
    """A phase and module of the step."""

    phase: Phase
    micro_batch: int
    where: str


class Tracker(PlainDispatch, TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode, entered inside of a fake-tensor mode."""

    def __init__(
        self, label_of: Callable[[torch.Tensor], Label | None], *, gloo: bool = False
    ) -> None:
        """`label_of` returns a label for a tensor by its shape. `gloo` says whether collectives run
        on gloo, which copies arguments of all-gathers and reduce-scatters."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._gloo, self._label_of = gloo, label_of
        self.place = Place("forward", 0, "")
        self._events: list[tuple[Place, Record, int]] = []
        """Place, storage, and bytes allocated (positive) or released."""
        self._live: dict[int, Record] = {}

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        if func is torch.ops.prim.device.default:  # half of all calls
            return args[0].device
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its operations arrive here again, on plain tensors
        out = func(*args, **(kwargs or {}))
        aten, name, source = torch.ops.aten, func.name(), None
        if self._gloo and name in _COPIED:
            self._record_transient(args[_COPIED[name]].nbytes, "communication")
        if self.place.phase != "optimizer":
            if name in _COMMUNICATES:
                for tensor in tree_leaves((args, kwargs)):
                    if isinstance(tensor, torch.Tensor):
                        record = self.see(tensor)
                        record.label = record.label or "communication"
            if func in (CAST, aten.copy_.default):
                source = args[func is aten.copy_.default]
        for tensor in (out,) if isinstance(out, torch.Tensor) else tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self.see(tensor, source=source)
        # Attention without a fused kernel, in aten/src/ATen/native (torch 2.11 to 2.13): a byte
        # for each element, and on CUDA the product of gradient and result
        if func is SAFE_SOFTMAX:
            self._record_transient(out.numel(), "activations")
        elif func is SOFTMAX_BACKWARD and not self._gloo:
            self._record_transient(out.nbytes, "activations")
        return out

    def _record_transient(self, size: int, label: Label) -> None:
        """Memory that an operation takes beside its result, and frees before it returns."""
        record = Record(size, label, len(self._events))
        self._record(record, size)
        self._record(record, -size)

    def go(self, **changes: Any) -> None:
        """Sets the place of the events that follow."""
        self.place = self.place._replace(**changes)

    def see(
        self, tensor: torch.Tensor, *, label: Label | None = None, source: object = None
    ) -> Record:
        """Records a tensor's storage, if it is new. `source` is the tensor it was copied from."""
        storage = _storage_of(tensor)
        key = id(storage)
        record, copied = self._live.get(key), self._label_of_copy(source)
        if record is None:
            record = Record(storage.nbytes(), copied or self._label_of(tensor), len(self._events))
            self._live[key] = record
            record.weak = weakref.ref(storage, lambda _: self._release(key))
            self._record(record, record.size)
        record.label = label or record.label or copied
        return record

    def mark(self, tensors: Iterable[torch.Tensor], label: Label) -> None:
        """Labels storages, and records new ones."""
        for tensor in tensors:
            self.see(tensor, label=label)

    def mark_host(self, tensors: Iterable[torch.Tensor], *, pinned: bool) -> None:
        """Labels storages in host memory; pinned ones are larger."""
        for tensor in tensors:
            record = self.see(tensor, label=HOST)
            if pinned:
                self.resize(_storage_of(tensor), pinned_bytes(record.size))

    @property
    def events(self) -> int:
        """The number of events so far, as a point in time."""
        return len(self._events)

    def label_live(self, label: Label, *, since: int) -> None:
        """Labels the existing storages without a label that were allocated after this event."""
        for record in self._live.values():
            if record.label is None and record.born >= since and record.size:
                record.label = label

    def resize(self, storage: torch.UntypedStorage, size: int) -> None:
        """Records that a storage, if it is known, has another size now."""
        record = self._live.get(id(storage))
        if record is not None:
            self._record(record, size - record.size)
            record.size = size

    def _release(self, key: int) -> None:
        record = self._live.pop(key)
        self._record(record, -record.size)

    def _record(self, record: Record, delta: int) -> None:
        if delta:
            self._events.append((self.place, record, delta))

    def _label_of_copy(self, source: object) -> Label | None:
        if not isinstance(source, torch.Tensor) or isinstance(source, DTensor):
            return None
        known = self._live.get(id(source.untyped_storage()))
        return None if known is None else known.label and _COPIES.get(known.label)

    def at(
        self,
        event: int,
        *,
        since: int = 0,
        held: Mapping[Label, int] | None = None,
        without: frozenset[str] = frozenset(),
    ) -> Held:
        """Bytes held at an event, from `held` at the event `since`, as if there were no events in
        the modules `without`."""
        now = dict.fromkeys((*COMPONENTS, HOST), 0) | dict(held or {})
        for place, record, delta in self._events[since:event]:
            if place.where not in without:
                now[record.label or "temporary"] += delta
        return now

    def replay(
        self,
        since: int,
        until: int,
        *,
        held: Mapping[Label, int] | None = None,
        without: frozenset[str] = frozenset(),
    ) -> list[tuple[Place, Held]]:
        """The highest moment of each place between two events, in order, with the most host memory of
        the place. held: bytes to begin with, in place of those held at `since`. without: modules
        whose events do not count."""
        now, last, most = self.at(since) if held is None else dict(held), None, 0
        moments: list[tuple[Place, Held]] = []
        for place, record, delta in self._events[since:until]:
            if place.where in without:
                continue
            now[record.label or "temporary"] += delta
            total = sum(now.values()) - now[HOST]
            if place != last:
                moments.append((place, dict(now)))
                last, most = place, total
                continue
            host = max(moments[-1][1][HOST], now[HOST])
            if total > most:
                moments[-1] = (place, dict(now))
                most = total
            moments[-1][1][HOST] = host
        return moments


def _storage_of(tensor: torch.Tensor) -> torch.UntypedStorage:
    """The storage of a tensor, or of a DTensor's local shard. The same object while the storage
    exists."""
    if isinstance(tensor, DTensor):
        with torch.no_grad():
            tensor = tensor.to_local()
    return tensor.untyped_storage()
