"""Training losses: sums over targets, which the caller divides by the global batch's targets."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import nn

from launcher.libraries.families import ROUTER_LOSS
from launcher.models.head import computes_loss
from launcher.models.micro_batch import MicroBatch
from launcher.models.predictions import Predicted, cross_entropies, of_head, predicted_logits
from launcher.models.record import record_of

if TYPE_CHECKING:
    from launcher.objectives.target_loss import TargetLoss

Loss = Callable[[nn.Module, MicroBatch], torch.Tensor]
"""loss(model, micro-batch): the sum over the micro-batch's targets, a float32 scalar; or a vector
of this and the sums of further metrics, without gradients. It runs between the hooks of the strategy
(`WrappedModel.call`), and may call the model, or parts of it, as often as it likes."""


def summed_loss(
    model: nn.Module, micro_batch: MicroBatch, target_loss: TargetLoss | None = None
) -> torch.Tensor:
    """Sum of the next-token cross-entropies of a micro-batch, each times its weight; a float32
    scalar. A `target_loss` takes the place of the cross-entropy.

    If the model config sets the router's auxiliary loss (output_router_logits), the gradient
    includes it; the value does not, to be comparable with an evaluation. With layers of multi-token
    prediction it is a vector: see `add_further_losses`.
    """
    if micro_batch.weights is None and target_loss is None:
        found = cross_entropies(model, micro_batch, "sum")
        summed = add_router_loss(found.value, model, found, micro_batch)
        return add_further_losses(summed, found)
    found = target_losses(model, micro_batch, target_loss)
    losses, count = found.value, None
    if micro_batch.weights is not None:
        weights = micro_batch.at_positions(micro_batch.weights * micro_batch.counted)
        losses, count = losses * weights, weights.sum()
    summed = add_router_loss(losses.sum(), model, found, micro_batch, count)
    return add_further_losses(summed, found)


def summed_loss_by_source(
    model: nn.Module, micro_batch: MicroBatch, target_loss: TargetLoss | None = None
) -> torch.Tensor:
    """`summed_loss`, followed by `by_source` of the losses, for a micro-batch of a mixture."""
    found = target_losses(model, micro_batch, target_loss)
    losses, weights = found.value, micro_batch.weights
    counted = micro_batch.counted.float()
    counted = micro_batch.at_positions(counted if weights is None else counted * weights)
    losses = losses if weights is None else losses * counted
    count = None if weights is None else counted.sum()
    summed = add_router_loss(losses.sum(), model, found, micro_batch, count)
    of = sources_of_targets(micro_batch)
    parts = by_source(losses, micro_batch, weights=counted, of=of)
    return torch.cat([add_further_losses(summed, found).view(-1), parts])


def sources_of_targets(micro_batch: MicroBatch) -> torch.Tensor:
    """The number of the source of each target, from those of the rows in `sources`: those at the
    positions, or of each token."""
    assert micro_batch.sources is not None
    assert micro_batch.targets is not None
    return micro_batch.at_positions(micro_batch.sources[:, None].expand(micro_batch.targets.shape))


def by_source(
    losses: torch.Tensor,
    micro_batch: MicroBatch,
    *,
    weights: torch.Tensor | None = None,
    of: torch.Tensor | None = None,
) -> torch.Tensor:
    """For each source of a mixture the sum of its losses, and then for each source the sum of their
    weights: (2 x source_count,), float32, without gradients. Empty if the micro-batch has no
    `sources`.

    losses: (losses,), times their weights. of: the number of the source of each loss; None: the
    micro-batch has it in `sources`. weights: None: each loss counts 1.
    """
    if micro_batch.sources is None:
        return losses.new_zeros(0)
    of = micro_batch.sources if of is None else of
    parts = losses.new_zeros(2, micro_batch.source_count)
    parts[0].index_add_(0, of, losses.detach())
    parts[1].index_add_(0, of, torch.ones_like(losses) if weights is None else weights)
    return parts.flatten().detach()


def target_losses(
    model: nn.Module, micro_batch: MicroBatch, target_loss: TargetLoss | None = None
) -> Predicted:
    """The cross-entropy of each target at the positions, or of each token (0 where IGNORED):
    (positions,), float32. target_loss: instead of the cross-entropy; then the positions are all
    targets (`with_positions`)."""
    if target_loss is None:
        return cross_entropies(model, micro_batch)
    if target_loss.needs == "log_probabilities":
        found = cross_entropies(model, micro_batch)
        if not len(found.value):
            return found
        value = target_loss.of_log_probabilities(-found.value)
        return Predicted(value, found.outputs, found.further)
    if computes_loss(model):
        found = of_head(
            model, micro_batch, lambda *arguments: target_loss.of_head(*arguments)[:, None]
        )
        return Predicted(found.value[:, 0], found.outputs, found.further)
    assert micro_batch.targets is not None
    found = predicted_logits(model, micro_batch.inputs, micro_batch.positions)
    targets = micro_batch.at_positions(micro_batch.targets)
    return Predicted(target_loss.of_logits(found.value.float(), targets), found.outputs)


def add_further_losses(summed: torch.Tensor, found: Predicted) -> torch.Tensor:
    """The loss with the gradient of layers of multi-token prediction, followed by their sums
    (`MultiToken.losses`). The value does not include them, to be comparable with other runs."""
    if found.further is None:
        return summed
    more, sums = found.further[0], found.further[1:].detach()
    return torch.cat([(summed + (more - more.detach())).view(1), sums])


def add_router_loss(
    summed: torch.Tensor,
    model: nn.Module,
    found: Predicted,
    micro_batch: MicroBatch,
    count: torch.Tensor | int | None = None,
) -> torch.Tensor:
    """The loss with the gradient of the router's auxiliary loss, if the model returns one. `count`
    is what the caller divides the loss by; None: the number of targets."""
    if not torch.is_grad_enabled():
        return summed
    auxiliary = _router_loss(model, found, micro_batch, count)
    return summed if auxiliary is None else summed + (auxiliary - auxiliary.detach())


def _router_loss(
    model: nn.Module,
    found: Predicted,
    micro_batch: MicroBatch,
    count: torch.Tensor | int | None,
) -> torch.Tensor | None:
    """Load-balancing loss of a mixture of experts, times its coefficient, as a part of the sum that
    the step divides; None if the model returns none.

    With model.router_balance: global_batch it is that of `RouterBalance`. Else it is transformers' loss
    of the micro-batch, times the number of targets: with one micro-batch, the mean over targets is what
    transformers adds to its loss.

    Padding, by the micro-batch's `text_mask` or `attention_mask`, does not count. In transformers' loss
    it counts in models without `num_experts` and `num_experts_per_tok`.
    """
    text = micro_batch.text
    auxiliary: torch.Tensor | None = getattr(found.outputs, "aux_loss", None)
    if auxiliary is None:
        return None
    config = model.config
    coefficient: float | None = None
    for place in (getattr(config, "text_config", None), config, model):
        for name in ROUTER_LOSS:
            coefficient = getattr(place, name, coefficient)
    if coefficient is None:
        raise ValueError(
            f"{type(model).__name__} returns an auxiliary loss and has no router_aux_loss_coef; "
            "train without it: output_router_logits: false in its config"
        )
    if (balance := record_of(model).router_balance) is not None:
        return coefficient * balance.loss(found.outputs.router_logits, text)
    if text is not None and hasattr(model, "num_experts") and hasattr(model, "num_experts_per_tok"):
        from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

        auxiliary = load_balancing_loss_func(
            found.outputs.router_logits, model.num_experts, model.num_experts_per_tok, text
        )
    weight = micro_batch.counted.sum() if count is None else count
    result: torch.Tensor = coefficient * weight * auxiliary
    return result
