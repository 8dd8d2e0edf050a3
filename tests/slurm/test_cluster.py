"""Jobs on a real Slurm: submission, warning, preemption, requeue, cancellation, failures, sweeps.

The cluster has eight nodes with two CPUs each. The fixture `jobs` submits all jobs of the first
part at once. The job `disturbed` uses n1 and n2, `lost` two of n5 to n7, `limited` n8, and all others n3 and n4.
"""

import contextlib
import functools
import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

from tests import REPOSITORY
from tests.distributed.launching import amount
from tests.unit.small_recipe import says

RECIPE = """
run: {name: job, device: cpu, max_steps: 60, seed: 3}
model: {builder: "tests.slurm.job:model"}
data: {builder: "tests.slurm.job:data", arguments: {seconds: 0.05, fail: FOLDER/no, slow: null, slow_seconds: 8}, workers: 0}
batch: {global_batch_size: 12, micro_batch_size: 2}
strategy: {kind: ddp, mixed_precision: null}
optimizer: {learning_rate: 2.0e-3}
schedule: {kind: constant, warmup_steps: 2}
checkpoint: {every_steps: EVERY, keep_last: 20}
slurm: {max_restarts: 0, lead: 60, time: "30"}
"""
WARN = ("scancel", "--batch", "--signal=USR1")
OTHERS = "sbatch_extra=--exclude=n1,n2,n5,n6,n7,n8"
CANCELLED = "we ird'\"; $(touch HACKED) `touch HACKED` # %j &"
"""Name of a job and of its folder."""


