"""Measurements from the output of the commands that gpu.py runs."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

Rows = list[dict[str, Any]]


def tables(log: str) -> Rows:
    """The rows of all Markdown tables in the output. Other lines, such as warnings, may stand between
    the rows."""
    lines = [line for line in log.splitlines() if line.startswith("|")]
    found, header = [], list[str]()
    for line, following in zip(lines, [*lines[1:], ""], strict=False):
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if _is_separator(following):
            header = cells
        elif len(cells) == len(header) and not _is_separator(line):
            found.append(dict(zip(header, cells, strict=True)))
    return found


def _is_separator(line: str) -> bool:
    return "---" in line and set(line) <= set("|-: ")


def outcomes(log: str) -> Rows:
    """Outcome, reason and seconds of each test, from the output of `pytest -vv --durations=0`.

    An interrupted test is `not done`. The last row counts the tests that did not start.
    """
    seconds: dict[str, float] = {}
    for value, name in re.findall(r"^([\d.]+)s \w+ +\S+?::(.+?) *$", log, re.M):
        seconds[name] = round(seconds.get(name, 0) + float(value), 2)
    reasons = dict(re.findall(r"^(?:FAILED|ERROR) \S+?::(.+?) - (.+)$", log, re.M))
    # pytest-xdist prints the name of a test at its start, and at its end with the outcome before it
    ended = re.findall(r"^\[gw\d+\].*? ([A-Z]+) \S+?\.py::(.+?) *$", log, re.M)
    line = r"^\S+\.py::(.+?) (?:(PASSED|FAILED|SKIPPED|ERROR)(.*?))? *(?:\[ *\d+%\])?$"
    found = {
        name: {"test": name, "outcome": f"{outcome.lower() or 'not done'}{why.rstrip()}"}
        for name, outcome, why in re.findall(line, log, re.M)
    }
    found |= {name: {"test": name, "outcome": outcome.lower()} for outcome, name in ended}
    for name, reason in reasons.items():
        found[name]["outcome"] += f": {reason}"
    rows: Rows = [{**row, "seconds": seconds.get(name)} for name, row in found.items()]
    total = re.search(r"\bcollected (\d+) items?(?: / (\d+) deselected)?", log)
    total = total or re.search(r"^\d+ workers? \[(\d+) items?()\]", log, re.M)
    if total and (others := int(total[1]) - int(total[2] or 0) - len(rows)):
        rows.append({"test": f"{others} others", "outcome": "not started", "seconds": None})
    return rows


def milliseconds(log: str) -> Rows:
    """The medians from the last line of checkpoint.py's output."""
    found = [line for line in log.splitlines() if line.startswith("{")]
    medians = json.loads(found[-1]) if found else {}
    return [{"what": name, "ms": round(ms, 1)} for name, ms in medians.items()]


def diagnosis(file: Path) -> Callable[[str], Rows]:
    """Findings and rates of `launcher doctor`, from the file that it writes."""

    def read(log: str) -> Rows:
        report = json.loads(file.read_text())
        rates = report["rates"] or {}
        found = [(one["name"], f"{one['state']}: {one['text']}") for one in report["findings"]]
        found += [(name, f"{rate:.4g}") for name, rate in rates.items() if isinstance(rate, float)]
        return [{"what": name, "found": text} for name, text in found]

    return read
