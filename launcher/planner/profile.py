"""The input of the analytic estimate: shapes of weights, bytes that autograd saves.

Autograd's bytes are counted in one forward pass on fake tensors.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch
from torch import nn

from launcher.models.chunked_loss import chunk_width
from launcher.planner.fake import keep_blocks
from launcher.planner.memory import pinned
from launcher.planner.operators import Saved, saved_of_blocks, share_of_budget
from launcher.recipe.schema import Recipe, Strategy
from launcher.training.muon import is_matrix
from launcher.training.setup import prepare_model

Device = Literal["cuda", "cpu"]
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

OVER_MATRICES = 1.25
"""What autograd saves of a block over the inputs and outputs of its matrix products, for models
that do not run on fake tensors: of a Llama 49 h bytes a token in bfloat16 over 2 bytes x 20 h (h:
hidden size)."""
SELECTED = 0.25
"""Share of it that selective checkpointing keeps, for such models. Of a Llama block."""
TRAFFIC = 4.0
"""Bytes that other operators read and write, over what is saved. Of a Llama block in bfloat16."""
OPERATORS = 60
"""Operators of a Llama block's forward pass."""


def compute_dtype(strategy: Strategy) -> str:
    """The dtype that the model computes in."""
    return "float32" if strategy.mixed_precision is None else strategy.mixed_precision.param_dtype


