"""A run, from a checked recipe to a trained model. Reads top to bottom; each step is a module."""

from __future__ import annotations

import math
import time
from functools import partial

import torch

from launcher import processes
from launcher.batching import SampleOrder, accumulation_steps, total_steps
from launcher.data.dataset import open_dataset
from launcher.data.loader import training_batches
from launcher.environment import Environment
from launcher.errors import EXIT_DONE, EXIT_STOPPED
from launcher.evaluation import Evaluator
from launcher.failures import Progress, failing_together
from launcher.loop import train_steps
from launcher.model.build import build_model, find_blocks, flops_per_token, vocabulary_size
from launcher.model.export import export_hugging_face
from launcher.model.weights import random_weights
from launcher.optimizer import LossScale, learning_rate, make_optimizer
from launcher.processes import DataParallel
from launcher.profiling import profiled
from launcher.recipe.load import LoadedRecipe
from launcher.reporting import Reporter, describe_data, describe_model, recipe_as_dict
from launcher.run_folder import RunFolder, rank_log
from launcher.stopping import StopRequest
from launcher.strategies import wrap


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
    with StopRequest() as stop, group as (ranks, store), rank_log(run.log, ranks.rank) as console:
        with failing_together(store, rank=ranks.rank, ranks=ranks.size, run=run, console=console, progress=progress):
            finished = pipeline(loaded, environment, run, ranks, stop, progress)
    # torchrun's agent takes any other status for a failure, and restarts; there status.json tells
    return EXIT_DONE if finished or environment.torchrun else EXIT_STOPPED


def pipeline(
    loaded: LoadedRecipe, environment: Environment, run: RunFolder, ranks: DataParallel, stop: StopRequest, progress: Progress
) -> bool:
    """Model, strategy, data, optimizer, loop, export. False where the run was asked to stop before its end."""
    recipe, data, batch, evaluation = loaded.recipe, loaded.recipe.data, loaded.recipe.batch, loaded.recipe.evaluation
    precision = recipe.strategy.mixed_precision
    try:
        processes.check_dtype(ranks.device, precision.param_dtype if precision is not None else "float32")
    except ValueError as error:
        raise loaded.refuse(("strategy", "mixed_precision", "param_dtype"), str(error)) from None

    model = build_model(recipe.model, sequence_length=data.sequence_length)
    blocks = find_blocks(model)
    flops = flops_per_token(model, sequence_length=data.sequence_length)
    say = partial(print, flush=True) if environment.main else _say_nothing
    open_data = partial(open_dataset, data, vocabulary=vocabulary_size(model), build=environment.local_rank == 0, report=say)
    training_data = open_data(data.train)
    order = SampleOrder(samples=len(training_data), seed=recipe.run.seed, shuffle=data.shuffle, epochs=recipe.run.epochs)
    steps = total_steps(
        max_steps=recipe.run.max_steps,
        epochs=recipe.run.epochs,
        samples=len(training_data),
        global_batch_size=batch.global_batch_size,
    )

    wrapped = wrap(
        model,
        strategy=recipe.strategy,
        checkpointing=recipe.activation_checkpointing,
        compile=recipe.model.compile,
        blocks=blocks,
        ranks=ranks,
        fill=partial(random_weights, blocks=blocks, seed=recipe.run.seed),
    )
    torch.manual_seed(recipe.run.seed + ranks.rank)  # dropout: each rank its own
    optimizer = make_optimizer(wrapped.module, recipe.optimizer)
    loss_scale = LossScale(ranks.device, enabled=precision is not None and precision.param_dtype == "float16")
    evaluator = None
    if data.validation is not None:
        evaluator = Evaluator(
            open_data(data.validation),
            data=data,
            micro_batch_size=batch.micro_batch_size,
            max_batches=evaluation.max_batches,
            ranks=ranks,
        )
    reporter = Reporter(
        ranks, run, run=recipe.run, logging=recipe.logging, steps=steps, flops_per_token=flops, config=recipe_as_dict(recipe)
    )
    for line in describe_model(wrapped, ranks=ranks, blocks=blocks, mode=getattr(recipe.activation_checkpointing, "mode", None)):
        reporter.say(line)
    accumulation = accumulation_steps(global_batch_size=batch.global_batch_size, micro_batch_size=batch.micro_batch_size, ranks=ranks.size)
    reporter.say(describe_data(training_data, shuffled=data.shuffle))
    reporter.say(
        f"batch: {batch.global_batch_size} sequences = {batch.micro_batch_size} a micro-batch x {accumulation} accumulation steps "
        f"x {ranks.size} ranks; {steps} steps are {steps * batch.global_batch_size / len(training_data):.2g} passes over the data"
    )
    if recipe.schedule.warmup_steps >= steps:
        reporter.say(f"note: schedule.warmup_steps={recipe.schedule.warmup_steps} is not over within the run's {steps} steps")

    def evaluate(step: int) -> None:
        if evaluator is not None:
            with reporter.excluded():
                started = time.perf_counter()
                loss, tokens = evaluator.evaluate(wrapped)
                reporter.evaluation(step, loss, tokens, time.perf_counter() - started)

    if evaluation.at_start:
        evaluate(0)
    finished = True
    batches = training_batches(training_data, data=data, batch=batch, order=order, steps=steps, ranks=ranks, stop_requested=stop.requested)
    trained = train_steps(
        wrapped,
        optimizer,
        batches,
        learning_rate=learning_rate(recipe.schedule, peak=recipe.optimizer.learning_rate, steps=steps),
        loss_scale=loss_scale,
        max_grad_norm=recipe.optimizer.max_grad_norm,
        ranks=ranks.size,
    )
    with profiled(recipe.profile, folder=run.path, rank=ranks.rank, device=ranks.device) as profile_step:
        for step in trained:
            progress.step = step.number
            reporter.step(step)
            profile_step()
            if step.number == 1:
                processes.set_timeout(recipe.run.timeout)
            if step.number == steps or step.number % (evaluation.every_steps or math.inf) == 0:
                evaluate(step.number)
            if step.batch.counts.read()[-1] and step.number < steps:
                finished = False
                break
    exporting = finished and recipe.checkpoint.export is not None
    if exporting:
        export_hugging_face(wrapped.module, run.export, rank=ranks.rank, device=ranks.device)
    reporter.end(
        "finished" if finished else "stopped", reason=None if finished else stop.signal or "a signal to another rank", exported=exporting
    )
    return finished


def _say_nothing(text: str) -> None:
    pass
