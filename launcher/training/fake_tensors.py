"""Makes a model on fake tensors run the operators of the device that it is planned for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import nn

from launcher.libraries.private import (
    EFFICIENT_ATTENTION,
    FLASH_ATTENTION,
    MATH_ATTENTION,
    grouped_product_check,
)
from launcher.models import attention, nf4
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
    if "cu_seq_lens_q" in data.tensors:
        lengths = attention.document_lengths(data.tensors["cu_seq_lens_q"])
    # Inside of a trace of a step, its device counts: the budget of activation checkpointing traces
    # blocks on a rank whose own device is the CPU
    trace = current() or Trace(
        cuda=device == "cuda",
        triton=kernel,
        updates_on_gpu=updates_on_gpu,
        document_lengths=tuple(lengths),
    )
    with (
        Replacements() as replaced,
        torch.compiler.set_stance("force_eager"),
        tracing(trace),
    ):
        replaced.set(*grouped_product_check(), grouped)
        if "position_ids" not in data.tensors:
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
