"""Whether a run resumes, and which changes of the recipe and the data it accepts."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from launcher.checkpoint.files import STATE, list_checkpoints, verify
from launcher.data.batching import Position
from launcher.errors import RecipeError
from launcher.recipe.load import load_recipe, to_yaml
from launcher.recipe.schema import Recipe
from launcher.reliability.run_directory import RunFolder

_ALTERS_TRAINING = ("run.seed", "model", "lora", "data", "batch.global_batch_size")
"""Sections and keys that decide what the model learns."""
_HARMLESS = (
    "model.attention",
    "model.compile",
    "model.trust_remote_code",
    "data.workers",
    "data.prefetch_factor",
    "data.persistent_workers",
    "data.pin_memory",
    "data.processes",
    "data.cache",
    "data.validation",
)
"""Exceptions: sections and keys among these that do not."""
_UNREPORTED = (
    "run.name",
    "run.dir",
    "checkpoint.resume",
    "checkpoint.allow_changes",
    "slurm",
    "data.date",
)
"""Sections and keys whose changes are not reported. The fingerprint of the data has the date where
it matters."""
_OTHERWISE = "or train into another run.dir; or set checkpoint.allow_changes=true"


@dataclass(frozen=True)
class Resumed:
    """What a checkpoint restores beside model and optimizer."""

    path: Path
    position: Position
    ranks: int
    """How many ranks wrote the checkpoint."""
    observed: dict[str, Any]
    """What `Reporter.state` returned when the checkpoint was written."""
    changes: list[str]
    """Changes of the recipe and the data since then, one line each."""
    evaluation_due: bool
    """The evaluation after this step was interrupted because the run was stopped."""
    origin: Path | None
    """checkpoint.resume if it is a path and this run has not resumed from it before."""


def _differences(
    before: Mapping[str, Any], now: Mapping[str, Any], path: str = ""
) -> Iterator[tuple[str, Any, Any]]:
    """Keys in which two mappings differ, as (dotted key, before, now)."""
    for key in [*before, *(key for key in now if key not in before)]:
        full, a, b = f"{path}{key}", before.get(key), now.get(key)
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            yield from _differences(a, b, f"{full}.")
        elif a != b:
            yield full, a, b


def _within(key: str, names: tuple[str, ...]) -> bool:
    return any(key == name or key.startswith(name + ".") for name in names)


def check_changes(
    before: Mapping[str, Any], now: Mapping[str, Any], *, allow: bool, checkpoint: Path
) -> list[str]:
    """Returns the allowed changes of the recipe, one line each. Raises RecipeError if others exist.

    allow: allows all changes.
    """
    allowed: list[str] = []
    refused: list[str] = []
    for key, old, new in _differences(before, now):
        if _within(key, _UNREPORTED):
            continue
        alters = _within(key, _ALTERS_TRAINING) and not _within(key, _HARMLESS)
        (refused if alters and not allow else allowed).append(_line(key, old, new))
    if refused:
        what = f"{checkpoint} is of another recipe, and these changes alter the training:"
        raise _refusal(what, refused, "undo them")
    return allowed


def _refusal(what: str, changes: list[str], suggestion: str) -> RecipeError:
    return RecipeError([what, *(f"  {line}" for line in changes), f"{suggestion}; {_OTHERWISE}"])


def data_changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    """How two fingerprints of training data (`TokenStore.fingerprint`) differ, one line each."""
    for name, part in before.get("parts", {}).items():
        yield from data_changes(part, now.get("parts", {}).get(name, {}))
    content, content_now = before.get("content"), now.get("content")
    if content is not None and content == content_now:
        return  # the same tokens, whatever the files' names
    known = (before.keys() & now.keys()) - {"parts", "content"}
    old, new = ({key: data[key] for key in before if key in known} for data in (before, now))
    lines = [_line(key.removeprefix("files."), *values) for key, *values in _differences(old, new)]
    if not lines and content is not None and content_now is not None:
        names = list(before.get("files", {}))
        listed = ", ".join(names[:5]) + (" ..." if len(names) > 5 else "")
        lines = [f"{listed}: other content in as many bytes"]
    yield from lines


def _line(key: str, old: Any, new: Any) -> str:
    return f"{key}: {json.dumps(old)} -> {json.dumps(new)}"


def check_data(
    before: Mapping[str, Any], now: Mapping[str, Any], *, allow: bool, checkpoint: Path
) -> list[str]:
    """Changes in the training data, one line each. Raises RecipeError unless they are allowed."""
    changes = list(data_changes(before, now))
    if changes and not allow:
        what = f"{checkpoint} is of other data; these changes alter the order of samples:"
        raise _refusal(what, changes, "restore the data")
    return changes


def check_weights(
    before: str | None, now: str | None, *, allow: bool, checkpoint: Path
) -> list[str]:
    """Like `check_data`, for digests of the weights in model.path; None: not known, or nothing is
    frozen, so that the checkpoint holds all parameters."""
    if before is None or now is None or before == now:
        return []
    changes = [_line("model.path, digest of the weights", before, now)]
    if not allow:
        what = f"{checkpoint} was trained with other frozen weights, which it does not hold:"
        raise _refusal(what, changes, "restore the weights")
    return changes


def check_stream(
    saved: Mapping[str, Any] | None, order: str | None, *, allow: bool, checkpoint: Path
) -> None:
    """Raises RecipeError if a stream would continue with samples in another order.

    saved: the stream's state in the checkpoint. order: digest of the present order of samples;
    None: no stream.
    """
    if order is not None and not allow and (saved is None or saved["order"] != order):
        raise RecipeError(
            f"{checkpoint} cannot be resumed with data.streaming: the files, or what decides the "
            f"order of their samples, have changed. Restore them; {_OTHERWISE}, which first reads "
            "and tokenizes as many samples as were seen"
        )


def saved_position(state: Mapping[str, Any], recipe: Mapping[str, Any]) -> Position:
    """Where a checkpoint continues. state: of the checkpoint. recipe: that it was written with."""
    step, skipped = state["step"], state["skipped_batches"]
    if (samples := state.get("samples")) is None:  # an older version counted steps
        samples = (step + skipped) * recipe["batch"]["global_batch_size"]
    return Position(step, samples, skipped, state["stream"])


def finished_run(arguments: Sequence[str]) -> str | None:
    """What to print if this command has nothing left to train; None: the run is not finished, does
    not exist, or is to be continued.

    Changes no file, so all ranks decide the same. The number of ranks does not matter. Raises
    RecipeError for a change of the recipe that alters the training.
    """
    try:
        recipe = load_recipe(arguments, ranks=None).recipe
    except RecipeError:  # reported with the rules that need the number of ranks
        return None
    run = RunFolder(Path(recipe.run.dir))
    status, wanted = run.read_status(), recipe.checkpoint.resume
    try:
        checkpoints = list_checkpoints(run.path / "checkpoints")
    except OSError:  # `choose_resume` reports it
        return None
    own = wanted == "auto" or (wanted != "never" and run.was_started_from(wanted))
    if status.get("state") != "finished" or not checkpoints or not own:
        return None
    recorded = _recorded(checkpoints[-1])
    before = recorded.get("recipe")
    # Then an older one is resumed from
    lost = verify(checkpoints[-1], deep=False) or recorded.get("step", 0) < (
        status.get("step") or 0
    )
    if before is None or lost or _has_more_to_do(recipe, before, status, run, arguments):
        return None
    now, allow = yaml.safe_load(to_yaml(recipe)), recipe.checkpoint.allow_changes
    check_changes(before, now, allow=allow, checkpoint=checkpoints[-1])
    step = status.get("step", 0)
    early = ", by evaluation.stop_after" if status.get("reason") == "early_stopping" else ""
    return (
        f"{run.path} is finished: {step} of {status.get('steps', step)} steps{early}. Nothing was "
        "trained or changed. To continue it, give more steps than that on the command line "
        "(run.max_steps=N); to train again, another run.dir"
    )


def _has_more_to_do(
    recipe: Recipe,
    before: Mapping[str, Any],
    status: Mapping[str, Any],
    run: RunFolder,
    arguments: Sequence[str],
) -> bool:
    """Whether the recipe is longer than that of the finished run.

    The same recipe without the override that gave its length is no request to train on.
    """
    given, last = {word.partition("=")[0] for word in arguments}, run.overrides_of_last_start()
    lengths = {"run.max_steps", "run.epochs"}
    same = any(word.startswith("recipe=") and word in last for word in arguments)
    if same and not lengths.isdisjoint(last) and lengths.isdisjoint(given):
        return False
    stop_after = before.get("evaluation", {}).get("stop_after")
    if status.get("reason") == "early_stopping" and recipe.evaluation.stop_after != stop_after:
        return True
    if recipe.run.max_steps is None:
        return (recipe.run.epochs or 0) > (before.get("run", {}).get("epochs") or 0)
    return recipe.run.max_steps > (status.get("steps") or status.get("step") or 0)


def _recorded(checkpoint: Path) -> dict[str, Any]:
    """`step` and `recipe` (as values) of a checkpoint; empty if it is damaged."""
    try:
        state = json.loads((checkpoint / STATE).read_text())
        recipe = yaml.safe_load(state["recipe"])
        return {"step": int(state.get("step", 0)), "recipe": dict(recipe)}
    except (OSError, ValueError, LookupError, TypeError, RecursionError, yaml.YAMLError):
        return {}  # reported when it is loaded


def choose_resume(run: RunFolder, recipe: Recipe, recipe_yaml: str, *, restarted: bool) -> str:
    """What this start resumes from: `never` (from scratch), `auto` (the newest checkpoint of the
    folder) or the path in checkpoint.resume.

    restarted: by torchrun's agent or Slurm: the folder belongs to this run. Raises RecipeError if
    another run's record would be lost, or if a change of the recipe is refused.
    """
    wanted, own = recipe.checkpoint.resume, run.path / "checkpoints"
    try:
        checkpoints = list_checkpoints(own)
    except OSError as error:
        raise RecipeError(f"run.dir: {own} cannot be read: {error.strerror}") from None
    resume = "auto" if restarted and wanted == "never" else wanted
    if resume == "auto" and not checkpoints:
        resume = "never"
    if resume == "never":
        if not restarted:
            why = "there is no checkpoint to resume from"
            run.refuse_if_used("checkpoint.resume is never" if wanted == "never" else why)
        return "never"
    if resume != "auto":
        if run.was_started_from(resume):
            resume = "auto" if checkpoints else resume
        elif Path(resume).resolve().parent != own.resolve():
            why = f"it was not started from checkpoint.resume={resume}"
            run.refuse_if_used(f"{why} (checkpoint.resume=auto continues it)")
    source = checkpoints[-1] if resume == "auto" else Path(resume)
    if recorded := _recorded(source):
        before, now = recorded["recipe"], yaml.safe_load(recipe_yaml)
        check_changes(before, now, allow=recipe.checkpoint.allow_changes, checkpoint=source)
        check_length(recorded["step"], recipe.run.max_steps, checkpoint=source)
    return resume


def check_length(step: int, steps: int | None, *, checkpoint: Path) -> None:
    """Raises RecipeError if the run is shorter than the checkpoint. steps: None if not known."""
    if steps is not None and step > steps:
        raise RecipeError(
            f"run.max_steps: the run has {steps} steps, but {checkpoint} is of step {step} "
            "already; give at least as many, or another run.dir"
        )
