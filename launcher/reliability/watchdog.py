"""Threads that notice what the training loop cannot: that torchrun's agent is gone, that a rank hangs, that a file asks.

The loop leaves signs of life (`Progress.beat`: an attribute, no more). A thread of each rank publishes them in the store every
second or two, over a connection of its own; rank 0 reads them all, or where rank 0 is silent, the first rank that
notices. A rank is silent where its thread does not publish either: stopped, swapped out, or in a call that keeps the
interpreter's lock. Time is counted in looks of the one who looks: who was stopped himself has not waited.
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
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch._C import _distributed_c10d

from launcher.errors import EXIT_FAILED, TrainingError
from launcher.reliability.failures import FailureWatch
from launcher.reliability.lock import this_machine
from launcher.reliability.signals import StopRequest

_KEY = "watch"
_LOST_SECONDS = 10.0
"""That the store may be out of reach before it counts as gone."""
_OWNER_SECONDS = 10.0
_DUMP_SECONDS = 5.0


@contextlib.contextmanager
def watching(failures: FailureWatch, *, stop: StopRequest, hang_timeout: float) -> Iterator[Watch]:
    """Watches for as long as the context lasts. Every rank must enter it."""
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
        self._environment, self._run, self._progress = failures.environment, failures.run, failures.progress
        self._rank, self._ranks = failures.rank, failures.ranks
        self._seconds = min(2.0, max(0.2, hang_timeout / 10))
        self._silent_after = min(0.8 * hang_timeout, max(2.0, 5 * self._seconds))
        self._store = failures.connect()
        self._machine = this_machine()
        self._save_file, self._stop_file = self._run.path / "save", self._run.path / "stop"
        self._save = self._stopped_by_file = False
        self._position = (-1, -1)
        self._idle = 0.0
        self._published = 0
        self._took_part = False
        self._seen: dict[int, tuple[int, float]] = {}
        self._answered = time.monotonic()
        self._done = threading.Event()
        self._threads = [
            threading.Thread(target=self._watch_here, name="watch-here", daemon=True),
            threading.Thread(target=self._watch_together, name="watch-together", daemon=True),
        ]

    def start(self) -> None:
        """Starts the threads."""
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """The run is over, or was stopped as asked."""
        self._done.set()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(timeout=11)
        with contextlib.suppress(Exception):  # rank 0 may be busy for long, and must not miss this one
            self._store.set(f"{_KEY}/{self._rank}", json.dumps({"left": True}))
        faulthandler.cancel_dump_traceback_later()
        if self._stopped_by_file:
            self._stop_file.unlink(missing_ok=True)

    def save_requested(self) -> bool:
        """Rank 0: whether somebody touched RUN_DIR/save since `save_done`. The loop tells the other ranks."""
        return self._save

    def save_done(self) -> None:
        """Rank 0: the checkpoint that was asked for is on its way."""
        self._save = False
        self._save_file.unlink(missing_ok=True)

    # What this process sees by itself

    def _watch_here(self) -> None:
        torchrun, parent = self._environment.torchrun, self._environment.parent
        owner_seen = time.monotonic()
        while not self._done.wait(min(1.0, self._seconds)):
            self._stop.look()
            if torchrun and os.getppid() != parent:
                self._agent_lost(f"torchrun's agent (process {parent} on {socket.gethostname()}) is gone: killed?")
            if self._rank == 0:
                self._look_for_files()
            if self._stop.requested() and self._progress.preparing:
                if self._stopped_by_file:
                    self._stop_file.unlink(missing_ok=True)
                self._failures.stop_before_training(self._stop.signal or "signal")
            if time.monotonic() - owner_seen > _OWNER_SECONDS:
                owner_seen = time.monotonic()
                self._end_if_superseded()
            # Should a call keep the interpreter's lock for good, no thread of Python runs: one of C prints the stacks then
            faulthandler.dump_traceback_later(self._hang_timeout + 2 * self._silent_after, file=2)
            self._count_idle(min(1.0, self._seconds))
            if self._idle > self._hang_timeout + 30 and not self._progress.slow_phase and time.monotonic() - self._answered > 30:
                self._hang_alone()

    def _look_for_files(self) -> None:
        with contextlib.suppress(OSError):
            self._save = self._save or self._save_file.exists()
            if not self._stopped_by_file and self._stop_file.exists():
                self._stopped_by_file = True
                self._stop.ask(f"the file {self._stop_file}")

    def _end_if_superseded(self) -> None:
        try:
            self._run.check()
        except TrainingError as error:
            if self._failures.claim(unreachable=True):
                self._failures.fail(str(error), reason=error.reason)  # to the console: the folder's files are another's
            self._failures.end(EXIT_FAILED)
        except OSError:
            pass  # the file system is out of reach: who writes will tell

    def _count_idle(self, seconds: float) -> None:
        position = (self._progress.step, self._progress.beats)
        self._idle = self._idle + seconds if position == self._position else 0.0
        self._position = position

    def _agent_lost(self, why: str) -> None:
        if self._failures.claim():
            told = f"{why} Ended after step {self._progress.step}: without it nobody would restart or end this rank"
            self._failures.fail(told, reason="agent_lost")
        self._failures.end(EXIT_FAILED)

    def _hang_alone(self) -> None:
        """Nothing moves, and the store does not answer either."""
        where = self._dump()["where"]
        told = f"rank {self._rank} hangs in step {self._progress.step + 1}, at {where}, and the store where ranks meet does not answer"
        if self._failures.claim():
            self._failures.fail(told, reason="hang")
        self._failures.end(EXIT_FAILED)

    # What the ranks tell one another

    def _watch_together(self) -> None:
        lost: float | None = None
        before = time.monotonic()
        while not self._done.wait(self._seconds):
            now = time.monotonic()
            elapsed, before = min(now - before, 2 * self._seconds), now
            try:
                self._exchange(elapsed)
                lost, self._answered = None, time.monotonic()
            except RuntimeError as error:  # of the store
                lost = lost if lost is not None else now
                if time.monotonic() - lost > _LOST_SECONDS and not self._done.is_set():
                    self._agent_lost(f"the store where ranks meet is gone, and with it the agent that hosted it ({error}).")

    def _exchange(self, elapsed: float) -> None:
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
        store.set(f"{_KEY}/{self._rank}", json.dumps(mine))
        if self._took_part:
            return  # the failure watch ends this process in a moment
        if store.check([f"{_KEY}/verdict"]):
            self._take_part(json.loads(store.get(f"{_KEY}/verdict")))
        elif self._rank == 0:
            self._judge(elapsed)
        elif store.check([f"{_KEY}/0"]):
            first = json.loads(store.get(f"{_KEY}/0"))
            if "left" in first:
                return
            if self._silence(0, first, elapsed) > self._hang_timeout + 2 * self._seconds and store.add(f"{_KEY}/judges", 1) == 1:
                self._judge(elapsed)

    def _silence(self, rank: int, state: dict[str, Any], elapsed: float) -> float:
        number, silent = self._seen.get(rank, (-1, 0.0))
        silent = 0.0 if number != state["number"] else silent + elapsed
        self._seen[rank] = (state["number"], silent)
        return silent

    def _judge(self, elapsed: float) -> None:
        """Ends the run where a rank has given no sign of life for too long."""
        store, timeout = self._store, self._hang_timeout
        there = [rank for rank in range(self._ranks) if rank in self._seen or store.check([f"{_KEY}/{rank}"])]
        texts = zip(there, store.multi_get([f"{_KEY}/{rank}" for rank in there]), strict=True)
        states = {rank: state for rank, text in texts if "left" not in (state := json.loads(text))}
        silent = {rank: self._silence(rank, state, elapsed) for rank, state in states.items()}
        if self._rank != 0:
            silent[0] = timeout  # which is why this rank judges
        slow = any(state["slow"] and silent[rank] < timeout for rank, state in states.items())
        hangs = max(silent.values()) >= timeout
        if not hangs and (slow or all(state["idle"] + silent[rank] < timeout for rank, state in states.items())):
            return
        if not self._failures.claim():
            return  # a failure that is being told already
        dumb = [rank for rank in states if silent[rank] >= self._silent_after]
        witnesses = {
            rank: next((r for r, state in states.items() if r not in dumb and state["machine"] == states[rank]["machine"]), None)
            for rank in dumb
        }
        verdict = {"silent": {rank: [witnesses[rank], states[rank]["pid"]] for rank in dumb}}
        store.set(f"{_KEY}/verdict", json.dumps(verdict))
        found = {self._rank: self._take_part({"silent": {str(rank): pair for rank, pair in verdict["silent"].items()}})}
        deadline = time.monotonic() + _DUMP_SECONDS
        for rank in states:
            while rank not in found and rank not in dumb and time.monotonic() < deadline:
                if store.check([f"{_KEY}/dumped/{rank}"]):
                    found[rank] = json.loads(store.get(f"{_KEY}/dumped/{rank}"))
                else:
                    time.sleep(0.1)
        self._failures.fail(self._describe(states, dumb, found), reason="hang")
        self._failures.end(EXIT_FAILED)

    def _describe(self, states: dict[int, dict[str, Any]], dumb: list[int], found: dict[int, dict[str, Any]]) -> str:
        """Which rank is behind, where, and what the others wait in."""
        positions = {rank: (state["step"], state["beats"]) for rank, state in states.items()}
        first = min(positions.values())
        behind = dumb or [rank for rank in states if positions[rank] == first]
        lines = [f"no sign of life for {self._hang_timeout:g} s (run.hang_timeout)"]
        if len(behind) == self._ranks > 1:
            lines[0] += "; no rank is behind the others"
        for rank in sorted(behind)[:8]:
            state = states[rank]
            what = "its process does not run" if rank in dumb else "it runs, but does not get on"
            where = f"in step {state['step'] + 1}, {state['phase']}"
            lines.append(f"rank {rank} of {self._ranks} (process {state['pid']} on {state['host']}) is behind: {what}; {where}")
            if rank in found:
                lines.append(f"  at {found[rank]['where']}")
            elif rank in dumb:
                lines += [f"  {line}" for line in process_state(state["pid"])[:2] if state["machine"] == self._machine]
        others = [rank for rank in states if rank not in behind]
        for rank in others[:2]:
            where = f"; at {found[rank]['where']}" if rank in found else ""
            lines.append(f"rank {rank} waits in step {states[rank]['step'] + 1}, {states[rank]['phase']}{where}")
        lines += compare_collectives({rank: told["collectives"] for rank, told in found.items()})
        lines.append(f"stacks and states of the processes are in {self._run.log / 'hang'}")
        return "\n".join(lines)

    def _take_part(self, verdict: dict[str, Any]) -> dict[str, Any]:
        """Writes down what this rank does, and what is seen from outside of those beside it that cannot."""
        self._took_part = True
        told = self._dump()
        for rank, (witness, pid) in verdict["silent"].items():
            if witness == self._rank:
                with contextlib.suppress(OSError):
                    text = "\n".join([f"rank {rank}, process {pid}, as seen by rank {self._rank}", *process_state(pid)])
                    self._file(int(rank), "txt").write_text(text + "\n")
        self._store.set(f"{_KEY}/dumped/{self._rank}", json.dumps(told))
        return told

    def _file(self, rank: int, ending: str) -> Path:
        folder = self._run.log / "hang"
        folder.mkdir(parents=True, exist_ok=True)
        return folder / f"rank_{rank}.{ending}"

    def _dump(self) -> dict[str, Any]:
        """Writes the stacks of all threads, and the flight recorder; returns where the main thread is, and `collectives`."""
        frames = sys._current_frames()
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        main = threading.main_thread().ident
        ours = {thread.ident for thread in self._threads}
        step, phase = self._progress.step + 1, self._progress.phase
        parts = [f"rank {self._rank}, process {os.getpid()} on {socket.gethostname()}, {time.ctime()}: step {step}, {phase}\n"]
        for ident in sorted(frames, key=lambda ident: (ident != main, ident in ours)):
            parts += [f"\nthread {names.get(ident, ident)}\n", *traceback.format_stack(frames[ident])]
        recorded = flight_recorder()
        with contextlib.suppress(OSError, TrainingError):
            self._run.check()
            self._file(self._rank, "txt").write_text("".join(parts))
            if recorded is not None:
                self._file(self._rank, "flight_recorder.json").write_bytes(recorded)
        where = innermost(frames[main]) if main in frames else "?"
        return {"where": where, "collectives": collectives(recorded)}


def innermost(frame: FrameType) -> str:
    """`function (file:line)`."""
    code = frame.f_code
    return f"{code.co_name} ({os.path.relpath(code.co_filename)}:{frame.f_lineno})"


def process_state(pid: int) -> list[str]:
    """What the kernel says of a process: its state (R runs, S sleeps, D waits for a device, T stopped) and where it waits,
    the same of its threads, and its kernel stack where we may see that."""
    folder = Path(f"/proc/{pid}")

    def read(name: str) -> str:
        try:
            return (folder / name).read_text().replace("\0", " ").strip()
        except OSError as error:
            return f"({error.strerror})"

    status = dict(line.split(":\t", 1) for line in read("status").splitlines() if ":\t" in line)
    if not status:
        return ["State: gone, there is no such process"]
    lines = [f"State: {status.get('State', '?').strip()}", f"waits in the kernel in: {read('wchan') or '?'}"]
    lines += [f"{name}: {status[name].strip()}" for name in ("Threads", "VmRSS", "VmSwap", "SigPnd", "ShdPnd") if name in status]
    lines.append(f"command: {read('cmdline')}")
    for task in sorted((folder / "task").glob("*"))[:64]:
        with contextlib.suppress(OSError, IndexError):
            name, rest = (task / "stat").read_text().split("(", 1)[1].rsplit(")", 1)
            lines.append(f"thread {task.name} {name}: {rest.split()[0]}, {(task / 'wchan').read_text()}")
    return [*lines, "kernel stack:", read("stack")]


def flight_recorder() -> bytes | None:
    """The collectives that were started last, as JSON: NCCL's, or of gloo where there is no NCCL. None: not recorded."""
    name = "_dump_nccl_trace_json" if torch.cuda.is_available() else "_dump_fr_trace_json"
    dump = getattr(_distributed_c10d, name, None)
    try:
        return None if dump is None else bytes(dump())
    except Exception:
        return None


