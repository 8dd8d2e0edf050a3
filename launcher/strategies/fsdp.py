"""FSDP2: parameters, gradients and optimizer state sharded over the ranks, one group per block."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from launcher.distributed.process_group import DataParallel
from launcher.recipe import schema
from launcher.strategies.base import InitFn, WrappedModel, compute_dtype, dtype_name, norm_of


def _make_mesh(ranks: DataParallel, replicate: int) -> DeviceMesh:
    """A (shard) mesh, or a (replicate, shard) one in which the ranks of a node shard."""
    if replicate == 1:
        return DeviceMesh.from_group(ranks.group, ranks.device.type, mesh_dim_names=("shard",))
    members = torch.tensor(dist.get_process_group_ranks(ranks.group)).view(replicate, -1)
    return DeviceMesh(ranks.device.type, members, mesh_dim_names=("replicate", "shard"))


class Fsdp(WrappedModel):
    """fully_shard with a mixed-precision policy, optionally with the shards in host memory."""

    def __init__(
        self,
        model: nn.Module,
        strategy: schema.Strategy,
        *,
        blocks: Sequence[nn.Module],
        ranks: DataParallel,
        init_fn: InitFn,
    ) -> None:
        mesh = _make_mesh(ranks, strategy.replicate)
        precision, offload = strategy.mixed_precision, strategy.cpu_offload
        reduce_dtype = "float32" if precision is None else precision.reduce_dtype
        policies: dict[str, Any] = {
            "mesh": mesh,
            "mp_policy": MixedPrecisionPolicy(
                param_dtype=compute_dtype(strategy), reduce_dtype=getattr(torch, reduce_dtype)
            ),
        }
        if offload is not None:
            pin_memory = offload.pin_memory and ranks.device.type == "cuda"
            policies["offload_policy"] = CPUOffloadPolicy(pin_memory=pin_memory)
        reshard: bool | None = strategy.reshard_after_forward
        for block in blocks:
            fully_shard(block, reshard_after_forward=reshard, **policies)
        # The root's own weights (embedding, head) are used at the end of the forward pass and the
        # start of the backward pass. None tells fully_shard to keep them unsharded in between.
        fully_shard(model, reshard_after_forward=None if reshard else False, **policies)
        init_fn(model, torch.device("cpu") if offload is not None else ranks.device, ranks.device)
        assert isinstance(model, FSDPModule)
        super().__init__(model, module=model)
        self._root: FSDPModule = model
        self._shards: dist.ProcessGroup = mesh.get_group("shard")
        self._strategy = strategy
        # auto: after each one
        self._sync_every_micro_batch = strategy.sync_every_micro_batch is not False
        self._last: bool | None = None

    def description(self) -> str:
        """Read off a sharded parameter and the groups that fully_shard made."""
        groups = [module for module in self.module.modules() if isinstance(module, FSDPModule)]
        parameters = list(self.module.parameters())
        shard = max((p for p in parameters if isinstance(p, DTensor)), key=lambda p: p.numel())
        local, mesh = shard.to_local(), shard.device_mesh
        policy = groups[0]._get_fsdp_state()._mp_policy
        masters, gathered, reduced = (
            dtype_name(dtype or shard.dtype)
            for dtype in (self._parameters[0].dtype, policy.param_dtype, policy.reduce_dtype)
        )
        frozen = sorted({dtype_name(p.dtype) for p in parameters if not p.requires_grad})
        sizes = [f"{mesh.size(i)} {name}" for i, name in enumerate(mesh.mesh_dim_names or ())]
        offloaded = " (offloaded)" if self._strategy.cpu_offload is not None else ""
        when = "each micro-batch" if self._sync_every_micro_batch else "the last micro-batch"
        return (
            f"fsdp: {len(groups)} groups over a mesh of {' x '.join(sizes)}, {masters} masters on "
            f"{local.device}{offloaded}, "
            + (f"frozen weights in {', '.join(frozen)}, " if frozen else "")
            + f"largest tensor {tuple(shard.shape)} sharded to {tuple(local.shape)}, "
            f"gathered in {gathered}, gradients reduced in {reduced} after {when}"
        )

    @contextmanager
    def micro_batch(self, *, last: bool) -> Iterator[None]:
        """Reduces gradients and frees unsharded weights after each micro-batch or only the last."""
        if last is not self._last:  # only on a change: these calls walk all modules
            self._root.set_is_last_backward(last)
            if not self._sync_every_micro_batch:
                self._root.set_requires_gradient_sync(last)
            if not self._strategy.reshard_after_backward:
                self._root.set_reshard_after_backward(last)
                if self._strategy.reshard_after_forward and not last:
                    # The backward pass keeps these weights unsharded for the later micro-batches
                    # anyway. Freeing them after the forward pass would cost an all-gather and not
                    # lower the peak.
                    self._root.set_reshard_after_forward(False)
            self._last = last
        yield

    def reshard(self) -> None:
        """Shards all parameters again: the root's stay unsharded after a forward pass."""
        for module in self.module.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    @torch.no_grad()
    def grad_norm(self) -> torch.Tensor:
        """Sums over each rank's shards, then one all-reduce of one number over the shard group."""
        gradients = []
        for parameter in self._parameters:
            if parameter.grad is not None:
                assert isinstance(parameter.grad, DTensor)
                gradients.append(parameter.grad.to_local())
        squared = norm_of(gradients).square()
        dist.all_reduce(squared, group=self._shards)
        return squared.sqrt()
