"""What `launcher export` does: from the weights that a run left to a Hugging Face folder, in another dtype or merged.

A run leaves RUN_DIR/hf today, a model or an adapter. Whatever else weights come from only needs to tell its tensors'
names and shapes, and to hand them over one by one (`export.write_model`).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from launcher.errors import RecipeError
from launcher.models.build import build_model
from launcher.models.export import MAX_FILE_BYTES, appearing, write_model
from launcher.models.load import Checkpoint, open_checkpoint
from launcher.models.lora import Adapter, transposed_weights
from launcher.models.safetensors_files import (
    ADAPTER,
    ADAPTER_CONFIG,
    INDEX,
    Shape,
    StoredTensors,
    open_folder,
    write_files,
)
from launcher.recipe.hub import model_folder
from launcher.recipe.schema import Model


def export_folder(
    source: Path,
    out: Path,
    *,
    dtype: str | None,
    merged: bool,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> None:
    """source: a folder with a model or an adapter, as a run exports it. out: appears whole or not at all.

    dtype: bfloat16, float16 or float32; None: as it is, or as the base model's where an adapter is merged.
    Raises RecipeError where the weights cannot be read or do not fit the base model.
    """
    wanted: torch.dtype | None = getattr(torch, dtype) if dtype is not None else None
    with appearing(out) as scratch:
        assert scratch is not None
        if (source / ADAPTER_CONFIG).is_file() and merged:
            _merge(source, scratch, wanted, max_file_bytes)
        else:
            _cast(source, scratch, wanted, max_file_bytes)
        for file in source.iterdir():
            # Tokenizer, chat template, generation config; code that a checkpoint brings along
            ours = file.suffix == ".safetensors" or file.name in (
                INDEX,
                ADAPTER_CONFIG,
                "labels.json",
            )
            if file.is_file() and not ours and not (scratch / file.name).exists():
                shutil.copy2(file, scratch / file.name)


def _cast(source: Path, scratch: Path, dtype: torch.dtype | None, max_file_bytes: int) -> None:
    adapter = (source / ADAPTER_CONFIG).is_file()
    stored = _adapter_tensors(source) if adapter else open_folder(source, key="export")
    shapes = {
        name: Shape(
            shape.shape,
            dtype if dtype is not None and shape.dtype.is_floating_point else shape.dtype,
        )
        for name, shape in stored.tensors.items()
    }
    order = sorted(shapes, key=lambda name: -shapes[name].dtype.itemsize)
    writers = write_files(
        scratch,
        [{name: shapes[name]} for name in order],
        max_file_bytes=10**18 if adapter else max_file_bytes,
    )
    for name, writer in zip(order, writers, strict=True):
        assert writer is not None
        writer.write(name, stored.rows(name))
    stored.close()
    if adapter:
        (scratch / "model.safetensors").rename(scratch / ADAPTER)
        shutil.copy2(source / ADAPTER_CONFIG, scratch)
        if (source / "labels.json").is_file():
            shutil.copy2(source / "labels.json", scratch)
    elif dtype is not None:
        config = json.loads((source / "config.json").read_text())
        for part in [
            config,
            *(value for value in config.values() if isinstance(value, dict) and "dtype" in value),
        ]:
            part["dtype"] = str(dtype).removeprefix("torch.")
        (scratch / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def _adapter_tensors(source: Path) -> StoredTensors:
    if not (source / ADAPTER).is_file():
        raise RecipeError(f"export: {source} has an {ADAPTER_CONFIG} and no {ADAPTER}")
    from safetensors import safe_open

    with safe_open(source / ADAPTER, framework="pt") as handle:
        return StoredTensors(dict.fromkeys(handle.keys(), source / ADAPTER))


def _merge(source: Path, scratch: Path, dtype: torch.dtype | None, max_file_bytes: int) -> None:
    settings: dict[str, Any] = json.loads((source / ADAPTER_CONFIG).read_text())
    base = settings.get("base_model_name_or_path")
    if not base:
        raise RecipeError(
            f"export: {source / ADAPTER_CONFIG} names no model that the adapter belongs to (base_model_name_or_path)"
        )
    labels = source / "labels.json"
    names = list(json.loads(labels.read_text()).values()) if labels.is_file() else None
    model = build_model(
        Model(
            path=base,
            task="sequence_classification"
            if settings.get("task_type") == "SEQ_CLS"
            else "causal_lm",
        ),
        sequence_length=1,
        labels=names,
    )
    checkpoint = open_checkpoint(model_folder(base, key="export"), model, key="export")
    tensors = _adapter_tensors(source)
    adapter = Adapter(settings, list(tensors.tensors))
    known = model.state_dict()
    lost = sorted(name for name in {*adapter.factors, *adapter.whole} if name not in known)
    if lost:
        raise RecipeError(
            [f"export: {base} has no {name}, which the adapter changes" for name in lost]
        )
    read = reader(checkpoint)
    transposed = transposed_weights(model)

    def gather(name: str) -> torch.Tensor:
        if name in adapter.whole:
            return tensors.rows(adapter.whole[name])
        weight = read(name)
        if name not in adapter.factors:
            return weight
        down, up = (tensors.rows(factor) for factor in adapter.factors[name])
        return adapter.merged(weight, down, up, transposed=name in transposed)

    # Each parameter once, however many names it is tied to
    parameters = dict(model.named_parameters())
    tied = {name for name, _ in model.named_parameters(remove_duplicate=False)} - set(parameters)
    held = {
        name: Shape(tuple(tensor.shape), tensor.dtype)
        for name, tensor in known.items()
        if name not in tied
    }
    fresh = sorted(
        name for name in held if name not in checkpoint.loaded and name not in adapter.whole
    )
    if fresh:
        raise RecipeError([f"export: neither {base} nor the adapter has {name}" for name in fresh])
    write_model(
        model, scratch, held, gather, dtype=dtype or checkpoint.dtype, max_file_bytes=max_file_bytes
    )
    tensors.close()


def reader(checkpoint: Checkpoint) -> Callable[[str], torch.Tensor]:
    """Gives the model's tensors out of a checkpoint, one by one."""
    makers = {
        name: conversion for conversion in checkpoint.conversions for name in conversion.targets
    }
    made: dict[
        str, torch.Tensor
    ] = {}  # of the last conversion: several tensors may come out of one

    def read(name: str) -> torch.Tensor:
        nonlocal made
        if name not in made:
            conversion = makers[name]
            made = conversion.convert(
                {stored: checkpoint.stored.rows(stored) for stored in conversion.names()},
                checkpoint.shapes,
            )
        return made[name]

    return read
