"""How long a step takes, by arithmetic: good enough to say which of two recipes is faster, not to promise a date."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from launcher.data.synthetic import rows_of
from launcher.planner.estimate import (
    DTYPE_BYTES,
    BlockFootprint,
    Footprint,
    ModelProfile,
    Weights,
    checkpointed,
    compute_dtype,
    micro_batches_of,
    syncs_every_micro_batch,
)
from launcher.planner.machine import Machine
from launcher.recipe.schema import Recipe

LAUNCH = 5e-6
"""Seconds in which Python issues an operation: the GPU waits where it needs less for one (4 to 5 microseconds in eager PyTorch)."""
LATENCY = 20e-6
"""Seconds before the first byte of a collective arrives."""
ATTENTION = 0.5
"""Rate of attention, as a part of that of matrix products: FlashAttention-2 gets 35 % of an H100's peak (Shah et al., 2024), where
products get 70 %."""
COMPILED = 0.4
"""Share of the bytes of pointwise operations that compiled blocks still read and write. An assumption: what is fused is not
written."""


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Seconds of one optimizer step on each rank. `total` is the sum of all."""

    forward: float
    """Computing, all micro-batches."""
    backward: float
    recomputation: float
    """Forward passes of checkpointed blocks once more."""
    gather: float
    """All-gathers that computing does not hide."""
    reduce: float
    """Reductions of gradients that computing does not hide."""
    offload: float
    """Copies between device and host that computing does not hide."""
    optimizer: float

    @property
    def total(self) -> float:
        """Seconds."""
        return self.forward + self.backward + self.recomputation + self.gather + self.reduce + self.offload + self.optimizer


