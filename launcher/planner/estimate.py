"""Memory of a training step in closed formulas, by component: it ranks many configurations.

Good to 10 %; the trace (`trace.py`) confirms what is shown. The formulas, for a parameter count P
that S ranks shard (S = 1 with DDP), compute in c bytes, gradient reduction in r bytes:

- states: parameters 4 P / S, gradients 4 P / S, AdamW's moments 8 P / S, all float32: 16 bytes a
  parameter, as ZeRO counts (Rajbhandari et al., 2020). With CPU offload they are on the host.
- gathered: FSDP: c x (root weights + those of one block), or of all blocks where they stay
  unsharded. The root (embeddings, head, last norm) stays unsharded from the forward pass to the
  end of the backward pass. DDP under autocast: c bytes for each weight that was cast.
- communication: FSDP: the next block's all-gather (c), and r bytes per gradient of the block that
  is being reduced.
- gradients, beside the shards: c bytes per gradient of one block until it is reduced; without a
  reduction in each micro-batch r bytes per gradient of the whole model. DDP: buckets as large as
  all gradients, and the gradients themselves in micro-batches that are not reduced.
- activations: from the shapes of weights (`profile.py`). With hidden size h they are about 34 h
  bytes a token and block of a GPT (Korthikanti et al., 2022), 49 h of a Llama. Full checkpointing
  keeps a block's input, and once all of one block; selective also attention and half the products.
- logits: as computed, a float32 copy and the log-probabilities (2 + 4 + 4 bytes a token and word
  with bfloat16); in the backward pass the log-probabilities and two gradients (4 + 4 + 4).
- temporary: three times a block's widest tensor and its input.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from itertools import accumulate

from launcher.data.batching import accumulation_steps
from launcher.data.synthetic import rows_of
from launcher.planner.memory import (
    CUBLAS_WORKSPACES,
    Components,
    Moment,
    Phase,
    StepMemory,
    step_memory_of,
)
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
    sync = strategy.sync_every_micro_batch
    return strategy.kind != "ddp" if sync == "auto" else sync


def checkpointed(profile: ModelProfile, recipe: Recipe) -> list[bool]:
    """Which blocks are recomputed."""
    checkpointing = recipe.activation_checkpointing
    every = checkpointing.every_n_blocks if checkpointing is not None else 0
    return [bool(every) and index % every == 0 for index in range(len(profile.block_classes))]


def tokens_of(recipe: Recipe) -> int:
    """Tokens of a full micro-batch."""
    length = recipe.data.sequence_length
    return length * rows_of(recipe.batch, sequence_length=length)


def step_memory(profile: ModelProfile, recipe: Recipe, *, ranks: int) -> StepMemory:
    """Memory of one optimizer step on rank 0 of `ranks`, in its last micro-batch.

    recipe: the profiled one, or one that differs in strategy, checkpointing and batch only.
    """
    step = _Step(profile, recipe, ranks=ranks)
    return step_memory_of(
        list(step.moments()),
        method="arithmetic",
        held=step.held,
        after_forward=step.after_forward,
        host=step.host,
    )


def _sums(values: Iterable[int], first: int = 0) -> list[int]:
    """Sums of the blocks before each block, and of all."""
    return list(accumulate(values, initial=first))


class _Step:
    """Sizes in bytes, and the highest moments of a step."""

    def __init__(self, profile: ModelProfile, recipe: Recipe, *, ranks: int) -> None:
        strategy, mixed = recipe.strategy, recipe.strategy.mixed_precision
        self.profile, count = profile, micro_batches_of(recipe, ranks=ranks)
        self.number = min(2, count) - 1
        self.ddp, self.on_gpu = strategy.kind == "ddp", profile.device == "cuda"
        self.shards = 1 if self.ddp else max(1, ranks // strategy.replicate)
        self.size = DTYPE_BYTES[compute_dtype(strategy)]
        self.reduce = 4 if mixed is None else DTYPE_BYTES[mixed.reduce_dtype]
        offload = strategy.cpu_offload if self.on_gpu else None
        accumulates, syncs = self.number > 0, syncs_every_micro_batch(strategy)
        # Gradients are reduced in the last micro-batch only
        self.holds = accumulates and not syncs
        # All weights stay unsharded between the forward and the backward pass
        self.keeps = not strategy.reshard_after_forward
        self.keeps = self.keeps or (accumulates and not strategy.reshard_after_backward)

        *self.blocks, self.root = profile.groups
        self.trained = _sums(block.trained for block in self.blocks)
        self.unsharded = _sums(self.size * block.count for block in self.blocks)
        self.root_weights = self.size * self.root.count
        kinds = [weights.share(self.shards, self.size) for weights in profile.classes]
        shares = [kinds[kind] for kind in profile.block_classes]
        self.sharded = _sums(4 * share.trained for share in shares)
        shares.append(self.root.share(self.shards, self.size))
        gradients = 4 * sum(share.trained for share in shares)
        masters = sum(share.masters for share in shares)
        self.shard = 0 if offload else gradients
        # Hybrid sharding: FSDP keeps the averages over the copies until the next micro-batch's,
        # unless they become the gradients: the first ones, without offload
        reductions, first = count if syncs else 1, 0 if offload else 1
        averages = gradients if strategy.replicate > 1 and not self.ddp else 0
        self.averages = averages if reductions > first else 0
        self.old_averages = averages if reductions > first + 1 else 0
        # Offload uploads shards to cast them: one at a time; without a cast a whole group
        uploads = max(share.largest if self.size < 4 else share.masters for share in shares)
        self.upload = uploads if offload else 0
        self.held = Components(
            parameters=(0 if offload else masters) + profile.buffers,
            optimizer=2 * self.shard,
            gradients=gradients if self.ddp else 0,
        )
        self._set_activations(recipe)
        if offload:
            pins = sum(share.pinned for share in shares)
            self.host += (pins if offload.pin_memory else masters + gradients) + 2 * gradients
        # Unsharded or cast between the forward and the backward pass
        self.between = self.root_weights + (self.unsharded[-1] if self.keeps else 0)
        if self.ddp:
            self.between = self.kept_casts[-1]
        self.after_forward = dataclasses.replace(
            self.held,
            gathered=self.between + self.root_casts,
            activations=self.activations,
            logits=tokens_of(recipe) * profile.vocabulary * 4,
        )

    def _set_activations(self, recipe: Recipe) -> None:
        """Activations, logits, and autocast's copies of weights, all before each block."""
        profile, tokens = self.profile, tokens_of(recipe)
        checkpointing = recipe.activation_checkpointing
        to_host = checkpointing is not None and checkpointing.offload_to_cpu and self.on_gpu
        selective = checkpointing is not None and checkpointing.mode == "selective"
        classes = [block_footprint(profile, k, recipe, tokens) for k in range(len(profile.classes))]
        blocks = [classes[kind] for kind in profile.block_classes]
        root = root_footprint(profile, recipe, tokens)
        kept, self.working, self.forward_space, self.backward_space = [], [], [], []
        kept_casts, self.host = [], 0
        for block, twice in zip(blocks, checkpointed(profile, recipe), strict=True):
            output, widest = round(block.output), round(block.widest)
            working = round(block.kept) - widest  # without the first tensor to be freed
            if twice:
                on_device = 0 if to_host else output
                kept.append(on_device + (round(block.selective) if selective else 0))
                working += output - on_device
                self.host += output - on_device
            else:
                kept.append(round(block.kept))
            kept_casts.append(0 if twice else block.casts)
            self.working.append(working)
            self.forward_space.append(widest * (FORWARD_WIDEST if twice else 1))
            self.backward_space.append(BACKWARD_WIDEST * widest + output)
        self.casts, self.kept_casts = _sums(block.casts for block in blocks), _sums(kept_casts)
        self.root_casts = root.casts
        first = round(min(root.kept, root.output)) if blocks else 0
        self.before = _sums(kept, first)
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
        trained = self.trained[-1] + self.root.trained
        before = in_flight = head = 0
        forward = self.casts[-1]
        if self.ddp:
            before = 4 * trained if self.holds else 0  # beside the buckets
        else:
            if self.number > 0:
                before = self.reduce * trained if self.holds else self.shard
                in_flight = 0 if self.holds else self.reduce * self.root.trained
                in_flight += self.old_averages
            head = 0 if self.profile.tied else self.size * self.root.largest_trained
            forward = self.between
        if self.blocks:
            last = self.size * self.blocks[-1].count
            yield self._at(
                "forward",
                len(self.blocks) - 1,
                gradients=before,
                gathered=forward + (0 if self.ddp or self.keeps else last),
                activations=self.before[-1],
                temporary=max(self.forward_space),
                communication=in_flight
                + self.upload
                + (0 if self.ddp or self.shards == 1 else last),
            )
        parts = {"activations": self.activations, "communication": in_flight}
        loss, loss_backward = self.logits
        yield self._at(
            "forward", gradients=before, gathered=forward + self.root_casts, logits=loss, **parts
        )
        gathered = self.between + self.root_casts
        yield self._at(
            "backward", gradients=before, gathered=gathered, logits=loss_backward, **parts
        )
        parts |= {"gathered": self.between, "temporary": self.head_temporary}
        yield self._at("backward", gradients=before + head, **parts)
        for index in reversed(range(len(self.blocks))):
            if self.ddp:
                yield self._ddp_block(index, before)
            else:
                yield from self._fsdp_block(index, before, in_flight, head)
        kept = 0 if self.blocks else self.activations
        if self.ddp:
            largest = max(group.largest_trained for group in (*self.blocks, self.root))
            yield self._at("backward", activations=kept, temporary=4 * largest)
        else:  # the root's reduction
            shards = before if before and not self.holds else self.sharded[-1] if self.shard else 0
            yield self._at(
                "backward",
                gradients=shards + self.size * self.root.trained,
                activations=kept,
                communication=self.reduce * self.root.trained + self.averages,
            )
        yield self._at("optimizer", gradients=0 if self.ddp else self.shard)

    def _ddp_block(self, index: int, before: int) -> Moment:
        """A block's backward pass: gradients go into the buckets."""
        done = 4 * (self.trained[-1] + self.root.trained - self.trained[index + 1])
        cast = self.casts[index + 1] - self.casts[index]
        return self._at(
            "backward",
            index,
            gradients=max(0, before - done),
            gathered=self.kept_casts[index] + cast,
            activations=self.before[index] + self.working[index],
            temporary=self.backward_space[index] + 4 * self.blocks[index].largest_trained,
        )

    def _fsdp_block(self, index: int, before: int, in_flight: int, head: int) -> Iterator[Moment]:
        """A block's backward pass, and the beginning of its reduction.

        before: gradients of the micro-batches before. in_flight: the root's gradients that are
        being reduced. head: the head's gradient, which the root's reduction includes.
        """
        block, last = self.blocks[index], index + 1 == len(self.blocks)
        own = self.size * block.count
        reduced = self.sharded[-1] - self.sharded[index + 1]
        gradients = reduced if self.shard else 0
        if self.holds:
            gradients += self.reduce * (self.trained[index + 1] + self.root.trained)
        else:
            gradients = before or gradients
        gradients += head
        kept = self.unsharded[index + 1] if self.keeps else own
        fetches = index > 0 and not self.keeps and self.shards > 1
        sent = self.size * self.blocks[index - 1].count if fetches else 0
        sent += self.old_averages or min(self.averages, reduced)
        # The reduction of the block above; of the micro-batch before at the last block
        flight = in_flight - self.old_averages
        flight = flight if last else self.reduce * self.blocks[index + 1].trained
        yield self._at(
            "backward",
            index,
            gradients=gradients + self.size * block.largest_trained,
            gathered=self.root_weights + kept,
            activations=self.before[index] + self.working[index],
            temporary=self.backward_space[index],
            communication=flight + sent,
        )
        yield self._at(  # gradients, and the copy of them that is sent
            "backward",
            index,
            gradients=gradients + self.size * block.trained,
            gathered=self.root_weights + kept - own,
            activations=self.before[index],
            communication=self.reduce * block.trained + sent,
        )
