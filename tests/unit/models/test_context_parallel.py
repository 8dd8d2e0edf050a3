"""Refusals of context parallelism, and the parts of rows. tests/distributed/test_layouts.py
trains with it."""

import copy
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from launcher.data.collation import collate_sequences, make_sample
from launcher.errors import RecipeError
from launcher.libraries.private import attention_implementation
from launcher.models.attention import (
    DIVIDED_ROWS,
    VARLEN,
    attention_kernels,
    drop_causal_mask,
    isolate_documents,
    missing_for_varlen,
    varlen_attention,
)
from launcher.models.context_parallel import check_rows, divide_rows
from launcher.models.micro_batch import IGNORED, RowPart
from tests.micro_batches import contents

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def refusal(model_type, size=2, *, attention=VARLEN, **config):
    """The message with which context parallelism of this size is refused for this model."""
    config = AutoConfig.for_model(model_type, **SIZES | config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    model.config._attn_implementation = attention
    with pytest.raises(RecipeError) as error:
        check_rows(model, size, sequence_length=32)
    return str(error.value)


def test_models_without_context_parallelism_are_refused_by_name():
    key = "strategy.context_parallel_size: "
    assert refusal("llama", 3) == (
        f"{key}3 does not divide the 4 attention heads of LlamaForCausalLM; use one of 1, 2, 4"
    )
    assert refusal("llama", attention="eager").startswith(
        f"{key}the attention of LlamaForCausalLM cannot be divided: it needs model.attention=sdpa"
    )
    assert "layers (linear_attention) that carry information" in refusal("qwen3_next")
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    assert "LlamaForCausalLM scales rotary positions (dynamic)" in refusal(
        "llama", rope_parameters=rope
    )


@pytest.mark.parametrize(
    ("device", "dtype", "named"),
    [("cpu", torch.bfloat16, "float32 on CPUs"), ("cuda", torch.float32, "bfloat16 or float16")],
)
def test_packed_rows_that_need_a_mask_are_refused_with_the_reason(device, dtype, named):
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **SIZES))
    where = torch.device(device)
    isolate_documents(model, sequence_length=32, device=where, compute_dtype=dtype)
    missing = missing_for_varlen(model, where, dtype)
    with pytest.raises(RecipeError, match=f"packed rows need {named}"):
        check_rows(model, 2, sequence_length=32, missing_for_varlen=missing)
    with pytest.raises(RecipeError, match="not plain causal attention"):
        check_rows(model, 2, sequence_length=32)


def test_other_models_keep_their_attention():
    """It took the place of the function that all models of a process share, also in later plans."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    with torch.device("meta"):
        models = [
            AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **SIZES))
            for _ in range(2)
        ]
    for model in models:
        drop_causal_mask(model)
    groups = [SimpleNamespace(size=lambda: 2, group_name=name) for name in ("7", "8")]
    divide_rows(models[0], groups[0])
    names = [attention_implementation(model) for model in models]
    assert names == [f"{DIVIDED_ROWS}_7", VARLEN]
    assert ALL_ATTENTION_FUNCTIONS[VARLEN] is varlen_attention
    teacher = copy.deepcopy(models[1])
    divide_rows(teacher, groups[1])
    of_groups = [
        ALL_ATTENTION_FUNCTIONS[attention_implementation(each)].args
        for each in (models[0], teacher)
    ]
    assert of_groups == [(group,) for group in groups]
    cpu = {"device": torch.device("cpu"), "compute_dtype": torch.float32}
    told = {attention_kernels(model, packed=False, **cpu) for model in models}
    assert len(told) == 1


@pytest.mark.parametrize("packed", [True, False])
def test_parts_of_rows_join_to_the_rows(packed):
    """Targets of a part's last token are in the next part; bounds are those of whole rows."""

    def piece(tokens):
        return np.arange(tokens), np.append(np.arange(1, tokens), IGNORED)

    rows = [make_sample([piece(7), piece(5)][: 1 + packed]), make_sample([piece(3)])]
    options = {"length": 16, "packed": packed, "masking": "varlen"}
    whole = collate_sequences(rows, **options)
    parts = [collate_sequences(rows, **options, part=RowPart(index, 4)) for index in range(4)]
    for name in ("input_ids", "targets"):
        joined = torch.cat([contents(part.micro_batch)[name] for part in parts], dim=1)
        assert joined.shape == (2, 16 if packed else 8)
        expected = contents(whole.micro_batch)[name]
        assert torch.equal(joined[:, : expected.shape[1]], expected)
    positions = torch.cat([part.micro_batch.inputs["position_ids"] for part in parts], dim=1)
    expected = whole.micro_batch.inputs.get("position_ids", torch.arange(8).expand(2, -1))
    assert torch.equal(positions, expected)
    assert sum(part.tokens for part in parts) == whole.tokens
    assert sum(part.loss_tokens for part in parts) == whole.loss_tokens
    if packed:
        bounds = whole.micro_batch.inputs["cu_seq_lens_q"]
        assert all(torch.equal(part.micro_batch.inputs["cu_seq_lens_q"], bounds) for part in parts)
