"""Properties of packing, order, stores and masks that hold for any input (hypothesis)."""

import bisect
import itertools
from collections import Counter, defaultdict
from dataclasses import fields

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from launcher.data import packing as packed_by
from launcher.data.batching import NO_SAMPLE, RankBatchSampler, SampleOrder, joined_rows, permuted
from launcher.data.documents import Encoded
from launcher.data.held_out import held_out
from launcher.data.packing import Sizes, Stream, best_fit, pack, separate, stream, with_targets
from launcher.data.store_files import StoreWriter
from launcher.data.token_store import store_rows
from launcher.models.micro_batch import IGNORED
from launcher.sources.rows import Row, SourcePart
from tests.unit.data.test_chat import (
    CHATML,
    bpe_tokenizer,
    dialogue,
    loss_texts,
    with_marks,
    without_marks,
)

SEEDS = some.integers(0, 2**63)
LENGTHS = some.lists(some.integers(1, 40), min_size=1, max_size=30)
few = settings(max_examples=100, deadline=None, derandomize=True)
"""The same examples each time: a failure is repeatable, and CI does not fail by chance."""
fewer = settings(few, max_examples=25)


@few
@given(size=some.integers(1, 100), seed=SEEDS, epoch=some.integers(0, 1000))
def test_a_permutation_has_each_index_once(size, seed, epoch):
    drawn = [permuted(index, size=size, seed=seed, epoch=epoch) for index in range(size)]
    assert sorted(drawn) == [*range(size)]


@few
@given(
    samples=some.integers(1, 60),
    epochs=some.integers(1, 3),
    micro=some.integers(1, 3),
    ranks=some.integers(1, 4),
    accumulation=some.integers(1, 3),
    seed=SEEDS,
)
def test_each_sample_once_in_an_epoch_on_any_ranks(
    samples, epochs, micro, ranks, accumulation, seed
):
    order = SampleOrder(samples=samples, seed=seed, shuffle=True, epochs=epochs)
    size = micro * ranks * accumulation
    steps = -(-samples * epochs // size)
    drawn = Counter()
    for rank in range(ranks):
        sampler = RankBatchSampler(
            order=order,
            global_batch_size=size,
            micro_batch_size=micro,
            rank=rank,
            ranks=ranks,
            steps=steps,
        )
        batches = [*sampler]
        assert len(batches) == sum(map(sampler.micro_batches, range(steps)))
        drawn.update(itertools.chain(*batches))
    del drawn[NO_SAMPLE]
    assert drawn == dict.fromkeys(range(samples), epochs)


@few
@given(
    lengths=LENGTHS,
    kind=some.sampled_from(["text", "tokens", "chat"]),
    packing=some.booleans(),
    size=some.integers(2, 32),
    data=some.data(),
)
def test_packing_has_each_target_once(lengths, kind, packing, size, data):
    offsets = np.cumsum([0, *lengths])
    labels = np.arange(offsets[-1], dtype=np.int32)
    ignored = data.draw(some.lists(some.integers(0, len(labels) - 1), max_size=len(labels)))
    labels[ignored] = IGNORED
    packed = pack(offsets, kind, packing=packing, sequence_length=size, labels=labels)
    counts = np.zeros(len(labels), dtype=int)
    for first, last in itertools.pairwise(packed.bounds):
        assert packed.lengths[first:last].sum() <= size
        for start, length in zip(
            packed.starts[first:last], packed.lengths[first:last], strict=True
        ):
            number = np.searchsorted(offsets, start, side="right") - 1
            assert start + length <= offsets[number + 1], "a piece is of one document"
            counts[start + 1 : min(start + length + 1, offsets[number + 1])] += 1
    expected = np.ones(len(labels), dtype=int)
    expected[offsets[:-1]] = 0  # nothing comes before a document's first token
    if kind == "chat":  # its end is cut off
        for start, length in zip(offsets, lengths, strict=False):
            expected[start + size + 1 : start + length] = 0
    learned = labels != IGNORED
    assert (counts[learned] == expected[learned]).all()
    assert packed.targets == counts[learned].sum()
    assert counts.max(initial=0) <= 1


def best_fit_one_by_one(sizes, length):
    """The pieces of each sequence: best-fit decreasing, a piece at a time."""
    contents, room, free = [], defaultdict(list), []
    for piece in sorted(range(len(sizes)), key=lambda piece: -sizes[piece]):
        at = bisect.bisect_left(free, sizes[piece])
        if at == len(free):
            sequence, left = len(contents), length - sizes[piece]
            contents.append([])
        else:
            sequence, left = room[free[at]].pop(), free[at] - sizes[piece]
            if not room[free[at]]:
                free.pop(at)
        contents[sequence].append(piece)
        if not room[left]:
            bisect.insort(free, left)
        room[left].append(sequence)
    return sorted(sorted(content) for content in contents)


@pytest.mark.slow
@settings(few, max_examples=1000)
@given(sizes=some.lists(some.integers(1, 40), min_size=1, max_size=80), more=some.integers(0, 60))
def test_best_fit_gives_each_piece_the_place_that_it_had_one_by_one(sizes, more):
    """The order of samples of a run, and so its resume, depends on it."""
    length = max(sizes) + more
    offsets = np.cumsum([0, *sizes])
    fitted = best_fit(separate(offsets, length), length)
    starts = iter(fitted.starts.tolist())
    found = [list(itertools.islice(starts, count)) for count in np.diff(fitted.bounds)]
    expected = best_fit_one_by_one(sizes, length)
    assert found == [[offsets[piece] for piece in content] for content in expected]
    assert fitted.lengths.tolist() == [sizes[piece] for content in expected for piece in content]


@pytest.mark.slow
@settings(few, max_examples=1000)
@given(
    lengths=some.lists(some.one_of(some.just(1), some.integers(1, 30)), min_size=1, max_size=60),
    size=some.integers(1, 12),
    block=some.integers(1, 5),
    data=some.data(),
)
def test_a_stream_of_text_has_the_pieces_that_it_does_not_hold(lengths, size, block, data):
    offsets = np.cumsum([0, *lengths])
    chosen = data.draw(some.none() | some.sets(some.integers(0, len(lengths) - 1), min_size=1))
    documents = None if chosen is None else np.array(sorted(chosen))
    row = offsets if chosen is None else np.cumsum([0, *np.diff(offsets)[documents]])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packed_by, "_COUNTED_SEQUENCES", block)
        made = pack(offsets, "text", packing=True, sequence_length=size, documents=documents)
    assert isinstance(made, Stream)
    expected = with_targets(stream(row, size), row, None)
    starts = expected.starts
    if chosen is not None:
        of = np.searchsorted(row, starts, side="right") - 1
        starts = starts - row[of] + offsets[documents][of]
    assert made.starts.tolist() == starts.tolist()
    for field in fields(expected):
        if field.name != "starts":
            value = getattr(expected, field.name)
            assert np.array_equal(getattr(made, field.name), value), field.name
    pieces = list(zip(starts.tolist(), expected.lengths.tolist(), strict=True))
    bounds = list(itertools.pairwise(expected.bounds.tolist()))
    assert [list(made.pieces(index)) for index in range(len(made))] == [
        pieces[first:last] for first, last in bounds
    ]
    assert list(Sizes(made)) == [expected.lengths[first:last].sum() for first, last in bounds]
    assert (len(made), made.tokens) == (len(expected), expected.tokens)


