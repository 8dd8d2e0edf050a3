"""One thread of each rank that notices what the training loop cannot.

On its own: torchrun's agent is gone, another job owns the folder, a file asks to save or to stop,
a signal came. With the other ranks, over the store: a rank failed, a process of this node was
killed, a rank hangs.

The training loop leaves heartbeats (`Progress.beat`, a few attributes). The watch publishes them
in the store every second or two. Rank 0 judges them; if rank 0 is silent, the first rank that
notices does. A rank is silent if its watch does not publish either: its process is stopped or
swapped out, or is in a call that keeps the interpreter's lock. Time is counted in rounds of the
watch that judges, so that a process that was stopped itself does not judge the others by the clock.
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
from pathlib import Path
from typing import Any

from launcher.errors import EXIT_FAILED, TrainingError
from launcher.reliability import hang_report
from launcher.reliability.failures import FailureWatch
from launcher.reliability.lock import this_machine
from launcher.reliability.signals import StopRequest

_ROUND_SECONDS = 0.5
_GRACE_SECONDS = 4.0
"""Time for this rank to end by itself after another one has failed."""
_NEIGHBOUR_LOST_SECONDS = 3.0
"""Time that the store may fail before a lost neighbour is reported without it."""
_STORE_LOST_SECONDS = 10.0
"""Time that the store may fail before it counts as gone."""
_OWNER_SECONDS = 10.0
_DUMP_SECONDS = 5.0
"""Time for the ranks to write their stacks when one hangs."""
_JUDGES, _VERDICT = "watch/judges", "watch/verdict"
_STATE, _DUMPED = "watch/{}".format, "watch/dumped/{}".format


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
    """One rank's watch."""

    def __init__(self, failures: FailureWatch, *, stop: StopRequest, hang_timeout: float) -> None:
        self._failures, self._stop, self._hang_timeout = failures, stop, hang_timeout
        self._environment, self._run = failures.environment, failures.run
        self._progress, self._store = failures.progress, failures.store
        self._rank, self._ranks = failures.rank, failures.ranks
        self._seconds = min(2.0, max(0.2, hang_timeout / 10))
        """Between heartbeats."""
        self._silent_after = min(0.8 * hang_timeout, max(2.0, 5 * self._seconds))
        self._machine = this_machine()
        self._save_file, self._stop_file = self._run.path / "save", self._run.path / "stop"
        self._save = self._stopped_by_file = False
        self._position = (-1, -1)
        self._idle = 0.0
        """Seconds without a heartbeat of the training loop."""
        self._published = 0
        self._since_heartbeat = self._seconds
        self._dumped = False
        self._silence: dict[int, tuple[int, float]] = {}
        """By rank: its last number, and seconds since that changed."""
        self._owner_checked = time.monotonic()
        self._failing_since: float | None = None
        """When the store first failed, without an answer since."""
        self._failed_at: float | None = None
        """When another rank was seen to have failed."""
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watch", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def close(self) -> None:
        """The training loop has ended, in whatever way."""
        self._done.set()
        # A thread that is still in the store when the interpreter ends would abort it
        if self._thread is not threading.current_thread():
            self._thread.join(timeout=11)
        with contextlib.suppress(Exception):  # the end of this rank is no hang
            self._store.set(_STATE(self._rank), json.dumps({"left": True}))
        faulthandler.cancel_dump_traceback_later()
        if self._stopped_by_file:
            self._stop_file.unlink(missing_ok=True)

    def save_requested(self) -> bool:
        """Rank 0: whether RUN_DIR/save was touched since `save_done`. The loop tells all ranks."""
        return self._save

    def save_done(self) -> None:
        """Rank 0: the requested checkpoint is being written."""
        self._save = False
        self._save_file.unlink(missing_ok=True)

    def _watch(self) -> None:
        before, period = time.monotonic(), min(_ROUND_SECONDS, self._seconds)
        while not self._done.wait(period):
            now = time.monotonic()
            elapsed, before = min(now - before, 2 * self._seconds), now
            self._look_here(elapsed)
            # First, since a rank that ends in order announces that in the store before
            lost = self._failures.neighbours.lost()
            try:
                self._look_at_store(lost, elapsed)
                self._failing_since = None
            except Exception as error:  # of the store; a single error may pass
                self._store_failed(error, lost)

    # This process

    def _look_here(self, elapsed: float) -> None:
        self._stop.look()
        parent = self._environment.parent
        if self._environment.torchrun and os.getppid() != parent:
            agent = f"torchrun's agent (process {parent} on {socket.gethostname()})"
            self._agent_lost(f"{agent} is gone: killed?")
        if self._rank == 0:
            self._look_for_files()
        if self._stop.requested() and self._progress.preparing:
            if self._stopped_by_file:
                self._stop_file.unlink(missing_ok=True)
            self._failures.stop_before_training(self._stop.signal or "signal")
        if time.monotonic() - self._owner_checked > _OWNER_SECONDS:
            self._owner_checked = time.monotonic()
            self._check_owner()
        position = (self._progress.step, self._progress.beats)
        self._idle = self._idle + elapsed if position == self._position else 0.0
        self._position = position

    def _look_for_files(self) -> None:
        with contextlib.suppress(OSError):
            self._save = self._save or self._save_file.exists()
            if not self._stopped_by_file and self._stop_file.exists():
                self._stopped_by_file = True
                self._stop.ask(f"the file {self._stop_file}")

    def _check_owner(self) -> None:
        try:
            self._run.check()
        except TrainingError as error:
            if self._failures.claim(unreachable=True):
                # To the console only: the folder's files belong to another job
                self._failures.fail(str(error), reason=error.reason)
            self._failures.end(EXIT_FAILED)
        except OSError:
            pass  # the file system does not answer: the next write will fail

    def _agent_lost(self, why: str) -> None:
        if self._failures.claim():
            after = f"Ended after step {self._progress.step}"
            text = f"{why} {after}: without it nobody would restart or end this rank"
            self._failures.fail(text, reason="agent_lost")
        self._failures.end(EXIT_FAILED)

    # The other ranks

    def _look_at_store(self, lost: list[int], elapsed: float) -> None:
        if self._ranks > 1:
            if self._failures.other_stopped():
                self._failures.end(self._failures.stopped_status)
            if self._failures.other_failed():
                self._other_failed()
                return
            if lost:
                self._failures.report_lost(lost)
            if not self._failures.neighbours.known:
                self._failures.neighbours.find(self._store)
        self._since_heartbeat += elapsed
        if self._since_heartbeat >= self._seconds:
            elapsed, self._since_heartbeat = self._since_heartbeat, 0.0
            self._heartbeat(elapsed)

    def _store_failed(self, error: Exception, lost: list[int]) -> None:
        now = time.monotonic()
        self._failing_since = now if self._failing_since is None else self._failing_since
        seconds = now - self._failing_since
        if lost and seconds > _NEIGHBOUR_LOST_SECONDS:
            self._failures.end_without(lost)
        if seconds > _STORE_LOST_SECONDS and not self._done.is_set():
            store = "the store where ranks meet is gone, and with it the agent that hosted it"
            self._agent_lost(f"{store} ({error}).")

    def _other_failed(self) -> None:
        """Takes part in the report of a hang, and ends this rank if it does not end by itself."""
        if self._failed_at is None:
            self._failed_at = time.monotonic()
            self._failures.notice()
        if not self._dumped and self._store.check([_VERDICT]):
            self._dump(json.loads(self._store.get(_VERDICT)))
        if time.monotonic() - self._failed_at < _GRACE_SECONDS or self._failures.claimed:
            return
        self._failures.wait_for_report()
        if not self._done.is_set():
            text = f"rank {self._rank}: another rank failed while this one was busy; ending"
            print(text, file=sys.stderr, flush=True)
            self._failures.end(EXIT_FAILED)

    def _heartbeat(self, elapsed: float) -> None:
        """Publishes this rank's state, and judges those of all where that is this rank's part."""
        # If no thread of Python runs, because a call keeps the interpreter's lock, or if the store
        # never answers, a thread of C writes the stacks to the log
        faulthandler.dump_traceback_later(self._hang_timeout + 2 * self._silent_after, file=2)
        store, progress = self._store, self._progress
        self._published += 1
        mine = {
            "number": self._published,
            "step": progress.step,
            "beats": progress.beats,
            "phase": progress.phase,
            "slow": progress.slow_phase,
            "idle": self._idle,
            "pid": os.getpid(),
            "machine": self._machine,
            "host": socket.gethostname(),
        }
        store.set(_STATE(self._rank), json.dumps(mine))
        if self._rank == 0:
            self._judge(elapsed)
        elif store.check([_STATE(0)]):
            first = json.loads(store.get(_STATE(0)))
            if "left" in first:
                return
            silent = self._silent(0, first, elapsed)
            if silent > self._hang_timeout + 2 * self._seconds and store.add(_JUDGES, 1) == 1:
                self._judge(elapsed)

    def _silent(self, rank: int, state: dict[str, Any], elapsed: float) -> float:
        """Seconds for which a rank has not published."""
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
        silent = {rank: self._silent(rank, state, elapsed) for rank, state in states.items()}
        if self._rank != 0:
            silent[0] = timeout  # which is why this rank judges
        slow = any(state["slow"] and silent[rank] < timeout for rank, state in states.items())
        idle = any(state["idle"] + silent[rank] >= timeout for rank, state in states.items())
        if max(silent.values()) < timeout and (slow or not idle):
            return
        if not self._failures.claim():
            return
        silent_ranks = [rank for rank in states if silent[rank] >= self._silent_after]
        verdict = {
            rank: [_witness(rank, states, silent_ranks), states[rank]["pid"]]
            for rank in silent_ranks
        }
        store.set(_VERDICT, json.dumps(verdict))
        found = {self._rank: self._dump({str(rank): pair for rank, pair in verdict.items()})}
        deadline = time.monotonic() + _DUMP_SECONDS
        for rank in states.keys() - set(silent_ranks) - {self._rank}:
            while rank not in found and time.monotonic() < deadline:
                if store.check([_DUMPED(rank)]):
                    found[rank] = json.loads(store.get(_DUMPED(rank)))
                else:
                    time.sleep(0.1)
        self._failures.fail(self._describe(states, silent_ranks, found), reason="hang")
        self._failures.end(EXIT_FAILED)

    def _describe(
        self,
        states: dict[int, dict[str, Any]],
        silent: list[int],
        found: dict[int, dict[str, Any]],
    ) -> str:
        """Which rank is behind, where, and what the others wait in. found: `_dump` of each rank."""
        positions = {rank: (state["step"], state["beats"]) for rank, state in states.items()}
        first = min(positions.values())
        behind = silent or [rank for rank in states if positions[rank] == first]
        lines = [f"no sign of life for {self._hang_timeout:g} s (run.hang_timeout)"]
        if len(behind) == self._ranks > 1:
            lines[0] += "; no rank is behind the others"
        for rank in sorted(behind)[:8]:
            state = states[rank]
            what = "its process does not run" if rank in silent else "it runs, but does not get on"
            who = f"rank {rank} of {self._ranks} (process {state['pid']} on {state['host']})"
            where = f"in step {state['step'] + 1}, {state['phase']}"
            lines.append(f"{who} is behind: {what}; {where}")
            if rank in found:
                lines.append(f"  at {found[rank]['where']}")
            elif rank in silent and state["machine"] == self._machine:
                lines += [f"  {line}" for line in hang_report.process_state(state["pid"])[:2]]
        for rank in [rank for rank in states if rank not in behind][:2]:
            where = f"; at {found[rank]['where']}" if rank in found else ""
            state = states[rank]
            lines.append(f"rank {rank} waits in step {state['step'] + 1}, {state['phase']}{where}")
        waiting = {rank: dump["collectives"] for rank, dump in found.items()}
        lines += hang_report.compare_collectives(waiting)
        return "\n".join(
            [*lines, f"stacks and states of the processes are in {self._run.log / 'hang'}"]
        )

    def _dump(self, verdict: dict[str, list[int]]) -> dict[str, Any]:
        """Writes this rank's stacks and flight recorder, and what it sees of silent ranks.

        verdict: by silent rank, the rank on its machine that describes it, and its process id.
        Publishes and returns where the main thread is, and `collectives`.
        """
        self._dumped = True
        where, stacks = hang_report.stacks()
        recorded = hang_report.flight_recorder()
        own = f"rank {self._rank}, process {os.getpid()} on {socket.gethostname()}, {time.ctime()}"
        own += f": step {self._progress.step + 1}, {self._progress.phase}\n"
        with contextlib.suppress(OSError, TrainingError):
            self._run.check()
            self._file(self._rank, "txt").write_text(own + stacks)
            if recorded is not None:
                self._file(self._rank, "flight_recorder.json").write_bytes(recorded)
            for rank, (witness, pid) in verdict.items():
                if witness == self._rank:
                    seen = f"rank {rank}, process {pid}, as seen by rank {self._rank}"
                    lines = [seen, *hang_report.process_state(pid)]
                    self._file(int(rank), "txt").write_text("\n".join(lines) + "\n")
        found = {"where": where, "collectives": hang_report.collectives(recorded)}
        self._store.set(_DUMPED(self._rank), json.dumps(found))
        return found

    def _file(self, rank: int, ending: str) -> Path:
        folder = self._run.log / "hang"
        folder.mkdir(parents=True, exist_ok=True)
        return folder / f"rank_{rank}.{ending}"


def _witness(rank: int, states: dict[int, dict[str, Any]], silent: list[int]) -> int | None:
    """A rank that runs on the machine of a silent one; None: there is none."""
    machine = states[rank]["machine"]
    running = (r for r, state in states.items() if r not in silent and state["machine"] == machine)
    return next(running, None)
