"""Jobs on a real Slurm: submitted, warned, preempted, requeued, cancelled, failing, swept, and what they leave behind.

The cluster has four nodes of two CPUs. All jobs of the first part are submitted at once and looked at in turn: the one that is
disturbed has n1 and n2 for itself.
"""

import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

from tests.distributed.launching import REPOSITORY
from tests.unit.small_recipe import says

RECIPE = """
run: {name: job, device: cpu, max_steps: 60, seed: 3}
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
CANCELLED = "we ird'\"; $(touch HACKED) `touch HACKED` # %j &"
"""The name of a job, and of its folder."""


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
            [sys.executable, "-m", "launcher.cli.main", *map(str, words)],
            cwd=self.folder,
            env=self.cluster.environment | {"PYTHONPATH": str(REPOSITORY)},
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        assert done.returncode == status, (
            f"{words}: {done.returncode}\n{done.stdout}{done.stderr}\n{self.cluster.diagnosis()}"
        )
        return done.stdout + done.stderr

    def begin(self, *words):
        """Starts a command that goes on; `communicate` ends it."""
        environment = self.cluster.environment | {
            "PYTHONPATH": str(REPOSITORY),
            "PYTHONUNBUFFERED": "1",
        }
        command = [sys.executable, "-m", "launcher.cli.main", *words]
        return subprocess.Popen(
            command,
            cwd=self.folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def submit(self, name, *words):
        """Returns the job's id."""
        said = self.launcher("submit", "recipe=job.yaml", f"run.name={json.dumps(name)}", *words)
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

    def submission(self, name):
        """What is kept of the job that was submitted first."""
        return json.loads(
            (self.run_dir(name) / "slurm/submissions.jsonl").read_text().splitlines()[0]
        )

    def successors(self, name):
        """Ids of the jobs that go on where another one was ended, by Slurm's state of each."""
        lines = map(
            json.loads, (self.run_dir(name) / "slurm/submissions.jsonl").read_text().splitlines()
        )
        return {line["job"]: self.cluster.state(line["job"]) for line in lines if "after" in line}

    def starts(self, name):
        return (
            len(self.events(name, "started"))
            if (self.run_dir(name) / "events.jsonl").exists()
            else 0
        )

    def log(self, name):
        return "".join(
            log.read_text() for log in sorted((self.run_dir(name) / "slurm").glob("job_*.log"))
        )

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
        self._wait(
            lambda: self.cluster.state(job) in over, name, seconds, f"the end of job {job} ({name})"
        )
        return self.cluster.state(job)

    def _wait(self, condition, name, seconds, what):
        try:
            self.cluster.wait_for(condition, seconds, what)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.all_logs(name)}") from None


def final_state(run_dir):
    newest = sorted((run_dir / "checkpoints").glob("step_*"))[-1]
    return {
        f"{file.name}/{name}": tensor
        for file in newest.glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }


def same_as(jobs, name, other):
    """Each step once, the same losses, and the same bits in the end."""
    mine, whole = jobs.records(name), jobs.records(other)
    assert (
        [line["step"] for line in mine]
        == [line["step"] for line in whole]
        == list(range(1, len(whole) + 1))
    )
    assert [(line["loss"], line["grad_norm"]) for line in mine] == [
        (line["loss"], line["grad_norm"]) for line in whole
    ]
    state, expected = final_state(jobs.run_dir(name)), final_state(jobs.run_dir(other))
    assert state.keys() == expected.keys()
    assert len(state) > 8
    for key, tensor in state.items():
        assert torch.equal(
            tensor.reshape(-1).view(torch.uint8), expected[key].reshape(-1).view(torch.uint8)
        ), key
    return True


