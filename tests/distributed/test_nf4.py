"""Adapters on weights in NF4 train to the same losses under every strategy."""

import json
from pathlib import Path

import pytest

from tests.distributed.launching import torchrun
from tests.distributed.nf4_worker import CASES
from tests.distributed.test_equivalence import deviation, write_rows

WORKER = Path(__file__).with_name("nf4_worker.py")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("nf4")
    write_rows(folder / "train.jsonl")
    torchrun(WORKER, folder, ranks=2, timeout=120).check()
    return folder


@pytest.mark.long
@pytest.mark.parametrize("model", CASES)
def test_losses_are_those_of_the_rounded_weights_in_float32(trained, model):
    results = json.loads((trained / "results.json").read_text())
    for case in CASES[model]:
        alone, found = results[model], results[f"{model} {case}"]
        assert deviation(found["losses"], alone["losses"]) <= 1e-6, case
        assert deviation(found["norms"], alone["norms"]) <= 2e-6, case
