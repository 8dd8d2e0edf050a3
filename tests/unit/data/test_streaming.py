"""Streams: shards of the data, each a token store; their order, resuming from positions, disk use."""

import functools
import gzip
import itertools
import json
import re
import shutil
import signal
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from launcher.data import streaming
from launcher.data.batching import Position
from launcher.data.run_data import open_run_data
from launcher.data.streaming import StreamingDataset, assign_shards
from launcher.data.token_store import ModelTraits
from launcher.distributed.rank_layout import RankLayout
from launcher.errors import RecipeError
from launcher.objectives.classification import Classification
from launcher.objectives.masked import Masked
from launcher.objectives.next_token import NextToken
from launcher.objectives.preference import Preference
from launcher.recipe import schema
from launcher.sources.finding import find_parts
from launcher.sources.hub import load_data_set
from launcher.sources.rows import read_rows
from tests import REPOSITORY
from tests.unit.data.rows import write

END = 256
NEXT_TOKEN, START = NextToken(), Position()
ALONE = RankLayout(rank=0, size=1, group=None, device=torch.device("cpu"))
TEXTS = [f"<{number}>" for number in range(47)]


@pytest.fixture
def texts(tmp_path):
    """Two files of 40 and 7 documents. Each document is a number in angle brackets."""
    write(tmp_path / "texts/a.jsonl", TEXTS[:40])
    write(tmp_path / "texts/b.jsonl", TEXTS[40:])
    return tmp_path / "texts"


def opened(train, *, objective=NEXT_TOKEN, steps=26, batch=None, seed=3, **data):
    """The data of a run. Its folder, with its cache, is next to the data."""
    first = train if isinstance(train, Path) else next(iter(train.values())).files[0]
    folder = data.pop("folder", Path(first).parent)
    vocabulary = data.pop("vocabulary", 300)
    options = {"sequence_length": 16, "workers": 0, "streaming": True, "tokenizer": "bytes"}
    options |= {"cache": str(folder / ".cache"), "shard_size": "0.2KB", "kind": "text"} | data
    if not options["streaming"]:
        del options["shard_size"]
    files = train if isinstance(train, dict) else (str(train),)
    run_dir = folder / ".run"
    run_dir.mkdir(exist_ok=True)
    return open_run_data(
        schema.Data(train=files, **options),
        schema.Batch(**{"global_batch_size": 4, **(batch or {"micro_batch_size": 2})}),
        schema.Run(name="stream", max_steps=steps, seed=seed),
        objective=objective,
        model=ModelTraits(vocabulary=vocabulary, classes=None),
        ranks=ALONE,
        build=True,
        run_dir=run_dir,
    )


def steps_of(data, position=START):
    """Yields the micro-batches of each step, and the position after it."""
    data = data.starting(position)
    no = {"stop_requested": lambda: False, "save_requested": lambda: False}
    for batch in data.batches(ranks=ALONE, **no):
        saved = json.loads(json.dumps(batch.stream))
        position = Position(batch.step, batch.samples_seen, 0, saved)
        yield [*batch.micro_batches], position


def contents(micro_batches):
    """Everything in micro-batches, as lists."""
    return [
        {
            name: value.tolist() if isinstance(value, torch.Tensor) else value
            for name, value in {**one.inputs, **one.extra, "targets": one.targets}.items()
        }
        for one in micro_batches
    ]


def trained(data, position=START):
    """Returns the micro-batches and the positions of all steps."""
    steps = [(contents(found), position) for found, position in steps_of(data, position)]
    return [found for found, _ in steps], [position for _, position in steps]


def rows_of(steps):
    """The rows of all steps, without padding."""
    return [row for step in steps for one in step for row in one["input_ids"] if any(row)]


def documents(rows):
    """The whole documents in sequences."""
    ids = [token for row in rows for token in row]
    groups = itertools.groupby(ids, key=lambda token: token in (END, 0))
    return [bytes(group).decode() for between, group in groups if not between]


def shards_on_disk(folder):
    return [*folder.glob(".cache/streams/*/*")]


