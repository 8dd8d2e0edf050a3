"""Conversations into tokens, with loss on what the assistant must produce.

That is all from the end of the generation prompt to the end of the turn: reasoning, tool calls,
channels, empty thinking blocks and the tokens that end the turn. A template's `{% generation %}`
marks select the turns; without them, all turns of the assistant are selected. A turn that the
template shows otherwise than the model must produce it carries no loss. Nothing is guessed: a row
that cannot be verified is an error.
"""

from __future__ import annotations

import contextlib
import logging
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from launcher.data.chat import (
    Message,
    NotAsServedError,
    RefusedError,
    RowError,
    check_complete,
)
from launcher.data.template_marks import (
    MESSAGE_NUMBER,
    Layout,
    Span,
    fix_date,
    read_marks,
    today,
    uses_date,
    with_marks,
)
from launcher.data.tokenizer import Ids
from launcher.errors import RecipeError
from launcher.models.inputs import IGNORED

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_MODES: tuple[dict[str, Any], ...] = ({}, {"enable_thinking": False}, {"enable_thinking": True})
_PLACEHOLDER = "Qz7aZq"


class UnverifiedError(RowError):
    """Where the turn of a message is in the rendered text is not known."""

    def __init__(self, index: int) -> None:
        what = "the assistant's part of the rendered text cannot be verified"
        marks = "{% generation %} and {% endgeneration %} around what the assistant says"
        hint = f"put {marks} in the template, and set data.chat_template to that file"
        super().__init__(f"message {index + 1}: {what}; {hint}")


@dataclass(frozen=True)
class Turn:
    """A part of the text that carries loss."""

    start: int
    end: int
    stopped: bool
    """Nothing after it carries loss: it includes the tokens that end the turn, or those in the text
    are not the ones that the model must produce. Otherwise `ChatTemplate.tokens` adds what ends the
    turn."""


@dataclass(frozen=True)
class Rendered:
    """A conversation as text, and the turns that carry loss."""

    text: str
    turns: list[Turn]
    closed: bool
    """The last turn ends the conversation."""
    weight: float | None = None
    """Of each token with loss (data.weights_column); None: 1."""


