"""What ranks measure together: rates of computing and moving bytes, clocks, whether all see the shared folder.

Started by `launcher doctor` under torchrun; over several nodes that command is itself started by torchrun, as training is.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import socket
import statistics
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from launcher import processes
from launcher.environment import Environment, read_environment
from launcher.errors import EXIT_DONE
from launcher.failures import end_process
from launcher.health import Finding, Report, State, examine, unlike
from launcher.processes import DataParallel

SECONDS = 0.25
"""That each thing is measured for, warm-up not counted."""
SLOW = 0.8
"""A rank that computes at less than this share of the median rank holds all others up."""
SLOW_LINK = 0.5
"""The same for a node's links, of which three nodes or more are needed to tell whose is slow."""
CLOCKS_WARN, CLOCKS_BAD = 0.5, 5.0
"""Seconds that clocks may differ by: times in logs and who-owns-the-run go by them."""


def median_seconds(
    body: Callable[[], Any], *, device: torch.device, seconds: float = SECONDS, together: dist.ProcessGroup | None = None
) -> float:
    """Median time of a call, after two that do not count.

    together: a group whose ranks call as often as one another, as a collective needs: its first rank says how often.
    """

    def once() -> float:
        started = time.perf_counter()
        body()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - started

    once()
    first = max(once(), 1e-7)
    count = torch.tensor([min(200, max(3, round(seconds / first)))], device=device)
    if together is not None:
        dist.broadcast(count, group=together, group_src=0)
    return statistics.median(once() for _ in range(int(count)))


