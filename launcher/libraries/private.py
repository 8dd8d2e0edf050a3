"""Every private name of torch and transformers that the launcher uses.

A private name may change with any release, so each one stands here, with the versions in which it
was read and with what happens without it. torch 2.11 and 2.13 and transformers 5.17 and 5.23 have
all of them, unless the entry says otherwise. `tests/unit/test_private_names.py` checks that no
other module uses one, and that the installed versions have them all.

What only measures, reports or saves time or memory is optional: without it a run logs once what
it loses, and trains on.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

logger = logging.getLogger(__name__)

Method = Callable[..., None]


@functools.cache
def log_missing(name: str, consequence: str) -> None:
    """Logs once in this process that torch lacks a name, and what the run loses."""
    logger.warning(f"torch {torch.__version__} has no {name}: {consequence}; training continues")


# Optional names of torch

_FSDP_WAITS = ("wait_for_unshard", "post_backward", "finalize_backward")


def fsdp_groups(model: nn.Module) -> list[Any]:
    """FSDP's groups of parameters, each once: an FSDPParamGroup for each call of `fully_shard` on
    modules with parameters.

    torch 2.11 (`_fsdp_param_group`) and 2.13 (a list). Without it the result is empty, and
    `time_fsdp_waits` says what is lost.
    """
    states: dict[Any, None] = {}
    for module in model.modules():
        if callable(state_of := getattr(module, "_get_fsdp_state", None)):
            states[state_of()] = None
    groups = list[Any]()
    for state in states:
        groups += getattr(state, "_fsdp_param_groups", [getattr(state, "_fsdp_param_group", None)])
    return [group for group in groups if group is not None]


def time_fsdp_waits(model: nn.Module, timed: Callable[[Method], Method], *, blocking: bool) -> bool:
    """Replaces the methods of FSDP in which compute waits for all-gathers and reductions by
    `timed(method)`. `blocking`: collectives wait where they start.

    torch 2.11 to 2.13. If a method is missing, none is replaced, and the result is False: a part
    of the waits would be a wrong measurement.
    """
    groups = fsdp_groups(model)
    names = (*_FSDP_WAITS, "unshard") if blocking else _FSDP_WAITS
    missing = [name for name in names if not all(hasattr(group, name) for group in groups)]
    if missing or not groups:
        name = f"FSDPParamGroup.{missing[0]}" if groups else "FSDPState._fsdp_param_groups"
        log_missing(name, "communication_seconds and slow ranks are not measured")
        return False
    for group in groups:
        for name in names:
            setattr(group, name, timed(getattr(group, name)))
    return True


def stop_ddp_timing(ddp: nn.Module) -> None:
    """Keeps DDP from waiting for its timing events, which it does by default in each of its first
    ten iterations, and in every 100th.

    torch 2.11 to 2.13. Without it DDP waits.
    """
    stop = getattr(ddp, "_set_ddp_runtime_logging_sample_rate", None)
    if stop is None:
        name = "DistributedDataParallel._set_ddp_runtime_logging_sample_rate"
        log_missing(name, "DDP waits for its timing events in one of 100 steps")
    else:
        stop(2**31 - 1)


def wait_for_pending_works(group: dist.ProcessGroup) -> None:
    """Waits for the collectives of a group, after which NCCL frees their tensors.

    torch 2.11 to 2.13. Without it NCCL frees them at its next collective.
    """
    wait = getattr(group, "_wait_for_pending_works", None)
    if wait is None:
        name = "ProcessGroup._wait_for_pending_works"
        log_missing(name, "DDP takes memory for a copy of all gradients in the second step")
    else:
        wait()


def flight_recorder() -> bytes | None:
    """The last collectives, as `torchfrtrace` reads them: of NCCL, or of gloo without it; None: not
    recorded.

    torch 2.11 to 2.13. Without it the report of a hang lacks them.
    """
    name = "_dump_nccl_trace" if torch.cuda.is_available() else "_dump_fr_trace"
    try:
        return bytes(getattr(torch._C._distributed_c10d, name)())
    except Exception:  # it may be missing or raise anything
        return None


def record_memory_history(*, on: bool) -> None:
    """Starts or ends the record of CUDA allocations that a memory snapshot contains.

    torch 2.11 to 2.13. Without it a snapshot has no history.
    """
    record = getattr(torch.cuda.memory, "_record_memory_history", None)
    if record is None:
        name = "cuda.memory._record_memory_history"
        log_missing(name, "memory snapshots have no history")
    elif on:
        record()
    else:
        record(enabled=None)


def dump_memory_snapshot(file: str) -> bool:
    """Writes a snapshot of the CUDA memory, for pytorch.org/memory_viz. Returns whether torch can.

    torch 2.11 to 2.13. Without it there is no snapshot. Raises OSError or RuntimeError if it
    cannot be written.
    """
    dump = getattr(torch.cuda.memory, "_dump_snapshot", None)
    if dump is None:
        log_missing("cuda.memory._dump_snapshot", "no memory snapshot is written")
        return False
    dump(file)
    return True


def clear_cublas_workspaces() -> None:
    """Frees the workspaces of cuBLAS.

    torch 2.11 to 2.13. Without it a measurement of memory counts them.
    """
    clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)  # missing in CPU builds
    if clear is None:
        name = "_C._cuda_clearCublasWorkspaces"
        log_missing(name, "measured memory includes the workspaces of cuBLAS")
    else:
        clear()
