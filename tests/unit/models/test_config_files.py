"""config.json and generation_config.json of exports: the source's text, with what changed."""

import copy
import json
import math

import pytest
import torch
import transformers

from launcher.models.build import build_model
from launcher.models.config_files import (
    _old_rotary,
    _with_floats,
    problems_of_older_readers,
    write_config,
    write_generation_config,
)
from launcher.models.new_rows import grow_vocabulary
from launcher.recipe.schema import Model
from tests.multimodal import MODELS
from tests.unit.models.test_load import FIELDS, LATENT

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 16}
LLAMA = {
    "_name_or_path": "/home/someone/llama",
    "architectures": ["LlamaForCausalLM"],
    **FIELDS,
    "eos_token_id": [2, 3],
    "model_type": "llama",
    "num_experts_of_a_fork": 3,
    "rope_scaling": LLAMA3,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.43.0",
}
"""As on the hub: older than transformers 5, with a key that transformers does not know."""
QWEN = {
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "model_type": "qwen3_5",
    "text_config": {
        **FIELDS,
        "dtype": "bfloat16",
        "head_dim": 8,
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
        "model_type": "qwen3_5_text",
        "mtp_num_hidden_layers": 1,
    },
    "vision_config": {"depth": 1, "hidden_size": 32, "model_type": "qwen3_5_vision"},
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


def source_of(tmp_path, config):
    folder = tmp_path / "source"
    folder.mkdir()
    text = json.dumps(config)
    (folder / "config.json").write_text(text)
    return folder


def written(folder, model, dtype=torch.bfloat16):
    """The text of the config that an export of this model has."""
    out = folder.parent / "out"
    out.mkdir(exist_ok=True)
    write_config(model.config, out, source=folder, dtype=dtype)
    assert problems_of_older_readers(out) == []
    return json.loads((out / "config.json").read_text())


@pytest.mark.parametrize(
    ("section", "changes"),
    [
        ({}, {}),
        (
            {"config": {"rope_scaling": YARN, "max_position_embeddings": 256}},
            {"rope_scaling": YARN, "max_position_embeddings": 256},
        ),
        ({"config": {"rope_theta": 7.0}}, {"rope_theta": 7.0}),
        ({"config": {"attention_dropout": 0.1}}, {"attention_dropout": 0.1}),
        (
            {"task": "sequence_classification", "num_labels": 3},
            {
                "architectures": ["LlamaForSequenceClassification"],
                "id2label": {"0": "LABEL_0", "1": "LABEL_1", "2": "LABEL_2"},
                "label2id": {"LABEL_0": 0, "LABEL_1": 1, "LABEL_2": 2},
                "pad_token_id": 2,
            },
        ),
    ],
)
def test_only_what_training_changed_differs_from_the_source(tmp_path, section, changes):
    folder = source_of(tmp_path, LLAMA)
    model = build_model(Model(path=str(folder), **section), sequence_length=16)
    assert written(folder, model) == LLAMA | changes
    if not changes:
        assert (tmp_path / "out/config.json").read_bytes() == (folder / "config.json").read_bytes()
    assert written(folder, model, torch.float32) == LLAMA | changes | {"torch_dtype": "float32"}


def test_new_rows_and_untied_embeddings_are_in_the_config(tmp_path):
    folder = source_of(tmp_path, LLAMA | {"tie_word_embeddings": True})
    model = build_model(Model(path=str(folder)), sequence_length=16)
    grow_vocabulary(model, range(64, 70))
    model.config.tie_word_embeddings = False
    assert written(folder, model) == LLAMA | {"vocab_size": 70}


def test_an_infinity_as_transformers_5_writes_it_is_read(tmp_path):
    """Such exports failed at the end of the training."""
    infinity = {"__float__": "Infinity"}
    found = _with_floats({"a": [0.0, infinity], "b": {"c": infinity}})
    assert found == {"a": [0.0, math.inf], "b": {"c": math.inf}}
    config = transformers.AutoConfig.for_model(
        "nemotron_h", vocab_size=64, hidden_size=32, num_hidden_layers=2
    )
    config.time_step_limit = (0.0, math.inf)
    folder = tmp_path / "source"
    config.save_pretrained(folder)
    assert "__float__" in (folder / "config.json").read_text()
    model = type("Model", (), {"config": transformers.AutoConfig.from_pretrained(folder)})
    text = written(folder, model)
    assert text["time_step_limit"] == [0.0, infinity]


def test_a_model_with_a_tower_keeps_its_config(tmp_path):
    folder = source_of(tmp_path, QWEN)
    model = build_model(Model(path=str(folder)), sequence_length=16)
    assert type(model).__name__ == "Qwen3_5ForConditionalGeneration"
    assert written(folder, model) == QWEN | {"torch_dtype": "bfloat16"}
    grow_vocabulary(model, range(64, 70))
    found = written(folder, model, torch.float32)
    assert found["text_config"] == QWEN["text_config"] | {"vocab_size": 70, "dtype": "float32"}
    assert found["architectures"] == QWEN["architectures"]


def test_a_source_of_transformers_5_gets_the_older_names_beside_its_own(tmp_path):
    """Its reader would take a base of 10,000 silently."""
    rotary = {"rope_parameters": {**LLAMA3, "rope_theta": 500000.0}}
    config = {k: v for k, v in LLAMA.items() if k not in ("rope_scaling", "rope_theta")} | rotary
    folder = source_of(tmp_path, config)
    assert any("rope_theta" in problem for problem in problems_of_older_readers(folder))
    model = build_model(Model(path=str(folder)), sequence_length=16)
    assert written(folder, model) == LLAMA | rotary
    model = build_model(Model(path=str(folder), config={"rope_theta": 7.0}), sequence_length=16)
    rotary["rope_parameters"]["rope_theta"] = 7.0
    assert written(folder, model) == LLAMA | rotary | {"rope_theta": 7.0}


BY_KIND = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 5e3},
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 3e6},
}
NEOX = {"rope_type": "default", "rope_theta": 7e3, "partial_rotary_factor": 0.5}


