"""A user's loss of each target, from the function that `objective.loss` names.

    def focal(log_probabilities, gamma=2.0):
        return -((1 - log_probabilities.exp()) ** gamma) * log_probabilities

and in the recipe `objective: {loss: my_losses:focal, arguments: {gamma: 1.0}}`. The function gets the
log-probabilities of the targets, (targets,) float32, and returns the loss of each, (targets,). The
launcher multiplies the losses by the weights of the data, adds them up over micro-batches and ranks,
and divides by the number of targets in the global batch.

A function with the attribute `needs = "logits"` gets logits (targets, vocabulary), float32, and the
targets (targets,), of a part of the targets at a time; the backward pass computes the logits again.
`label_smoothing` is such a function.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from launcher.errors import RecipeError, first_line, line_of
from launcher.models import head as head_module
from launcher.models.head import Chunking, Transform
from launcher.models.linear_chunks import logits_of
from launcher.recipe.functions import import_function
from launcher.recipe.load import resolve_arguments
from launcher.recipe.schema import Objective
from launcher.recipe.section import LABEL_SMOOTHING

logger = logging.getLogger(__name__)

_TARGETS, _VOCABULARY = 5, 8
"""Sizes of the example on which a function is tried."""


@dataclass(frozen=True)
class TargetLoss:
    """A user's function, with its arguments."""

    name: str
    function: Callable[..., torch.Tensor]
    needs: Literal["log_probabilities", "logits"]

    def of_log_probabilities(self, log_probabilities: torch.Tensor) -> torch.Tensor:
        """The loss of each target, (targets,) float32."""
        return self._checked(self.function(log_probabilities), log_probabilities)

    def of_logits(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The loss of each target, (targets,) float32. logits: (targets, vocabulary), float32."""
        return self._checked(self.function(logits, targets), logits[:, 0])

    def of_head(
        self,
        inputs: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        chunking: Chunking,
    ) -> torch.Tensor:
        """A `HeadFunction`: the loss of each target from the inputs of the head, a part of the
        targets at a time."""
        assert chunking.group is None
        rows = max(1, head_module.CHUNK_ELEMENTS // len(weight))
        with torch.autocast(inputs.device.type, enabled=False):
            losses = [
                checkpoint(
                    self._of_rows,
                    inputs[start : start + rows],
                    weight,
                    bias,
                    targets[start : start + rows],
                    chunking.transform,
                    use_reentrant=False,
                )
                for start in range(0, max(1, len(inputs)), rows)
            ]
        return torch.cat(losses)

    def _of_rows(
        self,
        inputs: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        transform: Transform,
    ) -> torch.Tensor:
        logits = logits_of(inputs, weight, bias, slice(0, len(weight)))
        return self.of_logits(transform(logits).float(), targets)

    def _checked(self, losses: Any, like: torch.Tensor) -> torch.Tensor:
        if not isinstance(losses, torch.Tensor):
            got = type(losses).__name__
        elif losses.shape != like.shape or not losses.is_floating_point():
            got = f"{tuple(losses.shape)} of {str(losses.dtype).removeprefix('torch.')}"
        else:
            return losses.float()
        what = f"must return the loss of each target, {tuple(like.shape)} of float32"
        raise RecipeError(f"objective.loss: {self.name} {what}; got {got}")


def label_smoothing(logits: torch.Tensor, targets: torch.Tensor, amount: float) -> torch.Tensor:
    """The cross-entropy with 1 - `amount` + amount / vocabulary of the probability at the target, and
    amount / vocabulary at each other token (Szegedy et al., 2016): (targets,) float32."""
    return nn.functional.cross_entropy(logits, targets, reduction="none", label_smoothing=amount)


label_smoothing.needs = "logits"  # type: ignore[attr-defined]
_BUILT_IN: dict[str, Callable[..., torch.Tensor]] = {LABEL_SMOOTHING: label_smoothing}


def load_target_loss(settings: Objective) -> TargetLoss:
    """The function that the recipe names. It is tried on a few targets. Raises RecipeError."""
    name, key = settings.loss, "objective.loss"
    function = import_function(name, key=key) if settings.own else _BUILT_IN[name]
    needs: Any = getattr(function, "needs", "log_probabilities")
    if needs not in ("log_probabilities", "logits"):
        what = "must be 'logits' or 'log_probabilities'"
        raise RecipeError(f"{key}: {name}: its attribute needs {what}; got {needs!r}")
    arguments = resolve_arguments(settings.arguments or {}, ("objective", "arguments"))
    takes = ("logits", "targets") if needs == "logits" else ("log_probabilities",)
    signature = inspect.signature(function)
    try:
        signature.bind(*takes, **arguments)
    except TypeError as error:
        what = f"cannot be called with {', '.join(takes)} and objective.arguments: {error}"
        raise RecipeError(f"{key}: {name}{signature} {what}") from None
    loss = TargetLoss(name, partial(function, **arguments), needs)
    _try(loss)
    return loss


def _try(loss: TargetLoss) -> None:
    """Raises RecipeError if the function fails, if its result has no finite gradient, or if the loss
    of a target depends on the other targets."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(_TARGETS, _VOCABULARY, generator=generator).requires_grad_()
    targets = torch.arange(_TARGETS)
    where = f"objective.loss: {loss.name}"
    try:
        if loss.needs == "logits":
            losses = loss.of_logits(logits, targets)
        else:
            log_probabilities = logits.log_softmax(1).gather(1, targets[:, None])[:, 0]
            losses = loss.of_log_probabilities(log_probabilities)
    except RecipeError:
        raise
    except Exception as error:
        what = f"{type(error).__name__}: {first_line(error)} ({line_of(error)})"
        raise RecipeError(f"{where} fails on {_TARGETS} targets: {what}") from None
    if not losses.requires_grad:
        what = "its result does not depend on its input: nothing would be learned"
        raise RecipeError(f"{where}: {what} (no item(), no numpy, no detach())")
    (gradient,) = torch.autograd.grad(losses.sum(), logits)
    if not (losses.isfinite().all() and gradient.isfinite().all()):
        raise RecipeError(f"{where}: its losses or gradients of {_TARGETS} targets are not finite")
    _compare_parts(loss, logits.detach(), targets)


def _compare_parts(loss: TargetLoss, logits: torch.Tensor, targets: torch.Tensor) -> None:
    """Computes the losses of the targets by parts, as micro-batches do. Raises RecipeError if each is
    divided by the number of targets, and logs a note if they differ otherwise. Losses that are random
    are not compared."""

    def losses_of(start: int, end: int | None = None) -> torch.Tensor:
        if loss.needs == "logits":
            return loss.of_logits(logits[start:end], targets[start:end])
        log_probabilities = logits.log_softmax(1).gather(1, targets[:, None])[:, 0]
        return loss.of_log_probabilities(log_probabilities[start:end])

    half = _TARGETS // 2
    with torch.random.fork_rng(devices=[]):
        whole, again = losses_of(0), losses_of(0)
        parts = losses_of(0, half), losses_of(half)
    joined = torch.cat(parts)
    if not torch.equal(whole, again) or torch.allclose(joined, whole, rtol=1e-4, atol=1e-6):
        return
    where = f"objective.loss: {loss.name}"
    if torch.allclose(torch.cat([part * len(part) for part in parts]), whole * _TARGETS, rtol=1e-4):
        raise RecipeError(
            f"{where}: it divides each loss by the number of targets it gets, and must not: the "
            "launcher adds the losses up, and divides the sum by the targets of the whole global "
            "batch"
        )
    logger.info(
        f"note: {where}: the loss of a target depends on the other targets that the function gets, "
        "which are those of a micro-batch or a part of it: results depend on the batch's division"
    )
