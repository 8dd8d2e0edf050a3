"""Builds the recipe's model on the meta device, without weights."""

from __future__ import annotations

import contextlib
import difflib
import fnmatch
import inspect
import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from launcher.errors import RecipeError
from launcher.libraries.private import block_classes
from launcher.models.applied import applied
from launcher.models.config_overrides import changed_config
from launcher.models.constructors import Draws, refuse_plain_tensors
from launcher.models.dequantized import settings_of
from launcher.models.initialization import check_initializers, clean_name
from launcher.models.nf4 import shape_of
from launcher.models.tensor_names import record_conversions
from launcher.recipe.functions import call_function
from launcher.recipe.hub import model_folder
from launcher.recipe.model_config import value_problems, why_not_dequantized
from launcher.recipe.schema import Model

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

_DECODERS = {"gpt_neox", "gpt_neox_japanese"}
"""Decoders whose configs have an `is_decoder` of false, which their code does not read."""
_NOT_ON_TEXT = {
    "ernie4_5_vl_moe": "its layers have experts of images, which text does not use",
    "git": "its layers and its vision tower are one model",
    "diffusion_gemma": "it denoises blocks of tokens, and does not predict the next one",
    "kosmos-2": "it needs an image in each forward pass",
    "paligemma": "its tokens of a text see the ones after them",
}
"""Types of models of images and text that cannot be trained on text alone, and why, where neither
their config nor the arguments of their class say so (transformers 5.23)."""


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

    kind = {"causal_lm": "CausalLM", "masked_lm": "MaskedLM"}.get(task, "SequenceClassification")
    if task == "causal_lm" and has_other_inputs(config):
        kind = "ImageTextToText"
    return getattr(transformers, f"AutoModelFor{kind}")


def has_other_inputs(config: PreTrainedConfig) -> bool:
    """Whether models of this config are models of images and text for transformers, with a text
    model that has a config of its own. They are built whole, and their text model is trained."""
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES as IMAGE_TEXT,
    )

    return config.model_type in IMAGE_TEXT and config.get_text_config(decoder=True) is not config


def text_config(model: nn.Module) -> Any:
    """The config of the model, or of its text model if it has several; None if it has none."""
    config = getattr(model, "config", None)
    read = getattr(config, "get_text_config", None)
    return config if read is None else read(decoder=True)


def layer_configs(config: Any) -> list[Any]:
    """The config of each layer, if they differ (the heads of Gemma 4); else the config alone. Of a
    config whose layers differ, transformers refuses to read what differs."""
    if getattr(config, "is_heterogeneous", False):
        return list(config.per_layer_config)
    return [config]


def largest_of_layers(config: Any, name: str) -> int:
    """A number of the config, the largest of all layers if they differ; 0 if there is none."""
    found = (getattr(layer, name, None) for layer in layer_configs(config))
    return max((value for value in found if isinstance(value, int)), default=0)


def experts_of_token(config: Any) -> int:
    """The number of experts that a token is sent to; 0 if the config has none."""
    names = ("num_experts_per_tok", "top_k_experts")  # the second is of Gemma 4
    return max(largest_of_layers(config, name) for name in names)


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
    if model.classifies:
        count = 1 if model.task == "reward" else model.num_labels
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
    why = _NOT_ON_TEXT.get(kind)
    if has_other_inputs(config) and config.is_encoder_decoder:
        why = "it is an encoder-decoder"
    if causal and why is not None:
        raise RecipeError(f"{key}: {kind} cannot be trained on text alone: {why}")
    if causal and kind not in _DECODERS and getattr(config, "is_decoder", None) is False:
        instead = "give a causal language model"
        instead = instead if model.path else "set model.config.is_decoder=true"
        raise RecipeError(
            f"{key}: {kind} is an encoder (is_decoder is false), whose tokens see the ones after "
            f"them; {instead}, or model.task=masked_lm or model.task=sequence_classification"
        )
    where = f"{key}." if model.path is None else f"{key}: {model.path}/config.json: "
    if problems := [f"{where}{name}: {what}" for name, what in value_problems(config.to_dict())]:
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
    applied(built).draws = draws.after_initializers(built)
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


def parts_without_text(model: nn.Module) -> list[str]:
    """Names of the parameters that text does not use, such as those of a vision tower and of layers
    that attend to attachments."""
    text = text_config(model)
    if text is None or text is getattr(model, "config", None):
        return []
    decoder: Any = model.get_decoder()  # type: ignore[operator]
    used_modules = [decoder, *embeddings(model)]
    if is_classifier(model):
        base = model.base_model_prefix
        used_modules += [child for name, child in model.named_children() if name != base]
    used = {id(p) for module in used_modules if module is not None for p in module.parameters()}
    for index in getattr(text, "cross_attention_layers", None) or ():  # to attachments (Mllama)
        used -= {id(p) for p in decoder.layers[index].parameters()}
    return [name for name, parameter in model.named_parameters() if id(parameter) not in used]


