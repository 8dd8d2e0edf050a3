"""Log-probabilities of all answers by the initial weights, for losses on pairs of answers; and the
files that a loss reads.

The log-probabilities are computed once, before the first step: each rank computes its share of the
sequences. Rank 0 writes them to the run folder, and a resume reads them, and computes those that an
interrupted start has not written. They are those of a pair of the store, whatever the packing, so a
resume may use another strategy, batch or number of ranks.
"""

from __future__ import annotations

import io
import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from launcher.console import seconds_as_text
from launcher.data.collation import Collated
from launcher.data.dataset import MixtureDataset, PreferenceDataset
from launcher.data.objectives import top_k_dtype
from launcher.data.run_data import RunData
from launcher.distributed.process_group import from_rank_0
from launcher.distributed.rank_layout import RankLayout
from launcher.errors import RecipeError, TrainingError
from launcher.files import checksum_of, checksum_of_file, flush, replace_file, replace_text
from launcher.models.adapter_files import open_adapter
from launcher.models.build import checkpoint_folder, is_pretrained
from launcher.models.preference import Reference, answer_log_probabilities, needs_reference
from launcher.models.safetensors_files import open_folder
from launcher.recipe import schema
from launcher.reliability.json_files import Json
from launcher.strategies.base import WrappedModel, compute_dtype
from launcher.training.evaluation import rows_in_order

logger = logging.getLogger(__name__)

SAVED_SECONDS = 10.0
"""Seconds after which the finished part of a pass is written."""
_NOT_COMPUTED = {
    *("_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version"),
    *("use_cache", "_attn_implementation"),
}
"""Keys of config.json without influence on predictions. The dtype is that of the run."""


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
            with replace_file(self.path, only_writer=True) as scratch:
                save_file(dict(arrays), scratch, metadata=about)
        except (OSError, SafetensorError) as error:
            logger.warning(f"{self.path} cannot be written: {error}; a resume computes it again")
            return False
        return True


@dataclass(frozen=True)
class TeacherFile:
    """RUN_DIR/teacher_top_k.npy: rows of `top_k_dtype`; and its description, a JSON file, with the
    number of rows that are written so far and a checksum of the file up to their end."""

    path: Path
    teacher: str
    """Names the teacher's weights. A file of others is not used."""
    config: str | None = None
    """`config_digest` of the teacher. A file of another one is not used."""

    def read(self, about: Mapping[str, Any]) -> int:
        """The number of rows that can be used for what `about` describes. Warns of a file that
        cannot be used."""
        try:
            found = json.loads(self._description.read_text())
            if older := "config" in about and "config" not in found:
                found["config"] = about["config"]
            problem = "is of another teacher, other settings or other data"
            if {name: found.get(name) for name in about} == about:
                written: int = found["written"]
                digest = checksum_of_file(self.path, size=_end(about, written))
                if digest.hexdigest() == found["checksum"]:
                    if older:
                        logger.warning(_without_config(self.path, "distillation.teacher"))
                    return written
                problem = "is damaged (its checksum differs)"
        except FileNotFoundError:
            return 0
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            problem = f"cannot be read ({error})"
        logger.warning(f"{self.path} {problem}: the teacher's predictions are computed again")
        return 0

    def write(
        self, parts: Iterator[npt.NDArray[Any]], rows: int, about: Mapping[str, Any], *, done: int
    ) -> None:
        """Writes these parts, after which there are `rows`, behind the first `done`. Raises
        TrainingError if that fails, for example on a full disk."""
        written, saved = done, time.monotonic()
        try:
            if not done:
                self._description.unlink(missing_ok=True)
                self.path.write_bytes(_header(about))
            with self.path.open("r+b") as file:
                digest = checksum_of_file(self.path, size=_end(about, done))
                file.truncate(file.seek(_end(about, done)))
                for part in parts:
                    digest.update(data := part.tobytes())
                    file.write(data)
                    written += len(part)
                    if time.monotonic() - saved > SAVED_SECONDS or written == rows:
                        flush(file)
                        state = {"written": written, "checksum": digest.hexdigest()}
                        replace_text(self._description, json.dumps({**about, **state}))
                        saved = time.monotonic()
        except OSError as error:
            raise TrainingError(f"{self.path} cannot be written: {error}") from None
        assert written == rows

    @property
    def _description(self) -> Path:
        return self.path.with_suffix(".json")


def reference_file(
    run: Path,
    preference: schema.Preference | None,
    model: schema.Model,
    lora: schema.Lora | None,
    strategy: schema.Strategy,
    seed: int,
    distillation: schema.Distillation | None = None,
) -> ReferenceFile | TeacherFile | None:
    """The file of a run; None if its loss needs none. `seed` is that of random weights."""
    if distillation is not None:
        teacher = schema.Model(path=distillation.teacher)
        try:
            name, config = weights_name(teacher, strategy, seed), config_digest(teacher)
        except RecipeError as error:
            what = str(error).removeprefix("model.path: ")
            raise RecipeError(f"distillation.teacher: {what}") from None
        return TeacherFile(run / "teacher_top_k.npy", name, config)
    if preference is None or not needs_reference(preference):
        return None
    name = weights_name(model, strategy, seed)
    if lora is not None and lora.quantize is not None:
        name += f", quantized to {lora.quantize}"
    if lora is not None and lora.path is not None:
        settings = [lora.rank, lora.alpha, lora.rank_stabilized, lora.dora]
        name += f", with the adapter {open_adapter(Path(lora.path)).digest()} {settings}"
    return ReferenceFile(run / "reference.safetensors", name, config_digest(model))


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


