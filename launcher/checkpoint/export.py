"""`launcher export`: writes a Hugging Face folder from a checkpoint or from RUN_DIR/hf.

One process reads and writes one tensor at a time. The strategy of the run does not matter.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import yaml

from launcher.checkpoint.reader import open_tensors, read_state
from launcher.errors import RecipeError
from launcher.models.build import build_model, checkpoint_folder, is_pretrained
from launcher.models.export import LABELS, appearing, named_weights, write_weights
from launcher.models.load import open_checkpoint
from launcher.models.lora import Adapter, add_adapters
from launcher.models.safetensors_files import (
    ADAPTER,
    ADAPTER_CONFIG,
    INDEX,
    Shape,
    StoredTensors,
    open_file,
    open_folder,
    write_files,
)
from launcher.recipe.decode import decode
from launcher.recipe.hub import model_folder
from launcher.recipe.schema import Model, Recipe


def export_checkpoint(
    checkpoint: Path,
    out: Path,
    *,
    dtype: str | None,
    merged: bool,
    save_tokenizer: Callable[[Recipe, Path], None],
) -> bool:
    """Writes `out` from a checkpoint, atomically. Returns whether it is an adapter.

    dtype: None: the one that the run would export. merged: adds an adapter into its base model.
    save_tokenizer: saves the recipe's tokenizer into a folder.
    Raises RecipeError if weights are missing, DamagedCheckpointError if they cannot be read.
    """
    recipe, _, _ = decode(yaml.safe_load(read_state(checkpoint)["recipe"]))
    if recipe.model.builder is not None:
        raise RecipeError(
            f"export: {recipe.model.builder} is not a transformers model: load its weights from "
            f"{checkpoint} yourself"
        )
    model: Any = build_model(recipe.model, sequence_length=1, labels=recipe.data.labels)
    read_frozen: Callable[[str], torch.Tensor] | None = None
    natural = torch.float32
    if is_pretrained(recipe.model):
        folder = checkpoint_folder(recipe.model)
        assert folder is not None
        base = open_checkpoint(folder, model)
        read_frozen, natural = base.reader(), base.stored.dtype()
    if recipe.lora is not None:
        add_adapters(model, recipe.lora, base_dtype=torch.float32, base=recipe.model.path)
    names, read_stored = open_tensors(checkpoint)

    def read(name: str) -> torch.Tensor:
        for stored in (f"model.{name}", f"buffer.{name}"):
            if stored in names:
                return read_stored(stored)
        if read_frozen is None:
            raise RecipeError(
                f"export: {name} was frozen, so {checkpoint} does not hold it, and there is no "
                "model.path to take it from"
            )
        return read_frozen(name)

    adapter = recipe.lora is not None and not merged
    chosen = torch.float32 if adapter else natural
    if (wanted := dtype or recipe.checkpoint.export_dtype) is not None:
        chosen = getattr(torch, wanted)
    with appearing(out) as scratch:
        assert scratch is not None
        write_weights(model, scratch, read, dtype=chosen, merged=merged)
        save_tokenizer(recipe, scratch)
    return adapter


def export_folder(source: Path, out: Path, *, dtype: str | None, merged: bool) -> None:
    """Writes `out`, atomically, from the model or adapter in a folder such as RUN_DIR/hf.

    dtype: bfloat16, float16 or float32; None: unchanged, or the base model's for a merged adapter.
    Raises RecipeError if the weights cannot be read or do not fit the base model.
    """
    wanted: torch.dtype | None = getattr(torch, dtype) if dtype is not None else None
    adapter = (source / ADAPTER_CONFIG).is_file()
    with appearing(out) as scratch:
        assert scratch is not None
        if adapter and merged:
            _merge(source, scratch, wanted)
        else:
            _cast(source, scratch, wanted, adapter=adapter)
        replaced = {INDEX, *((ADAPTER_CONFIG, LABELS) if merged else ())}
        for file in source.iterdir():  # tokenizer, chat template, the model's own code
            copied = file.is_file() and file.suffix != ".safetensors" and file.name not in replaced
            if copied and not (scratch / file.name).exists():
                shutil.copy2(file, scratch / file.name)


def _cast(source: Path, scratch: Path, dtype: torch.dtype | None, *, adapter: bool) -> None:
    stored = _open_adapter(source) if adapter else open_folder(source, key="export")
    shapes = {
        name: Shape(shape.shape, dtype or shape.dtype) if shape.dtype.is_floating_point else shape
        for name, shape in stored.tensors.items()
    }
    names = sorted(shapes, key=lambda name: -shapes[name].dtype.itemsize)
    # An adapter is always one file
    groups = [names] if adapter else [[name] for name in names]
    writers = write_files(scratch, [{name: shapes[name] for name in group} for group in groups])
    for group, writer in zip(groups, writers, strict=True):
        assert writer is not None
        for name in group:
            writer.write(name, stored.rows(name))
    stored.close()
    if adapter:
        (scratch / "model.safetensors").rename(scratch / ADAPTER)
    elif dtype is not None:
        config = json.loads((source / "config.json").read_text())
        nested = [part for part in config.values() if isinstance(part, dict) and "dtype" in part]
        for part in [config, *nested]:
            part["dtype"] = str(dtype).removeprefix("torch.")
        (scratch / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def _open_adapter(source: Path) -> StoredTensors:
    if not (source / ADAPTER).is_file():
        raise RecipeError(f"export: {source} has an {ADAPTER_CONFIG} and no {ADAPTER}")
    return open_file(source / ADAPTER)


def _merge(source: Path, scratch: Path, dtype: torch.dtype | None) -> None:
    settings: dict[str, Any] = json.loads((source / ADAPTER_CONFIG).read_text())
    base = settings.get("base_model_name_or_path")
    if not base:
        where = f"{source / ADAPTER_CONFIG} (base_model_name_or_path)"
        raise RecipeError(f"export: {where} does not name the adapter's model")
    classifies = settings.get("task_type") == "SEQ_CLS"
    labels = source / LABELS
    model = build_model(
        Model(path=base, task="sequence_classification" if classifies else "causal_lm"),
        sequence_length=1,
        labels=list(json.loads(labels.read_text()).values()) if labels.is_file() else None,
    )
    checkpoint = open_checkpoint(model_folder(base, key="export"), model, key="export")
    stored = _open_adapter(source)
    adapter = Adapter(settings, stored.tensors)
    changed = {*adapter.factors, *adapter.whole}
    problems = [
        f"export: {base} has no {name}, which the adapter changes"
        for name in sorted(changed - model.state_dict().keys())
    ]
    problems = problems or [
        f"export: neither {base} nor the adapter has {name}"
        for name in sorted(named_weights(model).keys() - checkpoint.loaded - adapter.whole.keys())
    ]
    if problems:
        raise RecipeError(problems)
    read = adapter.reader(model, checkpoint.reader(), stored.rows)
    write_weights(model, scratch, read, dtype=dtype or checkpoint.stored.dtype(), merged=True)
    stored.close()
