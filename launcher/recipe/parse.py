"""YAML of recipe files and overrides: values, the line of each key, and what is wrong with them."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import GrammarParseError

from launcher.errors import RecipeError, first_line
from launcher.recipe.decode import KeyPath, Problem, dotted

COMMAND_LINE = "command line"
FLOAT = re.compile(r"[-+]?(\d[\d_]*\.?[\d_]*|\.\d[\d_]*)[eE][-+]?\d+")
"""Numbers such as 1e-4, which YAML 1.1 takes for text."""

_TAG = "tag:yaml.org,2002:"
_SCALARS = {_TAG + name for name in ("str", "int", "float", "bool", "null")}
_NO_INTERPOLATION = (
    "is no interpolation: write ${section.key}, or \\${ for the two characters themselves"
)
_HINTS = {  # part of the YAML reader's message: the usual cause
    "\\t": "indent with spaces, not with tabs",
    "undefined alias": "text that starts with * must be in quotes",
    "alphabetic or numeric": "text that starts with * or & must be in quotes",
    "expected ',' or": "inside [ ] and { }, text with any of [ ] { } , : must be in quotes",
    "<block": "is the indentation right, here and in the line before?",
    "mapping values": "text with a colon and a space must be in quotes; or is the indentation "
    "wrong?",
    "cannot start any token": "text that starts like this must be in quotes",
}


class _Loader(yaml.SafeLoader):
    """Reads 1e-4 as a number, and dates as text."""

    yaml_implicit_resolvers = {  # noqa: RUF012 (as yaml declares it)
        start: [(tag, pattern) for tag, pattern in resolvers if tag != _TAG + "timestamp"]
        for start, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


_Loader.add_implicit_resolver(_TAG + "float", FLOAT, list("-+.0123456789"))


@dataclass
class Origins:
    """Where each value of a recipe came from."""

    file: str
    places: dict[KeyPath, int | str] = field(default_factory=dict)
    """The line of the file, or the argument as it was typed."""

    def of(self, path: KeyPath) -> str:
        """`recipes/ddp.yaml:24`, `command line` or `default`."""
        place = self.places.get(path)
        if isinstance(place, str):
            return COMMAND_LINE
        return "default" if place is None else f"{self.file}:{place}"

    def override(self, path: KeyPath, argument: str) -> None:
        """Records that an argument set this key, and with it all keys inside."""
        depth = len(path)
        kept = {key: place for key, place in self.places.items() if key[:depth] != path}
        self.places = kept | {path: argument}

    def locate(self, path: KeyPath) -> str | int:
        """The place of a key, or else of the section around it; 0: neither."""
        above = (path[:length] for length in range(len(path), 0, -1))
        return next((self.places[key] for key in above if key in self.places), 0)

    def cite(self, problem: Problem) -> str:
        """One line: where, which key, what is wrong."""
        where, key = self.locate(problem.path), dotted(problem.path)
        if isinstance(where, str):
            set_by = where if where.partition("=")[0] == key else key
            return f"{COMMAND_LINE}: {set_by}: {problem.message}"
        place = f"{self.file}:{where}" if where else self.file
        return ": ".join(part for part in (place, key, problem.message) if part)


def parse(text: str, origins: Origins, problems: list[Problem]) -> dict[str, Any]:
    """The values of a recipe's text, not interpolated; fills `origins.places`.

    Adds to `problems` what is wrong with one key. Raises RecipeError if the text as a whole cannot
    be read.
    """
    try:
        node = yaml.compose(text, Loader=_Loader)
        if node is None:
            example = "see recipes/quickstart.yaml for the shortest recipe that runs"
            raise RecipeError(f"{origins.file}: is empty; {example}")
        if not isinstance(node, yaml.MappingNode):
            where = f"{origins.file}:{node.start_mark.line + 1}"
            raise RecipeError(f"{where}: must be sections (run:, model:, data:, ...)")
        values: dict[str, Any] = _construct(node, (), origins.places, problems)
        return values
    except yaml.reader.ReaderError as error:
        where = f"{origins.file}:{text.count(chr(10), 0, error.position) + 1}"
        character = repr(text[error.position])
        raise RecipeError(f"{where}: not YAML: the character {character} is not allowed") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{origins.file}:{mark.line + 1}" if mark else origins.file
        raise RecipeError(f"{where}: not YAML: {_explain(error)}") from None
    except RecursionError:
        what = "an alias contains itself, or sections are nested too deep"
        raise RecipeError(f"{origins.file}: {what}") from None


def parse_override(argument: str, problems: list[Problem]) -> tuple[KeyPath, Any]:
    """Key and value of an override, not interpolated.

    Adds to `problems` what is wrong with a key inside the value. Raises RecipeError.
    """
    key, equals, text = argument.partition("=")
    path = tuple(re.sub(r"\[(\w+)\]", r".\1", key).split("."))
    if not equals or any(not part or part != part.strip() for part in path):
        form = "an override is key=value, such as batch.micro_batch_size=4"
        raise RecipeError(f"{COMMAND_LINE}: {argument or repr('')}: {form}")
    try:
        node = yaml.compose(text, Loader=_Loader)
        return path, None if node is None else _construct(node, path, {}, problems)
    except yaml.YAMLError as error:
        raise RecipeError(f"{COMMAND_LINE}: {argument}: not a value: {_explain(error)}") from None
    except RecursionError:
        raise RecipeError(f"{COMMAND_LINE}: {argument}: an alias contains itself") from None


def _construct(
    node: yaml.Node, path: KeyPath, places: dict[KeyPath, int | str], problems: list[Problem]
) -> Any:
    """The value of a node. Fills `places` with the line of each key inside."""
    if isinstance(node, yaml.ScalarNode):
        if node.tag in _SCALARS:
            return _construct_scalar(node, path, problems)
    elif node.tag in (_TAG + "map", _TAG + "seq"):
        if isinstance(node, yaml.MappingNode):
            return _construct_section(node, path, places, problems)
        values = []
        for index, item in enumerate(node.value):
            here = (*path, str(index))
            places[here] = item.start_mark.line + 1
            values.append(_construct(item, here, places, problems))
        return values
    tag = node.tag.replace(_TAG, "!!")
    what = "has no meaning in a recipe; text that starts with ! or = must be in quotes"
    problems.append(Problem(path, f"the YAML tag {tag} {what}"))
    return None


def _construct_scalar(node: yaml.ScalarNode, path: KeyPath, problems: list[Problem]) -> Any:
    try:
        value = yaml.constructor.SafeConstructor().construct_object(node)
        if isinstance(value, str) and "${" in value:
            OmegaConf.create([value])
        return value
    except GrammarParseError:
        problems.append(Problem(path, _NO_INTERPOLATION))
    except (ValueError, LookupError):  # a tag that the user wrote, such as `!!int x`
        problems.append(
            Problem(
                path, f"the YAML tag {node.tag.replace(_TAG, '!!')} does not fit {node.value!r}"
            )
        )
    return None


def _construct_section(
    node: yaml.MappingNode, path: KeyPath, places: dict[KeyPath, int | str], problems: list[Problem]
) -> dict[str, Any]:
    values: dict[str, Any] = {}
    own: dict[str, int] = {}
    for key, value in sorted(node.value, key=lambda pair: pair[0].tag != _TAG + "merge"):
        name, line = key.value, key.start_mark.line + 1
        if key.tag == _TAG + "merge":  # <<: the merged keys keep the lines of their anchor
            for merged in value.value if isinstance(value, yaml.SequenceNode) else [value]:
                inside = _construct(merged, path, places, problems)
                values |= inside if isinstance(inside, dict) else {}
        elif key.tag not in (_TAG + "str", _TAG + "int"):
            shown = repr(name) if isinstance(name, str) else "a list or a section"
            problems.append(Problem(path, f"a key must be a name; line {line} has {shown}"))
        else:
            here = (*path, name)
            if name in own:
                what = f"given twice: in line {own[name]} and in line {line}"
                problems.append(Problem(here, what))
            own[name] = places[here] = line
            values[name] = _construct(value, here, places, problems)
    return values


def _explain(error: yaml.YAMLError) -> str:
    """What the YAML reader found, and the usual cause."""
    what = getattr(error, "problem", None) or first_line(error)
    if what.startswith("but "):
        what = f"{getattr(error, 'context', None)}, {what}"
    hint = next((hint for part, hint in _HINTS.items() if part in what), None)
    return f"{what}; {hint}" if hint else what
