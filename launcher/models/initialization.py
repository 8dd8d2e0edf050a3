"""Allocates a wrapped meta model and draws its random initial weights.

Each number of a parameter is a function of the seed, the parameter's clean name and the position in
the whole tensor (`philox`), so the weights are the same under every strategy and number of ranks.
The model's own code runs on `Placeholder`s, which record what it does; then each rank does the same
to its own shard, on its device.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn

from launcher.errors import RecipeError
from launcher.libraries.private import (
    DISABLED_TORCH_FUNCTION,
    OpOverload,
    initialize_weights,
    initializes_weights,
    tensor_without_data,
    tree_map_only,
    version_of,
)
from launcher.models import philox
from launcher.models.adapted import adapted_weights, adapter_modules
from launcher.models.names import clean_name, named_tensors
from launcher.models.nf4 import dtype_of, packed_in, shape_of
from launcher.models.record import record_of
from launcher.models.shards import (
    compute_device,
    copy_local_rows,
    local_columns,
    local_rows,
    write,
)

_UNSET = -24576
"""Value of signed buffers that nothing has set yet; exact in every float dtype."""
_aten = torch.ops.aten
_FILLS = {_aten.zero_.default, _aten.fill_.Scalar}
_ARITHMETIC = {_aten.mul_.Tensor, _aten.div_.Tensor, _aten.add_.Tensor, _aten.sub_.Tensor}
_ARITHMETIC |= {_aten.clamp_.default}
"""In-place elementwise operations, like _FILLS."""


def materialize(model: nn.Module, *, parameters: torch.device, buffers: torch.device) -> None:
    """Allocates uninitialized storage for a meta model. Tied parameters stay tied."""
    meta = [(module, dict(module._parameters)) for module in model.modules()]
    model.to_empty(device=parameters)
    made: dict[int, nn.Parameter | None] = {}  # by id of the meta parameter
    for module, before in meta:
        for name, parameter in before.items():
            module._parameters[name] = made.setdefault(id(parameter), module._parameters[name])
        for name, buffer in module._buffers.items():
            if buffer is not None:
                value = _UNSET if buffer.dtype.is_signed else 1
                module._buffers[name] = torch.full_like(buffer, value, device=buffers)


def random_weights(
    model: nn.Module,
    parameters: torch.device,
    buffers: torch.device,
    *,
    seed: int,
    constructed: Callable[[], Mapping[str, torch.Tensor]] | None = None,
    draws: Mapping[str, list[Any]] | None = None,
) -> None:
    """Initializes a wrapped meta model: parameters on one device, buffers on the other.
    constructed, draws: see `initialize`."""
    materialize(model, parameters=parameters, buffers=buffers)
    initialize(model, seed=seed, constructed=constructed, draws=draws)


@torch.no_grad()
def initialize(
    model: nn.Module,
    *,
    seed: int,
    loaded: Container[str] = (),
    constructed: Callable[[], Mapping[str, torch.Tensor]] | None = None,
    draws: Mapping[str, list[Any]] | None = None,
) -> None:
    """Draws random weights and computes buffers of a materialized model with its own code:
    `_init_weights(module)` of the innermost model around a module, else the module's
    `reset_parameters()` or `_reset_parameters()`. In a model that is not one of transformers, both
    are called, in the order of an eager model: its constructors call the second one.

    `loaded` are clean names of tensors of a checkpoint, which are not drawn. `constructed` returns
    the buffers of a model of the user's as its constructors compute them. It is called if no
    initializer sets one of them. `draws` are operations in place for parameters, by name, after the
    initializers (`constructors.Draw`). Raises RecipeError with all parameters and buffers that get no
    value.
    """
    kept = {id(tensor) for name, tensor in named_tensors(model).items() if name in loaded}
    modules, adapters = _children_first(model), adapter_modules(model)
    drawn = [
        (name, module)
        for name, module in modules
        if module not in adapters
        and any(id(tensor) not in kept for tensor in (*module.parameters(), *module.buffers()))
    ]
    whole: list[InitialValues] = []
    placeholders = _placeholders(modules, seed, kept, whole)
    with torch.random.fork_rng(devices=[]), placeholders as initials:
        before = {
            id(buffer): (buffer, version_of(buffer))
            for _, buffer in model.named_buffers()  # on the CPU: none of this waits for the device
        }
        stages = record_of(model).stages
        with nullcontext() if stages is None else stages.without_places(model):
            for name, draw in initializers(model, drawn):
                # The generator is for random numbers outside of parameters
                torch.default_generator.manual_seed(philox.derived_seed(seed, clean_name(name)))
                draw()
                while whole:
                    whole.pop().store()
        for each in adapted_weights(model):  # after all parents, which may draw all in a module
            each.draw()
        for initial in initials:
            for draw in (draws or {}).get(initial.name, ()):
                key = f"constructor {initial.name}"
                torch.default_generator.manual_seed(philox.derived_seed(seed, key))
                draw.repeat(initial.placeholder())
            while whole:
                whole.pop().store()
        unset = [f"parameter {initial.name}" for initial in initials if initial.is_unset()]
        lost = {
            clean_name(name): buffer
            for name, buffer in model.named_buffers()
            if clean_name(name) not in loaded
            and _is_unset(buffer, before, constructs=constructed is not None)
        }
        if lost and constructed is not None:
            for name, value in constructed().items():
                if name in lost and value.shape == lost[name].shape and not value.is_meta:
                    lost.pop(name).copy_(value)
        unset += [f"buffer {name}" for name in lost]
        for initial in initials:
            initial.store()
    if unset:
        raise RecipeError(
            f"model: {type(model).__name__} leaves the {', the '.join(unset)} without a value: "
            "models are built on the meta device, so what the constructor computes for a parameter, "
            "or from parameters, is lost; compute it in reset_parameters() of its module"
        )


def _is_unset(
    buffer: torch.Tensor, before: Mapping[int, tuple[torch.Tensor, int]], *, constructs: bool
) -> bool:
    """Whether no initializer has set a buffer. One without a sign, such as a mask, has no value that
    says so: it is unset if nothing was written to it. transformers computes its own, so that this
    is asked only of a model whose constructed buffers are known."""
    if buffer.dtype.is_signed:
        return bool((buffer == _UNSET).any())
    _, version = before.get(id(buffer), (None, None))
    return constructs and version_of(buffer) == version and bool((buffer == 1).all())


def _owners(model: nn.Module) -> dict[nn.Module, Any]:
    """By module: the innermost model around it that has an `_init_weights(module)`."""
    owner: dict[nn.Module, Any] = {}
    for module in model.modules():  # parents come before children
        if initializes_weights(module):
            owner |= dict.fromkeys(module.modules(), module)
    return owner


def _of_transformers(owner: nn.Module) -> bool:
    """Whether `_init_weights` of a model sets all weights of all modules of torch."""
    return any(each.__name__ == "PreTrainedModel" for each in type(owner).__mro__)


def _reset_of(module: nn.Module) -> Callable[[], object] | None:
    """The function that initializes the module's own parameters. Some modules of torch, such as
    `nn.MultiheadAttention` and `nn.Transformer`, have one with an underscore."""
    for name in ("reset_parameters", "_reset_parameters"):
        if callable(reset := getattr(module, name, None)):
            return reset  # type: ignore[no-any-return]
    return None


def check_initializers(model: nn.Module) -> None:
    """Raises RecipeError with all modules that have parameters of their own and no code that
    initializes them. A model of `model.builder` is asked at once, so that the plan says it, too."""
    owner, missing = _owners(model), dict[str, list[str]]()
    for name, module in model.named_modules():
        own = [key for key, parameter in module._parameters.items() if parameter is not None]
        if own and module not in owner and _reset_of(module) is None:
            kind = f"{type(module).__name__} ({', '.join(own)})"
            missing.setdefault(kind, []).append(name or "the model")
    if not missing:
        return
    kinds = [
        f"{kind} at {', '.join(names[:3])}{f' and {len(names) - 3} more' * (len(names) > 3)}"
        for kind, names in missing.items()
    ]
    raise RecipeError(
        "model.builder: these modules have parameters and no reset_parameters() to initialize "
        f"them: {'; '.join(kinds)}. Models are built on the meta device, where the values of "
        "__init__ are lost: add reset_parameters() to each of these classes, or "
        "_init_weights(module) to the model"
    )


def _children_first(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """All modules with their names. Parents may draw the weights of their children again."""
    order: list[nn.Module] = []
    model.apply(order.append)
    names = {module: name for name, module in model.named_modules()}
    return [(names[module], module) for module in dict.fromkeys(order)]


def initializers(
    model: nn.Module, modules: list[tuple[str, nn.Module]] | None = None
) -> Iterator[tuple[str, Callable[[], object]]]:
    """What initializes these modules of a model, or all, in order, each with the name of the module."""
    owner = _owners(model)
    modules = _children_first(model) if modules is None else modules
    for name, module in modules:  # what the constructors of an eager model do
        around = owner.get(module)
        if (around is None or not _of_transformers(around)) and (reset := _reset_of(module)):
            yield name, reset
    for name, module in modules:  # what follows the constructors
        if (around := owner.get(module)) is not None:
            yield name, partial(initialize_weights, around, module)


@contextmanager
def _placeholders(
    modules: list[tuple[str, nn.Module]], seed: int, kept: set[int], whole: list[InitialValues]
) -> Iterator[list[InitialValues]]:
    """Replaces the modules' parameters by placeholders and their buffers by copies on the CPU. A
    shared parameter is initialized by its first module, one whose id is in `kept` by none."""
    saved = [(module, dict(module._parameters), dict(module._buffers)) for _, module in modules]
    initials: dict[int, InitialValues] = {}
    on_cpu: dict[int, torch.Tensor] = {}
    for (name, module), (_, parameters, buffers) in zip(modules, saved, strict=True):
        for own, parameter in parameters.items():
            if parameter is not None:
                done = id(parameter) in kept or id(parameter) in initials
                full_name = clean_name(f"{name}.{own}".removeprefix("."))
                packed = own in packed_in(module)
                initial = InitialValues(full_name, parameter, seed, whole, skip=done, packed=packed)
                initials.setdefault(id(parameter), initial)
                values = initial.placeholder()
                module._parameters[own] = nn.Parameter(values, requires_grad=False)
        for own, buffer in buffers.items():
            if buffer is not None:
                module._buffers[own] = on_cpu.setdefault(id(buffer), buffer.cpu())
    yield [initial for initial in initials.values() if initial.mine is not None]
    for module, parameters, buffers in saved:
        module._parameters.update(parameters)
        for own, buffer in buffers.items():
            # An initializer may have put another tensor in its place: self.mask = torch.ones(...)
            written = module._buffers.get(own)
            module._buffers[own] = buffer
            if buffer is not None:
                buffer.copy_(on_cpu[id(buffer)] if written is None else written)


Operation = Callable[[torch.Tensor, int], object]
"""Changes values in place, given the position of the first in the flattened parameter."""


class InitialValues:
    """The initial values of one parameter.

    Random draws and arithmetic with plain numbers are recorded, and `store` applies them to this
    rank's part. Any other operation needs the values immediately: `on_cpu` computes the whole
    parameter.
    """

    def __init__(
        self,
        name: str,
        mine: torch.Tensor,
        seed: int,
        whole: list[InitialValues],
        *,
        skip: bool,
        packed: bool,
    ) -> None:
        """`on_cpu` appends this instance to `whole`. `skip`: the parameter is not changed. `packed`:
        it is in NF4."""
        self.name, self.mine = name, None if skip else mine.detach()
        self.shape = shape_of(mine) if packed else mine.shape
        # float32 even for a weight of fewer bits, so that the draw is the same
        in_float32 = packed or mine.is_floating_point()
        self.dtype = torch.float32 if in_float32 else mine.dtype
        self.key = philox.named_key(seed, name)
        self.whole: torch.Tensor | None = None
        self._whole_list = whole
        self._stored = False
        self._operations: list[tuple[range, Operation]] = []

    def placeholder(self) -> Placeholder:
        """What takes the place of the parameter."""
        return Placeholder(self, range(self.shape.numel()), self.shape)

    def is_unset(self) -> bool:
        """Whether nothing has given the parameter values."""
        return not (self._stored or self._operations or self.shape.numel() == 0)

    def record(self, span: range, operation: Operation, *, overwrites: bool) -> None:
        """Records an operation on positions of the flattened parameter. One that overwrites all
        values makes those before it obsolete."""
        if overwrites and len(span) == self.shape.numel():
            self._operations.clear()
            self._stored = False
        self._operations.append((span, operation))

    def on_cpu(self) -> torch.Tensor:
        """All values, on the CPU."""
        if self.whole is None:
            if self._stored:
                raise RecipeError(f"model: {self.name} is initialized by two modules; use one")
            # zeros: a loaded parameter has no values here, but its module's code still runs
            self.whole = torch.zeros(self.shape, dtype=self.dtype)
            self._apply(self.whole.view(-1), 0, self.whole.device)
            self._whole_list.append(self)
        return self.whole

    def store(self) -> None:
        """Writes this rank's part."""
        if self.mine is not None and self.whole is not None:
            copy_local_rows(self.mine, self.whole)
        elif self.mine is not None and self._operations:
            local, row = local_rows(self.mine)
            rows, columns = local.contiguous(), local_columns(self.mine)
            if local.shape[1:] != self.shape[1:]:  # rows of the whole, as numbers
                shape = *local.shape[:1], *self.shape[1:]
                rows = torch.empty(shape, dtype=dtype_of(local), device=local.device)
            first = row * self.shape[1:].numel()
            self._apply(rows.view(-1), first, compute_device(self.mine))
            if rows is not local:
                write(local, rows, columns)
        self._operations.clear()
        self.whole, self._stored = None, True

    def _apply(self, flat: torch.Tensor, first: int, device: torch.device) -> None:
        """Applies the operations to `flat`, which has the values from position `first` on."""
        if not self._operations or self.mine is None:
            return
        at_once = philox.numbers_at_once(device)
        for start in range(0, flat.numel(), at_once):
            target = flat[start : start + at_once]
            values = target.to(device, self.dtype)  # no copy if both are the same
            at = first + start
            for span, operation in self._operations:
                begin, end = max(span.start, at), min(span.stop, at + values.numel())
                if begin < end:
                    operation(values[begin - at : end - at], begin)
            if values is not target:
                target.copy_(values)

    def normal(self, values: torch.Tensor, first: int, mean: float = 0.0, std: float = 1.0) -> None:
        """Draws the values from position `first` on, like `Tensor.normal_`."""
        drawn = philox.normal(self.key, first, values.numel(), values.device)
        values.copy_(drawn).mul_(std).add_(mean)

    def uniform(
        self, values: torch.Tensor, first: int, low: float = 0.0, high: float = 1.0
    ) -> None:
        """Draws the values from position `first` on, like `Tensor.uniform_`."""
        drawn = philox.uniform(self.key, first, values.numel(), values.device)
        values.copy_(drawn).mul_(high - low).add_(low)


