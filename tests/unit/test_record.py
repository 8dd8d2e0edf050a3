"""Steps to lines of metrics.jsonl: rates, peaks, and when a line is written."""

import json
from types import SimpleNamespace

import pytest
import torch

from launcher.data.loader import GlobalBatch, StepStatistics
from launcher.distributed import host_memory
from launcher.distributed.process_group import DataParallel
from launcher.errors import DivergedError
from launcher.metrics import recorder
from launcher.metrics.recorder import StepRecorder
from launcher.recipe.load import load_recipe
from launcher.reliability.run_directory import RunFolder
from launcher.training.loop import Step
from launcher.training.reporting import Reporter

ALONE = DataParallel(rank=0, size=1, group=None, device=torch.device("cpu"))


def step(number, *, tokens=100, loss=1.0, skipped=0.0, waited=0.5):
    batch = GlobalBatch(
        number, [], StepStatistics([tokens - 1, tokens, 0, 0], ALONE, None), 8 * number, waited
    )
    return Step(number, torch.tensor(loss), torch.tensor(2.0), torch.tensor(skipped), 1e-3, batch)


@pytest.fixture
def clock(monkeypatch):
    """A clock that the test advances."""
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(recorder.time, "perf_counter", lambda: clock.now)
    return clock


def test_rates_are_means_over_the_steps_since_the_last_record(clock):
    recorder = StepRecorder(ALONE, flops_per_token=3.0, peak_flops=600.0)

    def train(numbers_and_tokens):
        for number, tokens in numbers_and_tokens:
            clock.now += 2.0
            recorder.add(last := step(number, tokens=tokens))
        return recorder.launch(last)

    first = train([(1, 10), (2, 30), (3, 60)])
    with recorder.excluded():
        clock.now += 50.0
    second = train([(4, 40)])  # launched before the first one is collected, as in a run
    line = recorder.collect(first)
    assert (line["step"], line["tokens"], line["loss_tokens"]) == (3, 60, 59), "of the step itself"
    assert line["step_seconds"] == pytest.approx(2.0)
    assert line["tokens_per_second"] == pytest.approx((10 + 30 + 60) / 6)
    assert line["mfu"] == pytest.approx(100 / 6 * 3 / 600)
    assert line["data_seconds"] == pytest.approx(0.5)
    line = recorder.collect(second)
    assert line["step_seconds"] == pytest.approx(2.0), "without the pause"
    assert line["tokens_per_second"] == pytest.approx(20)


def test_the_peak_is_that_since_the_last_record(monkeypatch):
    peaks = iter([500, 300])
    monkeypatch.setattr(host_memory, "take_peak", lambda: next(peaks))
    recorder = StepRecorder(ALONE, flops_per_token=0.0, peak_flops=None)
    for number, expected in ((1, 500), (2, 300)):
        recorder.add(step(number))
        assert recorder.collect(recorder.launch(step(number)))["peak_memory_bytes"] == expected


def test_the_peak_of_a_gpu_is_reset_once_it_was_read(monkeypatch):
    peak = [700]
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: peak[0])
    monkeypatch.setattr(
        torch.cuda, "reset_peak_memory_stats", lambda device: peak.__setitem__(0, 200)
    )
    assert [recorder._peak_memory(torch.device("cuda")) for _ in range(2)] == [700, 200]


@pytest.fixture
def reporter(folder):
    recipe = load_recipe(["recipe=x.yaml", "run.max_skipped_steps=2"], ranks=1).recipe
    run = RunFolder(folder / "run")
    run.create("")
    return Reporter(ALONE, run, recipe=recipe, steps=10, first_step=0, flops_per_token=0.0)


def lines(folder):
    return [
        json.loads(line)["step"] for line in (folder / "run/metrics.jsonl").read_text().splitlines()
    ]


def test_a_line_is_written_after_the_next_step_or_before_a_pause(reporter, folder):
    reporter.step(step(1))
    assert lines(folder) == [1], "the first one at once"
    reporter.step(step(2))
    assert lines(folder) == [1]
    reporter.step(step(3))
    assert lines(folder) == [1, 2]
    with reporter.excluded():
        assert lines(folder) == [1, 2, 3]
    reporter.step(step(4))
    reporter.flush()
    assert lines(folder) == [1, 2, 3, 4]


def test_steps_after_a_diverged_one_are_not_logged(reporter, folder):
    reporter.step(step(1))
    for number in (2, 3):
        reporter.step(step(number, skipped=1.0))
    with pytest.raises(DivergedError) as raised:
        reporter.step(step(4))
    assert (raised.value.first_step, raised.value.last_step) == (2, 3)
    reporter.abort()
    assert lines(folder) == [1, 2, 3]


def test_a_run_that_fails_keeps_its_last_line_and_closes_everything(reporter, folder):
    closed = []
    reporter._sinks.append(SimpleNamespace(write=lambda record: None, close=closed.append))
    for number in (1, 2, 3):
        reporter.step(step(number))
    reporter.abort()
    assert lines(folder) == [1, 2, 3]
    assert closed == ["failed"]
    reporter.abort()
    assert closed == ["failed"], "once"
