"""Rows of tokens, and micro-batches of them as tensors."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from launcher.models.inputs import IGNORED, WHOLE_ROW, Masking, RowPart

Sample = dict[str, npt.NDArray[Any]]
Piece = tuple[npt.NDArray[Any], ...]
"""Ids and targets of a run of tokens of one document, and perhaps the weights of the targets."""
Collated = dict[str, Any]
"""A micro-batch: `tensors`, the arguments of the loss; `tokens` without padding; `loss_tokens`; and
`squared_lengths`, the sum over the documents of their squared lengths in tokens."""
_MOST_TARGETS = 0.9
"""Share of positions with a target below which logits are computed for these positions only."""
_SHORTEST = 256
"""Smallest `max_length_q`, which is two blocks of attention for a document."""


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


def collate_sequences(
    rows: list[Sample],
    *,
    length: int,
    packed: bool,
    masking: Masking,
    part: RowPart = WHOLE_ROW,
    width_multiple: int = 1,
) -> Collated:
    """A micro-batch: tensors (rows, tokens), padded on the right to the longest row as in
    `padded_width` (packed: to `length`). Attention is causal, so padding needs no mask.

    If a row holds several documents, `position_ids` shows transformers' masks where each starts.
    For varlen attention there are also `cu_seq_lens_q`, `cu_seq_lens_k` (documents + 1,), int32,
    the starts in the flattened rows, and `max_length_q`, `max_length_k`, at least the tokens of the
    longest document: transformers' names.

    `target_positions` (positions,) are those of the flattened rows with a target, if they are few.
    They are found on the host: on the device, this would need a synchronization.

    `weights` (rows, tokens), float32, are those of the targets, if any row has weights.
    `loss_weight` is their sum; without weights there is none.

    `text_mask` (rows, tokens), bool, is false in padding, if there is any. It is for the router's
    loss.

    With context parallelism, the tensors hold this rank's part of the tokens. Positions are those
    of the whole row, and so are the bounds of documents.
    """
    width = length
    if not packed:
        width = _width_of(rows, length=length, width_multiple=width_multiple)
    width = -(-width // part.parts) * part.parts
    tensors: dict[str, Any] = {
        "input_ids": padded([row["input_ids"] for row in rows], width, 0),
        "targets": padded([row["targets"] for row in rows], width, IGNORED),
    }
    if any("weights" in row for row in rows):
        weights = [row.get("weights", np.ones(len(row["targets"]))) for row in rows]
        tensors["weights"] = padded(weights, width, 1.0).float()
    lengths = [len(row["input_ids"]) for row in rows]
    if min(lengths) < width:
        tensors["text_mask"] = padded([np.ones(count, bool) for count in lengths], width, False)
    starts = [row["position_ids"] for row in rows]
    if packed and any(int((row == 0).sum()) > 1 for row in starts):
        # Padding is a document of its own: its positions start at 0 again
        positions = np.stack([np.append(row, np.arange(width - len(row))) for row in starts])
        tensors["position_ids"] = torch.from_numpy(positions)
        if masking == "varlen":
            bounds = np.append(np.flatnonzero(positions == 0), positions.size).astype(np.int32)
            tensors["cu_seq_lens_q"] = tensors["cu_seq_lens_k"] = torch.from_numpy(bounds)
            tensors["max_length_q"] = tensors["max_length_k"] = _rounded_length(bounds, width)
    elif part.parts > 1:
        tensors["position_ids"] = torch.arange(width).expand(len(rows), -1)
    mine = part.of(width)
    names = ("input_ids", "targets", "position_ids", "weights", "text_mask")
    whole = names if part.parts > 1 else ()
    for name in tensors.keys() & whole:
        tensors[name] = tensors[name][:, mine].contiguous()
    with_target = (tensors["targets"].flatten() != IGNORED).nonzero()[:, 0]
    if len(with_target) < _MOST_TARGETS * tensors["targets"].numel():
        tensors["target_positions"] = with_target
    return collated(tensors, rows, mine)


def with_positions(made: Collated) -> Collated:
    """The micro-batch with `target_positions`, also if these are many."""
    tensors = made["tensors"]
    positions = (tensors["targets"].flatten() != IGNORED).nonzero()[:, 0]
    return made | {"tensors": tensors | {"target_positions": positions}}


def _rounded_length(bounds: npt.NDArray[np.int32], width: int) -> int:
    """The tokens of the longest document, rounded up to a power of two from `_SHORTEST` on, but at
    most the width of the rows. Attention starts blocks for as many tokens of every document. Compiled
    blocks take a number that changes as a variable, after one more compilation."""
    longest = int(np.diff(bounds).max())
    return min(width, max(_SHORTEST, 1 << (longest - 1).bit_length()))


def _width_of(rows: list[Sample], *, length: int, width_multiple: int) -> int:
    longest = max(len(row["input_ids"]) for row in rows)
    return padded_width(longest, length=length, width_multiple=width_multiple)


def collate_pairs(
    rows: list[Sample],
    *,
    length: int,
    packed: bool,
    masking: Masking,
    width_multiple: int = 1,
) -> Collated:
    """A micro-batch of `collate_sequences` from rows of `PreferenceDataset`, padded as there. A row
    holds several documents even if it is not packed.
    `loss_tokens` is the number of pairs, `documents` are those of the store.

    `answers` (positions,) are the numbers of the answers whose tokens the targets are: for each
    pair the chosen and then the rejected one, and without a target the number after the last.
    `answer_tokens`, the numbers of targets, and `reference` are (pairs, 2), float32.
    """
    width = length
    if not packed:
        width = _width_of(rows, length=length, width_multiple=width_multiple)
    made = collate_sequences(rows, length=width, packed=True, masking=masking)
    numbers, names, count = [], [NOTHING], 0
    sizes, reference = [NOTHING], [NOTHING]
    for row in rows:  # the same pair may be in two rows, of two epochs
        here = row["answers"] >= 0
        found, first, inverse, counts = np.unique(
            row["answers"][here], return_index=True, return_inverse=True, return_counts=True
        )
        numbers.append(np.full(len(here), -1))
        numbers[-1][here] = inverse + count
        names.append(found)
        sizes.append(counts)
        reference.append(row["reference"][here][first])
        count += len(found)
    tensors = made["tensors"]
    answers = padded(numbers, width, -1).flatten()
    answers[answers < 0] = count
    positions = tensors.get("target_positions")
    tensors["answers"] = answers if positions is None else answers[positions]
    for name, values in (("answer_tokens", sizes), ("reference", reference)):
        tensors[name] = torch.from_numpy(np.concatenate(values).astype(np.float32)).view(-1, 2)
    return made | {"loss_tokens": count // 2, "documents": np.concatenate(names)[::2] // 2}


def collate_masked(
    rows: list[Sample], *, length: int, padding: int, width_multiple: int = 1
) -> Collated:
    """A micro-batch of rows whose targets are those of the same tokens: `input_ids`, `targets` and
    `attention_mask` (rows, tokens), padded on the right to the longest row as in `padded_width`,
    and `target_positions` as of `collate_sequences`."""
    ids = [row["input_ids"] for row in rows]
    width = _width_of(rows, length=length, width_multiple=width_multiple)
    tensors: dict[str, Any] = {
        "input_ids": padded(ids, width, padding),
        # A row without tokens attends to its padding: a softmax over nothing is not a number
        "attention_mask": padded(
            [np.ones(max(1, len(row)), dtype=np.int64) for row in ids], width, 0
        ),
        "targets": padded([row["targets"] for row in rows], width, IGNORED),
    }
    tensors["target_positions"] = (tensors["targets"].flatten() != IGNORED).nonzero()[:, 0]
    return collated(tensors, rows)


def last_target(ids: npt.NDArray[Any], padding: int | None = None) -> npt.NDArray[np.int64]:
    """(tokens,): 0 at the last token that is not `padding`, or without such a token at the first
    one, as transformers has it; IGNORED elsewhere."""
    targets = np.full(len(ids), IGNORED, dtype=np.int64)
    targets[np.append(0, np.flatnonzero(ids != padding))[-1]] = 0
    return targets


def collate_classified(
    rows: list[Sample], *, length: int, padding: int, width_multiple: int = 1
) -> Collated:
    """A micro-batch of rows with a class each: `input_ids` and `attention_mask` (rows, tokens),
    padded on the right to the longest row as in `padded_width`, and `targets` (rows,)."""
    ids = [row["input_ids"] for row in rows]
    width = _width_of(rows, length=length, width_multiple=width_multiple)
    tensors = {
        "input_ids": padded(ids, width, padding),
        "attention_mask": padded([np.ones_like(row) for row in ids], width, 0),
        "targets": torch.from_numpy(np.concatenate([row["targets"] for row in rows])),
    }
    return collated(tensors, rows)


def collate_scored(
    rows: list[Sample],
    *,
    length: int,
    packed: bool,
    masking: Masking,
    width_multiple: int = 1,
) -> Collated:
    """A micro-batch of `collate_sequences` from rows of `RewardDataset`, padded as those of
    `collate_pairs`, without targets. `ends` (pairs, 2) are the positions in the flattened rows
    whose scores are those of the chosen and the rejected answers, and `margins` are (pairs,).
    `loss_tokens` is the number of pairs."""
    width = length
    if not packed:
        width = _width_of(rows, length=length, width_multiple=width_multiple)
    made = collate_sequences(rows, length=width, packed=True, masking=masking)
    tensors = made["tensors"]
    tensors.pop("target_positions", None)
    ends = (tensors.pop("targets").flatten() != IGNORED).nonzero().view(-1, 2)
    margins = torch.from_numpy(np.concatenate([row["margins"] for row in rows]))
    return made | {
        "tensors": tensors | {"ends": ends, "margins": margins},
        "loss_tokens": len(ends),
    }


def collated(tensors: dict[str, Any], rows: list[Sample], part: slice = slice(None)) -> Collated:
    """A micro-batch of these tensors and rows; `part` of each row is this rank's."""
    trained = tensors["targets"] != IGNORED
    counts: Collated = {
        "tensors": tensors,
        "tokens": sum(len(row["input_ids"][part]) for row in rows),
        "loss_tokens": int(trained.sum()),
        "squared_lengths": sum(squared_lengths(row, part) for row in rows),
    }
    if "weights" in tensors:
        counts["loss_weight"] = float(tensors["weights"][trained].double().sum())
    return counts


def squared_lengths(row: Sample, part: slice = slice(None)) -> int:
    """Sum of the squared lengths of a row's documents; for a part of the row, the part's share of the
    sum."""
    positions = row.get("position_ids")
    count = len(row["input_ids"])
    if positions is None:  # one document
        whole = count**2
    else:
        starts = np.append(np.flatnonzero(positions == 0), count)
        whole = int((np.diff(starts) ** 2).sum())
    return whole * len(row["input_ids"][part]) // max(1, count)


def padded(rows: list[npt.NDArray[Any]], width: int, value: float) -> torch.Tensor:
    """(rows, width), int64 or float64 like `value`, with which it is padded on the right."""
    out = np.full((len(rows), width), value)
    for index, row in enumerate(rows):
        out[index, : len(row)] = row
    return torch.from_numpy(out)
