"""Quantization-aware training: values, gradients, exports, and what is refused."""

import copy
import json
import subprocess
import sys

import pytest
import torch
import transformers
from torch import nn

from launcher.errors import RecipeError
from launcher.models.description import describe
from launcher.models.hugging_face_files import write_weights
from launcher.models.quantization_aware import (
    QatLinear,
    check_names,
    describe_qat,
    header_of,
    rounded,
    use_qat,
)
from launcher.models.safetensors_files import write_tensors
from tests import REPOSITORY

SIZES = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2}
DTYPES = [torch.float32, torch.bfloat16]


def made(kind="llama", *, dtype=torch.float32, **config):
    torch.manual_seed(3)
    config = transformers.AutoConfig.for_model(kind, **SIZES | config)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)


def prepared(model, qat, dtype=torch.float32):
    use_qat(model, describe(model).blocks, qat, dtype=dtype)
    return model


def by_hand(weight, qat):
    """The definition in docs/using.md, group by group."""
    group, high = (32, 7) if qat == "int4" else (weight.shape[1], 127)
    found = torch.empty_like(weight)
    for row in range(len(weight)):
        for first in range(0, weight.shape[1], group):
            part = weight[row, first : first + group]
            scale = max(part.max() / high, -part.min() / (high + 1))
            codes = (part * (1 / scale)).round().clamp(-high - 1, high)
            found[row, first : first + group] = codes * scale
    return found


@pytest.mark.parametrize("qat", ["int8", "int4"])
def test_weights_are_rounded_as_by_hand_and_by_torchao(qat):
    torchao = pytest.importorskip("torchao.quantization")
    weight = torch.randn(6, 96, generator=torch.Generator().manual_seed(0))
    found = rounded(weight, qat)
    torch.testing.assert_close(found, by_hand(weight, qat), rtol=1e-6, atol=1e-7)
    granularity = torchao.PerGroup(32) if qat == "int4" else torchao.PerAxis(0)
    mapping = torchao.MappingType.SYMMETRIC_NO_CLIPPING_ERR
    config = torchao.IntxWeightOnlyConfig(getattr(torch, qat), granularity, mapping)
    for dtype in DTYPES:
        layer = nn.Sequential(nn.Linear(96, 6, bias=False, dtype=dtype))
        layer[0].weight.data.copy_(weight)
        torchao.quantize_(layer, config)
        assert torch.equal(layer[0].weight.dequantize(), rounded(weight.to(dtype), qat))
    counts = [len(row.unique()) for row in found.view(-1, 32 if qat == "int4" else 96)]
    assert max(counts) <= (16 if qat == "int4" else 96)


