"""Tests of learning rate schedules, the float16 loss scale, weight decay and optimizers."""

import copy
import dataclasses
import functools
import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from transformers import Trainer
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from launcher.errors import RecipeError
from launcher.optimizers.average import averages_in_place, update_averages
from launcher.optimizers.matrices import decayed_parameters
from launcher.optimizers.muon import newton_schulz, product_dtype
from launcher.optimizers.optimizer import LossScale, learning_rate, make_optimizer
from launcher.recipe import schema
from tests.unit.models.test_causal_models import build

QUARTER = 0.1 + 0.9 * (1 + math.sqrt(0.5)) / 2
"""A cosine decay from 1 to 0.1, after a quarter of its steps."""

# Ten steps, peak 1, min_ratio 0.1: {step: learning rate}
RATES = [
    ("cosine", 2, None, {1: 0.5, 2: 1.0, 4: QUARTER, 6: 0.55, 8: 1.1 - QUARTER, 10: 0.1}),
    ("linear", 2, None, {1: 0.5, 2: 1.0, 4: 0.775, 6: 0.55, 8: 0.325, 10: 0.1}),
    ("constant", 2, None, {1: 0.5, 2: 1.0, 3: 1.0, 10: 1.0}),
    ("wsd", 2, 4, {1: 0.5, 2: 1.0, 6: 1.0, 7: 0.775, 8: 0.55, 9: 0.325, 10: 0.1}),
    ("wsd", 2, None, {1: 0.5, 2: 1.0, 9: 1.0, 10: 0.1}),  # decay over a tenth of the run
    ("wsd", 2, 20, {1: 0.5, 2: 1.0, 6: 0.55, 10: 0.1}),  # decay longer than the run: same as linear
    ("cosine", 0, None, {1: 1.0, 4: 0.1 + 0.9 * (1 + math.cos(math.pi / 3)) / 2, 10: 0.1}),
    ("linear", 0, None, {1: 1.0, 4: 0.7, 10: 0.1}),
    ("constant", 0, None, {1: 1.0, 10: 1.0}),
    ("wsd", 0, 2, {1: 1.0, 8: 1.0, 9: 0.55, 10: 0.1}),
    ("cosine", 10, None, {1: 0.1, 5: 0.5, 10: 1.0}),  # warm-up over the whole run
    # Warm-up longer than the run
    *(
        (kind, 100, None, {1: 0.01, 5: 0.05, 10: 0.1})
        for kind in ("cosine", "linear", "constant", "wsd")
    ),
]


@pytest.mark.parametrize(("kind", "warmup", "decay", "rates"), RATES)
def test_learning_rate(kind, warmup, decay, rates):
    schedule = schema.Schedule(kind=kind, warmup_steps=warmup, min_ratio=0.1, decay_steps=decay)
    for peak in (1.0, 3e-4):
        rate_at = learning_rate(schedule, peak=peak, steps=10)
        assert {step: rate_at(step) for step in rates} == pytest.approx(
            {step: peak * rate for step, rate in rates.items()}
        )
    once = learning_rate(dataclasses.replace(schedule, warmup_steps=0), peak=2.0, steps=1)
    assert once(1) == pytest.approx(2.0), "a run of one step"


@pytest.mark.parametrize(
    ("ratio", "steps", "warmup"), [(0.1, 10, 1), (0.03, 1001, 31), (1.0, 7, 7)]
)
def test_warm_up_by_a_ratio_is_that_of_transformers(ratio, steps, warmup):
    from transformers import TrainingArguments

    schedule = schema.Schedule(warmup_ratio=ratio, min_ratio=0.1)
    if ratio < 1:  # transformers reads 1 as one step
        arguments = TrainingArguments(output_dir="unused", warmup_steps=ratio)
        assert arguments.get_warmup_steps(steps) == warmup
    by_steps = learning_rate(
        schema.Schedule(warmup_steps=warmup, min_ratio=0.1), peak=2.0, steps=steps
    )
    by_ratio = learning_rate(schedule, peak=2.0, steps=steps)
    assert [by_ratio(step) for step in range(1, steps + 1)] == [
        by_steps(step) for step in range(1, steps + 1)
    ]


