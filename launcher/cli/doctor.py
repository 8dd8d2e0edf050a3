"""`launcher doctor`: is this machine, node or allocation fit to train, and how fast is it?

The JSON file, which `launcher plan rates=FILE` reads, has: fit, bad_nodes (hosts, as Slurm names
them), device, nodes, ranks_per_node, versions, findings [{host, name, state, text}], rates
(`planner.hardware.Rates`; null where a rate was not measured), within_node and across_nodes (bytes
a second that a rank sends, by collective), links (bytes a second that a rank swaps with the next
node, by host).
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.diagnostics import node_checks
from launcher.diagnostics.node_checks import Finding, Report
from launcher.distributed.environment import Environment, read_environment
from launcher.errors import EXIT_DONE, EXIT_NO, RecipeError

MEASURING_SECONDS = 300
"""Ranks that measure longer than this hang: they take some 20 s."""
WORKER = (
    "-m",
    "torch.distributed.run",
    "--standalone",
    "--nproc-per-node={ranks}",
    "-m",
    "launcher.diagnostics.group_checks",
)

_STYLES = {
    "good": ("ok  ", "green"),
    "note": ("note", "cyan"),
    "warning": ("warn", "bold yellow"),
    "bad": ("BAD ", "bold red"),
}
_COLLECTIVES = {
    "all_gather": "all-gather",
    "all_reduce": "all-reduce",
    "point_to_point": "neighbours swapping",
}


@dataclass(frozen=True)
class Request:
    """The options of the command."""

    ranks: int | None
    json: Path | None
    shared: Path | None
    runs: Path
    gpus: int | None
    port: int
    quick: bool
    node: bool


def main(request: Request) -> int:
    """Returns 0 where everything is fit, 3 where something is bad."""
    folder = None if request.json is None else request.json.absolute().parent
    if folder is not None and not (folder.is_dir() and os.access(folder, os.W_OK)):
        what = f"there is no folder {folder} that can be written to"
        raise RecipeError(f"command line: json={request.json}: {what}")
    granted = os.environ.get("SLURM_GPUS_ON_NODE", "")
    node: dict[str, Any] = {
        "expected_gpus": request.gpus or (int(granted) if granted.isdigit() else None),
        "ranks": request.ranks,
        "runs": request.runs,
        "shared": request.shared,
        "port": request.port,
        "visible": os.environ.get("CUDA_VISIBLE_DEVICES"),
    }
    if request.node:
        return print_node(*node_checks.examine(**node))
    environment = None
    with contextlib.suppress(RecipeError):  # srun without torchrun: each task checks its machine
        environment = read_environment()
    if environment is not None and environment.torchrun:
        return _examine_group(request, node, environment)
    if request.quick:
        what = "is for several nodes, each with a torchrun (launcher doctor --help)"
        raise RecipeError(f"command line: quick: {what}")
    return _examine_machine(request, node)


def _examine_group(request: Request, node: dict[str, Any], environment: Environment) -> int:
    """Under torchrun: the ranks of all nodes check and measure together."""
    node["ranks"] = environment.local_world_size
    group_checks = importlib.import_module("launcher.diagnostics.group_checks")
    report: Report = group_checks.run(node=node, shared=request.shared, quick=request.quick)
    if not _prints(environment):  # a failed rank would make torchrun end the rank that prints
        return EXIT_DONE
    print_findings(report.findings, hosts=report.nodes > 1)
    print_rates(report)
    _finish(report, request.json)
    return EXIT_DONE if report.fit or request.quick else EXIT_NO


def _examine_machine(request: Request, node: dict[str, Any]) -> int:
    """Checks this machine, then measures with several processes."""
    findings, versions = node_checks.examine(**node)
    print_findings(findings, hosts=False)
    ranks = request.ranks or versions["gpus"] or min(2, node_checks.cores())
    report = Report(
        findings=findings, device="CPU", nodes=1, ranks_per_node=ranks, versions=versions
    )
    needed = ("torch", "GPUs", "/dev/shm")
    if any(finding.state == "bad" and finding.name in needed for finding in findings):
        print("\nnothing was measured: see to what is bad first")
    else:
        print(f"\nmeasuring with {ranks} {'rank' if ranks == 1 else 'ranks'} ...", flush=True)
        report = measured(ranks, report)
        print_findings(report.findings[len(findings) :], hosts=False)
        print_rates(report)
    _finish(report, request.json)
    nodes = os.environ.get("SLURM_JOB_NUM_NODES", "1")
    if nodes not in ("", "1"):
        alone = f"This was {socket.gethostname()} alone."
        print(f"\n{alone} Over all {nodes} nodes of the job, with a HOST of it:")
        torchrun = "torchrun --nnodes $SLURM_JOB_NUM_NODES --nproc-per-node GPUS"
        print(f"  srun --ntasks-per-node=1 {torchrun} --rdzv-backend c10d \\")
        print("    --rdzv-endpoint HOST:29500 -m launcher.cli.main doctor")
    return EXIT_DONE if report.fit else EXIT_NO


def _prints(environment: Environment) -> bool:
    """Whether this rank prints and writes for all. Under srun it is a rank of the first node, which
    sees the folders of the job's script; torchrun may give rank 0 to any node."""
    node = os.environ.get("SLURM_NODEID")
    return environment.main if node is None else environment.local_rank == 0 and node == "0"


