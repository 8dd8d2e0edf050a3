"""`launcher doctor` on this machine, with real ranks."""

import json
import sys

import pytest

from launcher.planner.machine import Rates
from tests.distributed.launching import run, torchrun

NODE = """
import os, sys
rank = int(os.environ["RANK"])
os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "SLURMD_NODENAME": f"n{rank + 1}", "SLURM_NODEID": str(2 - rank)}
from launcher.diagnostics import group_checks
right = group_checks.sum_is_right
if rank == 1:
    group_checks.sum_is_right = lambda ranks: not right(ranks)
from launcher.cli import main
sys.exit(main.main(["doctor", "--quick", *sys.argv[1:]]))
"""
"""Each rank simulates one of three nodes. n2 computes a wrong sum; n3 is Slurm's first node."""


@pytest.mark.long
def test_doctor_measures_this_machine(tmp_path):
    file = tmp_path / "doctor.json"
    done = run(
        [
            sys.executable,
            "-m",
            "launcher.cli.main",
            "doctor",
            "ranks=2",
            f"out={file}",
            f"shared={tmp_path}",
        ],
        timeout=90,
    )
    shown = json.loads(file.read_text())
    assert done.status == (0 if shown["fit"] else 3), done.output
    assert [
        finding
        for finding in shown["findings"]
        if finding["name"] in ("torch", "measuring", "all-reduce") and finding["state"] == "bad"
    ] == []
    rates = Rates(**shown["rates"] | {"inter_node_bandwidth": 1.0})
    # Wide bounds that hold on any machine
    assert 1e8 < rates.half_flops < 1e17
    assert 1e8 < rates.float32_flops < 1e17
    for bandwidth in (rates.memory_bandwidth, rates.host_bandwidth, rates.intra_node_bandwidth):
        assert 1e7 < bandwidth < 1e14
    assert 1e6 < rates.host_adamw < 1e12
    assert shown["rates"]["inter_node_bandwidth"] is None
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.long
def test_doctor_reports_the_outlier_node(tmp_path):
    script, file = tmp_path / "node.py", tmp_path / "doctor.json"
    script.write_text(NODE)
    done = torchrun(script, f"out={file}", f"shared={tmp_path}", ranks=3, timeout=90).check()
    shown = json.loads(file.read_text())
    assert shown["bad_nodes"] == ["n2"], shown
    assert shown["fit"] is False
    (bad,) = (finding["text"] for finding in shown["findings"] if finding["state"] == "bad")
    assert bad == "gives a wrong sum"
    assert 1e6 < shown["rates"]["inter_node_bandwidth"] < 1e14
    printed = [line for line in done.output.splitlines() if "nodes to exclude" in line]
    assert printed == ["[default2]:nodes to exclude: n2"], done.output
    assert sorted(tmp_path.iterdir()) == [file, script]
