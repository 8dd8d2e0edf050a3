"""Which nodes the preflight of a job found unfit."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from launcher.errors import EXIT_DONE, EXIT_USAGE
from launcher.slurm.scheduler import log

LATE = 124
"""Exit status of a check that was ended because it took too long, as of timeout(1)."""
LINES = 20
"""Of a bad node's output in the job's log."""
Found = tuple[dict[str, list[str]], list[str]]
"""Bad nodes with lines that say why; and problems that no node is blamed for."""


def each(file: Path, nodes: Sequence[str], *, status: int) -> Found:
    """Of the nodes alone. file: lines `NODE: ...`, the last of a node `NODE: status N`.

    Bad are nodes where the check failed with another status than 2 (arguments), or did not end in
    time. status: of the srun.
    """
    printed: dict[str, list[str]] = {node: [] for node in nodes}
    for line in file.read_text(errors="replace").splitlines() if file.exists() else ():
        node, _, text = line.partition(": ")
        if node in printed:
            printed[node].append(text)
    bad, other = {}, []
    for node, lines in printed.items():
        last = re.fullmatch(r"status (\d+)", lines[-1]) if lines else None
        if last is None and status == LATE:
            late = "did not end in time: a GPU, its driver or a file system hangs"
            bad[node] = [*lines[-LINES:], late]
        elif last is None:
            other.append(f"{node}: no result; the srun ended with status {status}")
        elif int(last[1]) == EXIT_USAGE:
            other.append(f"{node}: {' '.join(lines[:-1])}")
        elif int(last[1]) != EXIT_DONE:
            bad[node] = lines[:-1][-LINES:] or [f"ended with status {last[1]}"]
    return bad, other


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
        if finding["state"] == "bad" and host in report["bad_nodes"] and host in nodes:
            bad.setdefault(host, []).append(line)
        elif finding["state"] == "bad":
            other.append(f"{host}: {line}")
    return bad, other


def report(bad: Mapping[str, Sequence[str]], other: Sequence[str], file: Path) -> list[str]:
    """Writes to the job's log what was found; returns the bad nodes. file: the whole output."""
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
