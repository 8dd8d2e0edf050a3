"""Tests of measured configurations: selection, storage for `auto`, output. Nothing is trained."""

import dataclasses
import json
from pathlib import Path

import pytest

from launcher.cli import plan as command
from launcher.errors import RecipeError, TrainingError
from launcher.planner import detect, measured
from launcher.planner.formatting import measured_text
from launcher.planner.machine import known_machine
from launcher.planner.measure import step_seconds
from launcher.recipe.schema import ActivationCheckpointing, Batch, MixedPrecision, Strategy
from tests.unit.planner.made_plan import (
    GIB,
    OPEN,
    RECIPE,
    configuration,
    machine,
    made_plan,
    measured_like,
)

OTHERS = {
    "written": {},
    "ddp": {"strategy": Strategy(kind="ddp"), "micro": 8},
    "full": {"activation_checkpointing": ActivationCheckpointing(), "micro": 8},
}


@pytest.fixture
def opened(tmp_path):
    """A recipe with `auto` keys and an empty cache."""
    return dataclasses.replace(OPEN, data=dataclasses.replace(OPEN.data, cache=str(tmp_path)))


@pytest.fixture
def trials(monkeypatch, opened):
    """Return a function that measures three configurations. An outcome is seconds or an error."""

    def measure_all(*outcomes):
        found = [
            configuration((f"name={name}",), made_plan(), 70_000, data=opened.data, **changes)
            for name, changes in OTHERS.items()
        ]
        asked = []

        def measure(recipes, *, ranks, gpus, timeout, timed):
            asked.append((recipes, timeout))
            outcome = outcomes[len(asked) - 1]
            if isinstance(outcome, str):
                raise TrainingError(outcome)
            return [measured_like(made_plan(), seconds=outcome)]

        monkeypatch.setattr(measured, "make_plan", lambda recipe, machine: made_plan())
        monkeypatch.setattr(measured, "fastest_of_each_kind", lambda *_, **__: found)
        monkeypatch.setattr(measured, "measure", measure)
        recipe = dataclasses.replace(RECIPE, data=opened.data)
        return measured.measure_fastest(["recipe=x.yaml"], recipe, machine()), asked

    return measure_all


def test_failed_configuration_does_not_stop_the_others(trials):
    memory = "the 8 processes that measure ended with status 1: OutOfMemoryError: CUDA out of memory. Tried\nTraceback"
    late = "the 8 processes that measure timed out: ..."
    found, asked = trials(memory, 2.0, f"{late}\nmore")
    assert [row["problem"] for row in found["rows"]] == ["out of memory", "", late]
    assert found["best"] == 1
    assert found["rows"][1]["measured"]["tokens_per_second"] == 64 * 4096 / 2
    assert [recipes for recipes, _ in asked] == [[["recipe=x.yaml", f"name={name}"]] for name in OTHERS]  # fmt: skip
    limits = [timeout for _, timeout in asked]
    assert limits == pytest.approx([300, 450, 900], rel=0.01), (
        "equal shares of the remaining time, 900 s at first"
    )
    text = "\n".join(measured_text(found))
    for said in ("out of memory", "131,072", "name=ddp", found["file"]):
        assert said in text


def test_nothing_is_stored_if_all_fail(trials, opened):
    found, _ = trials("a", "b", "c")
    assert (found["best"], found["file"]) == (None, None)
    assert measured.measured_choice(opened, machine()) is None
    assert list(measured_text(found))


def test_auto_uses_the_fastest_measured_configuration(trials, opened):
    found, _ = trials(3.0, 2.0, 4.0)
    json.dumps(found)
    chosen, overrides, why = measured.measured_choice(opened, machine())
    assert (chosen.strategy.kind, chosen.batch.micro_batch_size) == ("ddp", 8)
    assert overrides == ("batch.micro_batch_size=8", "strategy.kind=ddp")
    assert "The fastest measured, on " in why
    assert f"131,072 tokens/s ({found['file']})" in why
    assert detect.choose(opened, machine()) == (chosen, overrides, why)
    note = f"auto stands for batch.micro_batch_size=8 strategy.kind=ddp: {why}"
    assert command._choose(opened, machine()) == (chosen, overrides, note)


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
def test_measured_choice_respects_explicit_keys(trials, opened, allowed, limit, changes):
    """The measured choice, ddp with micro-batches of 8, must agree with the explicit keys."""
    trials(3.0, 2.0, 4.0)
    recipe = dataclasses.replace(opened, **changes)
    kept = measured.measured_choice(recipe, machine(), limit_micro_batch=limit)
    assert (kept is not None) == allowed


