"""A checkpoint's weights as a Hugging Face folder, tensor by tensor, in one process and without its strategy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import yaml

from launcher.checkpoint.reader import open_tensors, read_state
from launcher.errors import RecipeError
from launcher.models.build import build_model, checkpoint_folder, find_blocks, is_pretrained
from launcher.models.export import appearing, write_weights
from launcher.models.folders import reader
from launcher.models.load import open_checkpoint
from launcher.models.lora import add_adapters
from launcher.recipe.decode import decode
from launcher.recipe.schema import Recipe


def recipe_of(checkpoint: Path) -> Recipe:
    """The recipe that a checkpoint was written with. Raises DamagedCheckpointError."""
    recipe, _, _ = decode(yaml.safe_load(read_state(checkpoint)["recipe"]))
    return recipe


def export_checkpoint(
    checkpoint: Path,
    out: Path,
    *,
    dtype: str | None,
    merged: bool,
    save_tokenizer: Callable[[Recipe, Path], None],
) -> bool:
    """Writes `out`, whole or not at all; returns whether it is an adapter.

    dtype: None: as the run itself would export. merged: an adapter is added into the model it belongs to.
    save_tokenizer: into a folder. Raises RecipeError where the weights are not all to be had.
    """
    recipe = recipe_of(checkpoint)
    if recipe.model.builder is not None:
        raise RecipeError(
            f"export: {recipe.model.builder} is no model of transformers: load its weights from {checkpoint} yourself"
        )
    model: Any = build_model(recipe.model, sequence_length=1, labels=recipe.data.labels)
    blocks = find_blocks(model)
    frozen: Callable[[str], torch.Tensor] | None = None
    natural = torch.float32
    if is_pretrained(recipe.model):
        folder = checkpoint_folder(recipe.model)
        assert folder is not None
        base = open_checkpoint(folder, model)
        frozen, natural = reader(base), base.dtype
    if recipe.lora is not None:
        add_adapters(
            model, recipe.lora, blocks=blocks, base_dtype=torch.float32, base=recipe.model.path
        )
    shapes, read_stored = open_tensors(checkpoint)

    def read(name: str) -> torch.Tensor:
        for prefix in ("model.", "buffer."):
            if prefix + name in shapes:
                return read_stored(prefix + name)
        if frozen is None:
            raise RecipeError(
                f"export: {name} was frozen, so {checkpoint} does not hold it, and there is no model.path to take it from"
            )
        return frozen(name)

    if dtype is None:
        dtype = recipe.checkpoint.export_dtype
    whole = recipe.lora is None or merged
    with appearing(out) as scratch:
        assert scratch is not None
        chosen = getattr(torch, dtype) if dtype is not None else natural if whole else torch.float32
        write_weights(model, scratch, read, dtype=chosen, merged=merged)
        save_tokenizer(recipe, scratch)
    return not whole
