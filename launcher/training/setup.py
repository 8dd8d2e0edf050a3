"""Builds everything that a run trains with: model, strategy, data, optimizer, evaluator."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from launcher.data.batching import Position, rows_of
from launcher.data.run_data import RunData, open_run_data, teach_ends, tokenizer_to_keep
from launcher.data.synthetic import SyntheticData, synthetic_data
from launcher.data.token_store import ModelInputs
from launcher.distributed.hardware import peak_flops
from launcher.distributed.process_group import DataParallel
from launcher.errors import RecipeError
from launcher.models.attention import (
    check_isolation,
    drop_causal_mask,
    isolate_documents,
)
from launcher.models.build import (
    build_model,
    class_count,
    embeddings,
    find_blocks,
    flops_per_token,
    outer_units,
    padding_id,
    parts_without_text,
    recomputed_flops,
    vocabulary_size,
)
from launcher.models.chunked_loss import ChunkedHead, computes_loss, logits_transform
from launcher.models.context_parallel import check_shared_rows, share_rows
from launcher.models.hugging_face_files import export_hugging_face
from launcher.models.inputs import WHOLE_ROW, Masking, RowPart
from launcher.models.load import starting_weights
from launcher.models.lora import Read, add_adapters, peft_config
from launcher.models.nf4 import quantize_blocks
from launcher.optimizers.optimizer import LossScale, learning_rate, make_optimizer
from launcher.recipe import schema
from launcher.recipe.schema import Recipe
from launcher.strategies.activation_checkpointing import is_checkpointed
from launcher.strategies.base import InitFn, WrappedModel, compute_dtype
from launcher.strategies.wrap import Parts, wrap
from launcher.training.evaluation import Evaluator
from launcher.training.generation import Generator
from launcher.training.loop import Step, Update, train_steps


@dataclass(frozen=True)
class Flops:
    """Floating-point operations per token."""

    model: float
    """Forward and backward: `flops_per_token`."""
    recomputed_share: float = 0.0
    """Share of all operations that recompute activations; 0 if it is not known."""
    peak: float | None = None
    """A device's per second; None: not known."""


@dataclass(frozen=True)
class Hooks:
    """Functions that the training loop calls; `heartbeat` with the phase that begins."""

    stop_requested: Callable[[], bool] = lambda: False
    save_requested: Callable[[], bool] = lambda: False
    heartbeat: Callable[[str], None] = lambda phase: None


@dataclass(frozen=True)
class Training:
    """Everything that a run trains with, ready to start."""

    recipe: Recipe
    ranks: DataParallel
    wrapped: WrappedModel
    blocks: dict[str, nn.Module]
    data: RunData
    evaluator: Evaluator | None
    flops: Flops
    optimizer: torch.optim.Optimizer
    loss_scale: LossScale
    hooks: Hooks
    export: Callable[[Path], None]
    """Writes the weights as a Hugging Face folder. Every rank must call it."""

    def steps_from(self, position: Position) -> Iterator[Step]:
        """Trains a step for each item, from the position of model and optimizer."""
        optimizer, hooks, data = self.recipe.optimizer, self.hooks, self.data.starting(position)
        peak = optimizer.learning_rate
        rate = learning_rate(self.recipe.schedule, peak=peak, steps=data.steps)
        return train_steps(
            self.wrapped,
            data.batches(
                ranks=self.ranks,
                stop_requested=hooks.stop_requested,
                save_requested=hooks.save_requested,
            ),
            loss=data.training.loss,
            update=Update(self.optimizer, rate, self.loss_scale, optimizer.max_grad_norm),
            ranks=self.ranks.size,
            heartbeat=hooks.heartbeat,
        )

    @property
    def all_steps(self) -> Iterator[Step]:
        """Trains from the beginning."""
        return self.steps_from(Position())


def row_part(ranks: DataParallel) -> RowPart:
    """The part of each row that this rank computes."""
    return RowPart(ranks.context_rank, ranks.context_size)


