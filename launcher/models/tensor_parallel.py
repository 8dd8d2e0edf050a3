"""Tensor parallelism: each rank of a group holds a part of each layer, by transformers' plan.

A `colwise` layer computes some of its outputs on each rank, such as those of some attention heads,
and the `rowwise` layer after it takes them as inputs and sums its results over the ranks (Shoeybi
et al., 2019, arXiv 1909.08053). Divided parameters are DTensors, by which FSDP and checkpoints know
the division. Layers compute with local tensors and plain collectives.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from launcher.errors import RecipeError
from launcher.libraries import families
from launcher.libraries.families import COLUMN, EMBEDDING, GATHERED, ROW, SPLIT, WHOLE
from launcher.libraries.private import REDISTRIBUTE_LOGGER
from launcher.models import nf4
from launcher.models.adapted import base_layer, weights_adapted_in
from launcher.models.description import (
    Config,
    embeddings,
    largest_of_layers,
    layer_configs,
    modules_without_text,
    reads_embedding,
)
from launcher.models.experts import find_experts
from launcher.models.nf4 import row_unit, shape_of, with_parts
from launcher.models.nf4_layers import Nf4Linear
from launcher.models.record import record_of
from launcher.models.shards import chunks, local_part
from launcher.models.tensor_collectives import copied, gathered, summed

KEY = "strategy.tensor_parallel_size"
_DIMENSION = {COLUMN: 0, GATHERED: 0, EMBEDDING: 0, ROW: 1, SPLIT: 1}
"""The dimension of a layer's weight that the ranks divide."""
Styles = Mapping[str, str]
Forward = Callable[..., torch.Tensor]


def find_layers(model: nn.Module) -> dict[str, str]:
    """The entry of transformers' plan for each module and parameter of the model that has one, but
    for those of a vision tower, which text does not use."""
    plan = getattr(model, "tp_plan", None) or {}
    towers = {inner for module in modules_without_text(model) for inner in module.modules()}
    modules = {name: module for name, module in model.named_modules() if module not in towers}
    names = [
        *modules,
        *(
            name
            for name, _ in model.named_parameters(remove_duplicate=False)
            if name.rpartition(".")[0] in modules
        ),
    ]
    patterns = {name: re.sub(r"\.\d+(?=\.|$)", ".*", name) for name in names}
    return {name: plan[pattern] for name, pattern in patterns.items() if pattern in plan}


def sharded_layers(model: nn.Module, styles: Styles, size: int) -> Iterator[tuple[Any, int]]:
    """The layers of whose weights each of `size` ranks holds a part, and the dimension of the
    parts."""
    few = _few_heads(model, styles, size)
    for name, style in styles.items():
        if style in _DIMENSION and name not in few:
            yield base_layer(model.get_submodule(name)), _DIMENSION[style]


def divide_layers(model: nn.Module, mesh: DeviceMesh | PlannedMesh) -> list[tuple[nn.Module, str]]:
    """Shards the layers of a meta model, with its adapters, over the ranks of a mesh. Returns the
    parameters that each rank has whole and gets a part of the gradient of, as modules and names."""
    # It warns that a whole tensor, for an export, takes two all-gathers
    logging.getLogger(REDISTRIBUTE_LOGGER).setLevel(logging.ERROR)
    return _Division(model, find_layers(model), mesh).partly_summed


class PlannedGroup(dist.ProcessGroup):
    """A group of this many ranks, seen from the first one, whose collectives do nothing. Copies of a
    model share the group."""

    def __init__(self, ranks: int) -> None:
        super().__init__(0, ranks)  # type: ignore[call-arg]

    def __deepcopy__(self, memo: object) -> PlannedGroup:
        return self

    def _do_nothing(self, *arguments: Any) -> Any:
        """Takes the place of each collective."""

    allreduce: Any = _do_nothing
    allgather: Any = _do_nothing
    _allgather_base: Any = _do_nothing
    all_gather_single: Any = _do_nothing
    """`_allgather_base` since torch 2.13."""


@dataclass(frozen=True)
class PlannedMesh:
    """Takes the place of the mesh in a plan, which has no process group. The model gets the parts of
    the first rank as plain parameters, and its collectives do nothing."""

    ranks: int

    def size(self) -> int:
        """The number of ranks."""
        return self.ranks

    def get_local_rank(self) -> int:
        """The first rank."""
        return 0

    def get_group(self) -> PlannedGroup:
        """A group whose collectives do nothing."""
        return PlannedGroup(self.ranks)


