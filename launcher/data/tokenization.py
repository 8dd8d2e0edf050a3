"""Rows into a store's files: in this process where there is little to do, else in processes, through `datasets`.

Each process writes what it tokenized as Arrow files of blocks (some thousand documents behind one another); these are
then joined, in the order of files and lines, into the store's flat arrays.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from launcher.data.encoder import Encoder
from launcher.data.sources import Part, read_all, split
from launcher.distributed.spawn import end_with_parent
from launcher.errors import RecipeError
from launcher.training.loss import IGNORED

logger = logging.getLogger(__name__)

_IN_PROCESS_BYTES = 4 << 20
"""Below this, starting processes takes longer than the work."""
_TASK_BYTES = 1 << 20
_TASKS_PER_PROCESS = 8
_BLOCK_TOKENS = 1 << 20
_BLOCK_ROWS = 1 << 14
_SHOWN_PROBLEMS = 5
_PROGRESS_SECONDS = 30.0
_NPY_HEADER_BYTES = 128

Progress = npt.NDArray[np.int64]
"""(tasks, 2): bytes read and tokens made so far."""


@dataclass
class Block:
    """Documents behind one another."""

    ids: list[npt.NDArray[np.int32]] = field(default_factory=list)
    labels: list[npt.NDArray[np.int32]] = field(default_factory=list)
    """Of each document; the ids where it has none of its own. Empty where no document has."""
    categories: list[int] = field(default_factory=list)
    skipped: list[dict[str, str]] = field(default_factory=list)
    tokens: int = 0
    rows: int = 0
    empty: int = 0
    """Rows without text."""

    def columns(self) -> dict[str, bytes | str | int]:
        """As a row of an Arrow file."""
        return {
            "ids": _joined(self.ids).tobytes(),
            "lengths": np.array([len(ids) for ids in self.ids], dtype=np.int64).tobytes(),
            "labels": _joined(self.labels).tobytes(),
            "categories": np.array(self.categories, dtype=np.int32).tobytes(),
            "skipped": json.dumps(self.skipped),
            "empty": self.empty,
        }


def _joined(arrays: list[npt.NDArray[np.int32]]) -> npt.NDArray[np.int32]:
    return np.concatenate(arrays) if arrays else np.zeros(0, dtype=np.int32)


def make_store(
    folder: Path, parts: list[Part], encoder: Encoder, *, on_error: str, processes: int | None
) -> dict[str, Any]:
    """Writes `ids.npy`, `offsets.npy`, and where there are such `labels.npy`, `classes.npy` and `skipped.jsonl`, into `folder`.

    processes: null: one a core this process may use.
    Returns documents, tokens, the largest id, rows without text, rows skipped, and a checksum of the content.
    Raises RecipeError for rows that cannot be used (on_error: fail), and where nothing is left.
    """
    started = time.monotonic()
    processes = processes or (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    if any(part.form == "hub" for part in parts):
        parts = [
            piece
            for part in parts
            for piece in (split(part, _TASK_BYTES) if part.form == "hub" else [part])
        ]
    total = sum(part.size for part in parts)
    copied = encoder.kind == "text" and encoder.tokenizer == "bytes"  # hardly any work
    alone = processes == 1 or total < _IN_PROCESS_BYTES * (32 if copied else 1)
    tasks = (
        [parts]
        if alone
        else _tasks(parts, max(_TASK_BYTES, total // (processes * _TASKS_PER_PROCESS)))
    )
    progress_file = folder / "progress.npy"
    np.save(progress_file, np.zeros((len(tasks), 2), dtype=np.int64))
    progress: Progress = np.load(progress_file, mmap_mode="r+")
    writer = _Writer(folder)
    with _watched(progress, total, started):
        if alone:
            with _one_thread():
                for block in _blocks(encoder, parts, on_error=on_error, progress=progress[0]):
                    writer.add(block.columns())
        else:
            for columns in _in_processes(
                folder, tasks, encoder, on_error=on_error, processes=min(processes, len(tasks))
            ):
                writer.add(columns)
    counts = writer.finish()
    progress_file.unlink()
    if not counts["documents"]:
        why = (
            f"; all {counts['skipped']} rows were skipped, the first: {writer.first_skipped}"
            if counts["skipped"]
            else ""
        )
        raise RecipeError(
            f"data: {_counted_files(parts)}, and not one document with text in them{why}"
        )
    seconds = max(time.monotonic() - started, 1e-3)
    speed = f"{counts['tokens'] / seconds:,.0f} tokens/s"
    empty = f"; {counts['empty']:,} rows without text left out" if counts["empty"] else ""
    logger.info(
        f"tokenized {counts['documents']:,} documents, {counts['tokens']:,} tokens in {seconds:.1f} s ({speed}){empty}"
    )
    return counts


def _counted_files(parts: list[Part]) -> str:
    return f"{len({part.name for part in parts})} files"


def _tasks(parts: list[Part], size: int) -> list[list[Part]]:
    """Runs of parts of about `size` bytes: large files divided, small ones together."""
    tasks: list[list[Part]] = [[]]
    held = 0
    for part in parts:
        for piece in split(part, size):
            if held >= size:
                tasks.append([])
                held = 0
            tasks[-1].append(piece)
            held += piece.size
    return tasks


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """A tokenizer that used its threads here would have every process forked later, a loader's say, warn of it."""
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
) -> Iterator[Block]:
    """Raises RecipeError with the problems of the first block that has some, where on_error is fail."""
    block = Block()
    before = dict(zip(parts, np.cumsum([0, *(part.size for part in parts)]).tolist(), strict=False))
    for encoded in encoder.encode_rows(read_all(parts, column=encoder.text_column)):
        block.rows += 1
        if encoded.ids is None:
            block.skipped.append({"where": encoded.row.where, "problem": encoded.problem})
        elif not encoded.ids.size:
            block.empty += 1
        else:
            if encoded.labels is not None and len(block.labels) < len(block.ids):
                block.labels = list(block.ids)
            if encoded.labels is not None or block.labels:
                block.labels.append(encoded.ids if encoded.labels is None else encoded.labels)
            block.ids.append(encoded.ids)
            block.tokens += len(encoded.ids)
            if encoded.category is not None:
                block.categories.append(encoded.category)
        if block.tokens >= _BLOCK_TOKENS or block.rows >= _BLOCK_ROWS:
            part = encoded.row.part
            progress[0] = before[part] + (
                encoded.row.place - part.start if part.form == "jsonl" else 0
            )
            progress[1] += block.tokens
            yield _checked(block, on_error)
            block = Block()
    progress[0] = sum(part.size for part in parts)
    progress[1] += block.tokens
    yield _checked(block, on_error)


