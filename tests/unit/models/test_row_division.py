"""Which tokens of rows context parallel ranks have, and what a group of a ring computes of them."""

import copy
import itertools
import pickle
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from launcher.data.collation import collate_sequences, make_sample
from launcher.models.documents import DocumentsOfCall
from launcher.models.micro_batch import IGNORED
from launcher.models.ring import make_plan, plan_of
from launcher.models.row_division import (
    WHOLE_ROWS,
    RowDivision,
    RowGroups,
    placed,
    rings_that_fit,
)
from tests.micro_batches import contents


def tokens_of(spans):
    return np.concatenate([np.arange(start, end) for start, end, _ in spans])


def random_case(generator):
    """The size of a ring, rows, their width, where documents start and end, and a window."""
    ring, rows = generator.choice([2, 3, 4, 5]), generator.choice([1, 1, 2, 3])
    width = ring * generator.randint(1, 19)
    total = rows * width
    count = min(total - 1, generator.choice([0, 1, 3, 20, 60]))
    cuts = generator.sample(range(1, total), count)
    ends = np.array(sorted({total, *cuts, *(row * width for row in range(rows))}))
    return ring, rows, width, ends, generator.choice([None, None, 1, 2, 3, 7, 20])


def paint(seen, queries, keys, block):
    """Counts the pairs of a rectangle, of tokens of the rows."""
    queries, keys = queries[slice(*block.query)], keys[slice(*block.key)]
    distance = np.arange(len(queries))[:, None] + len(keys) - len(queries) - np.arange(len(keys))
    sees = distance <= block.left if block.left >= 0 else np.ones_like(distance, dtype=bool)
    assert sees.any(1).all(), "a query without keys has no finite log-sum-exp"
    np.add.at(seen, tuple(np.broadcast_arrays(queries[:, None], keys)[i][sees] for i in (0, 1)), 1)