@pytest.fixture(scope="module")
def jobs(cluster, folder):
    """All jobs of the first part, submitted."""
    jobs = Jobs(cluster, folder)
    (folder / "fail").touch()
    jobs.disturbed = jobs.submit(
        "disturbed",
        "nodes=2",
        "cpus=2",
        "sbatch_extra=--nodelist=n1,n2",
        f"data.arguments.fail={folder}/no",
    )
    whole = [
        "run.name=whole",
        "nodes=2",
        "gpus_per_node=1",
        "cpus=1",
        OTHERS,
        f"data.arguments.fail={folder}/no",
    ]
    jobs.whole = jobs.begin("submit", "recipe=job.yaml", *whole, "--follow")
    cluster.wait_for(
        lambda: (jobs.run_dir("whole") / "slurm/submissions.jsonl").exists(), 60, "the submission"
    )
    jobs.cancelled = jobs.submit(
        CANCELLED, "cpus=1", OTHERS, f"data.arguments.fail={folder}/no", "run.max_steps=5000"
    )
    kill = "[ $# -gt 0 ] || { until [ -s runs/killed/metrics.jsonl ]; do sleep 0.2; done; kill -KILL $$; } &"
    jobs.killed = jobs.submit(
        "killed", "cpus=1", OTHERS, f"data.arguments.fail={folder}/no", f"setup={kill}"
    )
    jobs.failing = jobs.submit("failing", "cpus=1", OTHERS)
    sweep = [
        "sweep.optimizer.learning_rate=1e-3,2e-3,3e-3,4e-3",
        "throttle=2",
        "run.max_steps=2",
        "cpus=1",
    ]
    jobs.sweep = jobs.submit("sweep", *sweep, OTHERS, f"data.arguments.fail={folder}/no")
    jobs.refused = jobs.submit(
        "refused",
        "cpus=1",
        "sbatch_extra=--hold",
        "sbatch_extra=--exclude=n1,n2",
        f"data.arguments.fail={folder}/no",
    )
    (recipe,) = (jobs.run_dir("refused") / "slurm").glob("recipe_*.yaml")
    recipe.write_text(recipe.read_text().replace("seed:", "sed:"))
    cluster.run("scontrol", "release", jobs.refused)
    yield jobs
    jobs.whole.kill()
    cluster.run("scancel", "--user=root")


def test_a_second_submission_of_a_run_folder_is_refused(jobs):
    said = jobs.launcher("submit", "recipe=job.yaml", "run.name=disturbed", status=2)
    assert f"runs/disturbed has job {jobs.disturbed} already" in said
    assert f"scancel {jobs.disturbed}" in said
    assert jobs.launcher(
        "submit",
        "recipe=job.yaml",
        "run.name=sweep",
        "sweep.optimizer.learning_rate=5e-3,4e-3",
        status=2,
    )
    assert not (jobs.run_dir("sweep") / "learning_rate=5e-3/slurm/submissions.jsonl").exists()


def test_warned_requeued_and_preempted_the_run_ends_bit_identical(jobs):
    """A warning before a time limit, `scontrol requeue`, and a partition of higher priority, in one run."""
    cluster, name, job = jobs.cluster, "disturbed", jobs.disturbed
    (jobs.folder / "job.yaml").rename(jobs.folder / "other.yaml")  # the job has what it needs
    try:
        jobs.trains(name, start=1)
        # On a loaded machine Slurm says for a while that there is no such job
        warn = ("scancel", "--batch", "--signal=USR1", job)
        cluster.wait_for(
            lambda: cluster.run(*warn, check=False).returncode == 0, 30, "the job is warned"
        )
        jobs.trains(name, start=2)
        cluster.run("scontrol", "requeue", job)
        jobs.trains(name, start=3)
        high = cluster.run(
            "sbatch",
            "--parsable",
            "-p",
            "high",
            "-N2",
            "--nodelist=n1,n2",
            "--exclusive",
            "--output=/dev/null",
            "--wrap=:",
        )
        assert jobs.ends(name, job) == "COMPLETED"
        assert cluster.state(high.stdout.strip()) == "COMPLETED"
    finally:
        (jobs.folder / "other.yaml").rename(jobs.folder / "job.yaml")
    assert jobs.status(name)["state"] == "finished"
    reasons = [event["reason"] for event in jobs.events(name, "stopped")]
    assert len(reasons) == 3
    assert set(reasons) <= (
        {"SIGUSR1"} if cluster.proctrack == "cgroup" else {"SIGUSR1", "SIGTERM"}
    )
    log = jobs.log(name)
    assert log.count("warned by Slurm, saved: requeued") == 1, log
    assert log.count("preempted, saved: requeued") == 1, log
    assert log.count("Slurm has requeued the job itself") == 1, log
    ends = [event["step"] for event in jobs.events(name, "stopped")]
    assert ends == [event["step"] for event in jobs.events(name, "resumed")], (
        "nothing was trained twice"
    )
    assert jobs.starts(name) == 4
    logs = jobs.run_dir(name) / f"slurm/job_{job}"
    assert {str(file.relative_to(logs)) for file in logs.rglob("node_*")} == {
        f"restart_{restart}/node_{node}.log" for restart in range(4) for node in ("n1", "n2")
    }
    assert jobs.whole.wait(timeout=180) == 0
    assert same_as(jobs, name, "whole")


