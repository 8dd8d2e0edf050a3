"""Tokenized documents on disk, memory-mapped and shared by all processes that see the cache.

A store is a folder: `ids.npy` (all documents, one after another), `offsets.npy` (documents + 1),
`labels.npy` if targets may differ from the ids, `classes.npy` for classification, `skipped.jsonl`
and `meta.json`. It is written to a scratch folder and then renamed, so a store is always complete.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from launcher.data.encoder import Encoder, make_encoder
from launcher.data.sources import Part, find_parts, read_all
from launcher.data.store_lock import Lock, Owner, locked, poll, writing
from launcher.data.tokenization import tokenize
from launcher.errors import RecipeError
from launcher.recipe import schema
from launcher.recipe.hub import load_data_set

if TYPE_CHECKING:
    from launcher.models.attention import Masking

logger = logging.getLogger(__name__)

_FORMAT = 3
_SCRATCH = ".making-"


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
    files: int
    largest_id: int
    kind: schema.DataKind = "text"
    classes: npt.NDArray[np.int32] | None = None
    """kind classification: (documents,)."""
    trained: int | None = None
    """Tokens that are a target; None: all but the first of each document."""
    empty: int = 0
    """Rows without text; they are left out."""
    skipped: list[dict[str, str]] = field(default_factory=list)
    """`where` and `problem` of the rows that were skipped (on_error: skip)."""
    folder: Path | None = None
    fingerprint: dict[str, Any] = field(default_factory=dict)
    """For checkpoints, to detect changed data: `files` (bytes by name; rows of a hub data set),
    `documents`, `tokens`, and checksums of the `content` (None in stores of older versions), the
    `tokenizer` and the `chat_template`."""

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
                for part in entry.hub:
                    _pin(part, entry.cache)
                if not entry.ready():
                    about = {"kind": data.kind, "patterns": patterns, "tokenizer": tokenizer}
                    _build(entry, owner, about, processes=data.processes)
    store = entry.load()
    model = model or ModelInputs()
    classes = 0 if store.classes is None else int(store.classes.max()) + 1
    too_large = model.vocabulary is not None and store.largest_id >= model.vocabulary
    if too_large or (model.classes is not None and classes > model.classes):
        _raise_out_of_range(parts, encoder, model)
    return store


def _raise_out_of_range(parts: list[Part], encoder: Encoder, model: ModelInputs) -> None:
    """Reads the rows again: a store does not know where they came from."""
    for encoded in encoder.encode_rows(read_all(parts, column=encoder.text_column)):
        arrays = [
            array for array in (encoded.ids, encoded.labels) if array is not None and array.size
        ]
        largest = max((int(array.max()) for array in arrays), default=-1)
        if model.vocabulary is not None and largest >= model.vocabulary:
            raise RecipeError(
                f"{encoded.row.where}: token id {largest} is beyond the model's vocabulary of "
                f"{model.vocabulary} (model.config.vocab_size)"
            )
        category = encoded.category
        if model.classes is not None and category is not None and category >= model.classes:
            raise RecipeError(
                f"{encoded.row.where}: label {category}, but the model has {model.classes} "
                f"classes, 0 to {model.classes - 1} (model.num_labels)"
            )


def cache_folder(cache: str | None) -> Path:
    """The folder of all stores. cache: data.cache."""
    if cache is not None:
        return Path(cache)
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "launcher"


# Names in the cache


class _Entry:
    """A store's place in the cache. Its name follows from all that its content depends on."""

    def __init__(self, parts: list[Part], encoder: Encoder, cache: Path, on_error: str) -> None:
        self.parts, self.encoder, self.cache, self.on_error = parts, encoder, cache, on_error
        self.hub = [part for part in parts if part.form == "hub"]
        self._files = {part: _file_identity(part) for part in parts if part.form != "hub"}
        self._how = [_FORMAT, encoder.identity(), on_error]

    def _name(self, what: list[Any]) -> str:
        return _digest([*self._how, what])

    @property
    def lock(self) -> Path:
        """Known before a hub data set is loaded."""
        return self.cache / f".{self._name([self._files.get(p, p.name) for p in self.parts])}.lock"

    @property
    def folder(self) -> Path | None:
        """None: a hub data set was never loaded."""
        pins = {part: _read_pin(part, self.cache) for part in self.hub}
        if None in pins.values():
            return None
        hub = {part: ["hub", part.name, pin["fingerprint"]] for part, pin in pins.items() if pin}
        return self.cache / self._name([(self._files | hub)[part] for part in self.parts])

    def ready(self) -> bool:
        return self.folder is not None and self.folder.is_dir()

    def load(self) -> TokenStore:
        folder = self.folder
        assert folder is not None
        pins = {part: _read_pin(part, self.cache) for part in self.hub}
        sizes = {part.name: (pins.get(part) or {"rows": part.size})["rows"] for part in self.parts}
        meta = json.loads((folder / "meta.json").read_text())
        labels, classes, skipped = (
            folder / name for name in ("labels.npy", "classes.npy", "skipped.jsonl")
        )
        lines = skipped.read_text(encoding="utf-8").splitlines() if skipped.exists() else []
        return TokenStore(
            ids=np.load(folder / "ids.npy", mmap_mode="r"),
            labels=np.load(labels, mmap_mode="r") if labels.exists() else None,
            offsets=np.load(folder / "offsets.npy"),
            files=meta["files"],
            largest_id=meta["largest_id"],
            kind=meta["kind"],
            classes=np.load(classes) if classes.exists() else None,
            empty=meta["empty"],
            trained=meta["trained"],
            skipped=[json.loads(line) for line in lines],
            folder=folder,
            fingerprint={"files": sizes}
            | self.encoder.fingerprint()
            | {name: meta.get(name) for name in ("documents", "tokens", "content")},
        )


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:24]


