"""The lock of a run folder: one job at a time may write there. Imports no torch.

RUN_DIR/owner holds numbered records, and the highest number owns the folder. A process takes the
folder by creating the record with the next number, which succeeds for one process only (O_EXCL, on
NFS too). Records are never replaced or removed, so two processes that find the same dead owner
cannot both take over. An owner that finds a higher number is fenced off: it writes nothing more.

Clocks are never compared, nor is a file's time with a clock: a file server has its own. On the
owner's machine its process is looked up. Elsewhere the heartbeat of its record is awaited, any
change of the record's time, for longer than the interval between heartbeats and the time for which
an NFS client caches a folder (a minute by default). Only its user may read a record, because it
names the port of the ranks' store: for other users the heartbeat decides, too.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pwd
import re
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

from pydantic import BaseModel

from launcher.distributed.environment import Environment
from launcher.distributed.processes import is_running, process_start, this_machine
from launcher.errors import RecipeError, TrainingError
from launcher.files import write_file

TOUCH_SECONDS = 15.0
"""Seconds between the heartbeats of an owner."""
LEASE_SECONDS = 120.0
"""An owner on another machine counts as dead after this time without a heartbeat."""
_RELEASED = ".released"
"""Suffix of the file that releases a record."""

_RECORD = re.compile(r"[0-9]{8,20}\.(json|released)")
"""What else is in the folder, such as copies that a synchronized folder makes, is no record."""

logger = logging.getLogger(__name__)


class OwnedError(RecipeError):
    """Another process owns the folder."""


class Owner(BaseModel):
    """A record: the process that owns the folder, its machine and its job."""

    host: str
    machine: str
    """`this_machine` of the process."""
    pid: int
    started: int
    """`process_start` of the process, because the kernel reuses process ids."""
    job: str | None
    job_restart_count: int
    run_id: str | None
    meeting_point: str | None
    time: float
    user: int | None = None
    """Id of the user whose record this process may not read: the rest is not known then."""

    @classmethod
    def hidden(cls, record: Path) -> Owner:
        """The owner whose record this process may not read."""
        state = record.stat()
        return cls(
            host="",
            machine="",
            pid=0,
            started=0,
            job=None,
            job_restart_count=0,
            run_id=None,
            meeting_point=None,
            time=state.st_mtime,
            user=state.st_uid,
        )

    def describe(self) -> str:
        """The process, its machine, its job and its start, for messages."""
        if self.user is not None:
            return f"a process of the user {user_name(self.user)}"
        job = f", Slurm job {self.job}" if self.job else ""
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.time))
        return f"process {self.pid} on {self.host}{job}, since {since}"

    def alive(self) -> bool | None:
        """Whether the process runs; None if it is on another machine."""
        if self.machine != this_machine():
            return None
        return is_running(self.pid, self.started)


def succeeds(new: Owner, old: Owner) -> bool:
    """Whether `new` is a later start of the same job. It takes over even if `old` may still run,
    for example on a node that the scheduler has lost."""
    if new.job == old.job is not None and new.job_restart_count != old.job_restart_count:
        return new.job_restart_count > old.job_restart_count
    # Ranks with the same run id and meeting point belong to one torchrun, which has one generation
    # of workers at a time. A run id alone may be that of another torchrun, and a meeting point on
    # localhost does not identify a machine: in these cases the old process is looked up
    same = new.run_id == old.run_id is not None and new.meeting_point == old.meeting_point
    host = (new.meeting_point or "localhost").rsplit(":", 1)[0]
    return same and not host.startswith(("127.", "localhost", "::1"))


def user_name(number: int) -> str:
    """The name of a user, or its number where it has no name, as in many containers."""
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return str(number)


def _newest(folder: Path) -> tuple[int, Path]:
    """The highest number and its file, NUMBER.json or NUMBER.released; else (0, folder)."""
    try:
        names = [name for name in os.listdir(folder) if _RECORD.fullmatch(name)]
    except (FileNotFoundError, NotADirectoryError):
        names = []
    records = ((int(name.split(".")[0]), folder / name) for name in names)
    return max(records, default=(0, folder))


def _read(record: Path) -> Owner | None:
    """The record; None if it does not exist, was released or is still being written."""
    try:
        return Owner.model_validate_json(record.read_bytes()) if record.is_file() else None
    except (OSError, ValueError) as error:
        with contextlib.suppress(OSError):
            if isinstance(error, PermissionError) and record.suffix == ".json":
                return Owner.hidden(record)
        return None


def _touched(record: Path) -> float:
    """Time of a record's last heartbeat; 0 if it does not exist."""
    try:
        return record.stat().st_mtime
    except OSError:
        return 0.0


def current_owner(run_dir: Path) -> tuple[Owner, bool | None] | None:
    """The owner of a run folder and whether it is alive (`Owner.alive`); None if there is none."""
    owner = _read(_newest(run_dir / "owner")[1])
    return None if owner is None else (owner, owner.alive())


def last_heartbeat(run_dir: Path) -> float:
    """Time of the owner's last heartbeat, by the clock of the file server; 0: there is none."""
    return _touched(_newest(run_dir / "owner")[1])


