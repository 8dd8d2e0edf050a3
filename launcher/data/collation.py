"""Rows of tokens, and micro-batches of them as tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from launcher.data.attachment_inputs import TEXT_ALONE, ModelAttachments
from launcher.data.attachment_inputs import Sample as Sample
from launcher.errors import RecipeError
from launcher.models.documents import documents_at
from launcher.models.micro_batch import IGNORED, DocumentMasking, MicroBatch
from launcher.models.row_division import WHOLE_ROWS, RowDivision

if TYPE_CHECKING:
    from launcher.data.token_store import TokenStore

Piece = tuple[npt.NDArray[Any], ...]
"""Ids and targets of a run of tokens of one document, and perhaps the weights of the targets."""
_MOST_TARGETS = 0.9
"""Share of positions with a target below which logits are computed for these positions only."""
_SHORTEST = 256
"""Smallest `max_length_q`, which is two blocks of attention for a document."""


@dataclass(frozen=True)
class Collated:
    """A micro-batch with its sizes, as a data set makes it."""

    micro_batch: MicroBatch
    tokens: int
    """Without padding."""
    loss_tokens: int
    """What the loss is a mean over: targets, pairs, or what the objective counts."""
    loss_weight: float | None = None
    """The sum of the weights of the targets; None: each counts 1."""
    squared_lengths: int = 0
    """The sum over the documents of their squared lengths in tokens."""
    tower_operations: int = 0
    """Floating-point operations of the towers of attachments, forward and backward."""
    documents: npt.NDArray[np.integer[Any]] | None = None
    """The numbers of the documents of the store whose answers are scored, in their order."""

    @property
    def weight(self) -> float:
        """The sum of the weights of the targets."""
        return self.loss_tokens if self.loss_weight is None else self.loss_weight

    def pin_memory(self) -> Collated:
        """In page-locked memory. torch's DataLoader calls it."""
        return replace(self, micro_batch=self.micro_batch.pin_memory())


@dataclass(frozen=True)
class Unreadable:
    """In the place of a micro-batch: why it cannot be made. A loader process would wrap an exception
    into a traceback."""

    message: str


def raise_error(collated: Collated | Unreadable) -> Collated:
    """The micro-batch. Raises RecipeError if it cannot be made."""
    if isinstance(collated, Unreadable):
        raise RecipeError(collated.message)
    return collated


def make_sample(pieces: Iterable[Piece]) -> Sample:
    """Joins pieces. Positions start at 0 in each piece."""
    ids, targets, *weights = zip(*pieces, strict=True)
    sample = {
        "input_ids": np.concatenate(ids, dtype=np.int64),
        "targets": np.concatenate(targets, dtype=np.int64),
        "position_ids": np.concatenate([np.arange(len(piece)) for piece in ids]),
    }
    return sample | ({"weights": np.concatenate(weights[0])} if weights else {})


NOTHING = np.zeros(0, dtype=np.int64)
EMPTY = make_sample([(NOTHING, NOTHING)])


