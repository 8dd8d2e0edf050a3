"""Whether the loss of a user's own code is a sum over the samples of a micro-batch.

The launcher divides the sum of the losses of all micro-batches by the targets of the global batch. A
mean would train too weakly, and what depends on other samples of a micro-batch would depend on its
size. Neither shows in the log. So the loss of a few samples is compared with those of their halves.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from launcher.data.batching import NO_SAMPLE, rows_of
from launcher.data.collation import raise_error
from launcher.data.loader import make_loader, to_device
from launcher.data.streaming import StreamingDataset
from launcher.distributed.process_group import from_rank_0
from launcher.models.embedding_noise import ALPHA
from launcher.models.names import clean_name
from launcher.objectives.base import dataset_objective
from launcher.strategies.base import compute_dtype
from launcher.training.random_states import random_states_kept

if TYPE_CHECKING:
    from launcher.training.setup import Training

Verdict = Literal["sum", "mean", "random", "dependent"]
_HALF = 2
"""Most samples of a half. Batch norm needs two."""
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_DROPOUTS = (
    *(nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d),
    *(nn.AlphaDropout, nn.FeatureAlphaDropout),
)
_FLOAT32, _MIXED = 1e-3, 2e-2
"""Relative differences that rounding makes."""


@dataclass(frozen=True)
class SumCheck:
    """Losses of a few samples at once, and of their halves, without gradients and dropout."""

    whole: float
    again: float
    """Of the same samples, the second half first, with other random numbers."""
    halves: tuple[float, float]
    targets: tuple[int, int]
    """Of the halves."""
    samples: int
    micro_batch_size: int
    tolerance: float
    own_loss: bool
    """Whether the loss is the user's, and not only the model."""
    batch_norm: str | None
    """A module that normalizes by the statistics of a micro-batch."""

    @property
    def verdict(self) -> Verdict:
        """What the losses show. Losses that are not finite show nothing, as if they were sums.

        random: the loss is random, so that a difference shows nothing else. dependent: the loss is
        no mean, and depends on which samples are together.
        """
        first, second = self.halves
        scale = max(abs(self.whole), abs(first) + abs(second))
        if not all(map(math.isfinite, (self.whole, self.again, *self.halves))) or scale == 0:
            return "sum"
        noise = abs(self.whole - self.again) / scale
        off = abs(first + second - self.whole) / scale
        is_random = noise > self.tolerance
        if off <= max(self.tolerance, 3 * noise):
            return "random" if is_random else "sum"
        # A mean over other numbers than the targets need not be exactly half of the sum
        ratio = (first + second) / self.whole if self.whole else math.inf
        count = sum(self.targets)
        mean = sum(map(math.prod, zip(self.halves, self.targets, strict=True))) / max(1, count)
        close = abs(mean - self.whole) <= max(self.tolerance, 3 * noise) * scale
        if self.own_loss and noise < 0.1 and off > 0.2 and (abs(ratio - 2) <= 0.2 or close):
            return "mean"
        return "random" if is_random else "dependent"

    def describe(self) -> str | None:
        """What is wrong, the likely cause, and what to change; None if nothing is."""
        verdict, (first, second) = self.verdict, self.halves
        if verdict == "sum":
            return None
        if verdict == "random":
            return (
                f"the loss of the same {self.samples} samples is {self.whole:.4g} and then "
                f"{self.again:.4g}, with dropout off: random numbers in the forward pass, the loss "
                "or collate, such as noise or nn.functional.dropout, make losses differ"
            )
        numbers = (
            f"the loss of {self.samples} samples is {self.whole:.4g}, and the losses of their "
            f"halves are {first:.4g} and {second:.4g}"
        )
        if verdict == "mean":
            share = sum(self.targets) / self.samples * self.micro_batch_size
            return (
                f"{numbers}: it is a mean over the micro-batch, and must be a sum. The launcher "
                "divides it by the targets of the whole global batch, so that gradients would be "
                f"about {max(2, round(share)):,} times too small, the targets of a micro-batch. Use "
                'reduction="sum", or .sum() in place of .mean(); for a mean within each sample, '
                "losses.flatten(1).mean(1).sum(). With targets other than samples, such as tokens "
                "or pixels, count them in CustomData(targets=...)"
            )
        if self.batch_norm is not None:
            cause = (
                f"batch norm ({self.batch_norm}) is the likely cause: its statistics are those of a "
                "micro-batch on one rank. nn.GroupNorm or nn.LayerNorm has none"
            )
        else:
            cause = (
                "the likely cause is that samples see each other (a contrastive loss, attention or "
                "a normalization over the first dimension), or that padding has loss"
            )
        return (
            f"{numbers}: the result depends on batch.micro_batch_size and the number of ranks; "
            f"{cause}"
        )


