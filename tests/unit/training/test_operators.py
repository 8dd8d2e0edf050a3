"""Tests of the operators that a budget keeps, and of selective checkpointing with a budget."""

import dataclasses
import itertools

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from launcher.errors import RecipeError
from launcher.models.micro_batch import MicroBatch
from launcher.objectives.synthetic import SyntheticData
from launcher.recipe.schema import ActivationCheckpointing
from launcher.strategies import activation_checkpointing
from launcher.strategies.activation_checkpointing import checkpoint_blocks
from launcher.training import operators
from launcher.training.operators import Operator, Saved, operators_to_keep, saved_of_blocks

ROWS, WIDTH = 8, 16


def operator(size, cost, *, attention=False, call=0):
    return Operator(torch.ops.aten.mm.default, call, size, cost, attention)


@pytest.mark.parametrize("capacity", [0, 7, 40, 61, 1000])
def test_knapsack_keeps_the_most_expensive_operators(capacity):
    sizes = [(7, 3.0), (11, 9.0), (13, 4.0), (17, 8.5), (19, 12.0), (23, 12.5)]
    items = [operator(size, cost, call=n) for n, (size, cost) in enumerate(sizes)]
    best = max(
        sum(one.cost for one in chosen)
        for count in range(len(items) + 1)
        for chosen in itertools.combinations(items, count)
        if sum(one.size for one in chosen) <= capacity
    )
    chosen = operators._knapsack(items, capacity)
    assert sum(one.size for one in chosen) <= capacity
    assert sum(one.cost for one in chosen) == best


def test_knapsack_rounds_large_sizes_up():
    items = [operator(10**9 + 7 * n, 1.0 + n / 100, call=n) for n in range(40)]
    chosen = operators._knapsack(items, 20 * 10**9 + 10**9)
    assert len(chosen) == 20, "21 would fit without rounding, which costs up to 1% of the budget"
    assert sum(one.size for one in chosen) <= 21 * 10**9


def test_attention_is_kept_first_if_it_fits():
    saved = Saved(kept=100, input=10)
    saved.operators = [operator(40, 1.0, attention=True), operator(45, 9.0, call=1)]
    assert [one.size for one in saved.keep(0.95)] == [40, 45]
    assert [one.size for one in saved.keep(0.60)] == [40]
    assert [one.size for one in saved.keep(0.49)] == [], "no operator fits together with the input"
    saved.operators[1] = operator(30, 9.0, call=1)
    assert [one.size for one in saved.keep(0.49)] == [30], "attention does not fit"


