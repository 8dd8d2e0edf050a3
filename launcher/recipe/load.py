"""From `recipe=NAME key=value ...` to a checked Recipe.

`parse.py` reads the YAML, OmegaConf interpolates, `decode.py` makes a Recipe of the plain values,
and `validate.py` has the rules that join several keys.
"""

from __future__ import annotations

import dataclasses
import re
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from launcher.errors import RecipeError, first_line
from launcher.recipe.decode import KeyPath, Problem, decode, dotted, subsection
from launcher.recipe.find import find_recipe, read_recipe, recipe_names, shown_path
from launcher.recipe.parse import COMMAND_LINE, FLOAT, Origins, parse, parse_override
from launcher.recipe.schema import DEFAULT_RUN_DIR, Recipe
from launcher.recipe.validate import check


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

    arguments: `recipe=NAME` or `recipe=FILE`, and overrides `key=value`, in any order.
    ranks: data-parallel ranks of the run; None: the rules that need them are not checked.
    files: whether the data must exist; a plan does not need it.
    Raises RecipeError with all problems, each with the file and line or the argument that it
    comes from: those of the file first, then those of the arguments.
    """
    path = _named_recipe(arguments)
    origins = Origins(file=shown_path(path))
    problems: list[Problem] = []
    found: list[tuple[bool, int, str]] = []  # on the command line, line or argument, message
    plain = parse(read_recipe(path, origins.file), origins, problems)
    for index, argument in enumerate(arguments):
        if not argument.startswith("recipe="):
            try:
                _override(plain, argument, origins, problems)
            except RecipeError as error:
                found.append((True, index, str(error)))
    if isinstance(plain.get("run"), dict):
        plain["run"].setdefault("dir", DEFAULT_RUN_DIR)
    plain = _interpolate(plain, _tree(plain), (), origins, problems)
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
    what = f"{len(named)} recipes given" if any(named) else "no recipe given"
    form = f"give recipe=NAME ({', '.join(recipe_names())}) or recipe=path/to/file.yaml"
    for argument in arguments:
        if not any(named) and (argument in recipe_names() or argument.endswith(".yaml")):
            form = f"write recipe={argument}"
    raise RecipeError(f"{COMMAND_LINE}: {what}; {form}")


def _override(
    plain: dict[str, Any], argument: str, origins: Origins, problems: list[Problem]
) -> None:
    """Sets what an override sets, and records it as the origin. Raises RecipeError."""
    path, changes = parse_override(argument, problems)
    for key in reversed(path):
        changes = {key: changes}
    _merge(plain, changes, (), argument, origins)


def _merge(
    values: dict[str, Any], changes: dict[str, Any], path: KeyPath, argument: str, origins: Origins
) -> None:
    for key, value in changes.items():
        here, before = (*path, key), values.get(key)
        if isinstance(before, dict) and isinstance(value, dict):
            _merge(before, value, here, argument, origins)
            continue
        name = dotted(here)
        into_list = isinstance(before, list) and isinstance(value, dict)
        if into_list and argument.partition("=")[0] != name:
            what = f"{name} is a list; give it whole, as {name}=[...]"
            raise RecipeError(f"{COMMAND_LINE}: {argument}: {what}")
        values[key] = value
        for leaf in _leaves(value, here):
            origins.override(leaf, argument)


def _leaves(value: Any, path: KeyPath) -> list[KeyPath]:
    inside = value.items() if isinstance(value, dict) else ()
    return [path, *(leaf for key, inner in inside for leaf in _leaves(inner, (*path, key)))]


def _tree(plain: dict[str, Any]) -> Any:
    """The values in OmegaConf, with all defaults, so that interpolations find them."""
    if not OmegaConf.has_resolver("stdlib"):
        renamed = getattr(OmegaConf, "register_resolver", None)  # since omegaconf 2.4
        (renamed or OmegaConf.register_new_resolver)("stdlib", _standard_library)
    return OmegaConf.create(_with_defaults(plain, Recipe))


def _standard_library(folder: str = "") -> str:
    """`${stdlib:}`: the folder of the running Python's standard library."""
    return str(Path(sysconfig.get_path("stdlib")) / folder)


def _with_defaults(values: dict[str, Any], section: Any) -> dict[str, Any]:
    completed = dict(values)
    for key in dataclasses.fields(section):
        inner = subsection(section, key.name)
        if key.name not in values and key.default is not dataclasses.MISSING:
            completed[key.name] = _plain(key.default)
        elif inner is not None and isinstance(values.get(key.name), dict):
            completed[key.name] = _with_defaults(values[key.name], inner)
    return completed


def _interpolate(
    values: Any, tree: Any, path: KeyPath, origins: Origins, problems: list[Problem]
) -> Any:
    """The values of a section or list, interpolated; where that fails: a problem and None.

    tree: the same in OmegaConf.
    """
    is_section, resolved = isinstance(values, dict), {}
    for key, value in values.items() if is_section else enumerate(values):
        here = (*path, str(key))
        try:
            if isinstance(value, (dict, list)):
                value = _interpolate(value, tree[key], here, origins, problems)
            elif isinstance(value, str) and "${" in value:
                value = tree[key]
                if OmegaConf.is_config(value):
                    value = OmegaConf.to_container(value, resolve=True)
        except (OmegaConfBaseException, ValueError, RecursionError) as error:
            if here == ("run", "dir") and origins.of(here) == "default":
                continue  # the name that it interpolates is reported itself
            value = None
            what = f"cannot be interpolated: {_explain(error)}"
            problems.append(Problem(here, what))
        resolved[key] = value
    return resolved if is_section else list(resolved.values())


def _explain(error: Exception) -> str:
    what = first_line(error)
    if isinstance(error, RecursionError) or "ecursi" in what or "parent node" in what:
        return "it leads back to itself"
    if "is not a container" in what:
        return "it looks for a key in what is no section"
    if missing := re.fullmatch(r"Interpolation key '(.*)' not found", what):
        return f"there is no key {missing[1]}"
    if unsupported := re.fullmatch(r"Unsupported interpolation type (.*)", what):
        forms = "${section.key}, ${oc.env:NAME} or ${stdlib:}"
        return f"there is no resolver {unsupported[1]}; use {forms}"
    return re.sub(r"^\w+ raised while resolving interpolation: ", "", what).strip('"')


class _Dumper(yaml.SafeDumper):
    """Writes text so that it is read as text: 1e-4 in quotes, ${ escaped."""


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    return dumper.represent_str(re.sub(r"(\\*)\$\{", r"\1\1\\${", text))


_Dumper.add_representer(str, _represent_text)
_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", FLOAT, list("-+.0123456789"))


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