def measured(ranks: int, report: Report) -> Report:
    """The report with the measurements of `launcher.diagnostics.group_checks` under torchrun, or
    with a finding where that failed."""
    environment = {"OMP_NUM_THREADS": "1"} | dict(os.environ)  # torchrun's default, no warning
    with tempfile.TemporaryDirectory(prefix="launcher-doctor-") as folder:
        file = Path(folder) / "report.json"
        command = [sys.executable, *(part.format(ranks=ranks) for part in WORKER)]
        process = subprocess.Popen(
            [*command, json.dumps({"report": str(file)})],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        hung = False
        try:
            printed, _ = process.communicate(timeout=MEASURING_SECONDS)
        except subprocess.TimeoutExpired:
            hung, printed = True, ""
        finally:
            if process.poll() is None:  # it hangs, or the user interrupts
                process.terminate()  # the agent ends its workers within 30 s
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(45)
                process.kill()
                process.wait()
        if file.exists() and not hung:
            found = json.loads(file.read_text())
            findings = [Finding(**finding) for finding in found.pop("findings")]
            return Report(
                **found | {"findings": report.findings + findings, "versions": report.versions}
            )
    why = (
        f"{ranks} ranks did not finish within {MEASURING_SECONDS} s: one of them hangs"
        if hung
        else _first_error(printed)
    )
    return dataclasses.replace(
        report, findings=[*report.findings, Finding(name="measuring", state="bad", text=why)]
    )


def _first_error(printed: str) -> str:
    """The error of the first rank that failed."""
    errors = [
        line.partition("]:")[2] or line
        for line in printed.splitlines()
        if "Error" in line and "ChildFailedError" not in line
    ]
    return f"the ranks failed: {errors[0].strip()}" if errors else "the ranks failed without a word"


def print_node(findings: Sequence[Finding], versions: dict[str, Any]) -> int:
    """Prints a line that says fit, or one for each problem; returns the exit status."""
    bad = [finding for finding in findings if finding.state == "bad"]
    for finding in bad:
        print(f"{finding.host} unfit: {finding.name}: {finding.text}")
    if bad:
        return EXIT_NO
    gpus = next((finding.text for finding in findings if finding.name == "GPUs"), "no GPU")
    print(f"{node_checks.host_name()} fit: {gpus}; torch {versions['torch']}")
    return EXIT_DONE


def _print(pieces: Sequence[tuple[str, str]]) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, soft_wrap=True)
    if console.is_terminal:
        console.print(Text.assemble(*pieces))
    else:
        print("".join(text for text, _ in pieces).rstrip())


