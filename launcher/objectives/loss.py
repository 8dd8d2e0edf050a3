"""Training losses: sums over targets, which the caller divides by the global batch's targets."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from launcher.errors import RecipeError
from launcher.models.chunked_loss import computes_loss
from launcher.models.micro_batch import IGNORED

if TYPE_CHECKING:
    from transformers.utils import ModelOutput

    from launcher.objectives.target_loss import TargetLoss

_NOT_INPUTS = (
    "targets",
    "target_positions",
    "weights",
    "text_mask",
    "sources",
    "source_count",
    "answers",
    "answer_tokens",
    "reference",
    "teacher_ids",
    "teacher_log_probabilities",
)

MicroBatch = Mapping[str, Any]
"""Tensors, and whatever else a model takes, by name."""
Loss = Callable[[nn.Module, MicroBatch], torch.Tensor]
"""loss(model, micro-batch): the sum over the micro-batch's targets, a float32 scalar; or a vector
of this and the sums of further metrics, without gradients."""


def summed_loss(
    model: nn.Module, micro_batch: MicroBatch, target_loss: TargetLoss | None = None
) -> torch.Tensor:
    """Sum of the next-token cross-entropies of a micro-batch, each times its weight; a float32
    scalar. A `target_loss` takes the place of the cross-entropy.

    If the model config sets the router's auxiliary loss (output_router_logits), the gradient
    includes it; the value does not, to be comparable with an evaluation.

    A micro-batch has `input_ids` and `targets` (batch, tokens), where targets[b, t] follows
    input_ids[b, t], and is IGNORED where there is no loss; `target_positions` and `weights` (see
    `collate_sequences`), and further arguments of the model's forward.
    """
    targets, weights = micro_batch["targets"], micro_batch.get("weights")
    if weights is None and target_loss is None:
        summed, outputs = _cross_entropies(model, micro_batch, "sum")
        return add_router_loss(summed, model, outputs, micro_batch)
    losses, outputs = target_losses(model, micro_batch, target_loss)
    if weights is None:
        return add_router_loss(losses.sum(), model, outputs, micro_batch)
    weights = (weights * (targets != IGNORED)).flatten()
    positions = micro_batch.get("target_positions")
    weights = weights if positions is None else weights[positions]
    return add_router_loss((losses * weights).sum(), model, outputs, micro_batch, weights.sum())


def summed_loss_by_source(
    model: nn.Module, micro_batch: MicroBatch, target_loss: TargetLoss | None = None
) -> torch.Tensor:
    """`summed_loss`, followed by `by_source` of the losses, for a micro-batch of a mixture."""
    losses, outputs = target_losses(model, micro_batch, target_loss)
    targets, weights = micro_batch["targets"], micro_batch.get("weights")
    counted = (targets != IGNORED).float()
    counted = (counted if weights is None else counted * weights).flatten()
    if (positions := micro_batch.get("target_positions")) is not None:
        counted = counted[positions]
    losses = losses if weights is None else losses * counted
    count = None if weights is None else counted.sum()
    summed = add_router_loss(losses.sum(), model, outputs, micro_batch, count)
    of = sources_of_targets(micro_batch)
    return torch.cat([summed.view(1), by_source(losses, micro_batch, weights=counted, of=of)])


def sources_of_targets(micro_batch: MicroBatch) -> torch.Tensor:
    """The number of the source of each target, from those of the rows in `sources`: those at
    `target_positions`, or of each token."""
    of: torch.Tensor = micro_batch["sources"][:, None].expand(micro_batch["targets"].shape)
    positions = micro_batch.get("target_positions")
    return of.flatten() if positions is None else of.flatten()[positions]


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
    if "sources" not in micro_batch:
        return losses.new_zeros(0)
    of = micro_batch["sources"] if of is None else of
    parts = losses.new_zeros(2, micro_batch["source_count"])
    parts[0].index_add_(0, of, losses.detach())
    parts[1].index_add_(0, of, torch.ones_like(losses) if weights is None else weights)
    return parts.flatten().detach()


def target_losses(
    model: nn.Module, micro_batch: MicroBatch, target_loss: TargetLoss | None = None
) -> tuple[torch.Tensor, ModelOutput]:
    """The cross-entropy of each target at `target_positions`, or of each token (0 where IGNORED):
    (positions,), float32; and the model's outputs. target_loss: instead of the cross-entropy; then
    `target_positions` are all targets (`with_positions`)."""
    if target_loss is not None:
        return _losses_of(target_loss, model, micro_batch)
    losses, outputs = _cross_entropies(model, micro_batch, "none")
    positions = micro_batch.get("target_positions")
    return (losses if positions is None or computes_loss(model) else losses[positions]), outputs


def _losses_of(
    target_loss: TargetLoss, model: nn.Module, micro_batch: MicroBatch
) -> tuple[torch.Tensor, ModelOutput]:
    if target_loss.needs == "log_probabilities":
        losses, outputs = target_losses(model, micro_batch)
        return (target_loss.of_log_probabilities(-losses) if len(losses) else losses), outputs
    inputs, positions = model_inputs(micro_batch), micro_batch["target_positions"]
    targets = micro_batch["targets"]
    if computes_loss(model):
        inputs |= {"targets": targets, "target_positions": positions}
        function = target_loss.of_head
        outputs = model(**inputs, head_function=function, reduction="none", use_cache=False)
        return outputs.loss, outputs
    outputs = _with_logits(model, inputs)
    logits = outputs.logits.flatten(0, 1)[positions].float()
    return target_loss.of_logits(logits, targets.flatten()[positions]), outputs


def model_inputs(micro_batch: MicroBatch) -> dict[str, Any]:
    """The arguments of the model's forward in a micro-batch."""
    return {name: value for name, value in micro_batch.items() if name not in _NOT_INPUTS}


