"""Training on the next token of text, by the cross-entropy or a loss of the user's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from launcher.data.collation import Collated, RowInputs, Sample, with_positions
from launcher.models.micro_batch import MicroBatch
from launcher.objectives.base import Objective
from launcher.objectives.loss import summed_loss, summed_loss_by_source
from launcher.objectives.target_loss import TargetLoss, load_target_loss

if TYPE_CHECKING:
    from launcher.recipe.schema import Recipe


@dataclass(frozen=True)
class NextToken(Objective):
    """The target of a token is the next token of its document."""

    target_loss: TargetLoss | None = None
    """The user's loss of each target; None: the cross-entropy."""

    @property
    def needs_logits(self) -> bool:
        """Whether the user's function gets logits."""
        return self.target_loss is not None and self.target_loss.needs == "logits"

    @classmethod
    def from_recipe(cls, recipe: Recipe, *, trained: bool) -> NextToken:
        """Raises RecipeError if the function in objective.loss cannot be used."""
        return cls(target_loss=load_users_loss(recipe) if trained else None)

    def collate(self, rows: list[Sample], inputs: RowInputs) -> Collated:
        """See `collate_sequences`. For a loss of the user's, `positions` are all targets."""
        made = inputs.collate(rows)
        return made if self.target_loss is None else with_positions(made)

    def loss(self, model: nn.Module, micro_batch: MicroBatch) -> torch.Tensor:
        """See `summed_loss` and `summed_loss_by_source`."""
        summed = summed_loss_by_source if micro_batch.sources is not None else summed_loss
        return summed(model, micro_batch, self.target_loss)


def load_users_loss(recipe: Recipe) -> TargetLoss | None:
    """The function in objective.loss; None: there is none. Raises RecipeError if it cannot be
    used."""
    if recipe.objective is None:
        return None
    return load_target_loss(recipe.objective)
