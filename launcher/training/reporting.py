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
from typing import Any

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
        self._main = ranks.rank == 0
        self._folder, self._steps = folder, steps
        self._every_steps, self._max_skipped = (
            recipe.logging.every_steps,
            recipe.run.max_skipped_steps,
        )
        self._progress = ProgressLine(steps)
        self._started = time.monotonic()
        self._losses: list[float] = []
        self._recent: deque[float] = deque(maxlen=_LOSSES)
        self._max_loss_ratio = recipe.run.max_loss_ratio
        self._first_step = self._last_step = first_step
        self._warning: str | None = None
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
            file.write_text(
                "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows),
                encoding="utf-8",
            )

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
            self._folder.note_step(
                step.number,
                steps=self._steps,
                **({"warning": self._warning} if self._warning else {}),
            )
        try:
            self._check(record)
        except DivergedError:
            self._pending = None  # the following step is not logged
            raise

    def peak_memory(self, *, after: int) -> int | None:
        """Largest peak of a rank in the last record; None if no step after `after` was logged."""
        return self._peak[1] if self._peak is not None and self._peak[0] > after else None

    def _check(self, record: dict[str, Any]) -> None:
        """Every rank has the same record and makes the same decision."""
        step, in_a_row = record["step"], self._recorder.skipped_in_a_row
        if in_a_row >= self._max_skipped:
            raise DivergedError(
                f"gradients not finite in {in_a_row} steps in a row "
                f"(run.max_skipped_steps={self._max_skipped}); try a lower "
                "optimizer.learning_rate, a longer schedule.warmup_steps, or bfloat16 in the "
                "place of float16",
                reason="not_finite",
                first_step=step - in_a_row + 1,
                last_step=step,
            )
        if record["loss"] is None:
            return
        if self._max_loss_ratio is not None and len(self._recent) >= _FEWEST_LOSSES:
            usual = statistics.median(self._recent)
            if record["loss"] > self._max_loss_ratio * usual:
                raise DivergedError(
                    f"the loss of step {step}, {record['loss']:.4g}, is more than "
                    f"run.max_loss_ratio={self._max_loss_ratio:g} times the "
                    f"median of the {len(self._recent)} before it, {usual:.4g}; "
                    "try a lower optimizer.learning_rate, or run.on_divergence: rewind",
                    reason="loss_spike",
                    first_step=step - self._every_steps + 1,
                    last_step=step,
                )
        self._recent.append(record["loss"])

    def state(self) -> dict[str, Any]:
        """For a checkpoint: what is needed to notice that a run diverges."""
        recorder = self._recorder
        return {
            "skipped": recorder.skipped,
            "skipped_in_a_row": recorder.skipped_in_a_row,
            "recent_losses": list(self._recent),
        }

    def restore(self, state: Mapping[str, Any], *, step: int) -> None:
        """Restores what `state` returned, at this step, and restarts the clock."""
        self._recorder.restart(skipped=state["skipped"], skipped_in_a_row=state["skipped_in_a_row"])
        self._recent = deque(state["recent_losses"], maxlen=_LOSSES)
        self._pending = None
        self._last_step = step

    def evaluation(
        self, step: int, results: Mapping[str, Evaluated], seconds: float
    ) -> float | None:
        """Logs an evaluation, in all and of each set. Returns the loss of all, if finite."""
        whole = over_all(results)
        if not self._main:
            return _finite(whole.loss)
        record: dict[str, Any] = {
            "step": step,
            "eval_loss": _finite(whole.loss),
            "eval_tokens": whole.tokens,
        }
        text = (
            f"evaluation after step {step}: loss {whole.loss:.4f} over {whole.tokens:,} tokens "
            f"({seconds_as_text(seconds)})"
        )
        if len(results) > 1:
            record["eval_losses"] = {name: _finite(result.loss) for name, result in results.items()}
            text += "; " + ", ".join(
                f"{name} {result.loss:.4f}" for name, result in results.items()
            )
        self._write(record | {"time": time.time()})
        logger.info(text)
        return _finite(whole.loss)

    def warn(self, text: str | None) -> None:
        """Sets the warning in status.json. None removes it."""
        changed, self._warning = text != self._warning, text
        if changed and self._main:
            self._folder.write_status(
                "running",
                step=self._last_step,
                steps=self._steps,
                **({"warning": text} if text else {}),
            )

    def resumed(self, resumed: Resumed, *, ranks: int) -> None:
        """The run resumes from a checkpoint: logs it and removes later lines from metrics.jsonl."""
        self.restore(resumed.observed, step=resumed.position.step)
        if not self._main:
            return
        removed = self._remove_later_steps(resumed.position.step)
        logger.info(
            f"resumed from {resumed.path}, step {resumed.position.step}"
            + (f", written by {resumed.ranks} ranks" if resumed.ranks != ranks else "")
            + (f"; {removed} lines of later steps removed from metrics.jsonl" if removed else "")
        )
        for change in resumed.changes:
            logger.info(f"  changed since: {change}")
        origin = {} if resumed.origin is None else {"origin": str(resumed.origin)}
        self._folder.note("resumed", ranks=ranks, step=resumed.position.step, **origin)

    def rewound(self, resumed: Resumed, error: DivergedError) -> None:
        """The run went back to a step before it diverged."""
        step = resumed.position.step
        self.restore(resumed.observed, step=step)
        if self._main:
            self._remove_later_steps(step)
            logger.info(
                f"diverged: {error}\nback to the checkpoint of step {step}; the samples of steps "
                f"{step + 1} to {error.last_step} are skipped (run.on_divergence: rewind)"
            )
            self._folder.note("resumed", step=step, reason=error.reason)

    def _remove_later_steps(self, step: int) -> int:
        self._folder.check()
        removed = 0
        for sink in self._sinks:
            if isinstance(sink, JsonLines):
                removed += sink.remove_later_steps(step)
        return removed

    def _write(self, record: dict[str, Any]) -> None:
        self._folder.check()
        for sink in self._sinks:
            sink.write(record)

    def _close(self, state: State) -> None:
        sinks, self._sinks = self._sinks, []
        for sink in sinks:
            sink.close(state)

    def abort(self) -> None:
        """The run fails: logs the last step if its numbers are on the host, then flushes and closes
        the sinks.

        Waits for no other rank. May be called from any thread, since the main thread may be stuck.
        """
        pending, self._pending = self._pending, None
        with suppress(Exception):  # the device may have failed, or another run may own the folder
            if self._main and pending is not None and pending.ready():
                self._write(self._recorder.collect(pending))
        self._close("failed")

    def end(
        self,
        state: State,
        *,
        reason: str | None = None,
        exported: str | None = None,
        kept: int | None = None,
    ) -> None:
        """Writes the final status and logs where everything is.

        exported: a description of what was exported. kept: step of the newest checkpoint.
        """
        if not self._main:
            return
        self._close(state)
        folder, step = self._folder, self._last_step
        warning = {"warning": self._warning} if self._warning else {}
        folder.write_status(state, step=step, reason=reason, steps=self._steps, **warning)
        if state in ("finished", "stopped"):
            folder.note(state, step=step, reason=reason)
        skipped = self._recorder.skipped
        losses = f"; loss {self._losses[0]:.3f} -> {self._losses[-1]:.3f}" if self._losses else ""
        logger.info(
            f"{state} after {step} of {self._steps} steps in "
            f"{seconds_as_text(time.monotonic() - self._started)}{losses}"
            + (f", {skipped} steps skipped" if skipped else "")
        )
        if state == "stopped":
            saved = (
                "start it again to resume"
                if kept == step
                else "nothing was saved (checkpoint.every_steps: null)"
            )
            logger.info(f"  stopped by {reason}; {saved}")
        recipe = f"{folder.path}/recipe.yaml"
        lines = [
            (f"{folder.metrics}", "metrics of every step, one JSON object a line"),
            (recipe, f"resolved recipe; to repeat the run: recipe={recipe} run.dir=ANOTHER"),
            (f"{folder.path}/status.json, {folder.log}/", "outcome, output of each rank"),
        ]
        if kept is not None:
            text = "to resume with more run.max_steps, or on another number of GPUs"
            lines.insert(0, (f"{folder.path}/checkpoints/", text))
        if exported is not None:
            lines.append((f"{folder.export}/", exported))
        for path, text in lines:
            logger.info(f"  {path}  {text}")
        if state == "finished":
            logger.info(
                "next: check that every strategy gives the same losses: launcher selftest "
                f"recipe={recipe}"
            )


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None
