"""Parameters, gradients and optimizer state sharded over the ranks: FSDP2's fully_shard, a group a block."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor

from launcher.distributed.process_group import DataParallel
from launcher.strategies.base import Fill


def make_mesh(ranks: DataParallel, replicate: int) -> DeviceMesh:
    """A (shard) mesh, or a (replicate, shard) one: neighbouring ranks, those of a node, shard; copies lie across."""
    if replicate == 1:
        return DeviceMesh.from_group(ranks.group, ranks.device.type, mesh_dim_names=("shard",))
    members = torch.tensor(dist.get_process_group_ranks(ranks.group)).view(replicate, -1)
    return DeviceMesh(ranks.device.type, members, mesh_dim_names=("replicate", "shard"))


class Fsdp:
    """fully_shard with a mixed-precision policy, optionally with the shards in host memory."""

    def __init__(
        self,
        model: nn.Module,
        *,
        blocks: Sequence[nn.Module],
        ranks: DataParallel,
        param_dtype: torch.dtype,
        reduce_dtype: torch.dtype,
        reshard_after_forward: bool,
        reshard_after_backward: bool,
        replicate: int,
        cpu_offload: bool,
        pin_memory: bool,
        sync_every_micro_batch: bool,
        fill: Fill,
    ) -> None:
        mesh = make_mesh(ranks, replicate)
        policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype)
        on_gpu = ranks.device.type == "cuda"
        offload = (
            CPUOffloadPolicy(pin_memory=pin_memory and on_gpu) if cpu_offload else OffloadPolicy()
        )
        for block in blocks:
            fully_shard(
                block,
                mesh=mesh,
                mp_policy=policy,
                offload_policy=offload,
                reshard_after_forward=reshard_after_forward,
            )
        # The root's own weights (embedding, head) end the forward pass and begin the backward pass: freed between the
        # two they would be gathered again at once. None is fully_shard's word for that.
        fully_shard(
            model,
            mesh=mesh,
            mp_policy=policy,
            offload_policy=offload,
            reshard_after_forward=None if reshard_after_forward else False,
        )
        fill(model, torch.device("cpu") if cpu_offload else ranks.device, ranks.device)
        assert isinstance(model, FSDPModule)
        self.module: nn.Module = model
        self.model: nn.Module = model
        self._root: FSDPModule = model
        self._shards: dist.ProcessGroup = mesh.get_group("shard")
        self._parameters = [
            parameter for parameter in model.parameters() if parameter.requires_grad
        ]
        self._reshard_after_forward = reshard_after_forward
        self._reshard_after_backward = reshard_after_backward
        self._sync_every_micro_batch = sync_every_micro_batch
        self._last: bool | None = None
        self._offloaded = cpu_offload

    def description(self) -> str:
        """Seen on a sharded parameter and on the groups that fully_shard made."""
        groups = [module for module in self.module.modules() if isinstance(module, FSDPModule)]
        shard = max(
            (p for p in self.module.parameters() if isinstance(p, DTensor)), key=lambda p: p.numel()
        )
        trained = self._parameters[0].dtype
        policy = groups[0]._get_fsdp_state()._mp_policy
        names = [
            str(dtype or shard.dtype).removeprefix("torch.")
            for dtype in (trained, policy.param_dtype, policy.reduce_dtype)
        ]
        frozen = {
            str(p.dtype).removeprefix("torch.")
            for p in self.module.parameters()
            if not p.requires_grad
        }
        mesh = " x ".join(
            f"{shard.device_mesh.size(dim)} {name}"
            for dim, name in enumerate(shard.device_mesh.mesh_dim_names or ())
        )
        when = "each micro-batch" if self._sync_every_micro_batch else "the last micro-batch"
        where = f"on {shard.to_local().device}" + (" (offloaded)" if self._offloaded else "")
        return (
            f"fsdp: {len(groups)} groups over a mesh of {mesh}, {names[0]} masters {where}, "
            + (f"frozen weights in {', '.join(sorted(frozen))}, " if frozen else "")
            + f"largest tensor {tuple(shard.shape)} held as {tuple(shard.to_local().shape)}, "
            f"gathered in {names[1]}, gradients reduced in {names[2]} after {when}"
        )

    def forward_context(self) -> AbstractContextManager[object]:
        """Nothing: the policy casts what it gathers."""
        return nullcontext()

    @contextmanager
    def micro_batch(self, *, last: bool) -> Iterator[None]:
        """Reduces gradients in each micro-batch or in the last, frees gathered weights after each or after the last."""
        if last is not self._last:  # each of these walks all modules: only when something changes
            self._root.set_is_last_backward(last)
            if not self._sync_every_micro_batch:
                self._root.set_requires_gradient_sync(last)
            if not self._reshard_after_backward:
                self._root.set_reshard_after_backward(last)
                if self._reshard_after_forward and not last:
                    # What the backward pass keeps is gathered in every later forward pass of the step anyway:
                    # freeing it there would save nothing at the peak, and cost a gathering.
                    self._root.set_reshard_after_forward(False)
            self._last = last
        yield

    def reshard(self) -> None:
        """The root's weights stay gathered after a forward pass; parameters are shards again after this."""
        for module in self.module.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    @torch.no_grad()
    def grad_norm(self) -> torch.Tensor:
        """Each rank adds up its shards, one all-reduce of one number over the shards adds up the ranks."""
        gradients = [
            _local(parameter.grad) for parameter in self._parameters if parameter.grad is not None
        ]
        squared: torch.Tensor = torch.linalg.vector_norm(
            torch.stack(torch._foreach_norm(gradients))
        ).square()
        dist.all_reduce(squared, group=self._shards)
        return squared.sqrt()


def _local(gradient: torch.Tensor) -> torch.Tensor:
    assert isinstance(gradient, DTensor)
    return gradient.to_local()
