"""Weights in NF4: rounding error, shards, layers, gradients, and exports."""

import json
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from launcher.checkpoint import export
from launcher.errors import RecipeError
from launcher.models import nf4, nf4_layers
from launcher.models.attention import isolate_documents
from launcher.models.build import build_model
from launcher.models.description import describe
from launcher.models.hugging_face_files import export_hugging_face
from launcher.models.initialization import random_weights
from launcher.models.load import open_checkpoint, pretrained_weights
from launcher.models.lora import add_adapters
from launcher.models.micro_batch import MicroBatch
from launcher.models.names import clean_name
from launcher.models.safetensors_files import open_folder
from launcher.recipe import schema
from launcher.recipe.schema import Lora, Model
from launcher.training import setup
from launcher.training.fake_tensors import computing_as_on
from tests import REPOSITORY
from tests.unit.models.test_export import export_model
from tests.unit.models.test_load import CPU, logits, reference, save

WIDE = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 128}
EXPERTS = {
    "mixtral": {"num_local_experts": 3},
    "qwen3_moe": {"moe_intermediate_size": 64, "num_experts": 4, "num_experts_per_tok": 2},
    "gpt_oss": {"num_local_experts": 3, "num_experts_per_tok": 2, "head_dim": 16},
}


def packed(weight):
    made = torch.empty(*weight.shape[:-1], nf4.row_bytes(weight.shape[-1]), dtype=torch.uint8)
    nf4.quantize(weight, made)
    return made


def weights(kind):
    torch.manual_seed(0)
    gauss = torch.randn(512, 2048) * 0.02
    tails = torch.distributions.StudentT(3.0).sample((512, 2048)) * 0.02
    outliers = torch.randn(512, 2048) * 0.02 * torch.logspace(-1.5, 1.0, 2048)
    return {"gauss": gauss, "tails": tails, "outliers": outliers}[kind]


BITSANDBYTES, TORCHAO = (
    {"gauss": 0.09201, "tails": 0.11139, "outliers": 0.09274},
    {"gauss": 0.09199, "tails": 0.11891, "outliers": 0.09228},
)
"""Relative errors of bitsandbytes 0.50.2 (blocks of 64, double quantization) and of NF4Tensor of
torchao 0.18.0, on the CPU."""


@pytest.mark.parametrize("kind", ["gauss", "tails", "outliers"])
def test_error_is_that_of_bitsandbytes_with_double_quantization(kind):
    weight = weights(kind)
    error = (nf4.round_trip(weight) - weight).norm() / weight.norm()
    assert error <= 1.0005 * min(BITSANDBYTES[kind], TORCHAO[kind])
    assert 8 * packed(weight).numel() / weight.numel() < 4.15


def test_codes_and_values_are_those_of_bitsandbytes():
    """Codes of a block whose largest number is its scale; bitsandbytes 0.50.2's
    `dequantize_4bit` gives the same bits from these codes and scales, in float32 and bfloat16."""
    row = torch.linspace(-1, 1, 64)[None]
    found = packed(row)[0]
    codes = [code for byte in found[:32].tolist() for code in (byte >> 4, byte & 15)]
    assert codes == [int((level - nf4.LEVELS).abs().argmin()) for level in row[0]]
    assert found[32] == 255
    assert found[33:].clone().view(torch.float32) == 1.0
    torch.testing.assert_close(nf4.round_trip(row)[0], nf4.LEVELS[codes], rtol=0, atol=0)


def test_rows_do_not_depend_on_each_other(monkeypatch):
    weight = weights("tails")
    whole = packed(weight)
    assert torch.equal(whole, torch.cat([packed(weight[:300]), packed(weight[300:])]))
    monkeypatch.setattr(nf4, "AT_ONCE", 5000)
    assert torch.equal(whole, packed(weight))
    for dtype in (torch.float32, torch.bfloat16):
        assert torch.equal(nf4.dequantize(whole, dtype), nf4.round_trip(weight).to(dtype))
    assert torch.equal(packed(weight.view(4, 128, 2048)).view(512, -1), whole)
    assert packed(weight[:0]).shape == (0, whole.shape[1])


def test_parts_of_rows_have_the_bits_of_whole_rows():
    """Ranks that divide rows hold parts of the codes; the scale of a row is that of the whole."""
    weight = weights("outliers")
    values = nf4.round_trip(weight)
    made = nf4.with_parts(packed(weight), 4)
    assert made.shape == (512, 4 * nf4.row_bytes(512))
    for index, part in enumerate(made.chunk(4, 1)):
        columns = range(512 * index, 512 * (index + 1))
        part = part.contiguous()
        nf4.quantize(weight, part, columns)
        own = values[:, columns.start : columns.stop]
        assert torch.equal(nf4.dequantize(part, torch.float32), own)
    assert not torch.equal(nf4.round_trip(weight[:, :512]), values[:, :512])  # another scale


