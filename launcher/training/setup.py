"""Builds everything that a run trains with: model, strategy, data, optimizer, evaluator."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from launcher.data.batching import Position
from launcher.data.setup import RunData, open_run_data, tokenizer_to_keep
from launcher.data.synthetic import SyntheticData, synthetic_data
from launcher.data.token_store import ModelInputs
from launcher.distributed.process_group import DataParallel
from launcher.models.attention import Masking, check_isolation, drop_causal_mask, isolate_documents
from launcher.models.build import (
    build_model,
    class_count,
    find_blocks,
    flops_per_token,
    padding_id,
    vocabulary_size,
)
from launcher.models.export import export_hugging_face
from launcher.models.load import starting_weights
from launcher.models.lora import add_adapters
from launcher.recipe import schema
from launcher.recipe.schema import Recipe
from launcher.strategies.base import InitFn, WrappedModel, compute_dtype
from launcher.strategies.wrap import wrap
from launcher.training.evaluation import Evaluator
from launcher.training.loop import Step, Update, train_steps
from launcher.training.optimizer import LossScale, learning_rate, make_optimizer


@dataclass(frozen=True)
class Hooks:
    """Functions that the training loop calls. Tools that train a few steps need none of them."""

    stop_requested: Callable[[], bool] = lambda: False
    save_requested: Callable[[], bool] = lambda: False
    heartbeat: Callable[[str], None] = lambda phase: None
    """Called with the phase that begins."""


@dataclass(frozen=True)
class Training:
    """Everything that a run trains with, ready to start."""

    recipe: Recipe
    ranks: DataParallel
    wrapped: WrappedModel
    blocks: dict[str, nn.Module]
    data: RunData
    evaluator: Evaluator | None
    flops_per_token: float
    optimizer: torch.optim.AdamW
    loss_scale: LossScale
    hooks: Hooks
    export: Callable[[Path], None]
    """Writes the weights as a Hugging Face folder. Every rank must call it."""

    def steps_from(self, position: Position) -> Iterator[Step]:
        """Trains one step for each item, from a position that model and optimizer are at."""
        recipe, hooks = self.recipe, self.hooks
        batches = self.data.batches(
            position,
            ranks=self.ranks,
            stop_requested=hooks.stop_requested,
            save_requested=hooks.save_requested,
        )
        optimizer = recipe.optimizer
        rate = learning_rate(recipe.schedule, peak=optimizer.learning_rate, steps=self.data.steps)
        return train_steps(
            self.wrapped,
            batches,
            loss=self.data.training.loss,
            update=Update(self.optimizer, rate, self.loss_scale, optimizer.max_grad_norm),
            ranks=self.ranks.size,
            heartbeat=hooks.heartbeat,
        )

    @property
    def all_steps(self) -> Iterator[Step]:
        """Trains all steps, from the first."""
        return self.steps_from(Position())


@dataclass(frozen=True)
class PreparedModel:
    """A model on the meta device, ready to be wrapped."""

    model: nn.Module
    blocks: dict[str, nn.Module]
    init_fn: InitFn
    """Initialises the weights of the wrapped model."""
    export_dtype: torch.dtype
    compute_dtype: torch.dtype
    packed: bool
    """Whether several documents share a row."""
    masking: Masking
    vocabulary: int | None

    def wrap(
        self, recipe: Recipe, ranks: DataParallel, *, init_fn: InitFn | None = None
    ) -> WrappedModel:
        """Distributes it over the ranks. init_fn: instead of its own."""
        return wrap(
            self.model,
            strategy=recipe.strategy,
            checkpointing=recipe.activation_checkpointing,
            compile=recipe.model.compile,
            blocks=self.blocks,
            ranks=ranks,
            init_fn=init_fn or self.init_fn,
        )

    def synthetic_data(self, data: schema.Data, batch: schema.Batch) -> SyntheticData:
        """Micro-batches as full as the recipe's can be, without the data."""
        return synthetic_data(
            data,
            batch,
            vocabulary=self.vocabulary,
            classes=class_count(self.model),
            packed=self.packed,
            masking=self.masking,
        )

    def check_isolation(self, wrapped: WrappedModel, *, device: torch.device) -> None:
        """Raises RecipeError if attention does not keep the documents of a row apart."""
        if not self.packed or self.masking != "mask" or self.vocabulary is None:
            return
        with wrapped.forward_context():
            check_isolation(
                wrapped.model,
                name=type(self.model).__name__,
                vocabulary=self.vocabulary,
                device=device,
                dtype=self.compute_dtype,
            )
        wrapped.reshard()


