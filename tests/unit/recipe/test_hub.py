"""Names of the Hugging Face hub, and their revisions, with a made-up cache."""

import json

import pytest
import torch

from launcher.cli.main import main
from launcher.errors import RecipeError
from launcher.models.build import build_model
from launcher.models.lora import add_adapters
from launcher.recipe.load import load_recipe
from launcher.recipe.schema import Lora, Model
from launcher.sources.adapter import adapter_keys, other_base
from launcher.sources.hub import (
    commit_of,
    is_hub_id,
    is_model_id,
    load_data_set,
    model_folder,
    split_revision,
)
from tests.unit.small_recipe import SMALL

FIRST, SECOND = "a" * 40, "b" * 40


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """Two commits of acme/tiny; `v1` is the first one, and `main` and `refs/pr/1` the second."""
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    repository = tmp_path / "models--acme--tiny"
    for commit, layers in ((FIRST, 1), (SECOND, 2)):
        folder = repository / "snapshots" / commit
        folder.mkdir(parents=True)
        config = {"model_type": "llama", "num_hidden_layers": layers, "vocab_size": 64}
        config |= {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
        (folder / "config.json").write_text(json.dumps(config))
        (folder / "model.safetensors").touch()
    for name, commit in (("main", SECOND), ("v1", FIRST), ("refs/pr/1", SECOND)):
        (repository / "refs" / name).parent.mkdir(parents=True, exist_ok=True)
        (repository / "refs" / name).write_text(commit)


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("owner/name@", "no revision follows @; write owner/name"),
        ("@v1", "it has a revision only; write owner/name@v1"),
        ("a/b@c@d", "it has two @"),
        ("a/b c", "it holds a space; write a/bc"),
        ("a/b/", "it ends with a slash; write a/b"),
        ("https://huggingface.co/datasets/a/b/tree/main", "address of the hub; write a/b"),
        ("./models/smal", "; did you mean models/small?"),
        ("models/smal", "models is a folder here; did you mean models/small?"),
        ("../gone", "../gone (looked for in "),
        ("~/models", "only a shell replaces ~: write /"),
    ],
)
def test_names_that_are_neither_a_folder_nor_a_hub_id(name, problem, tmp_path, monkeypatch, capsys):
    """The message says what is wrong with the name, for models, data, tokenizers and adapters."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models/small").mkdir(parents=True)
    (tmp_path / "x.yaml").write_text(SMALL)
    (tmp_path / "data.txt").write_text("some text")
    assert not is_model_id(name)
    assert not is_hub_id(name)
    config = {"data.train": "data.train[0]", "model.path": "model.path"}
    config |= {"data.tokenizer": "data.tokenizer", "distillation.teacher": "distillation.teacher"}
    for key, cited in config.items():
        words = [f"{key}={name}"] + ["model.config=null"] * (key == "model.path")
        with pytest.raises(RecipeError) as raised:
            load_recipe(["recipe=x.yaml", *words], ranks=1)
        (line,) = (line for line in raised.value.problems if cited in line and "no such" in line)
        assert problem in line
    assert main(["chat", name]) == 2
    assert "no such folder: " in capsys.readouterr().err


def test_a_mistyped_folder_is_not_asked_of_the_hub(tmp_path, monkeypatch, capsys):
    """`./gpt2-mine` without its ./ would be one of the hub's first models."""
    monkeypatch.chdir(tmp_path)
    for name in ("./gpt2-mine", "./owner/name", "../owner/name", "/gone/name"):
        assert main(["chat", name]) == 2
        assert capsys.readouterr().err.startswith(f"command line: no such folder: {name} (looked")
    with pytest.raises(ValueError, match="hf download owner/name --local-dir FOLDER"):
        adapter_keys("owner/name")


@pytest.mark.parametrize(
    ("name", "commit"),
    [
        ("acme/tiny", SECOND),
        ("acme/tiny@main", SECOND),
        ("acme/tiny@v1", FIRST),
        ("acme/tiny@refs/pr/1", SECOND),
        (f"acme/tiny@{FIRST}", FIRST),
    ],
)
def test_a_model_has_a_revision(cache, name, commit):
    assert is_model_id(name)
    folder = model_folder(name, key="model.path")
    assert commit_of(folder) == commit
    layers = json.loads((folder / "config.json").read_text())["num_hidden_layers"]
    assert layers == (1 if commit == FIRST else 2)


def test_a_revision_that_does_not_exist_is_named(cache):
    with pytest.raises(RecipeError, match=r"^model.path: acme/tiny@v9 is not in the hub's cache"):
        model_folder("acme/tiny@v9", key="model.path")


def test_an_adapter_names_the_revision_of_its_model(cache, tmp_path):
    model = build_model(Model(path="acme/tiny@v1"), sequence_length=8)
    add_adapters(model, Lora(rank=4), base_dtype=torch.float32, base="acme/tiny@v1")
    config = model.peft_config["default"]
    assert (config.base_model_name_or_path, config.revision) == ("acme/tiny", "v1")
    config.save_pretrained(tmp_path / "adapter")
    assert other_base(tmp_path / "adapter", "acme/tiny@v1") is None
    assert other_base(tmp_path / "adapter", "acme/other@v1") == "acme/tiny"


def test_names_with_revisions():
    for name in ("gpt2@v1", "acme/tiny@refs/pr/1"):
        assert is_model_id(name), name
    for name in ("acme/data/conf@v2:train[:10]", "acme/data@v2"):
        assert is_hub_id(name), name
    for name in ("acme/tiny@", "acme@v1/tiny", "acme/data/conf@v2:train", "a/b@x@y"):
        assert not is_model_id(name), name
    assert split_revision("acme/tiny@v1") == ("acme/tiny", "v1")


def test_a_folder_of_that_name_is_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "acme/tiny@v1").mkdir(parents=True)
    assert not is_hub_id("acme/tiny@v1")
    assert split_revision("acme/tiny@v1") == ("acme/tiny@v1", None)


def test_a_data_set_has_a_revision(monkeypatch):
    import datasets

    calls = []
    monkeypatch.setattr(
        datasets, "load_dataset", lambda *names, **more: calls.append((names, more))
    )
    load_data_set.__wrapped__("acme/data/conf@v2:train[:10]")
    load_data_set.__wrapped__("acme/data")
    assert calls == [
        (("acme/data", "conf"), {"split": "train[:10]", "revision": "v2"}),
        (("acme/data", None), {"split": "train"}),
    ]
