"""From `recipe=NAME key=value ...` to a checked Recipe.

OmegaConf loads, overrides and interpolates; `decode.py` makes a Recipe of the plain values;
`validate.py` has the rules that join several keys. Only this file and `parse.py` import omegaconf.
"""

from __future__ import annotations

import dataclasses
import re
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import GrammarParseError, OmegaConfBaseException

from launcher.errors import RecipeError
from launcher.recipe.decode import KeyPath, Problem, decode, dotted, subsection
from launcher.recipe.find import find_recipe, read_recipe, recipe_folders, shown_path
from launcher.recipe.parse import (
    BROKEN_INTERPOLATION,
    COMMAND_LINE,
    MISPLACED,
    Origins,
    explain,
    first_line,
    parse,
)
from launcher.recipe.schema import Recipe
from launcher.recipe.validate import check

_CYCLE = "it leads back to itself"


@dataclass(frozen=True)
class LoadedRecipe:
    """A checked recipe, and where each of its values came from."""

    recipe: Recipe
    origins: Origins

    def refuse(self, path: KeyPath, message: str) -> RecipeError:
        """The error for what is found after the check, such as a GPU without bfloat16."""
        return RecipeError(self.origins.cite(Problem(path, message)))


def load_recipe(arguments: Sequence[str], *, ranks: int | None, files: bool = True) -> LoadedRecipe:
    """Loads, overrides, interpolates, decodes and checks a recipe.

    arguments: `recipe=NAME` or `recipe=FILE`, and overrides in OmegaConf's dot-list form, in any
        order.
    ranks: data-parallel ranks of the run; None: the rules that need them are not checked.
    files: whether the data must exist; a plan does not need it.
    Raises RecipeError with all problems, each with the file and line or the argument that it
    comes from: those of the file first, then those of the arguments.
    """
    if not OmegaConf.has_resolver("stdlib"):
        renamed = getattr(OmegaConf, "register_resolver", None)  # since omegaconf 2.4
        (renamed or OmegaConf.register_new_resolver)("stdlib", _standard_library)
    path = _named_recipe(arguments)
    origins = Origins(file=shown_path(path))
    problems: list[Problem] = []
    found: list[tuple[bool, int, str]] = []  # on the command line, line or argument, message
    config = parse(read_recipe(path, origins.file), origins, problems)
    for index, argument in enumerate(arguments):
        if not argument.startswith("recipe="):
            try:
                config = _override(config, argument, origins)
            except RecipeError as error:
                found.append((True, index, str(error)))
    defaults = set(_write_defaults(config, Recipe, ()))
    plain = _resolve(config, (), (config,), defaults, problems)
    recipe, wrong, unsound = decode(plain)
    reported = {problem.path for problem in problems}
    problems += [problem for problem in wrong if problem.path not in reported]
    problems += check(recipe, ranks=ranks, unsound=unsound | reported, files=files)
    for problem in problems:
        where = origins.locate(problem.path)
        order = where if isinstance(where, int) else arguments.index(where)
        found.append((isinstance(where, str), order, origins.cite(problem)))
    if found:
        raise RecipeError([text for _, _, text in sorted(found, key=lambda one: one[:2])])
    return LoadedRecipe(recipe, origins)


def _named_recipe(arguments: Sequence[str]) -> Path:
    named = [argument.partition("=")[2] for argument in arguments if argument.startswith("recipe=")]
    if len(named) == 1 and named[0]:
        return find_recipe(named[0])
    known = sorted({path.stem for folder in recipe_folders() for path in folder.glob("*.yaml")})
    what = "no recipe given" if not named or not named[0] else f"{len(named)} recipes given"
    form = f"say recipe=NAME ({', '.join(known)}) or recipe=path/to/file.yaml"
    raise RecipeError(f"{COMMAND_LINE}: {what}; {form}")


def _override(config: DictConfig, argument: str, origins: Origins) -> DictConfig:
    """The tree with one override. Raises RecipeError where the argument is none."""
    key, equals, _ = argument.partition("=")
    if not equals or any(not part or part != part.strip() for part in key.split(".")):
        form = "an override is key=value, such as batch.micro_batch_size=4"
        raise RecipeError(f"{COMMAND_LINE}: {argument or repr('')}: {form}")
    try:
        override = OmegaConf.from_dotlist([argument])
        _clear(config, OmegaConf.to_container(override, resolve=False), (), argument, origins)
        merged = OmegaConf.merge(config, override)
    except RecipeError:
        raise
    except GrammarParseError:
        raise RecipeError(f"{COMMAND_LINE}: {argument}: {BROKEN_INTERPOLATION}") from None
    except yaml.YAMLError as error:
        raise RecipeError(f"{COMMAND_LINE}: {argument}: not a value: {explain(error)}") from None
    except (OmegaConfBaseException, ValueError, LookupError, TypeError, RecursionError):
        raise RecipeError(f"{COMMAND_LINE}: {argument}: not a value: {MISPLACED}") from None
    assert isinstance(merged, DictConfig)
    return merged


