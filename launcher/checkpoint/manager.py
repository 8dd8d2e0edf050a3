"""A run's checkpoints: what is put into one, when a save counts as failed, and the way back to one."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import yaml
from torch import nn

from launcher.checkpoint import files
from launcher.checkpoint.reader import find_checkpoint, load, read_local, read_state, verify_together
from launcher.checkpoint.resume import Resumed, check_changes, check_data, check_stream
from launcher.checkpoint.state import model_and_optimizer, rank_state, restore_rank_state, total_bytes
from launcher.checkpoint.writer import Checkpointer, checkpoint_group
from launcher.distributed.process_group import DataParallel
from launcher.errors import RecipeError, TrainingError
from launcher.metrics.console import bytes_as_text
from launcher.recipe import schema
from launcher.training.optimizer import LossScale


class Keeper:
    """Saves and restores one run. Every rank has one and calls the same things."""

    def __init__(
        self,
        folder: Path,
        settings: schema.Checkpoint,
        *,
        recipe_yaml: str,
        seed: int,
        data: Mapping[str, Any],
        module: nn.Module,
        optimizer: torch.optim.AdamW,
        loss_scale: LossScale,
        stream_order: str | None = None,
        ranks: DataParallel,
        say: Callable[[str], None],
        before_write: Callable[[], None],
        saved: Callable[[int, int, float], None],
    ) -> None:
        """folder: RUN_DIR/checkpoints. data: fingerprint of the training data. module: wrapped, and filled.
        stream_order: digest of the order of a stream's samples; None without data.streaming. say: of rank 0.
        before_write: raises where this process may not write any more. saved: told step, bytes and seconds of each checkpoint."""
        self._folder, self._settings, self._recipe_yaml, self._seed = folder, settings, recipe_yaml, seed
        self._data = data
        self._module, self._loss_scale, self._ranks, self._say = module, loss_scale, ranks, say
        self._group = checkpoint_group(ranks)
        self._tensors = model_and_optimizer(module, optimizer)
        self._stream_order = stream_order
        self._saved = saved
        self._best: dict[str, Any] = {}
        self.trouble: str | None = None
        """Why the last save failed; None where it did not."""
        self.saved_step: int | None = None
        """Of the newest checkpoint."""
        if ranks.rank == 0:
            files.check_space(folder, total_bytes(self._tensors))
        self._checkpointer = Checkpointer(
            folder,
            group=self._group,
            device=ranks.device,
            optimizer=optimizer,
            asynchronous=settings.asynchronous,
            keep_last=settings.keep_last,
            keep_every=settings.keep_every,
            before_write=before_write,
        )

    def restore(self, resume: str, *, at_most: int | None = None) -> Resumed | None:
        """Goes to the newest valid checkpoint (`auto`), or to that at a path; None where there is none, or `never`.

        at_most: only those of this step and before. Raises RecipeError where the recipe has changed in what it may not, or
        the checkpoint is of another model; NoneLeftError where all are damaged.
        """
        if resume == "never":
            return None
        if resume == "auto":
            path = find_checkpoint(self._folder, self._say, group=self._group, at_most=at_most)
            if path is None:
                return None
        else:
            path = Path(resume)
            problem = verify_together(path, group=self._group)
            if problem is not None:
                raise RecipeError(f"checkpoint.resume: {path} cannot be resumed from: {problem}")
        origin = None if resume == "auto" else path.resolve()
        state = read_state(path)
        before, now = yaml.safe_load(state["recipe"]), yaml.safe_load(self._recipe_yaml)
        changes = check_changes(before, now, allow=self._settings.allow_changes, checkpoint=path)
        if "data" in state:
            changes += check_data(state["data"], self._data, allow=self._settings.allow_changes, checkpoint=path)
        else:
            self._say(f"note: {path} was written by an older version: whether the training data changed since is not known")
        check_stream(state.get("stream"), self._stream_order, allow=self._settings.allow_changes, checkpoint=path)
        load(path, self._tensors, group=self._group)
        self._loss_scale.restore(state["loss_scale"])
        self._best = state["best"]
        self._checkpointer.best_step = self._best.get("step")
        if state["ranks"] == self._ranks.size:
            restore_rank_state(read_local(path, self._ranks.rank), self._module, self._ranks.device)
        else:  # dropout goes on with other numbers than it would have: there are other ranks to draw them
            digest = hashlib.sha256(f"{self._seed}/{state['step']}/{self._ranks.rank}".encode()).digest()
            torch.manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        self.saved_step = state["step"]
        self._drop_after(state["step"])  # damaged ones, and those of this history that it goes back behind
        return Resumed(
            path,
            state["step"],
            state["left_out"],
            state["ranks"],
            state["observed"],
            changes,
            state["evaluation_due"],
            origin,
            state.get("stream"),
        )

    def due(self, step: int) -> bool:
        """Whether a checkpoint is written after this step in any case."""
        return self._settings.every_steps is not None and step % self._settings.every_steps == 0

    def save(
        self,
        step: int,
        *,
        left_out: int,
        observed: Mapping[str, Any],
        eval_loss: float | None,
        evaluated: bool = True,
        stream: Mapping[str, Any] | None = None,
    ) -> None:
        """Begins to save; what comes of it, `report` tells. eval_loss: where this step was evaluated; evaluated: false where
        that was due and was cut short. stream: where a stream's shards stand after this step.

        Raises TrainingError after too many failures in a row.
        """
        if eval_loss is not None and self._settings.keep_best is not None and eval_loss < self._best.get("eval_loss", float("inf")):
            self._best = {"step": step, "eval_loss": eval_loss}
            self._checkpointer.best_step = step
        state = {
            "step": step,
            "left_out": left_out,
            "ranks": self._ranks.size,
            "recipe": self._recipe_yaml,
            "data": self._data,
            "loss_scale": self._loss_scale.state(),
            "observed": dict(observed),
            "stream": stream,
            "evaluation_due": not evaluated,
            "best": self._best,
            "torch": torch.__version__,
            "time": time.time(),
        }
        self._checkpointer.save(step, self._tensors, state=state, local=rank_state(self._module, self._ranks.device))
        self.report()
        self._give_up_after_failures()

    def report(self) -> None:
        """Says what came of saves that have ended since. Waits for nothing."""
        self._tell(self._checkpointer.poll())

    def finish(self) -> None:
        """Waits for a save that is under way. Raises TrainingError after too many failures in a row."""
        self._tell(self._checkpointer.finish())
        self._give_up_after_failures()

    def _drop_after(self, step: int) -> None:
        if self._ranks.rank == 0:
            files.discard_newer(self._folder, step)
        dist.barrier(group=self._group)

    def _tell(self, outcomes: list[Any]) -> None:
        for outcome in outcomes:
            if outcome.error is None:
                self.saved_step, self.trouble = outcome.step, None
                waited = f"{outcome.blocked:.2f} s of them waited for"
                self._say(f"checkpoint of step {outcome.step}: {bytes_as_text(outcome.bytes)} in {outcome.seconds:.1f} s, {waited}")
                self._saved(outcome.step, outcome.bytes, outcome.seconds)
            else:
                self.trouble = f"checkpoint of step {outcome.step} failed: {outcome.error}"
                self._say(f"warning: {self.trouble}; older ones stay, training goes on")
            if outcome.note is not None:
                self._say(f"note: {outcome.note}")

    def _give_up_after_failures(self) -> None:
        failures = self._checkpointer.failures
        if failures >= self._settings.max_failures:
            raise TrainingError(
                f"{failures} checkpoints in a row could not be written (checkpoint.max_failures={self._settings.max_failures}); "
                f"the last: {self.trouble}",
                reason="checkpoint_failed",
            )