class ChatTemplate:
    """A tokenizer's chat template, or one that replaces it."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        name: str,
        template: str | None,
        *,
        day: str | None = None,
        values: dict[str, Any] | None = None,
    ) -> None:
        """name is that of the tokenizer, for messages. day (YYYY-MM-DD) is the date for templates
        that print one, by default today. values are for the template (data.chat_template_kwargs).
        Raises RecipeError if no template can be used."""
        self._tokenizer, self._template, self._day = tokenizer, template, day or today()
        self._values = values or {}
        self._noted = False
        if template is None and not tokenizer.chat_template:
            hint = "set data.chat_template to a file with one"
            raise RecipeError(f"data.tokenizer: {name}: has no chat template; {hint}")
        if not tokenizer.is_fast:
            what = f"is a slow tokenizer ({type(tokenizer).__name__}), which gives no positions"
            raise RecipeError(f"data.tokenizer: {name}: {what}; use one with a tokenizer.json")
        added = tokenizer.added_tokens_decoder.items()
        special = {number for number, token in added if token.special}
        self._special = list(special.union(tokenizer.all_special_ids))
        texts = tokenizer.convert_ids_to_tokens(self._special)
        self._special_texts = tuple(text for text in texts if text.strip())

    def render(
        self, messages: list[Message], tools: list[object] | None, *, loss_from: int = 0
    ) -> Rendered:
        """Renders a conversation. loss_from is the index of the first message that may carry loss.
        Messages with `loss: false` carry none. Raises RowError."""
        turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        wanted = [index for index in turns if index >= loss_from]
        learned = [index for index in wanted if messages[index].get("loss", True)]
        if not learned:
            if wanted:
                raise RowError("no assistant turn carries loss, so nothing to learn from")
            raise RowError("no assistant turn, so nothing to learn from")
        closed = turns[-1] == len(messages) - 1
        layout = self.layout(messages, tools)
        marked = _GENERATION.search(self.source(tools)) is not None
        if marked and not any(start < end for start, end in layout.generation):
            raise RowError("the template's {% generation %} marks enclose nothing here")
        conversation = _Conversation(self, messages, tools, layout)
        learned_turns: dict[int, Turn] = {}
        problem = RowError("the template marks no turn that may carry loss")
        try:
            for index in learned:
                if not marked or layout.generated(index):
                    try:
                        learned_turns[index] = conversation.turn(index)
                    except NotAsServedError as error:
                        problem = error
                        self._note(error)
        except UnverifiedError:
            if not marked:
                raise
            closed = closed and turns[-1] in learned
            return Rendered(layout.text, _marked_turns(layout, turns, learned), closed)
        if not learned_turns:
            raise problem
        return Rendered(
            layout.text, list(learned_turns.values()), closed and turns[-1] in learned_turns
        )

    def render_all(self, messages: list[Message], tools: list[object] | None) -> Rendered:
        """Renders a conversation with loss on every token. Raises RowError."""
        text = self.apply(messages, tools)
        for number, message in enumerate(messages, start=1):
            if not message.get("loss", True):
                raise RowError(f"message {number} is to carry no loss, but data.loss_on is all")
            with contextlib.suppress(NotAsServedError):
                check_complete(message, text, f"message {number}")
        begin, end = self.closing(text, 0, len(text))
        closed = messages[-1]["role"] == "assistant"
        return Rendered(text, [Turn(0, len(text), stopped=begin < end)], closed)

    def _note(self, error: NotAsServedError) -> None:
        if not self._noted:
            logger.info(f"turns without loss, such as this {error} (docs/data.md)")
        self._noted = True

    def tokens(self, rendered: list[Rendered]) -> list[tuple[Ids, Ids]]:
        """(ids, labels) of each conversation; labels are IGNORED where there is no loss.

        If no special token ends a turn, the one that follows it, possibly after white space, also
        carries loss, or the model would never stop. If none follows the last turn, the eos_token is
        appended with loss. Raises RecipeError if the tokenizer has no eos_token.
        """
        encoded = self._tokenizer(
            [conversation.text for conversation in rendered],
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
        special = np.flatnonzero(np.isin(ids, self._special))
        for turn in rendered.turns:
            first = int(np.searchsorted(ends, turn.start, side="right"))
            after = int(np.searchsorted(starts, turn.end))  # the first token after the turn
            learned[first:after] = True
            if turn.stopped:
                continue
            following = special[np.searchsorted(special, after) :]
            if len(following):
                if not rendered.text[turn.end : starts[following[0]]].strip():
                    learned[after : following[0] + 1] = True
            elif rendered.closed and turn is rendered.turns[-1]:
                ids, learned = np.append(ids, np.int32(self._end)), np.append(learned, True)
                learned[after:] = True
        return ids, np.where(learned, ids, np.int32(IGNORED)).astype(np.int32)

    @property
    def _end(self) -> int:
        if self._tokenizer.eos_token_id is None:
            what = "neither a special token after the assistant's turn nor an eos_token"
            raise RecipeError(f"data.chat_template: {what}: the model would not learn to stop")
        return int(self._tokenizer.eos_token_id)

    def source(self, tools: list[object] | None) -> str:
        """The template for a conversation with these tools."""
        template = str(self._tokenizer.get_chat_template(self._template, tools))
        return fix_date(template, self._day) if uses_date(template) else template

    def apply(
        self,
        messages: list[Message],
        tools: list[object] | None,
        *,
        source: str | None = None,
        **options: object,
    ) -> str:
        """The rendered text. source: instead of the template. options: for the template. Raises
        RowError."""
        from jinja2.exceptions import TemplateSyntaxError
        from transformers.utils.chat_template_utils import render_jinja_template

        source = source or self.source(tools)
        try:
            texts, _ = render_jinja_template(
                conversations=[messages],
                tools=tools,
                chat_template=source,
                **(options | self._values),
                **self._tokenizer.special_tokens_map,
            )
        except TemplateSyntaxError as error:
            own = self._template is None
            where = "data.tokenizer: its chat template" if own else "data.chat_template"
            raise RecipeError(f"{where}: line {error.lineno}: {error.message}") from None
        except Exception as error:  # a template may fail in any way on an unexpected row
            what = f"the chat template refuses this conversation: {error}"
            raise RefusedError(what) from None
        return str(texts[0])

    def layout(self, messages: list[Message], tools: list[object] | None, **options: Any) -> Layout:
        """The rendered text with the parts of its messages, as far as they are known. Raises
        RowError."""
        text, source = self.apply(messages, tools, **options), self.source(tools)
        numbered = [{**message, MESSAGE_NUMBER: at} for at, message in enumerate(messages)]
        for loops in (True, False):
            try:
                marked = self.apply(
                    numbered, tools, source=with_marks(source, loops=loops), **options
                )
            except (RowError, RecipeError):  # marks do not suit the template
                continue
            layout = read_marks(marked)
            if layout.text == text:
                return layout
        return Layout(text)

    def closing(self, text: str, start: int, stop: int) -> Span:
        """The special tokens, with white space between them, at the end of text[start:stop]."""
        end = begin = start + len(text[start:stop].rstrip())
        while text.endswith(self._special_texts, start, begin):
            tokens = (token for token in self._special_texts if text.endswith(token, start, begin))
            begin -= max(map(len, tokens))
            begin = start + len(text[start:begin].rstrip())
        return begin + len(text[begin:end]) - len(text[begin:end].lstrip()), end


class _Conversation:
    """Finds the turns of the assistant in a rendered conversation."""

    def __init__(
        self,
        template: ChatTemplate,
        messages: list[Message],
        tools: list[object] | None,
        layout: Layout,
    ) -> None:
        self._template, self._messages, self._tools = template, messages, tools
        self._layout = layout
        self._prompts: dict[int, list[str]] = {}
        self._ends: dict[bool, str | None] = {}

    def turn(self, index: int) -> Turn:
        """From the end of the generation prompt to the end of the turn. Raises RowError;
        NotAsServedError if the turn must not carry loss."""
        text, parts = self._layout.text, self._layout.messages
        last = index == len(self._messages) - 1
        following = self._messages[index + 1 : index + 2]
        if index not in parts or any(message["content"] for message in following) > (
            index + 1 in parts
        ):
            raise UnverifiedError(index)
        begin, stop = parts[index]
        # A template may write the results of tools in the turn that called them
        stop = min([stop, *(start for start, _ in parts.values() if start > begin)])
        check_complete(self._messages[index], text[begin:stop], f"message {index + 1}")
        start = begin + self._prompt(index, text[begin:stop])
        closing, end = self._template.closing(text, start, stop)
        if last and closing == end:
            closing, end = self._template.closing(text, start, len(text))
        own = text[closing:end]
        served = own if last else self._served_end(index)
        if not served or served.endswith(own):
            return Turn(start, end, stopped=bool(own))
        # gpt-oss ends an earlier answer with <|end|>, where the model must produce <|return|>
        return Turn(start, closing + len(served) * own.startswith(served), stopped=True)

    def _prompt(self, index: int, written: str) -> int:
        """Length of the generation prompt, which begins what the template writes for a message."""
        first = next(
            at for at, message in enumerate(self._messages) if message["role"] == "assistant"
        )
        prompts = self._generation_prompts(first)
        if not any(map(written.startswith, prompts)):
            prompts = self._generation_prompts(index)
        prompt = next(filter(written.startswith, prompts), None)
        if prompt is None and not prompts:
            raise UnverifiedError(index)
        if prompt is None:
            what = f"the chat template's generation prompt ends in {prompts[0][-40:]!r}"
            raise NotAsServedError(
                f"message {index + 1}: {what}, and it renders this turn without that, so the model "
                "would learn to answer another prompt; give the turn its reasoning, or set "
                "data.chat_template to a template in which both agree"
            )
        return len(prompt)

    def _generation_prompts(self, index: int) -> list[str]:
        """What a template adds before the answer to messages[:index]: by default, and without
        thinking. Empty if that cannot be found out."""
        if index in self._prompts:
            return self._prompts[index]
        before = self._messages[:index] or [{"role": "user", "content": "a"}]
        apply, prompts = self._template.apply, []
        try:
            bare = apply(before, self._tools)
            for options in _MODES:
                full = apply(before, self._tools, add_generation_prompt=True, **options)
                if not full.startswith(bare):  # such as an eos_token where there is no prompt
                    layout = self._template.layout(before, self._tools, add_generation_prompt=True)
                    _, end = layout.messages.get(len(before) - 1, (0, 0))
                    bare = layout.text[:end]
                if bare and full.startswith(bare):
                    prompts.append(full.removeprefix(bare))
            if prompts and not any(prompts):
                # There is none, but a heading of the turn is not part of the answer
                answer = {"role": "assistant", "content": _PLACEHOLDER}
                full = apply([*before, answer], self._tools)
                heading, *rest = full.removeprefix(bare).split(_PLACEHOLDER)
                known = full.startswith(bare) and len(rest) == 1
                prompts = [heading, *([] if heading.strip() else [""])] if known else []
        except RowError:
            prompts = []
        return self._prompts.setdefault(index, prompts)

    def _served_end(self, index: int) -> str | None:
        """The special tokens that end such a turn while it is the last one. A turn with tool calls
        may end with other tokens than one without."""
        calls = bool(self._messages[index].get("tool_calls"))
        if calls not in self._ends:
            messages = self._messages[: index + 1]
            try:
                until = self._template.layout(messages, self._tools)
                part = until.messages.get(index, (0, len(until.text)))
                begin, end = self._template.closing(until.text, *part)
                self._ends[calls] = until.text[begin:end]
            except RowError:
                self._ends[calls] = None
        return self._ends[calls]


def _marked_turns(layout: Layout, turns: list[int], learned: list[int]) -> list[Turn]:
    """The marks of the turns that carry loss, of a template whose loops cannot be followed."""
    marks = [(start, end) for start, end in layout.generation if start < end]
    if learned != turns:
        if len(marks) != len(turns):
            what = f"{len(turns)} assistant turns, but {len(marks)} {{% generation %}} marks"
            raise RowError(f"{what}: which belong to the turns without loss?")
        marks = [mark for index, mark in zip(turns, marks, strict=True) if index in learned]
    return [Turn(start, end, stopped=True) for start, end in marks]
