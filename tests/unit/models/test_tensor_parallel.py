"""Refusals of tensor parallelism, and the parts that a plan makes. tests/distributed/
test_layouts.py trains with it."""

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from launcher.errors import RecipeError
from launcher.models.description import describe
from launcher.models.head import Chunking, Transform, linear_cross_entropy
from launcher.models.lora import add_adapters
from launcher.models.nf4_layers import quantize_blocks
from launcher.models.tensor_parallel import PlannedMesh, check_layers, divide_layers
from launcher.recipe.schema import Lora

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
KEY = "strategy.tensor_parallel_size: "


def meta_model(model_type, **config):
    config = AutoConfig.for_model(model_type, **SIZES | config)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def refusal(model, size=2):
    """The message with which `size` ranks are refused to divide this model."""
    with pytest.raises(RecipeError) as error:
        check_layers(model, size)
    return str(error.value)


def test_models_whose_layers_cannot_be_divided_are_refused_by_name():
    assert refusal(meta_model("gpt2")) == (
        f"{KEY}transformers has no plan for the layers of GPT2LMHeadModel; use 1"
    )
    assert refusal(meta_model("llama"), 3) == (
        f"{KEY}3 does not divide the 4 attention heads of LlamaForCausalLM; use one of 1, 2, 4"
    )
    assert refusal(meta_model("doge")).endswith(
        "for DogeForCausalLM does not work: a rank makes attention masks for all heads, and has a "
        "part of the heads; use 1"
    )
    heads = {"num_attention_heads": 12, "num_key_value_heads": 6, "hidden_size": 48}
    assert refusal(meta_model("llama", **heads), 4) == (
        f"{KEY}4 does not divide the 6 key and value heads of LlamaForCausalLM; use one of "
        "1, 2, 3, 6"
    )
    assert refusal(meta_model("llama", intermediate_size=50), 4) == (
        f"{KEY}4 does not divide the 50 features of model.layers.0.mlp.gate_proj of "
        "LlamaForCausalLM; use one of 1, 2"
    )


def test_columns_in_nf4_are_divided_in_blocks():
    model = meta_model("llama", hidden_size=128, intermediate_size=256)
    model.requires_grad_(False)
    quantize_blocks(describe(model).blocks)
    assert refusal(model, 4) == (
        f"{KEY}4 does not divide the 128 features of model.layers.0.self_attn.o_proj, in blocks of "
        "64 for lora.quantize, of LlamaForCausalLM; use one of 1, 2"
    )


def test_entries_of_plans_that_are_not_known_are_refused_not_skipped():
    text = refusal(meta_model("qwen3_moe", num_experts=4, moe_intermediate_size=16))
    assert text.startswith(f"{KEY}the plan for Qwen3MoeForCausalLM has what is not supported: ")
    assert "moe_tp_experts (model.layers.0.mlp.experts)" in text
    assert "packed_colwise (model.layers.0.mlp.experts.gate_up_proj)" in text
    assert text.endswith("use 1, and strategy.expert_parallel_size to divide the experts")
    model = meta_model("llama")
    model._tp_plan["model.layers.*.self_attn.sinks"] = "local_rowwise"
    check_layers(model, 2)  # no layer has that name
    model = meta_model("llama")
    for layer in model.model.layers:
        layer.self_attn.sinks = nn.Parameter(torch.ones(4, device="meta"))
    model._tp_plan["model.layers.*.self_attn.sinks"] = "local_rowwise"
    assert "local_rowwise (model.layers.0.self_attn.sinks)" in refusal(model)


def test_layers_that_are_not_linear_and_adapters_of_the_head_are_refused():
    model = meta_model("llama")
    model.model.layers[1].mlp.up_proj = nn.Bilinear(32, 32, 48, device="meta")
    assert "colwise for Bilinear (model.layers.1.mlp.up_proj)" in refusal(model)
    model = meta_model("llama")
    lora = Lora(target_modules=("lm_head",))
    add_adapters(model, lora, base_dtype=torch.float32)
    assert "adapters of lm_head" in refusal(model)
    model = meta_model("gpt_neox", tie_word_embeddings=True)
    model.lm_head.weight = model.gpt_neox.embed_in.weight
    assert "a head that is tied to an embedding that is not divided" in refusal(model)
    model = meta_model("llama", tie_word_embeddings=True)
    model.lm_head.weight = model.model.embed_tokens.weight
    model._tp_plan.pop("lm_head")  # as Gemma 3 with images in transformers 5.17
    assert "a head that is not divided and tied to an embedding that is" in refusal(model)


def test_each_rank_has_its_part_and_its_key_head():
    model = meta_model("qwen3", num_key_value_heads=1, head_dim=8, tie_word_embeddings=True)
    partial = divide_layers(model, PlannedMesh(4))
    attention = model.model.layers[0].self_attn
    shapes = {name: tuple(p.shape) for name, p in attention.named_parameters()}
    assert shapes == {
        "q_proj.weight": (8, 32),
        "k_proj.weight": (8, 32),
        "v_proj.weight": (8, 32),
        "o_proj.weight": (32, 8),
        "q_norm.weight": (8,),
        "k_norm.weight": (8,),
    }
    assert attention.num_key_value_groups == 1
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.lm_head.weight.shape == (16, 32)
    names = {module: name for name, module in attention.named_modules()}
    own = sorted(f"{names[module]}.{name}" for module, name in partial if module in names)
    assert own == ["k_norm.weight", "k_proj.weight", "q_norm.weight", "v_proj.weight"]


@pytest.mark.parametrize("keep", [False, True], ids=["", "kept logits"])
def test_a_divided_vocabulary_gives_the_same_loss_as_a_whole_one(monkeypatch, keep):
    torch.manual_seed(0)
    hidden, weight = torch.randn(10, 8), torch.randn(19, 8)
    targets = torch.randint(19, (10,))
    targets[3] = -100
    whole = linear_cross_entropy(
        hidden, weight, None, targets, Chunking(Transform(softcap=3.0), 5, reduction="none")
    )
    found = {}

    def gather(parts, mine, group):
        for rank, part in enumerate(parts):
            part.copy_(found["log_sum"][rank] if "log_sum" in found else mine)
        found.setdefault("seen", []).append(mine.clone())

    def add(tensor, group):
        found.setdefault("targets", []).append(tensor.clone())
        if "sum" in found:
            tensor.copy_(found["sum"])

    monkeypatch.setattr("torch.distributed.all_gather", gather)
    monkeypatch.setattr("torch.distributed.all_reduce", add)
    group = PlannedMesh(2)
    parts = ((weight[:10], 0), (weight[10:], 10))
    options = {"reduction": "none", "group": group}

    def losses():
        chunkings = [
            Chunking(Transform(softcap=3.0), 5, first=first, keep_logits=keep, **options)
            for _, first in parts
        ]
        pairs = zip(parts, chunkings, strict=True)
        return [linear_cross_entropy(hidden, part, None, targets, c) for (part, _), c in pairs]

    losses()
    found["log_sum"], found["sum"] = found["seen"], sum(found["targets"])
    for divided in losses():
        torch.testing.assert_close(divided, whole)
