"""RUN_DIR: the files that a run writes beside its metrics."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, TextIO, cast

from launcher.console import warnings_in
from launcher.distributed.environment import Environment
from launcher.errors import RecipeError
from launcher.files import replace_text
from launcher.reliability.json_files import (
    Json,
    Lines,
    last_line,
    read_jsonl,
    well_formed,
)
from launcher.reliability.lock import Ownership

logger = logging.getLogger(__name__)

State = Literal["running", "finished", "stopped", "failed"]
EXPERTS = "experts.json"
"""The load of each expert, for `launcher report`."""
_REPLACED = ("recipe.yaml", "samples.jsonl", EXPERTS, "status.json", "hf")
"""What a run from scratch replaces or removes."""
_PASSES = {"reference.safetensors": None, "teacher*_top_k.json": ".npy"}
"""What passes before the first step keep for the next start: the file that is written last, and the
suffix of that with the results; None: it is the same."""
_EVERY_EVENT = ("event", "time", "host", "attempt")
_OF_EVENT = {"saved": ("step",), "copied": ("step",), "resumed": ("step",)}
Event = Literal["started", "built", "resumed", "saved", "copied", "failed", "stopped", "finished"]


class RunFolder:
    """A run folder. Rank 0 writes there; a rank that fails writes the status."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.log = path / "log"
        self.metrics = path / "metrics.jsonl"
        self.events = path / "events.jsonl"
        self.export = path / "hf"
        self.ownership: Ownership | None = None
        """The lock of the folder; None if it was not taken: then any process may write."""
        self._status = path / "status.json"
        self._written = 0.0
        self._unwritten: str | None = None
        self._event_lines = Lines(self.events)
        self._found: Json | None = None
        """status.json at `note_found`."""
        self._writing = threading.Lock()
        self._attempt: int | None = None
        self._ranks: int | None = None

    def take(
        self, environment: Environment, *, refuse: Callable[[], object] = lambda: None
    ) -> None:
        """Takes the lock of the folder. Raises RecipeError if another job owns it, or what `refuse`
        raises, which is called before anything is changed."""
        self.ownership = Ownership.take(self.path, environment, refuse=refuse)

    def check(self) -> None:
        """Must be called before each write. Raises TrainingError (reason superseded) if another job
        took over."""
        if self.ownership is not None:
            self.ownership.check()

    def release(self) -> None:
        """Releases the lock, if this process has it."""
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
            for event in self.read_events()
            for key, value in mine.items()
        )

    def note_start(
        self, environment: Environment, overrides: Sequence[str] = (), *, from_scratch: bool = False
    ) -> None:
        """Notes the event `started`, with the arguments of this start."""
        self.note_found()
        self.note(
            "started",
            overrides=list(overrides),
            ranks=environment.world_size,
            job_restart_count=environment.job_restart_count,
            restart_count=environment.restart_count,
            from_scratch=from_scratch,
            git_commit=_git_commit(),
            **_identity(environment),
        )

    def note_found(self) -> None:
        """Remembers the content of status.json, which an earlier start wrote, for `outcome`."""
        self._found = self.read_status()

    def outcome(self) -> Json:
        """status.json if it was written since `note_found`; else empty."""
        status = self.read_status()
        return {} if self._found in (None, status) else status

    def exported_step(self) -> int | None:
        """The step of RUN_DIR/hf; None if it is not known or the run has gone back since."""
        step = None
        for event in self.read_events():
            if event["event"] == "finished" and event.get("exported"):
                step = event.get("exported_step", event.get("step"))
            went_back = event["event"] == "resumed" and event["step"] < (step or 0)
            if went_back or event.get("from_scratch"):
                step = None
        return step

    def overrides_of_last_start(self) -> list[str]:
        """The keys of the last start's arguments; the argument `recipe=NAME` is unchanged."""
        arguments = (self._starts() or [{}])[-1].get("overrides") or []
        return [
            argument if argument.startswith("recipe=") else argument.partition("=")[0]
            for argument in arguments
        ]

    def dropped_overrides(self, arguments: Sequence[str]) -> list[str]:
        """Overrides of the last start whose keys are not among the arguments of this start."""
        given = {argument.partition("=")[0] for argument in arguments}
        last: list[str] = (self._starts() or [{}])[-1].get("overrides") or []
        given |= {"recipe", "checkpoint.resume", "checkpoint.allow_changes"}
        return [override for override in last if override.partition("=")[0] not in given]

    def first_day(self) -> str:
        """The day (YYYY-MM-DD, UTC) of the run's first start; today if it was not started."""
        started = self._starts()
        from_scratch = [event for event in started if event.get("from_scratch")]
        first = (from_scratch[-1:] or started or [{"time": time.time()}])[0]
        return time.strftime("%Y-%m-%d", time.gmtime(first["time"]))

    def _starts(self) -> list[Json]:
        return [event for event in self.read_events() if event["event"] == "started"]

    def last_step(self) -> int:
        """The last step that metrics.jsonl or status.json names; 0 if metrics.jsonl is empty, as
        where the run starts from scratch. Not every step is logged (logging.every_steps)."""
        steps = (last_line(self.metrics).get("step"), self.read_status().get("step"))
        return int(max(step or 0 for step in steps)) if steps[0] else 0

    def saved_step(self) -> int:
        """The step of the newest checkpoint; 0 if there is none."""
        names = (path.name for path in (self.path / "checkpoints").glob("step_*"))
        return max((int(name[5:]) for name in names if name[5:].isdecimal()), default=0)

    def kept_before_training(self) -> Path | None:
        """The file that a pass before the first step of this start has written, with the results of
        a reference model or a teacher, or the folder with the rounds of distillation; None without
        one."""
        with contextlib.suppress(OSError):
            started = (self.path / "recipe.yaml").stat().st_mtime  # `create` writes it
            for last, kept in _PASSES.items():
                for file in self.path.glob(last):
                    if file.stat().st_mtime >= started:
                        return file if kept is None else file.with_suffix(kept)
            for file in (self.path / "rounds").glob("*.json"):
                if file.stat().st_mtime >= started:
                    return file.parent
        return None

    def was_started_from(self, checkpoint: str) -> bool:
        """Whether an earlier start resumed from this path (checkpoint.resume)."""
        origin = str(Path(checkpoint).resolve())
        return any(event.get("origin") == origin for event in self.read_events())

    def has_saved_nothing(self) -> bool:
        """Whether starts of a run have written here, and none has saved or exported anything, or
        finished: they were killed or stopped before the first checkpoint, or failed."""
        kept = any(
            not re.search(r"\.(writing|deleting)-", path.name)
            for path in (self.path / "checkpoints").glob("step_*")
        )
        if kept or os.path.lexists(self.export) or self.read_status().get("state") == "finished":
            return False
        events = self.read_events()
        return any(event["event"] == "started" for event in events) and not any(
            event["event"] in ("saved", "resumed", "finished") for event in events
        )

    def refuse_if_used(self, why: str) -> None:
        """Raises RecipeError if a run trained into this folder, which is not resumed for the reason
        `why`, or if it has files of the user that a run would replace."""
        recorded = self.metrics.exists() and self.metrics.stat().st_size
        if not recorded and not any((self.path / "checkpoints").glob("step_*")):
            replaced = [name for name in _REPLACED if os.path.lexists(self.path / name)]
            if replaced and not self.read_events():  # no start of a run wrote them
                what = f"holds {', '.join(replaced)}, not from a run, and a run would replace that"
                raise RecipeError(f"run.dir: {self.path} {what}; give another folder, or move it")
            return
        status = self.read_status()
        step = f", step {status['step']}" if status.get("step") is not None else ""
        known = f" ({status['state']}{step})" if status.get("state") else ""
        raise RecipeError(
            f"run.dir: {self.path} holds a run already{known}, and {why}; give another folder, "
            f"such as run.dir={self.path}-2, or remove it"
        )

    # Files

    def create(self, recipe_yaml: str, *, from_scratch: bool = True) -> None:
        """Makes the folder and writes the recipe. From scratch it also deletes metrics and samples.
        Raises RecipeError if that is not possible."""
        self.check()
        try:
            self.log.mkdir(parents=True, exist_ok=True)
            replace_text(self.path / "recipe.yaml", recipe_yaml, durable=True)
            if from_scratch:
                self.metrics.write_text("")
                for name in ("samples.jsonl", EXPERTS):
                    (self.path / name).unlink(missing_ok=True)
        except OSError as error:
            text = f"run.dir: {self.path} cannot be written to: {error.strerror}"
            raise RecipeError(text) from None

    def read_status(self) -> Json:
        """status.json; empty if there is none."""
        if not os.path.isfile(self._status):
            return {}
        try:
            return well_formed(json.loads(self._status.read_bytes()))
        except (OSError, ValueError, RecursionError):
            return {}

    def read_events(self) -> list[Json]:
        """The lines of events.jsonl that have the keys of their event."""
        return [
            event
            for event in read_jsonl(self.events)
            if all(
                event.get(key) is not None
                for key in (*_EVERY_EVENT, *_OF_EVENT.get(event.get("event", ""), ()))
            )
        ]

    def write_status(
        self,
        state: State,
        *,
        step: int,
        reason: str | None = None,
        error: str | None = None,
        **more: Any,
    ) -> None:
        """Replaces status.json. An OSError is a warning: training continues on a full disk.

        `running` does not replace the end of this start: a watchdog writes that while the training
        loop, of this rank or another one, may still run for a moment.
        """
        status = {"state": state, "step": step, "reason": reason, "error": error, **more}
        status["time"] = time.time()
        self._written = time.monotonic()
        try:
            self.check()
            with self._writing:
                if state != "running" or not self._has_ended():
                    self._replace_status(status)
        except OSError as problem:
            if self._unwritten != str(problem):
                logger.warning(f"{self._status} cannot be written: {problem.strerror}")
            self._unwritten = str(problem)
        else:
            self._unwritten = None

    def _has_ended(self) -> bool:
        """Whether status.json has the end of this process's start."""
        return self.outcome().get("state") in ("failed", "stopped")

    def _replace_status(self, status: Json) -> None:
        try:
            replace_text(self._status, json.dumps(status, indent=1) + "\n")
        except OSError:  # perhaps it fits with a shorter error
            short = {k: v[:400] if isinstance(v, str) else v for k, v in status.items()}
            replace_text(self._status, json.dumps(short, indent=1) + "\n")

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
            attempts = [line["attempt"] for line in self.read_events()]
            self._attempt = max(attempts, default=0) + (event == "started")
        if event == "started":
            files = self.read_status(), last_line(self.metrics)
            more["found"] = files[0].get("state")
            more["found_step"] = max(file.get("step") or 0 for file in files)
            more["found_time"] = max(file.get("time") or 0.0 for file in files) or None
        line: Json = {"event": event, "time": time.time(), "host": socket.gethostname()}
        line |= {"attempt": self._attempt, "ranks": self._ranks, **more}
        self._event_lines.append(line, check=self.check)
        self._event_lines.close()  # other ranks append to it, too


