"""Single-process tests of strategies, checkpointing, devices, stop requests and sinks."""

import json
import os
import signal
import socket
import threading
import types
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils._python_dispatch import TorchDispatchMode

from launcher import train
from launcher.distributed import process_group
from launcher.distributed.environment import Environment
from launcher.distributed.hardware import peak_flops
from launcher.errors import RecipeError, TrainingError
from launcher.metrics.sinks import OptionalSink
from launcher.optimizers.optimizer import make_optimizer
from launcher.recipe import schema
from launcher.reliability import signals
from launcher.strategies import activation_checkpointing
from launcher.strategies.activation_checkpointing import checkpoint_blocks, is_checkpointed
from launcher.strategies.activation_offload import ActivationOffload
from launcher.strategies.ddp import Ddp
from launcher.training.setup import prepare_model


class Block(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), norm

    def forward(self, x):
        return torch.relu(self.norm(self.linear(x)))


def layers(number):
    return nn.Sequential(*[Block(nn.LayerNorm(4)) for _ in range(number)])


def checkpointed(model, **options):
    settings = schema.ActivationCheckpointing(**options)
    return checkpoint_blocks(model, dict(model.named_children()), settings)


def test_blocks_with_batch_norm_are_not_checkpointed():
    """Checkpointing would update the statistics twice, as the control shows."""
    x, model = torch.randn(8, 4), nn.Sequential(Block(nn.BatchNorm1d(4)), Block(nn.LayerNorm(4)))
    assert [is_checkpointed(block) for block in checkpointed(model).values()] == [False, True]
    control = checkpoint_wrapper(Block(nn.BatchNorm1d(4)))
    for module, updates in ((model, 1), (control, 2)):
        module(x).sum().backward()
        norm = next(m for m in module.modules() if isinstance(m, nn.BatchNorm1d))
        assert int(norm.num_batches_tracked) == updates


def test_every_nth_block_is_checkpointed():
    model = layers(5)
    blocks = checkpointed(model, every_n_blocks=2)
    assert [is_checkpointed(block) for block in blocks.values()] == [True, False] * 2 + [True]
    assert list(blocks.values()) == list(model), "the model contains the wrapped blocks"


def saved_bytes(model, x):
    """Return the bytes saved for the backward pass, without parameters."""
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = model(x)
    output.sum().backward()
    for parameter in model.parameters():
        kept.pop(parameter.untyped_storage().data_ptr(), None)
    return sum(kept.values())


def test_full_mode_saves_only_block_inputs():
    x, plain, full = torch.randn(64, 4), layers(4), layers(4)
    checkpointed(full)
    assert saved_bytes(full, x) < saved_bytes(plain, x) / 2


@pytest.mark.parametrize(("mode", "recomputed"), [(None, 0), ("selective", 2), ("full", 4)])
def test_selective_mode_recomputes_every_other_product(mode, recomputed):
    counts = Counter()

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            counts[function] += 1
            return function(*args, **(kwargs or {}))

    four = [layer for _ in range(4) for layer in (nn.Linear(4, 4, bias=False), nn.Tanh())]
    model = nn.Sequential(nn.Sequential(*four))
    if mode:
        checkpointed(model, mode=mode)
    output = model(torch.randn(3, 4, requires_grad=True))
    with Count():
        output.sum().backward()
    backward_products = 8  # two products in the backward pass of each layer
    assert counts[torch.ops.aten.mm.default] == backward_products + recomputed


def environment(**changes):
    values = {"rank": 0, "world_size": 2, "local_rank": 0, "local_world_size": 2}
    return Environment(torchrun=True, restart_count=0, **values | changes)


