"""Tokenized documents on disk, memory-mapped: made once, shared by all processes of a node, found again at the next start.

A store is a folder: `ids.npy` (all documents behind one another), `labels.npy` where rows bring labels of their own,
`offsets.npy` (documents + 1) and `meta.json`. It is written beside its place and renamed into it, so what has the name
is whole.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from launcher.data.sources import ROW_FILES, find_files, read_documents, read_rows
from launcher.data.tokenizer import load_tokenizer
from launcher.errors import RecipeError
from launcher.loss import IGNORED
from launcher.recipe import schema

_FORMAT = 1
_Document = tuple[npt.NDArray[np.int32], npt.NDArray[np.int32] | None]
"""Ids, and labels where the row has them: labels[t] is the target that position t - 1 predicts, as transformers has it."""


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

    skipped: list[dict[str, str]] = field(default_factory=list)
    classes: npt.NDArray[np.int32] | None = None

    @property
    def documents(self) -> int:
        """Number of documents."""
        return len(self.offsets) - 1


def open_store(
    *,
    kind: str,
    patterns: tuple[str, ...],
    data: schema.Data,
    tokenizer: str | None,
    validation: bool,
    build: bool,
    report: Callable[[str], None],
) -> TokenStore:
    """The tokenized documents of `patterns`, from the cache or made now.

    build: make the store where it is missing (one process a node); the others wait until it is there.
    report: told what takes long.
    Raises RecipeError where a file or row cannot be used.
    """
    column, cache = data.text_column, data.cache
    files = find_files(patterns)
    if kind == "tokens":
        for file in files:
            if file.suffix.lower() not in ROW_FILES:
                raise RecipeError(f"{file}: kind tokens reads {', '.join(ROW_FILES)}; use kind text for text files")
    # A tokenizer is loaded only to look at its files here; with bytes and tokens there is nothing to load.
    encoder = load_tokenizer(tokenizer) if kind == "text" and tokenizer is not None else None
    stats = [(str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    key = json.dumps([_FORMAT, kind, encoder.identity if encoder else None, column, stats])
    folder = cache_folder(cache) / hashlib.sha256(key.encode()).hexdigest()[:24]
    if not folder.is_dir():
        if build:
            report(f"tokenizing {len(files)} files ({sum(size for _, size, _ in stats) / 2**20:.1f} MiB)")
            if encoder is not None:
                documents: Iterator[_Document] = ((encoder.encode(text), None) for f in files for text in read_documents(f, column=column))
            else:
                documents = (_token_row(where, row) for file in files for where, row in read_rows(file))
            _write(folder, documents, files=len(files))
        else:
            _wait_for(folder, report)
    meta = json.loads((folder / "meta.json").read_text())
    labels = folder / "labels.npy"
    return TokenStore(
        ids=np.load(folder / "ids.npy", mmap_mode="r"),
        labels=np.load(labels, mmap_mode="r") if labels.exists() else None,
        offsets=np.load(folder / "offsets.npy"),
        files=meta["files"],
        largest_id=meta["largest_id"],
    )


def cache_folder(cache: str | None) -> Path:
    """Where stores are kept."""
    if cache is not None:
        return Path(cache)
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "launcher"


def _wait_for(folder: Path, report: Callable[[str], None]) -> None:
    started = told = time.monotonic()
    while not folder.is_dir():
        time.sleep(0.05)
        if time.monotonic() - told > 60:
            told = time.monotonic()
            report(f"waiting for the node's first rank to tokenize ({told - started:.0f} s)")


def _token_row(where: str, row: dict[str, Any]) -> _Document:
    ids = _integers(where, row, "input_ids")
    if ids.size and int(ids.min()) < 0:
        raise RecipeError(f"{where}: input_ids must not be negative; got {int(ids.min())}")
    if row.get("labels") is None:
        return ids, None
    labels = _integers(where, row, "labels")
    if len(labels) != len(ids):
        raise RecipeError(f"{where}: {len(ids)} input_ids, but {len(labels)} labels; there must be one a token (-100: no loss)")
    wrong = labels[(labels < 0) & (labels != IGNORED)]
    if wrong.size:
        raise RecipeError(f"{where}: labels must be token ids, or -100 where no loss is due; got {int(wrong[0])}")
    return ids, labels


def _integers(where: str, row: dict[str, Any], column: str) -> npt.NDArray[np.int32]:
    values = row.get(column)
    if values is None:
        raise RecipeError(f"{where}: no column {column!r}; columns: {', '.join(row)}")
    if not isinstance(values, list) or any(type(value) is not int for value in values):
        raise RecipeError(f"{where}: {column} must be a list of whole numbers")
    try:
        return np.array(values, dtype=np.int32)
    except OverflowError:
        raise RecipeError(f"{where}: {column} has an id beyond 32 bits") from None


def _write(folder: Path, documents: Iterator[_Document], *, files: int) -> None:
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=".making-", dir=folder.parent))
    except OSError as error:
        raise RecipeError(f"data.cache: {folder.parent} cannot be written to: {error.strerror}") from None
    try:
        offsets, largest, labelled = [0], -1, False
        with (scratch / "ids.raw").open("wb") as ids_file, (scratch / "labels.raw").open("wb") as labels_file:
            for ids, labels in documents:
                if not ids.size:
                    continue
                offsets.append(offsets[-1] + len(ids))
                largest = max(largest, int(ids.max()), int(labels.max()) if labels is not None else -1)
                labelled = labelled or labels is not None
                ids_file.write(ids.tobytes())
                labels_file.write((ids if labels is None else labels).tobytes())
        if len(offsets) == 1:
            raise RecipeError(f"data: {files} files, and not one document with text in them")
        for name in ("ids", "labels") if labelled else ("ids",):
            raw = np.memmap(scratch / f"{name}.raw", dtype=np.int32, mode="r")
            np.save(scratch / f"{name}.npy", raw)
        for name in ("ids", "labels"):
            (scratch / f"{name}.raw").unlink()
        np.save(scratch / "offsets.npy", np.array(offsets, dtype=np.int64))
        (scratch / "meta.json").write_text(json.dumps({"files": files, "largest_id": largest}))
        try:
            scratch.rename(folder)
        except OSError:  # another node was first
            if not folder.is_dir():
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
