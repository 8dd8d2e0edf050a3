"""What a run prints: log messages and a progress line."""

from __future__ import annotations

import contextlib
import io
import itertools
import logging
import math
import os
import shlex
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, cast

if TYPE_CHECKING:
    from rich.progress import Progress

LINE_SECONDS = 10.0
"""Seconds between two lines about a long task, where the output is not a terminal."""
QUIET_SECONDS = 2.0
"""Seconds of work without a line about it."""
_CLEAR = "\r\x1b[2K"
"""Erases the line of the cursor."""
_SHORTEST_BAR, _LONGEST_BAR = 5, 24
_IRRELEVANT = {
    "torchao": ("Failed to load ", "Skipping import of cpp extensions"),
    "bitsandbytes.backends.cpu.ops": ("Failed to load ",),
    "torch.utils._pytree": ("%s is an Enum subclass and is now natively supported",),
}
"""Beginnings of warnings that commands do not show, by logger. torchao and bitsandbytes cause them when
they are imported, which transformers and peft do if they are installed. What cannot be loaded is not
needed. The ranks of a run have them in their logs."""
_advances = itertools.count(1)  # any thread
_signs = 0
_stream: str | None = None
"""Where messages are printed; None: nowhere."""

logger = logging.getLogger(__name__)


def program() -> str:
    """How one types the launcher of this environment, for commands to paste: `launcher` if a shell
    finds it, else its path, relative where it is below the current folder."""
    own = Path(sys.executable).with_name("launcher")
    found = shutil.which("launcher")
    if not own.is_file():  # a part of another installation
        return "launcher" if found else f"{shlex.quote(sys.executable)} -m launcher"
    if found is not None and os.path.realpath(found) == os.path.realpath(own):
        return "launcher"
    with contextlib.suppress(OSError, ValueError):  # the current folder is gone, or not above it
        own = own.relative_to(Path.cwd())
    return shlex.quote(str(own) if len(own.parts) > 1 else f"./{own}")


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
        except Exception:  # as in logging.StreamHandler: a message that is lost ends no run
            self.handleError(record)


def prepare_streams() -> None:
    """Opens streams that the caller has closed, so that no other file gets their numbers, and lets
    standard output take characters that its encoding lacks."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            stream = open(os.devnull, mode)  # noqa: SIM115 (it stays open)
            os.set_inheritable(stream.fileno(), True)
            setattr(sys, name, stream)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def hide_irrelevant_warnings() -> None:
    """Hides warnings of libraries that say nothing about what a command does."""
    for library in _IRRELEVANT:
        logging.getLogger(library).addFilter(_is_relevant)


_held_console: int | None = None
"""The file descriptor of the console while `held_errors` holds back standard error."""


def say(text: str) -> None:
    """Prints a line to standard error. `held_errors` does not hold it back."""
    with contextlib.suppress(OSError):  # the reader of the console may be gone
        if _held_console is None:
            print(text, file=sys.stderr, flush=True)
        else:
            os.write(_held_console, f"{text}\n".encode(errors="backslashreplace"))


@contextmanager
def held_errors() -> Iterator[list[str]]:
    """Holds back what this process writes to standard error, such as warnings of libraries when they
    are imported. Yields a list that has it at the end, for the log. After an exception it is printed."""
    global _held_console
    held: list[str] = []
    sys.stderr.flush()
    console, file = os.dup(2), os.memfd_create("stderr")
    _held_console = console
    os.dup2(file, 2)
    try:
        yield held
    finally:
        failed = sys.exc_info()[0] is not None
        with contextlib.suppress(OSError):
            sys.stderr.flush()
        os.dup2(console, 2)
        _held_console = None
        os.lseek(file, 0, os.SEEK_SET)
        with os.fdopen(file, encoding="utf-8", errors="replace") as stream:
            held.append(stream.read())
        os.close(console)
        if failed:
            with contextlib.suppress(OSError):
                print(held[0], end="", file=sys.stderr, flush=True)


@contextmanager
def warnings_in(log: TextIO) -> Iterator[None]:
    """Writes Python's warnings, and the messages of libraries that nobody has configured, to a file
    in place of standard error. They may come in each step, and few are about the run."""
    handler = logging.StreamHandler(log)
    handler.setLevel(logging.WARNING)
    logger, last = logging.getLogger("py.warnings"), logging.lastResort
    logging.captureWarnings(True)
    logger.addHandler(handler)
    logging.lastResort = handler
    try:
        yield
    finally:
        logging.lastResort = last
        logger.removeHandler(handler)
        logging.captureWarnings(False)


def configure_logging(*, stream: str = "stdout") -> None:
    """Prints the launcher's log messages on `stdout` or `stderr`. Called once in each process."""
    global _stream
    _stream = stream
    launcher = logging.getLogger("launcher")
    launcher.setLevel(logging.INFO)
    launcher.handlers[:] = [_ConsoleHandler(stream)]


