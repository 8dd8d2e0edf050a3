"""Records and reports a run: its steps, evaluations, resumes and its end."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import socket
import statistics
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from launcher.checkpoint.resume import Resumed
from launcher.distributed.process_group import DataParallel
from launcher.errors import DivergedError
from launcher.metrics.console import ProgressLine, bytes_as_text, seconds_as_text
from launcher.metrics.recorder import Flops, PendingRecord, StepRecorder
from launcher.metrics.sinks import JsonLines, Sink, open_sinks
from launcher.metrics.slow_ranks import SlowRanks
from launcher.metrics.verdict import measure, verdict
from launcher.recipe.schema import Recipe
from launcher.reliability.run_directory import RunFolder, State, append_line
from launcher.training.evaluation import Evaluated, over_all
from launcher.training.loop import Step

logger = logging.getLogger(__name__)

_LOSSES, _FEWEST_LOSSES = 50, 10
"""Number of recent losses that a new one is compared with."""
VERDICT_STEPS = 100
"""After so many steps the first verdict is logged; the last one at the end."""
_LAST_RECORD_SECONDS = 1.0
"""Time for the numbers of the last step to arrive after a failure."""


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
        flops: Flops,
    ) -> None:
        self._device = ranks.device
        self._main, self._run, self._recipe = ranks.rank == 0, recipe.run, recipe
        self._folder, self._steps, self._samples = folder, steps, folder.path / "samples.jsonl"
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
        hosts = [socket.gethostname()] * ranks.size
        if ranks.size > 1:
            dist.all_gather_object(hosts, hosts[0], group=ranks.group)
        self._slow = SlowRanks(hosts)
        self._hosts, self._flops, self._micro_batches = hosts, flops, 1
        self._judged = False
        # Last, because it starts the first step's clock
        self._recorder = StepRecorder(ranks, flops)
        self.phase, self.waiting = self._recorder.phase, self._recorder.waiting

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
        self._micro_batches = len(step.batch.micro_batches)
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
    def excluded(self, what: str = "evaluation") -> Iterator[None]:
        """Around an evaluation or a checkpoint: the time inside belongs to no step."""
        self.flush()
        with self._recorder.excluded(what):
            yield

    def _log(self, pending: PendingRecord) -> None:
        step, record = pending.step, self._recorder.collect(pending)
        self._peak = (step.number, record["peak_memory_bytes"])
        if record["loss"] is not None:
            self._losses = [*self._losses[:1], record["loss"]]
        if self._main:
            self._write(record)
            if own := self._recorder.own_seconds:
                for message in self._slow.update(step.number, own):
                    logger.warning(message)
            self._progress.step(record, note=self._slow.note())
            if step.number >= self._first_step + VERDICT_STEPS and not self._judged:
                self._judge(step.number)
            self._folder.note_step(step.number, steps=self._steps, **self._warning)
        try:
            self._check(record)
        except DivergedError:
            self._pending = None  # the following step is not logged
            raise

    def _judge(self, step: int) -> None:
        """Logs what limits the speed, and records it in events.jsonl."""
        self._judged = True
        totals, free = self._recorder.totals, None
        if self._device.type == "cuda" and self._peak is not None:
            free = 1 - self._peak[1] / torch.cuda.get_device_properties(self._device).total_memory
        found = measure(
            totals,
            recomputed_share=self._flops.recomputed_share,
            ranks=len(self._hosts),
            nodes=len(set(self._hosts)),
            micro_batches=self._micro_batches,
            free_memory=free,
            slow_rank=self._slow.note(),
        )
        if found is None:
            return
        text, rate = verdict(found, self._recipe), totals["tokens"] / totals["step"]
        peak = f", {bytes_as_text(self._peak[1])} at the peak" if self._peak is not None else ""
        shares = {name: round(share, 4) for name, share in found.shares.items()}
        parts = ", ".join(f"{name} {share:.0%}" for name, share in shares.items())
        logger.info(f"{text}\n  {rate:,.0f} tokens/s{peak}; {parts}")
        self._folder.note("verdict", step=step, text=text, shares=shares)

    def peak_memory(self, *, after: int) -> int | None:
        """Largest peak of a rank in the last record; None if no step after `after` was logged."""
        return self._peak[1] if self._peak is not None and self._peak[0] > after else None

    def _check(self, record: dict[str, Any]) -> None:
        """Raises DivergedError. Every rank has the same record and makes the same decision."""
        step, loss, in_a_row = record["step"], record["loss"], self._recorder.skipped_in_a_row
        most, ratio = self._run.max_skipped_steps, self._run.max_loss_ratio
        if in_a_row >= most:
            raise DivergedError(
                f"gradients not finite in {in_a_row} steps in a row "
                f"(run.max_skipped_steps={most}); try a lower optimizer.learning_rate, a longer "
                "schedule.warmup_steps, or bfloat16 instead of float16",
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
        """For a checkpoint: the values that detect divergence."""
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
    ) -> dict[str, float]:
        """Logs an evaluation, over all sets and for each. Returns the finite metrics over all."""
        whole = over_all(results)
        loss = _finite(whole.loss)
        scores = {f"eval_{name}": _finite(score) for name, score in whole.scores.items()}
        metrics = {"eval_loss": loss} | scores
        known = {name: value for name, value in metrics.items() if value is not None}
        if not self._main:
            return known
        record: dict[str, Any] = {"step": step, **metrics, "eval_tokens": whole.tokens}
        text = (
            f"evaluation after step {step}: loss {whole.loss:.4f} over {whole.tokens:,} tokens "
            f"({seconds_as_text(seconds)})"
        )
        text += "".join(f", {name} {score:.4f}" for name, score in whole.scores.items())
        samples = [
            {"step": step, "set": name, **sample}
            for name, result in results.items()
            for sample in result.samples
        ]
        for sample in samples:
            append_line(self._samples, sample)
        if len(results) > 1:
            if whole.scores:
                record["eval_scores"] = {name: dict(one.scores) for name, one in results.items()}
            record["eval_losses"] = {name: _finite(result.loss) for name, result in results.items()}
            text += "; " + ", ".join(f"{name} {one.loss:.4f}" for name, one in results.items())
        self._write(record | {"time": time.time(), "samples": samples})
        logger.info(text)
        return known

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
        more: dict[str, Any] = {"skipped_batches": resumed.position.skipped_batches}
        if resumed.origin is not None:
            more["origin"] = str(resumed.origin)
        self._folder.note("resumed", ranks=ranks, step=step, **more)

    def rewound(self, resumed: Resumed, error: DivergedError, *, skipped_batches: int) -> None:
        """The run went back to a step before it diverged. skipped_batches: from now on."""
        self._restore(resumed)
        if self._main:
            step = resumed.position.step
            self._remove_later_steps(step)
            logger.info(
                f"diverged: {error}\nback to the checkpoint of step {step}; the samples of steps "
                f"{step + 1} to {error.last_step} are skipped (run.on_divergence: rewind)"
            )
            self._folder.note(
                "resumed", step=step, reason=error.reason, skipped_batches=skipped_batches
            )

    def _remove_later_steps(self, step: int) -> int:
        self._folder.check()
        files = (sink for sink in self._sinks if isinstance(sink, JsonLines))
        removed = sum(file.remove_later_steps(step) for file in files)
        if self._samples.exists():
            samples = JsonLines(self._samples)
            samples.remove_later_steps(step)
            samples.close("running")
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
        """The run fails: logs the last step if its numbers arrive, and closes the sinks.

        A rank that fails first waits too, so that its numbers reach the others before it ends. May
        be called from any thread, since the main thread may be stuck.
        """
        pending, self._pending = self._pending, None
        deadline = time.monotonic() + _LAST_RECORD_SECONDS
        with suppress(Exception):  # the device may have failed, or another run may own the folder
            while pending is not None and not pending.ready() and time.monotonic() < deadline:
                time.sleep(0.02)
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

        exported: a description of the export. kept: step of the newest checkpoint.
        """
        if not self._main:
            return
        self._judge(self._last_step)
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
        if reason == "early_stopping":
            logger.info(
                "  the last evaluations were not better than before (evaluation.stop_after)"
            )
        if state == "stopped":
            nothing = "nothing was saved (checkpoint.every_steps: null)"
            saved = "start it again to resume" if kept == step else nothing
            logger.info(f"  stopped by {reason}; {saved}")
        path, recipe = folder.path, f"{folder.path}/recipe.yaml"
        more = "to resume with more run.max_steps, or on another number of GPUs"
        repeat = f"resolved recipe; to repeat the run: recipe={recipe} run.dir=ANOTHER"
        files = {
            f"{path}/checkpoints/": more if kept is not None else None,
            folder.metrics: "metrics of every step, one JSON object per line",
            recipe: repeat,
            f"{path}/status.json, {folder.log}/": "outcome, output of each rank",
            f"{folder.export}/": exported,
        }
        for file, text in files.items():
            if text is not None:
                logger.info(f"  {file}  {text}")
        if state == "finished":
            test = f"launcher selftest recipe={recipe}"
            logger.info(f"next: check that every strategy gives the same losses: {test}")


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None
