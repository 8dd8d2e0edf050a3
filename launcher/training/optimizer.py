"""AdamW, the learning-rate schedule, and the loss scale of float16."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import nn

from launcher.recipe import schema

LearningRate = Callable[[int], float]
"""Learning rate of a step; steps count from 1."""


def make_optimizer(model: nn.Module, optimizer: schema.Optimizer) -> torch.optim.AdamW:
    """Fused AdamW, with weight decay on parameters of two or more dimensions (matrices).

    The fused step reads two scalars on the device: `grad_scale`, which divides the gradients, and
    `found_inf`, which skips the step. The loop clips and skips through them, without waiting and
    without another pass over the gradients.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    matrices = [parameter for parameter in trained if parameter.ndim >= 2]
    others = [parameter for parameter in trained if parameter.ndim < 2]
    groups = (
        {"params": matrices, "weight_decay": optimizer.weight_decay},
        {"params": others, "weight_decay": 0.0},
    )
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=optimizer.learning_rate,
        betas=optimizer.betas,
        eps=optimizer.eps,
        fused=True,
    )


def learning_rate(schedule: schema.Schedule, *, peak: float, steps: int) -> LearningRate:
    """The learning rate at a step (1 to `steps`).

    It warms up linearly to the peak at step `warmup_steps`. Then `cosine` and `linear` fall to peak
    * min_ratio at the last step, `constant` stays, and `wsd` (warm-up, stable, decay) stays and
    falls linearly over the last `decay_steps`.
    """
    warmup, floor = schedule.warmup_steps, schedule.min_ratio

    def at(step: int) -> float:
        if step <= warmup:
            return peak * step / warmup
        if schedule.kind == "constant":
            return peak
        begin = warmup
        if schedule.kind == "wsd":
            begin = max(warmup, steps - (schedule.decay_steps or max(1, steps // 10)))
            if step <= begin:
                return peak
        progress = (step - begin) / (steps - begin)
        left = (1 + math.cos(math.pi * progress)) / 2 if schedule.kind == "cosine" else 1 - progress
        return peak * (floor + (1 - floor) * left)

    return at


class LossScale:
    """Scales the loss so that small float16 gradients do not vanish (Micikevicius et al., 2018).

    Halves after a step with gradients that are not finite, doubles after 2,000 finite steps. It is
    a tensor on the device, so nothing waits for it. It stays 1 outside float16.
    """

    def __init__(self, device: torch.device, *, enabled: bool) -> None:
        self.enabled = enabled
        self.value = torch.full((), 65536.0 if enabled else 1.0, device=device)
        self._good_steps = torch.zeros((), device=device)

    def state(self) -> dict[str, float]:
        """For a checkpoint. Waits for the device if the scale is used."""
        if not self.enabled:
            return {"value": 1.0, "good_steps": 0.0}
        return {"value": self.value.item(), "good_steps": self._good_steps.item()}

    def restore(self, state: Mapping[str, float]) -> None:
        """Restores what `state` returned; does nothing without float16."""
        if self.enabled:
            self.value = torch.full_like(self.value, state["value"])
            self._good_steps = torch.full_like(self._good_steps, state["good_steps"])

    def update(self, skipped: torch.Tensor) -> None:
        """skipped: a scalar, 1 if the step's gradients were not finite, else 0."""
        if not self.enabled:
            return
        skipped = skipped.to(self.value.device, non_blocking=True)
        good = (self._good_steps + 1) * (1 - skipped)
        grow = good >= 2000
        grown = torch.where(grow, self.value * 2, self.value)
        self.value = torch.where(skipped > 0, self.value * 0.5, grown)
        self._good_steps = torch.where(grow, torch.zeros_like(good), good)
