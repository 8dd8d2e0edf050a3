"""Data sets for other objectives than the next token: masked tokens, scores, a teacher."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from launcher.data.batching import NO_SAMPLE
from launcher.data.collation import (
    EMPTY,
    NOTHING,
    Collated,
    Piece,
    Sample,
    collate_masked,
    collate_scored,
    last_target,
    make_sample,
    with_positions,
)
from launcher.data.dataset import PreferenceDataset, SequenceDataset
from launcher.data.tokenizer import hugging_face_tokenizer
from launcher.errors import RecipeError
from launcher.models import distillation, reward
from launcher.models.inputs import IGNORED
from launcher.models.philox import derived_seed
from launcher.recipe import schema


class Vocabulary(NamedTuple):
    """Tokens for masking."""

    mask: int
    special: tuple[int, ...]
    """Tokens that are never masked."""
    size: int
    """Random tokens are below it."""


_NO_TOKENS = Vocabulary(0, (), 1)


def masking_vocabulary(tokenizer: str | None, *, vocabulary: int | None) -> Vocabulary:
    """vocabulary: rows of the model's embedding. Raises RecipeError if there is no tokenizer, or if
    it has no mask token that the model knows."""
    mask = None
    if tokenizer is not None:
        loaded = hugging_face_tokenizer(tokenizer)
        mask = loaded.mask_token_id
    if mask is None:
        what = f"{tokenizer} has no mask token" if tokenizer else "missing"
        raise RecipeError(
            f"data.tokenizer: {what}; model.task: masked_lm needs a tokenizer with one, such as BERT's"
        )
    size = len(loaded) if vocabulary is None else min(len(loaded), vocabulary)
    if mask >= size:
        what = f"is beyond the model's vocabulary of {vocabulary} (model.config.vocab_size)"
        raise RecipeError(f"data.tokenizer: {tokenizer}: its mask token {mask} {what}")
    return Vocabulary(int(mask), tuple(loaded.all_special_ids), size)


@dataclass(frozen=True)
class MaskedDataset(SequenceDataset):
    """Documents, and parts of long ones, some of whose tokens are to be predicted. An index counts
    on through the epochs, since each has other masks."""

    padding: int = 0
    """The model's id for padding."""
    probability: float = 0.15
    """Share of the tokens that are predicted."""
    vocabulary: Vocabulary = _NO_TOKENS
    seed: int = 0
    """That of the masks."""

    def pieces(self, index: int) -> Iterator[tuple[int, int, int]]:
        """One piece; see `_Stored`."""
        return super().pieces(index % len(self))

    def __getitem__(self, index: int) -> Sample:
        """As of SequenceDataset; `targets` are those of the same tokens."""
        if index == NO_SAMPLE:
            return EMPTY
        [(_, start, end)] = self.pieces(index)
        ids = self.store.ids[start:end].astype(np.int64)
        random = np.random.default_rng(derived_seed(self.seed, f"mask {index}"))
        chosen, how = random.random((2, len(ids)))
        others = random.integers(0, self.vocabulary.size, len(ids))
        predicted = (chosen < self.probability) & ~np.isin(ids, self.vocabulary.special)
        replaced = np.where(how < 0.8, self.vocabulary.mask, np.where(how < 0.9, others, ids))
        inputs, targets = np.where(predicted, replaced, ids), np.where(predicted, ids, IGNORED)
        return make_sample([(inputs, targets)])

    def collate(self, rows: list[Sample]) -> Collated:
        """See `collate_masked`."""
        made = collate_masked(
            rows, length=self.length, padding=self.padding, width_multiple=self.width_multiple
        )
        return made if self.target_loss is None else with_positions(made)


