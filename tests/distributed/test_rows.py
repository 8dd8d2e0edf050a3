"""Ranks that have parts of rows compute the losses and gradients of one rank: with rings, and in recurrent
layers."""

import json

import pytest

from tests.distributed.launching import forked
from tests.distributed.row_cases import LAUNCHES, name_of
from tests.distributed.row_worker import __file__ as WORKER

LIMIT = 1e-6
"""Of differences in float32, relative to losses, norms, and all gradients together."""
OF_ONE = 1e-3
"""Of the difference of one parameter's gradient, relative to it. Those of decays (A_log, dt_bias) are small
sums of large terms, which differ by their rounding; others by at most 2e-6."""
DECAYS = ("qwen3_5", "qwen3_next")


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
        assert of_one <= (OF_ONE if case[0].startswith(DECAYS) else 2 * LIMIT), (case, of_one)
