"""A stream gives each lane its own documents, every row to one of them in each pass, whatever reads it."""

import functools
import itertools
import json

import pytest

from launcher.batching import RankSlots
from launcher.data.encoder import make_encoder
from launcher.data.loader import _sound
from launcher.data.sources import find_parts
from launcher.data.streaming import StreamingDataset, StreamOrder, deal
from launcher.errors import RecipeError
from launcher.hub import load_data_set
from launcher.loss import IGNORED
from launcher.recipe import schema

END = 256


def make_stream(source, *, lanes=4, micro=2, rank=0, ranks=1, first_step=0, steps=3, kind="text", shuffle=True, skip=False, **more):
    folder = more.pop("folder", source)
    data = schema.Data(train=(str(source),), kind=kind, tokenizer="bytes")
    slots = RankSlots(
        order=StreamOrder(), global_batch_size=lanes, micro_batch_size=micro, rank=rank, ranks=ranks, first_step=first_step, steps=steps
    )
    options = {"length": 16, "packing": True, "isolation": "mask", "vocabulary": 260, "seed": 3} | more
    return StreamingDataset(
        find_parts(data.train, kind=kind),
        make_encoder(kind, data, tokenizer="bytes"),
        slots=slots,
        shuffle=shuffle,
        shuffle_buffer=data.shuffle_buffer,
        skip_bad_rows=skip,
        skipped_rows=folder.parent / "skipped_rows.jsonl",
        **options,
    )


def rows_of(stream):
    """input_ids and targets of each row, as lists, in the order of the stream; what is wrong is raised, as the loader does."""
    stream = [_sound(collated) for collated in stream]
    return [
        (ids, targets)
        for collated in stream
        for ids, targets in zip(collated["tensors"]["input_ids"].tolist(), collated["tensors"]["targets"].tolist(), strict=True)
    ]


@pytest.fixture
def texts(tmp_path):
    """Two files of 40 and 7 documents, each one a number in letters."""
    folder = tmp_path / "texts"
    folder.mkdir()
    for name, numbers in (("a", range(40)), ("b", range(40, 47))):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"text": f"<{number}>"}) + "\n" for number in numbers))
    return folder


def documents(lanes_rows):
    """The texts in a lane's sequences, joined over their cuts; a pass ends with padding."""
    ids = [token for ids, _ in lanes_rows for token in ids]
    return [bytes(group).decode() for between, group in itertools.groupby(ids, key=lambda token: token in (END, 0)) if not between]


@pytest.mark.parametrize("lanes", [1, 4, 9])
def test_every_row_belongs_to_one_lane(texts, lanes):
    parts = find_parts((str(texts),), kind="text")
    dealt = deal(parts, lanes=lanes, seed=3, shuffle=True)
    assert len(dealt) == lanes
    assert all(dealt), "no lane without a unit, though there are fewer files than lanes"
    taken = [(unit.part.name, unit.part.start, place) for lane in dealt for unit in lane for place in range(unit.first, 100, unit.every)]
    assert len(taken) == len(set(taken)) == 200
    assert dealt == deal(parts, lanes=lanes, seed=3, shuffle=True)


def test_large_files_are_divided_among_the_lanes(tmp_path):
    file = tmp_path / "large.jsonl"
    file.write_text("".join(json.dumps({"text": "x" * 1000, "number": number}) + "\n" for number in range(1500)))
    dealt = deal(find_parts((str(file),), kind="text"), lanes=4, seed=0, shuffle=False)
    units = [unit for lane in dealt for unit in lane]
    assert len(units) >= 16
    assert {unit.every for unit in units} == {1}, "each row is read by its lane alone"
    assert sum(unit.part.size for unit in units) == file.stat().st_size


def test_a_pass_reads_each_document_once_and_the_next_one_in_another_order(texts):
    stream = make_stream(texts, lanes=1, micro=1, steps=60)
    seen = documents(rows_of(stream))
    first, second = seen[:47], seen[47:94]
    assert sorted(first) == sorted(second) == sorted(f"<{number}>" for number in range(47))
    assert first != second


def test_without_shuffle_documents_come_in_the_order_of_the_files(texts):
    seen = documents(rows_of(make_stream(texts, lanes=1, micro=1, steps=14, shuffle=False)))
    assert seen[:40] == [f"<{number}>" for number in range(40)]


def test_every_token_is_the_target_of_the_one_before_it_also_over_a_cut(texts):
    rows = rows_of(make_stream(texts, lanes=1, micro=1, steps=8, length=7))
    ids, targets = ([token for row in rows for token in row[side]] for side in (0, 1))
    for token, target, following in zip(ids, targets, ids[1:], strict=False):
        assert target == (IGNORED if token == END else following)
    assert len(ids) == 56, "no padding"