def modules_without_text(model: nn.Module) -> tuple[nn.Module, ...]:
    """The outermost modules, but for lists, whose parameters text does not use."""
    unused, found = set(parts_without_text(model)), dict[str, nn.Module]()
    for name, module in model.named_modules() if unused else ():
        own = {f"{name}.{inner}" for inner, _ in module.named_parameters()}
        inside = any(name.startswith(f"{outer}.") for outer in found)
        if own and own <= unused and not inside and not isinstance(module, nn.ModuleList):
            found[name] = module
    return tuple(found.values())


def find_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """The repeated blocks by name: the outermost modules of the classes in `_no_split_modules`, but
    not those of a vision tower, nor an input embedding (BERT's)."""
    embedding = getattr(embeddings(model)[0], "weight", None)
    names = block_classes(model)
    towers = {inner for module in modules_without_text(model) for inner in module.modules()}
    blocks: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        inside = module in towers or any(name.startswith(outer + ".") for outer in blocks)
        own = list(module.parameters()) if type(module).__name__ in names and not inside else []
        if own and all(parameter is not embedding for parameter in own):
            blocks[name] = module
    return blocks


def embeddings(model: nn.Module) -> tuple[Any, Any]:
    """The input and the output embedding; None where the model does not name one."""

    def named(method: str) -> Any:
        with contextlib.suppress(AttributeError, NotImplementedError):
            return getattr(model, method)()
        return None

    return named("get_input_embeddings"), named("get_output_embeddings")


def reads_embedding(model: nn.Module) -> bool:
    """Whether the model reads a row of its input embedding's weight beside looking tokens up: Gemma 3n
    and 4 with a vision tower, for the inputs of layers. The weight must be whole then."""
    text: Any = text_config(model)
    of_layers = getattr(text, "hidden_size_per_layer_input", None)
    return bool(of_layers) and text is not getattr(model, "config", None)


def outer_units(model: nn.Module, blocks: dict[str, nn.Module]) -> tuple[nn.Module, ...]:
    """The modules outside of the blocks that can be sharded as units: the input embedding, the
    last norm if it is found, and the output embedding; none if the embeddings share a weight, or if
    the model reads that of the first by itself."""
    first, last = embeddings(model)
    embeds = isinstance(first, nn.Embedding) and last is not None
    if not blocks or not embeds or first.weight is last.weight or reads_embedding(model):
        return ()
    units = (first, last, *blocks.values(), *modules_without_text(model))
    inside = {child for unit in units for child in unit.modules()}
    order = list(model.modules())
    own = [m for m in order if m not in inside and list(m.parameters(recurse=False))]
    end = max(order.index(block) for block in blocks.values())
    if len(own) == 1 and order.index(own[0]) > end:
        return first, own[0], last
    return first, last


def is_classifier(model: nn.Module) -> bool:
    """Whether the model is a sequence classifier of transformers."""
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES as CLASSIFIERS,
    )

    return type(model).__name__ in CLASSIFIERS.values()


def vocabulary_size(model: nn.Module) -> int | None:
    """Rows of the input embedding; valid ids are smaller. None if the model has none."""
    weight = getattr(embeddings(model)[0], "weight", None)
    return None if weight is None else int(weight.shape[0])


def padding_id(model: nn.Module) -> int:
    """The model's id for padding; 0 if it has none."""
    padding = getattr(getattr(model, "config", None), "pad_token_id", None)
    return padding if isinstance(padding, int) and padding >= 0 else 0


def class_count(model: nn.Module) -> int | None:
    """The number of classes in the model's config; None if it has none."""
    count = getattr(getattr(model, "config", None), "num_labels", None)
    return count if isinstance(count, int) else None


@dataclass(frozen=True)
class TokenFlops:
    """Floating-point operations for a token."""

    products: float = 0.0
    """Of the parameters."""
    attention: tuple[tuple[float, float], ...] = ()
    """For groups of layers: operations for each token that is attended to, and the window."""

    def at(self, document_length: float) -> float:
        """Operations for a token of a document of this many tokens. A causal mask does not halve
        the operations of attention; a window limits them."""
        return self.products + sum(
            operations * min(document_length, window) for operations, window in self.attention
        )

    def times(self, factor: float) -> TokenFlops:
        """As many times the operations."""
        attention = tuple((factor * operations, window) for operations, window in self.attention)
        return TokenFlops(factor * self.products, attention)

    def plus(self, other: TokenFlops) -> TokenFlops:
        """The operations of both."""
        return TokenFlops(self.products + other.products, self.attention + other.attention)


