"""`launcher prepare`: fetches model and data and tokenizes into the cache."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from launcher.cli.app import CheckedGpus, CheckedNodes, Overrides
from launcher.console import bytes_as_text, configure_logging
from launcher.errors import EXIT_DONE
from launcher.recipe.derived import open_sizes
from launcher.recipe.load import load_recipe
from launcher.recipe.schema import Data, Recipe
from launcher.sources.hub import is_hub_id, model_folder


def prepare(overrides: Overrides, gpus: CheckedGpus = None, nodes: CheckedNodes = 1) -> int:
    """Fetch model and data and tokenize into the cache, for nodes that have no network.

    \b
    Example:
      launcher prepare recipe=lora_llama_3_1_8b data.train='my/data/*.jsonl'
    """
    from launcher.models.config_keys import check_config_keys

    loaded = load_recipe(overrides, ranks=None if gpus is None else nodes * gpus, hub=True)
    check_config_keys(loaded)
    configure_logging()
    try:
        return _fetch(loaded.recipe)
    except KeyboardInterrupt as request:
        request.add_note("the same command resumes: what was completed is kept")
        raise


def _fetch(recipe: Recipe) -> int:
    model, data = recipe.model, recipe.data
    if model.path is not None:
        folder = model_folder(model.path, key="model.path", weights=model.init != "random")
        _print(f"model      {model.path}: {folder} ({_size(folder)})")
    if (distillation := recipe.distillation) is not None:
        folder = model_folder(distillation.teacher, key="distillation.teacher")
        _print(f"teacher    {distillation.teacher}: {folder} ({_size(folder)})")
    if data.builder is not None:
        hint = "if it fetches something, start it once on this machine"
        _print(f"data       {data.builder} provides the data; {hint}")
        return EXIT_DONE
    if data.tokenizer not in (None, "bytes"):
        folder = model_folder(str(data.tokenizer), key="data.tokenizer", weights=False)
        _print(f"tokenizer  {data.tokenizer}: {folder}")
    offline, large = True, False
    for files in data_sets(data):
        if data.streaming and not files.validation:
            remote = [pattern for pattern in files.patterns if is_hub_id(pattern)]
            network = f", {', '.join(remote)} through the network" if remote else ""
            _print(f"{files.key}: read while training (data.streaming){network}")
            offline = offline and not remote
        else:
            large |= _tokenize(recipe, files)
    if large:
        _pack(recipe)
    what = ": training needs no network now, and with HF_HUB_OFFLINE=1 it requests nothing"
    _print(f"ready{what if offline else ''}")
    return EXIT_DONE


def _tokenize(recipe: Recipe, files: DataFiles) -> bool:
    """Tokenizes a set. Returns whether it is so large that its sequences have an index."""
    from launcher.data.index import has_index
    from launcher.data.problems import causes
    from launcher.data.token_store import open_store
    from launcher.data.tokenizer import tokenizer_name
    from launcher.planner.sizes import traits_from_recipe
    from launcher.sources.layouts import unused_line

    store = open_store(
        files.patterns,
        files.data,
        tokenizer=tokenizer_name(recipe.data, recipe.model),
        model=traits_from_recipe(recipe),
        validation=files.validation,
        build=True,
    )
    assert store.folder is not None
    what = f"{store.documents:,} documents, {len(store.ids):,} tokens"
    _print(f"{files.key}: {what}: {store.folder} ({_size(store.folder)})")
    for note in (*store.notes, *store.file_notes):
        _print(f"{files.key}: {note}")
    if store.unused:
        _print(f"{files.key}: {unused_line(store.unused)}")
    if skipped := store.skipped:
        _print(f"{files.key}: {len(skipped):,} rows cannot be used and are skipped:")
        for line in causes(skipped):
            _print(f"  {line}")
    return has_index(store)


def _pack(recipe: Recipe) -> None:
    """Packs large sets into sequences, unless a run first chooses their length."""
    from launcher.data.opening import open_dataset
    from launcher.data.tokenizer import tokenizer_name
    from launcher.objectives.make import make_objective
    from launcher.planner.sizes import traits_from_recipe

    data, train, validation = recipe.data, recipe.data.train, recipe.data.validation
    if open_sizes(recipe) or data.streaming or train is None:
        return
    sets = validation if isinstance(validation, dict) else {"": validation or ()}
    found = [(train, False, False), *((files, True, False) for files in sets.values() if files)]
    if data.validation_split:
        found.append((train, False, True))
    for files, is_validation, held_out in found:
        dataset = open_dataset(
            data,
            files,
            objective=make_objective(recipe, trained=False),
            tokenizer=tokenizer_name(data, recipe.model),
            model=traits_from_recipe(recipe),
            build=True,
            validation=is_validation,
            held_out=held_out,
        )
        _print(f"packed     {len(dataset):,} samples")


class DataFiles(NamedTuple):
    """A set in data.train or data.validation."""

    key: str
    """The key of the set, such as `data.train.web`."""
    data: Data
    """The settings of this set."""
    patterns: tuple[str, ...]
    validation: bool
    held_out: bool = False
    """The documents of training data that are held out (data.validation_split)."""


def data_sets(data: Data) -> Iterator[DataFiles]:
    """The sets of a recipe, training sets first."""
    for name, source in data.sources().items():
        if isinstance(source.train, tuple):
            yield DataFiles(f"data.train.{name}".removesuffix("."), source, source.train, False)
    sets = data.validation
    for name, files in (sets if isinstance(sets, dict) else {"": sets}).items():
        if files is not None:
            yield DataFiles(f"data.validation.{name}".removesuffix("."), data, files, True)


def _print(line: str) -> None:
    print(line, flush=True)


def _size(folder: Path) -> str:
    return bytes_as_text(sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()))
