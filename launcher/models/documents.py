"""Where the documents of packed rows are, for layers that compute each document by itself."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from launcher.models.row_division import DividedRows

_MOST_PADDING = 2
"""A batch of documents has at most this many times their tokens."""
_ARGUMENTS = ("documents", "divided_rows")


class Documents(NamedTuple):
    """Where the documents of the rows of a micro-batch are. The rows are flattened."""

    batches: list[torch.Tensor]
    """The documents as padded rows, in batches without much padding: for each batch, the positions
    of its tokens, (documents, tokens of the longest), int64. Padding repeats a document's last
    token."""
    order: torch.Tensor
    """Where the tokens of the rows are in the flattened batches, (rows, tokens), int64."""
    bounds: torch.Tensor
    """Where the documents start, and the end, (documents + 1,), int32."""
    numbers: torch.Tensor
    """The number of each token's document, (1, rows x tokens), int32."""


def documents_at(positions: npt.NDArray[np.int64]) -> Documents:
    """The documents of rows with these positions, (rows, tokens): each starts at a position of 0."""
    bounds = np.append(np.flatnonzero(positions == 0), positions.size)
    starts, lengths = bounds[:-1], np.diff(bounds)
    batches, order, filled = list[torch.Tensor](), np.empty(positions.size, dtype=np.int64), 0
    for group in _groups(lengths):
        place = np.arange(lengths[group].max())
        last = lengths[group, None] - 1
        of_tokens = starts[group, None] + np.minimum(place, last)
        order[of_tokens[place <= last]] = filled + np.flatnonzero(place <= last)
        filled += of_tokens.size
        batches.append(torch.from_numpy(of_tokens))
    numbers = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
    return Documents(
        batches,
        torch.from_numpy(order.reshape(positions.shape)),
        torch.from_numpy(bounds.astype(np.int32)),
        torch.from_numpy(numbers[None]),
    )


def _groups(lengths: npt.NDArray[np.int64]) -> list[list[int]]:
    """The numbers of documents of these lengths, by length, in groups that are padded little."""
    groups, tokens = list[list[int]](), 0
    for number in np.argsort(lengths, kind="stable").tolist():
        length = int(lengths[number])
        tokens += length
        if not groups or (len(groups[-1]) + 1) * length > _MOST_PADDING * tokens:
            groups.append([])
            tokens = length
        groups[-1].append(number)
    return groups


class DocumentsOfCall:
    """Where the documents of the rows are that a model computes at present, which its layers share;
    None between two calls of the model."""

    def __init__(self) -> None:
        self.by_document = False
        """Whether recurrent layers compute each document by itself."""
        self.documents: Documents | None = None
        self.divided: DividedRows | None = None

    @classmethod
    def of(cls, model: nn.Module) -> DocumentsOfCall:
        """What the layers of a model shall share, which takes the arguments from now on."""
        call = cls()
        model.register_forward_pre_hook(call.receive, with_kwargs=True)
        model.register_forward_hook(call.forget, always_call=True)
        return call

    def __deepcopy__(self, memo: object) -> DocumentsOfCall:
        return self  # a copied model has the attention of the first one, which reads it

    def receive(
        self, model: nn.Module, args: Sequence[Any], inputs: dict[str, Any]
    ) -> tuple[Sequence[Any], dict[str, Any]]:
        """A hook before the model's forward method: takes `documents` and `divided_rows` from its
        arguments."""
        self.documents, self.divided = inputs.get("documents"), inputs.get("divided_rows")
        return args, {name: value for name, value in inputs.items() if name not in _ARGUMENTS}

    def forget(self, *call: object) -> None:
        """A hook after the model's forward method."""
        self.documents = self.divided = None

    def recomputation(self) -> AbstractContextManager[None]:
        """For activation checkpointing, in the forward pass of a block: the context in which the
        backward pass computes the block again, which may be after calls with other documents."""
        return _SameDocuments(self)


class _SameDocuments(AbstractContextManager[None]):
    """It may be entered several times, as `retain_graph` does."""

    def __init__(self, call: DocumentsOfCall) -> None:
        self._call, self._own = call, (call.documents, call.divided)
        self._before: tuple[Documents | None, DividedRows | None] = None, None

    def __enter__(self) -> None:
        self._before = self._call.documents, self._call.divided
        self._call.documents, self._call.divided = self._own

    def __exit__(self, *error: object) -> None:
        self._call.documents, self._call.divided = self._before
