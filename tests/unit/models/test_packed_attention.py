"""Packed and separate documents have equal logits and gradients.

Models that cannot mask documents are refused.
"""

import inspect
import itertools
import types

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    masking_utils,
)

from launcher.errors import RecipeError
from launcher.models import attention as attention_module
from launcher.models.attention import (
    VARLEN,
    check_isolation,
    drop_causal_mask,
    isolate_documents,
)
from tests import varlen_on_cpu

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
BASE = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
BASE |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
BASE |= {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
GPT2 = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
GPT2 |= {"bos_token_id": 0, "eos_token_id": 1}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8}
LATENT |= {"v_head_dim": 12, "head_dim": 8, "num_key_value_heads": 4}
EXPERTS = {"first_k_dense_replace": 1, "moe_intermediate_size": 16, "n_routed_experts": 8}
EXPERTS |= {"n_group": 2, "topk_group": 1, "num_experts_per_tok": 2}
MODELS = {
    "llama": BASE,
    "mistral": BASE | {"sliding_window": 4},
    "gemma3_text": BASE | {"head_dim": 8, "sliding_window": 4},
    "gemma2": BASE | {"head_dim": 8, "sliding_window": 4},
    "gpt2": GPT2 | {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "mixtral": BASE | {"num_local_experts": 4},
    # Multi-head latent attention: q and k have 12 + 8, v has 12
    "minicpm3": BASE | LATENT,
    "deepseek_v3": BASE | LATENT | EXPERTS,
}
MIXTURE = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 8}
KINDS = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
WITHOUT_POSITIONS = {
    "gpt_oss": BASE | MIXTURE | KINDS,
    "afmoe": BASE | MIXTURE | KINDS | {"moe_intermediate_size": 16, "num_shared_experts": 1},
}
"""Models that make their masks without position_ids."""
WITH_SINKS = {
    "gpt_oss": BASE | MIXTURE | KINDS,
    "granite_swa": BASE | KINDS,
    "granitemoe_swa": BASE | MIXTURE | KINDS,
    "flint": BASE | MIXTURE | KINDS,
    "mimo_v2_flash": BASE | MIXTURE | KINDS,
}
"""Models whose heads have a score that takes part in the softmax, without a value."""
COUNTS_BY_DOCUMENT = "packed_sequence_compatibility_function"
"""What transformers has where its masks count chunks from the start of each document."""
# Tokens of each document in each row; the last document of the first row is padding
DOCUMENTS = [[5, 9, 2], [16]]


def build(model_type, attention=None, device=CPU, **settings):
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **(settings or MODELS[model_type]))
    with torch.device(device):
        options = {"dtype": torch.float32, "attn_implementation": attention}
        return AutoModelForCausalLM.from_config(config, **options)


def isolate(model_type, attention=None, *, sequence_length=16, device=CPU, **settings):
    model = build(model_type, attention, "meta", **settings)
    dtype = torch.float32 if device == CPU else torch.bfloat16
    options = {"sequence_length": sequence_length, "device": device, "compute_dtype": dtype}
    return isolate_documents(model, **options), model.config._attn_implementation


@pytest.fixture(params=["sdpa", "eager", "kernel of a GPU"])
def attention(request, monkeypatch):
    """kernel of a GPU: the code for CUDA, with a CPU kernel for the same operator."""
    if request.param == "kernel of a GPU":
        varlen_on_cpu.register()
        monkeypatch.setattr(attention_module, "has_varlen_kernel", lambda tensor: True)
        return "sdpa"
    return request.param


