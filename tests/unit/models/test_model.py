"""Building models, what is refused, and how weights are initialized."""

import sys

import pytest
import torch
from torch import nn

from launcher.errors import RecipeError
from launcher.models import philox
from launcher.models.build import (
    build_model,
    find_blocks,
    flops_per_token,
    recomputed_flops,
    vocabulary_size,
)
from launcher.models.initialization import initialize, materialize, random_weights
from launcher.recipe.schema import Model
from tests.unit.models.odd_model import Odd

LLAMA = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
CPU = torch.device("cpu")


def filled(config, seed=1):
    model = build_model(Model(config=config), sequence_length=16)
    random_weights(model, CPU, CPU, seed=seed)
    return model


def test_models_are_built_on_meta():
    model = build_model(Model(config=LLAMA), sequence_length=16)
    assert all(
        parameter.is_meta and parameter.dtype == torch.float32 for parameter in model.parameters()
    )
    assert list(find_blocks(model)) == ["model.layers.0", "model.layers.1"]
    assert vocabulary_size(model) == 64


@pytest.mark.parametrize(
    ("change", "length", "message"),
    [
        (
            {"num_attention_heads": 3},
            16,
            "model.config: transformers refuses it: .*number of attention heads",
        ),
        ({"hidden_act": "nonsense"}, 16, "model.config: transformers refuses it"),
        (
            {},
            65,
            "data.sequence_length: 65 is more than the 64 positions of the model; .*max_position_embeddings=65",
        ),
    ],
)
def test_refused(change, length, message):
    with pytest.raises(RecipeError, match=message):
        build_model(Model(config=LLAMA | change), sequence_length=length)


def test_unknown_attention_is_refused():
    with pytest.raises(RecipeError, match="nonsense"):
        build_model(Model(config=LLAMA, attention="nonsense"), sequence_length=16)


def test_weights_are_drawn_as_the_class_says():
    state = filled(LLAMA | {"initializer_range": 0.5}).state_dict()
    assert state["model.layers.0.self_attn.q_proj.weight"].std().item() == pytest.approx(
        0.5, rel=0.1
    )
    assert state["model.embed_tokens.weight"].std().item() == pytest.approx(0.5, rel=0.1)
    assert torch.equal(state["model.norm.weight"], torch.ones(32))


def test_weights_depend_on_seed_and_name_alone():
    first, again, other = (
        filled(LLAMA).state_dict(),
        filled(LLAMA).state_dict(),
        filled(LLAMA, seed=2).state_dict(),
    )
    deeper = filled(LLAMA | {"num_hidden_layers": 3}).state_dict()
    for name, tensor in first.items():
        assert torch.equal(tensor, again[name])
        assert torch.equal(tensor, deeper[name]), "another block changes nothing for the others"
        assert "norm" in name or not torch.equal(tensor, other[name])
    assert not torch.equal(
        first["model.layers.0.mlp.up_proj.weight"], first["model.layers.1.mlp.up_proj.weight"]
    )


def odd(seed=1, dtype=None):
    with torch.device("meta"):
        model = Odd()
    model.to(dtype)
    random_weights(model, CPU, CPU, seed=seed)
    return dict(model.named_parameters())


def test_first_values_of_every_kind():
    state = odd()
    for name, tensor in state.items():
        assert type(tensor) is nn.Parameter, name
        assert tensor.requires_grad
        assert torch.equal(tensor, odd()[name]), name
        assert name == "scalar" or not torch.equal(tensor, odd(seed=2)[name]), name
    assert (state["uniform"].min() >= -3, state["uniform"].max() <= -1) == (True, True)
    assert (state["cut"].std().item(), state["cut"].abs().max() < 0.1) == (
        pytest.approx(0.02, rel=0.05),
        True,
    )
    padded = state["padded"]
    assert (padded[3] == 0).all()
    assert (padded[-1] == 7).all()
    assert (padded[[0, 1, 2, 4, 5, 6, 7]] != 0).all()
    assert (state["scaled"].min().item(), state["scaled"].max().item()) == pytest.approx((0.9, 1.1))
    assert torch.allclose(state["orthogonal"] @ state["orthogonal"].T, torch.eye(6), atol=1e-5)
    assert (state["sorted"].diff() >= 0).all()
    assert state["scalar"].item() == 3
    assert state["doubled"].abs().max() > 3


def test_the_number_of_values_drawn_at_once_changes_nothing(monkeypatch):
    whole = odd()
    asked = []
    draw = philox.normal
    monkeypatch.setattr(philox, "numbers_at_once", lambda device: 37)
    monkeypatch.setattr(
        philox,
        "normal",
        lambda key, first, count, device: asked.append(count) or draw(key, first, count, device),
    )
    assert all(torch.equal(tensor, whole[name]) for name, tensor in odd().items())
    assert max(asked) == 37


