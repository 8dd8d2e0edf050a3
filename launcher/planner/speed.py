"""Time of a training step in closed formulas: to rank configurations, not to promise a speed.

- A block's forward pass takes its products and attention over the rate of products, plus all other
  traffic over the memory bandwidth; at least the time to issue its operators. Its backward pass
  takes the products twice where weights are trained, once where they are frozen, and the traffic
  twice. Recomputation is another forward pass; selective checkpointing saves attention and half of
  the products; with a budget, the operators that it keeps.
- A collective over n ranks moves (n - 1) / n of its bytes through each of them.
- Communication overlaps with compute: only what exceeds compute counts. DDP's reduction overlaps
  with the backward pass of the last micro-batch only.
- CPU offload uploads float32 shards for each all-gather, and downloads gradients for each
  reduction. From a step's second reduction on, the backward pass waits for the copy and for the
  addition on the host. On one rank nothing hides the uploads: FSDP2 then copies on the stream that
  computes. AdamW runs at the host's rate.
- Optimizer state alone in host memory is copied to the device and back in each step, both at once;
  in files it is also read and written, by all ranks of a node from one drive.
- Activation offload copies the inputs of blocks to the host beside the forward pass, and back
  beside the backward pass. The link is shared with CPU offload.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from launcher.planner.estimate import (
    checkpointed,
    micro_batches_of,
    state_shards,
    streamed_state,
    syncs_every_micro_batch,
    tokens_of,
    weight_shards,
)
from launcher.planner.machine import ADAMW_BYTES, DISK, Machine
from launcher.planner.profile import (
    DTYPE_BYTES,
    OPERATORS,
    Footprint,
    ModelProfile,
    Weights,
    block_footprint,
    compute_dtype,
    logits_width,
    root_footprint,
)
from launcher.recipe.schema import Recipe
from launcher.strategies.base import offloads_parameters
from launcher.training.muon import STEPS

LAUNCH = 5e-6
"""Seconds in which eager PyTorch issues an operator (4 to 5 microseconds). An estimate."""
LATENCY = 20e-6
"""Seconds before the first byte of a collective arrives. An estimate."""
ATTENTION = 0.5
"""Rate of attention over that of matrix products: FlashAttention-2 reaches 35 % of an H100's peak
(Shah et al., 2024), products 70 %."""
ATTENTION_BACKWARD = 2.5
"""Products of attention's backward pass over those of its forward pass: 5 over 2 (Dao, 2023)."""
FLOAT32_PRODUCTS = 1 / 8
"""Rate of float32 products without TF32 over that with it: A100 and H100, data sheets."""
ADD_BYTES = 12
"""Bytes of a float32 addition: two are read, one is written."""
_OTHERS = {"sgd": 20, "adafactor": 100, "muon": 70}
STEP_BYTES = {"float32": ADAMW_BYTES, "bfloat16": 390, "int8": 680} | _OTHERS
"""Bytes that a step of the optimizer moves for a parameter: AdamW's by the dtype of its state. The
inputs and outputs of all operators were counted; rounding takes many."""
NORM_BYTES = 4
"""Bytes per gradient that clipping reads in addition to AdamW."""
DDP_BUCKET = 25e6
"""Bytes of a bucket of DistributedDataParallel (its default, bucket_cap_mb)."""


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Seconds of one optimizer step on each rank."""

    # Compute of all micro-batches
    forward: float
    backward: float
    recomputation: float
    # What compute does not hide
    communication: float
    offload: float
    """Copies between device and host."""
    optimizer: float

    @property
    def total(self) -> float:
        return float(sum(vars(self).values()))


def tokens_per_step(recipe: Recipe) -> int:
    """Of all ranks, full sequences."""
    return recipe.batch.global_batch_size * recipe.data.sequence_length


def step_seconds(profile: ModelProfile, recipe: Recipe, machine: Machine) -> StepTime:
    count, once = micro_batches_of(recipe, ranks=machine.ranks), _reductions(recipe, machine) == 1
    forward, backward, again = (count * t for t in _compute(profile, recipe, machine))
    network_forward, network_backward = _network(profile, recipe, machine)
    copies_forward, copies_backward, waits, optimizer = _transfers(profile, recipe, machine)
    hiding = backward + again
    if recipe.strategy.kind == "ddp" and once:
        hiding /= count
    late_forward = max(0.0, network_forward - forward)
    late_backward = max(0.0, network_backward - hiding)
    # Copies overlap with compute and with the network
    copies = max(0.0, copies_forward - forward - late_forward)
    copies += max(0.0, copies_backward - backward - again - late_backward)
    return StepTime(
        forward=forward,
        backward=backward,
        recomputation=again,
        communication=late_forward + late_backward,
        offload=waits + copies,
        optimizer=optimizer,
    )


def _compute(profile: ModelProfile, recipe: Recipe, machine: Machine) -> tuple[float, float, float]:
    """Seconds of forward, backward and recomputation of one micro-batch."""
    rates, tokens = machine.rates, tokens_of(recipe)
    size = DTYPE_BYTES[compute_dtype(recipe.strategy)]
    rate = rates.half_flops if size == 2 else _float32_flops(recipe, machine)
    issued = OPERATORS * LAUNCH

    def seconds(part: Footprint, weights: Weights) -> tuple[float, float, float]:
        products, attention = part.products / rate, part.attention / (ATTENTION * rate)
        moved = part.traffic / rates.memory_bandwidth
        trained = weights.trained / weights.count if weights.count else 1.0
        forward = max(products + attention + moved, issued)
        backward = (1 + trained) * products + ATTENTION_BACKWARD * attention + 2 * moved
        selective = products / 2 + moved
        if part.spared is not None:
            selective = forward * (1 - part.spared)
        return forward, max(backward, 2 * issued), selective

    classes = [
        seconds(block_footprint(profile, kind, recipe, tokens), weights)
        for kind, weights in enumerate(profile.classes)
    ]
    blocks = [classes[kind] for kind in profile.block_classes]
    root = seconds(root_footprint(profile, recipe, tokens), profile.root)
    # The logits are read, copied, normalised and read again
    loss = tokens * profile.vocabulary * (2 * size + 12) / rates.memory_bandwidth
    again = root[0] if logits_width(profile, tokens) < profile.vocabulary else 0.0
    checkpointing = recipe.activation_checkpointing
    which = 0 if checkpointing is None or checkpointing.mode == "full" else 2
    recomputed = zip(blocks, checkpointed(profile, recipe), strict=True)
    return (
        sum(block[0] for block in blocks) + root[0] + loss,
        sum(block[1] for block in blocks) + root[1] + loss,
        sum(block[which] for block, twice in recomputed if twice) + again,
    )


def _float32_flops(recipe: Recipe, machine: Machine) -> float:
    slow = recipe.run.float32_matmul == "highest" and machine.device == "cuda"
    return machine.rates.float32_flops * (FLOAT32_PRODUCTS if slow else 1.0)


def _orthogonalization(profile: ModelProfile, recipe: Recipe, machine: Machine) -> float:
    """Seconds of Muon's products, and of two exchanges of each sharded matrix."""
    shards, shapes = state_shards(recipe.strategy, machine.ranks), profile.orthogonalized
    sides = [(math.prod(shape[:-2]), *sorted(shape[-2:])) for shape in shapes]
    products = sum(n * STEPS * (4 * a**2 * b + 2 * a**3) for n, a, b in sides)
    moved = 2 * 4 * sum(math.prod(shape) for shape in shapes if len(shape) == 2) / shards
    calls = 2 * -(-len(shapes) // shards)
    exchanges = _collective(moved, shards, machine, calls)
    return products / shards / _float32_flops(recipe, machine) + exchanges


def _gathers(recipe: Recipe, machine: Machine) -> tuple[int, int]:
    """All-gathers of each weight in a step's forward passes, and in its backward passes."""
    strategy, count = recipe.strategy, micro_batches_of(recipe, ranks=machine.ranks)
    resharded = strategy.reshard_after_backward
    backward = count if resharded else int(count == 1)
    return count if resharded else 1, backward if strategy.reshard_after_forward else 0


def _reductions(recipe: Recipe, machine: Machine) -> int:
    """Reductions of each gradient in a step."""
    every = syncs_every_micro_batch(recipe.strategy)
    return micro_batches_of(recipe, ranks=machine.ranks) if every else 1


def _network(profile: ModelProfile, recipe: Recipe, machine: Machine) -> tuple[float, float]:
    """Seconds of collectives beside the forward and the backward passes of a step."""
    strategy, reductions = recipe.strategy, _reductions(recipe, machine)
    if strategy.kind == "ddp":
        gradients = 4.0 * profile.trained
        buckets = max(1, round(gradients / DDP_BUCKET))
        return 0.0, 2 * reductions * _collective(gradients, machine.ranks, machine, buckets)
    shards, groups = weight_shards(strategy, machine.ranks), len(profile.block_classes) + 1
    mixed, size = strategy.mixed_precision, DTYPE_BYTES[compute_dtype(strategy)]
    gradients = profile.trained * (4.0 if mixed is None else DTYPE_BYTES[mixed.reduce_dtype])
    gather = _collective(size * profile.parameters, shards, machine, groups)
    reduce = _collective(gradients, shards, machine, groups)
    if strategy.replicate > 1:
        across, copies = machine.nodes > 1, strategy.replicate
        reduce += 2 * _collective(gradients / shards, copies, machine, groups, across=across)
    forward, backward = _gathers(recipe, machine)
    return gather * forward, gather * backward + reduce * reductions


def _collective(
    moved: float, ranks: int, machine: Machine, calls: int, *, across: bool = False
) -> float:
    """Seconds of all-gathers, or reduce-scatters, of so many bytes over so many ranks.

    across: one rank of each node takes part, with its share of the node's network.
    """
    if ranks == 1:
        return 0.0
    rates, per_node = machine.rates, machine.gpus_per_node
    rate = rates.intra_node_bandwidth
    if across or ranks > per_node:
        rate = rates.inter_node_bandwidth / (per_node if across else 1)
    return moved * (ranks - 1) / ranks / rate + calls * LATENCY


def _transfers(
    profile: ModelProfile, recipe: Recipe, machine: Machine
) -> tuple[float, float, float, float]:
    """Seconds of copies in forward and backward that overlap, of waiting copies, and of AdamW."""
    strategy, rates, on_gpu = recipe.strategy, machine.rates, machine.device == "cuda"
    shards, size = weight_shards(strategy, machine.ranks), DTYPE_BYTES[compute_dtype(strategy)]
    trained = profile.trained / shards
    forward = backward = waits = 0.0
    adamw = recipe.optimizer.name == "adamw"
    updating = STEP_BYTES[recipe.optimizer.state_dtype if adamw else recipe.optimizer.name]
    moved = updating / state_shards(strategy, machine.ranks) * shards + NORM_BYTES
    optimizer = moved * trained / rates.memory_bandwidth
    if strategy.kind == "ddp" and strategy.shard_optimizer:
        tensors = sum(len(group.parameters) for group in profile.groups)
        optimizer += _collective(4.0 * trained, machine.ranks, machine, tensors)
    in_memory, in_file, _ = streamed_state(profile, recipe, ranks=machine.ranks)
    if on_gpu:
        optimizer = max(optimizer, (in_memory + in_file) / rates.host_bandwidth)
    if offloads_parameters(strategy.cpu_offload) and on_gpu:
        masters = sum(sum(group.sizes(size)) for group in profile.groups) / shards
        upload = masters / rates.host_bandwidth
        forward, backward = (upload * times for times in _gathers(recipe, machine))
        if shards == 1:
            forward, backward, waits = 0.0, 0.0, forward + backward
        download = 4 * trained / rates.host_bandwidth
        addition = ADD_BYTES / ADAMW_BYTES * trained / rates.host_adamw
        backward += download
        waits += (_reductions(recipe, machine) - 1) * (download + addition)
        optimizer = trained / rates.host_adamw * updating / ADAMW_BYTES
    optimizer = max(optimizer, 2 * in_file * machine.gpus_per_node / DISK)
    if recipe.optimizer.name == "muon":
        optimizer += _orthogonalization(profile, recipe, machine)
    checkpointing = recipe.activation_checkpointing
    if checkpointing is not None and checkpointing.offload_to_cpu and on_gpu:
        count = micro_batches_of(recipe, ranks=machine.ranks)
        outputs = checkpointed(profile, recipe).count(True) * size * profile.hidden
        copied = outputs * tokens_of(recipe) * count / rates.host_bandwidth
        forward, backward = forward + copied, backward + copied
    return forward, backward, waits, optimizer
