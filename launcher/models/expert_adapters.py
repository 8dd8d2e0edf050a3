"""Adapters of the weights of experts, as peft's `target_parameters`: which weights get one, and the
form and the names of their factors in files.

In the model the factors have a row for each expert (`grouped_experts`). In a file of peft A is
(experts x rank, in), expert by expert, and B is (out, rank x experts), where the columns of one rank
are those of all experts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch
from torch import nn

from launcher.models.grouped_experts import (
    DOWN,
    UP,
    GroupedExperts,
    can_compute_in_groups,
    compute_in_groups,
    weight_names,
)
from launcher.models.names import clean_name


def expert_weights(model: nn.Module) -> dict[str, tuple[nn.Module, str]]:
    """The weights of experts that can have an adapter, by clean name: each as its module and its name
    there, in the order of the module's parameters."""
    found: dict[str, tuple[nn.Module, str]] = {}
    for path, module in model.named_modules():
        if can_compute_in_groups(module):
            for name in module._parameters:
                if name in weight_names(module):
                    found[clean_name(f"{path}.{name}")] = module, name
    return found


def add_factors(model: nn.Module, weights: Iterable[str], *, rank: int, scale: float) -> None:
    """Adds factors to these weights of a meta model, by clean name: float32, on the meta device.
    `scale`: of their product."""
    found = expert_weights(model)
    for weight in weights:
        module, name = found[weight]
        experts, *sides = module.get_parameter(name).shape
        outputs, inputs = sides[::-1] if module.is_transposed else sides
        for prefix, shape in ((DOWN, (rank, inputs)), (UP, (outputs, rank))):
            factor = torch.empty(experts, *shape, device="meta")
            module.register_parameter(prefix + name, nn.Parameter(factor))
        compute_in_groups(module)
        assert isinstance(module, GroupedExperts)
        module.adapter_scale = scale


def is_factor(name: str) -> bool:
    """Whether a parameter of this name is a factor of an adapter of experts."""
    return name.rpartition(".")[2].startswith((DOWN, UP))


def wrappers(model: nn.Module, target_parameters: Collection[str]) -> dict[str, str]:
    """For each weight of experts that an adapter of peft with these settings changes, by clean name:
    peft's name of the layer with its factors.

    peft wraps a module once for each weight, in the order of the module's parameters: the first
    weight's wrapper is the innermost, and has the most `base_layer` in its name.
    """
    of_module: dict[str, list[str]] = {}
    for weight in expert_weights(model):
        if any(is_end_of(weight, entry) for entry in target_parameters):
            of_module.setdefault(weight.rpartition(".")[0], []).append(weight)
    return {
        weight: module + ".base_layer" * depth
        for module, weights in of_module.items()
        for depth, weight in enumerate(reversed(weights))
    }


def is_end_of(name: str, entry: str) -> bool:
    """Whether an entry of peft's target_parameters names a parameter: it is the end of its name."""
    return f".{name}".endswith(f".{entry}")


def factor_names(model: nn.Module, target_parameters: Collection[str]) -> dict[str, str]:
    """For each factor of the model by peft's name, without its prefix: the clean name."""
    names: dict[str, str] = {}
    for weight, wrapper in wrappers(model, target_parameters).items():
        module, _, own = weight.rpartition(".")
        names[f"{wrapper}.lora_A.weight"] = f"{module}.{DOWN}{own}"
        names[f"{wrapper}.lora_B.weight"] = f"{module}.{UP}{own}"
    return names


def file_form(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of an adapter, by clean name, as peft's file has it."""
    if not is_factor(name):
        return tensor
    if name.rpartition(".")[2].startswith(DOWN):
        return tensor.flatten(0, 1)
    return tensor.permute(1, 2, 0).flatten(1).contiguous()


def down_of_file(stored: torch.Tensor, experts: int) -> torch.Tensor:
    """A of peft's file as (experts, rank, in)."""
    return stored.view(experts, -1, stored.shape[1])


def up_of_file(stored: torch.Tensor, experts: int) -> torch.Tensor:
    """B of peft's file as (experts, out, rank), not contiguous."""
    return stored.view(len(stored), -1, experts).permute(2, 0, 1)


def model_form(name: str, stored: torch.Tensor, experts: int) -> torch.Tensor:
    """A factor of peft's file as the model has it, by its clean name."""
    down = name.rpartition(".")[2].startswith(DOWN)
    return down_of_file(stored, experts) if down else up_of_file(stored, experts)


def merged_weight(
    weight: torch.Tensor,
    down: torch.Tensor,
    up: torch.Tensor,
    *,
    scale: float,
    transposed: bool,
) -> torch.Tensor:
    """A weight of experts with its adapter added, in float32. down, up: A and B of peft's file.
    transposed: the weight is (experts, in, out), else (experts, out, in)."""
    first, second = down_of_file(down, len(weight)).float(), up_of_file(up, len(weight)).float()
    factors = (first.transpose(1, 2), second.transpose(1, 2)) if transposed else (second, first)
    return torch.baddbmm(weight.float(), *factors, alpha=scale)
