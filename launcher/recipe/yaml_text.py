"""YAML text to values with the line of each key, and a recipe to YAML text."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from typing import Any

import yaml

from launcher.errors import first_line
from launcher.recipe.decode import KeyPath
from launcher.recipe.schema import Recipe

_TAG = "tag:yaml.org,2002:"
_FLOAT = re.compile(r"[-+]?(\d[\d_]*\.?[\d_]*|\.\d[\d_]*)[eE][-+]?\d+")
"""Numbers such as 1e-4, which YAML 1.1 takes for text."""


class _Loader(yaml.SafeLoader):
    """Reads 1e-4 as a number and dates as text, and refuses keys that are given twice."""

    yaml_implicit_resolvers = {  # noqa: RUF012 (as yaml declares it)
        start: [(tag, pattern) for tag, pattern in resolvers if tag != _TAG + "timestamp"]
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
                if key.value in names:
                    what = f"{key.value} is given twice"
                    raise yaml.constructor.ConstructorError(None, None, what, key.start_mark)
                names.add(key.value)
                key.tag = _TAG + "str"  # also of 0 and on, as in id2label: {0: no, 1: yes}
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(_TAG + "float", _FLOAT, list("-+.0123456789"))


class NotYamlError(ValueError):
    """Text that is not YAML. line: of the error; None: not known."""

    def __init__(self, message: str, line: int | None) -> None:
        super().__init__(message)
        self.line = line


def parse_yaml(text: str | bytes) -> tuple[Any, dict[KeyPath, int]]:
    """The values of YAML text, and the line of each key. Raises NotYamlError."""
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return None, {}
        return loader.construct_document(node), dict(_lines(node, ()))
    except (yaml.YAMLError, ValueError, LookupError, RecursionError) as error:
        what = getattr(error, "problem", None) or first_line(error)
        mark = getattr(error, "problem_mark", None)
        if mark is not None and not isinstance(error, yaml.constructor.ConstructorError):
            what += "; is it indented right, and is text with any of * & ! @ : [ ] { } in quotes?"
        raise NotYamlError(what, mark.line + 1 if mark else None) from None


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

    def represent_list(self, values: Any) -> yaml.SequenceNode:
        return self.represent_sequence(_TAG + "seq", values, flow_style=True)


_Dumper.add_representer(str, _Dumper.represent_str)
_Dumper.add_representer(list, _Dumper.represent_list)
_Dumper.add_representer(tuple, _Dumper.represent_list)
_Dumper.add_implicit_resolver(_TAG + "float", _FLOAT, list("-+.0123456789"))


def to_yaml(recipe: Recipe) -> str:
    """The resolved recipe with every key, each on a line of its own; it repeats the run."""
    values = dataclasses.asdict(recipe)
    text: str = yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=10**6)
    return text