def test_a_job_that_is_killed_without_a_warning_is_resumed(jobs):
    """Its script cannot requeue it: its successor resumes the run, and is the last job of it."""
    name = "killed"
    assert jobs.ends(name, jobs.killed) == "FAILED"
    successor = next(iter(jobs.successors(name)))
    assert jobs.ends(name, successor) == "COMPLETED"
    assert jobs.status(name)["state"] == "finished"
    assert jobs.starts(name) == 2
    assert [line["step"] for line in jobs.records(name)] == list(range(1, 61))
    for run in (name, "whole"):
        assert all(state != "PENDING" for state in jobs.successors(run).values()), (
            "removed when the run is finished"
        )


def test_a_cancelled_job_has_saved_and_is_not_requeued(jobs):
    jobs.trains(CANCELLED, start=1)
    jobs.cluster.run("scancel", jobs.cancelled)
    assert jobs.ends(CANCELLED, jobs.cancelled) == "CANCELLED"
    status = jobs.status(CANCELLED)
    assert status["state"] == "stopped"
    assert (jobs.run_dir(CANCELLED) / f"checkpoints/step_{status['step']:08}/commit.json").exists()
    assert [event["step"] for event in jobs.events(CANCELLED, "saved")][-1] == status["step"]
    assert (
        jobs.cluster.run("squeue", "-h", "-t", "all", "-j", jobs.cancelled, "-o", "%j").stdout
        == f"{CANCELLED}\n"
    )
    assert "terminated, saved: not requeued" in jobs.log(CANCELLED)
    assert set(jobs.successors(CANCELLED).values()) == {"CANCELLED"}
    assert not list(jobs.folder.rglob("HACKED"))
    assert not (REPOSITORY / "HACKED").exists()


def test_follow_prints_the_run_and_how_it_ends(jobs):
    said, _ = jobs.whole.communicate(timeout=270)
    assert jobs.whole.returncode == 0, said
    snapshot = jobs.submission("whole")
    for line in (
        f"submitted job {snapshot['job']}: whole, 2 nodes x 1 GPU, 30 at a time",
        "  run folder  runs/whole",
        f"  log         runs/whole/slurm/job_{snapshot['job']}.log",
        f"-- job {snapshot['job']}: running",
        "finished after 60 of 60 steps in ...",
        "runs/whole: finished after step 60",
    ):
        assert any(
            says(line, printed) or says(f"{line}...", printed) for printed in said.splitlines()
        ), f"{line}\n{said}"


def test_the_job_sees_what_it_asked_for(jobs):
    assert jobs.whole.wait(timeout=270) == 0
    assert jobs.starts("whole") == 1
    for rank in range(2):
        assert (
            "devices: 0; threads: 1" in (jobs.run_dir("whole") / f"log/rank_{rank}.log").read_text()
        )
    job = jobs.cluster.job(jobs.submission("whole")["job"])
    assert job["NumNodes"] == "2"
    assert job["TresPerNode"] == "gres:gpu:1"
    assert job["Requeue"] == "1"


def test_a_recipe_that_is_at_fault_is_not_tried_again(jobs):
    assert jobs.ends("refused", jobs.refused) == "FAILED"
    assert jobs.cluster.job(jobs.refused)["ExitCode"] == "2:0"
    assert jobs.cluster.job(jobs.refused)["Restarts"] == "0"
    assert "run.sed: unknown key; did you mean seed?" in jobs.log("refused")


def test_a_run_that_fails_three_times_without_a_checkpoint_is_given_up(jobs):
    name = "failing"
    assert jobs.ends(name, jobs.failing, 180) == "FAILED"
    status = jobs.status(name)
    assert (status["state"], status["reason"]) == ("failed", "max_failures")
    assert "3 in a row without a new checkpoint, of slurm.max_failures=3" in status["error"]
    assert "a failure of this test" in status["error"]
    assert jobs.starts(name) == 3
    assert set(jobs.successors(name).values()) == {"CANCELLED"}


