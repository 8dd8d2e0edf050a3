"""Profiles what memory and speed of a model depend on."""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from launcher.models.description import (
    embeddings,
    experts_of_token,
    largest_of_layers,
    layer_configs,
    text_config,
)
from launcher.models.divided_recurrent import exchanged_features
from launcher.models.experts import find_experts
from launcher.models.head import computes_loss
from launcher.models.multi_token import prediction_layers
from launcher.models.nf4 import shapes
from launcher.models.pipeline import balanced, check_stages, ranges_of
from launcher.models.precision import computes_in_float32
from launcher.models.record import record_of
from launcher.models.recurrent import recurrent_layers
from launcher.models.tensor_parallel import (
    PlannedMesh,
    check_layers,
    divide_layers,
    divides_attention,
    find_layers,
)
from launcher.models.towers import unused_modules
from launcher.objectives.synthetic import SyntheticData
from launcher.optimizers.matrices import orthogonalized_parameters
from launcher.planner.fake import keep_blocks
from launcher.planner.memory import pinned
from launcher.planner.recipe_values import cache_key, with_random_weights
from launcher.recipe.objectives import SECTIONS
from launcher.recipe.schema import Recipe
from launcher.strategies.base import compute_dtype
from launcher.training.model import PreparedModel, prepare_model
from launcher.training.operators import Saved, saved_of_blocks

Device = Literal["cuda", "cpu"]


