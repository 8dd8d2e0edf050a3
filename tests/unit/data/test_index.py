"""The index of a large store: the arrays of its sequences, built once and mapped."""

import dataclasses
import errno
import multiprocessing
import os
import pickle
import shutil
import threading

import numpy as np
import pytest

from launcher.console import signs_of_life
from launcher.data import index, opening, token_store
from launcher.data.opening import open_dataset
from launcher.data.packing import Sequences, Stream
from launcher.data.store_files import MappedArray
from launcher.data.token_store import ModelTraits
from launcher.errors import RecipeError
from launcher.recipe import schema
from tests.datasets import objective_of
from tests.unit.data.rows import write
from tests.unit.data.test_held_out import ROWS

COUNT = 26
"""Of documents, in the files of these tests."""


@pytest.fixture
def large(monkeypatch):
    """Stores of a few documents have an index."""
    monkeypatch.setattr(index, "_DOCUMENTS", 2)


def row_of(kind, number):
    """Some are longer than a sequence."""
    row = ROWS[kind](number % 20)
    size = 1 + number * 7 % 11
    name = {"instruct": "response", "preference": "chosen", "tokens": "input_ids"}.get(kind, "text")
    return row | {name: row[name] * size}


def settings_of(folder, kind="text", **options):
    rows = [row_of(kind, number) for number in range(COUNT)]
    file = folder / f"{kind}.jsonl"
    if not file.exists():
        write(file, rows)
    settings = {"tokenizer": "bytes", "cache": str(folder / "cache"), "sequence_length": 32}
    return schema.Data(kind=kind, train=(str(file),), **settings | options)


def opened(data, *, build=True, held_out=False):
    options = {"tokenizer": "bytes", "model": ModelTraits(), "objective": objective_of(data)}
    return open_dataset(data, data.train, build=build, held_out=held_out, **options)


def refuse(*_, **__):
    raise AssertionError("it is packed again")


def indices(data):
    return sorted((token_store.cache_folder(data.cache)).glob("*/index-*"))


def leftovers(data):
    return sorted((token_store.cache_folder(data.cache)).glob("*/.index-*"))


@pytest.mark.parametrize("split", [None, 0.3])
@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("kind", ROWS)
def test_a_data_set_is_the_same_with_an_index(kind, packing, split, tmp_path, monkeypatch):
    data = settings_of(tmp_path, kind, packing=packing, validation_split=split)
    for held_out in (False, True)[: 1 if split is None else 2]:
        monkeypatch.setattr(index, "_DOCUMENTS", 1000)
        before = opened(data, held_out=held_out)
        monkeypatch.setattr(index, "_DOCUMENTS", 2)
        opened(data, held_out=held_out)
        with monkeypatch.context() as patch:
            patch.setattr(opening, "_packed", refuse)  # it is built once
            after = opened(data, held_out=held_out, build=False)
        assert isinstance(after.sequences, Stream if kind == "text" and packing else Sequences)
        for each in dataclasses.fields(before.sequences):
            one, other = (getattr(of.sequences, each.name) for of in (before, after))
            np.testing.assert_array_equal(one, other, err_msg=each.name)
        assert after.store.fingerprint == before.store.fingerprint
        assert list(after.lengths) == list(before.lengths)
        assert after.document_lengths.tolist() == before.document_lengths.tolist()
        assert after.describe() == before.describe()
        for number in range(len(before)):
            one, other = before[number], after[number]
            assert one.keys() == other.keys()
            for name, values in one.items():
                np.testing.assert_array_equal(other[name], values, err_msg=name)
            assert [*before.pieces(number)] == [*after.pieces(number)]
        origins = [of.store.origins.tolist() for of in (before, after)]
        assert origins[0] == origins[1]
    assert len(indices(data)) == (1 if split is None else 2)


def map_of(array):
    return array._mmap


