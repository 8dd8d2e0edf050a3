"""Requests to stop: SIGTERM (torchrun, Slurm), SIGINT (Ctrl-C), SIGUSR1 (Slurm's warning), SIGHUP
(a closed terminal)."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from launcher.console import say
from launcher.distributed.environment import Environment
from launcher.distributed.processes import next_signal, process_start
from launcher.distributed.spawn import end_process, end_with_parent
from launcher.errors import EXIT_DONE, EXIT_FAILED, EXIT_STOPPED, TrainingError
from launcher.reliability.run_directory import RunFolder

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
SAME_REQUEST_SECONDS = 2.0
"""A request may arrive twice: directly, and through torchrun's agent."""
_START_SECONDS = 20.0
"""Time for a rank that is asked to stop to meet the others. torchrun kills a rank after 30."""

_rank: int | None = None
"""Process id of this rank, while a StopRequest is active."""
_forked_by_main = False


def requests_to_stop() -> list[signal.Signals]:
    """The signals that are requests: not those of a terminal that the program which started this
    process has made it ignore, as nohup does with SIGHUP, and a shell with SIGINT for `&`.

    The agent of a Slurm job makes torchrun ignore SIGUSR1, so its ranks must not ask for that.
    """
    terminal = (signal.SIGHUP, signal.SIGINT)
    ignored = [number for number in terminal if signal.getsignal(number) == signal.SIG_IGN]
    return [number for number in STOP_SIGNALS if number not in ignored]


def _before_fork() -> None:
    global _forked_by_main
    _forked_by_main = threading.current_thread() is threading.main_thread()


def _in_forked_process() -> None:
    """Makes a helper process survive what is sent to the process group of its rank, and no rank.

    SIGTERM ends it, because pools of processes end their workers so.
    """
    global _rank
    if _rank is None:
        return
    rank, _rank = _rank, None
    for number in requests_to_stop():
        signal.signal(number, signal.SIG_DFL)
    with contextlib.suppress(OSError):
        os.setpgid(0, 0)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    if _forked_by_main:  # the kernel takes the thread that forks for the parent
        end_with_parent(rank)


os.register_at_fork(before=_before_fork, after_in_child=_in_forked_process)


class Repeats:
    """Notices requests that are repeated to end the run at once. Slurm's SIGTERM at the end of the
    time after its warning, SIGUSR1, is none: the run may still be saving."""

    def __init__(self) -> None:
        self._first: dict[signal.Signals, float] = {}

    def insists(self, number: signal.Signals) -> bool:
        """Whether this is a SIGINT after any earlier request, or the second SIGTERM."""
        now = time.monotonic()
        earlier = self._first.values() if number == signal.SIGINT else ()
        since = min(earlier, default=self._first.get(number, now))
        self._first.setdefault(number, now)
        known = number in (signal.SIGINT, signal.SIGTERM)
        return known and now - since > SAME_REQUEST_SECONDS


class StopRequest:
    """Remembers a request to stop; the ranks agree on it at the next step. A second SIGINT or
    SIGTERM, more than two seconds later, ends the process at once, in any phase.

    Python runs a signal handler when the main thread returns from a call, but a collective may
    never return. So the signals are blocked, and any thread reads those that arrived (`look`).
    Programs that the rank starts inherit that: a signal to the process group of the rank does not
    end them before the rank has saved. Threads that were started earlier must not exist.
    """

    def __init__(self) -> None:
        self.signal: str | None = None
        """The source of the request: the name of a signal, or a file."""
        self.watched = threading.Event()
        """The watchdog runs and acts on requests, or there is no rank any more."""
        self.on_kill: Callable[[str], int] = lambda name: EXIT_FAILED
        """Called with the name of the signal before a second SIGINT or SIGTERM ends this process;
        returns the exit status."""
        self._repeats = Repeats()
        self._requests = requests_to_stop()
        self._handlers: dict[int, Any] = {}

    def requested(self) -> bool:
        """Whether a stop was requested by now."""
        self.look()
        return self.signal is not None

    def ask(self, source: str) -> None:
        """Requests a stop without a signal."""
        self.signal = self.signal or source

    def look(self) -> None:
        """Reads the signals that arrived; from any thread."""
        while (arrived := next_signal(self._requests, 0)) is not None:
            self._note(arrived)

    def _note(self, number: signal.Signals) -> None:
        self.ask(number.name)
        if self._repeats.insists(number):
            end_process(self.on_kill(number.name))

    def __enter__(self) -> StopRequest:
        global _rank
        self._outer, _rank = _rank, os.getpid()
        self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        for number in self._requests:  # the kernel discards signals that are ignored
            handler = lambda number, _: self._note(signal.Signals(number))  # noqa: E731
            self._handlers[number] = signal.signal(number, handler)
        return self

    def __exit__(self, *_: object) -> None:
        global _rank
        self.watched.set()
        self.look()
        _rank = self._outer
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)