def test_a_sweep_is_an_array_with_a_run_folder_each(jobs):
    rates = ["1e-3", "2e-3", "3e-3", "4e-3"]
    for task in range(4):
        assert (
            jobs.ends(f"sweep/learning_rate={rates[task]}", f"{jobs.sweep}_{task}") == "COMPLETED"
        )
    for rate in rates:
        line = jobs.records(f"sweep/learning_rate={rate}")[-1]
        assert (line["step"], line["learning_rate"]) == (2, float(rate))
    assert jobs.cluster.job(f"{jobs.sweep}_0")["ArrayTaskThrottle"] == "2"
    table = jobs.launcher("status", "runs/sweep").splitlines()
    assert [line.split()[:2] for line in table if "learning_rate" in line] == [
        [f"learning_rate={rate}", "finished"] for rate in rates
    ]


# What takes minutes


@pytest.fixture(scope="module")
def alone(cluster, tmp_path_factory):
    """A folder of its own, with an undisturbed run."""
    folder = tmp_path_factory.mktemp("alone")
    (folder / "job.yaml").write_text(
        RECIPE.replace("FOLDER", str(folder)).replace("every_steps: 30", "every_steps: 5")
    )
    jobs = Jobs(cluster, folder)
    jobs.launcher(
        "submit",
        "recipe=job.yaml",
        "run.name=whole",
        "nodes=2",
        "cpus=2",
        "data.arguments.seconds=0",
        "--wait",
    )
    yield jobs
    cluster.run("scancel", "--user=root")


@pytest.fixture
def whole_cluster(alone):
    yield alone.cluster
    for node in alone.cluster.nodes:
        alone.cluster.run("scontrol", "update", f"NodeName={node}", "State=RESUME", check=False)
    alone.cluster.wait_for(
        lambda: alone.cluster.idle() == len(alone.cluster.nodes), 90, "all nodes"
    )


@pytest.mark.long
@pytest.mark.parametrize("node", ["n1", "n2"])
def test_a_node_is_lost(alone, whole_cluster, node):
    """n1 runs the script and rank 0."""
    name = f"lost-{node}"
    job = alone.submit(name, "nodes=2", "cpus=2")
    alone.trains(name, start=1, steps=12)
    assert alone.cluster.job(job)["NodeList"] == "n[1-2]"
    alone.cluster.crash(node)
    try:
        assert alone.ends(name, job, 180) == "COMPLETED"
        assert alone.starts(name) == 2
        assert same_as(alone, name, "whole")
    finally:
        alone.cluster.boot(node)


@pytest.mark.long
def test_slurm_gives_up_a_node_where_the_run_continues(alone, whole_cluster):
    """Two copies of one run: the old one ends without writing. (Of several nodes the others would end it: Slurm reaches them.)"""
    cluster, name = alone.cluster, "twice"
    alone.launcher(
        "submit",
        "recipe=job.yaml",
        "run.name=whole-1",
        "cpus=2",
        "data.arguments.seconds=0",
        "--wait",
    )
    job = alone.submit(
        name, "cpus=2", "data.arguments.seconds=0.15", "sbatch_extra=--exclude=n3,n4"
    )
    alone.trains(name, start=1, steps=6)
    node = cluster.job(job)["NodeList"]
    cluster.kill_daemon(node)
    try:
        assert alone.ends(name, job, 240) == "COMPLETED"
        assert alone.starts(name) == 2
        assert same_as(alone, name, "whole-1")
        log = alone.run_dir(name) / f"slurm/job_{job}/restart_0/node_{node}.log"
        cluster.wait_for(
            lambda: "this run ends, and writes nothing more" in log.read_text(), 60, log.read_text()
        )
    finally:
        cluster.crash(node)
        cluster.boot(node)


@pytest.mark.long
def test_the_time_limit_itself(alone, whole_cluster):
    """Warned by Slurm; and, once the run is known to need longer than the lead that Slurm has, by the script."""
    name = "limit"
    job = alone.submit(name, "nodes=2", "cpus=2", "time=2", "lead=45", "data.arguments.seconds=0.9")
    assert alone.ends(name, job, 500) == "COMPLETED"
    assert alone.starts(name) >= 3
    log = alone.log(name)
    assert log.count("warned by Slurm, saved") == alone.starts(name) - 1
    assert "s, more than the lead that Slurm has: it starts in" in log
    starts, stops = alone.events(name, "started"), alone.events(name, "stopped")
    assert all(event["reason"] == "SIGUSR1" for event in stops)
    assert 40 < stops[1]["time"] - starts[1]["time"] < 75, (
        "60 s before the end of two minutes, which begin before the run does"
    )
    assert same_as(alone, name, "whole")


