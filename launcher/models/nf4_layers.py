"""Layers of blocks whose frozen weights are in NF4: which they are, and how they compute."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping

import torch
from torch import nn

from launcher.console import count_as_text
from launcher.errors import RecipeError
from launcher.models.adapted import adapter_modules
from launcher.models.grouped_experts import (
    can_compute_in_groups,
    compute_in_groups,
    weight_names,
)
from launcher.models.names import clean_name
from launcher.models.nf4 import (
    BLOCK,
    has_kernel,
    linear,
    mark_packed,
    row_bytes,
    shapes,
)
from launcher.models.read_by_weight import read_by_weight
from launcher.models.shards import compute_device


class Nf4Linear(nn.Linear):
    """A frozen linear layer whose `weight` is in NF4."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return linear(inputs, self.weight, self.bias)


def packable(
    blocks: Mapping[str, nn.Module], kept: Container[str] = ()
) -> Iterator[tuple[nn.Module, str]]:
    """The weights of blocks that can be in NF4, each as its module and its name there: of linear
    layers, and of experts that transformers computes in groups. Adapters are not among them, nor
    modules with a weight that is `kept`, by clean name, nor layers that are `read_by_weight`."""
    for path, block in blocks.items():
        others = read_by_weight(block).keys() | adapter_modules(block)
        for name, module in block.named_modules(prefix=path):
            names: tuple[str, ...] = ()
            if type(module) is nn.Linear and module not in others:
                names = ("weight",)
            elif can_compute_in_groups(module):
                names = weight_names(module)
            if any(clean_name(f"{name}.{own}") in kept for own in names):
                continue
            if all(module.get_parameter(own).shape[-1] % BLOCK == 0 for own in names):
                yield from ((module, own) for own in names)


def quantize_blocks(blocks: Mapping[str, nn.Module], kept: Container[str] = ()) -> None:
    """Replaces the weights of frozen blocks on the meta device by such in NF4, but those that are
    `kept`: see `packable`. Raises RecipeError if there are none."""
    made: dict[int, nn.Parameter] = {}  # by id of the weight, which modules may share
    for module, name in packable(blocks, kept):
        weight = module.get_parameter(name)
        if weight.requires_grad:
            raise RecipeError(
                "lora.modules_to_save: not available with lora.quantize for layers in blocks, whose "
                "weights are in 4 bits; name modules outside of the blocks"
            )
        shape = (*weight.shape[:-1], row_bytes(weight.shape[-1]))
        packed = torch.empty(shape, dtype=torch.uint8, device=weight.device)
        parameter = made.setdefault(id(weight), nn.Parameter(packed, requires_grad=False))
        setattr(module, name, parameter)
        mark_packed(module, name)
        if isinstance(module, nn.Linear):
            module.__class__ = Nf4Linear  # as in `compute_in_groups`
        else:
            compute_in_groups(module)
    if not made:
        raise RecipeError(
            "lora.quantize: nothing in the model's blocks can be quantized: NF4 takes torch.nn.Linear "
            f"and layers of experts whose rows are a multiple of {BLOCK} wide, and the blocks have "
            f"{_kinds_of_layers(blocks.values())}; set lora.quantize=null"
        )


def _kinds_of_layers(blocks: Iterable[nn.Module]) -> str:
    """The kinds of layers with matrices in blocks, each with an example."""
    kinds: dict[str, str] = {}
    for block in blocks:
        adapters = adapter_modules(block)
        for name, module in block.named_modules():
            own = module.parameters(recurse=False)
            if module in adapters or all(parameter.ndim < 2 for parameter in own):
                continue
            kind = type(module).__name__
            if isinstance(module, nn.Linear):
                kind += f" with rows of {module.in_features}"
            kinds.setdefault(kind, clean_name(name))
    return ", ".join(f"{kind} (such as {name})" for kind, name in kinds.items())


def describe_nf4(blocks: Iterable[nn.Module]) -> str:
    """How many weights of the blocks are in NF4, and which are not, for the summary of a run."""
    pairs = [(block, shapes(block)) for block in blocks]
    named = [(n, p, of[p]) for block, of in pairs for n, p in block.named_parameters()]
    packed = [p for _, p, shape in named if shape != p.shape]
    others = [(n, p) for n, p, s in named if p.ndim > 1 and not p.requires_grad and s == p.shape]
    numbers = sum(shape.numel() for _, p, shape in named if shape != p.shape)
    text = f"nf4: {len(packed)} weights with {count_as_text(numbers)} parameters"
    if others:
        elements = count_as_text(sum(p.numel() for _, p in others))
        text += (
            f"; {len(others)} others of the blocks with {elements} are not quantized, such as "
            f"{clean_name(others[0][0])} {list(others[0][1].shape)}"
        )
    if any(has_kernel(compute_device(p)) for p in packed):
        text += "; dequantized by a Triton kernel"
    return text