def test_weights_in_fewer_bits_are_the_same_draw_rounded():
    whole = odd()
    assert all(
        torch.equal(tensor, whole[name].bfloat16())
        for name, tensor in odd(dtype=torch.bfloat16).items()
    )


def test_loaded_tensors_are_not_drawn():
    with torch.device("meta"):
        model = Odd()
    materialize(model, parameters=CPU, buffers=CPU)
    for parameter in model.parameters():
        parameter.data.fill_(5)
    initialize(model, seed=1, loaded={"normal", "cut", "padded", "scalar"})
    drawn = odd()
    for name, tensor in model.named_parameters():
        expected = (
            torch.full_like(tensor, 5)
            if name in ("normal", "cut", "padded", "scalar")
            else drawn[name]
        )
        assert torch.equal(tensor, expected), name


class Half(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.scale, self.shift = nn.Parameter(torch.ones(3)), nn.Parameter(torch.zeros(3))

    def reset_parameters(self):
        nn.init.ones_(self.scale)


def test_a_parameter_without_a_value_is_refused():
    with torch.device("meta"):
        model = Half()
    with pytest.raises(
        RecipeError,
        match=r"model: Half leaves the parameter shift without a value: .*compute it in reset_parameters",
    ):
        random_weights(model, CPU, CPU, seed=1)


def test_a_shared_parameter_is_drawn_once():
    """As after tie_weights of transformers: the first module's values, not those of the last."""
    with torch.device("meta"):
        model = nn.ModuleDict(
            {"first": nn.Embedding(6, 4, padding_idx=2), "second": nn.Linear(4, 6, bias=False)}
        )
    model["second"].weight = model["first"].weight
    random_weights(model, CPU, CPU, seed=1)
    assert model["first"].weight is model["second"].weight
    assert (model["first"].weight[2] == 0).all()
    assert model["first"].weight[0].abs().max() > 0.5, "as nn.Embedding draws, not as nn.Linear"


def test_tied_embeddings_stay_tied_and_rotary_buffers_are_those_of_from_config():
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LLAMA | {"tie_word_embeddings": True}
    model = filled(config)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    fields = {key: value for key, value in config.items() if key != "model_type"}
    expected = dict(LlamaForCausalLM(LlamaConfig(**fields)).named_buffers())
    assert expected
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, expected[name]), name


def test_gpt2_residual_projections_have_their_own_scale():
    """Its class draws them again, in the parent of the layer: drawing layer by layer would miss it."""
    config = {
        "model_type": "gpt2",
        "vocab_size": 64,
        "n_embd": 64,
        "n_layer": 8,
        "n_head": 4,
        "n_positions": 64,
    }
    state = filled(config).state_dict()
    assert state["transformer.h.3.mlp.c_proj.weight"].std().item() == pytest.approx(
        0.02 / (2 * 8) ** 0.5, rel=0.1
    )
    assert state["transformer.h.3.mlp.c_fc.weight"].std().item() == pytest.approx(0.02, rel=0.1)


def test_a_model_that_sets_buffers_of_its_blocks():
    """Falcon-H1 computes them once, in the code of the module around all blocks."""
    model = filled(LLAMA | {"model_type": "falcon_h1", "mamba_d_ssm": 64, "mamba_n_heads": 4})
    for layer in model.model.layers:
        assert torch.equal(layer.mamba.mup_vector, torch.ones_like(layer.mamba.mup_vector))


def test_flops():
    model = build_model(Model(config=LLAMA), sequence_length=16)
    parameters = sum(parameter.numel() for parameter in model.parameters()) - 64 * 32
    assert flops_per_token(model, sequence_length=16) == 6 * parameters + 12 * 2 * 32 * 16
    blocks = list(find_blocks(model).values())
    inside = sum(parameter.numel() for block in blocks for parameter in block.parameters())
    assert recomputed_flops(model, blocks, tokens=16) == 2 * inside + 4 * 2 * 32 * 16


def test_a_bert_from_a_config_is_refused_unless_it_is_a_decoder():
    bert = {
        "model_type": "bert",
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
    }
    with pytest.raises(
        RecipeError, match=r"model.config: bert is an encoder .*set model.config.is_decoder=true"
    ):
        build_model(Model(config=bert), sequence_length=16)
    assert find_blocks(build_model(Model(config=bert | {"is_decoder": True}), sequence_length=16))
    classifier = build_model(
        Model(config=bert, task="sequence_classification", num_labels=5), sequence_length=16
    )
    assert classifier.config.num_labels == 5


def test_an_attention_that_the_model_does_not_support(monkeypatch):
    from transformers import LlamaForCausalLM

    monkeypatch.setattr(LlamaForCausalLM, "_supports_sdpa", False)
    with pytest.raises(
        RecipeError, match=r"model.attention: transformers refuses it for this model; .*eager"
    ):
        build_model(Model(config=LLAMA), sequence_length=16)


