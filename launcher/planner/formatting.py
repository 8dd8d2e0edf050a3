"""The plan in words: what its components, moments and rungs are called wherever people read them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from launcher.data.batching import accumulation_steps
from launcher.metrics.console import bytes_as_text
from launcher.planner.components import COMPONENTS, Components, Moment
from launcher.planner.machine import Machine
from launcher.planner.plan import Plan
from launcher.recipe.schema import Recipe

if TYPE_CHECKING:
    from launcher.planner.search import Ladder, Rung

NAMES = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer": "optimizer state",
    "gathered": "gathered weights",
    "activations": "activations",
    "logits": "logits and loss",
    "communication": "communication buffers",
    "temporary": "temporary",
    "context": "driver and libraries",
    "margin": "fragmentation margin",
}
"""What people call the components of a moment, and the two things that are added to them, in the order of a table."""

EXPLAINED = {
    "parameters": "this rank's master weights (its shards), frozen ones and buffers too",
    "gradients": "shards, or whole ones where reduction is held back; ddp: its buckets",
    "optimizer": "the two moments of AdamW",
    "gathered": "whole weights of the blocks at work (fsdp), or copies cast for compute (autocast)",
    "activations": "what forward keeps for backward, or a checkpointed block computes again",
    "logits": "logits, the loss over them, and their gradient",
    "communication": "what collectives send from and receive into",
    "temporary": "working space of operations, gradients of activations, the batch itself",
    "context": "what the driver, its libraries and communicators take outside of tensors",
    "margin": "what the allocator cannot use",
}

assert tuple(NAMES)[: len(COMPONENTS)] == COMPONENTS

_SHORT = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
_TOO_FAR = 0.10


def parts(plan: Plan, components: Components | None = None) -> dict[str, int]:
    """Bytes of one device by the keys of NAMES, at the peak or at a moment of one's own."""
    components = plan.step.peak.components if components is None else components
    return {name: getattr(components, name) for name in COMPONENTS} | {"context": plan.context, "margin": plan.margin}


def where(moment: Moment, *, micro_batches: int | None) -> str:
    """`in the backward pass of model.layers.31, micro-batch 2 of 4`."""
    if moment.phase == "optimizer":
        return "in the optimizer's step"
    of = f" of {moment.where}" if moment.where else ""
    number = "" if micro_batches == 1 else f", micro-batch {moment.micro_batch + 1}" + (f" of {micro_batches}" if micro_batches else "")
    return f"in the {moment.phase} pass{of}{number}"


def micro_batches(recipe: Recipe, ranks: int) -> int | None:
    """Passes of a rank in one optimizer step; None where tokens decide."""
    size = recipe.batch.micro_batch_size
    if not isinstance(size, int):
        return None
    return accumulation_steps(global_batch_size=recipe.batch.global_batch_size, micro_batch_size=size, ranks=ranks)


def strategy_in_words(recipe: Recipe) -> str:
    """`fsdp, bf16, full checkpointing, CPU offload`: what of a recipe the ladder varies, but the micro-batch."""
    strategy, checkpointing = recipe.strategy, recipe.activation_checkpointing
    words: list[str] = [strategy.kind]
    if strategy.kind == "fsdp":
        if strategy.replicate > 1:
            words.append(f"{strategy.replicate} copies")
        if not strategy.reshard_after_forward:
            words.append("kept after forward")
        if not strategy.reshard_after_backward:
            words.append("kept after backward")
        if strategy.sync_every_micro_batch is False:
            words.append("one reduction a step")
    mixed = strategy.mixed_precision
    words.append("fp32" if mixed is None else _SHORT[mixed.param_dtype])
    if recipe.lora is not None:
        words.append(f"LoRA {recipe.lora.rank}")
    if checkpointing is not None:
        every = "" if checkpointing.every_n_blocks == 1 else f" of 1 in {checkpointing.every_n_blocks}"
        words.append(f"{checkpointing.mode} checkpointing{every}" + (" to host" if checkpointing.offload_to_cpu else ""))
    if strategy.cpu_offload is not None:
        words.append("CPU offload")
    return ", ".join(words)


def batch_in_words(recipe: Recipe, ranks: int) -> str:
    """`4 sequences of 2,048 tokens x 8 micro-batches x 8 ranks = 256 a step`."""
    batch, tokens = recipe.batch, f"{recipe.data.sequence_length:,} tokens"
    rank_word = "1 rank" if ranks == 1 else f"{ranks:,} ranks"
    passes = micro_batches(recipe, ranks)
    if passes is None:
        return f"micro-batches of {batch.micro_batch_tokens:,} tokens on {rank_word}, {batch.global_batch_size:,} sequences a step"
    pass_word = "1 micro-batch" if passes == 1 else f"{passes:,} micro-batches"
    sequence_word = "sequence" if batch.micro_batch_size == 1 else "sequences"
    return f"{batch.micro_batch_size:,} {sequence_word} of {tokens} x {pass_word} x {rank_word} = {batch.global_batch_size:,} a step"


def disagreement(plan: Plan) -> float | None:
    """How much more the trace found than the closed formulas did, relative to these; None where only one of them was done,
    or where they are within 10 %."""
    if plan.arithmetic is None:
        return None
    traced, formula = plan.step.peak.components.total, plan.arithmetic.peak.components.total
    difference = (traced - formula) / max(formula, 1)
    return difference if abs(difference) > _TOO_FAR else None


def machine_in_words(machine: Machine) -> str:
    """`2 nodes x 8 H100 of 80.0 GiB = 16 ranks`."""
    nodes = "1 node" if machine.nodes == 1 else f"{machine.nodes} nodes"
    memory = "" if machine.memory is None else f" of {bytes_as_text(machine.memory)}"
    host = "" if machine.host_memory is None else f", {bytes_as_text(machine.host_memory)} host memory a node"
    return f"{nodes} x {machine.gpus_per_node} {machine.name}{memory}{host}"


def rungs_of(ladder: Ladder) -> list[Rung]:
    """The ladder's rungs, fastest first, and among them the recipe as written, whether or not the ladder keeps it."""
    rungs = list(ladder.rungs)
    if not any(as_written(rung, ladder) for rung in rungs):
        rungs.append(ladder.asked)
        rungs.sort(key=lambda rung: -rung.tokens_per_second)
    return rungs


def as_written(rung: Rung, ladder: Ladder) -> bool:
    """Whether the rung is the recipe that was asked about."""
    return bool(rung is ladder.asked or not rung.overrides or rung.recipe == ladder.asked.recipe)


def is_best(rung: Rung, ladder: Ladder) -> bool:
    """Whether the rung is the fastest that fits."""
    return ladder.best is not None and (rung is ladder.best or rung.overrides == ladder.best.overrides)


def nothing_fits(ladder: Ladder) -> bool:
    """Whether the ladder was looked through for a device, and nothing in it fits; where no memory is known, nothing is said."""
    return ladder.best is None and ladder.asked.plan.fits is False
