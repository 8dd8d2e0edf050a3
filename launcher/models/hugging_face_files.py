"""Writes a model as a Hugging Face folder: safetensors, config, tokenizer; tensor by tensor."""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from launcher.console import task
from launcher.files import replace_folder
from launcher.libraries.private import (
    keep_generation_config,
    names_in_float32,
    names_not_saved,
)
from launcher.models.adapted import (
    Read,
    adapted_ties,
    adapted_weights,
    adapter_parameters,
    adapter_tensors,
    merged_reader,
    peft_config,
)
from launcher.models.config_files import write_config, write_generation_config
from launcher.models.names import clean_name
from launcher.models.nf4 import packed_names, parts_of_rows, shape_of, unpacked
from launcher.models.quantization_aware import (
    file_header,
    qat_layers,
    stored_form,
    write_qat_config,
)
from launcher.models.record import record_of, whole_model
from launcher.models.safetensors_files import ADAPTER_CONFIG, write_tensors
from launcher.models.tensor_names import export_conversions
from launcher.models.ties import config_untied
from launcher.sources.hub import CHAT_TEMPLATE, NAMED_TEMPLATES, copy_files
from launcher.sources.sentence_transformers import MODULES, NORMALIZE, POOLING, SCORE

if TYPE_CHECKING:
    from peft import LoraConfig
    from transformers import PreTrainedModel

    from launcher.models.load import ModelCheckpoint

logger = logging.getLogger(__name__)

_ALWAYS = (
    *("peft_type", "task_type", "base_model_name_or_path", "revision", "inference_mode"),
    *("r", "lora_alpha", "lora_dropout", "target_modules", "modules_to_save", "bias"),
    *("use_rslora", "use_dora", "fan_in_fan_out", "init_lora_weights"),
)
"""Keys of `adapter_config.json` that peft 0.13 and other readers know."""

LABELS = "labels.json"
"""File beside a classifier's adapter with the names of its classes."""
PROCESSOR = ("*processor_config.json", CHAT_TEMPLATE)
"""Files of the processor of a model of more than text."""
COMPANIONS = (*PROCESSOR, "LICENSE*", "NOTICE*", "USE_POLICY*")
"""Files of a checkpoint that an export copies: the processor's, and the license."""
WRITTEN = (
    "*.safetensors",
    "*.safetensors.index.json",
    "*config.json",
    "adapter_*",
    "*.model",
    "token*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*",
    "merges.txt",
    "chat_template*",
    NAMED_TEMPLATES,
    LABELS,
    "*.tiktoken",
    "tekken.json",
    MODULES,
    POOLING,
    NORMALIZE,
    SCORE,
)
"""Files that exports write. One that the next export does not write would change the model."""


class Tokenizer(Protocol):
    """What writes the files of a tokenizer."""

    def save(self, folder: Path) -> None:
        """Writes them into a folder that has the model's files."""


def export_hugging_face(
    module: nn.Module,
    folder: Path,
    *,
    rank: int,
    device: torch.device,
    sends: bool = False,
    dtype: torch.dtype = torch.float32,
    merged: bool = False,
    source: ModelCheckpoint | None = None,
    export_base: str = "original",
    tokenizer: Tokenizer | None = None,
    files: Mapping[str, object] | None = None,
) -> None:
    """Writes `folder` for `from_pretrained` of transformers, or of peft if the model has adapters.
    It is written as a scratch folder, and renamed when it is complete.

    Every rank must call it: the ranks all-gather one tensor at a time, and rank 0 writes it.
    sends: whether this rank passes what its stage of a pipeline has to rank 0.
    dtype, source: see `write_weights`. files: see `write_files`. `merged` writes the whole model, adapters added in.
    Frozen weights that the run holds with less precision than the source are read from it; those
    in NF4 only if `export_base` is original, and those that lora.init changed never.
    """
    whole, stages = whole_model(module), record_of(module).stages
    tensors, forms = named_weights(module), named_weights(whole)
    packed = {clean_name(name) for name in packed_names(whole)}
    read_source = None if source is None else source.reader()

    changed = {each.weight for each in adapted_weights(whole) if each.changes_frozen}

    def is_rounded(name: str, tensor: torch.Tensor) -> bool:
        if name in changed:
            return False
        if name in packed:
            return export_base == "original"
        stored = source.loaded_dtypes.get(name) if source is not None else None
        return stored is not None and tensor.dtype.itemsize < stored.itemsize

    def read(name: str) -> torch.Tensor:
        form = forms[name]
        shape = shape_of(form) if name in packed else form.shape
        if read_source is not None and is_rounded(name, form):
            return read_source(name) if rank == 0 else torch.zeros(()).expand(shape)
        if stages is None:
            return gathered(name)
        owner = stages.owner(name)
        found = gathered(name) if stages.links.rank == owner else None
        if owner != 0 and (sends or rank == 0):
            found = stages.pass_to_first(found, owner)
        return torch.zeros(()).expand(shape) if found is None else found

    def gathered(name: str) -> torch.Tensor:
        tensor = tensors[name]
        parts = parts_of_rows(tensor)
        if isinstance(tensor, DTensor):  # offloaded shards are all-gathered on the device
            tensor = tensor.to(device).full_tensor()  # type: ignore[attr-defined]
        tensor = tensor.cpu()
        return unpacked(tensor, torch.float32, parts) if name in packed else tensor

    if rank != 0:
        for _ in exported_tensors(whole, read, merged=merged, convert=False):
            pass  # its part in the all-gathers
        return
    with replace_folder(folder, written=WRITTEN) as scratch:
        write_weights(whole, scratch, read, dtype=dtype, merged=merged, source=source)
        if tokenizer is not None:
            tokenizer.save(scratch)
        write_files(scratch, files or {})


