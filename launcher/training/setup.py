"""Builds everything that a run trains with: model, strategy, data, optimizer, evaluator.

`training/model.py` builds the model alone.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import nn

from launcher.data.batching import Position, rows_of
from launcher.data.rounds import round_bounds
from launcher.data.run_data import (
    RunData,
    TrainedPrompts,
    open_run_data,
    set_stop_tokens,
    tokenizer_to_keep,
    trained_prompts,
)
from launcher.data.token_store import ModelTraits
from launcher.data.tokenizer import tokenizer_name
from launcher.distributed.hardware import peak_flops
from launcher.distributed.rank_layout import RankLayout
from launcher.models.description import describe, embeddings, padding_id
from launcher.models.expert_load import ExpertLoad
from launcher.models.flops import TokenFlops, recomputed_flops, token_flops
from launcher.models.head import chunk_width, computes_loss
from launcher.models.hugging_face_files import export_hugging_face
from launcher.models.record import record_of, whole_model
from launcher.models.router_balance import RouterBalance, router_balance, wants_balance
from launcher.models.row_division import RowDivision
from launcher.objectives.base import BeforeTraining, dataset_objective
from launcher.objectives.kept_files import KeptFile
from launcher.objectives.teacher import TeacherModel
from launcher.optimizers.average import averages_in_place
from launcher.optimizers.optimizer import LossScale, learning_rate
from launcher.recipe.schema import Recipe
from launcher.strategies.activation_checkpointing import is_checkpointed
from launcher.strategies.base import WrappedModel
from launcher.training.evaluation import Evaluator
from launcher.training.generation import Generator
from launcher.training.loop import Step, Update, train_steps
from launcher.training.model import (
    PreparedModel,
    prepare_model,
    prepare_teacher,
    width_multiple,
)
from launcher.training.rounds import Rounds

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Flops:
    """Floating-point operations per token."""

    model: TokenFlops
    """Forward and backward."""
    recomputed: TokenFlops = field(default_factory=TokenFlops)
    """For the recomputation of activations; 0 if it is not known."""
    peak: float | None = None
    """The most that a device computes per second; None: not known."""

    def recomputed_share(self, document_length: float) -> float:
        """Share of all operations that recompute activations, for tokens of such documents."""
        recomputed = self.recomputed.at(document_length)
        return recomputed / (self.model.at(document_length) + recomputed) if recomputed else 0.0


@dataclass(frozen=True)
class Hooks:
    """Functions that the training loop calls. It passes the phase that begins to `heartbeat`, and
    ends a step before a micro-batch if `stop_reached` returns true."""

    stop_requested: Callable[[], bool] = lambda: False
    save_requested: Callable[[], bool] = lambda: False
    heartbeat: Callable[[str], None] = lambda phase: None
    stop_reached: Callable[[], bool] = lambda: False
    wait_for_copies: Callable[[], None] = lambda: None
    """Waits until a save that has begun has copied the weights, before they change."""
    preparing: Callable[[], AbstractContextManager[Callable[[str], None]]] = lambda: nullcontext(
        lambda phase: None
    )
    """A context in which a round is prepared, between two steps. Its value takes the phases."""


@dataclass(frozen=True)
class Training:
    """Everything that a run trains with, ready to start."""

    recipe: Recipe
    ranks: RankLayout
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
    prompts: TrainedPrompts | None = None
    """None on ranks that neither generate nor record them."""
    rounds: Rounds | None = None
    """None: the data is the same for the whole run."""

    def steps_from(self, position: Position) -> Iterator[Step]:
        """Trains from a position on, which model and optimizer must have reached. Yields each
        step. Before each round its data is prepared."""
        data, rounds = self.data.starting(position), self.rounds
        steps = data.steps
        if rounds is None:
            yield from self._steps(data, steps=steps)
            return
        rounds.forget_after(data)
        while data.start.step < steps:
            with self.hooks.preparing() as heartbeat:
                of_round = rounds.prepare(data, heartbeat=heartbeat)
            done = data.start.step
            for step in self._steps(of_round, steps=steps):
                done = step.number
                yield step
            if done < of_round.steps:  # the run stops in a step
                return
            samples = of_round.samples_after(done)
            data = data.starting(replace(position, step=done, samples=samples))

    def _steps(self, data: RunData, *, steps: int) -> Iterator[Step]:
        """Trains on this data. steps: of the whole run."""
        optimizer, hooks = self.recipe.optimizer, self.hooks
        objective = dataset_objective(data.training)
        peak = optimizer.learning_rate
        rate = learning_rate(self.recipe.schedule, peak=peak, steps=steps)
        return train_steps(
            self.wrapped,
            data.batches(
                ranks=self.ranks,
                stop_requested=hooks.stop_requested,
                save_requested=hooks.save_requested,
            ),
            loss=objective.loss,
            prepare_step=partial(objective.prepare_step, ranks=self.ranks),
            update=Update(
                self.optimizer,
                rate,
                self.loss_scale,
                optimizer.max_grad_norm,
                average_decay=optimizer.ema,
                wait_for_copies=hooks.wait_for_copies,
            ),
            averaged_over=self.ranks.computing_groups,
            counts=self.ranks.counts,
            router_balance=self.router_balance,
            expert_load=self.expert_load,
            heartbeat=hooks.heartbeat,
            stop_reached=hooks.stop_reached,
        )

    def ends_round(self, step: int) -> bool:
        """Whether a round follows this step."""
        steps = self.data.steps
        return self.rounds is not None and step < steps and step in self.rounds.ends_at(steps)

    @property
    def router_balance(self) -> RouterBalance | None:
        """The balance loss of the experts over global batches; None: there is none."""
        return record_of(self.wrapped.module).router_balance

    @property
    def expert_load(self) -> ExpertLoad | None:
        """How often the experts are chosen; None: there are none."""
        return record_of(self.wrapped.module).expert_load

    def evaluated_weights(self) -> AbstractContextManager[None]:
        """A context for evaluations. With evaluation.ema, and of a schedule-free optimizer, the averages
        of the weights take their place."""
        averaged = self.recipe.evaluation.ema or self.recipe.optimizer.schedule_free
        return averages_in_place(self.optimizer) if averaged else nullcontext()

    @property
    def all_steps(self) -> Iterator[Step]:
        """Trains from the beginning."""
        return self.steps_from(Position())


def assemble(
    recipe: Recipe,
    *,
    ranks: RankLayout,
    prepared: PreparedModel | None = None,
    build_data: bool = True,
    run_dir: Path | None = None,
    kept_file: KeptFile = None,
    hooks: Hooks | None = None,
    heartbeat: Callable[[str], None] = lambda phase: None,
    check_data: Callable[[RunData], None] = lambda data: None,
) -> Training:
    """Builds everything. Every rank must call this. `prepared` is the model if it is built already.
    Calls `heartbeat` with each part that it begins to build, and `check_data` when the data is
    open. With `build_data` this process tokenizes what is not cached (one process of a node).
    `run_dir`: see `open_run_data`.
    `kept_file`: a cache of what the objective computes before the first step."""
    ranks = ranks.with_sizes(recipe.strategy)
    prepared = prepared or prepare_model(recipe, device=ranks.device)
    model, objective = prepared.model, prepared.objective
    rows = prepared.row_division(recipe.strategy, ranks)
    if rows.ring > 1 and ranks.rank == 0:
        each = f"{rows.heads} ranks that divide the heads" if rows.heads > 1 else "one rank"
        logger.info(f"rows: {rows.ring} groups exchange keys and values, each of {each}")
    heartbeat("data")
    tokenizer = tokenizer_name(recipe.data, recipe.model)
    traits = _traits(prepared, tokenizer, rows, ranks)
    data = open_run_data(
        recipe.data,
        recipe.batch,
        recipe.run,
        objective=objective,
        model=traits,
        ranks=ranks,
        build=build_data,
        run_dir=run_dir,
    )
    check_data(data)
    about = BeforeTraining(
        ranks,
        rows_of(recipe.batch, row_length=recipe.data.row_length),
        kept_file,
        traits,
        partial(_build_teacher, recipe, prepared, ranks),
        build_data,
    )
    distillation = recipe.distillation
    in_rounds = distillation is not None and distillation.answers != "data"
    if distillation is not None and in_rounds:  # what cannot work ends the run now
        for name in distillation.paths():
            prepare_teacher(recipe, prepared, name, device=ranks.device)
        round_bounds(data.steps, distillation.rounds)
    if not in_rounds:
        data = objective.before_model(data, about)
    heartbeat("strategy")
    wrapped = prepared.wrap(recipe, ranks)
    prepared.check_logits(wrapped, ranks, rows)
    if recipe.model.router_balance == "global_batch":
        record_of(model).router_balance = router_balance(model, ranks)
    if recipe.model.task != "causal_lm" and wants_balance(model):
        what = f"output_router_logits: the loss of model.task={recipe.model.task}"
        logger.info(f"note: {what} has no part that balances experts")
    if (load := record_of(model).expert_load) is not None:
        load.start(model, ranks, rate=recipe.model.router_bias_update_rate)
    data = objective.with_initial_weights(data, wrapped, about)
    _seed_generators(recipe.run.seed + ranks.random_stream)
    prompts = None
    generates = (
        bool(recipe.checkpoint.export) or recipe.evaluation.generate is not None or in_rounds
    )
    if ranks.rank == 0 or generates:  # rank 0 records them in checkpoints
        prompts = trained_prompts(recipe.data, recipe.model, data.training.prompt_forms)
        if generates:
            set_stop_tokens(model, prompts.ends, tokenizer)
    optimizer = prepared.make_optimizer(wrapped, recipe)
    rounds = None
    if distillation is not None and in_rounds:
        assert run_dir is not None
        rounds = Rounds(
            distillation,
            recipe.data,
            recipe.batch,
            recipe.run.seed,
            run_dir / "rounds",
            objective=objective,
            wrapped=wrapped,
            about=about,
        )
    return Training(
        recipe,
        ranks,
        wrapped,
        prepared.description.blocks,
        data,
        _make_evaluator(recipe, data, ranks),
        _count_flops(prepared, wrapped, recipe, ranks),
        optimizer,
        LossScale(ranks.device, enabled=prepared.compute_dtype == torch.float16),
        hooks or Hooks(),
        _make_export(prepared, wrapped, optimizer, recipe, ranks, prompts),
        prompts,
        rounds,
    )


def _traits(
    prepared: PreparedModel, tokenizer: str | None, rows: RowDivision, ranks: RankLayout
) -> ModelTraits:
    model, record = prepared.model, record_of(prepared.model)
    return ModelTraits(
        tokenizer=tokenizer,
        vocabulary=prepared.description.vocabulary,
        classes=describe(model).classes if prepared.objective.trains_classes else None,
        padding=padding_id(model),
        document_masking=record.document_masking,
        recurrent=record.recurrent,
        division=rows,
        width_multiple=width_multiple(ranks.device),
        attachments=prepared.attachments,
    )


def _build_teacher(
    recipe: Recipe, prepared: PreparedModel, ranks: RankLayout, name: str
) -> TeacherModel:
    """Builds the teacher of a name on the meta device."""
    assert recipe.distillation is not None
    teacher = prepare_teacher(recipe, prepared, name, device=ranks.device)
    rows = teacher.row_division(recipe.strategy, ranks)

    def load() -> WrappedModel:
        strategy = replace(recipe.strategy, pipeline_blocks=None)  # it has other blocks
        changed = replace(recipe, activation_checkpointing=None, strategy=strategy)
        wrapped = teacher.wrap(changed, ranks)
        teacher.check_logits(wrapped, ranks, rows)
        return wrapped

    return TeacherModel(_traits(teacher, recipe.distillation.paths()[name], rows, ranks), load)


def _seed_generators(seed: int) -> None:
    """Seeds the generators. Dropout and the user's own code draw different random numbers on each
    rank, but the ranks of a tensor parallel group draw the same ones."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def _make_export(
    prepared: PreparedModel,
    wrapped: WrappedModel,
    optimizer: torch.optim.Optimizer,
    recipe: Recipe,
    ranks: RankLayout,
    prompts: TrainedPrompts | None,
) -> Callable[[Path], None]:
    """Makes `Training.export`. The tokenizer is loaded now, so that a run without it ends at its
    start."""
    tokenizer = None
    if ranks.rank == 0 and recipe.checkpoint.export:
        assert prompts is not None
        tokenizer = tokenizer_to_keep(recipe.data, recipe.model, recipe.attachments, prompts)
    export = partial(
        export_hugging_face,
        wrapped.module,
        rank=ranks.rank,
        sends=ranks.stage.rank == 0,
        device=ranks.device,
        dtype=prepared.export_dtype,
        merged=recipe.checkpoint.export_merged,
        source=prepared.weights.source,
        export_base=recipe.checkpoint.export_base,
        tokenizer=tokenizer,
        files=prepared.objective.export_files(whole_model(wrapped.module)),
    )

    def export_averages(folder: Path) -> None:
        with averages_in_place(optimizer):
            export(folder)

    return export_averages if recipe.optimizer.schedule_free else export


