"""A run, from a checked recipe to a trained model. Reads top to bottom; each step is a module."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from launcher import processes
from launcher.data.loader import expected_padding, training_batches
from launcher.data.run_data import RunData, open_run_data, tokenizer_to_keep
from launcher.environment import Environment
from launcher.errors import EXIT_DONE, EXIT_STOPPED, DivergedError, TrainingError
from launcher.evaluation import Evaluator
from launcher.failures import Progress, failing_together
from launcher.keeper import Keeper
from launcher.loop import Step, train_steps
from launcher.model.attention import check_isolation, isolate_documents
from launcher.model.build import build_model, class_count, find_blocks, flops_per_token, padding_id, vocabulary_size
from launcher.model.checkpoint import starting_weights
from launcher.model.export import export_hugging_face
from launcher.model.lora import add_adapters
from launcher.optimizer import LossScale, learning_rate, make_optimizer
from launcher.processes import DataParallel
from launcher.profiling import profiled
from launcher.recipe.check import resumes
from launcher.recipe.load import LoadedRecipe, to_yaml
from launcher.recipe.schema import Recipe
from launcher.reporting import Reporter, describe_batch, describe_data, describe_model
from launcher.resume import Resumed
from launcher.run_folder import RunFolder, rank_log
from launcher.stopping import StopRequest
from launcher.strategies import WrappedModel, wrap
from launcher.watchdog import Watch, watching


def train(loaded: LoadedRecipe, environment: Environment, run: RunFolder) -> int:
    """Joins the other ranks and trains with them; returns the exit status.

    A failure of any rank ends this process (`failing_together`). Raises TrainingError where the ranks do not meet.
    """
    recipe, progress = loaded.recipe, Progress()
    offload = recipe.strategy.cpu_offload is not None
    device = processes.choose_device(environment)
    processes.set_threads(environment, device=device, cpu_offload=offload)
    processes.set_numerics(deterministic=recipe.run.deterministic, float32_matmul=recipe.run.float32_matmul)
    group = processes.process_group(environment, device=device, cpu_offload=offload, init_timeout=recipe.run.init_timeout)
    with (
        StopRequest() as stop,
        group as (ranks, store),
        rank_log(run.log, ranks.rank) as console,
        failing_together(store, environment=environment, run=run, console=console, progress=progress) as failures,
        watching(failures, stop=stop, hang_timeout=recipe.run.hang_timeout) as watch,
    ):
        if environment.world_size > 1:
            processes.notice_silence(environment)
        finished = pipeline(loaded, environment, run, ranks, stop, watch, progress)
    # torchrun's agent takes any other status for a failure, and restarts; there status.json tells
    return EXIT_DONE if finished or environment.torchrun else EXIT_STOPPED


@dataclass(frozen=True)
class Point:
    """Where a run stands."""

    step: int = 0
    """Steps that are done."""
    left_out: int = 0
    """Batches before it that were not trained on, since the run diverged on them."""


@dataclass(frozen=True)
class Training:
    """A run, assembled and not started."""

    wrapped: WrappedModel
    blocks: dict[str, nn.Module]
    data: RunData
    evaluator: Evaluator | None
    flops_per_token: float
    optimizer: torch.optim.AdamW
    loss_scale: LossScale
    steps_from: Callable[[Point], Iterator[Step]]
    """Trains a step each time it is asked for the next, from a point on that model and optimizer are at."""
    export: Callable[[Path], None]
    """Writes the weights as a Hugging Face folder; every rank must call it."""

    @property
    def trained(self) -> Iterator[Step]:
        """All steps, from the first."""
        return self.steps_from(Point())


def assemble(
    recipe: Recipe,
    *,
    ranks: DataParallel,
    build_data: bool = True,
    say: Callable[[str], None] = print,
    stop_requested: Callable[[], bool] = lambda: False,
    save_requested: Callable[[], bool] = lambda: False,
    skipped_rows: Path | None = None,
    beat: Callable[[str], None] = lambda phase: None,
) -> Training:
    """Recipe to model to strategy to data to optimizer to loop.

    ranks: that train it; every one of them must call this. beat: told what goes on, as a sign of life.
    build_data: whether this process tokenizes where nothing is cached (one of a node).
    """
    data, batch, precision = recipe.data, recipe.batch, recipe.strategy.mixed_precision
    compute_dtype = getattr(torch, precision.param_dtype) if precision is not None else torch.float32
    model = build_model(recipe.model, sequence_length=data.sequence_length, labels=data.labels, say=say)
    blocks = find_blocks(model)
    fill, export_dtype = starting_weights(recipe.model, model, blocks=blocks, seed=recipe.run.seed, group=ranks.group, say=say)
    if recipe.lora is not None:
        add_adapters(model, recipe.lora, blocks=blocks, base_dtype=compute_dtype, base=recipe.model.path, say=say)
        export_dtype = export_dtype if recipe.checkpoint.export_merged else torch.float32
    if recipe.checkpoint.export_dtype is not None:
        export_dtype = getattr(torch, recipe.checkpoint.export_dtype)
    flops = flops_per_token(model, sequence_length=data.sequence_length)
    packed = data.packing and data.builder is None and data.kind != "classification"
    isolation = isolate_documents(model, device=ranks.device, compute_dtype=compute_dtype) if packed else "mask"
    vocabulary = vocabulary_size(model)
    run_data = open_run_data(
        data,
        batch,
        seed=recipe.run.seed,
        max_steps=recipe.run.max_steps,
        epochs=recipe.run.epochs,
        model_path=recipe.model.path,
        vocabulary=vocabulary,
        classes=class_count(model) if recipe.model.task == "sequence_classification" else None,
        padding=padding_id(model),
        isolation=isolation,
        ranks=ranks,
        build=build_data,
        report=say,
        skipped_rows=skipped_rows,
    )
    wrapped = wrap(
        model,
        strategy=recipe.strategy,
        checkpointing=recipe.activation_checkpointing,
        compile=recipe.model.compile,
        blocks=blocks,
        ranks=ranks,
        fill=fill,
    )
    if packed and isolation == "mask" and vocabulary is not None:
        with wrapped.forward_context():
            check_isolation(wrapped.model, name=type(model).__name__, vocabulary=vocabulary, device=ranks.device)
        wrapped.reshard()
    # Dropout, and what a user's own code draws: each rank its own
    torch.manual_seed(recipe.run.seed + ranks.rank)
    random.seed(recipe.run.seed + ranks.rank)
    np.random.seed((recipe.run.seed + ranks.rank) % 2**32)
    optimizer = make_optimizer(wrapped.module, recipe.optimizer)
    loss_scale = LossScale(ranks.device, enabled=compute_dtype == torch.float16)
    order = run_data.order

    def steps_from(point: Point) -> Iterator[Step]:
        dataset, slots = run_data.starting(point.step, point.left_out, ranks)
        batches = training_batches(
            dataset,
            data=data,
            slots=slots,
            global_batch_size=batch.global_batch_size,
            samples=order.epochs * order.samples if order.epochs is not None else None,
            first_step=point.step,
            left_out=point.left_out,
            steps=run_data.steps,
            ranks=ranks,
            stop_requested=stop_requested,
            save_requested=save_requested,
        )
        return train_steps(
            wrapped,
            optimizer,
            batches,
            loss=run_data.training.loss,
            learning_rate=learning_rate(recipe.schedule, peak=recipe.optimizer.learning_rate, steps=run_data.steps),
            loss_scale=loss_scale,
            max_grad_norm=recipe.optimizer.max_grad_norm,
            ranks=ranks.size,
            beat=beat,
        )

    evaluator = None
    if run_data.validation:
        micro_batch_size = batch.micro_batch_size or max(1, (batch.micro_batch_tokens or 0) // data.sequence_length)
        evaluator = Evaluator(
            run_data.validation, data=data, micro_batch_size=micro_batch_size, max_batches=recipe.evaluation.max_batches, ranks=ranks
        )
    export = partial(
        export_hugging_face,
        wrapped.module,
        rank=ranks.rank,
        device=ranks.device,
        dtype=export_dtype,
        merged=recipe.checkpoint.export_merged,
        tokenizer=tokenizer_to_keep(data, model_path=recipe.model.path) if ranks.rank == 0 and recipe.checkpoint.export else None,
    )
    return Training(wrapped, blocks, run_data, evaluator, flops, optimizer, loss_scale, steps_from, export)


def pipeline(
    loaded: LoadedRecipe,
    environment: Environment,
    run: RunFolder,
    ranks: DataParallel,
    stop: StopRequest,
    watch: Watch,
    progress: Progress,
) -> bool:
    """Assembles, goes to where the run stands, trains, logs, evaluates, saves, stops, exports.

    Returns False where the run was asked to stop before its end.
    """
    recipe, evaluation = loaded.recipe, loaded.recipe.evaluation
    precision = recipe.strategy.mixed_precision
    try:
        processes.check_dtype(ranks.device, precision.param_dtype if precision is not None else "float32")
    except ValueError as error:
        raise loaded.refuse(("strategy", "mixed_precision", "param_dtype"), str(error)) from None
    skipped_rows = run.path / "skipped_rows.jsonl"
    say: Callable[[str], None] = partial(print, flush=True) if environment.main else lambda text: None
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
    wrapped, run_data, evaluator = training.wrapped, training.data, training.evaluator
    steps = run_data.steps
    keeper, resumed = open_keeper(recipe, run, training, ranks=ranks, say=say)
    point = Point() if resumed is None else Point(resumed.step, resumed.left_out)
    progress.step = point.step
    reporter = Reporter(ranks, run, recipe=recipe, steps=steps, first_step=point.step, flops_per_token=training.flops_per_token)
    mode = None if recipe.activation_checkpointing is None else recipe.activation_checkpointing.mode
    reporter.list_skipped(run_data.training.skipped, skipped_rows)
    reporter.start(
        processes.idle_gpus(environment),
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

    saved_after = point.step

    def save(step: int, eval_loss: float | None, *, evaluated: bool) -> None:
        nonlocal saved_after
        saved_after = step
        if keeper is not None:
            with reporter.excluded(), progress.slow("checkpoint"):
                keeper.save(step, left_out=point.left_out, observed=reporter.state(), eval_loss=eval_loss, evaluated=evaluated)
            reporter.trouble(keeper.trouble)

    def train() -> bool:
        progress.preparing = False
        for step in training.steps_from(point):
            progress.step_done(step.number)
            reporter.step(step)
            profile_step()
            if step.number == point.step + 1:
                processes.set_timeout(recipe.run.timeout)
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
                    save(step.number, eval_loss, evaluated=whole)
                if saving:
                    watch.save_done()
            if stopping and not last:
                return False
        return True

    if (evaluation.at_start and point.step == 0) or (resumed is not None and resumed.evaluation_due):
        evaluate(point.step)
    rewinds = 0
    with profiled(recipe.profile, folder=run.path, rank=ranks.rank, device=ranks.device) as profile_step:
        while True:
            try:
                finished = train()
                break
            except DivergedError as error:
                rewinds += 1
                if recipe.run.on_divergence == "stop" or keeper is None or rewinds > MAX_REWINDS:
                    raise
                point = rewind(error, point, keeper, reporter)
                saved_after = point.step
    if keeper is not None:
        with progress.slow("checkpoint"):
            keeper.finish()
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
    reporter.end("finished" if finished else "stopped", reason=reason, exported=exported, kept=kept)
    return finished


MAX_REWINDS = 5
"""In one start: a run that diverges again and again needs another learning rate, not other samples."""


def open_keeper(
    recipe: Recipe, run: RunFolder, training: Training, *, ranks: DataParallel, say: Callable[[str], None]
) -> tuple[Keeper | None, Resumed | None]:
    """What keeps the run's checkpoints, and the one it goes on from. None where the recipe wants none, or there is none."""
    if recipe.checkpoint.every_steps is None and not resumes(recipe):
        return None, None
    # A restart goes on whatever the recipe says about runs of the past; rank 0 knows whether it is one
    goes_on: list[Any] = [run.goes_on]
    dist.broadcast_object_list(goes_on, group=ranks.group, group_src=0)
    resume = "auto" if goes_on[0] and recipe.checkpoint.resume == "never" else recipe.checkpoint.resume
    keeper = Keeper(
        run.path / "checkpoints",
        recipe.checkpoint,
        recipe_yaml=to_yaml(recipe),
        seed=recipe.run.seed,
        module=training.wrapped.module,
        optimizer=training.optimizer,
        loss_scale=training.loss_scale,
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
    return Point(resumed.step, point.left_out + error.last_step - resumed.step)
