"""Building models, errors in their settings, and weight initialization."""

import random
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from launcher.cli.main import main
from launcher.errors import RecipeError
from launcher.models import philox
from launcher.models.build import build_model
from launcher.models.description import describe
from launcher.models.flops import recomputed_flops, token_flops
from launcher.models.initialization import initialize, materialize, random_weights
from launcher.models.load import starting_weights
from launcher.recipe.schema import Model
from tests import REPOSITORY
from tests.unit.models.odd_model import Odd

LLAMA = {"model_type": "llama", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48}
LLAMA |= {"num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 64}
BERT = {key: LLAMA[key] for key in ("vocab_size", "hidden_size", "num_attention_heads")}
BERT |= {"model_type": "bert", "intermediate_size": 48}
CPU = torch.device("cpu")


def build(*, length=16, **section):
    return build_model(Model(**section), sequence_length=length)


def build_initialized(config, seed=1):
    model = build(config=config)
    random_weights(model, CPU, CPU, seed=seed)
    return model


def test_models_are_built_on_meta():
    model = build(config=LLAMA)
    assert all(p.is_meta and p.dtype == torch.float32 for p in model.parameters())
    assert list(describe(model).blocks) == ["model.layers.0", "model.layers.1"]
    assert describe(model).vocabulary == 64
    assert describe(build(config=BERT | {"is_decoder": True})).blocks
    classifier = build(config=BERT, task="sequence_classification", num_labels=5)
    assert classifier.config.num_labels == 5


def llama(**changes):
    return {"config": LLAMA | changes}


NEAREST = "matches no parameter; the nearest names are model."


@pytest.mark.parametrize(
    ("section", "rule"),
    [
        (llama(num_attention_heads=3), "heads"),
        (llama(hidden_act="nonsense"), "activation"),
        (llama(rope_parameters={"rope_type": "yarn"}), "rotary"),
        (
            llama(hidden_size=12, num_attention_heads=4),
            "odd-head",
        ),
        (
            llama(num_attention_heads=4, num_key_value_heads=3, hidden_size=32),
            "key-value-heads",
        ),
        (
            {"length": 65},
            "length",
        ),
        ({"attention": "nonsense"}, "attention"),
        ({"config": BERT}, "encoder"),
        ({"freeze": ("model.embed_token.weight",)}, "frozen-weight"),
        ({"freeze": ("model.layers.0",)}, "frozen-block"),
        ({"freeze": ("*",)}, "all-frozen"),
    ],
)
def test_invalid_model_settings_are_refused(words, section, rule):
    with words.refused(rule):
        build(**{"config": LLAMA} | section)


def test_unsupported_attention_is_refused(monkeypatch):
    from transformers import LlamaForCausalLM

    monkeypatch.setattr(LlamaForCausalLM, "_supports_sdpa", False)
    with pytest.raises(RecipeError, match=r"model.attention: .*; use auto, or eager"):
        build(config=LLAMA, attention="sdpa")


def test_random_weights_depend_only_on_seed_and_name():
    config = LLAMA | {"initializer_range": 0.5}
    first, again, other = (build_initialized(config, seed).state_dict() for seed in (1, 1, 2))
    projections = [f"model.layers.{i}.mlp.up_proj.weight" for i in (0, 1)]
    for name in ("model.embed_tokens.weight", *projections):
        assert first[name].std().item() == pytest.approx(0.5, rel=0.1)
    assert torch.equal(first["model.norm.weight"], torch.ones(32))
    deeper = build_initialized(config | {"num_hidden_layers": 3}).state_dict()
    for name, tensor in first.items():
        assert torch.equal(tensor, again[name])
        assert torch.equal(tensor, deeper[name]), (
            "an additional block must not change the other weights"
        )
        assert "norm" in name or not torch.equal(tensor, other[name])
    assert not torch.equal(*(first[name] for name in projections))


def odd_parameters(seed=1, dtype=None):
    with torch.device("meta"):
        model = Odd()
    model.to(dtype)
    random_weights(model, CPU, CPU, seed=seed)
    return dict(model.named_parameters())


@pytest.fixture(scope="module")
def state():
    return odd_parameters()


def test_every_kind_of_initialization(state):
    again, other = odd_parameters(), odd_parameters(seed=2)
    for name, tensor in state.items():
        assert type(tensor) is nn.Parameter, name
        assert tensor.requires_grad
        assert torch.equal(tensor, again[name]), name
        assert name == "scalar" or not torch.equal(tensor, other[name]), name
    assert state["uniform"].min() >= -3
    assert state["uniform"].max() <= -1
    assert state["cut"].std().item() == pytest.approx(0.02, rel=0.05)
    assert state["cut"].abs().max() < 0.1
    padded = state["padded"]
    assert (padded[3] == 0).all()
    assert (padded[-1] == 7).all()
    assert (padded[[0, 1, 2, 4, 5, 6, 7]] != 0).all()
    assert (state["scaled"].min().item(), state["scaled"].max().item()) == pytest.approx((0.9, 1.1))
    assert torch.allclose(state["orthogonal"] @ state["orthogonal"].T, torch.eye(6), atol=1e-5)
    assert (state["sorted"].diff() >= 0).all()
    assert state["scalar"].item() == 3
    assert state["doubled"].abs().max() > 3


def test_chunks_and_dtype_do_not_change_random_values(state, monkeypatch):
    for name, tensor in odd_parameters(dtype=torch.bfloat16).items():
        assert torch.equal(tensor, state[name].bfloat16())
    counts, draw = [], philox.normal
    monkeypatch.setattr(philox, "numbers_at_once", lambda device: 37)
    monkeypatch.setattr(philox, "normal", lambda *args: counts.append(args[2]) or draw(*args))
    assert all(torch.equal(tensor, state[name]) for name, tensor in odd_parameters().items())
    assert max(counts) == 37


def test_loaded_tensors_are_not_initialized(state):
    with torch.device("meta"):
        model = Odd()
    materialize(model, parameters=CPU, buffers=CPU)
    for parameter in model.parameters():
        parameter.data.fill_(5)
    loaded = {"normal", "cut", "padded", "scalar"}
    initialize(model, seed=1, loaded=loaded)
    for name, tensor in model.named_parameters():
        expected = torch.full_like(tensor, 5) if name in loaded else state[name]
        assert torch.equal(tensor, expected), name


def test_shared_parameter_is_initialized_once():
    """The first module determines the values, as after tie_weights of transformers."""
    with torch.device("meta"):
        first, second = nn.Embedding(6, 4, padding_idx=2), nn.Linear(4, 6, bias=False)
    second.weight = first.weight
    random_weights(nn.Sequential(first, second), CPU, CPU, seed=1)
    assert first.weight is second.weight
    assert (first.weight[2] == 0).all()
    assert first.weight[0].abs().max() > 0.5, (
        "must be initialized by nn.Embedding, not by nn.Linear"
    )


def test_tied_weights_and_rotary_buffers_match_transformers():
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LLAMA | {"tie_word_embeddings": True}
    model = build_initialized(config)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    fields = {key: value for key, value in config.items() if key != "model_type"}
    expected = dict(LlamaForCausalLM(LlamaConfig(**fields)).named_buffers())
    assert expected
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, expected[name]), name


