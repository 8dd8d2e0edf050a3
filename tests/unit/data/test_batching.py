"""The order of samples, and their division among ranks and micro-batches."""

import collections
import itertools
import random
import statistics

import pytest

from launcher.data.batching import (
    NO_SAMPLE,
    JoinedBatchSampler,
    MixtureOrder,
    Position,
    RankBatchSampler,
    SampleOrder,
    SimilarLengths,
    TokenBatchSampler,
    accumulation_steps,
    joined_rows,
    permuted,
    row_tokens,
)
from launcher.data.run_data import RunData
from launcher.recipe import schema
from tests.unit.amounts import slow_but


def permutation(size, *, seed=0, epoch=0):
    return [permuted(index, size=size, seed=seed, epoch=epoch) for index in range(size)]


@pytest.mark.parametrize("seed", slow_but([0], [0, 1234, 2**32 - 1]))
def test_permuted_is_a_permutation_for_every_size(seed):
    for size in [*range(1, 71), 4097, 2**14]:
        for epoch in (0, 1):
            assert sorted(permutation(size, seed=seed, epoch=epoch)) == list(range(size)), (
                size,
                epoch,
            )


@pytest.mark.parametrize("size", [2**31 - 1, 2**40 + 1, 10**15])
def test_permuted_has_no_collisions_in_huge_ranges(size):
    rng = random.Random(size)
    random_indices = [rng.randrange(size) for _ in range(2000)]
    indices = [*range(1000), *range(size - 1000, size), *random_indices]
    results = {index: permuted(index, size=size, seed=1, epoch=0) for index in indices}
    assert all(0 <= result < size for result in results.values())
    assert len(set(results.values())) == len(results)


def test_permuted_values_are_stable_across_versions():
    """These values must not change: a run that resumes after an upgrade continues in this order."""
    assert permutation(10, seed=1234, epoch=0) == [3, 8, 6, 4, 5, 9, 1, 0, 2, 7]
    assert permutation(10, seed=1234, epoch=1) == [8, 9, 2, 3, 1, 4, 6, 7, 0, 5]
    assert [permuted(index, size=10**12, seed=7, epoch=3) for index in range(3)] == [
        951739823179,
        44046226497,
        46867815895,
    ]


def test_epochs_and_seeds_give_different_orders():
    keys = itertools.product((0, 1, 2), (0, 1, 2))
    orders = [permutation(1000, seed=seed, epoch=epoch) for seed, epoch in keys]
    for first, second in itertools.combinations(orders, 2):
        # Two random permutations agree at one index on average, and almost never at ten
        assert sum(a == b for a, b in zip(first, second, strict=True)) < 10


