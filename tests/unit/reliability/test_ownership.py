"""The lock of a run folder."""

import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from launcher.distributed import processes
from launcher.distributed.environment import Environment
from launcher.errors import RecipeError, TrainingError
from launcher.reliability import lock
from launcher.reliability.json_files import read_jsonl
from launcher.reliability.lock import Ownership, current_owner, succeeds
from launcher.reliability.run_directory import RunFolder
from tests import REPOSITORY

SINGLE_PROCESS = Environment()
RACE = """
import sys, time
from pathlib import Path
from launcher.distributed.environment import read_environment
from launcher.errors import RecipeError
from launcher.reliability.lock import Ownership
while time.time() < float(sys.argv[2]):
    pass
try:
    Ownership.take(Path(sys.argv[1]), read_environment())
    print("mine", flush=True)
    sys.stdin.read()
except RecipeError as error:
    print(error)
"""


def record(run_dir):
    return max((run_dir / "owner").glob("*.json"))


HIDDEN = """
import os, re, sys, tempfile, time, traceback
from pathlib import Path
from launcher.distributed.environment import Environment
from launcher.distributed.processes import is_running, process_start
from launcher.errors import RecipeError
from launcher.reliability import lock

lock.TOUCH_SECONDS, lock.LEASE_SECONDS = 0.1, 60.0
ready = os.pipe()

def as_user(user, function):
    if (process := os.fork()) == 0:
        try:
            os.setgroups([])
            os.setgid(user)
            os.setuid(user)
            function()
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        os._exit(0)
    return process

def own():
    lock.Ownership.take(run, Environment())
    os.chmod(run / "owner", 0o777)
    os.write(ready[1], b"x")
    time.sleep(100)

def look():
    assert process_start(first) is None and is_running(first, start)
    assert lock.current_owner(run)[1] is None  # nobody can tell, but its heartbeat
    try:
        lock.Ownership.take(run, Environment())
    except RecipeError as error:
        print(str(error).partition(" is ")[2])

def look_at_readable_record():
    owner, alive = lock.current_owner(run)
    print(owner.pid == first, alive)

with tempfile.TemporaryDirectory() as folder:
    os.chmod(folder, 0o777)
    run = Path(folder) / "run"
    first = as_user(1234, own)
    try:
        os.read(ready[0], 1)
        start = process_start(first)
        os.waitpid(as_user(1235, look), 0)
        (record,) = (run / "owner").iterdir()  # the lock was not taken
        print(oct(record.stat().st_mode & 0o777))
        record.chmod(0o644)  # as an earlier version wrote it
        os.waitpid(as_user(1235, look_at_readable_record), 0)
    finally:
        os.kill(first, 9)
        os.waitpid(first, 0)
    print(is_running(first, start), lock.current_owner(run)[1], flush=True)
"""


def rewrite(run_dir, **changes):
    """Changes fields of the owner in the newest record."""
    file = record(run_dir)
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.fixture
def take(tmp_path):
    """A function that locks tmp_path/run. All locks are released at the end of the test."""
    taken = []

    def take(environment=SINGLE_PROCESS):
        taken.append(Ownership.take(tmp_path / "run", environment))
        return taken[-1]

    yield take
    for each in taken:
        each.release()


@pytest.fixture
def frequent_heartbeats(monkeypatch):
    monkeypatch.setattr(lock, "TOUCH_SECONDS", 0.1)
    monkeypatch.setattr(lock, "LEASE_SECONDS", 120.0)


