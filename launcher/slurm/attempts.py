"""The attempts of a job: how each one ended, whether the job is requeued, and its successor.

A job that was killed, or ended at its time limit, cannot requeue itself. Each job therefore has a
successor in the queue: the same script, with --dependency=afternotok. It is removed when the run is
over. If it starts nevertheless, it does nothing.
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import TypeAdapter

from launcher.checkpoint.files import list_checkpoints, step_of
from launcher.errors import EXIT_DONE, EXIT_FAILED, EXIT_STOPPED, EXIT_USAGE, RecipeError
from launcher.files import replace_text
from launcher.reliability.json_files import Json, append_line, read_jsonl
from launcher.reliability.run_directory import RunFolder
from launcher.slurm.scheduler import JobInfo, log, sbatch, slurm_command

_HOPELESS = ("recipe", "no_valid_checkpoint")
"""Reasons in status.json for which another attempt would end the same way."""


class Decision(NamedTuple):
    """What becomes of a job at its end."""

    requeue: bool
    status: int
    """Exit status of the job."""
    failures: int
    """Failures in a row, including this attempt."""
    why: str


def newest_checkpoint(run_dir: Path) -> int:
    """Step of the newest checkpoint; 0 if there is none."""
    try:
        return max(map(step_of, list_checkpoints(run_dir / "checkpoints")), default=0)
    except OSError:
        return 0


@dataclass
class Attempts:
    """RUN_DIR/slurm/attempts.json: the attempts of a job and its successors.

    An attempt that never ended, for example because its node was lost, is counted by the next one.
    """

    run_dir: Path
    max_failures: int
    job: str
    """The first job of the chain of successors."""
    failures: int = 0
    """Failures in a row, since the newest checkpoint was written."""
    checkpoint: int = 0
    """Step of the newest checkpoint when the attempt began."""
    found: Json = field(default_factory=dict)
    """status.json when the attempt began."""
    open: bool = False
    """The attempt has not ended, as far as is known."""
    successor: str | None = None

    @classmethod
    def read(cls, run_dir: Path, job: str, *, max_failures: int) -> Attempts:
        """Reads the attempts of a job. Attempts of another job in the same folder do not count."""
        with contextlib.suppress(OSError, ValueError, TypeError, RecursionError):
            values = json.loads((run_dir / "slurm" / "attempts.json").read_text())
            recorded = TypeAdapter(cls).validate_python(
                {**values, "run_dir": run_dir, "max_failures": max_failures}
            )
            if recorded.job == job:
                return recorded
        return cls(run_dir, max_failures, job, checkpoint=newest_checkpoint(run_dir))

    def write(self) -> None:
        """Writes attempts.json."""
        own = ("run_dir", "max_failures")
        values = {name: value for name, value in vars(self).items() if name not in own}
        replace_text(self.run_dir / "slurm" / "attempts.json", json.dumps(values) + "\n")

    def begin(self) -> str | None:
        """Records that an attempt begins. Returns why it must not begin, or None."""
        status, newest = RunFolder(self.run_dir).read_status(), newest_checkpoint(self.run_dir)
        if newest > self.checkpoint:
            self.failures = 0
        in_order = status != self.found and status.get("state") in ("stopped", "finished")
        self.failures += self.open and not in_order
        self.checkpoint, self.found = newest, status
        self.open = self.failures < self.max_failures
        self.write()
        if self.open:
            return None
        why = f"failed {self.failures} times in a row without a new checkpoint "
        why += f"(slurm.max_failures={self.max_failures}): not tried again"
        self._give_up(why)
        return why

    def decide(
        self, status: Mapping[str, Any], known: JobInfo, *, warned: bool, terminated: bool
    ) -> Decision:
        """Whether to requeue the job: not if it is finished, cancelled, or its recipe is at fault.

        status: status.json; empty: this attempt did not write it. warned: of a time limit or a
        preemption (SIGUSR1). terminated: by scancel and others (SIGTERM).
        """
        state, reason = status.get("state"), status.get("reason") or ""
        saved = "saved" if state == "stopped" else "not saved"
        new_checkpoint = newest_checkpoint(self.run_dir) > self.checkpoint
        failures = 0 if new_checkpoint else self.failures
        if state == "finished":
            return Decision(False, EXIT_DONE, 0, "finished")
        if state == "failed" and reason in _HOPELESS:
            return Decision(False, EXIT_USAGE, failures, "refused: another attempt would be, too")
        if known.preempted:  # no matter which signal announced it
            return Decision(True, EXIT_DONE, failures, f"preempted, {saved}: requeued")
        if known.timed_out and new_checkpoint:
            return Decision(True, EXIT_FAILED, failures, f"time limit, {saved}: requeued")
        if terminated and not known.timed_out:
            return Decision(False, EXIT_STOPPED, failures, f"terminated, {saved}: not requeued")
        by_file = reason.startswith("the file ")  # RUN_DIR/stop came before the warning
        if state == "stopped" and (by_file or not warned):
            return Decision(False, EXIT_STOPPED, failures, f"stopped ({reason}): not requeued")
        if warned and new_checkpoint:
            return Decision(True, EXIT_DONE, failures, "warned by Slurm, saved: requeued")
        failures += 1
        what = f"failed ({reason or 'before training began'})"
        if known.timed_out:
            what = "ended by Slurm at the time limit before a checkpoint was written"
        elif warned:
            what = "warned by Slurm before a checkpoint was written"
        what += f"; {failures} in a row without a new checkpoint, of slurm.max_failures="
        what += str(self.max_failures)
        if failures >= self.max_failures:
            return Decision(False, EXIT_FAILED, failures, f"{what}: not requeued")
        return Decision(True, EXIT_FAILED, failures, f"{what}: requeued")

    def end(self, decision: Decision, *, killed: bool) -> None:
        """Records how the attempt ended. Also writes status.json if the run is given up or was
        killed, because the ranks cannot record that."""
        self.failures, self.checkpoint = decision.failures, newest_checkpoint(self.run_dir)
        self.open = False
        self.write()
        if decision.status == EXIT_FAILED and not decision.requeue:
            self._give_up(decision.why)
        elif killed:
            self._write_failed("killed", decision.why)

    def _give_up(self, why: str) -> None:
        last = RunFolder(self.run_dir).read_status().get("error")
        self._write_failed("max_failures", why + (f"\nthe last: {last}" if last else ""))

    def _write_failed(self, reason: str, error: str) -> None:
        run = RunFolder(self.run_dir)
        step = run.read_status().get("step") or 0
        run.write_status("failed", step=step, reason=reason, error=error)

    # The successor

    def submit_successor(self, this: str, script: str, excluded: str) -> None:
        """Queues a successor of the job `this`, unless it is queued already.

        script: the script of the job. excluded: nodes that the successor must not get.
        """
        if self.successor is not None and JobInfo.read(self.successor).state == "PENDING":
            return
        options = [f"--dependency=afternotok:{this}", "--kill-on-invalid-dep=yes"]
        _, underscore, task = this.partition("_")
        options += [f"--array={task}"] if task else []
        options += [f"--exclude={excluded}"] if excluded else []
        try:
            self.successor = sbatch(script, *options, arguments=(self.job, this))
        except RecipeError as error:
            log(f"no successor is queued, should Slurm end this job: {error}")
            return
        self.write()
        note_submission(self.run_dir, self.successor + underscore + task, after=this)

    def remove_successor(self) -> None:
        """Cancels the successor: the run is finished, given up or cancelled."""
        if self.successor is not None:
            try:
                slurm_command("scancel", self.successor)
            except RecipeError as error:
                log(f"job {self.successor}, the successor, was not removed: {error}")
            self.successor = None

    def nothing_left(self, before: str) -> str | None:
        """Why the successor of the job `before` has nothing to do; None if it resumes the run."""
        if JobInfo.read(before).state == "CANCELLED":
            return f"job {before} was cancelled"
        return None if self.open else f"job {before} has ended"


def measured_lead(run_dir: Path) -> int | None:
    """Seconds between a warning and a limit: twice the slowest recent step and save.

    None: nothing was measured yet. At least 60: Slurm checks limits twice a minute.
    """
    run, size = RunFolder(run_dir), 256 << 10
    lines, events = read_jsonl(run.metrics, size=size), read_jsonl(run.events, size=size)
    steps: list[float] = [line["step_seconds"] for line in lines if line.get("step_seconds")]
    saved = [line.get("seconds") for line in events if line.get("event") == "saved"]
    saves: list[float] = [seconds for seconds in saved if seconds is not None]
    if not steps or not saves:
        return None
    return max(60, math.ceil(2 * (max(steps[-100:]) + max(saves[-10:]))))


def note_submission(run_dir: Path, job: str, **more: str) -> None:
    """Adds a line to RUN_DIR/slurm/submissions.jsonl."""
    line = {"job": job, "time": time.time(), **more}
    append_line(run_dir / "slurm" / "submissions.jsonl", line)


def submitted_jobs(run_dir: Path) -> list[str]:
    """The jobs that were submitted for a run."""
    lines = read_jsonl(run_dir / "slurm" / "submissions.jsonl")
    return [line["job"] for line in lines if line.get("job") is not None]
