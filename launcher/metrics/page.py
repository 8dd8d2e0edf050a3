"""The HTML page of `launcher report` and `launcher plan out=FILE`: one file, no network, no torch.

Its charts are figures of plotly.js.
"""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from launcher.console import finite
from launcher.errors import RecipeError

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
_CHARTS: tuple[tuple[str, str, dict[str, str]], ...] = (
    (
        "Loss",
        "",
        {"loss": "training", "eval_loss": "evaluation"}
        | {"cross_entropy": "cross-entropy", "kl": "KL divergence"},
    ),
    (_EVALUATION, "", {}),  # those that no other chart shows
    ("Gradient norm before clipping", "", {"grad_norm": ""}),
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
    ("Waits of a step", "s", {"data_seconds": "data", "communication_seconds": "communication"}),
    ("Power of a GPU, mean", "W", {"gpu_power_watts": ""}),
    ("Temperature of the hottest GPU", "°C", {"gpu_temperature_celsius": ""}),
    ("Utilization of the least busy GPU", "%", {"gpu_utilization": "busy"}),
)
"""Title, unit, and the keys of metrics.jsonl with the names of their curves."""
_OPTIONAL = (_EVALUATION, "Rewards of pairs", "Pairs in the right order")
_MAY_DIVERGE = ("loss", "grad_norm")
"""Keys whose null means a value that is not finite. Elsewhere it means that nothing is known."""
_NOT_METRICS = ("eval_loss", "eval_losses", "eval_scores", "eval_tokens")
_MARKS: dict[str, tuple[tuple[float, ...], str, str]] = {
    "restart": ((0, 1), "lines", "dash"),
    "resume": ((0, 1), "lines", "dot"),
    "checkpoint": ((0,), "markers", "line-ns-open"),
    "skipped step": ((1,), "markers", "x-thin-open"),
}
"""What is marked in the charts: heights from 0 to 1, and plotly's mode and dash or symbol."""
_MARKS_NOTE = (
    "Dashed: restarts after a failure or preemption. Dotted: resumes that were asked for. "
    "Ticks at the bottom: checkpoints. Crosses at the top: skipped steps."
)

Point = tuple[int, float, float | None]
"""Step, seconds since the start, and value; None where it is not finite."""
Figure = dict[str, Any]
"""`data` and `layout` of a figure of plotly.js, and its `title` and `height` in the page."""


@dataclass(frozen=True)
class RunHistory:
    """What the charts show of a run."""

    name: str
    records: Sequence[Mapping[str, Any]]
    """Lines of metrics.jsonl."""
    start: float
    """Time at which the time axis begins."""
    marks: Sequence[tuple[str, int, float]]
    """Kind (a key of `_MARKS`), step and time."""


@dataclass(frozen=True)
class Charts:
    """Figures, with a button for each of several runs and one for the axis of step or time."""

    kind: ClassVar[str] = "charts"
    figures: Sequence[Figure]
    runs: Sequence[str] = ()
    starts: Sequence[float] = ()
    """When each run started; of charts over steps, for the axes of time and date."""
    time_unit: tuple[str, int] = ("s", 1)
    """The unit of the time axis, and the seconds in one unit."""
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


@dataclass(frozen=True)
class Text:
    """A text in a fixed-width font below a title that shows and hides it."""

    kind: ClassVar[str] = "text"
    title: str
    text: str
    open: bool = False
    note: str = ""


Section = Charts | Table | Text


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
    marks = [trace for number, run in enumerate(runs) for trace in _marks(number, run, size)]
    figures, absent = [], []
    for title, value_unit, _ in _CHARTS:
        figure = _curves_figure(title, value_unit, curves[title], runs, size)
        if figure["data"]:
            figure["data"] += marks
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
    return Charts(figures, names, starts, (unit, size), " ".join(notes))


