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
from launcher.objectives.teacher import check_student, with_teachers
from launcher.objectives.teacher_rows import CONTINUES, UNKNOWN, TeacherRows
from launcher.recipe import schema

if TYPE_CHECKING:
    from launcher.data.run_data import RunData
    from launcher.recipe.schema import Recipe


@dataclass(frozen=True)
class Distillation(Objective):
    """The next token, and what a teacher predicts at each target (the section distillation)."""

    settings: schema.Distillation
    teachers: tuple[TeacherRows | None, ...] | None = None
    """The predictions of each teacher; None: of a teacher without a row here. None: they are not known
    yet."""
    chosen: npt.NDArray[np.int16] | None = None
    """The number of the teacher of each document of the store; None: there is one."""
    with_target: bool = False
    """Whether the predictions begin with that of the target, because a teacher has other tokens."""
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
        if self.teachers is None:
            return sample
        store, rows = (
            dataset.store,
            [np.zeros(0, top_k_dtype(self.settings.top_k + self.with_target))],
        )
        for document, start, end in dataset.pieces(index):
            teacher = self.teachers[0 if self.chosen is None else self.chosen[document]]
            assert teacher is not None
            last = min(end + 1, int(store.offsets[document + 1]))
            rows.append(teacher.of_targets(document, start + 1, last))
        return sample | {"teacher": np.concatenate(rows)}

    def collate(self, rows: list[Sample], inputs: RowInputs) -> Collated:
        """See `collate_distilled`; without it where the teachers' predictions are not known."""
        made = inputs.collate(rows)
        if any("teacher" not in row for row in rows):
            return made
        teacher = [row["teacher"] for row in rows]
        return collate_distilled(made, teacher, with_target=self.with_target)

    def loss(self, model: nn.Module, micro_batch: MicroBatch) -> torch.Tensor:
        """The sum of the losses of a micro-batch's targets, and the sums of `metrics` without
        gradients: a float32 vector. Each is times the target's weight, if the data has weights. See
        `token_losses`."""
        settings, extra = self.settings, micro_batch.extra
        function = partial(_head_statistics, ids=extra["ids"], temperature=settings.temperature)
        columns = 3 + extra["ids"].shape[1]
        found, count = of_head(model, micro_batch, function, columns=columns), None
        losses = token_losses(
            found.value,
            extra["log_probabilities"],
            settings.temperature,
            ids=extra["ids"],
            spans=extra.get("spans"),
        )
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

    def kept_file(self, run: Path, recipe: Recipe) -> dict[str, TeacherFile]:
        """The file with the predictions of each teacher."""
        files = {}
        for teacher, path in self.settings.paths().items():
            model = schema.Model(path=path)
            try:
                name = weights_name(model, recipe.strategy, recipe.run.seed)
                config = config_digest(model)
            except RecipeError as error:
                what = str(error).removeprefix("model.path: ")
                raise RecipeError(f"{self.settings.key_of(teacher)}: {what}") from None
            of = f"_{teacher}" if teacher else ""
            files[teacher] = TeacherFile(run / f"teacher{of}_top_k.npy", name, config)
        return files

    def before_model(self, data: RunData, about: BeforeTraining) -> RunData:
        """The data with the predictions of the teachers."""
        assert isinstance(about.file, dict)
        return with_teachers(
            data,
            self.settings,
            about.file,
            about.build_teacher,
            teacher_top_k,
            model=about.model,
            micro_batch_size=about.micro_batch_size,
            tokenizes=about.tokenizes,
            ranks=about.ranks,
        )

    def example_rows(self, about: Example) -> list[Sample]:
        """As of the next token, with the same predictions everywhere."""
        teacher = np.zeros(about.inputs.length, dtype=top_k_dtype(self.settings.top_k))
        teacher["id"] = np.arange(self.settings.top_k) % about.vocabulary
        return [row | {"teacher": teacher} for row in super().example_rows(about)]


def collate_distilled(
    made: Collated, teacher: list[npt.NDArray[Any]], *, with_target: bool = False
) -> Collated:
    """Adds a teacher's predictions of the rows to a micro-batch: `ids` (positions, columns) and
    `log_probabilities`, float32, of the positions, here all targets. with_target: the predictions begin
    with that of the target; also adds `spans`, (positions,): where the span of a target begins, among
    the positions, or -1 without a prediction."""
    made = with_positions(made)
    rows = np.concatenate(teacher)
    values = np.ascontiguousarray(rows["log_probability"])
    extra = {
        "ids": torch.from_numpy(rows["id"].astype(np.int64)),
        "log_probabilities": torch.from_numpy(values),
    }
    if with_target:
        first, places = rows["id"][:, 0], np.arange(len(rows))
        spans = np.maximum.accumulate(np.where(first == CONTINUES, -1, places))
        extra["spans"] = torch.from_numpy(np.where(first == UNKNOWN, -1, spans))
    return replace(made, micro_batch=replace(made.micro_batch, extra=extra))


