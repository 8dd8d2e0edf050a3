"""Names of nodes, network interfaces, and limits of connections. Standard library only."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct

_SIOCGIFADDR = 0x8915  # netdevice(7): the IPv4 address of an interface


def node_name() -> str:
    """Slurm's name of this node, as `--exclude` takes it; without Slurm the host name."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def interface_address(name: str) -> str:
    """The IPv4 address of an interface. Raises OSError if it has none."""
    request = struct.pack("256s", os.fsencode(name)[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        return socket.inet_ntoa(fcntl.ioctl(any_socket, _SIOCGIFADDR, request)[20:24])


def interface_to(host: str) -> str | None:
    """The network interface with the IPv4 address that leads to a host; None if unknown."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # sends nothing: the kernel looks up the route
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # an interface without an IPv4 address
                if interface_address(name) == probe.getsockname()[0]:
                    return name
    return None


KEEPALIVE_SECONDS = 30
"""How long the store's node may leave data unacknowledged before connections to it fail."""


def limit_store_calls(meeting_point: str, *, seconds: float) -> None:
    """Makes calls over existing connections to the store at HOST:PORT fail instead of blocking.

    The store's timeout applies to `get` and `wait` only (torch 2.13). Without these limits, `check`
    and `add` block for about 15 minutes on a dead connection, until the kernel closes it (tcp(7):
    TCP_USER_TIMEOUT), and indefinitely while the process that hosts the store is stopped
    (socket(7): SO_RCVTIMEO). A connection on which a call has failed after `seconds` must not be
    used again.
    """
    tcp = socket.IPPROTO_TCP
    options: tuple[tuple[int, int, int | bytes], ...] = (
        (tcp, socket.TCP_USER_TIMEOUT, KEEPALIVE_SECONDS * 1000),
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
        (tcp, socket.TCP_KEEPIDLE, KEEPALIVE_SECONDS // 3),
        (tcp, socket.TCP_KEEPINTVL, KEEPALIVE_SECONDS // 3),
        (socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", int(seconds), 0)),
    )
    port = int(meeting_point.rsplit(":", 1)[1])
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        try:
            connection = socket.socket(fileno=descriptor)
        except OSError:  # not a socket
            continue
        with contextlib.suppress(OSError):  # not connected, or closed meanwhile
            internet = connection.family in (socket.AF_INET, socket.AF_INET6)
            if internet and connection.getpeername()[1] == port:
                for option in options:
                    connection.setsockopt(*option)
        connection.detach()