@dataclass(frozen=True)
class Weight:
    """One parameter."""

    shape: tuple[int, ...]
    trained: bool
    size: int
    """Bytes of an element as the model holds it (with adapters see `WeightGroup.adapted`)."""
    expert: bool = False
    """Whether it has a row for each expert, and expert parallelism can divide it."""
    packed: int = 0
    """Bytes of the whole weight in NF4; 0: it is not quantized."""
    orthogonalized: bool = False
    """Whether Muon orthogonalizes it."""
    exact: bool = False
    """Whether forward passes in 16 bits use it in float32."""

    @property
    def count(self) -> int:
        """Its number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class WeightGroup:
    """Parameters that are sharded and all-gathered together, each once: a block, or the root."""

    parameters: tuple[Weight, ...]
    adapted: bool
    """With adapters (LoRA) frozen weights are held in the compute dtype, if they are not exact."""

    @cached_property
    def count(self) -> int:
        """All elements."""
        return sum(weight.count for weight in self.parameters)

    @cached_property
    def trained(self) -> int:
        """Elements of trained weights."""
        return sum(weight.count for weight in self.parameters if weight.trained)

    @cached_property
    def largest_trained(self) -> int:
        """Elements of the largest trained weight."""
        return max((weight.count for weight in self.parameters if weight.trained), default=0)

    @cached_property
    def matrices(self) -> list[tuple[int, ...]]:
        """Shapes of the weights in matrix products: two dimensions, three with experts. Adapters
        do not count: their inputs are kept for the frozen weights that they adapt."""
        kept = (w for w in self.parameters if not (self.adapted and w.trained))
        return [weight.shape for weight in kept if len(weight.shape) in (2, 3)]

    @cached_property
    def has_experts(self) -> bool:
        """Whether it has weights of experts."""
        return any(weight.expert for weight in self.parameters)

    def on_each_of(self, ranks: int) -> WeightGroup:
        """These weights without the experts that the other ranks of an expert parallel group
        hold."""
        divided = (
            dataclasses.replace(w, shape=(w.shape[0] // ranks, *w.shape[1:])) if w.expert else w
            for w in self.parameters
        )
        return dataclasses.replace(self, parameters=tuple(divided)) if ranks > 1 else self

    def used(self, experts: int) -> float:
        """Elements that a token uses, of so many experts."""
        return sum(w.count * (experts / w.shape[0] if w.expert else 1) for w in self.parameters)

    @cached_property
    def quantized(self) -> list[int]:
        """Elements of each weight in NF4."""
        return [weight.count for weight in self.parameters if weight.packed]

    @cached_property
    def _packed(self) -> int:
        return sum(weight.packed for weight in self.parameters)

    def unsharded(self, dtype_bytes: int) -> int:
        """Bytes of all weights as FSDP gathers them."""
        more = (4 - dtype_bytes) * self._exact
        return self._packed + dtype_bytes * (self.count - sum(self.quantized)) + more

    @cached_property
    def _exact(self) -> int:
        return sum(weight.count for weight in self.parameters if weight.exact)

    def sizes(self, dtype_bytes: int) -> list[int]:
        """Bytes of each parameter as the model holds it, for a compute dtype of `dtype_bytes`."""
        return [
            weight.packed or weight.count * self._held(weight, dtype_bytes)
            for weight in self.parameters
        ]

    def _held(self, weight: Weight, dtype_bytes: int) -> int:
        """Bytes of an element of a weight as the model holds it."""
        in_compute_dtype = self.adapted and not (weight.trained or weight.exact)
        return dtype_bytes if in_compute_dtype else weight.size

    def copied(self, dtype_bytes: int) -> int:
        """Bytes of copies in a compute dtype of `dtype_bytes` of the weights in another dtype."""
        return sum(
            dtype_bytes * weight.count
            for weight in self.parameters
            if not (weight.packed or weight.exact)
            and self._held(weight, dtype_bytes) != dtype_bytes
        )

    def pinned(self, shards: int, dtype_bytes: int) -> int:
        """Bytes of pinned memory that shards and their gradients take."""
        weights = sum(pinned(size // shards) for size in self.sizes(dtype_bytes))
        return weights + self.pinned_gradients(shards)

    def pinned_gradients(self, shards: int) -> int:
        """Bytes of pinned memory that the gradients of the shards take."""
        return sum(
            pinned(4 * weight.count // shards) for weight in self.parameters if weight.trained
        )


@dataclass(frozen=True)
class TowerProfile:
    """The towers of a model whose rows have attachments: blocks that run before those of text. The
    rest of the towers and their projectors are parts of the root."""

    blocks: tuple[WeightGroup, ...] = ()
    patches: int = 0
    """Patches of the attachments of a row that is full of the largest ones."""
    pixels: int = 0
    """Bytes of the pixels of these attachments."""
    products: float = 0.0
    """Operations of the matrix products of a forward pass of all blocks, for such a row."""
    attention: float = 0.0
    """The same of attention."""
    spans: tuple[tuple[int, int], ...] = ()
    """The first token of each of these attachments in its row, and the one after its last."""
    kinds: tuple[str, ...] = ()
    """The kinds whose largest attachment is known. Rows are full of those of the first one."""
    limited: bool = False
    """Whether the processor has a limit of pixels of these."""
    saved: dict[torch.dtype, Saved] = dataclasses.field(default_factory=dict)
    """What a block saves for such a row, by compute dtype. Empty if the model does not run on fake
    tensors."""
    autocast: Saved | None = None
    """What a block saves with DDP in 16 bits."""

    @property
    def trained(self) -> bool:
        """Whether the blocks have a backward pass."""
        return any(block.trained for block in self.blocks)

    def share(self, parts: int, length: int) -> float:
        """The largest share of the attachments of a row of so many tokens that one of the context
        parallel ranks computes: those of which its part of the row has a token."""
        width = -(-length // parts)
        counts = [
            sum(first < start + width and end > start for first, end in self.spans)
            for start in range(0, length, width)
        ]
        return max(counts) / len(self.spans) if self.spans else 1.0


@dataclass(frozen=True, kw_only=True)
class ModelProfile:
    """A model, as far as memory and speed depend on it."""

    device: Device
    block_classes: tuple[int, ...]
    """For each block, its index in `classes`."""
    classes: tuple[WeightGroup, ...]
    """Blocks with equal shapes are one class."""
    embedding: WeightGroup
    """The input embedding if it is a unit of FSDP, which then reduces it last; otherwise empty."""
    root: WeightGroup
    """All other weights outside of the blocks. FSDP reduces them last if `embedding` is empty."""
    unused: WeightGroup
    """Frozen weights that neither text nor attachments of the rows use: sharded, and never gathered."""
    tower: TowerProfile = TowerProfile()
    """Empty if rows are text."""
    buffers: int
    """Bytes of the buffers."""
    chunked_loss: bool
    """Whether logits are computed for a chunk of the vocabulary at a time."""
    hidden: int
    depths: int = 0
    """Layers of multi-token prediction that are trained. They are the last blocks, and each of them
    asks the head once more."""
    vocabulary: int
    """Width of the logits; 0 without a language model's head."""
    heads: tuple[int, int]
    """Number of attention heads, size of each; zeros where they are not known."""
    key_heads: int = 0
    """Number of heads of keys and values."""
    recurrent: tuple[int, ...] = ()
    """For each block, the features of a token that context parallel ranks exchange in its recurrent
    layers, of values of the compute dtype; 0: it has attention. Empty: all have attention."""
    packed_attention: bool
    """Whether all layers that mix tokens are attention by the kernel for packed documents."""
    experts: int
    """Experts that a token is sent to."""
    saved: dict[torch.dtype, dict[int, Saved]]
    """What a block saves for one sequence, by compute dtype and class. Empty if the model does not
    run on fake tensors: then the shapes of the weights are used."""
    autocast: dict[int, Saved] = dataclasses.field(default_factory=dict)
    """What a block saves for one sequence with DDP, by class. DDP computes in 16 bits by autocast:
    norms and sums stay in float32, and adapters read casts of their inputs. Empty if `saved` is."""
    undivided: ModelProfile | None = None
    """The profile of the whole model, if this is the profile of a tensor parallel rank's part."""

    @cached_property
    def groups(self) -> list[WeightGroup]:
        """All weights that are used: those of each block, first of the tower, then of the embedding
        and of the root."""
        blocks = [self.classes[kind] for kind in self.block_classes]
        return [*self.tower.blocks, *blocks, self.embedding, self.root]

    @cached_property
    def orthogonalized(self) -> list[tuple[int, ...]]:
        """Shapes of the weights that Muon orthogonalizes."""
        weights = (weight for block in self.groups[:-2] for weight in block.parameters)
        return [weight.shape for weight in weights if weight.trained and weight.orthogonalized]

    @cached_property
    def parameters(self) -> int:
        """Elements of all weights that are used."""
        return sum(group.count for group in self.groups)

    def held(self, dtype_bytes: int) -> int:
        """Bytes of all weights as the model holds them, for a compute dtype of `dtype_bytes`."""
        return sum(sum(group.sizes(dtype_bytes)) for group in (*self.groups, self.unused))

    @cached_property
    def dense(self) -> int:
        """Elements of all weights that are not in NF4."""
        return self.parameters - sum(sum(group.quantized) for group in self.groups)

    def unsharded(self, dtype_bytes: int) -> int:
        """Bytes of all weights as FSDP gathers them."""
        return sum(group.unsharded(dtype_bytes) for group in self.groups)

    @cached_property
    def trained(self) -> int:
        """Elements of all trained weights."""
        return sum(group.trained for group in self.groups)


