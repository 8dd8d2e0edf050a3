"""Packed documents give the logits and gradients that they give alone, and what cannot keep them apart is refused."""

import itertools
import types

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, masking_utils

from launcher.errors import RecipeError
from launcher.models import attention as attention_module
from launcher.models.attention import (
    VARLEN,
    check_isolation,
    drop_causal_mask,
    isolate_documents,
    repeat_heads_for_fused_kernels,
)
from tests import varlen_on_cpu

CPU = torch.device("cpu")
BASE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
GPT2 = {
    "vocab_size": 64,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "head_dim": 8,
    "num_key_value_heads": 4,
}
MODELS = {
    "llama": BASE,
    "mistral": BASE | {"sliding_window": 4},
    "gemma3_text": BASE | {"head_dim": 8, "sliding_window": 4},
    "gemma2": BASE | {"head_dim": 8, "sliding_window": 4},
    "gpt2": GPT2 | {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "mixtral": BASE | {"num_local_experts": 4},
    # Multi-head latent attention: q and k have 12 + 8, v has 12
    "minicpm3": BASE | LATENT,
    "deepseek_v3": BASE
    | LATENT
    | {
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 16,
        "n_routed_experts": 8,
        "n_group": 2,
        "topk_group": 1,
    }
    | {"num_experts_per_tok": 2},
}
DOCUMENTS = [[5, 9, 2], [16]]
"""Tokens of each document, row by row; the first row is padded by a document that is padding."""


def config(model_type):
    return AutoConfig.for_model(model_type, **MODELS.get(model_type, BASE))


def isolate(model_type, attention=None, settings=None, *, sequence_length=16, device=CPU):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            settings or config(model_type), dtype=torch.float32, attn_implementation=attention
        )
    dtype = torch.float32 if device == CPU else torch.bfloat16
    isolation = isolate_documents(
        model, sequence_length=sequence_length, device=device, compute_dtype=dtype
    )
    return isolation, model.config._attn_implementation


@pytest.fixture(params=["sdpa", "eager", "kernel of a GPU"])
def attention(request, monkeypatch):
    """kernel of a GPU: the code for CUDA, with a kernel of the same operator for the CPU."""
    if request.param == "kernel of a GPU":
        varlen_on_cpu.register()
        monkeypatch.setattr(attention_module, "has_varlen_kernel", lambda tensor: True)
        return "sdpa"
    return request.param


@pytest.mark.parametrize("model_type", MODELS)
def test_packed_documents_give_the_same_logits_as_alone(model_type, attention):
    if (model_type, attention) == ("gemma2", "sdpa"):
        attention = None  # it has eager attention alone
    isolation, name = isolate(model_type, attention)
    assert (isolation, name) == (("varlen", VARLEN) if attention == "sdpa" else ("mask", "eager"))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        config(model_type), dtype=torch.float32, attn_implementation="eager"
    ).eval()
    ids = torch.randint(64, (2, 16))
    weight = torch.randn(2, 16, 64)
    alone = torch.zeros(2, 16, 64)
    for row, sizes in enumerate(DOCUMENTS):
        for end, size in zip(torch.tensor(sizes).cumsum(0).tolist(), sizes, strict=True):
            alone[row, end - size : end] = model(
                input_ids=ids[row : row + 1, end - size : end], use_cache=False
            ).logits
    (alone * weight).sum().backward()
    expected = {
        key: parameter.grad.clone()
        for key, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    model.zero_grad()
    model.set_attn_implementation(name)
    inputs = {
        "position_ids": torch.stack(
            [torch.cat([torch.arange(size) for size in sizes]) for sizes in DOCUMENTS]
        )
    }
    if isolation == "varlen":
        bounds = torch.tensor([0, 5, 14, 16, 32], dtype=torch.int32)
        inputs |= {
            "cu_seq_lens_q": bounds,
            "cu_seq_lens_k": bounds,
            "max_length_q": 16,
            "max_length_k": 16,
        }
    packed = model(input_ids=ids, use_cache=False, **inputs).logits
    torch.testing.assert_close(packed, alone, rtol=0, atol=1e-5)
    (packed * weight).sum().backward()
    for key, gradient in expected.items():
        torch.testing.assert_close(
            model.get_parameter(key).grad, gradient, rtol=1e-4, atol=1e-4, msg=key
        )


def test_a_whole_row_needs_no_bounds():
    """A micro-batch in which no row is packed is attended densely, a sliding window included."""
    isolate("mistral", "sdpa")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        config("mistral"), dtype=torch.float32, attn_implementation="eager"
    ).eval()
    ids = torch.randint(64, (2, 16))
    expected = model(input_ids=ids, use_cache=False).logits
    model.set_attn_implementation(VARLEN)
    torch.testing.assert_close(
        model(input_ids=ids, use_cache=False).logits, expected, rtol=0, atol=1e-5
    )


