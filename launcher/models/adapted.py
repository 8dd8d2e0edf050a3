"""The weights that adapters change: a class for each kind of layer, which knows the adapter's tensors
and their names in files of peft, how they are drawn, learn, are divided and are merged.

`add_adapters` marks a layer with its class. The mark stays when a model is copied, sharded, wrapped
or compiled, and `adapted_weights` finds the layers under the names that they have by then.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import nn

from launcher.errors import RecipeError
from launcher.models.first_factors import FIRST_FACTORS, Factors
from launcher.models.grouped_experts import DOWN, UP, weights_of
from launcher.models.names import clean_name
from launcher.models.nf4 import unpacked
from launcher.models.shards import copy_local_rows, local_rows, whole_tensor
from launcher.models.ties import tied_names

if TYPE_CHECKING:
    from peft import LoraConfig

    from launcher.models.safetensors_files import StoredTensors

Read = Callable[[str], torch.Tensor]
"""Returns a whole tensor by name."""
Names = Collection[str]
_PREFIX = "base_model.model."
"""peft's prefix of each name in its files."""
_MARK = "adapted_as"
"""Attribute of a layer: its class below."""
_NAME = "default"
"""peft's name of the adapter."""
_INIT = "initial_factors"
"""Attribute of a layer: lora.init."""
_TINY = torch.finfo(torch.float32).tiny


@dataclass(frozen=True)
class AdapterTensor:
    """A tensor of an adapter."""

    name: str
    """The model's clean name."""
    is_up: bool = False
    """Whether it is a factor B, which has a learning rate of its own (lora.b_ratio)."""
    file_form: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor
    """From the form in the model to that in files of peft."""
    model_form: Callable[[torch.Tensor, int], torch.Tensor] | None = None
    """Back, to this number of rows; None: the rows are those of the file."""


