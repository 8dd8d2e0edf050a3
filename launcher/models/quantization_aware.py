"""Quantization-aware training (Jacob et al., 2018): the linear layers of the blocks multiply with the
numbers that their weights have after an export in 8 or 4 bits.

Weights stay parameters of their dtype under their names. Each product rounds the weight as torchao's
IntxWeightOnlyConfig does, and the backward pass takes the rounding for the identity. Groups of numbers
with one scale lie inside of a row, which FSDP never divides, and the layer has the whole weight by
then. The package torchao is imported here only, and needed only for this.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import safe_open
from torch import nn
from torch.nn.functional import linear

from launcher.errors import RecipeError
from launcher.models.float8 import spared_linears
from launcher.models.names import clean_name
from launcher.models.tensor_names import export_conversions

KEY = "model.qat"
GROUP = 32
"""Numbers of a row with one scale in int4. In int8 a row has one scale."""
Qat = Literal["int8", "int4"]
_NAMES = "tensor_names"
_LIMITS = {"int8": (-128, 127), "int4": (-8, 7)}


class QatLinear(nn.Linear):
    """A linear layer that multiplies with its rounded weight. Made by `use_qat`."""

    qat: Qat
    compute_dtype: torch.dtype
    """Of the product, and of the weight before it is rounded."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        dtype = self.compute_dtype
        out: torch.Tensor = _Product.apply(  # type: ignore[no-untyped-call]
            input.to(dtype), self.weight, self.qat
        )
        return out if self.bias is None else out + self.bias.to(dtype)


class _Product(torch.autograd.Function):
    """Keeps the weight for the backward pass, which rounds it again: the rounded one would take as
    much memory as the model."""

    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, weight: torch.Tensor, qat: Qat) -> torch.Tensor:
        ctx.save_for_backward(input, weight)
        ctx.qat = qat
        return linear(input, rounded(weight.to(input.dtype), qat))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        input, weight = ctx.saved_tensors
        of_input = of_weight = None
        if ctx.needs_input_grad[0]:
            of_input = gradient @ rounded(weight.to(gradient.dtype), ctx.qat)
        if ctx.needs_input_grad[1]:
            of_weight = gradient.flatten(0, -2).mT @ input.flatten(0, -2)
            of_weight = of_weight.to(weight.dtype)
        return of_input, of_weight, None


def use_qat(
    model: nn.Module, blocks: Mapping[str, nn.Module], qat: Qat, *, dtype: torch.dtype
) -> None:
    """Makes the linear layers of the blocks `QatLinear`, but not those that choose experts, and not
    those that the model keeps in float32.

    dtype: of the computation. Raises RecipeError if torchao is not installed, or if a layer cannot be
    rounded.
    """
    try:
        import torchao.quantization  # noqa: F401
    except ImportError as error:
        what = f"needs the package torchao ({error})"
        raise RecipeError(f"{KEY}: {what}; pip install 'launcher[qat]'") from error
    spared = {module for block in blocks.values() for module in spared_linears(block, model)}
    found = {
        f"{block}.{inner}" if inner else block: module
        for block, root in blocks.items()
        for inner, module in root.named_modules()
        if type(module) is nn.Linear and module not in spared
    }
    if not found:
        raise RecipeError(f"{KEY}: the model has no linear layers in blocks; set it to null")
    odd = [
        f"{path} [{module.out_features}, {module.in_features}]"
        for path, module in found.items()
        if qat == "int4" and module.in_features % GROUP
    ]
    if odd:
        raise RecipeError(
            f"{KEY}: int4 needs inputs of layers in multiples of {GROUP}; {len(odd)} layers have others, "
            f"such as {', '.join(odd[:3])} [outputs, inputs]; use int8"
        )
    for module in found.values():
        module.__class__ = QatLinear
        vars(module).update(qat=qat, compute_dtype=dtype)


def check_names(model: Any) -> None:
    """Raises RecipeError if a rounded weight has another name or form on disk than in the model, where
    torchao's form cannot be written. After the model's conversions are known."""
    weights = dict(qat_layers(model))
    shapes = {f"{name}.weight": tuple(layer.weight.shape) for name, layer in weights.items()}
    forms = {clean_name(name): tensor for name, tensor in model.named_parameters()}
    for conversion in export_conversions(model, list(shapes)):
        sources = {
            name: torch.empty(forms[name].shape, device="meta") for name in conversion.names()
        }
        made = {name: tuple(tensor.shape) for name, tensor in conversion.convert(sources).items()}
        if any(made.get(name) != shapes[name] for name in sources):
            what = f"{type(model).__name__} stores {next(iter(sources))} as {', '.join(made)}"
            raise RecipeError(f"{KEY}: {what}, which cannot be exported in {KEY}; set it to null")


def qat_layers(model: nn.Module) -> Iterator[tuple[str, QatLinear]]:
    """The layers with rounded weights, with their clean names."""
    for name, module in model.named_modules():
        if isinstance(module, QatLinear):
            yield clean_name(name), module


