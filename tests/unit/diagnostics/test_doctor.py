"""`launcher doctor` on simulated machines. `tests/distributed/test_doctor.py` measures a real one."""

import functools
import json
import os
import resource
import sys
import types
from pathlib import Path

import pytest

from launcher.cli import doctor as command
from launcher.cli import main
from launcher.diagnostics import gpus, group_checks, measurements, node_checks, report
from launcher.diagnostics.gpus import GIB, gpu_findings, query_nvml, visible_gpus
from launcher.diagnostics.node_checks import host_findings, place_findings
from launcher.diagnostics.report import Finding, Report
from launcher.distributed import host_memory, spawn
from tests import REPOSITORY

STAND_INS = Path(__file__).parent / "stand_ins"
TORCH = {
    "torch": "2.13.0",
    "cuda": "13.0",
    "rocm": None,
    "nccl": "2.28.9",
    "error": None,
    "python": "3.12.1",
}


def gpu(index):
    """A healthy H100, as NVML describes it."""
    memory = [81559 * 1024**2, 4 * 1024**2]
    return {
        "uuid": f"GPU-{index}abc",
        "name": "NVIDIA H100 80GB HBM3",
        "memory": memory,
        "ecc": 0,
        "rows": [0, 0, 0, 0],
        "clocks": 0,
        "temperature": 30 + index,
        "processes": [],
    }


class Nvml:
    """A simulated node with GPUs, which a test may change."""

    def __init__(self, monkeypatch):
        self.monkeypatch = monkeypatch
        self.gpus, self.node = [gpu(index) for index in range(8)], {"driver": "570.86.15"}
        monkeypatch.syspath_prepend(STAND_INS)
        monkeypatch.delitem(sys.modules, "pynvml", raising=False)

    def query(self):
        self.monkeypatch.setenv("FAKE_NVML", json.dumps({"gpus": self.gpus} | self.node))
        return query_nvml()

    def findings(self, *, visible=None, expected=8, **torch):
        torch = TORCH | {"gpus": ["NVIDIA H100 80GB HBM3"] * 8} | torch
        return list(gpu_findings(self.query(), torch, visible=visible, expected=expected))


@pytest.fixture
def nvml(monkeypatch):
    yield Nvml(monkeypatch)
    sys.modules.pop("pynvml", None)


def bad(findings):
    return [f"{finding.name}: {finding.text}" for finding in findings if finding.state == "bad"]


def test_healthy_gpus(nvml):
    found = visible_gpus(nvml.query(), None)
    assert [gpu["index"] for gpu in found] == list(range(8))
    assert found[0]["memory"] == 81559 * 1024**2
    findings = nvml.findings()
    assert [(finding.name, finding.state) for finding in findings] == [
        ("GPUs", "good"),
        ("GPUs free", "good"),
        ("torch", "good"),
    ]
    assert findings[0].text == "8 x NVIDIA H100 80GB HBM3 of 79.6 GiB, driver 570.86.15"
    assert findings[2].text == "2.13.0, CUDA 13.0, NCCL 2.28.9, Python 3.12.1"


@pytest.mark.parametrize(
    ("index", "changes", "text"),
    [
        (
            0,
            {"memory": [81559 * 1024**2, 40 * GIB]},
            "not free: 40.0 GiB of 79.6 GiB in use, by no process that can",
        ),
        (
            3,
            {"processes": [4242]},
            "not free: 4.0 MiB of 79.6 GiB in use, by python4242 (pid 4242)",
        ),
        (5, {"ecc": 2}, "2 uncorrected memory errors"),
        (6, {"rows": [0, 0, 1, 0]}, "a bad row of its memory waits to be remapped"),
        (6, {"rows": [0, 0, 0, 1]}, "a bad row of its memory could not be remapped"),
        (1, {"clocks": 0x40 | 1}, "slowed down by heat"),
        (2, {"lost": 15}, "NVML does not answer for it: GPU is lost"),
    ],
)
def test_an_unfit_gpu_is_reported(nvml, index, changes, text):
    nvml.gpus[index] |= changes
    nvml.gpus[index] = {key: value for key, value in nvml.gpus[index].items() if value is not None}
    (found,) = bad(nvml.findings())
    assert found.startswith(f"GPU {index}: {text}")


