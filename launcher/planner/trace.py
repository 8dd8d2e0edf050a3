"""Memory of a training step, from the real code run on tensors without storage.

The recipe's model is wrapped by `launcher/strategies` over a process group that does not exist and trained two steps by
`launcher/training/loop.py`, all on fake tensors: shapes, dtypes and lifetimes are real, nothing is computed. Deep models are traced
at two small depths and drawn out in a straight line.
"""

from __future__ import annotations

import dataclasses
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from launcher.data.loader import GlobalBatch
from launcher.data.synthetic import SyntheticData
from launcher.distributed.process_group import DataParallel
from launcher.models.initialization import clean_name, materialize
from launcher.planner.components import COMPONENTS, CUBLAS_WORKSPACES, Components, Moment, Phase, StepMemory
from launcher.planner.tracker import HOST, Held, Place, Tracker, resizing_watched
from launcher.recipe.schema import Recipe
from launcher.strategies.base import WrappedModel
from launcher.training.loop import train_steps
from launcher.training.optimizer import LossScale, make_optimizer
from launcher.training.setup import PreparedModel, prepare_model

PHASES: tuple[Phase, ...] = ("forward", "backward", "optimizer")

DEPTHS = (4, 6)
"""Blocks that a deep model is traced with: the first two and the last two, which have neighbours unlike those of the others, and
two more of those between."""


class UntraceableError(Exception):
    """The model cannot be run on fake tensors: it asks for a number (experts that tokens are sent to, ...)."""


def trace_step(recipe: Recipe, *, ranks: int, device: Literal["cpu", "cuda"], micro_batches: int) -> StepMemory:
    """Memory of one optimizer step on rank 0 of `ranks`.

    device: that the step is planned for; nothing here needs it. micro_batches: of a step; more than two change nothing.
    The default process group must not be there. Raises RecipeError as `prepare_model`, UntraceableError.
    """
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)  # tells of each refusal in 40 lines
    recipe = dataclasses.replace(recipe, model=dataclasses.replace(recipe.model, init="random", compile=False))
    micro_batches = min(micro_batches, 2)
    with _fake_process_group(ranks) as group:
        prepared = _prepare(recipe, device=device)
        names, period = list(prepared.blocks), _period(prepared, recipe)
        depths = (DEPTHS[0] * period, DEPTHS[1] * period)
        cuttable = period > 0 and len(names) > depths[1] and cut_to(prepared, depths[0])
        traced = _run(prepared, recipe, group, device=device, micro_batches=micro_batches)
        if cuttable:
            larger = _prepare(recipe, device=device)
            cut_to(larger, depths[1])
            second = _run(larger, recipe, group, device=device, micro_batches=micro_batches)
            traced = _drawn_out([traced, second], depths=depths, period=period, names=names)
    return _as_step(traced, workspaces=CUBLAS_WORKSPACES if device == "cuda" else 0)


def _prepare(recipe: Recipe, *, device: str) -> PreparedModel:
    return prepare_model(recipe, device=torch.device(device), group=None)


@contextmanager
def _fake_process_group(ranks: int) -> Iterator[DataParallel]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        assert dist.group.WORLD is not None
        yield DataParallel(rank=0, size=ranks, group=dist.group.WORLD, device=torch.device("cpu"))
    finally:
        dist.destroy_process_group()


def _signature(block: nn.Module) -> tuple[Any, ...]:
    return (type(block), *((name, tuple(p.shape), p.requires_grad, p.dtype) for name, p in block.named_parameters()))


def _period(prepared: PreparedModel, recipe: Recipe) -> int:
    """Blocks after which all repeats: 1 where all are alike; 0 where nothing repeats and the model is traced whole."""
    blocks = list(prepared.blocks.values())
    config: Any = getattr(prepared.model, "config", None)
    kinds = getattr(config, "layer_types", None) or [None] * len(blocks)
    if not blocks or len({_signature(block) for block in blocks}) > 1 or len(kinds) != len(blocks):
        return 0
    checkpointing = recipe.activation_checkpointing
    every = checkpointing.every_n_blocks if checkpointing is not None else 1
    period = next(n for n in range(1, len(blocks) + 1) if all(kinds[i] == kinds[i % n] for i in range(len(blocks))))
    joint = every
    while joint % period:
        joint += every
    return joint if len(blocks) % joint == 0 else 0


