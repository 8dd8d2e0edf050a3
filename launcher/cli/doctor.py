"""`launcher doctor [ranks=N] [json=FILE] [shared=FOLDER]`: whether a machine, node or allocation is fit to train, and its rates.


    ranks      processes that measure together; the GPUs of this machine, else two
    json       a file that `launcher plan rates=FILE` reads: fit, bad_nodes (hosts, as Slurm calls them), device, nodes,
               ranks_per_node, versions, findings [{host, name, state, text}], rates (`planner.machine.Rates`; null where
               it was not measured), and within_node and across_nodes: bytes/s that a rank sends, by collective;
               links: bytes/s that a rank exchanges with a neighbouring node, by host
    shared     a folder that every node must see and be able to write to
    runs       where runs go; runs
    gpus       how many this node must have; what Slurm gave it, else as many as there are
    port       must be free here; any
    quick      true, over several nodes: only checks that nodes do together; for jobs, after --node. The verdict is in
               the file: the exit status is 0, since torchrun would print its own report of a failure
    --node     only this node, in seconds, nothing measured: for jobs. Prints `HOST fit: ...`, or a line
               `HOST unfit: ...` for each bad finding

Over several nodes, start it as training is started, one torchrun a node:
    srun --ntasks-per-node=1 torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500 \\
        -m launcher.cli.main doctor shared=FOLDER json=doctor.json
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import os
import socket
from collections.abc import Sequence
from pathlib import Path

from launcher.cli.options import count, read_options, truth, word
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

OPTIONS = {"ranks": count, "json": word, "shared": word, "runs": word, "gpus": count, "port": count, "quick": truth, "node": truth}
MEASURING_SECONDS = 300
"""Time limit for the ranks that measure; they need some 20 s."""


def main(arguments: Sequence[str]) -> int:
    """0: fit; 3: something is bad."""
    options, _ = read_options("launcher doctor", arguments, OPTIONS, recipe=False)
    file = None if options.get("json") is None else Path(options["json"])
    if file is not None and not (file.absolute().parent.is_dir() and os.access(file.absolute().parent, os.W_OK)):
        raise RecipeError(f"command line: json={file}: there is no folder {file.absolute().parent} that can be written to")
    shared = None if options.get("shared") is None else Path(options["shared"])
    granted = os.environ.get("SLURM_GPUS_ON_NODE", "")
    expected = options.get("gpus", int(granted) if granted.isdigit() else None)
    node = {
        "expected_gpus": expected,
        "ranks": options.get("ranks"),
        "runs": Path(options.get("runs", "runs")),
        "shared": shared,
        "port": options.get("port", 0),
        "visible": os.environ.get("CUDA_VISIBLE_DEVICES"),
    }
    if options.get("node", False):
        findings, versions = node_checks.examine(**node)
        return EXIT_DONE if print_node(findings, versions) else EXIT_NO
    environment = None
    with contextlib.suppress(RecipeError):  # started by srun without torchrun: each looks at its own machine
        environment = read_environment()
    if environment is not None and environment.torchrun:
        node["ranks"] = environment.local_world_size
        report: Report = importlib.import_module("launcher.diagnostics.group_checks").run(
            node=node, shared=shared, quick=options.get("quick", False)
        )
        if not _prints(environment):  # if it failed, torchrun would end the rank that writes
            return EXIT_DONE
        print_findings(report.findings, hosts=report.nodes > 1)
        print_rates(report)
        finish(report, file)
        return EXIT_DONE if report.fit or options.get("quick", False) else EXIT_NO
    if "quick" in options:
        raise RecipeError("command line: quick: is for several nodes, each with a torchrun (launcher doctor --help)")
    findings, versions = node_checks.examine(**node)
    print_findings(findings, hosts=False)
    ranks = options.get("ranks") or versions["gpus"] or min(2, node_checks.cores())
    report = Report(findings=findings, device="CPU", nodes=1, ranks_per_node=ranks, versions=versions)
    if any(finding.state == "bad" and finding.name in ("torch", "GPUs", "/dev/shm") for finding in findings):
        print("\nnothing was measured: fix what is bad first")
    else:
        print(f"\nmeasuring with {ranks} {'rank' if ranks == 1 else 'ranks'} ...", flush=True)
        report = measured(ranks, report)
        print_findings(report.findings[len(findings) :], hosts=False)
        print_rates(report)
    finish(report, file)
    nodes = os.environ.get("SLURM_JOB_NUM_NODES", "1")
    if nodes not in ("", "1"):
        print(f"\nThis was {socket.gethostname()} alone. Over all {nodes} nodes of the job, with a HOST of it:")
        print("  srun --ntasks-per-node=1 torchrun --nnodes $SLURM_JOB_NUM_NODES --nproc-per-node GPUS --rdzv-backend c10d \\")
        print("    --rdzv-endpoint HOST:29500 -m launcher.cli.main doctor")
    return EXIT_DONE if report.fit else EXIT_NO


def _prints(environment: Environment) -> bool:
    """Whether this rank prints and writes the file.

    Under srun a rank of the first node, which sees the folders of the job's script; torchrun may
    give rank 0 to any node.
    """
    node = os.environ.get("SLURM_NODEID")
    return environment.main if node is None else environment.local_rank == 0 and node == "0"


def measured(ranks: int, report: Report) -> Report:
    """Measures with so many ranks. Returns the report with the rates, or with a bad finding."""
    ended = run_ranks(
        "launcher.diagnostics.group_checks", {}, ranks=ranks, seconds=MEASURING_SECONDS
    )
    if ended.status is not None and ended.result is not None:
        found = ended.result
        findings = [Finding(**finding) for finding in found.pop("findings")]
        both = {"findings": report.findings + findings, "versions": report.versions}
        return Report(**found | both)
    if ended.status is None:
        why = f"{ranks} ranks did not finish within {MEASURING_SECONDS} s: one of them hangs"
    else:
        printed = (ended.error or "").splitlines()[:1] or ended.printed.splitlines()[-1:]
        why = f"the ranks failed: {printed[0].strip() if printed else 'nothing was printed'}"
    finding = Finding(name="measuring", state="bad", text=why)
    return dataclasses.replace(report, findings=[*report.findings, finding])