def collectives(recorded: bytes | None) -> dict[str, dict[str, Any]]:
    """By process group: the number of the newest collective, and the oldest unfinished ones.

    A flight recorder's newest entry was only enqueued. What hangs is the oldest unfinished one.
    """
    groups: dict[str, dict[str, Any]] = {}
    with contextlib.suppress(ValueError, KeyError, TypeError):
        for entry in json.loads(recorded or b"{}").get("entries") or []:
            if entry["is_p2p"]:
                continue
            number = entry["collective_seq_id"]
            group = groups.setdefault(" ".join(entry["process_group"]), {"newest": 0, "unfinished": {}})
            group["newest"] = max(group["newest"], number)
            # gloo retires what is finished and leaves its state as it was
            if entry["state"] != "completed" and not entry["retired"] and len(group["unfinished"]) < 8:
                group["unfinished"][str(number)] = f"{entry['profiling_name']} {entry['input_sizes']}"
    return groups


def compare_collectives(ranks: dict[int, dict[str, dict[str, Any]]]) -> list[str]:
    """A line for each group that waits: its oldest unfinished collective, and who has not begun it.

    ranks: `collectives` of each. Groups with a rank that has not begun come first; three at most.
    """
    lines = []
    for name in sorted({name for groups in ranks.values() for name in groups}):
        members = {rank: groups[name] for rank, groups in ranks.items() if name in groups}
        numbers = [int(number) for group in members.values() for number in group["unfinished"]]
        if not numbers:
            continue
        oldest = min(numbers)
        begun: dict[str, list[int]] = {}
        for rank, group in members.items():
            other = "is finished" if group["newest"] >= oldest else "not begun"
            begun.setdefault(group["unfinished"].get(str(oldest), other), []).append(rank)
        who = "; ".join(f"{what}: rank {', '.join(map(str, sorted(of)[:8]))}{' ...' * (len(of) > 8)}" for what, of in sorted(begun.items()))
        lines.append(("not begun" not in begun, f"oldest unfinished collective of group {name}, number {oldest}: {who}"))
    return [line for _, line in sorted(lines)[:3]]
