"""Lion (Chen et al., 2023, algorithm 2): each number of a parameter changes by the learning rate, in
the direction of the sign of its momentum and gradient. The momentum is the only state.
"""

from __future__ import annotations

import torch

from launcher.models.shards import local_rows
from launcher.optimizers.low_precision import Group, State


class Lion(torch.optim.Optimizer):
    """`grad_scale` and `found_inf` as in torch's fused optimizers. A step overwrites gradients. The
    defaults are lr and betas."""

    grad_scale: torch.Tensor | None = None
    found_inf = torch.zeros(())

    def initial_state(self, group: Group, parameter: torch.Tensor) -> State:
        """The momentum before the first step, of zeros."""
        return {"exp_avg": torch.zeros_like(parameter)}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            (beta1, beta2), rate = group["betas"], group["lr"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                weights = local_rows(parameter.detach())[0]
                gradient = local_rows(parameter.grad)[0]
                momentum = local_rows(self.state[parameter]["exp_avg"])[0]
                updates = 1 - self.found_inf.to(weights.device)
                if self.grad_scale is not None:
                    gradient.div_(self.grad_scale)
                gradient.masked_fill_(updates == 0, 0)
                sign = momentum.lerp(gradient, 1 - beta1).sign_()
                weights.mul_(1 - rate * group["weight_decay"] * updates)
                weights.addcmul_(sign, updates, value=-rate)
                momentum.lerp_(gradient, (1 - beta2) * updates)
