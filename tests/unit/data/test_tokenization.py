"""Tokenization in several processes, bad rows, locks, and settings that change a store."""

import errno
import gzip
import json
import os
import pickle
import re
import shutil
import signal
import sys
import threading
import time
from unittest import mock

import datasets
import httpx
import numpy as np
import pytest
import torch
from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError
from torch.utils.data import DataLoader

from launcher import console
from launcher.data import store_files, token_store
from launcher.data.dataset import MixtureDataset
from launcher.data.encoder import Encoder
from launcher.data.packing import separate
from launcher.data.token_store import ModelTraits, open_store, rows_of_documents
from launcher.distributed.environment import Environment
from launcher.errors import RecipeError, TrainingError
from launcher.recipe import schema
from launcher.reliability import lock
from launcher.sources import hub
from launcher.sources.finding import file_part
from launcher.sources.location import Location
from launcher.sources.ranges import split
from launcher.sources.rows import SourcePart, read_all, read_rows
from tests.datasets import dataset_of
from tests.run_files import write_lines
from tests.unit.data.rows import store_names, texts_of, write

END = 256
CHAT = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
BAD_LINE = "not JSON: Expecting property name enclosed in double quotes (column 2)"


@pytest.fixture
def small_tasks(monkeypatch):
    """Sets small limits, so that a small input is split into many tasks for several processes."""
    monkeypatch.setattr(token_store, "_TASK_BYTES", 64)
    monkeypatch.setattr(token_store, "_STORE_ROWS", 7)


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"


@pytest.fixture
def open_files(cache):
    """Opens the store of files. Further arguments are settings of the recipe's data section."""

    def open_one(*patterns, tokenizer="bytes", build=True, validation=False, classes=None, **data):
        data = schema.Data(cache=str(cache), **data)
        model, patterns = ModelTraits(classes=classes), tuple(map(str, patterns))
        return open_store(
            patterns, data, tokenizer=tokenizer, model=model, validation=validation, build=build
        )

    return open_one


# Parts


@pytest.mark.parametrize("size", [1, 10, 33, 100, 10**6])
def test_jsonl_parts_contain_every_row_once(tmp_path, size):
    texts = [f"{number} " + "ü\u2028" * (number % 7) for number in range(50)]
    file = write(tmp_path / "a.jsonl", texts)
    lines = file.read_text(encoding="utf-8").split("\n")
    lines[8:8] = ["", "  "]
    file.write_text("\n".join(lines) + "\n" + json.dumps({"text": "last"}), encoding="utf-8")
    whole, parts = (
        list(read_rows(file_part(Location(str(file))))),
        split(file_part(Location(str(file))), size),
    )
    assert (len(parts) > 10) == (size <= 100)
    in_parts = list(read_all(parts))
    expected = [{"text": text} for text in [*texts, "last"]]
    assert [row.values for row in in_parts] == [row.values for row in whole] == expected
    assert [row.where for row in in_parts] == [row.where for row in whole]
    assert whole[-1].where == f"{file}:54"
    for number in (30, 31, 3, 39, 0):  # in any order
        assert whole[number].where == f"{file}:{number + (1 if number < 8 else 3)}"


def test_parquet_parts_contain_every_row_once(tmp_path):
    texts = [str(number) for number in range(95)]
    file = write(tmp_path / "a.parquet", texts, row_group_size=10)
    parts = split(file_part(Location(str(file))), 1)
    assert (len(parts), len(split(file_part(Location(str(file))), 10**9))) == (10, 1)
    rows = [(row.values, row.where) for row in read_all(parts)]
    assert rows == [({"text": text}, f"{file} row {int(text) + 1}") for text in texts]


# Several processes


