"""Checks that ranks do together: rates, clocks, shared folder, and nodes that differ from others.

`launcher doctor` starts this module under torchrun; on several nodes the user starts it so.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import time
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from launcher.diagnostics import gpus
from launcher.diagnostics.findings import ALL_NODES, RATES, Finding, Report, host_name
from launcher.diagnostics.measurements import measure
from launcher.diagnostics.node_checks import SHARED_SECONDS, examine
from launcher.distributed import process_group
from launcher.distributed.environment import read_environment
from launcher.distributed.process_group import DataParallel, gather
from launcher.distributed.spawn import end_process, rank_main
from launcher.errors import EXIT_DONE

INIT_SECONDS = 180
"""Time for all ranks to meet, while the first one of each node examines it."""
SLOW = {
    "half_flops": ("computes", 0.8),
    "memory_bandwidth": ("moves memory", 0.8),
    "host_bandwidth": ("copies to and from the host", 0.8),
    "intra_node_bandwidth": ("runs collectives within its node", 0.5),
    "link": ("exchanges data with other nodes", 0.5),
}
"""Share of the median rank's rate below which a rank is slow, and makes all others wait."""
CLOCKS_WARN, CLOCKS_BAD = 0.5, 5.0
"""Seconds between clocks: logs, and the lock of the run folder, depend on them."""
_ADVICE = "let chrony or ntpd keep"


def sum_is_right(ranks: DataParallel) -> bool:
    values = torch.full((1 << 16,), float(ranks.rank + 1), device=ranks.device)
    dist.all_reduce(values, group=ranks.group)
    return bool((values == ranks.size * (ranks.size + 1) / 2).all())


def clock_offset(ranks: DataParallel) -> float:
    """Seconds that this rank's clock is ahead of rank 0's: median of five, each after a barrier."""
    offsets: list[float] = []
    for _ in range(5):
        dist.barrier(group=ranks.group)
        clocks = gather(time.time(), ranks.group)
        offsets.append(clocks[ranks.rank] - clocks[0])
    return statistics.median(offsets)


def check_shared(
    folder: Path, ranks: DataParallel, *, first: bool, seconds: float = SHARED_SECONDS
) -> dict[str, Any] | None:
    """The first rank of each node writes a file, and looks for the files of the other nodes.

    Returns `wrote`, its file's name; `problem`, if it could not write; and `seen`, the names that
    it sees. Other ranks return None.
    """
    file, problem = folder / f".launcher-doctor-{uuid.uuid4().hex}", None
    if first:
        try:
            file.touch()
        except OSError as error:
            problem = f"{folder} cannot be written to: {error.strerror or error}"
    wanted = set(gather(file.name if first and problem is None else None, ranks.group)) - {None}
    seen, deadline = set[str](), time.monotonic() + seconds
    while first and seen != wanted and time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            # Lists the folder: network file systems cache that a single name was missing
            seen = wanted & set(os.listdir(folder))
        time.sleep(0.0 if seen == wanted else 0.1)
    dist.barrier(group=ranks.group)
    with contextlib.suppress(OSError):
        file.unlink()
    return {"wrote": file.name, "problem": problem, "seen": sorted(seen)} if first else None


# Judging what the ranks measured. `results`: the dictionary `mine` of `run`, of each rank


def judge(results: Sequence[Mapping[str, Any]], *, cpu: bool) -> list[Finding]:
    """Which ranks and nodes differ from the others. cpu: slow ranks are only a warning, because
    other programs share the cores."""
    offsets = {result["host"]: result["offset"] for result in results}
    wrong = {result["host"]: "gives a wrong sum" for result in results if not result["sum"]}
    return [
        *_slow_ranks(results, cpu=cpu),
        *(_clocks(offsets) if len(offsets) > 1 else ()),
        *_sharing({one["host"]: one["shared"] for one in results if one["shared"] is not None}),
        *_blame("all-reduce", wrong, nodes=len(offsets), all_nodes="gives a wrong sum"),
    ]


def _blame(name: str, faults: Mapping[str, str], *, nodes: int, all_nodes: str) -> list[Finding]:
    """A bad finding for each fault by host; one for all nodes where there is no majority."""
    if faults and nodes > 1 and 2 * len(faults) >= nodes:
        faults = {ALL_NODES: all_nodes}
    return [Finding(name, "bad", text, host=host) for host, text in faults.items()]


def _slow_ranks(results: Sequence[Mapping[str, Any]], *, cpu: bool) -> Iterator[Finding]:
    for key, (what, limit) in SLOW.items():
        rates = {rank: one["rates"][key] for rank, one in enumerate(results) if key in one["rates"]}
        median = statistics.median(rates.values()) if rates else 0.0
        for rank, rate in rates.items():
            if rate < limit * median:
                which = f"rank {rank}" if cpu else f"GPU {results[rank]['gpu']} (rank {rank})"
                share = f"{rate / median:.0%} of the median rank"
                text = f"{which} {what} at {share}: all would wait for it"
                host = results[rank]["host"]
                yield Finding("speed", "warning" if cpu else "bad", text, host=host)


