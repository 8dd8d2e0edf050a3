"""Conversations into tokens, with loss on what the assistant must produce.

That is all from the end of the generation prompt to the end of the turn: reasoning, tool calls,
channels, empty thinking blocks and the tokens that end the turn. A template's `{% generation %}`
marks select the turns; without them, all turns of the assistant are selected. A turn that the
template shows otherwise than the model must produce it carries no loss; where it shows the last turn
so, that one follows its generation prompt instead. Nothing is guessed: a row that cannot be verified
is an error.
"""

from __future__ import annotations

import functools
import json
import logging
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from launcher.data.attachments import Attachments, Placed, attachment_table
from launcher.data.columns import HALF_PAIR
from launcher.data.coordinates import Located, Objects
from launcher.data.documents import Document
from launcher.data.messages import (
    REASONING,
    Chat,
    Form,
    Message,
    print_arguments,
    to_json,
    unused_tools,
)
from launcher.data.template_source import fix_date, today, uses_date, uses_tools, variables
from launcher.data.tokenizer import Ids, hugging_face_tokenizer
from launcher.errors import RecipeError, RowError
from launcher.models.micro_batch import IGNORED

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from launcher.data.encoder import Encoder
    from launcher.data.modality import Modality

logger = logging.getLogger(__name__)

Span = tuple[int, int]

_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_SWITCHES = ("enable_thinking", "thinking")
"""Variables of templates that choose between generation prompts."""
_PLACEHOLDER = "Qz7aZq"
"""Begins texts that no row holds."""
_MEND = "set data.chat_template to a template that renders it"
_THOUGHTS = {
    "<think>": "</think>",
    "[THINK]": "[/THINK]",
    "<|START_THINKING|>": "<|END_THINKING|>",
}
"""Marks that a generation prompt may open, and those that close them."""
_CLOSED = re.compile(r"(</[^<>]+>|<\|END_\w+\|>|<\w+\|>|\[/\w+\])\s*$")
"""The end of a generation prompt with an empty thought."""
_BEGUN_TAG = re.compile(r"[<\[][^<>\[\]\s]*$")


class RefusedError(RowError):
    """The chat template refuses a conversation, or leaves out a call or an answer."""


class NotAsServedError(RowError):
    """A turn that the template shows otherwise than the model must produce it."""


class UnverifiedError(RowError):
    """Where the turn of a message is in the rendered text is not known."""

    def __init__(self, index: int) -> None:
        what = "the assistant's part of the rendered text cannot be verified"
        marks = "{% generation %} and {% endgeneration %} around what the assistant says"
        hint = f"put {marks} in the template, and set data.chat_template to that file"
        super().__init__(f"message {index + 1}: {what}; {hint}")


class PromptError(NotAsServedError):
    """The generation prompt is not what the template shows before a turn."""

    def __init__(self, index: int, prompt: str, switch: str | None) -> None:
        what = f"the chat template's generation prompt ends in {prompt[-40:]!r}"
        other = f"set data.chat_template_kwargs.{switch}=true, or " if switch else ""
        super().__init__(
            f"message {index + 1}: {what}, and it renders this turn without that, so the model "
            f"would learn to answer another prompt; end the row with this turn, or {other}set "
            "data.chat_template to a template in which both agree"
        )


@dataclass(frozen=True)
class Turn:
    """A part of the text that carries loss."""

    start: int
    end: int
    includes_end: bool
    """Whether the part has the tokens that end the turn already, or must not get one. Otherwise
    `ChatTemplate.encode` adds what ends the turn."""
    ending: str | None = None
    """The token that ends the turn if the conversation ends with it; None: the eos_token."""
    weight: float = 1.0
    """Of each of its tokens (data.message_weights)."""
    parts: tuple[tuple[int, float], ...] = ()
    """Where each part of the message begins in the text, and its weight, times which that of the
    turn counts (data.loss_weights). The last part has what ends the turn. Empty: all have 1."""


@dataclass(frozen=True)
class Rendered:
    """A conversation as text, and the turns that carry loss."""

    text: str
    turns: list[Turn]
    closed: bool
    """The last turn ends the conversation."""
    weight: float | None = None
    """Of each token with loss (data.weights_column), times that of its turn; None: 1."""
    weighted: bool = False
    """Whether turns have weights."""
    attachments: tuple[Placed, ...] = ()
    """In the order of their places."""
    coordinates: Located | None = None
    """What the coordinates in the text are; None: there are none."""
    objects: Objects | None = None
    """What the marks of objects stand for; None: the row has none."""

    def expanded(
        self, placeholder: str, texts: Sequence[str], attachments: Iterable[Placed]
    ) -> Rendered:
        """The conversation with these texts in the places of the placeholder, and with the
        attachments that they stand for."""
        spans = [match.span() for match in re.finditer(re.escape(placeholder), self.text)]
        edits = [(*span, text) for span, text in zip(spans, texts, strict=True)]
        placed = (
            one._replace(start=start) for one, (start, _) in zip(attachments, spans, strict=True)
        )
        both = sorted((*self.attachments, *placed), key=lambda one: one.start)
        return replace(self, attachments=tuple(both)).with_edits(edits)

    def with_edits(self, edits: Sequence[tuple[int, int, str]]) -> Rendered:
        """The conversation with other texts in these places, which are in order: the start and end of
        each, and its text."""
        starts = np.array([start for start, _, _ in edits], dtype=np.int64)
        grown = np.cumsum([0, *(len(text) - (end - start) for start, end, text in edits)])

        def moved(offset: int) -> int:
            return offset + int(grown[np.searchsorted(starts, offset)])

        parts, at = list[str](), 0
        for start, end, text in edits:
            parts += [self.text[at:start], text]
            at = end
        text = "".join([*parts, self.text[at:]])
        turns = [
            replace(
                turn,
                start=moved(turn.start),
                end=moved(turn.end),
                parts=tuple((moved(start), weight) for start, weight in turn.parts),
            )
            for turn in self.turns
        ]
        attachments = (one._replace(start=moved(one.start)) for one in self.attachments)
        return replace(self, text=text, turns=turns, attachments=tuple(attachments))


