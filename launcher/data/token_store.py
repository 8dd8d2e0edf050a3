"""Tokenized documents on disk, memory-mapped: made once, shared by all processes that see the cache, found again at the next start.

A store is a folder: `ids.npy` (all documents behind one another), `labels.npy` where a token's target may differ from
itself, `classes.npy` where documents have a label, `offsets.npy` (documents + 1), `skipped.jsonl` and `meta.json`. It is
written beside its place and renamed into it, so what has the name is whole.

Of all processes that could make a store, on any node and of any job, the one that creates its lock file does; the others
wait. A lock file names its process and is touched every TOUCH_SECONDS. It counts as abandoned when that process has ended,
where this can be seen; on another machine, when it was not touched for STALE_SECONDS by this machine's clock. Kernel locks
are not used: some shared file systems hold them for one machine alone. Should two processes take over the same lock at
once, both tokenize, and the second one's store is dropped.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import socket
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from launcher.data.encoder import Encoded, make_encoder
from launcher.data.sources import Part, find_parts, read_all
from launcher.data.tokenization import make_store
from launcher.errors import RecipeError
from launcher.recipe import schema
from launcher.recipe.hub import load_data_set
from launcher.reliability.lock import process_start, this_machine

logger = logging.getLogger(__name__)

_FORMAT = 3
_SCRATCH = ".making-"
TOUCH_SECONDS = 10.0
STALE_SECONDS = 120.0
"""More than NFS keeps attributes of files (60 s by default)."""
LOOK_SECONDS = 5.0
"""Between two looks of a process that waits, at most: a thousand ranks may wait."""
_ABANDONED_SECONDS = 3600.0
"""What was not touched for so long by this machine's clock is removed: no clock is so wrong."""


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
    refresh: bool = False,
) -> TokenStore:
    """The tokenized documents of `patterns`, from the cache or made now.

    data: its columns, chat_template, labels, on_error, processes and cache are read here; kind and patterns are given
    beside it, since the parts of a mixture have their own.
    tokenizer: a folder, a hub id or `bytes`; None: kind tokens.
    validation: which split of a hub data set is meant where none is named.
    vocabulary, num_labels: rows of the model's embedding, and its classes; an id or label beyond is refused here, not on
    the GPU.
    build: make the store where it is missing, unless another process is making it (one rank a node). The other ranks only
    wait. If the one that builds fails, failures.failing_together or torchrun ends those of its job.
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
        return (
            None
            if None in what
            else cache / hashlib.sha256(json.dumps([*how, what]).encode()).hexdigest()[:24]
        )

    def ready() -> bool:
        folder = place()
        return folder is not None and folder.is_dir()

    if build and (refresh or not ready()):
        names = [
            files.get(part, part.name) for part in parts
        ]  # known before a hub data set is read
        lock = (
            cache / f".{hashlib.sha256(json.dumps([*how, names]).encode()).hexdigest()[:24]}.lock"
        )
        with _locked(lock, lambda: not refresh and ready()) as owner:
            if owner is not None and (refresh or not ready()):
                for part in parts:
                    if part.form == "hub":
                        _pin(part, cache)
                folder = place()
                assert folder is not None
                if not folder.is_dir():
                    files_size = (
                        f"{len(files)} files ({sum(part.size for part in files) / 2**20:.1f} MiB)"
                        if files
                        else ""
                    )
                    logger.info(
                        "tokenizing "
                        + ", ".join(
                            filter(
                                None,
                                [files_size, *(part.name for part in parts if part.form == "hub")],
                            )
                        )
                    )
                    with _scratch(cache, owner) as scratch:
                        counts = make_store(
                            scratch,
                            parts,
                            encoder,
                            on_error=data.on_error,
                            processes=data.processes,
                        )
                        meta = {
                            "format": _FORMAT,
                            "kind": kind,
                            "files": len(parts),
                            "patterns": patterns,
                            "tokenizer": tokenizer,
                            **counts,
                        }
                        (scratch / "meta.json").write_text(json.dumps(meta))
                        _publish(scratch, folder)
    elif not build:
        for _ in _looks(lambda: "the node's first rank"):
            if ready():
                break
    folder = place()
    assert folder is not None
    sizes = {
        part.name: part.size
        if part in files
        else json.loads(_pin_file(part, cache).read_text())["rows"]
        for part in parts
    }
    store = _load(folder, fingerprint={"files": sizes, **encoder.fingerprint()})
    wild = vocabulary is not None and store.largest_id >= vocabulary
    wrong = (
        num_labels is not None
        and store.classes is not None
        and int(store.classes.max()) >= num_labels
    )
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
    labels, classes, skipped_file = (
        folder / "labels.npy",
        folder / "classes.npy",
        folder / "skipped.jsonl",
    )
    skipped = (
        [json.loads(line) for line in skipped_file.read_text(encoding="utf-8").splitlines()]
        if skipped_file.exists()
        else []
    )
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
        fingerprint=fingerprint
        | {name: meta.get(name) for name in ("documents", "tokens", "content")},
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
    return [
        str(Path(part.name).resolve()),
        state.st_size,
        state.st_mtime_ns,
        part.named and not state.st_size,
    ]


def _hub_identity(part: Part, cache: Path) -> list[Any] | None:
    """None: the data set was not read yet."""
    pin = _pin_file(part, cache)
    return ["hub", part.name, json.loads(pin.read_text())["fingerprint"]] if pin.exists() else None


def _pin_file(part: Part, cache: Path) -> Path:
    return (
        cache
        / "hub"
        / (
            hashlib.sha256(json.dumps([part.name, part.validation]).encode()).hexdigest()[:24]
            + ".json"
        )
    )


def _pin(part: Part, cache: Path) -> None:
    """Loads a hub data set and notes which one it is: later starts need neither the hub nor `datasets` to know."""
    rows = load_data_set(part.name, validation=part.validation)
    pin = _pin_file(part, cache)
    with _writing(cache):
        pin.parent.mkdir(parents=True, exist_ok=True)
        scratch = pin.with_suffix(f".{os.getpid()}")
        scratch.write_text(
            json.dumps({"name": part.name, "fingerprint": rows._fingerprint, "rows": len(rows)})
        )
        scratch.replace(pin)


# Places


def _looks(whom: Callable[[], str]) -> Iterator[None]:
    """Comes back to look again and again, after a quarter of the time waited so far, LOOK_SECONDS at most."""
    started = told = time.monotonic()
    while True:
        yield
        waited = time.monotonic() - started
        time.sleep(min(LOOK_SECONDS, max(0.05, waited / 4)))
        if time.monotonic() - told > 60:
            told = time.monotonic()
            logger.info(f"waiting for {whom()} to tokenize ({told - started:.0f} s)")


class _Owner:
    """This process's record in files that it touches until it is closed."""

    def __init__(self) -> None:
        record = {
            "host": socket.gethostname(),
            "machine": this_machine(),
            "pid": os.getpid(),
            "started": process_start(os.getpid()),
        }
        self.text = json.dumps(record | {"token": uuid.uuid4().hex})
        self._files: list[int] = []
        self._done = threading.Event()
        threading.Thread(target=self._touch, name="tokenization lock", daemon=True).start()

    def create(self, file: Path) -> bool:
        """False where the file is there already."""
        try:
            descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        except FileExistsError:
            return False
        os.write(descriptor, self.text.encode())
        os.fsync(descriptor)  # else NFS may show it empty
        self._files.append(descriptor)
        return True

    def holds(self, file: Path) -> bool:
        """Whether the file is the one that this process made."""
        with suppress(OSError):
            return bool(self._files) and file.read_text() == self.text
        return False

    def close(self) -> None:
        """Ends the touching; the files stay."""
        self._done.set()
        for descriptor in self._files:
            os.close(descriptor)

    def _touch(self) -> None:
        while not self._done.wait(TOUCH_SECONDS):
            for descriptor in list(
                self._files
            ):  # not by name: by now that may be another process's
                with suppress(OSError):
                    os.utime(descriptor)


