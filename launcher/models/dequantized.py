"""Published weights in FP8 (DeepSeek-V3 and others) or MXFP4 (gpt-oss), as the bfloat16 weights that
they stand for. Each rank dequantizes the rows that it needs, while it loads them."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from launcher.errors import RecipeError
from launcher.models.description import Config
from launcher.models.quantization import (
    CAN_BE_READ,
    UNQUANTIZED,
    quantization,
    why_not_dequantized,
)
from launcher.models.safetensors_files import StoredRows, StoredTensors
from launcher.recipe.model_config import QUANTIZATION

logger = logging.getLogger(__name__)

_AT_ONCE = 2**24
"""Numbers of a weight that are dequantized at a time: 64 MiB in float32. Of MXFP4 at least one
expert."""
_SCALE, _BLOCKS, _SCALES, _OF_INPUTS = "_scale_inv", "_blocks", "_scales", "activation_scale"
"""Ends of the names of FP8's scales, of MXFP4's codes and exponents, and of scales that only
computation in FP8 needs."""
_OTHER_SCALES = (".scale", ".qscale_weight", ".weight_scale", ".scales")
"""What stands in place of `.weight` in the names of scales that other programs write."""
_ENDS = {
    _SCALE: "FP8",
    _BLOCKS: "MXFP4",
    ".qweight": "AWQ or GPTQ",
    ".weight_packed": "compressed-tensors",
    ".qscale_weight": "FP8",
    ".absmax": "bitsandbytes",
}
"""Ends of names that only quantized weights have, and their formats."""
_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_PAIRS = torch.cartesian_prod(torch.cat([_E2M1, -_E2M1]), torch.cat([_E2M1, -_E2M1])).flip(1)
"""The two numbers of each byte of MXFP4, (256, 2): the lower four bits are the first."""

Read = Callable[[str, slice], torch.Tensor]
"""Reads rows of a stored tensor: read(name, rows)."""


@dataclass(frozen=True)
class _Fp8:
    """A weight (rows, columns), or one for each expert (experts, rows, columns), of which each
    block has a scale. The last blocks of rows and columns may be smaller."""

    name: str
    shape: torch.Size
    block: tuple[int, int] | None
    """None: one scale for the whole weight."""

    def scales_shape(self) -> tuple[int, ...]:
        """The shape that the scales must have."""
        assert self.block is not None
        grid = (-(-size // step) for size, step in zip(self.shape[-2:], self.block, strict=True))
        return (*self.shape[:-2], *grid)

    def rows(self, wanted: slice, read: Read) -> torch.Tensor:
        """Rows of dimension 0."""
        values = read(self.name, wanted).float()
        if self.block is None:
            return (values * _float(read(self.name + _SCALE, slice(None)))).bfloat16()
        height, width = self.block
        if values.ndim == 3:
            first, scales = 0, read(self.name + _SCALE, wanted)
        else:
            first = wanted.start // height
            scales = read(self.name + _SCALE, slice(first, -(-wanted.stop // height)))
            first = wanted.start - first * height
        scales = _float(scales).repeat_interleave(height, -2).repeat_interleave(width, -1)
        scales = scales[..., first : first + values.shape[-2], : values.shape[-1]]
        return (values * scales).bfloat16()


@dataclass(frozen=True)
class _Mxfp4:
    """Experts (experts, columns, rows) that are stored as (experts, rows, blocks, bytes), with an
    exponent for each block."""

    name: str
    shape: torch.Size

    def rows(self, wanted: slice, read: Read) -> torch.Tensor:
        """Experts."""
        codes, exponents = (read(self.name + end, wanted) for end in (_BLOCKS, _SCALES))
        pairs = _PAIRS[codes.int()].flatten(-2)  # (experts, rows, blocks, numbers of a block)
        values = (pairs * _float(exponents)[..., None]).bfloat16()
        return values.flatten(2).transpose(1, 2)


def _float(scales: torch.Tensor) -> torch.Tensor:
    """Scales in float32. Bytes are exponents of 2, beginning with -127."""
    if scales.dtype == torch.uint8:
        ones = torch.ones_like(scales, dtype=torch.float32)
        return torch.ldexp(ones, scales.int() - 127)
    return scales.float()


@dataclass(frozen=True)
class _Slice:
    """Rows, or columns of rows, of a weight."""

    weight: _Fp8 | _Mxfp4
    read: Read

    def __getitem__(self, index: slice | tuple[slice, slice]) -> torch.Tensor:
        rows, *others = index if isinstance(index, tuple) else (index,)
        start, stop, _ = rows.indices(self.weight.shape[0])
        made = self.weight.rows(slice(start, stop), self.read)
        return made[:, others[0]] if others else made


class Dequantized(StoredTensors):
    """Stored tensors of which some are quantized. Their names, shapes and dtypes are those of the
    weights."""

    def __init__(self, stored: StoredTensors, settings: Any, *, key: str) -> None:
        """settings: what config.json says of the quantization. Raises RecipeError, which begins
        with `key`, if the weights have another format."""
        self._stored, self._weights = stored, dict[str, _Fp8 | _Mxfp4]()
        parts, tensors, problems = dict(stored._parts), dict(stored.tensors), list[str]()
        if (problem := why_not_dequantized(settings)) is not None:
            raise RecipeError(f"{key}: {problem}")
        method = str(settings["quant_method"])
        size = settings.get("weight_block_size")
        if not _is_block_size(size):
            problems.append(f"weight_block_size must be two positive integers; got {size!r}")
        else:
            for weight, names in _READ[method](tensors, size, problems):
                self._weights[weight.name] = weight
                parts[weight.name] = [
                    StoredRows(part.file, 0, weight.shape[0]) for part in parts[names[0]]
                ]
                for name in names:
                    del tensors[name]
                made = torch.empty(weight.shape, dtype=torch.bfloat16, device="meta")
                tensors[weight.name] = made
        for name in [name for name in tensors if name.endswith(_OF_INPUTS)]:
            del tensors[name]
        for name, tensor in tensors.items():
            if tensor.dtype.itemsize == 1 and tensor.dtype != torch.bool:
                dtype = str(tensor.dtype).removeprefix("torch.")
                scales = (name.removesuffix(".weight") + end for end in _OTHER_SCALES)
                other = next((each for each in scales if each in tensors and each != name), None)
                if other is not None:
                    problems.insert(0, f"the scales of {name} are {other}, and {CAN_BE_READ}")
                    break
                problems.append(f"{name} has the dtype {dtype} and no scales")
        if not self._weights and not problems:
            problems.append("no weight has scales; are the weights not quantized at all?")
        if problems:
            raise RecipeError(
                f"{key}: {method}: {problems[0]}; get its files again, or give the checkpoint "
                "that they were made from"
            )
        super().__init__(parts, tensors)

    def format(self) -> str:
        """Words for how many weights are quantized, and how."""
        fp8 = any(isinstance(weight, _Fp8) for weight in self._weights.values())
        return f"{len(self._weights)} weights in {'FP8' if fp8 else 'MXFP4'}"

    def _slice(self, name: str, file: Path) -> Any:
        weight = self._weights.get(name)
        return super()._slice(name, file) if weight is None else _Slice(weight, self._read_stored)

    def _whole(self, name: str, file: Path) -> torch.Tensor:
        if name not in self._weights:
            return super()._whole(name, file)
        whole = torch.empty(self._weights[name].shape, dtype=torch.bfloat16)
        for rows in self._at_once(name, range(len(whole))):
            whole[rows.start : rows.stop] = self._slice(name, file)[rows.start : rows.stop]
        return whole

    def _at_once(self, name: str, rows: range) -> Iterator[range]:
        if name not in self._weights:
            yield from super()._at_once(name, rows)
            return
        step = max(1, _AT_ONCE // math.prod(self.tensors[name].shape[1:]))
        for start in rows[::step]:
            yield range(start, min(start + step, rows.stop))

    def _read_stored(self, name: str, rows: slice) -> torch.Tensor:
        (part,) = self._stored._parts[name]
        stored = self._stored._slice(name, part.file)
        values: torch.Tensor = stored[rows] if stored.get_shape() else stored[...]
        return values

    def close(self) -> None:
        super().close()
        self._stored.close()


_Weights = Iterator[tuple[_Fp8 | _Mxfp4, tuple[str, str]]]
"""Quantized weights, each with the names of the two stored tensors that it is made of."""


def _is_block_size(size: Any) -> bool:
    """Whether this can be weight_block_size: two positive integers, or None."""
    if size is None:
        return True
    whole = isinstance(size, list) and all(type(each) is int and each > 0 for each in size)
    return whole and len(size) == 2


def _fp8_weights(stored: Mapping[str, torch.Tensor], size: Any, problems: list[str]) -> _Weights:
    for scale_name in [name for name in stored if name.endswith(_SCALE)]:
        name, scales = scale_name.removesuffix(_SCALE), stored[scale_name]
        if name not in stored or stored[name].ndim not in (2, 3):
            problems.append(f"{scale_name} has no weight of two or three dimensions")
            continue
        shape = stored[name].shape
        if size is None and scales.shape[-2:].numel() > 1:
            problems.append(
                f"{scale_name} is {list(scales.shape)}, and quantization_config has no "
                "weight_block_size"
            )
            continue
        # Without blocks experts have a scale each
        block = None if scales.numel() == 1 else tuple(size or shape[-2:])
        weight = _Fp8(name, shape, block)
        if block is not None and tuple(scales.shape) != weight.scales_shape():
            wanted = list(weight.scales_shape())
            problems.append(
                f"{scale_name} is {list(scales.shape)}, and for blocks of {list(block)} "
                f"(weight_block_size) {name} of {list(shape)} needs {wanted}"
            )
            continue
        yield weight, (name, scale_name)


def _mxfp4_weights(stored: Mapping[str, torch.Tensor], size: Any, problems: list[str]) -> _Weights:
    for codes_name in [name for name in stored if name.endswith(_BLOCKS)]:
        name, codes = codes_name.removesuffix(_BLOCKS), stored[codes_name]
        exponents = stored.get(name + _SCALES)
        if codes.ndim != 4 or exponents is None or exponents.shape != codes.shape[:-1]:
            found = "missing" if exponents is None else list(exponents.shape)
            problems.append(
                f"{codes_name} is {list(codes.shape)}, and needs {name}{_SCALES} of "
                f"{list(codes.shape[:-1])}, which is {found}"
            )
            continue
        experts, rows, blocks, width = codes.shape
        weight = _Mxfp4(name, torch.Size((experts, 2 * blocks * width, rows)))
        yield weight, (codes_name, name + _SCALES)


_READ = {"fp8": _fp8_weights, "mxfp4": _mxfp4_weights}
"""By quant_method."""


def settings_of(folder: Path) -> object:
    """What a model's config.json says of the quantization of its weights; None: nothing."""
    try:
        return quantization(json.loads((folder / "config.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, AttributeError, RecursionError):
        return None


def dequantized(stored: StoredTensors, folder: Path, *, key: str) -> StoredTensors:
    """The weights of a model's folder in the dtypes that they stand for, with a line in the log if
    they are quantized. Raises RecipeError, which begins with `key`, for a format that cannot be
    read."""
    settings = settings_of(folder)
    if settings is None:
        for name, tensor in stored.tensors.items():
            if (format := _format(name, tensor)) is not None:
                raise RecipeError(
                    f"{key}: {folder}: {name} belongs to weights that are quantized ({format}), "
                    f"and config.json has no {QUANTIZATION}, which says how; get config.json "
                    f"again, or {UNQUANTIZED}"
                )
        return stored
    made = Dequantized(stored, settings, key=f"{key}: {folder}")
    logger.info(
        f"note: {folder}: {made.format()} are dequantized to bfloat16 while they are read; exports "
        "are not quantized"
    )
    return made


def _format(name: str, tensor: torch.Tensor) -> str | None:
    """The format of quantized weights, of which a stored tensor is a part; None: of none."""
    if tensor.dtype.itemsize == 1 and tensor.dtype.is_floating_point:
        return "FP8"
    for end, format in _ENDS.items():
        if name.endswith(end) and (end != _BLOCKS or tensor.dtype == torch.uint8):
            return format
    return None


def without_quantization(config: Config) -> None:
    """Removes what a config of transformers, or the text of one, says of quantization."""
    if isinstance(config, dict):
        sections = [config, *(part for part in config.values() if isinstance(part, dict))]
        for section in sections:
            section.pop(QUANTIZATION, None)
        return
    for section in (config, config.get_text_config(decoder=True)):
        if hasattr(section, QUANTIZATION):
            delattr(section, QUANTIZATION)
