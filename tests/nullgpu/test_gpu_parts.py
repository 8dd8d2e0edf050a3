"""The parts of `make test-gpu` on null GPUs, with small models: what a GPU would run is not broken.

Parts and tests that compare values fail here, because null GPUs compute none.
"""

import json
import sys

import pytest

from tests import REPOSITORY
from tests.distributed.launching import run


def results(gpus, folder, *parts, timeout=240):
    """What gpu.json has of each part, after a run of these parts."""
    words = [REPOSITORY / "benchmarks/gpu.py", "--quick", "--results", folder, "--parts", *parts]
    run([sys.executable, *words], timeout=timeout, **gpus.variables)
    return json.loads((folder / "gpu.json").read_text())["parts"]


@pytest.mark.long
def test_memory_runs_out_and_configurations_are_measured(null_gpus, tmp_path):
    """The report of an out-of-memory error is the longest text that tests/gpu compares."""
    parts = results(null_gpus(count=1), tmp_path, "memory", "widths", "optimizer", "extras")
    assert {name: part["status"] for name, part in parts.items()} == dict.fromkeys(parts, "passed")
    rows = {name: part["commands"][0]["figures"] for name, part in parts.items()}
    assert [row["outcome"] for row in rows["memory"]] == ["passed"]
    assert rows["widths"][0]["configuration"] == "eager-full-packed"
    assert rows["widths"][0]["retries"] == "0"
    assert [row["state"] for row in rows["optimizer"]] == ["fused", "float32", "bfloat16", "int8"]
    assert rows["extras"][0]["block"] == "eager"
    assert (tmp_path / "gpu-logs.tar.gz").stat().st_size > 0
