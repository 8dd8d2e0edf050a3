"""Tests of the auxiliary loss of mixture-of-experts models, against the loss of transformers."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import AutoConfig, AutoModelForCausalLM

from launcher.models.micro_batch import IGNORED, MicroBatch
from launcher.objectives.loss import summed_loss

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "output_router_logits": True,
    "router_aux_loss_coef": 0.3,
    "shared_expert_intermediate_size": 24,
}
MODELS = {
    "mixtral": {"num_local_experts": 4},
    "qwen2_moe": {"num_experts": 4},
    "qwen3_moe": {"num_experts": 4},
    "gpt_oss": {"num_local_experts": 4, "layer_types": ["full_attention", "full_attention"]},
}


def small_model(kind, **more):
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **(SIZES | MODELS[kind] | more))
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager").train()


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    named = model.named_parameters()
    return {name: p.grad.clone() for name, p in named if p.grad is not None}


def assert_same(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", MODELS)
def test_gradients_match_the_loss_of_transformers(kind):
    model = small_model(kind)
    for lengths in ((12, 12, 12), (12, 5, 8)):  # without padding, with padding
        model.config.output_router_logits = True
        ids = torch.randint(1, 64, (3, 12), generator=torch.Generator().manual_seed(1))
        mask = torch.arange(12) < torch.tensor(lengths)[:, None]
        ids = ids * mask
        targets = torch.full((3, 12), IGNORED)
        targets[:, :-1] = ids.masked_fill(~mask, IGNORED)[:, 1:]
        targets[:, 9:] = IGNORED  # text without a target counts, as a question at the end
        labels = torch.cat([torch.full((3, 1), IGNORED), targets[:, :-1]], dim=1)
        reference = model(input_ids=ids, attention_mask=mask.long(), labels=labels, use_cache=False)
        expected = gradients(model, reference.loss)
        text = None if mask.all() else mask
        batch = MicroBatch({"input_ids": ids}, targets, text_mask=text)
        count = int((targets != IGNORED).sum())
        summed = summed_loss(model, batch)
        cross_entropy = (reference.loss - 0.3 * reference.aux_loss).item()
        assert summed.item() / count == pytest.approx(cross_entropy, rel=1e-5)
        assert_same(gradients(model, summed / count), expected)
        model.config.output_router_logits = False
        without_auxiliary = gradients(model, summed_loss(model, batch) / count)
        router = next(
            name for name in without_auxiliary if "router" in name or ".gate.weight" in name
        )
        assert not torch.allclose(without_auxiliary[router], expected[router], rtol=1e-2), (
            "the auxiliary loss must change the router's gradient"
        )


def test_micro_batches_are_weighted_by_target_count():
    model = small_model("mixtral")
    micro_batches = []
    for seed, trained in ((1, 11), (2, 4), (3, 0)):
        ids = torch.randint(1, 64, (2, 12), generator=torch.Generator().manual_seed(seed))
        targets = torch.full((2, 12), IGNORED)
        targets[:, :trained] = ids[:, 1 : trained + 1]
        text = torch.arange(12).expand(2, -1) <= trained
        micro_batches.append(MicroBatch({"input_ids": ids}, targets, text_mask=text))
    total = sum(int(part.counted.sum()) for part in micro_batches)
    actual = gradients(model, sum(summed_loss(model, part) for part in micro_batches) / total)
    expected = 0
    for part in micro_batches[:2]:
        count = int(part.counted.sum())
        real = torch.arange(12) <= part.counted.sum(1, keepdim=True)
        labels = torch.cat([torch.full((2, 1), IGNORED), part.targets[:, :-1]], dim=1)
        reference = model(**part.inputs, attention_mask=real.long(), labels=labels, use_cache=False)
        expected = expected + reference.loss * count / total
    assert_same(actual, gradients(model, expected))


def test_a_loss_of_logits_has_the_auxiliary_loss():
    model = small_model("qwen3_moe")
    ids = torch.randint(1, 64, (2, 12), generator=torch.Generator().manual_seed(1))
    batch = MicroBatch({"input_ids": ids[:, :-1]}, ids[:, 1:])
    own = SimpleNamespace(needs="logits", of_logits=partial(cross_entropy, reduction="none"))
    expected = gradients(model, summed_loss(model, batch))
    batch = replace(batch, positions=torch.arange(22))
    assert_same(gradients(model, summed_loss(model, batch, own)), expected)


def test_auxiliary_loss_without_coefficient_is_an_error():
    class NoCoefficient(torch.nn.Module):
        config = SimpleNamespace()

        def forward(self, input_ids):
            logits = torch.zeros(*input_ids.shape, 8, requires_grad=True)
            return SimpleNamespace(logits=logits, aux_loss=torch.ones(()))

    ids = torch.ones(1, 4, dtype=torch.int64)
    with pytest.raises(
        ValueError, match="NoCoefficient returns an auxiliary loss and has no router"
    ):
        summed_loss(NoCoefficient(), MicroBatch({"input_ids": ids}, ids))