def product_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Floating-point operations a second in products of square matrices: 2 n^3 each."""
    size = 8192 if device.type == "cuda" else 768
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    out = torch.empty_like(left)
    return float(2 * size**3 / median_seconds(lambda: torch.mm(left, right, out=out), device=device))


def memory_rate(device: torch.device) -> float:
    """Bytes read and written a second, by a copy larger than the caches."""
    size = 1 << 30 if device.type == "cuda" else 1 << 26
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / median_seconds(lambda: target.copy_(source), device=device)


def host_rate(device: torch.device) -> float:
    """Bytes a second between host and device, the slower way; on the CPU a copy within the host's memory."""
    size = 1 << 28 if device.type == "cuda" else 1 << 26
    host = torch.zeros(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
    there = torch.empty(size, dtype=torch.uint8, device=device)
    upward = median_seconds(lambda: there.copy_(host, non_blocking=True), device=device)
    downward = median_seconds(lambda: host.copy_(there, non_blocking=True), device=device)
    return size / max(upward, downward)


def adamw_rate() -> float:
    """Parameters a second that fused AdamW updates in host memory."""
    weights = torch.nn.Parameter(torch.zeros(1 << 24))
    weights.grad = torch.ones_like(weights)
    optimizer = torch.optim.AdamW([weights], fused=True)
    return weights.numel() / median_seconds(optimizer.step, device=torch.device("cpu"))


def collective_rates(ranks: DataParallel, group: dist.ProcessGroup) -> dict[str, float]:
    """Bytes a second that a rank sends, per kind of collective, with buffers the size of a large block's weights.

    A ring of n ranks sends (n - 1) / n of the whole in an all-gather, and twice that in an all-reduce.
    """
    count, device = dist.get_world_size(group), ranks.device
    size = (1 << 28 if device.type == "cuda" else 1 << 23) // (4 * count) * count
    whole = torch.zeros(size, device=device)
    part = torch.zeros(size // count, device=device)
    sent = 4 * size * (count - 1) / count

    all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name since torch 2.13

    def gather() -> None:
        all_gather(whole, part, group=group)

    def reduce() -> None:
        dist.all_reduce(whole, group=group)

    rates = {
        "all_gather": sent / median_seconds(gather, device=device, together=group),
        "all_reduce": 2 * sent / median_seconds(reduce, device=device, together=group),
    }
    here = dist.get_rank(group)
    if count % 2 == 0:  # neighbours swap, all pairs at once

        def swap() -> None:
            pair = [dist.P2POp(dist.isend, whole, group=group, group_peer=here ^ 1)]
            pair.append(dist.P2POp(dist.irecv, other, group=group, group_peer=here ^ 1))
            for work in dist.batch_isend_irecv(pair):
                work.wait()

        other = torch.empty_like(whole)
        rates["point_to_point"] = 4 * size / median_seconds(swap, device=device, together=group)
    return rates


def check_sum(ranks: DataParallel) -> bool:
    """Whether an all-reduce gives what it must."""
    values = torch.full((1 << 16,), float(ranks.rank + 1), device=ranks.device)
    dist.all_reduce(values, group=ranks.group)
    return bool((values == ranks.size * (ranks.size + 1) / 2).all())


def clock_offsets(ranks: DataParallel, *, now: Callable[[], float] = time.time) -> list[float]:
    """Seconds that each rank's clock is ahead of rank 0's: medians over five reads, each right after a barrier."""
    reads: list[list[float]] = []
    for _ in range(5):
        dist.barrier(group=ranks.group)
        mine = now()
        all_of_them: list[Any] = [None] * ranks.size
        dist.all_gather_object(all_of_them, mine, group=ranks.group)
        reads.append([theirs - all_of_them[0] for theirs in all_of_them])
    return [statistics.median(read[rank] for read in reads) for rank in range(ranks.size)]


def sees_shared(folder: Path, ranks: DataParallel, *, first_of_node: bool, seconds: float = 10.0) -> str | None:
    """None: a file that rank 0 writes is seen by this node within some seconds; else what is wrong."""
    told: list[Any] = [f".launcher-doctor-{uuid.uuid4().hex}", None]
    if ranks.rank == 0:
        try:
            (folder / told[0]).write_text("seen")
        except OSError as error:
            told[1] = f"{folder} cannot be written to: {error.strerror}"
    dist.broadcast_object_list(told, src=0, group=ranks.group)
    file, problem = folder / told[0], None
    if told[1] is not None:
        return told[1] if ranks.rank == 0 else None
    if first_of_node:
        deadline = time.monotonic() + seconds
        while not file.exists() and time.monotonic() < deadline:
            with contextlib.suppress(OSError):
                os.listdir(folder)  # a network file system may know from before that there is no such file
            time.sleep(0.1)
        if not file.exists():
            problem = f"{folder}: what another node writes there is not seen within {seconds:.0f} s; is it a local disk?"
    dist.barrier(group=ranks.group)
    if ranks.rank == 0:
        file.unlink(missing_ok=True)
    return problem


def measure(ranks: DataParallel, environment: Environment) -> dict[str, Any]:
    """This rank's figures, all ranks measuring the same at once. Collectives of a node, and of all, where there are such."""
    device = ranks.device
    figures: dict[str, Any] = {}
    steps: list[tuple[str, Callable[[], float]]] = [
        ("half_flops", lambda: product_rate(device, torch.bfloat16)),
        ("float32_flops", lambda: product_rate(device, torch.float32)),
        ("memory_bandwidth", lambda: memory_rate(device)),
        ("host_bandwidth", lambda: host_rate(device)),
        ("host_adamw", adamw_rate),
    ]
    torch.set_float32_matmul_precision("high")  # as recipes have it
    for name, step in steps:
        dist.barrier(group=ranks.group)
        figures[name] = step()
    local = environment.local_world_size
    nodes = ranks.size // local
    figures["within_node"] = figures["across_nodes"] = figures["link"] = None
    if local > 1:
        groups = [dist.new_group(list(range(first, first + local))) for first in range(0, ranks.size, local)]
        figures["within_node"] = collective_rates(ranks, groups[ranks.rank // local])
    if nodes > 1:
        figures["across_nodes"] = collective_rates(ranks, ranks.group)
        figures["link"] = link_rate(ranks, local=local)
    return figures


def link_rate(ranks: DataParallel, *, local: int) -> float | None:
    """Bytes a second that this rank swaps with its like on a neighbouring node, all pairs of nodes at once: the better of
    its two neighbours, so that a node with a slow link does not make its neighbours look slow. None: it had no neighbour."""
    node, nodes = ranks.rank // local, ranks.size // local
    mine = torch.zeros(1 << 24 if ranks.device.type == "cuda" else 1 << 20, device=ranks.device)
    other = torch.empty_like(mine)
    found = []
    for first in (0, 1):
        neighbour = ((node - first) ^ 1) + first
        dist.barrier(group=ranks.group)
        if not first <= node < nodes or not first <= neighbour < nodes:
            continue
        peer = ranks.rank + (neighbour - node) * local
        times = []
        for _ in range(6):
            started = time.perf_counter()
            swap = [dist.P2POp(dist.isend, mine, peer, group=ranks.group), dist.P2POp(dist.irecv, other, peer, group=ranks.group)]
            for work in dist.batch_isend_irecv(swap):
                work.wait()
            if ranks.device.type == "cuda":
                torch.cuda.synchronize(ranks.device)
            times.append(time.perf_counter() - started)
        found.append(4 * mine.numel() / statistics.median(times[1:]))
    return max(found, default=None)


def _of_host(told: Sequence[dict[str, Any]], host: str, key: str) -> float | None:
    """The slowest of a host's ranks."""
    found = [one["figures"].get(key) for one in told if one["host"] == host]
    rates = [value["all_gather"] if isinstance(value, dict) else value for value in found if value is not None]
    return min(rates, default=None)


def judge(told: Sequence[dict[str, Any]], *, cpu: bool) -> list[Finding]:
    """What ranks found of one another. told: of each rank host, gpu (its number), figures, offset (of its clock), shared, right."""
    findings = []
    names = {"half_flops": "computes", "memory_bandwidth": "moves memory", "host_bandwidth": "copies to and from the host"}
    for key, doing in names.items():
        usual = statistics.median(one["figures"][key] for one in told)
        for rank, one in enumerate(told):
            share = one["figures"][key] / usual
            if share < SLOW:
                who = f"rank {rank}" if cpu else f"GPU {one['gpu']} (rank {rank})"
                text = f"{who} {doing} at {share:.0%} of the median rank: all would wait for it"
                # Cores are shared with whoever else is there: it says little about tomorrow
                findings.append(Finding(name="speed", state="warning" if cpu else "bad", text=text, host=one["host"]))
    hosts: dict[str, dict[str, Any]] = {}
    for one in told:
        hosts.setdefault(one["host"], one)
    for key, what in (("within_node", "collectives among its ranks run"), ("link", "its links to other nodes run")):
        rates = {host: rate for host in hosts if (rate := _of_host(told, host, key)) is not None}
        usual = statistics.median(rates.values()) if len(rates) > 2 else 0.0
        for host, rate in rates.items():
            if rate < SLOW_LINK * usual:
                text = f"{what} at {rate / usual:.0%} of the median node's {usual / 1e9:.3g} GB/s"
                findings.append(Finding(name="network", state="warning" if cpu else "bad", text=text, host=host))
    furthest = max(hosts.values(), key=lambda one: abs(one["offset"]))
    if len(hosts) > 1:
        off = furthest["offset"]
        text = f"{abs(off):.3g} s {'ahead of' if off > 0 else 'behind'} {told[0]['host']}'s: let chrony or ntpd keep it"
        state: State = "bad" if abs(off) > CLOCKS_BAD else "warning"
        if abs(off) > CLOCKS_WARN:
            findings.append(Finding(name="clock", state=state, text=text, host=furthest["host"]))
        else:
            findings.append(Finding(name="clocks", state="good", text=f"within {abs(off):.2g} s of one another", host="all nodes"))
    findings += [
        Finding(name="shared folder", state="bad", text=one["shared"], host=one["host"]) for one in told if one.get("shared") is not None
    ]
    wrong = sorted({one["host"] for one in told if not one["right"]})
    for host in wrong:
        findings.append(Finding(name="all-reduce", state="bad", text="gives a wrong sum", host=host))
    return findings


def slowest_collectives(told: Sequence[dict[str, Any]], name: str) -> dict[str, float] | None:
    """By kind, the slowest rank's; None: there were none."""
    found = [one["figures"][name] for one in told if one["figures"][name] is not None]
    return {kind: min(one[kind] for one in found) for kind in found[0]} if found else None


def rates_of(told: Sequence[dict[str, Any]], *, source: str) -> dict[str, Any]:
    """What `machine.Rates` holds: of each figure the slowest rank's, as all wait for it; None where it could not be measured."""

    def slowest(name: str) -> float:
        return float(min(one["figures"][name] for one in told))

    def collective(name: str) -> float | None:
        found = slowest_collectives(told, name)
        return None if found is None else min(found["all_gather"], found["all_reduce"])

    plain = ("half_flops", "float32_flops", "memory_bandwidth", "host_bandwidth", "host_adamw")
    return {
        **{name: slowest(name) for name in plain},
        "intra_node_bandwidth": collective("within_node"),
        "inter_node_bandwidth": collective("across_nodes"),
        "source": source,
    }


def run(*, node: dict[str, Any] | None, shared: Path | None) -> Report:
    """Measures, and examines each node where `node` has the arguments of `examine`; all ranks get the same report."""
    environment = read_environment()
    findings: list[Finding] = []
    versions: dict[str, Any] = {}
    first_of_node = environment.local_rank == 0
    if node is not None and first_of_node:
        findings, versions = examine(**node)
    device = processes.choose_device(environment)
    processes.set_threads(environment, device=device, cpu_offload=True)
    with processes.process_group(environment, device=device, cpu_offload=True, init_timeout=180) as (ranks, _):
        mine: dict[str, Any] = {"host": socket.gethostname(), "gpu": environment.local_rank, "right": check_sum(ranks)}
        mine["offset"] = clock_offsets(ranks)[ranks.rank]
        mine["shared"] = None if shared is None else sees_shared(shared, ranks, first_of_node=first_of_node)
        mine["figures"] = measure(ranks, environment)
        mine["findings"], mine["versions"] = findings, versions
        told: list[Any] = [None] * ranks.size
        dist.all_gather_object(told, mine, group=ranks.group)
    found = [finding for one in told for finding in one["findings"]] + judge(told, cpu=device.type == "cpu")
    found += unlike({one["host"]: one["versions"] for one in told if one["versions"]})
    return Report(
        findings=found,
        device="CPU" if device.type == "cpu" else torch.cuda.get_device_name(device),
        nodes=len(told) // environment.local_world_size,
        ranks_per_node=environment.local_world_size,
        rates=rates_of(told, source=f"measured by launcher doctor on {told[0]['host']}, {time.strftime('%Y-%m-%d')}"),
        within_node=slowest_collectives(told, "within_node"),
        across_nodes=slowest_collectives(told, "across_nodes"),
        versions=told[0]["versions"],
    )


if __name__ == "__main__":
    _setting = json.loads(sys.argv[1])
    _report = run(node=None, shared=None)
    if read_environment().main:
        Path(_setting["report"]).write_text(json.dumps(dataclasses.asdict(_report)))
    end_process(EXIT_DONE)