def describe_qat(model: nn.Module) -> str:
    """How many linears are rounded, and which are not, for the summary of a run."""
    layers = dict(qat_layers(model))
    others = sum(isinstance(module, nn.Linear) for module in model.modules()) - len(layers)
    kind = next(iter(layers.values())).qat if layers else "no"
    return f"{KEY}: {len(layers)} linear layers with weights rounded to {kind}; {others} others are not"


def _blocks(weight: torch.Tensor, qat: Qat) -> tuple[int, int]:
    """The shape of the numbers of a weight (outputs, inputs) that share a scale."""
    return 1, GROUP if qat == "int4" else weight.shape[1]


@torch.no_grad()
def rounded(weight: torch.Tensor, qat: Qat) -> torch.Tensor:
    """A weight (outputs, inputs) with the numbers that it has in int8 or int4, in its dtype: whole
    multiples of the scale of their row, or group of 32, which is as small as its smallest and largest
    number allow, of which one is a whole multiple.

    torchao's default (SYMMETRIC) has a scale by which the largest absolute number lies in the middle
    between two multiples. Sums of gradients in another order then decide, in half of the groups, to which
    one it is rounded, and runs on other numbers of ranks differ."""
    from torchao.quantization import (
        MappingType,
        choose_qparams_affine,
        dequantize_affine,
        quantize_affine,
    )

    block, (low, high) = _blocks(weight, qat), _LIMITS[qat]
    scale, zero = choose_qparams_affine(
        weight,
        MappingType.SYMMETRIC_NO_CLIPPING_ERR,
        block,
        torch.int8,
        low,
        high,
        zero_point_dtype=torch.int8,
    )
    codes = quantize_affine(weight, block, scale, zero, torch.int8, low, high)
    found: torch.Tensor = dequantize_affine(
        codes, block, scale, zero, torch.int8, low, high, output_dtype=weight.dtype
    )
    return found


def stored_form(
    name: str, layer: QatLinear, weight: torch.Tensor
) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """The tensors by which torchao stores a layer's weight of this name, and what the header of their
    file says of them. weight: on any device, also meta."""
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict
    from torchao.quantization import IntxUnpackedToInt8Tensor, MappingType

    whole = IntxUnpackedToInt8Tensor.from_hp(
        weight.to(layer.compute_dtype),
        _blocks(weight, layer.qat),
        getattr(torch, layer.qat),
        mapping_type=MappingType.SYMMETRIC_NO_CLIPPING_ERR,
    )
    tensors, about = flatten_tensor_state_dict({name: whole})
    return tensors, about


def file_header(model: nn.Module, dtype: torch.dtype) -> dict[str, str]:
    """What the header of each file of an export says of the weights that torchao reads. dtype: that of
    the export. Empty: there are none."""
    header: dict[str, str] = {}
    for name, layer in qat_layers(model):
        weight = torch.empty(layer.weight.shape, device="meta")
        header |= stored_form(f"{name}.weight", layer, weight)[1]
    if not header:
        return {}
    # That of one weight, so far; readers want those of all files in each
    names = [name for name in header if name != _NAMES]
    return with_dtype(header | {_NAMES: json.dumps(names)}, dtype)


def with_dtype(header: Mapping[str, str], dtype: torch.dtype) -> dict[str, str]:
    """A header for weights whose scales are in another dtype, which is that of what they give."""
    changed = dict(header)
    for name in json.loads(header.get(_NAMES, "[]")):
        form = json.loads(header[name])
        form["_data"]["dtype"]["_data"] = str(dtype).removeprefix("torch.")
        changed[name] = json.dumps(form)
    return changed


def header_of(folder: Path) -> dict[str, str]:
    """The header that `file_header` gave the files of an exported folder; empty: they have none."""
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as opened:
            header: dict[str, str] = opened.metadata() or {}
        return {key: text for key, text in header.items() if key != "format"}
    return {}


def write_qat_config(model: nn.Module, file: Path) -> None:
    """Adds quantization_config, from which transformers knows torchao's weights, to config.json."""
    layers = dict(qat_layers(model))
    if not layers:
        return
    from torchao.quantization import IntxWeightOnlyConfig, MappingType, PerAxis, PerGroup
    from transformers import TorchAoConfig

    qat = next(iter(layers.values())).qat
    granularity = PerGroup(GROUP) if qat == "int4" else PerAxis(0)
    linears = {clean_name(n) for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    others = sorted(linears - layers.keys())
    how = TorchAoConfig(
        IntxWeightOnlyConfig(
            getattr(torch, qat), granularity, mapping_type=MappingType.SYMMETRIC_NO_CLIPPING_ERR
        ),
        modules_to_not_convert=others,
    )
    config = json.loads(file.read_text(encoding="utf-8"))
    config["quantization_config"] = how.to_dict()
    file.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
