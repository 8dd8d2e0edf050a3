"""JSON and JSON Lines files of a run.

A full disk does not end the run that writes them, and damaged lines are skipped when they are read.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import logging
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, BinaryIO

logger = logging.getLogger(__name__)

Json = dict[str, Any]
"""A JSON object."""

_SAMPLED_BLOCKS, _SAMPLED_BYTES = 256, 16 << 10

# Types of the keys that are read again, in status.json, events.jsonl and metrics.jsonl
_TEXTS = (
    "state", "reason", "error", "warning", "event", "host", "found", "text", "origin", "job",
    "run_id", "agent", "device", "git_commit",
)  # fmt: skip
_COUNTS = (
    "step", "steps", "attempt", "ranks", "ranks_per_node", "found_step", "skipped_batches",
    "bytes", "device_memory", "peak_memory_bytes", "micro_batch_size", "samples",
    "global_batch_size", "reserved_memory_bytes", "allocation_retries",
)  # fmt: skip
_TIMES = ("time", "found_time")
_NUMBERS = (
    "seconds", "loss", "grad_norm", "learning_rate", "tokens_per_second", "mfu", "eval_loss",
)  # fmt: skip
_TABLES = ("shares", "held", "versions", "eval_losses", "eval_scores")


class Lines:
    """A .jsonl file to which lines are appended. Lines that cannot be written, for example on a
    full disk, stay in memory, are written with a later one, and do not end the run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._kept: list[bytes] = []
        self._file: BinaryIO | None = None

    def append(self, line: Json, *, check: Callable[[], None] = lambda: None) -> None:
        """Appends a line. Calls `check` before the file is changed."""
        waiting = len(self._kept)
        self._kept.append(json.dumps(line).encode() + b"\n")
        try:
            check()
            self._write()
        except OSError as problem:
            self.close()
            if not waiting:
                logger.warning(
                    f"{self.path} cannot be written: {problem.strerror}; its lines are kept in "
                    "memory, training continues"
                )
        else:
            if waiting:
                logger.info(f"{self.path} can be written again: {waiting} lines were added")

    def _write(self) -> None:
        if self._file is None:
            self._file = _open_to_append(self.path)
        data, end = memoryview(b"".join(self._kept)), os.fstat(self._file.fileno()).st_size
        try:
            while data:
                data = data[self._file.write(data) or 0 :]
        except OSError:
            with contextlib.suppress(OSError):
                self._file.truncate(end)  # a part of these lines may have been written
            raise
        self._kept.clear()

    def forget(self, wanted: Callable[[str], bool]) -> int:
        """Forgets the lines in memory that are not wanted; returns how many."""
        before = len(self._kept)
        self._kept = [line for line in self._kept if wanted(line.decode())]
        return before - len(self._kept)

    def close(self) -> None:
        """Closes the file; the next line opens it again."""
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):
                file.close()


def _open_to_append(file: Path) -> BinaryIO:
    """Opens a .jsonl file, and ends an incomplete line that a killed writer may have left."""
    stream = file.open("ab+", buffering=0)
    size = stream.seek(0, os.SEEK_END)
    stream.seek(max(0, size - 1))
    if size and stream.read(1) != b"\n":
        stream.write(b"\n")
    return stream


def append_line(file: Path, line: Json) -> None:
    """Appends to a .jsonl file; an OSError is a warning, and the line is lost."""
    lines = Lines(file)
    lines.append(line)
    lines.close()


def read_jsonl(
    file: Path,
    *,
    size: int | None = None,
    beginning: bool = False,
    wanted: Callable[[bytes], bool] = lambda line: True,
) -> list[Json]:
    """Objects of a .jsonl file, or of its last `size` bytes, with `beginning` of its first ones,
    without incomplete lines; empty if there is no such file. Lines that are not `wanted` are not
    parsed."""
    lines: list[Json] = []
    if not os.path.isfile(file):  # a pipe or a device may have no end
        return lines
    with contextlib.suppress(OSError), file.open("rb") as stream:
        whole = size is None or beginning
        stream.seek(0 if whole else max(0, file.stat().st_size - (size or 0)))
        part = io.BytesIO(stream.read(size)) if beginning else stream
        lines = _objects(line for line in part if wanted(line))
    return lines


def _objects(lines: Iterable[bytes]) -> list[Json]:
    found = []
    for line in lines:
        with contextlib.suppress(ValueError, RecursionError):
            if value := well_formed(json.loads(line)):
                found.append(value)
    return found


def sample_jsonl(file: Path) -> list[list[Json]]:
    """Groups of consecutive objects of a .jsonl file: one group with all of them, or if the file is
    larger than 4 MiB, groups from evenly spaced places, the beginning and the end among them. A run
    of weeks writes hundreds of megabytes."""
    if not os.path.isfile(file):
        return []
    groups = []
    with contextlib.suppress(OSError), file.open("rb") as stream:
        end = stream.seek(0, os.SEEK_END)
        if end <= _SAMPLED_BLOCKS * _SAMPLED_BYTES:
            return [read_jsonl(file)]
        for number in range(_SAMPLED_BLOCKS):
            start = (end - _SAMPLED_BYTES) * number // (_SAMPLED_BLOCKS - 1)
            stream.seek(start)
            lines = stream.read(_SAMPLED_BYTES).splitlines(keepends=True)
            groups.append(_objects(lines[bool(start) :]))  # the first one may be cut, and the last
    return groups


def thinned_jsonl(file: Path, *, most: int, keep: Sequence[bytes]) -> list[Json]:
    """About `most` objects of a .jsonl file, evenly spaced, and all whose line contains one of
    `keep`; all objects if they are not more."""
    try:
        with file.open("rb") if os.path.isfile(file) else io.BytesIO() as stream:
            count = sum(block.count(b"\n") for block in iter(lambda: stream.read(1 << 20), b""))
    except OSError:
        return []
    every, number = max(1, count // most), itertools.count()
    return read_jsonl(
        file,
        wanted=lambda line: next(number) % every == 0 or any(part in line for part in keep),
    )


def well_formed(value: object) -> Json:
    """The keys of an object without those whose value has another type than a run writes, because
    something else has changed the file; empty if it is no object."""
    if not isinstance(value, dict):
        return {}
    return {key: item for key, item in value.items() if item is None or _has_type(key, item)}


def _has_type(key: str, value: Any) -> bool:
    if key in _TEXTS:
        return isinstance(value, str)
    if key in _COUNTS:
        most = 1 << (20 if key in ("ranks", "ranks_per_node") else 53)
        return type(value) is int and 0 <= value < most
    if key in _TIMES:
        return type(value) in (int, float) and 0 <= value < 1e11
    if key in _NUMBERS or key.endswith("_seconds"):
        return type(value) in (int, float) and abs(value) < 1e300
    if key in _TABLES:
        return isinstance(value, dict)
    return key != "overrides" or (
        isinstance(value, list) and all(isinstance(word, str) for word in value)
    )


def last_line(file: Path, *, having: Sequence[str] = ("step",)) -> Json:
    """The last object with these keys near the end of a .jsonl file; empty if there is none."""
    lines = read_jsonl(file, size=64 << 10)
    return next((line for line in reversed(lines) if line.keys() >= {*having}), {})
