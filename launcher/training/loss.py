"""Training losses: sums over targets, which the caller divides by the global batch's targets."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

IGNORED = -100
"""A target without loss."""

Loss = Callable[[nn.Module, Mapping[str, Any]], torch.Tensor]
"""loss(model, micro-batch): the sum over the micro-batch's targets, a float32 scalar."""


def summed_loss(model: nn.Module, micro_batch: Mapping[str, Any]) -> torch.Tensor:
    """Sum of the next-token cross-entropies of a micro-batch, a float32 scalar.

    If the model's config asks for the router's auxiliary loss (output_router_logits), the gradient
    includes it. The value does not, and stays comparable between models and with an evaluation.

    micro_batch: `input_ids` and `targets` (batch, tokens). Targets are shifted: targets[b, t]
    follows input_ids[b, t], and is IGNORED where there is no loss. `position_ids` (batch, tokens)
    for packed documents, and further arguments of the model's forward.
    """
    targets = micro_batch["targets"]
    inputs = {name: value for name, value in micro_batch.items() if name != "targets"}
    outputs = model(**inputs, use_cache=False)
    summed = nn.functional.cross_entropy(
        outputs.logits.float().flatten(0, 1),
        targets.flatten(),
        ignore_index=IGNORED,
        reduction="sum",
    )
    if torch.is_grad_enabled() and getattr(outputs, "aux_loss", None) is not None:
        summed = _with_gradient_of(summed, _router_loss(model, outputs, targets))
    return summed


def _with_gradient_of(loss: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """The value of `loss` with the gradient of loss + other."""
    return loss + (other - other.detach())


def _router_loss(model: nn.Module, outputs: Any, targets: torch.Tensor) -> torch.Tensor:
    """The auxiliary (load balancing) loss of a mixture of experts, times its coefficient and the
    micro-batch's targets.

    The caller sums it over micro-batches m and ranks and divides by all targets T of the global
    batch. The result is coefficient * sum_m(targets_m / T * auxiliary_m); with one micro-batch this
    is what transformers' forward adds to its loss. Padding does not count, as in transformers with
    an attention mask: it is everything more than one token after the last target of its row. Models
    without `num_experts` and `num_experts_per_tok` keep transformers' value, which includes
    padding.
    """
    model = getattr(model, "module", model)  # unwrap DistributedDataParallel
    config: Any = model.config
    places = (model, config, getattr(config, "text_config", None))
    names = ("router_aux_loss_coef", "aux_loss_coef")
    coefficient = next(
        (getattr(place, name) for place in places for name in names if hasattr(place, name)), None
    )
    if coefficient is None:
        raise ValueError(
            f"{type(model).__name__} returns an auxiliary loss and has no router_aux_loss_coef to "
            "weight it with; set output_router_logits to false in its config to train without it"
        )
    auxiliary = outputs.aux_loss
    trained = targets != IGNORED
    if hasattr(model, "num_experts") and hasattr(model, "num_experts_per_tok"):
        from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

        before_last = trained.flip(1).cumsum(1).flip(1) > 0
        text = torch.cat([before_last[:, :1], before_last[:, :-1]], dim=1)
        text |= ~text.any()  # without any target the weight is 0: keep the mean over tokens finite
        auxiliary = load_balancing_loss_func(
            outputs.router_logits, model.num_experts, model.num_experts_per_tok, text
        )
    result: torch.Tensor = coefficient * trained.sum() * auxiliary
    return result


def summed_classification_loss(model: nn.Module, micro_batch: Mapping[str, Any]) -> torch.Tensor:
    """Sum of the cross-entropies of a micro-batch's classes, a float32 scalar.

    micro_batch: `input_ids` and `attention_mask` (batch, tokens), `targets` (batch,), or IGNORED.
    """
    inputs = {name: value for name, value in micro_batch.items() if name != "targets"}
    logits = model(**inputs).logits
    return nn.functional.cross_entropy(
        logits.float(), micro_batch["targets"], ignore_index=IGNORED, reduction="sum"
    )
