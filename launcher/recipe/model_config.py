"""Checks the keys of `model.config` against the source of transformers, without importing it.

The import takes three seconds and torch, and transformers accepts unknown keys silently.
"""

from __future__ import annotations

import importlib.util
import math
import re
import runpy
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from launcher.errors import suggestion

_LEGACY = {
    *("model_type", "torch_dtype", "num_labels", "rope_theta", "rope_scaling"),
    *("partial_rotary_factor", "use_return_dict"),
}
"""Keys that PreTrainedConfig accepts without declaring them."""
_SET_ELSEWHERE = {
    "attn_implementation": "model.attention",
    "_attn_implementation": "model.attention",
    "dtype": "strategy.mixed_precision",
}
_DECLARED = re.compile(r"^    (\w+): (?!ClassVar)", re.MULTILINE)
_ALIAS_OR_READ = re.compile(r'"(\w+)":|\bconfig\.(\w+)|getattr\((?:self\.)?config, "(\w+)"')
"""Other keys: in the attribute_map of the class, or read by the model without being declared."""


def config_problems(config: dict[str, Any], *, task: str) -> Iterator[tuple[str, str]]:
    """Yields each wrong key of `model.config` and what is wrong with it.

    task: `model.task`, which the model type must have a class for.
    """
    spec = importlib.util.find_spec("transformers")  # finds the package, does not import it
    if spec is None or spec.origin is None:
        return
    package = Path(spec.origin).parent
    auto = package / "models" / "auto"
    tables = runpy.run_path(str(auto / "auto_mappings.py"))
    classes, model_type = tables["CONFIG_MAPPING_NAMES"], config.get("model_type")
    if not isinstance(model_type, str) or model_type not in classes:
        near = suggestion(str(model_type), classes) or "; llama, qwen3 and gpt2 are some"
        yield "model_type", f"must be a model type of transformers; got {model_type}{near}"
        return
    heads = (auto / "modeling_auto.py").read_text()
    heads = heads.partition(f"MODEL_FOR_{task.upper()}_MAPPING_NAMES = ")[2].partition("\n)")[0]
    if f'"{model_type}"' not in heads:
        yield "model_type", f"{model_type} is not available with model.task: {task}"
        return
    special = tables["SPECIAL_MODEL_TYPE_TO_MODULE_NAME"]
    folder = package / "models" / special.get(model_type, model_type.replace("-", "_"))
    sources = "".join(file.read_text() for file in sorted(folder.glob("configuration_*.py")))
    own = set(_DECLARED.findall(sources))
    base = set(_DECLARED.findall((package / "configuration_utils.py").read_text()))
    sources += "".join(file.read_text() for file in folder.glob("modeling_*.py"))
    known = {name for groups in _ALIAS_OR_READ.findall(sources) for name in groups}
    for key in config:
        if key in _SET_ELSEWHERE:
            yield key, f"is set by {_SET_ELSEWHERE[key]}"
        elif key not in own | base | known | _LEGACY:
            near = suggestion(key, own | base) or f"; known here: {', '.join(sorted(own))}"
            yield key, f"unknown key{near}"
    yield from value_problems(config)


def value_problems(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yields each key with a value that transformers accepts and no model can compute with.

    config: the keys of a recipe, or all keys of a config.
    """
    for key, value in config.items():
        if not isinstance(value, (int, float)):
            continue
        if not math.isfinite(value):
            yield key, f"must be a finite number; got {value}"
        elif "drop" in key and not 0 <= value <= 1:
            yield key, f"must be from 0 to 1; got {value}"
    heads, groups = config.get("num_attention_heads"), config.get("num_key_value_heads")
    if isinstance(heads, int) and isinstance(groups, int) and 0 < groups < heads and heads % groups:
        yield "num_key_value_heads", f"{groups} does not divide {heads} (num_attention_heads)"
    rope, size = config.get("rope_parameters"), config.get("head_dim")
    whole = isinstance(rope, dict) and "partial_rotary_factor" not in rope
    if whole and isinstance(size, int) and size % 2:
        yield "head_dim", f"must be even for rotary positions; got {size}"
