"""Data sets by index, and their micro-batches."""

from __future__ import annotations

import bisect
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, cast

import numpy as np
import torch
from torch import nn

from launcher.data.batching import NO_SAMPLE
from launcher.data.collation import (
    EMPTY,
    NOTHING,
    Collated,
    Piece,
    Sample,
    collate_classified,
    collate_pairs,
    collate_sequences,
    make_sample,
    padded_width,
    with_positions,
)
from launcher.data.custom import CustomDataset
from launcher.data.packing import Integers, Sequences
from launcher.data.problems import causes
from launcher.data.token_store import TokenStore
from launcher.models.inputs import IGNORED, WHOLE_ROW, Masking, RowPart
from launcher.models.loss import (
    summed_classification_loss,
    summed_loss,
    summed_loss_by_source,
)
from launcher.models.preference import METRICS, Reference, summed_preference_loss
from launcher.recipe import schema
from launcher.recipe.layouts import unused_line

if TYPE_CHECKING:
    from launcher.models.target_loss import TargetLoss


@dataclass(frozen=True)
class _Stored:
    """Samples from a token store. NO_SAMPLE is the index of an empty sample."""

    store: TokenStore
    sequences: Sequences
    length: int
    """Most tokens of a sequence (data.sequence_length)."""
    width_multiple: int = field(default=1, kw_only=True)
    """See `ModelInputs`."""
    documents: Integers | None = field(default=None, kw_only=True)
    """The numbers of the documents of the store that are packed; None: all."""
    unit: ClassVar[str] = "documents"

    def __len__(self) -> int:
        return len(self.sequences)

    @property
    def fingerprint(self) -> dict[str, Any]:
        """See `TokenStore`."""
        return self.store.fingerprint

    @property
    def skipped(self) -> list[dict[str, str]]:
        """See `TokenStore`."""
        return self.store.skipped

    @property
    def lengths(self) -> Sequence[int] | None:
        """Tokens of each sample; None if not known in advance."""
        bounds = self.sequences.bounds[:-1]
        return np.add.reduceat(self.sequences.lengths, bounds)  # type: ignore[return-value]

    @property
    def document_lengths(self) -> Integers:
        """Tokens of each document that was packed, with those that are dropped."""
        lengths = np.diff(self.store.offsets)
        return lengths if self.documents is None else lengths[self.documents]

    def width(self, longest: int) -> int:
        """Tokens of a row that is padded to the longest one of its micro-batch."""
        return padded_width(longest, length=self.length, width_multiple=self.width_multiple)

    @property
    def tokens(self) -> int:
        return int(self.sequences.lengths.sum())

    def pieces(self, index: int) -> Iterator[tuple[int, int, int]]:
        """Document, first token and end of each piece of a sequence, as positions in the store."""
        store, sequences = self.store, self.sequences
        for piece in range(sequences.bounds[index], sequences.bounds[index + 1]):
            start, length = int(sequences.starts[piece]), int(sequences.lengths[piece])
            document = int(np.searchsorted(store.offsets, start, side="right")) - 1
            yield document, start, start + length

    @property
    def notes(self) -> list[str]:
        """How the rows are read, and which columns are not used: lines for the log."""
        unused = self.store.unused
        return [*self.store.notes, *([f"note: {unused_line(unused)}"] if unused else [])]

    def _problems(self) -> list[str]:
        store, sequences, longer = self.store, self.sequences, f"longer than {self.length} tokens"
        lines = self.notes
        if split := sequences.split_documents:
            lines.append(f"{split:,} documents continue in another sequence")
        if cut := sequences.cut_documents:
            share = sequences.cut_tokens / (int(store.offsets[-1]) + store.cut_tokens)
            lines.append(
                f"warning: {cut:,} of {sequences.documents:,} documents are {longer} "
                f"(data.sequence_length) and lose their end, {sequences.cut_tokens:,} tokens "
                f"({share:.1%} of all)"
            )
        if dropped := sequences.long_documents:
            why = f"they are {longer} (data.sequence_length, data.overlong)"
            if self.unit == "pairs":
                why = "their two answers, each with the prompt, are"
                why += f" {longer} (data.sequence_length)"
            lines.append(
                f"warning: {dropped:,} of {sequences.documents:,} {self.unit} are dropped: {why}"
            )
        if dropped := sequences.dropped_documents:
            within = f" in their first {self.length} tokens (data.sequence_length)"
            lines.append(
                f"warning: {dropped:,} of {sequences.documents:,} {self.unit} have no token with loss"
                f"{within if sequences.cut_documents else ''} and are dropped"
            )
        if store.skipped:
            lines.append(
                f"warning: {len(store.skipped):,} rows cannot be used and are skipped "
                "(data.on_error: skip), listed in skipped_rows.jsonl:"
            )
            lines += [f"  {line}" for line in causes(store.skipped)]
        return lines


