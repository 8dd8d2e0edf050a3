"""`launcher submit`: a Slurm job that is requeued until the run is finished."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from launcher import __version__
from launcher.checkpoint.resume import choose_resume
from launcher.cli.app import Overrides, flag, option
from launcher.cli.sweep import Sweep, combinations, labels, take_sweep
from launcher.console import configure_logging, plural, working
from launcher.errors import EXIT_DONE, EXIT_FAILED, EXIT_NO, EXIT_STOPPED, EXIT_USAGE, RecipeError
from launcher.planner.formatting import as_text
from launcher.recipe.find import shown_path
from launcher.recipe.load import load_recipe, to_yaml
from launcher.recipe.rules import fits_ranks
from launcher.recipe.schema import Recipe, Slurm
from launcher.reliability.run_directory import RunFolder
from launcher.slurm import scheduler
from launcher.slurm.attempts import measured_lead, note_submission, submitted_jobs
from launcher.slurm.render import (
    JobScript,
    missing_resources,
    node_counts,
    nodes_text,
    ranks_per_node,
    render,
)

_NUMBERS = (
    "nodes",
    "train_nodes",
    "gpus_per_node",
    "ranks_per_node",
    "cpus",
    "max_restarts",
    "max_failures",
)
_LISTS = ("sbatch_extra", "srun_extra", "setup")
_SQUEUE_SECONDS = 5.0
"""Between calls of squeue, which all users of the cluster share."""
_MOST_PLANS = 8
"""Combinations of a sweep that are planned before submission; each takes seconds."""
_CHANGE_MEMORY = ("model", "batch", "strategy", "activation_checkpointing", "lora", "data")


class SubmittedRun:
    """The run of a job or of a task of its array. label is its name among the runs of a sweep."""

    def __init__(self, recipe: Recipe, label: str = "") -> None:
        self.recipe, self.label, self.yaml = recipe, label, to_yaml(recipe)
        self.folder = Path(recipe.run.dir).absolute()  # the job may have another working folder
        self.parent = self.folder.parent if label else self.folder
        """The folder that has the runs of a sweep, or the folder of a single run."""
        name = time.strftime("%Y%m%d_%H%M%S") + f"_{os.getpid()}"
        self.recipe_file = self.folder / "slurm" / f"recipe_{name}.yaml"
        """What the job trains, even if the submitted recipe changes."""
        self.script_file = self.folder / "slurm" / f"train_{name}.sbatch"


def submit(
    overrides: Overrides,
    gpus: Annotated[int | None, option("GPUs per node (slurm.gpus_per_node).", "N")] = None,
    gpu: Annotated[
        str | None,
        option("GPU of the nodes, such as h100: check first whether the recipe fits.", "NAME"),
    ] = None,
    gpu_memory: Annotated[
        str | None, option("Memory of a GPU, for the same check.", "SIZE")
    ] = None,
    dependency: Annotated[str | None, option("sbatch --dependency.", "JOBS")] = None,
    throttle: Annotated[
        int | None, option("Runs of a sweep that run at the same time.", "N")
    ] = None,
    dry_run: Annotated[bool, flag("--dry-run", "Print the job script only.")] = False,
    wait: Annotated[
        bool, flag("--wait", "Wait for the end of the run; exit with its status.")
    ] = False,
    follow: Annotated[bool, flag("--follow", "As --wait, and print the output of rank 0.")] = False,
    force: Annotated[
        bool, flag("--force", "Submit even if the recipe does not fit by the plan.")
    ] = False,
) -> int:
    """Submit a Slurm job that is requeued until the run is finished.

    Arguments for Slurm replace keys of the recipe's section slurm; sbatch_extra, srun_extra and
    setup may be repeated. sweep.KEY=A,B,C makes a job array with a run folder for each value;
    several sweeps make all combinations.

    \b
    Example:
      launcher submit recipe=sft model.path=Qwen/Qwen3-0.6B data.train='my/data/*.jsonl' nodes=2 gpus=8 time=12:00:00 gpu=h100
      launcher submit recipe=quickstart cpus=4 sweep.optimizer.learning_rate=1e-4,3e-4 throttle=2
    """
    configure_logging(stream="stderr")  # the script may be all that is wanted of the output
    if gpus is not None:
        overrides = [*overrides, f"slurm.gpus_per_node={gpus}"]
    overrides, sweep = sort_arguments(overrides)
    if throttle is not None and not sweep:
        raise RecipeError("command line: throttle: needs a sweep, whose runs it limits")
    runs = make_runs(overrides, sweep)
    _refuse_what_the_job_would(runs)
    script = _make_script(runs, throttle, dependency)
    text = render(script)
    if dry_run:
        print(text, end="")
        return EXIT_DONE
    if not force:
        device = {"gpu": gpu, "gpu_memory": gpu_memory}
        size = [f"{name}={value}" for name, value in device.items() if value is not None]
        status, host_memory = _plan(overrides, sweep, size, script.slurm)
        if status in (EXIT_NO, EXIT_USAGE):
            return status
        workers = max(run.recipe.data.workers for run in runs)
        note = missing_resources(script.slurm, workers=workers, host_memory=host_memory)
        if note is not None:
            print(note)
    ids = _submit(script, text, runs)
    _print_submitted(script, ids[0].partition("_")[0], runs)
    return _wait(ids, runs, follow=follow) if wait or follow else EXIT_DONE


def _refuse_what_the_job_would(runs: Sequence[SubmittedRun]) -> None:
    """Raises RecipeError if the start of the job would, or if a run has a job already."""
    for run in runs:
        for job, state in _queued([run]).items():
            raise RecipeError(
                f"run.dir: {run.folder} has job {job} already ({state}); wait for it, "
                f"end it (scancel {job}), or give another run.dir"
            )
        choose_resume(run.recipe, RunFolder(run.folder))


def _queued(runs: Sequence[SubmittedRun]) -> dict[str, str]:
    """States of the runs' jobs in the queue, by id. Raises RecipeError."""
    jobs = [job for run in runs for job in submitted_jobs(run.folder)]
    active = scheduler.active_jobs() if jobs else {}
    return {job: active[job].lower() for job in jobs if job in active}


