"""The job's script as text, and which jobs are requeued: all of launcher/slurm that needs no cluster (tests/slurm has one)."""

import dataclasses
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
from pathlib import Path

import pytest

from launcher.cli import submit as command
from launcher.cli.main import run as launcher
from launcher.errors import RecipeError
from launcher.recipe.schema import Slurm
from launcher.reliability.run_directory import RunFolder
from launcher.slurm import agent, attempts, preflight, scheduler
from launcher.slurm import job as job_module
from launcher.slurm.attempts import Ended, Record, decide
from launcher.slurm.job import Job, Requests, read_options
from launcher.slurm.render import JobScript, node_counts, quote_for_sbatch, ranks_per_node, render
from launcher.slurm.scheduler import JobInfo
from tests import REPOSITORY
from tests.unit.small_recipe import SMALL, says


def job(run_dir="/runs/a", *, runs=1, **more):
    asked = {field.name for field in dataclasses.fields(Slurm)} - {"lead", "python"}
    slurm = {key: more.pop(key) for key in list(more) if key in asked}
    folders = [Path(run_dir) if runs == 1 else Path(run_dir, str(number)) for number in range(runs)]
    settings = {
        "name": "a",
        "lead": 300,
        "log": Path("/runs/a/slurm/job_%j.log"),
        "directory": Path("/home/me"),
        "python": Path("/py"),
    }
    return JobScript(
        slurm=Slurm(**slurm),
        runs=tuple((folder, folder / "slurm/recipe_1.yaml") for folder in folders),
        **(settings | more),
    )


def options(text):
    """Of the #SBATCH lines, read as a shell would, which is how sbatch does."""
    return [
        shlex.split(line)[1]
        for line in text.replace("#SBATCH", "SBATCH").splitlines()
        if line.startswith("SBATCH ")
    ]


# The script


def test_the_script_has_all_options():
    text = render(
        job(
            nodes="2-4",
            gpus_per_node=8,
            cpus=64,
            host_memory="500G",
            time="1-12:00:00",
            partition="gpu",
            account="me",
            qos="low",
            constraint="h100",
            exclude="n[1-3]",
            reservation="r",
            mail="me@here",
            sbatch_extra=("--exclusive",),
            srun_extra=("--container-image=i",),
            dependency="afterok:7",
            throttle=2,
            runs=3,
            setup=("module load cuda",),
            environment={"NCCL_IB_HCA": "mlx5"},
            interface="ib0",
            max_restarts=5,
        )
    )
    assert options(text) == [
        *("--job-name=a", "--nodes=2-4", "--gpus-per-node=8", "--cpus-per-task=64", "--mem=500G"),
        *(
            "--time=1-12:00:00",
            "--partition=gpu",
            "--account=me",
            "--qos=low",
            "--constraint=h100",
            "--exclude=n[1-3]",
        ),
        *(
            "--reservation=r",
            "--mail-user=me@here",
            "--mail-type=END,FAIL,REQUEUE",
            "--array=0-2%2",
            "--dependency=afterok:7",
        ),
        *(
            "--signal=B:USR1@300",
            "--chdir=/home/me",
            "--output=/runs/a/slurm/job_%j.log",
            "--requeue",
            "--open-mode=append",
        ),
        "--exclusive",
    ]
    order = [
        "trap 'warned=1",
        "module load cuda",
        "NCCL_DEBUG=",
        "NCCL_SOCKET_IFNAME=ib0",
        "export NCCL_IB_HCA=mlx5",
        "exec /py",
    ]
    assert sorted(order, key=text.index) == order
    shown = job_options(text, "7", "9")
    assert [run for run, _ in shown.run] == ["/runs/a/0", "/runs/a/1", "/runs/a/2"]
    assert (shown.lead, shown.script, shown.chain) == (300, "/spool/script", ["7", "9"])
    plain = render(job(nodes=2, ranks_per_node=3))
    assert job_options(plain).chain == []
    assert "--gpus-per-node" not in plain, "a node of CPUs"
    assert len(plain.splitlines()) < 40, "read at a glance"


def job_options(text, *arguments):
    """What the program of the job reads, if the script has these arguments."""
    values = {"\\\n": " ", "$warned": "0", "$terminated": "0", "$0": "/spool/script"}
    line = text[text.index("exec ") :]
    for name, value in values.items():
        line = line.replace(name, value)
    words = [word for word in shlex.split(line) if word != "$@"]
    return read_options([*words[words.index("launcher.slurm.job") + 1 :], *arguments])