def test_a_weight_is_described_alike_in_nf4_or_not():
    weight = weights("gauss")
    made = packed(weight)
    values = nf4.round_trip(weight)
    assert (nf4.shape_of(made), nf4.dtype_of(made)) == (weight.shape, torch.float32)
    assert (nf4.row_unit(made), nf4.row_unit(weight)) == (64, 1)
    assert torch.equal(nf4.unpacked(made, torch.float32), values)
    parts = torch.cat([packed(part) for part in weight.chunk(4, 1)], 1)
    expected = torch.cat([nf4.round_trip(part) for part in weight.chunk(4, 1)], 1)
    assert torch.equal(nf4.unpacked(parts, torch.float32, 4), expected)
    assert nf4.with_parts(weight, 4) is nf4.unpacked(weight, torch.float32) is weight
    half = weight.bfloat16()
    assert (nf4.shape_of(half), nf4.dtype_of(half)) == (weight.shape, torch.bfloat16)
    inputs = torch.randn(3, 2048)
    torch.testing.assert_close(nf4.linear(inputs, made), nf4.linear(inputs, values))


def test_only_writing_asks_whether_a_tensor_may_be_in_nf4():
    """All others ask the mark of its module, or take its shape, dtype and numbers from `nf4`."""
    files = (REPOSITORY / "launcher").rglob("*.py")
    asking = {file.name for file in files if "is_packed" in file.read_text()}
    assert asking == {"nf4.py", "shards.py"}


@pytest.mark.parametrize("quantized", [False, True])
def test_bytes_of_a_module_of_ones_own_are_no_weight_in_nf4(tmp_path, quantized):
    """NF4 is a mark of the module. Buffers and parameters of bytes with two dimensions, also of the
    width of a weight in NF4, are exported as they are."""

    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(128, 16, bias=False)
            for width in (16, 64, nf4.row_bytes(128)):
                values = torch.arange(4 * width).remainder(7).to(torch.uint8).view(4, width)
                self.register_buffer(f"mask_{width}", values)
            self.table = torch.nn.Parameter(values + 1, requires_grad=False)

    model = torch.nn.ModuleDict({"block": Block()}).requires_grad_(False)
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    if quantized:
        nf4_layers.quantize_blocks({"block": model["block"]})
        weight = expected["block.linear.weight"]
        nf4.quantize(weight, model["block"].linear.weight)
        expected["block.linear.weight"] = nf4.round_trip(weight)
    options = {"rank": 0, "device": torch.device("cpu"), "export_base": "quantized"}
    export_hugging_face(model, tmp_path / "out", **options)
    found = load_file(tmp_path / "out/model.safetensors")
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


