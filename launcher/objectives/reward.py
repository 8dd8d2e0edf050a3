"""Reward models: classifiers of transformers with one label, whose logit is the score of a text."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.nn.functional import logsigmoid

from launcher.data.collation import NOTHING, Collated, Piece, RowInputs, Sample, make_sample
from launcher.data.dataset import SequenceDataset
from launcher.data.token_store import ModelTraits
from launcher.errors import RecipeError
from launcher.models.head import Head, Transform
from launcher.models.micro_batch import IGNORED, MicroBatch
from launcher.models.predictions import logits
from launcher.models.record import record_of
from launcher.objectives.answers import Pairs
from launcher.objectives.base import Example
from launcher.objectives.loss import by_source
from launcher.recipe import schema

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Reward(Pairs):
    """Pairs of answers for a reward model. Each answer has a score: that of its last token."""

    padding: int = 0
    """The model's id for padding. transformers takes the score of the last other token."""
    metrics: ClassVar[tuple[str, ...]] = ("accuracy", "margin", "mean_reward")
    """Means over pairs. The names are TRL's."""
    targets_are_fixed: ClassVar[bool] = False

    def change_model(self, model: PreTrainedModel, *, row_length: int) -> None:
        """Raises RecipeError if the model does not score each token."""
        if not isinstance(getattr(model, "score", None), nn.Module):
            raise RecipeError(
                f"model.task: reward: {type(model).__name__} does not score each token (it has no "
                "module `score`); give a causal language model, such as llama or qwen3"
            )
        record_of(model).head = Head(model.score, Transform())

    def for_model(self, data: schema.Data, model: ModelTraits) -> Reward:
        """With the model's id for padding."""
        return Reward(padding=model.padding)

    def sample(self, dataset: SequenceDataset, index: int) -> Sample:
        """`input_ids`, `position_ids`, and `targets` of 0 at the tokens whose score counts and
        IGNORED elsewhere, each (tokens,); and `margins` (pairs,), float32."""
        pieces: list[Piece] = [(NOTHING, NOTHING)]
        margins = []
        store = dataset.store
        for document, bounds in self.bounds(dataset, index):
            for first, last in bounds:
                ids = store.ids[first:last]
                pieces.append((ids, last_target(ids, self.padding)))
            margins.append(0.0 if store.margins is None else float(store.margins[document]))
        return make_sample(pieces) | {"margins": np.array(margins, dtype=np.float32)}

    def collate(self, rows: list[Sample], inputs: RowInputs) -> Collated:
        """See `collate_scored`."""
        return collate_scored(rows, inputs)

    def marks(self, dataset: SequenceDataset, sample: Sample, start: int, end: int) -> list[bool]:
        """Whether each token of a pair is the one whose score counts."""
        store = dataset.store
        assert store.first_lengths is not None
        document = int(np.searchsorted(store.offsets, start, side="right")) - 1
        middle = start + int(store.first_lengths[document])
        answers = store.ids[start:middle], store.ids[middle:end]
        targets = np.concatenate([last_target(ids, self.padding) for ids in answers])
        marks: list[bool] = (targets != IGNORED).tolist()
        return marks

    def loss(self, model: nn.Module, micro_batch: MicroBatch) -> torch.Tensor:
        """The sum over pairs of -log sigmoid(chosen - rejected - margin) of their scores, and the
        sums of `metrics` without gradients: a float32 vector."""
        extra = micro_batch.extra
        scores = logits(model, micro_batch.inputs).float().flatten()[extra["ends"]]
        margins = scores[:, 0] - scores[:, 1]
        losses = -logsigmoid(margins - extra["margins"])
        columns = [(margins > 0).float(), margins, scores.mean(1)]
        further = torch.stack(columns).sum(1).detach()
        return torch.cat([losses.sum().view(1), further, by_source(losses, micro_batch)])

    def example_rows(self, about: Example) -> list[Sample]:
        """A pair in each row."""
        answers = ((half, last_target(half)) for half in np.array_split(about.ids()[0], 2))
        return [make_sample(answers) | {"margins": np.zeros(1, dtype=np.float32)}] * about.rows


def last_target(ids: npt.NDArray[Any], padding: int | None = None) -> npt.NDArray[np.int64]:
    """(tokens,): 0 at the last token that is not `padding`, or without such a token at the first
    one, as transformers has it; IGNORED elsewhere."""
    targets = np.full(len(ids), IGNORED, dtype=np.int64)
    targets[np.append(0, np.flatnonzero(ids != padding))[-1]] = 0
    return targets


def collate_scored(rows: list[Sample], inputs: RowInputs) -> Collated:
    """A micro-batch of `collate_sequences` from samples of `Reward`, padded as those of
    `collate_answers`, without targets. `ends` (pairs, 2) are the positions in the flattened rows
    whose scores are those of the chosen and the rejected answers, and `margins` are (pairs,).
    `loss_tokens` is the number of pairs."""
    made = inputs.collate(rows, several_documents=True)
    ends = made.micro_batch.counted.flatten().nonzero().view(-1, 2)
    margins = torch.from_numpy(np.concatenate([row["margins"] for row in rows]))
    micro_batch = MicroBatch(made.micro_batch.inputs, extra={"ends": ends, "margins": margins})
    return replace(made, micro_batch=micro_batch, loss_tokens=len(ends), loss_weight=None)