@pytest.mark.parametrize(("ranks", "micro"), [(1, 1), (1, 4), (2, 2), (2, 1), (4, 1)])
def test_ranks_and_micro_batches_do_not_change_a_step(texts, ranks, micro):
    whole = rows_of(make_stream(texts, micro=4))
    of_ranks = [list(make_stream(texts, micro=micro, rank=rank, ranks=ranks)) for rank in range(ranks)]
    together = [rows_of([one]) for turn in zip(*of_ranks, strict=True) for one in turn]
    assert [row for rows in together for row in rows] == whole


def test_a_later_step_is_found_by_reading_up_to_it(texts):
    assert rows_of(make_stream(texts, steps=9, first_step=4)) == rows_of(make_stream(texts, steps=9))[4 * 4 :]


@pytest.mark.parametrize(("wanted", "workers"), [(0, 0), (1, 1), (2, 2), (3, 2), (8, 4)])
def test_loader_processes_divide_the_micro_batches(texts, wanted, workers):
    assert make_stream(texts, micro=1).workers(wanted) == workers


def test_whole_documents_stay_whole_where_they_fit(tmp_path):
    """kind tokens: a sequence ends early rather than splits a row; rows longer than a sequence are split."""
    folder = tmp_path / "rows"
    folder.mkdir()
    sizes = [5, 6, 9, 20, 3]
    (folder / "a.jsonl").write_text("".join(json.dumps({"input_ids": [size] * size}) + "\n" for size in sizes))
    rows = rows_of(make_stream(folder, lanes=1, micro=1, steps=5, kind="tokens", shuffle=False))
    assert [[ids[place] for place in (0, 5, 11)] for ids, _ in rows[:2]] == [[5, 6, 0], [9, 9, 0]]
    assert [ids.count(20) for ids, _ in rows] == [0, 0, 16, 4, 0]
    assert rows[3][0][:8] == [20] * 4 + [3] * 3 + [0]
    loose = rows_of(make_stream(folder, lanes=1, micro=1, steps=6, kind="tokens", shuffle=False, packing=False))
    assert [len(ids) for ids, _ in loose] == [5, 6, 9, 16, 4, 3]


def test_rows_that_cannot_be_used(texts):
    (texts / "c.jsonl").write_text('{"text": "fine"}\n{"body": "x"}\nnot json\n')
    with pytest.raises(RecipeError, match=r"c\.jsonl:[23]: "):
        rows_of(make_stream(texts, lanes=1, micro=1, steps=30))
    seen = documents(rows_of(make_stream(texts, lanes=1, micro=1, steps=60, skip=True)))
    assert seen.count("fine") >= 2
    listed = [json.loads(line) for line in (texts.parent / "skipped_rows.jsonl").read_text().splitlines()]
    assert [one["where"].rpartition("/")[2] for one in sorted(listed, key=lambda one: one["where"])] == ["c.jsonl:2", "c.jsonl:3"]


def test_more_lanes_than_documents_are_refused(tmp_path):
    folder = tmp_path / "few"
    folder.mkdir()
    (folder / "a.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n')
    with pytest.raises(RecipeError, match=r"data\.streaming: there is no document for lane \d of 4 \(batch\.global_batch_size\)"):
        rows_of(make_stream(folder))


def test_an_id_beyond_the_vocabulary_is_refused(texts):
    with pytest.raises(RecipeError, match=r"jsonl:\d+: token id 256 is beyond the model's vocabulary of 256"):
        rows_of(make_stream(texts, vocabulary=256))


@pytest.mark.parametrize("lanes", [2, 5])
def test_a_hub_data_set_is_streamed_by_its_shards(tmp_path, monkeypatch, lanes):
    """The hub is out of reach here: the same kind of data set, from files, stands in for it."""
    import datasets

    files = []
    for number in range(3):
        files.append(str(tmp_path / f"{number}.jsonl"))
        (tmp_path / f"{number}.jsonl").write_text("".join(json.dumps({"text": f"<{number}.{row}>"}) + "\n" for row in range(8)))
    asked = []

    def load_dataset(repository, config, *, split, streaming):
        asked.append((repository, config, split, streaming))
        return real("json", data_files=files, split="train", streaming=True, cache_dir=str(tmp_path / "cache"))

    monkeypatch.setattr("launcher.data.streaming.load_data_set", functools.cache(load_data_set.__wrapped__))
    real = datasets.load_dataset
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    stream = make_stream("owner/set", lanes=lanes, micro=1, steps=30, folder=tmp_path)
    of_lanes = [[row for place, row in enumerate(rows_of(stream)) if place % lanes == lane] for lane in range(lanes)]
    seen = [set(documents(rows)) for rows in of_lanes]
    assert set.union(*seen) == {f"<{number}.{row}>" for number in range(3) for row in range(8)}
    assert sum(map(len, seen)) == 24, "each row in one lane"
    assert set(asked) == {("owner/set", None, "train", True)}
