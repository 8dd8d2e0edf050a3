"""Reads and writes folders of safetensors, one tensor or some rows at a time."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

from launcher.errors import RecipeError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
ADAPTER, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
MAX_FILE_BYTES = 5 * 10**9
"""Of an exported file, unless a single tensor is larger."""
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""By their names in safetensors."""
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Shape:
    """Shape and dtype of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @staticmethod
    def of(tensor: torch.Tensor) -> Shape:
        """Of this tensor."""
        return Shape(tuple(tensor.shape), tensor.dtype)

    @property
    def bytes(self) -> int:
        """Of all elements."""
        return self.dtype.itemsize * int(torch.Size(self.shape).numel())

    def meta(self) -> torch.Tensor:
        """A tensor of this shape without storage."""
        return torch.empty(self.shape, dtype=self.dtype, device="meta")


class StoredTensors:
    """Tensors of safetensors files, by name. The files are mapped, not read."""

    def __init__(self, files: Mapping[str, Path]) -> None:
        """files: the file of each tensor."""
        self._files = files
        headers = {file: _read_header(file) for file in dict.fromkeys(files.values())}
        lost = sorted(name for name, file in files.items() if name not in headers[file])
        if lost:
            raise RecipeError(
                [
                    f"model.path: {files[name]} lacks {name}, which the index says it holds"
                    for name in lost
                ]
            )
        self.tensors = {name: headers[file][name] for name, file in files.items()}
        self._open: tuple[Path, Any] | None = None

    def dtype(self) -> torch.dtype:
        """The dtype of most of the bytes; float32 if no tensor is floating-point."""
        sizes: dict[torch.dtype, int] = {}
        for tensor in self.tensors.values():
            if tensor.dtype.is_floating_point:
                sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.bytes
        return max(sizes, key=lambda dtype: sizes[dtype], default=torch.float32)

    def rows(self, name: str, start: int | None = None, stop: int | None = None) -> torch.Tensor:
        """Rows of a tensor's dimension 0, or the whole tensor; a view of the mapped file."""
        file = self._files[name]
        if self._open is None or self._open[0] != file:
            from safetensors import safe_open

            self._open = (file, safe_open(file, framework="pt"))
        handle = self._open[1]
        if start is None or not self.tensors[name].shape:
            whole: torch.Tensor = handle.get_tensor(name)
            return whole
        rows: torch.Tensor = handle.get_slice(name)[start:stop]
        return rows

    def close(self) -> None:
        """Unmaps the last file."""
        self._open = None


def open_folder(folder: Path, *, key: str = "model.path") -> StoredTensors:
    """The weights in a model's folder: one file, or several with an index, as transformers writes
    them.

    key: of the recipe, for messages. Raises RecipeError if there is nothing that can be read, with
    advice.
    """
    if (folder / SINGLE).is_file():
        return open_file(folder / SINGLE)
    if (folder / INDEX).is_file():
        try:
            listing: dict[str, str] = json.loads((folder / INDEX).read_text())["weight_map"]
        except (ValueError, KeyError, TypeError):
            raise RecipeError(
                f"{key}: {folder / INDEX} is not an index of safetensors: it has no weight_map"
            ) from None
        absent = sorted({file for file in listing.values() if not (folder / file).is_file()})
        if absent:
            raise RecipeError(
                f"{key}: {folder} lacks {', '.join(absent)}, which its index names; the download "
                "is not complete"
            )
        return StoredTensors({name: folder / file for name, file in listing.items()})
    if (folder / ADAPTER_CONFIG).is_file():
        raise RecipeError(
            f"{key}: {folder} holds an adapter, not a model; merge it first: launcher export "
            "RUN_DIR OUT merged=true"
        )
    if any(folder.glob("*.bin")) or any(folder.glob("*.pt")) or any(folder.glob("*.pth")):
        raise RecipeError(
            f"{key}: {folder} has no safetensors, only pickled weights, which can run code when "
            "loaded. If you trust them: "
            "AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(NEW_FOLDER) writes "
            "safetensors"
        )
    raise RecipeError(
        f"{key}: {folder} has no weights: neither {SINGLE} nor {INDEX}; to start from random ones, "
        "set model.init: random"
    )


