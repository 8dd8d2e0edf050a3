"""The job: trains on its nodes, forwards Slurm's signals to the ranks, and requeues itself.

    python -m launcher.slurm.job --run RUN_DIR RECIPE ...

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
from pathlib import Path
from typing import IO

from launcher.errors import EXIT_DONE, EXIT_FAILED, EXIT_USAGE, RecipeError
from launcher.recipe.load import load_recipe
from launcher.recipe.schema import Slurm
from launcher.reliability.run_directory import RunFolder
from launcher.slurm import attempts, preflight
from launcher.slurm.agent import address, block_signals, in_child, next_signal
from launcher.slurm.attempts import (
    Ended,
    Record,
    measured_lead,
    newest_checkpoint,
    nothing_left,
    remove_successor,
    submit_successor,
)
from launcher.slurm.render import ranks_per_node
from launcher.slurm.scheduler import JobInfo, hostnames, log, scontrol

_SIGNAL_AGAIN_SECONDS = 5
"""Until the agent of a node listens, signals are lost there."""
_PREFLIGHT_NODES_SECONDS, _PREFLIGHT_ALL_SECONDS = 300, 180


class Requests:
    """The stop that Slurm has requested of this job. Signals are blocked, and read by `wait`."""

    def __init__(self, *, warned: bool = False, terminated: bool = False) -> None:
        self.warned = warned
        """A time limit or a preemption is near (SIGUSR1)."""
        self.terminated = terminated
        """By scancel, `scontrol requeue` and others (SIGTERM)."""
        self.warn_at: float | None = None
        """time.monotonic() at which this job warns itself, if Slurm's warning is too late."""
        block_signals()

    def any(self) -> bool:
        return self.warned or self.terminated

    def wait(self, seconds: float) -> None:
        """Waits for a signal, the end of a child, or so many seconds."""
        if self.warn_at is not None:
            seconds = min(seconds, max(0.0, self.warn_at - time.monotonic()))
        arrived = next_signal(seconds)
        self.warned = self.warned or arrived == "SIGUSR1"
        self.terminated = self.terminated or arrived == "SIGTERM"
        if self.warn_at is not None and time.monotonic() >= self.warn_at:
            self.warned, self.warn_at = True, None


