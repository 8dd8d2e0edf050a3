"""Losses and scores of documents of a query."""

import math

import pytest
import torch
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

from launcher.data.collation import RowInputs
from launcher.data.retrieval_rows import NEGATIVE, POSITIVE
from launcher.errors import RecipeError
from launcher.models.micro_batch import MicroBatch
from launcher.objectives.reranker import RerankerObjective, Table
from launcher.objectives.retrieval import MOST_TEXTS, sample_of
from launcher.recipe.load import load_recipe
from launcher.recipe.schema import Reranker
from tests.unit.small_recipe import SMALL

NAN = math.nan
SCORES = torch.tensor([0.3, -0.2, 1.1, 0.4, -1.0])


def micro_batch(roles=(1, 2, 2, 1, 2), scores=(NAN,) * 5, sizes=(3, 2)):
    examples = [number for number, size in enumerate(sizes) for _ in range(size)]
    places = [place for size in sizes for place in range(size)]
    return MicroBatch(
        {},
        extra={
            "roles": torch.tensor(roles),
            "scores": torch.tensor(scores),
            "examples": torch.tensor(examples),
            "places": torch.tensor(places),
            "queries": len(sizes),
            "most": max(sizes),
        },
    )


def test_binary_is_the_sum_over_documents():
    table = Table.of(SCORES, micro_batch())
    wanted = torch.tensor([1.0, 0, 0, 1, 0])
    expected = binary_cross_entropy_with_logits(SCORES, wanted, reduction="sum")
    assert table.binary_loss().item() == pytest.approx(expected.item(), rel=1e-6)
    given = (0.9, 0.1, NAN, 0.5, 0.0)
    wanted = torch.tensor([0.9, 0.1, 0, 0.5, 0])
    expected = binary_cross_entropy_with_logits(SCORES, wanted, reduction="sum")
    found = Table.of(SCORES, micro_batch(scores=given)).binary_loss()
    assert found.item() == pytest.approx(expected.item(), rel=1e-6)


def test_list_is_the_sum_over_queries():
    scores = SCORES.clone().requires_grad_()
    found = Table.of(scores, micro_batch()).list_loss()
    zero = torch.tensor(0)
    expected = cross_entropy(SCORES[:3], zero) + cross_entropy(SCORES[3:], zero)
    assert found.item() == pytest.approx(expected.item(), rel=1e-6)
    (gradient,) = torch.autograd.grad(found, scores)
    assert gradient.isfinite().all()
    assert gradient[:3].sum().item() == pytest.approx(0, abs=1e-6)
    given = (2.0, 1.0, 0.0, NAN, NAN)  # the first row has scores
    found = Table.of(SCORES, micro_batch(scores=given)).list_loss()
    shares = torch.tensor(given[:3]).softmax(0)
    expected = cross_entropy(SCORES[:3], shares) + cross_entropy(SCORES[3:], zero)
    assert found.item() == pytest.approx(expected.item(), rel=1e-6)


def test_scores_of_an_evaluation():
    """In the first row the positive is second; in the second first; the third has no positive."""
    scores = torch.tensor([0.3, -0.2, 1.1, 0.4, -1.0, 2.0])
    sums = Table.of(scores, micro_batch((1, 2, 2, 1, 2, 2), (NAN,) * 6, (3, 2, 1))).found()
    assert sums.tolist() == pytest.approx([1, 1.5, 1 + 1 / math.log2(3), 2])
    tied = Table.of(torch.zeros(5), micro_batch())
    assert tied.found().tolist()[:2] == pytest.approx([0, 1 / 3 + 1 / 2])
    assert tied.right.tolist() == [0, 0]


def test_types_of_texts_follow_the_separator():
    rows = [
        sample_of([([2, 6, 7, 3, 8, 3], POSITIVE, 0, NAN), ([2, 6, 3, 9, 3], NEGATIVE, 1, NAN)]),
        sample_of([([2, 5, 3, 5, 3], POSITIVE, MOST_TEXTS, NAN)]),
    ]
    objective = RerankerObjective(separator=3, settings=Reranker(loss="list"))
    made = objective.collate(rows, RowInputs(length=16, padding=0))
    assert made.micro_batch.inputs["token_type_ids"].tolist() == [
        [0, 0, 0, 0, 1, 1],
        [0, 0, 0, 1, 1, 0],
        [0, 0, 0, 1, 1, 0],
    ]
    assert made.loss_tokens == 2
    assert made.micro_batch.extra["examples"].tolist() == [0, 0, 1]
    assert made.micro_batch.extra["places"].tolist() == [0, 1, 0]
    assert RerankerObjective().collate(rows, RowInputs(length=16)).loss_tokens == 3


def test_an_answer_must_be_a_token(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data.txt").write_text("x")
    (tmp_path / "x.yaml").write_text(SMALL)
    words = ["recipe=x.yaml", "data.kind=reranking", "reranker={positive_answer: ja}"]
    recipe = load_recipe(words, ranks=None).recipe
    with pytest.raises(RecipeError, match=r"reranker.positive_answer: 'ja' is 2 tokens"):
        RerankerObjective.from_recipe(recipe, trained=True)
