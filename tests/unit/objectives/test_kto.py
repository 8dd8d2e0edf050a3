"""Answers that are good or not: how their rows are read, and the loss against a plain loop."""

from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import log_softmax

from launcher.data.batching import NO_SAMPLE
from launcher.data.collation import RowInputs
from launcher.data.dataset import MixtureDataset
from launcher.data.encoder import make_encoder
from launcher.data.token_store import TokenStore
from launcher.models.micro_batch import IGNORED
from launcher.objectives import kto
from launcher.objectives.base import Example, dataset_objective
from launcher.recipe import schema
from launcher.recipe.layouts import guess, lost_meaning
from launcher.sources.rows import Row, SourcePart
from tests import datasets
from tests.unit.objectives.test_preference import LENGTH, PAIRS, VOCABULARY, make_model, prepared

CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}]
ROWS: dict[str, dict[str, Any]] = {
    "of TRL": {"prompt": "2 + 2 =", "completion": " 4", "label": True},
    "of TRL, messages": {"prompt": CHAT[:1], "completion": CHAT[1:], "label": False},
    "of LLaMA-Factory": {"instruction": "Say hi", "input": "", "output": "Hello!", "kto_tag": True},
    "of LLaMA-Factory, messages": {"messages": CHAT, "kto_tag": False},
    "numbers": {"prompt": "2 + 2 =", "completion": " 5", "label": 0},
    "text": {"prompt": "2 + 2 =", "completion": " 4", "label": "True"},
}
ANSWERS = [(prompt, answer) for prompt, *both in PAIRS for answer in both]
GOOD = [number % 3 != 1 for number in range(len(ANSWERS))]
SETTINGS = schema.Kto(beta=0.3, desirable_weight=1.25, undesirable_weight=0.5)


def encoded(row):
    encoder = make_encoder("unpaired", schema.Data(kind="unpaired"), tokenizer="bytes")
    return next(iter(encoder.encode_rows([Row(SourcePart("x", "jsonl"), 0, row)])))


@pytest.mark.parametrize("name", ROWS)
def test_rows_are_read(name):
    row = ROWS[name]
    found = guess(row, {}, kinds=["unpaired"])
    assert found.layout.kind == "unpaired"
    mark = str(list(row.values())[-1]).lower()
    one = encoded(row)
    assert (one.problem, one.desirable) == ("", mark in ("true", "1"))
    trained = bytes(one.ids[one.labels != IGNORED].clip(max=255).astype(np.uint8))
    answer = row.get("completion") or row.get("output") or CHAT[1:]
    text = answer if isinstance(answer, str) else answer[-1]["content"]
    assert text.strip().encode() in trained
    assert b"2 + 2" not in trained
    # Without the section, rows with marks are not learned from as if all were good
    assert "kto.beta=0.1 learns from both" in lost_meaning(row, guess(row, {}))


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        (
            {**ROWS["of TRL"], "label": "maybe"},
            "must say whether the answer is good: true or false",
        ),
        ({**ROWS["of TRL"], "label": None}, "must say whether the answer is good: true or false"),
        ({"messages": CHAT[:1], "kto_tag": True}, "must end with the answer"),
        ({**ROWS["of TRL"], "completion": " "}, "is empty, so there is nothing to learn from"),
    ],
)
def test_rows_that_cannot_be_used(row, problem):
    assert problem in encoded(row).problem


def dataset_of(answers, good, *, packing=True, reference=None):
    documents = [prompt + answer for prompt, answer in answers]
    labels = [[IGNORED] * len(prompt) + answer for prompt, answer in answers]
    store = TokenStore(
        np.concatenate(documents).astype(np.int32),
        np.concatenate(labels).astype(np.int32),
        np.cumsum([0, *map(len, documents)]),
        desirable=np.array(good, np.int32),
    )
    objective = kto.Kto(settings=SETTINGS, reference=reference)
    data = schema.Data(kind="unpaired", sequence_length=LENGTH, packing=packing)
    sequences = objective.pack(store, data, None)
    return datasets.dataset_of(store, sequences, LENGTH, joined=packing, objective=objective)


def log_probability(model, prompt, answer):
    ids = torch.tensor([prompt + answer])
    logits = log_softmax(model(input_ids=ids).logits[0].float(), -1)[len(prompt) - 1 : -1]
    return logits[torch.arange(len(answer)), torch.tensor(answer)].sum()


