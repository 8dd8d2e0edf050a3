"""`launcher report`: one or several runs as an HTML page. It reads files and runs no code of a
recipe."""

from __future__ import annotations

import contextlib
import json
import math
import shlex
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from launcher import __version__
from launcher.cli.app import make_parent_of_file, option
from launcher.cli.bottleneck import bottleneck, profile_of_run
from launcher.cli.status import (
    Summary,
    date_text,
    describe,
    find_runs,
    summarize,
    time_spent,
)
from launcher.console import bytes_as_text, finite, loss_as_text, seconds_as_text
from launcher.errors import EXIT_DONE, RecipeError
from launcher.metrics.page import (
    Answer,
    Answers,
    Bars,
    Card,
    Cards,
    Figure,
    RunHistory,
    Section,
    Table,
    Text,
    bars,
    cells_figure,
    run_charts,
    timed_parts,
    write_page,
)
from launcher.metrics.stages import PARTS, expected_wait, mean_stages, slowest_stage
from launcher.planner.formatting import NAMES
from launcher.recipe.decode import DEFAULT
from launcher.recipe.find import recipe_names
from launcher.recipe.load import load_recipe, recorded_recipe, to_yaml
from launcher.recipe.schema import Recipe
from launcher.reliability.json_files import Json, read_jsonl, thinned_jsonl
from launcher.reliability.run_directory import EXPERTS, RunFolder

_SAMPLES = 8
"""Answers that the page shows."""
_SAMPLE_BYTES = 16 << 20
"""The page shows answers from this many bytes at each end of samples.jsonl."""
_LOG_LINES, _LOG_BYTES = 40, 16 << 10
"""The page shows at most this many lines and bytes from the end of a log."""
_MOST_RECORDS = 20_000
"""Lines of metrics.jsonl that are read, evenly spaced, beside evaluations and skipped steps."""
_MOST_KEYS = 6
"""Keys with different values that the overview of several runs shows; more are in their own table
only."""


_SHORT = (
    "state",
    "step",
    "loss",
    "lowest evaluation",
    "speed",
    "GPU-hours",
    "rank-hours",
    "restarts",
)
"""What the overview of several runs shows of each, in this order."""


@dataclass(frozen=True)
class _ReportedRun(RunHistory):
    """What the page shows of a run, besides its curves."""

    summary: Summary
    events: list[Json]
    recipe: Recipe | None
    problem: str
    """Why the recipe is not known."""

    @property
    def built(self) -> Json:
        """The last event `built`; empty if there is none."""
        return next((event for event in self.events[::-1] if event["event"] == "built"), {})

    def bottleneck(self) -> str:
        """What limits the speed of the last start that trained; empty if that is not known."""
        records = self.records_of_last_start()
        ranks = [a.ranks for a in self.summary.attempts if a.ranks]
        if self.recipe is None or not ranks:
            return ""
        seconds = timed_parts(records[1:])
        profile = profile_of_run(
            records[1:],
            seconds,
            self.built,
            ranks=ranks[-1],
            retries=self.summary.status.get("allocation_retries") or 0,
        )
        return "" if profile is None else bottleneck(profile, self.recipe)

    def records_of_last_start(self) -> list[Mapping[str, Any]]:
        """The records of steps of the last start that trained: others may have had another number
        of ranks."""
        steps = [record for record in self.records if record.get("step_seconds") is not None]
        last = max((record["step"] for record in steps), default=0)
        before = [a.resumed for a in self.summary.attempts if a.resumed < last]
        first = before[-1] if before else -1
        return [record for record in steps if record["step"] > first]


