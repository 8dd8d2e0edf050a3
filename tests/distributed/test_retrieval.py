"""Vectors and rerankers: losses, gradients and scores do not depend on micro-batches and ranks."""

import json

import pytest

from tests.distributed.launching import amount, forked
from tests.distributed.retrieval_worker import GROUPS, QUICK
from tests.distributed.retrieval_worker import __file__ as WORKER

LIMIT = 2e-6
"""Of relative differences in float32 over four steps, whose rounding adds up."""


@pytest.fixture(scope="module")
def results(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    forked(WORKER, folder, amount(request), ranks=2, timeout=200).check()
    return json.loads((folder / "results.json").read_text())


@pytest.mark.parametrize(
    "group",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.long) for name in GROUPS],
)
def test_all_divisions_compute_the_same(results, group):
    for name, _, _ in GROUPS[group][2]:
        assert max(results[f"{group}: {name}"]) <= LIMIT, (name, results[f"{group}: {name}"])


def test_the_loss_is_that_of_a_plain_loop(results):
    assert max(results["plain loop"]) <= LIMIT
    first, last = results["range of losses"]
    assert last < first
