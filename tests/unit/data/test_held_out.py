"""data.validation_split: which documents are held out, and that no other is evaluated."""

import dataclasses

import numpy as np
import pytest

from launcher.checkpoint.resume import data_changes
from launcher.data.attachments import ATTACHMENT
from launcher.data.held_out import CHOSEN, copy_documents, held_out
from launcher.data.opening import open_dataset
from launcher.data.store_files import document_hashes
from launcher.data.token_store import ModelTraits, TokenStore, open_store
from launcher.errors import RecipeError
from launcher.recipe import schema
from tests.datasets import objective_of
from tests.unit.data.rows import write

EXPECTED = [1, 43, 45, 111, 117]


def numbered(count):
    """A store of documents 0, 1, ..., each its number three times."""
    ids = np.repeat(np.arange(count, dtype=np.int32), 3)
    return TokenStore(ids=ids, labels=None, offsets=np.arange(0, 3 * count + 1, 3))


def chosen(store, share):
    return held_out(document_hashes(store), share)


@pytest.mark.parametrize("share", [0.02, 0.2, 0.5, 0.9])
def test_the_share_is_near_the_requested_one(share):
    mask = chosen(numbered(10_000), share)
    assert len(mask) == 10_000
    assert abs(mask.mean() - share) < 3.5 * (share * (1 - share) / 10_000) ** 0.5
    copied = copy_documents(numbered(10_000), np.flatnonzero(mask))
    assert np.array_equal(copied.ids, np.repeat(np.flatnonzero(mask), 3))
    assert copied.documents == mask.sum()


@pytest.mark.parametrize("count", [2, 3, 7])
@pytest.mark.parametrize("share", [1e-9, 0.5, 1 - 1e-9])
def test_some_are_held_out_and_some_are_trained(count, share):
    assert 0 < chosen(numbered(count), share).sum() < count


def test_documents_that_are_held_out_stay_the_same():
    """Others would be trained on after an update of the launcher, and then evaluated."""
    mask = chosen(numbered(200), 0.04)
    assert np.flatnonzero(mask).tolist() == EXPECTED
    assert not (chosen(numbered(200), 0.02) & ~mask).any()


def of_rows(rows):
    ids = np.concatenate(rows).astype(np.int32)
    return TokenStore(ids=ids, labels=None, offsets=np.cumsum([0, *map(len, rows)]))


def test_an_inserted_row_moves_none_and_equal_rows_are_on_one_side():
    rows = [[number, number % 7] for number in range(300)]
    before = chosen(of_rows(rows), 0.1)
    for place in (0, 150, 300):
        after = chosen(of_rows([*rows[:place], [1000, 1, 2], *rows[place:]]), 0.1)
        assert np.array_equal(np.delete(after, place), before)
    assert np.array_equal(chosen(of_rows(rows[100:]), 0.1), before[100:])
    twice = chosen(of_rows([*rows, *rows[::-1]]), 0.1)
    assert np.array_equal(twice[:300], twice[300:][::-1])


def test_documents_with_other_images_are_other_documents():
    store = of_rows([[1, 2]] * 50)
    images = np.zeros(50, dtype=ATTACHMENT)
    images["first"], images["checksum"] = np.arange(50) * 2, np.arange(50) // 2
    hashes = document_hashes(dataclasses.replace(store, attachments=images))
    assert len(set(hashes.tolist())) == 25
    assert np.array_equal(hashes[::2], hashes[1::2])


def test_hashes_are_written_at_tokenization(tmp_path):
    """Each rank read all tokens at the start."""
    file = write(tmp_path / "rows.jsonl", [{"text": letter(number)} for number in range(20)])
    data = schema.Data(kind="text", tokenizer="bytes", cache=str(tmp_path / "cache"))
    store = open_store((str(file),), data, tokenizer="bytes", build=True)
    assert np.array_equal(store.hashes, document_hashes(store))
    chosen = np.array([7, 2])
    copied = copy_documents(store, chosen)
    assert np.array_equal(copied.hashes, document_hashes(copied))


def test_a_single_document_cannot_be_split():
    with pytest.raises(RecipeError, match=r"data\.validation_split: the data is a single document"):
        chosen(of_rows([[1, 2]]), 0.5)
    with pytest.raises(RecipeError, match=r"all rows of the data are equal"):
        chosen(of_rows([[1, 2]] * 3), 0.5)


def test_an_earlier_checkpoint_with_rows_that_are_held_out_is_refused():
    before = {"files": {"a": 3}, "content": "x"}
    (line,) = data_changes(before, before | {"held_out": CHOSEN})
    assert "an earlier version chose the rows that are held out by their number" in line
    parts = {"parts": {"one": before}}, {"parts": {"one": before | {"held_out": CHOSEN}}}
    assert list(data_changes(*parts)) == [line]
    assert list(data_changes(before | {"held_out": CHOSEN}, before | {"held_out": CHOSEN})) == []
    assert list(data_changes(before, before)) == []


def letter(number):
    return chr(ord("a") + number) * 5


ROWS = {
    "text": lambda number: {"text": letter(number)},
    "instruct": lambda number: {"prompt": "0", "response": letter(number)},
    "classification": lambda number: {"text": letter(number), "label": number},
    "preference": lambda number: {"prompt": "0", "chosen": letter(number), "rejected": "!"},
    "tokens": lambda number: {"input_ids": [*letter(number).encode()]},
}


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("kind", ROWS)
def test_training_and_validation_share_no_document(kind, packing, tmp_path):
    """Sequences of each kind, from files to targets."""
    file = write(tmp_path / "rows.jsonl", [ROWS[kind](number) for number in range(20)])
    data = schema.Data(
        kind=kind,
        tokenizer="bytes",
        cache=str(tmp_path / "cache"),
        packing=packing,
        sequence_length=16,
        validation_split=0.2,
    )
    options = {"tokenizer": "bytes", "model": ModelTraits(), "build": True}
    options["objective"] = objective_of(data)
    seen = {}
    for validation in (False, True):
        dataset = open_dataset(data, (str(file),), held_out=validation, **options)
        letters = []
        for index in range(len(dataset)):
            ids = dataset[index]["input_ids"]
            found = [id - ord("a") for id in ids.tolist() if ord("a") <= id < ord("a") + 20]
            letters += found
            if kind == "classification":
                assert dataset[index]["targets"].tolist() == sorted(set(found))
            if kind == "preference" and not validation:  # numbers of the store, for the reference
                answers = dataset[index]["answers"]
                assert set(answers[answers >= 0] // 2) == set(found)
        seen[validation] = set(letters)
        assert dataset.sequences.documents == len(seen[validation])
        assert dataset.describe()[0].startswith(f"{len(seen[validation])} ")
    assert 0 < len(seen[True]) < 20
    assert seen[False] == set(range(20)) - seen[True]
