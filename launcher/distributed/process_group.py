"""The process group, the device, and the ranks that train together."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import gc
import json
import os
import socket
import struct
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from launcher.distributed.environment import Environment
from launcher.errors import TrainingError

BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}
"""By device. A group with a backend for the CPU sends objects over it (torch 2.11 to 2.14, `_get_object_coll_device`).

So an exchange of objects waits for no device, and needs no communicator of NCCL. Gradients that are clipped in host
memory, with CPU offload, are reduced over gloo too.
"""


@dataclass(frozen=True, kw_only=True)
class DataParallel:
    """The ranks that train one model together. A strategy gets this, never the default group: the self-test trains on
    parts of it, and the memory plan on one that does not exist."""

    rank: int
    size: int
    group: dist.ProcessGroup
    device: torch.device


def cores_per_rank(environment: Environment) -> int:
    """Cores that this process may use, shared evenly among the node's ranks."""
    return max(1, len(os.sched_getaffinity(0)) // environment.local_world_size)


def set_threads(environment: Environment, *, device: torch.device, cpu_offload: bool) -> None:
    """Gives a rank that computes on the CPU its share of the cores.

    torchrun sets OMP_NUM_THREADS=1 wherever it starts more than one process a node; an optimizer step on offloaded
    parameters would then run on one thread. A value other than 1 was set by the user, and stays.
    """
    if os.environ.get("OMP_NUM_THREADS", "1") == "1" and (cpu_offload or device.type == "cpu"):
        torch.set_num_threads(cores_per_rank(environment))


def choose_device(environment: Environment, store: Store, wanted: str) -> torch.device:
    """This rank's device, of the same kind on all ranks, which must all call this: rank 0 decides and tells the others.

    store: that the ranks met at. wanted: run.device; or `any`, for tools: GPUs where every rank has one, else CPUs.
    Raises TrainingError (reason no_gpu), naming each node, where ranks lack a GPU.
    """
    if wanted == "cpu":
        return torch.device("cpu")
    # A ROCm build of torch calls its devices cuda, too
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else f"ROCm {torch.version.hip}" if torch.version.hip else None
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    mine = Node(socket.gethostname(), gpus, environment.local_world_size, torch.__version__, build)
    store.set(f"device/{environment.rank}", json.dumps(dataclasses.astuple(mine)))
    if environment.rank == 0:
        found = store.multi_get([f"device/{rank}" for rank in range(environment.world_size)])
        store.set("device", json.dumps(agree_on_device(wanted, [Node(*json.loads(one)) for one in found])))
    kind, problem = json.loads(store.get("device"))
    if problem is not None:
        raise TrainingError(problem, reason="no_gpu")
    if kind == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", environment.local_rank)
    torch.cuda.set_device(device)
    return device


@dataclass(frozen=True)
class Node:
    """What a rank sees of its node."""

    host: str
    gpus: int
    ranks: int
    torch: str
    build: str | None
    """What torch is built for, such as `CUDA 12.8`; None: CPUs alone."""


def agree_on_device(wanted: str, nodes: Sequence[Node]) -> tuple[str | None, str | None]:
    """`cuda` or `cpu`, for all ranks; or what is wrong. nodes: one of each rank. wanted: as of `choose_device`."""
    short = [node for node in dict.fromkeys(nodes) if node.gpus < node.ranks]
    if not short:
        return "cuda", None
    if wanted == "any" or (wanted == "auto" and not any(node.gpus or node.build for node in nodes)):
        return "cpu", None
    lines = [f"run.device is {wanted}, and not every rank has a GPU:"]
    for node in short:
        if node.gpus:
            what = f"{node.gpus} GPUs for {node.ranks} ranks; start --nproc-per-node {node.gpus}"
        elif node.build:
            tool = "amd-smi, ROCR_VISIBLE_DEVICES" if node.build.startswith("ROCm") else "nvidia-smi, CUDA_VISIBLE_DEVICES"
            what = f"torch {node.torch} is built for {node.build} and finds no GPU; see the driver ({tool}) and what the job was granted"
        else:
            what = f"torch {node.torch} is built without CUDA or ROCm; install a build for the GPU"
        lines.append(f"  node {node.host}: {what}")
    return None, "\n".join([*lines, "to compute on the CPUs of all nodes, set run.device=cpu"])


def check_dtype(device: torch.device, dtype: str) -> None:
    """Raises ValueError where the device cannot compute in this dtype at its own speed."""
    if dtype == "bfloat16" and device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        name = torch.cuda.get_device_name(device)
        raise ValueError(
            f"{name} does not compute in bfloat16; use float16, whose loss scale keeps small gradients, or mixed_precision: null"
        )


def set_numerics(*, deterministic: bool, float32_matmul: str) -> None:
    """Precision of float32 products, and bit-reproducibility where it is asked for."""
    torch.set_float32_matmul_precision(float32_matmul)
    if deterministic:
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False


_SIOCGIFADDR = 0x8915
"""netdevice(7): the IPv4 address of an interface."""


def interface_to(host: str) -> str | None:
    """The network interface with the IPv4 address that this machine reaches a host from; None where it cannot be found."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # sends nothing: the kernel looks up the route
        address = socket.inet_aton(probe.getsockname()[0])
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # an interface without an IPv4 address
                if fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", os.fsencode(name)[:15]))[20:24] == address:
                    return name
    return None


def choose_gloo_interface(environment: Environment) -> None:
    """Has gloo listen on the interface that leads to MASTER_ADDR, unless the user chose one.

    By default gloo takes the address that this machine's own name resolves to, and that may be none, or one that other
    nodes cannot reach. The loopback interface is left to gloo: it leads to MASTER_ADDR where all ranks are on one machine.
    """
    if "GLOO_SOCKET_IFNAME" not in os.environ and environment.meeting_point is not None:
        name = interface_to(environment.meeting_point.rsplit(":", 1)[0])
        if name not in (None, "lo"):
            os.environ["GLOO_SOCKET_IFNAME"] = name


@contextlib.contextmanager
def process_group(environment: Environment, *, device: str, init_timeout: int) -> Iterator[tuple[DataParallel, Store]]:
    """The default process group for as long as the context lasts.

    device: what is wanted, as of `choose_device`.
    Yields the ranks that train together, all of them, and the store they met at. `init_timeout` (seconds) holds until
    `set_timeout`. After an error the group is left to the end of the process: a peer may be stuck in it.
    """
    timeout = timedelta(seconds=init_timeout)
    store: Store
    if environment.world_size == 1 and not environment.torchrun:
        store = HashStore()
    else:
        try:
            found, _, _ = next(iter(rendezvous("env://", timeout=timeout)))
        except (dist.DistError, OSError) as error:
            where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
            raise TrainingError(f"could not meet the other ranks at {where} within {init_timeout} s: {error}") from error
        # A restart meets at the same store; without a prefix of its own it reads the addresses of the ranks that died.
        found.set_timeout(timeout)
        try:
            generation = _agree_on_generation(found, rank=environment.rank, ranks=environment.world_size, seconds=init_timeout)
        except (dist.DistError, TimeoutError) as error:
            raise TrainingError(f"not all of {environment.world_size} ranks came within {init_timeout} s: {error}") from error
        store = PrefixStore(f"generation{generation}", found)
        choose_gloo_interface(environment)
    chosen = choose_device(environment, store, device)
    dist.init_process_group(
        BACKENDS[chosen.type],
        store=store,
        rank=environment.rank,
        world_size=environment.world_size,
        timeout=timeout,
        device_id=chosen if chosen.type == "cuda" else None,
    )
    group = dist.group.WORLD
    assert group is not None
    yield DataParallel(rank=environment.rank, size=environment.world_size, group=group, device=chosen), store
    # DistributedDataParallel stands in a reference cycle and holds the group: were it collected last, the group would end
    # under the interpreter's lock, which gloo's thread may be waiting for (seen to hang with torch 2.13)
    gc.collect()
    dist.destroy_process_group()


def _agree_on_generation(store: Store, *, rank: int, ranks: int, seconds: float) -> int:
    """A number that the ranks started together share, and no earlier ones at this store had.

    torchrun's restart count is not one: each node's agent counts for itself, and an agent that restarts because another
    node came back does not count (seen with torch 2.13: 1 on one node, 0 on the other). Rank 0 draws the number and tells it
    to each rank under a name that only this process of it has; what a dead process of that rank left is answered too, and
    nobody listens.
    """
    if rank != 0:
        mine = uuid.uuid4().hex
        store.set(f"hello/{rank}", mine)
        generation = int(store.get(f"generation/of/{mine}"))
        store.set(f"generation/{generation}/{rank}", "")
        return generation
    generation = int(store.add("generation/last", 1))
    waiting, answered = set(range(1, ranks)), dict.fromkeys(range(1, ranks), b"")
    deadline = time.monotonic() + seconds
    while waiting:
        for other in sorted(waiting):
            if store.check([f"generation/{generation}/{other}"]):
                waiting.discard(other)
            elif store.check([f"hello/{other}"]) and (name := store.get(f"hello/{other}")) != answered[other]:
                answered[other] = name
                store.set(f"generation/of/{name.decode()}", str(generation))
        if waiting and time.monotonic() > deadline:
            raise TimeoutError(f"missing are {', '.join(map(str, sorted(waiting)[:8]))}" + (" ..." if len(waiting) > 8 else ""))
        time.sleep(0.01 if waiting else 0)
    return generation


KEEPALIVE_SECONDS = 30
"""That the node of the store may leave what it was sent without an acknowledgement before its connections fail."""


def enable_keepalive(environment: Environment) -> None:
    """Makes the connections to the store that there are fail where its node was cut off.

    A timeout of the store is one of its answer to `get` and `wait`: a `check` or an `add` that finds the link dead waits
    for as long as the kernel sends again, some 15 minutes (seen with torch 2.13), and a rank that only wants to ask
    whether another one failed before it ends would hang there. tcp(7): TCP_USER_TIMEOUT.
    """
    port = int((environment.meeting_point or ":0").rsplit(":", 1)[1])
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        try:
            connection = socket.socket(fileno=descriptor)
        except OSError:  # a file
            continue
        try:
            if connection.family in (socket.AF_INET, socket.AF_INET6) and connection.getpeername()[1] == port:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, KEEPALIVE_SECONDS * 1000)
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_SECONDS // 3)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_SECONDS // 3)
        except OSError:  # it listens, or was closed meanwhile
            pass
        finally:
            connection.detach()


CHECKPOINT_GROUP = "checkpoint"
"""Description of the group of checkpoints, in which the others wait for the rank whose disk is slowest."""


def set_timeout(seconds: int) -> None:
    """From now on a collective of any group but that of checkpoints may take so long.

    Called when all groups are made, since those of a mesh have a default of their own, and once the
    slow first collectives are done.
    """
    from torch.distributed import distributed_c10d

    for group in list(distributed_c10d._world.pg_map):
        if group.group_desc != CHECKPOINT_GROUP:
            distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)