def test_document_order_is_independent_of_process_count(
    tmp_path, cache, open_files, small_tasks, capfd, messages, monkeypatch
):
    texts = [[f"{name}{number} " + "x" * (number % 13) for number in range(60)] for name in "abc"]
    data = tmp_path / "data"
    write(data / "a.jsonl", texts[0])
    write(data / "b.parquet", texts[1], row_group_size=7)
    write(data / "c.jsonl", texts[2])
    write(data / "d.txt", "d")
    monkeypatch.setattr(console, "LINE_SECONDS", 0.0)
    serial = open_files(data, processes=1)
    progress = [line for line in messages() if line.startswith("tokenizing: ")]
    assert len(progress) > 5
    assert progress[-1] == "tokenizing: 100%, 0 s left"
    cache.rename(tmp_path / "first")
    parallel = open_files(data, processes=2)
    assert texts_of(serial) == texts_of(parallel) == [*texts[0], *texts[1], *texts[2], "d"]
    assert serial.ids.tobytes() == parallel.ids.tobytes()
    assert serial.offsets.tobytes() == parallel.offsets.tobytes()
    assert serial.largest_id == parallel.largest_id == END
    assert serial.origins.tobytes() == parallel.origins.tobytes()
    wanted = {0, 59, 60, 100, 179, 180}
    section = schema.Data(train=(str(data),), tokenizer="bytes", cache=str(cache))
    with mock.patch.object(Encoder, "encode_rows", side_effect=AssertionError("tokenized again")):
        of_documents = rows_of_documents(parallel, section, wanted, tokenizer="bytes")
    names = {number: row.where.removeprefix(f"{data}/") for number, row in of_documents.items()}
    assert names == {
        0: "a.jsonl:1",
        59: "a.jsonl:60",
        60: "b.parquet row 1",
        100: "b.parquet row 41",
        179: "c.jsonl:60",
        180: "d.txt",
    }
    (name,) = store_names(cache)
    files = sorted(file.name for file in (cache / name).iterdir())
    assert files == ["hashes.bin", "ids.bin", "meta.json", "offsets.npy", "origins.bin"]
    assert [line for line in messages() if line.startswith("tokenized 181 documents")]
    printed = capfd.readouterr()
    assert "Generating" not in printed.out + printed.err
    # An existing store is opened without these packages
    for module in ("datasets", "transformers"):
        monkeypatch.setitem(sys.modules, module, None)
    assert open_files(data, processes=4).documents == 181


def test_labels_and_classes_with_several_processes(tmp_path, open_files, small_tasks):
    rows = [{"input_ids": [number, 1, 2]} for number in range(40)]
    for number in range(21, 40):
        rows[number]["labels"] = [-100, 5, 700 + number]
    found = open_files(
        write(tmp_path / "a.jsonl", rows), kind="tokens", tokenizer=None, processes=2
    )
    labels = [row.get("labels", row["input_ids"]) for row in rows]
    assert found.labels.reshape(-1, 3).tolist() == labels
    assert (found.largest_id, found.classes) == (739, None)
    rows = [{"text": f"t{number}", "label": number % 3} for number in range(40)]
    classes = {"kind": "classification", "processes": 2}
    file = write(tmp_path / "b.jsonl", rows)
    found = open_files(file, **classes)
    assert found.classes.tolist() == [number % 3 for number in range(40)]
    assert found.labels is None
    assert found.ids[: found.offsets[1]].tolist() == [*b"t0"]
    message = r"label 2, but the model has 2 classes, 0 to 1 \(model.num_labels\)"
    with pytest.raises(RecipeError, match=rf"b.jsonl:3: {message}"):
        open_files(file, classes=2, **classes)


def write_broken_rows(tmp_path, bad):
    file = write(tmp_path / "a.jsonl", [f"text {number}" for number in range(60)])
    lines = file.read_text().splitlines(keepends=True)
    for number in bad:
        lines[number] = "{not json\n"
    file.write_text("".join(lines))
    return file


def test_errors_in_tokenization_processes_are_reported(
    tmp_path, cache, open_files, small_tasks, monkeypatch
):
    file = write_broken_rows(tmp_path, [47])
    with pytest.raises(RecipeError) as error:
        open_files(file, processes=2)
    assert str(error.value) == f"{file}:48: {BAD_LINE}"
    file = write(tmp_path / "a.jsonl", [*"abc"] * 30)
    (tmp_path / "tokenizer").mkdir()
    with pytest.raises(RecipeError, match=r"^data.tokenizer: .*: no tokenizer could be loaded: "):
        open_files(file, tokenizer=str(tmp_path / "tokenizer"), processes=2)
    monkeypatch.setattr(token_store, "store_rows", lambda *arguments: os._exit(9))
    killed = r"a tokenization process was killed, .*; lower data.processes"
    with pytest.raises(TrainingError, match=killed):
        open_files(write(file, ["x"] * 60), processes=2)
    monkeypatch.setattr(token_store, "store_rows", lambda *arguments: signal.raise_signal(11))
    with pytest.raises(TrainingError, match=r"was killed \(Segmentation fault\), "):
        open_files(file, processes=2)
    assert store_names(cache) == []


