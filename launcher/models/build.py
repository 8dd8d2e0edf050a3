"""From the recipe's model section to a model on the meta device: the architecture, and not a byte of weights."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import nn

from launcher.errors import RecipeError
from launcher.models.initialization import clean_name
from launcher.models.tensor_names import record_conversions
from launcher.recipe.functions import call_function
from launcher.recipe.hub import model_folder
from launcher.recipe.schema import Model

_DECODERS_ALL_THE_SAME = {"gpt_neox", "gpt_neox_japanese"}
"""Their configs have `is_decoder` too, false, and nothing reads it."""


def is_pretrained(model: Model) -> bool:
    """Whether weights come from a checkpoint."""
    return model.path is not None and model.init != "random"


def checkpoint_folder(model: Model) -> Path | None:
    """Where model.path is on this machine, fetched where need be; None where the model has no path."""
    return None if model.path is None else model_folder(model.path, key="model.path", weights=is_pretrained(model))


def build_model(
    model: Model,
    *,
    sequence_length: int,
    num_labels: int | None = None,
    labels: Sequence[str] | None = None,
    pad_token_id: int | None = None,
) -> nn.Module:
    """The model on the meta device, parameters in float32; those of model.freeze do not require gradients.

    From model.path or model.config: of transformers, with the head that model.task asks for. From model.builder: any
    torch.nn.Module, which the function, called with model.arguments under `torch.device("meta")`, returns. Its blocks are
    those that a class attribute `_no_split_modules` names; its first values come from `_init_weights(module)` of the
    model where it has one, else from each module's `reset_parameters()`.
    num_labels, labels: sequence_classification: how many classes (in the place of model.num_labels), or their names.
    pad_token_id: of the tokenizer, for configs that have none: a classifier must know where a padded text ends.
    Raises RecipeError where transformers refuses the config, where the model knows fewer positions than a sequence has,
    where it is no model for the task, or where nothing is left to train.
    """
    if model.builder is not None:
        built = _from_builder(model.builder, model.arguments or {})
    else:
        count = len(labels) if labels is not None else num_labels if num_labels is not None else model.num_labels
        built = _from_transformers(
            model, checkpoint_folder(model), num_labels=count, labels=labels, pad_token_id=pad_token_id, length=sequence_length
        )
    if model.freeze:
        freeze(built, model.freeze)
    return built


def _from_transformers(
    model: Model, folder: Path | None, *, num_labels: int | None, labels: Sequence[str] | None, pad_token_id: int | None, length: int
) -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, GenerationConfig
    from transformers.utils import logging

    logging.set_verbosity_error()
    key = "model.config" if folder is None else "model.path"
    classifies = model.task == "sequence_classification"
    head: dict[str, Any] = {}
    if classifies and num_labels is not None:
        names = dict(enumerate(labels)) if labels is not None else {index: f"LABEL_{index}" for index in range(num_labels)}
        head = {"id2label": names, "label2id": {name: index for index, name in names.items()}}
    auto = AutoModelForSequenceClassification if classifies else AutoModelForCausalLM
    try:
        config: Any
        if folder is None:
            fields: dict[str, Any] = dict(model.config or {})
            config = AutoConfig.for_model(fields.pop("model_type"), **fields)
        else:
            config = AutoConfig.from_pretrained(folder, trust_remote_code=model.trust_remote_code, local_files_only=True)
        for name, value in head.items():
            setattr(config, name, value)
    except Exception as error:  # whatever its validation raises: the config came from the user
        raise RecipeError(_refusal(key, folder, error)) from error
    remote = model.trust_remote_code and hasattr(config, "auto_map")
    if not remote and type(config) not in auto._model_mapping:
        others = "" if classifies else "; for classification, set model.task: sequence_classification"
        raise RecipeError(f"{key}: {config.model_type} has no {model.task.replace('_', ' ')} model in transformers{others}")
    if classifies and config.pad_token_id is None:
        end = config.eos_token_id
        config.pad_token_id = pad_token_id if pad_token_id is not None else end[0] if isinstance(end, list) else end
    try:
        with torch.device("meta"):
            built: Any = auto.from_config(
                config, dtype=torch.float32, attn_implementation=model.attention, trust_remote_code=model.trust_remote_code
            )
    except Exception as error:
        raise RecipeError(_refusal(key, folder, error)) from error
    record_conversions(built)
    config = built.config
    config.architectures = [type(built).__name__]
    if not classifies and getattr(config, "is_decoder", None) is False and config.model_type not in _DECODERS_ALL_THE_SAME:
        instead = "give a causal language model" if folder is not None else "set model.config.is_decoder=true"
        raise RecipeError(
            f"{key}: {config.model_type} is an encoder (is_decoder is false): each token sees the ones after it, so there is nothing to "
            f"predict; {instead}, or model.task: sequence_classification"
        )
    positions = getattr(config, "max_position_embeddings", None)
    if isinstance(positions, int) and length > positions:
        longer = f", or set model.config.max_position_embeddings={length}" if folder is None else ""
        raise RecipeError(f"data.sequence_length: {length} is more than the {positions} positions of the model; shorten it{longer}")
    if folder is not None and (folder / "generation_config.json").is_file() and hasattr(built, "generation_config"):
        built.generation_config = GenerationConfig.from_pretrained(folder, local_files_only=True)
    return built  # type: ignore[no-any-return]


def _refusal(key: str, folder: Path | None, error: Exception) -> str:
    what = " ".join(line.strip() for line in str(error).strip().splitlines()[:3]) or type(error).__name__
    if "trust_remote_code" in what:
        return (
            f"{key}: {folder} needs Python code that it brings along, which is not run unless you say so: where you have read it and "
            "trust it, set model.trust_remote_code: true"
        )
    if "attention implementation" in what or "attn_implementation" in what:
        return f"model.attention: transformers refuses it for this model; model.attention: eager works with all: {what[:200]}"
    return f"{key}: transformers refuses it: {what}"


def _from_builder(name: str, arguments: dict[str, Any]) -> nn.Module:
    with torch.device("meta"):
        built = call_function(name, arguments, key="model.builder")
    if not isinstance(built, nn.Module):
        raise RecipeError(f"model.builder: {name} must return a torch.nn.Module; it returned {type(built).__name__}")
    real = [key for key, tensor in [*built.named_parameters(), *built.named_buffers()] if not tensor.is_meta]
    if real:
        raise RecipeError(
            f"model.builder: {name} makes {real[0]} on a device of its own choice; leave the device out: models are built on the meta "
            "device, and get their weights where they will stay"
        )
    return built.float()


def freeze(model: nn.Module, patterns: Sequence[str]) -> None:
    """Parameters whose clean names match one of the patterns (`*` stands for anything) are not trained.

    Raises RecipeError for patterns that match nothing, with the names nearest to them, and where nothing is left to train.
    """
    named = {clean_name(name): parameter for name, parameter in model.named_parameters(remove_duplicate=False)}
    problems = []
    for pattern in patterns:
        matched = [parameter for name, parameter in named.items() if fnmatchcase(name, pattern)]
        for parameter in matched:
            parameter.requires_grad_(False)
        if not matched:
            inside = any(fnmatchcase(name, f"{pattern}.*") for name in named)
            near = difflib.get_close_matches(pattern, named, n=3, cutoff=0.3) or list(named)[:3]
            hint = f"did you mean {pattern}.*?" if inside else f"the nearest names are {', '.join(near)}"
            problems.append(f"model.freeze: {pattern} matches no parameter; {hint}")
    if problems:
        raise RecipeError(problems)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise RecipeError(f"model.freeze: {', '.join(patterns)} leaves no parameter to train, of {len(named)}")


def find_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """The repeated blocks, by name, outermost only: the modules that the model's class says must not be split
    (`_no_split_modules`, names of classes).

    Empty where the class names none; such a model is sharded and gathered whole.
    """
    names = set(getattr(model, "_no_split_modules", None) or ())
    blocks: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        inside = any(name.startswith(outer + ".") for outer in blocks)
        if type(module).__name__ in names and not inside and next(module.parameters(), None) is not None:
            blocks[name] = module
    return blocks


def is_classifier(model: nn.Module) -> bool:
    """Whether it is one of transformers' sequence classifiers."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES as CLASSIFIERS

    return type(model).__name__ in CLASSIFIERS.values()


