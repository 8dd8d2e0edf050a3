"""Checks that ranks do together: rates, clocks, shared folder, and nodes that are unlike others.

`launcher doctor` starts this module under torchrun. Over several nodes torchrun starts the
command itself, as it starts training.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from launcher.diagnostics import gpus
from launcher.diagnostics.measurements import measure
from launcher.diagnostics.node_checks import examine
from launcher.diagnostics.report import (
    ALL_NODES,
    RATES,
    Finding,
    Report,
    State,
    host_name,
    rate_as_text,
)
from launcher.distributed import process_group
from launcher.distributed.environment import Environment, read_environment
from launcher.distributed.process_group import DataParallel
from launcher.distributed.spawn import rank_main
from launcher.errors import EXIT_DONE, RecipeError
from launcher.planner.machine import known_machine
from launcher.reliability.failures import end_process

INIT_SECONDS = 180
"""Time for all ranks to meet."""
SLOW = 0.8
"""A rank that is slower than this share of the median rank makes all others wait."""
SLOW_LINK = 0.5
"""The same for the links of a node. Of two nodes it is not known which one is slow."""
CLOCKS_WARN, CLOCKS_BAD = 0.5, 5.0
"""Seconds between clocks: logs, and the lock of the run folder, depend on them."""
SHARED_SECONDS = 10.0
"""Time until a node sees what another one wrote: network file systems cache for seconds."""
ASSUMED = 0.5
"""Share of the plan's rates below which the plan's ranking of strategies may be wrong."""
_ADVICE = "let chrony or ntpd keep"


def check_sum(ranks: DataParallel) -> bool:
    """Whether an all-reduce returns the right sum."""
    values = torch.full((1 << 16,), float(ranks.rank + 1), device=ranks.device)
    dist.all_reduce(values, group=ranks.group)
    return bool((values == ranks.size * (ranks.size + 1) / 2).all())


def gather(value: Any, ranks: DataParallel) -> list[Any]:
    """The value of each rank."""
    values: list[Any] = [None] * ranks.size
    dist.all_gather_object(values, value, group=ranks.group)
    return values


def clock_offset(ranks: DataParallel, *, now: Callable[[], float] = time.time) -> float:
    """Seconds that this rank's clock is ahead of rank 0's: median of five, each after a barrier."""
    offsets: list[float] = []
    for _ in range(5):
        dist.barrier(group=ranks.group)
        clocks = gather(now(), ranks)
        offsets.append(clocks[ranks.rank] - clocks[0])
    return statistics.median(offsets)


def check_shared(
    folder: Path, ranks: DataParallel, *, node: int, first: bool, seconds: float = SHARED_SECONDS
) -> tuple[str | None, list[int] | None]:
    """The first rank of each node writes a file, and looks for the files of the other nodes.

    Returns why it could not write (None: it could), and the nodes whose files it sees (None: it
    did not look). first: whether this is the first rank of its node.
    """
    token: list[Any] = [uuid.uuid4().hex]
    dist.broadcast_object_list(token, src=0, group=ranks.group)
    names = [f".launcher-doctor-{token[0]}-{number}" for number in range(ranks.size)]
    problem = None
    if first:
        try:
            (folder / names[node]).write_text("seen")
        except OSError as error:
            problem = f"{folder} cannot be written to: {error.strerror or error}"
    wrote = gather(node if first and problem is None else None, ranks)
    wanted, seen = {number for number in wrote if number is not None}, set[int]()
    deadline = time.monotonic() + seconds
    while first and seen != wanted and time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            # Lists the folder: network file systems cache that a single name was missing
            listed = set(os.listdir(folder))
            seen = {number for number in wanted if names[number] in listed}
        time.sleep(0.0 if seen == wanted else 0.1)
    dist.barrier(group=ranks.group)
    if not first:
        return None, None
    with contextlib.suppress(OSError):
        (folder / names[node]).unlink(missing_ok=True)
    return problem, sorted(seen)


# Judging what the ranks measured. `results` has a dictionary of each rank: host, node (its number),
# gpu (its local rank), rates, offset (of its clock), shared and seen (of `check_shared`), and sum
# (whether it was right). A finding names a host, or all nodes where there is no majority.


def judge(results: Sequence[Mapping[str, Any]], *, cpu: bool) -> list[Finding]:
    """Which ranks and nodes are unlike the others.

    cpu: slow ranks are only a warning, because other programs share the cores.
    """
    offsets: dict[str, float] = {}
    for result in results:
        offsets.setdefault(result["host"], result["offset"])
    wrong = {result["host"]: "gives a wrong sum" for result in results if not result["sum"]}
    return [
        *_slow_ranks(results, cpu=cpu),
        *_slow_nodes(results, cpu=cpu),
        *(_clocks(offsets) if len(offsets) > 1 else ()),
        *_sharing([result for result in results if result["seen"] is not None]),
        *_blame("all-reduce", wrong, nodes=len(offsets), all_nodes="gives a wrong sum"),
    ]


def _blame(name: str, faults: Mapping[str, str], *, nodes: int, all_nodes: str) -> list[Finding]:
    """A bad finding for each fault by host; one for all nodes where half of them have it."""
    if faults and nodes > 1 and 2 * len(faults) >= nodes:
        faults = {ALL_NODES: all_nodes}
    return [Finding(name, "bad", faults[host], host=host) for host in faults]


def _slow_ranks(results: Sequence[Mapping[str, Any]], *, cpu: bool) -> Iterator[Finding]:
    verbs = {
        "half_flops": "computes",
        "memory_bandwidth": "moves memory",
        "host_bandwidth": "copies to and from the host",
    }
    state: State = "warning" if cpu else "bad"
    for key, verb in verbs.items():
        median = statistics.median(result["rates"][key] for result in results)
        for rank, result in enumerate(results):
            share = result["rates"][key] / median
            if share < SLOW:
                which = f"rank {rank}" if cpu else f"GPU {result['gpu']} (rank {rank})"
                text = f"{which} {verb} at {share:.0%} of the median rank: all would wait for it"
                yield Finding("speed", state, text, host=result["host"])


def _slow_nodes(results: Sequence[Mapping[str, Any]], *, cpu: bool) -> Iterator[Finding]:
    names = {
        "within_node": "collectives among its ranks run",
        "link": "its links to other nodes run",
    }
    state: State = "warning" if cpu else "bad"
    for key, what in names.items():
        rates = slowest_by_host(results, key)
        median = statistics.median(rates.values()) if len(rates) > 2 else 0.0
        for host, rate in rates.items():
            if rate < SLOW_LINK * median:
                share = f"{rate / median:.0%} of the median node's {median / 1e9:.3g} GB/s"
                yield Finding("network", state, f"{what} at {share}", host=host)


def _clocks(offsets: Mapping[str, float]) -> list[Finding]:
    """offsets: seconds by host, against any one clock."""
    usual = statistics.median_low(offsets.values())
    off = {host: by - usual for host, by in offsets.items() if abs(by - usual) > CLOCKS_WARN}
    first, last = min(offsets, key=offsets.__getitem__), max(offsets, key=offsets.__getitem__)
    spread = offsets[last] - offsets[first]
    if not off:
        text = f"within {spread:.2g} s of one another"
        return [Finding("clocks", "good", text, host=ALL_NODES)]
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


def _sharing(results: Sequence[Mapping[str, Any]]) -> list[Finding]:
    """results: of one rank per node.

    A node is at fault where fewer than half of the others see what it writes, or where it sees
    fewer than half of the others' files.
    """
    name, within = "shared folder", f"within {SHARED_SECONDS:.0f} s"
    failed = {one["host"]: one["shared"] for one in results if one["shared"] is not None}
    wrote = {one["node"]: one for one in results if one["shared"] is None}
    readers = Counter(n for node, one in wrote.items() for n in one["seen"] if n != node)
    text = (
        f"this node and the others do not see {within} what the other writes: is it a local disk?"
    )
    faults = {}
    for node, one in wrote.items():
        sees = len(wrote.keys() & set(one["seen"]) - {node})
        if 2 * min(readers[node], sees) < len(wrote) - 1:
            faults[one["host"]] = text
    text = f"no node sees {within} what another one writes: it is not shared"
    return [
        *_blame(name, failed, nodes=1, all_nodes=""),
        *_blame(name, faults, nodes=len(wrote), all_nodes=text),
    ]


def compare_versions(versions: Mapping[str, Mapping[str, Any]]) -> list[Finding]:
    """Versions that differ from those of most hosts. versions: by host."""
    findings = []
    for name in next(iter(versions.values()), {}):
        counts = Counter(one[name] for one in versions.values())
        most, count = counts.most_common(1)[0]
        faults = {
            host: f"{name} {one[name]}, but {most} on {count} of {len(versions)} nodes"
            for host, one in versions.items()
            if one[name] != most
        }
        values = ", ".join(f"{value} on {count}" for value, count in counts.most_common())
        text = f"{name} {values} nodes: should be the same on all"
        findings += _blame("versions", faults, nodes=len(versions), all_nodes=text)
    return findings


def compare_with_plan(
    rates: Mapping[str, Any], *, device: str, nodes: int, ranks_per_node: int
) -> list[Finding]:
    """Warns of rates far below those that the plan assumes for this GPU, if it knows the GPU."""
    try:
        machine = known_machine(device, nodes=nodes, gpus_per_node=ranks_per_node)
    except RecipeError:
        return []
    findings = []
    for name, (what, unit) in RATES.items() if machine.device == "cuda" else ():
        measured, assumed = rates.get(name), getattr(machine.rates, name)
        if measured is not None and measured < ASSUMED * assumed:
            share = f"{measured / assumed:.0%} of the {rate_as_text(assumed, unit)}"
            text = f"{what}: {rate_as_text(measured, unit)}, {share} that the plan assumes"
            finding = Finding("rates", "warning", text, host=ALL_NODES)
            findings.append(finding)
    return findings


def slowest_by_host(results: Sequence[Mapping[str, Any]], key: str) -> dict[str, float]:
    """A rate of each host's slowest rank; without hosts where it was not measured."""
    slowest: dict[str, float] = {}
    for result in results:
        if (value := result["rates"].get(key)) is not None:
            rate = value["all_gather"] if isinstance(value, dict) else value
            slowest[result["host"]] = min(rate, slowest.get(result["host"], rate))
    return slowest


