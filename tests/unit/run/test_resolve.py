"""`auto` in a run: each entry of the table of decisions is made, and kept or made again on a resume."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from launcher.planner import auto
from launcher.planner.auto import Decision
from launcher.recipe.decode import value_of
from launcher.recipe.derived import Derived, with_value
from launcher.recipe.load import load_recipe
from launcher.run.resolve import resolve_by_machine, resolve_by_rows

RANKS = SimpleNamespace(rank=0, size=1, group=None)
KEY = "model.keep_logits"
"""A key that may be `auto`; which decision it has does not matter here."""


def choose(recipe, facts):
    assert facts.ranks == 1
    return with_value(recipe, KEY, True), {KEY: Derived(True, "there is room")}


@pytest.fixture
def decided(monkeypatch, messages):
    """A function that returns the value of a planted decision, and of another key of the recipe."""

    def value(needs, *, kept, earlier):
        monkeypatch.setattr("launcher.run.resolve.from_rank_0", lambda value, group: value)
        monkeypatch.setattr("launcher.run.resolve.recorded_recipe", lambda run, start: earlier)
        monkeypatch.setattr("launcher.run.resolve._write", lambda recipe, ranks, run: None)
        monkeypatch.setattr(
            auto,
            "DECISIONS",
            (Decision(keys=(KEY,), needs=needs, kept_on_resume=kept, choose=choose),),
        )
        recipe = load_recipe(["recipe=fsdp", f"{KEY}=auto", "model.compile=false"], ranks=1).recipe
        recipe = replace(recipe, run=replace(recipe.run, name="own"))
        options = {"start": None, "ranks": RANKS, "run": SimpleNamespace(read_events=list)}
        if needs == "machine":
            resolved = resolve_by_machine(recipe, SimpleNamespace(), **options)
        else:
            resolved = resolve_by_rows(recipe, build=True, **options)
        assert resolved.run.name == "own"
        return value_of(resolved, KEY)

    return value


@pytest.mark.parametrize("needs", ["recipe", "machine"])
@pytest.mark.parametrize(
    ("kept", "earlier", "expected"),
    [
        (True, {}, True),
        (False, {}, True),
        (True, {"model": {"keep_logits": False}}, False),
        (False, {"model": {"keep_logits": False}}, True),
    ],
)
def test_a_decision_is_made_or_kept(decided, needs, kept, earlier, expected):
    assert decided(needs, kept=kept, earlier=earlier) is expected