def test_loss_scale_after_skipped_and_good_steps():
    scale, off = (LossScale(torch.device("cpu"), enabled=enabled) for enabled in (True, False))
    assert scale.value.item() == 65536.0
    for skipped, times, expected in (
        (1.0, 1, 32768),
        (1.0, 3, 4096),
        (0.0, 1999, 4096),
        (0.0, 1, 8192),
        (0.0, 1000, 8192),
        (1.0, 1, 4096),
        (0.0, 1999, 4096),  # the good steps before the skipped one do not count
        (0.0, 1, 8192),
    ):
        for _ in range(times):
            scale.update(torch.tensor(skipped))
            off.update(torch.tensor(skipped))
        assert scale.value.item() == expected
    assert off.value.item() == 1.0


def test_weight_decay_applies_only_to_matrices():
    model = nn.Sequential(
        nn.Embedding(5, 4), nn.LayerNorm(4), nn.Linear(4, 3), nn.Linear(3, 3, bias=False)
    )
    model[3].weight.requires_grad_(False)
    section = schema.Optimizer(learning_rate=0.1, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.5)
    optimizer = make_optimizer(model, section)
    matrices, vectors = optimizer.param_groups
    assert matrices["param_names"] == ["0.weight", "2.weight"]
    assert vectors["param_names"] == ["1.weight", "1.bias", "2.bias"]
    expected = {"lr": 0.1, "betas": (0.8, 0.9), "eps": 1e-6, "fused": True}
    assert expected.items() <= matrices.items()
    assert expected.items() <= vectors.items()
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for name, parameter in model.named_parameters():
        factor = 0.95 if name in matrices["param_names"] else 1
        torch.testing.assert_close(parameter, before[name] * factor)
    for module in (nn.Linear(2, 2, bias=False), nn.LayerNorm(2)):
        assert len(make_optimizer(module, section).param_groups) == 1


