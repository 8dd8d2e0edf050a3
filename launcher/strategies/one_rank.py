"""One rank: nothing is sharded or reduced. The rank holds float32 masters, and copies of them in the
compute dtype.

Forward and backward passes use the copies, which are made once per step (6 bytes moved for a
parameter in 16 bits). The gradient of a micro-batch is added to the gradient of the master, in
float32, as soon as it is complete (6 bytes in the first micro-batch of a step, 10 in later ones),
and is freed. FSDP2 over one rank casts and copies weights for each pass and gradients for each
micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import nn

from launcher.distributed.rank_layout import RankLayout
from launcher.libraries.private import foreach_copy_, version_of
from launcher.strategies.base import InitFn, Root, WrappedModel, cast_inputs, dtype_name


class OneRank(WrappedModel):
    """Outside of `micro_batch` and `forward_context`, the module has its float32 masters, which the
    optimizer updates and checkpoints hold. Inside, it has the copies in the compute dtype."""

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[nn.Module],
        unused: Sequence[nn.Module] = (),
        in_float32: Collection[nn.Parameter] = (),
        *,
        param_dtype: torch.dtype,
        ranks: RankLayout,
        init_fn: InitFn,
    ) -> None:
        """The inputs of the model and of its `units` are cast, as FSDP casts them. The weights of
        `unused` modules and those `in_float32` are not cast."""
        kept = {id(parameter) for parameter in in_float32}
        # By module and name, because `init_fn` makes other parameters of them
        exact = {
            (module, name)
            for module in model.modules()
            for name, parameter in module._parameters.items()
            if id(parameter) in kept
        }
        init_fn(model, ranks.device, ranks.device)
        super().__init__(Root(model), module=model, ranks=ranks)
        self._param_dtype = param_dtype
        never_called = {module for each in unused for module in each.modules()}
        self._uses: list[tuple[nn.Module, str, nn.Parameter]] = [
            (module, name, parameter)
            for module in model.modules()
            if module not in never_called
            for name, parameter in module._parameters.items()
            if parameter is not None
            and (module, name) not in exact
            and parameter.is_floating_point()
            and parameter.dtype != param_dtype
        ]
        self._masters = list(dict.fromkeys(parameter for _, _, parameter in self._uses))
        self._copies: dict[torch.Tensor, nn.Parameter] = {}
        self._versions: list[int] = []
        self._depth = 0
        if self._masters:
            for unit in dict.fromkeys((model, *units)):
                cast_inputs(unit, param_dtype)

    @property
    def copies(self) -> list[torch.Tensor]:
        """The weights in the compute dtype, which exist from the first forward pass on."""
        return list(self._copies.values())

    @property
    def copied_bytes(self) -> int:
        """Bytes of these weights."""
        return sum(master.numel() * self._param_dtype.itemsize for master in self._masters)

    def description(self) -> str:
        compute = dtype_name(self._param_dtype)
        master = dtype_name(self._parameters[0].dtype) if self._parameters else compute
        copied = f", copies of {len(self._masters)} weights in {compute}" if self._masters else ""
        return (
            f"one rank: nothing is sharded or reduced; {master} masters{copied}, compute in "
            f"{compute}, gradients added in {master}"
        )

    @contextmanager
    def forward_context(self) -> Iterator[None]:
        """A context in which the module has the weights in the compute dtype."""
        with self._computing(), super().forward_context():
            yield

    @contextmanager
    def micro_batch(self, *, last: bool) -> Iterator[None]:
        with self._computing():
            yield

    def after_step(self) -> None:
        """Makes the next forward pass copy the masters: torch's fused operators and Triton's kernels
        write to the masters without increasing their version counters."""
        torch.autograd.graph.increment_version(self._parameters)

    @contextmanager
    def _computing(self) -> Iterator[None]:
        if self._depth == 0:
            self._update_copies()
            self._place(self._copies)
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            if self._depth == 0:
                self._place({})

    def _place(self, copies: Mapping[torch.Tensor, nn.Parameter]) -> None:
        """Sets the weights of the modules: these copies, or the masters."""
        for module, name, master in self._uses:
            module._parameters[name] = copies.get(master, master)

    @torch.no_grad()
    def _update_copies(self) -> None:
        """Copies weights that were written since the last time, by their version counters."""
        if not self._copies:
            for master in self._masters:
                weight = nn.Parameter(master.to(self._param_dtype), master.requires_grad)
                if master.requires_grad:
                    add: Callable[[torch.Tensor], None] = partial(_add_gradient, master)
                    weight.register_post_accumulate_grad_hook(add)  # type: ignore[no-untyped-call]
                self._copies[master] = weight
        else:
            changed: list[torch.Tensor] = [
                master
                for master, version in zip(self._masters, self._versions, strict=True)
                if version_of(master) != version
            ]
            if changed:
                foreach_copy_([self._copies[master] for master in changed], changed)
        self._versions = [version_of(master) for master in self._masters]


def _add_gradient(master: nn.Parameter, weight: torch.Tensor) -> None:
    """Adds the gradient of a copy to the gradient of its master, and frees it."""
    gradient, weight.grad = weight.grad, None
    assert gradient is not None
    if master.grad is None:
        master.grad = gradient.to(master.dtype)
    else:
        master.grad.add_(gradient)