def costs_of_blocks(profile: ModelProfile) -> list[float]:
    """What the blocks compute, in relation to each other; the last one with the head. See
    `launcher.models.pipeline.stages_of`."""
    costs = [float(profile.classes[kind].used(profile.experts)) for kind in profile.block_classes]
    costs[-1] += profile.root.count
    return costs


def stages_of_profile(
    profile: ModelProfile, count: int, blocks_of_stages: Sequence[int] | None
) -> list[range]:
    """The blocks of each of the stages of a pipeline. Raises RecipeError if the model cannot have
    them."""
    check_stages(len(profile.block_classes), count, blocks_of_stages)
    if blocks_of_stages is not None:
        return ranges_of(blocks_of_stages)
    return _balanced(tuple(costs_of_blocks(profile)), count)


@functools.cache
def _balanced(costs: tuple[float, ...], count: int) -> list[range]:
    found = balanced(costs, count)
    assert found is not None
    return found


def profile_of_blocks(
    profile: ModelProfile, blocks: Sequence[int], *, first: bool, last: bool
) -> ModelProfile:
    """The profile of what a rank of a pipeline has: the blocks with these numbers; `first` and `last` say
    whether it has the first and the last stage."""
    empty = WeightGroup((), profile.root.adapted)
    tied = not profile.embedding.count  # then the root has the weight of both
    return dataclasses.replace(
        profile,
        block_classes=tuple(profile.block_classes[index] for index in blocks),
        recurrent=tuple(profile.recurrent[index] for index in blocks) if profile.recurrent else (),
        embedding=profile.embedding if first else empty,
        root=profile.root if last or (first and tied) else empty,
        unused=profile.unused if first else empty,
        tower=profile.tower if first else TowerProfile(),
        vocabulary=profile.vocabulary if last else 0,
    )


