"""Answers that are good or not, without pairs (the section kto)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch
from torch import nn

from launcher.data.collation import Collated, RowInputs, Sample
from launcher.data.dataset import SequenceDataset
from launcher.models.micro_batch import MicroBatch
from launcher.objectives.answers import Answers, answer_log_probabilities, collate_answers
from launcher.objectives.base import Example
from launcher.objectives.loss import add_router_loss, by_source
from launcher.recipe import schema

if TYPE_CHECKING:
    from launcher.recipe.schema import Recipe


@dataclass(frozen=True)
class Kto(Answers):
    """The loss of KTO (Ethayarajh et al., 2024) with a reference point of 0: the reward of an answer
    is beta times the log-ratio of its probabilities by the model and by the initial weights. A good
    answer has the loss sigmoid(-reward), another one sigmoid(reward), each times its weight. This is
    APO-zero without pairs (D'Oosterlinck et al., 2024). `store.desirable` says which answers are
    good."""

    settings: schema.Kto = field(default_factory=schema.Kto)
    loss_unit: ClassVar[str] = "answers"
    unit: ClassVar[str] = "answers"
    metrics: ClassVar[tuple[str, ...]] = (
        "rewards/accuracies",
        "desirable",
        "rewards/chosen",
        "rewards/rejected",
        "logps/chosen",
        "logps/rejected",
    )
    """Sums over all answers; those of chosen and rejected ones are 0 for the other answers."""

    @classmethod
    def from_recipe(cls, recipe: Recipe, *, trained: bool) -> Kto:
        """Without the section, as to inspect the rows, the settings are the defaults."""
        return cls(settings=recipe.kto or schema.Kto())

    def sample(self, dataset: SequenceDataset, index: int) -> Sample:
        """That of `Answers`, and for each token `desirable`: 1 if its answer is good, else 0."""
        sample = super().sample(dataset, index)
        desirable, answers = dataset.store.desirable, sample["answers"]
        assert desirable is not None
        # Tokens without a target have the answer -1, and their value is not used
        return sample | {"desirable": desirable[answers].astype(np.float32)}

    def collate(self, rows: list[Sample], inputs: RowInputs) -> Collated:
        """See `collate_answers`; with `desirable`, (answers, 1), float32."""
        return collate_answers(rows, inputs, self.answers, ("desirable",))

    def parts(self, dataset: SequenceDataset, document: int) -> list[tuple[str, int]]:
        """The answer after its prompt, named by its mark."""
        assert dataset.store.desirable is not None
        ((_, whole),) = super().parts(dataset, document)
        return [("good" if dataset.store.desirable[document] else "not good", whole)]

    def loss(self, model: nn.Module, micro_batch: MicroBatch) -> torch.Tensor:
        """The sum of the losses of the answers, and the sums of `metrics` without gradients: a
        float32 vector. With output_router_logits the gradient includes the router's loss."""
        found, extra = answer_log_probabilities(model, micro_batch), micro_batch.extra
        sums, desirable = found.value, extra["desirable"].flatten()
        reference = extra["reference"].flatten()
        losses, rewards = answer_losses(sums.flatten(), reference, desirable, self.settings)
        loss = add_router_loss(losses.sum(), model, found, micro_batch, len(losses))
        good, other = sides(desirable)
        columns = [((good - other) * rewards > 0).float(), desirable]
        for values in (rewards, sums.flatten()):
            columns += [values * good, values * other]
        further = torch.stack(columns).sum(1).detach()
        return torch.cat([loss.view(1), further, by_source(losses, micro_batch)])

    def shown(self, means: Mapping[str, float]) -> Mapping[str, float | None]:
        """The share of the answers whose reward has the right sign, and the mean rewards and
        log-probabilities of the good answers (chosen) and of the others (rejected), by TRL's names.
        None: there was no such answer."""
        good = means["desirable"]
        shares = {"chosen": good, "rejected": 1 - good}
        shown: dict[str, float | None] = {"rewards/accuracies": means["rewards/accuracies"]}
        for name in self.metrics[2:]:
            share = shares[name.partition("/")[2]]
            shown[name] = means[name] / share if share > 1e-9 else None
        chosen, rejected = shown["rewards/chosen"], shown["rewards/rejected"]
        if chosen is not None and rejected is not None:
            shown["rewards/margins"] = chosen - rejected
        return shown

    def example_rows(self, about: Example) -> list[Sample]:
        """A good answer in each row, whose tokens all have a loss."""
        return [
            row | {"desirable": np.ones(len(row["answers"]), dtype=np.float32)}
            for row in super().example_rows(about)
        ]


def sides(desirable: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """1 for each good answer, and 1 for each other one."""
    return desirable, 1 - desirable


def answer_losses(
    sums: torch.Tensor, reference: torch.Tensor, desirable: torch.Tensor, settings: schema.Kto
) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss of each answer, times its weight, and its reward, all (answers,).

    Log-probabilities of the answers, and those by the reference; desirable is 1 for good answers,
    else 0.
    """
    rewards = settings.beta * (sums - reference)
    good, other = sides(desirable)
    weights = settings.desirable_weight * good + settings.undesirable_weight * other
    return weights * torch.sigmoid((other - good) * rewards), rewards
