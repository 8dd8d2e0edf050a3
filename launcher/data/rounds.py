"""Rounds of a run: parts of its steps, whose rows get answers before they are trained.

The samples of the run, their order and its steps are those of the data. A round has some of the
steps, and so some positions of the order. Its rows are the prompts of these samples, in this order,
each with a new answer, in a file of kind tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, overload

import numpy as np

from launcher.data.batching import NO_SAMPLE, Order, make_batch_sampler
from launcher.data.dataset import SampleMaker, SequenceDataset
from launcher.data.opening import open_dataset
from launcher.data.packing import Integers
from launcher.data.run_data import RunData
from launcher.data.token_store import ModelTraits, TokenStore
from launcher.errors import RecipeError, TrainingError
from launcher.models.micro_batch import IGNORED
from launcher.recipe import schema


class Prompt(NamedTuple):
    """A prompt, which is a document up to its last answer, and this answer."""

    ids: list[int]
    reference: list[int]
    start: int
    """Where the document begins in the token store."""


def last_prompt(store: TokenStore, start: int, end: int) -> Prompt | None:
    """The prompt of a document, or of its beginning, at these positions of a store. The answer is the
    last part with loss. None: nothing has loss, or there is nothing before it."""
    assert store.labels is not None
    trained = np.flatnonzero(store.labels[start:end] != IGNORED)
    if not len(trained):
        return None
    first = int(trained[np.append(True, np.diff(trained) > 1)][-1])
    ids = store.ids[start : start + trained[-1] + 1].tolist()
    return Prompt(ids[:first], ids[first:], start) if first > 0 else None


@dataclass(frozen=True)
class Round:
    """A part of the steps of a run."""

    number: int
    """From 1."""
    first_step: int
    """Steps before the round."""
    end_step: int
    """Steps up to its end."""
    first_sample: int
    """Position of its first sample in the order of the run."""
    samples: Integers
    """The indices of its samples, in the order of the run."""


def round_bounds(steps: int, rounds: int) -> list[int]:
    """The steps before each round of a run, and of all. Raises RecipeError if there are fewer steps
    than rounds."""
    if rounds > steps:
        what = f"{rounds} is more than the {steps} steps of the run"
        raise RecipeError(f"distillation.rounds: {what}; give fewer rounds, or more steps")
    return [number * steps // rounds for number in range(rounds + 1)]


def round_at(data: RunData, step: int, *, rounds: int) -> Round:
    """The round of the step that follows `step` finished ones. data: at a position of the run. Raises
    RecipeError if there are more rounds than steps."""
    bounds, size = round_bounds(data.steps, rounds), data.sampler.global_batch_size
    number = int(np.searchsorted(bounds, step, side="right"))
    first_step, end_step = bounds[number - 1], bounds[number]
    first = data.start.samples + (first_step - data.start.step) * size
    end = data.start.samples + (end_step - data.start.step) * size
    drawn = [data.order.sample(position) for position in range(first, end)]
    samples = np.array([each for each in drawn if each != NO_SAMPLE], dtype=np.int64)
    return Round(number, first_step, end_step, first, samples)


class RoundPrompts(Sequence[Prompt]):
    """The prompts of the samples of a round, in their order."""

    def __init__(self, dataset: SequenceDataset, samples: Integers) -> None:
        """dataset: with a document in each sample."""
        self.dataset, self.samples = dataset, samples

    def __len__(self) -> int:
        return len(self.samples)

    @overload
    def __getitem__(self, index: int) -> Prompt: ...

    @overload
    def __getitem__(self, index: slice) -> list[Prompt]: ...

    def __getitem__(self, index: int | slice) -> Prompt | list[Prompt]:
        if isinstance(index, slice):
            return [self[each] for each in range(len(self))[index]]
        [(document, start, end)] = self.dataset.pieces(int(self.samples[index]))
        store = self.dataset.store
        # A sample has the target of its last token, too
        end = min(end + 1, int(store.offsets[document + 1]))
        if (prompt := last_prompt(store, start, end)) is None:  # such as an empty one
            ids = store.ids[start:end].tolist()
            return Prompt(ids[:1], ids[1:], start)
        return prompt

    def room(self, prompt: Prompt) -> int:
        """Most tokens of an answer: with the prompt as many as a sequence has, and at least one."""
        return max(1, self.dataset.length - len(prompt.ids))


@dataclass(frozen=True)
class _RoundOrder:
    """The order of a run, for the samples of a round, which are numbered in this order."""

    whole: Order
    first: int

    @property
    def samples(self) -> int:
        return self.whole.samples

    @property
    def epochs(self) -> int | None:
        return self.whole.epochs

    def sample(self, position: int) -> int:
        known = self.whole.sample(position) != NO_SAMPLE
        return position - self.first if known else NO_SAMPLE

    def epochs_seen(self, positions: int) -> list[float]:
        return self.whole.epochs_seen(positions)


def round_data(
    data: RunData,
    batch: schema.Batch,
    round_: Round,
    rows: Path,
    *,
    objective: SampleMaker,
    unused: str | None,
    model: ModelTraits,
    build: bool,
) -> RunData:
    """The data of the run as it trains a round, from its own position on. rows: the file of the
    round, whose tokens are kept in its folder. unused: a column of them beside ids and answers. build: see
    `open_dataset`. Raises TrainingError if the rows are not those of the round."""
    section = schema.Data(
        kind="tokens",
        train=(str(rows),),
        ignore_columns=("sample", "answer", *([] if unused is None else [unused])),
        sequence_length=data.data.sequence_length,
        packing=False,
        cache=str(rows.parent / "tokens"),
        processes=data.data.processes,
    )
    training = open_dataset(
        section,
        (str(rows),),
        objective=objective,
        tokenizer=model.tokenizer,
        model=model,
        build=build,
    )
    if len(training) != len(round_.samples):
        what = f"{rows} has {len(training):,} rows to train on, not {len(round_.samples):,}"
        raise TrainingError(f"{what}; remove the file and start the run again")
    sampler = make_batch_sampler(
        batch,
        order=_RoundOrder(data.order, round_.first_sample),
        lengths=training.lengths,
        width=training.width,
        steps=round_.end_step,
        rank=data.sampler.rank,
        ranks=data.sampler.ranks,
    )
    return replace(data, training=training, sampler=sampler, steps=round_.end_step)
