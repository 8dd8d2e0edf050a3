"""Which ranks ask the hub."""

import os
from types import SimpleNamespace

import huggingface_hub
import pytest

from launcher.errors import RecipeError
from launcher.planner.sizes import open_stores, untokenized
from launcher.recipe.data_sets import named_models
from launcher.recipe.load import load_recipe
from launcher.run import fetching
from launcher.run.fetching import fetch_in_turn, refuse_to_tokenize
from launcher.sources.hub import work_offline

ON_HUB = [
    "recipe=fsdp",
    "model.path=me/model@v1",
    "model.config=null",
    "data.train=[me/rows:train]",
]
ON_HUB += ["data.tokenizer=me/tokenizer", "data.validation=[me/rows]"]


@pytest.fixture
def recipe():
    return load_recipe(ON_HUB, ranks=1).recipe


@pytest.fixture
def asked(monkeypatch):
    """What is fetched, and in which turn; the other ranks have no problem."""
    found, turns = [], []

    def gather(problems, group):
        turns.append(len(found))
        return [problems, *group]

    monkeypatch.setattr(fetching, "gather", gather)
    monkeypatch.setattr(fetching, "model_folder", lambda name, **more: found.append(name))
    monkeypatch.setattr(fetching, "load_data_set", lambda name, **more: found.append(name))
    return SimpleNamespace(found=found, turns=turns)


@pytest.mark.parametrize(
    ("rank", "first", "turns"), [(0, True, [4, 4]), (8, True, [0, 4]), (9, False, [0, 0])]
)
def test_rank_0_fetches_then_one_rank_of_each_node(recipe, asked, rank, first, turns):
    fetch_in_turn(recipe, SimpleNamespace(rank=rank, group=[]), first_of_node=first)
    assert asked.turns == turns
    every = ["me/model@v1", "me/tokenizer", "me/rows:train", "me/rows"]
    assert asked.found == every[: turns[-1]]


def test_what_rank_0_cannot_fetch_ends_all_ranks(recipe, asked, monkeypatch):
    ranks = SimpleNamespace(
        rank=9, group=[["model.path: no network"], [], ["model.path: no network"]]
    )
    with pytest.raises(RecipeError) as error:
        fetch_in_turn(recipe, ranks, first_of_node=False)
    assert error.value.problems == ["model.path: no network"]
    assert asked.found == []


def test_streamed_data_and_local_folders_are_not_fetched(recipe, asked, tmp_path):
    own = ["model.path=" + str(tmp_path), "data.tokenizer=bytes", "data.validation=null"]
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    local = load_recipe(
        [*ON_HUB, *own, "data.streaming=true", "run.epochs=null", "run.max_steps=2"], ranks=1
    )
    fetch_in_turn(local.recipe, SimpleNamespace(rank=0, group=[]), first_of_node=True)
    assert asked.found == []
    assert next(named_models(recipe)) == ("model.path", "me/model@v1", True)


@pytest.mark.parametrize(
    ("nodes", "size", "refused"), [(1, 2**40, False), (16, 2**40, True), (16, 2**30, False)]
)
def test_much_data_is_not_tokenized_while_many_nodes_wait(
    recipe, monkeypatch, nodes, size, refused
):
    monkeypatch.setattr(fetching, "from_rank_0", lambda value, group: value)
    ranks = SimpleNamespace(rank=0, size=8 * nodes, group=None)
    arguments = {"nodes": nodes, "untokenized": lambda recipe: size}
    if not refused:
        refuse_to_tokenize(recipe, ranks, **arguments)
        return
    message = r"^data: 1024.0 GiB are not tokenized yet, which one of 16 nodes would do while 128 ranks wait; run `launcher prepare`"
    with pytest.raises(RecipeError, match=message):
        refuse_to_tokenize(recipe, ranks, **arguments)


def test_what_is_not_tokenized_is_counted(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("some words " * 100)
    words = ["recipe=fsdp", "data.train=[text.txt]", "data.tokenizer=bytes", "data.cache=cache"]
    recipe = load_recipe(words, ranks=1).recipe
    assert untokenized(recipe) == 1100
    assert len([*open_stores(recipe, build=True)]) == 1
    assert untokenized(recipe) == 0


def test_the_user_may_let_all_ranks_ask(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    work_offline()
    assert os.environ["HF_HUB_OFFLINE"] == "0"
    assert not huggingface_hub.constants.HF_HUB_OFFLINE
    monkeypatch.delenv("HF_HUB_OFFLINE")
    work_offline()
    assert os.environ.pop("HF_HUB_OFFLINE") == "1"
    assert huggingface_hub.constants.HF_HUB_OFFLINE, "the recipe may have imported the library"
