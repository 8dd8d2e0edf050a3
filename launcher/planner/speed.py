"""Estimates the time of a training step with closed formulas, to rank configurations.

- A block's forward pass takes the time of its products and attention, plus the time that all other
  traffic takes at the memory bandwidth; at least the time to launch its kernels. The backward pass
  computes the products twice where weights are trained. Recomputation is another forward pass;
  selective checkpointing saves attention and half of the products.
- `model.compile` fuses the other operators: less traffic, fewer kernels.
- A collective over n ranks moves (n - 1) / n of its bytes through each of them. It overlaps with
  compute, which it slows down. DDP's reduction overlaps with the backward pass of the last
  micro-batch only.
- FSDP copies weights out of, and gradients into, the buffers of its collectives. Nothing overlaps
  with that. On one rank, where it has no collectives, it casts and copies weights (10 bytes for a
  parameter in 16 bits) and gradients (14 bytes; torch 2.11 to 2.13, `foreach_reduce`).
- Copies between host and device run beside compute: only the time by which they exceed it counts.

docs/engineering/speed.md compares the estimates with published figures.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from dataclasses import dataclass

import torch

from launcher.console import seconds_as_text
from launcher.errors import RecipeError
from launcher.optimizers.muon import STEPS
from launcher.planner.machine import ADAMW_BYTES, DISK, Machine
from launcher.planner.profile import ModelProfile, profile_model
from launcher.planner.work import BlockCost, Work
from launcher.recipe.objectives import objective_of
from launcher.recipe.schema import Lora, Recipe
from launcher.strategies.base import offloads_parameters

LONG = 300.0
"""Seconds of a run that is long enough to suggest what is faster."""
RANGE = (0.8, 1.25)
"""Ratios of actual to predicted speed to expect: nine of ten published figures lie between them."""
LAUNCH, LAUNCH_BACKWARD = 15e-6, 8e-6
"""Seconds in which eager PyTorch launches a kernel. Estimates: 31 and 16 us were measured for a
Llama block on null GPUs, on a core of an AMD EPYC that other programs shared."""
LAUNCH_SELECTIVE = 85e-6
"""Seconds in which eager PyTorch launches a kernel in the forward pass and in recomputation with
selective checkpointing, where Python code decides about each operator: the host of an H100 took 574
ms for a step whose kernels took 475."""
BACKWARD_LAUNCHES = 2.2
"""Ratio of the kernels in the backward pass of a Llama block to the kernels in its forward pass: 82
to 38."""
BACKWARD_MOVED = 2.4
"""Ratio of the bytes that operators other than matrix products and attention move in the backward
pass to the bytes that they move in the forward pass: 11.8 to 4.8 GB for a block of Llama 3 8B with
8,192 tokens."""
FUSED_MOVED, FUSED_LAUNCHES = 0.25, 0.7
"""Compiled blocks move this share of the bytes of BACKWARD_MOVED, and take this share of the launch
time: 4.1 of 16.6 GB in the forward and backward pass of that block, as Inductor counts them."""
SHARED = 0.19
"""Share of its rate that compute loses while a collective runs: an average of 18.9 % on A100, H100,
MI210 and MI250 (Lee et al., 2025, arXiv 2507.03114)."""
LATENCY = 20e-6
"""Seconds before the first byte of a collective arrives in a node. An estimate."""
RING_STEP, RING_STEP_BETWEEN_NODES = 3.4e-6, 9.6e-6
"""Seconds in which a rank of a ring passes on what it gets, to a neighbour in its node or in another one:
NCCL's own model of its protocol for large messages (`tuning.cc`). A ring of 1,024 ranks on 128 nodes takes
4.3 ms for the way around."""
ATTENTION = 0.5
"""Rate of attention, relative to the rate of matrix products: FlashAttention-2 reaches 35 % of an
H100's peak (Shah et al., 2024), products 70 %."""
ATTENTION_BACKWARD = 2.5
"""Ratio of the products in the backward pass of attention to the products in its forward pass (Dao,
2023)."""
FLOAT32_PRODUCTS = 1 / 8
"""Rate of float32 products without TF32, relative to their rate with TF32: A100 and H100, data
sheets."""
DEQUANTIZE = {"cuda": 33 / 64, "cpu": 20.5}
"""Bytes that `nf4.dequantize` moves for a number, without writing the result: a kernel on GPUs,
torch's operators on CPUs."""
ADD_BYTES = 12
"""Bytes of a float32 addition: two are read, one is written."""
_OTHERS = {"sgd": 20, "adafactor": 100, "muon": 70, "lion": 68, "schedule_free_adamw": 144}
STEP_BYTES = {"float32": ADAMW_BYTES, "bfloat16": 24, "int8": 30} | _OTHERS
"""Bytes that the optimizer moves for a parameter, AdamW by the dtype of its state: the inputs and
outputs of all operators. In low precision 20 and 16, and 4 and 14 in the time of instructions that
traffic does not hide (estimated: 155 and 316 for a parameter at most, 10 ms for 10^9 parameters on
an H100 with int8)."""
AVERAGE_BYTES = 12
"""Bytes that optimizer.ema moves for a parameter: two are read, one is written, in float32."""
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
    # Time that does not overlap with compute
    communication: float
    """Seconds of communication, with the copies of FSDP and the time by which collectives slow
    compute down."""
    offload: float
    """Copies between device and host."""
    optimizer: float
    pipeline: float = 0.0
    """Waits of a pipeline's ranks for other stages, before the first and after the last micro-batch of
    a step, and where another stage takes longer."""

    @property
    def total(self) -> float:
        """Seconds of the whole step."""
        return float(sum(vars(self).values()))