def teacher_top_k(
    model: nn.Module,
    micro_batch: MicroBatch,
    *,
    settings: schema.Distillation,
    vocabulary: int,
    with_target: bool = False,
) -> torch.Tensor:
    """The `top_k` most probable tokens at each target position, the most probable first: their
    log-probabilities at the temperature, and then their ids, (positions, 2 * top_k), float32.

    They are among the first `vocabulary` entries, those that the trained model knows. with_target: the
    target comes before them, (positions, 2 * (1 + top_k)).
    """
    k, temperature = settings.top_k, settings.temperature
    function = partial(
        _top_k, k=k, temperature=temperature, vocabulary=vocabulary, with_target=with_target
    )
    columns = 2 * (k + with_target)
    return of_head(model, micro_batch, function, columns=columns).value


def token_losses(
    statistics: torch.Tensor,
    teacher: torch.Tensor,
    temperature: float,
    *,
    ids: torch.Tensor,
    spans: torch.Tensor | None = None,
) -> torch.Tensor:
    """Cross-entropy and KL divergence of each token: (tokens, 2).

    With p of the teacher and q of the model, both softmax(logits / temperature) over the whole
    vocabulary, and top of the k tokens with the largest p, the divergence is

        sum over top of p log(p / q) + P log(P / Q),  P = 1 - sum over top of p,  Q likewise of q

    so all other tokens count as one. It is 0 if the model agrees with the teacher on the top tokens,
    and with k = vocabulary it is KL(p, q). Without the last term, or with p scaled to the sum 1, its
    minimum would be at larger q than p: top-k without the rest is biased (Anshumann et al., 2025).
    With `temperature`^2 its gradients keep their size (Hinton et al., 2015).

    Where a teacher has other tokens, the events are: that the text goes on with the span, whose
    probabilities p and q are the products of those of its tokens; with another one of the teacher's top
    tokens that the model knows, too; and the rest. Both models have read the same text, and the events
    exclude each other. The divergence is that of the first token of the span.

    statistics: of `_HeadStatistics`. teacher: log p of the top tokens, (tokens, k). ids: of these
    tokens; -1: there is none. spans: see `collate_distilled`.
    """
    log_sum, rest, at_target = (statistics[:, [column]] for column in range(3))
    top, known = statistics[:, 3:] / temperature, ids >= 0
    if spans is not None:  # finite, so that their gradients are 0
        top = top.masked_fill(~known, torch.finfo(top.dtype).min)
    normalizer = torch.logaddexp(rest, top.logsumexp(1, keepdim=True))
    p, rest = teacher.exp(), rest - normalizer
    log_ratios = teacher - top + normalizer
    if spans is not None:
        begins = known[:, :1]
        p, log_ratios = p * known, log_ratios.masked_fill(~known, 0)
        later = _later_tokens(at_target / temperature - normalizer, spans)
        log_ratios = torch.cat([log_ratios[:, :1] - later * begins, log_ratios[:, 1:]], 1)
        # Where the text begins with the first token of the span, but does not go on with it
        several = (later < 0) & begins
        certain = later.masked_fill(~several, -1).clamp(max=-1e-6)
        others = top[:, :1] - normalizer + (-certain.exp()).log1p()
        rest = torch.where(several, torch.logaddexp(rest, others), rest)
    left = (1 - p.sum(1, keepdim=True)).clamp(min=0).masked_fill(rest.isneginf(), 0)
    if spans is not None:
        left = left * begins
    divergence = (p * log_ratios).sum(1, keepdim=True)
    of_rest = torch.where(left > 0, left * rest, 0)
    divergence = divergence + torch.xlogy(left, left) - of_rest
    return torch.cat([log_sum - at_target, divergence], 1)


def _later_tokens(log_q: torch.Tensor, spans: torch.Tensor) -> torch.Tensor:
    """For the first token of each span the sum over its other tokens, else 0: (tokens, 1)."""
    places = torch.arange(len(spans), device=spans.device)
    follows = ((spans >= 0) & (spans != places))[:, None]
    sums = torch.zeros_like(log_q)
    return sums.index_add(0, spans.clamp(min=0), log_q.masked_fill(~follows, 0))


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
    with_target: bool,
) -> torch.Tensor:
    sums, weight = [], weight[:vocabulary]
    best = torch.zeros(len(inputs), 0, device=inputs.device)
    wanted = targets.clamp(min=0)[:, None]
    at_target = torch.zeros(wanted.shape, device=inputs.device)
    ids = torch.zeros(len(inputs), 0, dtype=torch.long, device=inputs.device)
    with torch.autocast(inputs.device.type, enabled=False):
        for chunk in chunks_of(weight, chunking.width):
            values = chunking.transform(logits_of(inputs, weight, bias, chunk)).float()
            values = values / temperature
            sums.append(values.logsumexp(1, keepdim=True))
            if with_target:
                column, inside = _in_chunk(wanted, chunk)
                at_target = torch.where(inside, values.gather(1, column), at_target)
            largest, columns = values.topk(min(k, values.shape[1]), 1)
            best, ids = torch.cat([best, largest], 1), torch.cat([ids, columns + chunk.start], 1)
            best, order = best.topk(min(k, best.shape[1]), 1)
            ids = ids.gather(1, order)
    if with_target:
        best, ids = torch.cat([at_target, best], 1), torch.cat([wanted, ids], 1)
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
