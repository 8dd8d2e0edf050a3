"""Documents tokenized while training, for sets larger than the disk.

The contract. A global batch has a *lane* for each of its places: `global_batch_size` lanes, each of which reads its own
part of the data and cuts it into sequences of its own; place p of every step is the next sequence of lane p. Which
documents a lane has, and in which order, is a function of (files, seed, number of lanes) alone. So a run with other
ranks, micro-batches or loader processes sees the same samples in the same steps, and the step is all that must be known
to go on: a lane is read again up to there, which costs the reading and tokenizing of what was seen, and no training.

Files are divided into units (runs of lines of a .jsonl, row groups of a .parquet, a .json, .csv or text file whole,
shards of a hub data set) which are dealt out to the lanes; where there are fewer units than lanes, several lanes read a
unit and take every n-th row of it. A lane that is through its part starts again, in another order. With shuffle, units
are in random order, and a row leaves a buffer of `shuffle_buffer` rows at random.
"""

from __future__ import annotations

import copy
import itertools
import json
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import IterableDataset, get_worker_info

from launcher import loss
from launcher.batching import NO_SAMPLE, RankSlots
from launcher.data.dataset import Collated, Isolation, Row, collate_sequences
from launcher.data.encoder import Encoder
from launcher.data.sources import Part, read_rows, split
from launcher.data.sources import Row as Source
from launcher.errors import RecipeError
from launcher.hub import load_data_set
from launcher.loss import IGNORED

_UNIT_BYTES = 64 * 2**20
"""At most, where a file can be divided: small enough for many lanes, large enough to read on."""
_ENCODED_ROWS = 16
"""Rows tokenized at once: many are faster, few come sooner."""


@dataclass(frozen=True)
class StreamOrder:
    """Positions of a stream: its length is not known."""

    samples: int = 0
    epochs: int | None = None

    def sample(self, position: int) -> int:
        """The position itself."""
        return position

    def passes(self, positions: int) -> list[float]:
        """Not known."""
        return []


@dataclass(frozen=True)
class _Unit:
    part: Part
    first: int = 0
    every: int = 1
    """Rows first, first + every, ... of the part."""
    shard: int = 0
    shards: int = 1
    """Of a hub data set: which of its files."""

    def rows(self, column: str) -> Iterator[Source]:
        """Its rows, in order."""
        rows = self._hub_rows() if self.part.form == "hub" else read_rows(self.part, column=column)
        return itertools.islice(rows, self.first, None, self.every)

    def _hub_rows(self) -> Iterator[Source]:
        data_set = load_data_set(self.part.name, validation=self.part.validation, streaming=True)
        for number, values in enumerate(data_set.shard(num_shards=self.shards, index=self.shard), start=1):
            yield Source(self.part, number, values, at=f"{self.part.name} shard {self.shard + 1} of {self.shards} row {number}")


def _units(part: Part, size: int) -> list[_Unit]:
    if part.form != "hub":
        return [_Unit(piece) for piece in split(part, size)]
    data_set = load_data_set(part.name, validation=part.validation, streaming=True)
    return [_Unit(part, shard=shard, shards=data_set.num_shards) for shard in range(data_set.num_shards)]


