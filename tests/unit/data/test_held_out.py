"""data.validation_split: which documents are held out, and that no other is evaluated."""

import numpy as np
import pytest

from launcher.data.held_out import copy_documents, held_out
from launcher.data.opening import open_dataset
from launcher.data.token_store import ModelInputs, TokenStore
from launcher.errors import RecipeError
from launcher.recipe import schema
from tests.datasets import objective_of
from tests.unit.data.rows import write


def numbered(count):
    """A store of documents 0, 1, ..., each its number three times."""
    ids = np.repeat(np.arange(count, dtype=np.int32), 3)
    return TokenStore(ids=ids, labels=None, offsets=np.arange(0, 3 * count + 1, 3))


@pytest.mark.parametrize(
    ("count", "share", "number"), [(2, 0.02, 1), (2, 0.99, 1), (10, 0.25, 2), (1000, 0.02, 20)]
)
def test_split_divides_the_documents(count, share, number):
    mask = held_out(count, share)
    assert (len(mask), mask.sum()) == (count, number)
    copied = copy_documents(numbered(count), np.flatnonzero(mask))
    assert np.array_equal(copied.ids, np.repeat(np.flatnonzero(mask), 3))
    assert copied.documents == number
    assert np.array_equal(held_out(count, share), mask)


EXPECTED = [2, 33, 53, 94]


def test_documents_that_are_held_out_stay_the_same():
    """Others would be trained on after an update of the launcher, and then evaluated."""
    assert np.flatnonzero(held_out(200, 0.02)).tolist() == EXPECTED
    assert held_out(200, 0.04)[EXPECTED].all()


def test_a_single_document_cannot_be_split():
    with pytest.raises(RecipeError, match=r"data\.validation_split: the data is a single document"):
        held_out(1, 0.5)


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
    options = {"tokenizer": "bytes", "model": ModelInputs(), "build": True}
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
    assert seen[True] == set(np.flatnonzero(held_out(20, 0.2)).tolist())
    assert seen[False] == set(range(20)) - seen[True]
