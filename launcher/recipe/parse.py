"""The YAML of a recipe file: its values, and the line of each key."""

from __future__ import annotations

from dataclasses import dataclass, field

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import GrammarParseError, OmegaConfBaseException

from launcher.errors import RecipeError
from launcher.recipe.decode import KeyPath, Problem, dotted

COMMAND_LINE = "command line"
BROKEN_INTERPOLATION = (
    "is no interpolation: write ${section.key}, or \\${ for the two characters themselves"
)
MISPLACED = "a YAML tag (!!int, !!bool, ...) or an alias (*name) stands where it does not fit"
"""What is wrong where constructing a value fails, as `!!int x` does."""

_TAG = "tag:yaml.org,2002:"
_KNOWN_TAGS = {
    _TAG + name for name in ("str", "int", "float", "bool", "null", "timestamp", "map", "seq")
}
_HINTS = (  # a part of the YAML reader's message, and the usual cause
    ("\\t", "indent with spaces, not with tabs"),
    ("undefined alias", "text that starts with * stands in quotes"),
    ("alphabetic or numeric", "text that starts with * or & stands in quotes"),
    ("expected ',' or", "inside [ ] and { }, text with any of [ ] { } , : stands in quotes"),
    ("<block", "is the indentation right, here and in the line before?"),
    (
        "mapping values",
        "text with a colon and a space stands in quotes; or is the indentation wrong?",
    ),
    ("found '?'", "??? stands in quotes in a list"),
    ("cannot start any token", "text that starts so stands in quotes"),
)


@dataclass
class Origins:
    """Where each value of a recipe came from."""

    file: str
    lines: dict[KeyPath, int] = field(default_factory=dict)
    overrides: dict[KeyPath, str] = field(default_factory=dict)
    """For each key that an argument set: the argument, as it was typed."""

    def of(self, path: KeyPath) -> str:
        """`recipes/ddp.yaml:24`, `command line` or `default`."""
        if path in self.overrides:
            return COMMAND_LINE
        if path in self.lines:
            return f"{self.file}:{self.lines[path]}"
        return "default"

    def override(self, path: KeyPath, argument: str) -> None:
        """Notes that an argument set this key, which replaces what was inside it."""
        depth = len(path)
        self.lines = {
            key: line for key, line in self.lines.items() if key == path or key[:depth] != path
        }
        self.overrides = {
            key: earlier for key, earlier in self.overrides.items() if key[:depth] != path
        }
        self.overrides[path] = argument

    def locate(self, path: KeyPath) -> str | int:
        """The argument or line that set a key, or else the section around it; 0: neither."""
        for length in range(len(path), 0, -1):
            if path[:length] in self.overrides:
                return self.overrides[path[:length]]
            if path[:length] in self.lines:
                return self.lines[path[:length]]
        return 0

    def cite(self, problem: Problem) -> str:
        """One line: where, which key, what is wrong."""
        where, key = self.locate(problem.path), dotted(problem.path)
        if isinstance(where, str):
            set_by = where if where.partition("=")[0] == key else key
            return f"{COMMAND_LINE}: {set_by}: {problem.message}"
        place = f"{self.file}:{where}" if where else self.file
        return ": ".join(part for part in (place, key, problem.message) if part)


