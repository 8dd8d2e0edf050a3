"""The learning rate over the run, the loss scale of float16, and what weight decay applies to."""

import copy
import math

import pytest
import torch
from torch import nn

from launcher.errors import RecipeError
from launcher.recipe import schema
from launcher.training.muon import newton_schulz
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


def gradients_of(model, step):
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(p.shape, generator=generator) * 0.1 for p in model.parameters()]


def test_adafactor_is_that_of_torch():
    """Also for a parameter of three dimensions, and with scaled gradients."""

    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.experts = nn.Parameter(torch.randn(3, 4, 5))
            self.linear = nn.Linear(6, 7)

    torch.manual_seed(0)
    ours, theirs = Experts(), Experts()
    theirs.load_state_dict(ours.state_dict())
    section = schema.Optimizer(name="adafactor", learning_rate=0.05)
    mine = make_optimizer(ours, section)
    groups = [
        {"params": [theirs.experts, theirs.linear.weight], "weight_decay": 0.1},
        {"params": [theirs.linear.bias], "weight_decay": 0.0},
    ]
    other = torch.optim.Adafactor(groups, lr=0.05)
    mine.grad_scale, mine.found_inf = torch.tensor(4.0), torch.zeros(())
    for step in range(8):
        gradients = gradients_of(ours, step)
        for a, b, gradient in zip(ours.parameters(), theirs.parameters(), gradients, strict=True):
            a.grad, b.grad = gradient * 4, gradient.clone()
        mine.step()
        other.step()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


def test_muon_is_that_of_torch():
    """In the block; torch iterates in bfloat16. AdamW elsewhere, and for vectors."""
    torch.manual_seed(0)
    ours = nn.Sequential(nn.Embedding(5, 24), nn.Sequential(nn.Linear(24, 40), nn.Linear(40, 24)))
    theirs = copy.deepcopy(ours)
    mine = make_optimizer(
        ours,
        schema.Optimizer(name="muon", momentum=0.95, learning_rate=0.01),
        blocks=[ours[1]],
    )
    matrices = [p for p in theirs[1].parameters() if p.ndim == 2]
    vectors = [p for p in theirs[1].parameters() if p.ndim == 1]
    other = [
        torch.optim.Muon(matrices, lr=0.01, momentum=0.95, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(theirs[0].parameters(), lr=0.01, betas=(0.9, 0.95), weight_decay=0.1),
        torch.optim.AdamW(vectors, lr=0.01, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    before = copy.deepcopy(ours)
    mine.grad_scale, mine.found_inf = torch.tensor(4.0), torch.zeros(())
    for step in range(4):
        gradients = gradients_of(ours, step)
        for a, b, gradient in zip(ours.parameters(), theirs.parameters(), gradients, strict=True):
            a.grad, b.grad = gradient * 4, gradient.clone()
        mine.step()
        for one in other:
            one.step()
    parameters = zip(ours.parameters(), theirs.parameters(), before.parameters(), strict=True)
    for a, b, start in parameters:
        moved = (a - start).norm()
        assert (a - b).norm() < (0.02 if a.ndim == 2 and a.shape[0] > 5 else 1e-5) * moved
    assert set(mine.state[ours[1][0].weight]) == {"momentum_buffer"}
    assert set(mine.state[ours[0].weight]) == {"step", "exp_avg", "exp_avg_sq"}
    with pytest.raises(RecipeError, match=r"optimizer.name: muon: the model has no matrix in a"):
        make_optimizer(ours, schema.Optimizer(name="muon"))


@pytest.mark.parametrize("shape", [(6, 4), (4, 6), (3, 6, 4)])
def test_muon_makes_matrices_nearly_orthogonal(shape):
    """Experts as one matrix each."""
    matrices = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    singly = [newton_schulz(one.clone()) for one in matrices] if len(shape) == 3 else []
    found = newton_schulz(matrices)
    values = torch.linalg.svdvals(found)
    assert 0.6 < values.min() < values.max() < 1.3
    for one, other in zip(singly, found, strict=False):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("name", ["adamw", "sgd", "adafactor", "muon"])
def test_a_step_that_is_skipped_changes_nothing(name):
    """Even the first one, which makes the state."""
    model = nn.Linear(3, 4)
    section = schema.Optimizer(name=name, learning_rate=0.1)
    optimizer = make_optimizer(model, section, blocks=[model])
    before = [p.detach().clone() for p in model.parameters()]
    for gradient in (torch.nan, torch.inf):
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, gradient)
        optimizer.found_inf = torch.ones(())
        optimizer.step()
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
    for state in optimizer.state.values():
        assert all(not value.any() for value in state.values())
    optimizer.found_inf = torch.zeros(())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert all((p < b).all() for p, b in zip(model.parameters(), before, strict=True))


def test_sgd_has_momentum():
    model = nn.Linear(1, 1, bias=False)
    section = schema.Optimizer(name="sgd", learning_rate=0.1, momentum=0.5, weight_decay=0.0)
    optimizer, before = make_optimizer(model, section), model.weight.item()
    for _ in range(2):
        model.weight.grad = torch.ones(1, 1)
        optimizer.step()
    assert model.weight.item() == pytest.approx(before - 0.1 * (1 + 1.5))
    plain = make_optimizer(model, schema.Optimizer(name="sgd", momentum=0.0))
    assert not plain.state[model.weight]
