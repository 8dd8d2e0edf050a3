"""The objective of a recipe."""

from __future__ import annotations

import importlib

from launcher.objectives.base import Objective
from launcher.recipe.objectives import objective_of
from launcher.recipe.schema import Recipe


def make_objective(recipe: Recipe, *, trained: bool = True) -> Objective:
    """The objective that the recipe trains; see `recipe/objectives.py`. Raises RecipeError if a
    function of the user cannot be used.

    trained: False: only samples are asked for, as by `launcher inspect`; code of the user is not
    run.
    """
    module, _, name = objective_of(recipe).implementation.partition(":")
    implementation = getattr(importlib.import_module(f"launcher.objectives.{module}"), name)
    objective: Objective = implementation.from_recipe(recipe, trained=trained)
    return objective
