"""AdamW whose moments are kept in bfloat16 or int8.

A step converts a part of the moments to float32, updates it with torch's fused AdamW, and rounds it
stochastically: without noise, changes below half the distance of two neighbouring values would be
lost. The noise is a function of the seed, the parameter's name, the position in the whole tensor
and the step (`philox`), and blocks of int8 lie inside of a row, which FSDP never divides. So the
state does not depend on how parameters are sharded. On an Nvidia GPU, one Triton kernel updates a
tensor (`low_precision_kernel`).

int8 (Dettmers et al., 2022, with other codes): a block of 256 numbers x has a float32 scale s, its
largest absolute value. The second moment is kept as 255 * (x / s)^(1/4), because a linear code
would set small numbers to 0. Instead of the first moment, its ratio to the root of the second one
is kept, as 127 * x / s: ratios differ less than moments do, so the code can be linear.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator
from itertools import islice
from typing import Any, Literal

import torch
from torch.nn.functional import pad

from launcher.distributed.triton_support import missing_for_triton, runs_own_kernels
from launcher.libraries.private import foreach_add_, fused_adamw_
from launcher.models import philox, tracing
from launcher.models.philox import derived_seed
from launcher.models.shards import local_rows, sharded_zeros

logger = logging.getLogger(__name__)
BLOCK = 256
"""Numbers that share a scale."""
AT_ONCE = {"cpu": 2**18}
"""Numbers that are updated at once, by device type; 2^22 on other devices. Each takes up to 25
bytes meanwhile. On a CPU core, 2^18 is the fastest of 2^16, 2^18 and 2^20."""
_LEVELS = {torch.int8: 127, torch.uint8: 255}
_INT8 = {"exp_avg": torch.int8, "exp_avg_sq": torch.uint8}
State = dict[str, torch.Tensor]
Group = dict[str, Any]
"""A parameter group of an optimizer: parameters, their names, and settings."""
Rectangle = tuple[slice, slice]
"""Rows and columns of a tensor seen as a matrix."""


class LowPrecisionAdamW(torch.optim.Optimizer):
    """Moments of parameters with two dimensions or more are in `state_dtype`, others in float32.

    As with torch's fused optimizers, `grad_scale` divides the gradients, and `found_inf` 1 skips
    the step, which then changes nothing.
    """

    grad_scale: torch.Tensor | None = None
    found_inf = torch.zeros(())

    def __init__(
        self,
        groups: list[Group],
        *,
        state_dtype: Literal["float32", "bfloat16", "int8"],
        seed: int,
        **defaults: Any,
    ) -> None:
        """The groups are of named parameters. The defaults are lr, betas and eps."""
        super().__init__(groups, defaults)
        self._dtype, self._seed = state_dtype, seed

    def initial_state(self, group: Group, parameter: torch.Tensor) -> State:
        """Zeros. A scale `NAME_scale` has a row for each row of the parameter."""
        state = {"step": torch.zeros((), device=parameter.device)}
        for key, code in _INT8.items():
            if parameter.ndim < 2 or self._dtype == "float32":
                state[key] = torch.zeros_like(parameter, dtype=torch.float32)
            elif self._dtype == "bfloat16":
                state[key] = torch.zeros_like(parameter, dtype=torch.bfloat16)
            else:
                state[key] = torch.zeros_like(parameter, dtype=code)
                blocks = -(-parameter[0].numel() // BLOCK)
                shape = torch.Size((parameter.shape[0], blocks))
                state[f"{key}_scale"] = sharded_zeros(parameter, shape)
        return state

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            self.update(group)

    def update(self, group: Group) -> None:
        """Updates the parameters of a group."""
        named = zip(group["param_names"], group["params"], strict=True)
        trained = [(name, parameter) for name, parameter in named if parameter.grad is not None]
        if not trained:
            return
        steps = [self.state[parameter]["step"] for _, parameter in trained]
        # A single tensor instead of the list would be read on the host
        foreach_add_(steps, [1 - self.found_inf.to(steps[0].device)] * len(steps))
        corrections = None
        if any(self._uses_kernel(parameter) for _, parameter in trained):
            corrections = _bias_corrections(steps, group)
        for index, (name, parameter) in enumerate(trained):
            if corrections is not None and self._uses_kernel(parameter):
                self._launch(name, parameter, corrections[index], group)
            else:
                self._update(name, parameter, group)

    def _uses_kernel(self, parameter: torch.Tensor) -> bool:
        local, moment = local_rows(parameter)[0], self.state[parameter]["exp_avg"]
        return local.numel() > 0 and moment.dtype != torch.float32 and has_kernel(local)

    def _seeds(self, name: str) -> dict[str, int]:
        return {key: derived_seed(self._seed, f"{name}.{key}") for key in _INT8}

    def _update(self, name: str, parameter: torch.Tensor, group: Group) -> None:
        state = self.state[parameter]
        local, first_row = local_rows(parameter)
        if not local.numel():
            return
        weights, gradient = _matrix(parameter), _matrix(parameter.grad)  # type: ignore[arg-type]
        seeds = self._seeds(name)
        for part in parts_of(weights, weights.device):
            moments = {key: _load(state, key, part) for key in _INT8}
            ratio, is_ratio = moments["exp_avg"], _matrix(state["exp_avg"]).dtype == torch.int8
            if is_ratio:
                moments["exp_avg"] = ratio * _root(moments["exp_avg_sq"])
            fused_adamw_(
                [weights[part]],
                [gradient[part]],
                [moments["exp_avg"]],
                [moments["exp_avg_sq"]],
                [],
                [state["step"]],
                lr=group["lr"],
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                amsgrad=False,
                maximize=False,
                grad_scale=self.grad_scale,
                found_inf=self.found_inf,
            )
            if is_ratio:
                root = _root(moments["exp_avg_sq"]).clamp_(min=torch.finfo(torch.float32).tiny)
                moments["exp_avg"] /= root
                moments["exp_avg"] = torch.where(self.found_inf > 0, ratio, moments["exp_avg"])
            rows, columns = part
            first = (first_row + rows.start) * weights.shape[1] + columns.start
            for key, moment in moments.items():
                if _matrix(state[key]).dtype != torch.float32:
                    words = seeds[key] & 0xFFFFFFFF, seeds[key] >> 32
                    noise = philox.random_bytes(words, first, moment.numel(), state["step"])
                    _store(state, key, part, moment, noise.view(moment.shape))

    def _launch(
        self, name: str, parameter: torch.Tensor, corrections: torch.Tensor, group: Group
    ) -> None:
        """Updates a parameter with the kernel. `corrections`: of `_bias_corrections`, (4,)."""
        from launcher.optimizers import low_precision_kernel as kernel

        state, first_row = self.state[parameter], local_rows(parameter)[1]
        weights, gradient = _matrix(parameter), _matrix(parameter.grad)  # type: ignore[arg-type]
        rows, width = weights.shape
        beta1, beta2 = group["betas"]
        programs = -(-rows * -(-width // BLOCK) // kernel.BLOCKS)
        names = ("exp_avg", "exp_avg_scale", "exp_avg_sq", "exp_avg_sq_scale")
        moments = [_matrix(state[key]) if key in state else None for key in names]
        kernel.update[(programs,)](
            weights,
            gradient.contiguous(),
            *moments,
            state["step"],
            corrections,
            self.found_inf.to(weights.device),
            self.grad_scale,
            rows,
            width,
            first_row * width,
            *self._seeds(name).values(),
            decay=1 - group["lr"] * group["weight_decay"],
            share_m=1 - beta1,
            beta2=beta2,
            share_v=1 - beta2,
            eps=group["eps"],
            int8=state["exp_avg"].dtype == torch.int8,
            blocks_at_once=kernel.BLOCKS,
            num_warps=kernel.WARPS,
            aligned=width % 16 == 0,
            enable_fp_fusion=False,
        )


def _bias_corrections(steps: list[torch.Tensor], group: Group) -> torch.Tensor:
    """For each step of a parameter, the learning rate over the correction of the first moment's
    bias, and the root of the second one's: (parameters, 4), float32, of which two are used so that
    rows are aligned. Computed in float64 once a step, not in each thread of the kernel."""
    beta1, beta2 = group["betas"]
    step = torch.stack(steps).double()
    step_size = group["lr"] / (1 - beta1**step)
    root = (1 - beta2**step).sqrt_()
    return torch.stack((step_size, root, root, root), 1).float()


def has_kernel(weights: torch.Tensor) -> bool:
    """Whether `low_precision_kernel` updates this tensor."""
    return weights.is_contiguous() and _triton_compiles(weights.device)


@functools.cache
def _triton_compiles(device: torch.device) -> bool:
    """Whether Triton supports this GPU, and finds what it needs to compile."""
    if not runs_own_kernels(device):
        return False
    if (missing := missing_for_triton(device)) is not None:
        logger.warning(
            f"optimizer.state_dtype: {missing}; a step takes some 400 kernels for each 4 million "
            "parameters instead of one for each matrix"
        )
    return missing is None


def _matrix(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor as (rows, columns). Shares its memory."""
    local = local_rows(tensor.detach())[0]
    return local.view(len(local) if local.ndim else 1, -1)


