"""Between the names (and shapes) that a checkpoint's tensors have on disk and those of the model that holds them.

transformers keeps tables of what differs: renamed keys, and conversions such as the experts of a layer, apart on disk
and one tensor in the model (`transformers.conversion_mapping`). They are used here as `from_pretrained` and
`save_pretrained` use them, but one conversion at a time, and first on meta tensors: so shapes are known, and wrong ones
told, before a byte is read.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from launcher.errors import RecipeError
from launcher.models.initialization import clean_name
from launcher.models.safetensors_files import Shape

Tensors = dict[str, torch.Tensor]


@dataclass
class Conversion:
    """Tensors of one side that together become tensors of the other."""

    sources: dict[str, list[str]] = field(default_factory=dict)
    """By pattern, in order: the names of one side."""
    converter: Any = None
    """A WeightConverter of transformers; None: one tensor, and only its name differs."""
    first: str = ""
    """The name that the converter is called for."""
    targets: dict[str, Shape] = field(default_factory=dict)
    """What comes out, on the other side."""

    def names(self) -> list[str]:
        """Of all sources."""
        return [name for names in self.sources.values() for name in names]

    def convert(self, tensors: Mapping[str, torch.Tensor], shapes: ModelShapes) -> Tensors:
        """tensors: the sources, by name."""
        if self.converter is None:
            (name,) = self.names()
            return {self.first: tensors[name]}
        converter = copy.deepcopy(self.converter)
        for pattern, names in self.sources.items():
            for name in names:
                converter.add_tensor(self.first, name, pattern, tensors[name])
        made = converter.convert(self.first, model=shapes, config=shapes.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}

    def stacks_rows(self) -> bool:
        """Whether each row of the target's dimension 0 is made of one source of each pattern, so that some rows can be
        made without the others: experts that are stacked, and then joined along another dimension."""
        from transformers.core_model_loading import Concatenate, MergeModulelist, Transpose

        if self.converter is None or len(self.targets) != 1:
            return False
        first, *rest = self.converter.operations
        return (
            isinstance(first, MergeModulelist)
            and first.dim == 0
            and all(
                (isinstance(operation, Concatenate) and operation.dim > 0)
                or (isinstance(operation, Transpose) and min(operation.dim0, operation.dim1) > 0 and not operation.check_dims)
                for operation in rest
            )
        )

    def some_rows(self, start: int, stop: int) -> Conversion:
        """The same for rows start to stop of the target; see `stacks_rows`."""
        return Conversion({pattern: names[start:stop] for pattern, names in self.sources.items()}, self.converter, self.first, self.targets)


class ModelShapes:
    """What a conversion may ask of a model: its config, and a parameter's shape. The model itself may be sharded."""

    def __init__(self, model: nn.Module) -> None:
        self.config: Any = model.config
        self._state = {clean_name(name): torch.empty(tensor.shape, device="meta") for name, tensor in model.state_dict().items()}

    def get_parameter(self, name: str) -> torch.Tensor:
        return self._state[name]


def record_conversions(model: Any) -> None:
    """Notes on a model that comes from no checkpoint which tables of transformers hold for it, where `export_conversions` finds
    them. Before anything is wrapped around it: the tables go by the names of classes, and sharding changes those."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import PrefixChange

    # A prefix that no checkpoint had need not be put back
    table = get_model_conversion_mapping(model, add_legacy=False)
    model._weight_conversions = [entry for entry in table if not isinstance(entry, PrefixChange)]


def load_conversions(model: Any, stored: Mapping[str, Shape], shapes: ModelShapes) -> tuple[list[Conversion], list[str], list[str]]:
    """How the tensors of a checkpoint become the model's: conversions, names that mean nothing to the model, problems.

    Notes the tables that were used on the model, where `export_conversions` finds them, as from_pretrained does.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    table = get_model_conversion_mapping(model)
    renamings = [entry for entry in table if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in table if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    state, prefix = model.state_dict(), model.base_model_prefix
    found: dict[str, Conversion] = {}
    unexpected: list[str] = []
    for name in sorted(stored, key=dot_natural_key):
        renamed, pattern = rename_source_key(name, renamings, converters, prefix, state)
        if renamed not in state and name in state:
            renamed, pattern = rename_source_key(name, [], [], prefix, state)
        if renamed not in state or (pattern is None and renamed in found):
            unexpected.append(name)
            continue
        converter = by_pattern[pattern] if pattern is not None else None
        conversion = found.setdefault(renamed, Conversion(converter=converter, first=renamed))
        conversion.sources.setdefault(pattern or name, []).append(name)
    model._weight_conversions = [entry for entry in table if entry.was_used()]
    problems = _try_on_meta(found.values(), stored, shapes)
    return list(found.values()), unexpected, problems


def _try_on_meta(conversions: Any, shapes_in: Mapping[str, Shape], shapes: ModelShapes) -> list[str]:
    """Finds what comes out of each conversion; returns what cannot be converted."""
    problems = []
    for conversion in conversions:
        try:
            made = conversion.convert({name: shapes_in[name].meta() for name in conversion.names()}, shapes)
        except Exception as error:  # whatever an operation raises on tensors that do not fit it
            some = ", ".join(conversion.names()[:3]) + (", ..." if len(conversion.names()) > 3 else "")
            problems.append(f"{conversion.first}: cannot be made from {some}: {error}")
            continue
        conversion.targets = {name: Shape.of(tensor) for name, tensor in made.items()}
    return problems


def export_conversions(model: Any, tensors: Mapping[str, Shape], shapes: ModelShapes) -> list[Conversion]:
    """How the model's tensors become those of a checkpoint that from_pretrained reads: the way back of `load_conversions`."""
    from transformers.core_model_loading import WeightConverter, WeightRenaming

    back = [entry.reverse_transform() for entry in model._weight_conversions[::-1]]
    renamings = [entry for entry in back if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in back if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    found: dict[str, Conversion] = {}
    for name in tensors:
        # On the way out conversions come first, at most one for a name, and renamings after them
        matches = (converter.rename_source_key(name) for converter in converters)
        first, pattern = next((match for match in matches if match[1] is not None), (_renamed(name, renamings), None))
        converter = by_pattern[pattern] if pattern is not None else None
        conversion = found.setdefault(first, Conversion(converter=converter, first=first))
        conversion.sources.setdefault(pattern or name, []).append(name)
    problems = _try_on_meta(found.values(), tensors, shapes)
    if problems:
        raise RecipeError([f"checkpoint.export: {problem}" for problem in problems])
    for conversion in found.values():
        if conversion.converter is not None:
            conversion.converter = _Renamed(conversion.converter, renamings)
            conversion.targets = {_renamed(name, renamings): shape for name, shape in conversion.targets.items()}
    return list(found.values())


def _renamed(name: str, renamings: list[Any]) -> str:
    for renaming in renamings:
        name, _ = renaming.rename_source_key(name)
    return name


class _Renamed:
    """A converter whose results are renamed: on the way out, renamings come after conversions."""

    def __init__(self, converter: Any, renamings: list[Any]) -> None:
        self._converter, self._renamings = converter, renamings
        self.operations = converter.operations

    def add_tensor(self, *arguments: Any) -> None:
        self._converter.add_tensor(*arguments)

    def convert(self, *arguments: Any, **more: Any) -> dict[str, Any]:
        return {_renamed(name, self._renamings): value for name, value in self._converter.convert(*arguments, **more).items()}