def _values(record: Mapping[str, Any]) -> Iterator[tuple[str, str, object]]:
    """Chart, name of the curve, and value, for each number of a record."""
    for title, _, names in _CHARTS:
        for key, name in names.items():
            if key in record and (record[key] is not None or key in _MAY_DIVERGE):
                yield title, name, record[key]
    for source, loss in (record.get("losses") or {}).items():
        if loss is not None:  # else the step had no target of it
            yield "Loss", source, loss
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
    second: float,
) -> Figure:
    """A chart of the curves that have any value, by name and run. A curve is interrupted where the
    run was restarted. second is the length of the unit of the time axis."""
    curves = {
        key: points
        for key, points in curves.items()
        if any(value is not None for *_, value in points)
    }
    names = list(dict.fromkeys(name for name, _ in curves))
    values = [value for points in curves.values() for *_, value in points if value is not None]
    factor, shown, axis = _value_axis(unit, max(values, default=0.0))
    traces: list[Figure] = []
    for (name, number), points in curves.items():
        run = runs[number]
        kinds = ("restart", "resume")
        gaps = [(step, at - run.start, None) for kind, step, at in run.marks if kind in kinds]
        drawn = sorted([*thin(points), *gaps], key=lambda point: point[0])
        label, color, dash = "", names.index(name), "solid"
        if len(runs) > 1:
            color, dash = number, ("solid", "dash", "dot")[names.index(name) % 3]
            label = f"{run.name} "
        if len(names) > 1:
            label += f"{name} "
        traces.append(
            {
                "name": html.escape(name),
                "legendgroup": name,
                "showlegend": len(names) > 1 and all(t["legendgroup"] != name for t in traces),
                "mode": "lines" if len(points) > 50 else "lines+markers",
                "line": {
                    "color": _COLORS[color % 10],
                    "dash": dash,
                    "width": 1.5,
                },
                "marker": {"size": 4 if len(points) > 20 else 7},
                "meta": number,
                "x": [step for step, *_ in drawn],
                "customdata": [round(seconds / second, 4) for _, seconds, _ in drawn],
                "y": [None if value is None else value * factor for *_, value in drawn],
                "hovertemplate": f"{html.escape(label)}%{{y}} {shown}".rstrip() + "<extra></extra>",
            }
        )
    if unit == "" and title == _EVALUATION and len(names) == 1:
        title = f"Evaluation: {names[0]}"
    marks_axis = {"overlaying": "y", "range": [-0.04, 1.04], "visible": False, "fixedrange": True}
    layout = {"xaxis": {"title": {"text": "step"}}, "yaxis": axis, "yaxis2": marks_axis}
    return {"title": title, "height": 260, "data": traces, "layout": layout}


def _value_axis(unit: str, largest: float) -> tuple[float, str, Figure]:
    """The factor from values to what the axis shows, its unit, and the axis."""
    factor = 100.0 if unit == "%" else 1.0
    if unit == "bytes":
        factor, unit = (2.0**-30, "GiB") if largest >= 2**30 else (2.0**-20, "MiB")
    axis = {"title": {"text": unit}, "hoverformat": ",.6~g", "exponentformat": "e"}
    return factor, unit, axis  # 1e-5, as in recipes, and not 10µ


def _marks(number: int, run: RunHistory, second: float) -> Iterator[Figure]:
    """The traces of a run's restarts, checkpoints and skipped steps."""
    for kind, (heights, mode, style) in _MARKS.items():
        places = [(step, (at - run.start) / second) for name, step, at in run.marks if name == kind]
        if places:
            yield {
                "x": [x for step, _ in places for x in (*(step for _ in heights), None)],
                "customdata": [x for _, at in places for x in (*(at for _ in heights), None)],
                "y": [*heights, None] * len(places),
                "yaxis": "y2",
                "mode": mode,
                "line": {"color": _COLORS[number % 10], "width": 1, "dash": style},
                "marker": {"color": _COLORS[number % 10], "symbol": style, "size": 8},
                "meta": number,
                "showlegend": False,
                "hovertemplate": f"{kind}<extra></extra>",
            }


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
    factor, unit, axis = _value_axis("bytes", max(sizes, default=0))
    trace = {
        "y": [size * factor for size in sizes],
        "text": [html.escape(label) for label in labels],
        "mode": "lines",
        "line": {"color": _COLORS[0], "width": 1.5},
        "hovertemplate": f"%{{text}}: %{{y}} {unit}<extra></extra>",
    }
    layout = {
        "yaxis": axis,
        "xaxis": {"showticklabels": False, "title": {"text": "moments of a step, in order"}},
        "showlegend": False,
        "hovermode": "x",
        "hoverdistance": -1,
    }
    return {"title": title, "height": 300, "data": [trace], "layout": layout}


