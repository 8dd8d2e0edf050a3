"""Documents of the training data that are held out for evaluation (data.validation_split)."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from launcher.data.attachments import moved_attachments
from launcher.data.packing import Integers
from launcher.data.store_files import Hashes, document_hashes, map_array, write_array
from launcher.data.token_store import TokenStore
from launcher.errors import RecipeError
from launcher.files import checksum_of

CHOSEN = "by content"
"""How documents are chosen, for the fingerprint of the data. Earlier versions chose them by their
number, and recorded nothing."""


def held_out(hashes: Hashes, share: float, *, of_shard: bool = False) -> npt.NDArray[np.bool_]:
    """Which of the documents with these hashes are held out, (documents,): about this share of them,
    at least one, and not all.

    A document decides for itself, so it stays where it is if others are added or removed, and equal
    ones are on one side. of_shard: there are others, so it may be none or all of these. Raises
    RecipeError if there is no second document, or none that differs.
    """
    mask = hashes < np.uint64(int(share * 2.0**64))
    if of_shard:
        return np.asarray(mask)
    smallest, largest = hashes.min(), hashes.max()
    if smallest == largest:
        what = "the data is a single document, of which no part can be held out"
        if len(hashes) > 1:
            what = "all rows of the data are equal, so none can be held out"
        raise RecipeError(
            f"data.validation_split: {what}; give data.validation, or data.validation_split=null"
        )
    if not mask.any():
        mask = hashes == smallest
    elif mask.all():
        mask = hashes != largest
    return np.asarray(mask)


def split_documents(
    store: TokenStore, share: float, *, divide: bool, of_shard: bool = False
) -> tuple[TokenStore, npt.NDArray[np.bool_]]:
    """The store, and which of its documents are held out. of_shard: see `held_out`.

    divide: a single document is made two, and the second one, with this share of its tokens, is held
    out. Raises RecipeError if there is a single document that cannot be divided.
    """
    tokens = int(store.offsets[-1])
    if store.documents != 1 or not divide or tokens < 4 or of_shard:
        chosen = dataclasses.replace(store, fingerprint=store.fingerprint | {"held_out": CHOSEN})
        hashes = document_hashes(store) if store.hashes is None else store.hashes
        return chosen, held_out(hashes, share, of_shard=of_shard)
    held = min(max(2, round(share * tokens)), tokens - 2)
    both = dataclasses.replace(
        store,
        offsets=np.array([0, tokens - held, tokens]),
        hashes=None,
        origins=None if store.origins is None else store.origins[[0, 0]],
    )
    return both, np.array([False, True])


_COLUMNS = ("classes", "first_lengths", "desirable", "margins", "hashes", "origins")
"""Fields of a TokenStore with a value for each document."""


def copy_documents(
    store: TokenStore, documents: Integers, folder: Path | None = None
) -> TokenStore:
    """A store of the documents with these numbers, in memory, or with its tokens in mapped files of a
    folder, `store-NAME.npy`."""
    starts, ends = store.offsets[documents], store.offsets[documents + 1]

    def joined(name: str) -> npt.NDArray[Any]:
        array = getattr(store, name)
        ranges = zip(starts.tolist(), ends.tolist(), strict=True)
        parts = (array[start:end] for start, end in ranges)
        if folder is None:
            return np.concatenate([*parts])
        file = folder / f"store-{name}.npy"
        write_array(file, parts, dtype=array.dtype, length=int((ends - starts).sum()))
        return map_array(file)

    names = [name for name in ("ids", "labels", "weights") if getattr(store, name) is not None]
    tokens: Any = {name: joined(name) for name in names}
    attachments = store.attachments
    if attachments is not None:
        first = np.searchsorted(attachments["first"], starts)
        last = np.searchsorted(attachments["first"], ends)
        moved = np.cumsum(np.append(0, ends - starts))[:-1] - starts
        tables = [
            moved_attachments(attachments[begin:end], tokens, 0)
            for begin, end, tokens in zip(first, last, moved, strict=True)
        ]
        attachments = np.concatenate(tables) if tables else attachments[:0]
    offsets = np.cumsum(np.append(0, ends - starts))
    of_tokens = list(tokens.values())
    if store.margins is not None:  # of each token, as in the files of a store
        of_tokens.append(np.repeat(store.margins[documents], ends - starts))
    content = checksum_of([offsets.data, *(array.data for array in of_tokens)])
    return dataclasses.replace(
        store,
        **tokens,
        offsets=offsets,
        **{
            name: column[documents]
            for name in _COLUMNS
            if (column := getattr(store, name)) is not None
        },
        attachments=attachments,
        skipped=[],
        fingerprint=store.fingerprint | {"content": content},
    )
