"""The files of a token store on the disk: whether they are whole, and how they get there."""

from __future__ import annotations

import json
import logging
import mmap
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from launcher.errors import RecipeError, first_line

logger = logging.getLogger(__name__)


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


def store_problem(folder: Path) -> str:
    """Why a store cannot be used; empty: it can. Raises RecipeError if it cannot be read, which
    may be for a time only."""
    try:
        meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
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


def commit(scratch: Path, folder: Path) -> None:
    """Renames a scratch folder to `folder`, when its files are on the disk: otherwise a crash of
    the machine may leave a store with empty files."""
    for path in (*scratch.iterdir(), scratch):
        _sync(path)
    scratch.rename(folder)
    _sync(folder.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
