"""RUN_DIR: the files that a run writes beside its metrics, and whether a folder may be written to."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, TextIO

from launcher.errors import RecipeError

State = Literal["running", "finished", "stopped", "failed"]


class RunFolder:
    """A run's folder. Rank 0 writes `recipe.yaml` and `status.json`; where a rank fails, that rank writes the status."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.log = path / "log"
        self.metrics = path / "metrics.jsonl"
        self.export = path / "hf"
        self._status = path / "status.json"
        self._written = 0.0

    def refuse_if_used(self) -> None:
        """Raises RecipeError where an earlier run trained into this folder: its record would be lost.

        A folder whose run never finished a step holds nothing to lose, and is used again.
        """
        if not (self.metrics.exists() and self.metrics.stat().st_size):
            return
        known = ""
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            status = json.loads(self._status.read_text())
            known = f" ({status['state']}, step {status['step']})"
        raise RecipeError(
            f"run.dir: {self.path} holds a run already{known}, and no checkpoint to resume from; "
            f"give another folder, such as run.dir={self.path}-2, or remove it"
        )

    def create(self, recipe_yaml: str) -> None:
        """Makes the folder and writes the recipe. Raises RecipeError where that is not possible."""
        try:
            self.log.mkdir(parents=True, exist_ok=True)
            (self.path / "recipe.yaml").write_text(recipe_yaml)
            self.metrics.write_text("")
        except OSError as error:
            raise RecipeError(f"run.dir: {self.path} cannot be written to: {error.strerror}") from None

    def write_status(self, state: State, *, step: int, reason: str | None = None, error: str | None = None, **more: Any) -> None:
        """Replaces status.json at once: a reader sees the old one or the new one, whole."""
        status = {"state": state, "step": step, "reason": reason, "error": error, **more, "time": time.time()}
        scratch = self._status.with_name(f".status.{os.getpid()}")
        scratch.write_text(json.dumps(status, indent=1) + "\n")
        scratch.replace(self._status)
        self._written = time.monotonic()

    def note_step(self, step: int, **more: Any) -> None:
        """Keeps the step in status.json fresh, every few seconds."""
        if time.monotonic() - self._written > 5:
            self.write_status("running", step=step, **more)


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
