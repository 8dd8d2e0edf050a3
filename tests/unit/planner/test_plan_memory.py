"""The plan beside a measurement."""

import dataclasses

import pytest

from launcher.planner.measure import Measured
from launcher.planner.memory import COMPONENTS, Components, Moment, StepMemory, compare, peak_holds

MB = 1_000_000
STATES = {"parameters": 40 * MB, "gradients": 40 * MB, "optimizer": 80 * MB}


def moment(phase, **changes):
    return Moment(phase=phase, micro_batch=0, where="", components=Components(**STATES | changes))


FORWARD = moment(
    "forward",
    gathered=20 * MB,
    activations=90 * MB,
    logits=30 * MB,
    communication=20 * MB,
    temporary=25 * MB,
)
BACKWARD = moment(
    "backward",
    gathered=20 * MB,
    activations=80 * MB,
    logits=60 * MB,
    communication=30 * MB,
    temporary=35 * MB,
)
OPTIMIZER = moment("optimizer", temporary=2 * MB)
PLANNED = StepMemory(
    held=Components(**STATES),
    after_forward=Components(**STATES, gathered=20 * MB, activations=90 * MB, logits=30 * MB),
    timeline=(FORWARD, BACKWARD, OPTIMIZER),
    host=0,
)


def measured(**changes):
    peak = PLANNED.peak.components.total
    found = Measured(
        peak=peak,
        phases={phase: found.components.total for phase, found in PLANNED.phases.items()},
        step_start=PLANNED.held.total,
        after_forward=PLANNED.after_forward.total,
        parameters=STATES["parameters"],
        gradients=STATES["gradients"],
        optimizer=STATES["optimizer"],
        step_peaks=[peak],
        residue=0,
    )
    return dataclasses.replace(found, **changes)


def scaled(step, name, factor):
    """The same with one component larger, wherever it is."""

    def components(given):
        return dataclasses.replace(given, **{name: int(getattr(given, name) * factor)})

    def at(given):
        return dataclasses.replace(given, components=components(given.components))

    return dataclasses.replace(
        step,
        timeline=tuple(at(given) for given in step.timeline),
        held=components(step.held),
        after_forward=components(step.after_forward),
    )


@pytest.mark.parametrize("factor", [0.9, 1.1])
@pytest.mark.parametrize("name", COMPONENTS)
def test_a_wrong_component_shows_in_the_comparison(name, factor):
    rows = compare(PLANNED, measured())
    assert all(planned == found for _, planned, found in rows)
    assert rows[-1][0] == "peak"
    off = [
        abs(planned / found - 1)
        for _, planned, found in compare(scaled(PLANNED, name, factor), measured())
    ]
    assert max(off) > 0.005


@pytest.mark.parametrize(
    ("factor", "holds"), [(1.0, True), (0.96, True), (0.94, False), (1.015, True), (1.03, False)]
)
def test_a_plan_may_exceed_the_peak_by_more_than_it_may_fall_below(factor, holds):
    peak = round(PLANNED.peak.components.total * factor)
    assert peak_holds(PLANNED, measured(peak=peak)) == holds
