"""The loss of distillation, and a teacher's predictions, without full logits."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from launcher.models.chunked_loss import Chunking, HeadFunction
from launcher.models.linear_chunks import chunks_of, linear_gradients, logits_of
from launcher.models.loss import MicroBatch, add_router_loss, model_inputs
from launcher.recipe.schema import Distillation

METRICS = ("cross_entropy", "kl")
"""Means over the tokens with loss."""


def teacher_top_k(
    model: nn.Module, micro_batch: MicroBatch, settings: Distillation, vocabulary: int
) -> torch.Tensor:
    """The `top_k` most probable tokens at each target position, the most probable first: their
    log-probabilities at the temperature, and then their ids, (positions, 2 * top_k), float32.

    They are among the first `vocabulary` entries, those that the trained model knows.
    """
    k, temperature = settings.top_k, settings.temperature
    function = partial(_top_k, k=k, temperature=temperature, vocabulary=vocabulary)
    found: torch.Tensor = _call(model, micro_batch, function).loss
    return found


def summed_distillation_loss(
    model: nn.Module, micro_batch: MicroBatch, settings: Distillation
) -> torch.Tensor:
    """The sum of the losses of a micro-batch's targets, and the sums of METRICS without gradients:
    a float32 vector. Each is times the target's weight, if the data has weights.

    A micro-batch is that of `DistilledDataset.collate`. See `token_losses`.
    """
    ids, teacher = micro_batch["teacher_ids"], micro_batch["teacher_log_probabilities"]
    function = partial(_head_statistics, ids=ids, temperature=settings.temperature)
    outputs = _call(model, micro_batch, function)
    losses, count = token_losses(outputs.loss, teacher, settings.temperature), None
    if (weights := micro_batch.get("weights")) is not None:
        weights = weights.flatten()[micro_batch["target_positions"]]
        losses, count = losses * weights[:, None], weights.sum()
    cross_entropy, divergence = sums = losses.sum(0)
    share = settings.weight
    loss = (1 - share) * cross_entropy + share * settings.temperature**2 * divergence
    loss = add_router_loss(loss, model, outputs, micro_batch, count)
    return torch.cat([loss.view(1), sums.detach()])


def token_losses(
    statistics: torch.Tensor, teacher: torch.Tensor, temperature: float
) -> torch.Tensor:
    """Cross-entropy and KL divergence of each token: (tokens, 2).

    With p of the teacher and q of the model, both softmax(logits / temperature) over the whole
    vocabulary, and top of the k tokens with the largest p, the divergence is

        sum over top of p log(p / q) + P log(P / Q),  P = 1 - sum over top of p,  Q likewise of q

    so all other tokens count as one. It is 0 if the model agrees with the teacher on the top tokens,
    and with k = vocabulary it is KL(p, q). Without the last term, or with p scaled to the sum 1, its
    minimum would be at larger q than p: top-k without the rest is biased (Anshumann et al., 2025).
    With `temperature`^2 its gradients keep their size (Hinton et al., 2015).

    statistics: of `_HeadStatistics`. teacher: log p of the top tokens, (tokens, k).
    """
    log_sum, rest, at_target = (statistics[:, [column]] for column in range(3))
    top = statistics[:, 3:] / temperature
    normalizer = torch.logaddexp(rest, top.logsumexp(1, keepdim=True))
    p = teacher.exp()
    left = (1 - p.sum(1, keepdim=True)).clamp(min=0).masked_fill(rest.isneginf(), 0)
    divergence = (p * (teacher - top + normalizer)).sum(1, keepdim=True)
    of_rest = torch.where(left > 0, left * (rest - normalizer), 0)
    divergence = divergence + torch.xlogy(left, left) - of_rest
    return torch.cat([log_sum - at_target, divergence], 1)


def _call(model: nn.Module, micro_batch: MicroBatch, function: HeadFunction) -> Any:
    """The model's outputs with `loss`, what the function returns of the target positions."""
    targets = {name: micro_batch[name] for name in ("targets", "target_positions")}
    inputs = model_inputs(micro_batch) | targets
    # The teacher's values are arguments of the function: FSDP would cast those of the model
    return model(**inputs, head_function=function, use_cache=False)