def bars(
    title: str,
    rows: Sequence[tuple[str, Mapping[str, float]]],
    as_text: Callable[[float], str],
    *,
    line: tuple[str, float] | None = None,
    note: str = "",
) -> Charts:
    """A stacked bar for each row, which is a label and its parts; below the label and the sum.
    line: the name and value of a vertical line."""
    names = list(dict.fromkeys(name for _, parts in rows for name in parts if parts[name]))
    labels = [html.escape(f"{label}: {as_text(sum(parts.values()))}") for label, parts in rows]
    traces = [
        {
            "type": "bar",
            "orientation": "h",
            "name": html.escape(name),
            "y": labels,
            "x": [parts.get(name, 0) for _, parts in rows],
            "text": [as_text(parts.get(name, 0)) for _, parts in rows],
            "textposition": "inside",
            "insidetextanchor": "middle",
            "insidetextfont": {"color": "#fff"},
            "textangle": 0,
            "marker": {"color": _COLORS[number % 10]},
            "hovertemplate": f"{html.escape(name)}: %{{text}}<extra></extra>",
        }
        for number, name in enumerate(names)
    ]
    longest = max((sum(parts.values()) for _, parts in rows), default=0)
    layout: Figure = {
        "barmode": "stack",
        "uniformtext": {"mode": "hide", "minsize": 10},  # where the bar has no room for its text
        "bargap": 0.6,
        "hovermode": "closest",
        "showlegend": False,  # the page has one that wraps
        "margin": {"t": 0},
        "xaxis": {"visible": False, "range": [0, max(longest, line[1] * 1.005 if line else 0)]},
        "yaxis": {
            "range": [len(rows) - 0.5, -0.9],
            "dtick": 1,
            "ticklabelposition": "inside",
            "ticklabelshift": 17,
        },
    }
    if line:
        name, at = line
        layout["shapes"] = [
            {"x0": at, "x1": at, "y0": 0, "y1": 1, "yref": "paper", "type": "line",
             "line": {"color": _COLORS[3], "width": 2},
             "label": {"text": f"{html.escape(name)}: {as_text(at)}", "textposition": "end",
                       "textangle": 0, "xanchor": "right", "yanchor": "top"}},
        ]  # fmt: skip
    height = 46 * len(rows) + 30
    figure = {"title": title, "height": height, "data": traces, "layout": layout}
    return Charts([figure] if names else [], note=note)


def timed_parts(records: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Mean seconds of the phases of a step, which add up to `step_seconds`: data is the rest. Of
    `communication` too, which is a part of them. Without phases that were not timed."""
    timed = [record for record in records if finite(record.get("step_seconds"))]
    means = {}
    for name in ("step", "forward", "backward", "optimizer", "logging", "communication"):
        values = [value for r in timed if (value := finite(r.get(f"{name}_seconds"))) is not None]
        if values:
            means[name] = sum(values) / len(values)
    step, waits = means.pop("step", 0.0), means.pop("communication", None)
    if means:
        means["data"] = max(0.0, step - sum(means.values()))
    return means if waits is None else means | {"communication": waits}


def write_page(file: Path, title: str, sections: Sequence[Section], *, footer: str) -> None:
    """Writes a page. Raises RecipeError if that is not possible."""
    import jinja2
    from plotly.offline import get_plotlyjs

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    text = environment.get_template("page.html.j2").render(
        title=title, sections=sections, colors=_COLORS, footer=footer, plotly=get_plotlyjs()
    )
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        problem = f"command line: {file}: cannot be written: {error.strerror}"
        raise RecipeError(problem) from None
