"""From a recipe and a machine to its plan: the step traced, and by arithmetic what is outside of it."""

from __future__ import annotations

from typing import Literal

from launcher.data.synthetic import rows_of
from launcher.planner.components import HostMemory, StepMemory, pinned
from launcher.planner.estimate import ModelProfile, micro_batches_of, step_memory
from launcher.planner.footprint import profile_model
from launcher.planner.machine import Machine
from launcher.planner.plan import Plan
from launcher.planner.trace import UntraceableError, trace_step
from launcher.recipe.schema import Recipe

MiB, GiB = 2**20, 2**30

CUDA_CONTEXT = 600 * MiB
"""Driver and kernels of torch and cuBLAS. An estimate: nvidia-smi shows 450 to 600 MiB for a process that has done one product
on an A100 or H100, of which 8 to 32 MiB are a workspace that the peak counts."""
COMMUNICATOR = 400 * MiB
"""An NCCL communicator's buffers. An estimate: two to a channel and peer, 4 MiB each."""
MARGIN = 0.04
"""Of the peak: what the allocator holds and cannot use. An estimate, with expandable segments, which the launcher switches on.
Not the same as reserved less allocated, which was 0 to 12 % of the peak with ddp and 18 to 61 % with fsdp, on null GPUs with room
to spare: each stream caches what it once used, and the allocator gives that back when the device is full."""
CUDA_PROCESS, CPU_PROCESS = 3 * GiB, GiB // 2
"""Resident memory of a rank beside tensors. On a CPU measured (0.4 GiB with torch 2.13 and transformers 5.23), on a GPU an
estimate: its libraries are mapped too."""
LOADER_PROCESS = 160 * MiB
"""An estimate: most of a loader process is shared with its rank."""


def make_plan(recipe: Recipe, machine: Machine, *, method: Literal["traced", "arithmetic"] = "traced") -> Plan:
    """What a recipe needs on a machine. Seconds of work; there must be no default process group (it makes one that is not real).

    method: arithmetic costs a second for the first plan of a model, and is less exact.
    Raises RecipeError where the model cannot be built.
    """
    profile = profile_model(recipe, device=machine.device)
    arithmetic = step_memory(profile, recipe, ranks=machine.ranks)
    notes: list[str] = []
    step: StepMemory = arithmetic
    if method == "traced":
        try:
            step = trace_step(
                recipe, ranks=machine.ranks, device=machine.device, micro_batches=micro_batches_of(recipe, ranks=machine.ranks)
            )
        except UntraceableError as error:
            notes.append(f"by arithmetic: the model does not run on tensors without values ({error})")
    return Plan(
        machine=machine,
        step=step,
        arithmetic=arithmetic if step is not arithmetic else None,
        context=_context(recipe, machine),
        margin=round(MARGIN * step.peak.components.total) if machine.device == "cuda" else 0,
        host=_host(recipe, machine, profile, step),
        checkpoint_bytes=_checkpoint_bytes(profile),
        checkpoints=_checkpoints(recipe),
        notes=(*notes, *_notes(recipe, machine)),
    )


def _context(recipe: Recipe, machine: Machine) -> int:
    """Of the device's memory: on a CPU the process itself."""
    if machine.device == "cpu":
        return CPU_PROCESS
    communicators = 0 if machine.ranks == 1 else 1 if recipe.strategy.replicate == 1 else 3
    return CUDA_CONTEXT + communicators * COMMUNICATOR


def _checkpoint_bytes(profile: ModelProfile) -> int:
    """Float32 weights and the two moments of what is trained; frozen weights are not kept."""
    return 12 * profile.trained


def _checkpoints(recipe: Recipe) -> int:
    """On disk at once: those kept, and the one being written."""
    kept = recipe.checkpoint
    return 0 if kept.every_steps is None else kept.keep_last + (kept.keep_best is not None) + 1


def _host(recipe: Recipe, machine: Machine, profile: ModelProfile, step: StepMemory) -> HostMemory:
    """One node's."""
    per_node, data = machine.gpus_per_node, recipe.data
    rows = rows_of(recipe.batch, sequence_length=data.sequence_length)
    batch = rows * data.sequence_length * 8 * 3  # ids, targets and positions, 8 bytes each
    staged = recipe.checkpoint.asynchronous and recipe.checkpoint.every_steps is not None
    staging = _checkpoint_bytes(profile) // machine.ranks if staged else 0
    if staged and machine.device == "cuda":
        staging = pinned(staging + 1)  # a little more, for its alignment
    return HostMemory(
        # On a CPU the ranks' tensors are host memory too
        processes=per_node * (CUDA_PROCESS if machine.device == "cuda" else CPU_PROCESS + step.peak.components.total),
        offload=per_node * step.host,
        workers=per_node * data.workers * (LOADER_PROCESS + data.prefetch_factor * batch),
        staging=per_node * staging,
    )


def _notes(recipe: Recipe, machine: Machine) -> list[str]:
    notes = []
    if recipe.model.compile:
        notes.append("model.compile is not in the plan: compiled blocks keep fewer activations, and take memory while they compile")
    if machine.device == "cuda":
        notes.append("context, communicators and the margin are estimates; all else is counted")
    if recipe.strategy.kind == "ddp":
        notes.append("the buffers of ddp's reducer, as large as the gradients, are by arithmetic")
    if recipe.data.builder is not None:
        notes.append("the batch is the data.builder's first samples: larger ones need more")
    return notes