@pytest.mark.parametrize("held_out", [False, True])
def test_a_rank_holds_no_array(large, tmp_path, held_out):
    """A loader process that is not forked gets the names of the files, too."""
    data = settings_of(tmp_path, "instruct", validation_split=0.3)
    dataset = opened(data, held_out=held_out)
    arrays = [*index._values(dataset.sequences, np.ndarray).values()]
    arrays += index._values(dataset.store, np.ndarray).values()
    arrays += [] if held_out else [dataset.documents]
    assert len(arrays) == (8 if held_out else 9)
    assert all(isinstance(each, MappedArray) and map_of(each) is not None for each in arrays)
    again = pickle.loads(pickle.dumps(dataset))
    for name in ("starts", "lengths", "bounds"):
        mapped = getattr(again.sequences, name)
        assert mapped._mmap is not None
        assert mapped.tolist() == getattr(dataset.sequences, name).tolist()


def test_what_decides_the_sequences_decides_the_index(large, tmp_path):
    data = settings_of(tmp_path, "tokens")
    others = [{"sequence_length": 16}, {"packing": False}, {"overlong": "drop"}]
    others += [{"validation_split": 0.2}]
    for number, other in enumerate([{}, *others, {"shuffle": False}, {"workers": 1}]):
        opened(dataclasses.replace(data, **other))
        assert len(indices(data)) == min(number, len(others)) + 1
    assert len({folder.parent for folder in indices(data)}) == 1


def test_a_store_of_few_documents_has_none(tmp_path):
    data = settings_of(tmp_path)
    opened(data)
    assert not indices(data)


def test_a_damaged_index_is_built_again(large, tmp_path):
    data = settings_of(tmp_path, "tokens")
    starts = opened(data).sequences.starts.tolist()
    (folder,) = indices(data)
    os.truncate(folder / "sequences-starts.npy", 130)
    assert opened(data).sequences.starts.tolist() == starts
    (folder / "meta.json").write_text("{")
    assert opened(data).sequences.starts.tolist() == starts
    assert (indices(data), leftovers(data)) == ([folder], [])


def test_a_process_that_is_killed_leaves_no_index(large, tmp_path, monkeypatch):
    data = settings_of(tmp_path, "tokens", validation_split=0.2)
    with monkeypatch.context() as patch:
        patch.setattr(index, "commit", lambda *_: os._exit(9))
        process = multiprocessing.get_context("fork").Process(target=opened, args=(data,))
        process.start()
        process.join()
    assert process.exitcode == 9
    assert (indices(data), len(leftovers(data))) == ([], 1)
    opened(data)
    assert (len(indices(data)), leftovers(data)) == (1, [])


def test_a_full_disk(large, tmp_path, monkeypatch):
    data = settings_of(tmp_path, "tokens")

    def fail(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(index, "write_array", fail)
        with pytest.raises(RecipeError, match=r"data\.cache: .* No space left on device; free"):
            opened(data)
    assert (indices(data), leftovers(data)) == ([], [])
    opened(data)


def test_in_a_folder_of_another_user_each_process_packs(large, tmp_path, monkeypatch):
    data = settings_of(tmp_path, "tokens")
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert isinstance(opened(data).sequences, Sequences)
    assert opened(data, build=False).documents is None
    assert not indices(data)
    monkeypatch.undo()
    monkeypatch.setattr(index, "_DOCUMENTS", 2)
    opened(data)
    monkeypatch.setattr(os, "access", lambda *_: False)
    monkeypatch.setattr(opening, "_packed", refuse)
    opened(data)  # an index that is there is used


def test_a_process_waits_and_shows_that_another_one_gets_further(large, tmp_path, monkeypatch):
    monkeypatch.setattr(token_store, "_POLL_SECONDS", 0.05)
    data, found = settings_of(tmp_path, "tokens"), []
    opened(data)
    (folder,) = indices(data)
    shutil.rmtree(folder)
    waiting = threading.Thread(target=lambda: found.append(opened(data, build=False)))
    waiting.start()
    before = signs_of_life()
    write(folder.with_name(f".{folder.name}-other") / "sequences-starts.npy", b"half")
    while signs_of_life() == before:
        assert waiting.is_alive()
    assert not found
    dataset = opened(data)
    waiting.join(60)
    assert found[0].sequences.starts.tolist() == dataset.sequences.starts.tolist()


def test_a_refusal_leaves_no_index(large, tmp_path):
    data = settings_of(tmp_path, "tokens", overlong="error")
    with pytest.raises(RecipeError, match="longer than a sequence"):
        opened(data)
    assert (indices(data), leftovers(data)) == ([], [])
