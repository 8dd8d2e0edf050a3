"""Jobs on a real Slurm: submitted, warned, preempted, requeued, cancelled, failing, swept, and what they leave behind.

The cluster has four nodes of two CPUs. All jobs of the first part are submitted at once and looked at in turn: the one that is
disturbed has n1 and n2 for itself.
"""

import json
import shutil
import subprocess
import sys
import time

import pytest
import torch
from safetensors.torch import load_file

from tests.distributed.launching import REPOSITORY

RECIPE = """
run: {name: job, max_steps: 60, seed: 3}
model: {builder: "tests.slurm.job:model"}
data: {builder: "tests.slurm.job:data", arguments: {seconds: 0.05, fail: FOLDER/fail}, workers: 0}
batch: {global_batch_size: 12, micro_batch_size: 2}
strategy: {kind: ddp, mixed_precision: null}
optimizer: {learning_rate: 2.0e-3}
schedule: {kind: constant, warmup_steps: 2}
checkpoint: {every_steps: 30, keep_last: 20}
slurm: {max_restarts: 0, lead: 60, time: "30"}
"""
OTHERS = "sbatch_extra=--exclude=n1,n2"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("jobs")
    (folder / "job.yaml").write_text(RECIPE.replace("FOLDER", str(folder)))
    return folder


class Jobs:
    """`launcher submit` in a folder, as a user types it there."""

    def __init__(self, cluster, folder):
        self.cluster, self.folder = cluster, folder

    def launcher(self, *words, status=0, timeout=120):
        done = subprocess.run(
            [sys.executable, "-m", "launcher.cli", *map(str, words)],
            cwd=self.folder,
            env=self.cluster.environment | {"PYTHONPATH": str(REPOSITORY)},
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        assert done.returncode == status, f"{words}: {done.returncode}\n{done.stdout}{done.stderr}\n{self.cluster.diagnosis()}"
        return done.stdout + done.stderr

    def submit(self, name, *words):
        """Returns the job's id."""
        said = self.launcher("submit", "recipe=job.yaml", f"run.name={name}", *words)
        return said.split("submitted job ")[1].split(":")[0]

    def run_dir(self, name):
        return self.folder / "runs" / name

    def records(self, name):
        file = self.run_dir(name) / "metrics.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        return [json.loads(line) for line in lines if line.endswith("}")]

    def status(self, name):
        return json.loads((self.run_dir(name) / "status.json").read_text())

    def events(self, name, event):
        lines = map(json.loads, (self.run_dir(name) / "events.jsonl").read_text().splitlines())
        return [line for line in lines if line["event"] == event]

    def starts(self, name):
        return len(self.events(name, "started")) if (self.run_dir(name) / "events.jsonl").exists() else 0

    def log(self, name):
        return "".join(log.read_text() for log in sorted((self.run_dir(name) / "slurm").glob("job_*.log")))

    def all_logs(self, name):
        files = sorted((self.run_dir(name) / "slurm").rglob("*.log"))
        return "\n".join(f"--- {file.name}\n{file.read_text()[-3000:]}" for file in files)

    def trains(self, name, *, start, steps=3, seconds=90):
        """Waits until the run has trained so many steps in its n-th start."""

        def condition():
            if self.starts(name) < start:
                return False
            began = self.events(name, "started")[start - 1]["time"]
            return sum(line["time"] > began for line in self.records(name)) >= steps

        self._wait(condition, name, seconds, f"{steps} steps of {name} in start {start}")

    def ends(self, name, job, seconds=120):
        """Waits until the job has left the queue; returns its state."""
        over = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL"}
        self._wait(lambda: self.cluster.state(job) in over, name, seconds, f"the end of job {job} ({name})")
        return self.cluster.state(job)

    def _wait(self, condition, name, seconds, what):
        try:
            self.cluster.wait_for(condition, seconds, what)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.all_logs(name)}") from None


def final_state(run_dir):
    newest = sorted((run_dir / "checkpoints").glob("step_*"))[-1]
    return {f"{file.name}/{name}": tensor for file in newest.glob("*.safetensors") for name, tensor in load_file(file).items()}


def same_as(jobs, name, other):
    """Each step once, the same losses, and the same bits in the end."""
    mine, whole = jobs.records(name), jobs.records(other)
    assert [line["step"] for line in mine] == [line["step"] for line in whole] == list(range(1, len(whole) + 1))
    assert [(line["loss"], line["grad_norm"]) for line in mine] == [(line["loss"], line["grad_norm"]) for line in whole]
    state, expected = final_state(jobs.run_dir(name)), final_state(jobs.run_dir(other))
    assert state.keys() == expected.keys()
    assert len(state) > 8
    for key, tensor in state.items():
        assert torch.equal(tensor.reshape(-1).view(torch.uint8), expected[key].reshape(-1).view(torch.uint8)), key
    return True


@pytest.fixture(scope="module")
def jobs(cluster, folder):
    """All jobs of the first part, submitted."""
    jobs = Jobs(cluster, folder)
    (folder / "fail").touch()
    jobs.disturbed = jobs.submit("disturbed", "nodes=2", "cpus=2", "sbatch_extra=--nodelist=n1,n2", f"data.arguments.fail={folder}/no")
    jobs.whole = jobs.submit("whole", "nodes=2", "gpus_per_node=1", "cpus=1", OTHERS, f"data.arguments.fail={folder}/no")
    jobs.cancelled = jobs.submit("cancelled", "cpus=1", OTHERS, f"data.arguments.fail={folder}/no", "run.max_steps=5000")
    jobs.failing = jobs.submit("failing", "cpus=1", OTHERS)
    sweep = ["sweep.optimizer.learning_rate=1e-3,2e-3,3e-3,4e-3", "throttle=2", "run.max_steps=2", "cpus=1"]
    jobs.sweep = jobs.submit("sweep", *sweep, OTHERS, f"data.arguments.fail={folder}/no")
    yield jobs
    cluster.run("scancel", "--user=root")


