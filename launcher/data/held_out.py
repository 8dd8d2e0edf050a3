"""Documents of the training data that are held out for evaluation (data.validation_split)."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt

from launcher.data.image_processor import moved_images
from launcher.data.packing import Integers
from launcher.data.token_store import TokenStore
from launcher.errors import RecipeError


def held_out(documents: int, share: float) -> npt.NDArray[np.bool_]:
    """Which of the documents of a store are held out, (documents,): at least one, and not all.

    It depends on nothing but their number and the share, so it is the same on every rank and after
    a resume. Raises RecipeError if there is a single document.
    """
    if documents < 2:
        what = "the data is a single document, of which no part can be held out"
        raise RecipeError(f"data.validation_split: {what}; give data.validation, or null")
    number = min(max(1, round(share * documents)), documents - 1)
    mask = np.zeros(documents, dtype=bool)
    mask[np.argpartition(_hashes(documents), number - 1)[:number]] = True
    return mask


def split_documents(
    store: TokenStore, share: float, *, divide: bool
) -> tuple[TokenStore, npt.NDArray[np.bool_]]:
    """The store, and which of its documents are held out.

    divide: a single document is made two, and the second one, with this share of its tokens, is held
    out. Raises RecipeError if there is a single document that cannot be divided.
    """
    tokens = int(store.offsets[-1])
    if store.documents != 1 or not divide or tokens < 4:
        return store, held_out(store.documents, share)
    held = min(max(2, round(share * tokens)), tokens - 2)
    both = dataclasses.replace(store, offsets=np.array([0, tokens - held, tokens]))
    return both, np.array([False, True])


def _hashes(count: int) -> npt.NDArray[np.uint64]:
    """A different number for each document, in random order: splitmix64 (Steele et al., "Fast
    splittable pseudorandom number generators", OOPSLA 2014)."""
    hashes = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        hashes ^= hashes >> np.uint64(shift)
        hashes *= np.uint64(factor)
    return hashes ^ (hashes >> np.uint64(31))


def copy_documents(store: TokenStore, documents: Integers) -> TokenStore:
    """A store in memory of the documents with these numbers."""
    starts, ends = store.offsets[documents], store.offsets[documents + 1]
    ranges = list(zip(starts.tolist(), ends.tolist(), strict=True))
    names = [name for name in ("ids", "labels", "weights") if getattr(store, name) is not None]
    tokens: Any = {
        name: np.concatenate([getattr(store, name)[start:end] for start, end in ranges])
        for name in names
    }
    images = None
    if store.images is not None:
        first = np.searchsorted(store.images["first"], starts)
        last = np.searchsorted(store.images["first"], ends)
        moved = np.cumsum(np.append(0, ends - starts))[:-1] - starts
        tables = [
            moved_images(store.images[begin:end], tokens, 0)
            for begin, end, tokens in zip(first, last, moved, strict=True)
        ]
        images = np.concatenate(tables) if tables else store.images[:0]
    content = f"{store.fingerprint.get('content')}, {len(documents)} documents"
    return dataclasses.replace(
        store,
        **tokens,
        offsets=np.cumsum(np.append(0, ends - starts)),
        classes=None if store.classes is None else store.classes[documents],
        images=images,
        skipped=[],
        fingerprint=store.fingerprint | {"content": content},
    )
