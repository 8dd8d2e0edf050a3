"""Packed rows of models with recurrent layers: losses and gradients of a loop over documents."""

import pytest

from tests.distributed.launching import results_of
from tests.distributed.recurrent_worker import CASES, STEPS


@pytest.mark.long
def test_packed_rows_train_as_single_documents(tmp_path):
    results = results_of("recurrent_worker.py", tmp_path, ranks=2, timeout=200)
    for case in CASES:
        found, expected = results[case], results[case.split()[0]]
        assert expected["documents"] > 2 * 8 * STEPS, case  # several in a row
        half = case.endswith(" bfloat16")
        assert found["masking"] == ("mask" if half else "varlen"), case  # on CPUs
        assert found["losses"] == pytest.approx(expected["losses"], abs=1e-2 if half else 2e-6), (
            case
        )
        assert found["norms"] == pytest.approx(expected["norms"], rel=5e-2 if half else 1e-5), case
        assert ("(2 weights in float32)" in found["description"]) is half, case
