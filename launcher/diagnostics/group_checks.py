"""What ranks measure together: rates of computing and moving bytes, clocks, whether all see the shared folder.

Started by `launcher doctor` under torchrun; over several nodes that command is itself started by torchrun, as training is.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import platform
import statistics
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from launcher.diagnostics.node_checks import ALL_NODES, FIGURES, Finding, Report, State, driver, examine, host_name, rate_in_words, unlike
from launcher.distributed import process_group
from launcher.distributed.environment import Environment, read_environment
from launcher.distributed.process_group import DataParallel
from launcher.errors import EXIT_DONE, RecipeError
from launcher.planner.machine import known_machine
from launcher.reliability.failures import end_process

SECONDS = 0.25
"""That each thing is measured for, warm-up not counted."""
INIT_SECONDS = 180
"""That ranks may take to come."""
SLOW = 0.8
"""A rank that computes at less than this share of the median rank holds all others up."""
SLOW_LINK = 0.5
"""The same for a node's links, of which three nodes or more are needed to tell whose is slow."""
CLOCKS_WARN, CLOCKS_BAD = 0.5, 5.0
"""Seconds that clocks may differ by: times in logs and who-owns-the-run go by them."""
SHARED_SECONDS = 10.0
"""After which a node must see what another has written to the shared folder: network file systems remember for some seconds."""
ASSUMED = 0.5
"""A rate under this share of what the plan assumes for the GPU is told: the plan's ranking of strategies may not hold here."""
_BUSY = "who else computes there, its power and heat (nvidia-smi -q -d PERFORMANCE), or whether it is a part of a GPU (MIG)"
_LOOK_AT = {
    "half_flops": _BUSY,
    "float32_flops": _BUSY,
    "memory_bandwidth": _BUSY,
    "host_bandwidth": "the PCIe link (nvidia-smi --query-gpu=pcie.link.gen.current,pcie.link.width.current --format=csv)",
    "host_adamw": "how many cores a rank has (slurm.cpus), and OMP_NUM_THREADS",
    "intra_node_bandwidth": "the links (nvidia-smi topo -m, nvidia-smi nvlink --status), and NCCL_P2P_DISABLE",
    "inter_node_bandwidth": "which network is taken (NCCL_DEBUG=INFO; NCCL_SOCKET_IFNAME, NCCL_IB_HCA), and its links (ibstat)",
}
_COLLECTIVES = {"intra_node_bandwidth": "collectives within a node", "inter_node_bandwidth": "collectives across nodes"}


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


def sees_shared(
    folder: Path, ranks: DataParallel, *, node: int, first_of_node: bool, seconds: float = SHARED_SECONDS
) -> tuple[str | None, list[int] | None]:
    """Each node's first rank writes a file and looks for those of all others. Returns what is wrong with writing (None:
    nothing), and the nodes whose files this one sees (None: it did not look, another rank of its node did)."""
    token: list[Any] = [uuid.uuid4().hex]
    dist.broadcast_object_list(token, src=0, group=ranks.group)
    names = [f".launcher-doctor-{token[0]}-{number}" for number in range(ranks.size)]
    problem = None
    if first_of_node:
        try:
            (folder / names[node]).write_text("seen")
        except OSError as error:
            problem = f"{folder} cannot be written to: {error.strerror or error}"
    wrote: list[Any] = [None] * ranks.size
    dist.all_gather_object(wrote, node if first_of_node and problem is None else None, group=ranks.group)
    wanted, seen = {number for number in wrote if number is not None}, set[int]()
    deadline = time.monotonic() + seconds
    while first_of_node and seen != wanted and time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            there = set(os.listdir(folder))  # a network file system may know of a single name that there was none
            seen = {number for number in wanted if names[number] in there}
        time.sleep(0.0 if seen == wanted else 0.1)
    dist.barrier(group=ranks.group)
    if not first_of_node:
        return None, None
    with contextlib.suppress(OSError):
        (folder / names[node]).unlink(missing_ok=True)
    return problem, sorted(seen)


def measure(ranks: DataParallel, environment: Environment, *, quick: bool) -> dict[str, Any]:
    """This rank's figures, all ranks measuring the same at once. Collectives of a node, and of all, where there are such.

    quick: without what tells nothing more of a node's health.
    """
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
        if quick and name in ("float32_flops", "host_adamw"):
            continue
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


def rounds_of_links(nodes: int) -> list[list[tuple[int, int]]]:
    """Pairs of neighbours in a ring of nodes, in rounds in which no node is in two: so each node has two links (of two
    nodes: one), and a slow node is told from its neighbours."""
    rounds = [[(node, node + 1) for node in range(first, nodes - 1, 2)] for first in (0, 1)]
    if nodes > 2:
        closing = (nodes - 1, 0)
        if nodes % 2 == 0:
            rounds[1].append(closing)
        else:
            rounds.append([closing])
    return [pairs for pairs in rounds if pairs]


