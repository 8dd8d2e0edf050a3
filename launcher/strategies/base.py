"""The interface of a strategy to the training loop."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from launcher.distributed.rank_layout import OTHERS, STAGES, RankLayout
from launcher.libraries.private import foreach_norm, tree_map_only
from launcher.recipe import schema

_T = TypeVar("_T")
InitFn = Callable[[nn.Module, torch.device, torch.device], None]
"""Initialises a meta model: init_fn(model, device of parameters, device of buffers)."""


class Root(nn.Module):
    """What a strategy wraps: a function of the model runs inside of its forward pass, and so between
    the hooks of FSDP or DDP. It has no parameters of its own, and no name is read from it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, function: Callable[..., _T], *arguments: Any) -> _T:
        """`arguments` should be no tensors: FSDP would cast them."""
        return function(self.model, *arguments)


@dataclass(frozen=True)
class NormGroup:
    """Ranks over which gradients are divided."""

    group: dist.ProcessGroup
    same: frozenset[nn.Parameter] = frozenset()
    """Parameters whose gradients are not divided: all ranks of the group have the same ones."""
    of_stages: bool = False
    """Whether the ranks have different stages of a pipeline: a stage whose weights are all frozen has no
    gradient."""


class MicroBatchSchedule(ABC):
    """Runs the micro-batches of a step in another order than one after another."""

    @abstractmethod
    def description(self) -> str:
        """Describes the order, and what of the model this rank has."""

    @abstractmethod
    def accumulate(
        self,
        wrapped: WrappedModel,
        micro_batches: Sequence[_T],
        loss: Callable[[nn.Module, _T], torch.Tensor],
        factor: torch.Tensor,
        *,
        heartbeat: Callable[[str], None],
        stop_reached: Callable[[], bool],
    ) -> torch.Tensor | None:
        """See `WrappedModel.accumulate`."""


