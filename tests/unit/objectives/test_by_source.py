"""The losses of a mixture's sources, for objectives other than the next token."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from launcher.data.batching import NO_SAMPLE
from launcher.data.dataset import MixtureDataset
from launcher.data.packing import separate
from launcher.data.token_store import TokenStore
from launcher.objectives.classification import Classification
from launcher.objectives.distillation import Distillation
from launcher.objectives.kept_files import top_k_dtype
from launcher.objectives.teacher import targets_of_pieces
from launcher.objectives.teacher_rows import TeacherRows
from launcher.recipe import schema
from tests.datasets import dataset_of
from tests.unit.objectives import test_distillation as distillation
from tests.unit.objectives import test_preference as preference
from tests.unit.objectives import test_reward as reward

PAIRS = preference.PAIRS
TOP_K = 4


def pairs():
    """DPO without a reference of its own, which is 0."""
    parts = preference.dataset_of(PAIRS[:2]), preference.dataset_of(PAIRS[2:])
    return preference.prepared(0.05), parts, [2, 4]


def rewards():
    model, masking = reward.make_model()
    made = [preference.dataset_of(some, packing=False) for some in (PAIRS[:2], PAIRS[2:])]
    parts = [reward.rewards_of(each.store, each.sequences, masking) for each in made]
    return model, parts, [2, 4]


def classes():
    """A model whose logits are the first tokens of a row."""

    class Model(torch.nn.Module):
        def forward(self, input_ids, attention_mask):
            return SimpleNamespace(logits=input_ids[:, :2] * 0.1)

    def of(rows):
        store = TokenStore(
            np.arange(3 * rows, dtype=np.int32) % 7,
            None,
            np.arange(rows + 1) * 3,
            np.arange(rows, dtype=np.int32) % 2,
        )
        return dataset_of(store, separate(store.offsets, 3), 3, objective=Classification())

    return Model(), (of(2), of(3)), [2, 3]


def taught():
    def of(rows, seed):
        drawn = np.random.default_rng(seed)
        ids = drawn.integers(0, distillation.VOCABULARY, 6 * rows, dtype=np.int32)
        store = TokenStore(ids, None, np.arange(rows + 1) * 6)
        made = dataset_of(store, separate(store.offsets, 6), 6)
        counts = targets_of_pieces(made)
        teacher = np.zeros(counts.sum(), dtype=top_k_dtype(TOP_K))
        teacher["id"] = drawn.permuted(np.tile(np.arange(9), (len(teacher), 1)), axis=1)[:, :TOP_K]
        teacher["log_probability"] = np.log(0.2)
        settings = schema.Distillation(teacher="x", top_k=TOP_K, temperature=2.0, weight=0.7)
        rows = TeacherRows.of(made, counts, teacher, None, with_target=False)
        objective = Distillation(settings, teachers=(rows,))
        return dataset_of(store, separate(store.offsets, 6), 6, objective=objective)

    return distillation.model_of(1, chunked=True), (of(2, 1), of(3, 2)), [10, 15]


@pytest.mark.parametrize("case", [pairs, rewards, classes, taught])
def test_the_parts_of_the_loss_are_those_of_the_sources(case):
    """Loss and metrics do not change. Sources are mixed in a micro-batch, with an empty row."""
    model, parts, counts = case()
    objective = parts[0].objective
    mixture = MixtureDataset(dict(zip("ab", parts, strict=True)), None)
    assert mixture.sources == ("a", "b")
    order = [*range(0, len(mixture), 2), NO_SAMPLE, *range(1, len(mixture), 2)]
    if mixture.joined:  # the sources share rows, and have documents of the same numbers
        order = [tuple(range(0, len(mixture), 2)), (), tuple(range(1, len(mixture), 2))]
    collated = mixture.collate([mixture[index] for index in order])
    found = objective.loss(model, collated.micro_batch)
    alone = [part.collate([part[index] for index in range(len(part))]) for part in parts]
    own = [
        part.objective.loss(model, each.micro_batch)
        for part, each in zip(parts, alone, strict=True)
    ]
    own = [each.view(1) if each.ndim == 0 else each for each in own]
    further = len(objective.metrics)
    torch.testing.assert_close(found[: 1 + further], sum(own), rtol=1e-5, atol=1e-6)
    losses, weights = found[1 + further :].view(2, 2)
    torch.testing.assert_close(losses, torch.stack([each[0] for each in own]), rtol=1e-5, atol=1e-6)
    assert weights.tolist() == counts
