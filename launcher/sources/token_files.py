"""Files of token ids that other tools write: where the ids are, and where documents end.

The files are memory-mapped, never copied: Megatron-LM's `.bin` with its `.idx`, litdata's `chunk-*.bin`
with `index.json`, datatrove's and nanotron's `.ds`, and the `.npy` of OLMo, which has no header. numpy is
imported when a file is read: recipes are checked without it.
"""

from __future__ import annotations

import functools
import gzip
import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from launcher.errors import RecipeError, first_line
from launcher.sources.location import Location

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Bounds = npt.NDArray[np.int64]

SUFFIXES = (".bin", ".idx", ".ds", ".npy")
_LITDATA_INDEX = "index.json"
_OF_DATATROVE = (".index", ".metadata", ".loss")
_TOKENS, _MASK = "token_ids", "labels_mask"
"""In the names of open-instruct's files for OLMo-core: the ids, and whether each has loss."""
_MEGATRON_MARK = b"MMIDIDX\x00\x00"
_MEGATRON_HEADER = struct.Struct("<9sQBQQ")
_INTEGERS = ("int8", "int16", "int32", "int64")
_MEGATRON_TYPES = ("uint8", *_INTEGERS, "float64", "float32", "uint16")
"""From code 1 on."""
_LITDATA_TYPES: dict[str, Sequence[str]] = {
    "no_header_tensor": (
        *(11 * ("float",)),
        *("uint8", "int8", "int16", "int16", "int32", "int32", "int64", "int64", "bool", "uint16"),
    ),
    "no_header_numpy": (*_INTEGERS, "uint8", "uint16", "uint32", "uint64"),
}
"""By the number after the name of the serializer in data_format."""
_LOOKED_AT = 1 << 16
"""First ids of a file by which another type of its ids is noticed."""


@dataclass(frozen=True)
class TokenFile:
    """Token ids in a file, one document after another."""

    name: str
    dtype: str
    """As numpy names it, perhaps with its byte order."""
    begin: int
    """The byte of the first id."""
    tokens: int
    mask: str | None = None
    """A file with a byte for each token: whether it has loss. None: all have."""


def is_token_file(name: str) -> bool:
    """Whether a file holds token ids by its name, or is the index of such a file."""
    return PurePath(name).suffix.lower() in SUFFIXES


def chosen_files(files: Sequence[Location]) -> list[Location]:
    """The files with token ids among these, in place of their indices and without what is beside them.
    Other files stay as they are. Raises RecipeError if an index has no such file, or if one is in a
    store."""
    chosen = []
    for file in files:
        if is_beside(file):
            continue
        if file.in_store:
            if is_token_file(file.name):
                what = (
                    "files of token ids are memory-mapped, and must be on a disk; copy them to one"
                )
                raise RecipeError(f"{file.name}: {what}")
        elif file.path.suffix == ".idx":
            ids = Location(str(file.path.with_suffix(".bin")))
            if not ids.is_file():
                raise RecipeError(
                    f"{file.name}: {ids.name}, the ids that it is the index of, is missing"
                )
            file = ids
        chosen.append(file)
    return chosen


def is_beside(file: Location) -> bool:
    """Whether a file only says what a file of token ids beside it holds, and has rows by its name
    at most."""
    if file.in_store:
        return False
    path = file.path
    if path.name == _LITDATA_INDEX:
        return bool(_litdata_chunks(file.name))
    if path.suffixes[-2:] == [".csv", ".gz"]:
        return path.with_suffix("").with_suffix(".npy").is_file()
    if path.suffix in _OF_DATATROVE:
        return path.with_suffix("").suffix == ".ds"
    ids = path.with_name(path.name.replace(_MASK, _TOKENS))
    return path.suffix == ".npy" and ids != path and ids.is_file()


def files_of(name: str) -> list[Location]:
    """A file of token ids, and the files beside it that say what it holds."""
    file, path = Location(name), PurePath(name)
    beside = {
        ".bin": [path.with_suffix(".idx"), path.with_name(_LITDATA_INDEX)],
        ".ds": [PurePath(f"{name}{suffix}") for suffix in _OF_DATATROVE],
        ".npy": [path.with_suffix(".csv.gz"), path.with_name(path.name.replace(_TOKENS, _MASK))],
    }[path.suffix.lower()]
    others = [Location(str(each)) for each in beside if each != path]
    return [file, *(each for each in others if each.is_file())]


