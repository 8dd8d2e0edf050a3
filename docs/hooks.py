"""Generated parts of the documentation: mkdocs calls `on_page_markdown` for each page.

`<!-- generated: recipe -->` is replaced by tables of all recipe keys,
`<!-- generated: commands -->` by the help of all commands, and `<!-- generated: names -->` by a table of
other tools' names for keys.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

import typer.main
from click import Context

from launcher.cli.main import app
from launcher.recipe.decode import json_schema
from launcher.recipe.other_names import ABSENT, NAMES
from launcher.recipe.section import LARGEST_FLOAT, LARGEST_INT

UNLIMITED = (LARGEST_INT, LARGEST_FLOAT)
"""Bounds that only keep numbers from overflowing."""
COMMANDS = r"(launcher|torchrun|make|python|pip|touch|source) "
"""Code that begins with one of these words is highlighted as that of a shell."""


def on_config(config: Any) -> Any:
    """Shows the version below each page."""
    config.copyright = f"launcher {version('launcher')}"
    return config


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replaces the comments above with the generated text."""
    tables = ("recipe", recipe_reference), ("commands", command_reference), ("names", other_names)
    markdown = re.sub(rf"^```\n(?={COMMANDS})", "```bash\n", markdown, flags=re.MULTILINE)
    for name, generate in tables:
        comment = f"<!-- generated: {name} -->"
        if comment in markdown:
            markdown = markdown.replace(comment, "\n".join(generate()))
    return markdown


def recipe_reference() -> Iterator[str]:
    """A heading, a description and a table for each section of a recipe."""
    schema = json_schema()
    definitions = schema["$defs"]
    sections = [(name, _section_of(key)) for name, key in schema["properties"].items()]
    for name, section in sections:
        yield from _section(name, definitions[section], schema["properties"][name])
        for key, value in definitions[section]["properties"].items():
            inner = _section_of(value)
            if inner is not None:
                below = ".NAME" if inner == "Source" else ""
                yield from _section(f"{name}.{key}{below}", definitions[inner], value)


def _section_of(key: dict[str, Any]) -> str | None:
    """The name (in the schema's `$defs`) of the section that a key may contain, if any."""
    if "$ref" in key:
        return str(key["$ref"]).rpartition("/")[2]
    inside = (key.get("additionalProperties"), key.get("items"))
    kinds = [*key.get("anyOf", []), *(each for each in inside if isinstance(each, dict))]
    return next((name for name in map(_section_of, kinds) if name is not None), None)


def _section(path: str, section: dict[str, Any], key: dict[str, Any]) -> Iterator[str]:
    yield f"\n## {path}\n"
    yield section["description"]
    if {"type": "null"} in key.get("anyOf", []):
        yield "May be `null`" + (", the default." if key.get("default") is None else ".")
    yield f"\n{_row('key', 'default', 'values', 'what it does')}\n|---|---|---|---|"
    for name, value in section["properties"].items():
        required = name in section.get("required", [])
        default = "required" if required else f"`{json.dumps(value.get('default'))}`"
        anchor = f"`{name}`{{ #{path}.{name} }}"
        yield _row(anchor, default, _values(value), value.get("description", ""))


def _row(*cells: str) -> str:
    """A row of a Markdown table."""
    escaped = (cell.replace("|", "\\|").replace("\n", " ") for cell in cells)
    return f"| {' | '.join(escaped)} |"


def _values(key: dict[str, Any]) -> str:
    """The valid values of a key, as Markdown."""
    if "anyOf" in key:
        return " or ".join(dict.fromkeys(_values(one) for one in key["anyOf"]))
    if "enum" in key or "const" in key:
        return ", ".join(f"`{value}`" for value in key.get("enum", [key.get("const")]))
    if "$ref" in key:
        return "a section"
    kind = key.get("type", "any value")
    if kind == "array":
        return "a list"
    words = {"integer": "whole number", "boolean": "`true` or `false`", "string": "text"}
    words |= {"null": "`null`", "object": "a section"}
    bounds = {
        "minimum": "from",
        "exclusiveMinimum": "above",
        "maximum": "to",
        "exclusiveMaximum": "below",
    }
    limits = [
        f"{word} {key[name]:,}"
        for name, word in bounds.items()
        if name in key and key[name] not in UNLIMITED
    ]
    return " ".join([words.get(kind, kind), *limits])


def command_reference() -> Iterator[str]:
    """A heading, the help text and a table of arguments and switches for each command."""
    for name, command in typer.main.get_command(app).commands.items():
        context = Context(command, info_name=f"launcher {name}")
        yield f"\n## launcher {name}\n"
        yield f"```text\n{command.get_usage(context)}\n```\n"
        yield from _help(command.help or "")
        yield f"\n{_row('argument', 'what it does')}\n|---|---|"
        for title, rows in command.descriptions(context).items():
            if "Slurm" not in title:
                yield from (_row(f"`{written}`", text) for written, text in rows)
        if name == "submit":
            yield "\nThe keys of the section [slurm](recipe.md#slurm) are arguments, too."


def other_names() -> Iterator[str]:
    """A table of the names that other tools have for keys."""
    yield f"{_row('here', 'elsewhere')}\n|---|---|"
    for key, names in NAMES.items():
        yield _row(f"`{key}`", ", ".join(f"`{name}`" for name in names.split()))
    yield "\n### Names without an equal\n"
    yield f"{_row('what differs', 'elsewhere')}\n|---|---|"
    for what, names in ABSENT.items():
        yield _row(what, ", ".join(f"`{name}`" for name in names.split()))


def _help(text: str) -> Iterator[str]:
    """The help text of a command. Paragraphs that start with `\\b` are examples."""
    for paragraph in text.split("\n\n"):
        if paragraph.startswith("\b"):
            title, _, lines = paragraph.removeprefix("\b\n").partition("\n")
            yield f"\n{title}\n\n```text\n{lines}\n```"
        else:
            yield f"\n{paragraph}\n"
