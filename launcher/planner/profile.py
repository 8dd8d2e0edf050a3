"""What the analytic estimate knows of a model: shapes of weights, bytes that autograd saves.

Autograd's bytes are counted in one forward pass on fake tensors.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Literal

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from launcher.models.initialization import materialize
from launcher.planner.fake import computing_as_on, keep_blocks
from launcher.planner.memory import pinned
from launcher.recipe.schema import Recipe, Strategy
from launcher.strategies.activation_checkpointing import kept_operations
from launcher.training.setup import PreparedModel, prepare_model

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


@dataclass
class Share:
    """What rank 0 holds of a group of weights."""

    masters: int = 0
    """Bytes."""
    trained: int = 0
    """Elements."""
    largest: int = 0
    """Bytes of the largest one."""
    pinned: int = 0
    """Bytes of the masters and of the gradients in pinned memory."""


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

        Adapters are left out: what they keep is kept for the frozen weights beside them.
        """
        kept = (w for w in self.parameters if not (self.adapted and w.trained))
        return [weight.shape for weight in kept if len(weight.shape) in (2, 3)]

    def share(self, shards: int, dtype_bytes: int) -> Share:
        """The shards of rank 0: fully_shard divides the first dimension and rounds up for it."""
        share = Share()
        for weight in self.parameters:
            first, *others = weight.shape or (1,)
            elements = -(-first // shards) * math.prod(others)
            size = dtype_bytes if self.adapted and not weight.trained else weight.size
            share.masters += elements * size
            share.largest = max(share.largest, elements * size)
            share.pinned += pinned(elements * size)
            if weight.trained:
                share.trained += elements
                share.pinned += pinned(4 * elements)
        return share


@dataclass
class Saved:
    """Bytes of one block and one sequence."""

    kept: int = 0
    """Saved by autograd."""
    selected: int = 0
    """Kept by selective checkpointing."""


@dataclass(frozen=True, kw_only=True)
class ModelProfile:
    """The properties of a model that memory and speed depend on."""

    device: Device
    block_names: tuple[str, ...]
    block_classes: tuple[int, ...]
    """Of each block its index in `classes`."""
    classes: tuple[Weights, ...]
    """Blocks with equal shapes are one class."""
    root: Weights
    """Weights outside of all blocks."""
    buffers: int
    """Bytes."""
    tied: bool
    """Input and output embedding are one."""
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
        """The weights of each block, those of the root last."""
        return [*(self.classes[kind] for kind in self.block_classes), self.root]

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
    prepared = prepare_model(recipe, device=torch.device(device), group=None)

    def group(parameters: Iterable[nn.Parameter]) -> Weights:
        weights = (Weight(tuple(p.shape), p.requires_grad, p.element_size()) for p in parameters)
        return Weights(tuple(weights), recipe.lora is not None)

    model: Any = prepared.model
    config = getattr(model, "config", None)
    blocks = [group(block.parameters()) for block in prepared.blocks.values()]
    classes = tuple(dict.fromkeys(blocks))
    kinds = tuple(classes.index(block) for block in blocks)
    inside = {id(p) for block in prepared.blocks.values() for p in block.parameters()}
    hidden = getattr(config, "hidden_size", None) or 0
    heads = getattr(config, "num_attention_heads", None) or 0
    head_size = getattr(config, "head_dim", None) or (hidden // heads if heads else 0)
    classifies = recipe.model.task == "sequence_classification"
    profile = ModelProfile(
        device=device,
        block_names=tuple(prepared.blocks),
        block_classes=kinds,
        classes=classes,
        root=group(p for p in model.parameters() if id(p) not in inside),
        buffers=sum(buffer.nbytes for buffer in model.buffers()),
        tied=_is_tied(model),
        hidden=hidden,
        vocabulary=0 if classifies else prepared.vocabulary or 0,
        heads=(heads, head_size),
        experts=getattr(config, "num_experts_per_tok", None) or 1,
        saved={},
    )
    # The last block of each class: in the first one of all fewer gradients are needed with LoRA
    lasts = {kind: index for index, kind in enumerate(kinds)}
    if not keep_blocks(prepared, sorted(lasts.values())):
        return profile
    order = sorted(lasts, key=lambda kind: lasts[kind])
    own = compute_dtype(recipe.strategy)
    try:  # the search offers bfloat16
        for dtype in {own, "bfloat16" if own == "float32" else own}:
            profile.saved[dtype] = _measure_saved(prepared, recipe, order, dtype, device)
    except Exception:  # models fail in various ways on tensors without values
        profile.saved.clear()
    return profile


def _measure_saved(
    prepared: PreparedModel, recipe: Recipe, order: list[int], dtype: str, device: Device
) -> dict[int, Saved]:
    """Counts what each block saves in the forward pass of one sequence. order: their classes."""
    batch = dataclasses.replace(recipe.batch, micro_batch_size=1, micro_batch_tokens=None)
    data = prepared.synthetic_data(recipe.data, batch)
    model = copy.deepcopy(prepared.model).train()
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(getattr(torch, dtype))
    cpu = torch.device("cpu")
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with fake:
        materialize(model, parameters=cpu, buffers=cpu)
        tensors = tree_map_only(torch.Tensor, torch.empty_like, data.tensors)
    seen: dict[int, Any] = {}  # keeps storages alive, so that no two have the same address
    found: dict[int, Saved] = defaultdict(Saved)
    current = Saved()

    def see(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in seen:
            seen[storage._cdata] = storage
            current.kept += storage.nbytes()
        return tensor

    def run(kind: int, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        nonlocal current
        outside, current = current, found[kind]
        try:
            with _Selected(current):
                return forward(*args, **kwargs)
        finally:
            current = outside

    for parameter in model.parameters():
        see(parameter)
    for kind, name in zip(order, prepared.blocks, strict=True):
        block: Any = model.get_submodule(name)
        block.forward = partial(run, kind, block.forward)
    hooks = torch.autograd.graph.saved_tensors_hooks(see, lambda tensor: tensor)
    with computing_as_on(device, data), fake, hooks:
        data.loss(model, tensors)
    return found


class _Selected(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up what selective checkpointing keeps: attention and every other matrix product."""

    def __init__(self, saved: Saved) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._saved, self._kept, self._products = saved, kept_operations(), 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        keeps = func in self._kept
        if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            self._products += 1
            keeps = self._products % 2 == 1
        for tensor in tree_leaves(out) if keeps else ():
            if isinstance(tensor, torch.Tensor):
                self._saved.selected += tensor.nbytes
        return out


def _is_tied(model: Any) -> bool:
    if not hasattr(model, "get_input_embeddings") or not hasattr(model, "get_output_embeddings"):
        return False
    modules = (model.get_input_embeddings(), model.get_output_embeddings())
    first, last = (getattr(module, "weight", None) for module in modules)
    return first is not None and first is last


@dataclass(frozen=True)
class Footprint:
    """One forward pass of a block, or of the root, in bytes."""

    kept: float
    """Saved by autograd."""
    selective: float
    """Kept by selective checkpointing beside the block's input."""
    output: float
    widest: float
    """The largest tensor."""
    casts: int
    """Copies of weights under autocast."""
    products: float
    """Floating-point operations of matrix products."""
    attention: float
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
    if dtype in profile.saved:
        rows, saved = tokens / recipe.data.sequence_length, profile.saved[dtype][kind]
        kept, selected = rows * saved.kept, rows * saved.selected
    else:
        ends = sum(times * (i + o) for i, o, times in matrices)
        kept = OVER_MATRICES * size * tokens * ends
        selected = SELECTED * kept
    heads, head_size = profile.heads
    return Footprint(
        kept=kept,
        selective=selected,
        output=size * profile.hidden * tokens,
        widest=size * tokens * max((times * max(i, o) for i, o, times in matrices), default=0),
        casts=size * weights.count if recipe.strategy.kind == "ddp" and size < 4 else 0,
        products=2.0 * tokens * sum(times * i * o for i, o, times in matrices),
        attention=2.0 * tokens * recipe.data.sequence_length * heads * head_size,
    )


def root_footprint(profile: ModelProfile, recipe: Recipe, tokens: int) -> Footprint:
    """Of the embedding, the last norm (in float32) and the head, without the logits."""
    size, hidden = DTYPE_BYTES[compute_dtype(recipe.strategy)], profile.hidden
    autocast = recipe.strategy.kind == "ddp" and size < 4
    return Footprint(
        kept=(3 * size + 4) * hidden * tokens,
        selective=0,
        output=size * hidden * tokens,
        widest=4 * hidden * tokens,
        casts=size * profile.vocabulary * hidden if autocast else 0,
        products=2.0 * tokens * hidden * profile.vocabulary,
        attention=0,
    )
