"""Tests of measured configurations: selection, storage for `auto`, output. Nothing is trained."""

import dataclasses
import json
from pathlib import Path

import pytest

from launcher.cli import plan as command
from launcher.errors import RecipeError, TrainingError
from launcher.planner import trials
from launcher.planner.auto import choose_configuration, resolve_for_plan
from launcher.planner.facts import Facts, profiled
from launcher.planner.formatting import measured_text
from launcher.planner.measurement import median_step
from launcher.recipe.schema import ActivationCheckpointing, Batch, MixedPrecision, Strategy
from tests.unit.planner.example_plans import (
    AUTO_RECIPE,
    GIB,
    RECIPE,
    configuration,
    example_plan,
    machine,
    measured_like,
)

CONFIGURATIONS = {
    "written": {},
    "ddp": {"strategy": Strategy(kind="ddp"), "micro": 8},
    "full": {"activation_checkpointing": ActivationCheckpointing(), "micro": 8},
}


@pytest.fixture
def auto_recipe(tmp_path):
    """A recipe with `auto` keys and an empty cache."""
    return dataclasses.replace(
        AUTO_RECIPE, data=dataclasses.replace(AUTO_RECIPE.data, cache=str(tmp_path))
    )


@pytest.fixture
def tried(monkeypatch, auto_recipe):
    """Return a function that measures three configurations. An outcome is seconds or an error."""

    def measure_all(*outcomes):
        found = [
            configuration(
                (f"name={name}",), example_plan(), 70_000, data=auto_recipe.data, **changes
            )
            for name, changes in CONFIGURATIONS.items()
        ]
        calls = []

        def measure(recipes, *, ranks, gpus, timeout, timed):
            calls.append((recipes, timeout))
            outcome = outcomes[len(calls) - 1]
            if isinstance(outcome, str):
                raise TrainingError(outcome)
            return [measured_like(example_plan(), seconds=outcome)]

        monkeypatch.setattr(trials, "make_plan", lambda recipe, machine: example_plan())
        monkeypatch.setattr(trials, "fastest_of_each_kind", lambda *_, **__: found)
        monkeypatch.setattr(trials, "measure_recipes", measure)
        recipe = dataclasses.replace(RECIPE, data=auto_recipe.data)
        return trials.measure_fastest(["recipe=x.yaml"], recipe, machine()), calls

    return measure_all


def test_failed_configuration_does_not_stop_the_others(tried):
    memory = "the 8 processes that measure ended with status 1: OutOfMemoryError: CUDA out of memory. Tried\nTraceback"
    timed_out = "the 8 processes that measure timed out: ..."
    found, calls = tried(memory, 2.0, f"{timed_out}\nmore")
    assert [row["problem"] for row in found["rows"]] == ["out of memory", "", timed_out]
    assert found["best"] == 1
    assert found["rows"][1]["measured"]["tokens_per_second"] == 64 * 4096 / 2
    assert [recipes for recipes, _ in calls] == [[["recipe=x.yaml", f"name={name}"]] for name in CONFIGURATIONS]  # fmt: skip
    limits = [timeout for _, timeout in calls]
    assert limits == pytest.approx([300, 450, 900], rel=0.01), (
        "equal shares of the remaining time, 900 s at first"
    )
    text = "\n".join(measured_text(found))
    for expected in ("out of memory", "131,072", "name=ddp", found["file"]):
        assert expected in text


def test_nothing_is_stored_if_all_fail(tried, auto_recipe):
    found, _ = tried("a", "b", "c")
    assert (found["best"], found["file"]) == (None, None)
    assert trials.measured_choice(auto_recipe, machine()) is None
    assert list(measured_text(found))


def test_auto_uses_the_fastest_measured_configuration(tried, auto_recipe):
    found, _ = tried(3.0, 2.0, 4.0)
    json.dumps(found)
    chosen, why = trials.measured_choice(auto_recipe, machine())
    assert (chosen.strategy.kind, chosen.batch.micro_batch_size) == ("ddp", 8)
    assert "The fastest measured, on " in why
    assert f"131,072 tokens/s ({found['file']})" in why
    note = f"auto stands for batch.micro_batch_size=8 strategy.kind=ddp: {why}"
    overrides = ["batch.micro_batch_size=8", "strategy.kind=ddp"]
    facts = Facts(ranks=machine().ranks, machine=machine(), profiles=profiled(machine()))
    assert choose_configuration(auto_recipe, facts) == (chosen, why)
    assert resolve_for_plan(auto_recipe, facts, logits=False) == (chosen, overrides, [note])


