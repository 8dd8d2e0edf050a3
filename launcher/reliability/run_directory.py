"""RUN_DIR: the files that a run writes beside its metrics, and whether a folder may be written to."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, TextIO

from launcher.distributed.environment import Environment
from launcher.errors import RecipeError
from launcher.reliability.lock import Ownership

State = Literal["running", "finished", "stopped", "failed"]
Event = Literal["started", "resumed", "saved", "failed", "stopped", "finished"]


class RunFolder:
    """A run's folder. Rank 0 writes `recipe.yaml` and `status.json`; where a rank fails, that rank writes the status.

    Nothing is written that was not preceded by `check`: the folder may have passed to another job.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.log = path / "log"
        self.metrics = path / "metrics.jsonl"
        self.events = path / "events.jsonl"
        self.export = path / "hf"
        self.ownership: Ownership | None = None
        """None: not taken, so that anybody may write (tests, and ranks that have not met)."""
        self._status = path / "status.json"
        self._written = 0.0
        self._attempt: int | None = None
        self.resume = "auto"
        """Rank 0: what this start resumes from: `never`, `auto`, or a path (`choose_resume`)."""
        self._ranks: int | None = None

    def take(self, environment: Environment) -> None:
        """Makes this process the folder's owner, before it writes. Raises RecipeError where another job is."""
        self.ownership = Ownership.take(self.path, environment)

    def check(self) -> None:
        """Before each write. Raises TrainingError (reason superseded) where the folder passed to another job."""
        if self.ownership is not None:
            self.ownership.check()

    def release(self) -> None:
        """This process writes no more."""
        if self.ownership is not None:
            self.ownership.release()

    def was_begun_by(self, environment: Environment) -> bool:
        """Whether what is in the folder comes from an earlier start of this very job: before torchrun's agent, or Slurm, started
        it once more. A restart alone does not tell: what was refused is restarted too. To be asked before `note("started")`."""
        if not environment.restarted:
            return False
        try:
            events = read_lines(self.events.read_text(encoding="utf-8"))
        except OSError:
            return False
        mine = _identity(environment)
        return any(
            event["event"] == "started" and any(value is not None and event.get(key) == value for key, value in mine.items())
            for event in events
        )

    def note_start(self, environment: Environment) -> None:
        """A start, and whose it is."""
        self.note(
            "started",
            ranks=environment.world_size,
            job_restart_count=environment.job_restart_count,
            restart_count=environment.restart_count,
            **_identity(environment),
        )

    def was_started_from(self, checkpoint: str) -> bool:
        """Whether an earlier start of this folder resumed from this path of checkpoint.resume: the folder has its history."""
        try:
            events = read_lines(self.events.read_text(encoding="utf-8"))
        except OSError:
            return False
        return any(event.get("origin") == str(Path(checkpoint).resolve()) for event in events)

    def refuse_if_used(self, why: str) -> None:
        """Raises RecipeError where an earlier run trained into this folder: its record would be lost.

        why: the run is not resumed. A folder whose run never finished a step holds nothing to lose, and is used again.
        """
        recorded = self.metrics.exists() and self.metrics.stat().st_size
        if not recorded and next((self.path / "checkpoints").glob("step_*"), None) is None:
            return
        known = ""
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            status = json.loads(self._status.read_text())
            known = f" ({status['state']}, step {status['step']})"
        raise RecipeError(
            f"run.dir: {self.path} holds a run already{known}, and {why}; give another folder, such as run.dir={self.path}-2, or remove it"
        )

    def create(self, recipe_yaml: str, *, anew: bool = True) -> None:
        """Makes the folder and writes the recipe. anew: nothing is gone on from, so the record begins empty.

        Raises RecipeError where that is not possible.
        """
        self.check()
        try:
            self.log.mkdir(parents=True, exist_ok=True)
            (self.path / "recipe.yaml").write_text(recipe_yaml)
            if anew:
                self.metrics.write_text("")
        except OSError as error:
            raise RecipeError(f"run.dir: {self.path} cannot be written to: {error.strerror}") from None

    def write_status(self, state: State, *, step: int, reason: str | None = None, error: str | None = None, **more: Any) -> None:
        """Replaces status.json at once: a reader sees the old one or the new one, whole."""
        self.check()
        status = {"state": state, "step": step, "reason": reason, "error": error, **more, "time": time.time()}
        scratch = self._status.with_name(f".status.{os.getpid()}")
        scratch.write_text(json.dumps(status, indent=1) + "\n")
        scratch.replace(self._status)
        self._written = time.monotonic()

    def note_step(self, step: int, **more: Any) -> None:
        """Keeps the step in status.json fresh, every few seconds."""
        if time.monotonic() - self._written > 5:
            self.write_status("running", step=step, **more)

    def note(self, event: Event, *, ranks: int | None = None, **more: Any) -> None:
        """Appends a line to events.jsonl: `event`, `time`, `host`, `attempt` (1, 2, ... a start), `ranks`
        (as given last) and what is given.

        started: `found`, `found_step` and `found_time` are what status.json and metrics.jsonl said when the attempt began.
        resumed: `step`, and `origin`, the checkpoint.resume that was a path. saved: `step`, `seconds`, `bytes`. failed, stopped:
        `step`, `reason`; out of memory in training: also `micro_batch_size`, `device`, `sequence_length`. finished: `step`.
        """
        self.check()
        self._ranks = ranks = ranks if ranks is not None else self._ranks
        try:
            text = self.events.read_text(encoding="utf-8")
        except FileNotFoundError:
            text = ""
        if self._attempt is None or event == "started":
            attempts = [line["attempt"] for line in read_lines(text)]
            self._attempt = max(attempts, default=0) + (event == "started")
        if event == "started":
            status = self.read_status()
            last = last_line(self.metrics)
            found_step = max(status.get("step") or 0, last.get("step") or 0)
            found_time = max(status.get("time") or 0.0, last.get("time") or 0.0) or None
            more = {"found": status.get("state"), "found_step": found_step, "found_time": found_time, **more}
        line = {"event": event, "time": time.time(), "host": socket.gethostname(), "attempt": self._attempt, "ranks": ranks, **more}
        torn = "\n" if text and not text.endswith("\n") else ""  # what wrote last was killed
        with self.events.open("a", encoding="utf-8") as stream:
            stream.write(torn + json.dumps(line) + "\n")

    def read_status(self) -> dict[str, Any]:
        """status.json; empty where there is none."""
        try:
            status = json.loads(self._status.read_text())
        except (OSError, ValueError):
            return {}
        return status if isinstance(status, dict) else {}