def parts_of(matrix: torch.Tensor, device: torch.device) -> Iterator[Rectangle]:
    """Contiguous parts: several rows, or whole blocks of a single row. The first is the largest. A
    trace gets that one only, or none if the kernel, which takes no memory, does the update."""
    if (trace := tracing.current()) is not None:
        if not trace.updates_on_gpu:
            yield from islice(_parts_of(matrix, device), 1)
        return
    yield from _parts_of(matrix, device)


def _parts_of(matrix: torch.Tensor, device: torch.device) -> Iterator[Rectangle]:
    at_once, (rows, width) = AT_ONCE.get(device.type, 2**22), matrix.shape
    high, wide = max(1, at_once // width), min(width, at_once)
    for row in range(0, rows, high):
        for column in range(0, width, wide):
            yield slice(row, min(row + high, rows)), slice(column, min(column + wide, width))


def _blocks(part: Rectangle) -> Rectangle:
    """The rows and columns of the scales for a part of a moment."""
    rows, columns = part
    return rows, slice(columns.start // BLOCK, -(-columns.stop // BLOCK))


def _root(numbers: torch.Tensor) -> torch.Tensor:
    """Square roots, rounded exactly as a GPU's: MKL's float32 roots on CPUs are not (0.6 % are the
    neighbouring number), and take longer."""
    return numbers.double().sqrt_().float()


def _load(state: State, key: str, part: Rectangle) -> torch.Tensor:
    """A part of a moment in float32; of a float32 moment a view."""
    kept = _matrix(state[key])[part]
    moment = kept.float()
    if kept.dtype in _LEVELS:
        moment /= _LEVELS[kept.dtype]
        moment = moment.square().square_() if kept.dtype == torch.uint8 else moment
        scale = _matrix(state[f"{key}_scale"])[_blocks(part)]
        moment *= scale.repeat_interleave(BLOCK, dim=1)[:, : moment.shape[1]]
    return moment


def _store(
    state: State, key: str, part: Rectangle, moment: torch.Tensor, noise: torch.Tensor
) -> None:
    """Stores part of a moment, rounded up with the probability of the remainder. What `_load`
    returned is stored without a change."""
    kept = _matrix(state[key])[part]
    if kept.dtype == torch.bfloat16:  # the upper half of a float32
        bits = moment.view(torch.int32)
        bits += (noise.int() << 8) + 0x80
        bits &= -0x10000
        kept.copy_(moment)
        return
    rows, width = moment.shape
    blocks = pad(moment.abs(), (0, -width % BLOCK)).view(rows, -1, BLOCK)
    scale = blocks.amax(dim=2)
    _matrix(state[f"{key}_scale"])[_blocks(part)] = scale
    blocks /= scale.clamp(min=torch.finfo(torch.float32).tiny).unsqueeze(2)
    codes = blocks.view(rows, -1)[:, :width]
    codes = _root(_root(codes)) if kept.dtype == torch.uint8 else codes
    codes = codes.mul(_LEVELS[kept.dtype])
    codes += (noise + 0.5) / 256
    codes = codes.floor_().clamp_(max=_LEVELS[kept.dtype]).mul_(moment.sign())
    # A second moment of 0 would divide the first one by eps
    kept.copy_(codes if kept.dtype == torch.int8 else torch.maximum(codes, moment.sign()))
