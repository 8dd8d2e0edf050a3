"""Whether a run resumes, and which changes of the recipe and the data it accepts."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from launcher.checkpoint.files import STATE, list_checkpoints
from launcher.data.batching import Position
from launcher.errors import RecipeError
from launcher.recipe.schema import Recipe
from launcher.reliability.run_directory import RunFolder

_ALTERS_TRAINING = ("run.seed", "model", "lora", "data", "batch.global_batch_size")
"""Sections and keys that decide what the model learns."""
_HARMLESS = (
    *(
        "model.attention",
        "model.compile",
        "model.trust_remote_code",
        "data.workers",
        "data.prefetch_factor",
        "data.persistent_workers",
    ),
    *("data.pin_memory", "data.processes", "data.cache", "data.validation"),
)
"""Exceptions among them."""
_UNREPORTED = ("run.name", "run.dir", "checkpoint.resume", "checkpoint.allow_changes", "slurm")
"""Sections and keys whose changes are not reported."""


@dataclass(frozen=True)
class Resumed:
    """What a checkpoint restores beside model and optimizer."""

    path: Path
    position: Position
    ranks: int
    """How many ranks wrote the checkpoint."""
    observed: dict[str, Any]
    """`Reporter.state`."""
    changes: list[str]
    """Changes of the recipe since then, one line each."""
    evaluation_due: bool = False
    """The evaluation after this step was interrupted because the run was stopped."""
    origin: Path | None = None
    """checkpoint.resume if it is a path and this run has not resumed from it before."""


def differences(
    before: Mapping[str, Any], now: Mapping[str, Any], path: str = ""
) -> Iterator[tuple[str, Any, Any]]:
    """Keys in which two recipes differ, as (dotted key, before, now). A section that is null in one
    of them counts as one key."""
    for key in [*before, *(key for key in now if key not in before)]:
        here = f"{path}.{key}" if path else str(key)
        a, b = before.get(key), now.get(key)
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            yield from differences(a, b, here)
        elif a != b:
            yield here, a, b


def alters_training(key: str) -> bool:
    """Whether another value of this key changes what the model learns."""

    def within(names: tuple[str, ...]) -> bool:
        return any(key == name or key.startswith(name + ".") for name in names)

    return within(_ALTERS_TRAINING) and not within(_HARMLESS)


def check_changes(
    before: Mapping[str, Any], now: Mapping[str, Any], *, allow: bool, checkpoint: Path
) -> list[str]:
    """Returns the allowed changes, one line each. Raises RecipeError with those that are not
    allowed.

    before: the recipe of the checkpoint, completed with defaults. allow: allows all changes.
    """
    allowed: list[str] = []
    refused: list[str] = []
    for key, old, new in differences(before, now):
        if key in _UNREPORTED or key.split(".")[0] in _UNREPORTED:
            continue
        line = f"{key}: {json.dumps(old)} -> {json.dumps(new)}"
        (refused if alters_training(key) and not allow else allowed).append(line)
    if refused:
        raise RecipeError(
            [
                f"{checkpoint} was written by a run with another recipe, and these changes alter "
                "what is learned:",
                *(f"  {line}" for line in refused),
                "undo them; or train into another run.dir; or set checkpoint.allow_changes=true",
            ]
        )
    return allowed


def data_changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    """How two fingerprints of training data (`TokenStore.fingerprint`) differ, one line each. A
    mixture is compared part by part."""
    for name, part in before.get("parts", {}).items():
        yield from data_changes(part, now.get("parts", {}).get(name, {}))
    content, content_now = before.get("content"), now.get("content")
    if content is not None and content == content_now:
        return  # the same tokens, whatever the files' names
    known = [key for key in before if key in now and key not in ("parts", "content")]
    changed = False
    for key, old, new in differences(
        {key: before[key] for key in known}, {key: now[key] for key in known}
    ):
        changed = True
        if key.startswith("files."):
            name = key.removeprefix("files.")
            if old is None:
                yield f"{name}: was not there"
            elif new is None:
                yield f"{name}: is gone"
            else:
                yield f"{name}: size {old:,} -> {new:,}"
        elif key in ("tokenizer", "chat_template"):
            yield f"data.{key}: its content has changed"
        else:
            yield f"{key}: {old:,} -> {new:,}"
    if not changed and content is not None and content_now is not None:
        names = list(before.get("files", {}))
        listed = ", ".join(names[:5]) + (" ..." if len(names) > 5 else "")
        yield f"{listed}: other content in as many bytes"


def check_stream(
    saved: Mapping[str, Any] | None, order: str | None, *, allow: bool, checkpoint: Path
) -> None:
    """Raises RecipeError if a stream would continue with samples in another order, unless this is
    allowed.

    saved: the stream's state in the checkpoint. order: digest of the present order of samples;
    None: no stream.
    """
    if order is None or allow or (saved is not None and saved["order"] == order):
        return
    reason = (
        "it was written by a version of the launcher whose streaming order was another"
        if saved is None
        else "the files, or what decides the order of their samples, have changed since"
    )
    raise RecipeError(
        f"{checkpoint} cannot be resumed with data.streaming: {reason}, and the run would continue "
        "with other samples. Restore the files and the version; or train into another run.dir; or "
        "set checkpoint.allow_changes=true, which first reads and tokenizes as many samples as "
        "were seen"
    )


def check_data(
    before: Mapping[str, Any], now: Mapping[str, Any], *, allow: bool, checkpoint: Path
) -> list[str]:
    """Changes in the training data, one line each. Raises RecipeError unless they are allowed."""
    changes = list(data_changes(before, now))
    if changes and not allow:
        raise RecipeError(
            [
                f"{checkpoint} was written by a run on other data; with these changes the order of "
                "samples would be another:",
                *(f"  {line}" for line in changes),
                "restore the data; or train into another run.dir; or set "
                "checkpoint.allow_changes=true",
            ]
        )
    return changes


def choose_resume(run: RunFolder, recipe: Recipe, recipe_yaml: str, *, restarted: bool) -> str:
    """What this start resumes from: `never` (from scratch), `auto` (the newest checkpoint of the
    folder) or the path in checkpoint.resume. This process must own the folder.

    restarted: torchrun's agent or Slurm started the same job again. The folder then belongs to this
    run; without a checkpoint it starts from scratch. Raises RecipeError if another run's record
    would be lost, or if a change of the recipe is refused.
    """
    settings = recipe.checkpoint
    checkpoints = list_checkpoints(run.path / "checkpoints")
    resume = "auto" if restarted and settings.resume == "never" else settings.resume
    if resume == "auto" and not checkpoints:
        resume = "never"
    if resume == "never" and not restarted:
        run.refuse_if_used(
            "no checkpoint to resume from"
            if settings.resume == "auto"
            else "checkpoint.resume is never"
        )
    elif resume not in ("auto", "never"):
        if run.was_started_from(resume):
            resume = "auto" if checkpoints else resume
        elif Path(resume).resolve().parent != (run.path / "checkpoints").resolve():
            run.refuse_if_used(
                f"it was not started from checkpoint.resume={resume}; checkpoint.resume=auto "
                "continues it"
            )
    if resume == "never":
        return resume
    source = checkpoints[-1] if resume == "auto" else Path(resume)
    before = None
    with contextlib.suppress(
        OSError, ValueError, KeyError, TypeError
    ):  # damage is reported by the verification
        before = json.loads((source / STATE).read_text())["recipe"]
    if isinstance(before, str):
        check_changes(
            yaml.safe_load(before),
            yaml.safe_load(recipe_yaml),
            allow=settings.allow_changes,
            checkpoint=source,
        )
    return resume
