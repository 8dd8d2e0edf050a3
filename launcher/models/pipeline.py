"""Pipeline parallelism: a rank keeps some of a model's blocks, and passes activations on.

The model keeps its structure and the names of its parameters. In the place of what other ranks have
are modules without weights. They hand the activation of the stage before to this rank's first block,
and keep the output of its last one. So the forward method of the model's class runs on every stage,
and computes masks, positions and rotary embeddings there.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from launcher.errors import RecipeError
from launcher.libraries.private import tree_leaves
from launcher.models.description import (
    embeddings,
    experts_of_token,
    largest_of_layers,
    modules_without_text,
    parts_without_text,
    text_config,
)
from launcher.models.nf4 import shape_of
from launcher.models.record import record_of

KEY = "strategy.pipeline_parallel_size"
_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Keys of configs with the number of experts of a layer."""


@dataclass(frozen=True)
class Chain:
    """A model whose blocks are called in order, each with the output of the one before."""

    blocks: tuple[str, ...]
    before: tuple[str, ...]
    """The modules with parameters that are called before the blocks: towers, and the embedding."""
    after: tuple[str, ...]
    """Those that are called after the blocks: norm and head."""
    tied: str | None
    """The embedding that shares its weight with the head. The first and the last stage have it."""
    in_tuples: bool
    """Whether a block returns a tuple, whose only tensor is its output."""
    whole: nn.Module
    """A copy of the model that stays on the meta device and is never divided, for names and sizes."""


def chain_of(model: nn.Module, blocks: Mapping[str, nn.Module]) -> Chain:
    """How a model on the meta device is divided: a forward pass shows it. Raises RecipeError if its
    blocks are no chain."""
    name, config = type(model).__name__, text_config(model)

    def refuse(why: str) -> RecipeError:
        return RecipeError(f"{KEY}: {name} {why}; use 1")

    if getattr(config, "output_router_logits", False):
        raise refuse("has an auxiliary loss over the routers of all blocks (output_router_logits)")
    inside = {module for block in blocks.values() for module in block.modules()}
    if any(getattr(config, key, 0) for key in ("layerdrop", "decoder_layerdrop")):
        raise refuse("skips blocks at random (layerdrop)")
    if any(getattr(module, "is_kv_shared_layer", False) for module in inside):
        raise refuse("has blocks that use the keys and values of earlier blocks")
    towers = _towers(model, refuse)
    of_towers = {module for tower in towers for module in model.get_submodule(tower).modules()}
    outer = {
        full: module
        for full, module in model.named_modules()
        if module not in inside | of_towers
        and any(p is not None for p in module._parameters.values())
    }
    why, called, in_tuples = "", list[str](), False
    # With the first form of mask, transformers reads no values to make one. Some models take the second
    for in_tuples, mask in itertools.product((False, True), ((1, 1, 8, 8), (1, 8))):
        called, found = _trial(model, blocks, outer, in_tuples=in_tuples, mask=mask)
        if found is None:
            break
        why = why or found
    else:
        raise refuse(why)
    order = [full for full in called if full in blocks]
    start, end = called.index(order[0]), len(called) - called[::-1].index(order[-1])
    before, after = called[:start], called[end:]
    if lost := [full for full in outer if full not in before + after]:
        raise refuse(f"does not call {lost[0]} before or after its blocks")
    if both := {*before} & {*after}:
        raise refuse(f"calls {both.pop()} before and after its blocks")
    first, last = embeddings(model)
    shared = getattr(last, "weight", None)
    tied = next((n for n in before if outer[n] is first and first.weight is shared), None)
    shared_parts = [getattr(model, name, None) for name in ("config", "generation_config")]
    whole = copy.deepcopy(model, {id(part): part for part in shared_parts})
    return Chain(tuple(blocks), (*towers, *before), tuple(after), tied, in_tuples, whole)


def _towers(model: nn.Module, refuse: Callable[[str], RecipeError]) -> list[str]:
    """The parts that text does not use, which the first stage has."""
    inside = modules_without_text(model)
    names = [name for name, module in model.named_modules() if module in inside]
    own = [f"{name}." for name in names]
    if lost := [n for n in parts_without_text(model) if not n.startswith(tuple(own))]:
        raise refuse(f"has the parameter {lost[0]}, which text does not use, beside its towers")
    towers = record_of(model).towers
    if towers is not None and not towers.inputs_known:
        raise refuse("computes the places of images from the activations of the first stage")
    return names


