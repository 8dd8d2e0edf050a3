"""Writes checkpoints, asynchronously or not. A failed save is reported, never raised."""

from __future__ import annotations

import contextlib
import json
import logging
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from launcher.checkpoint import files
from launcher.checkpoint.layout import LOCAL, Holders, Layout, Written, as_bytes, index_of, plan
from launcher.checkpoint.staging import StagingBuffer
from launcher.console import bytes_as_text, task
from launcher.distributed.process_group import CHECKPOINT_GROUP, gather
from launcher.distributed.rank_layout import RankLayout
from launcher.files import ALIGNMENT, StoredFile, write_chunks, write_file
from launcher.models.safetensors_files import Tensors
from launcher.recipe import schema

logger = logging.getLogger(__name__)

CHUNK = 16 * 2**20
"""Bytes written at once; a multiple of ALIGNMENT."""
_CHANGED_BY_STEP = ("model.", "optimizer.")
"""Prefixes of the tensors that only the optimizer's step changes."""
_Pieces = list[tuple[int, torch.Tensor]]
"""Positions in the file, in order, and the bytes there: views of the tensors in training."""


def checkpoint_group(ranks: RankLayout) -> dist.ProcessGroup:
    """A gloo group of the same ranks, for the thread that saves: if it shared the group of
    training, both would hang. Ranks wait in it for the slowest disk; lost ranks are detected
    elsewhere. All ranks of the default group must call it."""
    members, timeout = dist.get_process_group_ranks(ranks.group), timedelta(days=1)
    group = dist.new_group(members, timeout=timeout, backend="gloo", group_desc=CHECKPOINT_GROUP)
    assert isinstance(group, dist.ProcessGroup)
    return group


def _aligned(size: int) -> int:
    return size + -size % ALIGNMENT