class Bytes(torch.nn.Module):
    """Has a parameter and a buffer of bytes, and a layer."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(128, 16, bias=False)
        self.table = torch.nn.Parameter(torch.empty(4, 70, dtype=torch.uint8), requires_grad=False)
        self.register_buffer("mask", torch.empty(4, 70, dtype=torch.uint8))

    def reset_parameters(self):
        self.table.copy_(torch.arange(280).remainder(7).view(4, 70))
        self.mask.fill_(3)


def test_bytes_of_a_module_of_ones_own_are_drawn_counted_and_loaded_as_they_are(tmp_path):
    with torch.device("meta"):
        model = torch.nn.ModuleDict({"block": Bytes()}).requires_grad_(False)
    nf4_layers.quantize_blocks({"block": model["block"]})
    shapes = {name: nf4.shapes(model)[p] for name, p in model.named_parameters()}
    assert shapes == {"block.linear.weight": (16, 128), "block.table": (4, 70)}
    assert nf4_layers.describe_nf4([model["block"]]).startswith(
        "nf4: 1 weights with 2.05 K parameters; 1 others of the blocks with 280 are not quantized"
    )
    random_weights(model, CPU, CPU, seed=1)
    table = torch.arange(280).remainder(7).view(4, 70)
    assert torch.equal(model["block"].table, table.to(torch.uint8))
    assert torch.equal(model["block"].mask, torch.full((4, 70), 3, dtype=torch.uint8))

    weight = torch.randn(16, 128)
    for dtype in (torch.uint8, torch.float32):  # a file may have wider numbers
        tensors = {"linear.weight": weight, "table": (table + 1).to(dtype), "mask": table.to(dtype)}
        save_file(tensors, tmp_path / "model.safetensors")
        stored = open_folder(tmp_path)
        for name, tensor in model["block"].state_dict().items():
            stored.copy_rows(name, tensor.fill_(0))
        assert torch.equal(model["block"].table, (table + 1).to(torch.uint8))
        assert torch.equal(model["block"].mask, table.to(torch.uint8))
        assert torch.equal(model["block"].linear.weight, packed(weight))


def test_layers_in_nf4_stay_the_same_modules():
    """With their hooks, and under the classes that others look for."""
    config = {"model_type": "mixtral", "num_hidden_layers": 1, "num_local_experts": 3} | WIDE
    config |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    model = build_model(Model(config=config), sequence_length=16)
    blocks = describe(model).blocks
    block = blocks["model.layers.0"]
    model.requires_grad_(False)
    query, experts = block.self_attn.q_proj, block.mlp.experts
    kinds, called = (type(query), type(experts)), []
    for module in (query, experts):
        module.register_forward_hook(lambda module, *_: called.append(module))
    nf4_layers.quantize_blocks(blocks)
    random_weights(model, CPU, CPU, seed=1)
    assert block.self_attn.q_proj is query
    assert block.mlp.experts is experts
    assert isinstance(query, kinds[0])
    assert isinstance(experts, kinds[1])
    model(input_ids=torch.zeros(1, 4, dtype=torch.int64))
    assert called == [query, experts]


def test_traces_call_the_operators_that_the_kernel_needs():
    """A budget of activation checkpointing counts the calls of each operator in a trace on CPUs."""
    data = SimpleNamespace(micro_batch=MicroBatch({"position_ids": None}))
    weight = packed(torch.randn(8, 128))
    called = {}
    for device in ("cpu", "cuda"):
        with (
            computing_as_on(device, data),
            FakeTensorMode(allow_non_fake_inputs=True),
            Operators() as called[device],
        ):
            made = nf4.dequantize(weight, torch.bfloat16)
        assert made.shape == (8, 128)
    index = torch.ops.aten.index_select.default
    assert called["cpu"].counts[index] == 1
    assert not {index, torch.ops.aten.copy_.default} & called["cuda"].counts.keys()
    assert not nf4.has_kernel(torch.device("cpu"))


class Operators(TorchDispatchMode):
    """Counts the calls of each operator."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[func] += 1
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("row", [torch.zeros(128), torch.cat([torch.zeros(64), torch.ones(64)])])
def test_blocks_of_zeros_stay_zeros(row):
    assert torch.equal(nf4.round_trip(row[None])[0], row)


def build(config, *, quantize, **lora):
    model = build_model(Model(config=config), sequence_length=16)
    add_adapters(model, Lora(rank=4, **lora), base_dtype=torch.float32)
    if quantize:
        nf4_layers.quantize_blocks(describe(model).blocks)
    random_weights(model, CPU, CPU, seed=1)
    torch.manual_seed(5)
    for name, parameter in model.named_parameters():
        if ".lora_B" in name:
            parameter.data.normal_(std=0.1)
    return model


def round_weights(model):
    for module, name in nf4_layers.packable(describe(model).blocks):
        parameter = module.get_parameter(name)
        parameter.data = nf4.round_trip(parameter.data)


@pytest.mark.parametrize("kind", ["llama", *EXPERTS])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_model_computes_with_the_rounded_weights(kind, checkpointing):
    """Random weights, forward and backward pass, of linear layers and of experts."""
    config = {"model_type": kind, "num_hidden_layers": 2, "num_attention_heads": 4} | WIDE
    config |= {"num_key_value_heads": 2} | EXPERTS.get(kind, {})
    found = []
    for quantize in (True, False):
        model = build(config, quantize=quantize)
        if not quantize:
            round_weights(model)
            model.config._experts_implementation = "eager"
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
            model.train()
        ids = (torch.arange(32).view(2, 16) * 7) % 96
        out = model(input_ids=ids, labels=ids, use_cache=False)
        out.loss.backward()
        gradients = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
        found.append((out.logits.detach(), torch.cat(gradients)))
    for one, other in zip(*found, strict=True):
        assert (one - other).norm() <= 1e-6 * other.norm()


def test_backward_pass_keeps_packed_weights_only():
    layer = torch.nn.Linear(256, 256, bias=False, device="meta").requires_grad_(False)
    block = torch.nn.Sequential(layer)
    nf4_layers.quantize_blocks({"block": block})
    layer.weight = torch.nn.Parameter(packed(torch.randn(256, 256)), requires_grad=False)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        block(torch.randn(8, 256, requires_grad=True))
    assert [tensor.data_ptr() for tensor in kept] == [layer.weight.data_ptr()]


