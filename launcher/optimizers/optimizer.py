"""The optimizer, the learning-rate schedule, and the loss scale of float16."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from pathlib import Path
from typing import Any, assert_never

import torch
from torch import nn

from launcher.errors import RecipeError
from launcher.libraries.private import fused_sgd_
from launcher.models.names import clean_name
from launcher.models.shards import local_rows
from launcher.optimizers.adafactor import Adafactor
from launcher.optimizers.average import create_averages
from launcher.optimizers.lion import Lion
from launcher.optimizers.low_precision import Group, LowPrecisionAdamW, State
from launcher.optimizers.matrices import decayed_parameters, orthogonalized_parameters
from launcher.optimizers.muon import Muon
from launcher.optimizers.offload import OffloadedOptimizer, StateFile
from launcher.optimizers.schedule_free import ScheduleFreeAdamW
from launcher.recipe import schema

LearningRate = Callable[[int], float]
"""Learning rate of a step; steps count from 1."""


def make_optimizer(
    model: nn.Module,
    optimizer: schema.Optimizer,
    *,
    seed: int = 0,
    optimized: Callable[[nn.Parameter], nn.Parameter] = lambda parameter: parameter,
    cpu_offload: schema.CpuOffload | None = None,
    blocks: Iterable[nn.Module] = (),
    ratios: Mapping[str, float] | None = None,
    decays: Mapping[str, float] | None = None,
    state_file: Callable[[Path, int], StateFile] | None = None,
) -> torch.optim.Optimizer:
    """The optimizer of the trained parameters, with its state. Weight decay applies to matrices
    (`decayed_parameters`).

    Its step reads two scalars on the device: `grad_scale`, which divides the gradients, and
    `found_inf`, which skips the step. The loop clips and skips through them, without waiting and
    without another pass over the gradients.

    optimized: see `WrappedModel.optimized`. `seed` is that of stochastic rounding. Muon orthogonalizes the matrices of the `blocks`. Raises
    RecipeError if they have none. ratios: of the learning rates of these parameters over that of the
    others, by name: `ratio` of their parameter groups. decays: weight decays of matrices that have another
    one than `optimizer.weight_decay`. state_file: see `OffloadedOptimizer`.
    """
    ratios, decays = ratios or {}, decays or {}
    trained = {
        clean_name(name): optimized(parameter)
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }
    decayed = decayed_parameters(model).keys() & trained.keys()
    inner: set[str] = set()
    if optimizer.name == "muon":
        inner = orthogonalized_parameters(model, blocks).keys() & trained.keys()
        if not inner and trained:
            raise RecipeError("optimizer.name: muon: the model has no matrix in a block; use adamw")

    def sort(name: str, parameter: torch.Tensor) -> tuple[Kind, float, float]:
        if name in inner:
            kind = Kind.ORTHOGONALIZED
        elif name in decayed:
            kind = Kind.MATRIX
        else:
            kind = Kind.VECTOR if parameter.ndim else Kind.SCALAR
        decay = 0.0
        if kind in (Kind.ORTHOGONALIZED, Kind.MATRIX):
            decay = decays.get(name, optimizer.weight_decay)
        return kind, ratios.get(name, 1.0), decay

    sorted_: dict[tuple[Kind, float, float], list[tuple[str, nn.Parameter]]] = {}
    for name, parameter in trained.items():
        sorted_.setdefault(sort(name, parameter), []).append((name, parameter))
    order, groups = [*Kind], list[Group]()
    for key in sorted(sorted_, key=lambda key: (order.index(key[0]), key[1] != 1.0)):
        kind, ratio, decay = key
        options = {"weight_decay": decay, "orthogonalize": kind is Kind.ORTHOGONALIZED}
        groups.append({"params": sorted_[key], "ratio": ratio, **options})
    if not groups:  # a stage of a pipeline whose weights are all frozen
        groups.append(
            {
                "params": [],
                "param_names": [],
                "ratio": 1.0,
                "weight_decay": 0.0,
                "orthogonalize": False,
            }
        )
    made = _make(groups, optimizer, seed)
    # A stage whose weights are all frozen has no state
    where = cpu_offload if trained else None
    if where is not None and (where.what == "optimizer" or where.optimizer_path):
        return OffloadedOptimizer(made, where, state_file=state_file)
    create_state(made)
    if optimizer.averages:
        create_averages(made)
    return made


def _make(groups: list[Group], optimizer: schema.Optimizer, seed: int) -> torch.optim.Optimizer:
    rate = optimizer.learning_rate
    adamw: dict[str, Any] = {"lr": rate, "betas": optimizer.betas, "eps": optimizer.eps}
    low = adamw | {"state_dtype": optimizer.state_dtype, "seed": seed}
    if optimizer.name == "muon":
        return Muon(groups, momentum=optimizer.momentum, **low)
    if optimizer.state_dtype != "float32":
        return LowPrecisionAdamW(groups, **low)
    if optimizer.name == "sgd":
        return Sgd(groups, lr=rate, momentum=optimizer.momentum)
    if optimizer.name == "adafactor":
        return Adafactor(groups, {"lr": rate})
    if optimizer.name == "lion":
        return Lion(groups, {"lr": rate, "betas": optimizer.betas})
    if optimizer.name == "schedule_free_adamw":
        return ScheduleFreeAdamW(groups, adamw)
    return AdamW(groups, **adamw, fused=True)


class Kind(Enum):
    """Kinds of parameters, each a parameter group, in this order."""

    ORTHOGONALIZED = "orthogonalized by Muon"
    MATRIX = "another matrix, with weight decay"
    VECTOR = "vector"
    SCALAR = "scalar"


class AdamW(torch.optim.AdamW):
    """torch.optim.AdamW, with its state made before the first step."""

    def initial_state(self, group: Group, parameter: torch.Tensor) -> State:
        """The moments before the first step, of zeros."""
        moments = {key: torch.zeros_like(parameter) for key in ("exp_avg", "exp_avg_sq")}
        return {"step": torch.zeros((), device=parameter.device), **moments}


class Sgd(torch.optim.SGD):
    """Fused SGD on each rank's shards, because torch's fused SGD does not take DTensors."""

    grad_scale: torch.Tensor | None = None
    found_inf: torch.Tensor | None = None

    def initial_state(self, group: Group, parameter: torch.Tensor) -> State:
        """The momentum before the first step, of zeros."""
        return {"momentum_buffer": torch.zeros_like(parameter)} if group["momentum"] else {}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            trained = [p for p in group["params"] if p.grad is not None]
            if not trained:
                continue
            buffers = [self.state[p]["momentum_buffer"] for p in trained if group["momentum"]]
            fused_sgd_(
                [local_rows(p)[0] for p in trained],
                [local_rows(p.grad)[0] for p in trained],
                [local_rows(buffer)[0] for buffer in buffers],
                weight_decay=group["weight_decay"],
                momentum=group["momentum"],
                lr=group["lr"],
                dampening=0.0,
                nesterov=False,
                maximize=False,
                is_first_step=False,
                grad_scale=self.grad_scale,
                found_inf=self.found_inf,
            )


def create_state(optimizer: Any) -> None:  # of `_make`, with `initial_state`
    """Creates missing state, of zeros, as the first step would."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if not optimizer.state[parameter]:
                optimizer.state[parameter] |= optimizer.initial_state(group, parameter)


