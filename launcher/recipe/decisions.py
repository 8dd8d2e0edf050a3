"""Values that a recipe does not give."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from launcher.recipe.yaml_text import flow_yaml


@dataclass(frozen=True)
class Derived:
    """The value of a key that was not given, or was `auto`, and why it is this one."""

    value: Any
    reason: str

    def __str__(self) -> str:
        """`false, because lora.quantize excludes it`."""
        return f"{flow_yaml(self.value)}, {self.reason}"