def test_gpt2_residual_projections_are_scaled():
    """GPT-2 initializes them again in the parent module, which layer-by-layer code would miss."""
    config = {"model_type": "gpt2", "vocab_size": 64, "n_embd": 64, "n_layer": 8, "n_head": 4}
    mlp = build_initialized(config).transformer.h[3].mlp
    assert mlp.c_proj.weight.std().item() == pytest.approx(0.02 / (2 * 8) ** 0.5, rel=0.1)
    assert mlp.c_fc.weight.std().item() == pytest.approx(0.02, rel=0.1)


def test_block_buffers_set_by_the_parent_are_computed():
    """In Falcon-H1, the module that contains all blocks computes these buffers."""
    model = build_initialized(
        LLAMA | {"model_type": "falcon_h1", "mamba_d_ssm": 64, "mamba_n_heads": 4}
    )
    for layer in model.model.layers:
        assert torch.equal(layer.mamba.mup_vector, torch.ones_like(layer.mamba.mup_vector))


def numel(parameters):
    return sum(parameter.numel() for parameter in parameters)


def test_flops_of_dense_frozen_and_expert_models():
    model, attention = build(config=LLAMA), 12 * 2 * 32 * 16
    parameters = numel(model.parameters()) - 64 * 32
    assert token_flops(model).at(16) == 6 * parameters + attention
    blocks = list(describe(model).blocks.values())
    inside = sum(numel(block.parameters()) for block in blocks)
    assert recomputed_flops(model, blocks).at(16) == 2 * inside + 4 * 2 * 32 * 16
    frozen = build(config=LLAMA, freeze=("lm_head.*",))
    saved = 2 * 64 * 32
    assert token_flops(frozen).at(16) == 6 * parameters + attention - saved
    experts = {"num_key_value_heads": 4, "num_local_experts": 8, "num_experts_per_tok": 2}
    sparse = build(config=LLAMA | {"model_type": "mixtral"} | experts)
    inside = numel(p for name, p in sparse.named_parameters() if ".experts." in name)
    used = numel(sparse.parameters()) - 64 * 32 - inside + inside / 4
    assert token_flops(sparse).at(16) == 6 * used + attention


