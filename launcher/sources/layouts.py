"""The kinds of rows, and their layouts: by which columns they are known, and what a row becomes.

The layouts are used twice: for data.kind where the recipe does not give it, before torch is imported,
and for reading the rows (`data/encoder.py`). docs/reference/data.md shows them.

A *role* is what a column is for, such as `response`. Its column is the one that `data.columns` or a
key such as `data.response_column` names, else the first of the role's usual names (NAMES), in any
case, that the row has. A layout is known by the roles that it needs.
"""

from __future__ import annotations

import functools
import json
import math
import re
import shlex
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

DataKind = Literal[
    "text",
    "tokens",
    "chat",
    "instruct",
    "classification",
    "preference",
    "unpaired",
    "retrieval",
    "reranking",
]


@dataclass(frozen=True)
class RowKind:
    """What the rows of a kind are, for all code that treats kinds differently."""

    learned: Literal["tokens", "answers", "whole answers", "class", "texts"]
    """What a row teaches: all its tokens; the tokens of its answers, of which data.loss_on may choose
    some; its answers as wholes, which are not cut; its class; or how near its texts are to one another."""
    conversation: bool = False
    """Whether a row is a conversation, which a chat template renders."""
    answers: tuple[str, ...] = ()
    """The roles of the answers to a prompt. Prompt and answers are texts or messages
    (data.prompt_format)."""

    @property
    def templated(self) -> bool:
        """Whether a chat template may render a row."""
        return self.conversation or bool(self.answers)

    @property
    def is_cut(self) -> bool:
        """Whether a row that is longer than a sequence loses its end, unless data.overlong drops
        it. Other rows continue in another sequence, or are dropped."""
        return self.learned in ("answers", "class")

    @property
    def is_cut_by_tokenizer(self) -> bool:
        """Whether the tokenizer cuts texts to data.sequence_length, which keeps the special tokens
        that close a text."""
        return self.learned in ("class", "texts")


KINDS: dict[str, RowKind] = {
    "text": RowKind("tokens"),
    "tokens": RowKind("tokens"),
    "chat": RowKind("answers", conversation=True),
    "instruct": RowKind("answers", answers=("response",)),
    "classification": RowKind("class"),
    "preference": RowKind("whole answers", answers=("chosen", "rejected")),
    "unpaired": RowKind("whole answers", answers=("response",)),
    "retrieval": RowKind("texts"),
    "reranking": RowKind("texts"),
}
"""By data.kind."""


def kinds_where(holds: Callable[[RowKind], object]) -> tuple[str, ...]:
    """The kinds of rows for which `holds` is true."""
    return tuple(name for name, kind in KINDS.items() if holds(kind))


TOKEN_KINDS = kinds_where(lambda kind: kind.learned in ("tokens", "answers"))
"""Kinds whose loss is a sum over tokens. They mix with each other."""


def typed(key: str, value: str | Sequence[str | None]) -> str:
    """`key=value` as one types it in a shell. value: a text, or texts of a list."""
    texts = [value] if isinstance(value, str) else [str(text) for text in value]
    plain = [
        text if re.fullmatch(r"[A-Za-z_][\w.-]*", text) else json.dumps(text, ensure_ascii=False)
        for text in texts
    ]
    plain = [json.dumps(text) if text.lower() in _NOT_TEXT else text for text in plain]
    whole = plain[0] if isinstance(value, str) else f"[{', '.join(plain)}]"
    return f"{key}={shlex.quote(whole)}"


