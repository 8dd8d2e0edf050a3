"""Whether the attention kernel supports the inputs of all causal models of transformers.

The models run on fake tensors with packed data, as on a GPU. test_packed_attention.py tests the
values. The operator's own fake kernel checks nothing, so the fixture `calls` checks its inputs.
"""

import contextlib
import inspect
import logging

import pytest
import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.nn.attention import varlen
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from launcher.errors import RecipeError
from launcher.models import attention
from launcher.models.build import build_model
from launcher.models.initialization import materialize
from launcher.recipe.schema import Model
from tests.varlen_on_cpu import check_heads

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
SETTINGS = {
    "deepseek_v2": {"num_experts_per_tok": 2, "moe_intermediate_size": 64},
    "gemma4_text": {"num_hidden_layers": 6},
}
SUBSET = {"llama", "deepseek_v3", "minicpm3", "llama4_text", "gemma3_text", "mixtral", "gpt_neox"}
SUBSET |= {"gpt_oss"}
MASKED = {"doge", "gemma4_text"}


@pytest.fixture
def calls(monkeypatch):
    """Checks and records calls of variable-length attention, as if the device had a kernel."""
    found, original = [], varlen.varlen_attn

    def strict(query, key, value, *arguments, **options):
        check_heads(query, key, value)
        assert query.dtype == torch.bfloat16
        found.append(query.shape)
        return original(query, key, value, *arguments, **options)

    def strict_with_sinks(*arguments):
        check_heads(*arguments[:3])
        assert arguments[0].dtype == torch.bfloat16
        found.append(arguments[0].shape)
        return with_sinks(*arguments)

    with_sinks = attention.varlen_forward
    strict.__signature__ = inspect.signature(original)  # type: ignore[attr-defined]
    monkeypatch.setattr(varlen, "varlen_attn", strict)
    monkeypatch.setattr(attention, "varlen_forward", strict_with_sinks)
    monkeypatch.setattr(attention, "has_varlen_kernel", lambda tensor: True)
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)
    return found


def build(model_type):
    """A model with two layers, or with its default number if no known name sets the number."""
    for layers in ("num_hidden_layers", "n_layer", "num_layers"):
        config = {"model_type": model_type, layers: 2} | SETTINGS.get(model_type, {})
        with contextlib.suppress(RecipeError):
            return build_model(Model(config=config), sequence_length=64)
    return build_model(Model(config={"model_type": model_type}), sequence_length=64)


def outcome(model_type, calls):
    """How the model masks packed documents. Runs a forward pass if it uses varlen.

    refused: RecipeError. mask: transformers' own mask. varlen: variable-length attention.
    """
    try:
        model = build(model_type)
        options = {"sequence_length": 64, "device": CUDA, "compute_dtype": torch.bfloat16}
        isolation = attention.isolate_documents(model, **options)
    except RecipeError:
        return "refused"
    if isolation == "mask":
        return "mask"
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        materialize(model, parameters=CPU, buffers=CPU)
        bounds = torch.tensor([0, 40, 64, 128], dtype=torch.int32)
        inputs = {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds}
        inputs |= {"max_length_q": 40, "max_length_k": 40, "use_cache": False}
        ids, positions = torch.zeros(2, 64, dtype=torch.long), torch.arange(64).repeat(2, 1)
        try:
            model(input_ids=ids, position_ids=positions, **inputs)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            if "experts" not in "".join(classes_in_traceback(error)):
                raise  # only experts may read a value from the device
    assert calls
    return "varlen"


def classes_in_traceback(error):
    frame = error.__traceback__
    while frame is not None:
        yield type(frame.tb_frame.f_locals.get("self")).__name__.lower()
        frame = frame.tb_next


@pytest.mark.parametrize("model_type", sorted(SUBSET | MASKED))
def test_selected_models(model_type, calls):
    assert outcome(model_type, calls) == ("mask" if model_type in MASKED else "varlen")


@pytest.mark.long
def test_all_causal_models(calls):
    found, failed = {"varlen": [], "mask": [], "refused": []}, []
    for model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        calls.clear()
        try:
            found[outcome(model_type, calls)].append(model_type)
        except Exception as error:
            failed.append(f"{model_type}: {type(error).__name__}: {error}")
    print(found)
    assert not failed, "\n".join(failed)
    assert len(found["varlen"]) >= 70