@pytest.mark.parametrize(
    ("config", "length", "attended"),
    [
        # 2 layers: 12 times heads times head size times tokens, which a window limits
        ({"head_dim": 64}, 16, 2 * 4 * 64 * 16),
        ({"model_type": "mistral", "sliding_window": 8}, 16, 2 * 32 * 8),
        ({"model_type": "mistral", "sliding_window": 8}, 4, 2 * 32 * 4),
        (
            {"model_type": "qwen2", "sliding_window": 8, "use_sliding_window": False},
            16,
            2 * 32 * 16,
        ),
        (
            {
                "model_type": "gemma3_text",
                "head_dim": 16,
                "sliding_window": 8,
                "layer_types": ["sliding_attention", "full_attention"],
            },
            16,
            4 * 16 * (8 + 16),
        ),
        (
            {
                "model_type": "deepseek_v3",
                "q_lora_rank": None,
                "kv_lora_rank": 8,
                "qk_nope_head_dim": 16,
                "qk_rope_head_dim": 8,
                "v_head_dim": 32,
                "first_k_dense_replace": 2,
            },
            16,
            2 * 4 * (16 + 8 + 32) / 2 * 16,
        ),
        ({"model_type": "mamba2", "num_heads": 8, "head_dim": 8}, 16, 0),
    ],
    ids=lambda value: value.get("model_type", "llama") if isinstance(value, dict) else None,
)
def test_flops_of_attention(config, length, attended):
    """The sizes of heads and windows count, not the hidden size."""
    flops = token_flops(build(config=LLAMA | config))
    assert flops.at(length) - flops.products == 12 * attended


def test_freeze_patterns_exclude_parameters_from_training():
    patterns = ("model.embed_tokens.*", "*.layers.0.*")
    model = build(config=LLAMA, freeze=patterns)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert not any("embed_tokens" in name or "layers.0." in name for name in trained)
    assert {"lm_head.weight", "model.norm.weight", "model.layers.1.mlp.up_proj.weight"} <= trained
    tied = build(config=LLAMA | {"tie_word_embeddings": True}, freeze=("lm_head.weight",))
    assert not tied.model.embed_tokens.weight.requires_grad


OWN = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.linear = nn.BatchNorm1d(width), nn.Linear(width, width)

class Vision(nn.Module):
    _no_split_modules = ["Block"]

    def __init__(self, width, depth, classes=3):
        super().__init__()
        self.stem = nn.Conv2d(3, width, 2)
        self.blocks = nn.Sequential(*[Block(width) for _ in range(depth)])
        self.head = nn.Linear(width, classes).half()

class Bare(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))

class Half(Bare):
    def __init__(self):
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(3))

    def reset_parameters(self):
        nn.init.ones_(self.scale)

class Several(Bare):
    def __init__(self):
        super().__init__()
        self.first, self.others = Bare(), nn.Sequential(Bare(), Bare(), Bare())

