"""Who may write into a run's folder: one job at a time.

RUN_DIR/owner holds numbered records; the highest number is the owner. To take the folder is to create the next number,
which a file system gives to one process only (a hard link fails where the name is there, on NFS too); nothing is ever
replaced, so two that find the same dead owner cannot both succeed it. An owner shows that it lives by touching its record.
One that finds a higher number than its own was superseded: it writes nothing more.

No clock is compared with another machine's. On the owner's machine its process is looked for; elsewhere its record is
watched, for longer than the owner takes to touch it and a client of NFS may remember a folder (a minute by default).

Standard library only: a folder is refused before torch is imported.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from launcher.distributed.environment import Environment
from launcher.errors import RecipeError, TrainingError

TOUCH_SECONDS = 15.0
LEASE_SECONDS = 120.0
_ABANDONED_SECONDS = 3600.0
"""A record untouched for so long by this machine's clock and by the file server's is not watched first: no clock is so wrong."""
_RELEASED = "released"


@dataclass(frozen=True, kw_only=True)
class Owner:
    """A record: which process owns the folder, on which machine, for which job."""

    token: str
    host: str
    machine: str
    """Boot id and process namespace: where it is ours, the process can be looked for."""
    pid: int
    started: int
    """When the process started, in the kernel's ticks: a process id is used again, with another start."""
    agent: str | None
    """torchrun's agent, as `machine/pid/started`."""
    job: str | None
    job_restart_count: int
    run_id: str | None
    meeting_point: str | None
    restart_count: int
    time: float

    def describe(self) -> str:
        """For a message."""
        job = f", Slurm job {self.job}" if self.job else ""
        return f"process {self.pid} on {self.host}{job}, since {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(self.time))}"


def process_start(pid: int) -> int | None:
    """Start of a process in ticks since boot (proc_pid_stat(5), field 22); None: there is none, or it only waits to be reaped."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except (OSError, IndexError):
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def this_machine() -> str:
    """The same for processes that can see one another in /proc, and for no others."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/pid")
    except OSError:
        return socket.gethostname()


def _mine(environment: Environment) -> Owner:
    machine = this_machine()
    agent = f"{machine}/{environment.parent}/{process_start(environment.parent)}" if environment.torchrun else None
    return Owner(
        token=uuid.uuid4().hex,
        host=socket.gethostname(),
        machine=machine,
        pid=os.getpid(),
        started=process_start(os.getpid()) or 0,
        agent=agent,
        job=environment.job,
        job_restart_count=environment.job_restart_count,
        run_id=environment.run_id,
        meeting_point=environment.meeting_point,
        restart_count=environment.restart_count,
        time=time.time(),
    )


def succeeds(new: Owner, old: Owner) -> bool:
    """Whether `new` is a later start of what `old` is of, so that it takes over though `old` may still run on a lost node."""
    if new.job is not None and new.job == old.job:
        if new.job_restart_count != old.job_restart_count:
            return new.job_restart_count > old.job_restart_count
        if new.run_id == old.run_id is not None and new.restart_count > old.restart_count:
            return True
    if new.agent is not None and new.agent == old.agent:
        return True  # an agent has one generation of workers at a time
    # Who meets at the same place under the same id is of one torchrun, which has one generation at a time too; the id alone
    # may be another torchrun's, and `localhost` is every machine. (Not by the restart count: each agent has its own.)
    host = (new.meeting_point or "localhost").rsplit(":", 1)[0]
    same = new.run_id == old.run_id is not None and new.meeting_point == old.meeting_point
    return same and not host.startswith(("127.", "localhost", "::1"))


def _records(folder: Path) -> list[tuple[int, Path]]:
    """Numbers and files, the highest last."""
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    return sorted((int(name.split(".")[0]), folder / name) for name in names if name[:1].isdigit())


def _read(record: Path) -> Owner | None:
    """None: released, or not to be read (a file system without hard links shows a record before it is whole)."""
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
    """The owner of a run's folder, and whether it lives; None for that: on another machine, silent for longer than it should be
    by clocks that may differ. None: nobody owns it."""
    records = _records(run_dir / "owner")
    if not records or records[-1][1].name.endswith(_RELEASED):
        return None
    record = records[-1][1]
    owner = _read(record)
    if owner is None:
        return None
    if owner.machine == this_machine():
        return owner, process_start(owner.pid) == owner.started
    touched = _touched(record)
    return owner, True if touched is not None and time.time() - touched / 1e9 < LEASE_SECONDS else None


