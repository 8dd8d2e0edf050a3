"""Tokenization in several processes, bad rows, locks, and what changes a store."""

import itertools
import json
import os
import shutil
import threading
import time

import pyarrow
import pyarrow.parquet
import pytest

from launcher.data import token_store
from launcher.data.sources import Part, file_part, find_parts, read_all, read_rows, split
from launcher.data.token_store import ModelInputs, open_store
from launcher.distributed.environment import Environment
from launcher.errors import RecipeError, TrainingError
from launcher.metrics import console
from launcher.recipe import hub, schema
from launcher.reliability import lock

END = 256


@pytest.fixture
def many_tasks(monkeypatch):
    """Small inputs are taken for large ones: processes are started, and a task is some lines."""
    monkeypatch.setattr(token_store, "_TASK_BYTES", 64)
    monkeypatch.setattr(token_store, "_STORE_ROWS", 7)


def jsonl(file, texts):
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return file


def opened(
    tmp_path,
    *patterns,
    kind="text",
    tokenizer="bytes",
    build=True,
    validation=False,
    num_labels=None,
    **data,
):
    return open_store(
        tuple(map(str, patterns)),
        schema.Data(kind=kind, cache=str(tmp_path / "cache"), **data),
        tokenizer=tokenizer,
        build=build,
        validation=validation,
        model=ModelInputs(classes=num_labels),
    )


def texts_of(found):
    return [
        bytes(found.ids[start : end - 1].tolist()).decode()
        for start, end in itertools.pairwise(found.offsets)
    ]


def stores(tmp_path):
    """What is in the cache, apart from the locks."""
    return sorted({path.name for path in (tmp_path / "cache").iterdir()} - {"locks"})


# Parts


@pytest.mark.parametrize("size", [1, 10, 33, 100, 10**6])
def test_parts_of_a_file_are_its_rows(tmp_path, size):
    texts = [f"{number} " + "ü\u2028" * (number % 7) for number in range(50)]
    file = jsonl(tmp_path / "a.jsonl", texts)
    lines = file.read_text(encoding="utf-8").split("\n")
    lines[8:8] = ["", "  "]
    file.write_text("\n".join(lines) + "\n" + json.dumps({"text": "last"}), encoding="utf-8")
    whole = list(read_rows(file_part(file)))
    parts = split(file_part(file), size)
    assert (len(parts) > 10) == (size <= 100)
    in_parts = list(read_all(parts))
    assert (
        [row.values for row in in_parts]
        == [row.values for row in whole]
        == [{"text": text} for text in [*texts, "last"]]
    )
    assert [row.where for row in in_parts] == [row.where for row in whole]
    assert whole[-1].where == f"{file}:54"
    assert next(read_rows(parts[-1])).where in {row.where for row in whole}


def test_parts_of_parquet(tmp_path):
    file = tmp_path / "a.parquet"
    rows = [{"text": str(number)} for number in range(95)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file, row_group_size=10)
    parts = split(file_part(file), 1)
    assert len(parts) == 10
    assert [(row.values, row.where) for row in read_all(parts)] == [
        (row, f"{file} row {number}") for number, row in enumerate(rows, start=1)
    ]
    assert len(split(file_part(file), 10**9)) == 1


def test_line_numbers_in_any_order(tmp_path):
    part = file_part(jsonl(tmp_path / "a.jsonl", ["x"] * 40))
    rows = list(read_rows(part))
    for number in (30, 31, 3, 39, 0):
        assert rows[number].where == f"{part.name}:{number + 1}"


# In processes


def test_the_order_is_that_of_files_and_lines_however_many_processes(
    tmp_path, many_tasks, capfd, messages
):
    texts = [[f"{name}{number} " + "x" * (number % 13) for number in range(60)] for name in "abc"]
    jsonl(tmp_path / "data/a.jsonl", texts[0])
    pyarrow.parquet.write_table(
        pyarrow.Table.from_pylist([{"text": text} for text in texts[1]]),
        tmp_path / "data/b.parquet",
        row_group_size=7,
    )
    jsonl(tmp_path / "data/c.jsonl", texts[2])
    (tmp_path / "data/d.txt").write_text("d")
    alone = opened(tmp_path, tmp_path / "data", processes=1)
    (tmp_path / "cache").rename(tmp_path / "first")
    together = opened(tmp_path, tmp_path / "data", processes=2)
    assert texts_of(alone) == texts_of(together) == [*texts[0], *texts[1], *texts[2], "d"]
    assert alone.ids.tobytes() == together.ids.tobytes()
    assert alone.offsets.tobytes() == together.offsets.tobytes()
    assert alone.largest_id == together.largest_id == END
    (name,) = stores(tmp_path)
    files = (tmp_path / "cache" / name).iterdir()
    assert sorted(file.name for file in files) == ["ids.bin", "meta.json", "offsets.npy"]
    assert [line for line in messages() if line.startswith("tokenized 181 documents")]
    printed = capfd.readouterr()
    assert "Generating" not in printed.out + printed.err


