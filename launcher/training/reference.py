"""Log-probabilities of all answers by the initial weights, for losses on pairs of answers; and the
files that a loss reads.

The log-probabilities are computed once, before the first step: each rank computes its share of the
sequences. Rank 0 writes them to the run folder, and a resume reads them. They are those of a pair
of the store, whatever the packing, so a resume may use another strategy, batch or number of ranks.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from launcher.console import seconds_as_text, task
from launcher.data.dataset import MixtureDataset, PreferenceDataset
from launcher.data.loader import to_device
from launcher.data.objectives import top_k_dtype
from launcher.data.run_data import RunData
from launcher.distributed.process_group import DataParallel, from_rank_0
from launcher.errors import RecipeError, TrainingError
from launcher.models.adapter_files import open_adapter
from launcher.models.build import checkpoint_folder, is_pretrained
from launcher.models.preference import Reference, answer_log_probabilities, needs_reference
from launcher.models.safetensors_files import open_folder
from launcher.recipe import schema
from launcher.strategies.base import WrappedModel, compute_dtype
from launcher.training.evaluation import evaluation_batches, forward_only

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ReferenceFile:
    """RUN_DIR/reference.safetensors: an array for each set of pairs, by the set's checksum."""

    path: Path
    weights: str
    """Names the initial weights. A file of others is not used."""

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
        if problem is not None:
            logger.warning(f"{self.path} {problem}: the reference is computed again")
        return {} if problem else arrays

    def write(self, arrays: Mapping[str, Reference]) -> None:
        """Replaces the file. A full disk is a warning: a resume then computes the arrays again."""
        scratch = self.path.with_name(f".{self.path.name}")
        about = {"checksum": _checksum(arrays), "weights": self.weights}
        try:
            save_file(dict(arrays), scratch, metadata=about)
            scratch.replace(self.path)
        except (OSError, SafetensorError) as error:
            logger.warning(f"{self.path} cannot be written: {error}; a resume computes it again")


@dataclass(frozen=True)
class TeacherFile:
    """RUN_DIR/teacher_top_k.npy: rows of `top_k_dtype`; and its description, a JSON file."""

    path: Path
    teacher: str
    """Names the teacher's weights. A file of others is not used."""

    def problem(self, about: dict[str, Any]) -> str | None:
        """Why the file cannot be used for what `about` describes; None if it can. Empty: missing."""
        try:
            found = json.loads(self._description.read_text())
            if {name: found.get(name) for name in about} != about:
                return "is of another teacher, other settings or other data"
            return None if _file_checksum(self.path) == found["checksum"] else "is damaged"
        except FileNotFoundError:
            return ""
        except (OSError, ValueError, KeyError) as error:
            return f"cannot be read ({error})"

    def write(self, parts: Iterator[npt.NDArray[Any]], rows: int, about: dict[str, Any]) -> None:
        """Replaces the file by one with these parts, together `rows`. Raises TrainingError if that
        fails, for example on a full disk."""
        scratch, written = self.path.with_name(f".{self.path.name}"), 0
        kind = top_k_dtype(about["top_k"])
        header = {
            "descr": np.lib.format.dtype_to_descr(kind),
            "fortran_order": False,
            "shape": (rows,),
        }
        try:
            self._description.unlink(missing_ok=True)
            with scratch.open("wb") as file:
                np.lib.format.write_array_header_2_0(file, header)
                for part in parts:
                    file.write(part.tobytes())
                    written += len(part)
            assert written == rows
            scratch.replace(self.path)
            self._description.write_text(
                json.dumps(about | {"checksum": _file_checksum(self.path)})
            )
        except OSError as error:
            raise TrainingError(f"{self.path} cannot be written: {error}") from None

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
        try:
            name = weights_name(schema.Model(path=distillation.teacher), strategy, seed)
        except RecipeError as error:
            what = str(error).removeprefix("model.path: ")
            raise RecipeError(f"distillation.teacher: {what}") from None
        return TeacherFile(run / "teacher_top_k.npy", name)
    if preference is None or not needs_reference(preference):
        return None
    name = weights_name(model, strategy, seed)
    if lora is not None and lora.quantize is not None:
        name += f", quantized to {lora.quantize}"
    if lora is not None and lora.path is not None:
        settings = [lora.rank, lora.alpha, lora.rank_stabilized, lora.dora]
        name += f", with the adapter {open_adapter(Path(lora.path)).digest()} {settings}"
    return ReferenceFile(run / "reference.safetensors", name)