class Block(nn.Module):
    """Two matrix products, an in-place operation, dropout, and a final matrix product."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.up, self.gate = (nn.Linear(WIDTH, 4 * WIDTH, bias=False) for _ in range(2))
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        gate = torch.sigmoid(self.gate(x).mul(2).add_(1))
        return x + self.down(self.dropout(gate) * self.dropout(self.up(x)))


def blocks_of(count=2, **settings):
    return nn.Sequential(*(Block(**settings) for _ in range(count)))


def loss(model, micro_batch):
    return model(**micro_batch.inputs).sum()


DATA = SyntheticData(MicroBatch({"input": torch.zeros(ROWS, WIDTH)}), loss, ROWS, ROWS)


def keep(model, budget, **settings):
    settings = {
        "dtype": torch.float32,
        "autocast": False,
        "device": "cpu",
        "depth": len(model),
    } | settings
    with torch.device("meta"):
        meta = blocks_of(len(model), dropout=model[0].dropout.p)
    return operators_to_keep(meta, dict(meta.named_children()), DATA, budget=budget, **settings)


def test_saved_operators_of_a_block():
    with torch.device("meta"):
        meta = blocks_of(1, dropout=0.1)
    found = saved_of_blocks(meta, ["0"], DATA, device="cpu", dtype=torch.float32)["0"]
    assert found.input == ROWS * WIDTH * 4
    names = [str(one.function) for one in found.operators]
    assert names.count("aten.mm.default") == 2, "the last product is never recomputed"
    assert not any("dropout" in name or "bernoulli" in name for name in names), (
        "random operators are always recomputed"
    )
    assert "aten.mul.Tensor" in names
    products = [one for one in found.operators if str(one.function) == "aten.mul.Tensor"]
    assert all((one.function, one.call) != (products[0].function, 0) for one in products), (
        "add_ modifies the result of the first mul in place"
    )
    assert all(one.size == ROWS * 4 * WIDTH * 4 for one in found.operators)


class ProductCounter(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function is torch.ops.aten.mm.default
        return function(*args, **(kwargs or {}))


def trained(budget, *, dropout=0.0):
    """Return the gradients, and the number of matrix products in the backward pass."""
    torch.manual_seed(0)
    model = blocks_of(dropout=dropout)
    if budget is not None:
        kept = keep(model, budget)
        blocks = dict(model.named_children())
        checkpoint_blocks(model, blocks, ActivationCheckpointing(mode="selective"), kept)
    torch.manual_seed(1)
    output = model(torch.randn(ROWS, WIDTH, requires_grad=True))
    with ProductCounter() as products:
        output.square().sum().backward()
    return [parameter.grad for parameter in model.parameters()], products.count


def test_larger_budget_recomputes_less_with_equal_gradients():
    expected, least = trained(None, dropout=0.2)
    counts = []
    for budget in (0.1, 0.2, 1.0):
        gradients, operations = trained(budget, dropout=0.2)
        assert all(map(torch.equal, gradients, expected))
        counts.append(operations)
    assert counts == [least + 4, least + 2, least], "two blocks have two products each to recompute"


def test_dropout_is_always_recomputed(monkeypatch):
    """A kept dropout would not advance the generator, so later random numbers would differ."""
    dropout = {torch.ops.aten.native_dropout.default, torch.ops.aten.bernoulli_.float}
    monkeypatch.setattr(activation_checkpointing, "ATTENTION", dropout)
    expected, _ = trained(None, dropout=0.5)
    torch.manual_seed(0)
    model = blocks_of(dropout=0.5)
    settings = ActivationCheckpointing(mode="selective")
    checkpoint_blocks(model, dict(model.named_children()), settings)
    torch.manual_seed(1)
    model(torch.randn(ROWS, WIDTH, requires_grad=True)).square().sum().backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    assert all(map(torch.equal, gradients, expected))


@pytest.mark.parametrize(("dropout", "random"), [(0.0, False), (0.1, True)])
def test_attention_is_random_with_dropout(dropout, random):
    flash = torch.ops.aten._scaled_dot_product_flash_attention.default
    assert activation_checkpointing.is_random(flash, (None, None, None, dropout), {}) == random
    keywords = {"dropout_p": dropout}
    assert activation_checkpointing.is_random(flash, (None, None, None), keywords) == random
    assert not activation_checkpointing.is_random(flash, (None, None, None), {})
    assert not activation_checkpointing.is_random(torch.ops.aten.mm.default, (), {})


def test_budget_in_bytes_is_divided_among_all_blocks():
    model = blocks_of(4)
    with torch.device("meta"):
        meta = blocks_of(1)
    block = saved_of_blocks(meta, ["0"], DATA, device="cpu", dtype=torch.float32)["0"]
    half = f"{block.kept * 4 / 2 / 1024:.3f}KiB"
    assert keep(model, half) == keep(model, 0.5) != keep(model, 0.9)
    assert set(keep(blocks_of(2), half, depth=4).values()) == set(keep(model, half).values())


def test_budget_below_block_inputs_is_an_error():
    with pytest.raises(RecipeError) as error:
        keep(blocks_of(4), "1KiB")
    assert str(error.value) == (
        "activation_checkpointing.budget: 1KiB is less than the inputs of 4 blocks, 2.0 KiB; "
        "without checkpointing they keep 26.0 KiB"
    )


def test_budget_with_untraceable_model_is_an_error(monkeypatch):
    value_reading = dataclasses.replace(DATA, loss=lambda *arguments: loss(*arguments).item())
    with torch.device("meta"):
        meta = blocks_of(1)
    with pytest.raises(RecipeError, match=r"does not run on fake tensors .* without a budget"):
        operators_to_keep(
            meta, dict(meta.named_children()), value_reading, budget=0.5, dtype=torch.float32, autocast=False, device="cpu", depth=1
        )  # fmt: skip
