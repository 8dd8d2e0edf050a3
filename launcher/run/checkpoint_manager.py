"""Saves and restores the checkpoints of a run."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from launcher.checkpoint import files
from launcher.checkpoint.copier import Copier
from launcher.checkpoint.copies import RunCopy, take_over
from launcher.checkpoint.layout import holders
from launcher.checkpoint.reader import (
    find_checkpoint,
    load,
    read_local,
    read_state,
    verify_or_fetch,
    verify_together,
)
from launcher.checkpoint.replicas import Replicas
from launcher.checkpoint.resume import (
    Fresh,
    From,
    Latest,
    Resumed,
    ResumePoint,
    check_content,
    check_recipe,
    recipe_changes,
    recipe_of_state,
    recipe_to_compare,
    saved_position,
    validation_changes,
)
from launcher.checkpoint.state import model_and_optimizer, rank_state, restore_rank_state
from launcher.checkpoint.writer import Checkpointer, Save, checkpoint_group
from launcher.console import bytes_as_text, program
from launcher.data.batching import Position
from launcher.distributed.process_group import from_rank_0
from launcher.distributed.rank_layout import DIMENSIONS
from launcher.errors import RecipeError, TrainingError
from launcher.models.adapter_files import open_adapter
from launcher.models.build import checkpoint_folder, is_pretrained
from launcher.models.philox import derived_seed
from launcher.models.record import whole_model
from launcher.models.safetensors_files import open_folder
from launcher.recipe.load import argument_digests, to_yaml
from launcher.reliability.json_files import Json
from launcher.reliability.run_directory import RunFolder
from launcher.training.evaluation import is_better
from launcher.training.setup import Training

logger = logging.getLogger(__name__)


def _own_sizes(recipe: Mapping[str, Any]) -> list[int]:
    """The sizes of a plain recipe that say which ranks draw the same random numbers, and which blocks
    a rank has."""
    strategy = recipe.get("strategy") or {}
    return [strategy.get(each.key, 1) for each in DIMENSIONS if each.counts != "each"]


class CheckpointManager:
    """Saves and restores one run. Every rank has a manager and makes the same calls."""

    def __init__(self, run: RunFolder, training: Training) -> None:
        self._run, self._folder = run, run.path / "checkpoints"
        self._training, self._settings = training, training.recipe.checkpoint
        self._recipe_yaml, self._data = to_yaml(training.recipe), training.data
        self._environment = argument_digests(training.recipe)
        self._evaluated: Json = {
            "sets": training.data.evaluated,
            "max_batches": training.recipe.evaluation.max_batches,
        }
        self._module, self._ranks = training.wrapped.module, training.ranks
        self._group = checkpoint_group(self._ranks)
        self._tensors = model_and_optimizer(self._module, training.optimizer)
        self._weights, self._adapter = self._frozen_weights(), self._first_adapter()
        self._best: Json = {}
        """Step and value of the best checkpoint that was saved (checkpoint.keep_best)."""
        self._candidate = self._best
        """The value of `_best` after the save in progress, if it succeeds."""
        self.trouble: str | None = None
        """Why the last save failed, or None."""
        self.saved_step: int | None = None
        """Step of the newest checkpoint."""
        stage = self._ranks.stage
        begin = self._ranks.rank - stage.rank
        self._held = holders(
            self._tensors, stage=range(begin, begin + stage.size), group=self._group
        )
        if self._ranks.rank == 0:
            every = self._held.every.values()
            files.check_space(self._folder, sum(tensor.nbytes for tensor in every))
        self._checkpointer = Checkpointer(
            self._folder,
            self._settings,
            group=self._group,
            device=self._ranks.device,
            before_write=run.check,
            held=self._held,
        )
        self._copy = None if self._settings.copy_to is None else RunCopy(self._settings.copy_to)
        self._copier: Copier | None = None
        """On rank 0, once this start may write to the copy."""
        self._copies = False
        """Whether it may."""
        self._replicas = Replicas(self._tensors, self._ranks.group)
        if self._settings.saves:
            local = rank_state(self._module, self._ranks.device)
            self._checkpointer.prepare(self._tensors, local=local)

    def wait_staged(self) -> None:
        """Waits until a save that has begun has copied the weights."""
        self._checkpointer.wait_staged()

    def _frozen_weights(self) -> str | None:
        """Digest of the weights in model.path if some of them are frozen: a resume reads these
        again."""
        section, digest = self._training.recipe.model, None
        whole = whole_model(self._module)
        frozen = not all(parameter.requires_grad for parameter in whole.parameters())
        if not frozen or not is_pretrained(section):
            return None
        folder = checkpoint_folder(section)
        if self._ranks.rank == 0 and folder is not None:
            digest = open_folder(folder).digest()
        return from_rank_0(digest, self._group)

    def _first_adapter(self) -> str | None:
        """Digest of the adapter that the run continues from."""
        lora, digest = self._training.recipe.lora, None
        if lora is None or lora.path is None:
            return None
        if self._ranks.rank == 0:
            digest = open_adapter(Path(lora.path)).digest()
        return from_rank_0(digest, self._group)

    def restore(self, start: ResumePoint, *, at_most: int | None = None) -> Resumed | None:
        """Loads the checkpoint that a start resumes from. `Latest` is the newest valid one up to step
        `at_most`. Returns None if the start is `Fresh` or there is no checkpoint.

        Raises RecipeError if a change of the recipe, the data or the weights is not allowed,
        NoneLeftError if all checkpoints are damaged, UnreadableError if they cannot be read.
        """
        reading = files.reading(start.path) if isinstance(start, From) else nullcontext()
        with reading:  # another run that is training must not delete it
            resumed = self._restore(start, at_most=at_most)
        if self._copy is not None and not self._copies:
            self._copies = True
            self._begin_copies()
        if self._copier is not None and resumed is not None:
            self._copier.discard_after(resumed.position.step)
            if start == Latest():
                self._copier.copy(resumed.position.step, self._kept_for_results())
        return resumed

    def _begin_copies(self) -> None:
        """From now on this start writes to the copy of the run. Raises RecipeError."""
        problems = list[str]()
        if self._ranks.rank == 0:
            try:
                take_over(self._settings, self._run, name=self._training.recipe.run.name)
                self._copier = Copier(self._run, self._settings)
            except RecipeError as error:
                problems = error.problems
        if problems := from_rank_0(problems, self._group):
            raise RecipeError(problems)

    def _restore(self, start: ResumePoint, *, at_most: int | None) -> Resumed | None:
        path = self._find(start, at_most=at_most)
        if path is None:
            return None
        state = read_state(path)
        before = recipe_of_state(state)
        now = recipe_to_compare(self._training.recipe, state.get("environment"))
        allow = self._settings.allow_changes
        # `decide` has compared the recipe of the newest checkpoint. If that is damaged, this is an
        # older one, which may be of another recipe
        check_recipe(path, before, now, allow=allow)
        changes = recipe_changes(before, now)
        changes += check_content(
            path,
            state,
            settings=self._data.data,
            data=self._data.fingerprint,
            weights={"model.path": self._weights, "lora.path": self._adapter},
            stream=self._data.stream_order,
            allow=allow,
        )
        if self._ranks.device.type == "cuda":
            # A step may still copy offloaded optimizer state to the host
            torch.cuda.synchronize(self._ranks.device)
        load(path, self._tensors, group=self._group, every=self._held.every)
        self._training.loss_scale.restore(state["loss_scale"])
        if (balance := self._training.router_balance) is not None:
            balance.restore(state.get("router_shares"))  # earlier versions wrote none
        other_validation = self._restore_best(state, changes, own=start == Latest())
        if (state["ranks"], _own_sizes(before)) == (self._ranks.size, _own_sizes(now)):
            local = read_local(path, self._ranks.rank)
            restore_rank_state(local, self._module, self._ranks.device)
        else:  # the saved random states belong to other ranks: use new seeds
            name = f"{state['step']}/{self._ranks.random_stream}"
            torch.manual_seed(derived_seed(self._training.recipe.run.seed, name))
        self.saved_step = state["step"]
        # Damaged checkpoints, and checkpoints of steps that will be repeated
        if self._ranks.rank == 0:
            refused = -1.0
            if start == Latest():
                refused = math.inf if at_most is None else at_most
            files.discard_newer(self._folder, state["step"], refused=refused)
        dist.barrier(group=self._group)
        return Resumed(
            path,
            saved_position(state, before),
            state["ranks"],
            state["observed"],
            changes,
            other_validation=other_validation,
            evaluation_due=state["evaluation_due"],
            origin=None if start == Latest() else path.resolve(),
        )

    def _restore_best(self, state: Json, changes: list[str], *, own: bool) -> bool:
        """Restores the best value, unless it is of other validation data, which goes to `changes`.
        own: the checkpoint is of this run's folder. Returns whether it is of other data."""
        best, earlier = state["best"], list(state.get("earlier_best", ()))
        evaluated = state.get("validation")  # earlier versions did not record it
        other = [] if evaluated is None else [*validation_changes(evaluated, self._evaluated)]
        if other and best:
            step, kept = best["step"], "" if self._settings.keep_best is None else ", and is kept"
            other.append(
                f"the best value starts anew; that on the other data is of step {step}{kept}"
            )
            earlier.append(step)
        elif other:
            other.append("evaluations on other data are not compared with new ones")
        changes += other
        self._best = best if not other and self._settings.keep_best in best else {}
        self._checkpointer.best_step = self._best.get("step")
        self._checkpointer.earlier_best = earlier if own else []
        return bool(other)

    def _find(self, start: ResumePoint, *, at_most: int | None) -> Path | None:
        if isinstance(start, Fresh):
            return None
        if isinstance(start, Latest):
            return find_checkpoint(
                self._folder, group=self._group, at_most=at_most, copy=self._copy
            )
        path = start.path
        problem = verify_together(path, group=self._group)
        if problem is not None:
            raise RecipeError(f"checkpoint.resume: {path} {files.why_not_resumed(path, problem)}")
        return path

    def load_best(self, trained: int) -> int | None:
        """Loads the best checkpoint (checkpoint.keep_best) into a model that has `trained` steps, and
        returns its step. None: the model is at this step already, or no evaluation had a value. Raises
        TrainingError if the checkpoint is damaged."""
        step = self._best.get("step")
        if step is None:
            logger.warning(
                f"no checkpoint has a value of checkpoint.keep_best ({self._settings.keep_best}): "
                "the weights of the last step are exported"
            )
        if step in (None, trained):
            return None
        path = self._folder / files.checkpoint_name(step)
        try:
            problem = verify_or_fetch(path, group=self._group, copy=self._copy)
            if problem is not None:
                raise files.DamagedCheckpointError(path, problem)
            if self._ranks.device.type == "cuda":
                torch.cuda.synchronize(self._ranks.device)
            load(path, self._tensors, group=self._group, every=self._held.every)
        except files.DamagedCheckpointError as error:
            what = f"the best checkpoint cannot be exported: {error}"
            raise TrainingError(
                f"{what}; {program()} export {self._run.path} out=FOLDER exports the last one",
                reason="export_failed",
            ) from None
        return int(step)

    def save(
        self,
        position: Position,
        *,
        observed: Mapping[str, Any],
        scores: Mapping[str, float],
        evaluated: bool = True,
    ) -> None:
        """Starts a save, whose outcome `report` logs. Raises the same errors as `report`, and
        TrainingError if copies of parameters differ between ranks: nothing is saved then.

        `scores` are the results of an evaluation after this step; `evaluated` is False if this
        evaluation was interrupted.
        """
        self._replicas.check()
        step, metric = position.step, self._settings.keep_best
        if metric is not None:
            self.finish()  # the best checkpoint depends on whether the previous save succeeded
        best = self._best
        value = None if metric is None else scores.get(metric)
        if metric and value is not None and is_better(metric, value, best.get(metric)):
            best = {"step": step, metric: value}
        self._candidate = best
        prompts, balance = self._training.prompts, self._training.router_balance
        state = {
            "step": step,
            "samples": position.samples,
            "batch_unit": self._data.data.batch_unit,
            "skipped_batches": position.skipped_batches,
            "ranks": self._ranks.size,
            "recipe": self._recipe_yaml,
            "environment": self._environment,
            "data": self._data.fingerprint,
            "prompts": None if prompts is None else prompts.record(),
            "weights": self._weights,
            "adapter": self._adapter,
            "loss_scale": self._training.loss_scale.state(),
            "router_shares": None if balance is None else balance.state(),
            "observed": dict(observed),
            "stream": position.stream,
            "evaluation_due": not evaluated,
            "best": best,
            "earlier_best": self._checkpointer.earlier_best,
            "validation": self._evaluated,
        }
        local, is_best = rank_state(self._module, self._ranks.device), best is not self._best
        self._checkpointer.save(step, self._tensors, state=state, local=local, best=is_best)
        self.report()

    def report(self) -> None:
        """Logs saves and copies that have ended since the last call. Raises TrainingError after too
        many failures in a row, and if another start of the run writes to the copy."""
        self._log(self._checkpointer.poll())
        if self._copier is not None:
            self._copier.report()

    def finish(self) -> None:
        """Like `report`, but first waits for the save in progress."""
        self._log(self._checkpointer.finish())

    def finish_copies(self, *, export: bool = False) -> str | None:
        """Waits until the newest checkpoint, the small files of the run folder and, with `export`,
        RUN_DIR/hf are copied (checkpoint.copy_to). Every rank must call it. Returns what could not be
        copied and why, or None."""
        problem = None
        if self._copier is not None:
            problem = self._copier.finish(export=export)
        return problem if self._copy is None else from_rank_0(problem, self._group)

    def _kept_for_results(self) -> list[int]:
        """Steps of checkpoints that are kept for the results of their evaluations."""
        best = self._checkpointer.best_step
        return [*self._checkpointer.earlier_best, *([] if best is None else [best])]

    def close(self) -> None:
        """Frees the host memory for asynchronous saves; after `finish`."""
        self._checkpointer.close()

    def _log(self, saves: list[Save]) -> None:
        for save in saves:
            if save.error is not None:
                self.trouble = f"checkpoint of step {save.step} failed: {save.error}"
                logger.warning(f"{self.trouble}; older ones are kept, training continues")
                continue
            self.saved_step, self.trouble, self._best = save.step, None, self._candidate
            logger.info(
                f"checkpoint of step {save.step}: {bytes_as_text(save.bytes)} in "
                f"{save.seconds:.1f} s, training waited {save.blocked:.2f} s"
            )
            if self._ranks.rank == 0:
                self._run.note("saved", step=save.step, bytes=save.bytes, seconds=save.seconds)
            if self._copier is not None:
                self._copier.copy(save.step, self._kept_for_results())
        failures, limit = self._checkpointer.failures, self._settings.max_failures
        if failures >= limit:
            raise TrainingError(
                f"{failures} checkpoints in a row could not be written "
                f"(checkpoint.max_failures={limit}); the last: {self.trouble}",
                reason="checkpoint_failed",
            )