class Silence:
    """How long the owner of a folder has sent no heartbeat, as far as this process has seen."""

    def __init__(self, run_dir: Path) -> None:
        self._folder = run_dir / "owner"
        self._seen: tuple[Path, float] | None = None
        self._since = 0.0

    def seconds(self) -> float:
        """Since the last change of the record or of its time. Must be called again and again."""
        _, record = _newest(self._folder)
        if (seen := (record, _touched(record))) != self._seen:
            self._seen, self._since = seen, time.monotonic()
        return time.monotonic() - self._since

    def ended_lease(self) -> bool:
        """Whether it is so long that an owner on another machine counts as dead."""
        return self.seconds() >= LEASE_SECONDS


class Ownership:
    """The lock, held by this process (`take`) or by rank 0 of its run (`follow`)."""

    def __init__(self, record: Path, *, own: bool) -> None:
        self._record, self._own = record, own
        self._released = threading.Event()
        if own:  # not part of the watchdog, because it runs from before torch is imported
            threading.Thread(target=self._touch, name="owner", daemon=True).start()

    @classmethod
    def take(
        cls,
        run_dir: Path,
        environment: Environment,
        *,
        refuse: Callable[[], object] = lambda: None,
        silence: Silence | None = None,
    ) -> Ownership:
        """Takes the lock for this process.

        Waits until LEASE_SECONDS of silence, which may have begun before, if the last owner was on
        another machine and did not release the folder. Raises RecipeError, and changes nothing, if
        another job owns the folder.
        refuse: called once the lock is free. If it raises, nothing is changed either: a start that
        is refused does not fence off an owner that may still run.
        """
        silence = silence or Silence(run_dir)
        folder = run_dir / "owner"
        mine = Owner(
            host=socket.gethostname(),
            machine=this_machine(),
            pid=os.getpid(),
            started=process_start(os.getpid()) or 0,
            job=environment.job,
            job_restart_count=environment.job_restart_count,
            run_id=environment.run_id,
            meeting_point=environment.meeting_point,
            time=time.time(),
        )
        while True:
            number, newest = _newest(folder)
            owner = _read_complete(newest)
            if owner is not None and not succeeds(mine, owner):
                _refuse_if_alive(run_dir, owner, newest, silence)
            refuse()
            record = folder / f"{number + 1:08}.json"
            try:
                folder.mkdir(parents=True, exist_ok=True)
                if _create(record, mine):
                    return cls(record, own=True)
            except OSError as error:
                text = f"run.dir: {run_dir} cannot be written to: {error.strerror}"
                raise RecipeError(text) from None
            # Another process was faster: look at its record

    @classmethod
    def follow(cls, run_dir: Path, name: str) -> Ownership:
        """The lock on the other ranks of the run, by the name of rank 0's record."""
        return cls(run_dir / "owner" / name, own=False)

    @property
    def name(self) -> str:
        """The name of the record."""
        return self._record.name

    def process_of(self, name: str) -> Owner | None:
        """The process of an earlier record, by its name; None if it is not known."""
        return _read(self._record.with_name(name))

    def check(self) -> None:
        """Raises TrainingError (reason superseded) if another job took over."""
        _, newest = _newest(self._record.parent)
        if newest.stem == self._record.stem:
            return
        owner = _read(newest)
        new = owner.describe() if owner is not None else "another process"
        text = f"{self._record.parent.parent} now belongs to {new}; "
        raise TrainingError(f"{text}this run ends, and writes nothing more", reason="superseded")

    def release(self) -> None:
        """Releases the lock, so that the next job need not check whether this process has ended."""
        if not self._own or self._released.is_set():
            return
        self._released.set()
        with contextlib.suppress(OSError, TrainingError):
            self.check()
            self._record.with_suffix(_RELEASED).touch()

    def _touch(self) -> None:
        while not self._released.wait(TOUCH_SECONDS):
            with contextlib.suppress(OSError):
                os.utime(self._record)


def _read_complete(record: Path) -> Owner | None:
    """Reads a record, and waits up to a second if it is still being written.

    None: there is no owner, or it died before its record was complete.
    """
    for _ in range(10):
        if (owner := _read(record)) is not None or record.suffix != ".json":
            return owner
        time.sleep(0.1)
    return None


def _create(record: Path, owner: Owner) -> bool:
    """Creates a record. Returns False if that number exists already."""
    try:
        # For its user only: the ranks' store has no password, and the record has its port
        write_file(record, (owner.model_dump_json(indent=1) + "\n").encode(), new=True, mode=0o600)
    except FileExistsError:
        return False
    return True


def _refuse_if_alive(run_dir: Path, owner: Owner, record: Path, silence: Silence) -> None:
    """Raises OwnedError if the owner is alive; returns if it is gone."""
    refusal = OwnedError(
        f"run.dir: {run_dir} is in use: {owner.describe()}; nothing was changed there. "
        f"Wait for that run, stop it (touch {run_dir}/stop), or give another run.dir"
    )
    alive, touched = owner.alive(), _touched(record)
    left = LEASE_SECONDS - silence.seconds()
    if alive:
        raise refusal
    if alive is False or left <= 0:
        return
    last = f"{run_dir} was last written to by {owner.describe()}"
    logger.warning(f"{last}: waiting up to {left:.0f} s for a heartbeat")
    deadline = time.monotonic() + left
    while time.monotonic() < deadline:
        time.sleep(min(1.0, LEASE_SECONDS / 10))
        if _newest(record.parent)[1] != record:
            return  # released, or taken by another process: the caller looks again
        if _touched(record) != touched:
            raise refusal
