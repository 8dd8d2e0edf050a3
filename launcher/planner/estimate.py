"""Memory of a training step in closed formulas: they rank configurations.

Good to 10 %; the trace (`trace.py`) confirms what is shown. For P parameters that S ranks shard
(S = 1 with DDP), compute in c bytes and gradient reduction in r bytes:

- states: parameters 4 P / S, gradients 4 P / S, AdamW's moments 8 P / S, all float32: 16 bytes a
  parameter, as ZeRO counts (Rajbhandari et al., 2020). With CPU offload they are on the host, or
  only the moments, of which the optimizer's step has two buckets on the device.
- gathered: FSDP: c x the weights of one block, or of all blocks where they stay unsharded. The
  last norm and the head stay unsharded from the end of the forward pass to the start of the
  backward pass. DDP under autocast: c bytes for each weight that was cast.
- communication: FSDP: the next block's all-gather (c), and r bytes per gradient that is being
  reduced. Hybrid sharding also keeps averages over the copies until the next micro-batch's.
- gradients, beside the shards: c bytes per gradient of one block until it is reduced; without a
  reduction in each micro-batch r bytes per gradient of the whole model. DDP: buckets as large as
  all gradients, and the gradients themselves in micro-batches that are not reduced.
- activations: counted (`profile.py`). With hidden size h they are about 34 h bytes a token and
  block of a GPT (Korthikanti et al., 2022), 49 h of a Llama. Full checkpointing keeps a block's
  input, and once all of one block; selective also attention and half the products.
- logits: as computed and a float32 copy (2 + 4 bytes a token and vocabulary entry with bfloat16) of
  a chunk of the vocabulary (`model.chunked_loss`). Full logits: also the log-probabilities
  (2 + 4 + 4); in the backward pass the log-probabilities and two gradients (4 + 4 + 4).
- temporary: a multiple of a block's widest tensor.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

from launcher.data.batching import accumulation_steps
from launcher.data.synthetic import rows_of
from launcher.planner.memory import CUBLAS_WORKSPACES, Components, Moment, Phase, StepMemory, pinned
from launcher.planner.profile import (
    DTYPE_BYTES,
    ModelProfile,
    block_footprint,
    compute_dtype,
    logits_width,
    root_footprint,
)
from launcher.recipe.schema import Optimizer, Recipe, Strategy
from launcher.strategies.base import offloads_parameters
from launcher.training.optimizer_offload import BUCKET, FILE_BUFFERS, SLOTS

BACKWARD_WIDEST, HEAD_WIDEST = 3, 5
"""Working space in units of the widest tensor: of a block's backward pass, and of the backward pass
of the last norm (in float32). Fitted to traces of Llama models."""
STATE_BYTES = {"float32": 8, "bfloat16": 4, "int8": 2 * (1 + 4 / 256), "sgd": 4, "adafactor": 0}
"""Of a parameter: AdamW's by the dtype of its state. 256 numbers in int8 share a scale of four."""


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


