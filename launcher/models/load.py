"""Loads the weights of a Hugging Face checkpoint straight into each rank's shards.

`open_checkpoint` plans the conversions from the headers of the files and reports every mismatch.
After wrapping, each rank copies its rows of the mapped files. A tensor that is made of several is
made whole first, or just this rank's rows of it where that is possible.
"""

from __future__ import annotations

import fnmatch
import logging
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from launcher.console import task
from launcher.errors import RecipeError
from launcher.libraries.private import may_be_missing, may_be_unexpected
from launcher.models.adapted import adapted_weights
from launcher.models.build import checkpoint_folder, freeze, is_pretrained
from launcher.models.constructors import constructed_buffers
from launcher.models.dequantized import dequantized, without_quantization
from launcher.models.description import has_no_head, is_classifier, text_config
from launcher.models.initialization import initialize, materialize, random_weights
from launcher.models.multi_token import KEY as MULTI_TOKEN
from launcher.models.multi_token import LIST
from launcher.models.names import named_tensors
from launcher.models.new_rows import vocabulary_names
from launcher.models.record import record_of
from launcher.models.safetensors_files import StoredTensors, Tensors, open_folder, refuse_absent
from launcher.models.shards import copy_local_rows, local_rows
from launcher.models.tensor_names import Conversion, load_conversions
from launcher.models.ties import tied_names, untie
from launcher.recipe import schema

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)

_COMPUTED = (r"rotary_emb\.(inv|original_inv)_freq", r"(^|\.)position_ids$")
"""Buffers that the model computes, and that old checkpoints contain."""


