"""Tokenized documents on disk, memory-mapped: made once, shared by all processes of a node, found again at the next start.

A store is a folder: `ids.npy` (all documents behind one another), `labels.npy` where a token's target may differ from
itself, `classes.npy` where documents have a label, `offsets.npy` (documents + 1), `skipped.jsonl` and `meta.json`. It is
written beside its place and renamed into it, so what has the name is whole.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from launcher.data.encoder import Encoded, make_encoder
from launcher.data.making import make_store
from launcher.data.sources import Part, find_parts, read_all
from launcher.errors import RecipeError
from launcher.hub import load_data_set
from launcher.recipe import schema

_FORMAT = 3
_SCRATCH = ".making-"
_YOUNG_SECONDS = 60.0


@dataclass(frozen=True)
class TokenStore:
    """Memory-mapped documents."""

    ids: npt.NDArray[np.int32]
    """All tokens, (tokens,)."""
    labels: npt.NDArray[np.int32] | None
    """The same shape: what each token counts as when it is the one to be predicted; None: itself."""
    offsets: npt.NDArray[np.int64]
    """Where each document starts, and the end: (documents + 1,)."""
    files: int
    largest_id: int
    kind: schema.DataKind = "text"
    classes: npt.NDArray[np.int32] | None = None
    """kind classification: each document's label, (documents,)."""
    trained: int | None = None
    """Tokens that are a target; None: all but each document's first."""
    empty: int = 0
    """Rows without text, which were left out."""
    skipped: list[dict[str, str]] = field(default_factory=list)
    """Rows that cannot be used and were left out (on_error: skip): `where` and `problem` of each."""
    folder: Path | None = None
    """Where it lies."""
    fingerprint: dict[str, Any] = field(default_factory=dict)
    """What a checkpoint keeps of the data: `files` (bytes by name; of a hub data set: rows), `documents`, `tokens`, a checksum of the
    `content` (None: made by an older version), and that of `tokenizer` and `chat_template`."""

    @property
    def documents(self) -> int:
        """Number of documents."""
        return len(self.offsets) - 1


def open_store(
    *,
    kind: schema.DataKind,
    patterns: tuple[str, ...],
    data: schema.Data,
    tokenizer: str | None,
    validation: bool = False,
    vocabulary: int | None = None,
    num_labels: int | None = None,
    build: bool,
    report: Callable[[str], None],
    refresh: bool = False,
) -> TokenStore:
    """The tokenized documents of `patterns`, from the cache or made now.

    data: its columns, chat_template, labels, on_error, processes and cache are read here; kind and patterns are given
    beside it, since the parts of a mixture have their own.
    tokenizer: a folder, a hub id or `bytes`; None: kind tokens.
    validation: which split of a hub data set is meant where none is named.
    vocabulary, num_labels: rows of the model's embedding, and its classes; an id or label beyond is refused here, not on
    the GPU.
    build: make the store where it is missing (one process a node); the others wait until it is there. Should the one that
    builds fail, then whoever started them ends those that wait (failures.failing_together, torchrun).
    report: told what takes long.
    refresh: ask the hub for its data sets anew. A data set once read stays the one that was read, so that a run does not
    change because the hub does.
    Raises RecipeError where a file or row cannot be used.
    """
    encoder = make_encoder(kind, data, tokenizer=tokenizer)
    parts = find_parts(patterns, kind=kind, validation=validation)
    cache = cache_folder(data.cache)
    how = [_FORMAT, encoder.identity(), data.on_error]

    files = {part: _file_identity(part) for part in parts if part.form != "hub"}

    def place() -> Path | None:
        what = [files[part] if part in files else _hub_identity(part, cache) for part in parts]
        return None if None in what else cache / hashlib.sha256(json.dumps([*how, what]).encode()).hexdigest()[:24]

    folder = place()
    if build and (refresh or folder is None or not folder.is_dir()):
        for part in parts:
            if part.form == "hub":
                _pin(part, cache)
        folder = place()
        assert folder is not None
        if not folder.is_dir():
            files_size = f"{len(files)} files ({sum(part.size for part in files) / 2**20:.1f} MiB)" if files else ""
            report("tokenizing " + ", ".join(filter(None, [files_size, *(part.name for part in parts if part.form == "hub")])))
            with _scratch(cache) as scratch:
                counts = make_store(scratch, parts, encoder, on_error=data.on_error, processes=data.processes, report=report)
                meta = {"format": _FORMAT, "kind": kind, "files": len(parts), "patterns": patterns, "tokenizer": tokenizer, **counts}
                (scratch / "meta.json").write_text(json.dumps(meta))
                _publish(scratch, folder)
    elif not build:
        folder = _wait_for(place, report)
    assert folder is not None
    sizes = {part.name: part.size if part in files else json.loads(_pin_file(part, cache).read_text())["rows"] for part in parts}
    store = _load(folder, fingerprint={"files": sizes, **encoder.fingerprint()})
    wild = vocabulary is not None and store.largest_id >= vocabulary
    wrong = num_labels is not None and store.classes is not None and int(store.classes.max()) >= num_labels
    if wild or wrong:  # the store does not know where its rows came from
        for encoded in encoder.encode_rows(read_all(parts, column=encoder.text_column)):
            _check_range(encoded, vocabulary=vocabulary, num_labels=num_labels)
    return store


