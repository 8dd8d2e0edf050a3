"""`model.config` beside `model.path`: changes to the config of a checkpoint."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher.errors import RecipeError, suggestion
from launcher.libraries.families import ROTARY, UNDECLARED_KEYS
from launcher.models.description import Config
from launcher.recipe.schema import Model
from launcher.sources.hub import model_folder

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_OF_ALL_KINDS = ("rope_theta", "partial_rotary_factor", "mrope_section", "mrope_interleaved")
"""Rotary settings that stay when rope_type changes."""


def changed_config(
    config: PreTrainedConfig, folder: Path, changes: Mapping[str, Any]
) -> PreTrainedConfig:
    """The config of the checkpoint in this folder with these changes in its file. Raises
    RecipeError for keys that its class does not know."""
    stored, _ = config.get_config_dict(folder, local_files_only=True)
    if any(key in config.sub_configs and key not in stored for key in changes):
        stored = config.to_dict()  # the file is flat, as that of Qwen2.5-VL
    problems: list[str] = []
    merged = _merged(stored, changes, config, "model.config", problems)
    if problems:
        raise RecipeError(problems)
    changed = type(config).from_dict(merged)
    changed.name_or_path = config.name_or_path
    return changed


def _merged(
    stored: Mapping[str, Any],
    changes: Mapping[str, Any],
    config: Config,
    where: str,
    problems: list[str],
) -> dict[str, Any]:
    merged, known = dict(stored), _known(config, stored)
    for key, value in changes.items():
        part = getattr(config, key, None)
        if key not in known:
            near = suggestion(key, known) or f"; {type(config).__name__} has no such key"
            text, inner = getattr(config, "text_config", None), stored.get("text_config") or {}
            if text is not None and key in _known(text, inner):
                near = f"; did you mean {where}.text_config.{key}?"
            problems.append(f"{where}.{key}: unknown key{near}")
        elif key in config.sub_configs:
            if isinstance(value, Mapping):
                inner = merged.get(key) or {}
                merged[key] = _merged(inner, value, part, f"{where}.{key}", problems)
            else:
                problems.append(f"{where}.{key}: must hold keys of the {key}; got {value!r}")
        elif key not in ROTARY:
            merged[key] = value
    if given := {key: changes[key] for key in ROTARY if key in changes and key in known}:
        merged = {key: value for key, value in merged.items() if key not in ROTARY}
        merged["rope_parameters"] = _rotary(config.rope_parameters or {}, given, where, problems)
    return merged


def _known(config: Config, stored: Mapping[str, Any]) -> set[str]:
    """The keys of a config that has these in its file."""
    known = {*vars(config), *stored, *type(config).attribute_map, *UNDECLARED_KEYS, *ROTARY}
    if dataclasses.is_dataclass(config):
        known |= {field.name for field in dataclasses.fields(config)}
    return known if hasattr(config, "rope_parameters") else known - {*ROTARY}


def _rotary(
    before: Mapping[str, Any], given: Mapping[str, Any], where: str, problems: list[str]
) -> dict[str, Any]:
    """Settings of rotary positions with the given ones in place. A new rope_type replaces those of
    the old one."""
    if any(isinstance(value, Mapping) for value in before.values()):  # for each kind of layer
        kinds = given.get("rope_parameters")
        if len(given) > 1 or not isinstance(kinds, Mapping) or not kinds.keys() <= before.keys():
            what = f"give model.config.rope_parameters with keys of {', '.join(before)}"
            problems.append(f"{where}.{next(iter(given))}: {what}: the layers differ in them")
            return dict(before)
        after = {kind: {"rope_parameters": value} for kind, value in kinds.items()}
        return {
            kind: _rotary(old, after[kind], where, problems) if kind in after else old
            for kind, old in before.items()
        }
    changes: dict[str, Any] = {}
    for key, value in given.items():
        if key == "rope_theta":
            changes[key] = value
        elif value is None:
            changes["rope_type"] = "default"
        elif isinstance(value, Mapping):
            changes |= value
        else:
            problems.append(f"{where}.{key}: must hold keys such as rope_type; got {value!r}")
    if "type" in changes:  # its name in transformers 4
        changes["rope_type"] = changes.pop("type")
    if changes.get("rope_type", before.get("rope_type")) != before.get("rope_type"):
        before = {key: value for key, value in before.items() if key in _OF_ALL_KINDS}
    return {**before, **changes}


def config_changes(model: Model) -> list[str]:
    """How model.config changes the config of model.path: a line `key: old -> new` for each value,
    also for those that follow from the given ones."""
    if model.path is None or not model.config:
        return []
    from transformers import AutoConfig

    folder = model_folder(model.path, key="model.path", weights=False)
    config = AutoConfig.from_pretrained(
        folder, trust_remote_code=model.trust_remote_code, local_files_only=True
    )
    changed = changed_config(config, folder, model.config)
    old, new = (dict(_leaves(each.to_dict(), "")) for each in (config, changed))
    return [
        f"{key}: {json.dumps(old.get(key))} -> {json.dumps(new.get(key))}"
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key)
    ]


def _leaves(values: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
