"""Data sets for other objectives than the next token: masked tokens, and scores of answers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

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
    collate_masked,
    collate_scored,
    last_target,
    make_sample,
)
from launcher.data.dataset import PreferenceDataset, SequenceDataset
from launcher.data.tokenizer import hugging_face_tokenizer
from launcher.errors import RecipeError
from launcher.models import reward
from launcher.models.inputs import IGNORED
from launcher.models.philox import derived_seed


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
        return collate_masked(rows, padding=self.padding)


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
            rows, length=self.length if self.packed else None, masking=self.masking
        )