def cut_to(prepared: PreparedModel, count: int) -> bool:
    """Leaves the first `count` blocks of a model; False where they do not stand in one list."""
    names = list(prepared.blocks)
    parents = {name.rpartition(".")[0] for name in names}
    parent = prepared.model.get_submodule(next(iter(parents))) if len(parents) == 1 else None
    if not isinstance(parent, nn.ModuleList) or len(parent) != len(names):
        return False
    del parent[count:]
    for name in names[count:]:
        del prepared.blocks[name]
    for module in prepared.model.modules():
        config: Any = getattr(module, "config", None)
        for key in ("num_hidden_layers", "n_layer", "num_layers"):
            if config is not None and key in vars(config) and getattr(config, key) == len(names):
                setattr(config, key, count)
    return True


class _Reducer(nn.Module):
    """In the place of DistributedDataParallel, which does not run on fake tensors: its reducer keeps buffers as large as the
    gradients, and a gradient that is reduced is copied into its place there and stays there."""

    def __init__(self, module: nn.Module, **settings: Any) -> None:
        super().__init__()
        self.module = module
        self.buckets: list[torch.Tensor] = []
        self._reduces = True
        for parameter in module.parameters():
            if parameter.requires_grad:
                bucket = torch.empty_like(parameter.detach())
                self.buckets.append(bucket)
                parameter.register_post_accumulate_grad_hook(partial(self._reduce, bucket))  # type: ignore[no-untyped-call]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def _set_ddp_runtime_logging_sample_rate(self, rate: int) -> None:
        """Nothing is timed."""

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        self._reduces = False
        try:
            yield
        finally:
            self._reduces = True

    def _reduce(self, bucket: torch.Tensor, parameter: torch.Tensor) -> None:
        if self._reduces and parameter.grad is not bucket:
            assert parameter.grad is not None
            bucket.copy_(parameter.grad)
            parameter.grad = bucket


class _TracedCounts:
    """In the place of what the ranks add up."""

    def loss_tokens(self) -> torch.Tensor:
        return torch.ones(())


@dataclass(frozen=True)
class _Traced:
    """The second step."""

    moments: list[tuple[Place, Held]]
    held: Held
    after_forward: Held


def _run(prepared: PreparedModel, recipe: Recipe, ranks: DataParallel, *, device: str, micro_batches: int) -> _Traced:
    """Trains two steps on fake tensors."""
    data = prepared.synthetic_data(recipe.data, recipe.batch)
    fake = FakeTensorMode(allow_non_fake_inputs=True)

    def fill(model: nn.Module, parameters: torch.device, buffers: torch.device) -> None:
        with fake:
            materialize(model, parameters=parameters, buffers=buffers)

    def label_of(tensor: torch.Tensor) -> str | None:
        vocabulary = prepared.vocabulary
        wide = vocabulary is not None and tensor.ndim > 1 and tensor.shape[-1] == vocabulary
        return "logits" if wide and tensor.numel() == data.tokens * (vocabulary or 0) else None

    tracker = Tracker(label_of, gloo=device == "cpu")
    offload = recipe.strategy.cpu_offload if device == "cuda" else None
    offloads = offload is not None
    transfers = _offloading(tracker, pinned=offload.pin_memory) if offload is not None else nullcontext()
    with _standing_in(tracker, data, device=device), transfers:
        wrapped = prepared.wrap(recipe, ranks, init_fn=fill)
        with fake, tracker:
            if offload is not None:
                tracker.mark_host(wrapped.module.parameters(), pinned=offload.pin_memory)
            tracker.mark(wrapped.module.parameters(), HOST if offloads else "parameters")
            tracker.mark(wrapped.module.buffers(), "parameters")
            tracker.mark(getattr(wrapped.model, "buckets", ()), "gradients")
            optimizer = make_optimizer(wrapped.module, recipe.optimizer)
            driver = _Driver(tracker, wrapped, optimizer, offloads=offloads)
            driver.watch({**prepared.blocks, **_head(wrapped.module)})
            try:
                for _ in train_steps(
                    wrapped,
                    optimizer,
                    _batches(data, micro_batches),
                    loss=data.loss,
                    learning_rate=lambda step: 1e-3,
                    loss_scale=LossScale(torch.device("cpu"), enabled=prepared.compute_dtype == torch.float16),
                    max_grad_norm=recipe.optimizer.max_grad_norm,
                    ranks=ranks.size,
                    heartbeat=driver.beat,
                ):
                    pass
            except Exception as error:  # whatever a model's code does with a tensor that has no values
                raise UntraceableError(f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}") from error
    return driver.traced()


