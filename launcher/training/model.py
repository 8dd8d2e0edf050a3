"""The model of a recipe: built on the meta device, and then distributed over the ranks.

`prepare_model` needs neither data, weights nor a process group, so the plan uses it, too.
`training/setup.py` builds all that a run trains with around it.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from launcher.data.attachment_inputs import ModelAttachments, attachments_of, blank_arguments
from launcher.data.token_store import ModelTraits
from launcher.data.tokenizer import new_token_ids, tokenizer_name
from launcher.distributed.rank_layout import RankLayout
from launcher.distributed.units import Unit
from launcher.errors import RecipeError
from launcher.models.adapted import adapted_weights
from launcher.models.attention import check_both_ways, check_isolation, missing_for_varlen
from launcher.models.changes import (
    WeightSource,
    build_with_tokens,
    change_forward,
    change_weights,
)
from launcher.models.context_parallel import check_context_parallel, ring_of
from launcher.models.description import (
    ModelDescription,
    describe,
    has_no_head,
    outer_units,
    parts_without_text,
)
from launcher.models.division import Divided, check_all, divisions_of
from launcher.models.multi_token import prediction_layers
from launcher.models.names import clean_name
from launcher.models.pipeline import chain_of, check_stages
from launcher.models.precision import computes_in_float32, kept_in_float32, mixes_dtypes
from launcher.models.record import record_of, whole_model
from launcher.models.ring import missing_for_ring
from launcher.models.row_division import WHOLE_ROWS, RowDivision, whole_rows
from launcher.models.tower_inputs import is_of_tower
from launcher.models.towers import tower_blocks, unused_modules
from launcher.objectives.base import Objective
from launcher.objectives.make import make_objective
from launcher.objectives.synthetic import SyntheticData, synthetic_data
from launcher.objectives.teacher import checked_teacher
from launcher.optimizers.groups import decays_of, ratios_of
from launcher.optimizers.offload import StateFile
from launcher.optimizers.optimizer import make_optimizer
from launcher.recipe import schema
from launcher.recipe.schema import Recipe
from launcher.strategies.activation_checkpointing import Kept
from launcher.strategies.base import InitFn, WrappedModel, compute_dtype
from launcher.strategies.pipeline import Pipeline
from launcher.strategies.wrap import REAL, Parts, Wrappers, wrap

logger = logging.getLogger(__name__)


GPU_WIDTH_MULTIPLE = 128
"""cuDNN's attention makes a plan for each new width of rows, which takes up to a second. Rows of up
to 4,096 tokens then have 32 widths at most."""


def width_multiple(device: torch.device) -> int:
    """`ModelTraits.width_multiple` for a device. On CPUs each token of padding costs time, and a new
    width costs none."""
    return GPU_WIDTH_MULTIPLE if device.type == "cuda" else 1


@dataclass(frozen=True)
class PreparedModel:
    """A model on the meta device, ready to be wrapped by a strategy."""

    model: nn.Module
    objective: Objective
    weights: WeightSource
    """Where its weights come from."""
    export_dtype: torch.dtype
    compute_dtype: torch.dtype
    packed: bool
    """Whether several documents share a row."""
    missing_for_varlen: str | None
    """See the function of this name. None if no row is packed."""
    missing_for_ring: str | None
    """See the function of this name."""
    units: list[Unit]
    """The units of FSDP beside the blocks: modules that are never called; embedding, norm and head, which
    otherwise are parts of the root."""
    tower: dict[str, nn.Module]
    """The blocks of the towers by name, if rows have attachments."""
    attachments: ModelAttachments
    """How the model takes what rows have beside text."""
    planned: ModelAttachments
    """How rows without data have attachments."""

    @property
    def description(self) -> ModelDescription:
        """What the model consists of."""
        return describe(self.model)

    def row_division(self, strategy: schema.Strategy, ranks: RankLayout) -> RowDivision:
        """How the ranks divide rows, and which part this rank computes. Every rank must call this."""
        size, tensor = ranks.context_parallel_size, ranks.tensor_parallel_size
        ring = strategy.context_parallel_ring
        found = ring_of(whole_model(self.model), size, ring, tensor_parallel_size=tensor)
        return RowDivision.of(ranks, found)

    def wrap(
        self,
        recipe: Recipe,
        ranks: RankLayout,
        *,
        init_fn: InitFn | None = None,
        wrappers: Wrappers = REAL,
    ) -> WrappedModel:
        """Distributes the model over the ranks; `init_fn` takes the place of its own, and
        `wrappers` of the classes that wrap it. Raises RecipeError if the budget of activation
        checkpointing cannot be met, or if the model has no context, expert or tensor parallelism of
        the layout's sizes."""
        one_rank = recipe.uses_one_rank(ranks.size)
        if (head := record_of(self.model).head) is not None:
            head.keep_logits = recipe.model.keeps_logits
        divisions = divisions_of(
            ranks,
            rows := self.row_division(recipe.strategy, ranks),
            sequence_length=recipe.data.row_length,
            missing_for_varlen=self.missing_for_varlen,
            missing_for_ring=self.missing_for_ring,
            stages_of_rank=recipe.strategy.stages_of_rank,
            pipeline_blocks=recipe.strategy.pipeline_blocks,
            dtype=self.compute_dtype,
        )
        model: Any = self.model
        check_all(divisions, model)
        divided = Divided(self.description.blocks)
        for division in divisions:
            if division.whole_layers:
                division.divide(model, divided)
        kept = self._kept(recipe, ranks.stage, rows, one_rank=one_rank)
        for division in divisions:
            if not division.whole_layers:
                division.divide(model, divided)
        documents = record_of(model).documents
        wrapped = wrap(
            model,
            Parts(
                divided.blocks,
                divided.without_missing(model, self.units),
                divided.partial,
                kept,
                in_float32=computes_in_float32(model, self.compute_dtype),
                mixes_dtypes=mixes_dtypes(model, self.compute_dtype),
                tower=divided.present(model, self.tower) | prediction_layers(model),
                recomputation=None if documents is None else documents.recomputation,
            ),
            strategy=recipe.strategy,
            checkpointing=recipe.activation_checkpointing,
            compile=recipe.model.compiles,
            one_rank=one_rank,
            ranks=ranks.stage,
            init_fn=init_fn or self.weights.init_fn,
            wrappers=wrappers,
        )
        if divided.stages is not None:
            schedule = recipe.strategy.pipeline_schedule
            Pipeline(divided.stages, schedule=schedule).attach(wrapped)
        return wrapped

    def _kept(
        self, recipe: Recipe, ranks: RankLayout, rows: RowDivision, *, one_rank: bool
    ) -> dict[str, Kept] | None:
        """What the budget of activation checkpointing keeps of each block; None without a budget."""
        checkpointing = recipe.activation_checkpointing
        if checkpointing is None or checkpointing.budget is None:
            return None
        # A slow import, which only a budget needs
        from launcher.training.operators import operators_to_keep

        return operators_to_keep(
            self.model,
            self.description.blocks,
            self.synthetic_data(recipe.data, recipe.batch, rows),
            budget=checkpointing.budget,
            dtype=self.compute_dtype,
            autocast=recipe.strategy.kind == "ddp" and not one_rank,
            device=ranks.device.type,
            depth=self.description.depth,
        )

    def make_optimizer(
        self,
        wrapped: WrappedModel,
        recipe: Recipe,
        *,
        state_file: Callable[[Path, int], StateFile] | None = None,
    ) -> torch.optim.Optimizer:
        """Makes the recipe's optimizer for the wrapped model. state_file: see
        `OffloadedOptimizer`."""
        return make_optimizer(
            wrapped.module,
            recipe.optimizer,
            seed=recipe.run.seed,
            optimized=wrapped.optimized,
            cpu_offload=recipe.strategy.cpu_offload,
            blocks=self.description.blocks.values(),
            ratios=learning_rate_ratios(whole_model(wrapped.module), recipe),
            decays=decays_of(whole_model(wrapped.module), recipe.optimizer),
            state_file=state_file,
        )

    def synthetic_data(
        self,
        data: schema.Data,
        batch: schema.Batch,
        division: RowDivision = WHOLE_ROWS,
        documents: int = 2,
    ) -> SyntheticData:
        """Makes micro-batches without the data, as full as the recipe's micro-batches can be, also
        of attachments. A packed row has this number of documents of equal length."""
        return synthetic_data(
            self.objective,
            data,
            batch,
            model=ModelTraits(
                vocabulary=self.description.vocabulary,
                classes=describe(self.model).classes,
                document_masking=record_of(self.model).document_masking,
                recurrent=record_of(self.model).recurrent,
                division=division,
                attachments=self.planned,
            ),
            packed=self.packed,
            documents=documents,
        )

    def check_logits(self, wrapped: WrappedModel, ranks: RankLayout, rows: RowDivision) -> None:
        """Raises RecipeError if the documents of a packed row are not kept apart, or if context
        parallel ranks compute other logits than a rank that has the whole row. Every rank must call
        this."""
        if self.description.vocabulary is None:
            return
        options: Any = {
            "name": type(self.model).__name__,
            "vocabulary": self.description.vocabulary,
            "device": ranks.device,
            "dtype": self.compute_dtype,
        }
        checks = list[Callable[[nn.Module], None]]()
        record = record_of(self.model)
        if self.packed and (record.document_masking == "mask" or record.recurrent):
            isolation = functools.partial(
                check_isolation,
                document_masking=record.document_masking,
                recurrent=record.recurrent,
            )
            checks.append(whole_rows()(functools.partial(isolation, **options)))
        if getattr(self.model.config, "is_causal", True) is False and has_no_head(self.model):
            checks.append(functools.partial(check_both_ways, **options))
        if rows.size > 1:
            group = ranks.group
            checks.append(
                functools.partial(check_context_parallel, group=group, rows=rows, **options)
            )
        for check in checks:
            with wrapped.evaluating():
                wrapped.without_gradients(check)