def link_rate(ranks: DataParallel, *, local: int) -> float | None:
    """Bytes a second that this rank swaps with its like on a neighbouring node, all pairs of a round at once: the better of
    its two neighbours, so that a node with a slow link does not make its neighbours look slow. None: it had no neighbour."""
    node = ranks.rank // local
    mine = torch.zeros(1 << 24 if ranks.device.type == "cuda" else 1 << 20, device=ranks.device)
    other = torch.empty_like(mine)
    found = []
    for pairs in rounds_of_links(ranks.size // local):
        dist.barrier(group=ranks.group)
        neighbour = next((first + second - node for first, second in pairs if node in (first, second)), None)
        if neighbour is None:
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


def _by_host(told: Sequence[dict[str, Any]], key: str) -> dict[str, float]:
    """The slowest of each host's ranks; without those hosts where it was not measured."""
    slowest: dict[str, float] = {}
    for one in told:
        if (value := one["figures"].get(key)) is not None:
            rate = value["all_gather"] if isinstance(value, dict) else value
            slowest[one["host"]] = min(rate, slowest.get(one["host"], rate))
    return slowest


def judge(told: Sequence[dict[str, Any]], *, cpu: bool) -> list[Finding]:
    """What ranks found of one another. told: of each rank host, node (its number), gpu (its number), figures, offset (of its
    clock), shared and seen (`sees_shared`), right. What belongs to one node has its host; where as many nodes are on either
    side, as with two, nobody can tell whose fault it is: all nodes'."""
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
        rates = _by_host(told, key)
        usual = statistics.median(rates.values()) if len(rates) > 2 else 0.0
        for host, rate in rates.items():
            if rate < SLOW_LINK * usual:
                text = f"{what} at {rate / usual:.0%} of the median node's {usual / 1e9:.3g} GB/s"
                findings.append(Finding(name="network", state="warning" if cpu else "bad", text=text, host=host))
    if len(hosts) > 1:
        findings += _clocks({host: one["offset"] for host, one in hosts.items()})
    findings += _sharing([one for one in told if one["seen"] is not None])
    wrong = [host for host in hosts if any(one["host"] == host and not one["right"] for one in told)]
    for host in wrong if 2 * len(wrong) < len(hosts) or len(hosts) == 1 else [ALL_NODES] if wrong else []:
        findings.append(Finding(name="all-reduce", state="bad", text="gives a wrong sum", host=host))
    return findings


def _clocks(offsets: dict[str, float]) -> list[Finding]:
    """offsets: seconds, by host, against any one clock."""
    usual = statistics.median_low(offsets.values())
    off = {host: offset - usual for host, offset in offsets.items() if abs(offset - usual) > CLOCKS_WARN}
    first, last = min(offsets, key=offsets.__getitem__), max(offsets, key=offsets.__getitem__)
    spread = offsets[last] - offsets[first]

    def state(seconds: float) -> State:
        return "bad" if abs(seconds) > CLOCKS_BAD else "warning"

    if not off:
        return [Finding(name="clocks", state="good", text=f"within {spread:.2g} s of one another", host=ALL_NODES)]
    if 2 * len(off) >= len(offsets):
        text = f"{last}'s is {spread:.3g} s ahead of {first}'s: let chrony or ntpd keep them"
        return [Finding(name="clocks", state=state(spread), text=text, host=ALL_NODES)]
    return [
        Finding(
            name="clock",
            state=state(seconds),
            text=f"{abs(seconds):.3g} s {'ahead of' if seconds > 0 else 'behind'} the other nodes': let chrony or ntpd keep it",
            host=host,
        )
        for host, seconds in off.items()
    ]


def _sharing(told: Sequence[dict[str, Any]]) -> list[Finding]:
    """told: as in `judge`, of the ranks that looked, one a node. A node is out of line where fewer than half of the others
    see what it writes, or it does not see what more than half of them write."""
    findings = [
        Finding(name="shared folder", state="bad", text=one["shared"], host=one["host"]) for one in told if one["shared"] is not None
    ]
    wrote = {one["node"]: one for one in told if one["shared"] is None}
    seen = Counter(node for one in wrote.values() for node in one["seen"] if node != one["node"])
    blind = [
        one["host"] for node, one in wrote.items() if 2 * min(seen[node], len(wrote.keys() & set(one["seen"]) - {node})) < len(wrote) - 1
    ]
    if blind and len(blind) == len(wrote):
        text = f"what a node writes there others do not see within {SHARED_SECONDS:.0f} s: it is not shared"
        return [*findings, Finding(name="shared folder", state="bad", text=text, host=ALL_NODES)]
    text = f"this node and the others do not see within {SHARED_SECONDS:.0f} s what the other writes there; is it a local disk?"
    return findings + [Finding(name="shared folder", state="bad", text=text, host=host) for host in blind]


def against_plan(rates: dict[str, Any], *, device: str, nodes: int, ranks_per_node: int) -> list[Finding]:
    """The measured rates (as `rates_of` gives them) held against those that the plan assumes for this GPU where it is given
    none. Warnings: the table knows the GPU, not the network behind it, and slow training is training."""
    if device == "CPU":
        text = "not held against the plan's: it has no table of CPUs; launcher plan rates=FILE takes what is measured"
        return [Finding(name="rates", state="note", text=text, host=ALL_NODES)]
    try:
        assumed = known_machine(device, nodes=nodes, gpus_per_node=ranks_per_node).rates
    except RecipeError:
        text = f"not held against the plan's: {device} is not in its table; launcher plan rates=FILE takes what is measured"
        return [Finding(name="rates", state="note", text=text, host=ALL_NODES)]
    findings = []
    for name, look_at in _LOOK_AT.items():
        measured, expected = rates.get(name), getattr(assumed, name)
        if measured is not None and measured < ASSUMED * expected:
            what, unit = FIGURES[name] if name in FIGURES else (_COLLECTIVES[name], "B/s")
            found, hoped = rate_in_words(measured, unit), rate_in_words(expected, unit)
            text = f"{what}: {found}, {measured / expected:.0%} of the {hoped} that the plan assumes of {device}; look at {look_at}"
            findings.append(Finding(name="rates", state="warning", text=text, host=ALL_NODES))
    if not findings:
        text = f"none under {ASSUMED:.0%} of what the plan assumes of {device}"
        findings.append(Finding(name="rates", state="good", text=text, host=ALL_NODES))
    return findings


def slowest_collectives(told: Sequence[dict[str, Any]], name: str) -> dict[str, float] | None:
    """By kind, the slowest rank's; None: there were none."""
    found = [one["figures"][name] for one in told if one["figures"][name] is not None]
    return {kind: min(one[kind] for one in found) for kind in found[0]} if found else None


def rates_of(told: Sequence[dict[str, Any]], *, source: str) -> dict[str, Any]:
    """What `machine.Rates` holds: of each figure the slowest rank's, as all wait for it; None where it was not measured."""

    def slowest(name: str) -> float | None:
        return min((one["figures"][name] for one in told if name in one["figures"]), default=None)

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


def versions_here() -> dict[str, Any]:
    """As `examine` gives them."""
    cuda = torch.cuda.is_available()
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "rocm": torch.version.hip,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if cuda else None,  # type: ignore[no-untyped-call]
        "driver": driver(),
        "gpus": torch.cuda.device_count() if cuda else 0,
    }


