"""Opens the data sets of a recipe: stores, packed, in an order."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from launcher.data.batching import MixtureOrder, Order, SampleOrder, mixture_weights
from launcher.data.custom import CustomDataset
from launcher.data.dataset import (
    ClassificationDataset,
    MapData,
    MixtureDataset,
    PreferenceDataset,
    SequenceDataset,
)
from launcher.data.held_out import copy_documents, split_documents
from launcher.data.objectives import MaskedDataset, RewardDataset, masking_vocabulary
from launcher.data.packing import Integers, first_names, no_targets, pack, pack_pairs
from launcher.data.problems import SHOWN
from launcher.data.token_store import ModelInputs, TokenStore, open_store, rows_of_documents
from launcher.errors import RecipeError
from launcher.recipe import schema


def open_dataset(
    data: schema.Data,
    source: tuple[str, ...] | dict[str, schema.Source],
    *,
    tokenizer: str | None,
    model: ModelInputs,
    build: bool,
    validation: bool = False,
    held_out: bool = False,
) -> SequenceDataset | ClassificationDataset | MixtureDataset:
    """Opens (see `open_store`) and packs the files of a source, or of each source of the mixture
    data.train.

    With data.validation_split, training data is without the held-out documents, or with `held_out`
    only these.
    """

    def opened(
        data: schema.Data, files: tuple[str, ...]
    ) -> SequenceDataset | ClassificationDataset:
        store = open_store(
            files, data, tokenizer=tokenizer, model=model, build=build, validation=validation
        )
        if data.overlong == "error":
            _refuse_overlong(store, files, data, tokenizer=tokenizer, validation=validation)
        if validation or data.validation_split is None:
            return pack_store(store, data, model)
        store, mask = split_documents(store, data.validation_split, divide=data.kind == "text")
        if held_out:
            return pack_store(copy_documents(store, np.flatnonzero(mask)), data, model)
        return pack_store(store, data, model, documents=np.flatnonzero(~mask))

    if not isinstance(source, dict):
        return opened(data, source)
    parts = {
        name: opened(of_source, source[name].files) for name, of_source in data.sources().items()
    }
    return MixtureDataset(parts, mixture_weights(source.values()))


def _refuse_overlong(
    store: TokenStore,
    files: tuple[str, ...],
    data: schema.Data,
    *,
    tokenizer: str | None,
    validation: bool,
) -> None:
    """Raises RecipeError if a row is longer than a sequence."""
    sizes = np.diff(store.offsets)
    longer = np.flatnonzero(sizes > data.sequence_length)
    if not len(longer):
        return
    what = f"tokens, more than {data.sequence_length:,} (data.sequence_length)"
    shown = longer[:SHOWN].tolist()
    where = rows_of_documents(
        store, files, data, set(shown), tokenizer=tokenizer, validation=validation
    )
    lines = [f"{where[number]}: {sizes[number]:,} {what}" for number in shown]
    text = f"{len(longer):,} of {store.documents:,} rows are longer than a sequence, by up to "
    text += f"{sizes.max() - data.sequence_length:,} tokens; raise data.sequence_length, or set "
    others = "data.overlong: drop"
    if data.kind != "preference":
        others += ", or cut"
    raise RecipeError([*lines, text + others])


def pack_store(
    store: TokenStore, data: schema.Data, model: ModelInputs, *, documents: Integers | None = None
) -> SequenceDataset | ClassificationDataset:
    """Packs all documents, or those with the numbers `documents`. Raises RecipeError if no token
    has loss."""
    length, kind, pairs = data.sequence_length, data.kind, data.kind == "preference"
    options: Any = {"sequence_length": length, "packing": data.packing, "documents": documents}
    if pairs:
        assert store.classes is not None
        sequences = pack_pairs(store.offsets, store.classes, store.targets, **options)
    else:
        drops = data.drops_overlong
        sequences = pack(store.offsets, kind, labels=store.labels, drops_overlong=drops, **options)
    if kind == "classification":  # the tokenizer has cut its documents
        sequences = dataclasses.replace(
            sequences, cut_documents=store.cut_documents, cut_tokens=store.cut_tokens
        )
        return ClassificationDataset(
            store,
            sequences,
            length,
            model.padding,
            width_multiple=model.width_multiple,
            documents=documents,
        )
    if not sequences.targets:
        names = store.fingerprint.get("files", ())
        raise RecipeError(no_targets(first_names(names), data))
    options = {
        "packed": data.packing,
        "masking": model.masking,
        "part": model.part,
        "width_multiple": model.width_multiple,
        "documents": documents,
        "target_loss": model.target_loss,
    }
    if model.task == "masked_lm":
        tokenizer = model.tokenizer or data.tokenizer
        return MaskedDataset(
            *(store, sequences, length),
            **options,
            padding=model.padding,
            probability=data.mask_probability,
            vocabulary=masking_vocabulary(tokenizer, vocabulary=model.vocabulary),
        )
    if model.task == "reward":
        return RewardDataset(store, sequences, length, **options, padding=model.padding)
    made = PreferenceDataset if pairs else SequenceDataset
    return made(store, sequences, length, **options)


def make_order(dataset: MapData, *, seed: int, shuffle: bool, epochs: int | None) -> Order:
    """The order of the samples of a data set."""
    if not isinstance(dataset, MixtureDataset) or dataset.weights is None:
        # random numbers, others in each epoch
        draws = isinstance(dataset, CustomDataset | MaskedDataset)
        return SampleOrder(
            samples=len(dataset), with_epoch=draws, seed=seed, shuffle=shuffle, epochs=epochs
        )
    sizes = [len(part) for part in dataset.parts.values()]
    return MixtureOrder(
        sizes=sizes, weights=dataset.weights, seed=seed, shuffle=shuffle, epochs=epochs
    )