@dataclass(frozen=True)
class PreparedModel:
    """A model on the meta device, ready to be wrapped."""

    model: nn.Module
    blocks: dict[str, nn.Module]
    init_fn: InitFn
    export_dtype: torch.dtype
    compute_dtype: torch.dtype
    packed: bool
    """Whether several documents share a row."""
    masking: Masking
    vocabulary: int | None
    chunked_loss: bool
    """Whether the model computes the loss without full logits."""
    outer_units: tuple[nn.Module, ...]
    """Embedding, norm and head that FSDP shards as units; empty: as parts of the root."""
    depth: int
    """Number of blocks, also where a trace deletes some."""
    original: Read | None
    """Reads a weight of the checkpoint, for an export that adds adapters to it; None: adapters are
    added to the weights in NF4."""

    def wrap(
        self, recipe: Recipe, ranks: DataParallel, *, init_fn: InitFn | None = None
    ) -> WrappedModel:
        """Distributes the model over the ranks; `init_fn` takes the place of its own. Raises
        RecipeError if the budget of activation checkpointing cannot be met, or if the model cannot
        share rows."""
        checkpointing, kept = recipe.activation_checkpointing, None
        if ranks.context_group is not None:
            length = recipe.data.sequence_length
            share_rows(self.model, ranks.context_group, sequence_length=length)
        if checkpointing is not None and checkpointing.budget is not None:
            # A slow import, which only a budget needs
            from launcher.training.operators import operators_to_keep

            kept = operators_to_keep(
                self.model,
                self.blocks,
                self.synthetic_data(recipe.data, recipe.batch, row_part(ranks)),
                budget=checkpointing.budget,
                strategy=recipe.strategy,
                device=ranks.device.type,
                depth=self.depth,
            )
        return wrap(
            self.model,
            Parts(self.blocks, self.outer_units, kept),
            strategy=recipe.strategy,
            checkpointing=checkpointing,
            compile=recipe.model.compile is True,  # auto, where nothing has replaced it, is off
            ranks=ranks,
            init_fn=init_fn or self.init_fn,
        )

    def make_optimizer(self, wrapped: WrappedModel, recipe: Recipe) -> torch.optim.Optimizer:
        """The recipe's optimizer for the wrapped model."""
        return make_optimizer(
            wrapped.module,
            recipe.optimizer,
            seed=recipe.run.seed,
            optimizer_mesh=wrapped.optimizer_mesh,
            cpu_offload=recipe.strategy.cpu_offload,
            blocks=self.blocks.values(),
        )

    def synthetic_data(
        self, data: schema.Data, batch: schema.Batch, part: RowPart = WHOLE_ROW
    ) -> SyntheticData:
        """Micro-batches as full as the recipe's can be, without the data."""
        return synthetic_data(
            data,
            batch,
            vocabulary=self.vocabulary,
            classes=class_count(self.model),
            packed=self.packed,
            masking=self.masking,
            part=part,
        )

    def check_logits(self, wrapped: WrappedModel, ranks: DataParallel) -> None:
        """Raises RecipeError if the documents of a packed row are not kept apart, or if ranks that
        share a row compute other logits than one that has it whole. Every rank must call this."""
        if self.vocabulary is None:
            return
        options: Any = {
            "name": type(self.model).__name__,
            "vocabulary": self.vocabulary,
            "device": ranks.device,
            "dtype": self.compute_dtype,
        }
        with wrapped.forward_context():
            if self.packed and self.masking == "mask":
                check_isolation(wrapped.model, **options)
                wrapped.reshard()
            if ranks.context_group is not None:
                check_shared_rows(wrapped.model, ranks.group, row_part(ranks), **options)
                wrapped.reshard()


def _refuse_scalars(model: nn.Module, strategy: schema.Strategy) -> None:
    """FSDP shards the first dimension of a parameter."""
    scalars = [name for name, parameter in model.named_parameters() if not parameter.ndim]
    if strategy.kind == "fsdp" and scalars:
        raise RecipeError(
            "strategy.kind: fsdp cannot shard parameters without dimensions: "
            f"{', '.join(scalars)}; "
            "give each the shape (1,) in the model, or use strategy.kind: ddp"
        )


def _refuse_old_torch(strategy: schema.Strategy) -> None:
    if strategy.kind == "fsdp" and torch.__version__ < "2.12":
        raise RecipeError(
            "lora.quantize: nf4 with strategy.kind: fsdp needs torch 2.12 or newer, because FSDP2 of "
            f"{torch.__version__} fails on frozen parameters of uint8; update it, or use "
            "strategy.kind: ddp"
        )


def prepare_model(recipe: Recipe, *, device: torch.device) -> PreparedModel:
    """Builds the recipe's model, with adapters and document masking, for this kind of device."""
    data, dtype = recipe.data, compute_dtype(recipe.strategy)
    model = build_model(recipe.model, sequence_length=data.sequence_length, labels=data.labels)
    blocks = find_blocks(model)
    _refuse_scalars(model, recipe.strategy)
    init_fn, export_dtype, stored = starting_weights(recipe.model, model, seed=recipe.run.seed)
    original = None
    if stored is not None and recipe.checkpoint.export_base == "original":
        original = stored.reader()
    for name in parts_without_text(model):  # DDP would wait for their gradients
        model.get_parameter(name).requires_grad_(False)
    if recipe.lora is not None:
        add_adapters(model, recipe.lora, base_dtype=dtype, base=recipe.model.path)
        if recipe.lora.quantize is not None:
            _refuse_old_torch(recipe.strategy)
            if getattr(peft_config(model), "target_parameters", None):
                raise RecipeError(
                    "lora.quantize: peft gives this model's experts adapters, because layers of "
                    "lora.target_modules have the names of their weights: name other layers"
                )
            quantize_blocks(blocks.values())
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
    transform = logits_transform(model) if sequences else None
    if transform is not None and recipe.model.chunked_loss:
        ChunkedHead(model, transform, compile=recipe.model.compile is True and bool(blocks))
    return PreparedModel(
        model,
        blocks,
        init_fn,
        export_dtype=export_dtype,
        compute_dtype=dtype,
        packed=packed,
        masking=masking,
        vocabulary=vocabulary_size(model),
        chunked_loss=computes_loss(model),
        outer_units=() if transform is None else outer_units(model, blocks),
        depth=len(blocks),
        original=original,
    )


