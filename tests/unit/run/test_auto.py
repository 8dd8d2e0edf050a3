"""Tests of `auto`: the choice, its explanation, and earlier failures. The search is mocked."""

import dataclasses

import pytest

from launcher.distributed.separate_process import run_in_process
from launcher.errors import RecipeError, TrainingError
from launcher.planner.plan import make_plan
from launcher.recipe.schema import (
    ActivationCheckpointing,
    Batch,
    CpuOffload,
    Lora,
    Model,
    Strategy,
)
from launcher.recipe.validate import open_keys
from launcher.run import auto as detect
from tests.unit.planner.example_plans import (
    AUTO_RECIPE,
    GIB,
    RECIPE,
    configuration,
    example_plan,
    example_search,
    machine,
)


def test_recipe_without_auto_is_unchanged():
    assert detect.resolve_auto(RECIPE, machine(), ranks=None, run=None) is RECIPE
    assert open_keys(RECIPE) == []
    assert open_keys(AUTO_RECIPE) == ["strategy.kind", "batch.micro_batch_size"]


def test_choose_takes_the_fastest_that_fits(monkeypatch):
    limits, overrides = [], ("strategy.kind=fsdp", "batch.micro_batch_size=2")

    def fastest(recipe, machine, *, limit_micro_batch):
        limits.append(limit_micro_batch)
        return configuration(overrides, example_plan(), 74_000, micro=2)

    monkeypatch.setattr(detect, "fastest_that_fits", fastest)
    recipe, found, why = detect.choose(AUTO_RECIPE, machine(), failed=4)
    assert (limits, recipe.batch.micro_batch_size, found) == ([3], 2, overrides)
    assert why == (
        "fsdp (ZeRO-3), bf16; 2 sequences of 4,096 tokens x 4 micro-batches x 8 ranks = 64 a step. "
        "The fastest that fits: by plan 46.9 GiB of 80.0 GiB a rank, about 74,000 tokens/s "
        "(59,000 to 93,000); "
        "micro-batches of 4 and more ran out of memory before"
    )


def test_error_has_suggestions_if_nothing_fits(monkeypatch):
    monkeypatch.setattr(detect, "fastest_that_fits", lambda *_, **__: None)
    monkeypatch.setattr(
        detect, "search_configurations", lambda *_, **__: example_search(fits=False)
    )
    with pytest.raises(RecipeError) as caught:
        detect._choose(AUTO_RECIPE, machine(memory=8 * GIB), None)
    assert caught.value.problems == [
        "strategy.kind: auto: no configuration fits 8 x H100 with 8.0 GiB each",
        "  16 GPUs instead of 8: gpus_per_node=8 nodes=2",
        "  LoRA: lora={rank: 16}",
    ]
    with pytest.raises(RecipeError, match="a micro-batch of 1 ran out of memory in an earlier"):
        detect._choose(AUTO_RECIPE, machine(), 1)


FAILED = {"event": "failed", "reason": "out_of_memory", "ranks": 8}
FAILED |= detect.recorded_settings(RECIPE, machine())


def failed_before(recipe, *events):
    return detect.failed_micro_batches(list(events), machine=machine(), recipe=recipe)


def test_only_failures_with_the_same_settings_count():
    changes = {"ranks": 4, "device": "A100", "sequence_length": 512, "reason": "hang", "micro_batch_size": None}  # fmt: skip
    others = [FAILED | {name: value} for name, value in changes.items()]
    others += [{"event": "failed", "reason": "out_of_memory", "ranks": 8}, {"event": "started"}]
    assert failed_before(AUTO_RECIPE, *others) == []
    assert failed_before(AUTO_RECIPE, *others, FAILED, FAILED | {"micro_batch_size": 2}) == [4, 2]
    assert failed_before(RECIPE, FAILED) == [], "the recipe sets its micro-batch size"


def test_failures_before_a_recipe_change_are_ignored():
    batch = Batch(global_batch_size=64, micro_batch_size="auto")
    written = dataclasses.replace(RECIPE, batch=batch)
    assert failed_before(written, FAILED) == [4]
    for change in (
        {"activation_checkpointing": ActivationCheckpointing(mode="full")},
        {"strategy": Strategy(kind="fsdp", cpu_offload=CpuOffload())},
        {"lora": Lora()},
    ):
        assert failed_before(dataclasses.replace(written, **change), FAILED) == []


def test_separate_process_receives_recipe_and_machine():
    """The model path does not exist, so the process returns a RecipeError that names it."""
    missing = dataclasses.replace(RECIPE, model=Model(path="/no/such/folder"))
    with pytest.raises(RecipeError, match="/no/such/folder"):
        run_in_process(300, make_plan, missing, machine())
    with pytest.raises(TrainingError, match=r"planning took more than 0\.01 s"):
        run_in_process(0.01, make_plan, RECIPE, machine())
