"""Losses on vectors of texts, compared with sentence-transformers, and scores of an evaluation."""

import dataclasses
import itertools
import math

import pytest
import torch

from launcher.data.retrieval_rows import NEGATIVE, POSITIVE, QUERY
from launcher.objectives.embedding_losses import (
    Comparison,
    Texts,
    found_documents,
    joined,
    spearman,
)
from launcher.recipe.schema import Embedding
from tests.unit.objectives.embedding_references import QUERIES, SCALE, TEACHER, vectors

REFERENCES = {
    # Loss and norm of its gradient of sentence-transformers 6.2.0 (embedding_references.py). Its kl is
    # multiplied by the squared temperature of the student
    "infonce": (27.7136173248291, 6.896692276000977),
    "matryoshka": (31.624267578125, 5.327197551727295),
    "cosine": (2.0073935985565186, 0.5925633907318115),
    "cosent": (0.9731957912445068, 4.043482303619385),
    "triplet": (1.049965500831604, 0.3606535494327545),
    "margin_mse": (8.045578002929688, 1.821576476097107),
    "kl": (0.026847152039408684, 0.012069039046764374),
}
SETTINGS = {
    "matryoshka": {"loss": "infonce", "matryoshka": (8, 4)},
    "triplet": {"loss": "triplet", "triplet_margin": 0.3},
}
DOCUMENTS = {"cosine": 1, "cosent": 1, "triplet": 2}
"""Of a row; else 3."""
ROLES = (QUERY, POSITIVE, NEGATIVE, NEGATIVE)


def rows(documents: int = 3, **changes: torch.Tensor) -> tuple[torch.Tensor, Texts]:
    """The vectors of the reference, with so many documents for each query, and their texts."""
    count = documents + 1
    scores = TEACHER[:, :documents] / (3 if documents == 1 else 1)
    scores = torch.cat([torch.full((QUERIES, 1), math.nan), scores], 1).flatten()
    texts = Texts(
        roles=torch.tensor(ROLES[:count] * QUERIES),
        examples=torch.arange(QUERIES).repeat_interleave(count),
        hashes=torch.arange(1, 1 + QUERIES * count),
        queries=torch.arange(1, 1 + QUERIES * count, count).repeat_interleave(count),
        scores=scores,
    )
    return vectors()[:, :count].flatten(0, 1), dataclasses.replace(texts, **changes)


def compare(settings: Embedding, found: tuple[torch.Tensor, Texts]) -> tuple[float, torch.Tensor]:
    """The mean loss of the queries, and its gradient."""
    compared = Comparison(settings)(*found, None, gradients=True)
    assert compared.gradients is not None
    queries = len(compared.losses)
    return compared.losses.mean().item(), compared.gradients / queries


@pytest.mark.parametrize("name", REFERENCES)
def test_losses_are_those_of_sentence_transformers(name: str) -> None:
    settings = Embedding(**SETTINGS.get(name, {"loss": name}), temperature=1 / SCALE)
    loss, gradient = compare(settings, rows(DOCUMENTS.get(name, 3)))
    factor = SCALE**-2 if name == "kl" else 1.0
    expected = REFERENCES[name]
    assert (loss * factor, gradient.norm().item() * factor) == pytest.approx(expected, rel=2e-6)


@pytest.mark.parametrize("loss", ["infonce", "cosent", "triplet"])
def test_gradients_are_those_of_autograd(loss: str) -> None:
    """The gradient of a small change of each number, in float64."""
    settings = Embedding(loss=loss, temperature=0.5, matryoshka=(8, 3))
    own, texts = rows()
    own = own.double()
    texts = dataclasses.replace(texts, scores=texts.scores.double())
    _, gradient = compare(settings, (own, texts))
    step = 1e-6
    for place in itertools.product((0, 5, 10), (0, 7)):
        moved = [own.clone(), own.clone()]
        moved[0][place] -= step
        moved[1][place] += step
        low, high = (compare(settings, (each, texts))[0] for each in moved)
        assert gradient[place].item() == pytest.approx((high - low) / (2 * step), abs=1e-6)


