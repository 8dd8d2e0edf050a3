"""`launcher prepare`: fetches model and data and tokenizes into the cache."""

from __future__ import annotations

from pathlib import Path

from launcher.cli.app import CheckedGpus, CheckedNodes, Overrides
from launcher.console import bytes_as_text, configure_logging
from launcher.errors import EXIT_DONE
from launcher.recipe.data_sets import DataFiles, data_sets, named_models, opened_together
from launcher.recipe.derived import open_sizes
from launcher.recipe.load import load_recipe
from launcher.recipe.schema import Recipe
from launcher.sources.hub import is_hub_id, model_folder
from launcher.sources.location import is_in_store


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


_WHAT = {"model": "model", "distillation": "teacher", "data": "tokenizer"}
"""By the section of its key."""


def _fetch(recipe: Recipe) -> int:
    data = recipe.data
    for key, name, weights in named_models(recipe):
        folder = model_folder(name, key=key, weights=weights)
        size = f" ({_size(folder)})" if weights else ""
        _print(f"{_WHAT[key.partition('.')[0]]:<10} {name}: {folder}{size}")
    if data.builder is not None:
        hint = "if it fetches something, start it once on this machine"
        _print(f"data       {data.builder} provides the data; {hint}")
        return EXIT_DONE
    offline, large = True, False
    for files in data_sets(data):
        offline = offline and not any(map(is_in_store, files.patterns))
        if data.streaming and not files.validation:
            remote = [name for name in files.patterns if is_hub_id(name) or is_in_store(name)]
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

    data = recipe.data
    if open_sizes(recipe) or data.streaming:
        return
    sets = [(files, is_validation, False) for files, is_validation in opened_together(data)]
    if data.validation_split and data.train is not None:
        sets.append((data.train, False, True))
    for files, is_validation, held_out in sets:
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


def _print(line: str) -> None:
    print(line, flush=True)


def _size(folder: Path) -> str:
    return bytes_as_text(sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()))