@pytest.mark.long
def test_a_save_that_does_not_end_before_the_time_limit(alone, whole_cluster):
    """Slurm ends the first start of the job in its save; the successor resumes from the checkpoint before."""
    slow, python, name = alone.folder / "slow", alone.folder / "slow_python", "slow"
    slow.mkdir()
    (slow / "sitecustomize.py").write_text(
        "import os, time\n"
        "if os.environ.get('LAUNCHER_START') == '0' and 'RANK' in os.environ:\n"
        "    import pathlib\n"
        "    original = pathlib.Path.mkdir\n"
        "    def mkdir(path, *args, **more):\n"
        "        if 'step_' in str(path) and list(path.parent.glob('step_*')): time.sleep(600)\n"
        "        return original(path, *args, **more)\n"
        "    pathlib.Path.mkdir = mkdir\n"
    )
    python.write_text(
        f'#!/bin/sh\nexport PYTHONPATH="{slow}:$PYTHONPATH"\nexec {sys.executable} "$@"\n'
    )
    python.chmod(0o755)
    job = alone.submit(
        name,
        "nodes=2",
        "cpus=2",
        "time=2",
        "lead=20",
        f"python={python}",
        "data.arguments.seconds=0.9",
    )
    assert alone.ends(name, job, 300) == "TIMEOUT"
    successor = next(iter(alone.successors(name)))
    whole_cluster.run("scontrol", "update", f"JobId={successor}", "TimeLimit=10")
    assert alone.ends(name, successor, 300) == "COMPLETED"
    assert alone.events(name, "resumed")[0]["step"] > 0
    assert same_as(alone, name, "whole")
    assert "PENDING" not in alone.successors(name).values()


@pytest.mark.long
def test_a_requeue_resumes_from_the_run_and_not_from_its_starting_point(alone, whole_cluster):
    """`checkpoint.resume=PATH` applies to the first start only."""
    name, start = "from-path", alone.run_dir("whole") / "checkpoints/step_00000005"
    job = alone.submit(
        name, "nodes=2", "cpus=2", f"checkpoint.resume={start}", "checkpoint.allow_changes=true"
    )
    alone.trains(name, start=1, steps=12)
    alone.cluster.run("scontrol", "requeue", job)
    assert alone.ends(name, job, 180) == "COMPLETED"
    first, second = (event["step"] for event in alone.events(name, "resumed"))
    assert first == 5
    assert second >= 15
    mine, whole = alone.records(name), alone.records("whole")
    assert [line["step"] for line in mine] == list(range(6, 61))
    assert [line["loss"] for line in mine] == [line["loss"] for line in whole[5:]]


@pytest.mark.long
def test_on_other_numbers_of_nodes(alone, whole_cluster):
    """Two nodes, then three, then two again."""
    cluster, name = alone.cluster, "elastic"
    for node in ("n3", "n4"):
        cluster.run("scontrol", "update", f"NodeName={node}", "State=DRAIN", "Reason=test")
    job = alone.submit(name, "nodes=2-3", "cpus=2")
    alone.trains(name, start=1)
    cluster.run("scontrol", "update", "NodeName=n3", "State=RESUME")
    cluster.run("scancel", "--batch", "--signal=USR1", job)
    alone.trains(name, start=2)
    cluster.run("scontrol", "update", "NodeName=n2", "State=DRAIN", "Reason=test")
    cluster.run("scancel", "--batch", "--signal=USR1", job)
    assert alone.ends(name, job) == "COMPLETED"
    assert [event["ranks"] for event in alone.events(name, "started")] == [2, 3, 2]
    assert [line["step"] for line in alone.records(name)] == list(range(1, 61))
    assert alone.records(name)[-1]["samples_seen"] == 720


@pytest.mark.long
def test_preempted_where_only_a_term_comes(alone, whole_cluster):
    cluster, name, configuration = alone.cluster, "terminated", alone.cluster.bed / "slurm.conf"
    text = configuration.read_text()
    configuration.write_text(text.replace("SlurmctldParameters=preempt_send_user_signal\n", ""))
    cluster.run("scontrol", "reconfigure")
    try:
        job = alone.submit(
            name, "nodes=4", "cpus=2", "run.max_steps=30", "batch.micro_batch_size=1"
        )
        alone.trains(name, start=1)
        cluster.run(
            "sbatch", "-p", "high", "-N1", "--exclusive", "--output=/dev/null", "--wrap=sleep 1"
        )
        assert alone.ends(name, job) == "COMPLETED"
        assert "preempted, saved: requeued" in alone.log(name)
        assert alone.starts(name) == 2
        assert alone.events(name, "stopped")[0]["step"] == alone.events(name, "resumed")[0]["step"]
    finally:
        configuration.write_text(text)
        cluster.run("scontrol", "reconfigure")


