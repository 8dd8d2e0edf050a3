"""The learning rate over the run, the loss scale of float16, and what weight decay applies to."""

import math

import pytest
import torch
from torch import nn

from launcher.recipe import schema
from launcher.training.optimizer import LossScale, learning_rate, make_optimizer

QUARTER = 0.1 + 0.9 * (1 + math.sqrt(0.5)) / 2
"""Cosine from 1 to 0.1 after a quarter of the way."""

# Ten steps, peak 1, min_ratio 0.1: {step: learning rate}
RATES = [
    ("cosine", 2, None, {1: 0.5, 2: 1.0, 4: QUARTER, 6: 0.55, 8: 1.1 - QUARTER, 10: 0.1}),
    ("linear", 2, None, {1: 0.5, 2: 1.0, 4: 0.775, 6: 0.55, 8: 0.325, 10: 0.1}),
    ("constant", 2, None, {1: 0.5, 2: 1.0, 3: 1.0, 10: 1.0}),
    ("wsd", 2, 4, {1: 0.5, 2: 1.0, 6: 1.0, 7: 0.775, 8: 0.55, 9: 0.325, 10: 0.1}),
    ("wsd", 2, None, {1: 0.5, 2: 1.0, 9: 1.0, 10: 0.1}),  # a tenth of the run
    ("wsd", 2, 20, {1: 0.5, 2: 1.0, 6: 0.55, 10: 0.1}),  # longer than the run: as linear
    ("cosine", 0, None, {1: 0.1 + 0.9 * (1 + math.cos(math.pi / 10)) / 2, 5: 0.55, 10: 0.1}),
    ("linear", 0, None, {1: 0.91, 5: 0.55, 10: 0.1}),
    ("constant", 0, None, {1: 1.0, 10: 1.0}),
    ("wsd", 0, 2, {1: 1.0, 8: 1.0, 9: 0.55, 10: 0.1}),
    ("cosine", 10, None, {1: 0.1, 5: 0.5, 10: 1.0}),  # warm-up to the end
    *(
        (kind, 100, None, {1: 0.01, 5: 0.05, 10: 0.1})
        for kind in ("cosine", "linear", "constant", "wsd")
    ),  # and beyond
]


@pytest.mark.parametrize(("kind", "warmup", "decay", "rates"), RATES)
def test_learning_rate(kind, warmup, decay, rates):
    schedule = schema.Schedule(kind=kind, warmup_steps=warmup, min_ratio=0.1, decay_steps=decay)
    for peak in (1.0, 3e-4):
        at = learning_rate(schedule, peak=peak, steps=10)
        assert {step: at(step) for step in rates} == pytest.approx(
            {step: peak * rate for step, rate in rates.items()}
        )


@pytest.mark.parametrize("kind", ["cosine", "linear", "wsd"])
@pytest.mark.parametrize(("min_ratio", "last"), [(0.0, 0.0), (0.1, 0.2), (1.0, 2.0)])
def test_the_last_step_has_the_least(kind, min_ratio, last):
    at = learning_rate(
        schema.Schedule(kind=kind, warmup_steps=3, min_ratio=min_ratio), peak=2.0, steps=57
    )
    rates = [at(step) for step in range(1, 58)]
    assert rates[-1] == pytest.approx(last)
    assert rates[:3] == sorted(rates[:3])
    assert rates[2:] == sorted(rates[2:], reverse=True)
    assert max(rates) == rates[2] == 2.0


@pytest.mark.parametrize(
    ("kind", "rate"), [("cosine", 0.1), ("linear", 0.1), ("wsd", 0.1), ("constant", 1.0)]
)
def test_a_run_of_one_step(kind, rate):
    assert learning_rate(schema.Schedule(kind=kind, warmup_steps=0), peak=1.0, steps=1)(
        1
    ) == pytest.approx(rate)


BAD, GOOD = torch.tensor(1.0), torch.tensor(0.0)


def scale_after(scale, *steps):
    for skipped, times in steps:
        for _ in range(times):
            scale.update(skipped)
    return scale.value.item()


def test_the_loss_scale_halves_where_a_step_is_skipped():
    scale = LossScale(torch.device("cpu"), enabled=True)
    assert scale.value.item() == 65536.0
    assert scale_after(scale, (BAD, 1)) == 32768.0
    assert scale_after(scale, (BAD, 3)) == 4096.0


def test_the_loss_scale_doubles_after_2000_good_steps():
    scale = LossScale(torch.device("cpu"), enabled=True)
    assert scale_after(scale, (GOOD, 1999)) == 65536.0
    assert scale_after(scale, (GOOD, 1)) == 131072.0
    assert scale_after(scale, (GOOD, 1000)) == 131072.0
    assert scale_after(scale, (BAD, 1)) == 65536.0
    assert scale_after(scale, (GOOD, 1999)) == 65536.0, (
        "the good steps before the skipped one do not count"
    )
    assert scale_after(scale, (GOOD, 1)) == 131072.0


def test_the_loss_scale_is_one_outside_float16():
    scale = LossScale(torch.device("cpu"), enabled=False)
    assert scale.value.item() == 1.0
    assert scale_after(scale, (BAD, 3), (GOOD, 2001)) == 1.0


def small_model():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Embedding(5, 4), nn.LayerNorm(4), nn.Linear(4, 3), nn.Linear(3, 3, bias=False)
    )
    model[3].weight.requires_grad_(False)
    return model


def test_optimizer_takes_its_section():
    section = schema.Optimizer(learning_rate=0.1, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.3)
    model = small_model()
    optimizer = make_optimizer(model, section)
    matrices, vectors = optimizer.param_groups
    assert [id(parameter) for parameter in matrices["params"]] == [
        id(model[0].weight),
        id(model[2].weight),
    ]
    assert [id(parameter) for parameter in vectors["params"]] == [
        id(model[1].weight),
        id(model[1].bias),
        id(model[2].bias),
    ]
    assert (matrices["weight_decay"], vectors["weight_decay"]) == (0.3, 0.0)
    for group in (matrices, vectors):
        assert (group["lr"], group["betas"], group["eps"], group["fused"]) == (
            0.1,
            (0.8, 0.9),
            1e-6,
            True,
        )


def test_weight_decay_shrinks_matrices_only():
    model = small_model()
    optimizer = make_optimizer(model, schema.Optimizer(learning_rate=0.1, weight_decay=0.5))
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    shrunk = {"0.weight", "2.weight"}
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(
            parameter, before[name] * (1 - 0.1 * 0.5 if name in shrunk else 1)
        )


@pytest.mark.parametrize(
    "model", [nn.Linear(2, 2, bias=False), nn.LayerNorm(2)], ids=["matrices", "vectors"]
)
def test_a_model_of_one_sort(model):
    (group,) = make_optimizer(model, schema.Optimizer()).param_groups
    assert len(group["params"]) == len(list(model.parameters()))
