"""What is computed once before the first step, in files of the run folder: the log-probabilities of
answers by the initial weights, a teacher's predictions, and the rows of a round of distillation. A
resume reads them."""

from __future__ import annotations

import io
import json
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from launcher.errors import RecipeError, TrainingError
from launcher.files import (
    checksum_of,
    checksum_of_file,
    flush,
    mode_of_umask,
    replace_file,
    replace_text,
)
from launcher.models.build import checkpoint_folder, is_pretrained
from launcher.models.safetensors_files import open_folder
from launcher.recipe import schema
from launcher.reliability.json_files import Json
from launcher.strategies.base import compute_dtype

logger = logging.getLogger(__name__)

_Part = TypeVar("_Part", bound=Sized)
"""Rows that are written at once."""
Reference = npt.NDArray[np.float32]
"""Log-probabilities of the answers of each document of a store: (documents, answers)."""
_TOP_K = (("id", "<i4"), ("log_probability", "<f4"))
"""Fields of a teacher's prediction, each with an array (top_k,)."""
SAVED_SECONDS = 10.0
"""Seconds after which the finished part of a pass is written."""
_NOT_COMPUTED = {
    "_name_or_path",
    "architectures",
    "dtype",
    "torch_dtype",
    "transformers_version",
    "use_cache",
    "_attn_implementation",
}
"""Keys of config.json without influence on predictions. The dtype is that of the run."""


def top_k_dtype(top_k: int) -> np.dtype[Any]:
    """Of a row of the file with a teacher's predictions."""
    return np.dtype([(name, kind, (top_k,)) for name, kind in _TOP_K])


@dataclass(frozen=True)
class ReferenceFile:
    """RUN_DIR/reference.safetensors: an array for each set of pairs, by the set's checksum. NaN: not
    computed yet."""

    path: Path
    weights: str
    """Names the initial weights. A file of others is not used."""
    config: str | None = None
    """`config_digest` of the model. A file of another one is not used."""

    def read(self) -> dict[str, Reference]:
        """The arrays; empty if there is no file, or if it is damaged or of other weights."""
        try:
            with safe_open(self.path, "numpy") as file:
                arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
                about = file.metadata() or {}
        except FileNotFoundError:
            return {}
        except (OSError, SafetensorError) as error:
            logger.warning(f"{self.path} cannot be read and is computed again: {error}")
            return {}
        problem = None
        if about.get("checksum") != _checksum(arrays):
            problem = "is damaged (its checksum differs)"
        elif about.get("weights") != self.weights:
            problem = "is of other initial weights"
        elif about.get("config", self.config) != self.config:
            problem = "is of another config.json of the model"
        if problem is not None:
            logger.warning(f"{self.path} {problem}: the reference is computed again")
        elif self.config is not None and "config" not in about:
            logger.warning(_without_config(self.path, "model.path"))
        return {} if problem else arrays

    def write(self, arrays: Mapping[str, Reference]) -> bool:
        """Replaces the file; returns whether that succeeded. A full disk is a warning: a resume then
        computes the arrays again."""
        about = {"checksum": _checksum(arrays), "weights": self.weights}
        if self.config is not None:
            about["config"] = self.config
        try:
            with replace_file(self.path, only_writer=True) as scratch, mode_of_umask(scratch):
                save_file(dict(arrays), scratch, metadata=about)
        except (OSError, SafetensorError) as error:
            logger.warning(f"{self.path} cannot be written: {error}; a resume computes it again")
            return False
        return True


@dataclass(frozen=True)
class _GrowingFile(ABC, Generic[_Part]):
    """A file to which rows are added in parts, so that an interrupted pass continues; and its
    description, a JSON file, with the number of rows that are written so far and a checksum of the
    file up to their end."""

    path: Path

    def read(self, about: Mapping[str, Any]) -> int:
        """The number of rows that can be used for what `about` describes. Warns of a file that
        cannot be used."""
        try:
            found = json.loads(self._description.read_text())
            if older := "config" in about and "config" not in found:
                found["config"] = about["config"]
            problem = self._other
            if {name: found.get(name) for name in about} == about:
                written: int = found["written"]
                digest = checksum_of_file(self.path, size=self._end(found, written))
                if digest.hexdigest() == found["checksum"]:
                    if older:
                        logger.warning(_without_config(self.path, "distillation.teacher"))
                    return written
                problem = "is damaged (its checksum differs)"
        except FileNotFoundError:
            return 0
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            problem = f"cannot be read ({error})"
        logger.warning(f"{self.path} {problem}: {self._again}")
        return 0

    def write(
        self, parts: Iterator[_Part], rows: int, about: Mapping[str, Any], *, done: int
    ) -> None:
        """Writes these parts, after which there are `rows`, behind the first `done`. Raises
        TrainingError if that fails, for example on a full disk."""
        written, saved = done, time.monotonic()
        try:
            if not done:
                self._description.unlink(missing_ok=True)
                self.path.write_bytes(self._header(about))
                end = len(self._header(about))
            else:
                end = self._end(json.loads(self._description.read_text()), done)
            with self.path.open("r+b") as file:
                digest = checksum_of_file(self.path, size=end)
                file.truncate(file.seek(end))
                for part in parts:
                    digest.update(data := self._encoded(part))
                    file.write(data)
                    written += len(part)
                    if time.monotonic() - saved > SAVED_SECONDS or written == rows:
                        flush(file)
                        state = {"written": written, "checksum": digest.hexdigest()}
                        state |= self._state(file.tell())
                        replace_text(self._description, json.dumps({**about, **state}))
                        saved = time.monotonic()
        except OSError as error:
            raise TrainingError(f"{self.path} cannot be written: {error}") from None
        assert written == rows

    def remove(self) -> None:
        """Removes the file, if it exists."""
        self._description.unlink(missing_ok=True)
        self.path.unlink(missing_ok=True)

    @property
    def _description(self) -> Path:
        return self.path.with_suffix(".json")

    _other: ClassVar[str]
    """Why a file that is described otherwise is not used."""
    _again: ClassVar[str]
    """What happens without the file."""

    def _header(self, about: Mapping[str, Any]) -> bytes:
        """What comes before the rows."""
        return b""

    @abstractmethod
    def _encoded(self, part: _Part) -> bytes:
        """The rows of a part."""

    @abstractmethod
    def _end(self, about: Mapping[str, Any], written: int) -> int:
        """Bytes up to the end of the rows that are written. about: the description."""

    def _state(self, end: int) -> Mapping[str, Any]:
        """What the description has beside the rows and the checksum."""
        return {}


