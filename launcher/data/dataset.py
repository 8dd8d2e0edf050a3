"""Sequences as arrays, and arrays as micro-batches."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from launcher.data.batching import NO_SAMPLE, MixtureOrder, Order, SampleOrder
from launcher.data.packing import Sequences, pack
from launcher.data.token_store import TokenStore, open_store
from launcher.recipe import schema
from launcher.training import loss
from launcher.training.loss import IGNORED

Row = dict[str, npt.NDArray[np.int64]]
Collated = dict[str, Any]
"""`tensors`: what the model and the loss are called with, rows first; `tokens` but padding; `loss_tokens`: targets."""

Isolation = Literal["mask", "varlen"]
"""How attention stays inside a packed document: by a mask that the model makes from position_ids, or by attention that is
handed the documents' bounds."""


class TrainingData(Protocol):
    """What torch's DataLoader loads: map-style (`MapData`), or a stream of micro-batches (data.streaming)."""

    def loss(self, model: nn.Module, tensors: Mapping[str, Any]) -> torch.Tensor:
        """Sum of the losses of a micro-batch's targets; a float32 scalar."""

    def describe(self) -> list[str]:
        """What it holds, what was cut, and what padding costs; a line each."""

    @property
    def packed(self) -> bool:
        """Whether samples are filled up, so that padding does not depend on which of them meet."""

    @property
    def lengths(self) -> Sequence[int] | None:
        """Tokens of each sample; None where they are not known beforehand."""

    @property
    def skipped(self) -> list[dict[str, str]]:
        """Rows that could not be used (data.on_error: skip): where, and why."""


class MapData(TrainingData, Protocol):
    """Samples by their index."""

    @property
    def fingerprint(self) -> dict[str, Any]:
        """What a checkpoint keeps of the data, to notice a change (`TokenStore.fingerprint`); of a mixture, by part."""

    def __len__(self) -> int:
        """Samples."""

    def __getitem__(self, index: int) -> Any:
        """A sample; NO_SAMPLE gives an empty one."""

    def collate(self, rows: list[Any]) -> Collated:
        """A micro-batch."""


@dataclass(frozen=True)
class SequenceDataset:
    """A store's documents as training sequences, for next-token training."""

    store: TokenStore
    sequences: Sequences
    length: int
    packed: bool
    isolation: Isolation = "mask"

    def __len__(self) -> int:
        return len(self.sequences)

    def __getitem__(self, index: int) -> Row:
        """One sequence: `input_ids`, `targets` and `position_ids`, each (tokens,).

        A position's target is the document's next token, in the next sequence if need be; IGNORED at a document's end.
        NO_SAMPLE gives an empty one.
        """
        if index == NO_SAMPLE:
            nothing = np.zeros(0, dtype=np.int64)
            return {"input_ids": nothing, "targets": nothing, "position_ids": nothing}
        ids, targets, positions = [], [], []
        labels = self.store.ids if self.store.labels is None else self.store.labels
        for piece in range(self.sequences.bounds[index], self.sequences.bounds[index + 1]):
            start, length = int(self.sequences.starts[piece]), int(self.sequences.lengths[piece])
            document = int(np.searchsorted(self.store.offsets, start, side="right"))
            end = int(self.store.offsets[document])
            follow = np.full(length, IGNORED, dtype=np.int64)
            known = labels[start + 1 : min(start + length + 1, end)]
            follow[: len(known)] = known
            ids.append(self.store.ids[start : start + length].astype(np.int64))
            targets.append(follow)
            positions.append(np.arange(length, dtype=np.int64))
        return {
            "input_ids": np.concatenate(ids),
            "targets": np.concatenate(targets),
            "position_ids": np.concatenate(positions),
        }

    def collate(self, rows: list[Row]) -> Collated:
        """A micro-batch: tensors (rows, tokens). See `collate_sequences`."""
        return collate_sequences(
            rows, length=self.length, packed=self.packed, isolation=self.isolation
        )

    def loss(self, model: nn.Module, tensors: Mapping[str, Any]) -> torch.Tensor:
        """Next-token cross-entropy."""
        return loss.summed_loss(model, tensors)

    @property
    def fingerprint(self) -> dict[str, Any]:
        """The store's."""
        return self.store.fingerprint

    @property
    def lengths(self) -> Sequence[int] | None:
        """Tokens of each sequence."""
        return np.add.reduceat(self.sequences.lengths, self.sequences.bounds[:-1])  # type: ignore[return-value]

    @property
    def skipped(self) -> list[dict[str, str]]:
        """Rows that were left out."""
        return self.store.skipped

    def describe(self) -> list[str]:
        """Counts, what was cut, padding."""
        tokens, sequences = int(self.sequences.lengths.sum()), len(self)
        text = f"{self.store.documents:,} documents, {tokens:,} tokens in {sequences:,} sequences of up to {self.length}"
        if self.packed:
            how = {"mask": "a mask", "varlen": "variable-length attention"}[self.isolation]
            text += f", packed ({1 - tokens / (sequences * self.length):.1%} padding; kept apart by {how})"
        lines = [text, *_what_did_not_fit(self.store, self.sequences, self.length)]
        if self.store.labels is not None and self.store.trained is not None:
            share = self.store.trained / int(self.store.offsets[-1])
            lines[0] += f"; {share:.1%} of the documents' tokens carry loss"
        return lines


