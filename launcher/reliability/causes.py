"""The cause of a failure: what an exception means, and what is known about exhausted memory."""

from __future__ import annotations

import os
import re
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from launcher.errors import TrainingError, line_of, message_of

_TIMEOUT_SIGNS = ("timed out waiting", "collective operation timeout")
_PEER_SIGNS = (
    "connection closed by peer",
    "connection reset by peer",
    "broken pipe",
    "remote process exited",
    "nccl communicator was aborted",
    # torchrun also terminates loader processes, which raises in their rank
    "is killed by signal: terminated",
    *_TIMEOUT_SIGNS,
)
_LOADER = "torch/utils/data/dataloader.py"
_IN_LOADER = "Original Traceback (most recent call last):"
"""What torch puts before the traceback of a loader process, in the message of an exception."""
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


def lost_a_loader(error: BaseException) -> bool:
    """Whether an exception only means that a loader process is gone."""
    if "exited unexpectedly" in message_of(error) and "DataLoader worker" in message_of(error):
        return True
    frames = traceback.extract_tb(error.__traceback__)
    reading = any(frame.filename.endswith(_LOADER) for frame in frames)
    connected = reading and "/multiprocessing/" in frames[-1].filename
    return connected and isinstance(error, OSError | EOFError)


def describe(error: BaseException) -> str:
    """One line: the exception's type and message, and the line of code that raised it; of an
    exception of a loader process, the line there."""
    line, text = line_of(error), message_of(error)
    if _IN_LOADER in text:
        _, _, there = text.partition(_IN_LOADER)
        frames = re.findall(r'^ *File "(.*)", line (\d+), in ', there, re.MULTILINE)
        if frames:
            line = f"{os.path.relpath(frames[-1][0])}:{frames[-1][1]}"
        head = text[: text.find("Caught ")].strip()
        own = there.strip().splitlines()[-1].partition(": ")[2]
        text = head or own
    first = text.strip().splitlines()[0] if text.strip() else "no message"
    return f"{type(error).__name__}: {first}{f' ({line})' if line else ''}"


def printable(text: str) -> str:
    """The text with escapes in place of what UTF-8 has no characters for, as in names of files."""
    return text.encode("utf-8", "backslashreplace").decode()


@dataclass
class Account:
    """What is known about exhausted memory."""

    message: str
    """Printed at once."""
    noted: Mapping[str, object]
    """Fields for events.jsonl; empty if a smaller micro-batch would not help."""
    restarts_now: bool
    """torchrun restarts the run at once with a smaller micro-batch, so nothing is planned."""
    explain: Callable[[float], str]
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
