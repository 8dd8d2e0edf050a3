"""Packed rows of models with recurrent layers: losses and gradients of a loop over documents."""

import math

import pytest

from tests.distributed.launching import results_of
from tests.distributed.recurrent_worker import CASES, IN_FLOAT32, STEPS


@pytest.mark.long
def test_packed_rows_train_as_single_documents(tmp_path):
    results = results_of("recurrent_worker.py", tmp_path, ranks=2, timeout=200)
    for case in CASES:
        found, expected = results[case], results[case.split()[0]]
        assert expected["documents"] > 2 * 8 * STEPS, case  # several in a row
        half = case.endswith(" bfloat16")
        assert found["document_masking"] == ("mask" if half else "varlen"), case  # on CPUs
        assert found["losses"] == pytest.approx(expected["losses"], abs=1e-2 if half else 2e-6), (
            case
        )
        assert found["norms"] == pytest.approx(expected["norms"], rel=5e-2 if half else 1e-5), case
        assert ("(2 weights in float32)" in found["description"]) is half, case


@pytest.mark.long
def test_groups_in_float32_combine_with_all_that_changes_weights(tmp_path):
    """Float16, compiled blocks with checkpointing, and layers and experts that are divided."""
    results = results_of("recurrent_worker.py", tmp_path, *IN_FLOAT32, ranks=2, timeout=300)
    refused = results.pop("nemotron_h tensor")["refused"]
    assert "strategy.tensor_parallel_size: the plan for NemotronHForCausalLM" in refused
    assert "use 1, and strategy.expert_parallel_size" in refused
    exact = results.pop("qwen3_5_text float32")
    assert "in float32)" not in exact["description"]
    for case in IN_FLOAT32.keys() & results.keys():
        found, expected = results[case], results[case.split()[0]]
        count = 3 if case.startswith("nemotron_h") else 2  # D, too
        assert f"({count} weights in float32)" in found["description"], case
        if case.endswith(" float16"):
            assert found["losses"] == pytest.approx(exact["losses"], abs=2e-3)
            taken = [step for step, norm in enumerate(found["norms"]) if math.isfinite(norm)]
            assert taken[-2:] == [8, 9]
            norms = [[each["norms"][step] for step in taken] for each in (found, exact)]
            assert norms[0] == pytest.approx(norms[1], rel=1e-2)
            continue
        assert found["losses"] == pytest.approx(expected["losses"], abs=5e-3), case
        assert found["norms"] == pytest.approx(expected["norms"], rel=1e-2), case
