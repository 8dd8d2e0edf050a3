"""What config.json says of the quantization of weights. This module does not import torch."""

from __future__ import annotations

from collections.abc import Mapping

from launcher.recipe.model_config import QUANTIZATION, of_text

DEQUANTIZED = ("fp8", "mxfp4")
"""Values of its `quant_method` that can be read."""
CAN_BE_READ = "FP8 with weight_scale_inv (quant_method: fp8) and MXFP4 (mxfp4) can be read"
UNQUANTIZED = "give the checkpoint that they were made from, or save one in bfloat16"


def quantization(config: Mapping[str, object]) -> object:
    """What a config, of config.json, says of the quantization of its weights; None: nothing."""
    return config.get(QUANTIZATION) or of_text(config)[1].get(QUANTIZATION) or None


def why_not_dequantized(found: object) -> str | None:
    """Why weights with this `quantization_config` cannot be read; None: they can, or there is none."""
    if found is None:
        return None
    if not isinstance(found, Mapping):
        what = "must be an object with quant_method and others"
        return f"config.json: quantization_config {what}; got {found!r}"
    if (method := found.get("quant_method")) in DEQUANTIZED:
        return None
    format = f" ({found['format']})" if found.get("format") else ""
    return f"the weights are quantized as {method}{format}; {CAN_BE_READ}; {UNQUANTIZED}"
