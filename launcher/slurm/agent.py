"""Runs torchrun on each node, and forwards Slurm's signals to its ranks.

    python -m launcher.slurm.agent [--interface NAME] torchrun ...

Slurm signals only the first process of a task, which is this one. torchrun would die of SIGUSR1; at
SIGTERM it ends its ranks after 30 seconds and reports a failure. The ranks themselves save and
stop. So torchrun ignores SIGUSR1, and each of its ranks gets that signal once, as soon as it has a
handler: a rank that still imports torch ignores it until then.

Words of the command that depend on the node are replaced: `{address}`, `is_host={is_host}`.

Standard library only.
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

from launcher.distributed.network import interface_address

_SIGNALS = (signal.SIGUSR1, signal.SIGTERM, signal.SIGCHLD)


def address(interface: str | None) -> str:
    """Where other nodes reach this one: its name in Slurm, or the address of an interface.

    Raises SystemExit if the interface has none.
    """
    if interface is None:
        return os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    try:
        return interface_address(interface)
    except OSError as error:
        known = ", ".join(name for _, name in socket.if_nameindex())
        raise SystemExit(
            f"slurm.interface: {interface} has no IPv4 address on {socket.gethostname()} "
            f"({error.strerror}); there are {known}"
        ) from None


def block_signals() -> None:
    """Makes signals wait for `next_signal`, so that none is missed."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    for number in _SIGNALS[:2]:  # the kernel discards signals that the shell before has ignored
        signal.signal(number, lambda *_: None)


def next_signal(seconds: float) -> str | None:
    """SIGUSR1, SIGTERM or SIGCHLD (the end of a child); None: none within so many seconds."""
    arrived = signal.sigtimedwait(_SIGNALS, seconds)
    return None if arrived is None else signal.Signals(arrived.si_signo).name


def in_child() -> None:
    """Resets the signals in a child, apart from SIGUSR1, which it must survive."""
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)


def listeners(parent: int) -> list[int]:
    """Children of a process that have a handler for SIGUSR1 (proc_pid_status(5), SigCgt)."""
    found = []
    with contextlib.suppress(OSError):
        for child in Path(f"/proc/{parent}/task/{parent}/children").read_text().split():
            with contextlib.suppress(OSError, StopIteration):
                lines = Path(f"/proc/{child}/status").read_text().splitlines()
                caught = next(line.split()[1] for line in lines if line.startswith("SigCgt:"))
                if int(caught, 16) >> (signal.SIGUSR1 - 1) & 1:
                    found.append(int(child))
    return found


def run(command: Sequence[str]) -> int:
    """Runs torchrun; returns its exit status."""
    block_signals()
    child = subprocess.Popen(command, preexec_fn=in_child)
    stopping, signaled = False, set[int]()
    while child.poll() is None:
        arrived = next_signal(0.25 if stopping else 5.0)
        if arrived in ("SIGUSR1", "SIGTERM") and not stopping:
            stopping = True
            print(f"{arrived}: the ranks on {address(None)} save and stop", flush=True)
        for rank in set(listeners(child.pid)) - signaled if stopping else ():
            signaled.add(rank)
            with contextlib.suppress(ProcessLookupError):
                os.kill(rank, signal.SIGUSR1)
    return child.returncode if child.returncode >= 0 else 128 - child.returncode


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status of torchrun."""
    parser = argparse.ArgumentParser(prog="python -m launcher.slurm.agent")
    parser.add_argument("--interface")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args(arguments)
    first = int(os.environ.get("SLURM_NODEID") == "0")
    own = {"{address}": address(options.interface), "is_host={is_host}": f"is_host={first}"}
    return run([own.get(word, word) for word in options.command])


if __name__ == "__main__":
    block_signals()
    sys.exit(main())