def report(
    folders: Annotated[
        list[Path],
        typer.Argument(metavar="RUN_DIR", help="Folders of runs, or folders that hold several."),
    ],
    out: Annotated[
        Path | None, option("The page. By default RUN_DIR/report.html, or ./report.html.", "FILE")
    ] = None,
) -> int:
    """Write one or several runs as an HTML page that needs no network.

    The page of one run is RUN_DIR/report.html, that of several runs ./report.html.

    \b
    Example:
      launcher report runs/fsdp
      launcher report runs/one runs/two out=report.html
    """
    paths = list(dict.fromkeys(path for folder in folders for path in find_runs(folder)))
    if out is None:  # a page of several runs belongs to none of them
        out = (paths[0] if len(paths) == 1 else Path()) / "report.html"
    make_parent_of_file(out, "out")
    names = [path.resolve().name for path in paths]
    names = [n if names.count(n) == 1 else str(path) for n, path in zip(names, paths, strict=True)]
    runs = [_read_run(path, name) for path, name in zip(paths, names, strict=True)]
    charts = run_charts(runs)
    cards = [_cards(runs[0])] if len(runs) == 1 else []
    problems = [run.problem for run in runs if run.problem]
    differences = _differences(runs)
    overview = _overview(runs, differences)
    sections: list[Section] = [
        *cards,
        replace(
            charts,
            figures=[*charts.figures, *_experts(runs)],
            note=" ".join([charts.note, *problems]),
        ),
        *_samples(runs),
        *_times(runs),
        *_stages(runs),
        _memory(runs),
        next(overview),
        *overview,
        differences,
        *(Text(f"{run.name}: recipe.yaml", to_yaml(run.recipe)) for run in runs if run.recipe),
        *_logs(runs),
        _environment(runs),
    ]
    title = f"Run {names[0]}" if len(runs) == 1 else f"{len(runs)} runs"
    sources = ", ".join(str(path.resolve()) for path in paths)
    footer = f"launcher {__version__}, {time.strftime('%Y-%m-%d %H:%M:%S')}: {sources}"
    write_page(out, title, sections, footer=footer)
    print(out)
    return EXIT_DONE


def _read_run(path: Path, name: str) -> _ReportedRun:
    run, file, recipe, problem = RunFolder(path), path / "recipe.yaml", None, ""
    try:
        if file.exists() and not file.is_file():  # a pipe would block
            raise RecipeError("not a regular file")
        text = file.read_text(encoding="utf-8", errors="replace")
        recipe = recorded_recipe(text, file=file, strict=True)
    except (OSError, RecipeError) as error:
        problem = f"{file} cannot be read: {error}"
    lines = thinned_jsonl(run.metrics, most=_MOST_RECORDS, keep=(b'"eval_', b'"skipped": true'))
    records = [record for record in lines if record.get("step") is not None]
    events, summary = run.read_events(), summarize(path, time.time())
    start: float = (records or [{}])[0].get("time") or 0.0
    if summary.attempts:
        start = summary.attempts[0].started
    marks = [
        ("restart" if attempt.restart else "resume", attempt.resumed, attempt.started)
        for attempt in summary.attempts[1:]
    ]
    marks += [("checkpoint", e["step"], e["time"]) for e in events if e["event"] == "saved"]
    skipped = [record for record in records if record.get("skipped")]
    marks += [("skipped step", record["step"], record.get("time") or start) for record in skipped]
    return _ReportedRun(name, records, start, marks, summary, events, recipe, problem)


def _cards(run: _ReportedRun) -> Cards:
    """What one looks for first: where the run stands, and how fast it is."""
    summary, last = run.summary, run.summary.last
    steps, seconds = summary.status.get("steps"), finite(last.get("step_seconds"))
    mood = {"finished": "good", "running": "good", "failed": "bad", "died": "bad"}
    cards = [
        Card("state", summary.state, summary.reason, mood.get(summary.state, "")),
        Card("step", summary.steps, f"{summary.step / steps:.0%}" if steps else ""),
    ]
    if last:
        evaluation = finite(summary.evaluation.get("eval_loss"))
        detail = "" if evaluation is None else f"evaluation {evaluation:.4f}"
        cards.append(Card("loss", loss_as_text(last), detail))
        rate, detail = finite(last.get("tokens_per_second")), ""
        if seconds is not None:
            detail = f"{seconds:.3g} s a step"
        cards.append(Card("speed", "" if rate is None else f"{rate:,.0f} tokens/s", detail))
    if limit := run.bottleneck():
        part, _, detail = limit.partition(", ")
        cards.append(Card("limits the speed", part, detail))
    if summary.state == "running" and steps and seconds:
        left = seconds_as_text((steps - summary.step) * seconds)
        cards.append(Card("time left", left, f"since {date_text(summary.until)}"))
    elif summary.attempts:
        restarts = f"{summary.restarts} restarts" if summary.restarts != 1 else "1 restart"
        cards.append(Card("took", seconds_as_text(time_spent(summary)["wall"]), restarts))
    if peak := _last_peak(run):
        whole = run.built.get("device_memory")
        cards.append(
            Card("memory", bytes_as_text(peak), f"of {bytes_as_text(whole)}" if whole else "")
        )
    if summary.checkpoints:
        step, when, size = summary.checkpoints[-1]
        detail = f"{bytes_as_text(size)}, {date_text(when)}"
        cards.append(Card("checkpoint", f"step {step:,}", detail))
    else:
        cards.append(Card("checkpoint", "none", "damaged" if summary.damaged else ""))
    return Cards(cards)