def file_contents(folder):
    return {str(file): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def test_only_one_of_several_processes_gets_the_lock(tmp_path):
    command = [sys.executable, "-c", RACE, str(tmp_path / "run"), str(time.time() + 1.0)]
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    racers = [subprocess.Popen(command, cwd=REPOSITORY, **pipes) for _ in range(4)]
    try:
        lines = [racer.stdout.readline().strip() for racer in racers]
        assert sorted(line == "mine" for line in lines) == [False, False, False, True], lines
        winner = racers[lines.index("mine")]
        for line in lines:
            assert line == "mine" or f"is in use: process {winner.pid} on " in line
        before = file_contents(tmp_path)
        assert [Path(name).name for name in before] == ["00000001.json"]
        text = f"process {winner.pid} on .*nothing was changed there"
        with pytest.raises(RecipeError, match=text):
            Ownership.take(tmp_path / "run", SINGLE_PROCESS)
        assert file_contents(tmp_path) == before
        winner.kill()  # a killed process does not release the lock
        winner.wait(10)
        after = Ownership.take(tmp_path / "run", SINGLE_PROCESS)
        assert after.name == "00000002.json"
        after.release()
    finally:
        for racer in racers:
            racer.kill()
            racer.communicate(timeout=10)


def test_released_and_stale_locks_can_be_taken(take, tmp_path):
    first = take()
    assert current_owner(tmp_path / "run")[1] is True
    first.release()
    assert current_owner(tmp_path / "run") is None
    take()
    started = json.loads(record(tmp_path / "run").read_text())["started"]
    with pytest.raises(RecipeError):
        take()
    rewrite(tmp_path / "run", started=started - 1)
    assert current_owner(tmp_path / "run")[1] is False
    assert take().name == "00000003.json"


def test_remote_heartbeat_is_checked_without_comparing_clocks(
    take, tmp_path, frequent_heartbeats, monkeypatch, caplog
):
    before = set(threading.enumerate())
    own_lock = take()
    (heart,) = set(threading.enumerate()) - before
    rewrite(tmp_path / "run", machine="another", host="node7", pid=1)
    with pytest.raises(RecipeError, match="process 1 on node7"):
        take()  # the owner updates the time of its record
    own_lock._released.set()
    heart.join()
    monkeypatch.setattr(lock, "LEASE_SECONDS", 1.0)
    os.utime(record(tmp_path / "run"), (4e9, 4e9))  # the clock of the file server is far ahead
    assert take().name == "00000002.json"
    assert re.search(r"process 1 on node7.*waiting up to 1 s for a heartbeat", caplog.text)


def can_hide_processes():
    command = ["unshare", "--mount", "mount", "-t", "proc", "-o", "hidepid=2", "proc", "/proc"]
    if os.getuid() != 0 or shutil.which("unshare") is None:
        return False
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


@pytest.mark.skipif(not can_hide_processes(), reason="requires root and CAP_SYS_ADMIN")
def test_a_run_of_another_user_is_alive_though_its_process_is_hidden():
    """With hidepid=2, /proc has no processes of other users. Only its user may read a record."""
    mounted = 'mount -t proc -o hidepid=2 proc /proc && exec "$@"'
    command = ["unshare", "--mount", "sh", "-c", mounted, "sh", sys.executable, "-c", HIDDEN]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=100)
    lines = done.stdout.splitlines()
    assert (done.returncode, len(lines)) == (0, 4), done.stderr
    assert lines[0].startswith("in use: a process of the user 1234; nothing was changed there")
    assert lines[1:] == ["0o600", "True True", "False False"]


@pytest.mark.parametrize(
    ("answer", "alive"),
    [(None, True), (PermissionError(), True), (ProcessLookupError(), False)],
)
def test_a_process_that_cannot_be_read_is_asked(monkeypatch, answer, alive):
    def kill(pid, number):
        assert number == 0
        if answer is not None:
            raise answer

    def unreadable(pid):
        raise PermissionError

    monkeypatch.setattr(processes, "_start", unreadable)
    monkeypatch.setattr(processes.os, "kill", kill)
    assert processes.is_running(5, 7) is alive


def test_a_refused_start_does_not_take_the_lock(take, tmp_path):
    """Also where the last owner may still run: on a node that the scheduler has lost."""
    job = dataclasses.replace(SINGLE_PROCESS, job="17")
    first = take(job)
    rewrite(tmp_path / "run", machine="another", host="node7")
    before = file_contents(tmp_path)

    def refuse():
        raise RecipeError("another recipe")

    later = dataclasses.replace(job, job_restart_count=1)
    with pytest.raises(RecipeError, match="another recipe"):
        RunFolder(tmp_path / "run").take(later, refuse=refuse)
    assert file_contents(tmp_path) == before
    first.check()
    with pytest.raises(RecipeError, match="another recipe"):
        RunFolder(tmp_path / "new").take(SINGLE_PROCESS, refuse=refuse)
    assert not (tmp_path / "new").exists()


def test_restarted_job_takes_over_and_fences_off_the_owner(take, tmp_path, caplog):
    job = dataclasses.replace(SINGLE_PROCESS, job="17")
    folder = RunFolder(tmp_path / "run")
    folder.ownership = take(job)
    folder.create("a: 1\n")
    folder.write_status("running", step=3)
    folder.note("started")
    follower = Ownership.follow(tmp_path / "run", folder.ownership.name)
    follower.check()
    with pytest.raises(RecipeError, match="Slurm job 17"):
        take(job)
    rewrite(tmp_path / "run", machine="another", host="node7")  # Slurm lost the node
    take(dataclasses.replace(job, job_restart_count=1))
    assert "heartbeat" not in caplog.text
    before = file_contents(tmp_path)
    writes = (
        lambda: folder.write_status("running", step=4),
        lambda: folder.note("saved", step=4),
        lambda: folder.create("a: 2\n"),
        follower.check,
    )
    for write in writes:
        with pytest.raises(TrainingError, match=r"Slurm job 17.*writes nothing more") as raised:
            write()
        assert raised.value.reason == "superseded"
    folder.release()
    assert file_contents(tmp_path) == before


