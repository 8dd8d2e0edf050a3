"""The names of the parts of a step's memory, and the keys that name columns, are one list each."""

import dataclasses

from launcher.planner.formatting import NAMES
from launcher.planner.memory import COMPONENTS, Components
from launcher.recipe.schema import Data
from launcher.sources.layouts import KEYS


def test_components_of_a_plan_have_one_list_of_names():
    assert tuple(field.name for field in dataclasses.fields(Components)) == COMPONENTS
    assert tuple(NAMES)[: len(COMPONENTS)] == COMPONENTS


def test_each_key_that_names_a_column_has_a_role():
    keys = {field.name for field in dataclasses.fields(Data) if field.name.endswith("_column")}
    assert set(KEYS.values()) == keys