def _identity(environment: Environment) -> dict[str, str | None]:
    """Ids that all starts of a job share: Slurm's job id, torchrun's run id, and its agent."""
    agent = f"{socket.gethostname()}:{environment.parent}" if environment.torchrun else None
    run_id = environment.run_id if environment.run_id not in (None, "", "none") else None
    return {"job": environment.job, "run_id": run_id, "agent": agent}


def _git_commit() -> str | None:
    """The commit of the repository that this process was started in, with `-dirty` if files were
    changed since; None outside of one."""
    command = ["git", "describe", "--always", "--dirty", "--exclude=*", "--abbrev=40"]
    environment = os.environ | {"GIT_OPTIONAL_LOCKS": "0"}  # reads only
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        options: Any = {"capture_output": True, "text": True, "env": environment, "timeout": 5}
        return subprocess.run(command, check=False, **options).stdout.strip() or None
    return None


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
def rank_log(folder: Path, rank: int, *, before: str = "") -> Iterator[TextIO]:
    """Redirects the output of this rank to `log/rank_N.log`, and yields the console.

    What Python code of rank 0 prints goes to the console as well, but not warnings, and not what C++
    libraries write to standard error: a store that is gone writes 60 lines of its stack. before: what
    the log has before that.
    """
    streams = sys.stdout, sys.stderr
    with contextlib.ExitStack() as stack:
        log = (folder / f"rank_{rank}.log").open("a", buffering=1, encoding="utf-8")
        stack.callback(_close, log)
        only_log = _Tee(log)
        only_log.write(before)
        sys.stdout.flush()
        sys.stderr.flush()
        saved = os.dup(1), os.dup(2)
        stack.callback(_restore, saved)
        os.dup2(log.fileno(), 2)
        console = os.fdopen(saved[1], "w", buffering=1, closefd=False, errors="backslashreplace")
        if rank == 0:
            sys.stdout, sys.stderr = _Tee(sys.stdout, log), _Tee(console, log)
        else:
            os.dup2(log.fileno(), 1)
            sys.stdout, sys.stderr = _Tee(sys.stdout), _Tee(sys.stderr)
        stack.enter_context(warnings_in(cast("TextIO", only_log)))
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
