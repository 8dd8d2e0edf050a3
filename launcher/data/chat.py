"""Conversations into tokens, with loss on what the assistant says.

A template may mark it: `{% generation %} ... {% endgeneration %}`. Otherwise a second rendering,
with a placeholder for each answer, must be the same apart from the answers; or, for tool calls and
reasoning, the conversation up to each answer must render to a prefix. Nothing is guessed: a row
that cannot be verified is an error.
"""

from __future__ import annotations

import itertools
import json
import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from launcher.data.tokenizer import Ids
from launcher.errors import RecipeError
from launcher.models.chunked_loss import IGNORED

Message = dict[str, Any]
Span = tuple[int, int]

_ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")
_SHAREGPT = {
    "human": "user",
    **dict.fromkeys(("gpt", "chatgpt", "bot", "model"), "assistant"),
    **dict.fromkeys(("observation", "function_response"), "tool"),
}
"""Roles that have another name in ShareGPT's `from`."""
_BESIDE_CONTENT = ("tool_calls", "function_call", "reasoning_content", "reasoning", "thinking")
_MARKS = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_THOUGHT = re.compile(r"(\s*<think>\s*)(.*?)(\s*</think>\s*)(.*)", re.DOTALL)


class RowError(ValueError):
    """A problem of a row. The message does not say which row."""


class RefusedError(RowError):
    """The chat template refuses a conversation."""


def read_messages(value: Any, column: str) -> list[Message]:
    """Messages for a template, from OpenAI's `messages` (role, content) or ShareGPT's
    `conversations` (from, value). Raises RowError.

    Text parts are joined. Keys without a value are dropped; other keys stay. `loss` is false in the
    messages that have a `weight` of 0 (OpenAI) or `loss: false` (ShareGPT), and in no other.
    """
    if isinstance(value, list) and value and all(isinstance(turn, dict) for turn in value):
        return [_message(turn, f"message {number}") for number, turn in enumerate(value, start=1)]
    got = "an empty list" if value == [] else type(value).__name__
    form = "a list of messages, each with role and content (or from and value)"
    raise RowError(f"column {column!r} must hold {form}; got {got}")


def _message(turn: Message, what: str) -> Message:
    message = {key: content for key, content in turn.items() if content is not None}
    if "role" not in message and "from" in message:
        speaker = message.pop("from")
        content = message.pop("value", None)
        message = {"role": _SHAREGPT.get(speaker, speaker), "content": content, **message}
    role, content = message.get("role"), message.get("content")
    if role not in _ROLES:
        got = "no role" if role is None else f"unknown role {role!r}"
        raise RowError(f"{what}: {got}; must be one of {', '.join(_ROLES)}")
    if isinstance(content, list):
        texts: list[Any] = [
            part.get("text") if isinstance(part, dict) else part for part in content
        ]
        if not all(isinstance(text, str) for text in texts):
            kinds = [part.get("type") for part in content if isinstance(part, dict)]
            raise RowError(f"{what}: only text can be trained on; got parts of the types {kinds}")
        content = "".join(texts)
    if content is None and any(message.get(key) for key in _BESIDE_CONTENT):
        content = ""
    if not isinstance(content, str):
        got = "nothing" if content is None else type(content).__name__
        raise RowError(f"{what}: content must be text, or a list of text parts; got {got}")
    weights = [message.pop(key, 1) for key in ("weight", "loss")]
    if any(weight not in (0, 1) for weight in weights):
        raise RowError(f"{what}: weight and loss must be 0 or 1 (false or true); got {weights}")
    silent = {} if all(weights) else {"loss": False}
    return {**message, "content": content, **silent}


def read_tools(value: Any) -> list[Any] | None:
    """A row's `tools`: a list, or a list as JSON. Raises RowError."""
    return read_list(value, "tools")


def read_list(value: Any, column: str) -> list[Any] | None:
    """A list, or a list as JSON; None or an empty text: there is none. Raises RowError."""
    if isinstance(value, str) and value.strip():
        try:
            value = json.loads(value)
        except ValueError as error:
            raise RowError(f"column {column!r} is not JSON: {error}") from None
    if value and not isinstance(value, list):
        raise RowError(f"column {column!r} must hold a list; got {type(value).__name__}")
    return value or None


@dataclass(frozen=True)
class Rendered:
    """A conversation as text, and the spans of it that carry loss."""

    text: str
    spans: list[Span]
    marked: bool
    """The template marks the spans, with the end of each turn. Otherwise `ChatTemplate.tokens` adds
    the end of each turn."""
    closed: bool
    """The last turn is the assistant's, and carries loss."""


