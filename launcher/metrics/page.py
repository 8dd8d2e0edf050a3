"""The HTML page of `launcher report` and `launcher plan --html`: one file, no network. No torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from launcher.console import finite
from launcher.errors import RecipeError

MOST_POINTS = 2000
"""Points of a curve in the page."""
_CHARTS = (
    ("Loss", "", ("loss",)),
    ("Evaluation loss", "", ("eval_loss",)),
    ("Evaluation metrics", "", ("eval_*",)),
    ("Learning rate", "", ("learning_rate",)),
    ("Gradient norm before clipping", "", ("grad_norm",)),
    ("Tokens per second, all ranks", "", ("tokens_per_second",)),
    ("Seconds per step", "", ("step_seconds",)),
    ("FLOPs utilization (MFU)", "%", ("mfu", "hfu")),
    ("Peak memory of a rank", "bytes", ("peak_memory_bytes", "reserved_memory_bytes")),
)
"""Title, unit, and keys of metrics.jsonl. eval_*: metrics of an evaluation that no other
chart shows."""

_NO_METRICS = ("eval_loss", "eval_losses", "eval_scores", "eval_tokens")

Point = tuple[int, float, float | None]
"""Step, time and value; None where it is not finite."""


def make_charts(
    runs: Sequence[tuple[list[dict[str, Any]], float]],
) -> tuple[list[dict[str, Any]], list[str]]:
    """The charts of runs, and notes on what is missing in them.

    runs: of each the lines of metrics.jsonl, and the time at which its time axis begins.
    """
    charts, absent, longest = [], [], 0
    for title, unit, keys in _CHARTS:
        series = []
        for run, (records, start) in enumerate(runs):
            for dash, (name, points) in enumerate(_curves(records, keys)):
                longest = max(longest, len(points))
                steps, times, values = zip(*thin(points), strict=True)
                seconds = [round(when - start, 3) for when in times]
                curve = {"step": steps, "time": seconds, "y": values}
                series.append({"run": run, "name": name, "dash": dash, **curve})
        names = {curve["name"] for curve in series}
        if keys == ("eval_*",) and len(names) == 1:  # the tooltip has no name if there is one only
            title = f"Evaluation: {names.pop()}"
        charts += [{"title": title, "unit": unit, "series": series}] if series else []
        absent += [title] if not series and keys != ("eval_*",) else []
    notes = [f"No values in metrics.jsonl: {', '.join(absent)}."] if absent else []
    if longest > MOST_POINTS:
        notes.append(
            f"Curves of more than {MOST_POINTS:,} points are thinned (the longest has {longest:,}):"
            " the lowest and the highest value of each interval are drawn, and steps without one."
        )
    return charts, notes


def _curves(records: list[dict[str, Any]], keys: tuple[str, ...]) -> list[tuple[str, list[Point]]]:
    """Names and points of curves with any value; evaluations also of each set."""
    found: dict[str, list[Point]] = {}
    for record in records:
        values = {key: record[key] for key in keys if key in record}
        if "eval_loss" in keys:
            values |= record.get("eval_losses") or {}
        elif "eval_*" in keys:
            others = [key for key in record if key.startswith("eval_") and key not in _NO_METRICS]
            values = {key.removeprefix("eval_"): record[key] for key in others}
            for name, scores in (record.get("eval_scores") or {}).items():
                if isinstance(scores, dict):
                    values |= {f"{metric}, {name}": score for metric, score in scores.items()}
        for name, value in values.items():
            point = (record["step"], record.get("time") or 0.0, finite(value))
            found.setdefault(name, []).append(point)
    return [
        (name, points) for name, points in found.items() if any(p[2] is not None for p in points)
    ]


def thin(points: list[Point]) -> list[Point]:
    """At most `MOST_POINTS` of them: the first, the last, and of each interval the lowest, the
    highest and one without a value."""
    if len(points) <= MOST_POINTS:
        return points
    kept = {points[0], points[-1]}
    size = math.ceil(len(points) / ((MOST_POINTS - 2) // 3))
    for start in range(0, len(points), size):
        interval = points[start : start + size]
        kept |= set([point for point in interval if point[2] is None][:1])
        known = [(value, point) for point in interval if (value := point[2]) is not None]
        kept |= {min(known)[1], max(known)[1]} if known else set()
    return sorted(kept, key=lambda point: point[:2])


def timed_parts(records: list[dict[str, Any]]) -> dict[str, tuple[float, float]]:
    """Of each part of a step that was timed: mean seconds, and the share of `step_seconds`."""
    timed = [record for record in records if finite(record.get("step_seconds"))]
    names = dict.fromkeys(name for record in timed for name in record if name.endswith("_seconds"))
    sums = {name: sum(finite(record.get(name)) or 0 for record in timed) for name in names}
    return {
        name.removesuffix("_seconds"): (total / len(timed), total / sums["step_seconds"])
        for name, total in sums.items()
        if total and name not in ("step_seconds", "cpu_seconds")
    }


def bars(
    title: str, rows: Sequence[tuple[str, Mapping[str, float]]], text: Callable[[float], str]
) -> dict[str, Any]:
    """A section of stacked bars. rows: labels and parts; the longest bar has the full width."""
    longest = max((sum(parts.values()) for _, parts in rows), default=0)
    names = list(dict.fromkeys(name for _, parts in rows for name in parts if parts[name]))
    content = {"rows": rows, "names": names, "longest": longest, "as_text": text}
    return {"kind": "bars", "title": title, **content}


def write(page: dict[str, Any], file: Path) -> None:
    """Writes a page. Raises RecipeError if that is not possible.

    page: `title`, `footer`; `runs`, of each `name` and `events` (kind, step, time); `charts` of
    `make_charts`; `sections` with `kind`, `title` and maybe `note`: table (columns, rows), bars (of
    `bars`), text (text), and charts, whose content is above.
    """
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    text = environment.get_template("page.html.j2").render(page=page)
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        problem = f"command line: {file}: cannot be written: {error.strerror}"
        raise RecipeError(problem) from None