class HeadsRMSNorm(nn.Module):
    """A norm with a row for each head, as in Cohere's models."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 4))


class Experts(nn.Module):
    """Stacked experts, as in gpt-oss."""

    def __init__(self):
        super().__init__()
        self.up_proj = nn.Parameter(torch.ones(3, 4, 4))
        self.up_proj_bias = nn.Parameter(torch.ones(3, 4))


class Mixer(nn.Module):
    """A layer of a state-space model, as in Mamba, and the parameters of other models."""

    def __init__(self):
        super().__init__()
        self.A_log = nn.Parameter(torch.ones(4, 3))
        self.D = nn.Parameter(torch.ones(2, 4))
        self.a, self.d = (nn.Parameter(torch.ones(4, 2)) for _ in range(2))
        self.conv1d = nn.Conv1d(4, 4, 2, groups=4)
        self.conv_grouped = nn.Conv1d(4, 4, 2, groups=2)
        self.time_mix = nn.Parameter(torch.ones(1, 1, 4))
        self.q_norm = HeadsRMSNorm()
        self.scaled = nn.Module()
        self.scaled.scale = nn.Parameter(torch.ones(2, 4))
        self.relative_attention_bias = nn.Embedding(3, 2)
        self.in_proj = nn.Linear(4, 4)
        self.gate = nn.Linear(4, 1)
        self.experts = Experts()


def test_what_is_a_matrix_is_decided_by_name_and_module():
    model = nn.Module()
    model.embed_tokens, model.layers = nn.Embedding(5, 4), nn.ModuleList([Mixer()])
    expected = {
        "embed_tokens.weight",
        "layers.0.a",
        "layers.0.d",
        "layers.0.conv_grouped.weight",
        "layers.0.in_proj.weight",
        "layers.0.gate.weight",
        "layers.0.experts.up_proj",
    }
    for name in ("adamw", "muon"):
        made = make_optimizer(model, schema.Optimizer(name=name), blocks=[model.layers[0]])
        groups = made.param_groups
        decayed = {n for group in groups if group["weight_decay"] for n in group["param_names"]}
        assert decayed == expected
        orthogonalized = {
            n for group in groups if group["orthogonalize"] for n in group["param_names"]
        }
        if name == "muon":
            own = {"layers.0.a", "layers.0.d"}
            assert orthogonalized == own | {"layers.0.in_proj.weight", "layers.0.experts.up_proj"}


DECAYED_BY_TRANSFORMERS = {
    # Decay rates and skips of state-space models, which their authors do not decay
    "A_log", "D",
    # Scales of single features, and one vector in several dimensions
    "scale", "b1", "b2", "probe", "global_img_feature_extensor", "sub_img_feature_extensor",
    "time_mix_key", "time_mix_receptance", "time_mix_value",
}  # fmt: skip
"""Parameters of two or more dimensions that only transformers decays."""


@pytest.mark.long
def test_weight_decay_of_all_models_is_that_of_transformers():
    """Of vectors transformers decays those whose names have neither bias nor norm; launcher none."""
    differences, models = set(), 0
    for model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        try:
            model = build(model_type)
        except Exception:  # no causal model, or its default config is invalid
            continue
        models += 1
        parameters = dict(model.named_parameters())
        theirs = {
            name
            for name in Trainer.get_decay_parameter_names(None, model)
            if name in parameters and parameters[name].ndim > 1
        }
        ours = decayed_parameters(model).keys()
        for name in theirs ^ ours:
            module, last = model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]
            depthwise = last == "weight" and isinstance(module, nn.Conv1d | nn.Conv2d)
            # axk2 has linear layers inside a norm, which transformers knows by the name
            linear = name in ours and isinstance(module, nn.Linear)
            if not linear and not (depthwise and module.weight.shape[1] == 1):
                differences.add(last)
    assert differences == DECAYED_BY_TRANSFORMERS
    assert models > 140


def run_equal_steps(optimizer, reference_optimizers, model, reference_model, steps):
    """Run steps with equal random gradients. The gradients of `optimizer` are scaled by 4."""
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(4.0), torch.zeros(())
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        for a, b in zip(model.parameters(), reference_model.parameters(), strict=True):
            b.grad = torch.randn(a.shape, generator=generator) * 0.1
            a.grad = b.grad * 4
        for one in (optimizer, *reference_optimizers):
            one.step()


@pytest.mark.parametrize(
    ("name", "reference_class"),
    [
        ("adafactor", torch.optim.Adafactor),
        ("sgd", functools.partial(torch.optim.SGD, momentum=0.9)),
    ],
)
def test_adafactor_and_sgd_match_torch(name, reference_class):
    """One parameter has three dimensions."""
    torch.manual_seed(0)
    model = nn.Linear(6, 7)
    model.experts = nn.Parameter(torch.randn(3, 4, 5))
    reference_model = copy.deepcopy(model)
    optimizer = make_optimizer(model, schema.Optimizer(name=name, learning_rate=0.05))
    groups = [
        {"params": [reference_model.experts, reference_model.weight], "weight_decay": 0.1},
        {"params": [reference_model.bias], "weight_decay": 0.0},
    ]
    run_equal_steps(optimizer, [reference_class(groups, lr=0.05)], model, reference_model, 8)
    for a, b in zip(model.parameters(), reference_model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
    plain = make_optimizer(model, schema.Optimizer(name="sgd", momentum=0.0))
    assert not plain.state[model.weight]


def test_muon_matches_torch():
    """Muon applies to matrices of blocks, AdamW to all other parameters.

    The tolerance for Muon is larger because torch iterates in bfloat16.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(5, 24), nn.Sequential(nn.Linear(24, 40), nn.Linear(40, 24)))
    reference_model = copy.deepcopy(model)
    optimizer = make_optimizer(
        model,
        schema.Optimizer(name="muon", momentum=0.95, learning_rate=0.01),
        blocks=[model[1]],
    )
    matrices = [p for p in reference_model[1].parameters() if p.ndim == 2]
    vectors = [p for p in reference_model[1].parameters() if p.ndim == 1]
    reference_optimizers = [
        torch.optim.Muon(matrices, lr=0.01, momentum=0.95, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(
            reference_model[0].parameters(), lr=0.01, betas=(0.9, 0.95), weight_decay=0.1
        ),
        torch.optim.AdamW(vectors, lr=0.01, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    before = copy.deepcopy(model)
    run_equal_steps(optimizer, reference_optimizers, model, reference_model, 4)
    parameters = zip(
        model.parameters(), reference_model.parameters(), before.parameters(), strict=True
    )
    for a, b, start in parameters:
        moved = (a - start).norm()
        assert (a - b).norm() < (0.02 if a.ndim == 2 and a.shape[0] > 5 else 1e-5) * moved
    assert set(optimizer.state[model[1][0].weight]) == {"momentum_buffer"}
    assert set(optimizer.state[model[0].weight]) == {"step", "exp_avg", "exp_avg_sq"}
    with pytest.raises(RecipeError, match=r"optimizer.name: muon: the model has no matrix in a"):
        make_optimizer(model, schema.Optimizer(name="muon"))


@pytest.mark.parametrize("shape", [(6, 4), (4, 6), (3, 6, 4)])
def test_muon_makes_matrices_nearly_orthogonal(shape):
    """A tensor with three dimensions is a stack of experts, with one matrix each."""
    matrices = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    separate = [newton_schulz(one.clone()) for one in matrices] if len(shape) == 3 else []
    found = newton_schulz(matrices)
    values = torch.linalg.svdvals(found)
    assert 0.6 < values.min() < values.max() < 1.3
    for one, other in zip(separate, found, strict=False):
        torch.testing.assert_close(one, other)


def published_iterations(matrix, dtype):
    """Newton-Schulz as Jordan published it: the wide matrix is normalized and iterated in one dtype."""
    x = matrix.to(dtype)
    x = x.mT if x.shape[0] > x.shape[1] else x
    x = x / (x.norm() + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return (x.mT if matrix.shape[0] > matrix.shape[1] else x).float()


@pytest.mark.parametrize("shape", [(96, 64), (64, 96), (128, 512), (3, 96, 64)])
def test_muon_iterates_as_published(shape):
    matrices = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    stack = matrices if matrices.ndim == 3 else matrices[None]
    results = {}
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 5e-2)):
        given = matrices.clone()
        found = results[dtype] = newton_schulz(given, dtype)
        assert found.dtype == torch.float32
        assert found.shape == matrices.shape
        assert found.is_contiguous()
        for one, matrix in zip(found.view_as(stack), stack, strict=True):
            wanted = published_iterations(matrix, dtype)
            assert (one - wanted).norm() < tolerance * wanted.norm()
            assert 0.6 < torch.linalg.svdvals(one).min() < torch.linalg.svdvals(one).max() < 1.3
    # Sums are rounded once, so that the errors are half of those of the published operators
    exact = results[torch.float32].view_as(stack)
    published = torch.stack([published_iterations(matrix, torch.bfloat16) for matrix in stack])
    error = (results[torch.bfloat16].view_as(stack) - exact).norm()
    assert 0 < error < 0.7 * (published - exact).norm()
    assert error < 2e-2 * exact.norm()
    assert torch.equal(newton_schulz(matrices.clone()), results[torch.float32]), "on CPUs"


def test_muon_multiplies_in_bfloat16_on_gpus(monkeypatch):
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    for precision, of_gpu in (("high", torch.bfloat16), ("highest", torch.float32)):
        monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda p=precision: p)
        assert product_dtype(gpu) == of_gpu
        assert product_dtype(cpu) == torch.float32


def test_ratio_of_learning_rates_holds_when_that_of_adafactor_has_fallen():
    """Its rate is at most 1 / sqrt(steps)."""
    model = nn.ModuleDict({name: nn.Linear(4, 4, bias=False) for name in ("lora_A", "lora_B")})
    model.load_state_dict(dict.fromkeys(model.state_dict(), torch.eye(4)))
    wrapped = nn.ModuleDict({"layer": model})
    section = schema.Optimizer(name="adafactor", learning_rate=0.1, weight_decay=0.0)
    optimizer = make_optimizer(wrapped, section, ratios={"layer.lora_B.weight": 8.0})
    for parameter in wrapped.parameters():
        parameter.grad = torch.ones_like(parameter)
        optimizer.state[parameter]["step"].fill_(1e6)
    for group in optimizer.param_groups:
        group["lr"] = 0.1 * group["ratio"]
    optimizer.step()
    changes = [(part.weight.detach() - torch.eye(4)).abs().max() for part in model.values()]
    assert changes[1] / changes[0] == pytest.approx(8.0, rel=1e-4)


@pytest.mark.parametrize("name", ["adamw", "sgd", "adafactor", "muon"])
def test_skipped_step_changes_nothing(name):
    """This includes the first step, which creates the optimizer state."""
    model = nn.Linear(3, 4)
    section = schema.Optimizer(name=name, learning_rate=0.1)
    optimizer = make_optimizer(model, section, blocks=[model])
    before = [p.detach().clone() for p in model.parameters()]
    for gradient, found_inf in ((torch.nan, 1.0), (torch.inf, 1.0), (1.0, 0.0)):
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, gradient)
        optimizer.found_inf = torch.tensor(found_inf)  # type: ignore[attr-defined]
        optimizer.step()
        if found_inf:
            assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
            states = (value for state in optimizer.state.values() for value in state.values())
            assert not any(value.any() for value in states)
    assert all((p < b).all() for p, b in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize("name", ["adamw", "sgd", "adafactor", "muon", "int8"])
def test_averages_of_weights_are_those_of_torch(name):
    """The average starts with the initial weights, for which torch needs an update before the first
    step. A skipped step does not change it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(5, 24), nn.Sequential(nn.Linear(24, 40), nn.Linear(40, 24)))
    dtype = {"state_dtype": "int8", "name": "adamw"} if name == "int8" else {"name": name}
    section = schema.Optimizer(learning_rate=0.05, ema=0.9, **dtype)
    optimizer: Any = make_optimizer(model, section, blocks=[model[1]])
    expected = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    expected.update_parameters(model)
    first = [parameter.detach().clone() for parameter in model.parameters()]
    for step in range(5):
        skipped = step == 3
        optimizer.grad_scale, optimizer.found_inf = None, torch.tensor(float(skipped))
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
        update_averages(optimizer, 0.9)
        if not skipped:
            expected.update_parameters(model)
    trained = [parameter.detach().clone() for parameter in model.parameters()]
    with averages_in_place(optimizer):
        for parameter, before, wanted in zip(
            model.parameters(), first, expected.module.parameters(), strict=True
        ):
            torch.testing.assert_close(parameter, wanted, rtol=1e-6, atol=1e-7)
            assert not torch.equal(parameter, before)
    assert all(map(torch.equal, model.parameters(), trained))
    assert optimizer.state[model[0].weight]["ema"].dtype == torch.float32


def lion_step(weights, gradient, momentum, *, lr, betas, weight_decay):
    """Algorithm 2 of Chen et al. (2023), line by line."""
    direction = torch.sign(betas[0] * momentum + (1 - betas[0]) * gradient)
    weights = weights - lr * (direction + weight_decay * weights)
    return weights, betas[1] * momentum + (1 - betas[1]) * gradient


def test_lion_is_the_published_algorithm():
    torch.manual_seed(0)
    model = nn.Linear(6, 7)
    section = schema.Optimizer(name="lion", learning_rate=0.01, betas=(0.9, 0.99), weight_decay=0.3)
    optimizer: Any = make_optimizer(model, section)
    assert {key for state in optimizer.state.values() for key in state} == {"exp_avg"}
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(4.0), torch.zeros(())
    expected = {p: (p.detach().clone(), torch.zeros_like(p)) for p in model.parameters()}
    generator = torch.Generator().manual_seed(1)
    for step in range(20):
        optimizer.found_inf.fill_(step == 5)  # a step that is skipped
        for p, (weights, momentum) in expected.items():
            gradient = torch.randn(p.shape, generator=generator) * 0.1
            p.grad = gradient * (math.inf if step == 5 else 4)
            if step != 5:
                decay = 0.3 if p.ndim == 2 else 0.0
                expected[p] = lion_step(
                    weights, gradient, momentum, lr=0.01, betas=(0.9, 0.99), weight_decay=decay
                )
        optimizer.step()
    for p, (weights, momentum) in expected.items():
        torch.testing.assert_close(p.detach(), weights, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(optimizer.state[p]["exp_avg"], momentum, rtol=1e-6, atol=1e-6)


# AdamWScheduleFree of schedulefree 1.4.1 (foreach=False), which `tests/unit/optimizers/
# schedule_free_reference.py` runs: the trained weights y and the averages x after 12 steps
SCHEDULE_FREE = {
    "y": [
        0.0061421338,
        0.99163043,
        -0.26143464,
        -0.92312759,
        0.4993279,
        0.79766083,
        -0.70868117,
        -0.61868638,
    ],
    "x": [
        0.0049624592,
        0.99292547,
        -0.26059178,
        -0.92464584,
        0.49887431,
        0.79930198,
        -0.70832896,
        -0.62006038,
    ],
}


def test_schedule_free_adamw_is_that_of_its_authors():
    """Warm-up over four steps, one of which has a gradient that is not finite and is skipped."""
    model, optimizer = schedule_free_run()
    weights = list(model.parameters())
    found = {
        "y": torch.cat([p.detach().flatten() for p in weights]),
        "x": torch.cat([optimizer.state[p]["ema"].flatten() for p in weights]),
    }
    for name, expected in SCHEDULE_FREE.items():
        torch.testing.assert_close(found[name], torch.tensor(expected), rtol=1e-6, atol=1e-6)
    with averages_in_place(optimizer):
        averaged = torch.cat([p.detach().flatten() for p in weights])
    assert torch.equal(averaged, found["x"])


def schedule_free_run():
    rates = [0.01 * min(1.0, (step + 1) / 4) for step in range(12)]
    weights, gradients = schedule_free_inputs()
    model = nn.Linear(3, 2)
    with torch.no_grad():
        for p, values in zip(model.parameters(), weights, strict=True):
            p.copy_(values)
    section = schema.Optimizer(
        name="schedule_free_adamw", betas=(0.9, 0.95), weight_decay=0.1, learning_rate=1.0
    )
    optimizer: Any = make_optimizer(model, section)
    optimizer.grad_scale = torch.tensor(4.0)
    for rate, each in zip(rates, gradients, strict=True):
        for skipped in (True, False):
            optimizer.found_inf = torch.tensor(float(skipped))
            for group in optimizer.param_groups:
                group["lr"] = rate
            for p, gradient in zip(model.parameters(), each, strict=True):
                p.grad = gradient * (math.nan if skipped else 4)
            optimizer.step()
    return model, optimizer


def schedule_free_inputs():
    """Weights, and the gradients of each step: numbers that need no generator."""
    numbers = torch.arange(8 * 13, dtype=torch.float32)
    rows = torch.sin(numbers * 1.7).view(13, 8)
    split = [(row[:6].view(2, 3), row[6:]) for row in rows]
    return split[0], split[1:]