def owner(job=None, job_restart_count=0, run_id=None, meeting_point=None):
    return lock.Owner(
        host="",
        machine="",
        pid=1,
        started=1,
        time=0.0,
        job=job,
        job_restart_count=job_restart_count,
        run_id=run_id,
        meeting_point=meeting_point,
    )


ON_NODE, ON_LOCALHOST = (
    owner(run_id="x", meeting_point="node1:1"),
    owner(run_id="x", meeting_point="::1:1"),
)


@pytest.mark.parametrize(
    ("new", "old", "later"),
    [
        (owner("1", 1), owner("1"), True),
        (owner("1"), owner("1", 1), False),
        (owner("2", 1), owner("1"), False),
        (owner(), owner(), False),
        (ON_NODE, ON_NODE, True),
        (
            ON_NODE,
            owner(run_id="x", meeting_point="node2:1"),
            False,
        ),  # another torchrun with the same id
        (ON_LOCALHOST, ON_LOCALHOST, False),  # localhost does not identify a machine
    ],
)
def test_succeeds_only_for_later_starts_of_a_job(new, old, later):
    assert succeeds(new, old) is later


def test_slow_process_does_not_overwrite_a_newer_lock(take, tmp_path, monkeypatch):
    """The process finds owner 1 dead. It creates record 2 after others created records 2 and 3."""
    take()
    rewrite(tmp_path / "run", started=0)
    create = lock._create

    def slow(record_file, owner):
        monkeypatch.setattr(lock, "_create", create)
        take().release()
        take()
        return create(record_file, owner)

    monkeypatch.setattr(lock, "_create", slow)
    with pytest.raises(RecipeError, match="is in use"):
        take()
    names = sorted(file.name for file in (tmp_path / "run/owner").iterdir())
    records = ["00000001.json", "00000002.json", "00000002.released", "00000003.json"]
    assert names == records


def test_events_count_attempts_and_skip_incomplete_lines(tmp_path):
    folder = RunFolder(tmp_path)
    folder.log.mkdir()
    folder.note("started", ranks=2)
    folder.write_status("running", step=7)
    folder.metrics.write_text('{"step": 9, "loss": 1.0}\n{"ste')
    with folder.events.open("a") as stream:
        stream.write('{"event": "sav')
    other = RunFolder(tmp_path)
    other.note("started", ranks=1)
    other.note("resumed", step=5)
    lines = read_jsonl(folder.events)
    assert [(line["event"], line["attempt"], line["ranks"]) for line in lines] == [
        ("started", 1, 2),
        ("started", 2, 1),
        ("resumed", 2, 1),
    ]
    assert (lines[1]["found"], lines[1]["found_step"]) == ("running", 9)


def test_other_files_among_the_records_are_ignored(take, tmp_path):
    take()
    for name in ("00000001 (copy).json", "00000001.json~", "9999", "2024-01-01.json", "²"):
        (tmp_path / "run/owner" / name).write_text("x")
    owner, alive = current_owner(tmp_path / "run")
    assert (owner.pid, alive) == (os.getpid(), True)
    with pytest.raises(RecipeError, match="is in use"):
        Ownership.take(tmp_path / "run", SINGLE_PROCESS)


def test_file_instead_of_run_folder_is_refused(tmp_path):
    (tmp_path / "run").write_text("")
    with pytest.raises(RecipeError, match="cannot be written to: Not a directory"):
        Ownership.take(tmp_path / "run", SINGLE_PROCESS)


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_a_start_records_the_commit(tmp_path, monkeypatch):
    """Of the folder that it was started in. Changed files are named."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    run = RunFolder(tmp_path / "run")
    run.path.mkdir()

    def recorded():
        run.note_start(SINGLE_PROCESS)
        return run.read_events()[-1]["git_commit"]

    def git(*words):
        user = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
        done = subprocess.run(["git", *user, *words], check=True, capture_output=True, text=True)
        return done.stdout.strip()

    assert recorded() is None
    (tmp_path / "file").write_text("one")
    git("init")
    git("add", "file")
    git("commit", "-m", "x")
    assert recorded() == git("rev-parse", "HEAD")
    (tmp_path / "file").write_text("two")
    assert recorded() == git("rev-parse", "HEAD") + "-dirty"
    monkeypatch.setenv("PATH", str(tmp_path))  # without git
    assert recorded() is None