@pytest.mark.skipif(
    shutil.which("shellcheck") is None,
    reason="shellcheck is not installed (Debian: apt-get install shellcheck)",
)
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"preflight": True},
        {
            "runs": 3,
            "preflight": True,
            "interface": "ib0",
            "setup": (":",),
            "environment": {"A": "b c"},
            "srun_extra": ("-v",),
        },
    ],
)
def test_shellcheck_finds_nothing(settings, tmp_path):
    (tmp_path / "script").write_text(render(job(**settings)))
    done = subprocess.run(
        ["shellcheck", tmp_path / "script"], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout


HOSTILE = "we ird'\"; $(touch HACKED) `touch HACKED` #\\ %j &"


def test_names_are_quoted(tmp_path):
    """The script is run, with another program for the job: it gets the folder that was named."""
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
    asked = options(text)
    assert len(asked) == len(options(render(job(partition="p"))))
    assert {f"--job-name={HOSTILE}", f"--partition={HOSTILE}"} <= set(asked)
    (tmp_path / "python").write_text(
        '#!/bin/bash\nprintf "%s\\0" "$@" > arguments; printf %s "$VALUE" > value\n'
    )
    (tmp_path / "python").chmod(0o755)
    subprocess.run(["bash", "-c", text], cwd=tmp_path, check=True, timeout=60, capture_output=True)
    shown = read_options((tmp_path / "arguments").read_text().split("\0")[2:-1])
    assert shown.run == [[str(run_dir), f"{run_dir}/slurm/recipe_1.yaml"]]
    assert (tmp_path / "value").read_text() == HOSTILE + "\nmore"
    assert not list(tmp_path.rglob("HACKED"))


@pytest.mark.parametrize("text", ["a\n#SBATCH --account=other", "a\rb", "a\0b", "a\x1b[31m"])
def test_line_breaks_are_refused(text):
    with pytest.raises(RecipeError, match="cannot be written in a line of a script"):
        render(job(name=text))
    with pytest.raises(RecipeError):
        quote_for_sbatch(text)


def test_nodes_and_ranks():
    assert list(node_counts(Slurm(nodes="2-4"))) == [2, 3, 4]
    assert list(node_counts(Slurm(nodes=2))) == [2]
    assert [
        ranks_per_node(slurm)
        for slurm in (Slurm(), Slurm(gpus_per_node=8), Slurm(gpus_per_node=8, ranks_per_node=2))
    ] == [1, 8, 2]


# The arguments


def submit_dry(*words, capsys):
    assert launcher(["submit", "recipe=x.yaml", "--dry-run", *words]) == 0
    return capsys.readouterr().out


def test_arguments_stay_text_and_win_over_the_recipe(folder, capsys):
    with (folder / "x.yaml").open("a") as recipe:
        recipe.write('slurm: {time: "9:00:00", partition: slow, account: "0123", nodes: 2}\n')
    asked = options(
        submit_dry(
            "time=1:30:00",
            "partition=0x10",
            "gpus_per_node=4",
            "sbatch_extra=--nice=5",
            "sbatch_extra=-H",
            capsys=capsys,
        )
    )
    for option in (
        "--time=1:30:00",
        "--partition=0x10",
        "--account=0123",
        "--nodes=2",
        "--gpus-per-node=4",
        "--nice=5",
        "-H",
    ):
        assert option in asked
    assert f"--chdir={folder}" in asked
    assert f"--output={folder}/runs/small/slurm/job_%j.log" in asked
    assert not (folder / "runs").exists(), "a dry run writes nothing"


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (
            ["time=soon"],
            "...slurm.time=\"soon\": must be minutes, HOURS:MINUTES:SECONDS or DAYS-HOURS; got 'soon'",
        ),
        (["nodes=4-2"], "...must be a number, or a range such as 2-4; got '4-2'"),
        (["nodes=0"], "...slurm.nodes=0: must be at least 1; got 0"),
        (["host_memory=much"], "...must be a number with K, M, G or T, such as 500G; got 'much'"),
        (
            ["account=a\nb"],
            "...slurm.account=...holds a character that cannot be written in a job script...",
        ),
        (["sbatch_extra=rm"], "...must be options, --name or --name=value; got 'rm'"),
        (
            ["sbatch_extra=--exclusive --account=x"],
            "...must be options, --name or --name=value; got...",
        ),
        (["slurm.environment={A B: x}"], "...must be the name of an environment variable..."),
        (["--wiat"], "command line: No such option: --wiat...--wait..."),
        (["throttle=2"], "command line: throttle: needs a sweep..."),
        (
            ["nodes=2-4"],
            "on 3 of 2-4 nodes: x.yaml:12: batch.global_batch_size: 64 is not a multiple of 8 (micro-batch) x 3 (ranks) = 24...",
        ),
        (
            ["sweep.optimizer.learning_rate=1e-3,1e-3"],
            "command line: sweep: two runs would have the same name and folder...",
        ),
        (
            ["sweep.optimizer.learning_rate=1e-3,fast"],
            "command line: optimizer.learning_rate=fast: must be a number; got 'fast'",
        ),
    ],
)
def test_mistakes_are_reported_before_submission(folder, words, problem):
    with pytest.raises(RecipeError) as raised:
        launcher(["submit", "recipe=x.yaml", *words])
    assert says(problem, str(raised.value)), raised.value
    assert not (folder / "runs").exists()


