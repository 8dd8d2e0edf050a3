"""Layers of experts that the launcher computes itself: those with weights in NF4 or with adapters.

An adapter of a weight of experts is a pair of factors for each expert. Both are parameters of the
module of experts, with a row for each expert as the weight has: `lora_A_NAME` is (experts, rank, in)
and `lora_B_NAME` is (experts, out, rank). So FSDP and expert parallelism divide them like the weight.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from launcher.libraries.private import apply_gate
from launcher.models.names import clean_name
from launcher.models.nf4 import grouped_linear, in_dtype_of_autocast

DOWN, UP = "lora_A_", "lora_B_"
"""Prefixes of the names of the factors A and B of a weight."""
_ROW_BYTES = 16
"""Rows of the operands of a grouped product are a multiple of this many bytes long."""


class GroupedExperts(nn.Module):
    """Mixed into a class of experts of transformers. Computes as transformers does in groups, with
    weights that may be in NF4, and with their adapters."""

    adapter_scale = 1.0
    """Scale of the products of factors."""

    def forward(
        self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: Any
    ) -> torch.Tensor:
        """Like `grouped_mm_experts_forward` of transformers: hidden_states are (tokens, hidden),
        the others (tokens, experts of a token)."""
        inputs = in_dtype_of_autocast(hidden_states, "a layer of experts")
        used = top_k_index.shape[-1]
        experts, order = top_k_index.reshape(-1).sort(stable=True)
        numbers = experts.float() if experts.device.type == "cpu" else experts.int()
        counts = torch.histc(numbers, self.num_experts, min=0, max=self.num_experts - 1)
        ends = counts.cumsum(0, dtype=torch.int32)

        def product(inputs: torch.Tensor, name: str) -> torch.Tensor:
            made = grouped_linear(inputs, getattr(self, name), ends, transposed=self.is_transposed)
            down = self._parameters.get(DOWN + name)
            if down is not None:
                up = self._parameters[UP + name]
                made = made + low_rank_product(
                    inputs.to(made.dtype), down, up, ends, scale=self.adapter_scale
                )
            if self.has_bias:
                made = made + getattr(self, f"{name}_bias")[experts].to(made.dtype)
            return made

        first, second = weight_names(self)
        up = product(inputs[order // used], first)
        up = apply_gate(self, up) if self.has_gate else self.act_fn(up)
        made: torch.Tensor = product(up.to(inputs.dtype), second)
        made = made * top_k_weights.reshape(-1)[order].unsqueeze(-1)
        made = made[order.argsort()].view(*top_k_index.shape, -1).sum(1)
        summed: torch.Tensor = made.to(hidden_states.dtype)
        return summed


def low_rank_product(
    inputs: torch.Tensor,
    down: torch.Tensor,
    up: torch.Tensor,
    ends: torch.Tensor,
    *,
    scale: float,
) -> torch.Tensor:
    """scale * B A x for each row of inputs (tokens, in), which are sorted by expert, with the factors
    `down` (experts, rank, in) and `up` (experts, out, rank) of its expert. ends: the end of each
    expert's tokens. Returns (tokens, out) in the dtype of inputs."""
    down, up = down.to(inputs.dtype), up.to(inputs.dtype)
    if missing := -down.shape[1] % (_ROW_BYTES // down.itemsize):
        down = nn.functional.pad(down, (0, 0, 0, missing))
        up = nn.functional.pad(up, (0, missing))
    inner = grouped_linear(inputs, down, ends, transposed=False)
    return grouped_linear(inner * scale, up, ends, transposed=False)


def weight_names(experts: Any) -> tuple[str, str]:
    """The names of the two weights of a module of experts, in the order of their products."""
    return ("gate_up_proj" if experts.has_gate else "up_proj"), "down_proj"


def can_compute_in_groups(module: nn.Module) -> bool:
    """Whether a module is a layer of experts that `GroupedExperts` can compute: transformers sets
    these attributes on modules that compute with its interface for experts."""
    return hasattr(module, "is_transposed") and not getattr(module, "has_post_expert_norm", False)


def compute_in_groups(module: nn.Module) -> None:
    """Makes a layer of experts compute as `GroupedExperts`."""
    # Another class, not another module: it computes differently, and has all else as it was: hooks,
    # attributes, and the places that hold it. The class of experts has a constructor of each model's
    # own
    if not isinstance(module, GroupedExperts):
        own = type(module)
        module.__class__ = type(own.__name__, (GroupedExperts, own), {})


def add_factors(module: nn.Module, name: str, *, rank: int, scale: float) -> None:
    """Adds factors to this weight of a layer of experts: float32, on the meta device. `scale`: of
    their product."""
    experts, *sides = module.get_parameter(name).shape
    outputs, inputs = sides[::-1] if module.is_transposed else sides
    for prefix, shape in ((DOWN, (rank, inputs)), (UP, (outputs, rank))):
        factor = torch.empty(experts, *shape, device="meta")
        module.register_parameter(prefix + name, nn.Parameter(factor))
    compute_in_groups(module)
    assert isinstance(module, GroupedExperts)
    module.adapter_scale = scale


def expert_weights(model: nn.Module) -> dict[str, tuple[nn.Module, str]]:
    """The weights of experts that can have an adapter, by clean name: each as its module and its name
    there."""
    return {
        clean_name(f"{path}.{name}"): (module, name)
        for path, module in model.named_modules()
        for name in weights_of(module)
    }


def weights_of(module: nn.Module) -> list[str]:
    """The names of the weights of experts in a module, in the order of its parameters. None if
    `GroupedExperts` cannot compute it."""
    known = weight_names(module) if can_compute_in_groups(module) else ()
    return [name for name in module._parameters if name in known]
