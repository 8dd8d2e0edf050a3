"""Gives a wrapped meta model its storage and its random initial weights.

A parameter's numbers are a function of the seed, its clean name and the position in the full tensor (`philox`). So each
rank draws its own shard alone, on the device that it computes on, a bounded number of values at a time, and the weights
are the same under every strategy and number of ranks.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from launcher.errors import RecipeError
from launcher.models import philox

_UNSET = -24576
"""What a signed buffer holds until something writes it, exact in every float: model code that leaves one unset is
found, not trained with."""


def clean_name(name: str) -> str:
    """A module's or parameter's name without what wrappers put into it: activation checkpointing, and peft around a
    layer that has an adapter."""
    for inserted in ("_checkpoint_wrapped_module", "base_layer"):
        name = name.replace(f"{inserted}.", "").removesuffix(inserted)
    return name.rstrip(".")


def named_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers by clean name; one that is tied stands under each of its names."""
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {clean_name(name): tensor for name, tensor in named}


def materialize(model: nn.Module, *, parameters: torch.device, buffers: torch.device) -> None:
    """Uninitialized storage for a meta model: parameters (or a rank's shards of them) here, buffers there.

    Parameters that share a tensor (tied embeddings) go on sharing one.
    """
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                places.setdefault(id(parameter), []).append((module, name))
    model.to_empty(device=parameters)
    for (first, first_name), *others in places.values():
        for module, name in others:
            module._parameters[name] = first._parameters[first_name]
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.full_like(buffer, _UNSET if buffer.dtype.is_signed else 1, device=buffers)


def random_weights(model: nn.Module, parameters: torch.device, buffers: torch.device, *, seed: int) -> None:
    """Fills a wrapped meta model: parameters on one device, buffers on the other. See `initialize`."""
    materialize(model, parameters=parameters, buffers=buffers)
    initialize(model, seed=seed)


@torch.no_grad()
def initialize(model: nn.Module, *, seed: int, loaded: Container[str] = ()) -> None:
    """Random weights and buffers, as the model's own class initializes them: `_init_weights(module)` of the innermost
    model of transformers (or of yours) around a module, else the module's own `reset_parameters()`.

    That code runs on the CPU, with stand-ins for the parameters (`_StandIn`) and copies of the buffers. What it draws
    into tensors of its own comes from torch's CPU generator, seeded from (seed, module name).

    model: wrapped or not, its parameters plain or DTensor, materialized.
    loaded: clean names of tensors that come from a checkpoint; nothing is drawn for them.
    Raises RecipeError where a parameter or buffer is left unset, or a parameter has nothing that initializes it.
    """
    owner = _initializers(model)
    kept = {id(tensor) for name, tensor in named_tensors(model).items() if name in loaded}
    modules = list(_post_order(model, "", set()))
    tensors_of = {module: [*module.parameters(), *module.buffers()] for _, module in modules if kept}
    modules.sort(key=lambda named: ".lora_" in named[0])  # last: no parent draws in them again
    whole: list[_Initial] = []
    with torch.random.fork_rng(devices=[]), _trunc_normal_by_position(), _stand_ins(modules, seed, kept, whole) as initials:
        for name, module in modules:
            if kept and all(id(tensor) in kept for tensor in tensors_of[module]):
                continue
            torch.default_generator.manual_seed(int.from_bytes(_digest(seed, clean_name(name)), "little") >> 1)
            _draw(module, name, owner.get(id(module)))
            while whole:
                whole.pop().store()
        for initial in initials:
            initial.store()
        unset = [f"parameter {initial.name}" for initial in initials if not initial.written and initial.shape.numel()]
        # Their copies on the CPU: no wait for the device
        for name, buffer in model.named_buffers():
            if clean_name(name) not in loaded and buffer.dtype.is_signed and bool((buffer == _UNSET).any()):
                unset.append(f"buffer {clean_name(name)}")
    if unset:
        raise RecipeError(
            f"model: {type(model).__name__} leaves the {unset[0]} without a value: models are built on the meta "
            "device, so what the constructor computes is lost; compute it in reset_parameters() of its module"
        )


def _digest(seed: int, name: str) -> bytes:
    return hashlib.sha256(f"{seed}/{name}".encode()).digest()[:8]


def _draw(module: nn.Module, name: str, owner: Any) -> None:
    if ".lora_A." in name:  # Hu et al., 2021: the product of the two starts at zero
        nn.init.kaiming_uniform_(module.weight, a=math.sqrt(5))  # type: ignore[arg-type]
    elif ".lora_B." in name:
        nn.init.zeros_(module.weight)  # type: ignore[arg-type]
    elif owner is not None:
        owner._init_weights(module)
    elif hasattr(module, "reset_parameters"):
        module.reset_parameters()  # type: ignore[operator]
    elif any(parameter is not None for parameter in module._parameters.values()):
        raise RecipeError(
            f"model.builder: {clean_name(name) or 'the model'} ({type(module).__name__}) has parameters and no reset_parameters(), which "
            "would give them their first values: models are built on the meta device. Add one, or an _init_weights(module) to the model"
        )


