"""The shards of a stream: which parts each has, and the shuffle buffer. See streaming.py."""

from __future__ import annotations

import heapq
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from launcher.data.sources import Part, split
from launcher.recipe.hub import load_data_set

SHARDS = 64
"""More would let more ranks share the tokenization, and make each start slower."""
_SHARD_BYTES = 1 << 16
"""The smallest shard, on average: small data has fewer shards."""
_PART_BYTES = 16 * 2**20
"""The largest part that a resume reads again, for data of up to _PARTS parts."""
_PARTS = 1 << 14
"""Finding where each part starts is one read of the file, on every rank."""


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
        random.Random(f"units {seed}").shuffle(pieces)
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


def part_identity(part: Part) -> tuple[str, int, int, int]:
    if part.form == "hub_stream":
        return part.name, 0, part.size, part.start
    return part.name, part.start, part.size, 0


def through_buffer(rows: Iterator[Any], size: int, generator: random.Random) -> Iterator[Any]:
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
