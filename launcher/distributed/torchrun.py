"""torchrun, whose stores listen at one address: `python -m launcher.distributed.torchrun ARGUMENTS`.

The stores of torchrun's agents and of the ranks have no password. By default they listen on all
interfaces, so anybody who reaches this machine could end the run. On one machine they listen on
the loopback, on several at the address of `--local-addr`.
"""

from __future__ import annotations

import argparse
import errno
import ipaddress
import socket
from typing import Any

LOOPBACK = ("127.", "localhost", "::1")
"""Beginnings of the names and addresses that are the loopback on every machine."""
_WAITING = 2048
"""Connections that may wait to be accepted: many ranks connect at once."""


def listen(host: str, port: int) -> socket.socket | None:
    """A socket that listens at the address of a host only, at any free port for port 0; None if no
    interface of this machine has that address. Raises OSError if the port is taken."""
    for family, kind, protocol, _, address in socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM
    ):
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(_WAITING)
        except OSError as error:
            listener.close()
            if error.errno != errno.EADDRNOTAVAIL:
                raise
        else:
            return listener
    return None


def store_address(local_addr: str | None, *, one_machine: bool) -> str | None:
    """Where this machine's stores listen, for these options of torchrun; None: on all interfaces."""
    if one_machine:
        return "127.0.0.1"
    if local_addr is None:
        return None
    try:
        found = socket.getaddrinfo(local_addr, None, type=socket.SOCK_STREAM)[0][4][0]
    except OSError:
        return None
    # Many systems give their own name a loopback address, which other machines cannot reach
    return None if ipaddress.ip_address(str(found).partition("%")[0]).is_loopback else str(found)


def bind_stores(arguments: argparse.Namespace) -> None:
    """Binds the stores that torchrun's agent in this process will host.

    arguments: of torchrun, parsed. On one machine, the ranks get the address of the loopback.
    """
    one_machine = arguments.standalone or arguments.nnodes in ("1", "1:1")
    found = store_address(arguments.local_addr, one_machine=one_machine)
    if found is None:
        return
    address = found
    if one_machine:
        arguments.local_addr = address
    import torch.distributed as dist
    from torch.distributed.elastic.rendezvous import c10d_rendezvous_backend

    # If this process binds a second time, it must wrap torch's own store, not the wrapped one
    plain: Any = getattr(dist.TCPStore, "plain", dist.TCPStore)

    class BoundStore(plain):  # type: ignore[misc]
        def __init__(self, host: str = "", port: int = 0, *more: Any, **options: Any) -> None:
            host, port = options.pop("host_name", host), options.pop("port", port)
            if options.get("is_master") and (listener := listen(address, port)) is not None:
                host, port = address, listener.getsockname()[1]
                options["master_listen_fd"] = listener.detach()
            super().__init__(host, port, *more, **options)

    BoundStore.plain = plain
    # The names by which torch 2.11 to 2.13 make the two stores: of the agents and of the ranks
    modules: list[Any] = [dist, c10d_rendezvous_backend]
    for module in modules:
        module.TCPStore = BoundStore


def main() -> None:
    """Runs torchrun with the arguments of this process."""
    from torch.distributed import run as torchrun

    run: Any = torchrun  # without types
    arguments = run.parse_args(None)
    bind_stores(arguments)
    run.run(arguments)


if __name__ == "__main__":
    main()
