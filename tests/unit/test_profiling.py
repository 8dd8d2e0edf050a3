"""The steps that are profiled."""

import json

import pytest
import torch

from launcher.recipe import schema
from launcher.training.profiling import profiled


@pytest.mark.parametrize(
    ("first_step", "expected"),
    [(0, {5, 6}), (3, {5, 6}), (4, {5, 6}), (5, {6}), (6, None)],
    ids=["from the start", "resumed before", "resumed at", "resumed among them", "resumed after"],
)
def test_start_step_is_a_step_of_the_run(first_step, expected, tmp_path):
    profile = schema.Profile(start_step=5, steps=2)
    with profiled(
        profile, folder=tmp_path, rank=0, device=torch.device("cpu"), first_step=first_step
    ) as step_done:
        for step in range(first_step + 1, 9):
            with torch.profiler.record_function(f"train {step}"):
                torch.ones(2).sum()
            step_done(step)
    file = tmp_path / "profile/rank_0.json"
    if expected is None:
        assert not file.exists()
        return
    names = {event.get("name") for event in json.loads(file.read_text())["traceEvents"]}
    assert {step for step in range(1, 9) if f"train {step}" in names} == expected
