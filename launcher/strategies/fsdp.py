"""FSDP2: parameters, gradients and optimizer state sharded over the ranks, one group per block."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from launcher.distributed.rank_layout import PARALLEL_SIZES, RankLayout
from launcher.distributed.units import PartialGradients, Unit
from launcher.libraries.private import (
    after_fsdp_reductions,
    copied_gradients,
    foreach_copy_,
    foreach_div_,
    fsdp_groups,
    time_fsdp_waits,
)
from launcher.recipe.schema import CpuOffload
from launcher.strategies.base import (
    InitFn,
    NormGroup,
    Root,
    WrappedModel,
    cast_inputs,
    dtype_name,
    local_gradient,
    offloads_parameters,
    units_without,
)

_NOT_CALLED = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
"""Containers, which have no forward pass."""


@dataclass(frozen=True, kw_only=True)
class FsdpPolicy:
    """How FSDP shards, gathers and reduces. The fields are keys of the recipe's `strategy`."""

    param_dtype: torch.dtype
    reduce_dtype: torch.dtype
    reshard_after_forward: bool
    reshard_after_backward: bool
    cpu_offload: CpuOffload | None
    sync_every_micro_batch: bool


class HostSums:
    """Sums the gradients of micro-batches in host memory.

    FSDP sums them there, too. But from the second micro-batch on, FSDP adds the gradients of a
    group at once. So it copies them to pageable memory, and waits for each copy: on an H100 at 1.4
    GB/s, where copies to page-locked memory reach 55 GB/s. This class makes FSDP copy the gradients
    of every micro-batch like those of the first one, and adds them after the reduction of the next
    group has been started.
    """

    def __init__(self) -> None:
        self._sums: dict[nn.Parameter, torch.Tensor] = {}
        self._copied: Any = None
        """The group whose gradients are being copied."""

    def after_reduction(self, group: Any) -> None:
        """Adds the gradients of the previous group."""
        self._add()
        self._copied = group

    def after_backward(self, *, last: bool) -> None:
        """Adds the gradients of the last group. After the last micro-batch, the sums become the
        gradients."""
        self._add()
        if last:
            for parameter, total in self._sums.items():
                parameter.grad = total
            self._sums = {}

    @torch.no_grad()
    def _add(self) -> None:
        if self._copied is None:
            return
        for parameter in copied_gradients(self._copied):
            if (total := self._sums.get(parameter)) is None:
                assert parameter.grad is not None
                self._sums[parameter] = parameter.grad
            else:
                total.add_(parameter.grad)  # type: ignore[arg-type]
            parameter.grad = None
        self._copied = None


@dataclass(frozen=True)
class _Whole:
    """Trained parameters that each rank of a group holds whole; see `PartialGradients`."""

    group: dist.ProcessGroup
    parameters: list[nn.Parameter]
    summed: Set[nn.Parameter | None]


