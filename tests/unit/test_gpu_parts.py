"""`make gpu-first` and `make test-gpu`: results of each part are kept, failures are named, logs are
parsed, and the calls fit what a lent machine takes."""

import importlib
import json
import re
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import gpu_plans
import gpu_rows
import pytest
import torch

from docs import gpu_page
from launcher.errors import TrainingError
from launcher.planner.machine import known_machine
from launcher.planner.memory import OVER, UNDER
from launcher.planner.speed import RANGE
from tests import REPOSITORY

BENCHMARKS = REPOSITORY / "benchmarks"
LOG = """
collecting ... collected 9 items / 3 deselected / 6 selected

tests/gpu/test_gpu.py::test_a[{param_dtype: bfloat16}-1] PASSED  [ 16%]
tests/gpu/test_gpu.py::test_b FAILED                             [ 33%]
tests/gpu/test_gpu.py::test_c SKIPPED (needs nvidia-smi)         [ 50%]
tests/gpu/test_gpu.py::test_d[1-x] 
!!!!!!!!!! KeyboardInterrupt !!!!!!!!!
1.50s setup    tests/gpu/test_gpu.py::test_a[{param_dtype: bfloat16}-1]
2.25s call     tests/gpu/test_gpu.py::test_a[{param_dtype: bfloat16}-1]
FAILED tests/gpu/test_gpu.py::test_b - assert 1 == 2
"""
# What pytest-xdist prints
PARALLEL = """
created: 4/4 workers
4 workers [4 items]

scheduling tests via LoadScheduling

tests/gpu/test_gpu.py::test_a[1] 
tests/gpu/test_gpu.py::test_b 
[gw1] [ 25%] PASSED tests/gpu/test_gpu.py::test_a[1] 
"""


