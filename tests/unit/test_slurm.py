"""The job's script as text, and who is requeued: everything of launcher/slurm that needs no cluster (tests/slurm has one)."""

import dataclasses
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launcher.cli import submit as command
from launcher.errors import RecipeError
from launcher.planner.formatting import as_json
from launcher.recipe.load import load_recipe
from launcher.recipe.schema import Slurm
from launcher.reliability.run_directory import RunFolder
from launcher.slurm import agent, attempts, preflight, submit
from launcher.slurm.attempts import Ended, decide
from launcher.slurm.render import JobScript, node_counts, quote_for_sbatch, ranks_per_node, render
from tests.unit.made_plan import made_plan
from tests.unit.small_recipe import says

REPOSITORY = Path(__file__).resolve().parents[2]


def job(run_dir="/runs/a", *, runs=1, **more):
    asked = {field.name for field in dataclasses.fields(Slurm)} - {"lead", "python"}
    slurm = {key: more.pop(key) for key in list(more) if key in asked}
    folders = [Path(run_dir) if runs == 1 else Path(run_dir, str(number)) for number in range(runs)]
    settings = {"name": "a", "lead": 300, "log": Path("/runs/a/slurm/job_%j.log"), "directory": Path("/home/me"), "python": Path("/py")}
    return JobScript(slurm=Slurm(**slurm), runs=tuple((folder, folder / "slurm/recipe_1.yaml") for folder in folders), **(settings | more))


def options(text):
    """Of the #SBATCH lines, read as a shell would, which is how sbatch does."""
    return [shlex.split(line)[1] for line in text.replace("#SBATCH", "SBATCH").splitlines() if line.startswith("SBATCH ")]


# The script


