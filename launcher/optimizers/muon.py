"""Muon (Jordan et al., 2024): the update of a matrix is its momentum, made nearly orthogonal. It is
scaled to the root mean square of AdamW's (Liu et al., 2025), so both take one learning rate.

If matrices are sharded, each rank computes one at a time: an all-to-all gathers its rows, and
another one returns the rows of the result. Experts (three dimensions) are sharded as whole
matrices.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from launcher.models.shards import compute_device, local_rows
from launcher.optimizers.low_precision import Group, LowPrecisionAdamW, State

STEPS, COEFFICIENTS = 5, (3.4445, -4.7750, 2.0315)
"""Number and coefficients of Newton-Schulz iterations, by Jordan: singular values end between 0.7
and 1.2."""
ADAMW_RMS = 0.2
"""Root mean square of AdamW's updates over the learning rate, by Liu et al."""


class Muon(LowPrecisionAdamW):
    """Updates groups without `orthogonalize` as AdamW. Overwrites the gradients of the others."""

    def initial_state(self, group: Group, parameter: torch.Tensor) -> State:
        if group["orthogonalize"]:
            return {"momentum_buffer": torch.zeros_like(parameter)}
        return super().initial_state(group, parameter)

    def update(self, group: Group) -> None:
        if not group["orthogonalize"]:
            super().update(group)
            return
        trained = [p for p in group["params"] if p.grad is not None]
        updates = 1 - self.found_inf
        for parameter in trained:
            gradient = local_rows(parameter.grad)[0]
            momentum = local_rows(self.state[parameter]["momentum_buffer"])[0]
            if self.grad_scale is not None:
                gradient.div_(self.grad_scale)
            gradient.masked_fill_(self.found_inf > 0, 0)
            momentum.lerp_(gradient, updates * (1 - group["momentum"]))
            gradient.lerp_(momentum, group["momentum"])  # Nesterov's
        for parameter, direction in _directions(trained):
            rate = group["lr"] * ADAMW_RMS * max(parameter.shape[-2:]) ** 0.5
            weights = local_rows(parameter.detach())[0]
            weights.mul_(1 - group["lr"] * group["weight_decay"] * updates)
            weights.sub_(direction.view_as(weights).mul_(rate * updates))
            del direction  # freed before the next one is computed


def _directions(
    parameters: Sequence[torch.Tensor],
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Each parameter with the rows of its gradient's direction that are this rank's."""
    sharded = [p for p in parameters if isinstance(p, DTensor) and p.ndim == 2]
    for parameter in parameters:
        if not (isinstance(parameter, DTensor) and parameter.ndim == 2):
            yield parameter, newton_schulz(local_rows(parameter.grad)[0])  # type: ignore[arg-type]
    sharded.sort(key=lambda parameter: parameter.shape)  # ranks get matrices of one shape
    size = sharded[0].device_mesh["shard"].size() if sharded else 1
    for first in range(0, len(sharded), size):
        yield from _exchange(sharded[first : first + size])


def _exchange(matrices: Sequence[DTensor]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Computes the directions of as many matrices as ranks, or fewer: the n-th on rank n."""
    group = matrices[0].device_mesh.get_group("shard")
    rank, size = group.rank(), group.size()
    rows = [local_rows(matrix.grad)[0].reshape(-1) for matrix in matrices]  # type: ignore[arg-type]
    shape = matrices[rank].shape if rank < len(matrices) else torch.Size((0, 1))
    chunk = -(-shape[0] // size)
    whole_from = [max(0, min(chunk, shape[0] - other * chunk)) * shape[1] for other in range(size)]
    rows_to = [len(part) for part in rows] + [0] * (size - len(rows))
    device = compute_device(matrices[0])  # with CPU offload: the GPU
    mine = torch.cat(rows).to(device)
    whole = torch.empty(shape, device=device)
    dist.all_to_all_single(whole.view(-1), mine, whole_from, rows_to, group)
    dist.all_to_all_single(mine, newton_schulz(whole).view(-1), rows_to, whole_from, group)
    del whole
    yield from zip(matrices, torch.split(mine.to(rows[0].device), rows_to), strict=False)


def product_dtype(device: torch.device) -> torch.dtype:
    """The dtype of the iterations' matrix products: bfloat16 on GPUs, as Jordan's, which computes at
    twice the rate of TF32. float32 on CPUs, and with run.float32_matmul: highest, so that results
    agree over ranks and strategies to the precision of float32."""
    exact = device.type != "cuda" or torch.get_float32_matmul_precision() == "highest"
    return torch.float32 if exact else torch.bfloat16


def newton_schulz(matrices: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Approximates the nearest orthogonal matrix of each matrix, with products in `dtype`, by default
    `product_dtype`. The matrices (rows, columns), perhaps with a leading dimension, are float32, and
    overwritten."""
    whole = matrices if matrices.ndim == 3 else matrices.unsqueeze(0)
    whole /= torch.linalg.vector_norm(whole, dim=(1, 2), keepdim=True).clamp(min=1e-7)
    tall, (a, b, c) = whole.shape[1] > whole.shape[2], COEFFICIENTS
    x = (whole.mT if tall else whole).to(dtype or product_dtype(whole.device))
    spare = torch.empty_like(x)
    for _ in range(STEPS):
        gram = x @ x.mT
        gram = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        torch.baddbmm(x, gram, x, beta=a, out=spare)
        x, spare = spare, x
    found = (x.mT if tall else x).view_as(matrices)
    # The result of bfloat16 takes the place of the matrices, so that it needs no more memory
    return found if found.dtype == matrices.dtype else matrices.copy_(found)
