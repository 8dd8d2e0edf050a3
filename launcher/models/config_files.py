"""Writes config.json and generation_config.json of an export.

They are the text of the source, in which only those keys change that training changed: programs
with an older transformers, or with none, read the export like the source. transformers 5 has names
of its own for some settings; a config that is made from scratch has them in both forms.
"""

from __future__ import annotations

import copy
import json
import logging
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from launcher.errors import RecipeError
from launcher.libraries.private import GENERATION_IS_DERIVED
from launcher.models.dequantized import without_quantization
from launcher.models.description import Config

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

logger = logging.getLogger(__name__)

CONFIG, GENERATION_CONFIG = "config.json", "generation_config.json"
_DTYPES = ("torch_dtype", "dtype")
"""The key of the dtype in transformers before 4.56, and since then."""
_NOT_COMPARED = {*_DTYPES, "architectures", "transformers_version"}
"""Keys that are set elsewhere, or that say who wrote the file."""
_PARTIAL = "partial_rotary_factor"
_OLD_ROTARY = (
    "rope_theta",
    "rope_scaling",
    "rope_local_base_freq",
    _PARTIAL,
    "global_rope_theta",
    "local_rope_theta",
    "rotary_emb_base",
    "rotary_pct",
)
"""Settings of rotary positions in transformers 4, of which transformers 5 makes `rope_parameters`.
Without them transformers 4 takes its own defaults, silently."""
Json = dict[str, Any]


def write_config(
    config: PreTrainedConfig, folder: Path, *, source: Path | None, dtype: torch.dtype
) -> None:
    """Writes config.json for weights that are mostly in `dtype`.

    source: the folder that the model comes from; None, or a folder without config.json: the config
    is made from scratch.
    """
    wanted = _as_json(config)
    whole: Json | None = None
    if source is not None and (source / CONFIG).is_file():
        whole = json.loads((source / CONFIG).read_text(encoding="utf-8"))
        without_quantization(whole)
        section = _section(whole, config)
        before = _as_json(type(config).from_dict(_with_floats(section)))
        _change(section, before, wanted, config)
        if section is whole:
            whole["architectures"] = config.architectures
        original = copy.deepcopy(whole)
        _write_old_rotary(whole)
        for each in (whole, original):
            if _is_read_as(each, config, wanted):
                whole = each
                break
        else:
            logger.warning(
                f"{CONFIG} of the export is written anew: the text of {source / CONFIG} with the "
                "changes of the run would be read as another config"
            )
            whole = None
    if whole is None:
        config.save_pretrained(folder)
        whole = json.loads((folder / CONFIG).read_text(encoding="utf-8")) | {"dtype": None}
        original = copy.deepcopy(whole)
        _write_old_rotary(whole)
        whole = whole if _is_read_as(whole, config, wanted) else original
    set_dtype(whole, dtype)
    _write(whole, folder / CONFIG, source)


def set_dtype(config: Json, dtype: torch.dtype) -> None:
    """Sets the dtype of the weights in the text of a config: always `torch_dtype`, which all
    versions of transformers read, and `dtype` where it is there."""
    name = str(dtype).removeprefix("torch.")
    config["torch_dtype"] = name
    sections = [part for part in config.values() if isinstance(part, dict)]
    for part in [config, *sections]:
        part |= {key: name for key in _DTYPES if key in part}


def write_generation_config(model: PreTrainedModel, folder: Path, *, source: Path | None) -> None:
    """Writes generation_config.json of a model that has such a config: the source's text with what
    training changed, such as further tokens that end an answer."""
    from transformers import GenerationConfig

    generation = getattr(model, "generation_config", None)
    if generation is None or not model.can_generate():
        return
    if source is None or not (source / GENERATION_CONFIG).is_file():
        # save_pretrained would refuse settings that many models on the hub have
        generation.to_json_file(folder / GENERATION_CONFIG)
        return
    stored = json.loads((source / GENERATION_CONFIG).read_text(encoding="utf-8"))
    before = GenerationConfig.from_pretrained(source, local_files_only=True).to_dict()
    after = generation.to_dict()
    changes = {key: after[key] for key in after if after[key] != before.get(key)}
    if changes:
        stored |= changes
        stored.pop(GENERATION_IS_DERIVED, None)  # transformers would compute it again
    _write(stored, folder / GENERATION_CONFIG, source)


def _write(content: Json, file: Path, source: Path | None) -> None:
    """Writes an object as JSON, with the bytes of the source's file where nothing has changed."""
    original = None if source is None else source / file.name
    if original is not None and original.is_file():
        if json.loads(original.read_text(encoding="utf-8")) == content:
            shutil.copyfile(original, file)
            return
    file.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _as_json(config: PreTrainedConfig) -> Json:
    """All settings of a config, as they are read from a file."""
    return json.loads(json.dumps(config.to_dict(), default=str))  # type: ignore[no-any-return]


def _with_floats(value: Any) -> Any:
    """A copy of a config's text in which infinities are numbers: transformers 5 writes them as
    `{"__float__": "Infinity"}`, which its readers of files understand and `from_dict` does not."""
    if isinstance(value, dict):
        if value.keys() == {"__float__"}:
            return float(value["__float__"])
        return {key: _with_floats(inner) for key, inner in value.items()}
    return [_with_floats(inner) for inner in value] if isinstance(value, list) else value


