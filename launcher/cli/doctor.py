"""`launcher doctor`: is this machine, node or allocation fit to train, and how fast is it?

Keys of the JSON file, which `launcher plan rates=FILE` reads: fit, bad_nodes (hosts, as Slurm names
them), device, nodes, ranks_per_node, versions, findings [{host, name, state, text}], rates
(`planner.machine.Rates`; null: not measured).
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from pathlib import Path
from typing import Annotated

from launcher.cli.app import flag, make_parent_of_file, option
from launcher.diagnostics import node_checks
from launcher.diagnostics.findings import (
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


def doctor(
    ranks: Annotated[
        int | None, option("Processes that measure together. Default: the GPUs, or 2.", "N")
    ] = None,
    out: Annotated[
        Path | None,
        option("Write the report, for `launcher plan rates=FILE`.", "FILE"),
    ] = None,
    shared: Annotated[
        Path | None, option("A folder that each node must write to and read.", "FOLDER")
    ] = None,
    runs: Annotated[Path, option("Where runs are written.", "FOLDER")] = Path("runs"),
    gpus: Annotated[
        int | None,
        option("GPUs that this node must have. Default: those that Slurm granted.", "N"),
    ] = None,
    port: Annotated[int, option("A port that must be free; 0: any.", "N", min=0)] = 0,
    quick: Annotated[
        bool,
        flag("--quick", "Only compare how fast several nodes are. Exits with 0; read the JSON."),
    ] = False,
    node: Annotated[
        bool, flag("--node", "Check this node alone, in seconds; prints a line for each problem.")
    ] = False,
) -> int:
    """Check whether this machine, node or allocation is fit to train, and measure how fast it is.

    Exit status 3: it is not fit. For several nodes, start it like training, with one torchrun
    on each node:

    \b
    Example:
      launcher doctor out=doctor.json
      srun --ntasks-per-node=1 torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d \\
          --rdzv-endpoint HOST:29500 -m launcher.cli.main doctor shared=FOLDER out=doctor.json
    """
    if port > 65535:
        raise RecipeError(f"command line: port={port}: must be at most 65535")
    if out is not None:
        make_parent_of_file(out, "out")
    granted = os.environ.get("SLURM_GPUS_ON_NODE", "")
    checks: node_checks.Checks = {
        "expected_gpus": gpus or (int(granted) if granted.isdigit() else None),
        "ranks": ranks,
        "all_ranks": ranks and ranks * int(os.environ.get("SLURM_JOB_NUM_NODES", "1")),
        "runs": runs,
        "shared": shared,
        "port": port,
        "visible": os.environ.get("CUDA_VISIBLE_DEVICES"),
    }
    if node:
        return EXIT_DONE if print_node(*node_checks.examine(**checks)) else EXIT_NO
    environment = None
    with contextlib.suppress(RecipeError):  # srun without torchrun: each task checks its machine
        environment = read_environment()
    if environment is not None and environment.torchrun:
        return _examine_group(checks, environment, out, quick=quick)
    if quick:
        what = "is for several nodes, each with a torchrun (launcher doctor --help)"
        raise RecipeError(f"command line: --quick: {what}")
    return _examine_machine(checks, out)


def _examine_group(
    checks: node_checks.Checks, environment: Environment, file: Path | None, *, quick: bool
) -> int:
    """Under torchrun: the ranks of all nodes check and measure together."""
    checks["ranks"], checks["all_ranks"] = environment.local_world_size, environment.world_size
    from launcher.diagnostics import group_checks  # imports torch

    report = group_checks.run(node=None if quick else checks, quick=quick)
    if not _prints(environment):  # a failed rank would make torchrun end the rank that prints
        return EXIT_DONE
    print_findings(report.findings, hosts=report.nodes > 1)
    print_rates(report)
    finish(report, file)
    return EXIT_DONE if report.fit or quick else EXIT_NO


def _examine_machine(checks: node_checks.Checks, file: Path | None) -> int:
    """Checks this machine, then measures with several processes."""
    findings, versions = node_checks.examine(**checks)
    print_findings(findings, hosts=False)
    ranks = checks["ranks"] or versions["gpus"] or min(2, len(os.sched_getaffinity(0)))
    report = Report(
        findings=findings, device="CPU", nodes=1, ranks_per_node=ranks, versions=versions
    )
    needed = ("torch", "GPUs", "/dev/shm")
    if any(finding.state == "bad" and finding.name in needed for finding in findings):
        print("\nnothing was measured: fix the problems first")
    else:
        print(f"\nmeasuring with {ranks} {'rank' if ranks == 1 else 'ranks'} ...", flush=True)
        report = measure_rates(ranks, report)
        print_findings(report.findings[len(findings) :], hosts=False)
        print_rates(report)
    finish(report, file)
    nodes = os.environ.get("SLURM_JOB_NUM_NODES", "1")
    if nodes not in ("", "1"):
        print(f"\nThis checked one of {nodes} nodes. launcher doctor --help shows how to check all")
    return EXIT_DONE if report.fit else EXIT_NO


def _prints(environment: Environment) -> bool:
    """Whether this rank prints and writes for all: under srun one of the first node, which sees the
    folders of the job's script. torchrun may give rank 0 to any node."""
    node = os.environ.get("SLURM_NODEID")
    return environment.main if node is None else environment.local_rank == 0 and node == "0"


def measure_rates(ranks: int, report: Report) -> Report:
    """Measures with this number of ranks. Returns the report with the rates, or a bad finding."""
    ended = run_ranks(
        "launcher.diagnostics.group_checks", {}, ranks=ranks, seconds=MEASURING_SECONDS
    )
    if ended.status is not None and ended.result is not None:
        measurements = [Finding(**finding) for finding in ended.result.pop("findings")]
        findings = report.findings + measurements
        return Report(**ended.result | {"findings": findings, "versions": report.versions})
    if ended.status is None:
        why = f"{ranks} ranks did not finish within {MEASURING_SECONDS} s: one of them hangs"
    else:
        lines = (ended.error or "").splitlines()[:1] or ended.printed.splitlines()[-1:]
        why = f"the ranks failed: {lines[0].strip() if lines else 'nothing was printed'}"
    finding = Finding(name="measuring", state="bad", text=why)
    return dataclasses.replace(report, findings=[*report.findings, finding])
