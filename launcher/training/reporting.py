"""Records and reports a run: its steps, evaluations, resumes and its end."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import statistics
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

import torch

from launcher.checkpoint.resume import Resumed
from launcher.distributed.process_group import DataParallel
from launcher.errors import DivergedError
from launcher.metrics.console import ProgressLine, seconds_as_text
from launcher.metrics.recorder import PendingRecord, StepRecorder
from launcher.metrics.sinks import JsonLines, Sink, open_sinks
from launcher.planner.hardware import peak_flops
from launcher.recipe.schema import Recipe
from launcher.reliability.run_directory import RunFolder, State
from launcher.training.evaluation import Evaluated, over_all
from launcher.training.loop import Step

logger = logging.getLogger(__name__)

_LOSSES, _FEWEST_LOSSES = 50, 10
"""Number of recent losses that a new one is compared with."""


class Reporter:
    """Logs steps and evaluations. Every rank has one for its numbers; rank 0 writes and prints."""

    def __init__(
        self,
        ranks: DataParallel,
        folder: RunFolder,
        *,
        recipe: Recipe,
        steps: int,
        first_step: int,
        flops_per_token: float,
    ) -> None:
        device = ranks.device
        self._main, self._run = ranks.rank == 0, recipe.run
        self._folder, self._steps = folder, steps
        self._every_steps = recipe.logging.every_steps
        self._progress = ProgressLine(steps)
        self._started = time.monotonic()
        self._losses: list[float] = []
        self._recent: deque[float] = deque(maxlen=_LOSSES)
        self._first_step = self._last_step = first_step
        self._warning: dict[str, str] = {}
        self._peak: tuple[int, int] | None = None
        self._pending: PendingRecord | None = None
        self._sinks: list[Sink] = []
        if self._main:
            self._sinks = open_sinks(
                recipe.logging,
                name=recipe.run.name,
                folder=folder.path,
                metrics=folder.metrics,
                config=dataclasses.asdict(recipe),
            )
            folder.write_status("running", step=first_step, steps=steps)
        peak = peak_flops(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
        # Last, because it starts the first step's clock
        self._recorder = StepRecorder(ranks, flops_per_token=flops_per_token, peak_flops=peak)

    def list_skipped(self, rows: list[dict[str, str]], file: Path) -> None:
        """Writes the rows of the data that could not be used, one JSON object per line."""
        if self._main and rows:
            lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
            file.write_text("".join(lines), encoding="utf-8")

    def step(self, step: Step) -> None:
        """Logs the previous step if it is due, and starts to gather the numbers of this one.

        The device works on this step while the host waits for the previous one: logging leaves no
        gap. Raises DivergedError after too many skipped steps in a row, or if the loss jumps.
        """
        self._last_step = step.number
        self._recorder.add(step)
        due = step.number % self._every_steps == 0 or step.number in (1, self._steps)
        previous, self._pending = self._pending, self._recorder.launch(step) if due else None
        if previous is not None:
            self._log(previous)
        if step.number == self._first_step + 1:
            self.flush()  # shows early that the run trains

    def flush(self) -> None:
        """Logs the last step now, before an evaluation or a checkpoint. Raises as `step`."""
        pending, self._pending = self._pending, None
        if pending is not None:
            self._log(pending)

    @contextmanager
    def excluded(self) -> Iterator[None]:
        """Around an evaluation or a checkpoint: the time inside belongs to no step."""
        self.flush()
        with self._recorder.excluded():
            yield

    def _log(self, pending: PendingRecord) -> None:
        step, record = pending.step, self._recorder.collect(pending)
        self._peak = (step.number, record["peak_memory_bytes"])
        if record["loss"] is not None:
            self._losses = [*self._losses[:1], record["loss"]]
        if self._main:
            self._write(record)
            self._progress.step(record)
            self._folder.note_step(step.number, steps=self._steps, **self._warning)
        try:
            self._check(record)
        except DivergedError:
            self._pending = None  # the following step is not logged
            raise

    def peak_memory(self, *, after: int) -> int | None:
        """Largest peak of a rank in the last record; None if no step after `after` was logged."""
        return self._peak[1] if self._peak is not None and self._peak[0] > after else None

    def _check(self, record: dict[str, Any]) -> None:
        """Raises DivergedError. Every rank has the same record and makes the same decision."""
        step, loss, in_a_row = record["step"], record["loss"], self._recorder.skipped_in_a_row
        most, ratio = self._run.max_skipped_steps, self._run.max_loss_ratio
        if in_a_row >= most:
            raise DivergedError(
                f"gradients not finite in {in_a_row} steps in a row (run.max_skipped_steps={most}); "
                "try a lower optimizer.learning_rate, a longer schedule.warmup_steps, or bfloat16 "
                "instead of float16",
                reason="not_finite",
                first_step=step - in_a_row + 1,
                last_step=step,
            )
        if loss is None:
            return
        if ratio is not None and len(self._recent) >= _FEWEST_LOSSES:
            median = statistics.median(self._recent)
            if loss > ratio * median:
                raise DivergedError(
                    f"the loss of step {step}, {loss:.4g}, is more than "
                    f"run.max_loss_ratio={ratio:g} times the median of the {len(self._recent)} "
                    f"before it, {median:.4g}; try a lower optimizer.learning_rate, or "
                    "run.on_divergence: rewind",
                    reason="loss_spike",
                    first_step=step - self._every_steps + 1,
                    last_step=step,
                )
        self._recent.append(loss)

    def state(self) -> dict[str, Any]:
        """For a checkpoint: what is needed to notice that a run diverges."""
        return {
            "skipped": self._recorder.skipped,
            "skipped_in_a_row": self._recorder.skipped_in_a_row,
            "recent_losses": list(self._recent),
        }

    def _restore(self, resumed: Resumed) -> None:
        """Restores what `state` returned, and restarts the clock."""
        state = resumed.observed
        self._recorder.restart(skipped=state["skipped"], skipped_in_a_row=state["skipped_in_a_row"])
        self._recent = deque(state["recent_losses"], maxlen=_LOSSES)
        self._pending = None
        self._last_step = resumed.position.step

    def evaluation(
        self, step: int, results: Mapping[str, Evaluated], seconds: float
    ) -> float | None:
        """Logs an evaluation, over all sets and for each. Returns the loss over all, if finite."""
        whole = over_all(results)
        loss = _finite(whole.loss)
        if not self._main:
            return loss
        record: dict[str, Any] = {"step": step, "eval_loss": loss, "eval_tokens": whole.tokens}
        text = (
            f"evaluation after step {step}: loss {whole.loss:.4f} over {whole.tokens:,} tokens "
            f"({seconds_as_text(seconds)})"
        )
        if len(results) > 1:
            record["eval_losses"] = {name: _finite(result.loss) for name, result in results.items()}
            text += "; " + ", ".join(f"{name} {one.loss:.4f}" for name, one in results.items())
        self._write(record | {"time": time.time()})
        logger.info(text)
        return loss

    def warn(self, text: str | None) -> None:
        """Sets the warning in status.json. None removes it."""
        before, self._warning = self._warning, {"warning": text} if text else {}
        if self._warning != before and self._main:
            self._folder.write_status(
                "running", step=self._last_step, steps=self._steps, **self._warning
            )

    def resumed(self, resumed: Resumed, *, ranks: int) -> None:
        """The run resumes from a checkpoint: logs it and removes later lines from metrics.jsonl."""
        self._restore(resumed)
        if not self._main:
            return
        step, removed = resumed.position.step, self._remove_later_steps(resumed.position.step)
        logger.info(
            f"resumed from {resumed.path}, step {step}"
            + (f", written by {resumed.ranks} ranks" if resumed.ranks != ranks else "")
            + (f"; {removed} lines of later steps removed from metrics.jsonl" if removed else "")
        )
        for change in resumed.changes:
            logger.info(f"  changed since: {change}")
        origin = {} if resumed.origin is None else {"origin": str(resumed.origin)}
        self._folder.note("resumed", ranks=ranks, step=step, **origin)

    def rewound(self, resumed: Resumed, error: DivergedError) -> None:
        """The run went back to a step before it diverged."""
        self._restore(resumed)
        if self._main:
            step = resumed.position.step
            self._remove_later_steps(step)
            logger.info(
                f"diverged: {error}\nback to the checkpoint of step {step}; the samples of steps "
                f"{step + 1} to {error.last_step} are skipped (run.on_divergence: rewind)"
            )
            self._folder.note("resumed", step=step, reason=error.reason)

    def _remove_later_steps(self, step: int) -> int:
        self._folder.check()
        files = (sink for sink in self._sinks if isinstance(sink, JsonLines))
        return sum(file.remove_later_steps(step) for file in files)

    def _write(self, record: dict[str, Any]) -> None:
        self._folder.check()
        for sink in self._sinks:
            sink.write(record)

    def _close(self, state: State) -> None:
        sinks, self._sinks = self._sinks, []
        for sink in sinks:
            sink.close(state)

    def abort(self) -> None:
        """The run fails: logs the last step if its numbers are on the host, and closes the sinks.

        Waits for no other rank. May be called from any thread, since the main thread may be stuck.
        """
        pending, self._pending = self._pending, None
        with suppress(Exception):  # the device may have failed, or another run may own the folder
            if self._main and pending is not None and pending.ready():
                self._write(self._recorder.collect(pending))
        self._close("failed")

    def end(
        self,
        state: Literal["finished", "stopped"],
        *,
        reason: str | None,
        exported: str | None,
        kept: int | None,
    ) -> None:
        """Writes the final status and logs where everything is.

        exported: a description of what was exported. kept: step of the newest checkpoint.
        """
        if not self._main:
            return
        self._close(state)
        folder, step, skipped = self._folder, self._last_step, self._recorder.skipped
        folder.write_status(state, step=step, reason=reason, steps=self._steps, **self._warning)
        folder.note(state, step=step, reason=reason)
        losses = f"; loss {self._losses[0]:.3f} -> {self._losses[-1]:.3f}" if self._losses else ""
        seconds = seconds_as_text(time.monotonic() - self._started)
        logger.info(
            f"{state} after {step} of {self._steps} steps in {seconds}{losses}"
            + (f", {skipped} steps skipped" if skipped else "")
        )
        if state == "stopped":
            nothing = "nothing was saved (checkpoint.every_steps: null)"
            saved = "start it again to resume" if kept == step else nothing
            logger.info(f"  stopped by {reason}; {saved}")
        path = folder.path
        recipe = f"{path}/recipe.yaml"
        if kept is not None:
            text = "to resume with more run.max_steps, or on another number of GPUs"
            logger.info(f"  {path}/checkpoints/  {text}")
        logger.info(f"  {folder.metrics}  metrics of every step, one JSON object per line")
        again = f"recipe={recipe} run.dir=ANOTHER"
        logger.info(f"  {recipe}  resolved recipe; to repeat the run: {again}")
        logger.info(f"  {path}/status.json, {folder.log}/  outcome, output of each rank")
        if exported is not None:
            logger.info(f"  {folder.export}/  {exported}")
        if state == "finished":
            test = f"launcher selftest recipe={recipe}"
            logger.info(f"next: check that every strategy gives the same losses: {test}")


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None
