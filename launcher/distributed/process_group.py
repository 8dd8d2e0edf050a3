"""The process group and the device."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import socket
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from launcher.distributed import host_memory
from launcher.distributed.environment import (
    REPORT_SECONDS,
    Environment,
    user_sets_threads,
)
from launcher.distributed.network import interface_to
from launcher.distributed.open_files import allow_open_files
from launcher.distributed.rank_layout import RankLayout
from launcher.distributed.torchrun import LOOPBACK, listen, store_address
from launcher.errors import TrainingError
from launcher.libraries.private import all_groups, set_group_timeout, set_nccl_timeout

BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}
"""The backends by device type. Objects are exchanged over gloo, which neither waits for a device
nor needs an NCCL communicator (torch 2.11 to 2.14, `_get_object_coll_device`). With CPU offload,
norms are exchanged over gloo, too."""
CONNECTED_RANKS = 64
"""The largest number of ranks for which gloo connects every pair when a group is created. Each of n
ranks then reads n addresses of 8 n bytes from the store: 8 GB for each group of 1,000 ranks."""
CHECKPOINT_GROUP = "checkpoint"
"""Description of the checkpoint group, in which ranks wait for the slowest disk."""


_T = TypeVar("_T")
all_gather_single: Callable[..., dist.Work] = (
    getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
)
"""`all_gather_into_tensor`, which torch 2.13 renames."""


def gather(value: _T, group: dist.ProcessGroup) -> list[_T]:
    """The values of all ranks of the group, by rank. Every rank must call this."""
    values = [value] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def from_rank_0(value: _T, group: dist.ProcessGroup) -> _T:
    """The value of the group's first rank. Every rank must call this."""
    values = [value]
    dist.broadcast_object_list(values, group=group, group_src=0)
    return values[0]


def prepare_cpu(environment: Environment, *, device: torch.device, cpu_offload: bool) -> None:
    """Gives a rank that computes on the CPU its share of the cores, unless the user has set
    OMP_NUM_THREADS. Tensors that it frees go back to the system."""
    if device.type == "cpu":
        host_memory.return_freed_memory()
    if not user_sets_threads(environment) and (cpu_offload or device.type == "cpu"):
        cores = len(os.sched_getaffinity(0)) // environment.local_world_size
        torch.set_num_threads(max(1, cores))


class Node(NamedTuple):
    """What a rank sees of its node."""

    host: str
    gpus: int
    ranks: int
    torch: str
    build: str | None
    """As of `torch_build`."""


def torch_build() -> str | None:
    """What torch is built for, such as `CUDA 12.8`; None: CPUs only."""
    if torch.version.hip:  # its devices are called cuda, too
        return f"ROCm {torch.version.hip}"
    return f"CUDA {torch.version.cuda}" if torch.version.cuda else None


def choose_device(environment: Environment, store: Store, wanted: str) -> torch.device:
    """This rank's device, of the same kind on all ranks. All must call it; rank 0 decides.

    `wanted` is run.device, or `any` for tools: GPUs if every rank has one, else CPUs. Raises
    TrainingError (reason no_gpu) that names each node where ranks lack a GPU.
    """
    if wanted == "cpu":
        return torch.device("cpu")
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    mine = Node(
        socket.gethostname(), gpus, environment.local_world_size, torch.__version__, torch_build()
    )
    store.set(f"device/{environment.rank}", json.dumps(mine))
    if environment.rank == 0:
        texts = store.multi_get([f"device/{rank}" for rank in range(environment.world_size)])
        nodes = [Node(*json.loads(text)) for text in texts]
        store.set("device", json.dumps(agree_on_device(wanted, nodes)))
    kind, problem = json.loads(store.get("device"))
    if problem is not None:
        raise TrainingError(problem, reason="no_gpu")
    if kind == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", environment.local_rank)
    torch.cuda.set_device(device)
    return device


