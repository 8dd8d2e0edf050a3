"""The work of a rank in one optimizer step, on which estimates of memory and speed are based."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from launcher.data.batching import rows_of
from launcher.distributed.rank_layout import layout_sizes
from launcher.models.head import chunk_width
from launcher.models.nf4 import AT_ONCE
from launcher.models.row_division import rings_that_fit
from launcher.optimizers.offload import BUCKET
from launcher.planner.profile import ModelProfile, WeightGroup, profile_of_blocks, stages_of_profile
from launcher.planner.recipe_values import micro_batches_of
from launcher.recipe.schema import Optimizer, Recipe
from launcher.strategies.base import compute_dtype
from launcher.strategies.pipeline import passes_in_flight, schedule
from launcher.training.operators import Operator, Saved, share_of_budget

STATE_BYTES = {
    "float32": 8,
    "bfloat16": 4,
    "int8": 2 * (1 + 4 / 256),
    "sgd": 4,
    "adafactor": 0,
    "lion": 4,
    "schedule_free_adamw": 8,
}
"""Bytes of optimizer state for each parameter, AdamW by the dtype of its state. 256 int8 numbers
share a scale of four bytes."""

# For models that do not run on fake tensors; figures of a Llama block in bfloat16
OVER_MATRICES = 1.25
"""Bytes that autograd saves relative to the inputs and outputs of matrix products: 49 h bytes per
token to 40 h (h: hidden size)."""
SELECTED = 0.25
"""Share of what autograd saves that selective checkpointing keeps."""
SCORES = 64
"""Bytes that are saved for each attention score where no kernel avoids them, rounded up (51 with
dropout in float32)."""
MOVED = 3.0
"""Bytes that operators other than matrix products and attention move, relative to the bytes that
autograd saves."""
LAUNCHES = 40
"""Kernels of a block's forward pass."""


def state_bytes(profile: ModelProfile, optimizer: Optimizer) -> float:
    """Bytes of optimizer state of the whole model. Adafactor's row and column of each matrix count
    as 0."""
    adamw = optimizer.name in ("adamw", "muon")
    each = STATE_BYTES[optimizer.state_dtype if adamw else optimizer.name]
    if optimizer.name == "sgd" and not optimizer.momentum:
        each = 0.0
    momenta = sum(map(math.prod, profile.orthogonalized)) if optimizer.name == "muon" else 0
    average = 0 if optimizer.ema is None else 4
    return each * (profile.trained - momenta) + 4 * momenta + average * profile.trained


def with_most_saved(profile: ModelProfile, recipe: Recipe) -> ModelProfile:
    """The profile with sizes that exceed what any block with packed attention saves: three times
    the usual bytes around matrices, and on a CPU the scores of attention."""
    length, dtype = recipe.data.row_length, compute_dtype(recipe.strategy)
    scores = SCORES * profile.heads[0] * length**2 if profile.device == "cpu" else 0
    saved = {}
    for kind, weights in enumerate(profile.classes):
        shapes = [(shape, profile.experts if len(shape) == 3 else 1) for shape in weights.matrices]
        ends = sum(times * (shape[-2] + shape[-1]) for shape, times in shapes)
        kept = 3 * OVER_MATRICES * dtype.itemsize * length * ends
        saved[kind] = Saved(kept=round(kept + scores), selected=round(kept / 2), cost=1)
    return dataclasses.replace(profile, saved={dtype: saved})


@dataclass(frozen=True, kw_only=True)
class BlockCost:
    """The forward pass of a block, or of the root, in one micro-batch. Bytes."""

    kept: float
    """Saved for the backward pass, if checkpointing recomputes nothing."""
    eager: float
    """Saved by autograd, if the block is not compiled. Also what recomputation holds."""
    selective: float = 0
    """Kept by selective checkpointing in addition to the input of the block."""
    spared: float | None = None
    """Share of the operators' cost that recomputation is spared by a budget, or because attention is kept;
    None: neither."""
    output: float
    widest: float
    """The largest tensor."""
    casts: int
    """Copies of weights under autocast."""
    moved: float
    """Bytes that operators other than matrix products and attention read and write."""
    launches: int = 0
    """Number of kernels."""
    products: float
    """Floating-point operations of matrix products."""
    attention: float = 0
    """Floating-point operations of attention. Causal attention needs half of the full matrix."""
    trained: float
    """Share of the weights that are trained."""
    backward: bool = True
    """Whether there is a backward pass; not in a frozen tower."""
    quantized: int = 0
    """Elements of weights in NF4."""
    dequantized: int = 0
    """Bytes of the largest of these weights in the compute dtype; on CPUs, the working space of
    dequantization counts, too."""