@dataclass(frozen=True)
class SequenceDataset(_Stored):
    """Sequences for next-token training."""

    packed: bool
    """Whether sequences hold several documents."""
    masking: Masking = "mask"
    part: RowPart = WHOLE_ROW
    """The part of each row that this rank computes."""
    target_loss: TargetLoss | None = None
    """The user's loss of each target; None: the cross-entropy."""
    metrics: ClassVar[tuple[str, ...]] = ()
    """Names of the further sums that `loss` returns."""
    trains_tokens: ClassVar[bool] = True
    """Whether the loss is one of tokens."""

    def loss(self, model: nn.Module, tensors: Mapping[str, Any]) -> torch.Tensor:
        """Sum of the losses of a micro-batch's targets; a float32 scalar."""
        return summed_loss(model, tensors, self.target_loss)

    def __getitem__(self, index: int) -> Sample:
        """`input_ids`, `targets`, `position_ids`, and `weights` of the targets if the store has
        them, each (tokens,). The target of a token is the document's next token, even in another
        sequence; IGNORED at the end of a document."""
        if index == NO_SAMPLE:
            return EMPTY
        store, pieces = self.store, list[Piece]()
        for document, start, end in self.pieces(index):
            targets = np.full(end - start, IGNORED, dtype=np.int64)
            known = store.targets[start + 1 : min(end + 1, int(store.offsets[document + 1]))]
            targets[: len(known)] = known
            pieces.append((store.ids[start:end], targets))
            if store.weights is not None:
                weights = np.ones(end - start, dtype=np.float32)
                weights[: len(known)] = store.weights[start + 1 : start + 1 + len(known)]
                pieces[-1] += (weights,)
        return make_sample(pieces)

    def collate(self, rows: list[Sample]) -> Collated:
        """See `collate_sequences`."""
        made = collate_sequences(
            rows,
            length=self.length,
            packed=self.packed,
            masking=self.masking,
            part=self.part,
            width_multiple=self.width_multiple,
        )
        return made if self.target_loss is None else with_positions(made)

    def describe(self) -> list[str]:
        """Lines for the log. The first is about the size."""
        tokens, count = self.tokens, len(self)
        sequences = self.sequences
        documents = sequences.documents - sequences.dropped_documents - sequences.long_documents
        text = f"{documents:,} {self.unit}, {tokens:,} tokens in {count:,} sequences "
        text += f"of up to {self.length}"
        if self.packed:
            how = {"mask": "a mask", "varlen": "variable-length attention"}[self.masking]
            padding = 1 - tokens / (count * self.length)
            text += f", packed ({padding:.1%} padding; kept apart by {how})"
        if self.store.labels is not None and self.trains_tokens:
            text += f"; {self.sequences.targets / tokens:.1%} of these tokens carry loss"
        return [text, *self._problems()]


@dataclass(frozen=True)
class PreferenceDataset(SequenceDataset):
    """Pairs of answers. A document of the store is a pair: the chosen answer after its prompt, as
    long as `store.classes` says, and then the rejected one after the same prompt. A sequence holds
    whole pairs; each answer is a document of its own to attention."""

    settings: schema.Preference | None = None
    reference: Reference | None = None
    """Log-probabilities of the answers by the initial weights; None: not known, or not needed."""
    unit: ClassVar[str] = "pairs"
    metrics: ClassVar[tuple[str, ...]] = METRICS

    def loss(self, model: nn.Module, tensors: Mapping[str, Any]) -> torch.Tensor:
        """Sum of the losses of a micro-batch's pairs, and the sums of METRICS; float32."""
        assert self.settings is not None
        return summed_preference_loss(model, tensors, self.settings)

    def pairs(self, index: int) -> Iterator[tuple[int, tuple[tuple[int, int], ...]]]:
        """The number of each pair of a sequence, and the first token and the end of its answers, as
        positions in the store."""
        assert self.store.classes is not None
        for document, start, end in () if index == NO_SAMPLE else self.pieces(index):
            middle = start + int(self.store.classes[document])
            yield document, ((start, middle), (middle, end))

    def __getitem__(self, index: int) -> Sample:
        """As of SequenceDataset; and for each token `answers`, twice the number of the pair, plus 1
        if rejected, or -1 without a target, and `reference`, that of the answer."""
        store, answers = self.store, [NOTHING]
        pieces: list[Piece] = [(NOTHING, NOTHING)]
        for document, bounds in self.pairs(index):
            for answer, (first, last) in enumerate(bounds):
                targets = np.full(last - first, IGNORED, dtype=np.int64)
                targets[:-1] = store.targets[first + 1 : last]
                pieces.append((store.ids[first:last], targets))
                answers.append(np.where(targets == IGNORED, -1, 2 * document + answer))
        of_token = np.concatenate(answers)
        reference = np.zeros(len(of_token), dtype=np.float32)
        if self.reference is not None:
            reference = self.reference.flatten()[of_token]
        return make_sample(pieces) | {"answers": of_token, "reference": reference}

    def collate(self, rows: list[Sample]) -> Collated:
        """See `collate_pairs`."""
        return collate_pairs(
            rows,
            length=self.length,
            packed=self.packed,
            masking=self.masking,
            width_multiple=self.width_multiple,
        )


