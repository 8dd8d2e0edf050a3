"""The HTML page of `launcher report` and `launcher plan out=FILE`: one file, no network, no torch.

Curves are drawn by plotly.js, which is in the page; bars are plain HTML.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from launcher.console import finite
from launcher.errors import RecipeError
from launcher.libraries.extras import require_extra
from launcher.metrics.stages import mean_stages

MOST_POINTS = 2000
"""Points of a curve in the page."""
_COLORS = (
    "#3579d8",
    "#dd7320",
    "#2c9c62",
    "#cc4468",
    "#8a62d6",
    "#a98a12",
    "#2399ad",
    "#c455a8",
    "#74854a",
    "#8a8d96",
)
"""Of runs and of the parts of bars; visible on a light and on a dark background."""
_EVALUATION = "Evaluation metrics"
_SHARES = "Shares of the sources in the loss"
_CHARTS: tuple[tuple[str, str, dict[str, str]], ...] = (
    (
        "Loss",
        "",
        {"loss": "training", "eval_loss": "evaluation"}
        | {"cross_entropy": "cross-entropy", "kl": "KL divergence"},
    ),
    (_EVALUATION, "", {}),  # those that no other chart shows
    ("Gradient norm before clipping", "", {"grad_norm": ""}),
    (_SHARES, "%", {}),
    ("Learning rate", "", {"learning_rate": ""}),
    ("Tokens per second, all ranks", "tokens/s", {"tokens_per_second": ""}),
    ("FLOPs utilization (MFU)", "%", {"mfu": "MFU"}),
    (
        "Peak memory of a rank",
        "bytes",
        {"peak_memory_bytes": "allocated", "reserved_memory_bytes": "reserved"},
    ),
    ("Retried allocations", "allocations", {"allocation_retries": ""}),
    ("Seconds per step", "s", {"step_seconds": ""}),
    (
        "Rewards of pairs",
        "",
        {"rewards/chosen": "chosen", "rewards/rejected": "rejected", "rewards/margins": "margin"}
        | {"margin": "margin", "mean_reward": "mean"},
    ),
    ("Pairs in the right order", "%", {"rewards/accuracies": "", "accuracy": ""}),
    (
        "Load of an expert (1: the mean)",
        "",
        {"expert_load_max": "busiest", "expert_load_min": "least busy"},
    ),
    ("Experts that no token chose", "%", {"experts_idle": ""}),
    ("Waits of a step", "s", {"data_seconds": "data", "communication_seconds": "communication"}),
    ("Power of a GPU, mean", "W", {"gpu_power_watts": ""}),
    ("Temperature of the hottest GPU", "°C", {"gpu_temperature_celsius": ""}),
    ("Utilization of the least busy GPU", "%", {"gpu_utilization": "busy"}),
)
"""Title, unit, and the keys of metrics.jsonl with the names of their curves."""
_OPTIONAL = (
    _EVALUATION,
    _SHARES,
    "Rewards of pairs",
    "Pairs in the right order",
    "Load of an expert (1: the mean)",
    "Experts that no token chose",
)
_MAY_DIVERGE = ("loss", "grad_norm")
"""Keys whose null means a value that is not finite. Elsewhere it means that nothing is known."""
_NOT_METRICS = ("eval_loss", "eval_losses", "eval_scores", "eval_tokens")
_MARKS_NOTE = (
    "Dashed: restarts after a failure or preemption. Dotted: resumes that were asked for. "
    "Ticks at the bottom: checkpoints. Crosses at the top: skipped steps."
)

Point = tuple[int, float, float | None]
"""Step, seconds since the start, and value; None where it is not finite."""
Figure = dict[str, Any]
"""`title`, `unit` and `curves` of a chart. A curve has `steps`, `times` and `values` of its points,
and maybe `texts`, which name them. Or `title` and `cells`: rows of numbers, which are drawn as colors
around 1, and `rows`, their names."""


@dataclass(frozen=True)
class RunHistory:
    """What the charts show of a run."""

    name: str
    records: Sequence[Mapping[str, Any]]
    """Lines of metrics.jsonl."""
    start: float
    """Time at which the time axis begins."""
    marks: Sequence[tuple[str, int, float]]
    """Kind (`restart`, `resume`, `checkpoint` or `skipped step`), step and time."""


@dataclass(frozen=True)
class Charts:
    """Curves, with a button for each of several runs and a choice of the axis."""

    kind: ClassVar[str] = "charts"
    figures: Sequence[Figure]
    runs: Sequence[str] = ()
    starts: Sequence[float] = ()
    """When each run started; of charts over steps, for the axes of time and date."""
    marks: Sequence[Mapping[str, Any]] = ()
    """Marks of the runs: `kind`, `run`, `step` and `time`."""
    time_unit: tuple[str, int] = ("s", 1)
    """The unit of the time axis, and the seconds in one unit."""
    note: str = ""


class Part(NamedTuple):
    """A part of a bar."""

    name: str
    text: str
    percent: float
    """Of the width of the chart."""
    color: str


@dataclass(frozen=True)
class Bars:
    """A chart of stacked bars, each a label with its parts, and maybe a vertical line."""

    kind: ClassVar[str] = "bars"
    title: str
    rows: Sequence[tuple[str, Sequence[Part]]]
    line: tuple[str, float] | None = None
    """The label of the line, and its place in percent of the width."""
    note: str = ""

    @property
    def legend(self) -> dict[str, str]:
        """Names and colors of all parts."""
        return {part.name: part.color for _, parts in self.rows for part in parts}


class Card(NamedTuple):
    """A fact on top of the page."""

    name: str
    value: str
    detail: str = ""
    mood: str = ""
    """`good` or `bad`: the color of the value."""


@dataclass(frozen=True)
class Cards:
    """The facts that one looks for first, side by side."""

    kind: ClassVar[str] = "cards"
    cards: Sequence[Card]
    note: str = ""


class Answer(NamedTuple):
    """What a model answered to a prompt, early and late."""

    prompt: str
    reference: str
    first: str
    last: str
    scores: str


@dataclass(frozen=True)
class Answers:
    """Answers of two evaluations beside each other."""

    kind: ClassVar[str] = "answers"
    title: str
    first: str
    """The heading of the early answers; empty: there are only late ones."""
    last: str
    answers: Sequence[Answer]
    note: str = ""


@dataclass(frozen=True)
class Table:
    """A table of texts."""

    kind: ClassVar[str] = "table"
    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""
    copied: Sequence[str] = ()
    """For each row, what its button copies; empty: it has no button."""
    words: Sequence[str] = ()
    """Columns whose cells are to be typed: they are in a fixed-width font, and shown whole."""


@dataclass(frozen=True)
class Text:
    """A text in a fixed-width font below a title that shows and hides it."""

    kind: ClassVar[str] = "text"
    title: str
    text: str
    note: str = ""


Section = Charts | Bars | Cards | Answers | Table | Text


def run_charts(runs: Sequence[RunHistory]) -> Charts:
    """The charts of runs, each of which has a color."""
    curves: dict[str, dict[tuple[str, int], list[Point]]] = {title: {} for title, *_ in _CHARTS}
    for number, run in enumerate(runs):
        for record in run.records:
            seconds = (record.get("time") or run.start) - run.start
            for title, name, value in _values(record):
                point = (record["step"], seconds, finite(value))
                curves[title].setdefault((name, number), []).append(point)
    everything = [points for of_chart in curves.values() for points in of_chart.values()]
    last = max((point[1] for points in everything for point in points), default=0.0)
    unit, size = ("h", 3600) if last > 7200 else ("min", 60) if last > 120 else ("s", 1)
    marks = [
        {"kind": kind, "run": number, "step": step, "time": at - run.start}
        for number, run in enumerate(runs)
        for kind, step, at in run.marks
    ]
    figures, absent = [], []
    for title, value_unit, _ in _CHARTS:
        figure = _curves_figure(title, value_unit, curves[title], runs)
        if figure["curves"]:
            figures.append(figure)
        elif title not in _OPTIONAL:
            absent.append(title)
    notes = [_MARKS_NOTE]
    if absent:
        notes.append(f"No values in metrics.jsonl: {', '.join(absent)}.")
    if (longest := max(map(len, everything), default=0)) > MOST_POINTS:
        notes.append(
            f"Curves of more than {MOST_POINTS:,} points are thinned (the longest has {longest:,}):"
            " the lowest and the highest value of each interval are drawn, and steps without one."
        )
    names, starts = [run.name for run in runs], [run.start for run in runs]
    return Charts(figures, names, starts, marks, (unit, size), " ".join(notes))


def _values(record: Mapping[str, Any]) -> Iterator[tuple[str, str, object]]:
    """Chart, name of the curve, and value, for each number of a record."""
    for title, _, names in _CHARTS:
        for key, name in names.items():
            if key in record and (record[key] is not None or key in _MAY_DIVERGE):
                yield title, name, record[key]
    for source, loss in (record.get("losses") or {}).items():
        if loss is not None:  # else the step had no target of it
            yield "Loss", source, loss
    for source, share in (record.get("shares") or {}).items():
        yield _SHARES, source, share
    for set_name, loss in (record.get("eval_losses") or {}).items():
        yield "Loss", f"evaluation, {set_name}", loss
    for key in record:
        if key.startswith("eval_") and key not in _NOT_METRICS:
            yield _EVALUATION, key.removeprefix("eval_"), record[key]
    for set_name, scores in (record.get("eval_scores") or {}).items():
        for metric, score in scores.items() if isinstance(scores, dict) else ():
            yield _EVALUATION, f"{metric}, {set_name}", score


def _curves_figure(
    title: str,
    unit: str,
    curves: Mapping[tuple[str, int], list[Point]],
    runs: Sequence[RunHistory],
) -> Figure:
    """A chart of the curves that have any value, by name and run. A curve is interrupted where the
    run was restarted."""
    curves = {
        key: points
        for key, points in curves.items()
        if any(value is not None for *_, value in points)
    }
    names = list(dict.fromkeys(name for name, _ in curves))
    values = [value for points in curves.values() for *_, value in points if value is not None]
    factor, shown = _scale(unit, max(values, default=0.0))
    drawn = []
    for (name, number), points in curves.items():
        run = runs[number]
        kinds = ("restart", "resume")
        # Between the last step before a restart and the first one after it
        gaps = [(step + 0.5, at - run.start, None) for kind, step, at in run.marks if kind in kinds]
        all_points = sorted([*thin(points), *gaps], key=lambda point: point[0])
        label, color, dash = name, names.index(name), 0
        if len(runs) > 1:
            color, dash = number, names.index(name)
            label = f"{run.name} {name}".strip()
        drawn.append(
            {
                "name": name,
                "label": label,
                "run": number,
                "color": _COLORS[color % 10],
                "dash": dash % 3,
                "steps": [step for step, *_ in all_points],
                "times": [round(seconds, 3) for _, seconds, _ in all_points],
                "values": [None if value is None else value * factor for *_, value in all_points],
            }
        )
    if title == _EVALUATION and len(names) == 1:
        title = f"Evaluation: {names[0]}"
    return {"title": title, "unit": shown, "curves": drawn}


def _scale(unit: str, largest: float) -> tuple[float, str]:
    """The factor from values to what the axis shows, and its unit."""
    if unit == "bytes":
        return (2.0**-30, "GiB") if largest >= 2**30 else (2.0**-20, "MiB")
    return (100.0 if unit == "%" else 1.0), unit


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


def curve_figure(title: str, labels: Sequence[str], sizes: Sequence[int]) -> Figure:
    """A curve of sizes in bytes, one for each label."""
    factor, unit = _scale("bytes", max(sizes, default=0))
    curve = {
        "name": "",
        "label": "",
        "run": 0,
        "color": _COLORS[0],
        "dash": 0,
        "steps": list(range(len(sizes))),
        "times": [],
        "values": [size * factor for size in sizes],
        "texts": list(labels),
    }
    return {"title": title, "unit": unit, "curves": [curve]}


def cells_figure(title: str, rows: Mapping[str, Sequence[float]]) -> Figure:
    """Numbers as colors around 1: a row for each name."""
    return {
        "title": title,
        "unit": "",
        "curves": [],
        "rows": list(rows),
        "cells": [list(row) for row in rows.values()],
    }


def bars(
    title: str,
    rows: Sequence[tuple[str, Mapping[str, float]]],
    as_text: Callable[[float], str],
    *,
    line: tuple[str, float] | None = None,
    note: str = "",
) -> Bars:
    """A stacked bar for each row, which is a label and its parts. The label is shown with the sum.
    line: the name and value of a vertical line."""
    names = list(dict.fromkeys(name for _, parts in rows for name in parts if parts[name]))
    sums = [sum(parts.values()) for _, parts in rows]
    longest = max([*sums, line[1] if line else 0], default=0)
    made = [
        (
            f"{label}: {as_text(sum(parts.values()))}",
            [
                Part(name, as_text(size), 100 * size / longest, _COLORS[names.index(name) % 10])
                for name, size in parts.items()
                if size
            ],
        )
        for label, parts in rows
    ]
    place = (f"{line[0]}: {as_text(line[1])}", 100 * line[1] / longest) if line else None
    return Bars(title, made if names else [], place, note)


def timed_parts(records: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Mean seconds of the phases of a step, which add up to `step_seconds`: data is the rest. Of
    `communication` too, which is a part of them, and of `stages`, the part of it in which rank 0 waits for
    other stages of a pipeline. Without phases that were not timed."""
    timed = [record for record in records if finite(record.get("step_seconds"))]
    means = {}
    for name in ("step", "forward", "backward", "optimizer", "logging", "communication"):
        values = [value for r in timed if (value := finite(r.get(f"{name}_seconds"))) is not None]
        if values:
            means[name] = sum(values) / len(values)
    step, waits = means.pop("step", 0.0), means.pop("communication", None)
    if means:
        means["data"] = max(0.0, step - sum(means.values()))
    if waits is not None:
        means["communication"] = waits
        if stages := mean_stages(records):
            means["stages"] = min(waits, stages[0]["wait"])
    return means


def write_page(file: Path, title: str, sections: Sequence[Section], *, footer: str) -> None:
    """Writes a page. Raises RecipeError if that is not possible."""
    require_extra("plotly", str(file))
    import jinja2
    from plotly.offline import get_plotlyjs

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    charts = [asdict(section) for section in sections if isinstance(section, Charts)]
    text = environment.get_template("page.html.j2").render(
        title=title,
        sections=sections,
        charts=charts,
        colors=_COLORS,
        footer=footer,
        plotly=get_plotlyjs(),
    )
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        problem = f"command line: {file}: cannot be written: {error.strerror}"
        raise RecipeError(problem) from None