def test_a_sweep_has_a_folder_and_a_recipe_for_each_combination(folder, capsys):
    text = submit_dry(
        "sweep.optimizer.learning_rate=1e-3,2e-3",
        "sweep.optimizer.betas=[0.9,0.95],[0.8,0.9]",
        "throttle=3",
        capsys=capsys,
    )
    assert "--array=0-3%3" in options(text)
    assert "--job-name=small" in options(text)
    found = re.findall(r"runs/small/(\S+?)/slurm/recipe_", text)
    assert found == [
        f"learning_rate={rate},betas=_{betas}_"
        for rate in ("1e-3", "2e-3")
        for betas in ("0.9_0.95", "0.8_0.9")
    ]


@pytest.mark.parametrize(
    ("limit", "lead"),
    [
        (None, 300),
        ("1:00:00", 300),
        ("4", 120),
        ("4:00", 120),
        ("1-0", 300),
        ("0:2:30", 75),
        ("UNLIMITED", 300),
    ],
)
def test_a_run_is_not_warned_in_the_first_half_of_its_time(folder, capsys, limit, lead):
    text = submit_dry(*([f"time={limit}"] if limit else []), capsys=capsys)
    assert f"--signal=B:USR1@{lead}" in options(text)


README = """
launcher submit recipe=fsdp batch.global_batch_size=128 nodes=2 gpus_per_node=8 time=12:00:00 partition=gpu gpu=h100
launcher submit recipe=fsdp batch.global_batch_size=128 nodes=2 gpus_per_node=8 time=12:00:00 --dry-run
launcher submit recipe=quickstart cpus=4 time=30 --follow
launcher submit recipe=quickstart nodes=2-4 cpus=4 batch.global_batch_size=48 batch.micro_batch_size=4
launcher submit recipe=quickstart sweep.optimizer.learning_rate=1e-4,3e-4,1e-3,3e-3 throttle=2
"""
"""As in the README; tests/slurm runs similar ones on a cluster."""


