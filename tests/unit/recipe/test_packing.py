"""`data.packing: auto`: off where the model cannot keep the documents of a row apart."""

import contextlib
import json

import pytest
import torch
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from launcher.cli.main import run
from launcher.errors import RecipeError
from launcher.libraries.families import unpackable_layers
from launcher.models.attention import isolate_documents
from launcher.models.build import build_model
from launcher.models.recurrent import separate_documents
from launcher.recipe.load import load_recipe
from launcher.recipe.model_config import why_not_packed
from launcher.recipe.schema import Model

RWKV = "model={path: null, config: {model_type: rwkv}}"
BECAUSE = "layers of rwkv carry a state from one document to the next"


def packing(*overrides):
    loaded = load_recipe(["recipe=fsdp", *overrides], ranks=None)
    return loaded.recipe.data.packing, loaded.origins.of(("data", "packing"))


def test_packing_is_on_where_documents_can_be_kept_apart():
    assert packing() == (True, "recipes/fsdp.yaml:78")
    assert packing("data.packing=true") == (True, "command line")
    assert packing("data.packing=false", RWKV) == (False, "command line")
    assert packing("model.config.model_type=bamba")[0]


def test_packing_is_off_where_they_cannot_and_the_reason_is_shown(tmp_path, capsys):
    assert packing(RWKV) == (False, f"false, because {BECAUSE}")
    assert packing(RWKV, "data.packing=auto") == (False, f"false, because {BECAUSE}")
    assert run(["show", "recipe=fsdp", RWKV]) == 0
    assert BECAUSE in capsys.readouterr().out
    assert packing("model.task=masked_lm", "data.kind=text")[0] is False
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "recurrent_gemma"}))
    off, why = packing("model.config=null", f"model.path={tmp_path}")
    assert (off, "recurrent_gemma carry a state" in why) == (False, True)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"model_type": ["rwkv"]}', '{"a": 1}'])
def test_a_config_that_cannot_be_read_is_no_reason(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    assert packing("model.config=null", f"model.path={tmp_path}")[0] is True
    assert packing("model.config=null", "model.path=nobody/nothing")[0] is True


def test_an_explicit_true_is_refused():
    with pytest.raises(RecipeError) as error:
        packing(RWKV, "data.packing=true")
    expected = f"command line: data.packing=true: {BECAUSE}; set it to auto, or to false"
    assert error.value.problems == [expected]


@pytest.mark.parametrize("value", ["never", "1", "null"])
def test_other_values_are_refused(value):
    with pytest.raises(RecipeError, match=r"data\.packing=.*: must be"):
        packing(f"data.packing={value}")


@pytest.mark.slow
def test_types_with_other_kinds_of_layers_are_known():
    """Their configs name kinds that `isolate_documents` refuses."""
    unknown = []
    for model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        others = set()
        with contextlib.suppress(Exception):  # some configs have no defaults
            config = AutoConfig.for_model(model_type).get_text_config(decoder=True)
            others = unpackable_layers(config.layer_types, recurrent=True)
        if others and why_not_packed({"model_type": model_type}) is None:
            unknown.append((model_type, others))
    assert unknown == []


@pytest.mark.parametrize("model_type", ["minimax", "recurrent_gemma", "rwkv", "xlstm"])
def test_layers_that_carry_a_state_are_found_when_the_model_is_built(model_type):
    """Of a type that `why_not_packed` does not know, the start of a run refuses packing."""
    config = {"model_type": model_type, "num_hidden_layers": 2, "vocab_size": 64}
    model = build_model(Model(config=config), sequence_length=16)
    assert not separate_documents(model, torch.device("cpu"))
    options = {"device": torch.device("cpu"), "compute_dtype": torch.float32}
    with pytest.raises(RecipeError, match=r"use data\.packing=false"):
        isolate_documents(model, sequence_length=16, **options)
    assert why_not_packed({"model_type": model_type}) is not None
    assert why_not_packed({"model_type": "llava", "text_config": config}) is not None