@pytest.mark.parametrize("processes", [1, 2])
def test_skipped_rows_are_reported_at_every_start(tmp_path, open_files, small_tasks, processes):
    file = write_broken_rows(tmp_path, [3, 47])
    for _ in range(2):
        found = open_files(file, processes=processes, on_error="skip")
        assert found.documents == 58
        assert found.skipped == [{"where": f"{file}:{n}", "problem": BAD_LINE} for n in (4, 48)]
    with pytest.raises(RecipeError):
        open_files(file, processes=processes)


def test_several_bad_rows_are_reported_together(tmp_path, cache, open_files):
    file = write_broken_rows(tmp_path, range(3, 20))
    with pytest.raises(RecipeError) as error:
        open_files(file)
    *lines, count, cause = error.value.problems
    assert [line.split(": ")[0] for line in lines] == [f"{file}:{line}" for line in range(4, 9)]
    assert count == "17 of 60 rows cannot be used (data.on_error=skip leaves them out):"
    assert cause.startswith(f"  17 like {file}:4: not JSON: ")
    with pytest.raises(RecipeError) as error:
        open_files(write(file, "x\n\n[]\n"), on_error="skip")
    assert error.value.problems == [
        "data: no document with text in 1 files; all 2 rows were skipped:",
        f"{file}:1: not JSON: Expecting value (column 1)",
        f'{file}:3: must be an object such as {{"text": ...}}; got list',
    ]
    assert store_names(cache) == []


# Large documents, and tokenizations that are ended


BOMBS = {
    "a.txt.gz": (b"x" * 5000, r"a.txt.gz: the file, one document, has more than 1.0 KiB"),
    "a.txt": (b"x" * 1025, r"a.txt: the file, one document, has more than 1.0 KiB"),
    "a.jsonl": (b'{"text": "ab"}\n\n{"text": "' + b"x" * 5000 + b'"}\n{"text": "cd"}\n',
                r"a.jsonl:3: the line has more than 1.0 KiB \(data.max_document\); divide it, or"),
    "a.jsonl.gz": (b'{"text": "ab"}\n{"text": "' + b"x" * 5000 + b'"}', r"a.jsonl.gz:2: the line has more than"),
    "a.json": (json.dumps([{"text": "ab"}, {"text": "x" * 5000}, {"text": "cd"}]).encode(),
               r"a.json.*2: the row has 4.9 KiB, more than 1.0 KiB"),
    "a.json.gz": (json.dumps([{"text": "x" * 600}] * 40).encode(),
                  r"a.json.gz: the compressed file has more than 16.0 KiB, .* one object per line"),
    "a.csv": (b"text,b\nab,1\n" + b"x" * 5000 + b",2\n", r"a.csv:3: not CSV: the line has more"),
    "b.csv": (b'text,b\nab,1\n"' + b"x\n" * 3000 + b'",2\ncd,3\n', r"b.csv:3: not CSV: field larger"),
    "a.parquet": ([{"text": "ab"}, {"text": "x" * 5000}, {"text": "cd"}],
                  r"a.parquet row 2: the row has 4.9 KiB, more than 1.0 KiB"),
}  # fmt: skip


