"""Rows of the embeddings for tokens that a tokenizer gains (model.new_tokens).

With adapters, the rows are parameters of their own beside the frozen embedding, as with
`trainable_token_indices` of peft, which reads them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional

from launcher.errors import RecipeError
from launcher.models.adapted import NewRows, mark_adapted
from launcher.models.description import embeddings
from launcher.models.names import clean_name

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def grow_vocabulary(model: PreTrainedModel, new_ids: range) -> None:
    """Gives the embeddings of a model rows for these tokens. Rows that it has already, and that no
    token used, are taken first."""
    embedding = embeddings(model)[0]
    if new_ids and not isinstance(embedding, nn.Embedding):
        raise RecipeError(f"model.new_tokens: {type(model).__name__} names no input embedding")
    if new_ids and embedding.num_embeddings < new_ids.stop:
        model.resize_token_embeddings(new_ids.stop, mean_resizing=False)
    for module in _tables(model) if new_ids else ():
        if isinstance(module, nn.Embedding) and module.num_embeddings < new_ids.stop:
            raise RecipeError(
                f"model.new_tokens: {type(model).__name__} has another embedding for the inputs of "
                f"its layers, with {module.num_embeddings} rows, which this version of transformers "
                "does not enlarge; update transformers"
            )


def _tables(model: nn.Module) -> list[Any]:
    """The modules that have a row for each token: the embeddings, and that of the inputs of layers
    (Gemma 3n and 4)."""
    modules = [module for module in embeddings(model) if module is not None]
    with contextlib.suppress(AttributeError):  # larger ones of Gemma 4 have none
        of_layers: Any = model.get_per_layer_input_embeddings
        modules.append(of_layers())
    return modules


def vocabulary_names(model: nn.Module) -> set[str]:
    """Names of the weights and biases of the embeddings; of a tied one, all names."""
    modules = _tables(model)
    ids = {id(parameter) for module in modules for parameter in module.parameters()}
    named = model.named_parameters(remove_duplicate=False)
    return {clean_name(name) for name, parameter in named if id(parameter) in ids}


def add_new_rows(
    model: PreTrainedModel, new_ids: range, saved: Collection[str]
) -> dict[str, list[int]]:
    """Gives the embeddings of a meta model, but those in `saved` modules, parameters for the rows
    of these tokens. Returns the ids by the embedding's name, for peft. Raises RecipeError if an
    embedding has an adapter already, or a bias."""
    found: dict[str, list[int]] = {}
    names = {module: name for name, module in model.named_modules()}
    made: dict[int, nn.Parameter] = {}  # by id of the weight: tied ones share them
    module: Any
    for module in _tables(model) if new_ids else ():
        if names[module] in saved:
            continue
        instead = "leave it out of lora.target_modules"
        what = "" if type(module) is nn.Linear or isinstance(module, nn.Embedding) else "an adapter"
        if getattr(module, "bias", None) is not None:
            what, instead = "a bias, which peft would drop", "name it in lora.modules_to_save"
        if what:
            problem = f"not available with lora for {names[module]}, which has {what}; {instead}"
            raise RecipeError(f"model.new_tokens: {problem}")
        weight = module.weight
        if id(weight) not in made:
            made[id(weight)] = nn.Parameter(weight.new_empty(len(new_ids), weight.shape[1]))
            found[names[module]] = list(new_ids)
        module.new_rows, module.new_ids = made[id(weight)], new_ids
        mark_adapted(module, NewRows)
        forward = _embed if isinstance(module, nn.Embedding) else _project
        module.forward = partial(forward, module, module.forward)
    return found


def _embed(module: Any, forward: Any, ids: torch.Tensor) -> torch.Tensor:
    """The embeddings of ids, those of new tokens from their own rows."""
    known, first = forward(ids), module.new_ids.start
    new = (ids >= first) & (ids < module.new_ids.stop)
    rows = functional.embedding((ids - first).clamp(0, len(module.new_ids) - 1), module.new_rows)
    if (scale := getattr(module, "embed_scale", None)) is not None:  # of Gemma
        rows = rows * scale.to(rows.dtype)
    return torch.where(new[..., None], rows.to(known.dtype), known)


def _project(module: Any, forward: Any, hidden: torch.Tensor) -> torch.Tensor:
    """The logits, those of new tokens by their own rows."""
    known: torch.Tensor = forward(hidden)
    ids = module.new_ids
    rows = functional.linear(hidden, module.new_rows.to(hidden.dtype)).to(known.dtype)
    return torch.cat((known[..., : ids.start], rows, known[..., ids.stop :]), dim=-1)
