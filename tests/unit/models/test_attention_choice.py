"""`model.attention: auto`: sdpa where transformers has it for the model, else eager, or the launcher's
own for sinks."""

import re
import types

import pytest
import torch
import transformers
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from launcher.distributed.hardware import GPUS
from launcher.errors import RecipeError
from launcher.libraries import families
from launcher.models.attention import (
    check_isolation,
    isolate_documents,
    planned_gpu,
    without_flash,
)
from launcher.models.build import build_model
from launcher.models.context_parallel import check_rows
from launcher.models.initialization import initialize, materialize
from launcher.models.record import record_of
from launcher.models.row_division import RowDivision
from launcher.recipe import schema
from launcher.recipe.model_config import why_not_packed
from launcher.training.fake_tensors import cuda_attention
from launcher.training.model import prepare_model

CPU = torch.device("cpu")
BASE = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
GATED = BASE | {"intermediate_size": 48, "num_key_value_heads": 2, "head_dim": 8}
GATED |= {"max_position_embeddings": 64, "sliding_window": 4, "eos_token_id": 1, "pad_token_id": 0}
MODELS = {
    "gemma2": GATED | {"attn_logit_softcapping": 0.05, "query_pre_attn_scalar": 8},
    "gpt_oss": GATED | {"num_local_experts": 2, "num_experts_per_tok": 1},
    "bloom": {"vocab_size": 64, "hidden_size": 32, "n_layer": 2, "n_head": 4},
    "mamba": {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4},
    "rwkv": {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2},
    "llama": GATED,
}


def prepare(model_type, *, packing, attention="auto"):
    recipe = schema.Recipe(
        run=schema.Run(name="choice", max_steps=1),
        model=schema.Model(config={"model_type": model_type} | MODELS[model_type], attention=attention),
        data=schema.Data(kind="tokens", sequence_length=16, packing=packing),
        batch=schema.Batch(global_batch_size=1, micro_batch_size=1),
        strategy=schema.Strategy(kind="ddp", mixed_precision=None),
    )  # fmt: skip
    prepared = prepare_model(recipe, device=CPU)
    prepared.weights.init_fn(prepared.model, CPU, CPU)
    for index, parameter in enumerate(prepared.model.parameters()):
        values = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(index))
        parameter.data.add_(0.3 * values)
    return prepared, prepared.model.eval()


def eager(model, **changes):
    """transformers' own model with the same weights."""
    config = transformers.AutoConfig.for_model(**(model.config.to_dict() | changes))
    config._attn_implementation = "eager"
    plain = transformers.AutoModelForCausalLM.from_config(config)
    plain.load_state_dict(model.state_dict())
    return plain.eval()


@torch.no_grad()
@pytest.mark.parametrize(("model_type", "packing"), [
    ("gemma2", True), ("gemma2", False), ("gpt_oss", True), ("gpt_oss", False), ("bloom", False),
    ("mamba", False), ("llama", True),
])  # fmt: skip
def test_logits_are_those_of_eager_attention(model_type, packing):
    """With the soft cap of gemma2 and the sinks of gpt_oss; also if documents share a row."""
    prepared, model = prepare(model_type, packing=packing)
    chosen = "launcher_varlen" if model_type in ("llama", "gpt_oss") else "eager"
    assert model.config._attn_implementation == chosen
    plain, ids = eager(model), torch.arange(16)[None] * 5 % 64
    if not packing:
        assert torch.allclose(model(input_ids=ids).logits, plain(ids).logits, atol=1e-5)
        return
    positions = torch.cat([torch.arange(10), torch.arange(6)])[None]
    inputs = {"position_ids": positions}
    if record_of(prepared.model).document_masking == "varlen":
        bounds = torch.tensor([0, 10, 16], dtype=torch.int32)
        inputs |= {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds}
        inputs |= {"max_length_q": 10, "max_length_k": 10}
    found = model(input_ids=ids, use_cache=False, **inputs).logits
    alone = [plain(part).logits for part in (ids[:, :10], ids[:, 10:])]
    assert torch.allclose(found, torch.cat(alone, dim=1), atol=1e-5)


def test_a_soft_cap_needs_eager_attention(monkeypatch):
    """transformers 5.17 says that Gemma 2 supports sdpa, which leaves its soft cap out."""
    monkeypatch.setattr(transformers.Gemma2PreTrainedModel, "_supports_sdpa", True)
    assert prepare("gemma2", packing=False)[1].config._attn_implementation == "eager"
    with pytest.raises(RecipeError, match=r"^model.attention: sdpa: it has no soft cap of the"):
        prepare("gemma2", packing=False, attention="sdpa")


@pytest.mark.parametrize("gpu", ["T4", "V100 16GB", "H100", None])
def test_a_plan_for_an_old_gpu_has_no_flash_attention(gpu):
    half = schema.MixedPrecision(param_dtype="float16")
    recipe = schema.Recipe(
        run=schema.Run(name="choice", max_steps=1),
        model=schema.Model(config={"model_type": "llama"} | MODELS["llama"]),
        data=schema.Data(kind="tokens", sequence_length=16),
        batch=schema.Batch(global_batch_size=1, micro_batch_size=1),
        strategy=schema.Strategy(kind="fsdp", mixed_precision=half),
    )
    query, flash = torch.empty(1, 2, 8, 8, dtype=torch.float16), gpu in ("H100", None)
    token = planned_gpu.set(gpu)
    try:
        prepared = prepare_model(recipe, device=torch.device("cuda"))
        with (
            FakeTensorMode(allow_non_fake_inputs=True) as mode,
            FlopCounterMode(display=False) as counted,
        ):
            fake = mode.from_tensor(query)
            cuda_attention(fake, fake, fake, is_causal=True)
    finally:
        planned_gpu.reset(token)
    assert record_of(prepared.model).document_masking == ("varlen" if flash else "mask")
    (kernel,) = (str(name) for name in counted.get_flop_counts()["Global"])
    assert ("flash" in kernel) is flash