_PROFILES: dict[str, ModelProfile] = {}
_PREPARED: dict[str, PreparedModel] = {}
"""Caches, by what they depend on."""


def original_model(recipe: Recipe, *, device: Device) -> PreparedModel:
    """The result of `prepare_model`. It is cached, so it must not be changed."""
    strategy, seed = recipe.strategy, recipe.run.seed
    model = dataclasses.replace(recipe.model, keep_logits="auto")  # it does not change the model
    depends = (model, recipe.attachments, recipe.lora, recipe.data, recipe.checkpoint, seed)
    objective = [getattr(recipe, name) for name in SECTIONS]
    key = cache_key(*depends, *objective, strategy.kind, strategy.mixed_precision, device)
    if recipe.model.builder is not None:  # a user's model, which may not support copies
        return prepare_model(recipe, device=torch.device(device))
    if key not in _PREPARED:
        _PREPARED[key] = prepare_model(recipe, device=torch.device(device))
    return _PREPARED[key]


def prepared_model(
    recipe: Recipe, *, device: Device, blocks: Collection[int] | None = None
) -> PreparedModel:
    """The result of `prepare_model` with a copy of the model, because building the model again
    takes a second. With `blocks`, all other blocks are empty modules, which the caller must delete:
    copying them would take as long as a trace."""
    prepared = original_model(recipe, device=device)
    if recipe.model.builder is not None:
        return prepared
    parts = (prepared.model, prepared.units, prepared.tower)
    copies: dict[int, Any] = {}
    if blocks is not None:
        named = enumerate(prepared.description.blocks.values())
        copies = {id(block): nn.Identity() for index, block in named if index not in blocks}
    model, units, tower = copy.deepcopy(parts, copies)
    return dataclasses.replace(prepared, model=model, units=units, tower=tower)


def profile_model(recipe: Recipe, *, device: Device) -> ModelProfile:
    """Profiles the recipe's model without weights, data or a GPU. Results are cached.

    Raises RecipeError as `prepare_model`.
    """
    mixed = recipe.strategy.mixed_precision
    divided = recipe.strategy.tensor_parallel_size
    model = dataclasses.replace(with_random_weights(recipe).model, keep_logits="auto")
    compiled = recipe.model.compiles
    attachments = recipe.attachments
    key = cache_key(model, attachments, recipe.lora, recipe.data, mixed, device, divided, compiled)
    if key not in _PROFILES:
        _PROFILES[key] = _profile(recipe, device)
    return _PROFILES[key]


def _profile(recipe: Recipe, device: Device) -> ModelProfile:
    compiled = recipe.model.compiles
    recipe = with_random_weights(recipe)
    prepared = prepared_model(recipe, device=device)
    profile = profile_of_shapes(prepared, recipe, device=device)
    own = compute_dtype(recipe.strategy)
    offered = torch.bfloat16 if own == torch.float32 else own  # by the search
    return with_saved(profile, prepared, recipe, dtypes={own, offered}, compiled=compiled)


def profile_of_shapes(prepared: PreparedModel, recipe: Recipe, *, device: Device) -> ModelProfile:
    """The profile of a prepared model without what its blocks save. With tensor parallelism it is
    the profile of the first rank's part. Raises RecipeError if the model has none of this size."""
    whole = _profile_of_shapes(prepared, prepared.model, recipe, device=device)
    size = recipe.strategy.tensor_parallel_size
    if size == 1 or recipe.strategy.kind == "ddp":
        return whole
    model = copy.deepcopy(prepared.model)
    check_layers(model, size)
    divide_layers(model, PlannedMesh(size))
    part = _profile_of_shapes(prepared, model, recipe, device=device)
    (heads, head_size), key_heads = whole.heads, whole.key_heads
    if divides_attention(find_layers(model)):
        heads, key_heads = heads // size, max(1, key_heads // size)
    head, vocabulary = embeddings(model)[1], part.vocabulary
    if head is not None:
        vocabulary = min(vocabulary, len(head.weight))
    return dataclasses.replace(
        part,
        heads=(heads, head_size),
        key_heads=key_heads,
        vocabulary=vocabulary,
        undivided=whole,
    )


