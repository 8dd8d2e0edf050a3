"""Training in float8 with torchao: the linear layers of the blocks multiply in float8.

Weights stay parameters of their dtype under their names. Each product converts its operands, with a
scale for each row. The package torchao is imported here only, and needed only for this.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from launcher.distributed.hardware import find_gpu
from launcher.errors import RecipeError
from launcher.libraries.families import ANY_EXPERT_COUNT, ROUTERS
from launcher.libraries.private import names_in_float32
from launcher.models.attention import planned_gpu
from launcher.models.read_by_weight import read_by_weight

logger = logging.getLogger(__name__)
KEY = "strategy.mixed_precision.float8"
_NARROW = 64
"""Inputs for each output from which on a linear has a few scores as outputs, no features."""


def use_float8(
    blocks: Mapping[str, nn.Module],
    name: str,
    *,
    device: torch.device,
    dtype: torch.dtype,
    model: nn.Module | None = None,
) -> None:
    """Converts the linears of the blocks of a meta model to torchao's recipe of this name, but not
    those that choose experts, and not those that `model` keeps in float32.

    dtype: that of their inputs and outputs. Float8 is emulated on CPUs. Raises RecipeError if
    torchao is not installed, or for a GPU or a model that cannot compute in float8.
    """
    _check_gpu(device)
    spared = {module for module in blocks.values() for module in spared_linears(module, model)}

    def converts(module: nn.Module, name: str) -> bool:
        # Some subclasses, such as that of nn.MultiheadAttention, are never called
        return type(module) is nn.Linear and module not in spared

    found = {
        f"{block}.{inner}" if inner else block: module
        for block, root in blocks.items()
        for inner, module in root.named_modules()
        if converts(module, inner)
    }
    if not found:
        raise RecipeError(f"{KEY}: the model has no linear layers in blocks; set it to null")
    odd = [
        f"{path} [{module.out_features}, {module.in_features}]"
        for path, module in found.items()
        if module.out_features % 16 or module.in_features % 16
    ]
    if odd:
        raise RecipeError(
            f"{KEY}: needs dimensions that are multiples of 16; {len(odd)} layers have others, such "
            f"as {', '.join(odd[:3])} [outputs, inputs]; set it to null"
        )
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ImportError as error:
        raise RecipeError(
            f"{KEY}: needs the package torchao ({error}); pip install 'launcher[float8]'"
        ) from error
    emulate = device.type == "cpu"
    if emulate:
        logger.warning(f"{KEY}: float8 is emulated on CPUs, which is slow: for tests only")
    # Padding is for the gradient of a weight, which sums over any number of tokens
    config = dataclasses.replace(
        Float8LinearConfig.from_recipe_name(name), emulate=emulate, pad_inner_dim=True
    )
    for root in blocks.values():
        convert_to_float8_training(root, module_filter_fn=converts, config=config)
        for module in root.modules():
            if is_float8(module):
                # torchao makes its own class and takes no other. Only the forward pass differs
                module.__class__ = _linear_class()
                vars(module)["compute_dtype"] = dtype


def is_float8(module: nn.Module) -> bool:
    """Whether a module is a linear layer that computes in float8."""
    return any(kind.__name__ == "Float8Linear" for kind in type(module).__mro__)


def describe_float8(model: nn.Module, blocks: Iterable[nn.Module]) -> str:
    """How many linears compute in float8, and which do not, for the summary of a run."""
    inside = {module for block in blocks for module in block.modules()}
    linears = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    others = {n: m for n, m in linears.items() if not is_float8(m)}
    outside = sum(module not in inside for module in others.values())
    text = f"float8: {len(linears) - len(others)} linear layers"
    if others:
        text += (
            f"; {len(others)} others are not converted: {outside} outside of the blocks, "
            f"{len(others) - outside} routers and others inside"
        )
    experts = sum(p.ndim == 3 for block in blocks for p in block.parameters())
    return text + (f"; {experts} weights of experts are not converted" if experts else "")


def spared_linears(block: nn.Module, model: nn.Module | None) -> Iterator[nn.Module]:
    """Linears of a block that choose experts or weigh heads, that other code reads by weight, or that
    the model keeps in float32 (the weights of DeepSeek-V3.2's indexer)."""
    yield from read_by_weight(block)
    config = getattr(model, "config", None)
    numbers = vars(config.get_text_config(decoder=True)) if config is not None else {}
    experts = {
        v for k, v in numbers.items() if ANY_EXPERT_COUNT.fullmatch(k) and isinstance(v, int)
    }
    widths = experts | {sum(pair) for pair in itertools.permutations(experts, 2)}
    parts = names_in_float32(model, torch.float16)
    kept = re.compile("|".join(rf"(^|\.){re.escape(part)}($|\.)" for part in parts) or r"$^")
    for name, module in block.named_modules():
        if isinstance(module, nn.Linear):
            inner = name.endswith("_proj") or "attn" in name or "attention" in name
            narrow = module.out_features * _NARROW <= module.in_features
            chooses = narrow or (module.out_features in widths and not inner)
            if chooses or ROUTERS.search(name) or kept.search(f"{name}.weight"):
                yield module


@functools.cache
def _linear_class() -> Any:
    """torchao's linear layer with a forward pass of ours. With autocast (ddp), torchao converts the
    weights from float32, and so rounds them differently from fsdp. It does not know autocast on
    CPUs. A forward pass of each module, instead of a class, would compile each block again."""
    from torchao.float8.float8_linear import Float8Linear, matmul_with_hp_or_float8_args

    class Linear(Float8Linear):  # type: ignore[misc]
        compute_dtype: torch.dtype

        def forward(self, input: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = matmul_with_hp_or_float8_args.apply(
                input.to(self.compute_dtype),
                self.weight.to(self.compute_dtype).t(),
                self.linear_mm_config,
                self.config,
            )
            return out if self.bias is None else out + self.bias.to(self.compute_dtype)

    return Linear


def _check_gpu(device: torch.device) -> None:
    planned = planned_gpu.get()
    if planned is not None:
        known = find_gpu(planned)
        old = known is not None and not known.float8
    else:
        oldest = (8, 9) if torch.version.hip is None else (9, 4)
        present = device.type == "cuda" and torch.cuda.is_available()
        old = present and torch.cuda.get_device_capability(device) < oldest
    if old:
        gpu = planned or torch.cuda.get_device_name(device)
        what = "needs compute capability 8.9 (L4, RTX 4090, H100) or newer, or an AMD MI300"
        raise RecipeError(f"{KEY}: {gpu} does not compute in float8: it {what}; set it to null")
