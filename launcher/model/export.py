"""The weights as a Hugging Face folder: safetensors and config."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from launcher.model.weights import clean_name

_MAX_FILE_BYTES = 5 * 10**9


def export_hugging_face(module: nn.Module, folder: Path, *, rank: int, device: torch.device, max_file_bytes: int = _MAX_FILE_BYTES) -> None:
    """Writes `folder` as transformers' `from_pretrained` reads it; every rank must call it.

    Weights are gathered one tensor at a time and rank 0 writes file by file, so no process ever holds the model: the
    most is one file (`max_file_bytes`) on rank 0, and one tensor on the others. The folder appears whole or not at all.
    """
    tensors = _tensors(module)
    files = _split(tensors, max_file_bytes)
    scratch = folder.with_name(folder.name + ".writing")
    if rank == 0:
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(parents=True)
    index: dict[str, str] = {}
    for number, names in enumerate(files, start=1):
        file = "model.safetensors" if len(files) == 1 else f"model-{number:05}-of-{len(files):05}.safetensors"
        whole = {name: tensor for name, tensor in _gathered(names, tensors, device) if rank == 0}
        index |= dict.fromkeys(names, file)
        if rank == 0:
            from safetensors.torch import save_file

            save_file(whole, scratch / file, metadata={"format": "pt"})
    if rank != 0:
        return
    if len(files) > 1:
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        listing = {"metadata": {"total_size": size}, "weight_map": index}
        (scratch / "model.safetensors.index.json").write_text(json.dumps(listing, indent=2))
    config: Any = module.config
    config.save_pretrained(scratch)
    shutil.rmtree(folder, ignore_errors=True)
    scratch.rename(folder)


def _tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters, each once however many names it is tied to, and persistent buffers."""
    parameters = {clean_name(name): parameter.detach() for name, parameter in module.named_parameters()}
    named = {clean_name(name) for name, _ in module.named_parameters(remove_duplicate=False)}
    state = {clean_name(name): tensor for name, tensor in module.state_dict().items()}
    return parameters | {name: tensor for name, tensor in state.items() if name not in named}


def _split(tensors: dict[str, torch.Tensor], max_bytes: int) -> list[list[str]]:
    files: list[list[str]] = [[]]
    filled = 0
    for name, tensor in tensors.items():
        size = tensor.numel() * tensor.element_size()
        if files[-1] and filled + size > max_bytes:
            files.append([])
            filled = 0
        files[-1].append(name)
        filled += size
    return files


def _gathered(names: list[str], tensors: dict[str, torch.Tensor], device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
    for name in names:
        tensor = tensors[name]
        if isinstance(tensor, DTensor):
            # Offloaded shards are gathered over the device's links, as training gathers them
            shard: DTensor = tensor.to(device) if tensor.device.type != device.type else tensor  # type: ignore[assignment]
            tensor = shard.full_tensor()
        yield name, tensor.cpu().contiguous()