def parse(text: str, origins: Origins, problems: list[Problem]) -> DictConfig:
    """The tree of a recipe's text, not interpolated; fills `origins.lines`.

    Adds to `problems` what is wrong with one key, which is left out of the tree. Raises
    RecipeError where the text as a whole cannot be read.
    """
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        if node is None:
            example = "see recipes/quickstart.yaml for the shortest recipe that runs"
            raise RecipeError(f"{origins.file}: is empty; {example}")
        if not isinstance(node, yaml.MappingNode):
            where = f"{origins.file}:{node.start_mark.line + 1}"
            raise RecipeError(f"{where}: must be sections (run:, model:, data:, ...)")
        _read_lines(node, (), origins.lines, problems)
        sound = yaml.serialize(node, Dumper=yaml.SafeDumper) if problems else text
        loaded = OmegaConf.create(sound)
    except yaml.reader.ReaderError as error:
        where = f"{origins.file}:{text.count(chr(10), 0, error.position) + 1}"
        character = repr(text[error.position])
        raise RecipeError(f"{where}: not YAML: the character {character} is not allowed") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{origins.file}:{mark.line + 1}" if mark else origins.file
        raise RecipeError(f"{where}: not YAML: {explain(error)}") from None
    except RecursionError:
        what = "an alias contains itself, or sections are nested without end"
        raise RecipeError(f"{origins.file}: {what}") from None
    except RecipeError:
        raise
    except (OmegaConfBaseException, ValueError, LookupError, TypeError):
        raise RecipeError(f"{origins.file}: {MISPLACED}") from None
    assert isinstance(loaded, DictConfig)
    return loaded


def _read_lines(
    node: yaml.Node, path: KeyPath, lines: dict[KeyPath, int], problems: list[Problem]
) -> None:
    """Fills `lines` with the line of each key.

    Takes out of the tree, and adds to `problems`, what OmegaConf would stop at or report without
    a line: a key that stands twice in a section or is no text, a tag, a broken interpolation.
    """
    if node.tag not in _KNOWN_TAGS:
        tag = node.tag.replace(_TAG, "!!")
        what = "has no meaning in a recipe; text that starts with ! or = stands in quotes"
        problems.append(Problem(path, f"the YAML tag {tag} {what}"))
        kinds = {yaml.MappingNode: "map", yaml.SequenceNode: "seq", yaml.ScalarNode: "str"}
        node.tag = _TAG + kinds[type(node)]
    if isinstance(node, yaml.MappingNode):
        _read_section(node, path, lines, problems)
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            lines[(*path, str(index))] = value.start_mark.line + 1
            _read_lines(value, (*path, str(index)), lines, problems)
    elif "${" in node.value:
        try:
            OmegaConf.create([node.value])
        except GrammarParseError:
            problems.append(Problem(path, BROKEN_INTERPOLATION))
            node.value = ""


def _read_section(
    node: yaml.MappingNode, path: KeyPath, lines: dict[KeyPath, int], problems: list[Problem]
) -> None:
    kept: dict[str, tuple[yaml.Node, yaml.Node]] = {}
    for key, value in sorted(node.value, key=lambda pair: pair[0].tag != _TAG + "merge"):
        name, line = key.value, key.start_mark.line + 1
        if key.tag == _TAG + "merge":  # <<: the merged keys have the lines of their anchor
            for merged in value.value if isinstance(value, yaml.SequenceNode) else [value]:
                _read_lines(merged, path, lines, problems)
        elif not isinstance(name, str) or key.tag not in (_TAG + "str", _TAG + "int"):
            shown = repr(name) if isinstance(name, str) else "a list or a section"
            problems.append(Problem(path, f"a key must be a name; line {line} has {shown}"))
            continue
        else:
            here = (*path, name)
            if name in kept:
                what = f"stands twice: in line {lines[here]} and in line {line}"
                problems.append(Problem(here, what))
            lines[here] = line
            _read_lines(value, here, lines, problems)
        kept[name] = (key, value)
    node.value = list(kept.values())


def explain(error: yaml.YAMLError) -> str:
    """What the YAML reader found, and the usual cause."""
    what = getattr(error, "problem", None) or first_line(error)
    if what.startswith("but "):
        what = f"{getattr(error, 'context', None)}, {what}"
    if "constructor" in what:
        quotes = "text that starts with ! or = stands in quotes"
        return f"a tag (!...) has no meaning in a recipe; {quotes}"
    hint = next((hint for part, hint in _HINTS if part in what), None)
    return f"{what}; {hint}" if hint else what


def first_line(error: Exception) -> str:
    """The first line of an error's message, or else its class."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
