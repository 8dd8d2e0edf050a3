"""Rows into token ids, for each kind of data."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

import numpy as np

from launcher.data.attachments import join_attachments
from launcher.data.chat_template import NotAsServedError, Rendered, encode, render
from launcher.data.columns import (
    described,
    encodable,
    read_integers,
    read_list,
    read_margin,
    read_mark,
    read_text,
    read_value,
    read_weights,
)
from launcher.data.coordinates import OBJECT_MARKS, joined
from launcher.data.documents import Document, Encoded
from launcher.data.messages import (
    Chat,
    Message,
    chat_of_row,
    dialogue,
    instruction,
    parsed_messages,
    plain_content,
    read_calls,
    read_chat,
    read_conversation,
    read_history,
    read_messages,
    read_tools,
    unused_tools,
    with_system,
)
from launcher.data.modality import Modality
from launcher.data.pairs import different, pair_of_answers
from launcher.data.retrieval_rows import (
    RetrievalRow,
    pair_template,
    read_retrieval,
    text_prompts,
)
from launcher.data.template_source import read_template, today, uses_date
from launcher.data.tokenizer import (
    Ids,
    Tokenizer,
    has_alpaca_template,
    has_chat_template,
    hugging_face_tokenizer,
    load_tokenizer,
    prints_date,
    tokenizer_identity,
)
from launcher.errors import RowError
from launcher.models.micro_batch import IGNORED
from launcher.recipe import schema
from launcher.recipe.template_names import missing_tokens, template_name
from launcher.sources.layouts import (
    ATTACHMENTS,
    KINDS,
    Match,
    RowKind,
    has_content,
    lost_meaning,
    match_row,
    named_columns,
    no_layout,
    roles_of,
    typed,
    unused_columns,
    with_named_parts,
)
from launcher.sources.rows import Row, SourcePart, Values, in_batches, read_all

_LOOKED_AT = 100
"""First rows among which `prompt_form` looks for one that can be used."""
_ENCODED_ROWS = 64
"""Most rows that are tokenized at once."""
_SETTINGS: dict[str, Callable[[RowKind], bool]] = {
    "ignore_columns": lambda kind: True,
    "system": lambda kind: kind.templated,
    "loss_on": lambda kind: kind.learned == "answers",
    "chat_template_kwargs": lambda kind: kind.templated,
    "message_weights": lambda kind: kind is KINDS["chat"],
    "documents": lambda kind: kind.learned == "texts",
    "pair_template": lambda kind: kind is KINDS["reranking"],
    "loss_weights": lambda kind: kind is KINDS["chat"],
}
"""Further keys of data that change the tokens, and whether rows of a kind read them."""


@dataclass(frozen=True)
class Encoder:
    """How rows of one kind become ids."""

    kind: schema.DataKind
    tokenizer: str | None
    """A folder, a hub id or `bytes`; None for kind tokens."""
    columns: dict[str, str]
    """The columns that the recipe names, by their role (`sources/layouts.py`)."""
    labels: tuple[str, ...] | None = None
    template: str | None = None
    """The text of a chat template that replaces the tokenizer's own."""
    template_name: str | None = None
    """Its name in NAMED_TEMPLATES; None: it has none."""
    longest: int | None = None
    """Most tokens of a text that the tokenizer cuts, with its special tokens."""
    day: str | None = None
    """YYYY-MM-DD, for a chat template that prints today's date; None if none does."""
    settings: dict[str, Any] = field(default_factory=dict, repr=False)
    """Those of _SETTINGS that have another value than their default; and for kinds with a prompt and
    answers `prompt_format`, chat or text."""
    modalities: tuple[Modality, ...] = ()
    """The attachments that rows may have beside text."""

    @property
    def text_column(self) -> str:
        """The column that the content of a text file goes to."""
        return self.columns.get("text") or "text"

    @property
    def as_turns(self) -> bool:
        """Whether a prompt and an answer that are texts become turns of a conversation."""
        return bool(self.settings.get("prompt_format") == "chat")

    @property
    def ignored(self) -> tuple[str, ...]:
        """Columns that are not used on purpose."""
        return self.settings.get("ignore_columns") or ()

    @property
    def kinds(self) -> list[str]:
        """The kinds of attachments that rows may have."""
        return [modality.kind for modality in self.modalities]

    def match(self, row: Values) -> tuple[Match, Values]:
        """The layout of a row, and the row with the parts of columns that the recipe names. Raises
        RowError if no layout fits, or if a column that changes what the row means is not used."""
        row = with_named_parts(row, self.columns)
        found = match_row(row, self.columns, [self.kind], self.ignored)
        if found is None:
            raise RowError(no_layout(row, self.columns, self.kind, self.ignored))
        if found.get("objects") is not None and not (
            self.modalities and _shows_objects(found, row)
        ):
            others = {role: name for role, name in found.columns.items() if role != "objects"}
            found = replace(found, columns=others)  # it is told as a column that is not used
        if (problem := lost_meaning(row, found, self.ignored, attachments=self.kinds)) is not None:
            raise RowError(problem)
        return found, row

    @property
    def reads_arrays(self) -> bool:
        """Whether lists of numbers are read as arrays (`read_rows`)."""
        return self.kind == "tokens"

    def read(self, parts: Iterable[SourcePart]) -> Iterator[Row]:
        """The rows of all parts."""
        return read_all(parts, column=self.text_column, arrays=self.reads_arrays)

    def identity(self) -> list[object]:
        """Changes whenever the ids of a row could. Loads no tokenizer."""
        tokenizer, template, *day = self.fingerprint().values()
        settings = [self.settings] if self.settings else []
        common = [self.kind, tokenizer, self.columns, self.labels, template, self.longest]
        attachments = [part for modality in self.modalities for part in modality.identity()]
        return [*common, *day, *settings, *attachments]

    def fingerprint(self) -> dict[str, str | None]:
        """Checksums of the tokenizer's files and of data.chat_template; and the date, if a template
        prints it."""
        template = self.template
        day = {} if self.day is None else {"date": self.day}
        return {
            "tokenizer": None if self.tokenizer is None else tokenizer_identity(self.tokenizer),
            "chat_template": template and hashlib.sha256(template.encode()).hexdigest(),
            **day,
        }

    @property
    def notes(self) -> list[str]:
        """What to say at the start of how rows are read."""
        notes = self._missing_tokens()
        if not KINDS[self.kind].answers:
            return notes
        how = "a user's and an assistant's turn of the chat template"
        if not self.as_turns:
            how = "one text, without a chat template"
        return [f"a prompt and an answer are trained as {how} (data.prompt_format)", *notes]

    def _missing_tokens(self) -> list[str]:
        """A warning if the tokenizer splits what is a token in the named template."""
        if self.template_name is None or self.tokenizer is None:
            return []
        known = hugging_face_tokenizer(self.tokenizer).get_added_vocab()
        missing = missing_tokens(self.template_name, known)
        if not missing:
            return []
        mend = typed("model.new_tokens", missing)
        return [
            f"warning: the tokenizer does not have {', '.join(missing)} of "
            f"data.chat_template={self.template_name}: they are trained as text, and only the last "
            f"answer of a row ends with the eos_token; {mend} makes them tokens that end answers"
        ]

    def encode_rows(
        self, rows: Iterable[Row], *, unused: list[str] | None = None
    ) -> Iterator[Encoded]:
        """One result per row, in order. Tokenizing in batches is several times faster.

        unused: gains the columns with content that are not used. Raises RecipeError for a problem of
        the tokenizer.
        """
        kind = _PROMPTED if KINDS[self.kind].answers else _KINDS[self.kind]
        for batch in in_batches(rows, most=_ENCODED_ROWS, size=lambda row: row.size):
            problems, usable = [row.problem for row in batch], []
            for index, row in enumerate(batch):
                if row.values is None:
                    continue
                encoder = self
                if self.modalities:
                    of_file = (each.of_file(row.part.name) for each in self.modalities)
                    encoder = replace(self, modalities=tuple(of_file))
                try:
                    found, values = encoder.match(row.values)
                    rest = [name for name, _ in unused_columns(values, found, self.ignored)]
                    read = kind.read(encoder, found, values)
                    usable.append(read if kind.render is None else kind.render(encoder, read))
                except RowError as error:
                    problems[index] = str(error)
                    continue
                if unused is not None:
                    unused += [name for name in rest if name not in unused]
            documents = iter(kind.encode(self, usable) if usable else ())
            for row, problem in zip(batch, problems, strict=True):
                if problem:
                    yield Encoded(row=row, problem=problem)
                else:
                    document = next(documents)
                    known = {each.name: getattr(document, each.name) for each in fields(document)}
                    yield Encoded(row=row, **known)


