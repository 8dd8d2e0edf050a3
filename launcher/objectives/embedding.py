"""Vectors of texts: that of a query is to be nearest to those of its documents.

The loss of a query compares it with all documents of the global batch, so it depends on all
micro-batches of all ranks. It is computed in two passes (GradCache: Gao et al., "Scaling deep contrastive
learning batch size under memory limited setup", 2021). `prepare_step` runs the micro-batches without a
graph, gathers the vectors, and computes the loss and its gradients with respect to them. `loss` then runs
a micro-batch with a graph, and returns the sum of vector * gradient, whose gradient with respect to the
weights is that of the loss.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from launcher.data.retrieval_rows import NEGATIVE, QUERY, text_prompts
from launcher.data.token_store import TokenStore
from launcher.data.tokenizer import tokenizer_name
from launcher.errors import RecipeError
from launcher.models.description import has_no_head
from launcher.models.micro_batch import MicroBatch
from launcher.models.record import record_of
from launcher.models.sample_dropout import keys_of, use_sample_dropout
from launcher.objectives.base import MetricValues
from launcher.objectives.embedding_losses import (
    FOUND,
    SCORED,
    Compared,
    Comparison,
    Texts,
    found_documents,
    gather_rows,
    joined,
    spearman,
)
from launcher.objectives.retrieval import (
    Mask,
    Retrieval,
    known_scores,
    refuse_scores,
    roles_in,
)
from launcher.recipe import schema
from launcher.recipe.model_config import attends_both_ways
from launcher.sources.hub import model_config, model_folder
from launcher.sources.sentence_transformers import (
    LENGTHS,
    MODULES,
    NORMALIZE,
    POOLING,
    POOLINGS,
    SETTINGS,
    vector_settings,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from launcher.distributed.rank_layout import RankLayout
    from launcher.recipe.schema import Recipe
    from launcher.strategies.base import WrappedModel

Pooling = Literal["last", "mean", "first"]
_TEXTS = tuple(each.name for each in fields(Texts))


@dataclass(frozen=True)
class EmbeddingObjective(Retrieval):
    """A document of the store is a query with its documents. With packing a row of the model holds the
    texts of some of them, kept apart; without, a row is a text."""

    settings: schema.Embedding = field(default_factory=schema.Embedding)
    seed: int = 0
    """Of dropout."""
    prompts: Mapping[str, str] = field(default_factory=dict)
    """Text in front of queries and documents, for the export."""
    loss_unit: ClassVar[str] = "queries"
    metrics: ClassVar[tuple[str, ...]] = ("batch_accuracy", "positive_similarity")

    @classmethod
    def from_recipe(cls, recipe: Recipe, *, trained: bool) -> EmbeddingObjective:
        """Raises RecipeError if the files of model.path for sentence-transformers cannot be read."""
        data, settings = recipe.data, recipe.embedding or schema.Embedding()
        if settings.pooling == "auto":
            settings = replace(settings, pooling=_pooling(recipe))
        prompts = text_prompts(data, tokenizer_name(data, recipe.model))
        return cls(
            longest=data.sequence_length,
            settings=settings,
            seed=recipe.run.seed,
            prompts={"query": prompts["query_prompt"], "document": prompts["document_prompt"]},
        )

    # The model

    def change_model(self, model: PreTrainedModel, *, row_length: int) -> None:
        """Freezes what the vectors do not depend on, and makes dropout one of texts. Raises RecipeError
        if the vectors cannot be made as the recipe says."""
        if not has_no_head(model):
            what = f"{type(model).__name__} does not return hidden states"
            raise RecipeError(f"model.task: embedding: {what}; give another model")
        config: Any = model.config
        if self.settings.pooling == "first" and not attends_both_ways(config.to_dict()):
            what = (
                "first: all texts would have the same vector, because the first token sees no other"
            )
            raise RecipeError(f"embedding.pooling: {what}; use last or mean")
        width = model.config.get_text_config(decoder=True).hidden_size
        if (largest := max(self.settings.matryoshka or (1,))) > width:
            what = f"{largest} is more than the {width} numbers of a vector"
            raise RecipeError(f"embedding.matryoshka: {what}")
        # DDP would wait for their gradients
        for name, parameter in model.named_parameters():
            if name.startswith("pooler.") or ".pooler." in name:
                parameter.requires_grad_(False)
        record_of(model).sample_dropout = use_sample_dropout(model)

    # The data

    def trained(self, store: TokenStore) -> Mask:
        """Rows without a query are compared by infonce only."""
        loss, roles = self.settings.loss, np.asarray(store.labels_or_ids)
        ends, of = roles_in(store)

        def has(chosen: Mask) -> Mask:
            found: Mask = np.bincount(of[chosen], minlength=store.documents) > 0
            return found

        asks, others = has(roles[ends] == QUERY), has(roles[ends] == NEGATIVE)
        if loss == "infonce":
            return asks | others if asks.any() else asks
        if loss in ("triplet", "margin_mse"):
            asks &= others
        if loss in SCORED:
            known = known_scores(store, ends)
            asks &= ~has((roles[ends] != QUERY) & ~known)
            if loss == "cosine" and self.settings.normalize and known.any():
                refuse_scores(store, ends[known], -1.0, 1.0, "embedding.loss: cosine")
        return asks

    def needs(self) -> str:
        """What the loss compares."""
        loss = self.settings.loss
        if loss == "triplet":
            return "no row has a negative, which embedding.loss=triplet needs"
        if loss not in SCORED:
            return "no row has a query"
        what = f"no row has what embedding.loss={loss} compares: a score for each document"
        negative = ", and a negative" if loss == "margin_mse" else ""
        return f"{what} (data.columns.scores=NAME){negative}"

    # The loss

    def vectors(self, model: nn.Module, micro_batch: MicroBatch) -> torch.Tensor:
        """The vector of each text of a micro-batch, (texts, features), float32, not normalized."""
        extra, inputs = micro_batch.extra, dict(micro_batch.inputs)
        lasts, lengths, text_of = extra["lasts"], extra["lengths"], extra["text_of"]
        dropout = record_of(model).sample_dropout
        if dropout is not None and model.training:
            none = lasts.new_zeros(1)
            first = torch.cat([lasts - lengths + 1, none])[text_of]
            names = torch.cat([extra["names"], none])[text_of]
            places = torch.arange(len(text_of), device=text_of.device)
            keys = keys_of(extra.get("seed", none), names, places - first)
            dropout.keys = keys.view(inputs["input_ids"].shape)
        if "use_cache" in inspect.signature(type(model).forward).parameters:
            inputs["use_cache"] = False
        hidden: torch.Tensor = model(**inputs)[0].flatten(0, 1)
        if self.settings.pooling == "mean":
            sums = hidden.new_zeros(len(lasts) + 1, hidden.shape[-1], dtype=torch.float32)
            means: torch.Tensor = sums.index_add(0, text_of, hidden.float())[:-1] / lengths[:, None]
            return means
        places = lasts if self.settings.pooling == "last" else lasts - lengths + 1
        vectors: torch.Tensor = hidden[places].float()
        return vectors

    def loss(self, model: nn.Module, micro_batch: MicroBatch) -> torch.Tensor:
        """The sum of the losses of a micro-batch's queries, and the sums of `metrics`: a float32
        vector. Without `prepare_step`, as in a plan, it has no meaning, and takes as much memory."""
        extra = micro_batch.extra
        if (state := extra.get("random_state")) is not None:
            _set_random_state(state, extra["lasts"].device)
        vectors = self.vectors(model, micro_batch)
        gradients = extra.get("gradients", vectors.detach())
        summed = (vectors * gradients).sum()
        if "value" not in extra:
            return torch.cat([summed.view(1), summed.new_zeros(len(self.metrics))])
        value = extra["value"] + (summed - summed.detach())
        return torch.cat([value.view(1), extra["further"]])

    def _compared(
        self, vectors: torch.Tensor, texts: Texts, ranks: RankLayout | None, *, gradients: bool
    ) -> Compared:
        return Comparison(self.settings)(vectors, texts, ranks, gradients=gradients)

    def prepare_step(
        self,
        wrapped: WrappedModel,
        micro_batches: Sequence[MicroBatch],
        step: int,
        *,
        ranks: RankLayout,
        heartbeat: Callable[[str], None] = lambda phase: None,
    ) -> Sequence[MicroBatch]:
        """The micro-batches of a step, each with the gradients of the loss of the global batch with
        respect to its vectors, its part of the loss and metrics, and the random state that its forward
        pass began with. Every rank must call this."""
        device = ranks.device
        # Not drawn from a generator: a resume on another number of ranks has other random states
        seed = torch.tensor([(self.seed * 0x9E3779B1 + step) % 2**32], device=device)
        states, vectors, texts = list[torch.Tensor](), list[torch.Tensor](), list[Texts]()
        for micro_batch in micro_batches:
            heartbeat("forward")
            states.append(_random_state(device))
            seeded = replace(micro_batch, extra={**micro_batch.extra, "seed": seed})
            vectors.append(wrapped.without_gradients(self.vectors, seeded))
            texts.append(_texts(micro_batch))
        found = self._compared(torch.cat(vectors), joined(texts), ranks, gradients=True)
        assert found.gradients is not None
        queries = [int(part.asks.sum()) for part in texts]
        added = [
            {
                "gradients": gradients,
                "value": losses.sum(),
                "further": metrics.sum(0),
                "random_state": state,
                "seed": seed,
            }
            for gradients, losses, metrics, state in zip(
                torch.split(found.gradients, [len(part) for part in vectors]),
                torch.split(found.losses, queries),
                torch.split(found.metrics, queries),
                states,
                strict=True,
            )
        ]
        return _Prepared(micro_batches, added)

    # Evaluation

    def evaluate(
        self, model: nn.Module, micro_batch: MicroBatch, count: int
    ) -> tuple[torch.Tensor, Any]:
        """A loss of 0, and the vectors for `finish_evaluation`."""
        vectors = self.vectors(model, micro_batch)
        return vectors.new_zeros(()), [(vectors, _texts(micro_batch))]

    def finish_evaluation(self, found: Any, ranks: RankLayout) -> tuple[torch.Tensor, MetricValues]:
        """The loss of this rank's queries, and how the documents are found among those of all ranks."""
        vectors = torch.cat([part for part, _ in found])
        texts = joined([part for _, part in found])
        compared = self._compared(vectors, texts, ranks, gradients=False)
        total = compared.losses.double().sum()
        if self.settings.loss in ("cosine", "cosent"):
            return total, self._correlation(vectors, texts, ranks)
        sums, count = found_documents(vectors, texts, ranks, self.settings)
        both = torch.stack([*sums.values(), count])
        dist.all_reduce(both, group=ranks.group)
        *values, number = both.tolist()
        means = {name: value / max(1.0, number) for name, value in zip(FOUND, values, strict=True)}
        return total, (means, int(number))

    def _correlation(self, vectors: torch.Tensor, texts: Texts, ranks: RankLayout) -> MetricValues:
        unit = nn.functional.normalize(vectors, dim=-1) if self.settings.normalize else vectors
        asked, known = texts.at(texts.asks), texts.at(~texts.asks)
        rows, columns = (asked.examples[:, None] == known.examples).nonzero(as_tuple=True)
        similarities = (unit[texts.asks][rows] * unit[~texts.asks][columns]).sum(-1)
        both, _ = gather_rows(torch.stack([similarities, known.scores[columns]], 1), ranks)
        return {"spearman": spearman(both[:, 0], both[:, 1])}, len(both)

    # The export

    def export_files(self, model: PreTrainedModel) -> dict[str, object]:
        """What `SentenceTransformer(folder)` reads beside a model of transformers and its tokenizer."""
        pooling, paths = POOLINGS[self.settings.pooling], ["", POOLING]
        names = ["Transformer", "Pooling"]
        if self.settings.normalize:
            names, paths = [*names, "Normalize"], [*paths, NORMALIZE]
        modules = [
            {
                "idx": number,
                "name": str(number),
                "path": path,
                "type": f"sentence_transformers.models.{name}",
            }
            for number, (name, path) in enumerate(zip(names, paths, strict=True))
        ]
        size = int(model.config.get_text_config(decoder=True).hidden_size)
        modes = {"cls_token": "cls", "mean_tokens": "mean", "lasttoken": "lasttoken"}
        found = {f"pooling_mode_{name}": mode == pooling for name, mode in modes.items()}
        return {
            MODULES: modules,
            f"{POOLING}/config.json": {
                "word_embedding_dimension": size,
                **found,
                "pooling_mode_max_tokens": False,
                "pooling_mode_mean_sqrt_len_tokens": False,
                "pooling_mode_weightedmean_tokens": False,
                "include_prompt": True,
            },
            **({f"{NORMALIZE}/config.json": {}} if self.settings.normalize else {}),
            SETTINGS: {
                "prompts": {name: text for name, text in self.prompts.items() if text},
                "default_prompt_name": None,
                "similarity_fn_name": "cosine" if self.settings.normalize else "dot",
            },
            LENGTHS: {"max_seq_length": self.longest, "do_lower_case": False},
        }