def test_local_ranks_share_the_cpu_threads(monkeypatch):
    threads = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3})
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # set by torchrun
    cuda, cpu = torch.device("cuda", 0), torch.device("cpu")
    process_group.set_threads(environment(), device=cuda, cpu_offload=True)
    process_group.set_threads(environment(local_world_size=1), device=cpu, cpu_offload=False)
    process_group.set_threads(environment(local_world_size=8), device=cuda, cpu_offload=True)
    assert threads == [2, 4, 1]
    process_group.set_threads(environment(), device=cuda, cpu_offload=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    process_group.set_threads(environment(), device=cuda, cpu_offload=True)
    assert threads == [2, 4, 1], (
        "unchanged without work on the CPU, or if the user sets OMP_NUM_THREADS"
    )


def test_unsupported_bfloat16_error_suggests_float16(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    with pytest.raises(ValueError, match="Tesla T4 does not compute in bfloat16; use float16"):
        process_group.check_dtype(torch.device("cuda", 0), torch.bfloat16)
    process_group.check_dtype(torch.device("cuda", 0), torch.float16)
    process_group.check_dtype(torch.device("cpu"), torch.bfloat16)


# Devices


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


def test_stop_requests(monkeypatch):
    ended, clock = [], [100.0]
    monkeypatch.setattr(signals, "end_process", ended.append)
    monkeypatch.setattr(signals, "time", types.SimpleNamespace(monotonic=lambda: clock[0]))

    def send(number):
        os.kill(os.getpid(), number)
        stop.look()

    before = signal.getsignal(signal.SIGTERM)
    with signals.StopRequest() as stop:
        assert not stop.requested()
        send(signal.SIGTERM)
        assert stop.signal == "SIGTERM"
        send(signal.SIGINT)
        assert not ended, "a signal within two seconds is the same request"
        clock[0] += 3
        send(signal.SIGTERM)
        send(signal.SIGUSR1)
        assert not ended, "the run is saving"
        send(signal.SIGINT)
        assert ended == [1], "a second SIGINT ends it at once"
    assert signal.getsignal(signal.SIGTERM) is before


def test_failing_sink_is_logged_once_and_disabled(messages):
    class Outage:
        writes = 0

        def write(self, record):
            Outage.writes += 1
            raise ConnectionError("the network is gone\nand much more")

        def close(self, state):
            raise AssertionError("a disabled sink must not be closed")

    def refused():
        raise RuntimeError("no API key")

    sink = OptionalSink("wandb", Outage)
    for step in range(3):
        sink.write({"step": step})
    sink.close("finished")
    OptionalSink("wandb", refused).write({"step": 1})
    assert Outage.writes == 1
    disabled = "wandb is disabled from now on, training continues:"
    assert messages() == [f"{disabled} the network is gone", f"{disabled} no API key"]


def test_peak_flops_by_name():
    peaks = {"H100 80GB HBM3": 989, "H100 PCIe": 756, "H200": 989, "A100-SXM4-80GB": 312}
    peaks |= {"L40S": 362, "L40": 181, "GeForce RTX 4090": 165}
    for name, teraflops in peaks.items():
        assert peak_flops(f"NVIDIA {name}") == teraflops * 1e12
    assert peak_flops("NVIDIA GeForce RTX 4090 Laptop GPU") is None


@pytest.fixture
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield process_group.DataParallel(
        rank=0, size=1, group=dist.group.WORLD, device=torch.device("cpu")
    )
    dist.destroy_process_group()


def test_ddp_timers_stop_after_ten_steps(one_rank):
    """The timers wait for the device. By default DDP also uses them in every 100th step."""
    single = {"param_dtype": torch.float32, "ranks": one_rank, "init_fn": lambda *_: None}
    wrapped = Ddp(nn.Linear(2, 2), **single)
    for _ in range(101):
        wrapped.model(torch.ones(1, 2)).sum().backward()
    assert wrapped.model._get_ddp_logging_data()["iteration"] == 10


class Scaled(nn.Module):
    """A model with a parameter of no dimensions."""

    def __init__(self):
        super().__init__()
        self.inner, self.scale = nn.Linear(4, 4), nn.Parameter(torch.tensor(2.0))

    def forward(self, x):
        return self.scale * self.inner(x)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"state_dtype": "int8"},
        {"name": "sgd"},
        {"name": "adafactor"},
        {"name": "muon", "momentum": 0.95},
    ],
    ids=str,
)
def test_scalars_are_trained_with_a_sharded_optimizer(one_rank, options):
    """As without sharding: they are updated, and their gradients are cleared."""
    results = []
    for shards in (False, True):
        torch.manual_seed(0)
        model = Scaled()
        wrapped = Ddp(
            model,
            param_dtype=torch.float32,
            shard_optimizer=shards,
            ranks=one_rank,
            init_fn=lambda *_: None,
        )
        settings = schema.Optimizer(learning_rate=0.1, **options)
        mesh = wrapped.optimizer_mesh
        made = make_optimizer(model, settings, optimizer_mesh=mesh, blocks=[model.inner])
        vars(made).update(grad_scale=None, found_inf=torch.zeros(()))
        norms = []
        for _ in range(3):
            wrapped.model(torch.ones(2, 4)).square().sum().backward()
            norms.append(wrapped.grad_norm().item())
            made.step()
            made.zero_grad(set_to_none=True)
            assert model.scale.grad is None
        results.append((norms, model.scale.item(), model.inner.weight.detach().clone()))
    (norms, scale, weight), (norms_sharded, scale_sharded, weight_sharded) = results
    assert norms_sharded == pytest.approx(norms)
    assert scale_sharded == pytest.approx(scale)
    assert abs(scale - 2.0) > 0.01
    torch.testing.assert_close(weight_sharded, weight)


