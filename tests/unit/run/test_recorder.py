"""Tests of metrics.jsonl and of the messages about slow ranks."""

import dataclasses
import json
import math
import random
import re
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from launcher.console import losses_as_text
from launcher.data.loader import GlobalBatch, StepStatistics, StepTotals
from launcher.distributed import host_memory
from launcher.distributed.rank_layout import OTHERS, STAGES, RankLayout
from launcher.errors import DivergedError
from launcher.metrics import slow_ranks
from launcher.metrics.sinks import _numbers
from launcher.metrics.slow_ranks import SlowRanks
from launcher.models.flops import TokenFlops
from launcher.recipe.load import load_recipe
from launcher.reliability.json_files import read_jsonl
from launcher.reliability.run_directory import RunFolder
from launcher.run import recorder, reporting
from launcher.run.recorder import GATHERED, StepRecorder
from launcher.run.reporting import Reporter
from launcher.training.loop import Step
from launcher.training.setup import Flops

SINGLE_RANK = RankLayout(rank=0, size=1, group=None, device=torch.device("cpu"))


def step(number, *, tokens=100, loss=1.0, skipped=0.0, waited=0.5):
    batch = GlobalBatch(
        number, [], StepStatistics(StepTotals(tokens - 1, tokens), SINGLE_RANK), 8 * number, waited
    )
    return Step(number, torch.tensor(loss), torch.tensor(2.0), torch.tensor(skipped), 1e-3, batch)


@pytest.fixture
def clock(monkeypatch):
    """A clock that the test advances."""
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(recorder.time, "perf_counter", lambda: clock.now)
    return clock


def test_rates_are_means_since_the_last_record(clock):
    recorder = StepRecorder(SINGLE_RANK)

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
    assert (line["step"], line["tokens"], line["loss_tokens"]) == (3, 60, 59), (
        "counts of the last step only"
    )
    expected = {"step_seconds": 2.0, "tokens_per_second": (10 + 30 + 60) / 6, "data_seconds": 0.5}
    assert {key: line[key] for key in expected} == pytest.approx(expected)
    line = recorder.collect(second)
    assert line["step_seconds"] == pytest.approx(2.0), "the excluded pause is not counted"
    assert line["tokens_per_second"] == pytest.approx(20)


def test_mfu_counts_attention_to_tokens_of_the_same_document(reporter):
    """16 tokens in documents of 12 and 4: a token attends to (144 + 16) / 16 = 10 of them. The
    operations of towers are those of the step, here 7 for each token."""
    totals = StepTotals(15, 16, squared_lengths=160, tower_operations=7 * 16)
    statistics = StepStatistics(totals, SINGLE_RANK)
    batch = GlobalBatch(1, [], statistics, 8, 0.5)
    last = Step(1, torch.tensor(1.0), torch.tensor(2.0), torch.tensor(0.0), 1e-3, batch)
    reporter._flops = Flops(TokenFlops(3.0, ((2.0, math.inf), (5.0, 4.0))), peak=600.0)
    recorder = reporter._recorder
    recorder.phase("forward")
    recorder.add(last)
    line = reporter._collect(recorder.launch(last))
    assert line["document_length"] == 10
    operations = 3.0 + 2.0 * 10 + 5.0 * 4 + 7.0
    assert line["mfu"] == pytest.approx(line["tokens_per_second"] * operations / 600.0)


def test_losses_of_the_sources_of_a_mixture(clock):
    """Sums of losses and of weights, over the ranks, behind the further metrics of the loss; a source
    may have no target in a step."""
    recorder = StepRecorder(SINGLE_RANK)
    recorder.objective = SimpleNamespace(metrics=("kl",), shown=lambda means: means)
    recorder.sources = ("web", "talk", "code")
    clock.now += 2.0
    parts = torch.tensor([0.125, 1.5, 0.5, 0.0, 0.75, 0.25, 0.0])
    recorder.add(last := dataclasses.replace(step(1, loss=2.0), metrics=parts))
    line = recorder.collect(recorder.launch(last))
    assert (line["loss"], line["losses"]) == (2.0, {"web": 2.0, "talk": 2.0, "code": None})
    assert line["shares"] == {"web": 0.75, "talk": 0.25, "code": 0.0}
    assert line["kl"] == 0.125
    assert losses_as_text(line) == "(web 2.0000, talk 2.0000)"
    assert not [key for key in line if key.startswith(("loss ", "weight "))]
    assert _numbers(line)["training/loss/web"] == 2.0
    assert _numbers(line)["training/share/web"] == 0.75


