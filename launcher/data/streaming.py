"""Documents tokenized while training, for data larger than the disk.

Order. The data is divided into at most SHARDS shards, each an endless stream of sequences; sequence
k of the run is sequence k // shards of shard k % shards. A shard consists of parts: line ranges of
a .jsonl, row groups of a .parquet, other files whole, files of a hub data set. With shuffle, each
pass has the parts in another random order, and rows pass through a shuffle buffer, emptied at the
end of each part. So the order follows from the files, the seed and data.shuffle_buffer.

Reading. Process p of P (ranks times loader processes) has the samples k with k % P == p, so it
reads every gcd(shards, P)-th shard. The number of shards is a power of two: if P is one too, and
not larger, no two processes tokenize the same text.

Resume. A checkpoint holds the positions of all shards. A resume reads one part per shard up to
there without tokenizing it. Without saved positions everything before is tokenized again.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
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
from torch.utils.data import IterableDataset, get_worker_info

from launcher.data.attachments import Attachments, join_attachments
from launcher.data.batching import RankBatchSampler
from launcher.data.collation import (
    EMPTY,
    Collated,
    Piece,
    Sample,
    Unreadable,
    make_sample,
)
from launcher.data.dataset import SampleMaker
from launcher.data.documents import Encoded
from launcher.data.encoder import Encoder, PromptForm, prompt_form
from launcher.data.packing import first_names, no_targets
from launcher.data.token_store import ModelTraits, check_range, one_document
from launcher.distributed.rank_layout import RankLayout
from launcher.errors import RecipeError, RowError
from launcher.models.micro_batch import IGNORED
from launcher.recipe import schema
from launcher.sources.finding import content_sample
from launcher.sources.hub import load_data_set
from launcher.sources.layouts import KINDS, unused_columns, unused_line
from launcher.sources.ranges import split
from launcher.sources.rows import Row, SourcePart, read_rows

VERSION = 6
"""Version of the order of samples, and of its digest."""
SHARDS = 64
"""Most shards. More would let more ranks share the work, and make each start slower."""
_SHARD_BYTES = 1 << 16
"""The smallest shard, on average: small data has fewer shards."""
_PART_BYTES = 16 * 2**20
"""The largest part that a resume reads again, for data of up to _PARTS parts."""
_PARTS = 1 << 14
"""Finding where each part starts is one read of the file, on every rank."""
_NO_TARGETS = "no token with loss within data.sequence_length"
_DIVIDED, _LOOKED_AT = ("jsonl", "parquet"), 20
"""Forms of files, and their first rows, that are looked at for columns that are not used."""
_ENCODED_ROWS = 16
"""Rows tokenized at once. More are faster per row; fewer are ready sooner."""

ShardPosition = tuple[int, int, int, int]
"""Where a shard's next sequence starts: pass, part in the pass, row in the part, token in it."""
_STORED = "stored_attachments"
"""Key of a sample with the attachments that `StreamingDataset` reads when it takes the sample."""
_START: ShardPosition = (0, 0, 0, 0)


