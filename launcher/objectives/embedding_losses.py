"""Losses on vectors of texts, over the texts of all ranks, and their gradients.

A step's vectors are few numbers beside its activations, so all of them are compared at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from launcher.data.retrieval_rows import POSITIVE, QUERY
from launcher.distributed.rank_layout import RankLayout
from launcher.recipe import schema

SCORED = ("cosine", "cosent", "margin_mse", "kl")
"""Losses that compare similarities with scores of the rows."""
_AT_ONCE = 2**26
"""Similarities that are in memory at once, 256 MiB."""
_NOT_COUNTED = -1e30
"""The similarity of a document that is no negative. Infinity would make gradients of nan."""


@dataclass(frozen=True)
class Texts:
    """The texts of some micro-batches, (texts,) each."""

    roles: torch.Tensor
    """QUERY, POSITIVE or NEGATIVE."""
    examples: torch.Tensor
    """The number of the row that a text is of."""
    hashes: torch.Tensor
    """Equal for equal texts."""
    queries: torch.Tensor
    """The hash of the query of the text's row; 0: there is none."""
    scores: torch.Tensor
    """Of documents: how near they are to the query, float32; nan: not known."""

    def at(self, places: Any) -> Texts:
        """Those at these places."""
        return Texts(**{each.name: getattr(self, each.name)[places] for each in fields(self)})

    @property
    def asks(self) -> torch.Tensor:
        """Whether a text is a query."""
        return self.roles == QUERY


def joined(parts: list[Texts]) -> Texts:
    """Those of several micro-batches, whose rows are numbered on."""
    count, examples = 0, list[torch.Tensor]()
    for part in parts:
        examples.append(part.examples + count)
        count += int(part.examples.max()) + 1 if len(part.examples) else 0
    names = [each.name for each in fields(Texts) if each.name != "examples"]
    others = {name: torch.cat([getattr(part, name) for part in parts]) for name in names}
    return Texts(examples=torch.cat(examples), **others)


@dataclass(frozen=True)
class Compared:
    """What the loss of a global batch is for the texts of this rank."""

    losses: torch.Tensor
    """(queries,), float32."""
    metrics: torch.Tensor
    """(queries, 2): whether the nearest document is a positive one, and the mean similarity of the
    positive ones."""
    gradients: torch.Tensor | None
    """(texts, features): of the sum of the losses of all ranks; None: not asked for."""


