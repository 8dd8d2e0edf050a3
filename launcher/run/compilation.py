"""`model.compile` in a run: replaces `auto`, and logs how long blocks are compiled."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace

from launcher.checkpoint.resume import Start, recorded_recipe
from launcher.distributed.process_group import from_rank_0, gather
from launcher.distributed.rank_layout import RankLayout
from launcher.libraries.private import compilation_observed
from launcher.recipe.schema import Recipe
from launcher.reliability.progress import Progress
from launcher.reliability.run_directory import RunFolder
from launcher.strategies.compilation import eager_functions, graph_breaks, graphs, why_eager

logger = logging.getLogger(__name__)

COST = "each block then launches some 60 more kernels in a micro-batch"
"""Measured on null GPUs: 57 for a Llama block, 76 with full activation checkpointing."""


def resolve_compile(recipe: Recipe, *, start: Start, ranks: RankLayout, run: RunFolder) -> Recipe:
    """The recipe with true or false in place of `model.compile: auto`; every rank must call this.

    A run that resumes keeps the value that its checkpoint was trained with, if this machine can
    compile: compiled blocks round differently.
    """
    if recipe.model.compile != "auto":
        return recipe
    reasons = gather(why_eager(ranks.device, check_triton=True), ranks.group)
    why = next((reason for reason in reasons if reason is not None), None)
    recorded = recorded_recipe(run, start) if ranks.rank == 0 else {}
    before = from_rank_0(recorded.get("model", {}).get("compile"), ranks.group)
    on = why is None and before is not False
    text = f"auto: model.compile={str(on).lower()}"
    if why is not None:
        text += f": {why}" + (f"; {COST}" if ranks.device.type == "cuda" else "")
    elif not on:
        text += ", as in the checkpoint; model.compile=true compiles from here on"
    logger.info(text)
    if before is True and not on:
        logger.warning("the checkpoint is of compiled blocks: losses will differ by rounding")
    return replace(recipe, model=replace(recipe.model, compile=on))


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
