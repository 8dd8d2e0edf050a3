"""Writes a model as a Hugging Face folder: safetensors, config, tokenizer; tensor by tensor."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from torch.distributed.tensor import DTensor

from launcher.metrics.console import task
from launcher.models.initialization import clean_name
from launcher.models.lora import Adapter, adapter_names, peft_config
from launcher.models.safetensors_files import ADAPTER, WeightFiles
from launcher.models.tensor_names import ModelShapes, export_conversions

LABELS = "labels.json"
"""Beside a classifier's adapter: the names of its classes."""

Read = Callable[[str], torch.Tensor]
"""Returns a whole tensor of the model by its clean name."""


def export_hugging_face(
    module: nn.Module,
    folder: Path,
    *,
    rank: int,
    device: torch.device,
    dtype: torch.dtype | None = None,
    merged: bool = False,
    tokenizer: Any = None,
) -> None:
    """Writes `folder`, atomically, for transformers' `from_pretrained`, or for peft if the model
    has adapters.

    Every rank must call it: the ranks all-gather one tensor at a time, and rank 0 writes it. dtype:
    of floating-point weights; None: float32. merged: writes the whole model, adapters added in.
    """
    tensors = named_weights(module)

    def read(name: str) -> torch.Tensor:
        return unshard(tensors[name], device)

    with appearing(folder, write=rank == 0) as scratch:
        write_weights(module, scratch, read, dtype=dtype or torch.float32, merged=merged)
        if scratch is not None and tokenizer is not None:
            tokenizer.save_pretrained(scratch)


def write_weights(
    module: nn.Module, scratch: Path | None, read: Read, *, dtype: torch.dtype, merged: bool
) -> None:
    """Writes a model or its adapters, with its config.

    module: gives names, and may be on meta. scratch: None on a rank that only takes part in `read`,
    which all ranks call in the same order.
    """
    if peft_config(module) is not None and not merged:
        tensors = {name: tensor for name, tensor, _ in exported_tensors(module, read, merged=False)}
        _write_adapter(module, scratch, tensors, dtype)
        return
    files = WeightFiles(scratch) if scratch is not None else None
    for name, made, as_float32 in exported_tensors(
        module, read, merged=merged, convert=scratch is not None
    ):
        if files is not None:
            files.add(name, made, torch.float32 if as_float32 else dtype)
    if files is not None and scratch is not None:
        files.close()
        _write_config(module, scratch, dtype)


def exported_tensors(
    model: Any, read: Read, *, merged: bool, convert: bool = True
) -> Iterator[tuple[str, torch.Tensor, bool]]:
    """The tensors of an exported model or of its adapters: the name that the hub (or peft) has,
    the tensor, and whether the model keeps it in float32.

    convert: false: only calls `read`, for a rank that does not write.
    """
    names = list(named_weights(model))
    if peft_config(model) is not None:
        if not merged:
            yield from ((key, read(name), False) for key, name in adapter_names(model).items())
            return
        read, names = merged_reader(model, read), [name for name in names if ".lora_" not in name]
    strict = getattr(model, "_keep_in_fp32_modules_strict", None) or ()
    ignored = getattr(model, "_keys_to_ignore_on_save", None) or ()
    shapes = ModelShapes(model)
    conversions = export_conversions(model, [name for name in names if name not in ignored])
    with task("converting weights", len(conversions)) as advance:
        for conversion in conversions:
            tensors = {name: read(name) for name in conversion.names()}
            if convert:
                for name, made in conversion.convert(tensors, shapes).items():
                    yield name, made, any(part in name for part in strict)
            del tensors  # before the next ones are read
            advance(1)


def merged_reader(module: nn.Module, read: Read) -> Read:
    """Reads the tensors of a model without adapters from one with adapters, which are added in."""
    stored = adapter_names(module)
    adapter = Adapter(peft_config(module).to_dict(), stored)
    return adapter.reader(module, read, lambda key: read(stored[key]))


@contextmanager
def appearing(folder: Path, *, write: bool = True) -> Iterator[Path | None]:
    """Yields a scratch folder that replaces `folder` at the end; None if this process does not
    write."""
    if not write:
        yield None
        return
    scratch = folder.with_name(folder.name + ".writing")
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    try:
        yield scratch
        shutil.rmtree(folder, ignore_errors=True)
        scratch.rename(folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _write_config(model: Any, scratch: Path, dtype: torch.dtype) -> None:
    config = copy.deepcopy(model.config)
    parts = [getattr(config, name, None) for name in getattr(config, "sub_configs", {})]
    for part in [config, *parts]:
        if part is not None:
            part.dtype = dtype
    config.save_pretrained(scratch)
    if hasattr(config, "auto_map"):  # the checkpoint's own code
        for file in Path(config.name_or_path).glob("*.py"):
            shutil.copy2(file, scratch / file.name)
    generation = getattr(model, "generation_config", None)
    if generation is not None and model.can_generate():
        # save_pretrained would refuse settings that many models on the hub have
        generation.to_json_file(scratch / "generation_config.json")


def _write_adapter(
    module: nn.Module, scratch: Path | None, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype
) -> None:
    if scratch is None:
        return
    as_written = {name: tensor.to(dtype).contiguous() for name, tensor in tensors.items()}
    save_file(as_written, scratch / ADAPTER, metadata={"format": "pt"})
    config = peft_config(module)
    config.save_pretrained(scratch)
    if config.modules_to_save:  # a classifier
        labels = module.config.id2label  # type: ignore[union-attr]
        (scratch / LABELS).write_text(json.dumps(labels, indent=2) + "\n")


def named_weights(module: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers by clean name. A tied parameter has its first name only."""
    parameters = {clean_name(name): weight.detach() for name, weight in module.named_parameters()}
    tied = {clean_name(name) for name, _ in module.named_parameters(remove_duplicate=False)}
    state = {clean_name(name): tensor for name, tensor in module.state_dict().items()}
    return parameters | {name: tensor for name, tensor in state.items() if name not in tied}


def unshard(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The whole tensor in host memory. All ranks that have a shard of it must call this."""
    if isinstance(tensor, DTensor):
        # Offloaded shards are all-gathered on the device, as in training
        if tensor.device.type != device.type:
            tensor = tensor.to(device)
        assert isinstance(tensor, DTensor)
        tensor = tensor.full_tensor()
    return tensor.cpu()