@pytest.mark.parametrize("size", [1000, 1024, 3000])
def test_permuted_order_looks_random(size):
    """Fixed points, distances, neighbours and halves are like those of a random permutation."""
    orders = [permutation(size, seed=11, epoch=epoch) for epoch in range(8)]
    fixed = statistics.mean(
        sum(index == result for index, result in enumerate(order)) for order in orders
    )
    assert fixed < 3  # 1 is expected
    for order in orders:
        moved = statistics.mean(abs(index - result) for index, result in enumerate(order))
        assert moved == pytest.approx(size / 3, rel=0.1)
        neighbours = sum(abs(a - b) == 1 for a, b in itertools.pairwise(order))
        assert neighbours < 12  # 2 are expected
        kept = sum(result < size // 2 for result in order[: size // 2])
        assert kept == pytest.approx(size / 4, rel=0.15)
        even = sum(result % 2 == 0 for result in order[: size // 2])
        assert even == pytest.approx(size / 4, rel=0.15)
    assert statistics.mean(order[0] for order in orders) == pytest.approx(size / 2, rel=0.7)


def test_sample_order():
    order = SampleOrder(samples=7, seed=3, shuffle=True)
    passes = [[order.sample(7 * epoch + index) for index in range(7)] for epoch in range(3)]
    assert passes == [permutation(7, seed=3, epoch=epoch) for epoch in range(3)]
    straight = SampleOrder(samples=3, seed=3, shuffle=False)
    assert [straight.sample(position) for position in range(8)] == [0, 1, 2, 0, 1, 2, 0, 1]
    for shuffle in (True, False):
        order = SampleOrder(samples=5, seed=0, shuffle=shuffle, epochs=2)
        samples = [order.sample(position) for position in range(13)]
        assert sorted(samples[:5]) == sorted(samples[5:10]) == [0, 1, 2, 3, 4]
        assert samples[10:] == [NO_SAMPLE] * 3


def batches_of(ranks, micro, *, size=16, steps=3, **part):
    sizes = {"global_batch_size": size, "micro_batch_size": micro}
    return list(RankBatchSampler(ranks=ranks, steps=steps, **sizes, **part))


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("micro", [1, 2, 4])
@pytest.mark.parametrize("epochs", [None, 2])
def test_ranks_and_micro_batches_do_not_change_the_order(ranks, micro, epochs):
    """The micro-batches of all ranks, interleaved, contain the samples in order of position."""
    # Two epochs have 42 samples, and three steps have 48 positions
    order = SampleOrder(samples=21, seed=9, shuffle=True, epochs=epochs)
    by_rank = [batches_of(ranks, micro, rank=rank, order=order) for rank in range(ranks)]
    accumulation = 16 // (micro * ranks)
    assert {len(batches) for batches in by_rank} == {3 * accumulation}
    assert {len(batch) for batches in by_rank for batch in batches} == {micro}
    read = [
        sample for batches in zip(*by_rank, strict=True) for batch in batches for sample in batch
    ]
    assert read == [order.sample(position) for position in range(48)]
    assert read.count(NO_SAMPLE) == (0 if epochs is None else 6)


def test_sampler_can_start_at_a_later_step():
    order = SampleOrder(samples=100, seed=9, shuffle=True)
    whole = batches_of(2, 4, rank=1, order=order, steps=5)
    assert batches_of(2, 4, rank=1, order=order, steps=5, first_step=2) == whole[2 * 2 :]
    assert batches_of(2, 4, rank=1, order=order, steps=5, first_step=5) == []


@pytest.mark.parametrize(
    ("micro", "ranks", "accumulation"),
    [(1, 1, 64), (8, 1, 8), (8, 2, 4), (8, 8, 1), (64, 1, 1), (1, 64, 1), (8, 3, 3)],
)
def test_accumulation_steps(micro, ranks, accumulation):
    found = accumulation_steps(global_batch_size=64, micro_batch_size=micro, ranks=ranks)
    assert found == accumulation


def test_last_step_contains_the_remaining_samples():
    order = SampleOrder(samples=21, seed=0, shuffle=True, epochs=3)
    batches = [
        batch for rank in (0, 1) for batch in batches_of(2, 2, rank=rank, order=order, steps=4)
    ]
    counts = collections.Counter(sample for batch in batches for sample in batch)
    assert counts == dict.fromkeys(range(21), 3) | {NO_SAMPLE: 1}


def source_of(sample, sizes):
    return next(index for index, end in enumerate(itertools.accumulate(sizes)) if sample < end)


@pytest.mark.parametrize(
    ("weights", "shares"),
    [((3, 1), (0.75, 0.25)), ((1, 1), (0.5, 0.5)), ((1, 2, 5), (0.125, 0.25, 0.625))],
)
def test_mixture_keeps_its_shares_in_every_window(weights, shares):
    sizes = (10, 1000, 77)[: len(weights)]
    order = MixtureOrder(sizes=sizes, weights=weights, seed=4, shuffle=True)
    sources = [source_of(order.sample(position), sizes) for position in range(9000)]
    for start in (0, 4000, 4090, 8900):  # within a period, and across its end
        part = sources[start : start + 96]
        for source, share in enumerate(shares):
            assert abs(part.count(source) - 96 * share) <= 2
    assert order.epochs_seen(4096) == pytest.approx(
        [4096 * share / size for share, size in zip(shares, sizes, strict=True)]
    )


def test_mixture_reads_each_source_completely_before_repeating():
    sizes = (10, 100, 3)
    order = MixtureOrder(sizes=sizes, weights=(3, 1, 0.001), seed=4, shuffle=True)
    samples = [order.sample(position) for position in range(20000)]
    offset = 0
    for source, size in enumerate(sizes):
        own = [sample - offset for sample in samples if source_of(sample, sizes) == source]
        assert len(own) >= 4, "a source with a tiny weight must appear in each period"
        passes = [own[start : start + size] for start in range(0, len(own) - size + 1, size)]
        assert all(sorted(one) == list(range(size)) for one in passes)
        if size > 3:
            assert len({tuple(one) for one in passes[:5]}) == 5, (
                "each pass must have a different order"
            )
        offset += size


def test_mixture_ends_after_its_epochs():
    order = MixtureOrder(sizes=(5, 6), weights=(1, 1), seed=0, shuffle=False, epochs=2)
    samples = [order.sample(position) for position in range(25)]
    assert samples[22:] == [NO_SAMPLE] * 3
    assert NO_SAMPLE not in samples[:22]
    assert [sample for sample in samples[:22] if sample < 5] == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0], (
        "shuffle: false must keep the order of each source"
    )


def test_seeds_and_sources_of_a_mixture_differ_in_order():
    orders = (
        MixtureOrder(sizes=(64, 64), weights=(1, 1), seed=seed, shuffle=True) for seed in (1, 2)
    )
    first, second = ([order.sample(position) for position in range(64)] for order in orders)
    assert first != second
    sources = [sample for sample in first if sample < 64], [s - 64 for s in first if s >= 64]
    assert sources[0] != sources[1]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_token_budget_is_kept_and_samples_are_unchanged(ranks):
    generator = random.Random(3)
    lengths = [generator.choice([1, 7, 30, 100, 128]) for _ in range(113)]
    order = SampleOrder(samples=113, seed=1, shuffle=True, epochs=1)
    common = {"order": order, "global_batch_size": 50, "steps": 3}
    budget = common | {"lengths": lengths, "micro_batch_tokens": 256, "ranks": ranks}
    by_rank = [TokenBatchSampler(rank=rank, **budget) for rank in range(ranks)]
    batches = [list(sampler) for sampler in by_rank]
    assert len({len(one) for one in batches}) == 1, (
        "all ranks must have the same number of micro-batches"
    )
    together, position = list(zip(*batches, strict=True)), 0
    for step in range(3):
        (number,) = {sampler.micro_batches(step) for sampler in by_rank}
        found = itertools.chain(*together[position : position + number])
        samples = {order.sample(p) for p in range(50 * step, 50 * step + 50)} - {NO_SAMPLE}
        assert sorted({*itertools.chain(*found)} - {NO_SAMPLE}) == sorted(samples)
        position += number
    real = [batch for one in batches for batch in one if batch != [NO_SAMPLE]]
    assert sum(map(len, real)) == 113
    padded = [len(batch) * max(lengths[sample] for sample in batch) for batch in real]
    assert max(padded) <= 256
    rows = RankBatchSampler(micro_batch_size=2, **(common | {"steps": 2}))
    unsorted = sum(2 * max(lengths[sample] for sample in batch) for batch in rows)
    assert sum(padded) < unsorted, "grouping by length must reduce padding"
    later = list(TokenBatchSampler(rank=0, first_step=2, **budget))
    assert later == batches[0][-len(later) :]


def lengths_of(count):
    return [int(min(2048, random.Random(n).lognormvariate(6, 0.9))) + 1 for n in range(count)]


def share_of_padding(order, lengths, *, micro=8, count=200):
    held = padded = 0
    for batch in range(count):
        sizes = [lengths[order.sample(n)] for n in range(batch * micro, (batch + 1) * micro)]
        held += sum(sizes)
        padded += max(sizes) * micro
    return 1 - held / padded


@pytest.mark.parametrize("size", [1, 63, 64, 65, 5000])
def test_similar_lengths_have_each_sample_once_an_epoch(size):
    lengths = lengths_of(size)
    order = SimilarLengths(
        SampleOrder(samples=size, seed=1, shuffle=True, epochs=2), lengths, seed=1
    )
    epochs = [[order.sample(epoch * size + n) for n in range(size)] for epoch in range(2)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(size))] * 2
    assert size < 2 or epochs[0] != epochs[1]
    assert order.sample(2 * size) == NO_SAMPLE
    # A resume begins in the middle of a window
    again = SimilarLengths(
        SampleOrder(samples=size, seed=1, shuffle=True, epochs=2), lengths, seed=1
    )
    assert [again.sample(n) for n in range(size // 2, size)] == epochs[0][size // 2 :]


def test_similar_lengths_need_little_padding():
    lengths = lengths_of(10_000)
    plain = SampleOrder(samples=10_000, seed=1, shuffle=True)
    order = SimilarLengths(plain, lengths, seed=1)
    shares = share_of_padding(plain, lengths), share_of_padding(order, lengths)
    print("padding", *(f"{share:.1%}" for share in shares))
    assert shares[0] > 0.4
    assert shares[1] < 0.1
    # The lengths of groups do not grow or fall along a window
    firsts = [lengths[order.sample(n)] for n in range(0, 4096, 64)]
    rises = sum(one < other for one, other in itertools.pairwise(firsts))
    assert 20 < rises < 44


@pytest.mark.parametrize("ranks", slow_but([2], [1, 2, 3, 8]))
@pytest.mark.parametrize("size", [1, 8, 500])
def test_samples_of_a_step_share_rows(ranks, size):
    """On any number of ranks and in any rows, a step has the same samples; rows are few, and filled
    about equally."""
    lengths, most = lengths_of(1030), 2049
    order = SampleOrder(samples=1030, seed=1, shuffle=True, epochs=1)
    steps = -(-1030 // size) if size > 1 else 20
    common = {"order": order, "global_batch_size": size, "steps": steps, "ranks": ranks}
    common |= {"lengths": lengths, "row_length": most, "rows": 2}
    samplers = [JoinedBatchSampler(rank=rank, **common) for rank in range(ranks)]
    batches = [list(sampler) for sampler in samplers]
    at = held = padded = 0
    for step in range(steps):
        (count,) = {sampler.micro_batches(step) for sampler in samplers}
        of_ranks = [mine[at : at + count] for mine in batches]
        at += count
        rows = [row for mine in of_ranks for micro_batch in mine for row in micro_batch]
        drawn = [order.sample(position) for position in range(step * size, (step + 1) * size)]
        assert sorted(itertools.chain(*rows)) == sorted({*drawn} - {NO_SAMPLE})
        assert max(row_tokens(row, lengths) for row in rows) <= most
        assert {len(mine[0]) for mine in of_ranks} <= {1, 2}
        held += sum(row_tokens(row, lengths) for row in rows)
        for micro_batch in itertools.chain(*of_ranks):
            assert 1 <= len(micro_batch) <= 2
            padded += len(micro_batch) * max(row_tokens(row, lengths) for row in micro_batch)
    assert {len(mine) for mine in batches} == {at}
    assert held / padded > 0.9
    first = min(3, steps)
    later = list(JoinedBatchSampler(rank=0, first_step=first, **common))
    assert later == batches[0][len(batches[0]) - len(later) :]


def test_rows_that_samples_share_are_few():
    """Nine samples of 40 fit into five rows of 100 on one rank, and into six on two and three."""
    counts = [
        len(joined_rows(range(9), [40] * 9, row_length=100, ranks=ranks)) for ranks in (1, 2, 3, 10)
    ]
    assert counts == [5, 6, 6, 10]
    assert sorted(map(len, joined_rows(range(3), [1], row_length=9, ranks=4))) == [0, 1, 1, 1]
    assert joined_rows([4, 4], [1] * 5, row_length=9, ranks=1) == [(4, 4)], "of two epochs"


@pytest.mark.parametrize("size", [3, 8, 64])
@pytest.mark.parametrize("every", [0.1, 0.25, 1.0, 1.5])
def test_parts_of_epochs_end_in_the_step_that_reaches_them(size, every):
    """100 samples, three epochs: each part is noticed once, also after a resume with another batch."""
    order = SampleOrder(samples=100, seed=0, shuffle=True, epochs=3)
    sampler = RankBatchSampler(order=order, global_batch_size=size, micro_batch_size=1, steps=999)
    data = RunData(None, {}, order, sampler, steps=999, data=schema.Data(), seed=0)
    section = schema.Evaluation(every_epochs=every)
    ends = [min(step * size, 300) for step in range(1, -(-300 // size) + 1)]
    due = [end for step, end in enumerate(ends, start=1) if data.due(step, section)]
    parts = [round(100 * every * number, 6) for number in range(1, int(3 / every + 1e-9) + 1)]
    assert due == sorted({next(end for end in ends if end >= part) for part in parts})
    later = data.starting(Position(step=7, samples=70))
    assert [later.due(step, schema.Evaluation(every_steps=5)) for step in (9, 10)] == [False, True]
    reached = [part for part in parts if 70 < part <= 70 + size]
    assert later.due(8, section) == bool(reached)


def test_shares_of_a_mixture_change_at_the_end_of_a_stage():
    """And each source goes on in its own order where it was."""
    sizes = (100, 40)
    stages = [(500, (1.0, 0.0)), (900, (1.0, 1.0))]
    order = MixtureOrder(sizes=sizes, weights=(0.0, 2.0), seed=4, shuffle=True, stages=stages)
    samples = [order.sample(position) for position in range(1200)]
    sources = [source_of(sample, sizes) for sample in samples]
    assert set(sources[:500]) == {0}
    assert sources[500:900].count(0) == 200
    assert set(sources[900:]) == {1}
    for source, (first, size) in enumerate([(0, 100), (100, 40)]):
        own = [sample - first for sample in samples if source_of(sample, sizes) == source]
        passes = [own[at : at + size] for at in range(0, len(own) - size + 1, size)]
        assert all(sorted(one) == list(range(size)) for one in passes)
    assert order.epochs_seen(900) == [7.0, 5.0]
    assert order.epochs_seen(1200) == [7.0, 12.5]
    assert [order.shares_at(at) for at in (0, 499, 500, 900)] == [
        [1.0, 0.0],
        [1.0, 0.0],
        [0.5, 0.5],
        [0.0, 1.0],
    ]


def test_a_source_that_is_used_up_leaves_its_share_to_the_others():
    sizes = (6, 50, 20)
    order = MixtureOrder(sizes=sizes, weights=(2, 1, 1), seed=1, shuffle=True, most=(2, None, 1.5))
    samples = [order.sample(position) for position in range(5000)]
    sources = [source_of(sample, sizes) for sample in samples]
    assert sources.count(0) == 12
    assert sources.count(2) == 30
    assert sources[:25].count(0) == 12, "half of the positions until then"
    last = max(position for position, source in enumerate(sources) if source == 0)
    third = max(position for position, source in enumerate(sources) if source == 2)
    between = sources[last + 1 : third + 1]
    assert abs(between.count(1) - between.count(2)) <= 1
    assert order.end is None
    assert order.epochs_seen(5000) == [2.0, (5000 - 42) / 50, 1.5]


def test_a_mixture_ends_where_all_sources_are_used_up():
    sizes = (5, 9000)
    order = MixtureOrder(
        sizes=sizes, weights=(1, 3), seed=1, shuffle=False, most=(3, 1), stages=[(8, (0, 1))]
    )
    assert order.end == 9015
    samples = [order.sample(position) for position in range(9030)]
    assert samples[9015:] == [NO_SAMPLE] * 15
    assert sorted(sample for sample in samples[:9015] if sample >= 5) == [*range(5, 9005)]
    assert samples[:8] == [*range(5, 13)]
    assert order.epochs_seen(9030) == [3.0, 1.0]


@pytest.mark.parametrize("limit", slow_but([1, 700], [1, 2, 700, 4096, 5000, 8192]))
def test_the_end_of_a_source_is_exact(limit):
    order = MixtureOrder(sizes=(limit, 20), weights=(7, 3), seed=1, shuffle=True, most=(1, None))
    sources = [source_of(order.sample(at), (limit, 20)) for at in range(4 * limit + 100)]
    assert sources.count(0) == limit
    last = len(sources) - sources[::-1].index(0) - 1
    assert order.shares_at(last) != order.shares_at(last + 1) == [0.0, 1.0]
