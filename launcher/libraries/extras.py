"""Packages that only some runs need, and the extras of the launcher that install them."""

from __future__ import annotations

import importlib.util

from launcher.errors import RecipeError

EXTRAS = {
    "peft": ("peft", "lora"),
    "torchao": ("torchao", "qat"),
    "PIL": ("pillow", "images"),
    "av": ("av", "video"),
    "pyarrow": ("pyarrow", "datasets"),
    "datasets": ("datasets", "datasets"),
    "tensorboard": ("tensorboard", "tensorboard"),
    "plotly": ("plotly", "report"),
    "s3fs": ("s3fs", "s3"),
    "gcsfs": ("gcsfs", "gcs"),
    "adlfs": ("adlfs", "azure"),
    "aiohttp": ("aiohttp", "http"),
}
"""For each module, its package and its extra (`pip install 'launcher[EXTRA]'`)."""


def missing_extra(module: str) -> str | None:
    """What a user must install before `module` can be imported; None: it is installed."""
    found = importlib.util.find_spec(module)
    # A folder of this name in the working folder, such as wandb's own, is a package without a file
    if found is not None and found.origin is not None:
        return None
    package, extra = EXTRAS[module]
    return f"needs {package}, which is not installed: pip install 'launcher[{extra}]'"


def require_extra(module: str, what: str) -> None:
    """Raises RecipeError if `what`, such as a key or a file, needs a module that is not installed."""
    if (missing := missing_extra(module)) is not None:
        raise RecipeError(f"{what}: {missing}")
