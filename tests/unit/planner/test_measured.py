"""Measured configurations: what is measured, what is kept for `auto`, what is printed. Nothing is trained."""

import dataclasses
import json

import pytest

from launcher.cli import plan as command
from launcher.errors import RecipeError, TrainingError
from launcher.planner import detect, measured, search
from launcher.planner.formatting import measured_text
from launcher.planner.machine import known_machine
from launcher.planner.measure import step_seconds
from launcher.recipe.schema import (
    ActivationCheckpointing,
    Batch,
    Data,
    MixedPrecision,
    Strategy,
)
from tests.unit.planner.made_plan import GIB, RECIPE, configuration, machine, made_plan
from tests.unit.planner.test_ladder import estimating, load  # noqa: F401
from tests.unit.planner.test_plan_command import measured_like


@pytest.fixture
def recipe(tmp_path):
    """Written for ddp, to be measured; its cache is new."""
    data = dataclasses.replace(RECIPE.data, cache=str(tmp_path))
    return dataclasses.replace(RECIPE, data=data)


def left_open(recipe, **changes):
    batch = Batch(global_batch_size=64, micro_batch_size="auto")
    opened = dataclasses.replace(recipe, strategy=Strategy(kind="auto"), batch=batch)
    return dataclasses.replace(opened, **changes)


OTHERS = {
    "written": {},
    "ddp": {"strategy": Strategy(kind="ddp"), "micro": 8},
    "full": {"activation_checkpointing": ActivationCheckpointing(), "micro": 8},
}


@pytest.fixture
def trials(monkeypatch, recipe):
    """Measures three configurations: seconds of each, or an error."""

    def measure_all(outcomes):
        found = [
            configuration((f"name={name}",), made_plan(), 70_000, **changes)
            for name, changes in OTHERS.items()
        ]
        found = [
            dataclasses.replace(one, recipe=dataclasses.replace(one.recipe, data=recipe.data))
            for one in found
        ]
        asked = []

        def measure(recipes, *, ranks, gpus, timeout, timed):
            asked.append((recipes, ranks, gpus, timeout))
            outcome = outcomes[len(asked) - 1]
            if isinstance(outcome, str):
                raise TrainingError(outcome)
            return [measured_like(made_plan(), seconds=outcome)]

        monkeypatch.setattr(measured, "make_plan", lambda recipe, machine: made_plan())
        monkeypatch.setattr(measured, "fastest_of_each_kind", lambda *_, **__: found)
        monkeypatch.setattr(measured, "measure", measure)
        return measured.measure_fastest(["recipe=x.yaml"], recipe, machine()), asked

    return measure_all


def test_a_failed_configuration_does_not_end_the_others(trials):
    memory = "the 8 processes that measure ended with status 1: OutOfMemoryError: CUDA out of memory. Tried\nTraceback"
    found, asked = trials([memory, 2.0, "the 8 processes that measure timed out: ...\nmore"])
    assert [row["problem"] for row in found["rows"]] == [
        "out of memory",
        "",
        "the 8 processes that measure timed out: ...",
    ]
    assert found["best"] == 1
    assert found["rows"][1]["measured"]["tokens_per_second"] == 64 * 4096 / 2
    assert [recipes for (recipes, *_) in asked] == [
        [["recipe=x.yaml", f"name={name}"]] for name in OTHERS
    ]
    limits = [timeout for *_, timeout in asked]
    assert limits == pytest.approx([300, 450, 900], rel=0.01), "shares of what is left of 900 s"
    text = "\n".join(measured_text(found))
    assert "out of memory" in text
    assert "131,072" in text
    assert "name=ddp" in text
    assert found["file"] in text


def test_where_all_fail_nothing_is_kept(trials, recipe):
    found, _ = trials(["a", "b", "c"])
    assert (found["best"], found["file"]) == (None, None)
    assert measured.measured_choice(left_open(recipe), machine()) is None
    assert list(measured_text(found))


def test_auto_takes_the_fastest_measured(trials, recipe):
    found, _ = trials([3.0, 2.0, 4.0])
    chosen, overrides, why = measured.measured_choice(left_open(recipe), machine())
    assert (chosen.strategy.kind, chosen.batch.micro_batch_size) == ("ddp", 8)
    assert overrides == ("batch.micro_batch_size=8", "strategy.kind=ddp")
    assert "The fastest measured, on " in why
    assert f"131,072 tokens/s ({found['file']})" in why
    assert detect.choose(left_open(recipe), machine(), None) == (chosen, overrides, why)
    assert (
        "auto stands for batch.micro_batch_size=8 strategy.kind=ddp: ddp"
        in (command._choose(left_open(recipe), machine())[2])
    )


