"""Tests of launcher/slurm without a cluster: job script, arguments, requeue decisions, preflight.

The tests in tests/slurm use a real cluster.
"""

import contextlib
import io
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
import types
from pathlib import Path

import pytest

from launcher import __version__
from launcher.cli import submit as command
from launcher.cli.main import run as launcher
from launcher.errors import RecipeError
from launcher.recipe.schema import Slurm
from launcher.reliability.run_directory import RunFolder
from launcher.slurm import agent, attempts, preflight, scheduler
from launcher.slurm import job as job_module
from launcher.slurm.attempts import Attempts
from launcher.slurm.job import Job, read_options
from launcher.slurm.render import (
    JobScript,
    missing_resources,
    node_counts,
    ranks_per_node,
    render,
    training_command,
)
from launcher.slurm.scheduler import JobInfo
from tests import REPOSITORY
from tests.unit.small_recipe import SMALL, says


def job(
    run_dir="/runs/a", *, runs=1, name="a", python="/py", dependency=None, throttle=None, **slurm
):
    folders = [Path(run_dir) if runs == 1 else Path(run_dir, str(number)) for number in range(runs)]
    return JobScript(
        name=name,
        slurm=Slurm(**slurm),
        lead=300,
        log=Path("/runs/a/slurm/job_%j.log"),
        directory=Path("/home/me"),
        runs=tuple((folder, folder / "slurm/recipe_1.yaml") for folder in folders),
        python=Path(python),
        throttle=throttle,
        dependency=dependency,
    )


def options(text):
    """Returns the options in the #SBATCH lines, with the quoting rules of a shell, like sbatch."""
    return [
        shlex.split(line)[1]
        for line in text.replace("#SBATCH", "SBATCH").splitlines()
        if line.startswith("SBATCH ")
    ]


# The script


def test_script_contains_all_options():
    same = {"time": "1-12:00:00", "partition": "gpu", "account": "me", "qos": "low"}
    same |= {"constraint": "h100", "exclude": "n[1-3]", "reservation": "r"}
    text = render(
        job(
            **{"nodes": "2-4", "gpus_per_node": 8, "cpus": 64, "host_memory": "500G"} | same,
            mail="me@here",
            sbatch_extra=("--exclusive",),
            srun_extra=("--container-image=i",),
            dependency="afterok:7",
            throttle=2,
            runs=3,
            setup=("module load cuda",),
            environment={"NCCL_IB_HCA": "mlx5"},
            interface="ib0",
        )
    )
    expected = ["--job-name=a", "--nodes=2-4", "--gpus-per-node=8", "--cpus-per-task=64"]
    expected.append("--mem=500G")
    expected += [f"--{name}={value}" for name, value in same.items()]
    expected += ["--mail-user=me@here", "--mail-type=END,FAIL,REQUEUE", "--array=0-2%2"]
    expected += ["--dependency=afterok:7", "--signal=B:USR1@300", "--chdir=/home/me"]
    expected += ["--output=/runs/a/slurm/job_%j.log", "--requeue", "--open-mode=append"]
    assert options(text) == [*expected, "--exclusive"]
    order = ["trap 'warned=1", "module load cuda", "NCCL_DEBUG=", "NCCL_SOCKET_IFNAME=ib0"]
    order += ["export NCCL_IB_HCA=mlx5", "exec /py"]
    assert sorted(order, key=text.index) == order
    parsed = options_of_job_program(text, "7", "9")
    assert [run for run, _ in parsed.run] == ["/runs/a/0", "/runs/a/1", "/runs/a/2"]
    assert (parsed.lead, parsed.script, parsed.chain) == (300, "/spool/script", ["7", "9"])
    spare = render(job(nodes=130, train_nodes=128, gpus_per_node=8))
    assert spare.splitlines()[1] == "# a: 128 of 130 nodes, 8 ranks on each"
    assert {"--nodes=130", "--no-kill"} <= set(options(spare))
    assert "--nodelist=NODES" in spare
    plain = render(job(nodes=2, ranks_per_node=3))
    assert "--no-kill" not in plain
    assert plain.splitlines()[1] == "# a: 2 nodes, 3 ranks on each"
    assert options_of_job_program(plain).chain == []
    assert "--gpus-per-node" not in plain, "a CPU node has no GPU option"
    assert len(plain.splitlines()) < 45, "the script must be short"


def test_example_script_is_what_submit_writes():
    """To write it anew: print this text into the file."""
    project = Path("/home/me/project")
    folder = project / "runs/sft"
    text = render(
        JobScript(
            name="sft",
            slurm=Slurm(nodes=2, gpus_per_node=8, time="12:00:00", partition="gpu"),
            lead=300,
            log=folder / "slurm/job_%j.log",
            directory=project,
            runs=((folder, folder / "slurm/recipe.yaml"),),
            python=project / ".venv/bin/python",
        )
    )
    assert (REPOSITORY / "slurm/sft.sbatch").read_text() == text.replace(f" {__version__} ", " ")


def test_script_shows_the_command_that_trains():
    """The script ends in a program, so it did not show what runs on the nodes."""
    one = job(nodes=2, gpus_per_node=8, srun_extra=("--container-image=a b\nrm -rf x",))
    text = render(one)
    shown = [line.removeprefix("#   ") for line in text.splitlines() if line.startswith("#   ")]
    words = shlex.split(" ".join(shown))
    expected = training_command(
        Slurm(nodes=2, gpus_per_node=8, srun_extra=("--container-image=a b?rm -rf x",)),
        python="/py",
        nodes="2",
        endpoint="HOST:PORT",
        name="JOB.RESTART",
        recipe=Path("/runs/a/slurm/recipe_1.yaml"),
        logs="/runs/a/slurm/job_JOB/restart_RESTART",
    )
    assert words == expected
    assert words[:3] == ["srun", "--nodes", "2"]
    assert words[-2:] == ["launcher.train", "recipe=/runs/a/slurm/recipe_1.yaml"]
    assert max(map(len, text.splitlines())) <= 140
    assert "--dependency=afternotok:JOB" in text
    assert "--nodes NODES" in render(job(nodes="2-4", gpus_per_node=8))


