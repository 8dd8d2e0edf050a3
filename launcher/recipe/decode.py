"""A strict decoder: plain YAML values into the schema's frozen dataclasses, every problem at once.

Nothing is converted on the way but a whole number into a float: 3 is not true, "4" is not 4.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
import types
import typing
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any, Literal

from launcher.recipe.schema import ListOf, Range

KeyPath = tuple[str, ...]


@dataclass(frozen=True)
class Problem:
    """What is wrong with one key. Where its value came from is added by who knows it."""

    path: KeyPath
    message: str


def dotted(path: KeyPath) -> str:
    """`("data", "train", "0")` as `data.train[0]`."""
    text = ""
    for part in path:
        text += f"[{part}]" if part.isdigit() and text else f".{part}" if text else part
    return text


def closest(word: str, known: Iterable[str]) -> str | None:
    """The known word that `word` was probably meant to be."""
    return next(iter(difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)), None)


def suggestion(word: str, known: Iterable[str]) -> str:
    """`; did you mean X?`, or an empty string where nothing is near."""
    near = closest(word, known)
    return f"; did you mean {near}?" if near else ""


def quoted(value: Any) -> str:
    """A value as the user would write it in YAML, shortened."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dict):
        text = "{" + ", ".join(f"{key}: {quoted(inner)}" for key, inner in value.items()) + "}"
    elif isinstance(value, list):
        text = "[" + ", ".join(quoted(inner) for inner in value) + "]"
    else:
        text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


@dataclass(frozen=True)
class _Expected:
    """A type annotation taken apart."""

    kinds: tuple[Any, ...]
    optional: bool
    marks: tuple[Any, ...]


def _expected(annotation: Any) -> _Expected:
    origin = typing.get_origin(annotation)
    if origin is typing.Annotated:
        inner = _expected(typing.get_args(annotation)[0])
        return _Expected(inner.kinds, inner.optional, inner.marks + typing.get_args(annotation)[1:])
    if origin in (typing.Union, types.UnionType):
        parts = [_expected(argument) for argument in typing.get_args(annotation) if argument is not type(None)]
        return _Expected(
            tuple(kind for part in parts for kind in part.kinds),
            type(None) in typing.get_args(annotation) or any(part.optional for part in parts),
            tuple(mark for part in parts for mark in part.marks),
        )
    return _Expected((annotation,), False, ())


def _words(kind: Any) -> str:
    if typing.get_origin(kind) is Literal:
        choices = [str(choice) for choice in typing.get_args(kind)]
        return choices[0] if len(choices) == 1 else "one of " + ", ".join(choices)
    if typing.get_origin(kind) is tuple:
        arguments = typing.get_args(kind)
        return "a list" if arguments[-1] is Ellipsis else f"a list of {len(arguments)} numbers"
    if typing.get_origin(kind) is dict:
        return "a section of keys" if typing.get_args(kind)[1] is Any else "a section of names"
    if dataclasses.is_dataclass(kind):
        return "a section with the keys " + ", ".join(field.name for field in dataclasses.fields(kind))
    return {bool: "true or false", int: "a whole number", float: "a number", str: "text"}[kind]


@functools.cache
def section_fields(section: Any) -> dict[str, Any]:
    """A section's keys and their resolved annotations."""
    return typing.get_type_hints(section, include_extras=True)


def subsection(annotation: Any) -> Any | None:
    """The dataclass that an annotation admits, or None."""
    return next((kind for kind in _expected(annotation).kinds if dataclasses.is_dataclass(kind)), None)


def default_of(field: dataclasses.Field[Any]) -> Any:
    """A field's default, or MISSING where it must be given."""
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def _all_keys(section: Any, path: KeyPath = ()) -> Iterable[KeyPath]:
    for name, annotation in section_fields(section).items():
        yield (*path, name)
        inner = subsection(annotation)
        if inner is not None:
            yield from _all_keys(inner, (*path, name))


