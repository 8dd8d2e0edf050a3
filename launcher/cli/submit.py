"""`launcher submit`: a Slurm job that is requeued until the run is finished."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import itertools
import json
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from launcher.checkpoint.resume import choose_resume
from launcher.errors import EXIT_DONE, EXIT_FAILED, EXIT_NO, EXIT_STOPPED, EXIT_USAGE, RecipeError
from launcher.recipe.load import LoadedRecipe, load_recipe, to_yaml
from launcher.recipe.schema import Recipe, Slurm
from launcher.reliability.run_directory import RunFolder
from launcher.slurm import scheduler, submit
from launcher.slurm.attempts import DEFAULT_LEAD, measured_lead
from launcher.slurm.render import JobScript, file_pattern, node_counts, ranks_per_node, render

_TEXTS = (
    "time",
    "host_memory",
    "partition",
    "account",
    "qos",
    "constraint",
    "exclude",
    "reservation",
    "mail",
    "interface",
    "python",
)
_NUMBERS = (
    "nodes",
    "gpus_per_node",
    "ranks_per_node",
    "cpus",
    "max_restarts",
    "max_failures",
    "lead",
)
_LISTS = ("sbatch_extra", "srun_extra", "setup")
_SQUEUE_SECONDS = 5.0
"""Between calls of squeue, which other users need, too."""


@dataclass(frozen=True)
class Request:
    """The options of the command."""

    plan: Sequence[str] = ()
    """Arguments of `launcher plan` alone."""
    dependency: str | None = None
    throttle: int | None = None
    dry_run: bool = False
    wait: bool = False
    follow: bool = False
    force: bool = False


@dataclass
class Words:
    """The other arguments, sorted."""

    recipe: list[str]
    """recipe=..., overrides, and Slurm's arguments as overrides of the section slurm."""
    sweep: list[tuple[str, list[str]]]


def sort_arguments(arguments: Sequence[str]) -> Words:
    """Slurm's arguments stay text: YAML would read 1:30:00 as 5400 and 0123 as another number."""
    words = Words([], [])
    lists: dict[str, list[str]] = {}
    for argument in arguments:
        key, equals, value = argument.partition("=")
        name = key.removeprefix("slurm.")
        if equals and key.startswith("sweep."):
            words.sweep.append((key.removeprefix("sweep."), split_values(value)))
        elif equals and name in _TEXTS:
            words.recipe.append(f"slurm.{name}={json.dumps(value)}")
        elif equals and name in _NUMBERS:
            words.recipe.append(f"slurm.{name}={value if value.isdigit() else json.dumps(value)}")
        elif equals and key in _LISTS:
            lists.setdefault(key, []).append(value)
        elif equals and key == "preflight":
            words.recipe.append(f"slurm.preflight={value}")
        else:
            words.recipe.append(argument)
    words.recipe += [f"slurm.{key}={json.dumps(values)}" for key, values in lists.items()]
    return words


def split_values(text: str) -> list[str]:
    """Splits at the commas outside of brackets and quotes: `1,[2,3]` is two values."""
    values, depth, quote = [""], 0, ""
    for character in text:
        if quote:
            quote = "" if character == quote else quote
        elif character in "\"'":
            quote = character
        depth += (character in "[{") - (character in "]}") if not quote else 0
        if character == "," and depth == 0 and not quote:
            values.append("")
        else:
            values[-1] += character
    return values


def _load(arguments: Sequence[str]) -> LoadedRecipe:
    """Loads the recipe, checked for every number of ranks that the job may get. Raises
    RecipeError."""
    loaded = load_recipe(arguments, ranks=None)
    slurm = loaded.recipe.slurm or Slurm()
    counts = node_counts(slurm)
    for nodes in counts:
        try:
            load_recipe(arguments, ranks=nodes * ranks_per_node(slurm))
        except RecipeError as error:
            where = f"on {nodes} of {slurm.nodes} nodes: " if len(counts) > 1 else ""
            raise RecipeError([where + problem for problem in error.problems]) from None
    return loaded


