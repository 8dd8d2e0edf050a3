"""Reads the settings of a trained adapter, without torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from launcher.sources.hub import is_model_id, split_revision
from launcher.sources.location import no_such

ADAPTER_CONFIG = "adapter_config.json"
PEFT_KEYS = {
    "r": "rank",
    "lora_alpha": "alpha",
    "use_rslora": "rank_stabilized",
    "use_dora": "dora",
    "target_modules": "target_modules",
    "target_parameters": "target_parameters",
    "modules_to_save": "modules_to_save",
}
"""Keys of `lora`, by those of peft's adapter_config.json."""
_UNSUPPORTED = (
    "rank_pattern",
    "alpha_pattern",
    "trainable_token_indices",
    "layers_to_transform",
    "layer_replication",
    "exclude_modules",
    "lora_bias",
    "use_qalora",
    "arrow_config",
    "alora_invocation_tokens",
    "monteclora_config",
    "velora_config",
)
"""Settings of peft that must be off."""
_INITIAL = (None, True, False, "gaussian", "orthogonal")
"""Values of init_lora_weights that leave the frozen weights as they are."""


def adapter_keys(name: str) -> dict[str, Any]:
    """The values that an adapter's folder `name` gives to keys of `lora`. Raises ValueError if there is no
    adapter, or one that is not supported."""
    file = Path(name, ADAPTER_CONFIG)
    try:
        config = json.loads(file.read_bytes())
    except FileNotFoundError:
        what = no_such(f"folder with an {ADAPTER_CONFIG}", name)
        if is_model_id(name):
            what += f"; an adapter of the hub is fetched by `hf download {name} --local-dir FOLDER`"
        raise ValueError(what) from None
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is damaged: {error}") from None
    if not isinstance(config, dict):
        raise ValueError(f"{file} is damaged: it must hold an object")
    if config.get("peft_type") != "LORA":
        raise ValueError(f"{file}: peft_type is {config.get('peft_type')}; only LORA is supported")
    wrong = [name for name in _UNSUPPORTED if config.get(name)]
    wrong += ["bias"] * (config.get("bias", "none") != "none")
    wrong += ["init_lora_weights"] * (config.get("init_lora_weights") not in _INITIAL)
    if wrong:
        settings = ", ".join(f"{name}: {config[name]}" for name in wrong)
        what = "cannot be continued; merge it with peft, and train from the merged model"
        raise ValueError(f"{file}: an adapter with {settings} {what}")
    # Without target_parameters an adapter has none of experts, where a recipe without it may
    config["target_parameters"] = config.get("target_parameters") or []
    for name in ("target_parameters", "target_modules", "modules_to_save"):
        names = config.get(name)
        if name == "target_parameters" and not names:
            continue
        if name == "target_modules" and not names and config["target_parameters"]:
            config[name] = []
        elif name == "modules_to_save" and not names:
            config[name] = None
        elif isinstance(names, list) and names and all(isinstance(each, str) for each in names):
            config[name] = sorted(names)
        else:
            what = "must be a list of names, not a pattern"
            raise ValueError(f"{file}: {name} {what}; got {names!r}")
    return {ours: config[name] for name, ours in PEFT_KEYS.items() if config.get(name) is not None}


def other_base(folder: Path, model: str) -> str | None:
    """The model that an adapter names as its own, if it is not model.path. A name with the same end
    as model.path is taken for the same: it may be relative to another folder, or that of a copy."""
    file = folder / ADAPTER_CONFIG
    named = json.loads(file.read_bytes()).get("base_model_name_or_path") if file.is_file() else None
    if not isinstance(named, str) or not named:
        return None
    paths = Path(named), Path(split_revision(model)[0])
    if all(path.is_dir() for path in paths):
        same = paths[0].resolve() == paths[1].resolve()
    else:
        short, long = sorted((path.parts for path in paths), key=len)
        cached = f"models--{'--'.join(short)}"  # the folder of a model of the hub
        same = long[-len(short) :] == short or cached in long
    return None if same else named
