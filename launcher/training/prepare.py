"""Builds the model of a recipe on the meta device, and distributes it over the ranks."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from launcher.data.synthetic import SyntheticData, synthetic_data
from launcher.data.token_store import ModelInputs
from launcher.data.tokenizer import hugging_face_tokenizer, new_token_ids, tokenizer_name
from launcher.distributed.rank_layout import RankLayout
from launcher.errors import RecipeError
from launcher.models.applied import applied
from launcher.models.attention import check_isolation, why_masked
from launcher.models.build import (
    class_count,
    find_blocks,
    modules_without_text,
    outer_units,
    vocabulary_size,
)
from launcher.models.changes import (
    build_with_tokens,
    change_forward,
    change_weights,
    divide_layers,
    divide_rows,
)
from launcher.models.chunked_loss import computes_loss
from launcher.models.context_parallel import check_context_parallel
from launcher.models.initialization import clean_name
from launcher.models.inputs import WHOLE_ROW, Masking, RowPart
from launcher.models.load import ModelCheckpoint
from launcher.models.precision import kept_in_float32
from launcher.models.preference import check_model
from launcher.models.target_loss import TargetLoss, load_target_loss
from launcher.optimizers.optimizer import make_optimizer
from launcher.recipe import schema
from launcher.recipe.schema import Recipe
from launcher.strategies.base import InitFn, WrappedModel, compute_dtype
from launcher.strategies.wrap import Parts, wrap

logger = logging.getLogger(__name__)


GPU_WIDTH_MULTIPLE = 128
"""cuDNN's attention makes a plan for each new width of rows, which takes up to a second. Rows of up
to 4,096 tokens then have 32 widths at most."""


def width_multiple(device: torch.device) -> int:
    """That of `ModelInputs`. On CPUs each token of padding costs time, and a new width costs none."""
    return GPU_WIDTH_MULTIPLE if device.type == "cuda" else 1


def row_part(ranks: RankLayout) -> RowPart:
    """The part of each row that this rank computes."""
    return RowPart(ranks.context_parallel_rank, ranks.context_parallel_size)


@dataclass(frozen=True)
class PreparedModel:
    """A model on the meta device, ready to be wrapped."""

    model: nn.Module
    task: str
    """model.task"""
    blocks: dict[str, nn.Module]
    init_fn: InitFn
    export_dtype: torch.dtype
    compute_dtype: torch.dtype
    packed: bool
    """Whether several documents share a row."""
    masking: Masking
    lacks: str | None
    """What packed rows lack to be computed without a mask; None: nothing, or no row is packed."""
    vocabulary: int | None
    chunked_loss: bool
    """Whether the model computes the loss without full logits."""
    outer_units: tuple[nn.Module, ...]
    """Embedding, norm and head that FSDP shards as units; empty: as parts of the root."""
    unused: tuple[nn.Module, ...]
    """Modules that text does not use."""
    depth: int
    """Number of blocks, also where a trace deletes some."""
    source: ModelCheckpoint | None
    """The checkpoint that the weights come from; None: they are random."""
    distillation: schema.Distillation | None = None
    target_loss: TargetLoss | None = None
    """The user's loss of each target; None: the objective's own."""

    def wrap(
        self, recipe: Recipe, ranks: RankLayout, *, init_fn: InitFn | None = None
    ) -> WrappedModel:
        """Distributes the model over the ranks; `init_fn` takes the place of its own. Raises
        RecipeError if the budget of activation checkpointing cannot be met, or if the model has
        no context, expert or tensor parallelism of the layout's sizes."""
        checkpointing, kept = recipe.activation_checkpointing, None
        one_rank = recipe.uses_one_rank(ranks.size)
        if (chunked := applied(self.model).chunked_head) is not None:
            # auto, where nothing has replaced it, is off
            chunked.keep_logits = recipe.model.keep_logits is True
        if ranks.context_parallel_size > 1:
            divide_rows(
                self.model,
                ranks.context_parallel_group,
                sequence_length=recipe.data.sequence_length,
                tensor_parallel_size=ranks.tensor_parallel_size,
                lacks=self.lacks,
            )
        if checkpointing is not None and checkpointing.budget is not None:
            # A slow import, which only a budget needs
            from launcher.training.operators import operators_to_keep

            kept = operators_to_keep(
                self.model,
                self.blocks,
                self.synthetic_data(recipe.data, recipe.batch, row_part(ranks)),
                budget=checkpointing.budget,
                dtype=self.compute_dtype,
                autocast=recipe.strategy.kind == "ddp" and not one_rank,
                device=ranks.device.type,
                depth=self.depth,
            )
        experts, partial = divide_layers(
            self.model,
            expert_mesh=(
                ranks.expert_parallel_mesh["expert"] if ranks.expert_parallel_size > 1 else None
            ),
            tensor_mesh=(
                ranks.tensor_parallel_mesh["tensor"] if ranks.tensor_parallel_size > 1 else None
            ),
        )
        return wrap(
            self.model,
            Parts(self.blocks, self.outer_units, self.unused, kept, experts, partial),
            strategy=recipe.strategy,
            checkpointing=checkpointing,
            compile=recipe.model.compile is True,  # auto, where nothing has replaced it, is off
            one_rank=one_rank,
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
            b_ratio=1.0 if recipe.lora is None else recipe.lora.b_ratio,
        )

    def synthetic_data(
        self,
        data: schema.Data,
        batch: schema.Batch,
        part: RowPart = WHOLE_ROW,
        documents: int = 2,
    ) -> SyntheticData:
        """Micro-batches as full as the recipe's can be, without the data. A packed row has this number
        of documents of equal length."""
        return synthetic_data(
            data,
            batch,
            model=ModelInputs(
                vocabulary=self.vocabulary,
                classes=class_count(self.model),
                masking=self.masking,
                part=part,
                task=self.task,
                target_loss=self.target_loss,
            ),
            packed=self.packed,
            documents=documents,
            distillation=self.distillation,
        )

    def check_logits(self, wrapped: WrappedModel, ranks: RankLayout) -> None:
        """Raises RecipeError if the documents of a packed row are not kept apart, or if context
        parallel ranks compute other logits than one that has the whole row. Every rank must call this."""
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
            if ranks.context_parallel_size > 1:
                check_context_parallel(wrapped.model, ranks.group, row_part(ranks), **options)
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


