"""`auto`: what is chosen and why, what failed before. The search is replaced."""

import dataclasses
from types import SimpleNamespace

import pytest

from launcher.errors import RecipeError, TrainingError
from launcher.planner import detect, out_of_memory, separate_process
from launcher.planner.comparison import predict_peak
from launcher.recipe.schema import (
    ActivationCheckpointing,
    Batch,
    CpuOffload,
    Lora,
    Model,
    Strategy,
)
from launcher.recipe.validate import open_keys
from tests.unit.planner.made_plan import GIB, RECIPE, configuration, machine, made_ladder, made_plan

OPEN = dataclasses.replace(
    RECIPE,
    strategy=Strategy(kind="auto"),
    batch=Batch(global_batch_size=64, micro_batch_size="auto"),
)


def test_without_auto_the_recipe_is_unchanged():
    assert detect.resolve_auto(RECIPE, machine(), ranks=None, run=None) is RECIPE
    assert open_keys(RECIPE) == []
    assert open_keys(OPEN) == ["strategy.kind", "batch.micro_batch_size"]


def test_the_fastest_that_fits_is_chosen(monkeypatch):
    asked = []

    def fastest(recipe, machine, *, limit_micro_batch):
        asked.append(limit_micro_batch)
        return configuration(
            ("strategy.kind=fsdp", "batch.micro_batch_size=2"), made_plan(), 74_000, micro=2
        )

    monkeypatch.setattr(detect, "fastest_that_fits", fastest)
    recipe, overrides, why = detect.choose(OPEN, machine(), 4)
    assert asked == [3]
    assert recipe.batch.micro_batch_size == 2
    assert overrides == ("strategy.kind=fsdp", "batch.micro_batch_size=2")
    assert why == (
        "fsdp (ZeRO-3), bf16; 2 sequences of 4,096 tokens x 4 micro-batches x 8 ranks = 64 a step. "
        "The fastest that fits: by plan 46.9 GiB of 80.0 GiB a rank, 74,000 tokens/s; "
        "micro-batches of 4 and more ran out of memory before"
    )


def test_where_nothing_fits_the_error_has_suggestions(monkeypatch):
    monkeypatch.setattr(detect, "fastest_that_fits", lambda *_, **__: None)
    monkeypatch.setattr(detect, "make_ladder", lambda *_, **__: made_ladder(fits=False))
    with pytest.raises(RecipeError) as caught:
        detect.choose(OPEN, machine(memory=8 * GIB), None)
    assert caught.value.problems == [
        "strategy.kind: auto: no configuration fits 8 x H100 with 8.0 GiB each",
        "  16 GPUs instead of 8: gpus_per_node=8 nodes=2",
        "  LoRA: lora={rank: 16}",
    ]


def test_after_the_smallest_micro_batch_failed_there_is_no_choice():
    with pytest.raises(RecipeError, match="a micro-batch of 1 ran out of memory in an earlier"):
        detect.choose(OPEN, machine(), 1)


def failed(**changes):
    event = {"event": "failed", "reason": "out_of_memory", "ranks": 8} | detect.recorded_settings(
        RECIPE, machine()
    )
    return event | changes


def test_only_failures_with_the_same_settings_count():
    others = [
        *(
            failed(**{name: value})
            for name, value in (
                ("ranks", 4),
                ("device", "A100"),
                ("sequence_length", 512),
                ("reason", "hang"),
            )
        ),
        *({"event": "failed", "reason": "out_of_memory", "ranks": 8}, {"event": "started"}),
        failed(micro_batch_size=None),
    ]
    assert detect.failed_micro_batches(others, machine=machine(), recipe=OPEN) == []
    assert detect.failed_micro_batches(
        [*others, failed(), failed(micro_batch_size=2)], machine=machine(), recipe=OPEN
    ) == [4, 2]


def test_recorded_settings_are_found_again():
    event = {"event": "failed", "reason": "out_of_memory", "ranks": 8} | detect.recorded_settings(
        RECIPE, machine()
    )
    assert detect.failed_micro_batches([event], machine=machine(), recipe=OPEN) == [4]


def test_a_failure_before_a_suggestion_was_taken_does_not_count():
    written = dataclasses.replace(
        RECIPE, batch=dataclasses.replace(RECIPE.batch, micro_batch_size="auto")
    )
    event = {"event": "failed", "reason": "out_of_memory", "ranks": 8} | detect.recorded_settings(
        RECIPE, machine()
    )
    assert detect.failed_micro_batches([event], machine=machine(), recipe=written) == [4]
    for change in (
        {"activation_checkpointing": ActivationCheckpointing(mode="full")},
        {"strategy": dataclasses.replace(RECIPE.strategy, cpu_offload=CpuOffload())},
        {"lora": Lora()},
    ):
        assert (
            detect.failed_micro_batches(
                [event], machine=machine(), recipe=dataclasses.replace(written, **change)
            )
            == []
        )


def test_recipes_and_machines_reach_the_separate_process(monkeypatch):
    """The plan of a model that does not exist: the process answers with a RecipeError."""
    missing = dataclasses.replace(RECIPE, model=Model(path="/no/such/folder"))
    with pytest.raises(RecipeError, match="/no/such/folder"):
        separate_process.run_in_process(300, predict_peak, missing, machine())
    with pytest.raises(TrainingError, match=r"planning took more than 0\.01 s"):
        separate_process.run_in_process(0.01, predict_peak, RECIPE, machine())


def limits_of(monkeypatch, plan, measured=None, outside=0):
    seen = []

    def ladder(recipe, machine, **_):
        seen.append(machine.memory)
        return SimpleNamespace(configurations=())

    rows = dict.fromkeys(("parameters", "gradients", "optimizer", "others", "unused"), 0)
    monkeypatch.setattr(out_of_memory, "make_ladder", ladder)
    monkeypatch.setattr(out_of_memory, "make_plan", lambda recipe, machine: plan)
    out_of_memory.explain(RECIPE, plan.machine, "backward", rows | {"outside": outside}, measured)
    return seen[0]


def test_suggestions_need_less_than_the_failed_recipe(monkeypatch):
    plan = made_plan()
    tensors = plan.tensors
    assert limits_of(monkeypatch, plan) == pytest.approx(plan.needed - 0.03 * tensors, abs=2), (
        "it failed, whatever the plan says"
    )
    large = made_plan(3.0)
    tensors, context = large.tensors, large.context
    assert limits_of(monkeypatch, large, measured=tensors) == 80 * GIB
    assert limits_of(monkeypatch, large, measured=2 * tensors) == pytest.approx(
        context + (80 * GIB - context) / 2, abs=2
    ), "half of it"
    assert limits_of(monkeypatch, large, outside=context + 30 * GIB) == 50 * GIB, (
        "another process has taken it"
    )


def test_suggestions_fit_and_change_something(monkeypatch):
    ladder = made_ladder()
    not_fitting = configuration(("batch.micro_batch_size=32",), made_plan(5.0), 99_000)
    found = SimpleNamespace(configurations=(not_fitting, *ladder.configurations))
    monkeypatch.setattr(out_of_memory, "make_ladder", lambda *_, **__: found)
    monkeypatch.setattr(out_of_memory, "make_plan", lambda recipe, machine: made_plan())
    text = out_of_memory.explain(RECIPE, machine(), "", {}, None)
    fitting = [one for one in ladder.configurations if one.plan.fits and one.overrides]
    shown = [line.partition("#")[0].split() for line in text if line.startswith("  ")]
    assert shown == [" ".join(one.overrides).split() for one in fitting]
