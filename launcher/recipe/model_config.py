"""Checks the keys of `model.config` against the source of transformers, without importing it.

The import takes three seconds and torch, and transformers accepts unknown keys silently. A source
without the expected form is not checked.
"""

from __future__ import annotations

import functools
import importlib.util
import re
from collections.abc import Iterator
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
_HEADS = {
    "causal_lm": "causal language model; llama, qwen3 and gpt2 are",
    "sequence_classification": "sequence classifier; bert, roberta and llama are",
}


def config_problems(config: dict[str, Any], *, task: str) -> Iterator[tuple[str, str]]:
    """Yields each wrong key and what is wrong with it.

    config: `model.config`. task: `model.task`, which the model type must have a head for.
    """
    spec = importlib.util.find_spec("transformers")  # finds the package, does not import it
    if spec is None or spec.origin is None:
        return
    models = Path(spec.origin).parent / "models"
    classes = _table(models / "auto/auto_mappings.py", "CONFIG_MAPPING_NAMES")
    model_type = config.get("model_type")
    if model_type is None:
        types = "a model type of transformers, such as llama, qwen3 or gpt2"
        yield "model_type", f"missing; must be given: {types}"
        return
    if not isinstance(model_type, str) or (classes and model_type not in classes):
        near = suggestion(str(model_type), classes)
        yield "model_type", f"transformers has no model type {model_type!r}{near}"
        return
    heads = _table(models / "auto/modeling_auto.py", f"MODEL_FOR_{task.upper()}_MAPPING_NAMES")
    if heads and model_type not in heads:
        yield "model_type", f"{model_type} is no {_HEADS[task]}"
        return
    special = _table(models / "auto/auto_mappings.py", "SPECIAL_MODEL_TYPE_TO_MODULE_NAME")
    module = special.get(model_type, model_type.replace("-", "_"))
    class_name = classes.get(model_type, "")
    own = _declared(models / f"{module}/configuration_{module}.py", class_name)
    if not own:
        return
    base = _declared(models.parent / "configuration_utils.py", "PreTrainedConfig")
    known = own | base | _LEGACY
    for key in config:
        if key in _SET_ELSEWHERE:
            yield key, f"is set by {_SET_ELSEWHERE[key]}"
        elif key not in known and not _read_by_model(models / module, key):
            near = suggestion(key, own | base)
            yield key, "unknown key" + (near or f"; {class_name} has {', '.join(sorted(own))}")


def _read_by_model(folder: Path, key: str) -> bool:
    """Whether the model's code reads this key: some classes do not declare all of their keys."""
    name = re.escape(key)
    reads = re.compile(rf"""\bconfig\.{name}\b|getattr\((?:self\.)?config, ["']{name}["']""")
    return any(reads.search(_source(file)) for file in folder.glob("modeling_*.py"))


@functools.cache
def _source(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""


@functools.cache
def _table(file: Path, name: str) -> dict[str, str]:
    """A module's `NAME = OrderedDict([(key, value), ...])`; empty where there is none."""
    table = re.search(
        rf"^{name} = OrderedDict\(\n(.*?)^\)", _source(file), re.MULTILINE | re.DOTALL
    )
    return dict(re.findall(r'\("([^"]+)", [("]*([^"]+)"', table[1])) if table else {}


def _declared(file: Path, class_name: str) -> set[str]:
    """Keys that a config class declares, with its bases in the same file; empty: no such class."""
    pattern = rf"^class {class_name}\((\w*).*?\):\n(.*?)(?=^\S|\Z)"
    found = re.search(pattern, _source(file), re.MULTILINE | re.DOTALL)
    if found is None:
        return set()
    base, body = found.groups()
    fields = set(re.findall(r"^    (\w+): (?!ClassVar)", body, re.MULTILINE))
    aliases = re.search(r"^    attribute_map\b[^{]*\{(.*?)\}", body, re.MULTILINE | re.DOTALL)
    return (
        fields | set(re.findall(r'"(\w+)":', aliases[1] if aliases else "")) | _declared(file, base)
    )