def is_raw(name: str) -> bool:
    """Whether nothing says which type the ids of a file have, or where its documents end: these
    follow from data.token_dtype and data.end_token."""
    if PurePath(name).suffix == ".ds":
        return not Location(f"{name}.index").is_file()
    return PurePath(name).suffix == ".npy"


def read_token_file(name: str, dtype: str | None = None) -> tuple[TokenFile, Bounds | None]:
    """A file of token ids, and where each document begins with the end, (documents + 1,); None: a
    token ends each document.

    dtype: of the ids, where the file does not say it; None: not known. Raises RecipeError if the
    file cannot be used.
    """
    path = PurePath(name)
    try:
        if path.suffix == ".ds":
            file, bounds = _datatrove(name, dtype)
        elif path.suffix == ".npy":
            file, bounds = _numpy(name, dtype)
        elif (index := Location(str(path.with_suffix(".idx")))).is_file():
            file, bounds = _megatron(name, index)
        else:
            file, bounds = _litdata(name, index)
    except OSError as error:
        what = f"{error.filename or name}: cannot be read: {error.strerror or error}"
        raise RecipeError(what) from None
    _check(file, bounds)
    return file, bounds


def _check(file: TokenFile, bounds: Bounds | None) -> None:
    """Raises RecipeError unless the ids are whole numbers, and the documents and loss masks fit."""
    _integers(file.name, file.dtype)
    if bounds is not None:
        if (bounds[1:] < bounds[:-1]).any() or bounds[0]:
            raise RecipeError(
                f"{file.name}: its index is damaged: a document ends before it begins"
            )
        if bounds[-1] != file.tokens:
            raise RecipeError(
                f"{file.name}: it has {file.tokens:,} tokens, but its index ends at {int(bounds[-1]):,}: one "
                "of them is cut off, or they do not belong together"
            )
    if file.mask is not None and (size := Location(file.mask).size()) != file.tokens:
        raise RecipeError(
            f"{file.mask}: {size:,} bytes for {file.tokens:,} tokens; it needs one for each"
        )


def _integers(name: str, dtype: str) -> None:
    """Raises RecipeError unless the type is one of whole numbers."""
    import numpy as np

    if np.dtype(dtype).kind not in "iu":
        raise RecipeError(f"{name}: it holds {np.dtype(dtype)}, and no token ids")


def _tokens(name: str, dtype: str, begin: int = 0) -> int:
    """The ids from a byte of a file on."""
    import numpy as np

    size, width = Location(name).size() - begin, np.dtype(dtype).itemsize
    if size % width:
        what = f"{size:,} bytes are no whole number of {dtype} ids: it is cut off, or has ids of another"
        raise RecipeError(f"{name}: {what} type")
    return size // width


def _from_index(index: Location, dtype: str, *, count: int = -1, offset: int = 0) -> Any:
    import numpy as np

    if not count or index.size() == offset:
        return np.zeros(0, dtype)
    return np.fromfile(index.path, dtype=dtype, count=count, offset=offset)


def _megatron(name: str, index: Location) -> tuple[TokenFile, Bounds]:
    """`.idx`: a header with the type, sequences and documents; the length (int32) and the byte (int64) of
    each sequence; and the first sequence of each document, and the end (int64)."""
    import numpy as np

    with index.open() as stream:
        header = stream.read(_MEGATRON_HEADER.size)
    if len(header) < _MEGATRON_HEADER.size or not header.startswith(_MEGATRON_MARK):
        raise RecipeError(
            f"{index.name}: no index of Megatron (MMIDIDX): write it with a newer version"
        )
    _, version, code, sequences, documents = _MEGATRON_HEADER.unpack(header)
    if version != 1 or not 1 <= code <= len(_MEGATRON_TYPES):
        what = f"version {version} with type {code} is not known; version 1 has types 1 to 8"
        raise RecipeError(f"{index.name}: {what}")
    size = len(header) + 12 * sequences + 8 * documents
    if index.size() == size + sequences and sequences:
        raise RecipeError(
            f"{index.name}: a multimodal index, with a mode for each sequence; only text is read: write it "
            "without multimodal"
        )
    if index.size() != size:
        what = (
            f"{index.size():,} bytes, but its {sequences:,} sequences need {size:,}: it is cut off"
        )
        raise RecipeError(f"{index.name}: {what}, or damaged")
    dtype = np.dtype(_MEGATRON_TYPES[code - 1]).newbyteorder("<")
    _integers(name, dtype.str)
    at = len(header)
    lengths = _from_index(index, "<i4", count=sequences, offset=at)
    pointers = _from_index(index, "<i8", count=sequences, offset=at + 4 * sequences)
    firsts = _from_index(index, "<i8", count=documents, offset=at + 12 * sequences)
    ends = np.cumsum(np.append(0, lengths.astype(np.int64)))
    if (pointers != ends[:-1] * dtype.itemsize).any():
        what = "its sequences do not follow each other in the .bin; merge the files again"
        raise RecipeError(f"{index.name}: {what}")
    if not documents or firsts[0] or firsts[-1] != sequences or (np.diff(firsts) < 0).any():
        what = (
            f"its documents do not have all {sequences:,} sequences; end each with end_document()"
        )
        raise RecipeError(f"{index.name}: {what}")
    return TokenFile(name, dtype.str, 0, _tokens(name, dtype.str)), ends[firsts]


