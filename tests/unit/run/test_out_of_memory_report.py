"""Tests of the out-of-memory report: its memory inventory and its text."""

import dataclasses
import io
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from launcher.console import bytes_as_text
from launcher.distributed import host_memory
from launcher.distributed.environment import Environment
from launcher.errors import TrainingError
from launcher.models.micro_batch import MicroBatch
from launcher.recipe.schema import Batch
from launcher.reliability.causes import ran_out_of_memory
from launcher.reliability.failures import FailureWatch
from launcher.reliability.json_files import read_jsonl
from launcher.reliability.progress import Progress
from launcher.reliability.run_directory import RunFolder
from launcher.run import out_of_memory
from launcher.run.out_of_memory import (
    DeviceMemory,
    MemoryPostMortem,
    requested_bytes,
    take_inventory,
)
from tests.unit.planner.example_plans import (
    AUTO_RECIPE,
    GIB,
    RECIPE,
    configuration,
    example_plan,
    example_search,
    machine,
)

CUDA_TEXT = (
    "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 79.10 GiB of "
    "which 1.00 GiB is free."
)
CPU_TEXT = (
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you "
    "tried to allocate 4096 bytes."
)


@pytest.mark.parametrize(
    ("error", "size"),
    [
        (torch.OutOfMemoryError(CUDA_TEXT), round(2.5 * GIB)),
        (RuntimeError(CPU_TEXT), 4096),
        (MemoryError("Unable to allocate 1.5 MiB for an array with shape (3,)"), 3 * 2**19),
        (MemoryError(), None),
        (RuntimeError("CUDA error: out of memory"), None),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`"), None),
    ],
)
def test_out_of_memory_errors_are_recognized(error, size):
    assert ran_out_of_memory(error)
    assert requested_bytes(error) == size


def test_other_errors_are_not_out_of_memory():
    for error in (ValueError, TrainingError):
        assert not ran_out_of_memory(error("out of memory"))
    assert not ran_out_of_memory(RuntimeError("shape mismatch"))
    assert not ran_out_of_memory(OSError(28))


def test_cpu_allocator_error_is_recognized():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**61, dtype=torch.uint8)
    assert ran_out_of_memory(caught.value)
    assert requested_bytes(caught.value) == 2**61


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 32, bias=False)

    def forward(self, x):
        raise torch.OutOfMemoryError(CUDA_TEXT)


def trained():
    model = nn.Sequential(nn.Linear(8, 8, bias=False), Block())
    optimizer = torch.optim.AdamW(model.parameters())
    model[0](torch.ones(1, 8)).sum().backward()
    optimizer.step()
    return model, optimizer


def test_each_storage_is_counted_once():
    model, optimizer = trained()
    model.register_parameter("tied", model[0].weight)
    found = take_inventory(model, optimizer, None, buckets=False, requested=2**40)
    assert found["parameters"] == 4 * (8 * 8 + 8 * 32)
    assert found["gradients"] == 4 * 8 * 8
    assert 0 <= found["optimizer"] - 2 * found["gradients"] <= 64, "two moments and a step count"
    assert 2**24 < found["process"] - 2**40 < 2**40
    found = take_inventory(model, optimizer, None, buckets=True, requested=0)
    assert found["gradients"] == found["parameters"]


@pytest.fixture(autouse=True)
def idle_gpu(monkeypatch):
    idle = DeviceMemory(0, 0, 0, 80 * GIB)
    monkeypatch.setattr(out_of_memory, "gpu_memory", lambda: idle)


def environment(**changes):
    known = {"rank": 0, "world_size": 8, "local_rank": 0, "local_world_size": 8, "torchrun": True, "restart_count": 0}  # fmt: skip
    return Environment(**known | changes)


def examine_failure(
    tmp_path, *, restarts_smaller=False, restarts_left=0, phase="forward", on=None, recipe=RECIPE
):
    post_mortem = MemoryPostMortem(
        AUTO_RECIPE if restarts_smaller else recipe,
        environment(rank=1, restarts_left=restarts_left),
        RunFolder(tmp_path),
    )
    post_mortem.resolved(recipe, on or machine())
    model, optimizer = trained()
    post_mortem.built(model, optimizer)
    micro_batch = MicroBatch(inputs={"input_ids": torch.ones(4, 8)})
    with pytest.raises(torch.OutOfMemoryError) as caught:
        model(micro_batch.inputs["input_ids"])
    return post_mortem.examine(caught.value, step=2, phase=phase, micro_batch=2)


def test_report_names_step_phase_and_module(tmp_path):
    account = examine_failure(tmp_path)
    assert account.message.splitlines()[:2] == [
        "rank 1 of 8 ran out of GPU memory in step 3: in the forward pass of micro-batch 2 of 2 (input_ids 4 x 8), in 1",
        "it requested 2.5 GiB; of 80.0 GiB, 80.0 GiB were free, and 0 bytes reserved by the allocator in pieces too small",
    ]
    expected = {"micro_batch_size": 4, "device": "H100", "sequence_length": 4096}
    assert account.noted.items() >= expected.items()
    assert examine_failure(tmp_path, phase="checkpoint").noted == {}, (
        "a smaller micro-batch would not help in a checkpoint"
    )


def suggestion(overrides, needed, speed):
    plan = SimpleNamespace(fits=True, traced=True, needed=needed)
    return SimpleNamespace(overrides=overrides, plan=plan, tokens_per_second=speed)


def explain_with(monkeypatch, account, plan=None, *suggestions):
    """Return the conclusion of the report, and the memory limit of each search."""
    limits = []

    def search_configurations(recipe, machine, *, traced):
        limits.append(machine.memory)
        return SimpleNamespace(configurations=suggestions)

    def make_plan(recipe, machine):
        if plan is None:
            raise TrainingError("planning took more than 60 s")
        return dataclasses.replace(plan, machine=machine)

    monkeypatch.setattr(
        out_of_memory, "run_in_process", lambda seconds, task, *arguments: task(*arguments)
    )
    monkeypatch.setattr(out_of_memory, "make_plan", make_plan)
    monkeypatch.setattr(out_of_memory, "search_configurations", search_configurations)
    return account.explain(60), limits


@pytest.fixture
def on_gpu(monkeypatch, tmp_path):
    """Return a function that examines a rank with the given memory use in GiB, of 80 GiB."""

    def examine(*, allocated, reserved, used, **settings):
        sizes = [round(size * GIB) for size in (allocated, reserved, used, 80)]
        states = {name: round(size * GIB) for name, size in STATE_SIZES.items()}
        monkeypatch.setattr(out_of_memory, "gpu_memory", lambda: DeviceMemory(*sizes))
        monkeypatch.setattr(out_of_memory, "_states", lambda *_: (states, 0))
        return examine_failure(tmp_path, **settings)

    return examine


STATE_SIZES = {"parameters": 3.74, "gradients": 3.74, "optimizer": 7.48}


def test_report_compares_memory_with_plan_and_suggests(on_gpu, monkeypatch):
    account = on_gpu(allocated=62, reserved=70, used=71)
    assert account.message.splitlines()[1] == (
        "it requested 2.5 GiB; of 80.0 GiB, 9.0 GiB were free, and 8.0 GiB reserved by the "
        "allocator in pieces too small"
    )
    text, limits = explain_with(
        monkeypatch,
        account,
        example_plan(),
        suggestion(["batch.micro_batch_size=2"], 40 * GIB, 1000.0),
        suggestion(["activation_checkpointing={mode: full}"], 30 * GIB, 750.0),
    )
    plan = example_plan()
    assert limits == [pytest.approx(plan.needed - 0.03 * plan.tensors)]
    assert [" ".join(line.split()) for line in text.splitlines()] == [
        "now by plan",
        "parameters 3.7 GiB 3.7 GiB",
        "gradients 3.7 GiB 3.7 GiB",
        "optimizer state 7.5 GiB 7.5 GiB",
        "all other tensors, with the request 49.5 GiB 25.8 GiB <- 23.7 GiB beyond the plan",
        "reserved by the allocator, not in use 8.0 GiB 2.1 GiB <- 5.9 GiB beyond the plan",
        "driver, communicators, other processes 1.0 GiB 1.2 GiB",
        "what fits by plan, the fastest first, as overrides:",
        "batch.micro_batch_size=2 # 40.0 GiB a rank",
        "activation_checkpointing={mode: full} # 30.0 GiB a rank, 75% of the first's speed",
    ]


def test_report_names_other_processes_and_oversized_plans(on_gpu, monkeypatch):
    account = on_gpu(allocated=40, reserved=42, used=75)
    text, _ = explain_with(monkeypatch, account, example_plan())
    rows = [" ".join(line.split()) for line in text.splitlines()]
    beyond = "driver, communicators, other processes 33.0 GiB 1.2 GiB <- 31.8 GiB beyond the plan"
    assert beyond in rows
    assert "no known configuration needs less on these devices" in text
    small = on_gpu(allocated=39, reserved=39, used=40, on=machine(memory=40 * GIB))
    text, _ = explain_with(monkeypatch, small, example_plan())
    assert "the plan is 46.9 GiB a rank, and there are 40.0 GiB: the recipe does not fit" in text


def test_inventory_is_reported_without_a_plan(tmp_path, monkeypatch):
    text, _ = explain_with(monkeypatch, examine_failure(tmp_path))
    assert "parameters" in text
    assert "by plan" not in text
    assert "what would fit is not known: planning took more than 60 s" in text


def test_restart_with_smaller_micro_batch_skips_the_plan(tmp_path, monkeypatch):
    account = examine_failure(tmp_path, restarts_smaller=True, restarts_left=1)
    text, limits = explain_with(monkeypatch, account, example_plan())
    assert not limits
    assert text.endswith(
        "batch.micro_batch_size is auto: the next start takes a smaller one, and resumes from the last checkpoint"
    )
    _, limits = explain_with(
        monkeypatch, examine_failure(tmp_path, restarts_smaller=True), example_plan()
    )
    assert limits, "no restart is left, so the user needs the plan"
    _, limits = explain_with(
        monkeypatch, examine_failure(tmp_path, restarts_left=1), example_plan()
    )
    assert limits, "the restart keeps the micro-batch size and runs out of memory again"
    smallest = dataclasses.replace(RECIPE, batch=Batch(global_batch_size=64, micro_batch_size=1))
    account = examine_failure(tmp_path, restarts_smaller=True, restarts_left=1, recipe=smallest)
    text, limits = explain_with(monkeypatch, account, example_plan())
    assert limits, "there is no smaller micro-batch"
    assert "is auto" not in text
    assert account.noted["micro_batch_size"] == 1


def test_process_killed_by_the_kernel(tmp_path, monkeypatch):
    post_mortem = MemoryPostMortem(AUTO_RECIPE, environment(), RunFolder(tmp_path))
    assert post_mortem.killed("rank 3 of 8", 6) is None, "the machine is not known yet"
    post_mortem.resolved(RECIPE, machine(host_memory=512 * GIB))
    account = post_mortem.killed("rank 3 of 8", 6)
    killed = "rank 3 of 8 was ended in step 7 by the kernel: host memory ran out"
    assert account.message.startswith(killed)
    assert account.noted == {}, "a smaller micro-batch does not free host memory"
    text, _ = explain_with(monkeypatch, account, example_plan())
    assert "the plan of a node is 104.0 GiB of host memory, and a node has 512.0 GiB" in text


def test_suggestions_need_less_than_the_failed_recipe(monkeypatch):
    limits = []

    def result(recipe, machine, **_):
        limits.append(machine.memory)
        return SimpleNamespace(configurations=())

    def limit(plan, measured=None, outside=0):
        monkeypatch.setattr(out_of_memory, "make_plan", lambda recipe, machine: plan)
        rows = dict.fromkeys(("parameters", "gradients", "optimizer", "others", "unused"), 0)
        out_of_memory.explain(RECIPE, plan.machine, "", rows | {"outside": outside}, measured)
        return limits[-1]

    monkeypatch.setattr(out_of_memory, "search_configurations", result)
    plan, large = example_plan(), example_plan(3.0)
    less = plan.needed - 0.03 * plan.tensors
    assert limit(plan) == pytest.approx(less, abs=2), "the recipe failed although its plan fits"
    assert limit(large, measured=large.tensors) == 80 * GIB
    half = large.context + (80 * GIB - large.context) / 2
    assert limit(large, measured=2 * large.tensors) == pytest.approx(half, abs=2)
    other_process = large.context + 30 * GIB
    assert limit(large, outside=other_process) == 50 * GIB


def test_suggestions_fit_and_change_the_recipe(monkeypatch):
    result = example_search()
    not_fitting = configuration(("batch.micro_batch_size=32",), example_plan(5.0), 99_000)
    found = SimpleNamespace(configurations=(not_fitting, *result.configurations))
    monkeypatch.setattr(out_of_memory, "search_configurations", lambda *_, **__: found)
    monkeypatch.setattr(out_of_memory, "make_plan", lambda recipe, machine: example_plan())
    text = out_of_memory.explain(RECIPE, machine(), "", {}, None)
    fitting = [one for one in result.configurations if one.plan.fits and one.overrides]
    shown = [line.partition("#")[0].split() for line in text if line.startswith("  ")]
    assert shown == [" ".join(one.overrides).split() for one in fitting]
    # In preparation there is no inventory: the plan shows what the recipe needs
    header, first, *_ = out_of_memory.explain(RECIPE, machine(), "start", {}, None)
    assert header.split() == ["by", "plan"]
    size = bytes_as_text(example_plan().step.peak.components.parameters)
    assert first.split() == ["parameters", *size.split()]


class StubPostMortem:
    """A stub of MemoryPostMortem."""

    message, noted, restarts_now = "what was found", {"micro_batch_size": 4}, False

    def killed(self, process, step):
        self.message = f"{process} was ended"
        return self

    def explain(self, seconds):
        return "and what would fit"


@pytest.mark.parametrize(
    ("error", "process"),
    [
        ("DataLoader worker (pid 7) is killed by signal: Killed.", "a loader process of rank 0 of 2"),
        ("[gloo] Connection closed by peer [127.0.0.1]:4", "rank 1 of 2"),
    ],
)  # fmt: skip
def test_oom_killer_is_reported_if_its_counter_rose(tmp_path, monkeypatch, error, process):
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    two = environment(world_size=2, local_world_size=2)
    run = RunFolder(tmp_path)
    run.log.mkdir()
    console = io.StringIO()
    monkeypatch.setattr(host_memory, "killed", lambda: {"memory.events": 3})
    watch = FailureWatch(
        store,
        environment=two,
        run=run,
        console=console,
        progress=Progress(),
        post_mortem=StubPostMortem(),
    )
    monkeypatch.setattr(host_memory, "killed_since", lambda before: before == {"memory.events": 3})
    assert watch.report_exception(RuntimeError(error)) == 1
    status = run.read_status()
    assert status["reason"] == "out_of_memory"
    assert status["error"].startswith(f"{process} was ended")
    assert status["error"].endswith("\nand what would fit")
    assert console.getvalue().count("was ended") == 1
    (event,) = read_jsonl(run.events)
    assert (event["reason"], event["micro_batch_size"], event["ranks"]) == ("out_of_memory", 4, 2)