def _what_did_not_fit(store: TokenStore, sequences: Sequences, length: int) -> list[str]:
    lines = []
    if sequences.split_documents:
        lines.append(
            f"{sequences.split_documents:,} documents are longer than {length} tokens and go on in another sequence"
        )
    if sequences.cut_documents:
        lines.append(
            f"warning: {sequences.cut_documents:,} of {store.documents:,} documents are longer than data.sequence_length {length} and lose "
            f"their end, {sequences.cut_tokens:,} tokens ({sequences.cut_tokens / int(store.offsets[-1]):.1%} of all)"
        )
    if store.skipped:
        lines.append(
            f"warning: {len(store.skipped):,} rows cannot be used and are left out (data.on_error: skip), listed in skipped_rows.jsonl; "
            f"the first: {store.skipped[0]['where']}: {store.skipped[0]['problem']}"
        )
    return lines


def collate_sequences(
    rows: list[Row], *, length: int, packed: bool, isolation: Isolation
) -> Collated:
    """A micro-batch: tensors (rows, tokens), padded on the right to the longest row (packed: to the full length).

    Padding needs no attention mask: attention is causal, so no token sees what stands right of it, and padding has
    no target. `position_ids` are there only where some row holds several documents; transformers' own attention
    masks keep those apart, or (varlen) attention that is told where each document starts in the flattened rows:
    `cu_seq_lens_q`, `cu_seq_lens_k` (documents + 1,) int32 and `max_length_q`, `max_length_k`, the names that
    transformers has for them. `tokens` and `loss_tokens` are counted here, on the CPU.
    """
    width = length if packed else max(1, *(len(row["input_ids"]) for row in rows))
    tensors: dict[str, Any] = {
        "input_ids": _padded([row["input_ids"] for row in rows], width, 0),
        "targets": _padded([row["targets"] for row in rows], width, IGNORED),
    }
    if packed and any(int((row["position_ids"] == 0).sum()) > 1 for row in rows):
        positions = _positions([row["position_ids"] for row in rows], width)
        tensors["position_ids"] = torch.from_numpy(positions)
        if isolation == "varlen":
            starts = np.append(np.flatnonzero(positions.reshape(-1) == 0), positions.size).astype(
                np.int32
            )
            tensors["cu_seq_lens_q"] = tensors["cu_seq_lens_k"] = torch.from_numpy(starts)
            # An upper bound will do, and one that never changes spares compiled blocks a recompilation
            tensors["max_length_q"] = tensors["max_length_k"] = width
    return {
        "tensors": tensors,
        "tokens": sum(len(row["input_ids"]) for row in rows),
        "loss_tokens": int((tensors["targets"] != IGNORED).sum()),
    }


