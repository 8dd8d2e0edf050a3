"""Losses on pairs of answers, and their metrics: sums over the pairs of a micro-batch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import nn
from torch.nn.functional import logsigmoid

from launcher.data.dataset import SequenceDataset
from launcher.models.micro_batch import MicroBatch
from launcher.objectives.answers import Answers, Pairs, answer_log_probabilities
from launcher.objectives.loss import add_router_loss, by_source
from launcher.recipe import schema

if TYPE_CHECKING:
    from launcher.recipe.schema import Recipe


@dataclass(frozen=True)
class Preference(Pairs, Answers):
    """Losses on pairs of answers (the section preference). Each pair counts the same."""

    settings: schema.Preference = field(default_factory=schema.Preference)
    answers: ClassVar[int] = 2
    metrics: ClassVar[tuple[str, ...]] = (
        "rewards/chosen",
        "rewards/rejected",
        "rewards/margins",
        "rewards/accuracies",
        "logps/chosen",
        "logps/rejected",
    )
    """Means over pairs. The names are TRL's."""

    @classmethod
    def from_recipe(cls, recipe: Recipe, *, trained: bool) -> Preference:
        """Without the section, as to inspect the pairs of a reward model, the loss is that of
        dpo."""
        return cls(settings=recipe.preference or schema.Preference())

    @property
    def needs_reference(self) -> bool:
        """Whether the loss compares with the log-probabilities by the initial weights."""
        return compares(self.settings)

    def parts(self, dataset: SequenceDataset, document: int) -> list[tuple[str, int]]:
        """The two answers of a pair, each with the prompt."""
        assert dataset.store.first_lengths is not None
        ((_, whole),) = super().parts(dataset, document)
        return [("chosen", int(dataset.store.first_lengths[document])), ("rejected", whole)]

    def loss(self, model: nn.Module, micro_batch: MicroBatch) -> torch.Tensor:
        """The sum of the losses of the pairs, and the sums of `metrics` without gradients: a
        float32 vector. With output_router_logits the gradient includes the router's loss."""
        found, extra = answer_log_probabilities(model, micro_batch), micro_batch.extra
        sums, counts, reference = found.value, extra["answer_tokens"], extra["reference"]
        losses, rewards = pair_losses(sums, counts, reference, self.settings)
        loss = add_router_loss(losses.sum(), model, found, micro_batch, len(counts))
        shown = sums if self.needs_reference else sums / counts
        margins = rewards[:, 0] - rewards[:, 1]
        columns = [*rewards.unbind(1), margins, (margins > 0).float(), *shown.unbind(1)]
        further = torch.stack(columns).sum(1).detach()
        return torch.cat([loss.view(1), further, by_source(losses, micro_batch)])


def compares(settings: schema.Preference) -> bool:
    """Whether the loss compares with the log-probabilities by the initial weights."""
    return settings.loss not in schema.WITHOUT_REFERENCE


def pair_losses(
    sums: torch.Tensor, counts: torch.Tensor, reference: torch.Tensor, settings: schema.Preference
) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss of each pair (pairs,), and the rewards of its answers (pairs, 2).

    Log-probabilities of the answers, their numbers of tokens, and log-probabilities by the
    reference are (pairs, 2), chosen and rejected.
    """
    beta, swapped, ratios = settings.beta, settings.label_smoothing, sums - reference
    if not compares(settings):
        ratios = sums / counts
    elif settings.loss == "ipo":
        per_token = ratios / counts
        difference = per_token[:, 0] - per_token[:, 1]
        return (difference - 1 / (2 * beta)).square(), beta * ratios
    rewards = beta * ratios
    chosen, rejected = rewards.unbind(1)
    margins = chosen - rejected
    match settings.loss:
        case "dpo":
            return -logsigmoid(margins), rewards
        case "robust":
            sides = (1 - swapped) * logsigmoid(margins) - swapped * logsigmoid(-margins)
            return -sides / (1 - 2 * swapped), rewards
        case "hinge":
            return torch.relu(1 - margins), rewards
        case "apo_zero":
            return 1 - chosen.sigmoid() + rejected.sigmoid(), rewards
        case "simpo":
            return -logsigmoid(margins - settings.margin), rewards
    # orpo. An answer of probability 1 has infinite odds, whose gradient is not a number
    finite = ratios.clamp(max=-torch.finfo(ratios.dtype).eps)
    odds = finite - torch.log(-torch.expm1(finite))
    return -ratios[:, 0] - beta * logsigmoid(odds[:, 0] - odds[:, 1]), rewards
