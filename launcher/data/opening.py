"""Opens the data sets of a recipe: stores, packed, in an order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from launcher.data.batching import (
    Blend,
    MixtureOrder,
    Order,
    SampleOrder,
    SimilarLengths,
    blend_of,
)
from launcher.data.custom import CustomDataset
from launcher.data.dataset import MapData, MixtureDataset, SampleMaker, SequenceDataset
from launcher.data.held_out import copy_documents, split_documents
from launcher.data.index import has_index, open_index
from launcher.data.modality import Modality
from launcher.data.packing import NothingToTrainError, text_lengths
from launcher.data.problems import SHOWN
from launcher.data.token_store import ModelTraits, TokenStore, open_store, rows_of_documents
from launcher.errors import RecipeError
from launcher.recipe import schema
from launcher.sources.layouts import KINDS


def open_dataset(
    data: schema.Data,
    source: tuple[str, ...] | dict[str, schema.Source],
    *,
    objective: SampleMaker,
    tokenizer: str | None,
    model: ModelTraits,
    build: bool,
    validation: bool = False,
    held_out: bool = False,
) -> SequenceDataset | MixtureDataset:
    """Opens (see `open_store`) the files of a source, or of each source of the mixture data.train,
    and makes a data set of them (see `make_dataset`)."""

    def opened(data: schema.Data, files: tuple[str, ...]) -> SequenceDataset:
        store = open_store(
            files, data, tokenizer=tokenizer, model=model, build=build, validation=validation
        )
        if validation:
            data = replace(data, validation_split=None)
        return make_dataset(
            store,
            data,
            objective=objective,
            tokenizer=tokenizer,
            model=model,
            held_out=held_out,
            build=build,
        )

    if not isinstance(source, dict):
        return opened(data, source)
    parts = {
        name: opened(of_source, source[name].files) for name, of_source in data.sources().items()
    }
    if not validation and not held_out:
        parts = {
            name: replace(part, loss_weight=source[name].loss_weight or 1.0)
            for name, part in parts.items()
        }
    return MixtureDataset(parts, blend_of_sequences(parts, data))


def blend_of_sequences(parts: Mapping[str, SequenceDataset], data: schema.Data) -> Blend | None:
    """The shares of the sources of a mixture in its sequences; None: they are those of the sizes."""
    blend = blend_of(data)
    if blend is None or data.mixture_unit == "sequences":
        return blend
    sizes = [
        part.tokens / max(1, len(part))
        if data.mixture_unit == "tokens"
        else rows_per_sequence(part)
        for part in parts.values()
    ]
    return blend.scaled([1 / max(size, 1e-9) for size in sizes])


def rows_per_sequence(part: SequenceDataset) -> float:
    """Rows of a data set over its sequences."""
    found = part.sequences
    used = found.documents - found.dropped_documents - found.long_documents
    return used / max(1, len(part))


def make_dataset(
    store: TokenStore,
    data: schema.Data,
    *,
    objective: SampleMaker,
    tokenizer: str | None,
    model: ModelTraits,
    held_out: bool = False,
    of_shard: bool = False,
    build: bool | None = None,
) -> SequenceDataset:
    """The documents of a store as the objective packs them and makes samples of them.

    With data.validation_split, they are without those that are held out, or with `held_out` only
    these. of_shard: see `split_documents`. build: see `open_index`; None: without an index.
    """
    make = partial(
        _packed,
        store,
        data,
        objective=objective,
        tokenizer=tokenizer,
        model=model,
        held_out=held_out,
        of_shard=of_shard,
    )
    if build is None or not has_index(store):
        return make()
    content: list[object] = [type(objective).__name__, data.kind, data.packing, data.joins_rows]
    content += [data.sequence_length, data.overlong, data.validation_split, held_out]
    return open_index(store, content, make, objective.empty(data, model), build=build)


def _packed(
    store: TokenStore,
    data: schema.Data,
    folder: Path | None = None,
    *,
    objective: SampleMaker,
    tokenizer: str | None,
    model: ModelTraits,
    held_out: bool,
    of_shard: bool,
) -> SequenceDataset:
    """See `make_dataset`. folder: for copies of documents; None: they are in memory."""
    if data.overlong == "error":
        modalities = model.attachments.modalities
        _refuse_overlong(store, data, tokenizer=tokenizer, modalities=modalities)
    if data.validation_split is None:
        return objective.open(store, data, model)
    store, mask = split_documents(
        store, data.validation_split, divide=data.kind == "text", of_shard=of_shard
    )
    if held_out and not mask.any():
        raise NothingToTrainError("data.validation_split: no document is held out")
    if held_out:
        copied = copy_documents(store, np.flatnonzero(mask), folder)
        return objective.open(copied, data, model)
    return objective.open(store, data, model, documents=np.flatnonzero(~mask))


def _refuse_overlong(
    store: TokenStore,
    data: schema.Data,
    *,
    tokenizer: str | None,
    modalities: tuple[Modality, ...],
) -> None:
    """Raises RecipeError if a row is longer than a sequence."""
    sizes = text_lengths(store, data.batch_unit)
    longer = np.flatnonzero(sizes > data.sequence_length)
    if not len(longer):
        return
    what = f"tokens, more than {data.sequence_length:,} (data.sequence_length)"
    shown = longer[:SHOWN].tolist()
    rows = rows_of_documents(store, data, set(shown), tokenizer=tokenizer, modalities=modalities)
    lines = [f"{rows[number].where}: {sizes[number]:,} {what}" for number in shown]
    text = f"{len(longer):,} of {store.documents:,} rows are longer than a sequence, by up to "
    text += f"{sizes.max() - data.sequence_length:,} tokens; raise data.sequence_length, or set "
    others = "data.overlong: drop"
    if KINDS[data.kind].learned != "whole answers":
        others += ", or cut"
    raise RecipeError([*lines, text + others])


def make_order(
    dataset: MapData,
    *,
    seed: int,
    shuffle: bool,
    epochs: int | None,
    similar_lengths: bool = False,
    step_samples: int = 1,
) -> Order:
    """The order of the samples of a data set. similar_lengths: rows of similar length together.
    step_samples: samples of a step, by which the stages of a mixture become positions."""
    if similar_lengths and dataset.lengths is not None:
        order = make_order(
            dataset, seed=seed, shuffle=shuffle, epochs=epochs, step_samples=step_samples
        )
        assert isinstance(order, SampleOrder | MixtureOrder)
        return SimilarLengths(order, dataset.lengths, seed)
    if not isinstance(dataset, MixtureDataset) or dataset.blend is None:
        draws = isinstance(dataset, CustomDataset) or dataset.objective.draws
        return SampleOrder(
            samples=len(dataset), with_epoch=draws, seed=seed, shuffle=shuffle, epochs=epochs
        )
    sizes = [len(part) for part in dataset.parts.values()]
    return MixtureOrder(
        sizes=sizes,
        weights=dataset.blend.weights,
        seed=seed,
        shuffle=shuffle,
        epochs=epochs,
        stages=[(step * step_samples, weights) for step, weights in dataset.blend.stages],
        most=dataset.blend.most,
    )