def _check_range(encoded: Encoded, *, vocabulary: int | None, num_labels: int | None) -> None:
    ids = [part for part in (encoded.ids, encoded.labels) if part is not None and part.size]
    largest = max((int(part.max()) for part in ids), default=-1)
    if vocabulary is not None and largest >= vocabulary:
        raise RecipeError(
            f"{encoded.row.where}: token id {largest} is beyond the model's vocabulary of {vocabulary} (model.config.vocab_size)"
        )
    if num_labels is not None and encoded.category is not None and encoded.category >= num_labels:
        raise RecipeError(
            f"{encoded.row.where}: label {encoded.category}, but the model has {num_labels} classes, 0 to {num_labels - 1} "
            "(model.num_labels)"
        )


def _load(folder: Path, *, fingerprint: dict[str, Any]) -> TokenStore:
    meta = json.loads((folder / "meta.json").read_text())
    labels, classes, skipped_file = folder / "labels.npy", folder / "classes.npy", folder / "skipped.jsonl"
    skipped = [json.loads(line) for line in skipped_file.read_text(encoding="utf-8").splitlines()] if skipped_file.exists() else []
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
        skipped=skipped,
        folder=folder,
        fingerprint=fingerprint | {name: meta.get(name) for name in ("documents", "tokens", "content")},
    )


def cache_folder(cache: str | None) -> Path:
    """Where stores are kept."""
    if cache is not None:
        return Path(cache)
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "launcher"


# What a store is made of


def _file_identity(part: Part) -> list[Any]:
    """Changes with the content of the file, and where an empty one becomes a problem by being named itself."""
    state = os.stat(part.name)
    return [str(Path(part.name).resolve()), state.st_size, state.st_mtime_ns, part.named and not state.st_size]


def _hub_identity(part: Part, cache: Path) -> list[Any] | None:
    """None: the data set was not read yet."""
    pin = _pin_file(part, cache)
    return ["hub", part.name, json.loads(pin.read_text())["fingerprint"]] if pin.exists() else None


def _pin_file(part: Part, cache: Path) -> Path:
    return cache / "hub" / (hashlib.sha256(json.dumps([part.name, part.validation]).encode()).hexdigest()[:24] + ".json")


def _pin(part: Part, cache: Path) -> None:
    """Loads a hub data set and notes which one it is: later starts need neither the hub nor `datasets` to know."""
    rows = load_data_set(part.name, validation=part.validation)
    pin = _pin_file(part, cache)
    with _writing(cache):
        pin.parent.mkdir(parents=True, exist_ok=True)
        scratch = pin.with_suffix(f".{os.getpid()}")
        scratch.write_text(json.dumps({"name": part.name, "fingerprint": rows._fingerprint, "rows": len(rows)}))
        scratch.replace(pin)


# Places


def _wait_for(place: Callable[[], Path | None], report: Callable[[str], None]) -> Path:
    started = told = time.monotonic()
    while (folder := place()) is None or not folder.is_dir():
        time.sleep(0.05)
        if time.monotonic() - told > 60:
            told = time.monotonic()
            report(f"waiting for the node's first rank to tokenize ({told - started:.0f} s)")
    return folder


@contextmanager
def _writing(cache: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise RecipeError(f"data.cache: {cache} cannot be written to: {error.strerror}") from None


@contextmanager
def _scratch(cache: Path) -> Iterator[Path]:
    """A folder to write a store in, gone afterwards unless it was renamed. Those of processes that are dead are removed.

    Its lock file is locked for as long as it is in use: what a killed process held, the kernel lets go.
    """
    with _writing(cache):
        cache.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(cache)
        folder = Path(tempfile.mkdtemp(prefix=_SCRATCH, dir=cache))
        lock = (folder / "lock").open("w")
    try:
        with suppress(OSError):  # a file system without locks: then nothing is taken for abandoned either
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield folder
    finally:
        lock.close()
        shutil.rmtree(folder, ignore_errors=True)


def _remove_abandoned(cache: Path) -> None:
    for folder in cache.glob(_SCRATCH + "*"):
        with suppress(OSError):
            if time.time() - folder.stat().st_mtime < _YOUNG_SECONDS:
                continue  # its owner may not have locked it yet
            if not (folder / "lock").exists():
                shutil.rmtree(folder)
                continue
            with (folder / "lock").open("r+") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder)


def _publish(scratch: Path, folder: Path) -> None:
    for rest in ("arrow", "problems"):
        shutil.rmtree(scratch / rest, ignore_errors=True)
    (scratch / "lock").unlink(missing_ok=True)
    try:
        scratch.rename(folder)
    except OSError:  # another node was first
        if not folder.is_dir():
            raise
