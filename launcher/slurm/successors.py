"""The successor of a job: Slurm starts it if the job ends without success.

A job that was killed, or ended at its time limit, cannot requeue itself. Each job therefore has a
successor in the queue: the same script, with --dependency=afternotok. It is removed when the run is
over, and does nothing if it starts all the same.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

from launcher.errors import RecipeError
from launcher.reliability.run_directory import append_line
from launcher.slurm.attempts import Record
from launcher.slurm.scheduler import JobInfo, log, sbatch, slurm_command


def submit_successor(run_dir: Path, job: str, this: str, script: str, excluded: str) -> None:
    """Queues a successor, unless it is queued already.

    job: the first job of the chain. this: the job that runs. script: its own, for sbatch.
    excluded: nodes that the successor must not get.
    """
    record = Record.read(run_dir, job)
    known = None if record.successor is None else JobInfo.read(record.successor)
    if known is not None and known.state == "PENDING":
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
    line = {"job": successor + underscore + task, "after": this, "time": time.time()}
    append_line(run_dir / "slurm" / "submissions.jsonl", line)


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
    record, known = Record.read(run_dir, job), JobInfo.read(before)
    if known is not None and known.state == "CANCELLED":
        return f"job {before} was cancelled"
    return None if record.open or record.left else f"job {before} has ended by itself"
