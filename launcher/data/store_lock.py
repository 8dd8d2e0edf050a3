"""Locks in the cache of token stores: one process tokenizes, all others wait.

The process that creates a store's lock file tokenizes; the others, on any node and of any job,
wait. A lock names its process, which touches it every TOUCH_SECONDS. It is abandoned once that
process has ended or, if it is on another machine, once this machine has seen no touch for
STALE_SECONDS. Kernel locks are not used: some shared file systems keep them per machine. If two
processes take over a lock at once, both tokenize, and the second store is dropped.
"""

from __future__ import annotations

import json
import logging
import os
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
_ABANDONED_SECONDS = 3600.0
"""Leftovers of other machines are removed at this age by this machine's clock."""


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
    """Creates lock files in this process's name and touches them until `close`."""

    def __init__(self) -> None:
        pid = os.getpid()
        process = {"host": socket.gethostname(), "machine": this_machine(), "pid": pid}
        self.text = json.dumps(process | {"started": process_start(pid), "token": uuid.uuid4().hex})
        self._files: list[int] = []
        self._done = threading.Event()
        threading.Thread(target=self._touch, name="tokenization lock", daemon=True).start()

    def create(self, file: Path) -> bool:
        """Returns False if the file exists already."""
        try:
            descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        except FileExistsError:
            return False
        os.write(descriptor, self.text.encode())
        os.fsync(descriptor)  # otherwise NFS may show an empty file
        self._files.append(descriptor)
        return True

    def holds(self, file: Path) -> bool:
        """Whether the file is still the one that this process created."""
        with suppress(OSError):
            return bool(self._files) and file.read_text() == self.text
        return False

    def close(self) -> None:
        """Stops touching the files and leaves them in place."""
        self._done.set()
        for descriptor in self._files:
            os.close(descriptor)

    def _touch(self) -> None:
        while not self._done.wait(TOUCH_SECONDS):
            for descriptor in list(self._files):  # the name may belong to another process by now
                with suppress(OSError):
                    os.utime(descriptor)


class Lock:
    """A lock file, as seen by a process that waits for it."""

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

    def abandoned(self) -> bool:
        """Whether the owner has ended, or has not touched the file while this process watched."""
        silent = time.monotonic() - self._since > STALE_SECONDS
        return self._seen is not None and (self.ended() or (not self.local() and silent))

    def old(self) -> bool:
        """Whether the owner has ended, or has not touched the file for a very long time."""
        with suppress(OSError):
            age = time.time() - self._file.stat().st_mtime
            return self.ended() or (not self.local() and age > _ABANDONED_SECONDS)
        return False

    def local(self) -> bool:
        """Whether this process can see the owner."""
        return self._owner.get("machine") == this_machine()

    def ended(self) -> bool:
        """Whether the owner ran on this machine and has ended."""
        return self.local() and process_start(self._owner["pid"]) != self._owner["started"]


@contextmanager
def locked(file: Path, ready: Callable[[], bool]) -> Iterator[Owner | None]:
    """Takes the lock and yields its owner; None if the store became ready first."""
    owner, lock = Owner(), Lock(file)
    try:
        with writing(file.parent):
            file.parent.mkdir(parents=True, exist_ok=True)
            for _ in poll(lock.describe):
                if ready() or owner.create(file):
                    break
                lock.read()
                if lock.abandoned():
                    logger.info(f"{lock.describe()} has not finished tokenizing: taking over")
                    file.unlink(missing_ok=True)
        yield owner if owner.holds(file) else None
    finally:
        if owner.holds(file):
            file.unlink(missing_ok=True)
        owner.close()


@contextmanager
def writing(cache: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise RecipeError(f"data.cache: {cache} cannot be written to: {error.strerror}") from None
