"""A stream has the same samples on any ranks, resumes from saved positions, and starts in bounded time."""

import functools
import itertools
import json
from types import SimpleNamespace

import pytest

from launcher.data import streaming
from launcher.data.batching import RankBatchSampler, StreamOrder
from launcher.data.encoder import Encoder, make_encoder
from launcher.data.setup import raise_error
from launcher.data.sources import find_parts, read_rows
from launcher.data.streaming import StreamingDataset, assign_shards
from launcher.data.token_store import ModelInputs
from launcher.errors import RecipeError
from launcher.models.chunked_loss import IGNORED
from launcher.recipe import schema
from launcher.recipe.hub import load_data_set

END = 256


@pytest.fixture
def small_shards(monkeypatch):
    """Small inputs are divided as large ones are."""
    monkeypatch.setattr(streaming, "_SHARD_BYTES", 50)


def make_stream(
    source,
    *,
    batch=4,
    micro=2,
    rank=0,
    ranks=1,
    first_step=0,
    steps=3,
    kind="text",
    skip=False,
    vocabulary=260,
    **more,
):
    folder, saved, seed = more.pop("folder", source), more.pop("saved", None), more.pop("seed", 3)
    options = {
        "sequence_length": 16,
        "shuffle_buffer": 1000,
        "on_error": "skip" if skip else "fail",
    } | more
    data = schema.Data(train=(str(source),), kind=kind, tokenizer="bytes", **options)
    sampler = RankBatchSampler(
        order=StreamOrder(),
        global_batch_size=batch,
        micro_batch_size=micro,
        rank=rank,
        ranks=ranks,
        first_step=first_step,
        steps=steps,
    )
    return StreamingDataset(
        find_parts(data.train, kind=kind),
        make_encoder(kind, data, tokenizer="bytes"),
        sampler=sampler,
        data=data,
        seed=seed,
        model=ModelInputs(vocabulary=vocabulary),
        skipped_rows=folder.parent / "skipped_rows.jsonl",
    ).starting(sampler, saved)


def rows_of(stream):
    """input_ids and targets of each row, as lists, in the order of the stream; what is wrong is raised, as the loader does."""
    stream = [raise_error(collated) for collated in stream]
    return [
        (ids, targets)
        for collated in stream
        for ids, targets in zip(
            collated["tensors"]["input_ids"].tolist(),
            collated["tensors"]["targets"].tolist(),
            strict=True,
        )
    ]


@pytest.fixture
def texts(tmp_path):
    """Two files of 40 and 7 documents, each one a number in letters."""
    folder = tmp_path / "texts"
    folder.mkdir()
    for name, numbers in (("a", range(40)), ("b", range(40, 47))):
        (folder / f"{name}.jsonl").write_text(
            "".join(json.dumps({"text": f"<{number}>"}) + "\n" for number in numbers)
        )
    return folder


def documents(rows):
    """The texts in a shard's sequences, joined over their cuts."""
    ids = [token for ids, _ in rows for token in ids]
    return [
        bytes(group).decode()
        for between, group in itertools.groupby(ids, key=lambda token: token in (END, 0))
        if not between
    ]


def steps_of(source, *, ranks=1, workers=1, steps=3, first_step=0, **more):
    """The rows of each step, in the order of the run, over all ranks and loader processes; and the states after each step."""
    streams = [
        make_stream(source, rank=rank, ranks=ranks, steps=steps, first_step=first_step, **more)
        for rank in range(ranks)
    ]
    assert streams[0].workers(workers) == workers
    running = [
        [stream._micro_batches(worker, workers) for worker in range(workers)] for stream in streams
    ]
    micro_batches, batch = (
        streams[0]._sampler.micro_batches(0),
        streams[0]._sampler.global_batch_size,
    )
    found, states = [], []
    for step in range(first_step, steps):
        positions, rows = {}, []
        for of_rank in running:
            for number in range(micro_batches):
                collated = next(of_rank[number % workers])
                rows += [row for row in rows_of([collated]) if any(row[0])]
                positions |= collated["positions"]
        found.append(sorted(rows))
        alone = SimpleNamespace(size=1)
        states.append(streams[0].state(positions, samples=(step + 1) * batch, ranks=alone))
    return found, json.loads(json.dumps(states))


