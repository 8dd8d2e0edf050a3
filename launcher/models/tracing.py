"""Traces: a model runs on fake tensors, which have no values and are not on the device.

The few functions that would read values, or that would ask the device for kernels, ask `current`
first. So a trace replaces no function of the launcher.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class Trace:
    """What a trace knows in place of values and of the device."""

    cuda: bool
    """Whether the trace is for GPUs, not for CPUs."""
    triton: bool
    """Whether the launcher's Triton kernels run there."""
    updates_on_gpu: bool
    """Whether the optimizer updates weights on a GPU."""
    document_lengths: tuple[int, ...] = ()
    """Tokens of each document of a micro-batch in which attention keeps documents apart by
    length."""
    tower_lengths: tuple[tuple[int, ...], ...] = ()
    """The same of the patches in a tower: of attachments, and of their windows."""


# Not a ContextVar, which compiled code cannot read
_current: Trace | None = None


def current() -> Trace | None:
    """The trace that runs; None outside of a trace."""
    return _current


@contextmanager
def tracing(trace: Trace) -> Iterator[None]:
    """A context in which this trace runs."""
    global _current
    before, _current = _current, trace
    try:
        yield
    finally:
        _current = before
