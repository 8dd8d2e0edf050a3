"""Memory of a training step in closed formulas, by component: it ranks a thousand configurations.

Good to 10 %; the trace (`trace.py`) confirms what is shown. The formulas, for a parameter count P
that S ranks shard (S = 1 with DDP), compute in c bytes, gradient reduction in r bytes:

- states: parameters 4 P / S, gradients 4 P / S, AdamW's moments 8 P / S, all float32: 16 bytes a
  parameter, as ZeRO counts (Rajbhandari et al., 2020). With CPU offload they are on the host.
- gathered: FSDP: c x (root weights + those of one block), or of all blocks where they stay
  unsharded. The root (embeddings, head, last norm) stays unsharded from the forward pass to the
  end of the backward pass. DDP under autocast: c bytes for each weight that was cast.
- communication: FSDP: the next block's all-gather (c), and r bytes a gradient of the block whose
  reduction is under way.
- gradients, beside the shards: c bytes a gradient of one block until it is reduced; without a
  reduction in each micro-batch r bytes a gradient of the whole model. DDP: buckets as large as all
  gradients, and the gradients themselves in micro-batches that are not reduced.
- activations: from the shapes of weights (`profile.py`). With hidden size h they are about 34 h
  bytes a token and block of a GPT (Korthikanti et al., 2022), 49 h of a Llama. Full checkpointing
  keeps a block's input, and once all of one block; selective also attention and half the products.
- logits: as computed, a float32 copy and the log-probabilities (2 + 4 + 4 bytes a token and word
  with bfloat16); in the backward pass the log-probabilities and two gradients (4 + 4 + 4).
- temporary: three times a block's widest tensor and its input.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

from launcher.data.batching import accumulation_steps
from launcher.data.synthetic import rows_of
from launcher.planner.memory import CUBLAS_WORKSPACES, Components, Moment, Phase, StepMemory
from launcher.planner.profile import (
    DTYPE_BYTES,
    ModelProfile,
    block_footprint,
    compute_dtype,
    root_footprint,
)
from launcher.recipe.schema import Recipe, Strategy

FORWARD_WIDEST, BACKWARD_WIDEST, HEAD_WIDEST = 4, 3, 5
"""Working space in units of the widest tensor: of a checkpointed block's forward pass, a block's
backward pass, the backward pass of the last norm (in float32). Fitted to traces of Llama models."""


def micro_batches_of(recipe: Recipe, *, ranks: int) -> int:
    """Forward passes of a rank in one optimizer step."""
    rows = rows_of(recipe.batch, sequence_length=recipe.data.sequence_length)
    size = recipe.batch.global_batch_size
    return accumulation_steps(global_batch_size=size, micro_batch_size=rows, ranks=ranks)


def syncs_every_micro_batch(strategy: Strategy) -> bool:
    """What `auto` means: FSDP true, DDP false."""
    wanted = strategy.sync_every_micro_batch
    return strategy.kind != "ddp" if wanted == "auto" else wanted


def checkpointed(profile: ModelProfile, recipe: Recipe) -> list[bool]:
    """Which blocks are recomputed."""
    checkpointing = recipe.activation_checkpointing
    every = checkpointing.every_n_blocks if checkpointing is not None else 0
    return [bool(every) and index % every == 0 for index in range(len(profile.block_classes))]


@dataclass(frozen=True)
class _Activations:
    """Bytes of one block's activations."""

    kept: int
    """Between its forward and its backward pass."""
    working: int
    """In its backward pass, recomputed or kept, without the first tensor to be freed."""
    forward: int
    """Working space of its forward pass."""
    backward: int
    """Working space of its backward pass."""
    host: int
    """Kept in host memory."""


def tokens_of(recipe: Recipe) -> int:
    """Tokens of a full micro-batch."""
    length = recipe.data.sequence_length
    return length * rows_of(recipe.batch, sequence_length=length)