PromptForm = Literal["messages", "instruction", "text"]
"""What rows with a prompt hold: messages, an instruction, which is trained under a heading, or a
prompt, to which nothing is added."""


def prompt_form(encoder: Encoder, parts: Iterable[SourcePart]) -> PromptForm | None:
    """The form of the first row that fits the kind; None: it has no prompt, or none is found."""
    if not KINDS[encoder.kind].answers:
        return None
    for row in itertools.islice(encoder.read(parts), _LOOKED_AT):
        with contextlib.suppress(RowError):  # reported when the rows are read
            if row.values is not None:
                return form_of_row(row.values, encoder.match(row.values)[0])
    return None


def form_of_row(row: Mapping[str, Any], found: Match) -> PromptForm:
    """The form of a row of this layout."""
    roles = ("prompt", "instruction", "messages", "response", "chosen")
    values = [row.get(found.get(role) or "") for role in roles]
    if any(isinstance(parsed_messages(value), list) for value in values):
        return "messages"
    return "instruction" if found.get("instruction") is not None else "text"


def _shows_objects(found: Match, row: Values) -> bool:
    """Whether a text of a row has the place of an object."""
    roles = ("messages", "prompt", "instruction", "input", "response")
    texts = [str(row.get(found.get(role) or "")) for role in roles]
    return any(mark in text for mark in OBJECT_MARKS for text in texts)


