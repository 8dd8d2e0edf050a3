"""`launcher status`: state, progress and lost time of runs, by their files."""

from __future__ import annotations

import itertools
import os
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer

from launcher.checkpoint.files import (
    DamagedCheckpointError,
    list_checkpoints,
    read_marker,
    verify,
)
from launcher.cli.tables import fitting_table, make_table, plain, print_parts
from launcher.console import bytes_as_text, loss_as_text, seconds_as_text
from launcher.errors import EXIT_DONE, RecipeError
from launcher.recipe.decode import shown
from launcher.reliability.json_files import Json, last_line, sample_jsonl
from launcher.reliability.lock import current_owner, last_heartbeat
from launcher.reliability.run_directory import RunFolder
from launcher.sources.location import no_such

_STYLES = {"running": "green", "finished": "bold green", "stopped": "yellow", "starting": "cyan"}
_SHOWN_ATTEMPTS = 12
_OPTIONAL = ("restarts", "checkpoint", "tokens/s", "reason")
"""Columns that the table of runs does not show on a narrow terminal, the first one to go first."""
_JOB = ("job", "run_id", "agent")
"""Keys of the event `started` that the starts of a job share."""
_OF_STEP = ("step", "loss", "time", "tokens_per_second", "step_seconds")


@dataclass
class Attempt:
    """One start of the run, up to its end."""

    number: int
    started: float
    host: str
    ranks: int | None
    restart: bool = False
    """Whether it is a restart, after a start that failed, or that was stopped and whose job
    continued. Otherwise it is the first start, or a resume that the user asked for."""
    resumed: int = 0
    """Step that it resumed from."""
    ended: str = ""
    """How it ended; empty if that is not recorded."""
    end: float | None = None
    reached: int | None = None
    """Last known step."""


@dataclass
class Summary:
    """The state of a run by its files."""

    path: Path
    state: str
    """The state in status.json; `starting` before that file exists; `died` if the run should be
    running but no process owns its folder."""
    reason: str
    step: int
    status: Json
    last: Json
    """The last metrics of a step."""
    evaluation: Json
    owner: str
    until: float
    """Time of its end or its last heartbeat, or now."""
    attempts: list[Attempt]
    checkpoints: list[tuple[int, float, int]] = field(default_factory=list)
    """Step, time and bytes of each valid checkpoint, the newest last."""
    damaged: list[str] = field(default_factory=list)
    copied: Json = field(default_factory=dict)
    """The last event `copied`; empty: there is none."""

    @property
    def restarts(self) -> int:
        """Starts after a failure or preemption."""
        return sum(attempt.restart for attempt in self.attempts)

    @property
    def steps(self) -> str:
        """The step, and of how many."""
        total = self.status.get("steps")
        return f"{self.step:,}" + (f" of {total:,}" if total else "")


def status(
    folder: Annotated[
        Path,
        typer.Argument(metavar="RUN_DIR", help="Folder of a run, or a folder that holds several."),
    ],
) -> int:
    """Print the state of a run: step, loss, speed, checkpoint, restarts and lost time.

    \b
    Example:
      launcher status runs/fsdp
      launcher status runs
    """
    runs, now = find_runs(folder), time.time()
    if runs[0] == folder:
        _print_run(summarize(runs.pop(0), now), now)
    if runs:
        print_runs([summarize(path, now) for path in runs])
    return EXIT_DONE


def find_runs(folder: Path) -> list[Path]:
    """The folder, if it is a run folder, then the run folders in it. Raises RecipeError."""
    if not folder.is_dir():
        raise RecipeError(f"command line: {no_such('folder', str(folder))}")
    files = ("status.json", "owner", "metrics.jsonl")
    try:
        entries = sorted(folder.iterdir())
    except OSError as error:
        raise RecipeError(f"{folder} cannot be read: {error.strerror}") from None
    runs = [
        path
        for path in (folder, *entries)
        if any(os.path.exists(path / name) for name in files)  # False where it cannot be known
    ]
    if not runs:
        raise RecipeError(f"{folder}: neither the folder of a run nor one that holds runs")
    return runs


def summarize(path: Path, now: float) -> Summary:
    """Reads status.json, events.jsonl, the end of metrics.jsonl, the owner and the checkpoints."""
    run = RunFolder(path)
    status, last = run.read_status(), last_line(run.metrics, having=_OF_STEP)
    owner, alive = current_owner(path) or (None, False)
    state, reason = status.get("state", "starting"), status.get("reason") or ""
    if state in ("running", "starting") and alive is False:
        state, reason = "died", "its process ended without a message, or its machine was lost"
    events = run.read_events()
    heard = f"on another machine, its last heartbeat at {date_text(last_heartbeat(path))}"
    liveness = {True: "alive", False: "ended", None: heard}[alive]
    summary = Summary(
        path,
        state,
        reason,
        step=max(status.get("step") or 0, last.get("step") or 0),
        status=status,
        last=last,
        evaluation=last_line(run.metrics, having=("step", "eval_loss")),
        owner=f"{owner.describe()}: {liveness}" if owner is not None else "none",
        until=now if alive else max(status.get("time") or 0.0, last.get("time") or 0.0),
        attempts=read_attempts(events),
    )
    summary.copied = next((e for e in reversed(events) if e["event"] == "copied"), {})
    try:
        checkpoints = list_checkpoints(path / "checkpoints")
    except OSError as error:
        checkpoints, summary.damaged = [], [str(error)]
    for checkpoint in checkpoints:
        try:
            marker, problem = read_marker(checkpoint), verify(checkpoint, deep=False)
        except DamagedCheckpointError as error:
            marker, problem = None, error.problem
        if marker is not None and not problem:
            size = sum(file.bytes for file in marker.files.values())
            summary.checkpoints.append((marker.step, marker.time, size))
        elif checkpoint.is_dir():  # else the run has deleted it meanwhile
            summary.damaged.append(f"{checkpoint.name}: {problem}")
    return summary


