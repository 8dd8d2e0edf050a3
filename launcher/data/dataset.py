"""Sequences as arrays, and arrays as micro-batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from launcher.batching import NO_SAMPLE
from launcher.data import packing
from launcher.data.store import TokenStore, open_store
from launcher.loss import IGNORED
from launcher.recipe import schema


@dataclass(frozen=True)
class SequenceDataset:
    """A store's documents as training sequences; a map-style data set for torch's DataLoader."""

    store: TokenStore
    sequences: packing.Sequences
    length: int
    packed: bool

    def __len__(self) -> int:
        return len(self.sequences)

    def __getitem__(self, index: int) -> dict[str, npt.NDArray[np.int64]]:
        """One sequence: `input_ids`, `targets` and `position_ids`, each (tokens,).

        A position's target is the document's next token, in the next sequence if need be; IGNORED at a document's end.
        NO_SAMPLE gives an empty one.
        """
        if index == NO_SAMPLE:
            nothing = np.zeros(0, dtype=np.int64)
            return {"input_ids": nothing, "targets": nothing, "position_ids": nothing}
        ids, targets, positions = [], [], []
        labels = self.store.ids if self.store.labels is None else self.store.labels
        for piece in range(self.sequences.bounds[index], self.sequences.bounds[index + 1]):
            start, length = int(self.sequences.starts[piece]), int(self.sequences.lengths[piece])
            document = int(np.searchsorted(self.store.offsets, start, side="right"))
            end = int(self.store.offsets[document])
            follow = np.full(length, IGNORED, dtype=np.int64)
            known = labels[start + 1 : min(start + length + 1, end)]
            follow[: len(known)] = known
            ids.append(self.store.ids[start : start + length].astype(np.int64))
            targets.append(follow)
            positions.append(np.arange(length, dtype=np.int64))
        return {"input_ids": np.concatenate(ids), "targets": np.concatenate(targets), "position_ids": np.concatenate(positions)}

    def collate(self, rows: list[dict[str, npt.NDArray[np.int64]]]) -> dict[str, Any]:
        """A micro-batch: tensors (rows, tokens), padded on the right to the longest row (packed: to the full length).

        Padding needs no attention mask: attention is causal, so no token sees what stands right of it, and padding has
        no target. `position_ids` are there only where some row holds several documents; transformers' own attention
        masks keep those apart. `tokens` and `loss_tokens` are counted here, on the CPU.
        """
        width = self.length if self.packed else max(1, *(len(row["input_ids"]) for row in rows))
        tensors = {
            "input_ids": _padded([row["input_ids"] for row in rows], width, 0),
            "targets": _padded([row["targets"] for row in rows], width, IGNORED),
        }
        if self.packed and any(int((row["position_ids"] == 0).sum()) > 1 for row in rows):
            tensors["position_ids"] = _positions([row["position_ids"] for row in rows], width)
        return {
            "tensors": tensors,
            "tokens": sum(len(row["input_ids"]) for row in rows),
            "loss_tokens": int((tensors["targets"] != IGNORED).sum()),
        }


def _padded(rows: list[npt.NDArray[np.int64]], width: int, value: int) -> torch.Tensor:
    out = np.full((len(rows), width), value, dtype=np.int64)
    for index, row in enumerate(rows):
        out[index, : len(row)] = row
    return torch.from_numpy(out)


def _positions(rows: list[npt.NDArray[np.int64]], width: int) -> torch.Tensor:
    """Padding is a document of its own: its positions start at 0 again."""
    out = np.zeros((len(rows), width), dtype=np.int64)
    for index, row in enumerate(rows):
        out[index, : len(row)] = row
        out[index, len(row) :] = np.arange(width - len(row))
    return torch.from_numpy(out)


def open_dataset(
    data: schema.Data,
    patterns: tuple[str, ...],
    *,
    tokenizer: str | None = None,
    vocabulary: int,
    build: bool,
    report: Callable[[str], None],
) -> SequenceDataset:
    """Tokenizes (or finds) and packs the files of `patterns`.

    tokenizer: null: data.tokenizer.
    vocabulary: rows of the model's embedding; an id beyond is refused here, not on the GPU.
    """
    store = open_store(
        kind=data.kind,
        patterns=patterns,
        data=data,
        tokenizer=tokenizer or data.tokenizer,
        vocabulary=vocabulary,
        build=build,
        report=report,
    )
    if not data.packing:
        sequences = packing.separate(store.offsets, data.sequence_length)
    elif data.kind == "text":
        sequences = packing.stream(store.offsets, data.sequence_length)
    else:
        sequences = packing.best_fit(store.offsets, data.sequence_length)
    return SequenceDataset(store, sequences, data.sequence_length, data.packing)
