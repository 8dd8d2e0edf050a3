"""Tokenizes rows into the files of a token store, in this process or in several.

A worker process writes blocks of documents to a scratch file for each of its tasks. This process
joins them in the order of files and lines, so the number of processes does not change the result.
"""

from __future__ import annotations

import contextlib
import json
import logging
import mmap
import multiprocessing
import os
import pickle
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from launcher.data.encoder import Encoder
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

Progress = npt.NDArray[np.int64]
"""(tasks, 2): bytes read and tokens produced so far."""
_Int32s = npt.NDArray[np.int32]


@dataclass
class Block:
    """Consecutive documents."""

    ids: list[_Int32s] = field(default_factory=list)
    labels: list[_Int32s] = field(default_factory=list)
    """One array per document (its ids where it has no labels); empty if no document has labels."""
    categories: list[int] = field(default_factory=list)
    skipped: list[dict[str, str]] = field(default_factory=list)
    tokens: int = 0
    rows: int = 0
    empty: int = 0
    """Rows without text."""

    def add(self, ids: _Int32s, labels: _Int32s | None, category: int | None) -> None:
        if labels is not None and len(self.labels) < len(self.ids):
            self.labels = list(self.ids)
        if labels is not None or self.labels:
            self.labels.append(ids if labels is None else labels)
        self.ids.append(ids)
        self.tokens += len(ids)
        if category is not None:
            self.categories.append(category)

    def columns(self) -> dict[str, Any]:
        """The arrays of all documents joined, for `_Writer.add`."""
        return {
            "ids": _joined(self.ids),
            "labels": _joined(self.labels),
            "lengths": np.array([len(document) for document in self.ids], dtype=np.int64),
            "categories": np.array(self.categories, dtype=np.int32),
            "skipped": self.skipped,
            "empty": self.empty,
        }


