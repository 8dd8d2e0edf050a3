"""One rank computes a result for the others."""

import random
import threading
from pathlib import Path

import pytest
import torch.distributed as dist

from launcher.distributed.environment import Environment
from launcher.distributed.shared_results import SharedResults
from launcher.errors import RecipeError
from launcher.sources import finding
from launcher.sources.rows import SourcePart

NODE, NODES = 2, 3
RANKS = range(NODE * NODES)


def tcp_store():
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def never():
    raise AssertionError("rank 0 has looked")


def on_all_ranks(ask, *, places=("/a",) * NODES, store=None, ranks=RANKS):
    """What `ask(shared, rank)` returns on each rank, or raises."""
    store, outcomes = store or dist.HashStore(), {}

    def run(rank):
        environment = Environment(
            rank=rank, world_size=len(RANKS), local_rank=rank % NODE, local_world_size=NODE
        )
        shared = SharedResults(store, environment, place=places[rank // NODE])
        try:
            outcomes[rank] = ask(shared, rank)
        except RecipeError as error:
            outcomes[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in reversed(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(outcomes) == [*ranks]
    return [outcomes[rank] for rank in ranks]


@pytest.mark.parametrize(
    ("places", "holds", "expected"),
    [
        (("/a", "/a", "/a"), {1, 2}, [0, 0, 0, 0, 0, 0]),
        (("/a", "/a", "/b"), {1, 2}, [0, 0, 0, 0, 4, 4]),
        (("/a", "/a", "/a"), {2}, [0, 0, 2, 2, 0, 0]),
    ],
)
def test_one_rank_computes_a_result(places, holds, expected):
    """Another node computes its own if it looks in another place, or if that of rank 0 does not hold."""
    made = []

    def ask(shared, rank):
        def make():
            made.append(rank)
            return rank

        first = shared.result("key", make, lambda _: rank // NODE in holds)
        again = shared.result("key", make, lambda _: False)
        assert first == again
        return first

    assert on_all_ranks(ask, places=places) == expected
    assert sorted(made) == sorted({*expected}), "once on each node that needs its own"


def test_rank_0_may_ask_for_more():
    def ask(shared, rank):
        if rank == 0:
            shared.result("of rank 0", lambda: 1, lambda _: True)
        return shared.result("of all", lambda: rank, lambda _: True)

    assert on_all_ranks(ask) == [0] * len(RANKS)


def test_all_ranks_raise_the_error_of_the_one_that_looks():
    def ask(shared, rank):
        def make():
            raise RecipeError(["data: one", "data: two"], rules=["a/b", "c/d"])

        return shared.result("key", make, lambda _: True)

    errors = on_all_ranks(ask)
    assert [(error.problems, error.rules) for error in errors] == [
        (["data: one", "data: two"], ["a/b", "c/d"])
    ] * len(RANKS)


def test_a_hundred_thousand_files():
    """The list has a few megabytes in the store."""
    parts = [SourcePart(f"/data/set/{n:06}.jsonl", "jsonl", size=n) for n in range(100_000)]
    states = [
        [False, [part.name, part.size, 10**18 + n, 10**18 - n, n]] for n, part in enumerate(parts)
    ]
    whole = finding.Found(parts, states, "sample", ["note"])

    def ask(shared, rank):
        return shared.result("key", lambda: whole if rank == 0 else never(), lambda _: True)

    assert on_all_ranks(ask, store=tcp_store(), ranks=range(2)) == [whole] * 2


def test_a_result_is_larger_than_a_value_of_the_store():
    """The store closes the connection of a rank that sets more than 8 MiB."""
    whole = random.Random(0).randbytes(9 << 20)
    ask = lambda shared, rank: shared.result("key", lambda: whole, lambda _: True)  # noqa: E731
    assert on_all_ranks(ask, store=tcp_store()) == [whole] * len(RANKS)


def test_files_of_another_file_system_do_not_hold(tmp_path):
    """Same names and sizes, of a copy on another machine."""
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text(name)
    found = finding.found((str(tmp_path),), kind="text", max_document=1 << 20)
    assert [Path(part.name).name for part in found.parts] == ["a.txt", "b.txt"]
    assert finding._are_here(found)
    (tmp_path / "b.txt").rename(tmp_path / "c.txt")
    assert not finding._are_here(found)
    (tmp_path / "b.txt").write_text("b")
    assert not finding._are_here(found)


def test_a_run_looks_at_files_through_what_is_shared(tmp_path):
    (tmp_path / "a.txt").write_text("a")
    keys = []

    class Sharing:
        def result(self, key, make, holds):
            keys.append(key)
            return make()

    with finding.shared_by(Sharing()):
        inside = finding.found((str(tmp_path),), kind="text", max_document=9)
    assert finding.found((str(tmp_path),), kind="text", max_document=9) == inside
    assert len(keys) == 1
