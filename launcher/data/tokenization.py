"""Tokenizes rows into the files of a token store, in this process or in several.

Worker processes write blocks of documents to a scratch file for each of their tasks. This process
joins them in the order of files and lines, so the number of processes does not change the result.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import pickle
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import xxhash

from launcher.data.encoder import Encoded, Encoder
from launcher.data.sources import Part, read_all, split
from launcher.data.tokenizer import prepare_worker_process
from launcher.distributed.spawn import end_with_parent
from launcher.errors import RecipeError, TrainingError
from launcher.training.loss import IGNORED

logger = logging.getLogger(__name__)

_IN_PROCESS_BYTES = 4 << 20
"""Below this size, starting processes takes longer than tokenizing."""
_TASK_BYTES = 1 << 20
_TASKS_PER_PROCESS = 8
_BLOCK_TOKENS = 1 << 20
_BLOCK_ROWS = 1 << 14
_SHOWN_PROBLEMS = 5
_PROGRESS_SECONDS = 30.0

_Int32s = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Block:
    """Consecutive documents."""

    ids: _Int32s
    labels: _Int32s | None
    """None: no document has labels of its own."""
    lengths: _Int32s
    classes: _Int32s
    skipped: list[dict[str, str]]
    """`where` and `problem` of the rows that cannot be used."""
    empty: int
    """Rows without text."""


def tokenize(
    folder: Path, parts: list[Part], encoder: Encoder, *, on_error: str, processes: int | None
) -> dict[str, Any]:
    """Writes the store's arrays (see token_store) and returns what meta.json says of them.

    processes: None for one per available core.
    Raises RecipeError for rows that cannot be used (on_error: fail), and if there is no document.
    """
    started = logged = time.monotonic()
    processes = processes or len(os.sched_getaffinity(0))
    parts = [
        piece
        for part in parts
        for piece in (split(part, _TASK_BYTES) if part.form == "hub" else [part])
    ]
    total = sum(part.size for part in parts)
    tasks = _tasks(parts, max(_TASK_BYTES, total // (processes * _TASKS_PER_PROCESS)))
    copied = encoder.kind == "text" and encoder.tokenizer == "bytes"  # almost no work per byte
    blocks_of = partial(_blocks, encoder, on_error=on_error)
    blocks: Iterable[Iterable[Block]]
    if processes == 1 or len(tasks) == 1 or total < _IN_PROCESS_BYTES * (32 if copied else 1):
        blocks = map(blocks_of, tasks)
    else:
        blocks = _in_processes(blocks_of, tasks, folder / "blocks", min(processes, len(tasks)))
    writer, read = _Writer(folder), 0
    for task, blocks_of_task in zip(tasks, blocks, strict=True):
        for block in blocks_of_task:
            writer.add(block)
        read += sum(part.size for part in task)
        if time.monotonic() - logged > _PROGRESS_SECONDS:
            logged = time.monotonic()
            share, seconds = max(read, 1) / max(total, 1), logged - started
            logger.info(
                f"tokenizing: {share:.0%} of {total / 2**20:,.0f} MiB, "
                f"{writer.tokens / seconds:,.0f} tokens/s, {seconds / share - seconds:.0f} s left"
            )
    meta = writer.finish()
    if not meta["documents"]:
        files = len({part.name for part in parts})
        problem = f"data: no document with text in {files} files"
        if skipped := meta["skipped"]:
            first = f"{skipped[0]['where']}: {skipped[0]['problem']}"
            problem += f"; all {len(skipped)} rows were skipped, the first: {first}"
        raise RecipeError(problem)
    seconds = max(time.monotonic() - started, 1e-3)
    empty = f"; {meta['empty']:,} rows without text left out" if meta["empty"] else ""
    logger.info(
        f"tokenized {meta['documents']:,} documents, {meta['tokens']:,} tokens in "
        f"{seconds:.1f} s ({meta['tokens'] / seconds:,.0f} tokens/s){empty}"
    )
    return meta


def _tasks(parts: list[Part], size: int) -> list[list[Part]]:
    """Consecutive parts of about `size` bytes: large files are split, small ones grouped."""
    tasks: list[list[Part]] = [[]]
    held = 0
    for piece in (piece for part in parts for piece in split(part, size)):
        if held >= size:
            tasks.append([])
            held = 0
        tasks[-1].append(piece)
        held += piece.size
    return tasks


def _blocks(encoder: Encoder, parts: list[Part], *, on_error: str) -> Iterator[Block]:
    rows: list[Encoded] = []
    tokens = 0
    for encoded in encoder.encode_rows(read_all(parts, column=encoder.text_column)):
        rows.append(encoded)
        tokens += 0 if encoded.ids is None else len(encoded.ids)
        if tokens >= _BLOCK_TOKENS or len(rows) >= _BLOCK_ROWS:
            yield make_block(rows, on_error)
            rows, tokens = [], 0
    yield make_block(rows, on_error)


def make_block(rows: list[Encoded], on_error: str) -> Block:
    """The documents of these rows. Raises RecipeError with their problems (on_error: fail)."""
    skipped = [row.skipped for row in rows if row.ids is None]
    if on_error == "fail" and skipped:
        lines = [f"{row['where']}: {row['problem']}" for row in skipped[:_SHOWN_PROBLEMS]]
        if more := len(skipped) - len(lines):
            lines.append(f"... and {more} more nearby; data.on_error: skip leaves such rows out")
        raise RecipeError(lines)
    documents = [row for row in rows if row.ids is not None and row.ids.size]
    labelled = any(row.labels is not None for row in documents)
    ids = [row.ids for row in documents if row.ids is not None]
    labels = [
        own if row.labels is None else row.labels for row, own in zip(documents, ids, strict=True)
    ]
    return Block(
        ids=_joined(ids),
        labels=_joined(labels) if labelled else None,
        lengths=_integers(len(document) for document in ids),
        classes=_integers(row.category for row in documents if row.category is not None),
        skipped=skipped,
        empty=len(rows) - len(skipped) - len(documents),
    )


def _integers(values: Iterable[int]) -> _Int32s:
    return np.fromiter(values, dtype=np.int32)


def _joined(arrays: list[_Int32s]) -> _Int32s:
    return np.concatenate(arrays) if arrays else np.zeros(0, dtype=np.int32)


# In several processes

_blocks_of: Callable[[list[Part]], Iterable[Block]]
"""In a worker process. It is forked, so nothing is copied."""


def _in_processes(
    blocks_of: Callable[[list[Part]], Iterable[Block]],
    tasks: list[list[Part]],
    folder: Path,
    processes: int,
) -> Iterator[Iterator[Block]]:
    """The blocks of each task, in order. Raises the first error in the order of the files.

    folder: for scratch files; otherwise the blocks of all tasks after a slow one would be held in
    memory.
    """
    folder.mkdir()
    others = set(multiprocessing.active_children())
    executor = ProcessPoolExecutor(
        processes,
        mp_context=multiprocessing.get_context("fork"),
        initializer=_start_worker,
        initargs=(blocks_of, os.getpid()),
    )
    files = [folder / f"{number:06}" for number in range(len(tasks))]
    try:
        for file in executor.map(_run_task, tasks, files):
            yield _read_blocks(file)
            file.unlink()
    except BrokenProcessPool:
        raise TrainingError(
            "a tokenization process was killed, perhaps for lack of memory; lower data.processes"
        ) from None
    except BaseException:
        for worker in set(multiprocessing.active_children()) - others:
            worker.terminate()  # the remaining tasks are not needed
        raise
    finally:
        executor.shutdown(cancel_futures=True)


def _start_worker(blocks_of: Callable[[list[Part]], Iterable[Block]], parent: int) -> None:
    global _blocks_of
    _blocks_of = blocks_of
    prepare_worker_process()
    end_with_parent(parent)


def _run_task(parts: list[Part], file: Path) -> Path:
    with file.open("wb") as stream:
        for block in _blocks_of(parts):
            pickle.dump(block, stream, protocol=5)
    return file


def _read_blocks(file: Path) -> Iterator[Block]:
    with file.open("rb") as stream, contextlib.suppress(EOFError):
        while True:
            yield pickle.load(stream)


# Files of a store


class _Writer:
    """Writes a store's files, block by block."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._ids: BinaryIO = (folder / "ids.bin").open("wb")
        self._labels: BinaryIO | None = None
        self._lengths: list[_Int32s] = []
        self._classes: list[_Int32s] = []
        self._skipped: list[dict[str, str]] = []
        self._largest, self._trained, self._empty = -1, 0, 0
        self.tokens = 0

    def add(self, block: Block) -> None:
        if block.labels is not None and self._labels is None:  # the first block with labels
            self._ids.flush()
            file = self._folder / "labels.bin"
            shutil.copyfile(self._folder / "ids.bin", file)
            self._labels = file.open("ab")
        labels = block.ids if block.labels is None else block.labels
        self._ids.write(block.ids.data)
        if self._labels is not None:
            self._labels.write(labels.data)
        if block.ids.size:
            self._largest = max(self._largest, int(block.ids.max()), int(labels.max()))
        self._trained += int((labels != IGNORED).sum())
        self.tokens += block.ids.size
        self._lengths.append(block.lengths)
        self._classes.append(block.classes)
        self._skipped += block.skipped
        self._empty += block.empty

    def finish(self) -> dict[str, Any]:
        """Closes the files. Returns what meta.json says of them."""
        for stream in (self._ids, self._labels):
            if stream is not None:
                stream.close()
        offsets = np.append(0, np.cumsum(_joined(self._lengths), dtype=np.int64))
        np.save(self._folder / "offsets.npy", offsets)
        classes = _joined(self._classes)
        if classes.size:
            np.save(self._folder / "classes.npy", classes)
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