@pytest.mark.parametrize(
    ("given", "workers", "host_memory", "expected"),
    [
        (
            {},
            2,
            (37 << 30) + 1,
            "note: without cpus and host_memory, the job gets what the cluster gives by default; a "
            "node needs 3 CPUs for each GPU, for its rank and 2 loader processes (cpus=24) and "
            "37.0 GiB of host memory (host_memory=38G)",
        ),
        (
            {"host_memory": "64G"},
            1,
            None,
            "note: without cpus, the job gets what the cluster gives by default; a node needs 2 CPUs "
            "for each GPU, for its rank and 1 loader process (cpus=16)",
        ),
        (
            {"cpus": 64},
            2,
            None,
            "note: without host_memory, the job gets what the cluster gives by default",
        ),
        ({"cpus": 64, "host_memory": "64G"}, 2, 1, None),
        ({"gpus_per_node": None}, 2, None, None),
    ],
)
def test_what_a_node_needs_is_said_if_the_job_does_not_ask_for_it(
    given, workers, host_memory, expected
):
    slurm = Slurm(**{"gpus_per_node": 8, **given})
    assert missing_resources(slurm, workers=workers, host_memory=host_memory) == expected


def test_submit_says_what_a_node_needs_by_the_plan(folder, monkeypatch, capsys):
    monkeypatch.setattr(command, "print_plan", lambda arguments: (0, 5 << 30))
    monkeypatch.setattr(scheduler, "sbatch", lambda script: "7")
    assert launcher(["submit", "recipe=x.yaml", "gpus=4", "gpu=h100"]) == 0
    printed = capsys.readouterr().out
    assert "(cpus=12) and 5.0 GiB of host memory (host_memory=5G)\n" in printed


def options_of_job_program(text, *arguments):
    """Returns the options of the job program if the script is started with these arguments."""
    values = {"\\\n": " ", "$warned": "0", "$terminated": "0", "$0": "/spool/script"}
    line = text[text.index("\nexec ") :]
    for name, value in values.items():
        line = line.replace(name, value)
    words = [word for word in shlex.split(line) if word != "$@"]
    return read_options([*words[words.index("launcher.slurm.job") + 1 :], *arguments])


