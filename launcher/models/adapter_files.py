"""Initial values of adapters: DoRA's magnitudes, and a trained adapter that a run continues."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
from torch import nn

from launcher.errors import RecipeError
from launcher.models.dora import set_magnitudes
from launcher.models.expert_adapters import file_form, is_factor, model_form
from launcher.models.load import Load
from launcher.models.lora import adapter_names, base_copies
from launcher.models.names import named_tensors
from launcher.models.safetensors_files import ADAPTER, StoredTensors, open_files
from launcher.models.shards import copy_local_rows, local_part


def open_adapter(folder: Path) -> StoredTensors:
    """The tensors of an adapter's folder. Raises RecipeError if they cannot be read."""
    if not (folder / ADAPTER).is_file():
        raise RecipeError(f"lora.path: {folder} has no {ADAPTER}")
    return open_files([folder / ADAPTER], key="lora.path")


def adapter_loader(load: Load, model: nn.Module, folder: Path | None) -> Load:
    """A function that calls `load`, and then sets magnitudes and adapters of the model.

    Raises RecipeError with every tensor of the adapter in `folder` that does not fit the model, a
    meta model with adapters; None: the adapters are new.
    """
    stored = None if folder is None else _checked(open_adapter(folder), model)
    return partial(_load, load=load, stored=stored)


def _checked(stored: StoredTensors, model: nn.Module) -> StoredTensors:
    names, tensors = adapter_names(model), named_tensors(model)
    wanted = {
        key: tuple(file_form(name, torch.empty(tensors[name].shape, device="meta")).shape)
        for key, name in names.items()
    }
    found = {key: tuple(tensor.shape) for key, tensor in stored.tensors.items()}
    for name, key in base_copies(found).items():
        if name in tensors and found[key] == tuple(tensors[name].shape):
            del found[key]
    problems = [
        f"{key}: {found.get(key, 'missing')} in the adapter, {wanted.get(key, 'not')} in the model"
        for key in sorted(wanted.keys() | found.keys())
        if wanted.get(key) != found.get(key)
    ]
    alike: dict[str, str] = {}  # by the model's own name: a tied weight is in the file twice
    for key, name in names.items():
        first = alike.setdefault(name, key)
        if not problems and first != key and not torch.equal(stored.read(first), stored.read(key)):
            problems.append(f"{first} and {key} differ, and the model ties them")
    if problems:
        title = "lora.path: the adapter does not fit the model with the recipe's section lora:"
        lines = [title, *problems[:20]]
        if len(problems) > 20:
            lines.append(f"  and {len(problems) - 20} more")
        raise RecipeError(lines)
    return stored


@torch.no_grad()
def _load(
    model: nn.Module,
    parameters: torch.device,
    buffers: torch.device,
    *,
    load: Load,
    stored: StoredTensors | None,
) -> None:
    load(model, parameters, buffers)
    set_magnitudes(model)
    if stored is not None:
        tensors = named_tensors(model)
        for key, name in adapter_names(model).items():
            tensor = tensors[name].detach()
            if is_factor(name):
                # Its rows, the experts, are not those of the file
                copy_local_rows(tensor, model_form(name, stored.read(key), len(tensor)))
            else:
                stored.copy_rows(key, tensor)
        for name, key in base_copies(stored.tensors).items():
            _compare(stored, key, tensors[name].detach())
        stored.close()


def _compare(stored: StoredTensors, key: str, weight: torch.Tensor) -> None:
    """Raises RecipeError if this rank's part of a frozen weight is not that in the adapter, but for
    the precision of 16 bits."""
    copy = torch.empty_like(weight)
    stored.copy_rows(key, copy)
    own, stored_part = local_part(weight).float(), local_part(copy).float()
    if not torch.allclose(own, stored_part, rtol=0.01, atol=1e-6):
        raise RecipeError(
            f"lora.path: {key}: the adapter holds a copy of this weight, which is not that of the "
            "model in model.path; name the model that the adapter was trained on there"
        )
