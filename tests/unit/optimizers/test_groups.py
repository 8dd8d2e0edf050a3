"""Learning rates and weight decays of some of the parameters."""

import copy

import pytest
import torch
import transformers

from launcher.errors import RecipeError
from launcher.models.description import describe
from launcher.optimizers.groups import decays_of, describe_groups, ratios_of
from launcher.optimizers.optimizer import make_optimizer
from launcher.recipe.schema import Optimizer, ParameterGroup
from tests.unit.models.recurrent_families import BASE
from tests.unit.models.test_causal_models import build
from tests.unit.models.test_tiled_mlp import small

GROUPS = (
    ParameterGroup(patterns=("*.embed_tokens.*", "*.layers.0.mlp.*"), learning_rate_ratio=0.25),
    ParameterGroup(patterns=("*.layers.0.*", "*norm*"), learning_rate_ratio=4.0, weight_decay=0.5),
)
OPTIMIZERS = {
    "adamw": {},
    "sgd": {"momentum": 0.5},
    "adafactor": {},
    "muon": {},
    "bfloat16": {"name": "adamw", "state_dtype": "bfloat16"},
    "int8": {"name": "adamw", "state_dtype": "int8"},
}


def expected_of(name):
    """Ratio and weight decay by hand; None: that of all else."""
    if "embed_tokens" in name or "layers.0.mlp." in name:
        return 0.25, None
    if "layers.0." in name or "norm" in name:
        return 4.0, None if "norm" in name else 0.5
    return 1.0, None


def trained(model, section, **options):
    made = make_optimizer(model, section, blocks=describe(model).blocks.values(), **options)
    made.grad_scale = None  # type: ignore[attr-defined]
    made.found_inf = torch.zeros(())  # type: ignore[attr-defined]
    for group in made.param_groups:
        group["lr"] = section.learning_rate * group["ratio"]
    torch.manual_seed(4)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    made.step()
    return {name: p.detach() for name, p in model.named_parameters()}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_group_is_trained_as_by_an_optimizer_with_its_values(name):
    model = small("llama")
    options = {"name": name, "learning_rate": 0.01, "weight_decay": 0.1} | OPTIMIZERS[name]

    def alone(ratio, decay):
        section = Optimizer(**{**options, "learning_rate": 0.01 * ratio, "weight_decay": decay})
        return trained(copy.deepcopy(model), section)

    section = Optimizer(**options, groups=GROUPS)
    ratios, decays = ratios_of(model, section), decays_of(model, section)
    found = trained(copy.deepcopy(model), section, ratios=ratios, decays=decays)
    references = {key: alone(*key) for key in ((1.0, 0.1), (0.25, 0.1), (4.0, 0.5), (4.0, 0.1))}
    for key, value in found.items():
        ratio, decay = expected_of(key)
        expected = references[ratio, 0.1 if decay is None else decay][key]
        torch.testing.assert_close(value, expected, rtol=1e-6, atol=1e-7, msg=key)
        assert ratios.get(key, 1.0) == ratio
        assert decays.get(key) == decay


HEIGHTS = {
    "llama": {"model.embed_tokens.weight": 3, "model.layers.0.": 2, "model.layers.1.": 1,
              "model.norm.weight": 0, "lm_head.weight": 0},
    "gpt2": {"transformer.wte.weight": 3, "transformer.wpe.weight": 3, "transformer.h.0.": 2,
             "transformer.h.1.": 1, "transformer.ln_f.": 0},
}  # fmt: skip


@pytest.mark.parametrize("kind", HEIGHTS)
def test_learning_rates_decay_from_block_to_block(kind):
    """Each with the ratios of a group, whose product counts."""
    model = build(kind)
    assert len(describe(model).blocks) == 2
    norm = next(name for name in HEIGHTS[kind] if "norm" in name or "ln_f" in name)
    groups = (ParameterGroup(patterns=(f"{norm}*",), learning_rate_ratio=0.5),)
    ratios = ratios_of(model, Optimizer(layer_decay=0.8, groups=groups))
    for name, _ in model.named_parameters():
        start = next(start for start in HEIGHTS[kind] if name.startswith(start))
        expected = 0.8 ** HEIGHTS[kind][start] * (0.5 if start == norm else 1.0)
        assert ratios.get(name, 1.0) == pytest.approx(expected, abs=1e-12), name


def test_what_has_which_values_is_said():
    model = build("llama")
    model.lm_head.weight.requires_grad_(False)
    section = Optimizer(weight_decay=0.1, groups=GROUPS[1:])
    lines = list(describe_groups(model, section, ratios_of(model, section)))
    assert [line.split(" parameters, ")[0].rpartition(": ")[0] for line in lines] == [
        "optimizer: learning rate x 1, weight decay 0.1",
        "optimizer: learning rate x 4, weight decay 0.5",
        "optimizer: learning rate x 4, weight decay 0",
    ]
    assert lines[0].endswith("model.embed_tokens.weight and 7 more")
    assert not list(describe_groups(model, Optimizer(), {}))


def test_of_many_learning_rates_the_first_and_the_last_are_said():
    config = transformers.AutoConfig.for_model("llama", **(BASE | {"num_hidden_layers": 9}))
    model = transformers.AutoModelForCausalLM.from_config(config)
    section = Optimizer(layer_decay=0.5)
    # Of each block matrices and norms; embedding; the last norm and the head
    every, ratios = 9 * 2 + 3, ratios_of(model, section)
    lines = list(describe_groups(model, section, ratios))
    assert len(lines) == 13
    assert lines[6] == f"optimizer: ... {every - 12} more, by their layers"
    assert lines[0].endswith("model.embed_tokens.weight")
    assert lines[-1].endswith("lm_head.weight")


@pytest.mark.parametrize(
    ("groups", "problem"),
    [
        ([{"patterns": ("*.layer.*",), "weight_decay": 0}],
         r"optimizer.groups\[0\].patterns\[0\]: \*.layer.\* matches no parameter; the nearest names"),
        ([{"patterns": ("*norm*", "lm_head*"), "learning_rate_ratio": 2}],
         r"optimizer.groups\[0\].patterns\[1\]: lm_head\* matches frozen parameters only, such as"),
        ([{"patterns": ("*",), "learning_rate_ratio": 2}, {"patterns": ("*norm*",), "weight_decay": 0}],
         r"optimizer.groups\[1\].patterns\[0\]: \*norm\* matches parameters of earlier groups only"),
        ([{"patterns": ("*norm*",), "weight_decay": 0.1}],
         r"optimizer.groups\[0\].weight_decay: no matrix is in this group"),
    ],
)  # fmt: skip
def test_groups_without_an_effect_are_refused(groups, problem):
    model = build("llama")
    model.lm_head.weight.requires_grad_(False)
    section = Optimizer(groups=tuple(ParameterGroup(**group) for group in groups))
    with pytest.raises(RecipeError, match=problem):
        decays_of(model, section)


def test_layer_decay_needs_blocks():
    with pytest.raises(RecipeError, match=r"optimizer.layer_decay: Linear names no blocks"):
        ratios_of(torch.nn.Linear(2, 2), Optimizer(layer_decay=0.9))
