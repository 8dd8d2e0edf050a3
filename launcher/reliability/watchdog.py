"""Two threads of each rank that notice what the training loop cannot.

`_watch_process`, without the other ranks: torchrun's agent has ended, a file asks to save or to
stop, a signal arrived, the store does not answer. `_watch_ranks`, over the store: a rank failed, a
process of this node was killed, a rank hangs. They are two because a call of the store blocks for
as long as the agent that hosts it is stopped (SIGSTOP, a frozen node).

The training loop leaves heartbeats (`Progress.beat`, a few attributes), which each rank publishes
in the store every second. Rank 0 judges them; if rank 0 is silent, the first rank that notices
does. A rank is silent if it does not publish either: its process is stopped or swapped out, or a
call keeps the interpreter's lock. Time is counted in rounds of the judging rank, so a process that
was stopped itself does not judge the others by the clock.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

from launcher.errors import EXIT_FAILED, TrainingError
from launcher.reliability import hang_report
from launcher.reliability.failures import FailureWatch
from launcher.reliability.lock import this_machine
from launcher.reliability.signals import StopRequest

_ROUND_SECONDS = 1.0
"""At most; with a short run.hang_timeout a tenth of it."""
_GRACE_SECONDS = 4.0
"""Time for this rank to end by itself after another one has failed."""
_NEIGHBOUR_LOST_SECONDS = 3.0
"""Time that the store may fail before a lost neighbour is reported without it."""
_STORE_LOST_SECONDS = 10.0
"""Time that the store may fail before it counts as gone."""
_DUMP_SECONDS = 5.0
"""Time for the ranks to write their stacks when one hangs."""
# Keys of the store
_JUDGES, _VERDICT = "watch/judges", "watch/verdict"
_STATE, _DUMPED = "watch/{}".format, "watch/dumped/{}".format

State = dict[str, Any]
"""What a rank publishes."""


@contextlib.contextmanager
def watching(failures: FailureWatch, *, stop: StopRequest, hang_timeout: float) -> Iterator[Watch]:
    """Watches as long as the context lasts. Every rank must enter it."""
    watch = Watch(failures, stop=stop, hang_timeout=hang_timeout)
    watch.start()
    try:
        yield watch
    finally:
        watch.close()


class Watch:
    """The watchdog of one rank."""

    def __init__(self, failures: FailureWatch, *, stop: StopRequest, hang_timeout: float) -> None:
        self._failures, self._stop, self._hang_timeout = failures, stop, hang_timeout
        self._environment, self._run = failures.environment, failures.run
        self._progress, self._store = failures.progress, failures.store
        self._rank, self._ranks = failures.rank, failures.ranks
        self._period = min(_ROUND_SECONDS, max(0.2, hang_timeout / 10))
        self._silent_after = min(0.8 * hang_timeout, max(2.0, 5 * self._period))
        self._save_file, self._stop_file = self._run.path / "save", self._run.path / "stop"
        self._save = self._stopped_by_file = False
        self._position = (-1, -1)
        self._idle = 0.0
        """Seconds without a heartbeat of the training loop."""
        self._published = 0
        self._dumped = False
        self._silence: dict[int, tuple[int, float]] = {}
        """By rank: the last number it published, and the seconds since."""
        self._answered = time.monotonic()
        """When the store last answered or failed."""
        self._failing_since: float | None = None
        """When the store first failed, without an answer since."""
        self._claimed_at: float | None = None
        """When this rank noticed that another one reports."""
        self._done = threading.Event()
        self._threads = [
            threading.Thread(target=target, name="watch", daemon=True)
            for target in (self._watch_process, self._watch_ranks)
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """The training loop has ended, with success or not."""
        self._done.set()
        # A thread that is still in the store when the interpreter ends would abort it
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(timeout=11)
        with contextlib.suppress(Exception):
            self._store.set(_STATE(self._rank), json.dumps({"left": True}))
        faulthandler.cancel_dump_traceback_later()
        if self._stopped_by_file:
            self._stop_file.unlink(missing_ok=True)

    def save_requested(self) -> bool:
        """Rank 0: whether RUN_DIR/save was created since `save_done`."""
        return self._save

    def save_done(self) -> None:
        """Rank 0: the requested checkpoint is being written."""
        self._save = False
        self._save_file.unlink(missing_ok=True)

    def _rounds(self) -> Iterator[float]:
        """Yields the seconds since the last round, until the end: at most two periods, so that time
        in which this process was stopped does not count."""
        before = time.monotonic()
        while not self._done.wait(self._period):
            now = time.monotonic()
            yield min(now - before, 2 * self._period)
            before = now

    # This process

    def _watch_process(self) -> None:
        for elapsed in self._rounds():
            # If no thread of Python can run, because a call keeps the interpreter's lock, a thread
            # of C writes the stacks to the log
            seconds = self._hang_timeout + 2 * self._silent_after
            faulthandler.dump_traceback_later(seconds, file=2)
            position = (self._progress.step, self._progress.beats)
            self._idle = self._idle + elapsed if position == self._position else 0.0
            self._position = position
            self._stop.look()
            parent = self._environment.parent
            if self._environment.torchrun and os.getppid() != parent:
                host = socket.gethostname()
                problem = f"torchrun's agent (process {parent} on {host}) has ended, and with it "
                self._fail("agent_lost", f"{problem}what would restart or end this rank")
            if self._rank == 0:
                self._look_for_files()
            if self._stop.requested() and self._progress.preparing:
                if self._stopped_by_file:
                    self._stop_file.unlink(missing_ok=True)
                self._failures.stop_before_training(self._stop.signal or "signal")
            if self._idle >= self._hang_timeout and self._progress.slow_phase is None:
                self._check_store()

    def _look_for_files(self) -> None:
        with contextlib.suppress(OSError):
            self._save = self._save or self._save_file.exists()
            if not self._stopped_by_file and self._stop_file.exists():
                self._stopped_by_file = True
                self._stop.ask(f"the file {self._stop_file}")

    def _check_store(self) -> None:
        """Reports a hang without the store, if that blocks."""
        blocked = time.monotonic() - self._answered > self._silent_after + 2 * self._period
        if not blocked or self._claimed_at is not None or self._failures.claimed:
            return
        self._failures.store_blocked = True
        where, step = self._write_stacks({})["where"], self._progress.step + 1
        text = f"no sign of life for {self._hang_timeout:g} s (run.hang_timeout), and the "
        text += "ranks' store does not answer: is torchrun's agent or its node stopped?\n"
        text += f"rank {self._rank} of {self._ranks} is in step {step}, {self._progress.phase}, "
        text += f"at {where}\nstacks of the ranks are in {self._run.log / 'hang'}"
        self._fail("hang", text)

    def _fail(self, reason: str, text: str) -> None:
        """Reports what this rank has noticed, unless another one reports, and ends this process."""
        if self._failures.claim():
            self._failures.report(reason, text)
        elif self._failures.claimed:  # another thread of this rank reports
            return
        self._failures.end(EXIT_FAILED)

    # The other ranks

    def _watch_ranks(self) -> None:
        for elapsed in self._rounds():
            # Before the store: a rank that ends in order announces that there first
            lost = self._failures.neighbours.lost()
            try:
                self._look_at_store(lost, elapsed)
                self._failing_since = None
            except Exception as error:  # of the store; a single one may be transient
                self._store_failed(error, lost)
            self._answered = time.monotonic()

    def _look_at_store(self, lost: list[int], elapsed: float) -> None:
        if self._ranks > 1:
            if self._failures.other_claimed():
                self._other_claimed()
                return
            if lost:
                self._failures.report_lost(lost)
            if not self._failures.neighbours.known:
                self._failures.neighbours.find(self._store)
        self._publish()
        if self._rank == 0:
            self._judge(elapsed)
        elif self._store.check([_STATE(0)]):
            first = json.loads(self._store.get(_STATE(0)))
            if "left" in first:
                return
            silent = self._silent_seconds(0, first, elapsed)
            late = silent > self._hang_timeout + 2 * self._period
            if late and self._store.add(_JUDGES, 1) == 1:
                self._judge(elapsed)

    def _store_failed(self, error: Exception, lost: list[int]) -> None:
        now = time.monotonic()
        self._failing_since = now if self._failing_since is None else self._failing_since
        seconds = now - self._failing_since
        if lost and seconds > _NEIGHBOUR_LOST_SECONDS:
            self._failures.report_lost(lost, ask_store=False)
        if seconds > _STORE_LOST_SECONDS and not self._done.is_set():
            text = f"the ranks' store and torchrun's agent that hosts it are gone ({error})"
            self._fail("agent_lost", text)

    def _other_claimed(self) -> None:
        """Takes part in the report of a hang, and ends this rank if it does not end by itself."""
        if self._claimed_at is None:
            self._claimed_at = time.monotonic()
            self._failures.notice()
        if not self._dumped and self._store.check([_VERDICT]):
            self._dump(json.loads(self._store.get(_VERDICT)))
        late = time.monotonic() - self._claimed_at > _GRACE_SECONDS
        if self._failures.claimed or not (late or self._failures.stopped()):
            return
        status = self._failures.wait_for_report()
        if not self._done.is_set():
            if late:
                text = f"rank {self._rank} ends because another rank failed"
                print(text, file=sys.stderr, flush=True)
            self._failures.end(status)

    def _publish(self) -> None:
        self._published += 1
        process = {"pid": os.getpid(), "machine": this_machine(), "host": socket.gethostname()}
        mine = {"number": self._published, "idle": self._idle, **process, **vars(self._progress)}
        self._store.set(_STATE(self._rank), json.dumps(mine))

    def _silent_seconds(self, rank: int, state: State, elapsed: float) -> float:
        """Seconds since a rank last published."""
        number, silent = self._silence.get(rank, (-1, 0.0))
        silent = 0.0 if number != state["number"] else silent + elapsed
        self._silence[rank] = (state["number"], silent)
        return silent

    # Hangs

    def _judge(self, elapsed: float) -> None:
        """Ends the run if a rank has given no sign of life for too long."""
        store, timeout = self._store, self._hang_timeout
        ranks = range(self._ranks)
        known = [rank for rank in ranks if rank in self._silence or store.check([_STATE(rank)])]
        texts = store.multi_get([_STATE(rank) for rank in known])
        states = {rank: json.loads(text) for rank, text in zip(known, texts, strict=True)}
        states = {rank: state for rank, state in states.items() if "left" not in state}
        silent = {
            rank: self._silent_seconds(rank, state, elapsed) for rank, state in states.items()
        }
        if self._rank != 0:
            silent[0] = timeout  # the reason why this rank judges
        slow = any(state["slow_phase"] and silent[rank] < timeout for rank, state in states.items())
        idle = any(state["idle"] + silent[rank] >= timeout for rank, state in states.items())
        if max(silent.values()) < timeout and (slow or not idle):
            return
        if not self._failures.claim():
            return
        silent_ranks = [rank for rank in states if silent[rank] >= self._silent_after]
        verdict = {
            str(rank): (states[rank]["machine"], states[rank]["pid"]) for rank in silent_ranks
        }
        store.set(_VERDICT, json.dumps(verdict))
        found = {self._rank: self._dump(verdict)}
        deadline = time.monotonic() + _DUMP_SECONDS
        for rank in states.keys() - set(silent_ranks) - {self._rank}:
            while rank not in found and time.monotonic() < deadline:
                if store.check([_DUMPED(rank)]):
                    found[rank] = json.loads(store.get(_DUMPED(rank)))
                else:
                    time.sleep(0.1)
        self._failures.report("hang", self._describe(states, silent_ranks, found))
        self._failures.end(EXIT_FAILED)

    def _describe(
        self, states: dict[int, State], silent: list[int], found: dict[int, dict[str, Any]]
    ) -> str:
        """Which rank is behind, where, and where the others wait. found: `_dump` of each rank."""
        positions = {rank: (state["step"], state["beats"]) for rank, state in states.items()}
        first = min(positions.values())
        behind = silent or [rank for rank in states if positions[rank] == first]
        lines = [f"no sign of life for {self._hang_timeout:g} s (run.hang_timeout)"]
        if len(behind) == self._ranks > 1:
            lines[0] += "; no rank is behind the others"
        for rank in sorted(behind)[:8]:
            state = states[rank]
            what = "its process does not run" if rank in silent else "it runs without progress"
            name = f"rank {rank} of {self._ranks} (process {state['pid']} on {state['host']})"
            where = f"in step {state['step'] + 1}, {state['phase']}"
            lines.append(f"{name} is behind: {what}; {where}")
            if rank in found:
                lines.append(f"  at {found[rank]['where']}")
            elif rank in silent and state["machine"] == this_machine():
                lines += [f"  {line}" for line in hang_report.process_state(state["pid"])[:2]]
        for rank in [rank for rank in states if rank not in behind][:2]:
            where = f"; at {found[rank]['where']}" if rank in found else ""
            state = states[rank]
            lines.append(f"rank {rank} waits in step {state['step'] + 1}, {state['phase']}{where}")
        waiting = {rank: dump["collectives"] for rank, dump in found.items()}
        lines += hang_report.compare_collectives(waiting)
        lines.append(f"stacks and states of the processes are in {self._run.log / 'hang'}")
        return "\n".join(lines)

    def _dump(self, verdict: dict[str, Any]) -> dict[str, Any]:
        """As `_write_stacks`, and publishes what it returns."""
        found = self._write_stacks(verdict)
        self._store.set(_DUMPED(self._rank), json.dumps(found))
        return found

    def _write_stacks(self, verdict: dict[str, Any]) -> dict[str, Any]:
        """Writes this rank's stacks and flight recorder, and the state of silent processes here.

        verdict: machine and process id by silent rank. Returns the position of the main thread, and
        `collectives`.
        """
        self._dumped = True
        where, stacks = hang_report.stacks()
        recorded, folder = hang_report.flight_recorder(), self._run.log / "hang"
        own = f"rank {self._rank}, process {os.getpid()} on {socket.gethostname()}, {time.ctime()}"
        own += f": step {self._progress.step + 1}, {self._progress.phase}\n"
        with contextlib.suppress(OSError, TrainingError):
            self._run.check()
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"rank_{self._rank}.txt").write_text(own + stacks)
            if recorded is not None:
                (folder / f"rank_{self._rank}.flight_recorder.json").write_bytes(recorded)
            for rank, (machine, pid) in verdict.items():
                if machine == this_machine():
                    seen = f"rank {rank}, process {pid}, as seen by rank {self._rank}"
                    lines = [seen, *hang_report.process_state(pid)]
                    (folder / f"rank_{rank}.txt").write_text("\n".join(lines) + "\n")
        return {"where": where, "collectives": hang_report.collectives(recorded)}