def last_question(encoder: Encoder, row: Values) -> str | None:
    """The last turn of the user in a row, or its prompt; None: the row has neither."""
    with contextlib.suppress(RowError):  # as it is read
        found, _ = encoder.match(row)
        for role in ("messages", "prompt", "instruction", "chosen", "response"):
            column = found.get(role)
            value = parsed_messages(row.get(column)) if column is not None else None
            if isinstance(value, str) and role in ("prompt", "instruction"):
                return value
            if column is None or not isinstance(value, list):
                continue
            for message in reversed(_messages(encoder, value, column, turns=True)):
                if message.get("role") == "user":
                    return plain_content(message.get("content") or "")
    return None


def prompt_format(data: schema.Data, tokenizer: str) -> Literal["chat", "text"]:
    """How a prompt and an answer that are texts are trained."""
    if data.prompt_format != "auto":
        return data.prompt_format
    if data.chat_template is not None:
        return "chat"
    # The template of such an export writes an instruction, but not its input, as it was trained
    as_text = has_alpaca_template(tokenizer) or not has_chat_template(tokenizer)
    return "text" if as_text else "chat"


def make_encoder(
    kind: schema.DataKind,
    data: schema.Data,
    *,
    tokenizer: str | None,
    modalities: tuple[Modality, ...] = (),
) -> Encoder:
    """The encoder of `kind`, without the settings that it does not use: they must not change the
    store.

    tokenizer is data.tokenizer, or the model's. Raises RecipeError if the chat template cannot be read.
    """
    rows = KINDS[kind]
    file, template = data.chat_template, None
    if rows.templated and file is not None:
        template = read_template(file)
    assert tokenizer is not None or kind == "tokens", "the model's own tokenizer is the default"
    day = None
    if rows.templated and tokenizer is not None:
        dated = prints_date(tokenizer) if template is None else uses_date(template)
        day = (data.date or today()) if dated else None
    settings = {
        name: getattr(data, name)
        for name, is_read in _SETTINGS.items()
        if is_read(rows) and getattr(data, name) != getattr(schema.Data, name)
    }
    if rows.answers and tokenizer is not None:
        settings["prompt_format"] = prompt_format(data, tokenizer)
    if rows.learned == "texts":
        settings |= {name: text for name, text in text_prompts(data, tokenizer).items() if text}
    named = named_columns(vars(data))
    return Encoder(
        kind=kind,
        tokenizer=None if kind == "tokens" else tokenizer,
        columns={role: column for role, column in named.items() if role in roles_of(kind)},
        labels=data.labels if rows.learned == "class" else None,
        template=template,
        template_name=None if template is None else template_name(str(data.chat_template)),
        longest=data.sequence_length if rows.is_cut_by_tokenizer else None,
        day=day,
        settings=settings,
        modalities=modalities if rows.templated else (),
    )


