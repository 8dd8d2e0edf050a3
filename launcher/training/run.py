"""A run, from a checked recipe to a trained model. Reads top to bottom; each step is a module."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch.distributed as dist

from launcher.checkpoint.manager import Keeper
from launcher.checkpoint.resume import Resumed
from launcher.data.loader import GlobalBatch, expected_padding
from launcher.distributed import process_group
from launcher.distributed.environment import Environment
from launcher.distributed.process_group import DataParallel
from launcher.errors import EXIT_DONE, EXIT_STOPPED, DivergedError, TrainingError
from launcher.planner.comparison import PATIENCE, Forecast
from launcher.planner.detect import detect_machine, resolve_auto
from launcher.planner.out_of_memory import PostMortem, Trained
from launcher.recipe.load import LoadedRecipe, to_yaml
from launcher.recipe.schema import Recipe
from launcher.reliability.failures import FailureWatch, Progress, failing_together
from launcher.reliability.run_directory import RunFolder, rank_log
from launcher.reliability.signals import StopRequest
from launcher.reliability.watchdog import Watch, watching
from launcher.training.profiling import profiled
from launcher.training.reporting import Reporter, describe_batch, describe_data, describe_model
from launcher.training.setup import Point, Training, assemble


def train(loaded: LoadedRecipe, environment: Environment, run: RunFolder) -> int:
    """Joins the other ranks and trains with them; returns the exit status.

    A failure of any rank ends this process (`failing_together`). Raises TrainingError where the ranks do not meet, or lack a GPU.
    """
    recipe, progress = loaded.recipe, Progress()
    process_group.set_numerics(deterministic=recipe.run.deterministic, float32_matmul=recipe.run.float32_matmul)
    group = process_group.process_group(environment, device=recipe.run.device, init_timeout=recipe.run.init_timeout)
    with (
        StopRequest() as stop,
        group as (ranks, store),
        rank_log(run.log, ranks.rank) as console,
        failing_together(store, environment=environment, run=run, console=console, progress=progress) as failures,
        watching(failures, stop=stop, hang_timeout=recipe.run.hang_timeout) as watch,
    ):
        if environment.world_size > 1:
            process_group.notice_silence(environment)
        finished = pipeline(loaded, environment, run, ranks, stop, failures, watch, progress)
    # torchrun's agent takes any other status for a failure, and restarts; there status.json tells
    return EXIT_DONE if finished or environment.torchrun else EXIT_STOPPED


def pipeline(
    loaded: LoadedRecipe,
    environment: Environment,
    run: RunFolder,
    ranks: DataParallel,
    stop: StopRequest,
    failures: FailureWatch,
    watch: Watch,
    progress: Progress,
) -> bool:
    """Chooses what is `auto`, assembles, goes to where the run stands, trains, logs, evaluates, saves, stops, exports.

    Returns False where the run was asked to stop before its end.
    """
    say: Callable[[str], None] = partial(print, flush=True) if environment.main else lambda text: None
    machine = detect_machine(ranks, environment)
    recipe = resolve_auto(loaded.recipe, machine, ranks=ranks, run=run, say=say)
    restarts_smaller = loaded.recipe.batch.micro_batch_size == "auto"
    failures.post_mortem = post_mortem = PostMortem(recipe, machine, environment=environment, run=run, restarts_smaller=restarts_smaller)
    evaluation, precision = recipe.evaluation, recipe.strategy.mixed_precision
    process_group.set_threads(environment, device=ranks.device, cpu_offload=recipe.strategy.cpu_offload is not None)
    try:
        process_group.check_dtype(ranks.device, precision.param_dtype if precision is not None else "float32")
    except ValueError as error:
        raise loaded.refuse(("strategy", "mixed_precision", "param_dtype"), str(error)) from None
    skipped_rows = run.path / "skipped_rows.jsonl"
    forecast = Forecast(recipe, machine) if recipe.logging.memory_plan and environment.main else None
    training = assemble(
        recipe,
        ranks=ranks,
        build_data=environment.local_rank == 0,
        say=say,
        stop_requested=stop.requested,
        save_requested=watch.save_requested,
        skipped_rows=skipped_rows,
        beat=progress.beat,
    )
    process_group.set_timeout(recipe.run.init_timeout)
    post_mortem.training = Trained(training.wrapped.module, training.optimizer, ranks.device)
    wrapped, run_data, evaluator = training.wrapped, training.data, training.evaluator
    steps = run_data.steps
    keeper, resumed = open_keeper(recipe, run, training, ranks=ranks, say=say)
    point = Point() if resumed is None else Point(resumed.step, resumed.left_out, resumed.stream)
    progress.step = point.step
    reporter = Reporter(ranks, run, recipe=recipe, steps=steps, first_step=point.step, flops_per_token=training.flops_per_token)
    failures.on_end = reporter.abort
    mode = None if recipe.activation_checkpointing is None else recipe.activation_checkpointing.mode
    reporter.list_skipped(run_data.training.skipped, skipped_rows)
    reporter.start(
        describe_model(wrapped, ranks=ranks, blocks=training.blocks, mode=mode),
        describe_data(
            run_data.training,
            shuffled=recipe.data.shuffle,
            padding=expected_padding(run_data.training, run_data.slots),
        ),
        describe_batch(
            recipe.batch,
            slots=run_data.slots,
            ranks=ranks.size,
            steps=steps,
            passes=run_data.order.passes(steps * recipe.batch.global_batch_size),
            warmup=recipe.schedule.warmup_steps,
        ),
    )
    if resumed is not None:
        reporter.resumed(resumed, ranks=ranks.size)

    def evaluate(step: int) -> tuple[float | None, bool]:
        """The loss, and whether it came to an end: all ranks leave it together where one is asked to stop."""
        if evaluator is None:
            return None, True
        with reporter.excluded():
            started = time.perf_counter()
            results = evaluator.evaluate(wrapped, stop_requested=stop.requested, beat=progress.beat)
            return reporter.evaluation(step, results, time.perf_counter() - started) if results else None, bool(results)

    def compare_memory(*, seconds: float = 0) -> None:
        """With the plan, once, when both are there: the second step is the first that is like all others."""
        nonlocal forecast
        measured = reporter.peak_memory(after=point.step + 1)
        if forecast is not None and measured is not None and (told := forecast.compare(measured, seconds=seconds)):
            reporter.say(told)
            forecast = None

    saved_after = point.step

    def save(batch: GlobalBatch, eval_loss: float | None, *, evaluated: bool) -> None:
        nonlocal saved_after
        saved_after = batch.step
        if keeper is not None:
            with reporter.excluded(), progress.slow("checkpoint"):
                keeper.save(
                    batch.step,
                    left_out=point.left_out,
                    observed=reporter.state(),
                    stream=run_data.stream_state(batch, point.left_out, ranks),
                    eval_loss=eval_loss,
                    evaluated=evaluated,
                )
            reporter.trouble(keeper.trouble)

    def train() -> bool:
        progress.preparing = False
        for step in training.steps_from(point):
            progress.step_done(step.number)
            reporter.step(step)
            compare_memory()
            if recipe.profile is not None:
                with progress.slow("profile"):  # it may write a trace
                    profile_step(step.number)
            if step.number == point.step + 1:
                process_group.set_timeout(recipe.run.timeout)
            last = step.number == steps
            eval_loss, whole = None, True
            if last or (evaluation.every_steps and step.number % evaluation.every_steps == 0):
                eval_loss, whole = evaluate(step.number)
            *_, stopping, saving = step.batch.counts.read()
            stopping = stopping or not whole
            if keeper is not None:
                keeper.report()
                # The request of one file is in two counts: the next batch's was taken before this one was read
                asked = saving and step.number > saved_after + 1
                if last or stopping or asked or keeper.due(step.number):
                    save(step.batch, eval_loss, evaluated=whole)
                if saving:
                    watch.save_done()
            if stopping and not last:
                reporter.flush()
                return False
        reporter.flush()
        return True

    if (evaluation.at_start and point.step == 0) or (resumed is not None and resumed.evaluation_due):
        evaluate(point.step)
    rewinds = 0
    with profiled(recipe.profile, folder=run.path, rank=ranks.rank, device=ranks.device, first_step=point.step) as profile_step:
        while True:
            try:
                finished = train()
                break
            except DivergedError as error:
                rewinds += 1
                progress.step = error.last_step  # nothing is kept of the step that was trained since
                progress.slow_until_step("rewind")
                if recipe.run.on_divergence == "stop" or keeper is None or rewinds > MAX_REWINDS:
                    raise
                point = rewind(error, point, keeper, reporter)
                saved_after = point.step
    if keeper is not None:
        with progress.slow("checkpoint"):
            keeper.finish()
    if finished:
        with progress.slow("plan"):
            compare_memory(seconds=PATIENCE)
    if keeper is not None:
        if keeper.saved_step != progress.step and not finished:
            raise TrainingError(f"asked to stop, and what was trained could not be kept: {keeper.trouble}", reason="checkpoint_failed")
        reporter.trouble(keeper.trouble)
    exported = None
    if finished and recipe.checkpoint.export is not None:
        with progress.slow("export"):
            training.export(run.export)
        adapter = recipe.lora is not None and not recipe.checkpoint.export_merged
        exported = "the adapter, for peft's PeftModel.from_pretrained" if adapter else "the weights, for transformers' from_pretrained"
    reason = None if finished else stop.signal or "signal"
    kept = None if keeper is None else keeper.saved_step
    with progress.slow("end"):
        reporter.end("finished" if finished else "stopped", reason=reason, exported=exported, kept=kept)
    return finished


MAX_REWINDS = 5
"""In one start: a run that diverges again and again needs another learning rate, not other samples."""


def open_keeper(
    recipe: Recipe, run: RunFolder, training: Training, *, ranks: DataParallel, say: Callable[[str], None]
) -> tuple[Keeper | None, Resumed | None]:
    """What keeps the run's checkpoints, and the one it goes on from. None where the recipe wants none, or there is none."""
    # Rank 0 has chosen: another node may see the folder a little later
    chosen: list[Any] = [run.resume]
    dist.broadcast_object_list(chosen, group=ranks.group, group_src=0)
    resume: str = chosen[0]
    if recipe.checkpoint.every_steps is None and resume == "never":
        return None, None
    keeper = Keeper(
        run.path / "checkpoints",
        recipe.checkpoint,
        recipe_yaml=to_yaml(recipe),
        seed=recipe.run.seed,
        data=training.data.fingerprint,
        module=training.wrapped.module,
        optimizer=training.optimizer,
        loss_scale=training.loss_scale,
        stream_order=training.data.stream_order,
        ranks=ranks,
        say=say,
        before_write=run.check,
        saved=partial(note_saved, run, ranks=ranks),
    )
    return keeper, keeper.restore(resume)


def note_saved(run: RunFolder, step: int, size: int, seconds: float, *, ranks: DataParallel) -> None:
    """A line in events.jsonl, from rank 0."""
    if ranks.rank == 0:
        run.note("saved", ranks=ranks.size, step=step, bytes=size, seconds=seconds)


def rewind(error: DivergedError, point: Point, keeper: Keeper, reporter: Reporter) -> Point:
    """Goes back to the last checkpoint before the steps that diverged; their samples are left out from then on.

    Raises the error again where there is no such checkpoint.
    """
    keeper.finish()
    resumed = keeper.restore("auto", at_most=error.first_step - 1)
    if resumed is None:
        raise error
    reporter.rewound(resumed, error)
    return Point(resumed.step, point.left_out + error.last_step - resumed.step, resumed.stream)
