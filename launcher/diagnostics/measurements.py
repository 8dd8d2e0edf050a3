"""Rates of a rank: computing, moving bytes, collectives. All ranks measure at the same time."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from launcher.distributed.process_group import all_gather_single
from launcher.distributed.rank_layout import RankLayout

REPEATS = 8
"""Timed calls, of which the median is used, after two warm-up calls."""


def median_seconds(body: Callable[[], object], device: torch.device) -> float:
    """Median duration of a call, including its work on the device."""
    seconds = []
    for _ in range(2 + REPEATS):
        started = time.perf_counter()
        body()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[2:])


def product_rate(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of a matrix product."""
    size = 8192 if device.type == "cuda" else 768
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    out = torch.empty_like(left)
    return float(2 * size**3 / median_seconds(lambda: torch.mm(left, right, out=out), device))


def memory_rate(device: torch.device) -> float:
    """Bytes/s read and written, by a copy that is larger than the caches."""
    size = 1 << 30 if device.type == "cuda" else 1 << 26
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / median_seconds(lambda: target.copy_(source), device)


def host_rate(device: torch.device) -> float:
    """Bytes/s between host and device, in the slower direction; on a CPU within host memory."""
    size = 1 << 28 if device.type == "cuda" else 1 << 26
    host = torch.zeros(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
    other = torch.empty(size, dtype=torch.uint8, device=device)
    upload = median_seconds(lambda: other.copy_(host, non_blocking=True), device)
    download = median_seconds(lambda: host.copy_(other, non_blocking=True), device)
    return size / max(upload, download)


def adamw_rate() -> float:
    """Parameters/s that fused AdamW updates in host memory."""
    weights = torch.nn.Parameter(torch.zeros(1 << 24))
    weights.grad = torch.ones_like(weights)
    optimizer = torch.optim.AdamW([weights], fused=True)
    return weights.numel() / median_seconds(optimizer.step, torch.device("cpu"))


def collective_rate(group: dist.ProcessGroup, device: torch.device) -> float:
    """Bytes/s that a rank sends in the slower of all-gather and all-reduce.

    A ring of n ranks sends (n - 1) / n of the buffer in an all-gather, twice that in an all-reduce.
    """
    ranks = dist.get_world_size(group)
    size = (1 << 28 if device.type == "cuda" else 1 << 23) // (4 * ranks) * ranks
    whole = torch.zeros(size, device=device)
    part = torch.zeros(size // ranks, device=device)
    sent = 4 * size * (ranks - 1) / ranks
    gather = median_seconds(lambda: all_gather_single(whole, part, group=group), device)
    reduce = median_seconds(lambda: dist.all_reduce(whole, group=group), device)
    return min(sent / gather, 2 * sent / reduce)


def node_links(nodes: int) -> list[tuple[int, int]]:
    """Pairs of neighbours in a ring of nodes, every other one first: those do not share a node.

    Each node has two links (of two nodes one), so a slow node differs from its neighbours.
    """
    links = [(node, (node + 1) % nodes) for node in range(nodes if nodes > 2 else nodes - 1)]
    return links[::2] + links[1::2]


def link_rate(ranks: RankLayout, *, local: int) -> float:
    """Bytes/s that this rank exchanges with its counterpart on a neighbouring node.

    This is the higher rate of the two neighbours, so that a slow node does not make its neighbours
    look slow. local is the number of ranks per node.
    """
    node, device = ranks.rank // local, ranks.device
    size = 1 << 24 if device.type == "cuda" else 1 << 20
    mine, other = torch.zeros(size, device=device), torch.empty(size, device=device)

    def exchange(peer: int) -> None:
        send = dist.P2POp(dist.isend, mine, peer, group=ranks.group)
        receive = dist.P2POp(dist.irecv, other, peer, group=ranks.group)
        for work in dist.batch_isend_irecv([send, receive]):
            work.wait()

    rates = []
    for link in node_links(ranks.size // local):
        if node in link:  # a neighbour that is still busy delays the first call only
            peer = (sum(link) - node) * local + ranks.rank % local
            rates.append(4 * size / median_seconds(partial(exchange, peer), device))
    return max(rates)


def measure_rates(ranks: RankLayout, *, local: int, quick: bool) -> dict[str, float]:
    """This rank's rates per second, by name.

    local is the number of ranks per node. quick: only what shows whether a node is healthy.
    """
    device = ranks.device
    torch.set_float32_matmul_precision("high")  # as the recipes set it
    steps: dict[str, Callable[[], float]] = {
        "half_flops": partial(product_rate, device, torch.bfloat16),
        "memory_bandwidth": partial(memory_rate, device),
        "host_bandwidth": partial(host_rate, device),
    }
    if not quick:
        steps["float32_flops"] = partial(product_rate, device, torch.float32)
        steps["host_adamw"] = adamw_rate
    if local > 1:
        members = torch.arange(ranks.size).view(-1, local)
        # One split of the communicator; `new_subgroups` makes one for each node, one after another
        nodes = DeviceMesh(device.type, members, mesh_dim_names=("node", "rank"))
        steps["intra_node_bandwidth"] = partial(collective_rate, nodes.get_group("rank"), device)
    if ranks.size > local:
        steps["inter_node_bandwidth"] = partial(collective_rate, ranks.group, device)
        steps["link"] = partial(link_rate, ranks, local=local)
    rates = {}
    for name, step in steps.items():
        dist.barrier(group=ranks.group)
        rates[name] = step()
    return rates
