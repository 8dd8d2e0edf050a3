"""From the recipe's model section to a model on the meta device: the architecture, and not a byte of weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from launcher.errors import RecipeError
from launcher.recipe.schema import Model


def build_model(model: Model, *, sequence_length: int) -> nn.Module:
    """A causal language model of transformers on the meta device, parameters in float32.

    Raises RecipeError where transformers refuses the config, or where the model knows fewer positions than a sequence has.
    """
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    fields: dict[str, Any] = dict(model.config or {})
    try:
        config = AutoConfig.for_model(fields.pop("model_type"), **fields)
        with torch.device("meta"):
            built: nn.Module = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=model.attention)
    except Exception as error:  # whatever its validation raises: the config came from the user
        raise RecipeError(f"model.config: transformers refuses it: {_first_lines(error)}") from error
    config.architectures = [type(built).__name__]
    positions = getattr(config, "max_position_embeddings", None)
    if isinstance(positions, int) and sequence_length > positions:
        raise RecipeError(
            f"data.sequence_length: {sequence_length} is more than the {positions} positions of the model; "
            f"shorten it, or set model.config.max_position_embeddings={sequence_length}"
        )
    return built


def _first_lines(error: Exception) -> str:
    return " ".join(line.strip() for line in str(error).strip().splitlines()[:3]) or type(error).__name__


def find_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """The repeated blocks, by name, outermost only: the modules that the model's class says must not be split.

    Empty where the class names none; such a model is sharded and gathered whole.
    """
    names = set(getattr(model, "_no_split_modules", None) or ())
    blocks: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        inside = any(name.startswith(outer + ".") for outer in blocks)
        if type(module).__name__ in names and not inside and next(module.parameters(), None) is not None:
            blocks[name] = module
    return blocks


def vocabulary_size(model: nn.Module) -> int:
    """Rows of the input embedding: ids from 0 to one less can be looked up."""
    pretrained: Any = model
    embedding = pretrained.get_input_embeddings()
    return int(embedding.weight.shape[0])


def padding_id(model: nn.Module) -> int:
    """The id that the model knows as padding; 0 where it knows none, and does not mind."""
    padding = getattr(getattr(model, "config", None), "pad_token_id", None)
    return padding if isinstance(padding, int) else 0


def flops_per_token(model: nn.Module, *, sequence_length: int) -> float:
    """Floating-point operations of forward and backward, a token: 6 N + 12 L h T.

    N: parameters but input embeddings; L, h: blocks and hidden size; T: tokens of a sequence (PaLM, appendix B:
    attention counted without the causal half, recomputation not counted).
    """
    pretrained: Any = model
    config = pretrained.config
    parameters = sum(parameter.numel() for parameter in model.parameters())
    if not getattr(config, "tie_word_embeddings", False):
        parameters -= sum(parameter.numel() for parameter in pretrained.get_input_embeddings().parameters())
    layers, hidden = getattr(config, "num_hidden_layers", 0), getattr(config, "hidden_size", 0)
    return 6.0 * parameters + 12.0 * layers * hidden * sequence_length