def sort_arguments(arguments: Sequence[str]) -> tuple[list[str], Sweep]:
    """recipe=... and overrides, with Slurm's arguments as overrides of the section slurm; sweeps.

    Slurm's arguments stay text: YAML would read 1:30:00 as 5400 and 0123 as another number.
    """
    arguments, sweep = take_sweep(arguments)
    overrides: list[str] = []
    lists: dict[str, list[str]] = {}
    keys = {field.name for field in dataclasses.fields(Slurm)} - {"environment", *_LISTS}
    for argument in arguments:
        key, equals, value = argument.partition("=")
        name = key.removeprefix("slurm.")
        if equals and key in _LISTS:
            lists.setdefault(key, []).append(value)
        elif equals and name in keys:
            plain = name == "preflight" or (name in (*_NUMBERS, "lead") and value.isdigit())
            plain = plain or value == "null"
            overrides.append(f"slurm.{name}={value if plain else json.dumps(value)}")
        else:
            overrides.append(argument)
    overrides += [f"slurm.{key}={json.dumps(values)}" for key, values in lists.items()]
    return overrides, sweep


def _load(arguments: Sequence[str]) -> Recipe:
    """The recipe, checked for every number of ranks that the job may get."""
    loaded = load_recipe(arguments, ranks=None, hub=True)
    recipe = loaded.recipe
    if (
        recipe.model.config is not None
    ):  # imports torch, but a job may wait for hours before it does
        from launcher.models.config_keys import check_config_keys

        check_config_keys(loaded)
    slurm = recipe.slurm or Slurm()
    counts = node_counts(slurm)
    for nodes in counts:
        ranks = nodes * ranks_per_node(slurm)
        if not fits_ranks(recipe, ranks):
            try:
                load_recipe(arguments, ranks=ranks)
            except RecipeError as error:
                where = f"on {nodes} of {slurm.nodes} nodes: " if len(counts) > 1 else ""
                raise RecipeError([where + problem for problem in error.problems]) from None
    return recipe


def make_runs(overrides: Sequence[str], sweep: Sweep) -> list[SubmittedRun]:
    """The run, or a run for each combination of a sweep's values, in folders below run.dir."""
    if not sweep:
        return [SubmittedRun(_load(overrides))]
    runs = []
    for label, values in labels(sweep).items():
        recipe = _load([*overrides, *values])
        folder = str(Path(recipe.run.dir) / label)
        run = dataclasses.replace(recipe.run, name=f"{recipe.run.name} {label}", dir=folder)
        runs.append(SubmittedRun(dataclasses.replace(recipe, run=run), label))
    return runs


