"""Builds the recipe's model on the meta device, without weights."""

from __future__ import annotations

import contextlib
import difflib
import fnmatch
import inspect
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from launcher.errors import RecipeError
from launcher.libraries import families
from launcher.models.config_overrides import changed_config
from launcher.models.constructors import Draws, refuse_plain_tensors
from launcher.models.dequantized import settings_of
from launcher.models.description import has_other_inputs, text_config
from launcher.models.initialization import check_initializers
from launcher.models.names import clean_name
from launcher.models.quantization import why_not_dequantized
from launcher.models.record import record_of
from launcher.models.tensor_names import record_conversions
from launcher.recipe.functions import call_function
from launcher.recipe.model_config import value_problems
from launcher.recipe.schema import Model
from launcher.sources.hub import model_folder

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


def is_pretrained(model: Model) -> bool:
    """Whether the weights come from a checkpoint."""
    return model.path is not None and model.init != "random"


def checkpoint_folder(model: Model) -> Path | None:
    """Folder of model.path, downloaded if necessary; None if the model has no path."""
    if model.path is None:
        return None
    return model_folder(model.path, key="model.path", weights=is_pretrained(model))


def build_model(
    model: Model, *, sequence_length: int, labels: Sequence[str] | None = None
) -> nn.Module:
    """The model on the meta device, with float32 parameters, those of model.freeze frozen.

    A model.builder is called with model.arguments under `torch.device("meta")` and returns any
    torch.nn.Module; for data without data.builder, `forward(input_ids)` (rows, tokens) of a causal
    model returns logits (rows, tokens, vocabulary). Its attribute `_no_split_modules` names the classes of its blocks;
    each module's `reset_parameters()`, then `_init_weights(module)`, and then what its constructors
    drew in place (`constructors.py`) initialize its weights.

    `labels` are the names of a classifier's classes, by default model.num_labels of them. Raises
    RecipeError if the model cannot be built or trained, or has fewer positions than a sequence.
    """
    if model.builder is not None:
        built = _from_builder(model.builder, model.arguments or {})
    else:
        built = _from_transformers(model, labels, sequence_length)
    if model.freeze:
        freeze(built, model.freeze)
    return built


def _from_transformers(model: Model, labels: Sequence[str] | None, length: int) -> nn.Module:
    import transformers

    transformers.utils.logging.set_verbosity_error()
    folder = checkpoint_folder(model)
    key = "model.config" if folder is None or model.config else "model.path"
    with _refusals(folder, key, model.attention):
        config = make_config(model, folder, labels)
        _refuse_config(model, config)
        attention = _attention(model.attention, config)
        with torch.device("meta"):
            built: PreTrainedModel = auto_class(config, model.task).from_config(
                config,
                dtype=torch.float32,
                attn_implementation=attention,
                trust_remote_code=model.trust_remote_code,
            )
        _refuse_other_inputs(built, key)
    record_conversions(built)
    built.config.architectures = [type(built).__name__]
    _check_positions(built, length, folder)
    if folder is not None and (folder / "generation_config.json").is_file():
        if built.can_generate():
            read = transformers.GenerationConfig.from_pretrained
            built.generation_config = read(folder, local_files_only=True)
    return built  # type: ignore[no-any-return]


def auto_class(config: PreTrainedConfig, task: str) -> Any:
    """The class of transformers that makes models of this config for a task."""
    import transformers

    if task == "embedding":
        return transformers.AutoModel
    kind = {"causal_lm": "CausalLM", "masked_lm": "MaskedLM"}.get(task, "SequenceClassification")
    if task == "causal_lm" and has_other_inputs(config):
        kind = "ImageTextToText"
    return getattr(transformers, f"AutoModelFor{kind}")


def _check_positions(model: PreTrainedModel, length: int, folder: Path | None) -> None:
    """Raises RecipeError if the model has fewer positions than a sequence has tokens. The positions
    of RoBERTa and its relatives start after the index of padding."""
    positions = getattr(text_config(model), "max_position_embeddings", None)
    first = 0
    for name, module in model.named_modules():
        if name.endswith("position_embeddings") and isinstance(module, nn.Embedding):
            first = max(first, 0 if module.padding_idx is None else module.padding_idx + 1)
    if not isinstance(positions, int) or length <= positions - first:
        return
    longer = f", or set model.config.max_position_embeddings={length + first}"
    raise RecipeError(
        f"data.sequence_length: {length} is more than the {positions - first} positions of the "
        f"model; shorten it{longer if folder is None else ''}"
    )


