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
from launcher.models.context_parallel import check_rows, divide_rows, ring_of
from launcher.models.micro_batch import IGNORED
from launcher.models.ring import missing_for_ring
from launcher.models.row_division import RowDivision, RowGroups
from tests.micro_batches import contents
from tests.unit.models.recurrent_families import FAMILIES

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def refusal(model_type, size=2, ring=1, *, attention=VARLEN, options=None, **config):
    """The message with which context parallelism of this size is refused for this model."""
    config = AutoConfig.for_model(model_type, **SIZES | config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    model.config._attn_implementation = attention
    with pytest.raises(RecipeError) as error:
        check_rows(model, RowDivision(size, ring), sequence_length=32, **options or {})
    return str(error.value)


def test_models_without_context_parallelism_are_refused_by_name():
    key = "strategy.context_parallel_size: "
    assert refusal("llama", attention="eager").startswith(
        f"{key}the attention of LlamaForCausalLM cannot be divided: it needs model.attention=sdpa"
    )
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    assert "LlamaForCausalLM scales rotary positions (dynamic)" in refusal(
        "llama", rope_parameters=rope
    )


def test_rings_that_do_not_fit_are_refused_with_those_that_do():
    key = "strategy.context_parallel_ring: "
    assert refusal("llama", 8, 1) == (
        f"{key}1 group of 8 ranks, and 8 does not divide the 4 attention heads of LlamaForCausalLM; "
        "use 2 or 4 or 8, or null"
    )
    refused = refusal("llama", 4, 2, options={"tensor_parallel_size": 4})
    assert (
        "2 groups of 2 ranks, and 2 x 4 (strategy.tensor_parallel_size) does not divide" in refused
    )
    assert refused.endswith("use 4, or null")
    assert refusal("llama", 2, 2, options={"tensor_parallel_size": 3}).endswith(
        "use another strategy.tensor_parallel_size"
    )
    refused = refusal("llama", 4, 2, options={"missing_for_ring": "bfloat16 on GPUs"})
    assert refused == (
        f"{key}attention of LlamaForCausalLM over a ring of 2 needs bfloat16 on GPUs; use it, or one of "
        "1, 2, 4 as strategy.context_parallel_size"
    )


def test_the_ring_follows_from_the_heads():
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **SIZES))
    assert [ring_of(model, size, None) for size in (1, 2, 3, 4, 6, 8)] == [1, 1, 3, 1, 3, 2]
    assert ring_of(model, 8, None, tensor_parallel_size=2) == 4
    assert ring_of(model, 4, 4) == 4
    assert ring_of(torch.nn.Linear(1, 1), 4, None) == 1


def test_what_a_ring_needs_of_a_model():
    def missing(device, dtype, **config):
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(
                AutoConfig.for_model("llama", **SIZES | config)
            )
        return missing_for_ring(model, torch.device(device), dtype)

    assert missing("cpu", torch.float32) is None
    assert missing("cpu", torch.bfloat16) is None
    assert missing("cuda", torch.bfloat16) is None
    assert "bfloat16 or float16" in missing("cuda", torch.float32)
    assert "dropout" in missing("cpu", torch.float32, attention_dropout=0.1)
    assert missing("cuda", torch.bfloat16, head_dim=512) == "heads of at most 256 features"


def hybrid(model_type, **more):
    config = AutoConfig.for_model(model_type, **FAMILIES[model_type] | more)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    model.config._attn_implementation = VARLEN
    return model


@pytest.mark.parametrize(
    ("model_type", "layer"),
    [
        ("olmo_hybrid", "OlmoHybridGatedDeltaNet"),
        ("falcon_h1", "FalconH1Mixer"),
        ("kimi_linear", "KimiLinear"),
        ("bailing_hybrid", "BailingHybrid"),
    ],
)
def test_recurrent_layers_that_are_not_divided_are_refused_by_name(model_type, layer):
    with pytest.raises(RecipeError) as error:
        check_rows(hybrid(model_type), RowDivision(2), sequence_length=32)
    assert f"the recurrent layers of {type(hybrid(model_type)).__name__} ({layer}" in str(
        error.value
    )
    assert str(error.value).endswith("use 1")
    assert "Mamba-2 and short convolutions can" in str(error.value)


@pytest.mark.parametrize("model_type", ["jamba", "mamba", "falcon_mamba"])
def test_mamba_1_is_refused_by_name(model_type):
    model = hybrid(model_type)
    with pytest.raises(
        RecipeError, match=f"strategy.context_parallel_size.*{type(model).__name__}"
    ):
        check_rows(model, RowDivision(2), sequence_length=32)


@pytest.mark.parametrize(
    ("model_type", "size", "message"),
    [
        ("qwen3_5_text", 8, "8 ranks cannot divide the 4 heads (in 2 groups)"),
        ("nemotron_h", 3, "3 ranks cannot divide the 8 heads (in 2 groups)"),
        ("lfm2", 64, "64 ranks cannot divide the 32 channels"),
    ],
)
def test_ranks_that_do_not_divide_recurrent_heads_are_refused(model_type, size, message):
    with pytest.raises(RecipeError) as error:
        check_rows(hybrid(model_type), RowDivision(size, size), sequence_length=512)
    assert message in str(error.value)
    assert "use one of 1, 2, 4" in str(error.value)


@pytest.mark.parametrize(
    ("model_type", "size"),
    [("qwen3_next", 4), ("qwen3_5_text", 4), ("nemotron_h", 8), ("bamba", 8), ("lfm2", 32)],
)
def test_recurrent_layers_are_accepted(model_type, size):
    model = hybrid(model_type)
    check_rows(model, RowDivision(size, size), sequence_length=512)
    with pytest.raises(RecipeError, match="context and tensor parallel ranks at once"):
        check_rows(model, RowDivision(2, 2), sequence_length=512, tensor_parallel_size=2)


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
        check_rows(model, RowDivision(2), sequence_length=32, missing_for_varlen=missing)
    with pytest.raises(RecipeError, match="not plain causal attention"):
        check_rows(model, RowDivision(2), sequence_length=32)


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
    divisions = [RowDivision(2, groups=RowGroups(group, group, None)) for group in groups]
    divide_rows(models[0], divisions[0])
    names = [attention_implementation(model) for model in models]
    assert names == [f"{DIVIDED_ROWS}_7", VARLEN]
    assert ALL_ATTENTION_FUNCTIONS[VARLEN] is varlen_attention
    teacher = copy.deepcopy(models[1])
    divide_rows(teacher, divisions[1])
    of_groups = [
        ALL_ATTENTION_FUNCTIONS[attention_implementation(each)].args
        for each in (models[0], teacher)
    ]
    assert of_groups == [(each.groups, None) for each in divisions]
    cpu = {"device": torch.device("cpu"), "compute_dtype": torch.float32}
    told = {attention_kernels(model, packed=False, **cpu) for model in models}
    assert len(told) == 1


@pytest.mark.parametrize("packed", [True, False])
def test_parts_of_rows_join_to_the_rows(packed):
    """Targets of a part's last token are in the next part; bounds are those of whole rows."""

    def piece(tokens):
        return np.arange(tokens), np.append(np.arange(1, tokens), IGNORED)

    rows = [make_sample([piece(7), piece(5)][: 1 + packed]), make_sample([piece(3)])]
    options = {"length": 16, "packed": packed, "document_masking": "varlen"}
    whole = collate_sequences(rows, **options)
    parts = [
        collate_sequences(rows, **options, division=RowDivision(4, rank=index))
        for index in range(4)
    ]
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