@dataclass(frozen=True)
class AdaptedWeight(ABC):
    """A weight that an adapter changes."""

    layer: str
    """The clean name of its layer."""
    module: Any
    """The layer; None if an adapter's file names one that the model does not have."""
    scale: float = 1.0
    """Of the product of the factors."""

    @classmethod
    @abstractmethod
    def of(cls, layer: str, module: Any) -> Iterator[Self]:
        """Those of a layer with this mark."""

    @classmethod
    @abstractmethod
    def in_file(cls, model: nn.Module, config: Mapping[str, Any], keys: Names) -> Iterator[Self]:
        """Those of a model without adapters that tensors with these names in a file of peft change.
        config: its adapter_config.json."""

    @property
    def weight(self) -> str:
        """The clean name of the weight."""
        return f"{self.layer}.weight"

    @abstractmethod
    def tensors(self) -> dict[str, AdapterTensor]:
        """The adapter's tensors, by their names in files of peft."""

    def modules(self) -> Iterable[nn.Module]:
        """The modules that are nothing but parts of the adapter."""
        return ()

    @abstractmethod
    def draw(self) -> None:
        """Draws the adapter's first values, which have no effect."""

    def start(self, stored: StoredTensors, name: str) -> None:  # noqa: B027 - few kinds need it
        """Takes first values from the weight in a checkpoint, by its name there."""

    def after_loading(self) -> None:  # noqa: B027 - few kinds need it
        """Takes first values from the loaded weight."""

    @property
    def changes_frozen(self) -> bool:
        """Whether the frozen weight beside the adapter is another one than in the checkpoint."""
        return False

    def frozen(self, weight: torch.Tensor) -> torch.Tensor:
        """The frozen weight beside the adapter, from that in the checkpoint, in its dtype."""
        return weight

    def divided(self, dimension: int) -> tuple[Any, Any]:
        """The factor that ranks divide along the dimension along which they divide the weight, and
        the one that each rank has whole. Raises RecipeError for kinds of adapters that cannot be
        divided."""
        what = f"the adapter of {self.layer} cannot be divided"
        raise RecipeError(f"lora: {what} over tensor parallel ranks; use 1 such rank")

    def product(
        self, hidden: torch.Tensor, inputs: torch.Tensor, weight: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and weight of one product with the adapter in it, from those without. inputs: the
        `hidden` states (tokens, features) in the dtype of the product. Raises RecipeError for kinds of
        adapters that the loss without full logits cannot compute."""
        what = f"not available with an adapter of {self.layer}; set model.chunked_loss=false"
        raise RecipeError(f"model.chunked_loss: {what}")

    @abstractmethod
    def merged(self, weight: torch.Tensor, read: Read) -> torch.Tensor:
        """The weight with the adapter, whose tensors are read by their names in files of peft."""


@dataclass(frozen=True)
class AdaptedLinear(AdaptedWeight):
    """The weight of peft's layer around a linear one: W + scale * B A, of which DoRA scales each row
    to its magnitude."""

    dora: bool = False
    init: str = "default"
    """Value of lora.init."""

    @classmethod
    def of(cls, layer: str, module: Any) -> Iterator[Self]:
        dora, init = _NAME in module.lora_magnitude_vector, vars(module).get(_INIT, "default")
        yield cls(layer, module, module.scaling[_NAME], dora, init)

    @classmethod
    def in_file(cls, model: nn.Module, config: Mapping[str, Any], keys: Names) -> Iterator[Self]:
        for layer, module in _layers(model, keys, ".lora_A.weight"):
            dora = f"{_PREFIX}{layer}.lora_magnitude_vector" in keys
            yield cls(layer, module, scale_of(config), dora)

    def tensors(self) -> dict[str, AdapterTensor]:
        key, made = _PREFIX + self.layer, dict[str, AdapterTensor]()
        for factor in ("lora_A", "lora_B"):
            name = f"{self.layer}.{factor}.{_NAME}.weight"
            made[f"{key}.{factor}.weight"] = AdapterTensor(name, is_up=factor == "lora_B")
        if self.dora:
            name = f"{self.layer}.lora_magnitude_vector.{_NAME}.weight"
            made[f"{key}.lora_magnitude_vector"] = AdapterTensor(name)
        return made

    def modules(self) -> Iterable[nn.Module]:
        base = self.module.base_layer
        parts = (part for part in self.module.children() if part is not base)
        return (module for part in parts for module in part.modules())

    def draw(self) -> None:
        self.module.lora_A[_NAME].reset_parameters()
        nn.init.zeros_(self.module.lora_B[_NAME].weight)  # Hu et al., 2021
        if self.dora:
            nn.init.ones_(self.module.lora_magnitude_vector[_NAME].weight)

    def after_loading(self) -> None:
        """Sets magnitudes to the norms of the weight's rows: each rank its own rows. Or factors to
        a part of the weight, which is taken from it."""
        if self.changes_frozen:
            weight = self.module.base_layer.weight.detach()
            whole = whole_tensor(weight)
            down, up = self._first_factors(whole)
            copy_local_rows(self.module.lora_A[_NAME].weight.detach(), down)
            copy_local_rows(self.module.lora_B[_NAME].weight.detach(), up)
            copy_local_rows(weight, self.frozen(whole))
        if self.dora:
            magnitude = self.module.lora_magnitude_vector[_NAME].weight
            local = local_rows(magnitude)[0]
            weight = local_rows(self.module.base_layer.weight)[0]
            if len(local):
                rows = unpacked(weight, torch.float32)
                local.copy_(torch.linalg.vector_norm(rows, dim=1, dtype=torch.float32))

    @property
    def changes_frozen(self) -> bool:
        return self.init != "default"

    def frozen(self, weight: torch.Tensor) -> torch.Tensor:
        if not self.changes_frozen:
            return weight
        down, up = self._first_factors(weight)
        part = (up @ down) * self.scale
        left = weight.float() - (part.T if is_transposed(base_layer(self.module)) else part)
        return left.to(weight.dtype)

    def _first_factors(self, weight: torch.Tensor) -> Factors:
        if is_transposed(base_layer(self.module)):
            weight = weight.T
        return FIRST_FACTORS[self.init](weight, self.module.r[_NAME], self.scale)

    def divided(self, dimension: int) -> tuple[Any, Any]:
        down, up = self.module.lora_A[_NAME], self.module.lora_B[_NAME]
        return (up, down) if dimension == 0 else (down, up)

    def product(
        self, hidden: torch.Tensor, inputs: torch.Tensor, weight: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Those of the factors are concatenated along the features."""
        down, up, dtype = self.module.lora_A[_NAME], self.module.lora_B[_NAME], inputs.dtype
        dropped = self.module.lora_dropout[_NAME](hidden.to(down.weight.dtype))
        inputs = torch.cat((inputs, (down(dropped) * self.scale).to(dtype)), dim=1)
        return inputs, torch.cat((weight.to(dtype), up.weight.to(dtype)), dim=1)

    def merged(self, weight: torch.Tensor, read: Read) -> torch.Tensor:
        """In float32."""
        # A: (rank, in); B: (out, rank); weight: (out, in), or transposed
        down, up, *magnitude = (read(key).float() for key in self.tensors())
        change = (up @ down) * self.scale
        made = weight.float() + (change.T if is_transposed(base_layer(self.module)) else change)
        for each in magnitude:  # a row of zeros stays one, as in training
            made *= (each / made.norm(dim=1).clamp(min=_TINY))[:, None]
        return made


@dataclass(frozen=True)
class AdaptedExperts(AdaptedWeight):
    """A weight of a layer of experts, with two factors for each expert.

    In the model the factors have a row for each expert (`grouped_experts`). In a file of peft A is
    (experts x rank, in), expert by expert, and B is (out, rank x experts), where the columns of one
    rank are those of all experts.
    """

    name: str = ""
    """The weight's name in its layer."""
    wrapper: str = ""
    """peft's name of the layer with its factors."""

    @classmethod
    def of(cls, layer: str, module: Any) -> Iterator[Self]:
        names = [name for name in weights_of(module) if DOWN + name in module._parameters]
        return cls._of_layer(layer, module, names, module.adapter_scale)

    @classmethod
    def in_file(cls, model: nn.Module, config: Mapping[str, Any], keys: Names) -> Iterator[Self]:
        ends = tuple(f".{end}" for end in config.get("target_parameters") or ())
        for layer, module in model.named_modules():
            names = [own for own in weights_of(module) if f".{layer}.{own}".endswith(ends)]
            yield from cls._of_layer(layer, module, names, scale_of(config))

    @classmethod
    def _of_layer(cls, layer: str, module: Any, names: list[str], scale: float) -> Iterator[Self]:
        """peft wraps a layer once for each weight, in the order of the layer's parameters: the first
        weight's wrapper is the innermost, and has the most `base_layer` in its name."""
        for depth, name in enumerate(reversed(names)):
            yield cls(layer, module, scale, name, layer + ".base_layer" * depth)

    @property
    def weight(self) -> str:
        return f"{self.layer}.{self.name}"

    def tensors(self) -> dict[str, AdapterTensor]:
        key, layer, name = _PREFIX + self.wrapper, self.layer, self.name
        return {
            f"{key}.lora_A.weight": AdapterTensor(
                f"{layer}.{DOWN}{name}", False, lambda down: down.flatten(0, 1), _down_of_file
            ),
            f"{key}.lora_B.weight": AdapterTensor(
                f"{layer}.{UP}{name}",
                True,
                lambda up: up.permute(1, 2, 0).flatten(1).contiguous(),
                _up_of_file,
            ),
        }

    def draw(self) -> None:
        """As peft does: A like the weight of a linear layer, and B is zero."""
        down, up = (self.module.get_parameter(prefix + self.name) for prefix in (DOWN, UP))
        bound = down.shape[-1] ** -0.5
        nn.init.uniform_(down, -bound, bound)
        nn.init.zeros_(up)

    def merged(self, weight: torch.Tensor, read: Read) -> torch.Tensor:
        """In float32. weight: (experts, out, in), or transposed."""
        down, up = (read(key).float() for key in self.tensors())
        down, up = _down_of_file(down, len(weight)), _up_of_file(up, len(weight))
        first, second = up, down
        if self.module.is_transposed:
            first, second = down.transpose(1, 2), up.transpose(1, 2)
        return torch.baddbmm(weight.float(), first, second, alpha=self.scale)


def _down_of_file(stored: torch.Tensor, experts: int) -> torch.Tensor:
    """(experts, rank, in)"""
    return stored.view(experts, -1, stored.shape[1])


def _up_of_file(stored: torch.Tensor, experts: int) -> torch.Tensor:
    """(experts, out, rank), not contiguous"""
    return stored.view(len(stored), -1, experts).permute(2, 0, 1)


@dataclass(frozen=True)
class NewRows(AdaptedWeight):
    """The weight of an embedding whose rows for new tokens are a parameter of their own, which tied
    embeddings share."""

    ids: range = range(0)
    """Of the new tokens."""

    @classmethod
    def of(cls, layer: str, module: Any) -> Iterator[Self]:
        yield cls(layer, module, ids=module.new_ids)

    @classmethod
    def in_file(cls, model: nn.Module, config: Mapping[str, Any], keys: Names) -> Iterator[Self]:
        for layer, module in _layers(model, keys, ".token_adapter.trainable_tokens_delta"):
            yield cls(layer, module, ids=ids_of_adapter(config))

    def tensors(self) -> dict[str, AdapterTensor]:
        key = f"{_PREFIX}{self.layer}.token_adapter.trainable_tokens_delta"
        return {key: AdapterTensor(f"{self.layer}.new_rows")}

    def draw(self) -> None:
        """Of a model without pretrained weights."""
        nn.init.normal_(self.module.new_rows, std=0.02)

    def start(self, stored: StoredTensors, name: str) -> None:
        stored.fill_with_mean(name, self.module.new_rows)

    def product(
        self, hidden: torch.Tensor, inputs: torch.Tensor, weight: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return inputs, self._with(self.module.new_rows.to(weight.dtype), weight)

    def merged(self, weight: torch.Tensor, read: Read) -> torch.Tensor:
        (key,) = self.tensors()
        return self._with(read(key).to(weight), weight)

    def _with(self, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.cat((weight[: self.ids.start], rows, weight[self.ids.stop :]))


def _layers(model: nn.Module, keys: Names, end: str) -> Iterator[tuple[str, nn.Module | None]]:
    """The layers with a tensor that ends so in a file of peft."""
    modules = dict(model.named_modules())
    for key in keys:
        if key.endswith(end):
            layer = key.removesuffix(end).removeprefix(_PREFIX)
            yield layer, modules.get(layer)


_KINDS: tuple[type[AdaptedWeight], ...] = (AdaptedExperts, NewRows, AdaptedLinear)
"""In the order in which they take their tensors from a file."""


def mark_adapted(layer: nn.Module, kind: type[AdaptedWeight]) -> None:
    """Notes that adapters change weights of a layer."""
    setattr(layer, _MARK, kind)


def set_init(layer: nn.Module, init: str) -> None:
    """Notes which first values the factors of a layer have: a value of lora.init."""
    setattr(layer, _INIT, init)


def weights_adapted_in(layer: nn.Module, name: str = "") -> list[AdaptedWeight]:
    """The weights of a layer itself that adapters change. name: of the layer."""
    kind: type[AdaptedWeight] | None = vars(layer).get(_MARK)
    return [] if kind is None else [*kind.of(clean_name(name), layer)]


def adapted_weights(model: nn.Module) -> list[AdaptedWeight]:
    """The weights of a model, or of a part, that adapters change, in the order of the modules. Each
    of tied embeddings with new rows is among them."""
    named = model.named_modules()
    return [each for name, layer in named for each in weights_adapted_in(layer, name)]


def adapter_modules(model: nn.Module) -> set[nn.Module]:
    """The modules of a model, or of a part, that are nothing but parts of adapters."""
    return {module for each in adapted_weights(model) for module in each.modules()}


def adapter_parameters(model: nn.Module) -> set[str]:
    """The clean names of the parameters of a model's adapters."""
    adapted = adapted_weights(model)
    return {tensor.name for each in adapted for tensor in each.tensors().values()}


def adapted_ties(model: nn.Module, adapted: Iterable[AdaptedWeight]) -> dict[str, str]:
    """Tied parameters that are no longer equal once adapters are merged: each further name, and the
    first name, under which the parameter is stored."""
    changed = {each.weight for each in adapted if not isinstance(each, NewRows)}
    groups = [tied for tied in tied_names(model) if not changed.isdisjoint(tied)]
    return {name: tied[0] for tied in groups for name in tied[1:]}


def base_layer(module: nn.Module) -> Any:
    """The layer in one of peft, else the module itself."""
    return getattr(module, "base_layer", module)


def is_transposed(module: nn.Module) -> bool:
    """Whether a linear layer's weight is (in, out)."""
    from transformers.pytorch_utils import Conv1D

    return isinstance(module, Conv1D)


# Files of peft


def peft_config(model: nn.Module) -> LoraConfig | None:
    """The configuration of a model's adapters; None if it has none."""
    config: LoraConfig | None = getattr(model, "peft_config", {}).get(_NAME)
    return config


def scale_of(config: Mapping[str, Any]) -> float:
    """The scale of adapters, from peft's adapter_config.json."""
    rank, alpha = config["r"], config["lora_alpha"]
    return float(alpha / (math.sqrt(rank) if config.get("use_rslora") else rank))


def ids_of_adapter(config: Mapping[str, Any]) -> range:
    """The ids of the new tokens in peft's adapter_config.json."""
    ids = [id for each in (config.get("trainable_token_indices") or {}).values() for id in each]
    return range(min(ids), max(ids) + 1) if ids else range(0)


def adapter_tensors(model: nn.Module) -> dict[str, AdapterTensor]:
    """The tensors in a file of a model's adapter, by peft's names. A tied parameter of modules that
    are trained whole is there under each of its names, because peft would untie them."""
    config = peft_config(model)
    saved = tuple(f"{module}." for module in (config and config.modules_to_save) or ())
    names = {name: name for name in (clean_name(name) for name, _ in model.named_parameters())}
    tensors = {k: t for each in adapted_weights(model) for k, t in each.tensors().items()}
    tensors = {key: tensor for key, tensor in tensors.items() if tensor.name in names}
    own = {tensor.name for tensor in tensors.values()}
    for tied in tied_names(model):
        names |= dict.fromkeys(tied, tied[0])
    for name, first in names.items():
        if name.startswith(saved) and first not in own:
            tensors[_PREFIX + name] = AdapterTensor(first)
    return tensors


def adapter_in_file(
    model: nn.Module, config: Mapping[str, Any], keys: Iterable[str]
) -> tuple[list[AdaptedWeight], dict[str, str]]:
    """What tensors with these names in a file of peft change in a model without adapters: the adapted
    weights; and by clean name the tensors that take the place of the model's. config: the adapter's
    adapter_config.json. Raises RecipeError if the model does not have one of them."""
    left, adapted = [*keys], list[AdaptedWeight]()
    for kind in _KINDS:
        found = [*kind.in_file(model, config, {*left})]
        taken = {key for each in found for key in each.tensors()}
        left = [key for key in left if key not in taken]
        adapted += found
    copies = base_copies(left)
    whole = {key.removeprefix(_PREFIX): key for key in {*left} - {*copies.values()}}
    if unknown := (whole.keys() | {each.weight for each in adapted}) - model.state_dict().keys():
        raise RecipeError(
            f"export: {config['base_model_name_or_path']} has no {', '.join(sorted(unknown))}, "
            "which the adapter changes"
        )
    return adapted, copies | whole


def base_copies(keys: Iterable[str]) -> dict[str, str]:
    """By clean names of frozen weights: peft's names of the copies that an adapter's file has, of
    an embedding or output layer with an adapter (save_embedding_layers)."""
    copies = (key for key in keys if ".base_layer." in key and ".lora_" not in key)
    return {clean_name(key.removeprefix(_PREFIX)): key for key in copies}


def merged_reader(adapted: Iterable[AdaptedWeight], *, read_base: Read, read_adapter: Read) -> Read:
    """Returns a function that reads a model's tensors by clean name, with the adapter merged in.
    read_adapter: reads by peft's names."""
    by_weight = {each.weight: each for each in adapted}

    def read(name: str) -> torch.Tensor:
        weight = read_base(name)
        return by_weight[name].merged(weight, read_adapter) if name in by_weight else weight

    return read