def prepare_model(
    recipe: Recipe, *, device: torch.device, group: dist.ProcessGroup | None
) -> PreparedModel:
    """Builds the recipe's model, with adapters and document masking.

    device: of the run; this decides the attention. group: ranks that read the weights together.
    """
    data, dtype = recipe.data, compute_dtype(recipe.strategy)
    model = build_model(recipe.model, sequence_length=data.sequence_length, labels=data.labels)
    blocks = find_blocks(model)
    init_fn, export_dtype = starting_weights(recipe.model, model, seed=recipe.run.seed, group=group)
    if recipe.lora is not None:
        add_adapters(model, recipe.lora, base_dtype=dtype, base=recipe.model.path)
        export_dtype = export_dtype if recipe.checkpoint.export_merged else torch.float32
    if recipe.checkpoint.export_dtype is not None:
        export_dtype = getattr(torch, recipe.checkpoint.export_dtype)
    sequences = data.builder is None and data.kind != "classification"
    packed = data.packing and sequences
    if sequences and not packed:
        drop_causal_mask(model)
    masking: Masking = "mask"
    if packed:
        masking = isolate_documents(
            model, sequence_length=data.sequence_length, device=device, compute_dtype=dtype
        )
    return PreparedModel(
        model,
        blocks,
        init_fn,
        export_dtype=export_dtype,
        compute_dtype=dtype,
        packed=packed,
        masking=masking,
        vocabulary=vocabulary_size(model),
    )


def assemble(
    recipe: Recipe,
    *,
    ranks: DataParallel,
    build_data: bool = True,
    skipped_rows: Path | None = None,
    hooks: Hooks | None = None,
) -> Training:
    """Builds the model, its strategy, the data and the optimizer. Every rank must call this.

    build_data: whether this process tokenizes what is not cached (one process of a node).
    skipped_rows: file for the rows of a stream that cannot be used.
    """
    prepared = prepare_model(recipe, device=ranks.device, group=ranks.group)
    model = prepared.model
    flops = flops_per_token(model, sequence_length=recipe.data.sequence_length)
    data = open_run_data(
        recipe,
        model=ModelInputs(
            vocabulary=prepared.vocabulary,
            classes=class_count(model) if recipe.model.task == "sequence_classification" else None,
            padding=padding_id(model),
            masking=prepared.masking,
        ),
        ranks=ranks,
        build=build_data,
        skipped_rows=skipped_rows,
    )
    wrapped = prepared.wrap(recipe, ranks)
    prepared.check_isolation(wrapped, device=ranks.device)
    # Dropout and the user's own code draw different random numbers on each rank
    seed = recipe.run.seed + ranks.rank
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    tokenizer = None
    if ranks.rank == 0 and recipe.checkpoint.export:
        tokenizer = tokenizer_to_keep(recipe.data, model_path=recipe.model.path)
    export = partial(
        export_hugging_face,
        wrapped.module,
        rank=ranks.rank,
        device=ranks.device,
        dtype=prepared.export_dtype,
        merged=recipe.checkpoint.export_merged,
        tokenizer=tokenizer,
    )
    return Training(
        recipe,
        ranks,
        wrapped,
        prepared.blocks,
        data,
        _make_evaluator(recipe, data, ranks),
        flops,
        make_optimizer(wrapped.module, recipe.optimizer),
        LossScale(ranks.device, enabled=prepared.compute_dtype == torch.float16),
        hooks or Hooks(),
        export,
    )


def _make_evaluator(recipe: Recipe, data: RunData, ranks: DataParallel) -> Evaluator | None:
    """None if there is no validation data."""
    if not data.validation:
        return None
    batch, length = recipe.batch, recipe.data.sequence_length
    micro_batch_size = batch.micro_batch_size or max(1, (batch.micro_batch_tokens or 0) // length)
    assert micro_batch_size != "auto"
    return Evaluator(
        data.validation,
        data=recipe.data,
        micro_batch_size=micro_batch_size,
        max_batches=recipe.evaluation.max_batches,
        ranks=ranks,
    )
