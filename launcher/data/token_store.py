"""Tokenized documents on disk, memory-mapped and shared by all processes that see the cache.

A store is a folder: `ids.bin` (int32, all documents one after another), `offsets.npy` (documents +
1), `labels.bin` if targets may differ from the ids, `classes.npy` for classification, `meta.json`.
It is written to a scratch folder and then renamed, so a store is always complete.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from launcher.data.encoder import Encoded, Encoder, make_encoder
from launcher.data.sources import Part, find_parts, read_all
from launcher.data.store_lock import Owner, locked, poll, remove_ended, writing
from launcher.data.tokenization import tokenize
from launcher.errors import RecipeError
from launcher.models.attention import Masking
from launcher.recipe import schema
from launcher.recipe.hub import load_data_set

logger = logging.getLogger(__name__)

_FORMAT = 4


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


@dataclass(frozen=True)
class TokenStore:
    """Memory-mapped documents."""

    ids: npt.NDArray[np.int32]
    """(tokens,)."""
    labels: npt.NDArray[np.int32] | None
    """(tokens,): each token as a target; None: the ids."""
    offsets: npt.NDArray[np.int64]
    """Start of each document, and the end: (documents + 1,)."""
    largest_id: int = -1
    classes: npt.NDArray[np.int32] | None = None
    """kind classification: (documents,)."""
    trained: int | None = None
    """Tokens that are a target."""
    skipped: list[dict[str, str]] = field(default_factory=list)
    """`where` and `problem` of the rows that were skipped (on_error: skip)."""
    folder: Path | None = None
    fingerprint: dict[str, Any] = field(default_factory=dict)
    """For checkpoints, to detect changed data: `files` (bytes by name; rows of a hub data set),
    `documents`, `tokens`, and checksums of the `content`, `tokenizer` and `chat_template`."""

    @property
    def documents(self) -> int:
        return len(self.offsets) - 1


def open_store(
    patterns: tuple[str, ...],
    data: schema.Data,
    *,
    tokenizer: str | None,
    model: ModelInputs | None = None,
    validation: bool = False,
    build: bool,
    refresh: bool = False,
) -> TokenStore:
    """The tokenized documents of `patterns`, from the cache or tokenized now.

    tokenizer: a folder, a hub id or `bytes`; None for kind tokens.
    validation: which split of a hub data set to use if its id names none.
    build: tokenize if the store is missing and no other process does (one rank per node). Other
    ranks wait; if the building rank fails, its job ends them.
    refresh: load hub data sets again. Without it a run keeps the version that was read first.
    Raises RecipeError if a file or row cannot be used, or does not fit the model.
    """
    encoder = make_encoder(data.kind, data, tokenizer=tokenizer)
    parts = find_parts(patterns, kind=data.kind, validation=validation)
    entry = _Entry(parts, encoder, cache_folder(data.cache), data.on_error)
    if not build:
        for _ in poll(lambda: "the node's first rank"):
            if entry.ready():
                break
    elif refresh or not entry.ready():
        with locked(entry.lock, lambda: not refresh and entry.ready()) as owner:
            if owner is not None and (refresh or not entry.ready()):
                entry.pin_hub_data_sets()
                if not entry.ready():
                    entry.build(owner, data.processes)
    store = entry.load()
    model = model or ModelInputs()
    classes = 0 if store.classes is None else int(store.classes.max()) + 1
    too_large = model.vocabulary is not None and store.largest_id >= model.vocabulary
    if too_large or (model.classes is not None and classes > model.classes):
        # A store does not know where its documents came from: read the rows again
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


def cache_folder(cache: str | None) -> Path:
    """The folder of all stores. cache: data.cache."""
    if cache is not None:
        return Path(cache)
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "launcher"


@dataclass(frozen=True)
class _Entry:
    """A store's place in the cache. Its name follows from all that its content depends on."""

    parts: list[Part]
    encoder: Encoder
    cache: Path
    on_error: str

    @property
    def _hub(self) -> list[Part]:
        return [part for part in self.parts if part.form == "hub"]

    @cached_property
    def _files(self) -> dict[Part, Any]:
        return {part: _file_identity(part) for part in self.parts if part.form != "hub"}

    def _name(self, hub: dict[Part, Any]) -> str:
        parts = [(self._files | hub)[part] for part in self.parts]
        return _digest([_FORMAT, self.encoder.identity(), self.on_error, parts])

    @property
    def lock(self) -> Path:
        """Known before a hub data set is loaded."""
        return self.cache / f".{self._name({part: part.name for part in self._hub})}.lock"

    @property
    def folder(self) -> Path | None:
        """None: a hub data set was never loaded."""
        pins = {part: self._pin(part) for part in self._hub}
        return None if None in pins.values() else self.cache / self._name(pins)

    def ready(self) -> bool:
        return self.folder is not None and self.folder.is_dir()

    def load(self) -> TokenStore:
        folder = self.folder
        assert folder is not None
        labels, classes = folder / "labels.bin", folder / "classes.npy"
        meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
        pins = {part: self._pin(part) for part in self._hub}
        files = {part.name: (pins.get(part) or {"rows": part.size})["rows"] for part in self.parts}
        counts = {name: meta[name] for name in ("documents", "tokens", "content")}
        return TokenStore(
            ids=np.memmap(folder / "ids.bin", dtype=np.int32, mode="r"),
            labels=np.memmap(labels, dtype=np.int32, mode="r") if labels.exists() else None,
            offsets=np.load(folder / "offsets.npy"),
            largest_id=meta["largest_id"],
            classes=np.load(classes) if classes.exists() else None,
            trained=meta["trained"],
            skipped=meta["skipped"],
            folder=folder,
            fingerprint={"files": files, **self.encoder.fingerprint(), **counts},
        )

    def build(self, owner: Owner, processes: int | None) -> None:
        """Tokenizes into a scratch folder, which becomes the store."""
        size = sum(part.size for part in self._files) / 2**20
        names = [f"{len(self._files)} files ({size:.1f} MiB)"] if self._files else []
        logger.info("tokenizing " + ", ".join(names + [part.name for part in self._hub]))
        folder, scratch = self.folder, owner.scratch
        assert folder is not None
        with writing(self.cache):
            remove_ended(self.cache)
            scratch.mkdir()
        meta = tokenize(
            scratch, self.parts, self.encoder, on_error=self.on_error, processes=processes
        )
        text = json.dumps(
            {"kind": self.encoder.kind, "files": [part.name for part in self.parts], **meta}
        )
        (scratch / "meta.json").write_text(text, encoding="utf-8")
        if (scratch / "blocks").exists():
            (scratch / "blocks").rmdir()
        try:
            scratch.rename(folder)
        except OSError:
            if not folder.is_dir():  # else another process was first
                raise

    # The version of a hub data set: later starts need neither the hub nor `datasets`

    def _pin_file(self, part: Part) -> Path:
        return self.cache / "hub" / f"{_digest([part.name, part.validation])}.json"

    def _pin(self, part: Part) -> dict[str, Any] | None:
        """None: the data set was never loaded."""
        file = self._pin_file(part)
        return dict(json.loads(file.read_text())) if file.exists() else None

    def pin_hub_data_sets(self) -> None:
        """Loads the hub data sets and notes their versions."""
        for part in self._hub:
            rows = load_data_set(part.name, validation=part.validation)
            about = {"name": part.name, "fingerprint": rows._fingerprint, "rows": len(rows)}
            file = self._pin_file(part)
            scratch = file.with_suffix(f".{os.getpid()}")
            with writing(self.cache):
                file.parent.mkdir(parents=True, exist_ok=True)
                scratch.write_text(json.dumps(about))
                scratch.replace(file)


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:24]


def _file_identity(part: Part) -> list[Any]:
    """Changes with the file's content, and if an empty file becomes an error by being named."""
    state = os.stat(part.name)
    path = str(Path(part.name).resolve())
    return [path, state.st_size, state.st_mtime_ns, part.named and not state.st_size]
