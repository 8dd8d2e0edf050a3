"""When one rank fails, all end within seconds, and one of them reports why.

The first rank that fails claims the failure in the store that the ranks met at. The other ranks
fail next, since they lost a peer: that is a consequence, and stays in their logs. A rank that is
stuck in a collective raises nothing (under NCCL the CPU waits for the device): its watch
(`watchdog.py`) sees the claim in the store, and ends it.
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
from typing import Any, NoReturn, TextIO

from torch._C._distributed_c10d import Store

from launcher.distributed import host_memory
from launcher.distributed.environment import Environment
from launcher.errors import (
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_STOPPED,
    EXIT_USAGE,
    RecipeError,
    TrainingError,
)
from launcher.reliability.causes import (
    Account,
    PostMortem,
    describe,
    first_cause,
    lost_a_peer,
    ran_out_of_memory,
    timed_out,
)
from launcher.reliability.lock import Ownership
from launcher.reliability.neighbours import Neighbours
from launcher.reliability.progress import Progress
from launcher.reliability.run_directory import RunFolder

# Keys of the store
_CLAIMS, _STOPPED, _OWNER = "failed/claims", "stopped", "owner"
_EXPLAINING, _EXPLAINED = "failed/explaining", "failed/explained"
_NOTICED, _ENDED = "failed/alive_{}".format, "failed/rank_{}".format
"""Of each rank: it has noticed the failure of a rank; it ends in order, or has failed itself."""

_KERNEL = "the kernel killed a process on this node, where memory ran out"
_KILLED = "was ended by the kernel, whose out-of-memory killer acts where host memory runs out"
_POLL_SECONDS = 0.5
_EXPLAIN_SECONDS = 60.0
"""Time for the memory plan to find what would fit."""
_CLOSE_SECONDS = 10.0
"""Time for the metrics services to take the last records. torchrun kills a rank after 30."""


class FailureWatch:
    """One rank's part in agreeing on how the run ends before its time."""

    def __init__(
        self,
        store: Store,
        *,
        environment: Environment,
        run: RunFolder,
        console: TextIO,
        progress: Progress,
    ) -> None:
        self.environment, self.run, self.console = environment, run, console
        self.progress, self.rank, self.ranks = progress, environment.rank, environment.world_size
        self.post_mortem: PostMortem | None = None
        """None: nothing is known yet about the memory of the recipe."""
        self.on_end: Callable[[], None] = lambda: None
        """Flushes and closes what the run writes, before a failure ends this process."""
        self.neighbours = Neighbours(environment)
        self.claimed = False
        """A thread of this rank reports the failure: no other one may end the process meanwhile."""
        self._shared = store
        # A connection of its own: that of the process group may wait for a rank that is gone
        self.store = self._connect()
        self._killed = host_memory.killed()
        self._claiming, self._ending = threading.Lock(), threading.Lock()

    def _connect(self) -> Store:
        if self.ranks == 1:
            return self._shared
        store: Store = self._shared.clone()  # type: ignore[attr-defined]
        store.set_timeout(timedelta(seconds=10))
        return store

    def share_owner(self) -> None:
        """Tells the other ranks the record that makes this run the owner of its folder.

        They need it to write there, if they are the first to fail.
        """
        ownership = self.run.ownership
        if self.ranks > 1 and self.rank == 0:
            self._shared.set(_OWNER, ownership.name if ownership is not None else "")
        elif self.ranks > 1 and (name := self._shared.get(_OWNER).decode()):
            self.run.ownership = Ownership.follow(self.run.path, name)

    def close(self) -> None:
        """This rank ends in order: its neighbours must not report the end of its process."""
        if self.ranks > 1:
            with contextlib.suppress(Exception):
                self._announce_end()

    def _announce_end(self) -> None:
        self.store.set(_NOTICED(self.rank), "")
        killed = host_memory.killed_since(self._killed)
        self.store.set(_ENDED(self.rank), _KERNEL if killed else "")

    # Claims

    def claim(self, *, unreachable: bool | None = None) -> bool:
        """True for the first thread of the first rank that failed, which then reports.

        unreachable: the answer if the store does not answer; None: whether status.json does not
        say `failed` yet.
        """
        with self._claiming:
            if self.claimed:
                return False
            try:
                self.claimed = bool(self.store.add(_CLAIMS, 1) == 1)
            except Exception:
                if unreachable is None:
                    # One rank after the other: the first reports, the others see its status.json
                    time.sleep(min(5.0, 0.2 * self.rank))
                    unreachable = self.run.read_status().get("state") in (None, "running")
                self.claimed = unreachable
            with contextlib.suppress(Exception):
                self._announce_end()
            return self.claimed

    def other_failed(self) -> bool:
        """Whether a rank has claimed a failure. Raises RuntimeError if the store fails."""
        return bool(self.store.check([_CLAIMS]))

    def notice(self) -> None:
        """Tells the rank that reports that this one runs, and has noticed."""
        self.store.set(_NOTICED(self.rank), "")

    def other_stopped(self) -> bool:
        """Whether a rank has ended the run as it was asked to, before the first step."""
        return bool(self.store.check([_STOPPED]))

    def wait_for_report(self) -> None:
        """Waits while another rank asks the memory plan.

        torchrun's agent kills all ranks of a node soon after the first one has ended.
        """
        deadline = time.monotonic() + _EXPLAIN_SECONDS
        with contextlib.suppress(Exception):
            while self.store.check([_EXPLAINING]) and not self.store.check([_EXPLAINED]):
                if time.monotonic() > deadline:
                    return
                time.sleep(_POLL_SECONDS)

    # Reports

    def fail(self, text: str, *, reason: str, **noted: Any) -> None:
        """Reports the cause for all ranks: console, status.json, events.jsonl, torchrun's agent.

        After `claim`. noted: more for events.jsonl.
        """
        with contextlib.suppress(OSError):  # the reader of the console may be gone
            print(text, file=self.console, flush=True)
        step = self.progress.step
        try:
            self.run.write_status("failed", step=step, reason=reason, error=text)
            self.run.note("failed", ranks=self.ranks, step=step, reason=reason, **noted)
        except (OSError, TrainingError) as error:  # the disk is full, or another job has the folder
            with contextlib.suppress(OSError):
                if str(error) not in text:
                    print(error, file=self.console, flush=True)
        self.environment.tell_agent(text)

    def report(self, error: BaseException) -> int:
        """Writes the traceback to the rank's log; the first rank that failed reports the cause.

        Returns the exit status.
        """
        with contextlib.suppress(Exception):
            if self.other_stopped():
                return self.stopped_status
        status = EXIT_USAGE if isinstance(error, RecipeError) else EXIT_FAILED
        log_file = self.run.log / f"rank_{self.rank}.log"
        if not isinstance(error, (RecipeError, TrainingError)):
            with contextlib.suppress(OSError), log_file.open("a", encoding="utf-8") as log:
                traceback.print_exception(error, file=log)
            error = first_cause(error)
        if not self.claim(unreachable=True):
            if self.claimed:  # the watch of this rank reports, and ends the process
                threading.Event().wait()
            if ran_out_of_memory(error):  # the first rank may not have announced yet that it asks
                time.sleep(_POLL_SECONDS)
            self.wait_for_report()
            return status
        if ran_out_of_memory(error):
            self._set(_EXPLAINING)
        reason, text, account = self._cause(error)
        if not isinstance(error, (RecipeError, TrainingError)):
            how = f"How rank {self.rank} noticed" if _lost(reason, error) else "The traceback"
            text += f"\n{how} is in {log_file}"
        self._tell(reason, text, account)
        return status

    def _cause(self, error: BaseException) -> tuple[str, str, Account | None]:
        """Reason and message, and what is known about memory if it ran out."""
        who, step = f"rank {self.rank} of {self.ranks}", self.progress.step + 1
        if isinstance(error, TrainingError):
            return error.reason, f"failed after step {step - 1}: {error}", None
        if isinstance(error, RecipeError):
            return "recipe", str(error), None
        if ran_out_of_memory(error):
            account = self._account(error)
            text = f"{who} ran out of memory in step {step}: {describe(error)}"
            return "out_of_memory", account.told if account else text, account
        if "DataLoader worker" in str(error) and host_memory.killed_since(self._killed):
            who = f"a loader process of rank {self.rank}"
            account = self._account(error, killed=who)
            return "out_of_memory", account.told if account else f"{who} {_KILLED}", account
        if lost_a_peer(error):
            late = timed_out(error)
            silent = self._silent_ranks(running=late)
            if silent is None:
                text = f"{who} lost the others in step {step}: neither they answer nor the store "
                text += "where ranks meet. Is the network down, or the node of rank 0?"
                return "rank_lost", text, None
            if silent and late:
                text = f"{self._names(silent)} did not answer in step {step} "
                return (
                    "timeout",
                    f"{text}within the time a collective may take (run.timeout).",
                    None,
                )
            if silent:
                return self._loss(silent, error)
        return "error", f"{who} failed in step {step}: {describe(error)}", None

    def _tell(self, reason: str, text: str, account: Account | None) -> None:
        self.fail(text, reason=reason, **(account.noted if account is not None else {}))
        if account is not None:
            self._conclude(account, text)
        self._set(_EXPLAINED)

    def _conclude(self, account: Account, text: str) -> None:
        """Asks the plan, and reports its answer too. `text` was reported already."""
        self._set(_EXPLAINING)
        with contextlib.suppress(OSError, TrainingError):
            if not account.restarts_now:
                asking = "asking the memory plan what would fit ..."
                print(asking, file=self.console, flush=True)
            try:
                more = account.conclude(_EXPLAIN_SECONDS)
            except Exception as error:
                more = f"what would fit could not be found out: {describe(error)}"
            print(more, file=self.console, flush=True)
            text = f"{text}\n{more}"
            self.environment.tell_agent(text)
            step = self.progress.step
            self.run.write_status("failed", step=step, reason="out_of_memory", error=text)

    def _set(self, key: str) -> None:
        with contextlib.suppress(Exception):
            self.store.set(key, "")

    def _account(self, error: BaseException | None, *, killed: str | None = None) -> Account | None:
        """killed: what the kernel killed. None: nothing is known yet, or the examination fails."""
        progress = self.progress
        if self.post_mortem is not None:
            with contextlib.suppress(Exception):
                if killed is not None:
                    return self.post_mortem.killed(killed, progress.step)
                assert error is not None
                return self.post_mortem.examine(
                    error,
                    step=progress.step,
                    phase=progress.phase,
                    micro_batch=progress.micro_batch,
                )
        return None

    # Lost ranks

    def report_lost(self, lost: list[int]) -> None:
        """Reports neighbours that were killed, and ends this process.

        Returns if they ended in order, or if another rank reports. Raises RuntimeError if the
        store does not answer.
        """
        lost = [rank for rank in lost if not self.store.check([_ENDED(rank)])]
        if lost and not self.other_stopped():
            self.end_without(lost)

    def end_without(self, lost: list[int]) -> None:
        """The same for ranks that are known to be lost."""
        if self.claim():
            reason, text, account = self._loss(lost)
            text += f"\nRank {self.rank}, on the same node, saw that its process was gone"
            self._tell(reason, text, account)
            self.end(EXIT_FAILED)

    def _loss(
        self, lost: list[int], error: BaseException | None = None
    ) -> tuple[str, str, Account | None]:
        """As `_cause`, for ranks that were killed."""
        names = self._names(lost)
        if self._kernel_killed(lost):
            account = self._account(error, killed=names)
            return "out_of_memory", account.told if account else f"{names} {_KILLED}.", account
        text = f"{names} ended without a word in step {self.progress.step + 1}. "
        text += "Killed? Exit code -9 is what the kernel does where host memory runs out."
        return "rank_lost", text, None

    def _names(self, ranks: list[int]) -> str:
        return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))} of {self.ranks}"

    def _silent_ranks(self, *, running: bool) -> list[int] | None:
        """Ranks that do not notice the failure within two seconds: most likely they were killed.

        running: also ranks that run, but have not failed. None: the store does not answer.
        """
        key = _ENDED if running else _NOTICED
        with contextlib.suppress(Exception):
            deadline = time.monotonic() + 2.0
            while True:
                silent = [rank for rank in range(self.ranks) if not self.store.check([key(rank)])]
                if not silent or time.monotonic() > deadline:
                    return silent
                time.sleep(0.1)
        return None

    def _kernel_killed(self, lost: list[int]) -> bool:
        """Whether the out-of-memory killer acted on this node, or on that of another rank."""
        if host_memory.killed_since(self._killed):
            return True
        with contextlib.suppress(Exception):
            others = [_ENDED(rank) for rank in range(self.ranks) if rank not in lost]
            return any(text.decode() == _KERNEL for text in self.store.multi_get(others))
        return False

    # The end

    def stop_before_training(self, who: str) -> NoReturn:
        """Ends this rank, and with it all others, as stopped: there is nothing to save."""
        first = True
        with contextlib.suppress(Exception):
            # torchrun ends the ranks with the same signal when one of them has died or failed
            if lost := self.neighbours.lost():
                self.report_lost(lost)
            if self.other_failed():
                self.end(EXIT_FAILED)
            first = self.store.add(f"{_STOPPED}/claims", 1) == 1
            if not first:
                self.store.wait([_STOPPED], timedelta(seconds=10))
        if first:
            text = f"stopped before the first step, asked by {who}: there is nothing to save"
            step = self.progress.step
            with contextlib.suppress(OSError):
                print(text, file=self.console, flush=True)
            with contextlib.suppress(OSError, TrainingError):
                self.run.write_status("stopped", step=step, reason=who)
                self.run.note("stopped", ranks=self.ranks, step=step, reason=who)
            # Only now may the others end: rank 0 releases the folder, and this rank could not write
            self._set(_STOPPED)
        self.end(self.stopped_status)

    @property
    def stopped_status(self) -> int:
        """Exit status of a rank of a stopped run: torchrun restarts on anything but 0."""
        return EXIT_DONE if self.environment.torchrun else EXIT_STOPPED

    def end(self, status: int) -> NoReturn:
        """Ends this process and releases the folder. Only the first thread that calls it does."""
        self._ending.acquire()
        closing = threading.Thread(target=self.on_end, name="closing", daemon=True)
        with contextlib.suppress(RuntimeError):  # no thread can be started where memory ran out
            closing.start()
            closing.join(_CLOSE_SECONDS)
        self.run.release()
        end_process(status)


def _lost(reason: str, error: BaseException) -> bool:
    """Whether this rank only noticed the failure of another one."""
    return lost_a_peer(error) and reason != "error"


@contextlib.contextmanager
def failing_together(
    store: Store, *, environment: Environment, run: RunFolder, console: TextIO, progress: Progress
) -> Iterator[FailureWatch]:
    """An exception inside ends this process and all other ranks, as `FailureWatch.report` says."""
    failures = FailureWatch(
        store, environment=environment, run=run, console=console, progress=progress
    )
    try:
        failures.share_owner()
        yield failures
    except BaseException as error:
        if isinstance(error, SystemExit):
            raise
        failures.end(failures.report(error))
    finally:
        failures.close()


def end_process(status: int) -> NoReturn:
    """Ends at once, and the loader processes too; no clean-up that may wait for lost peers."""
    for child in multiprocessing.active_children():
        child.terminate()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(status)
