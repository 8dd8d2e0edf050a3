"""Ranks with different experts train as one rank does, and checkpoints load between all layouts."""

import json
from pathlib import Path

import pytest

from tests.distributed import tensor_worker, test_tensor_parallel
from tests.distributed.expert_worker import CASES, QUICK_CASES, reference_of
from tests.distributed.launching import torchrun
from tests.distributed.test_equivalence import deviation, write_rows

WORKER = Path(__file__).with_name("expert_worker.py")


def train(folder, cases, *, seconds=200):
    write_rows(folder / "train.jsonl")
    torchrun(WORKER, folder, cases, ranks=4, timeout=seconds).check()
    return json.loads((folder / "results.json").read_text())


def check(results, model, variant):
    divided, alone = results[f"{model} {variant}"], results[reference_of(model, variant)[0]]
    assert deviation(divided["losses"], alone["losses"]) <= 1e-5
    assert deviation(divided["norms"], alone["norms"]) <= 1e-5
    assert divided["from_one_rank"] <= 1e-5
    (loss, tokens), (expected, whole) = divided["evaluation"], alone["evaluation"]
    assert tokens == whole
    assert loss == pytest.approx(expected, rel=1e-5)


def check_mutation(results):
    """Gradients of experts that are sums over the ranks of a group have another norm."""
    assert deviation(results["mutation: undivided"]["norms"], results["qwen3_moe"]["norms"]) > 1e-5


def test_ranks_with_different_experts_or_parts_of_layers_train_as_one(tmp_path):
    results = train(tmp_path, "quick")
    for case in QUICK_CASES:
        check(results, *case)
    check_mutation(results)
    for case in tensor_worker.QUICK_CASES:
        test_tensor_parallel.check(results, *case)
    test_tensor_parallel.check_faults(results)


@pytest.mark.long
def test_all_variants_train_as_one_and_checkpoints_load_between_layouts(tmp_path):
    results = train(tmp_path, "all", seconds=1200)
    for case in CASES:
        check(results, *case)
    check_mutation(results)
    pairs = {name: note for name, note in results.items() if name.startswith("checkpoint")}
    assert len(pairs) == 20
    assert all(note["equal"] for note in pairs.values()), pairs
    assert results["pretrained 4 of 4"]["experts"] == [["0"], ["1"], ["2"], ["3"]]
    assert results["pretrained 2"]["experts"] == [["0"], ["2"], ["1"], ["3"]]  # FSDP divides pairs
    for name in ("1", "4 of 4", "2"):
        note = results[f"pretrained {name}"]
        assert note["from_one_rank"] <= 1e-5
        assert note["exported"]
