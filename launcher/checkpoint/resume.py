"""Whether a run resumes, and which changes of the recipe and the data it accepts."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from launcher.checkpoint.files import STATE, list_checkpoints, verify
from launcher.data.batching import Position
from launcher.errors import RecipeError
from launcher.recipe import schema
from launcher.recipe.decode import subsection
from launcher.recipe.derived import with_recorded
from launcher.recipe.load import argument_digests, load_recipe, to_yaml, with_digests
from launcher.recipe.objectives import SECTIONS
from launcher.recipe.schema import Recipe
from launcher.reliability.json_files import Json
from launcher.reliability.run_directory import RunFolder

_SECTIONS = ("model", "data", "lora", *SECTIONS)
_ALTERS_TRAINING = ("run.seed", *_SECTIONS, "batch.global_batch_size")
"""Sections and keys that decide what the model learns."""
_HARMLESS = (
    "model.attention",
    "model.compile",
    "model.keep_logits",
    "model.mlp_tile",
    "model.trust_remote_code",
    "data.workers",
    "data.prefetch_factor",
    "data.persistent_workers",
    "data.pin_memory",
    "data.processes",
    "data.max_document",
    "data.cache",
    "data.validation",
    "distillation.endpoint",
    "distillation.folder",
)
"""Keys of the sections in _ALTERS_TRAINING that do not change what the model learns."""
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
_UNREADABLE = (OSError, ValueError, TypeError, AttributeError, RecursionError, yaml.YAMLError)
"""Errors of a recipe that another program has changed."""
_OTHERWISE = "or train into another run.dir; or set checkpoint.allow_changes=true"


@dataclass(frozen=True)
class Resumed:
    """What a checkpoint restores beside model and optimizer."""

    path: Path
    position: Position
    ranks: int
    """How many ranks wrote the checkpoint."""
    observed: Json
    """What `Reporter.state` returned when the checkpoint was written."""
    changes: list[str]
    """Changes of the recipe and the data since then, one line each."""
    other_validation: bool
    """Evaluations before are of other data: their values are not compared with new ones."""
    evaluation_due: bool
    """The evaluation after this step was interrupted because the run was stopped."""
    origin: Path | None
    """checkpoint.resume if it is a path and this run has not resumed from it before."""


def _differences(
    before: Mapping[str, object], now: Mapping[str, object], path: str = ""
) -> Iterator[tuple[str, object, object]]:
    """Keys in which two mappings differ, as (dotted key, before, now)."""
    for key in dict.fromkeys([*before, *now]):
        full, a, b = f"{path}{key}", before.get(key), now.get(key)
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            yield from _differences(a, b, f"{full}.")
        elif a != b:
            yield full, a, b


def _within(key: str, names: tuple[str, ...]) -> bool:
    return any(key == name or key.startswith(name + ".") for name in names)


def recipe_changes(
    before: Mapping[str, object], now: Mapping[str, object], *, altering: bool = False
) -> list[str]:
    """The changes between two recipes, one line each. altering: only changes that alter what the
    model learns."""
    # Recipes from before there were adapters of experts lack `target_parameters`: [] with a section
    # lora, else null
    lora = before.get("lora")
    same = isinstance(lora, Mapping) and "target_parameters" not in lora
    before = _with_new_keys(before)
    return [
        _line(key, old, new)
        for key, old, new in _differences(before, now)
        if not _within(key, _UNREPORTED)
        and not (same and key == "lora.target_parameters" and new == [])
        and (not altering or (_within(key, _ALTERS_TRAINING) and not _within(key, _HARMLESS)))
    ]


def _with_new_keys(recipe: Mapping[str, object]) -> dict[str, object]:
    """The recipe with the defaults of keys that the version which wrote it did not know."""
    complete = dict(recipe)
    for name in _SECTIONS:
        if isinstance(section := recipe.get(name), Mapping):
            cls = subsection(Recipe, name)
            assert cls is not None
            simple = (
                f for f in dataclasses.fields(cls) if isinstance(f.default, str | int | float)
            )
            complete[name] = {field.name: field.default for field in simple} | {**section}
    return complete


def recipe_of_state(state: Json) -> Json:
    """The recipe in a checkpoint's state as plain values. Arguments from the environment have the
    digests of their values."""
    return with_digests(dict(yaml.safe_load(state["recipe"])), state.get("environment"))


def recipe_to_compare(recipe: Recipe, environment: Json | None) -> Json:
    """The recipe of this start, for comparison with `recipe_of_state`. environment: the entry
    `environment` of that state. Raises RecipeError if an argument from the environment has no
    value."""
    digests = argument_digests(recipe, (environment or {}).get("salt"))
    return with_digests(yaml.safe_load(to_yaml(recipe)), digests)


def check_recipe(
    path: Path, before: Mapping[str, object], now: Mapping[str, object], *, allow: bool
) -> None:
    """Raises RecipeError if changes since a checkpoint alter the training, unless allowed, and if
    the optimizer is another one or only one of the two recipes has averages of the weights."""
    _check_optimizer(path, before, now)
    _check_averages(path, before, now)
    altering = recipe_changes(before, now, altering=True)
    if altering and not allow:
        what = f"{path} is of another recipe, and these changes alter the training:"
        raise _refusal(what, altering, "undo them")


def _check_optimizer(path: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    had, has = ((each.get("optimizer") or {}).get("name") for each in (before, now))
    if had is not None and has is not None and had != has:
        raise RecipeError(
            f"optimizer.name: {path} has the state of {had}, not of {has}; set it to {had}, or train "
            "into another run.dir, with the exported weights as model.path"
        )


def _check_averages(path: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    had, has = ((each.get("optimizer") or {}).get("ema") for each in (before, now))
    if (had is None) == (has is None):
        return
    what = f"cannot be added on a resume: {path} has no averages of the weights"
    if has is None:
        what = f"cannot be removed on a resume: {path} has averages of the weights"
    raise RecipeError(
        f"optimizer.ema: {what}; set it to {json.dumps(had)}, or train into another run.dir, with "
        "the exported weights as model.path"
    )


def _refusal(what: str, changes: list[str], suggestion: str) -> RecipeError:
    resumes = "to resume with the changes, after as many samples as were trained"
    last = f"{suggestion}; {_OTHERWISE} {resumes}"
    return RecipeError([what, *(f"  {line}" for line in changes), last])


def data_changes(before: Json, now: Json) -> Iterator[str]:
    """How two fingerprints of training data (`TokenStore.fingerprint`) differ, one line each."""
    for name, source in before.get("parts", {}).items():
        yield from data_changes(source, now.get("parts", {}).get(name, {}))
    if now.get("held_out") is not None and before.get("held_out") is None:
        yield (
            "data.validation_split: an earlier version chose the rows that are held out by their "
            "number, this one chooses them by their content: others are trained, in another order"
        )
    content, content_now = before.get("content"), now.get("content")
    if content is not None and content == content_now:
        return  # the same tokens, whatever the files' names
    known = (before.keys() & now.keys()) - {"parts", "content", "sample", "held_out"}
    if _moved(before, now):
        known -= {"files"}
    old, new = ({key: data[key] for key in before if key in known} for data in (before, now))
    lines = [_line(key.removeprefix("files."), *values) for key, *values in _differences(old, new)]
    digests = ((before.get(key), now.get(key)) for key in ("content", "sample"))
    if not lines and any(None not in both and both[0] != both[1] for both in digests):
        names = list(before.get("files", {}))
        listed = ", ".join(names[:5]) + (" ..." if len(names) > 5 else "")
        lines = [f"{listed}: other content in as many bytes"]
    yield from lines


def validation_changes(before: Json, now: Json) -> Iterator[str]:
    """How what is evaluated (`RunData.evaluated`) has changed, one line each."""
    sets, sets_now = before["sets"], now["sets"]
    for name in dict.fromkeys([*sets, *sets_now]):
        if name in sets and name in sets_now:
            lines = data_changes(sets[name], sets_now[name])
            yield from (f"data.validation, set {name!r}: {line}" for line in lines)
        else:
            yield f"data.validation, set {name!r}: {'added' if name in sets_now else 'removed'}"
    limits = (each["max_batches"] for each in (before, now))
    if (old := next(limits)) != (new := next(limits)):
        yield _line("evaluation.max_batches", old, new)


def _moved(before: Json, now: Json) -> bool:
    """Whether the files of a stream are the same but for their names. A data set of the hub, without
    a size, has only its name."""
    if before.get("sample") is None or before["sample"] != now.get("sample"):
        return False
    sizes, sizes_now = ([*each.get("files", {}).values()] for each in (before, now))
    return sizes == sizes_now and all(sizes)


def _order_version(order: str) -> str:
    """Of the digest of a stream's order. Earlier versions wrote none."""
    return order.rpartition("-")[0]


