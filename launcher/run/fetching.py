"""What must be there before a run: models and data sets of the hub, which one rank fetches for the
others, and on several nodes tokenized data. A thousand ranks that ask the hub at once are refused (HTTP
429)."""

from __future__ import annotations

from collections.abc import Callable

from launcher.console import bytes_as_text
from launcher.distributed.environment import cache_folder
from launcher.distributed.process_group import from_rank_0, gather
from launcher.distributed.rank_layout import RankLayout
from launcher.errors import RecipeError
from launcher.recipe.data_sets import data_sets, named_models
from launcher.recipe.schema import Recipe
from launcher.sources.hub import is_fetched, is_hub_id, load_data_set, model_folder

MOST_BYTES = 10 * 2**30
"""Training files on which several nodes may wait for one to tokenize them: minutes."""


def fetch_in_turn(recipe: Recipe, ranks: RankLayout, *, first_of_node: bool) -> None:
    """Fetches what the recipe names: on rank 0, and then on one rank of each other node, which finds it if
    nodes share the cache. Every rank must call this. Raises RecipeError on every rank."""
    for turn in (ranks.rank == 0, first_of_node and ranks.rank != 0):
        problems = list[str]()
        if turn:
            try:
                _fetch(recipe)
            except RecipeError as error:
                problems = error.problems
        found = [problem for each in gather(problems, ranks.group) for problem in each]
        if found:
            raise RecipeError([*dict.fromkeys(found)])


def refuse_to_tokenize(
    recipe: Recipe, ranks: RankLayout, *, nodes: int, untokenized: Callable[[Recipe], int]
) -> None:
    """On several nodes, raises RecipeError on every rank if much data is not tokenized yet: one node
    tokenizes it, and all others wait. Every rank must call this. untokenized: returns the bytes."""
    if nodes == 1:
        return
    problems = list[str]()
    if ranks.rank == 0:
        try:
            size = untokenized(recipe)
        except RecipeError as error:
            problems, size = error.problems, 0
        if size > MOST_BYTES:
            problems = [
                f"data: {bytes_as_text(size)} are not tokenized yet, which one of {nodes} nodes would do "
                f"while {ranks.size:,} ranks wait; run `launcher prepare` with the same arguments first, "
                f"on a machine that shares {cache_folder(recipe.data.cache)} (data.cache)"
            ]
    problems = from_rank_0(problems, ranks.group)
    if problems:
        raise RecipeError(problems)


def _fetch(recipe: Recipe) -> None:
    for key, name, weights in named_models(recipe):
        if is_fetched(name):
            model_folder(name, key=key, weights=weights)
    for files in data_sets(recipe.data):
        if files.validation or not recipe.data.streaming:
            for pattern in filter(is_hub_id, files.patterns):
                load_data_set(pattern, validation=files.validation)