@pytest.mark.parametrize(
    ("model_type", "fields", "expected"),
    [
        ("llama", {}, {"rope_theta": 1e4}),
        ("llama", {"rope_theta": 5e5, "rope_scaling": LLAMA3}, {"rope_scaling": LLAMA3}),
        ("qwen3", {"rope_parameters": {**YARN, "rope_theta": 1e6}}, {"rope_scaling": YARN}),
        (
            "gemma3_text",
            {"rope_parameters": BY_KIND},
            {"rope_theta": 3e6, "rope_local_base_freq": 5e3}
            | {"rope_scaling": {"rope_type": "linear", "factor": 8.0}},
        ),
        ("modernbert", {}, {"global_rope_theta": 1.6e5, "local_rope_theta": 1e4}),
        ("gpt_neox", {"rope_parameters": NEOX}, {"rotary_emb_base": 7e3, "rotary_pct": 0.5}),
        ("stablelm", {"rope_parameters": NEOX}, {"rope_theta": 7e3, "partial_rotary_factor": 0.5}),
        ("deepseek_v3", LATENT, {"rope_theta": 1e4}),
        ("gpt2", {"n_embd": 32, "n_head": 4, "n_layer": 1}, {}),
    ],
)
def test_a_config_from_scratch_is_written_in_both_forms(tmp_path, model_type, fields, expected):
    fields = copy.deepcopy(FIELDS | fields)  # the config changes them
    config = transformers.AutoConfig.for_model(model_type, **fields)
    found = written(tmp_path / "none", type("Model", (), {"config": config}))
    assert expected.items() <= found.items()
    assert found["dtype"] == found["torch_dtype"] == "bfloat16"
    assert found.keys() & {"rope_parameters"} == {*(["rope_parameters"] if expected else [])}
    again = transformers.AutoConfig.from_pretrained(tmp_path / "out")
    for key in ("rope_parameters", "max_position_embeddings", "vocab_size"):
        assert getattr(again, key, None) == getattr(config, key, None)


@pytest.mark.parametrize("kind", MODELS)
def test_configs_of_images_and_text_are_read_as_they_were(tmp_path, kind):
    config = transformers.AutoConfig.for_model(kind, **MODELS[kind])
    found = written(tmp_path / "none", type("Model", (), {"config": config}))
    assert found.keys() >= {"text_config", "torch_dtype"}
    again = transformers.AutoConfig.from_pretrained(tmp_path / "out")
    assert again.get_text_config().rope_parameters == config.get_text_config().rope_parameters


def test_a_text_that_would_be_read_as_another_config_is_written_anew(tmp_path, caplog):
    """transformers takes an object with the name of a part for that part."""
    folder = source_of(tmp_path, LLAMA)
    model = build_model(Model(path=str(folder)), sequence_length=16)
    model.config.attribute_map = {}
    model.config.hidden_size = 40
    (folder / "config.json").write_text(json.dumps(LLAMA | {"text_config": {"hidden_size": 7}}))
    found = written(folder, model)
    assert "is written anew" in caplog.text
    assert found["hidden_size"] == 40


def test_rotary_settings_without_an_older_form_have_none():
    kinds = {"main": {"rope_type": "default", "rope_theta": 1.0}}
    assert _old_rotary(kinds, "laguna") == _old_rotary(None, "gpt2") == _old_rotary({}, "x") == {}


@pytest.mark.parametrize("ends", [None, [2, 7]])
def test_generation_config_keeps_the_text_of_the_source(tmp_path, ends):
    folder = source_of(tmp_path, LLAMA)
    generation = {"temperature": 0.3, "eos_token_id": 2, "transformers_version": "4.43.0"}
    generation |= {"key_of_a_fork": [1]}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    model = build_model(Model(path=str(folder)), sequence_length=16)
    if ends is not None:
        model.generation_config.eos_token_id = ends
    (tmp_path / "out").mkdir()
    write_generation_config(model, tmp_path / "out", source=folder)
    files = [where / "generation_config.json" for where in (folder, tmp_path / "out")]
    if ends is None:
        assert files[0].read_bytes() == files[1].read_bytes()
    else:
        assert json.loads(files[1].read_text()) == generation | {"eos_token_id": ends}