def _input_embedding(model: nn.Module) -> torch.Tensor | None:
    try:
        weight = model.get_input_embeddings().weight  # type: ignore[operator]
    except (AttributeError, NotImplementedError):
        return None
    return weight if isinstance(weight, torch.Tensor) else None


def vocabulary_size(model: nn.Module) -> int | None:
    """Rows of the input embedding: ids from 0 to one less can be looked up. None where the model has none."""
    weight = _input_embedding(model)
    return None if weight is None else int(weight.shape[0])


def padding_id(model: nn.Module) -> int:
    """The id that the model knows as padding; 0 where it knows none, and does not mind."""
    padding = getattr(getattr(model, "config", None), "pad_token_id", None)
    return padding if isinstance(padding, int) else 0


def class_count(model: nn.Module) -> int | None:
    """Classes of a sequence classifier, as its config says."""
    count = getattr(getattr(model, "config", None), "num_labels", None)
    return count if isinstance(count, int) else None


def flops_per_token(model: nn.Module, *, sequence_length: int) -> float:
    """Floating-point operations of forward and backward, a token: 6 N + 12 L h T; 0 for a model without a config.

    N: parameters but input embeddings, the experts' only as far as a token meets them; L, h: blocks and hidden size; T:
    tokens of a sequence (PaLM, appendix B: attention counted without the causal half, recomputation not counted). A
    frozen parameter counts 4: it has no gradient of its own.
    """
    config: Any = getattr(model, "config", None)
    layers, hidden = getattr(config, "num_hidden_layers", 0), getattr(config, "hidden_size", 0)
    if not layers or not hidden:
        return 0.0
    embedding = None if getattr(config, "tie_word_embeddings", False) else _input_embedding(model)
    experts = (
        getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None) or getattr(config, "n_routed_experts", None)
    )
    met = (getattr(config, "num_experts_per_tok", None) or experts or 1) / (experts or 1)
    total = 0.0
    for name, parameter in model.named_parameters():
        if parameter is not embedding:
            total += (6.0 if parameter.requires_grad else 4.0) * parameter.numel() * (met if ".experts." in name else 1.0)
    return total + 12.0 * layers * hidden * sequence_length