def test_step_time_by_phase(clock):
    recorder = StepRecorder(SINGLE_RANK)
    for number in (1, 2):
        for phase, seconds, waits in (
            ("data", 0.5, 0.0),
            ("forward", 1.0, 0.0),
            ("backward", 1.5, 1.5),
            ("optimizer", 1.0, 0.0),
        ):
            recorder.phase(phase)
            clock.now += seconds
            with recorder.waiting():
                clock.now += waits
        recorder.phase("data")
        clock.now += 0.5
        recorder.add(step(number))
        if number == 1:
            with recorder.excluded("checkpoint"), recorder.waiting():
                clock.now += 7.0
        clock.now += 0.25
    line = recorder.collect(recorder.launch(step(2)))
    expected = {"forward": 1.0, "backward": 3.0, "optimizer": 1.0, "logging": 0.25, "step": 6.25}
    expected |= {"communication": 1.5, "checkpoint": 7.0, "slowest_rank": 6.25 - 1.5 - 0.25}
    assert {name: line[f"{name}_seconds"] for name in expected} == pytest.approx(expected)
    recorder.add(step(3))
    clock.now += 1.0
    recorder.collect(recorder.launch(step(3)))


def test_times_of_the_stages_of_a_pipeline(clock):
    """Compute of a pass is without waits; waits for other stages and for others are apart."""
    recorder = StepRecorder(SINGLE_RANK)
    recorder.stages = 2
    for number in (1, 2):
        for phase, computes, what, waits in (
            ("forward", 1.0, STAGES, 0.5),
            ("backward", 2.0, STAGES, 0.25),
            ("forward", 1.0, OTHERS, 0.125),
            ("optimizer", 1.0, STAGES, 0.75),  # the norm over all stages
        ):
            recorder.phase(phase)
            clock.now += computes
            with recorder.waiting(what):
                clock.now += waits
        recorder.add(step(number))
    pending = recorder.launch(step(2))
    both = torch.stack([pending.numbers, pending.numbers])  # as of a second rank
    pending = dataclasses.replace(pending, numbers=both)
    recorder._ranks = SimpleNamespace(size=2)
    times = {"forward": 2.0, "backward": 2.0, "wait": 1.5, "communication": 0.125}
    expected = {f"{name}_seconds": seconds for name, seconds in times.items()}
    line = recorder.collect(pending)
    assert line["stages"] == [pytest.approx(expected)] * 2
    assert line["communication_seconds"] == pytest.approx(1.625)


def test_waits_that_a_strategy_cannot_time_are_null(clock):
    recorder = StepRecorder(SINGLE_RANK)
    recorder.measures_waits = False
    with recorder.waiting():
        clock.now += 1.0
    recorder.add(step(1))
    line = recorder.collect(recorder.launch(step(1)))
    assert line["step_seconds"] == pytest.approx(1.0)
    assert line["communication_seconds"] is line["slowest_rank"] is None


@pytest.fixture
def slow_rank_messages(monkeypatch, clock):
    """Run 60 steps of some seconds. The second-to-last rank is slow in `slow_steps`; all ranks have
    delays."""
    monkeypatch.setattr(slow_ranks, "time", SimpleNamespace(monotonic=lambda: clock.now))
    return partial(_slow_rank_messages, clock)


def _slow_rank_messages(clock, slow_steps, *, ranks=4, seconds=1.0):
    generator, found = random.Random(0), []
    slow = SlowRanks([f"node{rank // 2}" for rank in range(ranks)])
    for number in range(1, 61):
        clock.now += seconds
        own = [
            generator.uniform(0.95, 1.05) * generator.choice([1.0] * 9 + [3.0])
            for _ in range(ranks)
        ]
        own[-2] *= 2.0 if number in slow_steps else 1.0
        found += [(number, message) for message in slow.update(number, own)]
    return found, slow.note


def test_slow_rank_is_reported_at_start_and_end(slow_rank_messages):
    assert slow_rank_messages(range(0)) == ([], None)
    ((begin, first), (end, second)), note = slow_rank_messages(range(20, 40))
    assert re.match("slow: rank 2 on node1 takes [12].[90] times as long for a step as the", first)
    assert "since step 20" in first
    assert second.startswith("rank 2 on node1 is no longer slow")
    assert 20 < begin < 30 < 40 < end < 52
    assert note is None
    ((_, first),), note = slow_rank_messages(range(20, 61), ranks=2)
    assert "slow: rank 0 on node0 takes " in first
    assert re.fullmatch("rank 0 slow x[12].[90]", note)