_NOT_TEXT = ("null", "true", "false", "yes", "no", "on", "off", "y", "n")
"""Words that YAML reads as something else."""
NAMES: dict[str, tuple[str, ...]] = {
    "messages": ("messages", "conversations", "conversation", "contents", "dialog", "texts"),
    "prompt": ("prompt",),
    "instruction": (
        "instruction",
        "question",
        "query",
        "problem",
        "inputs",
        "user",
        "human",
        "message_1",
        "input",
        "article",
    ),
    "input": ("input", "context", "article", "passage"),
    "response": (
        "response",
        "completion",
        "output",
        "solution",
        "generated_solution",
        "answer",
        "targets",
        "target",
        "assistant",
        "gpt",
        "message_2",
        "generation",
        "highlights",
    ),
    "reasoning": ("reasoning_content", "reasoning", "thinking"),
    "history": ("history",),
    "calls": ("answers",),
    "system": (
        "system",
        "system_prompt",
        "system_message",
        "system_instruction",
        "systemInstruction",
    ),
    "tools": ("tools", "functions"),
    "images": ("images", "image"),
    "objects": ("objects",),
    "videos": ("videos", "video"),
    "chosen": (
        "chosen",
        "chosen_messages",
        "chosen_conversations",
        "chosen_response",
        "preferred_output",
        "response_j",
    ),
    "rejected": (
        "rejected",
        "rejected_messages",
        "rejected_conversations",
        "rejected_response",
        "non_preferred_output",
        "response_k",
    ),
    "text": ("text", "content", "raw_content", "sentence"),
    "label": ("label", "kto_tag", "is_good", "is_correct", "accepted", "desirable"),
    "input_ids": ("input_ids",),
    "labels": ("labels",),
    "weights": (),
    "margin": (),
    "anchor": ("anchor", "sentence1", "text1"),
    "positive": (
        "positive",
        "positives",
        "pos",
        "positive_passages",
        "positive_messages",
        "sentence2",
        "text2",
    ),
    "negatives": (
        "negatives",
        "negative",
        "neg",
        "hard_negatives",
        "negative_passages",
        "negative_messages",
    ),
    "scores": ("scores", "score", "similarity", "similarity_score"),
    "positive_scores": ("pos_scores", "positive_scores"),
    "negative_scores": ("neg_scores", "negative_scores"),
}
"""The usual names of the column of each role, the first one that is there counts."""
KEYS = {
    role: f"{role}_column"
    for role in (
        "text",
        "messages",
        "prompt",
        "response",
        "chosen",
        "rejected",
        "margin",
        "label",
        "weights",
        "system",
    )
}
"""The keys of `data` that name the column of a role."""
EXPLICIT_ONLY = ("weights", "margin")
"""Roles that are read only if their own key names the column, and not by `data.columns`."""

_BY_DEFAULT = ("text", "chosen", "rejected", "label")
"""Roles whose key has the name of the role as its default."""


ATTACHMENTS = {"image": "images", "video": "videos"}
"""What rows may have beside text: the kinds of attachments, each with its plural, which is the section
of the recipe and the role of the column. A store numbers the kinds in this order."""


def nouns_of(kinds: Iterable[str]) -> str:
    """What attachments of these kinds are called."""
    return " and ".join(ATTACHMENTS[kind] for kind in kinds)


def with_article(kind: str) -> str:
    """`an image`, `a video`."""
    return f"{'an' if kind[0] in 'aeiou' else 'a'} {kind}"


@dataclass(frozen=True)
class Layout:
    """Rows with columns of certain roles."""

    kind: DataKind
    needs: tuple[str, ...]
    """Roles whose columns a row must have."""
    also: tuple[str, ...]
    """Roles whose columns are used where a row has them."""
    becomes: str
    """What a row becomes, for the documents."""