@torch.no_grad()
def test_the_soft_cap_and_the_sinks_matter_in_this_test():
    _, model = prepare("gemma2", packing=False)
    ids = torch.arange(16)[None]
    without = eager(model, attn_logit_softcapping=None)
    assert (model(input_ids=ids).logits - without(ids).logits).abs().max() > 1e-3
    _, model = prepare("gpt_oss", packing=False)
    without = eager(model)
    for name, parameter in without.named_parameters():
        if name.endswith("sinks"):
            parameter.fill_(-1e9)
    assert (model(input_ids=ids).logits - without(ids).logits).abs().max() > 1e-3


def test_refusals_name_the_override():
    """The masks that transformers makes for bloom do not keep documents apart."""
    prepared, model = prepare("bloom", packing=True)
    with pytest.raises(
        RecipeError, match=r"a packed document sees the one before it, .*use data.packing=false"
    ):
        check_isolation(model, name="Bloom", vocabulary=prepared.description.vocabulary, device=CPU)
    with pytest.raises(RecipeError, match=r"^model.attention: .*; use auto, or eager$"):
        prepare("gemma2", packing=False, attention="sdpa")
    with pytest.raises(RecipeError, match=r"^data.packing: .*; use data.packing=false$"):
        prepare("rwkv", packing=True)


@pytest.mark.parametrize("model_type", sorted(families.ROW_POSITIONS))
def test_models_that_embed_the_positions_of_a_row_are_not_packed(model_type):
    """Their masks keep documents apart, but the second document has the positions after the first."""
    config = {"model_type": model_type, "is_decoder": True, "vocab_size": 64, "d_model": 32}
    config |= {"decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 48}
    config |= {"max_position_embeddings": 64, "pad_token_id": 0, "eos_token_id": 2}
    config |= {"bos_token_id": 1, "forced_eos_token_id": 2, "decoder_start_token_id": 1}
    assert f"positions of {model_type} are" in str(why_not_packed(config))
    model = build_model(schema.Model(config=config), sequence_length=16)
    masking = isolate_documents(model, sequence_length=16, device=CPU, compute_dtype=torch.float32)
    materialize(model, parameters=CPU, buffers=CPU)
    initialize(model, seed=1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    with pytest.raises(
        RecipeError, match=r"its positions do not begin at zero .*data.packing=false"
    ):
        check_isolation(model, name="It", vocabulary=64, device=CPU, document_masking=masking)


@pytest.mark.parametrize("model_type", sorted(families.SHIFTED_POSITIONS))
def test_models_that_shift_their_own_positions_get_none(model_type):
    assert f"positions of {model_type} begin after the id" in str(
        why_not_packed({"model_type": model_type})
    )
    model = types.SimpleNamespace(config=types.SimpleNamespace(model_type=model_type))
    with pytest.raises(RecipeError, match=r"positions begin after the id .*; use 1"):
        check_rows(model, RowDivision(size=2), sequence_length=16, tensor_parallel_size=1)


@pytest.mark.parametrize("model_type", sorted(families.SEE_AHEAD))
def test_types_whose_tokens_see_ahead_are_refused(model_type):
    with pytest.raises(RecipeError, match=f"{model_type} cannot be trained to predict the next"):
        build_model(schema.Model(config={"model_type": model_type}), sequence_length=16)


class Fails(torch.nn.Module):
    """A model whose forward pass returns logits of NaN, or raises."""

    def __init__(self, error=None):
        super().__init__()
        self.error = error

    def forward(self, input_ids, **inputs):
        if self.error is not None:
            raise self.error
        return types.SimpleNamespace(logits=torch.full((*input_ids.shape, 4), torch.nan))


def test_logits_of_a_head_that_begins_with_zeros_are_sound():
    class Zeros(torch.nn.Module):
        def forward(self, input_ids, **inputs):
            return types.SimpleNamespace(logits=torch.zeros(*input_ids.shape, 4))

    check_isolation(Zeros(), name="It", vocabulary=4, device=torch.device("cpu"))


@pytest.mark.parametrize("gpu", [gpu.name for gpu in GPUS])
def test_planned_gpus_without_flash_attention(gpu):
    token = planned_gpu.set(gpu)
    try:
        assert without_flash(CPU) == (gpu.split()[0] in ("T4", "V100"))
    finally:
        planned_gpu.reset(token)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (None, "the logits of It are not finite before the first step"),
        (
            TypeError("where() got NoneType"),
            "model: It fails in a forward pass: TypeError: where()",
        ),
        (TypeError("unexpected argument 'position_ids'"), "data.packing: It takes no position_ids"),
    ],
)
def test_the_check_of_packing_names_what_it_found(error, message):
    """NaN and any TypeError were taken for documents that see each other, or for no positions."""
    with pytest.raises(RecipeError, match=re.escape(message)):
        check_isolation(Fails(error), name="It", vocabulary=4, device=torch.device("cpu"))