def _is_relevant(record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith(_IRRELEVANT[record.name])


def two_digits(value: float) -> str:
    """`5,800` for 5762, `0.57` for 0.5718: a prediction is no more precise than that."""
    rounded = float(f"{value:.2g}")
    return f"{rounded:,.0f}" if rounded >= 10 else f"{rounded:g}"


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


def finite(value: object) -> float | None:
    """The value if it is a finite number."""
    return value if isinstance(value, (int, float)) and math.isfinite(value) else None


def bytes_as_text(size: float) -> str:
    """`3.2 MiB`, `41.0 GiB`."""
    for unit in ("bytes", "KiB", "MiB"):
        if abs(size) < 1024:
            return f"{size:.0f} bytes" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"


def count_as_text(number: int) -> str:
    """`512`, `3.21 K`, `41.00 M`, `8.03 B`."""
    for unit, size in (("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if number >= size:
            return f"{number / size:.2f} {unit}"
    return str(number)


def plural(count: int | str, word: str, ending: str = "s") -> str:
    """`1 node`, `2 nodes`, `1,024 nodes`, `2-4 nodes`."""
    shown = count if isinstance(count, str) else f"{count:,}"
    return f"{shown} {word}{ending * (count != 1)}"


def aligned(rows: Sequence[Sequence[str]], sides: str) -> Iterator[str]:
    """The lines of a table with aligned columns, two spaces apart. `sides` has `<` or `>` for each
    column."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = zip(row, sides, widths, strict=True)
        yield "  ".join(f"{cell:{side}{width}}" for cell, side, width in cells).rstrip()


class _Terminal:
    """A terminal. What is written after it was closed is lost, and does not end the run."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _terminal() -> TextIO | None:
    """The terminal that messages are printed on, or None. It is not `sys.stdout`, whose text is
    also written to the log of the rank."""
    if _stream is None or not getattr(sys, _stream).isatty():
        return None
    terminal = getattr(sys, f"__{_stream}__")
    return None if terminal is None else cast("TextIO", _Terminal(terminal))


def _progress(terminal: TextIO, total: float) -> Progress:
    """A bar and a text in the last line of a terminal, which log messages erase. No thread redraws
    it: a process that is forked meanwhile could inherit its lock."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    console = Console(file=terminal, highlight=False)
    progress = Progress(
        BarColumn(
            _LONGEST_BAR, complete_style="green"
        ),  # not red; shorter where the text needs the room
        TextColumn("{task.description}", markup=False),
        console=console,
        auto_refresh=False,
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
    )
    progress.add_task("", total=total or None)
    terminal.write(_CLEAR)
    progress.start()
    console.show_cursor()  # it would stay hidden if this process is killed
    return progress


def advanced() -> None:
    """Must be called when long work without heartbeats has got further: tasks do it themselves."""
    global _signs
    _signs = next(_advances)


def signs_of_life() -> int:
    """A number that differs after long work of this process has got further, for the watchdog."""
    return _signs


@contextmanager
def task(what: str, total: float, *, background: bool = False) -> Iterator[Callable[[float], None]]:
    """Shows the progress of a long task: with a bar on a terminal, elsewhere in a log line every 10
    seconds. Yields a function that adds to the amount done, for any thread.

    total is the amount to be done; 0 means that it is not known, and that the amount is a number of
    micro-batches. With `background`, training continues and uses the terminal's last line, so this
    task only logs.
    """
    shown = not background and logger.isEnabledFor(logging.INFO)
    terminal, lock = _terminal() if shown else None, threading.Lock()
    bar = None if terminal is None else _progress(terminal, total)
    started = last = time.monotonic()
    done = 0.0

    def advance(amount: float = 1) -> None:
        nonlocal done, last
        advanced()
        with lock:
            done += amount
            now = time.monotonic()
            if now - last < (LINE_SECONDS if bar is None else 0.5):
                return
            last, text = now, f"{done:,.0f} micro-batches"
            if total:
                share = min(done / total, 1.0)
                left = (now - started) * (1 / share - 1) if share else math.inf
                text = f"{share:.0%}, {seconds_as_text(left)} left"
            if bar is None:
                logger.info(f"{what}: {text}")
            else:
                bar.update(
                    bar.task_ids[0], completed=done, description=f"{what}: {text}", refresh=True
                )

    try:
        yield advance
    finally:
        if bar is not None:
            bar.stop()


@contextmanager
def working(what: str, *, quiet: bool = False) -> Iterator[Callable[[str], None]]:
    """Shows on standard error that work on `what` continues: by a spinner in a terminal, and
    elsewhere by a line after two seconds. Yields a function that shows what the work has come to.

    quiet: shows nothing.
    """
    if quiet:
        yield lambda text: None
    elif sys.stderr.isatty():
        from rich.console import Console  # its import takes time

        with Console(stderr=True).status(what) as status:
            yield status.update
    else:

        def show(text: str) -> None:
            timer.cancel()
            with contextlib.suppress(OSError):  # its reader may be gone
                print(text, file=sys.stderr, flush=True)

        timer = threading.Timer(QUIET_SECONDS, lambda: show(f"{what} ..."))
        timer.daemon = True
        timer.start()
        try:
            yield show
        finally:
            timer.cancel()


def loss_as_text(record: Mapping[str, Any]) -> str:
    """The loss in a line of metrics.jsonl; why it is null where it is."""
    if record["loss"] is None:
        return "none (no target)" if record.get("loss_tokens") == 0 else "not finite"
    return f"{record['loss']:.4f}"


def losses_as_text(record: Mapping[str, Any]) -> str:
    """The losses of the sources of a mixture in a line of metrics.jsonl; empty without any."""
    losses = record.get("losses") or {}
    known = [f"{name} {loss:.4f}" for name, loss in losses.items() if loss is not None]
    return f"({', '.join(known)})" if known else ""


class ProgressLine:
    """One line for each logged step: redrawn on a terminal, elsewhere printed every few seconds."""

    def __init__(self, steps: int) -> None:
        self._steps, self._terminal = steps, _terminal()
        self._bar: Progress | None = None
        self._last = 0.0
        self._seconds: float | None = None
        self._loss: float | None = None

    def step(self, record: dict[str, Any], *, note: str | None = None) -> None:
        """Shows the record of a step, and a note such as a slow rank."""
        self._seconds = _smoothed(self._seconds, record["step_seconds"])
        if record["loss"] is not None:
            self._loss = _smoothed(self._loss, record["loss"])
        edge, now = record["step"] in (1, self._steps), time.monotonic()
        pause = 5.0 if self._terminal is None else 0.5
        if not edge and "skipped" not in record and now - self._last < pause:
            return
        self._last = now
        left = (self._steps - record["step"]) * self._seconds
        mean = "" if self._loss is None else f" mean {self._loss:.4f}"
        norm = "not finite" if record["grad_norm"] is None else f"{record['grad_norm']:.3f}"
        fields = [  # the lowest numbers are the most important
            (0, f"step {record['step']:>{len(str(self._steps))}}/{self._steps}"),
            (1, f"loss {loss_as_text(record)}{mean}"),
            (8, losses_as_text(record)),
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
            self._draw(self._terminal, record["step"], fields)

    def _draw(self, terminal: TextIO, step: int, fields: list[tuple[int, str]]) -> None:
        """Redraws the line. A narrow terminal shows only the most important fields."""
        if self._bar is None:
            self._bar = _progress(terminal, self._steps)
        left, kept = self._bar.console.width - 1 - _SHORTEST_BAR, set()
        for field in sorted(fields):
            if len(field[1]) + 2 <= left:
                left -= len(field[1]) + 2
                kept.add(field)
        text = "  ".join(field[1] for field in fields if field in kept)
        self._bar.update(self._bar.task_ids[0], completed=step, description=text, refresh=True)


def _smoothed(mean: float | None, value: float) -> float:
    """Exponential moving average, in which a new value has the weight 0.1."""
    return value if mean is None else 0.9 * mean + 0.1 * value