@dataclass(frozen=True)
class Run:
    """One run of the job, or of a task of its array."""

    recipe: Recipe
    label: str
    """Name among the runs of a sweep."""

    @property
    def folder(self) -> Path:
        """Absolute: the job may see another working folder."""
        return Path(self.recipe.run.dir).absolute()


def make_runs(words: Words) -> list[Run]:
    """The run, or a run for each combination of a sweep's values, in folders below run.dir. Raises
    RecipeError."""
    if not words.sweep:
        return [Run(_load(words.recipe).recipe, "")]
    runs = []
    short = [key.rsplit(".", 1)[-1] for key, _ in words.sweep]
    names = [
        name if short.count(name) == 1 else key
        for name, (key, _) in zip(short, words.sweep, strict=True)
    ]
    for values in itertools.product(*(values for _, values in words.sweep)):
        overrides = [f"{key}={value}" for (key, _), value in zip(words.sweep, values, strict=True)]
        recipe = _load([*words.recipe, *overrides]).recipe
        label = ",".join(
            f"{name}={re.sub(r'[^-+.=A-Za-z0-9_]', '_', value)}"
            for name, value in zip(names, values, strict=True)
        )
        run = dataclasses.replace(
            recipe.run, name=f"{recipe.run.name} {label}", dir=str(Path(recipe.run.dir) / label)
        )
        runs.append(Run(dataclasses.replace(recipe, run=run), label))
    if len({run.label for run in runs}) < len(runs):
        what = "two runs would have the same name, and folder; give each value once"
        raise RecipeError(f"command line: sweep: {what}")
    return runs


