"""Python's garbage collection, at the same steps on all ranks."""

from __future__ import annotations

import gc

EVERY_STEPS = 50
"""Steps between two collections of the objects that survived a step."""


class GarbageCollection:
    """A context in which garbage is collected between steps only.

    By default Python collects when enough objects were made: in the middle of a step, and on each
    rank in another step, so that all ranks wait for the rank that collects. Objects that exist
    after the first step live as long as the run, and are not searched again.
    """

    def __init__(self) -> None:
        self._enabled, self._frozen = gc.isenabled(), False

    def __enter__(self) -> GarbageCollection:
        gc.disable()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._frozen:
            gc.unfreeze()
        if self._enabled:
            gc.enable()

    def step_done(self, step: int, *, everything: bool) -> None:
        """Collects the garbage of a step: its reference cycles may hold activations. With
        `everything`, after an evaluation or a checkpoint, collects the objects that survived
        earlier steps, too."""
        if everything or not self._frozen:
            gc.collect()
        else:
            gc.collect(0 if step % EVERY_STEPS else 1)
        if not self._frozen:
            gc.freeze()
            self._frozen = True
