"""The weights as a Hugging Face folder: safetensors, config, tokenizer. No process ever holds the model."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from launcher.models.initialization import clean_name
from launcher.models.lora import (
    Adapter,
    adapter_names,
    peft_config,
    save_adapter_config,
    transposed_weights,
)
from launcher.models.safetensors_files import ADAPTER, Shape, Writer, write_files
from launcher.models.tensor_names import ModelShapes, out_of_model

MAX_FILE_BYTES = 5 * 10**9


class SavesPretrained(Protocol):
    """A tokenizer of transformers."""

    def save_pretrained(self, save_directory: Any) -> Any:
        """Writes its files."""


def export_hugging_face(
    module: nn.Module,
    folder: Path,
    *,
    rank: int,
    device: torch.device,
    dtype: torch.dtype | None = None,
    merged: bool = False,
    tokenizer: SavesPretrained | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> None:
    """Writes `folder` as transformers' `from_pretrained` reads it, or peft's where the model has adapters; every rank
    must call it.

    Weights are gathered one tensor at a time (all experts of a layer, where those are one tensor of the model) and
    rank 0 writes each at once. The folder appears whole or not at all.
    dtype: of floating-point weights; None: float32. merged: the whole model with its adapters added in.
    """
    held = held_tensors(module)
    with appearing(folder, write=rank == 0) as scratch:
        write_weights(
            module,
            scratch,
            lambda name: gathered(held[name], device),
            dtype=dtype or torch.float32,
            merged=merged,
            max_file_bytes=max_file_bytes,
        )
        if scratch is not None and tokenizer is not None:
            tokenizer.save_pretrained(scratch)


def write_weights(
    module: nn.Module,
    scratch: Path | None,
    gather: Callable[[str], torch.Tensor],
    *,
    dtype: torch.dtype,
    merged: bool,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> None:
    """Writes a model, or its adapters. module: may lie on meta; its tensors come from `gather`, by clean name."""
    shapes = {
        name: Shape(tuple(tensor.shape), tensor.dtype)
        for name, tensor in held_tensors(module).items()
    }
    if peft_config(module) is not None and not merged:
        _write_adapter(module, scratch, shapes, gather, dtype)
        return
    whole = _merging(module, gather) if peft_config(module) is not None else gather
    base = {name: shape for name, shape in shapes.items() if ".lora_" not in name}
    write_model(module, scratch, base, whole, dtype=dtype, max_file_bytes=max_file_bytes)


@contextmanager
def appearing(folder: Path, *, write: bool = True) -> Iterator[Path | None]:
    """A scratch folder that takes the place of `folder` once all is written; None where this process does not write."""
    if not write:
        yield None
        return
    scratch = folder.with_name(folder.name + ".writing")
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    try:
        yield scratch
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise
    shutil.rmtree(folder, ignore_errors=True)
    scratch.rename(folder)


def write_model(
    model: Any,
    scratch: Path | None,
    held: Mapping[str, Shape],
    gather: Callable[[str], torch.Tensor],
    *,
    dtype: torch.dtype,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> None:
    """Writes weights and config, in the names and shapes that the hub knows for the architecture.

    held: the model's tensors, each once. gather(name): one of them, whole; called in the same order on every process.
    scratch: None on one that only takes part in gathering.
    """
    strict = getattr(model, "_keep_in_fp32_modules_strict", None) or ()
    shapes = ModelShapes(model)
    ignored = getattr(model, "_keys_to_ignore_on_save", None) or ()
    conversions = out_of_model(
        model, {name: shape for name, shape in held.items() if name not in ignored}, shapes
    )

    def written(name: str, shape: Shape) -> Shape:
        cast = torch.float32 if any(part in name for part in strict) else dtype
        return Shape(shape.shape, cast if shape.dtype.is_floating_point else shape.dtype)

    groups = [
        {name: written(name, shape) for name, shape in conversion.targets.items()}
        for conversion in conversions
    ]
    # In a file, wider elements come first, so that all lie at a multiple of their size
    order = sorted(
        range(len(groups)),
        key=lambda index: -max((s.dtype.itemsize for s in groups[index].values()), default=0),
    )
    writers = write_files(
        scratch, [groups[index] for index in order], max_file_bytes=max_file_bytes
    )
    for index, writer in zip(order, writers, strict=True):
        tensors = {name: gather(name) for name in conversions[index].names()}
        if writer is not None:
            made = conversions[index].convert(tensors, shapes)
            for name in groups[index]:
                writer.write(name, made[name])
            del made
        del tensors  # before the next are gathered
    if scratch is None:
        return
    config = copy.deepcopy(model.config)
    for part in [
        config,
        *(getattr(config, name, None) for name in getattr(config, "sub_configs", {})),
    ]:
        if part is not None:
            part.dtype = dtype
    config.save_pretrained(scratch)
    if hasattr(config, "auto_map"):  # the code that the checkpoint brought along
        for file in Path(config.name_or_path).glob("*.py"):
            shutil.copy2(file, scratch / file.name)
    generation = getattr(model, "generation_config", None)
    if generation is not None and model.can_generate():
        generation.to_json_file(
            scratch / "generation_config.json"
        )  # save_pretrained would refuse what the hub is full of


def held_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters, each once however many names it is tied to, and persistent buffers."""
    parameters = {
        clean_name(name): parameter.detach() for name, parameter in module.named_parameters()
    }
    named = {clean_name(name) for name, _ in module.named_parameters(remove_duplicate=False)}
    state = {clean_name(name): tensor for name, tensor in module.state_dict().items()}
    return parameters | {name: tensor for name, tensor in state.items() if name not in named}


def gathered(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The whole of a tensor, in host memory; on every rank that calls it, and all that hold a part of it must."""
    if isinstance(tensor, DTensor):
        # Offloaded shards are gathered over the device's links, as training gathers them
        shard: DTensor = tensor.to(device) if tensor.device.type != device.type else tensor  # type: ignore[assignment]
        tensor = shard.full_tensor()
    return tensor.cpu()


def _merging(
    module: nn.Module, read: Callable[[str], torch.Tensor]
) -> Callable[[str], torch.Tensor]:
    names, transposed = adapter_names(module), transposed_weights(module)
    adapter = Adapter(peft_config(module).to_dict() | {"peft_type": "LORA"}, list(names))

    def gather(name: str) -> torch.Tensor:
        weight = read(name)
        if name not in adapter.factors:
            return weight
        down, up = (read(names[factor]) for factor in adapter.factors[name])
        return adapter.merged(weight, down, up, transposed=name in transposed)

    return gather


def _write_adapter(
    module: nn.Module,
    scratch: Path | None,
    held: Mapping[str, Shape],
    gather: Callable[[str], torch.Tensor],
    dtype: torch.dtype,
) -> None:
    names = adapter_names(module)
    shapes = {theirs: Shape(held[ours].shape, dtype) for theirs, ours in names.items()}
    writer = Writer(scratch / ADAPTER, shapes) if scratch is not None else None
    for theirs, ours in names.items():
        whole = gather(ours)
        if writer is not None:
            writer.write(theirs, whole)
    if scratch is not None and writer is not None:
        writer.close()
        save_adapter_config(module, scratch)
        head = peft_config(module).modules_to_save
        if head:  # how many classes there are, and their names
            labels = module.config.id2label  # type: ignore[union-attr]
            (scratch / "labels.json").write_text(json.dumps(labels, indent=2) + "\n")