def token_flops(model: nn.Module) -> TokenFlops:
    """Operations of the forward and the backward pass: 6 N + 6 heads (d + e) T for each layer with
    attention (PaLM, appendix B, which has h for heads times head size); none for a model without a
    config.

    N is the number of parameters without input embeddings, with only the experts that a token uses;
    a frozen one counts 4 in place of 6. d and e are the sizes of a head's keys and values, T is the
    length of the token's document, at most the window.
    """
    config, unused = text_config(model), set(parts_without_text(model))
    if not getattr(config, "num_hidden_layers", 0) or not getattr(config, "hidden_size", 0):
        return TokenFlops()
    tied = getattr(config, "tie_word_embeddings", False)
    embedding = None if tied else getattr(embeddings(model)[0], "weight", None)
    products = sum(
        (6.0 if parameter.requires_grad else 4.0) * used
        for name, parameter, used in _used_parameters(model, config)
        if parameter is not embedding and name not in unused
    )
    layers = Counter(_attention_layers(config))
    return TokenFlops(
        products, tuple((6.0 * count * size, window) for (size, window), count in layers.items())
    )


def recomputed_flops(model: nn.Module, blocks: Collection[nn.Module]) -> TokenFlops:
    """Operations of another forward pass of these blocks: a third of those in `token_flops` of
    attention, in all layers alike, and 2 N."""
    config = text_config(model)
    used = sum(used for block in blocks for _, _, used in _used_parameters(block, config))
    layers = getattr(config, "num_hidden_layers", 0) or 1
    whole = TokenFlops(0.0, token_flops(model).attention).times(len(blocks) / layers / 3)
    return whole.plus(TokenFlops(2.0 * used))


def _attention_layers(config: Any) -> Iterator[tuple[float, float]]:
    """For each layer with attention: the sizes of its keys and values of all heads, added, and its
    window (infinity: none). A recurrent layer has parameters only."""
    layers = layer_configs(config)
    names = ("layer_types", "layers_block_type")
    types = next((found for name in names if (found := getattr(config, name, None))), None)
    slides = getattr(config, "use_sliding_window", True)
    if types is None:
        windows = slides and largest_of_layers(config, "sliding_window")
        types = ["sliding_attention" if windows else "attention"] * config.num_hidden_layers
    if len(layers) == 1:
        layers = layers * len(types)
    for kind, layer in zip(types, layers, strict=True):
        if kind in _WITHOUT_ATTENTION:
            continue
        heads = getattr(layer, "num_attention_heads", None) or 1
        head = getattr(layer, "head_dim", None) or layer.hidden_size / heads
        if kind == "full_attention":  # Gemma 4 in transformers 5.17
            head = getattr(layer, "global_head_dim", None) or head
        keys = values = heads * head
        if rotated := getattr(layer, "qk_rope_head_dim", None):  # multi-head latent attention
            keys = heads * (getattr(layer, "qk_nope_head_dim", 0) + rotated)
            values = heads * (getattr(layer, "v_head_dim", None) or head)
        limit = _WINDOWS.get(kind, "")
        window = getattr(layer, limit, None) if slides or limit != "sliding_window" else None
        yield keys + values, float(window or math.inf)


_WINDOWS = {
    "sliding_attention": "sliding_window",
    "hybrid_sliding": "sliding_window",
    "chunked_attention": "attention_chunk_size",
    "indexed_attention": "index_topk",
}
"""By type of layer: the key of a config with the number of tokens that a token attends to."""
_WITHOUT_ATTENTION = ("linear_attention", "mamba", "conv", "moe", "mlp", "sparse", "dense")
"""Types of layers whose operations do not depend on the length of a document."""


def _used_parameters(
    module: nn.Module, config: object
) -> Iterator[tuple[str, nn.Parameter, float]]:
    """Each parameter by name, and how many of its elements a token uses: some of the experts."""
    counts = ("num_experts", "num_local_experts", "n_routed_experts")
    experts = next((n for name in counts if (n := largest_of_layers(config, name))), 1)
    share = (experts_of_token(config) or experts) / experts
    for name, parameter in module.named_parameters():
        yield name, parameter, shape_of(parameter).numel() * (share if ".experts." in name else 1.0)
