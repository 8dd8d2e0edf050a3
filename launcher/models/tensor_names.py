"""Converts between the tensors of a checkpoint on disk and those of the model.

transformers has tables of renamed keys and of conversions: the experts of a layer, for example, are
separate on disk and one tensor in the model. Here they are applied one at a time, and first to meta
tensors, which finds wrong shapes before any data is read.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING

import torch

from launcher.models.names import clean_name
from launcher.models.nf4 import packed_names, shape_of
from launcher.models.record import record_of
from launcher.models.safetensors_files import Tensors

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.core_model_loading import ConversionOps, WeightConverter, WeightRenaming


@dataclass
class Conversion:
    """Source tensors that together become target tensors."""

    first: str
    """The name that the converter is called with."""
    converter: WeightConverter | None
    """A WeightConverter of transformers; None: one tensor whose name changes."""
    model: SimpleNamespace
    """The attributes of the model that the converter reads."""
    renamings: list[WeightRenaming] = field(default_factory=list)
    """In an export: applied to the names of the results."""
    sources: dict[str, list[str]] = field(default_factory=dict)
    """Names of the source tensors by pattern, in order."""
    targets: Tensors = field(default_factory=dict)
    """When loading: the results, on meta."""

    def names(self) -> list[str]:
        """Names of all source tensors."""
        return [name for names in self.sources.values() for name in names]

    def convert(self, tensors: Tensors) -> dict[str, torch.Tensor]:
        """Converts the source tensors, by name. Returns the target tensors."""
        if self.converter is None:
            (name,) = self.names()
            made: dict[str, torch.Tensor | list[torch.Tensor]] = {self.first: tensors[name]}
        else:
            converter = copy.deepcopy(self.converter)
            for pattern, names in self.sources.items():
                for name in names:
                    converter.add_tensor(self.first, name, pattern, tensors[name])
            made = converter.convert(self.first, model=self.model, config=self.model.config)
        return {
            _renamed(name, self.renamings): value[0] if isinstance(value, list) else value
            for name, value in made.items()
        }

    def stacks_rows(self) -> bool:
        """Whether each row of the target is made from one source of each pattern (experts)."""
        from transformers.core_model_loading import Concatenate, MergeModulelist, Transpose

        def keeps_rows(operation: ConversionOps) -> bool:
            if isinstance(operation, Concatenate):
                return bool(operation.dim > 0)
            swaps = isinstance(operation, Transpose) and not operation.check_dims
            return swaps and min(operation.dim0, operation.dim1) > 0

        if self.converter is None or len(self.targets) != 1:
            return False
        first, *rest = self.converter.operations
        stacks = isinstance(first, MergeModulelist) and first.dim == 0
        return stacks and all(map(keeps_rows, rest))

    def some_rows(self, start: int, stop: int) -> Conversion:
        """The conversion for these rows of the target, if it stacks rows."""
        sources = {pattern: names[start:stop] for pattern, names in self.sources.items()}
        return replace(self, sources=sources)


def _shapes_of(model: PreTrainedModel) -> SimpleNamespace:
    """The config of a model, sharded or not, and the whole shapes of its parameters."""
    packed = {*packed_names(model)}
    shapes = {
        clean_name(name): torch.empty(
            shape_of(tensor) if name in packed else tensor.shape, device="meta"
        )
        for name, tensor in model.state_dict().items()
    }
    return SimpleNamespace(config=model.config, get_parameter=shapes.__getitem__)


def record_conversions(model: PreTrainedModel) -> None:
    """Records transformers' conversions of a model, for `export_conversions`: they depend on class
    names, which sharding changes."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import PrefixChange

    # A model that was not loaded from a checkpoint has no prefix to restore
    table = get_model_conversion_mapping(model, add_legacy=False)
    record_of(model).conversions = [entry for entry in table if not isinstance(entry, PrefixChange)]


def load_conversions(
    model: PreTrainedModel, stored: Tensors
) -> tuple[list[Conversion], list[str], list[str]]:
    """How a checkpoint's tensors, on meta, become the model's: conversions, unexpected names,
    problems. Records those of transformers' conversions that were used, for `export_conversions`."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import dot_natural_key, rename_source_key

    table = get_model_conversion_mapping(model)
    if (multi_token := record_of(model).multi_token) is not None:
        table = [*multi_token.conversions(), *table]
    renamings, converters, by_pattern = _by_kind(table)
    state, prefix, shapes = model.state_dict(), model.base_model_prefix, _shapes_of(model)
    by_name: dict[str, Conversion] = {}
    unexpected: list[str] = []
    for name in sorted(stored, key=dot_natural_key):
        renamed, pattern = rename_source_key(name, renamings, converters, prefix, state)
        if renamed not in state and name in state:
            renamed, pattern = rename_source_key(name, [], [], prefix, state)
        if renamed not in state or (pattern is None and renamed in by_name):
            unexpected.append(name)
            continue
        new = Conversion(renamed, by_pattern.get(pattern), shapes)
        by_name.setdefault(renamed, new).sources.setdefault(pattern or name, []).append(name)
    record_of(model).conversions = [entry for entry in table if entry.was_used()]
    problems = []
    for conversion in by_name.values():
        names = conversion.names()
        try:
            conversion.targets = conversion.convert({name: stored[name] for name in names})
        except Exception as error:  # operations raise anything on unsuitable tensors
            some = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
            problems.append(f"{conversion.first}: cannot be made from {some}: {error}")
    return list(by_name.values()), unexpected, problems


def export_conversions(model: PreTrainedModel, names: Iterable[str]) -> list[Conversion]:
    """How the model's tensors become those of a checkpoint: the reverse of `load_conversions`."""
    renamings, converters, by_pattern = _by_kind(
        [entry.reverse_transform() for entry in record_of(model).conversions[::-1]]
    )
    shapes = _shapes_of(model)
    by_name: dict[str, Conversion] = {}
    for name in names:
        # In an export, at most one conversion applies to a name, before any renaming
        matches = (converter.rename_source_key(name) for converter in converters)
        first, pattern = next((match for match in matches if match[1] is not None), (name, None))
        new = Conversion(first, by_pattern.get(pattern), shapes, renamings)
        by_name.setdefault(first, new).sources.setdefault(pattern or name, []).append(name)
    return list(by_name.values())


def _by_kind(
    table: Iterable[object],
) -> tuple[list[WeightRenaming], list[WeightConverter], dict[str | None, WeightConverter]]:
    from transformers.core_model_loading import WeightConverter, WeightRenaming

    renamings = [entry for entry in table if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in table if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
    return renamings, converters, by_pattern


def _renamed(name: str, renamings: list[WeightRenaming]) -> str:
    for renaming in renamings:
        name, _ = renaming.rename_source_key(name)
    return name
