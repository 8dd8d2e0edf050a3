"""RUN_DIR: the files that a run writes beside its metrics."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, Literal, TextIO

from launcher.distributed.environment import Environment
from launcher.errors import RecipeError
from launcher.reliability.lock import Ownership

logger = logging.getLogger(__name__)

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
_BLOCK = 4096
"""Bytes of a file that a full disk has room for if the file exists."""

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
        self._unwritten: str | None = None
        self._event_lines = Lines(self.events)
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

    def exported_step(self) -> int | None:
        """The step of RUN_DIR/hf; None: not known, or the run has gone back since."""
        step = None
        for event in read_jsonl(self.events):
            if event.get("event") == "finished" and event.get("exported"):
                step = event.get("step")
            went_back = event.get("event") == "resumed" and event.get("step", 0) < (step or 0)
            if went_back or event.get("from_scratch"):
                step = None
        return step if isinstance(step, int) else None

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
            replace_text(self.path / "recipe.yaml", recipe_yaml)
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
        """An OSError is a warning: training continues on a full disk."""
        status = {"state": state, "step": step, "reason": reason, "error": error, **more}
        status["time"] = time.time()
        self._written = time.monotonic()
        try:
            self.check()
            try:
                replace_text(self._status, json.dumps(status, indent=1) + "\n")
            except OSError:  # perhaps it fits with a shorter error
                short = {k: v[:400] if isinstance(v, str) else v for k, v in status.items()}
                replace_text(self._status, json.dumps(short, indent=1) + "\n")
        except OSError as problem:
            if self._unwritten != str(problem):
                logger.warning(f"{self._status} cannot be written: {problem.strerror}")
            self._unwritten = str(problem)
        else:
            self._unwritten = None

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
        self._ranks = more.get("ranks", self._ranks)
        if self._attempt is None or event == "started":
            attempts = [line["attempt"] for line in read_jsonl(self.events)]
            self._attempt = max(attempts, default=0) + (event == "started")
        if event == "started":
            files = self.read_status(), last_line(self.metrics)
            more["found"] = files[0].get("state")
            more["found_step"] = max(file.get("step") or 0 for file in files)
            more["found_time"] = max(file.get("time") or 0.0 for file in files) or None
        line: dict[str, Any] = {"event": event, "time": time.time(), "host": socket.gethostname()}
        line |= {"attempt": self._attempt, "ranks": self._ranks, **more}
        self._event_lines.append(line, check=self.check)
        self._event_lines.close()  # other ranks append to it, too


def _identity(environment: Environment) -> dict[str, str | None]:
    """Ids that all starts of a job share: Slurm's job id, torchrun's run id, and its agent."""
    agent = f"{socket.gethostname()}:{environment.parent}" if environment.torchrun else None
    run_id = environment.run_id if environment.run_id not in (None, "", "none") else None
    return {"job": environment.job, "run_id": run_id, "agent": agent}


def replace_text(file: Path, text: str) -> None:
    """Replaces a file atomically. On a full disk it is overwritten instead, if the text fits into
    the blocks that the file has. Raises OSError."""
    scratch, data = file.with_name(f".{file.name}.{os.getpid()}"), text.encode()
    try:
        scratch.write_bytes(data)
        scratch.replace(file)
    except OSError as problem:
        with contextlib.suppress(OSError):
            scratch.unlink(missing_ok=True)
        size = file.stat().st_size if file.exists() else 0
        if problem.errno not in _NO_SPACE or not size or len(data) > max(size, _BLOCK):
            raise
        with file.open("r+b") as stream:
            stream.write(data)
            stream.truncate()


class Lines:
    """A .jsonl file to which lines are appended. Lines that cannot be written, for example on a
    full disk, stay in memory, are written with a later one, and do not end the run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._kept: list[bytes] = []
        self._file: BinaryIO | None = None

    def append(self, line: dict[str, Any], *, check: Callable[[], None] = lambda: None) -> None:
        """check: called before the file is changed."""
        waiting = len(self._kept)
        self._kept.append(json.dumps(line).encode() + b"\n")
        try:
            check()
            self._write()
        except OSError as problem:
            self.close()
            if not waiting:
                logger.warning(
                    f"{self.path} cannot be written: {problem.strerror}; its lines are kept in "
                    "memory, training continues"
                )
        else:
            if waiting:
                logger.info(f"{self.path} can be written again: {waiting} lines were added")

    def _write(self) -> None:
        if self._file is None:
            self._file = _open_to_append(self.path)
        data, end = memoryview(b"".join(self._kept)), os.fstat(self._file.fileno()).st_size
        try:
            while data:
                data = data[self._file.write(data) or 0 :]
        except OSError:
            with contextlib.suppress(OSError):
                self._file.truncate(end)  # a part of these lines may have been written
            raise
        self._kept.clear()

    def forget(self, wanted: Callable[[str], bool]) -> int:
        """Forgets the lines in memory that are not wanted; returns how many."""
        before = len(self._kept)
        self._kept = [line for line in self._kept if wanted(line.decode())]
        return before - len(self._kept)

    def close(self) -> None:
        """Closes the file; the next line opens it again."""
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):
                file.close()