@pytest.mark.parametrize("qat", ["int8", "int4"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_pass_the_rounding(qat, dtype):
    """As those of a plain layer with the rounded weight; also of weights in float32, as ddp has them."""
    pytest.importorskip("torchao")
    torch.manual_seed(0)
    ours = nn.Sequential(nn.Linear(96, 8))
    use_qat(nn.Module(), {"block": ours}, qat, dtype=dtype)
    plain = nn.Linear(96, 8, dtype=dtype)
    with torch.no_grad():
        plain.weight.copy_(rounded(ours[0].weight.to(dtype), qat))
        plain.bias.copy_(ours[0].bias)
    rows, gradient = torch.randn(3, 7, 96, dtype=dtype), torch.randn(3, 7, 8, dtype=dtype)
    found = []
    for layer in (ours, plain):
        inputs = rows.clone().requires_grad_()
        layer(inputs).backward(gradient)
        found.append([inputs.grad, *(p.grad.to(dtype) for p in layer.parameters())])
    limit = 1e-6 if dtype == torch.float32 else 2e-2
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=limit, atol=limit)
    assert {type(each) for each in ours} == {QatLinear}


def test_saved_tensors_hold_no_rounded_weight():
    """They would take as much memory as the model."""
    pytest.importorskip("torchao")
    layer = nn.Sequential(nn.Linear(96, 8, bias=False))
    use_qat(nn.Module(), {"block": layer}, "int4", dtype=torch.float32)
    saved = []

    def keep(tensor):
        saved.append(tensor.data_ptr())
        return tensor

    rows = torch.randn(4, 96, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        layer(rows)
    assert {*saved} == {rows.data_ptr(), layer[0].weight.data_ptr()}


@pytest.mark.parametrize("qat", ["int8", "int4"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_an_export_has_the_logits_of_training(tmp_path, monkeypatch, qat, dtype, kind):
    """transformers loads it from several files; the logits are the same bits."""
    pytest.importorskip("torchao")
    monkeypatch.setattr("launcher.models.safetensors_files.MAX_FILE_BYTES", 2**14)
    model = prepared(made(kind, dtype=dtype, tie_word_embeddings=True), qat, dtype)
    check_names(model)
    tensors = dict(model.named_parameters())
    write_weights(
        model, tmp_path, lambda name: tensors[name].detach(), dtype=dtype, merged=False, source=None
    )
    assert len([*tmp_path.glob("*.safetensors")]) > 2
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert config["quant_method"] == "torchao"
    assert config["modules_to_not_convert"] == ["lm_head"]
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    weight = loaded.model.layers[1].mlp.down_proj.weight
    assert (type(weight).__name__, weight.dtype) == ("IntxUnpackedToInt8Tensor", dtype)
    ids = torch.arange(20)[None]
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, model.eval()(ids).logits)
    plain = made(kind, dtype=dtype, tie_word_embeddings=True)
    assert not torch.equal(plain(ids).logits, model(ids).logits)
    assert json.loads(header_of(tmp_path)["tensor_names"])


def test_what_is_rounded(tmp_path):
    pytest.importorskip("torchao")
    model = prepared(
        made("qwen3_moe", num_experts=4, moe_intermediate_size=32, head_dim=16), "int8"
    )
    kinds = {name: type(module) for name, module in model.named_modules()}
    assert kinds["model.layers.0.self_attn.q_proj"] is QatLinear
    assert not any(issubclass(kind, QatLinear) for name, kind in kinds.items() if "gate" in name)
    assert kinds["lm_head"] is nn.Linear
    assert describe_qat(model) == (
        "model.qat: 8 linear layers with weights rounded to int8; 1 others are not"
    )
    check_names(model)
    write_tensors(tmp_path, [("a", torch.ones(2), torch.float32)])
    assert header_of(tmp_path) == {}


def test_what_is_refused():
    pytest.importorskip("torchao")
    with pytest.raises(
        RecipeError, match=r"model.qat: int4 needs .* multiples of 32; 2 layers .*use int8"
    ):
        prepared(made(intermediate_size=40), "int4")
    prepared(made(intermediate_size=40), "int8")
    with pytest.raises(RecipeError, match=r"model.qat: the model has no linear layers in blocks"):
        prepared(made("gpt2", n_embd=64, n_head=4), "int8")


@pytest.mark.slow
def test_a_missing_package_is_named():
    code = (
        "import sys; sys.modules['torchao'] = None; sys.modules['torchao.quantization'] = None\n"
        "from torch import nn\nfrom launcher.models.quantization_aware import use_qat\n"
        "import torch\nuse_qat(nn.Module(), {'a': nn.Linear(32, 2)}, 'int4', dtype=torch.float32)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    assert "pip install 'launcher[qat]'" in done.stderr


def test_copies_stay_as_they_are():
    """Of a pipeline's whole model, and on other devices and in other dtypes."""
    pytest.importorskip("torchao")
    model = prepared(made(), "int4", torch.bfloat16)
    copied = copy.deepcopy(model).to(torch.bfloat16)
    layer = copied.model.layers[0].mlp.up_proj
    assert (type(layer), layer.qat, layer.compute_dtype) == (QatLinear, "int4", torch.bfloat16)
