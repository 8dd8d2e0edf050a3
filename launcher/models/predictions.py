"""What a model predicts of a micro-batch: losses, logits, or a function of its head."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import nn

from launcher.errors import RecipeError
from launcher.models.head import Head, HeadFunction, Question
from launcher.models.micro_batch import IGNORED, MicroBatch
from launcher.models.record import record_of


@dataclass(frozen=True)
class Predicted:
    """What was asked for, and what else the forward pass returned."""

    value: torch.Tensor
    outputs: Any
    further: torch.Tensor | None = None
    """`MultiToken.losses`, from the same forward pass; None: the model computes none."""


def cross_entropies(
    model: nn.Module, micro_batch: MicroBatch, reduction: Literal["sum", "none"] = "none"
) -> Predicted:
    """The cross-entropies of the targets at the positions, 0 where IGNORED: (positions,), or their
    sum, float32."""
    if (head := record_of(model).head) is not None:
        question = partial(Head.losses, micro_batch=micro_batch, reduction=reduction)
        found = _asked(head, model, micro_batch, question)
        value = found.value.sum() if reduction == "sum" else found.value[:, 0]
        return Predicted(value, found.outputs, found.further)
    targets, outputs = micro_batch.targets, _with_logits(model, micro_batch.inputs)
    assert targets is not None
    logits = logits_of(outputs)
    losses = nn.functional.cross_entropy(
        logits.float().flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction=reduction
    )
    return Predicted(losses if reduction == "sum" else micro_batch.at_positions(losses), outputs)


def of_head(
    model: nn.Module, micro_batch: MicroBatch, function: HeadFunction, *, columns: int = 1
) -> Predicted:
    """What a function of the head returns of the positions: (positions, columns). The model must have a
    `Head`."""
    head = record_of(model).head
    assert head is not None
    question = partial(Head.function, micro_batch=micro_batch, function=function, columns=columns)
    return _asked(head, model, micro_batch, question)


def _asked(head: Head, model: nn.Module, micro_batch: MicroBatch, question: Question) -> Predicted:
    """What the head and the layers of multi-token prediction answer."""
    if (multi_token := record_of(model).multi_token) is not None:
        return Predicted(*multi_token.ask(head, model, micro_batch, question))
    return Predicted(*head.ask(model, micro_batch.inputs, question))


def logits(
    model: nn.Module, inputs: Mapping[str, Any], at: torch.Tensor | None = None
) -> torch.Tensor:
    """(rows, tokens, vocabulary), or those at these places of the flattened rows. With pipeline
    parallelism all stages have them without gradients, the last one with them."""
    return predicted_logits(model, inputs, at).value


def predicted_logits(
    model: nn.Module, inputs: Mapping[str, Any], at: torch.Tensor | None = None
) -> Predicted:
    """`logits`, and what else the forward pass returned."""
    found, stages = _logits(model, inputs, at), record_of(model).stages
    if stages is None or torch.is_grad_enabled():
        return found
    return Predicted(stages.of_last(found.value), found.outputs)


def _logits(model: nn.Module, inputs: Mapping[str, Any], at: torch.Tensor | None) -> Predicted:
    if (head := record_of(model).head) is not None:
        asked, outputs = head.ask(model, inputs, partial(Head.logits, at=at))
        rows = inputs["input_ids"].shape
        return Predicted(asked.view(*rows, -1) if at is None else asked, outputs)
    if at is None:
        outputs = _with_logits(model, inputs)
        return Predicted(logits_of(outputs), outputs)
    width = inputs["input_ids"].shape[1]
    rows, columns = at // width, at % width
    if "logits_to_keep" in inspect.signature(type(model).forward).parameters:
        outputs = _with_logits(model, {**inputs, "logits_to_keep": columns})
        columns = torch.arange(len(at), device=at.device)
    else:
        outputs = _with_logits(model, inputs)
    return Predicted(logits_of(outputs)[rows, columns], outputs)


def logits_of(outputs: Any) -> torch.Tensor:
    """The logits; of a model without a head its last hidden states."""
    logits: torch.Tensor = outputs
    if not isinstance(outputs, torch.Tensor):
        found = getattr(outputs, "logits", None)
        logits = outputs.last_hidden_state if found is None else found
    return logits


def _with_logits(model: nn.Module, inputs: Mapping[str, Any]) -> Any:
    """The outputs of a model, with `logits`, or logits. A module of model.builder that is no model
    of transformers gets `input_ids`."""
    from transformers import PreTrainedModel

    if isinstance(model, PreTrainedModel):
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
    return outputs