@pytest.mark.parametrize("model_type", MODELS)
def test_padded_rows_need_no_mask(model_type, monkeypatch):
    """transformers is not asked for a mask, and where a token has a target nothing changes, padded or not, bit for bit."""
    attention = None if model_type == "gemma2" else "sdpa"  # gemma2 has eager attention alone
    with torch.device("meta"):
        shape = AutoModelForCausalLM.from_config(
            config(model_type), dtype=torch.float32, attn_implementation=attention
        )
    drop_causal_mask(shape)
    name = shape.config._attn_implementation
    assert name == (VARLEN if attention else "eager")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        config(model_type), dtype=torch.float32, attn_implementation=attention
    )
    ids = torch.randint(3, 64, (2, 16))
    ids[1, 9:] = 0  # padding
    weight = torch.randn(2, 16, 64)
    weight[1, 9:] = 0

    def logits_and_gradients(**mask):
        model.zero_grad()
        logits = model(input_ids=ids, use_cache=False, **mask).logits
        (logits * weight).sum().backward()
        return [
            logits[0],
            logits[1, :9],
            *(parameter.grad for parameter in model.parameters() if parameter.grad is not None),
        ]

    expected = logits_and_gradients()
    masked = logits_and_gradients(
        attention_mask=(torch.arange(16) < torch.tensor([[16], [9]])).long()
    )
    model.set_attn_implementation(name)
    if attention:
        monkeypatch.setattr(
            masking_utils, "find_packed_sequence_indices", None
        )  # called, it would raise
    for found, same, near in zip(logits_and_gradients(), expected, masked, strict=True):
        assert torch.equal(found, same)
        torch.testing.assert_close(found, near, rtol=1e-4, atol=1e-4)


def test_float32_on_cuda_never_leaves_grouped_heads_to_torch(monkeypatch):
    """Torch would compute all scores. transformers makes no mask where each row is one document."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config("llama"), dtype=torch.float32)
    ids = torch.randint(3, 64, (2, 16))
    rows = torch.arange(16).expand(2, -1), torch.arange(8).repeat(2).expand(2, -1)

    def logits(row):
        return model(input_ids=ids, position_ids=row, use_cache=False).logits

    expected = [logits(row) for row in rows]
    repeat_heads_for_fused_kernels(model)
    monkeypatch.setattr(attention_module, "has_varlen_kernel", lambda tensor: True)
    attend, calls = torch.nn.functional.scaled_dot_product_attention, []

    def recorded(query, key, value, **options):
        calls.append((query.shape[1] == key.shape[1], options.get("attn_mask") is None))
        return attend(query, key, value, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", recorded)
    for row, same in zip(rows, expected, strict=True):
        torch.testing.assert_close(logits(row), same)
    assert {equal for equal, _ in calls} == {True}
    assert {without_mask for _, without_mask in calls} == {True, False}


def test_models_with_another_mask_keep_it():
    """Alibi, which is part of the mask; layers that see chunks; no attention of transformers' interface; not causal."""
    for model_type, more in (
        ("bloom", {}),
        ("llama4_text", {"attention_chunk_size": 4}),
        ("mamba", {}),
        ("llama", {"is_causal": False}),
    ):
        settings = AutoConfig.for_model(model_type, **BASE | more)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(settings, dtype=torch.float32)
        before = model.config._attn_implementation
        drop_causal_mask(model)
        assert model.config._attn_implementation == before, model_type