def _half(limit: str | None) -> int:
    """Half of a time limit, in seconds: a warning before that would leave no time to train."""
    if limit is None or not limit[0].isdigit():
        return sys.maxsize
    days, dash, rest = limit.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    if dash:  # days-hours, days-hours:minutes, days-hours:minutes:seconds
        hours, minutes, seconds = (*parts, 0, 0)[:3]
    elif len(parts) < 3:  # minutes, minutes:seconds
        hours, (minutes, seconds) = 0, (*parts, 0)[:2]
    else:
        hours, minutes, seconds = parts
    return max(1, (((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds) // 2)


def make_script(
    words: Words, request: Request, runs: Sequence[Run], submissions: Sequence[submit.Submission]
) -> JobScript:
    """The job of these runs."""
    first, slurm = runs[0], runs[0].recipe.slurm or Slurm()
    above = first.folder.parent if words.sweep else first.folder
    name = first.recipe.run.name.removesuffix(f" {first.label}")
    measured = [lead for run in runs if (lead := measured_lead(run.folder)) is not None]
    return JobScript(
        name=name,
        slurm=slurm,
        lead=slurm.lead or min(max(measured, default=DEFAULT_LEAD), _half(slurm.time)),
        log=Path(file_pattern(above))
        / "slurm"
        / ("job_%A_%a.log" if len(runs) > 1 else "job_%j.log"),
        directory=Path.cwd(),
        runs=tuple(
            (run.folder, submission.recipe)
            for run, submission in zip(runs, submissions, strict=True)
        ),
        python=Path(sys.executable),
        throttle=request.throttle,
        dependency=request.dependency,
    )


def main(arguments: Sequence[str], request: Request) -> int:
    """Returns 0 where it was submitted, 3 where it does not fit. With wait and follow: how it
    ended."""
    words = sort_arguments(arguments)
    if request.throttle is not None and not words.sweep:
        raise RecipeError(
            "command line: throttle: of a sweep only: how many of its runs go on at a time"
        )
    runs = make_runs(words)
    submissions = [submit.Submission.new(run.folder) for run in runs]
    for run, submission in zip(runs, submissions, strict=True):  # what the job would be refused for
        submit.refuse_if_queued(submission)
        choose_resume(RunFolder(run.folder), run.recipe, to_yaml(run.recipe), restarted=False)
    script = make_script(words, request, runs, submissions)
    text = render(script)
    if request.dry_run:
        print(text, end="")
        return EXIT_DONE
    if not _fits(words, request, script.slurm):
        return EXIT_NO
    version = submit.code_version()
    with contextlib.ExitStack() as locks:
        for submission in submissions:
            locks.enter_context(submission.locked())
            submit.refuse_if_queued(
                submission
            )  # again: now that nobody else can submit it meanwhile
        for run, submission in zip(runs, submissions, strict=True):
            submission.write_recipe(to_yaml(run.recipe))
        submissions[0].script.write_text(text)
        script.log.parent.mkdir(parents=True, exist_ok=True)
        try:
            job = scheduler.sbatch(submissions[0].script)
        except RecipeError:
            for file in (submissions[0].script, *(submission.recipe for submission in submissions)):
                file.unlink(missing_ok=True)
            raise
        ids = [job] if len(runs) == 1 else [f"{job}_{task}" for task in range(len(runs))]
        for task, submission in zip(ids, submissions, strict=True):
            submission.note(task, version)
    _print_submitted(script, job, runs)
    if request.wait or request.follow:
        return _wait(ids, runs, follow=request.follow)
    return EXIT_DONE


def can_plan() -> bool:
    """Whether torch, which a plan needs, is installed."""
    return importlib.util.find_spec("torch") is not None


def _fits(words: Words, request: Request, slurm: Slurm) -> bool:
    """Whether the job fits by the plan, or --force was given."""
    if slurm.gpus_per_node is None or request.force:
        return True
    if not request.plan:
        print("note: whether it fits was not checked: say for which GPU, such as gpu=h100")
        return True
    if not can_plan():
        print("note: whether it fits was not checked: the plan needs torch, which is not here")
        return True
    nodes = node_counts(slurm)[0]  # on more of them each holds less
    memory = re.fullmatch(r"([1-9]\d*)([KMGT]?)", (slurm.host_memory or "").upper())
    host = [f"host_memory={memory[1]}{memory[2] or 'M'}iB"] if memory else []
    for values in _of_different_memory(words.sweep):
        recipe = [*words.recipe, *values]
        size = [f"nodes={nodes}", f"gpus_per_node={slurm.gpus_per_node}"]
        checked = submit.check_plan([*recipe, *size, *request.plan, *host])
        run = f"{' '.join(values)}: " if words.sweep else ""
        if checked.fits is False:
            advice = "launcher plan says what would; --force submits it anyway"
            print(f"{run}{checked.said}", file=sys.stderr)
            print(f"not submitted: that does not fit. {advice}", file=sys.stderr)
            return False
        print(f"{run}{checked.said}")
    return True


MOST_PLANS = 8
"""Plans of a sweep at most: each takes seconds."""


def _of_different_memory(sweep: Sequence[tuple[str, list[str]]]) -> list[list[str]]:
    """Overrides of the runs of a sweep that may differ in memory. Of keys that do not change the
    memory it takes the first value."""
    sections = ("model", "batch", "strategy", "activation_checkpointing", "lora", "data")
    chosen = [
        [f"{key}={value}" for value in (values if key.split(".")[0] in sections else values[:1])]
        for key, values in sweep
    ]
    return [list(values) for values in itertools.islice(itertools.product(*chosen), MOST_PLANS)]


def _shown(path: Path) -> str:
    """The path relative to the current folder, where it is below."""
    with contextlib.suppress(ValueError):
        return str(path.relative_to(Path.cwd()))
    return str(path)


def _print_submitted(script: JobScript, job: str, runs: Sequence[Run]) -> None:
    slurm, first = script.slurm, runs[0]
    ranks = ranks_per_node(slurm)
    each = (
        f"{slurm.gpus_per_node} GPU{'s' * (slurm.gpus_per_node > 1)}"
        if slurm.gpus_per_node
        else f"{ranks} rank{'s' * (ranks > 1)} on CPUs"
    )
    array = (
        f", {len(runs)} runs" + (f", {script.throttle} at a time" if script.throttle else "")
        if len(runs) > 1
        else ""
    )
    limit = f", {slurm.time} at a time" if slurm.time else ""
    print(
        f"submitted job {job}: {script.name}{array}, "
        f"{slurm.nodes} node{'s' * (slurm.nodes != 1)} x {each}{limit}"
    )
    log = (
        str(script.log).replace("%j", job).replace("%A", job).replace("%a", "*").replace("%%", "%")
    )
    above = _shown(first.folder.parent if len(runs) > 1 else first.folder)
    stop, cancel = f"touch {_shown(first.folder)}/stop", f"scancel {job}"
    width = max(len(stop), len(cancel)) + 3
    rows = [
        (
            "run folders" if len(runs) > 1 else "run folder",
            above + (f"/{first.label} ..." if len(runs) > 1 else ""),
        ),
        ("log", _shown(Path(log))),
        ("follow", f"launcher status {above}"),
        ("", f"tail -F {_shown(first.folder)}/log/rank_0.log"),
        ("stop", f"{stop:<{width}}saves first, however long that takes"),
        ("", f"{cancel:<{width}}saves too, if Slurm's KillWait is long enough (30 s by default)"),
        (
            "limits",
            f"told to save {script.lead} s before one ends it; "
            "the job is then requeued, and goes on",
        ),
    ]
    for name, value in rows:
        print(f"  {name:<11} {value}")
    sys.stdout.flush()


def _wait(ids: Sequence[str], runs: Sequence[Run], *, follow: bool) -> int:
    """Waits until the jobs and their successors have left the queue; returns how the runs ended."""
    offsets: dict[Path, int] = {}
    log = runs[0].folder / "log" / "rank_0.log"
    offsets[log] = log.stat().st_size if log.exists() else 0
    state, asked = "pending", 0.0
    try:
        while state:
            if follow:
                _print_new(log, offsets)
            if time.monotonic() - asked > _SQUEUE_SECONDS:
                asked = time.monotonic()
                with contextlib.suppress(
                    RecipeError
                ):  # a controller that is restarted is back in a moment
                    active = scheduler.active_jobs()
                    jobs = {job for run in runs for job in submit.Submission(run.folder, "").jobs()}
                    running = {active[job].lower() for job in jobs if job in active}
                    # Successors are pending all the time
                    before, state = state, ", ".join(sorted(running - {"pending"} or running))
                    if follow and state and state != before:
                        print(f"-- job {ids[0]}: {state}", flush=True)
            time.sleep(min(0.5, _SQUEUE_SECONDS))
        if follow:
            _print_new(log, offsets)
    except KeyboardInterrupt:
        print(f"\nthe job goes on; scancel {ids[0].partition('_')[0]} ends it", file=sys.stderr)
        return 130
    statuses = []
    for job, run in zip(ids, runs, strict=True):
        refusals = sorted((run.folder / "slurm" / f"job_{job}").glob("restart_*/refused"))
        if refusals:
            print(f"{_shown(run.folder)}: refused\n  {refusals[-1].read_text().strip()}")
            statuses.append(EXIT_USAGE)
            continue
        status = RunFolder(run.folder).read_status()
        ended = status.get("state") or "ended before training began"
        print(
            f"{_shown(run.folder)}: {ended}"
            + (f" after step {status['step']}" if "step" in status else "")
        )
        if ended != "finished":
            logs = f"see the logs in {run.folder}/slurm"
            print(f"  {status.get('error') or status.get('reason') or logs}")
        statuses.append({"finished": EXIT_DONE, "stopped": EXIT_STOPPED}.get(ended, EXIT_FAILED))
    return max(statuses, key=(EXIT_DONE, EXIT_STOPPED, EXIT_USAGE, EXIT_FAILED).index)


def _print_new(file: Path, offsets: dict[Path, int]) -> None:
    with contextlib.suppress(OSError), file.open("rb") as stream:
        stream.seek(offsets[file])
        text = stream.read()
        whole = text[: text.rfind(b"\n") + 1]
        offsets[file] += len(whole)
        sys.stdout.write(whole.decode(errors="replace"))
        sys.stdout.flush()