class Text(str):
    """A value that `write_files` writes as it is."""


def write_files(folder: Path, files: Mapping[str, object]) -> None:
    """Writes values as JSON to files of a folder, by their paths in it."""
    for name, value in files.items():
        file = folder / name
        file.parent.mkdir(exist_ok=True)
        text = value if isinstance(value, Text) else json.dumps(value, indent=2) + "\n"
        file.write_text(text, encoding="utf-8")


def write_weights(
    model: PreTrainedModel,
    folder: Path,
    read: Read,
    *,
    dtype: torch.dtype,
    merged: bool,
    source: ModelCheckpoint | None,
) -> None:
    """Writes a model or its adapters, with its config. The model may be on meta: only its names are
    used.

    source: the checkpoint that the model was loaded from. An export of the whole model also has
    those of its tensors that the model's class does not have, byte for byte.
    dtype: of the floating-point weights that the source has in the dtype of most. The others keep
    theirs. What transformers keeps in float32 is float32, unless the source has it in `dtype`.
    """
    if not hasattr(model, "config"):  # of model.builder
        weights = exported_tensors(model, read, merged=merged)
        write_tensors(folder, ((name, tensor, dtype) for name, tensor in weights))
        return
    folder_of_source = _source_folder(model, source)
    if (adapter := None if merged else peft_config(model)) is not None:
        tensors = ((name, t, dtype) for name, t in exported_tensors(model, read, merged=False))
        write_tensors(folder, tensors, adapter=True)
        _write_adapter_config(adapter, folder)
        write_generation_config(model, folder, source=folder_of_source)
        if adapter.task_type == "SEQ_CLS":
            (folder / LABELS).write_text(json.dumps(model.config.id2label, indent=2) + "\n")
        if folder_of_source is not None:
            copy_files(folder_of_source, PROCESSOR, folder)
        return
    in_float32 = names_in_float32(model, dtype)
    odd = {} if source is None else source.odd_dtypes
    stored = {} if source is None else source.stored.tensors
    copies: dict[str, list[str]] = {}
    for copied, name in source.shared.items() if source is not None else ():
        copies.setdefault(name, []).append(copied)

    def whole_model() -> Iterator[tuple[str, torch.Tensor, torch.dtype]]:
        for name, tensor in exported_tensors(model, read, merged=merged):
            exact = any(part in name for part in in_float32)
            exact = exact and (name not in stored or stored[name].dtype != dtype)
            kept = torch.float32 if exact else odd.get(name, dtype)
            yield name, tensor, kept
            for copied in copies.get(name, ()):
                yield copied, tensor, kept
        if source is not None:
            for name, tensor in source.read_copied():
                yield name, tensor, tensor.dtype

    write_tensors(folder, whole_model(), header=file_header(model, dtype))
    config = copy.deepcopy(model.config)
    if adapted_ties(model, adapted_weights(model)):
        config_untied(config)
    write_config(config, folder, source=folder_of_source, dtype=dtype)
    write_qat_config(model, folder / "config.json")
    write_generation_config(model, folder, source=folder_of_source)
    if folder_of_source is not None:
        code = ("*.py",) if hasattr(config, "auto_map") else ()
        copy_files(folder_of_source, (*COMPANIONS, *code), folder)