@pytest.mark.parametrize("line", README.strip().splitlines())
def test_readme_commands(line, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = [word for word in shlex.split(line)[2:] if word not in ("--follow", "--dry-run")]
    assert launcher(["submit", *words, "--dry-run"]) == 0
    assert capsys.readouterr().out.startswith("#!/bin/bash\n")


# The plan


def test_another_process_makes_the_plan(folder, capfd):
    words = ["recipe=x.yaml", "nodes=2", "gpus_per_node=4", "gpu=h100", "gpu_memory=1MiB"]
    assert launcher(["submit", *words]) == 3
    assert "does not fit" in capfd.readouterr().out


def test_a_job_that_does_not_fit_is_not_submitted_unless_forced(folder, monkeypatch, capsys):
    asked = []

    def print_plan(arguments):
        asked.append(arguments)
        return 3

    monkeypatch.setattr(command, "print_plan", print_plan)
    monkeypatch.setattr(scheduler, "sbatch", lambda script: "7")
    words = ["recipe=x.yaml", "nodes=2", "gpus_per_node=4", "gpu=h100", "host_memory=500G"]
    assert launcher(["submit", *words]) == 3
    overrides = ["slurm.nodes=2", "slurm.gpus_per_node=4", 'slurm.host_memory="500G"']
    assert asked == [
        [
            "recipe=x.yaml",
            *overrides,
            "nodes=2",
            "gpus_per_node=4",
            "gpu=h100",
            "host_memory=500GiB",
        ]
    ]
    assert "not submitted: it does not fit" in capsys.readouterr().err
    assert not (folder / "runs").exists()
    assert launcher(["submit", "recipe=x.yaml", "gpus_per_node=4", "run.name=unplanned"]) == 0
    assert (
        "note: whether it fits was not checked: name the GPU, such as gpu=h100"
        in capsys.readouterr().out
    )
    assert len(asked) == 1
    assert launcher(["submit", *words, "--force"]) == 0
    assert "submitted job 7: small, 2 nodes x 4 GPUs" in capsys.readouterr().out
    assert (
        launcher(
            [
                "submit",
                *words,
                "sweep.batch.micro_batch_size=1,2",
                "sweep.optimizer.learning_rate=1e-4,2e-4",
            ]
        )
        == 3
    )
    assert "batch.micro_batch_size=1 optimizer.learning_rate=1e-4\n" in capsys.readouterr().out
    assert command._of_different_memory(
        [("batch.micro_batch_size", ["1", "2"]), ("optimizer.learning_rate", ["1e-4", "2e-4"])]
    ) == [("batch.micro_batch_size", ["1", "2"]), ("optimizer.learning_rate", ["1e-4"])]
    (snapshot,) = (folder / "runs/small/slurm").glob("recipe_*.yaml")
    assert "nodes: 2" in snapshot.read_text()
    assert json.loads((folder / "runs/small/slurm/submissions.jsonl").read_text())["job"] == "7"
    monkeypatch.setattr(scheduler, "active_jobs", lambda: {"7": "PENDING"})
    with pytest.raises(
        RecipeError, match=r"has job 7 already \(pending\); wait for it, end it \(scancel 7\)"
    ):
        launcher(["submit", *words, "--force"])


def test_without_slurm_the_error_says_so(folder, monkeypatch):
    monkeypatch.setenv("PATH", str(folder))
    with pytest.raises(
        RecipeError, match="sbatch: no such command; submit on a machine that has Slurm"
    ):
        launcher(["submit", "recipe=x.yaml"])


@pytest.mark.parametrize(
    ("left", "status", "shown"),
    [
        (
            {"status.json": {"state": "finished", "step": 9}},
            0,
            "runs/small: finished after step 9\n",
        ),
        (
            {"status.json": {"state": "stopped", "step": 9, "reason": "SIGTERM"}},
            75,
            "runs/small: stopped after step 9\n  SIGTERM\n",
        ),
        (
            {"status.json": {"state": "failed", "step": 9, "error": "why"}},
            1,
            "runs/small: failed after step 9\n  why\n",
        ),
        (
            {},
            1,
            "runs/small: ended before training began\n  see the logs in .../runs/small/slurm\n",
        ),
        (
            {
                "status.json": {"state": "finished", "step": 9},
                "slurm/job_7/restart_0/refused": "x.yaml: wrong",
            },
            *(2, 'runs/small: refused\n  "x.yaml: wrong"\n'),
        ),
    ],
)
def test_wait_reports_how_the_run_ended(folder, monkeypatch, capsys, left, status, shown):
    def sbatch(script):
        for name, content in left.items():
            (folder / "runs/small" / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / "runs/small" / name).write_text(json.dumps(content))
        return "7"

    states = [{"7": "RUNNING"}, {}]
    monkeypatch.setattr(scheduler, "sbatch", sbatch)
    monkeypatch.setattr(scheduler, "active_jobs", lambda: states.pop(0))
    monkeypatch.setattr(command, "_SQUEUE_SECONDS", 0.0)
    assert launcher(["submit", "recipe=x.yaml", "--wait"]) == status
    said = capsys.readouterr().out
    assert says("..." + shown, said), said
    assert not states


# Which jobs are requeued

PLAIN = Ended(state="failed", reason="error")


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
none                                                 -> requeue 1 1
none refused                                         -> end 2 0
none bad_node                                        -> requeue 1 1
none bad_node failures=2                             -> end 1 3
"""
"""How an attempt ended -> what the job does, its exit status, and failures in a row."""


@pytest.mark.parametrize("line", DECISIONS.strip().splitlines())
def test_decide(line):
    how, _, expected = line.partition(" -> ")
    state, *words = how.split()
    values = dict(word.split("=") for word in words if "=" in word)
    flags = {word: True for word in words if "=" not in word and word != "bad_node"}
    ended = Ended(
        state=None if state == "none" else state,
        reason=values.get("reason", "error").replace("_", " "),
        failures=int(values.get("failures", 0)),
        bad_nodes=("n1",) if "bad_node" in words else (),
        **flags,
    )
    found = decide(ended, max_failures=3)
    assert f"{found.action} {found.status} {found.failures}" == expected, found.why


@pytest.fixture
def run(tmp_path):
    run = RunFolder(tmp_path / "run")
    run.create("")
    (run.path / "slurm").mkdir()
    return run


def checkpoint(run, step):
    (run.path / f"checkpoints/step_{step:08}").mkdir(parents=True)


def begin(run, **more):
    settings = {"max_failures": 3} | more
    return attempts.begin(run.path, settings.pop("job", "7"), **settings)


def test_the_next_attempt_counts_one_that_was_lost_with_its_node(run):
    assert begin(run) is None
    checkpoint(run, 10)
    run.write_status("running", step=12)
    assert begin(run) is None, "died after a new checkpoint"
    assert Record.read(run.path, "7").failures == 1
    assert begin(run) is None
    why = begin(run)
    assert "failed 3 times in a row without a new checkpoint (slurm.max_failures=3)" in why
    assert run.read_status()["reason"] == "max_failures"
    assert begin(run, job="8") is None, "another submission starts from scratch"


def test_a_stopped_attempt_is_no_failure(run):
    begin(run)
    run.write_status("stopped", step=3, reason="SIGTERM")
    begin(run)  # scontrol requeue: the script was killed before it could say so
    assert Record.read(run.path, "7").failures == 0
    begin(run)  # that attempt said nothing: the status is the one that it found
    assert Record.read(run.path, "7").failures == 1


def test_a_new_checkpoint_resets_the_count_of_failures(run):
    for number, step in enumerate((None, None, 10, None), 1):
        begin(run)
        if step is not None:
            checkpoint(run, step)
        run.write_status("failed", step=number, reason="error")
        ended = dataclasses.replace(
            PLAIN, new_checkpoint=step is not None, failures=Record.read(run.path, "7").failures
        )
        assert attempts.end(run.path, "7", ended, max_failures=3).action == "requeue"
    begin(run)
    run.write_status("failed", step=9, reason="error", error="it broke")
    ended = dataclasses.replace(PLAIN, failures=Record.read(run.path, "7").failures)
    assert attempts.end(run.path, "7", ended, max_failures=3).action == "end"
    assert run.read_status()["error"].endswith(
        "3 in a row without a new checkpoint, of slurm.max_failures=3: not requeued\nthe last: it broke"
    )


@pytest.mark.parametrize(
    ("said", "job"),
    [
        (
            "JobId=7 JobState=RUNNING Restarts=2 StartTime=2026-11-21T10:00:00 EndTime=2026-11-21T11:00:00 PreemptTime=None",
            ("RUNNING", 2, False, ""),
        ),
        (
            "JobId=7 JobState=RUNNING Restarts=2 StartTime=2026-11-21T10:00:00 PreemptTime=2026-11-21T10:05:00 ExcNodeList=n4",
            (*("RUNNING", 2), True, "n4"),
        ),
        (
            "JobId=7 JobState=RUNNING Restarts=2 StartTime=2026-11-21T10:00:00 PreemptTime=2026-11-21T09:05:00",
            ("RUNNING", 2, False, ""),
        ),
        ("slurm_load_jobs error", ("", None, False, "")),
        (None, ("", None, False, "")),
    ],
)
def test_job_info(monkeypatch, said, job):
    monkeypatch.setattr(scheduler, "scontrol", lambda *words: said)
    known = JobInfo.read("7")
    assert (known.state, known.restarts, known.preempted, known.excluded) == job
    if known.end_time is not None:
        assert known.end_time == time.mktime((2026, 11, 21, 11, 0, 0, 0, 0, -1))


def test_lead_time_is_twice_a_step_and_a_save_as_measured(run):
    assert attempts.measured_lead(run.path) is None
    run.metrics.write_text(
        "".join(
            json.dumps({"step": n, "loss": 1, "step_seconds": s}) + "\n"
            for n, s in enumerate((30, 40.5, 20), 1)
        )
    )
    assert attempts.measured_lead(run.path) is None
    run.note("saved", ranks=2, step=3, bytes=1, seconds=200.0)
    assert attempts.measured_lead(run.path) == 481


@pytest.mark.parametrize(
    ("nodes", "bad", "excluded"),
    [(3, ("n2",), "n9,n2"), (3, ("n1", "n2", "n3"), None), (1, ("n1",), "n9,n1"), (2, (), None)],
)
def test_a_bad_node_is_excluded(started, nodes, bad, excluded):
    job, commands = started(
        {"SLURM_JOB_NUM_NODES": str(nodes)}, "JobState=RUNNING Restarts=0 ExcNodeList=n9"
    )
    assert job.requeue(bad)
    updates = [words for words in commands if words[0] == "update"]
    assert updates == (
        [] if excluded is None else [("update", "JobId=7", f"ExcNodeList={excluded}")]
    )


@pytest.mark.parametrize(
    "said", ["JobState=CANCELLED Restarts=0", "JobState=RUNNING Restarts=1", ""]
)
def test_a_job_that_slurm_has_ended_is_left_to_its_successor(started, said):
    job, commands = started({}, said)
    attempts.begin(job.run_dir, job.job, max_failures=3)
    known = JobInfo.read("7")
    assert not job.requeue([])
    assert not [words for words in commands if words[0] == "requeue"]
    if known.restarts != 1:
        assert job.end(1, []) == 1
        assert Record.read(job.run_dir, "7").open


@pytest.mark.parametrize(
    ("said", "warned", "terminated"),
    [
        ("JobState=RUNNING EndTime=2100-01-01T00:00:00", False, False),
        ("JobState=CANCELLED", False, True),
        (
            "JobState=RUNNING StartTime=2026-11-21T10:00:00 PreemptTime=2026-11-21T10:05:00",
            True,
            False,
        ),
        ("JobState=RUNNING EndTime=2026-11-21T10:00:00", True, False),
    ],
)
def test_a_signal_before_the_program_listened_is_found(started, said, warned, terminated):
    job, _ = started({}, said)
    job._read_limits(JobInfo.read("7"))
    assert (job.requests.warned, job.requests.terminated) == (warned, terminated)
    assert (job.lead, job.requests.warn_at) == (300, None)


@pytest.mark.parametrize(
    ("left", "save", "lead"),
    [
        (9_000, 50.0, 500),  # more than Slurm's lead of 300: the job warns itself
        (9_000, 10.0, None),
        (800, 50.0, 400),  # half of what is left, or nothing would be trained
        (500, 50.0, None),
    ],
)
def test_a_job_warns_itself_where_the_lead_is_too_short(started, left, save, lead):
    job, _ = started({}, "")
    (job.run_dir / "metrics.jsonl").write_text('{"step_seconds": 200.0}\n' if save > 10 else "")
    saved = {"event": "saved", "seconds": save}
    (job.run_dir / "events.jsonl").write_text(json.dumps(saved) + "\n")
    job._read_limits(JobInfo("RUNNING", end_time=time.time() + left + 0.5))
    assert (job.lead, job.requests.warn_at is not None) == (lead or 300, lead is not None)
    assert not job.requests.any()


def slurm_job(state="RUNNING", reason="None"):
    return JobInfo(state, excluded="n9", timed_out=state == "TIMEOUT" or reason == "TimeLimit")


def test_a_successor_is_queued_once_and_removed_when_nothing_is_left(run, monkeypatch):
    said, jobs = [], {}
    slurm = lambda *words: said.append(words) or "8\n"  # noqa: E731
    monkeypatch.setattr(scheduler, "slurm_command", slurm)
    monkeypatch.setattr(attempts, "slurm_command", slurm)
    monkeypatch.setattr(JobInfo, "read", lambda job: jobs.get(job, JobInfo()))
    begin(run)
    attempts.submit_successor(run.path, "7", "7", "/spool/script", "n9")
    jobs["8"] = slurm_job("PENDING")
    begin(run)  # requeued: the successor is still there
    attempts.submit_successor(run.path, "7", "7", "/spool/script", "")
    options = ("--dependency=afternotok:7", "--kill-on-invalid-dep=yes", "--exclude=n9")
    assert said == [("sbatch", "--parsable", *options, "/spool/script", "7", "7")]
    assert attempts.submitted_jobs(run.path) == ["8"], (
        "no other job of this folder is submitted meanwhile"
    )
    attempts.remove_successor(run.path, "7")
    assert said[1:] == [("scancel", "8")]
    begin(run, job="7_2")
    attempts.submit_successor(run.path, "7_2", "9_2", "/spool/script", "")
    assert said[2][2:] == (
        "--dependency=afternotok:9_2",
        "--kill-on-invalid-dep=yes",
        "--array=2",
        "/spool/script",
        "7_2",
        "9_2",
    )
    assert attempts.submitted_jobs(run.path) == ["8", "8_2"]


@pytest.mark.parametrize(
    ("cluster", "why"),
    [("RUNNING", None), ("TIMEOUT", None), (None, None), ("CANCELLED", "job 7 was cancelled")],
)
def test_when_a_successor_resumes_the_run(run, monkeypatch, cluster, why):
    monkeypatch.setattr(JobInfo, "read", lambda job: slurm_job(cluster or ""))
    begin(run)
    assert attempts.nothing_left(run.path, "7", "7") == why, "killed"
    attempts.end(run.path, "7", PLAIN, max_failures=3)
    assert attempts.nothing_left(run.path, "7", "7") == (why or "job 7 has ended by itself")


def test_a_killed_run_gets_a_failed_status(run):
    begin(run)
    run.write_status("running", step=4)
    ended = dataclasses.replace(
        PLAIN, state="running", reason=None, timed_out=True, terminated=True
    )
    attempts.end(run.path, "7", ended, max_failures=3)
    status = run.read_status()
    assert (status["state"], status["reason"], status["step"]) == ("failed", "killed", 4)
    assert "ended by Slurm at the time limit before a checkpoint was written" in status["error"]


@pytest.mark.parametrize(
    ("state", "reason", "cancelled"),
    [
        ("COMPLETING", "None", True),
        ("CANCELLED", "None", True),
        ("COMPLETING", "TimeLimit", False),
        ("RUNNING", "None", False),
    ],
)
def test_only_scancel_cancels(state, reason, cancelled):
    assert slurm_job(state, reason).cancelled == cancelled


# The program of the job, with an srun that runs the command here

SRUN = """#!/bin/bash
while [[ $1 == -* || $1 =~ ^[0-9]+$ ]]; do
    [[ $1 == --output=* ]] && exec >>"${1#--output=}" 2>&1
    shift
done
exec "$@"
"""


@pytest.fixture
def started(tmp_path, folder, monkeypatch):
    """Makes a start of job 7: (variables, what scontrol prints, more options) -> the job, commands of scontrol."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/srun").write_text(SRUN)
    (tmp_path / "bin/srun").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    slurm = {
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NUM_NODES": "1",
        "SLURM_JOB_NODELIST": "n1",
        "SLURM_CPUS_ON_NODE": "4",
    }
    before, environment = signal.pthread_sigmask(signal.SIG_BLOCK, []), dict(os.environ)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGTERM)}

    def start(variables, printed, *options, python=sys.executable):
        commands = []

        def scontrol(*words):
            commands.append(words)
            return "n1\n" if "hostnames" in words else printed

        for module in (scheduler, job_module):
            monkeypatch.setattr(module, "scontrol", scontrol)
        for name, value in (slurm | variables).items():
            monkeypatch.setenv(name, value)
        settings = f"{{ranks_per_node: 2, max_restarts: 0, python: {python}}}"
        for name in ("recipe.yaml", "other.yaml"):
            (folder / name).write_text(f"{SMALL}slurm: {settings}\n")
        words = ["--run", str(tmp_path / "run"), "recipe.yaml", "--script", "s", "--lead", "300"]
        return Job(read_options([*words, *options]), Requests()), commands

    yield start
    while signal.sigtimedwait([signal.SIGUSR1, signal.SIGTERM, signal.SIGCHLD], 0) is not None:
        pass
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    for number, handler in handlers.items():
        signal.signal(number, handler)
    os.environ.clear()
    os.environ.update(environment)


