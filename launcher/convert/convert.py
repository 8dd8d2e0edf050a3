"""Finds the tool of a config, converts it, and checks the recipe."""

from __future__ import annotations

import contextlib
import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.convert import engine
from launcher.convert.conversion import Conversion, finish
from launcher.convert.model_files import check_model
from launcher.convert.text import recipe_text
from launcher.convert.tool_files import tool_of
from launcher.distributed.rank_layout import PARALLEL_SIZES
from launcher.errors import RecipeError
from launcher.recipe.decode import DEFAULT, Problem, decode, dotted, keys, merged
from launcher.recipe.rules import check
from launcher.recipe.schema import Recipe
from launcher.recipe.yaml_text import NotYamlError, parse_yaml

_MOST_PROBLEMS = 20
_ABSENT = ("model.path", "distillation.teacher")
"""Keys whose folders need not be on this machine."""


@dataclass(frozen=True)
class Converted:
    """A recipe, and what became of the keys of the config that it was made from."""

    text: str
    """YAML with comments."""
    tool: str
    moved: tuple[str, ...]
    """The tool's keys that have an equal in the recipe."""
    needless: dict[str, str]
    """The tool's keys without which the training is the same, and why."""
    differs: dict[str, str]
    """The tool's keys that are kept and train a bit differently, and how."""
    lost: dict[str, str]
    """The tool's keys that change the training and have no equal, and what differs."""
    absent: tuple[str, ...]
    """What the recipe names and is not on this machine."""


def convert_files(
    files: Sequence[Path],
    *,
    ranks: int,
    overrides: Sequence[str] = (),
    model: str | None = None,
    data: str | None = None,
    method: str | None = None,
) -> Converted:
    """Converts a config of another tool; several files are read as one, the last one wins.

    ranks: data-parallel ranks, by which the batch of a step is computed. overrides: `key=value`
    of the recipe. model, data: in place of the config's. method: dpo or kto, for configs that do
    not say it. Raises RecipeError.
    """
    given: dict[str, Any] = {}
    for file in files:
        given |= _read(file)
    tool = tool_of(given)
    named = ", ".join(map(str, files))
    if tool is None:
        what = "no config of axolotl, LLaMA-Factory, torchtune, TRL, transformers or accelerate"
        first = next(iter(_own_sections(given)), None)
        if first is not None:
            what = f"a recipe of the launcher has the section {first}; give it as recipe={named}"
        raise RecipeError(f"{named}: {what}")
    given = {str(name): value for name, value in given.items() if value is not None}
    conversion = Conversion(
        tool=tool.name,
        given=dict(given),
        folder=files[0].resolve().parent,
        ranks=ranks,
        command_method=method if method in ("dpo", "kto") else None,
        comments=_comments(files),
    )
    try:
        engine.convert(conversion, tool)
    except RecipeError as error:
        raise RecipeError(f"{named}: {error}") from None
    except (TypeError, ValueError, AttributeError, KeyError) as error:
        what = f"cannot be read as a config of {tool.name}: a value has another type than {tool.name}'s"
        raise RecipeError(f"{named}: {what} ({error})") from None
    conversion.given = given
    finish(conversion, _same_names())
    given_name = conversion.names("run_name", "wandb_name").partition(",")[0]
    name = str(given[given_name]) if given_name else files[0].stem
    conversion.set("run.name", re.sub(r"[^\w.-]+", "_", name).strip("_.") or "moved", given_name)
    if not given_name:
        conversion.origins["run.name"] = "name of the file"
    if model is not None:
        conversion.set("model.path", model)
        conversion.origins["model.path"] = "command line"
    if data is not None:
        conversion.set("data.train", [data])
        conversion.origins["data.train"] = "command line"
    _override(conversion, overrides)
    _need(conversion, named)
    check_model(conversion)
    conversion.values = _with_types(conversion.values)
    absent = _repair(conversion, ranks)
    return Converted(
        text=recipe_text(conversion, _header(conversion, named)),
        tool=tool.name,
        moved=tuple(
            name
            for name in given
            if name not in conversion.needless and not _is_lost(name, conversion.lost)
        ),
        needless=conversion.needless,
        differs=conversion.differs,
        lost=conversion.lost,
        absent=tuple(absent),
    )