@pytest.mark.parametrize("name", BOMBS)
def test_documents_above_the_limit_are_refused(tmp_path, open_files, name):
    """A document of 522 MB took 5 GB of memory, and a small compressed file any amount."""
    content, problem = BOMBS[name]
    file = tmp_path / name
    if name.endswith(".gz"):
        file.write_bytes(gzip.compress(content))
    else:
        write(file, content)
    with pytest.raises(RecipeError, match=problem):
        open_files(file, max_document="1KiB")
    good = write(tmp_path / "good.jsonl", ["good"])
    skipping = open_files(file, good, max_document="1KiB", on_error="skip")
    assert "x" not in "".join(texts_of(skipping))
    assert texts_of(skipping)[-1] == "good"
    assert re.search(problem, f"{skipping.skipped[0]['where']}: {skipping.skipped[0]['problem']}")
    if name in ("a.json", "a.jsonl", "a.parquet"):
        assert texts_of(skipping) == ["ab", "cd", "good"]
    assert any("x" in text for text in texts_of(open_files(file, good, on_error="skip")))


def test_a_document_at_the_limit_is_used(tmp_path, open_files):
    write(tmp_path / "a.txt", "x" * 1024)
    write(
        tmp_path / "b.jsonl", json.dumps({"text": "y" * 1000}).ljust(1023) + "\n" + '{"text": "z"}'
    )
    store = open_files(tmp_path / "a.txt", tmp_path / "b.jsonl", max_document="1KiB")
    assert list(map(len, texts_of(store))) == [1024, 1000, 1]


@pytest.mark.parametrize("processes", [1, 2])
def test_large_tasks_go_through_files(
    tmp_path, cache, open_files, small_tasks, monkeypatch, processes
):
    """A compressed file is one task: all its tokens were in memory, and then sent to the parent."""
    rows = [{"input_ids": [n, 1, 2], "labels": [-100, 5, n], "weights": [1.0, n, 2.0]}
            for n in range(1, 41)]  # fmt: skip
    text = "".join(json.dumps(row) + "\n" for row in rows).encode()
    for name in ("a.jsonl.gz", "b.jsonl.gz"):
        (tmp_path / name).write_bytes(gzip.compress(text))
    files, options = (tmp_path / "a.jsonl.gz", tmp_path / "b.jsonl.gz"), {"kind": "tokens"}
    options |= {"tokenizer": None, "weights_column": "weights", "processes": processes}
    whole = open_files(*files, **options)
    shutil.rmtree(cache)
    monkeypatch.setattr(token_store, "_MEMORY_BYTES", 100)
    spilled = []
    spill = token_store.spilled
    monkeypatch.setattr(token_store, "spilled", lambda *a: spilled.append(spill(*a)) or spilled[-1])
    store = open_files(*files, **options)
    assert store.fingerprint == whole.fingerprint
    assert len(spilled) == (0 if processes > 1 else 10), "in other processes if there are several"
    (name,) = store_names(cache)
    assert not [file for file in (cache / name).iterdir() if file.name.startswith("spill")]


@pytest.mark.slow
@pytest.mark.parametrize("owner", ["ended", "alive"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, TrainingError])
def test_an_ended_tokenization_is_continued(
    tmp_path, cache, open_files, small_tasks, monkeypatch, messages, owner, error
):
    """It started from the beginning. The parts that were written are kept: moved, or if the process
    may still write to them (here it is this one), copied."""
    rows = [{"input_ids": [n, 1, 2], "weights": [1.0, n, 2.0]} for n in range(1, 41)]
    rows += [row | {"labels": [-100, 5, 6]} for row in rows] + [{"input_ids": ["bad"]}]
    file = write(tmp_path / "a.jsonl", rows)
    options = {"kind": "tokens", "tokenizer": None, "weights_column": "weights", "processes": 1}
    options["on_error"] = "skip"
    whole = open_files(file, **options)
    shutil.rmtree(cache)
    monkeypatch.setattr(store_files, "_SAVE_SECONDS", 0.0)
    run, tasks = token_store._run_task, []

    def end_after_30_tasks(*arguments):
        tasks.append(arguments)
        if len(tasks) == 31:
            raise error("ended")
        return run(*arguments)

    monkeypatch.setattr(token_store, "_run_task", end_after_30_tasks)
    with pytest.raises(error):
        open_files(file, **options)
    (left,) = [path for path in cache.iterdir() if path.name.startswith(".")]
    with (left / "ids.bin").open("ab") as ids:
        ids.write(b"after the last note")
    if owner == "ended":
        (record,) = (cache / "locks" / left.name[1:25] / "owner").glob("*.json")
        record.write_text(json.dumps(json.loads(record.read_text()) | {"started": 1}))
    store = open_files(file, **options)
    assert store.fingerprint == whole.fingerprint
    assert store.skipped == whole.skipped
    assert any(f"continuing after 30 of {len(tasks) - 1} parts" in text for text in messages())
    assert store_names(cache) == [store.folder.name]
    assert sorted(file.name for file in store.folder.iterdir()) == [
        *(
            "hashes.bin",
            "ids.bin",
            "labels.bin",
            "meta.json",
            "offsets.npy",
            "origins.bin",
            "weights.bin",
        )
    ]