_SHARED = ("system", "tools", "images", "videos")
RETRIEVAL: tuple[DataKind, ...] = ("retrieval", "reranking")
_DOCUMENTS = ("negatives", "prompt", "scores", "positive_scores", "negative_scores")
LAYOUTS = (
    Layout("preference", ("prompt", "chosen", "rejected"), (*_SHARED, "margin"), "a pair"),
    Layout(
        "preference",
        ("instruction", "chosen", "rejected"),
        ("input", "history", *_SHARED, "margin"),
        "a pair",
    ),
    Layout(
        "preference",
        ("messages", "chosen", "rejected"),
        (*_SHARED, "margin"),
        "a pair of answers to the conversation",
    ),
    Layout(
        "preference",
        ("chosen", "rejected"),
        (*_SHARED, "margin"),
        "a pair; the prompt is what both begin with",
    ),
    Layout(
        "preference",
        ("messages", "rejected"),
        (*_SHARED, "margin"),
        "a pair: the last answer of the conversation, and a worse one",
    ),
    Layout(
        "preference",
        ("instruction", "response", "rejected"),
        ("input", "history", *_SHARED, "margin"),
        "a pair: the response, and a worse one",
    ),
    Layout(
        "preference",
        ("prompt", "response", "rejected"),
        (*_SHARED, "margin"),
        "a pair: the response, and a worse one",
    ),
    Layout(
        "unpaired",
        ("instruction", "response", "label"),
        ("input", "history", "reasoning", *_SHARED),
        "an answer, and whether it is good",
    ),
    Layout(
        "unpaired",
        ("prompt", "response", "label"),
        ("reasoning", *_SHARED),
        "an answer, and whether it is good",
    ),
    Layout(
        "unpaired",
        ("messages", "label"),
        _SHARED,
        "the last answer of the conversation, and whether it is good",
    ),
    Layout("chat", ("messages",), (*_SHARED, "objects", "weights"), "a conversation"),
    Layout("tokens", ("input_ids",), ("labels", "weights"), "its token ids"),
    Layout("classification", ("text", "label"), (), "a text with its class"),
    Layout(
        "instruct",
        ("instruction", "response"),
        ("input", "history", "reasoning", *_SHARED, "objects"),
        "a user's and an assistant's turn; as text, Alpaca's headings",
    ),
    Layout(
        "instruct",
        ("prompt", "response"),
        ("reasoning", *_SHARED, "objects"),
        "a user's and an assistant's turn; as text, one after the other",
    ),
    *(
        Layout(
            "instruct",
            (nouns, "response"),
            ("reasoning", "system"),
            f"a user's turn with the {nouns} alone, and an assistant's",
        )
        for nouns in ATTACHMENTS.values()
    ),
    Layout(
        "instruct",
        ("instruction", "calls", "tools"),
        ("system",),
        "a user's turn, and an assistant's with tool calls",
    ),
    Layout("text", ("text",), (), "a text"),
    *(
        Layout(kind, needs, also, f"{what}, its documents and perhaps others")
        for kind in RETRIEVAL
        for needs, also, what in (
            (("instruction", "positive"), _DOCUMENTS, "a query"),
            (("messages", "positive"), _DOCUMENTS, "a query (the user's message)"),
            (("anchor", "positive"), _DOCUMENTS, "a text"),
            (("instruction", "response"), ("rejected", "scores"), "a query"),
        )
    ),
    Layout("retrieval", ("text",), (), "a document without a query"),
)
"""The first one that fits counts."""


@dataclass(frozen=True)
class Match:
    """A layout that fits a row."""

    layout: Layout
    columns: Mapping[str, str]
    """The column of each role that the row has."""

    def get(self, role: str) -> str | None:
        """The column of a role; None: the row has none."""
        return self.columns.get(role)


def roles_of(kind: str) -> frozenset[str]:
    """The roles of the columns that rows of a data.kind may have."""
    return frozenset(
        role for layout in LAYOUTS if layout.kind == kind for role in (*layout.needs, *layout.also)
    )


def role_of(name: str) -> str | None:
    """The role that a key of `data.columns` stands for: a role, or one of its usual names."""
    if name in EXPLICIT_ONLY:
        return None
    if name in NAMES:
        return name
    return next((role for role, names in NAMES.items() if name in names), None)


def named_columns(data: Mapping[str, Any]) -> dict[str, str]:
    """The column of each role that keys of section `data` name. A key at its default names none."""
    named = {
        role: data[key]
        for role, key in KEYS.items()
        if isinstance(data.get(key), str) and not (role in _BY_DEFAULT and data[key] == role)
    }
    columns = data.get("columns")
    for name, column in columns.items() if isinstance(columns, Mapping) else ():
        role = role_of(name) if isinstance(name, str) else None
        if role is not None and isinstance(column, str):
            named[role] = column
    return named


_PATH = re.compile(r"[^.\[\]]+(?:\.[^.\[\]]+|\[\d+\])+")


