"""The stores of torchrun listen at one address."""

import argparse
import json
import socket
import subprocess
import sys

import pytest
import torch

from launcher.distributed import torchrun
from launcher.distributed.torchrun import bind_stores, listen, store_address
from tests import REPOSITORY
from tests.distributed.launching import free_port

RANK = """
import json, os
from pathlib import Path

agent, found = os.getppid(), []
inodes = {os.readlink(f) for f in Path(f"/proc/{agent}/fd").iterdir()}
for table in ("tcp", "tcp6"):
    for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:  # it listens
            found.append(fields[1].split(":")[0])
print(json.dumps([os.environ["MASTER_ADDR"], found]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("slurm", [False, True])
def test_on_one_machine_nobody_else_reaches_the_stores(tmp_path, slurm):
    """The agent hosts two: its own, and that of the ranks."""
    rank = tmp_path / "rank.py"
    rank.write_text(RANK)
    module = "launcher.distributed.torchrun"
    meeting = ["--standalone"]
    if slurm:  # its agent gives the name of the node
        endpoint = f"{socket.gethostname()}:{free_port()}"
        meeting = ["--nnodes=1", "--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}"]
        meeting += ["--rdzv-conf=is_host=1", f"--local-addr={socket.gethostname()}"]
    command = [sys.executable, "-m", module, *meeting, "--nproc-per-node=1", str(rank)]
    done = subprocess.run(
        command, cwd=REPOSITORY, capture_output=True, text=True, timeout=300, check=True
    )
    address, listening = json.loads(done.stdout.splitlines()[-1])
    assert address == "127.0.0.1"
    assert listening == ["0100007F"] * 2, done.stderr  # 127.0.0.1


@pytest.mark.parametrize(
    ("local_addr", "resolved", "expected"),
    [
        ("node1", "10.0.0.1", "10.0.0.1"),
        ("node1", "127.0.1.1", None),  # other machines could not reach it
        ("node1", "::1", None),
        ("fe80::1", "fe80::1%eth0", "fe80::1%eth0"),
        ("unknown", None, None),
        (None, None, None),
    ],
)
def test_on_several_machines_the_stores_listen_at_the_own_address(
    monkeypatch, local_addr, resolved, expected
):
    def look_up(*arguments, **options):
        if resolved is None:
            raise socket.gaierror
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (resolved, 0))]

    monkeypatch.setattr(torchrun.socket, "getaddrinfo", look_up)
    assert store_address(local_addr, one_machine=False) == expected


def test_a_socket_listens_only_where_it_should():
    port = free_port()
    with listen("127.0.0.1", port) as listener:
        assert listener.getsockname() == ("127.0.0.1", port)
        with pytest.raises(OSError, match="in use"):
            listen("127.0.0.1", port)
        with listen("127.0.0.2", port) as other, socket.create_connection(("127.0.0.2", port)):
            assert other.getsockname() == ("127.0.0.2", port)
    assert listen("192.0.2.1", port) is None  # an address for documentation, of no machine


def test_other_options_leave_torch_as_it_is():
    from torch.distributed import TCPStore

    bind_stores(argparse.Namespace(local_addr=None, standalone=False, nnodes="2"))
    assert torchrun_store() is TCPStore


def test_stores_are_bound_again_by_a_second_run(monkeypatch):
    """Of a sweep, in the same process."""
    from torch.distributed.elastic.rendezvous import c10d_rendezvous_backend

    for module in (torch.distributed, c10d_rendezvous_backend):
        monkeypatch.setattr(module, "TCPStore", module.TCPStore)  # restored at the end
    for _ in range(2):
        bind_stores(argparse.Namespace(local_addr=None, standalone=True, nnodes="1"))
    store = torchrun_store()("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert store.port > 0


def torchrun_store():
    import torch.distributed

    return torch.distributed.TCPStore
