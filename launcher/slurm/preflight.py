"""Which nodes the preflight of a job found unfit."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from launcher.slurm.scheduler import log

LATE = 124
"""Exit status of a check that was ended because it took too long, as of timeout(1)."""
Found = tuple[dict[str, list[str]], list[str]]
"""Bad nodes with lines that say why; and problems that no node is blamed for."""


def each(file: Path, nodes: Sequence[str], *, status: int) -> Found:
    """Of the nodes alone. file: lines `NODE fit: ...` or `NODE unfit: ...` (`launcher doctor
    --node`). status: of the srun.

    Nodes without a result are bad, unless there is none at all.
    """
    lines = file.read_text(errors="replace").splitlines()
    bad = {node: [line for line in lines if line.startswith(f"{node} unfit: ")] for node in nodes}
    fit = [node for node in nodes if any(line.startswith(f"{node} fit: ") for line in lines)]
    if status != LATE and not fit and not any(bad.values()):
        return {}, [f"no node has a result; the srun ended with status {status}", *lines[-20:]]
    hangs = "did not end in time: a GPU, its driver or a file system hangs"
    why = hangs if status == LATE else f"no result; the srun ended with status {status}"
    return {node: bad[node] or [why] for node in nodes if node not in fit}, []


def together(file: Path, nodes: Sequence[str], *, status: int) -> Found:
    """Of all nodes together. file: the report of `launcher doctor json=FILE`."""
    try:
        report = json.loads(file.read_text())
    except (OSError, ValueError):
        how = "took too long" if status == LATE else f"ended with status {status}, without a report"
        return {}, [f"the check {how}"]
    bad: dict[str, list[str]] = {}
    other = []
    for finding in report["findings"]:
        host, line = finding["host"], f"{finding['name']}: {finding['text']}"
        if finding["state"] == "bad" and host in nodes:
            bad.setdefault(host, []).append(line)
        elif finding["state"] == "bad":
            other.append(f"{host}: {line}")
    return bad, other


def report(bad: Mapping[str, Sequence[str]], other: Sequence[str], file: Path) -> list[str]:
    """Writes the findings to the job's log and returns the bad nodes. file: with all output."""
    for line in other:
        log(f"preflight: {line}")
    if other and not bad:
        log(f"preflight: no node can be blamed for that, so training begins; details: {file}")
    if bad:
        log(f"preflight: not fit to train: {', '.join(bad)}; details: {file}")
        for node, lines in bad.items():
            for line in lines:
                log(f"  {node}: {line}")
    return list(bad)
