"""Log-probabilities of all answers by the initial weights, for losses that compare with them.

They are computed once, before the first step: each rank computes its share of the sequences. Rank 0
writes them to the run folder, and a resume reads them, and computes those that an interrupted start
has not written. They are those of a document of the store, whatever the packing, so a resume may use
another strategy, batch or number of ranks.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from launcher.console import seconds_as_text
from launcher.data.collation import Collated
from launcher.data.dataset import SequenceDataset
from launcher.data.run_data import RunData
from launcher.distributed.process_group import from_rank_0
from launcher.distributed.rank_layout import RankLayout
from launcher.errors import TrainingError
from launcher.models.micro_batch import MicroBatch
from launcher.objectives.kept_files import SAVED_SECONDS, Reference, ReferenceFile
from launcher.objectives.sweeps import rows_in_order
from launcher.recipe import schema
from launcher.strategies.base import WrappedModel

if TYPE_CHECKING:
    from launcher.objectives.answers import Answers

logger = logging.getLogger(__name__)


def with_references(
    data: RunData,
    wrapped: WrappedModel,
    compute: Callable[[nn.Module, MicroBatch], torch.Tensor],
    *,
    answers: int,
    micro_batch_size: int,
    ranks: RankLayout,
    file: ReferenceFile | None,
) -> RunData:
    """The data with the reference: from the file, or computed now by the model, which must have its
    initial weights. Every rank must call this; rank 0 reads and writes.

    compute: returns the log-probabilities of the answers in a micro-batch, (documents, answers).
    """
    read: dict[str, Reference] = {}
    used: dict[str, Reference] = {}
    computed: list[str] = []
    if file is not None:
        read = from_rank_0(file.read() if ranks.rank == 0 else read, ranks.group)

    def complete(dataset: SequenceDataset) -> SequenceDataset:
        if (key := _key(dataset)) not in used:
            found = read.get(key, _nothing(dataset, answers))

            def save() -> bool:
                return file is None or file.write({**read, **used, key: found})

            if (first := _first_missing(dataset, found)) is not None:
                found = _compute(
                    dataset,
                    data.data,
                    wrapped,
                    compute,
                    found,
                    first=first,
                    save=save,
                    micro_batch_size=micro_batch_size,
                    ranks=ranks,
                )
                computed.append(key)
            used[key] = found
        objective = cast("Answers", dataset.objective)
        return replace(dataset, objective=replace(objective, reference=used[key]))

    completed = data.changed(complete)
    if file is not None and ranks.rank == 0 and (computed or used.keys() != read.keys()):
        file.write(used)
    return completed


def _key(dataset: SequenceDataset) -> str:
    """Names the documents of a set. Which of them are dropped depends on the sequence length, and which
    are held out on their number."""
    held_out = dataset.store.documents - dataset.sequences.documents
    without = f" without {held_out}" if held_out else ""
    length = f"{dataset.length // dataset.text_length}x{dataset.text_length}"
    return f"{dataset.fingerprint['content']}-{length.removeprefix('1x')}{without}"


def _documents(dataset: SequenceDataset) -> npt.NDArray[np.int64]:
    """The document of each piece of the sequences."""
    return np.searchsorted(dataset.store.offsets, dataset.sequences.starts, side="right") - 1


def _nothing(dataset: SequenceDataset, answers: int) -> Reference:
    """The array of a set of which nothing is computed yet. Documents that are not used are 0."""
    found = np.zeros((dataset.store.documents, answers), dtype=np.float32)
    found[_documents(dataset)] = np.nan
    return found


def _first_missing(dataset: SequenceDataset, found: Reference) -> int | None:
    """The first sequence with a document that is not computed yet; None: there is none."""
    missing = np.flatnonzero(np.isnan(found[_documents(dataset)]).any(1))
    if not len(missing):
        return None
    return int(np.searchsorted(dataset.sequences.bounds, missing[0], side="right")) - 1


def _compute(
    dataset: SequenceDataset,
    data: schema.Data,
    wrapped: WrappedModel,
    compute: Callable[[nn.Module, MicroBatch], torch.Tensor],
    found: Reference,
    *,
    first: int,
    save: Callable[[], bool],
    micro_batch_size: int,
    ranks: RankLayout,
) -> Reference:
    """The log-probabilities of a set, on all ranks: (documents of the store, answers). Sets
    those in `found` from the sequence `first` on. Rank 0 calls `save` now and then."""
    started = saved = time.monotonic()
    count, saves = 0, ranks.rank == 0

    def with_documents(micro_batch: MicroBatch, collated: Collated) -> torch.Tensor:
        sums = wrapped.without_gradients(compute, micro_batch).double()
        assert collated.documents is not None
        documents = torch.from_numpy(collated.documents).to(sums)
        return torch.cat([documents[:, None], sums], 1)

    for rows in rows_in_order(
        dataset,
        data,
        wrapped,
        with_documents,
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
        count += len(rows)
        if saves and time.monotonic() - saved > SAVED_SECONDS:
            saves, saved = save(), time.monotonic()  # a warning is enough
    seconds = seconds_as_text(time.monotonic() - started)
    if ranks.rank == 0:
        logger.info(f"reference: log-probabilities of {count:,} {dataset.unit} ({seconds})")
    return from_rank_0(found, ranks.group)
