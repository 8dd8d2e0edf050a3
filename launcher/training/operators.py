"""Operators of a block: what autograd saves, what they cost, and which ones a memory budget keeps.

They are recorded in a forward pass on fake tensors, so that all ranks get the same result.
"""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ParamSpec, TypeVar

import numpy as np
import torch
from torch import nn
from torch.func import functional_call
from torch.utils.flop_counter import flop_registry

from launcher.console import bytes_as_text
from launcher.errors import RecipeError, first_line
from launcher.libraries.private import (
    OpOverload,
    PlainDispatch,
    TorchDispatchMode,
    is_mutable,
    saved_by_partition,
    storage_id,
    tree_leaves,
    tree_map_only,
)
from launcher.models.initialization import materialize
from launcher.models.nf4 import PAIRS
from launcher.objectives.synthetic import SyntheticData
from launcher.recipe.section import size_in_bytes
from launcher.strategies.activation_checkpointing import ATTENTION, PRODUCTS, Kept, is_random
from launcher.training.fake_tensors import ShapesMode, computing_as_on

_P = ParamSpec("_P")
_T = TypeVar("_T")
OPERATIONS_PER_BYTE = {"cuda": 150, "cpu": 3}
"""Floating-point operations of matrix products in the time of one byte of memory traffic: 110 on an
A100, 200 on an H100, 3 on a core of an AMD EPYC (benchmarks/README.md). Constants, because all
ranks must choose the same operators."""
STEPS = 4096
"""Parts that a budget is divided into; sizes of operators are rounded up to whole parts."""


@dataclass(frozen=True)
class Operator:
    """A call in the forward pass of a block."""

    function: OpOverload
    call: int
    """The number of the call, from 0, among the block's calls of this function."""
    size: int
    """Bytes of its results."""
    cost: float
    """Cost of recomputing it, as the bytes of memory traffic that take the same time."""
    attention: bool


@dataclass
class Saved:
    """Bytes that the forward pass of one block saves."""

    kept: int = 0
    """Saved by autograd."""
    selected: int = 0
    """Kept by selective checkpointing without a budget, in addition to the input of the block."""
    input: int = 0
    cost: float = 0.0
    """Cost of all operators."""
    moved: int = 0
    """Bytes that all operators except matrix products and attention read and write."""
    launches: int = 0
    """Number of operators that compute something."""
    operators: list[Operator] = field(default_factory=list)
    """Operators that recomputation runs, unless their results are kept."""
    compiled: int | None = None
    """Bytes that the block saves if it is compiled; None: not known."""

    def keep(self, share: float) -> list[Operator]:
        """The operators to keep when a block may keep this share of `kept`: attention if it fits,
        and the other operators with the highest total cost."""
        left = math.floor(share * self.kept) - self.input
        attention = [operator for operator in self.operators if operator.attention]
        others = [o for o in self.operators if not o.attention and o.cost]
        size = sum(operator.size for operator in attention)
        if size > left:
            attention, size = [], 0
        return attention + _knapsack(others, left - size)


