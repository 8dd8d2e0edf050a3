"""Loss and scores on the validation data: weighted by tokens, each sample once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from launcher.console import task
from launcher.data.batching import RankBatchSampler, SampleOrder
from launcher.data.collation import Collated
from launcher.data.dataset import ClassificationDataset, MapData
from launcher.data.loader import StepStatistics, StepTotals, make_loader, to_device
from launcher.data.objectives import MaskedDataset
from launcher.data.run_data import raise_error
from launcher.distributed.process_group import gather
from launcher.distributed.rank_layout import RankLayout
from launcher.errors import RecipeError
from launcher.models.inputs import IGNORED
from launcher.models.loss import class_losses, classification_logits
from launcher.recipe import schema
from launcher.strategies.base import WrappedModel
from launcher.training.generation import Generator, Scored
from launcher.training.scores import ratio


@dataclass(frozen=True)
class Evaluated:
    """Loss and scores of a validation set."""

    loss: float
    """Mean over `tokens`, those with a target, by their weights."""
    tokens: int
    scores: Mapping[str, float] = field(default_factory=dict)
    """Other metrics by name: means over `scored` samples, but for a classifier's F1."""
    scored: int = 0
    samples: Sequence[Mapping[str, object]] = ()
    """Generated answers, on rank 0."""
    weight: float | None = None
    """The sum of the weights of `tokens`; None: each counts 1."""


class Evaluator:
    """Evaluates the same samples of each validation set each time, in the order of the files."""

    def __init__(
        self,
        datasets: Mapping[str, MapData],
        *,
        data: schema.Data,
        micro_batch_size: int,
        max_batches: int | None,
        ranks: RankLayout,
        generator: Generator | None = None,
    ) -> None:
        self._ranks, self._generator = ranks, generator
        self._loaders: dict[str, tuple[MapData, Iterable[dict[str, Any]]]] = {}
        for name, dataset in datasets.items():
            if not len(dataset):
                _refuse(name, "no sample")
            store = getattr(dataset, "store", None)
            if generator is not None and store is not None and not generator.prompts(store):
                _refuse(
                    name,
                    f"no prompt of up to {generator.longest} tokens to answer: raise "
                    "data.sequence_length or lower evaluation.generate.max_new_tokens",
                )
            loader = evaluation_batches(
                dataset,
                data,
                micro_batch_size=micro_batch_size,
                max_batches=max_batches,
                ranks=ranks,
                persistent_workers=data.persistent_workers and len(datasets) == 1,
            )
            self._loaders[name] = (dataset, loader)

    @torch.no_grad()
    def evaluate(
        self,
        wrapped: WrappedModel,
        *,
        stop_requested: Callable[[], bool] = lambda: False,
        heartbeat: Callable[[str], None] = lambda phase: None,
    ) -> dict[str, Evaluated]:
        """The loss and scores of each set over all ranks, in the order of the recipe. Empty if a
        stop was requested on any rank, which the ranks exchange at each micro-batch."""
        device, ranks = self._ranks.device, self._ranks
        stop_requests: StepStatistics | None = None
        totals = torch.zeros(len(self._loaders), 3, dtype=torch.float64, device=device)
        answers: list[Scored] = []

        def proceed() -> bool:
            heartbeat("evaluation")
            return not stop_requested()

        with forward_only(wrapped):
            for total, (dataset, loader) in zip(totals, self._loaders.values(), strict=True):
                counts: torch.Tensor | None = None
                for collated in map(raise_error, loader):
                    # Read the requests of the previous micro-batch, so that nothing waits. All
                    # ranks stop at the same micro-batch
                    going = proceed()
                    if stop_requests is not None and stop_requests.read().stop_requests > 0:
                        return {}
                    stop_requests = StepStatistics(StepTotals(stop_requests=int(not going)), ranks)
                    micro_batch = to_device(collated["tensors"], device)
                    tokens = collated["loss_tokens"]
                    loss, added = _loss_and_counts(dataset, wrapped, micro_batch, tokens)
                    total[0] += loss if loss.ndim == 0 else loss[0]
                    total[1] += tokens
                    total[2] += collated.get("loss_weight", tokens)
                    if added is not None:
                        counts = added if counts is None else counts + added
                if stop_requests is not None:
                    stop_requests.read()
                scored: Scored | None = {}
                if counts is not None:
                    if ranks.tensor_parallel_rank:
                        counts.zero_()
                    dist.all_reduce(counts, group=ranks.group)
                    metrics = dataset.metrics
                    scored = _means(counts, metrics) if metrics else _classification_scores(counts)
                elif self._generator is not None:
                    store = dataset.store  # type: ignore[union-attr]
                    scored = self._generator.answer(wrapped, store, ranks, proceed)
                if scored is None:
                    return {}
                answers.append(scored)
        if ranks.tensor_parallel_rank:
            totals.zero_()
        dist.all_reduce(totals, group=ranks.group)
        sets = list(zip(self._loaders, totals.tolist(), answers, strict=True))
        for name, (_, tokens, _), _ in sets:
            if not tokens:
                dataset, _ = self._loaders[name]
                refuse_without_targets(dataset, f"the set {name!r}", key="data.validation")
        return {
            name: Evaluated(loss / (weight or 1.0), int(tokens), weight=weight, **scored)
            for name, (loss, tokens, weight), scored in sets
        }


