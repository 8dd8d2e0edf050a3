"""Overrides say any value, and the difference of any two recipes (hypothesis)."""

import math

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as some

from launcher.recipe.load import load_recipe
from launcher.recipe.yaml_text import as_override, overrides_between, parse_yaml

few = settings(max_examples=150, deadline=None, derandomize=True)
TEXTS = some.text(some.characters(codec="utf-8", exclude_categories=["Cc", "Cs", "Zl", "Zp"]))
# omegaconf, and not the YAML parser, reads an escaped interpolation
TEXTS = TEXTS.filter(lambda text: "${" not in text)
KEY = TEXTS.filter(str.isprintable)
SCALARS = TEXTS | some.integers() | some.booleans() | some.none()
SCALARS |= some.floats(allow_nan=False, allow_infinity=False)
VALUES = some.recursive(
    SCALARS,
    lambda inner: some.lists(inner, max_size=3) | some.dictionaries(KEY, inner, max_size=3),
    max_leaves=6,
)


@pytest.mark.slow
@few
@given(value=VALUES)
@example(value="\xa0")  # white space to Python, a letter to YAML
def test_an_override_reads_as_its_value(value):
    _, _, text = as_override("key", value).partition("=")
    assert parse_yaml(text)[0] == value


KEYS = {
    "optimizer.learning_rate": some.floats(1e-9, 1.0, allow_subnormal=False),
    "optimizer.name": some.sampled_from(["adamw", "muon", "adafactor"]),
    "batch.micro_batch_size": some.integers(1, 4).map(lambda power: 2**power // 2),
    "data.sequence_length": some.integers(16, 4096),
    "data.validation": some.none() | TEXTS.filter(str.strip).map(lambda name: [f"v {name}.txt"]),
    "run.name": some.from_regex(r"[a-z][a-z0-9 ._-]{0,20}[a-z0-9]", fullmatch=True),
    "run.seed": some.integers(0, 2**31),
    "schedule.warmup_steps": some.integers(0, 100),
    "strategy.kind": some.sampled_from(["ddp", "fsdp"]),
    "checkpoint.every_steps": some.none() | some.integers(1, 100),
    "activation_checkpointing": some.none() | some.just({"mode": "full"}),
}
CHANGES = some.fixed_dictionaries({}, optional=KEYS)


def recipe(overrides):
    return load_recipe(["recipe=quickstart", *overrides], ranks=1, files=False).recipe


@pytest.mark.slow
@settings(few, max_examples=12)
@given(before=CHANGES, after=CHANGES)
def test_overrides_make_one_recipe_of_another(before, after):
    first = [as_override(key, value) for key, value in before.items()]
    second = recipe([as_override(key, value) for key, value in after.items()])
    changes = overrides_between(recipe(first), second)
    changed = {change.partition("=")[0] for change in changes}
    kept = [each for each in first if each.partition("=")[0] not in changed]
    assert recipe([*kept, *changes]) == second
    assert math.isfinite(second.optimizer.learning_rate)