class StartGuard:
    """Ends a rank that is asked to stop, or whose agent ends, before its watchdog runs.

    The other ranks may not know of the request, so the rank first tries to meet them: from then on,
    the watchdogs end all ranks together. But it ends at once if it is alone, or if another rank has
    ended: torchrun ends the ranks with SIGTERM after one of them has failed.
    """

    def __init__(self, stop: StopRequest, environment: Environment) -> None:
        self.run: RunFolder | None = None
        """Rank 0: set when it has taken the folder."""
        self._stop, self._environment = stop, environment
        self._seconds = _START_SECONDS + (0 if environment.main else 3)  # rank 0 reports, so first
        threading.Thread(target=self._watch, name="start", daemon=True).start()

    def _watch(self) -> None:
        deadline = None
        environment = self._environment
        while not self._stop.watched.wait(0.2):
            if environment.torchrun and os.getppid() != environment.parent:
                end_process(EXIT_FAILED)  # torchrun's agent has ended
            if not self._stop.requested():
                continue
            if self._others_ended():
                end_process(EXIT_DONE)
            deadline = deadline or time.monotonic() + self._seconds
            if self._environment.world_size == 1 or time.monotonic() > deadline:
                self._end(self._stop.signal or "signal")

    def _others_ended(self) -> bool:
        parent = self._environment.parent
        if not self._environment.torchrun:
            return False
        try:
            children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
        except OSError:  # the agent has ended
            return True
        alive = sum(process_start(int(child)) is not None for child in children)
        return alive < self._environment.local_world_size

    def _end(self, source: str) -> NoReturn:
        if self._environment.main:
            report_stop_at_start(self.run, source)
        end_process(EXIT_DONE if self._environment.torchrun else EXIT_STOPPED)


def report_stop_at_start(run: RunFolder | None, source: str) -> None:
    """Reports that nothing was trained. `run` is None if this process has not taken a folder."""
    say(f"stopped by {source} before the first step: there is nothing to save")
    if run is not None:
        with contextlib.suppress(OSError, TrainingError):
            step = run.last_step()
            run.write_status("stopped", step=step, reason=source)
            run.note("stopped", step=step, reason=source)
            run.release()


def report_kill(run: RunFolder, name: str, *, owned: bool) -> int:
    """Reports that a second signal of this name ends the ranks of this start; returns the exit
    status. `owned`: a rank of this start has taken the folder."""
    state, step = run.outcome().get("state"), run.last_step()
    if state in ("finished", "stopped"):
        say(f"{name} again: the run is {state} already")
        return EXIT_DONE if state == "finished" else EXIT_STOPPED
    text = "the ranks are killed before the first step"
    if state is not None:
        text = "the ranks are killed; steps since the last checkpoint are lost"
        saved = run.saved_step()
        if step and saved >= step:  # such as while it is copied
            text = f"the ranks are killed; the checkpoint of step {saved} is saved"
    say(f"{name} again: {text}")
    if owned and state != "failed":
        with contextlib.suppress(OSError, TrainingError):
            run.write_status("failed", step=step, reason="killed", error=f"{name} twice: {text}")
            run.note("failed", step=step, reason="killed")
    return EXIT_FAILED