def tokenize(
    folder: Path, parts: list[Part], encoder: Encoder, *, on_error: str, processes: int | None
) -> dict[str, Any]:
    """Writes `ids.npy`, `offsets.npy` and, if needed, `labels.npy`, `classes.npy`, `skipped.jsonl`.

    processes: None for one per available core.
    Returns the counts and the checksum for meta.json. Raises RecipeError for rows that cannot be
    used (on_error: fail), and if there is no document.
    """
    started = time.monotonic()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    processes = processes or cores or 1
    parts = [
        p for part in parts for p in (split(part, _TASK_BYTES) if part.form == "hub" else [part])
    ]
    total = sum(part.size for part in parts)
    copied = encoder.kind == "text" and encoder.tokenizer == "bytes"  # almost no work per byte
    if processes == 1 or total < _IN_PROCESS_BYTES * (32 if copied else 1):
        tasks = [parts]
    else:
        tasks = _tasks(parts, max(_TASK_BYTES, total // (processes * _TASKS_PER_PROCESS)))
    shared = mmap.mmap(-1, 16 * len(tasks))  # worker processes write to it
    progress: Progress = np.frombuffer(shared, dtype=np.int64).reshape(-1, 2)
    writer = _Writer(folder)
    with _logged_progress(progress, total, started):
        if len(tasks) == 1:
            with _one_tokenizer_thread():
                for block in _blocks(encoder, parts, on_error=on_error, progress=progress[0]):
                    writer.add(block)
        else:
            work = _Work(encoder, on_error, folder / "blocks", tasks, progress)
            for block in _in_processes(work, min(processes, len(tasks))):
                writer.add(block)
    counts = writer.finish()
    if not counts["documents"]:
        files = len({part.name for part in parts})
        problem = f"data: {files} files, and not one document with text in them"
        if skipped := writer.skipped:
            first = f"{skipped[0]['where']}: {skipped[0]['problem']}"
            problem += f"; all {len(skipped)} rows were skipped, the first: {first}"
        raise RecipeError(problem)
    seconds = max(time.monotonic() - started, 1e-3)
    empty = f"; {counts['empty']:,} rows without text left out" if counts["empty"] else ""
    logger.info(
        f"tokenized {counts['documents']:,} documents, {counts['tokens']:,} tokens in "
        f"{seconds:.1f} s ({counts['tokens'] / seconds:,.0f} tokens/s){empty}"
    )
    return counts


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


@contextlib.contextmanager
def _one_tokenizer_thread() -> Iterator[None]:
    """If the tokenizer used threads here, each process forked later would print a warning."""
    name = "TOKENIZERS_PARALLELISM"
    before = os.environ.get(name)
    os.environ[name] = before or "false"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]


def _blocks(
    encoder: Encoder, parts: list[Part], *, on_error: str, progress: Progress
) -> Iterator[dict[str, Any]]:
    """Raises RecipeError with the problems of the first block that has any (on_error: fail)."""
    block = Block()
    before = dict(zip(parts, np.cumsum([0, *(part.size for part in parts)]).tolist(), strict=False))
    for encoded in encoder.encode_rows(read_all(parts, column=encoder.text_column)):
        block.rows += 1
        if encoded.ids is None:
            block.skipped.append({"where": encoded.row.where, "problem": encoded.problem})
        elif not encoded.ids.size:
            block.empty += 1
        else:
            block.add(encoded.ids, encoded.labels, encoded.category)
        if block.tokens >= _BLOCK_TOKENS or block.rows >= _BLOCK_ROWS:
            part = encoded.row.part
            read = encoded.row.place - part.start if part.form == "jsonl" else 0
            progress[:] = before[part] + read, progress[1] + block.tokens
            yield _checked(block, on_error)
            block = Block()
    progress[:] = sum(part.size for part in parts), progress[1] + block.tokens
    yield _checked(block, on_error)


def _checked(block: Block, on_error: str) -> dict[str, Any]:
    if on_error == "fail" and block.skipped:
        lines = [f"{row['where']}: {row['problem']}" for row in block.skipped[:_SHOWN_PROBLEMS]]
        if more := len(block.skipped) - len(lines):
            lines.append(f"... and {more} more near by; data.on_error: skip leaves such rows out")
        raise RecipeError(lines)
    return block.columns()


# In several processes


@dataclass(frozen=True)
class _Work:
    """What worker processes need. They are forked, so nothing of it is copied."""

    encoder: Encoder
    on_error: str
    folder: Path
    tasks: list[list[Part]]
    progress: Progress


_work: _Work
"""In a worker process."""


def _in_processes(work: _Work, processes: int) -> Iterator[dict[str, Any]]:
    """The blocks of all tasks in order. Raises the first error in the order of the files."""
    work.folder.mkdir()
    others = set(multiprocessing.active_children())
    executor = ProcessPoolExecutor(
        processes,
        mp_context=multiprocessing.get_context("fork"),
        initializer=_start_worker,
        initargs=(work, os.getpid()),
    )
    try:
        for file in executor.map(_run_task, range(len(work.tasks))):
            with file.open("rb") as stream, contextlib.suppress(EOFError):
                while True:
                    yield pickle.load(stream)
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


def _start_worker(work: _Work, parent: int) -> None:
    global _work
    _work = work
    prepare_worker_process()
    end_with_parent(parent)


def _run_task(number: int) -> Path:
    file = _work.folder / f"{number:06}"
    with file.open("wb") as stream:
        parts, progress = _work.tasks[number], _work.progress[number]
        for block in _blocks(_work.encoder, parts, on_error=_work.on_error, progress=progress):
            pickle.dump(block, stream, protocol=5)
    return file


# Files of a store


class _Column:
    """A one-dimensional .npy file that grows. `numpy.lib.format` reserves room in the header."""

    def __init__(self, file: Path) -> None:
        self._file, self._stream = file, file.open("wb")
        self._length = 0
        self._write_header()
        self._header_bytes = self._stream.tell()

    def append(self, values: _Int32s) -> None:
        self._stream.write(values.data)
        self._length += len(values)

    def close(self) -> None:
        self._stream.seek(0)
        self._write_header()
        self._stream.close()

    def copy_to(self, other: _Column) -> None:
        self._stream.flush()
        with self._file.open("rb") as stream:
            stream.seek(self._header_bytes)
            while data := stream.read(1 << 24):
                other.append(np.frombuffer(data, dtype=np.int32))

    def _write_header(self) -> None:
        header = {"descr": "<i4", "fortran_order": False, "shape": (self._length,)}
        np.lib.format.write_array_header_1_0(self._stream, header)


class _Writer:
    """Writes a store's files, block by block."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._ids = _Column(folder / "ids.npy")
        self._labels: _Column | None = None
        self._lengths: list[npt.NDArray[np.int64]] = []
        self._categories: list[_Int32s] = []
        self.skipped: list[dict[str, str]] = []
        self._largest, self._trained, self._empty = -1, 0, 0
        # One for each array: a joint one would depend on where blocks end, and so on `processes`
        self._checksums = [xxhash.xxh3_128() for _ in range(4)]

    def add(self, columns: dict[str, Any]) -> None:
        """columns: of `Block.columns`."""
        ids, own_labels = columns["ids"], columns["labels"]
        labels = own_labels if own_labels.size else ids
        if own_labels.size and self._labels is None:  # the first block that has labels
            self._labels = _Column(self._folder / "labels.npy")
            self._ids.copy_to(self._labels)
        self._ids.append(ids)
        if self._labels is not None:
            self._labels.append(labels)
        arrays = (ids, labels, columns["lengths"], columns["categories"])
        for checksum, array in zip(self._checksums, arrays, strict=True):
            checksum.update(array.data)
        self._trained += int((labels != IGNORED).sum())
        self._largest = max(self._largest, int(max(ids.max(), labels.max())) if ids.size else -1)
        self._lengths.append(columns["lengths"])
        self._categories.append(columns["categories"])
        self._empty += columns["empty"]
        self.skipped += columns["skipped"]

    def finish(self) -> dict[str, Any]:
        """Closes the files. Returns the counts for meta.json."""
        self._ids.close()
        if self._labels is not None:
            self._labels.close()
        if self.skipped:
            lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in self.skipped]
            (self._folder / "skipped.jsonl").write_text("".join(lines), encoding="utf-8")
        offsets = np.cumsum(np.concatenate([[0], *self._lengths]), dtype=np.int64)
        np.save(self._folder / "offsets.npy", offsets)
        categories = _joined(self._categories)
        if categories.size:
            np.save(self._folder / "classes.npy", categories)
        digests = b"".join(checksum.digest() for checksum in self._checksums)
        return {
            "documents": len(offsets) - 1,
            "tokens": int(offsets[-1]),
            "trained": self._trained,
            "largest_id": self._largest,
            "empty": self._empty,
            "skipped": len(self.skipped),
            "content": xxhash.xxh3_128_hexdigest(digests),
        }


def _joined(arrays: list[_Int32s]) -> _Int32s:
    return np.concatenate(arrays) if arrays else np.zeros(0, dtype=np.int32)


@contextlib.contextmanager
def _logged_progress(progress: Progress, total: int, started: float) -> Iterator[None]:
    """Logs a line every _PROGRESS_SECONDS."""
    done = threading.Event()

    def log() -> None:
        while not done.wait(_PROGRESS_SECONDS):
            read, tokens = (int(value) for value in progress.sum(axis=0))
            seconds = time.monotonic() - started
            left = f", {seconds * (total - read) / read:.0f} s left" if read else ""
            logger.info(
                f"tokenizing: {min(1.0, read / max(1, total)):.0%} of {total / 2**20:,.0f} MiB, "
                f"{read / 2**20 / seconds:.1f} MiB/s, {tokens / seconds:,.0f} tokens/s{left}"
            )

    thread = threading.Thread(target=log, name="tokenization progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
