"""`launcher doctor` on simulated machines. tests/distributed/test_doctor.py uses a real machine."""

import json
import os
import resource
import socket
import sys
from pathlib import Path

import pytest

from launcher.cli import doctor as command
from launcher.cli import main
from launcher.diagnostics import findings as findings_module
from launcher.diagnostics import gpus, group_checks, measurements, node_checks
from launcher.diagnostics.findings import Finding, Report
from launcher.diagnostics.gpus import GIB, gpu_findings, query_nvml, visible_gpus
from launcher.diagnostics.node_checks import host_findings, place_findings
from launcher.distributed import host_memory, spawn
from launcher.distributed.network import node_name
from tests import REPOSITORY

STAND_INS = Path(__file__).parent / "stand_ins"
TORCH = {"torch": "2.13.0", "cuda": "13.0", "rocm": None, "nccl": "2.28.9", "python": "3.12.1"}
MIB = 1024**2


def gpu(index):
    """Returns the NVML data of a healthy H100."""
    healthy = {"memory": [81559 * MIB, 4 * MIB], "ecc": 0, "rows": [0, 0, 0, 0], "clocks": 0}
    name = {"uuid": f"GPU-{index}abc", "name": "NVIDIA H100 80GB HBM3"}
    return name | healthy | {"processes": []}


class Nvml:
    """A simulated node with GPUs. Tests may change its data."""

    def __init__(self, monkeypatch):
        self.monkeypatch = monkeypatch
        self.gpus, self.node = [gpu(index) for index in range(8)], {"driver": "570.86.15"}
        monkeypatch.syspath_prepend(STAND_INS)
        monkeypatch.delitem(sys.modules, "pynvml", raising=False)

    def query(self):
        self.monkeypatch.setenv("FAKE_NVML", json.dumps({"gpus": self.gpus} | self.node))
        return query_nvml()

    def findings(self, *, visible=None, expected=8, **torch):
        torch = TORCH | {"gpus": ["NVIDIA H100 80GB HBM3"] * 8, "error": None} | torch
        return list(gpu_findings(self.query(), torch, visible=visible, expected=expected))


@pytest.fixture
def nvml(monkeypatch):
    yield Nvml(monkeypatch)
    sys.modules.pop("pynvml", None)


def bad_findings(findings):
    return [f"{finding.name}: {finding.text}" for finding in findings if finding.state == "bad"]


def test_healthy_gpus(nvml):
    found = visible_gpus(nvml.query(), None)
    assert [gpu["index"] for gpu in found] == list(range(8))
    assert found[0]["memory"] == 81559 * 1024**2
    findings = nvml.findings()
    assert [finding.name for finding in findings] == ["GPUs", "GPUs free", "torch"]
    assert {finding.state for finding in findings} == {"good"}
    assert findings[0].text == "8 x NVIDIA H100 80GB HBM3 of 79.6 GiB, driver 570.86.15"
    assert findings[2].text == "2.13.0, CUDA 13.0, NCCL 2.28.9, Python 3.12.1"


@pytest.mark.parametrize(
    ("index", "changes", "text"),
    [
        (0, {"memory": [81559 * MIB, 40 * GIB]}, "not free: 40.0 GiB of 79.6 GiB in use, by no"),
        (3, {"processes": [42]}, "not free: 4.0 MiB of 79.6 GiB in use, by python42 (pid 42)"),
        (5, {"ecc": 2}, "2 uncorrected memory errors"),
        (6, {"rows": [0, 0, 1, 0]}, "a bad row of its memory waits to be remapped"),
        (6, {"rows": [0, 0, 0, 1]}, "a bad row of its memory could not be remapped"),
        (1, {"clocks": 0x40 | 1}, "slowed down by heat"),
        (2, {"lost": 15}, "NVML does not answer for it: GPU is lost"),
    ],
)
def test_unfit_gpu_is_reported(nvml, index, changes, text):
    nvml.gpus[index] |= changes
    (found,) = bad_findings(nvml.findings())
    assert found.startswith(f"GPU {index}: {text}")


def test_gpu_warnings(nvml):
    nvml.gpus[1]["clocks"] = 0x80
    nvml.gpus[2]["memory"] = [40 * GIB, 0]
    found = {one.name: one.text for one in nvml.findings() if one.state == "warning"}
    assert found["GPU 1"] == "slowed down by its power supply"
    assert found["GPUs"].endswith("of 40.0 GiB, driver 570.86.15; not all alike")


def test_unsupported_nvml_queries_are_ignored(nvml):
    supported = ("uuid", "name", "memory")
    nvml.gpus = [{key: gpu[key] for key in supported} | {"old": True} for gpu in nvml.gpus]
    assert bad_findings(nvml.findings()) == []


