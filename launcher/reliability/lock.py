"""The lock of a run folder: one job at a time may write there.

RUN_DIR/owner holds numbered records, and the highest number owns the folder. To take the folder is
to create the next number, which a file system lets only one process do (O_EXCL, on NFS too).
Records are never replaced or removed, so two processes that find the same dead owner cannot both
succeed it. The owner touches its record as a heartbeat. An owner that finds a higher number is
fenced off: it writes nothing more.

Clocks of different machines are never compared. On the owner's machine its process is looked up.
Elsewhere its record is watched, for longer than the interval between heartbeats and the time for
which an NFS client caches a folder (a minute by default).

Standard library only: a folder is refused before torch is imported.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import logging
import os
import socket
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from launcher.distributed.environment import Environment
from launcher.errors import RecipeError, TrainingError

TOUCH_SECONDS = 15.0
"""Between heartbeats."""
LEASE_SECONDS = 120.0
"""An owner on another machine without a heartbeat for so long is gone."""
_RELEASED = ".released"
"""Suffix of the file that releases a record."""

logger = logging.getLogger(__name__)


class OwnedError(RecipeError):
    """Another process owns the folder."""


@dataclass(frozen=True, kw_only=True)
class Owner:
    """A record: the process that owns the folder, its machine and its job."""

    host: str
    machine: str
    """`this_machine` of the process."""
    pid: int
    started: int
    """`process_start`: the kernel reuses process ids."""
    job: str | None
    job_restart_count: int
    run_id: str | None
    meeting_point: str | None
    time: float

    def describe(self) -> str:
        job = f", Slurm job {self.job}" if self.job else ""
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.time))
        return f"process {self.pid} on {self.host}{job}, since {since}"

    @classmethod
    def new(cls, environment: Environment) -> Owner:
        return cls(
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

    def alive(self) -> bool | None:
        """Whether the process runs; None: it is on another machine."""
        if self.machine != this_machine():
            return None
        return process_start(self.pid) == self.started


def process_start(pid: int) -> int | None:
    """Start of a process in ticks since boot (proc_pid_stat(5), field 22); None: it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except (OSError, IndexError):
        return None
    return None if fields[0] in "ZX" else int(fields[19])