def test_a_rank_is_slow_among_those_of_its_stage(monkeypatch, clock):
    """Stages compute different blocks: neither a stage of one rank nor one of several is slow because
    another one has less to do."""
    monkeypatch.setattr(slow_ranks, "time", SimpleNamespace(monotonic=lambda: clock.now))

    def messages(own, *, stages):
        slow = SlowRanks([f"node{rank}" for rank in range(len(own))], stages=stages)
        found = []
        for number in range(1, 31):
            clock.now += 1.0
            found += slow.update(number, own)
        return found

    assert messages([3.0, 1.0], stages=2) == messages([3.0, 3.1, 1.0, 1.1], stages=2) == []
    (message,) = messages([3.0, 3.1, 1.0, 2.0], stages=2)
    assert message.startswith("slow: rank 3 on node3 takes 2.0 times as long")


@pytest.mark.parametrize(
    ("own", "rank", "fastest"), [([3.0, 3.5, 1.0, 2.0], 3, 1.0), ([3.0, 1.0], 0, 3.0)]
)
def test_the_slowest_rank_of_a_record_is_so_in_its_stage(own, rank, fastest):
    recorder = StepRecorder(SINGLE_RANK)
    recorder.stages = 2
    recorder.add(step(1))
    pending = recorder.launch(step(1))
    numbers = torch.stack([pending.numbers] * len(own))
    numbers[:, GATHERED.index("own")] = torch.tensor(own)
    recorder._ranks = SimpleNamespace(size=len(own))
    line = recorder.collect(dataclasses.replace(pending, numbers=numbers))
    assert line["slowest_rank"] == rank
    assert line["slowest_rank_seconds"] == own[rank]
    assert line["fastest_rank_seconds"] == fastest


def test_rank_is_slow_only_after_three_seconds(slow_rank_messages):
    assert slow_rank_messages(range(20, 40), seconds=0.1) == ([], None)
    ((number, text),), note = slow_rank_messages(range(5, 61), seconds=0.1)
    assert 34 <= number <= 36
    assert text.endswith("since step 5 (3 s)")
    assert note.startswith("rank 2 slow")


def test_peak_memory_is_since_the_last_record(monkeypatch):
    peaks, allocated = iter([500, 300]), [700]
    monkeypatch.setattr(host_memory, "take_peak", lambda: next(peaks))
    on_cpu = StepRecorder(SINGLE_RANK)
    for number, expected in ((1, 500), (2, 300)):
        on_cpu.add(step(number))
        assert on_cpu.collect(on_cpu.launch(step(number)))["peak_memory_bytes"] == expected
    reset = lambda device: allocated.__setitem__(0, 200)  # noqa: E731
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: allocated[0])
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: 900)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", reset)
    found = [recorder._peak_memory(torch.device("cuda")) for _ in range(2)]
    assert found == [(700, 900), (200, 900)]


@pytest.fixture
def reporter(folder):
    recipe = load_recipe(["recipe=x.yaml", "run.max_skipped_steps=2"], ranks=1).recipe
    run = RunFolder(folder / "run")
    run.create("")
    training = SimpleNamespace(
        ranks=SINGLE_RANK,
        recipe=recipe,
        data=SimpleNamespace(steps=10),
        flops=Flops(TokenFlops(3.0), peak=600.0),
    )
    return Reporter(training, run, StepRecorder(SINGLE_RANK), first_step=0)


def test_a_slow_step_on_a_cpu_shows_its_micro_batches(reporter, clock, monkeypatch, caplog):
    monkeypatch.setattr(reporting.time, "monotonic", lambda: clock.now)
    asked = []
    reporter._training.data.sampler = SimpleNamespace(micro_batches=lambda step: 8)
    reporter._training.hooks = SimpleNamespace(stop_requested=lambda: bool(asked))
    with caplog.at_level("INFO"):
        for seconds in (1.0, 6.0):  # of a micro-batch, in two steps
            reporter.phase("data")
            for _ in range(8):
                reporter.phase("forward")
                clock.now += seconds
                reporter.phase("backward")
                if seconds > 1.0 and _ == 4:
                    asked.append(True)
            reporter.phase("optimizer")
    assert [record.getMessage() for record in caplog.records] == [
        "step 1: 1 of 8 micro-batches",
        "step 1: 3 of 8 micro-batches",
        "step 1: 5 of 8 micro-batches; the run stops after this micro-batch",
        "step 1: 7 of 8 micro-batches; the run stops after this micro-batch",
    ]


def test_a_short_run_without_a_finite_step_ends_with_an_error(reporter):
    reporter._recipe = dataclasses.replace(
        reporter._recipe, run=dataclasses.replace(reporter._recipe.run, max_skipped_steps=20)
    )
    for number in range(1, 11):
        reporter.step(step(number, skipped=1.0))
    with pytest.raises(DivergedError, match="not finite in all 10 steps, so the weights are the"):
        reporter.flush()


