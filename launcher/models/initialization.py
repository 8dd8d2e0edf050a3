"""Gives a wrapped meta model its storage and its random initial weights.

Each number of a parameter is a function of the seed, the parameter's clean name and the position in
the whole tensor (`philox`), so the weights are the same under every strategy and number of ranks.
Each rank draws only its own shard, on its device.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from launcher.errors import RecipeError
from launcher.models.shards import InitialValues, derived_seed

_UNSET = -24576
"""Value of signed buffers that nothing has set yet; exact in every float dtype."""


def clean_name(name: str) -> str:
    """A name without the parts that activation checkpointing and peft's adapters insert."""
    for inserted in ("_checkpoint_wrapped_module", "base_layer"):
        name = name.replace(f"{inserted}.", "").removesuffix(inserted)
    return name.rstrip(".")


def named_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers by clean name; a tied one under each of its names."""
    parameters = model.named_parameters(remove_duplicate=False)
    named = [*parameters, *model.named_buffers(remove_duplicate=False)]
    return {clean_name(name): tensor for name, tensor in named}


def materialize(model: nn.Module, *, parameters: torch.device, buffers: torch.device) -> None:
    """Allocates uninitialized storage for a meta model. Tied parameters stay tied."""
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
                value = _UNSET if buffer.dtype.is_signed else 1
                module._buffers[name] = torch.full_like(buffer, value, device=buffers)


def random_weights(
    model: nn.Module, parameters: torch.device, buffers: torch.device, *, seed: int
) -> None:
    """Initializes a wrapped meta model: parameters on one device, buffers on the other."""
    materialize(model, parameters=parameters, buffers=buffers)
    initialize(model, seed=seed)


@torch.no_grad()
def initialize(model: nn.Module, *, seed: int, loaded: Container[str] = ()) -> None:
    """Draws random weights and computes buffers with the model's own code.

    That code is `_init_weights(module)` of the innermost model around a module, else the module's
    `reset_parameters()`. It runs on the CPU, on `Placeholder`s for the parameters and copies of the
    buffers. Random numbers outside of parameters come from torch's CPU generator, seeded from
    (seed, module name).

    model: materialized, wrapped or not. loaded: clean names of tensors of a checkpoint, which are
    not changed. Raises RecipeError if a parameter or buffer gets no value.
    """
    owner = _initializers(model)
    kept = {id(tensor) for name, tensor in named_tensors(model).items() if name in loaded}
    modules = list(_post_order(model, "", set()))
    tensors_of = {
        module: [*module.parameters(), *module.buffers()] for _, module in modules if kept
    }
    modules.sort(key=lambda named: ".lora_" in named[0])  # last: no parent draws them again
    whole: list[InitialValues] = []
    placeholders = _placeholders(modules, seed, kept, whole)
    with torch.random.fork_rng(devices=[]), placeholders as initials:
        for name, module in modules:
            if kept and all(id(tensor) in kept for tensor in tensors_of[module]):
                continue
            torch.default_generator.manual_seed(derived_seed(seed, clean_name(name)))
            _draw(module, name, owner.get(id(module)))
            while whole:
                whole.pop().store()
        for initial in initials:
            initial.store()
        names = [
            f"parameter {initial.name}"
            for initial in initials
            if not initial.written and initial.shape.numel()
        ]
        # These are the copies on the CPU: this does not wait for the device
        names += [
            f"buffer {clean_name(name)}"
            for name, buffer in model.named_buffers()
            if clean_name(name) not in loaded
            and buffer.dtype.is_signed
            and (buffer == _UNSET).any()
        ]
    if names:
        raise RecipeError(
            f"model: {type(model).__name__} leaves the {names[0]} without a value: models are "
            "built on the meta device, so what the constructor computes is lost; compute it in "
            "reset_parameters() of its module"
        )


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
            f"model.builder: {clean_name(name) or 'the model'} ({type(module).__name__}) has "
            "parameters and no reset_parameters() to initialize them: models are built on the meta "
            "device. Add one, or an _init_weights(module) to the model"
        )


def _post_order(
    module: nn.Module, name: str, seen: set[nn.Module]
) -> Iterator[tuple[str, nn.Module]]:
    """Children before parents: a parent's code may draw a child's weights again."""
    for child_name, child in module.named_children():
        if child not in seen:
            yield from _post_order(child, f"{name}.{child_name}" if name else child_name, seen)
    seen.add(module)
    yield name, module


def _initializers(model: nn.Module) -> dict[int, Any]:
    """For each module the innermost model around it with an `_init_weights`."""
    owner: dict[int, Any] = {}
    for module in model.modules():  # parents come before children
        if hasattr(module, "_init_weights"):
            owner |= {id(inner): module for inner in module.modules()}
    return owner


@contextmanager
def _placeholders(
    modules: list[tuple[str, nn.Module]],
    seed: int,
    kept: set[int],
    whole: list[InitialValues],
) -> Iterator[list[InitialValues]]:
    """Replaces the modules' parameters by placeholders and their buffers by copies on the CPU.

    A shared parameter is initialized by its first module. Those in `kept` are not changed. Values
    that were needed at once are appended to `whole`.
    """
    saved = [(module, dict(module._parameters), dict(module._buffers)) for _, module in modules]
    initials: dict[int, InitialValues] = {}
    on_cpu: dict[int, torch.Tensor] = {}
    for (name, module), (_, parameters, buffers) in zip(modules, saved, strict=True):
        for own, parameter in parameters.items():
            if parameter is not None:
                done = id(parameter) in kept or id(parameter) in initials
                mine = None if done else parameter.detach()
                full_name = clean_name(f"{name}.{own}".removeprefix("."))
                initial = InitialValues(full_name, mine, parameter, seed, whole)
                initials.setdefault(id(parameter), initial)
                module._parameters[own] = initial.placeholder()
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