def _read_text(encoder: Encoder, found: Match, row: Values) -> str:
    column = found.columns["text"]
    return encodable(read_value(row, column, str, "text", role="text"), f"column {column!r}")


def _encode_texts(encoder: Encoder, texts: list[str]) -> Iterator[Document]:
    tokenizer = load_tokenizer(encoder.tokenizer)
    for text, ids in zip(texts, tokenizer.ids(texts), strict=True):
        yield Document(_document(tokenizer, ids) if text else ids)


def _read_tokens(encoder: Encoder, found: Match, row: Values) -> Document:
    ids = read_integers(row, found.columns["input_ids"])
    if (least := int(ids.min(initial=0))) < 0:
        raise RowError(f"input_ids must not be negative; got {least}")
    of_labels = found.get("labels") or "labels"
    labels = None if row.get(of_labels) is None else read_integers(row, of_labels)
    if labels is not None and len(labels) != len(ids):
        need = "there must be one for each token (-100: no loss)"
        raise RowError(f"{len(ids)} input_ids, but {len(labels)} labels; {need}")
    wrong = [] if labels is None else labels[(labels < 0) & (labels != IGNORED)]
    if len(wrong):
        raise RowError(f"labels must be token ids, or -100 for no loss; got {int(wrong[0])}")
    column = encoder.columns.get("weights")
    if column is None or not ids.size:
        return Document(ids, labels)
    weights = np.broadcast_to(read_weights(row, column, len(ids)), ids.shape)
    counted = np.where(weights > 0, ids if labels is None else labels, np.int32(IGNORED))
    return Document(ids, counted, weights=weights)


def _messages(
    encoder: Encoder, value: object, column: str, *, turns: bool = False
) -> list[Message]:
    kinds, ignored = encoder.kinds, encoder.ignored
    return read_messages(value, column, turns=turns, attachments=kinds, ignored=ignored)


_Answer = Chat | Rendered | tuple[str, str]
"""A conversation that ends with the answer, as messages and then rendered; or prompt and answer as
two texts."""


@dataclass(frozen=True)
class _Prompted:
    """A row with a prompt and answers."""

    answers: Sequence[_Answer]
    columns: list[str]
    """Those of a pair of answers."""
    margin: float | None = None
    desirable: bool | None = None
    """Whether the answer is a good one, of rows that say so."""
    reasoning: str | None = None
    """The column with the reasoning of the answer."""


def _read_prompted(encoder: Encoder, found: Match, row: Values) -> _Prompted:
    roles = KINDS[encoder.kind].answers
    if len(roles) == 1:
        mark, reasoning = found.get("label"), found.get("reasoning")
        return _Prompted(
            [_read_response(encoder, found, row)],
            columns=[],
            desirable=None if mark is None else read_mark(row, mark),
            reasoning=reasoning if reasoning is not None and row.get(reasoning) else None,
        )
    row, found = pair_of_answers(row, found, as_turns=encoder.as_turns)
    answers = [_read_answer(encoder, found, row, role) for role in roles]
    margin = read_margin(row, encoder.columns.get("margin"))
    return _Prompted(answers, [found.columns[role] for role in roles], margin)


def _render_prompted(encoder: Encoder, read: _Prompted) -> _Prompted:
    try:
        answers = [
            render(encoder, answer) if isinstance(answer, Chat) else answer
            for answer in read.answers
        ]
    except NotAsServedError as error:
        if read.reasoning is None:
            raise
        without = typed("data.ignore_columns", [read.reasoning])
        raise RowError(f"{error}; {without} trains without it") from None
    if read.columns:
        different(answers, *read.columns)
    return replace(read, answers=answers)