def _line(key: str, old: object, new: object) -> str:
    return f"{key}: {json.dumps(old)} -> {json.dumps(new)}"


def counted_otherwise(recorded: Json, data: schema.Data) -> str | None:
    """Why the samples at the positions of a run are not those of this version; None: they are.

    recorded: what the run recorded, with `Data.batch_unit`. Earlier versions recorded none.
    """
    unit = data.batch_unit
    if unit == recorded.get("batch_unit", "sequences") or (unit == "answers" and not data.packing):
        return None
    what = f"whose batches counted sequences with several {unit}, where they now count {unit}"
    if unit == "pairs" and not data.packing:
        what = (
            "whose data.sequence_length was that of both answers of a pair, where each of them may "
        )
        what += "now be as long"
    return f"is of an earlier version, {what}: its position would mean other samples"


def check_content(
    path: Path,
    state: Json,
    *,
    settings: schema.Data,
    data: Json,
    weights: Mapping[str, str | None],
    stream: str | None,
    allow: bool,
) -> list[str]:
    """Returns the changes of the data and of frozen weights since a checkpoint, one line each.

    settings: the section `data`. data: the fingerprint of the training data. weights: the digests of the weights in model.path
    and of the adapter in lora.path; None if nothing is frozen, so that the checkpoint holds all
    parameters, and if there is no such adapter. stream: the digest of
    the order of a stream's samples; None without a stream. Raises RecipeError unless changes are
    allowed.
    """
    if (why := counted_otherwise(state, settings)) is not None and not allow:
        raise RecipeError(f"{path} {why}. Finish the run with that version; {_OTHERWISE}")
    changes = list(data_changes(state["data"], data))
    if changes and not allow:
        what = f"{path} is of other data; these changes alter the order of samples:"
        raise _refusal(what, changes, "restore the data")
    for key, now in weights.items():
        before = state.get("weights" if key == "model.path" else "adapter")
        if None not in (before, now) and before != now:  # earlier versions wrote none
            changes.append(_line(f"{key}, digest of the weights", before, now))
            if not allow:
                what = f"{path} was trained with other frozen weights, which it does not hold:"
                if key == "lora.path":
                    what = f"{path} was trained from another adapter:"
                raise _refusal(what, changes, "restore the weights")
    saved = state["stream"]
    if stream is not None and not allow and (saved is None or saved["order"] != stream):
        what = "the files, or what decides the order of their samples, have changed. Restore them"
        if saved is not None and _order_version(saved["order"]) != _order_version(stream):
            what = "another version of the launcher wrote it. Resume with that version"
        raise RecipeError(
            f"{path} cannot be resumed with data.streaming: {what}; {_OTHERWISE}, which then "
            "begins at the same shard of the new order, or of such a version at the first one"
        )
    return changes