@pytest.mark.parametrize("size", [50, 350, 10**6])
@pytest.mark.parametrize("shuffle", [True, False])
def test_every_row_belongs_to_one_shard(texts, monkeypatch, size, shuffle):
    monkeypatch.setattr(streaming, "_SHARD_BYTES", size)
    (texts / "empty.txt").write_text("")
    parts = find_parts((str(texts),), kind="text")
    assigned = assign_shards(parts, seed=3, shuffle=shuffle)
    assert len(assigned) == {50: 8, 350: 2, 10**6: 1}[size], "a power of two"
    rows = [row.values["text"] for shard in assigned for part in shard for row in read_rows(part)]
    assert sorted(rows) == sorted(f"<{number}>" for number in range(47)), (
        "each file is read once, each line by one shard"
    )
    held = [sum(part.size for part in shard) for shard in assigned]
    assert max(held) - min(held) <= max(part.size for shard in assigned for part in shard)
    assert assigned == assign_shards(parts, seed=3, shuffle=shuffle)


def test_a_line_longer_than_a_part_is_read_once(tmp_path, small_shards):
    file = tmp_path / "long.jsonl"
    texts = ["a" * 500, "b", "c" * 130, "d" * 3, "e" * 49]
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    assigned = assign_shards(find_parts((str(file),), kind="text"), seed=3, shuffle=False)
    assert (
        sorted(
            row.values["text"] for shard in assigned for part in shard for row in read_rows(part)
        )
        == texts
    )


