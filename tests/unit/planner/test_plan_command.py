"""Tests of the options, output and exit status of `launcher plan`, with hand-written plans."""

import dataclasses
import itertools
import json
import re
import types
from pathlib import Path

import pytest
import typer

from launcher.cli import main
from launcher.cli import plan as command
from launcher.cli.app import read_size
from launcher.distributed.hardware import find_gpu
from launcher.planner import auto, measurement, plan, search
from launcher.planner import machine as machines
from launcher.planner.auto import resolve_for_plan
from launcher.planner.facts import Facts, profiled
from launcher.planner.formatting import (
    NAMES,
    as_text,
    batch_text,
    moment_text,
    strategy_text,
)
from launcher.planner.memory import COMPONENTS, compare
from launcher.planner.plan_as_json import as_json
from launcher.recipe.load import load_recipe
from launcher.recipe.yaml_text import overrides_between
from tests import REPOSITORY
from tests.unit.planner.example_plans import (
    AUTO_RECIPE,
    GIB,
    RECIPE,
    example_plan,
    example_search,
    machine,
    measured_like,
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("80GiB", 80 * 1024**3),
        ("81920MiB", 80 * 1024**3),
        ("80GB", 80 * 1000**3),
        ("1.5TiB", 3 * 1024**4 // 2),
        ("80gib", 80 * 1024**3),
        ("512 KiB", 512 * 1024),
    ],
)
def test_read_size(text, expected):
    assert read_size(text) == expected


@pytest.mark.parametrize(
    "text", ["80", "80G", "GiB", "-1GiB", "0GiB", "80GiBs", "1e3GiB", "", "80 GiB GiB"]
)
def test_read_size_rejects_invalid_sizes(text):
    with pytest.raises(
        typer.BadParameter, match=f"{text} is not a size with a unit, such as 80GiB"
    ):
        read_size(text)


def test_invalid_options_are_refused(folder, capsys):
    plan = ["plan", "recipe=x.yaml", "gpu=h100"]
    for option, expected in {
        "nodes=0": "nodes=0: Input should be greater than or equal to 1",
        "gpus=x": "gpus=x: Input should be a valid integer",
        "--rates": "write rates=FILE",
        "gpu_memry=80GiB": "not an argument of launcher plan; did you mean gpu_memory=80GiB?",
        "json=yes": "write --json",
    }.items():
        assert main.main([*plan, option]) == 2
        assert expected in capsys.readouterr().err


def test_an_empty_template_is_refused(folder, capsys):
    (folder / "empty.jinja").touch()
    words = ["data.kind=chat", "data.chat_template=empty.jinja", "gpu=h100"]
    assert main.main(["plan", "recipe=x.yaml", *words]) == 2
    assert "the file empty.jinja is empty" in capsys.readouterr().err


def printed(plan, result=None, measured=None):
    return list(as_text(as_json(RECIPE, plan, result, measured)))


def collapsed(lines):
    """Collapse repeated spaces."""
    return [" ".join(line.split()) for line in lines]


def test_plan_text():
    text = printed(
        example_plan(host_memory=200 * GIB, notes=("the loss is counted by arithmetic",))
    )
    assert text[0] == "llama_3_1_8b on 1 node x 8 H100 of 80.0 GiB, 200.0 GiB host memory a node"
    assert text[1] == "fsdp (ZeRO-3), bf16"
    assert text[2] == "4 sequences of 4,096 tokens x 2 micro-batches x 8 ranks = 64 a step"
    for line in (
        "One GPU holds most in the backward pass of model.layers.31, micro-batch 2 of 2",
        "needed 46.9 GiB fits: 33.1 GiB of 80.0 GiB to spare (41%)",
        "host memory a node 104.0 GiB fits: 96.0 GiB of 200.0 GiB to spare (48%)",
        "processes 12.0 GiB, data workers 2.0 GiB, checkpoint staging 90.0 GiB",
        "a checkpoint on disk 90.0 GiB, 3 at once: 270.0 GiB",
        "note: the loss is counted by arithmetic",
    ):
        assert line in collapsed(text)
    for name in NAMES.values():
        assert any(line.startswith(f"  {name} ") for line in text), name
    assert max(map(len, text)) <= 100