class Placeholder(torch.Tensor):
    """Replaces a parameter or a row of it, and records the operations on it."""

    initial: InitialValues
    span: range
    __torch_function__ = DISABLED_TORCH_FUNCTION

    @staticmethod
    def __new__(cls, initial: InitialValues, span: range, shape: torch.Size) -> Placeholder:
        made = tensor_without_data(cls, shape, dtype=initial.dtype)
        made.initial, made.span = initial, span
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: OpOverload, types: object, args: Any = (), kwargs: Any = None
    ) -> Any:
        self, others, kwargs = args[0], args[1:], kwargs or {}
        if isinstance(self, cls) and self.initial.whole is None:
            initial = self.initial
            if func is _aten.detach.default:
                return cls(initial, self.span, self.shape)
            if func is _aten.select.int and others[0] == 0:
                width = len(self.span) // self.shape[0]
                row = others[1] % self.shape[0]
                return cls(initial, self.span[row * width : (row + 1) * width], self.shape[1:])
            draws = {_aten.normal_.default: initial.normal, _aten.uniform_.default: initial.uniform}
            operands = (*others, *kwargs.values())
            operation: Operation | None = None
            if func in draws and kwargs.get("generator") is None:
                operation = lambda values, first: draws[func](values, first, *others)  # noqa: E731
            elif func in _FILLS | _ARITHMETIC and not any(map(torch.is_tensor, operands)):
                operation = lambda values, first: func(values, *others, **kwargs)  # noqa: E731
            if operation is not None:
                initial.record(self.span, operation, overwrites=func not in _ARITHMETIC)
                return self
        args, kwargs = tree_map_only(cls, cls._numbers, (args, kwargs))
        return func(*args, **kwargs)

    @property
    def data(self) -> torch.Tensor:
        """Another placeholder of the same values."""
        return self.detach()

    @data.setter
    def data(self, values: torch.Tensor) -> None:
        self.copy_(values)

    def _numbers(self) -> torch.Tensor:
        return self.initial.on_cpu().view(-1)[self.span.start : self.span.stop].view(self.shape)