def _table(title: str, columns: list[str], facts: list[dict[str, str]]) -> Table:
    """A table with a column for each of `facts`, and a row for each name in them."""
    names = dict.fromkeys(name for column in facts for name, text in column.items() if text)
    rows = [[name, *(column.get(name, "") for column in facts)] for name in names]
    return Table(title, ["", *columns], rows)


def _overview(runs: list[_ReportedRun], differences: Table) -> Iterator[Table]:
    """State and last values of each run. Of several runs, a row for each has what fits into it, of a
    sweep also the keys in which they differ; the second table has the rest."""
    own = ("run.dir", "run.name")
    swept = [row for row in differences.rows if len(set(row[2:])) > 1 and row[0] not in own]
    swept = swept if len(swept) <= _MOST_KEYS else []
    facts: list[dict[str, str]] = []
    for number, run in enumerate(runs, start=2):
        texts = _totals(run)
        texts |= {name: text for name, text, _ in describe(run.summary, None) if name}
        losses = [loss for line in run.records if (loss := finite(line.get("eval_loss")))]
        if losses:
            texts["lowest evaluation"] = f"{min(losses):.4f}"
        texts["limits the speed"] = run.bottleneck()
        texts["error"] = run.summary.status.get("error") or ""
        facts.append({row[0]: row[number] for row in swept} | texts)
    names = [run.name for run in runs]
    if len(runs) == 1:
        yield _table("State", names, facts)
        return
    short = [*(row[0] for row in swept), *_SHORT]
    in_a_row = [{name: _beginning(texts, name) for name in short} for texts in facts]
    table = _table("State", names, in_a_row)
    columns, *rows = zip(table.columns, *table.rows, strict=True)
    yield replace(table, columns=columns, rows=rows)
    others = [{name: text for name, text in one.items() if name not in short} for one in facts]
    yield _table("State, continued", names, others)


def _beginning(texts: dict[str, str], name: str) -> str:
    """A fact of `_overview`, without what follows the number that its name says."""
    text = texts.get(name, "")
    return text.partition(", ")[0] if name in ("loss", "speed") else text


def _totals(run: _ReportedRun) -> dict[str, str]:
    """When the run started and ended, its tokens, and the hours of its GPUs."""
    attempts, until, tokens, hours = run.summary.attempts, run.summary.until, 0.0, 0.0
    if not attempts:
        return {}
    before = attempts[0].resumed
    for record in run.records:
        rate, seconds = finite(record.get("tokens_per_second")), finite(record.get("step_seconds"))
        if rate and seconds:  # means of the steps since the last line
            tokens += rate * seconds * (record["step"] - before)
            before = record["step"]
    for attempt in attempts:
        end = until if attempt.end is None else attempt.end
        hours += max(0.0, end - attempt.started) * (attempt.ranks or 0) / 3600
    last, device = attempts[-1], "rank" if run.built.get("device") == "cpu" else "GPU"
    running = run.summary.state in ("starting", "running")
    return {
        "started": date_text(attempts[0].started),
        "ended": "" if running else date_text(until if last.end is None else last.end),
        "tokens": f"{tokens:,.0f}",
        f"{device}-hours": f"{hours:,.3g}",
    }


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:,.{0 if seconds >= 0.1 else 2}f} ms"


def _logs(runs: list[_ReportedRun]) -> Iterator[Text]:
    """The end of what rank 0 printed."""
    for run in runs:
        file = run.summary.path / "log/rank_0.log"
        with contextlib.suppress(OSError):
            if not file.is_file():  # a pipe would block
                continue
            with file.open("rb") as stream:
                stream.seek(max(0, file.stat().st_size - _LOG_BYTES))
                lines = stream.read(_LOG_BYTES).decode(errors="replace").splitlines()
            yield Text(f"{run.name}: end of log/rank_0.log", "\n".join(lines[-_LOG_LINES:]))