class Ownership:
    """A folder that is owned by this process (`take`), or by a rank that this one trains with (`follow`)."""

    def __init__(self, record: Path, *, own: bool) -> None:
        self._record, self._own = record, own
        self._number = int(record.name.split(".")[0])
        self._released = threading.Event()
        if own:
            threading.Thread(target=self._touch, name="owner", daemon=True).start()

    @classmethod
    def take(cls, run_dir: Path, environment: Environment, *, say: Callable[[str], None] = print) -> Ownership:
        """Takes a run's folder, which need not exist.

        Waits for up to LEASE_SECONDS where the owner was on another machine and nothing is known of its end.
        Raises RecipeError where another job owns it, and has then changed nothing.
        """
        folder, mine = run_dir / "owner", _mine(environment)
        while True:
            records = _records(folder)
            number, last = records[-1] if records else (0, folder)
            owner = None if not records or last.name.endswith(_RELEASED) else _read_whole(last)
            if owner is not None and not succeeds(mine, owner):
                _refuse_if_alive(run_dir, owner, last, say)
            record = folder / f"{number + 1:08}.json"
            try:
                run_dir.mkdir(parents=True, exist_ok=True)
                folder.mkdir(exist_ok=True)
                created = _create(record, mine)
            except OSError as error:
                raise RecipeError(f"run.dir: {run_dir} cannot be written to: {error.strerror}") from None
            if not created:
                continue  # another process was faster: see who it is
            if _records(folder)[-1][0] != number + 1:  # it decided long ago, and others came and went since
                record.unlink(missing_ok=True)
                continue
            for older, file in records:
                if older <= number:
                    file.unlink(missing_ok=True)
            return cls(record, own=True)

    @classmethod
    def follow(cls, run_dir: Path, name: str) -> Ownership:
        """On the other ranks of the run. name: the `name` of rank 0's."""
        return cls(run_dir / "owner" / name, own=False)

    @property
    def name(self) -> str:
        """Of the record."""
        return self._record.name

    def check(self) -> None:
        """Before anything is written. Raises TrainingError (reason superseded) where the folder is another's by now."""
        records = _records(self._record.parent)
        if records and records[-1][0] == self._number:
            return
        owner = _read(records[-1][1]) if records else None
        by = f"now belongs to {owner.describe()}" if owner is not None else "has lost the record that it is this run's (RUN_DIR/owner)"
        raise TrainingError(f"{self._record.parent.parent} {by}; this run ends, and writes nothing more", reason="superseded")

    def release(self) -> None:
        """Lets the folder go: the next job need not find out whether this process is gone."""
        if not self._own or self._released.is_set():
            return
        self._released.set()
        with contextlib.suppress(OSError, TrainingError):
            self.check()
            self._record.rename(self._record.with_suffix(f".{_RELEASED}"))

    def _touch(self) -> None:
        while not self._released.wait(TOUCH_SECONDS):
            with contextlib.suppress(OSError):
                os.utime(self._record)


def _read_whole(record: Path) -> Owner | None:
    """None: nobody's. A record that cannot be read for a second is broken: what wrote it died."""
    for _ in range(10):
        if (owner := _read(record)) is not None or not record.exists():
            return owner
        time.sleep(0.1)
    return None


def _create(record: Path, owner: Owner) -> bool:
    """False where the name is there already."""
    text = json.dumps(dataclasses.asdict(owner), indent=1) + "\n"
    scratch = record.parent / f".{owner.token}"
    try:
        with scratch.open("w") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        try:
            os.link(scratch, record)
        except FileExistsError:
            # On NFS the answer to a link that was made may be lost, and the repeated question fails
            return scratch.stat().st_nlink == 2
        except OSError:  # a file system without hard links
            try:
                with record.open("x") as stream:
                    stream.write(text)
            except FileExistsError:
                return False
        return True
    finally:
        scratch.unlink(missing_ok=True)


def _refuse_if_alive(run_dir: Path, owner: Owner, record: Path, say: Callable[[str], None]) -> None:
    """Returns where the owner is gone; raises RecipeError where it lives."""
    refusal = RecipeError(
        f"run.dir: {run_dir} belongs to a run that goes on: {owner.describe()}; nothing was changed there. "
        f"Wait for it, end it (touch {run_dir}/stop), or give another run.dir"
    )
    if owner.machine == this_machine():
        if process_start(owner.pid) == owner.started:
            raise refusal
        return
    touched = _touched(record)
    if touched is None:
        return
    age = time.time() - max(touched / 1e9, owner.time)
    if age > _ABANDONED_SECONDS:
        return
    say(f"{run_dir} was last written to by {owner.describe()}: watching for a sign of life, for up to {LEASE_SECONDS:.0f} s")
    deadline = time.monotonic() + LEASE_SECONDS
    while time.monotonic() < deadline:
        time.sleep(min(1.0, LEASE_SECONDS / 10))
        now = _touched(record)
        if now is None:
            return  # released, or taken: seen when the next number is created
        if now != touched:
            raise refusal
