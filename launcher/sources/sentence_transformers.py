"""What a model folder says for sentence-transformers: how vectors are made, and text before texts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launcher.errors import RecipeError

MODULES = "modules.json"
POOLING = "1_Pooling"
NORMALIZE = "2_Normalize"
SCORE = "1_LogitScore"
SETTINGS = "config_sentence_transformers.json"
LENGTHS = "sentence_bert_config.json"
POOLINGS = {"last": "lasttoken", "mean": "mean", "first": "cls"}
"""The names that sentence-transformers has for `embedding.pooling`."""


@dataclass(frozen=True)
class VectorSettings:
    """What the files say; without them nothing."""

    pooling: str | None = None
    """A key of `POOLINGS`, or another name of sentence-transformers; None: not known."""
    prompts: Mapping[str, str] = field(default_factory=dict)
    """By name: text in front of texts."""

    @property
    def query_prompt(self) -> str:
        """Text in front of queries."""
        return self.prompts.get("query", "")

    @property
    def document_prompt(self) -> str:
        """Text in front of documents."""
        return self.prompts.get("document", "") or self.prompts.get("passage", "")


def vector_settings(folder: Path) -> VectorSettings:
    """Reads the files of a folder. Raises RecipeError if one cannot be read."""
    found, pooling = _read(folder / POOLING / "config.json"), None
    if found:
        ours = {theirs: name for name, theirs in POOLINGS.items()}
        modes = [
            name.removeprefix("pooling_mode_") for name, value in found.items() if value is True
        ]
        names = {"cls_token": "cls", "mean_tokens": "mean", "lasttoken": "lasttoken"}
        stated = found.get("pooling_mode") or next((names[m] for m in modes if m in names), None)
        pooling = ours.get(str(stated), None if stated is None else str(stated))
    prompts = _read(folder / SETTINGS).get("prompts") or {}
    texts = {str(k): v for k, v in prompts.items() if isinstance(v, str)}
    return VectorSettings(pooling, texts)


def _read(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RecipeError(f"model.path: {file} cannot be read: {error}") from None
    return found if isinstance(found, dict) else {}
