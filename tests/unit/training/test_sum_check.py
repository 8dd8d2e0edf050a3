"""The losses of a few samples and of their halves: sums, means, and what depends on other samples."""

import random
import re

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from launcher.distributed.rank_layout import RankLayout
from launcher.errors import RecipeError
from launcher.recipe.load import load_recipe
from launcher.run.run import check_loss
from launcher.training.setup import assemble
from launcher.training.sum_check import SumCheck, check_sum, dropout_off

RECIPE = """
run: {name: own, max_steps: 2, seed: 3}
model: {builder: "tests.own_losses:model"}
data: {builder: "tests.own_losses:data", workers: 0}
batch: {global_batch_size: 8, micro_batch_size: 4}
strategy: {kind: fsdp, mixed_precision: null}
"""


@pytest.fixture
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.fixture
def assembled(tmp_path, group):
    (tmp_path / "own.yaml").write_text(RECIPE)

    def make(loss="as_sum", kind="plain", *overrides):
        words = [f"data.arguments.loss={loss}", f"model.arguments.kind={kind}", *overrides]
        recipe = load_recipe([f"recipe={tmp_path}/own.yaml", *words], ranks=1).recipe
        ranks = RankLayout(rank=0, size=1, group=group, device=torch.device("cpu"))
        return assemble(recipe, ranks=ranks)

    return make


@pytest.mark.parametrize(
    ("loss", "kind", "verdict"),
    [
        ("as_sum", "plain", "sum"),
        ("within_sample", "plain", "sum"),
        ("as_sum", "dropout", "sum"),
        ("as_mean", "plain", "mean"),
        ("as_mean", "dropout", "mean"),
        ("as_mean", "batch_norm", "mean"),
        ("noisy_mean", "plain", "mean"),
        ("as_sum", "batch_norm", "dependent"),
        ("contrastive", "plain", "dependent"),
        ("padded", "plain", "dependent"),
        ("as_sum", "functional", "random"),
    ],
)
def test_verdicts(assembled, loss, kind, verdict):
    check = check_sum(assembled(loss, kind))
    assert check.verdict == verdict, check
    assert (check.batch_norm is not None) == (kind == "batch_norm")


def test_a_mean_is_refused_with_what_to_change(assembled):
    """It trained 4 times too weakly, without a word."""
    counted = ("data.arguments.count=true", "batch.micro_batch_size=8")
    for overrides, factor in (((), "4 times"), (counted, r"\d,\d{3} times")):
        with pytest.raises(RecipeError) as raised:
            check_loss(assembled("as_mean", "plain", *overrides))
        (problem,) = raised.value.problems
        assert problem.startswith("data.builder: the loss of 4 samples is ")
        assert 'reduction="sum"' in problem
        assert re.search(f"about {factor} too small", problem), problem


@pytest.mark.parametrize(
    ("loss", "kind", "cause"),
    [
        ("as_sum", "batch_norm", "batch norm (norm, BatchNorm1d) is the likely cause"),
        ("contrastive", "plain", "the likely cause is that samples see each other"),
        ("as_sum", "plain", None),
        ("as_sum", "functional", None),
    ],
)
def test_other_differences_are_a_note(assembled, loss, kind, cause):
    notes = check_loss(assembled(loss, kind))
    assert [note.startswith("note: data.builder: the loss of 4 samples") for note in notes] == (
        [] if cause is None else [True]
    )
    assert all(cause in note for note in notes)


def test_micro_batches_of_one_sample_are_compared_with_two(assembled):
    check = check_sum(assembled("as_mean", "plain", "batch.micro_batch_size=1"))
    assert (check.samples, check.verdict) == (2, "mean")
    few = ("data.arguments.number=3", "run.max_steps=null", "run.epochs=1")
    assert check_sum(assembled("as_mean", "plain", *few)) is None


def test_the_launchers_own_loss_is_not_compared(assembled, monkeypatch):
    training = assembled()
    recipe = training.recipe
    object.__setattr__(recipe.model, "builder", None)
    object.__setattr__(recipe.data, "builder", None)
    assert check_sum(training) is None


@pytest.mark.parametrize("kind", ["batch_norm", "dropout"])
def test_nothing_changes(assembled, kind):
    training = assembled("as_sum", kind)
    module = training.wrapped.module
    before = {name: value.clone() for name, value in module.state_dict().items()}
    random_states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    rates = [each.p for each in module.modules() if isinstance(each, nn.Dropout)]
    check_sum(training)
    assert torch.equal(torch.get_rng_state(), random_states[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == random_states[1:]
    for name, value in module.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert [each.p for each in module.modules() if isinstance(each, nn.Dropout)] == rates
    assert all(parameter.grad is None for parameter in module.parameters())
    found = [float(step.loss) for step in training.all_steps]
    assert found == [float(step.loss) for step in assembled("as_sum", kind).all_steps]


def test_dropout_of_each_kind_is_off_inside():
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention_dropout, self.drop_path, self.momentum = 0.1, 0.2, 0.9

    modules = nn.ModuleList([nn.Dropout(0.3), nn.Dropout2d(0.4), Own(), nn.LSTM(2, 2, 2)])
    modules[3].dropout = 0.5
    with dropout_off(modules):
        assert [modules[0].p, modules[1].p, modules[3].dropout] == [0, 0, 0]
        assert vars(modules[2])["attention_dropout"] == modules[2].drop_path == 0
        assert modules[2].momentum == 0.9
    assert [modules[0].p, modules[1].p, modules[3].dropout] == [0.3, 0.4, 0.5]
    assert vars(modules[2])["attention_dropout"] == 0.1
    assert vars(modules[2])["drop_path"] == 0.2


@pytest.mark.parametrize(
    ("whole", "halves", "targets", "verdict"),
    [
        (4.0, (1.0, 3.0), (2, 2), "sum"),
        (2.0, (1.0, 3.0), (2, 2), "mean"),
        (2.5, (1.0, 3.0), (1, 3), "mean"),
        (1.02, (0.98, 1.06), (2, 2), "mean"),
        (3.0, (1.0, 3.0), (2, 2), "dependent"),
        (float("nan"), (1.0, 3.0), (2, 2), "sum"),
        (0.0, (0.0, 0.0), (2, 2), "sum"),
        (0.0, (2.0, -2.0), (2, 2), "sum"),
    ],
)
def test_verdicts_of_numbers(whole, halves, targets, verdict):
    check = SumCheck(
        whole,
        whole,
        halves,
        targets,
        samples=4,
        micro_batch_size=4,
        tolerance=1e-3,
        own_loss=True,
        batch_norm=None,
    )
    assert check.verdict == verdict
    assert (check.describe() is None) == (verdict == "sum")