@few
@given(lengths=some.lists(some.integers(1, 16), min_size=1, max_size=24), ranks=some.integers(1, 3))
def test_joined_rows_have_each_sample_once(lengths, ranks):
    samples = [*range(len(lengths))]
    rows = joined_rows(samples, lengths, row_length=16, ranks=ranks)
    assert sorted(sample for row in rows for sample in row if sample != NO_SAMPLE) == samples
    assert all(sum(lengths[s] for s in row if s != NO_SAMPLE) <= 16 for row in rows)


def rows_of(numbers):
    """Some rows cannot be used, and some documents have labels of their own."""
    part = SourcePart("rows.jsonl", "jsonl")
    for line, (first, *more) in enumerate(numbers, start=1):
        ids = np.array([first, *more], dtype=np.int32)
        labels = ids + 1 if first == 9 else None
        row, problem = Row(part, line, {}), "bad" if first == 8 else ""
        yield Encoded(row=row, ids=ids[:0] if problem else ids, labels=labels, problem=problem)


DOCUMENTS = some.lists(some.lists(some.integers(0, 9), min_size=1, max_size=9), min_size=1)


@pytest.mark.slow
@few
@given(tasks=some.lists(DOCUMENTS, min_size=1, max_size=5), data=some.data())
def test_a_store_continued_after_any_part_is_the_same(tasks, data, tmp_path_factory):
    stores = [store_rows([*rows_of(task)], {"rows.jsonl": 0}) for task in tasks]

    def written(folder, *ends):
        folder.mkdir()
        for end in ends:
            with StoreWriter(folder, len(tasks)) as writer:
                for store in stores[writer.done : end]:
                    writer.add(store)
                    writer.part_done()
                writer.save()
                if end == len(tasks):
                    meta = writer.finish()
                elif end < len(tasks):
                    writer.add(
                        stores[end]
                    )  # of a part that is not done: the process is killed here
        return meta, {file.name: file.read_bytes() for file in folder.iterdir()}

    folder = tmp_path_factory.mktemp("stores")
    stops = data.draw(some.lists(some.integers(0, len(tasks) - 1), max_size=3).map(sorted))
    assert written(folder / "one", len(tasks)) == written(folder / "two", *stops, len(tasks))


@few
@given(hashes=some.lists(some.integers(0, 2**64 - 1), min_size=2, max_size=60, unique=True))
def test_held_out_rows_do_not_depend_on_their_order(hashes):
    values = np.array(hashes, dtype=np.uint64)
    chosen = {*values[held_out(values, 0.3)].tolist()}
    backwards = values[::-1].copy()
    assert {*backwards[held_out(backwards, 0.3)].tolist()} == chosen


TOKENIZER = bpe_tokenizer()
TURNS = some.text(
    some.characters(codec="utf-8", exclude_characters="<>|[]{}"), min_size=1, max_size=12
)


@pytest.mark.slow
@fewer
@given(
    turns=some.lists(TURNS.filter(str.strip), min_size=2, max_size=6).filter(
        lambda turns: len(turns) % 2 == 0
    )
)
def test_loss_is_on_the_answers_of_any_chat(turns):
    expected = [f"{answer}<|end|>" for answer in turns[1::2]]
    for template in (with_marks(CHATML), without_marks(CHATML)):
        assert loss_texts(TOKENIZER, template, dialogue(*turns)) == expected
