"""Gives a wrapped meta model its storage and its random initial weights.

The weights are a function of the seed and the names alone. Every rank draws each block whole, on the CPU, with a
generator seeded from (seed, module name), and keeps only its own shard, so they are the same under every strategy, on
every device and number of ranks. In memory that is the shards and one block at a time.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Container, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from launcher.errors import RecipeError

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


def random_weights(model: nn.Module, parameters: torch.device, buffers: torch.device, *, blocks: dict[str, nn.Module], seed: int) -> None:
    """Fills a wrapped meta model: parameters on one device, buffers on the other. See `initialize`."""
    materialize(model, parameters=parameters, buffers=buffers)
    initialize(model, blocks=blocks, seed=seed)


@torch.no_grad()
def initialize(model: nn.Module, *, blocks: dict[str, nn.Module], seed: int, loaded: Container[str] = ()) -> None:
    """Random weights and buffers, as the model's own class initializes them: `_init_weights(module)` of the innermost
    model of transformers (or of yours) around a module, else the module's own `reset_parameters()`.

    model: wrapped or not, its parameters plain or DTensor, materialized.
    blocks: the units drawn at once, by clean name; what is outside of them is drawn module by module.
    loaded: clean names of tensors that come from a checkpoint; nothing is drawn for them.
    Raises RecipeError where a buffer is left unset, or a parameter has nothing that initializes it.
    """
    owner = _initializers(model)
    inside = {id(module) for block in blocks.values() for module in block.modules()}
    done: set[int] = set()
    kept = {id(tensor) for name, tensor in named_tensors(model).items() if name in loaded}
    with torch.random.fork_rng(devices=[]):
        for name, module in _post_order(model, ""):
            if id(module) in inside and not any(module is block for block in blocks.values()):
                continue
            unit = list(_post_order(module, name)) if id(module) in inside else [(name, module)]
            unit.sort(key=lambda part: ".lora_" in part[0])  # last: no parent draws in them again
            tensors = [t for _, part in unit for t in (*part._parameters.values(), *part._buffers.values()) if t is not None]
            if loaded and all(id(tensor) in kept for tensor in tensors):
                continue
            with _whole_on_cpu([part for _, part in unit], done, kept):
                for part_name, part in unit:
                    digest = hashlib.sha256(f"{seed}/{clean_name(part_name)}".encode()).digest()
                    torch.default_generator.manual_seed(int.from_bytes(digest[:8], "little") >> 1)
                    _draw(part, part_name, owner.get(id(part)))
    for name, buffer in model.named_buffers():
        if id(buffer) not in kept and buffer.dtype.is_signed and bool((buffer == _UNSET).any()):
            raise RecipeError(
                f"model: {type(model).__name__} leaves the buffer {clean_name(name)} without a value: models are built on the meta "
                "device, so what the constructor computes is lost; compute it in reset_parameters() of its module"
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
            f"model.builder: {clean_name(name) or 'the model'} ({type(module).__name__}) has parameters and no reset_parameters(), which "
            "would give them their first values: models are built on the meta device. Add one, or an _init_weights(module) to the model"
        )


def _post_order(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    """Children before parents: a class may draw again, in the parent, what the general rule drew in the child."""
    for child_name, child in module.named_children():
        yield from _post_order(child, f"{name}.{child_name}" if name else child_name)
    yield name, module


def _initializers(model: nn.Module) -> dict[int, Any]:
    """For each module the innermost model around it whose `_init_weights` knows it: all of transformers have one."""
    owner: dict[int, Any] = {}
    for module in model.modules():  # parents come before children
        if hasattr(module, "_init_weights"):
            owner |= {id(inner): module for inner in module.modules()}
    return owner


@contextmanager
def _whole_on_cpu(modules: list[nn.Module], done: set[int], kept: set[int]) -> Iterator[None]:
    """Puts whole, plain CPU tensors in the place of the modules' parameters and buffers, and afterwards copies each
    rank's part back. A parameter shared with an earlier unit keeps what it has. Those in `kept` are stood in for by
    meta tensors, which cost nothing to draw, and keep what they have too."""
    whole: dict[int, torch.Tensor] = {}
    saved = [(module, dict(module._parameters), dict(module._buffers)) for module in modules]
    for module in modules:
        for name, parameter in module._parameters.items():
            if parameter is not None:
                if id(parameter) not in whole:
                    # float32 even where the weight is held in fewer bits: the draw is the same
                    dtype = torch.float32 if parameter.is_floating_point() else parameter.dtype
                    device = "meta" if id(parameter) in kept else "cpu"
                    stand_in = nn.Parameter(torch.empty(parameter.shape, dtype=dtype, device=device), requires_grad=False)
                    whole[id(parameter)] = stand_in
                module._parameters[name] = whole[id(parameter)]  # type: ignore[assignment]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                whole[id(buffer)] = module._buffers[name] = buffer.cpu().clone()
    yield
    for module, parameters, buffers in saved:
        module._parameters.update(parameters)
        module._buffers.update(buffers)
        for tensor in [*parameters.values(), *buffers.values()]:
            if tensor is not None and id(tensor) not in done and id(tensor) not in kept:
                done.add(id(tensor))
                _keep_shard(tensor.detach(), whole[id(tensor)])


def _keep_shard(mine: torch.Tensor, whole: torch.Tensor) -> None:
    local, start = local_rows(mine)
    local.copy_(whole[start : start + local.shape[0]] if local.ndim else whole)


def local_rows(mine: torch.Tensor) -> tuple[torch.Tensor, int]:
    """What this rank holds of a tensor, and which row (of dimension 0) of the whole it starts at."""
    if not isinstance(mine, DTensor):
        return mine, 0
    # fully_shard cuts dimension 0 as torch.chunk does, over the mesh's last dimension: the first one holds copies.
    mesh = mine.device_mesh
    chunk = -(-mine.shape[0] // mesh.size(mesh.ndim - 1))
    return mine.to_local(), min(mesh.get_local_rank(mesh.ndim - 1) * chunk, mine.shape[0])