@pytest.mark.skipif(
    shutil.which("shellcheck") is None,
    reason="shellcheck is not installed (Debian: apt-get install shellcheck)",
)
def test_shellcheck_accepts_the_script(tmp_path):
    more = {"interface": "ib0", "setup": (":",), "environment": {"A": "b c"}}
    (tmp_path / "plain").write_text(render(job()))
    (tmp_path / "all").write_text(render(job(runs=3, srun_extra=("-v",), **more)))
    command = ["shellcheck", tmp_path / "plain", tmp_path / "all"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout


HOSTILE = "we ird'\"; $(touch HACKED) `touch HACKED` #\\ %j &"


def test_names_are_quoted_in_the_script(tmp_path):
    """Runs the script with a replacement for Python, which must receive the folder unchanged."""
    run_dir = tmp_path / HOSTILE
    text = render(
        job(
            str(run_dir),
            name=HOSTILE,
            partition=HOSTILE,
            environment={"VALUE": HOSTILE + "\nmore"},
            python=tmp_path / "python",
        )
    )
    requested = options(text)
    assert len(requested) == len(options(render(job(partition="p"))))
    assert {f"--job-name={HOSTILE}", f"--partition={HOSTILE}"} <= set(requested)
    (tmp_path / "python").write_text(
        '#!/bin/bash\nprintf "%s\\0" "$@" > arguments; printf %s "$VALUE" > value\n'
    )
    (tmp_path / "python").chmod(0o755)
    subprocess.run(["bash", "-c", text], cwd=tmp_path, check=True, timeout=300, capture_output=True)
    parsed = read_options((tmp_path / "arguments").read_text().split("\0")[2:-1])
    assert parsed.run == [[str(run_dir), f"{run_dir}/slurm/recipe_1.yaml"]]
    assert (tmp_path / "value").read_text() == HOSTILE + "\nmore"
    assert not list(tmp_path.rglob("HACKED"))


@pytest.mark.parametrize("text", ["a\n#SBATCH --account=other", "a\rb", "a\0b", "a\x1b[31m"])
def test_line_breaks_are_refused(text):
    with pytest.raises(RecipeError, match="cannot be written in a line of a script"):
        render(job(name=text))


def test_node_counts_and_ranks_per_node():
    assert [list(node_counts(Slurm(nodes=nodes))) for nodes in ("2-4", 2)] == [[2, 3, 4], [2]]
    requested = Slurm(), Slurm(gpus_per_node=8), Slurm(gpus_per_node=8, ranks_per_node=2)
    assert [ranks_per_node(slurm) for slurm in requested] == [1, 8, 2]


# The arguments


def dry_run(*words, capsys):
    assert launcher(["submit", "recipe=x.yaml", "--dry-run", *words]) == 0
    return capsys.readouterr().out


def test_arguments_override_the_recipe(folder, capsys):
    with (folder / "x.yaml").open("a") as recipe:
        recipe.write('slurm: {time: "9:00:00", partition: slow, account: "0123", nodes: 2}\n')
    words = ["time=1:30:00", "partition=0x10", "gpus=4", "sbatch_extra=--nice=5"]
    requested = options(dry_run(*words, "sbatch_extra=-H", capsys=capsys))
    expected = {"--time=1:30:00", "--partition=0x10", "--account=0123", "--nodes=2", "--nice=5"}
    assert expected | {"--gpus-per-node=4", "-H", f"--chdir={folder}"} <= set(requested)
    assert f"--output={folder}/runs/small/slurm/job_%j.log" in requested
    assert not (folder / "runs").exists(), "a dry run writes nothing"


@pytest.mark.parametrize(
    "word",
    [
        "time=soon",
        "nodes=4-2",
        "nodes=0",
        "train_nodes=2",
        "train_nodes=0",
        "train_nodes=most",
        "host_memory=much",
        "account=a\nb",
        "sbatch_extra=rm",
        "sbatch_extra=--exclusive --account=x",
        "slurm.environment={A B: x}",
        "--wiat",
        "model.config.hiden_size=64",
        "throttle=2",
        "nodes=2-4",
        "sweep.optimizer.learning_rate=1e-3,1e-3",
        "sweep.optimizer.learning_rate=1e-3,fast",
    ],
)
def test_mistakes_are_reported_before_submission(folder, words, word):
    with words.refused(ascii(word)):
        launcher(["submit", "recipe=x.yaml", word])
    assert not (folder / "runs").exists()


def test_sweep_has_one_folder_per_combination(folder, capsys):
    sweeps = ["optimizer.learning_rate=1e-3,2e-3", "optimizer.betas=[0.9,0.95],[0.8,0.9]"]
    text = dry_run(*(f"sweep.{sweep}" for sweep in sweeps), "throttle=3", capsys=capsys)
    assert {"--array=0-3%3", "--job-name=small"} <= set(options(text))
    found = re.findall(r"runs/small/(\S+?)/slurm/recipe_", text[text.index("\nexec ") :])
    assert found == [
        f"learning_rate={rate},betas=_{betas}_"
        for rate in ("1e-3", "2e-3")
        for betas in ("0.9_0.95", "0.8_0.9")
    ]


def test_lead_is_at_most_half_of_the_time_limit(folder, capsys):
    leads = {"1:00:00": 300, "4": 120, "4:00": 120, "1-0": 300, "0:2:30": 75, "UNLIMITED": 300}
    leads |= {"0-0:4": 120, "0-0:4:30": 135}
    assert "--signal=B:USR1@300" in options(dry_run(capsys=capsys))
    for limit, lead in leads.items():
        assert f"--signal=B:USR1@{lead}" in options(dry_run(f"time={limit}", capsys=capsys))


_PAGES = ("README.md", "docs/clusters.md")


@pytest.mark.slow
def test_documented_submit_commands_work(tmp_path, monkeypatch, capsys):
    """tests/slurm runs similar commands on a cluster."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my/data").mkdir(parents=True)
    (tmp_path / "my/data/chat.jsonl").write_text('{"prompt": "1 + 1?", "response": "2"}\n')
    lines = [line for page in _PAGES for line in (REPOSITORY / page).read_text().splitlines()]
    commands = {line for line in lines if line.startswith("launcher submit recipe")}
    assert len(commands) > 5
    for line in commands:
        words = [word for word in shlex.split(line, comments=True)[1:] if word != "--follow"]
        assert launcher([*words, *({"--dry-run"} - set(words))]) == 0
        assert capsys.readouterr().out.startswith("#!/bin/bash\n")


# The plan


@pytest.mark.slow
def test_plan_is_computed_in_another_process(folder, monkeypatch, capsys):
    def run(words, env, **pipes):
        assert words[:3] == [sys.executable, "-m", "launcher"]
        assert "SLURM_JOB_ID" not in env
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            status = launcher(words[3:])
        return types.SimpleNamespace(returncode=status, stdout=printed.getvalue())

    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setattr(command.subprocess, "run", run)
    words = ["recipe=x.yaml", "nodes=2", "gpus=4", "gpu=h100", "gpu_memory=1MiB"]
    assert launcher(["submit", *words, "model.config.num_hidden_layers=1"]) == 3
    assert "does not fit" in capsys.readouterr().out


def test_oversized_job_is_not_submitted_unless_forced(folder, monkeypatch, capsys):
    requested = []
    monkeypatch.setattr(
        command, "print_plan", lambda arguments: requested.append(arguments) or (3, 9)
    )
    monkeypatch.setattr(scheduler, "sbatch", lambda script: "7")
    words = ["recipe=x.yaml", "nodes=2", "gpus=4", "gpu=h100", "host_memory=500G"]
    assert launcher(["submit", *words]) == 3
    overrides = ["slurm.nodes=2", 'slurm.host_memory="500G"', "slurm.gpus_per_node=4"]
    size = ["nodes=2", "gpus=4", "gpu=h100", "host_memory=500GiB"]
    assert requested == [["recipe=x.yaml", *overrides, *size]]
    assert "not submitted: it does not fit" in capsys.readouterr().err
    assert not (folder / "runs").exists()
    assert launcher(["submit", "recipe=x.yaml", "gpus=4", "run.name=unplanned"]) == 0
    note = "note: whether it fits was not checked: name the GPU, such as gpu=h100"
    assert note in capsys.readouterr().out
    assert len(requested) == 1
    assert launcher(["submit", *words, "--force"]) == 0
    assert "submitted job 7: small, 2 nodes x 4 GPUs" in capsys.readouterr().out
    (snapshot,) = (folder / "runs/small/slurm").glob("recipe_*.yaml")
    assert "nodes: 2" in snapshot.read_text()
    assert json.loads((folder / "runs/small/slurm/submissions.jsonl").read_text())["job"] == "7"
    monkeypatch.setattr(scheduler, "active_jobs", lambda: {"7": "PENDING"})
    known = r"has job 7 already \(pending\); wait for it, end it \(scancel 7\)"
    with pytest.raises(RecipeError, match=known):
        launcher(["submit", *words, "--force"])


def test_sweep_plans_only_runs_with_different_memory(folder, monkeypatch, capsys):
    monkeypatch.setattr(command, "print_plan", lambda arguments: (1, None))
    monkeypatch.setattr(scheduler, "sbatch", lambda script: "7")
    sweeps = ["batch.micro_batch_size=1,2", "optimizer.learning_rate=1e-4,2e-4"]
    words = ["recipe=x.yaml", "gpus=4", "gpu=h100"]
    assert launcher(["submit", *words, *(f"sweep.{sweep}" for sweep in sweeps)]) == 0
    planned = [line for line in capsys.readouterr().out.splitlines() if line.startswith("batch.")]
    rate = "optimizer.learning_rate=1e-4"
    assert planned == [f"batch.micro_batch_size={size} {rate}" for size in (1, 2)]


def test_missing_slurm_is_reported(folder, monkeypatch):
    monkeypatch.setenv("PATH", str(folder))
    message = "sbatch: no such command; submit on a machine that has Slurm"
    with pytest.raises(RecipeError, match=message):
        launcher(["submit", "recipe=x.yaml"])
    assert not list((folder / "runs/small/slurm").iterdir())


@pytest.mark.parametrize(
    ("left", "status", "expected"),
    [
        ({"state": "finished", "step": 9}, 0, "finished after step 9\n"),
        ({"state": "stopped", "step": 9, "reason": "SIGTERM"}, 75, "stopped...9\n  SIGTERM\n"),
        ({"state": "failed", "step": 9, "error": "why"}, 1, "failed after step 9\n  why\n"),
        ({}, 1, "ended before training began\n  see the logs in .../runs/small/slurm\n"),
        ({"state": "finished", "refused": "x: wrong"}, 2, "refused\n  x: wrong\n"),
    ],
)
def test_wait_reports_how_the_run_ended(folder, monkeypatch, capsys, left, status, expected):
    run_dir = folder / "runs/small"

    def sbatch(script):
        if left:
            (run_dir / "status.json").write_text(json.dumps(left))
        if "refused" in left:
            (run_dir / "slurm/job_7/restart_0").mkdir(parents=True)
            (run_dir / "slurm/job_7/restart_0/refused").write_text(left["refused"])
        return "7"

    states = [{"7": "RUNNING"}, {}]
    monkeypatch.setattr(scheduler, "sbatch", sbatch)
    monkeypatch.setattr(scheduler, "active_jobs", lambda: states.pop(0))
    monkeypatch.setattr(command, "_SQUEUE_SECONDS", 0.0)
    assert launcher(["submit", "recipe=x.yaml", "--wait"]) == status
    printed = capsys.readouterr().out
    assert says(f"...runs/small: {expected}", printed), printed
    assert not states


# Which jobs are requeued

DECISIONS = """
finished                                             -> end 0 0
finished warned                                      -> end 0 0
finished preempted                                   -> end 0 0
stopped warned new_checkpoint                        -> requeue 0 0
stopped warned new_checkpoint failures=2             -> requeue 0 0
stopped warned                                       -> requeue 1 1
stopped warned failures=2                            -> end 1 3
stopped warned preempted failures=2                  -> requeue 0 2
stopped warned terminated new_checkpoint             -> end 75 0
stopped terminated new_checkpoint                    -> end 75 0
stopped terminated preempted                         -> requeue 0 0
stopped preempted                                    -> requeue 0 0
stopped reason=the_file_stop                         -> end 75 0
stopped reason=the_file_stop warned new_checkpoint   -> end 75 0
failed terminated                                    -> end 75 0
running warned terminated timed_out new_checkpoint   -> requeue 1 0
running terminated timed_out failures=1              -> requeue 1 2
running terminated timed_out failures=2              -> end 1 3
failed                                               -> requeue 1 1
failed failures=1                                    -> requeue 1 2
failed failures=2                                    -> end 1 3
failed failures=2 new_checkpoint                     -> requeue 1 1
failed reason=recipe                                 -> end 2 0
failed reason=no_valid_checkpoint                    -> end 2 0
none                                                 -> requeue 1 1
none failures=2                                      -> end 1 3
"""
"""End of an attempt -> action of the job, its exit status, consecutive failures."""


@pytest.fixture
def run(tmp_path):
    run = RunFolder(tmp_path / "run")
    run.create("")
    (run.path / "slurm").mkdir()
    return run


def checkpoint(run, step):
    (run.path / f"checkpoints/step_{step:08}").mkdir(parents=True)


def read_attempts(run, job="7"):
    return Attempts.read(run.path, job, max_failures=3)


def begin(run, job="7"):
    """Begins an attempt like a new process."""
    return read_attempts(run, job).begin()


def end(run, known=JobInfo(), *, terminated=False, **status):  # noqa: B008
    attempts = read_attempts(run)
    decision = attempts.decide(status, known, warned=False, terminated=terminated)
    attempts.end(decision, killed=status.get("state") == "running")
    return decision


@pytest.mark.parametrize("line", DECISIONS.strip().splitlines())
def test_decide_after_an_attempt(run, line):
    how, _, expected = line.partition(" -> ")
    state, *words = how.split()
    values = dict(word.split("=") for word in words if "=" in word)
    status = {"state": state, "reason": values.get("reason", "error")}
    if status["reason"].startswith("the_file"):
        status["reason"] = "the file stop"
    known = JobInfo(preempted="preempted" in words, timed_out="timed_out" in words)
    attempts = Attempts(run.path, 3, "7", failures=int(values.get("failures", 0)), checkpoint=5)
    checkpoint(run, 9 if "new_checkpoint" in words else 5)
    requested = {name: name in words for name in ("warned", "terminated")}
    found = attempts.decide({} if state == "none" else status, known, **requested)
    action = "requeue" if found.requeue else "end"
    assert f"{action} {found.status} {found.failures}" == expected, found.why


def test_attempt_lost_with_its_node_counts_as_failure(run):
    assert begin(run) is None
    checkpoint(run, 10)
    run.write_status("running", step=12)
    assert begin(run) is None, "a new checkpoint resets the count"
    assert read_attempts(run).failures == 1
    assert begin(run) is None
    why = begin(run)
    assert "failed 3 times in a row without a new checkpoint (slurm.max_failures=3)" in why
    assert run.read_status()["reason"] == "max_failures"
    assert begin(run, job="8") is None, "another submission starts a new count"


def test_stopped_attempt_is_not_a_failure(run):
    begin(run)
    run.write_status("stopped", step=3, reason="SIGTERM")
    begin(run)  # scontrol requeue: the script was killed before it could report the end
    assert read_attempts(run).failures == 0
    begin(run)  # that attempt wrote no status; the file still has the previous one
    assert read_attempts(run).failures == 1


def test_new_checkpoint_resets_the_failure_count(run):
    for step in (None, None, 10, None):
        begin(run)
        if step is not None:
            checkpoint(run, step)
        assert end(run, state="failed", reason="error").requeue
    begin(run)
    run.write_status("failed", step=9, reason="error", error="it broke")
    assert not end(run, state="failed", reason="error").requeue
    why = "3 in a row without a new checkpoint, of slurm.max_failures=3: not requeued"
    assert run.read_status()["error"].endswith(f"{why}\nthe last: it broke")


def test_killed_run_gets_a_failed_status(run):
    begin(run)
    run.write_status("running", step=4)
    end(run, JobInfo(timed_out=True), terminated=True, state="running")
    status = run.read_status()
    assert (status["state"], status["reason"], status["step"]) == ("failed", "killed", 4)
    assert "ended by Slurm at the time limit before a checkpoint was written" in status["error"]


_STARTED = "JobId=7 JobState=RUNNING Restarts=2 StartTime=2026-11-21T10:00:00"


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        (
            f"{_STARTED} EndTime=2026-11-21T11:00:00 PreemptTime=None ExcNodeList=(null)",
            {"end_time": time.mktime((2026, 11, 21, 11, 0, 0, 0, 0, -1))},
        ),
        (
            f"{_STARTED} PreemptTime=2026-11-21T10:05:00 ExcNodeList=n4",
            {"preempted": True, "excluded": "n4"},
        ),
        (f"{_STARTED} PreemptTime=2026-11-21T09:05:00", {}),
        (f"{_STARTED} Reason=TimeLimit", {"timed_out": True}),
        ("slurm_load_jobs error", None),
        (None, None),
    ],
)
def test_job_info_from_scontrol(monkeypatch, output, expected):
    monkeypatch.setattr(scheduler, "scontrol", lambda *words: output)
    known = JobInfo() if expected is None else JobInfo("RUNNING", 2, **expected)
    assert JobInfo.read("7") == known


def test_only_scancel_counts_as_cancelled():
    assert JobInfo("COMPLETING").cancelled
    assert JobInfo("CANCELLED").cancelled
    others = JobInfo("COMPLETING", timed_out=True), JobInfo("CANCELLED", preempted=True)
    assert not any(known.cancelled for known in (*others, JobInfo("RUNNING")))


def test_scontrol_is_retried_while_the_controller_restarts(monkeypatch, capsys):
    answers = ["Slurm refused: no connection", "answer"]

    def slurm(*words):
        answer = answers.pop(0)
        if "refused" in answer:
            raise RecipeError(answer)
        return answer

    monkeypatch.setattr(scheduler, "slurm_command", slurm)
    monkeypatch.setattr(scheduler.time, "sleep", lambda seconds: None)
    assert scheduler.scontrol("show", "job", "7") == "answer"
    answers += ["Slurm refused: Invalid job id", "not asked again"]
    assert scheduler.scontrol("show", "job", "7") is None
    assert answers == ["not asked again"]
    assert "scontrol show job 7: Slurm refused: Invalid job id" in capsys.readouterr().err


def test_lead_is_twice_a_measured_step_plus_save(run):
    assert attempts.measured_lead(run.path) is None
    lines = [{"step": 1, "step_seconds": seconds} for seconds in (30, 40.5, 20)]
    run.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert attempts.measured_lead(run.path) is None
    run.note("saved", ranks=2, step=3, bytes=1, seconds=200.0)
    assert attempts.measured_lead(run.path) == 481


THREE = {"show hostnames": "n1\nn2\nn3\n", "": "JobState=RUNNING Restarts=0"}
"""What scontrol prints about a job of three nodes."""


@pytest.mark.parametrize(
    ("nodes", "bad", "excluded"),
    [(3, ("n2",), "n9,n2"), (3, ("n1", "n2", "n3"), None), (1, ("n1",), "n9,n1"), (2, (), None)],
)
def test_bad_node_is_excluded(start_job, nodes, bad, excluded):
    job, commands = start_job({"SLURM_JOB_NUM_NODES": str(nodes)}, "")
    job.bad_nodes += bad
    assert job.requeue(JobInfo("RUNNING", 0, excluded="n9"))
    updates = [words for words in commands if words[0] == "update"]
    expected = [("update", "JobId=7", f"ExcNodeList={excluded}")]
    assert updates == ([] if excluded is None else expected)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_node_that_the_ranks_have_lost_is_excluded(start_job, ranks):
    """The job was requeued onto it. If the node had one rank, that one may have been killed alone."""
    job, commands = start_job({"SLURM_JOB_NUM_NODES": "3"}, THREE, ranks_per_node=ranks)
    job.attempts.begin()
    lost = {"lost_nodes": ["n2", "other"]}
    RunFolder(job.run_dir).write_status("failed", step=4, reason="rank_lost", error="", **lost)
    assert job.end(1) == 0
    updates = [words for words in commands if words[0] == "update"]
    assert updates == ([("update", "JobId=7", "ExcNodeList=n2")] if ranks > 1 else [])


@pytest.mark.parametrize(("silent", "excluded"), [("n3", "n3"), ("", None), ("n1 n2 n3", None)])
def test_a_node_that_does_not_answer_slurm_is_excluded(start_job, monkeypatch, silent, excluded):
    """The node of rank 0 has the ranks' store: without it, the ranks cannot tell which one is lost. A
    rank that crashed leaves its node, which answers."""
    monkeypatch.setenv("SILENT", silent)
    job, commands = start_job({"SLURM_JOB_NUM_NODES": "3"}, THREE)
    job.attempts.begin()
    RunFolder(job.run_dir).write_status("failed", step=4, reason="agent_lost", error="store")
    assert job.end(1) == 0
    updates = [words for words in commands if words[0] == "update"]
    expected = [("update", "JobId=7", f"ExcNodeList={excluded}")]
    assert updates == ([] if excluded is None else expected)


def test_no_node_is_lost_if_the_job_is_warned_before_all_have_answered(start_job, monkeypatch):
    job, _ = start_job({"SLURM_JOB_NUM_NODES": "3"}, THREE)

    def check(seconds, log_file, *words, nodes):
        log_file.write_text("n1\n")
        job.warned = True

    monkeypatch.setattr(job, "_check", check)
    assert job._find_lost({}) == job.bad_nodes == []


@pytest.mark.slow
def test_a_spare_node_takes_the_place_of_a_lost_one(start_job, monkeypatch, capsys):
    """Twice; then too few nodes are left. The first node is not the first that is lost."""
    job, commands = start_job({"SLURM_JOB_NUM_NODES": "3"}, THREE, train_nodes=1)
    job.begin()
    lost = ["n2", "n3", "n1"]

    def train():
        step = job.restart + 1
        record = {"reason": "rank_lost", "error": "", "lost_nodes": [lost[job.restart]]}
        RunFolder(job.run_dir).write_status("failed", step=step, **record)
        (job.run_dir / f"checkpoints/step_0000000{step}").mkdir(parents=True)
        return 1

    monkeypatch.setattr(job, "train", train)
    for number in (1, 2):
        assert job.attempt() is None
        assert (job.restart, os.environ["LAUNCHER_START"]) == (number, str(number))
        assert not [words for words in commands if words[0] == "requeue"]
    assert job.attempt() == 0
    assert job.bad_nodes == lost
    assert "trains on in this allocation: 1 of 3 nodes are good" in capsys.readouterr().err
    assert [words[0] for words in commands if words[0] in ("requeue", "update")] == ["requeue"]


@pytest.mark.parametrize(
    ("bad", "possible"),
    [(["n2"], True), (["n2", "n3"], False), (["n1"], False), (["n4", "n2"], False), ([], True)],
)
def test_spare_nodes_that_are_needed(start_job, bad, possible):
    """n1 has the address at which the nodes meet."""
    job, _ = start_job(
        {"SLURM_JOB_NUM_NODES": "4"}, THREE | {"show hostnames": "n1\nn2\nn3\nn4"}, train_nodes=3
    )
    job.bad_nodes += bad
    assert job.can_train is possible
    if bad == ["n2"]:
        assert job._select(job.good_nodes) == ["--overlap", "--nodelist=n1,n3,n4"]
    if not bad:
        assert job._select(job.good_nodes[:3]) == ["--nodelist=n1,n2,n3"]
        assert job._select(job.good_nodes) == []


@pytest.mark.parametrize(
    "output", ["JobState=CANCELLED Restarts=0", "JobState=RUNNING Restarts=1", ""]
)
def test_job_ended_by_slurm_is_not_requeued(start_job, output):
    job, commands = start_job({}, output)
    job.attempts.begin()
    known = JobInfo.read("7")
    assert not job.requeue(known)
    assert not [words for words in commands if words[0] == "requeue"]
    if known.restarts != 1:
        assert job.end(1) == 1
        assert Attempts.read(job.run_dir, "7", max_failures=3).open


def test_exit_status_of_a_job(start_job, capsys):
    job, _ = start_job({}, "JobState=RUNNING Restarts=0")
    run = RunFolder(job.run_dir)
    job.attempts.begin()
    job.refused.write_text("x: wrong\n")
    assert job.end(1) == 2
    assert "x: wrong" in capsys.readouterr().err
    run.write_status("running", step=3)
    assert job.end(1) == 2, "refused after a restart by torchrun"
    assert run.read_status()["reason"] == "killed"
    run.write_status("finished", step=9)
    assert job.end(0) == 0, "refused once, but finished after a restart"
    job.refused.unlink()
    run.write_status("failed", step=9, reason="error")
    assert job.end(1) == 0, "requeued"
    job.bad_nodes = ["n1"]
    assert job.end(0, unfit=True) == 0
    assert "failed (not fit to train: n1); 2 in a row without" in capsys.readouterr().err
    job.terminated = True
    assert job.end(1) == 75


@pytest.mark.parametrize(
    ("known", "warned", "terminated"),
    [
        (JobInfo("RUNNING", end_time=4e9), False, False),
        (JobInfo("CANCELLED"), False, True),
        (JobInfo("RUNNING", preempted=True), True, False),
        (JobInfo("RUNNING", end_time=1.0), True, False),
    ],
)
def test_signal_before_handlers_are_installed_is_detected(start_job, known, warned, terminated):
    job, _ = start_job({}, "")
    job._read_limits(known)
    assert (job.warned, job.terminated, job.lead) == (warned, terminated, 300)
    assert signal.alarm(0) == 0


@pytest.mark.parametrize(
    ("left", "save", "lead"),
    [
        (9_000, 50.0, 500),  # longer than the lead of 300 s in Slurm: the job warns itself
        (9_000, 10.0, None),
        (800, 50.0, 400),  # limited to half of the remaining time, so that the job trains at all
        (500, 50.0, None),
    ],
)
def test_job_warns_itself_if_lead_is_short(start_job, monkeypatch, left, save, lead):
    job, _ = start_job({}, "")
    alarms = []
    monkeypatch.setattr(job_module, "time", types.SimpleNamespace(time=lambda: 1e9))
    monkeypatch.setattr(signal, "alarm", alarms.append)
    (job.run_dir / "metrics.jsonl").write_text('{"step_seconds": 200.0}\n' if save > 10 else "")
    saved = {"event": "saved", "seconds": save}
    (job.run_dir / "events.jsonl").write_text(json.dumps(saved) + "\n")
    job._read_limits(JobInfo("RUNNING", end_time=1e9 + left + 0.5))
    assert job.lead == (lead or 300)
    assert alarms == ([] if lead is None else [left - lead])
    assert not job.stopping


def test_successor_is_queued_once_and_removed(run, monkeypatch):
    commands, jobs = [], {}
    slurm = lambda *words: commands.append(words) or "8\n"  # noqa: E731
    monkeypatch.setattr(scheduler, "slurm_command", slurm)
    monkeypatch.setattr(attempts, "slurm_command", slurm)
    monkeypatch.setattr(JobInfo, "read", lambda job: jobs.get(job, JobInfo()))
    begin(run)
    read_attempts(run).submit_successor("7", "/spool/script", "n9")
    jobs["8"] = JobInfo("PENDING")
    begin(run)  # requeued: the successor still exists
    read_attempts(run).submit_successor("7", "/spool/script", "")
    options = ("--dependency=afternotok:7", "--kill-on-invalid-dep=yes", "--exclude=n9")
    assert commands == [("sbatch", "--parsable", *options, "/spool/script", "7", "7")]
    assert attempts.submitted_jobs(run.path) == ["8"], "the successor blocks other submissions"
    read_attempts(run).remove_successor()
    assert commands[1:] == [("scancel", "8")]
    begin(run, job="7_2")
    read_attempts(run, "7_2").submit_successor("9_2", "/spool/script", "")
    options = ("--dependency=afternotok:9_2", "--kill-on-invalid-dep=yes", "--array=2")
    assert commands[2][2:] == (*options, "/spool/script", "7_2", "9_2")
    assert attempts.submitted_jobs(run.path) == ["8", "8_2"]


@pytest.mark.parametrize(
    ("state", "why"),
    [("RUNNING", None), ("TIMEOUT", None), ("", None), ("CANCELLED", "job 7 was cancelled")],
)
def test_successor_resumes_unless_the_job_ended_normally(run, monkeypatch, state, why):
    monkeypatch.setattr(JobInfo, "read", lambda job: JobInfo(state))
    begin(run)
    assert read_attempts(run).nothing_left("7") == why, "killed"
    end(run, state="failed", reason="error")
    assert read_attempts(run).nothing_left("7") == (why or "job 7 has ended")


# The program of the job, with an srun that runs the command on this machine

SRUN = """#!/bin/bash
asks=
while [[ $1 == -* || $1 =~ ^[0-9]+$ ]]; do
    [[ $1 == --output=* ]] && exec >>"${1#--output=}" 2>&1
    [[ $1 == --overlap ]] && asks=yes
    shift
done
if [[ $asks ]]; then
    for node in n1 n2 n3; do
        [[ " $SILENT " == *" $node "* ]] || SLURMD_NODENAME=$node "$@"
    done
    exit
fi
exec "$@"
"""


def write_program(file, text):
    file.parent.mkdir(exist_ok=True)
    file.write_text(text)
    file.chmod(0o755)
    return file


@pytest.fixture
def start_job(tmp_path, folder, monkeypatch):
    """A function that starts job 7.

    (variables, output of scontrol, options) -> (job, recorded commands of scontrol)
    """
    write_program(tmp_path / "bin/srun", SRUN)
    numbers = signal.SIGUSR1, signal.SIGTERM, signal.SIGALRM
    before, environment = signal.pthread_sigmask(signal.SIG_BLOCK, []), dict(os.environ)
    handlers = {number: signal.getsignal(number) for number in numbers}
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    slurm = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_NODELIST": "n1"}
    slurm |= {"SLURM_CPUS_ON_NODE": "4", "SLURMD_NODENAME": "n1"}

    def start(variables, printed, *options, python=sys.executable, **slurm_section):
        """printed: a text, or texts by the beginning of the command."""
        commands, texts = [], {"": printed} if isinstance(printed, str) else printed
        text = lambda line: next((texts[key] for key in texts if line.startswith(key)), "")  # noqa: E731
        scontrol = lambda *words: commands.append(words) or text(" ".join(words))  # noqa: E731
        for module in (scheduler, job_module):
            monkeypatch.setattr(module, "scontrol", scontrol)
        for name, value in (slurm | variables).items():
            monkeypatch.setenv(name, value)
        section = {"ranks_per_node": 2, "max_restarts": 0, "python": str(python), **slurm_section}
        if "train_nodes" in section:
            section["nodes"] = int(os.environ["SLURM_JOB_NUM_NODES"])
        settings = json.dumps(section)
        for name in ("recipe.yaml", "other.yaml"):
            (folder / name).write_text(f"{SMALL}slurm: {settings}\n")
        words = ["--run", str(tmp_path / "run"), "recipe.yaml", "--script", "s", "--lead", "300"]
        agent.block_signals()
        return Job(read_options([*words, *options])), commands

    yield start
    signal.alarm(0)
    while signal.sigtimedwait([*numbers, signal.SIGCHLD], 0) is not None:
        pass
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    for number, handler in handlers.items():
        signal.signal(number, handler)
    os.environ.clear()
    os.environ.update(environment)


def test_each_start_has_its_own_logs_and_port(start_job):
    job, _ = start_job({"SLURM_JOB_ID": "9", "SLURM_CPUS_PER_TASK": "8"}, "", "--", "7", "8")
    again, _ = start_job({"SLURM_JOB_ID": "9"}, "", "--", "7", "8")
    assert (job.job, job.this, job.after, job.restart, again.restart) == ("7", "9", "8", 0, 1)
    assert again.logs == job.run_dir / "slurm/job_7/restart_1"
    meetings = [start.meeting()["endpoint"] for start in (job, again)]
    assert meetings == ["n1:20063", "n1:20064"]
    expected = {"LAUNCHER_JOB": "7", "LAUNCHER_START": "1", "LAUNCHER_REFUSED": str(again.refused)}
    expected |= {"OMP_NUM_THREADS": "4", "SRUN_CPUS_PER_TASK": "8"}
    assert {name: os.environ[name] for name in expected} == expected
    array = {"SLURM_ARRAY_JOB_ID": "6", "SLURM_ARRAY_TASK_ID": "1"}
    task, _ = start_job(array, "", "--run", f"{job.run_dir}_1", "other.yaml")
    assert (task.this, task.job, str(task.run_dir)) == ("6_1", "6_1", f"{job.run_dir}_1")


TRAINS = """#!{python}
import pathlib, signal, sys, time
signal.signal(signal.SIGUSR1, lambda *_: (print("saved", flush=True), sys.exit(5)))
print(" ".join(sys.argv[1:]), flush=True)
time.sleep(200)
"""


def test_warning_is_sent_to_the_ranks_repeatedly(start_job, tmp_path, monkeypatch):
    """The first signals are lost, because srun and the agent do not handle signals yet."""
    python = write_program(tmp_path / "trains", TRAINS.format(python=sys.executable))
    monkeypatch.setattr(job_module, "_SIGNAL_AGAIN_SECONDS", 0.1)
    job, _ = start_job({}, "JobState=RUNNING", python=python)
    # The signal is blocked in this thread only: another one would accept it before `train` waits
    signal.pthread_kill(threading.get_ident(), signal.SIGALRM)
    assert job.train() == 5
    assert (job.warned, job.terminated) == (True, False)
    lines = (job.logs / "node_%N.log").read_text().splitlines()
    assert lines[0].startswith("-m launcher.slurm.agent ")
    assert lines[0].endswith("-m launcher.train recipe=recipe.yaml")
    assert "--nnodes 1 --nproc-per-node 2 --max-restarts 0 " in lines[0]
    assert "--rdzv-endpoint n1:20049 --rdzv-id 7.0 " in lines[0]
    assert lines[1:] == ["saved"]


@pytest.mark.slow
def test_check_ends_at_timeout_or_stop_request(start_job, tmp_path):
    job, _ = start_job({}, "")
    log = tmp_path / "log"
    assert job._check(60, log, "bash", "-c", "echo printed; exit 7") == 7
    assert log.read_text() == "printed\n"
    assert job._check(0, log, "sleep", "30") == preflight.LATE
    signal.pthread_kill(
        threading.get_ident(), signal.SIGTERM
    )  # the signal is blocked in this thread only
    job._check(60, log, "sleep", "30")
    assert job.terminated


# The agent

RANK = """
import pathlib, signal, sys, time
time.sleep(float(sys.argv[2]))  # imports torch
signal.signal(signal.SIGUSR1, lambda *_: (pathlib.Path(sys.argv[1]).write_text("saved"), sys.exit(0)))
time.sleep(200)
"""
TORCHRUN = """
import subprocess, sys, time
ranks = [subprocess.Popen([sys.executable, "-c", sys.argv[1], f"{sys.argv[2]}/{n}", sys.argv[3]]) for n in range(2)]
print("started", flush=True)
sys.exit(max(rank.wait() for rank in ranks))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "importing"), [(signal.SIGUSR1, 0.0), (signal.SIGTERM, 0.0), (signal.SIGUSR1, 1.0)]
)
def test_signal_reaches_the_ranks_and_torchrun_survives(tmp_path, number, importing):
    """Covers ranks that do not handle the signal yet. Either signal would end torchrun itself."""
    torchrun = [sys.executable, "-c", TORCHRUN, RANK, str(tmp_path), str(importing)]
    command = [sys.executable, "-m", "launcher.slurm.agent", *torchrun]
    process = subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "started\n"
        for _ in range(3):
            process.send_signal(number)
            time.sleep(0.05)
        output, _ = process.communicate(timeout=300)
    finally:
        process.kill()
    assert process.returncode == 0
    assert output.count("save and stop") == 1
    assert [(tmp_path / str(rank)).read_text() for rank in range(2)] == ["saved", "saved"]