@dataclass(frozen=True)
class TeacherFile(_GrowingFile[npt.NDArray[Any]]):
    """RUN_DIR/teacher_top_k.npy, that of a teacher with a name, or that of a round: rows of
    `top_k_dtype`."""

    teacher: str
    """Names the teacher's weights. A file of others is not used."""
    config: str | None = None
    """`config_digest` of the teacher. A file of another one is not used."""
    _other = "is of another teacher, other settings or other data"
    _again = "the teacher's predictions are computed again"

    def _header(self, about: Mapping[str, Any]) -> bytes:
        """What numpy writes before the rows."""
        descr = np.lib.format.dtype_to_descr(top_k_dtype(about["top_k"]))
        header = {"descr": descr, "fortran_order": False, "shape": (about["rows"],)}
        np.lib.format.write_array_header_2_0(file := io.BytesIO(), header)
        return file.getvalue()

    def _encoded(self, part: npt.NDArray[Any]) -> bytes:
        return part.tobytes()

    def _end(self, about: Mapping[str, Any], written: int) -> int:
        return len(self._header(about)) + written * top_k_dtype(about["top_k"]).itemsize


KeptFile = ReferenceFile | dict[str, TeacherFile] | None
"""What a pass before the first step keeps: of a reference, or of each teacher by its name."""


@dataclass(frozen=True)
class AnswersFile(_GrowingFile[Sequence[Json]]):
    """RUN_DIR/rounds/round_0001.jsonl: the rows of a round of distillation, of kind tokens, with the
    answers that they got."""

    _other = "is of other prompts or settings"
    _again = "its prompts are answered again"

    def _encoded(self, part: Sequence[Json]) -> bytes:
        return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in part).encode(
            "utf-8", "replace"
        )

    def _end(self, about: Mapping[str, Any], written: int) -> int:
        return int(about["bytes"])

    def _state(self, end: int) -> Mapping[str, Any]:
        return {"bytes": end}


def weights_name(model: schema.Model, strategy: schema.Strategy, seed: int) -> str:
    """Names a model's initial weights and the precision in which it computes with them."""
    if is_pretrained(model) and (folder := checkpoint_folder(model)) is not None:
        weights = open_folder(folder).digest()
        if model.config:
            weights += f" with {json.dumps(model.config, sort_keys=True)}"
    else:
        weights = json.dumps([model.path, model.config, seed])
    return f"{weights} in {compute_dtype(strategy)}"


def config_digest(model: schema.Model) -> str | None:
    """A digest of config.json in model.path without what has no influence on predictions; None
    without a path. Raises RecipeError if the file cannot be read."""
    if (folder := checkpoint_folder(model)) is None:
        return None
    file = folder / "config.json"
    try:
        config = json.loads(file.read_text(), object_hook=_computed)
    except (OSError, ValueError) as error:
        what = f"{file} cannot be read: {error}; save or download the checkpoint again"
        raise RecipeError(f"model.path: {what}") from None
    return checksum_of([json.dumps(config, sort_keys=True).encode()])


def _computed(part: Json) -> Json:
    """An object of config.json without the keys in `_NOT_COMPUTED`."""
    return {key: value for key, value in part.items() if key not in _NOT_COMPUTED}


def _without_config(path: Path, key: str) -> str:
    """Of a file that an older version wrote."""
    return (
        f"{path} is used, but does not record config.json of {key}, because an older version wrote "
        "it: delete it if config.json has changed since then"
    )


def _checksum(arrays: Mapping[str, Reference]) -> str:
    parts: list[bytes | memoryview] = []
    for name, array in sorted(arrays.items()):
        parts += [name.encode(), np.ascontiguousarray(array).data]
    return checksum_of(parts)
