"""Training on whole answers: samples, micro-batches, and the log-probabilities of answers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch
from torch import nn

from launcher.data.collation import (
    NOTHING,
    Collated,
    Piece,
    RowInputs,
    Sample,
    make_sample,
    padded,
)
from launcher.data.dataset import SequenceDataset
from launcher.data.packing import Integers, Sequences, separate_pairs
from launcher.data.token_store import TokenStore
from launcher.errors import RecipeError
from launcher.models.adapter_files import open_adapter
from launcher.models.attention import refuse_other_layers
from launcher.models.micro_batch import IGNORED, MicroBatch
from launcher.models.predictions import Predicted, cross_entropies
from launcher.objectives.base import BeforeTraining, Example, Objective
from launcher.objectives.kept_files import (
    Reference,
    ReferenceFile,
    config_digest,
    weights_name,
)
from launcher.objectives.reference import with_references
from launcher.recipe import schema

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from launcher.data.run_data import RunData
    from launcher.recipe.schema import Recipe
    from launcher.strategies.base import WrappedModel

Bounds = tuple[tuple[int, int], ...]
"""The first token and the end of each answer of a document, as positions in the store."""


@dataclass(frozen=True)
class Answers(Objective):
    """A document holds an answer after its prompt, or several, each after the same prompt. The loss
    is a function of the log-probabilities of whole answers, and perhaps of those by the initial
    weights, the reference."""

    reference: Reference | None = None
    """Log-probabilities of the answers by the initial weights; None: not known, or not needed."""
    answers: ClassVar[int] = 1
    """Answers of a document."""

    @property
    def needs_reference(self) -> bool:
        """Whether the loss compares with the initial weights."""
        return True

    def change_model(self, model: PreTrainedModel, *, row_length: int) -> None:
        """Changes nothing. Raises RecipeError if answers cannot share a row, or if the model has
        dropout or noise in its routers."""
        check_model(model, row_length, pairs=self.answers > 1)

    def bounds(self, dataset: SequenceDataset, index: int) -> Iterator[tuple[int, Bounds]]:
        """The number of each document of a sequence, and the places of its answers."""
        for document, start, end in dataset.pieces(index):
            yield document, ((start, end),)

    def sample(self, dataset: SequenceDataset, index: int) -> Sample:
        """`input_ids`, `targets` and `position_ids`, and for each token `answers`, the number of its
        answer in the store, or -1 without a target, and `reference`, that of the answer. Each
        answer is a document of its own to attention."""
        store, answers = dataset.store, [NOTHING]
        pieces: list[Piece] = [(NOTHING, NOTHING)]
        for document, bounds in self.bounds(dataset, index):
            for answer, (first, last) in enumerate(bounds, self.answers * document):
                targets = np.full(last - first, IGNORED, dtype=np.int64)
                targets[:-1] = store.labels_or_ids[first + 1 : last]
                pieces.append((store.ids[first:last], targets))
                answers.append(np.where(targets == IGNORED, -1, answer))
        of_token = np.concatenate(answers)
        reference = np.zeros(len(of_token), dtype=np.float32)
        if self.reference is not None:
            reference = self.reference.flatten()[of_token]
        return make_sample(pieces) | {"answers": of_token, "reference": reference}

    def collate(self, rows: list[Sample], inputs: RowInputs) -> Collated:
        """See `collate_answers`."""
        return collate_answers(rows, inputs, self.answers)

    def sources(self, of: list[Integers]) -> torch.Tensor:
        """The numbers of the sources of a micro-batch's documents, each of which is a sample."""
        return torch.from_numpy(np.concatenate(of))

    def example_rows(self, about: Example) -> list[Sample]:
        """A document in each row, whose tokens all have a loss."""
        rows = []
        for number, ids in enumerate(about.ids()):
            parts = np.array_split(ids, self.answers)
            numbers = np.arange(self.answers) + self.answers * number
            answers = np.repeat(numbers, list(map(len, parts)))
            reference = np.zeros(len(ids), dtype=np.float32)
            made = make_sample((part, part) for part in parts)
            rows.append(made | {"answers": answers, "reference": reference})
        return rows

    def kept_file(self, run: Path, recipe: Recipe) -> ReferenceFile | None:
        """The file with the log-probabilities by the initial weights."""
        if not self.needs_reference:
            return None
        lora = recipe.lora
        name = weights_name(recipe.model, recipe.strategy, recipe.run.seed)
        if lora is not None and lora.quantize is not None:
            name += f", quantized to {lora.quantize}"
        if lora is not None and lora.path is not None:
            settings = [lora.rank, lora.alpha, lora.rank_stabilized, lora.dora]
            name += f", with the adapter {open_adapter(Path(lora.path)).digest()} {settings}"
        return ReferenceFile(run / "reference.safetensors", name, config_digest(recipe.model))

    def with_initial_weights(
        self, data: RunData, wrapped: WrappedModel, about: BeforeTraining
    ) -> RunData:
        """The data with the reference. Every rank must call this."""
        if not self.needs_reference:
            return data

        def compute(model: nn.Module, micro_batch: MicroBatch) -> torch.Tensor:
            return answer_log_probabilities(model, micro_batch).value

        assert not isinstance(about.file, dict)
        return with_references(
            data,
            wrapped,
            compute,
            answers=self.answers,
            micro_batch_size=about.micro_batch_size,
            ranks=about.ranks,
            file=about.file,
        )