def tokens_per_step(recipe: Recipe) -> int:
    """Tokens of all ranks in one optimizer step, with full sequences, or full pairs."""
    return recipe.batch.global_batch_size * recipe.data.row_length


def seconds_of_step(time: StepTime, recipe: Recipe, tokens: float) -> float:
    """Seconds of a step with so many tokens, by an estimate for full sequences. What the optimizer
    does takes as long for any number."""
    share = tokens / tokens_per_step(recipe)
    return time.optimizer + share * (time.total - time.optimizer)


def estimate_time(work: Work, machine: Machine) -> StepTime:
    """Time of one optimizer step on the ranks of a machine."""
    if work.pipeline:
        return _time_of_pipeline(work, machine)
    forward, backward, again = (work.micro_batches * t for t in _compute(work, machine))
    forward *= objective_of(work.recipe).passes
    network_forward, network_backward = _network(work, machine)
    copies_forward, copies_backward, waits, optimizer = _transfers(work, machine)
    hiding = backward + again
    if work.ddp and work.reductions == 1:
        hiding /= work.micro_batches
    late_forward = max(SHARED * network_forward, network_forward - forward)
    late_backward = max(SHARED * network_backward, network_backward - hiding)
    # Copies overlap with compute and with the network
    copies = max(0.0, copies_forward - forward - late_forward)
    copies += max(0.0, copies_backward - backward - again - late_backward)
    return StepTime(
        forward=forward,
        backward=backward,
        recomputation=again,
        communication=late_forward
        + late_backward
        + sum(_exchanges(work, machine))
        + _copied(work) / machine.rates.memory_bandwidth,
        offload=waits + copies,
        optimizer=optimizer,
    )


def _time_of_pipeline(work: Work, machine: Machine) -> StepTime:
    """The time of the stage that takes longest. In addition each rank waits for as many micro-batches as
    there are other stages; half of that with two stages on a rank (Narayanan et al., 2021, arXiv
    2104.04473, section 2.2). Exchanges of activations run beside compute but for these micro-batches."""
    stages = [estimate_time(stage, machine) for stage in work.pipeline]
    slowest, size = max(stages, key=lambda stage: stage.total), work.strategy.pipeline_parallel_size
    passes = slowest.forward + slowest.backward + slowest.recomputation
    moved = 2.0 * work.size * work.tokens * work.profile.hidden
    rate = machine.rates.intra_node_bandwidth
    if work.ranks // size >= machine.gpus_per_node:  # neighbouring stages are on different nodes
        rate = machine.rates.inter_node_bandwidth / machine.gpus_per_node
    once = (passes + slowest.communication) / work.micro_batches + moved / rate + 2 * LATENCY
    return dataclasses.replace(slowest, pipeline=(size - 1) / work.chunks * once)


