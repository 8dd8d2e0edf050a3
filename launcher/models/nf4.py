"""Frozen weights in 4 bits: NF4 (Dettmers et al., 2023). The only module that knows their bytes.

Other modules take the shape, dtype and numbers of any weight from here, in NF4 or not. A weight of
shape (..., rows, features) is one uint8 parameter of shape (..., rows, bytes). A row
holds its codes (two of them in a byte), a byte of scale for each block of 64 numbers, and the row's
own scale in float32: 4.125 bits for each number, and 4 bytes for each row. A row does not depend on
others, so any shard by rows is complete, and has the same bytes on any number of ranks. Ranks that
divide rows (tensor parallelism) hold a part of the codes and of the blocks' scales, and the row's
scale each.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from launcher.distributed.triton_support import missing_for_triton, runs_own_kernels
from launcher.errors import RecipeError
from launcher.libraries.private import grouped_product
from launcher.models import tracing

logger = logging.getLogger(__name__)

BLOCK = 64
"""Numbers with a common scale."""
_BLOCK_BYTES = BLOCK // 2 + 1
LEVELS = torch.tensor(
    [
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
        *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
        *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
        *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ]
)
"""The values of the codes, as in bitsandbytes."""
AT_ONCE = 2**24
"""Numbers that torch's operators convert at a time, which bounds their working space."""
_TINY = torch.finfo(torch.float32).tiny


_MARK = "weights_in_nf4"
"""Attribute of a module: the names of its parameters in NF4."""


def mark_packed(module: nn.Module, name: str) -> None:
    """Notes that a parameter of this module is in NF4. Sharding replaces the parameter, and keeps
    the module."""
    setattr(module, _MARK, (*getattr(module, _MARK, ()), name))


def packed_in(module: nn.Module) -> tuple[str, ...]:
    """The names of a module's own parameters in NF4. Other tensors may hold bytes of their own."""
    return getattr(module, _MARK, ())


def packed_names(model: nn.Module) -> Iterator[str]:
    """The names of the model's parameters in NF4."""
    for path, module in model.named_modules(remove_duplicate=False):
        for name in packed_in(module):
            yield f"{path}.{name}" if path else name


def shapes(model: nn.Module) -> dict[nn.Parameter, torch.Size]:
    """The shape of each parameter of a model, in numbers. Those in NF4 have another one."""
    packed = {model.get_parameter(name) for name in packed_names(model)}
    return {each: shape_of(each) if each in packed else each.shape for each in model.parameters()}


def is_packed(tensor: torch.Tensor) -> bool:
    """Whether a weight that a layer multiplies with is in NF4. Of any tensor of a model,
    `packed_names` says it."""
    return tensor.dtype == torch.uint8 and tensor.ndim >= 2


def row_bytes(features: int) -> int:
    """Bytes of a row of `features` numbers, a multiple of BLOCK."""
    return features // BLOCK * _BLOCK_BYTES + 4


