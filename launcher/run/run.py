"""The whole run, from a checked recipe to a trained model."""

from __future__ import annotations

import logging
import math
import os
import shlex
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial

from launcher.checkpoint.resume import Fresh, Latest, Resumed, ResumePoint, check_data
from launcher.checkpoint.state import BeforeStep
from launcher.console import configure_logging, program, task
from launcher.data.batching import Position
from launcher.data.dataset import MixtureDataset, SequenceDataset
from launcher.data.loader import check_shared_memory, expected_padding
from launcher.data.run_data import RunData
from launcher.data.streaming import StreamingDataset
from launcher.distributed import process_group
from launcher.distributed.environment import Environment, cache_folder
from launcher.distributed.host_memory import FreedMemory
from launcher.distributed.process_group import from_rank_0, gather
from launcher.distributed.rank_layout import RankLayout
from launcher.distributed.shared_results import SharedResults
from launcher.errors import EXIT_DONE, EXIT_STOPPED, DivergedError, RecipeError, TrainingError
from launcher.files import remove_leftovers
from launcher.models.config_keys import check_config_keys
from launcher.objectives.base import dataset_objective
from launcher.planner.auto import SEARCH
from launcher.planner.facts import profiles_of
from launcher.planner.sizes import check_repeats, untokenized
from launcher.planner.speed import faster_text, seconds_of_steps, time_text
from launcher.recipe.derived import open_sizes
from launcher.recipe.load import LoadedRecipe
from launcher.reliability.failures import FailureWatch
from launcher.reliability.progress import Progress
from launcher.reliability.run_directory import RunFolder, rank_log
from launcher.reliability.signals import StopRequest
from launcher.reliability.watchdog import Watch
from launcher.run.agreement import compare_content, compare_recipes
from launcher.run.checkpoint_manager import CheckpointManager
from launcher.run.compilation import Compilation, shared_file
from launcher.run.fetching import fetch_in_turn, refuse_to_tokenize
from launcher.run.garbage import GarbageCollection
from launcher.run.out_of_memory import MemoryPostMortem
from launcher.run.profiling import make_profiler
from launcher.run.recorder import StepRecorder
from launcher.run.reporting import Reporter
from launcher.run.resolve import (
    detect_machine,
    on_rank_0,
    resolve_by_machine,
    resolve_by_model,
    resolve_by_rows,
    settle,
    warn_of_memory,
)
from launcher.run.summary import describe_start, summarize
from launcher.sources.finding import shared_by
from launcher.strategies.base import compute_dtype, offloads_parameters
from launcher.training.evaluation import EarlyStopping
from launcher.training.loop import Step
from launcher.training.model import PreparedModel, prepare_model
from launcher.training.setup import Hooks, Training, assemble
from launcher.training.sum_check import check_sum

logger = logging.getLogger(__name__)

Metrics = Mapping[str, float]
"""Finite metrics of an evaluation by name, as in metrics.jsonl; empty if none was due."""
MAX_REWINDS = 5
"""Most rewinds in one start. A run that diverges more often needs another learning rate, not other
samples."""


@dataclass(frozen=True)
class Rank:
    """What this rank trains with, from the start of its process to its end."""

    environment: Environment
    ranks: RankLayout
    directory: RunFolder
    stop: StopRequest
    failures: FailureWatch
    post_mortem: MemoryPostMortem
    watch: Watch
    progress: Progress


def train(
    loaded: LoadedRecipe,
    environment: Environment,
    run: RunFolder,
    stop: StopRequest,
    *,
    start: ResumePoint | None,
    before: str,
) -> int:
    """Joins the other ranks and trains with them. Returns the exit status. `start` is, on rank 0,
    what `choose_resume` returned; `before` is what libraries printed when they were imported. A
    failure of any rank ends this process (`FailureWatch`). Raises RecipeError for unknown keys of
    model.config, and TrainingError if the ranks do not meet."""
    check_config_keys(loaded)
    settings, progress = loaded.recipe.run, Progress()
    process_group.set_numerics(
        deterministic=settings.deterministic, float32_matmul=settings.float32_matmul
    )
    group = process_group.process_group(
        environment, device=settings.device, init_timeout=settings.init_timeout
    )
    post_mortem = MemoryPostMortem(loaded.recipe, environment, run)
    with (
        group as (ranks, store),
        rank_log(run.log, ranks.rank, before=before) as console,
        FailureWatch(
            store,
            environment=environment,
            run=run,
            console=console,
            progress=progress,
            post_mortem=post_mortem,
        ) as failures,
        Watch(
            failures,
            stop=stop,
            hang_timeout=settings.hang_timeout,
            timeout=settings.timeout,
            init_timeout=settings.init_timeout,
        ) as watch,
    ):
        configure_logging()
        rank = Rank(environment, ranks, run, stop, failures, post_mortem, watch, progress)
        data = loaded.recipe.data
        place = repr((os.getcwd(), data.train, data.validation))
        with shared_by(SharedResults(store, environment, place=place)):
            finished = TrainingRun(loaded, rank, start=start).execute()
    # torchrun's agent restarts on any other status than 0; status.json has the outcome
    return EXIT_DONE if finished or environment.torchrun else EXIT_STOPPED


