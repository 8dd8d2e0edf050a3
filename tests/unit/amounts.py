"""How much of a test `make check` runs."""

import pytest

IN_CHECK = ("qwen2_5_vl", "gemma3", "gemma4", "smolvlm")
"""Types of models of images and videos that it runs."""


def slow_but(kept, values):
    """Parameters of a test: those that are not in `kept` are slow."""
    return [
        value if value in kept else pytest.param(value, marks=pytest.mark.slow) for value in values
    ]
