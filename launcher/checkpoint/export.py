"""`launcher export`: writes a Hugging Face folder from a checkpoint or from RUN_DIR/hf, tensor by
tensor in one process. The strategy of the run does not matter."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from launcher.checkpoint.files import STATE
from launcher.checkpoint.reader import open_tensors, read_state
from launcher.checkpoint.state import AVERAGE
from launcher.data.run_data import (
    TrainedPrompts,
    recorded_prompts,
    set_stop_tokens,
    tokenizer_to_keep,
)
from launcher.data.tokenizer import new_token_ids, tokenizer_name
from launcher.errors import RecipeError
from launcher.files import replace_folder
from launcher.models.adapted import (
    Read,
    adapted_ties,
    adapted_weights,
    adapter_in_file,
    ids_of_adapter,
    merged_reader,
)
from launcher.models.build import checkpoint_folder, is_pretrained
from launcher.models.changes import adapt, build_with_tokens
from launcher.models.config_files import set_dtype
from launcher.models.description import describe, is_class_without_head
from launcher.models.hugging_face_files import (
    LABELS,
    PROCESSOR,
    WRITTEN,
    named_weights,
    write_files,
    write_weights,
)
from launcher.models.initialization import initialize, materialize
from launcher.models.load import ModelCheckpoint, open_checkpoint
from launcher.models.names import clean_name
from launcher.models.nf4 import round_trip
from launcher.models.nf4_layers import packable
from launcher.models.precision import kept_in_float32
from launcher.models.quantization_aware import header_of, use_qat, with_dtype
from launcher.models.safetensors_files import (
    ADAPTER,
    ADAPTER_CONFIG,
    INDEX,
    StoredTensors,
    open_files,
    open_folder,
    refuse_absent,
    write_tensors,
)
from launcher.models.ties import untie
from launcher.models.towers import use_towers
from launcher.recipe.functions import refuse_code
from launcher.recipe.load import recorded_recipe
from launcher.recipe.schema import Model, Recipe
from launcher.reliability.json_files import Json
from launcher.sources.hub import NAMED_TEMPLATES, model_folder, refuse_links
from launcher.sources.sentence_transformers import NORMALIZE, POOLING, SCORE

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def export_checkpoint(
    checkpoint: Path,
    out: Path,
    *,
    dtype: str | None,
    merged: bool,
    base: str | None,
    ema: bool,
    trust_run: bool,
    files: Callable[[Recipe, PreTrainedModel], Mapping[str, object]] = lambda recipe, model: {},
) -> bool:
    """Writes `out` from a checkpoint, atomically, with `files` (`write_files`). Returns whether it is an
    adapter.

    Without a dtype, the weights have the dtype that the run would export. merged: merges an adapter
    into its base model. base, ema, trust_run: see `open_checkpoint_weights`. Raises RecipeError if
    weights are missing, DamagedCheckpointError if they cannot be read.
    """
    recipe = recipe_of(checkpoint)
    if recipe.model.builder is not None:
        raise RecipeError(
            f"export: {recipe.model.builder} is not a transformers model: load its weights from "
            f"{checkpoint} yourself"
        )
    if merged and recipe.lora is None:
        raise RecipeError("command line: --merged: the run has no adapter to merge")
    if recipe.lora is not None and recipe.model.path and recipe.model.config and not merged:
        raise RecipeError(
            "export: the run trained with changes to the model's config (model.config), which an "
            "adapter does not hold; add --merged"
        )
    if recipe.lora is not None and recipe.lora.init != "default" and not merged:
        raise RecipeError(
            f"export: the adapter belongs to frozen weights without its first values (lora.init: "
            f"{recipe.lora.init}), and not to those of the model; add --merged"
        )
    if recipe.lora is not None and recipe.model.mtp is not None and not merged:
        raise RecipeError(
            "export: the run trained layers of multi-token prediction beside the adapter (model.mtp), "
            "which an adapter does not hold; add --merged"
        )
    stored = open_checkpoint_weights(checkpoint, base=base, ema=ema, trust_run=trust_run)
    adapter = recipe.lora is not None and not merged
    prompts = prompts_of(checkpoint, recipe)
    set_stop_tokens(stored.model, prompts.ends, tokenizer_name(recipe.data, recipe.model))
    wanted = _dtype(dtype or recipe.checkpoint.export_dtype)
    chosen = wanted or (torch.float32 if adapter else stored.dtype)
    with replace_folder(out, written=WRITTEN) as scratch:
        write_weights(
            stored.model,
            scratch,
            stored.read,
            dtype=chosen,
            merged=merged,
            source=stored.source,
        )
        tokenizer = tokenizer_to_keep(recipe.data, recipe.model, recipe.attachments, prompts)
        if tokenizer is not None:
            tokenizer.save(scratch)
        write_files(scratch, files(recipe, stored.model))
    return adapter


def _dtype(name: str | None) -> torch.dtype | None:
    return None if name is None else getattr(torch, name)


@dataclass(frozen=True)
class StoredModel:
    """A model on the meta device, and where its weights are."""

    model: PreTrainedModel
    read: Read
    dtype: torch.dtype
    """Dtype of the weights that the run started from; float32 if it started from none."""
    source: ModelCheckpoint | None
    """The checkpoint that the weights came from; None if they were random."""

    @torch.no_grad()
    def load(
        self, device: torch.device | None = None, *, dtype: torch.dtype = torch.float32
    ) -> nn.Module:
        """The model for inference, with parameters of this dtype."""
        device = device or torch.device("cpu")
        for parameter in self.model.parameters():
            parameter.data = parameter.data.to(dtype)
        materialize(self.model, parameters=device, buffers=device)
        tensors = named_weights(self.model)
        initialize(self.model, seed=0, loaded=tensors)  # computes the buffers that are not stored
        for name, tensor in tensors.items():
            tensor.copy_(self.read(name))
        return self.model.eval()  # type: ignore[no-any-return]


def recipe_of(checkpoint: Path) -> Recipe:
    """The recipe that a checkpoint was written with."""
    return recorded_recipe(str(read_state(checkpoint).get("recipe")), file=checkpoint / STATE)


def prompts_of(checkpoint: Path, recipe: Recipe) -> TrainedPrompts:
    """How the run of a checkpoint trained prompts. Raises RecipeError if that is not known."""
    try:
        return recorded_prompts(read_state(checkpoint).get("prompts"), recipe.data, recipe.model)
    except RecipeError as error:
        raise RecipeError(f"{checkpoint}: {error}") from None


def open_checkpoint_weights(
    checkpoint: Path, *, base: str | None = "original", ema: bool = False, trust_run: bool
) -> StoredModel:
    """The recipe's model, with its adapters, and the weights of a checkpoint of the run.

    base: a value of checkpoint.export_base; None: the run's own value. ema: whether the averages of
    the trained weights take their place. trust_run: whether code that the recipe names may be run.
    Raises RecipeError if it may not.
    """
    recipe, state = recipe_of(checkpoint), read_state(checkpoint)
    refuse_code(recipe, checkpoint / STATE, trust_run=trust_run)
    ema = ema or recipe.optimizer.schedule_free
    if ema and not recipe.optimizer.averages:
        raise RecipeError(f"export: weights: ema: the run of {checkpoint} has no optimizer.ema")
    new_ids = new_token_ids(tokenizer_name(recipe.data, recipe.model))
    model = build_with_tokens(
        recipe.model,
        sequence_length=1,
        labels=recipe.data.labels,
        new_ids=new_ids,
    )
    if recipe.model.qat is not None:  # as in training
        precision = recipe.strategy.mixed_precision
        computed = getattr(torch, "float32" if precision is None else precision.param_dtype)
        use_qat(model, describe(model).blocks, recipe.model.qat, dtype=computed)
    read_frozen: Read | None = None
    dtype, source = torch.float32, None
    if is_pretrained(recipe.model):
        folder = checkpoint_folder(recipe.model)
        assert folder is not None
        source = open_checkpoint(folder, model, new_ids=new_ids)
        if state.get("weights") not in (None, source.stored.digest()):
            raise RecipeError(
                f"export: the weights in {folder} have changed since the run, and {checkpoint} "
                "does not hold those that were frozen; restore them"
            )
        read_frozen, dtype = source.reader(), source.stored.dtype()
        if (base or recipe.checkpoint.export_base) == "quantized":
            read_frozen = _rounded(read_frozen, model, recipe, source)
    if recipe.attachments:  # as in training: adapters may have a projector beside them
        use_towers(model, dict.fromkeys(recipe.attachments, "none"))
    if recipe.lora is not None:
        held = _held_dtype(model, recipe, source)
        adapt(
            model,
            recipe.lora,
            base_dtype=torch.float32,
            base=recipe.model.path,
            new_ids=new_ids,
        )
        if read_frozen is not None and recipe.lora.init != "default":
            read_frozen = _without_first_values(read_frozen, model, held)
    stored = open_tensors(checkpoint)

    def read(name: str) -> torch.Tensor:
        averages = (f"optimizer.{name}.{AVERAGE}",) if ema else ()
        for key in (*averages, f"model.{name}", f"buffer.{name}"):
            if key in stored.tensors:
                return stored.read(key)
        if read_frozen is None:
            raise RecipeError(
                f"export: {name} was frozen, so {checkpoint} does not hold it, and there is no "
                "model.path to take it from"
            )
        return read_frozen(name)

    return StoredModel(model, read, dtype, source)


def _held_dtype(
    model: PreTrainedModel, recipe: Recipe, source: ModelCheckpoint | None
) -> Callable[[str], torch.dtype]:
    """In which dtype the run held a frozen weight, by clean name."""
    precision = recipe.strategy.mixed_precision
    dtype = torch.float32 if precision is None else getattr(torch, precision.param_dtype)
    kept = kept_in_float32(model, dtype, source)
    return lambda name: torch.float32 if name in kept else dtype


def _without_first_values(
    read: Read, model: PreTrainedModel, held: Callable[[str], torch.dtype]
) -> Read:
    """Reads weights as the run froze them (lora.init)."""
    by_weight = {each.weight: each for each in adapted_weights(model) if each.changes_frozen}

    def frozen(name: str) -> torch.Tensor:
        weight = read(name)
        return by_weight[name].frozen(weight.to(held(name))) if name in by_weight else weight

    return frozen


def _rounded(read: Read, model: nn.Module, recipe: Recipe, source: ModelCheckpoint) -> Read:
    """Reads weights with the rounding that a run with lora.quantize trained with."""
    if recipe.lora is None or recipe.lora.quantize is None:
        raise RecipeError("export: base: quantized: the run has no lora.quantize")
    packed = packable(describe(model).blocks, kept_in_float32(model, torch.bfloat16, source))
    weights = {id(module.get_parameter(name)) for module, name in packed}
    names = {clean_name(name) for name, p in model.named_parameters() if id(p) in weights}

    def rounded(name: str) -> torch.Tensor:
        return round_trip(read(name)) if name in names else read(name)

    return rounded


def export_folder(source: Path, out: Path, *, dtype: str | None, merged: bool) -> None:
    """Writes `out`, atomically, from the model or adapter in a folder such as RUN_DIR/hf. Without a
    dtype the weights keep theirs, and a merged adapter has the base model's. Raises RecipeError if
    the weights cannot be read or do not fit the base model."""
    from transformers import GenerationConfig

    wanted, adapter = _dtype(dtype), (source / ADAPTER_CONFIG).is_file()
    refuse_links(source, key="export")
    _read_object(source / (ADAPTER_CONFIG if adapter else "config.json"))
    with replace_folder(out, written=WRITTEN) as scratch:
        if adapter and merged:
            stored = open_exported_weights(source)
            if (source / "generation_config.json").is_file():  # with the ends of training
                stored.model.generation_config = GenerationConfig.from_pretrained(source)
            write_weights(
                stored.model,
                scratch,
                stored.read,
                dtype=wanted or stored.dtype,
                merged=True,
                source=stored.source,
            )
        else:
            _cast(source, scratch, wanted, adapter=adapter)
        replaced = {INDEX, ADAPTER_CONFIG, LABELS} if merged else {INDEX}
        for file in source.iterdir():  # tokenizer, chat template, the model's own code
            copied = file.is_file() and file.suffix != ".safetensors" and file.name not in replaced
            # An adapter's processor has the limit of pixels that it was trained with
            own = any(file.match(pattern) for pattern in PROCESSOR)
            if copied and (own or not (scratch / file.name).exists()):
                shutil.copy2(file, scratch / file.name)
        for name in (NAMED_TEMPLATES, POOLING, NORMALIZE, SCORE):
            if (source / name).is_dir():
                shutil.copytree(source / name, scratch / name)


def _cast(source: Path, scratch: Path, dtype: torch.dtype | None, *, adapter: bool) -> None:
    stored = _open_adapter(source) if adapter else open_folder(source, key="export")
    refuse_absent(stored, source, key="export")
    most = stored.dtype()
    written = (
        (name, stored.read(name), dtype if dtype and tensor.dtype == most else tensor.dtype)
        for name, tensor in stored.tensors.items()
    )
    header = {} if adapter else header_of(source)
    if dtype is not None:
        header = with_dtype(header, dtype)
    write_tensors(scratch, written, adapter=adapter, header=header)
    if not adapter and dtype is not None:
        config = _read_object(source / "config.json")
        set_dtype(config, dtype)
        (scratch / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def _read_object(file: Path) -> Json:
    if file.exists() and not file.is_file():  # a pipe would block
        raise RecipeError(f"export: {file} is not a regular file")
    try:
        value = json.loads(file.read_bytes())
    except OSError as error:
        raise RecipeError(f"export: {file} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise RecipeError(f"export: {file} is damaged: {error}") from None
    if not isinstance(value, dict):
        raise RecipeError(f"export: {file} is damaged: it must hold an object")
    return value


def _open_adapter(source: Path) -> StoredTensors:
    if not (source / ADAPTER).is_file():
        raise RecipeError(f"export: {source} has an {ADAPTER_CONFIG} and no {ADAPTER}")
    return open_files([source / ADAPTER], key="export")


_CLASSES = {"SEQ_CLS": "SequenceClassification", "FEATURE_EXTRACTION": "FEATURE_EXTRACTION"}
"""By peft's name for the task of an adapter: what names the class of its model."""