def check_data(
    run: RunFolder,
    start: ResumePoint,
    *,
    settings: schema.Checkpoint,
    section: schema.Data,
    data: Json,
    stream: str | None,
) -> None:
    """`check_content` without weights, for the checkpoint that a start resumes from: before passes over
    the data that may take hours. section: `data`. Raises RecipeError."""
    if (recorded := _recorded(run, start)) is None:
        return
    try:
        state = json.loads((recorded.path / STATE).read_text())
    except (OSError, ValueError):
        return  # reported when it is loaded
    check_content(
        recorded.path,
        state,
        settings=section,
        data=data,
        weights={},
        stream=stream,
        allow=settings.allow_changes,
    )


def saved_position(state: Json, recipe: Json) -> Position:
    """The position of the data at which a checkpoint continues. state: the content of its
    state.json. recipe: the recipe that it was written with."""
    step, skipped = state["step"], state["skipped_batches"]
    if (samples := state.get("samples")) is None:  # an older version counted steps
        samples = (step + skipped) * recipe["batch"]["global_batch_size"]
    return Position(step, samples, skipped, state["stream"])


@dataclass(frozen=True)
class Fresh:
    """A start from scratch."""


@dataclass(frozen=True)
class Latest:
    """A start that resumes from the newest valid checkpoint of the run folder."""


@dataclass(frozen=True)
class From:
    """A start that resumes from the checkpoint in a path: checkpoint.resume."""

    path: Path


ResumePoint = Fresh | Latest | From


@dataclass(frozen=True)
class ResumeDecision:
    """What a start of a run does with the checkpoints that there are."""

    start: ResumePoint
    not_continued: str | None = None
    """Why this start does not continue a run in the folder. If there is a reason, the folder must
    not hold a run."""
    finished: str | None = None
    """What to print if nothing is left to train."""


