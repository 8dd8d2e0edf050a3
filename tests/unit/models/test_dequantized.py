"""Checkpoints in FP8 and MXFP4 are read as transformers dequantizes them."""

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

from launcher.errors import RecipeError
from launcher.models import dequantized
from launcher.models.build import build_model
from launcher.models.dequantized import Dequantized
from launcher.models.hugging_face_files import export_hugging_face
from launcher.models.load import open_checkpoint, pretrained_weights
from launcher.models.safetensors_files import open_files
from launcher.recipe.schema import Model
from tests.unit.models.test_load import CPU, FIELDS, LATENT, change, save

EXPERTS = ("experts.gate_up_proj", "experts.down_proj")
GPT_OSS = {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8, "sliding_window": 16}
GPT_OSS |= {"hidden_size": 64, "intermediate_size": 32}


def fp8(weight, height, width):
    """A weight in blocks, and their scales."""
    *experts, rows, columns = weight.shape
    grid = -(-rows // height), -(-columns // width)
    padded = weight.new_zeros(*experts, grid[0] * height, grid[1] * width, dtype=torch.float32)
    padded[..., :rows, :columns] = weight.float()
    blocks = padded.unflatten(-1, (grid[1], width)).unflatten(-3, (grid[0], height))
    scales = blocks.abs().amax((-3, -1)).clamp(min=1e-4) / 448
    values = (blocks / scales[..., :, None, :, None]).flatten(-2).flatten(-3, -2)
    return values[..., :rows, :columns].to(torch.float8_e4m3fn).contiguous(), scales


def quantize(folder, settings, tensors):
    """Adds these tensors and settings to a checkpoint."""
    change(folder, tensors)
    file = folder / "config.json"
    config = json.loads(file.read_text()) | {"quantization_config": settings}
    file.write_text(json.dumps(config))
    return folder


def deepseek(folder, block):
    save(folder, model_type="deepseek_v3", dtype=torch.bfloat16, **LATENT)
    made = {}
    for name, weight in load_file(folder / "model.safetensors").items():
        if name.endswith(("proj.weight", "mqa.weight", "_b_proj.weight")):
            made[name], made[name + "_scale_inv"] = fp8(weight, block, block)
    settings = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    return quantize(folder, settings | {"weight_block_size": [block, block]}, made)


def gpt_oss(folder):
    save(folder, model_type="gpt_oss", dtype=torch.bfloat16, **GPT_OSS)
    generator, made = torch.Generator().manual_seed(0), {}
    for name, weight in load_file(folder / "model.safetensors").items():
        if name.endswith(EXPERTS):
            experts, columns, rows = weight.shape
            codes = torch.randint(0, 256, (experts, rows, columns // 32, 16), generator=generator)
            exponents = torch.randint(117, 123, codes.shape[:-1], generator=generator)
            made |= {name: None, f"{name}_blocks": codes.to(torch.uint8)}
            made[f"{name}_scales"] = exponents.to(torch.uint8)
    return quantize(folder, {"quant_method": "mxfp4"}, made)


def loaded(folder):
    model = build_model(Model(path=str(folder)), sequence_length=16)
    found = open_checkpoint(folder, model)
    pretrained_weights(model, CPU, CPU, checkpoint=found, seed=0)
    return model, found


@pytest.mark.filterwarnings("error:An output with one or more:UserWarning")
@pytest.mark.parametrize("kind", ["deepseek_v3", "gpt_oss"])
def test_values_are_those_of_transformers(tmp_path, messages, monkeypatch, kind):
    if kind == "gpt_oss":
        folder, count = gpt_oss(tmp_path / "source"), "4 weights in MXFP4"
        options = transformers.Mxfp4Config(dequantize=True)
    else:
        folder, count = deepseek(tmp_path / "source", 4), "weights in FP8"
        options = transformers.FineGrainedFP8Config(dequantize=True, weight_block_size=(4, 4))
    plain = transformers.AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=options, dtype=torch.bfloat16
    )
    monkeypatch.setattr(dequantized, "_AT_ONCE", 100)  # several parts of each weight
    model, found = loaded(folder)
    expected = plain.state_dict()
    own = model.state_dict()
    assert own.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(own[name], tensor.float()), name
    assert found.stored.dtype() == torch.bfloat16
    (note,) = [message for message in messages() if "dequantized" in message]
    assert count in note


def test_exports_are_in_bfloat16(tmp_path):
    folder = gpt_oss(tmp_path / "source")
    model, found = loaded(folder)
    options = {"rank": 0, "device": CPU, "dtype": found.stored.dtype(), "source": found}
    export_hugging_face(model, tmp_path / "out", **options)
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert "quantization_config" not in config
    assert config["torch_dtype"] == "bfloat16"
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert plain.dtype == torch.bfloat16
    for name, tensor in plain.state_dict().items():
        assert torch.equal(tensor.float(), model.state_dict()[name]), name


@pytest.mark.parametrize("block", [(8, 8), (16, 3), (128, 128), None])
@pytest.mark.parametrize("shape", [(20, 12), (33, 7), (3, 20, 12)])
def test_blocks_need_not_divide_a_weight(tmp_path, monkeypatch, block, shape):
    """transformers takes the size of blocks from the number of scales, and is wrong then."""
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    if block is None:
        values, scales = (weight * 100).to(torch.float8_e4m3fn), torch.tensor([0.01])
        expected = (values.float() * 0.01).bfloat16()
    else:
        values, scales = fp8(weight, *block)
        each = [
            scales[..., r // block[0], c // block[1]]
            for r in range(shape[-2])
            for c in range(shape[-1])
        ]
        expected = (values.float() * torch.stack(each, -1).view(shape)).bfloat16()
    save_file({"w": values, "w_scale_inv": scales}, tmp_path / "w.safetensors")
    stored = open_files([tmp_path / "w.safetensors"])
    settings = {"quant_method": "fp8", "weight_block_size": block and list(block)}
    monkeypatch.setattr(dequantized, "_AT_ONCE", 3 * shape[-1])
    made = Dequantized(stored, settings, key="model.path")
    assert torch.equal(made.read("w"), expected)
    assert (made.read("w").float() - weight).abs().max() < 0.2
    for rows in (slice(0, 2), slice(1, 3), slice(2, 3)):
        assert torch.equal(made._slice("w", tmp_path / "w.safetensors")[rows], expected[rows])
        some = made._slice("w", tmp_path / "w.safetensors")[rows, 1:5]  # of tensor parallelism
        assert torch.equal(some, expected[rows, 1:5])
    assert made.digest() == stored.digest()
    target = nn.Parameter(torch.empty(shape), requires_grad=False)
    made.copy_rows("w", target)
    assert torch.equal(target, expected.float())


@pytest.mark.parametrize("exponents", [torch.uint8, torch.float8_e8m0fnu])
def test_scales_that_are_exponents(tmp_path, exponents):
    values = torch.randn(4, 4).to(torch.float8_e4m3fn)
    scales = torch.tensor([[126, 127], [128, 120]], dtype=torch.uint8)
    tensors = {"w": values, "w_scale_inv": scales.view(exponents)}
    save_file(tensors, tmp_path / "w.safetensors")
    settings = {"quant_method": "fp8", "weight_block_size": [2, 2]}
    made = Dequantized(open_files([tmp_path / "w.safetensors"]), settings, key="model.path")
    factors = torch.tensor([[0.5, 1], [2, 2**-7]]).repeat_interleave(2, 0).repeat_interleave(2, 1)
    assert torch.equal(made.read("w"), (values.float() * factors).bfloat16())


BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128]}
HALF = torch.zeros(4, 4, dtype=torch.float8_e4m3fn)
BARE = {"q.weight": HALF.clone(), "q.weight_scale_inv": torch.ones(1, 1)}
REFUSED = {
    "config.json: quantization_config must be an object with quant_method and others; got 'fp8'": (
        "fp8",
        BARE,
    ),
    "q.weight belongs to weights that are quantized (FP8), and config.json has no "
    "quantization_config": (None, BARE),
    "q.qweight belongs to weights that are quantized (AWQ or GPTQ), and": (
        {},
        {"q.qweight": torch.zeros(4, 4, dtype=torch.int32)},
    ),
    "e_blocks belongs to weights that are quantized (MXFP4), and config.json has no": (
        None,
        {"e_blocks": torch.zeros(2, 4, 1, 16, dtype=torch.uint8)},
    ),
    "the scales of q.weight are q.scale, and FP8 with weight_scale_inv (quant_method: fp8)": (
        BLOCKS,
        {"q.weight": HALF.clone(), "q.scale": torch.ones(1, 1)},
    ),
    "the scales of q.weight are q.qscale_weight, and FP8": (
        BLOCKS,
        {"q.weight": HALF.clone(), "q.qscale_weight": torch.ones(1)},
    ),
    "as compressed-tensors (pack-quantized); FP8 with weight_scale_inv": (
        {"quant_method": "compressed-tensors", "format": "pack-quantized"},
        {},
    ),
    "as bitsandbytes; FP8": ({"quant_method": "bitsandbytes"}, {}),
    "fp8: no weight has scales": (BLOCKS, {}),
    "lm_head.weight has the dtype float8_e4m3fn and no scales": (
        BLOCKS,
        {"lm_head.weight": HALF, "q.weight": HALF.clone(), "q.weight_scale_inv": torch.ones(1, 1)},
    ),
    "q.weight_scale_inv is [2, 2], and for blocks of [128, 128] (weight_block_size) q.weight of "
    "[4, 4] needs [1, 1]": (BLOCKS, {"q.weight": HALF, "q.weight_scale_inv": torch.ones(2, 2)}),
    "q.weight_scale_inv has no weight": (BLOCKS, {"q.weight_scale_inv": torch.ones(2, 2)}),
    "e_blocks is [2, 4, 1, 16], and needs e_scales of [2, 4, 1], which is missing": (
        {"quant_method": "mxfp4"},
        {"e_blocks": torch.zeros(2, 4, 1, 16, dtype=torch.uint8)},
    ),
    "weight_block_size must be two positive integers; got [0, 32]": (
        {"quant_method": "fp8", "weight_block_size": [0, 32]},
        {"q.weight": HALF.clone(), "q.weight_scale_inv": torch.ones(2, 2)},
    ),
    "q.weight_scale_inv is [2, 2], and quantization_config has no weight_block_size": (
        {"quant_method": "fp8"},
        {"q.weight": HALF.clone(), "q.weight_scale_inv": torch.ones(2, 2)},
    ),
}


@pytest.mark.parametrize("message", REFUSED)
def test_other_formats_are_refused(tmp_path, message):
    settings, tensors = REFUSED[message]
    save(tmp_path, model_type="llama", **{k: v for k, v in FIELDS.items() if k != "model_type"})
    quantize(tmp_path, settings, tensors)
    with pytest.raises(RecipeError) as caught:
        open_checkpoint(tmp_path, build_model(Model(path=str(tmp_path)), sequence_length=16))
    assert message in str(caught.value)
    if not isinstance(settings, str):
        assert "give the checkpoint that they were made from" in str(caught.value)


def test_weights_in_four_bits_are_refused_by_name(tmp_path):
    """A dtype of safetensors that this torch has no dtype for."""
    header = json.dumps({"q.weight": {"dtype": "F4", "shape": [4, 4], "data_offsets": [0, 8]}})
    content = len(header).to_bytes(8, "little") + header.encode() + bytes(8)
    (tmp_path / "w.safetensors").write_bytes(content)
    with pytest.raises(
        RecipeError, match=r"q.weight has the dtype F4.*MXFP4 \(mxfp4\) can be read"
    ):
        open_files([tmp_path / "w.safetensors"])