def _compute(work: Work, machine: Machine) -> tuple[float, float, float]:
    """Seconds of forward, backward and recomputation of one micro-batch."""
    rates, rate = machine.rates, _product_rate(work, machine)
    compiled = work.recipe.model.compiles
    savings = (FUSED_MOVED, FUSED_LAUNCHES) if compiled else (1.0, 1.0)
    checkpointing = work.recipe.activation_checkpointing
    selects = checkpointing is not None and checkpointing.mode != "full" and not compiled
    launch = LAUNCH_SELECTIVE if selects else LAUNCH

    def seconds(
        layer: BlockCost, fused: float = 1.0, faster: float = 1.0
    ) -> tuple[float, float, float]:
        """Forward, backward, selective recomputation."""
        products, attention = layer.products / rate, layer.attention / (ATTENTION * rate)
        moved, launches = fused * layer.moved / rates.memory_bandwidth, faster * layer.launches
        weights = DEQUANTIZE[work.profile.device] + work.size
        weights *= layer.quantized / rates.memory_bandwidth
        forward = max(weights + products + attention + moved, launch * launches)
        backward = (1 + layer.trained) * products + ATTENTION_BACKWARD * attention
        backward += weights + BACKWARD_MOVED * moved
        backward = max(backward, LAUNCH_BACKWARD * BACKWARD_LAUNCHES * launches)
        backward = backward if layer.backward else 0.0
        selective = weights + products / 2 + moved
        if layer.spared is not None:
            selective = forward * (1 - layer.spared)
        if selects:
            selective = max(selective, launch * launches)
        return forward, backward, selective

    blocks, root = [seconds(block, *savings) for block in work.blocks], seconds(work.root)
    # The logits are read, copied, normalised and read again
    loss = work.tokens * work.profile.vocabulary * (2 * work.size + 12) / rates.memory_bandwidth
    loss *= 1 + work.profile.depths
    which = 0 if checkpointing is None or checkpointing.mode == "full" else 2
    recomputed = zip(blocks, work.recomputed, strict=True)
    again = sum(block[which] for block, twice in recomputed if twice)
    tower = [seconds(block, *savings) for block in work.tower]
    recomputed = zip(tower, work.tower_recomputed, strict=True)
    again += sum(block[which] for block, twice in recomputed if twice)
    blocks += tower
    return (
        sum(block[0] for block in blocks) + root[0] + loss,
        sum(block[1] for block in blocks) + root[1] + loss,
        again + (root[0] if work.chunked and not work.kept_logits else 0.0),
    )


def _product_rate(work: Work, machine: Machine) -> float:
    """Floating-point operations of matrix products a second."""
    if work.size == 2:
        return machine.rates.half_flops
    return _float32_flops(work.recipe.run.float32_matmul, machine)


def _float32_flops(float32_matmul: str, machine: Machine) -> float:
    slow = float32_matmul == "highest" and machine.device == "cuda"
    return machine.rates.float32_flops * (FLOAT32_PRODUCTS if slow else 1.0)


def _gathers(work: Work) -> tuple[int, int]:
    """All-gathers of each weight in a step's forward passes, and in its backward passes."""
    count, strategy = work.micro_batches, work.strategy
    forward = count if strategy.reshard_after_backward else 1
    backward = forward if strategy.reshard_after_backward else int(count == 1)
    return forward, backward if strategy.reshard_after_forward else 0


def _copied(work: Work) -> float:
    """Bytes that copies and casts of weights and gradients, and additions of gradients, move in a
    step."""
    profile, size, later = work.profile, work.size, work.micro_batches - 1
    if work.one_rank:  # weights are cast once a step, gradients cast or added
        cast = 2 * (4 + size) if size < 4 else 0
        return float((cast + (8 + size) * later) * profile.trained)
    if work.ddp:  # autocast; gradients are copied to buckets or added there, and divided
        cast = (4 + size) * (profile.dense + profile.trained) if size < 4 else 0
        moved = 8 + ADD_BYTES * later + 8 * work.reductions
        return float(work.micro_batches * cast + moved * profile.trained)
    unsharded = sum(group.unsharded(size) for group in work.gathered)
    weights, gradients = 2.0 * unsharded, float(size + work.reduce)
    if work.shards == 1:  # in place of collectives, weights are cast and copied, gradients copied
        weights += (4 / size + 1) * unsharded if size < 4 else 0
        gradients += 8
    added = ADD_BYTES * later * profile.trained / work.shards
    copied = work.micro_batches * gradients * work.gathered_trained
    return float(sum(_gathers(work)) * weights + copied + added)


