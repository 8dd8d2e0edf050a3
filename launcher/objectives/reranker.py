"""Scores of documents for a query: of a classifier that reads both, or of the answer yes or no.

All documents of a query are in the same micro-batch, so its loss depends on no other one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import nn

from launcher.data.collation import Collated, RowInputs, Sample
from launcher.data.retrieval_rows import INSTRUCTION, NEGATIVE, POSITIVE, pair_template
from launcher.data.token_store import TokenStore
from launcher.data.tokenizer import (
    HuggingFaceTokenizer,
    Tokenizer,
    load_tokenizer,
    tokenizer_name,
)
from launcher.errors import RecipeError
from launcher.models.hugging_face_files import Text
from launcher.models.micro_batch import MicroBatch
from launcher.models.predictions import logits
from launcher.objectives.base import MetricValues
from launcher.objectives.retrieval import (
    MOST_TEXTS,
    Mask,
    Retrieval,
    known_scores,
    refuse_scores,
    roles_in,
)
from launcher.recipe import schema
from launcher.sources.sentence_transformers import LENGTHS, MODULES, SCORE, SETTINGS

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from launcher.recipe.schema import Recipe

_NOT_COUNTED = -1e30
"""The score of no document, which gets no weight. Infinity would make gradients of nan."""


@dataclass(frozen=True)
class RerankerObjective(Retrieval):
    """A text is a query with a document, whose score is a logit, or a difference of two."""

    settings: schema.Reranker = field(default_factory=schema.Reranker)
    answers: tuple[int, ...] | None = None
    """The tokens of a positive document and of another one; None: a classifier scores them."""
    separator: int | None = None
    """The token between two texts, after which their type is 1; None: the model has no types."""
    template: str | None = None
    """Of a text with a query and a document; None: the tokenizer joins them."""
    prompt: str = ""
    """The {instruction} of the template."""
    metrics: ClassVar[tuple[str, ...]] = ("accuracy", "margin")

    @property
    def loss_unit(self) -> str:  # type: ignore[override]
        """What the loss is a mean over."""
        return "documents" if self.settings.loss == "binary" else "queries"

    @classmethod
    def from_recipe(cls, recipe: Recipe, *, trained: bool) -> RerankerObjective:
        """Raises RecipeError if an answer is no token."""
        settings, data = recipe.reranker or schema.Reranker(), recipe.data
        name = tokenizer_name(data, recipe.model)
        tokenizer = None if name is None else load_tokenizer(name)
        answers = separator = None
        own = isinstance(tokenizer, HuggingFaceTokenizer) and tokenizer.separates_pairs
        template: str | None = pair_template(data.pair_template)
        if data.pair_template is None and own:
            assert isinstance(tokenizer, HuggingFaceTokenizer)
            template, separator = None, tokenizer.tokenizer.sep_token_id
        if recipe.model.task == "causal_lm" and tokenizer is not None:
            answers = tuple(
                _token(tokenizer, getattr(settings, key), key, str(name))
                for key in ("positive_answer", "negative_answer")
            )
        return cls(
            longest=data.sequence_length,
            settings=settings,
            answers=answers,
            separator=separator,
            template=template,
            prompt=data.query_prompt or "",
        )

    def change_model(self, model: PreTrainedModel, *, row_length: int) -> None:
        """Changes nothing."""

    def trained(self, store: TokenStore) -> Mask:
        """All rows with a document; for the list, with a positive and a negative one or with scores."""
        ends, of = roles_in(store)
        roles = np.asarray(store.labels_or_ids)[ends]
        count = {
            role: np.bincount(of[roles == role], minlength=store.documents)
            for role in (POSITIVE, NEGATIVE)
        }
        if self.settings.loss == "binary":
            scored = known_scores(store, ends)
            if scored.any():
                refuse_scores(store, ends[scored], 0.0, 1.0, "reranker.loss: binary")
            found: Mask = count[POSITIVE] + count[NEGATIVE] > 0
            return found
        known = np.bincount(of[known_scores(store, ends)], minlength=store.documents)
        several: Mask = (count[POSITIVE] > 0) & (count[NEGATIVE] > 0) | (known > 1)
        return several

    def needs(self) -> str:
        """What the loss compares."""
        if self.settings.loss == "list":
            return (
                "no row has a positive and a negative document, or scores, for reranker.loss=list"
            )
        return "no row has a document"

    def collate(self, rows: list[Sample], inputs: RowInputs) -> Collated:
        """See `collate_texts`. With `token_type_ids` for models that have types of texts, and in `extra`
        `places` (texts,), the number of a document in its row, and the numbers of `queries` and of the
        documents of one at `most`."""
        made = super().collate(rows, inputs)
        extra, arguments = dict(made.micro_batch.extra), dict(made.micro_batch.inputs)
        if self.separator is not None:
            ends = (arguments["input_ids"] == self.separator).long()
            types = (ends.cumsum(1) - ends).clamp(max=1)
            arguments["token_type_ids"] = types * arguments["attention_mask"]
        extra["places"] = extra["names"] % MOST_TEXTS
        texts = len(extra["roles"])
        extra["queries"] = int(extra["examples"].max()) + 1 if texts else 0
        extra["most"] = int(extra["places"].max()) + 1 if texts else 1
        count = texts if self.settings.loss == "binary" else extra["queries"]
        return replace(made, micro_batch=MicroBatch(arguments, extra=extra), loss_tokens=count)

    # The loss

    def document_scores(self, model: nn.Module, micro_batch: MicroBatch) -> torch.Tensor:
        """(texts,), float32."""
        inputs, lasts = dict(micro_batch.inputs), micro_batch.extra["lasts"]
        if self.answers is not None:
            at = logits(model, inputs, at=lasts).float()
            return at[:, self.answers[0]] - at[:, self.answers[1]]
        config: Any = model.config
        if getattr(config, "type_vocab_size", 0) < 2:
            inputs.pop("token_type_ids", None)
        scores: torch.Tensor = model(**inputs).logits[: len(lasts), 0].float()
        return scores

    def loss(self, model: nn.Module, micro_batch: MicroBatch) -> torch.Tensor:
        """The sum of the losses of the documents, or of the queries, and the sums of `metrics` over as
        many: a float32 vector."""
        table = Table.of(self.document_scores(model, micro_batch), micro_batch)
        binary = self.settings.loss == "binary"
        weight = table.known.sum(1) if binary else table.known.any(1)
        apart = _mean(table.scores, table.positive) - _mean(table.scores, table.negative)
        further = torch.stack([(table.right * weight).sum(), (apart * weight).sum()]).detach()
        return torch.cat([(table.binary_loss() if binary else table.list_loss()).view(1), further])

    # Evaluation

    def evaluate(
        self, model: nn.Module, micro_batch: MicroBatch, count: int
    ) -> tuple[torch.Tensor, Any]:
        """The summed loss; and the sums of the scores over the queries with a positive document, and
        the number of these, float64."""
        table = Table.of(self.document_scores(model, micro_batch), micro_batch)
        loss = table.binary_loss() if self.settings.loss == "binary" else table.list_loss()
        return loss, table.found()

    def scores(self, sums: torch.Tensor) -> MetricValues:
        """accuracy: the share of the queries whose first document is a positive one. mrr@10, ndcg@10: as of
        `found_documents`, of the documents of a row."""
        *values, count = sums.tolist()
        names = ("accuracy", "mrr@10", "ndcg@10")
        means = (value / max(1.0, count) for value in values)
        return dict(zip(names, means, strict=True)), int(count)

    # The export

    def export_files(self, model: PreTrainedModel) -> dict[str, object]:
        """What `CrossEncoder(folder)` of sentence-transformers reads beside a model of transformers and its
        tokenizer."""
        files: dict[str, object] = {
            LENGTHS: {"max_seq_length": self.longest},
            SETTINGS: {"model_type": "CrossEncoder"},
        }
        if self.answers is not None:
            call = {"method": "forward", "method_output_name": "logits"}
            files[LENGTHS] = {
                "transformer_task": "text-generation",
                "modality_config": {"text": call, "message": {**call, "format": "flat"}},
                "module_output_name": "causal_logits",
            }
            files[MODULES] = [
                {
                    "idx": 0,
                    "name": "0",
                    "path": "",
                    "type": f"{_LIBRARY}.base.modules.transformer.Transformer",
                },
                {
                    "idx": 1,
                    "name": "1",
                    "path": SCORE,
                    "type": f"{_LIBRARY}.cross_encoder.modules.LogitScore",
                },
            ]
            yes, no = self.answers
            files[f"{SCORE}/config.json"] = {"true_token_id": yes, "false_token_id": no}
        if self.template is not None:
            files["chat_template.jinja"] = Text(_as_jinja(self.template, self.prompt))
        return files


_LIBRARY = "sentence_transformers"


def _token(tokenizer: Tokenizer, text: str, key: str, name: str) -> int:
    """The id of a text that is one token. Raises RecipeError if it is none."""
    ids = tokenizer.ids([text])[0]
    if len(ids) != 1:
        what = f"{text!r} is {len(ids)} tokens of the tokenizer {name}, and must be one"
        raise RecipeError(f"reranker.{key}: {what}")
    return int(ids[0])


def _as_jinja(template: str, instruction: str) -> str:
    """A chat template of sentence-transformers, whose messages are a query and a document."""
    for role in ("query", "document"):
        content = (
            f'messages | selectattr("role", "eq", "{role}") | map(attribute="content") | first'
        )
        template = template.replace(f"{{{role}}}", f"{{{{ {content} }}}}")
    return template.replace("{instruction}", instruction or INSTRUCTION)


@dataclass(frozen=True)
class Table:
    """The documents of the queries of a micro-batch, (queries, most documents of one) each."""

    scores: torch.Tensor
    """By the model."""
    known: torch.Tensor
    """Whether there is such a document."""
    positive: torch.Tensor
    wanted: torch.Tensor
    """The scores of the data; nan: there is none."""

    @classmethod
    def of(cls, scores: torch.Tensor, micro_batch: MicroBatch) -> Table:
        """The table of the scores (texts,) of a micro-batch."""
        extra = micro_batch.extra
        shape, at = (extra["queries"], extra["most"]), (extra["examples"], extra["places"])
        known = torch.zeros(shape, dtype=torch.bool, device=scores.device)
        known[at] = True
        positive = torch.zeros_like(known)
        positive[at] = extra["roles"] == POSITIVE
        wanted = scores.new_full(shape, math.nan)
        wanted[at] = extra["scores"]
        return cls(
            scores.new_full(shape, _NOT_COUNTED).index_put(at, scores), known, positive, wanted
        )

    @property
    def negative(self) -> torch.Tensor:
        """Whether a document is not a positive one."""
        return self.known & ~self.positive

    @property
    def right(self) -> torch.Tensor:
        """(queries,): 1 where a positive document has the highest score; no other may have the same."""
        best = self.scores.masked_fill(~self.positive, -math.inf).amax(1)
        return (best > self.scores.masked_fill(~self.negative, -math.inf).amax(1)).float()

    def binary_loss(self) -> torch.Tensor:
        """The sum of the cross-entropies of the documents."""
        wanted = torch.where(self.wanted.isnan(), self.positive.float(), self.wanted)
        losses = nn.functional.binary_cross_entropy_with_logits(
            self.scores.masked_fill(~self.known, 0.0), wanted, reduction="none"
        )
        return torch.where(self.known, losses, 0.0).sum()

    def list_loss(self) -> torch.Tensor:
        """The sum of the cross-entropies of the queries. Of a row with scores, the wanted shares are their
        softmax (ListNet: Cao et al., 2007); else they are the same for each positive document."""
        scored = (~self.wanted.isnan() | ~self.known).all(1, keepdim=True)
        even = self.positive / self.positive.sum(1, keepdim=True).clamp(min=1)
        soft = self.wanted.nan_to_num().masked_fill(~self.known, _NOT_COUNTED).softmax(1)
        shares = torch.where(scored, soft, even)
        return -(shares * self.scores.log_softmax(1)).masked_fill(~self.known, 0.0).sum()

    def found(self) -> torch.Tensor:
        """The sums of accuracy, mrr@10 and ndcg@10, and the number of queries with a positive document,
        (4,), float64. Other documents with the same score come first."""
        asked = self.positive.any(1)
        scores = self.scores[asked]
        positive, negative = self.positive[asked], self.negative[asked]
        higher = (scores[:, None, :] >= scores[:, :, None]) & negative[:, None, :]
        higher |= (scores[:, None, :] > scores[:, :, None]) & positive[:, None, :]
        place = (higher.sum(2) + 1).double().masked_fill(~positive, math.inf)
        first = place.amin(1)
        gains = torch.where(place <= 10, 1 / torch.log2(place + 1), 0.0).sum(1)
        ideal = 1 / torch.log2(torch.arange(2, 12, device=scores.device).double())
        best = ideal.cumsum(0)[positive.sum(1).clamp(max=10) - 1]
        sums = [first == 1, torch.where(first <= 10, 1 / first, 0.0), gains / best, first > 0]
        return torch.stack([each.double().sum() for each in sums])


def _mean(scores: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return torch.where(mask, scores, 0.0).sum(1) / mask.sum(1).clamp(min=1)