@dataclass(frozen=True)
class Pairs(Objective):
    """A document is a pair of answers: the chosen answer after its prompt, as long as
    `store.first_lengths` says, and then the rejected one after the same prompt. A sample is a pair."""

    unit: ClassVar[str] = "pairs"
    loss_unit: ClassVar[str] = "pairs"

    def text_length(self, row_length: int) -> int:
        """A row has room for both answers."""
        return row_length // 2

    def packs(self, data: schema.Data) -> bool:
        """A pair is two documents in a row, also without packing."""
        return True

    def pack(self, store: TokenStore, data: schema.Data, documents: Integers | None) -> Sequences:
        """A whole pair in each sequence."""
        assert store.first_lengths is not None
        return separate_pairs(
            store.offsets,
            store.first_lengths,
            store.labels_or_ids,
            sequence_length=data.sequence_length,
            documents=documents,
        )

    def sources(self, of: list[Integers]) -> torch.Tensor:
        """The numbers of the sources of a micro-batch's pairs, each of which is a sample."""
        return torch.from_numpy(np.concatenate(of))

    def bounds(self, dataset: SequenceDataset, index: int) -> Iterator[tuple[int, Bounds]]:
        """The number of each pair of a sequence, and the places of its answers."""
        assert dataset.store.first_lengths is not None
        for document, start, end in dataset.pieces(index):
            middle = start + int(dataset.store.first_lengths[document])
            yield document, ((start, middle), (middle, end))


def collate_answers(
    rows: list[Sample], inputs: RowInputs, answers: int, of_answers: tuple[str, ...] = ()
) -> Collated:
    """A micro-batch of `collate_sequences` from samples of `Answers`, padded as there. A row holds
    several documents even if it is not packed. `loss_tokens` is the number of documents of the
    store, and `documents` are their numbers.

    `answers` (positions,) are the numbers of the answers whose tokens the targets are: for each
    document its answers in order, and without a target the number after the last. `answer_tokens`,
    the numbers of targets, and `reference` are (documents, answers), float32; and so are further
    arrays of the samples, `of_answers`, whose values for an answer stand at each of its tokens.
    """
    per_answer = ("reference", *of_answers)
    made = inputs.collate(rows, several_documents=True)
    micro_batch = made.micro_batch
    width = micro_batch.inputs["input_ids"].shape[1]
    numbers, names, count = [], [NOTHING], 0
    sizes, values = [NOTHING], {name: [NOTHING] for name in per_answer}
    for row in rows:
        here = row["answers"] >= 0
        # By their places: a step may have the same document twice, of two epochs, and two sources
        # have documents with the same number
        places = np.cumsum(row["position_ids"] == 0)[here]
        found, first, inverse, counts = np.unique(
            places, return_index=True, return_inverse=True, return_counts=True
        )
        numbers.append(np.full(len(here), -1))
        numbers[-1][here] = inverse + count
        names.append(row["answers"][here][first])
        sizes.append(counts)
        for name in per_answer:
            values[name].append(row[name][here][first])
        count += len(found)
    of = padded(numbers, width, -1).flatten()
    of[of < 0] = count
    extra = {"answers": micro_batch.at_positions(of)}
    for name, parts in (("answer_tokens", sizes), *values.items()):
        array = np.concatenate(parts).astype(np.float32)
        extra[name] = torch.from_numpy(array).view(-1, answers)
    documents = np.concatenate(names)[::answers] // answers
    return replace(
        made,
        micro_batch=replace(micro_batch, extra=extra),
        loss_tokens=count // answers,
        documents=documents,
    )


def answer_log_probabilities(model: nn.Module, micro_batch: MicroBatch) -> Predicted:
    """(documents, answers), float32: the sums over the tokens of each answer. A micro-batch is that
    of `collate_answers`."""
    counts = micro_batch.extra["answer_tokens"]
    found = cross_entropies(model, micro_batch)
    sums = found.value.new_zeros(counts.numel() + 1)  # the last: no answer
    sums = sums.index_add(0, micro_batch.extra["answers"], -found.value)
    return Predicted(sums[:-1].view(counts.shape), found.outputs)


def check_model(model: PreTrainedModel, row_length: int, *, pairs: bool = True) -> None:
    """Raises RecipeError if the answers (pairs: two of each prompt) cannot share a row, or if the model has
    dropout or noise in its routers: its log-probabilities would be compared with those of a
    reference without it."""
    section, kind = ("preference", "preference") if pairs else ("kto", "unpaired")
    instead = "both answers of a pair are in one row, so it cannot be trained on pairs"
    if not pairs:
        instead = "several answers are in one row, so it cannot be trained on them"
    refuse_other_layers(model, row_length, key=f"data.kind: {kind}", instead=instead, packed=True)
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            dropout = key == "p" if isinstance(module, nn.Dropout) else "drop" in key
            noise = "jitter" in key
            if (dropout or noise) and isinstance(value, float) and value > 0:
                what = "noise in routers" if noise else "dropout"
                own = key if noise else "the model's dropout"
                raise RecipeError(
                    f"{section}: not available with {what}, and {name}.{key} is {value}: set "
                    f"{own} to 0 in model.config, or in config.json of model.path"
                )