def agree_on_device(wanted: str, nodes: Sequence[Node]) -> tuple[str | None, str | None]:
    """`cuda` or `cpu`, or the problem. `nodes` has what each rank sees of its node, and `wanted` is
    the argument of `choose_device`."""
    short = [node for node in dict.fromkeys(nodes) if node.gpus < node.ranks]
    if not short:
        return "cuda", None
    if wanted == "any" or (wanted == "auto" and not any(node.gpus or node.build for node in nodes)):
        return "cpu", None
    lines = [f"run.device is {wanted}, and not every rank has a GPU:"]
    for node in short:
        what = f"torch {node.torch} is built without CUDA or ROCm; install a build for the GPU"
        if node.gpus:
            what = f"{node.gpus} GPUs for {node.ranks} ranks; start --nproc-per-node {node.gpus}"
        elif node.build:
            tool = "amd-smi, ROCR" if node.build.startswith("ROCm") else "nvidia-smi, CUDA"
            what = (
                f"torch {node.torch} is built for {node.build} and finds no GPU; check the driver "
                f"({tool}_VISIBLE_DEVICES) and what the job was granted"
            )
        lines.append(f"  node {node.host}: {what}")
    return None, "\n".join([*lines, "to compute on the CPUs of all nodes, set run.device=cpu"])


def check_dtype(device: torch.device, dtype: torch.dtype) -> None:
    """Raises ValueError if the device only emulates this dtype."""
    if dtype != torch.bfloat16 or device.type != "cuda":
        return
    if not torch.cuda.is_bf16_supported(including_emulation=False):
        raise ValueError(
            f"{torch.cuda.get_device_name(device)} does not compute in bfloat16; use float16, "
            "whose loss scale keeps small gradients, or strategy.mixed_precision=null"
        )


def set_numerics(*, deterministic: bool, float32_matmul: str) -> None:
    """Sets the precision of float32 matrix products, and deterministic algorithms if asked for."""
    torch.set_float32_matmul_precision(float32_matmul)
    if deterministic:
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False
        # Otherwise each torch.empty is filled with NaN; nothing here reads memory before writing it
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def _prepare_gloo(environment: Environment) -> None:
    """Makes gloo listen on the interface that leads to MASTER_ADDR, unless the user chose one. By
    default gloo uses the address of this machine's own name, which may not exist or not be
    reachable. Where a name leads to the loopback, other machines may know another address of it.
    Many ranks connect when they first exchange data."""
    if environment.world_size > CONNECTED_RANKS:
        os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
    if "GLOO_SOCKET_IFNAME" not in os.environ and environment.meeting_point is not None:
        host = environment.meeting_point.rsplit(":", 1)[0]
        name = interface_to(host)
        if name is not None and (name != "lo" or host.startswith(LOOPBACK)):
            os.environ["GLOO_SOCKET_IFNAME"] = name


@contextlib.contextmanager
def process_group(
    environment: Environment, *, device: str, init_timeout: int
) -> Iterator[tuple[RankLayout, Store]]:
    """The default process group, for the duration of the context. Yields all ranks and their store.

    `device` is the argument `wanted` of `choose_device`. `init_timeout` is the timeout in seconds
    until `set_timeout` is called. After an error the group is not destroyed: another rank may be
    waiting in it.
    """
    store: Store
    if environment.world_size == 1 and not environment.torchrun:
        store = HashStore()
    else:
        allow_open_files(environment)
        store = _meet(environment, seconds=init_timeout)
        _prepare_gloo(environment)
    chosen = choose_device(environment, store, device)
    rank, size = environment.rank, environment.world_size
    dist.init_process_group(
        BACKENDS[chosen.type],
        store=store,
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=init_timeout),
        device_id=chosen if chosen.type == "cuda" else None,
    )
    group = dist.group.WORLD
    assert group is not None
    yield RankLayout(rank=rank, size=size, group=group, device=chosen), store
    # DistributedDataParallel, in a reference cycle, refers to the group. Uncollected, the group
    # could be destroyed under the interpreter's lock, which gloo's thread may be waiting for (hung
    # with torch 2.13)
    gc.collect()
    dist.destroy_process_group()


