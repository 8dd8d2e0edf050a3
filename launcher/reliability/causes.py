"""The cause of a failure: what an exception says, and what is known about memory that ran out."""

from __future__ import annotations

import os
import traceback
from typing import Any, Protocol

import torch

from launcher.errors import RecipeError, TrainingError, first_line

_TIMEOUT_SIGNS = ("timed out waiting", "collective operation timeout")
_PEER_SIGNS = (
    "connection closed by peer",
    "connection reset by peer",
    "broken pipe",
    "remote process exited",
    # torchrun ends the processes of the other ranks too, and the end of a loader process is raised in its rank
    "is killed by signal: terminated",
    *_TIMEOUT_SIGNS,
)
_MEMORY_SIGNS = ("can't allocate memory", "out of memory", "cublas_status_alloc_failed")


def _says(error: BaseException, signs: tuple[str, ...]) -> bool:
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(sign in text for sign in signs)


def lost_a_peer(error: BaseException) -> bool:
    """Whether an exception only says that another rank is gone or does not answer."""
    return not isinstance(error, TrainingError) and _says(error, _PEER_SIGNS)


def timed_out(error: BaseException) -> bool:
    """Whether a collective took longer than it may."""
    return _says(error, _TIMEOUT_SIGNS)


def ran_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out: of a device, in Python, in the CPU's allocator or a CUDA library."""
    if isinstance(error, (RecipeError, TrainingError)):
        return False
    known = isinstance(error, (MemoryError, torch.OutOfMemoryError))
    return known or _says(error, _MEMORY_SIGNS)


def first_cause(error: BaseException) -> BaseException:
    """The earliest lost peer or lack of memory in an exception's chain of causes; else itself.

    (A worker of the data loader that is ended while a lost connection is handled raises an
    exception of its own, say.)
    """
    cause, earlier = error, error
    while (before := _cause(earlier)) is not None:
        earlier = before
        if lost_a_peer(earlier) or ran_out_of_memory(earlier):
            cause = earlier
    return cause


def _cause(error: BaseException) -> BaseException | None:
    return error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def describe(error: BaseException) -> str:
    """One line: the exception's type and message, and the line of code that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({os.path.relpath(frames[-1].filename)}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {first_line(error) if str(error) else 'no message'}{where}"


class Account(Protocol):
    """What is known about memory that ran out (`planner/out_of_memory.py`)."""

    told: str
    """Printed at once."""
    noted: dict[str, Any]
    """For events.jsonl."""
    restarts_now: bool
    """torchrun starts the run again with a smaller micro-batch: the plan is not asked."""

    def conclude(self, seconds: float) -> str:
        """What the plan says, in at most so many seconds."""


class PostMortem(Protocol):
    """Finds out why memory ran out."""

    def examine(self, error: BaseException, *, step: int, phase: str, micro_batch: int) -> Account:
        """On the rank that ran out of memory. step: the last finished one."""

    def killed(self, who: str, step: int) -> Account:
        """On a node where the kernel killed a process."""
