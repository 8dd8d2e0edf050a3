"""Makes the plan of a recipe on a machine: a traced step, and formulas for everything else."""

from __future__ import annotations

import dataclasses
import io
import multiprocessing
import os
import signal
import sys
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress

import torch

from launcher.console import bytes_as_text, plural, two_digits
from launcher.data.batching import rows_of
from launcher.distributed.spawn import end_with_parent
from launcher.models.multi_token import prediction_layers
from launcher.models.tower_inputs import TOWERS
from launcher.objectives.make import make_objective
from launcher.objectives.teacher import checked_teacher, teacher_recipe
from launcher.planner.estimate import estimate_memory, forward_peak
from launcher.planner.machine import Machine
from launcher.planner.memory import HostMemory, Moment, Plan, StepMemory
from launcher.planner.profile import ModelProfile, original_model, profile_model
from launcher.planner.recipe_values import cache_key, micro_batches_of, with_random_weights
from launcher.planner.speed import estimate_time, ring_exchange
from launcher.planner.trace import UntraceableError, trace_step, with_compiled_blocks
from launcher.planner.work import Work, state_bytes
from launcher.recipe.schema import Recipe
from launcher.sources.layouts import ATTACHMENTS
from launcher.training.model import PreparedModel

MiB, GiB = 2**20, 2**30

CUDA_CONTEXT = 600 * MiB
"""Driver and kernels of torch and cuBLAS. An estimate: nvidia-smi shows 450 to 600 MiB for a
process that computed one product on an A100 or H100."""
COMMUNICATOR = 400 * MiB
"""Buffers of an NCCL communicator. An estimate: two of 4 MiB per channel and peer."""
MARGIN = 0.04
"""Share of the peak that the allocator reserves but cannot use, with expandable segments. On
null GPUs with DDP it reserved up to 4 % more than the peak. With FSDP it reserves more: `_room`."""
LEAST_ROOM = GiB // 4
"""Least room with FSDP: small buffers on the streams of its collectives."""
CUDA_PROCESS, CPU_PROCESS = 3 * GiB, GiB // 2
"""Resident memory of a rank without tensors: an estimate on a GPU, measured on a CPU (0.4 GiB with
torch 2.13 and transformers 5.23). On a GPU it covers dequantizing FP8 and MXFP4 while weights are
read: 11 bytes for each number that is dequantized at a time, 170 MiB (measured). On a CPU the peak
of a step, which is later, exceeds that."""
LOADER_PROCESS = 160 * MiB
"""Memory of a loader process that it does not share with its rank. An estimate."""
TOKEN_BYTES = 3 * 8
"""Bytes of a token in a batch: id, target and position."""

_STEPS: dict[str, StepMemory] = {}
"""Cache of traced steps, by recipe, number of ranks and device."""


def make_plan(recipe: Recipe, machine: Machine, *, stages: bool = True) -> Plan:
    """Plans a recipe on a machine with a trace, which takes some seconds. stages: also trace those of a
    pipeline, each of which takes as long.

    There must be no default process group. Raises RecipeError if the model cannot be built.
    """
    profile = profile_model(recipe, device=machine.device)
    work = Work(profile, recipe, ranks=machine.ranks)
    estimated = estimated_plan(work, machine)
    notes = (*estimated.notes, *_experts_note(work, machine), *_ring_note(work, machine))
    notes += (*_teacher_note(recipe, machine),)
    if work.pipeline and not stages:
        note = "estimated, good to some 25 %: the stages of the pipeline were not traced"
        return dataclasses.replace(estimated, notes=(note, *notes))
    try:
        steps = [_traced(each, recipe, machine) for each in work.pipeline or [work]]
    except UntraceableError as error:
        note = f"estimated, good to some 20 %: the model does not run on fake tensors ({error})"
        return dataclasses.replace(estimated, notes=(note, *notes))
    plans = [_plan(work, machine, step) for step in steps]
    largest = max(plans, key=lambda plan: plan.tensors)
    if work.pipeline:
        host = max(plans, key=lambda plan: plan.host.total).host
        largest = dataclasses.replace(largest, host=host)
        notes = (_stages_note(work, plans, machine), *notes)
    return dataclasses.replace(largest, arithmetic=estimated.step, notes=notes)


