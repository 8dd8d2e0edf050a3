"""The file of a teacher's predictions: what is written, and what a later start can use."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from launcher.data.objectives import top_k_dtype
from launcher.errors import TrainingError
from launcher.training import reference
from launcher.training.reference import TeacherFile
from tests.full_disk import fill, full_disk

ROWS, TOP_K = 3000, 4
ABOUT = {"teacher": "x", "top_k": TOP_K, "rows": ROWS}


@pytest.fixture
def rows():
    made = np.zeros(ROWS, dtype=top_k_dtype(TOP_K))
    made["id"] = np.arange(ROWS * TOP_K).reshape(ROWS, TOP_K)
    return made


def parts(rows, first=0, *, before=lambda number: None):
    for number, start in enumerate(range(first, len(rows), 1000)):
        before(number)
        yield rows[start : start + 1000]


def test_a_pass_goes_on_behind_the_rows_that_are_written(tmp_path, rows, monkeypatch, caplog):
    monkeypatch.setattr(reference, "SAVED_SECONDS", -1.0)
    file = TeacherFile(tmp_path / "teacher_top_k.npy", "x")

    def stop(number):
        if number == 2:
            raise KeyboardInterrupt

    assert file.read(ABOUT) == 0
    with pytest.raises(KeyboardInterrupt):
        file.write(parts(rows, before=stop), ROWS, ABOUT, done=0)
    assert file.read(ABOUT) == 2000
    with file.path.open("ab") as stream:
        stream.write(b"a part that was not saved")
    assert file.read(ABOUT) == 2000
    file.write(parts(rows, 2000), ROWS, ABOUT, done=2000)
    assert file.read(ABOUT) == ROWS
    assert np.array_equal(np.load(file.path), rows)
    assert not caplog.records
    assert file.read(ABOUT | {"teacher": "y"}) == 0
    for damage in (b"", b"[]", b"{", json.dumps(ABOUT).encode()):
        file.path.with_suffix(".json").write_bytes(damage)
        assert file.read(ABOUT) == 0
    assert len(caplog.records) == 5


def test_a_full_disk_is_reported_and_loses_nothing(tmp_path, rows, monkeypatch):
    monkeypatch.setattr(reference, "SAVED_SECONDS", -1.0)
    with full_disk(tmp_path / "disk", mebibytes=1) as disk:
        file, free = TeacherFile(disk / "teacher_top_k.npy", "x"), []

        def fill_disk(number):
            if number == 1:
                free.append(fill(disk))

        with pytest.raises(TrainingError, match=r"teacher_top_k.npy cannot be written: .*space"):
            file.write(parts(rows, before=fill_disk), ROWS, ABOUT, done=0)
        free.pop()()
        assert file.read(ABOUT) == 1000
        file.write(parts(rows, 1000), ROWS, ABOUT, done=1000)
        assert file.read(ABOUT) == ROWS
        assert np.array_equal(np.load(file.path), rows)


@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_a_reference_that_is_not_finite_ends_the_run(monkeypatch, value):
    """Not a number stands for a pair that is not computed, so each start would compute it again."""
    rows = torch.tensor([[0.0, -3.0, value]])
    monkeypatch.setattr(reference, "rows_in_order", lambda *args, **options: iter([rows]))
    ranks = SimpleNamespace(rank=0)
    with pytest.raises(TrainingError, match="log-probabilities of the initial weights are not fin"):
        reference._compute(
            *(None, None, None, np.zeros((1, 2))),
            first=0,
            save=None,
            micro_batch_size=1,
            ranks=ranks,
        )