def _identity(environment: Environment) -> dict[str, str | None]:
    """What stays the same when a job is started again: Slurm's id, torchrun's, the agent's."""
    agent = f"{socket.gethostname()}:{environment.parent}" if environment.torchrun else None
    run_id = environment.run_id if environment.run_id not in (None, "", "none") else None
    return {"job": environment.job, "run_id": run_id, "agent": agent}


def read_lines(text: str) -> list[dict[str, Any]]:
    """Objects of a .jsonl file; a torn line is left out."""
    found = []
    for line in text.splitlines():
        with contextlib.suppress(ValueError):
            value = json.loads(line)
            if isinstance(value, dict):
                found.append(value)
    return found


def last_line(file: Path, *, having: str = "step") -> dict[str, Any]:
    """The last object with this key in the last 64 KiB of a .jsonl file; empty where there is none."""
    try:
        with file.open("rb") as stream:
            stream.seek(max(0, file.stat().st_size - (64 << 10)))
            text = stream.read().decode(errors="replace")
    except OSError:
        return {}
    return next((line for line in reversed(read_lines(text)) if having in line), {})


class _Tee:
    """A text stream that writes to two."""

    def __init__(self, first: TextIO, second: TextIO) -> None:
        self._first, self._second = first, second

    def write(self, text: str) -> int:
        # A line that is drawn over again on a terminal is no line of a log.
        if "\r" not in text:
            self._second.write(text)
        return self._first.write(text)

    def flush(self) -> None:
        self._first.flush()
        self._second.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._first, name)


@contextlib.contextmanager
def rank_log(folder: Path, rank: int) -> Iterator[TextIO]:
    """Sends what this rank prints to `log/rank_N.log`, rank 0's to the console too; yields the console.

    Other ranks are redirected as processes, so what C++ libraries print is caught as well.
    """
    with (folder / f"rank_{rank}.log").open("a", buffering=1, encoding="utf-8") as log:
        if rank == 0:
            console, streams = sys.stderr, (sys.stdout, sys.stderr)
            sys.stdout, sys.stderr = _Tee(sys.stdout, log), _Tee(sys.stderr, log)
            try:
                yield console
            finally:
                sys.stdout, sys.stderr = streams
            return
        sys.stdout.flush()
        sys.stderr.flush()
        saved = os.dup(1), os.dup(2)
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        console = os.fdopen(saved[1], "w", buffering=1, closefd=False)
        try:
            yield console
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os.dup2(saved[0], 1)
            os.dup2(saved[1], 2)
            for descriptor in saved:
                os.close(descriptor)