def _clear(config: DictConfig, values: Any, path: KeyPath, argument: str, origins: Origins) -> None:
    """Removes the values that an override replaces, and notes their new origin.

    OmegaConf would fail to merge a section into a list. Raises RecipeError where the override
    sets one item of a list.
    """
    for key, value in values.items():
        here = (*path, str(key))
        before = _peek(config, key)
        if isinstance(before, DictConfig) and isinstance(value, dict):
            _clear(before, value, here, argument, origins)
            continue
        name = dotted(here)
        into_list = isinstance(before, ListConfig) and isinstance(value, dict)
        if into_list and argument.partition("=")[0] != name:
            what = f"{name} is a list; give it whole, as {name}=[...]"
            raise RecipeError(f"{COMMAND_LINE}: {argument}: {what}")
        if before is not None:
            config[key] = None
        for leaf in _leaves(value, here):
            origins.override(leaf, argument)


def _leaves(value: Any, path: KeyPath) -> list[KeyPath]:
    if not isinstance(value, dict):
        return [path]
    inside = (_leaves(inner, (*path, str(key))) for key, inner in value.items())
    return [path, *(leaf for leaves in inside for leaf in leaves)]


def _peek(config: DictConfig, key: Any) -> Any:
    """A value, interpolated where that is possible; None where there is none."""
    try:
        missing = key not in set(config) or OmegaConf.is_missing(config, key)
        return None if missing else config[key]
    except (OmegaConfBaseException, ValueError):
        return None


def _write_defaults(config: DictConfig, section: Any, path: KeyPath) -> Iterator[KeyPath]:
    """Adds the keys that a recipe leaves out, so that interpolations find them; yields them."""
    for key in dataclasses.fields(section):
        name, default = key.name, key.default
        absent = name not in set(config)  # `in config` would interpolate
        if absent and default is not dataclasses.MISSING:
            config[name] = _plain(default)
            yield (*path, name)
            continue
        inner, value = subsection(section, name), _peek(config, name)
        given = isinstance(value, DictConfig) and not OmegaConf.is_interpolation(config, name)
        if inner is not None and given:
            yield from _write_defaults(value, inner, (*path, name))


def _resolve(
    config: Any,
    path: KeyPath,
    above: tuple[Any, ...],
    defaults: set[KeyPath],
    problems: list[Problem],
) -> Any:
    """OmegaConf's tree as plain values, interpolated; where that fails: a problem and None.

    above: the sections around this one.
    defaults: keys to leave out again, unless they are interpolated themselves (`run.dir`).
    """
    keys = range(len(config)) if isinstance(config, ListConfig) else list(config.keys())
    resolved: dict[str, Any] = {}
    for key in keys:
        here = (*path, str(key))
        if here in defaults and not OmegaConf.is_interpolation(config, key):
            continue
        try:
            if OmegaConf.is_missing(config, key):
                resolved[str(key)] = None
                problems.append(Problem(here, "??? stands where a value must be given"))
                continue
            value = config[key]
            if any(value is node for node in above):
                raise ValueError(_CYCLE)
        except (OmegaConfBaseException, ValueError) as error:
            if here not in defaults:
                resolved[str(key)] = None
                what = f"cannot be interpolated: {_explain_interpolation(error)}"
                problems.append(Problem(here, what))
            continue
        if isinstance(value, (DictConfig, ListConfig)):
            value = _resolve(value, here, (*above, value), defaults, problems)
        resolved[str(key)] = value
    return list(resolved.values()) if isinstance(config, ListConfig) else resolved


def _explain_interpolation(error: Exception) -> str:
    what = first_line(error)
    if "Recursive" in what or "parent node" in what:
        return _CYCLE
    if "is not a container" in what:
        return "it looks for a key in what is no section"
    if missing := re.fullmatch(r"Interpolation key '(.*)' not found", what):
        return f"there is no key {missing[1]}"
    if unsupported := re.fullmatch(r"Unsupported interpolation type (.*)", what):
        forms = "${section.key}, ${oc.env:NAME} or ${stdlib:}"
        return f"there is no resolver {unsupported[1]}; use {forms}"
    return re.sub(r"^\w+ raised while resolving interpolation: ", "", what).strip('"')


def _standard_library(folder: str = "") -> str:
    """`${stdlib:}`: the folder of the running Python's standard library."""
    return str(Path(sysconfig.get_path("stdlib")) / folder)


class _Dumper(yaml.SafeDumper):
    """Writes text so that OmegaConf reads it as text: 1e-4 in quotes, ${ escaped."""


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    return dumper.represent_str(re.sub(r"(\\*)\$\{", r"\1\1\\${", text))


_FLOAT = re.compile(r"[-+]?[\d_.]+[eE][-+]?\d+")
_Dumper.add_representer(str, _represent_text)
_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+.0123456789"))


def to_yaml(recipe: Recipe) -> str:
    """The resolved recipe with every key; it repeats the run."""
    return yaml.dump(
        _plain(recipe),
        Dumper=_Dumper,
        sort_keys=False,
        allow_unicode=True,
        default_flow_style=None,
        width=100,
    )


def scalar_as_yaml(value: Any) -> str:
    """A value that is no section, on one line of YAML."""
    text: str = yaml.dump(
        value, Dumper=_Dumper, default_flow_style=True, allow_unicode=True, width=10**6
    )
    return text.removesuffix("\n").removesuffix("\n...")


def _plain(value: Any) -> Any:
    section = dataclasses.is_dataclass(value) and not isinstance(value, type)
    return dataclasses.asdict(value) if section else value
