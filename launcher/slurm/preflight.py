"""What the job's script makes of its preflight: the nodes to leave out, in a line, and why, in the job's log.

    python -m launcher.slurm.preflight each LOG STATUS        each node alone: lines `NODE: ...`, the last of a node `NODE: status N`
    python -m launcher.slurm.preflight together JSON STATUS   all nodes together, as `launcher doctor json=FILE` tells

STATUS: of the srun; 124: it took too long, and was ended. Runs on the job's first node; imports no torch.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from launcher.errors import EXIT_DONE, EXIT_USAGE
from launcher.slurm.attempts import say, scontrol

LATE = 124
"""Status of what took too long, as timeout(1) has it."""
LINES = 20
"""Of what a bad node says, in the job's log."""


def each(log: str, nodes: Sequence[str], *, status: int) -> tuple[dict[str, list[str]], list[str]]:
    """Bad nodes, and why in lines: those where it ended with another status than 0 or 2 (arguments, which are no node's
    fault), and where it took too long also those where it had not ended. And what was not found out, which is held against none."""
    said: dict[str, list[str]] = {node: [] for node in nodes}
    for line in log.splitlines():
        node, _, text = line.partition(": ")
        if node in said:
            said[node].append(text)
    bad, nobody = {}, []
    for node, lines in said.items():
        ended = re.fullmatch(r"status (\d+)", lines[-1]) if lines else None
        if ended is not None and int(ended[1]) not in (EXIT_DONE, EXIT_USAGE):
            bad[node] = lines[:-1][-LINES:] or [f"ended with status {ended[1]}"]
        elif ended is None and status == LATE:
            bad[node] = [*lines[-LINES:], "did not come to an end: a GPU, its driver or a file system hangs"]
        elif ended is None:
            nobody.append(f"{node}: nothing is known of it; the srun ended with status {status}")
        elif int(ended[1]) == EXIT_USAGE:
            nobody.append(f"{node}: {' '.join(lines[:-1])}")
    return bad, nobody


def together(report: dict[str, Any] | None, nodes: Sequence[str], *, status: int) -> tuple[dict[str, list[str]], list[str]]:
    """Bad nodes, and why; and what is bad without being any one node's, for which nobody is left out. report: None: there is none."""
    if report is None:
        how = "took too long, and was ended" if status == LATE else f"ended with status {status}, and no report"
        return {}, [f"the examination {how}"]
    bad: dict[str, list[str]] = {}
    nobody = []
    for finding in report["findings"]:
        if finding["state"] != "bad":
            continue
        line = f"{finding['name']}: {finding['text']}"
        if finding["host"] in report["bad_nodes"] and finding["host"] in nodes:
            bad.setdefault(finding["host"], []).append(line)
        else:
            nobody.append(f"{finding['host']}: {line}")
    return bad, nobody


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the bad nodes."""
    verb, name, status = sys.argv[1:] if arguments is None else arguments
    file = Path(name)
    nodes = (scontrol("show", "hostnames", os.environ["SLURM_JOB_NODELIST"]) or "").split()
    if verb == "each":
        bad, nobody = each(file.read_text(errors="replace") if file.exists() else "", nodes, status=int(status))
        log = file
    else:
        try:
            report = json.loads(file.read_text())
        except (OSError, ValueError):
            report = None
        bad, nobody = together(report, nodes, status=int(status))
        log = file.with_suffix(".log")
    for line in nobody:
        say(f"preflight: {line}")
    if nobody and not bad:
        say(f"preflight: no node is named by that, and training goes on; more is in {log}")
    if bad:
        say(f"preflight: not fit to train: {', '.join(bad)}; more is in {log}")
        for node, lines in bad.items():
            for line in lines:
                print(f"  {node}: {line}", file=sys.stderr, flush=True)
        print(" ".join(bad))
    return EXIT_DONE


if __name__ == "__main__":
    sys.exit(main())
