"""`launcher doctor`: is this machine, node or allocation fit to train, and how fast is it?

Keys of the JSON file, which `launcher plan rates=FILE` reads: fit, bad_nodes (hosts, as Slurm names
them), device, nodes, ranks_per_node, versions, findings [{host, name, state, text}], rates
(`planner.machine.Rates`; null: not measured).
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.diagnostics import node_checks
from launcher.diagnostics.report import (
    Finding,
    Report,
    finish,
    print_findings,
    print_node,
    print_rates,
)
from launcher.distributed.environment import Environment, read_environment
from launcher.distributed.spawn import run_ranks
from launcher.errors import EXIT_DONE, EXIT_NO, RecipeError

MEASURING_SECONDS = 300
"""Ranks that measure longer than this hang: they take some 20 s."""


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
    if request.json is not None:
        folder = request.json.absolute().parent
        if not (folder.is_dir() and os.access(folder, os.W_OK)):
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
        return EXIT_DONE if print_node(*node_checks.examine(**node)) else EXIT_NO
    with contextlib.suppress(RecipeError):  # srun without torchrun: each task checks its machine
        if (environment := read_environment()).torchrun:
            return _examine_group(request, node, environment)
    if request.quick:
        what = "is for several nodes, each with a torchrun (launcher doctor --help)"
        raise RecipeError(f"command line: quick: {what}")
    return _examine_machine(request, node)


def _examine_group(request: Request, node: dict[str, Any], environment: Environment) -> int:
    """Under torchrun: the ranks of all nodes check and measure together."""
    node["ranks"] = environment.local_world_size
    from launcher.diagnostics import group_checks  # imports torch

    report = group_checks.run(node=node, shared=request.shared, quick=request.quick)
    if not _prints(environment):  # a failed rank would make torchrun end the rank that prints
        return EXIT_DONE
    print_findings(report.findings, hosts=report.nodes > 1)
    print_rates(report)
    finish(report, request.json)
    return EXIT_DONE if report.fit or request.quick else EXIT_NO


def _examine_machine(request: Request, node: dict[str, Any]) -> int:
    """Checks this machine, then measures with several processes."""
    findings, versions = node_checks.examine(**node)
    print_findings(findings, hosts=False)
    ranks = request.ranks or versions["gpus"] or min(2, len(os.sched_getaffinity(0)))
    report = Report(
        findings=findings, device="CPU", nodes=1, ranks_per_node=ranks, versions=versions
    )
    needed = ("torch", "GPUs", "/dev/shm")
    if any(finding.state == "bad" and finding.name in needed for finding in findings):
        print("\nnothing was measured: fix what is bad first")
    else:
        print(f"\nmeasuring with {ranks} {'rank' if ranks == 1 else 'ranks'} ...", flush=True)
        report = measured(ranks, report)
        print_findings(report.findings[len(findings) :], hosts=False)
        print_rates(report)
    finish(report, request.json)
    nodes = os.environ.get("SLURM_JOB_NUM_NODES", "1")
    if nodes not in ("", "1"):
        print(f"\nThis checked one of {nodes} nodes. launcher doctor --help shows how to check all")
    return EXIT_DONE if report.fit else EXIT_NO


def _prints(environment: Environment) -> bool:
    """Whether this rank prints and writes for all. Under srun it is a rank of the first node, which
    sees the folders of the job's script; torchrun may give rank 0 to any node."""
    node = os.environ.get("SLURM_NODEID")
    return environment.main if node is None else environment.local_rank == 0 and node == "0"


def measured(ranks: int, report: Report) -> Report:
    """Measures with this number of ranks. Returns the report with the rates, or a bad finding."""
    ended = run_ranks(
        "launcher.diagnostics.group_checks", {}, ranks=ranks, seconds=MEASURING_SECONDS
    )
    if ended.status is not None and ended.result is not None:
        found = ended.result
        findings = report.findings + [Finding(**finding) for finding in found.pop("findings")]
        return Report(**found | {"findings": findings, "versions": report.versions})
    if ended.status is None:
        why = f"{ranks} ranks did not finish within {MEASURING_SECONDS} s: one of them hangs"
    else:
        lines = (ended.error or "").splitlines()[:1] or ended.printed.splitlines()[-1:]
        why = f"the ranks failed: {lines[0].strip() if lines else 'nothing was printed'}"
    finding = Finding(name="measuring", state="bad", text=why)
    return dataclasses.replace(report, findings=[*report.findings, finding])