@dataclass(frozen=True, kw_only=True)
class PipelineRank:
    """What a rank of a pipeline has."""

    number: int
    """Its number along the stages."""
    blocks: Sequence[int]
    """The numbers of its blocks."""
    in_flight: float
    """Micro-batches whose activations it holds at once, in activations of all its blocks."""
    last: bool
    """Whether it has what comes after the blocks."""
    outer_units: bool
    """Whether the embedding and the head, of whichever rank, are units of FSDP."""


class Work:
    """Numbers of micro-batches, shards and reductions, and sizes in bytes, of one rank."""

    def __init__(
        self,
        profile: ModelProfile,
        recipe: Recipe,
        *,
        ranks: int,
        pipeline_rank: PipelineRank | None = None,
    ) -> None:
        """The recipe may differ from the profiled one in strategy, checkpointing and batch.
        pipeline_rank: None: the profile is of a whole model."""
        self.pipeline_rank = pipeline_rank
        self.in_flight = 1.0 if pipeline_rank is None else pipeline_rank.in_flight
        self.head = pipeline_rank is None or pipeline_rank.last
        self.profile, self.recipe, self.ranks = profile, recipe, ranks
        self.strategy = strategy = recipe.strategy
        self.one_rank = recipe.uses_one_rank(ranks)
        self.ddp = strategy.kind == "ddp" and not self.one_rank
        self.on_gpu = profile.device == "cuda"
        length, self.dtype = recipe.data.row_length, compute_dtype(strategy)
        self.size = self.dtype.itemsize
        self.autocast = self.ddp and self.size < 4
        mixed = strategy.mixed_precision
        # Bytes of an element of a gradient that is being reduced
        self.reduce = (
            4 if mixed is None or self.ddp else getattr(torch, mixed.reduce_dtype).itemsize
        )
        sizes = layout_sizes(strategy, ranks=ranks)
        # Size of a full micro-batch: this rank's part of rows that context parallel ranks compute
        rows = rows_of(recipe.batch, row_length=length)
        self.whole_rows, self.rows = rows, rows / sizes.context_parallel_size
        self.tokens = rows * length // sizes.context_parallel_size
        # Ranks that divide attention heads, and their groups, which exchange keys and values
        self.context_ranks, self.ring = sizes.context_parallel_size, 1
        if self.context_ranks > 1:
            fits = rings_that_fit(self.context_ranks, max(1, profile.heads[0]))
            self.ring = strategy.context_parallel_ring or (fits[0] if profile.heads[0] else 1)
        self.heads_ranks = self.context_ranks // self.ring
        self.micro_batches = micro_batches_of(recipe, ranks=ranks)
        sync = strategy.sync_every_micro_batch
        every = not self.ddp if sync == "auto" else sync
        self.reductions = self.micro_batches if every or self.one_rank else 1
        # Ranks that shard each parameter, and its optimizer state. With tensor parallelism the
        # profile describes a tensor parallel rank's part, which is sharded over fewer ranks
        self.tensor_ranks = 1 if self.ddp else sizes.tensor_parallel_size
        self.shards = 1 if self.ddp else sizes.shard_size
        self.state_shards = ranks if strategy.shard_optimizer else self.shards
        # Ranks that hold different experts, and the weights that a rank gathers
        self.expert_ranks = 1 if self.ddp else sizes.expert_parallel_size
        self.gathered = [group.on_each_of(self.expert_ranks) for group in profile.groups]
        self.gathered_trained = sum(group.trained for group in self.gathered)
        weights = [weight for group in self.gathered for weight in group.parameters]
        self.experts = [weight for weight in weights if weight.expert]
        # Bytes of the copies in the compute dtype that stand beside float32 weights on one rank
        self.copies = 0
        if self.one_rank:
            self.copies = sum(group.copied(self.size) for group in profile.groups)
        self.states = round(state_bytes(profile, recipe.optimizer) / self.state_shards)
        offload, self.in_file = strategy.cpu_offload, 0
        if offload is not None and offload.optimizer_path is not None:
            self.in_file = self.states
        only_state = offload is not None and offload.what == "optimizer"
        # Optimizer state that a step streams from host memory or a file, in buckets
        self.streamed = self.in_file or (self.states if only_state else 0)
        largest = max(group.largest_trained for group in profile.groups) / max(1, profile.trained)
        bucket = max(min(BUCKET, self.states), round(self.states * largest))
        self.bucket = bucket if self.streamed else 0
        checkpointing = recipe.activation_checkpointing
        n = 0 if checkpointing is None else checkpointing.every_n_blocks
        indices = range(len(profile.block_classes))
        self.recomputed = [n > 0 and index % n == 0 for index in indices]
        self.activations_to_host = (
            checkpointing is not None and checkpointing.offload_to_cpu and self.on_gpu
        )
        # Vocabulary entries that logits are computed for at a time
        self.logits_width = profile.vocabulary
        if profile.chunked_loss and profile.vocabulary:
            self.logits_width = chunk_width(self.tokens, profile.vocabulary)
        self.chunked = self.logits_width < profile.vocabulary
        # Bytes of logits that are kept until the backward pass
        keeps = self.chunked and recipe.model.keeps_logits
        self.kept_logits = self.size * self.tokens * profile.vocabulary if keeps else 0
        self.kept_logits *= 1 + profile.depths
        classes = [self._block(kind, weights) for kind, weights in enumerate(profile.classes)]
        self.blocks = [classes[kind] for kind in profile.block_classes]
        # Rows of attachments whose tower this rank computes; an attachment is not divided
        parts = sizes.context_parallel_size
        self.rows_of_attachments = rows * profile.tower.share(parts, length)
        self.tower = [self._tower_block(weights) for weights in profile.tower.blocks]
        self.tower_recomputed = [n > 0 and i % n == 0 for i in range(len(self.tower))]
        if not profile.tower.trained:
            self.tower_recomputed = [False] * len(self.tower)
        self.root = self._root()

    @cached_property
    def pipeline(self) -> list[Work]:
        """The work of a rank of each stage that differs; empty without pipeline parallelism."""
        strategy = self.strategy
        size = strategy.pipeline_parallel_size
        if size == 1 or self.ddp:
            return []
        count = size * self.chunks
        stages = stages_of_profile(self.profile, count, strategy.pipeline_blocks)
        found = list[Work]()
        seen = set[tuple[object, ...]]()
        for rank in range(size):
            blocks = [*itertools.chain(*stages[rank::size])]
            kinds = Counter(self.profile.block_classes[index] for index in blocks)
            alike = (rank == 0, rank == size - 1, *sorted(kinds.items()))
            if alike not in seen:  # of stages that are alike, the first one has the most in flight
                found.append(self.of_rank(rank, blocks))
            seen.add(alike)
        return found

    def of_rank(self, rank: int, blocks: Sequence[int]) -> Work:
        """The work of a rank of a pipeline, by its number along the stages, that has these blocks."""
        size, chunks = self.strategy.pipeline_parallel_size, self.chunks
        passes = schedule(self.micro_batches, rank=rank, ranks=size, chunks=chunks)
        last = rank == size - 1
        part = profile_of_blocks(self.profile, blocks, first=rank == 0, last=last)
        alone = dataclasses.replace(
            self.strategy, pipeline_parallel_size=1, pipeline_schedule="1f1b", pipeline_blocks=None
        )
        recipe = dataclasses.replace(self.recipe, strategy=alone)
        place = PipelineRank(
            number=rank,
            blocks=blocks,
            in_flight=passes_in_flight(passes) / chunks,
            last=last,
            outer_units=bool(self.profile.embedding.count),
        )
        return Work(part, recipe, ranks=self.ranks // size, pipeline_rank=place)

    @property
    def chunks(self) -> int:
        """Stages of a rank."""
        return self.strategy.stages_of_rank

    def _block(self, kind: int, weights: WeightGroup) -> BlockCost:
        """The forward pass of a block of this class."""
        profile, size, tokens = self.profile, self.size, self.tokens
        matrices = [(m[-2], m[-1], profile.experts if len(m) == 3 else 1) for m in weights.matrices]
        spared = None
        output = float(size * profile.hidden * tokens)
        if self.dtype in profile.saved:
            of_class = profile.saved[self.dtype]
            if self.autocast and profile.autocast:
                of_class = profile.autocast
                output = float(self.rows * of_class[kind].input)
            saved = of_class[kind]
            eager, selective = float(self.rows * saved.kept), float(self.rows * saved.selected)
            kept = eager
            if self.recipe.model.compiles and saved.compiled is not None:
                kept = float(self.rows * saved.compiled)
            moved, launches = float(self.rows * saved.moved), saved.launches
            checkpointing = self.recipe.activation_checkpointing
            chosen: list[Operator] | None = None
            if checkpointing is not None and checkpointing.mode == "all_but_attention":
                chosen = [operator for operator in saved.operators if operator.attention]
            if checkpointing is not None and checkpointing.budget is not None:
                whole = self.rows * sum(of_class[kind].kept for kind in profile.block_classes)
                chosen = saved.keep(share_of_budget(checkpointing.budget, whole))
            if chosen is not None:
                selective = float(self.rows * sum(operator.size for operator in chosen))
                spared = sum(operator.cost for operator in chosen) / saved.cost
        else:
            ends = sum(times * (i + o) for i, o, times in matrices)
            kept = eager = OVER_MATRICES * size * tokens * ends
            selective = SELECTED * kept
            moved, launches = MOVED * kept, LAUNCHES
        heads, head_size = profile.heads
        # With adapters, frozen weights are held in the dtype that autocast would cast them to
        dense = weights.trained if weights.adapted else weights.count
        largest = max(weights.quantized, default=0)
        return BlockCost(
            kept=kept,
            eager=eager,
            selective=selective,
            spared=spared,
            output=output,
            widest=size * tokens * max((times * max(i, o) for i, o, times in matrices), default=0),
            casts=size * dense if self.autocast else 0,
            moved=moved,
            launches=launches,
            products=2.0 * tokens * sum(times * i * o for i, o, times in matrices),
            attention=2.0 * tokens * self.recipe.data.sequence_length * heads * head_size,
            trained=_share_trained(weights),
            quantized=sum(weights.quantized),
            dequantized=size * largest + (0 if self.on_gpu else 6 * min(largest, AT_ONCE)),
        )

    def _tower_block(self, weights: WeightGroup) -> BlockCost:
        """The forward pass of a block of the tower, for the largest attachments in full rows."""
        tower, size = self.profile.tower, self.size
        rows = self.rows_of_attachments
        patches, count = rows * tower.patches, len(tower.blocks)
        wide = max((max(weight.shape) for weight in weights.parameters), default=0)
        hidden = min((min(shape[-2:]) for shape in weights.matrices), default=0)
        saved = tower.saved.get(self.dtype)
        if self.autocast and tower.autocast is not None:
            saved = tower.autocast
        if saved is not None:
            eager, selective = float(rows * saved.kept), float(rows * saved.selected)
            kept = eager
            if self.recipe.model.compiles and saved.compiled is not None:
                kept = float(rows * saved.compiled)
            moved, launches = float(rows * saved.moved), saved.launches
        else:
            ends = sum(sum(shape[-2:]) for shape in weights.matrices)
            moved = OVER_MATRICES * size * patches * ends
            kept = eager = moved if tower.trained else 0.0
            selective, moved, launches = SELECTED * kept, MOVED * moved, LAUNCHES
        return BlockCost(
            kept=kept,
            eager=eager,
            selective=selective,
            output=size * hidden * patches,
            widest=size * wide * patches,
            casts=size * weights.count if self.autocast else 0,
            moved=moved,
            launches=launches,
            products=rows * tower.products / count,
            attention=rows * tower.attention / count,
            trained=_share_trained(weights),
            backward=tower.trained,
        )

    def _root(self) -> BlockCost:
        """The forward pass of the embedding, the last norm (in float32) and the head, without the
        logits."""
        profile, size, hidden, tokens = self.profile, self.size, self.profile.hidden, self.tokens
        cast = self.autocast and not (profile.root.adapted and not profile.root.trained)
        questions = 1 + profile.depths
        kept = (3 * size + 4) * hidden * tokens * questions if self.head else 0
        return BlockCost(
            kept=kept,
            eager=kept,
            output=size * hidden * tokens,
            widest=4 * hidden * tokens if self.head else 0,
            casts=size * self.logits_width * hidden if cast else 0,
            moved=4.0 * kept,
            products=2.0 * tokens * hidden * profile.vocabulary * questions,
            trained=_share_trained(profile.root),
        )


def _share_trained(weights: WeightGroup) -> float:
    return weights.trained / weights.count if weights.count else 1.0
