"""The token ids of other tools' files as a store: the files are mapped, and an index of them is kept.

Each file is read once, from its beginning to its end, for what a store knows of its documents: where they
begin, their hashes and the largest id. The ids stay where they are.
"""

from __future__ import annotations

import bisect
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64

from launcher.console import advanced, task
from launcher.data.packing import Integers
from launcher.data.store_files import COUNTS, ORIGIN, Hashes, MappedArray, token_hashes, write_array
from launcher.data.tokenizer import load_tokenizer, tokenizer_identity
from launcher.errors import RecipeError
from launcher.files import checksum_of
from launcher.models.micro_batch import IGNORED
from launcher.recipe import schema
from launcher.sources.rows import Row, SourcePart
from launcher.sources.token_files import TokenFile, is_raw, read_token_file

_BLOCK = 1 << 22
"""Tokens that are read at a time."""
_OPEN_FILES = 256
"""Most files that are mapped at a time: each takes a file descriptor."""


@functools.lru_cache(maxsize=_OPEN_FILES)
def _mapped(name: str, dtype: str, begin: int, count: int) -> MappedArray:
    return MappedArray(name, dtype=dtype, mode="r", offset=begin, shape=(count,))


class FileTokens:
    """The ids of several files, one after another, as an array from which ranges are taken. A range is
    int32, whatever type the ids have in the file."""

    dtype = np.dtype(np.int32)

    def __init__(self, files: Sequence[TokenFile]) -> None:
        self.files = [file for file in files if file.tokens]
        self._starts = [0, *itertools.accumulate(file.tokens for file in self.files)]

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, between: slice) -> npt.NDArray[np.int32]:
        start, end, step = between.indices(len(self))
        assert step == 1
        parts = []
        number = bisect.bisect_right(self._starts, start) - 1
        while start < end:
            first, stop = self._starts[number], min(end, self._starts[number + 1])
            parts.append(self._range(self.files[number], start - first, stop - first))
            start, number = stop, number + 1
        return np.concatenate(parts, dtype=np.int32) if parts else np.zeros(0, dtype=np.int32)

    def _range(self, file: TokenFile, start: int, end: int) -> npt.NDArray[Any]:
        return _mapped(file.name, file.dtype, file.begin, file.tokens)[start:end]


class FileLabels(FileTokens):
    """The same ids as labels: IGNORED where the mask of the file says that they have no loss."""

    def _range(self, file: TokenFile, start: int, end: int) -> npt.NDArray[Any]:
        ids = super()._range(file, start, end)
        if file.mask is None:
            return ids
        mask = _mapped(file.mask, "bool", 0, file.tokens)[start:end]
        return np.where(mask, ids.astype(np.int32), np.int32(IGNORED))


@dataclass(frozen=True)
class Reading:
    """How files of token ids are read that do not say it themselves."""

    dtype: str | None
    """data.token_dtype; None: by the vocabulary."""
    end: int | None
    """data.end_token; None: the tokenizer's."""
    tokenizer: str | None
    vocabulary: int | None

    def identity(self, parts: Sequence[SourcePart]) -> list[object]:
        """Changes whenever the documents of files could."""
        if not any(is_raw(part.name) for part in parts):
            return []
        end: object = self.end
        if end is None and self.tokenizer is not None:
            end = tokenizer_identity(self.tokenizer)
        return [self.dtype_of_raw, end]

    @property
    def dtype_of_raw(self) -> str | None:
        """The type of ids of which a file says nothing, as OLMo's tools choose it: the smaller one
        that has room for the vocabulary. None: not known."""
        if self.dtype is not None or self.vocabulary is None:
            return self.dtype
        return "uint16" if self.vocabulary <= 1 << 16 else "uint32"

    def end_token(self, name: str) -> int:
        """The token that ends documents. Raises RecipeError if none is known."""
        if self.end is not None:
            return self.end
        if self.tokenizer is None:
            what = (
                "nothing says where its documents end; give data.end_token, the id that ends them"
            )
            raise RecipeError(f"{name}: {what}")
        return load_tokenizer(self.tokenizer).end

    def file(self, name: str) -> tuple[TokenFile, Integers]:
        """A file, and where its documents begin, with the end: (documents + 1,). Raises RecipeError."""
        file, bounds = read_token_file(name, self.dtype_of_raw)
        if bounds is not None:
            return file, bounds
        end, ends = self.end_token(name), [np.zeros(1, dtype=np.int64)]
        ids = FileTokens([file])
        for start in range(0, file.tokens, _BLOCK):
            ends.append(np.flatnonzero(ids[start : start + _BLOCK] == end) + start + 1)
            advanced()
        bounds = np.concatenate(ends)
        if len(bounds) == 1 and file.tokens and self.end is None:
            what = f"no document ends with {end}, the tokenizer's end of text; data.end_token gives the id"
            raise RecipeError(
                f"{name}: {what} that does (read as {file.dtype}; see data.token_dtype)"
            )
        # Tokens after the last end are a document, too
        return file, bounds if bounds[-1] == file.tokens else np.append(bounds, file.tokens)


