"""Names of torch that only measure, report or save: without them a run trains on, and says so."""

import contextlib
import logging

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from launcher.distributed.rank_layout import OTHERS, RankLayout
from launcher.distributed.units import Unit
from launcher.libraries import private
from launcher.strategies import ddp, fsdp


@pytest.fixture
def messages(caplog):
    """What is logged about missing names; call it for the list."""
    private.log_missing.cache_clear()
    with caplog.at_level(logging.WARNING):
        yield lambda: [each.message for each in caplog.records if each.name == private.__name__]
    private.log_missing.cache_clear()


class Waits:
    """Counts waits for communication."""

    number = 0

    @contextlib.contextmanager
    def __call__(self, what=OTHERS):
        self.number += 1
        yield


@pytest.fixture
def ranks():
    """The first of two ranks. Collectives return at once."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    group, cpu = dist.group.WORLD, torch.device("cpu")
    yield RankLayout(rank=0, size=2, group=group, device=cpu, waiting=Waits())
    dist.destroy_process_group()


def wrapped_by_fsdp(ranks):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    policy = fsdp.FsdpPolicy(
        param_dtype=torch.float32,
        reduce_dtype=torch.float32,
        reshard_after_forward=True,
        reshard_after_backward=True,
        cpu_offload=None,
        sync_every_micro_batch=True,
    )
    embedding, *blocks = model
    unit = Unit((embedding,), used_in_backward=False)
    return fsdp.Fsdp(
        model, blocks, [unit], policy=policy, ranks=ranks, init_fn=lambda *arguments: None
    )


@pytest.fixture
def one_rank():
    """DDP does not run on the fake group."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield RankLayout(rank=0, size=1, group=dist.group.WORLD, device=torch.device("cpu"))
    dist.destroy_process_group()


def wrapped_by_ddp(ranks):
    model = nn.Linear(4, 4)
    return ddp.Ddp(model, param_dtype=torch.float32, ranks=ranks, init_fn=lambda *arguments: None)


def train_steps(wrapped, number=1):
    optimizer = torch.optim.SGD(wrapped.module.parameters(), lr=0.1)
    for _ in range(number):
        with wrapped.micro_batch(last=True):
            wrapped.call(lambda model: model(torch.ones(2, 4)).sum()).backward()
        wrapped.grad_norm()
        optimizer.step()
        optimizer.zero_grad()


def test_fsdp_times_its_waits(ranks, messages):
    wrapped = wrapped_by_fsdp(ranks)
    train_steps(wrapped)
    assert wrapped.measures_waits
    assert ranks.waiting.number > 1
    assert wrapped.description().startswith("fsdp: 3 groups over a mesh of 2 shard")
    assert messages() == []


def other_methods(monkeypatch):
    monkeypatch.setattr(private, "_FSDP_WAITS", ("wait_for_unshard", "method_of_the_past"))
    return "FSDPParamGroup.method_of_the_past"


def other_groups(monkeypatch):
    monkeypatch.setattr(private, "fsdp_groups", lambda model: [])
    monkeypatch.setattr(fsdp, "fsdp_groups", lambda model: [])
    return "FSDPState._fsdp_param_groups"


@pytest.mark.parametrize("change", [other_methods, other_groups])
def test_fsdp_trains_without_its_timers(ranks, messages, monkeypatch, change):
    name = change(monkeypatch)
    wrapped = wrapped_by_fsdp(ranks)
    wrapped_by_fsdp(ranks)
    train_steps(wrapped)
    assert not wrapped.measures_waits
    assert ranks.waiting.number == 1, "only the norm; no part of FSDP's waits"
    assert "a mesh of 2 shard" in wrapped.description()
    lost = "communication_seconds and slow ranks are not measured; training continues"
    assert messages() == [f"torch {torch.__version__} has no {name}: {lost}"]


def test_groups_of_a_state_without_the_attributes():
    module = nn.Linear(1, 1)
    module._get_fsdp_state = object
    assert private.fsdp_groups(nn.Sequential(module, nn.Linear(1, 1))) == []


def test_ddp_trains_without_the_rate_of_its_timers(one_rank, messages, monkeypatch):
    monkeypatch.delattr(DistributedDataParallel, "_set_ddp_runtime_logging_sample_rate")
    train_steps(wrapped_by_ddp(one_rank))
    assert ["_set_ddp_runtime_logging_sample_rate" in each for each in messages()] == [True]


def test_ddp_trains_without_waiting_for_its_buckets(one_rank, messages, monkeypatch):
    monkeypatch.delattr(dist.ProcessGroup, "_wait_for_pending_works")
    wrapped = wrapped_by_ddp(one_rank)
    wrapped._device_type = "cuda"  # where it waits
    train_steps(wrapped, 2)
    assert ["_wait_for_pending_works" in each for each in messages()] == [True]


def test_memory_snapshots_are_optional(messages, monkeypatch, tmp_path):
    for name in ("_dump_snapshot", "_record_memory_history"):
        monkeypatch.delattr(torch.cuda.memory, name)
    private.record_memory_history(on=True)
    assert not private.dump_memory_snapshot(str(tmp_path / "snapshot.pickle"))
    private.record_memory_history(on=False)
    private.clear_cublas_workspaces()
    named = [each.partition(": ")[0].rpartition(".")[2] for each in messages()]
    assert named[:2] == ["_record_memory_history", "_dump_snapshot"]


def test_flight_recorder_is_optional(monkeypatch):
    assert private.flight_recorder()
    for name in ("_dump_fr_trace", "_dump_nccl_trace"):
        monkeypatch.delattr(torch._C._distributed_c10d, name, raising=False)
    assert private.flight_recorder() is None