def _traced(work: Work, recipe: Recipe, machine: Machine) -> StepMemory:
    """The trace of a rank with this work. recipe: of all ranks."""
    place = work.pipeline_rank
    number = None if place is None else place.number
    key = _key(recipe, machine, number)
    if key not in _STEPS:
        _STEPS[key] = _trace(recipe, machine, number)
    step = _STEPS[key]
    if not recipe.model.compiles:
        return step
    blocks = [*work.tower, *work.blocks]
    both = zip(blocks, [*work.tower_recomputed, *work.recomputed], strict=True)
    less = [0 if again else round(block.eager - block.kept) for block, again in both]
    original = original_model(with_random_weights(recipe), device=machine.device)
    names = [*original.description.blocks, *prediction_layers(original.model)]
    if place is not None:
        names = [names[index] for index in place.blocks]
    return with_compiled_blocks(
        step, less, [*original.tower, *names], others=max(0, work.in_flight - 1)
    )


def trace_ahead(recipes: Iterable[Recipe], machine: Machine) -> None:
    """Traces recipes in one process per core, so that later calls of `make_plan` find the results.
    If a trace fails here, `make_plan` repeats it. Does nothing on one core, or if copies of this
    process cannot trace: on systems without fork, or with GPUs."""
    traced = (each for each in recipes if each.strategy.pipeline_parallel_size == 1)
    missing = {_key(recipe, machine): recipe for recipe in traced}
    missing = {key: recipe for key, recipe in missing.items() if key not in _STEPS}
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else 1
    workers = min(cores, len(missing))
    if workers < 2 or torch.cuda.is_available():
        return
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(workers, context, _start_worker, (os.getpid(),)) as pool:
        traces = {key: pool.submit(_trace, recipe, machine) for key, recipe in missing.items()}
        try:
            for key, trace in traces.items():
                with suppress(Exception):
                    _STEPS[key] = trace.result()
        except BaseException:  # Ctrl-C
            pool.shutdown(cancel_futures=True)
            raise