@pytest.mark.parametrize("model_type", MODELS)
def test_packed_documents_match_separate_documents(model_type, attention):
    if (model_type, attention) == ("gemma2", "sdpa"):
        attention = "eager"  # it supports no other attention
    isolation, name = isolate(model_type, attention)
    assert (isolation, name) == (("varlen", VARLEN) if attention == "sdpa" else ("mask", "eager"))
    model = build(model_type, "eager").eval()
    ids, weight = torch.randint(64, (2, 16)), torch.randn(2, 16, 64)
    rows = []
    for row, sizes in zip(ids, DOCUMENTS, strict=True):
        documents = [
            model(input_ids=part[None], use_cache=False).logits for part in row.split(sizes)
        ]
        rows.append(torch.cat(documents, dim=1))
    separate = torch.cat(rows)
    parameters = [parameter for _, parameter in sorted(model.named_parameters())]
    expected = torch.autograd.grad((separate * weight).sum(), parameters, allow_unused=True)
    model.set_attn_implementation(name)
    positions = [torch.cat([torch.arange(size) for size in sizes]) for sizes in DOCUMENTS]
    inputs = {"position_ids": torch.stack(positions)}
    if isolation == "varlen":
        bounds = torch.tensor([0, 5, 14, 16, 32], dtype=torch.int32)
        inputs |= {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds}
        inputs |= {"max_length_q": 16, "max_length_k": 16}
    packed = model(input_ids=ids, use_cache=False, **inputs).logits
    torch.testing.assert_close(packed, separate, rtol=0, atol=1e-5)
    found = torch.autograd.grad((packed * weight).sum(), parameters, allow_unused=True)
    for one, other in zip(found, expected, strict=True):
        if other is not None:
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("model_type", WITHOUT_POSITIONS)
def test_masks_of_models_that_make_them_without_positions(model_type):
    settings = WITHOUT_POSITIONS[model_type]
    model = build(model_type, "eager", **settings).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    ids = torch.randint(64, (2, 16))
    separate = [
        torch.cat([model(input_ids=part[None], use_cache=False).logits for part in parts], dim=1)
        for parts in (row.split(sizes) for row, sizes in zip(ids, DOCUMENTS, strict=True))
    ]
    positions = [torch.cat([torch.arange(size) for size in sizes]) for sizes in DOCUMENTS]
    inputs = {"input_ids": ids, "position_ids": torch.stack(positions), "use_cache": False}
    leaking = model(**inputs).logits
    assert (leaking - torch.cat(separate)).abs().max() > 1e-2
    options = {"sequence_length": 16, "device": CPU, "compute_dtype": torch.float32}
    assert isolate_documents(model, **options, attention="eager") == "mask"
    packed = model(**inputs).logits
    torch.testing.assert_close(packed, torch.cat(separate), rtol=0, atol=5e-6)
    check_isolation(model, name=model_type, vocabulary=64, device=CPU)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("kernel", [True, False])
@pytest.mark.parametrize("model_type", WITH_SINKS)
def test_attention_with_sinks_matches_eager_attention(model_type, kernel, packed, monkeypatch):
    """Of transformers, on single documents. kernel: the code for CUDA."""
    if kernel:
        varlen_on_cpu.register()
        monkeypatch.setattr(attention_module, "has_varlen_kernel", lambda tensor: True)
        # The kernel of the CPU takes float32
        monkeypatch.setattr(attention_module, "_kernel_fits", lambda *inputs: True)
    model = build(model_type, None, **WITH_SINKS[model_type]).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_sink = "sink" in name
            parameter.add_(torch.randn_like(parameter), alpha=1.0 if is_sink else 0.1)
    ids, weight = torch.randint(64, (2, 16)), torch.randn(2, 16, 64)
    rows, documents = [], DOCUMENTS if packed else [[16], [16]]
    for row, sizes in zip(ids, documents, strict=True):
        parts = [model(input_ids=part[None], use_cache=False).logits for part in row.split(sizes)]
        rows.append(torch.cat(parts, dim=1))
    separate = torch.cat(rows)
    parameters = [parameter for _, parameter in sorted(model.named_parameters())]
    expected = torch.autograd.grad((separate * weight).sum(), parameters, allow_unused=True)
    inputs = {"position_ids": torch.cat([torch.arange(16)[None]] * 2)}
    shape = build(model_type, None, "meta", **WITH_SINKS[model_type])
    if packed:
        options = {"sequence_length": 16, "device": CPU, "compute_dtype": torch.float32}
        assert isolate_documents(shape, **options) == "varlen"
        bounds = torch.tensor([0, 5, 14, 16, 32], dtype=torch.int32)
        inputs = {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds}
        inputs |= {"max_length_q": 16, "max_length_k": 16}
        positions = [torch.cat([torch.arange(size) for size in sizes]) for sizes in DOCUMENTS]
        inputs["position_ids"] = torch.stack(positions)
    else:
        drop_causal_mask(shape)
    assert shape.config._attn_implementation == VARLEN
    model.set_attn_implementation(VARLEN)
    found = model(input_ids=ids, use_cache=False, **inputs).logits
    torch.testing.assert_close(found, separate, rtol=0, atol=2e-5)
    gradients = torch.autograd.grad((found * weight).sum(), parameters, allow_unused=True)
    for one, other in zip(gradients, expected, strict=True):
        if other is not None:
            torch.testing.assert_close(one, other, rtol=1e-4, atol=2e-4)


