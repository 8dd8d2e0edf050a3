"""DDP: every rank has the whole model; gradients are all-reduced in the backward pass.

With ZeRO-1 (Rajbhandari et al., 2020) each rank holds the optimizer state of its rows of each
parameter only. It updates these rows, and an all-gather distributes them. The parameters of the
optimizer are DTensors, as with FSDP, so optimizers and checkpoints need not distinguish the two.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel

from launcher.distributed.process_group import all_gather_single
from launcher.distributed.rank_layout import RankLayout
from launcher.errors import RecipeError
from launcher.libraries.private import is_reduced, stop_ddp_timing, wait_for_pending_works
from launcher.strategies.base import InitFn, Root, WrappedModel, dtype_name


class Ddp(WrappedModel):
    """DistributedDataParallel under autocast."""

    def __init__(
        self,
        model: nn.Module,
        *,
        param_dtype: torch.dtype,
        shard_optimizer: bool = False,
        sync_every_micro_batch: bool = False,
        ranks: RankLayout,
        init_fn: InitFn,
        data_parallel: Callable[..., nn.Module] = DistributedDataParallel,
    ) -> None:
        init_fn(model, ranks.device, ranks.device)
        # torch 2.13 renames broadcast_buffers
        names = inspect.signature(DistributedDataParallel.__init__).parameters
        buffers = "forward_sync_buffers" if "forward_sync_buffers" in names else "broadcast_buffers"
        no_buffers: dict[str, Any] = {buffers: False}
        self._ddp: Any = Root(
            model
        )  # DDP refuses a model without trained parameters, such as a teacher
        if any(parameter.requires_grad for parameter in model.parameters()):
            self._ddp = data_parallel(
                self._ddp,
                device_ids=[ranks.device] if ranks.device.type == "cuda" else None,
                process_group=ranks.group,
                init_sync=False,  # every rank has initialized the same weights
                **no_buffers,
                gradient_as_bucket_view=True,
            )
            stop_ddp_timing(self._ddp)
        super().__init__(self._ddp, module=model, ranks=ranks)
        self._shards = {
            # A scalar has no rows: each rank updates all of it
            whole: nn.Parameter(shard_rows(whole, ranks.shard_mesh))
            for whole in self._parameters
            if shard_optimizer and whole.ndim
        }
        """Each parameter with its shard, which the optimizer updates (ZeRO-1)."""
        self._group = ranks.group
        # Weights are cast at each use, master weights stay in float32
        self.autocast_dtype = None if param_dtype == torch.float32 else param_dtype
        self._param_dtype, self._sync_every_micro_batch = param_dtype, sync_every_micro_batch
        self._reductions = 0
        self._reduction, self._reducing = ExitStack(), False
        if ranks.size > 1 and self._parameters:
            self._time_reduction()

    def _time_reduction(self) -> None:
        """Times the wait for the last buckets, which begins once the first parameter has its
        gradient."""
        this = weakref.ref(self)  # the garbage collector does not find cycles through hooks

        def wait_begins(parameter: torch.Tensor) -> None:
            if (wrapped := this()) is not None and wrapped._reducing:
                wrapped._reduction.enter_context(wrapped.waiting())

        first: Any = self._parameters[0]
        first.register_post_accumulate_grad_hook(wait_begins)

    def description(self) -> str:
        master, compute = dtype_name(self._parameters[0].dtype), dtype_name(self._param_dtype)
        when = "each micro-batch" if self._sync_every_micro_batch else "the last micro-batch"
        return (
            f"ddp: whole model on each rank, {master} masters, compute in {compute}, "
            f"gradients all-reduced in {master} after {when}"
            + (", optimizer state sharded" if self._shards else "")
        )

    @contextmanager
    def micro_batch(self, *, last: bool) -> Iterator[None]:
        # DDP allocates new buckets after the first reduction, while NCCL's process group may still
        # hold the old ones. Waiting once for that reduction saves a copy of all gradients at the
        # peak.
        if self._reductions == 1 and self._device_type == "cuda":
            wait_for_pending_works(self._group)
        self._reducing = last or self._sync_every_micro_batch
        with self._reduction, nullcontext() if self._reducing else self._ddp.no_sync():
            yield
        self._reductions += self._reducing

    def finish_gradients(self) -> None:
        """Raises RecipeError if DDP has not reduced the gradients, since the last micro-batch did not
        use all parameters: each rank would update the weights with its own."""
        if not isinstance(self._ddp, DistributedDataParallel) or is_reduced(self._ddp):
            return
        unused = [
            name
            for name, parameter in self.module.named_parameters()
            if parameter.requires_grad and parameter.grad is None
        ]
        shown = ", ".join(unused[:5]) + (f" and {len(unused) - 5} more" if len(unused) > 5 else "")
        raise RecipeError(
            "strategy.kind: ddp: the loss of the last micro-batch did not depend on all trained "
            f"parameters{f', such as {shown}' if unused else ''}, so gradients are not reduced over "
            "the ranks; let the loss use them, freeze them (model.freeze), or set "
            "strategy.kind=fsdp"
        )

    def optimized(self, parameter: nn.Parameter) -> nn.Parameter:
        return self._shards.get(parameter, parameter)

    def before_step(self) -> None:
        """Gives each shard the gradient of its rows."""
        for whole, shard in self._shards.items():
            if whole.grad is not None:
                assert isinstance(shard, DTensor)
                shard.grad = shard_rows(whole.grad, shard.device_mesh)

    @torch.no_grad()
    def after_step(self) -> None:
        """Gathers the updated shards, and frees the gradients."""
        works = []
        for whole, shard in self._shards.items():
            assert isinstance(shard, DTensor)
            whole.grad = None
            group, mine = shard.device_mesh.get_group(), shard.to_local()
            if whole.shape[0] % group.size() == 0 and whole.is_contiguous():
                works.append(all_gather_single(whole.detach(), mine, group, async_op=True))
                continue
            chunk = -(-whole.shape[0] // group.size())
            rows = whole.new_empty(group.size() * chunk, *whole.shape[1:])
            padded = rows[group.rank() * chunk :][:chunk]
            padded[: len(mine)] = mine
            all_gather_single(rows, padded, group)
            whole.copy_(rows[: len(whole)])
        for work in works:
            work.wait()


def shard_rows(whole: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """A view of this rank's rows as a DTensor. The rows are divided as FSDP divides them. A scalar
    has no rows."""
    size, rank = mesh.size(), mesh.get_local_rank()
    chunk = -(-whole.shape[0] // size)
    mine = whole.detach()[rank * chunk : (rank + 1) * chunk]
    sharded: torch.Tensor = DTensor.from_local(
        mine, mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride()
    )
    return sharded
