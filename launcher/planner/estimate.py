"""Memory of a training step in closed form: a thousand recipes a second, and a second opinion on the traced plan.

What users know, and what it leaves out:

- *16 bytes a parameter* (ZeRO, Rajbhandari et al., 2020): 2 + 2 for weights and gradients in half precision, 4 + 4 + 4 for
  master weights and AdamW's two moments. Here masters, gradients and moments are float32, 4 + 4 + 8 = 16 as well, and all of it is
  divided by the ranks that shard. What it leaves out is what is whole at times: gathered blocks, their gradients, buffers of
  collectives, and the embeddings, which stay gathered from the forward pass to the end of the backward pass.
- *34 h bytes a token and block* (Korthikanti et al., 2022, without the T x T scores, which flash attention does not keep):
  11 h for attention (its input 2 h, query and key 4 h, value 2 h, the projection's input 2 h, a dropout mask h), 19 h for an
  MLP of 4 h with GELU, 4 h for two layer norms. A Llama has no dropout, but for Llama-3-8B 28 h in the MLP (gate, its
  activation, up and their product, 3.5 h wide, 2 bytes each) and 8 h in each of two RMSNorms, which compute in float32 (a
  float32 copy of their input, 4 h; what was normalised and what goes out, 2 h each); with attention (5 h, grouped-query) it
  is 49 h. So nothing here is a multiple of h: what a block keeps is measured (`footprint.profile_model`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Literal

from launcher.data.batching import accumulation_steps
from launcher.data.synthetic import rows_of
from launcher.planner.components import CUBLAS_WORKSPACES, Components, Moment, Phase, StepMemory, pinned
from launcher.recipe.schema import Recipe, Strategy

Style = Literal["autocast", "cast"]
"""How weights come into the compute precision: each at its use (ddp), or a block at once when it is gathered (fsdp)."""

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Line:
    """A quantity of a micro-batch: so much, and so much a row (a sequence)."""

    fixed: float = 0.0
    per_row: float = 0.0

    def at(self, rows: int) -> int:
        """Of a micro-batch of so many rows."""
        return round(self.fixed + self.per_row * rows)


@dataclass(frozen=True)
class Weight:
    """One parameter."""

    shape: tuple[int, ...]
    trained: bool
    size: int
    """Bytes of an element; of a frozen weight beside adapters: see `Weights`."""

    @property
    def count(self) -> int:
        """Elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Held:
    """A group of weights on one rank that holds a share of each."""

    masters: int
    """Bytes."""
    trained: int
    """Elements."""
    largest: int
    """Bytes of the largest."""
    pinned: int
    """Bytes of the masters and of the gradients in page-locked memory."""


