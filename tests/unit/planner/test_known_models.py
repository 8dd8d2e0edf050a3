"""The configs of models that can be planned without network."""

import json
import re

import huggingface_hub
import pytest
import yaml

from launcher.cli.main import main
from launcher.models.build import build_model
from launcher.planner.known_models import known_models, with_known_config
from launcher.recipe.load import load_recipe
from launcher.recipe.model_config import config_problems, size_problems
from launcher.recipe.schema import Model
from tests import REPOSITORY

RECIPES = sorted((REPOSITORY / "recipes").glob("*.yaml"))
ENTRIES = {entry["source"] + str(entry["parameters"]): entry for entry in known_models().values()}


@pytest.mark.slow
def test_parameters_are_those_that_were_published():
    """Published counts are rounded. That of Llama 4 Scout includes the vision part (1 %)."""
    assert len(ENTRIES) >= 30
    for entry in ENTRIES.values():
        config = entry["config"]
        assert list(config_problems(config)) == []
        assert list(size_problems(config)) == []
        model = build_model(Model(config=config), sequence_length=4096)
        count = sum(parameter.numel() for parameter in model.parameters())
        assert count / 1e9 == pytest.approx(entry["parameters"], rel=0.012), entry["source"]


def test_shipped_recipes_are_planned_without_network():
    paths = [yaml.safe_load(file.read_text())["model"].get("path") for file in RECIPES]
    hub = {path for path in paths if path and not path.startswith("runs/")}
    assert len(hub) >= 7
    assert hub - known_models().keys() == set()


def test_sources_are_public_pages():
    for name, entry in known_models().items():
        assert re.fullmatch(r"[\w-]+/[\w.-]+", name)
        assert re.match(r"https://(huggingface\.co|github\.com)/[\w-]+/", entry["source"])


def test_an_id_that_is_not_in_the_cache_gets_the_known_config(tmp_path, monkeypatch):
    def recipe(path):
        words = ["recipe=sft", f"model.path={path}", "data.train=x.jsonl"]
        return load_recipe(words, ranks=None, files=False).recipe

    written = recipe("Qwen/Qwen3-8B-Base")
    known, note = with_known_config(written)
    assert known.model.path is None
    assert known.model.config["hidden_size"] == 4096
    assert known.model.compile == written.model.compile
    assert "https://huggingface.co/Qwen/Qwen3-8B/blob/main/config.json" in note
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *_: "config.json")
    assert with_known_config(written) == (written, "")
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "Qwen/Qwen3-8B-Base").mkdir(parents=True)
    (tmp_path / "Qwen/Qwen3-8B-Base/config.json").write_text(json.dumps(known.model.config))
    assert with_known_config(written) == (written, "")
    unknown = recipe("someone/something")
    assert with_known_config(unknown) == (unknown, "")


@pytest.mark.long
def test_a_plan_needs_no_network(monkeypatch, capsys):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    words = ["recipe=sft", "model.path=Qwen/Qwen3-0.6B", "data.train=x.jsonl", "--no-search"]
    assert main(["plan", *words, "gpu=h100", "gpus=1"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "note: Qwen/Qwen3-0.6B is not in the hub's cache; its sizes are those that" in printed
