"""Training on the next token of text, by the cross-entropy or a loss of the user's."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import nn

from launcher.data.collation import Collated, RowInputs, Sample, with_positions
from launcher.models.micro_batch import MicroBatch
from launcher.models.multi_token import PER_DEPTH
from launcher.models.record import record_of
from launcher.objectives.base import MetricValues, Objective
from launcher.objectives.loss import summed_loss, summed_loss_by_source
from launcher.objectives.target_loss import TargetLoss, load_target_loss

if TYPE_CHECKING:
    from launcher.recipe.schema import Recipe


@dataclass(frozen=True)
class NextToken(Objective):
    """The target of a token is the next token of its document."""

    target_loss: TargetLoss | None = None
    """The user's loss of each target; None: the cross-entropy."""
    depths: int = 0
    """Layers of multi-token prediction whose sums follow the loss."""

    @property
    def metrics(self) -> tuple[str, ...]:  # type: ignore[override]
        """For each depth the sums `PER_DEPTH`."""
        return tuple(f"{part}_{depth}" for depth in self._depths for part in PER_DEPTH)

    @property
    def _depths(self) -> range:
        return range(1, self.depths + 1)

    def of_model(self, model: nn.Module) -> NextToken:
        """With the depths of the model."""
        layers = record_of(model).multi_token
        return self if layers is None else replace(self, depths=layers.depths)

    def shown(self, means: Mapping[str, float]) -> Mapping[str, float | None]:
        """The mean cross-entropy of the depths. NaN, of layers that are not trained: it is not shown."""
        if not self.depths or math.isnan(means["loss_1"]):
            return {}
        each = [_ratio(means[f"loss_{n}"], means[f"weight_{n}"]) for n in self._depths]
        known = [value for value in each if value is not None]
        return {"mtp_loss": sum(known) / len(known) if known else None}

    def scores(self, sums: torch.Tensor) -> MetricValues:
        """The mean cross-entropy of the depths, and for each the share of targets that it guesses."""
        if not self.depths:
            return super().scores(sums)
        found = dict(zip(self.metrics, sums.tolist(), strict=False))
        right = {
            f"mtp_accuracy_{n}": _ratio(found[f"right_{n}"], found[f"targets_{n}"]) or 0.0
            for n in self._depths
        }
        loss = {"mtp_loss": self.shown(found)["mtp_loss"] or 0.0}
        return {**loss, **right}, int(found["targets_1"])

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
        made = inputs.collate(rows, depths=self.depths)
        return made if self.target_loss is None else with_positions(made)

    def loss(self, model: nn.Module, micro_batch: MicroBatch) -> torch.Tensor:
        """See `summed_loss` and `summed_loss_by_source`."""
        summed = summed_loss_by_source if micro_batch.sources is not None else summed_loss
        return summed(model, micro_batch, self.target_loss)


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def load_users_loss(recipe: Recipe) -> TargetLoss | None:
    """The function in objective.loss; None: there is none. Raises RecipeError if it cannot be
    used."""
    if recipe.objective is None:
        return None
    return load_target_loss(recipe.objective)
