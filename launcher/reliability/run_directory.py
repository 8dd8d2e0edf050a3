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
Event = Literal["started", "built", "resumed", "saved", "verdict", "failed", "stopped", "finished"]


class RunFolder:
    """A run folder. Rank 0 writes there; a rank that fails writes the status."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.log = path / "log"
        self.metrics = path / "metrics.jsonl"
        self.events = path / "events.jsonl"
        self.export = path / "hf"
        self.ownership: Ownership | None = None
        """None: not taken, so any process may write."""
        self.resume = "auto"
        """Rank 0: what `choose_resume` returned."""
        self._status = path / "status.json"
        self._written = 0.0
        self._attempt: int | None = None
        self._ranks: int | None = None

    def take(self, environment: Environment) -> None:
        """Takes the lock of the folder. Raises RecipeError if another job owns it."""
        self.ownership = Ownership.take(self.path, environment)

    def check(self) -> None:
        """Must be called before each write. Raises TrainingError (reason superseded) if another job
        took over."""
        if self.ownership is not None:
            self.ownership.check()

    def release(self) -> None:
        if self.ownership is not None:
            self.ownership.release()

    # Earlier starts

    def was_begun_by(self, environment: Environment) -> bool:
        """Whether an earlier start of this job began the run in the folder.

        Must be called before `note_start`. A restart alone does not prove that an earlier start
        began the run: a refused job is restarted too.
        """
        mine = _identity(environment)
        return environment.restarted and any(
            value is not None and event.get(key) == value
            for event in read_jsonl(self.events)
            for key, value in mine.items()
        )

    def note_start(self, environment: Environment) -> None:
        self.note(
            "started",
            ranks=environment.world_size,
            job_restart_count=environment.job_restart_count,
            restart_count=environment.restart_count,
            from_scratch=self.resume == "never",
            **_identity(environment),
        )

    def first_day(self) -> str:
        """The day (YYYY-MM-DD, UTC) of the run's first start; today if it was not started."""
        started = [event for event in read_jsonl(self.events) if event.get("event") == "started"]
        anew = [event["time"] for event in started if event.get("from_scratch")]
        times = anew[-1:] or [event["time"] for event in started] or [time.time()]
        return time.strftime("%Y-%m-%d", time.gmtime(times[0]))

    def was_started_from(self, checkpoint: str) -> bool:
        """Whether an earlier start resumed from this path (checkpoint.resume)."""
        origin = str(Path(checkpoint).resolve())
        return any(event.get("origin") == origin for event in read_jsonl(self.events))

    def refuse_if_used(self, why: str) -> None:
        """Raises RecipeError if a run trained into this folder.

        why: the reason that the run is not resumed.
        """
        recorded = self.metrics.exists() and self.metrics.stat().st_size
        if not recorded and not any((self.path / "checkpoints").glob("step_*")):
            return
        status = self.read_status()
        known = f" ({status['state']}, step {status['step']})" if status else ""
        raise RecipeError(
            f"run.dir: {self.path} holds a run already{known}, and {why}; give another folder, "
            f"such as run.dir={self.path}-2, or remove it"
        )

    # Files

    def create(self, recipe_yaml: str, *, from_scratch: bool = True) -> None:
        """Makes the folder and writes the recipe. Raises RecipeError if that is not possible.

        from_scratch: discards metrics and samples.
        """
        self.check()
        try:
            self.log.mkdir(parents=True, exist_ok=True)
            (self.path / "recipe.yaml").write_text(recipe_yaml)
            if from_scratch:
                self.metrics.write_text("")
                (self.path / "samples.jsonl").unlink(missing_ok=True)
        except OSError as error:
            text = f"run.dir: {self.path} cannot be written to: {error.strerror}"
            raise RecipeError(text) from None

    def read_status(self) -> dict[str, Any]:
        """status.json; empty if there is none."""
        try:
            status: dict[str, Any] = json.loads(self._status.read_text())
        except (OSError, ValueError):
            return {}
        return status

    def write_status(
        self,
        state: State,
        *,
        step: int,
        reason: str | None = None,
        error: str | None = None,
        **more: Any,
    ) -> None:
        self.check()
        status = {"state": state, "step": step, "reason": reason, "error": error, **more}
        replace_text(self._status, json.dumps(status | {"time": time.time()}, indent=1) + "\n")
        self._written = time.monotonic()

    def note_step(self, step: int, **more: Any) -> None:
        """Writes the step to status.json, every few seconds."""
        if time.monotonic() - self._written > 5:
            self.write_status("running", step=step, **more)

    def note(self, event: Event, **more: Any) -> None:
        """Appends a line to events.jsonl: `event`, `time`, `host`, `attempt` (the number of the
        start), `ranks` (the last ones given) and the keywords.

        The event `started` also has `found`, `found_step` and `found_time`: the state in which the
        last attempt left the folder.
        """
        self.check()
        self._ranks = more.get("ranks", self._ranks)
        if self._attempt is None or event == "started":
            attempts = [line["attempt"] for line in read_jsonl(self.events)]
            self._attempt = max(attempts, default=0) + (event == "started")
        if event == "started":
            files = self.read_status(), last_line(self.metrics)
            more["found"] = files[0].get("state")
            more["found_step"] = max(file.get("step") or 0 for file in files)
            more["found_time"] = max(file.get("time") or 0.0 for file in files) or None
        line = {"event": event, "time": time.time(), "host": socket.gethostname()}
        append_line(self.events, line | {"attempt": self._attempt, "ranks": self._ranks} | more)