@dataclass(frozen=True)
class Weight:
    """One parameter."""

    shape: tuple[int, ...]
    trained: bool
    size: int
    """Bytes of an element as the model holds it (with adapters see `Weights.adapted`)."""

    @property
    def count(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Weights:
    """A group that is sharded and gathered together: a block, or the root. Tied ones count once.
    Counts are of elements."""

    parameters: tuple[Weight, ...]
    adapted: bool
    """With adapters (LoRA) frozen weights are held in the compute dtype."""

    @cached_property
    def count(self) -> int:
        return sum(weight.count for weight in self.parameters)

    @cached_property
    def trained(self) -> int:
        return sum(weight.count for weight in self.parameters if weight.trained)

    @cached_property
    def largest_trained(self) -> int:
        return max((weight.count for weight in self.parameters if weight.trained), default=0)

    @cached_property
    def matrices(self) -> list[tuple[int, ...]]:
        """Shapes of what tokens are multiplied with: two dimensions, three with experts.

        Adapters are excluded: what they keep is kept for the frozen weights beside them.
        """
        kept = (w for w in self.parameters if not (self.adapted and w.trained))
        return [weight.shape for weight in kept if len(weight.shape) in (2, 3)]

    def sizes(self, dtype_bytes: int) -> list[int]:
        """Bytes of each as the model holds it, where it computes in so many bytes."""
        return [
            weight.count * (dtype_bytes if self.adapted and not weight.trained else weight.size)
            for weight in self.parameters
        ]

    def pinned(self, shards: int, dtype_bytes: int) -> int:
        """Bytes of pinned memory that shards and their gradients take."""
        gradients = [4 * weight.count for weight in self.parameters if weight.trained]
        return sum(pinned(size // shards) for size in [*self.sizes(dtype_bytes), *gradients])


@dataclass(frozen=True, kw_only=True)
class ModelProfile:
    """The properties of a model that memory and speed depend on."""

    device: Device
    block_classes: tuple[int, ...]
    """Of each block its index in `classes`."""
    classes: tuple[Weights, ...]
    """Blocks with equal shapes are one class."""
    embedding: Weights
    """The input embedding if it is a unit of FSDP, which reduces it last; otherwise empty."""
    root: Weights
    """Other weights outside of all blocks. Without `embedding` FSDP reduces them last, together."""
    buffers: int
    """Bytes."""
    chunked_loss: bool
    """Whether logits are computed for a chunk of the vocabulary at a time."""
    hidden: int
    vocabulary: int
    """Width of the logits; 0 without a language model's head."""
    heads: tuple[int, int]
    """Number of attention heads, size of each; zeros where they are not known."""
    experts: int
    """Experts that a token is sent to."""
    saved: dict[str, dict[int, Saved]]
    """What is saved of a block, by compute dtype and class. Empty: the model does not run on fake
    tensors, and `block_footprint` takes the shapes of weights."""

    @cached_property
    def groups(self) -> list[Weights]:
        """The weights of each block, then of the embedding and of the root."""
        return [*(self.classes[kind] for kind in self.block_classes), self.embedding, self.root]

    @cached_property
    def orthogonalized(self) -> list[tuple[int, ...]]:
        """Shapes of what Muon orthogonalizes."""
        blocks = (self.classes[kind] for kind in self.block_classes)
        weights = (weight for block in blocks for weight in block.parameters if weight.trained)
        return [weight.shape for weight in weights if is_matrix(weight.shape)]

    @cached_property
    def parameters(self) -> int:
        return sum(group.count for group in self.groups)

    @cached_property
    def trained(self) -> int:
        return sum(group.trained for group in self.groups)


_PROFILES: dict[str, ModelProfile] = {}


def profile_model(recipe: Recipe, *, device: Device) -> ModelProfile:
    """Profiles the recipe's model without weights, data or a GPU. Results are cached.

    Raises RecipeError as `prepare_model`.
    """
    mixed = recipe.strategy.mixed_precision
    key = repr((recipe.model, recipe.lora, recipe.data, mixed, device))
    if key not in _PROFILES:
        _PROFILES[key] = _profile(recipe, device)
    return _PROFILES[key]


def _profile(recipe: Recipe, device: Device) -> ModelProfile:
    random = dataclasses.replace(recipe.model, init="random", compile=False)
    recipe = dataclasses.replace(recipe, model=random)
    prepared = prepare_model(recipe, device=torch.device(device))

    def group(parameters: Iterable[nn.Parameter]) -> Weights:
        weights = (Weight(tuple(p.shape), p.requires_grad, p.element_size()) for p in parameters)
        return Weights(tuple(weights), recipe.lora is not None)

    model: Any = prepared.model
    config = getattr(model, "config", None)
    blocks = [group(block.parameters()) for block in prepared.blocks.values()]
    classes = tuple(dict.fromkeys(blocks))
    kinds = tuple(classes.index(block) for block in blocks)
    first = prepared.outer_units[:1]
    inside = {id(p) for unit in (*first, *prepared.blocks.values()) for p in unit.parameters()}
    hidden = getattr(config, "hidden_size", None) or 0
    heads = getattr(config, "num_attention_heads", None) or 0
    head_size = getattr(config, "head_dim", None) or (hidden // heads if heads else 0)
    classifies = recipe.model.task == "sequence_classification"
    profile = ModelProfile(
        device=device,
        block_classes=kinds,
        classes=classes,
        embedding=group(p for unit in first for p in unit.parameters()),
        root=group(p for p in model.parameters() if id(p) not in inside),
        buffers=sum(buffer.nbytes for buffer in model.buffers()),
        chunked_loss=prepared.chunked_loss,
        hidden=hidden,
        vocabulary=0 if classifies else prepared.vocabulary or 0,
        heads=(heads, head_size),
        experts=getattr(config, "num_experts_per_tok", None) or 1,
        saved={},
    )
    # The last block of each class: in the first one of all fewer gradients are needed with LoRA
    lasts = {kind: index for index, kind in enumerate(kinds)}
    if not keep_blocks(prepared.model, prepared.blocks, sorted(lasts.values())):
        return profile
    order = sorted(lasts, key=lambda kind: lasts[kind])
    names = dict(zip(prepared.blocks, order, strict=True))
    batch = dataclasses.replace(recipe.batch, micro_batch_size=1, micro_batch_tokens=None)
    data, own = prepared.synthetic_data(recipe.data, batch), compute_dtype(recipe.strategy)
    try:  # the search offers bfloat16
        for dtype in {own, "bfloat16" if own == "float32" else own}:
            profile.saved[dtype] = saved_of_blocks(
                prepared.model, names, data, device=device, dtype=getattr(torch, dtype)
            )
    except Exception:  # models fail in various ways on tensors without values
        profile.saved.clear()
    return profile


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """One forward pass of a block, or of the root, in bytes."""

    kept: float
    """Saved by autograd."""
    selective: float = 0
    """Kept by selective checkpointing beside the block's input."""
    spared: float | None = None
    """Share of the operators' cost that a budget saves in recomputation; None: no budget."""
    output: float
    widest: float
    """The largest tensor."""
    casts: int
    """Copies of weights under autocast."""
    products: float
    """Floating-point operations of matrix products."""
    attention: float = 0
    """Floating-point operations of attention, the causal half."""

    @property
    def traffic(self) -> float:
        """Read and written by all other operators."""
        return TRAFFIC * self.kept


def block_footprint(profile: ModelProfile, kind: int, recipe: Recipe, tokens: int) -> Footprint:
    """Of a block of this class, for one micro-batch."""
    dtype = compute_dtype(recipe.strategy)
    weights, size = profile.classes[kind], DTYPE_BYTES[dtype]
    matrices = [(m[-2], m[-1], profile.experts if len(m) == 3 else 1) for m in weights.matrices]
    spared = None
    if dtype in profile.saved:
        rows, saved = tokens / recipe.data.sequence_length, profile.saved[dtype][kind]
        kept, selected = rows * saved.kept, rows * saved.selected
        checkpointing = recipe.activation_checkpointing
        if checkpointing is not None and checkpointing.budget is not None:
            of_class = profile.saved[dtype]
            whole = sum(rows * of_class[kind].kept for kind in profile.block_classes)
            chosen = saved.keep(share_of_budget(checkpointing.budget, whole))
            selected = rows * sum(one.size for one in chosen)
            spared = sum(one.cost for one in chosen) / saved.cost
    else:
        ends = sum(times * (i + o) for i, o, times in matrices)
        kept = OVER_MATRICES * size * tokens * ends
        selected = SELECTED * kept
    heads, head_size = profile.heads
    return Footprint(
        kept=kept,
        selective=selected,
        spared=spared,
        output=size * profile.hidden * tokens,
        widest=size * tokens * max((times * max(i, o) for i, o, times in matrices), default=0),
        casts=size * weights.count if recipe.strategy.kind == "ddp" and size < 4 else 0,
        products=2.0 * tokens * sum(times * i * o for i, o, times in matrices),
        attention=2.0 * tokens * recipe.data.sequence_length * heads * head_size,
    )


def logits_width(profile: ModelProfile, tokens: int) -> int:
    """Vocabulary entries that logits are computed for at a time."""
    chunked = profile.chunked_loss and profile.vocabulary > 0
    return chunk_width(tokens, profile.vocabulary) if chunked else profile.vocabulary


def root_footprint(profile: ModelProfile, recipe: Recipe, tokens: int) -> Footprint:
    """Of the embedding, the last norm (in float32) and the head, without the logits."""
    width = logits_width(profile, tokens)
    size, hidden = DTYPE_BYTES[compute_dtype(recipe.strategy)], profile.hidden
    autocast = recipe.strategy.kind == "ddp" and size < 4
    return Footprint(
        kept=(3 * size + 4) * hidden * tokens,
        output=size * hidden * tokens,
        widest=4 * hidden * tokens,
        casts=size * width * hidden if autocast else 0,
        products=2.0 * tokens * hidden * profile.vocabulary,
    )