def test_what_is_asked_for_stands_in_the_script():
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
        *("--time=1-12:00:00", "--partition=gpu", "--account=me", "--qos=low", "--constraint=h100", "--exclude=n[1-3]"),
        *("--reservation=r", "--mail-user=me@here", "--mail-type=END,FAIL,REQUEUE", "--array=0-2%2", "--dependency=afterok:7"),
        *("--signal=B:USR1@300", "--chdir=/home/me", "--output=/runs/a/slurm/job_%j.log", "--requeue", "--open-mode=append"),
        "--exclusive",
    ]
    for part in ("--nproc-per-node 8 ", "--max-restarts 5 ", " --container-image=i ", "NCCL_SOCKET_IFNAME=ib0", "export NCCL_IB_HCA=mlx5"):
        assert part in text
    order = ["trap 'warned=1", "module load cuda", "export NCCL_DEBUG", "export NCCL_IB_HCA", "exec srun", "attempts end"]
    assert sorted(order, key=text.index) == order
    assert "doctor" not in text
    assert "localhost" not in text
    looked_at = render(job(preflight=True, nodes=2, ranks_per_node=3))
    order = [
        "trap 'warned=1",
        "doctor --node",
        "preflight each",
        "--nproc-per-node 3 --max-restarts 0",
        "doctor quick=true",
        "preflight together",
    ]
    order += ["launcher.train", "attempts end"]
    assert sorted(order, key=looked_at.index) == order
    assert "--gpus-per-node" not in render(job()), "a node of CPUs"


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed (Debian: apt-get install shellcheck)")
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"preflight": True},
        {"runs": 3, "preflight": True, "interface": "ib0", "setup": (":",), "environment": {"A": "b c"}, "srun_extra": ("-v",)},
    ],
)
def test_shellcheck_has_nothing_to_say(settings, tmp_path):
    (tmp_path / "script").write_text(render(job(**settings)))
    done = subprocess.run(["shellcheck", tmp_path / "script"], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout


HOSTILE = "we ird'\"; $(touch HACKED) `touch HACKED` #\\ %j &"


def test_a_hostile_name_is_a_name(tmp_path):
    """The script's body is run, with what it calls replaced: the folder that is made is the one that was named."""
    run_dir = tmp_path / HOSTILE
    text = render(job(str(run_dir), name=HOSTILE, partition=HOSTILE, environment={"VALUE": HOSTILE + "\nmore"}, python=Path("echo")))
    asked = options(text)
    assert len(asked) == len(options(render(job(partition="p"))))
    assert {f"--job-name={HOSTILE}", f"--partition={HOSTILE}"} <= set(asked)
    body = text[: text.index("# The ranks meet")] + 'printf %s "$VALUE" > value\n'
    environment = os.environ | {"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "n1", "SLURM_CPUS_ON_NODE": "1"}
    subprocess.run(["bash", "-c", body], cwd=tmp_path, env=environment, check=True, timeout=20, capture_output=True)
    assert (run_dir / "slurm/job_1/restart_0").is_dir()
    assert (tmp_path / "value").read_text() == HOSTILE + "\nmore"
    assert not list(tmp_path.rglob("HACKED"))


@pytest.mark.parametrize("text", ["a\n#SBATCH --account=other", "a\rb", "a\0b", "a\x1b[31m"])
def test_what_would_make_a_line_of_its_own_is_refused(text):
    with pytest.raises(RecipeError, match="cannot stand in a line"):
        render(job(name=text))
    with pytest.raises(RecipeError):
        quote_for_sbatch(text)


def test_nodes_and_ranks():
    assert list(node_counts(Slurm(nodes="2-4"))) == [2, 3, 4]
    assert list(node_counts(Slurm(nodes=2))) == [2]
    assert [ranks_per_node(slurm) for slurm in (Slurm(), Slurm(gpus_per_node=8), Slurm(gpus_per_node=8, ranks_per_node=2))] == [1, 8, 2]


# The arguments


def submit_dry(*words, capsys):
    assert command.main(["recipe=x.yaml", "--dry-run", *words]) == 0
    return capsys.readouterr().out


def test_arguments_stay_text_and_win_over_the_recipe(folder, capsys):
    with (folder / "x.yaml").open("a") as recipe:
        recipe.write('slurm: {time: "9:00:00", partition: slow, account: "0123", nodes: 2}\n')
    asked = options(
        submit_dry("time=1:30:00", "partition=0x10", "gpus_per_node=4", "sbatch_extra=--nice=5", "sbatch_extra=-H", capsys=capsys)
    )
    for option in ("--time=1:30:00", "--partition=0x10", "--account=0123", "--nodes=2", "--gpus-per-node=4", "--nice=5", "-H"):
        assert option in asked
    assert f"--chdir={folder}" in asked
    assert f"--output={folder}/runs/small/slurm/job_%j.log" in asked
    assert not (folder / "runs").exists(), "a dry run writes nothing"


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["time=soon"], "...slurm.time=\"soon\": must be minutes, HOURS:MINUTES:SECONDS or DAYS-HOURS; got 'soon'"),
        (["nodes=4-2"], "...must be a number, or a range such as 2-4; got '4-2'"),
        (["nodes=0"], "...slurm.nodes=0: must be at least 1; got 0"),
        (["host_memory=much"], "...must be a number with K, M, G or T, such as 500G; got 'much'"),
        (["account=a\nb"], "...slurm.account=...holds a character that cannot stand in a job script..."),
        (["sbatch_extra=rm"], "...must be options, --name or --name=value; got 'rm'"),
        (["sbatch_extra=--exclusive --account=x"], "...must be options, --name or --name=value; got..."),
        (["slurm.environment={A B: x}"], "...'A B' is no name of an environment variable"),
        (["--wiat"], "command line: --wiat: no such option; there are --dry-run, --wait, --follow, --force"),
        (["throttle=2"], "command line: throttle: of a sweep only..."),
        (
            ["nodes=2-4"],
            "on 3 of 2-4 nodes: x.yaml:12: batch.global_batch_size: 64 is not a multiple of 8 (micro-batch) x 3 (ranks) = 24...",
        ),
        (["sweep.optimizer.learning_rate=1e-3,1e-3"], "command line: sweep: two runs would have the same name..."),
        (["sweep.optimizer.learning_rate=1e-3,fast"], "command line: optimizer.learning_rate=fast: must be a number; got 'fast'"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_submitted(folder, words, problem):
    with pytest.raises(RecipeError) as raised:
        command.main(["recipe=x.yaml", *words])
    assert says(problem, str(raised.value)), raised.value
    assert not (folder / "runs").exists()


def test_a_sweep_has_a_folder_and_a_recipe_for_each_combination(folder, capsys):
    text = submit_dry("sweep.optimizer.learning_rate=1e-3,2e-3", "sweep.optimizer.betas=[0.9,0.95],[0.8,0.9]", "throttle=3", capsys=capsys)
    assert "--array=0-3%3" in options(text)
    assert "--job-name=small" in options(text)
    found = re.findall(r"runs/small/(\S+?)/slurm/recipe_", text)
    assert found == [f"learning_rate={rate},betas=_{betas}_" for rate in ("1e-3", "2e-3") for betas in ("0.9_0.95", "0.8_0.9")]


@pytest.mark.parametrize(
    ("limit", "lead"), [(None, 300), ("1:00:00", 300), ("4", 120), ("4:00", 120), ("1-0", 300), ("0:2:30", 75), ("UNLIMITED", 300)]
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
"""As the README says them; what the cluster makes of the like is in tests/slurm."""


@pytest.mark.parametrize("line", README.strip().splitlines())
def test_what_the_readme_says_is_taken(line, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = [word for word in shlex.split(line)[2:] if word not in ("--follow", "--dry-run")]
    assert command.main([*words, "--dry-run"]) == 0
    assert capsys.readouterr().out.startswith("#!/bin/bash\n")


# The plan


@pytest.mark.parametrize(
    ("memory", "status", "fits", "said"),
    [
        (80 * 2**30, 0, True, "plan: ... GiB of a GPU's 80.0 GiB, at its peak (...)"),
        (10 * 2**30, 3, False, "plan: ... GiB of a GPU's 10.0 GiB, at its peak (...)"),
        (None, 0, None, "plan: ... GiB a GPU; how much memory it has is not known"),
        ("", 1, None, "no plan: it broke ['recipe=x', 'nodes=2', 'ladder=false', '--json']"),
    ],
)
def test_the_plan_is_asked_in_a_process_of_its_own(folder, memory, status, fits, said):
    text = ""
    if memory != "":
        recipe = load_recipe(["recipe=x.yaml"], ranks=None).recipe
        text = json.dumps(as_json(recipe, made_plan(memory=memory), None))
    (folder / "plan.py").write_text(f"import sys; print({text!r}); print('it broke', sys.argv[1:], file=sys.stderr); sys.exit({status})")
    checked = submit.check_plan(["recipe=x", "nodes=2"], command=[sys.executable, folder / "plan.py"])
    assert checked.fits is fits
    assert says(said, checked.said), checked.said


def test_a_job_that_does_not_fit_is_not_submitted_unless_forced(folder, monkeypatch, capsys):
    asked = []

    def check_plan(arguments):
        asked.append(arguments)
        return submit.PlanCheck(False, "needs 90 GiB of 80 GiB")

    monkeypatch.setattr(submit, "check_plan", check_plan)
    monkeypatch.setattr(command, "can_plan", lambda: True)
    monkeypatch.setattr(submit, "sbatch", lambda script: "7")
    words = ["recipe=x.yaml", "nodes=2", "gpus_per_node=4", "gpu=h100", "host_memory=500G"]
    assert command.main(words) == 3
    overrides = ["slurm.nodes=2", "slurm.gpus_per_node=4", 'slurm.host_memory="500G"']
    assert asked == [["recipe=x.yaml", *overrides, "nodes=2", "gpus_per_node=4", "gpu=h100", "host_memory=500GiB"]]
    assert "needs 90 GiB of 80 GiB\nnot submitted" in capsys.readouterr().err
    assert not (folder / "runs").exists()
    assert command.main(["recipe=x.yaml", "gpus_per_node=4", "run.name=unplanned"]) == 0
    assert "note: whether it fits was not checked: say for which GPU, such as gpu=h100" in capsys.readouterr().out
    assert len(asked) == 1
    assert command.main([*words, "--force"]) == 0
    assert "submitted job 7: small, 2 nodes x 4 GPUs" in capsys.readouterr().out
    assert command.main([*words, "sweep.batch.micro_batch_size=1,2", "sweep.optimizer.learning_rate=1e-4,2e-4"]) == 3
    assert "batch.micro_batch_size=1 optimizer.learning_rate=1e-4: needs 90 GiB of 80 GiB\nnot submitted" in capsys.readouterr().err
    assert command._of_different_memory([("batch.micro_batch_size", ["1", "2"]), ("optimizer.learning_rate", ["1e-4", "2e-4"])]) == [
        ["batch.micro_batch_size=1", "optimizer.learning_rate=1e-4"],
        ["batch.micro_batch_size=2", "optimizer.learning_rate=1e-4"],
    ]
    (snapshot,) = (folder / "runs/small/slurm").glob("recipe_*.yaml")
    assert "nodes: 2" in snapshot.read_text()
    assert json.loads((folder / "runs/small/slurm/submissions.jsonl").read_text())["job"] == "7"
    monkeypatch.setattr(submit, "active_jobs", lambda: {"7": "PENDING"})
    with pytest.raises(RecipeError, match=r"has job 7 already \(pending\); wait for it, end it \(scancel 7\)"):
        command.main([*words, "--force"])


def test_without_torch_nothing_is_planned(folder, monkeypatch, capsys):
    monkeypatch.setattr(command, "can_plan", lambda: False)
    monkeypatch.setattr(submit, "sbatch", lambda script: "7")
    assert command.main(["recipe=x.yaml", "nodes=1", "gpus_per_node=2", "gpu=h100"]) == 0
    assert "note: whether it fits was not checked: the plan needs torch" in capsys.readouterr().out


def test_without_slurm_it_says_so(folder, monkeypatch):
    monkeypatch.setenv("PATH", str(folder))
    with pytest.raises(RecipeError, match="sbatch: no such command; submit on a machine where Slurm is"):
        command.main(["recipe=x.yaml"])


@pytest.mark.parametrize(
    ("left", "status", "told"),
    [
        ({"status.json": {"state": "finished", "step": 9}}, 0, "runs/small: finished after step 9\n"),
        ({"status.json": {"state": "stopped", "step": 9, "reason": "SIGTERM"}}, 75, "runs/small: stopped after step 9\n  SIGTERM\n"),
        ({"status.json": {"state": "failed", "step": 9, "error": "why"}}, 1, "runs/small: failed after step 9\n  why\n"),
        ({}, 1, "runs/small: ended before training began\n  see the logs in .../runs/small/slurm\n"),
        (
            {"status.json": {"state": "finished", "step": 9}, "slurm/job_7/restart_0/refused": "x.yaml: wrong"},
            *(2, 'runs/small: refused\n  "x.yaml: wrong"\n'),
        ),
    ],
)
def test_who_waits_is_told_how_it_ended(folder, monkeypatch, capsys, left, status, told):
    def sbatch(script):
        for name, content in left.items():
            (folder / "runs/small" / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / "runs/small" / name).write_text(json.dumps(content))
        return "7"

    states = [{"7": "RUNNING"}, {}]
    monkeypatch.setattr(submit, "sbatch", sbatch)
    monkeypatch.setattr(submit, "active_jobs", lambda: states.pop(0))
    monkeypatch.setattr(command, "_SQUEUE_SECONDS", 0.0)
    assert command.main(["recipe=x.yaml", "--wait"]) == status
    said = capsys.readouterr().out
    assert says("..." + told, said), said
    assert not states


# Who is requeued

PLAIN = Ended(
    state="failed",
    reason="error",
    warned=False,
    terminated=False,
    preempted=False,
    timed_out=False,
    refused=False,
    bad_nodes=(),
    new_checkpoint=False,
    failures=0,
)


@pytest.mark.parametrize(
    ("how", "action", "status", "failures"),
    [
        ({"state": "finished", "reason": None}, "end", 0, 0),
        ({"state": "finished", "reason": None, "warned": True}, "end", 0, 0),
        ({"state": "stopped", "warned": True, "new_checkpoint": True}, "requeue", 0, 0),
        ({"state": "stopped", "warned": True, "new_checkpoint": True, "failures": 2}, "requeue", 0, 0),
        ({"state": "stopped", "warned": True}, "requeue", 1, 1),  # warned before it had done anything, again and again
        ({"state": "stopped", "warned": True, "failures": 2}, "end", 1, 3),
        ({"state": "stopped", "warned": True, "preempted": True, "failures": 2}, "requeue", 0, 2),
        ({"state": "stopped", "warned": True, "terminated": True, "new_checkpoint": True}, "end", 75, 0),
        ({"state": "stopped", "terminated": True, "new_checkpoint": True}, "end", 75, 0),
        ({"state": "stopped", "terminated": True, "preempted": True}, "requeue", 0, 0),
        ({"state": "stopped", "preempted": True}, "requeue", 0, 0),  # only the ranks were told
        ({"state": "finished", "preempted": True}, "end", 0, 0),
        ({"state": "stopped", "reason": "the file stop"}, "end", 75, 0),
        ({"state": "stopped", "reason": "the file stop", "warned": True, "new_checkpoint": True}, "end", 75, 0),
        ({"terminated": True}, "end", 75, 0),
        ({"state": "running", "warned": True, "terminated": True, "timed_out": True, "new_checkpoint": True}, "requeue", 1, 0),
        ({"state": "running", "terminated": True, "timed_out": True, "failures": 1}, "requeue", 1, 2),
        ({"state": "running", "terminated": True, "timed_out": True, "failures": 2}, "end", 1, 3),
        ({}, "requeue", 1, 1),
        ({"failures": 1}, "requeue", 1, 2),
        ({"failures": 2}, "end", 1, 3),
        ({"failures": 2, "new_checkpoint": True}, "requeue", 1, 1),
        ({"state": None, "reason": None}, "requeue", 1, 1),
        ({"state": None, "reason": None, "refused": True}, "end", 2, 0),
        ({"reason": "recipe"}, "end", 2, 0),
        ({"state": None, "reason": None, "bad_nodes": ("n1",)}, "requeue", 1, 1),
        ({"state": None, "reason": None, "bad_nodes": ("n1",), "failures": 2}, "end", 1, 3),
    ],
)
def test_who_is_requeued(how, action, status, failures):
    decision = decide(dataclasses.replace(PLAIN, **how), max_failures=3)
    assert (decision.action, decision.status, decision.failures) == (action, status, failures), decision.why


@pytest.fixture
def run(tmp_path):
    run = RunFolder(tmp_path / "run")
    run.create("")
    (run.path / "slurm").mkdir()
    return run


def checkpoint(run, step):
    (run.path / f"checkpoints/step_{step:08}").mkdir(parents=True)


def begin(run, **more):
    settings = {"lead": 300, "max_failures": 3, "end_time": 10_000.0, "now": 1_000.0} | more
    return attempts.begin(run.path, settings.pop("job", "7"), **settings)


def test_an_attempt_that_died_with_its_node_is_counted_by_the_next(run):
    assert begin(run) == (True, "")
    checkpoint(run, 10)
    run.write_status("running", step=12)
    assert begin(run) == (True, ""), "died after a new checkpoint"
    assert attempts.read_record(run.path, "7").failures == 1
    assert begin(run) == (True, "")
    may, why = begin(run)
    assert not may
    assert "failed 3 times in a row without a new checkpoint (slurm.max_failures=3)" in why
    assert run.read_status()["reason"] == "max_failures"
    assert begin(run, job="8") == (True, ""), "another submission begins anew"


def test_an_attempt_that_was_stopped_is_none_that_failed(run):
    begin(run)
    run.write_status("stopped", step=3, reason="SIGTERM")
    begin(run)  # scontrol requeue: the script was killed before it could say so
    assert attempts.read_record(run.path, "7").failures == 0
    begin(run)  # that attempt said nothing: the status is the one that it found
    assert attempts.read_record(run.path, "7").failures == 1


def test_a_new_checkpoint_forgives(run):
    for number, step in enumerate((None, None, 10, None), 1):
        begin(run)
        if step is not None:
            checkpoint(run, step)
        run.write_status("failed", step=number, reason="error")
        ended = dataclasses.replace(PLAIN, new_checkpoint=step is not None, failures=attempts.read_record(run.path, "7").failures)
        assert attempts.end(run.path, "7", ended, max_failures=3).action == "requeue"
    begin(run)
    run.write_status("failed", step=9, reason="error", error="it broke")
    ended = dataclasses.replace(PLAIN, failures=attempts.read_record(run.path, "7").failures)
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
        ("JobId=7 JobState=RUNNING Restarts=2 StartTime=2026-11-21T10:00:00 PreemptTime=2026-11-21T09:05:00", ("RUNNING", 2, False, "")),
        ("slurm_load_jobs error", None),
        (None, None),
    ],
)
def test_what_slurm_says_of_a_job(monkeypatch, said, job):
    monkeypatch.setattr(attempts, "scontrol", lambda *words: said)
    known = attempts.Job.read("7")
    assert (known and (known.state, known.restarts, known.preempted, known.excluded)) == job
    if known is not None and "EndTime" in said:
        assert known.end_time == time.mktime((2026, 11, 21, 11, 0, 0, 0, 0, -1))


def test_lead_time_is_twice_a_step_and_a_save_as_measured(run):
    assert attempts.measured_lead(run.path) is None
    run.metrics.write_text("".join(json.dumps({"step": n, "loss": 1, "step_seconds": s}) + "\n" for n, s in enumerate((30, 40.5, 20), 1)))
    assert attempts.measured_lead(run.path) is None
    run.note("saved", ranks=2, step=3, bytes=1, seconds=200.0)
    assert attempts.measured_lead(run.path) == 481
    assert begin(run, lead=300) == (True, f"{10_000 - 1_000 - 481} 481"), "Slurm was told less: the script warns itself"
    assert begin(run, lead=500) == (True, "")
    assert begin(run, lead=300, end_time=None) == (True, "")
    assert begin(run, lead=300, end_time=1_800.0, max_failures=9) == (True, "400 400"), "half of what is left, or nothing would be trained"
    assert begin(run, lead=300, end_time=1_100.0, max_failures=9) == (True, "")


@pytest.mark.parametrize(
    ("nodes", "bad", "excluded"), [(3, ("n2",), "n9,n2"), (3, ("n1", "n2", "n3"), None), (1, ("n1",), "n9,n1"), (2, (), None)]
)
def test_a_bad_node_is_left_out(monkeypatch, nodes, bad, excluded):
    said = []

    def scontrol(*words):
        said.append(words)
        return "JobId=7 JobState=RUNNING Restarts=0 ExcNodeList=n9"

    monkeypatch.setattr(attempts, "scontrol", scontrol)
    monkeypatch.setattr(attempts.signal, "signal", lambda *_: None)
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", str(nodes))
    monkeypatch.setenv("SLURM_RESTART_COUNT", "0")
    decision = decide(dataclasses.replace(PLAIN, state=None, reason=None, bad_nodes=bad), max_failures=3)
    assert attempts.carry_out(decision, "7", bad) == (False, 0)
    updates = [words for words in said if words[0] == "update"]
    assert updates == ([] if excluded is None else [("update", "JobId=7", f"ExcNodeList={excluded}")])


def slurm_job(state="RUNNING", reason="None"):
    return attempts.Job(state, 0, False, None, "n9", state == "TIMEOUT" or reason == "TimeLimit")


def test_a_successor_is_queued_once_and_removed_when_nothing_is_left(run, monkeypatch):
    said, jobs = [], {}
    monkeypatch.setattr(attempts, "slurm_command", lambda *words: said.append(words) or "8\n")
    monkeypatch.setattr(attempts.Job, "read", jobs.get)
    begin(run)
    attempts.submit_successor(run.path, "7", "7", "/spool/script", "n9")
    jobs["8"] = slurm_job("PENDING")
    begin(run)  # requeued: the successor is still there
    attempts.submit_successor(run.path, "7", "7", "/spool/script", "")
    options = ("--dependency=afternotok:7", "--kill-on-invalid-dep=yes", "--exclude=n9")
    assert said == [("sbatch", "--parsable", *options, "/spool/script", "7", "7")]
    assert submit.Submission(run.path, "").jobs() == ["8"], "no other job of this folder is submitted meanwhile"
    attempts.remove_successor(run.path, "7")
    assert said[1:] == [("scancel", "8")]
    begin(run, job="7_2")
    attempts.submit_successor(run.path, "7_2", "9_2", "/spool/script", "")
    assert said[2][2:] == ("--dependency=afternotok:9_2", "--kill-on-invalid-dep=yes", "--array=2", "/spool/script", "7_2", "9_2")
    assert submit.Submission(run.path, "").jobs() == ["8", "8_2"]


@pytest.mark.parametrize(
    ("cluster", "why"),
    [("RUNNING", None), ("TIMEOUT", None), (None, None), ("CANCELLED", "job 7 was cancelled")],
)
def test_a_successor_goes_on_where_the_job_before_was_ended(run, monkeypatch, cluster, why):
    monkeypatch.setattr(attempts.Job, "read", lambda job: cluster and slurm_job(cluster))
    begin(run)
    assert attempts.nothing_left(run.path, "7", "7") == why, "killed"
    attempts.end(run.path, "7", PLAIN, max_failures=3)
    assert attempts.nothing_left(run.path, "7", "7") == (why or "job 7 has ended by itself")


def test_who_killed_the_ranks_of_a_run_stands_in_its_status(run):
    begin(run)
    run.write_status("running", step=4)
    ended = dataclasses.replace(PLAIN, state="running", reason=None, timed_out=True, terminated=True)
    attempts.end(run.path, "7", ended, max_failures=3)
    status = run.read_status()
    assert (status["state"], status["reason"], status["step"]) == ("failed", "killed", 4)
    assert "ended by Slurm at the time limit before a checkpoint was written" in status["error"]


@pytest.mark.parametrize(
    ("state", "reason", "removed"),
    [("COMPLETING", "None", True), ("CANCELLED", "None", True), ("COMPLETING", "TimeLimit", False), ("RUNNING", "None", False)],
)
def test_only_scancel_removes_the_successor_at_once(run, monkeypatch, state, reason, removed):
    said = []
    monkeypatch.setattr(attempts, "slurm_command", lambda *words: said.append(words) or "8\n")
    monkeypatch.setattr(attempts.Job, "read", lambda job: slurm_job(state, reason))
    begin(run)
    attempts.submit_successor(run.path, "7", "7", "script", "")
    attempts.main(["signalled", "--run-dir", str(run.path), "--job", "7", "--this", "7"])
    assert (("scancel", "8") in said) == removed


def test_the_job_before_is_an_argument_of_the_script():
    text = render(job())
    assert "job=${1:-$this} after=${2:-}" in text
    assert '--this "$this" --after "$after" --script "$0"' in text
    assert "export LAUNCHER_JOB=$job LAUNCHER_START=$restart" in text
    assert "TORCH_NCCL_ASYNC_ERROR_HANDLING" not in text, "torch's default is right"


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


@pytest.mark.parametrize(("number", "importing"), [(signal.SIGUSR1, 0.0), (signal.SIGTERM, 0.0), (signal.SIGUSR1, 1.0)])
def test_the_request_reaches_the_ranks_and_torchrun_lives(tmp_path, number, importing):
    """Also where the ranks do not listen yet; and torchrun itself would die of either signal."""
    command = [sys.executable, "-m", "launcher.slurm.agent", sys.executable, "-c", TORCHRUN, RANK, str(tmp_path), str(importing)]
    process = subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "started\n"
        for _ in range(3):
            process.send_signal(number)
            time.sleep(0.05)
        output, _ = process.communicate(timeout=15)
    finally:
        process.kill()
    assert process.returncode == 0
    assert output.count("are told to save and stop") == 1
    assert [(tmp_path / str(rank)).read_text() for rank in range(2)] == ["saved", "saved"]


def test_the_agent_fills_in_what_differs_between_nodes(capfd, monkeypatch):
    monkeypatch.setenv("SLURMD_NODENAME", "n7")
    monkeypatch.setenv("SLURM_NODEID", "0")
    code = "import subprocess, sys; from launcher.slurm import agent; sys.exit(agent.main(sys.argv[1:]))"
    words = ["sh", "-c", 'echo "$@"; exit 7', "sh", "--local-addr", "{address}", "is_host={is_host}", "$x"]
    done = subprocess.run([sys.executable, "-c", code, *words], cwd=REPOSITORY, capture_output=True, text=True, timeout=20, check=False)
    assert (done.returncode, done.stdout) == (7, "--local-addr n7 is_host=1 $x\n")
    assert agent.address("lo") == "127.0.0.1"
    with pytest.raises(SystemExit, match=r"slurm.interface: ib9 has no IPv4 address on .*; there are .*lo"):
        agent.address("ib9")


def test_a_refusal_is_left_for_the_script(tmp_path, folder):
    """torchrun's exit status would be that of a crash."""
    refused = tmp_path / "refused"
    environment = os.environ | {"LAUNCHER_REFUSED": str(refused)}
    train = [sys.executable, REPOSITORY / "launcher/train.py", "recipe=x.yaml", "run.sed=3"]
    done = subprocess.run(train, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert refused.read_text() == "command line: run.sed=3: unknown key; did you mean seed?\n"


# The preflight


def test_each_node_alone():
    log = "\n".join(
        [
            *("n1: n1 fit: 8 x H100", "n1: status 0", "n2: n2 unfit: GPU 3: not free", "n2: status 3", "srun: error: a word of Slurm's"),
            *("n3: the recipe is not there", "n3: status 2", "n4: n4 fit: 8 x H100"),
        ]
    )
    nodes = ["n1", "n2", "n3", "n4", "n5"]
    bad, nobody = preflight.each(log, nodes, status=1)
    assert bad == {"n2": ["n2 unfit: GPU 3: not free"]}
    unknown = "nothing is known of it; the srun ended with status 1"
    assert nobody == ["n3: the recipe is not there", f"n4: {unknown}", f"n5: {unknown}"]
    late, nobody = preflight.each(log, nodes, status=preflight.LATE)
    assert list(late) == ["n2", "n4", "n5"]
    assert nobody == ["n3: the recipe is not there"]
    assert late["n5"] == ["did not come to an end: a GPU, its driver or a file system hangs"]
    assert preflight.each("n1: status 127\n", ["n1"], status=0) == ({"n1": ["ended with status 127"]}, [])


def report(*findings):
    findings = [{"name": name, "state": state, "text": "why", "host": host} for name, state, host in findings]
    return {"findings": findings, "bad_nodes": sorted({f["host"] for f in findings if f["state"] == "bad"} - {"all nodes"})}


def test_all_nodes_together(monkeypatch, tmp_path, capsys):
    nodes = ["n1", "n2", "n3"]
    told = report(("clock", "bad", "n2"), ("versions", "bad", "n2"), ("rates", "warning", "n1"), ("clocks", "bad", "all nodes"))
    assert preflight.together(told, nodes, status=1) == ({"n2": ["clock: why", "versions: why"]}, ["all nodes: clocks: why"])
    assert preflight.together(report(("clock", "bad", "elsewhere")), nodes, status=1) == ({}, ["elsewhere: clock: why"])
    assert preflight.together(None, nodes, status=preflight.LATE) == ({}, ["the examination took too long, and was ended"])
    monkeypatch.setattr(preflight, "scontrol", lambda *words: "n1\nn2\nn3\n")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-3]")
    file = tmp_path / "preflight_all.json"

    def printed(status):
        assert preflight.main(["together", str(file), status]) == 0
        said = capsys.readouterr()
        return said.out, said.err

    out, err = printed("1")
    assert out == ""
    assert "the examination ended with status 1, and no report" in err
    assert f"no node is named by that, and training goes on; more is in {tmp_path}/preflight_all.log" in err
    file.write_text(json.dumps(told))
    out, err = printed("1")
    assert out == "n2\n"
    assert "not fit to train: n2; more is in" in err
    assert "  n2: clock: why\n" in err
    file.write_text(json.dumps(report(("rates", "warning", "n1"))))
    assert printed("0") == ("", "")


def test_looking_at_nodes_ends_when_it_takes_too_long_or_the_job_is_asked_to_stop(tmp_path):
    """The script's own function, with an srun that runs the command here."""
    text = render(job(preflight=True))
    assert "sleep 1 &" in text
    look = text[text.index("look() {") : text.index("if ((warned + terminated == 0)); then\n    looked=0")].replace(
        "sleep 1 &", "sleep 0.1 &"
    )
    (tmp_path / "srun").write_text('#!/bin/bash\nshift 3\nexec "$@"\n')
    (tmp_path / "srun").chmod(0o755)

    def looked(limit, command, *, before=":"):
        script = f"set -u; warned=0 terminated=0; trap terminated=1 TERM\n{look}\n{before}\nlook {limit} log {command}; echo $? $terminated"
        environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_NUM_NODES": "1"}
        began = time.monotonic()
        done = subprocess.run(["bash", "-c", script], cwd=tmp_path, env=environment, timeout=20, capture_output=True, text=True, check=True)
        assert time.monotonic() - began < 5
        return done.stdout.split()

    assert looked(60, "bash -c 'echo said; exit 7'") == ["7", "0"]
    assert (tmp_path / "log").read_text() == "said\n"
    assert looked(0, "sleep 19") == ["124", "0"]
    assert looked(60, "sleep 19", before="{ sleep 0.3; kill $$; } &") == ["143", "1"]
