"""Rows of a query and its documents, for vectors of texts and for rerankers.

A row becomes a document of the token store: its texts one after the other. The labels say what each
text is, and the weights what score it has, so that a store has no further files.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from launcher.data.columns import Weights, described, encodable
from launcher.errors import RowError
from launcher.models.micro_batch import IGNORED
from launcher.recipe import schema
from launcher.recipe.template_names import PAIR_TEMPLATES
from launcher.sources.hub import model_folder
from launcher.sources.layouts import Match, further_negatives, is_message, typed
from launcher.sources.rows import Values
from launcher.sources.sentence_transformers import VectorSettings, vector_settings

if TYPE_CHECKING:
    from launcher.data.encoder import Encoder

QUERY, POSITIVE, NEGATIVE = range(3)
"""Labels of the last token of a text: what it is."""
PAIR = "Query: {query}\nDocument: {document}"
"""A text with a query and a document, where the tokenizer has no form of its own for two texts."""
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
"""That of a template which has one, where the recipe and the row give none (Qwen3-Reranker)."""


def pair_template(given: str | None) -> str:
    """The template that data.pair_template names or is."""
    return PAIR if given is None else PAIR_TEMPLATES.get(given, given)


def text_prompts(data: schema.Data, tokenizer: str | None) -> dict[str, str]:
    """`query_prompt` and `document_prompt`: those of the recipe, or where it gives none those in the
    folder of the tokenizer. Raises RecipeError if its files cannot be read."""
    known = VectorSettings()
    if tokenizer is not None and tokenizer != "bytes":
        known = vector_settings(model_folder(tokenizer, key="data.tokenizer", weights=False))
    query, document = data.query_prompt, data.document_prompt
    return {
        "query_prompt": known.query_prompt if query is None else query,
        "document_prompt": known.document_prompt if document is None else document,
    }


@dataclass(frozen=True)
class RetrievalRow:
    """The texts of a row: the query, if there is one, the documents that answer it, and others."""

    texts: Sequence[str]
    roles: Sequence[int]
    """QUERY, POSITIVE or NEGATIVE, of each text."""
    scores: Sequence[float] | None = None
    """How near each document is to the query; None: the row does not say."""
    prompt: str = ""
    """Text in front of the query, or the instruction of a template of pairs."""
    further: int = 0
    """Documents of the row that are not used."""

    def labels(self, lengths: Sequence[int]) -> tuple[npt.NDArray[np.int32], Weights]:
        """For texts of so many tokens, (tokens,): the role of each text at its last token, and else
        IGNORED; and the score of a document there, and else nan."""
        labels = np.full(sum(lengths), IGNORED, np.int32)
        ends = np.cumsum(lengths) - 1
        labels[ends] = self.roles
        weights = np.full(len(labels), math.nan, np.float32)
        if self.scores is not None:
            weights[ends[np.array(self.roles) != QUERY]] = self.scores
        return labels, weights

    def pairs(self, template: str) -> tuple[list[tuple[str, str]], RetrievalRow]:
        """The query with each document, as the text up to the end of the document and that after it; and
        the row of these texts."""
        begin, _, end = template.partition("{document}")
        query, *documents = self.texts
        values = {"query": query, "instruction": self.prompt or INSTRUCTION}
        begin, end = (
            # All at once: a query may hold the name of another part
            re.sub(r"\{(query|instruction)\}", lambda found: values[found[1]], part)
            for part in (begin, end)
        )
        parts = [(begin + document, end) for document in documents]
        texts = [first + last for first, last in parts]
        return parts, replace(self, texts=texts, roles=self.roles[1:])


def read_retrieval(encoder: Encoder, found: Match, row: Values) -> RetrievalRow:
    """The texts of a row, with the prompts of the recipe or of the row in front of them, and its
    documents up to data.documents. Raises RowError."""
    if "text" in found.columns:  # a document that no query of the row asks for
        text = next(_texts(row, found.columns["text"]))
        return RetrievalRow([encoder.settings.get("document_prompt", "") + text], [NEGATIVE])
    roles = ("instruction", "anchor", "messages")
    asked = next(found.columns[role] for role in roles if role in found.columns)
    queries = list(_texts(row, asked))
    if len(queries) != 1:
        raise RowError(f"column {asked!r} must hold one query; got {len(queries)}")
    prompt = encoder.settings.get("query_prompt", "")
    if (column := found.get("prompt")) is not None and row.get(column) is not None:
        prompt = next(_texts(row, column, empty=True))
    answers = found.columns["positive" if "positive" in found.columns else "response"]
    documents = [(text, POSITIVE) for text in _texts(row, answers)]
    if not documents:
        raise RowError(f"column {answers!r} must hold at least one text; got an empty list")
    others = [found.get("negatives"), found.get("rejected"), *further_negatives(found)]
    for column in others:
        if column is not None and not _is_empty(row.get(column)):
            documents += [(text, NEGATIVE) for text in _texts(row, column)]
    scores = _scores(row, found, documents)
    most = encoder.settings.get("documents", schema.Data.documents)
    further = max(0, len(documents) - most)
    documents = documents[:most]
    start = encoder.settings.get("document_prompt", "")
    joined = encoder.kind == "retrieval"
    return RetrievalRow(
        [prompt + queries[0] if joined else queries[0], *(start + text for text, _ in documents)],
        [QUERY, *(role for _, role in documents)],
        None if scores is None else scores[:most],
        prompt,
        further,
    )


def _texts(row: Values, column: str, *, empty: bool = False) -> Iterator[str]:
    """The texts of a column: a text or a list of texts; of passages, their title and text; of
    conversations, their one message."""
    value = row.get(column)
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if isinstance(value, str) and value.lstrip().startswith("["):  # as in a .csv
        with contextlib.suppress(ValueError, RecursionError):
            listed = json.loads(value)
            if isinstance(listed, list) and all(isinstance(text, str) for text in listed):
                value = listed
    for one in value if isinstance(value, list) and not is_message(value) else [value]:
        text = _text(one)
        if text is None:
            what = "must hold a text, or a list of texts"
            raise RowError(f"column {column!r} {what}; got {described(one)}")
        if not text.strip() and not empty:
            raise RowError(f"column {column!r} holds an empty text")
        yield encodable(text, f"column {column!r}")


def _is_empty(value: object) -> bool:
    """Whether there is no value: null, which a .csv has not, or an empty cell."""
    return value is None or (isinstance(value, str) and not value)


def _text(value: object) -> str | None:
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if isinstance(value, dict):
        value = dict(value)
        text = value.get("text", value.get("content"))
        title = value.get("title")
        value = f"{title} {text}" if isinstance(title, str) and title and text else text
    return value if isinstance(value, str) else None


def _scores(row: Values, found: Match, documents: Sequence[object]) -> list[float] | None:
    """The score of each document; None: the row has no scores. Raises RowError."""
    columns = [found.get(role) for role in ("scores", "positive_scores", "negative_scores")]
    there = [column for column in columns if column is not None]
    given = [column for column in there if not _is_empty(row.get(column))]
    if not given:
        return None
    scores: list[Any] = []
    for column in given:
        value: Any = row[column]
        value = value.tolist() if isinstance(value, np.ndarray) else value
        if isinstance(value, str):  # of a .csv
            with contextlib.suppress(ValueError, RecursionError):
                value = json.loads(value)
        scores += value if isinstance(value, list) else [value]
    names = " and ".join(map(repr, given))
    numbers = all(type(score) in (int, float) and math.isfinite(score) for score in scores)
    if not numbers or max(map(abs, scores), default=0) > 1e30:
        raise RowError(f"column {names} must hold numbers, one for each document")
    if len(scores) != len(documents):
        hint = f"{typed('data.ignore_columns', given)} trains without the scores"
        what = f"{len(documents)} documents, but {len(scores)} scores in {names}"
        raise RowError(
            f"{what}: there must be one for each positive, then for each negative; {hint}"
        )
    return [float(score) for score in scores]
