"""Loss and scores on the validation data: weighted by tokens, each sample once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from launcher.data.collation import Collated, Unreadable, raise_error
from launcher.data.dataset import MapData, SequenceDataset
from launcher.data.loader import StepStatistics, StepTotals, to_device
from launcher.distributed.rank_layout import RankLayout
from launcher.errors import RecipeError
from launcher.objectives.base import Objective, dataset_objective
from launcher.objectives.sweeps import evaluation_batches
from launcher.recipe import schema
from launcher.strategies.base import WrappedModel
from launcher.training.generation import Generator, Scored


@dataclass(frozen=True)
class Evaluated:
    """Loss and scores of a validation set."""

    loss: float
    """Mean loss of the `tokens` with a target, weighted by their weights."""
    tokens: int
    scores: Mapping[str, float] = field(default_factory=dict)
    """Other metrics by name. Each is a mean over `scored` samples, except a classifier's F1."""
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
        self._loaders: dict[str, tuple[MapData, Iterable[Collated | Unreadable]]] = {}
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

    def evaluate(
        self,
        wrapped: WrappedModel,
        *,
        stop_requested: Callable[[], bool] = lambda: False,
        heartbeat: Callable[[str], None] = lambda phase: None,
    ) -> dict[str, Evaluated]:
        """The loss and scores of each set over all ranks, in the order of the recipe. Empty if a
        stop was requested on any rank: the ranks exchange their requests at each micro-batch."""
        device, ranks = self._ranks.device, self._ranks
        stop_requests: StepStatistics | None = None
        totals = torch.zeros(len(self._loaders), 3, dtype=torch.float64, device=device)
        answers: list[Scored] = []

        def proceed() -> bool:
            heartbeat("evaluation")
            return not stop_requested()

        with wrapped.evaluating():
            for total, (dataset, loader) in zip(totals, self._loaders.values(), strict=True):
                found: Any = None
                for collated in map(raise_error, loader):
                    # Read the requests of the previous micro-batch, so that nothing waits. All
                    # ranks stop at the same micro-batch
                    going = proceed()
                    if stop_requests is not None and stop_requests.read().stop_requests > 0:
                        return {}
                    stop_requests = StepStatistics(StepTotals(stop_requests=int(not going)), ranks)
                    micro_batch = to_device(collated.micro_batch, device)
                    tokens = collated.loss_tokens
                    loss, added = wrapped.without_gradients(
                        dataset_objective(dataset).evaluate, micro_batch, tokens
                    )
                    total[0] += loss
                    total[1] += tokens
                    total[2] += collated.weight
                    if added is not None:
                        found = added if found is None else found + added
                if stop_requests is not None:
                    stop_requests.read()
                scored: Scored | None = {}
                if found is not None:
                    objective = dataset_objective(dataset)
                    more, (scores, number) = objective.finish_evaluation(found, ranks)
                    total[0] += more
                    scored = Scored(scores=dict(scores), scored=number)
                elif self._generator is not None:
                    assert isinstance(dataset, SequenceDataset)
                    scored = self._generator.answer(wrapped, dataset, ranks, proceed)
                if scored is None:
                    return {}
                answers.append(scored)
        if not ranks.counts:
            totals.zero_()
        dist.all_reduce(totals, group=ranks.group)
        sets = list(zip(self._loaders, totals.tolist(), answers, strict=True))
        for name, (_, tokens, _), _ in sets:
            if not tokens:
                refuse_without_targets(
                    dataset_objective(self._loaders[name][0]), f"the set {name!r}"
                )
        return {
            name: Evaluated(loss / (weight or 1.0), int(tokens), weight=weight, **scored)
            for name, (loss, tokens, weight), scored in sets
        }


def refuse_without_targets(objective: Objective, where: str) -> None:
    """Raises RecipeError: the validation data that `where` names has no token with loss."""
    raise RecipeError(objective.no_targets(where, "data.validation"))


def _refuse(name: str, problem: str) -> NoReturn:
    raise RecipeError(f"data.validation: the set {name!r} has {problem}")


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
        """The state for a checkpoint: the best value, and the number of evaluations since then."""
        return {"early_stopping": [self._metric, self._best, self._since]}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restores the state of a checkpoint. Starts again if the checkpoint counted for another
        metric."""
        metric, best, since = state.get("early_stopping", (None, None, 0))
        self._best, self._since = (best, since) if metric == self._metric else (None, 0)
