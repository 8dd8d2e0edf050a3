"""Checks `model.config` against transformers without importing it.

A config class of transformers names its fields in its source. Reading that source takes a few milliseconds; importing
the class takes torch and three seconds, and a misspelt `hiden_size` would be told only then (transformers itself keeps
an unknown key as an attribute and says nothing). Where a source cannot be read this way, nothing is said here.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from launcher.recipe.decode import suggestion

_ALSO_ACCEPTED = {"model_type", "torch_dtype", "num_labels", "rope_theta", "rope_scaling", "partial_rotary_factor", "use_return_dict"}
"""What PreTrainedConfig still takes beside its fields: legacy names that it converts."""
_OURS = {"attn_implementation": "model.attention", "_attn_implementation": "model.attention", "dtype": "strategy.mixed_precision"}


_HEADS = {
    "causal_lm": ("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", "causal language model; llama, qwen3 and gpt2 are"),
    "sequence_classification": ("MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES", "sequence classifier; bert, roberta and llama are"),
}


def config_problems(config: dict[str, Any], *, task: str) -> Iterator[tuple[str, str]]:
    """Keys of a `model.config` that its class does not have, as (key, message); key is empty for the config itself."""
    package = _package()
    if package is None:
        return
    types = _mapping(package / "models/auto/auto_mappings.py", "CONFIG_MAPPING_NAMES") or _mapping(
        package / "models/auto/configuration_auto.py", "CONFIG_MAPPING_NAMES"
    )
    model_type = config.get("model_type")
    if model_type is None:
        yield "model_type", "missing; must be given: a model type of transformers, such as llama, qwen3 or gpt2"
        return
    if not isinstance(model_type, str) or (types and model_type not in types):
        yield "model_type", f"transformers has no model type {model_type!r}{suggestion(str(model_type), types)}"
        return
    mapping, what = _HEADS[task]
    heads = _mapping(package / "models/auto/modeling_auto.py", mapping)
    if heads and model_type not in heads:
        yield "model_type", f"{model_type} is no {what}"
        return
    module = _special_modules(package).get(model_type, model_type.replace("-", "_"))
    folder = package / f"models/{module}"
    fields = _fields(package / f"models/{module}/configuration_{module}.py", types.get(model_type, ""))
    if not fields:
        return
    for key in config:
        if key in _OURS:
            yield key, f"is set by {_OURS[key]}"
        elif key not in fields and key not in _ALSO_ACCEPTED and not _read_by_model(folder, key):
            near = suggestion(key, fields) or f"; {types[model_type]} has {', '.join(sorted(fields - _base_fields(package)))}"
            yield key, f"unknown key{near}"


def _read_by_model(folder: Path, key: str) -> bool:
    """Whether the model's code reads this attribute of its config. The class of some configs does not declare all of them: it keeps
    what it does not know, and the model takes it (head_dim of qwen3_moe)."""
    reads = re.compile(rf"""\bconfig\.{re.escape(key)}\b|getattr\((?:self\.)?config, ["']{re.escape(key)}["']""")
    return any(reads.search(file.read_text(encoding="utf-8")) for file in folder.glob("modeling_*.py"))


def _package() -> Path | None:
    spec = importlib.util.find_spec("transformers")  # finds, does not import
    return Path(spec.origin).parent if spec is not None and spec.origin else None


@functools.cache
def _tree(file: Path) -> ast.Module:
    try:
        return ast.parse(file.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, UnicodeDecodeError):
        return ast.Module(body=[], type_ignores=[])


@functools.cache
def _mapping(file: Path, name: str) -> dict[str, Any]:
    """A module-level `name = OrderedDict([(key, value), ...])`; empty where there is none."""
    for statement in _tree(file).body:
        if isinstance(statement, ast.Assign) and any(isinstance(t, ast.Name) and t.id == name for t in statement.targets):
            call = statement.value
            if isinstance(call, ast.Call) and call.args:
                try:
                    return dict(ast.literal_eval(call.args[0]))
                except ValueError:
                    return {}
    return {}


def _special_modules(package: Path) -> dict[str, str]:
    name = "SPECIAL_MODEL_TYPE_TO_MODULE_NAME"
    auto = package / "models/auto"
    return _mapping(auto / "auto_mappings.py", name) or _mapping(auto / "configuration_auto.py", name)


def _base_fields(package: Path) -> set[str]:
    return _fields(package / "configuration_utils.py", "PreTrainedConfig")


@functools.cache
def _fields(file: Path, class_name: str) -> set[str]:
    """Annotated fields, `__init__` arguments and attribute_map keys of a class and its bases; empty where unreadable."""
    tree = _tree(file)
    defined = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    if class_name not in defined:
        source = _imported_from(tree, file, class_name)
        return _fields(source, class_name) if source is not None else set()
    fields: set[str] = set()
    for statement in defined[class_name].body:
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            if "ClassVar" not in ast.unparse(statement.annotation):
                fields.add(statement.target.id)
        elif isinstance(statement, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "attribute_map" for t in statement.targets):
            if isinstance(statement.value, ast.Dict):
                fields |= {str(key.value) for key in statement.value.keys if isinstance(key, ast.Constant)}
        elif isinstance(statement, ast.FunctionDef) and statement.name == "__init__":
            fields |= {argument.arg for argument in statement.args.args + statement.args.kwonlyargs} - {"self"}
    for base in defined[class_name].bases:
        if isinstance(base, ast.Name):
            fields |= _fields(file, base.id)
    return fields


def _imported_from(tree: ast.Module, file: Path, class_name: str) -> Path | None:
    for statement in ast.walk(tree):
        if isinstance(statement, ast.ImportFrom) and statement.level and any(a.name == class_name for a in statement.names):
            folder = file
            for _ in range(statement.level):
                folder = folder.parent
            return folder.joinpath(*(statement.module or "").split(".")).with_suffix(".py")
    return None