def test_measurement_requires_same_recipe_and_hardware(trials, opened, monkeypatch):
    trials(3.0, 2.0, 4.0)
    run = dataclasses.replace(opened.run, name="other", max_steps=7)
    optimizer = dataclasses.replace(opened.optimizer, learning_rate=1.0)
    same = dataclasses.replace(opened, run=run, optimizer=optimizer)
    assert measured.measured_choice(same, machine()) is not None
    for changes in (
        {"data": dataclasses.replace(opened.data, sequence_length=2048)},
        {"model": dataclasses.replace(opened.model, compile=True)},
        {"batch": Batch(global_batch_size=128, micro_batch_size="auto")},
        {"strategy": Strategy(kind="auto", mixed_precision=MixedPrecision(param_dtype="float16"))},
    ):
        assert measured.measured_choice(dataclasses.replace(opened, **changes), machine()) is None
    for change in ({"name": "A100"}, {"gpus_per_node": 4}, {"nodes": 2}):
        assert measured.measured_choice(opened, dataclasses.replace(machine(), **change)) is None
    monkeypatch.setattr(measured, "make_plan", lambda recipe, machine: made_plan(memory=GIB))
    assert measured.measured_choice(opened, machine()) is None, (
        "the choice does not fit the free memory"
    )


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"settings": 1}'])
def test_damaged_file_is_ignored(trials, opened, content):
    found, _ = trials(3.0, 2.0, 4.0)
    Path(found["file"]).write_text(content)
    assert measured.measured_choice(opened, machine()) is None


def test_step_seconds_scales_with_micro_batches():
    """A step has three micro-batches of 1, 2 and 3 s. The optimizer takes 0.5 s."""

    def step(start):
        moments = [("data", 0.0), ("forward", 0.1), ("backward", 0.5), ("forward", 1.0)]
        moments += [("backward", 2.0), ("forward", 3.0), ("backward", 4.0), ("optimizer", 6.0)]
        return [(name, start + when) for name, when in moments]

    times = [*step(0), *step(100), *step(200), *step(206.5), *step(213), ("data", 220.5)]
    assert step_seconds(times, 3) == pytest.approx(6.5), "the median of 6.5, 6.5 and 7.5"
    assert step_seconds(times, 5) == pytest.approx(6.5 + 2 * 2.0)
    one = [("data", 0.0), ("forward", 0.0), ("backward", 1.0), ("optimizer", 2.0)]
    times = [(name, when + 3 * n) for n in range(5) for name, when in one]
    assert step_seconds([*times, ("data", 15.0)], 1) == 3.0


def test_only_the_local_machine_can_be_measured(monkeypatch):
    monkeypatch.setattr(command, "detect_gpus", lambda: ("NVIDIA H100", 80 * GIB, 8))
    with pytest.raises(RecipeError, match="measures the GPUs of this machine; remove gpu=h100"):
        command._this_machine(machine(), "measure", "h100")
    with pytest.raises(RecipeError, match="trains on this node only"):
        command._this_machine(dataclasses.replace(machine(), nodes=2), "measure", None)
    monkeypatch.setattr(command.host_memory, "available", lambda: 8 * GIB)
    assert command._this_machine(machine(), "measure", None).host_memory == 8 * GIB
    cpus = known_machine("cpu", nodes=1, gpus_per_node=4)
    found = command._this_machine(cpus, "measure", "cpu")
    assert (found.memory, found.host_memory) == (2 * GIB, 8 * GIB)
