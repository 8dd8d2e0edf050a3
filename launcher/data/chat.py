"""Conversations into tokens, with the loss on what the assistant says.

Two ways show which characters of a rendered conversation are the assistant's. A template may mark
them: `{% generation %} ... {% endgeneration %}`. Otherwise the conversation is rendered again with
a placeholder for each answer, and both renderings must be the same apart from the answers. Nothing
is guessed: a row that cannot be verified is an error.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from launcher.data.tokenizer import Ids
from launcher.errors import RecipeError
from launcher.training.loss import IGNORED

Message = dict[str, Any]
Span = tuple[int, int]

_ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")
_SHAREGPT = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "bot", "model"), "assistant"),
    "system": "system",
    **dict.fromkeys(("tool", "observation", "function_response"), "tool"),
}
_SPOKEN = ("tool_calls", "function_call", "reasoning_content", "reasoning", "thinking")
"""What an assistant says besides its content."""
_MARKS = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_THOUGHT = re.compile(r"\s*<think>(.*?)</think>(.*)", re.DOTALL)
_ADVICE = (
    "put {% generation %} and {% endgeneration %} around what the assistant says in the template, "
    "and name that file in data.chat_template"
)


class RowError(ValueError):
    """The problem of a row, without its place."""


def read_messages(value: Any, column: str) -> list[Message]:
    """Messages for a template, from OpenAI's `messages` (role, content) or ShareGPT's
    `conversations` (from, value). Raises RowError.

    Text parts are joined. Keys without a value, which the structs of a parquet file have, are
    dropped; other keys stay.
    """
    if isinstance(value, list) and value and all(isinstance(turn, dict) for turn in value):
        return [_message(turn, f"message {number}") for number, turn in enumerate(value, start=1)]
    raise RowError(
        f"column {column!r} must hold a list of messages, each with role and content (or from and "
        f"value); got {_shown(value)}"
    )


def _message(turn: Message, what: str) -> Message:
    message = {key: content for key, content in turn.items() if content is not None}
    if "role" not in message and "from" in message:
        speaker = message.pop("from")
        if speaker not in _SHAREGPT:
            roles = ", ".join(_SHAREGPT)
            raise RowError(f"{what}: unknown role {speaker!r} in `from`; there are {roles}")
        message = {"role": _SHAREGPT[speaker], "content": message.pop("value", None), **message}
    role, content = message.get("role"), message.get("content")
    if role not in _ROLES:
        got = "no role" if role is None else f"unknown role {role!r}"
        raise RowError(f"{what}: {got}; there are {', '.join(_ROLES)}")
    if isinstance(content, list):
        content = "".join(_part_text(part, what) for part in content)
    if content is None and any(message.get(key) for key in _SPOKEN):
        content = ""
    if not isinstance(content, str):
        got = _shown(content)
        raise RowError(f"{what}: content must be text, or a list of text parts; got {got}")
    return {**message, "content": content}


def _part_text(part: Any, what: str) -> str:
    text = part.get("text") if isinstance(part, dict) else part
    if isinstance(text, str):
        return text
    kind = part.get("type", "no text") if isinstance(part, dict) else type(part).__name__
    raise RowError(f"{what}: a content part is {kind!r}; only text is trained on")


def _shown(value: Any) -> str:
    return "nothing" if value is None else "an empty list" if value == [] else type(value).__name__


def read_tools(value: Any) -> list[Any] | None:
    """A row's `tools`: a list, or a list as JSON. Raises RowError."""
    if isinstance(value, str) and value.strip():
        try:
            value = json.loads(value)
        except ValueError as error:
            raise RowError(f"column 'tools' is not JSON: {error}") from None
    if value and not isinstance(value, list):
        raise RowError(f"column 'tools' must hold a list; got {_shown(value)}")
    return value or None


@dataclass(frozen=True)
class Rendered:
    """A conversation as text, and the spans of it that carry loss."""

    text: str
    spans: list[Span]
    marked: bool
    """By the template itself. Otherwise `ChatTemplate.tokens` adds the end of each turn."""
    closed: bool
    """The last turn is the assistant's."""