def _file_identity(part: Part) -> list[Any]:
    """Changes with the file's content, and if an empty file becomes an error by being named."""
    state = os.stat(part.name)
    return [
        *(str(Path(part.name).resolve()), state.st_size, state.st_mtime_ns),
        part.named and not state.st_size,
    ]


def _pin_file(part: Part, cache: Path) -> Path:
    return cache / "hub" / f"{_digest([part.name, part.validation])}.json"


def _read_pin(part: Part, cache: Path) -> dict[str, Any] | None:
    """None: the data set was never loaded."""
    pin = _pin_file(part, cache)
    return dict(json.loads(pin.read_text())) if pin.exists() else None


def _pin(part: Part, cache: Path) -> None:
    """Loads a hub data set and notes its version. Later starts need neither hub nor `datasets`."""
    rows = load_data_set(part.name, validation=part.validation)
    pin = _pin_file(part, cache)
    with writing(cache):
        pin.parent.mkdir(parents=True, exist_ok=True)
        scratch = pin.with_suffix(f".{os.getpid()}")
        about = {"name": part.name, "fingerprint": rows._fingerprint, "rows": len(rows)}
        scratch.write_text(json.dumps(about))
        scratch.replace(pin)


def _build(entry: _Entry, owner: Owner, about: dict[str, Any], *, processes: int | None) -> None:
    """Tokenizes into a scratch folder, which becomes the store. about: for meta.json."""
    files = [part for part in entry.parts if part.form != "hub"]
    size = sum(part.size for part in files) / 2**20
    names = [f"{len(files)} files ({size:.1f} MiB)"] if files else []
    logger.info("tokenizing " + ", ".join(names + [part.name for part in entry.hub]))
    folder = entry.folder
    assert folder is not None
    with _scratch(entry.cache, owner) as scratch:
        counts = tokenize(
            scratch, entry.parts, entry.encoder, on_error=entry.on_error, processes=processes
        )
        meta = {"format": _FORMAT, "files": len(entry.parts), **about, **counts}
        (scratch / "meta.json").write_text(json.dumps(meta))
        shutil.rmtree(scratch / "blocks", ignore_errors=True)
        (scratch / "lock").unlink(missing_ok=True)
        try:
            scratch.rename(folder)
        except OSError:
            if not folder.is_dir():  # else another node was first
                raise


# Scratch folders


@contextmanager
def _scratch(cache: Path, owner: Owner) -> Iterator[Path]:
    """A folder for a new store, removed unless it was renamed. Also removes abandoned ones."""
    with writing(cache):
        _remove_abandoned(cache)
        folder = Path(tempfile.mkdtemp(prefix=_SCRATCH, dir=cache))
        owner.create(folder / "lock")
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _remove_abandoned(cache: Path) -> None:
    for path in [*cache.glob(".*.lock"), *cache.glob(_SCRATCH + "*")]:
        inside = path / "lock"
        lock = Lock(inside if inside.exists() else path)
        lock.read()
        if lock.old():
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
