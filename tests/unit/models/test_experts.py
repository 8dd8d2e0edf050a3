"""Refusals of expert parallelism. tests/distributed/test_layouts.py trains with it."""

import pytest
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

from launcher.errors import RecipeError
from launcher.models.experts import check_experts, find_experts

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
KEY = "strategy.expert_parallel_size: "


def meta_model(model_type, **config):
    config = AutoConfig.for_model(model_type, **SIZES | config)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def refusal(model, size=2):
    """The message with which `size` ranks are refused to divide the experts of this model."""
    with pytest.raises(RecipeError) as error:
        check_experts(model, size)
    return str(error.value)


def test_models_whose_experts_cannot_be_divided_are_refused_by_name():
    assert refusal(meta_model("llama")) == (
        f"{KEY}transformers has no plan for experts of LlamaForCausalLM; use 1"
    )
    assert refusal(meta_model("mixtral", num_local_experts=6), 4) == (
        f"{KEY}4 does not divide the 6 experts of MixtralForCausalLM; use one of 1, 2, 3, 6"
    )


def test_unknown_entries_of_plans_are_refused():
    model = meta_model("mixtral", num_local_experts=4)
    model._ep_plan["model.layers.*.self_attn.q_proj"] = "colwise"
    assert refusal(model) == (
        f"{KEY}the plan for MixtralForCausalLM has unknown entries (colwise); use 1"
    )


def test_experts_with_parameters_outside_of_the_plan_are_refused():
    model = meta_model("mixtral", num_local_experts=4)
    experts = model.model.layers[1].mlp.experts
    experts.scale = torch.nn.Parameter(torch.ones(4, device="meta"))
    assert "model.layers.1.mlp.experts of MixtralForCausalLM does not compute" in refusal(model)
    del experts.scale
    del experts.has_gate
    assert "model.layers.1.mlp.experts of MixtralForCausalLM does not compute" in refusal(model)


@pytest.mark.parametrize(
    ("model_type", "config"),
    [
        ("qwen3_moe", {"num_experts": 4, "moe_intermediate_size": 16}),
        ("deepseek_v3", {"n_routed_experts": 4, "n_group": 1, "topk_group": 1}),
        ("gpt_oss", {"num_local_experts": 4, "head_dim": 8}),
        ("olmoe", {"num_experts": 4}),
        ("glm4_moe", {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "head_dim": 8}),
        ("granitemoe", {"num_local_experts": 4}),
    ],
)
def test_experts_are_found_by_the_plan(model_type, config):
    model = meta_model(model_type, first_k_dense_replace=1, **config)
    if model_type == "granitemoe" and transformers.__version__ == "5.17.0":
        pytest.skip("transformers 5.17 has no plan for it; expert_parallel_size is refused")
    found = find_experts(model)
    assert found
    assert all(name.endswith(".experts") for name in found)
    for module in found.values():
        assert all(parameter.shape[0] == 4 for parameter in module.parameters())
