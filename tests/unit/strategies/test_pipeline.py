"""The order of a pipeline's passes, and what each rank holds."""

import itertools

import pytest

from launcher.models.pipeline import balanced
from launcher.strategies.pipeline import schedule

SIZES = [
    (ranks, chunks, count)
    for ranks, chunks in ((1, 1), (2, 1), (3, 1), (4, 1), (8, 1), (2, 2), (3, 2), (4, 2), (6, 2))
    for count in (1, 2, 3, 5, 8, 13)
]


def completed(orders, *, ranks, chunks, stop_before=None):
    """Runs the passes of all ranks: a pass begins when what it needs has been sent. Returns the passes
    that each rank has ended. stop_before: ranks end before this forward pass of theirs."""
    sent, ended = set(), [[] for _ in range(ranks)]
    last, waiting = ranks * chunks - 1, [list(order) for order in orders]
    going = True
    while going:
        going = False
        for rank, left in enumerate(waiting):
            while left:
                each = left[0]
                begun = sum(one.forward for one in ended[rank])
                if each.forward and begun == stop_before:
                    left.clear()
                    break
                stage = each.chunk * ranks + rank
                before = stage - 1 if each.forward else stage + 1
                alone = stage == 0 if each.forward else stage == last
                if not alone and (before, each.forward, each.micro_batch) not in sent:
                    break
                ended[rank].append(left.pop(0))
                sent.add((stage, each.forward, each.micro_batch))
                going = True
    return ended


@pytest.mark.parametrize(("ranks", "chunks", "count"), SIZES)
def test_every_pass_runs_once_and_no_rank_waits_for_ever(ranks, chunks, count):
    orders = [schedule(count, rank=rank, ranks=ranks, chunks=chunks) for rank in range(ranks)]
    assert completed(orders, ranks=ranks, chunks=chunks) == orders
    for order in orders:
        every = itertools.product((True, False), range(chunks), range(count))
        assert sorted((e.forward, e.chunk, e.micro_batch) for e in order) == sorted(every)


@pytest.mark.parametrize(("ranks", "count"), [(2, 5), (3, 8), (4, 8), (8, 13)])
def test_all_ranks_can_stop_before_the_same_forward_pass(ranks, count):
    orders = [schedule(count, rank=rank, ranks=ranks) for rank in range(ranks)]
    for stop_before in range(count):
        ended = completed(orders, ranks=ranks, chunks=1, stop_before=stop_before)
        assert [sum(each.forward for each in own) for own in ended] == [stop_before] * ranks


@pytest.mark.parametrize("ranks", [2, 4])
def test_what_is_in_flight(ranks):
    """1F1B: as many micro-batches as there are stages from this one on. Interleaved: see Narayanan et
    al., 2021, section 2.2; in halves of a stage."""
    for rank, count in itertools.product(range(ranks), (8, 32)):

        def most(chunks, rank=rank, count=count):
            passes = schedule(count, rank=rank, ranks=ranks, chunks=chunks)
            return max(itertools.accumulate(1 if each.forward else -1 for each in passes))

        assert most(1) == ranks - rank
        assert most(2) == ranks + 2 * (ranks - 1 - rank) + 1


def test_messages_between_two_stages_come_in_the_order_in_which_they_were_sent():
    """Each direction of a pair of stages is a queue."""
    for ranks, chunks, count in SIZES:
        orders = [schedule(count, rank=rank, ranks=ranks, chunks=chunks) for rank in range(ranks)]
        for rank, forward in itertools.product(range(ranks), (True, False)):
            other = (rank + (1 if forward else -1)) % ranks
            around = (rank == ranks - 1) if forward else (rank == 0)
            shift = (1 if forward else -1) if around else 0
            sent = [
                (each.chunk + shift, each.micro_batch)
                for each in orders[rank]
                if each.forward is forward and each.chunk + shift in range(chunks)
            ]
            received = [
                (each.chunk, each.micro_batch) for each in orders[other] if each.forward is forward
            ]
            assert sent == [each for each in received if each in sent]


@pytest.mark.parametrize(
    ("costs", "parts", "expected"),
    [
        ([1, 1, 1, 1], 2, [range(2), range(2, 4)]),
        ([1, 1, 1, 1, 4], 2, [range(4), range(4, 5)]),
        ([1, 1, 1], 3, [range(1), range(1, 2), range(2, 3)]),
        ([5, 1, 1, 1], 2, [range(1), range(1, 4)]),
    ],
)
def test_blocks_are_divided_so_that_the_largest_part_is_as_small_as_possible(
    costs, parts, expected
):
    assert balanced(costs, parts) == expected