def test_freeze():
    model = build_model(
        Model(config=LLAMA, freeze=("model.embed_tokens.*", "*.layers.0.*")), sequence_length=16
    )
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert not any("embed_tokens" in name or "layers.0." in name for name in trained)
    assert {"lm_head.weight", "model.norm.weight", "model.layers.1.mlp.up_proj.weight"} <= trained
    tied = build_model(
        Model(config=LLAMA | {"tie_word_embeddings": True}, freeze=("lm_head.weight",)),
        sequence_length=16,
    )
    assert not tied.model.embed_tokens.weight.requires_grad


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        (
            ("model.embed_token.weight",),
            "model.freeze: model.embed_token.weight matches no parameter; the nearest names are model.embed_t",
        ),
        (
            ("model.layers.0",),
            r"model.freeze: model.layers.0 matches no parameter; the nearest names are model.layers.0",
        ),
        (("*",), r"model.freeze: \* leaves no parameter to train, of 21"),
    ],
)
def test_freeze_refused(patterns, message):
    with pytest.raises(RecipeError, match=message):
        build_model(Model(config=LLAMA, freeze=patterns), sequence_length=16)


def test_flops_of_frozen_and_of_experts():
    sparse = LLAMA | {
        "model_type": "mixtral",
        "num_key_value_heads": 4,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    }
    model = build_model(Model(config=sparse), sequence_length=16)
    experts = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    others = sum(p.numel() for p in model.parameters()) - experts - 64 * 32
    assert (
        flops_per_token(model, sequence_length=16) == 6 * (others + experts / 4) + 12 * 2 * 32 * 16
    )
    frozen = build_model(Model(config=LLAMA, freeze=("lm_head.*",)), sequence_length=16)
    whole = build_model(Model(config=LLAMA), sequence_length=16)
    assert (
        flops_per_token(whole, sequence_length=16) - flops_per_token(frozen, sequence_length=16)
        == 2 * 64 * 32
    )


VISION = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.BatchNorm1d(width)
        self.linear = nn.Linear(width, width)

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

class Table(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.arange(3.0))
        self.linear = nn.Linear(2, 2)

def vision(width, depth=2):
    return Vision(width, depth)

def bare():
    return Bare()

def table():
    return Table()

def on_cpu():
    return nn.Linear(2, 2, device="cpu")

def nothing():
    return 3
"""


@pytest.fixture
def vision(tmp_path, monkeypatch):
    """A module of the user's own in the current folder."""
    (tmp_path / "own_vision.py").write_text(VISION)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", list(sys.path))
    yield
    sys.modules.pop("own_vision", None)


@pytest.mark.usefixtures("vision")
def test_a_builder_of_ones_own():
    model = build_model(
        Model(builder="own_vision:vision", arguments={"width": 8}), sequence_length=16
    )
    blocks = find_blocks(model)
    assert list(blocks) == ["blocks.0", "blocks.1"]
    assert all(
        parameter.is_meta and parameter.dtype == torch.float32 for parameter in model.parameters()
    )
    assert vocabulary_size(model) is None
    assert flops_per_token(model, sequence_length=16) == 0.0
    random_weights(model, CPU, CPU, seed=1)
    assert model.blocks[0].linear.weight.abs().max().item() == pytest.approx(
        8**-0.5, rel=0.2
    )  # as torch initializes it
    assert torch.equal(model.blocks[1].norm.running_var, torch.ones(8))
    assert torch.equal(model.blocks[1].norm.weight, torch.ones(8))


@pytest.mark.usefixtures("vision")
@pytest.mark.parametrize(
    ("builder", "arguments", "message"),
    [
        (
            "own_vison:vision",
            {},
            "model.builder: there is no module own_vison; it must be in the current folder",
        ),
        (
            "own_vision:vison",
            {},
            r"model.builder: own_vision \(.*\) has no function vison; it has .*vision",
        ),
        (
            "own_vision:vision",
            {"widht": 3},
            r"model.arguments: own_vision:vision\(width, depth=2\) cannot be called with them: .*width",
        ),
        ("own_vision:nothing", {}, "must return a torch.nn.Module; it returned int"),
        ("own_vision:on_cpu", {}, "makes weight on a device; do not set one"),
    ],
)
def test_builder_refused(builder, arguments, message):
    with pytest.raises(RecipeError, match=message):
        build_model(Model(builder=builder, arguments=arguments), sequence_length=16)


@pytest.mark.usefixtures("vision")
@pytest.mark.parametrize(
    ("builder", "message"),
    [
        ("own_vision:bare", r"the model \(Bare\) has parameters and no reset_parameters\(\)"),
        (
            "own_vision:table",
            "leaves the buffer table without a value: models are built on the meta device",
        ),
    ],
)
def test_a_builders_parameter_without_a_value(builder, message):
    model = build_model(Model(builder=builder), sequence_length=16)
    with pytest.raises(RecipeError, match=message):
        random_weights(model, CPU, CPU, seed=1)
