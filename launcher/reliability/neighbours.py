"""The processes of the other ranks on this node, whose end the kernel shows at once."""

from __future__ import annotations

import os

from torch._C._distributed_c10d import Store

from launcher.distributed.environment import Environment
from launcher.reliability.lock import process_start, this_machine

_PROCESS = "failed/process_{}".format


class Neighbours:
    """The other ranks on this node. torchrun numbers the ranks of a node consecutively."""

    def __init__(self, environment: Environment) -> None:
        self._rank = environment.rank
        first = max(0, environment.rank - environment.local_rank)
        last = min(environment.world_size, first + environment.local_world_size)
        self._others = [rank for rank in range(first, last) if rank != self._rank]
        self._processes: dict[int, tuple[int, int]] = {}
        """Process id and start by rank."""
        self.known = False
        """Whether `find` has succeeded."""

    def find(self, store: Store) -> None:
        """Publishes this rank's process, and reads those of the others once all are published."""
        machine, own = this_machine(), os.getpid()
        store.set(_PROCESS(self._rank), f"{machine} {own} {process_start(own)}")
        if store.check([_PROCESS(rank) for rank in self._others]):
            for rank in self._others:
                where, pid, start = store.get(_PROCESS(rank)).decode().split()
                if where == machine:
                    self._processes[rank] = int(pid), int(start)
            self.known = True

    def lost(self) -> list[int]:
        """Ranks whose processes have ended, for any reason. Does not use the store."""
        processes = self._processes.items()
        ended = [rank for rank, (pid, start) in processes if process_start(pid) != start]
        # Without free file descriptors not even this process can be read: then nothing is known
        return ended if ended and process_start(os.getpid()) is not None else []
