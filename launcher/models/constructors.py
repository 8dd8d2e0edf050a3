"""What the constructors of a user's model compute, which a model on the meta device loses.

Buffers come from a second build, on the CPU. What is drawn into parameters in place, as in
`nn.init.zeros_(self.head.weight)`, is recorded, and repeated after the initializers of the modules.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from launcher.errors import RecipeError, first_line, line_of
from launcher.libraries.private import (
    COPIES,
    NOTHING_ON_META,
    OpOverload,
    PlainDispatch,
    TorchDispatchMode,
    is_mutable,
    storage_id,
)
from launcher.models.initialization import initializers
from launcher.models.names import clean_name
from launcher.recipe.functions import call_function
from launcher.recipe.schema import Model

_aten = torch.ops.aten
_OVERWRITES = {
    *(_aten.normal_.default, _aten.uniform_.default, _aten.zero_.default),
    *(_aten.fill_.Scalar, _aten.copy_.default),
}
"""Operations after which nothing is left of the values before."""


@dataclass(frozen=True)
class Draw:
    """An operation in place on a parameter: an operator, or a function of `torch.nn.init`."""

    operator: Callable[..., object]
    arguments: tuple[object, ...]
    """Without the parameter."""
    options: tuple[tuple[str, object], ...]
    repeats: bool
    """It is on the whole parameter, and takes numbers only."""

    def repeat(self, parameter: torch.Tensor) -> None:
        """Does the same to another parameter."""
        self.operator(parameter, *self.arguments, **dict(self.options))


class Draws(PlainDispatch, TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the operations in place on tensors of the meta device."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._of: dict[int, list[Draw]] = {}
        self._valued: set[int] = set()
        """Storages that had values when they were made: not by `torch.empty`."""
        self._storages: list[torch.UntypedStorage] = []  # the id of one that is freed is used again
        self._replaced: dict[str, Callable[..., Any]] = {}

    def __enter__(self) -> Draws:
        for name in NOTHING_ON_META:
            if (function := getattr(nn.init, name, None)) is not None:
                self._replaced[name] = function
                setattr(nn.init, name, partial(self._initialize, function))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *problem: Any) -> None:
        super().__exit__(*problem)  # type: ignore[no-untyped-call]
        for name, function in self._replaced.items():
            setattr(nn.init, name, function)

    def _initialize(
        self, function: Callable[..., Any], tensor: torch.Tensor, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        if not tensor.is_meta:
            return function(tensor, *args, **kwargs)  # type: ignore[no-any-return]
        self._record(function, tensor, args, kwargs, overwrites=True)
        return tensor

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        target = args[0] if args else None
        if isinstance(result, torch.Tensor) and result.is_meta and not is_mutable(func):
            self._made(result, func, target)
        if isinstance(target, torch.Tensor) and target.is_meta and is_mutable(func):
            self._record(func, target, args[1:], kwargs or {}, overwrites=func in _OVERWRITES)
        return result

    def _record(
        self,
        function: Callable[..., Any],
        tensor: torch.Tensor,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        *,
        overwrites: bool,
    ) -> None:
        storage = tensor.untyped_storage()
        if storage_id(storage) not in self._of:
            self._storages.append(storage)
        recorded = self._of.setdefault(storage_id(storage), [])
        whole = tensor.numel() * tensor.itemsize == storage.nbytes()
        if whole and overwrites:
            recorded.clear()
        values = (*args, *kwargs.values())
        numbers = all(isinstance(value, bool | int | float | None) for value in values)
        # What is no number is not kept: it may be large, and is not compared
        options = tuple(kwargs.items()) if numbers else ()
        recorded.append(Draw(function, args if numbers else (), options, whole and numbers))

    def _made(self, result: torch.Tensor, func: OpOverload, source: object) -> None:
        storage = result.untyped_storage()
        if isinstance(source, torch.Tensor) and source.is_meta:
            if storage_id(source.untyped_storage()) == storage_id(storage):  # a view
                return
            if func in COPIES:
                self._of[storage_id(storage)] = [*self.of(source)]
                self._storages.append(storage)
                return
        if not func.overloadpacket.__name__.startswith(("empty", "new_empty")):
            self._valued.add(storage_id(storage))
            self._storages.append(storage)

    def has_values(self, parameter: torch.Tensor) -> bool:
        """Whether the parameter was made with values, and nothing was drawn into it since."""
        return not self.of(parameter) and storage_id(parameter.untyped_storage()) in self._valued

    def of(self, parameter: torch.Tensor) -> list[Draw]:
        """Those that the parameter's values are from."""
        return self._of.get(storage_id(parameter.untyped_storage()), [])

    def _begins(self, draw: Draw) -> bool:
        """Whether nothing is left of the values before a draw."""
        return draw.operator in _OVERWRITES or draw.operator in self._replaced.values()

    @torch.no_grad()
    def after_initializers(self, model: nn.Module) -> dict[str, list[Draw]]:
        """By the clean names of parameters: what the constructors of a meta model have drawn into
        them, where its initializers would leave other values.

        Raises RecipeError if this cannot be repeated.
        """
        before = {name: [*self.of(each)] for name, each in model.named_parameters()}
        # The constructors of torch's modules draw their parameters, unless these are given
        given = [
            f"{path}.{name}".removeprefix(".")
            for path, module in model.named_modules()
            if type(module).__module__.startswith("torch.nn.modules.")
            for name, parameter in module.named_parameters(recurse=False)
            if self.has_values(parameter)
        ]
        shared = [id(each) for _, each in model.named_parameters(remove_duplicate=False)]
        again = Draws()
        try:
            with _same_tensors(model), torch.device("meta"), again:
                for _, initialize in initializers(model):
                    initialize()
        except Exception:  # code that needs values; it runs again where it has them
            return {}
        different, lost = dict[str, list[Draw]](), list[str]()
        if replaced := [
            clean_name(name)
            for name in given
            if again.of(model.get_parameter(name))
            and shared.count(id(model.get_parameter(name))) == 1
        ]:
            raise RecipeError(
                f"model.builder: __init__ gives {', '.join(replaced)} values of its own, in a new "
                "parameter or tensor, which are lost: models are built on the meta device, and the "
                "module's reset_parameters() draws others. Write them in reset_parameters() of the "
                "module around it, which is called after those inside"
            )
        for name, parameter in model.named_parameters():
            drawn = before[name]
            # The first one of the modules that share a parameter initializes it
            if not drawn or shared.count(id(parameter)) > 1 or drawn == again.of(parameter):
                continue
            if self._begins(drawn[0]) and all(draw.repeats for draw in drawn):
                different[clean_name(name)] = drawn
            else:
                lost.append(clean_name(name))
        if lost:
            raise RecipeError(
                f"model.builder: __init__ writes to {', '.join(lost)} in place, a part of it or from "
                "other tensors, which is lost: models are built on the meta device. Do so in "
                "reset_parameters() of the module around it, which is called after those inside"
            )
        return different


