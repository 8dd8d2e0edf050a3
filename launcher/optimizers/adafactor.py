"""Adafactor (Shazeer and Stern, 2018): of the second moment of a matrix, only the means of its rows
and of its columns are stored.

The update is that of torch.optim.Adafactor, which waits for the device and cannot skip a step. If
parameters are sharded, a step takes two all-reduces: one of column sums and squared weights, and
one of squared updates.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from launcher.models.shards import local_rows, sharded_zeros
from launcher.optimizers.low_precision import Group, State

EPS1, EPS2 = torch.finfo(torch.float32).eps, 1e-3
"""Lower bounds: of the root of the second moment; of the root mean square of a parameter."""
BETA2_DECAY = -0.8
"""1 - beta2 is step ** BETA2_DECAY."""
Values = dict[torch.Tensor, torch.Tensor]
"""Tensors by parameter."""


class Adafactor(torch.optim.Optimizer):
    """`grad_scale` and `found_inf` as in torch's fused optimizers. A step overwrites gradients."""

    grad_scale: torch.Tensor | None = None
    found_inf = torch.zeros(())

    def initial_state(self, group: Group, parameter: torch.Tensor) -> State:
        """Zeros. Every rank holds the means of all columns of a matrix."""
        step, shape = torch.zeros((), device=parameter.device), parameter.shape
        if parameter.ndim < 2:
            return {"step": step, "variance": torch.zeros_like(parameter)}
        columns = torch.Size((*shape[:-2], 1, shape[-1]))
        if parameter.ndim == 2:
            col_var = torch.zeros(columns, device=parameter.device)
        else:
            col_var = sharded_zeros(parameter, columns)
        row_var = sharded_zeros(parameter, torch.Size((*shape[:-1], 1)))
        return {"step": step, "row_var": row_var, "col_var": col_var}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        groups = [(p, g) for g in self.param_groups for p in g["params"] if p.grad is not None]
        gradients = {p: local_rows(p.grad)[0] for p, _ in groups}
        squares: Values = {}
        for parameter, gradient in gradients.items():
            if self.grad_scale is not None:
                gradient.div_(self.grad_scale)
            squares[parameter] = local_rows(parameter.detach())[0].square().sum().view(1)
            if parameter.ndim == 2:
                columns = torch.linalg.vector_norm(gradient, dim=0).square_()
                squares[parameter] = torch.cat((squares[parameter], columns))
        squares = _sum_over_shards(squares)
        updates: Values = {}
        for parameter, gradient in gradients.items():
            gradient.mul_(self._inverse_root(parameter, gradient, squares[parameter][1:]))
            updates[parameter] = gradient.square().sum().view(1)
        updates = _sum_over_shards(updates)
        for parameter, group in groups:
            state, local = self.state[parameter], local_rows(parameter.detach())[0]
            rms = (squares[parameter][0] / parameter.numel()).sqrt()
            relative = state["step"].rsqrt() * group.get("ratio", 1.0)
            rate = rms.clamp(min=EPS2) * relative.clamp(max=group["lr"])
            rate = rate / (updates[parameter][0] / parameter.numel()).sqrt().clamp(min=1.0)
            update = gradients[parameter] * rate + local * (group["lr"] * group["weight_decay"])
            local.sub_(torch.where(self.found_inf > 0, torch.zeros_like(rate), update))

    def _inverse_root(
        self, parameter: torch.Tensor, gradient: torch.Tensor, columns: torch.Tensor
    ) -> torch.Tensor:
        """Updates the second moment, and returns the reciprocal of its square root. `columns` are
        the sums of a matrix's squared gradients over its rows."""
        state = self.state[parameter]
        state["step"] += 1 - self.found_inf
        new = {"variance": gradient.square()}
        if parameter.ndim >= 2:
            rows = torch.linalg.vector_norm(gradient, dim=-1, keepdim=True).square_()
            if parameter.ndim > 2:
                columns = torch.linalg.vector_norm(gradient, dim=-2, keepdim=True).square_()
            new = {"row_var": rows / parameter.shape[-1], "col_var": columns / parameter.shape[-2]}
        moments = {key: local_rows(state[key])[0] for key in new}
        for key, moment in moments.items():
            changed = moment.lerp(new[key].view_as(moment), state["step"] ** BETA2_DECAY)
            moment.copy_(torch.where(self.found_inf > 0, moment, changed))
        if parameter.ndim < 2:
            return moments["variance"].clamp(min=EPS1 * EPS1).rsqrt_()
        row_var, col_var = moments["row_var"], moments["col_var"]
        # The mean of col_var equals the mean of row_var, whose rows are sharded
        mean = col_var.mean(dim=-1, keepdim=True).clamp_(min=EPS1)
        return (row_var @ col_var).div_(mean).clamp_(min=EPS1 * EPS1).rsqrt_()


def _sum_over_shards(values: Values) -> Values:
    """Sums vectors over the ranks that share a parameter, in one all-reduce."""
    sharded = [parameter for parameter in values if isinstance(parameter, DTensor)]
    if not sharded:
        return values
    flat = torch.cat([values[parameter] for parameter in sharded])
    dist.all_reduce(flat, group=sharded[0].device_mesh.get_group("shard"))
    parts = torch.split(flat, [len(values[parameter]) for parameter in sharded])
    return values | dict(zip(sharded, parts, strict=True))
