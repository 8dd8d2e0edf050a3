"""The data files of the tools are checked when they are read, and a tool is one file."""

import shutil

import pytest

from launcher.convert import tool_files
from launcher.convert.convert import convert_files
from launcher.errors import RecipeError
from launcher.recipe.yaml_text import parse_yaml

HEAD = "tool: mine\nsigns: [width]\nkeys:\n  run:\n"


@pytest.mark.parametrize(
    "file", sorted(tool_files.FOLDER.glob("*.yaml")), ids=lambda file: file.name
)
def test_data_files_are_right(file):
    assert tool_files.read_tool(file).sections


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        ("    seed: run.sede\n", "mine.yaml:5: keys run seed: run.sede: no key of a recipe"),
        ("    seed: {values: {1: {run.sede: 1}}}\n", "mine.yaml:5: .*: run.sede: no key of a recipe"),
        ("    seed: {note: {run.sede: a}}\n", "mine.yaml:5: .*: run.sede: no key of a recipe"),
        ("    seed: {to: run.seed, as: number}\n", "mine.yaml:5: .*as: number: no transformation"),
        ("    seed: {by: number}\n", "mine.yaml:5: .*by: number: no transformation"),
        ("    a, b: {by: batch, size: 1}\n", "mine.yaml:5: .*size: batch takes default"),
        ("    seed: {too: run.seed}\n", "mine.yaml:5: .*too: no field of a row"),
        ("    seed: {values: {1: 2}}\n", "1: 2: without the field to, which key has this value"),
        ("    seed: run.seed\n    seed: run.seed\n", "mine.yaml:6: .*seed is given twice"),
        ("    seed: run.seed\n    x, seed: run.seed\n", "mine.yaml:6: keys run x, seed: seed has another"),
        ("    seed: run.seed\n  data:\n    seed: run.seed\n", "mine.yaml:7: keys data seed: seed has ano"),
        ("    a: {entries: {b: data.kin}}\n", "mine.yaml:5: keys run a entries b: data.kin: no key"),
        ("    a: run.seed\nlost: {gone: a}\n", "mine.yaml:6: lost gone: a has another row"),
        ("    seed: run.seed\nfield: 1\n", "mine.yaml:6: field: no field of a data file"),
    ],
)  # fmt: skip
def test_a_wrong_row_is_named_with_its_line(tmp_path, rows, problem):
    file = tmp_path / "mine.yaml"
    file.write_text(HEAD + rows)
    with pytest.raises(RecipeError, match=problem):
        tool_files.read_tool(file)


def test_a_tool_is_one_file(tmp_path, monkeypatch):
    folder = tmp_path / "tools"
    shutil.copytree(tool_files.FOLDER, folder)
    (folder / "mine.yaml").write_text(
        "tool: mine\nsigns: [weights_folder, rows_file]\n"
        "keys:\n"
        "  model: {weights_folder: model.path}\n"
        "  data: {rows_file: {by: source}, kind: {to: data.kind, values: {dialog: chat}, else: text}}\n"
        "  batch: {'size, steps': {by: batch, default: 2}, passes: {to: run.epochs, default: 1}}\n"
        "  optimizer:\n    include: transformers\n    learning_rate: {default: 0.5}\n"
        "    noise_*: {lost: '{name} is not available'}\n"
    )
    monkeypatch.setattr(tool_files, "FOLDER", folder)
    tool_files.tools.cache_clear()
    config = tmp_path / "config.yaml"
    config.write_text("weights_folder: a/b\nrows_file: c/d\nkind: dialog\nnoise_a: 1\noptim: sgd\n")
    try:
        result = convert_files([config], ranks=1)
    finally:
        tool_files.tools.cache_clear()
    recipe = parse_yaml(result.text)[0]
    assert result.tool == "mine"
    assert recipe["model"] == {"path": "a/b"}
    assert recipe["data"] == {"kind": "chat", "train": ["c/d"]}
    assert (recipe["optimizer"]["name"], recipe["optimizer"]["learning_rate"]) == ("sgd", 0.5)
    assert result.lost == {"noise_a": "noise_a is not available"}
