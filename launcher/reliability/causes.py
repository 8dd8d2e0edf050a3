"""The cause of a failure: what an exception means, and what is known about exhausted memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from launcher.errors import TrainingError, first_line, line_of, message_of

_TIMEOUT_SIGNS = ("timed out waiting", "collective operation timeout")
_PEER_SIGNS = (
    "connection closed by peer",
    "connection reset by peer",
    "broken pipe",
    "remote process exited",
    # torchrun also terminates loader processes, which raises in their rank
    "is killed by signal: terminated",
    *_TIMEOUT_SIGNS,
)
_MEMORY_SIGNS = ("can't allocate memory", "out of memory", "cublas_status_alloc_failed")


def _matches(error: BaseException, signs: tuple[str, ...]) -> bool:
    known = isinstance(error, RuntimeError) and not isinstance(error, TrainingError)
    return known and any(sign in message_of(error).lower() for sign in signs)


def lost_a_peer(error: BaseException) -> bool:
    """Whether an exception only means that another rank is gone or does not answer."""
    return _matches(error, _PEER_SIGNS)


def timed_out(error: BaseException) -> bool:
    """Whether a collective exceeded its time limit."""
    return _matches(error, _TIMEOUT_SIGNS)


def ran_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out: of a device, in Python, in the CPU's allocator or a CUDA library."""
    known = isinstance(error, (MemoryError, torch.OutOfMemoryError))
    return known or _matches(error, _MEMORY_SIGNS)


def first_cause(error: BaseException) -> BaseException:
    """The earliest lost peer or lack of memory in an exception's chain of causes, else itself.

    For example, a loader process that is terminated while a lost connection is handled raises too.
    """
    cause = error
    earlier: BaseException | None = error
    while earlier is not None:
        if lost_a_peer(earlier) or ran_out_of_memory(earlier):
            cause = earlier
        hidden = earlier.__suppress_context__
        earlier = earlier.__cause__ or (None if hidden else earlier.__context__)
    return cause


def describe(error: BaseException) -> str:
    """One line: the exception's type and message, and the line of code that raised it."""
    where = f" ({line})" if (line := line_of(error)) else ""
    message = first_line(error) if message_of(error) else "no message"
    return f"{type(error).__name__}: {message}{where}"


@dataclass
class Account:
    """What is known about exhausted memory."""

    message: str
    """Printed at once."""
    noted: Mapping[str, object]
    """Fields for events.jsonl; empty if a smaller micro-batch would not help."""
    restarts_now: bool
    """torchrun restarts the run at once with a smaller micro-batch, so nothing is planned."""
    conclude: Callable[[float], str]
    """Returns which memory is not in the plan, what exceeds the plan, and which configuration fits.
    Takes a time limit in seconds."""


class PostMortem(Protocol):
    """Examines why memory ran out. Its methods return None if the run is not yet known; step is the
    last finished one."""

    def examine(
        self, error: BaseException, *, step: int, phase: str, micro_batch: int
    ) -> Account | None:
        """Memory ran out in this process."""

    def killed(self, process: str, step: int) -> Account | None:
        """The kernel's out-of-memory killer ended another process, such as `rank 1 of 2`."""
