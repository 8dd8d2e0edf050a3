"""What a recipe does not give, as far as the recipe alone decides it: keys that are `auto`, or not
given.

`planner/auto.py` has the table of all keys that may be `auto`, and decides the others.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from launcher.distributed.hardware import computes_in_bfloat16
from launcher.distributed.rank_layout import EXPERT, TENSOR
from launcher.errors import RecipeError
from launcher.recipe.decode import KeyPath, Problem, keys, plain_value, shown, value_of
from launcher.recipe.model_config import attends_both_ways, why_not_packed
from launcher.recipe.rules import excluded_by
from launcher.recipe.schema import Data, Recipe
from launcher.recipe.section import AutoFloat, AutoInt
from launcher.recipe.yaml_text import flow_yaml
from launcher.sources.finding import first_rows
from launcher.sources.hub import model_config
from launcher.sources.layouts import RETRIEVAL, documents_of, match_row, named_columns


@dataclass(frozen=True)
class Derived:
    """The value of a key that was not given, or was `auto`, and why it is this one."""

    value: Any
    reason: str

    def __str__(self) -> str:
        """`false, because lora.quantize excludes it`."""
        return f"{flow_yaml(self.value)}, {self.reason}"


Choices = dict[str, Derived]
"""What was chosen in place of `auto`, by key."""
_LOOKED_AT = 100
"""First rows in which the documents of a query are counted."""
_STANDS_BACK = {
    "run.epochs": ("run.max_steps",),
    "data.validation_split": ("data.validation", "data.builder", "data.streaming"),
    "schedule.warmup_steps": ("schedule.warmup_ratio",),
    "evaluation.every_steps": ("evaluation.every_epochs",),
    "checkpoint.every_steps": ("checkpoint.every_epochs",),
}
"""Keys whose `auto` has nothing to choose where one of these keys is given."""


def drop_idle_auto(plain: dict[str, Any]) -> None:
    """Removes each `auto` that has nothing to choose, because another key of the recipe is given."""
    for key, others in _STANDS_BACK.items():
        given = any(plain_value(plain, other) not in (None, False) for other in others)
        if given and plain_value(plain, key) == "auto":
            section, _, name = key.rpartition(".")
            del plain[section][name]


def open_rate_of_adapters(plain: dict[str, Any]) -> None:
    """The default rate is one for all weights; adapters learn next to nothing with it."""
    if not isinstance(plain.get("lora"), dict):
        return
    if isinstance(optimizer := plain.setdefault("optimizer", {}), dict):
        optimizer.setdefault("learning_rate", "auto")


def decide_packing(
    plain: dict[str, Any], derived: dict[KeyPath, Derived], *, hub: bool
) -> Iterator[Problem]:
    """Sets data.packing where it is `auto` or not given: false if the model cannot keep packed
    documents apart. Yields what is wrong with a true for such a model. Whether packing is worth it
    for few rows is decided when these are known (`planner/sizes.py`)."""
    data, model = plain.get("data"), plain.get("model")
    if not isinstance(data, dict) or not isinstance(model, dict):
        return
    given, task = data.get("packing", "auto"), model.get("task", "causal_lm")
    if given == "auto":
        # Where batch or length follow from the rows, packing does: a full sequence may be a whole step
        keys = ("batch.global_batch_size", "data.sequence_length")
        data["packing"] = "auto" if "auto" in [plain_value(plain, key) for key in keys] else True
    elif given is not True:
        return
    why = None
    if data.get("builder") is not None:  # its samples are not packed
        return
    if model.get("builder") is not None:
        why = "a model of model.builder gets a document in each row"
    elif task == "causal_lm":
        why = why_not_packed(_model_config(model, hub=hub))
    elif task == "embedding":
        config = _model_config(model, hub=hub)
        changes = model.get("config")
        config = {**config, **(changes if isinstance(changes, dict) else {})}
        both = model.get("bidirectional") is True or attends_both_ways(config)
        why = "attention of the model goes to both sides" if both else why_not_packed(config)
    elif task == "masked_lm":
        why = "attention of model.task: masked_lm goes to both sides"
    elif task == "reranker":
        why = "a classifier gets a text in each row"
    if why is not None and given == "auto":
        data["packing"] = False
        derived["data", "packing"] = Derived(False, f"because {why}")
    elif why is not None:
        yield Problem(("data", "packing"), "not-with-model", f"{why}; set it to auto, or to false")


def decide_documents(plain: dict[str, Any], derived: dict[KeyPath, Derived]) -> None:
    """Sets data.documents where it is not given, by the first rows: with packing, the plan counts so many
    for each query."""
    data = plain.get("data")
    if not isinstance(data, dict) or data.get("kind") not in RETRIEVAL or "documents" in data:
        return
    train, validation = data.get("train"), data.get("validation")
    sources = train.values() if isinstance(train, dict) else [train]
    files = [each.get("files") if isinstance(each, dict) else each for each in sources]
    # Evaluations are of the same documents
    files += validation.values() if isinstance(validation, dict) else [validation]
    counts = dict[int, str]()
    for patterns in files:
        listed = [patterns] if isinstance(patterns, str) else patterns
        if not isinstance(listed, list | tuple):
            continue
        with contextlib.suppress(RecipeError):  # reported where the rows are read
            name, rows = first_rows(listed, _LOOKED_AT) or ("", [])
            found = ((row, match_row(row, named_columns(data), [data["kind"]])) for row in rows)
            for row, match in found:
                if match is not None:
                    counts.setdefault(documents_of(row, match), name)
    if counts:
        most = min(max(counts), Data.documents)
        data["documents"] = most
        why = f"as many as one of the first {_LOOKED_AT} rows of {shown(counts[max(counts)])} has"
        why += "" if most == max(counts) else f", up to {most}"
        derived["data", "documents"] = Derived(most, why)


def decide_precision(plain: dict[str, Any], derived: dict[KeyPath, Derived]) -> None:
    """Sets float32 where `strategy.kind: auto` leaves the precision open and the CPU of the run has
    no instructions for bfloat16, with which a step then takes several times as long."""
    strategy = plain.get("strategy")
    if plain_value(plain, "run.device") != "cpu" or not isinstance(strategy, dict):
        return
    open_ = strategy.get("kind") == "auto" and "mixed_precision" not in strategy
    if open_ and not computes_in_bfloat16():
        strategy["mixed_precision"] = None
        why = "so float32: this CPU has no instructions for bfloat16"
        derived["strategy", "mixed_precision"] = Derived(None, why)


def decide_compile(recipe: Recipe, derived: dict[KeyPath, Derived]) -> Recipe:
    """The recipe with false in place of `model.compile: auto` if another key speaks against it."""
    why = why_not_compiled(recipe)
    if recipe.model.compile != "auto" or why is None:
        return recipe
    derived["model", "compile"] = Derived(False, why)
    return replace(recipe, model=replace(recipe.model, compile=False))


def why_not_compiled(recipe: Recipe) -> str | None:
    """Why another key excludes compilation, or why it is not recommended with another key: no GPU has
    run divided layers and experts compiled; None: it is recommended."""
    if key := excluded_by(recipe, "model.compile", "true"):
        return f"because {key} excludes it"
    for dimension in (TENSOR, EXPERT):
        if getattr(recipe.strategy, dimension.key) > 1:
            return f"no GPU has run strategy.{dimension.key} compiled; true compiles it"
    return None


def _model_config(model: Mapping[str, Any], *, hub: bool) -> Mapping[str, object]:
    """model.config if it is whole, or else the config of model.path; empty: it is not known here."""
    config, path = model.get("config"), model.get("path")
    if isinstance(path, str) and not (isinstance(config, dict) and "model_type" in config):
        config = model_config(path, fetch=hub)
    return config if isinstance(config, dict) else {}


def open_sizes(recipe: Recipe) -> list[str]:
    """The keys that are `auto` until the rows are known."""
    every = (".".join(key) for key in keys())
    return [key for key in every if isinstance(value_of(recipe, key), AutoInt | AutoFloat)]


def stands_for(recipe: Recipe, key: str) -> bool | int | float:
    """What `auto` in a size stands for until the rows are known."""
    value: AutoInt | AutoFloat = value_of(recipe, key)
    if key == "data.packing":
        return bool(value)
    return int(value) if isinstance(value, int) else float(value)


def with_recorded(recipe: Recipe, earlier: Mapping[str, Any]) -> Recipe:
    """The recipe with the sizes of another, given as plain values, in place of those that are
    `auto`."""
    for key in open_sizes(recipe):
        section, name = key.split(".")
        if name in earlier.get(section, {}):
            recipe = with_value(recipe, key, earlier[section][name])
    return recipe


def with_value(recipe: Recipe, key: str, value: Any) -> Recipe:
    """The recipe with another value of a key `section.name`."""
    section, name = key.split(".")
    changed: Any = dataclasses.replace(getattr(recipe, section), **{name: value})
    sections: dict[str, Any] = {section: changed}
    return dataclasses.replace(recipe, **sections)
