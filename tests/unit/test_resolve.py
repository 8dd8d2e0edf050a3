"""`auto`: what is chosen and why, what failed before. The search is replaced."""

import dataclasses
from types import SimpleNamespace

import pytest

from launcher.errors import RecipeError
from launcher.planner import answers, detect, separate_process
from launcher.recipe.schema import (
    ActivationCheckpointing,
    Batch,
    CpuOffload,
    Lora,
    Model,
    Strategy,
)
from launcher.recipe.validate import leaves_open
from tests.unit.made_plan import GIB, RECIPE, configuration, machine, made_ladder, made_plan

OPEN = dataclasses.replace(
    RECIPE,
    strategy=Strategy(kind="auto"),
    batch=Batch(global_batch_size=64, micro_batch_size="auto"),
)


def test_without_auto_the_recipe_is_unchanged():
    assert detect.resolve_auto(RECIPE, machine(), ranks=None, run=None) is RECIPE
    assert not leaves_open(RECIPE)
    assert leaves_open(dataclasses.replace(RECIPE, batch=OPEN.batch))
    assert leaves_open(dataclasses.replace(RECIPE, strategy=OPEN.strategy))


def test_the_fastest_that_fits_is_chosen(monkeypatch):
    asked = []

    def fastest(recipe, machine, *, plan_of, limit_micro_batch):
        asked.append(limit_micro_batch)
        return configuration(
            ("strategy.kind=fsdp", "batch.micro_batch_size=2"), made_plan(), 74_000, micro=2
        )

    monkeypatch.setattr(answers, "fastest_that_fits", fastest)
    ((recipe, overrides, why),) = answers.choose(OPEN, machine(), 3)
    assert asked == [3]
    assert recipe.batch.micro_batch_size == 2
    assert overrides == ("strategy.kind=fsdp", "batch.micro_batch_size=2")
    assert why == (
        "fsdp, bf16; 2 sequences of 4,096 tokens x 4 micro-batches x 8 ranks = 64 a step. "
        "The fastest that fits: by plan 46.9 GiB of 80.0 GiB a rank, 74,000 tokens/s"
    )


def test_where_nothing_fits_the_error_has_suggestions(monkeypatch):
    monkeypatch.setattr(answers, "fastest_that_fits", lambda *_, **__: None)
    monkeypatch.setattr(answers, "make_ladder", lambda *_, **__: made_ladder(fits=False))
    with pytest.raises(RecipeError) as caught:
        list(answers.choose(OPEN, machine(memory=8 * GIB), None))
    assert caught.value.problems == [
        "strategy.kind: auto: no configuration fits 8 x H100 with 8.0 GiB each",
        "  16 GPUs instead of 8: gpus_per_node=8 nodes=2",
        "  LoRA: lora={rank: 16}",
    ]


def test_after_the_smallest_micro_batch_failed_there_is_no_choice():
    with pytest.raises(RecipeError, match="a micro-batch of 1 ran out of memory in an earlier"):
        list(answers.choose(OPEN, machine(), 0))


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
    found, trouble = separate_process.ask("predict_peak", missing, machine(), seconds=100)
    assert (len(found), trouble) == (1, "")
    assert isinstance(found[0], RecipeError)
    assert "/no/such/folder" in str(found[0])
    found, trouble = separate_process.ask("predict_peak", RECIPE, machine(), seconds=0.01)
    assert (found, trouble) == ([], "planning took more than 0.01 s")


def limits_of(monkeypatch, plan, **measured):
    seen = []

    def ladder(recipe, machine, **_):
        seen.append(machine.memory)
        return SimpleNamespace(configurations=())

    monkeypatch.setattr(answers, "make_ladder", ladder)
    assert answers.what_fits(RECIPE, plan.machine, plan, **measured) == []
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


def test_suggestions_are_the_fastest_few_that_fit(monkeypatch):
    ladder = made_ladder()
    not_fitting = configuration(("batch.micro_batch_size=32",), made_plan(5.0), 99_000)
    monkeypatch.setattr(
        answers,
        "make_ladder",
        lambda *_, **__: SimpleNamespace(
            configurations=(not_fitting, *reversed(ladder.configurations))
        ),
    )
    fitting = answers.what_fits(RECIPE, machine(), made_plan())
    assert [one.tokens_per_second for one in fitting] == sorted(
        (one.tokens_per_second for one in ladder.configurations if one.plan.fits and one.overrides),
        reverse=True,
    )
    assert all(one.overrides for one in fitting)
