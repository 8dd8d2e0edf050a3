"""The processes of the other ranks on this node: the kernel knows at once when one is gone."""

from __future__ import annotations

import os

from torch._C._distributed_c10d import Store

from launcher.distributed.environment import Environment
from launcher.reliability.lock import process_start, this_machine


class Neighbours:
    """The other ranks on this node. torchrun numbers the ranks of a node in a row."""

    def __init__(self, environment: Environment) -> None:
        self._rank = environment.rank
        first = environment.rank - environment.local_rank
        last = min(environment.world_size, first + environment.local_world_size)
        self._ranks = range(max(0, first), last)
        self._processes: dict[int, tuple[int, int]] | None = None
        """Process id and start by rank; None: not known yet."""

    @property
    def known(self) -> bool:
        """Whether `find` has succeeded."""
        return self._processes is not None

    def find(self, store: Store) -> None:
        """Publishes this rank's process; reads those of the others once all are there."""
        machine, own = this_machine(), os.getpid()
        store.set(_key(self._rank), f"{machine} {own} {process_start(own)}")
        others = [rank for rank in self._ranks if rank != self._rank]
        if store.check([_key(rank) for rank in others]):
            told = {rank: store.get(_key(rank)).decode().split() for rank in others}
            self._processes = {
                rank: (int(pid), int(start))
                for rank, (where, pid, start) in told.items()
                if where == machine
            }

    def lost(self) -> list[int]:
        """Ranks whose processes are gone, for whatever reason. Asks only the kernel."""
        processes = (self._processes or {}).items()
        gone = [rank for rank, (pid, start) in processes if process_start(pid) != start]
        # If even this process cannot be read (no file descriptor is left), nothing is known
        return gone if gone and process_start(os.getpid()) is not None else []


def _key(rank: int) -> str:
    return f"failed/process_{rank}"
