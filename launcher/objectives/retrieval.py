"""Queries and their documents: samples and micro-batches of their texts.

`embedding.py` makes a vector of each text, and `reranker.py` a score of each query with a document.
"""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch

from launcher.data.collation import (
    NOTHING,
    Collated,
    Piece,
    RowInputs,
    Sample,
    make_sample,
    padded,
    squared_lengths,
)
from launcher.data.dataset import SequenceDataset
from launcher.data.packing import Integers, Sequences
from launcher.data.retrieval_rows import NEGATIVE, POSITIVE, QUERY
from launcher.data.token_store import ModelTraits, TokenStore
from launcher.errors import RecipeError
from launcher.models.micro_batch import IGNORED, MicroBatch
from launcher.objectives.base import Example, Objective
from launcher.recipe import schema

MOST_TEXTS = 1024
"""More than a row of the data has."""
Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Retrieval(Objective):
    """A document of the store is a row of the data: the texts of a query and of its documents, or of pairs
    of them. With packing a row of the model holds the texts of some of them, kept apart; without, a row
    is a text."""

    longest: int = 2048
    """Tokens to which a text is cut (data.sequence_length)."""
    unit: ClassVar[str] = "queries"
    divides_loss: ClassVar[bool] = False
    predicts_tokens: ClassVar[bool] = False
    causal: ClassVar[bool] = False
    targets_are_fixed: ClassVar[bool] = False

    @abstractmethod
    def trained(self, store: TokenStore) -> Mask:
        """Whether each document of a store has what the loss compares."""

    def packs(self, data: schema.Data) -> bool:
        """Whether several texts share a row."""
        return data.packing

    def text_length(self, row_length: int) -> int:
        """The tokens to which the tokenizer has cut texts."""
        return self.longest

    def pack(self, store: TokenStore, data: schema.Data, documents: Integers | None) -> Sequences:
        """A row of the data in each sequence. Rows from which the loss learns nothing are dropped."""
        numbers = np.arange(store.documents) if documents is None else documents
        lengths = np.diff(store.offsets)[numbers]
        trained = (lengths > 0) & self.trained(store)[numbers]
        kept = numbers[trained]
        return Sequences(
            store.offsets[:-1][kept],
            lengths[trained],
            np.arange(len(kept) + 1),
            documents=len(numbers),
            dropped_documents=int(np.count_nonzero(~trained)),
            cut_documents=store.cut_documents,
            cut_tokens=store.cut_tokens,
            targets=len(kept),
        )

    def for_model(self, data: schema.Data, model: ModelTraits) -> Retrieval:
        """With the length of the texts."""
        return replace(self, longest=data.sequence_length)

    @abstractmethod
    def needs(self) -> str:
        """What no row has, where no row is trained."""

    def nothing_to_train(self, names: str, data: schema.Data) -> str:
        """See `needs`."""
        return f"data: {self.needs()} in {names}"

    def no_targets(self, where: str, key: str) -> str:
        """See `needs`."""
        return f"{key}: {self.needs()} in {where}"

    def sample(self, dataset: SequenceDataset, index: int) -> Sample:
        """`input_ids`, `position_ids` and `targets`, which are the role of a text at its last token and
        else IGNORED, (tokens,); and by text `names`, `hashes` and `scores`, (texts,)."""
        store = dataset.store
        texts = list[tuple[Any, int, int, float]]()
        for document, start, end in dataset.pieces(index):
            labels = np.asarray(store.labels_or_ids[start:end])
            ends = np.flatnonzero(labels != IGNORED) + 1
            parts = np.split(np.asarray(store.ids[start:end]), ends[:-1])
            scores = ends * np.nan
            if store.weights is not None:
                scores = np.asarray(store.weights[start:end])[ends - 1]
            for number, (part, stop) in enumerate(zip(parts, ends, strict=True)):
                name = MOST_TEXTS * document + number
                texts.append((part, int(labels[stop - 1]), name, float(scores[number])))
        return sample_of(texts)

    def collate(self, rows: list[Sample], inputs: RowInputs) -> Collated:
        """See `collate_texts`."""
        return collate_texts(rows, inputs)

    def marks(self, dataset: SequenceDataset, sample: Sample, start: int, end: int) -> list[bool]:
        """No token has loss."""
        return [False] * (end - start)

    def parts(self, dataset: SequenceDataset, document: int) -> list[tuple[str, int]]:
        """The query and its documents."""
        store = dataset.store
        start, end = int(store.offsets[document]), int(store.offsets[document + 1])
        labels = np.asarray(store.labels_or_ids[start:end])
        names = {QUERY: "query", POSITIVE: "positive", NEGATIVE: "negative"}
        ends = np.flatnonzero(labels != IGNORED)
        return [(names[int(labels[last])], int(last) + 1) for last in ends]

    def example_rows(self, about: Example) -> list[Sample]:
        """Full texts: of a packed row a query and its documents, else a query and a document by turns."""
        rows = []
        for number, ids in enumerate(about.ids()):
            parts = np.array_split(ids, 1 + about.data.documents) if about.inputs.packed else [ids]
            roles = [number % 2] if len(parts) == 1 else [QUERY, POSITIVE, *[NEGATIVE] * len(parts)]
            texts = zip(parts, roles, range(len(parts)), [0.0] * len(parts), strict=False)
            rows.append(sample_of(texts))
        return rows


