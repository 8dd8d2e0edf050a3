"""Schedule-free AdamW (Defazio et al., 2024): a constant learning rate, and an average of the weights
in place of a schedule.

The gradient is taken at y, between the weights z of AdamW without momentum and their average x:
y = (1 - beta1) * z + beta1 * x. The trained parameters are y. x is in the state under the name of
optimizer.ema's averages, so that evaluations and exports take it as they take those. z follows from
both.
"""

from __future__ import annotations

import torch

from launcher.checkpoint.state import AVERAGE
from launcher.models.shards import local_rows
from launcher.optimizers.low_precision import Group, State


class ScheduleFreeAdamW(torch.optim.Optimizer):
    """`grad_scale` and `found_inf` as in torch's fused optimizers. A step overwrites gradients. The
    defaults are lr, betas and eps. The learning rate must not fall: the weight of a step in the
    average is the square of the largest rate so far, as in the authors' package."""

    grad_scale: torch.Tensor | None = None
    found_inf = torch.zeros(())

    def initial_state(self, group: Group, parameter: torch.Tensor) -> State:
        """Zeros; `create_averages` adds x. weight_sum: of the weights of all steps in the average."""
        scalars = {key: torch.zeros((), device=parameter.device) for key in ("step", "weight_sum")}
        return scalars | {"exp_avg_sq": torch.zeros_like(parameter)}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)

    def _update(self, parameter: torch.Tensor, group: Group) -> None:
        state, (beta1, beta2), rate = self.state[parameter], group["betas"], group["lr"]
        y, gradient = local_rows(parameter.detach())[0], local_rows(parameter.grad)[0]  # type: ignore[arg-type]
        x, second = (local_rows(state[key])[0] for key in (AVERAGE, "exp_avg_sq"))
        updates = 1 - self.found_inf.to(y.device)
        if self.grad_scale is not None:
            gradient.div_(self.grad_scale)
        gradient.masked_fill_(updates == 0, 0)
        state["step"] += updates
        state["weight_sum"] += updates * rate**2
        second.lerp_(gradient.square(), (1 - beta2) * updates)
        correction = 1 - beta2 ** state["step"].clamp(min=1)
        gradient.div_((second / correction).sqrt_().add_(group["eps"]))
        gradient.add_(y, alpha=group["weight_decay"])
        z = torch.lerp(x, y, 1 / (1 - beta1)).sub_(gradient, alpha=rate)
        share = rate**2 / state["weight_sum"].clamp(min=torch.finfo(torch.float32).tiny)
        x.lerp_(z, share * updates)
        y.lerp_(z.lerp_(x, beta1), updates)
