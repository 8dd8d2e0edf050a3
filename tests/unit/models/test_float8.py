"""Linear layers in float8: values, gradients, what is converted, and what is refused."""

import copy
import dataclasses
import subprocess
import sys

import pytest
import torch
import transformers
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from launcher.errors import RecipeError
from launcher.models import float8
from launcher.models.attention import planned_gpu
from launcher.models.description import describe
from launcher.models.float8 import describe_float8, is_float8, use_float8
from tests import REPOSITORY

CPU = torch.device("cpu")
SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2}
NAMES = ("rowwise", "rowwise_with_gw_hp")


def made(kind="llama", **config):
    torch.manual_seed(3)
    config = transformers.AutoConfig.for_model(kind, **SIZES | config)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def converted(model, name="rowwise", device=CPU):
    use_float8(describe(model).blocks, name, device=device, dtype=torch.bfloat16)
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", NAMES)
def test_a_layer_computes_the_bits_of_torchao(name, dtype):
    """Also from weights in float32, which ddp has: they are rounded first, as fsdp does."""
    torchao = pytest.importorskip("torchao.float8")
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(48, 32, dtype=dtype))
    ours, theirs = copy.deepcopy(plain), copy.deepcopy(plain).bfloat16()
    use_float8({"block": ours}, name, device=CPU, dtype=torch.bfloat16)
    config = torchao.Float8LinearConfig.from_recipe_name(name)
    torchao.convert_to_float8_training(theirs, config=dataclasses.replace(config, emulate=True))
    rows = torch.randn(3, 7, 48, dtype=torch.bfloat16)  # 21 tokens: no multiple of 16
    gradient = torch.randn(3, 7, 32, dtype=torch.bfloat16)
    found = []
    for model in (ours, theirs):
        inputs = rows.clone().requires_grad_()
        out = model(inputs)
        out.backward(gradient)
        found.append([out, inputs.grad, *(p.grad.bfloat16() for p in model.parameters())])
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))
    exact = rows @ plain[0].weight.bfloat16().t() + plain[0].bias.bfloat16()
    assert not torch.equal(found[0][0], exact)
    torch.testing.assert_close(found[0][0], exact, rtol=0, atol=0.15)


@pytest.mark.slow
def test_blocks_share_their_compiled_graphs():
    """dynamo would compile each block on its own if each linear had a forward pass of its own."""
    pytest.importorskip("torchao")
    torch.manual_seed(0)
    blocks = {
        str(i): nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32)).bfloat16()
        for i in range(3)
    }
    use_float8(blocks, "rowwise", device=CPU, dtype=torch.bfloat16)
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    rows = torch.randn(16, 32, dtype=torch.bfloat16)
    expected = actual = rows
    for block in blocks.values():
        expected = block(expected)
    for block in blocks.values():
        block.compile(backend=counter, fullgraph=True)
        actual = block(actual)
    torch._dynamo.reset()
    assert counter.frame_count == 2  # the input of the first block needs no gradient
    torch.testing.assert_close(actual, expected)


@pytest.mark.long
def test_the_import_of_torchao_is_silent():
    """torchao warns of libraries that only GPUs need. transformers imports torchao if it is
    installed, so this concerns all commands. Other warnings of the same loggers are shown."""
    pytest.importorskip("torchao")
    text = (
        "import logging; from launcher.console import hide_irrelevant_warnings as hide; hide()\n"
        "import torchao.float8; from transformers.quantizers import auto\n"
        "logging.getLogger('torchao').warning('another warning')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", text], capture_output=True, text=True, cwd=REPOSITORY
    )
    assert (done.stdout + done.stderr).splitlines() == ["another warning"]


@pytest.mark.parametrize("name", NAMES)
def test_losses_and_gradients_are_those_of_torchao_by_hand(name):
    torchao = pytest.importorskip("torchao.float8")
    plain = made()
    ours, theirs = converted(copy.deepcopy(plain), name), copy.deepcopy(plain)
    config = torchao.Float8LinearConfig.from_recipe_name(name)
    torchao.convert_to_float8_training(
        theirs.model.layers, config=dataclasses.replace(config, emulate=True)
    )
    ids = torch.randint(0, 64, (2, 15))  # a number of tokens that is no multiple of 16
    losses = {}
    for key, model in {"ours": ours, "theirs": theirs, "plain": plain}.items():
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses[key] = []
        for _ in range(3):
            optimizer.zero_grad()
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            losses[key].append(loss.item())
    assert losses["ours"] == pytest.approx(losses["theirs"], rel=1e-6)
    assert losses["ours"] != losses["plain"]
    assert losses["ours"] == pytest.approx(losses["plain"], rel=2e-2)
    for (path, mine), (name, other) in zip(
        ours.named_parameters(), theirs.named_parameters(), strict=True
    ):
        assert path == name
        assert torch.equal(mine.grad, other.grad), path
    assert list(ours.state_dict()) == list(plain.state_dict())
    assert all(type(p) is nn.Parameter for p in ours.parameters())