class ChatTemplate:
    """A tokenizer's chat template, or one that replaces it."""

    def __init__(self, tokenizer: Any, name: str, template: str | None) -> None:
        """name: of the tokenizer, for messages. Raises RecipeError if no template can be used."""
        self._tokenizer, self._template = tokenizer, template
        if template is None and not tokenizer.chat_template:
            raise RecipeError(
                f"data.tokenizer: {name}: has no chat template; give a file with one as "
                "data.chat_template"
            )
        if not tokenizer.is_fast:
            raise RecipeError(
                f"data.tokenizer: {name}: is a slow tokenizer ({type(tokenizer).__name__}), which "
                "does not say where in the text a token stands, and so not which tokens are the "
                "assistant's; use one with a tokenizer.json"
            )
        added = tokenizer.added_tokens_decoder.items()
        special = (number for number, token in added if token.special)
        self._special = {*tokenizer.all_special_ids, *special}

    def render(
        self, messages: list[Message], tools: list[Any] | None, *, loss_from: int = 0
    ) -> Rendered:
        """Text and spans. loss_from: index of the first message that may carry loss.

        Raises RowError.
        """
        turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        if not any(index >= loss_from for index in turns):
            raise RowError("no assistant turn, so nothing to learn from")
        closed = turns[-1] == len(messages) - 1
        if _MARKS.search(self._source(tools)):
            text, spans = self._marked(messages, tools, turns, loss_from)
            return Rendered(text, spans, marked=True, closed=closed)
        text, _ = self._apply(messages, tools)
        found = None
        if not any(messages[index].get(key) for index in turns for key in _SPOKEN):
            found = self._verified(messages, tools, text, turns, thoughts=False)
            if found is None:
                found = self._verified(messages, tools, text, turns, thoughts=True)
        if found is None:
            found = self._by_turns(messages, tools, text, turns)
        spans = [span for index, span in zip(turns, found, strict=True) if index >= loss_from]
        return Rendered(text, spans, marked=False, closed=closed)

    def tokens(self, rendered: list[Rendered]) -> list[tuple[Ids, Ids]]:
        """(ids, labels) of each conversation; labels are IGNORED where there is no loss.

        Without marks, the special token that ends a turn also carries loss, or the model would
        never stop: the one that follows the answer, possibly after white space. If there is none
        after the last turn, all that the template puts there carries loss, and so does the
        eos_token, which is appended. Raises RecipeError if the tokenizer has no eos_token.
        """
        encoded = self._tokenizer(
            [one.text for one in rendered],
            add_special_tokens=False,
            return_attention_mask=False,
            return_token_type_ids=False,
            return_offsets_mapping=True,
            verbose=False,
        )
        rows = zip(rendered, encoded["input_ids"], encoded["offset_mapping"], strict=True)
        return [self._labelled(*row) for row in rows]

    def _labelled(
        self, rendered: Rendered, token_ids: list[int], offsets: list[Span]
    ) -> tuple[Ids, Ids]:
        ids = np.array(token_ids, dtype=np.int32)
        ends = np.maximum.accumulate(np.array([end for _, end in offsets], dtype=np.int64))
        # Some tokenizers leave white space out of the offsets, so a token starts where the one
        # before it ends. All tokens of one character have its offsets.
        before = np.append(0, ends[:-1])[: len(ends)]
        starts = np.maximum.accumulate(np.where(np.diff(ends, prepend=-1) > 0, before, 0))
        learned = np.zeros(len(ids), dtype=bool)
        for start, end in rendered.spans:
            learned |= (starts < end) & (ends > start)
        if rendered.marked:
            return ids, np.where(learned, ids, np.int32(IGNORED)).astype(np.int32)
        special = np.isin(ids, list(self._special))
        for _, end in rendered.spans:
            after = int(np.searchsorted(starts, end))  # the first token after the answer
            stop = after
            while stop < len(ids) and not special[stop]:
                if rendered.text[starts[stop] : ends[stop]].strip():
                    break
                stop += 1
            if stop < len(ids) and special[stop]:
                learned[after : stop + 1] = True
            elif rendered.closed and end == rendered.spans[-1][1]:
                stops = np.flatnonzero(special[after:])
                if stops.size:
                    learned[after : after + int(stops[0]) + 1] = True
                else:
                    ids = np.append(ids, np.int32(self._end))
                    learned = np.append(learned, True)
                    learned[after:] = True
        return ids, np.where(learned, ids, np.int32(IGNORED)).astype(np.int32)

    @property
    def _end(self) -> int:
        if self._tokenizer.eos_token_id is None:
            raise RecipeError(
                "data.chat_template: no special token ends the assistant's turn, and the tokenizer "
                "has no eos_token: the model would not learn to stop; end the turn with one in the "
                "template"
            )
        return int(self._tokenizer.eos_token_id)

    def _source(self, tools: list[Any] | None) -> str:
        return str(self._tokenizer.get_chat_template(self._template, tools))

    def _apply(
        self,
        messages: list[Message],
        tools: list[Any] | None,
        *,
        marks: bool = False,
        prompt: bool = False,
    ) -> tuple[str, list[Span]]:
        """The rendered text, and the spans of the template's marks."""
        from jinja2.exceptions import TemplateError, TemplateSyntaxError
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            texts, spans = render_jinja_template(
                conversations=[messages],
                tools=tools,
                chat_template=self._source(tools),
                return_assistant_tokens_mask=marks,
                add_generation_prompt=prompt,
                **self._tokenizer.special_tokens_map,
            )
        except TemplateSyntaxError as error:
            own = self._template is None
            where = "data.tokenizer: its chat template" if own else "data.chat_template"
            raise RecipeError(f"{where}: line {error.lineno}: {error.message}") from None
        except TemplateError as error:
            raise RowError(f"the chat template refuses this conversation: {error}") from None
        except ImportError:
            raise
        except Exception as error:  # a template may fail in any way on an unexpected row
            what = f"{type(error).__name__}: {error}"
            raise RowError(f"the chat template fails on this conversation: {what}") from None
        return texts[0], list(spans[0]) if marks else []

    def _marked(
        self, messages: list[Message], tools: list[Any] | None, turns: list[int], loss_from: int
    ) -> tuple[str, list[Span]]:
        text, marks = self._apply(messages, tools, marks=True)
        marks = [(start, end) for start, end in marks if end > start]
        if not marks:
            raise RowError(
                "the template's {% generation %} marks hold nothing here; are they where the "
                "assistant speaks?"
            )
        if turns[0] < loss_from:
            if len(marks) != len(turns):
                raise RowError(
                    f"{len(turns)} assistant turns, but {len(marks)} {{% generation %}} marks: "
                    "which are the prompt's?"
                )
            marks = marks[sum(index < loss_from for index in turns) :]
        return text, marks

    def _verified(
        self,
        messages: list[Message],
        tools: list[Any] | None,
        text: str,
        turns: list[int],
        *,
        thoughts: bool,
    ) -> list[Span] | None:
        """The spans of the answers in `text`, found with placeholders; None if that fails.

        thoughts: an answer `<think>A</think>B` gets two placeholders, for templates that drop A
        from earlier turns.
        """
        probe, holders = list(messages), []
        for index in turns:
            content, first = messages[index]["content"], f"Qz{index}aZq"
            if thoughts and (thought := _THOUGHT.fullmatch(content)):
                second = f"Qz{index}bZq"
                holders.append([(first, thought[1]), (second, thought[2])])
                content = f"<think>\n{first}\n</think>\n\n{second}"
            else:
                holders.append([(first, content)])
                content = first
            probe[index] = {**messages[index], "content": content}
        if "Qz" in text and any(holder in text for turn in holders for holder, _ in turn):
            return None
        try:
            probed, _ = self._apply(probe, tools)
        except RowError:
            return None
        literals, contents, groups, at = [], [], [], 0
        for group, turn in enumerate(holders):
            for holder, content in turn:
                place = probed.find(holder, at)
                if probed.count(holder) > 1 or (place < 0 and holder == turn[-1][0]):
                    return None
                if place >= 0:  # otherwise the template dropped the thought
                    literals.append(probed[at:place])
                    contents.append(content)
                    groups.append(group)
                    at = place + len(holder)
        found = _locate(text, [*literals, probed[at:]], contents)
        if found is None:
            return None
        spans: list[Span] = []
        for group in range(len(holders)):
            own = [number for number, other in enumerate(groups) if other == group]
            start = found[own[0]][0]
            if len(own) > 1:  # the model also says the tag before its thought
                opening = re.search(r"<think>\s*$", literals[own[0]])
                start -= len(opening[0]) if opening else 0
            spans.append((start, found[own[-1]][1]))
        return spans

    def _by_turns(
        self, messages: list[Message], tools: list[Any] | None, text: str, turns: list[int]
    ) -> list[Span]:
        """The spans of the answers in `text`, from the generation prompt to the end of the turn.

        Each prefix of the conversation must render to a prefix of the text. Covers tool calls and
        reasoning. Raises RowError.
        """
        spans = []
        for index in turns:
            try:
                bare, _ = self._apply(messages[:index], tools)
                before, _ = self._apply(messages[:index], tools, prompt=True)
                until, _ = self._apply(messages[: index + 1], tools)
            except RowError:
                bare = before = until = ""
            # Without a generation prompt, the heading of the turn would count as the answer
            known = len(bare) < len(before) < len(until)
            if not (known and text.startswith(before) and text.startswith(until)):
                raise RowError(
                    f"message {index + 1}: which part of the rendered text is the assistant's "
                    f"cannot be verified; {_ADVICE}"
                )
            spans.append((len(before), self._without_ending(until, len(before))))
        return spans

    def _without_ending(self, text: str, start: int) -> int:
        """Where the special token that ends the turn starts, or the end of the text."""
        end = len(text.rstrip())
        special = [self._tokenizer.convert_ids_to_tokens(number) for number in self._special]
        for token in sorted(special, key=len, reverse=True):
            if token and text.endswith(token, start, end):
                return end - len(token)
        return end


def _locate(text: str, literals: list[str], contents: list[str]) -> list[Span] | None:
    """The spans of the contents if `text` is the literals with the contents, as they are or
    stripped, between them."""
    if not text.startswith(literals[0]):
        return None
    at, spans = len(literals[0]), []
    for number, (content, literal) in enumerate(zip(contents, literals[1:], strict=True), start=1):
        stripped = (content.strip(), content.lstrip(), content.rstrip())
        for value in (content, *stripped, content.strip("\n"), content.lstrip("\n")):
            end = at + len(value)
            following = end + len(literal)
            last = number == len(contents)
            matches = text.startswith(value, at) and text.startswith(literal, end)
            if matches and (not last or following == len(text)):
                break
        else:
            return None
        spans.append((at, end))
        at = following
    return spans