@dataclass(frozen=True)
class Comparison:
    """A loss of the section `embedding`."""

    settings: schema.Embedding

    def __call__(
        self, vectors: torch.Tensor, texts: Texts, ranks: RankLayout | None, *, gradients: bool
    ) -> Compared:
        """Compares this rank's texts with those of all ranks, each of which must call it.

        vectors: (texts, features), float32. ranks: None: there are no others.
        """
        vectors = vectors.detach()
        grown = torch.zeros_like(vectors) if gradients else None
        sizes = self.settings.matryoshka or (vectors.shape[-1],)
        losses, metrics = vectors.new_zeros(int(texts.asks.sum())), None
        for size in sizes:
            leaf = vectors[:, :size].requires_grad_(gradients)
            with torch.set_grad_enabled(gradients):
                unit = nn.functional.normalize(leaf, dim=-1) if self.settings.normalize else leaf
            found, metric, gradient = self._of_unit(unit, texts, ranks, gradients=gradients)
            losses += found / len(sizes)
            metrics = metric if metrics is None else metrics  # those of the first size
            if grown is not None:
                assert gradient is not None
                (of_leaf,) = torch.autograd.grad(unit, leaf, gradient) if len(leaf) else (leaf,)
                grown[:, :size] += of_leaf / len(sizes)
        assert metrics is not None
        return Compared(losses, metrics, grown)

    def _of_unit(
        self, unit: torch.Tensor, texts: Texts, ranks: RankLayout | None, *, gradients: bool
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Losses, metrics, and the gradient with respect to the vectors of one size."""
        asks = texts.asks
        queries, documents = unit[asks].detach(), unit[~asks].detach()
        asked, known = texts.at(asks), texts.at(~asks)
        queries.requires_grad_(gradients)
        if self.settings.loss == "infonce":
            everything, whole, start = _of_all_ranks(documents, known, ranks)
            everything.requires_grad_(gradients)
            found = self._infonce(queries, asked, everything, whole, gradients=gradients)
            losses, metrics, of_queries, of_documents = found
            if gradients and ranks is not None and ranks.size > 1:
                dist.all_reduce(of_documents, group=ranks.group)
            of_documents = of_documents[start : start + len(documents)]
        else:
            documents.requires_grad_(gradients)
            with torch.set_grad_enabled(gradients):
                losses, metrics, total = self._of_rows(queries, asked, documents, known, ranks)
            of_queries, of_documents = torch.zeros_like(queries), torch.zeros_like(documents)
            if gradients and total.requires_grad:
                found_gradients = torch.autograd.grad(
                    total, (queries, documents), allow_unused=True, materialize_grads=True
                )
                of_queries, of_documents = found_gradients
        if not gradients:
            return losses, metrics, None
        gradient = torch.zeros_like(unit)
        gradient[asks], gradient[~asks] = of_queries, of_documents
        return losses.detach(), metrics, gradient

    def _infonce(
        self,
        queries: torch.Tensor,
        asked: Texts,
        documents: torch.Tensor,
        known: Texts,
        *,
        gradients: bool,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """For each query the mean over its positive documents p of -log(exp(s_p / t) / (exp(s_p / t) +
        the sum of exp(s_n / t) over the negatives n)), with similarities s and the temperature t (van den
        Oord et al., 2018). The negatives are all documents but its positive ones, those with the same text
        as one of them, and the positive ones of other rows with the same query."""
        settings, losses, metrics = self.settings, list[torch.Tensor](), list[torch.Tensor]()
        of_queries, of_documents = torch.zeros_like(queries), torch.zeros_like(documents)
        positive = known.roles == POSITIVE
        answers, own = known.hashes[positive], known.examples[positive]
        size = max(1, _AT_ONCE // max(1, len(documents)))
        for start in range(0, len(queries), size):
            some = slice(start, start + size)
            examples = asked.examples[some]
            right = (examples[:, None] == known.examples) & positive
            same = (asked.hashes[some][:, None] == known.queries) & positive
            for row, column in _pairs(examples[:, None] == own):
                same[row] |= known.hashes == answers[column]
            with torch.set_grad_enabled(gradients):
                asking = queries[some]
                similarities = asking @ documents.T
                least = similarities.detach()
                best = least.masked_fill(~right, -math.inf).amax(1, keepdim=True)
                negative = ~(right | same)
                nearest = least.masked_fill(~negative, -math.inf).amax(1, keepdim=True)
                if settings.false_negative_margin is not None:
                    negative &= least <= best + settings.false_negative_margin
                scaled = similarities / settings.temperature
                others = scaled.masked_fill(~negative, _NOT_COUNTED).logsumexp(1)
                rows, columns = right.nonzero(as_tuple=True)
                chosen, count = scaled[rows, columns], right.sum(1).clamp(min=1)
                each = torch.logaddexp(chosen, others[rows]) - chosen
                found = others.new_zeros(len(others)).index_add(0, rows, each) / count
            if gradients:
                of_some, of_all = torch.autograd.grad(found.sum(), (asking, documents))
                of_queries[some] = of_some
                of_documents += of_all
            losses.append(found.detach())
            mean = torch.where(right, least, 0.0).sum(1) / count
            metrics.append(torch.stack([(best > nearest)[:, 0].float(), mean], 1))
        if not losses:
            return queries.new_zeros(0), queries.new_zeros(0, 2), of_queries, of_documents
        return torch.cat(losses), torch.cat(metrics), of_queries, of_documents

    def _of_rows(
        self,
        queries: torch.Tensor,
        asked: Texts,
        documents: torch.Tensor,
        known: Texts,
        ranks: RankLayout | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Losses that compare a query with the documents of its own row; metrics; and what the
        gradients are of."""
        settings = self.settings
        # (queries, most documents of a row)
        places, belongs = _places(asked.examples[:, None] == known.examples)
        similarities = (queries[:, None] * documents[places]).sum(-1)
        scores = known.scores[places].nan_to_num()
        right = belongs & (known.roles[places] == POSITIVE)
        wrong = belongs & ~right
        match settings.loss:
            case "cosine":
                squared = torch.where(belongs, (similarities - scores).square(), 0.0)
                losses = squared.sum(1) / belongs.sum(1)
            case "cosent":
                losses = self._cosent(similarities[belongs], scores[belongs], ranks)
                losses = losses.expand(len(queries))
            case "kl":
                teacher = scores.masked_fill(~belongs, _NOT_COUNTED).log_softmax(1)
                student = similarities / settings.temperature
                student = student.masked_fill(~belongs, _NOT_COUNTED).log_softmax(1)
                losses = torch.where(belongs, teacher.exp() * (teacher - student), 0.0).sum(1)
            case _:  # of each positive one with each negative one of the row
                apart = similarities[:, :, None] - similarities[:, None, :]
                if settings.loss == "triplet":
                    apart = torch.relu(settings.triplet_margin - apart)
                else:
                    apart = (apart - (scores[:, :, None] - scores[:, None, :])).square()
                pairs = right[:, :, None] & wrong[:, None, :]
                losses = torch.where(pairs, apart, 0.0).sum((1, 2)) / pairs.sum((1, 2)).clamp(min=1)
        least = similarities.detach()
        best = least.masked_fill(~right, -math.inf).amax(1)
        nearest = least.masked_fill(~wrong, -math.inf).amax(1)
        mean = torch.where(right, least, 0.0).sum(1) / right.sum(1).clamp(min=1)
        metrics = torch.stack([(best > nearest).float(), mean], 1)
        total = losses.sum()
        if settings.loss == "cosent" and ranks is not None and ranks.size > 1:
            # All ranks have the same loss, and each the gradients of its own similarities
            queries_of_all = torch.tensor(float(len(queries)), device=queries.device)
            dist.all_reduce(queries_of_all, group=ranks.group)
            total = losses[:1].sum() * queries_of_all if len(losses) else total
        return losses, metrics, total

    def _cosent(
        self, similarities: torch.Tensor, scores: torch.Tensor, ranks: RankLayout | None
    ) -> torch.Tensor:
        """log(1 + the sum of exp((s_j - s_i) / t) over the pairs i, j of all ranks with score_i >
        score_j) (J. Su, CoSENT, 2022): a scalar. Its gradients are with respect to this rank's
        similarities."""
        both = torch.stack([similarities, scores], 1)
        with torch.no_grad():
            everything, start = gather_rows(both.detach(), ranks)
        s = torch.cat(
            [everything[:start, 0], similarities, everything[start + len(similarities) :, 0]]
        )
        apart = (s[None, :] - s[:, None]) / self.settings.temperature
        ordered = everything[:, 1][:, None] > everything[:, 1][None, :]
        terms = apart.masked_fill(~ordered, _NOT_COUNTED).flatten()
        return torch.cat([terms, terms.new_zeros(1)]).logsumexp(0)


def _pairs(mask: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The places of true entries of a matrix in groups, each with at most one in a row."""
    rows, columns = mask.nonzero(as_tuple=True)
    number = mask.cumsum(1)[rows, columns] - 1
    for turn in range(int(number.max()) + 1 if len(number) else 0):
        here = number == turn
        yield rows[here], columns[here][:, None]


def _places(mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The columns of the true entries of each row, padded with 0 to the longest row and at least to one;
    and which of these are no padding."""
    counts = mask.sum(1)
    most = max(1, int(counts.max()) if len(counts) else 0)
    places = torch.zeros(len(mask), most, dtype=torch.int64, device=mask.device)
    for number, (row, column) in enumerate(_pairs(mask)):
        places[row, number] = column[:, 0]
    return places, torch.arange(most, device=mask.device) < counts[:, None]


def gather_rows(rows: torch.Tensor, ranks: RankLayout | None) -> tuple[torch.Tensor, int]:
    """The rows of all ranks, by rank, and where this rank's begin."""
    if ranks is None or ranks.size == 1:
        return rows.clone(), 0
    own = torch.tensor([len(rows)], device=rows.device)
    sizes = [torch.zeros_like(own) for _ in range(ranks.size)]
    dist.all_gather(sizes, own, group=ranks.group)
    counts = torch.cat(sizes).tolist()
    sent = rows.new_zeros(max(counts), *rows.shape[1:])
    sent[: len(rows)] = rows
    parts = [torch.empty_like(sent) for _ in counts]
    dist.all_gather(parts, sent, group=ranks.group)
    whole = torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])
    return whole, sum(counts[: ranks.rank])


