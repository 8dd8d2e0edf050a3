"""Writes checkpoints, while training goes on or not; a save that fails is reported, never raised."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from launcher.checkpoint import files
from launcher.checkpoint.files import Checksums, StoredFile
from launcher.checkpoint.layout import ALIGNMENT, LOCAL, Layout, as_bytes, local_part, plan, signature
from launcher.distributed.process_group import CHECKPOINT_GROUP, DataParallel
from launcher.recipe import schema

CHUNK = 16 * 2**20
"""Bytes that are written at once; a multiple of ALIGNMENT."""
_CHANGED_BY_STEP = ("model.", "optimizer.")
"""Names of what only the optimizer's step changes."""


def checkpoint_group(ranks: DataParallel) -> dist.ProcessGroup:
    """A group of the same ranks for checkpoints alone, over gloo: the thread that saves uses it while training uses its own
    (over the same group the two hang). All ranks of the default group must call it.

    A collective of it may take a day: the others wait in one for the rank whose disk is slowest. A rank that is lost is
    noticed by other means (`failures.py`, `watchdog.py`).
    """
    members, timeout = dist.get_process_group_ranks(ranks.group), timedelta(days=1)
    group = dist.new_group(members, timeout=timeout, backend="gloo", group_desc=CHECKPOINT_GROUP)
    assert isinstance(group, dist.ProcessGroup)
    return group


@dataclass(frozen=True)
class Outcome:
    """What came of a save; the same on every rank, but for the seconds."""

    step: int
    path: Path | None
    """The checkpoint; None where it failed."""
    error: str | None
    """Why it failed, and on which rank."""
    bytes: int
    """Of the checkpoint, over all ranks."""
    seconds: float
    """From the call of `save` to the end."""
    blocked: float
    """Seconds that training waited for it on this rank."""
    note: str | None = None
    """What else went wrong, such as an old checkpoint that could not be deleted."""


@dataclass
class _Work:
    step: int
    layout: Layout
    pieces: list[tuple[int, torch.Tensor]]
    """First byte in the file, and the values, flat, as bytes; the tensors that are trained, not copies."""
    state: bytes
    started: float
    problem: str | None = None
    """Why it has failed before it began."""
    scratch: Path | None = None
    """On rank 0: the folder that becomes the checkpoint."""
    staged: threading.Event = field(default_factory=threading.Event)
    thread: threading.Thread | None = None
    outcome: Outcome | None = None
    reported: bool = False
    blocked: float = 0.0


class _SaveError(Exception):
    """A save failed on one rank or more; the message is that of the first."""