def _section(whole: Json, config: PreTrainedConfig) -> Json:
    """The part of a config's text that is about this config: `text_config` if only the text model
    of a model with other inputs was loaded."""
    part = whole.get(getattr(config, "base_config_key", ""))
    is_part = isinstance(part, dict) and whole.get("model_type") != config.model_type
    return part if is_part else whole  # type: ignore[return-value]


def _change(stored: Json, before: Json, after: Json, config: Config) -> None:
    """Changes the text of a config where the settings `after` differ from those `before`."""
    aliases: dict[str, str] = getattr(type(config), "attribute_map", {})
    for key in before.keys() | after.keys():
        old, new = before.get(key), after.get(key)
        if old == new or key in _NOT_COMPARED or key.startswith("_"):
            continue
        if key in config.sub_configs and isinstance(old, dict) and isinstance(new, dict):
            # The file of Qwen2.5-VL has the keys of its text model at the top
            part = stored[key] if isinstance(stored.get(key), dict) else stored
            _change(part, old, new, getattr(config, key))
        elif key == "rope_parameters":
            _change_rotary(stored, new)
        else:
            names = [alias for alias, name in aliases.items() if name == key and alias in stored]
            stored[names[0] if names and key not in stored else key] = new


def _change_rotary(stored: Json, parameters: Any) -> None:
    old = _old_rotary(parameters, str(stored.get("model_type")))
    if "rope_parameters" in stored or not old:
        stored["rope_parameters"] = parameters
    for key in _OLD_ROTARY:
        stored.pop(key, None)
    stored |= old


def _write_old_rotary(config: Json) -> None:
    """Adds the settings of rotary positions in the form of transformers 4 beside those of 5."""
    for section in _text_sections(config):
        parameters = section.get("rope_parameters")
        section |= _old_rotary(parameters, str(section.get("model_type")))


def _text_sections(config: Json) -> list[Json]:
    """The parts of a config's text that are about the text model."""
    text = config.get("text_config")
    return [config, text] if isinstance(text, dict) else [config]


def _old_rotary(parameters: Any, model_type: str) -> Json:
    """Settings of rotary positions in the form of transformers 4; empty: it has none for them."""
    if not isinstance(parameters, dict):
        return {}
    if any(isinstance(value, Mapping) for value in parameters.values()):  # by kind of layer
        full, window = parameters.get("full_attention"), parameters.get("sliding_attention")
        if not isinstance(full, dict) or not isinstance(window, dict):
            return {}
        old = _old_rotary(full, model_type)
        bases = ("rope_theta", "rope_local_base_freq")
        if "bert" in model_type:
            old.pop("rope_theta", None)  # unknown to the class, which would keep it as a setting
            bases = ("global_rope_theta", "local_rope_theta")
        elif not model_type.startswith("gemma3"):  # such as Gemma 4, which transformers 4 lacks
            return {}
        both = (full.get("rope_theta"), window.get("rope_theta"))
        return old | dict(zip(bases, both, strict=True))
    names = {"rope_theta": "rope_theta", _PARTIAL: _PARTIAL}
    if model_type.startswith("gpt_neox"):
        names = {"rope_theta": "rotary_emb_base", _PARTIAL: "rotary_pct"}
    old = {names[key]: parameters[key] for key in names if parameters.get(key) is not None}
    scaling = {key: value for key, value in parameters.items() if key not in names}
    if scaling not in ({}, {"rope_type": "default"}):
        old["rope_scaling"] = scaling
    return old


def _is_read_as(whole: Json, config: PreTrainedConfig, wanted: Json) -> bool:
    """Whether transformers makes this config of the text."""
    try:
        section = _section(copy.deepcopy(whole), config)
        found = _as_json(type(config).from_dict(_with_floats(section)))
    except Exception:  # the classes of configs raise anything
        return False
    return _compared(found) == _compared(wanted)


def _compared(config: Json) -> Json:
    left_out = set(_NOT_COMPARED)
    if _PARTIAL in (config.get("rope_parameters") or ()):
        # transformers 5.17 keeps the value that the config was made with, and no model reads it
        left_out.add(_PARTIAL)
    return {
        key: _compared(value) if isinstance(value, dict) else value
        for key, value in config.items()
        if key not in left_out and not key.startswith("_")
    }


def problems_of_older_readers(folder: Path) -> list[str]:
    """What transformers 4 would refuse in an exported folder, or read in another way."""
    problems = list[str]()
    for file in (CONFIG, "tokenizer_config.json"):
        if not (folder / file).is_file():
            continue
        content = json.loads((folder / file).read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise RecipeError(f"export: {folder / file} is damaged: it must hold an object")
        for section in _text_sections(content) if file == CONFIG else ():
            old = _old_rotary(section.get("rope_parameters"), str(section.get("model_type")))
            old |= {"torch_dtype": content["dtype"]} if "dtype" in content else {}
            found = section | {"torch_dtype": content.get("torch_dtype")}
            problems += [
                f"{file}: {key} is not {value!r}, and transformers 4 reads it"
                for key, value in old.items()
                if found.get(key) != value
            ]
        if content.get("tokenizer_class") == "TokenizersBackend":
            problems.append(f"{file}: tokenizer_class: transformers 4 has no TokenizersBackend")
        if isinstance(content.get("extra_special_tokens"), list):
            what = "transformers 4 reads the list as additional_special_tokens"
            problems.append(f"{file}: extra_special_tokens: {what}")
        problems += [
            f"{file}: {key} is about the machine that wrote it"
            for key in ("is_local", "local_files_only")
            if key in content
        ]
    return problems
