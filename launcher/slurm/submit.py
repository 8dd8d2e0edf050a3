"""Submission of a job: snapshots of recipe and script, and checks before sbatch."""

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
    """Versions of launcher and Python; in a checkout also its commit."""
    version: dict[str, Any] = {"launcher": __version__, "python": sys.version.split()[0]}
    folder = str(Path(__file__).resolve().parent)

    def git(*words: str) -> str:
        command = ["git", "-C", folder, *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
        return done.stdout.strip()

    with contextlib.suppress(OSError, subprocess.SubprocessError):
        version["commit"] = git("rev-parse", "HEAD")
        version["changed"] = bool(git("status", "--porcelain", "--untracked-files=no"))
    return version


@dataclass(frozen=True)
class Submission:
    """RUN_DIR/slurm/recipe_NAME.yaml, train_NAME.sbatch, and a line of submissions.jsonl."""

    run_dir: Path
    name: str
    """Unlike that of any other submission."""

    @classmethod
    def new(cls, run_dir: Path) -> Submission:
        """Named by the time."""
        return cls(run_dir, time.strftime("%Y%m%d_%H%M%S") + f"_{os.getpid()}")

    @property
    def folder(self) -> Path:
        """Files that belong to Slurm."""
        return self.run_dir / "slurm"

    @property
    def recipe(self) -> Path:
        """What the job trains, even if the submitted recipe changes."""
        return self.folder / f"recipe_{self.name}.yaml"

    @property
    def script(self) -> Path:
        """What sbatch was given."""
        return self.folder / f"train_{self.name}.sbatch"

    @property
    def _record(self) -> Path:
        return self.folder / "submissions.jsonl"

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """Raises RecipeError if the folder cannot be written to."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            yield
        except OSError as error:
            text = f"run.dir: {self.run_dir} cannot be written to: {error.strerror}"
            raise RecipeError(text) from None

    def write_recipe(self, recipe_yaml: str) -> None:
        """Raises RecipeError if the folder cannot be written to."""
        with self._writing():
            self.recipe.write_text(recipe_yaml)

    def note(self, job: str, version: Mapping[str, Any]) -> None:
        """Records the job's id and the version of the code."""
        line = {"job": job, "name": self.name, "time": time.time(), **version}
        with self._record.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(line) + "\n")

    def jobs(self) -> list[str]:
        """Ids of all jobs of this folder."""
        try:
            lines = read_lines(self._record.read_text(encoding="utf-8"))
        except OSError:
            return []
        return [str(line["job"]) for line in lines if "job" in line]

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """One submission of a folder at a time. Raises as `write_recipe`."""
        with self._writing():
            lock = (self.folder / ".lock").open("w")
        with lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def refuse_if_queued(submission: Submission) -> None:
    """Raises RecipeError if a job of this folder is queued or runs."""
    jobs = submission.jobs()
    active = scheduler.active_jobs() if jobs else {}
    for job in jobs:
        if job in active:
            raise RecipeError(
                f"run.dir: {submission.run_dir} has job {job} already ({active[job].lower()}); "
                f"wait for it, end it (scancel {job}), or give another run.dir"
            )


@dataclass(frozen=True)
class PlanCheck:
    """Whether a job fits, by the plan."""

    fits: bool | None
    """None: the plan cannot tell, or could not be made."""
    said: str


PLAN = (sys.executable, "-m", "launcher.cli.main", "plan")


def check_plan(arguments: Sequence[str], *, command: Sequence[str] = PLAN) -> PlanCheck:
    """Asks the plan in another process: it imports torch, which a login node should not keep.

    arguments: recipe=..., overrides, nodes=, gpus_per_node=, gpu= and the like, for `command`.
    Raises RecipeError if they are wrong.
    """
    words = [*command, *arguments, "ladder=false", "--json"]
    environment = scheduler.slurm_environment()
    try:
        done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=600)
    except (OSError, subprocess.TimeoutExpired) as error:
        return PlanCheck(None, f"no plan: {error}")
    try:
        plan = json.loads(done.stdout)
        fits, needed, spare = plan["fits"], plan["needed"], plan["spare"]
        phase = plan["peak"]["phase"]
    except (ValueError, KeyError, TypeError):
        if done.returncode == EXIT_USAGE:
            raise RecipeError(done.stderr.strip().splitlines()) from None
        last = done.stderr.strip().splitlines()[-1:] or [f"exit status {done.returncode}"]
        return PlanCheck(False if done.returncode == EXIT_NO else None, f"no plan: {last[0]}")
    text = f"plan: {bytes_as_text(needed)}"
    if spare is None:
        return PlanCheck(fits, f"{text} a GPU; how much memory it has is not known")
    memory = bytes_as_text(needed + spare)
    return PlanCheck(fits, f"{text} of a GPU's {memory}, at its peak ({phase})")
