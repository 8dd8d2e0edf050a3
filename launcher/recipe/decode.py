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
from typing import Any, NamedTuple

from pydantic import TypeAdapter, ValidationError

from launcher.errors import closest, suggestion
from launcher.recipe import schema
from launcher.recipe.other_names import FILES_OF_A_SOURCE, answer_to
from launcher.recipe.schema import (
    Batch,
    Data,
    MixtureStage,
    Model,
    ParameterGroup,
    Recipe,
    Run,
    Source,
)
from launcher.recipe.section import Section

KeyPath = tuple[str | int, ...]

DEFAULT = Recipe(
    run=Run(name="unnamed"), model=Model(), data=Data(), batch=Batch(global_batch_size=1)
)
"""Every key at its default. The two keys that must be given have arbitrary values."""

_KINDS = {
    "bool_type": "true or false",
    "int_type": "a whole number",
    "float_type": "a number",
    "string_type": "text",
    "tuple_type": "a list",
    "dict_type": "a section",
}
_WORDS = {
    "Value error, ": "",
    "Input should be": "must be",
    "greater than or equal to": "at least",
    "less than or equal to": "at most",
    "1" + 30 * "0": "1e30",
}
"""Replacements in pydantic's messages."""

_RULES = {
    "missing": "missing",
    "too_short": "empty",
    "too_long": "length",
    "literal_error": "choice",
    "value_error": "form",
    **dict.fromkeys((*_KINDS, "dataclass_type"), "type"),
}
"""By pydantic's name of an error, the name of the rule; bounds are `range`."""

_NOT_ZERO = ("must be greater than 0; got 0", "must be at least 1; got 0")
"""The answers to a 0 that should turn something off."""

_MAIN_KEYS = {"Model": "model.path", "Data": "data.train"}
"""What is probably meant by a section's name with a text, as in `model=owner/name`."""


class Reference(str):
    """The text of an argument of a builder that reads the environment, such as `${oc.env:KEY}`.

    A recipe holds this text in place of the value, which may be a secret: so do the files of the
    run, wandb and the report. `load.resolve_arguments` reads the value where it is used.
    """


ARGUMENTS: tuple[KeyPath, ...] = (
    ("model", "arguments"),
    ("data", "arguments"),
    ("objective", "arguments"),
)
"""The keys whose values may be secrets."""


class Problem(NamedTuple):
    """What is wrong with one key."""

    path: KeyPath
    rule: str
    """The name of the broken rule, such as `needs-data.kind`. It stays when the message changes."""
    message: str


def dotted(path: KeyPath) -> str:
    """`("data", "train", 0)` as `data.train[0]`."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return text.removeprefix(".")


def keys(section: type[Section] = Recipe, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Every key of a recipe, and of the sections that a key may hold."""
    for name in section.__dataclass_fields__:
        yield (*path, name)
        inner = subsection(section, name)
        # The keys of a Source lie below a name that the user chooses, those of a group or stage below a number
        if inner not in (None, Source, ParameterGroup, MixtureStage):
            assert inner is not None
            yield from keys(inner, (*path, name))


def subsection(section: type[Section], name: str) -> type[Section] | None:
    """The class of the section that key `name` of a section may hold, or None."""
    kinds = [section.__dataclass_fields__[name].type]
    for kind in kinds:
        if isinstance(kind, type) and issubclass(kind, Section):
            return kind
        kinds += typing.get_args(kind)
    return None


def value_of(section: Any, key: str) -> Any:
    """The value of a key, or None if it is in a section that is off."""
    return functools.reduce(lambda inner, name: getattr(inner, name, None), key.split("."), section)


def plain_value(plain: Any, key: str) -> Any:
    """The value of a key in a recipe that is not decoded yet; None without the key or its section."""
    for name in key.split("."):
        plain = plain.get(name) if isinstance(plain, dict) else None
    return plain


@functools.cache
def default_of(key: str) -> Any:
    """The default of a key, also of one in a section whose default is null."""
    section: Any = Recipe
    *sections, name = key.split(".")
    for inner in sections:
        section = subsection(section, inner)
    return section.__dataclass_fields__[name].default


_adapter = functools.cache(lambda: TypeAdapter(Recipe))


def json_schema() -> dict[str, Any]:
    """JSON Schema of a recipe, for editors, with the docstrings as descriptions."""
    # Reading the docstrings takes 0.15 s, which no other command should pay
    Section.__pydantic_config__["use_attribute_docstrings"] = True
    schema = TypeAdapter(Recipe).json_schema()
    return {"$schema": "https://json-schema.org/draft/2020-12/schema"} | schema


def decode(plain: dict[str, Any]) -> tuple[Recipe, list[Problem], set[KeyPath]]:
    """Returns the recipe, all problems, and the unsound keys, which have their defaults.

    A missing key whose misspelling was found is unsound, too.
    """
    plain = {"run": {}, "model": {}, "data": {}, "batch": {}} | plain
    try:
        return _adapter().validate_python(plain), [], set()
    except ValidationError as error:
        problems, misspelt = _problems(plain, error)
    defaults = dataclasses.asdict(DEFAULT)
    unsound = {invalidated_with(path) for path in misspelt | {problem.path for problem in problems}}
    sound = {
        section: {name: value for name, value in values.items() if (section, name) not in unsound}
        for section, values in plain.items()
        if section in defaults and (section,) not in unsound and isinstance(values, dict)
    }
    return _adapter().validate_python(merged(defaults, sound)), problems, unsound


