"""The job: trains on its nodes, forwards Slurm's signals to the ranks, and requeues itself.

The job's script (slurm/train.sbatch.j2) ends in this program, on the first node. No torch.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO

from launcher.errors import EXIT_DONE, EXIT_FAILED, EXIT_USAGE, RecipeError
from launcher.recipe.load import load_recipe
from launcher.recipe.schema import Slurm
from launcher.reliability.lock import current_owner
from launcher.reliability.run_directory import RunFolder
from launcher.slurm import preflight
from launcher.slurm.agent import address, block_signals, in_child, next_signal
from launcher.slurm.attempts import Attempts, measured_lead
from launcher.slurm.render import (
    ranks_per_node,
    srun_command,
    torchrun_command,
    training_command,
)
from launcher.slurm.scheduler import JobInfo, log, scontrol

_SIGNAL_AGAIN_SECONDS = 5
"""Time between repeated signals: a node loses those sent before its agent handles them."""
_PREFLIGHT_NODES_SECONDS, _PREFLIGHT_ALL_SECONDS = 300, 180
_PREFLIGHT_SECONDS_OF_NODE = 2
"""More time for the checks of all nodes together, for each node."""


class Job:
    """One start of a job: `this`. `job` is the first one of its chain of successors."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.script: str = options.script
        self.lead: int = options.lead
        self.warned = bool(options.warned)
        """Slurm has warned of a time limit or a preemption (SIGUSR1)."""
        self.terminated = bool(options.terminated)
        """Terminated by scancel or others (SIGTERM)."""
        variables = os.environ
        task = variables.get("SLURM_ARRAY_TASK_ID")
        run_dir, self.recipe = options.run[int(task or 0)]
        self.run_dir = Path(run_dir)
        self.slurm = load_recipe([f"recipe={self.recipe}"], ranks=None).recipe.slurm or Slurm()
        self.python = self.slurm.python or sys.executable
        array = variables.get("SLURM_ARRAY_JOB_ID")
        self.this = f"{array}_{task}" if array else variables["SLURM_JOB_ID"]
        chain: Sequence[str] = options.chain or (self.this, "")
        self.job, self.after = chain
        self.nodes = variables["SLURM_JOB_NUM_NODES"]
        self.nodelist = variables["SLURM_JOB_NODELIST"]
        self.requeued = int(variables.get("SLURM_RESTART_COUNT") or 0)
        folder = self.run_dir / "slurm" / f"job_{self.job}"
        self.restart = len(list(folder.glob("restart_*")))
        """Number of this start, over all jobs of the chain."""
        self.logs = folder / f"restart_{self.restart}"
        self.logs.mkdir(parents=True)
        self.refused = self.logs / "refused"
        """Written if the recipe or the run folder is at fault."""
        self.attempts = Attempts.read(self.run_dir, self.job, max_failures=self.slurm.max_failures)
        cpus = int(variables.get("SLURM_CPUS_PER_TASK") or variables["SLURM_CPUS_ON_NODE"])
        threads = str(max(1, cpus // ranks_per_node(self.slurm)))
        variables.setdefault("OMP_NUM_THREADS", threads)
        variables["SRUN_CPUS_PER_TASK"] = str(cpus)  # without it srun gives a task one CPU
        variables["LAUNCHER_JOB"], variables["LAUNCHER_START"] = self.job, str(self.restart)
        variables["LAUNCHER_REFUSED"] = str(self.refused)

    @property
    def stopping(self) -> bool:
        """Whether the job must save and end."""
        return self.warned or self.terminated

    def wait(self, seconds: float) -> None:
        """Waits for a signal or the end of a child, for at most this many seconds."""
        arrived = next_signal(seconds)
        self.terminated |= arrived == signal.SIGTERM
        self.warned |= arrived in (signal.SIGUSR1, signal.SIGALRM)

    def begin(self) -> int | None:
        """Counts the attempt, queues a successor. Returns the exit status if the job must end."""
        log(f"job {self.job}, restart {self.restart}, on {self.nodelist}: {self.run_dir}")
        if self.after and not self.requeued:  # a requeued successor has work to do
            if why := self.attempts.nothing_left(self.after):
                log(f"nothing to resume: {why}")
                return EXIT_DONE
        known = JobInfo.read(self.this)
        if why := self.attempts.begin():
            log(why)
            self.attempts.remove_successor()
            return EXIT_FAILED
        self.attempts.submit_successor(self.this, self.script, known.excluded)
        self._read_limits(known)
        return None

    def _read_limits(self, known: JobInfo) -> None:
        """Detects what Slurm signalled before this program handled signals. Sets an alarm as an
        earlier warning if saving takes longer than the time between Slurm's warning and the limit.
        """
        self.terminated |= known.ending
        self.warned |= known.preempted
        if known.end_time is None:
            return
        left = known.end_time - time.time()
        self.warned |= left < self.lead
        # At most half of what is left, which leaves time to train if saving is slow
        needed = min(measured_lead(self.run_dir) or 0, int(left / 2))
        if needed > self.lead:
            self.lead, seconds = needed, max(1, int(left - needed))
            signal.alarm(seconds)
            what = f"saving may take {needed} s, more than the lead that Slurm has"
            log(f"{what}: it starts in {seconds} s")

    # Commands on every node

    def srun(self, *words: str, output: IO[str] | None = None) -> subprocess.Popen[bytes]:
        """Starts a command on every node."""
        command = srun_command(self.nodes, *words)
        stderr = None if output is None else subprocess.STDOUT
        return subprocess.Popen(command, stdout=output, stderr=stderr, preexec_fn=in_child)

    def meeting(self, *, preflight: bool = False) -> dict[str, str]:
        """Where the nodes meet, and under which name: arguments of `torchrun_command`."""
        number = int(os.environ["SLURM_JOB_ID"])
        # Each start has another port: ranks of a lost node may still hold the last one
        port = (10000 if preflight else 20000) + (number * 7 + self.restart) % 12000
        suffix = ".preflight" if preflight else ""
        endpoint = f"{address(self.slurm.interface)}:{port}"
        return {"endpoint": endpoint, "name": f"{number}.{self.restart}{suffix}"}

    def _hostnames(self) -> list[str]:
        return (scontrol("show", "hostnames", self.nodelist) or "").split()

    def preflight(self) -> list[str]:
        """Checks each node alone, then all together. Returns the nodes that are not fit."""
        nodes = self._hostnames()
        doctor, folder = ["launcher.cli.main", "doctor"], self.run_dir
        log_file = self.logs / "preflight_nodes.log"
        command = [self.python, "-m", *doctor, "--node", f"shared={folder}", f"runs={folder}"]
        status = self._check(_PREFLIGHT_NODES_SECONDS, log_file, *command)
        if self.stopping:
            return []
        problems = preflight.each(log_file, nodes, status=status)
        bad = preflight.report(problems, nodes, log_file)
        if bad or len(nodes) == 1:
            return bad
        result, log_file = self.logs / "preflight_all.json", self.logs / "preflight_all.log"
        torchrun = torchrun_command(
            self.slurm,
            python=self.python,
            nodes=self.nodes,
            restarts=0,
            **self.meeting(preflight=True),
        )
        command = [*torchrun, *doctor, "--quick", f"out={result}"]
        seconds = _PREFLIGHT_ALL_SECONDS + _PREFLIGHT_SECONDS_OF_NODE * len(nodes)
        status = self._check(seconds, log_file, *command)
        if self.stopping:
            return []
        return preflight.report(preflight.together(result, status=status), nodes, log_file)

    def _check(self, seconds: float, log_file: Path, *command: str) -> int:
        """Runs a command on every node until it ends, is late, or the job must end.

        Returns its exit status; `preflight.LATE` if it was late.
        """
        deadline = time.monotonic() + seconds
        with log_file.open("w") as output:
            extra = self.slurm.srun_extra or ()
            process = self.srun(*extra, *command, output=output)
            while process.poll() is None and not self.stopping and time.monotonic() < deadline:
                self.wait(1.0)
            if process.poll() is not None:
                return process.returncode
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:  # it waits for processes that cannot be killed
                process.kill()
        return preflight.LATE

    def train(self) -> int:
        """Trains until the run ends; returns srun's exit status."""
        command = training_command(
            self.slurm,
            python=self.python,
            nodes=self.nodes,
            recipe=Path(self.recipe),
            logs=str(self.logs),
            **self.meeting(),
        )
        process = subprocess.Popen(command, preexec_fn=in_child)
        while process.poll() is None and not self.stopping:
            self.wait(3600.0)
        stopping_since = time.monotonic()
        while process.poll() is None:
            process.send_signal(signal.SIGUSR1)
            # At once: this program may be killed before the ranks have saved
            if self.terminated and JobInfo.read(self.this).cancelled:
                self.attempts.remove_successor()
            # Ends a save that takes too long, to requeue the job before the time limit ends it
            late = time.monotonic() - stopping_since > self.lead - 15
            if self.warned and late and self.lead > 30:
                process.terminate()
            self.wait(_SIGNAL_AGAIN_SECONDS)
        return process.returncode

    # The end

    def end(self, exit_status: int, bad_nodes: Sequence[str]) -> int:
        """Requeues the job if it should be; returns its exit status. exit_status: that of srun."""
        known = JobInfo.read(self.this)
        if known.restarts not in (None, self.requeued):
            log("Slurm has requeued the job itself: this start of it ends")
            return EXIT_FAILED
        owner, alive = current_owner(self.run_dir) or (None, False)
        if owner and alive is not False and owner.job not in (None, self.job):
            log("the run folder belongs to another job now: this one ends")
            self.attempts.remove_successor()
            return EXIT_FAILED
        status = RunFolder(self.run_dir).read_status()
        done = exit_status == EXIT_DONE and status.get("state") == "finished"  # nothing was left
        if status == self.attempts.found and not done:  # this attempt did not write it
            status = {}
        state, before = status.get("state"), replace(self.attempts)
        if self.refused.exists() and state != "finished":
            print(self.refused.read_text().strip(), file=sys.stderr, flush=True)
            status = {"state": "failed", "reason": "recipe"}
        elif bad_nodes:
            status = {"reason": f"not fit to train: {', '.join(bad_nodes)}"}
        decision = self.attempts.decide(
            status, known, warned=self.warned, terminated=self.terminated
        )
        self.attempts.end(decision, killed=state == "running")
        log(f"{decision.why} (srun's exit status: {exit_status})")
        if not decision.requeue:
            self.attempts.remove_successor()
            return decision.status
        if lost := status.get("lost_nodes"):
            bad_nodes = [node for node in self._hostnames() if node in lost]
            log(f"nothing was heard from {', '.join(lost)}: excluded if Slurm can spare them")
        if not self.requeue(known, bad_nodes):
            before.write()  # still open, so the job's successor resumes the run
            return EXIT_FAILED
        return EXIT_DONE

    def requeue(self, known: JobInfo, bad_nodes: Sequence[str]) -> bool:
        """Requeues the job, without bad nodes. False: that is not possible."""
        # A job that was cancelled, or was started again elsewhere, would come back
        running = known.state == "RUNNING" and known.restarts == self.requeued
        if not running or scontrol("requeue", self.this) is None:
            log(f"not requeued ({known.state or 'unknown'}): the job's successor resumes the run")
            return False
        # If all of several nodes are bad, the fault is elsewhere. The job does not start again
        # before this program has ended
        if bad_nodes and (len(bad_nodes) < int(self.nodes) or self.nodes == "1"):
            excluded = ",".join(filter(None, [known.excluded, *bad_nodes]))
            scontrol("update", f"JobId={self.this}", f"ExcNodeList={excluded}")
        return True


def read_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """What the job's script gives; the rest is in the recipe's section slurm."""
    parser = argparse.ArgumentParser(prog="python -m launcher.slurm.job")
    parser.add_argument("--run", nargs=2, action="append", metavar=("DIR", "RECIPE"))
    parser.add_argument("--script", help="of this job, for its successor")
    parser.add_argument("--lead", type=int, help="seconds between warning and limit")
    parser.add_argument("--warned", type=int, default=0)
    parser.add_argument("--terminated", type=int, default=0)
    parser.add_argument("chain", nargs="*", help="of a successor: the first job, the one before")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the job; returns its exit status."""
    block_signals()
    try:
        job = Job(read_options(arguments))
    except RecipeError as error:
        print(error, file=sys.stderr, flush=True)
        return EXIT_USAGE
    if (status := job.begin()) is not None:
        return status
    bad_nodes = job.preflight() if job.slurm.preflight and not job.stopping else []
    trained = 0 if job.stopping or bad_nodes else job.train()
    return job.end(trained, bad_nodes)


if __name__ == "__main__":
    sys.exit(main())
