"""Streams: equal samples on any number of ranks, resuming from positions, bounded start time."""

import functools
import itertools
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from launcher.data import streaming
from launcher.data.batching import RankBatchSampler, StreamOrder
from launcher.data.collation import raise_error
from launcher.data.encoder import Encoder, make_encoder
from launcher.data.streaming import StreamingDataset, assign_shards
from launcher.data.token_store import ModelTraits
from launcher.errors import RecipeError
from launcher.models.micro_batch import IGNORED
from launcher.objectives.next_token import NextToken
from launcher.recipe import schema
from launcher.sources.finding import find_parts
from launcher.sources.hub import load_data_set
from launcher.sources.rows import read_rows
from tests.unit.data.rows import write

END = 256


@pytest.fixture
def small_shards(monkeypatch):
    """Sets a small shard size, so that a small input is divided like a large one."""
    monkeypatch.setattr(streaming, "_SHARD_BYTES", 50)


def make_stream(source, *, batch=4, micro=2, rank=0, ranks=1, first_step=0, steps=3, **more):
    folder, saved, seed = more.pop("folder", source), more.pop("saved", None), more.pop("seed", 3)
    kind, vocabulary = more.pop("kind", "text"), more.pop("vocabulary", 260)
    options = {"sequence_length": 16, "shuffle_buffer": 1000} | more
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
        objective=NextToken(),
        sampler=sampler,
        data=data,
        seed=seed,
        model=ModelTraits(vocabulary=vocabulary),
        skipped_rows=folder.parent / "skipped_rows.jsonl",
    ).starting(sampler, saved)


def rows_of(stream):
    """(input_ids, targets) of each row as lists, in the order of the stream.

    Raises the errors of the stream, as the loader does.
    """
    rows = []
    for collated in map(raise_error, stream):
        made = collated.micro_batch
        rows += zip(made.inputs["input_ids"].tolist(), made.targets.tolist(), strict=True)
    return rows


@pytest.fixture
def texts(tmp_path):
    """Two files of 40 and 7 documents. Each document is a number in angle brackets."""
    for name, numbers in (("a", range(40)), ("b", range(40, 47))):
        write(tmp_path / f"texts/{name}.jsonl", [f"<{number}>" for number in numbers])
    return tmp_path / "texts"


def documents(rows):
    """The documents in a shard's sequences. Joins documents that were split between sequences."""
    ids = [token for ids, _ in rows for token in ids]
    groups = itertools.groupby(ids, key=lambda token: token in (END, 0))
    return [bytes(group).decode() for between, group in groups if not between]


def skipped_rows(folder):
    lines = (folder.parent / "skipped_rows.jsonl").read_text().splitlines()
    return sorted(Path(json.loads(line)["where"]).name for line in lines)


def steps_of(source, *, ranks=1, workers=1, steps=3, first_step=0, **more):
    """Simulates a run with all its ranks and loader processes.

    Returns the sorted rows of each step, and the state after each step.
    """
    more |= {"ranks": ranks, "steps": steps, "first_step": first_step}
    streams = [make_stream(source, rank=rank, **more) for rank in range(ranks)]
    assert streams[0].workers(workers) == workers
    iterators = [
        [stream._micro_batches(worker, workers) for worker in range(workers)] for stream in streams
    ]
    sampler = streams[0]._sampler
    micro_batches, batch = sampler.micro_batches(0), sampler.global_batch_size
    found, states = [], []
    for step in range(first_step, steps):
        positions, rows = {}, []
        for rank_iterators in iterators:
            for number in range(micro_batches):
                collated = next(rank_iterators[number % workers])
                rows += [row for row in rows_of([collated]) if any(row[0])]
                positions |= collated.shard_positions
        found.append(sorted(rows))
        one_rank = SimpleNamespace(size=1)
        states.append(streams[0].state(positions, samples=(step + 1) * batch, ranks=one_rank))
    return found, json.loads(json.dumps(states))


TEXTS = sorted(f"<{number}>" for number in range(47))


@pytest.mark.parametrize("size", [50, 350, 10**6])
@pytest.mark.parametrize("shuffle", [True, False])
def test_every_row_is_in_exactly_one_shard(texts, monkeypatch, size, shuffle):
    monkeypatch.setattr(streaming, "_SHARD_BYTES", size)
    (texts / "empty.txt").write_text("")
    parts = find_parts((str(texts),), kind="text")
    assigned = assign_shards(parts, seed=3, shuffle=shuffle)
    assert len(assigned) == {50: 8, 350: 2, 10**6: 1}[size], (
        "the number of shards must be a power of two"
    )
    rows = [row.values["text"] for shard in assigned for part in shard for row in read_rows(part)]
    assert sorted(rows) == TEXTS, "each line must be read by exactly one shard"
    shard_bytes = [sum(part.size for part in shard) for shard in assigned]
    assert max(shard_bytes) - min(shard_bytes) <= max(
        part.size for shard in assigned for part in shard
    )
    assert assigned == assign_shards(parts, seed=3, shuffle=shuffle)


