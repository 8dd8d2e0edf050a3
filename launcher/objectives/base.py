"""An objective: what a run learns from its rows.

An objective makes samples of packed sequences and micro-batches of samples, computes the loss and
the metrics, changes the model where the loss needs it, and computes what the loss compares with
before the first step. `recipe/objectives.py` says which keys it needs. The rest of the launcher asks
the objective, and names none.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from launcher.data.collation import Collated, RowInputs, Sample, make_sample
from launcher.data.custom import CustomData
from launcher.data.dataset import MapData, SequenceDataset
from launcher.data.packing import (
    Integers,
    NothingToTrainError,
    Packed,
    Sequences,
    first_names,
    no_targets,
    pack,
)
from launcher.data.streaming import StreamingDataset
from launcher.data.token_store import ModelTraits, TokenStore
from launcher.models.micro_batch import IGNORED, MicroBatch
from launcher.recipe import schema
from launcher.sources.layouts import ATTACHMENTS

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PreTrainedModel

    from launcher.data.run_data import RunData
    from launcher.distributed.rank_layout import RankLayout
    from launcher.objectives.kept_files import KeptFile
    from launcher.objectives.teacher import TeacherModel
    from launcher.recipe.schema import Recipe
    from launcher.strategies.base import WrappedModel

MetricValues = tuple[Mapping[str, float], int]
"""MetricValues of an evaluation by name, and the number of samples that they are means over."""


def count_attachments(dataset: SequenceDataset) -> dict[str, tuple[int, int]]:
    """By their nouns (`ATTACHMENTS`): the attachments in the sequences of a data set, and those of
    its documents that are in none, because their document is dropped or cut before them. Without those
    of which there are none."""
    store, sequences = dataset.store, dataset.sequences
    counts: dict[str, tuple[int, int]] = {}
    for kind, nouns in enumerate(ATTACHMENTS.values()):
        if store.attachments is None:
            continue
        first = store.attachments["first"][store.attachments["kind"] == kind]

        def count(starts: Integers, ends: Integers, first: Integers = first) -> int:
            return int((np.searchsorted(first, ends) - np.searchsorted(first, starts)).sum())

        used = count(sequences.starts, sequences.starts + sequences.lengths)
        wanted = slice(None) if dataset.documents is None else dataset.documents
        lost = count(store.offsets[:-1][wanted], store.offsets[1:][wanted]) - used
        if used or lost:
            counts[nouns] = used, lost
    return counts


@dataclass(frozen=True)
class Example:
    """What a micro-batch without data is made for."""

    data: schema.Data
    rows: int
    inputs: RowInputs
    documents: int
    """Documents of equal length in a packed row."""
    vocabulary: int
    classes: int
    generator: np.random.Generator

    def ids(self) -> list[Integers]:
        """Random tokens of full rows."""
        length, draw = self.inputs.length, self.generator.integers
        return [draw(0, self.vocabulary, length, dtype=np.int64) for _ in range(self.rows)]


@dataclass(frozen=True)
class BeforeTraining:
    """What a pass over the data before the first step has at hand."""

    ranks: RankLayout
    micro_batch_size: int
    file: KeptFile
    """The objective's `kept_file`; None: the results are not kept."""
    model: ModelTraits
    build_teacher: Callable[[str], TeacherModel]
    """Builds the teacher of a name."""
    tokenizes: bool
    """Whether this process tokenizes what is not cached (one process of a node)."""


