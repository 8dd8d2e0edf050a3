"""Plain YAML values to a Recipe, by pydantic, and pydantic's errors as messages.

A wrong value is replaced by a default, so that the rules that join several keys can be checked.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import math
import typing
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter, ValidationError

from launcher.errors import closest, suggestion
from launcher.recipe.schema import Recipe
from launcher.recipe.section import Section

KeyPath = tuple[str, ...]
_Schema = dict[str, Any]

_REQUIRED: dict[str, dict[str, Any]] = {
    "run": {"name": "unnamed"},
    "model": {},
    "data": {},
    "batch": {"global_batch_size": 1},
}
"""The sections that must be there, and any value for the keys that must be there."""
_BOUNDS = {
    "greater_than_equal": ("ge", "must be at least"),
    "greater_than": ("gt", "must be more than"),
    "less_than_equal": ("le", "must be at most"),
    "less_than": ("lt", "must be less than"),
}
_NAMES = {
    "boolean": "true or false",
    "integer": "a whole number",
    "number": "a number",
    "string": "text",
}


@dataclass(frozen=True)
class Problem:
    """What is wrong with one key."""

    path: KeyPath
    message: str


def dotted(path: KeyPath) -> str:
    """`("data", "train", "0")` as `data.train[0]`."""
    text = ""
    for part in path:
        text += f"[{part}]" if part.isdigit() and text else f".{part}" if text else part
    return text


def quoted(value: Any) -> str:
    """A value as the user would write it in YAML, shortened."""
    if isinstance(value, dict):
        text = "{" + ", ".join(f"{key}: {quoted(inner)}" for key, inner in value.items()) + "}"
    elif isinstance(value, list):
        text = "[" + ", ".join(map(quoted, value)) + "]"
    elif value is None or isinstance(value, bool):
        text = "null" if value is None else str(value).lower()
    else:
        text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def subsection(section: Any, name: str) -> Any | None:
    """The dataclass of the section that key `name` of a section may hold, or None."""
    hint = _type_hints(section)[name]
    kinds = (hint, *typing.get_args(hint))
    return next((kind for kind in kinds if dataclasses.is_dataclass(kind)), None)


_type_hints = functools.cache(typing.get_type_hints)


def json_schema() -> dict[str, Any]:
    """JSON Schema of a recipe, for editors, with the docstrings as descriptions."""
    # Reading the docstrings takes 0.15 s, which no other command should pay
    Section.__pydantic_config__["use_attribute_docstrings"] = True
    schema = TypeAdapter(Recipe).json_schema()
    return {"$schema": "https://json-schema.org/draft/2020-12/schema"} | schema


@functools.cache
def _adapter() -> TypeAdapter[Recipe]:
    return TypeAdapter(Recipe)


@functools.cache
def _root() -> _Schema:
    return _adapter().json_schema()


def all_keys() -> list[str]:
    """Every key of a recipe, dotted."""
    return [dotted(path) for path in _keys(_root())]


def decode(plain: dict[str, Any]) -> tuple[Recipe, list[Problem], set[KeyPath]]:
    """Returns the recipe, all problems, and the keys without a sound value.

    Unsound keys hold a default. They include a missing key whose misspelling was found instead.
    """
    plain = {name: {} for name in _REQUIRED} | plain
    try:
        return _adapter().validate_python(plain), [], set()
    except ValidationError as error:
        errors = _Errors(plain, error)
    problems = errors.problems()
    return _repaired(plain, errors), problems, errors.misspelt | {one.path for one in problems}


class _Errors:
    """The errors of one validation, by the key that they are about."""

    def __init__(self, plain: dict[str, Any], error: ValidationError) -> None:
        self._plain = plain
        self.at: dict[KeyPath, list[Any]] = {}
        for one in error.errors(include_url=False):
            self.at.setdefault(self._path(one), []).append(one)
        self.misspelt: set[KeyPath] = set()
        """Missing keys whose misspelling was found."""

    def _path(self, error: Any) -> KeyPath:
        """pydantic's location of an error, without the names of the kinds that it tried."""
        path: list[str] = []
        value: Any = self._plain
        for part in error["loc"]:
            inside = range(len(value)) if isinstance(value, list) else value
            if isinstance(value, (dict, list)) and part in inside:
                value = value[part]
                path.append(str(part))
        return (*path, error["loc"][-1]) if _is_missing(error) else tuple(path)

    def problems(self) -> list[Problem]:
        """A message for each key that is wrong, unknown keys first."""
        unknown = [
            Problem(path, self._unknown(path))
            for path, errors in self.at.items()
            if errors[0]["type"] == "unexpected_keyword_argument"
        ]
        seen = {problem.path for problem in unknown} | self.misspelt
        messages = [
            Problem(path, self._message(path, errors))
            for path, errors in self.at.items()
            if path not in seen and path[:-1] not in self.misspelt
        ]
        return unknown + [problem for problem in messages if problem.message]

    def _unknown(self, path: KeyPath) -> str:
        *parent, key = path
        section: Any = self._plain
        for part in parent:
            section = section[part]
        known = [name for option in _options(parent) for name in option.get("properties", {})]
        meant = closest(key, known)
        if meant is not None and section.get(meant, {}) == {}:
            self.misspelt.add((*parent, meant))
        if "." in key:
            what = "a dot joins keys on the command line only, in a file they are nested"
            return f"unknown key; {what}"
        meant = meant or next((dotted(other) for other in _keys(_root()) if other[-1] == key), None)
        hint = f"did you mean {meant}?" if meant else f"known here: {', '.join(known)}"
        return f"unknown key; {hint}"

    def _message(self, path: KeyPath, errors: list[Any]) -> str:
        """Empty if an error of a key inside this one is more precise."""
        for error in errors:
            kind, value = error["type"], error["input"]
            if kind == "finite_number":
                return f"must be finite; got {value}"
            if kind == "string_pattern_mismatch" or (kind == "too_short" and not value):
                return "must not be empty"
            if kind in _BOUNDS:
                name, words = _BOUNDS[kind]
                return f"{words} {_number(error['ctx'][name])}; got {_number(value)}"
        if any(other[: len(path)] == path for other in self.at if other != path):
            return ""
        options = _options(path)
        kinds = [option for option in options if option.get("type") != "null"]
        if any("items" in option for option in kinds):  # one text stands for a list of one
            kinds = [option for option in kinds if option["type"] != "string"]
        words = " or ".join(map(_words, kinds))
        if _is_missing(errors[0]):
            return f"missing; must be given: {words}"
        value = errors[0]["input"]
        if value is None:
            return f"must not be null; must be {words}"
        null = ", or null" if {"type": "null"} in options else ""
        return f"must be {words}{null}; got {quoted(value)}{_hint(value, kinds)}"


