"""Safetensors files: reads some rows of tensors, and writes folders of weights."""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from launcher.errors import RecipeError
from launcher.files import flush_path, mode_of_umask
from launcher.models.quantization import CAN_BE_READ, UNQUANTIZED
from launcher.models.shards import local_columns, local_rows, takes_whole_rows, write

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
ADAPTER, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
MAX_FILE_BYTES = 5 * 10**9
"""Largest size of an exported file, unless a single tensor is larger."""
SAMPLED_BLOCKS, BLOCK_BYTES = 2**14, 2**12
"""What a digest of weights reads: 64 MiB, or one block of each tensor if these are more."""
_ROWS_AT_ONCE = 2**13
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""By their names in safetensors."""
Tensors = Mapping[str, torch.Tensor]
"""By name."""


@dataclass(frozen=True)
class StoredRows:
    """Consecutive rows (of dimension 0) of a stored tensor, or some columns of these rows, under
    its name in a file."""

    file: Path
    first: int
    rows: int
    """1 for a scalar."""
    first_column: int = 0
    columns: int | None = None
    """Of dimension 1; None: all."""

    def columns_of(self, width: int) -> range:
        """Those of a tensor with `width` columns."""
        columns = width if self.columns is None else self.columns
        return range(self.first_column, self.first_column + columns)


class StoredTensors:
    """Tensors of safetensors files, by name. The files are mapped, not read."""

    def __init__(self, parts: Mapping[str, Sequence[StoredRows]], tensors: Tensors) -> None:
        """`tensors` have shapes and dtypes only: they are on meta."""
        self._parts, self.tensors = parts, tensors
        self.absent: tuple[str, ...] = ()
        """Names in the index of the files that none of these holds."""
        self._open: dict[Path, Any] = {}
        self._new: dict[str, range] = {}

    def extend(self, name: str, new: range) -> None:
        """Gives a tensor rows for new tokens, each with the mean of the rows before them."""
        shape = self.tensors[name].shape
        self._new[name] = range(min(new.start, shape[0]), new.stop)
        made = self.tensors[name].new_empty(max(shape[0], new.stop), *shape[1:])
        self.tensors = {**self.tensors, name: made}

    def fill_with_mean(self, name: str, tensor: torch.Tensor) -> None:
        """Sets all rows of this rank's part of another tensor to the mean of an extended one."""
        local_rows(tensor)[0].copy_(self._mean(name))

    def _mean(self, name: str) -> torch.Tensor:
        """The mean of the rows that tokens used, rounded to the stored dtype."""
        total, known = 0.0, self._new[name].start
        (part,) = self._parts[name]
        stored = self._slice(name, part.file)
        for begin in range(0, known, _ROWS_AT_ONCE):
            rows = stored[begin : min(begin + _ROWS_AT_ONCE, known)]
            total = total + rows.double().sum(0)
        return torch.as_tensor(total / known).to(self.tensors[name].dtype)

    def dtype(self) -> torch.dtype:
        """The dtype of most of the bytes; float32 if no tensor is floating-point."""
        sizes = Counter({torch.float32: 0})
        for tensor in self.tensors.values():
            sizes[tensor.dtype] += tensor.nbytes * tensor.is_floating_point()
        return sizes.most_common(1)[0][0]

    def read(self, name: str) -> torch.Tensor:
        """The whole tensor, perhaps a view of the mapped file."""
        parts = sorted(self._parts[name], key=lambda part: part.first)  # they are stored by rank
        if any(part.columns is not None for part in parts):
            whole = torch.empty_like(self.tensors[name], device="cpu")
            for part in parts:
                columns, rows = (
                    part.columns_of(whole.shape[1]),
                    slice(part.first, part.first + part.rows),
                )
                values = self._whole(name, part.file)
                whole[rows, columns.start : columns.stop] = values
            return whole
        tensors = [self._whole(name, part.file) for part in parts]
        if (new := self._new.get(name)) is not None:
            whole = torch.empty_like(self.tensors[name], device="cpu")
            whole[: len(tensors[0])] = tensors[0]
            whole[new.start : new.stop] = self._mean(name)
            return whole
        return tensors[0] if len(tensors) == 1 else torch.cat(tensors)

    def copy_rows(self, name: str, tensor: torch.Tensor) -> None:
        """Copies this rank's part into that of a tensor of the same shape, or in NF4."""
        local, first = local_rows(tensor)
        own = local_columns(tensor)
        if not local.ndim:
            local.copy_(self.read(name))
            return
        for part in self._parts[name]:
            start, stop = max(first, part.first), min(first + len(local), part.first + part.rows)
            for some in self._at_once(name, range(start, stop)):
                stored = self._slice(name, part.file)
                rows = slice(some.start - part.first, some.stop - part.first)
                target = local[some.start - first : some.stop - first]
                if part.columns is None and takes_whole_rows(tensor):
                    write(target, stored[rows], own)
                    continue
                width = self.tensors[name].shape[1]
                wanted, kept = own or range(width), part.columns_of(width)
                left, right = max(wanted.start, kept.start), min(wanted.stop, kept.stop)
                if left < right:
                    values = stored[rows, left - kept.start : right - kept.start]
                    target[:, left - wanted.start : right - wanted.start].copy_(values)
        new = self._new.get(name, range(0))
        start, stop = max(first, new.start), min(first + len(local), new.stop)
        if start < stop:
            mean = self._mean(name)
            local[start - first : stop - first] = (
                mean if own is None else mean[own.start : own.stop]
            )

    def digest(self) -> str:
        """A digest of the names, dtypes, shapes and some of the values: enough to notice other
        weights, quickly. The division into files has no influence."""
        blocks = max(1, SAMPLED_BLOCKS // max(1, len(self.tensors)))
        digests: dict[str, bytes] = {}
        for file in {part.file for parts in self._parts.values() for part in parts}:
            with file.open("rb") as stream:
                size = int.from_bytes(stream.read(8), "little")
                header = json.loads(stream.read(size))
                header.pop("__metadata__", None)
                for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
                    begin, end = (8 + size + offset for offset in entry.pop("data_offsets"))
                    sample = hashlib.sha256(json.dumps([name, entry], sort_keys=True).encode())
                    for start, length in _sampled_blocks(begin, end, blocks):
                        stream.seek(start)
                        sample.update(stream.read(length))
                    digests[name] = sample.digest()
        return hashlib.sha256(b"".join(digests[name] for name in sorted(digests))).hexdigest()[:16]

    def close(self) -> None:
        """Unmaps the files."""
        self._open.clear()

    def _at_once(self, name: str, rows: range) -> Iterator[range]:
        """Parts of these rows, which are read one after the other."""
        yield from [rows] if rows else []

    def _slice(self, name: str, file: Path) -> Any:
        """An object of which rows of a tensor can be read: `[rows]` or `[rows, columns]`."""
        return self._file(file).get_slice(name)

    def _whole(self, name: str, file: Path) -> torch.Tensor:
        """The whole tensor, or what this file has of it."""
        tensor: torch.Tensor = self._file(file).get_tensor(name)
        return tensor

    def _file(self, file: Path) -> Any:
        if file not in self._open:
            try:
                self._open[file] = safe_open(file, framework="pt")
            except (OSError, SafetensorError) as error:
                raise OSError(f"{file.name} cannot be read: {error}") from None
        return self._open[file]


def _sampled_blocks(begin: int, end: int, blocks: int) -> list[tuple[int, int]]:
    """Start and length of up to `blocks` blocks of these bytes, evenly spaced; all if they fit."""
    free = end - begin - BLOCK_BYTES
    if end - begin <= blocks * BLOCK_BYTES:
        return [(begin, end - begin)]
    if blocks == 1:
        return [(begin + free // 2, BLOCK_BYTES)]
    return [(begin + free * index // (blocks - 1), BLOCK_BYTES) for index in range(blocks)]


def open_folder(folder: Path, *, key: str = "model.path") -> StoredTensors:
    """The weights in a model's folder: one file, or several with an index. Raises RecipeError,
    which begins with `key`, if files are missing or damaged. See `refuse_absent`."""
    if (folder / SINGLE).is_file():
        return open_files([folder / SINGLE], key=key)
    if not (folder / INDEX).is_file():
        raise RecipeError(
            f"{key}: {folder} has neither {SINGLE} nor {INDEX}. For random weights, set "
            "model.init=random. An adapter is merged by launcher export RUN_DIR out=OUT --merged. "
            "Pickled weights can run code when loaded; if you trust them, "
            "from_pretrained(FOLDER).save_pretrained(NEW_FOLDER) converts them"
        )
    try:
        file_of: dict[str, str] = json.loads((folder / INDEX).read_text())["weight_map"]
        if not all(isinstance(name, str) for name in file_of.values()):
            raise TypeError
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        what = "has no weight_map, an object with the name of a file for each tensor"
        raise RecipeError(f"{key}: {folder / INDEX} {what}") from None
    names = set(file_of.values())
    if outside := [name for name in names if Path(name).is_absolute() or ".." in Path(name).parts]:
        raise RecipeError(f"{key}: {folder / INDEX} names {outside[0]}, outside of the folder")
    absent = sorted(name for name in names if not (folder / name).is_file())
    stored = open_files([folder / name for name in sorted(names.difference(absent))], key=key)
    _refuse_lost(absent, folder, key)
    stored.absent = tuple(sorted(file_of.keys() - stored.tensors.keys()))
    return stored


def refuse_absent(
    stored: StoredTensors, folder: Path, *, key: str, tied: Sequence[Sequence[str]] = ()
) -> None:
    """Raises RecipeError if the index of a folder names tensors that no file holds. Some programs
    write each of the `tied` names of a parameter to the index, and the parameter once to a file."""
    names = tuple(name for names in tied for name in names)
    inner = tuple(f".{name}" for name in names)
    lost = [name for name in stored.absent if name not in names and not name.endswith(inner)]
    _refuse_lost(lost, folder, key)


def _refuse_lost(lost: Sequence[str], folder: Path, key: str) -> None:
    if lost:
        raise RecipeError(
            f"{key}: {folder} lacks {', '.join(lost)}, which its index names; download it again"
        )


def open_files(files: Iterable[Path], *, key: str = "model.path") -> StoredTensors:
    """All tensors of these files, whole. Raises RecipeError if one cannot be read."""
    tensors: dict[str, torch.Tensor] = {}
    parts: dict[str, list[StoredRows]] = {}
    for file in files:
        try:
            handle: Any = safe_open(file, framework="pt")
        except (OSError, SafetensorError) as error:
            raise RecipeError(
                f"{key}: {file} is damaged, or no safetensors file: {error}; download it again"
            ) from None
        for name in handle.keys():  # noqa: SIM118
            stored = handle.get_slice(name)
            shape, dtype = tuple(stored.get_shape()), stored.get_dtype()
            if dtype not in DTYPES:
                problem = f"{key}: {file}: {name} has the dtype {dtype}, which is not known"
                if dtype.startswith(("F4", "F6")):
                    problem += f": its weight is quantized; {CAN_BE_READ}; {UNQUANTIZED}"
                raise RecipeError(problem)
            tensors[name] = torch.empty(shape, dtype=DTYPES[dtype], device="meta")
            parts[name] = [StoredRows(file, 0, shape[0] if shape else 1)]
    return StoredTensors(parts, tensors)


def write_tensors(
    folder: Path,
    tensors: Iterable[tuple[str, torch.Tensor, torch.dtype]],
    *,
    adapter: bool = False,
    header: Mapping[str, str] | None = None,
) -> None:
    """Writes model.safetensors, or files of MAX_FILE_BYTES with an index, as transformers names
    them; of an adapter always one file.

    Each tensor comes with its name, and with the dtype to which floating-point values are cast.
    Those of one file are held in memory. header: further metadata of each file. Raises OSError if they cannot be written.
    """
    limit = math.inf if adapter else MAX_FILE_BYTES
    held: dict[str, torch.Tensor] = {}
    file_of: dict[str, int] = {}
    number, size, total = 1, 0, 0
    for name, tensor, dtype in tensors:
        dtype = dtype if tensor.is_floating_point() else tensor.dtype
        copy = tensor.detach().to("cpu", dtype, copy=True, memory_format=torch.contiguous_format)
        if held and size + copy.nbytes > limit:
            _save(held, folder / f"part-{number}", header or {})
            held, number, size = {}, number + 1, 0
        held[name], file_of[name] = copy, number
        size, total = size + copy.nbytes, total + copy.nbytes
    _save(held, folder / f"part-{number}", header or {})
    if number == 1:
        (folder / "part-1").rename(folder / (ADAPTER if adapter else SINGLE))
        return
    files = [f"model-{i:05}-of-{number:05}.safetensors" for i in range(1, number + 1)]
    for i, file in enumerate(files, start=1):
        (folder / f"part-{i}").rename(folder / file)
    weight_map = {name: files[i - 1] for name, i in file_of.items()}
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _save(tensors: dict[str, torch.Tensor], file: Path, header: Mapping[str, str]) -> None:
    try:
        with mode_of_umask(file):
            save_file(tensors, file, metadata={"format": "pt", **header})
    except SafetensorError as error:  # such as a full disk
        raise OSError(f"{file} cannot be written: {error}") from None
    flush_path(file)  # now, because flushing all files at the end would take minutes at once
