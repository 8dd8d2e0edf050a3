"""Tests of the progress output of a run, on terminals and in files."""

import io
import re
import sys
import time

import pytest

from launcher import console
from launcher.console import ProgressLine, configure_logging, task

RECORD = {
    "loss": 12.34567,
    "grad_norm": 1234.567,
    "learning_rate": 1.234e-05,
    "tokens_per_second": 1_234_567.0,
    "step_seconds": 12.0,
    "mfu": 0.4123,
    "peak_memory_bytes": 75 << 30,
}


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def replace_stdout(monkeypatch):
    """Return a function that replaces stdout by a terminal of this width, or by a file if None."""

    def replace(columns):
        stream = io.StringIO() if columns is None else Terminal()
        monkeypatch.setattr(sys, "stdout", stream)
        monkeypatch.setattr(sys, "__stdout__", stream)
        monkeypatch.setenv("COLUMNS", str(columns))
        monkeypatch.setenv("TERM", "xterm-256color")
        configure_logging()
        return stream

    monkeypatch.setattr(console, "_stream", console._stream)
    return replace


def lines_on(stream):
    """Return the printed lines without escape sequences, and without empty bars."""
    text = re.sub(r"\x1b\[[0-9;?]*[A-JL-Za-z]", "", stream.getvalue())
    return [line for line in re.split(r"\r\x1b\[2K|\n|\r", text) if line.strip("━╺╸ ")]


@pytest.mark.parametrize("columns", [45, 80, 120, 170])
def test_live_line_fits_the_terminal(columns, replace_stdout, monkeypatch):
    stream = replace_stdout(columns)
    line = ProgressLine(100_000)
    for step in (1, 2, 50_000):
        monkeypatch.setattr(line, "_last", 0.0)
        line.step(RECORD | {"step": step}, note="rank 3 slow x1.6")
    first, *live = lines_on(stream)
    assert first.startswith("step      1/100000  loss 12.3457")
    assert len(live) == 2
    for text in live:
        assert len(text) <= columns
        assert "/100000" in text
        assert "rank 3 slow x1.6" in text
    shown = ["loss 12.3457 mean 12.3457", "left", "1,234,567 tokens/s", "MFU 41.2%"]
    shown += ["grad norm 1234.567", "75.0 GiB peak", "lr 1.23e-05"]
    shown = shown[: {45: 0, 80: 1, 120: 3, 170: 7}[columns]]
    assert all(text in live[-1] for text in shown), live


def test_plain_lines_without_a_terminal(replace_stdout, monkeypatch):
    stream = replace_stdout(None)
    line = ProgressLine(1000)
    for step in range(1, 9):
        monkeypatch.setattr(line, "_last", 0.0 if step == 8 else time.monotonic())
        line.step(RECORD | {"step": step, "loss": float(step)})
    assert lines_on(stream) == [
        "step    1/1000  loss 1.0000 mean 1.0000  grad norm 1234.567  lr 1.23e-05  1,234,567 tokens/s  "
        "MFU 41.2%  75.0 GiB peak  3 h 19 min left",
        "step    8/1000  loss 8.0000 mean 3.3047  grad norm 1234.567  lr 1.23e-05  1,234,567 tokens/s  "
        "MFU 41.2%  75.0 GiB peak  3 h 18 min left",
    ]
    assert "\x1b" not in stream.getvalue()


@pytest.mark.parametrize(("columns", "background"), [(80, False), (80, True), (None, False)])
def test_long_task_shows_its_progress(columns, background, replace_stdout, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(console.time, "monotonic", lambda: clock[0])
    stream = replace_stdout(columns)
    with task("loading weights", 100, background=background) as advance:
        for _ in range(50):
            clock[0] += 0.5
            advance(1)
    if columns and not background:
        live = lines_on(stream)
        assert len(live) >= 50
        assert all(len(text) <= 80 for text in live)
        assert "loading weights: 50%, 25 s left" in live[-1]
        assert stream.getvalue().endswith("\r\x1b[1A\x1b[2K"), "the bar is erased"
        assert stream.getvalue().rindex("\x1b[?25h") > stream.getvalue().rindex("\x1b[?25l")
    else:
        assert lines_on(stream) == [
            "loading weights: 20%, 40 s left",
            "loading weights: 40%, 30 s left",
        ]


def test_a_closed_terminal_does_not_end_the_run(monkeypatch):
    """The progress line ended a run with an error, before it could save after SIGHUP."""

    class Closed(io.StringIO):
        def isatty(self):
            return True

        def write(self, text):
            raise OSError(5, "Input/output error")

        def flush(self):
            self.write("")

    monkeypatch.setattr(sys, "stdout", Closed())
    monkeypatch.setattr(sys, "__stdout__", sys.stdout)
    monkeypatch.setattr(console, "_stream", "stdout")
    line = console.ProgressLine(9)
    names = ("step_seconds", "loss", "grad_norm", "learning_rate", "tokens_per_second", "mfu")
    for step in (2, 3):
        monkeypatch.setattr(line, "_last", -10.0)
        line.step({"step": step, "peak_memory_bytes": 1, **dict.fromkeys(names, 1.0)})
    assert line._bar is not None
    with console.task("saving", 2) as advance:
        advance(1)


def test_why_a_loss_is_null():
    assert console.loss_as_text({"loss": 2.0}) == "2.0000"
    assert console.loss_as_text({"loss": None, "loss_tokens": 3}) == "not finite"
    assert console.loss_as_text({"loss": None, "loss_tokens": 0}) == "none (no target)"
