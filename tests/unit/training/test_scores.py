"""Tests of evaluation scores, prompts for generation, and early stopping."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from launcher.data.rounds import Prompt
from launcher.data.token_store import TokenStore
from launcher.models.micro_batch import IGNORED, MicroBatch
from launcher.objectives.classification import Classification
from launcher.training.evaluation import (
    EarlyStopping,
    Evaluated,
    is_better,
    over_all,
)
from launcher.training.generation import find_prompts
from launcher.training.scores import exact_match, f1, rouge_l


def test_answer_scores():
    assert exact_match(" 12\n", "12") == 1
    assert exact_match("12.", "12") == 0
    assert f1("the cat sat", "the dog sat down") == pytest.approx(2 * 2 / 7)
    assert f1("b a", "A B") == 1
    assert rouge_l("b a", "A B") == pytest.approx(2 * 1 / 4)
    assert rouge_l("a x b y c", "a b c") == pytest.approx(2 * 3 / 8)
    assert (f1("", ""), rouge_l("", ""), f1("", "a"), rouge_l("a", "")) == (1, 1, 0, 0)


def test_classification_accuracy_and_macro_f1():
    """Class 0 has a true positive and a false negative, class 1 a true and a false positive.

    Class 2 has no targets. The last row is ignored.
    """
    logits = torch.tensor([[9.0, 0, 0], [0, 9, 0], [0, 9, 0], [0, 0, 9]])
    batch = MicroBatch(
        {"input_ids": None, "attention_mask": None}, torch.tensor([0, 0, 1, IGNORED])
    )
    objective = Classification()
    _, counts = objective.evaluate(lambda **inputs: SimpleNamespace(logits=logits), batch, 3)
    scores, scored = objective.scores(counts)
    assert scored == 3
    assert scores["accuracy"] == pytest.approx(2 / 3)
    assert scores["f1"] == pytest.approx((2 / 3 + 2 / 3) / 2)


def test_scores_over_sets_are_weighted_by_samples():
    sets = {"a": Evaluated(1.0, 10, {"f1": 1.0}, 1), "b": Evaluated(2.0, 30, {"f1": 0.0}, 3)}
    assert over_all(sets) == Evaluated(1.75, 40, {"f1": 0.25}, 4)


def test_prompts_end_before_the_last_answer():
    documents = [[1, 2, 3], [1, 2, 3, 4, 5, 6], [7, 8], [1, 2, 3, 4, 5], [9, 9]]
    trained = ["..x", ".x..xx", "..", "....x", ".x"]
    ids = np.concatenate(documents).astype(np.int32)
    labels = np.where([mark == "x" for mark in "".join(trained)], ids, IGNORED)
    store = TokenStore(ids, labels, np.cumsum([0, *map(len, documents)]))
    assert find_prompts(store, prompts=2, longest=4) == [
        Prompt([1, 2], [3], 0),
        Prompt([1, 2, 3, 4], [5, 6], 3),
    ]
    assert find_prompts(store, prompts=9, longest=3) == [
        Prompt([1, 2], [3], 0),
        Prompt([9], [9], 16),
    ]


def test_early_stopping():
    stopping = EarlyStopping("eval_loss", 2)
    over = []
    for value in (2.0, 1.5, 1.6, 1.4, None, 1.4):
        stopping.add({} if value is None else {"eval_loss": value})
        over.append(stopping.over)
    assert over == [False] * 5 + [True]
    resumed, other = EarlyStopping("eval_loss", 3), EarlyStopping("eval_f1", 1)
    resumed.restore(stopping.state())
    assert not resumed.over
    resumed.add({"eval_loss": 1.4})
    assert resumed.over
    other.restore(stopping.state())
    assert not other.over, "the restored state is of another metric"
    never = EarlyStopping("eval_loss", None)
    never.restore({})
    never.add({"eval_loss": math.inf})
    assert not never.over
    assert is_better("eval_loss", 1.0, 2.0)
    assert is_better("eval_f1", 2.0, 1.0)
    assert not is_better("eval_f1", 1.0, 1.0)