def test_line_longer_than_a_part_is_read_once(tmp_path, small_shards):
    texts = ["a" * 500, "b", "c" * 130, "d" * 3, "e" * 49]
    file = write(tmp_path / "long.jsonl", texts)
    assigned = assign_shards(find_parts((str(file),), kind="text"), seed=3, shuffle=False)
    rows = [row.values["text"] for shard in assigned for part in shard for row in read_rows(part)]
    assert sorted(rows) == texts


def test_shards_do_not_depend_on_the_batch_size(texts, small_shards):
    by_4, by_12 = (
        list(itertools.chain(*steps_of(texts, batch=batch, micro=1, steps=48 // batch)[0]))
        for batch in (4, 12)
    )
    assert len(by_4) == 48
    assert sorted(by_4) == sorted(by_12)


def test_first_step_reads_are_independent_of_batch_size(tmp_path, monkeypatch, small_shards):
    file, read, counts = write(tmp_path / "large.jsonl", ["x" * 100] * 20_000), [], []

    def counted(*arguments, **options):
        for row in read_rows(*arguments, **options):
            read.append(1)
            yield row

    monkeypatch.setattr(streaming, "read_rows", counted)
    for batch in (16, 1024):
        read.clear()
        next(iter(make_stream(file, batch=batch, micro=2, shuffle_buffer=640, sequence_length=64)))
        counts.append(len(read))
    assert counts[0] == counts[1] <= 640 + 64 * (streaming._ENCODED_ROWS + 1)


def test_passes_read_all_documents_in_different_orders(texts):
    seen = documents(rows_of(make_stream(texts, batch=1, micro=1, steps=60)))
    first, second = seen[:47], seen[47:94]
    assert sorted(first) == sorted(second) == TEXTS
    assert first != second
    in_order = documents(rows_of(make_stream(texts, batch=1, micro=1, steps=14, shuffle=False)))
    assert in_order[:40] == [f"<{number}>" for number in range(40)]


def test_targets_are_shifted_across_sequence_boundaries(texts):
    rows = rows_of(make_stream(texts, batch=1, micro=1, steps=8, sequence_length=7))
    ids, targets = ([token for row in rows for token in row[side]] for side in (0, 1))
    for token, target, following in zip(ids, targets, ids[1:], strict=False):
        assert target == (IGNORED if token == END else following)
    assert len(ids) == 56, "sequences must have no padding"


LAYOUTS = [
    {"ranks": 1, "micro": 1},
    {"ranks": 1, "micro": 1, "workers": 4},
    {"ranks": 2, "micro": 3, "workers": 2},
    {"ranks": 4, "micro": 1},
    {"ranks": 3, "micro": 4},
    {"ranks": 5, "micro": 2},  # does not divide the batch, which only a resumed run may do
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_layout_does_not_change_the_rows_of_a_step(texts, small_shards, layout):
    whole, states = steps_of(texts, batch=12, micro=12)
    assert steps_of(texts, batch=12, **layout) == (whole, states)


@pytest.mark.parametrize("kind", ["text", "tokens"])
def test_resume_continues_from_saved_positions(tmp_path, small_shards, kind):
    folder = tmp_path / "rows"
    for name in ("a", "b"):
        sizes = [1 + (number * 37) % 41 for number in range(60)]
        rows = [
            {"input_ids": [1 + number] * size, "text": (f"{name}{number} " * size)[:size]}
            for number, size in enumerate(sizes)
        ]
        write(folder / f"{name}.jsonl", rows)
    options = {"batch": 12, "kind": kind, "steps": 20, "shuffle_buffer": 40}
    whole, states = steps_of(folder, micro=12, **options)
    passes = {position[0] for position in states[-1]["positions"]}
    assert max(passes) >= 1, "the run must reach the second pass"
    for layout in LAYOUTS:
        found, again = steps_of(folder, first_step=18, saved=states[17], **layout, **options)
        assert found == whole[18:]
        assert again == states[18:]
    # A run may skip batches after the checkpoint. Without positions, everything is tokenized again.
    for saved in (states[14], None):
        found, _ = steps_of(folder, first_step=18, saved=saved, **LAYOUTS[2], **options)
        assert found == whole[18:]


def test_resume_does_not_tokenize_earlier_documents_again(tmp_path, monkeypatch):
    rows = [{"input_ids": [number % 200] * 10} for number in range(1000)]
    file, encoded, real = write(tmp_path / "rows.jsonl", rows), [], Encoder.encode_rows

    def counted(*arguments, **options):
        for one in real(*arguments, **options):
            encoded.append(1)
            yield one

    monkeypatch.setattr(Encoder, "encode_rows", counted)
    options = {"steps": 100, "kind": "tokens"}
    whole, states = steps_of(file, **options)
    assert len(encoded) > 300
    encoded.clear()
    assert steps_of(file, first_step=98, saved=states[97], **options)[0] == whole[98:]
    assert len(encoded) < 60


def test_positions_of_a_different_order_are_ignored(texts, small_shards):
    options = {"batch": 12, "micro": 12}
    whole, states = steps_of(texts, seed=4, **options)
    _, others = steps_of(texts, seed=5, **options)
    assert others[0]["order"] != states[0]["order"]
    assert steps_of(texts, seed=4, first_step=1, saved=others[0], **options)[0] == whole[1:]


def test_ranks_divide_the_tokenization(texts, small_shards):
    """With two ranks of two loader processes, each process tokenizes a quarter of the shards."""
    streams = [make_stream(texts, batch=8, micro=1, rank=rank, ranks=2) for rank in range(2)]
    read = [
        set(next(stream._micro_batches(worker, 2)).shard_positions)
        for stream in streams
        for worker in range(2)
    ]
    assert [len(one) for one in read] == [2, 2, 2, 2]
    assert set.union(*read) == set(range(8))
    size = "in 8 shards, sequences of up to 16, packed; each rank reads 4 shards"
    assert streams[0].describe()[0].endswith(size)
    six_ranks = make_stream(texts, batch=6, micro=1, ranks=6).describe()
    assert "each shard is tokenized by 3 ranks" in six_ranks[1]


@pytest.mark.parametrize(("wanted", "workers"), [(0, 0), (1, 1), (2, 2), (3, 2), (8, 4)])
def test_loader_process_count_divides_the_micro_batches(texts, wanted, workers):
    assert make_stream(texts, micro=1).workers(wanted) == workers


def test_documents_that_fit_are_not_split(tmp_path):
    """With kind tokens, a sequence ends early if the next row does not fit.

    Rows longer than a sequence are split.
    """
    rows = [{"input_ids": [size] * size} for size in (5, 6, 9, 20, 3)]
    file = write(tmp_path / "a.jsonl", rows)
    options = {"batch": 1, "micro": 1, "kind": "tokens", "shuffle": False}
    rows = rows_of(make_stream(file, steps=5, **options))
    assert [[ids[index] for index in (0, 5, 11)] for ids, _ in rows[:2]] == [[5, 6, 0], [9, 9, 0]]
    assert [ids.count(20) for ids, _ in rows] == [0, 0, 16, 4, 0]
    next_pass = [20] * 4 + [3] * 3 + [5] * 5 + [0]
    assert rows[3][0][:13] == next_pass, "the next pass must follow without padding"
    unpacked = rows_of(make_stream(file, steps=6, packing=False, **options))
    assert [len(ids) for ids, _ in unpacked] == [5, 6, 9, 16, 4, 3]


@pytest.mark.parametrize("packing", [True, False])
def test_rows_whose_targets_are_cut_off_are_dropped_and_listed(tmp_path, packing):
    rows = [{"prompt": "p" * size, "response": f"{size}"} for size in (2, 17, 16, 30, 3)]
    file = write(tmp_path / "a.jsonl", rows)
    options = {"batch": 1, "micro": 1, "kind": "instruct", "shuffle": False, "packing": packing}
    options |= {"overlong": "cut", "prompt_format": "text"}
    found = rows_of(make_stream(file, steps=6, **options))
    assert all(any(target != IGNORED for target in targets) for _, targets in found)
    assert skipped_rows(file) == ["a.jsonl:2", "a.jsonl:4"]
    file = write(tmp_path / "b.jsonl", rows[1:2])
    why = r"no token with loss in .*b.jsonl: each answer begins after the first 16 tokens"
    with pytest.raises(RecipeError, match=why):
        rows_of(make_stream(file, **options))


def test_rows_that_are_too_long_are_dropped_and_listed(tmp_path):
    rows = [{"question": "q", "answer": "a" * size, "topic": "x"} for size in (2, 30, 3)]
    file = write(tmp_path / "a.jsonl", rows)
    options = {"batch": 1, "micro": 1, "kind": "instruct", "shuffle": False, "steps": 4}
    stream = make_stream(file, **options)
    note = "note: columns not used: topic"
    assert stream.describe()[-1] == note
    answers = [sum(token == ord("a") for token in ids) for ids, _ in rows_of(stream)]
    assert answers
    assert max(answers) <= 5  # of the first and the third row
    assert skipped_rows(file) == ["a.jsonl:2"]
    with pytest.raises(RecipeError, match=r"a.jsonl:2: 35 tokens, more than 16 .*overlong"):
        rows_of(make_stream(file, **options, overlong="error"))


def test_unusable_rows_are_refused_or_skipped(texts, small_shards):
    write(texts / "c.jsonl", '{"text": "fine"}\n{"body": "x"}\nnot json\n')
    with pytest.raises(RecipeError, match=r"c\.jsonl:[23]: "):
        rows_of(make_stream(texts, batch=1, micro=1, steps=30))
    skip = {"on_error": "skip", "micro": 1}
    seen = documents(rows_of(make_stream(texts, batch=1, steps=60, **skip)))
    assert seen.count("fine") >= 1
    assert skipped_rows(texts) == ["c.jsonl:2", "c.jsonl:3"]
    (texts.parent / "skipped_rows.jsonl").unlink()
    steps_of(texts, ranks=3, batch=12, workers=4, steps=8, **skip)
    assert skipped_rows(texts) == ["c.jsonl:2", "c.jsonl:3"], "each row must be listed once"


def test_the_digest_of_the_order_holds_identities(texts, tmp_path, monkeypatch):
    """Neither paths nor the form in which Python prints the encoder."""
    first = make_stream(texts).order
    moved = tmp_path / "elsewhere"
    shutil.copytree(texts, moved)
    assert make_stream(moved).order == first
    monkeypatch.setattr(Encoder, "__repr__", lambda self: "with a field of a later version")
    assert make_stream(texts).order == first
    assert make_stream(texts, text_column="other").order != first
    write(moved / "z.jsonl", ["more"])
    assert make_stream(moved).order != first


@pytest.mark.parametrize("row", ['{"text": ""}\n', ""])
def test_data_without_documents_is_refused(tmp_path, row):
    write(tmp_path / "few/a.jsonl", row)
    write(tmp_path / "few/b.txt", "")
    with pytest.raises(RecipeError, match=r"a\.jsonl"):
        rows_of(make_stream(tmp_path / "few", on_error="skip"))


def test_few_documents_can_fill_a_large_batch(tmp_path):
    file = write(tmp_path / "a.jsonl", ["one", "two"])
    assert len(rows_of(make_stream(file, batch=64, micro=8))) == 3 * 64


def test_token_id_beyond_the_vocabulary_is_refused(texts):
    message = r"jsonl:\d+: token id 256 is beyond the model's vocabulary of 256"
    with pytest.raises(RecipeError, match=message):
        rows_of(make_stream(texts, vocabulary=256))


def test_hub_data_set_is_streamed_by_its_shards(tmp_path, monkeypatch):
    """A data set of the same class, read from files, replaces the hub, which tests cannot reach."""
    import datasets

    files = []
    for number in range(3):
        texts = [f"<{number}.{row}>" for row in range(8)]
        files.append(str(write(tmp_path / f"{number}.jsonl", texts)))
    requests = []

    def load_dataset(repository, config, *, split, streaming):
        requests.append((repository, config, split, streaming))
        cache = str(tmp_path / "cache")
        return real("json", data_files=files, split="train", streaming=True, cache_dir=cache)

    for module in ("sources.rows", "data.streaming"):
        cached = functools.cache(load_data_set.__wrapped__)
        monkeypatch.setattr(f"launcher.{module}.load_data_set", cached)
    real = datasets.load_dataset
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    options = {"batch": 2, "steps": 16, "folder": tmp_path}
    whole, states = steps_of("owner/set", micro=1, **options)
    assert len(states[0]["positions"]) == 2, "three files must give two shards, a power of two"
    resumed = {"ranks": 2, "first_step": 9, "saved": states[8]}
    assert steps_of("owner/set", micro=1, **resumed, **options)[0] == whole[9:]
    rows = rows_of(make_stream("owner/set", **options))
    seen = {text for shard in (0, 1) for text in documents(rows[shard::2])}
    assert seen >= {f"<{number}.{row}>" for number in range(3) for row in range(8)}
    assert set(requests) == {("owner/set", None, "train", True)}
