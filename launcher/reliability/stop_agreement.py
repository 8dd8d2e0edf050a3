"""The micro-batch before which all ranks stop.

A step may take half an hour, and what asks a run to stop waits for seconds. So a step ends between
two micro-batches. All ranks must end it before the same one, because the passes of a micro-batch
have collectives. They agree through the store, without a collective and without a wait in a
micro-batch: the watchdog of each rank publishes how many micro-batches its rank has begun, and from
then on its rank begins no other one before the largest of these numbers is known.
"""

from __future__ import annotations

import threading
from typing import Any

Store = Any
"""A store of torch.distributed."""
# Keys of the store
_WANTED, _AGREED, _BEGUN = "stop/wanted", "stop/agreed", "stop/begun_{}".format


class StopAgreement:
    """The agreement of one rank. The training loop calls `reached`, the watchdog calls `look`."""

    def __init__(self, *, rank: int, ranks: int) -> None:
        self._rank, self._ranks = rank, ranks
        self._begun = 0
        """Micro-batches that this rank has begun since its start."""
        self._published = False
        self._agreed: int | None = None
        """Micro-batches that all ranks begin."""
        self._changed = threading.Condition()
        self.stopped = False
        """Whether the training loop has stopped before a micro-batch."""

    @property
    def under_way(self) -> bool:
        """Whether this rank waits for the agreement before its next micro-batch."""
        return self._published and self._agreed is None

    def reached(self) -> bool:
        """Must be called before each micro-batch. Returns whether the ranks stop before it; waits
        while they agree on that."""
        with self._changed:
            while self.under_way:
                self._changed.wait()
            self.stopped = self._agreed is not None and self._begun >= self._agreed
            self._begun += not self.stopped
            return self.stopped

    def look(self, store: Store, *, wanted: bool) -> None:
        """Begins the agreement if this rank wants to stop, and takes part in one that has begun. Must
        be called again and again, by one thread. Raises RuntimeError if the store fails."""
        if self._agreed is not None:
            return
        if wanted and not self._published:
            store.set(_WANTED, "")
        if not self._published and not store.check([_WANTED]):
            return
        with self._changed:
            self._published, begun = True, self._begun
        store.set(_BEGUN(self._rank), str(begun))
        everyone = [_BEGUN(rank) for rank in range(self._ranks)]
        if self._rank == 0 and store.check(everyone):
            store.set(_AGREED, str(max(int(store.get(key)) for key in everyone)))
        if store.check([_AGREED]):
            with self._changed:
                self._agreed = int(store.get(_AGREED))
                self._changed.notify_all()
