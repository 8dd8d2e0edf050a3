"""Recurrent layers (state spaces, gated delta networks, short convolutions) of packed rows.

Such a layer carries a state or a convolution from token to token, also from one document of a row
to the next. Here it computes each document by itself. Kernels that know the bounds of documents
receive them. Elsewhere the documents become the rows of a batch that is padded on the right, which
is exact because the layer is causal.
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Callable, Sequence
from functools import partial, wraps
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.functional import embedding

from launcher.libraries.families import BOUNDS, CONVOLUTIONS, SCANS, STATE_DECAY
from launcher.libraries.private import (
    FakeTensor,
    kernel_functions,
    tree_leaves,
    tree_map_only,
)
from launcher.models.description import describe
from launcher.models.documents import DocumentsOfCall

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def recurrent_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The modules of the blocks that carry a state or a convolution along the tokens, by name:
    the outermost ones with a convolution or with the decay of a state (`A_log`)."""
    found: dict[str, nn.Module] = {}
    for block, module in describe(model).blocks.items():
        for name, each in module.named_modules(prefix=block):
            inside = any(name.startswith(f"{outer}.") for outer in found)
            convolves = any(isinstance(child, nn.Conv1d) for child in each.children())
            decays = any(own == STATE_DECAY for own, _ in each.named_parameters(recurse=False))
            if not inside and (convolves or decays):
                found[name] = each
    return found


def can_separate_documents(model: nn.Module) -> bool:
    """Whether the model has recurrent layers, and all take the tokens of rows as their first
    argument, so that they can be given documents instead."""
    layers = recurrent_layers(model).values()
    arguments = [list(inspect.signature(type(layer).forward).parameters) for layer in layers]
    return bool(layers) and all(names[:2] == ["self", "hidden_states"] for names in arguments)


def separate_documents(model: PreTrainedModel, device: torch.device) -> DocumentsOfCall | None:
    """Makes the recurrent layers of a model compute each document of packed rows by itself, if the
    model has such layers. The model then takes the argument `documents`, of `documents_at`. Returns
    what the layers share; None: nothing has changed."""
    if not can_separate_documents(model):
        return None
    call, layers = DocumentsOfCall.of(model), recurrent_layers(model).values()
    call.by_document = True
    in_kernels = device.type == "cuda" and all(map(_kernels_take_bounds, layers))
    for layer in layers:
        layer.forward = partial(_by_document, layer.forward, call, in_kernels)
    return call


def separated(layer: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
    """A function of a layer's tokens that computes each document by itself if the layer does so. With
    kernels it also takes the bounds of documents."""
    own: Any = layer.forward
    if isinstance(own, partial) and own.func is _by_document:
        return partial(_by_document, forward, *own.args[1:])
    return forward


def use_operators_without_values(model: nn.Module) -> None:
    """Lets the recurrent layers of a model compute with PyTorch's operators on the meta device and on
    fake tensors, where a kernel of another package would read from a null address."""
    for code in _code_of(model):
        for name, function in kernel_functions(code).items():
            if function.installed:
                setattr(code, name, _with_values_only(function.call, function.operators))


def missing_kernels(model: nn.Module) -> list[str]:
    """The packages that are not installed and have kernels for the recurrent layers of a model."""
    if not recurrent_layers(model):
        return []
    functions = (one for code in _code_of(model) for one in kernel_functions(code).values())
    return sorted({one.package for one in functions if not one.installed})


def _code_of(model: nn.Module) -> list[ModuleType]:
    """The Python modules of a model's classes."""
    names = dict.fromkeys(type(module).__module__ for module in model.modules())
    return [sys.modules[name] for name in names if name in sys.modules]


def _with_values_only(function: Any, operators: Any) -> Any:
    """Calls `function` on tensors with values, and `operators` on others."""
    taken = inspect.signature(operators).parameters

    @wraps(function)
    def chosen(*args: Any, **options: Any) -> Any:
        tensors = [each for each in tree_leaves((args, options)) if isinstance(each, torch.Tensor)]
        if any(each.device.type == "meta" or isinstance(each, FakeTensor) for each in tensors):
            return operators(*args, **{key: options[key] for key in options if key in taken})
        return function(*args, **options)

    return chosen


def _kernels_take_bounds(layer: nn.Module) -> bool:
    """Whether the functions that a layer calls take the bounds of documents here. Read in
    transformers 5.23; these kernels have not been run."""
    called = set(inspect.unwrap(type(layer).forward).__code__.co_names)
    scans = called & SCANS.keys()
    packages = {(SCANS | CONVOLUTIONS)[name] for name in called & (SCANS | CONVOLUTIONS).keys()}
    has_state = any(name.endswith(STATE_DECAY) for name, _ in layer.named_parameters())
    if not packages or (has_state and not scans):
        return False
    return all(importlib.util.find_spec(package) is not None for package in packages)


@torch.compiler.disable(  # type: ignore[no-untyped-call, untyped-decorator]
    reason="recurrent layers, whose batches of documents differ from micro-batch to micro-batch"
)
def _by_document(
    forward: Any,
    call: DocumentsOfCall,
    in_kernels: bool,
    hidden_states: torch.Tensor,
    *args: Any,
    **options: Any,
) -> Any:
    """The layer's forward for each document of (rows, tokens, features). Not compiled: a graph
    would depend on the number of documents and on their lengths."""
    for name in BOUNDS:
        options.pop(name, None)
    documents = call.documents
    if documents is None:
        return forward(hidden_states, *args, **options)
    rows = hidden_states.shape[:2]

    def at(index: torch.Tensor | None, values: Any) -> Any:
        """The arguments with what they have for each token of the rows, such as input_ids, at
        these tokens; None: at all tokens, as one row."""
        return tree_map_only(
            torch.Tensor,
            lambda tensor: _take(tensor, index) if tensor.shape[:2] == rows else tensor,
            values,
        )

    inputs = (hidden_states, *args)
    if in_kernels and hidden_states.is_cuda:
        bounds = {"cu_seq_lens_q": documents.bounds, "seq_idx": documents.numbers}
        out = forward(*at(None, inputs), **at(None, options), **bounds)
        return tree_map_only(
            torch.Tensor, lambda tensor: tensor.view(*rows, *tensor.shape[2:]), out
        )
    parts = [forward(*at(batch, inputs), **at(batch, options)) for batch in documents.batches]
    if isinstance(parts[0], tuple):  # such as queries, keys and values
        return tuple(_joined(each, documents.order) for each in zip(*parts, strict=True))
    return _joined(parts, documents.order)


def _take(tensor: torch.Tensor, index: torch.Tensor | None) -> torch.Tensor:
    """What the rows (rows, tokens, ...) have at these positions of the flattened rows; None: at
    all."""
    flat = tensor.flatten(0, 1)
    return flat.unsqueeze(0) if index is None else _at(flat, index)


def _joined(tensors: Sequence[torch.Tensor], order: torch.Tensor) -> torch.Tensor:
    """The tokens of batches of documents in the order of the rows."""
    return _at(torch.cat([tensor.flatten(0, 1) for tensor in tensors]), order)


def _at(table: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """The rows of a table, as no view: FSDP's hooks around a layer do not allow a view to be changed
    in place."""
    if table.ndim == 2 and table.is_floating_point():
        return embedding(index, table)  # its backward pass is faster
    return table[index]