def sample_of(texts: Iterable[tuple[Any, int, int, float]]) -> Sample:
    """The sample of texts: their ids, roles, names and scores."""
    pieces: list[Piece] = [(NOTHING, NOTHING)]
    names, hashes, scores = list[int](), list[int](), list[float]()
    for ids, role, name, score in texts:
        targets = np.full(len(ids), IGNORED, dtype=np.int64)
        targets[-1] = role
        pieces.append((ids, targets))
        digest = hashlib.blake2b(np.asarray(ids, dtype=np.int32).tobytes(), digest_size=8).digest()
        names.append(name)
        hashes.append(int.from_bytes(digest, "little", signed=True))
        scores.append(score)
    return make_sample(pieces) | {
        "names": np.array(names, dtype=np.int64),
        "hashes": np.array(hashes, dtype=np.int64),
        "scores": np.array(scores, dtype=np.float32),
    }


def roles_in(store: TokenStore) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """The last token of each text of a store, and the number of its document."""
    ends = np.flatnonzero(np.asarray(store.labels_or_ids) != IGNORED)
    return ends, np.searchsorted(store.offsets, ends, side="right") - 1


def known_scores(store: TokenStore, ends: npt.NDArray[Any]) -> Mask:
    """Whether the texts that end there have a score."""
    if store.weights is None:
        return np.zeros(len(ends), bool)
    known: Mask = ~np.isnan(np.asarray(store.weights[ends]))
    return known


def refuse_scores(
    store: TokenStore, ends: npt.NDArray[Any], least: float, most: float, loss: str
) -> None:
    """Raises RecipeError if a score of the texts that end there is not in the range of a loss, which
    `loss` names."""
    assert store.weights is not None
    scores = np.asarray(store.weights[ends])
    outside = scores[(scores < least) | (scores > most)]
    if len(outside):
        what = f"needs scores from {least:g} to {most:g}, and {len(outside):,} of {len(scores):,} are not"
        raise RecipeError(
            f"{loss}: {what}, such as {outside[0]:g}; scale the scores of the data, or use another loss"
        )


def collate_texts(rows: list[Sample], inputs: RowInputs) -> Collated:
    """A micro-batch of texts: rows as of `collate_sequences` if they are shared; else a text in each row,
    with `attention_mask`.

    In `extra`, for each text: `lasts` and `lengths`, the place of its last token in the flattened rows,
    and its tokens; `names`, which the masks of dropout depend on; and those of `Texts`. `text_of` is the
    number of the text at each place, or the number after the last.
    """
    targets = np.concatenate([row["targets"] for row in rows])
    ends = np.flatnonzero(targets != IGNORED) + 1
    lengths, count = np.diff(ends, prepend=0), len(ends)
    tokens = sum(len(row["input_ids"]) for row in rows)
    if inputs.packed or inputs.joined:
        made = inputs.collate(rows)
        arguments: dict[str, Any] = dict(made.micro_batch.inputs)
        lasts = made.micro_batch.counted.flatten().nonzero()[:, 0].numpy()
    else:
        ids = np.concatenate([row["input_ids"] for row in rows])
        texts = np.split(ids, ends[:-1]) if count else [np.zeros(1, np.int64)]
        width = inputs.width(max(map(len, texts)))
        arguments = {
            "input_ids": padded(texts, width, inputs.padding),
            "attention_mask": padded([np.ones_like(text) for text in texts], width, 0),
        }
        lasts = np.arange(count) * width + lengths - 1
    text_of = np.full(arguments["input_ids"].numel(), count)
    for text, (last, length) in enumerate(zip(lasts, lengths, strict=True)):
        text_of[last - length + 1 : last + 1] = text
    roles = targets[ends - 1]
    names = np.concatenate([row["names"] for row in rows])
    hashes = np.concatenate([row["hashes"] for row in rows])
    begins = np.maximum.accumulate(np.where(names % MOST_TEXTS == 0, np.arange(count), 0))
    extra = {
        "lasts": lasts,
        "lengths": lengths,
        "text_of": text_of,
        "names": names,
        "roles": roles,
        "examples": np.cumsum(names % MOST_TEXTS == 0) - 1,
        "hashes": hashes,
        "queries": np.where(roles[begins] == QUERY, hashes[begins], 0) if count else hashes,
        "scores": np.concatenate([row["scores"] for row in rows]),
    }
    tensors = {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in extra.items()}
    return Collated(
        MicroBatch(arguments, extra=tensors),
        tokens=tokens,
        loss_tokens=int((roles == QUERY).sum()),
        squared_lengths=sum(squared_lengths(row, len(row["input_ids"])) for row in rows),
    )
