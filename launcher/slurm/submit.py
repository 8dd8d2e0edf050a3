"""From a rendered script to a job: snapshot, sbatch, who else is in the folder. No job of a folder is queued twice."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher import __version__
from launcher.errors import EXIT_NO, EXIT_USAGE, RecipeError
from launcher.metrics.console import bytes_as_text
from launcher.reliability.run_directory import read_lines
from launcher.slurm import scheduler


def code_version() -> dict[str, Any]:
    """Launcher, Python, and the commit where the launcher runs from a checkout."""
    version: dict[str, Any] = {"launcher": __version__, "python": sys.version.split()[0]}
    git = ["git", "-C", str(Path(__file__).resolve().parent)]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        options: dict[str, Any] = {
            "capture_output": True,
            "text": True,
            "timeout": 30,
            "check": True,
        }
        version["commit"] = subprocess.run([*git, "rev-parse", "HEAD"], **options).stdout.strip()
        version["changed"] = bool(
            subprocess.run(
                [*git, "status", "--porcelain", "--untracked-files=no"], **options
            ).stdout.strip()
        )
    return version


@dataclass(frozen=True)
class Submission:
    """A folder's snapshots: RUN_DIR/slurm/recipe_NAME.yaml, train_NAME.sbatch, and a line of submissions.jsonl."""

    run_dir: Path
    name: str
    """Unlike any other submission's."""

    @classmethod
    def new(cls, run_dir: Path) -> Submission:
        """Named by the time."""
        return cls(run_dir, time.strftime("%Y%m%d_%H%M%S") + f"_{os.getpid()}")

    @property
    def folder(self) -> Path:
        """Of what belongs to Slurm."""
        return self.run_dir / "slurm"

    @property
    def recipe(self) -> Path:
        """What the job trains, whatever becomes of the recipe that was submitted."""
        return self.folder / f"recipe_{self.name}.yaml"

    @property
    def script(self) -> Path:
        """As it was handed to sbatch."""
        return self.folder / f"train_{self.name}.sbatch"

    @property
    def _record(self) -> Path:
        return self.folder / "submissions.jsonl"

    def write_recipe(self, recipe_yaml: str) -> None:
        """Raises RecipeError where the folder cannot be written to."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.recipe.write_text(recipe_yaml)
        except OSError as error:
            raise RecipeError(
                f"run.dir: {self.run_dir} cannot be written to: {error.strerror}"
            ) from None

    def note(self, job: str, version: Mapping[str, Any]) -> None:
        """Keeps which job it became, of which code."""
        line = {"job": job, "name": self.name, "time": time.time(), **version}
        with self._record.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(line) + "\n")

    def jobs(self) -> list[str]:
        """Ids of all jobs that this folder was submitted with."""
        try:
            return [
                str(line["job"])
                for line in read_lines(self._record.read_text(encoding="utf-8"))
                if "job" in line
            ]
        except OSError:
            return []

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """One submission of a folder at a time."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            lock_file = (self.folder / ".lock").open("w")
        except OSError as error:
            raise RecipeError(
                f"run.dir: {self.run_dir} cannot be written to: {error.strerror}"
            ) from None
        with lock_file as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def refuse_if_queued(submission: Submission) -> None:
    """Raises RecipeError where a job of this folder is queued or runs."""
    jobs = submission.jobs()
    if not jobs:
        return
    active = scheduler.active_jobs()
    for job in jobs:
        if job in active:
            raise RecipeError(
                f"run.dir: {submission.run_dir} has job {job} already ({active[job].lower()}); "
                f"wait for it, end it (scancel {job}), or give another run.dir"
            )


@dataclass(frozen=True)
class PlanCheck:
    """What the plan says of a job before it is submitted."""

    fits: bool | None
    """None: it cannot tell, or could not be made."""
    said: str


def check_plan(
    arguments: Sequence[str],
    *,
    command: Sequence[str] = (sys.executable, "-m", "launcher.cli.main", "plan"),
) -> PlanCheck:
    """Asks the plan, in a process of its own: it imports torch, and a login node should not keep that.

    Raises RecipeError with what is wrong with the arguments.
    arguments: recipe=..., overrides, nodes=, gpus_per_node=, gpu= and the like. command: what to put before them.
    """
    words = [*command, *arguments, "ladder=false", "--json"]
    try:
        done = subprocess.run(
            words,
            env=scheduler.slurm_environment(),
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return PlanCheck(None, f"no plan: {error}")
    try:
        plan = json.loads(done.stdout)
        fits, needed, spare, phase = (
            plan["fits"],
            plan["needed"],
            plan["spare"],
            plan["peak"]["phase"],
        )
    except (ValueError, KeyError, TypeError):
        if done.returncode == EXIT_USAGE:
            raise RecipeError(done.stderr.strip().splitlines()) from None
        last = done.stderr.strip().splitlines()[-1:] or [f"exit status {done.returncode}"]
        return PlanCheck(False if done.returncode == EXIT_NO else None, f"no plan: {last[0]}")
    if spare is None:
        return PlanCheck(
            fits, f"plan: {bytes_as_text(needed)} a GPU; how much memory it has is not known"
        )
    return PlanCheck(
        fits,
        f"plan: {bytes_as_text(needed)} of a GPU's {bytes_as_text(needed + spare)}, at its peak ({phase})",
    )