def _block_activations(profile: ModelProfile, recipe: Recipe) -> list[_Activations]:
    checkpointing = recipe.activation_checkpointing
    to_host = checkpointing is not None and checkpointing.offload_to_cpu
    to_host = to_host and profile.device == "cuda"

    def of(kind: int, recomputed: bool) -> _Activations:
        block = block_footprint(profile, kind, recipe, tokens_of(recipe))
        kept, output, widest = round(block.kept), round(block.output), round(block.widest)
        backward = BACKWARD_WIDEST * widest + output
        if not recomputed or checkpointing is None:
            return _Activations(kept, kept - widest, widest, backward, 0)
        selected = round(block.selective) if checkpointing.mode == "selective" else 0
        working = kept - widest + (output if to_host else 0)
        on_device = selected if to_host else output + selected
        host = output if to_host else 0
        return _Activations(on_device, working, FORWARD_WIDEST * widest, backward, host)

    kinds = list(zip(profile.block_classes, checkpointed(profile, recipe), strict=True))
    known = {key: of(*key) for key in set(kinds)}
    return [known[key] for key in kinds]


def step_memory(profile: ModelProfile, recipe: Recipe, *, ranks: int) -> StepMemory:
    """Memory of one optimizer step on rank 0 of `ranks`, in its last micro-batch.

    recipe: the profiled one, or one that differs in strategy, checkpointing and batch only.
    """
    step = _Step(profile, recipe, ranks=ranks)
    moments = list(step.moments())
    phases: dict[Phase, Moment] = {}
    for moment in moments:  # of equal moments the first
        best = phases.get(moment.phase)
        if best is None or moment.components.total > best.components.total:
            phases[moment.phase] = moment
    return StepMemory(
        method="arithmetic",
        peak=max(phases.values(), key=lambda moment: moment.components.total),
        phases=phases,
        held=step.held,
        after_forward=step.after_forward,
        timeline=tuple(moments),
        host=step.host,
    )


