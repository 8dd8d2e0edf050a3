"""Applies the rows of a tool's data file (`tools/*.yaml`) to a config. docs/engineering/converting.md has the fields."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

from launcher.convert.conversion import Conversion, is_off
from launcher.convert.data_sets import KINDS, DataSet, data_set, set_train
from launcher.convert.tool_files import TEXTS, Row, Tool, names_in, rows_of
from launcher.convert.transformations import LATER, ROWS, VALUES
from launcher.errors import RecipeError
from launcher.recipe.decode import dotted, keys

_OURS = {dotted(path) for path in keys()}
_REFERENCE = re.compile(r"\$\{([\w.]+)\}")


def convert(c: Conversion, tool: Tool) -> None:
    """Applies all rows of a tool, from the first to the last. Raises RecipeError if the config is of
    no training."""
    whole = dict(c.given)
    c.given = {name: _resolved(value, whole) for name, value in whole.items()}
    for case in tool.refuse:
        if _holds(c, case["if"]):
            raise RecipeError(case["message"])
    case = next((case for case in tool.method if _holds(c, case.get("if", {}))), {})
    c.method = case.get("is", "sft")
    for key, value in case.get("sets", {}).items():
        c.set(key, value)
    for section in tool.sections.values():
        holds = _holds(c, section.condition)
        for names, rows in section.rows.items():
            if holds:
                apply(c, names, rows)
            elif section.otherwise is not None:
                apply(c, names, [section.otherwise])
    for field, reasons in (("lost", tool.lost), ("needless", tool.needless)):
        for reason, listed in reasons.items():
            for name in names_in(listed):
                apply(c, name, [{field: reason}])


def apply(c: Conversion, names: str, rows: Iterable[Row]) -> None:
    """Applies the first of these rows whose condition holds to these keys."""
    for row in rows:
        if _holds(c, row.get("if", {})):
            if "*" in names:
                for name in list(c.rest()):
                    if fnmatchcase(name, names) and not is_off(c.given[name]):
                        _act(c, (name,), row)
            else:
                _act(c, names_in(names), row)
            return


def _act(c: Conversion, names: tuple[str, ...], row: Row) -> None:
    if "by" in row:
        arguments = {key: value for key, value in row.items() if key not in ("by", "if")}
        ROWS[row["by"]](c, names, **arguments)
        return
    value = c.get(*names)
    origin = c.names(*names)
    if "least" in row and not (type(value) is int and value >= row["least"]):
        value = None
    if value is None and "default" in row:
        value, origin = row["default"], origin or c.names(row.get("origin", ""))
    if "as" in row:
        value = VALUES[row["as"]](c, names, value)
    if value is None:
        return
    if "entries" in row:
        _entries(c, names, row, value, origin)
        return
    outcome: Any = {}
    found = [entry for text, entry in row.get("values", {}).items() if _in_table(value, text)]
    if found or "else" in row:
        outcome = found[0] if found else row["else"]
    elif "active" in row or "inactive" in row:
        outcome = row.get("inactive" if is_off(value) else "active", {})
    elif "values" in row or "set" in row:
        outcome = row.get("set", {})
    elif "to" in row:
        outcome = "{value}"
    elif is_off(value):
        outcome = {"needless": row["needless"]} if "needless" in row else {}
    else:
        outcome = {text: row[text] for text in TEXTS if text in row}
    if outcome == {}:
        return
    outcome = outcome if isinstance(outcome, Mapping) else {row["to"]: outcome}
    _set(c, names, {**row.get("also", {}), **outcome}, value, origin)
    if "to" in row:
        _tell(c, names, row, row["to"], value, origin)
    if "then" in row:
        LATER[row["then"]](c, origin)


def _entries(c: Conversion, names: tuple[str, ...], row: Row, value: Any, origin: str) -> None:
    """Data sets, each of which is a small config with rows of its own."""
    name = next((name for name in names if c.at(name) is not None), names[0])
    sets: list[DataSet] = []
    for given in value if isinstance(value, list) else [value]:
        given = {"path": given, "label": ""} if isinstance(given, str) else given
        if isinstance(given, dict):
            plain = {str(key): inner for key, inner in given.items() if inner is not None}
            entry = Conversion(c.tool, plain, c.folder, c.ranks, c.command_method)
            entry.method = c.method
            if c.method in KINDS:
                entry.set("data.kind", KINDS[c.method], "type" if "type" in plain else "")
            for keys_of_it, rows in row["entries"].items():
                apply(entry, keys_of_it, rows_of(rows))
            sets += data_set(c, entry, name)
    if row.get("to", "data.train") == "data.train":
        set_train(c, sets, origin or name)
    elif sets:
        c.set(row["to"], [each.file for each in sets], origin)


def _set(
    c: Conversion, names: tuple[str, ...], outcome: Mapping[str, Any], value: Any, origin: str
) -> None:
    """Sets the keys of an outcome, and then records its texts."""
    ours = [key for key in outcome if key not in TEXTS]
    for key in ours:
        c.set(key, _filled(outcome[key], names, value), origin)
    _tell(c, names, outcome, ours[-1] if ours else "", value, origin)


def _tell(
    c: Conversion, names: tuple[str, ...], row: Mapping[str, Any], key: str, value: Any, origin: str
) -> None:
    """Records the texts of a row or of an outcome. key: the key of the recipe that they are about."""
    name = next((name for name in names if c.at(name) is not None), origin or names[0])
    texts = {text: _filled(row[text], names, value) for text in TEXTS if text in row}
    for about, text in _by_key(texts.get("note"), key).items():
        c.note(about, text)
    for about, text in _by_key(texts.get("differs"), key).items():
        c.differ(about, text, "" if c.origin(about) == origin else origin)
    if "lost" in texts:
        c.lose(name, texts["lost"])
    if "needless" in texts:
        c.skip(texts["needless"], *names)


def _by_key(text: Any, key: str) -> Mapping[str, str]:
    if isinstance(text, Mapping):
        return text
    return {} if text is None else {key: text}


def _filled(template: Any, names: tuple[str, ...], value: Any) -> Any:
    """A text in which {value} and {name} stand for a key's value and name; `{value}` alone is itself."""
    if template == "{value}":
        return value
    if isinstance(template, str):
        return template.replace("{value}", str(value)).replace("{name}", names[0])
    if isinstance(template, Mapping):
        return {key: _filled(inner, names, value) for key, inner in template.items()}
    return template