def slowest_collectives(results: Sequence[Mapping[str, Any]], key: str) -> dict[str, float] | None:
    """By collective, the rate of the slowest rank; None: not measured."""
    rates = [result["rates"][key] for result in results if result["rates"][key] is not None]
    return {kind: min(rate[kind] for rate in rates) for kind in rates[0]} if rates else None


def slowest_rates(results: Sequence[Mapping[str, Any]], *, source: str) -> dict[str, Any]:
    """Fields of `planner.machine.Rates`: of the slowest rank; None where not measured."""
    rates: dict[str, Any] = {"source": source}
    for name in RATES:
        values = [result["rates"][name] for result in results if name in result["rates"]]
        rates[name] = min(values, default=None)
    groups = {"intra_node_bandwidth": "within_node", "inter_node_bandwidth": "across_nodes"}
    for name, key in groups.items():
        rates[name] = min((slowest_collectives(results, key) or {}).values(), default=None)
    return rates


def run(*, node: dict[str, Any] | None, shared: Path | None, quick: bool = False) -> Report:
    """Checks and measures on all ranks; each gets the report.

    node: arguments of `examine`, for each node; None: the node was examined already. quick: nodes
    were examined already, only their versions are compared, and less is measured.
    """
    environment = read_environment()
    first = environment.local_rank == 0
    findings: list[Finding] = []
    versions: dict[str, Any] = {}
    if quick and first:
        versions = gpus.versions(gpus.query_nvml(), gpus.query_torch(compute=False))
    elif node is not None:
        findings, versions = _examine_first(node, environment)
    group = process_group.process_group(environment, device="any", init_timeout=INIT_SECONDS)
    with group as (ranks, _):
        if first:
            _examined(environment).unlink(missing_ok=True)
        device, local = ranks.device, environment.local_world_size
        process_group.set_threads(environment, device=device, cpu_offload=True)
        number = ranks.rank // local
        mine: dict[str, Any] = {"host": host_name(), "node": number, "gpu": environment.local_rank}
        mine |= {"sum": check_sum(ranks), "offset": clock_offset(ranks)}
        mine |= {"shared": None, "seen": None, "findings": findings, "versions": versions}
        if shared is not None:
            mine["shared"], mine["seen"] = check_shared(shared, ranks, node=number, first=first)
        mine["rates"] = measure(ranks, local=local, quick=quick)
        results = gather(mine, ranks)
    name = "CPU" if device.type == "cpu" else torch.cuda.get_device_name(device)
    nodes = len(results) // local
    source = f"measured by launcher doctor on {results[0]['host']}, {time.strftime('%Y-%m-%d')}"
    rates = slowest_rates(results, source=source)
    return Report(
        findings=[
            *(finding for result in results for finding in result["findings"]),
            *judge(results, cpu=device.type == "cpu"),
            *compare_versions({one["host"]: one["versions"] for one in results if one["versions"]}),
            *compare_with_plan(rates, device=name, nodes=nodes, ranks_per_node=local),
        ],
        device=name,
        nodes=nodes,
        ranks_per_node=local,
        rates=rates,
        within_node=slowest_collectives(results, "within_node"),
        across_nodes=slowest_collectives(results, "across_nodes"),
        links=slowest_by_host(results, "link") or None,
        versions=results[0]["versions"],
    )


def _examined(environment: Environment) -> Path:
    """The file that exists once the node's first rank has examined the node."""
    name = f"launcher-doctor-{os.getuid()}-{environment.parent}-{environment.restart_count}"
    return Path(tempfile.gettempdir()) / name


def _examine_first(
    node: dict[str, Any], environment: Environment
) -> tuple[list[Finding], dict[str, Any]]:
    """Examines the node on its first rank. The others wait, so that it finds no process of theirs
    on the GPUs."""
    if environment.local_rank == 0:
        found = examine(**node)
        _examined(environment).touch()
        return found
    deadline = time.monotonic() + INIT_SECONDS
    while not _examined(environment).exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    return [], {}


def _run(setting: dict[str, Any]) -> dict[str, Any]:
    return asdict(run(node=None, shared=None))


if __name__ == "__main__":
    rank_main(_run)
    end_process(EXIT_DONE)