def _pooling(recipe: Recipe) -> Pooling:
    """How a vector is made where the recipe does not say. Raises RecipeError if the model's own way is
    not available."""
    path, changes = recipe.model.path, recipe.model.config or {}
    stated, config = None, changes
    if path is not None:
        folder = model_folder(path, key="model.path", weights=False)
        stated = vector_settings(folder).pooling
        known = model_config(path, fetch=False)
        config = {**known, **changes} if isinstance(known, dict) else changes
    if stated is None:
        both = recipe.model.bidirectional or attends_both_ways(config)
        return "mean" if both else "last"
    if stated not in POOLINGS:
        what = f"{path} has vectors by {stated}, which is not available"
        raise RecipeError(f"embedding.pooling: {what}; use {', '.join(POOLINGS)}")
    return stated  # type: ignore[return-value]


def _texts(micro_batch: MicroBatch) -> Texts:
    return Texts(**{name: micro_batch.extra[name] for name in _TEXTS})


class _Prepared(Sequence[MicroBatch]):
    """Micro-batches with what `prepare_step` adds. One that is asked for is copied to the device."""

    def __init__(self, micro_batches: Sequence[MicroBatch], added: list[dict[str, Any]]) -> None:
        self._micro_batches, self._added = micro_batches, added

    def __len__(self) -> int:
        return len(self._micro_batches)

    def __iter__(self) -> Iterator[MicroBatch]:
        return (self[index] for index in range(len(self)))

    def __getitem__(self, index: Any) -> Any:
        micro_batch = self._micro_batches[index]
        return replace(micro_batch, extra={**micro_batch.extra, **self._added[index]})


def _random_state(device: torch.device) -> torch.Tensor:
    """The state of the generator that dropout draws from."""
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def _set_random_state(state: torch.Tensor, device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)
