"""Runs torchrun on each node, and forwards Slurm's signals to its ranks.

    python -m launcher.slurm.agent [--interface NAME] torchrun ...

Slurm signals only the first process of a task, which is this process. torchrun would die of SIGUSR1,
and after SIGTERM it gives its ranks 30 seconds. So torchrun ignores SIGUSR1, and each of its ranks
gets it once, as soon as it has a handler. In the command, the words `{address}` and
`is_host={is_host}` are replaced. Standard library only.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from launcher.distributed import processes
from launcher.distributed.network import interface_address, node_name

_REQUESTS = (signal.SIGUSR1, signal.SIGTERM, signal.SIGALRM)
_SIGNALS = (*_REQUESTS, signal.SIGCHLD)


def address(interface: str | None) -> str:
    """Where other nodes reach this node: its name in Slurm, or the address of an interface."""
    if interface is None:
        return node_name()
    try:
        return interface_address(interface)
    except OSError as error:
        known = ", ".join(name for _, name in socket.if_nameindex())
        raise SystemExit(
            f"slurm.interface: {interface} has no IPv4 address on {socket.gethostname()} "
            f"({error.strerror}); there are {known}"
        ) from None


def block_signals() -> None:
    """Blocks the signals until `next_signal` accepts them, so that none is missed."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    for number in _REQUESTS:  # the kernel discards signals that the shell has set to be ignored
        signal.signal(number, lambda *_: None)


def next_signal(seconds: float) -> signal.Signals | None:
    """One of the signals, SIGCHLD at the end of a child; None if none arrives in time."""
    return processes.next_signal(_SIGNALS, seconds)


def in_child() -> None:
    """Resets the signals in a child, which must survive SIGUSR1."""
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)


def listeners(parent: int) -> list[int]:
    """Children of a process that have a handler for SIGUSR1 (proc_pid_status(5), SigCgt)."""
    ranks = []
    with contextlib.suppress(OSError):
        for child in Path(f"/proc/{parent}/task/{parent}/children").read_text().split():
            with contextlib.suppress(OSError, IndexError):
                caught = Path(f"/proc/{child}/status").read_text().split("SigCgt:")[1].split()[0]
                if int(caught, 16) >> (signal.SIGUSR1 - 1) & 1:
                    ranks.append(int(child))
    return ranks


def run(command: Sequence[str]) -> int:
    """Runs torchrun; returns its exit status."""
    child = subprocess.Popen(command, preexec_fn=in_child)
    stopping, signaled = False, set[int]()
    while child.poll() is None:
        arrived = next_signal(0.25 if stopping else 5.0)
        if arrived is not None and arrived in _REQUESTS and not stopping:
            stopping = True
            with contextlib.suppress(OSError):  # a full disk must not lose the request
                print(f"{arrived.name}: the ranks on {address(None)} save and stop", flush=True)
        for rank in set(listeners(child.pid)) - signaled if stopping else ():
            signaled.add(rank)
            with contextlib.suppress(ProcessLookupError):
                os.kill(rank, signal.SIGUSR1)
    return child.returncode if child.returncode >= 0 else 128 - child.returncode


def main(arguments: Sequence[str] | None = None) -> int:
    """Reads the command line and runs torchrun; returns its exit status."""
    block_signals()
    parser = argparse.ArgumentParser(prog="python -m launcher.slurm.agent")
    parser.add_argument("--interface")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args(arguments)
    first = int(os.environ.get("SLURM_NODEID") == "0")
    own = {"{address}": address(options.interface), "is_host={is_host}": f"is_host={first}"}
    return run([own.get(word, word) for word in options.command])


if __name__ == "__main__":
    sys.exit(main())
