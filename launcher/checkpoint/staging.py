"""Host memory that checkpoints are copied into, page-locked on GPUs."""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import torch

from launcher.console import bytes_as_text
from launcher.files import ALIGNMENT

logger = logging.getLogger(__name__)

PIECE = 256 * 2**20
"""Bytes that are page-locked at once: the driver holds a lock meanwhile, for which launches of
kernels wait."""


def aligned_buffer(size: int) -> torch.Tensor:
    """Bytes in host memory, aligned for direct I/O. They begin a page."""
    alignment = max(ALIGNMENT, os.sysconf("SC_PAGE_SIZE"))
    whole = torch.empty(size + alignment, dtype=torch.uint8)
    skip = -whole.data_ptr() % alignment
    return whole[skip : skip + size]


def page_lock(memory: torch.Tensor) -> int:
    """Page-locks memory, until `page_unlock`. Returns CUDA's status: 0, or an error. PyTorch's own
    pinned memory would have a power of two as its size."""
    cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    return int(cudart.cudaHostRegister(memory.data_ptr(), memory.nbytes, 1))


def page_unlock(*addresses: int) -> None:
    """Ends `page_lock` of memory at these addresses. On a thread without a device this would create
    a context on device 0."""
    cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    for address in addresses:
        cudart.cudaHostUnregister(address)


class StagingBuffer:
    """Memory of one rank, of exactly the size that is asked for.

    `start_page_lock` page-locks it in pieces, by a thread, so that training continues. What cannot
    be page-locked stays pageable: copies into it are slower.
    """

    def __init__(self, size: int) -> None:
        self.memory = aligned_buffer(size)
        self._locked: list[int] = []
        """Addresses of the page-locked pieces."""
        self._thread: threading.Thread | None = None
        self._closing = threading.Event()

    def start_page_lock(self, device: torch.device) -> None:
        """Starts to page-lock the memory for copies from this GPU."""
        weakref.finalize(self, _unlock_all, self._locked, device)
        self._device = device
        self._thread = threading.Thread(target=self._page_lock, name="page-lock", daemon=True)
        self._thread.start()

    def _page_lock(self) -> None:
        # A new thread starts on device 0, where it would create a context
        torch.cuda.set_device(self._device)
        for piece in torch.split(self.memory, PIECE):
            if self._closing.is_set():
                return
            piece.zero_()  # while pages are made, no lock is held
            if status := page_lock(piece):
                done = bytes_as_text(PIECE * len(self._locked))
                logger.warning(
                    f"checkpoint: {bytes_as_text(self.memory.nbytes)} of host memory could not be "
                    f"page-locked (CUDA error {status} after {done}); the rest stays pageable, and "
                    "copies into it are slower"
                )
                return
            self._locked.append(piece.data_ptr())

    def wait(self) -> None:
        """Waits until no more memory is going to be page-locked."""
        if self._thread is not None:
            self._thread.join()

    def copies(
        self, start: int, source: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Pairs (target, source) that copy bytes to a position. None is in two pieces: CUDA refuses
        copies between page-locked and pageable memory and over two page-locked ranges."""
        while len(source):
            size = min(len(source), PIECE - start % PIECE)
            yield self.memory[start : start + size], source[:size]
            start, source = start + size, source[size:]

    def close(self) -> None:
        """Ends the page-lock. The caller's current device must be the device that `start_page_lock`
        got."""
        self._closing.set()
        self.wait()
        if self._locked:
            page_unlock(*self._locked)
            self._locked.clear()


def _unlock_all(locked: list[int], device: torch.device) -> None:
    if locked:
        with torch.cuda.device(device):
            page_unlock(*locked)
        locked.clear()