def _datatrove(name: str, dtype: str | None) -> tuple[TokenFile, Bounds | None]:
    """`.ds.index`: the end of each document (uint64); the first line of `.ds.metadata`: tokenizer|bytes of
    an id; `.ds.loss`: a byte for each token."""
    import numpy as np

    index, loss = Location(f"{name}.index"), Location(f"{name}.loss")
    width, bounds = _datatrove_width(Location(f"{name}.metadata")), None
    size = Location(name).size()
    if index.is_file():
        if index.size() % 8:
            raise RecipeError(
                f"{index.name}: {index.size():,} bytes are no whole number of ends: it is cut off"
            )
        bounds = np.append(0, _from_index(index, "<u8").astype(np.int64))
        if width is None:
            width = size // max(1, int(bounds[-1]))
            if size != width * bounds[-1] or (size and width not in (2, 4)):
                what = f"{size:,} bytes, but its index ends at {int(bounds[-1]):,} tokens of 2 or 4 bytes: one"
                raise RecipeError(
                    f"{name}: {what} of them is cut off, or they do not belong together"
                )
    if width is not None:
        dtype = "<u4" if width == 4 else "<u2"
    elif dtype is None:
        raise _no_dtype(name)
    mask = loss.name if loss.is_file() else None
    return TokenFile(name, dtype, 0, _tokens(name, dtype), mask), bounds


def _datatrove_width(metadata: Location) -> int | None:
    """Bytes of an id; None: not known."""
    if not metadata.is_file():
        return None
    with metadata.open() as stream:
        line = stream.readline(1 << 16).decode(errors="replace").strip()
    width = line.rpartition("|")[2]
    if width not in ("2", "4"):
        what = f"its first line must be the tokenizer and 2 or 4, as in gpt2|2; got {line!r}"
        raise RecipeError(f"{metadata.name}: {what}")
    return int(width)


def _no_dtype(name: str) -> RecipeError:
    what = "nothing says which type its ids have; give data.token_dtype, such as uint16"
    return RecipeError(f"{name}: {what}")


def _numpy(name: str, dtype: str | None) -> tuple[TokenFile, Bounds | None]:
    """The ids alone, or a .npy file with its header. `.csv.gz`: the first token of each document and the
    end, of OLMo's tools."""
    import numpy as np

    path, begin = PurePath(name), 0
    with Location(name).open() as stream:
        if stream.read(6) == b"\x93NUMPY":
            stream.seek(0)
            try:
                shape, _, kind = _header(stream)
            except ValueError as error:
                raise RecipeError(
                    f"{name}: its header cannot be read: {first_line(error)}"
                ) from None
            begin, dtype = stream.tell(), kind.str
            if len(shape) != 1:
                what = f"an array of {len(shape)} dimensions; ids must be one row, with one"
                raise RecipeError(f"{name}: {what}")
            if (tokens := _tokens(name, dtype, begin)) != shape[0]:
                what = f"{tokens:,} values, but its header says {shape[0]:,}: it is cut off"
                raise RecipeError(f"{name}: {what}")
    if dtype is None:
        raise _no_dtype(name)
    file = TokenFile(name, dtype, begin, _tokens(name, dtype, begin))
    if np.dtype(dtype).itemsize == 2:
        first = np.fromfile(name, dtype=dtype, count=min(_LOOKED_AT, file.tokens), offset=begin)
        if len(first) > 1 and first[::2].any() and not first[1::2].any():
            what = "every other id is 0, so its ids have 4 bytes; give data.token_dtype: uint32"
            raise RecipeError(f"{name}: read as {dtype}, {what}")
    mask = path.with_name(path.name.replace(_TOKENS, _MASK))
    if mask != path and Location(str(mask)).is_file():
        file = TokenFile(*(file.name, file.dtype, file.begin, file.tokens), str(mask))
    metadata = Location(str(path.with_suffix(".csv.gz")))
    return file, _olmo_documents(metadata) if metadata.is_file() else None