class ChatTemplate:
    """A tokenizer's chat template, or one that replaces it."""

    def __init__(self, tokenizer: Any, name: str, template: str | None) -> None:
        """name: of the tokenizer, for messages. Raises RecipeError if no template can be used."""
        self._tokenizer, self._template = tokenizer, template
        if template is None and not tokenizer.chat_template:
            hint = "set data.chat_template to a file with one"
            raise RecipeError(f"data.tokenizer: {name}: has no chat template; {hint}")
        if not tokenizer.is_fast:
            what = f"is a slow tokenizer ({type(tokenizer).__name__}), which gives no positions"
            raise RecipeError(f"data.tokenizer: {name}: {what}; use one with a tokenizer.json")
        added = tokenizer.added_tokens_decoder.items()
        special = {number for number, token in added if token.special}
        self._special = list(special.union(tokenizer.all_special_ids))

    def render(
        self, messages: list[Message], tools: list[Any] | None, *, loss_from: int = 0
    ) -> Rendered:
        """loss_from: index of the first message that may carry loss. Messages with `loss: false`
        carry none. Raises RowError."""
        turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        learned = [index >= loss_from and messages[index].get("loss", True) for index in turns]
        if not any(learned):
            what = "assistant turn with loss" if any(index >= loss_from for index in turns) else ""
            raise RowError(f"no {what or 'assistant turn'}, so nothing to learn from")
        marked = _MARKS.search(self._source(tools)) is not None
        text, spans = self._apply(messages, tools, marks=marked)
        if marked:
            spans = _check_marks(spans, learned)
        else:
            arguments = messages, tools, text, turns
            found = self._by_placeholders(*arguments) or self._by_turns(*arguments)
            spans = list(itertools.compress(found, learned))
        closed = learned[-1] and turns[-1] == len(messages) - 1
        return Rendered(text, spans, marked, closed)

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
        special = np.isin(ids, self._special)
        for _, end in rendered.spans if not rendered.marked else ():
            after = int(np.searchsorted(starts, end))  # the first token after the answer
            last = rendered.closed and end == rendered.spans[-1][1]
            if special[after:].any():
                stop = after + int(special[after:].argmax())
                if last or not rendered.text[end : starts[stop]].strip():
                    learned[after : stop + 1] = True
            elif last:
                ids, learned = np.append(ids, np.int32(self._end)), np.append(learned, True)
                learned[after:] = True
        return ids, np.where(learned, ids, np.int32(IGNORED)).astype(np.int32)

    @property
    def _end(self) -> int:
        if self._tokenizer.eos_token_id is None:
            what = "neither a special token after the assistant's turn nor an eos_token"
            raise RecipeError(f"data.chat_template: {what}: the model would not learn to stop")
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
        from jinja2.exceptions import TemplateSyntaxError
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
        except Exception as error:  # a template may fail in any way on an unexpected row
            what = f"the chat template refuses this conversation: {error}"
            raise RefusedError(what) from None
        return texts[0], list(spans[0]) if marks else []

    def _by_placeholders(
        self, messages: list[Message], tools: list[Any] | None, text: str, turns: list[int]
    ) -> list[Span] | None:
        """The spans of the answers in `text`; None if placeholders do not find them.

        An answer `<think>A</think>B` gets two placeholders, for templates that drop A from earlier
        turns.
        """
        if any(messages[index].get(key) for index in turns for key in _BESIDE_CONTENT):
            return None
        probe, contents = list(messages), {}
        for index in turns:
            content, replaced = messages[index]["content"], f"Qz{index}aZq"
            if thought := _THOUGHT.fullmatch(content):
                contents[f"Qz{index}tZq"], content = thought[2], thought[4]
                replaced = f"{thought[1]}Qz{index}tZq{thought[3]}{replaced}"
            contents[f"Qz{index}aZq"] = content
            probe[index] = {**messages[index], "content": replaced}
        if any(placeholder in text for placeholder in contents):
            return None
        try:
            probed, _ = self._apply(probe, tools)
        except RowError:
            return None
        before, *rest = re.split(f"({'|'.join(contents)})", probed)
        found, literals = rest[::2], rest[1::2]
        in_order = [placeholder for placeholder in contents if placeholder in found]
        answers = {f"Qz{index}aZq" for index in turns}
        if found != in_order or not answers <= set(found) or not text.startswith(before):
            return None
        spans: dict[str, Span] = {}
        start = len(before)
        for placeholder, after in zip(found, literals, strict=True):
            last = placeholder == found[-1]
            end = _find_end(text, start, contents[placeholder], after, last=last)
            if end is None:
                return None
            # The model also generates the tag before its thought
            opening = re.search(r"<think>\s*$", before) if placeholder.endswith("tZq") else None
            first = start - len(opening[0]) if opening else start
            turn = placeholder[:-3]
            spans[turn] = (spans[turn][0] if turn in spans else first, end)
            start, before = end + len(after), after
        return list(spans.values())

    def _by_turns(
        self, messages: list[Message], tools: list[Any] | None, text: str, turns: list[int]
    ) -> list[Span]:
        """The spans of the answers in `text`, from the generation prompt to the end of the turn.

        Each prefix of the conversation must render to a prefix of the text. Raises RowError.
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
                what = "the assistant's part of the rendered text cannot be verified"
                marks = "{% generation %} and {% endgeneration %} around what the assistant says"
                hint = f"put {marks} in the template, and set data.chat_template to that file"
                raise RowError(f"message {index + 1}: {what}; {hint}")
            # The special token that ends the turn is not part of the answer
            start, end = len(before), len(until.rstrip())
            special = self._tokenizer.convert_ids_to_tokens(self._special)
            endings = [len(token) for token in special if until.endswith(token, start, end)]
            spans.append((start, end - max(endings, default=0)))
        return spans


def _check_marks(marks: list[Span], learned: list[bool]) -> list[Span]:
    """The marks of the turns that carry loss. learned: for each turn of the assistant."""
    marks = [(start, end) for start, end in marks if end > start]
    if not marks:
        raise RowError("the template's {% generation %} marks enclose nothing here")
    if all(learned):
        return marks
    if len(marks) != len(learned):
        what = f"{len(learned)} assistant turns, but {len(marks)} {{% generation %}} marks"
        raise RowError(f"{what}: which belong to the turns without loss?")
    return list(itertools.compress(marks, learned))


def _find_end(text: str, start: int, content: str, after: str, *, last: bool) -> int | None:
    """Where the literal `after` follows `content`, which starts at `start`, apart from white space
    around it; None if it does not. last: the text ends with `after`."""
    content = content.strip()
    begin = text.find(content, start)
    end = begin + len(content)
    stop = len(text) - len(after) if last else text.find(after, end)
    found = start <= begin and end <= stop and text.startswith(after, stop)
    return stop if found and not (text[start:begin] + text[end:stop]).strip() else None