def index_files(
    folder: Path,
    parts: Sequence[SourcePart],
    reading: Reading,
    *,
    limit: int | None,
    vocabulary: int | None,
    check: Callable[..., None],
) -> dict[str, Any]:
    """Writes the files of a store of these parts, but for meta.json, whose content it returns.

    limit: documents that are used at most, the first ones. vocabulary: of the model; None: not known.
    check: raises RecipeError about a row with an id beyond it. Raises RecipeError if a file cannot be
    used, and OSError.
    """
    files: list[TokenFile] = []
    offsets = [np.zeros(1, dtype=np.int64)]
    largest, empty, tokens, masks = -1, 0, 0, xxh3_64()
    with (
        task("reading token ids", len(parts)) as advance,
        (folder / "hashes.bin").open("wb", buffering=0) as hashes,
        (folder / "origins.bin").open("wb") as origins,
    ):
        for number, part in enumerate(parts):
            file, bounds = reading.file(part.name)
            if not file.tokens:
                raise RecipeError(
                    f"{part.name}: it has no tokens; remove it, or leave it out of the patterns"
                )
            bounds = bounds if limit is None else bounds[: limit + 1]
            limit = None if limit is None else limit - (len(bounds) - 1)
            file = replace(file, tokens=int(bounds[-1]))
            numbers = np.flatnonzero(np.diff(bounds)) + 1
            if len(bounds) > np.iinfo(np.int32).max:
                raise RecipeError(f"{part.name}: more than 2^31 documents; divide the file")
            empty += len(bounds) - 1 - len(numbers)
            bounds = np.append(bounds[:1], bounds[numbers])
            for first, end in _blocks(bounds):
                most, wrong = _largest(file, int(bounds[first]), int(bounds[end]), vocabulary)
                if wrong is not None:
                    document = int(numbers[np.searchsorted(bounds, wrong, side="right") - 1])
                    row, key = Row(part, document, None), ""
                    if is_raw(part.name):
                        key = f"; its ids are read as {file.dtype}: data.token_dtype says another type"
                    check(row, most, hint=key)
                    raise RecipeError(f"{row.where}: {most} is no token id{key}")
                largest = max(largest, most)
                # At once: processes that wait see from the size that this one gets further
                hashes.write(_hashes(file, bounds[first : end + 1]).data)
                advanced()
            if file.mask is not None:
                mask = _mapped(file.mask, "uint8", 0, file.tokens)
                for start in range(0, file.tokens, _BLOCK):
                    masks.update(mask[start : start + _BLOCK].data)
            files.append(file)
            offsets.append(bounds[1:] + tokens)
            tokens += file.tokens
            origin = np.zeros(len(numbers), dtype=ORIGIN)
            origin["file"], origin["number"] = number, numbers
            origins.write(origin.data)
            advance(1)
            if limit == 0:
                break
    every = np.concatenate(offsets)
    write_array(folder / "offsets.npy", [every], dtype=np.int64, length=len(every))
    content: list[bytes | memoryview] = [every.data]
    if len(every) > 1:  # an empty file cannot be mapped
        content.append(np.memmap(folder / "hashes.bin", mode="r").data)
    content += [masks.digest()] if any(file.mask for file in files) else []
    return {
        "documents": len(every) - 1,
        "tokens": tokens,
        "skipped": [],
        **dict.fromkeys(COUNTS, 0),
        "empty": empty,
        "largest_id": largest,
        "unused": [],
        "content": checksum_of(content),
        "token_files": [
            [file.dtype, file.begin, file.tokens, file.mask and PurePath(file.mask).name]
            for file in files
        ],
        "sizes": {
            name: (folder / name).stat().st_size
            for name in ("offsets.npy", "hashes.bin", "origins.bin")
        },
    }


