"""This rank's part of a parameter, and the initial values that the model's code gives it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from launcher.errors import RecipeError
from launcher.models import philox


def local_rows(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
    """This rank's part of a tensor, and the row (of dimension 0) of the whole where it starts."""
    if not isinstance(tensor, DTensor):
        return tensor, 0
    # fully_shard splits dimension 0 like torch.chunk over the mesh's last dimension; the first one
    # has replicas
    mesh = tensor.device_mesh
    chunk = -(-tensor.shape[0] // mesh.size(mesh.ndim - 1))
    return tensor.to_local(), min(mesh.get_local_rank(mesh.ndim - 1) * chunk, tensor.shape[0])


def sharded_zeros(like: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """float32 zeros of another shape with as many rows, sharded as `like`."""
    local = local_rows(like.detach())[0]
    zeros = torch.zeros(len(local), *shape[1:], device=local.device)
    if not isinstance(like, DTensor):
        return zeros
    mesh, stride = like.device_mesh, torch.empty(shape, device="meta").stride()
    sharded: torch.Tensor = DTensor.from_local(
        zeros, mesh, like.placements, run_check=False, shape=shape, stride=stride
    )
    return sharded


def compute_device(tensor: torch.Tensor) -> torch.device:
    """The device that computes with a tensor, also if its shard is offloaded to host memory."""
    if isinstance(tensor, DTensor):
        return torch.device(tensor.device_mesh.device_type)
    return tensor.device


def _digest(seed: int, name: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:8], "little")


def derived_seed(seed: int, name: str) -> int:
    """A seed for a generator of torch that depends on both."""
    return _digest(seed, name) >> 1


class InitialValues:
    """The initial values of one parameter.

    Random draws and arithmetic with plain numbers are recorded, and `store` applies them to this
    rank's part. Any other operation needs the values immediately: `on_cpu` then makes the whole
    parameter on the CPU.
    """

    def __init__(
        self,
        name: str,
        mine: torch.Tensor | None,
        like: torch.Tensor,
        seed: int,
        whole_list: list[InitialValues],
    ) -> None:
        """mine: this rank's tensor; None: none. like: has the parameter's shape and dtype."""
        self.name, self.mine, self.shape = name, mine, like.shape
        # float32 even for a weight of fewer bits, so that the draw is the same
        self.dtype = torch.float32 if like.is_floating_point() else like.dtype
        number = _digest(seed, name)
        self.key = number & 0xFFFFFFFF, number >> 32
        self.written = False
        self.whole: torch.Tensor | None = None
        self._whole_list = whole_list
        self._stored = False
        self._operations: list[tuple[range, Callable[[torch.Tensor, int], object]]] = []

    def placeholder(self) -> nn.Parameter:
        whole = Placeholder(self, range(self.shape.numel()), self.shape)
        return nn.Parameter(whole, requires_grad=False)

    def record(
        self, span: range, operation: Callable[[torch.Tensor, int], object], *, overwrites: bool
    ) -> None:
        """span: positions in the flattened parameter. operation(values, position of the first)."""
        self.written = True
        if overwrites and len(span) == self.shape.numel():
            self._operations.clear()
            self._stored = False
        self._operations.append((span, operation))

    def on_cpu(self) -> torch.Tensor:
        """The whole parameter with its present values."""
        if self.whole is None:
            if self._stored:
                raise RecipeError(
                    f"model: {self.name} got its first values from one module, and another one "
                    "computes with them: compute all in one"
                )
            self.written = True
            # zeros: a parameter of another rank has no values, but its module's code still runs
            self.whole = torch.zeros(self.shape, dtype=self.dtype)
            self._apply(self.whole.view(-1), 0, self.whole.device)
            self._whole_list.append(self)
        return self.whole

    def store(self) -> None:
        """Writes this rank's part and forgets the recorded operations."""
        if self.mine is not None:
            local, row = local_rows(self.mine)
            if self.whole is not None:
                local.copy_(self.whole[row : row + local.shape[0]] if local.ndim else self.whole)
            else:
                flat = local.contiguous().view(-1)
                width = self.shape.numel() // max(1, self.shape[0]) if local.ndim else 0
                self._apply(flat, row * width, compute_device(self.mine))
                if not local.is_contiguous():
                    local.copy_(flat.view(local.shape))
        self._operations.clear()
        self.whole, self._stored = None, True

    def _apply(self, flat: torch.Tensor, first: int, device: torch.device) -> None:
        at_once = philox.numbers_at_once(device)
        if not self._operations or self.mine is None:
            return
        for start in range(0, flat.numel(), at_once):
            target = flat[start : start + at_once]
            values = target.to(device, self.dtype)  # no copy if both are the same
            at = first + start
            for span, operation in self._operations:
                begin, end = max(span.start, at), min(span.stop, at + values.numel())
                if begin < end:
                    operation(values[begin - at : end - at], begin)
            if values is not target:
                target.copy_(values)

    def normal(self, values: torch.Tensor, first: int, mean: float = 0.0, std: float = 1.0) -> None:
        drawn = philox.normal(self.key, first, values.numel(), values.device)
        values.copy_(drawn).mul_(std).add_(mean)

    def uniform(
        self, values: torch.Tensor, first: int, low: float = 0.0, high: float = 1.0
    ) -> None:
        drawn = philox.uniform(self.key, first, values.numel(), values.device)
        values.copy_(drawn).mul_(high - low).add_(low)


_aten = torch.ops.aten
_ARITHMETIC = {
    *(_aten.zero_.default, _aten.fill_.Scalar, _aten.mul_.Tensor, _aten.div_.Tensor),
    *(_aten.add_.Tensor, _aten.sub_.Tensor, _aten.clamp_.default),
}
"""In-place and elementwise: recorded if the other operands are numbers."""


class Placeholder(torch.Tensor):
    """Stands for a parameter or a row of it during initialization. Records operations."""

    initial: InitialValues
    span: range
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, initial: InitialValues, span: range, shape: torch.Size) -> Placeholder:
        made: Placeholder = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=initial.dtype, device=torch.device("cpu")
        )
        made.initial, made.span = initial, span
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self, others, kwargs = args[0], args[1:], kwargs or {}
        if isinstance(self, cls) and self.initial.whole is None:
            initial = self.initial
            draws = {_aten.normal_.default: initial.normal, _aten.uniform_.default: initial.uniform}
            numbers = not any(isinstance(v, torch.Tensor) for v in [*others, *kwargs.values()])
            operation: Callable[[torch.Tensor, int], object] | None = None
            if func is _aten.detach.default:
                return cls(initial, self.span, self.shape)
            if func is _aten.select.int and others[0] == 0:
                width = len(self.span) // self.shape[0]
                row = others[1] % self.shape[0]
                return cls(initial, self.span[row * width : (row + 1) * width], self.shape[1:])
            if func in _ARITHMETIC and numbers:
                operation = lambda values, first: func(values, *others, **kwargs)  # noqa: E731
            elif func in draws and kwargs.get("generator") is None:
                operation = lambda values, first: draws[func](values, first, *others)  # noqa: E731
            if operation is not None:
                overwrites = func in draws or func in (_aten.zero_.default, _aten.fill_.Scalar)
                initial.record(self.span, operation, overwrites=overwrites)
                return self
        args, kwargs = tree_map_only(cls, cls._values, (args, kwargs))
        return func(*args, **kwargs)

    @property
    def data(self) -> torch.Tensor:
        return self.detach()

    @data.setter
    def data(self, values: torch.Tensor) -> None:
        self.copy_(values)

    def _values(self) -> torch.Tensor:
        return self.initial.on_cpu().view(-1)[self.span.start : self.span.stop].view(self.shape)