class WrappedModel(ABC):
    """A model distributed over its ranks. `root` is the wrapper of a `Root`; `module` is the model,
    with its parameters, names and config."""

    measures_waits = True
    """Whether all waits of compute for communication are inside of `waiting`."""

    def __init__(self, root: nn.Module, *, module: nn.Module, ranks: RankLayout) -> None:
        self.root, self.module, self.waiting = root, module, ranks.waiting
        self.autocast_dtype: torch.dtype | None = None
        """Forward passes run under autocast with this dtype; None: without."""
        self.norm_groups: list[NormGroup] = []
        """The groups over which gradients are divided, the innermost first."""
        self.counted_elsewhere: frozenset[nn.Parameter] = frozenset()
        """Parameters whose gradients another rank of the last of these groups has, too."""
        self.micro_batch_schedule: MicroBatchSchedule | None = None
        """None: micro-batches run one after another."""
        self._device_type = ranks.device.type
        self._parameters = [p for p in module.parameters() if p.requires_grad]

    @abstractmethod
    def description(self) -> str:
        """Describes precision and sharding of the wrapped model."""

    def summary(self) -> str:
        """The order of the micro-batches, if it is another one, and the description."""
        parts = [self.micro_batch_schedule, self]
        return "; ".join(part.description() for part in parts if part is not None)

    def forward_context(self) -> AbstractContextManager[object]:
        """Context that sets the precision of forward passes."""
        if self.autocast_dtype is None:
            return nullcontext()
        return torch.autocast(self._device_type, dtype=self.autocast_dtype)

    def call(self, function: Callable[..., _T], *arguments: Any) -> _T:
        """`function(model, *arguments)` in the precision of forward passes, between the hooks that
        gather weights and reduce gradients."""
        with self.forward_context():
            result: _T = self.root(function, *arguments)
        return result

    def accumulate(
        self,
        micro_batches: Sequence[_T],
        loss: Callable[[nn.Module, _T], torch.Tensor],
        factor: torch.Tensor,
        *,
        heartbeat: Callable[[str], None] = lambda phase: None,
        stop_reached: Callable[[], bool] = lambda: False,
    ) -> torch.Tensor | None:
        """Runs the micro-batches of a step forwards and backwards. The gradients are those of their
        summed losses times `factor`. Returns the sum of what `loss` returns, detached; None if
        `stop_reached`, which is called before each micro-batch, returns true."""
        if self.micro_batch_schedule is not None:
            return self.micro_batch_schedule.accumulate(
                self, micro_batches, loss, factor, heartbeat=heartbeat, stop_reached=stop_reached
            )
        total = torch.zeros_like(factor)
        last = len(micro_batches) - 1
        for index, micro_batch in enumerate(micro_batches):
            if stop_reached():
                return None
            with self.micro_batch(last=index == last):
                heartbeat("forward")
                summed = self.call(loss, micro_batch)
                heartbeat("backward")
                differentiated = summed if summed.ndim == 0 else summed[0]
                (differentiated * factor).backward()  # type: ignore[no-untyped-call]
                found = summed.detach()
                total = total.add_(found) if found.ndim == 0 else total + found
        return total

    def without_gradients(self, function: Callable[..., _T], *arguments: Any) -> _T:
        """`call`, within `evaluating`. Gradients are off before the root runs: DDP would expect a
        backward pass, and reduce the gradients of a later micro-batch that is not the last."""
        with torch.no_grad():
            return self.call(function, *arguments)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Around calls `without_gradients`: in evaluation mode; weights are sharded again after
        them."""
        training = self.root.training
        self.root.eval()
        yield
        self.reshard()
        self.root.train(training)

    @abstractmethod
    def micro_batch(self, *, last: bool) -> AbstractContextManager[None]:
        """Context around the forward and backward pass of a micro-batch, which sets whether
        gradients are reduced. `last` is true for the last micro-batch of the step."""

    def reshard(self) -> None:  # noqa: B027 (nothing to do without sharding)
        """Frees unsharded weights, after forward passes without a backward pass."""

    def optimized(self, parameter: nn.Parameter) -> nn.Parameter:
        """What the optimizer updates in the place of a trained parameter."""
        return parameter

    def finish_gradients(self) -> None:  # noqa: B027 (most are complete after the backward pass)
        """Completes the gradients, before their norm is computed."""

    def before_step(self) -> None:  # noqa: B027 (most have the gradients that the optimizer reads)
        """Gives the optimized parameters their gradients."""

    def after_step(self) -> None:  # noqa: B027 (most share memory with the optimized parameters)
        """Gives the model the updated parameters."""

    @torch.no_grad()
    def grad_norm(self) -> torch.Tensor:
        """2-norm of all gradients over all ranks, including any loss scale: a scalar tensor, equal
        on every rank. Does not synchronize with the device."""
        counted = (p for p in self._parameters if p not in self.counted_elsewhere)
        left = {p: local_gradient(p) for p in counted if p.grad is not None}
        if not self.norm_groups:
            return joint_norm([*left.values()])
        total: torch.Tensor | None = None
        for level in self.norm_groups:
            total = _plus_squares(total, [left.pop(p) for p in [*left] if p not in level.same])
            if total is None and level.of_stages:  # all ranks of the group add up
                total = torch.zeros((), device=next(self.module.parameters()).device)
            if total is not None:
                with self.waiting(STAGES if level.of_stages else OTHERS):
                    dist.all_reduce(total, group=level.group)
        total = _plus_squares(total, [*left.values()])
        return joint_norm([]) if total is None else total.sqrt()


def local_gradient(parameter: nn.Parameter) -> torch.Tensor:
    """This rank's part of a parameter's gradient, which must exist."""
    gradient = parameter.grad
    assert gradient is not None
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


def _plus_squares(total: torch.Tensor | None, tensors: list[torch.Tensor]) -> torch.Tensor | None:
    """The sum of squares with those of further tensors; None: there are none yet."""
    if not tensors:
        return total
    squared = joint_norm(tensors).square()
    return squared if total is None else total + squared


def joint_norm(tensors: list[torch.Tensor]) -> torch.Tensor:
    """2-norm of all tensors together, which are on one device: a scalar tensor.

    On a CPU torch adds the squares of a float32 tensor in float32 and in order, so the norm of 66
    million numbers was too small by 0.6 %. So norms are computed by rows there.

    Raises RuntimeError if there are no tensors: no gradient has been reduced."""
    if not tensors:
        raise RuntimeError("No parameter has a gradient: the backward pass has reduced none")
    norm: torch.Tensor
    if tensors[0].device.type == "cpu":
        rows = [torch.linalg.vector_norm(tensor, dim=-1).flatten() for tensor in tensors]
        norm = torch.linalg.vector_norm(torch.cat(rows), dtype=torch.float64).float()
    else:
        norm = torch.linalg.vector_norm(torch.stack(foreach_norm(tensors)))
    return norm


def cast_inputs(module: nn.Module, dtype: torch.dtype) -> None:
    """Casts floating-point tensors among the arguments of a module, before its other hooks."""

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    def hook(module: nn.Module, args: object, kwargs: object) -> Any:
        return tree_map_only(torch.Tensor, cast, (args, kwargs))

    module.register_forward_pre_hook(hook, with_kwargs=True, prepend=True)


def compute_dtype(strategy: schema.Strategy) -> torch.dtype:
    """The dtype of forward and backward passes."""
    precision = strategy.mixed_precision
    dtype: torch.dtype = getattr(torch, "float32" if precision is None else precision.param_dtype)
    return dtype


def offloads_parameters(cpu_offload: schema.CpuOffload | None) -> bool:
    """Whether parameters and gradients are in host memory, where the optimizer's step runs."""
    return cpu_offload is not None and cpu_offload.what == "all"


def dtype_name(dtype: torch.dtype) -> str:
    """The name that a recipe gives to a dtype."""
    return str(dtype).removeprefix("torch.")


def units_without(
    units: Iterable[nn.Module], parameters: Collection[nn.Parameter]
) -> list[nn.Module]:
    """The units of FSDP that have none of these parameters. A unit with a parameter in float32 is a
    part of the root instead."""
    kept = set(parameters)
    return [unit for unit in units if kept.isdisjoint(unit.parameters())]
