"""YAML text to values with the line of each key, and a recipe to YAML text or overrides."""

from __future__ import annotations

import copy
import dataclasses
import functools
import re
from collections.abc import Iterable, Iterator
from typing import Any

import yaml

from launcher.errors import first_line
from launcher.recipe.decode import KeyPath, Reference
from launcher.recipe.schema import Recipe
from launcher.recipe.section import AutoFloat, AutoInt

_TAG = "tag:yaml.org,2002:"
_INT = re.compile(r"[-+]?(0|[1-9][0-9_]*|0b[01][01_]*|0x[0-9a-fA-F][0-9a-fA-F_]*)\Z")
"""Not 017 and 1:30, which are 15 and 90 in YAML 1.1."""
_FLOAT = re.compile(
    r"[-+]?(([0-9][0-9_]*\.?[0-9_]*|\.[0-9][0-9_]*)[eE][-+]?[0-9]+"
    r"|[0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*|\.(inf|Inf|INF)|\.(nan|NaN|NAN))\Z"
)
"""Numbers with a point or an exponent. 1e-4 is one too, although it is text in YAML 1.1; 1:30.0 is
text."""
_OTHER_RULES = {_TAG + "int", _TAG + "float", _TAG + "timestamp"}
_LONGEST_NUMBER = 100
_DEEPEST, _MOST_VALUES = 50, 100_000
"""Limits of a recipe: nested levels, and values (each alias counts as the values it stands for)."""


