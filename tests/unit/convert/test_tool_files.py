"""The data files of the tools are checked when they are read, and a tool is one file."""

import shutil

import pytest

from launcher.convert import tool_files
from launcher.convert.convert import convert_files
from launcher.recipe.yaml_text import parse_yaml

HEAD = "tool: mine\nsigns: [width]\nkeys:\n  run:\n"


@pytest.mark.parametrize(
    "file", sorted(tool_files.FOLDER.glob("*.yaml")), ids=lambda file: file.name
)
def test_data_files_are_right(file):
    assert tool_files.read_tool(file).sections


@pytest.mark.parametrize(
    ("rows", "rule"),
    [
        ("    seed: run.sede\n", "key"),
        ("    seed: {values: {1: {run.sede: 1}}}\n", "key-of-a-value"),
        ("    seed: {note: {run.sede: a}}\n", "key-of-a-note"),
        ("    seed: {to: run.seed, as: number}\n", "as"),
        ("    seed: {by: number}\n", "by"),
        ("    a, b: {by: batch, size: 1}\n", "field-of-a-transformation"),
        ("    seed: {too: run.seed}\n", "field-of-a-row"),
        ("    seed: {values: {1: 2}}\n", "value-without-a-key"),
        ("    seed: run.seed\n    seed: run.seed\n", "name-twice"),
        ("    seed: run.seed\n    x, seed: run.seed\n", "name-in-another-row"),
        ("    seed: run.seed\n  data:\n    seed: run.seed\n", "name-in-another-section"),
        ("    a: {entries: {b: data.kin}}\n", "key-of-an-entry"),
        ("    a: run.seed\nlost: {gone: a}\n", "name-of-lost"),
        ("    seed: run.seed\nfield: 1\n", "field-of-the-file"),
    ],
)  # fmt: skip
def test_a_wrong_row_is_named_with_its_line(tmp_path, words, rows, rule):
    file = tmp_path / "mine.yaml"
    file.write_text(HEAD + rows)
    with words.refused(rule):
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
