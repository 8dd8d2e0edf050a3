"""How the stages of a pipeline spend a step, by `stages` in metrics.jsonl."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from launcher.console import finite

PARTS = ("forward", "backward", "wait", "communication")
"""Compute of the two passes; waits for other stages; other communication, such as that of FSDP. Each is
`PART_seconds` of a stage in metrics.jsonl."""


def mean_stages(records: Sequence[Mapping[str, Any]]) -> list[dict[str, float]]:
    """For each rank along the stages, the mean seconds of PARTS in a step; empty if they were not
    measured."""
    timed = [stages for record in records if (stages := record.get("stages"))]
    count = min(map(len, timed), default=0)
    return [
        {
            part: sum(finite(stages[rank].get(f"{part}_seconds")) or 0.0 for stages in timed)
            / len(timed)
            for part in PARTS
        }
        for rank in range(count)
    ]


def slowest_stage(stages: Sequence[Mapping[str, float]]) -> int:
    """The index of the one that computes longest."""
    return max(range(len(stages)), key=lambda rank: _compute(stages[rank]))


def expected_wait(
    stages: Sequence[Mapping[str, float]], *, micro_batches: int, chunks: int
) -> float:
    """Seconds that the slowest stage waits for others in a step by the order of its passes, as `launcher
    plan` assumes them. micro_batches: of a step on a rank. chunks: stages of each rank."""
    once = _compute(stages[slowest_stage(stages)]) / micro_batches
    return (len(stages) - 1) / chunks * once


def stages_text(
    records: Sequence[Mapping[str, Any]], *, micro_batches: int, chunks: int
) -> str | None:
    """Which stage computes longest, and how long stages wait for others; None if it was not
    measured."""
    stages = mean_stages(records)
    steps = [seconds for record in records if (seconds := finite(record.get("step_seconds")))]
    if not stages or not steps:
        return None
    step, slowest = sum(steps) / len(steps), slowest_stage(stages)
    expected = expected_wait(stages, micro_batches=micro_batches, chunks=chunks)
    waits = ", ".join(f"{stage['wait'] / step:.0%}" for stage in stages)
    return (
        f"stage {slowest + 1} of {len(stages)} computes longest, "
        f"{_compute(stages[slowest]) / step:.0%} of a step; the stages wait for others {waits}; "
        f"by the schedule stage {slowest + 1} waits {expected / step:.0%}"
    )


def _compute(stage: Mapping[str, float]) -> float:
    return stage["forward"] + stage["backward"]