def prepare_model(recipe: Recipe, *, device: torch.device) -> PreparedModel:
    """Builds the recipe's model, with adapters and document masking, for this kind of device."""
    data, dtype = recipe.data, compute_dtype(recipe.strategy)
    new_ids = new_token_ids(tokenizer_name(data, recipe.model))
    model = build_with_tokens(
        recipe.model,
        sequence_length=data.sequence_length,
        labels=data.labels,
        new_ids=new_ids,
    )
    blocks = find_blocks(model)
    _refuse_scalars(model, recipe.strategy)
    precision = recipe.strategy.mixed_precision
    start = change_weights(
        model,
        blocks,
        recipe.model,
        seed=recipe.run.seed,
        new_ids=new_ids,
        lora=recipe.lora,
        float8=None if precision is None else precision.float8,
        fsdp=recipe.strategy.kind == "fsdp",
        dtype=dtype,
        device=device,
    )
    export_dtype = start.dtype
    if recipe.lora is not None and not recipe.checkpoint.export_merged:
        export_dtype = torch.float32
    if recipe.checkpoint.export_dtype is not None:
        export_dtype = getattr(torch, recipe.checkpoint.export_dtype)
    if recipe.preference is not None:
        check_model(model, data.sequence_length)
    sequences = data.builder is None and data.kind != "classification"
    # A pair is two documents in a row, also without packing
    packed = (data.packing or data.kind == "preference") and sequences
    transform = change_forward(
        model,
        reward=recipe.model.task == "reward",
        packed=packed,
        drops_causal_mask=sequences and recipe.model.task == "causal_lm",
        transforms=sequences,
        chunked_loss=recipe.model.chunked_loss,
        compile=recipe.model.compile is True and bool(blocks),
        sequence_length=data.sequence_length,
        dtype=dtype,
        device=device,
    )
    if recipe.distillation is not None:
        _check_distillation(model, recipe.distillation)
    return PreparedModel(
        model,
        recipe.model.task,
        blocks,
        start.init_fn,
        export_dtype=export_dtype,
        compute_dtype=dtype,
        packed=packed,
        masking=applied(model).masking,
        lacks=why_masked(model, device, dtype) if packed else None,
        vocabulary=vocabulary_size(model),
        chunked_loss=computes_loss(model),
        outer_units=() if transform is None else outer_units(model, blocks),
        unused=modules_without_text(model),
        depth=len(blocks),
        source=start.source,
        distillation=recipe.distillation,
        target_loss=_target_loss(recipe),
    )


def teacher_recipe(recipe: Recipe) -> Recipe:
    """The recipe with its teacher in place of the model."""
    assert recipe.distillation is not None
    model = schema.Model(
        path=recipe.distillation.teacher,
        attention=recipe.model.attention,
        trust_remote_code=recipe.model.trust_remote_code,
    )
    strategy, precision = recipe.strategy, recipe.strategy.mixed_precision
    if precision is not None:  # its predictions do not depend on the products of the model
        strategy = replace(strategy, mixed_precision=replace(precision, float8=None))
    return replace(
        recipe,
        model=model,
        lora=None,
        distillation=None,
        strategy=strategy,
        activation_checkpointing=None,
    )