def _network(work: Work, machine: Machine) -> tuple[float, float]:
    """Seconds of collectives during the forward and the backward passes of a step."""
    profile, strategy = work.profile, work.strategy
    gradients = float(work.reduce * profile.trained)
    if work.ddp:
        buckets = max(1, round(gradients / DDP_BUCKET))
        all_reduce = 2 * _collective(gradients, machine.ranks, machine, buckets, ring=False)
        return 0.0, work.reductions * all_reduce
    groups = len(profile.tower.blocks) + len(profile.block_classes) + 1
    weights = sum(group.unsharded(work.size) for group in work.gathered)
    trained = work.gathered_trained
    gather = reduce = 0.0
    if work.expert_ranks > 1:  # gathered over the ranks that have the same experts
        ranks, blocks = work.shards // work.expert_ranks, groups - 1
        sharing = work.expert_ranks if work.shards > machine.gpus_per_node else 1
        own = work.size * sum(weight.count for weight in work.experts)
        own_trained = sum(weight.count for weight in work.experts if weight.trained)
        gather = _collective(own, ranks, machine, blocks, sharing=sharing)
        reduce = _collective(work.reduce * own_trained, ranks, machine, blocks, sharing=sharing)
        weights, trained = weights - own, trained - own_trained
    # Tensor parallel ranks are neighbours. Each of them shards its part of the layers together with
    # ranks of other nodes
    across = work.shards * work.tensor_ranks > machine.gpus_per_node
    sharing = work.tensor_ranks if across else 1
    gather += _collective(weights, work.shards, machine, groups, sharing=sharing)
    reduce += _collective(work.reduce * trained, work.shards, machine, groups, sharing=sharing)
    if strategy.replicate > 1:
        averaged = gradients / work.shards
        sharing = machine.gpus_per_node if machine.nodes > 1 else 1
        copies = strategy.replicate
        reduce += 2 * _collective(averaged, copies, machine, groups, sharing=sharing, ring=False)
    forward, backward = _gathers(work)
    return gather * forward, gather * backward + reduce * work.reductions


def _exchanges(work: Work, machine: Machine) -> tuple[float, float]:
    """Seconds in which context parallel ranks exchange queries, keys, values and results, or what
    recurrent layers compute of, expert parallel ranks tokens and results (evenly), and tensor parallel
    ranks sum the results of attention and of the network after it, in a step's forward and backward
    passes. Compute waits for them. Also the seconds for which it waits for keys of a ring."""
    profile, tokens, forward, backward = work.profile, work.size * work.tokens, 0.0, 0.0
    heads, head_size = profile.heads
    # Keys and values have copies for ranks without a head of their own
    features = 2.0 * head_size * (heads + max(profile.key_heads, work.heads_ranks))
    attention = tokens * features, work.heads_ranks, 4
    ring = ring_exchange(work, machine)
    experts = 2.0 * tokens * profile.experts * profile.hidden, work.expert_ranks, 3
    sums = 2 * 2.0 * tokens * profile.hidden, work.tensor_ranks, 2  # an all-reduce moves it twice
    blocks = work.gathered[len(profile.tower.blocks) : -2]
    recurrent = profile.recurrent or (0,) * len(blocks)
    for group, twice, of_token in zip(blocks, work.recomputed, recurrent, strict=True):
        mixed = (tokens * float(of_token), work.context_ranks, 2) if of_token else attention
        exchanged = (mixed, experts, sums) if group.has_experts else (mixed, sums)
        if ring is not None and not of_token:
            forward += work.micro_batches * ring.wait
            backward += work.micro_batches * (ring.wait_backward + twice * ring.wait)
        for moved, ranks, calls in exchanged:
            sharing = machine.gpus_per_node if ranks > machine.gpus_per_node else 1
            once = work.micro_batches * _collective(
                moved, ranks, machine, calls, sharing=sharing, ring=False
            )
            forward, backward = forward + once, backward + (1 + twice) * once
    return forward, backward


