"""What a run prints: log messages and a progress line."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

LINE_SECONDS = 10.0
"""Between two lines about a long task, where the output is not a terminal."""
_CLEAR = "\r\x1b[2K"
"""Erases the line of the cursor."""
_SHORTEST_BAR = 5
_stream: str | None = None
"""Where messages are printed; None: nowhere."""

logger = logging.getLogger(__name__)


class _ConsoleHandler(logging.Handler):
    """Prints messages, warnings and errors with their level. Erases a progress line first."""

    def __init__(self, stream: str) -> None:
        super().__init__()
        self._stream = stream

    def emit(self, record: logging.LogRecord) -> None:
        stream = getattr(sys, self._stream)  # looked up each time: `rank_log` replaces it
        text = record.getMessage()
        if record.levelno >= logging.WARNING:
            text = f"{record.levelname.lower()}: {text}"
        try:
            if stream.isatty():
                stream.write(_CLEAR)
            stream.write(text + "\n")
            stream.flush()
        except Exception:
            self.handleError(record)


def configure_logging(*, stream: str = "stdout") -> None:
    """Prints the launcher's log messages. Called once in each process. stream: `stdout` or
    `stderr`."""
    global _stream
    _stream = stream
    launcher = logging.getLogger("launcher")
    launcher.setLevel(logging.INFO)
    launcher.handlers[:] = [_ConsoleHandler(stream)]


def seconds_as_text(seconds: float) -> str:
    """`8 s`, `3 min 20 s`, `2 h 05 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def bytes_as_text(size: float) -> str:
    """`3.2 MiB`, `41.0 GiB`."""
    for unit in ("bytes", "KiB", "MiB"):
        if abs(size) < 1024:
            return f"{size:.0f} bytes" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"


def _short(number: float) -> str:
    """`812`, `12.2K`, `1.31M`."""
    for unit, size in (("M", 1e6), ("K", 1e3)):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:.0f}"


class _Terminal:
    """The last line of a terminal, redrawn in place. Log messages erase it."""

    def __init__(self) -> None:
        self._stream = getattr(sys, _stream or "stdout")
        self.live = _stream is not None and self._stream.isatty()

    def draw(self, done: float, total: float, fields: list[tuple[int, str]]) -> None:
        """A bar and fields in a line that never wraps. fields: priority and text; a narrow terminal
        shows only those with the lowest numbers."""
        from rich.console import Console
        from rich.progress_bar import ProgressBar
        from rich.table import Table

        console = Console(file=self._stream, highlight=False)
        left, kept = console.width - 1 - _SHORTEST_BAR, set()
        for field in sorted(fields):
            if len(field[1]) + 2 <= left:
                left -= len(field[1]) + 2
                kept.add(field)
        line = Table.grid(padding=(0, 2, 0, 0), pad_edge=False)
        bar = ProgressBar(total=total, completed=done, width=_SHORTEST_BAR + min(left, 24))
        line.add_row(bar, *(field[1] for field in fields if field in kept))
        with console.capture() as captured:
            console.print(line, end="", no_wrap=True)
        # In one piece: text with a carriage return is not written to the log of the rank
        self._stream.write(_CLEAR + captured.get().rstrip("\n"))
        self._stream.flush()

    def clear(self) -> None:
        self._stream.write(_CLEAR)
        self._stream.flush()


class _Task:
    """A long task that is under way. Any thread may advance it."""

    def __init__(self, what: str, total: float, *, background: bool) -> None:
        self._what, self._total, self._done = what, total, 0.0
        self._terminal, self._lock = _Terminal(), threading.Lock()
        self._live, self._drawn = self._terminal.live and not background, False
        self._started = self._last = time.monotonic()

    def advance(self, amount: float = 1) -> None:
        with self._lock:
            self._done += amount
            now = time.monotonic()
            if now - self._last < (0.5 if self._live else LINE_SECONDS):
                return
            self._last, passed = now, now - self._started
            share = min(self._done / self._total, 1.0) if self._total else 0.0
            state = f"{share:.0%}" if self._total else f"{self._done:,.0f} micro-batches"
            left = f"{seconds_as_text(passed / share - passed)} left" if share else ""
            if self._live:
                fields = [(0, self._what), (1, state), (2, left)]
                self._terminal.draw(self._done, self._total, fields)
                self._drawn = True
            else:
                logger.info(f"{self._what}: {state}" + f", {left}" * bool(left))

    def close(self) -> None:
        if self._drawn:
            self._terminal.clear()


@contextmanager
def task(what: str, total: float, *, background: bool = False) -> Iterator[Callable[[float], None]]:
    """Shows the progress of a long task: in a line that is redrawn on a terminal, elsewhere in a
    log line every 10 seconds. Yields a function that adds to the amount done.

    total: amount to be done; 0: not known, and the amount is a number of micro-batches. background:
    training continues and uses the terminal's line, so this task only logs.
    """
    shown = _Task(what, total, background=background)
    try:
        yield shown.advance
    finally:
        shown.close()


class ProgressLine:
    """One line for each logged step: redrawn on a terminal, elsewhere printed every few seconds."""

    def __init__(self, steps: int) -> None:
        self._steps, self._terminal = steps, _Terminal()
        self._last = 0.0
        self._width = len(str(steps))
        self._seconds: float | None = None
        self._loss: float | None = None

    def step(self, record: dict[str, Any], *, note: str | None = None) -> None:
        """note: shown with the step, such as a slow rank."""
        self._seconds = _smoothed(self._seconds, record["step_seconds"])
        if record["loss"] is not None:
            self._loss = _smoothed(self._loss, record["loss"])
        edge, now = record["step"] in (1, self._steps), time.monotonic()
        pause = 0.5 if self._terminal.live else 5.0
        if not edge and "skipped" not in record and now - self._last < pause:
            return
        self._last = now
        short = self._terminal.live and not edge
        fields = [*self._fields(record, short=short), *([(0, note)] if note else [])]
        if short:
            self._terminal.draw(record["step"], self._steps, fields)
        else:
            logger.info("  ".join(text for _, text in fields))

    def _fields(self, record: dict[str, Any], *, short: bool) -> list[tuple[int, str]]:
        """Each with its priority: 0 is the most important."""
        assert self._seconds is not None
        left = (self._steps - record["step"]) * self._seconds
        loss = "not finite" if record["loss"] is None else f"{record['loss']:.4f}"
        mean = "" if self._loss is None else f" mean {self._loss:.4f}"
        norm = "not finite" if record["grad_norm"] is None else f"{record['grad_norm']:.3f}"
        mfu, memory = record["mfu"], bytes_as_text(record["peak_memory_bytes"])
        rate = record["tokens_per_second"]
        count = f"{record['step']:>{self._width}}/{self._steps}"
        if short:
            texts = (count, f"norm {norm}", f"lr {record['learning_rate']:.1e}")
            speed, used = f"{_short(rate):>5} tok/s", memory
        else:
            texts = (f"step {count}", f"grad norm {norm}", f"lr {record['learning_rate']:.2e}")
            speed, used = f"{rate:,.0f} tokens/s", f"{memory} peak"
        fields = [
            (0, texts[0]),
            (1, f"loss {loss}{mean}"),
            (5, texts[1]),
            (7, texts[2]),
            (3, speed),
            (4, "" if mfu is None else f"MFU {mfu:.1%}"),
            (6, used),
            (0, "SKIPPED" if "skipped" in record else ""),
            (2, f"{seconds_as_text(left)} left"),
        ]
        return [field for field in fields if field[1]]


def _smoothed(mean: float | None, value: float) -> float:
    """Moves a mean by a tenth of the way."""
    return value if mean is None else 0.9 * mean + 0.1 * value
