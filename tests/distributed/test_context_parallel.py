"""Ranks that share rows train as one rank does, with rows of several documents and rows of one,
windows, and fewer key heads than ranks."""

import json
from pathlib import Path

import pytest

from tests.distributed.context_worker import CASES, QUICK_CASES
from tests.distributed.launching import forked
from tests.distributed.test_equivalence import deviation, write_rows

WORKER = Path(__file__).with_name("context_worker.py")


def train(folder, *, ranks):
    write_rows(folder / "train.jsonl")
    forked(WORKER, folder, ranks=ranks, timeout=90).check()
    return json.loads((folder / "results.json").read_text())


def check(results, model, context, packing):
    shared, alone = results[f"{model} {context} {packing}"], results[f"{model} {packing}"]
    assert deviation(shared["losses"], alone["losses"]) <= 1e-6
    assert deviation(shared["norms"], alone["norms"]) <= 1e-6
    assert shared["from_one_rank"] <= 1e-5
    (loss, tokens), (expected, whole) = shared["evaluation"], alone["evaluation"]
    assert tokens == whole
    assert loss == pytest.approx(expected, rel=1e-6)


def test_two_ranks_share_rows(tmp_path):
    results = train(tmp_path, ranks=2)
    check(results, *QUICK_CASES[0])


@pytest.mark.long
def test_ranks_that_share_rows_train_as_one(tmp_path):
    results = train(tmp_path, ranks=4)
    for case in CASES:
        check(results, *case)
    # Positions of shared rows are those of the whole row
    wrong, alone = results["mutation: positions"], results["llama False"]
    assert deviation(wrong["norms"], alone["norms"]) > 1e-5