def warmup_steps(schedule: schema.Schedule, steps: int) -> int:
    """The steps of warm-up in a run of `steps` steps. A ratio counts as in transformers."""
    if schedule.warmup_ratio is None:
        return schedule.warmup_steps
    return math.ceil(schedule.warmup_ratio * steps)


def learning_rate(schedule: schema.Schedule, *, peak: float, steps: int) -> LearningRate:
    """The learning rate of steps 1 to `steps`. It warms up linearly to the peak at the end of the
    warm-up. Then `cosine` and `linear` fall to peak * min_ratio at the last step, `constant` stays, and
    `wsd` (warm-up, stable, decay) stays and falls linearly over the last `decay_steps`. Without
    warm-up, the first step has the peak."""
    warmup, floor = max(1, warmup_steps(schedule, steps)), schedule.min_ratio

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
        match schedule.kind:
            case "cosine":
                left = (1 + math.cos(math.pi * progress)) / 2
            case "linear" | "wsd":
                left = 1 - progress
            case other:
                assert_never(other)
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
        """Continues from the state in a checkpoint."""
        if self.enabled:
            self.value.fill_(state["value"])
            self._good_steps.fill_(state["good_steps"])

    def update(self, skipped: torch.Tensor) -> None:
        """Adapts the scale. `skipped` is a scalar, 1 if gradients were not finite, else 0."""
        if not self.enabled:
            return
        skipped = skipped.to(self.value.device, non_blocking=True)
        good = (self._good_steps + 1) * (1 - skipped)
        grow = good >= 2000
        grown = torch.where(grow, self.value * 2, self.value)
        self.value = torch.where(skipped > 0, self.value * 0.5, grown)
        self._good_steps = torch.where(grow, torch.zeros_like(good), good)
