"""Documents tokenized while training, for data larger than the disk.

Order. The data is divided into at most SHARDS shards, each an endless stream of sequences; sequence
k of the run is sequence k // shards of shard k % shards. The documents of a shard and their order
follow from the files, the seed, data.shuffle_buffer and SHARDS alone, so a run with other ranks,
micro-batches, loader processes or another batch size sees the same samples in the same order.

Reading. Rank r of R has the samples k with k % R == r, so it reads every gcd(shards, R)-th shard;
its loader processes divide those if they can. The number of shards is a power of two: if R is one
too, and not larger, no two ranks tokenize the same text. Otherwise several ranks read a shard.

Memory. Before its first sample a process reads at most data.shuffle_buffer rows, over all shards,
and tokenizes _ENCODED_ROWS rows per shard, whatever the batch size. It holds no more than these,
the sequences of _GROUP micro-batches, and what a file format reads at once.

Resume. A shard's position is four numbers: pass, part in the pass, row in the part, and first
unused token of the row. A checkpoint holds those of all shards, for any number of ranks. A resume
reads one part per shard up to there without tokenizing it. Without saved positions everything
before is tokenized again, with the same samples.

Shards consist of parts: line ranges of a .jsonl, row groups of a .parquet, other files whole, files
of a hub data set. After its last part a shard starts again. With shuffle, each pass has the parts
in another random order, and rows pass through a shuffle buffer, emptied at the end of each part.
"""

from __future__ import annotations

import copy
import hashlib
import heapq
import itertools
import json
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import IterableDataset, get_worker_info

from launcher.data.batching import RankBatchSampler
from launcher.data.dataset import EMPTY, Collated, Row, collate_sequences, joined, sequence_piece
from launcher.data.encoder import Encoder
from launcher.data.sources import Part, read_rows, split
from launcher.data.sources import Row as SourceRow
from launcher.data.token_store import ModelInputs, check_range
from launcher.distributed.process_group import DataParallel
from launcher.errors import RecipeError
from launcher.recipe import schema
from launcher.recipe.hub import load_data_set
from launcher.training import loss
from launcher.training.loss import IGNORED

VERSION = 3
"""Of the order of samples."""
SHARDS = 64
"""More would let more ranks share the tokenization, and make each start slower."""
_SHARD_BYTES = 1 << 16
"""The smallest shard, on average: small data has fewer shards."""
_PART_BYTES = 16 * 2**20
"""The largest part that a resume reads again, for data of up to _PARTS parts."""
_PARTS = 1 << 14
"""Finding where each part starts is one read of the file, on every rank."""
_GROUP = 8
"""The most micro-batches that a rank reads together, so that loader processes divide its shards."""
_ENCODED_ROWS = 16
"""Rows tokenized at once. More are faster per row; fewer are ready sooner."""

ShardPosition = tuple[int, int, int, int]
"""Where a shard's next sequence starts: pass, part in the pass, row in the part, token in it."""
_START: ShardPosition = (0, 0, 0, 0)


