"""Choice of the device, its dtypes and peak, and the CPU threads of a rank."""

import json
import os
import socket
import subprocess
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from launcher import train
from launcher.distributed import process_group
from launcher.distributed.environment import Environment
from launcher.distributed.hardware import peak_flops
from launcher.errors import TrainingError


def environment(**changes):
    values = {"rank": 0, "world_size": 2, "local_rank": 0, "local_world_size": 2}
    return Environment(torchrun=True, restart_count=0, **values | changes)


def test_local_ranks_share_the_cpu_threads(monkeypatch):
    threads = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3})
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # set by torchrun
    cuda, cpu = torch.device("cuda", 0), torch.device("cpu")
    process_group.prepare_cpu(environment(), device=cuda, cpu_offload=True)
    process_group.prepare_cpu(environment(local_world_size=1), device=cpu, cpu_offload=False)
    process_group.prepare_cpu(environment(local_world_size=8), device=cuda, cpu_offload=True)
    assert threads == [2, 4, 1]
    process_group.prepare_cpu(environment(), device=cuda, cpu_offload=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    process_group.prepare_cpu(environment(), device=cuda, cpu_offload=True)
    assert threads == [2, 4, 1], (
        "unchanged without work on the CPU, or if the user sets OMP_NUM_THREADS"
    )
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with subprocess.Popen(["sleep", "120"], env={**os.environ, "OMP_NUM_THREADS": "1"}) as agent:
        started_with = Path(f"/proc/{agent.pid}/environ")
        while not started_with.read_bytes():  # the kernel shows it a moment after the start
            time.sleep(0.01)
        mine = environment(parent=agent.pid)
        process_group.prepare_cpu(mine, device=cpu, cpu_offload=False)
        agent.kill()
    assert threads == [2, 4, 1], "torchrun was started with it"
    alone = replace(environment(), torchrun=False)
    process_group.prepare_cpu(alone, device=cpu, cpu_offload=False)
    assert threads == [2, 4, 1], "without torchrun only the user can set it"


def test_unsupported_bfloat16_error_suggests_float16(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    with pytest.raises(ValueError, match="Tesla T4 does not compute in bfloat16; use float16"):
        process_group.check_dtype(torch.device("cuda", 0), torch.bfloat16)
    process_group.check_dtype(torch.device("cuda", 0), torch.float16)
    process_group.check_dtype(torch.device("cpu"), torch.bfloat16)


def node(host="n1", gpus=8, ranks=8, build="CUDA 12.8"):
    return process_group.Node(host, gpus, ranks, "2.13.0", build)


CPU_NODE = node(gpus=0, build=None)


@pytest.mark.parametrize(
    ("wanted", "nodes", "kind"),
    [
        ("auto", [node(), node("n2", ranks=4)], "cuda"),
        ("cuda", [node()], "cuda"),
        ("auto", [CPU_NODE, node("n2", gpus=0, build=None)], "cpu"),
        ("any", [node(gpus=0), node("n2")], "cpu"),
        ("any", [node(), node("n2")], "cuda"),
    ],
)
def test_all_ranks_use_one_device_type(wanted, nodes, kind):
    assert process_group.agree_on_device(wanted, nodes) == (kind, None)


NO_GPU_FOUND = "node n1: torch 2.13.0 is built for {} and finds no GPU; check the driver ({}, "
ROCM_NODE = node(gpus=0, build="ROCm 6.4")
NO_GPU_BUILD = "node n1: torch 2.13.0 is built without CUDA or ROCm; install"
FOUR_GPU_NODES = [node("n2", gpus=4)] * 8


@pytest.mark.parametrize(
    ("wanted", "nodes", "lines"),
    [
        ("auto", [node(gpus=0)], [NO_GPU_FOUND.format("CUDA 12.8", "nvidia-smi")]),
        ("auto", [ROCM_NODE], [NO_GPU_FOUND.format("ROCm 6.4", "amd-smi")]),
        (
            "auto",
            [node(), *FOUR_GPU_NODES],
            ["node n2: 4 GPUs for 8 ranks; start --nproc-per-node 4"],
        ),
        ("auto", [node("n2"), CPU_NODE], [NO_GPU_BUILD]),
        ("cuda", [CPU_NODE, node("n2", gpus=1)], [NO_GPU_BUILD, "node n2: 1 GPUs for 8 ranks"]),
    ],
)
def test_error_names_the_node_without_a_gpu(wanted, nodes, lines):
    kind, problem = process_group.agree_on_device(wanted, nodes)
    assert kind is None
    first, *shown, last = problem.splitlines()
    assert first == f"run.device is {wanted}, and not every rank has a GPU:"
    assert [line.strip()[: len(start)] for line, start in zip(shown, lines, strict=True)] == lines
    assert last.endswith("set run.device=cpu")


@pytest.mark.parametrize("wanted", ["auto", "cpu"])
@pytest.mark.parametrize("second", [2, 1, 0])
def test_ranks_agree_on_device_without_a_process_group(monkeypatch, second, wanted):
    """Two nodes of two ranks. The second may lack GPUs, and must not choose a device on its own."""
    gpus = {"n1": 2, "n2": second}
    host = lambda: threading.current_thread().name.split("-")[0]  # noqa: E731 (HOST-RANK)
    monkeypatch.setattr(socket, "gethostname", host)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus[host()] > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus[host()])
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    store, found = dist.HashStore(), dict[int, Any]()

    def choose(rank):
        rank_environment = environment(rank=rank, world_size=4, local_rank=rank % 2)
        try:
            found[rank] = process_group.choose_device(rank_environment, store, wanted)
        except TrainingError as error:
            found[rank] = (error.reason, str(error))

    names = [f"n{1 + rank // 2}-{rank}" for rank in range(4)]
    ranks = [threading.Thread(target=choose, args=(i,), name=n) for i, n in enumerate(names)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(30)
    if wanted == "cpu":
        assert list(found.values()) == [torch.device("cpu")] * 4
    elif second == 2:
        assert found == {rank: torch.device("cuda", rank % 2) for rank in range(4)}
    else:
        ((reason, problem),) = set(found.values())
        assert reason == "no_gpu"
        assert "n1" not in problem
        assert "  node n2: " in problem


def test_run_without_gpu_fails_with_reason_no_gpu(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(train, "prepare_cuda", lambda **settings: None)
    monkeypatch.setattr(train, "prepare_nccl", lambda *log, **settings: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    arguments = ["recipe=quickstart", f"run.dir={tmp_path}", "run.float32_matmul=highest"]
    assert train.main(arguments) == 1
    printed, prefix = (
        capsys.readouterr().err,
        f"node {socket.gethostname()}: torch {torch.__version__}",
    )
    assert printed.count(f"{prefix} is built for CUDA 12.8 and finds no GPU") == 1
    assert "Traceback" not in printed
    status = json.loads((tmp_path / "status.json").read_text())
    assert (status["state"], status["reason"]) == ("failed", "no_gpu")
    assert "run.device=cpu" in status["error"]


def test_peak_flops_by_name():
    peaks = {"H100 80GB HBM3": 989, "H100 PCIe": 756, "H200": 989, "A100-SXM4-80GB": 312}
    peaks |= {"L40S": 362, "L40": 181, "GeForce RTX 4090": 165}
    for name, teraflops in peaks.items():
        assert peak_flops(f"NVIDIA {name}") == teraflops * 1e12
    assert peak_flops("NVIDIA GeForce RTX 4090 Laptop GPU") is None


def test_deterministic_runs_do_not_fill_new_tensors(monkeypatch):
    monkeypatch.setattr(torch, "use_deterministic_algorithms", lambda mode: None)
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    process_group.set_numerics(deterministic=True, float32_matmul="highest")
    assert torch.utils.deterministic.fill_uninitialized_memory is False  # type: ignore[attr-defined]
