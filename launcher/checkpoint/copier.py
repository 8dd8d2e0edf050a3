"""Copies the checkpoints of a run to another place (checkpoint.copy_to) in a process of its own:
libraries of stores would take the interpreter's lock from the rank that trains.

`Copier` starts `python -m launcher.checkpoint.copier` and exchanges lines of JSON with it. Imports no
torch.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, Any

from pydantic import TypeAdapter

from launcher.checkpoint import files
from launcher.checkpoint.copies import (
    MARKER,
    RunCopy,
    SupersededError,
    outdated,
    own_record,
    small_files,
)
from launcher.checkpoint.files import DamagedCheckpointError
from launcher.console import advanced, bytes_as_text, seconds_as_text
from launcher.distributed.environment import alone
from launcher.distributed.spawn import end_with_parent
from launcher.errors import TrainingError
from launcher.files import StoredFile, blocks
from launcher.recipe import schema
from launcher.reliability.json_files import Json
from launcher.reliability.run_directory import RunFolder
from launcher.sources.location import TOGETHER, Location

logger = logging.getLogger(__name__)

_SILENT_SECONDS = 10.0
"""Between two lines about the last copy."""


class Copier:
    """Copies checkpoints while training continues, one at a time: if several were saved meanwhile, the
    newest. For rank 0. No method waits for a store, except `finish`."""

    def __init__(self, run: RunFolder, settings: schema.Checkpoint) -> None:
        self._run, self._settings = run, settings
        self._process: subprocess.Popen[bytes] | None = None
        self._answers: queue.SimpleQueue[Json | None] = queue.SimpleQueue()
        self._copy: Json | None = None
        self._discard: Json | None = None
        """Commands that a new process must be given again."""
        self._warned: str | None = None
        self.trouble: str | None = None
        """Why the last checkpoint was not copied, or None."""

    def copy(self, step: int, best: Collection[int] = ()) -> None:
        """Copies the checkpoint of a step, and removes those that the recipe does not keep. best: steps
        of checkpoints that are kept for the results of their evaluations."""
        self._copy = {"copy": step, "best": sorted(best)}
        self._send(self._copy)

    def discard_after(self, step: int) -> None:
        """Removes the checkpoints after a step, which the run repeats."""
        self._copy, self._discard = None, {"discard_after": step}
        self._send(self._discard)

    def report(self) -> None:
        """Logs what was copied since the last call. Raises TrainingError if another start of the run
        writes to the copy."""
        self._note_end()
        while not self._answers.empty():
            answer = self._answers.get()
            if answer is None:
                self._wait_for_end()
                return
            self._log(answer)

    def finish(self, *, export: bool) -> str | None:
        """Waits until the newest checkpoint and the small files are copied. export: RUN_DIR/hf, too.
        Returns what could not be copied, and why, or None. Raises the errors of `report`."""
        self.report()
        self._send({"finish": True, "export": export})
        started = shown = time.monotonic()
        done, total = 0, 0
        while True:
            try:
                answer = self._answers.get(timeout=1.0)
            except queue.Empty:
                answer = {}
            if answer is None:
                self._wait_for_end()
                return self.trouble
            if "finished" in answer:
                self.trouble = answer["finished"]
                return self.trouble
            done, total = done + answer.get("bytes", 0), answer.get("total", total)
            now = time.monotonic()
            if now - shown >= _SILENT_SECONDS:
                shown = now
                text = f"copying to {self._settings.copy_to}: {bytes_as_text(done)}"
                if total > done > 0:
                    left = (total - done) * (now - started) / done
                    text += f" of {bytes_as_text(total)}, {seconds_as_text(left)} left"
                logger.info(text)
            self._log(answer)

    def _send(self, *commands: Json) -> None:
        self._note_end()
        if self._process is None:
            again = [each for each in (self._discard, self._copy) if each is not None]
            commands = (self._start(), *again, *(each for each in commands if each not in again))
        assert self._process is not None
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # it has ended, which the next call notices
            for command in commands:
                self._process.stdin.write(json.dumps(command).encode() + b"\n")
            self._process.stdin.flush()

    def _start(self) -> Json:
        """Starts the process. Returns the first line that it reads."""
        paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
        log = (self._run.log / "copying.log").open("ab")
        command = [sys.executable, "-P", "-m", "launcher.checkpoint.copier", str(os.getpid())]
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env=alone() | {"PYTHONPATH": paths},
            start_new_session=True,  # Ctrl-C reaches the run only
        )
        log.close()
        self._process = process
        assert process.stdout is not None
        self._answers = queue.SimpleQueue()
        read = partial(_read_lines, process.stdout, self._answers)
        threading.Thread(target=read, name="answers of the copier", daemon=True).start()
        settings = {
            name: getattr(self._settings, name)
            for name in ("copy_to", "copy_bandwidth", "keep_last", "keep_every")
        }
        return {"run": str(self._run.path), **settings}

    def _wait_for_end(self) -> None:
        """After the last answer of a process."""
        assert self._process is not None
        self._process.wait()
        self._answers.put(None)
        self._note_end()

    def _note_end(self) -> None:
        """If the process has ended, logs its last answers and its exit status."""
        if self._process is None or self._process.poll() is None:
            return
        while (answer := self._answers.get()) is not None:
            self._log(answer)
        what = f"the process that copies checkpoints ended with status {self._process.returncode}"
        self._process = None
        self._log({"failed": f"{what}; {self._run.log / 'copying.log'} has what it printed"})

    def _log(self, answer: Json) -> None:
        if answer.get("bytes"):
            advanced()
        if answer.get("discarded"):
            self._discard = None
        if "said" in answer:
            logger.warning(answer["said"])
        if "superseded" in answer:
            text = answer["superseded"]
            raise TrainingError(f"checkpoint.copy_to: {text}; this one ends", reason="superseded")
        if "failed" in answer:
            self.trouble = answer["failed"]
            if self.trouble != self._warned:
                logger.warning(f"{self.trouble}; the checkpoint stays here, training continues")
            self._warned = self.trouble
        if "copied" in answer:
            self.trouble = self._warned = None
            step, size, seconds = answer["copied"], answer["size"], answer["seconds"]
            to = self._settings.copy_to
            logger.info(f"copy of step {step}: {bytes_as_text(size)} in {seconds:.1f} s to {to}")
            self._run.note("copied", step=step, bytes=size, seconds=seconds, to=to)


def _read_lines(stream: IO[bytes], answers: queue.SimpleQueue[Json | None]) -> None:
    for line in stream:
        answers.put(json.loads(line))
    answers.put(None)


# The process


class RateLimiter:
    """Limits the bytes a second that several threads send together. None: no limit."""

    def __init__(self, bandwidth: int | None) -> None:
        self._bandwidth, self._lock = bandwidth, threading.Lock()
        self._free = time.monotonic()

    def pieces(self, size: int) -> Iterator[int]:
        """Parts of so many bytes, none of which takes longer than a second."""
        most = self._bandwidth or size
        while size > 0:
            yield min(size, most)
            size -= most

    def wait(self, size: int) -> None:
        """Waits until `size` bytes may be sent, of those that `pieces` gives."""
        if self._bandwidth is None:
            return
        with self._lock:
            now = time.monotonic()
            begin = max(now, self._free)
            self._free = begin + size / self._bandwidth
        time.sleep(max(0.0, begin - now))


@dataclass
class _CopyWriter:
    """Writes and removes the files of the copy. No other process does, so the copy is listed once."""

    run: RunFolder
    settings: schema.Checkpoint
    copy: RunCopy
    start: str
    limiter: RateLimiter
    answers: IO[bytes]
    lock: threading.Lock
    _found: dict[int, dict[str, Location]] | None = None
    """The files of each checkpoint that is there, whole or not."""
    _whole: dict[int, bytes] = field(default_factory=dict)
    """The content of the marker of each whole checkpoint."""

    @property
    def found(self) -> dict[int, dict[str, Location]]:
        """The files of each checkpoint that is there, whole or not."""
        if self._found is None:
            self._found = self.copy.listed()
            for step, listed in self._found.items():
                if (checkpoint := self.copy.whole(step, listed)) is not None:
                    self._whole[step] = checkpoint.content
        return self._found

    def answer(self, **values: Any) -> None:
        """Sends a line of JSON to the run."""
        with self.lock:
            self.answers.write(json.dumps(values).encode() + b"\n")
            self.answers.flush()

    def discard_after(self, step: int) -> None:
        """Removes the checkpoints after a step."""
        for newer in sorted(self.found, reverse=True):
            if newer > step:
                self._remove(newer)

    def _remove(self, step: int) -> None:
        self.copy.check(self.start)
        self._whole.pop(step, None)
        self.copy.remove(self.found[step])
        del self.found[step]

    def copy_checkpoints(self, newest: int, best: Collection[int]) -> None:
        """Copies the checkpoint of a step, then older ones that are kept in any case, and removes those
        that are not kept."""
        folder, every = self.run.path / "checkpoints", self.settings.keep_every
        older = [files.step_of(path) for path in files.list_checkpoints(folder)]
        kept = [step for step in older if step in best or (every and step % every == 0)]
        for step in dict.fromkeys([newest, *reversed(kept)]):
            if step > newest:
                continue
            path = folder / files.checkpoint_name(step)
            with files.reading(path):
                try:
                    self._copy_checkpoint(path)
                except (OSError, DamagedCheckpointError):
                    if path.exists():
                        raise
                    continue  # it was deleted before its turn, and a newer one is there
        for step in outdated(self._whole, self.settings, best):
            self._remove(step)

    def _copy_checkpoint(self, path: Path) -> None:
        """Copies a checkpoint, unless it is there."""
        marker = files.read_marker(path)
        content = (path / MARKER).read_bytes()
        if self.found.get(marker.step) and self._whole.get(marker.step) == content:
            return
        started = time.monotonic()
        self.copy.check(self.start)
        found = self.found.setdefault(marker.step, {})
        self._whole.pop(marker.step, None)
        if MARKER in found:
            found.pop(MARKER).remove()
        target = self.copy.folder.inside("checkpoints").inside(path.name)
        found |= {name: target.inside(name) for name in marker.files}
        self._write_files(
            (found[name], path / name, stored) for name, stored in marker.files.items()
        )
        self.copy_small_files()
        self.copy.check(self.start)
        found[MARKER] = target.inside(MARKER)
        found[MARKER].write_bytes(content)
        self._whole[marker.step] = content
        size = sum(stored.bytes for stored in marker.files.values())
        seconds = time.monotonic() - started
        self.answer(copied=marker.step, size=size, seconds=seconds)

    def _write_files(self, every: Iterable[tuple[Location, Path, StoredFile]]) -> None:
        listed = list(every)
        sizes = [path.stat().st_size for _, path, _ in listed]
        self.answer(total=sum(sizes))

        def write(item: tuple[Location, Path, StoredFile], size: int) -> None:
            target, path, stored = item
            content = partial(blocks, path, stored=stored, sent=self._sent)
            target.write(content, size=size)

        with ThreadPoolExecutor(TOGETHER) as pool:
            for _ in pool.map(write, listed, sizes):
                pass

    def _sent(self, size: float) -> None:
        for piece in self.limiter.pieces(int(size)):
            self.limiter.wait(piece)
            self.answer(bytes=piece)

    def copy_small_files(self) -> None:
        """Copies the small files of the run folder."""
        own = Location(str(self.run.path))
        for file in small_files(own):
            if file.is_file():
                content = file.path.read_bytes()
                self._sent(len(content))
                relative = file.parts[len(own.parts) :]
                self.copy.folder.inside("/".join(relative)).write_bytes(content)

    def copy_export(self) -> None:
        """Copies RUN_DIR/hf."""
        folder = self.run.export
        size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        self.answer(total=size)
        self.copy.folder.inside("hf").upload(folder, advance=self._sent)


class _RunLogHandler(logging.Handler):
    """Sends warnings of this process to the run, which logs them."""

    def __init__(self, copying: _CopyWriter) -> None:
        super().__init__(logging.WARNING)
        self._copying = copying

    def emit(self, record: logging.LogRecord) -> None:
        self._copying.answer(said=record.getMessage())


class _CommandLoop:
    """Carries out the commands of the run. A later command replaces those that are not done yet."""

    def __init__(self, copying: _CopyWriter) -> None:
        self._copying = copying
        self._newest: int | None = None
        self._best: list[int] = []
        self._discard_after: int | None = None

    def handle(self, commands: list[Json]) -> None:
        """Carries out commands that have arrived together."""
        finish: Json | None = None
        for command in commands:
            if "copy" in command:
                self._newest, self._best = command["copy"], command["best"]
            if "discard_after" in command:
                step = self._discard_after = command["discard_after"]
                self._newest = None if (self._newest or 0) > step else self._newest
            finish = command if "finish" in command else finish
        trouble = self._attempt(self._copy_pending)
        if finish is not None:
            trouble = trouble or self._attempt(partial(self._finish, finish["export"]))
            self._copying.answer(finished=trouble)
        elif trouble is not None:
            self._copying.answer(failed=trouble)

    def _copy_pending(self) -> None:
        if self._discard_after is not None:
            self._copying.discard_after(self._discard_after)
            self._copying.answer(discarded=True)
            self._discard_after = None
        if self._newest is not None:
            self._copying.copy_checkpoints(self._newest, self._best)
            self._newest = None

    def _finish(self, export: bool) -> None:
        self._copying.copy_small_files()
        if export and self._copying.run.export.is_dir():
            self._copying.copy_export()

    def _attempt(self, action: Any) -> str | None:
        """Calls a function that uses the store. Returns why it failed, or None."""
        what = f"the checkpoint of step {self._newest} could not be copied"
        if self._newest is None:
            what = "the run could not be copied"
        try:
            action()
        except SupersededError as error:
            self._copying.answer(superseded=str(error))
            raise SystemExit(0) from None
        except OSError as error:
            return f"{what}: {error.filename or ''}: {error.strerror or error}"
        except ValueError as error:  # of a damaged checkpoint, or a run.json that is none
            return f"{what}: {error}"
        return None


def _main() -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # the run decides what is still copied
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    end_with_parent(int(sys.argv[1]))
    os.nice(10)
    output = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # libraries print to standard output, too
    given = json.loads(sys.stdin.buffer.readline())
    run = RunFolder(Path(given.pop("run")))
    settings = TypeAdapter(schema.Checkpoint).validate_python(given)
    record = own_record(run)
    assert record is not None
    assert settings.copy_to is not None
    limiter = RateLimiter(settings.copy_bytes)
    copy = RunCopy(settings.copy_to)
    lock = threading.Lock()
    copying = _CopyWriter(run, settings, copy, record.start, limiter, output, lock)
    logging.getLogger("launcher").addHandler(_RunLogHandler(copying))
    process = _CommandLoop(copying)
    commands: queue.SimpleQueue[Json | None] = queue.SimpleQueue()
    threading.Thread(target=_read_lines, args=(sys.stdin.buffer, commands), daemon=True).start()
    while True:
        waiting = [commands.get()]
        while not commands.empty():
            waiting.append(commands.get())
        process.handle([command for command in waiting if command is not None])
        if None in waiting:
            return


if __name__ == "__main__":
    _main()