def _times(runs: list[_ReportedRun]) -> Iterator[Bars]:
    """Where the time went: of each run, and of a step."""
    labels = {"counted": "steps that counted", "repeated": "steps trained again"}
    labels |= {"between": "no process", "rest": "starting, evaluating, saving"}
    of_runs, of_steps = [], []
    for run in runs:
        spent = time_spent(run.summary) if run.summary.attempts else {}
        of_runs.append((run.name, {text: spent[name] for name, text in labels.items() if spent}))
        parts = timed_parts(run.records)
        waits, label = parts.pop("communication", None), run.name
        if waits:
            label += f" (communication {_milliseconds(waits)})"
        of_steps.append((label, parts))
    yield bars("Time", of_runs, seconds_as_text)
    note = "Means of all steps. Communication is a part of forward, backward and optimizer."
    yield bars("Time of a step", of_steps, _milliseconds, note=note)


def _stages(runs: list[_ReportedRun]) -> Iterator[Table]:
    """How the stages of each run with a pipeline spent a step of its last start."""
    for run in runs:
        stages = mean_stages(run.records_of_last_start()[1:])
        if not stages or run.recipe is None:
            continue
        blocks = run.built.get("stages") or []
        rows = []
        for number, stage in enumerate(stages, start=1):
            name = f"stage {number}"
            if len(blocks) == len(stages):
                name += f", blocks {blocks[number - 1]}"
            rows.append([name, *(_milliseconds(stage[part]) for part in PARTS)])
        slowest = slowest_stage(stages)
        expected = expected_wait(
            stages,
            micro_batches=run.built.get("micro_batches") or 1,
            chunks=run.recipe.strategy.stages_of_rank,
        )
        note = (
            f"Means of a step. Stage {slowest + 1} computes longest. It waits for other stages "
            f"{_milliseconds(stages[slowest]['wait'])}, and by the schedule {_milliseconds(expected)}. "
            "strategy.pipeline_blocks gives a stage fewer blocks."
        )
        columns = ["", "forward", "backward", "waits for stages", "other communication"]
        title = "Stages of the pipeline"
        yield Table(title if len(runs) == 1 else f"{run.name}: {title}", columns, rows, note)


def _experts(runs: list[_ReportedRun]) -> Iterator[Figure]:
    """How often each expert of each layer was chosen, in the last record of each run."""
    for run in runs:
        file = run.summary.path / EXPERTS
        if not file.is_file():  # a pipe would block
            continue
        try:
            found = json.loads(file.read_bytes())
            step = int(found["step"])
            layers = {name: [float(v) for v in row] for name, row in found["layers"].items()}
            if not all(math.isfinite(v) for row in layers.values() for v in row):
                raise ValueError
        except (
            OSError,
            ValueError,
            TypeError,
            KeyError,
            AttributeError,
            OverflowError,
            RecursionError,
        ):
            continue  # damaged
        title = f"Load of each expert, by layer, at step {step:,} (1: the mean)"
        if layers:
            yield cells_figure(title if len(runs) == 1 else f"{run.name}: {title}", layers)


def _last_peak(run: _ReportedRun) -> int:
    """The largest measured peak of the last start that trained. 0 if none was measured."""
    records = run.records_of_last_start()
    return max((record.get("peak_memory_bytes") or 0 for record in records), default=0)


def _memory(runs: list[_ReportedRun]) -> Bars:
    """The measured peak, divided into what the run recorded that it holds."""
    rows = []
    for run in runs:
        if peak := _last_peak(run):
            sizes = (run.built.get("held") or {}).items()
            held = {
                NAMES[name]: size for name, size in sizes if name in NAMES and type(size) is int
            }
            rows.append((run.name, held | {"other": max(0, peak - sum(held.values()))}))
    note = "The largest peak of a rank."
    if len(runs) == 1:
        run, starts = runs[0], [a.ranks for a in runs[0].summary.attempts if a.ranks]
        recipe = shlex.quote(f"{run.summary.path}/recipe.yaml")
        words = f"recipe={recipe} gpus={starts[-1] if starts else 1}"
        if run.built.get("device") == "cpu":
            words += " gpu=cpu"
        note += f" launcher plan {words} --verify compares it with the plan."
    return bars("Memory at the peak", rows, bytes_as_text, note=note)