def _blocks(bounds: Integers) -> Iterator[tuple[int, int]]:
    """The first document, and the end, of ranges of documents with about _BLOCK tokens, or with a single
    longer one."""
    first = 0
    while first < len(bounds) - 1:
        end = int(np.searchsorted(bounds, bounds[first] + _BLOCK, side="right")) - 1
        yield first, max(first + 1, end)
        first = max(first + 1, end)


def _largest(
    file: TokenFile, start: int, end: int, vocabulary: int | None
) -> tuple[int, int | None]:
    """The largest id of a range, and the place of the first one that is none of the vocabulary, which
    is then the id that is returned; None: all are."""
    ids, most = _mapped(file.name, file.dtype, file.begin, file.tokens), -1
    ids_end = 1 << 31 if vocabulary is None else vocabulary
    for begin in range(start, end, _BLOCK):
        block = ids[begin : min(begin + _BLOCK, end)]
        most = max(most, int(block.max()))
        if most >= ids_end or (block.dtype.kind == "i" and block.min() < 0):
            wrong = int(np.argmax((block >= ids_end) | (block < 0)))
            return int(block[wrong]), begin + wrong
    return most, None


def _hashes(file: TokenFile, bounds: Integers) -> Hashes:
    """As `document_hashes`, of the documents of a file with these bounds."""
    ids, start, end = FileTokens([file]), int(bounds[0]), int(bounds[-1])
    if len(bounds) > 2 or end - start <= _BLOCK:
        return token_hashes(ids[start:end], bounds - start)
    digest = xxh3_64()  # a document that may be larger than the memory
    for begin in range(start, end, _BLOCK):
        digest.update(ids[begin : min(begin + _BLOCK, end)].data)
    return np.array([digest.intdigest()], dtype=np.uint64)


def mapped_tokens(
    parts: Sequence[SourcePart], meta: dict[str, Any]
) -> tuple[FileTokens, FileTokens | None]:
    """The ids of a store that `index_files` made, and the labels; None: the ids."""
    files = [
        TokenFile(
            part.name, dtype, begin, tokens, mask and str(PurePath(part.name).with_name(mask))
        )
        for part, (dtype, begin, tokens, mask) in zip(parts, meta["token_files"], strict=False)
    ]
    return FileTokens(files), FileLabels(files) if any(file.mask for file in files) else None


def make_reading(
    parts: Sequence[SourcePart],
    data: schema.Data,
    *,
    columns: Sequence[str],
    tokenizer: str | None,
    vocabulary: int | None,
) -> Reading | None:
    """How the parts are read; None: they are no files of token ids. Raises RecipeError if keys name
    columns, which such files do not have."""
    if not parts or parts[0].form != "tokens":
        return None
    if columns:
        what = f"{parts[0].name} holds token ids, and no columns; remove the keys that name some"
        raise RecipeError(f"data: {what}: {', '.join(columns)}")
    return Reading(data.token_dtype, data.end_token, tokenizer, vocabulary)
