"""The training loop: a generator that accumulates, clips, steps, and yields finished steps.

Its caller logs, evaluates, saves and stops. Nothing here waits for the device: loss, norm, clipping
and skipping stay tensors, and the CPU runs ahead until someone reads one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from launcher.data.loader import GlobalBatch
from launcher.strategies.base import WrappedModel
from launcher.training.loss import Loss
from launcher.training.optimizer import LearningRate, LossScale


@dataclass(frozen=True)
class Step:
    """One optimizer step. Its tensors are scalars; reading one waits for the device."""

    number: int
    """Counts from 1."""
    loss: torch.Tensor
    """This rank's part of the global batch's token mean: the sum over ranks is the loss."""
    grad_norm: torch.Tensor
    """Before clipping; not finite if the step was skipped."""
    skipped: torch.Tensor
    """1 if the gradients were not finite and nothing was updated, else 0."""
    learning_rate: float
    batch: GlobalBatch


def train_steps(
    wrapped: WrappedModel,
    optimizer: torch.optim.Optimizer,
    batches: Iterator[GlobalBatch],
    *,
    loss: Loss,
    learning_rate: LearningRate,
    loss_scale: LossScale,
    max_grad_norm: float | None,
    ranks: int,
    heartbeat: Callable[[str], None] = lambda phase: None,
) -> Iterator[Step]:
    """Trains on each global batch and yields it as a Step.

    The loss of a global batch is the sum over its tokens, divided by all its tokens with a target;
    these are counted over all micro-batches and ranks before the first forward pass. The strategy
    averages gradients over `ranks`, hence the factor. heartbeat: called with each phase.
    """
    model = wrapped.model
    model.train()
    heartbeat("data")
    batch = next(batches, None)
    while batch is not None:
        targets = batch.statistics.loss_tokens()
        factor = ranks / targets
        scaled = factor * loss_scale.value if loss_scale.enabled else factor
        total = torch.zeros_like(factor)
        last = len(batch.micro_batches) - 1
        for index, micro_batch in enumerate(batch.micro_batches):
            with wrapped.micro_batch(last=index == last):
                heartbeat("forward")
                with wrapped.forward_context():
                    summed = loss(model, micro_batch)
                heartbeat("backward")
                (summed * scaled).backward()  # type: ignore[no-untyped-call]
                total += summed.detach()
        heartbeat("optimizer")
        # On the optimizer's device: the host with offload
        norm = wrapped.grad_norm()
        scale = loss_scale.value.to(norm.device) if loss_scale.enabled else None
        if scale is not None:
            norm = norm / scale
        skipped = (~torch.isfinite(norm)).to(norm.dtype)
        rate = learning_rate(batch.step)
        for group in optimizer.param_groups:
            group["lr"] = rate
        # The fused step divides by grad_scale and does nothing if found_inf is 1
        optimizer.grad_scale = _divisor(norm, scale, max_grad_norm)  # type: ignore[attr-defined]
        optimizer.found_inf = skipped  # type: ignore[attr-defined]
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss_scale.update(skipped)
        step = Step(batch.step, total / targets, norm, skipped, rate, batch)
        heartbeat("data")
        batch = next(
            batches, None
        )  # its copy to the device starts before the caller waits for this step
        yield step


def _divisor(
    norm: torch.Tensor, scale: torch.Tensor | None, max_grad_norm: float | None
) -> torch.Tensor | None:
    """What gradients are divided by: the loss scale, times the clipping factor."""
    if max_grad_norm is None:
        return scale
    clip = torch.clamp((norm + 1e-6) / max_grad_norm, min=1.0)
    return clip if scale is None else clip * scale
