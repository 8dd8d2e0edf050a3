"""Tests of the memory meters, against allocations of known size."""

import threading

import pytest
import torch

from launcher.planner import measurement
from launcher.planner.measurement import CpuMeter, Mark, storage_bytes
from tests.unit.test_house import FILES, imports, module_name


def test_cpu_meter_is_exact_to_the_byte():
    held = [torch.empty(1000)]
    weight = torch.randn(500, 1000, requires_grad=True)
    meter = CpuMeter()
    meter.start()
    held.append(torch.empty(2_500_000))
    meter.mark("ten megabytes")
    held[1].zero_()
    held[1][:1000] = held[0]
    meter.mark("in place")
    product = weight.exp()
    summed = product.sum()
    meter.mark("saved")
    summed.backward()  # allocates the scalar gradient and expands it to the product
    del product, summed
    meter.mark("backward")

    def swap():
        held.append(torch.empty(1_000_000))
        del held[1]

    thread = threading.Thread(target=swap)
    thread.start()
    thread.join()
    storage = torch.empty(250).untyped_storage()
    storage.resize_(0)
    meter.mark("another thread")
    storage.resize_(5000)
    view = held[1].view(1000, 1000)[:10]
    meter.mark("resized")
    del view, storage
    held.clear()  # the first tensor was allocated before the meter started
    weight.grad = None
    marks = {mark.name: mark for mark in meter.stop()}
    two = 500 * 1000 * 4
    assert [mark.live for mark in marks.values()] == [
        *(0, 10_000_000, 10_000_000, 10_000_000 + two + 4, 10_000_000 + two),
        *(4_000_000 + two, 4_000_000 + two + 5000, 0),
    ]
    assert marks["start"].peak == 10_000_000
    assert marks["ten megabytes"].peak == 10_000_000
    assert 0 <= marks["in place"].peak - (10_000_000 + two + 4) <= 16  # temporary memory of the sum
    assert 0 < marks["saved"].peak - (10_000_000 + 2 * two) <= 16
    assert marks["another thread"].peak == 4_000_000 + two + 5000


def test_consecutive_meters_are_independent():
    first = CpuMeter()
    first.start()
    kept = torch.empty(1_000_000)
    assert first.stop()[-1].live == 4_000_000
    second = CpuMeter()
    second.start()
    del kept
    other = torch.empty(10)
    second.mark("freed")
    assert second.stop()[1].live == other.nbytes - 4_000_000


def test_shared_storages_are_counted_once():
    bucket = torch.empty(1000)
    frozen = torch.empty(10)
    tensors = [bucket[:10], bucket[10:].view(99, 10), None, frozen, torch.empty(5, device="meta")]
    assert storage_bytes(tensors, device="cpu") == 4040


def test_evaluate_returns_phases_and_components():
    def step(scale):
        first = [Mark("data", 100, 110), Mark("forward", 110, 300), Mark("backward", 500, 800)]
        second = [Mark("forward", 160, 700 * scale), Mark("backward", 510, 790 * scale)]
        return [*first, *second, Mark("optimizer", 170, 180)]

    end = [Mark("data", 104, 104), Mark("end", 3, 3)]
    marks = [Mark("start", 0, 100), *step(0.1), *step(2), *step(1), *end]
    sizes = {"parameters": 40, "gradients": 50, "optimizer": 60}
    found = measurement.evaluate(marks, sizes, device="cpu")
    # The minimum of the steps after the first
    smallest = {"forward": 700, "backward": 800, "optimizer": 180}
    assert found.phases == smallest
    assert (found.peak, found.step_peaks, found.residue) == (800, [800, 1580, 800], 3)
    assert (found.step_start, found.after_forward) == (100, 500)
    assert (found.parameters, found.gradients, found.optimizer) == (40, 50, 60)
    assert measurement.evaluate(marks, sizes, device="cuda").peak == 1580


@pytest.mark.slow
def test_measurement_imports_no_prediction_modules():
    graph = {module_name(file): set(imports(file)) for file in FILES}
    seen, waiting = set(), ["planner.measurement"]
    while waiting:
        seen.add(module := waiting.pop())
        waiting += graph.get(module, set()) - seen
    predicts = {"estimate", "trace", "profile", "plan", "search", "speed", "work"}
    assert not seen & {f"planner.{name}" for name in predicts}