@dataclass(frozen=True)
class RewardDataset(PreferenceDataset):
    """Pairs of answers for a reward model. Each answer has a score: that of its last token."""

    padding: int = 0
    """The model's id for padding. transformers takes the score of the last other token."""
    metrics: ClassVar[tuple[str, ...]] = reward.METRICS
    trains_tokens: ClassVar[bool] = False

    def loss(self, model: nn.Module, tensors: Mapping[str, Any]) -> torch.Tensor:
        """Sum of the losses of a micro-batch's pairs, and the sums of `metrics`; float32."""
        return reward.summed_reward_loss(model, tensors)

    def __getitem__(self, index: int) -> Sample:
        """As of SequenceDataset, with targets of 0 at the tokens whose score counts and IGNORED
        elsewhere; and `margins` (pairs,), float32."""
        pieces: list[Piece] = [(NOTHING, NOTHING)]
        margins = []
        for _, bounds in self.pairs(index):
            for first, last in bounds:
                ids = self.store.ids[first:last]
                pieces.append((ids, last_target(ids, self.padding)))
            weights = self.store.weights
            margins.append(0.0 if weights is None else float(weights[bounds[0][0]]))
        return make_sample(pieces) | {"margins": np.array(margins, dtype=np.float32)}

    def collate(self, rows: list[Sample]) -> Collated:
        """See `collate_scored`."""
        return collate_scored(
            rows,
            length=self.length,
            packed=self.packed,
            masking=self.masking,
            width_multiple=self.width_multiple,
        )


TOP_K = (("id", "<i4"), ("log_probability", "<f4"))
"""Fields of a teacher's prediction, each with an array (top_k,)."""


def top_k_dtype(top_k: int) -> np.dtype[Any]:
    """Of a row of the file with a teacher's predictions."""
    return np.dtype([(name, kind, (top_k,)) for name, kind in TOP_K])


@dataclass(frozen=True)
class DistilledDataset(SequenceDataset):
    """Sequences with what a teacher predicts at each target."""

    settings: schema.Distillation | None = None
    teacher: npt.NDArray[Any] | None = None
    """Rows of `top_k_dtype`: of each target of each sequence, in order."""
    first: npt.NDArray[np.int64] | None = None
    """The first row of each sequence, and the end."""
    metrics: ClassVar[tuple[str, ...]] = distillation.METRICS

    def loss(self, model: nn.Module, tensors: Mapping[str, Any]) -> torch.Tensor:
        """Sum of the losses of a micro-batch's targets, and the sums of `metrics`; float32."""
        assert self.settings is not None
        return distillation.summed_distillation_loss(model, tensors, self.settings)

    def __getitem__(self, index: int) -> Sample:
        """As of SequenceDataset; and `teacher`, the rows of its targets."""
        assert self.teacher is not None
        assert self.first is not None
        begin, end = (0, 0) if index == NO_SAMPLE else self.first[index : index + 2].tolist()
        return super().__getitem__(index) | {"teacher": np.array(self.teacher[begin:end])}

    def collate(self, rows: list[Sample]) -> Collated:
        """See `collate_distilled`."""
        return collate_distilled(super().collate(rows), [row["teacher"] for row in rows])


def collate_distilled(made: Collated, teacher: list[npt.NDArray[Any]]) -> Collated:
    """Adds a teacher's predictions of the rows to a micro-batch: `teacher_ids` (positions, top_k)
    and `teacher_log_probabilities`, float32, of the `target_positions`, here all targets."""
    tensors, rows = dict(with_positions(made)["tensors"]), np.concatenate(teacher)
    tensors["teacher_ids"] = torch.from_numpy(rows["id"].astype(np.int64))
    values = np.ascontiguousarray(rows["log_probability"])
    tensors["teacher_log_probabilities"] = torch.from_numpy(values)
    return made | {"tensors": tensors}


def first_targets(dataset: SequenceDataset) -> npt.NDArray[np.int64]:
    """The number of targets before each sequence, and of all: (sequences + 1,)."""
    store, sequences = dataset.store, dataset.sequences
    counted = np.append(0, np.cumsum(store.targets != IGNORED))
    starts = sequences.starts.astype(np.int64)
    ends = store.offsets[np.searchsorted(store.offsets, starts, side="right")]
    last = np.minimum(starts + sequences.lengths + 1, ends)
    counts = counted[last] - counted[starts + 1]
    return np.append(0, np.cumsum(np.add.reduceat(counts, sequences.bounds[:-1])))
