"""A run's plan, compared with what its steps took."""

import time

import pytest

from launcher.planner import comparison
from launcher.planner.comparison import Forecast, in_words

MiB = 2**20
ANSWER = {"peak": 100 * MiB, "where": "in the backward pass of lm_head"}


@pytest.mark.parametrize(
    ("measured", "resident", "expected"),
    [
        (
            100 * MiB,
            None,
            "memory: 100.0 MiB at the peak by plan, in the backward pass of lm_head; measured are 100.0 MiB, the same",
        ),
        (
            95 * MiB,
            None,
            "memory: 100.0 MiB at the peak by plan, in the backward pass of lm_head; measured are 95.0 MiB, 5% less",
        ),
        (
            120 * MiB,
            None,
            "warning: memory: 100.0 MiB at the peak by plan, in the backward pass of lm_head; measured are 120.0 MiB, 20% more; "
            "`launcher plan ... --verify` shows which component it is",
        ),
        (
            1600 * MiB,
            250 * MiB,
            "memory: 100.0 MiB at the peak by plan, in the backward pass of lm_head; resident memory grew by 1.3 GiB, with libraries "
            "and what the allocator keeps",
        ),
    ],
)
def test_words(measured, resident, expected):
    assert in_words(ANSWER, measured, resident=resident) == expected


def test_resident_memory_is_compared_where_the_tensors_are_most_of_it():
    large = ANSWER | {"peak": 4096 * MiB}
    assert in_words(large, 6394 * MiB, resident=250 * MiB) == (
        "memory: 4.0 GiB at the peak by plan, in the backward pass of lm_head; resident memory grew by 6.0 GiB, 50% more "
        "(with libraries, and what the allocator keeps)"
    )


class OnGpu:
    device = "cuda"


def test_a_late_plan_is_waited_for_only_when_asked_to(monkeypatch):
    def slow(task, recipe, machine, *, seconds):
        time.sleep(0.3)
        return [ANSWER], ""

    monkeypatch.setattr(comparison, "ask", slow)
    asked = Forecast(None, OnGpu())
    assert asked.compare(100 * MiB) is None
    assert asked.compare(100 * MiB, seconds=5).endswith("the same")


def test_a_plan_that_fails_is_reported_and_harms_nothing(monkeypatch):
    monkeypatch.setattr(
        comparison,
        "ask",
        lambda *_, **__: ([], "planning ended with status 1:\nTraceback\nValueError: what"),
    )
    assert (
        Forecast(None, OnGpu()).compare(1, seconds=5)
        == "memory: there is no plan to compare with the peak: ValueError: what"
    )