def check_first_stage(model: nn.Module, stages: Sequence[range]) -> None:
    """Raises RecipeError if features of a tower are added behind more blocks than the first stage
    has."""
    towers = record_of(model).towers
    levels = 0 if towers is None else towers.deeper
    if levels > len(stages[0]):
        what = f"adds features of images behind its first {levels} blocks"
        fewer = f"of which the first stage has {len(stages[0])}"
        more = "give it more (strategy.pipeline_blocks), or have fewer stages"
        raise RecipeError(f"{KEY}: {type(model).__name__} {what}, {fewer}; {more}")


def _trial(
    model: nn.Module,
    blocks: Mapping[str, nn.Module],
    outer: Mapping[str, nn.Module],
    *,
    in_tuples: bool,
    mask: tuple[int, ...],
) -> tuple[list[str], str | None]:
    """A forward pass of a model whose blocks do nothing. outer: the modules that have parameters beside
    them. in_tuples: whether blocks return a tuple. mask: the shape of the mask. Returns the names of the
    modules in the order of their calls, and why the blocks are no chain."""
    called, outputs, problems = list[str](), list[Any](), list[str]()
    width = text_config(model).hidden_size

    def stand_in(full: str) -> Any:
        """In the place of a block, which may not run on meta: another activation."""

        def forward(hidden_states: Any, *args: object, **kwargs: object) -> Any:
            if hidden_states.shape != (1, 8, width):
                problems.append(f"passes {tuple(hidden_states.shape)} for (1, 8) tokens to {full}")
            if outputs and hidden_states is not outputs[-1]:
                problems.append(f"computes between its blocks, before {full}")
            tensors = (t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor))
            if any(tensor.requires_grad for tensor in tensors):
                problems.append(f"passes results of other layers to {full}")
            called.append(full)
            outputs.append(torch.empty_like(hidden_states))
            return (outputs[-1],) if in_tuples else outputs[-1]

        return forward

    def note(full: str) -> Any:
        return lambda module, args: called.append(full)

    handles = [module.register_forward_pre_hook(note(full)) for full, module in outer.items()]
    # The result of a layer is recognized by its gradient, also if the layer is frozen
    frozen = [p for module in outer.values() for p in module.parameters(recurse=False)]
    frozen = [p for p in frozen if p.is_floating_point() and not p.requires_grad]
    training, own = model.training, [vars(block).get("forward") for block in blocks.values()]
    try:
        for full, block in blocks.items():
            block.forward = stand_in(full)
        for parameter in frozen:
            parameter.requires_grad_()
        ids = torch.zeros(1, 8, dtype=torch.long, device="meta")
        with torch.enable_grad():
            model.eval()(
                input_ids=ids, attention_mask=torch.zeros(mask, device="meta"), use_cache=False
            )
    except Exception as error:  # models raise anything on inputs that they do not expect
        problems.append(f"cannot run without values ({type(error).__name__})")
    finally:
        model.train(training)
        for parameter in frozen:
            parameter.requires_grad_(False)
        for block, forward in zip(blocks.values(), own, strict=True):
            del block.forward
            if forward is not None:
                block.forward = forward
        for handle in handles:
            handle.remove()
    if [full for full in called if full in blocks] != list(blocks) or not blocks:
        problems.append("does not call each of its blocks once, in order")
    return called, next(iter(problems), None)


def shared_parameters(model: nn.Module) -> list[str]:
    """The names that an embedding has for the parameters that it shares with the head."""
    first, last = embeddings(model)
    if first is None or last is None:
        return []
    every = first._parameters.items()
    return [name for name, p in every if p is not None and p is last._parameters.get(name)]


def ranges_of(sizes: Sequence[int]) -> list[range]:
    """Neighbouring items in parts of these sizes."""
    ends = [*itertools.accumulate(sizes)]
    return [range(end - size, end) for end, size in zip(ends, sizes, strict=True)]


def balanced(
    costs: Sequence[float],
    parts: int,
    allowed: Callable[[int, int, int], bool] = lambda part, start, end: True,
) -> list[range] | None:
    """Neighbouring items in this number of parts, none empty, of which the most expensive is as cheap
    as possible. allowed: whether a part, from 0, may have the items from `start` to `end` - 1. None if
    the items cannot be divided so."""
    sums = [0.0, *itertools.accumulate(costs)]
    best: dict[tuple[int, int], tuple[float, int]] = {(0, 0): (0.0, 0)}
    for part in range(1, parts + 1):
        for end in range(part, len(costs) + 1):
            for start in range(end - 1, part - 2, -1):
                cost, found = sums[end] - sums[start], best.get((part, end))
                if found is not None and cost > found[0]:
                    break  # and so do more items
                if (before := best.get((part - 1, start))) and allowed(part - 1, start, end):
                    best[part, end] = min((max(before[0], cost), start), found or (math.inf, 0))
    if (parts, len(costs)) not in best:
        return None
    sizes, end = list[int](), len(costs)
    for part in range(parts, 0, -1):
        start = best[part, end][1]
        sizes.append(end - start)
        end = start
    return ranges_of(sizes[::-1])


