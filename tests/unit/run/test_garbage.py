"""Tests of the schedule of Python's garbage collection."""

import gc
import weakref

import pytest

from launcher.run.garbage import EVERY_STEPS, GarbageCollection


class Cycle:
    def __init__(self):
        self.own = self


@pytest.fixture
def collections():
    """The generations that are collected."""
    seen = []

    def see(phase, info):
        if phase == "start":
            seen.append(info["generation"])

    gc.callbacks.append(see)
    yield seen
    gc.callbacks.remove(see)


@pytest.mark.slow
def test_collections_come_between_steps_only(collections):
    frozen = gc.get_freeze_count()
    with GarbageCollection() as garbage:
        collections.clear()
        made = [Cycle() for _ in range(100_000)]  # enough for many automatic collections
        assert collections == []
        garbage.step_done(1, everything=False)
        assert gc.get_freeze_count() > frozen + len(made)
        for step in range(2, EVERY_STEPS + 1):
            cycle = weakref.ref(Cycle())
            assert cycle() is not None
            garbage.step_done(step, everything=step == 7)
            assert cycle() is None, "activations in a cycle are freed after the step"
        assert collections == [2, *[0] * 5, 2, *[0] * (EVERY_STEPS - 8), 1]
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


@pytest.mark.parametrize("enabled", [True, False])
def test_collection_is_as_before_after_an_error(enabled):
    def fail():
        with GarbageCollection():
            assert not gc.isenabled()
            raise KeyError

    (gc.enable if enabled else gc.disable)()
    try:
        with pytest.raises(KeyError):
            fail()
        assert gc.isenabled() == enabled
    finally:
        gc.enable()