def decide(
    recipe: Recipe, run: RunFolder, *, arguments: Sequence[str] = (), restarted: bool = False
) -> ResumeDecision:
    """Decides what a start does, by the recipe of the newest checkpoint that can be read. Changes
    no file, and does not read the tensors: a damaged checkpoint is noticed when it is loaded.

    restarted: by torchrun's agent or Slurm: the folder belongs to this run. Raises RecipeError if a
    change of the recipe alters the training, or if the run is shorter than the checkpoint.
    """
    wanted, own = recipe.checkpoint.resume, run.path / "checkpoints"
    try:
        checkpoints = list_checkpoints(own)
    except OSError as error:
        raise RecipeError(f"run.dir: {own} cannot be read: {error.strerror}") from None
    if wanted == "never" and not restarted:
        return ResumeDecision(Fresh(), not_continued="checkpoint.resume is never")
    not_continued: str | None = None
    start: ResumePoint
    if wanted in ("auto", "never"):
        if not checkpoints:
            why = None if restarted else "there is no checkpoint to resume from"
            return ResumeDecision(Fresh(), not_continued=why)
        start = Latest()
    elif run.was_started_from(wanted):
        start = Latest() if checkpoints else From(Path(wanted))
    else:
        start = From(Path(wanted))
        if Path(wanted).resolve().parent != own.resolve():
            not_continued = f"it was not started from checkpoint.resume={wanted} "
            not_continued += "(checkpoint.resume=auto continues it)"
    recorded = _newest(start, checkpoints)
    if recorded is None:
        return ResumeDecision(start, not_continued)
    recipe = with_recorded(recipe, recorded.recipe)
    now, allow = recipe_to_compare(recipe, recorded.environment), recipe.checkpoint.allow_changes
    check_recipe(recorded.path, recorded.recipe, now, allow=allow)
    if start == Latest() and wanted != "never":
        if finished := _finished(recipe, run, arguments, recorded, newest=checkpoints[-1]):
            return ResumeDecision(start, finished=finished)
    if recipe.run.max_steps is not None and recorded.step > recipe.run.max_steps:
        raise RecipeError(
            f"run.max_steps: the run has {recipe.run.max_steps} steps, but {recorded.path} is of "
            f"step {recorded.step} already; give at least as many, or another run.dir"
        )
    return ResumeDecision(start, not_continued)


def finished_run(arguments: Sequence[str]) -> str | None:
    """What to print if this command has nothing left to train; None if it has.

    Every process of a start decides the same, before rank 0 takes the folder. The number of ranks
    does not matter. Raises RecipeError like `decide`.
    """
    try:
        recipe = load_recipe(arguments, ranks=None).recipe
    except RecipeError:  # reported with the rules that need the number of ranks
        return None
    run = RunFolder(Path(recipe.run.dir))
    if run.read_status().get("state") != "finished":
        return None
    return decide(recipe, run, arguments=arguments).finished


def choose_resume(
    recipe: Recipe, run: RunFolder, *, arguments: Sequence[str] = (), restarted: bool = False
) -> ResumePoint:
    """The start of `decide`, for the process that writes to the folder. Raises RecipeError like
    `decide`, or if another run's record would be lost."""
    decision = decide(recipe, run, arguments=arguments, restarted=restarted)
    if decision.not_continued is not None and not _saved_nothing(recipe, run):
        run.refuse_if_used(decision.not_continued)
    return decision.start


def altered(recipe: Recipe, before: bytes) -> list[str]:
    """How a recipe trains otherwise than an earlier one, in YAML; a line each. An earlier one that cannot
    be read is not compared."""
    if recipe.checkpoint.allow_changes:
        return []
    with contextlib.suppress(*_UNREADABLE):
        earlier = yaml.safe_load(before.decode())
        now = yaml.safe_load(to_yaml(with_recorded(recipe, earlier)))
        return recipe_changes(earlier, now, altering=True)
    return []


def _saved_nothing(recipe: Recipe, run: RunFolder) -> bool:
    """Whether the folder holds starts of this run only, which ended before they saved anything.
    Another start loses nothing but their metrics. Not with checkpoint.resume: never."""
    file = run.path / "recipe.yaml"
    if recipe.checkpoint.resume != "auto" or not file.is_file() or not run.has_saved_nothing():
        return False
    try:
        before = yaml.safe_load(file.read_text(encoding="utf-8"))
        now = yaml.safe_load(to_yaml(with_recorded(recipe, before)))
        changes = recipe_changes(before, now, altering=True)
    except _UNREADABLE:
        return False
    return not changes or recipe.checkpoint.allow_changes