def invalidated_with(path: KeyPath) -> KeyPath:
    """What becomes unsound with a key: the key of a section that holds it, or the whole section if
    its default is null."""
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
    errors_by_path: dict[KeyPath, list[Any]] = {}
    for problem in error.errors(include_url=False):
        errors_by_path.setdefault(_path(plain, problem), []).append(problem)
    problems: list[Problem] = []
    misspelt: set[KeyPath] = set()
    types = ("unexpected_keyword_argument", "invalid_key")
    unknown = [path for path, errors in errors_by_path.items() if errors[0]["type"] in types]
    for path in unknown:
        message, meant = _unknown(plain, path)
        problems.append(Problem(path, "unknown", message))
        misspelt |= meant
    for path, errors in errors_by_path.items():
        more_precise = any(other != path and other[: len(path)] == path for other in errors_by_path)
        if path not in unknown and not more_precise and not misspelt & {path, path[:-1]}:
            message = _message(errors)
            if message in _NOT_ZERO and _may_be_null(path):
                message = message.replace(";", ", or null;")
            problems.append(Problem(path, _RULES.get(errors[0]["type"], "range"), message))
    return problems, misspelt


def _section_at(path: KeyPath) -> type[Section]:
    """The class of the section at a path, or of the one around it."""
    section: type[Section] = Recipe
    for part in path:
        if part in section.__dataclass_fields__:  # else a name in a mixture
            section = subsection(section, str(part)) or section
    return section


def _may_be_null(path: KeyPath) -> bool:
    """Whether null is a value of a key."""
    field = _section_at(path[:-1]).__dataclass_fields__.get(str(path[-1]))
    return field is not None and type(None) in typing.get_args(field.type)


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


def answer(key: str) -> str | None:
    """What to answer to a key that is elsewhere, or that has this name in another tool; or None."""
    place = next((dotted(other) for other in keys() if other[-1] == key), None)
    return answer_to(key) or (f"did you mean {place}?" if place else None)


def _unknown(plain: dict[str, Any], path: KeyPath) -> tuple[str, set[KeyPath]]:
    """The message for an unknown key, and the key that was probably meant if it is missing."""
    *parents, key = path
    section = _section_at(path[:-1])
    values: Any = plain
    for part in parents:
        values = values[part]
    known = list(section.__dataclass_fields__)
    is_files = section is Source and key in FILES_OF_A_SOURCE
    near = "files" if is_files else closest(str(key), known)
    meant = set() if near is None or values.get(near) else {(*parents, near)}
    hint = (not is_files and answer_to(str(key))) or (
        f"did you mean {near}?" if near else answer(str(key))
    )
    return f"unknown key; {hint or 'known here: ' + ', '.join(known)}", meant


def _message(errors: list[Any]) -> str:
    """The message about a key. It has several errors if it may hold several kinds of values."""
    kinds, choices, value = [], [], errors[0]["input"]
    got = f"; got {_quoted(value)}"
    for error in errors:
        kind, context = error["type"], error.get("ctx", {})
        if kind == "missing":
            return "missing; must be given"
        if kind == "too_short":
            return "must not be empty"
        if kind == "too_long":
            return f"must be a list of {context['max_length']}{got}"
        if kind in _KINDS:
            kinds.append(_KINDS[kind])
        elif kind == "literal_error":
            choices += re.findall("'(.*?)'", context["expected"])
            kinds.append(context["expected"].replace("'", ""))
        elif kind == "dataclass_type" and (meant := _MAIN_KEYS.get(context["class_name"])):
            kinds.append(f"a section; did you mean {meant}={_quoted(value)}?")
            got = ""
        elif kind == "dataclass_type":
            known = getattr(schema, context["class_name"]).__dataclass_fields__
            kinds.append(f"a section with the keys {', '.join(known)}")
        else:  # a bound, or the message of `section.form`
            text: str = error["msg"]
            for words, plain_words in _WORDS.items():
                text = text.replace(words, plain_words)
            return text + got
    hint = suggestion(value, choices) if isinstance(value, str) else ""
    if kinds == ["text"] and isinstance(value, (int, float)):
        hint = "; put it in quotes"
    return f"must be {' or '.join(kinds)}{got}{hint}"


def _quoted(value: Any) -> str:
    text = repr(value) if isinstance(value, str) else json.dumps(value, default=str)
    return shown(text, 60)


def shown(text: str, length: int = 200) -> str:
    """A text as messages show it: cut, and without characters that a terminal would obey."""
    text = "".join(
        character if character.isprintable() else repr(character)[1:-1]
        for character in text[: length + 1]
    )
    return text if len(text) <= length else text[: length - 3] + "..."