@dataclass(frozen=True)
class RingExchange:
    """What a rank does in the attention of a layer for a micro-batch, if its rows are one document each:
    with several, or with windows, there are fewer keys to send. Seconds."""

    sent: float
    """Bytes of keys and values that it sends in the forward pass. In the backward pass it sends them
    again, and as many bytes of gradients."""
    wait: float
    """For which compute waits for them in the forward pass."""
    wait_backward: float


def ring_exchange(work: Work, machine: Machine) -> RingExchange | None:
    """None: the ranks are no ring.

    A group has g tokens of a row of `ring` g tokens. In each of ring - 1 steps its busiest rank sends all
    keys of the group for the key heads that it has, while attention computes half of the pairs of g
    queries and g keys: a late piece sees two earlier ones, or two pieces see an early one.
    """
    if work.ring == 1:
        return None
    (heads, size), ranks, steps = work.profile.heads, work.heads_ranks, work.ring - 1
    tokens = work.recipe.data.row_length / work.ring
    key_heads = max(work.profile.key_heads, ranks) / ranks
    moved = work.size * work.whole_rows * tokens * key_heads * 2 * size
    operations = 2 * work.whole_rows * tokens**2 * size * heads / ranks
    compute = operations / (ATTENTION * _product_rate(work, machine))
    sharing = machine.gpus_per_node if work.context_ranks > machine.gpus_per_node else 1
    # Of two ranks, each sends half of what both have
    once = _collective(2 * moved, 2, machine, 1, sharing=sharing, ring=False)
    return RingExchange(
        sent=steps * moved,
        wait=steps * max(0.0, once - compute),
        wait_backward=steps * max(0.0, 2 * once - ATTENTION_BACKWARD * compute),
    )


