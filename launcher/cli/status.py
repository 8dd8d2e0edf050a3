"""`launcher status`: state, progress and lost time of a run, or a table of several runs.

Reads files only.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launcher.checkpoint.files import list_checkpoints, read_marker, verify
from launcher.errors import RecipeError
from launcher.metrics.console import bytes_as_text, seconds_as_text
from launcher.reliability.lock import current_owner
from launcher.reliability.run_directory import RunFolder, last_line, read_lines

_COLOURS = {"running": "green", "finished": "bold green", "stopped": "yellow", "starting": "cyan"}


@dataclass
class Attempt:
    """One start of the run, up to its end."""

    number: int
    started: float
    host: str
    ranks: int | None
    resumed: int = 0
    """Step that it resumed from."""
    ended: str = ""
    """How it ended."""
    end: float | None = None
    reached: int | None = None
    """Last known step."""


@dataclass
class Summary:
    """The state of a run by its files."""

    path: Path
    state: str
    """The state of status.json, or: starting where there is none yet, died where it says running
    but no process owns the run."""
    step: int = 0
    steps: int | None = None
    last: dict[str, Any] = field(default_factory=dict)
    """The last metrics of a step."""
    evaluation: dict[str, Any] = field(default_factory=dict)
    checkpoint: tuple[int, float, int] | None = None
    """The newest valid one: step, when, bytes."""
    valid: int = 0
    damaged: list[str] = field(default_factory=list)
    owner: str = ""
    reason: str | None = None
    error: str | None = None
    more: dict[str, Any] = field(default_factory=dict)
    """Other keys of status.json."""
    attempts: list[Attempt] = field(default_factory=list)
    until: float = 0.0
    """Time of its end or its last heartbeat, or now."""


@dataclass(frozen=True)
class Spent:
    """Where the time of a run went, in seconds; the parts add up to `wall`."""

    wall: float
    counted: float
    """In steps that are part of the result."""
    repeated: float
    """In steps that were lost and trained again; estimated by the mean step."""
    repeated_steps: int
    between: float
    """While no process ran it: in the queue, for example."""

    @property
    def rest(self) -> float:
        """Starting, evaluating, saving, waiting."""
        return max(0.0, self.wall - self.counted - self.repeated - self.between)


def main(folder: Path) -> int:
    """Prints it. Raises RecipeError where there is no run."""
    if not folder.is_dir():
        raise RecipeError(
            f"{folder}: there is no such folder" + (": it is a file" if folder.exists() else "")
        )
    now = time.time()
    if _is_run(folder):
        summary = summarize(folder, now)
        _print_one(summary, spent(summary, folder), now)
        return 0
    runs = [path for path in sorted(folder.iterdir()) if path.is_dir() and _is_run(path)]
    if not runs:
        raise RecipeError(f"{folder}: is no run's folder (there is no status.json), and holds none")
    _print_table([summarize(path, now) for path in runs], now)
    return 0


def _is_run(path: Path) -> bool:
    return any((path / name).exists() for name in ("status.json", "owner", "metrics.jsonl"))


def summarize(path: Path, now: float) -> Summary:
    """Reads status.json, events.jsonl, the end of metrics.jsonl, the owner and the checkpoints."""
    run = RunFolder(path)
    status = run.read_status()
    known = ("state", "step", "steps", "reason", "error", "time")
    summary = Summary(
        path,
        status.get("state", "starting"),
        reason=status.get("reason"),
        error=status.get("error"),
    )
    summary.more = {key: value for key, value in status.items() if key not in known}
    summary.last, summary.evaluation = (
        last_line(run.metrics, having="loss"),
        last_line(run.metrics, having="eval_loss"),
    )
    summary.step = max(status.get("step") or 0, summary.last.get("step") or 0)
    summary.steps = status.get("steps")
    summary.until = max(status.get("time") or 0.0, summary.last.get("time") or 0.0)
    owner = current_owner(path)
    if owner is not None:
        who, alive = owner
        said = {
            True: "alive",
            False: "gone",
            None: "no sign of life from that machine for some minutes",
        }[alive]
        summary.owner = f"{who.describe()}: {said}"
        if alive:
            summary.until = now
    if summary.state in ("running", "starting") and (owner is None or owner[1] is False):
        summary.state = "died"
        summary.reason = (
            "nobody runs it, and it did not say why it ended: killed, or its machine was lost"
        )
    for checkpoint in list_checkpoints(path / "checkpoints"):
        problem = verify(checkpoint, deep=False)
        if problem is not None:
            summary.damaged.append(f"{checkpoint.name}: {problem}")
            continue
        marker = read_marker(checkpoint)
        summary.valid += 1
        summary.checkpoint = (
            marker.step,
            marker.time,
            sum(file.bytes for file in marker.files.values()),
        )
    with contextlib.suppress(OSError):
        summary.attempts = read_attempts(read_lines(run.events.read_text(encoding="utf-8")))
    return summary


def read_attempts(events: list[dict[str, Any]]) -> list[Attempt]:
    """Attempts of events.jsonl. Where one has no end, the start of the next one says what it
    found."""
    attempts: dict[int, Attempt] = {}
    for event in events:
        number, name = event["attempt"], event["event"]
        if name == "started":
            previous = attempts.get(number - 1)
            if previous is not None and not previous.ended:
                previous.ended, previous.end = "without a word", event.get("found_time")
            if previous is not None:
                previous.reached = max(event.get("found_step") or 0, previous.reached or 0)
            attempts[number] = Attempt(number, event["time"], event["host"], event.get("ranks"))
        attempt = attempts.get(number)
        if attempt is None:
            continue
        if name == "resumed":
            attempt.resumed = event["step"]
        elif name in ("failed", "stopped", "finished") and not attempt.ended:
            reason = f" ({event['reason']})" if event.get("reason") else ""
            attempt.ended, attempt.end, attempt.reached = (
                name + reason,
                event["time"],
                event.get("step"),
            )
    return list(attempts.values())


def spent(summary: Summary, folder: Path) -> Spent | None:
    """None: no start is recorded."""
    attempts = summary.attempts
    if not attempts:
        return None
    counted, before, trained = 0.0, 0, 0
    with contextlib.suppress(OSError), RunFolder(folder).metrics.open(encoding="utf-8") as lines:
        for line in lines:
            with contextlib.suppress(ValueError):
                record = json.loads(line)
                if "step_seconds" in record:  # a mean over the steps since the last line
                    counted += record["step_seconds"] * (record["step"] - before)
                    trained += record["step"] - before
                    before = record["step"]
    pairs = list(itertools.pairwise(attempts))
    repeated = sum(max(0, (old.reached or 0) - new.resumed) for old, new in pairs)
    between = sum(
        max(0.0, new.started - (old.end if old.end is not None else new.started))
        for old, new in pairs
    )
    last = attempts[-1]
    end = last.end if last.end is not None else summary.until
    wall = max(end - attempts[0].started, counted)
    return Spent(
        wall,
        counted,
        min(repeated * counted / max(trained, 1), max(0.0, wall - counted - between)),
        repeated,
        between,
    )


def _ago(then: float, now: float) -> str:
    return f"{seconds_as_text(max(0.0, now - then))} ago"


def _number(value: Any, form: str = ".4f") -> str:
    return format(value, form) if isinstance(value, (int, float)) else "not finite"


def _steps(summary: Summary) -> str:
    return f"{summary.step:,}" + (f" of {summary.steps:,}" if summary.steps else "")


def _style(state: str) -> str:
    return _COLOURS.get(state, "bold red")


def _console() -> Any:
    from rich.console import Console

    console = Console(highlight=False)
    # Into a file or a pipe, lines stay whole
    return console if console.is_terminal else Console(highlight=False, width=1000)


def _show(console: Any, what: Any) -> None:
    if console.is_terminal:
        console.print(what)
        return
    with console.capture() as capture:
        console.print(what)
    print("\n".join(line.rstrip() for line in capture.get().splitlines()))


Row = tuple[str, str, str]
"""Name, text and style."""


def _print_one(summary: Summary, time_spent: Spent | None, now: float) -> None:
    from rich.table import Table
    from rich.text import Text

    console = _console()
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim")
    table.add_column()
    rows = [*_progress_rows(summary, now), *_file_rows(summary, now)]
    rows += [] if time_spent is None else _time_rows(time_spent)
    restarts = len(summary.attempts) - 1
    if summary.attempts:
        rows.append(("restarts", str(restarts) if restarts else "none", ""))
    for name, text, style in rows:
        table.add_row(name, Text(text, style=style))
    _show(console, Text(str(summary.path), style="bold"))
    _show(console, table)
    if restarts > 0:
        _show(console, _attempts_table(summary.attempts))
    if summary.error:
        _show(console, Text(summary.error, style="red"))


def _progress_rows(summary: Summary, now: float) -> Iterator[Row]:
    last, evaluation = summary.last, summary.evaluation
    why = f": {summary.reason}" if summary.reason and summary.state != "finished" else ""
    yield "state", summary.state + why, _style(summary.state)
    left = ""
    if summary.steps:
        left = f" ({summary.step / summary.steps:.1%})"
        if summary.state == "running" and last.get("step_seconds"):
            seconds = (summary.steps - summary.step) * last["step_seconds"]
            left += f", about {seconds_as_text(seconds)} left"
    yield "step", _steps(summary) + left, ""
    if last:
        norm = _number(last.get("grad_norm"), ".3f")
        text = f"{_number(last['loss'])}, grad norm {norm}, {_ago(last['time'], now)}"
        yield "loss", text, ""
    if evaluation:
        loss = _number(evaluation["eval_loss"])
        yield "evaluation", f"loss {loss} after step {evaluation['step']:,}", ""
    if last:
        mfu = f", MFU {last['mfu']:.1%}" if last.get("mfu") is not None else ""
        speed = f"{last['tokens_per_second']:,.0f} tokens/s"
        yield "speed", f"{speed}, {last['step_seconds']:.3g} s a step{mfu}", ""


def _file_rows(summary: Summary, now: float) -> Iterator[Row]:
    if summary.checkpoint is not None:
        step, when, size = summary.checkpoint
        others = f"; {summary.valid} are kept" if summary.valid > 1 else ""
        text = f"step {step:,}, {_ago(when, now)}, {bytes_as_text(size)}{others}"
        yield "checkpoint", text, ""
    else:
        yield "checkpoint", "none that is valid" if summary.damaged else "none", "yellow"
    for problem in summary.damaged:
        yield "", f"damaged: {problem}", "red"
    for key, value in summary.more.items():
        if value is not None:
            yield key.replace("_", " "), str(value), "yellow"
    yield "owner", summary.owner or "nobody", ""


def _time_rows(spent: Spent) -> Iterator[Row]:
    share = f"{spent.counted / spent.wall:.0%}" if spent.wall else "0 %"
    counted = f"{seconds_as_text(spent.counted)} in steps that counted"
    yield "goodput", f"{share}: {counted}, of {seconds_as_text(spent.wall)}", ""
    lost = []
    if spent.between >= 1:
        lost.append(f"{seconds_as_text(spent.between)} with nobody running")
    if spent.repeated_steps:
        steps = f"{spent.repeated_steps:,} steps trained again"
        lost.append(f"about {seconds_as_text(spent.repeated)} in {steps}")
    lost.append(f"{seconds_as_text(spent.rest)} starting, evaluating and saving")
    yield "", "the rest: " + ", ".join(lost), ""


_SHOWN_ATTEMPTS = 12


def _attempts_table(attempts: list[Attempt]) -> Any:
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("attempt", "started", "on", "ranks", "from step", "to step", "ended"):
        table.add_column(
            name,
            justify="right" if name in ("attempt", "ranks", "from step", "to step") else "left",
        )
    for attempt in attempts[-_SHOWN_ATTEMPTS:]:
        table.add_row(
            str(attempt.number),
            time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(attempt.started)),
            attempt.host,
            "" if attempt.ranks is None else str(attempt.ranks),
            f"{attempt.resumed:,}",
            "" if attempt.reached is None else f"{attempt.reached:,}",
            attempt.ended,
        )
    return table


def _print_table(summaries: list[Summary], now: float) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    right = ("step", "loss", "evaluation", "tokens/s", "restarts")
    left = ("run", "state", "checkpoint", "reason")
    for name in (*left[:2], *right[:4], left[2], right[4], left[3]):
        table.add_column(
            name, justify="right" if name in right else "left", no_wrap=name != "reason"
        )
    for summary in summaries:
        last = summary.last
        reason = (summary.reason or "") if summary.state not in ("running", "finished") else ""
        table.add_row(
            Text(summary.path.name, style="bold"),
            Text(summary.state, style=_style(summary.state)),
            _steps(summary),
            _number(last["loss"]) if last else "",
            _number(summary.evaluation["eval_loss"]) if summary.evaluation else "",
            f"{last['tokens_per_second']:,.0f}" if last else "",
            f"step {summary.checkpoint[0]:,}, {_ago(summary.checkpoint[1], now)}"
            if summary.checkpoint
            else "none",
            str(max(0, len(summary.attempts) - 1)),
            Text(reason.split(", and")[0] if summary.state == "died" else reason),
        )
    _show(_console(), table)
