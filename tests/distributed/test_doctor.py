"""`launcher doctor` on this machine: two real ranks."""

import json
import sys

from launcher.memory.machine import Rates
from tests.distributed.launching import run


def test_a_real_examination(tmp_path):
    file = tmp_path / "doctor.json"
    done = run([sys.executable, "-m", "launcher.cli", "doctor", "ranks=2", f"json={file}", f"shared={tmp_path}"], timeout=90)
    told = json.loads(file.read_text())
    assert done.status == (0 if told["fit"] else 3), done.output
    assert [
        finding for finding in told["findings"] if finding["name"] in ("torch", "measuring", "all-reduce") and finding["state"] == "bad"
    ] == []
    rates = Rates(**told["rates"] | {"inter_node_bandwidth": 1.0})
    # Whatever this machine is: more than a pocket calculator, less than ten of the fastest GPUs
    assert 1e8 < rates.half_flops < 1e17
    assert 1e8 < rates.float32_flops < 1e17
    for bandwidth in (rates.memory_bandwidth, rates.host_bandwidth, rates.intra_node_bandwidth):
        assert 1e7 < bandwidth < 1e14
    assert 1e6 < rates.host_adamw < 1e12
    assert set(told["within_node"]) == {"all_gather", "all_reduce", "point_to_point"}
    assert told["across_nodes"] is None
    assert list(tmp_path.iterdir()) == [file]
