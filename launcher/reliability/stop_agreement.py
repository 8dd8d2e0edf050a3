"""The micro-batch before which all ranks stop.

A step may take half an hour, and a scheduler that stops a run waits for seconds only. So a step ends
between two micro-batches. All ranks must end the step before the same micro-batch, because forward
and backward passes have collectives. The ranks agree through the store, without a collective: the
watchdog of each rank publishes how many micro-batches its rank has begun. From then on the rank
begins no further micro-batch before the largest of these numbers is known.
"""

from __future__ import annotations

import threading

from torch.distributed import Store

# Keys of the store
_WANTED = "stop/wanted"
_AGREED = "stop/agreed"
_BEGUN = "stop/begun_{}".format  # by rank


class StopAgreement:
    """The agreement of one rank. The training loop calls `reached`, the watchdog calls `look`."""

    def __init__(self, *, rank: int, ranks: int) -> None:
        self._rank, self._ranks = rank, ranks
        self._begun = 0
        """Micro-batches that this rank has begun since its start."""
        self._holds = self._published = False
        """Whether this rank begins no other micro-batch, and whether the store has its number."""
        self._agreed: int | None = None
        """Micro-batches that all ranks begin."""
        self._changed = threading.Condition()
        self.stopped = False
        """Whether the training loop has stopped before a micro-batch."""

    @property
    def under_way(self) -> bool:
        """Whether this rank waits for the agreement before its next micro-batch."""
        return self._holds and self._agreed is None

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
        if not self._published:
            if wanted:
                store.set(_WANTED, "")
            elif not self._holds and not store.check([_WANTED]):
                return
            with self._changed:
                self._holds, begun = True, self._begun
            store.set(_BEGUN(self._rank), str(begun))
            self._published = True
        everyone = [_BEGUN(rank) for rank in range(self._ranks)]
        if self._rank == 0 and store.check(everyone):  # one request for all keys
            store.set(_AGREED, str(max(int(store.get(key)) for key in everyone)))
        if store.check([_AGREED]):
            with self._changed:
                self._agreed = int(store.get(_AGREED))
                self._changed.notify_all()
