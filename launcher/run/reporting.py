"""Records and reports a run: its steps, evaluations, resumes and its end."""

from __future__ import annotations

import json
import logging
import shlex
import socket
import statistics
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Literal

from launcher.checkpoint.resume import Resumed
from launcher.console import (
    LINE_SECONDS,
    ProgressLine,
    bytes_as_text,
    finite,
    program,
    seconds_as_text,
)
from launcher.data.run_data import RunData
from launcher.distributed.process_group import gather
from launcher.errors import DivergedError
from launcher.files import replace_text
from launcher.metrics.sinks import Sink, open_sinks, remove_later_steps
from launcher.metrics.slow_ranks import SlowRanks
from launcher.metrics.stages import stages_text
from launcher.objectives.base import dataset_objective
from launcher.recipe.objectives import objective_of
from launcher.recipe.schema import Recipe
from launcher.reliability.json_files import Json, Lines
from launcher.reliability.run_directory import EXPERTS, RunFolder
from launcher.run.recorder import PendingRecord, StepRecorder
from launcher.training.evaluation import Evaluated, over_all
from launcher.training.loop import Step
from launcher.training.setup import Training

logger = logging.getLogger(__name__)

_LOSSES, _FEWEST_LOSSES = 50, 10
"""Number of recent losses that a new one is compared with. The first ones fall and jump."""
WARM_UP_STEPS = 5
"""First steps of a start, in which PyTorch's allocator may repeat allocations until the memory of
all its streams has its final size."""
_EXPERTS_SECONDS = 30.0
"""Time between two writes of experts.json."""
_STAGES_RECORDS = 50
"""Last records that the line on the stages of a pipeline is about."""
_LAST_RECORD_SECONDS = 1.0
"""Time for the numbers of the last step to arrive after a failure."""