def _read(file: Path) -> dict[str, Any]:
    try:
        values, _ = parse_yaml(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise RecipeError(f"{file}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise RecipeError(f"{file}: not YAML: not a text in UTF-8") from None
    except NotYamlError as error:
        place = file if error.line is None else f"{file}:{error.line}"
        raise RecipeError(f"{place}: not YAML: {error}") from None
    if not isinstance(values, dict):
        raise RecipeError(f"{file}: must be keys with values, as in a config of another tool")
    return values


def _own_sections(given: dict[str, Any]) -> list[str]:
    sections = [name for name in given if name in Recipe.__dataclass_fields__]
    return [name for name in sections if isinstance(given[name], dict)]


def _same_names() -> dict[str, str]:
    """Keys of the recipe by their last names, where only one key has that name."""
    found = Counter(path[-1] for path in keys())
    always = [path for path in keys() if len(path) == 2 and getattr(DEFAULT, path[0]) is not None]
    return {path[-1]: dotted(path) for path in always if found[path[-1]] == 1}


def _override(c: Conversion, overrides: Sequence[str]) -> None:
    known = {dotted(path) for path in keys()}
    for argument in overrides:
        key, equals, text = argument.partition("=")
        if not equals or (key not in known and not key.startswith("data.train.")):
            raise RecipeError(
                f"command line: {argument}: not a key of a recipe; see docs/recipes.md"
            )
        try:
            value, _ = parse_yaml(text)
        except NotYamlError as error:
            raise RecipeError(f"command line: {argument}: not a value: {error}") from None
        for other in [other for other in c.values if other.startswith(f"{key}.")]:
            del c.values[other]
        if key in ("run.max_steps", "run.epochs"):
            c.values.pop("run.epochs" if key == "run.max_steps" else "run.max_steps", None)
        c.values[key] = value
        c.origins[key] = "command line"


def _need(c: Conversion, named: str) -> None:
    for key, option in (("model.path", "model"), ("data.train", "data")):
        built = key == "model.path" and ("model.config" in c.values or "model.builder" in c.values)
        if c.values.get(key) is None and not built:
            lost = [f"{name}: {what}" for name, what in c.lost.items() if "data" in name]
            why = f" ({lost[0]})" if lost and option == "data" else ""
            raise RecipeError(f"{named}: names no {option}{why}; add {option}=NAME to the command")


def _with_types(values: dict[str, Any]) -> dict[str, Any]:
    """Values with the types of the recipe: 1 as 1.0 and "2e-5" as 2e-05 where a number is meant."""
    found = {}
    for key, value in values.items():
        if isinstance(value, str) and re.fullmatch(r"[-+]?[\d.]+([eE][-+]?\d+)?", value):
            with contextlib.suppress(ValueError):
                value = float(value) if not value.isdigit() else int(value)
        if isinstance(value, float) and value.is_integer() and key.endswith(("steps", "rank")):
            value = int(value)
        found[key] = value
    return found


def _nested(values: dict[str, Any]) -> dict[str, Any]:
    plain: dict[str, Any] = {}
    for key, value in values.items():
        for part in reversed(key.split(".")):
            value = {part: value}
        plain = merged(plain, value)
    return plain


def _repair(c: Conversion, ranks: int) -> list[str]:
    """Takes out values that a recipe cannot have, as lost. Returns what is only not on this machine.
    Raises RecipeError if problems stay."""
    compiles = c.values.get("model.compile") and c.origins["model.compile"] != "command line"
    if compiles and (
        c.values.get("lora.quantize") or c.values.get("strategy.tensor_parallel_size")
    ):
        del c.values["model.compile"]
        name = "torch_compile" if "torch_compile" in c.given else "compile"
        c.needless[name] = "speed only; not with weights in 4 bits or tensor parallelism"
    for _ in range(_MOST_PROBLEMS):
        recipe, found, unsound = decode(_nested(c.values))
        found = [*found, *check(recipe, ranks=ranks, unsound=unsound, files=False)]
        problems = [each for each in found if dotted(each.path) not in _ABSENT or unsound]
        if not problems:
            return [f"{dotted(each.path)}: {each.message}" for each in found]
        taken_out = [_fit_batch(c, problem, ranks) or _take_out(c, problem) for problem in problems]
        if not any(taken_out):
            lines = [f"{dotted(each.path)}: {each.message}" for each in problems]
            raise RecipeError(lines)
    raise RecipeError("the config has too many values that a recipe cannot have")


def _fit_batch(c: Conversion, problem: Problem, ranks: int) -> bool:
    """Rounds a global batch that the ranks do not divide up to one that they do, which is another
    training: the other tool's ranks shared sequences in a way that is not here."""
    key = "batch.global_batch_size"
    batch, micro = c.values.get(key), c.values.get("batch.micro_batch_size")
    ours = c.origins.get(key) != "command line" and dotted(problem.path) == key
    if not ours or not isinstance(batch, int) or not isinstance(micro, int):
        return False
    keys = [each.key for each in PARALLEL_SIZES if each.same_sequences]
    sizes = [c.values.get(f"strategy.{each}") for each in keys]
    sharing = math.prod(size for size in sizes if isinstance(size, int))
    groups = ranks // sharing or 1
    fitted = math.ceil(batch / (micro * groups)) * micro * groups
    if batch <= 0 or micro <= 0 or fitted == batch:
        return False
    c.values[key] = fitted
    names = c.origins[key].partition(": ")[2] or key
    c.lost.setdefault(
        names.partition(",")[0],
        f"{key}: {batch} sequences a step there. {groups} {'groups of ' * (sharing > 1)}ranks with {micro} "
        f"each take {fitted} here; {key}={batch} and gpus={max(1, batch // micro) * sharing} would take as many",
    )
    return True


def _take_out(c: Conversion, problem: Problem) -> bool:
    path = dotted(problem.path)
    key = next(
        (key for key in c.values if path == key or path.startswith((f"{key}.", f"{key}["))), None
    )
    origin = c.origins.get(key or "", "")
    if key is None or origin == "command line" or key in ("model.path", "data.train", "run.name"):
        return False
    names = origin.partition(": ")[2] or key
    value = c.values.pop(key)
    c.lost.setdefault(names.partition(",")[0], f"{key}: {value}: {problem.message}")
    return True


def _is_lost(name: str, lost: dict[str, str]) -> bool:
    return any(re.split(r"[.:,]", key)[0] == name for key in lost)


def _comments(files: Sequence[Path]) -> str:
    lines = (line for file in files for line in file.read_text(encoding="utf-8").splitlines())
    return "\n".join(line for line in lines if line.lstrip().startswith("#"))


def _loss(c: Conversion) -> str:
    if "preference.loss" in c.values or "kto.beta" in c.values:
        return "Each row counts the same in the loss of a step."
    return "The loss of a step is the mean over all its tokens with loss."


def _header(c: Conversion, named: str) -> list[str]:
    lines = [
        f"Made by: launcher new from={named.replace(', ', ',')}",
        f"from a config of {c.tool}. Beside each key stands what it was there; above it, what is "
        f"different here. {_loss(c)}",
    ]
    if c.lost:
        lines.append("This recipe does not train the same:")
        lines += [f"- {name}: {what}" for name, what in c.lost.items()]
    return lines