def test_several_positives_are_no_negatives_of_each_other() -> None:
    settings = Embedding(temperature=0.5)
    roles = torch.tensor((QUERY, POSITIVE, POSITIVE, NEGATIVE) * QUERIES)
    own, texts = rows(roles=roles)
    loss, _ = compare(settings, (own, texts))
    unit = torch.nn.functional.normalize(own, dim=-1).view(QUERIES, 4, -1)
    losses = []
    for query in range(QUERIES):
        similarities = (unit[:, 1:] @ unit[query, 0]).exp().square()  # divided by 0.5
        others = similarities.sum() - similarities[query, :2].sum()
        losses += [
            -torch.log(similarities[query, p] / (similarities[query, p] + others)) for p in (0, 1)
        ]
    assert loss == pytest.approx(torch.stack(losses).mean().item(), rel=1e-6)


def test_a_text_that_is_a_positive_is_no_negative_elsewhere() -> None:
    """A negative of another row with the same text as the positive: as if it were not there."""
    own, texts = rows()
    hashes = texts.hashes.clone()
    hashes[6] = hashes[1]
    with_double, _ = compare(Embedding(), (own, dataclasses.replace(texts, hashes=hashes)))
    compared = Comparison(Embedding())(own, texts, None, gradients=False).losses
    kept = torch.arange(len(own)) != 6
    without = Comparison(Embedding())(own[kept], texts.at(kept), None, gradients=False).losses
    expected = torch.cat([without[:1], compared[1:]]).mean().item()
    assert with_double == pytest.approx(expected, rel=1e-6)


def test_a_positive_of_the_same_query_in_another_row_is_no_negative() -> None:
    own, texts = rows()
    hashes, queries = texts.hashes.clone(), texts.queries.clone()
    hashes[4], queries[4:8] = hashes[0], queries[0]
    own = own.clone()
    own[4] = own[0]
    loss = Comparison(Embedding())(
        own, dataclasses.replace(texts, hashes=hashes, queries=queries), None, gradients=False
    ).losses[0]
    kept = torch.arange(len(own)) != 5
    without = Comparison(Embedding())(own[kept], texts.at(kept), None, gradients=False).losses[0]
    assert loss.item() == pytest.approx(without.item(), rel=1e-6)


def test_documents_nearer_than_the_positive_may_be_left_out() -> None:
    own, texts = rows()
    own = own.clone()
    own[2] = own[0]  # a negative with a similarity of 1
    far, _ = compare(Embedding(temperature=0.5), (own, texts))
    near, _ = compare(Embedding(temperature=0.5, false_negative_margin=0.1), (own, texts))
    kept = torch.arange(len(own)) != 2
    without = Comparison(Embedding(temperature=0.5, false_negative_margin=0.1))(
        own[kept], texts.at(kept), None, gradients=False
    ).losses
    assert near < far
    of_first = Comparison(Embedding(temperature=0.5, false_negative_margin=0.1))(
        own, texts, None, gradients=False
    ).losses[0]
    assert of_first.item() == pytest.approx(without[0].item(), rel=1e-6)


def test_nothing_to_compare_with_is_a_loss_of_zero() -> None:
    own, texts = rows(1)
    one = texts.at(slice(0, 2))
    compared = Comparison(Embedding())(own[:2], one, None, gradients=True)
    assert compared.losses.tolist() == [0.0]
    assert compared.gradients is not None
    assert compared.gradients.abs().max() == 0


