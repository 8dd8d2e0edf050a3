"""What the model's own library says no to, and how weights are drawn."""

import pytest
import torch

from launcher.errors import RecipeError
from launcher.model.build import build_model, find_blocks, flops_per_token, vocabulary_size
from launcher.model.weights import random_weights
from launcher.recipe.schema import Model

LLAMA = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
CPU = torch.device("cpu")


def filled(config, seed=1):
    model = build_model(Model(config=config), sequence_length=16)
    random_weights(model, CPU, CPU, blocks=find_blocks(model), seed=seed)
    return model


def test_models_are_built_on_meta():
    model = build_model(Model(config=LLAMA), sequence_length=16)
    assert all(parameter.is_meta and parameter.dtype == torch.float32 for parameter in model.parameters())
    assert list(find_blocks(model)) == ["model.layers.0", "model.layers.1"]
    assert vocabulary_size(model) == 64


@pytest.mark.parametrize(
    ("change", "length", "message"),
    [
        ({"num_attention_heads": 3}, 16, "model.config: transformers refuses it: .*number of attention heads"),
        ({"hidden_act": "nonsense"}, 16, "model.config: transformers refuses it"),
        ({}, 65, "data.sequence_length: 65 is more than the 64 positions of the model; .*max_position_embeddings=65"),
    ],
)
def test_refused(change, length, message):
    with pytest.raises(RecipeError, match=message):
        build_model(Model(config=LLAMA | change), sequence_length=length)


def test_unknown_attention_is_refused():
    with pytest.raises(RecipeError, match="nonsense"):
        build_model(Model(config=LLAMA, attention="nonsense"), sequence_length=16)


def test_weights_are_drawn_as_the_class_says():
    state = filled(LLAMA | {"initializer_range": 0.5}).state_dict()
    assert state["model.layers.0.self_attn.q_proj.weight"].std().item() == pytest.approx(0.5, rel=0.1)
    assert state["model.embed_tokens.weight"].std().item() == pytest.approx(0.5, rel=0.1)
    assert torch.equal(state["model.norm.weight"], torch.ones(32))


def test_weights_depend_on_seed_and_name_alone():
    first, again, other = filled(LLAMA).state_dict(), filled(LLAMA).state_dict(), filled(LLAMA, seed=2).state_dict()
    deeper = filled(LLAMA | {"num_hidden_layers": 3}).state_dict()
    for name, tensor in first.items():
        assert torch.equal(tensor, again[name])
        assert torch.equal(tensor, deeper[name]), "another block changes nothing for the others"
        assert "norm" in name or not torch.equal(tensor, other[name])
    assert not torch.equal(first["model.layers.0.mlp.up_proj.weight"], first["model.layers.1.mlp.up_proj.weight"])


def test_tied_embeddings_stay_tied_and_rotary_buffers_are_those_of_from_config():
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LLAMA | {"tie_word_embeddings": True}
    model = filled(config)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    fields = {key: value for key, value in config.items() if key != "model_type"}
    expected = dict(LlamaForCausalLM(LlamaConfig(**fields)).named_buffers())
    assert expected
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, expected[name]), name


def test_gpt2_residual_projections_have_their_own_scale():
    """Its class draws them again, in the parent of the layer: drawing layer by layer would miss it."""
    config = {"model_type": "gpt2", "vocab_size": 64, "n_embd": 64, "n_layer": 8, "n_head": 4, "n_positions": 64}
    state = filled(config).state_dict()
    assert state["transformer.h.3.mlp.c_proj.weight"].std().item() == pytest.approx(0.02 / (2 * 8) ** 0.5, rel=0.1)
    assert state["transformer.h.3.mlp.c_fc.weight"].std().item() == pytest.approx(0.02, rel=0.1)


def test_flops():
    model = build_model(Model(config=LLAMA), sequence_length=16)
    parameters = sum(parameter.numel() for parameter in model.parameters()) - 64 * 32
    assert flops_per_token(model, sequence_length=16) == 6 * parameters + 12 * 2 * 32 * 16