def print_findings(findings: Sequence[Finding], *, hosts: bool) -> None:
    """Prints a line for each; with hosts, good findings once for all nodes that agree."""
    if hosts:
        findings = list(_merged(findings))
    width = max((len(finding.name) for finding in findings), default=0)
    beside = max((len(finding.host) for finding in findings), default=0) if hosts else 0
    for finding in findings:
        mark, style = _STYLES[finding.state]
        margin = f"{finding.host:<{beside}}  " if hosts else ""
        indent = 8 + width + (beside + 2 if hosts else 0)
        rows = textwrap.wrap(
            finding.text, max(40, 110 - indent), break_long_words=False, break_on_hyphens=False
        )
        _print([(f"  {mark}", style), (f"  {margin}{finding.name:<{width}}  ", ""), (rows[0], "")])
        for row in rows[1:]:
            _print([(" " * (indent + 2) + row, "")])


def _merged(findings: Sequence[Finding]) -> Iterator[Finding]:
    """Joins equal findings of several nodes, and good ones even if their texts differ."""
    everywhere = {finding.host for finding in findings}
    groups: dict[tuple[str, ...], list[Finding]] = {}
    for finding in findings:
        alike = (
            (finding.name, finding.state)
            if finding.state in ("good", "note")
            else (finding.name, finding.state, finding.text)
        )
        groups.setdefault(alike, []).append(finding)
    for group in groups.values():
        hosts = {finding.host for finding in group}
        if len(hosts) == 1:
            yield group[0]
            continue
        differ = len({finding.text for finding in group}) > 1
        text = f"{group[0].host}: {group[0].text}" if differ else group[0].text
        yield dataclasses.replace(
            group[0], host="all nodes" if hosts == everywhere else f"{len(hosts)} nodes", text=text
        )


def print_rates(report: Report) -> None:
    """Prints the measured rates, each of the slowest rank."""
    if report.rates is None:
        return
    nodes = "node" if report.nodes == 1 else "nodes"
    where = f"{report.nodes} {nodes} x {report.ranks_per_node} {report.device}"
    _print([(f"\nA rank's rates, all measuring at once ({where}):", "bold")])
    rows = [
        (what, node_checks.rate_in_words(rate, unit))
        for key, (what, unit) in node_checks.FIGURES.items()
        if (rate := report.rates[key]) is not None
    ]
    for found, place in (
        (report.within_node, "within a node"),
        (report.across_nodes, "across nodes"),
    ):
        rows += [
            (f"{_COLLECTIVES[kind]} {place}", node_checks.rate_in_words(rate, "B/s"))
            for kind, rate in (found or {}).items()
        ]
    if report.links:
        rows.append(
            (
                "between neighbouring nodes",
                node_checks.rate_in_words(min(report.links.values()), "B/s"),
            )
        )
    width = max(len(what) for what, _ in rows)
    for what, text in rows:
        _print([(f"  {what:<{width}}  ", "dim"), (text, "")])


def _finish(report: Report, file: Path | None) -> None:
    if file is not None:
        file.write_text(
            json.dumps(
                {"fit": report.fit, "bad_nodes": report.bad_nodes} | dataclasses.asdict(report),
                indent=1,
            )
            + "\n"
        )
        print(f"\nwritten: {file}; plan with it: launcher plan recipe=NAME rates={file}")
    bad = [finding for finding in report.findings if finding.state == "bad"]
    if bad:
        _print(
            [
                ("\nNot fit to train", "bold red"),
                (f": {len(bad)} {'thing is' if len(bad) == 1 else 'things are'} bad", ""),
            ]
        )
        if report.nodes > 1 and report.bad_nodes:
            print(f"nodes to leave out: {','.join(report.bad_nodes)}")
    else:
        _print([("\nFit to train.", "bold green")])
