"""Python's garbage collection, at the same steps on all ranks."""

from __future__ import annotations

import gc

EVERY_STEPS = 50
"""Steps between collections of what survived a step."""


class GarbageCollection:
    """A context in which garbage is collected between steps only.

    Python collects when enough objects were made, in the middle of a step and in another one on
    each rank, and all ranks wait for the one that does. What exists after the first step lives as
    long as the run: it is not searched again.
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
        """Collects the garbage of a step, whose cycles may hold activations; with `everything`,
        after an evaluation or a checkpoint, also what survived earlier steps."""
        if everything or not self._frozen:
            gc.collect()
        else:
            gc.collect(0 if step % EVERY_STEPS else 1)
        if not self._frozen:
            gc.freeze()
            self._frozen = True
