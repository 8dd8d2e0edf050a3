"""Low-rank adapters with peft: adds them to a meta model, names them as peft does, merges them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from launcher.errors import RecipeError
from launcher.models.build import find_blocks, is_classifier, parts_without_text
from launcher.models.initialization import clean_name
from launcher.recipe.schema import Lora

if TYPE_CHECKING:
    from peft import LoraConfig

logger = logging.getLogger(__name__)

_PREFIX = "base_model.model."
"""peft's prefix of each name."""

Read = Callable[[str], torch.Tensor]
"""Returns a whole tensor by name."""


def add_adapters(
    model: nn.Module, lora: Lora, *, base_dtype: torch.dtype, base: str | None = None
) -> None:
    """Adds a float32 adapter to each target layer of a meta model. Freezes everything else but a
    classifier's head, which has no pretrained weights, and stores it in `base_dtype`.

    `base` is the checkpoint that the adapters belong to, for peft. Raises RecipeError if
    target_modules names something other than a linear layer of the model.
    """
    from peft import LoraConfig, inject_adapter_in_model

    targets, head = _targets(model, lora), _head(model)
    if base is not None and Path(base).is_dir():
        base = str(Path(base).resolve())
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=int(lora.alpha) if lora.alpha == int(lora.alpha) else lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=targets,
        bias="none",
        task_type="SEQ_CLS" if head else "CAUSAL_LM",
        base_model_name_or_path=base,
        fan_in_fan_out=any(map(_is_transposed, _linear_layers(model, targets).values())),
    )
    try:
        inject_adapter_in_model(config, model, low_cpu_mem_usage=True)
    except ValueError as error:
        raise RecipeError(f"lora.target_modules: peft refuses it: {error}") from None
    config.modules_to_save = head or None  # not before injection: peft would copy the head
    experts = []
    for name, parameter in model.named_parameters():
        trained = _is_saved(name, head)
        parameter.requires_grad_(trained)
        if not trained and parameter.is_floating_point():
            parameter.data = parameter.data.to(base_dtype)
        if ".experts." in name and parameter.ndim == 3:
            experts.append(name)
    if experts:
        logger.info(
            f"note: experts are not linear layers and get no adapters: {len(experts)} tensors such "
            f"as {experts[0]}"
        )


def _is_saved(name: str, head: list[str]) -> bool:
    """Whether a parameter is trained and in an adapter's file."""
    return ".lora_A." in name or ".lora_B." in name or name.split(".")[0] in head


def _is_transposed(module: nn.Module) -> bool:
    from transformers.pytorch_utils import Conv1D

    return isinstance(module, Conv1D)


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or _is_transposed(module)


def _last_parts(names: Iterable[str]) -> list[str]:
    return sorted({name.rpartition(".")[2] for name in names})


def _linear_layers(model: nn.Module, targets: Iterable[str]) -> dict[str, nn.Module]:
    """The linear layers whose names end in a target, by name."""
    ends = tuple(f".{target}" for target in targets)
    return {
        name: module
        for name, module in model.named_modules()
        if _is_linear(module) and f".{name}".endswith(ends)
    }


def _targets(model: nn.Module, lora: Lora) -> list[str]:
    layers = [name for name, module in model.named_modules() if _is_linear(module)]
    available = ", ".join(_last_parts(layers))
    if lora.target_modules is not None:
        if problems := [
            f"lora.target_modules: {target} is not a linear layer of the model; available: "
            f"{available}"
            for target in lora.target_modules
            if not _linear_layers(model, [target])
        ]:
            raise RecipeError(problems)
        return list(lora.target_modules)
    blocks = tuple(f"{block}." for block in find_blocks(model))
    unused = tuple(parts_without_text(model))
    inside = [
        name
        for name in layers
        if name.startswith(blocks) and not any(other.startswith(f"{name}.") for other in unused)
    ]
    if not inside:
        raise RecipeError(
            f"lora.target_modules: missing; {type(model).__name__} has no linear layers in its "
            f"blocks to choose: name some of {available}"
        )
    short = _last_parts(inside)
    exist_outside = len(_linear_layers(model, short)) > len(inside)
    return inside if exist_outside else short


def _head(model: nn.Module) -> list[str]:
    """A classifier's modules outside its base model."""
    if not is_classifier(model):
        return []
    children = [(name, module) for name, module in model.named_children() if [*module.parameters()]]
    return [name for name, _ in children if name != model.base_model_prefix]


def peft_config(model: nn.Module) -> LoraConfig | None:
    """The configuration of a model's adapters; None if it has none."""
    config: LoraConfig | None = getattr(model, "peft_config", {}).get("default")
    return config


def adapter_names(model: nn.Module) -> dict[str, str]:
    """For each tensor in an adapter's file: peft's name and the model's own clean name."""
    config = peft_config(model)
    head = (config and config.modules_to_save) or []
    names = [clean_name(name) for name, _ in model.named_parameters()]
    return {
        _PREFIX + name.replace(".default.", "."): name for name in names if _is_saved(name, head)
    }


def adapted_weights(names: Iterable[str]) -> set[str]:
    """Clean names of the weights that an adapter changes or replaces, from the names of its tensors
    (peft's, or the model's own)."""
    return {
        name.removeprefix(_PREFIX).replace(".lora_A.", ".").replace(".lora_B.", ".")
        for name in names
    }


def merged_reader(
    model: nn.Module,
    config: Mapping[str, Any],
    names: Collection[str],
    *,
    read_base: Read,
    read_adapter: Read,
) -> Read:
    """Returns a function that reads the model's tensors by clean name, with the adapter merged in:
    W + alpha / rank * B A, in float32.

    `config` is peft's adapter_config.json, and `names` are peft's names of the adapter's tensors.
    Raises RecipeError if the adapter changes a tensor that the model does not have.
    """
    adapters = {name.removeprefix(_PREFIX): name for name in names}
    scale = config["lora_alpha"] / config["r"]
    transposed = {
        f"{clean_name(name)}.weight"
        for name, module in model.named_modules()
        if _is_transposed(module)
    }
    changed = adapted_weights(names)
    if unknown := changed - {clean_name(name) for name in model.state_dict()}:
        raise RecipeError(
            f"export: {config['base_model_name_or_path']} has no {', '.join(sorted(unknown))}, "
            "which the adapter changes"
        )

    def read(name: str) -> torch.Tensor:
        if name in adapters:  # such as a classifier's head
            return read_adapter(adapters[name])
        weight, layer = read_base(name), name.removesuffix(".weight")
        if name not in changed:
            return weight
        # A: (rank, in); B: (out, rank); weight: (out, in), or transposed
        down, up = (
            read_adapter(adapters[f"{layer}.{factor}.weight"]).float()
            for factor in ("lora_A", "lora_B")
        )
        change: torch.Tensor = (up @ down) * scale
        return weight.float() + (change.T if name in transposed else change)

    return read
