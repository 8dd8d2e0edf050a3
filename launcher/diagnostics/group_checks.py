"""Checks that ranks do together: a sum, rates, and ranks that are slower than the others.

`launcher doctor` starts this module under torchrun; on several nodes the user starts it so.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist

from launcher.diagnostics.findings import RATES, Finding, Report, State, Versions
from launcher.diagnostics.measurements import measure_rates
from launcher.diagnostics.node_checks import Checks, examine
from launcher.distributed import process_group
from launcher.distributed.environment import read_environment
from launcher.distributed.network import node_name
from launcher.distributed.process_group import gather
from launcher.distributed.rank_layout import RankLayout
from launcher.distributed.spawn import end_process, rank_main
from launcher.errors import EXIT_DONE
from launcher.reliability.json_files import Json

INIT_SECONDS, INIT_SECONDS_OF_NODE = 180, 2
"""Time for all ranks to meet, while the first one of each node examines it, and more for each node."""
SLOW = {
    "half_flops": ("computes", 0.8),
    "memory_bandwidth": ("moves memory", 0.8),
    "host_bandwidth": ("copies to and from the host", 0.8),
    "intra_node_bandwidth": ("runs collectives within its node", 0.5),
    "link": ("exchanges data with other nodes", 0.5),
}
"""Share of the median rank's rate below which a rank is slow, and makes all others wait."""


@dataclass(frozen=True)
class RankResult:
    """What a rank found and measured."""

    host: str
    gpu: int
    """Rank within the node."""
    findings: list[Finding]
    """Findings of the node; only its first rank has them."""
    versions: Versions
    sum_is_right: bool
    rates: dict[str, float]


def sum_is_right(ranks: RankLayout) -> bool:
    """Whether an all-reduce gives the right sum."""
    values = torch.full((1 << 16,), float(ranks.rank + 1), device=ranks.device)
    dist.all_reduce(values, group=ranks.group)
    return bool((values == ranks.size * (ranks.size + 1) / 2).all())


def judge(results: Sequence[RankResult], *, cpu: bool) -> Iterator[Finding]:
    """Yields a finding for each node with a wrong sum and each slow rank. On CPUs slow ranks are
    only a warning, because other programs share the cores."""
    for host in dict.fromkeys(result.host for result in results if not result.sum_is_right):
        yield Finding("all-reduce", "bad", "gives a wrong sum", host=host)
    for key, (what, limit) in SLOW.items():
        rates = {
            rank: result.rates[key] for rank, result in enumerate(results) if key in result.rates
        }
        median = statistics.median(rates.values()) if rates else 0.0
        for rank, rate in rates.items():
            if rate < limit * median:
                which = f"rank {rank}" if cpu else f"GPU {results[rank].gpu} (rank {rank})"
                share = f"{rate / median:.0%} of the median rank"
                text = f"{which} {what} at {share}: all would wait for it"
                state: State = "warning" if cpu else "bad"
                yield Finding("speed", state, text, host=results[rank].host)


def slowest_rates(rates: Sequence[Mapping[str, float]], *, source: str) -> Json:
    """Fields of `planner.machine.Rates`, from the rates of all ranks; None where not measured."""
    slowest = {
        name: min((rank_rates[name] for rank_rates in rates if name in rank_rates), default=None)
        for name in RATES
    }
    return {"source": source} | slowest


def run(*, node: Checks | None, quick: bool = False) -> Report:
    """Checks and measures on all ranks; each gets the report.

    node holds the arguments of `examine`; None: the node was examined already. quick: less is
    measured.
    """
    environment = read_environment()
    local = environment.local_world_size
    findings: list[Finding] = []
    versions: Versions = {}
    # Before the ranks meet, so that no process of another rank is on the GPUs yet
    if environment.local_rank == 0 and node is not None:
        findings, versions = examine(**node)
    seconds = INIT_SECONDS + INIT_SECONDS_OF_NODE * (environment.world_size // local)
    group = process_group.process_group(environment, device="any", init_timeout=seconds)
    with group as (ranks, _):
        process_group.prepare_cpu(environment, device=ranks.device, cpu_offload=True)
        own = RankResult(
            node_name(),
            environment.local_rank,
            findings,
            versions,
            sum_is_right(ranks),
            measure_rates(ranks, local=local, quick=quick),
        )
        results = gather(own, ranks.group)
        cpu = ranks.device.type == "cpu"
        name = "CPU" if cpu else torch.cuda.get_device_name(ranks.device)
    source = f"measured by launcher doctor on {results[0].host}, {time.strftime('%Y-%m-%d')}"
    return Report(
        findings=[
            *(finding for result in results for finding in result.findings),
            *judge(results, cpu=cpu),
        ],
        device=name,
        nodes=len(results) // local,
        ranks_per_node=local,
        rates=slowest_rates([result.rates for result in results], source=source),
        versions=results[0].versions,
    )


def _run(setting: object) -> Json:
    return asdict(run(node=None))


if __name__ == "__main__":
    rank_main(_run)
    end_process(EXIT_DONE)