def _padded(rows: list[npt.NDArray[np.int64]], width: int, value: int) -> torch.Tensor:
    out = np.full((len(rows), width), value, dtype=np.int64)
    for index, row in enumerate(rows):
        out[index, : len(row)] = row
    return torch.from_numpy(out)


def _positions(rows: list[npt.NDArray[np.int64]], width: int) -> npt.NDArray[np.int64]:
    """Padding is a document of its own: its positions start at 0 again."""
    out = np.zeros((len(rows), width), dtype=np.int64)
    for index, row in enumerate(rows):
        out[index, : len(row)] = row
        out[index, len(row) :] = np.arange(width - len(row))
    return out


@dataclass(frozen=True)
class ClassificationDataset:
    """A store's documents, each with a class."""

    store: TokenStore
    sequences: Sequences
    length: int
    padding: int
    """The id that the model knows as padding: it looks for the last token before it."""
    packed: bool = False

    def __len__(self) -> int:
        return len(self.sequences)

    def __getitem__(self, index: int) -> Row:
        """One document: `input_ids` (tokens,) and `targets` (1,); NO_SAMPLE gives an empty one without a class."""
        if index == NO_SAMPLE:
            return {
                "input_ids": np.zeros(0, dtype=np.int64),
                "targets": np.full(1, IGNORED, dtype=np.int64),
            }
        assert self.store.classes is not None
        start, length = int(self.sequences.starts[index]), int(self.sequences.lengths[index])
        return {
            "input_ids": self.store.ids[start : start + length].astype(np.int64),
            "targets": self.store.classes[index : index + 1].astype(np.int64),
        }

    def collate(self, rows: list[Row]) -> Collated:
        """`input_ids` and `attention_mask` (rows, tokens), padded on the right to the longest; `targets` (rows,)."""
        width = max(1, *(len(row["input_ids"]) for row in rows))
        ids = [row["input_ids"] for row in rows]
        tensors = {
            "input_ids": _padded(ids, width, self.padding),
            "attention_mask": _padded([np.ones_like(row) for row in ids], width, 0),
            "targets": torch.from_numpy(np.concatenate([row["targets"] for row in rows])),
        }
        return {
            "tensors": tensors,
            "tokens": sum(len(row) for row in ids),
            "loss_tokens": int((tensors["targets"] != IGNORED).sum()),
        }

    def loss(self, model: nn.Module, tensors: Mapping[str, Any]) -> torch.Tensor:
        """Cross-entropy of the classes."""
        return loss.summed_classification_loss(model, tensors)

    @property
    def fingerprint(self) -> dict[str, Any]:
        """The store's."""
        return self.store.fingerprint

    @property
    def lengths(self) -> Sequence[int] | None:
        """Tokens of each document."""
        return self.sequences.lengths  # type: ignore[return-value]

    @property
    def skipped(self) -> list[dict[str, str]]:
        """Rows that were left out."""
        return self.store.skipped

    def describe(self) -> list[str]:
        """Counts, classes, what was cut."""
        assert self.store.classes is not None
        counts = np.bincount(self.store.classes)
        shares = ", ".join(f"{index}: {count:,}" for index, count in enumerate(counts.tolist()))
        tokens = int(self.sequences.lengths.sum())
        text = f"{len(self):,} documents, {tokens:,} tokens, of the classes {shares}"
        return [text, *_what_did_not_fit(self.store, self.sequences, self.length)]