def check_stages(blocks: int, stages: int, blocks_of_stages: Sequence[int] | None) -> None:
    """Raises RecipeError if a model with this number of blocks cannot have these stages."""
    if stages > blocks:
        raise RecipeError(f"{KEY}: {stages} stages, but the model has {blocks} blocks")
    if blocks_of_stages is not None and (total := sum(blocks_of_stages)) != blocks:
        what = f"the numbers add up to {total}, but the model has {blocks} blocks"
        raise RecipeError(f"strategy.pipeline_blocks: {what}")


def stages_of(
    model: nn.Module, chain: Chain, count: int, blocks_of_stages: Sequence[int] | None = None
) -> list[range]:
    """The blocks of each stage, if their numbers are not given by their cost: the parameters that a token
    uses. The head counts as a part of the last block; the embedding, in which a token looks up one
    row, does not."""
    if blocks_of_stages is not None:
        return ranges_of(blocks_of_stages)
    config = text_config(model)
    experts = next((n for key in _EXPERT_COUNTS if (n := largest_of_layers(config, key))), 1)
    used = (experts_of_token(config) or experts) / experts

    def cost(name: str) -> float:
        return sum(
            shape_of(parameter).numel() * (used if ".experts." in f".{inner}." else 1.0)
            for inner, parameter in model.get_submodule(name).named_parameters()
        )

    costs = [cost(name) for name in chain.blocks]
    costs[-1] += sum(map(cost, chain.after))
    found = balanced(costs, count)
    assert found is not None  # `check_stages` has been called
    return found


class _Elsewhere(nn.Module):
    """Stands in the place of a block of another stage. It has the block's kind, which a model may read to
    choose a mask: `block_type` in Nemotron-H, `attention_type` in Inkling."""

    def __init__(
        self,
        pass_by: Callable[[int, torch.Tensor], Any],
        index: int,
        *,
        block: nn.Module,
        in_tuples: bool,
    ) -> None:
        super().__init__()
        self._pass_by, self._index, self._in_tuples = pass_by, index, in_tuples
        for name, value in vars(block).items():
            if name[0] != "_" and name not in vars(self) and isinstance(value, str | int | float):
                setattr(self, name, value)

    def forward(self, hidden_states: torch.Tensor, *args: object, **kwargs: object) -> Any:
        output = self._pass_by(self._index, hidden_states)
        return (output,) if self._in_tuples else output


class _Before(nn.Module):
    """Stands in the place of an embedding of another stage: its result has the right form, and the
    place of the first block replaces it."""

    def __init__(self, received: Callable[[], torch.Tensor | None]) -> None:
        super().__init__()
        self._received = received

    def forward(self, *args: object, **kwargs: object) -> Any:
        return self._received()


class _After(nn.Module):
    """Stands in the place of a norm or head of another stage. Its result has the right form."""

    def __init__(self, width: int | None) -> None:
        super().__init__()
        self._width = width

    def forward(self, hidden: torch.Tensor, *args: object, **kwargs: object) -> Any:
        if self._width is None:
            return hidden
        return hidden.new_zeros(1).expand(*hidden.shape[:-1], self._width)


class Links:
    """The groups in which the stages of a pipeline send activations forwards and gradients backwards.

    NCCL runs the sends and receives of a group in order, also those between different ranks. So a rank
    receives in another group than it sends in, and each direction has groups of its own. Otherwise a
    rank that waits for its neighbour would hold up what it has sent."""

    def __init__(self, groups: Sequence[dist.ProcessGroup]) -> None:
        """groups: as many as `count` says, each with one rank of each stage."""
        self.group = groups[0]
        self.size, self.rank = dist.get_world_size(groups[0]), dist.get_rank(groups[0])
        self._groups = groups

    @staticmethod
    def count(ranks: int, *, chunks: int) -> int:
        """The number of groups for a pipeline of so many ranks, each with `chunks` stages."""
        return 2 * (min(2, ranks - 1) + (chunks > 1))

    def between(self, stage: int, *, backwards: bool) -> dist.ProcessGroup:
        """The group in which a stage sends to the next one, or gets the gradient of what it sent."""
        rank = stage % self.size
        around = rank == self.size - 1  # from the last rank to the first one
        kind = len(self._groups) // 2 - 1 if around else rank % 2
        return self._groups[2 * kind + backwards]