def _is_missing(error: Any) -> bool:
    return error["type"] == "missing" and isinstance(error["loc"][-1], str)


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:g}"


def _hint(value: Any, kinds: list[_Schema]) -> str:
    types = {kind["type"] for kind in kinds if not _choices(kind)}
    if "string" in types and isinstance(value, (int, float, bool)):
        return "; put it in quotes"
    if not isinstance(value, str):
        return ""
    if types & {"integer", "number"}:
        with contextlib.suppress(ValueError):
            return "; take the quotes away" if math.isfinite(float(value)) else ""
    return suggestion(value, [choice for kind in kinds for choice in _choices(kind)])


def _choices(schema: _Schema) -> list[str]:
    return [schema["const"]] if "const" in schema else list(schema.get("enum", ()))


def _words(schema: _Schema) -> str:
    """What a value must be, for a message."""
    if choices := _choices(schema):
        return choices[0] if len(choices) == 1 else "one of " + ", ".join(choices)
    if "properties" in schema:
        return "a section with the keys " + ", ".join(schema["properties"])
    if "prefixItems" in schema:
        return f"a list of {len(schema['prefixItems'])} numbers"
    if schema["type"] == "array":
        return "a list"
    if schema["type"] == "object":
        return f"a section of {'keys' if schema['additionalProperties'] is True else 'names'}"
    return _NAMES[schema["type"]]


def _options(path: Iterable[str]) -> list[_Schema]:
    """The JSON Schemas of the kinds of value that a key may hold."""
    options = [_root()]
    for part in path:
        inner = [option for outer in options for option in _inside(outer, part)]
        options = [option for one in inner for option in _alternatives(one)]
    return options


def _inside(schema: _Schema, part: str) -> Iterator[_Schema]:
    if part in schema.get("properties", {}):
        yield schema["properties"][part]
    elif part.isdigit() and "prefixItems" in schema:
        yield schema["prefixItems"][int(part)]
    elif part.isdigit() and "items" in schema:
        yield schema["items"]
    elif isinstance(schema.get("additionalProperties"), dict) and not part.isdigit():
        yield schema["additionalProperties"]


def _alternatives(schema: _Schema) -> Iterator[_Schema]:
    if "$ref" in schema:
        schema = _root()["$defs"][schema["$ref"].rpartition("/")[2]]
    for option in schema.get("anyOf", ()):
        yield from _alternatives(option)
    if "anyOf" not in schema:
        yield schema


def _keys(section: _Schema, path: KeyPath = ()) -> Iterator[KeyPath]:
    for name, schema in section.get("properties", {}).items():
        yield (*path, name)
        for option in _alternatives(schema):
            yield from _keys(option, (*path, name))


def _repaired(plain: dict[str, Any], errors: _Errors) -> Recipe:
    """The recipe without its wrong values."""
    plain = copy.deepcopy(plain)
    while True:
        for path, found in errors.at.items():
            if not _is_missing(found[0]):
                _remove(plain, path[:2])
            elif path[0] not in _REQUIRED or len(path) > 2:
                _remove(plain, path[:-1])
        for name, given in _REQUIRED.items():
            plain[name] = given | plain.get(name, {})
        try:
            return _adapter().validate_python(plain)
        except ValidationError as error:  # a key that was removed must be there
            errors = _Errors(plain, error)


def _remove(plain: dict[str, Any], path: KeyPath) -> None:
    *parents, last = path
    for parent in parents:
        plain = plain.get(parent, {})
    plain.pop(last, None)
