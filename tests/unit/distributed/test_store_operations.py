"""How the store's work at the start of a run grows with the number of ranks, which are threads."""

import threading
from collections import Counter
from datetime import timedelta

import pytest
import torch.distributed as dist

from launcher.distributed import process_group
from launcher.distributed.environment import Environment


class CountingStore(dist.Store):
    """One rank's view of a store: it counts the keys that are written and read."""

    def __init__(self, store):
        super().__init__()
        self.store, self.counts = store, Counter()

    def set(self, key, value):
        self.counts["written"] += 1
        self.store.set(key, value)

    def get(self, key):
        self.counts["read"] += 1
        return self.store.get(key)

    def multi_get(self, keys):
        self.counts["read"] += len(keys)
        return self.store.multi_get(keys)

    def add(self, key, value):
        self.counts["written"] += 1
        return self.store.add(key, value)

    def wait(self, keys, timeout=None):
        self.store.wait(keys, timeout or timedelta(seconds=100))

    def check(self, keys):  # rank 0 asks until the others are there
        return self.store.check(keys)

    def has_extended_api(self):
        return True


class AnsweringStore(CountingStore):
    """A store in which all other ranks have said hello, and arrive as soon as they are answered."""

    def __init__(self, store, ranks):
        super().__init__(store)
        for rank in range(1, ranks):
            store.set(f"hello/{rank}", f"name{rank}")

    def set(self, key, value):
        super().set(key, value)
        if key.startswith("generation/of/name"):
            self.store.set(f"generation/1/{key.removeprefix('generation/of/name')}", "")

    def get(self, key):
        raise AssertionError("a request for one rank")

    def check(self, keys):
        self.counts["checks"] += 1
        return super().check(keys)


def test_rank_0_asks_for_all_ranks_at_once():
    """It asked for one after the other: 1,023 ranks took three seconds."""
    store = AnsweringStore(dist.HashStore(), 64)
    assert process_group._agree_on_generation(store, rank=0, ranks=64, seconds=100) == 1
    assert store.counts["checks"] == 3


def test_the_rank_that_does_not_meet_the_others_is_named():
    store = dist.HashStore()
    store.set("hello/1", "name1")
    with pytest.raises(TimeoutError, match="rank 2 is missing"):
        process_group._agree_on_generation(store, rank=0, ranks=3, seconds=0.1)


def counts_by_rank(ranks, monkeypatch):
    """Keys written and read by each rank until the groups of a run exist."""
    environments = [Environment(rank=rank, world_size=ranks) for rank in range(ranks)]
    variables = {}
    monkeypatch.setattr(process_group.os, "environ", variables)
    process_group._prepare_gloo(environments[0])
    lazy = variables.get("TORCH_GLOO_LAZY_INIT") == "1"
    shared = dist.HashStore()
    stores, errors = [CountingStore(shared) for _ in range(ranks)], []

    def start(rank):
        try:
            store = stores[rank]
            process_group._agree_on_generation(store, rank=rank, ranks=ranks, seconds=100)
            process_group.choose_device(environments[rank], store, "any")
            for name in ("default", "checkpoint"):
                options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
                options._timeout, options._threads = timedelta(seconds=100), 1
                device = dist.ProcessGroupGloo.create_device(hostname="127.0.0.1", lazy_init=lazy)
                options._devices = [device]
                of_group = dist.PrefixStore(name, store)
                groups.append(dist.ProcessGroupGloo(of_group, rank, ranks, options))
        except Exception as error:
            errors.append(error)

    groups = []
    threads = [threading.Thread(target=start, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    assert errors == []
    assert len(groups) == 2 * ranks
    return [store.counts for store in stores]


def test_work_of_a_rank_does_not_grow_with_many_ranks(monkeypatch):
    """Only rank 0 reads something of every rank. For few ranks, gloo connects all pairs at once."""
    few = counts_by_rank(4, monkeypatch)
    assert few[1].total() > 2 * 4, "each rank reads the addresses of all, once for each group"
    monkeypatch.setattr(process_group, "CONNECTED_RANKS", 4)
    some, many = (counts_by_rank(ranks, monkeypatch) for ranks in (8, 32))
    assert some[1:] == [many[1]] * 7
    assert many[1:] == [many[1]] * 31
    assert many[1].total() < 10
    assert many[0].total() < 4 * 32 + 10