def _header(about: Mapping[str, Any]) -> bytes:
    """What numpy writes before the rows of a teacher's file."""
    descr = np.lib.format.dtype_to_descr(top_k_dtype(about["top_k"]))
    header = {"descr": descr, "fortran_order": False, "shape": (about["rows"],)}
    np.lib.format.write_array_header_2_0(file := io.BytesIO(), header)
    return file.getvalue()


def _end(about: Mapping[str, Any], written: int) -> int:
    """Bytes of a teacher's file up to the end of the rows that are written."""
    return len(_header(about)) + written * top_k_dtype(about["top_k"]).itemsize


def with_references(
    data: RunData,
    settings: schema.Preference,
    wrapped: WrappedModel,
    *,
    micro_batch_size: int,
    ranks: RankLayout,
    file: ReferenceFile | None,
) -> RunData:
    """The data with the settings of the loss and, if it compares with a reference, with that: from
    the file, or computed now by the model, which must have its initial weights. Every rank must
    call this; rank 0 reads and writes."""
    read: dict[str, Reference] = {}
    used: dict[str, Reference] = {}
    computed: list[str] = []
    if file is not None:
        read = from_rank_0(file.read() if ranks.rank == 0 else read, ranks.group)

    def one(dataset: object) -> PreferenceDataset:
        assert isinstance(dataset, PreferenceDataset)
        if not needs_reference(settings):
            return replace(dataset, settings=settings)
        if (key := _key(dataset)) not in used:
            found = read.get(key, _nothing(dataset))

            def save() -> bool:
                return file is None or file.write({**read, **used, key: found})

            if (first := _first_missing(dataset, found)) is not None:
                found = _compute(
                    dataset,
                    data.data,
                    wrapped,
                    found,
                    first=first,
                    save=save,
                    micro_batch_size=micro_batch_size,
                    ranks=ranks,
                )
                computed.append(key)
            used[key] = found
        return replace(dataset, settings=settings, reference=used[key])

    def complete(dataset: object) -> PreferenceDataset | MixtureDataset:
        if isinstance(dataset, MixtureDataset):
            return MixtureDataset(
                {name: one(part) for name, part in dataset.parts.items()}, dataset.weights
            )
        return one(dataset)

    training = complete(data.training)
    validation = {name: complete(each) for name, each in data.validation.items()}
    if file is not None and ranks.rank == 0 and (computed or used.keys() != read.keys()):
        file.write(used)
    return replace(data, training=training, validation=validation)


def _key(dataset: PreferenceDataset) -> str:
    """Names the pairs of a set. Which of them are dropped depends on the sequence length, and which
    are held out on their number."""
    held_out = dataset.store.documents - dataset.sequences.documents
    without = f" without {held_out}" if held_out else ""
    return f"{dataset.fingerprint['content']}-{dataset.length}{without}"


def _documents(dataset: PreferenceDataset) -> npt.NDArray[np.int64]:
    """The pair of each piece of the sequences."""
    return np.searchsorted(dataset.store.offsets, dataset.sequences.starts, side="right") - 1


def _nothing(dataset: PreferenceDataset) -> Reference:
    """The array of a set of which no pair is computed yet. Pairs that are not used are 0."""
    found = np.zeros((dataset.store.documents, 2), dtype=np.float32)
    found[_documents(dataset)] = np.nan
    return found


def _first_missing(dataset: PreferenceDataset, found: Reference) -> int | None:
    """The first sequence with a pair that is not computed yet; None: there is none."""
    missing = np.flatnonzero(np.isnan(found[_documents(dataset)]).any(1))
    if not len(missing):
        return None
    return int(np.searchsorted(dataset.sequences.bounds, missing[0], side="right")) - 1


def _compute(
    dataset: PreferenceDataset,
    data: schema.Data,
    wrapped: WrappedModel,
    found: Reference,
    *,
    first: int,
    save: Callable[[], bool],
    micro_batch_size: int,
    ranks: RankLayout,
) -> Reference:
    """The log-probabilities of a set, on all ranks: (pairs of the store, 2). Sets those in `found`
    from the sequence `first` on. Rank 0 calls `save` now and then."""
    started = saved = time.monotonic()
    pairs, saves = 0, ranks.rank == 0

    def compute(tensors: Mapping[str, Any], collated: Collated) -> torch.Tensor:
        sums = answer_log_probabilities(wrapped.model, tensors)[0].double()
        documents = torch.from_numpy(collated["documents"]).to(sums)
        return torch.cat([documents[:, None], sums], 1)

    for rows in rows_in_order(
        dataset,
        data,
        wrapped,
        compute,
        first=first,
        micro_batch_size=micro_batch_size,
        ranks=ranks,
        what="reference",
    ):
        documents, values = np.split(rows.cpu().numpy(), [1], axis=1)
        if not np.isfinite(values).all():
            what = "log-probabilities of the initial weights are not finite"
            what += ": check the weights, or use bfloat16 instead of float16"
            raise TrainingError(f"reference: {what}", reason="not_finite")
        found[documents[:, 0].astype(np.int64)] = values
        pairs += len(rows)
        if saves and time.monotonic() - saved > SAVED_SECONDS:
            saves, saved = save(), time.monotonic()  # a warning is enough
    seconds = seconds_as_text(time.monotonic() - started)
    if ranks.rank == 0:
        logger.info(f"reference: log-probabilities of {pairs:,} pairs ({seconds})")
    return from_rank_0(found, ranks.group)