def deal(parts: Sequence[Part], *, lanes: int, seed: int, shuffle: bool) -> list[list[_Unit]]:
    """The units of each lane; a function of the arguments and the files alone."""
    total = sum(part.size for part in parts)
    size = max(1 << 16, min(_UNIT_BYTES, total // (4 * lanes)))
    units = [unit for part in parts for unit in _units(part, size)]
    if len(units) < lanes:
        every = math.ceil(lanes / len(units))
        units = [replace(unit, first=first, every=every) for unit in units for first in range(every)]
    if shuffle:
        random.Random(f"units {seed}").shuffle(units)
    return [units[lane::lanes] for lane in range(lanes)]


class StreamingDataset(IterableDataset[Collated]):
    """This rank's micro-batches, one after the other, as torch's DataLoader iterates them with batch_size=None.

    With several loader processes each has every n-th micro-batch of a step, and with it the lanes of that: their number
    (`workers`) divides the micro-batches of a step.
    """

    packed = True
    lengths: Sequence[int] | None = None

    def __init__(
        self,
        parts: Sequence[Part],
        encoder: Encoder,
        *,
        slots: RankSlots,
        seed: int,
        shuffle: bool,
        shuffle_buffer: int,
        length: int,
        packing: bool,
        isolation: Isolation,
        vocabulary: int | None,
        skip_bad_rows: bool,
        skipped_rows: Path | None,
    ) -> None:
        self._lanes = deal(parts, lanes=slots.global_batch_size, seed=seed, shuffle=shuffle)
        self._encoder, self._slots = encoder, slots
        self._seed, self._shuffle, self._shuffle_buffer = seed, shuffle, shuffle_buffer
        self._length, self._packing, self._isolation, self._vocabulary = length, packing, isolation, vocabulary
        self._skip_bad_rows, self._skipped_rows = skip_bad_rows, skipped_rows
        self._files, self._bytes = len(parts), sum(part.size for part in parts)
        self.skipped: list[dict[str, str]] = []

    def starting(self, slots: RankSlots) -> StreamingDataset:
        """The same stream from the first step of these slots."""
        other = copy.copy(self)
        other._slots = slots
        return other

    def workers(self, wanted: int) -> int:
        """The most loader processes, up to `wanted`, that divide a step's micro-batches."""
        micro_batches = self._slots.micro_batches(0)
        return max((count for count in range(1, wanted + 1) if micro_batches % count == 0), default=0)

    def __iter__(self) -> Iterator[Collated]:
        worker = get_worker_info()
        number, of = (worker.id, worker.num_workers) if worker is not None else (0, 1)
        try:
            yield from self._micro_batches(number, of)
        except RecipeError as error:  # raised where it is taken out: a loader process would wrap it into its own traceback
            yield {"error": str(error)}

    def _micro_batches(self, number: int, of: int) -> Iterator[Collated]:
        slots = self._slots
        mine = range(number, slots.micro_batches(0), of)
        places = [slots.places(micro) for micro in mine]
        lanes = {lane: self._lane(lane) for group in places for lane in group if lane != NO_SAMPLE}
        for step in range(slots.steps):
            for group in places:
                rows = [next(lanes[lane]) if lane != NO_SAMPLE else _EMPTY for lane in group]
                if step >= slots.first_step:
                    yield collate_sequences(rows, length=self._length, packed=self._packing, isolation=self._isolation)

    def _lane(self, lane: int) -> Iterator[Row]:
        """The lane's sequences, for ever."""
        turn = 0
        while True:
            documents = self._documents(lane, turn)
            first = next(documents, None)
            if first is None:
                raise RecipeError(
                    f"data.streaming: there is no document for lane {lane} of {len(self._lanes)} (batch.global_batch_size): the data has "
                    "fewer documents than a step has sequences, or they are empty; use streaming: false, or a smaller batch"
                )
            yield from self._sequences(first, documents)
            turn += 1

    def _documents(self, lane: int, turn: int) -> Iterator[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]]:
        """Ids and labels of the lane's documents, in one pass over its units."""
        units = list(self._lanes[lane])
        generator = random.Random(f"lane {lane} turn {turn} {self._seed}")
        if self._shuffle:
            generator.shuffle(units)
        column = self._encoder.text_column
        rows: Iterator[Any] = itertools.chain.from_iterable(unit.rows(column) for unit in units)
        if self._shuffle:
            rows = _through_buffer(rows, self._shuffle_buffer, generator)
        for encoded in self._encoder.encode_rows(rows, batch_rows=_ENCODED_ROWS):
            if encoded.ids is None:
                self._bad(encoded.row.where, encoded.problem, first_time=turn == 0)
            elif encoded.ids.size:
                if self._vocabulary is not None and int(encoded.ids.max()) >= self._vocabulary:
                    raise RecipeError(
                        f"{encoded.row.where}: token id {int(encoded.ids.max())} is beyond the model's vocabulary of {self._vocabulary}"
                    )
                yield encoded.ids, encoded.ids if encoded.labels is None else encoded.labels

    def _bad(self, where: str, problem: str, *, first_time: bool) -> None:
        if not self._skip_bad_rows:
            raise RecipeError(f"{where}: {problem}")
        if first_time and self._skipped_rows is not None:
            with self._skipped_rows.open("a", encoding="utf-8") as file:  # a line at once: other processes append too
                file.write(json.dumps({"where": where, "problem": problem}, ensure_ascii=False) + "\n")

    def _sequences(self, first: Any, rest: Iterator[Any]) -> Iterator[Row]:
        """Documents as sequences: text goes on in the next one, other kinds start where they fit whole, and are cut to one."""
        goes_on = self._encoder.kind in ("text", "tokens")
        cut = self._encoder.kind in ("chat", "instruct")
        pieces: list[Row] = []
        room = self._length
        for ids, labels in _chain(first, rest):
            follow = np.append(labels[1:], IGNORED).astype(np.int64)
            done = 0
            if not (self._encoder.kind == "text" and self._packing) and pieces and min(len(ids), self._length) > room:
                yield _joined(pieces)
                pieces, room = [], self._length
            while done < len(ids):
                take = min(room, len(ids) - done)
                pieces.append(
                    {
                        "input_ids": ids[done : done + take].astype(np.int64),
                        "targets": follow[done : done + take],
                        "position_ids": np.arange(take, dtype=np.int64),
                    }
                )
                done, room = done + take, room - take
                if room == 0 or not self._packing:
                    yield _joined(pieces)
                    pieces, room = [], self._length
                if cut or not goes_on:
                    break
        if pieces:
            yield _joined(pieces)

    def loss(self, model: nn.Module, tensors: Mapping[str, Any]) -> torch.Tensor:
        """Next-token cross-entropy."""
        return loss.summed_loss(model, tensors)

    def describe(self) -> list[str]:
        """What is read, and how it is dealt out."""
        units = sum(len(units) for units in self._lanes)
        how = "packed" if self._packing else "not packed"
        return [
            f"streaming {self._files:,} files ({self._bytes / 2**20:,.1f} MiB) in {units:,} units to {len(self._lanes)} lanes, "
            f"sequences of up to {self._length}, {how}"
        ]


def _chain(first: Any, rest: Iterator[Any]) -> Iterator[Any]:
    yield first
    yield from rest


_EMPTY: Row = {name: np.zeros(0, dtype=np.int64) for name in ("input_ids", "targets", "position_ids")}


def _joined(pieces: list[Row]) -> Row:
    return {name: np.concatenate([piece[name] for piece in pieces]) for name in pieces[0]}


def _through_buffer(rows: Iterator[Any], size: int, generator: random.Random) -> Iterator[Any]:
    """The rows, each leaving a buffer at random."""
    buffer: list[Any] = []
    for row in rows:
        if len(buffer) < size:
            buffer.append(row)
            continue
        place = generator.randrange(size)
        buffer[place], row = row, buffer[place]
        yield row
    generator.shuffle(buffer)
    yield from buffer