@dataclass(frozen=True)
class Objective(ABC):
    """What objectives have in common. The defaults are those of losses on the tokens of text."""

    unit: ClassVar[str] = "documents"
    """What the rows are: documents, pairs, or answers."""
    metrics: ClassVar[tuple[str, ...]] = ()
    """Names of the sums that `loss` returns beside the loss. Their means are logged."""
    draws: ClassVar[bool] = False
    """Whether a sample has random numbers, which differ from epoch to epoch."""
    divides_loss: ClassVar[bool] = True
    """Whether the loss has a part for each source of a mixture."""
    packs_documents: ClassVar[bool] = True
    """Whether several documents may share a row, each with tokens that have a target."""
    predicts_tokens: ClassVar[bool] = True
    """Whether the logits that the loss is computed from are those of a vocabulary."""
    trains_classes: ClassVar[bool] = False
    """Whether a document of the store has a class, which the model must know."""
    causal: ClassVar[bool] = True
    """Whether rows of one document need no attention mask but the causal one."""
    loss_unit: ClassVar[str] = "tokens"
    """What the loss is a mean over."""
    targets_are_fixed: ClassVar[bool] = True
    """Whether the tokens with loss are those of the store, the same in each epoch."""

    @classmethod
    def from_recipe(cls, recipe: Recipe, *, trained: bool) -> Objective:
        """The objective of a recipe. Raises RecipeError if a function of the user cannot be used.
        trained: False: only samples are asked for; code of the user is not run."""
        return cls()

    # The model

    @property
    def needs_logits(self) -> bool:
        """Whether the loss needs the logits of a target over the whole vocabulary at once."""
        return False

    def change_model(  # noqa: B027 - most objectives change nothing
        self, model: PreTrainedModel, *, row_length: int
    ) -> None:
        """Changes a model on the meta device as the loss needs it. row_length: most tokens of a row.
        Raises RecipeError if the model cannot be trained so."""

    def check_model(self, model: nn.Module) -> None:  # noqa: B027 - most losses are always available
        """Raises RecipeError if the loss is not available for the changed model."""

    def of_model(self, model: nn.Module) -> Objective:
        """The objective for the changed model, whose metrics may depend on it."""
        return self

    def packs(self, data: schema.Data) -> bool:
        """Whether a row of the model has several documents."""
        return data.packing and self.packs_documents

    @property
    def target_share(self) -> float:
        """The share of the tokens whose logits are computed, over all data."""
        return 1.0

    # The data

    def open(
        self,
        store: TokenStore,
        data: schema.Data,
        model: ModelTraits,
        *,
        documents: Integers | None = None,
    ) -> SequenceDataset:
        """Packs all documents of a store, or those with the numbers `documents`. Raises
        NothingToTrainError if no token has loss."""
        names = first_names(store.fingerprint.get("files", ()))
        if not (store.documents if documents is None else len(documents)):
            raise NothingToTrainError(f"data: no document with text in {names}")
        sequences = self.pack(store, data, documents)
        if self.packs_documents and not sequences.targets:
            raise NothingToTrainError(self.nothing_to_train(names, data))
        return replace(
            self.empty(data, model), store=store, sequences=sequences, documents=documents
        )

    def nothing_to_train(self, names: str, data: schema.Data) -> str:
        """The message for files, named by `names`, without anything that has a loss."""
        return no_targets(names, data)

    def empty(self, data: schema.Data, model: ModelTraits) -> SequenceDataset:
        """A data set without samples."""
        packed = data.packing and self.packs_documents and not data.joins_rows
        inputs = model.inputs(data.row_length, packed=packed, joined=data.joins_rows)
        none = np.zeros(0, dtype=np.int64)
        store = TokenStore(
            ids=np.zeros(0, dtype=np.int32), labels=None, offsets=np.zeros(1, np.int64)
        )
        sequences = Sequences(none, none, np.zeros(1, dtype=np.int64), documents=0)
        return SequenceDataset(store, sequences, self.for_model(data, model), inputs)

    def pack(self, store: TokenStore, data: schema.Data, documents: Integers | None) -> Packed:
        """The sequences of a store."""
        return pack(
            store.offsets,
            data.kind,
            labels=store.labels,
            packing=data.packing and not data.joins_rows,
            sequence_length=data.sequence_length,
            documents=documents,
            drops_overlong=data.drops_overlong,
            attachments=store.attachments,
        )

    def for_model(self, data: schema.Data, model: ModelTraits) -> Objective:
        """The objective with what its samples take from the model and its tokenizer."""
        return self

    def for_validation(self) -> Objective:
        """The objective that evaluations compute the loss of."""
        return self

    def with_seed(self, seed: int) -> Objective:
        """The objective whose samples draw other random numbers."""
        return self

    def for_custom(self, data: CustomData) -> Objective:
        """The objective of data that the user's function has built."""
        raise TypeError(f"{type(self).__name__} is no objective of data.builder")

    def sample(self, dataset: SequenceDataset, index: int) -> Sample:
        """A sample: `input_ids` and `targets`, and what `collate` takes beside them."""
        return dataset.next_tokens(index)

    def collate(self, rows: list[Sample], inputs: RowInputs) -> Collated:
        """A micro-batch of samples."""
        return inputs.collate(rows)

    def text_length(self, row_length: int) -> int:
        """Most tokens of a text (data.sequence_length), from those of a row of the model."""
        return row_length

    def sources(self, of: list[Integers]) -> torch.Tensor:
        """The numbers of the sources of a micro-batch's losses, from those of the samples of its
        rows: for losses of tokens one for each row, where any will do for an empty one."""
        return torch.tensor([int(row[0]) if len(row) else 0 for row in of])

    def describe(self, dataset: SequenceDataset) -> str:
        """The size of a data set, for the log."""
        tokens, count, sequences = dataset.tokens, len(dataset), dataset.sequences
        documents = sequences.documents - sequences.dropped_documents - sequences.long_documents
        text = f"{documents:,} {self.unit}, {tokens:,} tokens in {count:,} sequences "
        text += f"of up to {dataset.length}"
        if dataset.joined:
            text = (
                f"{documents:,} {self.unit}, {tokens:,} tokens; those of a step share sequences of "
            )
            text += f"up to {dataset.length}, kept apart by {dataset.inputs.kept_apart}"
        if dataset.packed:
            padding = 1 - tokens / (count * dataset.length)
            text += f", packed ({padding:.1%} padding; kept apart by {dataset.inputs.kept_apart})"
        for nouns, (used, lost) in count_attachments(dataset).items():
            text += f"; {used:,} {nouns}"
            text += f" ({lost:,} more are dropped or cut off)" if lost else ""
        if dataset.store.labels is not None and self.targets_are_fixed:
            text += f"; {sequences.targets / tokens:.1%} of these tokens carry loss"
        return text

    def marks(self, dataset: SequenceDataset, sample: Sample, start: int, end: int) -> list[bool]:
        """For `launcher inspect`: whether each token of a piece of a sample, which is at these
        positions of the store, has loss. A token has loss if it is a target of the one before it,
        perhaps in another sequence."""
        store = dataset.store
        marks: list[bool] = (store.labels_or_ids[start:end] != IGNORED).tolist()
        marks[0] = marks[0] and start not in store.offsets
        return marks

    def parts(self, dataset: SequenceDataset, document: int) -> list[tuple[str, int]]:
        """For `launcher inspect`: the parts of a document in order, each with its name and its end,
        counted in tokens of the document. A document without parts is one part without a name."""
        store = dataset.store
        return [("", int(store.offsets[document + 1] - store.offsets[document]))]

    def no_targets(self, where: str, key: str) -> str:
        """The message for a part of the data without a token with loss, which `where` names."""
        return f"{key}: no token with loss in {where} (for data.builder: CustomData.targets)"

    # The loss

    @abstractmethod
    def loss(self, model: nn.Module, micro_batch: MicroBatch) -> torch.Tensor:
        """The sum of the losses of a micro-batch, followed without gradients by the sums of
        `metrics` and, for a mixture, by the sums of `by_source` (`loss.py`). A float32 scalar if
        there is only the loss, else a vector."""

    def prepare_step(
        self,
        wrapped: WrappedModel,
        micro_batches: Sequence[MicroBatch],
        step: int,
        *,
        ranks: RankLayout,
        heartbeat: Callable[[str], None] = lambda phase: None,
    ) -> Sequence[MicroBatch]:
        """The micro-batches of a step with what their losses need of one another, and of those of other
        ranks. Every rank calls it before the first forward pass of the step. step: its number, from 1."""
        return micro_batches

    def shown(self, means: Mapping[str, float]) -> Mapping[str, float | None]:
        """What is logged, from the means of `metrics` over the losses of a step or of an
        evaluation. None: not known."""
        return means

    # Evaluation

    def evaluate(
        self, model: nn.Module, micro_batch: MicroBatch, count: int
    ) -> tuple[torch.Tensor, Any]:
        """The summed loss of a micro-batch with this number of losses, and what `finish_evaluation`
        takes, to be added up over micro-batches; None: there are no scores. By default that is what
        `scores` takes, to be summed over ranks, too: a tensor, float64."""
        summed = self.loss(model, micro_batch)
        if not self.metrics:
            return summed if summed.ndim == 0 else summed[0], None
        sums = summed[1 : 1 + len(self.metrics)]
        return summed[0], torch.cat([sums, sums.new_full((1,), count)]).double()

    def finish_evaluation(self, found: Any, ranks: RankLayout) -> tuple[torch.Tensor, MetricValues]:
        """What this rank's loss has beside the sums of `evaluate`, and the scores. Every rank calls it
        with what it has added up."""
        if not ranks.counts:
            found.zero_()
        dist.all_reduce(found, group=ranks.group)
        return torch.zeros((), device=ranks.device), self.scores(found)

    def scores(self, sums: torch.Tensor) -> MetricValues:
        """The scores of an evaluation."""
        *parts, count = sums.tolist()
        names = zip(self.metrics, parts, strict=True)
        means = {name: value / max(count, 1.0) for name, value in names}
        shown = self.shown(means).items()
        return {name: value for name, value in shown if value is not None}, int(count)

    # Before the first step

    def kept_file(self, run: Path, recipe: Recipe) -> KeptFile:
        """The file in the run folder with what is computed before the first step, or those of teachers
        by name; None: nothing is. Raises RecipeError if a file that it depends on cannot be read."""
        return None

    def before_model(self, data: RunData, about: BeforeTraining) -> RunData:
        """The data with what is computed before the model takes memory. Every rank must call this."""
        return data

    @property
    def needs_reference(self) -> bool:
        """Whether the loss compares with log-probabilities by the initial weights."""
        return False

    def with_initial_weights(
        self, data: RunData, wrapped: WrappedModel, about: BeforeTraining
    ) -> RunData:
        """The data with what is computed by the initial weights. Every rank must call this."""
        return data

    # The plan

    def example_rows(self, about: Example) -> list[Sample]:
        """Samples as large as full ones can be, without data."""
        parts = about.documents if about.inputs.packed else 1
        return [
            make_sample((part, part) for part in np.array_split(ids, parts)) for ids in about.ids()
        ]

    def example(self, about: Example) -> Collated:
        """A micro-batch as large as a full one can be, without data."""
        attachments = about.inputs.attachments
        rows = [attachments.with_largest_attachments(row) for row in self.example_rows(about)]
        return self.collate(rows, about.inputs)

    def with_example(self, about: Example) -> tuple[Objective, Collated]:
        """An objective that computes the loss of the micro-batch, and `example`."""
        return self, self.example(about)

    # The export

    def export_files(self, model: PreTrainedModel) -> Mapping[str, object]:
        """By path: what an export has beside the model and its tokenizer (`write_files`)."""
        return {}


def dataset_objective(dataset: MapData | StreamingDataset) -> Objective:
    """The objective that makes the samples of a data set, and computes their loss."""
    return cast(Objective, dataset.objective)
