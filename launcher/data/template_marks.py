"""Where each message is in a rendered conversation.

A chat template is a Jinja program whose loops write one message after the other. A copy of the
template writes marks around what each pass of a loop writes. Its output without the marks must be
the output of the template itself.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass, field
from datetime import UTC, date, datetime

from launcher.errors import RecipeError

Span = tuple[int, int]

MESSAGE_NUMBER = "launcher_message"
"""Key of a message with its index, which the marks repeat."""
_TAG = re.compile(
    r"\{#.*?#\}|\{%[-+]?\s*(?P<name>for|endfor|macro|endmacro|generation|endgeneration)\b"
    r"(?P<rest>.*?)(?P<close>[-+]?%\})",
    re.DOTALL,
)
_MARK = re.compile("\x02(\\w+):(\\d*)\x03")
_GENERATION = "generation"
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


@dataclass(frozen=True)
class Layout:
    """The text of a conversation, and what wrote its parts."""

    text: str
    messages: dict[int, Span] = field(default_factory=dict)
    """By the index of a message: what the pass of a loop over it wrote."""
    generation: list[Span] = field(default_factory=list)
    """What `{% generation %}` encloses."""
    source: str | None = None
    """The template with marks that wrote it; None: the parts are not known."""

    def generated(self, index: int) -> bool:
        """Whether a message has a `{% generation %}` mark; true if its text is not known."""
        first, last = self.messages.get(index, (0, 0))
        within = any(start < last and end > first for start, end in self.generation)
        return within or index not in self.messages


@functools.lru_cache(maxsize=16)
def with_marks(template: str, *, loops: bool) -> str:
    """The template with marks at generation tags, and (loops) at each pass and the end of loops.

    Loops in macros are left alone: templates compare and trim what a macro returns.
    """
    open_loops: list[str | None] = []
    macros = count = 0

    def insert(tag: re.Match[str]) -> str:
        nonlocal macros, count
        name, mark, condition = tag["name"], "", "true"
        if name in ("macro", "endmacro"):
            macros += 1 if name == "macro" else -1
        elif name == "generation":
            mark = f"\x02{_GENERATION}:0\x03"
        elif name == "endgeneration":
            mark = f"\x02{_GENERATION}:\x03"
        elif name == "for":
            count += 1
            item = re.match(r"\s*(\w+)\s+in\b", tag["rest"])
            open_loops.append(str(count) if item and loops and not macros else None)
            if item and open_loops[-1]:
                value = f"{item[1]}.{MESSAGE_NUMBER}"
                condition, mark = f"{value} is defined", f"\x02{count}:{{{{ {value} }}}}\x03"
        elif name == "endfor" and open_loops and (loop := open_loops.pop()):
            mark = f"\x02{loop}:\x03"
        if not mark:
            return tag[0]
        # A block tag that ends like the tag before it removes the same white space after it
        return f"{tag[0]}{{% if {condition} %}}{mark}{{% endif {tag['close']}"

    return _TAG.sub(insert, template)


def read_marks(marked: str, source: str) -> Layout:
    """The layout of a text that `source`, a template of `with_marks`, wrote."""
    text, *rest = _MARK.split(marked)
    texts, length = [text], len(text)
    begun: dict[str, tuple[int, int]] = {}
    messages: dict[int, Span] = {}
    generation: list[Span] = []
    for name, index, text in zip(rest[::3], rest[1::3], rest[2::3], strict=True):
        if name in begun:
            number, start = begun.pop(name)
            first, last = messages.get(number, (0, 0))
            if name == _GENERATION:
                generation.append((start, length))
            elif length - start > last - first:  # another loop may only look at the message
                messages[number] = start, length
        if index:
            begun[name] = int(index), length
        texts.append(text)
        length += len(text)
    return Layout("".join(texts), messages, generation, source)