def test_what_is_written_stays(trials, recipe):
    """The answer is ddp with micro-batches of 8: `auto` takes it only where it may stand for that."""
    trials([3.0, 2.0, 4.0])

    def kept(limit=None, **changes):
        return measured.measured_choice(
            left_open(recipe, **changes), machine(), limit_micro_batch=limit
        )

    assert kept(strategy=Strategy(kind="ddp")) is not None
    assert kept(strategy=Strategy(kind="fsdp")) is None
    assert kept(batch=Batch(global_batch_size=64, micro_batch_size=8)) is not None
    assert kept(batch=Batch(global_batch_size=64, micro_batch_size=4)) is None
    assert kept(limit=8) is not None
    assert kept(limit=7) is None, "8 ran out of memory before"


def test_another_recipe_or_hardware_is_not_the_one_measured(trials, recipe, monkeypatch):
    trials([3.0, 2.0, 4.0])
    opened = left_open(recipe)
    same = dataclasses.replace(
        opened,
        run=dataclasses.replace(opened.run, name="other", max_steps=7),
        optimizer=dataclasses.replace(opened.optimizer, learning_rate=1.0),
    )
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
    assert measured.measured_choice(opened, machine()) is None, "it does not fit what is left"


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"settings": 1}'])
def test_a_damaged_file_is_ignored(trials, recipe, content):
    found, _ = trials([3.0, 2.0, 4.0])
    with open(found["file"], "w") as file:
        file.write(content)
    assert measured.measured_choice(left_open(recipe), machine()) is None


def test_the_fastest_of_each_kind_is_measured(load, estimating):  # noqa: F811
    h100s = known_machine("h100", nodes=1, gpus_per_node=8, memory=80 * GIB)
    found = search.fastest_of_each_kind(load(), h100s, most=6)
    assert len(found) == 6
    assert found[0].overrides == (), "as written"
    assert {one.recipe.strategy.kind for one in found} == {"ddp", "fsdp"}
    kinds = [
        (
            one.recipe.strategy.kind,
            one.recipe.strategy.reshard_after_forward,
            one.recipe.activation_checkpointing,
        )
        for one in found[1:]
    ]
    assert len(set(kinds)) == 5
    assert all(one.plan.fits for one in found)
    small = known_machine("h100", nodes=1, gpus_per_node=8, memory=3 * GIB)
    assert all(one.plan.fits for one in search.fastest_of_each_kind(load(), small, most=6))


def test_seconds_of_a_step():
    """Steps of three micro-batches take 1 + 2 + 3 s, and the optimizer 0.5 s."""

    def step(start, slower=0.0):
        moments = [("data", 0.0), ("forward", 0.1), ("backward", 0.5), ("forward", 1.0)]
        moments += [("backward", 2.0), ("forward", 3.0), ("backward", 4.0), ("optimizer", 6.0)]
        return [(name, start + when + (slower if when else 0)) for name, when in moments]

    times = [*step(0), *step(100), *step(200), *step(206.5), *step(213), ("data", 220.5)]
    assert step_seconds(times, 3) == pytest.approx(6.5), "the median of 6.5, 6.5 and 7.5"
    assert step_seconds(times, 5) == pytest.approx(6.5 + 2 * 2.0)
    one = [("data", 0.0), ("forward", 0.0), ("backward", 1.0), ("optimizer", 2.0)]
    times = [(name, when + 3 * n) for n in range(5) for name, when in one]
    assert step_seconds([*times, ("data", 15.0)], 1) == 3.0


def test_only_this_machine_can_be_measured(monkeypatch):
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


def test_the_measured_choice_is_plain_json(trials):
    found, _ = trials([3.0, 2.0, 4.0])
    with open(found["file"]) as file:
        kept = json.load(file)
    assert kept["tokens_per_second"] == 131_072
    assert kept["settings"]["strategy"]["kind"] == "ddp"
    assert Data(train=("a.txt",)).cache is None
    json.dumps(found)
