"""What teachers predict at the targets of a document, also of a teacher with other tokens."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from launcher.data.dataset import SequenceDataset
from launcher.data.ends import stop_token_ids
from launcher.data.packing import Integers
from launcher.data.token_alignment import (
    Indices,
    Spans,
    TokenTexts,
    equal_ends,
    equal_tokens,
    spans_of_parts,
    token_texts,
    trained_parts,
)
from launcher.data.token_store import TokenStore, origin_of
from launcher.data.tokenizer import hugging_face_tokenizer
from launcher.errors import RecipeError
from launcher.models.micro_batch import IGNORED
from launcher.recipe import schema

CONTINUES, UNKNOWN = -1, -2
"""In place of the id of the target: the token is in the span of an earlier one; the teacher predicts
nothing there. In place of other ids, CONTINUES: the model has no such token."""
_SHOWN = 40
"""Bytes of a text that differs."""
_COUNTED = 1000
"""Documents of which the share of known targets is logged."""


@dataclass(frozen=True)
class Alignment:
    """The documents of the run as a teacher with another tokenizer has them."""

    store: TokenStore
    """Of the run."""
    other: TokenStore
    """Of the teacher."""
    documents: Indices
    """By the number of a document of the run: that of the same row in the store of the teacher, or -1."""
    texts: tuple[TokenTexts, TokenTexts]
    """Of the run's tokenizer, and of the teacher's."""
    ids: Indices
    """By the ids of the teacher: those of the run (see `equal_tokens`)."""

    def spans(self, document: int) -> Spans:
        """The spans of a document of the run, as positions in both stores."""
        own_start, parts = _parts(self.store, document)
        other_start, other_parts = _parts(self.other, int(self.documents[document]))
        own, other = spans_of_parts(parts, other_parts, self.texts)
        return Spans(own + own_start, other + other_start)

    def difference(self, documents: Integers) -> str:
        """What to say of the first difference between the texts with loss of the first of these
        documents; empty: there is none."""
        for document in documents[:_COUNTED].tolist():
            if (other := int(self.documents[document])) < 0:
                continue
            own, theirs = _parts(self.store, document)[1], _parts(self.other, other)[1]
            if len(own) != len(theirs):
                where = origin_of(self.store, document).where
                return (
                    f": {where} has {len(own)} parts with loss, and {len(theirs)} for the teacher"
                )
            for (_, ids), (_, other_ids) in zip(own, theirs, strict=True):
                texts = [
                    b"".join(of.texts[id] for id in each if id not in of.special).strip()
                    for of, each in zip(self.texts, (ids, other_ids), strict=True)
                ]
                if texts[0] != texts[1]:
                    pairs = enumerate(zip(*texts, strict=False))
                    at = next((n for n, (a, b) in pairs if a != b), min(map(len, texts)))
                    where = origin_of(self.store, document).where
                    shown = [text[at : at + _SHOWN].decode(errors="replace") for text in texts]
                    return (
                        f": {where} goes on with {shown[0]!r} for the model and {shown[1]!r} for the teacher; "
                        "data.chat_template_kwargs may make the templates alike, such as {enable_thinking: false}"
                    )
        return ""


def _parts(store: TokenStore, document: int) -> tuple[int, list[tuple[int, list[int]]]]:
    """The first position of a document, and its parts with loss (`trained_parts`)."""
    start, end = store.offsets[document : document + 2].tolist()
    ids, labels = store.ids[start:end].tolist(), store.labels_or_ids[start:end].tolist()
    return start, trained_parts(ids, labels, IGNORED)


def align(
    store: TokenStore,
    other: TokenStore,
    data: schema.Data,
    *,
    own: str,
    other_tokenizer: str,
    key: str,
) -> Alignment:
    """The documents of two stores of the same rows. data: of the teacher's store. own: the tokenizer
    of `store`. key: of the recipe, with the teacher. Raises RecipeError if the texts of tokens are not known."""
    texts = []
    for name in (own, other_tokenizer):
        try:
            texts.append(token_texts(hugging_face_tokenizer(name)))
        except RecipeError as error:
            what = f"its tokens cannot be compared with those of the run: {name}: {error}"
            raise RecipeError(f"{key}: {what}; choose one with the same tokens") from None
    both = texts[0], texts[1]
    ends = equal_ends(
        stop_token_ids(data, tokenizer=own), stop_token_ids(data, tokenizer=other_tokenizer), both
    )
    return Alignment(
        store,
        other,
        _same_rows(store, other),
        both,
        equal_tokens(*both, ends=ends),
    )


def _same_rows(store: TokenStore, other: TokenStore) -> Indices:
    """For each document, that of the same row in the other store, or -1."""
    assert store.origins is not None
    assert other.origins is not None
    if np.array_equal(store.origins, other.origins):
        return np.arange(store.documents)
    numbers = {origin: number for number, origin in enumerate(other.origins.tolist())}
    return np.array([numbers.get(origin, -1) for origin in store.origins.tolist()], dtype=np.int64)


class Coverage(NamedTuple):
    """How much a teacher with other tokens can say."""

    targets: int
    known: int
    """Targets with a prediction."""
    single: int
    """Targets with one for themselves alone."""
    documents: int
    equal: int
    """Tokens that the model has, too."""
    tokens: int
    """Of the model."""

    @property
    def share(self) -> float:
        """The share of the targets with a prediction."""
        return self.known / max(1, self.targets)

    def __str__(self) -> str:
        return (
            f"other tokens, of which {self.equal:,} are among the {self.tokens:,} of the model; "
            f"{self.share:.1%} of the targets have a prediction, {self.single / max(1, self.targets):.1%} "
            f"for themselves alone (of the first {self.documents:,} documents)"
        )


@dataclass(frozen=True)
class TeacherRows:
    """What a teacher predicts: rows of `top_k_dtype`, of each target of a data set, in the order of its
    sequences. With `with_target`, the first column is the target."""

    store: TokenStore
    starts: Indices
    """The first position of each piece of the sequences, sorted."""
    lengths: Indices
    first: Indices
    """The number of the first row of each of these pieces."""
    rows: npt.NDArray[Any]
    alignment: Alignment | None
    """None: `store` is that of the run."""
    with_target: bool
    last: dict[int, Spans] = field(default_factory=dict, compare=False)
    """The spans of the document that was asked for last: the next piece is often of the same one."""

    @classmethod
    def of(
        cls,
        dataset: SequenceDataset,
        counts: Indices,
        rows: npt.NDArray[Any],
        alignment: Alignment | None,
        *,
        with_target: bool,
    ) -> TeacherRows:
        """Of the data set that the teacher has predicted. counts: the targets of each piece."""
        starts = dataset.sequences.starts.astype(np.int64)
        order = np.argsort(starts, kind="stable")
        first = np.append(0, np.cumsum(counts))[:-1]
        lengths = dataset.sequences.lengths[order].astype(np.int64)
        return cls(
            dataset.store, starts[order], lengths, first[order], rows, alignment, with_target
        )

    def of_targets(self, document: int, first: int, end: int) -> npt.NDArray[Any]:
        """The rows of the targets at these positions of the run's store, all of one document."""
        labels = self.alignment.store.labels_or_ids if self.alignment else self.store.labels_or_ids
        positions = first + np.flatnonzero(labels[first:end] != IGNORED)
        if self.alignment is not None:
            return self._aligned(self.alignment, document, positions)
        numbers = self._numbers(first, end)[positions - first]
        if not self.with_target:
            assert (numbers >= 0).all()
            return np.array(self.rows[numbers])
        found = self._unknown(len(positions))
        known = numbers >= 0
        found[known] = self.rows[numbers[known]]
        others = found["id"][:, 1:]
        others[others == found["id"][:, :1]] = CONTINUES
        return found

    def _unknown(self, count: int) -> npt.NDArray[Any]:
        found = np.zeros(count, dtype=self.rows.dtype)
        found["id"] = CONTINUES
        found["id"][:, 0] = UNKNOWN
        return found

    def _numbers(self, first: int, end: int) -> Indices:
        """The number of the row of each position of `store`, all of one document; -1: there is none."""
        found = np.full(end - first, -1, dtype=np.int64)
        # A piece predicts the tokens behind its first one, and the next one behind its end
        piece = max(0, int(np.searchsorted(self.starts, first)) - 1)
        begin = int(self.starts[piece]) + 1
        positions = begin + np.flatnonzero(self.store.labels_or_ids[begin:end] != IGNORED)
        pieces = np.searchsorted(self.starts, positions) - 1
        begins = np.searchsorted(pieces, pieces)  # the first position of the same piece
        numbers = self.first[pieces] + np.arange(len(positions)) - begins
        known = (positions <= self.starts[pieces] + self.lengths[pieces]) & (positions >= first)
        # The first token of a document is not predicted by the piece that ends before it
        documents = np.searchsorted(self.store.offsets, positions, side="right")
        known &= documents == np.searchsorted(self.store.offsets, self.starts[pieces], side="right")
        found[positions[known] - first] = numbers[known]
        return found

    def _aligned(
        self, alignment: Alignment, document: int, positions: Integers
    ) -> npt.NDArray[Any]:
        """The rows of these positions of a document, with the ids of the run. That of the first token of
        a span has, as its first column, the probability of the whole span."""
        found, other = self._unknown(len(positions)), int(alignment.documents[document])
        if other < 0 or not len(positions):
            return found
        if document not in self.last:
            self.last.clear()
            self.last[document] = alignment.spans(document)
        own, theirs = self.last[document]
        start, end = self.store.offsets[other : other + 2].tolist()
        numbers = self._numbers(start, end)
        # Spans whose tokens are all predicted by both
        missing = np.append(0, np.cumsum(numbers < 0))
        known = missing[theirs[:, 1] - start] == missing[theirs[:, 0] - start]
        known &= (own[:, 0] >= positions[0]) & (own[:, 1] <= positions[-1] + 1)
        own, theirs = own[known], theirs[known] - start
        at = np.searchsorted(positions, own)
        # Of a part, all tokens have loss but the first of a document
        whole = at[:, 1] - at[:, 0] == own[:, 1] - own[:, 0]
        own, theirs, at = own[whole], theirs[whole], at[whole]
        for begin, after in at[at[:, 1] - at[:, 0] > 1].tolist():
            found["id"][begin + 1 : after, 0] = CONTINUES
        rows = self.rows[numbers[theirs[:, 0]]]
        logs = self.rows["log_probability"][np.maximum(numbers, 0), 0].astype(np.float64)
        logs = np.append(0, np.cumsum(np.where(numbers < 0, 0, logs)))
        ids = alignment.ids[rows["id"]]
        ids[rows["id"] == rows["id"][:, :1]] = CONTINUES  # the rest of it is no whole span
        ids[:, 0] = alignment.store.ids[own[:, 0]]
        ids[:, 1:][ids[:, 1:] == ids[:, :1]] = CONTINUES
        of_spans = np.zeros(len(at), dtype=self.rows.dtype)
        of_spans["id"], of_spans["log_probability"] = ids, rows["log_probability"]
        of_spans["log_probability"][:, 0] = logs[theirs[:, 1]] - logs[theirs[:, 0]]
        found[at[:, 0]] = of_spans
        return found

    def coverage(self, documents: Integers) -> Coverage:
        """Of the targets of the first of these documents, by a teacher with other tokens."""
        assert self.alignment is not None
        targets, known, single = 0, 0, 0
        offsets = self.alignment.store.offsets
        for document in documents[:_COUNTED].tolist():
            begin, end = offsets[document : document + 2].tolist()
            ids = self.of_targets(document, begin + 1, end)["id"][:, 0]
            targets += len(ids)
            known += int((ids != UNKNOWN).sum())
            follows = np.append(ids[1:] == CONTINUES, False)
            single += int(((ids >= 0) & ~follows).sum())
        ours = sum(map(bool, self.alignment.texts[0].texts))
        equal = int((self.alignment.ids >= 0).sum())
        return Coverage(targets, known, single, min(len(documents), _COUNTED), equal, ours)