def assign_shards(
    parts: Sequence[SourcePart], *, seed: int, shuffle: bool, shards: int = SHARDS
) -> list[list[SourcePart]]:
    """The parts of each shard. Shards have about the same number of bytes; their number is a power
    of two, at most `shards`."""
    parts = [part for part in parts if part.size or part.form != "text"]
    total = sum(part.size for part in parts)
    size = max(_SHARD_BYTES, min(_PART_BYTES, total // (4 * SHARDS)), total // _PARTS)
    pieces = [piece for part in parts for piece in _divide(part, size)]
    most = min(shards, len(pieces))
    if all(part.form != "hub" for part in parts):
        most = min(most, total // _SHARD_BYTES)
    number = 1 << (max(1, most).bit_length() - 1)
    if shuffle:
        random.Random(f"parts {seed}").shuffle(pieces)
    assigned: list[list[SourcePart]] = [[] for _ in range(number)]
    held = [(0, 0, shard) for shard in range(number)]  # bytes, parts, shard
    for piece in pieces:
        held_bytes, count, shard = min(held)
        assigned[shard].append(piece)
        held[shard] = (held_bytes + piece.size, count + 1, shard)
    return assigned


def _divide(part: SourcePart, size: int) -> list[SourcePart]:
    if part.form != "hub" or part.size:  # of a folder of save_to_disk, the size is known
        return split(part, size) if part.size > size else [part]
    count = load_data_set(part.name, validation=part.validation, streaming=True).num_shards
    return [replace(part, form="hub_stream", start=index, end=count) for index in range(count)]


def _through_buffer(rows: Iterator[Row], size: int, generator: random.Random) -> Iterator[Row]:
    """The rows in random order: each leaves a buffer of `size` rows at random."""
    buffer = list(itertools.islice(rows, size))
    for row in rows:
        index = generator.randrange(size)
        yield buffer[index]
        buffer[index] = row
    generator.shuffle(buffer)
    yield from buffer


class _Shard:
    """Reads the sequences of a shard in order, endless, from a saved position on."""

    def __init__(self, stream: StreamingDataset, number: int, *, list_bad_rows: bool) -> None:
        self._stream, self._number, self._list_bad_rows = stream, number, list_bad_rows
        self.position = stream.saved_positions[number]
        self._given = _given(stream.saved_samples, number, len(stream.shards))
        self._sequences = self._read()

    def take(self, number: int) -> Sample:
        """Sequence `number` of the shard. Skips those before it."""
        self.skip_to(number)
        row, self.position = next(self._sequences)
        self._given += 1
        return row

    def skip_to(self, number: int) -> None:
        while self._given < number:
            self.take(self._given)

    def _pass(
        self, turn: int, first_part: int, first_row: int
    ) -> Iterator[tuple[Encoded, tuple[int, int, int]]]:
        """The rows of pass `turn`, each with its pass, part and row."""
        stream, key = self._stream, f"shard {self._number} pass {turn}"
        parts, shuffle = list(stream.shards[self._number]), stream.data.shuffle
        if shuffle:
            random.Random(f"{key} {stream.seed}").shuffle(parts)
        for number in range(first_part, len(parts)):
            encoder = stream.encoder
            rows = read_rows(parts[number], column=encoder.text_column, arrays=encoder.reads_arrays)
            if shuffle:
                generator = random.Random(f"{key} part {number} {stream.seed}")
                rows = _through_buffer(rows, stream.buffer_rows, generator)
            rows = itertools.islice(rows, first_row, None)
            # Attachments are decoded for their tokens, and kept until the sample needs their arrays
            batch = 1 if encoder.modalities else _ENCODED_ROWS
            encoded_rows = encoder.encode_rows(rows, batch_rows=batch)
            for index, encoded in enumerate(encoded_rows, first_row):
                yield encoded, (turn, number, index)
            first_row = 0

    def _documents(self) -> Iterator[tuple[Encoded, tuple[int, int, int]]]:
        """The documents, each with its pass, part and row."""
        first, part, row, token = self.position
        # The rows before a start inside a pass are not seen, so they count as documents
        any_document = (part, row, token) != (0, 0, 0)
        dropped, stream = False, self._stream
        for turn in itertools.count(first):
            for encoded, position in self._pass(turn, part, row):
                if encoded.problem:
                    self._skip(encoded, listed=self._list_bad_rows and turn == 0)
                elif encoded.ids.size:
                    check_range(encoded, stream.model)
                    if self._too_long(encoded, listed=self._list_bad_rows and turn == 0):
                        dropped = True
                        continue
                    if not self._learnable(encoded):
                        dropped = True
                        if self._list_bad_rows and turn == 0:
                            self._list(replace(encoded, problem=_NO_TARGETS))
                        continue
                    any_document = True
                    yield encoded, position
            if not any_document:
                names = dict.fromkeys(part.name for part in stream.shards[self._number])
                listed = first_names(names)
                hint = "leave these files out, or use data.streaming=false"
                what = f"data.streaming: no document with text in {listed}"
                what = no_targets(listed, stream.data) if dropped else what
                raise RecipeError(f"{what}; {hint}")
            part, row, any_document = 0, 0, False

    def _too_long(self, encoded: Encoded, *, listed: bool) -> bool:
        """Whether a document is dropped for its length, which is noted. Raises RecipeError if it is
        an error."""
        data = self._stream.data
        if encoded.ids.size <= data.sequence_length:
            return False
        size = f"{encoded.ids.size:,} tokens, more than {data.sequence_length:,}"
        problem = f"{size} (data.sequence_length, data.overlong)"
        if data.overlong == "error":
            raise RecipeError(f"{encoded.row.where}: {problem}")
        if data.drops_overlong and listed:
            self._list(replace(encoded, problem=problem))
        return data.drops_overlong

    def _kept(self, encoded: Encoded) -> int:
        """Tokens of a document that remain: of a kind that is cut, those of a sequence."""
        data = self._stream.data
        if not KINDS[data.kind].is_cut:
            return int(encoded.ids.size)
        return encoded.kept(data.sequence_length)

    def _learnable(self, encoded: Encoded) -> bool:
        """Whether a document has a target, after it is cut."""
        return bool((encoded.targets[1 : self._kept(encoded) + 1] != IGNORED).any())

    def _skip(self, encoded: Encoded, *, listed: bool) -> None:
        """Raises RecipeError unless data.on_error is skip."""
        if self._stream.data.on_error != "skip":
            raise RecipeError(f"{encoded.row.where}: {encoded.problem}")
        if listed:
            self._list(encoded)

    def _list(self, encoded: Encoded) -> None:
        if self._stream.skipped_rows is not None:
            line = json.dumps(encoded.skipped, ensure_ascii=False) + "\n"
            with (
                contextlib.suppress(OSError),  # such as a full disk: the row is skipped anyway
                self._stream.skipped_rows.open("a", encoding="utf-8") as file,
            ):
                file.write(line)  # at once: other processes append too

    def _read(self) -> Iterator[tuple[Sample, ShardPosition]]:
        """The sequences, each with where the next one starts.

        Text continues in the next sequence. Documents of other kinds start a new sequence if they
        do not fit, and the ends of some are cut off (`RowKind.is_cut`).
        """
        data = self._stream.data
        kind, length, packing = data.kind, data.sequence_length, data.packing
        pieces: list[Piece] = []
        attached: list[Attachments | None] = []
        room, done = length, self.position[3]
        for encoded, position in self._documents():
            ids = encoded.ids[: self._kept(encoded)]
            of_tokens = [ids, np.append(encoded.targets[1:], IGNORED)]
            if encoded.weights is not None:
                of_tokens.append(np.append(encoded.weights[1:], np.float32(1)))
            whole = not (kind == "text" and packing)
            if whole and pieces and min(len(ids), length) > room:
                if _any_target(pieces):
                    yield _sample(pieces, attached), (*position, 0)
                pieces, attached, room = [], [], length
            while done < len(ids):
                end = done + min(room, len(ids) - done)
                pieces.append(tuple(values[done:end] for values in of_tokens))
                attached.append(encoded.attachments_before(end))
                room -= end - done
                done = len(ids) if KINDS[kind].is_cut else end
                if room == 0 or not packing:
                    turn, part, row = position
                    following = (row, done) if done < len(ids) else (row + 1, 0)
                    if _any_target(pieces):
                        yield _sample(pieces, attached), (turn, part, *following)
                    pieces, attached, room = [], [], length
            done = 0


def _sample(pieces: list[Piece], attached: list[Attachments | None]) -> Sample:
    """The sample of pieces, with the attachments of each as `stored_attachments` if there are any. A
    document with attachments is one piece."""
    starts = np.cumsum([0, *(len(piece[0]) for piece in pieces)])[:-1]
    joined = join_attachments(attached, starts.tolist())
    sample: dict[str, Any] = make_sample(pieces)
    return sample if joined is None else sample | {_STORED: joined}


def _any_target(pieces: list[Piece]) -> bool:
    return any((targets != IGNORED).any() for _, targets, *_ in pieces)


class StreamingDataset(IterableDataset[Collated | Unreadable]):
    """This rank's micro-batches in order; each of n loader processes yields every n-th of a step.

    `positions` of its last micro-batch of a step are those of its shards after the step.
    """

    packed = True
    joined = False
    lengths: Sequence[int] | None = None

    def __init__(
        self,
        parts: Sequence[SourcePart],
        encoder: Encoder,
        *,
        objective: SampleMaker,
        sampler: RankBatchSampler,
        data: schema.Data,
        seed: int,
        model: ModelTraits,
        skipped_rows: Path | None,
        file_notes: Sequence[str] = (),
    ) -> None:
        """file_notes: see `find_parts`. skipped_rows is the file that lists rows that cannot be used (data.on_error: skip)."""
        self.shards = assign_shards(parts, seed=seed, shuffle=data.shuffle)
        self.encoder, self._sampler, self.data, self.model = encoder, sampler, data, model
        self.objective = objective
        self._inputs = model.inputs(data.sequence_length, packed=data.packing)
        self.seed, self.skipped_rows, self.file_notes = seed, skipped_rows, file_notes
        self.buffer_rows = max(1, data.shuffle_buffer // len(self.shards))
        self._files = {part.name: part.size for part in parts}
        try:
            sample = content_sample(parts)
        except OSError as error:
            raise RecipeError(f"data: {error.filename} cannot be read: {error.strerror}") from None
        self.fingerprint = {"files": self._files, "sample": sample, **encoder.fingerprint()}
        self.skipped: list[dict[str, str]] = []
        form = prompt_form(encoder, parts)
        self.prompt_forms: set[PromptForm] = set() if form is None else {form}
        # Files by number, not by path: in another folder they have the same order
        names = {part.name: at for at, part in enumerate(parts) if part.form != "hub" or part.size}
        shards = [
            [(names.get(part.name, part.name), part.start, part.size) for part in shard]
            for shard in self.shards
        ]
        settings = [data.shuffle, self.buffer_rows, data.sequence_length, data.packing]
        settings.append(data.drops_overlong)
        order = [shards, seed, *settings, data.on_error == "skip", *encoder.identity()]
        if data.on_error == "skip" and data.max_document != schema.Data.max_document:
            order.append(data.max_document)  # larger documents are skipped
        digest = hashlib.sha256(json.dumps(order).encode()).hexdigest()[:24]
        self.order = f"{VERSION}-{digest}"
        """Digest of all that the order of samples depends on, after its version."""
        self.saved_samples, self.saved_positions = 0, [_START] * len(self.shards)

    def starting(
        self, sampler: RankBatchSampler, saved: Mapping[str, Any] | None
    ) -> StreamingDataset:
        """The same stream from the first step of `sampler` on.

        saved: `state` after the step before or an earlier one. It is ignored if it is of another
        order.
        """
        other = copy.copy(self)
        other._sampler = sampler
        first_sample = sampler.start_of(sampler.first_step)
        if saved and saved["order"] == self.order and saved["samples"] <= first_sample:
            other.saved_samples = saved["samples"]
            other.saved_positions = [(turn, *rest) for turn, *rest in saved["positions"]]
        return other

    def state(
        self, positions: Mapping[int, ShardPosition], *, samples: int, ranks: RankLayout
    ) -> dict[str, Any]:
        """What `starting` needs to continue after `samples` samples. Every rank must call it.

        positions: of the shards that this rank reads.
        """
        table = torch.full((len(self.shards), len(_START)), -1, dtype=torch.int64)
        table[list(positions)] = torch.tensor(list(positions.values()))
        if ranks.size > 1:  # each shard is read by some rank; those that share one agree
            table = table.to(ranks.device)
            dist.all_reduce(table, op=dist.ReduceOp.MAX, group=ranks.group)
        return {"order": self.order, "samples": samples, "positions": table.tolist()}

    def workers(self, wanted: int) -> int:
        """Loader processes, up to `wanted`: a power of two that divides the micro-batches."""
        most = 1 << wanted.bit_length() - 1 if wanted else 0
        return most and math.gcd(self._sampler.micro_batches(0), most)

    def __iter__(self) -> Iterator[Collated | Unreadable]:
        worker = get_worker_info()
        number, of = (worker.id, worker.num_workers) if worker is not None else (0, 1)
        try:
            yield from self._micro_batches(number, of)
        except RecipeError as error:
            yield Unreadable(str(error))

    def _micro_batches(self, number: int, of: int) -> Iterator[Collated]:
        """The micro-batches of loader process `number` of `of`, in order."""
        sampler, shards = self._sampler, len(self.shards)
        size, batch = sampler.micro_batch_size, sampler.global_batch_size
        processes, own = sampler.ranks * of, number * sampler.ranks + sampler.rank
        common = math.gcd(shards, processes)
        # The shards with the samples k for which k % processes is `own`. One process lists the bad
        # rows of a shard
        mine = {
            key: _Shard(self, key, list_bad_rows=own < common)
            for key in range(own % common, shards, common)
        }
        for step in range(sampler.first_step, sampler.steps):
            begin = sampler.start_of(step)
            end = begin + batch
            samples = range(begin + (own - begin) % processes, end, processes)
            micro_batches = sampler.micro_batches(step) // of
            for index in range(micro_batches):
                wanted = samples[index * size : (index + 1) * size]
                taken = (mine[sample % shards].take(sample // shards) for sample in wanted)
                rows = [self._completed(sample) for sample in taken]
                if index == micro_batches - 1:
                    for key, shard in mine.items():
                        shard.skip_to(_given(end, key, shards))
                rows += [EMPTY] * (size - len(rows))
                collated = self.objective.collate(rows, self._inputs)
                positions = {key: shard.position for key, shard in mine.items()}
                yield replace(collated, shard_positions=positions)

    def _completed(self, sample: Sample) -> Sample:
        """See `ModelAttachments.complete`. Raises RecipeError."""
        attached: Any = sample.pop(_STORED, None)
        ids = sample["input_ids"]
        try:
            return self._inputs.attachments.complete(
                sample, one_document(ids, attached), [(0, 0, len(ids))]
            )
        except RowError as error:
            raise RecipeError(f"data: {error}") from None

    def describe(self) -> list[str]:
        """Lines for the log. The first is about the size."""
        data, shards, ranks = self.data, len(self.shards), self._sampler.ranks
        divided = math.gcd(shards, ranks)
        lines = [
            f"streaming {len(self._files):,} files ({sum(self._files.values()) / 2**20:,.1f} MiB), "
            f"{sum(map(len, self.shards)):,} parts in {shards} shards, sequences of up to "
            f"{data.sequence_length}, {'' if data.packing else 'not '}packed; each rank reads "
            f"{shards // divided} shards"
        ]
        if divided < ranks:
            hint = "use a power of two of ranks, or more or larger .jsonl or .parquet files"
            lines.append(
                f"note: each shard is tokenized by {ranks // divided} ranks; to share the work "
                f"better, {hint}, up to {SHARDS} shards"
            )
        lines += [*self.encoder.notes, *self.file_notes]
        if unused := self._unused():
            lines.append(f"note: {unused_line(unused)}")
        return lines

    def _unused(self) -> list[str]:
        """The columns that are not used in the first rows of a file of lines or row groups."""
        unused: list[str] = []
        parts = (part for shard in self.shards for part in shard)
        part = next((part for part in parts if part.form in _DIVIDED), None)
        for row in itertools.islice(read_rows(part), _LOOKED_AT) if part is not None else ():
            with contextlib.suppress(RowError):  # reported when the row is read
                found, values = self.encoder.match(row.values or {})
                rest = unused_columns(values, found, self.encoder.ignored)
                unused += [column for column, _ in rest if column not in unused]
        return unused


def _given(samples: int, shard: int, shards: int) -> int:
    """Sequences of a shard among the first `samples` samples of the run."""
    return (samples - shard + shards - 1) // shards
