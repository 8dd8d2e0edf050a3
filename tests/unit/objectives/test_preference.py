"""Losses on pairs of answers, compared with TRL, and what a model must not have."""

import dataclasses

import numpy as np
import pytest
import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    PhimoeConfig,
    PhimoeForCausalLM,
    RwkvConfig,
    RwkvForCausalLM,
)

from launcher.data.batching import NO_SAMPLE
from launcher.data.packing import separate_pairs
from launcher.data.token_store import TokenStore
from launcher.errors import RecipeError
from launcher.models import head as head_module
from launcher.models.attention import isolate_documents
from launcher.models.head import Head, Transform
from launcher.models.micro_batch import IGNORED
from launcher.models.record import record_of
from launcher.objectives import preference
from launcher.objectives.answers import answer_log_probabilities, check_model
from launcher.objectives.kto import Kto
from launcher.objectives.preference import pair_losses
from launcher.recipe.schema import Preference
from tests import datasets

VOCABULARY, LENGTH = 48, 40
TRL = {
    # Loss, gradient norm and means of rewards of TRL 1.16.0 on PAIRS: DPOTrainer's, and by the loss
    # functions of its CPOTrainer and ORPOTrainer
    "dpo": (0.6822285056114197, 2.4387521743774414, (0.00778608536, -0.02082599886)),
    "ipo": (23.939069747924805, 194.87814331054688, (0.00778608536, -0.02082599886)),
    "hinge": (0.9713879227638245, 4.915872573852539, (0.00778608536, -0.02082599886)),
    "robust": (0.6786518096923828, 3.0500094890594482, (0.00778608536, -0.02082599886)),
    "apo_zero": (0.9928287863731384, 1.2289074659347534, (0.00778608536, -0.02082599886)),
    "simpo": (0.672707736492157, 16.957359313964844, (-8.603569030761719, -9.325181007385254)),
    "orpo": (4.3567585945129395, 13.263226509094238, (-0.4301784336566925, -0.4662591218948364)),
}
SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
SETTINGS = {"robust": {"label_smoothing": 0.1}, "simpo": {"beta": 2.0, "margin": 0.5}}


def ids(start, count):
    return [(start * 7 + 11 * i + i * i) % VOCABULARY for i in range(count)]


PAIRS = [(ids(n, 3 + n % 4), ids(n + 20, 2 + n % 5), ids(n + 40, 1 + 3 * n % 6)) for n in range(6)]
"""Prompt, chosen and rejected."""


def make_model(shift):
    """A model whose weights are a formula, and others near it."""
    model = LlamaForCausalLM(LlamaConfig(**SMALL, attn_implementation="sdpa")).float()
    with torch.no_grad():
        for n, parameter in enumerate(model.parameters()):
            at = torch.arange(parameter.numel(), dtype=torch.float64)
            values = torch.sin(at * (n + 1) * 0.37 + n) * 0.5 + shift * torch.cos(at * 0.91 + n)
            parameter.copy_((values + (parameter.ndim == 1)).view(parameter.shape))
    return model


def prepared(shift, *, chunked=True):
    model = make_model(shift)
    isolate_documents(
        model,
        sequence_length=LENGTH,
        device=torch.device("cpu"),
        compute_dtype=torch.float32,
    )
    if chunked:
        record_of(model).head = Head(model.lm_head, Transform())
    return model


def store_of(pairs):
    documents, labels, first = [], [], []
    for prompt, *answers in pairs:
        for answer in answers:
            documents += prompt + answer
            labels += [IGNORED] * len(prompt) + answer
        first.append(len(prompt + answers[0]))
    sizes = [2 * len(p) + len(c) + len(r) for p, c, r in pairs]
    return TokenStore(
        np.array(documents, np.int32),
        np.array(labels, np.int32),
        np.cumsum([0, *sizes]),
        first_lengths=np.array(first, np.int32),
    )


def dataset_of(pairs, *, packing=True, length=LENGTH):
    store = store_of(pairs)
    sequences = separate_pairs(
        store.offsets, store.first_lengths, store.labels_or_ids, sequence_length=length
    )
    objective = preference.Preference()
    return datasets.dataset_of(store, sequences, 2 * length, joined=packing, objective=objective)