def _head(model: Any) -> dict[str, nn.Module]:
    """The output embedding, by name, where there is one."""
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    return {clean_name(name): module for name, module in model.named_modules() if module is head} if head is not None else {}


class _Driver:
    """Tells the tracker where the step is, and what storages turn out to be."""

    def __init__(self, tracker: Tracker, wrapped: WrappedModel, optimizer: torch.optim.Optimizer, *, offloads: bool) -> None:
        self._tracker, self._optimizer = tracker, optimizer
        self._trained = [parameter for parameter in wrapped.module.parameters() if parameter.requires_grad]
        self._shard_label = {name: HOST if offloads else name for name in ("gradients", "optimizer")}
        self._steps = -1
        self._micro_batch = -1
        self._phase = ""
        self._forward_from = 0
        self._step_from: list[int] = []
        self._after_forward = 0

    def beat(self, phase: str) -> None:
        """As the loop calls it."""
        tracker, self._phase = self._tracker, phase
        if phase == "data":
            self._steps += 1
            self._micro_batch = -1
            tracker.mark(
                (value for state in self._optimizer.state.values() for value in state.values() if isinstance(value, torch.Tensor)),
                self._shard_label["optimizer"],
            )
            self._step_from.append(tracker.events)
            tracker.go("", phase="forward", micro_batch=0)
        elif phase == "forward":
            self._micro_batch += 1
            self._forward_from = tracker.events
            self._mark_gradients()
            tracker.go("", phase="forward", micro_batch=self._micro_batch)
        elif phase == "backward":
            tracker.label_live("activations", since=self._forward_from)
            if self._steps == 1 and self._micro_batch == 0:
                self._after_forward = tracker.events
            tracker.go(tracker.place.where, phase="backward")
        elif phase == "optimizer":
            self._mark_gradients()
            tracker.go("", phase="optimizer")

    def _mark_gradients(self) -> None:
        self._tracker.mark((parameter.grad for parameter in self._trained if parameter.grad is not None), self._shard_label["gradients"])

    def watch(self, modules: dict[str, nn.Module]) -> None:
        """Follows these through forward, backward and recomputation."""
        for name, module in modules.items():
            module.forward = partial(self._forward, name, module.forward)

    def _forward(self, name: str, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        tracker = self._tracker
        tracker.go(name)
        if self._phase == "backward":  # computed again
            since = tracker.events
            try:
                return forward(*args, **kwargs)
            finally:
                tracker.label_live("activations", since=since)
        out = forward(*args, **kwargs)
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                tensor.register_hook(lambda gradient: tracker.go(name))  # type: ignore[no-untyped-call]
                break
        return out

    def traced(self) -> _Traced:
        """The second step."""
        first, last = self._step_from[1:3]
        tracker = self._tracker
        return _Traced(tracker.play(first, last), tracker.at(last), tracker.at(self._after_forward))


def _batches(data: SyntheticData, micro_batches: int) -> Iterator[GlobalBatch]:
    for step, count in ((1, 1), (2, micro_batches)):  # the first is there for the optimizer's state alone
        moved = [_faked(data.tensors) for _ in range(count)]
        yield GlobalBatch(step, moved, _TracedCounts(), step, 0.0)  # type: ignore[arg-type]


def _faked(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return torch.empty_like(value)
    if isinstance(value, dict):
        return {name: _faked(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_faked(item) for item in value)
    return value


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """For as long as the context lasts; what another version of a library does not have stays away."""
    before = getattr(owner, name, None)
    if before is None:
        yield
        return
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextmanager
def computing_as_on(device: str, data: SyntheticData) -> Iterator[None]:
    """The model's operations as this kind of device does them, and nothing asked of tensors that have no values."""
    from transformers import masking_utils
    from transformers.integrations import moe

    from launcher.models import attention

    with ExitStack() as stack:
        # A kernel of experts whose shapes are known for bfloat16 alone; what stands in for it makes as much
        stack.enter_context(replaced(moe, "_can_use_grouped_mm", lambda tokens, weight, offsets: weight.dtype == torch.bfloat16))
        if "position_ids" not in data.tensors:  # else asked of the positions
            stack.enter_context(replaced(masking_utils, "find_packed_sequence_indices", lambda positions: None))
        if "cu_seq_lens_q" in data.tensors:
            lengths = attention.document_lengths(data.tensors["cu_seq_lens_q"])
            stack.enter_context(replaced(attention, "document_lengths", lambda bounds: lengths))
        if device == "cuda":
            stack.enter_context(replaced(attention, "has_varlen_kernel", lambda tensor: True))
            stack.enter_context(replaced(nn.functional, "scaled_dot_product_attention", cuda_attention))
        yield


@contextmanager
def _standing_in(tracker: Tracker, data: SyntheticData, *, device: str) -> Iterator[None]:
    """What fake tensors cannot do, or would do otherwise than the device, done in its place."""
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group

    from launcher.strategies import activation_checkpointing, ddp

    group = _fsdp_param_group.FSDPParamGroup
    post_backward = group.post_backward

    def marking(self: Any, *unused: Any) -> Any:
        for parameter in self.fsdp_params:
            for gradient in (parameter.unsharded_accumulated_grad, getattr(parameter, "_unsharded_param", parameter.sharded_param).grad):
                if gradient is not None and parameter.sharded_param.grad is not gradient:
                    tracker.mark([gradient], "gradients")
        return post_backward(self, *unused)

    on_host = replaced(activation_checkpointing, "save_on_cpu", partial(_saving_on_host, tracker))
    with (
        replaced(group, "post_backward", marking),
        replaced(ddp, "DistributedDataParallel", _Reducer),
        resizing_watched(tracker),
        computing_as_on(device, data),
        on_host if device == "cuda" else nullcontext(),
    ):
        yield


@contextmanager
def _offloading(tracker: Tracker, *, pinned: bool) -> Iterator[None]:
    """CPU offload: FSDP copies shards to the device and gradients to host memory. On fake tensors both are on one device, where
    `Tensor.to` copies nothing."""
    plain = torch.Tensor.to

    def to(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        file = sys._getframe(1).f_code.co_filename
        if "non_blocking" not in kwargs or not file.endswith(("_fsdp_param.py", "_fsdp_collectives.py")):
            return plain(tensor, *args, **kwargs)
        copied = tensor.clone()
        if file.endswith("_fsdp_param.py"):
            tracker.mark([copied], "communication")
        else:
            tracker.mark_host([copied], pinned=pinned)
        return copied

    with replaced(torch.Tensor, "to", to):
        yield


@contextmanager
def _saving_on_host(tracker: Tracker, pin_memory: bool = False) -> Iterator[None]:
    """Activation offload: what is saved goes to host memory, and comes back as a copy."""

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        host = tensor.detach().clone()
        tracker.mark_host([host], pinned=pin_memory)
        return host

    def unpack(host: torch.Tensor) -> torch.Tensor:
        device = host.clone()
        tracker.mark([device], "activations")
        return device

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield


def cuda_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """scaled_dot_product_attention as CUDA does it: the flash kernel where it can, else the memory-efficient one, which wants a
    mask as numbers, else plain products."""
    if torch.is_autocast_enabled("cpu"):
        query, key, value = (tensor.to(torch.get_autocast_dtype("cpu")) for tensor in (query, key, value))
    out: torch.Tensor
    half = query.dtype in (torch.bfloat16, torch.float16)
    if attn_mask is None and half and query.shape[-1] <= 256:
        out, *_ = torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, scale=scale)
        return out
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.where(attn_mask, 0.0, float("-inf")).to(query.dtype)
    if enable_gqa and key.shape[1] != query.shape[1]:
        out, _ = torch.ops.aten._scaled_dot_product_attention_math(
            query, key, value, attn_mask, dropout_p, is_causal, None, scale=scale, enable_gqa=True
        )
        return out
    bias = None if attn_mask is None else attn_mask.expand(*query.shape[:-1], key.shape[-2])
    out, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(query, key, value, bias, True, dropout_p, is_causal, scale=scale)
    return out


def _as_step(traced: _Traced, *, workspaces: int) -> StepMemory:
    timeline = [
        Moment(
            phase=place.phase,
            micro_batch=place.micro_batch,
            where=place.where,
            components=_components(at) + Components(temporary=workspaces),
        )
        for place, at in traced.moments
    ]
    phases = {phase: max((m for m in timeline if m.phase == phase), key=lambda m: m.components.total) for phase in PHASES}
    return StepMemory(
        method="traced",
        peak=max(phases.values(), key=lambda m: m.components.total),
        phases=phases,
        held=_components(traced.held),
        after_forward=_components(traced.after_forward),
        timeline=tuple(timeline),
        host=max(at[HOST] for _, at in traced.moments),
    )


def _components(held: Held) -> Components:
    return Components(**{name: held[name] for name in COMPONENTS})


def _drawn_out(traces: list[_Traced], *, depths: tuple[int, int], period: int, names: list[str]) -> _Traced:
    """A straight line through two depths, at the depth of `names`.

    The first two and the last two periods of blocks stand for themselves; what lies between them lies on a line.
    """
    depth = len(names)

    def line(small: Held, large: Held) -> Held:
        slope = {name: (large[name] - small[name]) / (depths[1] - depths[0]) for name in small}
        return {name: max(0, round(small[name] + slope[name] * (depth - depths[0]))) for name in small}

    def keyed(trace: _Traced, count: int) -> dict[tuple[str, int, str], tuple[Place, Held]]:
        found: dict[tuple[str, int, str], tuple[Place, Held]] = {}
        for place, held in trace.moments:
            role = place.where
            if place.where in names:
                index = names.index(place.where)
                role = f"first {index}" if index < 2 * period else f"last {count - index}" if index >= count - 2 * period else "between"
            key = (place.phase, place.micro_batch, role)
            if key not in found or _on_device(held) > _on_device(found[key][1]):
                found[key] = (place, held)
        return found

    small, large = (keyed(trace, count) for trace, count in zip(traces, depths, strict=True))
    moments: list[tuple[Place, Held]] = []
    for key, (place, held) in small.items():
        if key not in large:
            continue
        _, micro_batch, role = key
        where = place.where
        if role.startswith("last "):
            where = names[depth - int(role.removeprefix("last "))]
        moments.append((Place(place.phase, micro_batch, where), line(held, large[key][1])))
    return _Traced(
        _with_those_between(moments, names),
        line(traces[0].held, traces[1].held),
        line(traces[0].after_forward, traces[1].after_forward),
    )


def _with_those_between(moments: list[tuple[Place, Held]], names: list[str]) -> list[tuple[Place, Held]]:
    """Blocks that were not traced, on a line between their neighbours that were: for the drawing."""
    result: list[tuple[Place, Held]] = []
    for place, held in moments:
        if result:
            before, held_before = result[-1]
            if before.phase == place.phase and before.where in names and place.where in names:
                start, end = names.index(before.where), names.index(place.where)
                step = 1 if end > start else -1
                for index in range(start + step, end, step):
                    share = (index - start) / (end - start)
                    mixed = {name: round(held_before[name] + (held[name] - held_before[name]) * share) for name in held}
                    result.append((Place(place.phase, place.micro_batch, names[index]), mixed))
        result.append((place, held))
    return result


def _on_device(held: Held) -> int:
    return sum(held.values()) - held[HOST]
