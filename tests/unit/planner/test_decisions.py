"""The table of keys that may be `auto`, and recipes without any."""

import json
import typing

import pytest
from pydantic import WrapValidator

from launcher.planner.auto import (
    DECISIONS,
    NAMES,
    RATE,
    SAVES,
    SEARCH,
    SIZES,
    is_auto,
    resolve,
    resolve_for_plan,
    settled,
)
from launcher.planner.facts import Facts, profiled
from launcher.planner.machine import known_machine
from launcher.recipe import derived as of_recipe
from launcher.recipe.decode import keys, subsection, value_of
from launcher.recipe.load import load_recipe
from launcher.recipe.schema import Recipe
from launcher.recipe.yaml_text import parse_yaml, to_yaml
from launcher.strategies.compilation import why_eager
from tests import REPOSITORY

GIB = 1024**3
DECIDED = [key for decision in DECISIONS for key in decision.keys]


def accepts_auto(key):
    """Whether the type of a key has `auto`, or the key is `auto` by default."""
    section = Recipe
    for name in key[:-1]:
        section = subsection(section, name)
    field = section.__dataclass_fields__[key[-1]]
    parts = [field.type]
    for part in parts:
        if isinstance(part, WrapValidator):
            parts.append(part.json_schema_input_type)
        parts += typing.get_args(part)
    return "auto" in parts or field.default == "auto"


def test_every_key_that_may_be_auto_has_one_entry():
    twice = {key for key in DECIDED if DECIDED.count(key) > 1}
    assert twice == {*SAVES.keys}, "the machine may shorten what the rows suggest"
    accepting = [".".join(key) for key in keys() if accepts_auto(key)]
    assert sorted(accepting) == sorted([*{*DECIDED}, *NAMES])
    assert all((REPOSITORY / "launcher" / file).is_file() for file in NAMES.values())


def test_decisions_are_in_the_order_of_their_facts():
    order = ["recipe", "rows", "machine", "model"]
    assert [decision.needs for decision in DECISIONS] == sorted(
        (decision.needs for decision in DECISIONS), key=order.index
    )


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = {"model_type": "llama", "vocab_size": 300, "hidden_size": 64, "num_hidden_layers": 2}
    config |= {"intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text(json.dumps(config))
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "a", "completion": "b"}))
    words = ["recipe=sft", "model.path=model", "data.train=rows.jsonl", "data.cache=cache"]

    def load(*overrides):
        return load_recipe([*words, *overrides], ranks=2).recipe

    return load


def test_keys_of_the_plan_are_those_that_are_chosen(here):
    recipe = here(*(f"{key}=auto" for key in SEARCH.keys))
    assert SEARCH.open(recipe) == [*SEARCH.keys]


def test_sizes_are_what_a_recipe_has_as_sizes(here):
    """`with_recorded` keeps them on a resume, as the entries say."""
    recipe = here(*(f"{key}=auto" for key in (*RATE.keys, *SIZES.keys)))
    assert sorted(of_recipe.open_sizes(recipe)) == sorted((*RATE.keys, *SIZES.keys))
    assert RATE.kept_on_resume
    assert SIZES.kept_on_resume
    assert of_recipe._STANDS_BACK.keys() <= {*SIZES.keys}


@pytest.mark.slow
@pytest.mark.parametrize("gpu", ["h100", "cpu"])
@pytest.mark.parametrize(
    "words",
    [
        ["strategy.kind=auto", "batch.micro_batch_size=auto"],
        ["strategy.kind=ddp", "batch.micro_batch_size=1"],
        ["strategy.kind=fsdp", "batch.micro_batch_size=1", "batch.global_batch_size=2"],
        ["strategy.kind=fsdp", "batch.micro_batch_size=1", "batch.global_batch_size=8"],
    ],
    ids=lambda words: " ".join(words),
)
def test_nothing_is_auto_in_a_resolved_recipe(here, words, gpu):
    given = {word.partition("=")[0] for word in words}
    recipe = here(*words, *(f"{key}=auto" for key in DECIDED if key not in given))
    on = known_machine(gpu, nodes=1, gpus_per_node=2, memory=80 * GIB, host_memory=None)
    facts = Facts(
        ranks=2,
        rows="not here",
        machine=on,
        why_eager=why_eager(on.device),
        profiles=profiled(on),
    )
    resolved, chosen = resolve(recipe, facts, DECISIONS)
    last = settled(resolved)
    assert [key for key in DECIDED if is_auto(value_of(last, key))] == []
    again, overrides, notes = resolve_for_plan(last, facts)
    assert (again, overrides, notes) == (last, [], [])
    values = {key: one.value for each in chosen for key, one in each.items()}
    assert all(value_of(last, key) == value for key, value in values.items())
    assert {"model.compile", "optimizer.learning_rate", "run.epochs"} <= values.keys()
    written, _ = parse_yaml(to_yaml(last))
    found = {
        f"{section}.{key}"
        for section, inner in written.items()
        if isinstance(inner, dict)
        for key, value in inner.items()
        if value == "auto"
    }
    assert found <= {*NAMES}
