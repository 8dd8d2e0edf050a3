"""Data sets by index, and their micro-batches. What a sample is, an objective says."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol

import numpy as np
import torch

from launcher.data.batching import NO_SAMPLE, Blend, Index, shares
from launcher.data.collation import (
    EMPTY,
    Collated,
    Piece,
    RowInputs,
    Sample,
    Unreadable,
    make_sample,
)
from launcher.data.custom import CustomData, CustomDataset
from launcher.data.encoder import PromptForm
from launcher.data.packing import Integers, Packed, Sizes, text_lengths
from launcher.data.problems import causes
from launcher.data.token_store import ModelTraits, TokenStore
from launcher.errors import RowError
from launcher.models.micro_batch import IGNORED
from launcher.recipe import schema
from launcher.sources.layouts import unused_line


class SampleMaker(Protocol):
    """What the data asks of an objective (`launcher/objectives/base.py`), which makes the samples and
    micro-batches, and says in its docstrings what each method does."""

    unit: ClassVar[str]
    draws: ClassVar[bool]
    divides_loss: ClassVar[bool]

    def open(
        self,
        store: TokenStore,
        data: schema.Data,
        model: ModelTraits,
        *,
        documents: Integers | None = None,
    ) -> SequenceDataset: ...

    def empty(self, data: schema.Data, model: ModelTraits) -> SequenceDataset: ...

    def for_validation(self) -> SampleMaker: ...

    def with_seed(self, seed: int) -> SampleMaker: ...

    def sample(self, dataset: SequenceDataset, index: int) -> Sample: ...

    def collate(self, rows: list[Sample], inputs: RowInputs) -> Collated: ...

    def sources(self, of: list[Integers]) -> torch.Tensor: ...

    def text_length(self, row_length: int) -> int: ...

    def describe(self, dataset: SequenceDataset) -> str: ...

    def for_custom(self, data: CustomData) -> SampleMaker: ...


@dataclass(frozen=True)
class SequenceDataset:
    """Samples from a token store. NO_SAMPLE is the index of an empty sample."""

    store: TokenStore
    sequences: Packed
    objective: SampleMaker
    inputs: RowInputs
    documents: Integers | None = None
    """The numbers of the documents of the store that are packed; None: all."""
    loss_weight: float = 1.0
    """Times the weight of each target, in `next_tokens`."""

    def __len__(self) -> int:
        return len(self.sequences)

    def __getitem__(self, index: Index) -> Sample:
        """The sample of an index, as the objective makes it. If the objective draws at random, index
        n + len(self) is the same row in the next epoch. Of several indices: one row of their samples. A
        sample whose attachment cannot be read has the problem as its `error`."""
        if isinstance(index, tuple):
            return joined_row([self[each] for each in index or (NO_SAMPLE,)], self.inputs)
        sample = self.objective.sample(self, index)
        if not self.inputs.attachments.modalities:
            return sample
        try:
            return self.inputs.attachments.complete(sample, self.store, self.pieces(index))
        except RowError as error:
            return {**sample, "error": str(error)}  # type: ignore[dict-item]

    def collate(self, rows: list[Sample]) -> Collated | Unreadable:
        """See the objective. Unreadable as the first sample that is."""
        if (problem := next((row["error"] for row in rows if "error" in row), None)) is not None:
            return Unreadable(f"data: {problem}")
        return self.objective.collate(rows, self.inputs)

    @property
    def length(self) -> int:
        """Most tokens of a row."""
        return self.inputs.length

    @property
    def text_length(self) -> int:
        """Most tokens of a document, or of each answer of a pair with the prompt
        (data.sequence_length)."""
        return self.objective.text_length(self.length)

    @property
    def packed(self) -> bool:
        """Whether a sample holds several documents."""
        return self.inputs.packed

    @property
    def joined(self) -> bool:
        """Whether samples of a step share rows."""
        return self.inputs.joined

    @property
    def unit(self) -> str:
        """What the rows are: documents, or pairs."""
        return self.objective.unit

    @property
    def fingerprint(self) -> dict[str, Any]:
        """See `TokenStore`."""
        return self.store.fingerprint

    @property
    def prompt_forms(self) -> set[PromptForm]:
        """The forms of prompts in the rows."""
        return set() if self.store.prompt_form is None else {self.store.prompt_form}

    @property
    def skipped(self) -> list[dict[str, str]]:
        """See `TokenStore`."""
        return self.store.skipped

    @property
    def lengths(self) -> Sequence[int] | None:
        """Tokens of each sample; None if not known in advance."""
        return Sizes(self.sequences)

    @property
    def document_lengths(self) -> Integers:
        """Tokens of each document that was packed, with those that are dropped, as of
        `text_lengths`."""
        lengths = text_lengths(self.store, self.unit)
        return lengths if self.documents is None else lengths[self.documents]

    def width(self, longest: int) -> int:
        """Tokens of a row that is padded to the longest one of its micro-batch."""
        return self.inputs.width(longest)

    @property
    def tokens(self) -> int:
        """Tokens of all sequences."""
        return self.sequences.tokens

    def pieces(self, index: int) -> Iterator[tuple[int, int, int]]:
        """Document, first token and end of each piece of a sequence, as positions in the store."""
        if index == NO_SAMPLE:
            return
        for start, length in self.sequences.pieces(index % len(self)):
            document = int(np.searchsorted(self.store.offsets, start, side="right")) - 1
            yield document, start, start + length

    def next_tokens(self, index: int) -> Sample:
        """`input_ids`, `targets`, `position_ids`, and `weights` of the targets if the store has
        them, each (tokens,). The target of a token is the document's next token, even in another
        sequence; IGNORED at the end of a document."""
        if index == NO_SAMPLE:
            return EMPTY
        store, pieces = self.store, list[Piece]()
        for document, start, end in self.pieces(index):
            targets = np.full(end - start, IGNORED, dtype=np.int64)
            known = store.labels_or_ids[start + 1 : min(end + 1, int(store.offsets[document + 1]))]
            targets[: len(known)] = known
            pieces.append((store.ids[start:end], targets))
            if store.weights is not None or self.loss_weight != 1:
                weights = np.ones(end - start, dtype=np.float32)
                if store.weights is not None:
                    weights[: len(known)] = store.weights[start + 1 : start + 1 + len(known)]
                pieces[-1] += (weights * np.float32(self.loss_weight),)
        return make_sample(pieces)

    def changed(self, change: Callable[[SequenceDataset], SequenceDataset]) -> SequenceDataset:
        """The changed data set."""
        return change(self)

    def one_document_in_a_row(self) -> SequenceDataset:
        """The same, whose micro-batches have a document in each row."""
        return replace(self, inputs=replace(self.inputs, packed=False, joined=False))

    def describe(self) -> list[str]:
        """Lines for the log. The first is about the size."""
        size = self.objective.describe(self) if len(self) else f"no {self.unit} with loss"
        return [size, *self._problems()]

    @property
    def notes(self) -> list[str]:
        """How the rows are read, and which columns are not used: lines for the log."""
        notes = [*self.store.notes, *self.store.file_notes]
        if self.store.unused:
            notes.append(f"note: {unused_line(self.store.unused)}")
        return notes

    def _problems(self) -> list[str]:
        store, sequences = self.store, self.sequences
        longer = f"longer than {self.text_length} tokens"
        lines = self.notes
        if split := sequences.split_documents:
            lines.append(f"{split:,} documents continue in another sequence")
        if cut := sequences.cut_documents:
            share = sequences.cut_tokens / (int(store.offsets[-1]) + store.cut_tokens)
            texts = "rows have texts that" if self.unit == "queries" else "documents"
            lines.append(
                f"warning: {cut:,} of {sequences.documents:,} {texts} are {longer} "
                f"(data.sequence_length) and lose their end, {sequences.cut_tokens:,} tokens "
                f"({share:.1%} of all)"
            )
        if more := store.further_documents:
            are = "1 document is" if more == 1 else f"{more:,} documents are"
            lines.append(
                f"warning: {are} not used: rows have more than data.documents says; a larger number uses "
                "them"
            )
        if dropped := sequences.long_documents:
            why = f"they are {longer} (data.sequence_length, data.overlong)"
            if self.unit == "pairs":
                why = f"the prompt with one of the answers is {longer} (data.sequence_length)"
            lines.append(
                f"warning: {dropped:,} of {sequences.documents:,} {self.unit} are dropped: {why}"
            )
        if dropped := sequences.dropped_documents:
            without = "no token with loss"
            if self.unit == "queries":
                without = "not what the loss compares (docs/embeddings.md#the-loss)"
            within = f" in their first {self.text_length} tokens (data.sequence_length)"
            lines.append(
                f"warning: {dropped:,} of {sequences.documents:,} {self.unit} have {without}"
                f"{within if sequences.cut_documents else ''} and are dropped"
            )
        if store.skipped:
            lines.append(
                f"warning: {len(store.skipped):,} rows cannot be used and are skipped "
                "(data.on_error: skip), listed in skipped_rows.jsonl:"
            )
            lines += [f"  {line}" for line in causes(store.skipped)]
        return lines


def joined_row(samples: list[Sample], inputs: RowInputs) -> Sample:
    """One row of several samples. `error`: that of the first sample that has one."""
    failed = next((sample for sample in samples if "error" in sample), None)
    return inputs.joined_row(samples) if failed is None else failed


class MixtureDataset:
    """Several data sets of the same objective, one after the other."""

    def __init__(self, parts: dict[str, SequenceDataset], blend: Blend | None) -> None:
        """blend: None: an epoch has each sample once."""
        self.parts, self.blend = parts, blend
        self._starts = list(itertools.accumulate(map(len, parts.values()), initial=0))
        self._first = next(iter(parts.values()))
        self.packed, self.joined = self._first.packed, self._first.joined
        self.width, self.unit = self._first.width, self._first.unit
        self.objective = self._first.objective
        self.sources: tuple[str, ...] = ()
        """The names of the sources, if the loss has a part for each of them."""
        if len(parts) > 1 and self.objective.divides_loss:
            self.sources = tuple(parts)

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, index: Index) -> Sample:
        if isinstance(index, tuple):
            return joined_row([self[each] for each in index or (NO_SAMPLE,)], self._first.inputs)
        if index == NO_SAMPLE:
            return self._first[index]
        name, index = self.locate(index)
        sample = self.parts[name][index]
        if not self.sources:
            return sample
        return sample | {"source": np.array([self.sources.index(name)])}

    def collate(self, rows: list[Sample]) -> Collated | Unreadable:
        """As of the sources; with `sources`, the numbers of the losses' sources, and
        `source_count`, if the loss has a part for each."""
        made = self._first.collate(rows)
        if not self.sources or isinstance(made, Unreadable):
            return made
        of = [row.get("source", _NO_SOURCE) for row in rows]
        sources = self.objective.sources(of)
        count = len(self.sources)
        micro_batch = replace(made.micro_batch, sources=sources, source_count=count)
        return replace(made, micro_batch=micro_batch)

    def changed(self, change: Callable[[SequenceDataset], SequenceDataset]) -> MixtureDataset:
        """The mixture of the changed data sets."""
        parts = {name: change(part) for name, part in self.parts.items()}
        return MixtureDataset(parts, self.blend)

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
        return _MixedLengths(self)

    @property
    def prompt_forms(self) -> set[PromptForm]:
        """Those of all sources."""
        return {form for part in self.parts.values() for form in part.prompt_forms}

    @property
    def skipped(self) -> list[dict[str, str]]:
        """The skipped rows of all sources."""
        return [row for part in self.parts.values() for row in part.skipped]

    @property
    def shares(self) -> list[float]:
        """The share of each source in the samples, after the stages."""
        return shares(self.blend.weights if self.blend else [*map(len, self.parts.values())])

    def describe(self) -> list[str]:
        """Lines for the log, of each source."""
        lines = []
        for (name, part), share in zip(self.parts.items(), self.shares, strict=True):
            first, *rest = part.describe()
            unit = self.unit if self.joined else "sequences"
            lines.append(f"{name} ({share:.1%} of the {unit}): {first}")
            lines += [f"{name}: {line}" for line in rest]
        for step, weights in self.blend.stages if self.blend else ():
            each = zip(self.parts, shares(weights), strict=True)
            text = ", ".join(f"{name} {share:.1%}" for name, share in each)
            lines.append(f"until step {step:,} (data.mixture_stages): {text}")
        return lines


class _MixedLengths(Sequence[int]):
    """Tokens of the samples of a mixture, counted when they are asked for."""

    def __init__(self, mixture: MixtureDataset) -> None:
        self._mixture = mixture
        self._parts = {name: part.lengths for name, part in mixture.parts.items()}

    def __len__(self) -> int:
        return len(self._mixture)

    def __getitem__(self, index: Any) -> Any:
        name, index = self._mixture.locate(range(len(self))[index])
        lengths = self._parts[name]
        assert lengths is not None
        return lengths[index]


_NO_SOURCE = np.zeros(0, dtype=np.int64)
"""The sources of an empty row."""
MapData = SequenceDataset | MixtureDataset | CustomDataset
"""All have the members of `SequenceDataset`."""