def _collective(
    moved: float,
    ranks: int,
    machine: Machine,
    calls: int,
    *,
    sharing: int = 1,
    ring: bool = True,
) -> float:
    """Seconds of all-gathers, or reduce-scatters, of `moved` bytes in total over `ranks` ranks. In
    an all-to-all or between ranks that are not neighbours, `sharing` ranks share the network of
    each node. ring: the ranks pass data on around a ring; an all-to-all is direct, and an all-reduce over
    nodes a tree."""
    if ranks == 1:
        return 0.0
    rates, per_node = machine.rates, machine.gpus_per_node
    rate, latency = rates.intra_node_bandwidth, LATENCY
    if sharing > 1 or ranks > per_node:
        rate = rates.inter_node_bandwidth / min(sharing, per_node)
        of_node = max(1, per_node // sharing)
        nodes = -(-ranks // of_node)
        if ring:
            latency += max(0, ranks - nodes - per_node + 1) * RING_STEP
            latency += (nodes - 1) * RING_STEP_BETWEEN_NODES
        else:
            latency += 2 * math.log2(nodes) * RING_STEP_BETWEEN_NODES
    return moved * (ranks - 1) / ranks / rate + calls * latency


def _transfers(work: Work, machine: Machine) -> tuple[float, float, float, float]:
    """Seconds of copies that may overlap with the forward and with the backward pass, of copies
    that compute waits for, and of the optimizer's step."""
    profile, strategy, rates = work.profile, work.strategy, machine.rates
    optimizer, trained = work.recipe.optimizer, profile.trained / work.shards
    forward = backward = waits = 0.0
    adamw = optimizer.name == "adamw"
    updating = STEP_BYTES[optimizer.state_dtype if adamw else optimizer.name]
    updating += 0 if optimizer.ema is None else AVERAGE_BYTES
    moved = updating / work.state_shards * work.shards + NORM_BYTES
    update = moved * trained / rates.memory_bandwidth
    if work.ddp and strategy.shard_optimizer:
        tensors = sum(len(group.parameters) for group in profile.groups)
        update += _collective(4.0 * trained, machine.ranks, machine, tensors)
    if work.on_gpu:
        update = max(update, work.streamed / rates.host_bandwidth)
    # Float32 shards are uploaded for each all-gather, gradients downloaded for each reduction
    if offloads_parameters(strategy.cpu_offload) and work.on_gpu:
        masters = sum(sum(group.sizes(work.size)) for group in profile.groups) / work.shards
        upload = masters / rates.host_bandwidth
        forward, backward = (upload * times for times in _gathers(work))
        if work.shards == 1:  # compute waits for them: FSDP2 copies on the stream that computes
            forward, backward, waits = 0.0, 0.0, forward + backward
        download = 4 * trained / rates.host_bandwidth
        addition = ADD_BYTES / ADAMW_BYTES * trained / rates.host_adamw
        # From the second reduction on, the host adds a group's gradients during the backward pass of
        # the next one
        backward += work.reductions * download + (work.reductions - 1) * addition
        update = trained / rates.host_adamw * updating / ADAMW_BYTES
    # Files are read and written, by all ranks of a node from one drive
    update = max(update, 2 * work.in_file * machine.gpus_per_node / DISK)
    if optimizer.name == "muon":
        update += _orthogonalization(work, machine)
    if work.activations_to_host:
        outputs = sum(work.recomputed) * work.size * profile.hidden
        copied = outputs * work.tokens * work.micro_batches / rates.host_bandwidth
        forward, backward = forward + copied, backward + copied
    return forward, backward, waits, update


def _orthogonalization(work: Work, machine: Machine) -> float:
    """Seconds of Muon's products, and of two exchanges of each sharded matrix."""
    shards, shapes = work.state_shards, work.profile.orthogonalized
    sides = [(math.prod(shape[:-2]), *sorted(shape[-2:])) for shape in shapes]
    products = sum(n * STEPS * (4 * a**2 * b + 2 * a**3) for n, a, b in sides)
    moved = 2 * 4 * sum(math.prod(shape) for shape in shapes if len(shape) == 2) / shards
    calls = 2 * -(-len(shapes) // shards)
    exchanges = _collective(moved, shards, machine, calls)
    precision = work.recipe.run.float32_matmul
    rate = machine.rates.half_flops  # in bfloat16
    if machine.device == "cpu" or precision == "highest":
        rate = _float32_flops(precision, machine)
    return products / shards / rate + exchanges


def time_text(seconds: float, device: str) -> str:
    """`48 s to 1 min 36 s by plan`. On CPUs a run of small steps takes up to 1.6 times as long."""
    low, high = (seconds * share for share in ((0.8, 1.6) if device == "cpu" else (0.8, 1.25)))
    return f"{seconds_as_text(max(1.0, low))} to {seconds_as_text(max(2.0, high))} by plan"


def seconds_of_steps(
    recipe: Recipe, tokens: float, profile: ModelProfile, machine: Machine
) -> float:
    """Predicted seconds of a step with so many tokens. On a CPU with the rate of products that is
    measured now, in a tenth of a second; a plan, whose choices should not depend on it, assumes one."""
    if machine.device == "cpu":
        single, half = (_products(dtype) for dtype in (torch.float32, torch.bfloat16))
        rates = dataclasses.replace(machine.rates, float32_flops=single, half_flops=half)
        machine = dataclasses.replace(machine, rates=rates)
    time = estimate_time(Work(profile, recipe, ranks=machine.ranks), machine)
    return seconds_of_step(time, recipe, tokens)


def faster_text(
    recipe: Recipe, *, tokens: float, steps: int, seconds: float, machine: Machine
) -> str:
    """What takes less time than these steps of so many seconds; empty: they are few, or nothing is
    known to be faster. On a CPU adapters are: most weights need no gradients and no update."""
    own_code = recipe.model.builder is not None or recipe.data.builder is not None
    if machine.device != "cpu" or steps * seconds < LONG or recipe.lora is not None or own_code:
        return ""
    adapters = dataclasses.replace(recipe, lora=Lora(rank=16, alpha=32))
    with contextlib.suppress(RecipeError):
        profile = profile_model(adapters, device="cpu")
        shorter = seconds_of_steps(adapters, tokens, profile, machine)
        if shorter < 0.8 * seconds:
            duration = seconds_as_text(steps * shorter)
            return f"; with lora='{{rank: 16, alpha: 32}}' about {duration}"
    return ""


def _products(dtype: torch.dtype, seconds: float = 0.05) -> float:
    """Operations a second of matrix products on the threads of this process."""
    left, right = (torch.ones(512, 512, dtype=dtype) for _ in range(2))
    left @ right  # the first product loads the library
    best, end = 0.0, time.perf_counter() + seconds
    while not best or time.perf_counter() < end:
        started = time.perf_counter()
        left @ right
        best = max(best, 2 * 512**3 / (time.perf_counter() - started))
    return best