def _header(stream: Any) -> Any:
    from numpy.lib import format as npy

    version = npy.read_magic(stream)
    read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
    return read(stream)


def _olmo_documents(metadata: Location) -> Bounds:
    import numpy as np

    ends = [0]
    try:
        with metadata.open() as file, gzip.open(file, "rt", encoding="utf-8") as lines:
            for line in lines:
                start, end = (int(value) for value in line.split(",", 2)[:2])
                if start != ends[-1]:
                    raise ValueError(f"a document begins at {start:,}, and not at {ends[-1]:,}")
                ends.append(end)
    except (ValueError, EOFError, gzip.BadGzipFile) as error:
        what = f"each line must have the first token of a document and its end: {first_line(error)}"
        hint = "without this file, data.end_token ends documents"
        raise RecipeError(f"{metadata.name}:{len(ends)}: {what}; {hint}") from None
    return np.array(ends, dtype=np.int64)


@functools.lru_cache(maxsize=64)
def _litdata_index(name: str, state: tuple[object, ...]) -> dict[str, Any]:
    try:
        with Location(name).open() as stream:
            index = json.load(stream)
    except (OSError, ValueError):
        return {}
    if not isinstance(index, dict) or not isinstance(index.get("config"), dict):
        return {}
    chunks = index.get("chunks")
    chunks = [each for each in chunks if isinstance(each, dict)] if isinstance(chunks, list) else []
    return index | {"chunks": {each.get("filename"): each for each in chunks}} if chunks else {}


def _litdata_chunks(name: str) -> dict[str, Any]:
    """The index of litdata in a file, its chunks by the names of their files; empty: it is another file."""
    file = Location(name)
    return _litdata_index(name, tuple(file.state())) if file.is_file() else {}


def _litdata(name: str, megatron: Location) -> tuple[TokenFile, Bounds]:
    """A chunk: the number of items, the byte of each and the end (uint32), and the items."""
    import numpy as np

    path = PurePath(name)
    index = path.with_name(_LITDATA_INDEX)
    read = _litdata_chunks(str(index))
    chunk = read.get("chunks", {}).get(path.name)
    if chunk is None:
        what = f"{megatron.name}, its index, is missing"
        if read:
            what = f"{index} does not name it, and {megatron.name} is missing"
        hint = "Megatron writes a .bin and an .idx, litdata chunks and an index.json"
        raise RecipeError(f"{name}: {what}; {hint}")
    config = read["config"]
    for key, instead in (("compression", "compression=None"), ("encryption", "no encryption")):
        if config.get(key):
            what = f"chunks with {key} ({config[key]}) cannot be memory-mapped; write them with {instead}"
            raise RecipeError(f"{index}: {what}")
    serializer, _, number = str((config.get("data_format") or [""])[0]).partition(":")
    types, code = _LITDATA_TYPES.get(serializer, ()), int(number) if number.isdecimal() else -1
    dtype = types[code] if 0 <= code < len(types) and types[code] != "float" else None
    if config.get("item_loader") != "TokensLoader" or dtype is None or chunk.get("dim") is None:
        got = f"{config.get('item_loader')} of {config.get('data_format')}"
        what = (
            "only rows of token ids are read, which litdata writes with item_loader=TokensLoader()"
        )
        raise RecipeError(f"{index}: {what}; got {got}")
    file, starts = Location(name), np.zeros(0, "<u4")
    if file.size() >= 4:
        items = int(_from_index(file, "<u4", count=1)[0])
        starts = _from_index(file, "<u4", count=items + 1, offset=4)
    width = np.dtype(dtype).itemsize
    sound = len(starts) == chunk["chunk_size"] + 1 and starts[0] == 4 + 4 * len(starts)
    if not sound or starts[-1] != file.size() or file.size() - starts[0] != chunk["dim"] * width:
        what = f"it does not fit {index}, which says {chunk['chunk_size']} items of {chunk['dim']} tokens"
        raise RecipeError(f"{name}: {what}: it is cut off, or damaged")
    bounds = (starts.astype(np.int64) - int(starts[0])) // width
    return TokenFile(
        name, np.dtype(dtype).newbyteorder("<").str, int(starts[0]), chunk["dim"]
    ), bounds
