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
from torch import nn
from torch.distributed.tensor import DTensor

from launcher.models.initialization import clean_name
from launcher.models.lora import Adapter, adapter_names, peft_config, save_adapter_config
from launcher.models.safetensors_files import ADAPTER, Shape, Writer, write_files
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

    Every rank must call it. The ranks all-gather one tensor at a time and rank 0 writes it. dtype:
    of floating-point weights; None: float32. merged: writes the whole model, adapters added in.
    tokenizer: of transformers, written too.
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

    module: gives names and shapes, and may be on meta. scratch: None on a rank that only takes part
    in `read`, which all ranks call in the same order.
    """
    shapes = {name: Shape.of(tensor) for name, tensor in named_weights(module).items()}
    if peft_config(module) is not None:
        names = adapter_names(module)
        if not merged:
            _write_adapter(module, scratch, shapes, read, dtype)
            return
        adapter = Adapter(peft_config(module).to_dict(), names)
        read_base = read
        read = adapter.reader(module, read_base, lambda stored: read_base(names[stored]))
        shapes = {name: shape for name, shape in shapes.items() if ".lora_" not in name}
    _write_model(module, scratch, shapes, read, dtype)


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


def _write_model(
    model: Any, scratch: Path | None, shapes: Mapping[str, Shape], read: Read, dtype: torch.dtype
) -> None:
    """Writes weights and config with the names and shapes that the hub has for the architecture."""
    strict = getattr(model, "_keep_in_fp32_modules_strict", None) or ()
    ignored = getattr(model, "_keys_to_ignore_on_save", None) or ()
    model_shapes = ModelShapes(model)
    exported = {name: shape for name, shape in shapes.items() if name not in ignored}
    conversions = export_conversions(model, exported, model_shapes)

    def as_written(name: str, shape: Shape) -> Shape:
        cast = torch.float32 if any(part in name for part in strict) else dtype
        return Shape(shape.shape, cast) if shape.dtype.is_floating_point else shape

    plan = [
        (conversion, {name: as_written(name, shape) for name, shape in conversion.targets.items()})
        for conversion in conversions
    ]
    # Wider elements come first, so that each tensor lies at a multiple of its element size
    plan.sort(key=lambda item: -max((s.dtype.itemsize for s in item[1].values()), default=0))
    writers = write_files(scratch, [group for _, group in plan])
    for (conversion, group), writer in zip(plan, writers, strict=True):
        tensors = {name: read(name) for name in conversion.names()}
        if writer is not None:
            made = conversion.convert(tensors, model_shapes)
            for name in group:
                writer.write(name, made[name])
            del made
        del tensors  # before the next ones are read
    if scratch is not None:
        _write_config(model, scratch, dtype)


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
    module: nn.Module,
    scratch: Path | None,
    shapes: Mapping[str, Shape],
    read: Read,
    dtype: torch.dtype,
) -> None:
    names = adapter_names(module)
    forms = {stored: Shape(shapes[name].shape, dtype) for stored, name in names.items()}
    writer = Writer(scratch / ADAPTER, forms) if scratch is not None else None
    for stored, name in names.items():
        whole = read(name)
        if writer is not None:
            writer.write(stored, whole)
    if scratch is not None and writer is not None:
        writer.close()
        save_adapter_config(module, scratch)
        if peft_config(module).modules_to_save:  # a classifier
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
