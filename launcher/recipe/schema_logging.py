"""Keys of a recipe about metrics and profiles."""

from __future__ import annotations

from typing import Literal

from pydantic import StrictBool

from launcher.recipe.section import NonNegativeInt, PositiveInt, Section, Text, TextList


class Wandb(Section):
    """Weights & Biases."""

    project: Text
    """Project that the run is shown under."""
    mode: Literal["online", "offline"] = "online"
    """offline: written to RUN_DIR/wandb, for `wandb sync`."""
    entity: Text | None = None
    """User or team; null: wandb's default."""
    tags: TextList | None = None
    """Labels of the run."""
    group: Text | None = None
    """Name that related runs share."""


class Logging(Section):
    """Where metrics are written, besides metrics.jsonl and the console."""

    every_steps: PositiveInt = 1
    """Optimizer steps between lines. A step is logged after the next one has started, so that 1
    does not delay a GPU."""
    wandb: Wandb | None = None
    """{project: NAME, mode: online | offline}."""
    tensorboard: StrictBool = False
    """Write RUN_DIR/tensorboard."""
    memory_plan: StrictBool = False
    """Plan the memory when training starts, and log how the measured peak compares. Takes seconds
    of one core."""


class Profile(Section):
    """torch.profiler over a few steps: traces and tables of operators in RUN_DIR/profile."""

    start_step: PositiveInt
    """First step to profile, counted over the whole run."""
    steps: PositiveInt
    """Number of steps."""
    ranks: tuple[NonNegativeInt, ...] | None = None
    """Ranks to profile, such as [0, 8]; null: all."""
    warmup: NonNegativeInt = 1
    """Steps before start_step in which the profiler already runs, and records nothing."""
    memory_snapshot: StrictBool = False
    """CUDA: also RUN_DIR/profile/memory_rank_N.pickle, for pytorch.org/memory_viz."""
