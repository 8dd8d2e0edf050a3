"""Tokenizes rows into the files of a token store, in this process or in several.

Tasks are parts of files. This process writes their documents in the order of files and lines, so
the number of processes does not change the result.
"""

from __future__ import annotations

import itertools
import logging
import os
import shutil
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import torch
import xxhash
from torch.utils.data import DataLoader

from launcher.data.encoder import Encoded, Encoder
from launcher.data.sources import Part, read_all, split
from launcher.data.tokenizer import prepare_worker_process
from launcher.distributed.spawn import end_with_parent
from launcher.errors import RecipeError, TrainingError
from launcher.metrics.console import task
from launcher.models.chunked_loss import IGNORED

logger = logging.getLogger(__name__)

_TASK_BYTES = 4 << 20
"""For less, starting a process takes longer than tokenizing."""
_STORE_ROWS = 4096
"""Rows held in memory with their text."""
_SHOWN_PROBLEMS = 5

_Int32s = npt.NDArray[np.int32]


@dataclass(frozen=True)
class TokenStore:
    """Documents, in memory or memory-mapped."""

    ids: _Int32s
    """(tokens,)."""
    labels: _Int32s | None
    """(tokens,): each token as a target; None: the ids."""
    offsets: npt.NDArray[np.int64]
    """Start of each document, and the end: (documents + 1,)."""
    classes: _Int32s | None = None
    """kind classification: (documents,)."""
    skipped: list[dict[str, str]] = field(default_factory=list)
    """`where` and `problem` of the rows that cannot be used (on_error: skip)."""
    empty: int = 0
    """Rows without text."""
    largest_id: int = -1
    trained: int | None = None
    """Tokens that are a target."""
    folder: Path | None = None
    fingerprint: dict[str, Any] = field(default_factory=dict)
    """For checkpoints, to detect changed data: `files` (bytes by name), `documents`, `tokens`, and
    checksums of the `content`, `tokenizer` and `chat_template`."""

    @property
    def documents(self) -> int:
        return len(self.offsets) - 1


def tokenize(
    folder: Path, parts: list[Part], encoder: Encoder, *, on_error: str, processes: int | None
) -> dict[str, Any]:
    """Writes the store's arrays (see token_store) and returns what meta.json says of them.

    processes: None for one per available core.
    Raises RecipeError for rows that cannot be used (on_error: fail), and if there is no document.
    """
    started = time.monotonic()
    tasks = _tasks(parts)
    processes = min(processes or len(os.sched_getaffinity(0)), len(tasks))
    loader: DataLoader[Any] = DataLoader(
        tasks,  # type: ignore[arg-type]
        batch_size=None,
        collate_fn=partial(_run_task, encoder, on_error),
        num_workers=processes if processes > 1 else 0,
        worker_init_fn=partial(_start_worker, os.getpid()),
        multiprocessing_context="fork" if processes > 1 else None,
        # By default it draws from the generator of dropout
        generator=torch.Generator(),
    )
    writer = _Writer(folder)
    try:
        with task("tokenizing", len(tasks)) as advance:
            for stores, problems in loader:
                if problems:
                    raise RecipeError(problems)
                for store in stores:
                    writer.add(store)
                advance(1)
    except RuntimeError as error:
        if "exited unexpectedly" not in str(error):
            raise
        raise TrainingError(
            "a tokenization process was killed, perhaps for lack of memory; lower data.processes"
        ) from None
    meta = writer.finish()
    if not meta["documents"]:
        problem = f"data: no document with text in {len({part.name for part in parts})} files"
        if skipped := meta["skipped"]:
            first = f"{skipped[0]['where']}: {skipped[0]['problem']}"
            problem += f"; all {len(skipped)} rows were skipped, the first: {first}"
        raise RecipeError(problem)
    seconds = max(time.monotonic() - started, 1e-3)
    empty = f"; {meta['empty']:,} rows without text skipped" if meta["empty"] else ""
    logger.info(
        f"tokenized {meta['documents']:,} documents, {meta['tokens']:,} tokens in "
        f"{seconds:.1f} s ({meta['tokens'] / seconds:,.0f} tokens/s){empty}"
    )
    return meta


