"""Loads the weights of a Hugging Face checkpoint straight into each rank's shards.

`open_checkpoint` plans the conversions on the meta model, from the headers of the files, and
reports every mismatch. The weights are read after wrapping, a piece at a time: rows of a mapped
file are copied into this rank's rows. Where several ranks have the same rows (ddp, or the replicas
of hybrid sharding), the first of them reads and broadcasts. So all ranks together read the files
once, and a rank holds its shards and one piece. Only a tensor that is made of several
(`Conversion`) is built whole first, or just this rank's rows of it where that is possible.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from launcher.errors import RecipeError
from launcher.models.build import checkpoint_folder, is_classifier, is_pretrained
from launcher.models.initialization import initialize, materialize, named_tensors, random_weights
from launcher.models.safetensors_files import Shape, StoredTensors, open_folder
from launcher.models.shards import compute_device, local_rows
from launcher.models.tensor_names import Conversion, ModelShapes, load_conversions
from launcher.recipe import schema

logger = logging.getLogger(__name__)

PIECE_BYTES = 16 * 2**20
"""Bytes to read and broadcast at once."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that fits a model, and its conversions."""

    stored: StoredTensors
    conversions: list[Conversion]
    shapes: ModelShapes
    loaded: frozenset[str]
    """The model's tensors that it gives, under all their names. The others are initialized."""

    def reader(self) -> Callable[[str], torch.Tensor]:
        """Returns a function that reads a whole tensor of the model by name."""
        by_target = {
            name: conversion for conversion in self.conversions for name in conversion.targets
        }
        made: dict[str, torch.Tensor] = {}  # the results of the last conversion

        def read(name: str) -> torch.Tensor:
            nonlocal made
            if name not in made:
                conversion = by_target[name]
                sources = {stored: self.stored.rows(stored) for stored in conversion.names()}
                made = conversion.convert(sources, self.shapes)
            return made[name]

        return read


def open_checkpoint(folder: Path, model: nn.Module, *, key: str = "model.path") -> Checkpoint:
    """Plans how a folder's weights become those of a meta model of transformers that is not yet
    wrapped.

    Logs what is not loaded and what is initialized. Raises RecipeError with every tensor that is
    missing, unexpected or of another shape.
    """
    if getattr(model.config, "quantization_config", None) is not None:
        raise RecipeError(
            f"{key}: {folder} is quantized, and quantized weights cannot be trained; give the "
            "checkpoint it was made from"
        )
    stored = open_folder(folder, key=key)
    shapes = ModelShapes(model)
    conversions, unexpected, problems = load_conversions(model, stored.tensors, shapes)
    state: dict[str, torch.Tensor] = model.state_dict()
    made = {name: form.shape for each in conversions for name, form in each.targets.items()}
    for name, shape in made.items():
        if name not in state:
            problems.append(f"{name}: the model has no such tensor")
        elif shape != (wanted := tuple(state[name].shape)):
            problems.append(
                f"{name}: is {list(shape)} in the checkpoint, and {list(wanted)} in the model"
            )
    notes = _resolve_ties(model, conversions, stored)
    ties = [set(tied) for tied in _tied_names(model)]
    loaded = set(made).union(*(tied for tied in ties if tied & made.keys()))
    failed = {conversion.first for conversion in conversions if not conversion.targets}
    missing = [name for name in state if name not in loaded and name not in failed]
    problems += _missing(model, missing, notes)
    problems += _unexpected(model, unexpected, notes)
    if problems:
        title = f"{key}: {folder} does not fit a {type(model).__name__} with its config:"
        raise RecipeError([title, *sorted(problems)])
    for note in notes:
        logger.info(f"note: {note}")
    return Checkpoint(stored, conversions, shapes, frozenset(loaded))


def starting_weights(
    section: schema.Model, model: nn.Module, *, seed: int, group: dist.ProcessGroup | None
) -> tuple[Callable[[nn.Module, torch.device, torch.device], None], torch.dtype]:
    """The function that gives the wrapped model its weights, and their dtype on disk.

    model: on meta, not yet wrapped. Raises RecipeError like `open_checkpoint`.
    """
    if not is_pretrained(section):
        return partial(random_weights, seed=seed), torch.float32
    folder = checkpoint_folder(section)
    assert folder is not None
    checkpoint = open_checkpoint(folder, model)
    load = partial(pretrained_weights, checkpoint=checkpoint, seed=seed, group=group)
    return load, checkpoint.stored.dtype()


