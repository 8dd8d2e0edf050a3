"""Which documents and pieces the sequences of a large data set have, on the disk and memory-mapped.

An index is a folder in that of the token store, `index-DIGEST`: .npy files with the arrays of a
`SequenceDataset` that the store does not have, and `meta.json`. With data.validation_split these are
the numbers of the documents, and of those that are held out a copy. The digest is of all that the
arrays depend on beside the store. One process builds the index, as it builds the store
(`build_once`); all others map it, so their private memory does not grow with the documents.

A small data set is packed by each process in memory, and so is one in a folder that this process may
not write to.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from launcher.data.dataset import SequenceDataset
from launcher.data.packing import Packed, Sequences, Stream
from launcher.data.store_files import cache_error, commit, map_array, store_problem, write_array
from launcher.data.token_store import TokenStore, build_once, digest_of
from launcher.reliability.lock import Ownership

logger = logging.getLogger(__name__)

_FORMAT = 1
"""Changes with the files, and with what packing makes."""
_DOCUMENTS = 1 << 16
"""Fewer are packed faster than files are written, in a few MB."""


def has_index(store: TokenStore) -> bool:
    """Whether a store has so many documents that its index is worth its files."""
    return store.folder is not None and store.documents >= _DOCUMENTS


def open_index(
    store: TokenStore,
    content: list[object],
    make: Callable[[Path | None], SequenceDataset],
    empty: SequenceDataset,
    *,
    build: bool,
) -> SequenceDataset:
    """The data set that `make` returns, with arrays that are mapped.

    content: all that the arrays depend on beside the store. make: gets a folder for files
    `store-NAME.npy` of fields of the store. empty: the data set without documents. build: make it if
    the index is missing and no other process does (one rank per node). Raises RecipeError.
    """
    assert store.folder is not None
    folder = store.folder / f"index-{digest_of([_FORMAT, *content])}"
    if store_problem(folder) and not os.access(store.folder, os.W_OK):
        return make(None)

    def pack(scratch: Path, lock: Ownership) -> None:
        _build(folder, scratch, store, make)

    build_once(folder, pack, "pack", build=build)
    return _load(folder, store, empty)


def _build(
    folder: Path,
    scratch: Path,
    store: TokenStore,
    make: Callable[[Path | None], SequenceDataset],
) -> None:
    logger.info(f"packing {store.documents:,} documents")
    started = time.monotonic()
    try:
        for left in folder.parent.glob(f".{folder.name}-*"):  # of a process that was killed
            shutil.rmtree(left, ignore_errors=True)
        scratch.mkdir()
        dataset = make(scratch)
        for name, array in _arrays(dataset, store).items():
            if not (file := scratch / f"{name}.npy").exists():
                write_array(file, [array], dtype=array.dtype, length=len(array))
        sizes = {file.name: file.stat().st_size for file in scratch.iterdir()}
        known, new = store.fingerprint, dataset.store.fingerprint
        meta: dict[str, Any] = {"sizes": sizes}
        meta["fingerprint"] = {key: new[key] for key in new if new[key] != known.get(key)}
        meta["stream"] = isinstance(dataset.sequences, Stream)
        meta["sequences"] = _values(dataset.sequences, int)
        (scratch / "meta.json").write_text(json.dumps(meta), encoding="utf-8")
        commit(scratch, folder)
        logger.info(f"packed in {time.monotonic() - started:.1f} s")
    except OSError as error:
        if not folder.is_dir():  # no process took over the lock, and was faster
            raise cache_error(error, folder.parent) from None
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _values(of: Packed | TokenStore, kind: type) -> dict[str, Any]:
    """The fields with values of a type."""
    values = {field.name: getattr(of, field.name) for field in fields(of)}
    return {name: value for name, value in values.items() if isinstance(value, kind)}


def _arrays(dataset: SequenceDataset, store: TokenStore) -> dict[str, npt.NDArray[Any]]:
    """The arrays that the store does not have, by the names of their files."""
    own = store.offsets, dataset.store.offsets
    arrays = {
        f"sequences-{name}": array
        for name, array in _values(dataset.sequences, np.ndarray).items()
        if not any(array is each for each in own)
    }
    for name, array in _values(dataset.store, np.ndarray).items():
        if array is not getattr(store, name):
            arrays[f"store-{name}"] = array
    if dataset.documents is not None:
        arrays["documents"] = dataset.documents
    return arrays


def _load(folder: Path, store: TokenStore, empty: SequenceDataset) -> SequenceDataset:
    meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
    names = [name.removesuffix(".npy") for name in meta["sizes"]]

    def mapped(prefix: str) -> dict[str, Any]:
        wanted = [name for name in names if name.startswith(prefix)]
        return {name.removeprefix(prefix): map_array(folder / f"{name}.npy") for name in wanted}

    if copied := mapped("store-"):  # the documents that are held out
        store = replace(store, **copied, skipped=[])
    store = replace(store, fingerprint=store.fingerprint | meta["fingerprint"])
    arrays, counts = mapped("sequences-"), meta["sequences"]
    sequences: Packed
    if meta["stream"]:
        sequences = Stream(**{"offsets": store.offsets} | arrays, **counts)
    else:
        sequences = Sequences(**arrays, **counts)
    documents = map_array(folder / "documents.npy") if "documents" in names else None
    return replace(empty, store=store, sequences=sequences, documents=documents)