@pytest.mark.long
def test_a_node_that_is_not_fit_is_excluded(alone, whole_cluster):
    python = alone.folder / "python"
    python.write_text(
        '#!/bin/sh\ncase "$*" in *doctor*) [ "$(hostname)" = n2 ] '
        f'&& echo "n2 unfit: GPU 3 is gone" && exit 3;; esac\nexec {sys.executable} "$@"\n'
    )
    python.chmod(0o755)
    name = "unfit"
    job = alone.submit(
        name,
        "nodes=2",
        "cpus=2",
        "preflight=true",
        f"python={python}",
        "exclude=n4",
        "run.max_steps=6",
    )
    assert alone.ends(name, job) == "COMPLETED"
    log = alone.log(name)
    assert "not fit to train: n2" in log
    assert "GPU 3 is gone" in log
    assert (
        "n3 fit: "
        in (alone.run_dir(name) / f"slurm/job_{job}/restart_1/preflight_nodes.log").read_text()
    )
    assert alone.cluster.job(job)["ExcNodeList"] == "n4,n2"
    assert alone.cluster.job(job)["NodeList"] == "n[1,3]"
    assert alone.starts(name) == 1


@pytest.mark.long
def test_a_node_that_differs_from_the_others_is_excluded(alone, whole_cluster):
    """Alone n2 finds nothing wrong with itself: its clock, as the ranks there read it, is ahead."""
    clock, python = alone.folder / "clock", alone.folder / "python_with_clock"
    clock.mkdir()
    shifted = "import os, time\nif 'RANK' in os.environ:\n    read = time.time\n    time.time = lambda: read() + 40\n"
    (clock / "sitecustomize.py").write_text(shifted)
    path = f'[ "$(hostname)" = n2 ] && export PYTHONPATH="{clock}:$PYTHONPATH"'
    python.write_text(
        f'#!/bin/sh\ncase "$*" in *quick=true*) {path};; esac\nexec {sys.executable} "$@"\n'
    )
    python.chmod(0o755)
    name = "beside"
    job = alone.submit(
        name, "nodes=3", "cpus=2", "preflight=true", f"python={python}", "run.max_steps=6"
    )
    assert alone.ends(name, job, 240) == "COMPLETED"
    log, logs = alone.log(name), alone.run_dir(name) / f"slurm/job_{job}"
    assert "preflight: not fit to train: n2; details: " in log
    assert "  n2: clock: 40 s ahead of the other nodes': let chrony or ntpd keep it" in log
    for node in ("n1", "n2", "n3"):
        assert f"{node} fit: " in (logs / "restart_0/preflight_nodes.log").read_text()
    assert json.loads((logs / "restart_0/preflight_all.json").read_text())["bad_nodes"] == ["n2"]
    assert json.loads((logs / "restart_1/preflight_all.json").read_text())["fit"] is True
    assert alone.cluster.job(job)["ExcNodeList"] == "n2"
    assert alone.cluster.job(job)["NodeList"] == "n[1,3-4]"
    assert alone.starts(name) == 1
    assert alone.status(name)["state"] == "finished"


@pytest.mark.long
def test_a_run_of_a_sweep_is_requeued_alone(alone, whole_cluster):
    """The last task's job has the array's own id: by that, all would be requeued."""
    array = alone.submit(
        "array", "sweep.optimizer.learning_rate=1e-3,2e-3", "cpus=2", "data.arguments.seconds=0.1"
    )
    names = [f"array/learning_rate={rate}" for rate in ("1e-3", "2e-3")]
    for task, name in enumerate(names):
        alone.trains(name, start=1)
        alone.cluster.run("scancel", "--batch", "--signal=USR1", f"{array}_{task}")
    for task, name in enumerate(names):
        assert alone.ends(name, f"{array}_{task}") == "COMPLETED"
        assert alone.starts(name) == 2
        assert alone.events(name, "stopped")[0]["step"] == alone.events(name, "resumed")[0]["step"]