class Reporter:
    """Logs steps and evaluations. Every rank has a reporter, which gathers its numbers. Only rank 0
    writes and prints."""

    def __init__(
        self, training: Training, folder: RunFolder, recorder: StepRecorder, *, first_step: int
    ) -> None:
        """first_step is the last step that was done before this start."""
        ranks, recipe = training.ranks, training.recipe
        self._device, self._main = ranks.device, ranks.rank == 0
        self._recipe, self._folder, self._steps = recipe, folder, training.data.steps
        self._flops = training.flops
        self._first_step = self._last_step = first_step
        self._started = time.monotonic()
        self._losses: list[float] = []
        """The first and the last loss of this start."""
        self._recent: deque[float] = deque(maxlen=_LOSSES)
        self._peak = 0
        """Largest peak of a rank in the last record, in bytes."""
        self._logged, self._retries = first_step, 0
        """The last logged step; the number of retried allocations after `WARM_UP_STEPS`."""
        self._timed: deque[Json] = deque(maxlen=_STAGES_RECORDS)
        """The last records with times of the stages of a pipeline."""
        self._pending: PendingRecord | None = None
        self._progress = ProgressLine(self._steps)
        self._status: Json = {"steps": self._steps}
        self._experts: Json = {}
        """What is to be written to experts.json; empty: nothing new."""
        self._experts_written = -_EXPERTS_SECONDS
        self._samples = Lines(folder.path / "samples.jsonl")
        self._sinks: list[Sink] = []
        if self._main:
            name, config = recipe.run.name, asdict(recipe)
            self._sinks = open_sinks(recipe.logging, folder, name=name, config=config)
            folder.write_status("running", step=first_step, **self._status)
        host = socket.gethostname()
        self._hosts = gather(host, ranks.group) if ranks.size > 1 else [host]
        self._slow = SlowRanks(self._hosts, stages=recorder.stages)
        self._recorder, self._training = recorder, training
        self._micro_batch, self._line_at = 0, time.monotonic()
        """The micro-batch of the step, from 1, and when a line was last due."""
        recorder.restart(skipped=0, skipped_in_a_row=0)

    def list_skipped(self, rows: list[dict[str, str]], file: Path) -> None:
        """Writes the rows of the data that could not be used."""
        if self._main and rows:
            lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
            try:
                replace_text(file, "".join(lines))
            except OSError as error:
                logger.warning(f"{file} cannot be written: {error.strerror}; training continues")

    def phase(self, name: str) -> None:
        """A phase of a step begins. On a CPU, a step that takes long shows its micro-batches; on
        GPUs the host is ahead of them."""
        self._recorder.phase(name)
        if self._device.type != "cpu" or not self._main:
            return
        now = time.monotonic()
        if name == "forward":
            self._micro_batch += 1
        elif name != "backward":
            self._micro_batch, self._line_at = 0, now
        if self._micro_batch > 1 and now - self._line_at >= LINE_SECONDS:
            self._line_at, number = now, self._last_step + 1
            count = self._training.data.sampler.micro_batches(number - 1)
            count *= objective_of(self._recipe).passes
            stops = self._training.hooks.stop_requested()
            then = "; the run stops after this micro-batch" if stops else ""
            done = self._micro_batch - 1
            logger.info(f"step {number}: {done:,} of {count:,} micro-batches{then}")

    def step(self, step: Step) -> None:
        """Logs the previous step if it is due, and starts to gather the numbers of this step. The
        device works on the next step meanwhile: logging leaves no gap.

        Raises DivergedError after too many skipped steps in a row, or if the loss jumps.
        """
        self._last_step = step.number
        self._recorder.add(step)
        every_steps = self._recipe.logging.every_steps
        due = step.number % every_steps == 0 or step.number in (1, self._steps)
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
        """A context for an evaluation or a checkpoint: the time inside of it belongs to no step."""
        self.flush()
        with self._recorder.excluded(what):
            yield

    def _log(self, pending: PendingRecord) -> None:
        step, record = pending.step.number, self._collect(pending)
        self._count_retries(record)
        if record["loss"] is not None:
            self._losses = [*self._losses[:1], record["loss"]]
        if self._main:
            self._write(record)
            self._note_experts(step)
            if "stages" in record:
                self._timed.append(record)
            if own := self._recorder.own_seconds:
                for message in self._slow.update(step, own):
                    logger.warning(message)
            self._progress.step(record, note=self._slow.note)
            self._folder.note_step(step, **self._status)
        try:
            self._check(record)
        except DivergedError:
            self._pending = None  # the following step is not logged
            raise

    def _collect(self, pending: PendingRecord) -> Json:
        record, flops = self._recorder.collect(pending), self._flops
        if flops.peak:
            length = record["document_length"] or self._recipe.data.sequence_length
            rate = record["tokens_per_second"] * flops.model.at(length)
            rate += self._recorder.operations_of_towers
            record["mfu"] = rate / (flops.peak * len(self._hosts))
        return record

    def _count_retries(self, record: Json) -> None:
        """Keeps a record's memory for status.json. Warns of the first retried allocations after
        `WARM_UP_STEPS`."""
        before, self._logged = self._logged, record["step"]
        self._peak, reserved = record["peak_memory_bytes"], record["reserved_memory_bytes"]
        retries = record["allocation_retries"]
        if retries is not None and before >= self._first_step + WARM_UP_STEPS:
            if retries and not self._retries and self._main:
                sizes = f"{bytes_as_text(self._peak)} of tensors at the peak"
                sizes += "" if reserved is None else f", {bytes_as_text(reserved)} reserved"
                logger.warning(
                    f"little memory: after step {before:,}, up to step {self._logged:,}, PyTorch "
                    f"repeated {retries:,} allocations; each time it frees its cache and waits for "
                    f"the GPU ({sizes}). {program()} report {self._folder.path} names an override "
                    "that needs less memory. This warning is not repeated"
                )
            self._retries += retries
        self._status |= {
            "peak_memory_bytes": self._peak,
            "reserved_memory_bytes": reserved,
            "allocation_retries": None if retries is None else self._retries,
        }

    def _check(self, record: Json) -> None:
        """Raises DivergedError. Every rank has the same record and makes the same decision."""
        step, loss, run = record["step"], record["loss"], self._recipe.run
        in_a_row, most = self._recorder.skipped_in_a_row, run.max_skipped_steps
        lower = "try a lower optimizer.learning_rate"
        if in_a_row >= min(most, self._steps):  # a shorter run would end as finished
            what = f"in {in_a_row} steps in a row (run.max_skipped_steps={most}); {lower}"
            if in_a_row == step:
                what = f"in all {step} steps, so the weights are the initial ones, which may have "
                what += "values that are not finite, or a float16 loss scale needs more steps; "
                what += f"check the weights, {lower}"
            raise DivergedError(
                f"gradients not finite {what}, a longer schedule.warmup_steps, or bfloat16 instead "
                "of float16",
                reason="not_finite",
                first_step=step - in_a_row + 1,
                last_step=step,
            )
        if loss is None:
            return
        enough = len(self._recent) >= _FEWEST_LOSSES
        # A multiple of a loss means nothing for losses that can be zero or negative
        median = statistics.median(self._recent) if enough and min(self._recent) > 0 else None
        if run.max_loss_ratio and median is not None and loss > run.max_loss_ratio * median:
            raise DivergedError(
                f"the loss of step {step}, {loss:.4g}, is more than run.max_loss_ratio="
                f"{run.max_loss_ratio:g} times the median of the {len(self._recent)} before it, "
                f"{median:.4g}; {lower}, or run.on_divergence=rewind",
                reason="loss_spike",
                first_step=step - self._recipe.logging.every_steps + 1,
                last_step=step,
            )
        self._recent.append(loss)

    def state(self) -> Json:
        """The state for a checkpoint: the values that detect divergence."""
        return {
            "skipped": self._recorder.skipped,
            "skipped_in_a_row": self._recorder.skipped_in_a_row,
            "recent_losses": list(self._recent),
        }

    def evaluation(
        self, step: int, results: Mapping[str, Evaluated], seconds: float
    ) -> dict[str, float]:
        """Logs an evaluation, over all sets and for each. Returns the finite metrics over all."""
        whole = over_all(results)
        metrics = {"eval_loss": finite(whole.loss)}
        metrics |= {f"eval_{name}": finite(score) for name, score in whole.scores.items()}
        known = {name: value for name, value in metrics.items() if value is not None}
        if not self._main:
            return known
        record: Json = {"step": step, **metrics, "eval_tokens": whole.tokens}
        unit = dataset_objective(self._training.data.training).loss_unit
        text = (
            f"evaluation after step {step}: loss {whole.loss:.4f} over {whole.tokens:,} {unit} "
            f"({seconds_as_text(seconds)})"
        )
        text += "".join(f", {name} {score:.4f}" for name, score in whole.scores.items())
        if len(results) > 1:
            if whole.scores:
                scores = {name: dict(result.scores) for name, result in results.items()}
                record["eval_scores"] = scores
            losses = {name: result.loss for name, result in results.items()}
            record["eval_losses"] = {name: finite(loss) for name, loss in losses.items()}
            text += "; " + ", ".join(f"{name} {loss:.4f}" for name, loss in losses.items())
        samples = [
            {"step": step, "set": name, **sample}
            for name, result in results.items()
            for sample in result.samples
        ]
        for sample in samples:
            self._samples.append(sample)
        self._samples.close()
        self._write(record | {"time": time.time(), "samples": samples})
        logger.info(text)
        return known

    def warn(self, text: str | None) -> None:
        """Sets the warning in status.json. None removes it."""
        if text == self._status.get("warning"):
            return
        self._status.pop("warning", None)
        self._status |= {"warning": text} if text else {}
        if self._main:
            self._folder.write_status("running", step=self._last_step, **self._status)

    def resumed(
        self, resumed: Resumed, data: RunData, *, diverged: DivergedError | None = None
    ) -> None:
        """Reports that the run continues with `data` from a checkpoint: it was resumed, or it goes
        back to the checkpoint because it has `diverged`."""
        observed, step, ranks = resumed.observed, resumed.position.step, len(self._hosts)
        if data.steps != self._steps:  # fewer samples are left of the epochs
            self._steps, self._progress = data.steps, ProgressLine(data.steps)
            self._status["steps"] = data.steps
        self._recorder.restart(
            skipped=observed["skipped"], skipped_in_a_row=observed["skipped_in_a_row"]
        )
        self._recent = deque(observed["recent_losses"], maxlen=_LOSSES)
        self._pending, self._last_step, self._logged = None, step, step
        if not self._main:
            return
        self._folder.check()
        exact = diverged is None and not resumed.changes
        removed = sum(sink.go_back(step, exact=exact) for sink in self._sinks)
        remove_later_steps(self._samples, step)
        start = data.start
        more: Json = {"step": step, "skipped_batches": start.skipped_batches}
        more["samples"] = start.samples
        more["global_batch_size"] = data.sampler.global_batch_size
        if diverged is not None:
            more["reason"] = diverged.reason
            text = (
                f"diverged: {diverged}\nback to the checkpoint of step {step}; the samples of "
                f"steps {step + 1} to {diverged.last_step} are skipped (run.on_divergence: rewind)"
            )
        else:
            text = f"resumed from {resumed.path}, step {step}"
            text += f", written by {resumed.ranks} ranks" if resumed.ranks != ranks else ""
            text += f"; {removed} later lines removed from metrics.jsonl" if removed else ""
            text += "".join(f"\n  changed since: {change}" for change in resumed.changes)
            if resumed.origin is not None:
                more["origin"] = str(resumed.origin)
        logger.info(text)
        self._folder.note("resumed", ranks=ranks, **more)

    def _write(self, record: Json) -> None:
        self._folder.check()
        for sink in self._sinks:
            sink.write(record)

    def _note_experts(self, step: int) -> None:
        """Keeps experts.json up to date: the load of each expert in the last record."""
        loads = self._recorder.load_of_experts
        if not loads:
            return
        load = self._training.expert_load
        assert load is not None
        rounded = ([round(value, 4) for value in layer] for layer in loads)
        self._experts = {"step": step, "layers": dict(zip(load.names, rounded, strict=True))}
        if time.monotonic() - self._experts_written >= _EXPERTS_SECONDS:
            self._write_experts()

    def _write_experts(self) -> None:
        """A file that cannot be written does not end the run: the next record writes it again."""
        experts, self._experts = self._experts, {}
        self._experts_written = time.monotonic()
        if experts:
            with suppress(OSError):
                replace_text(self._folder.path / EXPERTS, json.dumps(experts))

    def _close(self, state: str) -> None:
        self._write_experts()
        sinks, self._sinks = self._sinks, []
        for sink in sinks:
            sink.close(state)

    def abort(self) -> None:
        """Reports that the run fails: logs the last step if its numbers arrive, and closes the
        sinks. Any thread may call it. The rank that fails first waits, too, so that its numbers
        reach the others."""
        pending, self._pending = self._pending, None
        deadline = time.monotonic() + _LAST_RECORD_SECONDS
        with suppress(Exception):  # the device may have failed, or another run may own the folder
            while pending is not None and not pending.ready() and time.monotonic() < deadline:
                time.sleep(0.02)
            if self._main and pending is not None and pending.ready():
                self._write(self._collect(pending))
        self._close("failed")

    def end(
        self,
        state: Literal["finished", "stopped"],
        *,
        reason: str | None,
        exported: str | None,
        exported_step: int | None,
        kept: int | None,
    ) -> None:
        """Writes the final status and logs where everything is. `exported` describes the export, of
        `exported_step` (None: the last one); `kept` is the step of the newest checkpoint."""
        if not self._main:
            return
        self._close(state)
        step, folder = self._last_step, self._folder
        folder.write_status(state, step=step, reason=reason, **self._status)
        of_step = {} if exported_step is None else {"exported_step": exported_step}
        folder.note(state, step=step, reason=reason, exported=exported is not None, **of_step)
        text = f"{state} after {step} of {self._steps} steps"
        text += f" in {seconds_as_text(time.monotonic() - self._started)}"
        if self._losses:
            text += f"; loss {self._losses[0]:.3f} -> {self._losses[-1]:.3f}"
        if self._recorder.skipped:
            text += f", {self._recorder.skipped} steps skipped"
        logger.info(text)
        sampler, strategy = self._training.data.sampler, self._recipe.strategy
        stages = stages_text(
            self._timed,
            micro_batches=sampler.micro_batches(max(0, step - 1)),
            chunks=strategy.stages_of_rank,
        )
        if stages is not None:
            logger.info(f"  {stages}")
        if reason == "early_stopping":
            logger.info("  the last evaluations were not better (evaluation.stop_after)")
        if state == "stopped":
            nothing = "nothing was saved (checkpoint.every_steps: null)"
            again = "start it again to resume"
            if step == self._steps:
                again = "all steps are done; start the run again for its evaluation and export"
            saved = again if kept == step else nothing
            logger.info(f"  stopped by {reason}; {saved}")
        path, recipe = folder.path, shlex.quote(f"{folder.path}/recipe.yaml")
        more = "to resume with more run.max_steps, or on another number of GPUs"
        for file, what in (
            (f"{path}/checkpoints/", more if kept is not None else None),
            (folder.metrics, "metrics of every step, one JSON object per line"),
            (recipe, f"to repeat the run: recipe={recipe} run.dir=ANOTHER"),
            (f"{path}/status.json, {folder.log}/", "outcome, output of each rank"),
            (f"{folder.export}/", exported),
        ):
            if what is not None:
                logger.info(f"  {file}  {what}")
        if state == "finished":
            lines = next_commands(
                path, self._recipe, saved=kept is not None, exported=exported is not None
            )
            logger.info("next: " + "\n      ".join(lines))


def next_commands(path: Path, recipe: Recipe, *, saved: bool, exported: bool) -> list[str]:
    """Commands to paste after a finished run. saved: it has a checkpoint."""
    run, model = shlex.quote(str(path)), recipe.model
    generates = model.task == "causal_lm" and recipe.data.kind != "reranking"
    generates = generates and model.builder is None
    commands = [f"report {run}"]
    if generates and recipe.data.builder is None and (saved or exported):
        commands.insert(0, f"chat {run}")
    if saved and model.builder is None:
        commands.append(f"export {run} out={shlex.quote(f'exported/{path.name}')}")
    return [f"{program()} {command}" for command in commands]