def test_the_shards_do_not_depend_on_the_batch(texts, small_shards):
    of_batches = [
        [
            row
            for step in steps_of(texts, batch=batch, micro=1, steps=48 // batch)[0]
            for row in step
        ]
        for batch in (4, 12)
    ]
    assert len(of_batches[0]) == 48
    assert sorted(of_batches[0]) == sorted(of_batches[1])


def test_the_first_step_reads_no_more_for_a_larger_batch(tmp_path, monkeypatch, small_shards):
    file = tmp_path / "large.jsonl"
    file.write_text("".join(json.dumps({"text": "x" * 100}) + "\n" for _ in range(20_000)))
    read = []
    monkeypatch.setattr(
        streaming,
        "read_rows",
        lambda *a, **k: (read.append(1) or row for row in read_rows(*a, **k)),
    )
    counts = []
    for batch in (16, 1024):
        read.clear()
        next(iter(make_stream(file, batch=batch, micro=2, shuffle_buffer=640, sequence_length=64)))
        counts.append(len(read))
    assert counts[0] == counts[1] <= 640 + 64 * (streaming._ENCODED_ROWS + 1)


def test_a_pass_reads_each_document_once_and_the_next_one_in_another_order(texts):
    stream = make_stream(texts, batch=1, micro=1, steps=60)
    seen = documents(rows_of(stream))
    first, second = seen[:47], seen[47:94]
    assert sorted(first) == sorted(second) == sorted(f"<{number}>" for number in range(47))
    assert first != second


def test_without_shuffle_documents_come_in_the_order_of_the_files(texts):
    seen = documents(rows_of(make_stream(texts, batch=1, micro=1, steps=14, shuffle=False)))
    assert seen[:40] == [f"<{number}>" for number in range(40)]


def test_every_token_is_the_target_of_the_one_before_it_also_over_a_cut(texts):
    rows = rows_of(make_stream(texts, batch=1, micro=1, steps=8, sequence_length=7))
    ids, targets = ([token for row in rows for token in row[side]] for side in (0, 1))
    for token, target, following in zip(ids, targets, ids[1:], strict=False):
        assert target == (IGNORED if token == END else following)
    assert len(ids) == 56, "no padding"


LAYOUTS = [
    {"ranks": 1, "micro": 1},
    {"ranks": 1, "micro": 1, "workers": 4},
    {"ranks": 2, "micro": 3, "workers": 2},
    {"ranks": 4, "micro": 1},
    {"ranks": 3, "micro": 4},
    {"ranks": 5, "micro": 2},  # does not divide the batch: only a resumed run may have it
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_ranks_micro_batches_and_loader_processes_do_not_change_a_step(texts, small_shards, layout):
    whole, states = steps_of(texts, batch=12, micro=12)
    assert steps_of(texts, batch=12, **layout) == (whole, states)


@pytest.mark.parametrize("kind", ["text", "tokens"])
def test_a_resume_continues_from_the_saved_positions(tmp_path, small_shards, kind):
    folder = tmp_path / "rows"
    folder.mkdir()
    for name in ("a", "b"):
        sizes = [1 + (number * 37) % 41 for number in range(60)]
        rows = [
            {"input_ids": [1 + number] * size, "text": (f"{name}{number} " * size)[:size]}
            for number, size in enumerate(sizes)
        ]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = {"batch": 12, "kind": kind, "steps": 20, "shuffle_buffer": 40}
    whole, states = steps_of(folder, micro=12, **options)
    passes = {position[0] for position in states[-1]["positions"]}
    assert max(passes) >= 1, "into the second pass"
    for layout in LAYOUTS:
        found, again = steps_of(folder, first_step=18, saved=states[17], **layout, **options)
        assert found == whole[18:]
        assert again == states[18:]
    # Batches may be skipped after the checkpoint; without the positions everything is tokenized again
    assert (
        steps_of(folder, first_step=18, saved=states[14], **LAYOUTS[2], **options)[0] == whole[18:]
    )
    assert steps_of(folder, first_step=18, **LAYOUTS[2], **options)[0] == whole[18:]


def test_a_resume_does_not_tokenize_what_was_seen(tmp_path, monkeypatch):
    file = tmp_path / "rows.jsonl"
    file.write_text(
        "".join(json.dumps({"input_ids": [number % 200] * 10}) + "\n" for number in range(1000))
    )
    encoded = []
    monkeypatch.setattr(
        Encoder,
        "encode_rows",
        lambda *a, real=Encoder.encode_rows, **k: (
            encoded.append(1) or one for one in real(*a, **k)
        ),
    )
    whole, states = steps_of(file, steps=100, kind="tokens")
    assert len(encoded) > 300
    encoded.clear()
    assert (
        steps_of(file, steps=100, first_step=98, saved=states[97], kind="tokens")[0] == whole[98:]
    )
    assert len(encoded) < 60


def test_positions_of_another_order_are_not_used(texts, small_shards):
    whole, states = steps_of(texts, batch=12, micro=12, seed=4)
    _, others = steps_of(texts, batch=12, micro=12, seed=5)
    assert others[0]["order"] != states[0]["order"]
    assert (
        steps_of(texts, batch=12, micro=12, seed=4, first_step=1, saved=others[0])[0] == whole[1:]
    )


def test_the_ranks_divide_the_tokenization(texts, small_shards):
    """Each of two ranks, each with two loader processes, tokenizes a quarter of the shards."""
    stream = [make_stream(texts, batch=8, micro=1, rank=rank, ranks=2) for rank in range(2)]
    read = [
        set(next(one._micro_batches(worker, 2))["positions"])
        for one in stream
        for worker in range(2)
    ]
    assert [len(one) for one in read] == [2, 2, 2, 2]
    assert set.union(*read) == set(range(8))
    assert (
        stream[0]
        .describe()[0]
        .endswith("in 8 shards, sequences of up to 16, packed; each rank reads 4 shards")
    )
    assert (
        "each shard is tokenized by 3 ranks"
        in make_stream(texts, batch=6, micro=1, ranks=6).describe()[1]
    )


@pytest.mark.parametrize(("wanted", "workers"), [(0, 0), (1, 1), (2, 2), (3, 2), (8, 4)])
def test_loader_processes_divide_the_micro_batches(texts, wanted, workers):
    assert make_stream(texts, micro=1).workers(wanted) == workers


def test_whole_documents_stay_whole_where_they_fit(tmp_path):
    """kind tokens: a sequence ends early rather than splits a row; rows longer than a sequence are split."""
    folder = tmp_path / "rows"
    folder.mkdir()
    sizes = [5, 6, 9, 20, 3]
    (folder / "a.jsonl").write_text(
        "".join(json.dumps({"input_ids": [size] * size}) + "\n" for size in sizes)
    )
    rows = rows_of(make_stream(folder, batch=1, micro=1, steps=5, kind="tokens", shuffle=False))
    assert [[ids[place] for place in (0, 5, 11)] for ids, _ in rows[:2]] == [[5, 6, 0], [9, 9, 0]]
    assert [ids.count(20) for ids, _ in rows] == [0, 0, 16, 4, 0]
    assert rows[3][0][:13] == [20] * 4 + [3] * 3 + [5] * 5 + [0], (
        "the next pass follows without padding"
    )
    loose = rows_of(
        make_stream(folder, batch=1, micro=1, steps=6, kind="tokens", shuffle=False, packing=False)
    )
    assert [len(ids) for ids, _ in loose] == [5, 6, 9, 16, 4, 3]


def test_rows_that_cannot_be_used(texts):
    (texts / "c.jsonl").write_text('{"text": "fine"}\n{"body": "x"}\nnot json\n')
    with pytest.raises(RecipeError, match=r"c\.jsonl:[23]: "):
        rows_of(make_stream(texts, batch=1, micro=1, steps=30))
    seen = documents(rows_of(make_stream(texts, batch=1, micro=1, steps=60, skip=True)))
    assert seen.count("fine") >= 2
    listed = [
        json.loads(line) for line in (texts.parent / "skipped_rows.jsonl").read_text().splitlines()
    ]
    assert [
        one["where"].rpartition("/")[2] for one in sorted(listed, key=lambda one: one["where"])
    ] == ["c.jsonl:2", "c.jsonl:3"]


def test_skipped_rows_are_listed_once(texts, small_shards):
    (texts / "c.jsonl").write_text('{"text": "fine"}\n{"body": "x"}\nnot json\n')
    steps_of(texts, ranks=3, batch=12, micro=1, workers=4, steps=8, skip=True)
    listed = [
        json.loads(line)["where"]
        for line in (texts.parent / "skipped_rows.jsonl").read_text().splitlines()
    ]
    assert len(listed) == len(set(listed)) == 2


@pytest.mark.parametrize("row", ['{"text": ""}\n', ""])
def test_data_without_a_document_is_refused(tmp_path, row):
    folder = tmp_path / "few"
    folder.mkdir()
    (folder / "a.jsonl").write_text(row)
    (folder / "b.txt").write_text("")
    with pytest.raises(RecipeError, match=r"a\.jsonl"):
        rows_of(make_stream(folder, skip=True))


def test_few_documents_make_a_large_batch(tmp_path):
    folder = tmp_path / "few"
    folder.mkdir()
    (folder / "a.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n')
    assert len(rows_of(make_stream(folder, batch=64, micro=8))) == 3 * 64


def test_an_id_beyond_the_vocabulary_is_refused(texts):
    with pytest.raises(
        RecipeError, match=r"jsonl:\d+: token id 256 is beyond the model's vocabulary of 256"
    ):
        rows_of(make_stream(texts, vocabulary=256))


def test_a_hub_data_set_is_streamed_by_its_shards(tmp_path, monkeypatch):
    """The hub is out of reach here: the same kind of data set, from files, stands in for it."""
    import datasets

    files = []
    for number in range(3):
        files.append(str(tmp_path / f"{number}.jsonl"))
        (tmp_path / f"{number}.jsonl").write_text(
            "".join(json.dumps({"text": f"<{number}.{row}>"}) + "\n" for row in range(8))
        )
    asked = []

    def load_dataset(repository, config, *, split, streaming):
        asked.append((repository, config, split, streaming))
        return real(
            "json",
            data_files=files,
            split="train",
            streaming=True,
            cache_dir=str(tmp_path / "cache"),
        )

    for module in ("sources", "streaming"):
        monkeypatch.setattr(
            f"launcher.data.{module}.load_data_set", functools.cache(load_data_set.__wrapped__)
        )
    real = datasets.load_dataset
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    whole, states = steps_of("owner/set", batch=2, micro=1, steps=16, folder=tmp_path)
    assert len(states[0]["positions"]) == 2, "three files, and a power of two"
    assert (
        steps_of(
            "owner/set",
            batch=2,
            micro=1,
            ranks=2,
            first_step=9,
            steps=16,
            saved=states[8],
            folder=tmp_path,
        )[0]
        == whole[9:]
    )
    seen = [
        text
        for shard in (0, 1)
        for text in documents(
            rows_of(make_stream("owner/set", batch=2, steps=16, folder=tmp_path))[shard::2]
        )
    ]
    assert set(seen) >= {f"<{number}.{row}>" for number in range(3) for row in range(8)}
    assert set(asked) == {("owner/set", None, "train", True)}