class Fsdp(WrappedModel):
    """fully_shard with a mixed-precision policy, optionally with the shards in host memory."""

    def __init__(
        self,
        model: nn.Module,
        blocks: Sequence[nn.Module],
        units: Sequence[Unit] = (),
        partial: Sequence[PartialGradients] = (),
        in_float32: Collection[nn.Parameter] = (),
        *,
        policy: FsdpPolicy,
        ranks: RankLayout,
        init_fn: InitFn,
    ) -> None:
        """`units` are those beside the blocks. The parameters `in_float32` are gathered so: the unit that
        they belong to has a second group for them."""
        self._policy, self._ranks = policy, ranks
        policies: dict[str, Any] = {
            "mesh": ranks.shard_mesh,
            "mp_policy": MixedPrecisionPolicy(policy.param_dtype, policy.reduce_dtype),
        }
        place, cpu_offload = ranks.device, policy.cpu_offload
        if cpu_offload is not None and offloads_parameters(cpu_offload):
            pin_memory = cpu_offload.pin_memory and place.type == "cuda"
            policies["offload_policy"] = CPUOffloadPolicy(pin_memory=pin_memory)
            place = torch.device("cpu")
        reshard = policy.reshard_after_forward
        inner = [unit for unit in units if unit.mesh is not None or not unit.called]
        separate = {p for unit in inner for module in unit.modules for p in module.parameters()}
        exact = set(in_float32) - separate
        # Units with such weights are parts of the root, and modules of a second group
        outer = [(unit, units_without(unit.modules, exact)) for unit in units if unit not in inner]
        outer = [(unit, modules) for unit, modules in outer if modules]
        unit_modules = {*blocks, *(module for _, modules in outer for module in modules)}
        holders = _holders(model, unit_modules, exact)
        exact &= {p for modules in holders.values() for m in modules for p in m.parameters()}
        for unit in inner:
            own: dict[str, Any] = policies | {"mesh": unit.mesh or ranks.shard_mesh}
            if not unit.called:  # its weights stay sharded
                # Without a dtype of the reduction, FSDP does not look for gradients of weights that it
                # has never gathered
                own["mp_policy"] = MixedPrecisionPolicy()
            fully_shard([*unit.modules], reshard_after_forward=reshard, **own)
        if exact:
            policies["ignored_params"] = exact
        for block in blocks:
            fully_shard(block, reshard_after_forward=reshard, **policies)
        for unit, modules in outer:
            # What ends the forward pass stays gathered until the backward pass begins with it, and so
            # does the root (None), to which its weights belong if it is no unit of its own
            reshards = reshard and not unit.ends_forward
            fully_shard(modules, reshard_after_forward=reshards, **policies)
            if not unit.used_in_backward:
                (first,) = modules
                assert isinstance(first, FSDPModule)
                if len([*first.parameters()]) == 1:
                    # The gradient of a table does not depend on it; that of a norm inside (Inkling) does
                    first.set_unshard_in_backward(False)
                # By default FSDP would gather the unit that ran before the embedding: the head, if
                # there was a micro-batch before
                first.set_modules_to_backward_prefetch([first])
        root = Root(model)
        fully_shard(root, reshard_after_forward=None if reshard else False, **policies)
        if policy.param_dtype != torch.float32:
            cast_inputs(model, policy.param_dtype)  # FSDP casts those of units
        # After the units, which would otherwise leave out all that is in these modules. What these
        # groups gather is small, and stays gathered until the backward pass. So they do not need
        # the hook that this warning is about
        if holders:
            warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")
        policies["mp_policy"] = MixedPrecisionPolicy(
            reduce_dtype=torch.float32, cast_forward_inputs=False
        )
        for holder, modules in holders.items():  # the root is the last one
            policies["ignored_params"] = {p for p in holder.parameters() if p not in exact}
            fully_shard(modules, reshard_after_forward=False, **policies)
        self._in_float32 = len(exact)
        init_fn(model, place, ranks.device)
        # FSDP pads and pins the weights of a unit where the unit is moved. `init_fn` moves the model,
        # not the root. Without this call FSDP would replace the root's own weights in the first
        # forward pass, and checkpoints would hold the tensors from before
        root.to_empty(device=place, recurse=False)
        super().__init__(root, module=model, ranks=ranks)
        self._partial = list[_Whole]()
        for each in partial:
            (dimension,) = each.mesh.mesh_dim_names or ()
            whole = [p for p in self._parameters if dimension not in mesh_of(p)]
            summed = {module._parameters[name] for module, name in each.summed}
            self._partial.append(_Whole(each.mesh.get_group(), whole, summed))
        self.norm_groups = [NormGroup(e.group, frozenset(e.parameters)) for e in self._partial]
        self.norm_groups.append(NormGroup(ranks.shard_mesh.get_group("shard")))
        assert isinstance(root, FSDPModule)
        self._root: FSDPModule = root
        if ranks.size > 1:
            # On a CPU collectives block where they start
            blocking = ranks.device.type != "cuda"
            self.measures_waits = time_fsdp_waits(root, self._timed, blocking=blocking)
        self._sums: HostSums | None = None
        if policy.sync_every_micro_batch and offloads_parameters(cpu_offload):
            sums = HostSums()
            if after_fsdp_reductions(root, sums.after_reduction):
                self._sums = sums
        self._last: bool | None = None

    def _timed(self, wait: Callable[..., None]) -> Callable[..., None]:
        def timed(*arguments: object, **options: object) -> None:
            with self.waiting():
                wait(*arguments, **options)

        return timed

    def description(self) -> str:
        ranks, policy = self._ranks, self._policy
        masters = "nothing is trained here"  # in a stage of a pipeline
        if self._parameters:
            master = self._parameters[0]
            masters = f"{dtype_name(master.dtype)} masters on {master.device}"
        mesh = ranks.shard_mesh
        sizes = [f"{mesh.size(i)} {name}" for i, name in enumerate(mesh.mesh_dim_names or ())]
        along = [(each, ranks.along(each)) for each in PARALLEL_SIZES]
        divided = "".join(f", {d.divides} over {size} ranks" for d, size in along if size > 1)
        offloaded = ""
        if policy.cpu_offload is not None:
            offloaded = " (offloaded)" if offloads_parameters(policy.cpu_offload) else ""
            offloaded += (
                f", optimizer state in {policy.cpu_offload.optimizer_path or 'host memory'}"
            )
        when = "each micro-batch" if policy.sync_every_micro_batch else "the last micro-batch"
        groups = len(fsdp_groups(self.root))
        counted = f"{groups} groups over" if groups else "over"  # 0: the number is not known
        exact = f" ({self._in_float32} weights in float32)" if self._in_float32 else ""
        return (
            f"fsdp: {counted} a mesh of {' x '.join(sizes)}{divided}, "
            f"{masters}{offloaded}, gathered in "
            f"{dtype_name(policy.param_dtype)}{exact}, gradients reduced in "
            f"{dtype_name(policy.reduce_dtype)} after {when}"
        )

    @contextmanager
    def micro_batch(self, *, last: bool) -> Iterator[None]:
        """Reduces gradients and frees unsharded weights after each micro-batch or only the last."""
        if last is not self._last:  # only on a change: these calls walk all modules
            self._root.set_is_last_backward(last)
            if not self._policy.sync_every_micro_batch:
                self._root.set_requires_gradient_sync(last)
            if not self._policy.reshard_after_backward:
                self._root.set_reshard_after_backward(last)
                if self._policy.reshard_after_forward and not last:
                    # Freeing weights that the backward pass then keeps for later micro-batches
                    # would cost an all-gather and not lower the peak.
                    self._root.set_reshard_after_forward(False)
            self._last = last
        yield
        if self._sums is not None:
            self._sums.after_backward(last=last)

    def reshard(self) -> None:
        """Shards all parameters again: the root's stay unsharded after a forward pass."""
        for module in self.root.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    @torch.no_grad()
    def finish_gradients(self) -> None:
        """Ranks that compute the same tokens together sum the gradients of which each rank computes a
        part, and average those of other parameters that each rank has whole: with different rounding
        errors, the copies of a parameter would drift apart."""
        for each in self._partial:
            whole = [p for p in each.parameters if p.grad is not None]
            if not whole:
                continue
            size = float(each.group.size())
            divisors = [1.0 if p in each.summed else size for p in whole]
            gradients = [local_gradient(parameter) for parameter in whole]
            with self.waiting():
                foreach_div_(gradients, divisors)
                flat = torch.cat([gradient.flatten() for gradient in gradients])
                dist.all_reduce(flat, group=each.group)
                parts = torch.split(flat, [gradient.numel() for gradient in gradients])
                same = [part.view_as(g) for part, g in zip(parts, gradients, strict=True)]
                foreach_copy_(gradients, same)