def template_of(encoder: Encoder) -> ChatTemplate:
    """The chat template of rows. Raises RecipeError if none can be used."""
    values = json.dumps(encoder.settings.get("chat_template_kwargs", {}))
    assert encoder.tokenizer is not None
    return _load(encoder.tokenizer, encoder.template, encoder.day, values)


@functools.lru_cache(maxsize=4)
def _load(tokenizer: str, template: str | None, day: str | None, values: str) -> ChatTemplate:
    loaded = hugging_face_tokenizer(tokenizer)
    return ChatTemplate(loaded, tokenizer, template, day=day, values=json.loads(values))


def render(encoder: Encoder, chat: Chat) -> Rendered:
    """See `ChatTemplate.render`."""
    return template_of(encoder).render(chat)


def encode(encoder: Encoder, batch: list[Rendered]) -> list[Document]:
    """See `ChatTemplate.encode`."""
    return template_of(encoder).encode(batch, encoder.modalities)


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
        self.values = values or {}
        self._noted: set[str] = set()
        self._opens: dict[bool, bool] = {}
        self._in_parts: bool | None = None
        if template is None and not tokenizer.chat_template:
            hint = "set data.chat_template to a name, such as chatml, or to a file with one"
            raise RecipeError(f"data.tokenizer: {name}: has no chat template; {hint}")
        if not tokenizer.is_fast:
            what = f"is a slow tokenizer ({type(tokenizer).__name__}), which gives no positions"
            raise RecipeError(f"data.tokenizer: {name}: {what}; use one with a tokenizer.json")
        added = tokenizer.added_tokens_decoder.items()
        special = {number for number, token in added if token.special}
        self._special = list(special.union(tokenizer.all_special_ids))
        texts = tokenizer.convert_ids_to_tokens(self._special)
        self._special_texts = tuple(text for text in texts if text.strip())

    def render(self, chat: Chat) -> Rendered:
        """The text of a conversation, and which parts of it carry loss. Raises RowError; if the
        template refuses all forms, with the problem of the first one."""
        if chat.tools and not uses_tools(self.source(chat.tools)):
            why = "the chat template does not read them"
            raise RowError(unused_tools(chat.tools_column, why))
        problems = []
        for form in chat.forms:
            try:
                rendered = self._in_json(chat, form)
            except RefusedError as error:
                problems.append(error)
            else:
                break
        else:
            raise problems[0]
        try:
            rendered.text.encode()
        except UnicodeEncodeError:
            raise RowError(f"the conversation {HALF_PAIR}") from None
        rendered = replace(rendered, objects=chat.objects)
        kinds = [modality.kind for modality, _ in chat.attached]
        # Before the tokens of one kind, which may be those of another, stand in the text
        for modality, sources in chat.attached:
            modality.check(rendered.text, len(sources), kinds)
        for modality, sources in chat.attached:
            rendered = modality.expand(rendered, sources)
        weighted = chat.weights is not None or chat.part_weights is not None
        return replace(rendered, weight=chat.weight, weighted=weighted)

    def _in_json(self, chat: Chat, form: Form) -> Rendered:
        """The rendering, with arguments of calls as JSON also where the template prints each one by
        itself, as Python does. Raises RefusedError if it prints them as a whole, and RowError if it does
        not print their JSON, either."""
        rendered, whole = self._render(chat, form.messages), form.arguments
        keywords = [(f"({key}=", f", {key}=") for arguments in whole for key in arguments]
        if all(first in rendered.text or later in rendered.text for first, later in keywords):
            return rendered  # the template writes calls in Python (LFM2.5), or there are none
        if any(repr(arguments) in rendered.text for arguments in whole):
            what = "set data.chat_template to a template that writes them with tojson"
            raise RefusedError(f"{_AS_PYTHON}; {what}")
        values = [value for arguments in whole for value in arguments.values()]
        nested = [repr(value) for value in values if isinstance(value, dict | list) and value]
        leaves = _leaves(values)
        words = {str(value) for value in leaves if value is None or isinstance(value, bool)}
        shown = words.intersection(_WORDS.findall(rendered.text))
        if not shown and not any(text in rendered.text for text in nested):
            return rendered
        changed = print_arguments(form.messages)
        json_of = {
            repr(value): to_json(value) for value in values if isinstance(value, dict | list)
        }

        def as_json(text: str) -> str:
            for python in sorted(json_of, key=len, reverse=True):
                text = text.replace(python, json_of[python])
            return _WORDS.sub(lambda word: _JSON[word[0]], text)

        plain = self.apply(form.messages, chat.tools)
        try:
            printed = self.apply(changed, chat.tools)
        except RefusedError:  # it takes values apart
            same = False
        else:
            same = as_json(plain) == as_json(printed)
            words_of_calls = len(_WORDS.findall(plain)) - len(_WORDS.findall(printed))
            if not words_of_calls and not any(text in plain for text in nested):
                return rendered  # the words are in other texts
        if not same:
            got = ", ".join(sorted(shown)) or "lists or objects"
            what = "leave them out, or set data.chat_template to a template that writes them with tojson"
            raise RowError(f"{_AS_PYTHON} ({got}); {what}")
        self.note("printed", f"{_AS_PYTHON}: each one is written as JSON")
        return self._render(chat, changed)

    def _render(self, chat: Chat, messages: list[Message]) -> Rendered:
        messages = self._opened(messages, chat.tools)
        if chat.loss == "answers":
            rendered = self._render_answers(messages, chat.tools, chat.learned, chat.weights or {})
            return (
                rendered if chat.part_weights is None else self._divided(rendered, messages, chat)
            )
        if chat.loss == "none":
            text = self.apply(messages, chat.tools, add_generation_prompt=True)
            return Rendered(text, [], closed=False)
        text = self.apply(messages, chat.tools)
        for number, message in enumerate(messages, start=1):
            _check_calls(message, text, f"message {number}")
        begin, end = self.closing(text, 0, len(text))
        closed = messages[-1]["role"] == "assistant"
        return Rendered(text, [Turn(0, len(text), includes_end=begin < end)], closed)

    def _render_answers(
        self,
        messages: list[Message],
        tools: list[object] | None,
        learned: Sequence[int],
        weights: Mapping[int, float],
    ) -> Rendered:
        """learned: the indices of the messages that carry loss. weights: theirs, where not 1."""
        turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        closed = turns[-1] == len(messages) - 1
        layout = self.layout(messages, tools)
        marked = _GENERATION.search(self.source(tools)) is not None
        if marked and not any(start < end for start, end in layout.generation):
            raise RowError("the template's {% generation %} marks enclose nothing here")
        conversation = _Conversation(self, messages, tools, layout)
        learned_turns: dict[int, Turn] = {}
        problems: dict[int, RowError] = {}
        for index in learned:
            if marked and not layout.generated(index):
                continue
            try:
                learned_turns[index] = conversation.turn(index)
            except (NotAsServedError, UnverifiedError) as error:
                problems[index] = error
        last, text = turns[-1], layout.text
        unknown = [one for one in problems.values() if isinstance(one, UnverifiedError)]
        trusted = [at for at, problem in problems.items() if isinstance(problem, PromptError)]
        if marked and (unknown or (trusted and not learned_turns)):
            chosen = learned if unknown else trusted
            return Rendered(
                text, _marked_turns(layout, turns, [*chosen], weights), closed and last in chosen
            )
        if closed and last in problems and (served := conversation.as_served()):
            text = served[0]
            same = len(_common(text, layout.text))
            learned_turns = {at: turn for at, turn in learned_turns.items() if turn.end <= same}
            learned_turns[last] = served[1]
            unknown = []
            self.note(
                "served",
                "the chat template never shows an answer after its generation prompt: the last "
                "turn of a row is written after it (docs/reference/data.md)",
            )
        if unknown:
            raise unknown[0]
        if not learned_turns:
            what = RowError("the template marks no turn that may carry loss")
            raise problems[max(problems)] if problems else what
        if unlearned := problems.keys() - learned_turns:
            problem = problems[min(unlearned)]
            self.note(
                "unlearned", f"turns without loss, such as this {problem} (docs/reference/data.md)"
            )
        weighted = [
            replace(turn, weight=weights.get(at, 1.0)) for at, turn in learned_turns.items()
        ]
        return Rendered(text, weighted, closed and last in learned_turns)

    def _divided(self, rendered: Rendered, messages: list[Message], chat: Chat) -> Rendered:
        """The turns with their parts. Another rendering has placeholders in the place of reasoning,
        content and names of calls; with their texts it must be the same. Raises RowError."""
        assert chat.part_weights is not None
        probes, texts = _with_named_texts(messages)
        try:
            probe = self._render_answers(probes, chat.tools, chat.learned, {})
        except RowError as error:
            raise RowError(f"{_MIXED_PARTS} ({error})") from None
        turns = []
        if len(probe.turns) == len(rendered.turns):
            for turn, other in zip(rendered.turns, probe.turns, strict=True):
                written = rendered.text[turn.start : turn.end]
                parts = _parts(written, probe.text[other.start : other.end], texts)
                starts = ((turn.start + at, chat.part_weights.get(part, 1.0)) for at, part in parts)
                turns.append(replace(turn, parts=tuple(starts)))
        if not all(turn.parts for turn in turns) or len(turns) < len(rendered.turns):
            raise RowError(_MIXED_PARTS)
        return replace(rendered, turns=turns)

    def note(self, subject: str, text: str) -> None:
        """Logs the first note of this subject."""
        if subject not in self._noted:
            logger.info(text)
        self._noted.add(subject)

    def _opened(self, messages: list[Message], tools: list[object] | None) -> list[Message]:
        """The messages with `<think>` where a server left it out: a generation prompt that ends in
        it."""
        opened = [_opened(message) for message in messages]
        if opened == messages:
            return messages
        if (known := bool(tools)) not in self._opens:
            asked = [{"role": "user", "content": _PLACEHOLDER}]
            try:
                prompt = self.apply(asked, tools, add_generation_prompt=True)
            except RowError:
                prompt = ""
            self._opens[known] = prompt.rstrip().endswith("<think>")
        if not self._opens[known]:
            return messages
        self.note(
            "opened",
            "<think> is added to answers that have only </think>: the chat template's generation "
            "prompt ends in it",
        )
        return opened

    def encode(self, batch: list[Rendered], modalities: Sequence[Modality] = ()) -> list[Document]:
        """The tokens and labels of each conversation; labels are IGNORED where there is no loss, and
        for the tokens of attachments. modalities: the kinds of attachments that rows may have.

        If no special token ends a turn, the one that follows it, possibly after white space, also
        carries loss, or the model would never stop. If none follows the last turn, the eos_token is
        appended with loss. Raises RecipeError if the tokenizer has no eos_token.
        """
        encoded = self._tokenizer(
            [rendered.text for rendered in batch],
            add_special_tokens=False,
            return_attention_mask=False,
            return_token_type_ids=False,
            return_offsets_mapping=True,
            verbose=False,
        )
        rows = zip(batch, encoded["input_ids"], encoded["offset_mapping"], strict=True)
        return [self._document(*row, modalities) for row in rows]

    def _document(
        self,
        rendered: Rendered,
        token_ids: list[int],
        offsets: list[Span],
        modalities: Sequence[Modality],
    ) -> Document:
        ids = np.array(token_ids, dtype=np.int32)
        ends = np.maximum.accumulate(np.array([end for _, end in offsets], dtype=np.int64))
        # Some tokenizers leave white space out of the offsets, so a token starts where the one
        # before it ends. All tokens of one character have its offsets.
        before = np.append(0, ends[:-1])[: len(ends)]
        starts = np.maximum.accumulate(np.where(np.diff(ends, prepend=-1) > 0, before, 0))
        learned = np.zeros(len(ids), dtype=bool)
        special = np.flatnonzero(np.isin(ids, self._special))
        spans = list[tuple[int, int, float]]()
        for turn in rendered.turns:
            first = int(np.searchsorted(ends, turn.start, side="right"))
            after = int(np.searchsorted(starts, turn.end))  # the first token after the turn
            following = special[np.searchsorted(special, after) :]
            if turn.includes_end:
                pass
            elif len(following):
                if not rendered.text[turn.end : starts[following[0]]].strip():
                    after = int(following[0]) + 1
            elif rendered.closed and turn is rendered.turns[-1]:
                end = self._end if turn.ending is None else self._id(turn.ending)
                ids, learned = np.append(ids, np.int32(end)), np.append(learned, True)
                after = len(ids)
            learned[first:after] = True
            # Of two parts, a token belongs to the later one, as does one at the start of a turn
            for start, weight in turn.parts or ((turn.start, 1.0),):
                begin = max(first, int(np.searchsorted(ends, start, side="right")))
                spans.append((begin, after, turn.weight * weight))
        weights = attachments = None
        if rendered.weight is not None or rendered.weighted:
            row = 1.0 if rendered.weight is None else rendered.weight
            weights = np.full(len(ids), row, np.float32)
            for first, after, weight in spans:
                weights[first:after] = row * weight
                learned[first:after] = weight > 0
            weights[~learned] = row
        labels = np.where(learned, ids, np.int32(IGNORED)).astype(np.int32)
        if modalities:
            attached = [token for modality in modalities for token in modality.token_ids]
            labels = np.where(np.isin(ids, attached), np.int32(IGNORED), labels)
            attachments = _attachments_of(modalities, ids, rendered)
        return Document(
            ids,
            labels,
            weights=weights,
            attachments=attachments,
            coordinates=rendered.coordinates,
        )

    @property
    def _end(self) -> int:
        if self._tokenizer.eos_token_id is None:
            what = "neither a special token after the assistant's turn nor an eos_token"
            raise RecipeError(f"data.chat_template: {what}: the model would not learn to stop")
        return int(self._tokenizer.eos_token_id)

    def _id(self, token: str) -> int:
        number = self._tokenizer.convert_tokens_to_ids(token)
        assert isinstance(number, int)
        return number

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
        if self._in_parts is None:
            self._in_parts = self._takes_parts()
        if self._in_parts:
            messages = _with_parts(messages)
        return self._apply(messages, tools, source or self.source(tools), **options)

    def _takes_parts(self) -> bool:
        """Whether the template reads contents only as lists of parts (SmolVLM, LLaVA)."""
        message = {"role": "user", "content": _PLACEHOLDER}
        source = self.source(None)

        def reads(messages: list[Message]) -> bool:
            try:
                return _PLACEHOLDER in self._apply(messages, None, source)
            except RowError:
                return False

        return not reads([message]) and reads(_with_parts([message]))

    def _apply(
        self,
        messages: list[Message],
        tools: list[object] | None,
        source: str,
        **options: object,
    ) -> str:
        from jinja2.exceptions import TemplateSyntaxError
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            texts, _ = render_jinja_template(
                conversations=[messages],
                tools=tools,
                chat_template=source,
                **(options | self.values),
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

    def layout(
        self,
        messages: list[Message],
        tools: list[object] | None,
        *,
        by_parts: bool = True,
        **options: Any,
    ) -> Layout:
        """The rendered text with the parts of its messages, as far as they are known, unless
        by_parts is false. Raises RowError."""
        text, source = self.apply(messages, tools, **options), self.source(tools)
        numbered = [{**message, MESSAGE_NUMBER: at} for at, message in enumerate(messages)]
        for loops in (True, False) if by_parts else ():
            with_them = with_marks(source, loops=loops)
            try:
                marked = self.apply(numbered, tools, source=with_them, **options)
            except (RowError, RecipeError):  # marks do not suit the template
                continue
            layout = read_marks(marked, with_them)
            if layout.text == text:
                return layout
        return Layout(text)

    def probe(self, messages: list[Message], tools: list[object] | None, like: Layout) -> Layout:
        """The layout of other messages with the marks of a known one. Raises RowError."""
        if like.source is None:
            return Layout(self.apply(messages, tools))
        numbered = [{**message, MESSAGE_NUMBER: at} for at, message in enumerate(messages)]
        return read_marks(self.apply(numbered, tools, source=like.source), like.source)

    def first_special(self, text: str) -> str | None:
        """The special token that a text begins with, after white space."""
        found = [token for token in self._special_texts if text.lstrip().startswith(token)]
        return max(found, key=len, default=None)

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
        self._prompts: dict[object, list[str]] = {}
        self._contexts: dict[int, set[str]] = {}
        self._ends: dict[bool, str | None] = {}
        self._probe: Layout | None = None

    def turn(self, index: int) -> Turn:
        """From the end of the generation prompt to the end of the turn. Raises RowError;
        NotAsServedError if the turn must not carry loss."""
        text, parts = self._layout.text, self._layout.messages
        last = index == len(self._messages) - 1
        begin, stop = parts[index] if index in parts else self._between(index)
        # A template may write the results of tools in the turn that called them
        later = [start for start, _ in parts.values() if start > begin]
        stop = min([stop, *later])
        following = self._messages[index + 1 : index + 2]
        if index in parts and any(m["content"] for m in following) > (index + 1 in parts):
            stop = self._stop(index)
        self._check_complete(index, text[begin:stop])
        try:
            start = begin + self._prompt(index, text[begin:stop])
        except PromptError:
            start = self._start_of_text(index)
            if not begin < start < stop:
                raise
        closing, end = self._template.closing(text, start, stop)
        if last and closing == end:
            after = stop + len(text[stop:]) - len(text[stop:].lstrip())
            first, until = self._template.closing(text, after, len(text))
            if first == after < until:
                closing, end = first, until
        own = text[closing:end]
        served = own if last else self._served_end(index)
        if not served or served.endswith(own):
            ending = self._missing_end(index, end) if last and not own else None
            return Turn(start, end, includes_end=bool(own), ending=ending)
        # gpt-oss ends an earlier answer with <|end|>, where the model must produce <|return|>
        return Turn(start, closing + len(served) * own.startswith(served), includes_end=True)

    def _start_of_text(self, index: int) -> int:
        """Where the turn begins if the whole text up to there is that of the generation prompt, as
        if a template writes the line between two messages at the end of the first one; else 0."""
        try:
            served = self._template.apply(
                self._messages[:index], self._tools, add_generation_prompt=True
            )
        except RowError:
            return 0
        return len(served) if self._layout.text.startswith(served) else 0

    def _between(self, index: int) -> Span:
        """What a message adds to the text of the messages before it, of a template whose loops
        cannot be followed."""
        try:
            before = self._template.apply(self._messages[:index], self._tools)
            until = self._template.apply(self._messages[: index + 1], self._tools)
        except RowError:
            raise UnverifiedError(index) from None
        if before and self._layout.text.startswith(before):
            for stop in (len(until), *self._template.closing(until, 0, len(until))[::-1]):
                if len(before) < stop and self._layout.text.startswith(until[:stop]):
                    return len(before), stop
        raise UnverifiedError(index)

    def _stop(self, index: int) -> int:
        """Where the turn of a message ends that the template writes together with the next one: up
        to there the text is that of the conversation that ends with the message."""
        try:
            until = self._template.layout(self._messages[: index + 1], self._tools)
        except RowError:
            raise UnverifiedError(index) from None
        first, last = until.messages.get(index, (0, 0))
        for stop in self._template.closing(until.text, first, last)[::-1]:
            if first < stop and self._layout.text.startswith(until.text[:stop]):
                return stop
        if not self._layout.text.startswith(until.text[:first] or "\0"):
            raise UnverifiedError(index)
        raise NotAsServedError(
            f"message {index + 1}: the chat template shows this turn otherwise once another message "
            "follows it; end the row with this turn, or set data.chat_template to another template"
        )

    def _check_complete(self, index: int, written: str) -> None:
        """Raises NotAsServedError if the template leaves out reasoning or text beside calls, and
        RefusedError if it leaves out a call or an answer. written: what it writes for a message."""
        message, what = self._messages[index], f"message {index + 1}"
        _check_calls(message, written, what)
        content = (message["content"] or "").strip()
        shown = content in written
        if "</think>" in content and not _THOUGHT.match(content) and not shown:
            raise NotAsServedError(
                f"{what}: the chat template takes the text before </think> for reasoning; begin it "
                "with <think> if it is, or set data.chat_template to a template that does not"
            )
        thought, said = (text.strip() for text in _thought_of(message))
        calls = message.get("tool_calls") or message.get("function_call")
        may_lose = thought or (calls and said)
        if shown and not may_lose:
            return
        if self._probe is None:
            probes = _with_placeholders(self._messages)
            try:
                self._probe = self._template.probe(probes, self._tools, self._layout)
            except RowError:  # it refuses the placeholders
                self._probe = Layout("")
        if not self._probe.text:
            return
        first, last = self._probe.messages.get(index, (0, len(self._probe.text)))
        probed = self._probe.text[first:last]
        thought_there, said_there = _placeholders(index)
        if thought and thought_there not in probed:
            raise NotAsServedError(
                f"{what}: the chat template leaves out its reasoning, so the model would learn to answer without it; "
                f"end the row with this turn, or {_MEND}"
            )
        if said and said_there not in probed:
            if not may_lose:
                raise RefusedError(f"{what}: the chat template leaves out its content; {_MEND}")
            raise NotAsServedError(
                f"{what}: the chat template leaves out the text beside its tool calls, so the model would learn to call "
                f"without it; end the row with this turn, remove the text, or {_MEND}"
            )

    def _prompt(self, index: int, written: str) -> int:
        """Length of the generation prompt, which begins what the template writes for a message."""
        first = next(
            at for at, message in enumerate(self._messages) if message["role"] == "assistant"
        )
        known: list[str] = []
        for at in dict.fromkeys((first, index)):
            for prompt in self._generation_prompts(at):
                if written.startswith(prompt):
                    return len(prompt)
                known.append(prompt)
        if not known:
            raise UnverifiedError(index)
        raise PromptError(index, known[0], next(iter(self._switches()), None))

    def _generation_prompts(self, index: int) -> Iterator[str]:
        """What a template adds before the answer to messages[:index]: by default, and with and
        without thinking. Empty if that cannot be found out."""
        modes: list[dict[str, Any]] = [{}]
        for switch in self._switches():
            modes += [{switch: False}, {switch: True}]
        for options in modes:
            for by_parts in (False, True):
                key = index, by_parts, tuple(options.items())
                if key not in self._prompts:
                    self._prompts[key] = self._read_prompts(index, options, by_parts=by_parts)
                yield from self._prompts[key]

    def _switches(self) -> list[str]:
        """Those that the template reads and the recipe does not set."""
        read: Collection[str] = variables(self._template.source(self._tools)) or ()
        own = self._template.values
        return [switch for switch in _SWITCHES if switch in read and switch not in own]

    def _read_prompts(self, index: int, options: dict[str, Any], *, by_parts: bool) -> list[str]:
        """by_parts: after the last message; otherwise, with half the renderings, what the text has
        more than without a generation prompt."""
        before = self._messages[:index] or [{"role": "user", "content": "a"}]
        read = functools.partial(self._template.layout, by_parts=by_parts)
        try:
            bare = read(before, self._tools)
            full = read(before, self._tools, add_generation_prompt=True, **options)
            ends = list(_ends_of_last(bare, full, len(before) - 1))
            if options:  # a mode that changes the conversation serves another one
                ends = [end for end in ends if full.text[:end] in self._contexts.get(index, ())]
            self._contexts.setdefault(index, set()).update(full.text[:end] for end in ends)
            prompts = [full.text[end:] for end in ends if end < len(full.text)]
            if prompts or options or not by_parts:
                return prompts
            return self._headings(before, bare.text)
        except RowError:
            return []

    def _headings(self, before: list[Message], bare: str) -> list[str]:
        """What begins a turn that no generation prompt begins: a heading is not part of the
        answer."""
        answer = {"role": "assistant", "content": _PLACEHOLDER}
        full = self._template.apply([*before, answer], self._tools)
        heading, *rest = full.removeprefix(bare).split(_PLACEHOLDER)
        if not full.startswith(bare) or len(rest) != 1:
            return []
        return [heading] if heading.strip() else [heading, ""]

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

    def _missing_end(self, index: int, end: int) -> str | None:
        """The special token after the last turn, up to `end`, if another message follows: it ends
        the turn, such as <|observation|> of GLM-4.5 after a call. None: unknown, or only the
        heading of the next question."""
        calls = self._messages[index].get("tool_calls") or []
        following = {"role": "user", "content": _PLACEHOLDER}
        if calls:
            number = calls[0].get("id") if isinstance(calls[0], dict) else None
            following |= {"role": "tool", "name": "name", "tool_call_id": number or "000000000"}
        try:
            text = self._template.apply([*self._messages, following], self._tools)
            heading = "" if calls else self._template.apply([following], None)
        except RowError:
            return None
        answered = self._layout.text[:end]
        if not text.startswith(answered):
            return None
        token = self._template.first_special(text[end:])
        return None if token is None or token in heading.partition(_PLACEHOLDER)[0] else token

    def as_served(self) -> tuple[str, Turn] | None:
        """The text with the last turn after its generation prompt, if the template shows that turn
        otherwise; None if it is not known how.

        The prompt may open a thought that the template never shows (DeepSeek-R1), hold an empty
        one (Gemma 4), or show what the whole conversation does not (the system prompt of Mistral).
        """
        index = len(self._messages) - 1
        message, part = self._messages[index], self._layout.messages.get(index)
        if part is None or index == 0:
            return None
        written = self._layout.text[slice(*part)]
        try:
            _check_calls(message, written, f"message {index + 1}")
            full = self._template.apply(
                self._messages[:index], self._tools, add_generation_prompt=True
            )
        except RowError:
            return None
        prompts = [*self._generation_prompts(index), ""]
        prompt = max(prompts, key=lambda prompt: len(_common(prompt, written)))
        thought, said = _thought_of(message)
        mark = next((mark for mark in _THOUGHTS if prompt.rstrip().endswith(mark)), None)
        if not full.endswith(prompt):
            return None
        if mark is not None:
            heading, _, line = prompt.rpartition(mark)
            if not written.startswith(heading):
                return None
            rest = written.removeprefix(heading).lstrip()
            if rest.startswith((mark, _THOUGHTS[mark])):
                rest = rest.partition(_THOUGHTS[mark])[2].lstrip()
            answer = f"{thought}{line}{_THOUGHTS[mark]}{line}{line}{rest}"
        else:
            heading = _BEGUN_TAG.sub("", _common(prompt, written))
            opening, answer = prompt[len(heading) :], written[len(heading) :]
            if thought.strip() or (opening and not (heading and _CLOSED.search(opening))):
                return None
            for close in _THOUGHTS.values():
                if answer.lstrip().startswith(close):
                    if not opening.rstrip().endswith(close):
                        return None
                    answer = answer.lstrip().removeprefix(close)
            rest = answer
        said, shown = said.strip(), rest.strip()
        while said and (token := self._template.first_special(shown)) and shown != token:
            shown = shown.removeprefix(token).lstrip()
        if not shown.startswith(said):
            return None
        if not message.get("tool_calls"):
            begin, _ = self._template.closing(shown, len(said), len(shown))
            if shown[len(said) : begin].strip():  # more than the answer and its end
                return None
        text = full + answer
        closing, end = self._template.closing(text, len(full), len(text))
        return text, Turn(len(full), end, includes_end=closing < end)


def _opened(message: Message) -> Message:
    """The message with the `<think>` that is missing in an answer to a generation prompt that ended
    in it."""
    content = message["content"]
    if message["role"] != "assistant" or not isinstance(content, str):
        return message
    thought, mark, _ = content.partition("</think>")
    quoted = thought.endswith(("`", "'", '"'))
    if not mark or quoted or "<think>" in thought:
        return message
    return {**message, "content": "<think>" + "\n" * thought.endswith("\n") + content}


def _with_parts(messages: list[Message]) -> list[Message]:
    """The messages with their contents as lists of one part."""
    return [
        {**message, "content": [{"type": "text", "text": message["content"]}]}
        if isinstance(message["content"], str)
        else message
        for message in messages
    ]


def _ends_of_last(bare: Layout, full: Layout, last: int) -> Iterator[int]:
    """Where the last of the messages may end in `full`, which has a generation prompt; `bare` has
    none. A template may write the prompt in the pass of that message, or always (Llama 3), and
    another end instead of it (Phi-3)."""
    _, end = bare.messages.get(last, (0, 0))
    if end and full.text.startswith(bare.text[:end]):
        yield end
    else:
        _, end = full.messages.get(last, (0, len(full.text)))
        yield end
    if bare.text and full.text.startswith(bare.text):
        yield len(bare.text)


def _common(first: str, second: str) -> str:
    """The beginning that two texts share."""
    pairs = enumerate(zip(first, second, strict=False))
    different = (at for at, (one, other) in pairs if one != other)
    return first[: next(different, min(len(first), len(second)))]


def _attachments_of(modalities: Sequence[Modality], ids: Ids, rendered: Rendered) -> Attachments:
    """The attachments of a conversation in the document with these ids. Raises RecipeError if they
    have other tokens than their texts."""
    at = np.flatnonzero(np.isin(ids, [id for one in modalities for id in one.token_ids]))
    ends = np.cumsum([one.tokens for one in rendered.attachments], dtype=np.int64)
    if len(at) != ends[-1:].sum():
        nouns = " and ".join(modality.nouns for modality in modalities)
        what = f"{len(at)} tokens of {nouns}, where the text has {ends[-1:].sum()}"
        tokenizer = type(hugging_face_tokenizer(modalities[0].processor)).__name__
        raise RecipeError(f"{nouns}: {tokenizer}: {what}")
    return attachment_table(
        (one, int(at[last - one.tokens + 1]), int(at[last]) + 1)
        for one, last in zip(rendered.attachments, ends - 1, strict=True)
    )


def _marked_turns(
    layout: Layout, turns: list[int], learned: list[int], weights: Mapping[int, float]
) -> list[Turn]:
    """The marks of the turns that carry loss, of a template whose loops cannot be followed."""
    marks = [(start, end) for start, end in layout.generation if start < end]
    if learned == turns and {*weights.values()} <= {1.0}:
        return [Turn(start, end, includes_end=True) for start, end in marks]
    if len(marks) != len(turns):
        what = f"{len(turns)} assistant turns, but {len(marks)} {{% generation %}} marks"
        raise RowError(f"{what}: which belong to the turns with other weights, or without loss?")
    return [
        Turn(*mark, includes_end=True, weight=weights.get(index, 1.0))
        for index, mark in zip(turns, marks, strict=True)
        if index in learned
    ]


# Where each message is: a copy of the template writes marks around what each pass of a loop writes

MESSAGE_NUMBER = "launcher_message"
"""Key of a message with its index, which the marks repeat."""
_TAG = re.compile(
    r"\{#.*?#\}|\{%[-+]?\s*(?P<name>for|endfor|macro|endmacro|generation|endgeneration)\b"
    r"(?P<rest>.*?)(?P<close>[-+]?%\})",
    re.DOTALL,
)
_MARK = re.compile("\x02(\\w+):(\\d*)\x03")


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
            mark = "\x02generation:0\x03"
        elif name == "endgeneration":
            mark = "\x02generation:\x03"
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
            if name == "generation":
                generation.append((start, length))
            elif length - start > last - first:  # another loop may only look at the message
                messages[number] = start, length
        if index:
            begun[name] = int(index), length
        texts.append(text)
        length += len(text)
    return Layout("".join(texts), messages, generation, source)


# What a template must not leave out

_THOUGHT = re.compile(r"\s*<think>(.*?)</think>", re.DOTALL)


def _thought_of(message: Message) -> tuple[str, str]:
    """The reasoning of a message, and its content without it. Empty: there is none."""
    content = message["content"] or ""
    thought = _THOUGHT.match(content)
    if thought:
        return thought[1].strip("\n"), content[thought.end() :]
    reasoning = (message[key] for key in REASONING if message.get(key))
    return str(next(reasoning, "")).strip("\n"), content


def _with_placeholders(messages: list[Message]) -> list[Message]:
    """The messages with a placeholder for each reasoning and content of the assistant."""
    probes = []
    for number, message in enumerate(messages):
        probe = dict(message)
        if message["role"] == "assistant":
            _, said = _thought_of(message)
            thought_there, said_there = _placeholders(number)
            probe |= {key: thought_there for key in REASONING if message.get(key)}
            if said.strip():
                probe["content"] = said_there
            if _THOUGHT.match(message["content"] or ""):
                answer = f"\n\n{said_there}" if said.strip() else ""
                probe["content"] = f"<think>\n{thought_there}\n</think>{answer}"
        probes.append(probe)
    return probes


def _placeholders(number: int) -> tuple[str, str]:
    return f"{_PLACEHOLDER}{number}t", f"{_PLACEHOLDER}{number}c"


# The parts of a message: reasoning, calls and answer (data.loss_weights)

_MIXED_PARTS = (
    "the chat template does not show which text is reasoning, calls and answer (data.loss_weights); "
    "set data.chat_template to a template that writes them one after the other, unchanged"
)
_NAMED_TEXT = re.compile(rf"{_PLACEHOLDER}\d+(?P<part>t|c|n\d+e)")
_PARTS = {"t": "reasoning", "c": "answer", "n": "calls"}
_CLOSES_PART = re.compile(
    r"(</[^<>]+>|<\|END_\w+\|>|<\w+\|>|<\|end\|>|\[/\w+\]|◁/\w+▷)\s*", re.ASCII
)
"""A mark that ends reasoning or a text, with the white space after it."""


def _with_named_texts(messages: list[Message]) -> tuple[list[Message], dict[str, str]]:
    """The messages with a placeholder in the place of each reasoning, content and name of a call of
    the assistant; and the texts that these stand for. White space around a text stays."""
    texts: dict[str, str] = {}

    def name(text: object, placeholder: str) -> object:
        if not isinstance(text, str) or not text.strip():
            return text
        texts[placeholder] = text.strip()
        before, after = text[: -len(text.lstrip())], text[len(text.rstrip()) :]
        return f"{before}{placeholder}{after}"

    def named(call: Any, number: int, at: int) -> Any:
        if not isinstance(call, dict):
            return call
        if "function" in call:
            return {**call, "function": named(call["function"], number, at)}
        return {**call, "name": name(call.get("name"), f"{_PLACEHOLDER}{number}n{at}e")}

    probes = []
    for number, message in enumerate(messages):
        probe = dict(message)
        if message["role"] == "assistant":
            thought_there, said_there = _placeholders(number)
            content = message["content"]
            thought = _THOUGHT.match(content or "")
            if thought:
                begin, end = thought.span(1)
                probe["content"] = (
                    f"{content[:begin]}{name(thought[1], thought_there)}"
                    f"{content[end : thought.end()]}{name(content[thought.end() :], said_there)}"
                )
            else:
                probe["content"] = name(content, said_there)
                given = [key for key in REASONING if message.get(key)]
                probe |= {key: name(message[key], thought_there) for key in given}
            if calls := message.get("tool_calls"):
                probe["tool_calls"] = [named(call, number, at) for at, call in enumerate(calls)]
            if call := message.get("function_call"):
                probe["function_call"] = named(call, number, 0)
        probes.append(probe)
    return probes, texts


def _parts(written: str, probed: str, texts: Mapping[str, str]) -> list[tuple[int, str]]:
    """Where each part of a turn begins, and its name. Empty: they are not known.

    What a template writes between two parts belongs to the earlier one up to the mark that closes it,
    such as </think>, else to the later one. After a call all belongs to the calls. An empty thought
    before the first part is reasoning. written: the turn; probed: the turn with placeholders; texts:
    what they stand for.
    """
    parts = list[tuple[int, str]]()
    current, length, at = "", 0, 0
    for found in _NAMED_TEXT.finditer(probed):
        between, part = probed[at : found.start()], _PARTS[found["part"][0]]
        if part != current:
            closed = 0
            for mark in _CLOSES_PART.finditer(between):
                closed = mark.end()
            if current == "calls":
                closed = len(between)
            if not current and closed and part != "reasoning":
                parts.append((0, "reasoning"))
            parts.append((length + closed if parts else 0, part))
        current, at = part, found.end()
        length += len(between) + len(texts.get(found[0], ""))
    restored = _NAMED_TEXT.sub(lambda found: texts.get(found[0], found[0]), probed)
    return parts if restored == written else []


def _check_calls(message: Message, written: str, what: str) -> None:
    """Raises RefusedError if calls are missing in what the template writes for a message."""
    calls = [call.get("function", call) for call in message.get("tool_calls") or []]
    names = [call.get("name") for call in [*calls, message.get("function_call") or {}]]
    for name in filter(None, names):
        if written.count(str(name)) < names.count(name):
            raise RefusedError(
                f"{what}: the chat template leaves out a tool call ({name}); {_MEND}"
            )


# The forms in which templates take calls of tools

_WORDS = re.compile(r"\b(True|False|None)\b")
_JSON = {"True": "true", "False": "false", "None": "null"}
_AS_PYTHON = "the chat template prints arguments of a call as Python does, not as JSON"


def _leaves(value: object) -> list[object]:
    """What is in lists and objects, at any depth."""
    if not isinstance(value, dict | list):
        return [value]
    inner = value.values() if isinstance(value, dict) else value
    return [leaf for each in inner for leaf in _leaves(each)]
