"""Tests of the times of the stages of a pipeline."""

import pytest

from launcher.metrics.stages import expected_wait, mean_stages, slowest_stage, stages_text


def stage(forward, backward, wait):
    return {
        "forward_seconds": forward,
        "backward_seconds": backward,
        "wait_seconds": wait,
        "communication_seconds": 0.0,
    }


RECORDS = [
    {"step": 1, "step_seconds": 9.0},  # not measured in this step
    {"step": 2, "step_seconds": 1.0, "stages": [stage(0.2, 0.3, 0.4), stage(0.3, 0.5, 0.1)]},
    {"step": 3, "step_seconds": 1.0, "stages": [stage(0.2, 0.5, 0.2), stage(0.3, 0.5, 0.1)]},
]


def test_means_of_the_stages_and_the_slowest_one():
    stages = mean_stages(RECORDS)
    assert stages[0] == pytest.approx(
        {"forward": 0.2, "backward": 0.4, "wait": 0.3, "communication": 0.0}
    )
    assert slowest_stage(stages) == 1
    # With 8 micro-batches, the second of two stages waits for one of the first
    assert expected_wait(stages, micro_batches=8, chunks=1) == pytest.approx(0.1)
    assert expected_wait(stages, micro_batches=8, chunks=2) == pytest.approx(0.05)


def test_line_on_the_stages():
    text = stages_text(RECORDS[1:], micro_batches=8, chunks=1)
    assert text == (
        "stage 2 of 2 computes longest, 80% of a step; the stages wait for others 30%, 10%; "
        "by the schedule stage 2 waits 10%"
    )
    assert stages_text(RECORDS[:1], micro_batches=8, chunks=1) is None