def test_each_start_has_its_logs_its_port_and_its_environment(started):
    job, _ = started({"SLURM_JOB_ID": "9", "SLURM_CPUS_PER_TASK": "8"}, "", "--", "7", "8")
    again, _ = started({"SLURM_JOB_ID": "9"}, "", "--", "7", "8")
    assert (job.job, job.this, job.after, job.restart, again.restart) == ("7", "9", "8", 0, 1)
    assert again.logs == job.run_dir / "slurm/job_7/restart_1"
    assert (job.port, again.port) == (20063, 20064)
    assert {
        name: os.environ[name]
        for name in ("LAUNCHER_JOB", "LAUNCHER_START", "OMP_NUM_THREADS", "SRUN_CPUS_PER_TASK")
    } == {
        "LAUNCHER_JOB": "7",
        "LAUNCHER_START": "1",
        "OMP_NUM_THREADS": "4",
        "SRUN_CPUS_PER_TASK": "8",
    }
    assert os.environ["LAUNCHER_REFUSED"] == str(again.refused)
    task, _ = started(
        {"SLURM_ARRAY_JOB_ID": "6", "SLURM_ARRAY_TASK_ID": "1"},
        "",
        "--run",
        f"{job.run_dir}_1",
        "other.yaml",
    )
    assert (task.this, task.job, str(task.run_dir)) == ("6_1", "6_1", f"{job.run_dir}_1")