def divides_attention(styles: Styles) -> bool:
    """Whether each rank computes some of the attention heads."""
    return any(style == COLUMN and "att" in path for path, style in styles.items())


class _Division:
    """Divides a model. `partly_summed` are the parameters that `divide_layers` returns."""

    def __init__(self, model: nn.Module, styles: Styles, mesh: DeviceMesh | PlannedMesh) -> None:
        self._mesh, self._group, self._rank = mesh, mesh.get_group(), mesh.get_local_rank()
        self._few, self._model = _few_heads(model, styles, mesh.size()), model
        self._inputs: dict[str, _SharedInput] = {}
        self.partly_summed: list[tuple[nn.Module, str]] = []
        first, head = embeddings(model)
        tied = head is not None and first.weight is head.weight
        for layer, dimension in sharded_layers(model, styles, mesh.size()):
            if not (tied and layer is head):
                self._divide(layer, dimension)
        for name, style in styles.items():
            module: Any = model.get_submodule(name)
            if style == WHOLE:
                self._add_partial(module)
            elif style == EMBEDDING:
                begin = chunks(module.num_embeddings, mesh.size())[self._rank].start
                module.forward = partial(_look_up, module, module.forward, self._group, begin)
            elif module is head:
                self._divide_head(head)
            elif style in (ROW, SPLIT):
                self._divide_row(module, split=style == SPLIT)
            else:
                self._divide_column(name, module, gather=style == GATHERED)
        if tied:
            head.weight = first.weight

    def _divide(self, module: nn.Module, dimension: int) -> None:
        for name, parameter in module._parameters.items():
            if parameter is None or dimension >= parameter.ndim:
                continue
            whole, mesh = parameter.detach(), self._mesh
            if dimension == 1:
                whole = with_parts(whole, mesh.size())
            if isinstance(mesh, PlannedMesh):
                part = whole.chunk(mesh.size(), dimension)[0].contiguous()
            else:
                part = distribute_tensor(whole, mesh, [Shard(dimension)], src_data_rank=None)
            module._parameters[name] = nn.Parameter(part, requires_grad=parameter.requires_grad)

    def _add_partial(self, module: nn.Module) -> None:
        own = module._parameters.items()
        self.partly_summed += [(module, name) for name, p in own if p is not None]

    def _divide_head(self, head: Any) -> None:
        parts = chunks(head.out_features, self._group.size())
        widths = [len(part) for part in parts]
        whole = partial(_gathered_head, head, self._group, widths)
        if (asked := record_of(self._model).head) is not None:
            asked.divide(self._group, parts[self._rank].start, whole)
        else:
            head.forward = whole

    def _divide_row(self, module: Any, *, split: bool) -> None:
        layer = base_layer(module)
        for adapted in weights_adapted_in(module):
            divided, whole = adapted.divided(1)
            self._divide(divided, 1)
            divided.forward = partial(_linear, divided)
            self._add_partial(whole)
        layer.forward = partial(_linear, layer, with_bias=False)
        module.forward = partial(_row, layer, module.forward, self._group, split)

    def _divide_column(self, name: str, module: Any, *, gather: bool) -> None:
        layer, size, rows = base_layer(module), self._group.size(), None
        self._adapt_groups(name, layer)
        if (heads := self._few.get(name)) is not None:
            rows = chunks(layer.out_features, heads)[self._rank * heads // size]
            self._add_partial(layer)
        for adapted in weights_adapted_in(module):
            divided, whole = adapted.divided(0)
            if rows is None:
                self._divide(divided, 0)
            else:
                self._add_partial(divided)
            self._add_partial(whole)
            divided.forward = partial(_linear, divided, rows=rows)
        layer.forward = partial(_linear, layer, rows=rows)
        widths = [len(part) for part in chunks(layer.out_features, size)] if gather else None
        shared = self._input_of(name)
        module.forward = partial(_column, module.forward, self._group, shared, widths)

    def _adapt_groups(self, name: str, layer: Any) -> None:
        """With fewer key heads than ranks, a key head of a rank belongs to all its query heads. A
        layer without `k_proj` takes keys from another one with as many heads (Gemma 4)."""
        parent: Any = self._model.get_submodule(name.rpartition(".")[0])
        width = getattr(parent, "head_dim", None)
        groups = getattr(parent, "num_key_value_groups", None)
        if not name.endswith("q_proj") or not width or not groups:
            return
        heads, size = layer.out_features // width, self._group.size()
        key_heads = heads // groups
        if key_heads % size and size % key_heads == 0:
            parent.num_key_value_groups = heads // size

    def _input_of(self, name: str) -> _SharedInput:
        parent = name.rpartition(".")[0]
        if parent not in self._inputs:
            self._inputs[parent] = _SharedInput(self._model.get_submodule(parent), self._group)
        return self._inputs[parent]


def _text_config(model: Any) -> Config:
    return model.config.get_text_config(decoder=True)


def _few_heads(model: nn.Module, styles: Styles, size: int) -> dict[str, int]:
    """The projections with fewer key heads than ranks, and their heads. Each rank has them whole,
    and computes the head that its query heads need."""
    found = {}
    for name, style in styles.items():
        parent, _, last = name.rpartition(".")
        if style == COLUMN and last in ("k_proj", "v_proj"):
            width = getattr(model.get_submodule(parent), "head_dim", None)
            layer = base_layer(model.get_submodule(name))
            heads = layer.out_features // width if width else 0
            if heads and heads % size and size % heads == 0:
                found[name] = heads
    return found


def check_layers(model: nn.Module, size: int) -> None:
    """Raises RecipeError if the model has no plan of transformers, or one that is not supported or whose
    layers cannot be divided by this number."""
    name, (first, head), styles = type(model).__name__, embeddings(model), find_layers(model)
    problems: dict[str, str] = {}
    if why := families.WITHOUT_TENSOR_PLAN.get(_text_config(model).model_type):
        raise RecipeError(f"{KEY}: the plan of transformers for {name} does not work: {why}; use 1")
    if EMBEDDING in styles.values() and reads_embedding(model):
        raise RecipeError(
            f"{KEY}: {name} reads the weight of its embedding beside looking tokens up, which each "
            "rank has a part of; use 1"
        )
    if any(getattr(_text_config(model), "activation_sparsity_pattern", None) or ()):
        raise RecipeError(
            f"{KEY}: {name} keeps the largest activations of a layer (activation_sparsity_pattern), "
            "of which each rank has a part; use 1"
        )
    modules = dict(model.named_modules())
    if not any(modules.get(path) not in (first, head) for path in styles):
        raise RecipeError(f"{KEY}: transformers has no plan for the layers of {name}; use 1")
    for path, style in styles.items():
        module = modules.get(path)
        known = nn.Embedding if style == EMBEDDING else nn.Linear
        if style == WHOLE and module is not None:
            continue
        if style not in _DIMENSION or module is None:
            problems.setdefault(style, f"{style} ({path})")
        elif not isinstance(base_layer(module), known) or (
            known is nn.Linear and type(base_layer(module)) not in (nn.Linear, Nf4Linear)
        ):
            kind = type(base_layer(module)).__name__
            problems.setdefault(style, f"{style} for {kind} ({path})")
        elif module is head and base_layer(module) is not module:
            problems["lora"] = f"adapters of {path}"
    if head is not None and first.weight is head.weight:
        if EMBEDDING not in styles.values():
            problems["tied"] = "a head that is tied to an embedding that is not divided"
        elif not any(modules.get(path) is head for path in styles):  # Gemma 3 in 5.17
            problems["tied"] = "a head that is not divided and tied to an embedding that is"
    if problems:
        what, instead = ", ".join(problems.values()), "use 1"
        if find_experts(model):
            instead += ", and strategy.expert_parallel_size to divide the experts"
        raise RecipeError(
            f"{KEY}: the plan for {name} has what is not supported: {what}; {instead}"
        )
    if (uneven := _indivisible(model, styles, size)) is not None:
        fits = range(1, largest_of_layers(_text_config(model), "num_attention_heads") + 1)
        sizes = ", ".join(str(n) for n in fits if _indivisible(model, styles, n) is None)
        raise RecipeError(f"{KEY}: {size} does not divide {uneven} of {name}; use one of {sizes}")


def _indivisible(model: nn.Module, styles: Styles, size: int) -> str | None:
    """What this number of ranks does not divide; None if it divides all."""
    few = _few_heads(model, styles, size)
    for layer in layer_configs(_text_config(model)) if divides_attention(styles) else ():
        heads = layer.num_attention_heads
        key_heads = getattr(layer, "num_key_value_heads", None) or heads
        if heads % size:
            return f"the {heads} attention heads"
        if key_heads % size and (not few or size % key_heads):
            return f"the {key_heads} key and value heads"
    for path, style in styles.items():
        if style in _DIMENSION and path not in few:
            weight = base_layer(model.get_submodule(path)).weight
            dimension, what = _DIMENSION[style], f"features of {path}"
            width, unit = shape_of(weight)[dimension], row_unit(weight) if dimension == 1 else 1
            if unit > 1:
                what = f"{what}, in blocks of {unit} for lora.quantize,"
            uneven = len(chunks(width, size)[-1]) == 0
            if style in (COLUMN, ROW) or unit > 1:
                uneven = width % (unit * size) != 0
            if uneven:
                return f"the {width} {what}"
    return None


def _linear(
    layer: Any, x: torch.Tensor, rows: range | None = None, *, with_bias: bool = True
) -> torch.Tensor:
    """A linear layer with this rank's part of its weight, or with some rows of the whole."""
    weight, bias = local_part(layer.weight), layer.bias if with_bias else None
    bias = None if bias is None else local_part(bias)
    if rows is not None:
        weight = weight[rows.start : rows.stop]
        bias = None if bias is None else bias[rows.start : rows.stop]
    return nf4.linear(x, weight, bias)


def _column(
    forward: Forward,
    group: dist.ProcessGroup,
    shared: _SharedInput,
    widths: Sequence[int] | None,
    x: torch.Tensor,
) -> torch.Tensor:
    """Some of the outputs; all of them if there are widths, those of each rank's part."""
    out = forward(shared.copy(x))
    return out if widths is None else gathered(out, group, widths)


def _row(
    layer: Any, forward: Forward, group: dist.ProcessGroup, split: bool, x: torch.Tensor
) -> torch.Tensor:
    """All outputs. `split`: x is whole, and each rank takes its part of the features."""
    if split:
        part = chunks(x.shape[-1], group.size())[group.rank()]
        x = copied(x, group)[..., part.start : part.stop]
    out = summed(forward(x), group)
    return out if layer.bias is None else out + layer.bias.to(out.dtype)


def _gathered_head(
    head: Any, group: dist.ProcessGroup, widths: Sequence[int], hidden: torch.Tensor
) -> torch.Tensor:
    return gathered(_linear(head, copied(hidden, group)), group, widths)


def _look_up(
    layer: Any, forward: Forward, group: dist.ProcessGroup, begin: int, ids: torch.Tensor
) -> torch.Tensor:
    """The embeddings of tokens by `forward`, the layer's own, which may scale them. This rank has
    the rows from `begin` on."""
    weight, whole, padding = (
        local_part(layer.weight),
        layer._parameters["weight"],
        layer.padding_idx,
    )
    inside = (ids >= begin) & (ids < begin + len(weight))
    if padding is not None:
        layer.padding_idx = padding - begin if 0 <= padding - begin < len(weight) else None
    layer._parameters["weight"] = weight
    try:
        found = forward(torch.where(inside, ids - begin, 0))
    finally:
        layer._parameters["weight"], layer.padding_idx = whole, padding
    return summed(found * inside.unsqueeze(-1), group)


class _SharedInput:
    """Replaces the forward method of a module, whose layers get one copy of their common input: the
    gradients of all of them are then summed by one all-reduce."""

    def __init__(self, parent: Any, group: dist.ProcessGroup) -> None:
        self._forward, self._group = parent.forward, group
        self._of: torch.Tensor | None = None
        self._copied: torch.Tensor | None = None
        parent.forward = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward method."""
        try:
            return self._forward(*args, **kwargs)
        finally:
            self._of = self._copied = None

    def copy(self, x: torch.Tensor) -> torch.Tensor:
        """`copied`, the same tensor for the same input."""
        if self._copied is None or x is not self._of:
            self._of, self._copied = x, copied(x, self._group)
        return self._copied
