"""Resumes with another global batch size: every sample once, whatever the order."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from launcher.checkpoint.resume import saved_position
from launcher.data.batching import Position
from launcher.data.run_data import open_run_data
from launcher.data.token_store import ModelTraits
from launcher.distributed.rank_layout import RankLayout
from launcher.objectives.next_token import NextToken
from launcher.recipe import schema
from tests.unit.data.rows import write

ALONE = RankLayout(rank=0, size=1, group=None, device=torch.device("cpu"))
ROWS = [{"input_ids": [number] * (2 + number % 5)} for number in range(1, 51)]


def open_rows(folder, size, *, run, batch=None, **data):
    train = data.pop("train", (str(folder / "rows.jsonl"),))
    recipe = schema.Recipe(
        run=schema.Run(name="rows", seed=5, **run),
        model=schema.Model(config={}),
        data=schema.Data(
            train=train,
            kind="tokens",
            sequence_length=8,
            packing=False,
            workers=0,
            cache=str(folder / "cache"),
            **data,
        ),
        batch=schema.Batch(global_batch_size=size, **(batch or {"micro_batch_size": 1})),
    )
    inputs = ModelTraits(vocabulary=100)
    return open_run_data(
        recipe.data,
        recipe.batch,
        recipe.run,
        objective=NextToken(),
        model=inputs,
        ranks=ALONE,
        build=True,
    )


def train(data, position, steps=None):
    """Returns the samples of each step, the position after them, and the number of steps."""
    data, found = data.starting(position), []
    no = {"stop_requested": lambda: False, "save_requested": lambda: False}
    for batch in data.batches(ranks=ALONE, **no):
        ids = [row[0] for one in batch.micro_batches for row in one.inputs["input_ids"].tolist()]
        found.append([one for one in ids if one])
        position = Position(batch.step, batch.samples_seen, position.skipped_batches, batch.stream)
        if len(found) == steps:
            break
    return found, position, data.steps


def together(batches):
    return [sample for batch in batches for sample in batch]


MODES = {
    "rows": {},
    "tokens": {"batch": {"micro_batch_tokens": 8}},
    "stream": {"streaming": True, "shard_size": "0.5KB"},
    "mixture": {
        "train": {
            "a": {"files": ("rows.jsonl",), "weight": 3.0},
            "b": {"files": ("more.jsonl",), "weight": 1.0},
        }
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_each_sample_is_trained_once_when_the_batch_size_changes(tmp_path, monkeypatch, mode):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "rows.jsonl", ROWS)
    write(tmp_path / "more.jsonl", [{"input_ids": [number] * 2} for number in range(60, 80)])
    options: dict[str, Any] = {**MODES[mode]}
    if mode == "mixture":
        options["train"] = {name: schema.Source(**one) for name, one in options["train"].items()}
    run = {"max_steps": 30}
    whole, _, _ = train(open_rows(tmp_path, 6, run=run, **options), Position(), 10)
    expected, position, found = together(whole), Position(), []
    for size, steps in ((6, 3), (4, 3), (10, 2), (2, 5)):
        data = open_rows(tmp_path, size, run=run, **options)
        batches, position, most = train(data, position, steps)
        assert (len(batches), most) == (steps, 30)
        found += together(batches)
        assert position.samples == len(found)
        if mode != "tokens":  # where micro-batches are sorted by length
            assert found == expected[: len(found)]
    assert sorted(found) == sorted(expected)


def test_epochs_end_with_their_samples_when_the_batch_size_changes(tmp_path):
    """50 samples: 3 steps of 8, then 26 more in steps of 6; then a second epoch."""
    write(tmp_path / "rows.jsonl", ROWS)
    first, position, steps = train(open_rows(tmp_path, 8, run={"epochs": 1}), Position(), 3)
    assert (steps, position.samples) == (7, 24)
    rest, position, steps = train(open_rows(tmp_path, 6, run={"epochs": 1}), position)
    assert (steps, position.step, position.samples) == (8, 8, 50)
    assert [len(batch) for batch in rest] == [6, 6, 6, 6, 2]
    assert sorted(together(first + rest)) == list(range(1, 51))
    ended = train(open_rows(tmp_path, 6, run={"epochs": 1}), position)
    assert ended == ([], position, 8), "nothing is left"
    more, _, steps = train(open_rows(tmp_path, 10, run={"epochs": 2}), position)
    assert steps == 13
    assert sorted(together(more)) == list(range(1, 51)), "the second epoch begins at its start"


def test_skipped_batches_shorten_epochs_instead_of_training_empty_ones(tmp_path):
    write(tmp_path / "rows.jsonl", ROWS)
    data = open_rows(tmp_path, 10, run={"epochs": 1})
    whole, _, _ = train(data, Position())
    rewound = Position(step=1, samples=30, skipped_batches=2)
    assert train(data, rewound) == (whole[3:], replace(rewound, step=3, samples=50), 3)


def test_checkpoints_without_a_number_of_samples_count_their_own_steps():
    state = {"step": 5, "skipped_batches": 2, "stream": None}
    recipe = {"batch": {"global_batch_size": 8}}
    assert saved_position(state, recipe) == Position(5, 56, 2)
    assert saved_position(state | {"samples": 41}, recipe) == Position(5, 41, 2)
