"""Conversations into tokens, with the loss on what the assistant says.

Which characters of a rendered conversation the assistant wrote is known in one of two ways. A template may mark them:
`{% generation %} ... {% endgeneration %}`. Where it does not, the conversation is rendered a second time with a
placeholder in the place of each answer, and the two renderings must be the same but for these: then, and only then, the
places are known. Nothing is guessed; a row that cannot be verified is an error.
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
"""What an assistant says beside its content."""
_MARKS = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_THOUGHT = re.compile(r"\s*<think>(.*?)</think>(.*)", re.DOTALL)
_ADVICE = (
    "put {% generation %} and {% endgeneration %} around what the assistant says in the template, "
    "and name that file in data.chat_template"
)


class RowError(ValueError):
    """What is wrong with a row, without where it is."""


def read_messages(value: Any, column: str) -> list[Message]:
    """OpenAI's `messages` (role, content) or ShareGPT's `conversations` (from, value) as messages that templates take.

    Content in text parts is joined; keys without a value (a parquet file's structs have them) are left out, others stay.
    Raises RowError.
    """
    if (
        not isinstance(value, list)
        or not value
        or not all(isinstance(turn, dict) for turn in value)
    ):
        raise RowError(
            f"column {column!r} must hold a list of messages, each with role and content (or from and value); got {_shown(value)}"
        )
    return [_message(turn, f"message {number}") for number, turn in enumerate(value, start=1)]


def _message(turn: Message, what: str) -> Message:
    message = {key: content for key, content in turn.items() if content is not None}
    if "role" not in message and "from" in message:
        speaker = message.pop("from")
        if speaker not in _SHAREGPT:
            raise RowError(
                f"{what}: unknown role {speaker!r} in `from`; there are {', '.join(_SHAREGPT)}"
            )
        message = {"role": _SHAREGPT[speaker], "content": message.pop("value", None), **message}
    role, content = message.get("role"), message.get("content")
    if role not in _ROLES:
        got = "no role" if role is None else f"unknown role {role!r}"
        raise RowError(f"{what}: {got}; there are {', '.join(_ROLES)}")
    if isinstance(content, list):
        for part in content:
            if not isinstance(part, str) and not (
                isinstance(part, dict) and isinstance(part.get("text"), str)
            ):
                kind = (
                    part.get("type", "no text") if isinstance(part, dict) else type(part).__name__
                )
                raise RowError(f"{what}: a content part is {kind!r}; only text is trained on")
        content = "".join(part if isinstance(part, str) else part["text"] for part in content)
    if content is None and any(message.get(key) for key in _SPOKEN):
        content = ""
    if not isinstance(content, str):
        raise RowError(
            f"{what}: content must be text, or a list of text parts; got {_shown(content)}"
        )
    return {**message, "content": content}


def _shown(value: Any) -> str:
    return "nothing" if value is None else "an empty list" if value == [] else type(value).__name__


def read_tools(value: Any) -> list[Any] | None:
    """A row's `tools`: a list, or one written as JSON. Raises RowError."""
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
    """A conversation as text, and which of its characters carry loss."""

    text: str
    spans: list[Span]
    marked: bool
    """By the template itself. Else the end of a turn is still to be added."""
    closed: bool
    """The last turn is the assistant's."""


class ChatTemplate:
    """A tokenizer's chat template, or one in its place."""

    def __init__(self, tokenizer: Any, name: str, template: str | None) -> None:
        """name: of the tokenizer, for messages. Raises RecipeError where there is no template, or no way to use it."""
        self._tokenizer, self._template = tokenizer, template
        if template is None and not tokenizer.chat_template:
            raise RecipeError(
                f"data.tokenizer: {name}: has no chat template; give a file with one as data.chat_template"
            )
        if not tokenizer.is_fast:
            raise RecipeError(
                f"data.tokenizer: {name}: is a slow tokenizer ({type(tokenizer).__name__}), which does not say where in the text a token "
                "stands, and so not which tokens are the assistant's; use one with a tokenizer.json"
            )
        added = tokenizer.added_tokens_decoder.items()
        self._special = {
            *tokenizer.all_special_ids,
            *(number for number, token in added if token.special),
        }

    def render(
        self, messages: list[Message], tools: list[Any] | None, *, loss_from: int = 0
    ) -> Rendered:
        """Text and spans. loss_from: number of the first message that may carry loss. Raises RowError."""
        turns = [
            number for number, message in enumerate(messages) if message["role"] == "assistant"
        ]
        if not any(number >= loss_from for number in turns):
            raise RowError("no assistant turn, so nothing to learn from")
        closed = turns[-1] == len(messages) - 1
        if _MARKS.search(self._source(tools)):
            text, marks = self._fill(messages, tools, marks=True)
            marks = [span for span in marks if span[1] > span[0]]
            if not marks:
                raise RowError(
                    "the template's {% generation %} marks hold nothing here; are they where the assistant speaks?"
                )
            if turns[0] < loss_from:
                if len(marks) != len(turns):
                    raise RowError(
                        f"{len(turns)} assistant turns, but {len(marks)} {{% generation %}} marks: which are the prompt's?"
                    )
                marks = marks[sum(number < loss_from for number in turns) :]
            return Rendered(text, marks, marked=True, closed=closed)
        text, _ = self._fill(messages, tools)
        spans = None
        if not any(messages[number].get(key) for number in turns for key in _SPOKEN):
            spans = self._verified(messages, tools, text, turns, thoughts=False)
            if spans is None:
                spans = self._verified(messages, tools, text, turns, thoughts=True)
        if spans is None:
            spans = self._by_turns(messages, tools, text, turns)
        return Rendered(
            text,
            [span for number, span in zip(turns, spans, strict=True) if number >= loss_from],
            marked=False,
            closed=closed,
        )

    def tokens(self, rendered: list[Rendered]) -> list[tuple[Ids, Ids]]:
        """(ids, labels) of each conversation: labels are the ids where loss is due, IGNORED elsewhere.

        Without marks, the special token that ends a turn is learned too, or the model would never stop: the one that
        follows an answer (white space between them included). Where the last turn ends without one, all that the template
        puts behind it is learned, and the tokenizer's eos_token, which is added. Raises RecipeError where it has none.
        """
        found = self._tokenizer(
            [one.text for one in rendered],
            add_special_tokens=False,
            return_attention_mask=False,
            return_token_type_ids=False,
            return_offsets_mapping=True,
            verbose=False,
        )
        return [
            self._labelled(*one)
            for one in zip(rendered, found["input_ids"], found["offset_mapping"], strict=True)
        ]

    def _labelled(
        self, rendered: Rendered, token_ids: list[int], offsets: list[Span]
    ) -> tuple[Ids, Ids]:
        ids = np.array(token_ids, dtype=np.int32)
        ends = (
            np.maximum.accumulate(np.array([end for _, end in offsets], dtype=np.int64))
            if offsets
            else np.zeros(0, dtype=np.int64)
        )
        # Some tokenizers leave white space out of a token's offsets: a token starts where the one before it ends. Of
        # several tokens that make up one character all have its offsets.
        starts = np.maximum.accumulate(
            np.where(np.diff(ends, prepend=-1) > 0, np.append(0, ends[:-1])[: len(ends)], 0)
        )
        learned = np.zeros(len(ids), dtype=bool)
        for start, end in rendered.spans:
            learned |= (starts < end) & (ends > start)
        if not rendered.marked:
            special = np.isin(ids, list(self._special))
            for _, end in rendered.spans:
                after = int(
                    np.searchsorted(starts, end)
                )  # the first token that holds nothing of the answer
                stop = after
                while (
                    stop < len(ids)
                    and not special[stop]
                    and not rendered.text[starts[stop] : ends[stop]].strip()
                ):
                    stop += 1
                if stop < len(ids) and special[stop]:
                    learned[after : stop + 1] = True
                elif rendered.closed and end == rendered.spans[-1][1]:
                    stops = np.flatnonzero(special[after:])
                    if not stops.size:
                        ids, learned, special = (
                            np.append(ids, np.int32(self._end)),
                            np.append(learned, True),
                            np.append(special, True),
                        )
                        stops = np.array([len(ids) - 1 - after])
                    learned[after : after + int(stops[0]) + 1] = (
                        True  # what the template ends a turn with, in ordinary tokens too
                    )
        return ids, np.where(learned, ids, np.int32(IGNORED)).astype(np.int32)

    @property
    def _end(self) -> int:
        if self._tokenizer.eos_token_id is None:
            raise RecipeError(
                "data.chat_template: no special token ends the assistant's turn, and the tokenizer has no eos_token: the model would not "
                "learn to stop; end the turn with one in the template"
            )
        return int(self._tokenizer.eos_token_id)

    def _source(self, tools: list[Any] | None) -> str:
        return str(self._tokenizer.get_chat_template(self._template, tools))

    def _fill(
        self,
        messages: list[Message],
        tools: list[Any] | None,
        *,
        marks: bool = False,
        prompt: bool = False,
    ) -> tuple[str, list[Span]]:
        """The template's text, and the places of its marks."""
        from jinja2.exceptions import TemplateError, TemplateSyntaxError
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            texts, places = render_jinja_template(
                conversations=[messages],
                tools=tools,
                chat_template=self._source(tools),
                return_assistant_tokens_mask=marks,
                add_generation_prompt=prompt,
                **self._tokenizer.special_tokens_map,
            )
        except TemplateSyntaxError as error:
            where = (
                "data.chat_template"
                if self._template is not None
                else "data.tokenizer: its chat template"
            )
            raise RecipeError(f"{where}: line {error.lineno}: {error.message}") from None
        except TemplateError as error:
            raise RowError(f"the chat template refuses this conversation: {error}") from None
        except ImportError:
            raise
        except Exception as error:  # whatever a template makes of what it did not expect
            raise RowError(
                f"the chat template fails on this conversation: {type(error).__name__}: {error}"
            ) from None
        return texts[0], list(places[0]) if marks else []

    def _verified(
        self,
        messages: list[Message],
        tools: list[Any] | None,
        text: str,
        turns: list[int],
        *,
        thoughts: bool,
    ) -> list[Span] | None:
        """The answers' places in `text`, by placeholders; None where that does not settle it.

        thoughts: an answer `<think>A</think>B` gets two, for templates that drop A from earlier turns.
        """
        probe, holders = list(messages), []
        for number in turns:
            content, first = messages[number]["content"], f"Qz{number}aZq"
            if thoughts and (thought := _THOUGHT.fullmatch(content)):
                second = f"Qz{number}bZq"
                holders.append([(first, thought[1]), (second, thought[2])])
                content = f"<think>\n{first}\n</think>\n\n{second}"
            else:
                holders.append([(first, content)])
                content = first
            probe[number] = {**messages[number], "content": content}
        if "Qz" in text and any(holder in text for turn in holders for holder, _ in turn):
            return None
        try:
            probed, _ = self._fill(probe, tools)
        except RowError:
            return None
        literals, contents, groups, at = [], [], [], 0
        for index, turn in enumerate(holders):
            for holder, content in turn:
                place = probed.find(holder, at)
                if probed.count(holder) > 1 or (place < 0 and holder == turn[-1][0]):
                    return None
                if place >= 0:  # a thought that is not there was dropped
                    literals.append(probed[at:place])
                    contents.append(content)
                    groups.append(index)
                    at = place + len(holder)
        places = _put_back(text, [*literals, probed[at:]], contents)
        if places is None:
            return None
        spans: list[Span] = []
        for index in range(len(holders)):
            own = [number for number, group in enumerate(groups) if group == index]
            start = places[own[0]][0]
            if (
                len(own) > 1
            ):  # the thought is there, and with it the tag in front, which the model says too
                opening = re.search(r"<think>\s*$", literals[own[0]])
                start -= len(opening[0]) if opening else 0
            spans.append((start, places[own[-1]][1]))
        return spans

    def _by_turns(
        self, messages: list[Message], tools: list[Any] | None, text: str, turns: list[int]
    ) -> list[Span]:
        """The answers' places in `text`, each from the generation prompt to the end of its turn, where every beginning of
        the conversation is rendered as the beginning of the whole. Covers calls of tools and reasoning. Raises RowError."""
        spans = []
        for number in turns:
            try:
                bare, _ = self._fill(messages[:number], tools)
                before, _ = self._fill(messages[:number], tools, prompt=True)
                until, _ = self._fill(messages[: number + 1], tools)
            except RowError:
                bare = before = until = ""
            # Without a generation prompt the turn's heading would pass for a part of the answer.
            known = (
                len(bare) < len(before) < len(until)
                and text.startswith(before)
                and text.startswith(until)
            )
            if not known:
                raise RowError(
                    f"message {number + 1}: which part of the rendered text is the assistant's cannot be verified; {_ADVICE}"
                )
            spans.append((len(before), self._without_ending(until, len(before))))
        return spans

    def _without_ending(self, text: str, start: int) -> int:
        """Where the special token that ends the turn starts, or else the text's end."""
        end = len(text.rstrip())
        for token in sorted(
            (self._tokenizer.convert_ids_to_tokens(number) for number in self._special),
            key=len,
            reverse=True,
        ):
            if token and text.endswith(token, start, end):
                return end - len(token)
        return end


def _put_back(text: str, literals: list[str], contents: list[str]) -> list[Span] | None:
    """Where the contents stand, if `text` is the literals with the contents between them, as they are or stripped."""
    if not text.startswith(literals[0]):
        return None
    at, places = len(literals[0]), []
    for number, (content, literal) in enumerate(zip(contents, literals[1:], strict=True), start=1):
        for value in (
            content,
            content.strip(),
            content.lstrip(),
            content.rstrip(),
            content.strip("\n"),
            content.lstrip("\n"),
        ):
            end = at + len(value)
            following = end + len(literal)
            if (
                text.startswith(value, at)
                and text.startswith(literal, end)
                and (number < len(contents) or following == len(text))
            ):
                break
        else:
            return None
        places.append((at, end))
        at = following
    return places
