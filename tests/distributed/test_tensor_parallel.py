"""Ranks that divide layers train as one rank does, and checkpoints load between all layouts."""

import json
from pathlib import Path

import pytest

from tests.distributed.launching import torchrun
from tests.distributed.tensor_worker import CASES, FAULTS, ONE_KEY_HEAD, reference_of
from tests.distributed.test_equivalence import deviation, write_rows

WORKER = Path(__file__).with_name("tensor_worker.py")


def check(results, model, variant):
    divided, alone = results[f"{model} {variant}"], results[reference_of(model, variant)[0]]
    assert deviation(divided["losses"], alone["losses"]) <= 1e-5
    assert deviation(divided["norms"], alone["norms"]) <= 1e-5
    assert divided["from_one_rank"] <= 1e-5
    (loss, tokens), (expected, whole) = divided["evaluation"], alone["evaluation"]
    assert tokens == whole
    assert loss == pytest.approx(expected, rel=1e-5)


def check_faults(results):
    for fault in FAULTS:
        assert deviation(results[fault]["norms"], results[ONE_KEY_HEAD]["norms"]) > 1e-5


@pytest.mark.long
def test_ranks_that_divide_layers_train_as_one(tmp_path):
    write_rows(tmp_path / "train.jsonl")
    torchrun(WORKER, tmp_path, ranks=4, timeout=1200).check()
    results = json.loads((tmp_path / "results.json").read_text())
    for case in CASES:
        check(results, *case)
    check_faults(results)
    loaded = {name: note for name, note in results.items() if name.startswith("checkpoint")}
    assert len(loaded) == 30
    assert all(note["equal"] for note in loaded.values()), loaded
    whole = results["pretrained 1"]["read"]
    for name, share in (("1", 1), ("fsdp 2 x 2", 4), ("4", 4)):
        note = results[f"pretrained {name}"]
        assert note["from_one_rank"] <= 1e-5
        assert note["exported"]
        assert note["read"] <= 1.1 * whole / share  # each rank reads all of the norms