def _chunks_from_gpu(parts: Iterable[torch.Tensor]) -> Iterator[memoryview]:
    """The bytes of the parts in chunks of CHUNK, each valid until the next one. Two page-locked
    buffers take turns: one is filled by the GPU while the other is written. The last chunk is
    padded to a multiple of ALIGNMENT."""
    buffers = [torch.empty(CHUNK, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    left = deque(parts)

    def fill(buffer: torch.Tensor) -> tuple[torch.Tensor, torch.cuda.Event]:
        """Starts copies. Returns the chunk, and the event that ends them."""
        used = 0
        while left and used < CHUNK:
            part = left.popleft()
            taken = part[: CHUNK - used]
            buffer[used : used + len(taken)].copy_(taken, non_blocking=True)
            used += len(taken)
            if len(taken) < len(part):
                left.appendleft(part[len(taken) :])
        event: torch.cuda.Event = torch.cuda.current_stream().record_event()
        return buffer[: _aligned(used)], event

    chunk, copied = fill(buffers[0])
    while len(chunk):
        copied.synchronize()
        buffers.reverse()
        following = fill(buffers[0])
        yield chunk.numpy().data
        chunk, copied = following


@dataclass
class Save:
    """The outcome of a save, which is the same on every rank apart from the seconds."""

    step: int
    started: float
    best: bool = False
    """Whether its evaluation is the best one."""
    staged: threading.Event = field(default_factory=threading.Event)
    """Set once training may change the tensors."""
    thread: threading.Thread | None = None
    path: Path | None = None
    """The checkpoint; None if the save failed."""
    error: str | None = None
    """Why it failed, and on which rank."""
    bytes: int = 0
    """Size of the checkpoint, over all ranks."""
    seconds: float = 0.0
    """From the call of `save` to the end."""
    blocked: float = 0.0
    """Seconds that training waited on this rank."""


class _SaveError(Exception):
    """A save failed on one rank or more. The message comes from the first of these ranks."""


class Checkpointer:
    """Saves into a folder, one checkpoint at a time.

    Asynchronous: a thread copies this rank's part (with n ranks about 1/n of the checkpoint) into a
    buffer in host memory while the next forward and backward passes run. The optimizer's step waits
    for that copy. Then the thread writes the buffer, which is reused. `prepare` page-locks it.
    Synchronous: writes the tensors in chunks of 16 MiB, from a GPU through two page-locked buffers.
    """

    def __init__(
        self,
        folder: Path,
        settings: schema.Checkpoint,
        *,
        group: dist.ProcessGroup,
        device: torch.device,
        before_write: Callable[[], None] = lambda: None,
        held: Holders | None = None,
    ) -> None:
        """`group` was made by `checkpoint_group`. held: see `plan`. Rank 0
        calls `before_write` before the scratch folder is made and before it becomes a checkpoint;
        if it raises, the save fails."""
        self.folder = folder
        self.best_step: int | None = None
        """Step of a checkpoint that is kept for the result of its evaluation."""
        self.earlier_best: list[int] = []
        """Steps of checkpoints that are kept for results on other validation data."""
        self.failures = 0
        """Failed saves in a row, updated by `save` and `finish`: the same on every rank."""
        self._group, self._device, self._settings = group, device, settings
        self._rank, self._ranks = dist.get_rank(group), dist.get_world_size(group)
        self._before_write, self._held = before_write, held
        self._buffer: StagingBuffer | None = None
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda" and settings.asynchronous:
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._current: Save | None = None
        self._ended: list[Save] = []
        self._not_deleted: set[str] = set()
        """Names of old checkpoints that could not be deleted, which were reported."""

    def prepare(self, tensors: Tensors, *, local: Tensors) -> None:
        """Allocates the buffer for asynchronous saves of these tensors from a GPU, and page-locks it
        while training begins. Without this call it stays pageable."""
        if self._stream is not None:
            self._buffer = StagingBuffer(
                _aligned(plan(tensors, local, self._group, self._held).size)
            )
            self._buffer.start_page_lock(self._device)

    def close(self) -> None:
        """Frees the buffer. No save may be in progress."""
        if self._buffer is not None:
            self._buffer.close()
            self._buffer = None

    def save(
        self,
        step: int,
        tensors: Tensors,
        *,
        state: Mapping[str, object],
        local: Tensors,
        best: bool = False,
    ) -> None:
        """Waits for the previous save, then starts a new one. All ranks must call it.

        tensors: the result of `model_and_optimizer`. state: the content of state.json, on rank 0.
        local: this rank's own small tensors. best: keeps it until a better one is saved.
        """
        started = time.perf_counter()
        self._wait()
        save = self._current = Save(step, started, best)
        text = json.dumps(dict(state), indent=1).encode() if self._rank == 0 else b""
        if not self._settings.asynchronous:
            if self._device.type == "cuda":  # as in `_stage`
                torch.cuda.current_stream(self._device).synchronize()
            self._run(save, tensors, local, text)
            save.blocked = save.seconds
            self._wait()
            return
        tensors = {
            name: tensor if name.startswith(_CHANGED_BY_STEP) else tensor.clone()
            for name, tensor in tensors.items()
        }
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        run = partial(self._run, save, tensors, local, text)
        save.thread = threading.Thread(target=run, name=f"save step {step}", daemon=True)
        save.thread.start()
        save.blocked = time.perf_counter() - started

    def wait_staged(self) -> None:
        """Waits until the tensors are copied. Must be called before each step of the optimizer."""
        save = self._current
        if save is not None and not save.staged.is_set():
            started = time.perf_counter()
            save.staged.wait()
            save.blocked += time.perf_counter() - started

    def poll(self) -> list[Save]:
        """Saves that ended since the last call. Ranks may see one at different times."""
        return [self._ended.pop(0) for _ in range(len(self._ended))]

    def finish(self) -> list[Save]:
        """Waits for the save in progress and returns what `poll` would."""
        self._wait()
        return self.poll()

    def _wait(self) -> None:
        save, self._current = self._current, None
        if save is not None:
            if save.thread is not None:
                save.thread.join()
            self.failures = 0 if save.error is None else self.failures + 1

    # In the thread

    @torch.no_grad()
    def _run(self, save: Save, tensors: Tensors, local: Tensors, state: bytes) -> None:
        """Saves, and appends the outcome for `poll`. Raises nothing."""
        scratch: Path | None = None
        try:
            layout = plan(tensors, local, self._group, self._held)
            values = {**tensors, **{LOCAL + name: tensor for name, tensor in local.items()}}
            pieces = [(0, torch.frombuffer(bytearray(layout.header), dtype=torch.uint8))]
            pieces += [(start, as_bytes(values[name])) for name, start in layout.starts.items()]
            if self._settings.asynchronous:
                self._on_all_ranks(lambda: self._stage(save, layout.size, pieces))
            scratch = self._on_rank_0(lambda: files.scratch_folder(self.folder, save.step))
            of_ranks: list[Any] | None = [None] * self._ranks if self._rank == 0 else None
            dist.gather_object(layout.written, of_ranks, group=self._group, group_dst=0)
            files_of_ranks = self._on_all_ranks(
                lambda: self._write(scratch, layout, pieces, state, of_ranks)
            )
            stored = {name: file for part in files_of_ranks for name, file in part.items()}
            save.bytes = sum(file.bytes for file in stored.values())
            save.path = self._on_rank_0(
                lambda: files.commit(scratch, step=save.step, ranks=self._ranks, files=stored)
            )
            self.best_step = save.step if save.best else self.best_step
            self._prune()
        except _SaveError as problem:
            save.error = str(problem)
            # All ranks wait, because one of them may end the run after this save
            with contextlib.suppress(Exception):  # a rank may be gone
                self._on_all_ranks(lambda: self._remove(scratch))
        except Exception as problem:  # a rank was lost; training notices it too
            save.error = f"the ranks could not communicate: {self._reason(problem)}"
        finally:
            save.staged.set()
        save.seconds = time.perf_counter() - save.started
        self._ended.append(save)

    def _remove(self, scratch: Path | None) -> None:
        if scratch is not None and self._rank == 0:
            shutil.rmtree(scratch, ignore_errors=True)

    def _on_all_ranks(self, action: Callable[[], Any]) -> list[Any]:
        """Each rank's result of an action. Raises _SaveError on all ranks if it fails on one."""
        result, error = None, None
        try:
            result = action()
        except Exception as problem:  # the other ranks wait for the outcome
            error = self._reason(problem)
        results, errors = zip(*gather((result, error), self._group), strict=True)
        if failed := [error for error in errors if error is not None]:
            raise _SaveError(failed[0])
        return list(results)

    def _on_rank_0(self, action: Callable[[], Path]) -> Any:
        """The result of an action of rank 0, if it may still write."""

        def checked() -> Path | None:
            if self._rank != 0:
                return None
            self._before_write()
            return action()

        return self._on_all_ranks(checked)[0]

    def _stage(self, save: Save, size: int, pieces: _Pieces) -> None:
        """Copies the pieces into the buffer in host memory, then lets training continue."""
        on_gpu = self._stream is not None
        if on_gpu:
            # A new thread starts on device 0; restoring its stream would create a context there
            torch.cuda.set_device(self._device)
        if self._buffer is None or len(self._buffer.memory) < size:
            self.close()  # before another one is allocated
            self._buffer = StagingBuffer(_aligned(size))
        self._buffer.wait()
        if self._stream is not None:
            self._stream.synchronize()  # offloaded optimizer state may be on its way to the host
        with torch.cuda.stream(self._stream) if on_gpu else nullcontext():
            for start, part in pieces:
                for target, source in self._buffer.copies(start, part):
                    target.copy_(source, non_blocking=True)
        if self._stream is not None:
            self._stream.synchronize()
        save.staged.set()

    def _write(
        self,
        scratch: Path,
        layout: Layout,
        pieces: _Pieces,
        state: bytes,
        of_ranks: Sequence[Written] | None,
    ) -> dict[str, StoredFile]:
        """Writes this rank's file, and on rank 0 the small ones. of_ranks: what each rank writes, on
        rank 0. Returns the files by name."""
        parts = [part for _, part in pieces]
        if self._buffer is not None:
            parts = [self._buffer.memory[: _aligned(layout.size)]]
        if self._device.type == "cuda" and self._buffer is None:
            chunks = _chunks_from_gpu(parts)
        else:
            chunks = (chunk.numpy().data for part in parts for chunk in torch.split(part, CHUNK))
        name = files.rank_file(self._rank)
        title = f"writing {scratch.name.partition('.')[0]}"
        with task(title, layout.size, background=True) as advance:
            stored = write_chunks(scratch / name, chunks, size=layout.size, advance=advance)
        written = {name: stored}
        if of_ranks is not None:
            index = index_of(layout.every, of_ranks)
            written[files.INDEX] = write_file(scratch / files.INDEX, index)
            written[files.STATE] = write_file(scratch / files.STATE, state)
        return written

    def _prune(self) -> None:
        if self._rank != 0:
            return
        keep_last, keep_every = self._settings.keep_last, self._settings.keep_every
        try:
            problems = files.prune(
                self.folder, keep_last, keep_every, self.best_step, self.earlier_best
            )
            free = shutil.disk_usage(self.folder).free
        except OSError as problem:
            logger.warning(f"old checkpoints could not be deleted: {problem}")
            return
        for name, why in problems.items():
            step = name.partition(".")[0]  # the name changes when it is deleted, and that fails
            if step not in self._not_deleted:
                self._not_deleted.add(step)
                logger.warning(
                    f"old checkpoint {self.folder / name} could not be deleted: {why}; delete it "
                    f"yourself ({bytes_as_text(free)} are free there). This warning is not repeated"
                )

    def _reason(self, problem: Exception) -> str:
        text = str(problem) if isinstance(problem, OSError) else repr(problem)
        if isinstance(problem, FileNotFoundError):
            text += ": is run.dir on a file system that all nodes share?"
        return f"rank {self._rank}: {text}"