def test_autocast_computes_in_its_dtype():
    model = build({"model_type": "llama", "num_hidden_layers": 1} | WIDE, quantize=True)
    layer = model.model.layers[0].mlp.up_proj.base_layer
    with torch.autocast("cpu", dtype=torch.bfloat16):
        made = layer(torch.randn(3, 64))
    assert made.dtype == torch.bfloat16


def test_integers_as_inputs_are_refused():
    """Some models cast the inputs of a layer to the dtype of its weight."""
    model = build({"model_type": "llama", "num_hidden_layers": 1} | WIDE, quantize=True)
    layer = model.model.layers[0].mlp.up_proj.base_layer
    with pytest.raises(RecipeError, match=r"lora.quantize: a linear layer gets integers"):
        layer(torch.randn(3, 64).to(layer.weight.dtype))


NARROW = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2}
WIDE_GPT2 = {"vocab_size": 96, "n_embd": 64, "n_head": 2, "n_layer": 1}


@pytest.mark.parametrize(
    ("config", "layers"),
    [
        (
            {"model_type": "llama", "num_hidden_layers": 1} | NARROW,
            "Linear with rows of 32 (such as self_attn.q_proj), Linear with rows of 48 (such as "
            "mlp.down_proj)",
        ),
        ({"model_type": "gpt2"} | WIDE_GPT2, "Conv1D (such as attn.c_attn)"),
    ],
)
def test_a_model_without_layers_for_nf4_is_refused(config, layers):
    with pytest.raises(RecipeError) as error:
        build(config, quantize=True)
    assert error.value.problems == [
        "lora.quantize: nothing in the model's blocks can be quantized: NF4 takes torch.nn.Linear "
        "and layers of experts whose rows are a multiple of 64 wide, and the blocks have "
        f"{layers}; set lora.quantize=null"
    ]


@pytest.fixture(scope="module", params=["llama", "mixtral"])
def base(request, tmp_path_factory):
    kind = request.param
    more = WIDE | EXPERTS.get(kind, {})
    return save(tmp_path_factory.mktemp(kind), model_type=kind, **more)


def load(folder, *, trained=True):
    """A model with adapters on weights in NF4."""
    model = build_model(Model(path=str(folder)), sequence_length=16)
    found = open_checkpoint(folder, model)
    add_adapters(model, Lora(rank=4, alpha=6.0), base_dtype=torch.float32, base=str(folder))
    nf4_layers.quantize_blocks(describe(model).blocks)
    pretrained_weights(model, CPU, CPU, checkpoint=found, seed=3)
    torch.manual_seed(5)
    for name, parameter in model.named_parameters():
        if trained and ".lora_B" in name:
            parameter.data.normal_(std=0.1)
    return model.eval(), found


def test_stored_weights_are_quantized_while_they_are_read(base):
    model, _ = load(base)
    plain = AutoModelForCausalLM.from_pretrained(base)
    count = 0
    for name, parameter in model.named_parameters():
        if nf4.is_packed(parameter):
            wanted = packed(plain.get_parameter(clean_name(name)).detach())
            assert torch.equal(parameter, wanted), name
            assert nf4.shape_of(parameter) == plain.get_parameter(clean_name(name)).shape
            count += 1
    assert count == {"llama": 14, "mixtral": 12}[plain.config.model_type]


def test_merged_export_adds_adapters_to_original_or_to_quantized_weights(base, tmp_path):
    model, found = load(base)
    wanted = logits(model)
    out = export_model(model, tmp_path / "quantized", merged=True)
    torch.testing.assert_close(reference(out), wanted, rtol=1e-4, atol=1e-4)
    out = export_model(model, tmp_path / "original", merged=True, source=found)
    changes = {}
    for name, tensor in load_file(base / "model.safetensors").items():
        changes[name] = (load_file(out / "model.safetensors")[name] - tensor).norm()
    assert {name for name, change in changes.items() if not change} == {
        name
        for name in changes
        if not any(f"self_attn.{x}_proj" in name for x in "qkvo")
        and not ("mlp." in name and "_proj" in name)
        and ".experts." not in name
    }