@functools.cache
def this_machine() -> str:
    """Boot id and process namespace: equal for processes that see each other in /proc."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return boot + os.readlink("/proc/self/ns/pid")
    except OSError:
        return socket.gethostname()


def succeeds(new: Owner, old: Owner) -> bool:
    """Whether `new` is a later start of the same job. It takes over even if `old` may still run,
    for example on a node that the scheduler has lost."""
    if new.job == old.job is not None and new.job_restart_count != old.job_restart_count:
        return new.job_restart_count > old.job_restart_count
    # Ranks with the same run id and meeting point belong to one torchrun, which has one generation
    # of workers at a time. The run id alone may be another torchrun's, and every machine has a
    # localhost: there the old process is looked up
    host = (new.meeting_point or "localhost").rsplit(":", 1)[0]
    local = host.startswith(("127.", "localhost", "::1"))
    same = new.run_id == old.run_id is not None and new.meeting_point == old.meeting_point
    return same and not local


def _records(folder: Path) -> list[tuple[int, Path]]:
    """Numbers and files, the highest last: NUMBER.json, and NUMBER.released once released."""
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    return sorted((int(name.split(".")[0]), folder / name) for name in names if name[:1].isdigit())


def _read(record: Path) -> Owner | None:
    """None: released, or still being written."""
    try:
        values = json.loads(record.read_text())
        return Owner(**{field.name: values[field.name] for field in dataclasses.fields(Owner)})
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _touched(record: Path) -> int | None:
    try:
        return record.stat().st_mtime_ns
    except OSError:
        return None


def current_owner(run_dir: Path) -> tuple[Owner, bool | None] | None:
    """The owner of a run folder, and whether it is alive; None: there is no owner.

    Alive is None for an owner on another machine without a recent heartbeat, by clocks that may
    differ.
    """
    records = _records(run_dir / "owner")
    owner = _read(records[-1][1]) if records else None
    if owner is None:  # also after a release
        return None
    alive, touched = owner.alive(), _touched(records[-1][1])
    if alive is None and touched and time.time() - touched / 1e9 < LEASE_SECONDS:
        alive = True
    return owner, alive


class Ownership:
    """The lock, held by this process (`take`) or by rank 0 of its run (`follow`)."""

    def __init__(self, record: Path, *, own: bool) -> None:
        self._record, self._own = record, own
        self._number = int(record.name.split(".")[0])
        self._released = threading.Event()
        if own:  # not part of the watchdog, because it runs from before torch is imported
            threading.Thread(target=self._touch, name="owner", daemon=True).start()

    @classmethod
    def take(cls, run_dir: Path, environment: Environment) -> Ownership:
        """Takes the lock of a run folder, which need not exist.

        Waits for up to LEASE_SECONDS if the owner was on another machine and did not release it.
        Raises RecipeError if another job owns the folder; nothing was changed then.
        """
        folder, mine = run_dir / "owner", Owner.new(environment)
        while True:
            records = _records(folder)
            number, last = records[-1] if records else (0, folder)
            owner = None if last.name.endswith(_RELEASED) else _read_complete(last)
            if owner is not None and not succeeds(mine, owner):
                _refuse_if_alive(run_dir, owner, last)
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
        """On the other ranks of the run. name: that of rank 0's record."""
        return cls(run_dir / "owner" / name, own=False)

    @property
    def name(self) -> str:
        return self._record.name

    def check(self) -> None:
        """Before each write. Raises TrainingError (reason superseded) if another job took over."""
        records = _records(self._record.parent)
        if records and records[-1][0] == self._number:
            return
        owner = _read(records[-1][1]) if records else None
        problem = "has lost this run's record in RUN_DIR/owner"
        if owner is not None:
            problem = f"now belongs to {owner.describe()}"
        text = f"{self._record.parent.parent} {problem}; this run ends, and writes nothing more"
        raise TrainingError(text, reason="superseded")

    def release(self) -> None:
        """Releases the lock: the next job need not find out whether this process is gone."""
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
    """None: no owner. A process whose record stays unreadable for a second has died."""
    for _ in range(10):
        if (owner := _read(record)) is not None or not record.is_file():
            return owner
        time.sleep(0.1)
    return None


def _create(record: Path, owner: Owner) -> bool:
    """False if the name exists."""
    try:
        with record.open("x") as stream:
            stream.write(json.dumps(dataclasses.asdict(owner), indent=1) + "\n")
            stream.flush()
            os.fsync(stream.fileno())
    except FileExistsError:
        return False
    except OSError:  # the disk is full
        record.unlink(missing_ok=True)
        raise
    return True


def _refuse_if_alive(run_dir: Path, owner: Owner, record: Path) -> None:
    """Raises RecipeError if the owner is alive; returns if it is gone."""
    refusal = OwnedError(
        f"run.dir: {run_dir} is in use: {owner.describe()}; nothing was changed there. "
        f"Wait for that run, stop it (touch {run_dir}/stop), or give another run.dir"
    )
    alive, touched = owner.alive(), _touched(record)
    if alive:
        raise refusal
    if alive is False:
        return
    last, lease = f"{run_dir} was last written to by {owner.describe()}", f"{LEASE_SECONDS:.0f} s"
    logger.warning("%s: waiting up to %s for a heartbeat", last, lease)
    deadline = time.monotonic() + LEASE_SECONDS
    while time.monotonic() < deadline:
        time.sleep(min(1.0, LEASE_SECONDS / 10))
        if _records(record.parent)[-1][1] != record:
            return  # released or taken, which creating the next number will show
        if _touched(record) != touched:
            raise refusal