def _checked(block: Block, on_error: str) -> Block:
    if on_error == "fail" and block.skipped:
        told = [f"{one['where']}: {one['problem']}" for one in block.skipped[:_SHOWN_PROBLEMS]]
        if len(block.skipped) > len(told):
            told.append(
                f"... and {len(block.skipped) - len(told)} more near by; data.on_error: skip leaves such rows out"
            )
        raise RecipeError(told)
    return block


# In processes


def _in_processes(
    folder: Path, tasks: list[list[Part]], encoder: Encoder, *, on_error: str, processes: int
) -> Iterator[dict[str, bytes | str | int]]:
    import datasets

    features = dict.fromkeys(("ids", "lengths", "labels", "categories"), "large_binary") | {
        "skipped": "large_string",
        "empty": "int64",
    }
    scratch = folder / "arrow"
    problems = folder / "problems"
    problems.mkdir()
    quiet = datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()  # they count blocks; ours counts bytes
    global _parent
    _watch_forks()
    _parent = os.getpid()
    try:
        made = datasets.Dataset.from_generator(
            _arrow_rows,
            features=datasets.Features(
                {name: datasets.Value(kind) for name, kind in features.items()}
            ),
            cache_dir=str(scratch),
            gen_kwargs={
                "tasks": list(enumerate(tasks)),
                "setting": (encoder, on_error, str(folder), os.getpid()),
            },
            num_proc=processes,
            fingerprint="tokens",
            writer_batch_size=4,
        )
    except Exception:
        # What a process raises comes back as text; which of them was the first in the order of the files is seen here.
        told = sorted(problems.glob("*.json"))
        if told:
            raise RecipeError(json.loads(told[0].read_text())) from None
        raise
    finally:
        _parent = None
        if not quiet:
            datasets.enable_progress_bars()
    for batch in made.data.to_batches():
        for row in range(batch.num_rows):
            yield {name: _plain(batch.column(name)[row]) for name in features}


