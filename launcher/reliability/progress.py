"""How far this rank is, for the report of a failure and for the watch that looks for hangs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


class Progress:
    """Written by the training loop, read by other threads. Each update is a few attributes."""

    def __init__(self) -> None:
        self.step = 0
        """The last finished step; after a resume, that of the checkpoint."""
        self.phase = "start"
        """What runs: data, forward, backward, optimizer, evaluation, ..."""
        self.beats = 0
        """Heartbeats since the last finished step."""
        self.micro_batch = 0
        """The current micro-batch, from 1; 0: none of this step has begun."""
        self.slow_phase: str | None = "start"
        """A phase without a time limit. Until the first step is done (compilation, tokenization,
        loading), and from a rewind until the next step is done."""
        self.preparing = True
        """No step has begun: a request to stop need not wait, since there is nothing to save."""

    def beat(self, phase: str) -> None:
        """A heartbeat: a phase begins."""
        self.phase = phase
        self.beats += 1
        self.micro_batch += phase == "forward"

    def step_done(self, step: int) -> None:
        """A step was trained."""
        self.step, self.beats, self.micro_batch, self.slow_phase = step, 0, 0, None

    def slow_until_step(self, what: str) -> None:
        """Until the next step is done, nothing counts as a hang."""
        self.slow_phase = what
        self.beat(what)

    @contextlib.contextmanager
    def slow(self, what: str) -> Iterator[None]:
        """For work without heartbeats that may take long: a checkpoint, an export."""
        before, self.slow_phase = self.slow_phase, what
        self.beat(what)
        try:
            yield
        finally:
            self.slow_phase = before
            self.beat(f"after {what}")