def _half(limit: str | None) -> int:
    """Half of a time limit, in seconds: a warning before that would leave no time to train."""
    if limit is None or not limit[0].isdigit():
        return sys.maxsize
    days, dash, rest = limit.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    if not dash and len(parts) < 3:  # minutes, minutes:seconds
        parts.insert(0, 0)
    hours, minutes, seconds = (*parts, 0, 0)[:3]
    return max(1, (((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds) // 2)


def _make_script(
    runs: Sequence[SubmittedRun], throttle: int | None, dependency: str | None
) -> JobScript:
    first, slurm = runs[0], runs[0].recipe.slurm or Slurm()
    folder = Path(str(runs[0].parent).replace("%", "%%"))  # sbatch replaces what follows a %
    measured = [lead for run in runs if (lead := measured_lead(run.folder)) is not None]
    return JobScript(
        name=first.recipe.run.name.removesuffix(f" {first.label}"),
        slurm=slurm,
        lead=slurm.lead or min(max(measured, default=300), _half(slurm.time)),
        log=folder / "slurm" / ("job_%A_%a.log" if len(runs) > 1 else "job_%j.log"),
        directory=Path.cwd(),
        runs=tuple((run.folder, run.recipe_file) for run in runs),
        python=Path(sys.executable),
        throttle=throttle,
        dependency=dependency,
    )


def _plan(
    overrides: Sequence[str], sweep: Sweep, plan: Sequence[str], slurm: Slurm
) -> tuple[int, int | None]:
    """The exit status of the plan that does not fit, or of the last one, and the most bytes of host
    memory that a node needs; None if that is not known."""
    if slurm.gpus_per_node is None:
        return EXIT_DONE, None
    if not plan:
        print("note: whether it fits was not checked: name the GPU, such as gpu=h100")
        return EXIT_DONE, None
    nodes = node_counts(slurm)[0]  # with more nodes, each GPU holds less
    size = [f"nodes={nodes}", f"gpus={slurm.gpus_per_node}", *plan]
    memory = re.fullmatch(r"([1-9][0-9]*)([KMGT]?)", (slurm.host_memory or "").upper())
    size += [f"host_memory={memory[1]}{memory[2] or 'M'}iB"] if memory else []
    different = [
        (key, values if key.split(".")[0] in _CHANGE_MEMORY else values[:1])
        for key, values in sweep
    ]
    status, needed = EXIT_DONE, []
    for values in itertools.islice(combinations(different), _MOST_PLANS):
        if values:
            print(" ".join(values), flush=True)
        status, host_memory = print_plan([*overrides, *values, *size])
        needed += [] if host_memory is None else [host_memory]
        if status == EXIT_NO:
            print("not submitted: it does not fit; --force submits anyway", file=sys.stderr)
        if status in (EXIT_NO, EXIT_USAGE):
            break
        if status != EXIT_DONE:
            print("note: whether it fits was not checked: the plan failed")
    return status, max(needed, default=None)


def print_plan(arguments: Sequence[str]) -> tuple[int, int | None]:
    """Prints what a GPU holds. Returns the exit status of `launcher plan`, and the bytes of host
    memory that a node needs; None if it did not plan.

    Another process plans, because torch should not stay in the memory of a login node.
    """
    words = [sys.executable, "-m", "launcher", "plan", *arguments, "--no-search", "--json"]
    with working("planning"):
        done = subprocess.run(
            words, env=scheduler.slurm_environment(), stdout=subprocess.PIPE, text=True
        )
    if done.returncode not in (EXIT_DONE, EXIT_NO):
        return done.returncode, None
    plan = json.loads(done.stdout)
    columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    print("\n".join(as_text(plan, columns)), flush=True)
    return done.returncode, plan["host"]["total"]


def _submit(script: JobScript, text: str, runs: Sequence[SubmittedRun]) -> list[str]:
    """Returns the ids of the job, or of the tasks of its array."""
    files = {run.recipe_file: run.yaml for run in runs} | {runs[0].script_file: text}
    try:
        (runs[0].parent / "slurm").mkdir(parents=True, exist_ok=True)  # for the logs
        for file, content in files.items():
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(content)
    except OSError as error:
        problem = f"{error.filename} cannot be written to: {error.strerror}"
        raise RecipeError(f"run.dir: {problem}") from None
    try:
        job = scheduler.sbatch(runs[0].script_file)
    except RecipeError:
        for file in files:
            file.unlink()
        raise
    ids = [job] if len(runs) == 1 else [f"{job}_{task}" for task in range(len(runs))]
    for task, run in zip(ids, runs, strict=True):
        note_submission(run.folder, task, launcher=__version__)
    return ids


def _print_submitted(script: JobScript, job: str, runs: Sequence[SubmittedRun]) -> None:
    slurm, folder, gpus = script.slurm, runs[0].parent, script.slurm.gpus_per_node
    each = plural(gpus, "GPU") if gpus else f"{plural(ranks_per_node(slurm), 'rank')} on CPUs"
    array = f", {len(runs)} runs" if len(runs) > 1 else ""
    array += f", {script.throttle} at a time" if script.throttle else ""
    limit = f", {slurm.time} at a time" if slurm.time else ""
    log = "job_ID_*.log" if len(runs) > 1 else "job_ID.log"
    shown = shown_path(folder)
    print(
        f"submitted job {job}: {script.name}{array}, {nodes_text(slurm)} x {each}{limit}",
        f"  run folder  {shown}" + (f"/{runs[0].label} ..." if len(runs) > 1 else ""),
        f"  log         {shown}/slurm/{log.replace('ID', job)}",
        f"  follow      launcher status {shown}",
        f"  stop        touch {shown_path(runs[0].folder)}/stop   "
        "(saves first, however long that takes)",
        f"  cancel      scancel {job}   (saves within Slurm's KillWait, 30 s by default)",
        sep="\n",
        flush=True,
    )


def _wait(ids: Sequence[str], runs: Sequence[SubmittedRun], *, follow: bool) -> int:
    """Waits until the jobs and their successors have left the queue; returns how the runs ended."""
    log = runs[0].folder / "log" / "rank_0.log"
    offset = log.stat().st_size if log.exists() else 0
    state, queried_at = "pending", 0.0
    try:
        while state:
            if time.monotonic() - queried_at > _SQUEUE_SECONDS:
                queried_at = time.monotonic()
                with contextlib.suppress(RecipeError):  # a controller that restarts is back soon
                    states, before = set(_queued(runs).values()), state
                    # Successors are always pending
                    state = ", ".join(sorted(states - {"pending"} or states))
                    if follow and state and state != before:
                        print(f"-- job {ids[0]}: {state}", flush=True)
            if follow:
                offset = _print_new(log, offset)
            time.sleep(min(0.5, _SQUEUE_SECONDS))
    except KeyboardInterrupt as request:
        request.add_note(f"the job continues; scancel {ids[0].partition('_')[0]} ends it")
        raise
    statuses = [_print_end(job, run.folder) for job, run in zip(ids, runs, strict=True)]
    return max(statuses, key=(EXIT_DONE, EXIT_STOPPED, EXIT_USAGE, EXIT_FAILED).index)


def _print_new(file: Path, offset: int) -> int:
    """Prints the complete lines from this byte on; returns where they end."""
    with contextlib.suppress(OSError), file.open("rb") as stream:
        stream.seek(offset)
        text = stream.read()
        lines = text[: text.rfind(b"\n") + 1]
        print(lines.decode(errors="replace"), end="", flush=True)
        return offset + len(lines)
    return offset


def _print_end(job: str, folder: Path) -> int:
    refusals = sorted((folder / "slurm" / f"job_{job}").glob("restart_*/refused"))
    if refusals:
        print(f"{shown_path(folder)}: refused\n  {refusals[-1].read_text().strip()}")
        return EXIT_USAGE
    status = RunFolder(folder).read_status()
    ended = status.get("state") or "ended before training began"
    step = f" after step {status['step']}" if "step" in status else ""
    print(f"{shown_path(folder)}: {ended}{step}")
    if ended != "finished":
        logs = f"see the logs in {folder}/slurm"
        print(f"  {status.get('error') or status.get('reason') or logs}")
    return {"finished": EXIT_DONE, "stopped": EXIT_STOPPED}.get(ended, EXIT_FAILED)