def test_unsupported_nvml_queries_are_no_problem(nvml):
    nvml.gpus = [
        {key: gpu[key] for key in ("uuid", "name", "memory")} | {"old": True} for gpu in nvml.gpus
    ]
    assert bad(nvml.findings()) == []


def test_only_the_gpus_of_this_job_count(nvml):
    nvml.gpus[0]["processes"] = [1]
    assert [gpu["index"] for gpu in visible_gpus(nvml.query(), "2,GPU-5abc")] == [2, 5]
    assert bad(nvml.findings(visible="2,5", expected=2)) == []
    assert visible_gpus(nvml.query(), "") == visible_gpus(nvml.query(), "MIG-7a3b") == []
    nvml.gpus[0] = {"lost": 4}  # no permission
    assert [gpu["index"] for gpu in visible_gpus(nvml.query(), None)] == list(range(1, 8))
    assert bad(nvml.findings()) == ["GPUs: 7 of 8 are there"]


def test_without_nvml_the_gpus_of_torch_count(nvml):
    nvml.node["error"] = 12
    found = nvml.findings(expected=None, gpus=[])
    assert [finding.state for finding in found] == ["note", "good"]
    assert bad(nvml.findings(expected=4, gpus=[])) == ["GPUs: 0 of 4 are there"]
    found = nvml.findings(expected=1, gpus=["AMD Instinct MI300X"], rocm="6.4")[0]
    assert (found.state, "is not known" in found.text) == ("note", True)
    assert bad(nvml.findings(gpus=["H100"] * 7)) == ["GPUs: 7 of 8 are there"]
    nvml.node["error"] = 18
    assert bad(nvml.findings()) == ["GPUs: RM has detected an NVML/RM version mismatch."]