def shape_of(weight: torch.Tensor) -> torch.Size:
    """The shape of a weight, in numbers. The weight may be in NF4 or not."""
    if not is_packed(weight):
        return weight.shape
    parts = parts_of_rows(weight)
    features = (weight.shape[-1] // parts - 4) // _BLOCK_BYTES * BLOCK * parts
    return torch.Size((*weight.shape[:-1], features))


def dtype_of(weight: torch.Tensor) -> torch.dtype:
    """The dtype of the values that are written to a weight: of one in NF4 it is float32."""
    return torch.float32 if is_packed(weight) else weight.dtype


def row_unit(weight: torch.Tensor) -> int:
    """Numbers of a row that ranks cannot divide: 1 if the weight is not in NF4."""
    return BLOCK if is_packed(weight) else 1


def parts_of_rows(weight: torch.Tensor) -> int:
    """The number of ranks that divide each row of a weight in NF4."""
    if not isinstance(weight, DTensor):
        return 1
    sizes, last = weight.device_mesh.shape, weight.ndim - 1
    placed = zip(sizes, weight.placements, strict=True)
    return math.prod(size for size, each in placed if getattr(each, "dim", None) == last)


def with_parts(weight: torch.Tensor, parts: int) -> torch.Tensor:
    """An empty weight in NF4 like this one, whose rows are in equal parts, one after the other.
    Other weights are returned: any part of their rows is complete."""
    if not is_packed(weight):
        return weight
    features = shape_of(weight)[-1]
    return weight.new_empty(*weight.shape[:-1], parts * row_bytes(features // parts))


@torch.no_grad()
def quantize(weight: torch.Tensor, packed: torch.Tensor, columns: range | None = None) -> None:
    """Writes rows of a weight, (..., features) of any float dtype, to `packed`, (..., bytes). With
    `columns`, it holds only these of the features, whole blocks."""
    features, size = weight.shape[-1], packed.shape[-1]
    rows, out = weight.reshape(-1, features), packed.view(-1, size)
    own = slice(0, features) if columns is None else slice(columns.start, columns.stop)
    blocks = (own.stop - own.start) // BLOCK
    codes = blocks * BLOCK // 2
    bounds = ((LEVELS[1:] + LEVELS[:-1]) / 2).to(out.device)
    step = max(1, AT_ONCE // features)
    for part, made in zip(torch.split(rows, step), torch.split(out, step), strict=True):
        whole = part.to(out.device, torch.float32)
        of_row = whole.abs().amax(1, keepdim=True)
        values = whole[:, own].reshape(-1, blocks, BLOCK)
        largest = values.abs().amax(2)
        # A block's scale is the square of its byte, as a share of the row's
        share = (largest / of_row.clamp(min=_TINY)).sqrt_()
        made[:, codes:-4] = share.mul_(255).round_().clamp_(1, 255).to(torch.uint8)
        made[:, -4:] = of_row.view(torch.uint8)
        values = values / _scales(made, codes).clamp(min=_TINY)
        index = torch.bucketize(values, bounds).to(torch.uint8).view(len(made), codes, 2)
        made[:, :codes] = index[..., 0] << 4 | index[..., 1]


def _scales(packed: torch.Tensor, codes: int) -> torch.Tensor:
    """The scales of blocks, (rows, blocks, 1), in float32."""
    of_row = packed[:, -4:].clone(memory_format=torch.contiguous_format).view(torch.float32)
    return ((packed[:, codes:-4].float() / 255).square_() * of_row).unsqueeze(2)


@cache
def _levels(device: torch.device) -> torch.Tensor:
    return LEVELS.to(device)


@cache
def _pairs(device: torch.device) -> torch.Tensor:
    """The two values of each byte of codes, (256, 2)."""
    byte = torch.arange(256)
    return torch.stack((LEVELS[byte >> 4], LEVELS[byte & 15]), 1).to(device)


PAIRS = _pairs(torch.device("cpu"))
"""Made at once: under a trace it would have no values."""


@torch.no_grad()
def dequantize(packed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The weight, (..., features), computed in float32."""
    shape = shape_of(packed)
    rows = packed.reshape(-1, packed.shape[-1])
    codes, blocks = shape[-1] // 2, shape[-1] // BLOCK
    out = torch.empty(len(rows), shape[-1], dtype=dtype, device=packed.device)
    if has_kernel(packed.device):
        _launch(rows, out)
        return out.view(shape)
    step, pairs = max(1, AT_ONCE // shape[-1]), _pairs(packed.device)
    for part, made in zip(torch.split(rows, step), torch.split(out, step), strict=True):
        # Not by indexing, which converts 32-bit indices to 64 bits on GPUs
        values = pairs.index_select(0, part[:, :codes].int().flatten()).view(-1, blocks, BLOCK)
        made.copy_(values.mul_(_scales(part, codes)).view(-1, shape[-1]))
    return out.view(shape)


def unpacked(weight: torch.Tensor, dtype: torch.dtype, parts: int = 1) -> torch.Tensor:
    """The numbers of a weight, (..., features). One in NF4 is dequantized to `dtype`; others are
    returned. parts: those of the rows, one after the other, as `parts_of_rows`."""
    if not is_packed(weight):
        return weight
    if parts == 1:
        return dequantize(weight, dtype)
    return torch.cat([dequantize(part, dtype) for part in weight.chunk(parts, -1)], -1)


def has_kernel(device: torch.device) -> bool:
    """Whether `nf4_kernel` dequantizes on this device."""
    trace = tracing.current()
    return _triton_compiles(device) if trace is None else trace.triton


@cache
def _triton_compiles(device: torch.device) -> bool:
    if not runs_own_kernels(device):
        return False
    if (missing := missing_for_triton(device)) is not None:
        logger.warning(
            f"lora.quantize: {missing}; PyTorch's operators dequantize, which move 20 bytes for each "
            "number that a kernel reads in half a byte"
        )
    return missing is None


def _launch(rows: torch.Tensor, out: torch.Tensor) -> None:
    """Dequantizes rows (rows, bytes) to `out` (rows, features)."""
    if tracing.current() is not None:  # the kernel takes no memory
        return
    from launcher.models import nf4_kernel as kernel

    (count, features), levels = out.shape, _levels(out.device)
    if count:
        kernel.dequantize[(count, -(-features // kernel.NUMBERS))](
            rows.contiguous(),
            levels,
            out,
            features,
            rows.shape[1],
            numbers=kernel.NUMBERS,
            num_warps=kernel.WARPS,
            enable_fp_fusion=False,
        )


def round_trip(weight: torch.Tensor) -> torch.Tensor:
    """A weight, (..., features), as training with NF4 sees it; float32."""
    shape = (*weight.shape[:-1], row_bytes(weight.shape[-1]))
    packed = torch.empty(shape, dtype=torch.uint8)
    quantize(weight, packed)
    return dequantize(packed, torch.float32)


class _Product(torch.autograd.Function):
    """Linear layer of a weight in NF4. Keeps no other form of it for the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, inputs: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        ctx.save_for_backward(packed)
        return nn.functional.linear(inputs, dequantize(packed, inputs.dtype), bias)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        (packed,) = ctx.saved_tensors
        return gradient @ dequantize(packed, gradient.dtype), None, None


class _GroupedProduct(torch.autograd.Function):
    """The same for experts: (tokens, in) sorted by expert, and the end of each expert's tokens.
    `transposed`: the weight is (experts, in, out)."""

    @staticmethod
    def forward(
        ctx: Any, inputs: torch.Tensor, packed: torch.Tensor, ends: torch.Tensor, transposed: bool
    ) -> torch.Tensor:
        ctx.save_for_backward(packed, ends)
        ctx.transposed = transposed
        return _grouped(inputs, packed, ends, transposed)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        packed, ends = ctx.saved_tensors
        return _grouped(gradient, packed, ends, not ctx.transposed), None, None, None


def _grouped(
    inputs: torch.Tensor, packed: torch.Tensor, ends: torch.Tensor, transposed: bool
) -> torch.Tensor:
    weight = dequantize(packed, inputs.dtype)
    weight = weight if transposed else weight.transpose(-2, -1)
    return grouped_product(inputs.contiguous(), weight, ends)


def in_dtype_of_autocast(inputs: torch.Tensor, name: str) -> torch.Tensor:
    """The inputs of a layer with weights in NF4, in the dtype of autocast. Raises RecipeError, with
    the `name` of the layer, if they are integers."""
    device = inputs.device.type
    if not inputs.is_floating_point():
        raise RecipeError(
            f"lora.quantize: {name} gets integers: the model's code casts its inputs to the dtype "
            "of its weight; set lora.quantize=null for this model"
        )
    enabled = device != "meta" and torch.is_autocast_enabled(device)
    return inputs.to(torch.get_autocast_dtype(device)) if enabled else inputs


def without_autocast(tensor: torch.Tensor) -> AbstractContextManager[Any]:
    """Autocast off on a tensor's device. The meta device, on which attention is chosen, has none."""
    device = tensor.device.type
    return nullcontext() if device == "meta" else torch.autocast(device, enabled=False)


def linear(
    inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """`torch.nn.functional.linear` of a weight that is in NF4, and frozen, or not. Raises
    RecipeError if it is in NF4 and the inputs are integers."""
    if not is_packed(weight):
        return nn.functional.linear(inputs, weight, bias)
    inputs = in_dtype_of_autocast(inputs, "a linear layer")
    bias = None if bias is None else bias.to(inputs.dtype)
    with without_autocast(inputs):
        function: Any = _Product
        made: torch.Tensor = function.apply(inputs, weight, bias)
    return made


def grouped_linear(
    inputs: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor, *, transposed: bool
) -> torch.Tensor:
    """The products of experts with their weights, which are in NF4, and frozen, or not. inputs:
    (tokens, in), sorted by expert, not cast by autocast. ends: the end of each expert's tokens.
    `transposed`: the weight is (experts, in, out), else (experts, out, in). The result has the dtype
    of the weight, or of the inputs if it is in NF4."""
    with without_autocast(inputs):
        if not is_packed(weight):
            weight = weight if transposed else weight.transpose(-2, -1)
            return grouped_product(inputs.contiguous(), weight, ends)
        function: Any = _GroupedProduct
        made: torch.Tensor = function.apply(inputs, weight, ends, transposed)
    return made