def run(*, node: dict[str, Any] | None, shared: Path | None, quick: bool = False) -> Report:
    """Measures, and examines each node where `node` has the arguments of `examine`; all ranks get the same report.

    quick: each node was examined before: of that only its versions are asked, and less is measured.
    """
    environment = read_environment()
    findings: list[Finding] = []
    versions: dict[str, Any] = {}
    first_of_node = environment.local_rank == 0
    if quick and first_of_node:
        versions = versions_here()
    # Other ranks of a node keep off its GPUs until they were looked at: they would be found not to be free
    examined = Path(tempfile.gettempdir()) / f"launcher-doctor-{os.getuid()}-{environment.parent}-{environment.restart_count}"
    if node is not None and not quick:
        if first_of_node:
            findings, versions = examine(**node)
            examined.touch()
        deadline = time.monotonic() + INIT_SECONDS
        while not examined.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
    with process_group.process_group(environment, device="any", init_timeout=INIT_SECONDS) as (ranks, _):
        device = ranks.device
        process_group.set_threads(environment, device=device, cpu_offload=True)
        if first_of_node:
            examined.unlink(missing_ok=True)
        number = ranks.rank // environment.local_world_size
        mine: dict[str, Any] = {"host": host_name(), "node": number, "gpu": environment.local_rank, "right": check_sum(ranks)}
        mine["offset"] = clock_offsets(ranks)[ranks.rank]
        mine["shared"], mine["seen"] = (
            (None, None) if shared is None else sees_shared(shared, ranks, node=number, first_of_node=first_of_node)
        )
        mine["figures"] = measure(ranks, environment, quick=quick)
        mine["findings"], mine["versions"] = findings, versions
        told: list[Any] = [None] * ranks.size
        dist.all_gather_object(told, mine, group=ranks.group)
    found = [finding for one in told for finding in one["findings"]] + judge(told, cpu=device.type == "cpu")
    found += unlike({one["host"]: one["versions"] for one in told if one["versions"]})
    name = "CPU" if device.type == "cpu" else torch.cuda.get_device_name(device)
    nodes, local = len(told) // environment.local_world_size, environment.local_world_size
    rates = rates_of(told, source=f"measured by launcher doctor on {told[0]['host']}, {time.strftime('%Y-%m-%d')}")
    return Report(
        findings=found + against_plan(rates, device=name, nodes=nodes, ranks_per_node=local),
        device=name,
        nodes=nodes,
        ranks_per_node=local,
        rates=rates,
        within_node=slowest_collectives(told, "within_node"),
        across_nodes=slowest_collectives(told, "across_nodes"),
        links=_by_host(told, "link") or None,
        versions=told[0]["versions"],
    )


if __name__ == "__main__":
    _setting = json.loads(sys.argv[1])
    _report = run(node=None, shared=None)
    if read_environment().main:
        Path(_setting["report"]).write_text(json.dumps(dataclasses.asdict(_report)))
    end_process(EXIT_DONE)
