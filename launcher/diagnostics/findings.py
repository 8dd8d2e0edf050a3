"""What `launcher doctor` finds, and how it is printed."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypedDict

import typer

from launcher.console import plural
from launcher.distributed.network import node_name
from launcher.reliability.json_files import Json

State = Literal["good", "note", "warning", "bad"]
_MARKS = {
    "good": ("ok  ", "green"),
    "note": ("note", "cyan"),
    "warning": ("warn", "yellow"),
    "bad": ("BAD ", "red"),
}
RATES = {
    "half_flops": ("matrix products, bfloat16", "FLOP/s"),
    "float32_flops": ("matrix products, float32", "FLOP/s"),
    "memory_bandwidth": ("memory, read and written", "B/s"),
    "host_bandwidth": ("between host and device", "B/s"),
    "host_adamw": ("AdamW in host memory", " parameters/s"),
    "intra_node_bandwidth": ("collectives within a node", "B/s"),
    "inter_node_bandwidth": ("collectives across nodes", "B/s"),
}
"""The measured fields of `planner.machine.Rates`: description and unit."""


@dataclass(frozen=True)
class Finding:
    """The result of one check."""

    name: str
    state: State
    """bad: not fit to train; warning: trains, but slower or not for long; note: information."""
    text: str
    host: str = field(default_factory=node_name)


class Versions(TypedDict, total=False):
    """Versions on a node, None for what is missing; empty if this process examined none."""

    torch: str | None
    cuda: str | None
    rocm: str | None
    nccl: str | None
    python: str
    gpus: int
    """The number that torch sees."""
    driver: str | None


@dataclass(frozen=True, kw_only=True)
class Report:
    """What the checks found and measured."""

    findings: list[Finding]
    device: str
    nodes: int
    ranks_per_node: int
    versions: Versions
    rates: Json | None = None
    """Fields of `planner.machine.Rates`; None for a rate that was not measured."""

    @property
    def bad(self) -> list[Finding]:
        """The bad findings."""
        return [finding for finding in self.findings if finding.state == "bad"]

    @property
    def fit(self) -> bool:
        """Whether no finding is bad."""
        return not self.bad

    @property
    def bad_nodes(self) -> list[str]:
        """Hosts with a bad finding, as Slurm names them."""
        return sorted({finding.host for finding in self.bad})


def rate_as_text(rate: float, unit: str) -> str:
    """`652 TFLOP/s`, `2.61 TB/s`, `380 M parameters/s`."""
    for prefix, size in (("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if rate >= size:
            return f"{rate / size:.3g} {prefix}{unit}"
    return f"{rate:.3g} {unit}"


def print_findings(findings: Sequence[Finding], *, hosts: bool) -> None:
    """Prints a line for each finding. With `hosts` it names the host, and findings that several
    hosts share are printed once."""
    findings = _merged(findings) if hosts else findings
    names = max((len(finding.name) for finding in findings), default=0)
    width = max((len(finding.host) for finding in findings), default=0) + 2
    for finding in findings:
        mark, color = _MARKS[finding.state]
        host = f"{finding.host:<{width}}" if hosts else ""
        line = f"  {host}{finding.name:<{names}}  {finding.text}"
        typer.echo(typer.style(f"  {mark}", fg=color) + line)


def _merged(findings: Sequence[Finding]) -> list[Finding]:
    """Merges equal findings of several hosts. Good findings merge even if their texts differ."""
    everywhere, merged = {finding.host for finding in findings}, []
    groups: dict[tuple[str, ...], list[Finding]] = {}
    for finding in findings:
        text = "" if finding.state in ("good", "note") else finding.text
        groups.setdefault((finding.name, finding.state, text), []).append(finding)
    for group in groups.values():
        first, hosts = group[0], {finding.host for finding in group}
        if len(hosts) > 1:
            host = "all nodes" if hosts == everywhere else f"{len(hosts)} nodes"
            differ = any(finding.text != first.text for finding in group)
            text = f"{first.host}: {first.text}" if differ else first.text
            first = dataclasses.replace(first, host=host, text=text)
        merged.append(first)
    return merged


def print_node(findings: Sequence[Finding], versions: Versions) -> bool:
    """Prints `HOST fit: ...`, or one line `HOST unfit: ...` for each bad finding."""
    bad = [finding for finding in findings if finding.state == "bad"]
    for finding in bad:
        print(f"{finding.host} unfit: {finding.name}: {finding.text}")
    if not bad:
        gpus = next((finding.text for finding in findings if finding.name == "GPUs"), "no GPU")
        print(f"{node_name()} fit: {gpus}; torch {versions['torch']}")
    return not bad


def print_rates(report: Report) -> None:
    """The measured rates of the slowest rank."""
    if report.rates is None:
        return
    where = f"{plural(report.nodes, 'node')} x {report.ranks_per_node} {report.device}"
    print(f"\nRates of a rank, while all ranks measure ({where}):")
    width = max(len(what) for what, _ in RATES.values())
    for key, (what, unit) in RATES.items():
        if (rate := report.rates[key]) is not None:
            print(f"  {what:<{width}}  {rate_as_text(rate, unit)}")


def finish(report: Report, file: Path | None) -> None:
    """Writes the report to a file, if one was named, and prints the verdict."""
    if file is not None:
        verdict = {"fit": report.fit, "bad_nodes": report.bad_nodes}
        file.write_text(json.dumps(verdict | dataclasses.asdict(report), indent=1) + "\n")
        print(f"\nwritten: {file}; plan with it: launcher plan recipe=NAME rates={file}")
    if report.fit:
        typer.secho("\nFit to train.", fg="green", bold=True)
        return
    bad = plural(len(report.bad), "problem")
    typer.echo(typer.style("\nNot fit to train", fg="red", bold=True) + f": {bad}")
    if report.nodes > 1 and report.bad_nodes:
        print(f"nodes to exclude: {','.join(report.bad_nodes)}")
