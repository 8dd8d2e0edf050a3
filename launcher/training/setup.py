"""Recipe to model to strategy to data to optimizer to loop: a run, assembled and not started."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from launcher.data.loader import training_batches
from launcher.data.setup import RunData, open_run_data, tokenizer_to_keep
from launcher.data.synthetic import SyntheticData, synthetic_data
from launcher.distributed.process_group import DataParallel
from launcher.models.attention import Isolation, check_isolation, drop_causal_mask, isolate_documents
from launcher.models.build import build_model, class_count, find_blocks, flops_per_token, padding_id, vocabulary_size
from launcher.models.export import export_hugging_face
from launcher.models.load import starting_weights
from launcher.models.lora import add_adapters
from launcher.recipe import schema
from launcher.recipe.schema import Recipe
from launcher.strategies.base import Fill, WrappedModel
from launcher.strategies.wrap import wrap
from launcher.training.evaluation import Evaluator
from launcher.training.loop import Step, train_steps
from launcher.training.optimizer import LossScale, learning_rate, make_optimizer


@dataclass(frozen=True)
class Point:
    """Where a run stands."""

    step: int = 0
    """Steps that are done."""
    left_out: int = 0
    """Batches before it that were not trained on, since the run diverged on them."""
    stream: Mapping[str, Any] | None = None
    """data.streaming: where the shards stood, from the checkpoint."""


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


@dataclass(frozen=True)
class PreparedModel:
    """A model on the meta device, ready to be wrapped."""

    model: nn.Module
    blocks: dict[str, nn.Module]
    fill: Fill
    """Gives it its weights, once it is wrapped."""
    export_dtype: torch.dtype
    compute_dtype: torch.dtype
    packed: bool
    """Whether several documents share a row."""
    isolation: Isolation
    vocabulary: int | None

    def wrap(self, recipe: Recipe, ranks: DataParallel, *, fill: Fill | None = None) -> WrappedModel:
        """Spreads it over the ranks. fill: in the place of its own."""
        return wrap(
            self.model,
            strategy=recipe.strategy,
            checkpointing=recipe.activation_checkpointing,
            compile=recipe.model.compile,
            blocks=self.blocks,
            ranks=ranks,
            fill=fill if fill is not None else self.fill,
        )

    def synthetic_data(self, data: schema.Data, batch: schema.Batch) -> SyntheticData:
        """A micro-batch for it without the data, as full as the recipe's can be."""
        return synthetic_data(
            data,
            batch,
            vocabulary=self.vocabulary,
            classes=class_count(self.model),
            packed=self.packed,
            isolation=self.isolation,
        )


def prepare_model(
    recipe: Recipe, *, device: torch.device, group: dist.ProcessGroup | None, say: Callable[[str], None] = print
) -> PreparedModel:
    """Builds the recipe's model, plans where its weights come from, adds adapters, chooses how documents are kept apart.

    device: that it will run on; this decides which attention it has. group: ranks that read the weights together.
    """
    data, precision = recipe.data, recipe.strategy.mixed_precision
    compute_dtype = getattr(torch, precision.param_dtype) if precision is not None else torch.float32
    model = build_model(recipe.model, sequence_length=data.sequence_length, labels=data.labels, say=say)
    blocks = find_blocks(model)
    fill, export_dtype = starting_weights(recipe.model, model, seed=recipe.run.seed, group=group, say=say)
    if recipe.lora is not None:
        add_adapters(model, recipe.lora, blocks=blocks, base_dtype=compute_dtype, base=recipe.model.path, say=say)
        export_dtype = export_dtype if recipe.checkpoint.export_merged else torch.float32
    if recipe.checkpoint.export_dtype is not None:
        export_dtype = getattr(torch, recipe.checkpoint.export_dtype)
    sequences = data.builder is None and data.kind != "classification"
    packed = data.packing and sequences
    if sequences and not packed:
        drop_causal_mask(model)
    return PreparedModel(
        model,
        blocks,
        fill,
        export_dtype=export_dtype,
        compute_dtype=compute_dtype,
        packed=packed,
        isolation=isolate_documents(model, sequence_length=data.sequence_length, device=device, compute_dtype=compute_dtype)
        if packed
        else "mask",
        vocabulary=vocabulary_size(model),
    )


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
    data, batch = recipe.data, recipe.batch
    prepared = prepare_model(recipe, device=ranks.device, group=ranks.group, say=say)
    model, packed, isolation, vocabulary = prepared.model, prepared.packed, prepared.isolation, prepared.vocabulary
    flops = flops_per_token(model, sequence_length=data.sequence_length)
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
    wrapped = prepared.wrap(recipe, ranks)
    if packed and isolation == "mask" and vocabulary is not None:
        with wrapped.forward_context():
            check_isolation(
                wrapped.model, name=type(model).__name__, vocabulary=vocabulary, device=ranks.device, dtype=prepared.compute_dtype
            )
        wrapped.reshard()
    # Dropout, and what a user's own code draws: each rank its own
    torch.manual_seed(recipe.run.seed + ranks.rank)
    random.seed(recipe.run.seed + ranks.rank)
    np.random.seed((recipe.run.seed + ranks.rank) % 2**32)
    optimizer = make_optimizer(wrapped.module, recipe.optimizer)
    loss_scale = LossScale(ranks.device, enabled=prepared.compute_dtype == torch.float16)
    order = run_data.order

    def steps_from(point: Point) -> Iterator[Step]:
        dataset, slots = run_data.starting(point.step, point.left_out, ranks, point.stream)
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
        assert micro_batch_size != "auto"
        evaluator = Evaluator(
            run_data.validation, data=data, micro_batch_size=micro_batch_size, max_batches=recipe.evaluation.max_batches, ranks=ranks
        )
    export = partial(
        export_hugging_face,
        wrapped.module,
        rank=ranks.rank,
        device=ranks.device,
        dtype=prepared.export_dtype,
        merged=recipe.checkpoint.export_merged,
        tokenizer=tokenizer_to_keep(data, model_path=recipe.model.path) if ranks.rank == 0 and recipe.checkpoint.export else None,
    )
    return Training(wrapped, prepared.blocks, run_data, evaluator, flops, optimizer, loss_scale, steps_from, export)