def _tied_names(model: nn.Module) -> list[list[str]]:
    """Groups of names that share a parameter."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [tied for tied in names.values() if len(tied) > 1]


def _resolve_ties(model: Any, conversions: list[Conversion], stored: StoredTensors) -> list[str]:
    """For tied tensors that are stored twice: drops one if both are equal, else unties them."""
    notes = []
    single = {each.first: each for each in conversions if each.converter is None}
    for tied in _tied_names(model):
        first, *others = [name for name in tied if name in single] or [""]
        for name in others:
            one, other = (stored.rows(single[key].names()[0]) for key in (first, name))
            if one.dtype == other.dtype and torch.equal(one, other):
                conversions.remove(single[name])
                continue
            parent, _, attribute = name.rpartition(".")
            own = nn.Parameter(torch.empty_like(model.get_parameter(name)))
            setattr(model.get_submodule(parent), attribute, own)
            model.config.tie_word_embeddings = False
            getattr(model, "all_tied_weights_keys", {}).pop(name, None)
            notes.append(
                f"the config ties {name} to {first}, but the checkpoint holds two different ones: "
                "they are not tied"
            )
    return notes


def _base_model(model: Any) -> tuple[str, nn.Module | None]:
    """The name and module of the model without its head."""
    prefix = model.base_model_prefix
    return prefix, getattr(model, prefix, None) if prefix else None


def _missing(model: Any, missing: list[str], notes: list[str]) -> list[str]:
    """Adds a note about new heads, which may be missing. Returns problems for the rest."""
    ignored = getattr(model, "_keys_to_ignore_on_load_missing", None) or ()
    missing = [name for name in missing if not _matches(name, ignored)]
    initialized = []
    if is_classifier(model):
        prefix, base = _base_model(model)
        # The head, and the pooler that some models have before it
        initialized = [
            name
            for name in missing
            if base is None or not name.startswith(f"{prefix}.") or ".pooler." in name
        ]
    if initialized:
        notes.append(f"not in the checkpoint, initialized anew: {_listing(initialized)}")
    return [f"{name}: missing in the checkpoint" for name in missing if name not in initialized]


def _unexpected(model: Any, names: list[str], notes: list[str]) -> list[str]:
    """Adds a note about other tasks' heads, which a checkpoint may have. Returns problems for the
    rest: any other unknown tensor would be a part of the model that is silently not loaded."""
    ignored = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    computed = (r"rotary_emb\.(inv|original_inv)_freq", r"(^|\.)position_ids$")
    prefix, base = _base_model(model)
    buffers = {name for name, _ in model.named_buffers()}
    problems, heads = [], []
    for name in names:
        if _matches(name, (*ignored, *computed)) or {name, f"{prefix}.{name}"} & buffers:
            continue
        child = name.split(".")[0]
        if base is None or child == prefix or child in base._modules or child in base._parameters:
            problems.append(f"{name}: in the checkpoint, but not in the model")
        else:
            heads.append(name)
    if heads:
        notes.append(f"in the checkpoint, but not in this model, left out: {_listing(heads)}")
    return problems


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(re.search(pattern, name) for pattern in patterns)


def _listing(names: list[str]) -> str:
    return ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")


@torch.no_grad()
def pretrained_weights(
    model: nn.Module,
    parameters: torch.device,
    buffers: torch.device,
    *,
    checkpoint: Checkpoint,
    seed: int,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Loads a checkpoint into a wrapped meta model: parameters on one device, buffers on the other.

    What the checkpoint lacks (computed buffers, adapters, a new head) is initialized from the seed.
    group: the ranks that have the same plain parameters; all must call this. A DTensor has its own
    group.
    """
    materialize(model, parameters=parameters, buffers=buffers)
    initialize(model, seed=seed, loaded=checkpoint.loaded)
    tensors = named_tensors(model)
    for conversion in checkpoint.conversions:
        targets = {name: tensors[name].detach() for name in conversion.targets}
        _load(conversion, checkpoint, targets, group)
    checkpoint.stored.close()


def _load(
    conversion: Conversion,
    checkpoint: Checkpoint,
    tensors: dict[str, torch.Tensor],
    group: dist.ProcessGroup | None,
) -> None:
    stored = checkpoint.stored
    if conversion.converter is None:
        (name,) = conversion.names()
        (tensor,) = tensors.values()
        _copy_rows(tensor, stored.tensors[name], partial(stored.rows, name), group)
        return
    # All tensors of a model have the same mesh, so the same rank reads all of them
    one = next(iter(tensors.values()))
    made: dict[str, torch.Tensor] = {}
    first = 0
    if _reads(_replica_group(one, group)):
        if conversion.stacks_rows():
            local, first = local_rows(one)
            conversion = conversion.some_rows(first, first + local.shape[0])
        if sources := {name: stored.rows(name) for name in conversion.names()}:
            made = conversion.convert(sources, checkpoint.shapes)
    for name, tensor in tensors.items():
        _copy_rows(tensor, conversion.targets[name], partial(_rows_of, made, name, first), group)


def _rows_of(
    made: dict[str, torch.Tensor], name: str, first: int, start: int, stop: int
) -> torch.Tensor:
    return made[name][start - first : stop - first] if made[name].ndim else made[name]


def _replica_group(
    tensor: torch.Tensor, group: dist.ProcessGroup | None
) -> dist.ProcessGroup | None:
    """The ranks that have the same rows as this one; None if there are no others."""
    if isinstance(tensor, DTensor):
        group = tensor.device_mesh.get_group(0) if tensor.device_mesh.ndim == 2 else None
    return group if group is not None and dist.get_world_size(group) > 1 else None


def _reads(replicas: dist.ProcessGroup | None) -> bool:
    return replicas is None or dist.get_rank(replicas) == 0


def _copy_rows(
    tensor: torch.Tensor,
    shape: Shape,
    rows: Callable[[int, int], torch.Tensor],
    group: dist.ProcessGroup | None,
) -> None:
    """Copies this rank's rows into its part of a tensor. shape: of the whole stored tensor."""
    local, first = local_rows(tensor)
    replicas = _replica_group(tensor, group)
    if not shape.shape:
        local, shape = local.reshape(1), Shape((1,), shape.dtype)
    step = max(1, PIECE_BYTES * shape.shape[0] // max(1, shape.bytes))
    for start in range(0, local.shape[0], step):
        stop = min(start + step, local.shape[0])
        piece: torch.Tensor | None = rows(first + start, first + stop) if _reads(replicas) else None
        if replicas is not None:
            # On the device even for offloaded shards, which the group of their mesh supports
            form = (stop - start, *shape.shape[1:])
            on_device = torch.empty(form, dtype=shape.dtype, device=compute_device(tensor))
            if piece is not None:
                on_device.copy_(piece)
            # As bytes, because not every backend takes every dtype
            dist.broadcast(on_device.view(torch.uint8), group=replicas, group_src=0)
            piece = on_device
        assert piece is not None
        local[start:stop].copy_(piece)  # a scalar fits into one row