def _with_logits(model: nn.Module, inputs: Mapping[str, Any]) -> Any:
    """The outputs of a model, with `logits`. A module of model.builder that is no model of
    transformers gets `input_ids` and returns logits."""
    from transformers import PreTrainedModel

    if isinstance(getattr(model, "module", model), PreTrainedModel):
        return model(**inputs, use_cache=False)
    ids = inputs["input_ids"]
    outputs = model(ids)
    logits = outputs if isinstance(outputs, torch.Tensor) else getattr(outputs, "logits", None)
    if not isinstance(logits, torch.Tensor) or logits.shape[:-1] != ids.shape:
        got = type(outputs).__name__
        if isinstance(logits, torch.Tensor):
            got = (
                f"logits of the shape {tuple(logits.shape)} for ids of the shape {tuple(ids.shape)}"
            )
        what = "forward(input_ids) must return logits (rows, tokens, vocabulary), or an object with them"
        raise RecipeError(f"model.builder: {what}; got {got}")
    return SimpleNamespace(logits=logits) if logits is outputs else outputs


def _cross_entropies(
    model: nn.Module, micro_batch: MicroBatch, reduction: Literal["sum", "none"]
) -> tuple[torch.Tensor, ModelOutput]:
    targets = micro_batch["targets"]
    inputs = model_inputs(micro_batch)
    if computes_loss(model):
        inputs |= {"targets": targets, "target_positions": micro_batch.get("target_positions")}
        outputs = model(**inputs, reduction=reduction, use_cache=False)
        return outputs.loss, outputs
    outputs = _with_logits(model, inputs)
    losses = nn.functional.cross_entropy(
        outputs.logits.float().flatten(0, 1),
        targets.flatten(),
        ignore_index=IGNORED,
        reduction=reduction,
    )
    return losses, outputs


def add_router_loss(
    summed: torch.Tensor,
    model: nn.Module,
    outputs: ModelOutput,
    micro_batch: MicroBatch,
    count: torch.Tensor | int | None = None,
) -> torch.Tensor:
    """The loss with the gradient of the router's auxiliary loss, if the model returns one. `count`
    is what the caller divides the loss by; None: the number of targets."""
    if not torch.is_grad_enabled() or getattr(outputs, "aux_loss", None) is None:
        return summed
    router_loss = _router_loss(model, outputs, micro_batch, count)
    return summed + (router_loss - router_loss.detach())


def _router_loss(
    model: nn.Module,
    outputs: ModelOutput,
    micro_batch: MicroBatch,
    count: torch.Tensor | int | None,
) -> torch.Tensor:
    """Load-balancing loss of a mixture of experts, times its coefficient and the number of targets:
    with one micro-batch, the mean over targets is what transformers adds to its loss.

    Padding, by the micro-batch's `text_mask` or `attention_mask`, counts only in models without
    `num_experts` and `num_experts_per_tok`.
    """
    model = getattr(model, "module", model)  # unwrap DistributedDataParallel
    config = model.config
    coefficient = None
    for place in (getattr(config, "text_config", None), config, model):
        for name in ("aux_loss_coef", "router_aux_loss_coef"):
            coefficient = getattr(place, name, coefficient)
    if coefficient is None:
        raise ValueError(
            f"{type(model).__name__} returns an auxiliary loss and has no router_aux_loss_coef; "
            "train without it: output_router_logits: false in its config"
        )
    auxiliary, trained = outputs.aux_loss, micro_batch["targets"] != IGNORED
    text = micro_batch.get("text_mask", micro_batch.get("attention_mask"))
    if text is not None and hasattr(model, "num_experts") and hasattr(model, "num_experts_per_tok"):
        from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

        auxiliary = load_balancing_loss_func(
            outputs.router_logits, model.num_experts, model.num_experts_per_tok, text
        )
    weight = trained.sum() if count is None else count
    result: torch.Tensor = coefficient * weight * auxiliary
    return result