@dataclass(frozen=True)
class MixtureDataset:
    """Several data sets of one form; the samples of one follow those of another."""

    parts: dict[str, SequenceDataset | ClassificationDataset]
    weights: tuple[float, ...]
    _ends: list[int] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(
            self, "_ends", list(itertools.accumulate(len(part) for part in self.parts.values()))
        )

    @property
    def packed(self) -> bool:
        """All parts have the same form."""
        return bool(self._first.packed)

    @property
    def _first(self) -> Any:
        return next(iter(self.parts.values()))

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> Row:
        """A sample of the part that the index falls into."""
        parts = list(self.parts.values())
        if index == NO_SAMPLE:
            return parts[0][index]
        part = int(np.searchsorted(self._ends, index, side="right"))
        return parts[part][index - (self._ends[part - 1] if part else 0)]

    def collate(self, rows: list[Row]) -> Collated:
        """All parts have the same form."""
        collated: Collated = self._first.collate(rows)
        return collated

    def loss(self, model: nn.Module, tensors: Mapping[str, Any]) -> torch.Tensor:
        """All parts have the same loss."""
        value: torch.Tensor = self._first.loss(model, tensors)
        return value

    @property
    def fingerprint(self) -> dict[str, Any]:
        """That of each part."""
        return {"parts": {name: part.fingerprint for name, part in self.parts.items()}}

    @property
    def lengths(self) -> Sequence[int] | None:
        """Tokens of each sample."""
        return np.concatenate([np.asarray(part.lengths) for part in self.parts.values()])  # type: ignore[return-value]

    @property
    def skipped(self) -> list[dict[str, str]]:
        """Rows that were left out, of all parts."""
        return [row for part in self.parts.values() for row in part.skipped]

    def describe(self) -> list[str]:
        """Each part, and its share."""
        total = sum(self.weights)
        lines = []
        for (name, part), weight in zip(self.parts.items(), self.weights, strict=True):
            first, *rest = part.describe()
            lines += [
                f"{name} ({weight / total:.1%} of the sequences): {first}",
                *(f"{name}: {line}" for line in rest),
            ]
        return lines


def open_dataset(
    data: schema.Data,
    source: tuple[str, ...] | dict[str, schema.Source],
    *,
    tokenizer: str | None,
    vocabulary: int | None,
    build: bool,
    isolation: Isolation = "mask",
    classes: int | None = None,
    padding: int = 0,
    validation: bool = False,
) -> SequenceDataset | ClassificationDataset | MixtureDataset:
    """Tokenizes (or finds) and packs the files of a source, or of each source of a mixture.

    tokenizer: data.tokenizer, or the model's. vocabulary: rows of the model's embedding; an id beyond is refused here, not
    on the GPU. classes: of a sequence classifier. padding: the model's padding id.
    """

    def open_one(
        patterns: tuple[str, ...], kind: schema.DataKind
    ) -> SequenceDataset | ClassificationDataset:
        store = open_store(
            kind=kind,
            patterns=patterns,
            data=data,
            tokenizer=tokenizer,
            validation=validation,
            num_labels=classes,
            vocabulary=vocabulary,
            build=build,
        )
        sequences = pack(
            store.offsets, kind, packing=data.packing, sequence_length=data.sequence_length
        )
        if kind == "classification":
            return ClassificationDataset(store, sequences, data.sequence_length, padding)
        return SequenceDataset(store, sequences, data.sequence_length, data.packing, isolation)

    if not isinstance(source, dict):
        return open_one(source, data.kind)
    parts = {name: open_one(part.files, part.kind or data.kind) for name, part in source.items()}
    return MixtureDataset(parts, tuple(part.weight for part in source.values()))


def make_order(dataset: MapData, *, seed: int, shuffle: bool, epochs: int | None) -> Order:
    """Which sample stands where: a mixture takes turns by its weights."""
    if isinstance(dataset, MixtureDataset):
        sizes = [len(part) for part in dataset.parts.values()]
        return MixtureOrder(
            sizes=sizes, weights=dataset.weights, seed=seed, shuffle=shuffle, epochs=epochs
        )
    return SampleOrder(samples=len(dataset), seed=seed, shuffle=shuffle, epochs=epochs)
