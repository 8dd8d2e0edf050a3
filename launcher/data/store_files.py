"""The files of a token store on the disk: whether they are whole, and how they get there."""

from __future__ import annotations

import errno
import itertools
import json
import logging
import mmap
import os
import shutil
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

from launcher.console import advanced
from launcher.data.attachments import moved_attachments
from launcher.errors import RecipeError, first_line
from launcher.files import checksum_of, commit_folder, flush, flush_path, replace_text

if TYPE_CHECKING:
    from launcher.data.token_store import TokenStore

logger = logging.getLogger(__name__)

COUNTS = ("empty", "cut_documents", "cut_tokens", "further_documents")
"""Fields of a TokenStore that are sums over its parts."""
Hashes = npt.NDArray[np.uint64]
ORIGIN = np.dtype([("file", np.int32), ("number", np.int32), ("start", np.int64)])
"""Where a document comes from: the number of its file in the list of files, the start of a part of it
(`SourcePart`), and `Row.number`."""
_OF_DOCUMENTS = ("classes", "first_lengths", "desirable")
"""Fields of a TokenStore, of which rows of a kind have one: `classes.npy`."""
_SPILLED = (
    *("ids", "labels", "offsets", "weights", "margins", "origins"),
    *("attachments", "attachment_data"),
    *_OF_DOCUMENTS,
)


class MappedArray(np.memmap[Any, Any]):
    """A memory-mapped file, or consecutive elements of one. A pickle, such as that for a loader
    process that is not forked, names the file instead of holding the values."""

    def __reduce__(self) -> Any:
        file = self._mmap  # type: ignore[attr-defined]
        if file is None or not self.flags.c_contiguous:  # a result, or parts of elements
            return np.asarray(self).__reduce__()
        mapped = np.frombuffer(file, dtype=np.uint8)
        offset = self.offset - self.offset % mmap.ALLOCATIONGRANULARITY
        offset += self.ctypes.data - mapped.ctypes.data
        return MappedArray, (self.filename, self.dtype, "r", offset, self.shape)


def map_array(file: Path) -> MappedArray:
    """The array in a .npy file."""
    mapped: MappedArray = np.load(file, mmap_mode="r").view(MappedArray)
    return mapped


_BLOCK = 1 << 22
"""Elements of an array that are written at once."""


def write_array(
    file: Path, parts: Iterable[npt.NDArray[Any]], *, dtype: npt.DTypeLike, length: int
) -> None:
    """Writes a .npy file of an array with one dimension, which consists of these parts. Raises
    OSError: `np.save` reports a full disk without its number."""
    header = {"descr": np.lib.format.dtype_to_descr(np.dtype(dtype)), "fortran_order": False}
    with file.open("wb") as written:
        np.lib.format.write_array_header_2_0(written, header | {"shape": (length,)})
        for part in parts:
            for start in range(0, len(part), _BLOCK):
                block = np.ascontiguousarray(part[start : start + _BLOCK], dtype=dtype)
                written.write(block.data)
                advanced()


def document_hashes(store: TokenStore) -> Hashes:
    """A hash of the tokens and attachments of each document of a TokenStore, (documents,)."""
    hashes = token_hashes(store.ids, store.offsets)
    if (table := store.attachments) is not None:  # their tokens are equal
        documents = np.searchsorted(store.offsets, table["first"], side="right") - 1
        numbers = [xxh3_64_intdigest(str(each).encode()) for each in table["checksum"].tolist()]
        np.add.at(hashes, documents, np.array(numbers, dtype=np.uint64))
    return hashes


def token_hashes(ids: npt.NDArray[np.int32], offsets: npt.NDArray[np.int64]) -> Hashes:
    """A hash of the tokens of each document, (documents,). offsets: (documents + 1,)."""
    tokens = np.ascontiguousarray(ids).data.cast("B")
    bounds = itertools.pairwise((offsets * ids.itemsize).tolist())
    hashed = (xxh3_64_intdigest(tokens[start:end]) for start, end in bounds)
    return np.fromiter(hashed, dtype=np.uint64, count=len(offsets) - 1)


