"""model.config beside model.path changes the config of the checkpoint, and nothing else."""

import json

import pytest
import torch
import transformers

from launcher.errors import RecipeError
from launcher.models.build import build_model
from launcher.models.config_overrides import config_changes
from launcher.models.initialization import initialize, materialize
from launcher.recipe.schema import Model
from tests.multimodal import MODELS, TEXT

CPU = torch.device("cpu")
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}


def save(folder, kind, **keys):
    """A config.json as transformers 4 wrote it, where keys have the names of that version."""
    folder.mkdir(exist_ok=True)
    config = transformers.AutoConfig.for_model(kind, **keys).to_dict()
    if "rope_theta" in keys:
        config.pop("rope_parameters", None)
    (folder / "config.json").write_text(json.dumps({**config, **keys, "model_type": kind}))
    return str(folder)


def changed(path, **config):
    return build_model(Model(path=path, config=config, init="random"), sequence_length=16).config


@pytest.mark.parametrize("name", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("stored", [{"rope_theta": 5e5}, {"rope_parameters": {"rope_theta": 5e5}}])
def test_rotary_settings_keep_their_base(tmp_path, name, stored):
    """transformers itself would take its default base of 10,000 for a given rope_scaling."""
    path = save(tmp_path, "llama", **TEXT, **stored)
    found = changed(path, **{name: YARN}, max_position_embeddings=64)
    assert found.rope_parameters["rope_theta"] == 5e5
    assert found.rope_parameters["rope_type"] == "yarn"
    # A new type does not keep the settings of the old one
    path = save(tmp_path / "yarn", "llama", **TEXT, rope_parameters={**YARN, "rope_theta": 5e5})
    found = changed(path, rope_scaling={"type": "linear", "factor": 2.0}).rope_parameters
    assert found == {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}
    assert changed(path, rope_theta=1e6).rope_parameters == {**YARN, "rope_theta": 1e6}
    assert changed(path, rope_scaling=None).rope_parameters["rope_type"] == "default"


def test_each_change_is_listed_with_those_that_follow(tmp_path):
    path = save(tmp_path, "qwen2", **{k: v for k, v in TEXT.items() if k != "head_dim"})
    stored = json.loads((tmp_path / "config.json").read_text())
    del stored["layer_types"]  # as in the files of the hub
    (tmp_path / "config.json").write_text(json.dumps(stored))
    config = {"attention_dropout": 0.1, "use_sliding_window": True, "sliding_window": 8}
    lines = config_changes(Model(path=path, config={**config, "max_window_layers": 0}))
    assert "attention_dropout: 0.0 -> 0.1" in lines
    kinds = json.dumps(["full_attention"] * 2), json.dumps(["sliding_attention"] * 2)
    assert f"layer_types: {kinds[0]} -> {kinds[1]}" in lines
    assert config_changes(Model(path=path)) == []
    assert config_changes(Model(path=path, config={"attention_dropout": 0.0})) == []


def test_parts_of_a_model_of_images_and_text_change(tmp_path):
    path = save(tmp_path, "mistral3", **MODELS["mistral3"])
    changes = {"text_config": {"attention_dropout": 0.2, "rope_scaling": YARN}}
    found = changed(path, **changes)
    assert found.text_config.attention_dropout == 0.2
    assert found.text_config.rope_parameters["factor"] == 4.0
    assert found.vision_config.hidden_size == 32
    lines = config_changes(Model(path=path, config=changes))
    assert "text_config.attention_dropout: 0.0 -> 0.2" in lines


def test_a_flat_file_of_images_and_text_changes(tmp_path):
    """That of Qwen2.5-VL on the hub has the keys of the text model beside those of the whole one."""
    path = save(tmp_path, "qwen2_5_vl", **MODELS["qwen2_5_vl"])
    stored = json.loads((tmp_path / "config.json").read_text())
    text = stored.pop("text_config")
    for key in ("model_type", "rope_parameters"):
        text.pop(key, None)
    text |= {"rope_theta": 5e5, "rope_scaling": {"type": "mrope", "mrope_section": [2, 1, 1]}}
    (tmp_path / "config.json").write_text(json.dumps(text | stored))
    config = {"text_config": {"rope_scaling": YARN}}
    found = changed(path, **config).text_config
    assert found.hidden_size == TEXT["hidden_size"]
    assert found.rope_parameters == {**YARN, "rope_theta": 5e5, "mrope_section": [2, 1, 1]}
    lines = config_changes(Model(path=path, config=config))
    assert all(line.startswith("text_config.rope_parameters.") for line in lines), lines


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        (
            "llama",
            {"rope_scalling": {}},
            r"config.rope_scalling: unknown key; did you mean rope_sc",
        ),
        ("gpt2", {"rope_theta": 1e6}, "model.config.rope_theta: unknown key"),
        (
            "llama",
            {"rope_scaling": 4},
            "model.config.rope_scaling: must hold keys such as rope_type",
        ),
        ("mistral3", {"text_config": 4}, "text_config: must hold keys of the text_config; got 4"),
        ("mistral3", {"text_config": {"x": 4}}, "model.config.text_config.x: unknown key"),
        *(
            (
                kind,
                {key: 4},
                rf"config.{key}: unknown key; did you mean model.config.text_config.{key}\?",
            )
            for kind in ("mistral3", "qwen2_5_vl")
            for key in ("rope_scaling", "rope_theta", "attention_dropout")
        ),
        ("mistral3", {"zzz": 4}, "config.zzz: unknown key; Mistral3Config has no such key"),
        ("gemma3_text", {"rope_theta": 1e6}, "rope_theta: give model.config.rope_parameters with"),
        ("llama", {"rope_scaling": {"rope_type": "none"}}, "model.config: transformers refuses it"),
    ],
)
def test_wrong_changes_are_refused(tmp_path, kind, changes, message):
    sizes = {"n_embd": 32, "n_head": 4, "n_layer": 1, "vocab_size": 64} if kind == "gpt2" else TEXT
    path = save(tmp_path, kind, **MODELS.get(kind, sizes))
    with pytest.raises(RecipeError, match=message):
        changed(path, **changes)


def test_a_layer_kind_has_rotary_settings_of_its_own(tmp_path):
    path = save(tmp_path, "gemma3_text", **TEXT)
    kinds = changed(path, rope_parameters={"full_attention": {"rope_theta": 3e6}}).rope_parameters
    assert kinds["full_attention"]["rope_theta"] == 3e6
    assert kinds["sliding_attention"]["rope_theta"] == 1e4


def test_the_model_computes_with_the_change_and_the_export_has_it(tmp_path):
    path = save(tmp_path, "llama", **TEXT)
    section = Model(path=path, config={"rope_scaling": YARN}, init="random")
    model = build_model(section, sequence_length=16)
    model.config.save_pretrained(tmp_path / "out")
    written = transformers.AutoConfig.from_pretrained(tmp_path / "out")
    assert written.rope_parameters["rope_type"] == "yarn"
    expected = transformers.LlamaForCausalLM(written).model.rotary_emb.inv_freq
    materialize(model, parameters=CPU, buffers=CPU)
    initialize(model, seed=0)
    torch.testing.assert_close(model.model.rotary_emb.inv_freq, expected)