def test_fsdp_names_scalars_before_the_first_step():
    recipe = schema.Recipe(
        run=schema.Run(name="scalars", max_steps=1),
        model=schema.Model(builder=f"{__name__}:Scaled"),
        data=schema.Data(builder=f"{__name__}:Scaled"),
        batch=schema.Batch(global_batch_size=1, micro_batch_size=1),
    )
    message = "strategy.kind: fsdp cannot shard parameters without dimensions: scale; give each "
    with pytest.raises(RecipeError, match=message):
        prepare_model(recipe, device=torch.device("cpu"))


# Activation offload. The copies stay in host memory and are recorded.


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
    return torch.autograd.grad(model(x).square().sum(), list(model.parameters()))


def test_offloaded_inputs_return_one_block_ahead(offload):
    """All copies use one stream, so a wait for event n covers all earlier events."""
    model, x = layers(3), torch.randn(64, 4)
    expected = gradients_of(model, x)
    checkpointed(model, offload_to_cpu=True)
    assert all(map(torch.equal, gradients_of(model, x), expected))
    assert offload.events == [
        *("copy", "wait 1"),  # input of the first block; the second block waits and frees it
        *("copy", "wait 3", "copy"),  # event 5: the last input, which stays on the device
        *("wait 5", "copy"),  # backward pass of the last block; the second input is copied back
        *("wait 7", "copy", "wait 9"),
    ]
    assert offload.buffers == 3
    assert all(map(torch.equal, gradients_of(model, x), expected))
    assert offload.buffers == 3, "host memory is reused in the next micro-batch"
    gradients_of(model, torch.randn(128, 4))
    assert offload.buffers == 6, "a longer micro-batch needs larger buffers"
    gradients_of(model, x)
    assert offload.buffers == 6
    for _ in range(2):
        model(x)  # a forward pass without a backward pass must leave no inputs
    assert all(map(torch.equal, gradients_of(model, x), expected))
    assert offload._inputs == []
    events = len(offload.events)
    with torch.no_grad():
        model(x)
    assert len(offload.events) == events, "nothing is offloaded without gradients"


def test_shared_block_arguments_stay_on_the_device(offload):
    class Scaled(Block):
        def forward(self, x, scale, *, shift):  # type: ignore[override]
            return super().forward(x) * scale + shift

    model = nn.Sequential(*[Scaled(nn.LayerNorm(4)) for _ in range(2)])
    scale, x = torch.randn(4), torch.randn(8, 4)
    checkpointed(model, offload_to_cpu=True)
    for block in model:
        x = block(x, scale, shift=scale)
    x.sum().backward()
    assert offload.buffers == 2, "one buffer for the input of each block"