@dataclass(frozen=True)
class ModelCheckpoint:
    """A checkpoint that fits a model."""

    folder: Path
    stored: StoredTensors
    conversions: list[Conversion]
    loaded: frozenset[str]
    """Names of the model's tensors that the checkpoint contains; of a tied one, all names."""
    copied: tuple[str, ...] = ()
    """Names of stored tensors that the model's class does not have, such as those of multi-token
    prediction or of a vision tower. Exports of the whole model copy them."""
    shared: Mapping[str, str] = field(default_factory=dict)
    """Names of stored tensors that are copies of a parameter of the model, whose clean name is the
    value. Exports have the values of the parameter in them."""

    @cached_property
    def odd_dtypes(self) -> dict[str, torch.dtype]:
        """By name: the dtypes of stored tensors that are not in the dtype of most, such as router
        biases in float32 beside weights in bfloat16."""
        most = self.stored.dtype()
        return {
            name: tensor.dtype
            for name, tensor in self.stored.tensors.items()
            if tensor.is_floating_point() and tensor.dtype != most
        }

    @cached_property
    def loaded_dtypes(self) -> dict[str, torch.dtype]:
        """The dtypes that the model's tensors have in the checkpoint, by the model's names."""
        made = (conversion.targets for conversion in self.conversions)
        return {name: tensor.dtype for targets in made for name, tensor in targets.items()}

    def read_copied(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The `copied` tensors, read one by one."""
        for name in self.copied:
            yield name, self.stored.read(name)

    def convert(self, conversion: Conversion) -> Tensors:
        """The results of a conversion, by the model's names."""
        return conversion.convert({name: self.stored.read(name) for name in conversion.names()})

    def reader(self) -> Callable[[str], torch.Tensor]:
        """Returns a function that reads a whole tensor of the model by name."""
        by_target = {name: each for each in self.conversions for name in each.targets}
        last: Tensors = {}  # results of the last conversion

        def read(name: str) -> torch.Tensor:
            nonlocal last
            if name not in last:
                last = self.convert(by_target[name])
            return last[name]

        return read


def open_checkpoint(
    folder: Path, model: PreTrainedModel, *, key: str = "model.path", new_ids: range = range(0)
) -> ModelCheckpoint:
    """Plans how a folder's weights become those of a meta model of transformers, not yet wrapped.
    The rows of the embeddings for the tokens of `new_ids` are the mean of those before them.

    Logs what is not loaded and what is initialized. Raises RecipeError with every tensor that is
    missing, unexpected or of another shape.
    """
    stored = open_folder(folder, key=key)
    refuse_absent(stored, folder, key=key, tied=tied_names(model))
    stored = dequantized(stored, folder, key=key)
    without_quantization(model.config)
    conversions, unexpected, problems = load_conversions(model, stored.tensors)
    state: dict[str, torch.Tensor] = model.state_dict()
    embedded = vocabulary_names(model) if new_ids else ()
    shapes = set[torch.Size]()  # of the embeddings, before they grow
    for each in conversions:
        if each.converter is None and each.first in embedded:
            (name,) = each.names()
            shapes.add(stored.tensors[name].shape)
            stored.extend(name, new_ids)
            each.targets = {each.first: stored.tensors[name]}
    made = {name: list(value.shape) for each in conversions for name, value in each.targets.items()}
    for name, shape in made.items():
        wanted = list(state[name].shape) if name in state else "not"
        if shape != wanted:
            what = f"is {shape} in the checkpoint, and {wanted} in the model"
            problems.append(f"{_stored_name(model, name)}: {what}")
    notes = _resolve_ties(model, conversions, stored)
    loaded = set(made)
    for tied in tied_names(model):
        if made.keys() & tied:
            loaded.update(tied)
    failed = {conversion.first for conversion in conversions if not conversion.targets}
    missing = state.keys() - loaded - failed
    _refuse_without_layers(model, folder, missing)
    problems += _missing(model, missing, notes)
    multi_token = record_of(model).multi_token
    copies = {} if multi_token is None else multi_token.shared
    copies = {name: own for name, own in copies.items() if name in stored.tensors}
    problems += _differing(copies, conversions, stored)
    others, copied = _unexpected(model, [n for n in unexpected if n not in copies], notes)
    problems += others
    # Layers that predict further tokens have embeddings of their own (DeepSeek-V3). A server that
    # loads them expects as many rows as the model has tokens
    tables = [name for name in copied if stored.tensors[name].shape in shapes]
    for name in tables:
        stored.extend(name, new_ids)
    if tables:
        notes.append(f"rows of new tokens are the mean of the others: {_listing(tables)}")
    if problems:
        title = f"{key}: {folder} does not fit a {type(model).__name__} with its config:"
        raise RecipeError([title, *sorted(problems)])
    for note in notes:
        logger.info(f"note: {note}")
    return ModelCheckpoint(folder, stored, conversions, frozenset(loaded), tuple(copied), copies)


Load = Callable[[nn.Module, torch.device, torch.device], None]
"""Gives a wrapped meta model its weights: load(model, device of parameters, device of buffers)."""


def starting_weights(
    section: schema.Model, model: nn.Module, *, seed: int, new_ids: range = range(0)
) -> tuple[Load, torch.dtype, ModelCheckpoint | None]:
    """The function that gives the model its weights once it is wrapped, their dtype on disk, and
    the checkpoint that they come from. new_ids: see `open_checkpoint`, whose errors it raises."""
    folder = checkpoint_folder(section)
    load: Load
    checkpoint = None
    if folder is None or not is_pretrained(section):
        if folder is not None:
            without_quantization(model.config)
        constructed = None
        if section.builder is not None:
            constructed = partial(constructed_buffers, section, seed=seed)
        draws = record_of(model).draws
        load = partial(random_weights, seed=seed, constructed=constructed, draws=draws)
        dtype = torch.float32
    else:
        checkpoint = open_checkpoint(folder, model, new_ids=new_ids)
        load = partial(pretrained_weights, checkpoint=checkpoint, seed=seed)
        dtype = checkpoint.stored.dtype()
        if section.freeze:  # again: the checkpoint may have untied parameters
            model.requires_grad_(True)
            freeze(model, section.freeze)
    for tied in tied_names(model) if section.freeze else ():
        named = {name for pattern in section.freeze or () for name in fnmatch.filter(tied, pattern)}
        if others := [name for name in tied if named and name not in named]:
            logger.info(
                f"note: model.freeze: {', '.join(others)} is frozen, too: the model ties it to "
                f"{', '.join(name for name in tied if name in named)}"
            )
    return load, dtype, checkpoint


def _resolve_ties(
    model: nn.Module, conversions: list[Conversion], stored: StoredTensors
) -> list[str]:
    """Drops the second of two stored tied tensors if both are equal, else unties them. Returns
    notes."""
    notes = []
    single = {each.first: each for each in conversions if each.converter is None}
    for tied in tied_names(model):
        first, *others = [name for name in tied if name in single] or [""]
        for name in others:
            weight, other = (stored.read(single[key].names()[0]) for key in (first, name))
            if weight.dtype == other.dtype and torch.equal(weight, other):
                conversions.remove(single[name])
                continue
            untie(model, name)
            notes.append(f"{name} and {first} differ in the checkpoint: they are not tied")
    return notes


def _refuse_without_layers(model: PreTrainedModel, folder: Path, missing: Collection[str]) -> None:
    """Raises RecipeError if a checkpoint has none of the model's layers of multi-token prediction."""
    multi_token = record_of(model).multi_token
    layers = [name for name in model.state_dict() if name.startswith(f"{LIST}.")]
    if multi_token is not None and all(name in missing for name in layers):
        names = _listing([multi_token.stored_name(name) for name in layers])
        what = f"the checkpoint {folder} has no layers of multi-token prediction"
        raise RecipeError(f"{MULTI_TOKEN}: {what}: it lacks {names}; set it to null")


def _differing(
    copies: Mapping[str, str], conversions: list[Conversion], stored: StoredTensors
) -> list[str]:
    """Problems with copies of the embeddings that are not equal to them."""
    names = {each.first: each.names()[0] for each in conversions if each.converter is None}
    problems = []
    for name, own in copies.items():
        copied, weight = stored.read(name), stored.read(names[own])
        if not torch.equal(copied, weight[: len(copied)]):
            what = f"is not equal to {names[own]}, in whose place {MULTI_TOKEN} would train it"
            problems.append(f"{name}: {what}; set {MULTI_TOKEN}=null")
    return problems


def _missing(model: PreTrainedModel, missing: Iterable[str], notes: list[str]) -> list[str]:
    """Returns problems; a classifier's new head may be missing and becomes a note."""
    base, problems, heads = f"{model.base_model_prefix}.", [], []
    for name in sorted(missing):
        pools = ".pooler." in name or name.startswith("pooler.")
        outside = is_classifier(model) and not name.startswith(base)
        if outside or (pools and (is_classifier(model) or has_no_head(model))):
            heads.append(name)
        elif not _matches(name, may_be_missing(model)):
            problems.append(f"{_stored_name(model, name)}: missing in the checkpoint")
    if heads:
        notes.append(f"not in the checkpoint, initialized: {_listing(heads)}")
    return problems


def _stored_name(model: PreTrainedModel, name: str) -> str:
    """The name of a model's tensor in checkpoints, where the launcher has another name for it."""
    multi_token = record_of(model).multi_token
    return name if multi_token is None else multi_token.stored_name(name)


def _unexpected(
    model: PreTrainedModel, names: list[str], notes: list[str]
) -> tuple[list[str], list[str]]:
    """Returns problems, and the names of tensors that exports copy. These, and heads of other
    tasks, which may be there, become notes."""
    prefix = model.base_model_prefix
    base = getattr(model, prefix, None) if prefix else None
    buffers = {name for name, _ in model.named_buffers()}
    problems, heads, untrained = list[str](), list[str](), list[str]()
    for name in names:
        if _matches(name, _COMPUTED) or {name, f"{prefix}.{name}"} & buffers:
            continue
        if _matches(name, may_be_unexpected(model)) or _predicts_more_tokens(model, name):
            untrained.append(name)
            continue
        child = name.split(".")[0]
        pools = "pooler." in name and getattr(base, "pooler", None) is None
        belongs = base is None or child == prefix or hasattr(base, child)
        if has_no_head(model):
            belongs = child == prefix or hasattr(model, child)
        if not pools and belongs:
            problems.append(f"{name}: in the checkpoint, but not in the model")
        else:
            heads.append(name)
    if heads:
        notes.append(f"in the checkpoint, but not in this model, skipped: {_listing(heads)}")
    if untrained:
        exported = "exports copy them unchanged"
        if is_classifier(model):
            exported = "exports of a classifier leave them out"
        listing = _listing(_parts(untrained))
        notes.append(
            f"in the checkpoint, but not in this model, not trained: {listing}; {exported}"
        )
    return problems, [] if is_classifier(model) else untrained


def _predicts_more_tokens(model: PreTrainedModel, name: str) -> bool:
    """Whether a tensor belongs to a layer after the last one, which predicts further tokens
    (num_nextn_predict_layers of DeepSeek-V3 and its relatives)."""
    config = text_config(model)
    more = getattr(config, "num_nextn_predict_layers", None) or 0
    layer = re.search(r"(?:^|\.)layers\.(\d+)\.", name)
    return layer is not None and 0 <= int(layer[1]) - config.num_hidden_layers < more


def _parts(names: list[str]) -> list[str]:
    """The modules that these tensors belong to: `mtp.fc`, `model.layers.61`, `visual.blocks.*`."""
    numbers: dict[str, set[str]] = {}
    for name in names:
        numbered = re.match(r"(.+?)\.(\d+)(?:\.|$)", name)
        module, number = numbered.groups() if numbered else (".".join(name.split(".")[:2]), "")
        numbers.setdefault(module, set()).add(number)
    return [
        f"{module}.*" if len(found) > 1 else f"{module}.{min(found)}".rstrip(".")
        for module, found in numbers.items()
    ]


def _matches(name: str, patterns: Iterable[str] | None) -> bool:
    return any(re.search(pattern, name) for pattern in patterns or ())


def _listing(names: list[str]) -> str:
    return ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")


@torch.no_grad()
def pretrained_weights(
    model: nn.Module,
    parameters: torch.device,
    buffers: torch.device,
    *,
    checkpoint: ModelCheckpoint,
    seed: int,
) -> None:
    """Loads a checkpoint into a wrapped meta model: parameters on one device, buffers on the other.
    What it lacks (computed buffers, adapters, a new head) is initialized."""
    materialize(model, parameters=parameters, buffers=buffers)
    initialize(model, seed=seed, loaded=checkpoint.loaded)
    tensors = {name: tensor.detach() for name, tensor in named_tensors(model).items()}
    adapted = {each.weight: each for each in adapted_weights(model)}
    with task("loading weights", len(checkpoint.conversions)) as advance:
        for conversion in checkpoint.conversions:
            if conversion.first not in tensors and record_of(model).stages is not None:
                pass  # another stage of the pipeline has it
            elif conversion.converter is None:
                (name,) = conversion.names()
                checkpoint.stored.copy_rows(name, tensors[conversion.first])
                if conversion.first in adapted:
                    adapted[conversion.first].start(checkpoint.stored, name)
            else:
                _convert_rows(conversion, checkpoint, tensors)
            advance(1)
    checkpoint.stored.close()


def _convert_rows(conversion: Conversion, checkpoint: ModelCheckpoint, tensors: Tensors) -> None:
    begin = 0
    if conversion.stacks_rows():
        local, begin = local_rows(tensors[conversion.first])
        conversion = conversion.some_rows(begin, begin + len(local))
    if conversion.names():
        for name, made in checkpoint.convert(conversion).items():
            copy_local_rows(tensors[name], made, begin)
