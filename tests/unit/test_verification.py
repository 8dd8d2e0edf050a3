"""What is planned and what is measured: the same is good, and a tenth more of any component is not."""

import dataclasses

import pytest

from launcher.planner.components import COMPONENTS, Components, Moment, StepMemory
from launcher.planner.measure import Measured
from launcher.planner.verification import compare

MB = 1_000_000
STATES = {"parameters": 40 * MB, "gradients": 40 * MB, "optimizer": 80 * MB}


def moment(phase, **changes):
    return Moment(phase=phase, micro_batch=0, where="", components=Components(**STATES | changes))


FORWARD = moment("forward", gathered=20 * MB, activations=90 * MB, logits=30 * MB, communication=20 * MB, temporary=25 * MB)
BACKWARD = moment("backward", gathered=20 * MB, activations=80 * MB, logits=60 * MB, communication=30 * MB, temporary=35 * MB)
OPTIMIZER = moment("optimizer", temporary=2 * MB)
PLANNED = StepMemory(
    method="traced",
    peak=BACKWARD,
    phases={"forward": FORWARD, "backward": BACKWARD, "optimizer": OPTIMIZER},
    held=Components(**STATES),
    after_forward=Components(**STATES, gathered=20 * MB, activations=90 * MB, logits=30 * MB),
    timeline=(FORWARD, BACKWARD, OPTIMIZER),
    host=0,
)


def measured(planned=PLANNED, **changes):
    peak = planned.peak.components.total
    after = planned.after_forward
    found = Measured(
        device="cpu",
        peak=peak,
        peak_of_ranks=peak,
        phases={phase: found.components.total for phase, found in planned.phases.items()},
        step_start=planned.held.total,
        after_forward=after.total,
        after_backward=planned.held.total,
        step_end=planned.held.total,
        parameters=planned.held.parameters,
        gradients=planned.phases["optimizer"].components.gradients,
        optimizer=planned.held.optimizer,
        gathered=after.gathered,
        activations=after.activations,
        logits=after.logits,
        spread=0,
        residue=0,
        reserved=None,
        context=None,
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
        peak=at(step.peak),
        phases={phase: at(given) for phase, given in step.phases.items()},
        held=components(step.held),
        after_forward=components(step.after_forward),
        timeline=tuple(at(given) for given in step.timeline),
    )


def test_the_same_is_good():
    found = compare(PLANNED, measured())
    assert found.good
    assert {row.ratio for row in found.rows} == {1.0}
    assert found.rows[-1].what == "peak"


@pytest.mark.parametrize("factor", [0.9, 1.1])
@pytest.mark.parametrize("name", COMPONENTS)
def test_a_tenth_of_any_component_is_seen(name, factor):
    assert not compare(scaled(PLANNED, name, factor), measured()).good
    assert compare(scaled(PLANNED, name, 1.0), measured()).good


def test_what_cannot_be_told_from_activations_is_compared_with_them():
    after = PLANNED.after_forward
    together = {"gathered": None, "logits": None, "activations": after.gathered + after.logits + after.activations}
    assert compare(PLANNED, measured(**together)).good
    for name in ("gathered", "logits", "activations"):  # each is part of a sum: it takes more to be seen
        assert not compare(scaled(PLANNED, name, 1.5), measured(**together)).good


def test_what_hardly_counts_is_not_held_against_a_plan():
    peak = PLANNED.peak.components.total
    small = dataclasses.replace(PLANNED, held=dataclasses.replace(PLANNED.held, parameters=200_000))
    step = measured(small, parameters=100_000, step_start=PLANNED.held.total)
    row = compare(small, step).rows[0]
    assert (row.what, row.planned, row.measured) == ("parameters", 200_000, 100_000)
    assert row.good
    assert not compare(small, dataclasses.replace(step, parameters=int(0.01 * peak))).rows[0].good


def test_on_a_gpu_nothing_is_told_by_difference():
    rows = compare(PLANNED, measured(device="cuda")).rows
    assert not any(row.by_difference for row in rows)
    assert "temporary" not in {row.what for row in rows}
