"""Which rows of which files a step was trained on: a function of seed, step and data alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from launcher.data.batching import NO_SAMPLE
from launcher.data.custom import CustomDataset
from launcher.data.dataset import MapData, MixtureDataset, SequenceDataset
from launcher.data.run_data import RunData
from launcher.data.streaming import StreamingDataset
from launcher.data.token_store import rows_of_documents


@dataclass
class TrainedRow:
    """A row of the data in one sequence of a step: all of it, or a part."""

    sequence: int
    """Number of the sequence in the step, from 1."""
    source: str
    """Name of the source in a mixture; otherwise empty."""
    dataset: SequenceDataset | CustomDataset
    sample: Any  # that of a builder has any type
    """This row alone, as the data set's `collate` takes it, but for what it has beside text."""
    document: int = 0
    first: int = 0
    """The first token of the row in this sequence."""
    of: int | None = None
    """Tokens of the row; None for data of a builder."""
    where: str = ""
    """`file:line`, `file row number`, or `sample number of FUNCTION` for data of a builder."""
    question: str | None = None
    """The last turn of the user, or the prompt; None: the row has neither."""


def trained_rows(opened: RunData, positions: range, *, tokenizer: str | None) -> list[TrainedRow]:
    """The rows of a global batch. Reads these rows again, each from the part of its file.

    positions: of its samples in the run's order.
    """
    data, training = opened.data, opened.training
    rows: list[TrainedRow] = []
    for sequence, position in enumerate(positions, start=1):
        if (index := opened.order.sample(position)) != NO_SAMPLE:
            if isinstance(training, StreamingDataset):
                shard, index = training.located(index)
                rows += _rows_of(shard.dataset, index, sequence)
            else:
                rows += _rows_of(training, index, sequence)
    by_store: dict[tuple[str, int], list[TrainedRow]] = {}
    for row in rows:
        if isinstance(row.dataset, SequenceDataset):
            by_store.setdefault((row.source, id(row.dataset.store)), []).append(row)
    for (name, _), mine in by_store.items():
        source, dataset = data.sources()[name], mine[0].dataset
        assert isinstance(dataset, SequenceDataset)
        of_documents = rows_of_documents(
            dataset.store,
            source,
            {row.document for row in mine},
            tokenizer=tokenizer,
            modalities=dataset.inputs.attachments.modalities,
        )
        for row in mine:
            row.where, row.question = of_documents[row.document]
    return rows


def _rows_of(dataset: MapData, index: int, sequence: int) -> Iterator[TrainedRow]:
    source, begin = "", 0
    if isinstance(dataset, MixtureDataset):
        source, index = dataset.locate(index)
        dataset = dataset.parts[source]
    if isinstance(dataset, CustomDataset):
        drawn = dataset[index]
        where = f"sample {index % len(dataset)} of {dataset.name}"
        yield TrainedRow(sequence, source, dataset, drawn, where=where)
        return
    sample = dataset.objective.sample(dataset, index)
    dataset = dataset.one_document_in_a_row()
    for document, start, end in dataset.pieces(index):
        alone = sample
        if "position_ids" in sample:  # else a classifier's, which is one document
            alone = {key: values[begin : begin + end - start] for key, values in sample.items()}
        begin += end - start
        first, after = (int(bound) for bound in dataset.store.offsets[document : document + 2])
        yield TrainedRow(sequence, source, dataset, alone, document, start - first, after - first)
