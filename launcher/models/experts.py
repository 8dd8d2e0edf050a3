"""Expert parallelism: the ranks of a group hold different experts of each layer.

Each rank routes its own tokens. An all-to-all sends them to the ranks of their experts, and another
one returns the results. The experts compute with the code of transformers.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from launcher.errors import RecipeError
from launcher.libraries.families import EXPERTS, ROUTER, STACKED_EXPERTS
from launcher.libraries.private import REDISTRIBUTE_LOGGER, expert_plan
from launcher.models import tracing
from launcher.models.adapted import adapter_parameters
from launcher.models.names import clean_name

KEY = "strategy.expert_parallel_size"


def find_experts(model: nn.Module) -> dict[str, nn.Module]:
    """The modules whose parameters have a row for each expert, by name: those that transformers'
    plan for expert parallelism names."""
    named = {name for name, style in expert_plan(model).items() if style in EXPERTS}
    return {
        name: module
        for name, module in model.named_modules()
        if re.sub(r"\.\d+(?=\.|$)", ".*", name) in named
    }


def check_experts(model: nn.Module, size: int) -> None:
    """Raises RecipeError if the model has no experts that can be divided over this number of ranks."""
    name, found = type(model).__name__, find_experts(model)
    styles = expert_plan(model)
    if not found:
        raise RecipeError(f"{KEY}: transformers has no plan for experts of {name}; use 1")
    if unknown := set(styles.values()) - {STACKED_EXPERTS, ROUTER, *EXPERTS}:
        what = f"the plan for {name} has unknown entries ({', '.join(sorted(unknown))})"
        raise RecipeError(f"{KEY}: {what}; use 1")
    adapters = adapter_parameters(model)
    for path, module in found.items():
        pattern = re.sub(r"\.\d+(?=\.|$)", ".*", path)
        names = [own for own, _ in module.named_parameters()]
        names = [own for own in names if clean_name(f"{path}.{own}") not in adapters]
        others = [own for own in names if f"{pattern}.{own}" not in styles]
        # transformers sets this attribute on modules that compute with its interface
        if others or not hasattr(module, "has_gate"):
            what = f"{path} of {name} does not compute its experts with transformers' interface"
            raise RecipeError(f"{KEY}: {what}; use 1")
        experts: Any = module
        if experts.num_experts % size:
            count = experts.num_experts
            divisors = ", ".join(str(n) for n in range(1, count + 1) if count % n == 0)
            what = f"{size} does not divide the {count} experts of {name}"
            raise RecipeError(f"{KEY}: {what}; use one of {divisors}")


def divide_experts(model: nn.Module, mesh: DeviceMesh) -> list[nn.Module]:
    """Divides the experts of a meta model over the ranks of a mesh. Returns their modules. Their
    parameters become DTensors with the shape of all experts."""
    # It warns that a whole tensor, for an export, takes two all-gathers
    logging.getLogger(REDISTRIBUTE_LOGGER).setLevel(logging.ERROR)
    found = [*find_experts(model).values()]
    for module in found:
        _divide(module, mesh)
    return found


def _divide(experts: Any, mesh: DeviceMesh) -> None:
    for name, parameter in experts.named_parameters():
        divided = distribute_tensor(parameter.detach(), mesh, [Shard(0)], src_data_rank=None)
        experts._parameters[name] = nn.Parameter(divided, requires_grad=parameter.requires_grad)
    experts.num_experts //= mesh.size()
    experts.forward = partial(dispatched, experts, experts.forward, mesh.get_group())


@torch.compiler.disable(  # type: ignore[no-untyped-call, untyped-decorator]
    reason="collectives whose sizes depend on the routing"
)
def dispatched(
    experts: Any,
    forward: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor],
    group: dist.ProcessGroup,
    hidden: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
) -> torch.Tensor:
    """The weighted sum of the results of each token's experts. `forward` computes those of this
    rank; `experts.num_experts` is their number.

    hidden: (tokens, features) of this rank; chosen, weights: (tokens, experts of a token). Returns
    the shape of hidden.
    """
    ranked, order = chosen.flatten().sort(stable=True)
    sent, received, ids = exchange_counts(ranked, experts.num_experts, group)
    rows = _send(hidden[order // chosen.shape[-1]], group, sent, received)
    if not any(received):  # the backward pass still needs this rank in its collectives
        ids, rows = ids.new_zeros(1), rows.sum(0, keepdim=True)
    with _LocalParameters(experts, group.size()):
        out = forward(rows, ids[:, None], torch.ones_like(rows[:, :1]))
    out = _send(out[: sum(received)], group, received, sent)
    out = torch.empty_like(out).index_copy(0, order, out).view(*chosen.shape, -1)
    return (out * weights.unsqueeze(-1)).sum(1).to(hidden.dtype)


def exchange_counts(
    ranked: torch.Tensor, here: int, group: dist.ProcessGroup
) -> tuple[list[int], list[int], torch.Tensor]:
    """The numbers of rows that this rank sends to each rank and receives from each, and for each
    received row its expert, of the `here` experts of this rank. Waits for the device once.

    ranked: the experts of this rank's rows, in order. In a trace all experts get the same number.
    """
    ranks = group.size()
    if tracing.current() is not None:
        uniform = uniform_counts(ranked.numel(), ranks)
        return uniform, uniform, ranked
    # torch.bincount waits for the device twice, to check its input
    bounds = torch.arange(here * ranks + 1, device=ranked.device)
    counts = torch.searchsorted(ranked, bounds).diff().view(ranks, here)
    incoming = torch.empty_like(counts)
    dist.all_to_all_single(incoming, counts, group=group)
    sent, received = torch.stack((counts.sum(1), incoming.sum(1))).tolist()
    ids = torch.arange(here, device=ranked.device).repeat(ranks)
    ids = ids.repeat_interleave(incoming.flatten(), output_size=sum(received))
    return sent, received, ids


def uniform_counts(rows: int, ranks: int) -> list[int]:
    """The numbers of rows that a rank sends to each rank if all experts get as many."""
    return [rows // ranks + (rank < rows % ranks) for rank in range(ranks)]


class _LocalParameters:
    """A context in which a module has this rank's part of its parameters, whose gradients are
    divided by the number of ranks.

    FSDP averages gradients over the ranks that have the same experts. Each of these gradients is
    already a sum over the tokens of all ranks that have different experts.
    """

    def __init__(self, module: nn.Module, ranks: int) -> None:
        self._parameters, self._ranks = module._parameters, ranks

    def __enter__(self) -> None:
        self._before = dict(self._parameters)
        for name, parameter in self._before.items():
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            self._parameters[name] = _DividedGradient.apply(local, self._ranks)  # type: ignore

    def __exit__(self, *error: object) -> None:
        self._parameters.update(self._before)


class _DividedGradient(torch.autograd.Function):
    """Identity, whose gradient is divided. `set_gradient_divide_factor` of FSDP divides twice over
    a mesh of one rank (torch 2.13)."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, divisor: int) -> torch.Tensor:
        ctx.divisor = divisor
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient / ctx.divisor, None


def _send(
    rows: torch.Tensor, group: dist.ProcessGroup, sent: list[int], received: list[int]
) -> torch.Tensor:
    made: torch.Tensor = _Send.apply(rows, group, sent, received)  # type: ignore[no-untyped-call]
    return made


class _Send(torch.autograd.Function):
    """Sends consecutive rows to each rank of the group."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, group: dist.ProcessGroup, sent: list[int], received: list[int]
    ) -> torch.Tensor:
        ctx.rest = group, received, sent
        out = rows.new_empty(sum(received), *rows.shape[1:])
        dist.all_to_all_single(out, rows.contiguous(), received, sent, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return _send(gradient, *ctx.rest), None, None, None