def _top_k(
    inputs: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    chunking: Chunking,
    *,
    k: int,
    temperature: float,
    vocabulary: int,
) -> torch.Tensor:
    sums, weight = [], weight[:vocabulary]
    best = torch.zeros(len(inputs), 0, device=inputs.device)
    ids = torch.zeros(len(inputs), 0, dtype=torch.long, device=inputs.device)
    with torch.autocast(inputs.device.type, enabled=False):
        for chunk in chunks_of(weight, chunking.width):
            values = chunking.transform(logits_of(inputs, weight, bias, chunk)).float()
            values = values / temperature
            sums.append(values.logsumexp(1, keepdim=True))
            largest, columns = values.topk(min(k, values.shape[1]), 1)
            best, ids = torch.cat([best, largest], 1), torch.cat([ids, columns + chunk.start], 1)
            best, order = best.topk(min(k, best.shape[1]), 1)
            ids = ids.gather(1, order)
    # Ids below 2^24 are exact in float32
    return torch.cat([best - torch.cat(sums, 1).logsumexp(1, keepdim=True), ids.float()], 1)


def _head_statistics(
    *arguments: Any, ids: torch.Tensor, temperature: float
) -> torch.Tensor:  # a HeadFunction
    function: Any = _HeadStatistics
    statistics: torch.Tensor = function.apply(*arguments, ids, temperature)
    return statistics


class _HeadStatistics(torch.autograd.Function):
    """Of the logits of each token: log(sum(exp(logits))), log(sum(exp(logits / temperature))) over
    the tokens that are not in `ids`, the logit of the target, and those of `ids` (tokens, k)."""

    @staticmethod
    def forward(
        ctx: Any,
        inputs: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        chunking: Chunking,
        ids: torch.Tensor,
        temperature: float,
    ) -> torch.Tensor:
        assert chunking.group is None
        columns = torch.cat([targets.clamp(min=0)[:, None], ids], 1)
        picked, sums, rests = torch.zeros(columns.shape, device=ids.device), [], []
        with torch.autocast(ids.device.type, enabled=False):
            for chunk in chunks_of(weight, chunking.width):
                values = chunking.transform(logits_of(inputs, weight, bias, chunk)).float()
                column, inside = _in_chunk(columns, chunk)
                picked = torch.where(inside, values.gather(1, column), picked)
                sums.append(values.logsumexp(1, keepdim=True))
                rest = _without(values, ids, chunk).div_(temperature)
                rests.append(rest.logsumexp(1, keepdim=True))
        log_sum = torch.cat(sums, 1).logsumexp(1, keepdim=True)
        rest = torch.cat(rests, 1).logsumexp(1, keepdim=True)
        ctx.chunking, ctx.temperature = chunking, temperature
        ctx.save_for_backward(inputs, weight, bias, columns, log_sum, rest)
        return torch.cat([log_sum, rest, picked], 1)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        inputs, weight, bias, columns, log_sum, rest = ctx.saved_tensors
        transform, temperature = ctx.chunking.transform, ctx.temperature
        of_sum, of_rest, of_picked = gradient[:, :1], gradient[:, 1:2], gradient[:, 2:]
        rest = rest.masked_fill(rest.isneginf(), 0)  # `ids` are the whole vocabulary

        def of_chunk(chunk: slice) -> torch.Tensor:
            logits = logits_of(inputs, weight, bias, chunk)
            values = transform(logits).float()
            d_logits = _without(values, columns[:, 1:], chunk).div_(temperature).sub_(rest).exp_()
            d_logits.mul_(of_rest / temperature).addcmul_((values - log_sum).exp_(), of_sum)
            column, inside = _in_chunk(columns, chunk)
            d_logits.scatter_add_(1, column, of_picked * inside)
            gradient: torch.Tensor = transform.backward(d_logits, values).to(inputs.dtype)
            return gradient

        d_inputs, *others = linear_gradients(ctx, inputs, weight, bias, of_chunk)
        d_inputs = None if d_inputs is None else d_inputs.to(inputs.dtype)
        return d_inputs, *others, None, None, None, None


def _in_chunk(columns: torch.Tensor, chunk: slice) -> tuple[torch.Tensor, torch.Tensor]:
    """The columns in the chunk, and whether they are inside."""
    inside = (columns >= chunk.start) & (columns < chunk.stop)
    return (columns - chunk.start).clamp(0, chunk.stop - chunk.start - 1), inside


def _without(values: torch.Tensor, ids: torch.Tensor, chunk: slice) -> torch.Tensor:
    """A copy of the values, -inf at `ids`."""
    column, inside = _in_chunk(ids, chunk)
    mask = torch.zeros(values.shape, dtype=torch.int8, device=values.device)
    mask.scatter_add_(1, column, inside.to(torch.int8))  # an id is in a row once
    return values.masked_fill(mask != 0, -torch.inf)
