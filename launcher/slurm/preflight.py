"""Which nodes the preflight of a job found unfit."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

from launcher.slurm.scheduler import log

LATE = 124
"""Exit status of a check that was ended because it took too long, as of timeout(1)."""
_ALL = "all nodes"
"""Stands for a node in a problem that no single node causes."""
Problems = list[tuple[str, str]]
"""A node, or `all nodes`, and what is wrong there."""


def each(file: Path, nodes: Sequence[str], *, status: int) -> Problems:
    """Problems of nodes that were checked one by one.

    file: lines `NODE fit: ...` or `NODE unfit: ...` (`launcher doctor --node`). status: of
    the srun. Nodes without a result are bad, unless there is none at all.
    """
    lines = file.read_text(errors="replace").splitlines()
    matches = [match for line in lines if (match := re.match(r"(\S+) ((un)?fit: .*)", line))]
    why = f"no result; the srun ended with status {status}"
    if status == LATE:
        why = "did not end in time: a GPU, its driver or a file system hangs"
    elif not matches:
        return [(_ALL, line) for line in (why, *lines[-20:])]
    unfit = [(match[1], match[2]) for match in matches if match[3]]
    return unfit + [(node, why) for node in nodes if node not in {match[1] for match in matches}]


def together(file: Path, *, status: int) -> Problems:
    """Problems found on all nodes together. file: the report of `launcher doctor out=FILE`."""
    try:
        findings = json.loads(file.read_text())["findings"]
        bad = [finding for finding in findings if finding["state"] == "bad"]
        return [(finding["host"], f"{finding['name']}: {finding['text']}") for finding in bad]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        how = "took too long" if status == LATE else f"ended with status {status}, without a report"
        return [(_ALL, f"the check {how}")]


def report(problems: Problems, nodes: Sequence[str], file: Path) -> list[str]:
    """Writes the problems to the job's log and returns the bad nodes. file: holds all output."""
    bad = [node for node in nodes if node in dict(problems)]
    if problems:
        what = f"not fit to train: {', '.join(bad)}"
        if not bad:
            what = "no node can be blamed, so training begins"
        log(f"preflight: {what}; details: {file}")
    for node, why in problems:
        log(f"  {node}: {why}")
    return bad
