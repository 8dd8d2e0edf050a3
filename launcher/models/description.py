"""What a model consists of: its text model, blocks, embeddings, and the parts that text does not use."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from launcher.distributed.units import Unit
from launcher.libraries import families
from launcher.libraries.private import block_classes
from launcher.models.names import clean_name
from launcher.models.record import record_of

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


Config = Any
"""A config of transformers, of which attributes are read by name: they differ from family to family."""


def has_other_inputs(config: PreTrainedConfig) -> bool:
    """Whether models of this config are models of images and text for transformers, with a text
    model that has a config of its own. They are built whole, and their text model is trained."""
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES as IMAGE_TEXT,
    )

    return config.model_type in IMAGE_TEXT and config.get_text_config(decoder=True) is not config


def text_config(model: nn.Module) -> Config:
    """The config of the model, or of its text model if it has several; None if it has none."""
    config = getattr(model, "config", None)
    read = getattr(config, "get_text_config", None)
    return config if read is None else read(decoder=True)


def layer_configs(config: Config) -> list[Config]:
    """The config of each layer, if they differ (the heads of Gemma 4); else the config alone.
    transformers raises when a value that differs between layers is read from such a config."""
    if getattr(config, "is_heterogeneous", False):
        return list(config.per_layer_config)
    return [config]


def largest_of_layers(config: Config, name: str) -> int:
    """A number of the config, the largest of all layers if they differ; 0 if there is none."""
    found = (getattr(layer, name, None) for layer in layer_configs(config))
    return max((value for value in found if isinstance(value, int)), default=0)


def experts_of_token(config: Config) -> int:
    """The number of experts that a token is sent to; 0 if the config has none."""
    return max(largest_of_layers(config, name) for name in families.EXPERTS_PER_TOKEN)


@dataclass(frozen=True)
class ModelDescription:
    """The parts of a model, by their names and modules on the meta device. They stay the same while
    adapters, checkpointing and the strategy change what is inside of them."""

    text: Config
    """The config of the text model; None: the model has no config."""
    blocks: dict[str, nn.Module]
    """The repeated blocks by name: the outermost modules of the classes in `_no_split_modules`, but
    not those of a vision tower, nor an input embedding (BERT's)."""
    depth: int
    """Number of blocks, also if a trace has deleted some of them."""
    towers: tuple[str, ...]
    """Names of the outermost modules, but for lists, whose parameters text does not use."""
    without_text: frozenset[str]
    """Clean names of the parameters that text does not use, such as those of a vision tower and of
    layers that attend to images."""
    vocabulary: int | None
    """Rows of the input embedding; valid ids are smaller. None: there is no such embedding."""
    classes: int | None
    """The number of classes in the config; None: it has none."""

    @property
    def kinds(self) -> list[str]:
        """The kinds of the blocks in the config (`families.LAYER_KINDS`); empty if it lists none."""
        return list(getattr(self.text, "layer_types", None) or ())


def describe(model: nn.Module) -> ModelDescription:
    """The description of a model. It is made at the first call, before adapters are added, and is part
    of the model's record (`record_of`)."""
    record = record_of(model)
    if record.description is None:
        record.description = _describe(model)
    return record.description


def _describe(model: nn.Module) -> ModelDescription:
    unused = frozenset(_parameters_without_text(model))
    towers = _outermost(model, unused)
    blocks = _blocks(model, towers)
    weight = getattr(embeddings(model)[0], "weight", None)
    count = getattr(getattr(model, "config", None), "num_labels", None)
    return ModelDescription(
        text=text_config(model),
        blocks=blocks,
        depth=len(blocks),
        towers=tuple(towers),
        without_text=frozenset(map(clean_name, unused)),
        vocabulary=None if weight is None else int(weight.shape[0]),
        classes=count if isinstance(count, int) else None,
    )


def _parameters_without_text(model: nn.Module) -> list[str]:
    text = text_config(model)
    if text is None or text is getattr(model, "config", None):
        return []
    decoder: Any = model.get_decoder()  # type: ignore[operator]
    used_modules = [decoder, *embeddings(model)]
    if is_classifier(model):
        base = model.base_model_prefix
        used_modules += [child for name, child in model.named_children() if name != base]
    used = {id(p) for module in used_modules if module is not None for p in module.parameters()}
    for index in getattr(text, "cross_attention_layers", None) or ():  # to images (Mllama)
        used -= {id(p) for p in decoder.layers[index].parameters()}
    return [name for name, parameter in model.named_parameters() if id(parameter) not in used]


def _outermost(model: nn.Module, unused: frozenset[str]) -> dict[str, nn.Module]:
    """The outermost modules, but for lists, all of whose parameters are among these."""
    found = dict[str, nn.Module]()
    for name, module in model.named_modules() if unused else ():
        own = {f"{name}.{inner}" for inner, _ in module.named_parameters()}
        inside = any(name.startswith(f"{outer}.") for outer in found)
        if own and own <= unused and not inside and not isinstance(module, nn.ModuleList):
            found[name] = module
    return found


def _blocks(model: nn.Module, towers: dict[str, nn.Module]) -> dict[str, nn.Module]:
    embedding = getattr(embeddings(model)[0], "weight", None)
    names = block_classes(model)
    outside = {inner for module in towers.values() for inner in module.modules()}
    blocks: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        inside = module in outside or any(name.startswith(outer + ".") for outer in blocks)
        own = list(module.parameters()) if type(module).__name__ in names and not inside else []
        if own and all(parameter is not embedding for parameter in own):
            blocks[name] = module
    return blocks


def parts_without_text(model: nn.Module) -> list[str]:
    """Names of the parameters that text does not use, as they are now: adapters and checkpointing
    change names."""
    description = describe(model)
    inside = tuple(f"{tower}." for tower in description.towers)
    return [
        name
        for name, _ in model.named_parameters()
        if (clean := clean_name(name)) in description.without_text or clean.startswith(inside)
    ]


def modules_without_text(model: nn.Module) -> tuple[nn.Module, ...]:
    """The modules that are named in `ModelDescription.towers`, as they are now."""
    return tuple(model.get_submodule(name) for name in describe(model).towers)


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


def outer_units(model: nn.Module, blocks: dict[str, nn.Module]) -> list[Unit]:
    """The units of FSDP outside of the blocks: the input embedding; then what is called after the blocks,
    the last norm, if it is found, and the output embedding. None if the embeddings share a weight, or
    if the model reads that of the first by itself."""
    first, last = embeddings(model)
    embeds = isinstance(first, nn.Embedding) and last is not None
    if not blocks or not embeds or first.weight is last.weight or reads_embedding(model):
        return []
    # The layers of multi-token prediction are called inside of the last one
    further = getattr(model, "mtp", ()) if record_of(model).multi_token is not None else ()
    units = (first, last, *blocks.values(), *modules_without_text(model), *further)
    inside = {child for unit in units for child in unit.modules()}
    order = list(model.modules())
    own = [m for m in order if m not in inside and list(m.parameters(recurse=False))]
    end = max(order.index(block) for block in blocks.values())
    norm = own if len(own) == 1 and order.index(own[0]) > end else []
    return [Unit((first,), used_in_backward=False), Unit((*norm, last), ends_forward=True)]


def is_classifier(model: nn.Module) -> bool:
    """Whether the model is a sequence classifier of transformers."""
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES as CLASSIFIERS,
    )

    return type(model).__name__ in CLASSIFIERS.values()


def has_no_head(model: nn.Module) -> bool:
    """Whether the model is one of transformers that returns hidden states."""
    return is_class_without_head(type(model).__name__)


def is_class_without_head(name: str) -> bool:
    """Whether a class of transformers with this name makes hidden states."""
    from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

    found: Iterable[str | tuple[str, ...]] = MODEL_MAPPING_NAMES.values()
    return any(name == each or (not isinstance(each, str) and name in each) for each in found)


def padding_id(model: nn.Module) -> int:
    """The model's id for padding; 0 if it has none."""
    padding = getattr(getattr(model, "config", None), "pad_token_id", None)
    return padding if isinstance(padding, int) and padding >= 0 else 0
