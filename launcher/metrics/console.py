"""What a run prints: log messages and a progress line."""

from __future__ import annotations

import logging
import sys
import time
from typing import Any

_CLEAR = "\r\x1b[2K"
"""Erases the line of the cursor."""

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


class ProgressLine:
    """One line for each logged step: redrawn on a terminal, elsewhere printed every few seconds."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._live = sys.stdout.isatty()
        self._last = 0.0
        self._width = len(str(steps))
        self._seconds: float | None = None

    def step(self, record: dict[str, Any]) -> None:
        current, now = record["step_seconds"], time.monotonic()
        self._seconds = current if self._seconds is None else 0.9 * self._seconds + 0.1 * current
        edge = record["step"] in (1, self._steps)
        pause = 0.1 if self._live else 5.0
        if not edge and "skipped" not in record and now - self._last < pause:
            return
        self._last = now
        line = self._line(record)
        if self._live and not edge:
            sys.stdout.write(_CLEAR + line)
            sys.stdout.flush()
        else:
            logger.info(line)

    def _line(self, record: dict[str, Any]) -> str:
        assert self._seconds is not None
        left = (self._steps - record["step"]) * self._seconds
        loss = "not finite" if record["loss"] is None else f"{record['loss']:.4f}"
        norm = "not finite" if record["grad_norm"] is None else f"{record['grad_norm']:.3f}"
        parts = [
            f"step {record['step']:>{self._width}}/{self._steps}",
            f"loss {loss}",
            f"grad norm {norm}",
            f"lr {record['learning_rate']:.2e}",
            f"{record['tokens_per_second']:,.0f} tokens/s",
        ]
        if record["mfu"] is not None:
            parts.append(f"MFU {record['mfu']:.1%}")
        parts.append(f"{bytes_as_text(record['peak_memory_bytes'])} peak")
        if "skipped" in record:
            parts.append("SKIPPED")
        parts.append(f"{seconds_as_text(left)} left")
        return "  ".join(parts)