def checked_teacher(
    recipe: Recipe,
    own: PreparedModel,
    prepare: Callable[[Recipe], PreparedModel],
    *,
    planned: bool = False,
) -> PreparedModel:
    """Builds the teacher by calling `prepare` with `teacher_recipe`. Raises RecipeError, which names
    the teacher, if that fails, or if `own`, the model of the recipe, cannot learn from it. `planned`:
    tokenizers that cannot be loaded are not compared."""
    assert recipe.distillation is not None
    try:
        teacher = prepare(teacher_recipe(recipe))
    except RecipeError as error:
        lines = (line.removeprefix("model.path: ") for line in error.problems)
        raise RecipeError([f"distillation.teacher: {line}" for line in lines]) from None
    _check_distillation(teacher.model, recipe.distillation, key="distillation.teacher")
    _check_vocabulary(recipe, own.vocabulary or 0, teacher.vocabulary or 0, planned=planned)
    if teacher.masking != own.masking:
        what = f"keeps packed documents apart by {teacher.masking}, the model by {own.masking}"
        raise RecipeError(f"distillation.teacher: {what}; set data.packing: false")
    return teacher


def prepare_teacher(recipe: Recipe, own: PreparedModel, *, device: torch.device) -> PreparedModel:
    """The teacher of `checked_teacher`, whose weights are frozen in the dtype of forward passes.
    Raises RecipeError if it cannot be used for the recipe's model, `own`."""
    prepared = checked_teacher(recipe, own, functools.partial(prepare_model, device=device))
    kept = kept_in_float32(prepared.model, prepared.compute_dtype, prepared.source)
    for name, parameter in prepared.model.named_parameters():
        parameter.requires_grad_(False)
        if parameter.is_floating_point() and clean_name(name) not in kept:
            parameter.data = parameter.data.to(prepared.compute_dtype)
    return prepared


def _target_loss(recipe: Recipe) -> TargetLoss | None:
    """Raises RecipeError if the function cannot be used."""
    if recipe.objective is None:
        return None
    loss = load_target_loss(recipe.objective)
    if loss.needs == "logits" and recipe.strategy.tensor_parallel_size > 1:
        what = f"{loss.name} needs logits, of which each rank has a part of the vocabulary"
        raise RecipeError(f"objective.loss: {what}: set strategy.tensor_parallel_size: 1")
    return loss


def _check_distillation(
    model: nn.Module, settings: schema.Distillation, *, key: str = "distillation"
) -> None:
    """Raises RecipeError if this model cannot be the teacher, or learn from one."""
    if not computes_loss(model):
        what = f"not available for {type(model).__name__}, which does more than a linear layer"
        raise RecipeError(f"{key}: {what} to compute its logits")
    vocabulary = vocabulary_size(model)
    if vocabulary is not None and settings.top_k > vocabulary:
        what = f"{settings.top_k:,} is more than the vocabulary of {vocabulary:,}"
        raise RecipeError(f"distillation.top_k: {what} of {type(model).__name__}")


def _check_vocabulary(recipe: Recipe, own: int, of_teacher: int, *, planned: bool) -> None:
    """Raises RecipeError if the ids of the teacher's tokens differ from those of the model's. The
    numbers of entries may differ, since some models have spare ones."""
    settings, name = recipe.distillation, tokenizer_name(recipe.data, recipe.model)
    assert settings is not None
    same = None if name is None else _same_tokens(name, settings.teacher)
    if planned and same is None and recipe.data.kind != "tokens":
        return  # perhaps a tokenizer is not downloaded yet; training compares them
    what = f"its tokenizer has other tokens than that of the run, {name}"
    if same is None:  # there is none, as for rows of ids
        same = own == of_teacher
        what = f"its vocabulary of {of_teacher:,} entries is not that of the model, {own:,}"
    if not same:
        advice = "ids must mean the same tokens; choose a teacher of the same family of models"
        raise RecipeError(f"distillation.teacher: {what}: {advice}")


@functools.lru_cache(maxsize=4)
def _same_tokens(name: str, other: str) -> bool | None:
    """Whether two tokenizers give tokens the same ids; None if one of them cannot be loaded."""
    try:
        one, two = (hugging_face_tokenizer(each).get_vocab() for each in (name, other))
    except RecipeError:
        return None
    return bool(one == two)
