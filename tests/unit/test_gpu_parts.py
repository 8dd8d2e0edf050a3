"""`make test-gpu`: results of each part are kept, failures are named, logs are parsed."""

import importlib
import json
import signal
import sys
from types import SimpleNamespace

import pytest

from launcher.errors import TrainingError

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


def test_calls_have_all_parts_and_end_before_ten_minutes(gpu):
    assert set(gpu.PARTS) == {part for parts in gpu.CALLS.values() for part in parts}
    for parts in gpu.CALLS.values():
        assert gpu.START + sum(parts.values()) <= 585, "their last 20 seconds end the processes"


@pytest.mark.parametrize("quick", [False, True])
def test_scripts_define_the_options_passed_to_them(gpu, tmp_path, quick):
    for part in gpu.PARTS:
        for command in gpu.commands(part, gpus=2, quick=quick, logs=tmp_path):
            script, *words = command.words
            if script != "-m":
                options = [word for word in words if str(word).startswith("--")]
                assert [word for word in options if f'"{word}"' not in script.read_text()] == []


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
    for name in ("PYTHONUNBUFFERED", "COLUMNS"):
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
