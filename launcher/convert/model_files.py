"""What the files of a model say about a converted recipe, where they are on this machine."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

from launcher.convert.conversion import Conversion
from launcher.errors import RecipeError
from launcher.sources.hub import config_file

_TEMPLATES = ("chat_template.jinja", "chat_template.json", "additional_chat_templates")


def check_model(c: Conversion) -> None:
    """Records as lost what keeps the recipe from training: no chat template for rows that need one,
    and adapters of layers that the model does not have."""
    model = c.values.get("model.path")
    folder = None if model is None else _folder(str(model))
    if folder is None:
        return
    name = c.origins["model.path"].partition(": ")[2] or "model.path"
    chats = c.values.get("data.kind") == "chat" or c.values.get("data.prompt_format") == "chat"
    if chats and "data.chat_template" not in c.values and not _has_template(folder):
        what = f"{model}: its tokenizer has no chat template, so training cannot start: "
        c.lose(name, f"{what}set data.chat_template, such as to chatml")
    targets, layers = c.values.get("lora.target_modules"), _layers(folder)
    if not isinstance(targets, list) or not layers:
        return
    missing = [str(each) for each in targets if str(each).rpartition(".")[2] not in layers]
    if missing:
        origin = c.origins["lora.target_modules"].partition(": ")[2] or "lora.target_modules"
        what = (
            f"{', '.join(missing)}: {model} has no such layers; lora.target_modules names its own"
        )
        c.lose(origin.partition(",")[0], what)


def _folder(model: str) -> Path | None:
    if Path(model).is_dir():
        return Path(model)
    try:
        config = config_file(model, fetch=False)
    except RecipeError:
        return None
    return None if config is None else config.parent


def _read(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _has_template(folder: Path) -> bool:
    """Whether the tokenizer has a chat template; true if its files are not here."""
    config = folder / "tokenizer_config.json"
    if not config.is_file() or any((folder / name).exists() for name in _TEMPLATES):
        return True
    return bool(_read(config).get("chat_template"))


def _layers(folder: Path) -> set[str]:
    """The last names of the layers with weights; empty if the weights are not here."""
    names = set(_read(folder / "model.safetensors.index.json").get("weight_map", ()))
    if not names:
        try:
            with (folder / "model.safetensors").open("rb") as file:
                (size,) = struct.unpack("<Q", file.read(8))
                names = set(json.loads(file.read(min(size, 1 << 27))))
        except (OSError, ValueError, struct.error):
            return set()
    owners = (name.removesuffix(".weight") for name in names if name.endswith(".weight"))
    return {owner.rpartition(".")[2] for owner in owners}