def test_agent_replaces_placeholders_of_the_node():
    words = ["sh", "-c", 'echo "$@"; exit 7', "sh", "--local-addr", "{address}"]
    done = subprocess.run(
        [sys.executable, "-m", "launcher.slurm.agent", *words, "is_host={is_host}", "$x"],
        env=os.environ | {"SLURMD_NODENAME": "n7", "SLURM_NODEID": "0"},
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert (done.returncode, done.stdout) == (7, "--local-addr n7 is_host=1 $x\n")
    assert agent.address("lo") == "127.0.0.1"
    message = r"slurm.interface: ib9 has no IPv4 address on .*; there are .*lo"
    with pytest.raises(SystemExit, match=message):
        agent.address("ib9")


def test_refusal_is_written_for_the_job(tmp_path, folder):
    """The exit status of torchrun does not distinguish a refusal from a crash."""
    refused = tmp_path / "refused"
    environment = os.environ | {"LAUNCHER_REFUSED": str(refused)}
    train = [sys.executable, REPOSITORY / "launcher/train.py", "recipe=x.yaml", "run.sed=3"]
    assert subprocess.run(train, env=environment, timeout=300, check=False).returncode == 2
    assert refused.read_text() == "command line: run.sed=3: unknown key; did you mean seed?\n"


# The preflight


def test_preflight_of_single_nodes(tmp_path):
    log, nodes = tmp_path / "log", ["n1", "n2", "n3"]
    log.write_text("n1 fit: 8 x H100\nn2 unfit: GPU 3: not free\nsrun: error: n3: task 2: Killed\n")
    unfit = ("n2", "unfit: GPU 3: not free")
    missing = ("n3", "no result; the srun ended with status 1")
    assert preflight.each(log, nodes, status=1) == [unfit, missing]
    late = ("n3", "did not end in time: a GPU, its driver or a file system hangs")
    assert preflight.each(log, nodes, status=preflight.LATE) == [unfit, late]
    log.write_text("run.dir: is not there\n")
    lines = ["no result; the srun ended with status 2", "run.dir: is not there"]
    found = preflight.each(log, nodes, status=2)
    assert found == [("all nodes", line) for line in lines], "no single node may be blamed"
    assert [node for node, _ in preflight.each(log, nodes, status=preflight.LATE)] == nodes


def test_preflight_of_all_nodes_together(tmp_path, capsys):
    nodes, file = ["n1", "n2", "n3"], tmp_path / "preflight_all.json"
    late = preflight.together(file, status=preflight.LATE)
    assert late == [("all nodes", "the check took too long")]
    ended = preflight.together(file, status=1)
    assert ended == [("all nodes", "the check ended with status 1, without a report")]
    lines = "n2 clock bad, n2 versions bad, n1 rates warning, all_nodes clocks bad, elsewhere x bad"
    keys = ("host", "name", "state")
    findings = [
        dict(zip(keys, line.replace("_", " ").rsplit(" ", 2), strict=True)) | {"text": "why"}
        for line in lines.split(", ")
    ]
    file.write_text(json.dumps({"findings": findings}))
    found = preflight.together(file, status=1)
    assert found == [
        ("n2", "clock: why"),
        ("n2", "versions: why"),
        ("all nodes", "clocks: why"),
        ("elsewhere", "x: why"),
    ]
    assert preflight.report(late, nodes, tmp_path / "x.log") == []
    assert preflight.report(found[2:], nodes, tmp_path / "x.log") == []
    message = f"no node can be blamed, so training begins; details: {tmp_path}/x.log"
    assert capsys.readouterr().err.count(message) == 2
    assert preflight.report(found, nodes, tmp_path / "x.log") == ["n2"]
    printed = capsys.readouterr().err
    assert "not fit to train: n2; details: " in printed
    assert "  n2: clock: why\n" in printed
