"""A teacher's most probable tokens at each target of the training data, for distillation.

They are computed once, before the first step, by the teacher, which the run's strategy distributes.
Rank 0 writes them to the run folder, from where all ranks read what they train on. They do not
depend on the batches, so a resume, which reads them, may use another strategy, batch or number of
ranks. It computes what an interrupted start has not written.
"""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from launcher.console import bytes_as_text, seconds_as_text
from launcher.data.collation import Collated, with_positions
from launcher.data.dataset import MixtureDataset, SequenceDataset
from launcher.data.loader import to_device
from launcher.data.objectives import DistilledDataset, first_targets, top_k_dtype
from launcher.data.run_data import RunData
from launcher.data.store_files import MappedArray
from launcher.distributed.process_group import from_rank_0, gather
from launcher.distributed.rank_layout import RankLayout
from launcher.errors import TrainingError
from launcher.files import checksum_of
from launcher.models.distillation import teacher_top_k
from launcher.recipe import schema
from launcher.strategies.base import WrappedModel
from launcher.training.evaluation import rows_in_order
from launcher.training.reference import TeacherFile

logger = logging.getLogger(__name__)


def with_teacher(
    data: RunData,
    settings: schema.Distillation,
    file: TeacherFile,
    load: Callable[[], WrappedModel],
    *,
    micro_batch_size: int,
    vocabulary: int,
    ranks: RankLayout,
) -> RunData:
    """The data with the predictions of a teacher: from the file, or computed now by the model that
    `load` returns. Every rank must call this; rank 0 checks and writes the file.

    vocabulary: entries of the vocabulary of the trained model."""
    training: Any = data.training
    parts: dict[str, SequenceDataset] = getattr(training, "parts", {"": training})
    first = {name: first_targets(part) for name, part in parts.items()}
    rows = sum(int(each[-1]) for each in first.values())
    about = {"teacher": file.teacher, "top_k": settings.top_k, "rows": rows}
    about |= {"temperature": settings.temperature, "vocabulary": vocabulary}
    about |= {"sequences": [_digest(part) for part in parts.values()]}
    if file.config is not None:
        about["config"] = file.config
    done = from_rank_0(file.read(about) if ranks.rank == 0 else 0, ranks.group)
    if done < rows:
        if ranks.rank == 0:
            _announce(file, settings, rows, done)
        teacher, started = load(), time.monotonic()
        offsets = np.cumsum([0, *(count for each in first.values() for count in np.diff(each))])
        found = _predictions(
            training,
            data.data,
            teacher,
            settings,
            vocabulary,
            first=int(np.searchsorted(offsets, done, side="right")) - 1,
            micro_batch_size=micro_batch_size,
            ranks=ranks,
        )
        if ranks.rank == 0:
            file.write(found, rows, about, done=done)
        for _ in found:  # the other ranks; none is left on rank 0
            pass
        logger.info(f"teacher: done in {seconds_as_text(time.monotonic() - started)}")
        gather(None, ranks.group)  # the file is complete
    stored, begin = np.load(file.path, mmap_mode="r").view(MappedArray), 0
    distilled: dict[str, Any] = {}
    for name, part in parts.items():
        own = {field.name: getattr(part, field.name) for field in fields(part)}
        mine = stored[begin : begin + first[name][-1]]
        distilled[name] = DistilledDataset(
            **own, settings=settings, teacher=mine, first=first[name]
        )
        begin += first[name][-1]
    if isinstance(training, MixtureDataset):
        return replace(data, training=MixtureDataset(distilled, training.weights))
    return replace(data, training=distilled[""])


def _digest(dataset: SequenceDataset) -> str:
    """Names the tokens, and how they are divided into sequences: a prediction depends on what its
    sequence has before it."""
    sequences = dataset.sequences
    arrays = sequences.starts, sequences.lengths, sequences.bounds
    content = str(dataset.fingerprint["content"]).encode()
    return checksum_of([content, *(np.ascontiguousarray(a, dtype=np.int64).data for a in arrays)])


def _announce(file: TeacherFile, settings: schema.Distillation, rows: int, done: int) -> None:
    """Logs what the pass will write. Raises TrainingError if the disk has less space."""
    folder, row = file.path.parent, top_k_dtype(settings.top_k).itemsize
    free = shutil.disk_usage(folder).free
    text = f"the predictions of {rows:,} tokens take {bytes_as_text(rows * row)} in {folder}"
    if (rows - done) * row > free:
        what = f"{text}, where {bytes_as_text(free)} are free; lower distillation.top_k"
        raise TrainingError(f"teacher: {what}, or choose another run.dir")
    logger.info(f"teacher: {text}, of {bytes_as_text(free)} free")
    if done:
        logger.info(f"teacher: those of the first {done:,} tokens are there, from an earlier start")


def _predictions(
    dataset: SequenceDataset | MixtureDataset,
    data: schema.Data,
    teacher: WrappedModel,
    settings: schema.Distillation,
    vocabulary: int,
    *,
    first: int,
    micro_batch_size: int,
    ranks: RankLayout,
) -> Iterator[npt.NDArray[Any]]:
    """The rows of the data set from the sequence `first` on, in order, in parts, on rank 0. Every
    rank must read all."""

    def compute(tensors: Mapping[str, Any], collated: Collated) -> torch.Tensor:
        # From the tensors on the CPU: a GPU would be waited for to learn the number of positions
        found = with_positions(collated)["tensors"]["target_positions"]
        tensors = {**tensors, "target_positions": to_device(found, ranks.device)}
        return teacher_top_k(teacher.model, tensors, settings, vocabulary)

    for values in rows_in_order(
        dataset,
        data,
        teacher,
        compute,
        first=first,
        micro_batch_size=micro_batch_size,
        ranks=ranks,
        what="teacher",
    ):
        rows = np.empty(len(values), dtype=top_k_dtype(settings.top_k))
        rows["log_probability"], rows["id"] = np.split(values.cpu().numpy(), 2, axis=1)
        if np.isnan(rows["log_probability"]).any():
            what = "its predictions are not finite: check its weights, or use bfloat16 instead of"
            raise TrainingError(f"distillation.teacher: {what} float16", reason="not_finite")
        yield rows