TRAINS = """#!{python}
import pathlib, signal, sys, time
signal.signal(signal.SIGUSR1, lambda *_: (print("saved", flush=True), sys.exit(5)))
print(" ".join(sys.argv[1:]), flush=True)
time.sleep(20)
"""


def test_a_warning_is_sent_to_the_ranks_repeatedly(started, tmp_path, monkeypatch):
    """The first signals are lost: srun and the agent do not listen yet."""
    python = tmp_path / "trains"
    python.write_text(TRAINS.format(python=sys.executable))
    python.chmod(0o755)
    monkeypatch.setattr(job_module, "_SIGNAL_AGAIN_SECONDS", 0.1)
    job, _ = started({}, "JobState=RUNNING", python=python)
    job.requests.warn_at = time.monotonic() + 0.1
    assert job.train() == 5
    assert (job.requests.warned, job.requests.terminated) == (True, False)
    said = (job.logs / "node_%N.log").read_text().splitlines()
    assert said[0].startswith("-m launcher.slurm.agent ")
    assert said[0].endswith("-m launcher.train recipe=recipe.yaml")
    assert "--nnodes 1 --nproc-per-node 2 --max-restarts 0 " in said[0]
    assert "--rdzv-endpoint n1:20049 --rdzv-id 7.0 " in said[0]
    assert said[1:] == ["saved"]