@pytest.mark.parametrize("packing", [True, False])
def test_loss_and_gradient_are_those_of_a_plain_loop(packing):
    """APO-zero without pairs: equations as in TRL's KTOTrainer (loss_type apo_zero_unpaired)."""
    with torch.no_grad():
        before = [log_probability(make_model(0.0), *answer) for answer in ANSWERS]
    plain = make_model(0.05)
    losses, rewards = [], []
    for answer, good, reference in zip(ANSWERS, GOOD, before, strict=True):
        reward = 0.3 * (log_probability(plain, *answer) - reference)
        loss = 1.25 * (1 - torch.sigmoid(reward)) if good else 0.5 * torch.sigmoid(reward)
        losses.append(loss)
        rewards.append(reward.detach())
    sum(losses).backward()

    reference = np.array(before, np.float32)[:, None]
    dataset = dataset_of(ANSWERS, GOOD, packing=packing, reference=reference)
    model = prepared(0.05)
    collated = dataset.collate(datasets.rows_of(dataset, [*range(len(dataset)), NO_SAMPLE]))
    assert collated.loss_tokens == len(ANSWERS)
    assert sorted(collated.documents) == list(range(len(ANSWERS)))
    found = dataset_objective(dataset).loss(model, collated.micro_batch)
    torch.testing.assert_close(found[0], sum(losses).detach(), rtol=1e-6, atol=1e-6)
    found[0].backward()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=2e-5, atol=1e-5)

    means = dict(zip(kto.Kto.metrics, (found[1:] / len(ANSWERS)).tolist(), strict=True))
    shown = dataset.objective.shown(means)
    chosen = [float(reward) for reward, good in zip(rewards, GOOD, strict=True) if good]
    rejected = [float(reward) for reward, good in zip(rewards, GOOD, strict=True) if not good]
    right = [reward > 0 for reward in chosen] + [reward < 0 for reward in rejected]
    expected = {
        "rewards/chosen": np.mean(chosen),
        "rewards/rejected": np.mean(rejected),
        "rewards/margins": np.mean(chosen) - np.mean(rejected),
        "rewards/accuracies": np.mean(right),
    }
    assert {name: shown[name] for name in expected} == pytest.approx(expected, rel=1e-4)


def test_a_step_may_lack_answers_of_one_sort():
    means = dict.fromkeys(kto.Kto.metrics, 0.0) | {"desirable": 1.0, "rewards/chosen": 0.5}
    shown = kto.Kto().shown(means)
    assert (shown["rewards/chosen"], shown["rewards/rejected"]) == (0.5, None)
    assert "rewards/margins" not in shown


def test_losses_by_source():
    parts = {"a": dataset_of(ANSWERS[:5], GOOD[:5]), "b": dataset_of(ANSWERS[5:], GOOD[5:])}
    mixture = MixtureDataset(parts, None)
    model = prepared(0.05)
    assert mixture.joined
    # Rows with answers of both sources, which have the same numbers there
    rows = [tuple(range(0, len(mixture), 2)), (), tuple(range(1, len(mixture), 2))]
    collated = mixture.collate([mixture[row] for row in rows])
    found = dataset_objective(mixture).loss(model, collated.micro_batch)
    losses, counts = found[1 + len(kto.Kto.metrics) :].view(2, 2)
    assert counts.tolist() == [5, len(ANSWERS) - 5]
    torch.testing.assert_close(losses.sum(), found[0])


def test_the_example_of_the_plan_has_full_rows():
    data = schema.Data(kind="unpaired", sequence_length=LENGTH)
    inputs = RowInputs(LENGTH, packed=True)
    about = Example(data, 3, inputs, 2, VOCABULARY, 0, np.random.default_rng(0))
    objective, collated = kto.Kto().with_example(about)
    assert collated.micro_batch.inputs["input_ids"].shape[0] == 3
    assert torch.isfinite(objective.loss(prepared(0.0), collated.micro_batch)).all()


def test_inspect_names_an_answer_by_its_mark():
    dataset = dataset_of(ANSWERS[:2], [True, False])
    length = [len(prompt + answer) for prompt, answer in ANSWERS[:2]]
    parts = [dataset.objective.parts(dataset, document) for document in (0, 1)]
    assert parts == [[("good", length[0])], [("not good", length[1])]]


def test_two_marks_are_refused():
    row = {**ROWS["of TRL"], "kto_tag": False}
    found = guess(row, {}, kinds=["unpaired"])
    assert "column 'kto_tag' marks the answer, too: data.label_column" in lost_meaning(row, found)
