"""The cards of model types (`benchmarks/cards.py`): one of them again."""

import cards
import pytest


@pytest.fixture(scope="module")
def card(tmp_path_factory):
    return cards.Card("qwen3_moe", tmp_path_factory.mktemp("card"))


QUICK = ("weights", "forward")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in QUICK else pytest.mark.long) for name in cards.CHECKS],
)
def test_a_card(card, name):
    if name == "tensor":
        with pytest.raises(cards.NotRunError, match=r"strategy\.tensor_parallel_size: the plan"):
            cards.CHECKS[name](card)
        return
    found = cards.CHECKS[name](card).stored()
    assert found["result"] == cards.PASS, found


def test_a_difference_is_found(card):
    """A run that trains otherwise, beside the plain loop."""
    out = card.train("other", "run.max_steps=6", "optimizer.learning_rate=1e-2")
    assert not card.compared(out, "train.jsonl", batch=4).passed
    assert not cards.within(1.0, 1.1)[0]
    assert cards.largest([1.0], [float("nan")]) == cards.largest([1.0], []) == float("inf")
