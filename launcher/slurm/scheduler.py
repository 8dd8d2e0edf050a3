"""The commands of Slurm."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from launcher.errors import RecipeError


def log(text: str) -> None:
    """Writes a line to the job's log."""
    print(f"{time.strftime('%F %T')} {text}", file=sys.stderr, flush=True)


def slurm_environment() -> dict[str, str]:
    """The environment without the variables of a job, whose CPUs and tasks a new job would get."""
    kept = ("SLURM_CONF", "SLURM_CLUSTERS", "SLURM_TIME_FORMAT")
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("SLURM_", "SBATCH_", "SRUN_")) or name in kept
    }


def slurm_command(*words: str) -> str:
    """What a command of Slurm prints. Raises RecipeError if it is missing, or refuses."""
    environment = slurm_environment()
    try:
        done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=120)
    except FileNotFoundError:
        advice = "submit on a machine that has Slurm, or print the script with --dry-run"
        raise RecipeError(f"{words[0]}: no such command; {advice}") from None
    except subprocess.TimeoutExpired:
        raise RecipeError(f"{words[0]}: Slurm did not answer within 120 s") from None
    if done.returncode:
        raise RecipeError(f"Slurm refused: {done.stderr.strip() or words[0]}")
    return done.stdout


def sbatch(script: Path | str, *options: str, arguments: tuple[str, ...] = ()) -> str:
    """Submits a script, with arguments for it; returns the job's id. Raises RecipeError."""
    words = ["sbatch", "--parsable", *options, str(script), *arguments]
    return slurm_command(*words).strip().split(";")[0]


def active_jobs() -> dict[str, str]:
    """State (PENDING, ...) of all jobs in the queue, by id; of tasks by ARRAY_TASK."""
    lines = slurm_command("squeue", "--noheader", "--array", "--format=%i %T").splitlines()
    return dict(line.split() for line in lines)


def scontrol(*words: str) -> str | None:
    """The output of scontrol; None if it failed: then the job's log says why."""
    for pause in (0, 1, 3, 10):  # a controller that restarts is back soon
        time.sleep(pause)
        try:
            return slurm_command("scontrol", *words)
        except RecipeError as error:
            log(f"scontrol {' '.join(words)}: {error}")
            if "nvalid" in str(error):
                break
    return None


@dataclass(frozen=True)
class JobInfo:
    """Slurm's record of a job; default values if Slurm does not answer or has no record."""

    state: str = ""
    restarts: int | None = None
    preempted: bool = False
    """Whether it was preempted in its current start."""
    end_time: float | None = None
    """End of the allocation, in seconds since 1970."""
    excluded: str = ""
    timed_out: bool = False

    @property
    def ending(self) -> bool:
        """Cancelled, or ended by Slurm."""
        return self.state in ("CANCELLED", "COMPLETING")

    @property
    def cancelled(self) -> bool:
        """Ended by scancel: not at the time limit, nor preempted or requeued."""
        return self.ending and not (self.timed_out or self.preempted)

    @classmethod
    def read(cls, job: str) -> JobInfo:
        """Asks Slurm for its record of a job."""
        values = dict(re.findall(r"(\w+)=(\S*)", scontrol("show", "job", "--oneliner", job) or ""))
        if "JobState" not in values:
            return cls()

        def seconds(key: str) -> float | None:
            try:
                return datetime.fromisoformat(values.get(key, "")).timestamp()
            except ValueError:  # None, Unknown
                return None

        preempted, started = seconds("PreemptTime"), seconds("StartTime")
        return cls(
            state=values["JobState"],
            restarts=int(values.get("Restarts", 0)),
            preempted=preempted is not None and preempted >= (started or 0.0),
            end_time=seconds("EndTime"),
            excluded=values.get("ExcNodeList", "").replace("(null)", ""),
            timed_out=values["JobState"] == "TIMEOUT" or values.get("Reason") == "TimeLimit",
        )