# Locks and existing stores


def lock_of_another_process(cache, open_files, file, **owner):
    """Creates and removes the store of `file`.

    Returns its name, the path of another process's lock file, and the content of that file.
    """
    open_files(file)
    (name,) = store_names(cache)
    shutil.rmtree(cache / name)
    folder = cache / "locks" / name
    taken = lock.Ownership.take(folder, Environment())
    values = json.loads((folder / "owner" / taken.name).read_text())
    taken.release()
    return name, folder / "owner/00000009.json", json.dumps(values | owner)


def test_lock_of_a_killed_process_is_taken_over(tmp_path, cache, open_files):
    file = write(tmp_path / "a.jsonl", ["x"])
    name, record, dead = lock_of_another_process(cache, open_files, file, started=1)
    record.write_text(dead)
    write(cache / f".{name}-00000009.json/ids.bin", b"half")
    assert texts_of(open_files(file)) == ["x"]
    assert store_names(cache) == [name]


def test_process_waits_while_another_process_tokenizes(
    tmp_path, cache, open_files, monkeypatch, messages
):
    """The other process is on another machine, so only its heartbeat shows that it is running."""
    monkeypatch.setattr(lock, "LEASE_SECONDS", 120.0)
    monkeypatch.setattr(token_store, "_LOGGED_SECONDS", 0.3)
    monkeypatch.setattr(token_store, "_POLL_SECONDS", 0.1)
    file = write(tmp_path / "a.jsonl", ["x"])
    other = {"machine": "other", "host": "node7"}
    _, record, remote = lock_of_another_process(cache, open_files, file, **other)
    record.write_text(remote)
    before, found = len(messages()), []
    waiting = threading.Thread(target=lambda: found.append(texts_of(open_files(file))))
    waiting.start()
    while not any("waiting for process " in message for message in messages()[before:]):
        assert waiting.is_alive()
        time.sleep(0.05)
    assert not found
    assert messages()[before].startswith("waiting for process ")
    assert " on node7, since " in messages()[before]
    monkeypatch.setattr(lock, "LEASE_SECONDS", 0.5)
    waiting.join(120)
    assert found == [["x"]], "the lock must be taken over after the heartbeat stops"


def test_a_time_stamp_in_the_future_blocks_nobody(tmp_path, cache, open_files, monkeypatch):
    """A killed process of another machine, by a file server whose clock is ahead: its lock was
    respected until the local clock had caught up."""
    monkeypatch.setattr(lock, "LEASE_SECONDS", 0.5)
    file, found = write(tmp_path / "a.jsonl", ["x"]), []
    other = {"machine": "other", "host": "node7"}
    _, record, remote = lock_of_another_process(cache, open_files, file, **other)
    record.write_text(remote)
    os.utime(record, (4e9, 4e9))
    waiting = threading.Thread(target=lambda: found.append(texts_of(open_files(file))), daemon=True)
    waiting.start()
    waiting.join(60)
    assert found == [["x"]]


def test_waiting_process_polls_less_often_over_time(tmp_path, open_files, monkeypatch):
    """A thousand ranks may poll the same file system for hours."""
    now, slept, file = [0.0], [], write(tmp_path / "a.jsonl", ["x"])

    def sleep(seconds):
        slept.append(seconds)
        now[0] += seconds
        if now[0] > 3600:
            raise TimeoutError

    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(time, "sleep", sleep)
    with pytest.raises(TimeoutError):
        open_files(file, build=False)
    assert len(slept) < 800
    assert (slept[0] < 0.1, slept[-1]) == (True, token_store._POLL_SECONDS)


