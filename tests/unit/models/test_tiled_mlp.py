"""Tests of MLPs that compute some tokens at a time."""

import pytest
import torch
import transformers
from torch import nn

from launcher.errors import RecipeError
from launcher.models.build import build_model
from launcher.models.description import describe
from launcher.models.lora import add_adapters
from launcher.models.tiled_mlp import TiledMLP, tile_mlps
from launcher.recipe import schema
from launcher.strategies.activation_checkpointing import checkpoint_blocks
from tests.unit.models.recurrent_families import BASE, FAMILIES

KINDS = {
    "llama": BASE,
    "qwen3": BASE | {"head_dim": 8},
    "gemma3_text": BASE | {"head_dim": 8, "sliding_window": 8},
    "phi3": BASE,
    "gpt2": {"vocab_size": 96, "n_embd": 32, "n_layer": 2, "n_head": 4}
    | {f"{name}_pdrop": 0.0 for name in ("attn", "embd", "resid")},
    "gpt_neox": BASE,
    "lfm2": FAMILIES["lfm2"],
    "qwen3_5_text": FAMILIES["qwen3_5_text"],
}


def small(kind):
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **KINDS[kind])
    return transformers.AutoModelForCausalLM.from_config(config).train()


def loss_and_gradients(model, *, autocast=False):
    ids = torch.randint(1, 96, (2, 25), generator=torch.Generator().manual_seed(1))
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    named = model.named_parameters()
    found = {name: p.grad for name, p in named if p.grad is not None}
    return loss.detach(), {
        n.replace("_checkpoint_wrapped_module.", ""): g for n, g in found.items()
    }


def assert_same(found, expected, **limits):
    torch.testing.assert_close(found[0], expected[0], **limits)
    assert found[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        torch.testing.assert_close(found[1][name], gradient, **limits)


@pytest.mark.parametrize("tile", [1, 16, 64])
@pytest.mark.parametrize("kind", KINDS)
def test_the_gradients_are_those_of_the_whole_mlp(kind, tile):
    """50 tokens: tiles of 1, of 16 and a rest of 2, and one of all."""
    expected = loss_and_gradients(small(kind))
    model = small(kind)
    tile_mlps(model, describe(model).blocks, tile)
    assert sum(isinstance(module, TiledMLP) for module in model.modules()) == 2
    assert_same(loss_and_gradients(model), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("mode", ["full", "all_but_attention", "selective"])
def test_with_activation_checkpointing(mode):
    expected = loss_and_gradients(small("llama"))
    model = small("llama")
    blocks = describe(model).blocks
    tile_mlps(model, blocks, 16)
    checkpoint_blocks(model, blocks, schema.ActivationCheckpointing(mode=mode))
    assert_same(loss_and_gradients(model), expected, rtol=1e-5, atol=1e-6)


def test_under_autocast():
    expected = loss_and_gradients(small("llama"), autocast=True)
    model = small("llama")
    tile_mlps(model, describe(model).blocks, 16)
    assert_same(loss_and_gradients(model, autocast=True), expected, rtol=0.02, atol=1e-3)


def test_frozen_weights_with_adapters():
    def adapted():
        model = small("llama")
        add_adapters(
            model,
            schema.Lora(rank=4, target_modules=("up_proj", "down_proj")),
            base_dtype=torch.float32,
            base=None,
            new_ids=range(0),
        )
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                torch.manual_seed(len(name))
                value = torch.randn(parameter.shape) * 0.1
                module, _, own = name.rpartition(".")
                setattr(model.get_submodule(module), own, nn.Parameter(value))
        return model

    expected = loss_and_gradients(adapted())
    model = adapted()
    tile_mlps(model, describe(model).blocks, 16)
    found = loss_and_gradients(model)
    assert len(found[1]) == 8
    assert_same(found, expected, rtol=1e-5, atol=1e-6)


def test_what_is_kept_until_the_backward_pass():
    """The input, and not activations of the intermediate size."""

    def kept(tile):
        model, sizes = small("llama"), []
        if tile:
            tile_mlps(model, describe(model).blocks, tile)
        parameters = {p.data_ptr() for p in model.parameters()}

        def note(tensor):
            if tensor.data_ptr() not in parameters and tensor.shape[-1:] == (48,):
                sizes.append(tensor.numel())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            loss_and_gradients(model)
        return max(sizes, default=0)

    assert kept(None) == 50 * 48
    assert kept(16) == 16 * 48


def test_what_cannot_be_tiled_is_refused():
    for kind, config, message in (
        ("qwen3_moe", FAMILIES["qwen3_next"], "the blocks of Qwen3NextForCausalLM have experts"),
        ("mamba", FAMILIES["mamba"], "have no module named mlp or feed_forward"),
        ("gpt2", KINDS["gpt2"] | {"resid_pdrop": 0.1}, "have dropout"),
        ("starcoder2", BASE | {"residual_dropout": 0.1}, "have dropout"),
        ("bloom", {"hidden_size": 32, "n_layer": 2, "n_head": 4}, "more than one tensor"),
    ):
        kind = "qwen3_next" if kind == "qwen3_moe" else kind
        section = schema.Model(config={"model_type": kind, **config})
        model = build_model(section, sequence_length=32)
        with pytest.raises(RecipeError, match=f"^model.mlp_tile: .*{message}"):
            tile_mlps(model, describe(model).blocks, 16)