class Job:
    """One start of a job: `this`. `job` is the first one of its chain of successors."""

    def __init__(self, options: argparse.Namespace, requests: Requests) -> None:
        self.options, self.requests = options, requests
        self.lead: int = options.lead
        variables = os.environ
        task = variables.get("SLURM_ARRAY_TASK_ID")
        run_dir, self.recipe = options.run[int(task or 0)]
        self.run_dir = Path(run_dir)
        recipe = load_recipe([f"recipe={self.recipe}"], ranks=None).recipe
        self.slurm = recipe.slurm or Slurm()
        self.python = self.slurm.python or sys.executable
        array = variables.get("SLURM_ARRAY_JOB_ID")
        self.this = f"{array}_{task}" if array else variables["SLURM_JOB_ID"]
        self.job: str = options.chain[0] if options.chain else self.this
        self.after: str = options.chain[1] if options.chain else ""
        self.nodes = variables["SLURM_JOB_NUM_NODES"]
        self.nodelist = variables["SLURM_JOB_NODELIST"]
        self.requeued = int(variables.get("SLURM_RESTART_COUNT") or 0)
        """How often Slurm had requeued this job when it began."""
        self.restart, self.logs = self._make_logs()
        self.refused = self.logs / "refused"
        """Written if the recipe or the run folder is at fault."""
        cpus = int(variables.get("SLURM_CPUS_PER_TASK") or variables["SLURM_CPUS_ON_NODE"])
        threads = str(max(1, cpus // ranks_per_node(self.slurm)))
        variables.setdefault("OMP_NUM_THREADS", threads)
        variables["SRUN_CPUS_PER_TASK"] = str(cpus)  # without it srun gives a task one CPU
        variables["LAUNCHER_JOB"], variables["LAUNCHER_START"] = self.job, str(self.restart)
        variables["LAUNCHER_REFUSED"] = str(self.refused)
        self.host, self.port = self._meeting_point()

    def _make_logs(self) -> tuple[int, Path]:
        """The number of this start, over all jobs of the chain, and a new folder for its logs."""
        folder = self.run_dir / "slurm" / f"job_{self.job}"
        folder.mkdir(parents=True, exist_ok=True)
        restart = len(list(folder.glob("restart_*")))
        logs = folder / f"restart_{restart}"
        logs.mkdir()
        return restart, logs

    def _meeting_point(self) -> tuple[str, int]:
        """Host and port where the ranks meet.

        Each start has another port: ranks of a lost node may still hold the last one.
        """
        interface = self.slurm.interface
        first = address(interface) if interface else (hostnames(self.nodelist) or [""])[0]
        if not first:
            raise SystemExit(f"the address of the first node of {self.nodelist} is not known")
        number = int(os.environ["SLURM_JOB_ID"]) * 7 + self.restart
        return first, 20000 + number % 12000  # the preflight uses the port 10000 below

    def begin(self) -> int | None:
        """Counts the attempt, queues a successor. Returns the exit status if the job must end."""
        log(f"job {self.job}, restart {self.restart}, on {self.nodelist}: {self.run_dir}")
        if self.after and not self.requeued:  # a requeued successor has work to do
            if why := nothing_left(self.run_dir, self.job, self.after):
                log(f"nothing to resume: {why}")
                return EXIT_DONE
        known = JobInfo.read(self.this)
        if why := attempts.begin(self.run_dir, self.job, max_failures=self.slurm.max_failures):
            log(why)
            remove_successor(self.run_dir, self.job)
            return EXIT_FAILED
        submit_successor(self.run_dir, self.job, self.this, self.options.script, known.excluded)
        self._read_limits(known)
        return None

    def _read_limits(self, known: JobInfo) -> None:
        """Finds signals that arrived before this program listened. Lets the job warn itself, if
        the run needs more time to save than the lead that Slurm has."""
        self.requests.terminated = self.requests.terminated or known.ending
        self.requests.warned = self.requests.warned or known.preempted
        if known.end_time is None:
            return
        left = known.end_time - time.time()
        self.requests.warned = self.requests.warned or left < self.lead
        # At most half of what is left, which leaves time to train if saving is slow
        needed = min(measured_lead(self.run_dir) or 0, int(left / 2))
        if needed > self.lead:
            seconds = max(1, int(left - needed))
            self.lead, self.requests.warn_at = needed, time.monotonic() + seconds
            late = "more than the lead that Slurm has"
            log(f"saving may take {needed} s, {late}: it starts in {seconds} s")

    # Commands on every node

    def srun(self, *words: str, output: IO[str] | None = None) -> subprocess.Popen[bytes]:
        task = ["srun", "--nodes", self.nodes, "--ntasks-per-node=1"]
        stderr = None if output is None else subprocess.STDOUT
        return subprocess.Popen([*task, *words], stdout=output, stderr=stderr, preexec_fn=in_child)

    def torchrun(self, *words: str, port: int, restarts: int, suffix: str = "") -> list[str]:
        """torchrun of a node, below the agent that forwards signals to its ranks."""
        agent = [self.python, "-m", "launcher.slurm.agent"]
        if self.slurm.interface:
            agent += ["--interface", self.slurm.interface]
        options = {
            "--nnodes": self.nodes,
            "--nproc-per-node": str(ranks_per_node(self.slurm)),
            "--max-restarts": str(restarts),
            "--rdzv-backend": "c10d",
            "--rdzv-endpoint": f"{self.host}:{port}",
            "--rdzv-id": f"{os.environ['SLURM_JOB_ID']}.{self.restart}{suffix}",
            "--rdzv-conf": "is_host={is_host}",
            "--local-addr": "{address}",
        }
        torchrun = [*agent, self.python, "-m", "torch.distributed.run"]
        return [*torchrun, *(word for pair in options.items() for word in pair), "-m", *words]

    def preflight(self) -> list[str]:
        """Checks each node alone, then all together. Returns the nodes that are not fit."""
        folder, log_file = str(self.run_dir), self.logs / "preflight_nodes.log"
        doctor = ["launcher.cli.main", "doctor"]
        words = [self.python, "-m", *doctor, "--node", f"runs={folder}", f"shared={folder}"]
        status = self._look(_PREFLIGHT_NODES_SECONDS, log_file, *words)
        if self.requests.any():
            return []
        nodes = hostnames(self.nodelist)
        bad = preflight.report(*preflight.each(log_file, nodes, status=status), log_file)
        if bad or len(nodes) == 1:
            return bad
        result, log_file = self.logs / "preflight_all.json", self.logs / "preflight_all.log"
        port = self.port - 10000
        words = [*doctor, "quick=true", f"shared={folder}", f"json={result}"]
        command = self.torchrun(*words, port=port, restarts=0, suffix=".preflight")
        status = self._look(_PREFLIGHT_ALL_SECONDS, log_file, *command)
        if self.requests.any():
            return []
        return preflight.report(*preflight.together(result, nodes, status=status), log_file)

    def _look(self, seconds: float, log_file: Path, *command: str) -> int:
        """Runs a command on every node, until it ends, is late, or the job must end.

        Returns its exit status; `preflight.LATE` if it was late.
        """
        if self.requests.any():
            return 0
        started, late = time.monotonic(), False
        with log_file.open("w") as output:
            process = self.srun(*(self.slurm.srun_extra or ()), *command, output=output)
            while process.poll() is None:
                self.requests.wait(1.0)
                elapsed = time.monotonic() - started
                late = late or elapsed >= seconds
                if late or self.requests.any():
                    process.terminate()
                if elapsed >= seconds + 60:  # it waits for processes that cannot be killed
                    process.kill()
        return preflight.LATE if late else process.returncode

    def train(self) -> int:
        """Trains until the run ends; returns srun's exit status."""
        words = ["launcher.train", f"recipe={self.recipe}"]
        command = self.torchrun(*words, port=self.port, restarts=self.slurm.max_restarts)
        output = f"--output={str(self.logs).replace('%', '%%')}/node_%N.log"
        process = self.srun(
            *("--kill-on-bad-exit=1", "--wait=60", output, *(self.slurm.srun_extra or ())),
            *("bash", "-c", 'trap "" USR1 TERM; exec "$@"', "bash", *command),
        )
        asked_at: float | None = None
        next_signal, checked = 0.0, False
        while process.poll() is None:
            self.requests.wait(1.0 if self.requests.any() else 3600.0)
            if not self.requests.any():
                continue
            now = time.monotonic()
            asked_at = now if asked_at is None else asked_at
            if now >= next_signal:
                process.send_signal(signal.SIGUSR1)
                next_signal = now + _SIGNAL_AGAIN_SECONDS
            if self.requests.terminated and not checked:
                # At once: this program may be killed before the ranks have saved
                checked = True
                if JobInfo.read(self.this).cancelled:
                    remove_successor(self.run_dir, self.job)
            # Ends a save that takes too long, to requeue the job before the time limit ends it
            if self.requests.warned and now - asked_at > self.lead - 15 and self.lead > 30:
                process.terminate()
        return process.returncode

    # The end

    def end(self, status: int, bad_nodes: Sequence[str]) -> int:
        """Requeues the job if it should be; returns its exit status. status: that of srun."""
        known = JobInfo.read(self.this)
        if known.restarts not in (None, self.requeued):
            log("Slurm has requeued the job itself: this start of it ends")
            return EXIT_FAILED
        if attempts.foreign_owner(self.run_dir, self.job):
            log("the run folder belongs to another job now: this one ends")
            remove_successor(self.run_dir, self.job)
            return EXIT_FAILED
        before = Record.read(self.run_dir, self.job)
        ended = self._ended(before, known, bad_nodes)
        limit = self.slurm.max_failures
        decision = attempts.end(self.run_dir, self.job, ended, max_failures=limit)
        log(f"{decision.why} (srun's exit status: {status})")
        if ended.refused:
            print(self.refused.read_text().strip(), file=sys.stderr, flush=True)
        if decision.action == "end":
            remove_successor(self.run_dir, self.job)
            return decision.status
        if not self.requeue(bad_nodes):
            before.write(self.run_dir)  # still open, so the job's successor resumes the run
            return EXIT_FAILED
        return EXIT_DONE

    def _ended(self, record: Record, known: JobInfo, bad_nodes: Sequence[str]) -> Ended:
        status = RunFolder(self.run_dir).read_status()
        fresh = status if status != record.found else {}
        return Ended(
            state=fresh.get("state"),
            reason=fresh.get("reason"),
            warned=self.requests.warned,
            terminated=self.requests.terminated,
            preempted=known.preempted,
            timed_out=known.timed_out,
            refused=self.refused.exists(),
            bad_nodes=tuple(bad_nodes),
            new_checkpoint=newest_checkpoint(self.run_dir) > record.checkpoint,
            failures=record.failures,
        )

    def requeue(self, bad_nodes: Sequence[str]) -> bool:
        """Requeues the job, without bad nodes. False: that is not possible."""
        known = JobInfo.read(self.this)
        # A job that was cancelled, or was started again elsewhere, would come back
        if known.state != "RUNNING" or known.restarts != self.requeued:
            ended = f"Slurm has ended this start of the job ({known.state or 'unknown'})"
            log(f"{ended}: its successor resumes the run")
            return False
        if scontrol("requeue", self.this) is None:
            log("could not be requeued: the job's successor resumes the run")
            return False
        # If all of several nodes are bad, the fault is elsewhere. The job does not start again
        # before this program has ended
        if bad_nodes and (len(bad_nodes) < int(self.nodes) or self.nodes == "1"):
            excluded = ",".join(filter(None, [known.excluded, *bad_nodes]))
            scontrol("update", f"JobId={self.this}", f"ExcNodeList={excluded}")
        return True


def read_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options, which the job's script writes; the rest is in the recipe's section slurm."""
    parser = argparse.ArgumentParser(prog="python -m launcher.slurm.job")
    parser.add_argument("--run", nargs=2, action="append", required=True, metavar=("DIR", "RECIPE"))
    parser.add_argument("--script", required=True, help="this job's, for its successor")
    parser.add_argument("--lead", type=int, required=True, help="seconds between warning and limit")
    parser.add_argument("--warned", type=int, default=0)
    parser.add_argument("--terminated", type=int, default=0)
    parser.add_argument("chain", nargs="*", help="of a successor: the first job, the one before")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status of the job."""
    options = read_options(arguments)
    requests = Requests(warned=bool(options.warned), terminated=bool(options.terminated))
    try:
        job = Job(options, requests)
    except RecipeError as error:
        print(error, file=sys.stderr, flush=True)
        return EXIT_USAGE
    if (status := job.begin()) is not None:
        return status
    bad_nodes = job.preflight() if job.slurm.preflight else []
    trained = 0 if requests.any() or bad_nodes else job.train()
    return job.end(trained, bad_nodes)


if __name__ == "__main__":
    sys.exit(main())