def test_only_visible_gpus_are_checked(nvml):
    nvml.gpus[0]["processes"] = [1]
    assert [gpu["index"] for gpu in visible_gpus(nvml.query(), "2,GPU-5abc")] == [2, 5]
    assert bad_findings(nvml.findings(visible="2,5", expected=2)) == []
    assert visible_gpus(nvml.query(), "") == visible_gpus(nvml.query(), "MIG-7a3b") == []
    nvml.gpus[0] = {"lost": 4}  # no permission
    assert [gpu["index"] for gpu in visible_gpus(nvml.query(), None)] == list(range(1, 8))
    assert bad_findings(nvml.findings()) == ["GPUs: 7 of 8 found"]


def test_without_nvml_torch_counts_the_gpus(nvml):
    nvml.node["error"] = 12
    found = nvml.findings(expected=None, gpus=[])
    assert [finding.state for finding in found] == ["note", "good"]
    assert bad_findings(nvml.findings(expected=4, gpus=[])) == ["GPUs: 0 of 4 found"]
    found = nvml.findings(expected=1, gpus=["AMD Instinct MI300X"], rocm="6.4")[0]
    assert (found.state, "is not known" in found.text) == ("note", True)
    assert bad_findings(nvml.findings(gpus=["H100"] * 7)) == ["GPUs: 7 of 8 found"]
    nvml.node["error"] = 18
    assert bad_findings(nvml.findings()) == ["GPUs: RM has detected an NVML/RM version mismatch."]


@pytest.mark.slow
def test_hanging_driver_is_reported(monkeypatch, tmp_path):
    """Uses a separate process and the installed torch."""
    path = os.pathsep.join([str(STAND_INS), str(REPOSITORY)])
    monkeypatch.setenv("PYTHONPATH", path)
    monkeypatch.setenv("FAKE_NVML", json.dumps({"driver": "570", "gpus": [gpu(0)]}))
    findings, versions = node_checks.examine(
        expected_gpus=None,
        ranks=2,
        all_ranks=2,
        runs=tmp_path,
        shared=tmp_path,
        port=0,
        visible=None,
    )
    assert {"torch", "GPUs", "host memory", "cores", "network"} <= {
        finding.name for finding in findings
    }
    assert versions["driver"] == "570"
    assert versions["torch"].startswith("2.")
    monkeypatch.setenv("FAKE_NVML", json.dumps({"hang": True}))
    nvml, torch = gpus.query(seconds=1)
    assert nvml["error"] == "NVML did not answer within 1 s: reboot the node"
    assert torch["error"] == "torch did not answer within 1 s: a GPU or a file system hangs"
    line = json.dumps({"driver": None, "gpus": [], "error": None})
    monkeypatch.setattr(gpus, "COMMAND", ["sh", "-c", 'echo "$0"; exec sleep 300', line])
    nvml, torch = gpus.query(seconds=3)
    assert (nvml["error"], torch["error"][:20]) == (None, "torch did not answer")


@pytest.mark.parametrize(
    ("torch", "expected_text"),
    [
        ({"gpus": ["H100"] * 7}, "2.13.0 computes on 7 of 8 GPUs: the driver is too old for it"),
        ({"gpus": [], "cuda": None}, "2.13.0 computes on 0 of 8 GPUs: this torch is built without"),
        ({"error": "torch cannot be imported: x"}, "torch cannot be imported: x"),
    ],
)
def test_gpus_unusable_by_torch_are_reported(nvml, torch, expected_text):
    (found,) = bad_findings(nvml.findings(**torch))
    assert found.startswith(f"torch: {expected_text}")


@pytest.mark.parametrize(
    ("probe", "answer", "state", "expected_text"),
    [
        ("available", 90 * GIB, "good", "90.0 GiB of 100.0 GiB available"),
        ("available", 20 * GIB, "warning", "20.0 GiB of 100.0 GiB"),
        ("available", GIB // 2, "bad", "512.0 MiB of 100.0 GiB"),
        ("cores", 4, "warning", "4, fewer than 8 ranks"),
        ("free", 40 * MIB, "bad", "--shm-size=8g"),
        (resource.RLIMIT_NOFILE, 1024, "warning", "1,024 open (ulimit -Hn); 65,536 is usual"),
        (resource.RLIMIT_NOFILE, 128, "bad", "8 ranks need 532"),
        (resource.RLIMIT_MEMLOCK, 8 * MIB, "bad", "ulimit -l unlimited"),
    ],
)
def test_host_memory_cores_and_limits_are_checked(monkeypatch, probe, answer, state, expected_text):
    answers = {"available": 90 * GIB, "cores": 64, "free": 50 * GIB, probe: answer}
    limits = {resource.RLIMIT_NOFILE: 65536, resource.RLIMIT_MEMLOCK: resource.RLIM_INFINITY}
    limits |= answers
    monkeypatch.setattr(host_memory, "allowed", lambda: 100 * GIB)
    monkeypatch.setattr(host_memory, "available", lambda: answers["available"])
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(answers["cores"]))
    monkeypatch.setattr(node_checks, "free_bytes", lambda folder: answers["free"])
    monkeypatch.setattr(resource, "getrlimit", lambda limit: (limits[limit], limits[limit]))
    monkeypatch.setattr(Path, "is_dir", lambda path: True)  # /sys/class/infiniband
    findings = list(host_findings(ranks=8))
    not_good = [finding for finding in findings if finding.state != "good"] or findings
    assert not_good[0].state == state
    assert expected_text in not_good[0].text
    assert len(not_good) == (len(findings) if state == "good" else 1)


