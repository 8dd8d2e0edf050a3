"""Every rank holds the model; gradients are averaged while the backward pass still runs."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from launcher.distributed.process_group import DataParallel
from launcher.strategies.base import Fill


class Ddp:
    """DistributedDataParallel under autocast."""

    def __init__(
        self,
        model: nn.Module,
        *,
        ranks: DataParallel,
        param_dtype: torch.dtype,
        sync_every_micro_batch: bool,
        fill: Fill,
    ) -> None:
        fill(model, ranks.device, ranks.device)
        # torch 2.13 renames broadcast_buffers
        renamed = (
            "forward_sync_buffers" in inspect.signature(DistributedDataParallel.__init__).parameters
        )
        no_buffers: dict[str, Any] = {
            "forward_sync_buffers" if renamed else "broadcast_buffers": False
        }
        self.module = model
        self._ddp = DistributedDataParallel(
            model,
            device_ids=[ranks.device] if ranks.device.type == "cuda" else None,
            process_group=ranks.group,
            init_sync=False,  # every rank has filled in the same weights
            **no_buffers,
            gradient_as_bucket_view=True,
        )
        # DDP waits for events to time itself in the first ten iterations, which cannot be switched off, and in every 100th
        self._ddp._set_ddp_runtime_logging_sample_rate(2**31 - 1)  # type: ignore[no-untyped-call]
        self.model: nn.Module = self._ddp
        self._parameters = [
            parameter for parameter in model.parameters() if parameter.requires_grad
        ]
        self._device_type = ranks.device.type
        self._param_dtype = param_dtype
        self._sync_every_micro_batch = sync_every_micro_batch
        self._group = ranks.group
        self._reductions = 0

    def description(self) -> str:
        """Seen on the first parameter and on DDP itself."""
        master = str(self._parameters[0].dtype).removeprefix("torch.")
        compute = str(self._param_dtype).removeprefix("torch.")
        when = "each micro-batch" if self._sync_every_micro_batch else "the last micro-batch"
        return f"ddp: whole model on each rank, {master} masters, compute in {compute}, gradients all-reduced in {master} after {when}"

    def forward_context(self) -> AbstractContextManager[object]:
        """Autocast: weights are cast at each use, masters stay float32."""
        if self._param_dtype == torch.float32:
            return nullcontext()
        return torch.autocast(self._device_type, dtype=self._param_dtype)

    @contextmanager
    def micro_batch(self, *, last: bool) -> Iterator[None]:
        """Reduces gradients in the last micro-batch of a step, or in each.

        After the first reduction DDP makes new buckets. NCCL's process group may still hold the old ones then, until it
        has seen that their reduction is done: waiting for that once saves a copy of all gradients at the peak.
        """
        if self._reductions == 1 and self._device_type == "cuda":
            self._group._wait_for_pending_works()
        reduces = last or self._sync_every_micro_batch
        with nullcontext() if reduces else self._ddp.no_sync():
            yield
        self._reductions += reduces

    def reshard(self) -> None:
        """Nothing is gathered."""

    @torch.no_grad()
    def grad_norm(self) -> torch.Tensor:
        """No rank needs another for this: reduced gradients are the same on all."""
        gradients = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        norm: torch.Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
        return norm