def _of_all_ranks(
    documents: torch.Tensor, known: Texts, ranks: RankLayout | None
) -> tuple[torch.Tensor, Texts, int]:
    """The documents of all ranks, and where this rank's begin. Rows of other ranks have numbers that
    none of this rank's has."""
    everything, start = gather_rows(documents, ranks)
    end = start + len(documents)
    roles, _ = gather_rows(known.roles, ranks)
    hashes, _ = gather_rows(known.hashes, ranks)
    queries, _ = gather_rows(known.queries, ranks)
    examples = torch.full_like(roles, -1)
    examples[start:end] = known.examples
    scores = torch.full((len(roles),), math.nan, device=roles.device)
    return everything, Texts(roles, examples, hashes, queries, scores), start


def found_documents(
    vectors: torch.Tensor, texts: Texts, ranks: RankLayout | None, settings: schema.Embedding
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """How well the documents of each of this rank's queries are found among those of all ranks: the sums
    over the queries by metric, and their number, float64. Every rank must call this.

    recall@k: the share of the query's positive documents among the k nearest. mrr@10: 1 / the place of
    the first of them, 0 beyond the tenth. ndcg@10: with a gain of 1 for each (Jarvelin and Kekalainen,
    2002). Documents of the same text count once; equally near ones count as nearer. Rows with the same
    query share their positive documents.
    """
    unit = nn.functional.normalize(vectors, dim=-1) if settings.normalize else vectors
    asks = texts.asks
    asked, known = texts.at(asks), texts.at(~asks)
    everything, whole, _ = _of_all_ranks(unit[~asks], known, ranks)
    positive = whole.roles == POSITIVE
    answers, own = whole.hashes[positive], whole.examples[positive]
    # The first of equal texts stands for all of them
    _, inverse = torch.unique(whole.hashes, return_inverse=True)
    first = torch.full((int(inverse.max()) + 1 if len(inverse) else 0,), len(inverse)).to(inverse)
    first.scatter_reduce_(0, inverse, torch.arange(len(inverse), device=inverse.device), "amin")
    counted = first[inverse] == torch.arange(len(inverse), device=inverse.device)
    sums = {name: vectors.new_zeros((), dtype=torch.float64) for name in FOUND}
    size = max(1, _AT_ONCE // max(1, len(everything)))
    queries, total = unit[asks], vectors.new_zeros((), dtype=torch.float64)
    for start in range(0, len(queries), size):
        some = slice(start, start + size)
        examples = asked.examples[some]
        # Of all rows with the same query; and the first text in place of its equals
        right = (asked.hashes[some][:, None] == whole.queries) & positive
        for row, column in _pairs(examples[:, None] == own):
            right[row] |= whole.hashes == answers[column]
        right &= counted
        similarities = queries[some] @ everything.T
        at = torch.full_like(similarities, math.inf, dtype=torch.float64)
        for row, column in _pairs(right):
            near = similarities[row].gather(1, column)
            before = (similarities[row] >= near) & counted & ~right[row]
            before |= (similarities[row] > near) & right[row]
            at[row, column[:, 0]] = before.sum(1).double() + 1
        relevant = right.sum(1).clamp(min=1).double()
        sums["recall@1"] += ((at <= 1).sum(1) / relevant).sum()
        sums["recall@10"] += ((at <= 10).sum(1) / relevant).sum()
        nearest = at.amin(1)
        sums["mrr@10"] += torch.where(nearest <= 10, 1 / nearest, 0.0).sum()
        gains = torch.where(at <= 10, 1 / torch.log2(at + 1), 0.0).sum(1)
        places_of_all = torch.arange(1, 11, device=unit.device)
        ideal = 1 / torch.log2(places_of_all.double() + 1)
        best = ideal.cumsum(0)[relevant.clamp(max=10).long() - 1]
        sums["ndcg@10"] += (gains / best).sum()
        total += len(examples)
    return sums, total


FOUND = ("recall@1", "recall@10", "mrr@10", "ndcg@10")


def spearman(similarities: torch.Tensor, scores: torch.Tensor) -> float:
    """The rank correlation of Spearman; equal values share the mean of their ranks."""

    def ranks_of(values: torch.Tensor) -> torch.Tensor:
        _, inverse, counts = torch.unique(values, return_inverse=True, return_counts=True)
        ends = counts.cumsum(0).double()
        of_rows: torch.Tensor = (ends - (counts.double() - 1) / 2)[inverse]
        return of_rows

    if len(scores) < 2:
        return 0.0
    both = torch.stack([ranks_of(similarities), ranks_of(scores)])
    both -= both.mean(1, keepdim=True)
    norms = both.norm(dim=1).prod()
    return float((both[0] * both[1]).sum() / norms) if norms else 0.0