@contextmanager
def _same_tensors(model: nn.Module) -> Iterator[None]:
    """A context after which the modules have the same tensors as before."""
    kept = [(each, dict(each._parameters), dict(each._buffers)) for each in model.modules()]
    try:
        yield
    finally:
        for module, parameters, buffers in kept:
            module._parameters.update(parameters)
            module._buffers.update(buffers)


def refuse_plain_tensors(model: nn.Module) -> None:
    """Raises RecipeError for tensors of the user's modules that are no buffers: they stay on the meta
    device, and would not move to a GPU either."""
    found = [
        f"{name}.{key}".removeprefix(".")
        for name, module in model.named_modules()
        if not type(module).__module__.startswith(("torch.", "transformers."))
        for key, value in vars(module).items()
        if isinstance(value, torch.Tensor) and value.is_meta
    ]
    if found:
        raise RecipeError(
            f"model.builder: {', '.join(found)}: a tensor in an attribute gets no values, because "
            "models are built on the meta device; make it a buffer: "
            f"self.register_buffer({found[0].rpartition('.')[2]!r}, ..., persistent=False)"
        )


def constructed_buffers(section: Model, *, seed: int) -> dict[str, torch.Tensor]:
    """The buffers of a model of `model.builder` by name, with the values that its constructors
    compute, such as masks and tables of angles; on the CPU.

    The model is built again, on the CPU. Each parameter moves to the meta device as soon as a module
    gets it, so that this takes the memory of the buffers and of one parameter. A buffer that is
    computed from parameters is on the meta device. Random numbers are drawn with `seed`.

    Raises RecipeError if this cannot be done.
    """
    assert section.builder is not None
    name, random_states = section.builder, (random.getstate(), np.random.get_state())
    hook: Callable[..., Any] = _on_meta  # torch's annotation has no result
    to_meta = register_module_parameter_registration_hook(hook)
    try:
        with torch.device("cpu"), torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            random.seed(seed)
            np.random.seed(seed % 2**32)
            built = call_function(name, section.arguments or {}, key="model.builder")
    except (Exception, MemoryError) as error:
        what = f"{type(error).__name__}: {first_line(error)} ({line_of(error)})"
        raise RecipeError(
            f"model.builder: {name} computes buffers in __init__. For their values it was built on "
            f"the CPU, with parameters on the meta device, which failed: {what}; compute buffers in "
            "reset_parameters() of their module"
        ) from error
    finally:
        to_meta.remove()
        random.setstate(random_states[0])
        np.random.set_state(random_states[1])
    assert isinstance(built, nn.Module)
    return {clean_name(key): value for key, value in built.named_buffers(remove_duplicate=False)}


def _on_meta(module: nn.Module, name: str, parameter: nn.Parameter) -> nn.Parameter | None:
    if parameter is None or parameter.is_meta:  # tied to one that has moved
        return None
    return nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