def _encode_prompted(encoder: Encoder, batch: list[_Prompted]) -> Iterator[Document]:
    """The answers of a row one after the other, each after the prompt."""
    encoded = _encode_answers(encoder, [answer for row in batch for answer in row.answers])
    for row in batch:
        answers = list(itertools.islice(encoded, len(row.answers)))
        if len(answers) == 1:
            yield replace(answers[0], desirable=row.desirable)
            continue
        first = len(answers[0].ids)
        yield Document(
            np.concatenate([answer.ids for answer in answers]),
            np.concatenate([answer.labels_or_ids for answer in answers]),
            first_length=first,
            margin=row.margin,
            attachments=join_attachments([each.attachments for each in answers], [0, first]),
            coordinates=joined(each.coordinates for each in answers),
        )


def _read_response(encoder: Encoder, found: Match, row: Values) -> Chat | tuple[str, str]:
    if (calls := found.get("calls")) is not None:
        column = found.columns["instruction"]
        prompt = read_value(row, column, str, "text", role="instruction")
        listed = read_list(row.get(calls), f"column {calls!r}")
        if not listed:
            raise RowError(f"column {calls!r} is empty, so there is nothing to learn from")
        made = read_calls(listed, f"column {calls!r}")
        answer = {"role": "assistant", "content": "", "tool_calls": made}
        question = with_system(encoder, found, row, [{"role": "user", "content": prompt}])
        return chat_of_row(encoder, found, row, [*question, answer], loss_from=len(question))
    if "response" in found.columns:
        return _read_answer(encoder, found, row, "response")
    column = found.columns["messages"]
    messages = read_conversation(encoder, found, row, turns=True)
    if messages[-1]["role"] != "assistant":
        raise RowError(f"column {column!r} must end with the answer, a turn of the assistant")
    return chat_of_row(encoder, found, row, messages, loss_from=len(messages) - 1)


_PROMPT, _ANSWER = (str, list), "text or a list of messages"


def _read_answer(encoder: Encoder, found: Match, row: Values, role: str) -> Chat | tuple[str, str]:
    """A prompt and the response in the column of a role: a conversation, if either is a list of messages, or if
    texts become turns; else two texts, to be joined as they are."""
    column = found.columns[role]
    response = parsed_messages(read_value(row, column, (str, list, dict), _ANSWER, role=role))
    if not isinstance(response, str | list):
        what = "write the answer to a column of its own, as text"
        raise RowError(f"column {column!r} must hold {_ANSWER}; got {described(response)}; {what}")
    if not (response.strip() if isinstance(response, str) else response):
        raise RowError(f"column {column!r} is empty, so there is nothing to learn from")
    as_turns, rounds = encoder.as_turns, list[tuple[str, str]]()
    key = found.get("instruction") or found.get("prompt") or found.get("messages") or "prompt"
    prompt: Any = parsed_messages(row.get(key))
    if found.get("instruction") is not None and not isinstance(prompt, list):
        history = found.get("history")
        rounds = [] if history is None else read_history(row.get(history))
        headings = not (as_turns or isinstance(response, list))
        parts = {key: row.get(key)}
        if (more := found.get("input")) is not None:
            parts[more] = row.get(more)
        prompt = instruction(parts, rounds if headings else [], headings=headings)
    elif asked := [nouns for nouns in ATTACHMENTS.values() if nouns in found.layout.needs]:
        prompt = ""
        if not has_content(row.get(beside := found.columns[asked[0]])):
            raise RowError(f"column {beside!r} is empty, and the row has no other prompt")
    elif not isinstance(prompt, list):
        prompt = read_value(row, key, str, _ANSWER, role="prompt")
    if isinstance(prompt, str) and isinstance(response, str) and as_turns:
        if found.get("prompt") is not None and re.match(r"\s\S", response):
            response = response[1:]  # white space that joins two texts
        prompt = _dialogue_before_answer(prompt) or prompt
    reasoning = found.get("reasoning")
    thought = None if reasoning is None else read_text(row.get(reasoning), reasoning)
    if isinstance(prompt, str) and isinstance(response, str) and not as_turns:
        if encoder.modalities:
            what = f"rows with {encoder.modalities[0].nouns} need a chat template, which shows them"
            raise RowError(f"{what}; set data.prompt_format=chat, or data.chat_template")
        if thought:
            what = "holds reasoning, which only a chat template writes; set data.prompt_format=chat"
            raise RowError(
                f"column {reasoning!r} {what}, or {typed('data.ignore_columns', [reasoning])}"
            )
        return _as_texts(encoder, found, row, prompt, response)
    earlier = [
        {"role": role, "content": text}
        for asked, answered in rounds
        for role, text in (("user", asked), ("assistant", answered))
    ]
    asked_now = _turns(encoder, "user", prompt, key)
    question = with_system(encoder, found, row, [*earlier, *asked_now])
    answer = _turns(encoder, "assistant", response, column)
    if thought:
        answer[-1] = {**answer[-1], "reasoning_content": thought}
    return chat_of_row(encoder, found, row, question + answer, loss_from=len(question))


