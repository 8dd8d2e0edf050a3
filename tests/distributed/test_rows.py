"""Ranks that have parts of rows compute the losses and gradients of one rank, with rings."""

import json

import pytest

from tests.distributed.launching import forked
from tests.distributed.row_cases import LAUNCHES, name_of
from tests.distributed.row_worker import __file__ as WORKER

LIMIT = 1e-6
"""Of differences in float32, relative to losses, norms, and all gradients together."""


@pytest.mark.parametrize(
    "name",
    [name if name == "quick" else pytest.param(name, marks=pytest.mark.long) for name in LAUNCHES],
)
def test_losses_and_gradients_are_those_of_one_rank(tmp_path, name):
    forked(WORKER, tmp_path, name, ranks=4, timeout=90).check()
    results = json.loads((tmp_path / "results.json").read_text())
    assert len(results) == len(LAUNCHES[name])
    for case in LAUNCHES[name]:
        *of_all, of_one = results[name_of(*case)]
        assert max(of_all) <= LIMIT, (case, of_all)
        assert of_one <= 2 * LIMIT, (case, of_one)
