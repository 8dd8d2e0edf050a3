"""Saves and restores the checkpoints of a run."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import yaml
from torch import nn

from launcher.checkpoint import files
from launcher.checkpoint.reader import (
    find_checkpoint,
    load,
    read_local,
    read_state,
    verify_together,
)
from launcher.checkpoint.resume import Resumed, check_changes, check_data, check_stream
from launcher.checkpoint.state import (
    model_and_optimizer,
    rank_state,
    restore_rank_state,
    total_bytes,
)
from launcher.checkpoint.writer import Checkpointer, Save, checkpoint_group
from launcher.data.batching import Position
from launcher.distributed.process_group import DataParallel
from launcher.errors import RecipeError, TrainingError
from launcher.metrics.console import bytes_as_text
from launcher.models.shards import derived_seed
from launcher.recipe import schema
from launcher.training.optimizer import LossScale

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Saved:
    """The objects whose state is saved."""

    module: nn.Module
    """Wrapped, with initialized weights."""
    optimizer: torch.optim.AdamW
    loss_scale: LossScale


@dataclass(frozen=True)
class Identity:
    """What a resume must match."""

    recipe_yaml: str
    seed: int
    data: Mapping[str, Any]
    """Fingerprint of the training data."""
    stream_order: str | None = None
    """Digest of the order of a stream's samples; None without data.streaming."""


class CheckpointManager:
    """Saves and restores one run. Every rank has a manager and makes the same calls."""

    def __init__(
        self,
        folder: Path,
        settings: schema.Checkpoint,
        objects: Saved,
        identity: Identity,
        *,
        ranks: DataParallel,
        before_write: Callable[[], None],
        saved: Callable[[int, int, float], None],
    ) -> None:
        """folder: RUN_DIR/checkpoints. before_write: raises if this process must not write any
        more. saved: called with step, bytes and seconds of each checkpoint."""
        self._folder, self._settings = folder, settings
        self._objects, self._identity, self._ranks = objects, identity, ranks
        self._group = checkpoint_group(ranks)
        self._tensors = model_and_optimizer(objects.module, objects.optimizer)
        self._saved = saved
        self._best: dict[str, Any] = {}
        self.trouble: str | None = None
        """Why the last save failed, or None."""
        self.saved_step: int | None = None
        """Step of the newest checkpoint."""
        if ranks.rank == 0:
            files.check_space(folder, total_bytes(self._tensors))
        self._checkpointer = Checkpointer(
            folder,
            settings,
            group=self._group,
            device=ranks.device,
            optimizer=objects.optimizer,
            before_write=before_write,
        )

    def restore(self, resume: str, *, at_most: int | None = None) -> Resumed | None:
        """Loads the newest valid checkpoint (`auto`) or the one at a path. None: `never`, or there
        is none.

        at_most: only checkpoints up to this step. Raises RecipeError if a key of the recipe has
        changed that must not change, or if the checkpoint is of another model; NoneLeftError if all
        are damaged.
        """
        path = self._find(resume, at_most=at_most)
        if path is None:
            return None
        state, identity = read_state(path), self._identity
        before, now = yaml.safe_load(state["recipe"]), yaml.safe_load(identity.recipe_yaml)
        allow = self._settings.allow_changes
        changes = check_changes(before, now, allow=allow, checkpoint=path)
        changes += check_data(state["data"], identity.data, allow=allow, checkpoint=path)
        check_stream(state["stream"], identity.stream_order, allow=allow, checkpoint=path)
        load(path, self._tensors, group=self._group)
        self._objects.loss_scale.restore(state["loss_scale"])
        self._best = state["best"]
        self._checkpointer.best_step = self._best.get("step")
        if state["ranks"] == self._ranks.size:
            local = read_local(path, self._ranks.rank)
            restore_rank_state(local, self._objects.module, self._ranks.device)
        else:  # other ranks' random states do not fit: draw other numbers
            name = f"{state['step']}/{self._ranks.rank}"
            torch.manual_seed(derived_seed(identity.seed, name))
        self.saved_step = state["step"]
        # Damaged checkpoints, and those of steps that will be repeated
        if self._ranks.rank == 0:
            files.discard_newer(self._folder, state["step"])
        dist.barrier(group=self._group)
        return Resumed(
            path,
            Position(state["step"], state["skipped_batches"], state["stream"]),
            state["ranks"],
            state["observed"],
            changes,
            evaluation_due=state["evaluation_due"],
            origin=None if resume == "auto" else path.resolve(),
        )

    def _find(self, resume: str, *, at_most: int | None) -> Path | None:
        if resume == "never":
            return None
        if resume == "auto":
            return find_checkpoint(self._folder, group=self._group, at_most=at_most)
        path = Path(resume)
        problem = verify_together(path, group=self._group)
        if problem is not None:
            raise RecipeError(f"checkpoint.resume: {path} cannot be resumed from: {problem}")
        return path

    def due(self, step: int) -> bool:
        every_steps = self._settings.every_steps
        return every_steps is not None and step % every_steps == 0

    def save(
        self,
        position: Position,
        *,
        observed: Mapping[str, Any],
        eval_loss: float | None,
        evaluated: bool = True,
    ) -> None:
        """Starts a save. `report` logs the outcome.

        eval_loss: of this step, if it was evaluated. evaluated: False if an evaluation was due and
        interrupted. Raises TrainingError after too many failures in a row.
        """
        step = position.step
        best = self._best.get("eval_loss", float("inf"))
        if eval_loss is not None and self._settings.keep_best is not None and eval_loss < best:
            self._best = {"step": step, "eval_loss": eval_loss}
            self._checkpointer.best_step = step
        state = {
            "step": step,
            "skipped_batches": position.skipped_batches,
            "ranks": self._ranks.size,
            "recipe": self._identity.recipe_yaml,
            "data": self._identity.data,
            "loss_scale": self._objects.loss_scale.state(),
            "observed": dict(observed),
            "stream": position.stream,
            "evaluation_due": not evaluated,
            "best": self._best,
        }
        local = rank_state(self._objects.module, self._ranks.device)
        self._checkpointer.save(step, self._tensors, state=state, local=local)
        self.report()
        self._check_failures()

    def report(self) -> None:
        """Logs the outcome of saves that have ended since the last call. Does not wait."""
        self._log(self._checkpointer.poll())

    def finish(self) -> None:
        """Waits for a save in progress. Raises TrainingError after too many failures in a row."""
        self._log(self._checkpointer.finish())
        self._check_failures()

    def _log(self, saves: list[Save]) -> None:
        for save in saves:
            if save.error is None:
                self.saved_step, self.trouble = save.step, None
                logger.info(
                    f"checkpoint of step {save.step}: {bytes_as_text(save.bytes)} in "
                    f"{save.seconds:.1f} s, training waited {save.blocked:.2f} s"
                )
                self._saved(save.step, save.bytes, save.seconds)
            else:
                self.trouble = f"checkpoint of step {save.step} failed: {save.error}"
                logger.warning(f"{self.trouble}; older ones are kept, training continues")
            if save.note is not None:
                logger.info(f"note: {save.note}")

    def _check_failures(self) -> None:
        failures, limit = self._checkpointer.failures, self._settings.max_failures
        if failures >= limit:
            raise TrainingError(
                f"{failures} checkpoints in a row could not be written "
                f"(checkpoint.max_failures={limit}); the last: {self.trouble}",
                reason="checkpoint_failed",
            )
