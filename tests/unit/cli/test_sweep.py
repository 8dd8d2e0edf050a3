"""`launcher train sweep.KEY=A,B`: a run for each combination, one after another or side by side."""

import os
import signal
import sys
import threading
from pathlib import Path

import pytest
import torch

from launcher.cli.main import run
from launcher.cli.sweep import LocalSweep, labels, take_sweep
from launcher.errors import EXIT_DONE, EXIT_FAILED, EXIT_STOPPED, RecipeError
from launcher.reliability.run_directory import RunFolder

RECIPE = ["recipe=quickstart", "run.device=cpu"]


@pytest.fixture
def sweep(tmp_path):
    """A sweep of three runs; each prints the GPUs that it may use, after `code`."""

    def make(code=""):
        overrides = [*RECIPE, f"run.dir={tmp_path}/sweep"]
        rates = [("optimizer.learning_rate", ["1e-4", "2e-4", "3e-4"])]
        local = LocalSweep(overrides, rates, ["--max-restarts=0"], ranks=1)
        show = "import os; print(os.environ.get('CUDA_VISIBLE_DEVICES'))"
        for number, folder in enumerate(local.runs):
            program = f"number = {number}\n{code}\n{show}"
            local.runs[folder] = [sys.executable, "-c", program]
        return local

    return make


def test_arguments_become_runs(tmp_path):
    words = ["recipe=x", "sweep.optimizer.betas=[0.9,0.95],[0.9,0.99]", "sweep.run.seed=1,2"]
    rest, sweep = take_sweep(words)
    assert rest == ["recipe=x"]
    assert labels(sweep)["betas=_0.9_0.99_,seed=2"] == ("optimizer.betas=[0.9,0.99]", "run.seed=2")
    assert len(labels(sweep)) == 4
    nested = ["sweep.data.train=[[1,2],[3]],{a: [b,c]}", "sweep.data.system=\"a, b\",'it''s, [x'"]
    assert [values for _, values in take_sweep(nested)[1]] == [
        ["[[1,2],[3]]", "{a: [b,c]}"],
        ['"a, b"', "'it''s, [x'"],
    ]
    with pytest.raises(RecipeError, match="two runs would have the same name and folder"):
        labels([("run.seed", ["1", "1"])])

    overrides = [*RECIPE, f"run.dir={tmp_path}"]
    local = LocalSweep(overrides, [("run.seed", ["1", "2"])], ["--gpus=2"], ranks=2)
    assert list(local.runs) == [tmp_path / "seed=1", tmp_path / "seed=2"]
    command = local.runs[tmp_path / "seed=2"]
    assert command[1:6] == ["-m", "launcher", "train", "--gpus=2", "recipe=quickstart"]
    assert command[-2:] == [f'run.dir="{tmp_path}/seed=2"', 'run.name="quickstart seed=2"']
    with pytest.raises(RecipeError, match=r"run\.seed=x: must be a whole number"):
        LocalSweep(overrides, [("run.seed", ["1", "x"])], [], ranks=1)


def test_sweeps_that_are_refused():
    words = {
        "sweep.run.seed=[1,2": "] is missing",
        "sweep.data.system=it's,b": "' is missing",
        "sweep.optimizer.eps=1,,2": "a value is empty",
        "sweep.optimizer.eps2=": "a value is empty",
        "sweep.run.dir=a,b": "each run has its own folder",
        "sweep.run.seed=3": "the key has a sweep already",
    }
    with pytest.raises(RecipeError) as raised:
        run(["train", *RECIPE, *words])
    for problem, (word, what) in zip(raised.value.problems, words.items(), strict=True):
        assert problem.startswith(f"command line: {word}: {what}")


