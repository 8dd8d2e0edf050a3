"""Models and data sets of the hub, before a run needs them: one rank fetches them, and the others find
them in the cache. A thousand ranks that ask the hub at once are refused (HTTP 429)."""

from __future__ import annotations

from collections.abc import Iterator

from launcher.distributed.process_group import gather
from launcher.distributed.rank_layout import RankLayout
from launcher.errors import RecipeError
from launcher.recipe.derived import hub_models
from launcher.recipe.schema import Data, Recipe
from launcher.sources.hub import is_hub_id, load_data_set, model_folder


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


def _fetch(recipe: Recipe) -> None:
    for key, name, weights in hub_models(recipe):
        model_folder(name, key=key, weights=weights)
    for pattern, validation in _data_sets(recipe.data):
        load_data_set(pattern, validation=validation)


def _data_sets(data: Data) -> Iterator[tuple[str, bool]]:
    """The data sets of the hub that are not streamed, and whether they are for validation."""
    sets = data.validation if isinstance(data.validation, dict) else {"": data.validation or ()}
    sources = () if data.streaming else data.sources().values()
    train = [each.train for each in sources if isinstance(each.train, tuple)]
    for patterns, validation in (
        *((files, False) for files in train),
        *((files, True) for files in sets.values()),
    ):
        yield from ((pattern, validation) for pattern in patterns if is_hub_id(pattern))