def test_only_relevant_settings_change_the_store(tmp_path, cache, open_files):
    file = write(tmp_path / "a.jsonl", ["x"])
    open_files(file)
    instruct = {"kind": "instruct", "prompt_column": "text", "response_column": "text"}
    for same in ({"text_column": "text"}, {"prompt_column": "q", "processes": 7}):
        open_files(file, **same)
    assert len(store_names(cache)) == 1
    for changed in ({"on_error": "skip"}, instruct, {"limit": 5}):
        open_files(file, **changed)
    assert len(store_names(cache)) == 4
    chats = write(tmp_path / "chats.jsonl", [{"messages": CHAT}])
    names = {
        open_files(chats, kind="chat", **more).folder
        for more in (
            {},
            {"system_column": "x"},
            {"system": "x"},
            {"loss_on": "last"},
            {"loss_on": "all"},
            {"chat_template_kwargs": {"enable_thinking": True}},
            {"chat_template_kwargs": {"enable_thinking": False}},
        )
    }
    assert len(names) == 7
    same = {"loss_on": "assistant", "label_column": "x"}
    assert open_files(chats, kind="chat", **same).folder in names


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_limit_is_the_first_rows(tmp_path, open_files, small_tasks, processes):
    texts = [[f"{name}{number}" for number in range(40)] for name in "abcd"]
    files = [
        write_broken_rows(tmp_path, [59]),  # after the limit it is not read
        write(tmp_path / "b.parquet", texts[1], row_group_size=7),
        write(tmp_path / "c.csv", "\n".join(["text", *texts[2]])),
        write(tmp_path / "d.txt", "d"),
    ]
    broken, *others = files
    assert texts_of(open_files(broken, limit=50)) == [f"text {number}" for number in range(50)]
    with pytest.raises(RecipeError, match=r"a.jsonl:60: not JSON"):
        open_files(broken, limit=60, processes=processes)
    rows = [*texts[1], *texts[2], "d"]
    for limit in (1, 7, 39, 40, 41, 80, 81, 1000):
        found = open_files(*others, limit=limit, processes=processes)
        assert texts_of(found) == rows[:limit], limit
        assert found.fingerprint["documents"] == min(limit, 81)
    assert texts_of(open_files(*others, limit=3, validation=True)) == rows


@pytest.mark.slow
def test_a_pickled_store_names_its_files(tmp_path, open_files, monkeypatch):
    """For loader processes that are not forked: Python 3.14 starts them with forkserver."""
    rows = [{"input_ids": list(range(256)), "w": [0.5] * 256} for _ in range(400)]
    write_lines(tmp_path / "a.jsonl", rows)
    store = open_files(tmp_path / "a.jsonl", kind="tokens", weights_column="w", tokenizer=None)
    found = pickle.loads(data := pickle.dumps(store.ids))
    assert len(data) < 1000 < store.ids.nbytes
    assert isinstance(found, np.memmap)
    assert np.array_equal(found, store.ids)
    for part in (store.ids[1000:90000], store.ids[:0], store.weights[5:6], store.ids[::2][:9]):
        found = pickle.loads(data := pickle.dumps(part))
        assert len(data) < 1000
        assert found.dtype == part.dtype
        assert np.array_equal(found, part)
    assert np.array_equal(pickle.loads(pickle.dumps(store.ids + 1)), store.ids + 1)
    dataset = dataset_of(store, separate(store.offsets, 64), 64)
    mixture = MixtureDataset({"a": dataset, "b": dataset}, None)
    assert len(pickle.dumps(mixture)) < 100_000 < store.ids.nbytes
    loader = DataLoader(
        mixture,
        batch_sampler=[[0, 1], [len(mixture) - 1]],
        collate_fn=mixture.collate,
        num_workers=1,
        multiprocessing_context="spawn",
    )
    for batch, indices in zip(loader, loader.batch_sampler, strict=True):
        expected = mixture.collate([mixture[index] for index in indices]).micro_batch.inputs
        assert torch.equal(batch.micro_batch.inputs["input_ids"], expected["input_ids"])


# Hub data sets: `load_dataset` is replaced, because tests have no network access