def step_seconds(profile: ModelProfile, recipe: Recipe, machine: Machine) -> StepTime:
    """Seconds of one optimizer step.

    - forward of a block: products and attention / rate of products + bytes of all other operations / memory bandwidth, or the time
      in which its operations are issued, whichever is more. backward: the products twice where weights are trained, once
      where they are frozen; the bytes twice. Recomputation: the forward pass of checkpointed blocks again; with selective
      checkpointing without attention and half of the products.
    - a collective over n ranks moves (n - 1) / n of its bytes through each of them. Weights are gathered once a micro-batch for
      forward and once more for backward (reshard_after_forward), or once a step (reshard_after_backward false).
    - what overlaps costs the longer: max(computing, gathering) in the forward pass, max(computing, gathering +
      reducing) in the backward pass; so only what computing does not hide is counted. Reductions of ddp overlap with the backward
      pass of the last micro-batch only.
    - offload: float32 shards to the device for each gathering, which nothing hides where one rank has all of a parameter (FSDP2 then
      copies on the stream that computes); gradients to host memory for each reduction. From the step's second
      reduction on the backward pass waits for each copy and for its addition on the host (12 bytes a parameter, where AdamW
      moves 28). Activations go out in the forward pass and come back in the backward pass. AdamW runs at the host's rate.
    - optimizer on the device: 28 bytes a parameter (`rates.ADAMW_BYTES`), and 4 for the norm, / memory bandwidth.
    """
    strategy, rates = recipe.strategy, machine.rates
    ranks = machine.ranks
    rows = rows_of(recipe.batch, sequence_length=recipe.data.sequence_length)
    micro_batches = micro_batches_of(recipe, ranks=ranks)
    footprint = profile.footprint(recipe)
    size = DTYPE_BYTES[compute_dtype(strategy)]
    compute = _compute_seconds(
        profile, footprint, machine, rows, half=size == 2, compiled=recipe.model.compile, tf32=recipe.run.float32_matmul != "highest"
    )
    ddp = strategy.kind == "ddp"
    sync = syncs_every_micro_batch(strategy)
    again = _recomputed(profile, recipe, compute)
    forward, backward = compute.forward * micro_batches, compute.backward * micro_batches
    recomputation = again * micro_batches

    shards = 1 if ddp else max(1, ranks // strategy.replicate)
    masters, trained = _shard(profile, shards, size)
    whole = size * profile.parameters
    reductions = micro_batches if sync else 1
    reduce_size = 4 if strategy.mixed_precision is None or ddp else DTYPE_BYTES[strategy.mixed_precision.reduce_dtype]
    groups = len(profile.block_classes) + 1

    gather_forward = gather_backward = reduce = 0.0
    copies_forward = copies_backward = stall = 0.0
    if ddp:
        reduce = 2 * _collective(4.0 * profile.trained, ranks, machine, groups=max(1, round(4 * profile.trained / 25e6)))
    else:
        gather = _collective(whole, shards, machine, groups=groups)
        forward_gathers = micro_batches if strategy.reshard_after_backward else 1
        backward_gathers = 0
        if strategy.reshard_after_forward:
            # The last micro-batch's forward pass frees what its backward pass needs, unless all stays gathered until then
            backward_gathers = micro_batches if strategy.reshard_after_backward else int(micro_batches == 1)
        gather_forward, gather_backward = gather * forward_gathers, gather * backward_gathers
        reduce = _collective(float(reduce_size * profile.trained), shards, machine, groups=groups)
        if strategy.replicate > 1:
            reduce += 2 * _collective(
                reduce_size * profile.trained / shards, strategy.replicate, machine, groups=groups, across=machine.nodes > 1
            )
        reduce *= reductions
        if strategy.cpu_offload is not None and machine.device == "cuda":
            upload = masters / rates.host_bandwidth
            if shards == 1:  # copied on the stream that computes
                stall += (forward_gathers + backward_gathers) * upload
            else:
                copies_forward += forward_gathers * upload
                copies_backward += backward_gathers * upload
            copies_backward += 4 * trained / rates.host_bandwidth
            stall += (reductions - 1) * (4 * trained / rates.host_bandwidth + 12 / 28 * trained / rates.host_adamw)
    checkpointing = recipe.activation_checkpointing
    if checkpointing is not None and checkpointing.offload_to_cpu and machine.device == "cuda":
        inputs = sum(
            footprint.blocks[kind].output.at(rows)
            for kind, on in zip(profile.block_classes, checkpointed(profile, recipe), strict=True)
            if on
        )
        # save_on_cpu waits for each copy: nothing hides it
        stall += 2 * inputs * micro_batches / rates.host_bandwidth

    exposed_forward = _exposed([gather_forward, copies_forward], forward)
    hiding = backward + recomputation
    if ddp and not sync:
        hiding /= micro_batches
    exposed_backward = _exposed([gather_backward + reduce, copies_backward], hiding)
    # What is gathered and reduced shares one exposure: by its part
    network = gather_backward + reduce
    on_network = exposed_backward if network >= copies_backward else 0.0
    share = gather_backward / network if network else 0.0
    forward_on_network = exposed_forward if gather_forward >= copies_forward else 0.0
    if strategy.cpu_offload is not None and machine.device == "cuda":
        optimizer = trained / rates.host_adamw
    else:
        optimizer = 32 * trained / rates.memory_bandwidth
    return StepTime(
        forward=forward,
        backward=backward,
        recomputation=recomputation,
        gather=forward_on_network + on_network * share,
        reduce=on_network * (1 - share),
        offload=stall + exposed_forward - forward_on_network + exposed_backward - on_network,
        optimizer=optimizer,
    )


def tokens_per_step(recipe: Recipe) -> int:
    """Of all ranks, full sequences."""
    return recipe.batch.global_batch_size * recipe.data.sequence_length


def _exposed(overlapping: list[float], computing: float) -> float:
    return max(0.0, max(overlapping) - computing)


@dataclass(frozen=True)
class _Compute:
    """Seconds of one micro-batch."""

    forward: float
    backward: float
    again: tuple[float, ...]
    """Of each class of blocks: its forward pass."""
    attention: tuple[float, ...]
    products: tuple[float, ...]


def _compute_seconds(
    profile: ModelProfile, footprint: Footprint, machine: Machine, rows: int, *, half: bool, compiled: bool, tf32: bool
) -> _Compute:
    rates = machine.rates
    # float32 products off the tensor cores: an eighth of TF32 on A100 and H100
    rate = rates.half_flops if half else rates.float32_flops if tf32 or machine.device == "cpu" else rates.float32_flops / 8

    def parts(block: BlockFootprint) -> tuple[float, float, float, float]:
        moved = block.traffic.at(rows) * (COMPILED if compiled else 1.0) / rates.memory_bandwidth
        issued = block.operations * LAUNCH * (COMPILED if compiled else 1.0)
        return block.products.at(rows) / rate, block.attention.at(rows) / (ATTENTION * rate), moved, issued

    def forward(block: BlockFootprint) -> float:
        products, attention, moved, issued = parts(block)
        return max(products + attention + moved, issued)

    def backward(block: BlockFootprint, share: float) -> float:
        products, attention, moved, issued = parts(block)
        return max((1 + share) * products + 2.5 * attention + 2 * moved, 2 * issued)

    classes = [
        (profile.block_classes.count(kind), block, _share(weights))
        for kind, (block, weights) in enumerate(zip(footprint.blocks, profile.classes, strict=True))
    ]
    elements = footprint.logits.at(rows)
    loss = elements * (2 * footprint.logits_size + 12) / rates.memory_bandwidth  # read, copied, normalised, read again
    root = footprint.root
    return _Compute(
        forward=sum(count * forward(block) for count, block, _ in classes) + forward(root) + loss,
        backward=sum(count * backward(block, share) for count, block, share in classes) + backward(root, _share(profile.root)) + loss,
        again=tuple(forward(block) for block in footprint.blocks),
        attention=tuple(parts(block)[1] for block in footprint.blocks),
        products=tuple(parts(block)[0] for block in footprint.blocks),
    )


def _share(weights: Weights) -> float:
    return weights.trained / weights.count if weights.count else 1.0


def _recomputed(profile: ModelProfile, recipe: Recipe, compute: _Compute) -> float:
    checkpointing = recipe.activation_checkpointing
    if checkpointing is None:
        return 0.0
    total = 0.0
    for kind, on in zip(profile.block_classes, checkpointed(profile, recipe), strict=True):
        if on and checkpointing.mode == "full":
            total += compute.again[kind]
        elif on:
            total += compute.again[kind] - compute.attention[kind] - compute.products[kind] / 2
    return total


@lru_cache(maxsize=1024)
def _ring(ranks: int) -> float:
    return (ranks - 1) / ranks


def _collective(moved: float, ranks: int, machine: Machine, *, groups: int, across: bool = False) -> float:
    """Seconds of all-gathers, or reduce-scatters, that hand so many bytes to each of so many ranks, in so many calls."""
    if ranks == 1:
        return 0.0
    over_nodes = across or ranks > machine.gpus_per_node
    rate = machine.rates.inter_node_bandwidth if over_nodes else machine.rates.intra_node_bandwidth
    if across:  # one rank of each node: its share of the node's cards
        rate /= machine.gpus_per_node
    return moved * _ring(ranks) / rate + groups * LATENCY


def _shard(profile: ModelProfile, shards: int, size: int) -> tuple[int, int]:
    """Bytes of masters and trained elements of rank 0."""
    shares = [profile.root.share(shards, size)]
    total_masters, total_trained = shares[0].masters, shares[0].trained
    for kind in profile.block_classes:
        share = profile.classes[kind].share(shards, size)
        total_masters += share.masters
        total_trained += share.trained
    return total_masters, total_trained