def test_plan_fits_a_narrow_terminal():
    """Overrides are not folded, because they are copied."""
    report = as_json(RECIPE, example_plan(notes=("a " * 100,)), example_search(), None)
    wide, narrow = list(as_text(report)), list(as_text(report, 80))
    long = [line for line in narrow if len(line) > 80]
    assert all(re.match(r"[* ] +\d+  '?[a-z_]+\.\S+=", line) and line in wide for line in long)
    assert max(map(len, wide)) > 100
    first = next(n for n, line in enumerate(narrow) if line.startswith("*  2  "))
    assert narrow[first] == "*  2  fsdp (ZeRO-3), bf16, selective checkpointing"
    assert re.search(r"GiB +[\d,]+ +\d+%  fastest that fits", narrow[first + 1])


def test_bars_are_stacked_up_to_the_needed_memory():
    plan = example_plan()
    rows = [line for line in printed(plan) if re.match(r"  [a-z ]+ +[\d.]+ [MG]iB  ", line)]
    bars = [line[37:] for line in rows if "needed" not in line]
    assert len(bars) == len(NAMES)
    assert {bar.index("│") for bar in bars} == {36}
    filled = [(bar.index("█"), bar.rindex("█") + 1) for bar in bars if "█" in bar]
    assert all(before[1] <= after[0] for before, after in itertools.pairwise(filled))
    assert filled[-1][1] == round(plan.needed / (80 * GIB / 36))


def test_text_gives_missing_memory_if_known():
    text = "\n".join(printed(example_plan(memory=40 * GIB)))
    assert "does not fit: 6.9 GiB too much for 40.0 GiB" in text
    host = "\n".join(printed(example_plan(host_memory=100 * GIB)))
    assert "does not fit: 4.0 GiB too much" in host
    unknown = "\n".join(printed(example_plan(memory=None)))
    assert "fit" not in unknown
    assert "needed                   46.9 GiB" in unknown


def test_text_and_json_distinguish_little_room():
    def plan_with(spare, room):
        plan = example_plan(memory=None)
        on = dataclasses.replace(plan.machine, memory=plan.needed + int(spare * GIB))
        return dataclasses.replace(plan, machine=on, room=int(room * GIB))

    slow = plan_with(2, 3)
    text = "\n".join(printed(slow))
    assert "fits, will be slow: 2.0 GiB of 48.9 GiB to spare, 3.0 GiB of room needed" in text
    assert "warning: with less than 3.0 GiB to spare, PyTorch's allocator frees its caches" in text
    shown = as_json(RECIPE, slow, None)
    assert (shown["fits"], shown["has_room"], shown["room"]) == (True, False, 3 * GIB)
    for spare, fits, room in ((4, True, True), (-1, False, False)):
        shown = as_json(RECIPE, plan_with(spare, 3), None)
        assert (shown["fits"], shown["has_room"]) == (fits, room)
        assert "slow" not in "\n".join(printed(plan_with(spare, 3)))
    assert as_json(RECIPE, example_plan(memory=None), None)["has_room"] is None
    result = example_search()
    first, second, *rest = result.configurations
    second = dataclasses.replace(second, plan=dataclasses.replace(second.plan, room=70 * GIB))
    result = dataclasses.replace(result, configurations=(first, second, *rest), best=second)
    text = printed(result.written.plan, result)
    assert any(line.endswith("100%  will be slow: little room, fastest that fits") for line in text)
    assert result.configurations[1].plan.fits


@pytest.mark.parametrize(
    ("scale", "expected"), [(1.2, "17% less"), (0.8, "25% more"), (1.05, None), (0.95, None)]
)
def test_warning_if_trace_and_estimate_disagree(scale, expected):
    plan = example_plan(arithmetic=scale)
    text = "\n".join(printed(plan))
    assert (expected is not None) == ("warning" in text)
    assert expected is None or expected in text
    assert "warning" not in "\n".join(printed(dataclasses.replace(plan, arithmetic=None)))


def test_best_and_written_configurations_are_marked():
    result = example_search()
    text = printed(result.written.plan, result)
    rows = [line for line in text if re.match(r"^[* ] +\d  fsdp", line)]
    assert [line[:4].split()[-1] for line in rows] == ["1", "2", "3", "4"]
    assert rows[0].endswith("107%  does not fit")
    assert rows[1].startswith("*")
    assert rows[1].endswith("100%  fastest that fits")
    assert rows[2].endswith("87%  as written")
    override_line = "* 2 batch.micro_batch_size=8 'activation_checkpointing={mode: selective}'"
    assert override_line in collapsed(text)
    assert "Nothing fits" not in "\n".join(text)