def batch_of(dataset, indices=None):
    return dataset.collate(datasets.rows_of(dataset, indices))


def with_reference(dataset, loss):
    collated = batch_of(dataset)
    with torch.no_grad():
        sums = answer_log_probabilities(prepared(0.0), collated.micro_batch).value
    reference = np.zeros((len(PAIRS), 2), np.float32)
    reference[collated.documents] = sums
    settings = Preference(loss=loss, **SETTINGS.get(loss, {}))
    objective = preference.Preference(settings=settings, reference=reference)
    return dataclasses.replace(dataset, objective=objective)


def loss_and_norm(dataset, model, indices=None):
    collated = batch_of(dataset, indices)
    means = dataset.objective.loss(model, collated.micro_batch) / collated.loss_tokens
    gradients = torch.autograd.grad(means[0], list(model.parameters()))
    norm = torch.cat([gradient.flatten() for gradient in gradients]).norm()
    return (
        means[0].item(),
        norm.item(),
        dict(zip(preference.Preference.metrics, means[1:].tolist(), strict=True)),
    )


@pytest.mark.parametrize("chunked", ["chunks", "one chunk", "full logits"])
@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("loss", [*TRL])
def test_losses_gradients_and_metrics_are_those_of_trl(loss, packing, chunked, monkeypatch):
    if chunked == "chunks":  # 64 is the least width: split it for this vocabulary
        monkeypatch.setattr(head_module, "CHUNK_ELEMENTS", 2**4)
        monkeypatch.setattr(head_module, "WIDTH_MULTIPLE", 16)
    dataset = with_reference(dataset_of(PAIRS, packing=packing), loss)
    model = prepared(0.05, chunked=chunked != "full logits")
    found, norm, metrics = loss_and_norm(dataset, model)
    expected, expected_norm, rewards = TRL[loss]
    # The constants are of another machine: matrix products differ by 1.1e-6 between CPUs
    assert found == pytest.approx(expected, rel=2e-6)
    assert norm == pytest.approx(expected_norm, rel=5e-6)
    assert metrics["rewards/chosen"] == pytest.approx(rewards[0], rel=2e-4, abs=1e-6)
    assert metrics["rewards/rejected"] == pytest.approx(rewards[1], rel=2e-4, abs=1e-6)
    if loss not in ("simpo", "orpo"):
        assert metrics["logps/chosen"] == pytest.approx(-15.646132469177246, rel=2e-6)
        assert metrics["logps/rejected"] == pytest.approx(-11.216651916503906, rel=2e-6)
        assert metrics["rewards/accuracies"] == pytest.approx(4 / 6)
        assert metrics["rewards/margins"] == pytest.approx(0.02861208, rel=2e-4)


@pytest.mark.parametrize("loss", [*TRL])
def test_answers_of_probability_one_have_finite_gradients(loss):
    sums = torch.tensor([[0.0, -3.0], [-1e-9, -2.0], [-2.0, 0.0]], requires_grad=True)
    losses, _ = pair_losses(sums, torch.ones(3, 2), torch.zeros(3, 2), Preference(loss=loss))
    losses.sum().backward()
    assert losses.isfinite().all()
    assert sums.grad.isfinite().all()


def test_micro_batches_add_up_and_an_empty_one_is_zero():
    dataset, model = with_reference(dataset_of(PAIRS), "dpo"), prepared(0.05)
    whole = dataset.objective.loss(model, batch_of(dataset).micro_batch)
    parts = [
        dataset.objective.loss(model, batch_of(dataset, [n]).micro_batch)
        for n in range(len(dataset))
    ]
    torch.testing.assert_close(sum(parts), whole, rtol=1e-5, atol=1e-5)
    empty = batch_of(dataset, [NO_SAMPLE])
    assert empty.loss_tokens == 0
    nothing = dataset.objective.loss(model, empty.micro_batch)
    nothing[0].backward()
    assert nothing.tolist() == [0.0] * (1 + len(preference.Preference.metrics))
    assert all(torch.count_nonzero(p.grad) == 0 for p in model.parameters())


