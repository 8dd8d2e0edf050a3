"""The training loop: a generator that accumulates, clips, steps, and yields finished steps.

Its caller logs, evaluates, saves and stops. Nothing here waits for the device: loss, norm and
skipping stay tensors, and the CPU runs ahead until the caller reads one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from launcher.data.loader import GlobalBatch
from launcher.models.expert_load import ExpertLoad
from launcher.models.micro_batch import MicroBatch
from launcher.models.router_balance import RouterBalance
from launcher.objectives.loss import Loss
from launcher.optimizers.average import update_averages
from launcher.optimizers.optimizer import LearningRate, LossScale
from launcher.strategies.base import WrappedModel


@dataclass(frozen=True)
class Step:
    """One optimizer step. Its tensors are scalars; reading one waits for the device."""

    number: int
    loss: torch.Tensor
    """This rank's part of the mean loss of the global batch's tokens: the sum over ranks is the
    loss. NaN if the batch has no target."""
    grad_norm: torch.Tensor
    """The norm before clipping; not finite if the step was skipped."""
    skipped: torch.Tensor
    """1 if the gradients were not finite and nothing was updated, else 0."""
    learning_rate: float
    batch: GlobalBatch
    metrics: torch.Tensor | None = None
    """A vector: this rank's parts of the further metrics that the loss function returns."""


@dataclass(frozen=True)
class Update:
    """How gradients update the weights."""

    optimizer: torch.optim.Optimizer
    learning_rate: LearningRate
    loss_scale: LossScale
    max_grad_norm: float | None
    average_decay: float | None = None
    """Decay of the moving average of the weights; None: there is none."""
    wait_for_copies: Callable[[], None] = lambda: None
    """Waits until a save that has begun has copied the weights."""

    def apply(
        self, wrapped: WrappedModel, step: int, weight: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, float]:
        """Clips the gradients, updates the weights, and frees the gradients.

        weight: the sum of the weights of all targets, a scalar (`StepStatistics.loss_weight`).
        If the global batch has no targets, no weight changes, not even by weight decay or momentum.
        Returns the norm of the unscaled gradients, 1 if gradients were not finite (else 0), and the
        learning rate.
        """
        optimizer, loss_scale = self.optimizer, self.loss_scale
        wrapped.finish_gradients()
        norm = wrapped.grad_norm()  # on the optimizer's device (the host with offload)
        divisor = loss_scale.value.to(norm.device) if loss_scale.enabled else None
        if divisor is not None:
            norm = norm / divisor
        skipped = (~torch.isfinite(norm)).to(norm.dtype)
        if self.max_grad_norm is not None:
            clip = torch.clamp((norm + 1e-6) / self.max_grad_norm, min=1.0)
            divisor = clip if divisor is None else clip * divisor
        rate = self.learning_rate(step)
        for group in optimizer.param_groups:
            group["lr"] = rate * group.get("ratio", 1.0)
        nothing = (weight == 0).to(skipped)
        # The fused step divides by grad_scale and does nothing if found_inf is 1
        optimizer.grad_scale = divisor  # type: ignore[attr-defined]
        optimizer.found_inf = torch.maximum(skipped, nothing)  # type: ignore[attr-defined]
        self.wait_for_copies()
        wrapped.before_step()
        optimizer.step()
        wrapped.after_step()
        if self.average_decay is not None:
            update_averages(optimizer, self.average_decay)
        optimizer.zero_grad(set_to_none=True)
        loss_scale.update(skipped)
        return norm, skipped, rate


class PrepareStep(Protocol):
    """See `Objective.prepare_step`."""

    def __call__(
        self,
        wrapped: WrappedModel,
        micro_batches: Sequence[MicroBatch],
        step: int,
        *,
        heartbeat: Callable[[str], None],
    ) -> Sequence[MicroBatch]: ...


def keep(
    wrapped: WrappedModel,
    micro_batches: Sequence[MicroBatch],
    step: int,
    *,
    heartbeat: Callable[[str], None],
) -> Sequence[MicroBatch]:
    """The micro-batches as they are: their losses need nothing of one another."""
    return micro_batches


def train_steps(
    wrapped: WrappedModel,
    batches: Iterator[GlobalBatch],
    *,
    loss: Loss,
    prepare_step: PrepareStep = keep,
    update: Update,
    averaged_over: int,
    counts: bool = True,
    router_balance: RouterBalance | None = None,
    expert_load: ExpertLoad | None = None,
    heartbeat: Callable[[str], None] = lambda phase: None,
    stop_reached: Callable[[], bool] = lambda: False,
) -> Iterator[Step]:
    """Trains on each global batch and yields it as a Step. Calls `heartbeat` with each phase.

    Calls `stop_reached` before each micro-batch. If it returns true, the gradients of the step are
    dropped and the iteration ends: weights and optimizer state are those after the step before.

    The loss of a global batch is the sum of the losses of its tokens, divided by the sum of the
    weights of its tokens with a target, or without weights by their number. Both sums are over all
    micro-batches and ranks that count: of the ranks that compute the same tokens, one `counts`. The
    strategy averages gradients over `averaged_over` groups of such ranks, so the loss is multiplied by
    the number of groups before the backward pass.
    """
    wrapped.root.train()
    if expert_load is not None:
        expert_load.forget()
        loss = expert_load.counting(loss)
    heartbeat("data")
    batch = next(batches, None)
    while batch is not None:
        weight = batch.statistics.loss_weight()
        factor = averaged_over / weight.masked_fill(weight == 0, 1)
        if update.loss_scale.enabled:
            factor = factor * update.loss_scale.value
        if router_balance is not None:
            router_balance.begin(batch.statistics.read().tokens, weight)
        prepared = prepare_step(wrapped, batch.micro_batches, batch.step, heartbeat=heartbeat)
        total = wrapped.accumulate(
            prepared, loss, factor, heartbeat=heartbeat, stop_reached=stop_reached
        )
        if total is None:
            wrapped.module.zero_grad(set_to_none=True)
            return
        heartbeat("optimizer")
        norm, skipped, rate = update.apply(wrapped, batch.step, weight)
        if router_balance is not None:
            router_balance.end(skipped)
        if expert_load is not None:
            expert_load.end_step(skipped)
        mean = total / weight if counts else torch.zeros_like(total)
        metrics = None
        if mean.ndim:
            mean, metrics = mean[0], mean[1:]
        step = Step(batch.step, mean, norm, skipped, rate, batch, metrics)
        heartbeat("data")
        # Its copy to the device starts before the caller waits for this step
        batch = next(batches, None)
        yield step
