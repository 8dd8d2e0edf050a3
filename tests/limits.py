"""Ends tests that hang and processes that tests leave behind.

Each session of pytest (with xdist, each test process) sets an environment variable that all
processes inherit which it starts. Workers of torchrun and jobs of Slurm are found by it, although
they have their own process groups.
"""

import contextlib
import faulthandler
import os
import signal
import threading
import time
import uuid
from pathlib import Path

MARK = "LAUNCHER_TEST_RUN"
SESSION = uuid.uuid4().hex
"""Value of the variable in this session, with which the values of all its runs begin."""
SECONDS = 700
"""Time limit for a test with its fixtures. It is for hangs: no test takes half as long in CI."""
ENDING_SECONDS = 30
"""Time for processes to end after the last test."""
_sleep = time.sleep  # tests replace time.sleep
_HELPERS = ("multiprocessing.resource_tracker", "multiprocessing.forkserver", "compile_worker")
"""Processes that Python or torch starts once. They end with the test process."""


def take_signals():
    """Gives signals that this process ignores or blocks, as after `nohup` or `&` in a script, an empty
    handler: it still survives them, and the programs that tests start have the default."""
    numbers = (signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1, signal.SIGQUIT)
    for number in numbers:
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)


def marked_processes(mark):
    """Returns the command lines of the live processes whose mark begins with this, by id."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if f"{MARK}={mark}".encode() in (folder / "environ").read_bytes():
                found[int(folder.name)] = (folder / "cmdline").read_text().replace("\0", " ")
        except OSError:
            continue
    return found


def kill(mark):
    while left := marked_processes(mark):
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


def left_behind(mark):
    """Returns the processes that do not end in time, and kills them."""

    def running():
        found = marked_processes(mark)
        return {pid: line for pid, line in found.items() if not any(h in line for h in _HELPERS)}

    deadline = time.monotonic() + ENDING_SECONDS
    while (left := running()) and time.monotonic() < deadline:
        time.sleep(0.1)
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return list(left.values())


class TimeLimit:
    """Ends a test that takes too long, by a thread.

    It prints the stacks of this process and kills all processes that it started. The test, which
    usually waits for one of them, then fails. If it does not, this process ends after a minute, and
    xdist goes on with another one.
    """

    def __init__(self, stream, *, mark=SESSION, seconds=SECONDS):
        """stream: a file that pytest does not capture. mark: of the processes to kill."""
        self._stream, self._mark, self._seconds = stream, mark, seconds
        self._test, self._deadline = None, 0.0
        threading.Thread(target=self._watch, name="time limit", daemon=True).start()

    def begin(self, test):
        self._deadline, self._test = time.monotonic() + self._seconds, test

    def end(self):
        self._test = None

    def _watch(self):
        # Tests of signals need them in the main thread
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        while True:
            _sleep(1)
            test = self._test
            if test is None or time.monotonic() < self._deadline:
                continue
            print(f"\n{test} did not end in {self._seconds} s", file=self._stream, flush=True)
            faulthandler.dump_traceback(self._stream)
            for line in marked_processes(self._mark).values():
                print(f"process: {line[:300]}", file=self._stream, flush=True)
            kill(self._mark)
            _sleep(60)
            if self._test == test:
                os._exit(1)


def logs(folder):
    """Returns the last lines of the newest logs in a folder, for the report of a failed test."""
    patterns = ("*.log", "status.json", "events.jsonl", "log/hang/*.txt")
    files = {file for pattern in patterns for file in folder.rglob(pattern) if file.is_file()}
    parts = []
    for file in sorted(files, key=lambda file: file.stat().st_mtime)[-8:]:
        lines = file.read_text(errors="replace").splitlines()[-20:]
        parts += [f"{file}:", *(line[:500] for line in lines)]
    return "\n".join(parts)