def open_exported_weights(source: Path) -> StoredModel:
    """The model in an exported folder; an adapter is merged into its base model. Raises RecipeError
    if the weights cannot be read or do not fit the model."""
    if not (source / ADAPTER_CONFIG).is_file():
        config = _read_object(source / "config.json")
        (architecture,) = config.get("architectures") or [""]
        model, checkpoint = _open_model(str(source), str(architecture))
        return StoredModel(model, checkpoint.reader(), checkpoint.stored.dtype(), checkpoint)
    settings = _read_object(source / ADAPTER_CONFIG)
    labels = source / LABELS
    model, checkpoint = _open_model(
        base_of_adapter(source),
        _CLASSES.get(str(settings.get("task_type")), ""),
        labels=list(_read_object(labels).values()) if labels.is_file() else None,
        new_ids=ids_of_adapter(settings),
    )
    stored = _open_adapter(source)
    adapted, whole = adapter_in_file(model, settings, stored.tensors)
    read_original, aliases = checkpoint.reader(), adapted_ties(model, adapted)
    for name in aliases:
        untie(model, name)

    def read_base(name: str) -> torch.Tensor:
        if name in whole:
            return stored.read(whole[name])
        return read_original(aliases.get(name, name))

    read = merged_reader(adapted, read_base=read_base, read_adapter=stored.read)
    return StoredModel(model, read, checkpoint.stored.dtype(), checkpoint)


def base_of_adapter(source: Path) -> str:
    """The folder or hub id of the model of the adapter in a folder. Raises RecipeError."""
    settings = _read_object(source / ADAPTER_CONFIG)
    base = str(settings.get("base_model_name_or_path") or "")
    if not base:
        where = f"{source / ADAPTER_CONFIG} (base_model_name_or_path)"
        raise RecipeError(f"export: {where} does not name the adapter's model")
    if (revision := settings.get("revision")) and not Path(base).exists():
        return f"{base}@{revision}"
    return base


def _open_model(
    path: str,
    architecture: str,
    *,
    labels: list[str] | None = None,
    new_ids: range = range(0),
) -> tuple[Any, ModelCheckpoint]:
    task: Any = "masked_lm" if "MaskedLM" in architecture else "causal_lm"
    task = "sequence_classification" if "SequenceClassification" in architecture else task
    headless = architecture == "FEATURE_EXTRACTION" or is_class_without_head(architecture)
    task = "embedding" if headless else task
    section = Model(path=path, task=task)
    model = build_with_tokens(section, sequence_length=1, labels=labels, new_ids=new_ids)
    folder = model_folder(path, key="export")
    return model, open_checkpoint(folder, model, key="export", new_ids=new_ids)