@pytest.mark.parametrize(
    ("allowed", "limit", "changes"),
    [
        (True, None, {"strategy": Strategy(kind="ddp")}),
        (False, None, {"strategy": Strategy(kind="fsdp")}),
        (True, None, {"batch": Batch(global_batch_size=64, micro_batch_size=8)}),
        (False, None, {"batch": Batch(global_batch_size=64, micro_batch_size=4)}),
        (True, 8, {}),
        (False, 7, {}),  # a micro-batch of 8 ran out of memory before
    ],
)
def test_measured_choice_respects_explicit_keys(tried, auto_recipe, allowed, limit, changes):
    """The measured choice, ddp with micro-batches of 8, must agree with the explicit keys."""
    tried(3.0, 2.0, 4.0)
    recipe = dataclasses.replace(auto_recipe, **changes)
    kept = trials.measured_choice(recipe, machine(), limit_micro_batch=limit)
    assert (kept is not None) == allowed


def test_measurement_requires_same_recipe_and_hardware(tried, auto_recipe, monkeypatch):
    tried(3.0, 2.0, 4.0)
    run = dataclasses.replace(auto_recipe.run, name="other", max_steps=7)
    optimizer = dataclasses.replace(auto_recipe.optimizer, learning_rate=1.0)
    same = dataclasses.replace(auto_recipe, run=run, optimizer=optimizer)
    assert trials.measured_choice(same, machine()) is not None
    for changes in (
        {"data": dataclasses.replace(auto_recipe.data, sequence_length=2048)},
        {"model": dataclasses.replace(auto_recipe.model, compile=True)},
        {"batch": Batch(global_batch_size=128, micro_batch_size="auto")},
        {"strategy": Strategy(kind="auto", mixed_precision=MixedPrecision(param_dtype="float16"))},
    ):
        assert (
            trials.measured_choice(dataclasses.replace(auto_recipe, **changes), machine()) is None
        )
    for change in ({"name": "A100"}, {"gpus_per_node": 4}, {"nodes": 2}):
        assert trials.measured_choice(auto_recipe, dataclasses.replace(machine(), **change)) is None
    monkeypatch.setattr(trials, "make_plan", lambda recipe, machine: example_plan(memory=GIB))
    assert trials.measured_choice(auto_recipe, machine()) is None, (
        "the choice does not fit the free memory"
    )


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"settings": 1}'])
def test_damaged_file_is_ignored(tried, auto_recipe, content):
    found, _ = tried(3.0, 2.0, 4.0)
    Path(found["file"]).write_text(content)
    assert trials.measured_choice(auto_recipe, machine()) is None


def test_median_step_scales_with_micro_batches():
    """A step has three micro-batches of 1, 2 and 3 s. The optimizer takes 0.5 s."""

    def step(start):
        moments = [("data", 0.0), ("forward", 0.1), ("backward", 0.5), ("forward", 1.0)]
        moments += [("backward", 2.0), ("forward", 3.0), ("backward", 4.0), ("optimizer", 6.0)]
        return [(name, start + when) for name, when in moments]

    times = [*step(0), *step(100), *step(200), *step(206.5), *step(213), ("data", 220.5)]
    assert median_step(times, 3) == pytest.approx(6.5), "the median of 6.5, 6.5 and 7.5"
    assert median_step(times, 5) == pytest.approx(6.5 + 2 * 2.0)
    one = [("data", 0.0), ("forward", 0.0), ("backward", 1.0), ("optimizer", 2.0)]
    times = [(name, when + 3 * n) for n in range(5) for name, when in one]
    assert median_step([*times, ("data", 15.0)], 1) == 3.0


def test_only_the_local_machine_can_be_measured(monkeypatch):
    monkeypatch.setattr(command, "detect_gpus", lambda: ("NVIDIA H100", 80 * GIB, 8))
    with pytest.raises(RecipeError, match="measures the GPUs of this machine; remove gpu=h100"):
        command._this_machine(machine(), "--measure", "h100")
    with pytest.raises(RecipeError, match="trains on this node only"):
        command._this_machine(dataclasses.replace(machine(), nodes=2), "--measure", None)
    monkeypatch.setattr(command.memory_here, "allowed", lambda: 8 * GIB)
    assert command._this_machine(machine(), "--measure", None).host_memory == 8 * GIB
    cpus, _ = command.machine_to_plan("cpu", 4, nodes=1)
    found = command._this_machine(cpus, "--measure", "cpu")
    assert (found.memory, found.host_memory) == (2 * GIB, 8 * GIB)