def _finished(
    recipe: Recipe, run: RunFolder, arguments: Sequence[str], recorded: _Recorded, *, newest: Path
) -> str | None:
    """`ResumeDecision.finished` of a run whose newest checkpoint is `newest`."""
    status = run.read_status()
    step = status.get("step") or 0
    if status.get("state") != "finished" or _has_more_to_do(recipe, recorded, run, arguments):
        return None
    if recorded.path != newest or recorded.step < step or verify(newest, deep=False):
        return None  # the last steps are lost: an older checkpoint is resumed from
    early = ", by evaluation.stop_after" if status.get("reason") == "early_stopping" else ""
    return (
        f"{run.path} is finished: {step} of {status.get('steps', step)} steps{early}. Nothing was "
        "trained or changed. To continue it, give more steps than that on the command line "
        "(run.max_steps=N); to train again, another run.dir"
    )


def _has_more_to_do(
    recipe: Recipe, recorded: _Recorded, run: RunFolder, arguments: Sequence[str]
) -> bool:
    """Whether the recipe has more steps than the recipe of the finished run.

    A command without the override that gave the length of the finished run does not ask for more
    steps.
    """
    given, last = {word.partition("=")[0] for word in arguments}, run.overrides_of_last_start()
    lengths = {"run.max_steps", "run.epochs"}
    same = any(word.startswith("recipe=") and word in last for word in arguments)
    if same and not lengths.isdisjoint(last) and lengths.isdisjoint(given):
        return False
    before, status = recorded.recipe, run.read_status()
    stop_after = before.get("evaluation", {}).get("stop_after")
    if status.get("reason") == "early_stopping" and recipe.evaluation.stop_after != stop_after:
        return True
    if recipe.run.max_steps is None:
        return (recipe.run.epochs or 0) > (before.get("run", {}).get("epochs") or 0)
    return recipe.run.max_steps > (status.get("steps") or status.get("step") or 0)


def recorded_recipe(run: RunFolder, start: ResumePoint) -> Json:
    """The recipe, without `auto`, of the checkpoint that a start resumes from; {} without one."""
    recorded = _recorded(run, start)
    return {} if recorded is None else recorded.recipe


class _Recorded(NamedTuple):
    """A checkpoint, its step, and the recipe, the number of ranks and the digests of arguments
    (`argument_digests`) that it was written with."""

    path: Path
    step: int
    recipe: Json
    ranks: int | None
    environment: Json | None


def _newest(start: ResumePoint, checkpoints: Sequence[Path]) -> _Recorded | None:
    """The newest checkpoint that can be read, among the checkpoints that a start may resume from.
    checkpoints: all checkpoints of the run folder, oldest first."""
    match start:
        case Fresh():
            return None
        case From(path):
            return _read_recorded(path)
        case Latest():
            return next(filter(None, map(_read_recorded, reversed(checkpoints))), None)


def _recorded(run: RunFolder, start: ResumePoint) -> _Recorded | None:
    own = run.path / "checkpoints"
    return _newest(start, list_checkpoints(own) if start == Latest() else [])


def earlier_strategy(
    recipe: Recipe, run: RunFolder, start: ResumePoint, *, ranks: int, except_for: Collection[str]
) -> Json | None:
    """The section `strategy` of the recipe in the checkpoint that a start resumes from.

    None if it was written on another number of ranks, or if its batch, strategy or activation
    checkpointing differ in more than the keys `except_for`; then a resume is not exact.
    """
    recorded = _recorded(run, start)
    if recorded is None or recorded.ranks != ranks:
        return None
    now = yaml.safe_load(to_yaml(recipe))
    sections = ("batch", "strategy", "activation_checkpointing")
    before, after = ({key: each.get(key) for key in sections} for each in (recorded.recipe, now))
    if {key for key, _, _ in _differences(before, after)} - {*except_for}:
        return None
    return dict(recorded.recipe["strategy"])


def _read_recorded(checkpoint: Path) -> _Recorded | None:
    """None if the checkpoint is damaged."""
    if not (checkpoint / STATE).is_file():  # a pipe would block
        return None
    try:
        state = json.loads((checkpoint / STATE).read_text())
        recipe = recipe_of_state(state)
        step = int(state.get("step", 0))
        environment = state.get("environment")
        return _Recorded(checkpoint, step, recipe, state.get("ranks"), environment)
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None  # reported when it is loaded
    except (RecursionError, yaml.YAMLError):
        return None  # reported when it is loaded
