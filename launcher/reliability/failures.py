"""When one rank fails, all end within seconds, and one of them says why.

The first rank that raises claims the failure in the store that the ranks met at; what the others raise afterwards,
having lost a peer, is a consequence and stays in their logs. A rank that is stuck in a collective raises nothing (under
NCCL the CPU waits for the device, and no exception comes). A thread of each rank therefore watches the store, and ends
this rank when another one has failed. It also watches the processes of the other ranks on this node, and reports a
process that was killed.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, NoReturn, Protocol, TextIO

import torch
from torch._C._distributed_c10d import Store

from launcher.distributed import host_memory
from launcher.distributed.environment import Environment
from launcher.errors import EXIT_DONE, EXIT_FAILED, EXIT_STOPPED, EXIT_USAGE, RecipeError, TrainingError
from launcher.reliability.lock import Ownership, process_start, this_machine
from launcher.reliability.run_directory import RunFolder

_KEY = "failed"
_STOPPED = "stopped"
_OWNER = "owner"
_KERNEL = "the kernel killed a process on this node, where memory ran out"
_KILLED = "was ended by the kernel, whose out-of-memory killer acts where host memory runs out"
_POLL_SECONDS = 0.5
_GRACE_SECONDS = 4.0
_FAILED_POLLS = 6
"""Polls of the store in a row that may fail before a lost neighbour is reported without it."""
_TIMEOUT_SIGNS = ("timed out waiting", "collective operation timeout")
_MEMORY_SIGNS = ("can't allocate memory", "out of memory", "cublas_status_alloc_failed")
_EXPLAIN_SECONDS = 60.0
_CLOSE_SECONDS = 10.0
"""Seconds that the metrics services get to take the last records when a run fails. torchrun kills a rank after 30."""


class Progress:
    """How far this rank is: for who reports a failure, and for the watch that looks for ranks that hang (`watchdog.py`)."""

    def __init__(self) -> None:
        self.step = 0
        """The last finished step; where the run resumed, at first."""
        self.phase = "start"
        """What goes on: data, forward, backward, optimizer, evaluation, ..."""
        self.beats = 0
        """Signs of life since the last finished step."""
        self.micro_batch = 0
        """The micro-batch that is at work, from 1; 0: none of this step was begun."""
        self.slow_phase: str | None = "start"
        """What may take as long as it likes: everything until the first step is done (compilation,
        tokenization, loading), and from a rewind until the next step is done (loading, skipping)."""
        self.preparing = True
        """No step was begun: who asks to stop need not wait, there is nothing to save."""

    def beat(self, phase: str) -> None:
        """A sign of life, as cheap as can be: a thread looks at it now and then."""
        self.phase = phase
        self.beats += 1
        self.micro_batch += phase == "forward"

    def step_done(self, step: int) -> None:
        """A step was trained."""
        self.step, self.beats, self.micro_batch, self.slow_phase = step, 0, 0, None

    def slow_until_step(self, what: str) -> None:
        """From here to the end of the next step nothing counts as a hang."""
        self.slow_phase = what
        self.beat(what)

    @contextlib.contextmanager
    def slow(self, what: str) -> Iterator[None]:
        """Something that may take long and gives no sign of life: a checkpoint, an export."""
        before, self.slow_phase = self.slow_phase, what
        self.beat(what)
        try:
            yield
        finally:
            self.slow_phase = before
            self.beat(f"after {what}")


class Account(Protocol):
    """What there is to tell of memory that ran out (`planner/out_of_memory.py`)."""

    told: str
    """At once."""
    noted: dict[str, Any]
    """For events.jsonl."""
    restarts_now: bool
    """Nothing is asked of the plan: torchrun starts the run again with a smaller micro-batch."""

    def conclude(self, seconds: float) -> str:
        """The rest, in at most so many seconds."""


class PostMortem(Protocol):
    """Who can tell why memory ran out."""

    def examine(self, error: BaseException, *, step: int, phase: str, micro_batch: int) -> Account:
        """Of this rank, where it was raised. step: the last finished one."""

    def killed(self, who: str, step: int) -> Account:
        """Of this node, where the kernel ended a process."""


class FailureWatch:
    """One rank's part in agreeing on how the run ends before its end."""

    def __init__(self, store: Store, *, environment: Environment, run: RunFolder, console: TextIO, progress: Progress) -> None:
        self.rank, self.ranks = environment.rank, environment.world_size
        self.environment, self.run, self.console, self.progress = environment, run, console, progress
        self.post_mortem: PostMortem | None = None
        """None: nothing is known of the recipe's memory yet."""
        self.on_end: Callable[[], None] = lambda: None
        """Flushes and closes what the run writes, before a failure ends this process."""
        self._ending = threading.Lock()
        self._killed = host_memory.killed()
        # A connection of its own: the group's may be busy, waiting for a rank that is gone.
        self._store = self.connect(store)
        self._shared = store
        self._done = threading.Event()
        self._claiming = threading.Lock()
        self._tells = False
        """A thread of this rank reports the failure: no other thread ends the process meanwhile."""
        self._neighbours: dict[int, tuple[int, int]] | None = None
        """Process id and start of each other rank on this node; None: not known yet."""
        self._thread = threading.Thread(target=self._watch, name="failure-watch", daemon=True)
        if self.ranks > 1:
            self._thread.start()

    def connect(self, store: Store | None = None) -> Store:
        """Another connection to the store that the ranks met at."""
        store = store if store is not None else self._shared
        if self.ranks > 1:
            store = store.clone()  # type: ignore[attr-defined]
            store.set_timeout(timedelta(seconds=10))
        return store

    def share_owner(self) -> None:
        """The other ranks learn which record makes the folder this run's: they write too, where they are the first to fail."""
        if self.ranks == 1:
            return
        if self.rank == 0:
            self._shared.set(_OWNER, self.run.ownership.name if self.run.ownership is not None else "")
        elif name := self._shared.get(_OWNER).decode():
            self.run.ownership = Ownership.follow(self.run.path, name)

    def close(self) -> None:
        """This rank got through. A thread that were still in the store when the interpreter ends would abort it."""
        if self.ranks > 1:
            with contextlib.suppress(Exception):  # the neighbours must not take the end of this process for a loss
                self._announce_end()
        self._done.set()
        if self._thread.is_alive():
            self._thread.join(timeout=11)

    def claim(self, *, unreachable: bool | None = None) -> bool:
        """True for the first thread of the first rank that failed.

        unreachable: the answer where the store cannot be asked; None: whether status.json does not say `failed` yet.
        """
        with self._claiming:
            if self._tells:
                return False
            try:
                self._tells = bool(self._store.add(f"{_KEY}/claims", 1) == 1)
            except Exception:
                if unreachable is None:
                    time.sleep(min(5.0, 0.2 * self.rank))  # one after the other: the first reports, the others see it
                    unreachable = self.run.read_status().get("state") in (None, "running")
                self._tells = unreachable
            with contextlib.suppress(Exception):
                self._announce_end()
            return self._tells

    def _announce_end(self) -> None:
        """Tells the other ranks that this one ends in order, or has failed and reports it itself."""
        self._store.set(f"{_KEY}/alive_{self.rank}", "")
        self._store.set(f"{_KEY}/rank_{self.rank}", _KERNEL if host_memory.killed_since(self._killed) else "")

    def silent_ranks(self, *, stuck: bool) -> list[int] | None:
        """Ranks that were killed, most likely: their threads do not notice the failure in time.

        None: the store does not answer either. stuck: also ranks that run, but have not failed.
        """
        said = "rank" if stuck else "alive"
        with contextlib.suppress(Exception):
            deadline = time.monotonic() + 2.0
            while True:
                silent = [r for r in range(self.ranks) if not self._store.check([f"{_KEY}/{said}_{r}"])]
                if not silent or time.monotonic() > deadline:
                    return silent
                time.sleep(0.1)
        return None

    def _kernel_acted(self, silent: list[int]) -> bool:
        """Whether the out-of-memory killer has ended a process on this node, or that of another rank that says so."""
        if host_memory.killed_since(self._killed):
            return True
        with contextlib.suppress(Exception):
            others = [f"{_KEY}/rank_{rank}" for rank in range(self.ranks) if rank not in silent]
            return any(said.decode() == _KERNEL for said in self._store.multi_get(others))
        return False

    def fail(self, told: str, *, reason: str, **noted: Any) -> None:
        """Tells the cause, for all ranks: to the console, status.json, events.jsonl and torchrun's agent. After `claim`.

        noted: more for events.jsonl.
        """
        with contextlib.suppress(OSError):  # the console's other end may be gone
            print(told, file=self.console, flush=True)
        step = self.progress.step
        try:
            self.run.write_status("failed", step=step, reason=reason, error=told)
            self.run.note("failed", ranks=self.ranks, step=step, reason=reason, **noted)
        except (OSError, TrainingError) as error:  # the disk is full, or the folder is another job's
            with contextlib.suppress(OSError):
                if str(error) not in told:
                    print(error, file=self.console, flush=True)
        self.environment.tell_agent(told)

    def _conclude(self, account: Account, told: str) -> None:
        """Asks the plan, and tells that too. `told` stands everywhere by now, should this rank be killed meanwhile."""
        self._explaining(True)
        with contextlib.suppress(OSError, TrainingError):
            if not account.restarts_now:
                print("asking the memory plan what would fit ...", file=self.console, flush=True)
            try:
                more = account.conclude(_EXPLAIN_SECONDS)
            except Exception as error:
                more = f"what would fit could not be found out: {describe(error)}"
            print(more, file=self.console, flush=True)
            self.environment.tell_agent(f"{told}\n{more}")
            self.run.write_status("failed", step=self.progress.step, reason="out_of_memory", error=f"{told}\n{more}")

    def _explaining(self, now: bool) -> None:
        """Tells the other ranks to wait, or no longer to."""
        with contextlib.suppress(Exception):
            self._store.set(f"{_KEY}/explaining" if now else f"{_KEY}/explained", "")

    def _let_explain(self) -> None:
        """Waits for a rank that is asking the plan: torchrun's agent kills all of a node's ranks soon after the first has ended."""
        deadline = time.monotonic() + _EXPLAIN_SECONDS
        with contextlib.suppress(Exception):
            while self._store.check([f"{_KEY}/explaining"]) and not self._store.check([f"{_KEY}/explained"]):
                if time.monotonic() > deadline or self._done.wait(_POLL_SECONDS):
                    return

    def stop_before_training(self, who: str) -> NoReturn:
        """Ends this rank, and with it all others, as stopped: nothing was trained, nothing is to be saved."""
        first = True
        with contextlib.suppress(Exception):
            if lost := self._lost_neighbours():  # torchrun ends the others with this signal, sooner than they are polled
                self._report_lost(lost)
            if self._store.check([f"{_KEY}/claims"]):  # a rank failed, and torchrun ends the others with this signal
                self.end(EXIT_FAILED)
            first = self._store.add(f"{_STOPPED}/claims", 1) == 1
            if not first:
                self._store.wait([_STOPPED], timedelta(seconds=10))
        if first:
            with contextlib.suppress(OSError):
                print(f"stopped before the first step, asked by {who}: there is nothing to save", file=self.console, flush=True)
            with contextlib.suppress(OSError, TrainingError):
                self.run.write_status("stopped", step=self.progress.step, reason=who)
                self.run.note("stopped", ranks=self.ranks, step=self.progress.step, reason=who)
            # Only now may the others end: rank 0 lets the folder go, and this rank could not write
            with contextlib.suppress(Exception):
                self._store.set(_STOPPED, "")
        self.end(self._stopped_status())

    def end(self, status: int) -> NoReturn:
        """Ends this process and lets the folder go. A second thread that calls this waits for the first one's end."""
        self._ending.acquire()
        closing = threading.Thread(target=self.on_end, name="closing", daemon=True)
        with contextlib.suppress(RuntimeError):  # no thread can be started where memory ran out
            closing.start()
            closing.join(_CLOSE_SECONDS)
        self.run.release()
        end_process(status)

    def report(self, error: BaseException) -> int:
        """Writes the whole traceback to the rank's log, and, from the first rank that failed, tells the cause.

        Returns the exit status.
        """
        with contextlib.suppress(Exception):
            if self._store.check([_STOPPED]):  # another rank ended, as it was asked to
                return self._stopped_status()
        rank, ranks, step = self.rank, self.ranks, self.progress.step
        log_file = self.run.log / f"rank_{rank}.log"
        user = isinstance(error, RecipeError)
        if not isinstance(error, (RecipeError, TrainingError)):
            with contextlib.suppress(OSError), log_file.open("a", encoding="utf-8") as log:
                traceback.print_exception(error, file=log)
            error = first_cause(error)
        if not self.claim(unreachable=True):
            if self._tells:  # the watch of this rank has noticed it too, reports it, and ends the process
                threading.Event().wait()
            if ran_out_of_memory(error):  # all ranks do, often: the first one may not have said yet that it asks
                time.sleep(_POLL_SECONDS)
            self._let_explain()
            return EXIT_USAGE if user else EXIT_FAILED
        if ran_out_of_memory(error):
            self._explaining(True)
        account: Account | None = None
        reason, told = "error", f"rank {rank} of {ranks} failed in step {step + 1}: {describe(error)}\nThe traceback is in {log_file}"
        if isinstance(error, TrainingError):
            reason, told = error.reason, f"failed after step {step}: {error}"
        elif user:
            reason, told = "recipe", str(error)
        elif ran_out_of_memory(error):
            reason, told = "out_of_memory", f"rank {rank} of {ranks} ran out of memory in step {step + 1}: {describe(error)}"
            if account := self._account(error):
                told = account.told
            told += f"\nThe traceback is in {log_file}"
        elif "DataLoader worker" in str(error) and host_memory.killed_since(self._killed):
            reason, account = "out_of_memory", self._account(error, killed=f"a loader process of rank {rank}")
            told = account.told if account is not None else f"a loader process of rank {rank} {_KILLED}"
        elif lost_a_peer(error):
            timeout = any(sign in str(error).lower() for sign in _TIMEOUT_SIGNS)
            silent = self.silent_ranks(stuck=timeout)
            if silent is None:
                reason = "rank_lost"
                what = f"lost the others in step {step + 1}: neither they answer nor the store where ranks meet"
                told = f"rank {rank} of {ranks} {what}. Is the network down, or the node of rank 0?"
            elif silent and timeout:
                reason = "timeout"
                told = f"{self._names(silent)} did not answer in step {step + 1} within the time a collective may take (run.timeout)."
            elif silent:
                reason, told, account = self._loss(silent, error)
            if reason != "error":
                told += f"\nHow rank {rank} noticed is in {log_file}"
        self._tell(told, reason, account)
        return EXIT_USAGE if user else EXIT_FAILED

    def _tell(self, told: str, reason: str, account: Account | None) -> None:
        self.fail(told, reason=reason, **(account.noted if account is not None else {}))
        if account is not None:
            self._conclude(account, told)
        self._explaining(False)

    def _names(self, ranks: list[int]) -> str:
        return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))} of {self.ranks}"

    def _loss(self, lost: list[int], error: BaseException | None = None) -> tuple[str, str, Account | None]:
        """Reason and message for ranks that were killed, and what there is to tell of memory if the kernel did it."""
        names, step = self._names(lost), self.progress.step + 1
        if self._kernel_acted(lost):
            account = self._account(error, killed=names)
            return "out_of_memory", account.told if account is not None else f"{names} {_KILLED}.", account
        how = "Killed? Exit code -9 is what the kernel does where host memory runs out"
        return "rank_lost", f"{names} ended without a word in step {step}. {how}.", None

    def _lost_neighbours(self) -> list[int]:
        """Ranks of this node whose processes are gone, in whatever way. Asks the kernel only."""
        gone = [rank for rank, (pid, start) in (self._neighbours or {}).items() if process_start(pid) != start]
        # Where even this process cannot be read (no file descriptor is left) nothing is known of the others
        return gone if gone and process_start(os.getpid()) is not None else []

    def _report_lost(self, lost: list[int]) -> None:
        """Reports the lost ranks that did not announce their end, and ends this process.

        Returns where there are none, or where another rank reports a failure.
        """
        lost = [rank for rank in lost if not self._store.check([f"{_KEY}/rank_{rank}"])]
        if lost and not self._store.check([_STOPPED]):
            self._end_without(lost)

    def _end_without(self, lost: list[int]) -> None:
        if self.claim():
            reason, told, account = self._loss(lost)
            self._tell(f"{told}\nRank {self.rank}, on the same node, saw that its process was gone", reason, account)
            self.end(EXIT_FAILED)

    def _find_neighbours(self) -> None:
        """Publishes this rank's process, and learns those of the other ranks on this node.

        torchrun numbers a node's ranks in a row.
        """
        machine, key, first = this_machine(), f"{_KEY}/process_{{}}".format, self.rank - self.environment.local_rank
        ranks = range(max(0, first), min(self.ranks, first + self.environment.local_world_size))
        self._store.set(key(self.rank), f"{machine} {os.getpid()} {process_start(os.getpid())}")
        if self._store.check([key(rank) for rank in ranks]):
            said = {rank: self._store.get(key(rank)).decode().split() for rank in ranks if rank != self.rank}
            self._neighbours = {rank: (int(pid), int(start)) for rank, (where, pid, start) in said.items() if where == machine}

    def _account(self, error: BaseException | None, *, killed: str | None = None) -> Account | None:
        """killed: what was, by the kernel. None where nothing is known yet, or counting itself fails."""
        step = self.progress.step
        if self.post_mortem is not None:
            with contextlib.suppress(Exception):
                if killed is not None:
                    return self.post_mortem.killed(killed, step)
                assert error is not None
                return self.post_mortem.examine(error, step=step, phase=self.progress.phase, micro_batch=self.progress.micro_batch)
        return None

    def _stopped_status(self) -> int:
        return EXIT_DONE if self.environment.torchrun else EXIT_STOPPED

    def _watch(self) -> None:
        failed = 0
        while not self._done.wait(_POLL_SECONDS):
            lost = self._lost_neighbours()  # before the store is asked: a rank that ends in order announces it there first
            try:
                if self._look_at_store(lost):
                    return
                if self._neighbours is None:
                    self._find_neighbours()
                failed = 0
            except Exception:  # of the store: one error may pass, and the watchdog notices its end
                failed += 1
                if failed >= _FAILED_POLLS and lost:
                    self._end_without(lost)

    def _look_at_store(self, lost: list[int]) -> bool:
        """True: this rank ends by itself; nothing is left to watch."""
        if self._store.check([_STOPPED]):
            self.end(self._stopped_status())
        if self._store.check([f"{_KEY}/claims"]):
            self._store.set(f"{_KEY}/alive_{self.rank}", "")
            if not self._done.wait(_GRACE_SECONDS) and not self._tells:
                self._let_explain()
                print(f"rank {self.rank}: another rank failed while this one was busy; ending", file=sys.stderr, flush=True)
                self.end(EXIT_FAILED)
            return True
        if lost:
            self._report_lost(lost)
        return False