def test_predicted_training_hours():
    result = example_search()
    text = printed(result.written.plan, result)
    at = text.index("Training time of 10 steps, predicted")
    assert text[at + 1 : at + 4] == [
        # 10 x 64 x 4,096 tokens at 85,000 a second
        "   2  0.0086 hours, 0.069 GPU-hours: about 85,000 tokens/s (68,000 to 110,000)",
        "   3  0.0098 hours, 0.079 GPU-hours: about 74,000 tokens/s (59,000 to 93,000)",
        "",
    ]
    epochs = dataclasses.replace(RECIPE, run=dataclasses.replace(RECIPE.run, max_steps=None))
    written = dataclasses.replace(result.written, recipe=epochs)
    assert written.hours == pytest.approx(1e9 / 74_000 / 3600)
    result = dataclasses.replace(result, written=written)
    shown = as_json(RECIPE, result.written.plan, result)["search"]
    assert shown["steps"] is None
    assert shown["configurations"][1]["hours"] == pytest.approx(10 * 64 * 4096 / 85_000 / 3600)
    low, high = shown["configurations"][1]["tokens_per_second_range"]
    assert low < shown["configurations"][1]["tokens_per_second"] == 85_000 < high
    assert shown["configurations"][1]["gpu_hours"] == pytest.approx(
        8 * shown["configurations"][1]["hours"]
    )
    assert "Training time of a billion tokens, predicted" in printed(result.written.plan, result)


def test_text_lists_suggestions_if_nothing_fits():
    result = example_search(fits=False)
    text = printed(result.written.plan, result)
    at = text.index("Nothing fits. These changes help:")
    assert text[at + 1 :] == [
        "  - 16 GPUs instead of 8: gpus_per_node=8 nodes=2",
        "  - LoRA: lora={rank: 16}",
    ]
    assert not any("To take one" in line for line in text)


def test_moment_batch_and_strategy_text():
    step, offloads = example_plan().step, example_search().configurations[-1].recipe
    assert moment_text(step.phases["optimizer"], micro_batches=2) == "in the optimizer's step"
    assert moment_text(step.peak, micro_batches=1) == "in the backward pass of model.layers.31"
    one = "4 sequences of 4,096 tokens x 1 micro-batch x 16 ranks = 64 a step"
    assert batch_text(RECIPE, 16) == one
    assert strategy_text(offloads, 16) == "fsdp (ZeRO-3), bf16, full checkpointing, CPU offload"


@pytest.fixture
def fake_planner(monkeypatch, folder):
    """Replace the functions that `launcher plan` calls, and return a record of the calls."""
    calls = types.SimpleNamespace(machine=None, result=0, plan=example_plan())

    def known_machine(gpu, **settings):
        calls.machine = (gpu, settings)
        return machine(memory=settings["memory"])

    def search_configurations(recipe, machine, *, keep_written):
        assert keep_written
        calls.result += 1
        return example_search()

    monkeypatch.setattr(machines, "known_machine", known_machine)
    monkeypatch.setattr(machines, "read_rates", lambda file: f"rates of {file}")
    monkeypatch.setattr(plan, "make_plan", lambda recipe, machine: calls.plan)
    monkeypatch.setattr(search, "search_configurations", search_configurations)
    monkeypatch.setattr(command, "detect_gpus", lambda: None)
    return calls