def with_named_parts(row: Mapping[str, Any], named: Mapping[str, str]) -> dict[str, Any]:
    """The row with the parts of its columns that the recipe names, such as `answers.text[0]`, as
    columns, in place of the columns that hold them. A part that is not there is null."""
    paths = [name for name in named.values() if name not in row and _PATH.fullmatch(name)]
    steps = {path: re.findall(r"[^.\[\]]+", path) for path in paths}
    steps = {path: keys for path, keys in steps.items() if keys[0] in row}
    if not steps:
        return row if isinstance(row, dict) else dict(row)
    held = {keys[0] for keys in steps.values()}.difference(named.values())
    parts: dict[str, Any] = {name: value for name, value in row.items() if name not in held}
    for path, keys in steps.items():
        value: Any = row
        for key in keys:
            if isinstance(value, Mapping):
                value = value.get(key)
            elif isinstance(value, Sequence) and not isinstance(value, str) and key.isdecimal():
                value = value[int(key)] if int(key) < len(value) else None
            else:
                value = None
        parts[path] = value
    return parts


def match(
    columns: Collection[str],
    named: Mapping[str, str],
    kinds: Collection[str],
    ignored: Collection[str] = (),
) -> Match | None:
    """The first layout of these kinds that fits rows with these columns; None if there is none.

    named: of `named_columns`. ignored: data.ignore_columns.
    """
    return _match(tuple(columns), tuple(named.items()), tuple(kinds), tuple(ignored))


def match_row(
    row: Mapping[str, Any],
    named: Mapping[str, str],
    kinds: Collection[str],
    ignored: Collection[str] = (),
) -> Match | None:
    """`match` by the columns of a row that are not null, or else by all: rows of several layouts in
    one file have the columns of all of them."""
    row = with_named_parts(row, named)
    given = [column for column, value in row.items() if value is not None]
    found = match(given, named, kinds, ignored)
    return found or match(row, named, kinds, ignored)


@functools.lru_cache(maxsize=1024)
def _match(
    columns: tuple[str, ...],
    named: tuple[tuple[str, str], ...],
    kinds: tuple[str, ...],
    ignored: tuple[str, ...],
) -> Match | None:
    present = [column for column in columns if column not in ignored]
    for layout in LAYOUTS:
        if layout.kind in kinds and _takes(layout, dict(named)):
            found = _columns_of(layout, present, dict(named))
            if all(role in found for role in layout.needs):
                return Match(layout, found)
    return None


def _takes(layout: Layout, named: Mapping[str, str]) -> bool:
    """Whether a layout has all roles whose columns are named, apart from those of other kinds."""
    roles = {*layout.needs, *layout.also}
    return all(role in roles for role in named if role in roles_of(layout.kind))


def _columns_of(layout: Layout, columns: Sequence[str], named: Mapping[str, str]) -> dict[str, str]:
    """The column of each role of a layout that there is. No column has two roles."""
    spelt = {column.lower(): column for column in reversed(columns)}
    found: dict[str, str] = {}
    for role in (*layout.needs, *layout.also):
        if role in named:
            candidates = [named[role]] if named[role] in columns else []
        else:
            usual = (spelt.get(name.lower()) for name in NAMES[role])
            candidates = [column for column in usual if column is not None]
        taken = {*found.values(), *(named[other] for other in named if other != role)}
        column = next((column for column in candidates if column not in taken), None)
        # The same column may be named for two roles on purpose
        if column is None and role in named and candidates:
            column = candidates[0]
        if column is not None:
            found[role] = column
    if "negatives" in layout.also and "negatives" not in named:
        taken = {*found.values()}
        found |= {c: c for c in columns if _NUMBERED_NEGATIVE.fullmatch(c) and c not in taken}
    return found


_NUMBERED_NEGATIVE = re.compile(r"(hard_)?neg(ative)?s?_\d+", re.IGNORECASE)
"""Names of further columns with a negative each. Their name is their role."""