def _in_table(value: Any, text: str) -> bool:
    return any(fnmatchcase(str(value).lower(), name) for name in names_in(text))


def _holds(c: Conversion, condition: Mapping[str, Any]) -> bool:
    return all(_is(_fact(c, name), expected) for name, expected in condition.items())


def _fact(c: Conversion, name: str) -> Any:
    """What a condition is about: a key of the recipe, a key of the tool, or a word for both."""
    if "." in name and name in _OURS:
        value = c.values.get(name)
        return "null" if value is None and name in c.values else value
    facts = {
        "method": c.method,
        "method of the command": c.command_method,
        "evaluates": c.evaluates,
        "shows images": c.shows_images,
        "number of ranks": c.ranks,
        "several data sets": len(c.values.get("data.train", ())) > 1,
    }
    return facts[name] if name in facts else c.at(*names_in(name))


def _is(value: Any, expected: Any) -> bool:
    if isinstance(expected, list):
        return any(_is(value, each) for each in expected)
    if expected in ("given", "missing"):
        return (value is None) is (expected == "missing")
    if expected in ("active", "inactive"):
        return is_off(value) is (expected == "inactive")
    values = value if isinstance(value, list) else [value]
    return any(fnmatchcase(str(each).lower(), str(expected).lower()) for each in values)


def _resolved(value: Any, whole: Mapping[str, Any], depth: int = 5) -> Any:
    """A value in which references to keys of the config, `${key}`, have their values."""
    if isinstance(value, dict):
        return {key: _resolved(inner, whole, depth) for key, inner in value.items()}
    if isinstance(value, list):
        return [_resolved(inner, whole, depth) for inner in value]
    if not isinstance(value, str) or depth == 0:
        return value
    alone = _REFERENCE.fullmatch(value)
    if alone is not None:
        return _resolved(_at(whole, alone[1]), whole, depth - 1)
    return _REFERENCE.sub(lambda match: str(_resolved(match[0], whole, depth - 1)), value)


def _at(whole: Any, key: str) -> Any:
    """The value of a key with points; the reference itself, if there is none."""
    for part in key.split("."):
        if not isinstance(whole, Mapping) or part not in whole:
            return f"${{{key}}}"
        whole = whole[part]
    return whole
