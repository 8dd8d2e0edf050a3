"""Makes a model on fake tensors run the operators of the device that it is planned for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from launcher.libraries.private import (
    EFFICIENT_ATTENTION,
    FLASH_ATTENTION,
    MATH_ATTENTION,
    FakeTensor,
    FakeTensorMode,
    OpOverload,
    PlainDispatch,
    fake_tensor_on_cpu,
    grouped_product_check,
    tree_leaves,
)
from launcher.models import attention, nf4
from launcher.models.tower_inputs import BOUNDS
from launcher.models.tracing import Trace, current, tracing
from launcher.objectives.synthetic import SyntheticData


class Replacements(ExitStack):
    """A context in which attributes of libraries are replaced. It skips attributes that the
    installed version does not have."""

    def set(self, owner: object, name: str, value: object) -> None:
        """Replaces an attribute until the context ends."""
        before = getattr(owner, name, None)
        if before is not None:
            setattr(owner, name, value)
            self.callback(setattr, owner, name, before)


class _Result(NamedTuple):
    """What an operator returns: the argument at an index, a view of it, or a new tensor."""

    argument: int | None
    """Index of the argument whose storage the result has; None: the result is new."""
    shape: torch.Size | None
    """None: the argument itself is returned."""
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype


_CPU, _META = torch.device("cpu"), torch.device("meta")
_DEVICE = torch.ops.prim.device.default
_PLAIN = (
    *(int, float, bool, str, type(None)),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)
_RESULTS: dict[object, _Result | None] = {}
"""Results of operators, by operator and arguments; None: they must be computed each time. All
traces share them."""


class ShapesMode(PlainDispatch, FakeTensorMode):  # type: ignore[no-untyped-call]
    """A mode of fake tensors on the CPU that remembers the shapes that operators return. Torch's own
    cache takes three times as long for each call, and loops over the chunks of a sequence call
    thousands of operators with the same shapes."""

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self._like = FakeTensor(self, torch.empty(0, device="meta"), _CPU)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is _DEVICE:  # half of all calls
            return _META if args[0].fake_mode.in_kernel_invocation else args[0].fake_device
        key = _key_of_call(func, args, kwargs)
        if key is not None and (result := _RESULTS.get(key)) is not None:
            return self._made(result, args)
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if key is not None and key not in _RESULTS:
            changed = key != _key_of_call(func, args, kwargs)
            _RESULTS[key] = None if changed else _result_of(out, args)
        return out

    def _made(self, result: _Result, args: Sequence[Any]) -> torch.Tensor:
        shape, argument = result.shape, None
        if result.argument is not None:
            argument = args[result.argument]
        if shape is None:
            assert argument is not None
            return argument  # type: ignore[no-any-return]
        if argument is None:
            made = torch.empty_strided(shape, result.stride, dtype=result.dtype, device="meta")
        else:
            made = torch.empty(0, dtype=result.dtype, device="meta")
            made.set_(argument.untyped_storage(), result.offset, shape, result.stride)
        return fake_tensor_on_cpu(self._like, made)


def _key_of_call(
    func: object, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Any, ...] | None:
    """What the shapes that an operator returns depend on; None if they may depend on more."""
    if (
        not isinstance(func, OpOverload)
        or func.namespace not in ("aten", "prims")
        or torch.Tag.inplace_view in func.tags
    ):
        return None
    key: list[Any] = [func, torch.get_default_dtype()]
    if not _extend_key(key, args) or (kwargs and not _extend_key(key, kwargs.items())):
        return None
    return tuple(key)


def _extend_key(key: list[Any], values: Any) -> bool:
    for value in values:
        if type(value) is FakeTensor:
            if value.constant is not None or value.fake_device != _CPU or value.is_complex():
                return False
            key += (value.shape, value.stride(), value.storage_offset(), value.dtype)
        elif type(value) in (torch.Tensor, nn.Parameter):
            if not value.is_meta or value.is_complex():
                return False
            key += (_META, value.shape, value.stride(), value.dtype)
        elif isinstance(value, list | tuple):
            key.append(len(value))
            if not _extend_key(key, value):
                return False
        elif isinstance(value, _PLAIN):
            key += (type(value), value)  # 1, 1.0 and True are equal
        else:
            return False
    return True


def _result_of(out: object, args: Sequence[Any]) -> _Result | None:
    """The only result of a call, if it can be made again from the arguments."""
    if type(out) is not FakeTensor or out.fake_device != _CPU or out.constant is not None:
        return None
    if out.layout != torch.strided or out.is_complex():
        return None
    shape, stride, storage = out.shape, out.stride(), out.untyped_storage()
    for index, argument in enumerate(args):
        if argument is out:
            return _Result(index, None, stride, 0, out.dtype)
        if type(argument) is FakeTensor and argument.untyped_storage() is storage:
            return _Result(index, shape, stride, int(out.storage_offset()), out.dtype)
    others = (x for x in tree_leaves(args) if isinstance(x, torch.Tensor))
    if any(other.untyped_storage() is storage for other in others):
        return None
    size = torch.empty_strided(shape, stride, dtype=out.dtype, device="meta").nbytes
    whole = size == storage.nbytes() and out.storage_offset() == 0
    return _Result(None, shape, stride, 0, out.dtype) if whole else None


@contextmanager
def computing_as_on(
    device: str, data: SyntheticData, *, updates_on_gpu: bool = False
) -> Iterator[None]:
    """A context in which a model runs the operators of this kind of device, does not read the
    values of tensors, and is not compiled: compiled code would read the memory of fake tensors."""
    from transformers import masking_utils

    def grouped(tokens: object, weight: torch.Tensor, offsets: object) -> bool:
        return weight.dtype == torch.bfloat16  # the only dtype with a shape function

    # A plan for GPUs on another machine assumes the kernel
    kernel = device == "cuda"
    if kernel and torch.cuda.is_available():
        kernel = nf4.has_kernel(torch.device("cuda", torch.cuda.current_device()))
    lengths = list[int]()
    if "cu_seq_lens_q" in data.micro_batch.inputs:
        lengths = attention.document_lengths(data.micro_batch.inputs["cu_seq_lens_q"])
    attachments = data.micro_batch.inputs.get("attachments", {}).values()
    towers = [one["tower"] for one in attachments if "tower" in one]
    parts = [tower[n].diff().tolist() for tower in towers for n in BOUNDS if n in tower]
    # Inside of a trace of a step, its device counts: the budget of activation checkpointing traces
    # blocks on a rank whose own device is the CPU
    trace = current() or Trace(
        cuda=device == "cuda",
        triton=kernel,
        updates_on_gpu=updates_on_gpu,
        document_lengths=tuple(lengths),
        tower_lengths=tuple(map(tuple, parts)),
    )
    with (
        Replacements() as replaced,
        torch.compiler.set_stance("force_eager"),
        tracing(trace),
    ):
        replaced.set(*grouped_product_check(), grouped)
        if "position_ids" not in data.micro_batch.inputs:
            replaced.set(masking_utils, "find_packed_sequence_indices", lambda positions: None)
        if device == "cuda":
            replaced.set(nn.functional, "scaled_dot_product_attention", cuda_attention)
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
    """Scaled dot-product attention with the kernel that CUDA chooses: the flash kernel where it is
    supported, else the memory-efficient kernel, which needs a float mask, else the math kernel."""
    if torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")
        query, key, value = (tensor.to(dtype) for tensor in (query, key, value))
    out: torch.Tensor
    flash = query.dtype in (torch.bfloat16, torch.float16)
    flash = flash and not attention.without_flash(torch.device("cuda"))
    if attn_mask is None and flash and query.shape[-1] <= 256:
        out, *_ = FLASH_ATTENTION(query, key, value, dropout_p, is_causal, scale=scale)
        return out
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.where(attn_mask, 0.0, float("-inf")).to(query.dtype)
    if enable_gqa and key.shape[1] != query.shape[1]:
        settings = {"scale": scale, "enable_gqa": True}
        out, _ = MATH_ATTENTION(
            query, key, value, attn_mask, dropout_p, is_causal, None, **settings
        )
        return out
    bias = None if attn_mask is None else attn_mask.expand(*query.shape[:-1], key.shape[-2])
    out, *_ = EFFICIENT_ATTENTION(query, key, value, bias, True, dropout_p, is_causal, scale=scale)
    return out
