"""Plain YAML values to a Recipe, by pydantic, and pydantic's errors as messages.

A wrong value is replaced by its default, so that the rules that join several keys can be checked.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter, ValidationError

from launcher.errors import closest, suggestion
from launcher.recipe import schema
from launcher.recipe.schema import Batch, Data, Model, Recipe, Run, Source
from launcher.recipe.section import Section

KeyPath = tuple[str | int, ...]

DEFAULT = Recipe(
    run=Run(name="unnamed"), model=Model(), data=Data(), batch=Batch(global_batch_size=1)
)
"""Every key at its default. The two that must be given have any value."""

_KINDS = {
    "bool_type": "true or false",
    "int_type": "a whole number",
    "float_type": "a number",
    "string_type": "text",
    "tuple_type": "a list",
    "dict_type": "a section",
    "finite_number": "finite",
}
_BOUNDS = {
    "greater_than_equal": ("ge", "at least"),
    "greater_than": ("gt", "more than"),
    "less_than_equal": ("le", "at most"),
    "less_than": ("lt", "less than"),
    "too_long": ("max_length", "a list of"),
}


@dataclass(frozen=True)
class Problem:
    """What is wrong with one key."""

    path: KeyPath
    message: str


def dotted(path: KeyPath) -> str:
    """`("data", "train", 0)` as `data.train[0]`."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return text.removeprefix(".")


def keys(section: type = Recipe, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Every key of a recipe, and of the sections that a key may hold."""
    for field in _fields(section):
        yield (*path, field)
        inner = subsection(section, field)
        if inner is not None and inner is not Source:  # which is below a name of the user's
            yield from keys(inner, (*path, field))


def subsection(section: type, name: str) -> type | None:
    """The dataclass that key `name` of a section may hold, or None."""
    kinds = [_type_hints(section)[name]]
    for kind in kinds:
        if dataclasses.is_dataclass(kind):
            return typing.cast(type, kind)
        kinds += typing.get_args(kind)
    return None


_type_hints = functools.cache(typing.get_type_hints)
_fields = functools.cache(lambda section: [field.name for field in dataclasses.fields(section)])
_adapter = functools.cache(lambda: TypeAdapter(Recipe))


def json_schema() -> dict[str, Any]:
    """JSON Schema of a recipe, for editors, with the docstrings as descriptions."""
    # Reading the docstrings takes 0.15 s, which no other command should pay
    Section.__pydantic_config__["use_attribute_docstrings"] = True
    schema = TypeAdapter(Recipe).json_schema()
    return {"$schema": "https://json-schema.org/draft/2020-12/schema"} | schema


def decode(plain: dict[str, Any]) -> tuple[Recipe, list[Problem], set[KeyPath]]:
    """Returns the recipe, all problems, and the keys without a sound value.

    Unsound keys hold a default. They include a missing key whose misspelling was found instead.
    """
    plain = {"run": {}, "model": {}, "data": {}, "batch": {}} | plain
    try:
        return _adapter().validate_python(plain), [], set()
    except ValidationError as error:
        problems, misspelt = _problems(plain, error)
    defaults = dataclasses.asdict(DEFAULT)
    unsound = {unit(path) for path in misspelt | {problem.path for problem in problems}}
    sound = {
        section: {name: value for name, value in values.items() if (section, name) not in unsound}
        for section, values in plain.items()
        if section in defaults and (section,) not in unsound and isinstance(values, dict)
    }
    return _adapter().validate_python(merged(defaults, sound)), problems, unsound


def unit(path: KeyPath) -> KeyPath:
    """The part of a recipe that is unsound with this key: the key of a section, with all that is
    inside, or a whole section that has no default."""
    return path[: 1 if getattr(DEFAULT, str(path[0]), None) is None else 2]


def merged(values: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """The values with the changes, section by section."""
    both = {
        key: merged(values[key], change)
        for key, change in changes.items()
        if isinstance(change, dict) and isinstance(values.get(key), dict)
    }
    return values | changes | both


def _problems(plain: dict[str, Any], error: ValidationError) -> tuple[list[Problem], set[KeyPath]]:
    """A problem for each wrong key, and the missing keys whose misspelling was found."""
    found: dict[KeyPath, list[Any]] = {}
    for one in error.errors(include_url=False):
        found.setdefault(_path(plain, one), []).append(one)
    problems: list[Problem] = []
    misspelt: set[KeyPath] = set()
    for path, errors in found.items():
        if errors[0]["type"] in ("unexpected_keyword_argument", "invalid_key"):
            problems.append(Problem(path, _unknown(plain, path, misspelt)))
    reported = misspelt | {problem.path for problem in problems}
    for path, errors in found.items():
        more_precise = any(other != path and other[: len(path)] == path for other in found)
        if not (more_precise or path in reported or path[:-1] in misspelt):
            problems.append(Problem(path, _message(errors)))
    return problems, misspelt


def _path(plain: dict[str, Any], error: Any) -> KeyPath:
    """pydantic's location of an error, without the names of the kinds that it tried."""
    path: list[str | int] = []
    value: Any = plain
    for part in error["loc"]:
        inside = range(len(value)) if isinstance(value, list) else value
        if isinstance(value, (dict, list)) and part in inside:
            value = value[part]
            path.append(part)
    return (*path, error["loc"][-1]) if error["type"] == "missing" else tuple(path)


def _unknown(plain: dict[str, Any], path: KeyPath, misspelt: set[KeyPath]) -> str:
    """The message for an unknown key. Adds the key that was probably meant to `misspelt`."""
    *parents, key = path
    section: type = Recipe
    values: Any = plain
    for part in parents:
        values = values[part]
        if part in _fields(section):  # else a name in a mixture
            section = subsection(section, str(part)) or section
    known = _fields(section)
    near = closest(str(key), known)
    if near is not None and not values.get(near):
        misspelt.add((*parents, near))
    near = near or next((dotted(other) for other in keys() if other[-1] == key), None)
    hint = f"did you mean {near}?" if near else f"known here: {', '.join(known)}"
    return f"unknown key; {hint}"


def _message(errors: list[Any]) -> str:
    """What to say about a key. Several errors: of the kinds of value that it may hold."""
    kinds, choices, value = [], [], errors[0]["input"]
    for error in errors:
        kind, context = error["type"], error.get("ctx", {})
        if kind == "missing":
            return "missing; must be given"
        if kind == "too_short":
            return "must not be empty"
        if kind == "value_error":  # of `section.form`
            return f"{context['error']}; got {_quoted(value)}"
        if kind in _BOUNDS:
            name, words = _BOUNDS[kind]
            limit = str(context[name]).removesuffix(".0")
            return f"must be {words} {limit}; got {_quoted(value)}"
        if kind == "literal_error":
            choices += re.findall("'(.*?)'", context["expected"])
            kinds.append(context["expected"].replace("'", ""))
        elif kind == "dataclass_type":
            known = _fields(getattr(schema, context["class_name"]))
            kinds.append(f"a section with the keys {', '.join(known)}")
        else:
            kinds.append(_KINDS.get(kind, error["msg"]))
    hint = suggestion(value, choices) if isinstance(value, str) else ""
    if kinds == ["text"] and isinstance(value, (int, float)):
        hint = "; put it in quotes"
    return f"must be {' or '.join(kinds)}; got {_quoted(value)}{hint}"


def _quoted(value: Any) -> str:
    text = repr(value) if isinstance(value, str) else json.dumps(value, default=str)
    return text if len(text) <= 60 else text[:57] + "..."
