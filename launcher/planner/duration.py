"""How long a run takes by plan, on this machine."""

from __future__ import annotations

import contextlib
import dataclasses
import time

import torch

from launcher.console import seconds_as_text
from launcher.errors import RecipeError
from launcher.planner.machine import Machine
from launcher.planner.profile import ModelProfile, profile_model
from launcher.planner.speed import estimate_time, seconds_of_step
from launcher.recipe.schema import Lora, Recipe

LONG = 300.0
"""Seconds of a run that is long enough to suggest what is faster."""


def time_text(seconds: float, device: str) -> str:
    """`48 s to 1 min 36 s by plan`. On CPUs a run of small steps takes up to 1.6 times as long."""
    low, high = (seconds * share for share in ((0.8, 1.6) if device == "cpu" else (0.8, 1.25)))
    return f"{seconds_as_text(max(1.0, low))} to {seconds_as_text(max(2.0, high))} by plan"


def seconds_of_steps(
    recipe: Recipe, tokens: float, profile: ModelProfile, machine: Machine
) -> float:
    """Predicted seconds of a step with so many tokens. On a CPU with the rate of products that is
    measured now, in a tenth of a second; a plan, whose choices should not depend on it, assumes one."""
    if machine.device == "cpu":
        single, half = (_products(dtype) for dtype in (torch.float32, torch.bfloat16))
        rates = dataclasses.replace(machine.rates, float32_flops=single, half_flops=half)
        machine = dataclasses.replace(machine, rates=rates)
    return seconds_of_step(estimate_time(profile, recipe, machine), recipe, tokens)


def faster_text(
    recipe: Recipe, *, tokens: float, steps: int, seconds: float, machine: Machine
) -> str:
    """What takes less time than these steps of so many seconds; empty: they are few, or nothing is
    known to be faster. On a CPU adapters are: most weights need no gradients and no update."""
    own_code = recipe.model.builder is not None or recipe.data.builder is not None
    if machine.device != "cpu" or steps * seconds < LONG or recipe.lora is not None or own_code:
        return ""
    adapters = dataclasses.replace(recipe, lora=Lora(rank=16, alpha=32))
    with contextlib.suppress(RecipeError):
        profile = profile_model(adapters, device="cpu")
        shorter = seconds_of_steps(adapters, tokens, profile, machine)
        if shorter < 0.8 * seconds:
            duration = seconds_as_text(steps * shorter)
            return f"; with lora='{{rank: 16, alpha: 32}}' about {duration}"
    return ""


def _products(dtype: torch.dtype, seconds: float = 0.05) -> float:
    """Operations a second of matrix products on the threads of this process."""
    left, right = (torch.ones(512, 512, dtype=dtype) for _ in range(2))
    left @ right  # the first product loads the library
    best, end = 0.0, time.perf_counter() + seconds
    while not best or time.perf_counter() < end:
        started = time.perf_counter()
        left @ right
        best = max(best, 2 * 512**3 / (time.perf_counter() - started))
    return best
