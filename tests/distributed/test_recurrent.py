"""Packed rows of models with recurrent layers: losses and gradients of a loop over documents."""

import pytest

from tests.distributed.launching import results_of
from tests.distributed.recurrent_worker import CASES, STEPS


def test_packed_rows_train_as_single_documents(tmp_path):
    results = results_of("recurrent_worker.py", tmp_path, ranks=2, timeout=200)
    for case in CASES:
        found, expected = results[case], results[case.split()[0]]
        assert found["masking"] == "varlen", case
        assert expected["documents"] > 2 * 8 * STEPS, case  # several in a row
        assert found["losses"] == pytest.approx(expected["losses"], abs=2e-6), case
        assert found["norms"] == pytest.approx(expected["norms"], rel=1e-5), case