class Checkpointer:
    """Saves into a folder, one checkpoint at a time.

    Asynchronous: a thread copies what this rank writes (with n ranks about 1/n of the checkpoint) into a buffer in host
    memory, pinned for a GPU and kept from save to save, while the next forward and backward passes run; the optimizer's
    step waits for the end of that copy. Then the thread writes the buffer. Synchronous: through a buffer of 16 MiB.
    """

    def __init__(
        self,
        folder: Path,
        settings: schema.Checkpoint,
        *,
        group: dist.ProcessGroup,
        device: torch.device,
        optimizer: torch.optim.Optimizer,
        before_write: Callable[[], None] = lambda: None,
    ) -> None:
        """group: of `checkpoint_group`. device: that is trained on. optimizer: whose steps wait for copies.

        before_write: called on rank 0 before a folder is made and before it becomes a checkpoint; what it raises fails the save.
        """
        self.folder = folder
        self.best_step: int | None = None
        """Of the checkpoint to keep for its evaluation loss; set it before a save."""
        self.failures = 0
        """Saves that failed in a row, as of the last `save` or `finish`: there it is the same on every rank."""
        self._group, self._device, self._settings = group, device, settings
        self._asynchronous = settings.asynchronous
        self._rank, self._ranks = dist.get_rank(group), dist.get_world_size(group)
        self._before_write = before_write
        self._planned: tuple[Any, Layout] | None = None
        self._buffer: torch.Tensor | None = None
        self._stream = _stream(device) if device.type == "cuda" and settings.asynchronous else None
        self._work: _Work | None = None
        self._unreported: list[Outcome] = []
        optimizer.register_step_pre_hook(lambda *_: self.wait_staged())

    def save(self, step: int, tensors: Mapping[str, torch.Tensor], *, state: Mapping[str, Any], local: Mapping[str, torch.Tensor]) -> None:
        """Starts to save, after the end of the save before; every rank must call it. What comes of it, `poll` tells.

        tensors: of `model_and_optimizer`; each must be the same tensor, or the same shape, from save to save, or all ranks
        plan again. `model.` and `optimizer.` ones may be changed by the optimizer's step alone; others at once.
        state: for state.json, rank 0's. local: this rank's own small tensors.
        """
        started = time.perf_counter()
        self._wait()
        layout = self._plan(tensors, local)
        values = {**tensors, **{LOCAL + name: tensor for name, tensor in local.items()}}
        at_once = [(0, torch.frombuffer(bytearray(layout.header), dtype=torch.uint8))]
        later: list[tuple[int, torch.Tensor]] = []
        for name, (at, count) in layout.spans.items():
            if count:
                part = local_part(values[name]).contiguous().reshape(-1).view(torch.uint8)
                (later if name.startswith(_CHANGED_BY_STEP) else at_once).append((at, part))
        work = _Work(step, layout, later, json.dumps(dict(state), indent=1).encode() if self._rank == 0 else b"", started)
        self._work = work
        if not self._asynchronous:
            work.pieces = sorted([*at_once, *later], key=lambda piece: piece[0])
            work.staged.set()
            self._run(work)
            self._wait()
            return
        try:
            buffer = self._staging(layout.size)
            for at, part in at_once:
                buffer[at : at + len(part)].copy_(part)
        except (RuntimeError, MemoryError) as problem:
            work.problem = f"no {layout.size / 2**30:,.2f} GiB of host memory to copy into: {problem}"
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        work.thread = threading.Thread(target=self._run, args=(work,), name=f"save step {step}", daemon=True)
        work.thread.start()
        work.blocked = time.perf_counter() - started

    def wait_staged(self) -> None:
        """Returns when nothing of the tensors is still to be copied; called before each step of the optimizer."""
        work = self._work
        if work is not None and not work.staged.is_set():
            started = time.perf_counter()
            work.staged.wait()
            work.blocked += time.perf_counter() - started

    def poll(self) -> list[Outcome]:
        """What ended since the last call. Waits for nothing; the others may see it a little sooner or later."""
        work = self._work
        if work is not None and work.outcome is not None:
            self._report(work, work.outcome)
        reported, self._unreported = self._unreported, []
        return reported

    def finish(self) -> list[Outcome]:
        """Waits for the save that is under way; returns what `poll` would. After it tensors may be loaded into."""
        self._wait()
        return self.poll()

    def staging_bytes(self) -> int:
        """Host memory of this rank that saving keeps: known after the first save."""
        return CHUNK if not self._asynchronous else 0 if self._buffer is None else self._buffer.numel()

    def _wait(self) -> None:
        work = self._work
        if work is None:
            return
        if work.thread is not None:
            work.thread.join()
        assert work.outcome is not None
        self.failures = 0 if work.outcome.error is None else self.failures + 1
        self._report(work, work.outcome)
        self._work = None

    def _report(self, work: _Work, outcome: Outcome) -> None:
        if not work.reported:
            work.reported = True
            self._unreported.append(outcome if work.thread is None else replace(outcome, blocked=work.blocked))

    def _plan(self, tensors: Mapping[str, torch.Tensor], local: Mapping[str, torch.Tensor]) -> Layout:
        """The layout of the save before, as long as the tensors look alike: then nothing is asked of the others."""
        key = signature(tensors), signature(local)
        if self._planned is None or self._planned[0] != key:
            self._planned = key, plan(tensors, local, self._group)
        return self._planned[1]

    def _staging(self, size: int) -> torch.Tensor:
        size += -size % ALIGNMENT
        if self._buffer is None or len(self._buffer) != size:
            self._buffer = None  # freed before the new one is made
            self._buffer = _aligned(size, pinned=self._device.type == "cuda")
        return self._buffer

    def _run(self, work: _Work) -> None:
        """Saves what `save` prepared, and sets the outcome. Raises nothing; runs in a thread if asynchronous."""
        path, error, note = None, None, None
        written: list[dict[str, StoredFile]] = []
        try:
            scratch: Path = self._on_all_ranks(lambda: self._prepare(work))[0]
            written = self._on_all_ranks(lambda: self._write(work, scratch))
            path = self._on_all_ranks(lambda: self._commit(work, written))[0]
            note = self._prune()
        except _SaveError as problem:
            error = str(problem)
            if work.scratch is not None:
                shutil.rmtree(work.scratch, ignore_errors=True)
        except Exception as problem:  # a rank was lost; training notices it too
            path, error = None, f"the ranks could not agree: {self._reason(problem)}"
        size = sum(stored.bytes for part in written for stored in part.values())
        seconds = time.perf_counter() - work.started
        work.outcome = Outcome(work.step, path, error, size, seconds, seconds, note)

    def _on_all_ranks(self, action: Callable[[], Any]) -> list[Any]:
        """Calls it on every rank; returns each rank's result. Raises _SaveError on all ranks if it failed on one."""
        result, error = None, None
        try:
            result = action()
        except Exception as problem:
            error = self._reason(problem)
        found: list[Any] = [None] * self._ranks
        dist.all_gather_object(found, (result, error), group=self._group)
        if failed := [error for _, error in found if error is not None]:
            raise _SaveError(failed[0])
        return [result for result, _ in found]

    def _prepare(self, work: _Work) -> Path | None:
        """Copies into the buffer; on rank 0 also makes the scratch folder, which is returned."""
        try:
            if work.problem is not None:
                raise _SaveError(work.problem)
            if work.thread is not None:
                self._stage(work)
            if self._rank == 0:
                self._before_write()
                work.scratch = files.scratch_folder(self.folder, work.step)
        finally:
            work.staged.set()
        return work.scratch

    def _commit(self, work: _Work, written: list[dict[str, StoredFile]]) -> Path | None:
        if work.scratch is None:
            return None
        self._before_write()
        stored = {name: file for part in written for name, file in part.items()}
        return files.commit(work.scratch, step=work.step, ranks=self._ranks, files=stored)

    def _stage(self, work: _Work) -> None:
        buffer = self._buffer
        assert buffer is not None
        if self._stream is not None:
            # A new thread starts on device 0: `stream` would make a context there when it restores that device's stream
            torch.cuda.set_device(self._device)
        with torch.cuda.stream(self._stream) if self._stream is not None else nullcontext():
            for at, values in work.pieces:
                buffer[at : at + len(values)].copy_(values, non_blocking=True)
        if self._stream is not None:
            self._stream.synchronize()
        work.pieces = []

    def _prune(self) -> str | None:
        if self._rank != 0:
            return None
        try:
            files.prune(self.folder, self._settings.keep_last, self._settings.keep_every, self.best_step)
        except OSError as problem:
            return f"old checkpoints could not be deleted: {problem}"
        return None

    def _reason(self, problem: Exception) -> str:
        if isinstance(problem, _SaveError):
            return f"rank {self._rank}: {problem}"
        if isinstance(problem, FileNotFoundError):
            return f"rank {self._rank}: {problem}: is run.dir on a file system that all nodes share?"
        return f"rank {self._rank}: {problem if isinstance(problem, OSError) else repr(problem)}"

    def _write(self, work: _Work, scratch: Path) -> dict[str, StoredFile]:
        name = files.rank_file(self._rank)
        chunks = _chunks_of(self._buffer) if work.thread is not None and self._buffer is not None else _chunks_through_buffer(work)
        written = {name: write_chunks(scratch / name, chunks, size=work.layout.size)}
        if self._rank == 0:
            assert work.layout.index is not None
            written[files.INDEX] = files.write_file(scratch / files.INDEX, work.layout.index)
            written[files.STATE] = files.write_file(scratch / files.STATE, work.state)
        return written


