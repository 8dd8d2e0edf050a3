"""`model.compile` in a run: logs how long blocks are compiled."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from launcher.libraries.private import compilation_observed
from launcher.reliability.progress import Progress
from launcher.strategies.compilation import eager_functions, graph_breaks, graphs

logger = logging.getLogger(__name__)


class Compilation:
    """Logs on rank 0 that blocks are compiled, how long that took, and where graphs are split.
    While they are compiled, no rank counts as hanging."""

    def __init__(self, progress: Progress, *, rank: int) -> None:
        self._progress, self._main = progress, rank == 0
        self._phase = ExitStack()
        self._began: float | None = None
        self._during = ""
        self._seconds, self._graphs, self._announced = 0.0, (0, 0), False
        self._logged: set[str] = set()
        """Reasons of graph breaks and of eager functions."""

    @contextmanager
    def observed(self) -> Iterator[None]:
        """A context in which everything that is compiled is counted and timed."""
        with compilation_observed(self._begin, self._end):
            yield

    def _begin(self, arguments: object = None) -> None:
        self._began, self._during = time.monotonic(), self._progress.phase
        self._phase.enter_context(self._progress.slow("compile"))
        if self._main and not self._announced:
            self._announced = True
            folder = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
            logger.info(f"compile: the first step compiles the blocks; they are kept in {folder}")

    def _end(self, arguments: object = None) -> None:
        self._phase.close()
        self._progress.phase = self._during  # the phase that compilation interrupted
        if self._began is not None:
            self._seconds += time.monotonic() - self._began
            self._began = None

    def report(self, step: int) -> None:
        """Logs what was compiled since the last call, and what was left eager. Most blocks are compiled
        in the first step. A micro-batch of another kind, such as the first one with a packed row, is
        compiled later."""
        if not self._main:
            return
        for reason in eager_functions():
            if reason not in self._logged:
                self._logged.add(reason)
                level = logging.WARNING if "recompile limit" in reason else logging.INFO
                logger.log(level, f"compile: a function is not compiled. {reason}")
        if not self._seconds:
            return
        seconds, self._seconds = self._seconds, 0.0
        before, self._graphs = self._graphs, graphs()
        new, cached = (now - earlier for now, earlier in zip(self._graphs, before, strict=True))
        found = f" ({cached} of them from the cache)" if cached else ""
        logger.info(f"compile: {new} graphs{found} in {seconds:.1f} s, until step {step}")
        for reason in graph_breaks():
            if reason not in self._logged:
                self._logged.add(reason)
                logger.info(f"compile: the graph of a block is split. {reason}")