@pytest.fixture
def hub_sets(monkeypatch, tmp_path):
    """Fake hub data sets by (repository, config), and the list of requests for them."""
    import datasets

    monkeypatch.chdir(tmp_path)
    sets = {
        ("me/set", None): {"train": ["a", "b"], "test": ["t"], "train[:50%]": ["a"]},
        ("me/set", "small"): {"train": ["s"], "validation": ["v"]},
    }
    requests = []

    def load_dataset(repository, config, *, split):
        requests.append((repository, config, split))
        if (repository, config) not in sets:
            raise ConnectionError("no network\nreally")
        found = sets[repository, config]
        if split not in found:
            raise ValueError(f'Unknown split "{split}". Should be one of {sorted(found)}.')
        return datasets.Dataset.from_list([{"text": text} for text in found[split]])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    hub.load_data_set.cache_clear()
    yield sets, requests
    hub.load_data_set.cache_clear()


def test_hub_data_sets(tmp_path, open_files, hub_sets):
    _, requests = hub_sets
    local = write(tmp_path / "a.jsonl", ["local"])
    assert texts_of(open_files("me/set", local)) == ["a", "b", "local"]
    assert texts_of(open_files("me/set:test")) == ["t"]
    assert texts_of(open_files("me/set:train[:50%]")) == ["a"]
    assert texts_of(open_files("me/set/small")) == ["s"]
    assert texts_of(open_files("me/set/small:validation")) == ["v"]
    assert texts_of(open_files("me/set", validation=True)) == ["t"]
    assert texts_of(open_files("me/set/small", validation=True)) == ["v"]
    assert requests[:2] == [("me/set", None, "train"), ("me/set", None, "test")]
    assert next(read_rows(SourcePart("me/set:test", "hub"))).where == "me/set:test row 1"
    missing = (
        r"^data: me/gone is not in the cache of data sets and could not be fetched: no network;"
    )
    with pytest.raises(RecipeError, match=missing):
        open_files("me/gone")
    split = r"has no split dev: Unknown split \"dev\". Should be one of .*; name one"
    with pytest.raises(RecipeError, match=rf"^data: me/set:dev: {split}"):
        open_files("me/set:dev")


def test_refused_access_to_the_hub_names_the_login(monkeypatch):
    """A gated repository is no question of the network."""
    request = httpx.Request("GET", "https://huggingface.co/me/gated")
    gated = GatedRepoError("403 Client Error.", response=httpx.Response(403, request=request))
    unknown = datasets.exceptions.DatasetNotFoundError("Dataset 'me/gated' is a gated dataset.")
    for error, fetch in (
        (gated, lambda: hub.model_folder("me/gated", key="model.path")),
        (unknown, lambda: hub.load_data_set("me/gated")),
    ):
        monkeypatch.setattr("datasets.load_dataset", mock.Mock(side_effect=error))
        monkeypatch.setattr(
            "huggingface_hub.snapshot_download",
            mock.Mock(side_effect=[LocalEntryNotFoundError("not cached"), error]),
        )
        with pytest.raises(RecipeError, match="run `hf auth login` or set HF_TOKEN") as problem:
            fetch()
        assert "without network" not in str(problem.value)


def test_hub_data_set_is_cached_after_the_first_read(open_files, hub_sets, small_tasks):
    sets, requests = hub_sets
    texts = sets["me/set", None]["train"] = [f"text {number}" for number in range(50)]
    open_files("me/set", processes=2)
    sets["me/set", None]["train"] = ["new", "rows"]
    hub.load_data_set.cache_clear()
    for build in (True, False):
        assert texts_of(open_files("me/set", build=build)) == texts
    assert requests == [("me/set", None, "train")]


def test_a_store_that_is_renamed_while_others_wait_for_it(tmp_path, monkeypatch):
    """The rank that waited failed: the folder was gone between two looks at it."""
    (tmp_path / ".abc-0000").mkdir()
    (tmp_path / ".abc-0000/ids.bin").write_bytes(bytes(12))
    assert token_store._written(tmp_path / "abc") == 12
    scandir = os.scandir

    def gone(path):
        if str(path).endswith(".abc-0000"):
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", gone)
    assert token_store._written(tmp_path / "abc") == 0
