"""Submission of a job: snapshots of recipe and script, and checks before sbatch."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from launcher import __version__
from launcher.errors import EXIT_NO, EXIT_USAGE, RecipeError
from launcher.metrics.console import bytes_as_text
from launcher.reliability.run_directory import append_line, read_jsonl
from launcher.slurm import scheduler


class Submission:
    """RUN_DIR/slurm/recipe_NAME.yaml, train_NAME.sbatch, and a line of submissions.jsonl."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir, self._folder = run_dir, run_dir / "slurm"
        self._name = time.strftime("%Y%m%d_%H%M%S") + f"_{os.getpid()}"
        self.recipe = self._folder / f"recipe_{self._name}.yaml"
        """What the job trains, even if the submitted recipe changes."""
        self.script = self._folder / f"train_{self._name}.sbatch"
        """The script for sbatch."""
        self._record = self._folder / "submissions.jsonl"

    def note(self, job: str) -> None:
        line = {"job": job, "name": self._name, "time": time.time(), "launcher": __version__}
        append_line(self._record, line)

    def jobs(self) -> list[str]:
        """Ids of all jobs of this folder."""
        return [str(line["job"]) for line in read_jsonl(self._record) if "job" in line]

    def refuse_if_queued(self) -> None:
        """Raises RecipeError if a job of this folder is queued or runs."""
        jobs = self.jobs()
        active = scheduler.active_jobs() if jobs else {}
        for job in jobs:
            if job in active:
                raise RecipeError(
                    f"run.dir: {self.run_dir} has job {job} already ({active[job].lower()}); "
                    f"wait for it, end it (scancel {job}), or give another run.dir"
                )

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """One submission of a folder at a time. Raises RecipeError if it cannot be written to."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            lock = (self._folder / ".lock").open("w")
        except OSError as error:
            text = f"run.dir: {self.run_dir} cannot be written to: {error.strerror}"
            raise RecipeError(text) from None
        with lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


PLAN = (sys.executable, "-m", "launcher.cli.main", "plan")


def check_plan(
    arguments: Sequence[str], *, command: Sequence[str] = PLAN
) -> tuple[bool | None, str]:
    """Whether the job fits by the plan (None: not known), and its answer as text.

    Another process plans, because torch should not stay in the memory of a login node. arguments:
    recipe=..., overrides, nodes=, gpus_per_node=, gpu= and the like, for `command`. Raises
    RecipeError if they are wrong.
    """
    words = [*command, *arguments, "ladder=false", "--json"]
    environment = scheduler.slurm_environment()
    try:
        done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=600)
    except (OSError, subprocess.TimeoutExpired) as error:
        return None, f"no plan: {error}"
    try:
        plan = json.loads(done.stdout)
        fits, needed, spare = plan["fits"], plan["needed"], plan["spare"]
        phase = plan["peak"]["phase"]
    except (ValueError, KeyError, TypeError):
        if done.returncode == EXIT_USAGE:
            raise RecipeError(done.stderr.strip().splitlines()) from None
        last = done.stderr.strip().splitlines()[-1:] or [f"exit status {done.returncode}"]
        return False if done.returncode == EXIT_NO else None, f"no plan: {last[0]}"
    text = f"plan: {bytes_as_text(needed)}"
    if spare is None:
        return fits, f"{text} a GPU, whose memory is not known"
    return fits, f"{text} of a GPU's {bytes_as_text(needed + spare)}, at its peak ({phase})"
