"""The job: trains on its nodes, forwards Slurm's signals to the ranks, and requeues itself.

The job's script (slurm/train.sbatch.j2) ends in this program, on the first node. No torch. With spare
nodes (slurm.train_nodes), a job that has lost a node trains on in the same allocation, as long as enough
nodes are left.
"""

from __future__ import annotations

import argparse
import functools
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
from launcher.reliability.file_calls import bounded
from launcher.reliability.json_files import Json
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
_LOOK_SECONDS = 10
"""Time between two looks at status.json, and then for the ranks that are left to end."""
_ANSWER_SECONDS = 60
"""Time for a node to answer."""
_END_SECONDS = 60
"""Time for srun to end. It waits for processes that cannot be killed, and for lost nodes."""


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
        self.nodes = int(variables["SLURM_JOB_NUM_NODES"])
        self.nodelist = variables["SLURM_JOB_NODELIST"]
        self.bad_nodes: list[str] = []
        """Nodes of this allocation that are unfit or lost, and train no more."""
        self.requeued = int(variables.get("SLURM_RESTART_COUNT") or 0)
        self.attempts = Attempts.read(self.run_dir, self.job, max_failures=self.slurm.max_failures)
        cpus = int(variables.get("SLURM_CPUS_PER_TASK") or variables["SLURM_CPUS_ON_NODE"])
        threads = str(max(1, cpus // ranks_per_node(self.slurm)))
        variables.setdefault("OMP_NUM_THREADS", threads)
        variables["SRUN_CPUS_PER_TASK"] = str(cpus)  # without it srun gives a task one CPU
        self._number_start()

    def _number_start(self) -> None:
        """Gives a start of the ranks its number, and a folder for logs."""
        folder = self.run_dir / "slurm" / f"job_{self.job}"
        self.restart = len(list(folder.glob("restart_*")))
        """Number of this start, over all jobs of the chain."""
        self.logs = folder / f"restart_{self.restart}"
        self.logs.mkdir(parents=True)
        self.refused = self.logs / "refused"
        """Written if the recipe or the run folder is at fault."""
        os.environ["LAUNCHER_JOB"], os.environ["LAUNCHER_START"] = self.job, str(self.restart)
        os.environ["LAUNCHER_REFUSED"] = str(self.refused)

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
        return self._begin_attempt()

    def _begin_attempt(self) -> int | None:
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

    # The nodes

    @functools.cached_property
    def _hostnames(self) -> list[str]:
        return (scontrol("show", "hostnames", self.nodelist) or "").split()

    @property
    def good_nodes(self) -> list[str]:
        """The nodes of the allocation that are neither unfit nor lost; [] if Slurm does not name them."""
        return [node for node in self._hostnames if node not in self.bad_nodes]

    @property
    def can_train(self) -> bool:
        """Whether enough nodes are left. The first one must be: the nodes meet at its address."""
        if not self.bad_nodes:
            return True
        needed, good = self.slurm.train_nodes or self.nodes, self.good_nodes
        return len(good) >= needed and good[0] == self._hostnames[0]

    def _select(self, nodes: Sequence[str]) -> list[str]:
        """Options of srun that select these nodes of the allocation."""
        if len(nodes) in (0, self.nodes):
            return []
        # A step that does not end on a lost node still holds its share of the others
        return [*["--overlap"] * bool(self.bad_nodes), f"--nodelist={','.join(nodes)}"]

    def _find_lost(self, status: Json) -> list[str]:
        """Adds to `bad_nodes` those that are lost, and returns them: nodes that do not answer Slurm, and
        nodes from which the ranks have heard nothing more (status.json).

        The ranks cannot tell if the node of rank 0 is lost: it has their store. Nor do they know
        whether a node is lost whose only rank was killed: then Slurm decides.
        """
        good, answers = self.good_nodes, self.logs / "answers.log"
        if self.nodes == 1 or not good:
            return []
        # With --overlap: training, or what is left of it, still has the nodes
        words = ("--overlap", *self._select(good), "bash", "-c", 'echo "$SLURMD_NODENAME"')
        self._check(_ANSWER_SECONDS, answers, *words, nodes=good)
        if self.stopping:  # the nodes had no time to answer
            return []
        answered = set(answers.read_text(errors="replace").split())
        silent = [node for node in good if node not in answered]
        if len(silent) == len(good):  # srun itself failed
            silent = []
        named = (status.get("lost_nodes") or ()) if ranks_per_node(self.slurm) > 1 else ()
        for node in silent:
            log(f"{node} does not answer Slurm; details: {answers}")
        for node in named:
            log(f"the ranks have heard nothing more from {node}")
        lost = [node for node in good if node in silent or node in named]
        self.bad_nodes += lost
        return lost

    # Commands on the nodes

    def srun(
        self, *words: str, nodes: Sequence[str] = (), output: IO[str] | None = None
    ) -> subprocess.Popen[bytes]:
        """Starts a command on these nodes; on all by default."""
        command = srun_command(str(len(nodes) or self.nodes), *words)
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

    def preflight(self) -> None:
        """Checks each node alone, then all good ones together. Adds to `bad_nodes` those that are not
        fit."""
        nodes = self._hostnames
        doctor, folder = ["launcher.cli.main", "doctor"], self.run_dir
        log_file = self.logs / "preflight_nodes.log"
        command = [self.python, "-m", *doctor, "--node", f"shared={folder}", f"runs={folder}"]
        extra = self.slurm.srun_extra or ()
        status = self._check(_PREFLIGHT_NODES_SECONDS, log_file, *extra, *command)
        if self.stopping:
            return
        problems = preflight.each(log_file, nodes, status=status)
        self.bad_nodes += preflight.report(problems, nodes, log_file)
        nodes = self.good_nodes
        if not self.can_train or len(nodes) < 2:
            return
        result, log_file = self.logs / "preflight_all.json", self.logs / "preflight_all.log"
        torchrun = torchrun_command(
            self.slurm,
            python=self.python,
            nodes=str(len(nodes)),
            restarts=0,
            **self.meeting(preflight=True),
        )
        command = [*torchrun, *doctor, "--quick", f"out={result}"]
        seconds = _PREFLIGHT_ALL_SECONDS + _PREFLIGHT_SECONDS_OF_NODE * len(nodes)
        words = (*self._select(nodes), *extra, *command)
        status = self._check(seconds, log_file, *words, nodes=nodes)
        if not self.stopping:
            problems = preflight.together(result, status=status)
            self.bad_nodes += preflight.report(problems, nodes, log_file)

    def _check(self, seconds: float, log_file: Path, *words: str, nodes: Sequence[str] = ()) -> int:
        """Runs a command on these nodes, on all by default, until it ends, is late, or the job must end.

        Returns its exit status; `preflight.LATE` if it was late.
        """
        deadline = time.monotonic() + seconds
        with log_file.open("w") as output:
            process = self.srun(*words, nodes=nodes, output=output)
            while process.poll() is None and not self.stopping and time.monotonic() < deadline:
                self.wait(1.0)
            if process.poll() is not None:
                return process.returncode
            self._end_step(process)
        return preflight.LATE

    def _end_step(self, process: subprocess.Popen[bytes]) -> None:
        """Ends the processes of an srun on all nodes that answer."""
        process.terminate()
        try:
            process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def train(self) -> int:
        """Trains until the run ends; returns srun's exit status."""
        nodes = self.good_nodes[: self.slurm.train_nodes] if self.slurm.train_nodes else []
        command = training_command(
            self.slurm,
            python=self.python,
            nodes=str(len(nodes) or self.nodes),
            selection=self._select(nodes),
            recipe=Path(self.recipe),
            logs=str(self.logs),
            **self.meeting(),
        )
        process = subprocess.Popen(command, preexec_fn=in_child)
        looked_at = self.attempts.found
        while process.poll() is None and not self.stopping:
            self.wait(3600 if self.nodes == 1 else _LOOK_SECONDS)
            status: Json = {}
            if self.nodes > 1:
                status = bounded(RunFolder(self.run_dir).read_status, {})
            if status.get("state") == "failed" and status != looked_at and process.poll() is None:
                looked_at = status
                # torchrun would wait for the node, for minutes
                if self._find_lost(status):
                    self.wait(_LOOK_SECONDS)
                    self._end_step(process)
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

    def attempt(self) -> int | None:
        """Trains if enough nodes are fit. Returns the exit status if the job must end."""
        if not self.can_train:
            return self.end(EXIT_DONE, unfit=True)
        before = len(self.bad_nodes)
        exit_status = EXIT_DONE if self.stopping else self.train()
        return self.end(exit_status, lost=len(self.bad_nodes) > before)

    def end(self, exit_status: int, *, unfit: bool = False, lost: bool = False) -> int | None:
        """Requeues the job if it should be; returns its exit status. None: another attempt has begun in
        this allocation, without the nodes that were lost.

        exit_status: that of srun. unfit: too few nodes were fit to train. lost: nodes were lost.
        """
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
        elif unfit:
            status = {"reason": f"not fit to train: {', '.join(self.bad_nodes)}"}
        decision = self.attempts.decide(
            status, known, warned=self.warned, terminated=self.terminated
        )
        self.attempts.end(decision, killed=state == "running")
        log(f"{decision.why} (srun's exit status: {exit_status})")
        if not decision.requeue:
            self.attempts.remove_successor()
            return decision.status
        if decision.status == EXIT_FAILED and not (unfit or lost or self.stopping):
            lost = bool(self._find_lost(status))
        if lost and self.can_train and not self.stopping:
            log(
                f"trains on in this allocation: {len(self.good_nodes)} of {self.nodes} nodes are good"
            )
            self._number_start()
            return self._begin_attempt()
        if not self.requeue(known):
            before.write()  # still open, so the job's successor resumes the run
            return EXIT_FAILED
        return EXIT_DONE

    def requeue(self, known: JobInfo) -> bool:
        """Requeues the job, without `bad_nodes`. False: that is not possible."""
        # A job that was cancelled, or was started again elsewhere, would come back
        running = known.state == "RUNNING" and known.restarts == self.requeued
        if not running or scontrol("requeue", self.this) is None:
            log(f"not requeued ({known.state or 'unknown'}): the job's successor resumes the run")
            return False
        # If all of several nodes are bad, the fault is elsewhere. The job does not start again
        # before this program has ended
        if self.bad_nodes and (len(self.bad_nodes) < self.nodes or self.nodes == 1):
            log(f"excluded if Slurm can spare them: {', '.join(self.bad_nodes)}")
            excluded = ",".join(filter(None, [known.excluded, *self.bad_nodes]))
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
    status = job.begin()
    if status is None and job.slurm.preflight and not job.stopping:
        job.preflight()
    while status is None:
        status = job.attempt()
    return status


if __name__ == "__main__":
    sys.exit(main())