def further_negatives(found: Match) -> list[str]:
    """The columns of a match with a negative each, such as `negative_2`, by their numbers."""
    names = [role for role in found.columns if _NUMBERED_NEGATIVE.fullmatch(role)]
    return sorted(names, key=lambda name: int(name.rpartition("_")[2]))


def documents_of(row: Mapping[str, Any], found: Match) -> int:
    """The documents of a query in a row of this layout, at least one."""
    roles = ("positive", "response", "negatives", "rejected", *further_negatives(found))
    values = (row.get(found.columns[role]) for role in roles if role in found.columns)
    # A conversation is one document
    counts = (
        1 if not isinstance(value, list | tuple) or is_message(value) else len(value)
        for value in values
        if value is not None
    )
    return max(1, sum(counts))


def is_message(value: Sequence[Any]) -> bool:
    """Whether a list is a conversation of one message."""
    return len(value) == 1 and isinstance(value[0], dict) and "content" in value[0]


def guess(
    row: Mapping[str, Any],
    named: Mapping[str, str],
    *,
    kinds: Collection[str] = TOKEN_KINDS,
    ignored: Collection[str] = (),
) -> Match | None:
    """The layout of the first row of data whose kind is not given; None if none fits.

    kinds: those that the recipe's objective learns from (`recipe/objectives.py`). A conversation
    that ends with an answer beside a pair, as in UltraFeedback, is one of both: a chat, unless
    training is on pairs.
    """
    of_objective = [kind for kind in kinds if kind not in TOKEN_KINDS]
    if (found := match_row(row, named, of_objective, ignored)) is not None:
        return found
    found = match_row(row, named, TOKEN_KINDS, ignored)
    pair = match_row(row, named, ["preference"], ignored)
    if pair is None or "chosen" not in pair.columns:  # a conversation is good as it is
        return found
    chat = found is not None and found.layout.kind == "chat"
    if found is not None and chat and _ends_with_answer(row.get(found.columns["messages"])):
        return found
    return pair


def _ends_with_answer(messages: object) -> bool:
    last = messages[-1] if isinstance(messages, list) and messages else None
    if not isinstance(last, dict):
        return True  # not known
    return last.get("role", last.get("from")) not in ("user", "human", "system", "tool")


def no_layout(
    columns: Collection[str],
    named: Mapping[str, str],
    kind: str | None = None,
    ignored: Collection[str] = (),
) -> str:
    """Why rows with these columns cannot be used: the nearest layout, what it lacks, and the key
    that names it. kind: data.kind; None: of any."""
    present = [column for column in columns if column not in ignored]
    found: list[tuple[int, int, Layout, list[str]]] = []
    for number, layout in enumerate(LAYOUTS):
        if layout.kind == kind or (
            kind is None and layout.kind not in ("tokens", "classification", *RETRIEVAL)
        ):
            there = _columns_of(layout, present, named)
            missing = [role for role in layout.needs if role not in there]
            if len(missing) < len(layout.needs) or kind is not None:
                untaken = 0 if _takes(layout, named) else 1
                found.append((len(missing) + untaken, number, layout, missing))
    listed = f"columns: {', '.join(columns) or 'none'}"
    if not found:
        keys = [f"data.columns.{role}=NAME" for role in ("prompt", "response", "messages", "text")]
        form = f"{keys[0]} and {keys[1]}, or {keys[2]}, or {keys[3]}"
        return f"no layout of rows has these columns; {listed}; name them: {form}"
    _, _, layout, missing = min(found)[:4]
    absent = {role: column for role, column in named.items() if column not in columns}
    if absent and all(role in absent for role in missing):
        names = " and ".join(f"{column!r} for {role}" for role, column in absent.items())
        return f"the recipe names columns that are not there: {names}; {listed}"
    if not missing:
        roles = ", ".join(named)
        what = f"no layout has columns for all of {roles}, which the recipe names"
        return f"{what}; the nearest layout is {_form(layout)}; {listed}"
    near = "" if kind is not None else f" of the nearest layout ({_form(layout)})"
    lacks = [f"{role} ({_usual(role, named)})" for role in missing]
    names = " ".join(f"data.columns.{role}=NAME" for role in missing)
    text = f"no column for {' and '.join(lacks)}{near}; {listed}; {names} names it"
    if "completions" in present and {*missing} & {
        "response",
        "chosen",
        "rejected",
    }:  # UltraFeedback
        text += (
            "; completions holds several answers: write the best as response, or two as chosen and "
            "rejected"
        )
    others = {layout.kind for layout in LAYOUTS} - {kind or "", "text", *RETRIEVAL}
    other = match(present, named, others)
    if kind is not None and other is not None:
        text += (
            f"; or set data.kind={other.layout.kind}, which has such columns; rows of two kinds "
        )
        text += (
            "belong in two files, as two sources: data.train.a.files=FILE data.train.b.files=FILE"
        )
    return text