def _knapsack(operators: Sequence[Operator], capacity: int) -> list[Operator]:
    """Chooses the operators with the highest sum of costs whose results take at most `capacity`
    bytes together. Dynamic programming over sizes finds them to within 1 % of the capacity."""
    if capacity <= 0:
        return []
    unit = -(-capacity // STEPS)
    best = np.zeros(capacity // unit + 1)
    takes = []
    for operator in operators:
        size = max(1, -(-operator.size // unit))
        taken = np.full_like(best, -1.0)
        taken[size:] = best[: max(0, len(best) - size)] + operator.cost
        takes.append((size, taken > best))
        best = np.maximum(best, taken)
    chosen, left = [], len(best) - 1
    for operator, (size, take) in zip(reversed(operators), reversed(takes), strict=True):
        if take[left]:
            chosen.append(operator)
            left -= size
    return chosen


def share_of_budget(budget: str | float, whole: float) -> float:
    """The budget as a share of `whole`, the bytes that all blocks keep without checkpointing."""
    if not isinstance(budget, str):
        return budget
    return min(1.0, (size_in_bytes(budget) or 0) / whole)


def operators_to_keep(
    model: nn.Module,
    blocks: dict[str, nn.Module],
    data: SyntheticData,
    *,
    budget: str | float,
    dtype: torch.dtype,
    autocast: bool,
    device: str,
    depth: int,
) -> dict[str, Kept]:
    """What `activation_checkpointing.budget` keeps of each block, with full micro-batches `data`.
    Blocks compute in `dtype`, with `autocast` from weights in float32.

    `depth` is the number of blocks that the budget is for; a trace has fewer. Raises RecipeError if
    the model does not run on fake tensors, or if the budget is less than the inputs of the blocks.
    """
    if not blocks:
        return {}
    shapes = {name: shapes_of(block) for name, block in blocks.items()}
    last = {kind: name for name, kind in shapes.items()}
    alike = {name: last[kind] for name, kind in shapes.items()}  # the last block of each kind
    key = "activation_checkpointing.budget"
    try:
        saved = saved_of_blocks(
            model,
            list(last.values()),
            data,
            device=device,
            dtype=dtype,
            autocast=autocast and dtype != torch.float32,
        )
    except Exception as error:  # models fail in various ways on tensors without values
        why = f"{type(error).__name__}: {first_line(error)}"
        what = f"the model does not run on fake tensors ({why})"
        raise RecipeError(f"{key}: {what}; use mode selective without a budget") from error
    each = [saved[alike[name]] for name in blocks]
    whole = sum(block.kept for block in each) * depth / len(each)
    inputs = sum(block.input for block in each) * depth / len(each)
    share = share_of_budget(budget, whole)
    if share * whole < inputs:
        what = f"{budget} is less than the inputs of {depth} blocks, {bytes_as_text(inputs)}"
        advice = f"without checkpointing they keep {bytes_as_text(whole)}"
        raise RecipeError(f"{key}: {what}; {advice}")
    kept = {}
    for name, block in saved.items():
        chosen = block.keep(share)
        calls = frozenset((o.function, o.call) for o in chosen if not o.attention)
        kept[name] = Kept(any(o.attention for o in chosen), calls)
    return {name: kept[alike[name]] for name in blocks}


def shapes_of(block: nn.Module) -> tuple[object, ...]:
    """A key that is equal for blocks with parameters of equal names, shapes and dtypes."""
    named = block.named_parameters()
    shapes = ((name, tuple(p.shape), p.requires_grad, p.dtype) for name, p in named)
    return (type(block), *shapes)


def saved_of_blocks(
    model: nn.Module,
    names: Iterable[str],
    data: SyntheticData,
    *,
    device: str,
    dtype: torch.dtype,
    autocast: bool = False,
    compiled: bool = False,
) -> dict[str, Saved]:
    """What these blocks save in the forward pass of a micro-batch on this kind of device.

    With `autocast`, operators compute in `dtype` by autocast; otherwise weights are cast, as FSDP
    does. `compiled`: also what they save if they are compiled, which takes a second for each. The
    model is on the meta device, and is copied.
    """
    model = copy.deepcopy(model).train()
    for parameter in model.parameters():
        if parameter.is_floating_point() and not autocast:
            parameter.data = parameter.data.to(dtype)
    cpu = torch.device("cpu")
    fake = ShapesMode()
    with fake:
        materialize(model, parameters=cpu, buffers=cpu)
        tensors = data.micro_batch.mapped(partial(tree_map_only, torch.Tensor, torch.empty_like))
    saved: dict[str, Saved] = {}
    # Storages are kept alive, so that no two have the same address
    seen = {id_of(tensor): tensor.untyped_storage() for tensor in model.parameters()}
    weights = {*seen, id_of(PAIRS)}
    counted = dict(seen)

    def run(name: str, forward: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        recorder = _Recorder(weights, seen, OPERATIONS_PER_BYTE[device])
        with torch.autograd.graph.saved_tensors_hooks(recorder.see, lambda x: x), recorder:
            out = forward(*args, **kwargs)
        size = max((x.nbytes for x in args if isinstance(x, torch.Tensor)), default=0)
        saved[name] = recorder.saved(size)
        if compiled:
            block = model.get_submodule(name)
            saved[name].compiled = _saved_if_compiled(block, forward, (args, kwargs), counted)
        return out

    for name in names:
        block = model.get_submodule(name)
        block.forward = partial(run, name, block.forward)
    context = torch.autocast("cpu", dtype=dtype) if autocast else nullcontext()
    with computing_as_on(device, data), fake, context:
        data.loss(model, tensors)
    return saved


def _saved_if_compiled(
    block: nn.Module,
    forward: Callable[..., object],
    inputs: tuple[object, object],
    seen: dict[int, torch.UntypedStorage],
) -> int | None:
    """Bytes that a compiled block saves for the backward pass, without weights and without what is
    in `seen`, to which its inputs are added; None if that is not known."""
    weights, own = dict(block.named_parameters()), block.forward

    def of_weights(weights: dict[str, torch.Tensor], inputs: tuple[Any, Any]) -> object:
        block.forward = forward
        try:
            return functional_call(block, weights, *inputs)
        finally:
            block.forward = own

    try:
        storages = saved_by_partition(of_weights, (weights, inputs))
    except Exception:  # models fail in various ways without values; torch lacks a private name
        return None
    flat, total = tree_leaves((weights, inputs)), 0
    for index, size in storages:
        given = None if index is None else flat[index]
        if isinstance(given, torch.Tensor):
            if id_of(given) in seen:
                continue
            seen[id_of(given)] = given.untyped_storage()
        total += size
    return total


class _Recorder(PlainDispatch, TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the operators of a block's forward pass, and what autograd saves of them."""

    def __init__(
        self, weights: set[int], seen: dict[int, torch.UntypedStorage], operations_per_byte: int
    ) -> None:
        """`weights` are ids of the model's parameters, and `seen` the storages that were saved
        before, by id."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._weights, self._seen = set(weights), seen
        self._operations_per_byte = operations_per_byte
        self._calls: Counter[OpOverload] = Counter()
        self._made: list[tuple[Operator, list[torch.UntypedStorage]]] = []
        """Operators with the storages of their results."""
        self._needed = 0
        """The number of operators that recomputation runs. It stops after the last operator of
        which autograd saves a tensor."""
        self._kept = self._selected = self._products = self._moved = 0
        self._written: set[int] = set()

    def see(self, tensor: torch.Tensor) -> torch.Tensor:
        """Counts the storages that autograd saves, each once. Casts of weights are not
        activations."""
        self._needed = len(self._made)
        if id_of(tensor) not in self._seen and id_of(tensor) not in self._weights:
            self._seen[id_of(tensor)] = tensor.untyped_storage()
            self._kept += tensor.untyped_storage().nbytes()
        return tensor

    def saved(self, input_size: int) -> Saved:
        """The recorded operators and sizes of a block whose input has `input_size` bytes."""
        operators = [
            operator
            for operator, storages in self._made[: self._needed]
            if operator.size and not any(storage_id(s) in self._written for s in storages)
        ]
        cost = sum(operator.cost for operator, _ in self._made)
        return Saved(
            self._kept,
            self._selected,
            input_size,
            cost,
            self._moved,
            len(self._made),
            operators,
        )

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: object,
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        out = func(*args, **(kwargs or {}))
        read = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        inputs = {id_of(tensor) for tensor in read}
        made = [x for x in tree_leaves(out) if isinstance(x, torch.Tensor)]
        made = [tensor for tensor in made if id_of(tensor) not in inputs]
        call, attention = self._calls[func], func in ATTENTION
        self._calls[func] += 1
        if is_mutable(func):
            self._written |= inputs
        self._products += func in PRODUCTS
        if attention or (func in PRODUCTS and self._products % 2):
            self._selected += sum(tensor.nbytes for tensor in made)
        if made:
            size = sum(tensor.nbytes for tensor in made)
            count = flop_registry.get(func.overloadpacket)
            flops = count(*args, **(kwargs or {}), out_val=out) if count else 0
            moved = size + sum(tensor.nbytes for tensor in read)
            # Copies of weights, and dequantized ones, are no activations
            of_weights = bool(inputs) and inputs <= self._weights
            if of_weights:
                self._weights.update(map(id_of, made))
            self._moved += 0 if flops or attention or of_weights else moved
            cost = flops / self._operations_per_byte + moved
            # Random numbers must be drawn again
            if is_random(func, args, kwargs or {}) or of_weights:
                size = 0
            operator = Operator(func, call, size, cost, attention)
            self._made.append((operator, [tensor.untyped_storage() for tensor in made]))
        return out


def id_of(tensor: torch.Tensor) -> int:
    """Identifier of the storage of a tensor."""
    return storage_id(tensor.untyped_storage())