def _count_flops(
    prepared: PreparedModel,
    wrapped: WrappedModel,
    recipe: Recipe,
    ranks: RankLayout,
) -> Flops:
    """Counts the operations of a token. Recomputed are the checkpointed blocks and, with a chunked
    loss, the logits that are not kept."""
    model, recomputed = whole_model(prepared.model), TokenFlops()
    checkpointing, tokens = recipe.activation_checkpointing, recipe.data.row_length
    blocks = [module for module in wrapped.module.modules() if is_checkpointed(module)]
    if checkpointing is None or checkpointing.mode == "full":
        recomputed = recomputed_flops(prepared.model, blocks)
    elif checkpointing.mode == "all_but_attention":
        recomputed = TokenFlops(recomputed_flops(prepared.model, blocks).products)
    elif checkpointing.budget is None:  # half of the matrix products, and no attention
        recomputed = TokenFlops(recomputed_flops(prepared.model, blocks).products / 2)
    # A stage of a pipeline has some of the blocks
    own = len(prepared.description.blocks)
    recomputed = recomputed.times(prepared.description.depth / own if own else 1.0)
    part = rows_of(recipe.batch, row_length=tokens) * tokens
    part //= ranks.context_parallel_size
    vocabulary = prepared.description.vocabulary or 0
    # One chunk of all logits is kept anyway
    several = computes_loss(prepared.model) and chunk_width(max(1, part), vocabulary) < vocabulary
    logits = several and recipe.model.keep_logits is not True
    if logits and (checkpointing is None or checkpointing.budget is None):
        recomputed = recomputed.plus(TokenFlops(2.0 * embeddings(model)[1].weight.numel()))
    device = ranks.device
    peak = peak_flops(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    return Flops(token_flops(model), recomputed, peak)


def _make_evaluator(recipe: Recipe, data: RunData, ranks: RankLayout) -> Evaluator | None:
    """None if there is no validation data."""
    if not data.validation:
        return None
    length, generate = recipe.data.sequence_length, recipe.evaluation.generate
    rows, generator = rows_of(recipe.batch, row_length=recipe.data.row_length), None
    if generate is not None and (tokenizer := tokenizer_name(recipe.data, recipe.model)):
        generator = Generator(generate, tokenizer=tokenizer, rows=rows, longest=length)
    return Evaluator(
        data.validation,
        data=recipe.data,
        micro_batch_size=rows,
        max_batches=recipe.evaluation.max_batches,
        ranks=ranks,
        generator=generator,
    )