# How files are divided


@pytest.mark.parametrize("size", [50, 130, 10**6])
@pytest.mark.parametrize("shuffle", [True, False])
def test_every_row_is_in_exactly_one_shard(texts, size, shuffle):
    parts = find_parts((str(texts),), kind="text")
    pieces = [piece for part in parts for piece in streaming._divide(part, max(1, size // 64))]
    options = {"shard_bytes": size, "seed": 3, "shuffle": shuffle}
    assigned = assign_shards({"": pieces}, **options)
    total = sum(part.size for part in parts)
    assert len(assigned) == -(-total // size)
    rows = [
        [row.values["text"] for part in shard[""] for row in read_rows(part)] for shard in assigned
    ]
    everything = list(itertools.chain(*rows))
    assert sorted(everything) == sorted(TEXTS)
    if not shuffle:
        assert everything == TEXTS
    elif len(rows) > 1:
        assert rows[0] != TEXTS[: len(rows[0])], "a shard must be a sample of all rows"
    for shard in assigned:
        assert abs(sum(part.size for part in shard[""]) - total / len(assigned)) < 32
    assert assigned == assign_shards({"": pieces}, **options)


def test_sources_with_weights_are_in_every_shard(texts):
    pieces = {
        name: streaming._divide(part, 1)
        for name, part in zip("ab", find_parts((str(texts),), kind="text"), strict=True)
    }
    options = {"shard_bytes": 50, "seed": 3, "shuffle": True}
    for shard in assign_shards(pieces, **options, weighted=True):
        assert all(shard.values())
    pieces["b"] = pieces["b"][:1]
    weighted = assign_shards(pieces, **options, weighted=True)
    assert [shard["b"] for shard in weighted] == [pieces["b"]] * len(weighted)
    plain = assign_shards(pieces, **options)
    assert sorted(len(shard["b"]) for shard in plain)[-2:] == [0, 1]


@pytest.mark.slow
def test_a_compressed_file_is_one_piece(tmp_path):
    (tmp_path / "data").mkdir()
    lines = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode()
    (tmp_path / "data/a.jsonl.gz").write_bytes(gzip.compress(lines))
    write(tmp_path / "data/b.jsonl", [f"[{number}]" for number in range(40)])
    stream = opened(tmp_path / "data").training
    assert isinstance(stream, StreamingDataset)
    of_a = [[part for part in shard[""] if part.name.endswith(".gz")] for shard in stream._shards]
    assert sorted(map(len, of_a))[-2:] == [0, 1]
    seen = documents(rows_of(trained(opened(tmp_path / "data", steps=40, packing=False))[0]))
    assert {*TEXTS} <= {*seen}


def test_a_line_longer_than_a_shard_is_read_once(tmp_path):
    lines = ["a" * 500, "b", "c" * 130, "d" * 3, "e" * 49]
    file = write(tmp_path / "data/long.jsonl", lines)
    data = opened(file, sequence_length=600, packing=False, batch={"micro_batch_size": 1}, steps=2)
    assert sorted(documents(rows_of(trained(data)[0]))[:5]) == lines


# The order


CHATS = [{"prompt": "a" * (number % 7 + 1), "response": f"{number}"} for number in range(40)]
PAIRS = [
    {"prompt": f"{number}", "chosen": "b" * (number % 5 + 1), "rejected": "c"}
    for number in range(40)
]
CLASSES = [{"text": "x" * (number % 9 + 1), "label": number % 2} for number in range(40)]
INSTRUCT = {"kind": "instruct", "prompt_format": "text"}
MODES = {
    "text": (TEXTS, {}),
    "text in order": (TEXTS, {"shuffle": False}),
    "not packed": (TEXTS, {"packing": False}),
    "instruct": (CHATS, INSTRUCT),
    "similar lengths": (CHATS, {**INSTRUCT, "packing": False, "similar_lengths": True}),
    "by tokens": (CHATS, {**INSTRUCT, "packing": False, "batch": {"micro_batch_tokens": 32}}),
    "limit": (TEXTS, {"limit": 11}),
    "masked": (TEXTS, {"packing": False, "objective": Masked()}),
    "classes": (CLASSES, {"kind": "classification", "objective": Classification()}),
    "validation split": (TEXTS, {"validation_split": 0.2}),
    "preference": (
        PAIRS,
        {
            "kind": "preference",
            "prompt_format": "text",
            "objective": Preference(settings=schema.Preference(loss="simpo")),
        },
    ),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.slow
def test_one_shard_is_like_a_store(tmp_path, mode):
    """The same samples in the same order, in three passes, also with loader processes."""
    rows, options = MODES[mode]
    file = write(tmp_path / "data/rows.jsonl", rows)
    options = {"steps": 30, **options}
    if mode == "masked":
        options["tokenizer"] = masking_tokenizer(tmp_path)
    stored = opened(file, streaming=False, **options)
    stream = opened(file, shard_size="1MB", **options)
    assert trained(stream)[0] == trained(stored)[0]
    assert (
        trained(opened(file, shard_size="1MB", **options | {"workers": 2}))[0]
        == (trained(stored)[0])
    )
    assert len(shards_on_disk(tmp_path / "data")) == 1
    for name, dataset in stored.validation.items():
        other = stream.validation[name]
        assert [other[i]["input_ids"].tolist() for i in range(len(other))] == [
            dataset[i]["input_ids"].tolist() for i in range(len(dataset))
        ]


def masking_tokenizer(folder):
    from launcher.data.tokenizer import hugging_face_byte_tokenizer

    tokenizer = hugging_face_byte_tokenizer()
    tokenizer.add_special_tokens({"mask_token": "<mask>"})
    tokenizer.save_pretrained(folder / "tokenizer")
    return str(folder / "tokenizer")


@pytest.mark.parametrize("weights", [(None, None), (3.0, 1.0)])
def test_a_mixture_of_one_shard_is_like_a_store(texts, weights):
    train = {
        name: schema.Source(files=(str(texts / f"{name}.jsonl"),), weight=weight or "size")
        for name, weight in zip("ab", weights, strict=True)
    }
    stored = opened(train, streaming=False)
    stream = opened(train, shard_size="1MB")
    assert isinstance(stream.training, StreamingDataset)
    assert stream.training.sources == ("a", "b")
    assert trained(stream)[0] == trained(stored)[0]
    found = [one.sources.tolist() for step, _ in steps_of(stream) for one in step]
    assert found == [one.sources.tolist() for step, _ in steps_of(stored) for one in step]


@pytest.mark.slow
def test_a_mixture_of_several_shards_keeps_its_shares(texts):
    """Three quarters from the large source, in every shard; a small one without weights is read as
    often as the large one."""
    files = {name: (str(texts / f"{name}.jsonl"),) for name in "ab"}
    shares = {"a": 3.0, "b": 1.0}
    weighted = {name: schema.Source(files=files[name], weight=shares[name]) for name in files}
    data = opened(weighted, shard_size="0.3KB", packing=False, steps=100)
    found = documents(rows_of(trained(data)[0]))
    assert len(data.training._shards) == 3
    assert 0.7 < sum(text in TEXTS[:40] for text in found) / len(found) < 0.8
    plain = {name: schema.Source(files=files[name]) for name in files}
    data = opened(plain, packing=False, steps=24)
    assert len(data.training._shards) == 4
    found = documents(rows_of(trained(data)[0]))
    assert sorted(found[:47]) == sorted(found[47:94]) == sorted(TEXTS)


@pytest.mark.slow
def test_passes_read_all_documents_in_different_orders(texts):
    seen = documents(rows_of(trained(opened(texts, packing=False))[0]))
    first, second = seen[:47], seen[47:94]
    assert sorted(first) == sorted(second) == sorted(TEXTS)
    assert first != second
    in_order = documents(rows_of(trained(opened(texts, packing=False, shuffle=False))[0]))
    assert in_order[:94] == TEXTS * 2


@pytest.mark.slow
def test_the_order_does_not_depend_on_batches_and_loader_processes(texts):
    whole = rows_of(trained(opened(texts, steps=12))[0])
    for batch, workers in ((1, 0), (2, 2), (4, 1)):
        more = opened(texts, steps=12, batch={"micro_batch_size": batch}, workers=workers)
        assert rows_of(trained(more)[0]) == whole
    larger = opened(texts, batch={"global_batch_size": 12, "micro_batch_size": 12}, steps=4)
    assert rows_of(trained(larger)[0]) == whole
    assert rows_of(trained(opened(texts, seed=4, steps=12))[0]) != whole


def test_the_first_rows_of_a_stream(texts):
    seen = documents(rows_of(trained(opened(texts, limit=11, packing=False, steps=11))[0]))
    assert sorted(seen) == sorted(4 * TEXTS[:11])


def test_few_documents_can_fill_a_large_batch(tmp_path):
    file = write(tmp_path / "data/a.jsonl", ["one", "two"])
    data = opened(file, batch={"global_batch_size": 64, "micro_batch_size": 8}, steps=3)
    assert len(rows_of(trained(data)[0])) == 3 * 64


# Resuming


@pytest.mark.parametrize("mode", ["text", "by tokens", "masked", "preference"])
@pytest.mark.slow
def test_resume_continues_at_every_position(tmp_path, mode):
    """Inside a shard and where one ends, with and without its store, with loader processes."""
    sizes = {"text": 0.33, "by tokens": 0.8, "masked": 0.4, "preference": 1.2}
    rows, options = MODES[mode]
    file = write(tmp_path / "data/rows.jsonl", rows)
    options = {"steps": 14, "shard_size": f"{sizes[mode]}KB", **options}
    if mode == "masked":
        options["tokenizer"] = masking_tokenizer(tmp_path)
    whole, positions = trained(opened(file, **options))
    assert positions[-1].stream["pass"] >= 1
    if mode == "text":
        ends = [position.stream["sample"] for position in positions]
        assert 0 in ends, "a step must end where a shard ends"
    for at, position in enumerate(positions[:-1]):
        if at % 4:
            continue
        if at % 8 == 0:
            shutil.rmtree(tmp_path / "data/.cache")
        found, again = trained(opened(file, **options | {"workers": at % 8 // 2}), position)
        assert found == whole[at + 1 :]
        assert again == positions[at + 1 :]


@pytest.mark.slow
def test_batches_after_a_position_can_be_skipped(texts):
    """As a run does that diverged on them."""
    whole, positions = trained(opened(texts, steps=20))
    later = replace(positions[4], samples=positions[9].samples)
    found, _ = trained(opened(texts, steps=15), later)
    assert found == whole[10:]


@pytest.mark.slow
def test_resume_does_not_tokenize_earlier_shards(texts, tmp_path, monkeypatch):
    _, positions = trained(opened(texts, steps=12))
    shutil.rmtree(texts.parent / ".cache")
    built, real = [], streaming.store_in
    monkeypatch.setattr(
        streaming, "store_in", lambda folder, *rest, **options: (
            built.append(folder.parent.name) or real(folder, *rest, **options)
        )
    )  # fmt: skip
    monkeypatch.setattr(StreamingDataset, "_tokenize_ahead", lambda self, turn: None)
    data = opened(texts, steps=13)
    assert len(trained(data, positions[11])[0]) == 1
    assert 1 <= len({*built}) <= 3


def test_a_position_of_another_order_is_taken_for_the_same_place(texts):
    _, positions = trained(opened(texts, seed=4, steps=5))
    stream = dict(positions[-1].stream)
    other = opened(texts, seed=5, steps=6)
    assert stream["order"] != other.training.order
    ((_, after),) = steps_of(other, positions[-1])
    assert after.samples == 24
    place = ("pass", "shard")
    assert [after.stream[key] for key in place] >= [stream[key] for key in place]
    old = Position(5, 20, 0, {"order": "6-0", "samples": 20, "positions": [[0, 0, 0, 0]]})
    ((first, _),) = steps_of(opened(texts, seed=5, steps=6), old)
    assert contents(first) == trained(opened(texts, seed=5, steps=1))[0][0]


def test_the_digest_of_the_order_holds_identities(texts, tmp_path):
    """Neither paths nor the forms in which Python prints objects."""
    first = opened(texts).training.order
    moved = tmp_path / "elsewhere"
    shutil.copytree(texts, moved, ignore=shutil.ignore_patterns(".*"))
    assert opened(moved).training.order == first
    for change in ({"seed": 4}, {"shard_size": "0.3KB"}, {"text_column": "other"}, {"limit": 5}):
        assert opened(texts, **change).training.order != first
    write(moved / "z.jsonl", ["more"])
    assert opened(moved).training.order != first


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_rank_without_the_first_samples_of_a_shard_has_the_same_order(texts, ranks):
    """The ranks release the shards together, but each asks for its own positions only."""
    whole = opened(texts, packing=False).order
    steps, size = 26, 4
    indices = [whole.sample(position) for position in range(steps * size)]
    states = [whole.state((step + 1) * size) for step in range(steps)]
    assert {index >> 40 for index in indices} >= {0, 1, 2}
    for rank in range(ranks):
        order = opened(texts, packing=False).order
        for step in range(steps):
            for position in range(step * size + rank, (step + 1) * size, ranks):
                assert order.sample(position) == indices[position], (rank, step)
            assert order.state((step + 1) * size) == states[step], (rank, step)
            order.release((step + 1) * size)


# Rows that cannot be used


BAD = '{"text": "fine"}\n{"body": "x"}\nnot json\n'


def test_unusable_rows_of_a_later_shard_are_refused(texts):
    """The shards before it are trained."""
    write(texts / "c.jsonl", BAD)
    steps = steps_of(opened(texts, shuffle=False))
    with pytest.raises(RecipeError, match=r"c\.jsonl:2: .*\n.*c\.jsonl:3: "):
        for number, _ in enumerate(steps):  # noqa: B007 - its last value is looked at
            pass
    assert number >= 2


@pytest.mark.slow
def test_unusable_rows_of_a_later_shard_are_skipped_and_listed_once(texts):
    write(texts / "c.jsonl", BAD)
    whole, positions = trained(opened(texts, on_error="skip"))
    assert documents(rows_of(whole)).count("fine") >= 1
    trained(opened(texts, on_error="skip"), positions[0])
    lines = (texts.parent / ".run/skipped_rows.jsonl").read_text().splitlines()
    assert sorted(Path(json.loads(line)["where"]).name for line in lines) == [
        "c.jsonl:2",
        "c.jsonl:3",
    ]


@pytest.mark.slow
def test_a_shard_without_documents_is_passed(texts):
    (texts / "aa.jsonl").write_text("no json\n" * 60)
    data = opened(texts, on_error="skip", shuffle=False, packing=False)
    assert documents(rows_of(trained(data)[0]))[:94] == TEXTS * 2


@pytest.mark.parametrize("row", ['{"text": ""}\n', "", '{"text": ""}\n' * 60])
def test_data_without_documents_is_refused(tmp_path, row):
    write(tmp_path / "few/a.jsonl", row)
    write(tmp_path / "few/b.txt", "")
    with pytest.raises(RecipeError, match=r"no document with text in"):
        trained(opened(tmp_path / "few", on_error="skip"))


@pytest.mark.slow
def test_rows_that_are_too_long_are_dropped_or_refused(tmp_path):
    rows = [{"prompt": "q", "response": "a" * size} for size in [2] * 30 + [30] + [3] * 10]
    file = write(tmp_path / "data/a.jsonl", rows)
    options = {**INSTRUCT, "shuffle": False, "steps": 14, "shard_size": "0.6KB"}
    found = rows_of(trained(opened(file, **options))[0])
    assert max(row.count(ord("a")) for row in found) == 9, "of three rows with three letters"
    with pytest.raises(RecipeError, match=r"a.jsonl:31: \d+ tokens, more than 16 "):
        trained(opened(file, **options, overlong="error"))
    cut = rows_of(trained(opened(file, **options, overlong="cut", packing=False))[0])
    assert max(row.count(ord("a")) for row in cut) > 12


def test_token_id_beyond_the_vocabulary_is_refused(texts):
    message = r"jsonl:\d+: token id 256 is beyond the model's vocabulary of 256"
    with pytest.raises(RecipeError, match=message):
        trained(opened(texts, vocabulary=256))


# Held-out documents


@pytest.mark.slow
def test_held_out_documents_are_those_of_the_first_shard_and_never_trained(tmp_path):
    rows = [f"<{number}>" for number in range(400)]
    file = write(tmp_path / "data/a.jsonl", rows)
    options = {"validation_split": 0.2, "shard_size": "2KB", "packing": False, "steps": 160}
    data = opened(file, **options)
    held_out = data.validation["validation"]
    seen = documents([held_out[i]["input_ids"].tolist() for i in range(len(held_out))])
    assert 5 < len(seen) < 80
    whole, positions = trained(data)
    found = documents(rows_of(whole))
    assert not {*seen} & {*found}
    assert 0.7 * 400 < len({*found}) < 0.9 * 400
    again = opened(file, **options)
    assert trained(again, positions[80])[0] == whole[81:]
    other = again.validation["validation"]
    assert documents([other[i]["input_ids"].tolist() for i in range(len(other))]) == seen
    with pytest.raises(RecipeError, match=r"no document of the first shard .* is held out; raise"):
        opened(file, **options | {"validation_split": 1e-9})


def test_a_source_that_the_first_shard_does_not_have_is_named(tmp_path):
    many = write(tmp_path / "data/a.jsonl", [f"<{number}>" for number in range(400)])
    with gzip.open(tmp_path / "data/b.jsonl.gz", "wt") as file:
        file.write('{"text": "one"}\n' * 400)
    train = {
        name: schema.Source(files=(str(files),))
        for name, files in {"a": many, "b": tmp_path / "data/b.jsonl.gz"}.items()
    }
    with pytest.raises(RecipeError, match=r"whose rows are held out, has none of source [ab];"):
        opened(train, validation_split=0.5, shard_size="1KB", packing=False)


def test_rows_of_a_later_shard_that_cannot_be_used_say_how_to_go_on(tmp_path):
    rows = [f"<{number}>" for number in range(400)]
    file = write(tmp_path / "data/a.jsonl", rows)
    with file.open("a") as lines:
        lines.write('{"text": 3}\n')
    data = opened(file, shard_size="2KB", packing=False, shuffle=False, steps=160)
    with pytest.raises(RecipeError, match=r"data.on_error=skip, .* checkpoint.allow_changes=true"):
        trained(data)


# The disk, and the process that tokenizes ahead


@pytest.mark.slow
def test_at_most_three_shards_are_on_the_disk(tmp_path):
    file = write(tmp_path / "data/a.jsonl", [f"<{number}>" * 9 for number in range(600)])
    options = {"shard_size": "6KB", "steps": 180, "packing": False, "workers": 1}
    options |= {"sequence_length": 64}
    data = opened(file, **options)
    assert len(data.training._shards) > 4
    alive, numbers = [], set()
    for _ in steps_of(data):
        folders = shards_on_disk(tmp_path / "data")
        alive.append(len(folders))
        numbers |= {folder.name for folder in folders}
    assert max(alive) <= 3
    assert len(numbers) == len(data.training._shards), "all shards must have been there"
    # Those of an earlier start are removed, too
    (folder,) = (tmp_path / "data/.cache/streams").iterdir()
    (folder / "00009-of-other-data").mkdir()
    next(steps_of(opened(file, **options)))
    assert not (folder / "00009-of-other-data").exists()


def test_the_next_shard_is_tokenized_ahead(texts, monkeypatch):
    """Also where the run shows progress on a terminal."""
    monkeypatch.setattr("launcher.console._stream", "stdout")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    data = opened(texts, shard_size="0.4KB")
    stream, steps = data.training, steps_of(data)
    assert isinstance(stream, StreamingDataset)
    next(steps)
    stream._ahead.join()
    assert stream._ahead.exitcode == 0
    assert [*stream._folder(stream._number(1)).glob("0/meta.json")], "the store must be complete"
    assert 1 not in stream._opened
    steps.close()


def test_the_process_that_tokenizes_ahead_ends_with_the_run(texts):
    data = opened(texts)
    steps = steps_of(data)
    next(steps)
    process = data.training._ahead
    assert process is not None
    steps.close()
    assert data.training._ahead is None
    assert not process.is_alive()


SLOW = """
import multiprocessing, sys, time
sys.path.insert(0, {repository!r})
from pathlib import Path
from launcher.data.encoder import Encoder
from tests.unit.data.test_streaming import opened, steps_of
real = Encoder.encode_rows
def slow(self, *rows, **options):
    if multiprocessing.parent_process() is not None:
        print("ahead", flush=True)
        time.sleep(600)
    return real(self, *rows, **options)
Encoder.encode_rows = slow
data = opened(Path(sys.argv[1]), steps=2, processes=1, shard_size="0.4KB", seed=3)
steps = steps_of(data)
next(steps)
print("trained", flush=True)
time.sleep(600)
"""


@pytest.mark.slow
def test_a_run_killed_while_the_next_shard_is_tokenized_resumes(texts):
    """Its process is killed by the kernel; the shard is tokenized by the next start."""
    whole, positions = trained(opened(texts, shard_size="0.4KB", steps=20))
    shutil.rmtree(texts.parent / ".cache")
    code = textwrap.dedent(SLOW).format(repository=str(REPOSITORY))
    run = subprocess.Popen(
        [sys.executable, "-c", code, str(texts)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert run.stdout is not None
        lines = {run.stdout.readline(), run.stdout.readline()}
        assert lines == {"ahead\n", "trained\n"}
        run.send_signal(signal.SIGKILL)
        assert run.stdout.read() == "", "the pipe is closed when the last process has ended"
    finally:
        run.kill()
        run.wait()
        assert run.stdout is not None
        run.stdout.close()
    assert trained(opened(texts, shard_size="0.4KB", steps=20), positions[0])[0] == whole[1:]


# The hub


@pytest.mark.slow
def test_a_hub_data_set_is_streamed_by_its_files(tmp_path, monkeypatch):
    """A data set of the same class, read from files, replaces the hub, which tests cannot reach."""
    import datasets

    files = []
    for number in range(3):
        rows = [f"<{number}.{row}>" for row in range(8)]
        files.append(str(write(tmp_path / f"{number}.jsonl", rows)))
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
    options = {"steps": 12, "folder": tmp_path, "packing": False}
    whole, positions = trained(opened(Path("owner/set"), **options))
    texts = [f"<{number}.{row}>" for number in range(3) for row in range(8)]
    assert sorted(documents(rows_of(whole))) == sorted(2 * texts)
    stream = opened(Path("owner/set"), **options).training
    assert isinstance(stream, StreamingDataset)
    assert len(stream._shards) == 3
    assert trained(opened(Path("owner/set"), **options), positions[4])[0] == whole[5:]
    assert set(requests) == {("owner/set", None, "train", True)}


def test_the_log_names_shards(texts, caplog):
    caplog.set_level("INFO")
    data = opened(texts, shard_size="0.4KB", steps=20)
    assert re.fullmatch(
        r"streaming 2 files \(0.0 MiB\) in 2 shards of about 0.4KB .*", data.training.describe()[0]
    )
    trained(data)
    titles = [message.split(":")[0] for message in caplog.messages if "shard " in message]
    assert titles[:3] == [
        "shard 1 of 2, pass 1",
        "shard 2 of 2, pass 1",
        "shard 1 of 2, pass 2",
    ]