class StagedModel:
    """This rank's stages of a model, whose forward method it replaces.

    With gradients, a schedule calls `enter` before a forward pass, and `leave` after it. Without, a
    forward pass is one through all stages: the ranks pass the activation on. Losses and logits are
    right on the last stage; on the others they are zeros in the same form.
    """

    def __init__(
        self,
        model: Any,
        blocks: dict[str, nn.Module],
        chain: Chain,
        stages: Sequence[range],
        *,
        links: Links,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """`blocks` loses those of other ranks. dtype: of activations. A strategy casts the inputs of
        blocks to it."""
        self.whole, self.links, self.device = chain.whole, links, device
        self.dtype = dtype
        self.count = len(stages)
        self.own = [stage for stage in range(self.count) if stage % links.size == links.rank]
        self._stages, self._active, self._calls = stages, self.own[0], 0
        self._received: torch.Tensor | None = None
        self._sent: torch.Tensor | None = None
        self._width = int(text_config(model).hidden_size)
        self._model, self._forward_of_model = model, model.forward
        head = record_of(model).head
        self._places: dict[str, tuple[int, nn.Module]] = {}
        """For each module that only one stage has: the stage, and what stands in its place."""
        for stage, part in enumerate(stages):
            for index in part:
                name = chain.blocks[index]
                block, in_tuples = model.get_submodule(name), chain.in_tuples
                elsewhere = _Elsewhere(self._pass_by, index, block=block, in_tuples=in_tuples)
                self._places[name] = stage, elsewhere
        self._places |= {name: (0, _Before(self._get_received)) for name in chain.before}
        for name in chain.after:
            module = model.get_submodule(name)
            after: nn.Module = _After(getattr(module, "out_features", None))
            if head is not None and head.layer is module:
                after.forward = module.forward
            self._places[name] = self.count - 1, after
        for name in (*chain.before, *chain.after):
            weight = getattr(model.get_submodule(name), "weight", None)
            if weight is not None:  # a model may read its dtype or its device
                stand_in: Any = self._places[name][1]
                stand_in.weight = torch.empty(0, dtype=weight.dtype, device=device)
        self._tied = None if chain.tied is None else model.get_submodule(chain.tied)
        self._shared = shared_parameters(model)
        first, last = 0 in self.own, self.count - 1 in self.own
        if not (first or last):
            self._tied = None
        elif self._tied is not None and last and not first:  # the shared weight, and no embedding
            self._tied.forward = self._places.pop(str(chain.tied))[1].forward
        if head is not None:
            head.elsewhere = lambda: self._active != self.count - 1
        if (towers := record_of(model).towers) is not None:
            towers.elsewhere = lambda: self._active != 0
        for name, (stage, place) in self._places.items():
            if stage not in self.own:
                model.set_submodule(name, place)
                blocks.pop(name, None)
        self._own_places: list[tuple[nn.Module, str, int, nn.Module, nn.Module]] | None = None
        """The parents of this rank's modules with their names, stages, modules and places."""
        model.forward = self._forward

    @contextmanager
    def without_places(self, model: nn.Module) -> Iterator[None]:
        """A context in which the model's lists of blocks have only this rank's. Initializers of transformers may set
        a buffer in each block of a list (Falcon-H1)."""
        lists = {
            name: module
            for name, module in model.named_modules()
            if isinstance(module, nn.ModuleList)
            and any(isinstance(child, _Elsewhere) for child in module)
        }
        for name, blocks in lists.items():
            own = (block for block in blocks if not isinstance(block, _Elsewhere))
            model.set_submodule(name, nn.ModuleList(own))
        try:
            yield
        finally:
            for name, blocks in lists.items():
                model.set_submodule(name, blocks)

    # Who has what

    def blocks_text(self, rank: int) -> str:
        """The numbers of the blocks of a rank in the group."""
        parts = self._stages[rank :: self.links.size]
        names = (
            f"{part.start} to {part.stop - 1}" if len(part) > 1 else f"{part.start}"
            for part in parts
        )
        return " and ".join(names)

    def is_last(self, stage: int) -> bool:
        """Whether a stage computes the loss."""
        return stage == self.count - 1

    def rank_of(self, stage: int) -> int:
        """The rank in the group that has a stage."""
        return stage % self.links.size

    def owner(self, name: str) -> int:
        """The rank in the group that has the tensor with this name, the first one of several."""
        for place, (stage, _) in self._places.items():
            if name.startswith(f"{place}."):
                return self.rank_of(stage)
        return 0

    @property
    def tied_weights(self) -> list[nn.Parameter]:
        """The trained parameters that the first and the last stage share, if this rank has one of two
        copies: the embedding, or its rows of new tokens beside adapters."""
        if self._tied is None or {0, self.count - 1} <= {*self.own}:
            return []
        found = [self._tied.get_parameter(name) for name in self._shared]
        return [parameter for parameter in found if parameter.requires_grad]

    @property
    def other_of_tied(self) -> int:
        """The rank in the group that has the tied weights, too."""
        return self.rank_of(self.count - 1) if 0 in self.own else 0

    # A forward pass of one stage

    def enter(self, stage: int, received: torch.Tensor | None) -> None:
        """The next forward pass is that of this stage, with the activation of the one before."""
        self._active, self._received, self._sent, self._calls = stage, received, None, 0

    def leave(self) -> torch.Tensor | None:
        """The activation for the next stage; None after the last one. Raises RecipeError if the model
        was not called once."""
        sent, self._sent, self._received = self._sent, None, None
        if self._calls != 1:
            what = f"the loss calls the model {self._calls} times for a micro-batch"
            raise RecipeError(f"{KEY}: {what}; stages pass one activation on; use 1")
        return sent

    def _get_received(self) -> torch.Tensor | None:
        return self._received

    def _pass_by(self, index: int, hidden: torch.Tensor) -> Any:
        """The output of the block with this number, which another stage has."""
        own = self._stages[self._active]
        if index < own.start:
            return self._received
        if index == own.stop:
            self._sent = hidden.to(self.dtype)
        return hidden

    @contextmanager
    def _only_active(self) -> Iterator[None]:
        """Of the stages of this rank, only the active one is in the model."""
        if len(self.own) == 1:
            yield
            return
        if self._own_places is None:  # now that blocks are wrapped
            self._own_places = []
            for name, (stage, place) in self._places.items():
                if stage in self.own:
                    path, _, key = name.rpartition(".")
                    parent = self._model.get_submodule(path)
                    module = getattr(parent, key)
                    self._own_places.append((parent, key, stage, module, place))
        away = [each for each in self._own_places if each[2] != self._active]
        for parent, key, _, _, place in away:
            setattr(parent, key, place)
        try:
            yield
        finally:
            for parent, key, _, module, _ in away:
                setattr(parent, key, module)

    def _forward(self, *args: object, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            return self._compute(*args, **kwargs)
        ids: Any = kwargs["input_ids"] if "input_ids" in kwargs else args[0]
        for stage in self.own:
            received = None
            if stage:
                received = self.buffer(ids)
                group = self.links.between(stage - 1, backwards=False)
                dist.recv(received, group=group, group_src=self.rank_of(stage - 1))
            self.enter(stage, received)
            outputs = self._compute(*args, **kwargs)
            if not self.is_last(stage):
                assert self._sent is not None
                group = self.links.between(stage, backwards=False)
                dist.send(self._sent.contiguous(), group=group, group_dst=self.rank_of(stage + 1))
        self._received = self._sent = None
        return outputs

    def _compute(self, *args: object, **kwargs: Any) -> Any:
        self._calls += 1
        with self._only_active():
            return self._forward_of_model(*args, **kwargs)

    def buffer(self, ids: torch.Tensor) -> torch.Tensor:
        """Memory for the activation that a stage receives for the ids of a micro-batch."""
        return torch.empty((*ids.shape, self._width), dtype=self.dtype, device=self.device)

    # Between the ranks

    def pass_to_first(self, tensor: torch.Tensor | None, owner: int) -> torch.Tensor | None:
        """On the first rank the tensor of the rank `owner`, which has another number; None elsewhere.
        Both must call it."""
        group, device = self.links.group, self.device
        if self.links.rank == owner:
            assert tensor is not None
            about = [(tensor.dtype, tensor.shape)]
            dist.send_object_list(about, group=group, group_dst=0, device=device)
            dist.send(tensor.to(device).contiguous(), group=group, group_dst=0)
        if self.links.rank != 0:
            return None
        form: list[Any] = [None]
        dist.recv_object_list(form, group=group, group_src=owner, device=device)
        dtype, shape = form[0]
        found = torch.empty(shape, dtype=dtype, device=device)
        dist.recv(found, group=group, group_src=owner)
        return found.cpu()

    def of_last(self, tensor: torch.Tensor) -> torch.Tensor:
        """What the last stage computed, in float32, on all ranks of the pipeline."""
        tensor = tensor.float().contiguous()
        root = self.rank_of(self.count - 1)
        dist.broadcast(tensor, group=self.links.group, group_src=root)
        return tensor