def test_a_pair_twice_in_a_micro_batch_counts_twice():
    """A small data set may give the same row to two places of a batch, in two epochs."""
    dataset, model = with_reference(dataset_of(PAIRS), "dpo"), prepared(0.05)
    once = dataset.objective.loss(model, batch_of(dataset, [0]).micro_batch)
    collated = batch_of(dataset, [0, 0])
    assert collated.loss_tokens == 2 * batch_of(dataset, [0]).loss_tokens
    torch.testing.assert_close(dataset.objective.loss(model, collated.micro_batch), 2 * once)


def test_long_pairs_and_answers_without_targets_are_dropped():
    long, empty = (ids(1, 20), ids(2, 21), ids(3, 5)), (ids(1, 3), [], ids(3, 4))
    dataset = dataset_of([*PAIRS[:2], long, *PAIRS[2:4], empty, *PAIRS[4:]])
    documents = np.concatenate([batch_of(dataset).documents])
    assert sorted(documents.tolist()) == [0, 1, 3, 4, 6, 7]
    assert dataset.sequences.long_documents == 1
    assert dataset.sequences.dropped_documents == 1
    first, warning, dropped = dataset.describe()
    assert first.startswith("6 pairs, ")
    assert warning == (
        "warning: 1 of 8 pairs are dropped: the prompt with one of the answers is longer than 40 "
        "tokens (data.sequence_length)"
    )
    assert dropped == "warning: 1 of 8 pairs have no token with loss and are dropped"


def test_the_answers_of_a_pair_do_not_see_each_other():
    dataset, model = dataset_of(PAIRS), prepared(0.05)
    with torch.no_grad():
        sums = answer_log_probabilities(model, batch_of(dataset).micro_batch).value
        plain = make_model(0.05)
        for document, pair in zip(batch_of(dataset).documents, sums, strict=True):
            prompt, *answers = PAIRS[document]
            for answer, found in zip(answers, pair, strict=True):
                logits = plain(torch.tensor([prompt + answer])).logits[0].log_softmax(-1)
                at = torch.arange(len(prompt) - 1, len(prompt + answer) - 1)
                expected = logits[at, torch.tensor(answer)].sum()
                torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_noise_in_routers_is_refused_as_dropout():
    """DPO began at 0.6940 instead of log 2 = 0.6931 with the default noise of Phi-3.5-MoE."""
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    for noise in (0.01, 0.0):
        config = PhimoeConfig(**SMALL, **experts, router_jitter_noise=noise)
        with torch.device("meta"):
            model = PhimoeForCausalLM(config)
        if noise:
            message = r"preference: not available with noise in routers, and .*\.router_jitter_noise is 0.01: "
            with pytest.raises(RecipeError, match=message + "set router_jitter_noise to 0"):
                check_model(model, 16)
        else:
            check_model(model, 16)


def test_dropout_is_refused_by_name():
    model = LlamaForCausalLM(LlamaConfig(**SMALL, attention_dropout=0.1))
    with pytest.raises(RecipeError, match=r"layers.0.self_attn.attention_dropout is 0.1"):
        check_model(model, LENGTH)
    gpt2 = GPT2LMHeadModel(GPT2Config(n_embd=16, n_head=2, n_layer=1, vocab_size=48))
    with pytest.raises(RecipeError, match=r"transformer.drop.p is 0.1: set the model's dropout"):
        check_model(gpt2, LENGTH)
    with pytest.raises(RecipeError, match=r"^kto: not available with dropout"):
        Kto().change_model(gpt2, row_length=LENGTH)
    check_model(make_model(0.0), LENGTH)


def test_a_model_with_a_state_is_refused():
    """Recurrent layers that compute each answer by itself are not."""
    config = RwkvConfig(hidden_size=16, num_hidden_layers=2, vocab_size=48)
    with pytest.raises(RecipeError, match="both answers of a pair are in one row"):
        check_model(RwkvForCausalLM(config), LENGTH)
    with pytest.raises(RecipeError, match=r"data.kind: unpaired: .*several answers are in one row"):
        check_model(RwkvForCausalLM(config), LENGTH, pairs=False)
    mamba = MambaConfig(hidden_size=16, num_hidden_layers=1, vocab_size=48, state_size=4)
    check_model(MambaForCausalLM(mamba), LENGTH)