def test_a_check_ends_if_it_takes_too_long_or_the_job_must_stop(started, tmp_path):
    job, _ = started({}, "")
    log = tmp_path / "log"
    assert job._look(60, log, "bash", "-c", "echo printed; exit 7") == 7
    assert log.read_text() == "printed\n"
    assert job._look(0, log, "sleep", "30") == preflight.LATE
    signal.pthread_kill(threading.get_ident(), signal.SIGTERM)  # blocked in this thread only
    assert job._look(60, log, "sleep", "30") == -signal.SIGTERM
    assert job.requests.terminated


# The agent's side

RANK = """
import pathlib, signal, sys, time
time.sleep(float(sys.argv[2]))  # imports torch
signal.signal(signal.SIGUSR1, lambda *_: (pathlib.Path(sys.argv[1]).write_text("saved"), sys.exit(0)))
time.sleep(20)
"""
TORCHRUN = """
import subprocess, sys, time
ranks = [subprocess.Popen([sys.executable, "-c", sys.argv[1], f"{sys.argv[2]}/{n}", sys.argv[3]]) for n in range(2)]
print("started", flush=True)
sys.exit(max(rank.wait() for rank in ranks))
"""


@pytest.mark.parametrize(
    ("number", "importing"), [(signal.SIGUSR1, 0.0), (signal.SIGTERM, 0.0), (signal.SIGUSR1, 1.0)]
)
def test_the_signal_reaches_the_ranks_and_torchrun_survives(tmp_path, number, importing):
    """Also where the ranks do not listen yet; and torchrun itself would die of either signal."""
    command = [
        sys.executable,
        "-m",
        "launcher.slurm.agent",
        sys.executable,
        "-c",
        TORCHRUN,
        RANK,
        str(tmp_path),
        str(importing),
    ]
    process = subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "started\n"
        for _ in range(3):
            process.send_signal(number)
            time.sleep(0.05)
        output, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 0
    assert output.count("save and stop") == 1
    assert [(tmp_path / str(rank)).read_text() for rank in range(2)] == ["saved", "saved"]


