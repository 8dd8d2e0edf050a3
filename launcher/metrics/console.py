"""What a person watches: a line of progress that is drawn over on a terminal, and printed now and then elsewhere."""

from __future__ import annotations

import sys
import time
from typing import Any


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


class Console:
    """Progress of a run on standard output."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._live = sys.stdout.isatty()
        self._drawn = False
        self._last = 0.0
        self._width = len(str(steps))
        self._seconds: float | None = None

    def step(self, record: dict[str, Any]) -> None:
        """A logged step. On a terminal the line is drawn over; elsewhere one is printed every few seconds."""
        weight = 0.1
        current = record["step_seconds"]
        self._seconds = current if self._seconds is None else (1 - weight) * self._seconds + weight * current
        first, final = record["step"] == 1, record["step"] == self._steps
        now = time.monotonic()
        if not (first or final or "skipped" in record) and now - self._last < (0.1 if self._live else 5.0):
            return
        self._last = now
        line = self._line(record)
        if self._live and not (first or final):
            sys.stdout.write("\r\x1b[2K" + line)
            sys.stdout.flush()
            self._drawn = True
        else:
            self.say(line)

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

    def say(self, text: str) -> None:
        """A line that stays."""
        if self._drawn:
            sys.stdout.write("\r\x1b[2K")
            self._drawn = False
        sys.stdout.write(text + "\n")
        sys.stdout.flush()