def learning_rate_ratios(model: nn.Module, recipe: Recipe) -> dict[str, float]:
    """Ratios of learning rates over that of the recipe, by the clean names of parameters. model: with
    all of its blocks. Raises RecipeError as `ratios_of`."""
    ratios: dict[str, float] = {}
    if recipe.lora is not None and recipe.lora.b_ratio != 1.0:
        tensors = (each for weight in adapted_weights(model) for each in weight.tensors().values())
        ratios |= {each.name: recipe.lora.b_ratio for each in tensors if each.is_up}
    for kind, section in recipe.attachments.items():
        if section.learning_rate_ratio != 1.0:
            names = [clean_name(name) for name, _ in model.named_parameters()]
            parts = {clean_name(n) for n in parts_without_text(model) if is_of_tower(n, [kind])}
            ratios |= {name: section.learning_rate_ratio for name in names if name in parts}
    for name, ratio in ratios_of(model, recipe.optimizer).items():
        ratios[name] = ratios.get(name, 1.0) * ratio
    return ratios


def _refuse_scalars(model: nn.Module, strategy: schema.Strategy) -> None:
    """Raises RecipeError for parameters without dimensions: FSDP shards the first dimension."""
    scalars = [name for name, parameter in model.named_parameters() if not parameter.ndim]
    if strategy.kind == "fsdp" and scalars:
        raise RecipeError(
            "strategy.kind: fsdp cannot shard parameters without dimensions: "
            f"{', '.join(scalars)}; "
            "give each the shape (1,) in the model, or use strategy.kind=ddp"
        )