def test_json_is_one_object_with_integer_bytes(fake_planner, capsys):
    assert main.main(["plan", "recipe=x.yaml", "gpus=8", "gpu=h100", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    lines = (REPOSITORY / "docs/reference/plan.md").read_text().splitlines()
    documented = set(re.findall(r"[a-z_]+", " ".join(line[:26] for line in lines)))
    assert set(shown) <= documented
    assert shown["needed"] == fake_planner.plan.needed
    assert shown["spare"] == fake_planner.plan.spare
    assert set(shown["peak"]["components"]) == set(COMPONENTS)
    assert all(type(amount) is int for amount in shown["peak"]["components"].values())
    assert len(shown["timeline"]) == len(fake_planner.plan.step.timeline)
    assert shown["search"]["best"] == 1
    assert shown["search"]["configurations"][2]["as_written"]
    assert shown["search"]["configurations"][1]["overrides"] == list(
        example_search().best.overrides
    )


def test_exit_statuses(fake_planner, capsys):
    arguments = ["plan", "recipe=x.yaml", "gpu=h100", "--no-search"]
    for fake_planner.plan, status in (
        (example_plan(memory=40 * GIB), 3),
        (example_plan(memory=None), 0),
        (example_plan(), 0),
    ):
        assert main.main(arguments) == status
    assert fake_planner.result == 0
    assert main.main([*arguments, "gpu_memory=80"]) == 2
    assert "gpu_memory=80: 80 is not a size with a unit" in capsys.readouterr().err
    Path("no").write_text("")
    assert main.main([*arguments, "out=no/a.html"]) == 2
    assert "cannot be made or written to: a part of it is a file" in capsys.readouterr().err
    assert main.main([*arguments, "out=a.html"]) == 0
    assert Path("a.html").read_text().startswith("<!doctype html>")


def test_error_without_gpu_lists_known_gpus(folder, monkeypatch, capsys):
    monkeypatch.setattr(command, "detect_gpus", lambda: None)
    assert main.main(["plan", "recipe=x.yaml", "gpus=8", "--no-search"]) == 2
    assert "no GPU given; give one of a100-40gb-pcie, " in capsys.readouterr().err


def test_the_machine_that_is_planned_for(monkeypatch):
    """What is given, else the GPUs of this machine, else its CPUs; one if no number is known."""
    monkeypatch.setattr(command.memory_here, "allowed", lambda: 16 * GIB)
    monkeypatch.setattr(command.os, "sched_getaffinity", lambda process: range(4))

    def planned(gpu=None, gpus=None, **more):
        found, notes = command.machine_to_plan(gpu, gpus, nodes=1, **more)
        return (found.name, found.gpus_per_node, found.memory, found.host_memory), notes

    for present, found in (
        (None, ("CPU", 1, 16 * GIB, 16 * GIB)),
        (("NVIDIA H200", 140 * GIB, 8), ("H200", 8, 140 * GIB, None)),
    ):
        monkeypatch.setattr(command, "detect_gpus", lambda present=present: present)
        machine, (note,) = planned()
        assert machine == found
        what = (
            "Planned for the GPUs" if present else "This machine has no GPUs: planned for its CPUs"
        )
        assert note.startswith(what)
        assert planned("h100")[0][:2] == ("H100", 1)
        assert planned("h100", 4) == (("H100", 4, find_gpu("h100").memory, None), [])
        assert planned("cpu") == (("CPU", 1, 16 * GIB, 16 * GIB), [])
        assert planned("cpu", 2)[0] == ("CPU", 2, 8 * GIB, 16 * GIB)
        assert planned("cpu", 2, host_memory=GIB)[0] == ("CPU", 2, GIB // 2, GIB)
    assert "4 of 32 cores" in command.machine_to_plan("cpu", 1, nodes=1)[0].rates.source


def test_the_cpus_are_planned_for_with_the_device_of_the_recipe(fake_planner, monkeypatch):
    monkeypatch.setattr(command, "detect_gpus", lambda: ("NVIDIA H200", 140 * GIB, 2))
    assert main.main(["plan", "recipe=x.yaml", "run.device=cpu", "--no-search"]) == 0
    assert fake_planner.machine[0] == "cpu"
    text = Path("x.yaml").read_text()
    Path("cpu.yaml").write_text(text.replace("run:", "run:\n  device: cpu", 1))
    assert main.main(["plan", "recipe=cpu.yaml", "--no-search"]) == 0
    assert fake_planner.machine[0] == "cpu", "also where the file says it"
    assert main.main(["plan", "recipe=cpu.yaml", "run.device=auto", "--no-search"]) == 0
    assert fake_planner.machine[0] == "NVIDIA H200", "an override has the last word"
    assert main.main(["plan", "recipe=cpu.yaml", "gpu=h100", "--no-search"]) == 0
    assert fake_planner.machine[0] == "h100"


def test_local_gpus_are_the_default(fake_planner, monkeypatch, capsys):
    monkeypatch.setattr(command, "detect_gpus", lambda: ("NVIDIA H200", 140 * GIB, 2))
    arguments = ["recipe=x.yaml", "--no-search", "rates=r.json", "host_memory=1TiB"]
    assert main.main(["plan", *arguments]) == 0
    assert "Planned for the GPUs of this machine" in capsys.readouterr().out
    gpu, settings = fake_planner.machine
    assert (gpu, settings["gpus_per_node"], settings["memory"]) == ("NVIDIA H200", 2, 140 * GIB)
    assert settings["host_memory"] == 1024**4
    assert settings["overrides"] == "rates of r.json"


@pytest.mark.parametrize("factor", [0.9, 1.1])
@pytest.mark.parametrize("name", COMPONENTS)
def test_comparison_shows_a_wrong_component(name, factor):
    def largest_deviation(step):
        rows = compare(step, measured_like(example_plan()))
        assert rows[-1][0] == "peak"
        return max(abs(planned / measured - 1) for _, planned, measured in rows)

    def scaled(held):
        return dataclasses.replace(held, **{name: int(getattr(held, name) * factor)})

    step = example_plan().step
    assert largest_deviation(step) == 0
    timeline = [
        dataclasses.replace(one, components=scaled(one.components)) for one in step.timeline
    ]
    held, after = scaled(step.held), scaled(step.after_forward)
    wrong = dataclasses.replace(step, timeline=tuple(timeline), held=held, after_forward=after)
    assert largest_deviation(wrong) > 0.0005, "the text would report no difference"


def test_measured_memory_is_listed_with_the_plan():
    plan = example_plan()
    text = printed(plan, measured=measured_like(plan))
    assert sum(line.endswith("the same") for line in text) == 9
    assert text[-1].startswith("The plan holds")
    changes = {"optimizer": 10 * GIB, "reserved": 50 * GIB, "context": GIB}
    text = printed(plan, measured=measured_like(plan, scale=1.2, **changes))
    assert set(collapsed(text)) >= {
        "optimizer state 7.5 GiB 10.0 GiB 25.2% under",
        "peak 43.6 GiB 52.3 GiB 16.7% under",
        "with margin 45.7 GiB 50.0 GiB 8.7% under",
        "driver and libraries 1.2 GiB 1.0 GiB 20.0% over",
    }
    assert text[-1].startswith("The plan does not hold")


def test_verify_measures_and_compares(fake_planner, monkeypatch, capsys):
    calls = []

    def measured(recipes, *, ranks, gpus):
        calls.append((recipes, ranks, gpus))
        return [measured_like(fake_planner.plan, scale=fake_planner.scale)]

    monkeypatch.setattr(measurement, "measure_recipes", measured)
    arguments = ["recipe=x.yaml", "gpu=h100", "gpus=8", "--verify"]
    assert main.main(["plan", *arguments]) == 2
    assert "verify: this machine has no GPUs for 8 ranks" in capsys.readouterr().err
    monkeypatch.setattr(command, "detect_gpus", lambda: ("NVIDIA H100", 80 * GIB, 8))
    for fake_planner.scale, status in ((0.96, 0), (1.015, 0), (0.94, 3), (1.03, 3)):
        assert main.main(["plan", *arguments]) == status
    chosen = "strategy.reshard_after_forward=true"  # in place of auto
    assert calls[0] == ([["recipe=x.yaml", chosen]], 8, True)
    assert fake_planner.result == 0
    capsys.readouterr()
    assert main.main(["plan", *arguments, "--json"]) == 3
    verified = json.loads(capsys.readouterr().out)["verified"]
    assert verified["true"] is False
    assert verified["compared"][-1]["what"] == "peak"


def resolved(recipe):
    """Without `model.keep_logits`."""
    facts = Facts(ranks=machine().ranks, machine=machine(), profiles=profiled(machine()))
    return resolve_for_plan(recipe, facts, logits=False)


def test_plan_resolves_auto_like_a_run(monkeypatch):
    chosen = example_search().configurations[1]
    chosen = dataclasses.replace(chosen, recipe=search.concrete(chosen.recipe, machine()))
    monkeypatch.setattr(auto, "fastest_that_fits", lambda *_, **__: chosen)
    recipe, overrides, (note,) = resolved(AUTO_RECIPE)
    assert recipe == chosen.recipe
    assert overrides == [*overrides_between(AUTO_RECIPE, recipe)]
    assert "batch.micro_batch_size=8" in overrides
    changes = " ".join(overrides)
    assert note.startswith(f"auto stands for {changes}: fsdp (ZeRO-3), bf16, selective ")
    assert "The fastest that fits: by plan " in note
    monkeypatch.setattr(auto, "fastest_that_fits", lambda *_, **__: None)
    recipe, overrides, (note,) = resolved(AUTO_RECIPE)
    assert (recipe.strategy.kind, recipe.batch.micro_batch_size) == ("fsdp", 1)
    collectives = (
        "strategy.reshard_after_forward=true strategy.sync_every_micro_batch=true: nothing fits"
    )
    start = "auto is shown as batch.micro_batch_size=1 strategy.kind=fsdp"
    assert note == f"{start} {collectives}"


def test_plan_makes_the_choice_of_collectives_that_a_run_makes():
    words = ["recipe=quickstart", "batch.micro_batch_size=2"]
    written = load_recipe([*words, "strategy.kind=fsdp"], ranks=8, files=False).recipe
    recipe, overrides, (note,) = resolved(written)
    assert overrides == ["strategy.reshard_after_forward=false"]
    assert overrides_between(written, recipe) == tuple(overrides)
    assert note.startswith("auto stands for strategy.reshard_after_forward=false: by estimate 15%")
    ddp = load_recipe(words, ranks=8, files=False).recipe
    assert resolved(ddp) == (ddp, [], [])