def test_retried_allocations_are_one_warning(reporter, folder, monkeypatch, caplog):
    counts = {1: 9, 5: 9, 6: 3, 7: 0, 8: 2}
    collect = reporter._recorder.collect
    monkeypatch.setattr(
        reporter._recorder,
        "collect",
        lambda pending: (
            collect(pending)
            | {"allocation_retries": counts.get(pending.step.number, 0)}
            | {"peak_memory_bytes": 3 << 30, "reserved_memory_bytes": 4 << 30}
        ),
    )
    for number in range(1, 10):
        reporter.step(step(number))
    reporter.flush()
    found = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(found) == 1, found
    assert "after step 5, up to step 6, PyTorch repeated 3 allocations" in found[0]
    assert "3.0 GiB of tensors at the peak, 4.0 GiB reserved" in found[0]
    reporter.warn("a warning")
    status = json.loads((folder / "run/status.json").read_text())
    expected = {"peak_memory_bytes": 3 << 30, "reserved_memory_bytes": 4 << 30}
    expected |= {"allocation_retries": 5, "warning": "a warning", "steps": 10}
    assert {key: status[key] for key in expected} == expected
    reporter.warn(None)
    status = json.loads((folder / "run/status.json").read_text())
    assert "warning" not in status
    assert status["allocation_retries"] == 5


def test_memory_of_the_allocator_is_null_on_a_cpu(reporter, folder):
    reporter.step(step(1))
    (line,) = read_jsonl(folder / "run/metrics.jsonl")
    assert line["allocation_retries"] is line["reserved_memory_bytes"] is None
    assert reporter._status["allocation_retries"] is None


def lines(folder):
    return [line["step"] for line in read_jsonl(folder / "run/metrics.jsonl")]


def test_lines_are_written_one_step_late(reporter, folder):
    closed = []
    reporter._sinks.append(SimpleNamespace(write=lambda record: None, close=closed.append))
    reporter.step(step(1))
    assert lines(folder) == [1], "the first line is written at once"
    reporter.step(step(2))
    assert lines(folder) == [1]
    reporter.step(step(3))
    assert lines(folder) == [1, 2]
    with reporter.excluded():
        assert lines(folder) == [1, 2, 3]
    reporter.step(step(4))
    reporter.flush()
    assert lines(folder) == [1, 2, 3, 4]
    for line in read_jsonl(folder / "run/metrics.jsonl"):
        assert line["mfu"] == pytest.approx(line["tokens_per_second"] * 3 / 600)
    reporter.step(step(5))
    reporter.abort()
    assert lines(folder) == [1, 2, 3, 4, 5], "a failed run keeps its last line"
    reporter.abort()
    assert closed == ["failed"], "sinks are closed once"


def test_spikes_of_the_first_ten_losses_are_no_divergence(reporter):
    """They fall and jump in any run. Later ones are compared with the median before them."""
    run = dataclasses.replace(reporter._recipe.run, max_loss_ratio=2.0)
    reporter._recipe = dataclasses.replace(reporter._recipe, run=run)
    for number, loss in enumerate([1.0, 1.0, 1.0, 9.0, 1.0, 9.0, 1.0, 1.0, 1.0, 9.0, 1.9], start=1):
        reporter.step(step(number, loss=loss))
    reporter.step(step(12, loss=2.1))
    with pytest.raises(
        DivergedError, match=r"2\.1, is more than .* the median of the 11 before it"
    ):
        reporter.flush()


@pytest.mark.parametrize("losses", [[-1.0] * 10 + [-0.5, 0.5], [0.3] * 5 + [-0.1] * 6 + [0.9]])
def test_a_loss_that_can_be_negative_has_no_ratio(reporter, losses):
    """Three times a negative median is below each normal loss."""
    run = dataclasses.replace(reporter._recipe.run, max_loss_ratio=3.0)
    reporter._recipe = dataclasses.replace(reporter._recipe, run=run)
    for number, loss in enumerate(losses, start=1):
        reporter.step(step(number, loss=loss))
    reporter.flush()


def test_steps_after_divergence_are_not_logged(reporter, folder):
    reporter.step(step(1))
    for number in (2, 3):
        reporter.step(step(number, skipped=1.0))
    with pytest.raises(DivergedError) as raised:
        reporter.step(step(4))
    assert (raised.value.first_step, raised.value.last_step) == (2, 3)
    reporter.abort()
    assert lines(folder) == [1, 2, 3]