def refuse_without_targets(dataset: object, where: str, *, key: str = "data") -> NoReturn:
    """Raises RecipeError for a part of a data set, which `where` names, without a token with loss."""
    if isinstance(dataset, MaskedDataset):
        what = f"{dataset.probability:g} masks no token in {where}"
        raise RecipeError(f"data.mask_probability: {what}; raise it, or use more data")
    what = f"no token with loss in {where} (for data.builder: CustomData.targets)"
    raise RecipeError(f"{key}: {what}")


def _refuse(name: str, problem: str) -> NoReturn:
    raise RecipeError(f"data.validation: the set {name!r} has {problem}")


def _loss_and_counts(
    dataset: MapData, wrapped: WrappedModel, micro_batch: Mapping[str, Any], targets: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The summed loss of a micro-batch, and for a classifier `_class_counts`; for pairs the sums of
    their metrics and the number of pairs, `targets`."""
    with wrapped.forward_context():
        if not isinstance(dataset, ClassificationDataset):
            loss = dataset.loss(wrapped.model, micro_batch)
            if loss.ndim == 0:
                return loss, None
            return loss, torch.cat([loss[1:], loss.new_full((1,), targets)]).double()
        logits = classification_logits(wrapped.model, micro_batch)
    classes = micro_batch["targets"]
    return class_losses(logits, classes), _class_counts(logits, classes)


def _class_counts(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """For each class, the numbers of samples that are predicted correctly, predicted, and of the
    class. Shape (3, classes), float64."""
    classes = torch.arange(logits.shape[-1], device=logits.device)
    actual = targets[:, None] == classes
    predicted = (logits.argmax(-1)[:, None] == classes) & (targets != IGNORED)[:, None]
    return torch.stack([actual & predicted, predicted, actual]).sum(1).double()


def _classification_scores(counts: torch.Tensor) -> Scored:
    """Accuracy, and the mean F1 of the classes that occur (macro)."""
    by_class = [
        ratio(right, predicted + actual)
        for right, predicted, actual in counts.T.tolist()
        if predicted + actual
    ]
    scored = int(counts[2].sum())
    accuracy = float(counts[0].sum()) / max(1, scored)
    scores = {"accuracy": accuracy, "f1": sum(by_class) / max(1, len(by_class))}
    return {"scores": scores, "scored": scored}


def _means(counts: torch.Tensor, metrics: Sequence[str]) -> Scored:
    *sums, pairs = counts.tolist()
    means = {name: value / max(pairs, 1.0) for name, value in zip(metrics, sums, strict=True)}
    return {"scores": means, "scored": int(pairs)}


def evaluation_batches(
    dataset: MapData,
    data: schema.Data,
    *,
    micro_batch_size: int,
    max_batches: int | None,
    ranks: RankLayout,
    persistent_workers: bool = False,
    first: int = 0,
) -> DataLoader[Any]:
    """This rank's micro-batches of each sample from `first` on once, in the order of the files.
    Positions after the last sample are empty rows: with sharding, all ranks need the same number of
    forward passes."""
    global_batch_size = micro_batch_size * ranks.data_parallel_size
    batches = -(-(len(dataset) - first) // global_batch_size)
    sampler = RankBatchSampler(
        order=SampleOrder(samples=len(dataset), seed=0, shuffle=False, epochs=1),
        global_batch_size=global_batch_size,
        micro_batch_size=micro_batch_size,
        rank=ranks.data_parallel_rank,
        ranks=ranks.data_parallel_size,
        first_step=0,
        first_sample=first,
        steps=batches if max_batches is None else min(batches, max_batches),
    )
    return make_loader(
        dataset,
        sampler,
        data,
        seed=ranks.data_parallel_rank,
        persistent_workers=persistent_workers,
        device=ranks.device,
    )


@torch.no_grad()
def rows_in_order(
    dataset: MapData,
    data: schema.Data,
    wrapped: WrappedModel,
    compute: Callable[[Mapping[str, Any], Collated], torch.Tensor],
    *,
    first: int,
    micro_batch_size: int,
    ranks: RankLayout,
    what: str,
) -> Iterator[torch.Tensor]:
    """On rank 0 the rows that `compute` returns for the tensors of a micro-batch and for all of it,
    in the order of the samples from `first` on, for one micro-batch of each rank at a time; on the
    other ranks tensors without rows. Every rank must read all. `what` names the task."""
    loader = evaluation_batches(
        dataset,
        data,
        micro_batch_size=micro_batch_size,
        max_batches=None,
        ranks=ranks,
        first=first,
    )
    steps = -(-(len(dataset) - first) // (micro_batch_size * ranks.data_parallel_size))
    with forward_only(wrapped), task(what, steps) as advance:
        for collated in map(raise_error, loader):
            micro_batch = to_device(collated["tensors"], ranks.device)
            with wrapped.forward_context():
                rows = compute(micro_batch, collated)
            advance(1)
            yield _on_rank_0(rows[:0] if ranks.tensor_parallel_rank else rows, ranks)


def _on_rank_0(rows: torch.Tensor, ranks: RankLayout) -> torch.Tensor:
    """The rows of all ranks, by rank; on the other ranks none."""
    counts = gather(len(rows), ranks.group)
    padded = rows.new_zeros(max(counts), *rows.shape[1:])
    padded[: len(rows)] = rows
    parts = [torch.empty_like(padded) for _ in counts] if ranks.rank == 0 else None
    dist.gather(padded, parts, group=ranks.group, group_dst=0)
    found = [part[:count] for part, count in zip(parts or (), counts, strict=False)]
    return torch.cat(found) if found else rows[:0]


@contextmanager
def forward_only(wrapped: WrappedModel) -> Iterator[None]:
    """Around forward passes without backward passes."""
    wrapped.model.eval()
    yield
    wrapped.reshard()
    wrapped.model.train()


def over_all(results: Mapping[str, Evaluated]) -> Evaluated:
    """The loss over the tokens of all sets, by their weights, and the means of the scores over
    their samples."""
    sets = list(results.values())
    tokens, scored = sum(s.tokens for s in sets), sum(s.scored for s in sets)
    scores = {
        name: sum(s.scores[name] * s.scored for s in sets) / max(scored, 1)
        for name in sets[0].scores
    }
    weights = [s.tokens if s.weight is None else s.weight for s in sets]
    loss = sum(s.loss * weight for s, weight in zip(sets, weights, strict=True))
    return Evaluated(loss / (sum(weights) or 1), tokens, scores, scored)


def is_better(metric: str, value: float, than: float | None) -> bool:
    """Whether a value is better than another: smaller for eval_loss, larger for other metrics."""
    return than is None or (value < than if metric == "eval_loss" else value > than)


class EarlyStopping:
    """Counts the evaluations since the best one (evaluation.stop_after)."""

    def __init__(self, metric: str, stop_after: int | None) -> None:
        self._metric, self._stop_after = metric, stop_after
        self._best: float | None = None
        self._since = 0

    def add(self, scores: Mapping[str, float]) -> None:
        """Counts an evaluation."""
        value = scores.get(self._metric)
        self._since += 1
        if value is not None and is_better(self._metric, value, self._best):
            self._best, self._since = value, 0

    @property
    def over(self) -> bool:
        """Whether the run ends now."""
        return self._stop_after is not None and self._since >= self._stop_after

    def state(self) -> dict[str, object]:
        """For a checkpoint: the best value, and the evaluations since."""
        return {"early_stopping": [self._metric, self._best, self._since]}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restores the state of a checkpoint, which may be for another metric."""
        metric, best, since = state.get("early_stopping", (None, None, 0))
        self._best, self._since = (best, since) if metric == self._metric else (None, 0)