def _post_order(module: nn.Module, name: str, seen: set[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Children before parents: a class may draw again, in the parent, what the general rule drew in the child."""
    for child_name, child in module.named_children():
        if child not in seen:
            yield from _post_order(child, f"{name}.{child_name}" if name else child_name, seen)
    seen.add(module)
    yield name, module


def _initializers(model: nn.Module) -> dict[int, Any]:
    """For each module the innermost model around it whose `_init_weights` knows it: all of transformers have one."""
    owner: dict[int, Any] = {}
    for module in model.modules():  # parents come before children
        if hasattr(module, "_init_weights"):
            owner |= {id(inner): module for inner in module.modules()}
    return owner


class _Initial:
    """The first values of one parameter: what the model's code does to it, to be done to this rank's part of it.

    Draws and plain arithmetic with numbers are recorded, and done by `store`. All else needs the values at once: `on_cpu`
    then makes the whole parameter on the CPU, and the code works on that.
    """

    def __init__(self, name: str, mine: torch.Tensor | None, like: torch.Tensor, seed: int, on_cpu_list: list[_Initial]) -> None:
        """mine: where the values go; None: nowhere. like: has the parameter's shape and dtype."""
        self.name, self.mine, self.shape = name, mine, like.shape
        # float32 even where the weight is held in fewer bits: the draw is the same
        self.dtype = torch.float32 if like.is_floating_point() else like.dtype
        digest = _digest(seed, name)
        self.key = int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")
        self.written = False
        self.whole: torch.Tensor | None = None
        self._whole_ones = on_cpu_list
        self._stored = False
        self._operations: list[tuple[range, Callable[[torch.Tensor, int], object]]] = []

    def stand_in(self) -> nn.Parameter:
        return nn.Parameter(_StandIn(self, range(self.shape.numel()), self.shape), requires_grad=False)

    def record(self, span: range, operation: Callable[[torch.Tensor, int], object], *, overwrites: bool) -> None:
        """span: positions in the flattened parameter. operation: given values there, and the position of the first."""
        self.written = True
        if overwrites and len(span) == self.shape.numel():
            self._operations.clear()
            self._stored = False
        self._operations.append((span, operation))

    def on_cpu(self) -> torch.Tensor:
        """The whole parameter with the values so far."""
        if self.whole is None:
            if self._stored:
                raise RecipeError(
                    f"model: {self.name} got its first values from one module, and another one computes with them: compute all in one"
                )
            self.written = True
            self.whole = torch.empty(self.shape, dtype=self.dtype, device="meta" if self.mine is None else "cpu")
            self._apply(self.whole.view(-1), 0, self.whole.device)
            self._whole_ones.append(self)
        return self.whole

    def store(self) -> None:
        """Writes this rank's part, and forgets what led to it."""
        if self.mine is not None:
            local, row = local_rows(self.mine)
            if self.whole is not None:
                local.copy_(self.whole[row : row + local.shape[0]] if local.ndim else self.whole)
            else:
                # Offloaded shards too are computed on the device that the rank computes on
                device = torch.device(self.mine.device_mesh.device_type) if isinstance(self.mine, DTensor) else local.device
                flat = local.contiguous().view(-1)
                self._apply(flat, row * (self.shape.numel() // max(1, self.shape[0])) if local.ndim else 0, device)
                if not local.is_contiguous():
                    local.copy_(flat.view(local.shape))
        self._operations.clear()
        self.whole, self._stored = None, True

    def _apply(self, flat: torch.Tensor, first: int, device: torch.device) -> None:
        at_once = philox.numbers_at_once(device)
        for start in range(0, flat.numel() if self._operations and self.mine is not None else 0, at_once):
            target = flat[start : start + at_once]
            values = target.to(device, self.dtype)  # itself where both are so already
            at = first + start
            for span, operation in self._operations:
                begin, end = max(span.start, at), min(span.stop, at + values.numel())
                if begin < end:
                    operation(values[begin - at : end - at], begin)
            if values is not target:
                target.copy_(values)

    def normal(self, values: torch.Tensor, first: int, mean: float = 0.0, std: float = 1.0) -> None:
        values.copy_(philox.normal(self.key, first, values.numel(), values.device)).mul_(std).add_(mean)

    def uniform(self, values: torch.Tensor, first: int, low: float = 0.0, high: float = 1.0) -> None:
        values.copy_(philox.uniform(self.key, first, values.numel(), values.device)).mul_(high - low).add_(low)

    def trunc_normal(self, values: torch.Tensor, first: int, mean: float, std: float, low: float, high: float) -> None:
        limits = (low - mean) / std, (high - mean) / std
        numbers = philox.truncated_normal(self.key, first, values.numel(), values.device, limits=limits)
        values.copy_(numbers).mul_(std).add_(mean).clamp_(low, high)


_aten = torch.ops.aten
_ARITHMETIC = {
    *(_aten.zero_.default, _aten.fill_.Scalar, _aten.mul_.Tensor, _aten.div_.Tensor),
    *(_aten.add_.Tensor, _aten.sub_.Tensor, _aten.clamp_.default),
}
"""In place, alike for each value: recorded where the other operands are numbers."""


class _StandIn(torch.Tensor):
    """Stands in for a whole parameter, or a row of it, while the model's code initializes it: a tensor without values on
    the CPU, that hands what is done to it to its `_Initial`."""

    initial: _Initial
    span: range
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, initial: _Initial, span: range, shape: torch.Size) -> _StandIn:
        made: _StandIn = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=initial.dtype, device=torch.device("cpu"))
        made.initial, made.span = initial, span
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        self, others, kwargs = args[0], args[1:], kwargs or {}
        if isinstance(self, cls) and self.initial.whole is None:
            initial = self.initial
            if func is _aten.detach.default:
                return cls(initial, self.span, self.shape)
            if func is _aten.select.int and others[0] == 0:
                width = len(self.span) // self.shape[0]
                row = others[1] % self.shape[0]
                return cls(initial, self.span[row * width : (row + 1) * width], self.shape[1:])
            if func in _ARITHMETIC and not any(isinstance(value, torch.Tensor) for value in [*others, *kwargs.values()]):
                overwrites = func in (_aten.zero_.default, _aten.fill_.Scalar)
                initial.record(self.span, lambda values, first: func(values, *others, **kwargs), overwrites=overwrites)
                return self
            draw = {_aten.normal_.default: initial.normal, _aten.uniform_.default: initial.uniform}.get(func)
            if draw is not None and kwargs.get("generator") is None:
                initial.record(self.span, lambda values, first: draw(values, first, *others), overwrites=True)
                return self
        args, kwargs = tree_map_only(cls, cls._values, (args, kwargs))
        return func(*args, **kwargs)

    @property
    def data(self) -> torch.Tensor:
        return self.detach()

    @data.setter
    def data(self, values: torch.Tensor) -> None:
        self.copy_(values)

    def _values(self) -> torch.Tensor:
        return self.initial.on_cpu().view(-1)[self.span.start : self.span.stop].view(self.shape)


@contextmanager
def _trunc_normal_by_position() -> Iterator[None]:
    """torch draws until all values lie within the limits, which would need them at once (seen in torch 2.13)."""
    original = nn.init._no_grad_trunc_normal_

    def trunc_normal(tensor: torch.Tensor, mean: float, std: float, a: float, b: float, generator: Any = None) -> torch.Tensor:
        if not isinstance(tensor, _StandIn) or tensor.initial.whole is not None or generator is not None:
            return original(tensor, mean, std, a, b, generator)
        draw = partial(tensor.initial.trunc_normal, mean=mean, std=std, low=a, high=b)
        tensor.initial.record(tensor.span, draw, overwrites=True)
        return tensor

    nn.init._no_grad_trunc_normal_ = trunc_normal
    try:
        yield
    finally:
        nn.init._no_grad_trunc_normal_ = original


@contextmanager
def _stand_ins(modules: list[tuple[str, nn.Module]], seed: int, kept: set[int], on_cpu_list: list[_Initial]) -> Iterator[list[_Initial]]:
    """Puts stand-ins in the place of the modules' parameters, and copies on the CPU in that of their buffers.

    A parameter that several modules share is initialized by the first of them. Those in `kept` keep what they have.
    """
    saved = [(module, dict(module._parameters), dict(module._buffers)) for _, module in modules]
    initials: dict[int, _Initial] = {}
    on_cpu: dict[int, torch.Tensor] = {}
    for (name, module), (_, parameters, buffers) in zip(modules, saved, strict=True):
        for own, parameter in parameters.items():
            if parameter is not None:
                mine = None if id(parameter) in kept or id(parameter) in initials else parameter.detach()
                initial = _Initial(clean_name(f"{name}.{own}".removeprefix(".")), mine, parameter, seed, on_cpu_list)
                initials.setdefault(id(parameter), initial)
                module._parameters[own] = initial.stand_in()
        for own, buffer in buffers.items():
            if buffer is not None:
                module._buffers[own] = on_cpu.setdefault(id(buffer), buffer.cpu())
    yield [initial for initial in initials.values() if initial.mine is not None]
    for module, parameters, buffers in saved:
        module._parameters.update(parameters)
        module._buffers.update(buffers)
        for buffer in buffers.values():
            if buffer is not None:
                buffer.copy_(on_cpu[id(buffer)])


def local_rows(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
    """What this rank holds of a tensor, and which row (of dimension 0) of the whole it starts at."""
    if not isinstance(tensor, DTensor):
        return tensor, 0
    # fully_shard cuts dimension 0 as torch.chunk does, over the mesh's last dimension: the first one holds copies.
    mesh = tensor.device_mesh
    chunk = -(-tensor.shape[0] // mesh.size(mesh.ndim - 1))
    return tensor.to_local(), min(mesh.get_local_rank(mesh.ndim - 1) * chunk, tensor.shape[0])
