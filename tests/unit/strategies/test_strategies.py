"""Parts of the strategies that need no second process."""

import json
import os
import socket
import threading
import types

import pytest
import torch
import torch.distributed as dist
from torch import nn

from launcher import train
from launcher.distributed import process_group
from launcher.distributed.environment import Environment
from launcher.errors import TrainingError
from launcher.recipe import schema
from launcher.strategies import activation_checkpointing
from launcher.strategies.activation_checkpointing import checkpoint_blocks, is_checkpointed
from launcher.strategies.activation_offload import ActivationOffload
from launcher.strategies.ddp import Ddp


class Block(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), norm

    def forward(self, x):
        return torch.relu(self.norm(self.linear(x)))


def model_of(*norms):
    return nn.Sequential(*[Block(norm) for norm in norms])


def checkpointed(model, **options):
    settings = schema.ActivationCheckpointing(**options)
    return checkpoint_blocks(model, dict(model.named_children()), settings)


def test_a_block_with_batch_norm_is_left_alone():
    """Its statistics would be updated twice; a control without the rule shows that they are."""
    torch.manual_seed(0)
    x = torch.randn(8, 4)
    model = model_of(nn.BatchNorm1d(4), nn.LayerNorm(4))
    blocks = checkpointed(model)
    assert [is_checkpointed(block) for block in blocks.values()] == [False, True]
    model(x).sum().backward()
    assert int(model[0].norm.num_batches_tracked) == 1
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    control = checkpoint_wrapper(Block(nn.BatchNorm1d(4)))
    control(x).sum().backward()
    assert int(control.norm.num_batches_tracked) == 2


def test_every_nth_block():
    model = model_of(*[nn.LayerNorm(4) for _ in range(5)])
    assert [is_checkpointed(block) for block in checkpointed(model, every_n_blocks=2).values()] == [
        True,
        False,
        True,
        False,
        True,
    ]
    assert [is_checkpointed(block) for block in model] == [True, False, True, False, True], (
        "they stand in the model"
    )


def saved_bytes(model, x):
    """Bytes that the forward pass keeps for the backward pass, without parameters."""
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept = {}

    def pack(tensor):
        if tensor.untyped_storage().data_ptr() not in parameters:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = model(x)
    output.sum().backward()
    return sum(kept.values())


def test_full_keeps_only_inputs_of_blocks():
    x = torch.randn(64, 4)
    plain, full = model_of(*[nn.LayerNorm(4)] * 4), model_of(*[nn.LayerNorm(4)] * 4)
    checkpointed(full)
    assert saved_bytes(full, x) < saved_bytes(plain, x) / 2


def counted_operations(model, x):
    from torch.utils._python_dispatch import TorchDispatchMode

    counts = {}

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            counts[function] = counts.get(function, 0) + 1
            return function(*args, **(kwargs or {}))

    output = model(x)
    with Count():
        output.sum().backward()
    return counts


def test_selective_computes_every_other_product_again():
    class Four(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(
                *[nn.Sequential(nn.Linear(4, 4, bias=False), nn.Tanh()) for _ in range(4)]
            )

        def forward(self, x):
            return self.layers(x)

    x = torch.randn(3, 4, requires_grad=True)
    products = torch.ops.aten.mm.default
    counts = {}
    for mode in (None, "selective", "full"):
        model = nn.Sequential(Four())
        if mode:
            checkpointed(model, mode=mode)
        counts[mode] = counted_operations(model, x)[products]
    assert counts[None] == 8, "two products of each layer's backward pass"
    assert counts["selective"] == 8 + 2
    assert counts["full"] == 8 + 4


def environment(**changes):
    values = {
        "rank": 0,
        "world_size": 2,
        "local_rank": 0,
        "local_world_size": 2,
        "torchrun": True,
        "restart_count": 0,
    }
    return Environment(**values | changes)


@pytest.fixture
def threads(monkeypatch):
    """Four cores, and what the number of threads is set to."""
    seen = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3})
    monkeypatch.setattr(torch, "set_num_threads", seen.append)
    return seen