@pytest.mark.parametrize(
    ("model_type", "crosses"), [("llama", False), ("bloom", True), ("falcon", True)]
)
def test_models_that_do_not_keep_documents_apart_are_found(model_type, crosses):
    """Alibi counts distance over the whole row: position_ids do not reach it."""
    settings = AutoConfig.for_model(model_type, **BASE)
    if model_type != "llama":
        assert isolate(model_type, settings=settings)[0] == "mask"
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(settings, dtype=torch.float32)
    model.train()
    if crosses:
        with pytest.raises(
            RecipeError, match=r"data\.packing: in .* a packed document sees the one before it"
        ):
            check_isolation(model, name=model_type, vocabulary=64, device=CPU)
    else:
        check_isolation(model, name=model_type, vocabulary=64, device=CPU)
    assert model.training


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rounding_of_the_dtype_is_no_crossing(dtype):
    """Logits that differ by a few roundings, as where kernels add up in another order; a tenth is a document that is seen."""

    def check(change):
        logits = itertools.cycle([torch.ones(1, 16, 4), torch.full((1, 16, 4), 1 - change)])
        model = torch.nn.Module()
        model.forward = lambda **inputs: types.SimpleNamespace(logits=next(logits))
        check_isolation(model, name="Model", vocabulary=64, device=CPU, dtype=dtype)

    check(2 * torch.finfo(dtype).eps)
    with pytest.raises(RecipeError, match=r"its logits change by 8\.0e-02"):
        check(0.08)


def test_layers_that_carry_a_state_are_refused():
    with pytest.raises(
        RecipeError, match=r"data\.packing: MambaForCausalLM has layers .* use packing: false"
    ):
        isolate(
            "mamba",
            settings=AutoConfig.for_model(
                "mamba", vocab_size=64, hidden_size=32, num_hidden_layers=2
            ),
        )


CUDA = torch.device("cuda")


@pytest.mark.parametrize(
    ("model_type", "settings", "expected"),
    [
        ("deepseek_v3", {"num_hidden_layers": 2}, "varlen"),
        ("gemma3_text", {"num_hidden_layers": 7}, "varlen"),
        # Every sixth layer has heads of 512: more than the kernel takes
        ("gemma4_text", {"num_hidden_layers": 6}, "mask"),
        # Its layers make a mask of their own
        ("doge", {"num_hidden_layers": 2}, "mask"),
    ],
)
def test_a_gpu_gets_variable_length_attention_where_its_kernel_can_compute_it(
    model_type, settings, expected
):
    assert (
        isolate(model_type, settings=AutoConfig.for_model(model_type, **settings), device=CUDA)[0]
        == expected
    )


def test_attention_in_chunks_is_refused_where_a_row_has_several():
    settings = AutoConfig.for_model(
        "llama4_text", **BASE, attention_chunk_size=16, num_local_experts=2, head_dim=8
    )
    assert isolate("llama4_text", settings=settings, sequence_length=16)[0] == "varlen"
    with pytest.raises(
        RecipeError,
        match=r"data\.packing: Llama4ForCausalLM attends within chunks of 16 tokens.*at most 16",
    ):
        isolate("llama4_text", settings=settings, sequence_length=17)


def test_float32_repeats_grouped_heads_on_cuda(monkeypatch):
    """CUDA's fused kernel for float32 takes no grouped heads; the values stay the same."""
    query, key, value = torch.randn(1, 8, 5, 4), torch.randn(1, 2, 5, 4), torch.randn(1, 2, 5, 4)
    module = types.SimpleNamespace(num_key_value_groups=4, is_causal=True, training=True)
    seen, plain = [], torch.nn.functional.scaled_dot_product_attention

    def recorded(query, key, value, **arguments):
        seen.append(key.shape[1])
        return plain(query, key, value, **arguments)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", recorded)
    grouped, _ = attention_module.varlen_attention(module, query, key, value, None)
    monkeypatch.setattr(attention_module, "has_varlen_kernel", lambda tensor: True)
    repeated, _ = attention_module.varlen_attention(module, query, key, value, None)
    assert seen == [2, 8]
    assert torch.allclose(grouped, repeated, atol=1e-6)
    with torch.autocast("cpu", torch.bfloat16):
        attention_module.varlen_attention(module, query, key, value, None)
    assert seen[-1] == 2
