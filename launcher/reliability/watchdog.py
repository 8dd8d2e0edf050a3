"""A thread of each rank that notices what the training loop cannot.

Without the other ranks, it notices that torchrun's agent has ended, that a file requests to save or
to stop, or that a signal has arrived. Through the store that the ranks share, it notices that a
rank has failed, that a process of this node was killed, or that a rank hangs.

The first rank without a heartbeat (`Progress`) for run.hang_timeout asks all ranks for their stacks
and reports which one is behind. In phases where heartbeats are rare, such as the start or a
checkpoint, the run hangs if no rank has got further for run.init_timeout; there, tasks that advance
(`console.task`) are signs of life, too. A rank that does not answer is stopped or swapped out, or a
call keeps its interpreter's lock. Ranks answer before they write anything, and files are used in
other threads: the file system may be what the run waits for. If most ranks cannot write their stacks
in time, the report says so, and blames no rank. A call of the store blocks while the agent that hosts
it is stopped (SIGSTOP, a frozen node); it then fails after run.hang_timeout (`limit_store_calls`).
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import logging
import os
import socket
import sys
import threading
import time
import traceback
from typing import Any

from launcher.console import seconds_as_text, signs_of_life
from launcher.distributed.child_stacks import last_call, stacks_of_children
from launcher.distributed.network import KEEPALIVE_SECONDS, limit_store_calls
from launcher.errors import EXIT_FAILED, TrainingError
from launcher.libraries.private import flight_recorder
from launcher.reliability import file_calls, hang_report
from launcher.reliability.causes import describe
from launcher.reliability.failures import CLAIMS, ENDED, FailureWatch
from launcher.reliability.file_calls import bounded
from launcher.reliability.signals import StopRequest
from launcher.reliability.stop_agreement import StopAgreement
from launcher.reliability.store_calls import absent

logger = logging.getLogger(__name__)

_ROUND_SECONDS = 1.0
"""Longest time between two checks; with a short run.hang_timeout a tenth of it."""
_GRACE_SECONDS = 4.0
"""Time for this rank to end by itself after another one has failed."""
_NEIGHBOUR_LOST_SECONDS = 3.0
"""Time that the store may fail before a lost neighbour is reported without it."""
_STORE_LOST_SECONDS = 10.0
"""Time that the store may fail before it counts as gone."""
_ANSWER_SECONDS, _ANSWER_SECONDS_OF_MANY, _MANY_RANKS = 5.0, 15.0, 64
"""Time for the ranks to answer when one hangs, and for more than 64 ranks."""
_REPORT_SECONDS = 60.0
"""Time for the rank that has claimed a failure to report it."""
_SHORT_STEP_SECONDS = 2.0
"""After a request to stop, the current step is finished if that takes no longer. Later the ranks
agree on a micro-batch to stop before."""
_WAITING_SECONDS = 0.1
"""Time between two checks while ranks wait for that agreement, or for the report of a failure."""
# Keys of the store
_SLOW, _LIFE = "watch/slow", "watch/life"
_HANG, _ANSWER, _WRITTEN = "watch/hang", "watch/answer_{}".format, "watch/written_{}".format

Answer = dict[str, Any]
"""A rank's position in its code, and the states of its neighbours' processes."""


def _behind(answers: dict[int, Answer]) -> list[int]:
    """The ranks with the fewest steps and heartbeats that wait for no other rank."""
    first = min(answer["position"] for answer in answers.values())
    slowest = sorted(rank for rank in answers if answers[rank]["position"] == first)
    return [rank for rank in slowest if not answers[rank]["waits"]] or slowest


def stop_line(source: str, seconds: float | None) -> str:
    """What to say when a stop is requested, if the step may take long; else empty. seconds: of the
    last step; None: not known."""
    if seconds is not None and seconds < _SHORT_STEP_SECONDS:
        return ""
    took = "" if seconds is None else f" ({seconds_as_text(seconds)} a step)"
    repeats = source in ("SIGTERM", "SIGINT")
    again = f"; a second {source} ends it at once" if repeats else ""
    text = (
        f"{source}: the run stops after the current micro-batch, and saves the last finished step"
    )
    return f"{text}{took}{again}"


class Watch:
    """The watchdog of one rank, as long as its context lasts. Every rank must enter it."""

    def __init__(
        self,
        failures: FailureWatch,
        *,
        stop: StopRequest,
        hang_timeout: float,
        timeout: float,
        init_timeout: float,
    ) -> None:
        """`timeout` limits, too, how long this rank waits for another one in a slow phase, and
        `init_timeout` how long all ranks may be in slow phases without a sign of life."""
        self._failures, self._stop, self._hang_timeout = failures, stop, hang_timeout
        self._timeout, self._init_timeout = max(hang_timeout, timeout), init_timeout
        self._run, self._progress, self._store = failures.run, failures.progress, failures.store
        self._rank, self._ranks = failures.rank, failures.ranks
        self._period = min(_ROUND_SECONDS, max(0.2, hang_timeout / 10))
        self._save_file, self._stop_file = self._run.path / "save", self._run.path / "stop"
        self._save = self._stopped_by_file = self._stop_shown = False
        self.stop_agreement = StopAgreement(rank=self._rank, ranks=self._ranks)
        self._stop_requested_at: float | None = None
        self._position = (-1, -1, -1)
        self._idle_seconds = self._waited_seconds = 0.0
        self._lives, self._life_seen, self._life_shown = True, 0, 0.0
        self._counted_as_slow = self._answered = False
        self._store_fails_since: float | None = None
        self._noticed_claim_at: float | None = None
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watch", daemon=True)
        self._writing: threading.Thread | None = None
        """Writes the stacks of this rank."""

    def __enter__(self) -> Watch:
        if (meeting_point := self._failures.environment.meeting_point) is not None:
            # A node that is cut off should first be noticed as such
            seconds = max(KEEPALIVE_SECONDS + 5, self._hang_timeout)
            limit_store_calls(meeting_point, seconds=seconds)
        with contextlib.suppress(Exception):  # of the store; the first round tries again
            # Now, because a rank that has not published its process cannot be reported as lost
            self._failures.neighbours.find(self._store)
            self._failures.nodes.beat(self._store)
        self._failures.explain_timeout = self._explain_timeout
        self._thread.start()
        if self._rank == 0:
            threading.Thread(target=self._watch_files, name="files", daemon=True).start()
        self._stop.watched.set()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        if self._thread is not threading.current_thread():
            # A thread that still uses the store when the interpreter ends would abort the process
            self._thread.join(timeout=11)
        faulthandler.cancel_dump_traceback_later()
        if self._stopped_by_file:
            with contextlib.suppress(OSError):
                self._stop_file.unlink(missing_ok=True)

    def save_requested(self) -> bool:
        """Rank 0: whether RUN_DIR/save was created."""
        return self._save

    def save_done(self) -> None:
        """Rank 0: the requested checkpoint is being written."""
        self._save = False
        with contextlib.suppress(OSError):  # such as a file system that is read-only by now
            self._save_file.unlink(missing_ok=True)

    def _watch(self) -> None:
        try:
            self._watch_until_done()
        except Exception as error:  # nothing else notices hangs, lost ranks and requests to stop
            text = traceback.format_exc()
            bounded(lambda: print(text, file=sys.stderr, flush=True), None)
            self._fail("watchdog", f"the watchdog of rank {self._rank} failed: {describe(error)}")

    def _watch_until_done(self) -> None:
        before = time.monotonic()
        while not self._done.wait(self._seconds_to_wait()):
            now = time.monotonic()
            # At most two periods: time in which this process was stopped does not count
            self._look_at_process(min(now - before, 2 * self._period))
            before = now
            # Before the store: a rank that ends in order announces that there first
            lost = self._failures.neighbours.lost()
            try:
                self._look_at_store(lost)
                self._store_fails_since = None
            except Exception as error:  # of the store; a single one may be transient
                self._store_failed(error, lost)

    def _seconds_to_wait(self) -> float:
        waits = self.stop_agreement.under_way or self._noticed_claim_at is not None
        return min(_WAITING_SECONDS, self._period) if waits else self._period

    def _look_at_process(self, elapsed: float) -> None:
        # If no thread of Python can run, because a call keeps the interpreter's lock, a thread of C
        # writes the stacks to the log
        faulthandler.dump_traceback_later(self._hang_timeout + 2 * self._period, file=2)
        slow = self._progress.slow_phase is not None
        # In a step, a checkpoint that is still being written is no sign of life
        position = (self._progress.step, self._progress.beats, signs_of_life() if slow else 0)
        if position == self._position:
            self._idle_seconds += elapsed
            self._waited_seconds += elapsed
        else:
            self._idle_seconds = self._waited_seconds = 0.0
            self._lives = True
        self._position = position
        self._stop.look()
        environment = self._failures.environment
        if environment.torchrun and os.getppid() != environment.parent:
            agent = f"torchrun's agent (process {environment.parent} on {socket.gethostname()})"
            self._fail("agent_lost", f"{agent} has ended, which would restart or end this rank")
        if not self._stop.requested():
            return
        self._stop_requested_at = self._stop_requested_at or time.monotonic()
        if not self._stop_shown and self._rank == 0 and not self._progress.preparing:
            self._stop_shown = True
            if line := stop_line(self._stop.signal or "signal", self._progress.step_seconds):
                bounded(lambda: logger.info(line), None)
        if self._progress.preparing:
            if self._stopped_by_file:
                with contextlib.suppress(OSError):
                    bounded(lambda: self._stop_file.unlink(missing_ok=True), None)
            self._failures.stop_before_training(self._stop.signal or "signal")

    def _watch_files(self) -> None:
        while not self._done.wait(self._period):
            self._look_for_files()

    def _look_for_files(self) -> None:
        with contextlib.suppress(OSError):
            self._save = self._save or self._save_file.is_file()
            if not self._stopped_by_file and self._stop_file.is_file():
                self._stopped_by_file = True
                self._stop.ask(f"the file {self._stop_file}")

    def _look_at_store(self, lost: list[int]) -> None:
        self._failures.nodes.beat(self._store)
        if self._failures.is_set(CLAIMS):
            self._other_claimed()
            return
        if lost:
            self._failures.report_lost(lost)
        if not self._failures.neighbours.known:
            self._failures.neighbours.find(self._store)
        asked = self._stop_requested_at
        wanted = asked is not None and time.monotonic() - asked >= _SHORT_STEP_SECONDS
        self.stop_agreement.look(self._store, wanted=wanted)
        slow = self._progress.slow_phase is not None
        if slow != self._counted_as_slow:
            self._store.add(_SLOW, 1 if slow else -1)
            self._counted_as_slow = slow
        if slow:
            self._look_at_slow_phase()
        elif self._idle_seconds >= self._hang_timeout:
            if self._waited_seconds < self._timeout and self._store.add(_SLOW, 0) > 0:
                self._idle_seconds = 0.0
            else:
                self._report_hang()

    def _look_at_slow_phase(self) -> None:
        """Tells the other ranks of signs of life, and reports a hang if no rank has shown one."""
        now, often = time.monotonic(), self._init_timeout / 10
        if self._lives and now - self._life_shown > often / 2:
            self._lives, self._life_shown = False, now
            self._store.add(_LIFE, 1)
        if self._idle_seconds >= often:
            self._idle_seconds = 0.0
            life = self._store.add(_LIFE, 0)
            if life != self._life_seen:
                self._life_seen, self._waited_seconds = life, 0.0
            elif self._waited_seconds >= self._init_timeout:
                self._report_hang()

    def _other_claimed(self) -> None:
        """Answers the report of a hang, and ends this rank if it does not end by itself."""
        if self._noticed_claim_at is None:
            self._noticed_claim_at = time.monotonic()
            self._failures.notice()
        if not self._answered and self._failures.is_set(_HANG):
            self._answer()
        waited = time.monotonic() - self._noticed_claim_at
        if self._failures.claimed or waited <= _GRACE_SECONDS:
            return
        status: int | None = EXIT_FAILED
        with contextlib.suppress(Exception):  # of the store, which is gone with its agent
            status = self._failures.reported()
        if status is None and waited > _GRACE_SECONDS + _REPORT_SECONDS:
            status = EXIT_FAILED
        if status is not None and not self._done.is_set():
            text = f"rank {self._rank} ends because another rank failed or was stopped"
            bounded(lambda: print(text, file=sys.stderr, flush=True), None)
            self._stacks_written()
            self._failures.end(status)

    def _store_failed(self, error: Exception, lost: list[int]) -> None:
        if "Socket Timeout" in str(error):
            answer = self._answer()
            text = "the ranks' store does not answer: is torchrun's agent or its node stopped?\n"
            text += f"rank {self._rank} of {self._ranks} is {answer['phase']}, at {answer['where']}"
            text += f"\n{self._stacks_written()}"
            self._fail("hang", text, ask_store=False)
        self._store_fails_since = self._store_fails_since or time.monotonic()
        seconds = time.monotonic() - self._store_fails_since
        if lost and seconds > _NEIGHBOUR_LOST_SECONDS:
            self._failures.report_lost(lost, ask_store=False)
        if seconds > _STORE_LOST_SECONDS and not self._done.is_set():
            text = f"the ranks' store and torchrun's agent that hosts it are gone ({error})"
            self._fail("agent_lost", text)

    def _fail(self, reason: str, text: str, *, ask_store: bool = True) -> None:
        """Reports a failure, unless another rank reports, and ends this process."""
        if self._failures.claim(ask_store=ask_store):
            self._failures.report(reason, text)
        elif self._failures.claimed:  # another thread of this rank reports
            return
        self._failures.end(EXIT_FAILED)

    # Hangs

    def _report_hang(self) -> None:
        """Reports the hang and ends the run, unless another rank has claimed a failure."""
        if not self._failures.claim(ends=False):  # the next round answers the rank that reports
            return
        answers, missing = dict[int, Answer](), list[int]()
        with contextlib.suppress(Exception):  # of the store: this rank has claimed, so must report
            self._store.set(_HANG, "")  # first: the other ranks wait for it
        answers[self._rank] = self._answer()
        with contextlib.suppress(Exception):
            missing = self._missing(answers)
        nodes = self._failures.lost_nodes() if missing else []
        self._failures.report("hang", "\n".join([*nodes, *self._describe(answers, missing)]))
        self._failures.end(EXIT_FAILED)

    def _missing(self, answers: dict[int, Answer]) -> list[int]:
        """Adds the answers of the other ranks; returns those that do not answer in time."""
        others = [rank for rank in range(self._ranks) if not self._failures.is_set(ENDED(rank))]
        keys = {_ANSWER(rank): rank for rank in others}
        many = self._ranks > _MANY_RANKS
        seconds = _ANSWER_SECONDS_OF_MANY if many else _ANSWER_SECONDS
        missing = [keys.pop(key) for key in absent(self._store, list(keys), seconds=seconds)]
        texts = self._store.multi_get(list(keys)) if keys else []
        answers.update(zip(keys.values(), map(json.loads, texts), strict=True))
        return missing

    def _waits_for_files(self, answers: dict[int, Answer]) -> str | None:
        """That the file system does not answer, if most of the ranks that have answered cannot write
        their stacks in time."""
        late, keys = list[str](), [_WRITTEN(rank) for rank in answers]
        with contextlib.suppress(Exception):  # of the store
            late = absent(self._store, keys, seconds=file_calls.FILE_SECONDS)
        if 2 * len(late) <= len(keys):
            return None
        where = f"the file system of {self._run.path} does not answer"
        return f"{where} on {len(late)} of {len(keys)} ranks"

    def _describe(self, answers: dict[int, Answer], missing: list[int]) -> list[str]:
        """Which rank is behind, where, and where the others wait. The missing ranks did not
        answer."""
        limit, key = self._hang_timeout, "run.hang_timeout"
        if self._progress.slow_phase is not None:
            limit, key = self._init_timeout, "run.init_timeout, for slow phases"
            key = (
                key if self._progress.started else "run.init_timeout, until the first step is done"
            )
        elif self._waited_seconds >= self._timeout > limit:
            limit, key = self._timeout, "run.timeout, while another rank is in a slow phase"
        lines = [f"no sign of life for {limit:g} s ({key})"]
        behind = missing or _behind(answers)
        if len(behind) == self._ranks > 1:
            lines[0] += "; no rank is behind the others"
        return [*lines, *self._describe_ranks(answers, behind), self._stacks_written()]

    def _explain_timeout(self, silent: list[int]) -> list[str]:
        """What the ranks do for which a collective of this rank waited beyond its time limit."""
        self._store.set(_HANG, "")
        self._answer()
        answers = dict[int, Answer]()
        missing = [rank for rank in self._missing(answers) if rank != self._rank]
        return self._describe_ranks(answers, missing or silent)

    def _describe_ranks(self, answers: dict[int, Answer], behind: list[int]) -> list[str]:
        files = self._waits_for_files(answers)
        # A rank that waits for files is not to blame
        lines, blame = ([], " is behind:") if files is None else ([files], ":")
        for rank in behind[:8]:
            name = f"rank {rank} of {self._ranks}"
            if rank in answers:
                what = f"it runs without progress; {answers[rank]['phase']}"
                lines.append(f"{name} ({answers[rank]['process']}){blame} {what}")
                lines.append(f"  at {answers[rank]['where']}")
                lines += [f"  {line}" for line in answers[rank]["children"]]
            else:
                lines.append(f"{name}{blame} its process does not answer")
                seen = (answer["neighbours"].get(str(rank), []) for answer in answers.values())
                lines += [f"  {line}" for line in next(filter(None, seen), [])]
        for rank in [rank for rank in answers if rank not in behind][:2]:
            answer = answers[rank]
            lines.append(f"rank {rank} waits {answer['phase']}; at {answer['where']}")
        return lines

    def _answer(self) -> Answer:
        """Publishes what this rank does, and then writes stacks, states of neighbours and the flight
        recorder, in another thread."""
        self._answered = True
        where, stacks = hang_report.stacks()
        process = f"process {os.getpid()} on {socket.gethostname()}"
        phase = f"in step {self._progress.step + 1}, {self._progress.phase}"
        neighbours = {
            str(rank): hang_report.process_state(pid)
            for rank, (pid, _) in self._failures.neighbours.processes.items()
        }
        lines = [f"rank {self._rank}, {process}, {time.ctime()}: {phase}\n{stacks}"]
        for rank, state in neighbours.items():
            lines += [f"rank {rank}, as seen by rank {self._rank}", *state, ""]
        children = stacks_of_children()
        for pid, stack in children.items():
            lines += [f"process {pid}, which loads data for rank {self._rank}", stack]
        answer = {
            "position": [self._progress.step, self._progress.beats],
            "process": process,
            "phase": phase,
            "where": where,
            "waits": hang_report.waits_for_ranks(),
            "children": [
                f"its loader process {pid} is at {last_call(stack)}"
                for pid, stack in list(children.items())[:4]
            ],
            "neighbours": neighbours,
        }
        with contextlib.suppress(Exception):
            self._store.set(_ANSWER(self._rank), json.dumps(answer))
        writing = threading.Thread(target=self._write_stacks, args=("\n".join(lines),), daemon=True)
        writing.start()
        self._writing = writing
        return answer

    def _write_stacks(self, text: str) -> None:
        folder = self._run.log / "hang"
        try:
            self._run.check()
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"rank_{self._rank}.txt").write_text(text)
            written = True
        except (OSError, TrainingError):
            written = False
        with contextlib.suppress(Exception):  # of the store
            self._store.set(_WRITTEN(self._rank), "")  # or refused: the file system answers
        if written and (recorded := flight_recorder()) is not None:
            with contextlib.suppress(OSError):
                (folder / f"flight_recorder_{self._rank}").write_bytes(recorded)

    def _stacks_written(self) -> str:
        """Waits until the stacks of this rank are written; says where they are."""
        folder, writing = self._run.log / "hang", self._writing
        if writing is not None:
            writing.join(file_calls.FILE_SECONDS)
            if writing.is_alive():
                return f"the file system of {folder} does not answer: stacks are not written there"
        return f"stacks and states of the processes are in {folder}"
