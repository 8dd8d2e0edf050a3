"""The user's own data and loss, from the function that `data.builder` names.

    # my_package/images.py
    from launcher.data.custom import CustomData

    def build(folder: str) -> CustomData:
        return CustomData(train=..., validation=..., collate=..., loss=...)

and in the recipe `data: {builder: my_package.images:build, arguments: {folder: /data/images}}`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
from torch import nn
from torch.utils.data import get_worker_info

from launcher.data.batching import NO_SAMPLE
from launcher.data.collation import Collated, Unreadable
from launcher.data.encoder import PromptForm
from launcher.errors import RecipeError
from launcher.models.micro_batch import MicroBatch
from launcher.models.philox import derived_seed
from launcher.recipe.functions import call_function


class Samples(Protocol):
    """A map-style data set."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> object: ...


@dataclass(frozen=True, kw_only=True)
class CustomData:
    """What a data.builder returns."""

    train: Samples
    """A map-style data set: `len()`, and `[index]` gives a sample. The launcher sets the order.

    For `[index]`, the launcher seeds the global generators of torch (on the CPU), numpy and random
    with run.seed, epoch and index, so that random numbers do not depend on ranks, workers or
    resumes. Seed generators of your own from these, inside `__getitem__`."""
    collate: Callable[[list[Any]], dict[str, Any]]
    """Samples to a micro-batch: a dict whose tensors are moved to the device for the loss. The
    generators are seeded with run.seed and all samples of the micro-batch, so that random numbers
    drawn here depend on batch.micro_batch_size, too."""
    loss: Callable[[nn.Module, Mapping[str, Any]], torch.Tensor]
    """loss(model, micro-batch): the SUM over the micro-batch's targets, a scalar, not the mean. It
    is divided by the targets of the whole global batch, over all ranks and micro-batches. The start
    of a run refuses a mean."""
    targets: Callable[[Mapping[str, Any]], int] | None = None
    """Number of targets of a micro-batch, a whole number; None: its number of samples."""
    validation: Samples | dict[str, Samples] | None = None
    """A data set like train, or a dict of them by name. Each evaluation draws the same random
    numbers, whatever run.seed is."""


@dataclass(frozen=True)
class CustomDataset:
    """One data set of a CustomData, with the members of `SequenceDataset`."""

    samples: Samples
    data: CustomData
    name: str
    objective: object = None
    """The objective, which computes the loss (`launcher/objectives/custom.py`)."""
    seed: int = 0
    packed: ClassVar[bool] = False
    joined: ClassVar[bool] = False
    lengths: ClassVar[None] = None
    skipped: ClassVar[list[dict[str, str]]] = []
    prompt_forms: ClassVar[frozenset[PromptForm]] = frozenset()

    def __len__(self) -> int:
        return len(self.samples)

    def width(self, longest: int) -> int:
        """The user's collate decides."""
        return longest

    def __getitem__(self, index: int) -> tuple[int, object] | None:
        """The index with its sample. index: plus the samples of the epochs before."""
        if index == NO_SAMPLE:
            return None
        with _seeded(self.seed, index):
            return index, self.samples[index % len(self)]

    def collate(self, rows: list[tuple[int, object] | None]) -> Collated | Unreadable:
        """The user's micro-batch. If it has no sample, the first sample is used with weight 0."""
        try:
            return self._collated(rows)
        except RecipeError as error:
            if get_worker_info() is None:
                raise
            return Unreadable(str(error))

    def _collated(self, rows: list[Any]) -> Collated:
        real = [row for row in rows if row is not None]
        collated = real or [self[0]]
        indices = [index for index, _ in collated]
        samples = [sample for _, sample in collated]
        with _seeded(self.seed, "collate", *indices):
            batch = self.data.collate(samples)
        if not isinstance(batch, Mapping):
            got = f"a dict, the arguments of its loss; got {type(batch).__name__}"
            raise RecipeError(f"data.builder: its collate must return {got}")
        batch, targets = dict(batch), len(real)
        if real and self.data.targets is not None:
            targets = _whole(self.data.targets(batch))
        micro_batch = MicroBatch({}, extra={"batch": batch, "weight": float(bool(real))})
        return Collated(micro_batch, tokens=targets, loss_tokens=targets)

    @property
    def fingerprint(self) -> dict[str, object]:
        """For checkpoints: only the number of samples is known."""
        return {"samples": len(self)}

    def describe(self) -> list[str]:
        """A line for the log."""
        return [f"{len(self):,} samples from {self.name}"]


def _whole(targets: object) -> int:
    """A number of targets. The sum over the ranks is one of integers, and the loss is divided by
    it: a fraction would be cut, and a negative number would turn the gradient around."""
    array = np.asarray(targets)
    value = array.item() if array.size == 1 else None
    if not isinstance(value, int | float) or value < 0 or value % 1 != 0:
        what = "its targets must be a whole number from 0; scale the loss instead"
        raise RecipeError(f"data.builder: {what}; got {targets!r}")
    return int(value)


@contextmanager
def _seeded(*key: object) -> Iterator[None]:
    """Seeds the global generators. Outside loader processes it restores them afterwards, because
    dropout draws from them."""
    states = None
    if get_worker_info() is None:  # it takes longer than the seeds
        states = torch.get_rng_state(), np.random.get_state(), random.getstate()
    seed = derived_seed(0, repr(key))
    torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed the GPU, too
    np.random.seed([seed % 2**32, seed >> 32])
    random.seed(seed)
    try:
        yield
    finally:
        if states is not None:
            torch.set_rng_state(states[0])
            np.random.set_state(states[1])
            random.setstate(states[2])


def build_custom_data(builder: str, arguments: Mapping[str, object] | None) -> CustomData:
    """Calls `package.module:function`. Raises RecipeError if it is missing or returns something
    else."""
    built = call_function(builder, arguments or {}, key="data.builder")
    if not isinstance(built, CustomData):
        got = f"a launcher.data.custom.CustomData; got {type(built).__name__}"
        raise RecipeError(f"data.builder: {builder} must return {got}")
    if not len(built.train):
        raise RecipeError(f"data.builder: {builder} returned an empty training set")
    return built