class _Watched:
    """A file that another process made (`_Owner`)."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._seen: tuple[str, int] | None = None
        self._since = 0.0
        self._record: dict[str, Any] = {}

    def look(self) -> None:
        """Reads it anew. Opened, since NFS answers `stat` from its cache."""
        seen = None
        with suppress(OSError, UnicodeDecodeError), self._file.open() as stream:
            seen = stream.read(), os.fstat(stream.fileno()).st_mtime_ns
        if seen != self._seen:
            self._seen, self._since, self._record = seen, time.monotonic(), {}
            with suppress(ValueError, TypeError):
                self._record = dict(json.loads(seen[0])) if seen is not None else {}

    def describe(self) -> str:
        """For a message."""
        return f"process {self._record.get('pid', '?')} on {self._record.get('host', 'another machine')}"

    def abandoned(self) -> bool:
        """Whether its process has ended, or did not touch it while it was looked at."""
        return self._seen is not None and (
            self.ended() or (not self.local() and time.monotonic() - self._since > STALE_SECONDS)
        )

    def local(self) -> bool:
        """Whether its process can be looked for."""
        return self._record.get("machine") == this_machine()

    def ended(self) -> bool:
        """Whether its process was of this machine and is gone."""
        return self.local() and process_start(self._record["pid"]) != self._record["started"]


@contextmanager
def _locked(lock: Path, ready: Callable[[], bool]) -> Iterator[_Owner | None]:
    """With the lock taken: what it is taken by. None: no need, it became ready meanwhile."""
    owner, watched = _Owner(), _Watched(lock)
    try:
        with _writing(lock.parent):
            lock.parent.mkdir(parents=True, exist_ok=True)
            for _ in _looks(watched.describe):
                if ready():
                    break
                if owner.create(lock):
                    break
                watched.look()
                if watched.abandoned():
                    logger.info(f"{watched.describe()} has not finished tokenizing: taking over")
                    lock.unlink(missing_ok=True)
        yield owner if owner.holds(lock) else None
    finally:
        if owner.holds(lock):
            lock.unlink(missing_ok=True)
        owner.close()


@contextmanager
def _writing(cache: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise RecipeError(f"data.cache: {cache} cannot be written to: {error.strerror}") from None


@contextmanager
def _scratch(cache: Path, owner: _Owner) -> Iterator[Path]:
    """A folder to write a store in, gone afterwards unless it was renamed. What processes left that ended is removed."""
    with _writing(cache):
        _remove_abandoned(cache)
        folder = Path(tempfile.mkdtemp(prefix=_SCRATCH, dir=cache))
        owner.create(folder / "lock")
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _remove_abandoned(cache: Path) -> None:
    for lock in cache.glob(".*.lock"):
        if _is_old(lock):
            lock.unlink(missing_ok=True)
    for folder in cache.glob(_SCRATCH + "*"):
        lock = folder / "lock"
        if _is_old(lock if lock.exists() else folder):
            shutil.rmtree(folder, ignore_errors=True)


def _is_old(path: Path) -> bool:
    """Whether its process has ended, or did not touch it for very long."""
    watched = _Watched(path)
    watched.look()
    with suppress(OSError):
        return watched.ended() or (
            not watched.local() and time.time() - path.stat().st_mtime > _ABANDONED_SECONDS
        )
    return False


def _publish(scratch: Path, folder: Path) -> None:
    for rest in ("arrow", "problems"):
        shutil.rmtree(scratch / rest, ignore_errors=True)
    (scratch / "lock").unlink(missing_ok=True)
    try:
        scratch.rename(folder)
    except OSError:  # another node was first
        if not folder.is_dir():
            raise