def test_the_kernel_with_sinks_has_no_dropout_and_no_cached_keys(monkeypatch):
    """Dropout would be left out in silence, and rows of queries and keys would have other bounds."""
    monkeypatch.setattr(attention_module, "has_varlen_kernel", lambda tensor: True)
    monkeypatch.setattr(attention_module, "without_flash", lambda device: False)
    query, longer = (torch.zeros(1, 2, tokens, 8, dtype=torch.bfloat16) for tokens in (4, 6))
    assert attention_module._kernel_fits(query, query, {"dropout": 0.0})
    assert not attention_module._kernel_fits(query, query, {"dropout": 0.1})
    assert not attention_module._kernel_fits(query, longer, {})


def test_chosen_eager_attention_keeps_its_mask():
    model = build("gpt_oss", None, "meta", **WITH_SINKS["gpt_oss"])
    options = {"sequence_length": 16, "device": CPU, "compute_dtype": torch.float32}
    assert isolate_documents(model, **options, attention="eager") == "mask"
    drop_causal_mask(model, "eager")
    assert model.config._attn_implementation == "eager"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_heads_are_repeated_where_no_fused_kernel_takes_groups(monkeypatch, dtype):
    query, key, value = (torch.randn(2, heads, 16, 8, dtype=dtype) for heads in (4, 2, 2))
    calls, plain = [], torch.nn.functional.scaled_dot_product_attention

    def recorded(query, key, *rest, **options):
        calls.append((key.shape[1], options["enable_gqa"]))
        return plain(query, key, *rest, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", recorded)
    expected, _ = attention_module.varlen_attention(None, query, key, value, None)
    monkeypatch.setattr(attention_module, "has_varlen_kernel", lambda tensor: True)
    found, _ = attention_module.varlen_attention(None, query, key, value, None)
    torch.testing.assert_close(found, expected)
    assert calls == [(2, True), (2, True) if dtype == torch.bfloat16 else (4, False)]


def test_torch_2_11_gets_grouped_heads(monkeypatch):
    """Its function has no `enable_gqa`; the operator takes grouped heads without it."""
    varlen_on_cpu.register()
    kernel, heads = attention_module.varlen.varlen_attn, []

    def without_flag(query, key, *rest, scale, window_size):
        heads.append((query.shape[1], key.shape[1]))
        flag = "enable_gqa" in inspect.signature(kernel).parameters
        groups = {"enable_gqa": True} if flag else {}
        return kernel(query, key, *rest, scale=scale, window_size=window_size, **groups)

    monkeypatch.setattr(attention_module, "has_varlen_kernel", lambda tensor: True)
    monkeypatch.setattr(attention_module, "_GROUPED", {})
    monkeypatch.setattr(attention_module.varlen, "varlen_attn", without_flag)
    query, key, value = (torch.randn(1, heads, 16, 8) for heads in (4, 2, 2))
    bounds = torch.tensor([0, 16], dtype=torch.int32)
    options = {"cu_seq_lens_q": bounds, "max_length_q": 16}
    found, _ = attention_module.varlen_attention(None, query, key, value, None, **options)
    expected, _ = attention_module.varlen_attention(None, query, key, value, None)
    torch.testing.assert_close(found, expected)
    assert heads == [(4, 2)]


def test_unpacked_rows_need_no_document_bounds():
    """A micro-batch without packed rows uses dense attention, also with a sliding window."""
    isolate("mistral", "sdpa")
    model, ids = build("mistral", "eager").eval(), torch.randint(64, (2, 16))
    expected = model(input_ids=ids, use_cache=False).logits
    model.set_attn_implementation(VARLEN)
    found = model(input_ids=ids, use_cache=False).logits
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("window", [5, 16, None])
def test_a_window_of_unpacked_rows_needs_no_mask_on_a_gpu(window, monkeypatch):
    """A mask of int64 had 128 GiB for a row of 131,072 tokens."""
    varlen_on_cpu.register()
    monkeypatch.setattr(attention_module, "has_varlen_kernel", lambda tensor: True)
    monkeypatch.setattr(attention_module, "without_flash", lambda device: False)
    torch.manual_seed(0)
    query, key, value = (
        torch.randn(2, heads, 16, 8, dtype=torch.bfloat16, requires_grad=True)
        for heads in (4, 2, 2)
    )
    calls = varlen_on_cpu.CALLS["forward"]
    found, _ = attention_module.varlen_attention(
        None, query, key, value, None, sliding_window=window, is_causal=True
    )
    assert varlen_on_cpu.CALLS["forward"] - calls == (window == 5)
    distance = torch.arange(16)[:, None] - torch.arange(16)
    seen = (distance >= 0) & (distance < (window or 16))
    expected = torch.nn.functional.scaled_dot_product_attention(
        query.float(), key.float(), value.float(), attn_mask=seen, enable_gqa=True
    )
    torch.testing.assert_close(found.float(), expected.transpose(1, 2), rtol=0.02, atol=0.02)


@pytest.mark.parametrize("model_type", MODELS)
def test_padded_rows_need_no_mask(model_type, monkeypatch):
    """Without transformers' mask, logits and gradients of tokens with targets are bit-identical."""
    capped = model_type == "gemma2"  # it supports only eager attention
    attention = "eager" if capped else "sdpa"
    meta_model = build(model_type, attention, "meta")
    drop_causal_mask(meta_model)
    name = meta_model.config._attn_implementation
    assert name == ("eager" if capped else VARLEN)
    model = build(model_type, attention)
    ids, weight = torch.randint(3, 64, (2, 16)), torch.randn(2, 16, 64)
    ids[1, 9:] = 0  # padding
    weight[1, 9:] = 0

    def logits_and_gradients(**mask):
        model.zero_grad()
        logits = model(input_ids=ids, use_cache=False, **mask).logits
        (logits * weight).sum().backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        return [logits[0], logits[1, :9], *gradients]

    expected = logits_and_gradients()
    seen = (torch.arange(16) < torch.tensor([[16], [9]])).long()
    masked = logits_and_gradients(attention_mask=seen)
    model.set_attn_implementation(name)
    if not capped:  # a call would raise
        monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", None)
    for found, same, near in zip(logits_and_gradients(), expected, masked, strict=True):
        assert torch.equal(found, same)
        torch.testing.assert_close(found, near, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("model_type", "settings"),
    [
        ("bloom", {}),  # alibi is part of the mask
        ("llama4_text", {"attention_chunk_size": 4}),
        ("mamba", {}),  # does not use transformers' attention interface
        ("llama", {"is_causal": False}),
    ],
)
def test_models_with_special_masks_are_unchanged(model_type, settings):
    model = build(model_type, device="meta", **BASE | settings)
    before = model.config._attn_implementation
    drop_causal_mask(model)
    assert model.config._attn_implementation == before


@pytest.mark.parametrize("model_type", ["llama", "bloom", "falcon"])
def test_attention_across_documents_is_detected(model_type):
    """ALiBi uses distances in the whole row and ignores position_ids."""
    model = build(model_type, **BASE).train()
    check = {"name": model_type, "vocabulary": 64, "device": CPU}
    if model_type == "llama":
        check_isolation(model, **check)
    else:
        assert isolate(model_type, **BASE)[0] == "mask"
        message = r"data\.packing: in .* a packed document sees the one before it"
        with pytest.raises(RecipeError, match=message):
            check_isolation(model, **check)
    assert model.training


class Stub(PreTrainedModel):  # type: ignore[misc]
    """PreTrainedModel itself would cache, for all classes, that experts can be chosen."""


def model_with(forward):
    model = Stub(PretrainedConfig())
    model.forward = forward
    return model


def test_packing_of_a_model_without_positions_is_refused():
    model = model_with(lambda input_ids, use_cache: None)
    with pytest.raises(RecipeError, match=r"data\.packing: Model takes no position_ids"):
        check_isolation(model, name="Model", vocabulary=64, device=CPU)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rounding_errors_pass_the_document_masking_check(dtype):
    """Logits may differ by rounding errors, because kernels may sum in a different order.

    A difference of 0.08 means that attention crosses documents.
    """

    def check(change):
        logits = itertools.cycle([torch.ones(1, 16, 4), torch.full((1, 16, 4), 1 - change)])
        model = model_with(lambda **inputs: types.SimpleNamespace(logits=next(logits)))
        check_isolation(model, name="Model", vocabulary=64, device=CPU, dtype=dtype)

    check(2 * torch.finfo(dtype).eps)
    with pytest.raises(RecipeError, match=r"its logits change by 8\.0e-02"):
        check(0.08)


@pytest.mark.parametrize(
    ("model_type", "settings", "expected"),
    [
        ("deepseek_v3", {"num_hidden_layers": 2}, "varlen"),
        ("gemma3_text", {"num_hidden_layers": 7}, "varlen"),
        # Every sixth layer has a head size of 512, which the kernel does not support
        ("gemma4_text", {"num_hidden_layers": 6}, "mask"),
        # Its layers create their own mask
        ("doge", {"num_hidden_layers": 2}, "mask"),
    ],
)
def test_varlen_is_used_only_if_the_kernel_supports_it(model_type, settings, expected):
    assert isolate(model_type, device=CUDA, **settings)[0] == expected


def test_layers_that_mix_documents_are_refused(monkeypatch):
    """Layers with a recurrent state, and chunked attention if a row has several chunks."""
    message = r"data\.packing: RwkvForCausalLM has layers .* use data.packing=false"
    with pytest.raises(RecipeError, match=message):
        isolate("rwkv", vocab_size=64, hidden_size=32, num_hidden_layers=2)
    chunked = BASE | {"attention_chunk_size": 16, "num_local_experts": 2, "head_dim": 8}
    assert isolate("llama4_text", **chunked)[0] == "varlen"
    if hasattr(masking_utils, COUNTS_BY_DOCUMENT):
        assert isolate("llama4_text", sequence_length=17, **chunked)[0] == "mask"
        monkeypatch.delattr(masking_utils, COUNTS_BY_DOCUMENT)
    message = r"data\.packing: Llama4ForCausalLM attends within chunks of 16 tokens.*at most 16"
    with pytest.raises(RecipeError, match=message):
        isolate("llama4_text", sequence_length=17, **chunked)


@pytest.mark.skipif(
    not hasattr(masking_utils, COUNTS_BY_DOCUMENT),
    reason="this transformers counts chunks from the start of a row; data.packing is refused",
)
def test_chunks_of_packed_documents_begin_with_each_of_them():
    """Rows of Llama 4 that are longer than a chunk."""
    settings = BASE | {"attention_chunk_size": 8, "num_local_experts": 2, "head_dim": 8}
    model = build("llama4_text", **settings | {"num_hidden_layers": 4}).eval()
    isolated = isolate_documents(model, sequence_length=37, device=CPU, compute_dtype=torch.float32)
    assert isolated == "mask"
    ids = torch.randint(1, 64, (1, 37), generator=torch.Generator().manual_seed(1))
    positions = torch.cat([torch.arange(17), torch.arange(20)])[None]
    with torch.no_grad():
        packed = model(input_ids=ids, position_ids=positions, use_cache=False).logits[:, 17:]
        alone = model(input_ids=ids[:, 17:], use_cache=False).logits
    torch.testing.assert_close(packed, alone, rtol=1e-5, atol=1e-5)
