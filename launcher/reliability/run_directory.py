"""RUN_DIR: the files that a run writes beside its metrics."""

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
    """A run folder. Rank 0 writes `recipe.yaml` and `status.json`; a rank that fails, the status.

    Each write is preceded by `check`: another job may have taken the folder.
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
        """Takes the lock of the folder. Raises RecipeError if another job has it."""
        self.ownership = Ownership.take(self.path, environment)

    def check(self) -> None:
        """Before each write. Raises TrainingError (reason superseded) if another job took over."""
        if self.ownership is not None:
            self.ownership.check()

    def release(self) -> None:
        """This process writes no more."""
        if self.ownership is not None:
            self.ownership.release()

    def was_begun_by(self, environment: Environment) -> bool:
        """Whether an earlier start of this job began what is in the folder. Before `note_start`.

        (torchrun's agent or Slurm started the job again. A restart alone does not tell: a job that
        was refused is restarted too.)
        """
        mine = {key: value for key, value in _identity(environment).items() if value is not None}
        return environment.restarted and any(
            event.get(key) == value
            for event in self._events()
            if event["event"] == "started"
            for key, value in mine.items()
        )

    def note_start(self, environment: Environment) -> None:
        """Writes the event of a start, and which job it belongs to."""
        self.note(
            "started",
            ranks=environment.world_size,
            job_restart_count=environment.job_restart_count,
            restart_count=environment.restart_count,
            **_identity(environment),
        )

    def was_started_from(self, checkpoint: str) -> bool:
        """Whether an earlier start of this folder resumed from this path (checkpoint.resume)."""
        origin = str(Path(checkpoint).resolve())
        return any(event.get("origin") == origin for event in self._events())

    def _events(self) -> list[dict[str, Any]]:
        try:
            return read_lines(self.events.read_text(encoding="utf-8"))
        except OSError:
            return []

    def refuse_if_used(self, why: str) -> None:
        """Raises RecipeError if an earlier run trained into this folder: its record would be lost.

        why: the run is not resumed. A folder whose run never finished a step is used again.
        """
        recorded = self.metrics.exists() and self.metrics.stat().st_size
        if not recorded and next((self.path / "checkpoints").glob("step_*"), None) is None:
            return
        status, known = self.read_status(), ""
        if "state" in status and "step" in status:
            known = f" ({status['state']}, step {status['step']})"
        raise RecipeError(
            f"run.dir: {self.path} holds a run already{known}, and {why}; give another folder, such as run.dir={self.path}-2, or remove it"
        )

    def create(self, recipe_yaml: str, *, anew: bool = True) -> None:
        """Makes the folder and writes the recipe. anew: not a resume, so the record begins empty.

        Raises RecipeError if that is not possible.
        """
        self.check()
        try:
            self.log.mkdir(parents=True, exist_ok=True)
            (self.path / "recipe.yaml").write_text(recipe_yaml)
            if anew:
                self.metrics.write_text("")
        except OSError as error:
            text = f"run.dir: {self.path} cannot be written to: {error.strerror}"
            raise RecipeError(text) from None

    def write_status(
        self,
        state: State,
        *,
        step: int,
        reason: str | None = None,
        error: str | None = None,
        **more: Any,
    ) -> None:
        """Replaces status.json."""
        self.check()
        status = {"state": state, "step": step, "reason": reason, "error": error, **more}
        replace_text(self._status, json.dumps(status | {"time": time.time()}, indent=1) + "\n")
        self._written = time.monotonic()

    def note_step(self, step: int, **more: Any) -> None:
        """Writes the step to status.json, every few seconds."""
        if time.monotonic() - self._written > 5:
            self.write_status("running", step=step, **more)

    def note(self, event: Event, *, ranks: int | None = None, **more: Any) -> None:
        """Appends a line to events.jsonl: `event`, `time`, `host`, `attempt` (the number of the
        start), `ranks` (the last ones given) and the keywords.

        started: `found`, `found_step` and `found_time` are what status.json and metrics.jsonl said
        when the attempt began. resumed: `step`, and `origin`, the checkpoint.resume that was a
        path. saved: `step`, `seconds`, `bytes`. failed, stopped: `step`, `reason`; out of memory
        in training: also `micro_batch_size`, `device`, `sequence_length`. finished: `step`.
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
            more = self._found() | more
        line: dict[str, Any] = {"event": event, "time": time.time(), "host": socket.gethostname()}
        line |= {"attempt": self._attempt, "ranks": ranks, **more}
        torn = "\n" if text and not text.endswith("\n") else ""  # the last writer was killed
        with self.events.open("a", encoding="utf-8") as stream:
            stream.write(torn + json.dumps(line) + "\n")

    def _found(self) -> dict[str, Any]:
        """What the folder says of the attempt before."""
        files = self.read_status(), last_line(self.metrics)
        return {
            "found": files[0].get("state"),
            "found_step": max(file.get("step") or 0 for file in files),
            "found_time": max(file.get("time") or 0.0 for file in files) or None,
        }

    def read_status(self) -> dict[str, Any]:
        """status.json; empty if there is none."""
        try:
            status = json.loads(self._status.read_text())
        except (OSError, ValueError):
            return {}
        return status if isinstance(status, dict) else {}


def _identity(environment: Environment) -> dict[str, str | None]:
    """What all starts of a job have in common: Slurm's id, torchrun's, the agent's."""
    agent = f"{socket.gethostname()}:{environment.parent}" if environment.torchrun else None
    run_id = environment.run_id if environment.run_id not in (None, "", "none") else None
    return {"job": environment.job, "run_id": run_id, "agent": agent}


def replace_text(file: Path, text: str) -> None:
    """Replaces a file atomically: a reader sees the old text or the new one, complete."""
    scratch = file.with_name(f".{file.name}.{os.getpid()}")
    scratch.write_text(text, encoding="utf-8")
    scratch.replace(file)


def read_lines(text: str) -> list[dict[str, Any]]:
    """Objects of a .jsonl file, without incomplete lines."""
    found = []
    for line in text.splitlines():
        with contextlib.suppress(ValueError):
            value = json.loads(line)
            if isinstance(value, dict):
                found.append(value)
    return found


def last_lines(file: Path, *, size: int = 64 << 10) -> list[dict[str, Any]]:
    """Objects in the last bytes of a .jsonl file; empty if there is none."""
    try:
        with file.open("rb") as stream:
            stream.seek(max(0, file.stat().st_size - size))
            return read_lines(stream.read().decode(errors="replace"))
    except OSError:
        return []


def last_line(file: Path, *, having: str = "step") -> dict[str, Any]:
    """The last object with this key near the end of a .jsonl file; empty if there is none."""
    return next((line for line in reversed(last_lines(file)) if having in line), {})


class _Tee:
    """A text stream that writes to two."""

    def __init__(self, first: TextIO, second: TextIO) -> None:
        self._first, self._second = first, second

    def write(self, text: str) -> int:
        # A line that a terminal draws over is not for a log
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
    """Sends what this rank prints to `log/rank_N.log`, on rank 0 to the console too.

    Yields the console. On other ranks the process's streams are redirected, so that the log also
    has what C++ libraries print.
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