def store_problem(folder: Path) -> str:
    """Why a store, or an index of one, cannot be used; empty: it can. Raises RecipeError if it cannot
    be read, which may be for a time only."""
    try:
        meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
        if "tokens" in meta:  # of a store
            offsets = np.load(folder / "offsets.npy", mmap_mode="r")
            if [len(offsets) - 1, offsets[-1]] != [meta["documents"], meta["tokens"]]:
                return "offsets.npy does not agree with meta.json"
        for name, size in meta["sizes"].items():
            # An opened file has its present size, also where another node wrote it
            with (folder / name).open("rb") as file:
                if (present := file.seek(0, os.SEEK_END)) != size:
                    return f"{name} has {present:,} bytes instead of {size:,}"
    except (FileNotFoundError, NotADirectoryError) as error:
        return f"{Path(error.filename).name}: {error.strerror}"
    except OSError as error:
        raise RecipeError(f"data.cache: {folder} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, EOFError) as error:
        return first_line(error)
    return ""


def remove_damaged(folder: Path, aside: Path) -> None:
    """Removes a store that cannot be used. aside: its name meanwhile. Raises RecipeError."""
    if not folder.is_dir() or not (problem := store_problem(folder)):
        return
    logger.warning(f"data.cache: {folder} is damaged and is built again: {problem}")
    try:
        shutil.rmtree(folder.rename(aside), ignore_errors=True)
    except OSError as error:
        what = f"{folder} is damaged ({problem}) and cannot be removed: {error.strerror}"
        raise RecipeError(f"data.cache: {what}") from None


UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
"""Errors of a disk that is full or read-only."""


def cache_error(error: OSError, folder: Path) -> Exception:
    """The error to raise when a folder cannot be written to: it says what to do if the disk is full or
    read-only."""
    if error.errno not in UNWRITABLE:
        return error
    what = f"{folder} cannot be written to: {error.strerror}; free some space there"
    return RecipeError(f"data.cache: {what}, or give another data.cache")


_PROGRESS, _SKIPPED = "progress.json", "skipped.jsonl"
_NOTED = (
    "ids.bin",
    "labels.bin",
    "weights.bin",
    "attachments.bin",
    "attachment_data.bin",
    "lengths.bin",
    "classes.bin",
    "hashes.bin",
    "origins.bin",
    _SKIPPED,
)
"""The files to which `StoreWriter` appends."""
_SAVE_SECONDS = 20.0
"""Between two records of how far a tokenization is."""


class StoreWriter:
    """Writes the parts of a store, one after another, and notes from time to time how far they are
    on the disk: after a crash, another process continues there."""

    def __init__(self, folder: Path, tasks: int, left: Path | None = None) -> None:
        """folder: of the files, which exists. tasks: number of parts. left: the folder of a process
        that may still run and write, from which what it had noted is copied."""
        self._folder, self._tasks = folder, tasks
        self.done = 0
        """Parts that are written."""
        self.sums: dict[str, int] = {"largest_id": -1}
        self.unused: list[str] = []
        """See `TokenStore`."""
        self._saved = time.monotonic()
        self._files: dict[str, BinaryIO] = {}
        source = left or folder
        noted = saved_progress(source, tasks)
        sizes = noted.get("sizes", {})
        for name in _NOTED:
            if name not in sizes:  # begun after the last note
                (folder / name).unlink(missing_ok=True)
                continue
            if left is not None:
                _copy_beginning(left / name, folder / name, sizes[name])
            os.truncate(folder / name, sizes[name])
        if noted:
            self.done, self.sums = noted["done"], noted["sums"]
            self.unused = list(noted.get("unused", ()))
        self._tokens = int(self._read("lengths", np.int64).sum())
        self._attached_bytes = self._read("attachment_data", np.uint8).size

    def __enter__(self) -> StoreWriter:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files.values():
            file.close()

    def add(self, store: TokenStore) -> None:
        """Appends the documents of a TokenStore."""
        weights = store.weights
        if store.margins is not None:  # of each token, as in the stores of earlier versions
            weights = np.repeat(store.margins, np.diff(store.offsets))
        if weights is not None:  # then all documents have weights
            self._append("weights", weights)
        if store.labels is not None and not (self._folder / "labels.bin").exists():
            if "ids.bin" in self._files:  # the first store with labels
                self._files["ids.bin"].flush()
            if (ids := self._folder / "ids.bin").exists():
                shutil.copyfile(ids, self._folder / "labels.bin")
        labelled = store.labels is not None or (self._folder / "labels.bin").exists()
        self._append("ids", store.ids)
        if labelled:
            self._append("labels", store.labels_or_ids)
        self._append("lengths", np.diff(store.offsets))
        self._append("hashes", document_hashes(store))
        assert store.origins is not None
        self._append("origins", store.origins)
        if (table := store.attachments) is not None:
            assert store.attachment_data is not None
            moved = moved_attachments(table, self._tokens, self._attached_bytes)
            self._append("attachments", moved)
            self._append("attachment_data", store.attachment_data)
            self._attached_bytes += store.attachment_data.size
        self._tokens += int(store.offsets[-1])
        for name in _OF_DOCUMENTS:
            if (column := getattr(store, name)) is not None:
                self._append("classes", column)
        for row in store.skipped:
            self._open(_SKIPPED).write(json.dumps(row).encode() + b"\n")
        self.sums["largest_id"] = max(self.sums["largest_id"], store.largest_id)
        for name in COUNTS:
            self.sums[name] = self.sums.get(name, 0) + getattr(store, name)
        for name, count in store.located._asdict().items():
            if count:
                self.sums[name] = self.sums.get(name, 0) + count
        self.unused += [name for name in store.unused if name not in self.unused]

    def part_done(self) -> None:
        """All documents of the next part are appended."""
        self.done += 1
        if time.monotonic() - self._saved >= _SAVE_SECONDS:
            self.save()

    def save(self) -> None:
        """Notes how far the store is, once its files are on the disk."""
        for file in self._files.values():
            flush(file)
        files = [self._folder / name for name in _NOTED]
        sizes = {file.name: file.stat().st_size for file in files if file.exists()}
        noted: dict[str, Any] = {"tasks": self._tasks, "done": self.done, "sums": self.sums}
        noted |= {"sizes": sizes, "unused": self.unused}
        replace_text(self._folder / _PROGRESS, json.dumps(noted))
        self._saved = time.monotonic()

    def finish(self) -> dict[str, Any]:
        """Completes the files of the store. Returns what goes to meta.json."""
        self.__exit__()
        offsets = np.cumsum(np.concatenate([[0], self._read("lengths", np.int64)]), dtype=np.int64)
        np.save(self._folder / "offsets.npy", offsets)
        if (self._folder / "classes.bin").exists():
            np.save(self._folder / "classes.npy", self._read("classes", np.int32))
        skipped = self._folder / _SKIPPED
        lines = skipped.read_text().splitlines() if skipped.exists() else []
        for name in ("lengths.bin", "classes.bin", _SKIPPED, _PROGRESS):
            (self._folder / name).unlink(missing_ok=True)
        for name in ("ids.bin", "hashes.bin", "origins.bin"):
            (self._folder / name).touch()
        sizes: dict[str, int] = {}
        content: list[bytes | memoryview] = []
        names = ("ids.bin", "labels.bin", "offsets.npy", "classes.npy", "weights.bin")
        for name in (*names, "attachments.bin", "attachment_data.bin"):
            file = self._folder / name
            if file.exists():
                sizes[name] = file.stat().st_size
            if sizes.get(name):
                content += [name.encode(), np.memmap(file, mode="r").data]
        # Not in `content`: hashes follow from it, files may be renamed, and older checkpoints have a
        # checksum without them
        for name in ("hashes.bin", "origins.bin"):
            sizes[name] = (self._folder / name).stat().st_size
        return {
            "documents": len(offsets) - 1,
            "tokens": int(offsets[-1]),
            "skipped": [json.loads(line) for line in lines],
            **dict.fromkeys(COUNTS, 0),
            **self.sums,
            "unused": self.unused,
            "content": checksum_of(content),
            "sizes": sizes,
        }

    def _open(self, name: str) -> BinaryIO:
        if name not in self._files:
            self._files[name] = (self._folder / name).open("ab")
        return self._files[name]

    def _append(self, name: str, values: npt.NDArray[Any]) -> None:
        self._open(f"{name}.bin").write(np.ascontiguousarray(values).data)

    def _read(self, name: str, dtype: type) -> npt.NDArray[Any]:
        file = self._folder / f"{name}.bin"
        if not file.exists() or not file.stat().st_size:
            return np.zeros(0, dtype=dtype)
        return np.memmap(file, dtype=dtype, mode="r")


def stored_columns(folder: Path, kind: str, offsets: npt.NDArray[Any]) -> dict[str, Any]:
    """The fields of a TokenStore that rows of a kind have beside tokens and labels."""
    of_documents, of_tokens = "classes", "weights"
    if kind == "preference":
        of_documents, of_tokens = "first_lengths", "margins"
    elif kind == "unpaired":
        of_documents = "desirable"
    columns: dict[str, Any] = {}
    if (file := folder / "classes.npy").exists():
        columns[of_documents] = map_array(file)
    if (file := folder / "weights.bin").exists():
        weights = MappedArray(file, dtype=np.float32, mode="r")
        columns[of_tokens] = weights if of_tokens == "weights" else weights[offsets[:-1]]
    return columns


def saved_progress(folder: Path, tasks: int) -> dict[str, Any]:
    """What `StoreWriter.save` noted in a folder; empty if there is nothing that can be used."""
    try:
        noted = json.loads((folder / _PROGRESS).read_bytes())
        whole = all((folder / name).stat().st_size >= size for name, size in noted["sizes"].items())
        known = noted["sizes"].keys() <= {*_NOTED}
        return noted if noted["tasks"] == tasks and whole and known else {}
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return {}


def _copy_beginning(source: Path, target: Path, size: int) -> None:
    with source.open("rb") as read, target.open("wb") as written:
        while size and (block := read.read(min(size, 16 << 20))):
            size -= written.write(block)


def spilled(store: TokenStore, name: Path) -> TokenStore:
    """The same documents of a TokenStore, with their arrays in files `NAME.FIELD`, which
    `remove_spilled` removes: processes exchange their names only."""
    arrays: dict[str, Any] = {}
    for field in _SPILLED:
        values = getattr(store, field)
        if values is not None and values.size:
            file = name.with_name(f"{name.name}.{field}")
            values.tofile(file)
            arrays[field] = MappedArray(file, dtype=values.dtype, mode="r")
    return replace(store, **arrays)


def remove_spilled(store: TokenStore) -> None:
    """Removes the files of `spilled`."""
    for field in _SPILLED:
        if isinstance(values := getattr(store, field), MappedArray):
            os.unlink(str(values.filename))


def commit(scratch: Path, folder: Path) -> None:
    """Renames a scratch folder to `folder`, when its files are on the disk: otherwise a crash of
    the machine may leave a store with empty files."""
    for file in scratch.iterdir():
        flush_path(file)
    commit_folder(scratch, folder)