def lost_a_peer(error: BaseException) -> bool:
    """Whether an exception may say no more than that another rank is gone.

    torchrun sends SIGTERM to all processes of the other ranks then, and the end of a loader
    process is raised in its rank.
    """
    text = str(error).lower()
    signs = (
        *("connection closed by peer", "connection reset by peer", "broken pipe"),
        *("remote process exited", "is killed by signal: terminated", *_TIMEOUT_SIGNS),
    )
    return isinstance(error, RuntimeError) and not isinstance(error, TrainingError) and any(sign in text for sign in signs)


def first_cause(error: BaseException) -> BaseException:
    """The earliest lost peer or lack of memory in an exception's chain of causes; itself if none.

    A worker of the data loader, say, that is ended while a lost connection is handled raises an
    exception of its own.
    """
    cause, earlier = error, error
    while (before := earlier.__cause__ or (None if earlier.__suppress_context__ else earlier.__context__)) is not None:
        earlier = before
        if lost_a_peer(earlier) or ran_out_of_memory(earlier):
            cause = earlier
    return cause


def ran_out_of_memory(error: BaseException) -> bool:
    """Whether it is torch's error of a device, Python's own, or what the CPU's allocator and CUDA's libraries say."""
    if isinstance(error, (RecipeError, TrainingError)):
        return False
    text = str(error).lower()
    said = isinstance(error, RuntimeError) and any(sign in text for sign in _MEMORY_SIGNS)
    return said or isinstance(error, (MemoryError, torch.OutOfMemoryError))


def describe(error: BaseException) -> str:
    """One line: the exception's type and message, and the line of code that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({os.path.relpath(frames[-1].filename)}:{frames[-1].lineno})" if frames else ""
    message = str(error).strip().splitlines()
    return f"{type(error).__name__}: {message[0] if message else 'no message'}{where}"


@contextlib.contextmanager
def failing_together(
    store: Store, *, environment: Environment, run: RunFolder, console: TextIO, progress: Progress
) -> Iterator[FailureWatch]:
    """Whatever is raised inside ends this process, told as `FailureWatch.report` tells it, and the other ranks with it."""
    watch = FailureWatch(store, environment=environment, run=run, console=console, progress=progress)
    try:
        watch.share_owner()
        yield watch
    except BaseException as error:
        if isinstance(error, SystemExit):
            raise
        watch.end(watch.report(error))
    finally:
        watch.close()


def end_process(status: int) -> NoReturn:
    """Ends at once, without the clean-up that could wait for a peer that is gone, but not without its loader processes."""
    for child in multiprocessing.active_children():
        child.terminate()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(status)