def _write_adapter_config(adapter: LoraConfig, folder: Path) -> None:
    """Writes `adapter_config.json` without the keys that peft has by default: older versions refuse
    those that they do not know."""
    default = type(adapter)().to_dict()
    adapter.save_pretrained(str(folder))
    file = folder / ADAPTER_CONFIG
    config = json.loads(file.read_bytes())
    kept = {
        key: value
        for key, value in config.items()
        if key in _ALWAYS or key not in default or value != default[key]
    }
    file.write_text(json.dumps(kept, indent=2, sort_keys=True) + "\n")


def _source_folder(model: PreTrainedModel, source: ModelCheckpoint | None) -> Path | None:
    """The folder that the model's config comes from, also if its weights are random."""
    if source is not None:
        return source.folder
    return Path(model.config.name_or_path) if model.config.name_or_path else None


def exported_tensors(
    model: PreTrainedModel, read: Read, *, merged: bool, convert: bool = True
) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of an exported model or of its adapters, by the names of the hub or of peft. They
    are read by clean name. Without `convert` they are only read, for a rank that does not write."""
    names = list(named_weights(model))
    if not hasattr(model, "config"):  # of model.builder: the names are its own
        yield from ((name, read(name)) for name in names)
        return
    if peft_config(model) is not None:
        stored, base = adapter_tensors(model), read

        def read_adapter(key: str) -> torch.Tensor:
            return stored[key].file_form(base(stored[key].name))

        if not merged:
            yield from ((key, read_adapter(key)) for key in stored)
            return
        adapted, own = adapted_weights(model), adapter_parameters(model)
        aliases = adapted_ties(model, adapted)
        names = [name for name in names if name not in own] + list(aliases)
        read = merged_reader(
            adapted,
            read_base=lambda name: base(aliases.get(name, name)),
            read_adapter=read_adapter,
        )
    ignored = names_not_saved(model)
    qat = {f"{name}.weight": layer for name, layer in qat_layers(model)}
    conversions = export_conversions(model, [name for name in names if name not in ignored])
    with task("converting weights", len(conversions)) as advance:
        for conversion in conversions:
            tensors = {name: read(name) for name in conversion.names()}
            for name, tensor in conversion.convert(tensors).items() if convert else ():
                if name in qat:
                    yield from stored_form(name, qat[name], tensor)[0].items()
                else:
                    yield name, tensor
            del tensors  # before the next ones are read
            advance(1)


def end_ids(model: nn.Module) -> list[int]:
    """The tokens at which the model stops: eos_token_id of its generation config, or config."""
    for config in (getattr(model, "generation_config", None), getattr(model, "config", None)):
        if (ends := getattr(config, "eos_token_id", None)) is not None:
            return list(ends) if isinstance(ends, list) else [ends]
    return []


def add_ends(
    model: PreTrainedModel, ends: Sequence[int], names: Callable[[list[int]], Sequence[str]]
) -> None:
    """Adds the ends of answers in the training data to the model's generation config: the model of
    the checkpoint may stop at another token. `names` gives the names of tokens, for the log."""
    known = end_ids(model)
    more = [end for end in ends if end not in known]
    if not more or getattr(model, "generation_config", None) is None or not model.can_generate():
        return
    model.generation_config.eos_token_id = [*known, *more] if known or more[1:] else more[0]
    keep_generation_config(model.generation_config)
    added = " and ".join(f"{name} ({end})" for name, end in zip(names(more), more, strict=True))
    after = f"the model also stops at {added}, which training teaches; before: {known or 'none'}"
    logger.info(f"generation_config.json, eos_token_id: {after}")


def named_weights(module: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers by clean name. A tied parameter has its first name only."""
    weights = {clean_name(name): weight.detach() for name, weight in module.named_parameters()}
    tied = {clean_name(name) for name, _ in module.named_parameters(remove_duplicate=False)}
    state = {clean_name(name): tensor for name, tensor in module.state_dict().items()}
    return weights | {name: tensor for name, tensor in state.items() if name not in tied}