def make_config(
    model: Model, folder: Path | None, labels: Sequence[str] | None = None
) -> PreTrainedConfig:
    """The config of the model; `folder` is `checkpoint_folder`, `labels` as for `build_model`."""
    from transformers import AutoConfig

    if folder is None:
        config = AutoConfig.for_model(**(model.config or {}))
    else:
        config = AutoConfig.from_pretrained(
            folder, trust_remote_code=model.trust_remote_code, local_files_only=True
        )
        if model.config:
            config = changed_config(config, folder, model.config)
    if model.bidirectional:
        config.is_causal = False
        if hasattr(config, "use_bidirectional_attention"):  # Gemma
            config.use_bidirectional_attention = True
    if model.classifies:
        count = 1 if model.task in ("reward", "reranker") else model.num_labels
        if labels is None and count is not None:
            labels = [f"LABEL_{index}" for index in range(count)]
        if labels is not None:
            config.id2label = dict(enumerate(labels))
            config.label2id = {name: index for index, name in enumerate(labels)}
        _set_padding(config, folder)
    return config


def _set_padding(config: PreTrainedConfig, folder: Path | None) -> None:
    """A classifier finds the end of a padded text by the id of padding; by default, the end of a
    document. Raises RecipeError if the config has neither."""

    def is_id(value: object) -> bool:
        return isinstance(value, int) and value >= 0

    text = config.get_text_config(decoder=True)
    if is_id(getattr(text, "pad_token_id", None)):
        return
    end = getattr(text, "eos_token_id", None)
    end = end[0] if isinstance(end, list) else end
    if not is_id(end):
        where = "model.config.pad_token_id"
        if folder is not None:
            where = f"model.path: pad_token_id in {folder / 'config.json'}"
        raise RecipeError(
            f"{where}: missing, and so is eos_token_id; a classifier finds the end of a padded "
            f"text by it. Set it to an id that no text has, from 0 to {text.vocab_size - 1}"
        )
    config.pad_token_id = text.pad_token_id = end


def _refuse_config(model: Model, config: PreTrainedConfig) -> None:
    """Raises RecipeError for an encoder, for values that do not fit the defaults of the config's
    class, such as heads that its default groups do not divide, and if transformers has no causal
    language model of this type."""
    # The mapping of classes would import the configs of all models: two seconds
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    key = "model.config" if model.path is None else "model.path"
    causal, kind = model.task == "causal_lm", config.model_type
    why = families.NOT_ON_TEXT.get(kind)
    if has_other_inputs(config) and config.is_encoder_decoder:
        why = "it is an encoder-decoder"
    if causal and why is not None:
        raise RecipeError(f"{key}: {kind} cannot be trained on text alone: {why}")
    if causal and kind in families.SEE_AHEAD:
        what = "in transformers its tokens see the ones after them"
        raise RecipeError(f"{key}: {kind} cannot be trained to predict the next token: {what}")
    if causal and kind not in families.DECODERS and getattr(config, "is_decoder", None) is False:
        instead = "give a causal language model"
        instead = instead if model.path else "set model.config.is_decoder=true"
        raise RecipeError(
            f"{key}: {kind} is an encoder (is_decoder is false), whose tokens see the ones after "
            f"them; {instead}, or model.task=masked_lm or model.task=sequence_classification"
        )
    where = f"{key}." if model.path is None else f"{key}: {model.path}/config.json: "
    found = value_problems(config.to_dict())
    if problems := [f"{where}{'.'.join(path)}: {what}" for path, _, what in found]:
        raise RecipeError(problems)
    if (
        causal
        and not has_other_inputs(config)
        and kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        and not hasattr(config, "auto_map")
    ):
        what = "is not a causal language model of transformers"
        if config.get_text_config(decoder=True) is not config:
            what = "is neither a causal language model of transformers, nor one of images and text"
        raise RecipeError(f"{key}: {kind} {what}; give one, such as llama or qwen3")