class _Step:
    """The sizes of a step, and its highest moments."""

    def __init__(self, profile: ModelProfile, recipe: Recipe, *, ranks: int) -> None:
        strategy, root = recipe.strategy, profile.root
        self.profile, count = profile, micro_batches_of(recipe, ranks=ranks)
        self.number = min(2, count) - 1
        self.ddp, self.on_gpu = strategy.kind == "ddp", profile.device == "cuda"
        self.shards = 1 if self.ddp else max(1, ranks // strategy.replicate)
        self.size, mixed = DTYPE_BYTES[compute_dtype(strategy)], strategy.mixed_precision
        self.reduce = 4 if mixed is None else DTYPE_BYTES[mixed.reduce_dtype]
        self.offloads = strategy.cpu_offload is not None and self.on_gpu
        accumulates, syncs = self.number > 0, syncs_every_micro_batch(strategy)
        self.holds = accumulates and not syncs  # gradients are reduced in the last micro-batch
        self.blocks = [profile.classes[kind] for kind in profile.block_classes]
        shares = [group.share(self.shards, self.size) for group in (*self.blocks, root)]
        shard = 4 * sum(share.trained for share in shares)
        on_device = 0 if self.offloads else 1
        self.shard = shard * on_device
        # Of the blocks before each: trained elements, bytes of gradient shards, unsharded weights
        self.trained = list(accumulate((block.trained for block in self.blocks), initial=0))
        self.sharded = list(accumulate((4 * s.trained for s in shares[:-1]), initial=0))
        weights = (self.size * block.count for block in self.blocks)
        self.unsharded = list(accumulate(weights, initial=0))
        self.root_weights, self.root_trained = self.size * root.count, root.trained
        # All weights are unsharded between the forward and the backward pass
        self.keeps = not strategy.reshard_after_forward
        self.keeps = self.keeps or (accumulates and not strategy.reshard_after_backward)
        # Hybrid sharding: FSDP keeps the averages over the copies until the next micro-batch's,
        # unless they become the gradients: the first ones, without offload
        reductions, first = count if syncs else 1, 0 if self.offloads else 1
        copies = strategy.replicate > 1 and not self.ddp
        averages = 4 * sum(share.trained for share in shares) if copies else 0
        self.averages = averages if reductions > first else 0
        self.old_averages = averages if reductions > first + 1 else 0
        self._set_activations(recipe)

        masters = sum(share.masters for share in shares)
        pins = strategy.cpu_offload is not None and strategy.cpu_offload.pin_memory
        states = (sum(share.pinned for share in shares) if pins else masters + shard) + 2 * shard
        self.host = sum(acts.host for acts in self.acts) + (states if self.offloads else 0)
        # Offload uploads shards to cast them: one at a time; without a cast a whole group
        uploads = max(share.largest if self.size < 4 else share.masters for share in shares)
        self.upload = uploads if self.offloads else 0
        self.held = Components(
            parameters=masters * on_device + profile.buffers,
            optimizer=2 * self.shard,
            gradients=shard if self.ddp else 0,
        )
        gathered = self.kept_casts[-1] + self.root_casts
        if not self.ddp:
            gathered = self.root_weights + (self.unsharded[-1] if self.keeps else 0)
        self.after_forward = dataclasses.replace(
            self.held,
            gathered=gathered,
            activations=self.activations,
            logits=tokens_of(recipe) * profile.vocabulary * 4,
        )

    def _set_activations(self, recipe: Recipe) -> None:
        """Activations, logits, and autocast's copies of weights, all before each block."""
        profile, tokens, again = self.profile, tokens_of(recipe), checkpointed(self.profile, recipe)
        kinds = [block_footprint(profile, k, recipe, tokens) for k in range(len(profile.classes))]
        root = root_footprint(profile, recipe, tokens)
        casts = [kinds[kind].casts for kind in profile.block_classes]
        self.casts = list(accumulate(casts, initial=0))
        kept = (0 if twice else cast for cast, twice in zip(casts, again, strict=True))
        self.kept_casts, self.root_casts = list(accumulate(kept, initial=0)), root.casts
        self.acts = _block_activations(profile, recipe)
        first = round(min(root.kept, root.output)) if self.blocks else 0
        self.before = list(accumulate((acts.kept for acts in self.acts), initial=first))
        self.activations = self.before[-1] + round(root.kept) - first
        self.head_temporary = HEAD_WIDEST * round(root.widest)
        elements = tokens * profile.vocabulary
        copy = 0 if self.size == 4 else 4
        self.logits = (elements * (self.size + copy + 4), elements * 12)

    def _at(self, phase: Phase, block: int | None = None, **parts: int) -> Moment:
        """A moment with these components beside what is held all the time."""
        parts["gradients"] = self.held.gradients + parts.get("gradients", 0)
        workspaces = CUBLAS_WORKSPACES if self.on_gpu else 0
        parts["temporary"] = workspaces + parts.get("temporary", 0)
        components = dataclasses.replace(self.held, **parts)
        where = "" if block is None else self.profile.block_names[block]
        return Moment(phase=phase, micro_batch=self.number, where=where, components=components)

    def moments(self) -> Iterator[Moment]:
        """The highest moments of a step's last micro-batch, and the optimizer's step."""
        total = self.trained[-1] + self.root_trained
        before = in_flight = head = 0
        if self.ddp:
            before = 4 * total if self.holds else 0  # beside the buckets
            forward, between = self.casts[-1], self.kept_casts[-1]
        else:
            if self.number > 0:
                before = self.reduce * total if self.holds else self.shard
                in_flight = 0 if self.holds else self.reduce * self.root_trained
                in_flight += self.old_averages
            head = 0 if self.profile.tied else self.size * self.profile.root.largest_trained
            between = self.root_weights + (self.unsharded[-1] if self.keeps else 0)
            own = self.size * self.blocks[-1].count if self.blocks and not self.keeps else 0
            forward = between + own
        if self.blocks:
            fetched = 0 if self.ddp or self.shards == 1 else self.size * self.blocks[-1].count
            yield self._at(
                "forward",
                len(self.blocks) - 1,
                gradients=before,
                gathered=forward,
                activations=self.before[-1],
                temporary=max(acts.forward for acts in self.acts),
                communication=in_flight + self.upload + fetched,
            )
        common = {"activations": self.activations, "communication": in_flight}
        root_casts = self.root_casts if self.ddp else 0
        forward = self.casts[-1] if self.ddp else between
        for phase, gathered, logits in (
            ("forward", forward, self.logits[0]),
            ("backward", between, self.logits[1]),
        ):
            parts = common | {"gathered": gathered + root_casts, "logits": logits}
            name: Phase = "forward" if phase == "forward" else "backward"
            yield self._at(name, gradients=before, **parts)
        common |= {"gathered": between, "temporary": self.head_temporary}
        yield self._at("backward", gradients=before + head, **common)
        classes = self.profile.block_classes
        lasts = {len(classes) - 1 - classes[::-1].index(kind) for kind in set(classes)}
        # Between the first and the last block of a class moments are lower
        for index in sorted(lasts | {classes.index(kind) for kind in set(classes)}, reverse=True):
            block = self._ddp_block if self.ddp else self._fsdp_block
            yield from block(index, before, in_flight, head)
        kept = 0 if self.blocks else self.activations
        if self.ddp:
            largest = max(group.largest_trained for group in (*self.blocks, self.profile.root))
            yield self._at("backward", activations=kept, temporary=4 * largest)
        else:  # the root's reduction
            shards = before if before and not self.holds else self.sharded[-1] if self.shard else 0
            yield self._at(
                "backward",
                gradients=shards + self.size * self.root_trained,
                activations=kept,
                communication=self.reduce * self.root_trained + self.averages,
            )
        yield self._at("optimizer", gradients=0 if self.ddp else self.shard)

    def _ddp_block(self, index: int, before: int, *unused: int) -> Iterator[Moment]:
        """A block's backward pass: gradients go into the buckets."""
        done = 4 * (self.trained[-1] + self.root_trained - self.trained[index + 1])
        cast = self.casts[index + 1] - self.casts[index]
        largest = 4 * self.blocks[index].largest_trained
        yield self._at(
            "backward",
            index,
            gradients=max(0, before - done),
            gathered=self.kept_casts[index] + cast,
            activations=self.before[index] + self.acts[index].working,
            temporary=self.acts[index].backward + largest,
        )

    def _fsdp_block(self, index: int, before: int, in_flight: int, head: int) -> Iterator[Moment]:
        """A block's backward pass, and the beginning of its reduction.

        before: bytes of gradients of the micro-batches before. in_flight: of the root's gradients
        that are being reduced. head: of the head's gradient, which the root's reduction includes.
        """
        block, acts = self.blocks[index], self.acts[index]
        own = self.size * block.count
        above = self.blocks[index + 1].trained if index + 1 < len(self.blocks) else None
        flight = in_flight if above is None else self.reduce * above
        reduced = self.sharded[-1] - self.sharded[index + 1]
        grown = reduced if self.shard else 0
        if self.holds:
            grown += self.reduce * (self.trained[index + 1] + self.root_trained)
        grown = head + (grown if self.holds else before or grown)
        kept = self.unsharded[index + 1] if self.keeps else own
        below = self.size * self.blocks[index - 1].count if index else 0
        sent = 0 if self.keeps or self.shards == 1 else below
        flight -= self.old_averages if above is None else 0
        sent += self.old_averages or min(self.averages, reduced)
        yield self._at(
            "backward",
            index,
            gradients=grown + self.size * block.largest_trained,
            gathered=self.root_weights + kept,
            activations=self.before[index] + acts.working,
            temporary=acts.backward,
            communication=flight + sent,
        )
        yield self._at(  # gradients, and the copy of them that is sent
            "backward",
            index,
            gradients=grown + self.size * block.trained,
            gathered=self.root_weights + kept - own,
            activations=self.before[index],
            communication=self.reduce * block.trained + sent,
        )
