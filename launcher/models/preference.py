"""Losses on pairs of answers, and their metrics: sums over the pairs of a micro-batch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.nn.functional import logsigmoid

from launcher.errors import RecipeError
from launcher.models.attention import refuse_other_layers
from launcher.models.loss import MicroBatch, add_router_loss, target_losses
from launcher.recipe.schema import Preference

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.utils import ModelOutput

Reference = npt.NDArray[np.float32]
"""Log-probabilities of the chosen and the rejected answer of each pair: (pairs, 2)."""
METRICS = (
    *("rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies"),
    *("logps/chosen", "logps/rejected"),
)
"""Means over pairs. The names are TRL's."""


def needs_reference(settings: Preference) -> bool:
    """Whether the loss compares with the log-probabilities by the initial weights."""
    return settings.loss not in ("simpo", "orpo")


def answer_log_probabilities(
    model: nn.Module, micro_batch: MicroBatch
) -> tuple[torch.Tensor, ModelOutput]:
    """(pairs, 2), float32: the sums over the tokens of each answer; and the model's outputs.

    A micro-batch is that of `PreferenceDataset.collate`.
    """
    losses, outputs = target_losses(model, micro_batch)
    sums = losses.new_zeros(micro_batch["answer_tokens"].numel() + 1)  # the last: no answer
    return sums.index_add(0, micro_batch["answers"], -losses)[:-1].view(-1, 2), outputs


def summed_preference_loss(
    model: nn.Module, micro_batch: MicroBatch, settings: Preference
) -> torch.Tensor:
    """The sum of the losses of the pairs, and the sums of METRICS without gradients: a float32
    vector. With output_router_logits the gradient includes the router's loss."""
    sums, outputs = answer_log_probabilities(model, micro_batch)
    counts, reference = micro_batch["answer_tokens"], micro_batch["reference"]
    losses, rewards = pair_losses(sums, counts, reference, settings)
    loss = add_router_loss(losses.sum(), model, outputs, micro_batch, len(counts))
    shown = sums / counts if settings.loss in ("simpo", "orpo") else sums
    margins = rewards[:, 0] - rewards[:, 1]
    columns = [*rewards.unbind(1), margins, (margins > 0).float(), *shown.unbind(1)]
    return torch.cat([loss.view(1), torch.stack(columns).sum(1).detach()])


def pair_losses(
    sums: torch.Tensor, counts: torch.Tensor, reference: torch.Tensor, settings: Preference
) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss of each pair (pairs,), and the rewards of its answers (pairs, 2).

    Log-probabilities of the answers, their numbers of tokens, and log-probabilities by the
    reference are (pairs, 2), chosen and rejected.
    """
    beta, swapped, ratios = settings.beta, settings.label_smoothing, sums - reference
    if not needs_reference(settings):
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


def check_model(model: PreTrainedModel, sequence_length: int) -> None:
    """Raises RecipeError if the two answers of a pair cannot share a row, or if the model has
    dropout or noise in its routers: its log-probabilities would be compared with those of a
    reference without it."""
    instead = "both answers of a pair are in one row, so it cannot be trained on pairs"
    refuse_other_layers(
        model, sequence_length, key="data.kind: preference", instead=instead, packed=True
    )
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            dropout = key == "p" if isinstance(module, nn.Dropout) else "drop" in key
            noise = "jitter" in key
            if (dropout or noise) and isinstance(value, float) and value > 0:
                what = "noise in routers" if noise else "dropout"
                own = key if noise else "the model's dropout"
                raise RecipeError(
                    f"preference: not available with {what}, and {name}.{key} is {value}: set "
                    f"{own} to 0 in model.config, or in config.json of model.path"
                )
