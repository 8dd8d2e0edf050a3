"""The list of changes to a model, and the record of them."""

import ast
import copy
import functools
import re

import pytest
import torch
from torch import nn

from launcher.models.head import Head
from launcher.models.record import ModelRecord, record_of
from launcher.recipe.load import load_recipe
from launcher.training.model import prepare_model
from tests import REPOSITORY


def test_a_copy_of_a_model_has_its_own_record():
    model = nn.Linear(2, 2)
    record_of(model).head = head = object()
    copied = copy.deepcopy(model)
    record_of(copied).head = None
    assert record_of(model).head is head


def test_the_record_is_found_behind_another_forward_method():
    """As a trace replaces it: a forward method is no place to look for a change."""
    model = nn.Linear(2, 2)
    record_of(model).head = head = object()
    model.forward = functools.partial(model.forward)
    assert record_of(model).head is head


def test_no_change_finds_another_through_a_forward_method_or_a_class():
    """A class may be set, but not read."""
    found = [
        str(file)
        for file in (REPOSITORY / "launcher").rglob("*.py")
        if re.search(r"\.__self__|\.__class__(?! = )", file.read_text())
    ]
    assert found == []


CHANGES = {
    "grow_vocabulary",
    "use_float8",
    "starting_weights",
    "add_adapters",
    "quantize_blocks",
    "separate_documents",
    "isolate_documents",
    "drop_causal_mask",
    "Head",
}
DIVISIONS = {"divide_rows", "divide_experts", "divide_layers", "StagedModel"}


@pytest.mark.slow
def test_only_the_list_calls_changes():
    """So that training, export, chat and the plan build a model in the same order. `verify.py`
    loads an export as transformers and peft do."""
    called = {}
    for file in (REPOSITORY / "launcher").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
                continue
            if node.func.id in CHANGES | DIVISIONS:
                called.setdefault(node.func.id, []).append(file.name)
    called["grow_vocabulary"].remove("verify.py")
    called["Head"].remove("reward.py")  # of scores: the model of the objective alone has it
    called["divide_layers"].remove("profile.py")  # for the sizes of a part, and for what it saves
    called["divide_layers"].remove("profile.py")
    expected = {name: ["changes.py"] for name in CHANGES}
    assert called == expected | {name: ["division.py"] for name in DIVISIONS}


def prepared(*overrides):
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 320}
    sizes |= {"model_type": "llama"}
    config = [f"model.config.{key}={value}" for key, value in sizes.items()]
    loaded = load_recipe(["recipe=fsdp", *config, *overrides], ranks=1)
    return prepare_model(loaded.recipe, device=torch.device("cpu")).model


def test_the_record_has_what_a_recipe_asks_for():
    plain = record_of(prepared("model.chunked_loss=false"))
    assert plain == ModelRecord(document_masking=plain.document_masking)
    # FSDP needs torch 2.12 for NF4
    nf4 = ("lora={}", "lora.quantize=nf4", "model.compile=false", "strategy.kind=ddp")
    record = record_of(prepared(*nf4))
    assert (record.adapters, record.nf4, record.float8) == (True, True, False)
    assert isinstance(record.head, Head)