def assemble(
    recipe: Recipe,
    *,
    ranks: DataParallel,
    prepared: PreparedModel | None = None,
    build_data: bool = True,
    skipped_rows: Path | None = None,
    hooks: Hooks | None = None,
) -> Training:
    """Builds everything. Every rank must call this. `prepared` is the model if it is built already.
    With `build_data` this process tokenizes what is not cached (one process of a node).
    `skipped_rows` is a file for the rows of a stream that cannot be used."""
    ranks = ranks.sharing_rows(recipe.strategy.context_parallel_size)
    prepared = prepared or prepare_model(recipe, device=ranks.device)
    model = prepared.model
    data = open_run_data(
        recipe.data,
        recipe.batch,
        recipe.run,
        model=ModelInputs(
            tokenizer=recipe.model.path,
            vocabulary=prepared.vocabulary,
            classes=class_count(model) if recipe.model.task == "sequence_classification" else None,
            padding=padding_id(model),
            masking=prepared.masking,
            part=row_part(ranks),
        ),
        ranks=ranks,
        build=build_data,
        skipped_rows=None if ranks.context_rank else skipped_rows,
    )
    wrapped = prepared.wrap(recipe, ranks)
    prepared.check_logits(wrapped, ranks)
    # Dropout and the user's own code draw different random numbers on each rank
    seed = recipe.run.seed + ranks.rank
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    if recipe.checkpoint.export or recipe.evaluation.generate is not None:
        teach_ends(model, recipe.data, model_path=recipe.model.path)
    return Training(
        recipe,
        ranks,
        wrapped,
        prepared.blocks,
        data,
        _make_evaluator(recipe, data, ranks),
        _count_flops(
            prepared,
            wrapped,
            recipe.activation_checkpointing,
            recipe.data.sequence_length,
            ranks.device,
        ),
        prepared.make_optimizer(wrapped, recipe),
        LossScale(ranks.device, enabled=prepared.compute_dtype == torch.float16),
        hooks or Hooks(),
        _make_export(prepared, wrapped, recipe, ranks),
    )


def _make_export(
    prepared: PreparedModel, wrapped: WrappedModel, recipe: Recipe, ranks: DataParallel
) -> Callable[[Path], None]:
    """`Training.export`. The tokenizer is loaded now, because it may be missing."""
    tokenizer = None
    if ranks.rank == 0 and recipe.checkpoint.export:
        tokenizer = tokenizer_to_keep(recipe.data, model_path=recipe.model.path)
    return partial(
        export_hugging_face,
        wrapped.module,
        rank=ranks.rank,
        device=ranks.device,
        dtype=prepared.export_dtype,
        merged=recipe.checkpoint.export_merged,
        original=prepared.original,
        tokenizer=tokenizer,
    )


def _count_flops(
    prepared: PreparedModel,
    wrapped: WrappedModel,
    checkpointing: schema.ActivationCheckpointing | None,
    tokens: int,
    device: torch.device,
) -> Flops:
    """Checkpointed blocks are recomputed, and with a chunked loss the logits, too."""
    model, recomputed = prepared.model, 0.0
    flops = flops_per_token(model, sequence_length=tokens)
    blocks = [module for module in wrapped.module.modules() if is_checkpointed(module)]
    if checkpointing is None or checkpointing.mode == "full":
        recomputed = recomputed_flops(model, blocks, tokens=tokens)
    elif checkpointing.budget is None:  # half of the matrix products
        recomputed = recomputed_flops(model, blocks, tokens=0) / 2
    if prepared.chunked_loss and (checkpointing is None or checkpointing.budget is None):
        recomputed += 2.0 * embeddings(model)[1].weight.numel()
    peak = peak_flops(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    return Flops(flops, recomputed / (flops + recomputed) if recomputed else 0.0, peak)


def _make_evaluator(recipe: Recipe, data: RunData, ranks: DataParallel) -> Evaluator | None:
    """None if there is no validation data."""
    if not data.validation:
        return None
    length, generate = recipe.data.sequence_length, recipe.evaluation.generate
    rows, generator = rows_of(recipe.batch, sequence_length=length), None
    if generate is not None and (tokenizer := recipe.data.tokenizer or recipe.model.path):
        generator = Generator(generate, tokenizer=tokenizer, rows=rows, longest=length)
    return Evaluator(
        data.validation,
        data=recipe.data,
        micro_batch_size=rows,
        max_batches=recipe.evaluation.max_batches,
        ranks=ranks,
        generator=generator,
    )
