"""The files of a teacher's predictions and of a reference: what is written, and what a later start
can use."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from launcher.errors import RecipeError, TrainingError
from launcher.objectives import kept_files, reference
from launcher.objectives.distillation import Distillation
from launcher.objectives.kept_files import ReferenceFile, TeacherFile, top_k_dtype
from launcher.objectives.preference import Preference
from launcher.recipe import schema
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
    monkeypatch.setattr(kept_files, "SAVED_SECONDS", -1.0)
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
    monkeypatch.setattr(kept_files, "SAVED_SECONDS", -1.0)
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


CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_act": "silu",
    "text_config": {"hidden_act": "silu", "dtype": "float32"},
    "transformers_version": "5.23.0",
}


def file_of(folder, config, *, teacher):
    """The file of a run whose model or teacher has this config."""
    save_file({"weight": np.ones(4, dtype=np.float32)}, folder / "model.safetensors")
    (folder / "config.json").write_text("{" if config is None else json.dumps(config))
    path = str(folder)
    recipe = schema.Recipe(
        run=schema.Run(name="x", max_steps=1, seed=1),
        model=schema.Model(path=path),
        data=schema.Data(),
        batch=schema.Batch(global_batch_size=1, micro_batch_size=1),
        strategy=schema.Strategy(kind="ddp"),
    )
    objective = Distillation(schema.Distillation(teacher=path)) if teacher else Preference()
    file = objective.kept_file(folder, recipe)
    return file[""] if teacher else file


def read(file):
    """Whether the file can be used."""
    if isinstance(file, ReferenceFile):
        return bool(file.read())
    return file.read(ABOUT | {"teacher": file.teacher, "config": file.config}) == ROWS


@pytest.fixture(params=["teacher", "reference"])
def written(request, tmp_path, rows):
    """The file of a run, and a function that makes it again with another config."""
    teacher = request.param == "teacher"
    file = file_of(tmp_path, CONFIG, teacher=teacher)
    if teacher:
        about = ABOUT | {"teacher": file.teacher, "config": file.config}
        file.write(parts(rows), ROWS, about, done=0)
    else:
        file.write({"pairs": np.ones((3, 2), dtype=np.float32)})
    return file, lambda config: file_of(tmp_path, config, teacher=teacher)


@pytest.mark.parametrize(
    ("change", "used"),
    [
        ({}, True),
        ({"transformers_version": "6.0", "architectures": ["X"], "_name_or_path": "x"}, True),
        ({"text_config": {"hidden_act": "silu", "dtype": "bfloat16"}}, True),
        ({"hidden_act": "relu"}, False),
        ({"text_config": {"hidden_act": "relu"}}, False),
        ({"logits_scaling": 3.0}, False),
    ],
)
def test_predictions_of_another_config_are_not_used(written, change, used, caplog):
    _, again = written
    assert read(again(CONFIG | change)) == used
    assert [": the " in record.message for record in caplog.records] == [True] * (not used)


def test_a_file_that_does_not_name_the_config_is_used(written, caplog):
    """An older version wrote it."""
    file, again = written
    if isinstance(file, ReferenceFile):
        ReferenceFile(file.path, file.weights).write(file.read())
    else:
        description = file.path.with_suffix(".json")
        about = json.loads(description.read_text())
        del about["config"]
        description.write_text(json.dumps(about))
    assert read(again(CONFIG))
    assert "delete it if config.json has changed since then" in caplog.text


def test_a_config_that_cannot_be_read_is_named(written):
    file, again = written
    with pytest.raises(RecipeError) as error:
        again(None)
    key = "model.path" if isinstance(file, ReferenceFile) else "distillation.teacher"
    assert str(error.value).startswith(f"{key}: {file.path.parent / 'config.json'} cannot be read")


@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_a_reference_that_is_not_finite_ends_the_run(monkeypatch, value):
    """Not a number stands for a pair that is not computed, so each start would compute it again."""
    rows = torch.tensor([[0.0, -3.0, value]])
    monkeypatch.setattr(reference, "rows_in_order", lambda *args, **options: iter([rows]))
    ranks = SimpleNamespace(rank=0)
    with pytest.raises(TrainingError, match="log-probabilities of the initial weights are not fin"):
        reference._compute(
            *(None, None, None, None, np.zeros((1, 2))),
            first=0,
            save=None,
            micro_batch_size=1,
            ranks=ranks,
        )