class Jobs:
    """Runs launcher commands in a folder and reads the files of its runs."""

    limited = disturbed = lost = cancelled = killed = failing = sweep = refused = ""
    """Ids of the jobs of the first part."""
    whole: subprocess.Popen[str]

    def __init__(self, cluster, folder, *, every_steps=30):
        self.cluster, self.folder = cluster, folder
        recipe = RECIPE.replace("FOLDER", str(folder)).replace("EVERY", str(every_steps))
        (folder / "job.yaml").write_text(recipe)
        self.fails = f"data.arguments.fail={folder}/fail"
        """With this override a run fails while the file exists."""
        (folder / "fail").touch()

    def slow(self, name):
        """Slows a run down until `disturbed_enough`. Returns the override for it."""
        (self.folder / f"slow_{name}").touch()
        return f"data.arguments.slow={self.folder}/slow_{name}"

    def disturbed_enough(self, name):
        (self.folder / f"slow_{name}").unlink()

    def start_command(self, *words):
        """Starts a command in the background. `communicate` waits for its end."""
        variables = {"PYTHONPATH": str(REPOSITORY), "PYTHONUNBUFFERED": "1"}
        return subprocess.Popen(
            [sys.executable, "-m", "launcher.cli.main", *words],
            cwd=self.folder,
            env=self.cluster.environment | variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def launcher(self, *words, status=0):
        process = self.start_command(*words)
        output, _ = process.communicate(timeout=120)
        ended = f"{words}: {process.returncode}\n{output}\n"
        assert process.returncode == status, ended + self.cluster.diagnosis()
        return output

    def submit(self, name, *words, status=0):
        """Returns the id of the job, or the output if the submission is refused."""
        recipe = ["recipe=job.yaml", f"run.name={json.dumps(name)}"]
        output = self.launcher("submit", *recipe, *words, status=status)
        return output if status else output.partition("submitted job ")[2].partition(":")[0]

    def run_dir(self, name):
        return self.folder / "runs" / name

    def lines(self, name, file):
        """Reads a .jsonl file, without an incomplete last line."""
        file = self.run_dir(name) / file
        lines = file.read_text().splitlines() if file.exists() else []
        return [json.loads(line) for line in lines if line.endswith("}")]

    def records(self, name):
        return self.lines(name, "metrics.jsonl")

    def steps(self, name):
        return [line["step"] for line in self.records(name)]

    def status(self, name):
        return json.loads((self.run_dir(name) / "status.json").read_text())

    def events(self, name, event, key="step"):
        events = self.lines(name, "events.jsonl")
        return [line[key] for line in events if line["event"] == event]

    def successors(self, name):
        """Returns the Slurm state of each successor job, by id."""
        lines = self.lines(name, "slurm/submissions.jsonl")
        return {line["job"]: self.cluster.state(line["job"]) for line in lines if "after" in line}

    def starts(self, name):
        return len(self.events(name, "started", "time"))

    def log(self, name):
        logs = sorted((self.run_dir(name) / "slurm").glob("job_*.log"))
        return "".join(log.read_text() for log in logs)

    def wait_for_steps(self, name, *, start, steps=3):
        """Waits until start number `start` of the run has trained `steps` steps."""

        def condition():
            began = self.events(name, "started", "time")[start - 1 : start]
            lines = self.records(name) if began else []
            return sum(line["time"] > began[0] for line in lines) >= steps

        self._wait(condition, name, 90, f"{steps} steps of {name} in start {start}")

    def wait_for_end(self, name, job, expected="COMPLETED", seconds=120):
        """Waits until the job has ended, and asserts its final state."""
        over, what = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL"}, f"job {job}"
        self._wait(lambda: self.cluster.state(job) in over, name, seconds, f"the end of {what}")
        assert self.cluster.state(job) == expected, self.log(name)
        return True

    def _wait(self, condition, name, seconds, what):
        try:
            self.cluster.wait_for(condition, seconds, what)
        except AssertionError as error:
            files = sorted((self.run_dir(name) / "slurm").rglob("*.log"))
            logs = "\n".join(f"--- {file.name}\n{file.read_text()[-3000:]}" for file in files)
            raise AssertionError(f"{error}\n{logs}") from None


def final_state(run_dir):
    newest = sorted((run_dir / "checkpoints").glob("step_*"))[-1]
    return {
        f"{file.name}/{name}": tensor.reshape(-1).view(torch.uint8)
        for file in newest.glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }


def are_equal_runs(jobs, name, other):
    """Asserts that two runs have equal steps and losses and a bit-identical final state."""
    records, reference = jobs.records(name), jobs.records(other)
    assert jobs.steps(name) == jobs.steps(other) == list(range(1, len(reference) + 1))
    for key in ("loss", "grad_norm"):
        assert [line[key] for line in records] == [line[key] for line in reference]
    state, expected = final_state(jobs.run_dir(name)), final_state(jobs.run_dir(other))
    assert state.keys() == expected.keys()
    assert len(state) > 8
    assert [key for key, bits in state.items() if not torch.equal(bits, expected[key])] == []
    return True


@pytest.fixture(scope="module")
def jobs(request, cluster, tmp_path_factory):
    """Submits all jobs of the first part; those of long tests only if these are selected."""
    jobs = Jobs(cluster, tmp_path_factory.mktemp("jobs"))
    everything = amount(request) == "all"
    # As many threads as `whole`, with whose bits they are compared. A stop takes up to two steps of
    # three micro-batches, and is ended 15 s before the end of slurm.lead
    two = ["nodes=2", "cpus=1", "data.arguments.slow_seconds=2.5"]
    limit = [
        "cpus=2",
        "time=4",  # a start on a loaded machine takes more than a minute
        "lead=45",
        "max_failures=10",
        "sbatch_extra=--nodelist=n8",
        "batch.micro_batch_size=12",
    ]
    if everything:
        jobs.limited = jobs.submit("limited", *limit, jobs.slow("limited"))
    pair = "sbatch_extra=--nodelist=n1,n2"
    jobs.disturbed = jobs.submit("disturbed", *two, pair, jobs.slow("disturbed"))
    rest = ["sbatch_extra=--exclude=n1,n2,n3,n4,n8", "checkpoint.every_steps=5"]
    if everything:
        jobs.lost = jobs.submit("lost", *two, *rest, jobs.slow("lost"))
    undisturbed = ["run.name=whole", "nodes=2", "gpus=1", "cpus=1", OTHERS]
    jobs.whole = jobs.start_command("submit", "recipe=job.yaml", *undisturbed, "--follow")
    submissions = jobs.run_dir("whole") / "slurm/submissions.jsonl"
    cluster.wait_for(submissions.exists, 60, "the submission")
    jobs.cancelled = jobs.submit(CANCELLED, "cpus=1", OTHERS, "run.max_steps=5000")
    kill = "[ $# -gt 0 ] || { until [ -s runs/killed/metrics.jsonl ]; do sleep 0.2; done; kill -KILL $$; } &"
    jobs.killed = jobs.submit("killed", "cpus=1", OTHERS, f"setup={kill}")
    if everything:
        jobs.failing = jobs.submit("failing", "cpus=1", OTHERS, jobs.fails, "max_failures=2")
    sweep = ["sweep.optimizer.learning_rate=1e-3,2e-3", "throttle=1", "run.max_steps=2"]
    jobs.sweep = jobs.submit("sweep", *sweep, "cpus=1", "sbatch_extra=--hold", OTHERS)
    jobs.refused = jobs.submit("refused", "cpus=1", "sbatch_extra=--hold", OTHERS)
    (recipe,) = (jobs.run_dir("refused") / "slurm").glob("recipe_*.yaml")
    recipe.write_text(recipe.read_text().replace("seed:", "sed:"))
    cluster.run("scontrol", "release", jobs.refused)
    if everything:
        cluster.wait_for(lambda: jobs.events("lost", "saved"), 90, "a checkpoint to lose a node")
        assert cluster.job(jobs.lost)["NodeList"] == "n[5-6]"
        cluster.crash("n5")
        jobs.disturbed_enough("lost")
    yield jobs
    jobs.whole.kill()
    cluster.run("scancel", "--user=root")


def test_second_submission_of_a_run_folder_is_refused(jobs):
    output = jobs.submit("disturbed", status=2)
    assert f"runs/disturbed has job {jobs.disturbed} already" in output
    assert f"scancel {jobs.disturbed}" in output
    jobs.submit("sweep", "sweep.optimizer.learning_rate=5e-3,2e-3", status=2)
    assert not (jobs.run_dir("sweep") / "learning_rate=5e-3/slurm/submissions.jsonl").exists()
    jobs.cluster.run("scontrol", "release", jobs.sweep)


def test_interrupted_run_is_bit_identical(request, jobs):
    """One run gets a warning; among the long tests also `scontrol requeue`, and preemption by a
    higher-priority partition, which Slurm announces by SIGTERM only."""
    disturbances = 3 if amount(request) == "all" else 1
    cluster, name, job = jobs.cluster, "disturbed", jobs.disturbed
    (jobs.folder / "job.yaml").rename(
        jobs.folder / "other.yaml"
    )  # the job must not need the original file
    try:
        jobs.wait_for_steps(name, start=1)
        # On a loaded machine, scancel does not find the job for a while
        warn = functools.partial(cluster.run, *WARN, job, check=False)
        cluster.wait_for(lambda: warn().returncode == 0, 30, "the job is warned")
        jobs.wait_for_steps(name, start=2)
        if disturbances > 1:
            cluster.run("scontrol", "requeue", job)
            jobs.wait_for_steps(name, start=3)
            words = ["--parsable", "-p", "high", "-N2", "--nodelist=n1,n2", "--exclusive"]
            high = cluster.run("sbatch", *words, "--output=/dev/null", "--wrap=:").stdout.strip()
            jobs.wait_for_steps(name, start=4, steps=1)
        jobs.disturbed_enough(name)
        assert jobs.wait_for_end(name, job)
        assert disturbances == 1 or cluster.state(high) == "COMPLETED"
    finally:
        (jobs.folder / "other.yaml").rename(jobs.folder / "job.yaml")
    assert jobs.status(name)["state"] == "finished"
    reasons = jobs.events(name, "stopped", "reason")
    assert len(reasons) == disturbances
    possible = {"SIGUSR1"} if cluster.proctrack == "cgroup" else {"SIGUSR1", "SIGTERM"}
    assert set(reasons) <= possible
    log = jobs.log(name)
    assert log.count("warned by Slurm, saved: requeued") == 1, log
    # If scontrol does not answer in time, the log has another reason; the number of starts is asserted
    assert log.count("preempted, saved: requeued") <= 1, log
    assert log.count("Slurm has requeued the job itself") <= 1, log
    assert jobs.events(name, "stopped") == jobs.events(name, "resumed"), (
        "no step may be trained twice"
    )
    assert jobs.starts(name) == disturbances + 1
    logs = jobs.run_dir(name) / f"slurm/job_{job}"
    assert {str(file.relative_to(logs)) for file in logs.rglob("node_*")} == {
        f"restart_{restart}/node_{node}.log"
        for restart in range(disturbances + 1)
        for node in ("n1", "n2")
    }
    assert jobs.whole.wait(timeout=180) == 0
    assert are_equal_runs(jobs, name, "whole")


def test_killed_job_is_resumed_by_its_successor(jobs):
    """The killed script cannot requeue the job. Its successor resumes and finishes the run."""
    name = "killed"
    assert jobs.wait_for_end(name, jobs.killed, "FAILED")
    assert jobs.wait_for_end(name, next(iter(jobs.successors(name))))
    assert jobs.status(name)["state"] == "finished"
    assert jobs.starts(name) == 2
    assert jobs.steps(name) == list(range(1, 61))
    for run in (name, "whole"):
        assert "PENDING" not in jobs.successors(run).values(), (
            "the successor must be removed at the end of the run"
        )


def test_cancelled_job_saves_and_is_not_requeued(jobs):
    jobs.wait_for_steps(CANCELLED, start=1)
    jobs.cluster.run("scancel", jobs.cancelled)
    assert jobs.wait_for_end(CANCELLED, jobs.cancelled, "CANCELLED")
    status = jobs.status(CANCELLED)
    assert status["state"] == "stopped"
    assert (jobs.run_dir(CANCELLED) / f"checkpoints/step_{status['step']:08}/commit.json").exists()
    assert jobs.events(CANCELLED, "saved")[-1] == status["step"]
    known = jobs.cluster.run("squeue", "-h", "-t", "all", "-j", jobs.cancelled, "-o", "%j")
    assert known.stdout == f"{CANCELLED}\n"
    assert "terminated, saved: not requeued" in jobs.log(CANCELLED)
    assert set(jobs.successors(CANCELLED).values()) == {"CANCELLED"}
    assert not list(jobs.folder.rglob("HACKED"))
    assert not (REPOSITORY / "HACKED").exists()


def test_follow_prints_progress_and_result(jobs):
    output, _ = jobs.whole.communicate(timeout=270)
    assert jobs.whole.returncode == 0, output
    job = jobs.lines("whole", "slurm/submissions.jsonl")[0]["job"]
    for line in (
        f"submitted job {job}: whole, 2 nodes x 1 GPU, 30 at a time",
        "  run folder  runs/whole",
        f"  log         runs/whole/slurm/job_{job}.log",
        f"-- job {job}: running",
        "finished after 60 of 60 steps in ...",
        "runs/whole: finished after step 60",
    ):
        printed = output.splitlines()
        assert any(says(line, one) or says(f"{line}...", one) for one in printed), (
            f"{line}\n{output}"
        )
    assert jobs.starts("whole") == 1
    for rank in range(2):
        log = (jobs.run_dir("whole") / f"log/rank_{rank}.log").read_text()
        assert "devices: 0; threads: 1" in log, "the rank must get the requested GPU and CPU"
    expected = {"NumNodes": "2", "TresPerNode": "gres:gpu:1", "Requeue": "1"}
    assert jobs.cluster.job(job).items() >= expected.items()


def test_job_with_an_invalid_recipe_is_not_requeued(jobs):
    assert jobs.wait_for_end("refused", jobs.refused, "FAILED")
    expected = {"ExitCode": "2:0", "Restarts": "0"}
    assert jobs.cluster.job(jobs.refused).items() >= expected.items()
    assert "run.sed: unknown key; did you mean seed?" in jobs.log("refused")


@pytest.mark.long
def test_run_ends_after_repeated_failures_without_checkpoint(jobs):
    name = "failing"
    assert jobs.wait_for_end(name, jobs.failing, "FAILED", 180)
    status = jobs.status(name)
    assert (status["state"], status["reason"]) == ("failed", "max_failures")
    assert "2 in a row without a new checkpoint, of slurm.max_failures=2" in status["error"]
    assert "a failure of this test" in status["error"]
    assert jobs.starts(name) == 2
    assert set(jobs.successors(name).values()) == {"CANCELLED"}


def test_sweep_is_an_array_with_separate_folders(jobs):
    names = [f"learning_rate={rate}" for rate in ("1e-3", "2e-3")]
    for task, name in enumerate(names):
        assert jobs.wait_for_end(f"sweep/{name}", f"{jobs.sweep}_{task}")
        line, rate = jobs.records(f"sweep/{name}")[-1], float(name.partition("=")[2])
        assert (line["step"], line["learning_rate"]) == (2, rate)
    assert jobs.cluster.job(f"{jobs.sweep}_0")["ArrayTaskThrottle"] == "1"
    table = jobs.launcher("status", "runs/sweep").splitlines()
    shown = [line.split()[:2] for line in table if "learning_rate" in line]
    assert shown == [[name, "finished"] for name in names]


@pytest.mark.long
def test_run_continues_after_the_loss_of_a_node(jobs):
    """The lost node runs the script and rank 0."""
    name, job = "lost", jobs.lost
    try:
        assert jobs.wait_for_end(name, job)
        assert jobs.cluster.job(job)["NodeList"] == "n[6-7]"
        assert jobs.starts(name) == 2
        assert jobs.events(name, "resumed")[0] >= 5
        assert jobs.whole.wait(timeout=180) == 0
        assert are_equal_runs(jobs, name, "whole")
    finally:
        jobs.cluster.boot("n5")


@pytest.mark.long
def test_run_saves_before_the_time_limit(jobs):
    name, job = "limited", jobs.limited
    jobs.wait_for_steps(name, start=2, steps=1)
    jobs.disturbed_enough(name)
    assert jobs.wait_for_end(name, job)
    log = jobs.log(name)
    assert "warned by Slurm, saved: requeued" in log
    # On a loaded machine, a start may be warned before its first step
    assert log.count("warned by Slurm") == jobs.starts(name) - 1
    assert set(jobs.events(name, "stopped", "reason")) == {"SIGUSR1"}
    assert set(jobs.events(name, "resumed")) <= set(jobs.events(name, "stopped"))
    assert jobs.steps(name) == list(range(1, 61))


# Tests that take minutes


TWO = ("nodes=2", "cpus=2")


@pytest.fixture(scope="module")
def long_jobs(cluster, tmp_path_factory):
    """A separate folder with an undisturbed run named `whole`.

    Jobs of the first part are ended: if only the long tests are selected, no test ends all of them.
    """
    cluster.run("scancel", "--user=root")
    cluster.wait_for(lambda: cluster.idle() == len(cluster.nodes), 90, "all nodes")
    jobs = Jobs(cluster, tmp_path_factory.mktemp("long_jobs"), every_steps=5)
    jobs.submit("whole", *TWO, "data.arguments.seconds=0", "--wait")
    yield jobs
    cluster.run("scancel", "--user=root")


@pytest.fixture
def whole_cluster(long_jobs):
    yield long_jobs.cluster
    for node in long_jobs.cluster.nodes:
        long_jobs.cluster.run("scontrol", "update", f"NodeName={node}", "State=RESUME", check=False)
    long_jobs.cluster.wait_for(
        lambda: long_jobs.cluster.idle() == len(long_jobs.cluster.nodes), 90, "all nodes"
    )


@pytest.mark.long
def test_run_continues_after_the_loss_of_the_other_node(long_jobs, whole_cluster):
    """n1 runs the script and rank 0."""
    name, node = "lost-n2", "n2"
    job = long_jobs.submit(name, *TWO)
    long_jobs.wait_for_steps(name, start=1, steps=12)
    assert long_jobs.cluster.job(job)["NodeList"] == "n[1-2]"
    long_jobs.cluster.crash(node)
    try:
        assert long_jobs.wait_for_end(name, job, seconds=180)
        assert long_jobs.starts(name) == 2
        assert are_equal_runs(long_jobs, name, "whole")
    finally:
        long_jobs.cluster.boot(node)


@pytest.mark.long
def test_old_copy_on_a_lost_node_is_fenced_off(long_jobs, whole_cluster):
    """Two copies of one run exist at the same time. The old one ends without writing.

    The job has one node, because Slurm would end a job of several nodes on the reachable ones.
    """
    cluster, name = long_jobs.cluster, "twice"
    long_jobs.submit("whole-1", "cpus=2", "data.arguments.seconds=0", "--wait")
    words = ["sbatch_extra=--exclude=n3,n4", "data.arguments.seconds=0.15"]
    # The old copy must still train when the second one starts, also on a loaded machine
    words += [long_jobs.slow(name), "data.arguments.slow_seconds=2.5"]
    job = long_jobs.submit(name, "cpus=2", *words)
    long_jobs.wait_for_steps(name, start=1, steps=6)
    node = cluster.job(job)["NodeList"]
    cluster.kill_daemon(node)
    try:
        cluster.wait_for(lambda: long_jobs.starts(name) == 2, 90, "the second copy")
        long_jobs.disturbed_enough(name)
        assert long_jobs.wait_for_end(name, job, seconds=240)
        assert long_jobs.starts(name) == 2
        assert are_equal_runs(long_jobs, name, "whole-1")
        log = long_jobs.run_dir(name) / f"slurm/job_{job}/restart_0/node_{node}.log"
        ended = "this run ends, and writes nothing more"
        cluster.wait_for(lambda: ended in log.read_text(), 60, log.read_text())
    finally:
        cluster.crash(node)
        cluster.boot(node)


@pytest.mark.long
def test_run_saves_before_each_time_limit(long_jobs, whole_cluster):
    """Slurm warns the job first. Once the measured lead is longer, the script warns itself."""
    name = "limit"
    job = long_jobs.submit(name, *TWO, "time=2", "lead=45", "data.arguments.seconds=0.9")
    assert long_jobs.wait_for_end(name, job, seconds=500)
    assert long_jobs.starts(name) >= 3
    log = long_jobs.log(name)
    assert log.count("warned by Slurm, saved") == long_jobs.starts(name) - 1
    assert "s, more than the lead that Slurm has: it starts in" in log
    assert set(long_jobs.events(name, "stopped", "reason")) == {"SIGUSR1"}
    assert are_equal_runs(long_jobs, name, "whole")


def wrap_python(folder, name, module, lines):
    """Writes a script that runs shell lines and then Python. Returns the argument python=SCRIPT.

    PATH in the lines is replaced by a command that makes `module` the sitecustomize.py.
    """
    (folder / name).mkdir()
    (folder / name / "sitecustomize.py").write_text(module)
    python = folder / f"python_{name}"
    path = f'export PYTHONPATH="{folder / name}:$PYTHONPATH"'
    python.write_text(f'#!/bin/sh\n{lines.replace("PATH", path)}\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    return f"python={python}"


SLOW_SAVE = """
import os, time
if os.environ.get('LAUNCHER_START') == '0' and 'RANK' in os.environ:
    import pathlib
    original = pathlib.Path.mkdir
    def mkdir(path, *args, **more):
        if 'step_' in str(path) and list(path.parent.glob('step_*')): time.sleep(600)
        return original(path, *args, **more)
    pathlib.Path.mkdir = mkdir
"""


@pytest.mark.long
def test_unfinished_save_at_the_time_limit_is_ignored(long_jobs, whole_cluster):
    """Slurm ends the first start during a save. The successor uses the previous checkpoint."""
    name, python = "slow", wrap_python(long_jobs.folder, "slow", SLOW_SAVE, "PATH")
    job = long_jobs.submit(name, *TWO, "time=2", "lead=20", python, "data.arguments.seconds=0.9")
    assert long_jobs.wait_for_end(name, job, "TIMEOUT", 300)
    successor = next(iter(long_jobs.successors(name)))
    whole_cluster.run("scontrol", "update", f"JobId={successor}", "TimeLimit=10")
    assert long_jobs.wait_for_end(name, successor, seconds=300)
    assert long_jobs.events(name, "resumed")[0] > 0
    assert are_equal_runs(long_jobs, name, "whole")
    assert "PENDING" not in long_jobs.successors(name).values()


@pytest.mark.long
def test_requeued_run_resumes_from_its_own_checkpoint(long_jobs, whole_cluster):
    """`checkpoint.resume=PATH` applies to the first start only."""
    name, start = "from-path", long_jobs.run_dir("whole") / "checkpoints/step_00000005"
    resume = [f"checkpoint.resume={start}", "checkpoint.allow_changes=true"]
    job = long_jobs.submit(name, *TWO, *resume)
    long_jobs.wait_for_steps(name, start=1, steps=12)
    long_jobs.cluster.run("scontrol", "requeue", job)
    assert long_jobs.wait_for_end(name, job, seconds=180)
    first, second = long_jobs.events(name, "resumed")
    assert first == 5
    assert second >= 15
    assert long_jobs.steps(name) == list(range(6, 61))
    records, reference = long_jobs.records(name), long_jobs.records("whole")
    assert [line["loss"] for line in records] == [line["loss"] for line in reference[5:]]


@pytest.mark.long
def test_run_resumes_on_other_node_counts(long_jobs, whole_cluster):
    """The run uses two nodes, then three, then two again."""
    cluster, name = long_jobs.cluster, "elastic"

    def set_state(nodes, *state):
        cluster.run("scontrol", "update", f"NodeName={nodes}", *state)

    drain = ("State=DRAIN", "Reason=test")
    set_state("n[3-8]", *drain)
    job = long_jobs.submit(name, "nodes=2-3", "cpus=2")
    long_jobs.wait_for_steps(name, start=1)
    set_state("n3", "State=RESUME")
    cluster.run(*WARN, job)
    long_jobs.wait_for_steps(name, start=2)
    set_state("n2", *drain)
    cluster.run(*WARN, job)
    assert long_jobs.wait_for_end(name, job)
    assert long_jobs.events(name, "started", "ranks") == [2, 3, 2]
    assert long_jobs.steps(name) == list(range(1, 61))
    assert long_jobs.records(name)[-1]["samples_seen"] == 720


@pytest.mark.long
def test_preemption_with_the_signal_of_the_job_saves_and_requeues(long_jobs, whole_cluster):
    """Slurm sends SIGUSR1 instead of SIGTERM."""
    cluster, name = long_jobs.cluster, "signalled"
    configuration = cluster.folder / "slurm.conf"
    text = configuration.read_text()
    configuration.write_text(f"{text}SlurmctldParameters=preempt_send_user_signal\n")
    cluster.run("scontrol", "reconfigure")
    try:
        pair = ("sbatch_extra=--nodelist=n1,n2", long_jobs.slow(name))
        job = long_jobs.submit(name, *TWO, *pair)
        long_jobs.wait_for_steps(name, start=1)
        words = ["-p", "high", "--nodelist=n1", "--exclusive", "--output=/dev/null", "--wrap=:"]
        cluster.run("sbatch", *words)
        long_jobs.wait_for_steps(name, start=2, steps=1)
        long_jobs.disturbed_enough(name)
        assert long_jobs.wait_for_end(name, job)
        assert "preempted, saved: requeued" in long_jobs.log(name)
        assert long_jobs.starts(name) == 2
        assert long_jobs.events(name, "stopped")[0] == long_jobs.events(name, "resumed")[0]
        assert are_equal_runs(long_jobs, name, "whole")
    finally:
        configuration.write_text(text)
        cluster.run("scontrol", "reconfigure")


@pytest.mark.long
def test_unfit_node_is_excluded(long_jobs, whole_cluster):
    unfit = '[ "$(hostname)" = n2 ] && echo "n2 unfit: GPU 3 is gone" && exit 3'
    python = wrap_python(long_jobs.folder, "unfit", "", f'case "$*" in *doctor*) {unfit};; esac')
    name, words = "unfit", ("preflight=true", python, "exclude=n[4-8]", "run.max_steps=6")
    job = long_jobs.submit(name, *TWO, *words)
    assert long_jobs.wait_for_end(name, job)
    log, logs = long_jobs.log(name), long_jobs.run_dir(name) / f"slurm/job_{job}"
    assert "not fit to train: n2" in log
    assert "GPU 3 is gone" in log
    assert "n3 fit: " in (logs / "restart_1/preflight_nodes.log").read_text()
    expected = {"ExcNodeList": "n[4-8],n2", "NodeList": "n[1,3]"}
    assert long_jobs.cluster.job(job).items() >= expected.items()
    assert long_jobs.starts(name) == 1


@contextlib.contextmanager
def patient_slurm(cluster):
    """Slurm takes five minutes to notice a lost node, as in production. Here, it would be ten seconds."""
    configuration = cluster.folder / "slurm.conf"
    text = configuration.read_text()
    configuration.write_text(text.replace("SlurmdTimeout=10", "SlurmdTimeout=300"))
    cluster.run("scontrol", "reconfigure")
    try:
        yield
    finally:
        configuration.write_text(text)
        cluster.run("scontrol", "reconfigure")


@pytest.mark.long
def test_lost_node_is_excluded(long_jobs, whole_cluster):
    cluster, name = long_jobs.cluster, "excluded"
    with patient_slurm(cluster):
        job = long_jobs.submit(name, *TWO, "exclude=n[4-8]")
        long_jobs.wait_for_steps(name, start=1, steps=12)
        assert cluster.job(job)["NodeList"] == "n[1-2]"
        cluster.crash("n2")
        excluded = lambda: cluster.job(job).get("ExcNodeList") == "n[4-8],n2"  # noqa: E731
        cluster.wait_for(excluded, 60, "the exclusion of n2")
    cluster.boot("n2")
    assert long_jobs.wait_for_end(name, job, seconds=180)
    assert "n2 does not answer Slurm" in long_jobs.log(name)
    assert long_jobs.events(name, "failed", "lost_nodes") == [["n2"]]
    assert cluster.job(job)["NodeList"] == "n[1,3]"
    assert long_jobs.starts(name) == 2
    assert are_equal_runs(long_jobs, name, "whole")


SPARE = ("nodes=3", "train_nodes=2", "cpus=2")


@pytest.mark.long
def test_spare_node_takes_the_place_of_an_unfit_one(long_jobs, whole_cluster):
    unfit = '[ "$(hostname)" = n2 ] && echo "n2 unfit: GPU 3 is gone" && exit 3'
    python = wrap_python(long_jobs.folder, "spare", "", f'case "$*" in *doctor*) {unfit};; esac')
    name = "spare"
    job = long_jobs.submit(name, *SPARE, "preflight=true", python)
    assert long_jobs.wait_for_end(name, job, seconds=240)
    log, logs = long_jobs.log(name), long_jobs.run_dir(name) / f"slurm/job_{job}/restart_0"
    assert "not fit to train: n2" in log
    assert json.loads((logs / "preflight_all.json").read_text())["fit"] is True
    assert {file.name for file in logs.glob("node_*")} == {"node_n1.log", "node_n3.log"}
    assert long_jobs.cluster.job(job)["Restarts"] == "0"
    assert are_equal_runs(long_jobs, name, "whole")


NOTHING_LOST = """
import os
if 'RANK' in os.environ:
    from launcher.reliability.nodes import Nodes
    Nodes.lost = lambda *_: []
"""


@pytest.mark.long
def test_spare_node_takes_the_place_of_a_lost_one(long_jobs, whole_cluster):
    """In the same allocation, while Slurm still waits for the lost node. The ranks cannot tell which one
    is lost, as if it had their store."""
    cluster, name = long_jobs.cluster, "replaced"
    python = wrap_python(long_jobs.folder, name, NOTHING_LOST, "PATH")
    with patient_slurm(cluster):
        job = long_jobs.submit(name, *SPARE, python)
        try:
            long_jobs.wait_for_steps(name, start=1, steps=12)
            assert cluster.job(job)["NodeList"] == "n[1-3]"
            cluster.crash("n2")
            long_jobs.wait_for_steps(name, start=2)
        finally:
            cluster.boot("n2")
        assert long_jobs.wait_for_end(name, job, seconds=180)
    log = long_jobs.log(name)
    assert "n2 does not answer Slurm" in log
    assert "trains on in this allocation: 2 of 3 nodes are good" in log
    logs = long_jobs.run_dir(name) / f"slurm/job_{job}"
    assert {str(file.relative_to(logs)) for file in logs.rglob("node_*")} == {
        "restart_0/node_n1.log",
        "restart_0/node_n2.log",
        "restart_1/node_n1.log",
        "restart_1/node_n3.log",
    }
    assert cluster.job(job)["Restarts"] == "0"
    assert long_jobs.events(name, "resumed")[0] >= 10
    assert are_equal_runs(long_jobs, name, "whole")


WRONG_SUM = """
import os
if 'RANK' in os.environ:
    from launcher.diagnostics import group_checks
    right = group_checks.sum_is_right
    group_checks.sum_is_right = lambda ranks: not right(ranks)
"""


@pytest.mark.long
def test_deviating_node_is_excluded(long_jobs, whole_cluster):
    """The ranks on n2 compute a wrong sum. The check of the single node cannot detect it."""
    lines = 'case "$*" in *--quick*) [ "$(hostname)" = n2 ] && PATH;; esac'
    python = wrap_python(long_jobs.folder, "sum", WRONG_SUM, lines)
    name = "beside"
    words = ("nodes=3", "cpus=2", "exclude=n[5-8]", "preflight=true", python, "run.max_steps=6")
    job = long_jobs.submit(name, *words)
    assert long_jobs.wait_for_end(name, job, seconds=240)
    log, logs = long_jobs.log(name), long_jobs.run_dir(name) / f"slurm/job_{job}"
    assert "preflight: not fit to train: n2; details: " in log
    assert "  n2: all-reduce: gives a wrong sum" in log
    for node in ("n1", "n2", "n3"):
        assert f"{node} fit: " in (logs / "restart_0/preflight_nodes.log").read_text()
    assert json.loads((logs / "restart_0/preflight_all.json").read_text())["bad_nodes"] == ["n2"]
    assert json.loads((logs / "restart_1/preflight_all.json").read_text())["fit"] is True
    expected = {"ExcNodeList": "n[5-8],n2", "NodeList": "n[1,3-4]"}
    assert long_jobs.cluster.job(job).items() >= expected.items()
    assert long_jobs.starts(name) == 1
    assert long_jobs.status(name)["state"] == "finished"


@pytest.mark.long
def test_one_run_of_a_sweep_is_requeued(long_jobs, whole_cluster):
    """The job of the last task has the id of the array. A requeue of this id affects all tasks."""
    sweep = ("sweep.optimizer.learning_rate=1e-3,2e-3", "data.arguments.seconds=0.1")
    array = long_jobs.submit("array", *sweep, "cpus=2")
    names = [f"array/learning_rate={rate}" for rate in ("1e-3", "2e-3")]
    for task, name in enumerate(names):
        long_jobs.wait_for_steps(name, start=1)
        long_jobs.cluster.run(*WARN, f"{array}_{task}")
    for task, name in enumerate(names):
        assert long_jobs.wait_for_end(name, f"{array}_{task}")
        assert long_jobs.starts(name) == 2
        assert long_jobs.events(name, "stopped")[0] == long_jobs.events(name, "resumed")[0]