def _open_to_append(file: Path) -> BinaryIO:
    """Opens a .jsonl file, and ends an incomplete line that a killed writer may have left."""
    stream = file.open("ab+", buffering=0)
    size = stream.seek(0, os.SEEK_END)
    stream.seek(max(0, size - 1))
    if size and stream.read(1) != b"\n":
        stream.write(b"\n")
    return stream


def append_line(file: Path, line: dict[str, Any]) -> None:
    """Appends to a .jsonl file; an OSError is a warning, and the line is lost."""
    lines = Lines(file)
    lines.append(line)
    lines.close()


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
    """A text stream that writes to one or two streams. What they cannot take, for example on a full
    disk, is lost, and does not end the run."""

    def __init__(self, first: TextIO, second: TextIO | None = None) -> None:
        self._first, self._second = first, second

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            if self._second is not None and "\r" not in text:  # else progress, for a terminal
                self._second.write(text)
        with contextlib.suppress(OSError):
            self._first.write(text)
        return len(text)

    def flush(self) -> None:
        for stream in (self._first, self._second):
            with contextlib.suppress(OSError):
                if stream is not None:
                    stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._first, name)


@contextlib.contextmanager
def rank_log(folder: Path, rank: int) -> Iterator[TextIO]:
    """Redirects the output of this rank to `log/rank_N.log`, and yields the console.

    The output of rank 0 goes to the console as well. On the other ranks the log also has the output
    of C++ libraries.
    """
    streams = sys.stdout, sys.stderr
    with contextlib.ExitStack() as stack:
        log = (folder / f"rank_{rank}.log").open("a", buffering=1, encoding="utf-8")
        stack.callback(_close, log)
        if rank == 0:
            console = sys.stderr
            sys.stdout, sys.stderr = _Tee(sys.stdout, log), _Tee(sys.stderr, log)
        else:
            sys.stdout.flush()
            sys.stderr.flush()
            saved = os.dup(1), os.dup(2)
            stack.callback(_restore, saved)
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
            console = os.fdopen(saved[1], "w", buffering=1, closefd=False)
            sys.stdout, sys.stderr = _Tee(sys.stdout), _Tee(sys.stderr)
        try:
            yield console
        finally:
            sys.stdout, sys.stderr = streams


def _close(stream: TextIO) -> None:
    with contextlib.suppress(OSError):  # of a full disk: the buffer cannot be written
        stream.close()


def _restore(saved: tuple[int, int]) -> None:
    """Makes standard output and error what they were."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    for descriptor, original in zip(saved, (1, 2), strict=True):
        os.dup2(descriptor, original)
        os.close(descriptor)
