"""The data files of the tools (`tools/*.yaml`), read and checked."""

from __future__ import annotations

import functools
import inspect
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.convert import transformations
from launcher.errors import RecipeError
from launcher.recipe.decode import KeyPath, dotted, keys
from launcher.recipe.yaml_text import NotYamlError, parse_yaml

Row = Mapping[str, Any]
Problem = tuple[KeyPath, str]
"""Where a data file is wrong, and how."""
_OURS = {dotted(path) for path in keys()}
FOLDER = Path(__file__).with_name("tools")
TEXTS = ("note", "differs", "lost", "needless")
"""Fields that say what becomes of a key."""
_OF_FILES = {"tool", "signs", "decisive", "method", "refuse", "keys", "lost", "needless"}
_OF_SECTIONS = {"include", "if", "otherwise"}
_OF_ROWS = {
    "if",
    "to",
    "set",
    "default",
    "origin",
    "least",
    "as",
    "values",
    "else",
    "active",
    "inactive",
    "also",
    "then",
    "by",
    "entries",
    *TEXTS,
}
_OUTCOMES = ("set", "else", "active", "inactive", "also")


@dataclass(frozen=True)
class Section:
    """Rows of a data file with a condition. otherwise: the row of each key if it does not hold."""

    rows: dict[str, list[Row]]
    condition: Row
    otherwise: Row | None


@dataclass(frozen=True)
class Tool:
    """A data file: how a tool's config is recognized, and what becomes of its keys."""

    name: str
    signs: tuple[str, ...]
    """Keys that only this tool has, or most of which it has; `*.KEY` is a key of any section."""
    decisive: tuple[str, ...]
    """Those of the signs that choose this file, where a tool has several."""
    method: list[Row]
    """What a config trains: the first of these cases that holds."""
    refuse: list[Row]
    """Conditions of configs that describe no training, each with its error message."""
    sections: dict[str, Section]
    lost: Mapping[str, str]
    needless: Mapping[str, str]
    """The other keys that are lost, or not needed, by the reason."""


@functools.cache
def tools() -> dict[Path, Tool]:
    """The heads of the data files of all tools whose configs can be converted, without the rows."""
    found = {file: read_tool(file, head=True) for file in sorted(FOLDER.glob("*.yaml"))}
    return {file: tool for file, tool in found.items() if tool.name}


def tool_of(given: Mapping[str, Any]) -> Tool | None:
    """The tool that a config is of, by its keys; None: of none."""
    inner = [name for value in given.values() if isinstance(value, dict) for name in value]
    names = [*given, *(f"*.{name}" for name in inner)]
    counts: Counter[str] = Counter()
    for tool in tools().values():
        counts[tool.name] += sum(name in tool.signs for name in names)
    best, count = counts.most_common(1)[0]
    own = [file for file, tool in tools().items() if tool.name == best]
    own.sort(key=lambda file: not any(name in names for name in tools()[file].decisive))
    return read_tool(own[0]) if count else None


def names_in(text: str) -> tuple[str, ...]:
    """Names with commas between them."""
    return tuple(part.strip() for part in text.split(","))