class _Loader(yaml.SafeLoader):
    """Reads 1e-4 as a number, dates and times as text, and refuses keys that are given twice."""

    yaml_implicit_resolvers = {  # noqa: RUF012 (as yaml declares it)
        start: [(tag, pattern) for tag, pattern in resolvers if tag not in _OTHER_RULES]
        for start, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    yaml_constructors = {  # noqa: RUF012
        tag: yaml.SafeLoader.yaml_constructors[tag]
        for tag in (
            None,
            *(_TAG + kind for kind in ["null", "bool", "int", "float", "str", "seq", "map"]),
        )
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        names = set()
        for key, _ in node.value:
            # PyYAML itself refuses keys that are not scalars
            if isinstance(key, yaml.ScalarNode) and key.tag != _TAG + "merge":
                what = f"{key.value} is given twice"
                if not key.value.isprintable():
                    what = f"the key {key.value!r} holds a character that cannot be printed"
                if key.value in names or not key.value.isprintable():
                    raise yaml.constructor.ConstructorError(None, None, what, key.start_mark)
                names.add(key.value)
                key.tag = _TAG + "str"  # also of 0 and on, as in id2label: {0: no, 1: yes}
        return super().construct_mapping(node, deep)

    def construct_int(self, node: yaml.ScalarNode) -> int | str:
        """A text where it has more digits than any number of a recipe, or than Python converts."""
        if len(node.value) > _LONGEST_NUMBER:
            return self.construct_yaml_str(node)
        return self.construct_yaml_int(node)


_Loader.add_implicit_resolver(_TAG + "int", _INT, list("-+0123456789"))
_Loader.add_implicit_resolver(_TAG + "float", _FLOAT, list("-+.0123456789"))
_Loader.add_constructor(_TAG + "int", _Loader.construct_int)


class NotYamlError(ValueError):
    """Text that is not YAML. line: the line of the error; None if it is not known."""

    def __init__(self, message: str, line: int | None) -> None:
        super().__init__(message)
        self.line = line


def parse_yaml(text: str | bytes) -> tuple[Any, dict[KeyPath, int]]:
    """The values of YAML text, and the line of each key. Raises NotYamlError."""
    values, lines = _parsed(text)
    return copy.deepcopy(values), dict(lines)


# Runs of a sweep have the same recipe, and most of the time of reading one is that of its YAML
@functools.lru_cache(maxsize=16)
def _parsed(text: str | bytes) -> tuple[Any, dict[KeyPath, int]]:
    """What `parse_yaml` returns, which must not be changed."""
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return None, {}
        _measure(node, {})
        return loader.construct_document(node), dict(_lines(node, ()))
    except NotYamlError:
        raise
    except (yaml.YAMLError, ValueError, LookupError, RecursionError) as error:
        what = getattr(error, "problem", None) or first_line(error)
        if isinstance(error, RecursionError):
            what = f"more than {_DEEPEST} levels of keys in one section or list"
        mark = getattr(error, "problem_mark", None)
        if what == "but found another document":
            what = "a second document begins; a recipe is one"
        elif mark is not None and not isinstance(error, yaml.constructor.ConstructorError):
            what += "; is it indented right, and is text with any of * & ! @ : [ ] { } in quotes?"
        raise NotYamlError(what, mark.line + 1 if mark else None) from None


def _measure(node: yaml.Node, known: dict[int, tuple[int, int]]) -> tuple[int, int]:
    """Number of values and of levels inside a node. A few aliases can stand for billions of values.

    known: results by the id of the node. Raises NotYamlError if a limit is exceeded.
    """
    if id(node) in known:
        if known[id(node)] == (0, 0):
            raise NotYamlError("an alias leads back to itself", node.start_mark.line + 1)
        return known[id(node)]
    known[id(node)] = 0, 0
    values, levels = 1, 1
    for child in _children(node):
        inner, depth = _measure(child, known)
        values, levels = values + inner, max(levels, 1 + depth)
        what = f"more than {_DEEPEST} levels of keys" if levels > _DEEPEST else ""
        what = f"more than {_MOST_VALUES:,} values" if values > _MOST_VALUES else what
        if what:
            raise NotYamlError(f"{what} in one section or list", child.start_mark.line + 1)
    known[id(node)] = values, levels
    return values, levels


def _children(node: yaml.Node) -> list[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        return [part for item in node.value for part in item]
    return node.value if isinstance(node, yaml.SequenceNode) else []


def _lines(node: yaml.Node, path: KeyPath) -> Iterator[tuple[KeyPath, int]]:
    items: list[tuple[str | int, yaml.Node, yaml.Node]] = []
    if isinstance(node, yaml.MappingNode):
        items = [(key.value, key, value) for key, value in node.value]
    elif isinstance(node, yaml.SequenceNode):
        items = [(index, item, item) for index, item in enumerate(node.value)]
    for key, start, value in items:
        yield (*path, key), start.start_mark.line + 1
        yield from _lines(value, (*path, key))


class _Dumper(yaml.SafeDumper):
    """Writes text so that it is read as text: 1e-4 in quotes, ${ escaped. Lists are on one line."""

    def represent_str(self, text: str) -> yaml.ScalarNode:
        escaped = re.sub(r"(\\*)\$\{", r"\1\1\\${", text)
        style = '"' if len(text.splitlines()) > 1 else None  # on one line, for `launcher show`
        return self.represent_scalar(_TAG + "str", escaped, style=style)

    def represent_list(self, values: Iterable[object]) -> yaml.SequenceNode:
        return self.represent_sequence(_TAG + "seq", values, flow_style=True)

    def represent_auto(self, value: object) -> yaml.ScalarNode:
        return self.represent_scalar(_TAG + "str", "auto")

    def represent_reference(self, text: str) -> yaml.ScalarNode:
        return self.represent_scalar(_TAG + "str", str(text))


_Dumper.add_representer(str, _Dumper.represent_str)
_Dumper.add_representer(Reference, _Dumper.represent_reference)
_Dumper.add_representer(AutoInt, _Dumper.represent_auto)
_Dumper.add_representer(AutoFloat, _Dumper.represent_auto)
_Dumper.add_representer(list, _Dumper.represent_list)
_Dumper.add_representer(tuple, _Dumper.represent_list)
_Dumper.add_implicit_resolver(_TAG + "float", _FLOAT, list("-+.0123456789"))


def to_yaml(recipe: Recipe) -> str:
    """The resolved recipe with every key, each on a line of its own; it repeats the run. A
    `Reference` is written as it is, so that it is resolved again."""
    values = dataclasses.asdict(recipe)
    text: str = yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=10**6)
    return text


def flow_yaml(value: object) -> str:
    """A value in YAML on one line, as a recipe file may hold it."""
    text: str = yaml.dump(
        value,
        Dumper=_Dumper,
        default_flow_style=True,
        allow_unicode=True,
        width=10**6,
        sort_keys=False,
    )
    return text.removesuffix("...\n").strip("\n")  # a text may end with other white space


def as_override(key: str, value: object) -> str:
    """`KEY=VALUE`: the argument that gives a key this value."""
    # repr(float): 1e-05, where YAML has 1.0e-05
    return f"{key}={repr(value) if type(value) is float else flow_yaml(value)}"


def overrides_between(before: object, after: object) -> tuple[str, ...]:
    """The overrides that change one recipe into the other."""
    return tuple(as_override(key, value) for key, value in changes_between(before, after))


def changes_between(before: object, after: object, path: str = "") -> Iterator[tuple[str, Any]]:
    """The keys in which two recipes, or values of the key `path`, differ, with their new values."""
    if before == after:
        return
    if not dataclasses.is_dataclass(after) or isinstance(after, type):
        yield path, after
        return
    names = [field.name for field in dataclasses.fields(after)]
    if before is None:  # the section was null: keys that differ from the default, or the first key
        default = type(after)()
        names = [n for n in names if getattr(after, n) != getattr(default, n)] or names[:1]
    for name in names:
        key = f"{path}.{name}" if path else name
        yield from changes_between(getattr(before, name, object()), getattr(after, name), key)
