"""Classification of texts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch
from torch import nn

from launcher.data.batching import NO_SAMPLE
from launcher.data.collation import EMPTY, Collated, RowInputs, Sample, collated, padded
from launcher.data.dataset import SequenceDataset
from launcher.data.packing import Integers, Packed
from launcher.data.token_store import TokenStore
from launcher.models.micro_batch import IGNORED, MicroBatch
from launcher.objectives.base import Example, MetricValues, Objective
from launcher.objectives.loss import by_source
from launcher.recipe import schema


@dataclass(frozen=True)
class Classification(Objective):
    """A sample is a document, which has a class."""

    packs_documents: ClassVar[bool] = False
    predicts_tokens: ClassVar[bool] = False
    trains_classes: ClassVar[bool] = True
    causal: ClassVar[bool] = False
    targets_are_fixed: ClassVar[bool] = False

    def pack(self, store: TokenStore, data: schema.Data, documents: Integers | None) -> Packed:
        """A document in each sequence. The tokenizer has cut them."""
        return replace(
            super().pack(store, data, documents),
            cut_documents=store.cut_documents,
            cut_tokens=store.cut_tokens,
        )

    def sample(self, dataset: SequenceDataset, index: int) -> Sample:
        """`input_ids` (tokens,) and `targets` (1,)."""
        if index == NO_SAMPLE:
            return {"input_ids": EMPTY["input_ids"], "targets": np.full(1, IGNORED)}
        store = dataset.store
        assert store.classes is not None
        document, start, end = next(dataset.pieces(index))
        return {
            "input_ids": store.ids[start:end].astype(np.int64),
            "targets": store.classes[document : document + 1].astype(np.int64),
        }

    def collate(self, rows: list[Sample], inputs: RowInputs) -> Collated:
        """See `collate_classified`."""
        return collate_classified(rows, inputs)

    def marks(self, dataset: SequenceDataset, sample: Sample, start: int, end: int) -> list[bool]:
        """No token has loss."""
        return [False] * (end - start)

    def describe(self, dataset: SequenceDataset) -> str:
        """The size of a data set, and how many documents each class has."""
        store = dataset.store
        assert store.classes is not None
        of = np.searchsorted(store.offsets, dataset.sequences.starts, side="right") - 1
        counts = enumerate(np.bincount(store.classes[of]).tolist())
        shares = ", ".join(f"{index}: {count:,}" for index, count in counts)
        return f"{len(dataset):,} documents, {dataset.tokens:,} tokens, of the classes {shares}"

    def loss(self, model: nn.Module, micro_batch: MicroBatch) -> torch.Tensor:
        """The sum of the cross-entropies of a micro-batch's classes. A micro-batch has `input_ids`
        and `attention_mask` (rows, tokens), and `targets` (rows,), or IGNORED."""
        logits, targets = class_logits(model, micro_batch), micro_batch.targets
        assert targets is not None
        if micro_batch.sources is None:
            return _cross_entropy(logits, targets, "sum")
        losses = _cross_entropy(logits, targets, "none")
        counted = micro_batch.counted.float()
        return torch.cat([losses.sum().view(1), by_source(losses, micro_batch, weights=counted)])

    def evaluate(
        self, model: nn.Module, micro_batch: MicroBatch, count: int
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The summed loss, and for each class the numbers of samples that are predicted correctly,
        predicted, and of the class: (3, classes), float64."""
        logits, targets = class_logits(model, micro_batch), micro_batch.targets
        assert targets is not None
        classes = torch.arange(logits.shape[-1], device=logits.device)
        actual = targets[:, None] == classes
        predicted = (logits.argmax(-1)[:, None] == classes) & micro_batch.counted[:, None]
        counts = torch.stack([actual & predicted, predicted, actual]).sum(1).double()
        return _cross_entropy(logits, targets, "sum"), counts

    def scores(self, sums: torch.Tensor) -> MetricValues:
        """Accuracy, and the mean F1 of the classes that occur (macro)."""
        by_class = [
            2 * right / (predicted + actual)
            for right, predicted, actual in sums.T.tolist()
            if predicted + actual
        ]
        scored = int(sums[2].sum())
        accuracy = float(sums[0].sum()) / max(1, scored)
        return {"accuracy": accuracy, "f1": sum(by_class) / max(1, len(by_class))}, scored

    def example(self, about: Example) -> Collated:
        """Full rows with random classes."""
        rows, length = about.rows, about.inputs.length
        ids = about.ids()
        mask = torch.ones(rows, length, dtype=torch.int64)
        mask[0, -1] = 0  # without padding, some models build no mask
        micro_batch = MicroBatch(
            {"input_ids": torch.from_numpy(np.stack(ids)), "attention_mask": mask},
            torch.from_numpy(about.generator.integers(0, about.classes, rows, dtype=np.int64)),
        )
        return Collated(micro_batch, tokens=rows * length, loss_tokens=rows)


def collate_classified(rows: list[Sample], inputs: RowInputs) -> Collated:
    """A micro-batch of rows with a class each: `input_ids` and `attention_mask` (rows, tokens),
    padded on the right to the longest row as in `padded_width`, and `targets` (rows,)."""
    ids = [row["input_ids"] for row in rows]
    width = inputs.width_of(rows)
    arguments = {
        "input_ids": padded(ids, width, inputs.padding),
        "attention_mask": padded([np.ones_like(row) for row in ids], width, 0),
    }
    targets = torch.from_numpy(np.concatenate([row["targets"] for row in rows]))
    return collated(MicroBatch(arguments, targets), rows)


def class_logits(model: nn.Module, micro_batch: MicroBatch) -> torch.Tensor:
    """The logits of a micro-batch, (rows, classes), float32."""
    logits: torch.Tensor = model(**micro_batch.inputs).logits
    return logits.float()


def _cross_entropy(logits: torch.Tensor, targets: torch.Tensor, reduction: str) -> torch.Tensor:
    return nn.functional.cross_entropy(logits, targets, ignore_index=IGNORED, reduction=reduction)