def _samples(runs: list[_ReportedRun]) -> Iterator[Answers]:
    """Answers of the first and the last evaluation of each run beside each other."""
    for run in runs:
        file = run.summary.path / "samples.jsonl"
        first_step, first = _of_evaluation(read_jsonl(file, size=_SAMPLE_BYTES, beginning=True), 0)
        last_step, last = _of_evaluation(read_jsonl(file, size=_SAMPLE_BYTES), -1)
        if not last:
            continue
        early = {} if first_step == last_step else {_prompt(one): one for one in first}
        pairs = [(early.get(_prompt(sample), {}), sample) for sample in last[:_SAMPLES]]
        sets = len({sample.get("set") for sample in last})
        yield Answers(
            "Answers" if len(runs) == 1 else f"{run.name}: answers",
            _moment(first_step) if early else "",
            _moment(last_step),
            [_answer(first, last, named=sets > 1) for first, last in pairs],
            f"{len(pairs)} of {len(last)}; all are in samples.jsonl.",
        )


def _of_evaluation(samples: list[Json], place: int) -> tuple[int | None, list[Json]]:
    """The step of a sample, and the samples of its evaluation."""
    step = samples[place].get("step") if samples else None
    return step, [sample for sample in samples if sample.get("step") == step]


def _moment(step: int | None) -> str:
    return f"after step {step:,}" if step else "before training"


def _prompt(sample: Json) -> tuple[str, str]:
    return str(sample.get("set")), str(sample.get("prompt"))


def _answer(first: Json, last: Json, *, named: bool) -> Answer:
    """The answers to a prompt, with their scores, and if `named` its validation set."""
    facts = [f"{last.get('set')}"] if named else []
    for name, value in last.items():
        if name in ("step", "set", "prompt", "reference", "answer"):
            continue
        if (score := finite(value)) is None:
            facts.append(f"{name}: {', '.join(map(str, value))}" if value else "")
        else:
            before = finite(first.get(name))
            facts.append(
                f"{name} {score:g}" if before is None else f"{name} {before:g} → {score:g}"
            )
    return Answer(
        prompt=str(last.get("prompt", "")),
        reference=str(last.get("reference", "")),
        first=str(first.get("answer", "")),
        last=str(last.get("answer", "")),
        scores=", ".join(filter(None, facts)),
    )


def _differences(runs: list[_ReportedRun]) -> Table:
    """Keys in which a run differs from the shipped recipe of its name, or from the defaults."""
    names = {  # in a sweep, the name of the folder follows that of the recipe
        run.recipe.run.name.removesuffix(f" {run.summary.path.resolve().name}")
        for run in runs
        if run.recipe
    }
    shipped, base = "default", DEFAULT
    if len(names) == 1 and (name := names.pop()) in recipe_names():
        try:
            base = load_recipe([f"recipe={name}"], ranks=None, files=False).recipe
            shipped = f"recipes/{name}.yaml"
        except RecipeError:  # it needs files that are not here
            pass
    recipes = [base, *(run.recipe for run in runs)]
    facts = [dict(_leaves(asdict(recipe))) if recipe else {} for recipe in recipes]
    table = _table("Recipe: what differs", [shipped, *(run.name for run in runs)], facts)
    return replace(table, rows=[row for row in table.rows if len(set(row[1:])) > 1])


def _leaves(section: Json, above: str = "") -> Iterator[tuple[str, str]]:
    for key, value in section.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", json.dumps(value, ensure_ascii=False)


def _environment(runs: list[_ReportedRun]) -> Table:
    """Command, devices and versions of the last start of each run."""
    names = ("host", "ranks", "ranks_per_node", "device", "device_memory")
    facts = []
    for run in runs:
        start = next((event for event in run.events[::-1] if event["event"] == "started"), {})
        values = {"command": _command(run.built | start), "git commit": start.get("git_commit")}
        values |= {name: run.built.get(name) for name in names} | (run.built.get("versions") or {})
        facts.append({name: str(value) for name, value in values.items() if value is not None})
    return _table("Environment", [run.name for run in runs], facts)


def _command(start: Json) -> str | None:
    """A command with the arguments and the ranks of a start; None if they are not known."""
    if start.get("overrides") is None or not start.get("ranks"):
        return None
    ranks, per_node = start["ranks"], start.get("ranks_per_node") or start["ranks"]
    words = ["launcher", "train", *start["overrides"], f"gpus={per_node}"]
    if ranks > per_node:
        words.append(f"nodes={ranks // per_node}")
    return shlex.join(words)