def test_the_agent_replaces_words_that_depend_on_the_node(capfd, monkeypatch):
    monkeypatch.setenv("SLURMD_NODENAME", "n7")
    monkeypatch.setenv("SLURM_NODEID", "0")
    code = "import subprocess, sys; from launcher.slurm import agent; sys.exit(agent.main(sys.argv[1:]))"
    words = [
        "sh",
        "-c",
        'echo "$@"; exit 7',
        "sh",
        "--local-addr",
        "{address}",
        "is_host={is_host}",
        "$x",
    ]
    done = subprocess.run(
        [sys.executable, "-c", code, *words],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (7, "--local-addr n7 is_host=1 $x\n")
    assert agent.address("lo") == "127.0.0.1"
    with pytest.raises(
        SystemExit, match=r"slurm.interface: ib9 has no IPv4 address on .*; there are .*lo"
    ):
        agent.address("ib9")


def test_a_refusal_is_written_for_the_job(tmp_path, folder):
    """torchrun's exit status would be that of a crash."""
    refused = tmp_path / "refused"
    environment = os.environ | {"LAUNCHER_REFUSED": str(refused)}
    train = [sys.executable, REPOSITORY / "launcher/train.py", "recipe=x.yaml", "run.sed=3"]
    done = subprocess.run(
        train, env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2
    assert refused.read_text() == "command line: run.sed=3: unknown key; did you mean seed?\n"


# The preflight


def test_each_node_alone(tmp_path):
    log, nodes = tmp_path / "log", ["n1", "n2", "n3"]
    log.write_text("n1 fit: 8 x H100\nn2 unfit: GPU 3: not free\nsrun: error: n3: task 2: Killed\n")
    bad = {"n2": ["n2 unfit: GPU 3: not free"], "n3": ["no result; the srun ended with status 1"]}
    assert preflight.each(log, nodes, status=1) == (bad, [])
    late, other = preflight.each(log, nodes, status=preflight.LATE)
    assert late["n3"] == ["did not end in time: a GPU, its driver or a file system hangs"]
    log.write_text("run.dir: is not there\n")
    bad, other = preflight.each(log, nodes, status=2)
    assert bad == {}, "no node is blamed for what is wrong on all"
    assert other == [
        "no node has a result; the srun ended with status 2",
        "run.dir: is not there",
    ]
    assert list(preflight.each(log, nodes, status=preflight.LATE)[0]) == nodes


def test_all_nodes_together(tmp_path, capsys):
    nodes, file = ["n1", "n2", "n3"], tmp_path / "preflight_all.json"

    def found(*findings, status=1):
        hosts = sorted({host for _, state, host in findings if state == "bad"} - {"all nodes"})
        findings = [
            {"name": name, "state": state, "text": "why", "host": host}
            for name, state, host in findings
        ]
        file.write_text(json.dumps({"findings": findings, "bad_nodes": hosts}))
        return preflight.together(file, nodes, status=status)

    late = preflight.together(file, nodes, status=preflight.LATE)
    assert late == ({}, ["the check took too long"])
    assert preflight.together(file, nodes, status=1) == (
        {},
        ["the check ended with status 1, without a report"],
    )
    assert found(("clock", "bad", "elsewhere")) == ({}, ["elsewhere: clock: why"])
    assert found(("rates", "warning", "n1"), status=0) == ({}, [])
    clocks = found(
        ("clock", "bad", "n2"),
        ("versions", "bad", "n2"),
        ("rates", "warning", "n1"),
        ("clocks", "bad", "all nodes"),
    )
    assert clocks == ({"n2": ["clock: why", "versions: why"]}, ["all nodes: clocks: why"])
    assert preflight.report(*late, tmp_path / "x.log") == []
    assert (
        f"no node can be blamed for that, so training begins; details: {tmp_path}/x.log"
        in capsys.readouterr().err
    )
    assert preflight.report(*clocks, tmp_path / "x.log") == ["n2"]
    printed = capsys.readouterr().err
    assert "not fit to train: n2; details: " in printed
    assert "  n2: clock: why\n" in printed