class Decoder:
    """Decodes one tree; `problems` fills as it goes.

    Where a value is wrong the section still comes out, with the default or None in its place, so that the rules
    between keys can be checked wherever the keys they join are sound.
    """

    def __init__(self, root: Any) -> None:
        self.problems: list[Problem] = []
        self.misspelt: set[KeyPath] = set()
        """Keys that are not there, but that a misspelt one seems to mean: they are not told to be missing too."""
        self._keys = list(_all_keys(root))

    def section(self, kind: Any, value: Any, path: KeyPath) -> Any:
        """Decodes a mapping into the dataclass `kind`."""
        annotations = section_fields(kind)
        for key in value:
            if key not in annotations:
                self._unknown(str(key), annotations, annotations.keys() - value.keys(), path)
        decoded = {}
        for field in dataclasses.fields(kind):
            default = default_of(field)
            here = (*path, field.name)
            if field.name in value:
                decoded[field.name] = self._value(annotations[field.name], value[field.name], here, default)
            elif default is dataclasses.MISSING and here in self.misspelt:
                decoded[field.name] = None
            elif default is dataclasses.MISSING and (inner := subsection(annotations[field.name])) is not None:
                decoded[field.name] = self.section(inner, {}, here)
            elif default is dataclasses.MISSING:
                expected = _expected(annotations[field.name])
                words = " or ".join(_words(one) for one in expected.kinds)
                self.problems.append(Problem(here, f"missing; must be given: {words}"))
                decoded[field.name] = None
            else:
                decoded[field.name] = default
        return kind(**decoded)

    def _unknown(self, key: str, known: Iterable[str], absent: Collection[str], path: KeyPath) -> None:
        message, meant = suggestion(key, known), closest(key, known)
        if meant is not None and meant in absent:
            self.misspelt.add((*path, meant))
        if "." in key:
            message = "; a dot joins keys on the command line only, in a file they are nested"
        if not message:
            elsewhere = [dotted(other) for other in self._keys if other[-1] == key and other[:-1] != path]
            if elsewhere:
                message = f"; did you mean {elsewhere[0]}?"
            else:
                message = f"; known here: {', '.join(known)}"
        self.problems.append(Problem((*path, key), f"unknown key{message}"))

    def _value(self, annotation: Any, value: Any, path: KeyPath, default: Any) -> Any:
        expected = _expected(annotation)
        before = len(self.problems)
        if value is None:
            if expected.optional:
                return None
            message = "must not be null; must be " + " or ".join(_words(kind) for kind in expected.kinds)
            self.problems.append(Problem(path, message))
        else:
            for kind in expected.kinds:
                matches, decoded = self._try(kind, value, path, expected)
                if matches:
                    if len(self.problems) == before or dataclasses.is_dataclass(kind):
                        return decoded
                    break
            else:
                self.problems.append(Problem(path, self._mismatch(expected, value)))
        return None if default is dataclasses.MISSING else default

    def _mismatch(self, expected: _Expected, value: Any) -> str:
        words = " or ".join(_words(kind) for kind in expected.kinds) + (", or null" if expected.optional else "")
        choices = [str(c) for k in expected.kinds if typing.get_origin(k) is Literal for c in typing.get_args(k)]
        hint = suggestion(value, choices) if isinstance(value, str) else ""
        if str in expected.kinds and isinstance(value, (int, float, bool)):
            hint = "; put it in quotes"
        if isinstance(value, str) and {int, float} & set(expected.kinds) and _is_number(value):
            hint = "; take the quotes away"
        return f"must be {words}; got {quoted(value)}{hint}"

    def _try(self, kind: Any, value: Any, path: KeyPath, expected: _Expected) -> tuple[bool, Any]:
        """Whether the value is of this kind, and then what it decodes to; problems inside it are recorded."""
        origin = typing.get_origin(kind)
        if origin is Literal:
            return any(type(value) is type(choice) and value == choice for choice in typing.get_args(kind)), value
        if dataclasses.is_dataclass(kind):
            return (True, self.section(kind, value, path)) if isinstance(value, dict) else (False, None)
        if origin is dict:
            return self._mapping(kind, value, path) if isinstance(value, dict) else (False, None)
        if origin is tuple:
            if isinstance(value, str) and any(isinstance(mark, ListOf) for mark in expected.marks):
                value = [value]
            return self._tuple(kind, value, path) if isinstance(value, list) else (False, None)
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind:
            return False, None
        if kind in (int, float):
            self._number(value, path, expected)
        if kind is str and not value.strip():
            self.problems.append(Problem(path, "must not be empty"))
        return True, value

    def _mapping(self, kind: Any, value: dict[str, Any], path: KeyPath) -> tuple[bool, Any]:
        inner = typing.get_args(kind)[1]
        if inner is Any:
            return True, value
        if not value:
            self.problems.append(Problem(path, "must not be empty"))
        return True, {name: self._value(inner, item, (*path, str(name)), None) for name, item in value.items()}

    def _tuple(self, kind: Any, value: list[Any], path: KeyPath) -> tuple[bool, Any]:
        arguments = typing.get_args(kind)
        if arguments[-1] is Ellipsis:
            if not value:
                self.problems.append(Problem(path, "must not be empty"))
            arguments = (arguments[0],) * len(value)
        elif len(value) != len(arguments):
            return False, None
        return True, tuple(
            self._value(annotation, item, (*path, str(index)), None)
            for index, (annotation, item) in enumerate(zip(arguments, value, strict=True))
        )

    def _number(self, value: float, path: KeyPath, expected: _Expected) -> None:
        if not math.isfinite(value):
            self.problems.append(Problem(path, f"must be finite; got {value}"))
            return
        for mark in expected.marks:
            violated = mark.violated_by(value) if isinstance(mark, Range) else None
            if violated:
                self.problems.append(Problem(path, f"{violated}; got {value if isinstance(value, int) else f'{value:g}'}"))


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False