def test_threads_are_the_ranks_share_of_the_cores(threads, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # torchrun's own doing
    cuda, cpu = torch.device("cuda", 0), torch.device("cpu")
    process_group.set_threads(environment(), device=cuda, cpu_offload=True)
    process_group.set_threads(environment(local_world_size=1), device=cpu, cpu_offload=False)
    process_group.set_threads(environment(local_world_size=8), device=cuda, cpu_offload=True)
    assert threads == [2, 4, 1]
    process_group.set_threads(environment(), device=cuda, cpu_offload=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    process_group.set_threads(environment(), device=cuda, cpu_offload=True)
    assert threads == [2, 4, 1], "nothing to compute on the CPU, or the user's own choice"


def test_bfloat16_on_a_gpu_without_it_names_float16(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    with pytest.raises(ValueError, match="Tesla T4 does not compute in bfloat16; use float16"):
        process_group.check_dtype(torch.device("cuda", 0), torch.bfloat16)
    process_group.check_dtype(torch.device("cuda", 0), torch.float16)
    process_group.check_dtype(torch.device("cpu"), torch.bfloat16)


# Devices


def node(host="n1", gpus=8, ranks=8, build="CUDA 12.8"):
    return process_group.Node(host, gpus, ranks, "2.13.0", build)


@pytest.mark.parametrize(
    ("wanted", "nodes", "kind"),
    [
        ("auto", [node(), node("n2", ranks=4)], "cuda"),
        ("cuda", [node()], "cuda"),
        ("auto", [node(gpus=0, build=None), node("n2", gpus=0, build=None)], "cpu"),
        ("any", [node(gpus=0), node("n2")], "cpu"),
        ("any", [node(), node("n2")], "cuda"),
    ],
)
def test_all_ranks_compute_on_one_kind_of_device(wanted, nodes, kind):
    assert process_group.agree_on_device(wanted, nodes) == (kind, None)


@pytest.mark.parametrize(
    ("wanted", "nodes", "lines"),
    [
        (
            "auto",
            [node(gpus=0)],
            [
                "node n1: torch 2.13.0 is built for CUDA 12.8 and finds no GPU; check the driver (nvidia-smi, "
            ],
        ),
        (
            "auto",
            [node(gpus=0, build="ROCm 6.4")],
            [
                "node n1: torch 2.13.0 is built for ROCm 6.4 and finds no GPU; check the driver (amd-smi, "
            ],
        ),
        (
            "auto",
            [node(), *[node("n2", gpus=4)] * 8],
            ["node n2: 4 GPUs for 8 ranks; start --nproc-per-node 4"],
        ),
        (
            "auto",
            [node(), node("n2", gpus=0, build=None)],
            ["node n2: torch 2.13.0 is built without CUDA or ROCm; install"],
        ),
        (
            "cuda",
            [node(gpus=0, build=None), node("n2", gpus=1)],
            ["node n1: torch 2.13.0 is built without", "node n2: 1 GPUs for 8 ranks"],
        ),
    ],
)
def test_a_rank_without_a_gpu_is_an_error_that_names_the_node(wanted, nodes, lines):
    kind, problem = process_group.agree_on_device(wanted, nodes)
    assert kind is None
    first, *shown, last = problem.splitlines()
    assert first == f"run.device is {wanted}, and not every rank has a GPU:"
    assert [line.strip()[: len(start)] for line, start in zip(shown, lines, strict=True)] == lines
    assert last.endswith("set run.device=cpu")


@pytest.fixture
def gpus(monkeypatch):
    """The number of GPUs that each host's ranks see, by its name: threads stand in for ranks, named HOST-RANK."""
    counts = {}
    host = lambda: threading.current_thread().name.split("-")[0]  # noqa: E731
    monkeypatch.setattr(socket, "gethostname", host)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: counts[host()] > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: counts[host()])
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    return counts


@pytest.mark.parametrize("wanted", ["auto", "cpu"])
@pytest.mark.parametrize("second", [2, 1, 0])
def test_ranks_agree_on_the_device_before_there_is_a_process_group(gpus, second, wanted):
    """Two nodes of two ranks; the second may lack GPUs. A rank of each node used to choose by itself."""
    gpus |= {"n1": 2, "n2": second}
    store, found = dist.HashStore(), {}

    def choose(rank):
        place = environment(rank=rank, world_size=4, local_rank=rank % 2)
        try:
            found[rank] = process_group.choose_device(place, store, wanted)
        except TrainingError as error:
            found[rank] = (error.reason, str(error))

    ranks = [
        threading.Thread(target=choose, args=(rank,), name=f"n{1 + rank // 2}-{rank}")
        for rank in range(4)
    ]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(30)
    if wanted == "cpu":
        assert list(found.values()) == [torch.device("cpu")] * 4
    elif second == 2:
        assert found == {rank: torch.device("cuda", rank % 2) for rank in range(4)}
    else:
        assert len(set(found.values())) == 1
        reason, problem = found[0]
        assert reason == "no_gpu"
        assert "n1" not in problem
        assert "  node n2: " in problem


def test_a_run_without_its_gpu_fails_with_the_reason(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(train, "prepare_cuda", lambda **settings: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    words = ["recipe=quickstart", f"run.dir={tmp_path}", "run.float32_matmul=highest"]
    assert train.main(words) == 1
    printed = capsys.readouterr().err
    assert (
        printed.count(
            f"node {socket.gethostname()}: torch {torch.__version__} is built for CUDA 12.8 and finds no GPU"
        )
        == 1
    )
    assert "Traceback" not in printed
    status = json.loads((tmp_path / "status.json").read_text())
    assert (status["state"], status["reason"]) == ("failed", "no_gpu")
    assert "run.device=cpu" in status["error"]


def test_stop_requests(monkeypatch):
    import signal
    import time

    from launcher.reliability import signals

    ended = []
    monkeypatch.setattr(signals, "end_process", ended.append)
    clock = [100.0]
    monkeypatch.setattr(signals, "time", types.SimpleNamespace(monotonic=lambda: clock[0]))
    before = signal.getsignal(signal.SIGTERM)
    with signals.StopRequest() as stop:
        assert not stop.requested()
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.01)
        assert stop.signal == "SIGTERM"
        clock[0] += 4
        os.kill(os.getpid(), signal.SIGUSR1)
        time.sleep(0.01)
        assert not ended, "the same request, through the agent"
        clock[0] += 2
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.01)
        assert ended == [1]
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_sink_that_fails_is_logged_once_and_not_used_again(messages):
    from launcher.metrics.sinks import OptionalSink

    class Outage:
        writes = 0

        def write(self, record):
            Outage.writes += 1
            raise ConnectionError("the network is gone\nand much more")

        def close(self, state):
            raise AssertionError("not asked any more")

    sink = OptionalSink("wandb", Outage)
    for step in range(3):
        sink.write({"step": step})
    sink.close("finished")
    assert messages() == ["wandb is disabled from now on, training continues: the network is gone"]
    assert Outage.writes == 1

    def refused():
        raise RuntimeError("no API key")

    OptionalSink("wandb", refused).write({"step": 1})
    assert messages()[1] == "wandb is disabled from now on, training continues: no API key"


def test_peak_flops_by_name():
    from launcher.planner.hardware import peak_flops

    assert peak_flops("NVIDIA H100 80GB HBM3") == 989e12
    assert peak_flops("NVIDIA H100 PCIe") == 756e12
    assert peak_flops("NVIDIA H200") == 989e12
    assert peak_flops("NVIDIA A100-SXM4-80GB") == 312e12
    assert peak_flops("NVIDIA L40S") == 362e12
    assert peak_flops("NVIDIA GeForce RTX 4090") == 165e12
    assert peak_flops("NVIDIA L40") == 181e12
    assert peak_flops("NVIDIA GeForce RTX 4090 Laptop GPU") is None


@pytest.fixture
def gloo_group():
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


def test_ddp_does_not_time_itself_after_ten_steps(gloo_group):
    """Its timers wait for the device. By default they do in every 100th step too."""
    ranks = process_group.DataParallel(
        rank=0, size=1, group=torch.distributed.group.WORLD, device=torch.device("cpu")
    )
    wrapped = Ddp(
        nn.Linear(2, 2),
        schema.Strategy(kind="ddp", mixed_precision=None),
        ranks=ranks,
        init_fn=lambda *_: None,
    )
    for _ in range(101):
        wrapped.model(torch.ones(1, 2)).sum().backward()
    assert wrapped.model._get_ddp_logging_data()["iteration"] == 10


# Activation offload, with copies within host memory that are written down


class RecordedOffload(ActivationOffload):
    device_type = "cpu"

    def __init__(self):
        super().__init__()
        self.events, self.buffers = [], 0

    def _host_memory(self, size):
        self.buffers += 1
        return torch.empty(size, dtype=torch.uint8)

    def _copy(self, source, target):
        target.copy_(source)
        self.events.append("copy")
        return len(self.events)

    def _wait(self, event):
        self.events.append(f"wait {event}")


@pytest.fixture
def offload(monkeypatch):
    recorded = RecordedOffload()
    monkeypatch.setattr(activation_checkpointing, "ActivationOffload", lambda: recorded)
    return recorded


def gradients_of(model, x):
    model(x).square().sum().backward()
    found = [parameter.grad for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.grad = None
    return found


def test_offloaded_inputs_come_back_one_block_ahead(offload):
    """All copies are on one stream: a wait for the n-th event covers those before it."""
    torch.manual_seed(0)
    model, x = model_of(*[nn.LayerNorm(4)] * 3), torch.randn(64, 4)
    expected = gradients_of(model, x)
    checkpointed(model, offload_to_cpu=True)
    assert all(map(torch.equal, gradients_of(model, x), expected))
    assert offload.events == [
        "copy",  # the first block's input, event 1
        "wait 1",  # before the second block, which frees it
        "copy",  # event 3
        "wait 3",
        "copy",  # event 5: the last input, which stays on the device
        "wait 5",  # the last block's backward pass
        "copy",  # event 7: the second input comes back beside it
        "wait 7",
        "copy",  # event 9
        "wait 9",
    ]
    assert offload.buffers == 3
    assert all(map(torch.equal, gradients_of(model, x), expected))
    assert offload.buffers == 3, "host memory is reused in the next micro-batch"
    gradients_of(model, torch.randn(128, 4))
    assert offload.buffers == 6, "a longer micro-batch needs larger buffers"
    gradients_of(model, x)
    assert offload.buffers == 6


def test_a_forward_pass_without_backward_pass_leaves_nothing_behind(offload):
    model, x = model_of(*[nn.LayerNorm(4)] * 3), torch.randn(64, 4)
    expected = gradients_of(model, x)
    checkpointed(model, offload_to_cpu=True)
    model(x)
    model(x)
    assert all(map(torch.equal, gradients_of(model, x), expected))
    assert offload._inputs == []
    with torch.no_grad():
        events = len(offload.events)
        model(x)
        assert len(offload.events) == events, "nothing is saved"


def test_arguments_of_all_blocks_stay_on_the_device(offload):
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x, scale, *, shift):
            return torch.tanh(self.linear(x)) * scale + shift

    model, scale, x = nn.Sequential(Scaled(), Scaled()), torch.randn(4), torch.randn(8, 4)
    checkpointed(model, offload_to_cpu=True)
    for block in model:
        x = block(x, scale, shift=scale)
    x.sum().backward()
    assert offload.buffers == 2, "one for the input of each block"
