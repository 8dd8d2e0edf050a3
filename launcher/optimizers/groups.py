"""Learning rates and weight decays of some of the parameters: `optimizer.groups` and
`optimizer.layer_decay`."""

from __future__ import annotations

import difflib
import fnmatch
import math
from collections.abc import Iterator, Mapping

from torch import nn

from launcher.console import count_as_text
from launcher.errors import RecipeError
from launcher.models.description import describe, embeddings
from launcher.models.names import clean_name
from launcher.optimizers.matrices import decayed_parameters
from launcher.recipe import schema

_MOST_LINES = 12
"""Learning rates with a line each at the start."""


def ratios_of(model: nn.Module, optimizer: schema.Optimizer) -> dict[str, float]:
    """The learning rates of trained parameters over `optimizer.learning_rate`, by clean name; those
    that are not named have a ratio of 1. model: with all of its blocks. Raises RecipeError as
    `_matched`, or if the model has no blocks for the decay."""
    ratios: dict[str, float] = {}
    for name, group in _matched(model, optimizer).items():
        ratios[name] = group.learning_rate_ratio
    if optimizer.layer_decay is not None:
        for name, depth in _heights(model).items():
            ratios[name] = ratios.get(name, 1.0) * optimizer.layer_decay**depth
    return {name: ratio for name, ratio in ratios.items() if ratio != 1.0}


def decays_of(model: nn.Module, optimizer: schema.Optimizer) -> dict[str, float]:
    """The weight decays of matrices that are another one than `optimizer.weight_decay`, by clean name.
    Raises RecipeError as `_matched`, or if a group has a weight decay and no matrix."""
    matched, decayed = _matched(model, optimizer), decayed_parameters(model)
    found: dict[str, float] = {}
    for index, group in enumerate(optimizer.groups or ()):
        if group.weight_decay is None:
            continue
        names = [name for name, other in matched.items() if other is group and name in decayed]
        if not names:
            what = "no matrix is in this group, and norms and biases have no weight decay"
            raise RecipeError(f"optimizer.groups[{index}].weight_decay: {what}; leave it out")
        found |= dict.fromkeys(names, group.weight_decay)
    return found


def _matched(model: nn.Module, optimizer: schema.Optimizer) -> dict[str, schema.ParameterGroup]:
    """The first group of `optimizer.groups` that names a trained parameter, by its clean name. Raises
    RecipeError with all patterns that match no trained parameter."""
    named = {clean_name(name): p.requires_grad for name, p in model.named_parameters()}
    trained = [name for name, is_trained in named.items() if is_trained]
    found: dict[str, schema.ParameterGroup] = {}
    problems = []
    for index, group in enumerate(optimizer.groups or ()):
        for place, pattern in enumerate(group.patterns):
            names = fnmatch.filter(trained, pattern)
            new = [name for name in names if name not in found or found[name] is group]
            found |= dict.fromkeys(new, group)
            if new:
                continue
            where = f"optimizer.groups[{index}].patterns[{place}]: {pattern}"
            if names:
                problems.append(f"{where} matches parameters of earlier groups only; put it first")
            elif frozen := fnmatch.filter(named, pattern):
                problems.append(f"{where} matches frozen parameters only, such as {frozen[0]}")
            else:
                near = difflib.get_close_matches(pattern, trained, n=3, cutoff=0.3) or trained[:3]
                problems.append(
                    f"{where} matches no parameter; the nearest names are {', '.join(near)}"
                )
    if problems:
        raise RecipeError(problems)
    return found


def _heights(model: nn.Module) -> dict[str, int]:
    """How far below the output each trained parameter is, by clean name, as in BEiT (Bao et al., 2021):
    of n blocks, what follows them has 0, the last block 1, the first n, and what comes before them
    n + 1."""
    blocks, embedding = describe(model).blocks, embeddings(model)[0]
    if not blocks:
        what = f"{type(model).__name__} names no blocks (_no_split_modules)"
        raise RecipeError(f"optimizer.layer_decay: {what}; use optimizer.groups")
    prefixes = [f"{clean_name(name)}." for name in blocks]
    inputs = {id(p) for p in embedding.parameters()} if isinstance(embedding, nn.Module) else set()
    found: dict[str, int] = {}
    begun = False
    for full, parameter in model.named_parameters():
        name = clean_name(full)
        place = next((i for i, prefix in enumerate(prefixes) if name.startswith(prefix)), None)
        begun = begun or place is not None
        if place is not None:
            height = len(blocks) - place
        else:
            height = 0 if begun and id(parameter) not in inputs else len(blocks) + 1
        if parameter.requires_grad:
            found[name] = height
    return found


def describe_groups(
    model: nn.Module, optimizer: schema.Optimizer, ratios: Mapping[str, float]
) -> Iterator[str]:
    """A line for each learning rate and weight decay, with what has it; of many, for the first and the last
    ones. model: with all of its blocks; ratios: of all learning rates."""
    if optimizer.groups is None and optimizer.layer_decay is None:
        return
    decays, decayed = decays_of(model, optimizer), decayed_parameters(model)
    found: dict[tuple[float, float], dict[str, int]] = {}
    for full, parameter in model.named_parameters():
        name = clean_name(full)
        if parameter.requires_grad:
            decay = decays.get(name, optimizer.weight_decay) if name in decayed else 0.0
            key = ratios.get(name, 1.0), decay
            found.setdefault(key, {})[name] = math.prod(parameter.shape)
    left_out = len(found) - _MOST_LINES if len(found) > _MOST_LINES + 1 else 0
    for number, ((ratio, decay), sizes) in enumerate(found.items()):
        place = number - _MOST_LINES // 2
        if place == 0 and left_out:
            yield f"optimizer: ... {left_out} more, by their layers"
        if 0 <= place < left_out:
            continue
        first, *others = sizes
        more = f" and {len(others)} more" if others else ""
        yield (
            f"optimizer: learning rate x {ratio:.4g}, weight decay {decay:g}: "
            f"{count_as_text(sum(sizes.values()))} parameters, {first}{more}"
        )