def test_a_driver_that_hangs_does_not_hang_the_doctor(monkeypatch, tmp_path):
    """In a separate process, with the installed torch."""
    path = os.pathsep.join([str(STAND_INS), str(REPOSITORY)])
    monkeypatch.setenv("PYTHONPATH", path)
    monkeypatch.setenv("FAKE_NVML", json.dumps({"driver": "570", "gpus": [gpu(0)]}))
    findings, versions = node_checks.examine(
        expected_gpus=None, ranks=2, runs=tmp_path, shared=tmp_path, port=0, visible=None
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
    answers = [sys.executable, "-uc", f"print({line!r}); import time; time.sleep(60)"]
    monkeypatch.setattr(gpus, "COMMAND", answers)
    nvml, torch = gpus.query(seconds=1)
    assert (nvml["error"], torch["error"][:20]) == (None, "torch did not answer")


@pytest.mark.parametrize(
    ("torch", "said"),
    [
        ({"gpus": ["H100"] * 7}, "2.13.0 computes on 7 of 8 GPUs: the driver is too old for it"),
        ({"gpus": [], "cuda": None}, "2.13.0 computes on 0 of 8 GPUs: this torch is built without"),
        ({"error": "torch cannot be imported: x"}, "torch cannot be imported: x"),
    ],
)
def test_torch_computes_on_all_gpus(nvml, torch, said):
    (found,) = bad(nvml.findings(**torch))
    assert found.startswith(f"torch: {said}")


@pytest.mark.parametrize(
    ("probe", "answer", "state", "said"),
    [
        ("host_memory", (100 * GIB, 90 * GIB), "good", "90.0 GiB of 100.0 GiB available"),
        ("host_memory", (100 * GIB, 20 * GIB), "warning", "20.0 GiB of 100.0 GiB"),
        ("host_memory", (100 * GIB, GIB // 2), "bad", "512.0 MiB of 100.0 GiB"),
        ("cores", 4, "warning", "4, fewer than 8 ranks"),
        ("free_bytes", 40 * 1024**2, "bad", "--shm-size=8g"),
        ("open_files", 1024, "warning", "ulimit -n"),
        ("open_files", 128, "bad", "ulimit -n"),
        ("locked_memory", 8 * 1024**2, "bad", "ulimit -l unlimited"),
    ],
)
def test_host_memory_cores_and_limits(monkeypatch, probe, answer, state, said):
    answers = {
        "host_memory": (100 * GIB, 90 * GIB),
        "cores": 64,
        "free_bytes": 50 * GIB,
        "open_files": 65536,
        "locked_memory": resource.RLIM_INFINITY,
    } | {probe: answer}
    limits = {resource.RLIMIT_NOFILE: "open_files", resource.RLIMIT_MEMLOCK: "locked_memory"}
    whole, available = answers["host_memory"]
    monkeypatch.setattr(host_memory, "allowed", lambda: whole)
    monkeypatch.setattr(host_memory, "available", lambda: available)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(answers["cores"]))
    monkeypatch.setattr(node_checks, "free_bytes", lambda folder: answers["free_bytes"])
    monkeypatch.setattr(resource, "getrlimit", lambda limit: (answers[limits[limit]], 0))
    monkeypatch.setattr(Path, "is_dir", lambda path: True)  # /sys/class/infiniband
    findings = list(host_findings(ranks=8))
    odd = [finding for finding in findings if finding.state != "good"] or findings
    assert odd[0].state == state
    assert said in odd[0].text
    assert len(odd) == (len(findings) if state == "good" else 1)


def test_disks_and_ports(monkeypatch, tmp_path):
    assert bad(place_findings(runs=tmp_path / "not/there/yet", shared=tmp_path, port=0)) == []
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(
        node_checks,
        "can_listen",
        lambda port: f"port {port} cannot be listened on: Address already in use",
    )
    monkeypatch.setattr(node_checks, "free_bytes", lambda folder: 1000)
    found = bad(place_findings(runs=Path("runs"), shared=tmp_path / "none", port=29500))
    assert found[0] == "disk of runs: 1000 bytes free for runs"
    assert found[1].endswith("none: No such file or directory")
    assert found[2] == "network: port 29500 cannot be listened on: Address already in use"


def test_a_port_in_use_is_reported():
    import socket

    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        assert "cannot be listened on" in node_checks.can_listen(taken.getsockname()[1])


def test_nodes_with_other_versions_are_reported():
    hosts = {f"n{i}": {"torch": "2.13.0", "driver": "570"} for i in range(3)} | {
        "n3": {"torch": "2.13.0", "driver": "550"}
    }
    (finding,) = group_checks.compare_versions(hosts)
    assert (finding.host, finding.text) == ("n3", "driver 550, but 570 on 3 of 4 nodes")
    (finding,) = group_checks.compare_versions({name: hosts[name] for name in ("n2", "n3")})
    assert (finding.host, finding.text) == (
        "all nodes",
        "driver 570 on 1, 550 on 1 nodes: should be the same on all",
    )


def test_nodes_have_their_slurm_names(monkeypatch):
    monkeypatch.setenv("SLURMD_NODENAME", "gpu-7")
    findings = [
        Finding(name="x", state="bad", text="x"),
        Finding(name="y", state="bad", text="y", host=report.ALL_NODES),
    ]
    findings += [
        Finding(name="z", state="warning", text="z", host="gpu-8"),
        Finding(name="u", state="bad", text="u", host="gpu-3"),
    ]
    assert Report(
        findings=findings, device="CPU", nodes=3, ranks_per_node=1, versions={}
    ).bad_nodes == ["gpu-3", "gpu-7"]
    monkeypatch.delenv("SLURMD_NODENAME")
    assert report.host_name() == report.socket.gethostname()


def shared(node, seen):
    """What the first rank of a node found in the shared folder; seen: nodes."""
    return {"wrote": f"f{node}", "problem": None, "seen": [f"f{other}" for other in seen]}


def results(**changes):
    """What eight ranks on four hosts found; changes by rank: `rank2={...}`."""
    found = []
    for rank in range(8):
        rates = {
            "half_flops": 600e12,
            "float32_flops": 3e14,
            "memory_bandwidth": 2.6e12,
            "host_bandwidth": 5e10,
            "host_adamw": 1e9,
        }
        rates |= {"intra_node_bandwidth": 2.8e11, "inter_node_bandwidth": 4e10, "link": 4e10}
        mine = {
            "host": f"n{rank // 2}",
            "gpu": rank % 2,
            "offset": 0.0,
            "sum": True,
            "rates": rates,
            "shared": None if rank % 2 else shared(rank // 2, [0, 1, 2, 3]),
        }
        change = changes.get(f"rank{rank}", {})
        rates |= change.pop("rates", {})
        found.append(mine | change)
    return found


@pytest.mark.parametrize(
    ("changes", "host", "said"),
    [
        (
            {"rank5": {"rates": {"half_flops": 300e12}}},
            "n2",
            "GPU 1 (rank 5) computes at 50% of the median rank",
        ),
        (
            {"rank2": {"rates": {"host_bandwidth": 1e10}}},
            "n1",
            "GPU 0 (rank 2) copies to and from the host at 20%",
        ),
        (
            {"rank6": {"rates": {"link": 1e10}}},
            "n3",
            "GPU 0 (rank 6) exchanges data with other nodes at 25% of the median rank",
        ),
        (
            {"rank1": {"rates": {"intra_node_bandwidth": 1e10}}},
            "n0",
            "GPU 1 (rank 1) runs collectives within its node at 4%",
        ),
        (
            {"rank4": {"offset": -9.0}, "rank5": {"offset": -9.0}},
            "n2",
            "9 s behind the other nodes'",
        ),
        (
            {f"rank{rank}": {"offset": 9.0} for rank in range(2, 8)},
            "n0",
            "9 s behind the other nodes'",
        ),  # by its own clock it is the others
        (
            {"rank4": {"shared": {"wrote": None, "problem": "/x is full", "seen": ["f0"]}}},
            "n2",
            "/x is full",
        ),
        (
            {"rank4": {"shared": shared(2, [2])}},
            "n2",
            "this node and the others do not see within 10 s",
        ),
        (
            {f"rank{rank}": {"shared": shared(rank // 2, [0, 2, 3])} for rank in (0, 4, 6)},
            "n1",
            "this node and the others do not see",
        ),
        (
            {"rank0": {"shared": shared(0, [0])}}
            | {f"rank{rank}": {"shared": shared(rank // 2, [1, 2, 3])} for rank in (2, 4, 6)},
            "n0",
            "this node and the others",
        ),
        (
            {f"rank{rank}": {"offset": rank // 2 // 2 * 9.0} for rank in range(8)},
            "all nodes",
            "n2's is 9 s ahead of n0's",
        ),
        (
            {f"rank{rank}": {"shared": shared(rank // 2, [rank // 2])} for rank in (0, 2, 4, 6)},
            "all nodes",
            "no node sees within 10 s what another one writes",
        ),
        ({"rank3": {"sum": False}}, "n1", "gives a wrong sum"),
        ({f"rank{rank}": {"sum": False} for rank in range(8)}, "all nodes", "gives a wrong sum"),
    ],
)
def test_an_unusual_node_is_reported(changes, host, said):
    found = [
        finding
        for finding in group_checks.judge(results(**changes), cpu=False)
        if finding.state == "bad"
    ]
    assert [finding.host for finding in found] == [host]
    assert found[0].text.startswith(said)


def test_of_two_nodes_neither_is_blamed():
    two = results(
        rank2={"offset": 9.0, "shared": shared(1, [1])},
        rank3={"offset": 9.0},
        rank0={"shared": shared(0, [0])},
    )[:4]
    found = [finding for finding in group_checks.judge(two, cpu=False) if finding.state != "good"]
    assert [(finding.name, finding.state, finding.host) for finding in found] == [
        ("clocks", "bad", "all nodes"),
        ("shared folder", "bad", "all nodes"),
    ]


@pytest.mark.parametrize("nodes", range(1, 10))
def test_every_node_is_measured_on_two_links(nodes):
    rounds = measurements.link_rounds(nodes)
    for pairs in rounds:
        ends = [node for pair in pairs for node in pair]
        assert len(set(ends)) == len(ends), "two at a time"
    links = {frozenset(pair) for pairs in rounds for pair in pairs}
    assert len(links) == sum(map(len, rounds)) == (nodes if nodes > 2 else nodes - 1)
    assert all(sum(node in link for link in links) == min(2, nodes - 1) for node in range(nodes))


@pytest.mark.parametrize("nodes", [3, 4, 5, 8])
def test_a_slow_link_is_distinguished_from_its_neighbours(nodes):
    """What each node measures where one is slow: the better of its links."""
    for slow in range(nodes):
        links = [pair for pairs in measurements.link_rounds(nodes) for pair in pairs]
        best = [
            max(1e9 if slow in pair else 4e10 for pair in links if node in pair)
            for node in range(nodes)
        ]
        ranks = [
            results()[0] | {"host": f"n{node}", "shared": shared(node, range(nodes))}
            for node in range(nodes)
        ]
        for node, one in enumerate(ranks):
            one["rates"] = one["rates"] | {"link": best[node]}
        assert [
            finding.host
            for finding in group_checks.judge(ranks, cpu=False)
            if finding.state == "bad"
        ] == [f"n{slow}"]


def test_rates_are_compared_with_the_plan():
    device = "NVIDIA H100 80GB HBM3"
    rates = group_checks.slowest_rates(results(), source="here") | {"host_adamw": 5e9}

    def against(device, **changes):
        return [
            (f.state, f.text)
            for f in group_checks.compare_with_plan(
                rates | changes, device=device, nodes=4, ranks_per_node=2
            )
        ]

    assert against(device) == against(device, float32_flops=None, host_adamw=None) == []
    text = "2% of the 80 GB/s that the plan assumes"
    slow = [("warning", f"collectives across nodes: 1.2 GB/s, {text}")]
    assert against(device, inter_node_bandwidth=1.2e9) == slow
    assert against("CPU", half_flops=1.0) == against("Tesla X1", half_flops=1.0) == []


def test_equal_ranks_are_fit():
    assert [finding.state for finding in group_checks.judge(results(), cpu=False)] == ["good"]
    assert [f.state for f in group_checks.judge(results(rank4={"offset": 1.0}), cpu=False)] == [
        "warning"
    ]
    slow_core = results(rank5={"rates": {"half_flops": 1e12}})
    assert {f.state for f in group_checks.judge(slow_core, cpu=True)} == {"warning", "good"}


def test_a_folder_that_is_not_shared_is_reported(monkeypatch, tmp_path):
    """Node 0 of three; node 1 writes elsewhere, node 2 cannot write."""
    others = ["other", None]
    monkeypatch.setattr(group_checks.dist, "barrier", lambda group: None)
    monkeypatch.setattr(group_checks, "gather", lambda name, ranks: [name, *others])
    ranks = types.SimpleNamespace(group=None)
    check = functools.partial(group_checks.check_shared, ranks=ranks, first=True, seconds=0.1)
    found = check(tmp_path)
    assert found["seen"] == [found["wrote"]]
    assert list(tmp_path.iterdir()) == [], "its own is taken away"
    (tmp_path / "other").touch()
    assert len(check(tmp_path)["seen"]) == 2
    assert check(tmp_path, first=False) is None
    found = check(tmp_path / "none")
    assert found["problem"] == f"{tmp_path}/none cannot be written to: No such file or directory"
    assert (found["wrote"], found["seen"]) == (None, [])


def test_rates_are_those_of_the_slowest_rank():
    rates = group_checks.slowest_rates(
        results(rank5={"rates": {"half_flops": 500e12}}), source="here"
    )
    assert rates["half_flops"] == 500e12
    assert rates["intra_node_bandwidth"] == 2.8e11
    alone = results()
    for one in alone:
        del one["rates"]["intra_node_bandwidth"]
    assert group_checks.slowest_rates(alone, source="here")["intra_node_bandwidth"] is None


def finding(state, text="x", *, host="n1", name="GPU 3"):
    return Finding(name=name, state=state, text=text, host=host)


@pytest.fixture
def faked(monkeypatch, tmp_path):
    """`launcher doctor` on a machine whose findings are in the list."""
    findings = [finding("good", name="torch")]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        node_checks, "examine", lambda **node: (findings, {"torch": "2.13.0", "gpus": 0})
    )

    def measured(ranks, report):
        rates = group_checks.slowest_rates(results(), source="here")
        return Report(**vars(report) | {"rates": rates})

    monkeypatch.setattr(command, "measured", measured)
    return findings


def test_node_prints_one_line(faked, capsys):
    assert main.main(["doctor", "--node"]) == 0
    assert capsys.readouterr().out.count("\n") == 1
    faked += [finding("warning", "slowed down"), finding("bad", "not free: 40.0 GiB in use")]
    assert main.main(["doctor", "--node"]) == 3
    assert capsys.readouterr().out == "n1 unfit: GPU 3: not free: 40.0 GiB in use\n"


def test_doctor_prints_and_writes_a_report(faked, capsys):
    assert main.main(["doctor", "ranks=2", "--json", "d.json"]) == 0
    printed = capsys.readouterr().out
    assert "  ok    torch  x" in printed
    assert "600 TFLOP/s" in printed
    assert "collectives within a node  280 GB/s" in printed
    assert "Fit to train." in printed
    written = json.loads(Path("d.json").read_text())
    assert written["fit"] is True
    assert written["bad_nodes"] == []
    assert written["rates"]["half_flops"] == 600e12
    faked.append(finding("bad", "not free"))
    assert main.main(["doctor"]) == 3
    assert "Not fit to train: 1 thing is bad" in capsys.readouterr().out
    assert main.main(["doctor", "json=no/folder/d.json"]) == 2
    assert main.main(["doctor", "quick=true"]) == 2
    assert main.main(["doctor", "recipe=fsdp"]) == 2
    assert (
        "recipe=fsdp: not an option of launcher doctor; there are --ranks, --json"
        in capsys.readouterr().err
    )


def test_ranks_that_fail_or_hang_are_a_finding(monkeypatch):
    doctor_report = Report(findings=[], device="CPU", nodes=1, ranks_per_node=2, versions={})
    fails = "import pathlib, json, sys; pathlib.Path(json.loads(sys.argv[-1])['result']).with_name('error_1')"
    fails += ".write_text('RuntimeError: NCCL error\\nTraceback'); sys.exit(1)"
    for program, text in (
        (fails, "RuntimeError: NCCL error"),
        ("import sys; print('Killed'); sys.exit(1)", "Killed"),
    ):
        monkeypatch.setattr(spawn, "TORCHRUN", [sys.executable, "-c", program])
        assert bad(command.measured(2, doctor_report).findings) == [
            f"measuring: the ranks failed: {text}"
        ]
    monkeypatch.setattr(spawn, "TORCHRUN", [sys.executable, "-c", "import time; time.sleep(60)"])
    monkeypatch.setattr(command, "MEASURING_SECONDS", 0.3)
    assert "one of them hangs" in bad(command.measured(2, doctor_report).findings)[0]


def test_equal_findings_are_merged(capsys):
    findings = [finding("good", "2.13", name="torch", host=f"n{i}") for i in range(4)]
    findings += [finding("good", f"{i}0 GiB", name="disk", host=f"n{i}") for i in range(4)]
    findings += [finding("warning", "slow", host=f"n{i}") for i in range(2)] + [
        finding("bad", f"{i} in use", host=f"n{i}") for i in (2, 3)
    ]
    report.print_findings(findings, hosts=True)
    assert [line.split() for line in capsys.readouterr().out.splitlines()] == [
        ["ok", "all", "nodes", "torch", "2.13"],
        ["ok", "all", "nodes", "disk", "n0:", "00", "GiB"],
        ["warn", "2", "nodes", "GPU", "3", "slow"],
        ["BAD", "n2", "GPU", "3", "2", "in", "use"],
        ["BAD", "n3", "GPU", "3", "3", "in", "use"],
    ]