def read_attempts(events: list[Json]) -> list[Attempt]:
    """The attempts in events.jsonl.

    For an attempt without an end, the next `started` event has the last known step and time.
    """
    attempts: dict[int, Attempt] = {}
    last: Json = {}
    for event in events:
        number, name = event["attempt"], event["event"]
        if name == "started":
            again = bool(event.get("job_restart_count") or event.get("restart_count"))
            again |= any(event.get(key) and event[key] == last.get(key) for key in _JOB)
            last, restart = event, False
            if (previous := attempts.get(number - 1)) is not None:
                if not previous.ended:
                    previous.ended, previous.end = "killed", event.get("found_time")
                previous.reached = max(event.get("found_step") or 0, previous.reached or 0)
                ended = previous.ended.partition(" ")[0]
                restart = ended != "finished" and (again or ended != "stopped")
            attempts[number] = Attempt(
                number, event["time"], event["host"], event.get("ranks"), restart
            )
        attempt = attempts.get(number)
        if attempt is None:
            continue
        if name == "resumed":
            attempt.resumed = event["step"]
        elif name in ("failed", "stopped", "finished") and not attempt.ended:
            reason = f" ({event['reason']})" if event.get("reason") else ""
            attempt.ended, attempt.end = name + reason, event["time"]
            attempt.reached = event.get("step")
    return list(attempts.values())


def time_spent(summary: Summary) -> dict[str, float]:
    """Where the time of a run went, in seconds: `counted` in steps of the result, `repeated` in
    `repeated_steps` that were lost (by the mean step), `between` without a process before a
    restart, and the `rest` add up to `wall`, which has no time before a resume by the user. Of a
    long run, `counted` is an estimate by a sample of the steps."""
    attempts, counted = summary.attempts, 0.0
    first = trained = attempts[0].resumed
    before: list[float] = []
    for group in sample_jsonl(RunFolder(summary.path).metrics):
        # Seconds of a step, a mean since the last line
        timed = [
            (record["step"], record["step_seconds"])
            for record in group
            if record.get("step_seconds") and record.get("step")
        ]
        seconds = [value for _, value in timed]
        for index, (step, mean) in enumerate(timed):
            if index == 0 and before:  # between two groups
                mean = statistics.fmean(before + seconds)
            counted += mean * (step - trained)
            trained = step
        before = seconds or before
    pairs = list(itertools.pairwise(attempts))
    steps = sum(max(0, (old.reached or 0) - new.resumed) for old, new in pairs)
    gaps = [
        (new.restart, max(0.0, new.started - old.end)) for old, new in pairs if old.end is not None
    ]
    between = sum(gap for restart, gap in gaps if restart)
    paused = sum(gap for restart, gap in gaps if not restart)
    end = attempts[-1].end if attempts[-1].end is not None else summary.until
    wall = max(end - attempts[0].started - paused, counted)
    repeated = min(steps * counted / max(trained - first, 1), max(0.0, wall - counted - between))
    return {
        "wall": wall,
        "counted": counted,
        "repeated": repeated,
        "repeated_steps": steps,
        "between": between,
        "rest": max(0.0, wall - counted - repeated - between),
    }


# Printing