def assign_shards(
    parts: Sequence[Part], *, seed: int, shuffle: bool, shards: int = SHARDS
) -> list[list[Part]]:
    """The parts of each shard, about as many bytes each. Depends on the arguments and files alone.

    shards: the most shards. Their number is a power of two and at most that of the parts.
    """
    parts = [part for part in parts if part.size or part.named or part.form != "text"]
    total = sum(part.size for part in parts)
    size = max(_SHARD_BYTES, min(_PART_BYTES, total // (4 * SHARDS)), total // _PARTS)
    pieces = [piece for part in parts for piece in _divide(part, size)]
    most = len(pieces)
    if all(part.form != "hub" for part in parts):
        most = min(most, total // _SHARD_BYTES)
    number = 1 << (max(1, min(shards, most)).bit_length() - 1)
    if shuffle:
        random.Random(f"parts {seed}").shuffle(pieces)
    assigned: list[list[Part]] = [[] for _ in range(number)]
    smallest = [(0, 0, shard) for shard in range(number)]  # a heap of (bytes, parts, shard)
    for piece in pieces:
        held, count, shard = smallest[0]
        assigned[shard].append(piece)
        heapq.heapreplace(smallest, (held + piece.size, count + 1, shard))
    return assigned


def _divide(part: Part, size: int) -> list[Part]:
    if part.form != "hub":
        return split(part, size) if part.size > size else [part]
    count = load_data_set(part.name, validation=part.validation, streaming=True).num_shards
    return [replace(part, form="hub_stream", start=index, end=count) for index in range(count)]


def _through_buffer(rows: Iterator[Any], size: int, generator: random.Random) -> Iterator[Any]:
    """The rows in random order: each leaves a buffer of `size` rows at random."""
    buffer: list[Any] = []
    for row in rows:
        if len(buffer) < size:
            buffer.append(row)
            continue
        index = generator.randrange(size)
        buffer[index], row = row, buffer[index]
        yield row
    generator.shuffle(buffer)
    yield from buffer


class _Reader:
    """Reads the sequences of a shard in order."""

    def __init__(
        self, samples: Iterator[tuple[Row, ShardPosition]], *, given: int, position: ShardPosition
    ) -> None:
        """given: sequences before the first of `samples`, which starts at `position`."""
        self._samples, self._given, self.position = samples, given, position

    def take(self, number: int) -> Row:
        """Sequence `number` of the shard. Skips those before it."""
        self.skip_to(number)
        row, self.position = next(self._samples)
        self._given += 1
        return row

    def skip_to(self, number: int) -> None:
        while self._given < number:
            _, self.position = next(self._samples)
            self._given += 1


class StreamingDataset(IterableDataset[Collated]):
    """This rank's micro-batches in order, for torch's DataLoader with batch_size=None.

    Each of n loader processes yields every n-th micro-batch of a step. The `positions` of its last
    one in a step are those of its shards after the step.
    """

    packed = True
    lengths: Sequence[int] | None = None

    def __init__(
        self,
        parts: Sequence[Part],
        encoder: Encoder,
        *,
        sampler: RankBatchSampler,
        data: schema.Data,
        seed: int,
        model: ModelInputs,
        skipped_rows: Path | None,
    ) -> None:
        """skipped_rows: file that lists the rows that cannot be used (data.on_error: skip)."""
        self._shards = assign_shards(parts, seed=seed, shuffle=data.shuffle)
        self._encoder, self._sampler, self._data, self._model = encoder, sampler, data, model
        self._seed, self._skipped_rows = seed, skipped_rows
        self._buffer_rows = max(1, data.shuffle_buffer // len(self._shards))
        self._files, self._bytes = len(parts), sum(part.size for part in parts)
        self.skipped: list[dict[str, str]] = []
        shards = [[(part.name, part.start, part.size) for part in shard] for shard in self._shards]
        settings = [data.shuffle, self._buffer_rows, data.sequence_length, data.packing]
        order = [VERSION, shards, seed, *settings, data.on_error == "skip", repr(encoder)]
        self.order = hashlib.sha256(json.dumps(order).encode()).hexdigest()[:24]
        """Digest of all that the order of samples depends on."""
        self._saved_samples, self._saved_positions = 0, [_START] * len(self._shards)

    def starting(
        self, sampler: RankBatchSampler, saved: Mapping[str, Any] | None
    ) -> StreamingDataset:
        """The same stream from the first step of `sampler` on.

        saved: of `state`, for an earlier step or this one. Without it, or if it is of another
        order, everything before is tokenized again.
        """
        other = copy.copy(self)
        other._sampler = sampler
        first_sample = sampler.first_step * sampler.global_batch_size
        if saved and saved["order"] == self.order and saved["samples"] <= first_sample:
            other._saved_samples = saved["samples"]
            other._saved_positions = [(turn, *rest) for turn, *rest in saved["positions"]]
        return other

    def state(
        self, positions: Mapping[int, ShardPosition], *, samples: int, ranks: DataParallel
    ) -> dict[str, Any]:
        """What `starting` needs to continue after `samples` samples. Every rank must call it.

        positions: the positions of the shards that this rank reads.
        """
        table = torch.full((len(self._shards), len(_START)), -1, dtype=torch.int64)
        for shard, position in positions.items():
            table[shard] = torch.tensor(position)
        if ranks.size > 1:  # each shard is read by some rank; those that share one agree
            table = table.to(ranks.device)
            dist.all_reduce(table, op=dist.ReduceOp.MAX, group=ranks.group)
        return {"order": self.order, "samples": samples, "positions": table.tolist()}

    def workers(self, wanted: int) -> int:
        """The most loader processes, up to `wanted`, that divide a group of micro-batches."""
        counts = range(1, wanted + 1)
        return max((count for count in counts if self._group % count == 0), default=0)

    @property
    def _group(self) -> int:
        """Micro-batches that are read together: a divisor of those of a step."""
        return math.gcd(self._sampler.micro_batches(0), _GROUP)

    def __iter__(self) -> Iterator[Collated]:
        worker = get_worker_info()
        number, of = (worker.id, worker.num_workers) if worker is not None else (0, 1)
        try:
            yield from self._micro_batches(number, of)
        except RecipeError as error:  # a loader process would wrap it into a traceback
            yield {"error": str(error)}

    def _micro_batches(self, number: int, of: int) -> Iterator[Collated]:
        """Those of loader process `number` of `of`, in order. A step is read in groups."""
        sampler, shards, group = self._sampler, len(self._shards), self._group
        # Micro-batch m of a group has the samples k with k % (ranks * group) == m * ranks + rank
        cells = sampler.ranks * group
        own = [micro * sampler.ranks + sampler.rank for micro in range(number, group, of)]
        readers = self._readers(cells, own)
        size = sampler.micro_batch_size
        for step in range(sampler.first_step, sampler.steps):
            begin, end = step * sampler.global_batch_size, (step + 1) * sampler.global_batch_size
            of_step = [range(begin + (cell - begin) % cells, end, cells) for cell in own]
            groups = sampler.micro_batches(step) // group
            for index in range(groups):
                samples = [one[index * size : (index + 1) * size] for one in of_step]
                wanted = sorted(itertools.chain.from_iterable(samples))
                rows = {k: readers[k % shards].take(k // shards) for k in wanted}
                if index == groups - 1:
                    for shard, reader in readers.items():
                        reader.skip_to(_given(end, shard, shards))
                positions = {shard: reader.position for shard, reader in readers.items()}
                for one in samples:
                    held = [rows[k] for k in one] + [EMPTY] * (size - len(one))
                    collated = collate_sequences(
                        held,
                        length=self._data.sequence_length,
                        packed=self._data.packing,
                        masking=self._model.masking,
                    )
                    yield collated | {"positions": positions}

    def _readers(self, cells: int, own: list[int]) -> dict[int, _Reader]:
        """Readers of the shards with the samples k for which k % cells is in `own`."""
        shards = len(self._shards)
        common = math.gcd(shards, cells)
        readers = {}
        for shard in range(shards):
            if shard % common in {cell % common for cell in own}:
                position = self._saved_positions[shard]
                lists = shard % common in own  # one process lists the bad rows of a shard
                samples = self._sequences(shard, position, list_bad_rows=lists)
                given = _given(self._saved_samples, shard, shards)
                readers[shard] = _Reader(samples, given=given, position=position)
        return readers

    def _rows(
        self, shard: int, start: ShardPosition
    ) -> Iterator[tuple[SourceRow, tuple[int, int, int]]]:
        """The shard's rows from `start`, endless, each with (pass, part, row)."""
        turn, first_part, first_row, _ = start
        while True:
            parts = list(self._shards[shard])
            if self._data.shuffle:
                random.Random(f"shard {shard} pass {turn} {self._seed}").shuffle(parts)
            found = first_part > 0 or first_row > 0
            for number in range(first_part, len(parts)):
                rows = read_rows(parts[number], column=self._encoder.text_column)
                if self._data.shuffle:
                    key = f"shard {shard} pass {turn} part {number} {self._seed}"
                    rows = _through_buffer(rows, self._buffer_rows, random.Random(key))
                for index, row in enumerate(itertools.islice(rows, first_row, None), first_row):
                    found = True
                    yield row, (turn, number, index)
                first_row = 0
            if not found:
                raise self._no_documents(shard)
            turn, first_part = turn + 1, 0

    def _documents(
        self, shard: int, start: ShardPosition, *, list_bad_rows: bool
    ) -> Iterator[tuple[Any, Any, tuple[int, int, int]]]:
        """The shard's documents from `start`, endless: ids, labels, and pass, part and row."""
        # The rows before a start inside a pass are not seen, so they count as documents
        turn, found = start[0], start != _START
        rows, same_rows = itertools.tee(self._rows(shard, start))
        all_encoded = self._encoder.encode_rows((row for row, _ in rows), batch_rows=_ENCODED_ROWS)
        for encoded, (_, position) in zip(all_encoded, same_rows, strict=False):
            if position[0] > turn:
                if not found:
                    raise self._no_documents(shard)
                turn, found = position[0], False
            if encoded.ids is None:
                if self._data.on_error != "skip":
                    raise RecipeError(f"{encoded.row.where}: {encoded.problem}")
                if list_bad_rows and turn == 0 and self._skipped_rows is not None:
                    line = json.dumps(encoded.skipped, ensure_ascii=False) + "\n"
                    with self._skipped_rows.open("a", encoding="utf-8") as file:
                        file.write(line)  # at once: other processes append too
            elif encoded.ids.size:
                check_range(encoded, self._model)
                found = True
                labels = encoded.ids if encoded.labels is None else encoded.labels
                yield encoded.ids, labels, position

    def _no_documents(self, shard: int) -> RecipeError:
        names = list(dict.fromkeys(part.name for part in self._shards[shard]))
        shown = ", ".join(names[:5] or ["the files"])
        more = f" and {len(names) - 5} more files" if len(names) > 5 else ""
        return RecipeError(
            f"data.streaming: no document with text in {shown}{more}; leave these files out, or "
            "use streaming: false"
        )

    def _sequences(
        self, shard: int, start: ShardPosition, *, list_bad_rows: bool
    ) -> Iterator[tuple[Row, ShardPosition]]:
        """The shard's sequences from `start`, endless, each with where the next one starts.

        Text continues in the next sequence. Documents of other kinds start a new sequence if they
        do not fit; chat and instruct are cut to one sequence.
        """
        kind, length, packing = self._encoder.kind, self._data.sequence_length, self._data.packing
        cut = kind in ("chat", "instruct")
        pieces: list[Row] = []
        room, done = length, start[3]
        for ids, labels, position in self._documents(shard, start, list_bad_rows=list_bad_rows):
            targets = np.append(labels[1:], IGNORED).astype(np.int64)
            whole = not (kind == "text" and packing)
            if whole and pieces and min(len(ids), length) > room:
                yield joined(pieces), (*position, 0)
                pieces, room = [], length
            while done < len(ids):
                end = done + min(room, len(ids) - done)
                pieces.append(sequence_piece(ids[done:end], targets[done:end]))
                room -= end - done
                done = len(ids) if cut else end
                if room == 0 or not packing:
                    turn, part, row = position
                    following = (row, done) if done < len(ids) else (row + 1, 0)
                    yield joined(pieces), (turn, part, *following)
                    pieces, room = [], length
            done = 0

    def loss(self, model: nn.Module, tensors: Mapping[str, Any]) -> torch.Tensor:
        return loss.summed_loss(model, tensors)

    def describe(self) -> list[str]:
        parts, shards, ranks = sum(map(len, self._shards)), len(self._shards), self._sampler.ranks
        divided = math.gcd(shards, ranks)
        packed = "packed" if self._data.packing else "not packed"
        lines = [
            f"streaming {self._files:,} files ({self._bytes / 2**20:,.1f} MiB), {parts:,} parts in "
            f"{shards} shards, sequences of up to {self._data.sequence_length}, {packed}; "
            f"each rank reads {shards // divided} shards"
        ]
        if divided < ranks:
            lines.append(
                f"note: each shard is tokenized by {ranks // divided} ranks; to share the work "
                "better, use a power of two of ranks, or more or larger .jsonl or .parquet files, "
                f"up to {SHARDS} shards"
            )
        return lines


def _given(samples: int, shard: int, shards: int) -> int:
    """Sequences of a shard among the first `samples` samples of the run."""
    return (samples - shard + shards - 1) // shards