def _profile_of_shapes(
    prepared: PreparedModel, model: Any, recipe: Recipe, *, device: Device
) -> ModelProfile:
    stacked = {id(p) for module in find_experts(model).values() for p in module.parameters()}
    blocks = [model.get_submodule(name) for name in prepared.description.blocks]
    matrices = {id(p) for p in orthogonalized_parameters(model, blocks).values()}
    half = torch.float16 if compute_dtype(recipe.strategy) == torch.float16 else torch.bfloat16
    in_float32 = {id(p) for p in computes_in_float32(model, half)}
    shape_of = shapes(model)

    def group(parameters: Iterable[nn.Parameter]) -> WeightGroup:
        weights = []
        for p in parameters:
            shape, packed = tuple(shape_of[p]), p.nbytes if shape_of[p] != p.shape else 0
            expert, matrix = id(p) in stacked, id(p) in matrices
            exact = id(p) in in_float32
            size = p.element_size()
            weights.append(Weight(shape, p.requires_grad, size, expert, packed, matrix, exact))
        return WeightGroup(tuple(weights), recipe.lora is not None)

    config = text_config(model)

    # Layers of multi-token prediction run after the blocks, and are units as these are
    units = [model.get_submodule(name) for name in prepared.description.blocks]
    layers, depths = prediction_layers(model).values(), _trained_depths(model)
    units += layers if depths else ()
    blocks = [group(block.parameters()) for block in units]
    classes = tuple(dict.fromkeys(blocks))
    kinds = tuple(classes.index(block) for block in blocks)
    alone = any(not unit.used_in_backward for unit in prepared.units)
    first = embeddings(model)[:1] if alone else ()
    unused = [*unused_modules(model), *(() if depths else layers)]
    tower = [model.get_submodule(name) for name in prepared.tower]
    inside = {id(p) for unit in (*first, *units, *tower, *unused) for p in unit.parameters()}
    hidden = largest_of_layers(config, "hidden_size")
    heads = largest_of_layers(config, "num_attention_heads")
    # The mean of layers: those of Gemma 4 with full attention have wider heads
    widths = [getattr(layer, "head_dim", None) or 0 for layer in layer_configs(config)]
    head_size = round(sum(widths) / len(widths)) or (hidden // heads if heads else 0)
    return ModelProfile(
        device=device,
        block_classes=kinds,
        classes=classes,
        embedding=group(p for unit in first for p in unit.parameters()),
        root=group(p for p in model.parameters() if id(p) not in inside),
        unused=group(p for module in unused for p in module.parameters()),
        tower=_tower_profile(prepared, recipe, [group(block.parameters()) for block in tower]),
        buffers=sum(buffer.nbytes for buffer in model.buffers()),
        chunked_loss=computes_loss(prepared.model),
        hidden=hidden,
        depths=depths,
        vocabulary=_logits_per_token(recipe, prepared),
        heads=(heads, head_size),
        key_heads=largest_of_layers(config, "num_key_value_heads") or heads,
        recurrent=tuple(map(exchanged_features, units)) if recurrent_layers(model) else (),
        packed_attention=record_of(prepared.model).document_masking == "varlen",
        experts=experts_of_token(config) or 1,
        saved={},
    )


def _trained_depths(model: nn.Module) -> int:
    layers = record_of(model).multi_token
    return layers.depths if layers is not None and layers.settings.train else 0


def _one_row(prepared: PreparedModel, recipe: Recipe) -> SyntheticData:
    batch = dataclasses.replace(recipe.batch, micro_batch_size=1, micro_batch_tokens=None)
    return prepared.synthetic_data(recipe.data, batch)


def _tower_profile(
    prepared: PreparedModel, recipe: Recipe, blocks: list[WeightGroup]
) -> TowerProfile:
    """The profile of a tower with these blocks, without what they save."""
    kinds = tuple(modality.kind for modality in prepared.planned.modalities)
    made = TowerProfile(tuple(blocks), kinds=kinds)
    if not prepared.planned.modalities:
        return made
    first = prepared.planned.modalities[0].tower
    assert first is not None
    made = dataclasses.replace(made, limited=first.form.limited)
    attachments = _one_row(prepared, recipe).micro_batch.inputs["attachments"]
    for modality in prepared.planned.modalities:
        given, tower = attachments[modality.kind], modality.tower
        assert tower is not None
        places, arguments = given["positions"].numpy(), given["tower"]
        products, attention = tower.forward_operations(arguments, len(places))
        pixels = sum(t.nbytes for name, t in arguments.items() if name.startswith("pixel_values"))
        runs = np.split(places, np.flatnonzero(np.diff(places) > 1) + 1)
        spans = ((int(run[0]), int(run[-1]) + 1) for run in runs if len(run))
        made = dataclasses.replace(
            made,
            patches=made.patches + tower.patches(arguments),
            pixels=made.pixels + pixels,
            products=made.products + products,
            attention=made.attention + attention,
            spans=(*made.spans, *spans),
        )
    return made


def _logits_per_token(recipe: Recipe, prepared: PreparedModel) -> int:
    """The number of logits per token, as a mean over all tokens."""
    vocabulary = 0 if recipe.model.classifies else prepared.description.vocabulary or 0
    return round(vocabulary * prepared.objective.target_share)


def with_saved(
    profile: ModelProfile,
    prepared: PreparedModel,
    recipe: Recipe,
    *,
    dtypes: set[torch.dtype],
    compiled: bool = False,
) -> ModelProfile:
    """The profile with what blocks save in each of these dtypes, if the model runs on fake tensors,
    and with `compiled` what they save if they are compiled. Deletes blocks of the prepared model."""
    if profile.undivided is not None:
        divide_layers(prepared.model, PlannedMesh(recipe.strategy.tensor_parallel_size))
    kinds = profile.block_classes
    # The last block of each class: with LoRA the first block of a model needs fewer gradients
    count = len(prepared.description.blocks)
    lasts = {kind: index for index, kind in enumerate(kinds[:count])}
    if not keep_blocks(prepared.model, sorted(lasts.values())):
        return profile
    kind_of = dict(
        zip(prepared.description.blocks, sorted(lasts, key=lasts.__getitem__), strict=True)
    )
    if profile.depths:
        kind_of |= zip(prediction_layers(prepared.model), kinds[count:], strict=True)
    data = _one_row(prepared, recipe)
    of_tower: dict[tuple[torch.dtype, bool], Saved] = {}
    # Its blocks are alike; that of the first one includes what the others share
    last_of_tower = list(prepared.tower)[-1:] if prepared.planned.modalities else []

    def of_classes(dtype: torch.dtype, *, autocast: bool = False) -> dict[int, Saved]:
        of_blocks = saved_of_blocks(
            prepared.model,
            [*last_of_tower, *kind_of],
            data,
            device=profile.device,
            dtype=dtype,
            autocast=autocast,
            compiled=compiled,
        )
        for name in last_of_tower:
            of_tower[dtype, autocast] = of_blocks.pop(name)
        return {kind_of[name]: block for name, block in of_blocks.items()}

    try:
        saved = {dtype: of_classes(dtype) for dtype in dtypes}
        half = min(dtypes, key=lambda dtype: dtype.itemsize)
        casts = profile.undivided is None and half != torch.float32
        autocast = of_classes(half, autocast=True) if casts else {}
    except Exception:  # models fail in various ways on tensors without values
        return profile
    tower = dataclasses.replace(
        profile.tower,
        saved={dtype: block for (dtype, casts), block in of_tower.items() if not casts},
        autocast=of_tower.get((half, True)),
    )
    return dataclasses.replace(profile, saved=saved, autocast=autocast, tower=tower)
