"""Tests of the balance loss of experts over global batches, against the loss of transformers."""

from types import SimpleNamespace

import pytest
import torch
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from launcher.data.loader import GlobalBatch, StepStatistics, StepTotals
from launcher.distributed.rank_layout import RankLayout
from launcher.errors import RecipeError
from launcher.models.micro_batch import IGNORED, MicroBatch
from launcher.models.record import record_of
from launcher.models.router_balance import RouterBalance, router_balance
from launcher.objectives.loss import summed_loss
from launcher.optimizers.optimizer import LossScale, make_optimizer
from launcher.recipe import schema
from launcher.strategies.activation_checkpointing import checkpoint_blocks
from launcher.strategies.one_rank import OneRank
from launcher.training.loop import Update, train_steps
from tests.unit.objectives.test_loss import small_model

ALONE = RankLayout(rank=0, size=1, group=None, device=torch.device("cpu"))
LAYERS, TOKENS, EXPERTS, CHOSEN = 3, 40, 8, 2
NOT_SKIPPED, SKIPPED = torch.tensor(0.0), torch.tensor(1.0)


def balance():
    return RouterBalance(chosen=CHOSEN, ranks=ALONE)


def router_logits(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return tuple(
        torch.randn(TOKENS, EXPERTS, generator=generator).requires_grad_() for _ in range(LAYERS)
    )


def step_of(made, parts, *, tokens, skipped=NOT_SKIPPED):
    """A step whose weight is 1: the sum of the parts is the loss of the batch."""
    made.begin(tokens, torch.tensor(1.0))
    loss = sum(made.loss(logits, text) for logits, text in parts)
    made.end(skipped)
    return loss


@pytest.mark.parametrize("padded", [False, True])
def test_with_the_shares_of_the_same_batch_it_is_the_loss_of_transformers(padded):
    logits = router_logits()
    text = torch.arange(TOKENS).view(4, 10) % 10 < 7 if padded else None
    expected = load_balancing_loss_func(logits, EXPERTS, CHOSEN, text)
    tokens = TOKENS if text is None else int(text.sum())
    made = balance()
    first = step_of(made, [(logits, text)], tokens=tokens)
    assert first.item() == pytest.approx(CHOSEN, rel=1e-6)
    assert made.shares.sum().item() == pytest.approx(CHOSEN, rel=1e-6)
    loss = step_of(made, [(logits, text)], tokens=tokens)
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    for actual, wanted in zip(
        torch.autograd.grad(loss, logits), torch.autograd.grad(expected, logits), strict=True
    ):
        torch.testing.assert_close(actual, wanted, rtol=1e-5, atol=1e-8)


def test_the_first_step_has_no_gradient():
    logits = router_logits()
    loss = step_of(balance(), [(logits, None)], tokens=TOKENS)
    assert max(grad.abs().max() for grad in torch.autograd.grad(loss, logits)) < 1e-8


@pytest.mark.parametrize("size", [1, 8, 20])
def test_it_does_not_depend_on_the_division(size):
    logits, whole, parts = router_logits(), balance(), balance()
    text = torch.arange(TOKENS) % 5 < 4
    divided = [
        (tuple(layer[start : start + size] for layer in logits), text[start : start + size])
        for start in range(0, TOKENS, size)
    ]
    for _ in range(2):
        expected = step_of(whole, [(logits, text)], tokens=32)
        actual = step_of(parts, divided, tokens=32)
        torch.testing.assert_close(actual, expected, rtol=1e-6, atol=0)
        assert torch.equal(parts.shares, whole.shares), "counts are exact"


def test_a_skipped_step_and_one_without_text_keep_the_shares():
    made = balance()
    step_of(made, [(router_logits(0), None)], tokens=TOKENS)
    before = made.shares.clone()
    step_of(made, [(router_logits(1), None)], tokens=TOKENS, skipped=SKIPPED)
    assert torch.equal(made.shares, before)
    step_of(made, [(router_logits(1), torch.zeros(TOKENS, dtype=torch.bool))], tokens=0)
    assert torch.equal(made.shares, before)
    step_of(made, [(router_logits(1), None)], tokens=TOKENS)
    assert not torch.equal(made.shares, before)


def test_a_step_that_is_given_up_leaves_no_counts():
    made, undisturbed = balance(), balance()
    made.begin(TOKENS, torch.tensor(1.0))
    made.loss(router_logits(1), None)
    for each in (made, undisturbed):
        step_of(each, [(router_logits(0), None)], tokens=TOKENS)
    assert torch.equal(made.shares, undisturbed.shares)


def test_a_checkpoint_restores_the_bits():
    made, resumed = balance(), balance()
    assert made.state() is None
    step_of(made, [(router_logits(), None)], tokens=TOKENS)
    resumed.restore(made.state())
    assert torch.equal(resumed.shares, made.shares)
    resumed.restore(None)
    assert resumed.shares is None


def trained(size, *, checkpointed=False, evaluates=False, steps=3):
    """Losses, norms and shares of a small model, whose eight rows differ in length."""
    model = small_model("qwen3_moe", router_aux_loss_coef=0.5)
    made = record_of(model).router_balance = router_balance(model, ALONE)
    if checkpointed:
        blocks = {f"model.layers.{n}": block for n, block in enumerate(model.model.layers)}
        checkpoint_blocks(model, blocks, schema.ActivationCheckpointing(mode="full"))
    wrapped = OneRank(
        model, [], param_dtype=torch.float32, ranks=ALONE, init_fn=lambda *arguments: None
    )
    ids = torch.randint(1, 64, (8, 12), generator=torch.Generator().manual_seed(1))
    text = torch.arange(12) < torch.tensor([12, 5, 9, 3, 12, 7, 8, 11])[:, None]
    targets = torch.full((8, 12), IGNORED)
    targets[:, :-1] = ids.masked_fill(~text, IGNORED)[:, 1:]
    totals = StepTotals(int((targets != IGNORED).sum()), int(text.sum()))

    def rows(start):
        part = slice(start, start + size)
        return MicroBatch({"input_ids": ids[part]}, targets[part], text_mask=text[part])

    def batches():
        for step in range(1, steps + 1):
            micro_batches = [rows(start) for start in range(0, 8, size)]
            yield GlobalBatch(step, micro_batches, StepStatistics(totals, ALONE), step, 0.0)

    optimizer = make_optimizer(model, schema.Optimizer(learning_rate=1e-3))
    found = []
    for step in train_steps(
        wrapped,
        batches(),
        loss=summed_loss,
        update=Update(optimizer, lambda step: 1e-3, LossScale(ALONE.device, enabled=False), None),
        averaged_over=1,
        router_balance=made,
    ):
        if evaluates:
            before = made.shares.clone()
            with wrapped.evaluating():
                wrapped.without_gradients(summed_loss, rows(0))
            assert torch.equal(made.shares, before)
        found.append([step.loss.item(), step.grad_norm.item()])
    return torch.tensor(found), made.shares


def test_losses_do_not_depend_on_micro_batches_checkpointing_and_evaluations():
    expected, shares = trained(8)
    for options in ({"size": 1}, {"size": 2}, {"size": 4, "checkpointed": True}):
        found, own = trained(**options, evaluates="checkpointed" in options)
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
        assert torch.equal(own, shares)


def test_models_without_a_balance_loss():
    model = small_model("qwen3_moe", output_router_logits=False)
    assert router_balance(model, ALONE) is None
    assert router_balance(torch.nn.Linear(1, 1), ALONE) is None


def test_an_unknown_number_of_experts_is_refused():
    model = torch.nn.Linear(1, 1)
    model.config = SimpleNamespace(output_router_logits=True)
    message = "^model.router_balance: the config of Linear does not say how many experts a token"
    with pytest.raises(RecipeError, match=message):
        router_balance(model, ALONE)