def test_a_second_submission_of_a_run_folder_is_refused(jobs):
    said = jobs.launcher("submit", "recipe=job.yaml", "run.name=disturbed", status=2)
    assert f"runs/disturbed has job {jobs.disturbed} already" in said
    assert f"scancel {jobs.disturbed}" in said
    assert jobs.launcher("submit", "recipe=job.yaml", "run.name=sweep", "sweep.optimizer.learning_rate=5e-3,4e-3", status=2)
    assert not (jobs.run_dir("sweep") / "learning_rate=5e-3/slurm/submissions.jsonl").exists()


def test_a_cancelled_job_has_saved_and_does_not_rise_again(jobs):
    jobs.trains("cancelled", start=1)
    jobs.cluster.run("scancel", jobs.cancelled)
    assert jobs.ends("cancelled", jobs.cancelled) == "CANCELLED"
    status = jobs.status("cancelled")
    assert status["state"] == "stopped"
    assert (jobs.run_dir("cancelled") / f"checkpoints/step_{status['step']:08}/commit.json").exists()
    assert [event["step"] for event in jobs.events("cancelled", "saved")][-1] == status["step"]


def test_warned_requeued_and_preempted_the_run_ends_bit_identical(jobs):
    """A warning before a time limit, `scontrol requeue`, and a partition of higher priority, in one run."""
    cluster, name, job = jobs.cluster, "disturbed", jobs.disturbed
    (jobs.folder / "job.yaml").rename(jobs.folder / "other.yaml")  # the job has what it needs
    try:
        jobs.trains(name, start=1)
        cluster.run("scancel", "--batch", "--signal=USR1", job)
        jobs.trains(name, start=2)
        cluster.run("scontrol", "requeue", job)
        jobs.trains(name, start=3)
        high = cluster.run("sbatch", "--parsable", "-p", "high", "-N2", "--nodelist=n1,n2", "--exclusive", "--output=/dev/null", "--wrap=:")
        assert jobs.ends(name, job) == "COMPLETED"
        assert cluster.state(high.stdout.strip()) == "COMPLETED"
    finally:
        (jobs.folder / "other.yaml").rename(jobs.folder / "job.yaml")
    assert jobs.status(name)["state"] == "finished"
    assert [event["reason"] for event in jobs.events(name, "stopped")] == ["SIGUSR1"] * 3
    log = jobs.log(name)
    assert log.count("warned by Slurm, and saved: goes on in another allocation") == 2, log
    assert log.count("terminated and saved: not requeued by this script") == 1, log
    ends = [event["step"] for event in jobs.events(name, "stopped")]
    assert ends == [event["step"] for event in jobs.events(name, "resumed")], "nothing was trained twice"
    assert jobs.starts(name) == 4
    logs = jobs.run_dir(name) / f"slurm/job_{job}"
    assert {str(file.relative_to(logs)) for file in logs.rglob("node_*")} == {
        f"restart_{restart}/node_{node}.log" for restart in range(4) for node in ("n1", "n2")
    }
    assert jobs.ends("whole", jobs.whole) == "COMPLETED"
    assert same_as(jobs, name, "whole")


def test_the_job_sees_what_it_asked_for(jobs):
    assert jobs.ends("whole", jobs.whole) == "COMPLETED"
    assert jobs.starts("whole") == 1
    for rank in range(2):
        assert "devices: 0; threads: 1" in (jobs.run_dir("whole") / f"log/rank_{rank}.log").read_text()
    job = jobs.cluster.job(jobs.whole)
    assert job["NumNodes"] == "2"
    assert job["TresPerNode"] == "gres:gpu:1"
    assert job["Requeue"] == "1"
    snapshot = json.loads((jobs.run_dir("whole") / "slurm/submissions.jsonl").read_text())
    assert snapshot["job"] == jobs.whole
    assert len(snapshot["commit"]) == 40


def test_a_run_that_fails_three_times_without_a_checkpoint_is_given_up(jobs):
    name = "failing"
    assert jobs.ends(name, jobs.failing, 180) == "FAILED"
    status = jobs.status(name)
    assert (status["state"], status["reason"]) == ("failed", "max_failures")
    assert "3 in a row without a new checkpoint, of slurm.max_failures=3" in status["error"]
    assert "a failure of this test" in status["error"]
    assert jobs.starts(name) == 3


def test_a_sweep_is_an_array_with_a_run_folder_each(jobs):
    rates = ["1e-3", "2e-3", "3e-3", "4e-3"]
    for task in range(4):
        assert jobs.ends(f"sweep/learning_rate={rates[task]}", f"{jobs.sweep}_{task}") == "COMPLETED"
    for rate in rates:
        line = jobs.records(f"sweep/learning_rate={rate}")[-1]
        assert (line["step"], line["learning_rate"]) == (2, float(rate))
    assert jobs.cluster.job(f"{jobs.sweep}_0")["ArrayTaskThrottle"] == "2"
    table = jobs.launcher("status", "runs/sweep").splitlines()
    assert [line.split()[:2] for line in table if "learning_rate" in line] == [[f"learning_rate={rate}", "finished"] for rate in rates]