def _as_texts(
    encoder: Encoder, found: Match, row: Values, prompt: str, response: str
) -> tuple[str, str]:
    """Prompt and response as they are, the prompt after the system prompt."""
    column, system = found.get("tools"), encoder.settings.get("system")
    if column is not None and read_tools(row.get(column), column):
        raise RowError(unused_tools(column, "text is trained on without a chat template"))
    if (column := found.get("system")) is not None:
        system = read_text(row.get(column), column) or system
    prompt = f"{system}\n\n{prompt}" if system else prompt
    encodable(prompt + response, "prompt or response")
    return prompt, response


def _dialogue_before_answer(prompt: str) -> list[Message] | None:
    """The turns of a prompt that is a dialogue and ends where the assistant is to answer."""
    return dialogue(prompt) if prompt.rstrip().endswith("\n\nAssistant:") else None


def _turns(encoder: Encoder, role: str, value: str | list[object], column: str) -> list[Message]:
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    return _messages(encoder, value, column)


def _encode_answers(encoder: Encoder, batch: list[_Answer]) -> Iterator[Document]:
    """The answers, each after its prompt.

    Prompt and response are tokenized as one text: some tokenizers write the beginning of a text
    differently from its middle. Tokens that hold a part of the response carry loss.
    """
    tokenizer = load_tokenizer(encoder.tokenizer)
    for are_rendered, rows in itertools.groupby(batch, lambda answer: isinstance(answer, Rendered)):
        answers: list[Any] = list(rows)
        if are_rendered:
            yield from encode(encoder, answers)
            continue
        for ids, first in tokenizer.joined(answers):
            document = _document(tokenizer, ids)
            labels = document.copy()
            begun = bool(tokenizer.begin) and ids[:1].tolist() != tokenizer.begin
            if encoder.settings.get("loss_on") != "all":
                labels[: first + begun] = IGNORED
            yield Document(document, labels)


def _read_classification(encoder: Encoder, found: Match, row: Values) -> tuple[str, int]:
    text, column = _read_text(encoder, found, row), found.columns["label"]
    if not text:
        raise RowError(f"column {found.columns['text']!r} is empty")
    names, value = encoder.labels, read_value(row, column, object, "the label", role="label")
    if names is not None and value in names:
        return text, names.index(value)
    if isinstance(value, str) and value.strip().isdecimal():  # a .csv holds only text
        value = int(value)
    most = 2**31 if names is None else len(names)
    if type(value) is not int or not 0 <= value < most:
        form = "a whole number from 0; data.labels gives names"
        if names is not None:
            form = f"a whole number from 0 to {most - 1}, or a name: {', '.join(names)}"
        raise RowError(f"column {column!r}: {value!r} is no class; it must be {form}")
    return text, value


def _encode_classification(encoder: Encoder, batch: list[tuple[str, int]]) -> list[Document]:
    texts, categories = zip(*batch, strict=True)
    rows = zip(_cut_texts(encoder, texts), categories, strict=True)
    return [Document(ids, class_number=number, cut_tokens=cut) for (ids, cut), number in rows]


def _cut_texts(encoder: Encoder, texts: Sequence[str]) -> list[tuple[Ids, int]]:
    """The ids of each text, cut by the tokenizer, which keeps the special tokens that close a text;
    and the tokens that it loses."""
    tokenizer, most = load_tokenizer(encoder.tokenizer), encoder.longest
    assert most is not None
    whole = tokenizer.ids(texts, special=True)
    encoded = [
        ids if len(ids) <= most else tokenizer.ids([text], special=True, longest=most)[0]
        for text, ids in zip(texts, whole, strict=True)
    ]
    lost = [max(0, len(ids) - most) for ids in whole]
    return list(zip(encoded, lost, strict=True))


