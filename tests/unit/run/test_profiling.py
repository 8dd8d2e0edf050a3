"""Tests of the profiler: the steps and ranks that it records."""

import dataclasses
import json
import re
from contextlib import nullcontext

import pytest
import torch

from launcher.data.loader import GlobalBatch, StepStatistics, StepTotals
from launcher.distributed.rank_layout import RankLayout
from launcher.models.micro_batch import MicroBatch
from launcher.optimizers.optimizer import LossScale, make_optimizer
from launcher.recipe import schema
from launcher.run.profiling import make_profiler
from launcher.strategies.one_rank import OneRank
from launcher.training.loop import Update, train_steps

SINGLE_RANK = RankLayout(rank=0, size=1, group=None, device=torch.device("cpu"))


@pytest.mark.parametrize(
    ("first_step", "expected"),
    [(0, {5, 6}), (3, {5, 6}), (4, {5, 6}), (5, {6}), (6, None)],
    ids=["from the start", "resumed before", "resumed at", "resumed within", "resumed after"],
)
def test_start_step_counts_from_the_start_of_the_run(first_step, expected, tmp_path):
    profile = schema.Profile(start_step=5, steps=2, warmup=2)
    profiler = make_profiler(profile, tmp_path, ranks=SINGLE_RANK, done=first_step)
    with profiler or nullcontext():
        for step in range(first_step + 1, 9):
            if profiler is not None:
                profiler.phase("backward")
            with torch.profiler.record_function(f"train {step}"):
                torch.ones(2000).cumsum(0)
            if profiler is not None:
                profiler.step_done(step)
    file = tmp_path / "profile/rank_0.pt.trace.json"  # TensorBoard's plugin searches for this name
    assert (profiler is None) == (expected is None)
    if expected is None:
        assert not file.exists()
        return
    names = {event.get("name") for event in json.loads(file.read_text())["traceEvents"]}
    assert {step for step in range(1, 9) if f"train {step}" in names} == expected
    assert "backward" in names
    time, memory = (
        (tmp_path / f"profile/rank_0_{by}.txt").read_text() for by in ("time", "memory")
    )
    assert re.search(r"Self CPU.*aten::cumsum", time, re.S), time
    assert re.search(r"Self CPU Mem.*aten::cumsum.* [1-9][\d.]+ KB", memory, re.S), memory


def test_only_the_given_ranks_are_profiled(tmp_path):
    profile = schema.Profile(start_step=2, steps=1, ranks=(1, 3))
    ranks = [dataclasses.replace(SINGLE_RANK, rank=rank) for rank in range(3)]
    profiled = [make_profiler(profile, tmp_path, ranks=one, done=0) is not None for one in ranks]
    assert profiled == [False, True, False]


def test_step_ends_before_the_next_batch_is_fetched():
    """The profiler stops at the end of a step. Fetching a batch starts a gloo collective. If the
    profiler stopped during it, the gloo thread would write to freed memory and crash (torch 2.13).
    """
    events, model = [], torch.nn.Linear(2, 1)

    def batches():
        for step in (1, 2):
            events.append("batch")
            yield GlobalBatch(
                step, [MicroBatch({})], StepStatistics(StepTotals(1, 1), SINGLE_RANK), step, 0.0
            )

    wrapped = OneRank(
        model, [], param_dtype=torch.float32, ranks=SINGLE_RANK, init_fn=lambda *arguments: None
    )
    steps = train_steps(
        wrapped,
        batches(),
        loss=lambda model, batch: model(torch.ones(2)).sum(),
        update=Update(
            make_optimizer(model, schema.Optimizer()),
            learning_rate=lambda step: 1e-3,
            loss_scale=LossScale(torch.device("cpu"), enabled=False),
            max_grad_norm=None,
        ),
        averaged_over=1,
        heartbeat=events.append,
    )
    assert [step.number for step in steps] == [1, 2]
    step = ["data", "batch", "forward", "backward", "optimizer"]
    assert events == [*step, *step, "data"]
