"""Documents tokenized while training, for sets larger than the disk.

The order. The data is divided into shards, at most SHARDS of them, each an endless stream of sequences; sequence k of the
run is sequence k // shards of shard k % shards. Which documents a shard holds, and in which order, follows from the files,
the seed, data.shuffle_buffer and SHARDS alone. So a run with other ranks, micro-batches, loader processes or another
global batch size sees the same samples in the same order.

Who reads what. A process reads the shards that its own samples come from. Rank r of R has the samples k with
k % R == r, so it reads every gcd(shards, R)-th shard, and its loader processes divide those further where they can. The
number of shards is a power of two: with R a power of two up to the number of shards no two ranks tokenize the same text.
With other numbers several ranks read a shard, each of them all of it.

Start-up. Before its first sample a process reads at most data.shuffle_buffer rows (over all shards together), and tokenizes
_ENCODED_ROWS rows a shard. It never holds more than these, the sequences of _GROUP micro-batches, and what the file format
reads at once: a .json or text file whole, 128 rows of a .parquet. None of it depends on the global batch size.

Resume. Where a shard stands is four numbers: the pass, the unit in that pass, the row in that unit, and the first
token of that row that was not used. The rank's micro-batches carry them to the training process, and a checkpoint holds
them for all shards, whatever the number of ranks. A resume reads the rows of one unit a shard up to there, and
tokenizes none of them again. Without saved positions everything before is tokenized again, and the samples are the same.

Units are runs of lines of a .jsonl, row groups of a .parquet, other files whole, and files of a hub data set. A shard that
is through its units starts again. With shuffle, each pass has the units in another random order, and a row leaves a
buffer at random, which is emptied at the end of a unit.
"""

from __future__ import annotations

import copy
import hashlib
import heapq
import itertools
import json
import math
import random
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import IterableDataset, get_worker_info

from launcher.data.batching import RankSlots
from launcher.data.dataset import Collated, Isolation, Row, collate_sequences
from launcher.data.encoder import Encoder
from launcher.data.sources import Part, read_rows, split
from launcher.data.sources import Row as Source
from launcher.distributed.process_group import DataParallel
from launcher.errors import RecipeError
from launcher.recipe.hub import load_data_set
from launcher.training import loss
from launcher.training.loss import IGNORED

VERSION = 2
"""Of the order of samples. Version 1 had a lane for each place of a batch, and saved no positions."""
SHARDS = 64
"""At most. More would let more ranks share the tokenization, and make each start read and tokenize more."""
_SHARD_BYTES = 1 << 16
"""At least, on average: small sets have fewer shards."""
_UNIT_BYTES = 16 * 2**20
"""Where a file can be divided, for sets of up to _UNITS of them: what a resume reads again of each shard, at most."""
_UNITS = 1 << 14
"""To find where each starts is a read of the file, on every rank."""
_GROUP = 8
"""Micro-batches that a rank reads together, at most, so that as many loader processes can divide its shards."""
_ENCODED_ROWS = 16
"""Rows tokenized at once: many are faster, few come sooner."""

Place = tuple[int, int, int, int]
"""Where a shard's next sequence starts: pass, unit in the pass, row in the unit, token in the row."""
_START: Place = (0, 0, 0, 0)


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
    shard: int = 0
    shards: int = 1
    """Of a hub data set: which of its files."""

    def rows(self, column: str) -> Iterator[Source]:
        """Its rows, in order."""
        return self._hub_rows() if self.part.form == "hub" else read_rows(self.part, column=column)

    def _hub_rows(self) -> Iterator[Source]:
        data_set = load_data_set(self.part.name, validation=self.part.validation, streaming=True)
        for number, values in enumerate(
            data_set.shard(num_shards=self.shards, index=self.shard), start=1
        ):
            yield Source(
                self.part,
                number,
                values,
                at=f"{self.part.name} shard {self.shard + 1} of {self.shards} row {number}",
            )


def _units(part: Part, size: int) -> list[_Unit]:
    if part.form == "hub":
        data_set = load_data_set(part.name, validation=part.validation, streaming=True)
        return [
            _Unit(part, shard=shard, shards=data_set.num_shards)
            for shard in range(data_set.num_shards)
        ]
    return [_Unit(piece) for piece in (split(part, size) if part.size > size else [part])]


