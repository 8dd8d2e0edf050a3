"""Tokenized documents on disk, memory-mapped and shared by all processes that see the cache.

A store is a folder: `ids.bin` (int32, all documents one after another), `offsets.npy` (documents +
1), `labels.bin` if targets may differ from the ids, `classes.npy` for classification, `meta.json`.
One process tokenizes, with a lock like that of a run folder; all others, on any node and of any
job, wait. It writes to a scratch folder and then renames it, so a store is always complete.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from launcher.data.encoder import Encoded, Encoder, make_encoder
from launcher.data.sources import Part, find_parts, read_all
from launcher.data.tokenization import TokenStore, tokenize
from launcher.distributed.environment import Environment, cache_folder
from launcher.errors import RecipeError
from launcher.models.attention import Masking
from launcher.recipe import schema
from launcher.reliability.lock import OwnedError, Ownership, current_owner

logger = logging.getLogger(__name__)

_FORMAT = 4
_POLL_SECONDS = 5.0
"""The longest pause between two checks of the cache: a thousand ranks may wait."""
_LOGGED_SECONDS = 60.0


@dataclass(frozen=True)
class ModelInputs:
    """What the data depends on of the model."""

    vocabulary: int | None = None
    """Rows of the embedding. A larger token id is an error here, not on the GPU."""
    classes: int | None = None
    """Of a sequence classifier."""
    padding: int = 0
    """Padding id."""
    masking: Masking = "mask"
    """How attention stays inside a packed document."""


def open_store(
    patterns: tuple[str, ...],
    data: schema.Data,
    *,
    tokenizer: str | None,
    model: ModelInputs | None = None,
    validation: bool = False,
    build: bool,
) -> TokenStore:
    """The tokenized documents of `patterns`, from the cache or tokenized now.

    A hub data set keeps the version that was tokenized first: starts from the cache do not load it.

    tokenizer: a folder, a hub id or `bytes`; None for kind tokens.
    validation: which split of a hub data set to use if its id names none.
    build: tokenize if the store is missing and no other process does (one rank per node). Other
    ranks wait; if the building rank fails, its job ends them.
    Raises RecipeError if a file or row cannot be used, or does not fit the model.
    """
    encoder = make_encoder(data.kind, data, tokenizer=tokenizer)
    parts = find_parts(patterns, kind=data.kind, validation=validation)
    content = [_FORMAT, encoder.identity(), data.on_error, [_identity(part) for part in parts]]
    name = hashlib.sha256(json.dumps(content).encode()).hexdigest()[:24]
    folder = cache_folder(data.cache) / name
    lock = _wait(folder, build=build)
    if lock is not None:
        try:
            if not folder.is_dir():
                _build(folder, folder.with_name(f".{name}-{lock.name}"), parts, encoder, data)
        finally:
            lock.release()
    store = _load(folder, parts, encoder)
    model = model or ModelInputs()
    classes = 0 if store.classes is None else int(store.classes.max()) + 1
    too_large = model.vocabulary is not None and store.largest_id >= model.vocabulary
    if too_large or (model.classes is not None and classes > model.classes):
        # A store does not record the origin of its documents: read the rows again
        for encoded in encoder.encode_rows(read_all(parts, column=encoder.text_column)):
            check_range(encoded, model)
    return store


def check_range(encoded: Encoded, model: ModelInputs) -> None:
    """Raises RecipeError if the model has no such token or class."""
    arrays = [array for array in (encoded.ids, encoded.labels) if array is not None]
    largest = max((int(array.max(initial=-1)) for array in arrays), default=-1)
    if model.vocabulary is not None and largest >= model.vocabulary:
        raise RecipeError(
            f"{encoded.row.where}: token id {largest} is beyond the model's vocabulary of "
            f"{model.vocabulary} (model.config.vocab_size)"
        )
    if model.classes is not None and (encoded.category or 0) >= model.classes:
        raise RecipeError(
            f"{encoded.row.where}: label {encoded.category}, but the model has {model.classes} "
            f"classes, 0 to {model.classes - 1} (model.num_labels)"
        )


def _identity(part: Part) -> list[Any]:
    """Changes with a file's content."""
    if part.form == "hub":
        return [part.name, part.validation]
    state = os.stat(part.name)
    return [str(Path(part.name).resolve()), state.st_size, state.st_mtime_ns]


def _wait(folder: Path, *, build: bool) -> Ownership | None:
    """Waits for the store, or with `build` for the lock to build it; None: the store is ready."""
    lock = folder.parent / "locks" / folder.name
    started = logged = time.monotonic()
    if build and not folder.is_dir():
        try:
            lock.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            text = f"data.cache: {folder.parent} cannot be written to: {error.strerror}"
            raise RecipeError(text) from None
    while not folder.is_dir():
        owner = current_owner(lock) if build else None
        if build and (owner is None or not owner[1]):  # free, or its process may have ended
            with contextlib.suppress(OwnedError):
                return Ownership.take(lock, Environment())
        now = time.monotonic()
        if now - logged > _LOGGED_SECONDS:
            logged, name = now, owner[0].describe() if owner else "the node's first rank"
            logger.info(f"waiting for {name} to tokenize ({now - started:.0f} s)")
        time.sleep(min(_POLL_SECONDS, max(0.05, (now - started) / 4)))
    return None


def _build(
    folder: Path, scratch: Path, parts: list[Part], encoder: Encoder, data: schema.Data
) -> None:
    """Tokenizes into a scratch folder, which becomes the store."""
    size = sum(part.size for part in parts) / 2**20
    logger.info(f"tokenizing {len(parts)} files ({size:.1f} MiB)")
    for leftover in folder.parent.glob(f".{folder.name}-*"):  # of a process that was killed
        shutil.rmtree(leftover, ignore_errors=True)
    try:
        scratch.mkdir()
        meta = tokenize(scratch, parts, encoder, on_error=data.on_error, processes=data.processes)
        about = {"kind": encoder.kind, "files": [part.name for part in parts]}
        (scratch / "meta.json").write_text(json.dumps(about | meta), encoding="utf-8")
        scratch.rename(folder)
    except OSError:
        if not folder.is_dir():  # else a process took over the lock, and was faster
            raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _load(folder: Path, parts: list[Part], encoder: Encoder) -> TokenStore:
    labels, classes = folder / "labels.bin", folder / "classes.npy"
    meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
    files = {part.name: part.size for part in parts}
    counts = {name: meta[name] for name in ("documents", "tokens", "content")}
    return TokenStore(
        ids=np.memmap(folder / "ids.bin", dtype=np.int32, mode="r"),
        labels=np.memmap(labels, dtype=np.int32, mode="r") if labels.exists() else None,
        offsets=np.load(folder / "offsets.npy"),
        largest_id=meta["largest_id"],
        classes=np.load(classes) if classes.exists() else None,
        trained=meta["trained"],
        skipped=meta["skipped"],
        empty=meta["empty"],
        folder=folder,
        fingerprint={"files": files, **encoder.fingerprint(), **counts},
    )