def _start_worker(parent: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    end_with_parent(parent)
    # Another thread may have held the lock of these streams when this process was forked
    sys.stdout = sys.stderr = io.StringIO()
    torch.set_num_threads(1)


def _key(recipe: Recipe, machine: Machine, stage: int | None = None) -> str:
    return cache_key(with_random_weights(recipe), machine.ranks, machine.device, stage)


def _trace(recipe: Recipe, machine: Machine, stage: int | None = None) -> StepMemory:
    """stage: see `trace_step`."""
    ranks, device = machine.ranks, machine.device
    count = micro_batches_of(recipe, ranks=ranks)
    return trace_step(recipe, ranks=ranks, device=device, micro_batches=count, stage=stage)


def estimated_plan(work: Work, machine: Machine) -> Plan:
    """The plan by the closed formulas. work: on the ranks of this machine."""
    return _plan(work, machine, estimate_memory(work))


def _plan(work: Work, machine: Machine, step: StepMemory) -> Plan:
    profile, recipe = work.profile, work.recipe
    communicators = 0 if machine.ranks == 1 else 1 if recipe.strategy.replicate == 1 else 3
    on_gpu, saves = machine.device == "cuda", recipe.checkpoint
    kept = saves.keep_last + (saves.keep_best is not None) + 1
    before, whole = _teacher_peak(recipe, machine), profile.undivided or profile
    if _in_rounds(recipe):  # the teacher is beside the model and its optimizer state
        before += step.held.total
    weights = 4 * whole.trained  # in float32
    checkpoint_bytes = weights + round(state_bytes(whole, recipe.optimizer))
    return Plan(
        machine=machine,
        step=step,
        arithmetic=None,
        context=CUDA_CONTEXT + communicators * COMMUNICATOR if on_gpu else CPU_PROCESS,
        margin=round(MARGIN * step.peak.total) if on_gpu else 0,
        room=_room(work, step) if on_gpu else 0,
        host=_host(work, machine, step, before, checkpoint_bytes),
        checkpoint_bytes=checkpoint_bytes,
        checkpoints=kept if saves.saves else 0,
        notes=(
            *_notes(recipe, machine),
            *_attachment_notes(profile, recipe),
            *_reference_note(work, machine),
        ),
        before=before,
    )


def _room(work: Work, step: StepMemory) -> int:
    """Bytes of a GPU that the allocator's caches take besides the peak and the margin.

    The allocator gives memory that was freed on one stream only to the same stream. FSDP allocates
    gradient shards on the stream of its reductions, and all-gathered weights on another one, so
    other tensors cannot take their place while they do not exist. This memory counts as far as it
    exceeds the peak, because at the peak all shards may exist. docs/engineering/memory.md has measurements.
    """
    strategy = work.strategy
    if work.ddp or work.one_rank:
        return 0
    largest = max(work.gathered, key=lambda group: group.count)
    gathered = largest.unsharded(work.size)
    gathered *= 2 if largest.trained else 1
    whole = step.phases["optimizer"].components.gradients

    def unused(moment: Moment) -> int:
        """Bytes of gradient shards that do not exist at this moment. The other gradients there are
        unsharded: at most those of the largest unit and of another unit."""
        of_moment = moment.components.gradients
        before = step.phases["forward"].components.gradients  # of an earlier micro-batch
        return whole - min(whole, max(before, of_moment - gathered))

    if not strategy.syncs_every_micro_batch:  # gradients are unsharded until the last one
        return max(LEAST_ROOM, whole + gathered)
    passes = (moment for moment in step.timeline if moment.phase != "optimizer")
    beyond = max(moment.total + unused(moment) for moment in passes) - step.peak.total
    return max(LEAST_ROOM, max(0, beyond) + gathered)


def _host(
    work: Work, machine: Machine, step: StepMemory, before: int, checkpoint_bytes: int
) -> HostMemory:
    """Host memory of one node."""
    profile, recipe, data = work.profile, work.recipe, work.recipe.data
    per_node, on_gpu = machine.gpus_per_node, machine.device == "cuda"
    rows = rows_of(recipe.batch, row_length=data.row_length)
    batch = rows * data.row_length * TOKEN_BYTES + rows * profile.tower.pixels
    staged = recipe.checkpoint.asynchronous and recipe.checkpoint.saves
    staging = checkpoint_bytes // machine.ranks if staged else 0
    # On a CPU all tensors are in host memory
    process = CUDA_PROCESS if on_gpu else CPU_PROCESS + max(step.peak.total, before)
    loader = LOADER_PROCESS + data.prefetch_factor * batch
    # A step's micro-batches wait in pinned memory, those of the next step beside them
    if on_gpu:
        process += 2 * work.micro_batches * rows * profile.tower.pixels
    return HostMemory(
        processes=per_node * process,
        offload=per_node * step.host,
        workers=per_node * data.workers * loader,
        staging=per_node * staging,
    )


def _reference_note(work: Work, machine: Machine) -> Iterator[str]:
    """A note on the pass before the first step that computes log-probabilities with the initial
    weights."""
    objective = make_objective(work.recipe, trained=False)
    if not objective.needs_reference:
        return
    # Forward passes with the same micro-batches, which the step's memory covers
    step = estimate_time(work, machine)
    share = (step.forward + step.communication / 2) / step.total
    yield (
        "before the first step, the reference pass computes the log-probabilities of all "
        f"{objective.unit} by the initial weights: about {share:.0%} of the time of an epoch, once, and less memory "
        "than a step"
    )


def _teacher_peak(recipe: Recipe, machine: Machine) -> int:
    """Bytes of tensors on a device at the largest peak of a teacher's pass; 0 without a teacher."""
    if recipe.distillation is None:
        return 0
    random = with_random_weights(recipe)
    model = original_model(random, device=machine.device)

    def prepare(teacher: Recipe) -> PreparedModel:
        return original_model(with_random_weights(teacher), device=machine.device)

    peaks = []
    for name in recipe.distillation.paths():
        checked_teacher(random, model, prepare, name, planned=True)
        teacher = with_random_weights(teacher_recipe(recipe, name))
        profile = profile_model(teacher, device=machine.device)
        peaks.append(forward_peak(Work(profile, teacher, ranks=machine.ranks)))
    return max(peaks)


def _in_rounds(recipe: Recipe) -> bool:
    return recipe.distillation is not None and recipe.distillation.answers != "data"


def _teacher_note(recipe: Recipe, machine: Machine) -> Iterator[str]:
    """A note on the passes of a teacher over the data."""
    if (settings := recipe.distillation) is None:
        return
    size = bytes_as_text(_teacher_peak(recipe, machine))
    if _in_rounds(recipe):
        many = "once" if settings.rounds == 1 else f"{settings.rounds} times"
        yield (
            f"{many}, prompts are answered (the time is not estimated), and the teacher predicts each "
            f"token of the answers, with {size} of tensors on each rank (estimated) beside the model "
            "and its optimizer state, which the plan counts. The predictions take "
            f"{8 * settings.top_k:,} bytes for each token with loss in run.dir, and those of a round "
            "are removed by the next one"
        )
        return
    yield (
        f"before the first step, the teacher predicts each token with loss, once, with {size} of "
        "tensors on each rank (estimated), and is freed before the model is loaded: the run needs "
        "the larger of the two peaks, and so does the plan. The predictions take "
        f"{8 * settings.top_k:,} bytes for each token with loss in run.dir"
    )


def _stages_note(work: Work, plans: Sequence[Plan], machine: Machine) -> str:
    """A note on the memory of the stages of a pipeline."""
    blocks = [len(stage.profile.block_classes) for stage in work.pipeline]
    both = [
        f"{bytes_as_text(p.needed)} with {plural(n, 'block')}"
        for p, n in zip(plans, blocks, strict=True)
    ]
    between = [*zip([plan.needed for plan in plans], both, strict=True)][1:-1]
    most = f", between them at most {max(between)[1]}" if between else ""
    noun = "GPU" if machine.device == "cuda" else "rank"
    return f"a {noun} at the start of the pipeline needs {both[0]}, at its end {both[-1]}{most}"


def _experts_note(work: Work, machine: Machine) -> Iterator[str]:
    """A note on what expert parallelism saves, by the estimate."""
    strategy = work.strategy
    if strategy.expert_parallel_size == 1:
        return
    whole = dataclasses.replace(strategy, expert_parallel_size=1)
    recipe = dataclasses.replace(work.recipe, strategy=whole)
    both = work, Work(work.profile, recipe, ranks=work.ranks)
    peaks = (estimate_memory(each).peak.total for each in both)
    waits = (estimate_time(each, machine).communication for each in both)
    (peak, peak_whole), (wait, wait_whole) = map(bytes_as_text, peaks), map(two_digits, waits)
    yield (
        f"without strategy.expert_parallel_size: {strategy.expert_parallel_size} the peak of "
        f"tensors would be {peak_whole} instead of {peak}, and in each step compute would wait "
        f"{wait_whole} s for communication instead of {wait} s (both estimated)"
    )


def _ring_note(work: Work, machine: Machine) -> Iterator[str]:
    """A note on what the groups of a ring exchange."""
    if (ring := ring_exchange(work, machine)) is None:
        return
    recurrent = work.profile.recurrent
    layers = sum(not each for each in recurrent) if recurrent else len(work.profile.block_classes)
    again = sum(work.recomputed) / max(1, len(work.recomputed))
    wait = layers * work.micro_batches * ((1 + again) * ring.wait + ring.wait_backward)
    waits = "compute does not wait for them"
    if wait:
        waits = f"compute waits {two_digits(wait)} s of a step for them"
    heads = f"{work.heads_ranks} ranks divide the heads, and " if work.heads_ranks > 1 else ""
    yield (
        f"{heads}{work.ring} groups of tokens exchange keys and values: in the attention of a layer a "
        f"rank sends at most {bytes_as_text(round(ring.sent))} in a forward pass, and twice as much in "
        f"a backward pass; {waits} (estimated for rows of one document; several, and windows, need less)"
    )


def _attachment_notes(profile: ModelProfile, recipe: Recipe) -> Iterator[str]:
    known = profile.tower.kinds
    for kind in recipe.attachments:
        nouns = ATTACHMENTS[kind]
        if kind not in known:
            yield (
                f"{nouns}: the weights of the {TOWERS[kind].tower} tower are counted, but not its "
                "activations, nor the pixels of a micro-batch: of this family the largest "
                f"{kind} is not known"
            )
            continue
        if kind != known[0]:
            first = ATTACHMENTS[known[0]]
            yield f"{nouns}: each row is full of {first}, which take as much for each token"
            continue
        smaller = f". {TOWERS[kind].smaller}" if profile.tower.limited else ""
        yield (
            f"{nouns}: each row is full of the largest {nouns} ({profile.tower.patches:,} patches); "
            f"rows with less need less memory and time{smaller}"
        )


def _notes(recipe: Recipe, machine: Machine) -> Iterator[str]:
    if recipe.model.compiles:
        yield (
            "compiled blocks save what torch.compile's partition of a block saves; what they compute "
            "meanwhile is counted as in eager blocks"
        )
    if machine.device == "cuda":
        yield "context, communicators and the margin are estimates; everything else is counted"
    if machine.gpus_per_node % recipe.strategy.tensor_parallel_size:
        yield (
            f"strategy.tensor_parallel_size={recipe.strategy.tensor_parallel_size}: tensor "
            "parallel ranks are on different nodes, and sum the results of each block over the "
            f"network between nodes; a divisor of gpus_per_node={machine.gpus_per_node} is faster"
        )
    if recipe.strategy.kind == "ddp" and not recipe.uses_one_rank(machine.ranks):
        yield "ddp's buckets, as large as the gradients, are calculated, not traced"
    if recipe.data.builder is not None:
        yield "the batch is the first samples of data.builder; larger samples need more"