def test_autocast_rounds_weights_as_weights_in_bfloat16():
    """DDP computes with weights in float32 and autocast, FSDP with weights in bfloat16."""
    pytest.importorskip("torchao")
    torch.manual_seed(0)
    layers = nn.ModuleDict({"block": nn.Sequential(nn.Linear(32, 48))})
    wide = copy.deepcopy(layers)
    narrow = layers.bfloat16()
    for each in (wide, narrow):
        use_float8({"block": each["block"]}, "rowwise", device=CPU, dtype=torch.bfloat16)
    rows = torch.randn(5, 32)
    with torch.autocast("cpu", torch.bfloat16):
        out = wide["block"](rows)
    expected = narrow["block"](rows.bfloat16())
    assert torch.equal(out, expected)
    out.float().square().sum().backward()
    expected.float().square().sum().backward()
    found = wide["block"][0].weight.grad
    assert found.dtype == torch.float32
    assert torch.equal(found.bfloat16(), narrow["block"][0].weight.grad)


def test_head_and_routers_are_not_converted():
    pytest.importorskip("torchao")
    model = converted(made("qwen2_moe", num_experts=4, moe_intermediate_size=16))
    names = {name for name, module in model.named_modules() if is_float8(module)}
    assert "model.layers.0.self_attn.q_proj" in names
    assert not any(name.endswith(("lm_head", "gate")) for name in names)
    text = describe_float8(model, describe(model).blocks.values())
    assert text.startswith(f"float8: {len(names)} linear layers; ")
    assert "1 outside of the blocks" in text
    assert "4 weights of experts are not converted" in text


def test_what_cannot_compute_in_float8_is_refused(monkeypatch):
    with pytest.raises(RecipeError, match=r"multiples of 16; 6 layers .*mlp.gate_proj \[40, 32\]"):
        converted(made(intermediate_size=40))
    with pytest.raises(RecipeError, match="no linear layers in blocks"):
        use_float8({}, "rowwise", device=CPU, dtype=torch.bfloat16)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A10")
    with pytest.raises(
        RecipeError, match=r"NVIDIA A10 does not compute in float8: it needs .* 8\.9"
    ):
        converted(made(), device=torch.device("cuda"))
    token = planned_gpu.set("A100 80GB")
    try:
        with pytest.raises(RecipeError, match="A100 80GB does not compute in float8"):
            converted(made(), device=torch.device("cuda"))
    finally:
        planned_gpu.reset(token)


def test_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "torchao.float8", None)
    with pytest.raises(RecipeError, match=r"needs the package torchao .*launcher\[float8\]"):
        converted(made())
    assert float8.KEY == "strategy.mixed_precision.float8"


def test_layers_that_choose_are_not_converted():
    """Routers by name and width (LongCat, JetMoE), and what the model keeps in float32
    (DeepSeek-V3.2). Their rounding changes which experts and tokens are chosen."""
    pytest.importorskip("torchao.float8")
    block = nn.Module()
    block.router, block.self_attn = nn.Module(), nn.Module()
    block.router.classifier = nn.Linear(64, 48)
    block.chooser, block.shared_expert_gate = nn.Linear(64, 32), nn.Linear(64, 1)
    block.self_attn.weights_proj, block.self_attn.wk = nn.Linear(64, 16), nn.Linear(64, 32)
    block.self_attn.heads = nn.Linear(1024, 16)
    block.up_proj = nn.Linear(64, 48)
    model = nn.Module()
    model.block = block
    model._keep_in_fp32_modules = ["self_attn.weights_proj"]
    model.config = transformers.AutoConfig.for_model("qwen3_moe", num_experts=32)
    options = {"device": CPU, "dtype": torch.bfloat16, "model": model}
    use_float8({"block": block}, "rowwise", **options)
    found = {name for name, module in block.named_modules() if is_float8(module)}
    assert found == {"up_proj", "self_attn.wk"}
