"""One process tokenizes a store; all others, on any node and of any job, wait.

The process that creates the lock file tokenizes. The file names it, and it touches the file every
TOUCH_SECONDS. The lock is abandoned once that process has ended or, on another machine, once this
machine has seen no touch for STALE_SECONDS. Kernel locks are not used: some shared file systems
keep them per machine. If two processes take over a lock at once, both tokenize, and the second
store is dropped.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from launcher.errors import RecipeError
from launcher.reliability.lock import process_start, this_machine

logger = logging.getLogger(__name__)

TOUCH_SECONDS = 10.0
STALE_SECONDS = 120.0
"""NFS caches the attributes of a file for up to 60 s by default."""
POLL_SECONDS = 5.0
"""The longest pause between two looks at the cache: a thousand ranks may wait."""


def poll(owner: Callable[[], str]) -> Iterator[None]:
    """Yields again and again; pauses for a quarter of the time waited, at most POLL_SECONDS."""
    started = logged = time.monotonic()
    while True:
        yield
        waited = time.monotonic() - started
        time.sleep(min(POLL_SECONDS, max(0.05, waited / 4)))
        if time.monotonic() - logged > 60:
            logged = time.monotonic()
            logger.info(f"waiting for {owner()} to tokenize ({logged - started:.0f} s)")


class Owner:
    """Creates a lock file in this process's name and touches it until `release`."""

    def __init__(self, file: Path) -> None:
        self._file, pid = file, os.getpid()
        self.scratch = file.parent / f".making-{uuid.uuid4().hex}"
        """The folder to tokenize into. Whoever takes over the lock removes it."""
        process = {"host": socket.gethostname(), "machine": this_machine(), "pid": pid}
        process |= {"started": process_start(pid), "scratch": self.scratch.name}
        self.text = json.dumps(process)
        self._descriptor: int | None = None
        self._released = threading.Event()

    def create(self) -> bool:
        """Returns False if the file exists already."""
        try:
            descriptor = os.open(self._file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        except FileExistsError:
            return False
        os.write(descriptor, self.text.encode())
        os.fsync(descriptor)  # otherwise NFS may show an empty file
        self._descriptor = descriptor
        threading.Thread(target=self._touch, name="tokenization lock", daemon=True).start()
        return True

    def holds(self) -> bool:
        """Whether the file is still the one that this process created."""
        with suppress(OSError):
            return self._descriptor is not None and self._file.read_text() == self.text
        return False

    def release(self) -> None:
        """Removes the lock and what is left in the scratch folder."""
        shutil.rmtree(self.scratch, ignore_errors=True)
        if self.holds():
            self._file.unlink(missing_ok=True)
        self._released.set()

    def _touch(self) -> None:
        assert self._descriptor is not None
        while not self._released.wait(TOUCH_SECONDS):
            with suppress(OSError):  # by descriptor: the name may be another process's by now
                os.utime(self._descriptor)
        os.close(self._descriptor)


class Lock:
    """A lock file of any process."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._seen: tuple[str, int] | None = None
        self._since = 0.0
        self._owner: dict[str, Any] = {}

    def read(self) -> None:
        seen = None
        # The file is opened because NFS answers `stat` from its cache
        with suppress(OSError, UnicodeDecodeError), self._file.open() as stream:
            seen = stream.read(), os.fstat(stream.fileno()).st_mtime_ns
        if seen != self._seen:
            self._seen, self._since, self._owner = seen, time.monotonic(), {}
            with suppress(ValueError, TypeError):
                self._owner = dict(json.loads(seen[0])) if seen is not None else {}

    def describe(self) -> str:
        """The owner, for a message."""
        host = self._owner.get("host", "another machine")
        return f"process {self._owner.get('pid', '?')} on {host}"

    def ended(self) -> bool:
        """Whether the owner ran on this machine and has ended."""
        local = self._owner.get("machine") == this_machine()
        return local and process_start(self._owner["pid"]) != self._owner["started"]

    def abandoned(self) -> bool:
        """Whether the owner has ended, or has not touched the file while this process watched."""
        remote = self._seen is not None and self._owner.get("machine") != this_machine()
        return self.ended() or (remote and time.monotonic() - self._since > STALE_SECONDS)

    def remove(self) -> None:
        """Removes the file and the owner's scratch folder."""
        if scratch := self._owner.get("scratch"):
            shutil.rmtree(self._file.parent / scratch, ignore_errors=True)
        self._file.unlink(missing_ok=True)


@contextmanager
def locked(file: Path, ready: Callable[[], bool]) -> Iterator[Owner | None]:
    """Takes the lock and yields its owner; None if the store became ready first."""
    owner, lock = Owner(file), Lock(file)
    try:
        with writing(file.parent):
            file.parent.mkdir(parents=True, exist_ok=True)
            for _ in poll(lock.describe):
                if ready() or owner.create():
                    break
                lock.read()
                if lock.abandoned():
                    logger.info(f"{lock.describe()} has not finished tokenizing: taking over")
                    lock.remove()
        yield owner if owner.holds() else None
    finally:
        owner.release()


def remove_ended(cache: Path) -> None:
    """Removes what killed processes of this machine left behind."""
    for file in cache.glob(".*.lock"):
        lock = Lock(file)
        lock.read()
        if lock.ended():
            lock.remove()


@contextmanager
def writing(cache: Path) -> Iterator[None]:
    """Raises RecipeError for errors of the file system."""
    try:
        yield
    except OSError as error:
        raise RecipeError(f"data.cache: {cache} cannot be written to: {error.strerror}") from None