def open_file(file: Path) -> StoredTensors:
    """All tensors of one file."""
    return StoredTensors(dict.fromkeys(_read_header(file), file))


def _read_header(file: Path) -> dict[str, Shape]:
    """A file begins with the length of a JSON header (8 bytes, little-endian), then the header."""
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            entries: dict[str, Any] = (
                json.loads(stream.read(length)) if 0 < length <= size - 8 else {}
            )
        entries.pop("__metadata__", None)
        end = max((entry["data_offsets"][1] for entry in entries.values()), default=0)
        found = {
            name: Shape(tuple(entry["shape"]), DTYPES[entry["dtype"]])
            for name, entry in entries.items()
        }
    except OSError as error:
        raise RecipeError(f"model.path: {file} cannot be read: {error.strerror}") from None
    except (ValueError, TypeError, LookupError):
        raise RecipeError(
            f"model.path: {file} is not a safetensors file, or has an unknown dtype"
        ) from None
    if 8 + length + end != size:
        raise RecipeError(
            f"model.path: {file} is damaged: {size:,} bytes instead of the {8 + length + end:,} in "
            "its header; download it again"
        )
    return found


def make_header(
    tensors: Mapping[str, Shape], *, alignment: int = 8
) -> tuple[bytes, dict[str, tuple[int, int]]]:
    """The first bytes of a safetensors file; and for each tensor its first byte and its number of
    bytes.

    Tensors lie in the given order without gaps, so those with wider elements must come first.
    alignment: of the first tensor.
    """
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.bytes
        entries[name] = {
            "dtype": DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % alignment)
    header = len(text).to_bytes(8, "little") + text
    return header, {
        name: (len(header) + entries[name]["data_offsets"][0], tensor.bytes)
        for name, tensor in tensors.items()
    }


class Writer:
    """Writes one safetensors file, tensor by tensor, in the given order."""

    def __init__(self, file: Path, tensors: Mapping[str, Shape]) -> None:
        header, _ = make_header(tensors)
        self._expected = iter(tensors.items())
        self._stream: BinaryIO = file.open("wb")
        self._stream.write(header)

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Writes the next tensor, cast to its announced dtype."""
        expected, form = next(self._expected)
        assert (name, tuple(tensor.shape)) == (expected, form.shape), (
            name,
            tensor.shape,
            expected,
            form.shape,
        )
        data = tensor.detach().to("cpu", form.dtype).contiguous().reshape(-1)
        if data.numel():
            self._stream.write(data.view(torch.uint8).numpy().data)

    def close(self) -> None:
        """Closes the file. All announced tensors must have been written."""
        assert next(self._expected, None) is None
        self._stream.close()


def _split_files(sizes: Sequence[int]) -> list[range]:
    """Splits consecutive sizes into files of at most MAX_FILE_BYTES, or of one larger tensor."""
    cuts, filled = [0], 0
    for index, size in enumerate(sizes):
        if filled and filled + size > MAX_FILE_BYTES:
            cuts.append(index)
            filled = 0
        filled += size
    return [range(start, stop) for start, stop in zip(cuts, [*cuts[1:], len(sizes)], strict=True)]


def write_files(
    folder: Path | None, groups: Sequence[Mapping[str, Shape]]
) -> Iterator[Writer | None]:
    """Yields the writer for each group of tensors. Files and index have the names that transformers
    uses.

    folder: None yields None: this rank only takes part in reading.
    """
    files = _split_files([sum(tensor.bytes for tensor in group.values()) for group in groups])
    index: dict[str, str] = {}
    for number, members in enumerate(files, start=1):
        name = SINGLE if len(files) == 1 else f"model-{number:05}-of-{len(files):05}.safetensors"
        tensors = {key: tensor for member in members for key, tensor in groups[member].items()}
        writer = Writer(folder / name, tensors) if folder is not None else None
        index |= dict.fromkeys(tensors, name)
        for _ in members:
            yield writer
        if writer is not None:
            writer.close()
    if folder is not None and len(files) > 1:
        total = sum(tensor.bytes for group in groups for tensor in group.values())
        (folder / INDEX).write_text(
            json.dumps({"metadata": {"total_size": total}, "weight_map": index}, indent=2) + "\n"
        )
