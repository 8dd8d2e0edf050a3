"""Training on masked tokens, as BERT (Devlin et al., 2018)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import nn

from launcher.data.batching import NO_SAMPLE
from launcher.data.collation import (
    EMPTY,
    Collated,
    RowInputs,
    Sample,
    collated,
    make_sample,
    padded,
    with_positions,
)
from launcher.data.dataset import SequenceDataset
from launcher.data.token_store import ModelTraits
from launcher.data.tokenizer import hugging_face_tokenizer
from launcher.errors import RecipeError
from launcher.models.micro_batch import IGNORED, MicroBatch
from launcher.models.philox import derived_seed
from launcher.objectives.base import Example, Objective
from launcher.objectives.loss import summed_loss
from launcher.objectives.next_token import load_users_loss
from launcher.objectives.target_loss import TargetLoss
from launcher.recipe import schema

if TYPE_CHECKING:
    from launcher.recipe.schema import Recipe


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
class Masked(Objective):
    """A sample is a document, or a part of a long one, some of whose tokens are to be predicted. An
    index counts on through the epochs, since each has other masks."""

    probability: float = 0.15
    """Share of the tokens that are predicted."""
    vocabulary: Vocabulary = _NO_TOKENS
    seed: int = 0
    """Seed of the masks."""
    target_loss: TargetLoss | None = None
    """The user's loss of each target; None: the cross-entropy."""
    draws: ClassVar[bool] = True
    divides_loss: ClassVar[bool] = False
    causal: ClassVar[bool] = False
    targets_are_fixed: ClassVar[bool] = False

    @classmethod
    def from_recipe(cls, recipe: Recipe, *, trained: bool) -> Masked:
        """Raises RecipeError if the function in objective.loss cannot be used."""
        return cls(
            probability=recipe.data.mask_probability,
            target_loss=load_users_loss(recipe) if trained else None,
        )

    @property
    def target_share(self) -> float:
        """The share of the tokens whose logits are computed."""
        return self.probability

    def for_model(self, data: schema.Data, model: ModelTraits) -> Masked:
        """With the tokens of the tokenizer. Raises RecipeError if it has no mask token."""
        tokenizer = model.tokenizer or data.tokenizer
        return replace(self, vocabulary=masking_vocabulary(tokenizer, vocabulary=model.vocabulary))

    def with_seed(self, seed: int) -> Masked:
        """With other masks."""
        return replace(self, seed=seed)

    def sample(self, dataset: SequenceDataset, index: int) -> Sample:
        """`input_ids`, `targets` of the same tokens, and `position_ids`, each (tokens,)."""
        if index == NO_SAMPLE:
            return EMPTY
        [(_, start, end)] = dataset.pieces(index)
        ids = dataset.store.ids[start:end].astype(np.int64)
        random = np.random.default_rng(derived_seed(self.seed, f"mask {index}"))
        chosen, how = random.random((2, len(ids)))
        others = random.integers(0, self.vocabulary.size, len(ids))
        predicted = (chosen < self.probability) & ~np.isin(ids, self.vocabulary.special)
        replaced = np.where(how < 0.8, self.vocabulary.mask, np.where(how < 0.9, others, ids))
        inputs, targets = np.where(predicted, replaced, ids), np.where(predicted, ids, IGNORED)
        return make_sample([(inputs, targets)])

    def collate(self, rows: list[Sample], inputs: RowInputs) -> Collated:
        """See `collate_masked`."""
        made = collate_masked(rows, inputs)
        return made if self.target_loss is None else with_positions(made)

    def marks(self, dataset: SequenceDataset, sample: Sample, start: int, end: int) -> list[bool]:
        """Whether each token of a sample is to be predicted."""
        marks: list[bool] = (sample["targets"] != IGNORED).tolist()
        return marks

    def no_targets(self, where: str, key: str) -> str:
        """The message for a part of the data without a masked token."""
        what = f"{self.probability:g} masks no token in {where}"
        return f"data.mask_probability: {what}; raise it, or use more data"

    def loss(self, model: nn.Module, micro_batch: MicroBatch) -> torch.Tensor:
        """See `summed_loss`."""
        return summed_loss(model, micro_batch, self.target_loss)

    def example(self, about: Example) -> Collated:
        """Rows whose tokens are masked at random."""
        ids, length = about.ids(), about.inputs.length
        predicted = about.generator.random((about.rows, length)) < self.probability
        ids[0] = ids[0][:-1]  # without padding, some models build no mask
        rows = [
            {"input_ids": row, "targets": np.where(where[: len(row)], row, IGNORED)}
            for row, where in zip(ids, predicted, strict=True)
        ]
        return self.collate(rows, replace(about.inputs, width_multiple=length))


def collate_masked(rows: list[Sample], inputs: RowInputs) -> Collated:
    """A micro-batch of rows whose targets are those of the same tokens: `input_ids`, `targets` and
    `attention_mask` (rows, tokens), padded on the right to the longest row as in `padded_width`,
    and `positions` as of `collate_sequences`."""
    ids = [row["input_ids"] for row in rows]
    width = inputs.width_of(rows)
    arguments: dict[str, Any] = {
        "input_ids": padded(ids, width, inputs.padding),
        # A row without tokens attends to its padding: a softmax over nothing is not a number
        "attention_mask": padded(
            [np.ones(max(1, len(row)), dtype=np.int64) for row in ids], width, 0
        ),
    }
    targets = padded([row["targets"] for row in rows], width, IGNORED)
    positions = (targets.flatten() != IGNORED).nonzero()[:, 0]
    return collated(MicroBatch(arguments, targets, positions), rows)