def _identity(environment: Environment) -> dict[str, str | None]:
    """Ids that all starts of a job share: Slurm's job id, torchrun's run id, and its agent."""
    agent = f"{socket.gethostname()}:{environment.parent}" if environment.torchrun else None
    run_id = environment.run_id if environment.run_id not in (None, "", "none") else None
    return {"job": environment.job, "run_id": run_id, "agent": agent}


def replace_text(file: Path, text: str) -> None:
    """Replaces a file atomically."""
    scratch = file.with_name(f".{file.name}.{os.getpid()}")
    scratch.write_text(text, encoding="utf-8")
    scratch.replace(file)


def append_line(file: Path, line: dict[str, Any]) -> None:
    """Appends to a .jsonl file, after an incomplete line that a killed writer may have left."""
    with file.open("ab+") as stream:
        size = stream.tell()
        stream.seek(max(0, size - 1))
        torn = size and stream.read(1) != b"\n"
        stream.write(b"\n" * bool(torn) + json.dumps(line).encode() + b"\n")


def read_jsonl(file: Path, *, size: int | None = None) -> list[dict[str, Any]]:
    """Objects of a .jsonl file, or of its last `size` bytes, without incomplete lines; empty if
    there is no such file."""
    found: list[dict[str, Any]] = []
    with contextlib.suppress(OSError), file.open("rb") as stream:
        stream.seek(max(0, file.stat().st_size - size) if size is not None else 0)
        for line in stream:
            with contextlib.suppress(ValueError):
                found.append(json.loads(line))
    return [value for value in found if isinstance(value, dict)]


def last_line(file: Path, *, having: str = "step") -> dict[str, Any]:
    """The last object with this key near the end of a .jsonl file; empty if there is none."""
    lines = read_jsonl(file, size=64 << 10)
    return next((line for line in reversed(lines) if having in line), {})


class _Tee:
    """A text stream that writes to two streams."""

    def __init__(self, first: TextIO, second: TextIO) -> None:
        self._first, self._second = first, second

    def write(self, text: str) -> int:
        if "\r" not in text:  # a progress line, which is for a terminal only
            self._second.write(text)
        return self._first.write(text)

    def flush(self) -> None:
        self._first.flush()
        self._second.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._first, name)


@contextlib.contextmanager
def rank_log(folder: Path, rank: int) -> Iterator[TextIO]:
    """Redirects the output of this rank to `log/rank_N.log`, and yields the console.

    The output of rank 0 goes to the console as well. On the other ranks the log also has the output
    of C++ libraries.
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
            for descriptor, stream in zip(saved, (1, 2), strict=True):
                os.dup2(descriptor, stream)
                os.close(descriptor)
