"""The attempts of a job: how each one ended, whether the job is requeued, and its successor.

RUN_DIR/slurm/attempts.json counts failures since the last new checkpoint. An attempt that began and
never ended (its node was lost, for example) is counted by the next one.

A job that was killed, or ended at its time limit, cannot requeue itself. Each job therefore has a
successor in the queue: the same script, with --dependency=afternotok. It is removed when the run is
over. If it starts nevertheless, it does nothing.
"""

from __future__ import annotations

import json
import math
import os
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from launcher.checkpoint.files import list_checkpoints, step_of
from launcher.errors import EXIT_DONE, EXIT_FAILED, EXIT_STOPPED, EXIT_USAGE, RecipeError
from launcher.reliability.lock import current_owner
from launcher.reliability.run_directory import RunFolder, append_line, read_jsonl, replace_text
from launcher.slurm.scheduler import JobInfo, log, sbatch, slurm_command

DEFAULT_LEAD = 300
"""Seconds between Slurm's warning and a limit, before a step and a save were measured."""
SHORTEST_LEAD = 60
"""Slurm checks limits twice a minute."""
_HOPELESS = ("recipe", "no_valid_checkpoint")
"""Reasons in status.json for which another attempt would end the same way."""


@dataclass(frozen=True)
class Record:
    """attempts.json."""

    job: str
    failures: int
    """In a row, since the newest checkpoint was written."""
    checkpoint: int
    """Step of the newest checkpoint when the attempt began; 0: none."""
    found: dict[str, Any]
    """status.json when the attempt began."""
    open: bool
    """The attempt has not ended, as far as is known."""
    successor: str | None = None
    """The job that Slurm starts if this one ends without success."""

    @classmethod
    def read(cls, run_dir: Path, job: str) -> Record:
        """The record of this job. Failures of another job of the folder do not count."""
        try:
            record = cls(**json.loads((run_dir / "slurm" / "attempts.json").read_text()))
        except (OSError, ValueError, TypeError):
            record = None
        if record is None or record.job != job:
            return cls(job, 0, newest_checkpoint(run_dir), {}, False)
        return record

    def write(self, run_dir: Path) -> None:
        replace_text(run_dir / "slurm" / "attempts.json", json.dumps(asdict(self)) + "\n")


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How an attempt ended."""

    state: str | None = None
    """Of status.json; None: this attempt did not write it."""
    reason: str | None = None
    warned: bool = False
    """Slurm announced a time limit or a preemption."""
    terminated: bool = False
    """SIGTERM came: scancel, `scontrol requeue`, a time limit or a preemption."""
    preempted: bool = False
    timed_out: bool = False
    """Slurm ended the job at its time limit."""
    refused: bool = False
    """The recipe or the run folder is at fault."""
    bad_nodes: tuple[str, ...] = ()
    new_checkpoint: bool = False
    failures: int = 0
    """In a row, before this attempt."""


@dataclass(frozen=True)
class Decision:
    """What follows from how an attempt ended."""

    action: Literal["end", "requeue"]
    status: int
    """Exit status of the job."""
    failures: int
    """In a row, with this attempt."""
    why: str


def decide(ended: Ended, *, max_failures: int) -> Decision:
    """Whether to requeue the job: not if it is finished, cancelled, or its recipe is at fault."""
    before = 0 if ended.new_checkpoint else ended.failures
    saved = "saved" if ended.state == "stopped" else "not saved"
    if ended.state == "finished":
        return Decision("end", EXIT_DONE, 0, "finished")
    if ended.refused or (ended.state == "failed" and ended.reason in _HOPELESS):
        return Decision("end", EXIT_USAGE, before, "refused: another attempt would be, too")
    if ended.preempted:  # no matter which signal announced it
        return Decision("requeue", EXIT_DONE, before, f"preempted, {saved}: requeued")
    if ended.timed_out and ended.new_checkpoint:
        return Decision("requeue", EXIT_FAILED, before, f"time limit, {saved}: requeued")
    if ended.terminated and not ended.timed_out:
        return Decision("end", EXIT_STOPPED, before, f"terminated, {saved}: not requeued")
    by_file = (ended.reason or "").startswith("the file ")  # RUN_DIR/stop came before the warning
    if ended.state == "stopped" and (by_file or not ended.warned):
        return Decision("end", EXIT_STOPPED, before, f"stopped ({ended.reason}): not requeued")
    if ended.warned and ended.new_checkpoint:
        return Decision("requeue", EXIT_DONE, before, "warned by Slurm, saved: requeued")
    failures = before + 1
    if ended.bad_nodes:
        what = f"not fit to train: {', '.join(ended.bad_nodes)}"
    elif ended.timed_out:
        what = "ended by Slurm at the time limit before a checkpoint was written"
    elif ended.warned:
        what = "warned by Slurm before a checkpoint was written"
    else:
        what = f"failed ({ended.reason or 'before training began'})"
    what += f"; {failures} in a row without a new checkpoint, of slurm.max_failures={max_failures}"
    if failures >= max_failures:
        return Decision("end", EXIT_FAILED, failures, f"{what}: not requeued")
    return Decision("requeue", EXIT_FAILED, failures, f"{what}: requeued")


def measured_lead(run_dir: Path) -> int | None:
    """Twice the slowest recent step and save, in seconds; None: nothing was measured yet."""
    run, size = RunFolder(run_dir), 256 << 10
    lines, events = read_jsonl(run.metrics, size=size), read_jsonl(run.events, size=size)
    steps: list[float] = [line["step_seconds"] for line in lines if "step_seconds" in line]
    saves: list[float] = [line["seconds"] for line in events if line.get("event") == "saved"]
    if not steps or not saves:
        return None
    return max(SHORTEST_LEAD, math.ceil(2 * (max(steps[-100:]) + max(saves[-10:]))))


def newest_checkpoint(run_dir: Path) -> int:
    return max(map(step_of, list_checkpoints(run_dir / "checkpoints")), default=0)


def begin(run_dir: Path, job: str, *, max_failures: int) -> str | None:
    """Notes that an attempt begins. Returns why it may not; None: it may."""
    before, checkpoint = Record.read(run_dir, job), newest_checkpoint(run_dir)
    status = RunFolder(run_dir).read_status()
    failures = 0 if checkpoint > before.checkpoint else before.failures
    in_order = status != before.found and status.get("state") in ("stopped", "finished")
    failures += before.open and not in_order
    may = failures < max_failures
    Record(job, failures, checkpoint, status, may, successor=before.successor).write(run_dir)
    if may:
        return None
    why = f"failed {failures} times in a row without a new checkpoint "
    why += f"(slurm.max_failures={max_failures}): not tried again"
    _give_up(run_dir, job, why)
    return why


def end(run_dir: Path, job: str, ended: Ended, *, max_failures: int) -> Decision:
    """Decides and counts. Corrects status.json if the run is given up, or its ranks were killed."""
    decision = decide(ended, max_failures=max_failures)
    record, run = Record.read(run_dir, job), RunFolder(run_dir)
    newest = newest_checkpoint(run_dir)
    replace(record, failures=decision.failures, checkpoint=newest, open=False).write(run_dir)
    if decision.action == "end" and decision.status == EXIT_FAILED:
        _give_up(run_dir, job, decision.why)
    elif ended.state == "running":
        step = run.read_status().get("step") or 0
        run.write_status("failed", step=step, reason="killed", error=decision.why)
    return decision


def _give_up(run_dir: Path, job: str, why: str) -> None:
    run = RunFolder(run_dir)
    status = run.read_status()
    if not foreign_owner(run_dir, job):
        error = why + (f"\nthe last: {status['error']}" if status.get("error") else "")
        run.write_status("failed", step=status.get("step") or 0, reason="max_failures", error=error)


def foreign_owner(run_dir: Path, job: str) -> bool:
    """Whether another job owns the run folder."""
    found = current_owner(run_dir)
    if found is None or found[1] is False:
        return False
    return found[0].job not in (None, job, os.environ.get("SLURM_JOB_ID"))


# Submissions


def note_submission(run_dir: Path, job: str, **more: str) -> None:
    """Adds a line to RUN_DIR/slurm/submissions.jsonl."""
    line = {"job": job, "time": time.time(), **more}
    append_line(run_dir / "slurm" / "submissions.jsonl", line)


def submitted_jobs(run_dir: Path) -> list[str]:
    """Ids of all jobs of this folder."""
    return [line["job"] for line in read_jsonl(run_dir / "slurm" / "submissions.jsonl")]


def submit_successor(run_dir: Path, job: str, this: str, script: str, excluded: str) -> None:
    """Queues a successor, unless it is queued already.

    job: the first job of the chain. this: the job that runs. script: its own, for sbatch.
    excluded: nodes that the successor must not get.
    """
    record = Record.read(run_dir, job)
    if record.successor is not None and JobInfo.read(record.successor).state == "PENDING":
        return
    options = [f"--dependency=afternotok:{this}", "--kill-on-invalid-dep=yes"]
    _, underscore, task = this.partition("_")
    options += [f"--array={task}"] if task else []
    options += [f"--exclude={excluded}"] if excluded else []
    try:
        successor = sbatch(script, *options, arguments=(job, this))
    except RecipeError as error:
        log(f"no successor is queued, should Slurm end this job: {error}")
        return
    replace(record, successor=successor).write(run_dir)
    note_submission(run_dir, successor + underscore + task, after=this)


def remove_successor(run_dir: Path, job: str) -> None:
    """Cancels the successor: the run is finished, given up or cancelled."""
    successor = Record.read(run_dir, job).successor
    if successor is not None:
        try:
            slurm_command("scancel", successor)
        except RecipeError as error:
            log(f"the successor, job {successor}, was not removed; it will do nothing: {error}")


def nothing_left(run_dir: Path, job: str, before: str) -> str | None:
    """Why the successor of the job `before` has nothing to do; None: it resumes the run."""
    if JobInfo.read(before).state == "CANCELLED":
        return f"job {before} was cancelled"
    return None if Record.read(run_dir, job).open else f"job {before} has ended by itself"