def test_labels_and_classes_with_several_processes(tmp_path, many_tasks):
    file = tmp_path / "a.jsonl"
    rows = [
        {"input_ids": [number, 1, 2]} | ({"labels": [-100, 5, 700 + number]} if number > 20 else {})
        for number in range(40)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = opened(tmp_path, file, kind="tokens", tokenizer=None, processes=2)
    assert found.labels.reshape(-1, 3).tolist() == [
        row.get("labels", row["input_ids"]) for row in rows
    ]
    assert (found.largest_id, found.classes) == (739, None)
    file.write_text(
        "".join(
            json.dumps({"text": f"t{number}", "label": number % 3}) + "\n" for number in range(40)
        )
    )
    found = opened(tmp_path, file, kind="classification", processes=2)
    assert found.classes.tolist() == [number % 3 for number in range(40)]
    assert found.labels is None
    assert found.ids[: found.offsets[1]].tolist() == [*b"t0"]
    with pytest.raises(
        RecipeError,
        match=r"a.jsonl:3: label 2, but the model has 2 classes, 0 to 1 \(model.num_labels\)",
    ):
        opened(tmp_path, file, kind="classification", processes=2, num_labels=2)


def test_progress_is_logged(tmp_path, many_tasks, monkeypatch, messages):
    monkeypatch.setattr(console, "LINE_SECONDS", 0.0)
    opened(tmp_path, jsonl(tmp_path / "a.jsonl", ["x" * 100] * 40), processes=1)
    lines = [line for line in messages() if line.startswith("tokenizing: ")]
    assert len(lines) > 5
    assert lines[-1] == "tokenizing: 100%, 0 s left"


def broken_rows(tmp_path, bad):
    file = jsonl(tmp_path / "a.jsonl", [f"text {number}" for number in range(60)])
    lines = file.read_text().splitlines(keepends=True)
    for number in bad:
        lines[number] = "{not json\n"
    file.write_text("".join(lines))
    return file


def test_a_bad_row_found_by_a_process(tmp_path, many_tasks):
    file = broken_rows(tmp_path, [47])
    with pytest.raises(RecipeError) as refused:
        opened(tmp_path, file, processes=2)
    assert (
        str(refused.value)
        == f"{file}:48: not JSON: Expecting property name enclosed in double quotes (column 2)"
    )
    assert stores(tmp_path) == []


def test_a_tokenizer_problem_in_a_process_is_reported(tmp_path, many_tasks):
    (tmp_path / "tokenizer").mkdir()
    with pytest.raises(RecipeError, match=r"^data.tokenizer: .*: no tokenizer could be loaded: "):
        opened(
            tmp_path,
            jsonl(tmp_path / "a.jsonl", "abc" * 30),
            tokenizer=str(tmp_path / "tokenizer"),
            processes=2,
        )


def test_a_killed_process_is_an_error(tmp_path, many_tasks, monkeypatch):
    monkeypatch.setattr(token_store, "store_rows", lambda *arguments: os._exit(9))
    with pytest.raises(
        TrainingError, match=r"a tokenization process was killed, .*; lower data.processes"
    ):
        opened(tmp_path, jsonl(tmp_path / "a.jsonl", ["x"] * 60), processes=2)
    assert stores(tmp_path) == []


@pytest.mark.parametrize("processes", [1, 2])
def test_skipped_rows_are_listed_at_every_start(tmp_path, many_tasks, processes):
    file = broken_rows(tmp_path, [3, 47])
    first = opened(tmp_path, file, processes=processes, on_error="skip")
    problem = "not JSON: Expecting property name enclosed in double quotes (column 2)"
    assert first.skipped == [{"where": f"{file}:{line}", "problem": problem} for line in (4, 48)]
    assert first.documents == 58
    again = opened(tmp_path, file, processes=processes, on_error="skip")
    assert again.skipped == first.skipped
    with pytest.raises(RecipeError):
        opened(tmp_path, file, processes=processes)


def test_nothing_but_bad_rows(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text("x\n\n[]\n")
    with pytest.raises(RecipeError) as refused:
        opened(tmp_path, file, on_error="skip")
    assert str(refused.value) == (
        "data: no document with text in 1 files; all 2 rows were skipped, "
        f"the first: {file}:1: not JSON: Expecting value (column 1)"
    )
    assert stores(tmp_path) == []


def test_several_bad_rows_are_reported_together(tmp_path):
    file = broken_rows(tmp_path, range(3, 20))
    with pytest.raises(RecipeError) as refused:
        opened(tmp_path, file)
    assert [line.split(": ")[0] for line in refused.value.problems[:-1]] == [
        f"{file}:{line}" for line in range(4, 9)
    ]
    assert (
        refused.value.problems[-1]
        == "... and 12 more nearby; data.on_error: skip leaves such rows out"
    )


# Locks, and stores that exist


def lock_of_another_process(tmp_path, file, **owner):
    """The name of a store that is missing, a file for its lock, and what another process writes there."""
    opened(tmp_path, file)
    (name,) = stores(tmp_path)
    shutil.rmtree(tmp_path / "cache" / name)
    folder = tmp_path / "cache/locks" / name
    taken = lock.Ownership.take(folder, Environment())
    values = json.loads((folder / "owner" / taken.name).read_text())
    taken.release()
    return name, folder / "owner/00000009.json", json.dumps(values | owner)


def test_a_killed_process_is_taken_over_and_its_files_are_removed(tmp_path):
    file = jsonl(tmp_path / "a.jsonl", ["x"])
    name, record, dead = lock_of_another_process(tmp_path, file, started=1)
    record.write_text(dead)
    half = tmp_path / f"cache/.{name}-00000009.json"
    half.mkdir()
    (half / "ids.bin").write_bytes(b"half")
    assert texts_of(opened(tmp_path, file)) == ["x"]
    assert stores(tmp_path) == [name]


def test_a_process_that_tokenizes_is_waited_for(tmp_path, monkeypatch, messages):
    """It is on another machine: its heartbeat is what shows that it runs."""
    monkeypatch.setattr(lock, "LEASE_SECONDS", 4.0)
    monkeypatch.setattr(token_store, "_LOGGED_SECONDS", 0.3)
    file = jsonl(tmp_path / "a.jsonl", ["x"])
    _, record, remote = lock_of_another_process(tmp_path, file, machine="other", host="node7")
    record.write_text(remote)
    before, found = len(messages()), []
    waiting = threading.Thread(target=lambda: found.append(texts_of(opened(tmp_path, file))))
    waiting.start()
    for _ in range(15):
        record.touch()
        time.sleep(0.1)
    assert not found
    assert messages()[before].startswith("waiting for process ")
    assert " on node7, since " in messages()[before]
    waiting.join(30)
    assert found == [["x"]], "no heartbeat any more: taken over"


def test_waiting_processes_look_less_and_less_often(tmp_path, monkeypatch):
    """A thousand ranks may wait for hours on one file system."""
    now, slept, file = [0.0], [], jsonl(tmp_path / "a.jsonl", ["x"])

    def sleep(seconds):
        slept.append(seconds)
        now[0] += seconds
        if now[0] > 3600:
            raise TimeoutError

    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(time, "sleep", sleep)
    with pytest.raises(TimeoutError):
        opened(tmp_path, file, build=False)
    assert len(slept) < 800
    assert (slept[0] < 0.1, slept[-1]) == (True, token_store._POLL_SECONDS)


def test_an_existing_store_needs_neither_tokenizer_nor_datasets(tmp_path, many_tasks, monkeypatch):
    import sys

    file = jsonl(tmp_path / "a.jsonl", [f"text {number}" for number in range(30)])
    opened(tmp_path, file, processes=2)
    for module in ("datasets", "transformers"):
        monkeypatch.setitem(sys.modules, module, None)
    assert opened(tmp_path, file, processes=4).documents == 30


def test_settings_that_change_the_store(tmp_path):
    file = jsonl(tmp_path / "a.jsonl", ["x"])
    opened(tmp_path, file)
    for changed in (
        {"on_error": "skip"},
        {"kind": "instruct", "prompt_column": "text", "response_column": "text"},
        {"text_column": "text"},
    ):
        opened(tmp_path, file, **changed)
    assert len(stores(tmp_path)) == 3


def test_unused_columns_do_not_change_the_store(tmp_path):
    file = jsonl(tmp_path / "a.jsonl", ["x"])
    opened(tmp_path, file)
    opened(tmp_path, file, prompt_column="q", processes=7)
    assert len(stores(tmp_path)) == 1


# Patterns


def test_a_folder_of_rows_may_have_a_readme(tmp_path):
    jsonl(tmp_path / "set/a.jsonl", ["x"])
    (tmp_path / "set/README.md").write_text("about it")
    assert [part.form for part in find_parts((str(tmp_path / "set"),), kind="chat")] == ["jsonl"]
    assert [part.form for part in find_parts((str(tmp_path / "set"),), kind="text")] == [
        "text",
        "jsonl",
    ]
    with pytest.raises(
        RecipeError,
        match=r"README.md: kind chat reads .jsonl, .json, .parquet, .csv; use kind text for text files",
    ):
        find_parts((str(tmp_path / "set/README.md"),), kind="chat")


# The hub: `load_dataset` is replaced, since there is no network here


@pytest.fixture
def hub_sets(monkeypatch, tmp_path):
    """Hub data sets by (repository, config); what was asked for is noted."""
    import datasets

    monkeypatch.chdir(tmp_path)
    sets = {
        ("me/set", None): {"train": ["a", "b"], "test": ["t"]},
        ("me/set", "small"): {"train": ["s"], "validation": ["v"]},
    }
    asked = []

    def load_dataset(repository, config, *, split):
        asked.append((repository, config, split))
        if (repository, config) not in sets:
            raise ConnectionError("no network\nreally")
        if split not in sets[repository, config]:
            raise ValueError(
                f'Unknown split "{split}". Should be one of {sorted(sets[repository, config])}.'
            )
        return datasets.Dataset.from_list(
            [{"text": text} for text in sets[repository, config][split]]
        )

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    hub.load_data_set.cache_clear()
    yield sets, asked
    hub.load_data_set.cache_clear()


def test_hub_data_sets(tmp_path, hub_sets):
    _, asked = hub_sets
    local = jsonl(tmp_path / "a.jsonl", ["local"])
    assert texts_of(opened(tmp_path, "me/set", local)) == ["a", "b", "local"]
    assert texts_of(opened(tmp_path, "me/set:test")) == ["t"]
    assert texts_of(opened(tmp_path, "me/set/small")) == ["s"]
    assert texts_of(opened(tmp_path, "me/set/small:validation")) == ["v"]
    assert texts_of(opened(tmp_path, "me/set", validation=True)) == ["t"]
    assert texts_of(opened(tmp_path, "me/set/small", validation=True)) == ["v"]
    assert asked[:2] == [("me/set", None, "train"), ("me/set", None, "test")]
    row = next(read_rows(Part("me/set:test", "hub")))
    assert row.where == "me/set:test row 1"


def test_hub_data_sets_in_processes(hub_sets, tmp_path, many_tasks):
    sets, _ = hub_sets
    sets["me/set", None]["train"] = [f"text {number}" for number in range(50)]
    assert texts_of(opened(tmp_path, "me/set", processes=2)) == sets["me/set", None]["train"]


def test_hub_data_sets_that_are_not_there(tmp_path, hub_sets):
    with pytest.raises(
        RecipeError,
        match=r"^data: me/gone is not in the cache of data sets and could not be fetched: no network; without",
    ):
        opened(tmp_path, "me/gone")
    with pytest.raises(
        RecipeError,
        match=r"^data: me/set:dev: has no split dev: Unknown split \"dev\". Should be one of .*; name one",
    ):
        opened(tmp_path, "me/set:dev")


def test_a_hub_data_set_stays_the_one_that_was_read(tmp_path, hub_sets):
    sets, asked = hub_sets
    opened(tmp_path, "me/set")
    sets["me/set", None]["train"] = ["new", "rows"]
    hub.load_data_set.cache_clear()
    for build in (True, False):
        assert texts_of(opened(tmp_path, "me/set", build=build)) == ["a", "b"]
    assert len(asked) == 1