@dataclass(frozen=True)
class Weights:
    """What is sharded and gathered together: a block's parameters, or those outside of all blocks. Tied ones count once."""

    parameters: tuple[Weight, ...]
    adapted: bool
    """With adapters the frozen weights are held in the compute precision."""

    @cached_property
    def count(self) -> int:
        """Elements."""
        return sum(weight.count for weight in self.parameters)

    @cached_property
    def trained(self) -> int:
        """Elements."""
        return sum(weight.count for weight in self.parameters if weight.trained)

    @cached_property
    def largest_trained(self) -> int:
        """Elements of the largest trained parameter."""
        return max((weight.count for weight in self.parameters if weight.trained), default=0)

    @cached_property
    def _shares(self) -> dict[tuple[int, int], Held]:
        return {}

    def share(self, shards: int, dtype_bytes: int) -> Held:
        """Of rank 0, which has the larger part where `shards` does not divide: fully_shard cuts the first dimension."""
        known = self._shares.get((shards, dtype_bytes))
        if known is None:
            masters = trained = largest = in_pinned = 0
            for weight in self.parameters:
                first, *others = weight.shape or (1,)
                elements = -(-first // shards) * math.prod(others)
                size = dtype_bytes if self.adapted and not weight.trained else weight.size
                masters += elements * size
                trained += elements if weight.trained else 0
                largest = max(largest, elements * size)
                in_pinned += pinned(elements * size) + (pinned(4 * elements) if weight.trained else 0)
            known = self._shares[(shards, dtype_bytes)] = Held(masters, trained, largest, in_pinned)
        return known


@dataclass(frozen=True, kw_only=True)
class BlockFootprint:
    """One forward pass of a block, or of what is outside of all blocks, by micro-batch."""

    kept: Line
    """Bytes of its own tensors that the backward pass needs: no checkpointing."""
    selective: Line
    """Bytes that selective checkpointing keeps of them, its input aside."""
    recomputed: Line
    """Bytes that are there when a selectively checkpointed block has been computed again."""
    output: Line
    """Bytes of its output, the next block's input: full checkpointing keeps this."""
    widest: Line
    """Bytes of its largest tensor."""
    casts: int
    """Bytes of weights that autocast has copied."""
    products: Line
    """Floating-point operations of matrix products."""
    attention: Line
    """Floating-point operations of attention, the causal half."""
    traffic: Line
    """Bytes that all other operations read and write."""
    operations: int
    """How many of them there are, products included."""


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """One forward pass of a model in one precision."""

    blocks: tuple[BlockFootprint, ...]
    """By class of blocks."""
    root: BlockFootprint
    """All outside of blocks but the logits. `output`: what enters the first block."""
    logits: Line
    """Elements of the widest output over the vocabulary; none where the head is no language model's."""
    logits_size: int
    """Bytes of one of them as the head makes it."""


@dataclass(frozen=True, kw_only=True)
class ModelProfile:
    """All of a model that memory and speed depend on."""

    name: str
    device: Literal["cuda", "cpu"]
    block_names: tuple[str, ...]
    block_classes: tuple[int, ...]
    """Of each block: which of `classes` it is."""
    classes: tuple[Weights, ...]
    root: Weights
    buffers: int
    """Bytes."""
    vocabulary: int | None
    hidden: int | None
    sequence_length: int
    tied: bool
    """Whether input and output embedding are one."""
    footprints: dict[tuple[Style, str], Footprint]
    """By style and dtype of compute."""
    notes: tuple[str, ...] = ()

    @cached_property
    def parameters(self) -> int:
        """Elements of the whole model."""
        return self.root.count + sum(self.classes[index].count for index in self.block_classes)

    @cached_property
    def trained(self) -> int:
        """Elements that are trained."""
        return self.root.trained + sum(self.classes[index].trained for index in self.block_classes)

    def footprint(self, recipe: Recipe) -> Footprint:
        """Of the recipe's precision under the recipe's strategy. Raises KeyError where it was not measured."""
        dtype = compute_dtype(recipe.strategy)
        style: Style = "autocast" if recipe.strategy.kind == "ddp" and dtype != "float32" else "cast"
        return self.footprints[(style, dtype)]


def compute_dtype(strategy: Strategy) -> str:
    """What the model computes in."""
    return strategy.mixed_precision.param_dtype if strategy.mixed_precision is not None else "float32"


def micro_batches_of(recipe: Recipe, *, ranks: int) -> int:
    """Forward passes of a rank in one optimizer step."""
    rows = rows_of(recipe.batch, sequence_length=recipe.data.sequence_length)
    return accumulation_steps(global_batch_size=recipe.batch.global_batch_size, micro_batch_size=rows, ranks=ranks)


def syncs_every_micro_batch(strategy: Strategy) -> bool:
    """What `auto` means: fsdp true, ddp false."""
    wanted = strategy.sync_every_micro_batch
    return strategy.kind != "ddp" if wanted == "auto" else wanted


def checkpointed(profile: ModelProfile, recipe: Recipe) -> list[bool]:
    """Which blocks are computed again."""
    checkpointing = recipe.activation_checkpointing
    every = checkpointing.every_n_blocks if checkpointing is not None else 0
    return [bool(every) and index % every == 0 for index in range(len(profile.block_classes))]


@dataclass(frozen=True)
class _Activations:
    """Bytes along the blocks."""

    before: list[int]
    """Kept by the root's beginning and the blocks before the n-th; one more than there are blocks."""
    working: list[int]
    """In the n-th block's backward pass, beside `before[n]`: its own, as kept or as computed again, but the one that goes first."""
    head: int
    """Kept by what follows the last block, but the logits."""
    passing: list[int]
    """Working space of the n-th block's forward pass: more where nothing it makes is kept."""
    temporary: list[int]
    """Working space of the n-th block's backward pass."""
    head_temporary: int
    """Of the backward pass from the logits to the last block: that of a norm in float32."""
    host: int
    """In host memory."""


def _activations(profile: ModelProfile, recipe: Recipe, footprint: Footprint, rows: int) -> _Activations:
    """What forward keeps.

    none: all that a block's operations save. full: its input, once more all of one block when it is computed again.
    selective: its input, what attention and every other matrix product give, and all of one block.
    Offload moves a block's input to host memory (save_on_cpu sees no more of a checkpointed block: what selective
    checkpointing keeps stays on the device).
    """
    checkpointing = recipe.activation_checkpointing
    offloads = checkpointing is not None and checkpointing.offload_to_cpu
    on_host = offloads and profile.device == "cuda"
    again = checkpointed(profile, recipe)
    kept, working, passing, temporary, host = [], [], [], [], 0
    for index, checkpoints in zip(profile.block_classes, again, strict=True):
        block = footprint.blocks[index]
        whole, output, widest = block.kept.at(rows), block.output.at(rows), block.widest.at(rows)
        if not checkpoints or checkpointing is None:
            kept.append(whole)
            working.append(whole - widest)
            passing.append(widest)
        else:
            held = output + (block.selective.at(rows) if checkpointing.mode == "selective" else 0)
            if on_host:
                host += output
                held -= output
            kept.append(held)
            again_held = block.recomputed.at(rows) if checkpointing.mode == "selective" else whole
            working.append(again_held - widest + (output if on_host else 0))
            passing.append(4 * widest)
        temporary.append(3 * widest + output)
    root = footprint.root.kept.at(rows)
    first = min(root, footprint.root.output.at(rows)) if kept else 0
    head_temporary = 5 * footprint.root.widest.at(rows)
    return _Activations(list(accumulate(kept, initial=first)), working, root - first, passing, temporary, head_temporary, host)


def step_memory(profile: ModelProfile, recipe: Recipe, *, ranks: int, drawn: bool = True) -> StepMemory:
    """Memory of one optimizer step on rank 0 of `ranks`.

    recipe: the one that was profiled, or one that differs in strategy, checkpointing and batch only. drawn: with a moment of
    each block; else of those only that a peak may fall on.

    A parameter p of rank 0, over S ranks that shard (1 with ddp), float32 masters, compute of c bytes, reduction in r bytes:

    - parameters 4 p / S, gradients 4 p / S, optimizer 8 p / S, a parameter's first dimension cut into S parts, the larger first;
      all of it in host memory with offload on a GPU.
    - gathered (fsdp): c x (the root's weights, from the forward pass to the end of the backward pass, + those of one block); of all blocks
      where they are not freed after forward. ddp under autocast: c bytes for each weight that was cast, all of them
      when the forward pass ends, then those of blocks that are not computed again.
    - communication (fsdp): the next block's all-gather (c), and r bytes for each gradient of the block before, whose
      reduction is on its way; the root's between two micro-batches.
    - gradients: c bytes for each gradient of a block before it is reduced, the root's until the end. Held back until the
      last micro-batch: those of the whole model, in the reduction's dtype. ddp: buckets as large as all gradients, always;
      in micro-batches that are not reduced, gradients of the same size beside them.
    - activations: `_activations`. logits: as the head makes them, a float32 copy and the log-probabilities until the loss is
      there (2 + 4 + 4 bytes a token and word under bfloat16), the log-probabilities and two gradients in the backward pass (4 + 4 + 4).
    - temporary: gradients of activations, three times a block's widest tensor and its input.
    """
    walk = _Walk(profile, recipe, ranks=ranks, drawn=drawn)
    walk.step()
    return walk.result()


class _Walk:
    """Goes through a step and notes moments."""

    def __init__(self, profile: ModelProfile, recipe: Recipe, *, ranks: int, drawn: bool) -> None:
        strategy = recipe.strategy
        self.profile, self.strategy = profile, strategy
        self.ddp = strategy.kind == "ddp"
        footprint = profile.footprint(recipe)
        self.footprint = footprint
        rows = rows_of(recipe.batch, sequence_length=recipe.data.sequence_length)
        self.micro_batches = micro_batches_of(recipe, ranks=ranks)
        self.sync = syncs_every_micro_batch(strategy)
        self.shards = 1 if self.ddp else max(1, ranks // strategy.replicate)
        dtype = compute_dtype(strategy)
        self.size = DTYPE_BYTES[dtype]
        reduce = strategy.mixed_precision.reduce_dtype if strategy.mixed_precision is not None else "float32"
        self.reduce = DTYPE_BYTES[reduce]
        self.offloads = strategy.cpu_offload is not None and profile.device == "cuda"
        self.again = checkpointed(profile, recipe)
        self.activations = _activations(profile, recipe, footprint, rows)
        self.blocks = [profile.classes[index] for index in profile.block_classes]
        self.groups = [*self.blocks, profile.root]
        shares = [group.share(self.shards, self.size) for group in self.groups]
        self.masters = sum(share.masters for share in shares)
        self.shard = 4 * sum(share.trained for share in shares)
        self.block_shards = list(accumulate((4 * share.trained for share in shares[:-1]), initial=0))
        self.root_shard = 4 * shares[-1].trained
        # Shards on the device before they are cast: one at a time; without a cast all of a group
        uploads = max(share.largest if self.size < 4 else share.masters for share in shares)
        self.upload = uploads if self.offloads else 0
        pins = strategy.cpu_offload is not None and strategy.cpu_offload.pin_memory
        self.on_host = sum(share.pinned if pins else share.masters + 4 * share.trained for share in shares) + 2 * self.shard
        self.trained = list(accumulate((block.trained for block in self.blocks), initial=0))
        self.whole = list(accumulate((self.size * block.count for block in self.blocks), initial=0))
        elements = footprint.logits.at(rows)
        copy = 0 if footprint.logits_size == 4 else 4
        self.logits = (elements * (footprint.logits_size + copy + 4), elements * 4, elements * 12)
        self.timeline: list[Moment] = []
        count = len(self.blocks)
        ends = {0, count - 1, *(profile.block_classes.index(index) for index in set(profile.block_classes))}
        if not drawn:
            ends |= {count - 1 - profile.block_classes[::-1].index(index) for index in set(profile.block_classes)}
        self.indices: Sequence[int] = range(count) if drawn else sorted(index for index in ends if 0 <= index < count)

    def note(self, phase: Phase, micro_batch: int, where: str, **parts: int) -> None:
        """A moment; what is held between steps is added."""
        on_device = not self.offloads
        parts["gradients"] = parts.get("gradients", 0) + (self.shard if self.ddp else 0)
        parts["temporary"] = parts.get("temporary", 0) + (CUBLAS_WORKSPACES if self.profile.device == "cuda" else 0)
        components = Components(
            parameters=(self.masters if on_device else 0) + self.profile.buffers,
            optimizer=2 * self.shard if on_device else 0,
            **parts,
        )
        self.timeline.append(Moment(phase=phase, micro_batch=micro_batch, where=where, components=components))

    def step(self) -> None:
        """The first micro-batch, the second (as all after it are), and the optimizer."""
        for micro_batch in range(min(2, self.micro_batches)):
            last = micro_batch == min(2, self.micro_batches) - 1
            if self.ddp:
                self._ddp(micro_batch, last=last)
            else:
                self._fsdp(micro_batch, last=last)
        gradients = 0 if self.ddp or self.offloads else self.shard
        self.note("optimizer", min(2, self.micro_batches) - 1, "", gradients=gradients)

    def _name(self, index: int) -> str:
        return self.profile.block_names[index]

    def _ddp(self, micro_batch: int, *, last: bool) -> None:
        casts = list(accumulate((self.footprint.blocks[index].casts for index in self.profile.block_classes), initial=0))
        root_casts = self.footprint.root.casts
        acts, count = self.activations, len(self.blocks)
        total = 4 * self.trained[count] + 4 * self.profile.root.trained
        reduces = last or self.sync
        fresh = total if micro_batch and not self.sync else 0  # beside the buckets, from micro-batches that were not reduced
        for index in self.indices:
            self.note(
                "forward",
                micro_batch,
                self._name(index),
                gradients=fresh,
                gathered=casts[index + 1],
                activations=acts.before[index + 1],
                temporary=acts.passing[index],
            )
        kept_casts = list(
            accumulate((0 if self.again[i] else casts[i + 1] - casts[i] for i in range(count)), initial=0)
        )  # a block that is computed again saves none
        activations = acts.before[count] + acts.head
        self.note(
            "forward",
            micro_batch,
            "",
            gradients=fresh,
            gathered=casts[count] + root_casts,
            activations=activations,
            logits=self.logits[0],
        )
        self.note(
            "backward",
            micro_batch,
            "",
            gradients=fresh,
            gathered=kept_casts[count] + root_casts,
            activations=activations,
            logits=self.logits[2],
        )
        self.note(
            "backward",
            micro_batch,
            "",
            gradients=fresh,
            gathered=kept_casts[count],
            activations=activations,
            temporary=acts.head_temporary,
        )
        for index in reversed(self.indices):
            block = self.blocks[index]
            done = total - 4 * self.trained[index + 1]
            grown = 0 if reduces else done  # gradients that this micro-batch makes and nothing copies into a bucket
            gradients = (fresh - done if reduces else fresh) if fresh else grown
            cast = casts[index + 1] - casts[index]
            self.note(
                "backward",
                micro_batch,
                self._name(index),
                gradients=max(0, gradients),
                gathered=kept_casts[index] + cast,
                activations=acts.before[index] + acts.working[index],
                temporary=acts.temporary[index] + 4 * block.largest_trained,
            )
        gradients = 0 if reduces else fresh or total
        largest = max((group.largest_trained for group in self.groups), default=0)
        self.note("backward", micro_batch, "", gradients=gradients, activations=0 if count else activations, temporary=4 * largest)

    def _fsdp(self, micro_batch: int, *, last: bool) -> None:
        strategy, acts, count = self.strategy, self.activations, len(self.blocks)
        root = self.size * self.profile.root.count
        holds = self.micro_batches > 1 and not self.sync
        # Not last: what backward keeps gathered is not freed after forward either
        stays = not strategy.reshard_after_backward and not last
        keeps = not strategy.reshard_after_forward or stays
        gathered_before = micro_batch > 0 and not strategy.reshard_after_backward  # from the micro-batch before
        root_unreduced = self.profile.root.trained
        on_device = 0 if self.offloads else 1
        shards_before = self.shard * on_device if micro_batch and not holds else 0
        total = self.trained[count] + root_unreduced
        unreduced_before = self.reduce * total if micro_batch and holds else 0
        in_flight = self.reduce * root_unreduced if micro_batch and not holds else 0
        everything = self.whole[count]
        for index in self.indices:
            block = self.size * self.blocks[index].count
            gathered = everything if gathered_before else self.whole[index + 1] if keeps else block
            following = 0 if gathered_before or self.shards == 1 else block
            self.note(
                "forward",
                micro_batch,
                self._name(index),
                gradients=shards_before + unreduced_before,
                gathered=root + gathered,
                activations=acts.before[index + 1],
                temporary=acts.passing[index],
                communication=in_flight + self.upload + following * (2 if index < count - 1 else 1),
            )
        gathered = everything if keeps or gathered_before else 0
        activations = acts.before[count] + acts.head
        for phase, logits in (("forward", self.logits[0]), ("backward", self.logits[2])):
            self.note(
                "forward" if phase == "forward" else "backward",
                micro_batch,
                "",
                gradients=shards_before + unreduced_before,
                gathered=root + gathered,
                activations=activations,
                logits=logits,
                communication=in_flight,
            )
        head = 0 if self.profile.tied else self.size * self.profile.root.largest_trained
        self.note(
            "backward",
            micro_batch,
            "",
            gradients=shards_before + unreduced_before + head,
            gathered=root + gathered,
            activations=activations,
            communication=in_flight,
            temporary=acts.head_temporary,
        )
        for index in reversed(self.indices):
            group = self.blocks[index]
            block = self.size * group.count
            below = self.size * self.blocks[index - 1].count if index else 0
            above = self.blocks[index + 1].trained if index < count - 1 else 0
            kept = self.whole[index + 1] if keeps or gathered_before else block
            if stays:
                kept = everything
            prefetched = 0 if keeps or gathered_before or self.shards == 1 else below
            done = self.trained[count] - self.trained[index + 1]
            if holds and not last:
                grown = max(unreduced_before, self.reduce * done)
                flight = 0
            elif holds:
                grown = self.reduce * (self.trained[index + 1] + root_unreduced)
                grown += (self.block_shards[count] - self.block_shards[index + 1]) * on_device
                flight = self.reduce * above
            else:
                grown = shards_before or (self.block_shards[count] - self.block_shards[index + 1]) * on_device
                flight = self.reduce * above if index < count - 1 else in_flight
            common = {"gradients": grown + head, "gathered": root + kept}
            self.note(
                "backward",
                micro_batch,
                self._name(index),
                **(common | {"gradients": grown + head + self.size * group.largest_trained}),
                activations=acts.before[index] + acts.working[index],
                temporary=acts.temporary[index],
                communication=flight + prefetched + self._averaged(index, micro_batch),
            )
            if not holds or last:  # its reduction begins: gradients as computed, and packed for the collective
                self.note(
                    "backward",
                    micro_batch,
                    self._name(index),
                    gradients=grown + head + self.size * group.trained,
                    gathered=root + (kept - block if not stays else kept),
                    activations=acts.before[index],
                    communication=self.reduce * group.trained + prefetched + self._averaged(index, micro_batch),
                )
        grown = self.reduce * total if holds and not last else (shards_before or self.block_shards[count] * on_device)
        if holds and last:
            grown = (self.block_shards[count]) * on_device
        reduces = not holds or last
        self.note(
            "backward",
            micro_batch,
            "",
            gradients=grown + (self.size * root_unreduced if reduces else 0),
            gathered=root + everything if stays else 0,
            activations=0 if count else activations,
            communication=(self.reduce * root_unreduced if reduces else 0) + self._averaged(-1, micro_batch),
        )

    def _averaged(self, index: int, micro_batch: int) -> int:
        """Hybrid sharding: what was averaged over the copies stays until the backward pass ends, where it is added to gradients."""
        averages = self.strategy.replicate > 1 and (self.offloads or (micro_batch > 0 and self.sync))
        return self.block_shards[-1] - self.block_shards[index + 1] if averages else 0

    def result(self) -> StepMemory:
        """With the highest moment first where two are alike."""
        phases: dict[Phase, Moment] = {}
        for moment in self.timeline:
            best = phases.get(moment.phase)
            if best is None or moment.components.total > best.components.total:
                phases[moment.phase] = moment
        on_device = not self.offloads
        held = Components(
            parameters=(self.masters if on_device else 0) + self.profile.buffers,
            optimizer=2 * self.shard if on_device else 0,
            gradients=self.shard if self.ddp else 0,
        )
        forward = next(moment for moment in reversed(self.timeline) if moment.phase == "forward" and moment.micro_batch == 0)
        after = dataclasses.replace(forward.components, logits=self.logits[1], communication=0, temporary=0)
        if self.ddp:
            backward = next(moment for moment in self.timeline if moment.phase == "backward")
            after = dataclasses.replace(after, gathered=backward.components.gathered)
        host = self.activations.host + (self.on_host if self.offloads else 0)
        return StepMemory(
            method="arithmetic",
            peak=max(phases.values(), key=lambda moment: moment.components.total),
            phases=phases,
            held=held,
            after_forward=after,
            timeline=tuple(self.timeline),
            host=host,
        )
