"""Reads and writes folders of safetensors, one tensor or some rows at a time."""

from __future__ import annotations

import json
from collections import Counter
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
        shapes = {file: _read_shapes(file) for file in dict.fromkeys(files.values())}
        lost = sorted(name for name, file in files.items() if name not in shapes[file])
        if lost:
            raise RecipeError(
                [f"model.path: {files[name]} lacks {name}, which its index names" for name in lost]
            )
        self.tensors = {name: shapes[file][name] for name, file in files.items()}
        self._open: tuple[Path, Any] | None = None

    def dtype(self) -> torch.dtype:
        """The dtype of most of the bytes; float32 if no tensor is floating-point."""
        sizes: Counter[torch.dtype] = Counter()
        for tensor in self.tensors.values():
            if tensor.dtype.is_floating_point:
                sizes[tensor.dtype] += tensor.bytes
        return max(sizes, key=lambda dtype: sizes[dtype], default=torch.float32)

    def rows(self, name: str, start: int | None = None, stop: int | None = None) -> torch.Tensor:
        """Rows of a tensor's dimension 0, or the whole tensor; a view of the mapped file."""
        file = self._files[name]
        if self._open is None or self._open[0] != file:
            self._open = (file, _open(file))
        handle = self._open[1]
        whole = start is None or not self.tensors[name].shape
        rows: torch.Tensor = (
            handle.get_tensor(name) if whole else handle.get_slice(name)[start:stop]
        )
        return rows

    def close(self) -> None:
        """Unmaps the last file."""
        self._open = None


def open_folder(folder: Path, *, key: str = "model.path") -> StoredTensors:
    """The weights in a model's folder: one file, or several with an index.

    key: of the recipe, for messages. Raises RecipeError if there is nothing that can be read.
    """
    if (folder / SINGLE).is_file():
        return open_file(folder / SINGLE)
    index = folder / INDEX
    if index.is_file():
        try:
            listing: dict[str, str] = json.loads(index.read_text())["weight_map"]
        except (ValueError, KeyError, TypeError):
            raise RecipeError(f"{key}: {index} has no weight_map") from None
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
    if any(file.suffix in (".bin", ".pt", ".pth") for file in folder.iterdir()):
        raise RecipeError(
            f"{key}: {folder} has no safetensors, only pickled weights, which can run code when "
            "loaded. If you trust them, convert them: "
            "AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(NEW_FOLDER)"
        )
    raise RecipeError(
        f"{key}: {folder} has no weights: neither {SINGLE} nor {INDEX}; to start from random ones, "
        "set model.init: random"
    )


def open_file(file: Path) -> StoredTensors:
    """All tensors of one file."""
    return StoredTensors(dict.fromkeys(_read_shapes(file), file))


def _open(file: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(file, framework="pt")
    except (OSError, SafetensorError) as error:
        raise RecipeError(
            f"model.path: {file} is damaged, or no safetensors file: {error}; download it again"
        ) from None


def _read_shapes(file: Path) -> dict[str, Shape]:
    handle, found = _open(file), {}
    for name in handle.keys():  # noqa: SIM118
        stored = handle.get_slice(name)
        if stored.get_dtype() not in DTYPES:
            dtype = stored.get_dtype()
            raise RecipeError(f"model.path: {file}: {name} has the unknown dtype {dtype}")
        found[name] = Shape(tuple(stored.get_shape()), DTYPES[stored.get_dtype()])
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
        assert (name, tuple(tensor.shape)) == (expected, form.shape)
        data = tensor.detach().to("cpu", form.dtype).contiguous().reshape(-1)
        if data.numel():
            self._stream.write(data.view(torch.uint8).numpy().data)

    def close(self) -> None:
        """Closes the file. All announced tensors must have been written."""
        assert next(self._expected, None) is None
        self._stream.close()


def write_files(
    folder: Path | None, groups: Sequence[Mapping[str, Shape]]
) -> Iterator[Writer | None]:
    """Yields the writer for each group of tensors. Files and index have transformers' names.

    A file has at most MAX_FILE_BYTES, or one larger group. folder: None yields None: this rank only
    takes part in reading.
    """
    sizes = [sum(tensor.bytes for tensor in group.values()) for group in groups]
    files: list[list[int]] = [[]]
    for number, size in enumerate(sizes):
        if files[-1] and sum(sizes[member] for member in files[-1]) + size > MAX_FILE_BYTES:
            files.append([])
        files[-1].append(number)
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
        about = {"metadata": {"total_size": sum(sizes)}, "weight_map": index}
        (folder / INDEX).write_text(json.dumps(about, indent=2) + "\n")
