"""Beside torchrun on each node: brings the request to stop to the ranks, past torchrun.

    python -m launcher.slurm.agent [--interface NAME] torchrun ... --local-addr '{address}' --rdzv-conf 'is_host={is_host}' ...
    python -m launcher.slurm.agent --address [--interface NAME]     prints this node's address

Slurm signals only the first process of a task: this one. torchrun would die of SIGUSR1, and at SIGTERM it ends its ranks after
30 seconds and reports a failure; the ranks themselves save and end as they are asked to. So torchrun is started deaf to
SIGUSR1, and each of its ranks gets that signal once, as soon as it listens: one that still imports torch ignores it until then.

Standard library only.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

_REQUESTS = {signal.SIGUSR1, signal.SIGTERM}
_SIOCGIFADDR = 0x8915
"""netdevice(7): the IPv4 address of an interface."""


def address(interface: str | None, environment: Mapping[str, str] = os.environ) -> str:
    """Where other nodes reach this one: Slurm's name of it, or the address of an interface. Raises SystemExit where there is none."""
    if interface is None:
        return environment.get("SLURMD_NODENAME") or socket.gethostname()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        try:
            answer = fcntl.ioctl(
                any_socket, _SIOCGIFADDR, struct.pack("256s", os.fsencode(interface)[:15])
            )
        except OSError as error:
            known = ", ".join(name for _, name in socket.if_nameindex())
            raise SystemExit(
                f"slurm.interface: {interface} has no IPv4 address on {socket.gethostname()} ({error.strerror}); there are {known}"
            ) from None
    return socket.inet_ntoa(answer[20:24])


def listeners(parent: int, number: signal.Signals = signal.SIGUSR1) -> list[int]:
    """Children of a process that have a handler for this signal (proc_pid_status(5), SigCgt)."""
    found = []
    try:
        children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    except OSError:
        return []
    for child in map(int, children):
        try:
            status = dict(
                line.split(":\t", 1)
                for line in Path(f"/proc/{child}/status").read_text().splitlines()
                if ":\t" in line
            )
        except OSError:
            continue
        if int(status.get("SigCgt", "0"), 16) >> (number - 1) & 1:
            found.append(child)
    return found


def run(command: Sequence[str]) -> int:
    """Runs torchrun to its end; returns its exit status. To be called with `_REQUESTS` blocked, so that none is missed."""
    waited_for = _REQUESTS | {signal.SIGCHLD}
    signal.pthread_sigmask(signal.SIG_BLOCK, waited_for)
    for number in (
        _REQUESTS
    ):  # a signal that is ignored, as the shell before may have set it, would not be waited for
        signal.signal(number, lambda *_: None)

    def start() -> None:
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, waited_for)

    child = subprocess.Popen(command, preexec_fn=start)
    asked, told = False, set[int]()
    while child.poll() is None:
        came = signal.sigtimedwait(waited_for, 0.25 if asked else 5.0)
        if came is not None and came.si_signo in _REQUESTS and not asked:
            asked = True
            print(
                f"{signal.Signals(came.si_signo).name}: the ranks on {address(None)} are told to save and stop",
                flush=True,
            )
        if asked:
            for rank in listeners(child.pid):
                if rank not in told:
                    told.add(rank)
                    os.kill(rank, signal.SIGUSR1)
    return child.returncode if child.returncode >= 0 else 128 - child.returncode


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status of torchrun."""
    parser = argparse.ArgumentParser(prog="python -m launcher.slurm.agent")
    parser.add_argument("--interface")
    parser.add_argument("--address", action="store_true")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args(arguments)
    if options.address:
        print(address(options.interface))
        return 0
    own = {
        "{address}": address(options.interface),
        "is_host={is_host}": f"is_host={int(os.environ.get('SLURM_NODEID') == '0')}",
    }
    return run([own.get(word, word) for word in options.command])


if __name__ == "__main__":
    signal.pthread_sigmask(signal.SIG_BLOCK, _REQUESTS)
    sys.exit(main())
