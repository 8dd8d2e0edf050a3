"""Builds the model of a recipe on the meta device, and distributes it over the ranks."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from launcher.data.synthetic import SyntheticData, synthetic_data
from launcher.data.token_store import ModelInputs
from launcher.data.tokenizer import hugging_face_tokenizer, new_token_ids, tokenizer_name
from launcher.distributed.rank_layout import RankLayout
from launcher.errors import RecipeError
from launcher.models.adapter_files import adapter_loader
from launcher.models.applied import applied
from launcher.models.attention import (
    check_isolation,
    drop_causal_mask,
    isolate_documents,
    why_masked,
)
from launcher.models.build import (
    build_model,
    class_count,
    find_blocks,
    is_pretrained,
    modules_without_text,
    outer_units,
    parts_without_text,
    vocabulary_size,
)
from launcher.models.chunked_loss import ChunkedHead, computes_loss, logits_transform
from launcher.models.context_parallel import apply_context_parallel, check_context_parallel
from launcher.models.experts import apply_expert_parallel
from launcher.models.float8 import use_float8
from launcher.models.initialization import clean_name
from launcher.models.inputs import WHOLE_ROW, Masking, RowPart
from launcher.models.load import ModelCheckpoint, starting_weights
from launcher.models.lora import add_adapters
from launcher.models.new_rows import grow_vocabulary
from launcher.models.nf4 import quantize_blocks
from launcher.models.precision import kept_in_float32
from launcher.models.preference import check_model
from launcher.models.reward import TokenScores
from launcher.models.target_loss import TargetLoss, load_target_loss
from launcher.models.tensor_parallel import apply_tensor_parallel
from launcher.optimizers.optimizer import make_optimizer
from launcher.recipe import schema
from launcher.recipe.adapter import ADAPTER_CONFIG, PEFT_KEYS, other_base
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
            apply_context_parallel(
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
        experts: Sequence[nn.Module] = ()
        partial: Sequence[tuple[nn.Module, str]] = ()
        if ranks.expert_parallel_size > 1:
            experts = apply_expert_parallel(self.model, ranks.expert_parallel_mesh["expert"])
        if ranks.tensor_parallel_size > 1:
            partial = apply_tensor_parallel(self.model, ranks.tensor_parallel_mesh["tensor"])
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


def _refuse_old_torch(strategy: schema.Strategy) -> None:
    if strategy.kind == "fsdp" and torch.__version__ < "2.12":
        raise RecipeError(
            "lora.quantize: nf4 with strategy.kind: fsdp needs torch 2.12 or newer, because FSDP2 "
            f"of {torch.__version__} fails on frozen parameters of uint8; update it, or use "
            "strategy.kind: ddp"
        )


@contextmanager
def _naming_adapter(path: str | None) -> Iterator[None]:
    """Errors about keys that the adapter in lora.path sets name its file."""
    try:
        yield
    except RecipeError as error:
        if path is None:
            raise
        problems, file = list[str](), Path(path) / ADAPTER_CONFIG
        for problem in error.problems:
            key = problem.partition(":")[0].removeprefix("lora.")
            if key in PEFT_KEYS.values():
                hint = "merge the adapter with peft, and train from the merged model"
                problem = f"lora.path: {file}: {problem.removeprefix('lora.')}; {hint}"
            problems.append(problem)
        raise RecipeError(problems) from None


def _with_adapters(
    recipe: Recipe,
    lora: schema.Lora,
    model: nn.Module,
    init_fn: InitFn,
    *,
    dtype: torch.dtype,
    source: ModelCheckpoint | None,
    new_ids: range,
) -> InitFn:
    """Adds adapters to a meta model and quantizes its blocks, by the recipe. Returns `init_fn` with
    the initialization of the adapters."""
    kept = kept_in_float32(model, dtype, source)
    path, base = lora.path if is_pretrained(recipe.model) else None, recipe.model.path
    with _naming_adapter(path):
        add_adapters(
            model,
            lora,
            base_dtype=dtype,
            kept=kept,
            base=base,
            new_ids=new_ids,
        )
        if lora.quantize is not None:
            _refuse_old_torch(recipe.strategy)
            quantize_blocks(find_blocks(model).values())
    if path is not None and (other := other_base(Path(path), str(base))):
        what = f"the adapter in {path} was trained on {other} (base_model_name_or_path)"
        logger.info(f"note: lora.path: {what}; model.path is {base}")
    return adapter_loader(init_fn, model, None if path is None else Path(path))


def prepare_model(recipe: Recipe, *, device: torch.device) -> PreparedModel:
    """Builds the recipe's model, with adapters and document masking, for this kind of device."""
    data, dtype = recipe.data, compute_dtype(recipe.strategy)
    model: Any = build_model(recipe.model, sequence_length=data.sequence_length, labels=data.labels)
    new_ids = new_token_ids(tokenizer_name(data, recipe.model))
    grow_vocabulary(model, new_ids)
    blocks = find_blocks(model)
    _refuse_scalars(model, recipe.strategy)
    precision = recipe.strategy.mixed_precision
    if precision is not None and precision.float8 is not None:
        use_float8(blocks, precision.float8, device=device, dtype=dtype, model=model)
    seed = recipe.run.seed
    init_fn, export_dtype, source = starting_weights(
        recipe.model, model, seed=seed, new_ids=new_ids
    )
    for name in parts_without_text(model):  # DDP would wait for their gradients
        model.get_parameter(name).requires_grad_(False)
    if recipe.lora is not None:
        init_fn = _with_adapters(
            recipe,
            recipe.lora,
            model,
            init_fn,
            dtype=dtype,
            source=source,
            new_ids=new_ids,
        )
        export_dtype = export_dtype if recipe.checkpoint.export_merged else torch.float32
    if recipe.checkpoint.export_dtype is not None:
        export_dtype = getattr(torch, recipe.checkpoint.export_dtype)
    if recipe.model.task == "reward":
        TokenScores(model)
    if recipe.preference is not None:
        check_model(model, data.sequence_length)
    sequences = data.builder is None and data.kind != "classification"
    # A pair is two documents in a row, also without packing
    packed = (data.packing or data.kind == "preference") and sequences
    masking: Masking = "mask"
    if packed:
        options: Any = {"device": device, "compute_dtype": dtype}
        masking = isolate_documents(model, sequence_length=data.sequence_length, **options)
    elif sequences and recipe.model.task == "causal_lm":
        drop_causal_mask(model)
    transform = logits_transform(model) if sequences else None
    if transform is not None and recipe.model.chunked_loss:
        ChunkedHead(model, transform, compile=recipe.model.compile is True and bool(blocks))
    if recipe.distillation is not None:
        _check_distillation(model, recipe.distillation)
    return PreparedModel(
        model,
        recipe.model.task,
        blocks,
        init_fn,
        export_dtype=export_dtype,
        compute_dtype=dtype,
        packed=packed,
        masking=masking,
        lacks=why_masked(model, device, dtype) if packed else None,
        vocabulary=vocabulary_size(model),
        chunked_loss=computes_loss(model),
        outer_units=() if transform is None else outer_units(model, blocks),
        unused=modules_without_text(model),
        depth=len(blocks),
        source=source,
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
