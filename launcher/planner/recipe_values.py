"""What predictions and measurements both derive from a recipe."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping

from launcher.data.batching import accumulation_steps, rows_of
from launcher.distributed.rank_layout import layout_sizes
from launcher.recipe.schema import Recipe
from launcher.strategies.base import offloads_parameters


def micro_batches_of(recipe: Recipe, *, ranks: int) -> int:
    """Forward passes of a rank in one optimizer step, of all `ranks`."""
    groups = layout_sizes(recipe.strategy, ranks=ranks).data_parallel_size
    rows = rows_of(recipe.batch, row_length=recipe.data.row_length)
    size = recipe.batch.global_batch_size
    return accumulation_steps(global_batch_size=size, micro_batch_size=rows, ranks=groups)


def has_reductions_to_choose(recipe: Recipe, *, ranks: int) -> bool:
    """Whether `strategy.sync_every_micro_batch` has an effect: a step has several micro-batches, and
    their gradients are reduced over ranks, or moved to host memory."""
    moved = ranks > 1 or offloads_parameters(recipe.strategy.cpu_offload)
    return moved and micro_batches_of(recipe, ranks=ranks) > 1


def cache_key(*values: object) -> str:
    """A key for sections of a recipe and plain values: text with every field of every section, whatever
    their `repr` shows."""
    return json.dumps([_plain(value) for value in values], sort_keys=True, default=str)


def _plain(value: object) -> object:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = dataclasses.fields(value)
        return [type(value).__name__, *(_plain(getattr(value, field.name)) for field in fields)]
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, list | tuple) else value


def with_random_weights(recipe: Recipe, *, compile: bool = False) -> Recipe:
    """The recipe without the weights of a checkpoint, which take no part in a plan."""
    model = dataclasses.replace(recipe.model, init="random", compile=compile)
    return dataclasses.replace(recipe, model=model)