def check_loss(training: Training) -> list[str]:
    """A note about the user's own loss or model, if its results depend on the micro-batch. Raises
    RecipeError if the loss is a mean."""
    check = check_sum(training)
    what = None if check is None else check.describe()
    if check is None:
        return []
    key = "data.builder" if check.own_loss else "model.builder"
    if not math.isfinite(check.whole):
        what = (
            f"the loss of the first {check.samples} samples is {check.whole} before the first step"
        )
        return [f"warning: {key}: {what}: steps without a finite gradient are skipped"]
    if what is None or check.verdict == "random":
        return []
    if check.verdict == "mean":
        raise RecipeError(f"{key}: {what}")
    return [f"note: {key}: {what}"]


class TrainingRun:
    """A run on this rank: `auto` resolved, everything built, the checkpoint loaded."""

    def __init__(self, loaded: LoadedRecipe, rank: Rank, *, start: ResumePoint | None) -> None:
        self._rank, self._ranks, self._progress = rank, rank.ranks, rank.progress
        self._recipe = loaded.recipe
        self._set_timeout(loaded.recipe.run.init_timeout)
        directory, environment = rank.directory, rank.environment
        compare_recipes(
            loaded.recipe,
            rank.ranks,
            several_machines=environment.several_nodes,
            reads=environment.local_rank == 0,
        )
        # Rank 0 decides: another node may see the folder a little later
        first_day = directory.first_day() if environment.main else None
        start, first_day = from_rank_0((start or Fresh(), first_day), rank.ranks.group)
        self._start = start
        self._progress.heartbeat("data")
        fetch_in_turn(loaded.recipe, rank.ranks, first_of_node=environment.local_rank == 0)
        refuse_to_tokenize(
            loaded.recipe,
            rank.ranks,
            nodes=environment.world_size // environment.local_world_size,
            untokenized=untokenized,
        )
        prepared = self._resolve(loaded, start, first_day)
        recipe = self._recipe
        skipped_rows = directory.path / "skipped_rows.jsonl"
        recorder = StepRecorder(rank.ranks)
        self._training = training = assemble(
            recipe,
            ranks=replace(rank.ranks, waiting=recorder.waiting),
            prepared=prepared,
            build_data=environment.local_rank == 0,
            run_dir=directory.path,
            kept_file=prepared.objective.kept_file(directory.path, recipe),
            hooks=Hooks(
                rank.stop.requested,
                rank.watch.save_requested,
                self._heartbeat,
                rank.watch.stop_agreement.reached,
                self._wait_for_copies,
                self._preparing_round,
            ),
            heartbeat=self._progress.heartbeat,
            check_data=self._check_data,
        )
        self._progress.heartbeat("loss")
        loss_note = check_loss(training)
        self._progress.heartbeat("checkpoint")
        recorder.measures_waits = training.wrapped.measures_waits
        recorder.objective = dataset_objective(training.data.training)
        recorder.expert_load = training.expert_load
        recorder.stages = training.ranks.pipeline_parallel_size
        if isinstance(training.data.training, MixtureDataset | StreamingDataset):
            recorder.sources = training.data.training.sources
        self._set_timeout(recipe.run.init_timeout)
        rank.post_mortem.built(training.wrapped.module, training.optimizer)
        shared = None
        if environment.several_nodes and recipe.model.compile:
            shared = shared_file(cache_folder(recipe.data.cache), recipe, device=rank.ranks.device)
        self._compilation = Compilation(self._progress, rank=rank.ranks.rank, shared=shared)
        self._targets, self._warned_of_targets = 0, False
        keep_best = recipe.checkpoint.keep_best or "eval_loss"
        self._early_stopping = EarlyStopping(keep_best, recipe.evaluation.stop_after)
        self._checkpoints: CheckpointManager | None = None
        self._evaluation_due, position, resumed = recipe.evaluation.at_start, Position(), None
        if recipe.checkpoint.saves or start != Fresh():
            self._checkpoints = CheckpointManager(directory, training)
            resumed = self._checkpoints.restore(start)
        if resumed is not None:
            self._evaluation_due, position = resumed.evaluation_due, resumed.position
        self._move_to(position)
        first_step = self._saved_after = self._progress.step = position.step
        self._profiler = make_profiler(
            recipe.profile, directory.path, ranks=rank.ranks, done=first_step
        )
        self._reporter = Reporter(self._training, directory, recorder, first_step=first_step)
        rank.failures.on_end.callback(self._reporter.abort)
        self._reporter.list_skipped(training.data.training.skipped, skipped_rows)
        lines = [*summarize(self._training, loaded.origins.derived), *loss_note]
        logger.info("\n".join(lines))
        if (text := self._time_text()) is not None:
            logger.info(text)
        if environment.main:
            remove_leftovers(directory.export, owned=True)
            directory.note("built", **describe_start(training, environment.local_world_size))
        if resumed is not None:
            self._resume(resumed)

    def _time_text(self) -> str | None:
        """How long the steps will take by plan; None: it is not known, as of a user's own code."""
        data, recipe = self._training.data, self._recipe
        if self._ranks.rank or recipe.model.builder is not None or recipe.data.builder is not None:
            return None
        samples, steps = data.order.samples, self._steps - self._position.step
        if not samples or not isinstance(data.training, SequenceDataset) or steps < 1:
            return None
        size = min(samples, recipe.batch.global_batch_size)
        tokens = data.training.tokens / samples * size
        padding = expected_padding(data.training, data.sampler) or 0.0
        profile, machine = self._plan
        tokens /= 1 - padding
        seconds = seconds_of_steps(recipe, tokens, profile()[0], machine)
        faster = faster_text(recipe, tokens=tokens, steps=steps, seconds=seconds, machine=machine)
        return f"time: {time_text(steps * seconds, machine.device)} for {steps:,} steps{faster}"

    def _set_timeout(self, seconds: int) -> None:
        process_group.set_timeout(seconds, hang_timeout=self._recipe.run.hang_timeout)

    def _check_data(self, data: RunData) -> None:
        environment = self._rank.environment
        if self._start == Fresh():  # an earlier version allowed it
            check_repeats(self._recipe, data.order.samples)
        compare_content(
            self._recipe,
            data,
            self._ranks,
            several_machines=environment.local_world_size < environment.world_size,
            reads=environment.local_rank == 0,
        )
        check = partial(
            check_data,
            self._rank.directory,
            self._start,
            settings=self._recipe.checkpoint,
            section=data.data,
            data=data.fingerprint,
            stream=data.stream_order,
        )
        on_rank_0(check, self._ranks)
        local = environment.local_world_size
        check_shared_memory(data.training, data.sampler, data.data, ranks=local)

    def _resolve(
        self, loaded: LoadedRecipe, start: ResumePoint, first_day: str | None
    ) -> PreparedModel:
        """Sets the recipe, with a value in place of each `auto`, and returns its model."""
        rank, ranks, run = self._rank, self._ranks, self._rank.directory
        machine = detect_machine(ranks, rank.environment)
        if open_sizes(loaded.recipe):
            self._progress.heartbeat("data")
        sized = resolve_by_rows(
            loaded.recipe, start=start, ranks=ranks, run=run, build=rank.environment.local_rank == 0
        )
        recipe = resolve_by_machine(sized, machine, start=start, ranks=ranks, run=run)
        self._recipe = recipe
        rank.post_mortem.resolved(recipe, machine)
        self._check_device(loaded)
        self._progress.heartbeat("model")
        prepared = prepare_model(recipe, device=ranks.device)
        profiles = profiles_of(recipe, prepared, machine)
        self._plan = profiles, machine
        planned = recipe
        recipe = resolve_by_model(recipe, profiles, machine, start=start, ranks=ranks, run=run)
        warn_of_memory(
            recipe,
            profiles,
            machine,
            # A choice has traced the model; without one, a trace would delay the start
            exact=bool(SEARCH.open(sized)) or recipe != planned,
            ranks=ranks,
            environment=rank.environment,
        )
        rank.post_mortem.resolved(recipe, machine)  # a search leaves keys without effect `auto`
        recipe = settle(recipe, ranks=ranks, run=run)
        if recipe.data.date is None and recipe.data.builder is None:
            recipe = replace(recipe, data=replace(recipe.data, date=first_day))
        self._recipe = recipe
        return prepared

    def _check_device(self, loaded: LoadedRecipe) -> None:
        strategy, device = self._recipe.strategy, self._ranks.device
        on_host = offloads_parameters(strategy.cpu_offload)
        process_group.prepare_cpu(self._rank.environment, device=device, cpu_offload=on_host)
        try:
            process_group.check_dtype(device, compute_dtype(strategy))
        except ValueError as error:
            key = ("strategy", "mixed_precision", "param_dtype")
            raise loaded.refuse(key, str(error)) from None

    def _move_to(self, position: Position) -> None:
        """Continues at a position of the data, which may change the number of steps."""
        data = self._training.data.starting(position)
        self._position, self._steps = position, data.steps
        self._training = replace(self._training, data=data)

    def _resume(self, resumed: Resumed, diverged: DivergedError | None = None) -> None:
        """Continues from a checkpoint that was loaded."""
        self._saved_after = resumed.position.step
        self._early_stopping.restore({} if resumed.other_validation else resumed.observed)
        self._reporter.resumed(resumed, self._training.data, diverged=diverged)

    def execute(self) -> bool:
        """Evaluates, trains, saves, exports. Returns False if stopped before the end."""
        with self._compilation.observed() if self._recipe.model.compile else nullcontext():
            return self._execute()

    def _execute(self) -> bool:
        if self._evaluation_due and self._evaluate(self._position.step) is None:
            self._rank.failures.stop_before_training(self._rank.stop.signal or "signal")
        finished = self._train()
        self._finish_checkpoints(finished)
        reason, exported, best = None, None, None
        if not finished:
            reason = self._rank.stop.signal or "signal"
        else:
            if self._early_stopping.over and self._progress.step < self._steps:
                reason = "early_stopping"
            best = self._load_best()
            exported = self._export()
            if exported is not None and best is not None:
                exported += f": those of step {best}, the best"
            self._copy(required=True)
        with self._progress.slow("end"):
            self._reporter.end(
                "finished" if finished else "stopped",
                reason=reason,
                exported=exported,
                exported_step=best,
                kept=None if self._checkpoints is None else self._checkpoints.saved_step,
            )
        self._copy(required=False)
        return finished

    def _train(self) -> bool:
        """Trains to the end or until the run is stopped; rewinds if it diverges."""
        rewinds = 0
        with self._profiler or nullcontext(), GarbageCollection() as garbage:
            while True:
                try:
                    return self._train_from_position(garbage)
                except DivergedError as error:
                    rewinds += 1
                    self._rewind(error, allowed=rewinds <= MAX_REWINDS)

    def _train_from_position(self, garbage: GarbageCollection) -> bool:
        self._progress.preparing = False
        if self._early_stopping.over:  # in an earlier start
            return True
        freed = FreedMemory() if self._ranks.device.type == "cpu" else None
        before_step = BeforeStep(self._training.wrapped.module, self._ranks.device)
        step: Step | None = None
        scores: Metrics | None = {}
        for step in self._training.steps_from(self._position):
            self._record(step)
            self._check_targets(step)
            scores = self._evaluate_if_due(step.number)
            totals, early = step.batch.statistics.read(), self._early_stopping.over
            stopping = totals.stop_requests > 0 or scores is None or early
            self._save_if_due(step, scores, stopping=stopping, requested=totals.save_requests > 0)
            interrupted = scores is None and self._checkpoints is not None
            if interrupted or (stopping and step.number < self._steps):
                self._reporter.flush()
                return early  # after an interrupted evaluation, the next start repeats it
            saved = self._saved_after == step.number
            garbage.step_done(step.number, everything=saved or bool(scores))
            before_step.take()
            if freed is not None:
                freed.step_done()
        if self._rank.watch.stop_agreement.stopped:
            before_step.restore()
            self._stop_in_step(step, scores)
            return False
        self._reporter.flush()
        return True

    def _stop_in_step(self, last: Step | None, scores: Metrics | None) -> None:
        """Saves the state after the last finished step, if it is not saved. `last` is None if this
        start has finished no step, which has then nothing to save."""
        done = self._progress.step
        logger.info(f"step {done + 1} is not finished; the resumed run repeats it")
        if last is not None and self._saved_after != done:
            self._save_if_due(last, scores, stopping=True, requested=False)
        elif last is None and not done:
            self._rank.failures.stop_before_training(self._rank.stop.signal or "signal")
        self._reporter.flush()

    def _wait_for_copies(self) -> None:
        if self._checkpoints is not None:
            self._checkpoints.wait_staged()

    @contextmanager
    def _preparing_round(self) -> Iterator[Callable[[str], None]]:
        """A context between two steps. A requested stop has nothing to save in it: the step before is
        saved, and what is computed is kept as it comes."""
        if self._checkpoints is not None:
            self._checkpoints.finish()
        self._set_timeout(self._recipe.run.init_timeout)
        self._progress.preparing = True
        with self._reporter.excluded("round"), self._progress.slow("round"):
            yield self._progress.heartbeat
            gather(None, self._ranks.group)  # waits for ranks that are still preparing
        self._progress.preparing = False
        if self._progress.started:
            self._set_timeout(self._recipe.run.timeout)

    def _heartbeat(self, phase: str) -> None:
        """The training loop begins a phase."""
        self._reporter.phase(phase)
        if self._profiler is not None:
            if phase == "data" and self._progress.phase == "optimizer":
                # No collective of gloo is running: its threads would write to memory that a
                # profiler frees when it stops (torch 2.13). `excluded` waits for the gathered
                # numbers of the step before
                with self._progress.slow("profile"), self._reporter.excluded("profile"):
                    self._profiler.step_done(self._progress.step + 1)
            self._profiler.phase(phase)
        self._progress.heartbeat(phase)

    def _record(self, step: Step) -> None:
        if step.number == self._position.step + 1:
            gather(None, self._ranks.group)  # waits for ranks that are still in the first step
            self._set_timeout(self._recipe.run.timeout)
        self._progress.step_done(step.number)
        self._reporter.step(step)
        self._compilation.report(step.number)

    def _check_targets(self, step: Step) -> None:
        """Warns of a step without a target. Raises RecipeError if no step of the run had one."""
        targets = step.batch.statistics.read().loss_tokens
        before, self._targets = self._targets, self._targets + targets
        if targets:
            return
        many = step.number == min(self._recipe.run.max_skipped_steps, self._steps)
        if not before and not self._position.step and many:
            objective = dataset_objective(self._training.data.training)
            raise RecipeError(objective.no_targets(f"the first {step.number} steps", "data"))
        if not self._warned_of_targets:
            self._warned_of_targets = True
            what = "no token with loss in its batch: weights and optimizer state stay as they are"
            logger.warning(f"step {step.number}: {what} (not logged again)")

    def _evaluate_if_due(self, step: int) -> Metrics | None:
        due = self._training.data.due(step, self._recipe.evaluation)
        if step == self._steps or due:
            return self._evaluate(step)
        return {}

    def _evaluate(self, step: int) -> Metrics | None:
        """Evaluates after a step. Returns None if the run was stopped meanwhile."""
        evaluator = self._training.evaluator
        if evaluator is None:
            return {}
        with self._reporter.excluded(), task("evaluating", 0) as advance:
            started = time.perf_counter()

            def heartbeat(phase: str) -> None:
                self._progress.heartbeat(phase)
                advance(1)

            with self._training.evaluated_weights():
                results = evaluator.evaluate(
                    self._training.wrapped,
                    stop_requested=self._rank.stop.requested,
                    heartbeat=heartbeat,
                )
        if not results:
            return None
        scores = self._reporter.evaluation(step, results, time.perf_counter() - started)
        self._early_stopping.add(scores)
        return scores

    def _save_if_due(
        self, step: Step, scores: Metrics | None, *, stopping: bool, requested: bool
    ) -> None:
        checkpoints, batch = self._checkpoints, step.batch
        if checkpoints is None:
            return
        checkpoints.report()
        # One request is in two batches: the second batch counted it before the first batch was read
        requested_now = requested and step.number > self._saved_after + 1
        last = step.number == self._steps
        due = self._training.data.due(step.number, self._recipe.checkpoint)
        due = due or self._training.ends_round(step.number)
        if last or stopping or requested_now or due:
            self._saved_after = step.number
            position = Position(
                step.number,
                batch.samples_seen,
                self._position.skipped_batches,
                batch.stream,
            )
            with self._reporter.excluded("checkpoint"), self._progress.slow("checkpoint"):
                checkpoints.save(
                    position,
                    observed=self._reporter.state() | self._early_stopping.state(),
                    scores=scores or {},
                    evaluated=scores is not None,
                )
            self._reporter.warn(checkpoints.trouble)
        if requested and self._saved_after == step.number:  # else a new request, or an echo, waits
            self._rank.watch.save_done()

    def _rewind(self, error: DivergedError, *, allowed: bool) -> None:
        """Restores the last checkpoint before the steps that diverged, and skips their batches.
        Raises the error if there is no such checkpoint or the recipe does not allow it."""
        self._progress.step = error.last_step  # the step trained since then is discarded
        self._progress.slow_until_step("rewind")
        checkpoints = self._checkpoints
        if self._recipe.run.on_divergence == "stop" or checkpoints is None or not allowed:
            raise error
        checkpoints.finish()
        resumed = checkpoints.restore(Latest(), at_most=error.first_step - 1)
        if resumed is None:
            raise error
        skipped = self._position.skipped_batches + error.last_step - resumed.position.step
        samples = self._training.data.samples_after(error.last_step)
        self._move_to(replace(resumed.position, samples=samples, skipped_batches=skipped))
        self._resume(resumed, error)

    def _finish_checkpoints(self, finished: bool) -> None:
        checkpoints = self._checkpoints
        if checkpoints is None:
            return
        with self._progress.slow("checkpoint"):
            checkpoints.finish()
        checkpoints.close()
        exports = finished and self._recipe.checkpoint.export is not None
        if checkpoints.saved_step != self._progress.step and not exports:
            what = "the last step was trained" if finished else "the run was asked to stop"
            what += ", and the final checkpoint could not be saved"
            raise TrainingError(f"{what}: {checkpoints.trouble}", reason="checkpoint_failed")
        self._reporter.warn(checkpoints.trouble)

    def _copy(self, *, required: bool) -> None:
        """Waits until what the run has saved is copied (checkpoint.copy_to). required: of a run that has
        finished: a failure ends it, so that another start copies the rest."""
        recipe, checkpoints = self._recipe.checkpoint, self._checkpoints
        if checkpoints is None or recipe.copy_to is None:
            return
        with self._progress.slow("copy"):
            problem = checkpoints.finish_copies(export=required)
        if problem is not None and required:
            raise TrainingError(problem, reason="copy_failed")
        if problem is not None:
            logger.warning(problem)

    def _load_best(self) -> int | None:
        """Loads the weights that are exported, if they are not those of the last step; returns their
        step."""
        if self._recipe.checkpoint.export != "best" or self._checkpoints is None:
            return None
        with self._progress.slow("checkpoint"):
            return self._checkpoints.load_best(self._progress.step)

    def _export(self) -> str | None:
        """Writes RUN_DIR/hf if the recipe asks for it. Returns a description of the export."""
        checkpoint = self._recipe.checkpoint
        if checkpoint.export is None:
            return None
        with self._progress.slow("export"):
            try:
                self._training.export(self._rank.directory.export)
            except OSError as error:
                raise TrainingError(self._export_failed(error), reason="export_failed") from None
        if self._recipe.lora is not None and not checkpoint.export_merged:
            return "the adapter, for peft's PeftModel.from_pretrained"
        if not hasattr(self._training.wrapped.module, "config"):
            return "the weights, model.safetensors, by the names of model.builder's model"
        readers = {"embedding": "SentenceTransformer", "reranker": "CrossEncoder"}
        if (reader := readers.get(self._recipe.model.task)) is not None:
            return f"the weights, for {reader}(FOLDER) of sentence-transformers"
        return "the weights, for transformers' from_pretrained"

    def _export_failed(self, error: OSError) -> str:
        saved = None if self._checkpoints is None else self._checkpoints.saved_step
        text = f"the trained weights could not be exported: {error}"
        if saved == self._progress.step:
            run = self._rank.directory.path
            command = f"{program()} export {shlex.quote(str(run))} out=FOLDER"
            text += f"; they are in the checkpoint of step {saved}: {command}"
        return text