def weight_shards(strategy: Strategy, ranks: int) -> int:
    """Ranks that share each parameter."""
    return 1 if strategy.kind == "ddp" else max(1, ranks // strategy.replicate)


def state_shards(strategy: Strategy, ranks: int) -> int:
    """Ranks that share the optimizer's state of each parameter."""
    return ranks if strategy.shard_optimizer else weight_shards(strategy, ranks)


def state_bytes(profile: ModelProfile, optimizer: Optimizer, *, shards: int) -> int:
    """Optimizer state on each of `shards` ranks. Adafactor keeps a row and a column of a matrix."""
    adamw = optimizer.name in ("adamw", "muon")
    each = STATE_BYTES[optimizer.state_dtype if adamw else optimizer.name]
    if optimizer.name == "sgd" and not optimizer.momentum:
        each = 0.0
    momenta = sum(map(math.prod, profile.orthogonalized)) if optimizer.name == "muon" else 0
    return round((each * (profile.trained - momenta) + 4 * momenta) / shards)


def streamed_state(profile: ModelProfile, recipe: Recipe, *, ranks: int) -> tuple[int, int, int]:
    """Bytes of a rank's optimizer state that a step streams from host memory, and from a file, and
    of its largest bucket."""
    offload, shards = recipe.strategy.cpu_offload, state_shards(recipe.strategy, ranks)
    states = state_bytes(profile, recipe.optimizer, shards=shards)
    largest = max(group.largest_trained for group in profile.groups) / max(1, profile.trained)
    bucket = max(min(BUCKET, states), round(states * largest))
    if offload is not None and offload.optimizer_path is not None:
        return 0, states, bucket
    only_state = offload is not None and offload.what == "optimizer"
    return (states, 0, bucket) if only_state else (0, 0, 0)


def step_memory(profile: ModelProfile, recipe: Recipe, *, ranks: int) -> StepMemory:
    """Memory of one optimizer step on rank 0 of `ranks`, in its last micro-batch.

    recipe: the profiled one, or one that differs in strategy, checkpointing and batch only.
    """
    step = _Step(profile, recipe, ranks=ranks)
    logits = 0 if step.chunked else 4 * tokens_of(recipe) * profile.vocabulary
    after = {"gathered": step.between, "activations": round(step.activations), "logits": logits}
    return StepMemory(
        timeline=tuple(step.moments()),
        held=step.held,
        after_forward=dataclasses.replace(step.held, **after),
        host=step.host,
        disk=step.disk,
    )


class _Step:
    """Sizes in bytes, and the highest moments of a step."""

    def __init__(self, profile: ModelProfile, recipe: Recipe, *, ranks: int) -> None:
        strategy, mixed = recipe.strategy, recipe.strategy.mixed_precision
        self.profile, self.on_gpu = profile, profile.device == "cuda"
        self.ddp, shards = strategy.kind == "ddp", weight_shards(strategy, ranks)
        self.size = DTYPE_BYTES[compute_dtype(strategy)]
        self.reduce = 4 if mixed is None or self.ddp else DTYPE_BYTES[mixed.reduce_dtype]
        # Elsewhere: on the host, or in files
        elsewhere = strategy.cpu_offload if self.on_gpu else None
        offload = elsewhere if offloads_parameters(elsewhere) else None
        _, self.disk, bucket = streamed_state(profile, recipe, ranks=ranks)
        count, syncs = micro_batches_of(recipe, ranks=ranks), syncs_every_micro_batch(strategy)
        self.number = min(2, count) - 1
        # Gradients are reduced in the last micro-batch only
        self.holds = count > 1 and not syncs
        # All weights stay unsharded between the forward and the backward pass
        self.keeps = not strategy.reshard_after_forward
        self.keeps = self.keeps or (count > 1 and not strategy.reshard_after_backward)
        self.fetches = shards > 1 and not self.keeps and not self.ddp
        *self.blocks, embedding, self.root = profile.groups
        # Without an embedding of its own, FSDP reduces the root last and keeps it unsharded
        self.last = embedding if embedding.count else self.root
        masters = sum(sum(group.sizes(self.size)) for group in profile.groups) // shards
        gradients = 4 * profile.trained // shards
        self.shard = 0 if offload or self.ddp else gradients
        states = state_bytes(profile, recipe.optimizer, shards=state_shards(strategy, ranks))
        # Hybrid sharding: FSDP keeps the averages over the copies until the next micro-batch's,
        # unless they become the gradients: the first ones, without offload
        averages = gradients if strategy.replicate > 1 and not self.ddp else 0
        reductions, first = count if syncs else 1, 0 if offload else 1
        self.averages = averages if reductions > first else 0
        self.old_averages = averages if reductions > first + 1 else 0
        self.held = Components(
            parameters=(0 if offload else masters) + profile.buffers,
            optimizer=0 if elsewhere or self.disk else states,
            gradients=gradients if self.ddp else 0,
        )
        self.host = 0
        if offload:
            pins = sum(group.pinned(shards, self.size) for group in profile.groups)
            self.host = pins if offload.pin_memory else masters + gradients
        buffers = min(FILE_BUFFERS * bucket, states) if self.disk else 0
        self.host += buffers or states if elsewhere else 0
        # Without a GPU, or with parameters on the host, files are read into the buffers themselves
        self.slots = (
            0 if offload or (self.disk and not self.on_gpu) else min(SLOTS * bucket, states)
        )
        self.slots += 0 if elsewhere else buffers
        self._set_activations(recipe)

    def _set_activations(self, recipe: Recipe) -> None:
        """Activations, logits, and weights that are unsharded or cast."""
        profile, tokens = self.profile, tokens_of(recipe)
        checkpointing = recipe.activation_checkpointing
        to_host = checkpointing is not None and checkpointing.offload_to_cpu and self.on_gpu
        selective = checkpointing is not None and checkpointing.mode == "selective"
        classes = [block_footprint(profile, k, recipe, tokens) for k in range(len(profile.classes))]
        blocks = [classes[kind] for kind in profile.block_classes]
        root = root_footprint(profile, recipe, tokens)
        self.activations, kept_casts = root.kept, root.casts
        self.working = self.space = 0.0
        for block, twice in zip(blocks, checkpointed(profile, recipe), strict=True):
            kept, space = block.kept, BACKWARD_WIDEST * block.widest + block.output
            if twice:
                kept = block.selective if selective else 0.0
                kept += 0 if to_host else block.output
                self.host += pinned(round(block.output)) if to_host else 0
            else:
                kept_casts += block.casts
            self.activations += kept
            # Recomputed activations of a block, without the first tensor to be freed
            self.working = max(self.working, block.kept - block.widest - (0 if twice else kept))
            self.space = max(self.space, space)
        self.head_space = HEAD_WIDEST * root.widest
        every = self.size * sum(block.count for block in self.blocks) if self.keeps else 0
        last = self.size * self.last.count if self.keeps or self.last is self.root else 0
        self.kept_weights = every + last
        self.between = every + last + (0 if self.last is self.root else self.size * self.root.count)
        self.forward = self.between
        if self.ddp:  # autocast keeps all copies until the loss is there
            self.between = self.kept_weights = kept_casts
            self.forward = root.casts + sum(block.casts for block in blocks)
        width = logits_width(profile, tokens)
        self.chunked = width < profile.vocabulary
        elements, copy = tokens * width, 0 if self.size == 4 else 4
        self.logits = (elements * (self.size + copy + 4), elements * 12)
        if self.chunked:
            self.logits = (elements * (self.size + copy),) * 2

    def _at(self, phase: Phase, /, **parts: float) -> Moment:
        """A moment with these components beside what is held all the time."""
        workspaces = CUBLAS_WORKSPACES if self.on_gpu else 0
        parts["temporary"] = workspaces + parts.get("temporary", 0)
        parts["gradients"] = self.held.gradients + parts.get("gradients", 0)
        rounded = {name: round(size) for name, size in parts.items()}
        components = dataclasses.replace(self.held, **rounded)
        return Moment(phase=phase, micro_batch=self.number, where="", components=components)

    def moments(self) -> Iterator[Moment]:
        """The highest moments of a step's last micro-batch, and the optimizer's step."""
        # Gradients of the micro-batches before, and those that are being reduced
        before = flight = 0
        if self.number and self.holds:
            before = self.reduce * self.profile.trained
        elif self.number and not self.ddp:
            before, flight = self.shard, self.old_averages + self.reduce * self.last.trained
        parts = {"gradients": before, "activations": self.activations, "communication": flight}
        loss, loss_backward = self.logits
        yield self._at("forward", gathered=self.forward, logits=loss, **parts)
        yield self._at("backward", gathered=self.between, logits=loss_backward, **parts)
        # With a chunked loss the head's gradient is filled chunk by chunk
        head = self.profile.hidden * self.profile.vocabulary if self.root.trained else 0
        yield self._at(
            "backward",
            gathered=self.between,
            logits=loss_backward if self.chunked else 0,
            temporary=self.head_space + (4 if self.ddp else self.size) * head,
            **parts,
        )
        if not self.ddp and self.last is not self.root:  # the root is reduced meanwhile
            flight = self.old_averages + self.reduce * self.root.trained
        if self.blocks:
            yield self._last_block(before, flight)
        kept = 0.0 if self.blocks else self.activations
        if not self.ddp:
            yield self._at(
                "backward",
                gradients=(before or self.shard) + self.size * self.last.trained,
                activations=kept,
                communication=self.reduce * self.last.trained + self.averages,
            )
        yield self._at("optimizer", gradients=self.shard, temporary=self.slots)

    def _last_block(self, before: int, flight: int) -> Moment:
        """The backward pass of the last block. flight: gradients that are being reduced."""
        block = self.blocks[-1]
        own = 0 if self.keeps or self.ddp else self.size * block.count
        fetched = self.size * self.blocks[max(0, len(self.blocks) - 2)].count
        gradient = (4 if self.ddp else self.size) * block.largest_trained
        tied = self.size * self.root.largest_trained if self.last is self.root else 0
        return self._at(
            "backward",
            gradients=before + gradient + (0 if self.ddp else tied),
            gathered=self.kept_weights + own,
            activations=self.activations + self.working,
            temporary=self.space,
            communication=0 if self.ddp else flight + (fetched if self.fetches else 0),
        )