def _holders(
    root: nn.Module, units: Set[nn.Module], parameters: Set[nn.Parameter]
) -> dict[nn.Module, list[nn.Module]]:
    """For each unit, and at last for the root, the modules in which some of these parameters are.

    These are the outermost ones that are called: FSDP gathers before a call. Modules further inside
    need not be called, because kernels may read their weights. Parameters that a unit has itself,
    or a module with units inside, are in none.
    """
    found: dict[nn.Module, list[nn.Module]] = {}
    visited = set[nn.Module]()

    def visit(module: nn.Module, unit: nn.Module) -> None:
        for child in module.children():
            if child in visited:  # blocks may share modules
                continue
            visited.add(child)
            if child in units:
                visit(child, child)
            elif isinstance(child, _NOT_CALLED) or not units.isdisjoint(child.modules()):
                visit(child, unit)
            elif any(parameter in parameters for parameter in child.parameters()):
                found.setdefault(unit, []).append(child)

    visit(root, root)
    if root in found:
        found[root] = found.pop(root)
    return found


def mesh_of(parameter: nn.Parameter) -> tuple[str, ...]:
    """The names of the dimensions over which a parameter is divided or copied."""
    return (parameter.device_mesh.mesh_dim_names or ()) if isinstance(parameter, DTensor) else ()