def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _aligned(size: int, *, pinned: bool = False) -> torch.Tensor:
    """Bytes in host memory that the disk can read by itself."""
    whole = torch.empty(size + ALIGNMENT, dtype=torch.uint8, pin_memory=pinned)
    skip = -whole.data_ptr() % ALIGNMENT
    return whole[skip : skip + size]


def _chunks_of(buffer: torch.Tensor) -> Iterator[memoryview]:
    view = as_bytes(buffer)
    for start in range(0, len(view), CHUNK):
        yield view[start : start + CHUNK]


def _chunks_through_buffer(work: _Work) -> Iterator[memoryview]:
    """The file, a chunk at a time, each in the same memory."""
    buffer = _aligned(CHUNK)
    view = as_bytes(buffer)
    filled = 0
    for _, values in work.pieces:
        start = 0
        while start < len(values):
            count = min(len(values) - start, CHUNK - filled)
            buffer[filled : filled + count].copy_(values[start : start + count])
            start, filled = start + count, filled + count
            if filled == CHUNK:
                yield view
                filled = 0
    if filled:
        yield view[: filled + -filled % ALIGNMENT]


def write_chunks(path: Path, chunks: Iterator[memoryview], *, size: int) -> StoredFile:
    """Writes a new file through to the disk, past the page cache where the file system can: that copy would be made by
    a core that training needs. Chunks lie at, and but for the end are, multiples of 4,096 bytes. Raises OSError."""
    checksums, at = Checksums(), 0
    descriptor = _open(path)
    try:
        for chunk in chunks:
            checksums.update(chunk[: size - at])
            while len(chunk):
                try:
                    written = os.pwrite(descriptor, chunk, at)
                except OSError as problem:
                    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
                    if problem.errno not in (errno.EINVAL, errno.EFAULT) or not flags & os.O_DIRECT:
                        raise
                    # EINVAL: not aligned as this file system wants it, for instance after a short write.
                    # EFAULT: the disk cannot read this memory itself, as with memory that some drivers pin.
                    fcntl.fcntl(descriptor, fcntl.F_SETFL, flags & ~os.O_DIRECT)
                    continue
                chunk, at = chunk[written:], at + written
        os.ftruncate(descriptor, size)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return checksums.file()


def _open(path: Path) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    try:
        return os.open(path, flags | os.O_DIRECT, 0o666)
    except OSError as problem:
        if problem.errno != errno.EINVAL:
            raise
    path.unlink(missing_ok=True)  # some file systems make the file before they refuse
    return os.open(path, flags, 0o666)