def check_sum(training: Training) -> SumCheck | None:
    """Compares the loss of the first samples of a run with those of their halves, as many samples as
    a half of them has in a micro-batch, but at most 2. Every rank must call this, with the same
    result: all of them take the same samples.

    The model, its buffers and the random generators are as before. Returns None if the model and
    the loss are the launcher's, or if there are too few samples to compare.
    """
    recipe, data, wrapped = training.recipe, training.data, training.wrapped
    dataset, device = data.training, training.ranks.device
    own_code = recipe.model.builder is not None or recipe.data.builder is not None
    if not own_code or isinstance(dataset, StreamingDataset) or dataset.joined:
        return None
    rows = rows_of(recipe.batch, row_length=recipe.data.row_length)
    half = min(rows, _HALF)
    drawn = [data.order.sample(position) for position in range(2 * half)]
    if len(set(drawn) - {NO_SAMPLE}) < 2 * half:
        return None
    first, second = drawn[:half], drawn[half:]
    batches: Any = [first + second, second + first, first, second]
    loader = make_loader(
        dataset, batches, data.data, seed=0, persistent_workers=False, device=device
    )
    losses, targets = list[float](), list[int]()
    wrapped.root.train()
    # Compiled blocks would be compiled for these sizes
    stance = torch.compiler.set_stance("force_eager")
    with _unchanged(wrapped.module, device), dropout_off(wrapped.module), stance:
        norms = (
            f"{clean_name(name)}, {type(module).__name__}"
            for name, module in wrapped.module.named_modules()
            if isinstance(module, _BATCH_NORMS) and module.training
        )
        batch_norm = next(norms, None)
        for collated in map(raise_error, loader):
            micro_batch = to_device(collated.micro_batch, device)
            summed = wrapped.without_gradients(dataset_objective(dataset).loss, micro_batch)
            losses.append(float(summed.flatten()[0]))
            targets.append(collated.loss_tokens)
        wrapped.reshard()
    # Rounding may differ between ranks
    whole, again, *halves = from_rank_0(losses, training.ranks.group)
    return SumCheck(
        whole,
        again,
        (halves[0], halves[1]),
        (targets[2], targets[3]),
        samples=2 * half,
        micro_batch_size=rows,
        tolerance=_FLOAT32 if compute_dtype(recipe.strategy) == torch.float32 else _MIXED,
        own_loss=recipe.data.builder is not None,
        batch_norm=batch_norm,
    )


@contextmanager
def dropout_off(model: nn.Module) -> Iterator[None]:
    """A context in which all probabilities of dropout, and the noise on embeddings, are zero: each
    rank draws its own, so that losses would differ."""
    changed = list[tuple[nn.Module, str, float]]()
    for module in model.modules():
        for name, value in list(vars(module).items()):  # such as attention_dropout, resid_pdrop
            own = name == ALPHA or (name == "p" and isinstance(module, _DROPOUTS))
            if isinstance(value, float) and (own or "drop" in name):
                changed.append((module, name, value))
                setattr(module, name, 0.0)
    try:
        yield
    finally:
        for module, name, value in changed:
            setattr(module, name, value)


@contextmanager
def _unchanged(model: nn.Module, device: torch.device) -> Iterator[None]:
    """A context after which buffers and random generators are as before."""
    kept = [
        (module, name, buffer, buffer.clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    try:
        with random_states_kept(device):
            yield
    finally:
        for module, name, buffer, value in kept:
            buffer.copy_(value)
            module._buffers[name] = buffer
