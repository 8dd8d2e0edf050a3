"""A run, from a checked recipe to a trained model. Reads top to bottom; each step is a module."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import nn

from launcher import processes
from launcher.batching import SampleOrder, total_steps
from launcher.data.dataset import SequenceDataset, open_dataset
from launcher.data.loader import training_batches
from launcher.environment import Environment
from launcher.errors import EXIT_DONE, EXIT_STOPPED
from launcher.evaluation import Evaluator
from launcher.failures import Progress, failing_together
from launcher.loop import Step, train_steps
from launcher.model.build import build_model, find_blocks, flops_per_token, vocabulary_size
from launcher.model.checkpoint import starting_weights
from launcher.model.export import export_hugging_face
from launcher.model.lora import add_adapters
from launcher.optimizer import LossScale, learning_rate, make_optimizer
from launcher.processes import DataParallel
from launcher.profiling import profiled
from launcher.recipe.load import LoadedRecipe
from launcher.recipe.schema import Recipe
from launcher.reporting import Reporter, describe_batch, describe_data, describe_model
from launcher.run_folder import RunFolder, rank_log
from launcher.stopping import StopRequest
from launcher.strategies import WrappedModel, wrap


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
        failing_together(store, environment=environment, run=run, console=console, progress=progress),
    ):
        finished = pipeline(loaded, environment, run, ranks, stop, progress)
    # torchrun's agent takes any other status for a failure, and restarts; there status.json tells
    return EXIT_DONE if finished or environment.torchrun else EXIT_STOPPED


@dataclass(frozen=True)
class Training:
    """A run, assembled and not started."""

    wrapped: WrappedModel
    blocks: dict[str, nn.Module]
    data: SequenceDataset
    evaluator: Evaluator | None
    steps: int
    flops_per_token: float
    trained: Iterator[Step]
    """Trains a step each time it is asked for the next."""
    export: Callable[[Path], None]
    """Writes the weights as a Hugging Face folder; every rank must call it."""


def assemble(
    recipe: Recipe,
    *,
    ranks: DataParallel,
    build_data: bool = True,
    say: Callable[[str], None] = print,
    stop_requested: Callable[[], bool] = lambda: False,
) -> Training:
    """Recipe to model to strategy to data to optimizer to loop.

    ranks: that train it; every one of them must call this.
    build_data: whether this process tokenizes where nothing is cached (one of a node).
    """
    data, batch, precision = recipe.data, recipe.batch, recipe.strategy.mixed_precision
    model = build_model(recipe.model, sequence_length=data.sequence_length, labels=data.labels, say=say)
    blocks = find_blocks(model)
    fill, export_dtype = starting_weights(recipe.model, model, blocks=blocks, seed=recipe.run.seed, group=ranks.group, say=say)
    if recipe.lora is not None:
        held = torch.float32 if precision is None else getattr(torch, precision.param_dtype)
        add_adapters(model, recipe.lora, blocks=blocks, base_dtype=held, base=recipe.model.path, say=say)
        export_dtype = export_dtype if recipe.checkpoint.export_merged else torch.float32
    if recipe.checkpoint.export_dtype is not None:
        export_dtype = getattr(torch, recipe.checkpoint.export_dtype)
    flops = flops_per_token(model, sequence_length=data.sequence_length)
    open_data = partial(open_dataset, data, vocabulary=vocabulary_size(model), build=build_data, report=say)
    training_data = open_data(data.train)
    order = SampleOrder(samples=len(training_data), seed=recipe.run.seed, shuffle=data.shuffle, epochs=recipe.run.epochs)
    steps = total_steps(
        max_steps=recipe.run.max_steps, epochs=recipe.run.epochs, samples=order.samples, global_batch_size=batch.global_batch_size
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
    torch.manual_seed(recipe.run.seed + ranks.rank)  # dropout: each rank its own
    trained = train_steps(
        wrapped,
        make_optimizer(wrapped.module, recipe.optimizer),
        training_batches(training_data, data=data, batch=batch, order=order, steps=steps, ranks=ranks, stop_requested=stop_requested),
        learning_rate=learning_rate(recipe.schedule, peak=recipe.optimizer.learning_rate, steps=steps),
        loss_scale=LossScale(ranks.device, enabled=precision is not None and precision.param_dtype == "float16"),
        max_grad_norm=recipe.optimizer.max_grad_norm,
        ranks=ranks.size,
    )
    evaluator = None
    if data.validation is not None:
        evaluator = Evaluator(
            open_data(data.validation),
            data=data,
            micro_batch_size=batch.micro_batch_size,
            max_batches=recipe.evaluation.max_batches,
            ranks=ranks,
        )
    export = partial(
        export_hugging_face,
        wrapped.module,
        rank=ranks.rank,
        device=ranks.device,
        dtype=export_dtype,
        merged=recipe.checkpoint.export_merged,
    )
    return Training(wrapped, blocks, training_data, evaluator, steps, flops, trained, export)


def pipeline(
    loaded: LoadedRecipe, environment: Environment, run: RunFolder, ranks: DataParallel, stop: StopRequest, progress: Progress
) -> bool:
    """Assembles and trains, logs, evaluates, stops, exports. False where the run was asked to stop before its end."""
    recipe, evaluation = loaded.recipe, loaded.recipe.evaluation
    precision = recipe.strategy.mixed_precision
    try:
        processes.check_dtype(ranks.device, precision.param_dtype if precision is not None else "float32")
    except ValueError as error:
        raise loaded.refuse(("strategy", "mixed_precision", "param_dtype"), str(error)) from None
    training = assemble(
        recipe,
        ranks=ranks,
        build_data=environment.local_rank == 0,
        say=partial(print, flush=True) if environment.main else _say_nothing,
        stop_requested=stop.requested,
    )
    wrapped, steps, evaluator = training.wrapped, training.steps, training.evaluator
    reporter = Reporter(ranks, run, recipe=recipe, steps=steps, flops_per_token=training.flops_per_token)
    mode = None if recipe.activation_checkpointing is None else recipe.activation_checkpointing.mode
    reporter.start(
        processes.idle_gpus(environment),
        describe_model(wrapped, ranks=ranks, blocks=training.blocks, mode=mode),
        describe_data(training.data, shuffled=recipe.data.shuffle),
        describe_batch(recipe.batch, ranks=ranks.size, steps=steps, sequences=len(training.data), warmup=recipe.schedule.warmup_steps),
    )

    def evaluate(step: int) -> None:
        if evaluator is not None:
            with reporter.excluded():
                started = time.perf_counter()
                loss, tokens = evaluator.evaluate(wrapped)
                reporter.evaluation(step, loss, tokens, time.perf_counter() - started)

    if evaluation.at_start:
        evaluate(0)
    finished = True
    with profiled(recipe.profile, folder=run.path, rank=ranks.rank, device=ranks.device) as profile_step:
        for step in training.trained:
            progress.step = step.number
            reporter.step(step)
            profile_step()
            if step.number == 1:
                processes.set_timeout(recipe.run.timeout)
            if step.number == steps or (evaluation.every_steps and step.number % evaluation.every_steps == 0):
                evaluate(step.number)
            if step.batch.counts.read()[-1] and step.number < steps:
                finished = False
                break
    exporting = finished and recipe.checkpoint.export is not None
    if exporting:
        training.export(run.export)
    reporter.end("finished" if finished else "stopped", reason=None if finished else stop.signal or "signal", exported=exporting)
    return finished


def _say_nothing(text: str) -> None:
    pass
