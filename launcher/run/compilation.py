"""`model.compile` in a run: logs how long blocks are compiled."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, is_dataclass
from pathlib import Path

import torch

from launcher.errors import first_line
from launcher.files import replace_file
from launcher.libraries.private import compilation_observed
from launcher.recipe.schema import Recipe
from launcher.reliability.progress import Progress
from launcher.strategies.compilation import eager_functions, graph_breaks, graphs

logger = logging.getLogger(__name__)


def shared_file(cache: Path, recipe: Recipe, *, device: torch.device) -> Path:
    """The file in which starts of this recipe on several nodes keep what they compiled: each node has a
    cache of its own, which is empty on a new node. cache: `data.cache`. What does not fit is not used:
    torch looks each graph up by its code."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    parts = (recipe.model, recipe.strategy, recipe.batch, recipe.data.row_length)
    more = (recipe.activation_checkpointing, recipe.lora, torch.__version__, name)
    sections = [asdict(part) if is_dataclass(part) else part for part in (*parts, *more)]
    key = json.dumps(sections, sort_keys=True, default=str)
    return cache / "compiled" / f"{hashlib.sha256(key.encode()).hexdigest()[:16]}.bin"


class Compilation:
    """Logs on rank 0 that blocks are compiled, how long that took, and where graphs are split.
    While they are compiled, no rank counts as hanging."""

    def __init__(self, progress: Progress, *, rank: int, shared: Path | None = None) -> None:
        """shared: the file of `shared_file`; None: the ranks share torch's cache."""
        self._shared = shared
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
        if self._shared is not None:
            self._load(self._shared)
        with compilation_observed(self._begin, self._end):
            yield

    def _load(self, file: Path) -> None:
        """Fills this node's cache with what an earlier start compiled."""
        try:
            torch.compiler.load_cache_artifacts(file.read_bytes())
        except FileNotFoundError:
            return
        except Exception as error:  # a damaged file: unpickling raises anything
            if self._main:
                logger.warning(f"compile: {file} cannot be used: {first_line(error)}")

    def _save(self, file: Path) -> None:
        """Keeps what this start has compiled or read for the nodes of later starts."""
        made = torch.compiler.save_cache_artifacts()
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            if made is not None:
                with replace_file(file) as scratch:
                    scratch.write_bytes(made[0])
        except OSError as error:
            logger.warning(f"compile: {file} cannot be written: {error.strerror}")

    def _begin(self, arguments: object = None) -> None:
        self._began, self._during = time.monotonic(), self._progress.phase
        self._phase.enter_context(self._progress.slow("compile"))
        if self._main and not self._announced:
            self._announced = True
            folder = self._shared or os.environ.get("TORCHINDUCTOR_CACHE_DIR")
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
        if self._shared is not None and new > cached:
            self._save(self._shared)
        found = f" ({cached} of them from the cache)" if cached else ""
        logger.info(f"compile: {new} graphs{found} in {seconds:.1f} s, until step {step}")
        for reason in graph_breaks():
            if reason not in self._logged:
                self._logged.add(reason)
                logger.info(f"compile: the graph of a block is split. {reason}")
