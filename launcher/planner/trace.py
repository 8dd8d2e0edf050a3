"""Traces the memory of a training step: the training code runs on fake tensors, without storage.

The model is wrapped over a fake process group and trained for two steps. Of deep models a few
blocks are traced, and extrapolated linearly.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain, repeat
from types import SimpleNamespace
from typing import Any, Literal, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from launcher.data.loader import GlobalBatch, MicroBatches
from launcher.distributed.rank_layout import RankLayout
from launcher.errors import first_line
from launcher.libraries.private import (
    FAKE_TENSOR_LOGGER,
    fake_store,
    tree_leaves,
    tree_map_only,
)
from launcher.models.description import embeddings
from launcher.models.head import chunk_width, computes_loss
from launcher.models.initialization import materialize
from launcher.models.multi_token import prediction_layers
from launcher.models.names import clean_name
from launcher.objectives.synthetic import SyntheticData
from launcher.optimizers.offload import StateFile
from launcher.optimizers.optimizer import LossScale
from launcher.planner.fake import (
    TracedFile,
    keep_blocks,
    replaced_for_tracing,
    traced_wrappers,
)
from launcher.planner.memory import (
    COMPONENTS,
    CUBLAS_WORKSPACES,
    Components,
    Moment,
    Phase,
    StepMemory,
)
from launcher.planner.profile import original_model, prepared_model
from launcher.planner.recipe_values import with_random_weights
from launcher.planner.tracker import HOST, Held, Label, Place, Tracker
from launcher.recipe.schema import ActivationCheckpointing, CpuOffload, Recipe
from launcher.strategies import pipeline
from launcher.strategies.base import WrappedModel, offloads_parameters
from launcher.strategies.fsdp import Fsdp
from launcher.strategies.pipeline import passes_in_flight, schedule
from launcher.training.fake_tensors import Replacements, ShapesMode
from launcher.training.loop import Update, train_steps
from launcher.training.model import PreparedModel
from launcher.training.operators import shapes_of

EDGE = 2
"""A deep model is traced with its first and last two blocks, whose neighbours differ from the
neighbours of other blocks, and with one block between; with two between for Muon, whose matrices
are assigned to the ranks. Where the kinds of blocks repeat, there are one or two periods between,
and the first and last blocks, at least two each, are together whole periods, too."""
_IN_FLIGHT = 3
"""Micro-batches that a rank of a pipeline has in flight in a trace."""
CPU = torch.device("cpu")
_P = ParamSpec("_P")
_T = TypeVar("_T")


class UntraceableError(Exception):
    """The model cannot run on fake tensors: it needs a value (such as experts for each token)."""


def trace_step(
    recipe: Recipe,
    *,
    ranks: int,
    device: Literal["cpu", "cuda"],
    micro_batches: int,
    stage: int | None = None,
) -> StepMemory:
    """Memory of one optimizer step on rank 0 of `ranks`, for a kind of device that the trace does
    not need. stage: of a pipeline, the number of the rank along the stages; None: there is none.

    There must be no default process group. Raises RecipeError as `prepare_model`, UntraceableError.
    """
    # Otherwise each operation that fake tensors do not support is logged with 40 lines
    logging.getLogger(FAKE_TENSOR_LOGGER).setLevel(logging.CRITICAL)
    recipe = with_random_weights(recipe)
    if stage is not None:
        return _trace_stage(recipe, ranks=ranks, device=device, count=micro_batches, stage=stage)
    # Further micro-batches do not change the peak. Hybrid sharding needs a third one, because FSDP
    # keeps averaged gradients until those of the next micro-batch
    micro_batches = min(micro_batches, 3 if recipe.strategy.replicate > 1 else 2)
    original = original_model(recipe, device=device)
    prepare = partial(prepared_model, recipe, device=device)
    with _fake_process_group(ranks) as group:
        run = partial(_run, recipe=recipe, ranks=group, device=device, micro_batches=micro_batches)
        names, period = (
            list(original.description.blocks),
            _period(original, recipe.activation_checkpointing),
        )
        ends = period * -(-2 * EDGE // max(1, period))
        depth = ends + (2 if recipe.optimizer.name == "muon" else 1) * period
        if period == 0 or len(names) <= depth:
            return run(prepare()).step_memory()
        smaller = prepare(blocks=range(ends))
        if not keep_blocks(smaller.model, range(ends)):
            return run(prepare()).step_memory()
        prepared = prepare(blocks=range(depth))
        keep_blocks(prepared.model, range(depth))
        traced = run(prepared)
        first = ends // 2
        between = frozenset(names[first : first + depth - ends])
        # The smaller model is traced between steps and in the optimizer's step. Its forward and
        # backward passes are taken from the larger model, without the blocks in between
        small = traced.step_memory(run(smaller, only_update=True), between)
        return _extrapolated(small, traced.step_memory(), (ends, depth), names)


def _trace_stage(
    recipe: Recipe, *, ranks: int, device: Literal["cpu", "cuda"], count: int, stage: int
) -> StepMemory:
    """The memory of a rank of a pipeline. The rank has few micro-batches in flight in the trace, in the
    same order as ever, and the activations of the others are added."""
    strategy = recipe.strategy
    size, chunks = strategy.pipeline_parallel_size, strategy.stages_of_rank
    fewer = min(size - stage, _IN_FLIGHT) if chunks == 1 else 2
    place = {"rank": int(chunks > 1 and stage == size - 1), "ranks": fewer, "chunks": chunks}
    micro_batches = min(count, fewer + 2 if chunks == 1 else 3 * fewer)
    traced = passes_in_flight(schedule(micro_batches, **place)) / chunks
    whole = schedule(count, rank=stage, ranks=size, chunks=chunks)
    with _fake_process_group(ranks, rank=stage * (ranks // size)) as group, Replacements() as here:
        here.set(pipeline, "schedule", lambda number, **_: schedule(number, **place))
        step = _run(
            prepared_model(recipe, device=device),
            recipe=recipe,
            ranks=group,
            device=device,
            micro_batches=micro_batches,
        ).step_memory()
    more = (passes_in_flight(whole) / chunks - traced) / traced * step.after_forward.activations

    def of_all(moment: Moment) -> Moment:
        if moment.phase == "optimizer":
            return moment
        activations = moment.components.activations + round(max(0.0, more))
        components = dataclasses.replace(moment.components, activations=activations)
        return dataclasses.replace(moment, components=components)

    return dataclasses.replace(step, timeline=tuple(map(of_all, step.timeline)))


@contextmanager
def _fake_process_group(ranks: int, rank: int = 0) -> Iterator[RankLayout]:
    dist.init_process_group("fake", store=fake_store(), rank=rank, world_size=ranks)
    try:
        assert dist.group.WORLD is not None
        yield RankLayout(rank=rank, size=ranks, group=dist.group.WORLD, device=CPU)
    finally:
        dist.destroy_process_group()


def _period(prepared: PreparedModel, checkpointing: ActivationCheckpointing | None) -> int:
    """Number of blocks after which the pattern of blocks repeats; 0 if it does not, so that the
    whole model must be traced."""
    blocks = list(prepared.description.blocks.values())
    types = prepared.description.kinds or [""] * len(blocks)
    if not blocks or len(types) != len(blocks):
        return 0
    kinds = [(shapes_of(block), kind) for block, kind in zip(blocks, types, strict=True)]
    every = checkpointing.every_n_blocks if checkpointing is not None else 1
    counts = range(1, len(blocks) + 1)
    period = next(n for n in counts if all(kinds[i] == kinds[i % n] for i in range(len(blocks))))
    joint = math.lcm(every, period)
    return joint if len(blocks) % joint == 0 else 0


def _run(
    prepared: PreparedModel,
    *,
    recipe: Recipe,
    ranks: RankLayout,
    device: str,
    micro_batches: int,
    only_update: bool = False,
) -> _Observer:
    """Trains two steps. `only_update`: with gradients of zeros instead of forward and backward
    passes."""
    ranks = ranks.with_sizes(recipe.strategy)
    data = prepared.synthetic_data(
        recipe.data, recipe.batch, prepared.row_division(recipe.strategy, ranks)
    )
    fake = ShapesMode()

    def init_fn(model: nn.Module, parameters: torch.device, buffers: torch.device) -> None:
        with fake:
            materialize(model, parameters=parameters, buffers=buffers)

    label = _logits_label(prepared, data, tensor_parallel_size=ranks.tensor_parallel_size)
    tracker = Tracker(label, gloo=device == "cpu")
    offload = recipe.strategy.cpu_offload if device == "cuda" else None
    pinned = offload.pin_memory if offload is not None and offload.what == "all" else None
    with replaced_for_tracing(tracker, data, device=device, pinned=pinned):
        wrapped = prepared.wrap(
            recipe,
            ranks,
            init_fn=init_fn,
            wrappers=traced_wrappers(tracker, device=device),
        )
        with fake, tracker:
            if pinned is None:
                tracker.mark(wrapped.module.parameters(), "parameters")
            else:
                tracker.mark_host(wrapped.module.parameters(), pinned=pinned)
            tracker.mark(wrapped.module.buffers(), "parameters")
            tracker.mark(getattr(wrapped.root, "buckets", ()), "gradients")
            optimizer = prepared.make_optimizer(
                wrapped,
                recipe,
                state_file=partial(TracedFile, tracker),
            )
            observer = _Observer(tracker, wrapped, optimizer, offload=offload, device=device)
            observer.watch(
                {
                    **prepared.description.blocks,
                    **prepared.tower,
                    **prediction_layers(wrapped.module),
                    **_head(wrapped.module),
                }
            )
            if isinstance(wrapped, Fsdp):
                for module in wrapped.root.modules():
                    module.register_forward_pre_hook(observer.label_unsharded)
            scale = LossScale(CPU, enabled=prepared.compute_dtype == torch.float16)
            update = Update(
                optimizer,
                lambda step: 1e-3,
                scale,
                recipe.optimizer.max_grad_norm,
                average_decay=recipe.optimizer.ema,
            )
            # DTensor computes the shapes of an operation on whole tensors when it first sees it.
            # The first step, which only updates, keeps these tensors out of the second
            passes, none = wrapped.accumulate, observer.no_passes
            each = chain([none], repeat(none if only_update else passes))
            wrapped.accumulate = lambda *given, **options: next(each)(*given, **options)  # type: ignore[method-assign]
            steps = train_steps(
                wrapped,
                _batches(data, micro_batches),
                loss=data.loss,
                update=update,
                averaged_over=ranks.size,
                heartbeat=observer.heartbeat,
            )
            try:
                for _ in steps:
                    pass
            except Exception as error:  # models fail in various ways on tensors without values
                raise UntraceableError(f"{type(error).__name__}: {first_line(error)}") from error
    return observer


def _logits_label(
    prepared: PreparedModel, data: SyntheticData, *, tensor_parallel_size: int
) -> Callable[[torch.Tensor], Label | None]:
    """A function that labels logits by their shape. Each tensor parallel rank has a part of
    them."""
    widths, positions = set(), data.micro_batch.positions
    tokens = data.tokens if positions is None else len(positions)
    if vocabulary := prepared.description.vocabulary:
        vocabulary = -(-vocabulary // tensor_parallel_size)
        width = chunk_width(tokens, vocabulary) if computes_loss(prepared.model) else vocabulary
        widths = {width, vocabulary % width or width}

    def label_of(tensor: torch.Tensor) -> Label | None:
        last = tensor.shape[-1] if tensor.ndim > 1 else 0
        return "logits" if last in widths and tensor.numel() == tokens * last else None

    return label_of


def _head(model: nn.Module) -> dict[str, nn.Module]:
    head = embeddings(model)[1]
    return {clean_name(name): module for name, module in model.named_modules() if module is head}


def _batches(data: SyntheticData, micro_batches: int) -> Iterator[GlobalBatch]:
    """Batches of two steps. Only the second one counts."""
    statistics: Any = SimpleNamespace(loss_weight=lambda: torch.ones(()))
    empty = partial(tree_map_only, torch.Tensor, torch.empty_like)
    for step, count in ((1, 1), (2, micro_batches)):
        fake = MicroBatches([data.micro_batch] * count, lambda each: each.mapped(empty))
        yield GlobalBatch(step, fake, statistics, step, 0.0)


class _Observer:
    """Gives the tracker the phase and module of the step, and labels storages."""

    def __init__(
        self,
        tracker: Tracker,
        wrapped: WrappedModel,
        optimizer: torch.optim.Optimizer,
        *,
        offload: CpuOffload | None,
        device: str,
    ) -> None:
        """`offload` is None on CPUs, where host memory is the device's."""
        self._workspaces = CUBLAS_WORKSPACES if device == "cuda" else 0
        self._buckets: list[torch.Tensor] = getattr(wrapped.root, "buckets", [])
        self._pinned = offload.pin_memory if offload and offloads_parameters(offload) else None
        self._tracker, self._wrapped, self._optimizer = tracker, wrapped, optimizer
        self.trained = [p for p in wrapped.module.parameters() if p.requires_grad]
        self._gradients: Label = HOST if offloads_parameters(offload) else "gradients"
        self._states: Label = HOST if offload is not None else "optimizer"
        self._file: StateFile | None = getattr(optimizer, "file", None)
        self._unsharded: set[int] = set()
        self._micro_batch = -1
        self._forward_from = 0
        self._step_from: list[int] = []
        self._after_forward: list[int] = []

    def heartbeat(self, phase: str) -> None:
        """Called by the training loop at the start of each phase."""
        tracker = self._tracker
        if phase == "data":
            self._micro_batch = -1
            values = (value for state in self._optimizer.state.values() for value in state.values())
            states = [value for value in values if isinstance(value, torch.Tensor)]
            if self._file is None or self._states == HOST:
                tracker.mark(getattr(self._optimizer, "host_buffers", states), self._states)
            self._step_from.append(tracker.events)
            tracker.go(where="", phase="forward", micro_batch=0)
        elif phase == "forward":
            self._micro_batch += 1
            if tracker.place.phase != "forward" or self._micro_batch == 0:
                self._forward_from = tracker.events  # of the first of several forward passes
            self._mark_gradients()
            tracker.go(where="", phase="forward", micro_batch=self._micro_batch)
        elif phase == "backward":
            tracker.label_live("activations", since=self._forward_from)
            self._after_forward.append(tracker.events)
            tracker.go(phase="backward")
        elif phase == "optimizer":
            self._mark_gradients()
            tracker.go(where="", phase="optimizer")

    def _mark_gradients(self) -> None:
        gradients = [p.grad for p in self.trained if p.grad is not None]
        self._tracker.mark(gradients, self._gradients)

    def no_passes(
        self,
        micro_batches: Sequence[object],
        loss: object,
        factor: torch.Tensor,
        *,
        heartbeat: Callable[[str], None],
        stop_reached: Callable[[], bool],
    ) -> torch.Tensor:
        """Takes the place of `WrappedModel.accumulate`, and sets gradients of zeros."""
        for number in range(1, len(micro_batches) + 1):
            # Where one rank makes its copies of the weights
            with self._wrapped.micro_batch(last=number == len(micro_batches)):
                for phase in ("forward", "backward"):
                    heartbeat(phase)
        gradients = self._buckets or [torch.zeros_like(parameter) for parameter in self.trained]
        for parameter, gradient in zip(self.trained, gradients, strict=True):
            parameter.grad = gradient
        if self._pinned is not None:
            self._tracker.mark_host(gradients, pinned=self._pinned)
        return torch.zeros_like(factor)

    def watch(self, modules: dict[str, nn.Module]) -> None:
        """Follows modules through forward, backward and recomputation."""
        for name, module in modules.items():
            module.forward = partial(self._forward, name, module.forward)

    def _forward(
        self, name: str, forward: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs
    ) -> _T:
        tracker = self._tracker
        tracker.go(where=name)
        if tracker.place.phase == "backward":  # recomputation
            since = tracker.events
            try:
                return forward(*args, **kwargs)
            finally:
                tracker.label_live("activations", since=since)
        out = forward(*args, **kwargs)
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                tensor.register_hook(partial(self._backward, name))  # type: ignore[no-untyped-call]
                break
        return out

    def label_unsharded(self, module: nn.Module, inputs: object) -> None:
        """Called before the forward pass of a module, whose shards FSDP has replaced with unsharded
        weights. Their gradients are freed once they are reduced."""
        for parameter in module.parameters():
            # Unsharded experts are still divided over a mesh of ranks
            meshes = parameter.device_mesh.mesh_dim_names if isinstance(parameter, DTensor) else ()
            if "shard" in (meshes or ()) or id(parameter) in self._unsharded:
                continue
            self._unsharded.add(id(parameter))
            self._tracker.mark([parameter], "gathered")
            if parameter.requires_grad:
                hook = self._label_gradient
                parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    def _label_gradient(self, parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        self._tracker.mark([parameter.grad], "gradients")

    def _backward(self, name: str, gradient: torch.Tensor) -> None:
        self._tracker.go(where=name)

    def step_memory(
        self, updated: _Observer | None = None, without: frozenset[str] = frozenset()
    ) -> StepMemory:
        """Memory of the second step. With `updated`, the observer of a smaller model, it is the
        memory of this smaller model. Its optimizer's step is from `updated`. Its forward and
        backward passes are from this observer, without the events in the modules `without`."""
        own, tracker, (first, last) = updated or self, self._tracker, self._step_from[1:3]
        held = own._tracker.at(own._step_from[1])
        moments = tracker.replay(first, last, held=held, without=without)
        if updated is not None:
            passes = [moment for moment in moments if moment[0].phase != "optimizer"]
            updates = own._tracker.replay(*own._step_from[1:3])
            moments = passes + [moment for moment in updates if moment[0].phase == "optimizer"]
        after_forward = tracker.at(self._after_forward[1], since=first, held=held, without=without)
        return StepMemory(
            timeline=tuple(
                Moment(**place._asdict(), components=_components(held, self._workspaces))
                for place, held in moments
            ),
            held=_components(own._tracker.at(own._step_from[2])),
            after_forward=_components(after_forward),
            host=max(held[HOST] for _, held in moments),
            disk=0 if own._file is None else own._file.size,
        )


def _components(held: Held, workspaces: int = 0) -> Components:
    sizes: dict[str, int] = {name: held[name] for name in COMPONENTS}
    return Components(**sizes | {"temporary": sizes["temporary"] + workspaces})


def _extrapolated(
    small: StepMemory, large: StepMemory, depths: tuple[int, int], names: list[str]
) -> StepMemory:
    """Extrapolates two traces linearly to a model with a block for each name.

    The blocks of the smaller trace are the first and the last blocks of the model. No moments are
    computed for the blocks between them: their memory lies between the memory of their neighbours.
    """
    further = (len(names) - depths[0]) / (depths[1] - depths[0])

    def line(small: int, large: int) -> int:
        return max(0, round(small + (large - small) * further))

    def components(small: Components, large: Components) -> Components:
        pairs = {name: (getattr(small, name), getattr(large, name)) for name in COMPONENTS}
        return Components(**{name: line(*pair) for name, pair in pairs.items()})

    def in_model(place: Place) -> Place:
        """The place in the whole model for a place in the traced model."""
        index = names.index(place.where) if place.where in names else 0
        later = len(names) - depths[1] if index >= depths[0] // 2 else 0
        return place._replace(where=names[index + later]) if later else place

    deeper = _highest(large)
    moments = [
        Moment(**in_model(place)._asdict(), components=components(held, deeper[place]))
        for place, held in _highest(small).items()
        if place in deeper
    ]
    return StepMemory(
        timeline=tuple(moments),
        held=components(small.held, large.held),
        after_forward=components(small.after_forward, large.after_forward),
        host=line(small.host, large.host),
        disk=line(small.disk, large.disk),
    )


def with_compiled_blocks(
    step: StepMemory, less: Sequence[int], names: Sequence[str], *, others: float = 0
) -> StepMemory:
    """The memory of a traced step, whose blocks are eager, if they were compiled.

    `less` has the bytes by which each block then saves less for its backward pass, in the order of
    `names`. others: further micro-batches whose activations exist at the same time. A block whose
    backward pass is running counts as eager, because the backward pass computes again what the
    forward pass did not save.
    """
    index = {name: number for number, name in enumerate(names)}

    def compiled(phase: Phase, where: str, components: Components) -> Components:
        count = len(names) if where not in index else index[where] + (phase == "forward")
        if phase == "optimizer" or (phase == "forward" and not where):
            count = 0
        further = round(others * sum(less)) if count else 0
        saved = max(0, components.activations - sum(less[:count]) - further)
        return dataclasses.replace(components, activations=saved)

    timeline = (
        dataclasses.replace(
            moment, components=compiled(moment.phase, moment.where, moment.components)
        )
        for moment in step.timeline
    )
    after_forward = compiled("backward", "", step.after_forward)
    return dataclasses.replace(step, timeline=tuple(timeline), after_forward=after_forward)


def _highest(step: StepMemory) -> dict[Place, Components]:
    highest: dict[Place, Components] = {}
    for moment in step.timeline:
        place = Place(moment.phase, moment.micro_batch, moment.where)
        if place not in highest or moment.total > highest[place].total:
            highest[place] = moment.components
    return highest