def _meet(environment: Environment, *, seconds: int) -> Store:
    """Connects to the store of these ranks. Raises TrainingError if that fails."""
    rank, ranks = environment.rank, environment.world_size
    timeout, where = timedelta(seconds=seconds), environment.meeting_point
    try:
        if environment.torchrun or rank != 0:
            store, _, _ = next(iter(rendezvous("env://", timeout=timeout)))
        else:
            store = _host_store(environment, timeout)
        store.set_timeout(timeout)
        generation = _agree_on_generation(store, rank=rank, ranks=ranks, seconds=seconds)
    except (dist.DistError, OSError) as error:
        what = f"could not meet the other ranks at {where} within {seconds} s"
        raise TrainingError(f"{what}: {error}") from error
    # A restart uses the same store; without its own prefix it would read addresses of dead ranks
    return PrefixStore(f"generation{generation}", store)


def _host_store(environment: Environment, timeout: timedelta) -> Store:
    """The store of ranks that were started without torchrun. It listens at MASTER_ADDR, if that is
    an address of this machine which others can reach, and otherwise on all interfaces."""
    assert environment.meeting_point is not None
    host, port = environment.meeting_point.rsplit(":", 1)
    address = host if host.startswith(LOOPBACK) else store_address(host, one_machine=False)
    listener = None if address is None else listen(address, int(port))
    return dist.TCPStore(
        host,
        int(port),
        environment.world_size,
        is_master=True,
        timeout=timeout,
        multi_tenant=True,
        master_listen_fd=None if listener is None else listener.detach(),
    )


def _agree_on_generation(store: Store, *, rank: int, ranks: int, seconds: float) -> int:
    """A number that these ranks share and no earlier ranks at this store had.

    torchrun's restart count is not such a number: each node's agent counts for itself, and does not
    count a restart caused by a returning node (seen with torch 2.13). Rank 0 draws the number and
    answers each rank under a name that only this process knows: the answer to an entry of a dead
    process is never read. Raises TimeoutError.
    """
    if rank != 0:
        mine = uuid.uuid4().hex
        store.set(f"hello/{rank}", mine)
        generation = int(store.get(f"generation/of/{mine}"))
        store.set(f"generation/{generation}/{rank}", "")
        return generation
    generation = int(store.add("generation/last", 1))
    hellos = [f"hello/{other}" for other in range(1, ranks)]
    arrived = [f"generation/{generation}/{other}" for other in range(1, ranks)]
    answered, deadline = set[str](), time.monotonic() + seconds
    while arrived and not store.check(arrived):
        if store.check(hellos):
            names = {name.decode() for name in store.multi_get(hellos)} - answered
            for name in names:
                store.set(f"generation/of/{name}", str(generation))
            answered |= names
        if time.monotonic() > deadline:
            keys = arrived if store.check(hellos) else hellos
            for other, key in enumerate(keys, 1):
                if not store.check([key]):
                    raise TimeoutError(f"rank {other} is missing")
        time.sleep(0.01)
    return generation


def set_timeout(seconds: int, *, hang_timeout: int) -> None:
    """Sets the timeout of all groups except the group of checkpoints.

    Must be called when all groups exist, because the groups of a device mesh start with a default
    timeout. Must be called again after the first collectives, which are slow. NCCL's timeout ends
    the process without a report, so it is longer than the timeout of the watchdog
    (`reliability/watchdog.py`).
    """
    nccl = timedelta(seconds=max(seconds, hang_timeout) + REPORT_SECONDS)
    for group in all_groups():
        if group.group_desc != CHECKPOINT_GROUP:
            set_group_timeout(group, timedelta(seconds=seconds))
            set_nccl_timeout(group, nccl)