def date_text(seconds: float) -> str:
    """A time on the clock of this machine."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def _ago(then: float, now: float | None) -> str:
    if now is None:
        return date_text(then)
    return f"{seconds_as_text(max(0.0, now - then))} ago"


def _number(value: object, form: str = ".4f") -> str:
    return format(value, form) if isinstance(value, (int, float)) else "not finite"


def _print_run(summary: Summary, now: float) -> None:
    rows = [
        (plain(name, "dim"), plain(text, style)) for name, text, style in describe(summary, now)
    ]
    print_parts(plain(str(summary.path), "bold"), make_table(("", ""), rows))
    if len(summary.attempts) > 1:
        columns = (">attempt", "started", "on", ">ranks", ">from step", ">to step", "ended")
        attempts = [
            (
                str(attempt.number),
                date_text(attempt.started),
                attempt.host,
                str(attempt.ranks or ""),
                f"{attempt.resumed:,}",
                "" if attempt.reached is None else f"{attempt.reached:,}",
                attempt.ended,
            )
            for attempt in summary.attempts[-_SHOWN_ATTEMPTS:]
        ]
        print_parts(make_table(columns, attempts))
    if summary.status.get("error"):
        print_parts(plain(summary.status["error"], "red"))


def describe(summary: Summary, now: float | None) -> Iterator[tuple[str, str, str]]:
    """Rows of name, text and colour; one without a name continues the row above. Times are those
    that have passed until now; None: dates."""
    last, steps = summary.last, summary.status.get("steps")
    why = f": {summary.reason}" if summary.reason else ""
    yield "state", summary.state + why, _STYLES.get(summary.state, "bold red")
    left = f" ({summary.step / steps:.1%})" if steps else ""
    if steps and summary.state == "running" and last.get("step_seconds"):
        seconds = (steps - summary.step) * last["step_seconds"]
        left += f", about {seconds_as_text(seconds)} left"
    yield "step", summary.steps + left, ""
    if last:
        norm = _number(last.get("grad_norm"), ".3f")
        yield (
            "loss",
            f"{loss_as_text(last)}, grad norm {norm}, {_ago(last['time'] or 0.0, now)}",
            "",
        )
    if evaluation := summary.evaluation:
        loss = _number(evaluation["eval_loss"])
        yield "evaluation", f"loss {loss} after step {evaluation['step']:,}", ""
    if last:
        mfu = f", MFU {last['mfu']:.1%}" if last.get("mfu") is not None else ""
        speed = f"{_number(last['tokens_per_second'], ',.0f')} tokens/s"
        yield "speed", f"{speed}, {_number(last['step_seconds'], '.3g')} s a step{mfu}", ""
    if reserved := summary.status.get("reserved_memory_bytes"):
        retries = summary.status.get("allocation_retries") or 0
        text = f"{bytes_as_text(summary.status.get('peak_memory_bytes') or 0)} of tensors at the "
        text += f"peak, {bytes_as_text(reserved)} reserved, {retries:,} retried allocations"
        yield "memory", text, "yellow" if retries else ""
    if summary.checkpoints:
        step, when, size = summary.checkpoints[-1]
        others = f"; {len(summary.checkpoints)} are kept" if len(summary.checkpoints) > 1 else ""
        yield "checkpoint", f"step {step:,}, {_ago(when, now)}, {bytes_as_text(size)}{others}", ""
    else:
        yield "checkpoint", "none that is valid" if summary.damaged else "none", "yellow"
    if copied := summary.copied:
        behind = any(step > copied["step"] for step, _, _ in summary.checkpoints)
        text = f"step {copied['step']:,}, {_ago(copied['time'], now)}, in {copied.get('to')}"
        yield "copy", text, "yellow" if behind else ""
    for problem in summary.damaged:
        yield "", f"damaged: {problem}", "red"
    if warning := summary.status.get("warning"):
        yield "warning", warning, "yellow"
    yield "owner", summary.owner, ""
    if summary.attempts:
        yield from _lost_time(summary)
        restarts = summary.restarts
        yield "restarts", str(restarts or "none"), ""
        if resumes := len(summary.attempts) - 1 - restarts:
            yield "resumes", str(resumes), ""


def _lost_time(summary: Summary) -> Iterator[tuple[str, str, str]]:
    spent = time_spent(summary)
    text = {name: seconds_as_text(seconds) for name, seconds in spent.items()}
    share = f"{spent['counted'] / spent['wall']:.0%}" if spent["wall"] else "0 %"
    yield "goodput", f"{share}: {text['counted']} in steps that counted, of {text['wall']}", ""
    lost = []
    if spent["between"] >= 1:
        lost.append(f"{text['between']} without a running process")
    if steps := spent["repeated_steps"]:
        lost.append(f"about {text['repeated']} in {steps:,} steps trained again")
    lost.append(f"{text['rest']} starting, evaluating and saving")
    yield "", "the rest: " + ", ".join(lost), ""


def print_runs(summaries: list[Summary]) -> None:
    """Prints a table with a row for each run."""
    now = time.time()
    columns = (
        "run",
        "state",
        ">step",
        ">loss",
        ">evaluation",
        ">tokens/s",
        "checkpoint",
        ">restarts",
        "reason",
    )
    rows = []
    for summary in summaries:
        last, state = summary.last, summary.state
        step, when, _ = summary.checkpoints[-1] if summary.checkpoints else (0, 0.0, 0)
        rows.append(
            (
                plain(shown(summary.path.name), "bold"),
                plain(state, _STYLES.get(state, "bold red")),
                summary.steps,
                loss_as_text(last) if last else "",
                _number(summary.evaluation["eval_loss"]) if summary.evaluation else "",
                _number(last["tokens_per_second"], ",.0f") if last else "",
                f"step {step:,}, {_ago(when, now)}" if summary.checkpoints else "none",
                str(summary.restarts),
                "" if state in ("running", "finished") else summary.reason,
            )
        )
    print_parts(fitting_table(columns, rows, _OPTIONAL))