def weights_name(model: schema.Model, strategy: schema.Strategy, seed: int) -> str:
    """Names a model's initial weights and the precision in which it computes with them."""
    if is_pretrained(model) and (folder := checkpoint_folder(model)) is not None:
        weights = open_folder(folder).digest()
        if model.config:
            weights += f" with {json.dumps(model.config, sort_keys=True)}"
    else:
        weights = json.dumps([model.path, model.config, seed])
    return f"{weights} in {compute_dtype(strategy)}"


def _checksum(arrays: Mapping[str, Reference]) -> str:
    digest = xxhash.xxh3_128()
    for name, array in sorted(arrays.items()):
        digest.update(name.encode())
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()


def _file_checksum(path: Path) -> str:
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while block := file.read(1 << 24):
            digest.update(block)
    return digest.hexdigest()


def with_references(
    data: RunData,
    settings: schema.Preference,
    wrapped: WrappedModel,
    *,
    micro_batch_size: int,
    ranks: DataParallel,
    file: ReferenceFile | None,
) -> RunData:
    """The data with the settings of the loss and, if it compares with a reference, with that: from
    the file, or computed now by the model, which must have its initial weights. Every rank must
    call this; rank 0 reads and writes."""
    read: dict[str, Reference] = {}
    used: dict[str, Reference] = {}
    if file is not None:
        read = from_rank_0(file.read() if ranks.rank == 0 else read, ranks.group)

    def one(dataset: object) -> PreferenceDataset:
        assert isinstance(dataset, PreferenceDataset)
        if not needs_reference(settings):
            return replace(dataset, settings=settings)
        key = _key(dataset)
        if key not in used:
            used[key] = (
                read[key]
                if key in read
                else _compute(dataset, data.data, wrapped, micro_batch_size, ranks)
            )
        return replace(dataset, settings=settings, reference=used[key])

    def complete(dataset: object) -> PreferenceDataset | MixtureDataset:
        if isinstance(dataset, MixtureDataset):
            return MixtureDataset(
                {name: one(part) for name, part in dataset.parts.items()}, dataset.weights
            )
        return one(dataset)

    training = complete(data.training)
    validation = {name: complete(each) for name, each in data.validation.items()}
    if file is not None and ranks.rank == 0 and used.keys() != read.keys():
        file.write(used)
    return replace(data, training=training, validation=validation)


def _key(dataset: PreferenceDataset) -> str:
    """Names the pairs of a set. Which of them are dropped depends on the sequence length, and which
    are held out on their number."""
    held_out = dataset.store.documents - dataset.sequences.documents
    without = f" without {held_out}" if held_out else ""
    return f"{dataset.fingerprint['content']}-{dataset.length}{without}"


@torch.no_grad()
def _compute(
    dataset: PreferenceDataset,
    data: schema.Data,
    wrapped: WrappedModel,
    micro_batch_size: int,
    ranks: DataParallel,
) -> Reference:
    """The log-probabilities of a set, on all ranks: (pairs of the store, 2)."""
    loader = evaluation_batches(
        dataset, data, micro_batch_size=micro_batch_size, max_batches=None, ranks=ranks
    )
    started, documents, sums = time.monotonic(), [], []
    steps = -(-len(dataset) // (micro_batch_size * ranks.data_size))
    with forward_only(wrapped), task("reference", steps) as advance:
        for collated in loader:
            micro_batch = to_device(collated["tensors"], ranks.device)
            with wrapped.forward_context():
                sums.append(answer_log_probabilities(wrapped.model, micro_batch)[0])
            documents.append(collated["documents"])
            advance(1)
    found = torch.zeros(dataset.store.documents, 2, device=ranks.device)
    where = torch.from_numpy(np.concatenate(documents)).to(ranks.device)
    if not ranks.tensor_rank:
        found[where] = torch.cat(sums).float()
    dist.all_reduce(found, group=ranks.data_group)
    seconds = seconds_as_text(time.monotonic() - started)
    pairs = sum(map(len, documents))
    logger.info(f"reference: log-probabilities of {pairs:,} pairs on this rank ({seconds})")
    values: Reference = found.cpu().numpy()
    return values