def _form(layout: Layout) -> str:
    return f"{layout.kind}: {', '.join(layout.needs)}"


def _usual(role: str, named: Mapping[str, str]) -> str:
    """The names that a role's column may have."""
    if role in named:
        return f"{named[role]}, as the recipe names it"
    names = NAMES[role]
    return ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")


# Columns that are not used

BESIDE_TEXT = ("image", "images", "video", "videos", "audio", "audios")
"""Names of columns, and keys of messages, that hold more than text."""
_LIKE_ATTACHMENTS = {
    "image": re.compile(
        r"(image|img|picture|photo)_?(path|file|filename|file_name|url|bytes|base64)?s?|"
        r"(image|img|picture|photo)_?\d+|(jpg|jpeg|png|webp|pil_image)"
    ),
    "video": re.compile(
        r"video_?(path|file|filename|file_name|url|bytes|base64)s?|video_?\d+|(mp4|webm)"
    ),
}
"""By kind, names of other columns that hold attachments, in rows of conversations."""
_ENDINGS = {
    "image": (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff"),
    "video": (".mp4", ".webm", ".mkv", ".mov", ".avi"),
}
"""By kind, how the names of files end."""
_FILE_COLUMNS = ("file_name", "file_names")
_WITHOUT_ATTACHMENTS = ("tokens", "classification", *RETRIEVAL)
_WEIGHTS = ("weight", "weights", "loss_weight", "sample_weight")
_SCORES = ("score", "reward", "rating", "quality", "helpfulness")
_SPEAKERS = ("user", "assistant", "system", "human", "gpt", "prompter", "bot", "model")
_MASKS = ("loss_mask", "completion_mask", "assistant_masks")


def has_content(value: object) -> bool:
    """Whether a value is more than null or empty. 0 and false are content."""
    if value is None:
        return False
    try:
        return len(value) > 0  # type: ignore[arg-type]
    except TypeError:
        return not (isinstance(value, float) and math.isnan(value))


def unused_columns(
    row: Mapping[str, Any], found: Match, ignored: Collection[str] = ()
) -> Iterator[tuple[str, Any]]:
    """The columns of a row that have content and are not used, with their values."""
    used = {*found.columns.values(), *ignored}
    for column, value in row.items():
        if column not in used and has_content(value):
            yield column, value


def lost_meaning(
    row: Mapping[str, Any],
    found: Match,
    ignored: Collection[str] = (),
    *,
    attachments: Collection[str] = (),
) -> str | None:
    """The problem of a row with an unused column that changes what the row means; None: no such
    column. attachments: the kinds that the run sees."""
    kind = found.layout.kind
    seen = [ATTACHMENTS[each] for each in ATTACHMENTS if each in attachments]
    run = f"training on {' and '.join(['text', *seen])}"
    for each, nouns in ATTACHMENTS.items():
        held = found.get(nouns)
        if each not in attachments and held is not None and has_content(row.get(held)):
            without = typed("data.ignore_columns", [*ignored, held])
            lost = f"holds {nouns}, which {run} does not see; {nouns}.train=none trains on them"
            return f"column {held!r} {lost}; {without} trains without it"
    for column, value in unused_columns(row, found, ignored):
        name = column.lower()
        what = None
        beside = [nouns for nouns in ATTACHMENTS.values() if name in NAMES[nouns]]
        named_files = [each for each in ATTACHMENTS if _names_files(each, name, value)]
        like = [
            each
            for each in ATTACHMENTS.keys() - {*attachments}
            if column == unused_column_of(each, {column: value}, found)
        ]
        if kind == "text" and beside:
            keys = typed("data.columns.response", found.columns["text"])
            keys = keys if beside[0] in seen else f"{beside[0]}.train=none {keys}"
            what = f"holds {beside[0]} beside a text, which {keys} learns as the answer to them"
        elif (
            named_files
            and found.get(nouns := ATTACHMENTS[named_files[0]]) is None
            and kind not in _WITHOUT_ATTACHMENTS
        ):
            keys = "" if nouns in seen else f"{nouns}.train=none "
            keys += typed(f"data.columns.{nouns}", column)
            if kind == "text":
                keys += f" {typed('data.columns.response', found.columns['text'])}"
            what = f"names files of {nouns}, which {keys} trains on"
        elif name in BESIDE_TEXT:
            what = f"holds images, videos or audio, which {run} does not see"
            if seen:
                what = "holds audio, or images or videos beside another such column, which the run "
                what += "does not see"
        elif like:
            what = f"holds {ATTACHMENTS[like[0]]} by its name, which {run} does not see"
        elif kind == "tokens":
            if name in _MASKS and "labels" not in found.columns:
                what = "says which tokens carry loss; write it as labels, with -100 for no loss"
        elif KINDS[kind].templated and name in NAMES["label"] and _is_mark(value):
            what = "marks the answer, too: data.label_column names the column that counts"
            if "label" not in found.columns:
                what = "marks good and bad answers, and all would be learned as good ones: "
                what += "kto.beta=0.1 learns from both (data.kind=unpaired); or keep the good ones"
        elif kind == "text" and name in ("role", "from") and str(value).lower() in _SPEAKERS:
            what = "says who speaks, so a row is one message of a conversation: make each "
            what += "conversation a row with the column messages"
        elif KINDS[kind].learned == "answers" and name in _SCORES and _is_number(value):
            what = "says how good an answer is, and all would be learned alike: keep the good ones"
        if what is None and kind != "text" and name in _WEIGHTS and _is_weight(value):
            what = "holds a weight"
            if "weights" in roles_of(kind):
                what += f", which {typed('data.weights_column', column)} uses"
            else:
                what += f", and kind {kind} has none"
        if what is not None:
            without = typed("data.ignore_columns", [*ignored, column])
            return f"column {column!r} {what}; {without} trains without it"
    return None


def _names_files(kind: str, column: str, value: object) -> bool:
    """Whether a column is that of the `imagefolder` or `videofolder` of datasets, and names files of
    this kind."""
    names = value if isinstance(value, list) else [value]
    texts = [name for name in names if isinstance(name, str)]
    return column in _FILE_COLUMNS and any(text.lower().endswith(_ENDINGS[kind]) for text in texts)


def unused_column_of(
    kind: str, row: Mapping[str, Any], found: Match, ignored: Collection[str] = ()
) -> str | None:
    """An unused column whose name says that it holds attachments of a kind, such as `image_path`."""
    like = _LIKE_ATTACHMENTS[kind]
    for column, value in unused_columns(row, found, ignored):
        is_like = like.fullmatch(column.lower()) and not isinstance(value, int | float)
        if is_like and KINDS[found.layout.kind].templated:
            return column
    return None


def _is_mark(value: object) -> bool:
    if isinstance(value, str):
        return value.strip().lower() in ("true", "false", "0", "1")
    return isinstance(value, bool) or value in (0, 1, -1)


def _is_number(value: object) -> bool:
    if isinstance(value, str):
        try:
            float(value)
        except ValueError:
            return False
        return True
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_weight(value: object) -> bool:
    """Also a list with the weight of each token."""
    return _is_number(value) or not isinstance(value, str | bool | dict)


_SHOWN = 8


def unused_line(columns: Iterable[str]) -> str:
    """The line about columns that are not used."""
    names = list(columns)
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"columns not used: {', '.join(names[:_SHOWN])}{more}"