def _clocks(offsets: Mapping[str, float]) -> list[Finding]:
    """offsets: seconds by host, against any one clock."""
    usual = statistics.median_low(offsets.values())
    off = {host: by - usual for host, by in offsets.items() if abs(by - usual) > CLOCKS_WARN}
    first, *_, last = sorted(offsets, key=offsets.__getitem__)
    spread = offsets[last] - offsets[first]
    if not off:
        return [Finding("clocks", "good", f"within {spread:.2g} s of one another", host=ALL_NODES)]
    faults = {
        host: f"{abs(by):.3g} s {'ahead of' if by > 0 else 'behind'} the other nodes': {_ADVICE} it"
        for host, by in off.items()
    }
    text = f"{last}'s is {spread:.3g} s ahead of {first}'s: {_ADVICE} them"
    found = _blame("clocks", faults, nodes=len(offsets), all_nodes=text)
    return [
        one if abs(off.get(one.host, spread)) > CLOCKS_BAD else replace(one, state="warning")
        for one in found
    ]


def _sharing(shared: Mapping[str, Mapping[str, Any]]) -> list[Finding]:
    """shared: `check_shared` by host.

    A node is at fault where fewer than half of the others see what it writes, or where it sees
    fewer than half of the others' files.
    """
    failed = {host: one["problem"] for host, one in shared.items() if one["problem"]}
    wrote = {host: one for host, one in shared.items() if host not in failed}
    within = f"within {SHARED_SECONDS} s"
    what = f"this node and the others do not see {within} what the other writes"
    faults = {}
    for host, one in wrote.items():
        others = [other for other in wrote.values() if other is not one]
        readers = sum(one["wrote"] in other["seen"] for other in others)
        read = sum(other["wrote"] in one["seen"] for other in others)
        if 2 * min(readers, read) < len(others):
            faults[host] = f"{what}: is it a local disk?"
    text = f"no node sees {within} what another one writes: it is not shared"
    return [
        *(Finding("shared folder", "bad", problem, host=host) for host, problem in failed.items()),
        *_blame("shared folder", faults, nodes=len(wrote), all_nodes=text),
    ]


def compare_versions(versions: Mapping[str, Mapping[str, Any]]) -> list[Finding]:
    """Versions that differ from those of most hosts. versions: by host."""
    findings = []
    for name in next(iter(versions.values()), {}):
        counts = Counter(one[name] for one in versions.values()).most_common()
        most, count = counts[0]
        faults = {
            host: f"{name} {one[name]}, but {most} on {count} of {len(versions)} nodes"
            for host, one in versions.items()
            if one[name] != most
        }
        values = ", ".join(f"{value} on {count}" for value, count in counts)
        text = f"{name} {values} nodes: should be the same on all"
        findings += _blame("versions", faults, nodes=len(versions), all_nodes=text)
    return findings


def slowest_rates(results: Sequence[Mapping[str, Any]], *, source: str) -> dict[str, Any]:
    """Fields of `planner.machine.Rates`; None where not measured."""
    slowest = {
        name: min((one["rates"][name] for one in results if name in one["rates"]), default=None)
        for name in RATES
    }
    return {"source": source} | slowest


def run(*, node: dict[str, Any] | None, shared: Path | None, quick: bool = False) -> Report:
    """Checks and measures on all ranks; each gets the report.

    node: arguments of `examine`; None: the node was examined already. quick: the nodes were
    examined already, only their versions are compared, and less is measured.
    """
    environment = read_environment()
    first, local = environment.local_rank == 0, environment.local_world_size
    findings: list[Finding] = []
    versions: dict[str, Any] = {}
    # Before the ranks meet, so that no process of another rank is on the GPUs yet
    if first and quick:
        versions = gpus.versions(gpus.query_nvml(), gpus.query_torch(compute=False))
    elif first and node is not None:
        findings, versions = examine(**node)
    group = process_group.process_group(environment, device="any", init_timeout=INIT_SECONDS)
    with group as (ranks, _):
        process_group.set_threads(environment, device=ranks.device, cpu_offload=True)
        mine = {
            "host": host_name(),
            "gpu": environment.local_rank,
            "findings": findings,
            "versions": versions,
            "sum": sum_is_right(ranks),
            "offset": clock_offset(ranks),
            "shared": None if shared is None else check_shared(shared, ranks, first=first),
            "rates": measure(ranks, local=local, quick=quick),
        }
        results = gather(mine, ranks.group)
        cpu = ranks.device.type == "cpu"
        name = "CPU" if cpu else torch.cuda.get_device_name(ranks.device)
    source = f"measured by launcher doctor on {results[0]['host']}, {time.strftime('%Y-%m-%d')}"
    return Report(
        findings=[
            *(finding for result in results for finding in result["findings"]),
            *judge(results, cpu=cpu),
            *compare_versions({one["host"]: one["versions"] for one in results if one["versions"]}),
        ],
        device=name,
        nodes=len(results) // local,
        ranks_per_node=local,
        rates=slowest_rates(results, source=source),
        versions=results[0]["versions"],
    )


def _run(setting: dict[str, Any]) -> dict[str, Any]:
    return asdict(run(node=None, shared=None))


if __name__ == "__main__":
    rank_main(_run)
    end_process(EXIT_DONE)
