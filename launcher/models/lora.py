"""Low-rank adapters, through peft: put into a meta model, and written as peft reads them."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from launcher.errors import RecipeError
from launcher.models.build import find_blocks, is_classifier
from launcher.models.initialization import clean_name
from launcher.models.safetensors_files import ADAPTER_CONFIG
from launcher.recipe.schema import Lora

logger = logging.getLogger(__name__)

_PREFIX = "base_model.model."
"""peft's, before each name."""


def add_adapters(
    model: nn.Module,
    lora: Lora,
    *,
    base_dtype: torch.dtype,
    base: str | None = None,
) -> None:
    """Puts an adapter beside each target layer of a meta model, and freezes all else, which is then held in `base_dtype`.

    The head of a classifier is trained too, and kept with the adapters: it has no pretrained weights to adapt.
    base: the checkpoint that the adapters belong to, for peft. Adapters are float32; `initialize` draws them.
    Raises RecipeError where target_modules names what is no linear layer, with what there is.
    """
    from peft import LoraConfig, inject_adapter_in_model

    targets = _targets(model, lora)
    head = _head(model)
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=int(lora.alpha) if lora.alpha == int(lora.alpha) else lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=targets,
        bias="none",
        task_type="SEQ_CLS" if head else "CAUSAL_LM",
        base_model_name_or_path=str(Path(base).resolve()) if base is not None and Path(base).is_dir() else base,
        fan_in_fan_out=any(_is_transposed(model.get_submodule(name)) for name in _linear_layers(model, targets)),
    )
    try:
        inject_adapter_in_model(config, model, low_cpu_mem_usage=True)
    except ValueError as error:
        raise RecipeError(f"lora.target_modules: peft refuses it: {error}") from None
    for name, parameter in model.named_parameters():
        trained = ".lora_A." in name or ".lora_B." in name or name.split(".")[0] in head
        parameter.requires_grad_(trained)
        if not trained and parameter.is_floating_point():
            parameter.data = parameter.data.to(base_dtype)
    config.modules_to_save = head or None  # only now: injected with it, peft would put a copy beside the head
    if apart := [name for name, p in model.named_parameters() if ".experts." in name and p.ndim == 3]:
        logger.info(f"note: experts are no linear layers and get no adapters: {len(apart)} tensors such as {clean_name(apart[0])}")


def _is_transposed(module: nn.Module) -> bool:
    from transformers.pytorch_utils import Conv1D

    return isinstance(module, Conv1D)


def _linear_layers(model: nn.Module, targets: list[str] | None = None) -> list[str]:
    """Names of linear layers; those that end in one of the targets."""
    found = [name for name, module in model.named_modules() if isinstance(module, nn.Linear) or _is_transposed(module)]
    return [name for name in found if targets is None or any(f".{name}".endswith(f".{target}") for target in targets)]


def _targets(model: nn.Module, lora: Lora) -> list[str]:
    layers = _linear_layers(model)
    if lora.target_modules is not None:
        unknown = [target for target in lora.target_modules if not _linear_layers(model, [target])]
        if unknown:
            there = ", ".join(sorted({name.rpartition(".")[2] for name in layers}))
            raise RecipeError([f"lora.target_modules: {name} is no linear layer of the model; there are {there}" for name in unknown])
        return list(lora.target_modules)
    blocks = find_blocks(model)
    inside = [name for name in layers if any(name.startswith(f"{block}.") for block in blocks)]
    if not inside:
        raise RecipeError(
            f"lora.target_modules: missing; {type(model).__name__} has no linear layers in its blocks to choose: name some of "
            + ", ".join(sorted({name.rpartition(".")[2] for name in layers}))
        )
    short = sorted({name.rpartition(".")[2] for name in inside})
    return short if len(_linear_layers(model, short)) == len(inside) else inside  # the same names may stand outside


def _head(model: Any) -> list[str]:
    """A classifier's modules outside of its base model."""
    if not is_classifier(model):
        return []
    prefix = model.base_model_prefix
    return [name for name, module in model.named_children() if name != prefix and next(module.parameters(), None) is not None]


def peft_config(model: nn.Module) -> Any:
    """The LoraConfig of a model with adapters, else None."""
    return getattr(model, "peft_config", {}).get("default")


def adapter_names(model: nn.Module) -> dict[str, str]:
    """What an adapter's file holds: peft's names for it, and the model's own (clean) names."""
    head = peft_config(model).modules_to_save or []
    names: dict[str, str] = {}
    for name, _ in model.named_parameters():
        name = clean_name(name)
        if ".lora_A." in name or ".lora_B." in name or name.split(".")[0] in head:
            names[_PREFIX + name.replace(".default.", ".")] = name
    return names


def save_adapter_config(model: nn.Module, folder: Path) -> None:
    """Writes adapter_config.json."""
    config = peft_config(model).to_dict()
    config["inference_mode"] = True
    as_json = {key: sorted(value) if isinstance(value, set) else value for key, value in config.items()}
    (folder / ADAPTER_CONFIG).write_text(json.dumps(as_json, indent=2, sort_keys=True, default=str) + "\n")


class Adapter:
    """Which weights adapters change, and how: W + alpha / rank * B A."""

    def __init__(self, config: dict[str, Any], names: Iterable[str]) -> None:
        """config: of peft's adapter_config.json. names: of the adapter's tensors, as peft writes them.

        Raises RecipeError for kinds of adapters that are merged in another way.
        """
        others = [key for key in ("use_dora", "alora_invocation_tokens", "rank_pattern", "alpha_pattern", "lora_bias") if config.get(key)]
        if config.get("peft_type") != "LORA" or others:
            raise RecipeError(f"cannot merge an adapter of peft_type {config.get('peft_type')} with {', '.join(others) or 'its settings'}")
        rank, alpha = config["r"], config["lora_alpha"]
        self.scale = alpha / rank**0.5 if config.get("use_rslora") else alpha / rank
        names = list(names)
        down = ".lora_A.weight"
        self.factors = {
            name.removeprefix(_PREFIX).removesuffix(down) + ".weight": (name, name.replace(".lora_A.", ".lora_B."))
            for name in names
            if name.endswith(down)
        }
        """For the name of each weight that is changed: the names of A and B."""
        self.whole = {name.removeprefix(_PREFIX): name for name in names if ".lora_" not in name}
        """Weights that the adapter holds whole, such as a classifier's head."""

    def reader(
        self, model: nn.Module, read_base: Callable[[str], torch.Tensor], read_adapter: Callable[[str], torch.Tensor]
    ) -> Callable[[str], torch.Tensor]:
        """Reads the model's tensors, by their clean names, with the adapter added in.

        read_base: gives a tensor of the base model by its clean name; read_adapter: one of the adapter by peft's name.
        """
        transposed = {f"{clean_name(name)}.weight" for name, module in model.named_modules() if _is_transposed(module)}

        def read(name: str) -> torch.Tensor:
            if name in self.whole:
                return read_adapter(self.whole[name])
            weight = read_base(name)
            if name not in self.factors:
                return weight
            down, up = (read_adapter(factor) for factor in self.factors[name])
            return self._merged(weight, down, up, transposed=name in transposed)

        return read

    def _merged(self, weight: torch.Tensor, down: torch.Tensor, up: torch.Tensor, *, transposed: bool) -> torch.Tensor:
        """In float32. weight: (out, in), or transposed; down: A (rank, in); up: B (out, rank)."""
        change = (up.float() @ down.float()) * self.scale
        whole: torch.Tensor = weight.float() + (change.T if transposed else change)
        return whole