def _tasks(parts: list[Part]) -> list[list[Part]]:
    """Consecutive parts of about _TASK_BYTES: large files are split, small ones grouped."""
    pieces = [piece for part in parts for piece in split(part, _TASK_BYTES)]
    starts = itertools.accumulate((piece.size for piece in pieces), initial=0)
    groups = itertools.groupby(zip(starts, pieces, strict=False), lambda one: one[0] // _TASK_BYTES)
    return [[piece for _, piece in group] for _, group in groups]


def _start_worker(parent: int, worker: int) -> None:
    prepare_worker_process()
    end_with_parent(parent)


def _run_task(
    encoder: Encoder, on_error: str, parts: list[Part]
) -> tuple[list[TokenStore], list[str]]:
    """The documents of a task, and its problems (on_error: fail): a loader wraps exceptions."""
    stores = []
    rows = encoder.encode_rows(read_all(parts, column=encoder.text_column))
    try:
        while some := list(itertools.islice(rows, _STORE_ROWS)):
            stores.append(store_rows(some, on_error))
        return stores, []
    except RecipeError as error:
        return [], error.problems


def store_rows(rows: list[Encoded], on_error: str) -> TokenStore:
    """The documents of these rows. Raises RecipeError with their problems (on_error: fail)."""
    skipped = [row.skipped for row in rows if row.problem]
    if on_error == "fail" and skipped:
        lines = [f"{row['where']}: {row['problem']}" for row in skipped[:_SHOWN_PROBLEMS]]
        if more := len(skipped) - len(lines):
            lines.append(f"... and {more} more nearby; data.on_error: skip leaves such rows out")
        raise RecipeError(lines)
    documents = [row for row in rows if row.ids.size]
    labelled = any(row.labels is not None for row in documents)
    classes = [row.category for row in documents if row.category is not None]
    return TokenStore(
        ids=_joined([row.ids for row in documents]),
        labels=_joined([row.targets for row in documents]) if labelled else None,
        offsets=np.cumsum([0, *(row.ids.size for row in documents)], dtype=np.int64),
        classes=np.array(classes, dtype=np.int32) if classes else None,
        skipped=skipped,
        empty=len(rows) - len(skipped) - len(documents),
    )


def _joined(arrays: list[_Int32s]) -> _Int32s:
    return np.concatenate([np.zeros(0, dtype=np.int32), *arrays])


class _Writer:
    """Writes a store's files, part by part."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._ids: BinaryIO = (folder / "ids.bin").open("wb")
        self._labels: BinaryIO | None = None
        self._lengths: list[npt.NDArray[np.int64]] = []
        self._classes: list[_Int32s] = []
        self._skipped: list[dict[str, str]] = []
        self._largest, self._trained, self._empty = -1, 0, 0
        self.tokens = 0

    def add(self, part: TokenStore) -> None:
        if part.labels is not None and self._labels is None:  # the first part with labels
            self._ids.flush()
            file = self._folder / "labels.bin"
            shutil.copyfile(self._folder / "ids.bin", file)
            self._labels = file.open("ab")
        labels = part.ids if part.labels is None else part.labels
        self._ids.write(part.ids.data)
        if self._labels is not None:
            self._labels.write(labels.data)
        largest = (int(ids.max(initial=-1)) for ids in (part.ids, labels))
        self._largest = max(self._largest, *largest)
        self._trained += int((labels != IGNORED).sum())
        self.tokens += part.ids.size
        self._lengths.append(np.diff(part.offsets))
        self._classes += [] if part.classes is None else [part.classes]
        self._skipped += part.skipped
        self._empty += part.empty

    def finish(self) -> dict[str, Any]:
        """Closes the files. Returns what meta.json says of them."""
        for stream in (self._ids, self._labels):
            if stream is not None:
                stream.close()
        offsets = np.cumsum(np.concatenate([np.zeros(1, dtype=np.int64), *self._lengths]))
        np.save(self._folder / "offsets.npy", offsets)
        if self._classes:
            np.save(self._folder / "classes.npy", np.concatenate(self._classes))
        checksum = xxhash.xxh3_128()
        for name in ("ids.bin", "labels.bin", "offsets.npy", "classes.npy"):
            file = self._folder / name
            if file.exists() and file.stat().st_size:
                checksum.update(name.encode())
                checksum.update(np.memmap(file, mode="r").data)
        return {
            "documents": len(offsets) - 1,
            "tokens": self.tokens,
            "trained": self._trained,
            "largest_id": self._largest,
            "empty": self._empty,
            "skipped": self._skipped,
            "content": checksum.hexdigest(),
        }