def prepare_model(recipe: Recipe, *, device: torch.device) -> PreparedModel:
    """Builds the recipe's model, with adapters and document masking, for this kind of device."""
    data, dtype = recipe.data, compute_dtype(recipe.strategy)
    objective = make_objective(recipe)
    if objective.needs_logits and recipe.strategy.tensor_parallel_size > 1:
        assert recipe.objective is not None
        what = (
            f"{recipe.objective.loss} needs logits, of which each rank has a part of the vocabulary"
        )
        raise RecipeError(f"objective.loss: {what}: set strategy.tensor_parallel_size=1")
    new_ids = new_token_ids(tokenizer_name(data, recipe.model))
    model = build_with_tokens(
        recipe.model,
        sequence_length=data.sequence_length,
        labels=data.labels,
        new_ids=new_ids,
    )
    blocks = describe(model).blocks
    _refuse_scalars(model, recipe.strategy)
    precision = recipe.strategy.mixed_precision
    weights = change_weights(
        model,
        blocks,
        recipe.model,
        seed=recipe.run.seed,
        new_ids=new_ids,
        attachments={kind: section.train for kind, section in recipe.attachments.items()},
        blank=blank_arguments(recipe.attachments, recipe.model, model),
        lora=recipe.lora,
        float8=None if precision is None else precision.float8,
        fsdp=recipe.strategy.kind == "fsdp",
        dtype=dtype,
        device=device,
    )
    export_dtype = weights.dtype
    if recipe.lora is not None and not recipe.checkpoint.export_merged:
        export_dtype = torch.float32
    if recipe.checkpoint.export_dtype is not None:
        export_dtype = getattr(torch, recipe.checkpoint.export_dtype)
    objective.change_model(model, row_length=data.row_length)
    packed = objective.packs(data)
    transform = change_forward(
        model,
        blocks,
        mlp_tile=recipe.model.mlp_tile,
        neftune_noise_alpha=recipe.model.neftune_noise_alpha,
        packed=packed,
        drops_causal_mask=objective.causal,
        transforms=objective.predicts_tokens,
        chunked_loss=recipe.model.chunked_loss,
        compile=recipe.model.compiles and bool(blocks),
        sequence_length=data.row_length,
        dtype=dtype,
        device=device,
        attention=recipe.model.attention,
    )
    objective.check_model(model)
    objective = objective.of_model(model)
    # At once, so that a plan reports patterns that match nothing
    ratios_of(model, recipe.optimizer), decays_of(model, recipe.optimizer)
    attachments = attachments_of(recipe.attachments, recipe.model, model)
    return PreparedModel(
        model,
        objective,
        weights,
        export_dtype=export_dtype,
        compute_dtype=dtype,
        packed=packed,
        missing_for_varlen=missing_for_varlen(model, device, dtype) if packed else None,
        missing_for_ring=missing_for_ring(model, device, dtype),
        units=[
            *(Unit((module,), called=False) for module in unused_modules(model)),
            *(outer_units(model, blocks) if transform is not None else ()),
        ],
        tower=tower_blocks(model),
        attachments=attachments,
        planned=attachments.planned(model),
    )


def prepare_teacher(
    recipe: Recipe, own: PreparedModel, name: str, *, device: torch.device
) -> PreparedModel:
    """Builds the teacher of this name, and freezes its weights in the dtype of forward passes. Raises
    RecipeError if it cannot teach the recipe's model, `own` (`checked_teacher`)."""
    prepared = checked_teacher(recipe, own, functools.partial(prepare_model, device=device), name)
    stages = recipe.strategy.pipeline_parallel_size * recipe.strategy.stages_of_rank
    if stages > 1:
        assert recipe.distillation is not None
        try:
            chain_of(prepared.model, blocks := prepared.description.blocks)
            check_stages(len(blocks), stages, None)
        except RecipeError as error:
            key = recipe.distillation.key_of(name)
            raise RecipeError([f"{key}: {line}" for line in error.problems]) from None
    kept = kept_in_float32(prepared.model, prepared.compute_dtype, prepared.weights.source)
    for name, parameter in prepared.model.named_parameters():
        parameter.requires_grad_(False)
        if parameter.is_floating_point() and clean_name(name) not in kept:
            parameter.data = parameter.data.to(prepared.compute_dtype)
    return prepared