@pytest.fixture
def gpu():
    """The module benchmarks/gpu.py. Signal handlers are restored after the test."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield importlib.import_module("gpu")
    for number, handler in handlers.items():
        signal.signal(number, handler)


def test_figures_are_read_from_logs(gpu):
    log = "noise\n| a | b |\n|---|---:|\na warning\n| 1 | x, y |\nanother\n| 2 |  |\n| c |\n|---|\n| 3 |\n"
    assert gpu.tables(log) == [{"a": "1", "b": "x, y"}, {"a": "2", "b": ""}, {"c": "3"}]
    assert [tuple(row.values()) for row in gpu.outcomes(LOG)] == [
        ("test_a[{param_dtype: bfloat16}-1]", "passed", 3.75),
        ("test_b", "failed: assert 1 == 2", None),
        ("test_c", "skipped (needs nvidia-smi)", None),
        ("test_d[1-x]", "not done", None),
        ("2 others", "not started", None),
    ]
    assert [tuple(row.values()) for row in gpu.outcomes(PARALLEL)] == [
        ("test_a[1]", "passed", None),
        ("test_b", "not done", None),
        ("2 others", "not started", None),
    ]


def test_parts_of_a_call_end_before_the_call(gpu):
    for seconds, parts in gpu.CALLS.values():
        assert gpu.START + sum(parts.values()) <= seconds - 10
        assert min(parts.values()) > 2 * gpu.GRACE


def test_calls_fit_what_a_machine_takes(gpu, tmp_path):
    """Few commands, and few files: gpu.json, gpu.md and the logs of a call."""
    for call, (_, parts) in gpu.CALLS.items():
        command = gpu.call_command(call, wheels=Path("build/wheels"), commit="1234567-dirty")
        assert len(command) <= gpu.LONGEST_COMMAND
        words = {"gpu": "H100", "gpus": 1, "quick": False, "logs": tmp_path}
        logs = [command for part in parts for command in gpu.commands(part, **words)]
        assert len(logs) + 2 <= gpu.MOST_FILES


def test_calls_are_not_printed_for_too_large_a_tree(gpu, tmp_path, capsys):
    with pytest.raises(SystemExit):
        gpu.print_calls(tmp_path, "abc")
    assert "has no wheels; `make gpu-wheels`" in capsys.readouterr().err
    wheel = tmp_path / "small-1.0-py3-none-any.whl"
    wheel.touch()
    gpu.print_calls(tmp_path, "abc")
    assert capsys.readouterr().out.count("python3 benchmarks/gpu.py --call ") == len(gpu.CALLS)
    with wheel.open("wb") as file:
        file.truncate(gpu.LARGEST_TREE)
    with pytest.raises(SystemExit):
        gpu.print_calls(tmp_path, "abc")
    assert "at most 64 may travel" in capsys.readouterr().err


@pytest.mark.parametrize("quick", [False, True])
def test_scripts_define_the_options_passed_to_them(gpu, tmp_path, quick):
    for part in gpu.PARTS:
        for command in gpu.commands(part, gpu="H100", gpus=1, quick=quick, logs=tmp_path):
            script, *words = command.words
            if script != "-m":
                options = [word for word in words if str(word).startswith("--")]
                assert [word for word in options if f'"{word}"' not in script.read_text()] == []


def test_every_group_of_rows_is_a_part(gpu):
    assert tuple(gpu_rows.GROUPS) == gpu.GROUPS
    for group, rows in gpu_rows.GROUPS.items():
        assert len({row.name for row in rows}) == len(rows)
        assert gpu_rows.rows_of(group, gpu="A100", ranks=1) == (rows if group != "goals" else [])
    (goal,) = gpu_rows.rows_of("goals", gpu="H200", ranks=1)
    assert goal.name == "Llama-3.1-8B, AdamW in int8"
    assert goal.tokens(1) == 16 * 4096


def test_repository_has_the_plans_of_all_rows():
    """`make gpu-plans` makes them."""
    plans = json.loads(gpu_plans.PLANS.read_text())
    assert {"commit", "date", "torch", "transformers"} <= set(plans["made"])
    for gpu in gpu_page.GPUS:
        for group in gpu_page.TITLES:
            for row in gpu_rows.GROUPS[group]:
                plan = plans["machines"][f"{gpu} x 1"][f"{group}: {row.name}"]
                assert plan["needed"] <= known_machine(gpu, nodes=1, gpus_per_node=1).memory
    for row in gpu_rows.GROUPS["goals"]:
        plan = plans["machines"][f"{row.goal.gpu.upper()} x {row.goal.gpus}"][f"goals: {row.name}"]
        assert plan["needed"] <= known_machine(row.goal.gpu, nodes=1, gpus_per_node=1).memory


@pytest.mark.long
def test_plans_are_current(tmp_path, monkeypatch):
    """If this fails, `make gpu-plans` makes them again."""
    output = tmp_path / "plans.json"
    words = ["--gpus", "h100", "--groups", "steps", "--output", str(output)]
    monkeypatch.setattr(sys, "argv", ["gpu_plans.py", *words])
    assert gpu_plans.main() == 0
    for name, plan in gpu_plans.planned(output, "H100", 1).items():
        stated = gpu_plans.planned(gpu_plans.PLANS, "H100", 1)[name]
        assert plan["peak"] == pytest.approx(stated["peak"], rel=0.01)
        assert plan["seconds"] == pytest.approx(stated["seconds"], rel=0.02)


def test_page_of_figures_is_that_of_the_plans():
    """If this fails, `python -m docs.gpu_page` writes the pages again."""
    assert gpu_page.PAGE.read_text() == gpu_page.page()
    for file in gpu_page.SUMMARIES:
        text = file.read_text()
        assert text == gpu_page.with_summary(text)
        assert "| Llama-3.1-8B, LoRA | H100 | 14,412 |" in text


def test_figures_of_a_gpu_fill_the_page(tmp_path, monkeypatch):
    machine = {
        "gpu": "NVIDIA H100 80GB HBM3",
        "gpus": 1,
        "torch": "2.11.0",
        "transformers": "5.17.0",
    }
    machine["commit"] = "abc1234"

    def part(*figures):
        commands = [{"name": "one", "figures": list(figures)}]
        return {"machine": machine, "date": "2027-01-02", "status": "passed", "commands": commands}

    step = {"row": "fsdp, compiled", "ms": "301.5", "MFU": "49.9%", "GiB": "30.01", "retries": "0"}
    parts = {
        "steps": part(step),
        "kernels": part({"what": "products, TFLOP/s", "figure": "798", "error": ""}),
        "goals": part({"row": "Llama-3.2-1B", "MFU": "47.1%"}),
    }
    (tmp_path / "gpu.json").write_text(json.dumps({"parts": parts}))
    monkeypatch.setattr(gpu_page, "MEASURED", tmp_path / "measured.json")
    monkeypatch.setattr(gpu_page, "PAGE", tmp_path / "gpu.md")
    monkeypatch.setattr(gpu_page, "SUMMARIES", (tmp_path / "summary.md",))
    (tmp_path / "summary.md").write_text(
        f"before\n\n| {gpu_page.SUMMARY_HEAD} |\n|---|\n| old |\n\nafter\n"
    )
    monkeypatch.setattr(sys, "argv", ["gpu_page", str(tmp_path / "gpu.json")])
    (tmp_path / "measured.json").write_text("{}")
    gpu_page.main()
    text = (tmp_path / "gpu.md").read_text()
    assert "No GPU has measured" not in text
    assert "| steps | H100 | passed | 2027-01-02 | 2.11.0 | 5.17.0 | abc1234 |" in text
    (row,) = (line for line in text.splitlines() if line.startswith("| H100 | fsdp, compiled |"))
    assert "| 301.5 |" in row
    assert "| 30.01 |" in row
    (goal,) = (line for line in text.splitlines() if line.startswith("| Llama-3.2-1B |"))
    assert "| 47.1% |" in goal
    assert re.search(r"\| H100 \| products, TFLOP/s \| \d+ \| 798 \|", text)
    summary = (tmp_path / "summary.md").read_text()
    assert summary.startswith("before\n\n|")
    assert summary.endswith("|\n\nafter\n")
    assert "old" not in summary
    assert "| Llama-3.2-1B, all weights | H100 |" in summary


@pytest.fixture
def script(monkeypatch):
    """Returns a function that imports a script which sets the variables of a training run."""
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    return importlib.import_module


OFFLOADED = "the host's share of memory traffic is not known, and the sums were copied pageable"
SLOWER = dict.fromkeys(("fsdp, full, offload", "fsdp, eager, full, offload"), OFFLOADED)
SLOWER |= {
    "Qwen3.5-9B, 4 layers, full": "the host launches 25,600 small kernels, 35 us each; the plan has 15",
    "Qwen3-30B-A3B, 4 layers, eager": "sorting and gathering of tokens: 155 of 292 ms are elementwise",
}
"""Rows whose steps were slower than predicted, with the reason."""


def measured_rows():
    plans = json.loads((BENCHMARKS / "plans.json").read_text())["machines"]
    for gpu, parts in json.loads((BENCHMARKS / "gpu_measured.json").read_text()).items():
        for group in gpu_rows.GROUPS.keys() & parts.keys():
            for row in parts[group]["figures"]:
                yield (
                    group,
                    row,
                    plans[f"{gpu} x {parts[group]['machine']['gpus']}"][f"{group}: {row['row']}"],
                )


def test_plans_agree_with_what_gpus_have_measured():
    memory, time = {}, {}
    for group, row, plan in measured_rows():
        memory[group, row["row"]] = plan["peak"] / 2**30 / float(row["GiB"]) - 1
        time[group, row["row"]] = float(row["ms"]) / 1000 / plan["seconds"]
    assert len(memory) >= 22
    assert {k: v for k, v in memory.items() if not -UNDER <= v <= OVER} == {}
    slower = {name for (_, name), ratio in time.items() if not RANGE[0] < 1 / ratio < RANGE[1]}
    assert slower == SLOWER.keys()


@pytest.mark.long
def test_rows_are_trained_in_one_process(script, capsys, monkeypatch):
    """On a CPU; what fails has its reason in its row, and the others are measured."""
    steps = script("gpu_steps")
    train = steps.train
    for name in ("prepare_cpu", "set_numerics"):  # they change this process
        monkeypatch.setattr(steps.process_group, name, lambda *_, **__: None)

    def failing(row, ranks, **options):
        if row.name == "fsdp, eager":
            raise RuntimeError("no | memory\nat all")
        return train(row, ranks, **options)

    monkeypatch.setattr(steps, "train", failing)
    words = ["--group", "steps", "--tiny", "--eager"]
    monkeypatch.setattr(sys, "argv", ["gpu_steps.py", *words])
    assert steps.main() == 1
    printed = capsys.readouterr().out
    rows = {row["row"]: row for row in importlib.import_module("gpu_logs").tables(printed)}
    assert rows.pop("fsdp, eager")["ms"] == "failed: RuntimeError: no / memory"
    assert len(rows) == 3
    for trained in rows.values():
        first, last = (float(loss) for loss in trained["loss"].split(" to "))
        assert last < first
        assert float(trained["ms"]) > 0


@pytest.mark.long
def test_kernels_are_compared(script, capsys, monkeypatch):
    kernels = script("gpu_kernels")
    monkeypatch.setattr(torch, "set_float32_matmul_precision", lambda _: None)
    monkeypatch.setattr(sys, "argv", ["gpu_kernels.py", "--tiny"])
    status, printed = kernels.main(), capsys.readouterr().out
    assert status == 0, printed
    figures = importlib.import_module("gpu_logs").tables(printed)
    held = [row["what"] for row in figures if row["holds"] == "yes"]
    assert {name.partition(":")[0] for name in held} >= {
        "attention, causal",
        "AdamW in int8",
        "NF4",
        "normal numbers",
        "state on the host",
        "loss, eager, softcap 30.0",
        "float8",
    }


def test_error_of_a_kernel_is_reported(script, capsys):
    kernels = script("gpu_kernels")
    report = kernels.Report(torch.device("cpu"), tiny=True)

    def wrong(report):
        report.error("a product", kernels.relative(torch.ones(3), torch.zeros(3) + 2), 1e-3)
        raise ValueError("and a failure")

    report.section(wrong)
    assert report.failed == ["a product", "wrong"]
    first, second, _ = importlib.import_module("gpu_logs").tables(capsys.readouterr().out)
    assert (first["what"], first["error"], first["holds"]) == ("a product", "5.00e-01", "NO")
    assert second["figure"] == "ValueError: and a failure"


def test_failed_and_late_parts_keep_their_figures(gpu, tmp_path, monkeypatch, capsys):
    # A shell ignores SIGINT in background jobs; the commands must not inherit that
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    table = "print('| steps |\\n|---|\\n| {} |', flush=True)"
    interrupted = "\ntry: time.sleep(60)\nexcept KeyboardInterrupt: print('| 3 |')"
    scripts = {
        "doctor": {"one": table.format(1), "two": "import sys; sys.exit(7)"},
        "tests": {"slow": "import time\n" + table.format(2) + interrupted, "late": "print('late')"},
        "plan": {
            "good": table.format(4) + "; print('\\n| mode | loss |\\n|---|---|\\n| ddp | 0.5 |')"
        },
    }

    def commands(part, **_):
        return [
            gpu.Command(name, ["-c", script], gpu.tables) for name, script in scripts[part].items()
        ]

    machine = {"gpu": "NVIDIA H200", "gpus": 2, "torch": "2.11.0", "commit": "abc"}
    monkeypatch.setattr(gpu, "commands", commands)
    monkeypatch.setattr(gpu, "machine_here", lambda commit: dict(machine))
    monkeypatch.setattr(gpu, "missing_packages", dict)
    monkeypatch.setattr(gpu, "import_from", lambda folder: None)
    for name in ("PYTHONUNBUFFERED", "COLUMNS", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        monkeypatch.setenv(name, "")

    def main(*parts, limit=30):
        words = ["gpu.py", "--results", str(tmp_path), "--limit", str(limit), "--parts", *parts]
        monkeypatch.setattr(sys, "argv", words)
        status, results = gpu.main(), json.loads((tmp_path / "gpu.json").read_text())
        return status, results["parts"], capsys.readouterr().out

    status, parts, printed = main("doctor", "plan")
    assert status == 1
    assert parts["doctor"]["status"] == "two: failed with status 7"
    assert "doctor: two: failed with status 7" in printed.partition("Failed:")[2]
    assert (parts["plan"]["status"], parts["plan"]["machine"]) == ("passed", machine)
    status, parts, _ = main("tests", limit=8)
    assert status == 1
    assert list(parts) == ["doctor", "plan", "tests"], "results of other parts must be kept"
    slow, late = parts["tests"]["commands"]
    assert slow["status"] == "not done in 8 s"
    assert slow["figures"] == [{"steps": "2"}, {"steps": "3"}]
    assert late["status"] == "not started: the part's time was up"
    status, parts, _ = main("plan")
    assert status == 0
    text = (tmp_path / "gpu.md").read_text()
    assert "| doctor | two: failed with status 7 |" in text
    assert "## plan: good" in text
    assert "| steps |\n|---|\n| 4 |\n\n| mode | loss |\n|---|---|\n| ddp | 0.5 |\n" in text


def test_interrupted_comparison_reports_its_measurements(gpu, tmp_path, monkeypatch):
    compare = importlib.import_module("compare")
    step = {"step_seconds": 0.5, "cpu_seconds": 1.0, "data_seconds": 0.1, "loss": 3.0}
    step["peak_memory_bytes"] = 2**20
    run = compare.Measured([step] * 3, 9.0)

    def measure(name, result, **_):
        if name == "fsdp-bf16":
            raise KeyboardInterrupt
        result.runs = {"raw": [run], "launcher": [run]}

    monkeypatch.setattr(compare, "compare", measure)
    monkeypatch.setattr(compare.Bench, "prepare", lambda self: None)
    monkeypatch.setattr(compare.Bench, "initial_weights", lambda self, mode: tmp_path)
    output, modes = str(tmp_path / "table.md"), ["ddp-bf16", "fsdp-bf16"]
    words = ["--steps", "3", "--skip", "1", "--modes", *modes, "--output", output]
    monkeypatch.setattr(sys, "argv", ["compare.py", *words])
    assert compare.main() == 1
    text = (tmp_path / "table.md").read_text()
    assert "| ddp-bf16 | step time, ms | 500.0 | **1.000** (1.000 – 1.000) |" in text
    assert "Failed: fsdp-bf16 and what follows it (interrupted)." in text

    # The difference is infinite if a loss is zero or missing
    runs = (
        compare.Measured([{"loss": loss} for loss in losses], 0.0)
        for losses in ((2.0, 2.0, 0.0), (1.0, None, 1.0))
    )
    result = compare.Result(same_weights=dict(zip(("raw", "launcher"), runs, strict=True)))
    assert result.loss_differences("raw") == [0.5, float("inf"), float("inf")]


def test_processes_of_a_nested_run_are_ended(gpu, tmp_path, monkeypatch):
    bench = importlib.import_module("bench")
    sleeper = "import subprocess, sys; subprocess.Popen(['sleep', '300'], start_new_session=True)"
    inner = f"import os; os.environ['{bench.MARK}'] += 'inner'; {sleeper}"
    marks = []
    find = bench.marked_processes
    monkeypatch.setattr(bench, "marked_processes", lambda mark: marks.append(mark) or find(mark))
    assert bench.exit_status([sys.executable, "-c", inner], log=tmp_path / "log", limit=60) == 0
    assert find(marks[0]) == []
    assert len(marks) > 1, "the remaining process must be found and ended"


def test_interrupted_plan_keeps_its_rows(monkeypatch, capsys):
    """A launch that fails, such as one that runs out of memory, takes only its rows with it."""
    memory = importlib.import_module("memory")
    cases = [
        SimpleNamespace(name=f"case {n}", arguments=[str(n)], plan=SimpleNamespace(step=None))
        for n in range(2 * memory.AT_ONCE + 1)
    ]
    launches = []

    def measure(recipes, **_):
        launches.append(recipes)
        if len(launches) == 1:
            raise TrainingError("no memory")
        if len(launches) == 3:
            raise KeyboardInterrupt
        return recipes

    monkeypatch.setattr(memory, "detect_gpus", lambda: None)
    monkeypatch.setattr(memory, "planned", lambda *_: iter(cases))
    monkeypatch.setattr(memory, "measure_recipes", measure)
    monkeypatch.setattr(memory, "peak_holds", lambda step, found: True)
    monkeypatch.setattr(memory, "row", lambda case, found: f"| {case.name} | {found[0]} |")
    monkeypatch.setattr(sys, "argv", ["memory.py"])
    with pytest.raises(KeyboardInterrupt):
        memory.main()
    printed = capsys.readouterr()
    rows = [line for line in printed.out.splitlines() if line.startswith("| case")]
    assert rows == [f"| case {n} | {n} |" for n in range(memory.AT_ONCE, 2 * memory.AT_ONCE)]
    assert "not measured: case 0; case 1" in printed.err
    assert [len(recipes) for recipes in launches] == [memory.AT_ONCE, memory.AT_ONCE, 1]