def test_each_visible_pair_is_computed_once_and_no_other():
    generator = random.Random(0)
    for _ in range(400):
        ring, rows, width, ends, window = random_case(generator)
        divisions = [RowDivision(ring, ring, rank) for rank in range(ring)]
        divided = [each.place(ends, rows=rows, width=width, recurrent=True) for each in divisions]
        owned = [tokens_of(spans) for spans in divided[0].spans]
        total = rows * width
        assert sorted(np.concatenate(owned)) == [*range(total)]
        assert all(len(tokens) == rows * width // ring for tokens in owned)
        for each in divided:
            assert (np.concatenate(owned)[each.order.numpy()] == np.arange(total)).all()
        document = np.searchsorted(ends, np.arange(total), side="right")
        query, key = np.arange(total)[:, None], np.arange(total)
        wanted = (document[:, None] == document) & (key <= query)
        if window is not None:
            wanted &= query - key < window
        plans = [make_plan(each, window) for each in divided]
        seen = np.zeros((total, total), dtype=int)
        for group, plan in enumerate(plans):
            mine, start = owned[group], 0
            assert sum(plan.rows.lengths) == len(mine)
            for length in plan.rows.lengths:
                part = mine[start : start + length]
                assert (np.diff(part) == 1).all()
                for token in part:
                    first = part[0] if window is None else max(part[0], token - window + 1)
                    seen[token, first : token + 1] += 1
                start += length
            for block in plan.own:
                paint(seen, mine, mine, block)
            for step in plan.steps:
                sender = (group - step.number) % ring
                (sent,) = (s.sent for s in plans[sender].steps if s.number == step.number)
                parts = [owned[sender][start:end] for start, end in sent]
                arrived = np.concatenate([np.zeros(0, dtype=int), *parts])
                assert len(arrived) == step.received
                for block in step.blocks:
                    paint(seen, mine, arrived, block)
        assert (seen == wanted).all(), (ring, rows, width, ends, window)


@pytest.mark.parametrize(("ring", "balance"), [(2, 1.001), (8, 1.03)])
def test_groups_have_as_much_work(ring, balance):
    """Documents of one length, of many, and one beside many."""
    generator = np.random.default_rng(0)
    lengths = np.clip(generator.lognormal(9, 1, 400).astype(int), 8, None)
    cuts = np.cumsum(lengths)
    total = 2**20
    for ends in (
        [0, total],
        [0, total // 2, *range(total // 2 + 2048, total + 1, 2048)],
        [0, *cuts[cuts < total].tolist(), total],
    ):
        work = []
        for spans in placed(ends, ring):
            found = 0
            for start, end in spans:
                first, last = np.searchsorted(ends, [start, end], side="right")
                inner = [start, *ends[first : last - (ends[last - 1] == end)], end]
                for a, b in itertools.pairwise(inner):
                    document = ends[np.searchsorted(ends, a, side="right") - 1]
                    found += (b - document) ** 2 - (a - document) ** 2
            work.append(found)
        assert max(work) <= balance * np.mean(work)
        assert sum(work) == sum(np.diff(np.array(ends)) ** 2)


def test_one_document_is_an_early_and_a_late_part():
    assert placed([0, 16], 2) == [[(0, 4), (12, 16)], [(4, 12)]]
    assert placed([0, 16], 4) == [
        [(0, 2), (14, 16)],
        [(2, 4), (12, 14)],
        [(4, 6), (10, 12)],
        [(6, 10)],
    ]


@pytest.mark.parametrize(("heads", "ring"), [(4, 1), (2, 2), (1, 4), (3, 2)])
@pytest.mark.parametrize("packed", [True, False])
def test_parts_of_rows_join_to_the_rows(heads, ring, packed):
    """Each token with its target, its weight and its position is in one part, and what comes later in its
    document is beside it."""

    def piece(tokens):
        weights = np.arange(tokens) / 8
        return np.arange(tokens) + 1, np.append(np.arange(1, tokens), IGNORED), weights

    rows = [make_sample([piece(17), piece(5)][: 1 + packed]), make_sample([piece(3)])]
    options = {"length": 24, "packed": packed, "document_masking": "varlen", "recurrent": True}
    options["depths"] = 4
    size = heads * ring
    parts = [
        collate_sequences(rows, **options, division=RowDivision(size, ring, rank))
        for rank in range(size)
    ]
    whole = collate_sequences(rows, **options)
    width = parts[0].micro_batch.targets.shape[1] * size
    places = [
        RowDivision(size, ring, rank).tokens(
            part.micro_batch.inputs.get("divided_rows"), rows=2, width=width
        )
        for rank, part in enumerate(parts)
    ]
    assert np.array_equal(np.sort(np.concatenate(places, 1)), [[*range(width)]] * 2)
    expected = contents(whole.micro_batch)
    for name in ("input_ids", "targets", "position_ids", "weights"):
        wanted = expected.get(name, torch.arange(width).expand(2, -1))
        for place, part in zip(places, parts, strict=True):
            found, inside = contents(part.micro_batch)[name], place < wanted.shape[1]
            for row in range(2):
                assert torch.equal(found[row][inside[row]], wanted[row, place[row][inside[row]]])
    tokens = np.zeros((2, width), dtype=int)
    tokens[0, :17], tokens[1, :3] = np.arange(17) + 1, np.arange(3) + 1
    if packed:
        tokens[0, 17:22] = np.arange(5) + 1
    lengths = np.where(np.arange(width) < 17, 17, 5) * np.ones((2, 1), dtype=int)
    lengths[1] = 3
    for place, part in zip(places, parts, strict=True):
        own, of = (np.take_along_axis(each, place, 1) for each in (tokens, lengths))
        for depth, later in enumerate(part.micro_batch.later, start=1):
            inside = (own > 0) & (own + depth <= of)
            ids = later.inputs["input_ids"].numpy()
            assert np.array_equal(ids[inside], (own + depth)[inside])
            wanted = np.where(inside & (own + depth < of), own + depth, IGNORED)
            assert np.array_equal(later.targets.numpy(), wanted)
            counted = wanted != IGNORED
            assert np.array_equal(later.weights.numpy()[counted], (own + depth - 1)[counted] / 8)
            assert later.positions.tolist() == counted.ravel().nonzero()[0].tolist()
        assert depth == 4
    assert sum(part.tokens for part in parts) == whole.tokens
    assert sum(part.loss_tokens for part in parts) == whole.loss_tokens
    assert sum(part.loss_weight for part in parts) == whole.loss_weight
    assert all(("divided_rows" in part.micro_batch.inputs) is (ring > 1) for part in parts)


def test_rings_that_divide_the_heads():
    assert rings_that_fit(8, 32) == [1, 2, 4, 8]
    assert rings_that_fit(8, 4) == [2, 4, 8]
    assert rings_that_fit(16, 20) == [4, 8, 16]
    assert rings_that_fit(3, 4) == [3]


def test_a_loader_process_gets_no_process_groups():
    groups = RowGroups(SimpleNamespace(), None, SimpleNamespace())
    division = RowDivision(4, 4, 1, groups)
    sent = pickle.loads(pickle.dumps(RowDivision(4, 4, 1, RowGroups(lambda: 0, None, None))))
    assert sent == division
    assert sent.groups is None
    assert copy.deepcopy(division).groups is groups
    assert RowDivision.of(SimpleNamespace(context_parallel_size=1), 1) is WHOLE_ROWS


def test_layers_of_a_window_share_a_plan():
    divided = RowDivision(2, 2, 1).place(np.array([0, 16]), rows=1, width=16)
    assert plan_of(divided, None) is plan_of(divided, None)
    assert plan_of(divided, 3) is not plan_of(divided, None)


def test_recomputed_layers_find_the_rows_of_their_call():
    call, model = DocumentsOfCall(), None
    first, second = (
        RowDivision(2, 2, 1).place(np.array([0, width]), rows=1, width=width) for width in (8, 16)
    )
    call.receive(model, (), {"divided_rows": first})
    again = call.recomputation()
    call.forget()
    call.receive(model, (), {"divided_rows": second})
    with again:
        assert call.divided is first
    assert call.divided is second
    assert copy.deepcopy(call) is call