def _refuse_other_inputs(model: PreTrainedModel, key: str) -> None:
    """Raises RecipeError if the model's class needs more than the ids of tokens."""
    parameters = inspect.signature(type(model).forward).parameters.values()
    needed = [
        parameter.name
        for parameter in parameters
        if parameter.default is parameter.empty
        and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
        and parameter.name not in ("self", "input_ids")
    ]
    if needed:
        raise RecipeError(
            f"{key}: {model.config.model_type} cannot be trained on text alone: "
            f"{type(model).__name__} needs {', '.join(needed)} in each forward pass"
        )


def _attention(wanted: str, config: PreTrainedConfig) -> str | None:
    """The attention that transformers is asked for; `wanted` is model.attention. None: sdpa if the
    model's class supports it, else eager.

    transformers 5.17 supports sdpa for models whose scores have a soft cap, such as Gemma 2, and
    leaves the cap out. Raises RecipeError if `wanted` is sdpa for such a model.
    """
    text = config.get_text_config(decoder=True)
    capped = getattr(text, "attn_logit_softcapping", None) is not None
    if capped and wanted == "sdpa":
        what = "it has no soft cap of the scores (attn_logit_softcapping)"
        raise RecipeError(f"model.attention: sdpa: {what}; use auto, or eager")
    if wanted == "auto":
        return "eager" if capped else None
    return wanted


@contextlib.contextmanager
def _refusals(folder: Path | None, key: str, attention: str) -> Iterator[None]:
    """Raises RecipeError, which names this key, in place of the errors of transformers."""
    try:
        yield
    except RecipeError:
        raise
    except Exception as error:  # the classes of models raise anything on unsuitable values
        settings = None if folder is None else settings_of(folder)
        if settings is not None and not isinstance(settings, dict):
            raise RecipeError(f"{key}: {folder}: {why_not_dequantized(settings)}") from error
        lines = str(error).strip().splitlines()[:3] or [type(error).__name__]
        what = " ".join(line.strip() for line in lines)[:400]
        if isinstance(error, KeyError) and " " in what:  # a message: str() puts it in quotes
            what = str(error.args[0])
        elif isinstance(error, KeyError):  # a value that it looks up, such as hidden_act
            what = f"it knows no {what}"
        if "trust_remote_code" in str(error):
            what = f"{folder} needs its own Python code, which is not run by default: if you have "
            what += "read it and trust it, set model.trust_remote_code=true"
        elif "attention implementation" in what or "attn_implementation" in what:
            raise RecipeError(
                f"model.attention: {attention}: {what.partition('. ')[0]}; use auto, or eager"
            ) from error
        raise RecipeError(f"{key}: transformers refuses it: {what}") from error


def _from_builder(name: str, arguments: Mapping[str, object]) -> nn.Module:
    with torch.device("meta"), Draws() as draws:
        built = call_function(name, arguments, key="model.builder")
    if not isinstance(built, nn.Module):
        returned = type(built).__name__
        raise RecipeError(
            f"model.builder: {name} must return a torch.nn.Module; it returned {returned}"
        )
    for key, tensor in (*built.named_parameters(), *built.named_buffers()):
        if not tensor.is_meta:
            raise RecipeError(
                f"model.builder: {name} makes {key} on a device; do not set one: models are built "
                "on the meta device, and get their weights after sharding"
            )
    check_initializers(built)
    refuse_plain_tensors(built)
    # Before the dtype changes, by which parameters get other storages
    record_of(built).draws = draws.after_initializers(built)
    return built.float()


def freeze(model: nn.Module, patterns: Sequence[str]) -> None:
    """Freezes the parameters whose clean names match a pattern. Raises RecipeError if a pattern
    matches none, or if no parameter is left to train."""
    named = {clean_name(name): p for name, p in model.named_parameters(remove_duplicate=False)}
    problems = []
    for pattern in patterns:
        matched = fnmatch.filter(named, pattern)
        for name in matched:
            named[name].requires_grad_(False)
        if not matched:
            near = difflib.get_close_matches(pattern, named, n=3, cutoff=0.3) or list(named)[:3]
            problems.append(
                f"model.freeze: {pattern} matches no parameter; the nearest names are "
                f"{', '.join(near)}"
            )
    if problems:
        raise RecipeError(problems)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise RecipeError(
            f"model.freeze: {', '.join(patterns)} leaves no parameter to train, of {len(named)}"
        )
