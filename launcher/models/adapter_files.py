"""First values of adapters: those that follow from the loaded weights, and a trained adapter that a
run continues."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
from torch import nn

from launcher.errors import RecipeError
from launcher.models.adapted import adapted_weights, adapter_tensors, base_copies
from launcher.models.load import Load
from launcher.models.names import named_tensors
from launcher.models.safetensors_files import ADAPTER, StoredTensors, open_files
from launcher.models.shards import copy_local_rows, local_part


def open_adapter(folder: Path) -> StoredTensors:
    """The tensors of an adapter's folder. Raises RecipeError if they cannot be read."""
    if not (folder / ADAPTER).is_file():
        raise RecipeError(f"lora.path: {folder} has no {ADAPTER}")
    return open_files([folder / ADAPTER], key="lora.path")


def adapter_loader(load: Load, model: nn.Module, folder: Path | None) -> Load:
    """A function that calls `load`, and then sets the model's adapters.

    Raises RecipeError with every tensor of the adapter in `folder` that does not fit the model, a
    meta model with adapters; None: the adapters are new.
    """
    stored = None if folder is None else _checked(open_adapter(folder), model)
    return partial(_load, load=load, stored=stored)


def _checked(stored: StoredTensors, model: nn.Module) -> StoredTensors:
    of_adapter, tensors = adapter_tensors(model), named_tensors(model)
    wanted = {
        key: tuple(each.file_form(torch.empty(tensors[each.name].shape, device="meta")).shape)
        for key, each in of_adapter.items()
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
    for key, each in of_adapter.items():
        first = alike.setdefault(each.name, key)
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
    for weight in adapted_weights(model):
        weight.after_loading()
    if stored is not None:
        tensors = named_tensors(model)
        for key, each in adapter_tensors(model).items():
            tensor = tensors[each.name].detach()
            if each.model_form is None:
                stored.copy_rows(key, tensor)
            else:
                copy_local_rows(tensor, each.model_form(stored.read(key), len(tensor)))
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