def test_runs_side_by_side_have_gpus_of_their_own(sweep, capfd):
    local = sweep("if number == 1: raise SystemExit(1)")
    assert local.run(2, [["0", "1"], ["2", "3"]]) == EXIT_FAILED  # after the others
    outputs = [Path(f"{folder}.log").read_text().strip() for folder in local.runs]
    assert outputs[0] == "0,1"
    assert outputs[2] in ("0,1", "2,3")
    lines = capfd.readouterr().out.splitlines()
    assert sum("started, output in" in line for line in lines) == 3
    assert sum(line.endswith(": finished") for line in lines) == 2
    assert f"{list(local.runs)[1]}: failed with status 1" in lines


def test_table_says_how_each_run_ended(sweep, capfd):
    """Also one that ended before it wrote its state, or with that of an earlier start."""
    local = sweep(
        "import os, signal\n"
        "if number == 0: raise SystemExit(130)\n"
        "if number == 1: os.kill(os.getpid(), signal.SIGKILL)\n"
        "raise SystemExit(2)"
    )
    folder = RunFolder(list(local.runs)[2])
    folder.path.mkdir(parents=True)
    folder.write_status("stopped", step=5, reason="SIGINT")
    assert local.run(1, []) == EXIT_STOPPED
    local.print_table()
    lines = capfd.readouterr().out.splitlines()
    folders = [f"{folder}: " for folder in local.runs]
    ends = [line.removeprefix(name) for name in folders for line in lines if line.startswith(name)]
    expected = ["stopped", "failed with SIGKILL", "failed with status 2"]
    assert [end for end in ends if end != "started"] == expected
    rows = [" ".join(line.split()[1:]) for line in lines[-3:]]
    early = "0 none 0 before its first step; see its output"
    assert rows == [f"stopped {early}", f"failed {early}", "failed 5 none 0 status 2"]


def test_runs_one_after_another(sweep, capfd):
    local = sweep()
    assert local.run(1, []) == EXIT_DONE
    lines = [line.rpartition("=")[2] for line in capfd.readouterr().out.splitlines()]
    assert [line for line in lines if ":" in line] == [
        f"{rate}: {what}" for rate in ("1e-4", "2e-4", "3e-4") for what in ("started", "finished")
    ]


def test_request_stops_the_sweep(sweep, capfd):
    """The runs that train save and stop; the others do not start."""
    local = sweep(
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))\n"
        "open(f'{sys.argv[1]}{number}', 'w').close()\ntime.sleep(60)"
    )
    ready = next(iter(local.runs)).parent.parent / "ready"
    for command in local.runs.values():
        command.append(str(ready))

    def ask():
        for _ in range(600):
            if all(os.path.exists(f"{ready}{number}") for number in (0, 1)):
                os.kill(os.getpid(), signal.SIGTERM)
                return
            threading.Event().wait(0.1)

    thread = threading.Thread(target=ask)
    thread.start()
    assert local.run(2, []) == EXIT_STOPPED
    thread.join()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    out = capfd.readouterr().out
    assert out.count(": stopped") == 2
    assert "learning_rate=3e-4" not in out
    local.print_table()  # the runs ended before they wrote their state
    table = [line.split()[:3] for line in capfd.readouterr().out.splitlines()[1:]]
    assert [row[1] for row in table] == ["stopped", "stopped", "not"]
    assert table[2] == ["learning_rate=3e-4", "not", "started"]


def test_options_that_a_sweep_cannot_have(monkeypatch):
    with pytest.raises(RecipeError, match="throttle: needs a sweep"):
        run(["train", *RECIPE, "throttle=2"])
    several = ["nodes=2", "node_rank=0", "address=h:1"]
    with pytest.raises(RecipeError, match="`launcher submit` takes several nodes"):
        run(["train", *RECIPE, *several, "sweep.run.seed=1,2"])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    with pytest.raises(RecipeError, match="3 runs of 2 GPUs at the same time need 6; there are 4"):
        run(["train", RECIPE[0], "sweep.run.seed=1,2", "gpus=2", "throttle=3"])