def test_disks_and_ports_are_checked(monkeypatch, tmp_path):
    assert (
        bad_findings(place_findings(runs=tmp_path / "not/there/yet", shared=tmp_path, port=0)) == []
    )
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(node_checks, "free_bytes", lambda folder: 1000)
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        found = bad_findings(place_findings(runs=Path("runs"), shared=tmp_path / "none", port=port))
    assert found[0] == "disk of runs: 1000 bytes free for runs"
    assert found[1].endswith("none: No such file or directory")
    assert found[2] == f"network: port {port} cannot be listened on: Address already in use"


def finding(state, text="x", *, name="GPU 3", **host):
    return Finding(name=name, state=state, text=text, **host)


def make_report(*findings, nodes=1):
    return Report(findings=list(findings), device="CPU", nodes=nodes, ranks_per_node=2, versions={})


def test_bad_nodes_use_slurm_node_names(monkeypatch):
    monkeypatch.setenv("SLURMD_NODENAME", "gpu-7")
    states = {"gpu-8": "warning", "gpu-3": "bad"}
    findings = [finding(state, host=host) for host, state in states.items()]
    assert make_report(finding("bad"), *findings, nodes=3).bad_nodes == ["gpu-3", "gpu-7"]
    monkeypatch.delenv("SLURMD_NODENAME")
    assert node_name() == socket.gethostname()


RATES = {
    "half_flops": 600e12,
    "float32_flops": 3e14,
    "memory_bandwidth": 2.6e12,
    "host_bandwidth": 5e10,
    "host_adamw": 1e9,
    "intra_node_bandwidth": 2.8e11,
    "inter_node_bandwidth": 4e10,
    "link": 4e10,
}


def results(changes=None, *, nodes=4):
    """Returns the results of two ranks per node. changes: rates by rank, and ranks whose sum is
    wrong."""
    return [
        group_checks.RankResult(
            host=f"n{rank // 2}",
            gpu=rank % 2,
            findings=[],
            versions={},
            sum_is_right=change != "sum",
            rates=RATES | (change if isinstance(change, dict) else {}),
        )
        for rank in range(2 * nodes)
        for change in [(changes or {}).get(rank)]
    ]


def judge_results(changes, **more):
    return list(group_checks.judge(results(changes, **more), cpu=False))


def slow_rank(rank, name, rate):
    return {rank: {name: rate}}


@pytest.mark.parametrize(
    ("changes", "host", "expected_text"),
    [
        (
            slow_rank(5, "half_flops", 300e12),
            "n2",
            "GPU 1 (rank 5) computes at 50% of the median rank",
        ),
        (
            slow_rank(2, "host_bandwidth", 1e10),
            "n1",
            "GPU 0 (rank 2) copies to and from the host at 20",
        ),
        (
            slow_rank(6, "link", 1e10),
            "n3",
            "GPU 0 (rank 6) exchanges data with other nodes at 25% of",
        ),
        (
            slow_rank(1, "intra_node_bandwidth", 1e10),
            "n0",
            "GPU 1 (rank 1) runs collectives within",
        ),
        ({3: "sum"}, "n1", "gives a wrong sum"),
    ],
)
def test_deviating_node_is_reported(changes, host, expected_text):
    (found,) = [finding for finding in judge_results(changes) if finding.state == "bad"]
    assert found.host == host
    assert found.text.startswith(expected_text)


@pytest.mark.parametrize("nodes", range(1, 10))
def test_slow_link_is_attributed_to_one_node(nodes):
    """Each node measures two links and reports the faster one."""
    links = measurements.node_links(nodes)
    assert len({frozenset(link) for link in links}) == len(links)
    for node in range(nodes):
        assert sum(node in link for link in links) == min(2, nodes - 1)
    for slowest in range(nodes if nodes > 2 else 0):
        changes = {}
        for node in range(nodes):
            own = [1e9 if slowest in link else 4e10 for link in links if node in link]
            changes |= slow_rank(2 * node, "link", max(own)) | slow_rank(
                2 * node + 1, "link", max(own)
            )
        found = judge_results(changes, nodes=nodes)
        assert {one.host for one in found if one.state == "bad"} == {f"n{slowest}"}


