"""What a run prints: log messages and a progress line."""

from __future__ import annotations

import logging
import math
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

LINE_SECONDS = 10.0
"""Seconds between two lines about a long task, where the output is not a terminal."""
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
    if not math.isfinite(seconds):
        return "an unknown time"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def finite(value: Any) -> float | None:
    """The value if it is a finite number."""
    return value if isinstance(value, (int, float)) and math.isfinite(value) else None


def bytes_as_text(size: float) -> str:
    """`3.2 MiB`, `41.0 GiB`."""
    for unit in ("bytes", "KiB", "MiB"):
        if abs(size) < 1024:
            return f"{size:.0f} bytes" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"


def aligned(rows: Sequence[Sequence[str]], sides: str) -> Iterator[str]:
    """The lines of a table with aligned columns, two spaces apart. `sides` has `<` or `>` for each
    column."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = zip(row, sides, widths, strict=True)
        yield "  ".join(f"{cell:{side}{width}}" for cell, side, width in cells).rstrip()


def _terminal() -> Any:
    """The stream of messages if it is a terminal, else None."""
    stream = getattr(sys, _stream) if _stream is not None else None
    return stream if stream is not None and stream.isatty() else None


def _draw(terminal: Any, done: float, total: float, fields: list[tuple[int, str]]) -> None:
    """Redraws the last line of a terminal, which log messages erase: a bar and fields. It never
    wraps: a narrow terminal shows only the fields with the lowest numbers."""
    from rich.console import Console
    from rich.progress_bar import ProgressBar
    from rich.table import Table

    console = Console(file=terminal, highlight=False)
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
    # A single write: text with a carriage return is not written to the log of the rank
    terminal.write(_CLEAR + captured.get().rstrip("\n"))
    terminal.flush()


@contextmanager
def task(what: str, total: float, *, background: bool = False) -> Iterator[Callable[[float], None]]:
    """Shows the progress of a long task: in a line that is redrawn on a terminal, elsewhere in a
    log line every 10 seconds. Yields a function that adds to the amount done, for any thread.

    total: amount to be done; 0: not known, and the amount is a number of micro-batches. background:
    training continues and uses the terminal's line, so this task only logs.
    """
    terminal, lock = None if background else _terminal(), threading.Lock()
    started = last = time.monotonic()
    done = 0.0

    def advance(amount: float = 1) -> None:
        nonlocal done, last
        with lock:
            done += amount
            now = time.monotonic()
            if now - last < (LINE_SECONDS if terminal is None else 0.5):
                return
            last = now
            share = min(done / total, 1.0) if total else 0.0
            fields = [what, f"{share:.0%}" if total else f"{done:,.0f} micro-batches"]
            if share:
                passed = now - started
                fields.append(f"{seconds_as_text(passed / share - passed)} left")
            if terminal is None:
                logger.info(f"{what}: {', '.join(fields[1:])}")
            else:
                _draw(terminal, done, total, list(enumerate(fields)))

    try:
        yield advance
    finally:
        if terminal is not None:
            terminal.write(_CLEAR)
            terminal.flush()


class ProgressLine:
    """One line for each logged step: redrawn on a terminal, elsewhere printed every few seconds."""

    def __init__(self, steps: int) -> None:
        self._steps, self._terminal = steps, _terminal()
        self._last = 0.0
        self._seconds: float | None = None
        self._loss: float | None = None

    def step(self, record: dict[str, Any], *, note: str | None = None) -> None:
        """note: shown with the step, such as a slow rank."""
        self._seconds = _smoothed(self._seconds, record["step_seconds"])
        if record["loss"] is not None:
            self._loss = _smoothed(self._loss, record["loss"])
        edge, now = record["step"] in (1, self._steps), time.monotonic()
        pause = 5.0 if self._terminal is None else 0.5
        if not edge and "skipped" not in record and now - self._last < pause:
            return
        self._last = now
        left = (self._steps - record["step"]) * self._seconds
        loss = "not finite" if record["loss"] is None else f"{record['loss']:.4f}"
        mean = "" if self._loss is None else f" mean {self._loss:.4f}"
        norm = "not finite" if record["grad_norm"] is None else f"{record['grad_norm']:.3f}"
        fields = [  # the lowest numbers are the most important
            (0, f"step {record['step']:>{len(str(self._steps))}}/{self._steps}"),
            (1, f"loss {loss}{mean}"),
            (5, f"grad norm {norm}"),
            (7, f"lr {record['learning_rate']:.2e}"),
            (3, f"{record['tokens_per_second']:,.0f} tokens/s"),
            (4, "" if record["mfu"] is None else f"MFU {record['mfu']:.1%}"),
            (6, f"{bytes_as_text(record['peak_memory_bytes'])} peak"),
            (0, "SKIPPED" if "skipped" in record else ""),
            (2, f"{seconds_as_text(left)} left"),
            (0, note or ""),
        ]
        fields = [field for field in fields if field[1]]
        if self._terminal is None or edge:
            logger.info("  ".join(text for _, text in fields))
        else:
            _draw(self._terminal, record["step"], self._steps, fields)


def _smoothed(mean: float | None, value: float) -> float:
    """Exponential moving average, in which a new value has the weight 0.1."""
    return value if mean is None else 0.9 * mean + 0.1 * value