def _plain(scalar: Any) -> Any:
    return scalar.as_buffer() if "binary" in str(scalar.type) else scalar.as_py()


def _arrow_rows(
    tasks: list[tuple[int, list[Part]]], setting: tuple[Encoder, str, str, int]
) -> Iterator[dict[str, bytes | str | int]]:
    """Runs in a process of its own."""
    encoder, on_error, folder, parent = setting
    if os.getpid() != parent:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one thread each
    progress: Progress = np.load(Path(folder) / "progress.npy", mmap_mode="r+")
    for number, parts in tasks:
        try:
            for block in _blocks(encoder, parts, on_error=on_error, progress=progress[number]):
                yield block.columns()
        except RecipeError as error:
            scratch = Path(folder) / "problems" / f".{number:06}"
            scratch.write_text(json.dumps(error.problems))
            scratch.rename(scratch.with_name(f"{number:06}.json"))
            raise


_parent: int | None = None
"""This process, while what it forks is there to tokenize."""


@functools.cache
def _watch_forks() -> None:
    """Also for what the pool forks beside its workers, which would outlive a parent that is killed."""
    os.register_at_fork(after_in_child=lambda: None if _parent is None else _be_a_child(_parent))


def _be_a_child(parent: int) -> None:
    """None of the parent's answers to signals, and the parent's end is this process's too."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    end_with_parent(parent)


# What is written


class _Column:
    """A one-dimensional .npy file that grows."""

    def __init__(self, file: Path, dtype: type[np.generic]) -> None:
        self._dtype = np.dtype(dtype)
        self._stream = file.open("wb")
        self._stream.write(b"\0" * _NPY_HEADER_BYTES)
        self._file = file

    def append(self, data: Any) -> None:
        """Values as an array or a buffer of their bytes."""
        self._stream.write(data)

    def finish(self, *, keep: bool = True) -> None:
        """Writes the header, whose room was left free, in the format of numpy.lib.format, version 1.0."""
        length = (self._stream.tell() - _NPY_HEADER_BYTES) // self._dtype.itemsize
        shape = f"{{'descr': '{self._dtype.str}', 'fortran_order': False, 'shape': ({length},), }}"
        size = _NPY_HEADER_BYTES - 10
        self._stream.seek(0)
        self._stream.write(
            b"\x93NUMPY\x01\x00"
            + size.to_bytes(2, "little")
            + shape.ljust(size - 1).encode()
            + b"\n"
        )
        self._stream.close()
        if not keep:
            self._file.unlink()


class _Writer:
    """A store's files, block by block."""

    def __init__(self, folder: Path) -> None:
        self._ids = _Column(folder / "ids.npy", np.int32)
        self._labels: _Column | None = None
        self._folder = folder
        self._lengths: list[npt.NDArray[np.int64]] = []
        self._categories: list[npt.NDArray[np.int32]] = []
        self._skipped = (folder / "skipped.jsonl").open("w", encoding="utf-8")
        self._largest, self._tokens, self._trained, self._count, self._empty = -1, 0, 0, 0, 0
        # One for each array: together they would depend on where blocks end, and so on the number of processes
        self._checksums = [xxhash.xxh3_128() for _ in range(4)]
        self.first_skipped = ""

    def add(self, columns: dict[str, Any]) -> None:
        """A block, as `Block.columns` gives it."""
        ids, labels = (
            np.frombuffer(columns["ids"], dtype=np.int32),
            np.frombuffer(columns["labels"], dtype=np.int32),
        )
        if labels.size and self._labels is None:  # what came before had no labels of its own
            self._labels = _Column(self._folder / "labels.npy", np.int32)
            self._copy_ids(self._labels)
        if self._labels is not None:
            self._labels.append((labels if labels.size else ids).tobytes())
        content = (
            columns["ids"],
            columns["labels"] or columns["ids"],
            columns["lengths"],
            columns["categories"],
        )
        for checksum, data in zip(self._checksums, content, strict=True):
            checksum.update(data)
        self._trained += int((labels != IGNORED).sum()) if labels.size else len(ids)
        self._ids.append(ids.tobytes())
        self._tokens += len(ids)
        self._largest = max(
            self._largest, *(int(part.max()) for part in (ids, labels) if part.size), -1
        )
        self._lengths.append(np.frombuffer(columns["lengths"], dtype=np.int64).copy())
        self._categories.append(np.frombuffer(columns["categories"], dtype=np.int32).copy())
        self._empty += int(columns["empty"])
        for one in json.loads(columns["skipped"]):
            self.first_skipped = self.first_skipped or f"{one['where']}: {one['problem']}"
            self._skipped.write(json.dumps(one, ensure_ascii=False) + "\n")
            self._count += 1

    def _copy_ids(self, to: _Column) -> None:
        self._ids._stream.flush()
        with (self._folder / "ids.npy").open("rb") as stream:
            stream.seek(_NPY_HEADER_BYTES)
            while data := stream.read(1 << 24):
                to.append(data)

    def finish(self) -> dict[str, Any]:
        """Closes the files; what was counted."""
        self._ids.finish()
        if self._labels is not None:
            self._labels.finish()
        self._skipped.close()
        if not self._count:
            (self._folder / "skipped.jsonl").unlink()
        lengths = np.concatenate(self._lengths) if self._lengths else np.zeros(0, dtype=np.int64)
        np.save(self._folder / "offsets.npy", np.append(0, np.cumsum(lengths)).astype(np.int64))
        categories = (
            np.concatenate(self._categories) if self._categories else np.zeros(0, dtype=np.int32)
        )
        if categories.size:
            np.save(self._folder / "classes.npy", categories)
        return {
            "documents": len(lengths),
            "tokens": self._tokens,
            "trained": self._trained,
            "largest_id": self._largest,
            "empty": self._empty,
            "skipped": self._count,
            "content": xxhash.xxh3_128_hexdigest(
                b"".join(checksum.digest() for checksum in self._checksums)
            ),
        }


# What is seen meanwhile


@contextlib.contextmanager
def _watched(progress: Progress, total: int, started: float) -> Iterator[None]:
    """A line that is drawn over on a terminal; elsewhere one every half minute."""
    live, done = sys.stdout.isatty(), threading.Event()

    def watch() -> None:
        while not done.wait(0.3 if live else _PROGRESS_SECONDS):
            read, tokens = (int(value) for value in progress.sum(axis=0))
            seconds = time.monotonic() - started
            left = f", {seconds * (total - read) / read:.0f} s left" if read else ""
            line = f"tokenizing: {min(1.0, read / max(1, total)):.0%} of {total / 2**20:,.0f} MiB"
            line += f", {read / 2**20 / seconds:.1f} MiB/s, {tokens / seconds:,.0f} tokens/s{left}"
            if live:
                sys.stdout.write("\r\x1b[2K" + line)
                sys.stdout.flush()
            else:
                logger.info(line)

    thread = threading.Thread(target=watch, name="tokenizing", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        if live:
            sys.stdout.write("\r\x1b[2K")
            sys.stdout.flush()
