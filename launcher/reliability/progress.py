"""The position of this rank, for failure reports and hang detection."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator


class Progress:
    """Written by the training loop, read by other threads. An update sets a few attributes."""

    def __init__(self) -> None:
        self.step = 0
        """The last finished step; after a resume, the step of the checkpoint."""
        self.phase = "start"
        """data, forward, backward, optimizer, evaluation, ..."""
        self.beats = 0
        """Heartbeats since the last finished step."""
        self.micro_batch = 0
        """The current micro-batch, from 1; 0: none of this step has begun."""
        self.slow_phase: str | None = "start"
        """A phase in which heartbeats are rare, such as loading, compilation or a checkpoint: the
        limit is run.init_timeout, not run.hang_timeout."""
        self.started = False
        """The first step of this start is done."""
        self.step_seconds: float | None = None
        """Seconds from the end of the step before last to the end of the last step; None if it is
        not known yet."""
        self._step_began = time.monotonic()
        self.preparing = True
        """No step has begun, so a requested stop has nothing to save."""

    def heartbeat(self, phase: str) -> None:
        """Must be called when a phase begins."""
        self.phase = phase
        self.beats += 1
        self.micro_batch += phase == "forward"

    def step_done(self, step: int) -> None:
        """Must be called when a step has ended."""
        self.step, self.beats, self.micro_batch, self.slow_phase = step, 0, 0, None
        now = time.monotonic()
        # The first step of a start also loads kernels and compiles
        self.step_seconds = now - self._step_began if self.started else None
        self.started, self._step_began = True, now

    def slow_until_step(self, phase: str) -> None:
        """A slow phase begins: its longer time limit applies until the next step is done."""
        self.slow_phase = phase
        self.heartbeat(phase)

    @contextlib.contextmanager
    def slow(self, phase: str) -> Iterator[None]:
        """A context for long work without heartbeats, with the time limit of a slow phase."""
        before, self.slow_phase = self.slow_phase, phase
        self.heartbeat(phase)
        try:
            yield
        finally:
            self.slow_phase = before
            self.heartbeat(f"after {phase}")
