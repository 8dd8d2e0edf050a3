"""The text of a chat template: where it is read, the variables that it reads, and its date."""

from __future__ import annotations

import functools
import json
import os
import re
from datetime import UTC, date, datetime

from launcher.errors import RecipeError
from launcher.recipe.template_names import template_file

_GENERATION_TAG = re.compile(r"\{%[-+]?\s*(?:end)?generation\s*[-+]?%\}")
_DATE = re.compile(r"\bstrftime_now\(\s*(['\"])((?:(?!\1)[^\\])*)\1\s*\)")


def today() -> str:
    """YYYY-MM-DD, in UTC."""
    return datetime.now(UTC).date().isoformat()


def uses_tools(template: str) -> bool:
    """Whether a template reads the variable `tools`; true if it is no template of Jinja, which
    rendering reports."""
    names = variables(template)
    return names is None or "tools" in names


@functools.lru_cache(maxsize=16)
def variables(template: str) -> frozenset[str] | None:
    """The variables that a template reads and does not set; None if it is no template of Jinja."""
    from jinja2 import Environment, TemplateSyntaxError, meta

    try:
        parsed = Environment(extensions=["jinja2.ext.loopcontrols"]).parse(
            _GENERATION_TAG.sub("", template)
        )
    except TemplateSyntaxError:
        return None
    return frozenset(meta.find_undeclared_variables(parsed))


def uses_date(template: str) -> bool:
    """Whether a template prints today's date."""
    return "strftime_now(" in template


@functools.lru_cache(maxsize=16)
def fix_date(template: str, day: str) -> str:
    """The template with `day` (YYYY-MM-DD) in place of today's date. Raises RecipeError if it
    computes the format of the date."""
    try:
        at = date.fromisoformat(day)
    except ValueError as error:
        raise RecipeError(f"data.date: {day}: {error}") from None
    fixed = _DATE.sub(lambda call: repr(at.strftime(call[2])), template)
    if uses_date(fixed):
        what = "its format must be a text, so that a run can use the same date on every day"
        raise RecipeError(f"data.chat_template: strftime_now(...): {what}")
    return fixed


def read_template(value: str) -> str:
    """The chat template of a name or in a file: its text, or the `chat_template` of JSON, as processors
    have it. Raises RecipeError."""
    file = template_file(value)
    if os.path.exists(file) and not os.path.isfile(file):  # a pipe would block
        raise RecipeError(f"data.chat_template: {file}: is not a regular file")
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        problem = "not UTF-8 text" if isinstance(error, ValueError) else error.strerror
        raise RecipeError(f"data.chat_template: {file}: cannot be read: {problem}") from None
    try:
        content = json.loads(text)
    except ValueError:
        return text
    template = content.get("chat_template") if isinstance(content, dict) else None
    if not isinstance(template, str):
        what = "is JSON without a text chat_template; give a file with the template alone"
        raise RecipeError(f"data.chat_template: {file}: {what}")
    return template