def _encode_retrieval(encoder: Encoder, batch: list[RetrievalRow]) -> Iterator[Document]:
    """The texts of each row one after the other."""
    yield from _joined_texts(
        batch, _cut_texts(encoder, [text for row in batch for text in row.texts])
    )


def _encode_pairs(encoder: Encoder, batch: list[RetrievalRow]) -> Iterator[Document]:
    """The query of a row with each of its documents, one pair after the other: in the tokenizer's form
    for two texts, or by the template of data.pair_template."""
    tokenizer, most = load_tokenizer(encoder.tokenizer), encoder.longest
    assert most is not None
    given = encoder.settings.get("pair_template")
    if given is None and tokenizer.separates_pairs:
        rows = [replace(row, texts=row.texts[1:], roles=row.roles[1:]) for row in batch]
        pairs = [(row.texts[0], text) for row in batch for text in row.texts[1:]]
        texts = [
            (ids, 0)
            if len(ids) <= most
            else (tokenizer.pairs([pair], longest=most)[0], len(ids) - most)
            for pair, ids in zip(pairs, tokenizer.pairs(pairs), strict=True)
        ]
    else:
        made = [row.pairs(pair_template(given)) for row in batch]
        rows = [row for _, row in made]
        parts = [part for of_row, _ in made for part in of_row]
        starts = tokenizer.ids([first for first, _ in parts])
        ends = tokenizer.ids([last for _, last in parts])
        begin = np.array(tokenizer.begin, np.int32)
        texts = []
        for start, end in zip(starts, ends, strict=True):
            room = max(1, most - len(begin) - len(end))
            lost = max(0, len(start) - room)
            texts.append((np.concatenate([begin, start[:room], end]), lost))
    yield from _joined_texts(rows, texts)


def _joined_texts(
    rows: Sequence[RetrievalRow], texts: Iterable[tuple[Ids, int]]
) -> Iterator[Document]:
    """A document for each row, of its texts one after the other. texts: the ids of the texts of all
    rows, and the tokens that they have lost. See `RetrievalRow.labels`."""
    remaining = iter(texts)
    for row in rows:
        of_row = list(itertools.islice(remaining, len(row.texts)))
        labels, weights = row.labels([len(ids) for ids, _ in of_row])
        yield Document(
            np.concatenate([ids for ids, _ in of_row]),
            labels,
            weights=weights,
            cut_tokens=sum(lost for _, lost in of_row),
            further_documents=row.further,
        )


@dataclass(frozen=True)
class _Kind:
    """How rows of a kind become documents."""

    read: Callable[[Encoder, Match, Values], Any]
    """What the columns of a row hold. Raises RowError."""
    encode: Callable[[Encoder, list[Any]], Iterable[Document]]
    """The documents of a batch of what was read."""
    render: Callable[[Encoder, Any], Any] | None = None
    """What was read as text, by a chat template. Raises RowError."""


_KINDS: dict[schema.DataKind, _Kind] = {
    "text": _Kind(_read_text, _encode_texts),
    "tokens": _Kind(_read_tokens, lambda encoder, batch: batch),
    "chat": _Kind(read_chat, encode, render),
    "classification": _Kind(_read_classification, _encode_classification),
    "retrieval": _Kind(read_retrieval, _encode_retrieval),
    "reranking": _Kind(read_retrieval, _encode_pairs),
}
_PROMPTED = _Kind(_read_prompted, _encode_prompted, _render_prompted)
"""Of all kinds with a prompt and answers."""


def _document(tokenizer: Tokenizer, ids: Ids) -> Ids:
    """The ids with the tokens that begin and end a document, unless the text has them."""
    begin = [] if ids[:1].tolist() == tokenizer.begin else tokenizer.begin
    end = [] if ids[-1:].tolist() == [tokenizer.end] else [tokenizer.end]
    return np.concatenate([np.array(begin, np.int32), ids, np.array(end, np.int32)])