def deal(
    parts: Sequence[Part], *, seed: int, shuffle: bool, shards: int = SHARDS
) -> list[list[_Unit]]:
    """The units of each shard, of about the same size; a function of the arguments and the files alone.

    shards: at most so many. Their number is a power of two, and no larger than the number of units.
    """
    parts = [
        part for part in parts if part.size or part.named or part.form != "text"
    ]  # empty text files hold no row
    total = sum(part.size for part in parts)
    size = max(_SHARD_BYTES, min(_UNIT_BYTES, total // (4 * SHARDS)), total // _UNITS)
    units = [unit for part in parts for unit in _units(part, size)]
    most = (
        len(units)
        if any(part.form == "hub" for part in parts)
        else min(len(units), total // _SHARD_BYTES)
    )
    number = 1 << (max(1, min(shards, most)).bit_length() - 1)
    if shuffle:
        random.Random(f"units {seed}").shuffle(units)
    dealt: list[list[_Unit]] = [[] for _ in range(number)]
    smallest = [(0, 0, shard) for shard in range(number)]  # bytes, units, shard: a heap
    for unit in units:
        held, count, shard = smallest[0]
        dealt[shard].append(unit)
        heapq.heapreplace(smallest, (held + unit.part.size, count + 1, shard))
    return dealt


class _Reader:
    """A shard that is being read."""

    def __init__(self, samples: Iterator[tuple[Row, Place]], *, given: int, place: Place) -> None:
        """given: sequences before the first of `samples`. place: where that one starts."""
        self._samples, self._given, self.place = samples, given, place

    def take(self, number: int) -> Row:
        """Sequence `number` of the shard; those before it are passed over."""
        self.forward(number)
        row, self.place = next(self._samples)
        self._given += 1
        return row

    def forward(self, given: int) -> None:
        """To where so many sequences have been given."""
        while self._given < given:
            _, self.place = next(self._samples)
            self._given += 1


class StreamingDataset(IterableDataset[Collated]):
    """This rank's micro-batches, one after the other, as torch's DataLoader iterates them with batch_size=None.

    With several loader processes each has every n-th micro-batch of a step. A micro-batch has `places`, by shard: after the
    last one of a step, where the shards of its loader process stand after that step.
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
        self._shards = deal(parts, seed=seed, shuffle=shuffle)
        self._encoder, self._slots = encoder, slots
        self._seed, self._shuffle = seed, shuffle
        self._buffer_rows = max(1, shuffle_buffer // len(self._shards))
        self._length, self._packing, self._isolation, self._vocabulary = (
            length,
            packing,
            isolation,
            vocabulary,
        )
        self._skip_bad_rows, self._skipped_rows = skip_bad_rows, skipped_rows
        self._files, self._bytes = len(parts), sum(part.size for part in parts)
        self.skipped: list[dict[str, str]] = []
        units = [
            [(unit.part.name, unit.part.start, unit.part.size, unit.shard) for unit in shard]
            for shard in self._shards
        ]
        order = [
            VERSION,
            units,
            seed,
            shuffle,
            self._buffer_rows,
            length,
            packing,
            skip_bad_rows,
            repr(encoder),
        ]
        self.order = hashlib.sha256(json.dumps(order).encode()).hexdigest()[:24]
        """Digest of what the order of samples follows from."""
        self._saved_samples, self._saved_places = 0, [_START] * len(self._shards)

    def starting(self, slots: RankSlots, saved: Mapping[str, Any] | None) -> StreamingDataset:
        """The same stream from the first step of these slots.

        saved: of `state`, for a step not after that one; None, or one of another order: all before is tokenized again.
        """
        other = copy.copy(self)
        other._slots = slots
        first_sample = slots.first_step * slots.global_batch_size
        if saved is not None and saved["order"] == self.order and saved["samples"] <= first_sample:
            other._saved_samples = saved["samples"]
            other._saved_places = [
                (turn, unit, row, token) for turn, unit, row, token in saved["places"]
            ]
        return other

    def state(
        self, places: Mapping[int, Place], *, samples: int, ranks: DataParallel
    ) -> dict[str, Any]:
        """What `starting` needs to go on after so many samples of the run; every rank must call it.

        places: where the shards that this rank reads stand then.
        """
        table = torch.full((len(self._shards), len(_START)), -1, dtype=torch.int64)
        for shard, place in places.items():
            table[shard] = torch.tensor(place)
        if (
            ranks.size > 1
        ):  # ranks that read the same shard agree on its place, and each shard is read by some rank
            table = table.to(ranks.device)
            dist.all_reduce(table, op=dist.ReduceOp.MAX, group=ranks.group)
        return {
            "version": VERSION,
            "order": self.order,
            "samples": samples,
            "places": table.tolist(),
        }

    def workers(self, wanted: int) -> int:
        """The most loader processes, up to `wanted`, that divide a group of micro-batches."""
        return max((count for count in range(1, wanted + 1) if self._group % count == 0), default=0)

    @property
    def _group(self) -> int:
        """Micro-batches that are read together: a divisor of those of a step."""
        return math.gcd(self._slots.micro_batches(0), _GROUP)

    def __iter__(self) -> Iterator[Collated]:
        worker = get_worker_info()
        number, of = (worker.id, worker.num_workers) if worker is not None else (0, 1)
        try:
            yield from self._micro_batches(number, of)
        except RecipeError as error:  # raised where it is taken out: a loader process would wrap it into its own traceback
            yield {"error": str(error)}

    def _micro_batches(self, number: int, of: int) -> Iterator[Collated]:
        """Those of loader process `number` of `of`, in the order of the run: a step is read in groups of micro-batches."""
        slots, shards, group = self._slots, len(self._shards), self._group
        mine = range(number, group, of)
        # Micro-batches `one` of all groups have the samples k with k % (ranks * group) == one * ranks + rank
        cells = slots.ranks * group
        own = {one: one * slots.ranks + slots.rank for one in mine}
        common = math.gcd(shards, cells)
        read = {cell % common for cell in own.values()}
        readers = {
            # The first cell that reads a shard lists its bad rows
            shard: self._reader(shard, list_bad_rows=shard % common in own.values())
            for shard in range(shards)
            if shard % common in read
        }
        for step in range(slots.first_step, slots.steps):
            begin, end = step * slots.global_batch_size, (step + 1) * slots.global_batch_size
            of_step = [range(begin + (cell - begin) % cells, end, cells) for cell in own.values()]
            groups = slots.micro_batches(step) // group
            for index in range(groups):
                first, size = index * slots.micro_batch_size, slots.micro_batch_size
                samples = [one[first : first + size] for one in of_step]
                rows = {
                    k: readers[k % shards].take(k // shards)
                    for k in sorted(itertools.chain.from_iterable(samples))
                }
                if index == groups - 1:
                    for shard, reader in readers.items():
                        reader.forward(_given(end, shard, shards))
                places = {shard: reader.place for shard, reader in readers.items()}
                for one in samples:
                    held = [rows[k] for k in one] + [_EMPTY] * (size - len(one))
                    yield collate_sequences(
                        held, length=self._length, packed=self._packing, isolation=self._isolation
                    ) | {"places": places}

    def _reader(self, shard: int, *, list_bad_rows: bool) -> _Reader:
        place = self._saved_places[shard]
        samples = self._sequences(shard, place, list_bad_rows=list_bad_rows)
        return _Reader(
            samples, given=_given(self._saved_samples, shard, len(self._shards)), place=place
        )

    def _rows(
        self, shard: int, start: Place, places: deque[tuple[int, int, int]]
    ) -> Iterator[Source]:
        """The shard's rows from a place on, for ever; each one's pass, unit and row go into `places`."""
        turn, first_unit, first_row, _ = start
        while True:
            units = list(self._shards[shard])
            if self._shuffle:
                random.Random(f"shard {shard} pass {turn} {self._seed}").shuffle(units)
            found = first_unit > 0 or first_row > 0
            for number in range(first_unit, len(units)):
                rows: Iterator[Source] = units[number].rows(self._encoder.text_column)
                if self._shuffle:
                    generator = random.Random(
                        f"shard {shard} pass {turn} unit {number} {self._seed}"
                    )
                    rows = _through_buffer(rows, self._buffer_rows, generator)
                for index, row in enumerate(
                    itertools.islice(rows, first_row, None), start=first_row
                ):
                    found = True
                    places.append((turn, number, index))
                    yield row
                first_row = 0
            if not found:
                raise self._no_documents(shard)
            turn, first_unit = turn + 1, 0

    def _documents(
        self, shard: int, start: Place, *, list_bad_rows: bool
    ) -> Iterator[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], tuple[int, int, int]]]:
        """Ids and labels of the shard's documents from a place on, for ever, and the place of each."""
        places: deque[tuple[int, int, int]] = deque()
        turn, found = (
            start[0],
            start != _START,
        )  # what came before a place in the middle of a pass is not known
        for encoded in self._encoder.encode_rows(
            self._rows(shard, start, places), batch_rows=_ENCODED_ROWS
        ):
            place = places.popleft()
            if place[0] > turn:
                if not found:
                    raise self._no_documents(shard)
                turn, found = place[0], False
            if encoded.ids is None:
                self._bad(encoded.row.where, encoded.problem, listed=list_bad_rows and turn == 0)
            elif encoded.ids.size:
                if self._vocabulary is not None and int(encoded.ids.max()) >= self._vocabulary:
                    raise RecipeError(
                        f"{encoded.row.where}: token id {int(encoded.ids.max())} is beyond the model's vocabulary of {self._vocabulary}"
                    )
                found = True
                yield encoded.ids, encoded.ids if encoded.labels is None else encoded.labels, place

    def _no_documents(self, shard: int) -> RecipeError:
        names = list(dict.fromkeys(unit.part.name for unit in self._shards[shard]))
        shown = ", ".join(names[:5] or ["the files"]) + (
            f" and {len(names) - 5} more files" if len(names) > 5 else ""
        )
        return RecipeError(
            f"data.streaming: there is no document with text in {shown}; leave these files out, or use streaming: false"
        )

    def _bad(self, where: str, problem: str, *, listed: bool) -> None:
        if not self._skip_bad_rows:
            raise RecipeError(f"{where}: {problem}")
        if listed and self._skipped_rows is not None:
            with self._skipped_rows.open(
                "a", encoding="utf-8"
            ) as file:  # a line at once: other processes append too
                file.write(
                    json.dumps({"where": where, "problem": problem}, ensure_ascii=False) + "\n"
                )

    def _sequences(
        self, shard: int, start: Place, *, list_bad_rows: bool
    ) -> Iterator[tuple[Row, Place]]:
        """The shard's sequences from a place on, for ever, and where the next one starts.

        Text goes on in the next sequence; other kinds start where they fit whole; chat and instruct are cut to one.
        """
        cut = self._encoder.kind in ("chat", "instruct")
        pieces: list[Row] = []
        room, done = self._length, start[3]
        for ids, labels, place in self._documents(shard, start, list_bad_rows=list_bad_rows):
            follow = np.append(labels[1:], IGNORED).astype(np.int64)
            if (
                not (self._encoder.kind == "text" and self._packing)
                and pieces
                and min(len(ids), self._length) > room
            ):
                yield _joined(pieces), (*place, 0)
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
                done, room = len(ids) if cut else done + take, room - take
                if room == 0 or not self._packing:
                    turn, unit, row = place
                    yield (
                        _joined(pieces),
                        (turn, unit, row, done) if done < len(ids) else (turn, unit, row + 1, 0),
                    )
                    pieces, room = [], self._length
            done = 0

    def loss(self, model: nn.Module, tensors: Mapping[str, Any]) -> torch.Tensor:
        """Next-token cross-entropy."""
        return loss.summed_loss(model, tensors)

    def describe(self) -> list[str]:
        """What is read, and by how many ranks."""
        units, shards, ranks = sum(map(len, self._shards)), len(self._shards), self._slots.ranks
        divided = math.gcd(shards, ranks)
        lines = [
            f"streaming {self._files:,} files ({self._bytes / 2**20:,.1f} MiB), {units:,} units in {shards} shards, sequences of up to "
            f"{self._length}, {'packed' if self._packing else 'not packed'}; each rank reads {shards // divided} shards"
        ]
        if divided < ranks:
            lines.append(
                f"note: each shard is tokenized by {ranks // divided} ranks; a power of two of ranks, or more or larger .jsonl or .parquet "
                f"files, up to {SHARDS} shards, would share the work better"
            )
        return lines


def _given(samples: int, shard: int, shards: int) -> int:
    """Sequences of a shard among the first `samples` of the run."""
    return (samples - shard + shards - 1) // shards


_EMPTY: Row = {
    name: np.zeros(0, dtype=np.int64) for name in ("input_ids", "targets", "position_ids")
}


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