def padded_width(longest: int, *, length: int, width_multiple: int) -> int:
    """Tokens of a row that is padded to the longest one: a multiple of `width_multiple`, but at most
    `length`, the most tokens that a row may have."""
    longest = max(1, longest)
    return max(longest, min(length, -(-longest // width_multiple) * width_multiple))


@dataclass(frozen=True)
class RowInputs:
    """What a model takes of rows, and how samples of them become a micro-batch."""

    length: int
    """Most tokens of a row (data.sequence_length)."""
    packed: bool = False
    """Whether a sample fills a row with several documents, so that rows are `length` tokens wide."""
    joined: bool = False
    """Whether samples share rows, which are padded to the longest one of their micro-batch."""
    document_masking: DocumentMasking = "mask"
    recurrent: bool = False
    """See `ModelTraits`."""
    division: RowDivision = WHOLE_ROWS
    """The part of each row that this rank computes."""
    padding: int = 0
    """The model's id for padding."""
    width_multiple: int = 1
    """See `ModelTraits`."""
    attachments: ModelAttachments = TEXT_ALONE
    """How it takes what rows have beside text."""

    def width(self, longest: int) -> int:
        """Tokens of a row that is padded to the longest one of its micro-batch."""
        return padded_width(longest, length=self.length, width_multiple=self.width_multiple)

    def width_of(self, rows: list[Sample]) -> int:
        """Tokens of a row of a micro-batch of these samples, without packing."""
        return self.width(max(len(row["input_ids"]) for row in rows))

    @property
    def kept_apart(self) -> str:
        """How the documents of a row are kept apart, for the log."""
        how = {"mask": "a mask", "varlen": "variable-length attention"}[self.document_masking]
        return how + (", and one by one in recurrent layers" if self.recurrent else "")

    def joined_row(self, samples: Sequence[Sample]) -> Sample:
        """One row of several samples."""
        starts = np.cumsum([0, *(len(sample["input_ids"]) for sample in samples)]).tolist()
        row: dict[str, Any] = {
            name: np.concatenate([sample[name] for sample in samples], axis=-1)
            for name in samples[0]
            if name != "attachments"
        }
        if "attachments" in samples[0]:
            pairs: Any = zip(samples, starts, strict=False)
            row["attachments"] = [
                one.moved(start) for sample, start in pairs for one in sample["attachments"]
            ]
        return row

    def of_prompts(
        self,
        ids: npt.NDArray[np.integer[Any]],
        store: TokenStore,
        pieces: Sequence[Sequence[tuple[int, int, int]]],
    ) -> Collated:
        """A micro-batch of rows that are answered: `collate`, also where rows are packed or divided.
        ids: (rows, tokens), which begin with the pieces of a store, and have room for answers.
        Raises RowError if an attachment cannot be read."""
        samples = [
            self.attachments.complete(make_sample([(row, np.full(len(row), IGNORED))]), store, own)
            for row, own in zip(ids, pieces, strict=True)
        ]
        alone = replace(
            self, length=ids.shape[1], packed=False, division=WHOLE_ROWS, width_multiple=1
        )
        return alone.collate(samples)

    def collate(
        self, rows: list[Sample], *, several_documents: bool = False, depths: int = 0
    ) -> Collated:
        """See `collate_sequences`; with the attachments of the rows. several_documents: a row holds
        several documents even if it is padded to the longest one."""
        length, packed = self.length, self.packed
        if (several_documents or self.joined) and not packed:
            length, packed = self.width_of(rows), True
        made = collate_sequences(
            rows,
            length=length,
            packed=packed,
            document_masking=self.document_masking,
            recurrent=self.recurrent,
            division=self.division,
            width_multiple=self.width_multiple,
            depths=depths,
        )
        if not self.attachments.modalities:
            return made
        micro_batch, operations = self.attachments.attached(made.micro_batch, rows, self.division)
        return replace(made, micro_batch=micro_batch, tower_operations=operations)


def collate_sequences(
    rows: list[Sample],
    *,
    length: int,
    packed: bool,
    document_masking: DocumentMasking,
    recurrent: bool = False,
    division: RowDivision = WHOLE_ROWS,
    width_multiple: int = 1,
    depths: int = 0,
) -> Collated:
    """A micro-batch: tensors (rows, tokens), padded on the right to the longest row as in
    `padded_width` (packed: to `length`). Attention is causal, so padding needs no mask.

    If a row holds several documents, `position_ids` shows transformers' masks where each starts.
    For varlen attention there are also `cu_seq_lens_q`, `cu_seq_lens_k` (documents + 1,), int32,
    the starts in the flattened rows, and `max_length_q`, `max_length_k`, at least the tokens of the
    longest document: transformers' names. For recurrent layers there are `documents`, those of
    `documents_at`.

    `positions` (positions,) are those of the flattened rows with a target, if they are few.
    They are found on the host: on the device, this would need a synchronization.

    `weights` (rows, tokens), float32, are those of the targets, if any row has weights.
    `loss_weight` is their sum; without weights there is none.

    `text_mask` (rows, tokens), bool, is false in padding, if there is any. It is for the router's
    loss.

    `later` are the tokens and targets of so many `depths`. They are found here, in the whole rows: those
    of a rank's last tokens may belong to another rank.

    With context parallelism, the tensors hold this rank's part of the tokens. Positions are those
    of the whole row, and so are the bounds of documents. With a ring there are `divided_rows`, the
    places of all tokens.
    """
    width = length
    if not packed:
        longest = max(len(row["input_ids"]) for row in rows)
        width = padded_width(longest, length=length, width_multiple=width_multiple)
    width = division.padded(width)
    starts = [row["position_ids"] for row in rows]
    several = packed and any(int((row == 0).sum()) > 1 for row in starts)
    documents = np.arange(len(rows) + 1) * width
    if several:
        # Padding is a document of its own: its positions start at 0 again
        places = np.stack([np.append(row, np.arange(width - len(row))) for row in starts])
        documents = np.append(np.flatnonzero(places == 0), places.size)
    # Without packing, recurrent layers take no `documents`, and are not known here
    of_layers = recurrent or not packed
    divided = division.place(documents, rows=len(rows), width=width, recurrent=of_layers)
    own = functools.partial(division.take, divided=divided)
    made = _with_targets(rows, width, own)
    arguments: dict[str, Any] = {**made.inputs}
    if divided is not None:
        arguments["divided_rows"] = divided
    text_mask = None
    lengths = [len(row["input_ids"]) for row in rows]
    if min(lengths) < width:
        text_mask = own(padded([np.ones(count, bool) for count in lengths], width, False))
    if several:
        arguments["position_ids"] = own(torch.from_numpy(places))
        if recurrent:
            arguments["documents"] = documents_at(places)
        if document_masking == "varlen":
            bounds = documents.astype(np.int32)
            arguments["cu_seq_lens_q"] = arguments["cu_seq_lens_k"] = torch.from_numpy(bounds)
            arguments["max_length_q"] = arguments["max_length_k"] = _rounded_length(bounds, width)
    elif division.size > 1:
        arguments["position_ids"] = own(torch.arange(width).expand(len(rows), -1))
    of_depths = ([_later(row, depth) for row in rows] for depth in range(1, depths + 1))
    later = tuple(_with_targets(moved, width, own) for moved in of_depths)
    made = replace(made, inputs=arguments, text_mask=text_mask, later=later)
    if division.size == 1:
        return collated(made, rows)
    tokens = division.tokens(divided, rows=len(rows), width=width)
    return collated(made, rows, (tokens < np.array(lengths)[:, None]).sum(1).tolist())


def _with_targets(
    rows: list[Sample], width: int, own: Callable[[torch.Tensor], torch.Tensor]
) -> MicroBatch:
    """This rank's `own` part of the ids, targets and weights of rows, padded to `width` tokens."""
    ids = own(padded([row["input_ids"] for row in rows], width, 0))
    targets = own(padded([row["targets"] for row in rows], width, IGNORED))
    weights = positions = None
    if any("weights" in row for row in rows):
        of_rows = [row.get("weights", np.ones(len(row["targets"]))) for row in rows]
        weights = own(padded(of_rows, width, 1.0).float())
    with_target = (targets.flatten() != IGNORED).nonzero()[:, 0]
    if len(with_target) < _MOST_TARGETS * targets.numel():
        positions = with_target
    return MicroBatch({"input_ids": ids}, targets, positions, weights)


def _later(row: Sample, places: int) -> Sample:
    """What a row has so many places later, and no target where the document ends before."""
    positions, count = row["position_ids"], len(row["input_ids"])
    at = np.minimum(np.arange(count) + places, count - 1)
    inside = positions[at] == positions + places  # they start again at 0 in each document
    moved = {name: row[name][at] for name in ("input_ids", "weights") if name in row}
    return moved | {"targets": np.where(inside, row["targets"][at], IGNORED)}


def with_positions(made: Collated) -> Collated:
    """The micro-batch with `positions`, also if these are many."""
    positions = made.micro_batch.counted.flatten().nonzero()[:, 0]
    return replace(made, micro_batch=replace(made.micro_batch, positions=positions))


def _rounded_length(bounds: npt.NDArray[np.int32], width: int) -> int:
    """The tokens of the longest document, rounded up to a power of two from `_SHORTEST` on, but at
    most the width of the rows. Attention starts blocks for as many tokens of every document. Compiled
    blocks take a number that changes as a variable, after one more compilation."""
    longest = int(np.diff(bounds).max())
    return min(width, max(_SHORTEST, 1 << (longest - 1).bit_length()))


def collated(
    micro_batch: MicroBatch, rows: list[Sample], tokens: Sequence[int] | None = None
) -> Collated:
    """A micro-batch of these rows, with its sizes. This rank has so many tokens of each row; None: all."""
    if tokens is None:
        tokens = [len(row["input_ids"]) for row in rows]
    trained, weight = micro_batch.counted, None
    if micro_batch.weights is not None:
        weight = float(micro_batch.weights[trained].double().sum())
    return Collated(
        micro_batch,
        tokens=sum(tokens),
        loss_tokens=int(trained.sum()),
        loss_weight=weight,
        squared_lengths=sum(map(squared_lengths, rows, tokens)),
    )


def squared_lengths(row: Sample, tokens: int) -> int:
    """Sum of the squared lengths of a row's documents; of `tokens` of its tokens, their share of the
    sum."""
    positions = row.get("position_ids")
    count = len(row["input_ids"])
    if positions is None:  # one document
        whole = count**2
    else:
        starts = np.append(np.flatnonzero(positions == 0), count)
        whole = int((np.diff(starts) ** 2).sum())
    return whole * tokens // max(1, count)


def padded(rows: list[npt.NDArray[Any]], width: int, value: float) -> torch.Tensor:
    """(rows, width), int64 or float64 like `value`, with which it is padded on the right."""
    out = np.full((len(rows), width), value)
    for index, row in enumerate(rows):
        out[index, : len(row)] = row
    return torch.from_numpy(out)