def test_adapter_is_that_of_peft(base, tmp_path):
    from peft import PeftModel

    model, _ = load(base)
    out = export_model(model, tmp_path / "hf")
    plain = AutoModelForCausalLM.from_pretrained(base)
    round_weights(plain)
    adapted = PeftModel.from_pretrained(plain, out).eval()
    torch.testing.assert_close(logits(adapted.base_model.model), logits(model), rtol=0, atol=1e-5)
    config = json.loads((out / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (4, 6)


def prepare(lora=None, strategy="ddp", path=None, **config):
    sizes = {"model_type": "llama", "num_hidden_layers": 1} | WIDE | config
    return setup.prepare_model(recipe_with(lora, strategy, path, sizes), device=CPU)


def recipe_with(lora, strategy, path, sizes):
    return schema.Recipe(
        run=schema.Run(name="nf4", max_steps=1),
        model=Model(path=str(path)) if path else Model(config=sizes),
        data=schema.Data(train=("x",), sequence_length=16),
        batch=schema.Batch(global_batch_size=1, micro_batch_size=1),
        strategy=schema.Strategy(kind=strategy),
        lora=lora or Lora(rank=4, quantize="nf4"),
    )


@pytest.fixture
def mixed(tmp_path):
    """A checkpoint in bfloat16 with one weight in float32, and the weight's name."""
    folder = save(tmp_path / "llama", dtype=torch.bfloat16, num_hidden_layers=2, **WIDE)
    file, name = folder / "model.safetensors", "model.layers.1.mlp.gate_proj.weight"
    stored = load_file(file)
    save_file(stored | {name: stored[name].float()}, file, metadata={"format": "pt"})
    return folder, name


def plain_layers(folder):
    """The linear layers of the blocks that are not in NF4."""
    model = prepare(path=folder).model
    return {
        clean_name(name)
        for name, p in model.named_parameters()
        if "_proj" in name and ".lora_" not in name and not nf4.is_packed(p)
    }


def test_weights_that_a_checkpoint_has_in_float32_are_not_quantized(mixed):
    """While most of it has 16 bits, as for routers of experts."""
    folder, name = mixed
    assert plain_layers(folder) == {name}
    file = folder / "model.safetensors"
    stored = {key: tensor.float() for key, tensor in load_file(file).items()}
    save_file(stored, file, metadata={"format": "pt"})
    assert plain_layers(folder) == set()


def test_an_export_rounds_the_weights_that_were_quantized(mixed):
    folder, name = mixed
    model = build_model(Model(path=str(folder)), sequence_length=16)
    source, recipe = open_checkpoint(folder, model), recipe_with(None, "ddp", folder, None)
    read, stored = export._rounded(source.reader(), model, recipe, source), source.reader()
    assert torch.equal(read(name), stored(name))
    other = name.replace("gate", "down")
    assert torch.equal(read(other), nf4.round_trip(stored(other)))


def test_fsdp_needs_a_torch_that_gathers_bytes(monkeypatch):
    monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion("2.11.0"))
    with pytest.raises(RecipeError, match=r"strategy.kind: fsdp needs torch 2.12 or newer"):
        prepare(strategy="fsdp")
    prepare(strategy="ddp")


def test_flops_do_not_depend_on_quantization():
    counts = []
    for quantize in ("nf4", None):
        prepared = prepare(Lora(rank=4, quantize=quantize))
        counts.append(setup.token_flops(prepared.model).at(16))
    assert counts[0] == counts[1]


def test_experts_beside_layers_of_their_names_are_quantized_without_adapters():
    """peft would adapt them because of the names in the dense block."""
    config = {"moe_intermediate_size": 64, "num_experts": 4, "num_experts_per_tok": 2}
    made = prepare(model_type="qwen3_moe", mlp_only_layers=[0], num_hidden_layers=2, **config)
    named = dict(made.model.named_parameters())
    assert nf4.is_packed(named["model.layers.1.mlp.experts.down_proj"])
    assert not any(".mlp." in name for name, p in named.items() if p.requires_grad)


@pytest.mark.parametrize("kind", ["llama", "mixtral"])
@pytest.mark.parametrize("lora", [Lora(quantize="nf4"), Lora(dora=True)], ids=["nf4", "dora"])
def test_packed_rows_use_the_kernel_for_documents(kind, lora):
    """It is chosen by a run on the meta device, which has no autocast."""
    config = {"model_type": kind, "vocab_size": 64, "hidden_size": 64, "intermediate_size": 64}
    config |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = build_model(Model(config=config), sequence_length=32)
    add_adapters(model, lora, base_dtype=torch.float32)
    if lora.quantize:
        nf4_layers.quantize_blocks(describe(model).blocks)
    options = {"device": torch.device("cpu"), "compute_dtype": torch.float32}
    assert isolate_documents(model, sequence_length=32, **options) == "varlen"
