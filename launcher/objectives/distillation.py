"""Training on a teacher's predictions: the loss, and the predictions, without full logits."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from launcher.data.batching import NO_SAMPLE
from launcher.data.collation import Collated, RowInputs, Sample, with_positions
from launcher.data.dataset import SequenceDataset
from launcher.errors import RecipeError
from launcher.models.head import Chunking
from launcher.models.linear_chunks import chunks_of, linear_gradients, logits_of
from launcher.models.micro_batch import MicroBatch
from launcher.models.predictions import of_head
from launcher.objectives.base import BeforeTraining, Example, Objective
from launcher.objectives.kept_files import TeacherFile, config_digest, top_k_dtype, weights_name
from launcher.objectives.loss import (
    add_router_loss,
    by_source,
    sources_of_targets,
)
from launcher.objectives.next_token import NextToken
from launcher.objectives.teacher import check_student, with_teacher
from launcher.recipe import schema

if TYPE_CHECKING:
    from launcher.data.run_data import RunData
    from launcher.recipe.schema import Recipe


@dataclass(frozen=True)
class Distillation(Objective):
    """The next token, and what a teacher predicts at each target (the section distillation)."""

    settings: schema.Distillation
    teacher: npt.NDArray[Any] | None = None
    """Rows of `top_k_dtype`: of each target of each sequence, in order. None: not known yet."""
    first: npt.NDArray[np.int64] | None = None
    """The first row of each sequence, and the end."""
    metrics: ClassVar[tuple[str, ...]] = ("cross_entropy", "kl")
    """Means over the tokens with loss."""

    @classmethod
    def from_recipe(cls, recipe: Recipe, *, trained: bool) -> Objective:
        """Training on the predictions of the recipe's teacher."""
        assert recipe.distillation is not None
        return cls(settings=recipe.distillation) if trained else NextToken()

    def for_validation(self) -> NextToken:
        """Evaluations compute the cross-entropy."""
        return NextToken()

    def check_model(self, model: nn.Module) -> None:
        """Raises RecipeError if the model cannot learn from a teacher."""
        check_student(model, self.settings)

    def sample(self, dataset: SequenceDataset, index: int) -> Sample:
        """See `next_tokens`; and `teacher`, the rows of the targets, if they are known."""
        sample = dataset.next_tokens(index)
        if self.teacher is None:
            return sample
        assert self.first is not None
        begin, end = (0, 0) if index == NO_SAMPLE else self.first[index : index + 2].tolist()
        return sample | {"teacher": np.array(self.teacher[begin:end])}

    def collate(self, rows: list[Sample], inputs: RowInputs) -> Collated:
        """See `collate_distilled`; without it where the teacher's predictions are not known."""
        made = inputs.collate(rows)
        if any("teacher" not in row for row in rows):
            return made
        return collate_distilled(made, [row["teacher"] for row in rows])

    def loss(self, model: nn.Module, micro_batch: MicroBatch) -> torch.Tensor:
        """The sum of the losses of a micro-batch's targets, and the sums of `metrics` without
        gradients: a float32 vector. Each is times the target's weight, if the data has weights. See
        `token_losses`."""
        settings = self.settings
        ids, teacher = (micro_batch.extra[name] for name in ("ids", "log_probabilities"))
        function = partial(_head_statistics, ids=ids, temperature=settings.temperature)
        found = of_head(model, micro_batch, function)
        losses, count = token_losses(found.value, teacher, settings.temperature), None
        if (weights := micro_batch.weights) is not None:
            weights = micro_batch.at_positions(weights)
            losses, count = losses * weights[:, None], weights.sum()
        cross_entropy, divergence = sums = losses.sum(0)
        share, scale = settings.weight, settings.temperature**2
        loss = (1 - share) * cross_entropy + share * scale * divergence
        loss = add_router_loss(loss, model, found, micro_batch, count)
        parts = [loss.view(1), sums.detach()]
        if micro_batch.sources is not None:
            both = (1 - share) * losses[:, 0] + share * scale * losses[:, 1]
            of = sources_of_targets(micro_batch)
            parts.append(by_source(both, micro_batch, weights=weights, of=of))
        return torch.cat(parts)

    def kept_file(self, run: Path, recipe: Recipe) -> TeacherFile:
        """The file with the teacher's predictions."""
        teacher = schema.Model(path=self.settings.teacher)
        try:
            name = weights_name(teacher, recipe.strategy, recipe.run.seed)
            config = config_digest(teacher)
        except RecipeError as error:
            what = str(error).removeprefix("model.path: ")
            raise RecipeError(f"distillation.teacher: {what}") from None
        return TeacherFile(run / "teacher_top_k.npy", name, config)

    def before_model(self, data: RunData, about: BeforeTraining) -> RunData:
        """The data with the predictions of the teacher."""
        assert isinstance(about.file, TeacherFile)
        return with_teacher(
            data,
            self.settings,
            about.file,
            about.load_teacher,
            partial(teacher_top_k, settings=self.settings, vocabulary=about.vocabulary),
            micro_batch_size=about.micro_batch_size,
            vocabulary=about.vocabulary,
            ranks=about.ranks,
        )

    def example_rows(self, about: Example) -> list[Sample]:
        """As of the next token, with the same predictions everywhere."""
        teacher = np.zeros(about.inputs.length, dtype=top_k_dtype(self.settings.top_k))
        teacher["id"] = np.arange(self.settings.top_k) % about.vocabulary
        return [row | {"teacher": teacher} for row in super().example_rows(about)]


def collate_distilled(made: Collated, teacher: list[npt.NDArray[Any]]) -> Collated:
    """Adds a teacher's predictions of the rows to a micro-batch: `ids` (positions, top_k) and
    `log_probabilities`, float32, of the positions, here all targets."""
    made = with_positions(made)
    rows = np.concatenate(teacher)
    values = np.ascontiguousarray(rows["log_probability"])
    extra = {
        "ids": torch.from_numpy(rows["id"].astype(np.int64)),
        "log_probabilities": torch.from_numpy(values),
    }
    return replace(made, micro_batch=replace(made.micro_batch, extra=extra))


def teacher_top_k(
    model: nn.Module,
    micro_batch: MicroBatch,
    *,
    settings: schema.Distillation,
    vocabulary: int,
) -> torch.Tensor:
    """The `top_k` most probable tokens at each target position, the most probable first: their
    log-probabilities at the temperature, and then their ids, (positions, 2 * top_k), float32.

    They are among the first `vocabulary` entries, those that the trained model knows.
    """
    k, temperature = settings.top_k, settings.temperature
    function = partial(_top_k, k=k, temperature=temperature, vocabulary=vocabulary)
    return of_head(model, micro_batch, function).value


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