@pytest.mark.parametrize("loss", ["infonce", "cosine", "cosent", "triplet", "margin_mse", "kl"])
def test_micro_batches_without_texts(loss: str) -> None:
    settings = Embedding(loss=loss)
    own, texts = rows()
    none = texts.at(slice(0, 0))
    compared = Comparison(settings)(own[:0], none, None, gradients=True)
    assert compared.losses.shape == (0,)
    assert compared.gradients is not None
    assert compared.gradients.shape == (0, 8)
    assert len(joined([none, texts, none, texts]).roles) == 2 * len(texts.roles)


def test_scores_of_an_evaluation() -> None:
    """Two queries: the positive of the first is nearest, that of the second third; an equally near
    document counts as nearer."""
    own = torch.tensor([[1.0, 0], [1, 0.1], [0, 1], [0.5, 1], [0, 1], [0.2, 1]])
    texts = Texts(
        roles=torch.tensor([QUERY, POSITIVE, QUERY, POSITIVE, NEGATIVE, NEGATIVE]),
        examples=torch.tensor([0, 0, 1, 1, 1, 1]),
        hashes=torch.arange(1, 7),
        queries=torch.tensor([1, 1, 3, 3, 3, 3]),
        scores=torch.full((6,), math.nan),
    )
    sums, count = found_documents(own, texts, None, Embedding())
    found = {name: (value / count).item() for name, value in sums.items()}
    assert found["recall@1"] == 0.5
    assert found["recall@10"] == 1.0
    assert found["mrr@10"] == pytest.approx((1 + 1 / 3) / 2)
    assert found["ndcg@10"] == pytest.approx((1 + 1 / math.log2(4)) / 2)
    tied = own.clone()
    tied[4] = tied[3]
    sums, _ = found_documents(tied, texts, None, Embedding())
    assert sums["mrr@10"].item() == pytest.approx(1 + 1 / 3)


def test_equal_documents_count_once_and_for_all_their_queries() -> None:
    own = torch.tensor([[1.0, 0], [1, 0.1], [1, 0.2], [1, 0.1]])
    texts = Texts(
        roles=torch.tensor([QUERY, POSITIVE, QUERY, POSITIVE]),
        examples=torch.tensor([0, 0, 1, 1]),
        hashes=torch.tensor([1, 7, 2, 7]),
        queries=torch.tensor([1, 1, 2, 2]),
        scores=torch.full((4,), math.nan),
    )
    sums, count = found_documents(own, texts, None, Embedding())
    assert {name: (value / count).item() for name, value in sums.items()} == dict.fromkeys(
        sums, 1.0
    )


def test_rows_with_the_same_query_share_their_documents() -> None:
    own = torch.tensor([[1.0, 0], [1, 0.1], [1.0, 0], [1, 0.2], [1, 0.15]])
    texts = Texts(
        roles=torch.tensor([QUERY, POSITIVE, QUERY, POSITIVE, NEGATIVE]),
        examples=torch.tensor([0, 0, 1, 1, 1]),
        hashes=torch.tensor([1, 7, 1, 8, 9]),
        queries=torch.tensor([1, 1, 1, 1, 1]),
        scores=torch.full((5,), math.nan),
    )
    sums, count = found_documents(own, texts, None, Embedding())
    found = {name: (value / count).item() for name, value in sums.items()}
    assert (found["recall@1"], found["recall@10"], found["mrr@10"]) == (0.5, 1.0, 1.0)
    assert found["ndcg@10"] == pytest.approx((1 + 1 / 2) / (1 + 1 / math.log2(3)))


def test_spearman_is_that_of_scipy() -> None:
    # scipy 1.17.1: spearmanr([1, 2, 2, 4, 0], [3, 1, 2, 5, 1]).statistic
    similarities, scores = torch.tensor([1.0, 2, 2, 4, 0]), torch.tensor([3.0, 1, 2, 5, 1])
    assert spearman(similarities, scores) == pytest.approx(0.5526315789473686)
    assert spearman(torch.ones(3), torch.arange(3.0)) == 0.0
    assert spearman(torch.ones(1), torch.ones(1)) == 0.0
