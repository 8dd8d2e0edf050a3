"""Safetensors files: reads some rows of tensors, and writes folders of weights."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from launcher.errors import RecipeError
from launcher.models.shards import local_rows

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
Tensors = Mapping[str, torch.Tensor]
"""By name."""


@dataclass(frozen=True)
class Part:
    """Consecutive rows (of dimension 0) of a stored tensor, under its name in a file."""

    file: Path
    first: int
    rows: int
    """1 for a scalar."""


class StoredTensors:
    """Tensors of safetensors files, by name. The files are mapped, not read."""

    def __init__(self, parts: Mapping[str, Sequence[Part]], tensors: Tensors) -> None:
        """tensors: shapes and dtypes, on meta."""
        self._parts, self.tensors = parts, tensors
        self._open: dict[Path, Any] = {}

    def dtype(self) -> torch.dtype:
        """The dtype of most of the bytes; float32 if no tensor is floating-point."""
        sizes: Counter[torch.dtype] = Counter()
        for tensor in self.tensors.values():
            if tensor.dtype.is_floating_point:
                sizes[tensor.dtype] += tensor.nbytes
        return max(sizes, key=lambda dtype: sizes[dtype], default=torch.float32)

    def read(self, name: str) -> torch.Tensor:
        """The whole tensor; a view of the mapped file if it has one part."""
        parts = [self._file(part.file).get_tensor(name) for part in self._parts[name]]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def copy_rows(self, name: str, tensor: torch.Tensor) -> None:
        """Copies this rank's rows into its part of a tensor of the same shape."""
        local, first = local_rows(tensor)
        if not local.ndim:
            local.copy_(self.read(name))
            return
        for part in self._parts[name]:
            start, stop = max(first, part.first), min(first + len(local), part.first + part.rows)
            if start < stop:
                rows = self._file(part.file).get_slice(name)[start - part.first : stop - part.first]
                local[start - first : stop - first].copy_(rows)

    def close(self) -> None:
        """Unmaps the files."""
        self._open.clear()

    def _file(self, file: Path) -> Any:
        if file not in self._open:
            try:
                self._open[file] = safe_open(file, framework="pt")
            except (OSError, SafetensorError) as error:
                raise OSError(f"{file.name} cannot be read: {error}") from None
        return self._open[file]


def open_folder(folder: Path, *, key: str = "model.path") -> StoredTensors:
    """The weights in a model's folder: one file, or several with an index.

    key: of the recipe, for messages. Raises RecipeError if there is nothing that can be read.
    """
    if (folder / SINGLE).is_file():
        return open_files([folder / SINGLE], key=key)
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
        stored = open_files([folder / file for file in dict.fromkeys(listing.values())], key=key)
        if lost := sorted(listing.keys() - stored.tensors.keys()):
            raise RecipeError(f"{key}: {folder} lacks {', '.join(lost)}, which its index names")
        return stored
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


def open_files(files: Iterable[Path], *, key: str = "model.path") -> StoredTensors:
    """All tensors of these files, whole. Raises RecipeError if one cannot be read."""
    tensors: dict[str, torch.Tensor] = {}
    parts: dict[str, list[Part]] = {}
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
                raise RecipeError(f"{key}: {file}: {name} has the unknown dtype {dtype}")
            tensors[name] = torch.empty(shape, dtype=DTYPES[dtype], device="meta")
            parts[name] = [Part(file, 0, shape[0] if shape else 1)]
    return StoredTensors(parts, tensors)


class WeightFiles:
    """Writes safetensors files and their index with transformers' names. Holds the tensors of one
    file."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._held: dict[str, torch.Tensor] = {}
        self._bytes, self._total = 0, 0
        self._written: list[list[str]] = []

    def add(self, name: str, tensor: torch.Tensor, dtype: torch.dtype) -> None:
        """A copy of a tensor, cast to this dtype if it is floating-point."""
        dtype = dtype if tensor.is_floating_point() else tensor.dtype
        copy = tensor.detach().to("cpu", dtype, copy=True, memory_format=torch.contiguous_format)
        if self._held and self._bytes + copy.nbytes > MAX_FILE_BYTES:
            self._write()
        self._held[name] = copy
        self._bytes += copy.nbytes

    def _write(self) -> None:
        number = len(self._written) + 1
        save_file(self._held, self._folder / f"part-{number}", metadata={"format": "pt"})
        self._written.append(list(self._held))
        self._total += self._bytes
        self._held, self._bytes = {}, 0

    def close(self) -> None:
        """Writes the last file and the index."""
        self._write()
        count = len(self._written)
        weight_map: dict[str, str] = {}
        for number, names in enumerate(self._written, start=1):
            file = SINGLE if count == 1 else f"model-{number:05}-of-{count:05}.safetensors"
            (self._folder / f"part-{number}").rename(self._folder / file)
            weight_map |= dict.fromkeys(names, file)
        if count > 1:
            index = {"metadata": {"total_size": self._total}, "weight_map": weight_map}
            (self._folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
