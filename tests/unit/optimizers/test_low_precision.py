"""Tests of AdamW with bfloat16 or int8 moments: rounding, skipped steps, accuracy."""

import pytest
import torch
from torch import nn

from launcher.optimizers import low_precision
from launcher.optimizers.optimizer import make_optimizer
from launcher.recipe import schema

DTYPES = ("bfloat16", "int8")


def trained(state_dtype, *, steps=60, width=300):
    """Train a regression model. The default width is not a multiple of the block size."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(width, 40), nn.Tanh(), nn.Linear(40, 7))
    section = schema.Optimizer(learning_rate=3e-3, state_dtype=state_dtype)
    optimizer = make_optimizer(model, section, seed=5)
    x, y = torch.randn(64, width), torch.randn(64, 7)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
    return model, optimizer, loss.item()


def copies(optimizer):
    return [{k: v.clone() for k, v in state.items()} for state in optimizer.state.values()]


def equal(one, other):
    return all(torch.equal(a[k], b[k]) for a, b in zip(one, other, strict=True) for k in a)


def test_loss_is_close_to_float32():
    first, reference = (trained("float32", steps=steps)[2] for steps in (1, 60))
    assert reference < 0.3 * first
    for state_dtype in DTYPES:
        assert trained(state_dtype)[2] == pytest.approx(reference, rel=0.05)


@pytest.mark.parametrize("state_dtype", DTYPES)
def test_state_size_and_skipped_step(state_dtype):
    model, optimizer, _ = trained(state_dtype, steps=3)
    matrix, vector = optimizer.state[model[0].weight], optimizer.state[model[0].bias]
    size = sum(value.nbytes for key, value in matrix.items() if key != "step")
    numbers = 40 * 300
    assert size == {"bfloat16": 4 * numbers, "int8": 2 * numbers + 2 * 40 * 2 * 4}[state_dtype]
    assert vector["exp_avg"].dtype == vector["exp_avg_sq"].dtype == torch.float32
    before, weights = copies(optimizer), [p.detach().clone() for p in model.parameters()]
    model[0].weight.grad[0, 0] = torch.inf
    optimizer.found_inf = torch.ones(())
    optimizer.step()
    assert equal(copies(optimizer), before)
    assert all(torch.equal(p, w) for p, w in zip(model.parameters(), weights, strict=True))
    optimizer.found_inf = torch.zeros(())
    model[0].weight.grad.fill_(1)
    optimizer.step()
    assert not equal(copies(optimizer), before)


@pytest.mark.parametrize("state_dtype", DTYPES)
def test_result_does_not_depend_on_chunk_size(state_dtype, monkeypatch):
    """Chunks are rows, or blocks of one row. The noise depends on the position in the tensor."""
    whole = copies(trained(state_dtype, steps=3, width=600)[1])
    for at_once in (2048, 256):
        monkeypatch.setitem(low_precision.AT_ONCE, "cpu", at_once)
        assert equal(copies(trained(state_dtype, steps=3, width=600)[1]), whole)


@pytest.mark.parametrize("key", ["exp_avg", "exp_avg_sq"])
@pytest.mark.parametrize("state_dtype", DTYPES)
def test_stochastic_rounding_is_unbiased(state_dtype, key):
    """Round a value between two neighbors with each noise value. The maximum of a block is 1."""
    dtype = {"bfloat16": torch.bfloat16, "int8": low_precision._INT8[key]}[state_dtype]
    state = {key: torch.zeros(256, 256, dtype=dtype), f"{key}_scale": torch.zeros(256, 1)}
    moment = torch.full((256, 256), 0.1234)
    moment[:, 0] = 1
    noise = torch.arange(256, dtype=torch.uint8).repeat(256, 1).T.contiguous()
    part = (slice(0, 256), slice(0, 256))
    low_precision._store(state, key, part, moment.clone(), noise)
    found = low_precision._load(state, key, part)
    assert torch.equal(found[:, 0], torch.ones(256))
    assert len(found[:, 1:].unique()) == 2, "both neighbors occur"
    assert found[:, 1:].mean().item() == pytest.approx(0.1234, rel=2e-3)


def test_small_second_moment_is_not_rounded_to_zero():
    state = {"v": torch.zeros(1, 2, dtype=torch.uint8), "v_scale": torch.zeros(1, 1)}
    part, noise = (slice(0, 1), slice(0, 2)), torch.zeros(1, 2, dtype=torch.uint8)
    low_precision._store(state, "v", part, torch.tensor([[1.0, 1e-20]]), noise)
    assert low_precision._load(state, "v", part)[0, 1] > 0
    low_precision._store(state, "v", part, torch.zeros(1, 2), noise)
    assert torch.equal(low_precision._load(state, "v", part), torch.zeros(1, 2))
