"""What is known when `auto` is replaced."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np

from launcher.data.held_out import held_out
from launcher.data.store_files import Hashes
from launcher.planner.machine import Machine
from launcher.planner.profile import ModelProfile, profile_model, profile_of_shapes, with_saved
from launcher.recipe.schema import Recipe
from launcher.reliability.json_files import Json
from launcher.strategies.base import compute_dtype
from launcher.training.model import PreparedModel

Profiles = tuple[ModelProfile, Callable[[], ModelProfile]]
"""A profile of the model without what its blocks save, and a function that returns it with that."""


@dataclass(frozen=True)
class Rows:
    """The rows of the training data: documents, pairs or answers."""

    lengths: Any
    """Tokens of each row, (rows,); of a pair, those of its longer answer with the prompt."""
    hashes: Hashes | None = None
    """Hashes of the rows, which decide the rows that are held out; None: not known."""
    scale: float = 1.0
    """Rows of the data / rows that were counted; more than 1 is an estimate."""

    @property
    def count(self) -> int:
        """Rows of the data."""
        return round(len(self.lengths) * self.scale)

    def trained(self, share: float, longest: int | None) -> int:
        """Rows that are trained, if this share is held out, and longer ones are dropped."""
        fits = np.ones(len(self.lengths), dtype=bool)
        if longest is not None:
            fits = self.lengths <= longest
        if not share or self.hashes is None:
            return max(1, round(int(fits.sum()) * self.scale * (1 - share)))
        return max(1, int((fits & ~held_out(self.hashes, share)).sum()))

    def text(self) -> str:
        """`60 rows of 57 tokens on average`."""
        about = "" if self.scale == 1.0 else "about "
        mean = float(self.lengths.mean())
        return f"{about}{self.count:,} rows of {mean:,.0f} tokens on average"


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What decisions are made from. None: not known yet."""

    ranks: int
    rows: Rows | str | None = None
    """The rows of the training data, or why they cannot be counted."""
    machine: Machine | None = None
    why_eager: str | None = None
    """Why blocks cannot be compiled on this machine; None: they can."""
    profiles: Callable[[Recipe], Profiles] | None = None
    """Sizes of the tensors of the model, for estimates of its memory."""
    must_fit: bool = False
    """Raise RecipeError, with what would help, if no configuration fits; False: leave `auto`."""
    events: Sequence[Json] = ()
    """Events of earlier starts of the run, some of which may have run out of memory."""
    recorded: Mapping[str, Any] = field(default_factory=dict)
    """The recipe of the checkpoint that the run resumes from; empty: none."""
    exact: Mapping[str, Any] | None = None
    """Section `strategy` of that recipe, if a resume with the same collectives is exact."""


def profiles_of(
    recipe: Recipe, prepared: PreparedModel, machine: Machine
) -> Callable[[], Profiles]:
    """A function that returns the profiles of a run's model. Each is made when it is first needed."""

    @cache
    def shapes() -> ModelProfile:
        return profile_of_shapes(prepared, recipe, device=machine.device)

    @cache
    def with_activations() -> ModelProfile:
        copied = dataclasses.replace(prepared, model=copy.deepcopy(prepared.model))
        return with_saved(shapes(), copied, recipe, dtypes={compute_dtype(recipe.strategy)})

    return lambda: (shapes(), with_activations)


def profiled(machine: Machine) -> Callable[[Recipe], Profiles]:
    """`Facts.profiles` for a plan."""

    def profiles(recipe: Recipe) -> Profiles:
        full = profile_model(recipe, device=machine.device)
        return dataclasses.replace(full, saved={}), lambda: full

    return profiles