def test_similar_ranks_are_fit():
    assert judge_results({}) == []
    assert {one.host for one in judge_results(dict.fromkeys(range(8), "sum"))} == {
        f"n{node}" for node in range(4)
    }
    slow_core = results(slow_rank(5, "half_flops", 1e12))
    assert [finding.state for finding in group_checks.judge(slow_core, cpu=True)] == ["warning"]


def test_report_contains_the_rates_of_the_slowest_rank():
    found = [result.rates for result in results(slow_rank(5, "half_flops", 500e12))]
    for rank_rates in found:
        del rank_rates["inter_node_bandwidth"]
    rates = group_checks.slowest_rates(found, source="here")
    assert (rates["half_flops"], rates["intra_node_bandwidth"]) == (500e12, 2.8e11)
    assert rates["inter_node_bandwidth"] is None


@pytest.fixture
def findings_of_doctor(monkeypatch, tmp_path):
    """Replaces the checks of `launcher doctor`. Returns the list of findings that it reports."""
    findings, versions = [finding("good", name="torch")], {"torch": "2.13.0", "gpus": 0}
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(node_checks, "examine", lambda **node: (findings, versions))

    def measured(ranks, report):
        rates = group_checks.slowest_rates([RATES], source="here")
        return Report(**vars(report) | {"rates": rates})

    monkeypatch.setattr(command, "measure_rates", measured)
    return findings


def test_doctor_node_option_prints_one_line(findings_of_doctor, capsys):
    assert main.main(["doctor", "--node"]) == 0
    assert capsys.readouterr().out.count("\n") == 1
    findings_of_doctor += [
        finding("warning"),
        finding("bad", "not free: 40.0 GiB in use", host="n1"),
    ]
    assert main.main(["doctor", "--node"]) == 3
    assert capsys.readouterr().out == "n1 unfit: GPU 3: not free: 40.0 GiB in use\n"


def test_doctor_prints_and_writes_a_report(findings_of_doctor, capsys):
    assert main.main(["doctor", "ranks=2", "out=d.json"]) == 0
    printed = capsys.readouterr().out
    rates = ("600 TFLOP/s", "collectives within a node  280 GB/s")
    for text in ("  ok    torch  x", *rates, "Fit to train."):
        assert text in printed
    written = json.loads(Path("d.json").read_text())
    assert (written["fit"], written["bad_nodes"]) == (True, [])
    assert written["rates"]["half_flops"] == 600e12
    findings_of_doctor.append(finding("bad", "not free"))
    assert main.main(["doctor"]) == 3
    assert "Not fit to train: 1 problem" in capsys.readouterr().out
    for mistake in ("out=d.json/below/d.json", "out=.", "--quick", "recipe=fsdp"):
        assert main.main(["doctor", mistake]) == 2
    known = "recipe=fsdp: not an argument of launcher doctor; launcher train, plan, show, inspect, "
    assert known in capsys.readouterr().err


FAILING_RANK = """
import pathlib, json, sys
result = pathlib.Path(json.loads(sys.argv[-1])["result"])
result.with_name("error_1").write_text("RuntimeError: NCCL error\\nTraceback")
sys.exit(1)
"""


def test_failed_and_hanging_ranks_are_reported(monkeypatch):
    def measured(program):
        monkeypatch.setattr(spawn, "TORCHRUN", [sys.executable, "-c", program])
        return bad_findings(command.measure_rates(2, make_report()).findings)

    assert measured(FAILING_RANK) == ["measuring: the ranks failed: RuntimeError: NCCL error"]
    printed = measured("import sys; print('Killed'); sys.exit(1)")
    assert printed == ["measuring: the ranks failed: Killed"]
    monkeypatch.setattr(command, "MEASURING_SECONDS", 0.3)
    assert "one of them hangs" in measured("import time; time.sleep(60)")[0]


def test_equal_findings_of_nodes_are_merged(capsys):
    nodes = [f"n{i}" for i in range(4)]
    findings = [finding("good", "2.13", name="torch", host=node) for node in nodes]
    findings += [finding("good", f"{node} GiB", name="disk", host=node) for node in nodes]
    findings += [finding("warning", "slow", host=node) for node in nodes[:2]]
    findings += [finding("bad", f"{node} in use", host=node) for node in nodes[2:]]
    findings_module.print_findings(findings, hosts=True)
    assert [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()] == [
        "ok all nodes torch 2.13",
        "ok all nodes disk n0: n0 GiB",
        "warn 2 nodes GPU 3 slow",
        "BAD n2 GPU 3 n2 in use",
        "BAD n3 GPU 3 n3 in use",
    ]
