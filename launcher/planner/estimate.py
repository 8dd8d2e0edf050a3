"""Estimates the memory of a training step with closed formulas, to rank configurations.

The estimate is accurate to 10 %; configurations that are shown are confirmed by a trace
(`trace.py`). docs/engineering/memory.md explains the formulas. In addition to those formulas:

- Hybrid sharding keeps the gradients averaged over the copies until those of the next micro-batch
  replace them.
- Without a reduction in each micro-batch, gradients of the whole model are kept in the dtype of the
  reduction.
- An optimizer state in host memory has two buckets on the device.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from launcher.optimizers.offload import FILE_BUFFERS, SLOTS
from launcher.planner.memory import CUBLAS_WORKSPACES, Components, Moment, Phase, StepMemory, pinned
from launcher.planner.work import Work
from launcher.strategies.base import offloads_parameters

BACKWARD_WIDEST, HEAD_WIDEST = 3, 5
FORWARD_WIDEST = 2
"""Working space in units of the widest tensor: of a block's backward pass, and of the backward pass
of the last norm (in float32). Fitted to traces of Llama models."""


def estimate_memory(work: Work) -> StepMemory:
    """Memory of one optimizer step on rank 0, in its last micro-batch; of a pipeline, on a rank of the
    stage that needs most."""
    if work.pipeline:
        stages = [*map(estimate_memory, work.pipeline)]
        largest = max(stages, key=lambda step: step.peak.total)
        return dataclasses.replace(largest, host=max(step.host for step in stages))
    step = _Step(work)
    logits = work.kept_logits if work.chunked else 4 * work.tokens * work.profile.vocabulary
    after = {"gathered": step.between, "activations": round(step.activations), "logits": logits}
    return StepMemory(
        timeline=tuple(step.moments()),
        held=step.held,
        after_forward=dataclasses.replace(step.held, **after),
        host=step.host,
        disk=work.in_file,
    )


def forward_peak(work: Work) -> int:
    """Bytes of tensors on rank 0 at the peak of passes without gradients, of a model that is frozen
    in the compute dtype. The activations are at most what one block would save."""
    profile, strategy, size = work.profile, work.strategy, work.size
    offload = strategy.cpu_offload if work.on_gpu else None
    groups = (*profile.groups, profile.unused)
    held = 0 if offloads_parameters(offload) else sum(group.count for group in groups) * size
    whole = work.ddp or work.one_rank
    unsharded = [0 if whole else group.unsharded(size) for group in work.gathered]
    # One unit computes while the next one is gathered, and is copied out of the buffer of its
    # all-gather
    gathered = 3 * max(unsharded) if strategy.reshard_after_forward else sum(unsharded)
    logits = work.tokens * work.logits_width * (size + 8) + 3 * work.root.output
    outputs = [block.eager + block.output for block in work.blocks]
    computed = max([logits, *outputs])
    workspaces = CUBLAS_WORKSPACES if work.on_gpu else 0
    return round(held / work.shards + profile.buffers + gathered + computed) + workspaces


class _Step:
    """Sizes in bytes, and the highest moments of a step."""

    def __init__(self, work: Work) -> None:
        self.work = work
        strategy, several = work.strategy, work.micro_batches > 1
        # All weights stay unsharded between the forward and the backward pass
        self.keeps = not strategy.reshard_after_forward
        self.keeps = self.keeps or (several and not strategy.reshard_after_backward)
        *self.blocks, embedding, self.root = work.gathered
        # Without an embedding of its own, FSDP reduces the root last and keeps it unsharded
        self.last = embedding if embedding.count else self.root
        place = work.pipeline_rank
        if self.blocks and place is not None and place.outer_units and place.number > 0:
            # Another rank has the embedding, which is a unit
            self.last = self.blocks[0]
        self._set_states()
        self._set_activations()
        self._set_weights()
        self._set_logits()

    def _set_states(self) -> None:
        """Parameters, gradients and optimizer state, on the device and on the host."""
        work, profile, strategy = self.work, self.work.profile, self.work.strategy
        # What is in host memory or in files; on a CPU, host memory is the memory of the device
        elsewhere = strategy.cpu_offload if work.on_gpu else None
        offload = elsewhere if offloads_parameters(elsewhere) else None
        masters = profile.held(work.size) // work.shards
        gradients = 4 * profile.trained // work.shards
        self.shard = 0 if offload or work.ddp else gradients
        # Hybrid sharding: FSDP keeps the averages over the copies until those of the next
        # micro-batch. Without offload, the first averages become the gradients themselves
        averages = gradients if strategy.replicate > 1 and not work.ddp else 0
        first = 0 if offload else 1
        self.averages = averages if work.reductions > first else 0
        self.old_averages = averages if work.reductions > first + 1 else 0
        self.held = Components(
            parameters=(0 if offload else masters) + profile.buffers,
            optimizer=0 if elsewhere or work.in_file else work.states,
            gradients=gradients if work.ddp else 0,
            gathered=work.copies,
        )
        self.host = 0
        if offload:
            groups = (*profile.groups, profile.unused)
            pins = sum(group.pinned(work.shards, work.size) for group in groups)
            self.host = pins if offload.pin_memory else masters + gradients
            if work.reductions > 1:  # the gradients of two groups, until they are added
                size = [
                    group.pinned_gradients(work.shards)
                    if offload.pin_memory
                    else 4 * group.trained // work.shards
                    for group in profile.groups
                ]
                self.host += max(size) + max(size[:-2], default=0)
        buffers = min(FILE_BUFFERS * work.bucket, work.states) if work.in_file else 0
        self.slots = min(SLOTS * work.bucket, work.states)
        # Without a GPU, or with parameters on the host, files are read into the buffers themselves
        if offload or (work.in_file and not work.on_gpu):
            self.slots = 0
        if elsewhere:
            self.host += buffers or work.states
        else:
            self.slots += buffers

    def _set_activations(self) -> None:
        work = self.work
        checkpointing = work.recipe.activation_checkpointing
        selective = checkpointing is not None and checkpointing.mode != "full"
        self.activations, self.kept_casts = work.root.kept, work.root.casts
        self.working = self.space = 0.0
        for block, twice in zip(work.blocks, work.recomputed, strict=True):
            kept = block.kept
            if twice:
                kept = block.selective if selective else 0.0
                kept += 0 if work.activations_to_host else block.output
                if work.activations_to_host:
                    self.host += round(work.in_flight * pinned(round(block.output)))
            else:
                self.kept_casts += block.casts
            self.activations += kept
            # Recomputed activations of a block, without the first tensor to be freed
            self.working = max(self.working, block.eager - block.widest - kept)
            space = BACKWARD_WIDEST * block.widest + block.output + block.dequantized
            self.space = max(self.space, space)
        self._set_tower(selective)

    def _set_tower(self, selective: bool) -> None:
        """What the tower keeps, and what one of its blocks needs in its passes."""
        work = self.work
        self.of_tower = self.tower_working = self.tower_space = 0.0
        for block, twice in zip(work.tower, work.tower_recomputed, strict=True):
            kept = block.output + (block.selective if selective else 0.0) if twice else block.kept
            self.kept_casts += 0 if twice or not block.backward else block.casts
            self.of_tower += kept
            self.tower_working = max(self.tower_working, block.eager - kept)
            widest = BACKWARD_WIDEST if block.backward else FORWARD_WIDEST
            self.tower_space = max(self.tower_space, widest * block.widest + 2 * block.output)
        # The pixels, and the features among the embeddings
        self.activations += self.of_tower
        self.activations *= work.in_flight
        if (place := work.pipeline_rank) is not None:
            # What the next stage gets; what this stage got, if it is not counted as the input of a block;
            # and what is being received
            kept = (not place.last) + (place.number > 0 and work.activations_to_host)
            buffers = kept * work.in_flight + 2
            self.activations += buffers * work.size * work.profile.hidden * work.tokens

    def _set_weights(self) -> None:
        """Unsharded or cast weights: in the forward pass, after it, and in the backward pass."""
        work, head = self.work, self.last is self.root
        every = sum(block.unsharded(work.size) for block in self.blocks) if self.keeps else 0
        last = self.last.unsharded(work.size) if self.keeps or head else 0
        self.kept_weights = every + last
        self.between = self.kept_weights + (0 if head else self.root.unsharded(work.size))
        self.forward = self.between
        if work.one_rank:
            self.forward = self.between = self.kept_weights = work.copies
        elif work.ddp:  # autocast keeps all copies until the loss is computed
            self.between = self.kept_weights = self.kept_casts
            blocks = (*work.tower, *work.blocks)
            self.forward = work.root.casts + sum(block.casts for block in blocks)

    def _set_logits(self) -> None:
        """Memory of the logits and the loss, in the forward pass and in the backward pass."""
        work = self.work
        elements = work.tokens * work.logits_width
        computed = elements * (work.size + (0 if work.size == 4 else 4))
        self.loss, self.loss_backward = computed + 4 * elements, 12 * elements
        # What the losses of further depths keep until the backward pass
        self.loss += 4 * elements * work.profile.depths
        self.loss_backward += 4 * elements * work.profile.depths
        if work.chunked:
            self.loss = self.loss_backward = computed
        if work.kept_logits:  # with float32 values of a chunk, which may be the logits in backward
            self.loss = work.kept_logits + 4 * elements
            self.loss_backward = self.loss if work.size < 4 else work.kept_logits

    def _at(self, phase: Phase, /, **parts: float) -> Moment:
        """A moment of the last micro-batch: these components, and what is held between steps."""
        workspaces = CUBLAS_WORKSPACES if self.work.on_gpu else 0
        parts["temporary"] = workspaces + parts.get("temporary", 0)
        parts["gradients"] = self.held.gradients + parts.get("gradients", 0)
        rounded = {name: round(size) for name, size in parts.items()}
        components = dataclasses.replace(self.held, **rounded)
        number = min(2, self.work.micro_batches) - 1
        return Moment(phase=phase, micro_batch=number, where="", components=components)

    def moments(self) -> Iterator[Moment]:
        """The highest moments of a step's last micro-batch, and the optimizer's step."""
        work, profile = self.work, self.work.profile
        # Gradients of earlier micro-batches, and gradients that are being reduced
        before = flight = 0
        if work.reductions < work.micro_batches:
            before = work.reduce * work.gathered_trained
        elif work.micro_batches > 1 and work.one_rank:
            before = self.shard
        elif work.micro_batches > 1 and not work.ddp:
            before, flight = self.shard, self.old_averages + work.reduce * self.last.trained
        parts = {"gradients": before, "activations": self.activations, "communication": flight}
        yield self._at("forward", gathered=self.forward, logits=self.loss, **parts)
        if work.pipeline_rank is not None and flight and not self.keeps:
            # A forward pass follows the backward pass of another micro-batch, whose last reduction is
            # not freed yet, and gathers its first blocks
            block = max(self.blocks, key=lambda block: block.count).unsharded(work.size)
            others = self.activations * (1 - 1 / work.in_flight)
            both = {"activations": others, "communication": flight + 3 * block}
            yield self._at("forward", gathered=self.kept_weights + block, **parts | both)
        parts["gathered"] = self.between
        yield self._at("backward", logits=self.loss_backward, **parts)
        # With a chunked loss the head's gradient is filled chunk by chunk
        head = profile.hidden * profile.vocabulary if self.root.trained else 0
        head *= 4 if work.ddp else work.size
        logits = self.loss_backward if work.chunked else 0
        head_space = HEAD_WIDEST * work.root.widest
        yield self._at("backward", logits=logits, temporary=head_space + head, **parts)
        reduces = not (work.ddp or work.one_rank)
        if reduces and self.last is not self.root and self.root.trained:  # it is reduced meanwhile
            flight = self.old_averages + work.reduce * self.root.trained
        if self.blocks:
            yield self._last_block(before, flight)
        if work.tower:
            yield self._tower_block(before)
        if not work.ddp:
            others = self.activations * (1 - 1 / work.in_flight)  # of other micro-batches
            yield self._at(
                "backward",
                gradients=(before or self.shard) + work.size * self.last.trained,
                activations=others if self.blocks else self.activations,
                communication=work.reduce * self.last.trained + self.averages if reduces else 0,
            )
        yield self._at("optimizer", gradients=self.shard, temporary=self.slots)

    def _tower_block(self, before: int) -> Moment:
        """The pass of a block of the tower that needs most: the backward pass, after those of text,
        or the forward pass of a frozen tower."""
        work, profile = self.work, self.work.profile
        block, trained = profile.tower.blocks[-1], profile.tower.trained
        gradients = before
        if trained and not work.ddp:
            gradients = (before or self.shard) + work.size * block.trained
        unsharded = self.kept_weights
        if not (work.ddp or work.one_rank or self.keeps):
            unsharded += 2 * block.unsharded(work.size)
        return self._at(
            "backward" if trained else "forward",
            gradients=gradients,
            gathered=unsharded,
            activations=self.of_tower + (self.tower_working if trained else 0),
            temporary=self.tower_space,
        )

    def _last_block(self, before: int, flight: int) -> Moment:
        """The backward pass of the last block, while gradients of `flight` bytes are reduced."""
        work, block = self.work, self.blocks[-1]
        unsharded, communication = self.kept_weights, 0
        gradient = (4 if work.ddp else work.size) * block.largest_trained
        if work.one_rank and not before:  # gradients of the root, and of this weight in float32
            gradient += 4 * (self.root.trained + block.largest_trained)
        elif not (work.ddp or work.one_rank):
            gradient += work.size * self.root.largest_trained if self.last is self.root else 0
            unsharded += 0 if self.keeps else block.unsharded(work.size)
            fetches = work.shards > 1 and not self.keeps
            next_block = self.blocks[max(0, len(self.blocks) - 2)]
            communication = flight + (next_block.unsharded(work.size) if fetches else 0)
        return self._at(
            "backward",
            gradients=before + gradient,
            gathered=unsharded,
            activations=self.activations + self.working,
            temporary=self.space,
            communication=communication,
        )