@functools.cache
def read_tool(file: Path, *, head: bool = False) -> Tool:
    """Reads a data file, or only what stands above its keys, which takes less time. Raises RecipeError
    with the file, the line and the key of what is wrong."""
    text = file.read_text(encoding="utf-8")
    try:
        read, lines = parse_yaml(text.partition("\nkeys:")[0] if head else text)
        read = read or {}
    except NotYamlError as error:
        raise RecipeError(f"{file.name}:{error.line}: {error}") from None
    sections: dict[str, Section] = {}
    problems: list[Problem] = [((name,), "no field of a data file") for name in {*read} - _OF_FILES]
    for number, case in enumerate(read.get("method", [])):
        problems += _of_ours(case.get("sets", {}), ("method", number))
    known: dict[str, tuple[str, str]] = {}
    for name, given in read.get("keys", {}).items():
        rows = {key: rows_of(value) for key, value in given.items() if key not in _OF_SECTIONS}
        shared = Section({}, {}, None)
        if (other := given.get("include")) is not None:
            shared = read_tool(file.with_name(f"{other}.yaml")).sections[name]
            both = {**shared.rows, **rows}
            rows = {key: _amended(shared.rows.get(key, []), rows.get(key, [])) for key in both}
        condition, otherwise = given.get("if", shared.condition), given.get("otherwise")
        sections[name] = Section(
            rows, condition, shared.otherwise if otherwise is None else otherwise
        )
        for names, row in rows.items():
            for each in names_in(names):
                if known.setdefault(each, (name, names)) != (name, names):
                    problems.append((("keys", name, names), f"{each} has another row"))
            problems += _of_rows(row, ("keys", name, names))
    for field in ("lost", "needless"):
        for reason, names in read.get(field, {}).items():
            twice = [each for each in names_in(names) if each in known]
            problems += [((field, reason), f"{each} has another row") for each in twice]
            known |= dict.fromkeys(names_in(names), (field, reason))
    if problems:
        raise RecipeError([_line(file, lines, *problem) for problem in problems])
    listed = {name: tuple(read.get(name, ())) for name in ("signs", "decisive")}
    return Tool(
        name=read.get("tool", ""),
        method=read.get("method", []),
        refuse=read.get("refuse", []),
        sections=sections,
        lost=read.get("lost", {}),
        needless=read.get("needless", {}),
        **listed,
    )


def _line(file: Path, lines: Mapping[KeyPath, int], path: KeyPath, what: str) -> str:
    known = (path[:end] for end in range(len(path), 0, -1) if path[:end] in lines)
    return f"{file.name}:{lines[next(known)]}: {' '.join(map(str, path))}: {what}"


def _amended(shared: list[Row], own: list[Row]) -> list[Row]:
    """A row of the included file, the last of whose alternatives has the fields of the own row."""
    if shared and len(own) == 1:
        return [*shared[:-1], {**shared[-1], **own[0]}]
    return own or shared


def rows_of(value: Any) -> list[Row]:
    """Alternatives of a row: one, several, or the key of the recipe that has the same meaning."""
    if isinstance(value, list):
        return value
    return [{"to": value} if isinstance(value, str) else value]


def _of_rows(rows: list[Row], path: KeyPath) -> Iterator[Problem]:
    for row in rows:
        if "by" in row:
            yield from _of_call(row, path)
            continue
        for name in {*row} - _OF_ROWS:
            yield path, f"{name}: no field of a row"
        for field, functions in (("as", transformations.VALUES), ("then", transformations.LATER)):
            if row.get(field) not in (None, *functions):
                yield path, f"{field}: {row[field]}: no transformation"
        yield from _of_ours({row["to"]} if "to" in row else (), path)
        outcomes = {key: row[key] for key in _OUTCOMES if key in row}
        for name, outcome in {**outcomes, **row.get("values", {})}.items():
            if isinstance(outcome, Mapping):
                yield from _of_ours(outcome, path)
            elif "to" not in row:
                yield path, f"{name}: {outcome}: without the field to, which key has this value?"
        for text in ("note", "differs"):
            if isinstance(row.get(text), Mapping):
                yield from _of_ours(row[text], path)
        for names, entry in row.get("entries", {}).items():
            yield from _of_rows(rows_of(entry), (*path, "entries", names))


def _of_call(row: Row, path: KeyPath) -> Iterator[Problem]:
    function = transformations.ROWS.get(row["by"])
    if function is None:
        yield path, f"by: {row['by']}: no transformation"
        return
    takes = [*inspect.signature(function).parameters][2:]
    for name in {*row} - {"by", "if", *takes}:
        yield path, f"{name}: {row['by']} takes {', '.join(takes) or 'no fields'}"


def _of_ours(given: Iterable[str], path: KeyPath) -> Iterator[Problem]:
    for key in {*given} - {*TEXTS} - _OURS:
        yield path, f"{key}: no key of a recipe"