@dataclass(frozen=True)
class ClassificationDataset(_Stored):
    """Documents, each with a class."""

    padding: int
    """The model's padding id, by which it finds the last token."""
    packed: bool = False
    metrics: ClassVar[tuple[str, ...]] = ()

    def loss(self, model: nn.Module, tensors: Mapping[str, Any]) -> torch.Tensor:
        """Sum of the losses of a micro-batch's rows; a float32 scalar."""
        return summed_classification_loss(model, tensors)

    def __getitem__(self, index: int) -> Sample:
        """`input_ids` (tokens,) and `targets` (1,)."""
        if index == NO_SAMPLE:
            return {"input_ids": EMPTY["input_ids"], "targets": np.full(1, IGNORED)}
        assert self.store.classes is not None
        document, start, end = next(self.pieces(index))
        return {
            "input_ids": self.store.ids[start:end].astype(np.int64),
            "targets": self.store.classes[document : document + 1].astype(np.int64),
        }

    def collate(self, rows: list[Sample]) -> Collated:
        """See `collate_classified`."""
        return collate_classified(
            rows, length=self.length, padding=self.padding, width_multiple=self.width_multiple
        )

    def describe(self) -> list[str]:
        """Lines for the log. The first is about the size."""
        assert self.store.classes is not None
        of = np.searchsorted(self.store.offsets, self.sequences.starts, side="right") - 1
        counts = enumerate(np.bincount(self.store.classes[of]).tolist())
        shares = ", ".join(f"{index}: {count:,}" for index, count in counts)
        text = f"{len(self):,} documents, {self.tokens:,} tokens, of the classes {shares}"
        return [text, *self._problems()]


class MixtureDataset:
    """Several data sets, one after the other."""

    def __init__(
        self,
        parts: dict[str, SequenceDataset | ClassificationDataset],
        weights: tuple[float, ...] | None,
    ) -> None:
        """weights: None: an epoch has each sample once."""
        self.parts, self.weights = parts, weights
        self._starts = list(itertools.accumulate(map(len, parts.values()), initial=0))
        self._first = next(iter(parts.values()))
        self.packed = self._first.packed
        self.loss: Callable[[nn.Module, Mapping[str, Any]], torch.Tensor] = self._first.loss
        self.width = self._first.width
        self.metrics = self._first.metrics
        self.sources: tuple[str, ...] = ()
        """The names of the sources, if the loss has a part for each of them."""
        if len(parts) > 1 and all(type(part) is SequenceDataset for part in parts.values()):
            self.sources = tuple(parts)
            first = cast(SequenceDataset, self._first)
            self.loss = functools.partial(
                summed_loss_by_source, sources=len(parts), target_loss=first.target_loss
            )

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, index: int) -> Sample:
        if index == NO_SAMPLE:
            return self._first[index]
        name, index = self.locate(index)
        sample = self.parts[name][index]
        if not self.sources:
            return sample
        return sample | {"source": np.array([self.sources.index(name)])}

    def collate(self, rows: list[Sample]) -> Collated:
        """As of the sources; with `sources` (rows,), the numbers of the rows' sources, if the loss
        has a part for each."""
        made = self._first.collate(rows)
        if not self.sources:
            return made
        of = torch.tensor([int(row["source"][0]) if "source" in row else 0 for row in rows])
        return made | {"tensors": made["tensors"] | {"sources": of}}

    def locate(self, index: int) -> tuple[str, int]:
        """The source of a sample, and its index there."""
        part = bisect.bisect_right(self._starts, index) - 1
        return list(self.parts)[part], index - self._starts[part]

    @property
    def fingerprint(self) -> dict[str, Any]:
        """Those of the sources by name."""
        return {"parts": {name: part.fingerprint for name, part in self.parts.items()}}

    @property
    def lengths(self) -> Sequence[int] | None:
        """Tokens of each sample."""
        lengths = [np.asarray(part.lengths) for part in self.parts.values()]
        return np.concatenate(lengths)  # type: ignore[return-value]

    @property
    def skipped(self) -> list[dict[str, str]]:
        """The skipped rows of all sources."""
        return [row for part in self.parts.values() for row in part.skipped]

    @property
    def shares(self) -> list[float]:
        """The share of each source in the sequences."""
        weights = self.weights or tuple(map(len, self.parts.values()))
        return [weight / sum(weights) for weight in weights]

    def describe(self) -> list[str]:
        """Lines for the log, of each source."""
        lines = []
        for (name, part), share in zip(self.parts.items(), self.shares, strict=True):
            first, *rest = part.describe()
            lines.append(f"{name} ({share:.1%} of the sequences): {first}")
            lines += [f"{name}: {line}" for line in rest]
        return lines


MapData = SequenceDataset | ClassificationDataset | MixtureDataset | CustomDataset
"""All have the members of `SequenceDataset`."""
