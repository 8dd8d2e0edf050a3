"""Tests of the comparison of planned and measured memory during a run."""

import threading
from types import SimpleNamespace

import pytest

from launcher.errors import TrainingError
from launcher.run import comparison
from launcher.run.comparison import Forecast, comparison_text

MiB = 2**20
PEAK, WHERE = 100 * MiB, "in the backward pass of lm_head"
ON_GPU = SimpleNamespace(device="cuda")


@pytest.mark.parametrize(
    ("measured", "resident", "expected"),
    [
        (100, None, "memory: {plan}; measured: 100.0 MiB, the same"),
        (95, None, "memory: {plan}; measured: 95.0 MiB, 5% less"),
        (120, None, "warning: memory: {plan}; measured: 120.0 MiB, 20% more; `launcher plan ... --verify` shows which component differs"),
        (1600, 250 * MiB, "memory: {plan}; resident memory grew by 1.3 GiB, with libraries and allocator caches"),
    ],
)  # fmt: skip
def test_comparison_text_gives_both_peaks(measured, resident, expected):
    text = comparison_text(PEAK, WHERE, measured * MiB, resident=resident)
    assert text == expected.format(plan=f"100.0 MiB at the peak by plan, {WHERE}")


def test_compare_waits_for_the_plan_only_if_requested(monkeypatch):
    compared = threading.Event()

    def slow(seconds, task, recipe, machine):
        assert compared.wait(120)
        return PEAK, WHERE

    monkeypatch.setattr(comparison, "run_in_process", slow)
    forecast = Forecast(None, ON_GPU)
    assert forecast.compare(100 * MiB) is None
    compared.set()
    assert forecast.compare(100 * MiB, seconds=120).endswith("the same")


def test_failed_plan_is_reported(monkeypatch):
    def fail(*_):
        raise TrainingError("planning ended with status 1:\nTraceback\nValueError: what")

    monkeypatch.setattr(comparison, "run_in_process", fail)
    text = Forecast(None, ON_GPU).compare(1, seconds=120)
    assert text == "memory: the peak cannot be compared with a plan: ValueError: what"
