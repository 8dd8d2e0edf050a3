"""Rows that are padded to the longest one of a micro-batch: their widths, and equal losses."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from launcher.data.attachment_inputs import TEXT_ALONE
from launcher.data.batching import SampleOrder, TokenBatchSampler
from launcher.data.collation import (
    EMPTY,
    RowInputs,
    collate_sequences,
    make_sample,
    padded_width,
)
from launcher.data.loader import expected_padding
from launcher.data.opening import open_dataset
from launcher.data.token_store import ModelTraits
from launcher.distributed.rank_layout import RankLayout
from launcher.models.micro_batch import IGNORED
from launcher.models.row_division import WHOLE_ROWS, RowDivision
from launcher.objectives.classification import collate_classified
from launcher.objectives.loss import summed_loss
from launcher.objectives.masked import collate_masked
from launcher.recipe.schema import Data
from launcher.training import setup
from launcher.training.model import width_multiple
from tests.datasets import objective_of
from tests.unit.data.rows import write
from tests.unit.objectives import test_preference as preference
from tests.unit.objectives import test_reward as reward
from tests.unit.planner.example_plans import RECIPE

LENGTH = 40


def row(tokens):
    return make_sample([(np.arange(tokens), np.append(np.arange(1, tokens), IGNORED))])


def test_widths_are_multiples_on_gpus_only():
    assert width_multiple(torch.device("cuda", 1)) == 128
    assert width_multiple(torch.device("cpu")) == 1
    options = {"length": 300, "width_multiple": 128}
    widths = [padded_width(longest, **options) for longest in (0, 1, 128, 129, 257, 300)]
    assert widths == [128, 128, 128, 256, 300, 300]


@pytest.mark.parametrize(("longest", "width"), [(3, 16), (16, 16), (17, 32), (33, LENGTH)])
def test_every_kind_of_row_is_padded_to_a_multiple(longest, width):
    rows = [row(longest), row(2), EMPTY]
    options = {"length": LENGTH, "width_multiple": 16}
    classified = [
        {"input_ids": one["input_ids"], "targets": np.array([number])}
        for number, one in enumerate(rows)
    ]
    found = [
        collate_sequences(rows, packed=False, document_masking="mask", **options),
        collate_masked(rows, RowInputs(**options)),
        collate_classified(classified, RowInputs(**options)),
    ]
    for collated in found:
        assert collated.micro_batch.inputs["input_ids"].shape == (3, width)
        assert collated.tokens == longest + 2
    division = RowDivision(4, rank=2)
    shared = collate_sequences(
        rows, packed=False, document_masking="mask", division=division, **options
    )
    assert shared.micro_batch.inputs["input_ids"].shape == (3, width // 4)
    packed = collate_sequences(rows, packed=True, document_masking="mask", **options)
    assert packed.micro_batch.inputs["input_ids"].shape == (3, LENGTH)


def wide(dataset):
    inputs = dataclasses.replace(dataset.inputs, width_multiple=32)
    return dataclasses.replace(dataset, inputs=inputs)


def width_of(collated):
    return collated.micro_batch.inputs["input_ids"].shape[1]


def test_wider_rows_have_the_same_loss():
    model = preference.prepared(0.0)
    rows = [row(11), row(5), row(1)]
    options = {"length": LENGTH, "packed": False, "document_masking": "mask"}
    narrow = collate_sequences(rows, **options)
    wider = collate_sequences(rows, **options, width_multiple=32)
    assert (width_of(narrow), width_of(wider)) == (11, 32)
    assert narrow.loss_tokens == wider.loss_tokens == 14
    torch.testing.assert_close(
        summed_loss(model, wider.micro_batch), summed_loss(model, narrow.micro_batch)
    )


def test_wider_pairs_have_the_same_loss():
    dataset = preference.with_reference(
        preference.dataset_of(preference.PAIRS, packing=False), "dpo"
    )
    model, indices = preference.prepared(0.05), [0, 1]
    assert width_of(preference.batch_of(dataset, indices)) < 32
    assert width_of(preference.batch_of(wide(dataset), indices)) == 32
    expected = preference.loss_and_norm(dataset, model, indices)
    found = preference.loss_and_norm(wide(dataset), model, indices)
    assert found[:2] == pytest.approx(expected[:2], rel=1e-5)


@pytest.mark.parametrize("masked", [False, True])
def test_wider_pairs_have_the_same_rewards(masked):
    model, masking = reward.make_model(masked)
    dataset = reward.dataset(masking, packing=False)
    batches = [made.collate([made[4], made[1]]) for made in (dataset, wide(dataset))]
    assert width_of(batches[0]) < width_of(batches[1]) == 32
    narrow, wider = (dataset.objective.loss(model, batch.micro_batch) for batch in batches)
    torch.testing.assert_close(wider, narrow)


def test_widths_of_a_data_set(tmp_path):
    """From the model's inputs to the micro-batches, their tokens and the share of padding."""
    texts = ["a" * size for size in (4, 9, 14, 20, 30, 39)]
    file = write(tmp_path / "rows.jsonl", texts)
    data = Data(packing=False, sequence_length=LENGTH, cache=str(tmp_path / "cache"))
    options = {"tokenizer": "bytes", "build": True}
    dataset = open_dataset(
        data,
        (str(file),),
        objective=objective_of(data),
        model=ModelTraits(width_multiple=16),
        **options,
    )
    assert [width_of(dataset.collate([dataset[n]])) for n in range(6)] == [16, 16, 16, 32, 32, 40]
    sampler = TokenBatchSampler(
        order=SampleOrder(samples=6, seed=0, shuffle=False, epochs=1),
        global_batch_size=6,
        steps=1,
        lengths=dataset.lengths,
        width=dataset.width,
        micro_batch_tokens=64,
    )
    batches = list(sampler)
    shapes = [
        dataset.collate([dataset[n] for n in batch]).micro_batch.inputs["input_ids"]
        for batch in batches
    ]
    assert max(ids.numel() for ids in shapes) <= 64
    numbers = sum(ids.numel() for ids in shapes)
    assert expected_padding(dataset, sampler) == pytest.approx(1 - dataset.tokens / numbers)
    classes = write(tmp_path / "classes.jsonl", [{"text": "ab", "label": 1}])
    data = dataclasses.replace(data, kind="classification")
    dataset = open_dataset(
        data,
        (str(classes),),
        objective=objective_of(data),
        model=ModelTraits(width_multiple=16, classes=2),
        **options,
    )
    assert width_of(dataset.collate([dataset[0]])) == 16


def test_a_run_on_gpus_rounds_widths(monkeypatch):
    """`assemble` passes the multiple of the ranks' device to the data."""
    seen = {}

    def open_run_data(*sections, model, **options):
        seen["multiple"] = model.width_multiple
        raise StopIteration

    monkeypatch.setattr(setup, "open_run_data", open_run_data)
    monkeypatch.setattr(setup, "tokenizer_name", lambda data, model: "bytes")
    ranks = RankLayout(rank=0, size=1, group=None, device=torch.device("cuda", 0))
    prepared = SimpleNamespace(
        model=torch.nn.Linear(1, 1),
        description=SimpleNamespace(vocabulary=8),
        row_division=lambda strategy, ranks: WHOLE_ROWS,
        attachments=TEXT_ALONE,
        objective=objective_of(RECIPE.data),
    )
    with pytest.raises(StopIteration):
        setup.assemble(RECIPE, ranks=ranks, prepared=prepared)
    assert seen == {"multiple": 128}