class Copies(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("first", self.linear.weight.detach().clone())
        self.register_buffer("second", self.linear.bias.detach() * 2)

class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Inner()

class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.mask = torch.ones(3)

class Large(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("sum", torch.ones(2**50).sum())

class Buffers(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("noise", torch.randn(3))
        self.register_buffer("mask", torch.ones(4, 4, dtype=torch.bool).tril(), persistent=False)
        self.register_buffer("angles", torch.outer(torch.arange(4.0), torch.arange(3.0)))
        self.register_buffer("own", torch.empty(3))
        self.norm, self.linear = nn.BatchNorm1d(4), nn.Linear(4, 4)
        self.reset_parameters()

    def reset_parameters(self):
        self.own = torch.arange(3.0)

class Drawn(nn.Module):
    # Draws weights again, as torchvision, timm and nanoGPT do
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(50, 40), nn.Linear(40, 50)
        self.head.weight = self.embedding.weight
        self.conv, self.norm = nn.Conv2d(3, 64, 3), nn.BatchNorm2d(64)
        self.small, self.orthogonal = nn.Linear(40, 40), nn.Linear(40, 40)
        self.truncated, self.scaled = nn.Linear(40, 40), nn.Linear(40, 40)
        self.usual = nn.Linear(40, 40)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        nn.init.zeros_(self.norm.weight)
        nn.init.normal_(self.small.weight, mean=0.0, std=0.002)
        nn.init.constant_(self.small.bias, 0.5)
        nn.init.orthogonal_(self.orthogonal.weight)
        nn.init.trunc_normal_(self.truncated.weight, std=0.02)
        with torch.no_grad():
            self.scaled.weight.mul_(0.1)

class Gate(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(4, 4)
        self.lstm.bias_hh_l0.data[4:8].fill_(1)

class Twins(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.load_state_dict(self.first.state_dict())

class SameTwins(Twins):
    def __init__(self):
        nn.Module.__init__(self)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.reset_parameters()

    def reset_parameters(self):
        self.second.load_state_dict(self.first.state_dict())

class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(32, 4, 64)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.attention = nn.MultiheadAttention(32, 4, add_bias_kv=True, kdim=16, vdim=8)

class Partial(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.norm = nn.Embedding(30, 16), nn.LayerNorm(16)
        self.head = nn.Linear(16, 30)
        self.apply(self._init_weights)

    def _init_weights(self, module):
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.02)
            nn.init.zeros_(module.bias)

def vision(width, depth=2):
    return Vision(width, depth)

def on_cpu():
    return nn.Linear(2, 2, device="cpu")

def given(how):
    if how == "from_pretrained":
        return nn.Embedding.from_pretrained(torch.rand(30, 16), freeze=False)
    if how == "_weight":
        return nn.Embedding(30, 16, _weight=torch.full((30, 16), 9.0))
    layer = nn.Linear(4, 4)
    if how == "parameter":
        layer.weight = nn.Parameter(torch.full((4, 4), 0.01))
    else:
        layer.weight.data = layer.weight.data * 0.02
    return layer

def nothing():
    return 3
"""


@pytest.fixture
def user_module(tmp_path, monkeypatch):
    """Creates a user's module `own` in the current folder."""
    (tmp_path / "own.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", list(sys.path))
    yield
    sys.modules.pop("own", None)


@pytest.mark.usefixtures("user_module")
def test_custom_builder():
    model = build(builder="own:vision", arguments={"width": 8})
    assert list(describe(model).blocks) == ["blocks.0", "blocks.1"]
    assert all(p.is_meta and p.dtype == torch.float32 for p in model.parameters())
    assert describe(model).vocabulary is None
    assert token_flops(model).at(16) == 0.0
    random_weights(model, CPU, CPU, seed=1)
    largest = model.blocks[0].linear.weight.abs().max().item()
    assert largest == pytest.approx(8**-0.5, rel=0.2), "must be initialized as by torch"
    assert torch.equal(model.blocks[1].norm.running_var, torch.ones(8))
    assert torch.equal(model.blocks[1].norm.weight, torch.ones(8))


@pytest.mark.usefixtures("user_module")
@pytest.mark.parametrize(
    ("builder", "arguments", "message"),
    [
        ("onw:vision", {}, "model.builder: there is no module onw; it must be in the current fold"),
        ("own:vison", {}, r"model.builder: own \(.*\) has no function vison; it has .*vision"),
        ("own:vision", {"widht": 3}, r"arguments: own:vision\(width, depth=2\) cannot .*width"),
        ("own:nothing", {}, "must return a torch.nn.Module; it returned int"),
        ("own:on_cpu", {}, "makes weight on a device; do not set one"),
        ("own:Half", {}, "Half leaves the parameter shift without a value: .*reset_parameters"),
        (
            "own:Copies",
            {},
            "the buffer first, the buffer second without a value: .*from parameters",
        ),
        (
            "own:Plain",
            {},
            r"inner.mask: a tensor in an attribute .*register_buffer\('mask', \.\.\.",
        ),
        ("own:Gate", {}, "__init__ writes to lstm.bias_hh_l0 in place, a part of it or from other"),
        ("own:Twins", {}, "__init__ writes to second.weight, second.bias in place, .*reset_parame"),
        *(
            ("own:given", {"how": how}, "__init__ gives weight values of its own, in a new param")
            for how in ("from_pretrained", "_weight", "parameter", "data")
        ),
        ("own:Large", {}, r"own:Large computes buffers in __init__.*which failed: RuntimeError"),
    ],
)
def test_invalid_builders_are_refused(builder, arguments, message):
    with pytest.raises(RecipeError, match=message):
        initialized(builder, arguments)


def initialized(builder, arguments=None, seed=1):
    """A model of a builder as a run on one rank initializes it."""
    section = Model(builder=builder, arguments=arguments)
    model = build_model(section, sequence_length=8)
    load, _, _ = starting_weights(section, model, seed=seed)
    load(model, CPU, CPU)
    return model


@pytest.mark.usefixtures("user_module")
def test_all_modules_without_an_initializer_are_in_one_message():
    with pytest.raises(RecipeError) as raised:
        build(builder="own:Several")
    (problem,) = raised.value.problems
    assert (
        "Several (scale) at the model; Bare (scale) at first, others.0, others.1 and 1 more. "
        in (problem)
    )


PLANNED = """
run: {name: own, max_steps: 2}
model: {builder: "own:Several"}
data: {builder: "own:nothing"}
batch: {global_batch_size: 8, micro_batch_size: 4}
"""


@pytest.mark.usefixtures("user_module")
def test_the_plan_names_the_modules_without_an_initializer(capsys):
    Path("own.yaml").write_text(PLANNED)
    assert main(["plan", "recipe=own.yaml", "gpu=cpu", "gpus=1"]) == 2
    printed = capsys.readouterr().err
    assert "Several (scale) at the model; Bare (scale) at first, others.0, others.1" in printed
    assert "Traceback" not in printed


@pytest.mark.usefixtures("user_module")
def test_buffers_have_the_values_of_an_eager_model():
    """They were lost: a mask of bools was true everywhere, without a word."""
    random_states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    model = initialized("own:Buffers", seed=7)
    assert torch.equal(torch.get_rng_state(), random_states[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == random_states[1:]
    with torch.random.fork_rng():
        torch.manual_seed(7)
        eager = import_module("own").Buffers()
    buffers = dict(model.named_buffers())
    assert (
        buffers.keys()
        == dict(eager.named_buffers()).keys()
        == {
            *("mask", "angles", "noise", "own", "norm.running_mean", "norm.running_var"),
            "norm.num_batches_tracked",
        }
    )
    for name, buffer in eager.named_buffers():
        assert torch.equal(buffers[name], buffer), name
    assert "mask" not in model.state_dict()


@pytest.mark.usefixtures("user_module")
def test_initializers_with_an_underscore_draw_as_an_eager_model():
    """`nn.MultiheadAttention` had "no reset_parameters()"."""
    model = initialized("own:Encoder")
    torch.manual_seed(1)
    eager = dict(import_module("own").Encoder().named_parameters())
    for name, parameter in model.named_parameters():
        expected = eager[name]
        if expected.unique().numel() == 1:
            assert torch.equal(parameter, expected), name
        else:
            rough = 0.5 if expected.numel() < 500 else 0.1
            assert parameter.std().item() == pytest.approx(expected.std().item(), rel=rough), name


@pytest.mark.usefixtures("user_module")
def test_what_constructors_draw_in_place_is_drawn_again():
    """It was lost without a word: torchvision's models had other weights than their own."""
    model, again = initialized("own:Drawn"), initialized("own:Drawn")
    eager = dict(import_module("own").Drawn().named_parameters())
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, again.get_parameter(name)), name
        expected = eager[name]
        if expected.unique().numel() == 1:
            assert torch.equal(parameter, expected), name
        elif expected.ndim > 1:
            assert parameter.std().item() == pytest.approx(expected.std().item(), rel=0.1), name
    weight = model.orthogonal.weight
    torch.testing.assert_close(weight @ weight.T, torch.eye(40), atol=1e-5, rtol=0)
    assert model.head.weight is model.embedding.weight
    assert nn.init.orthogonal_.__module__ == "torch.nn.init"


@pytest.mark.usefixtures("user_module")
def test_copies_in_reset_parameters_of_the_parent_are_kept():
    model = initialized("own:SameTwins")
    assert torch.equal(model.first.weight, model.second.weight)
    assert model.first.weight.std() > 0


@pytest.mark.usefixtures("user_module")
def test_init_weights_of_an_own_model_follows_the_constructors():
    """`_init_weights` of most models leaves norms and embeddings as torch made them."""
    model = initialized("own:Partial")
    assert torch.equal(model.norm.weight, torch.ones(16))
    assert 0.8 < model.embedding.weight.std() < 1.2
    assert 0.01 < model.head.weight.std() < 0.03
    assert torch.equal(model.head.bias, torch.zeros(30))


@pytest.mark.long
def test_building_a_model_imports_no_config_of_other_models():
    """The configs of all models take two seconds."""
    code = (
        "import sys\n"
        "from launcher.models.build import build_model\n"
        "from launcher.recipe.schema import Model\n"
        "build_model(Model(config={'model_type': 'llama', 'num_hidden_layers': 1}), sequence_length=8)\n"
        "print(sum('.configuration_' in name for name in sys.modules))"
    )
    printed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=REPOSITORY
    ).stdout
    assert int(printed) < 20
