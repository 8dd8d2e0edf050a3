"""When one rank fails, all ranks end within seconds, and one of them reports the cause.

The first rank that fails claims the failure in the store that the ranks share. The others fail
next because they lost a peer; their exceptions stay in their logs. A rank that is stuck in a
collective raises nothing (under NCCL the CPU waits for the device): its watchdog (`watchdog.py`)
sees the claim in the store and ends the process.
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
from typing import NoReturn, TextIO

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
_CLAIMS, _REPORTED, _OWNER = "failed/claims", "failed/reported", "owner"
_NOTICED, _ENDED = "failed/noticed_{}".format, "failed/rank_{}".format
"""By rank: it noticed another rank's failure; it failed itself or ended in order."""

_REPORT_SECONDS = 60.0
"""Time for the memory plan to find what would fit."""
_CLOSE_SECONDS = 10.0
"""Time for the metrics services to take the last records. torchrun kills a rank after 30."""


class FailureWatch:
    """This rank's part in reporting a failure and ending the run."""

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
        """None: the recipe's memory is not known yet."""
        self.on_end: Callable[[], None] = lambda: None
        """Flushes and closes what the run writes, before a failure ends this process."""
        self.neighbours = Neighbours(environment)
        self.claimed = False
        """A thread of this rank reports the failure; no other one may end the process meanwhile."""
        self.store_blocked = False
        """The store neither answers nor fails: it must not be called."""
        self._stopped_status = EXIT_DONE if environment.torchrun else EXIT_STOPPED
        self._found = run.read_status()
        self._shared = store
        # A separate connection: that of the process group may wait for a lost rank
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
        """Shares rank 0's record in RUN_DIR/owner: any rank may have to write a failure there."""
        ownership = self.run.ownership
        if self.ranks > 1 and self.rank == 0:
            self._shared.set(_OWNER, ownership.name if ownership is not None else "")
        elif self.ranks > 1 and (name := self._shared.get(_OWNER).decode()):
            self.run.ownership = Ownership.follow(self.run.path, name)

    def close(self) -> None:
        """This rank ends in order, so its neighbours must not report a lost process."""
        if self.ranks > 1:
            with contextlib.suppress(Exception):
                self._announce_end()

    def _announce_end(self) -> None:
        self.notice()
        self.store.set(_ENDED(self.rank), "")

    # Claims

    def claim(self) -> bool:
        """True for one thread of one rank, which then must `report`.

        If the store fails or blocks, status.json decides, which changes once a rank has reported.
        """
        if self.store_blocked:
            return self._claim_by_status()
        with self._claiming:
            if self.claimed:
                return False
            try:
                first = self.store.add(_CLAIMS, 1) == 1
                self.claimed = first and self._state() != "failed"
                if first and not self.claimed:  # a rank reported while the store was blocked
                    self._set_reported(EXIT_FAILED)
            except Exception:
                self._claim_by_status()
            with contextlib.suppress(Exception):
                self._announce_end()
            return self.claimed

    def _claim_by_status(self) -> bool:
        time.sleep(min(5.0, 0.2 * self.rank))  # one rank after the other
        self.claimed = self._state() == "running"
        return self.claimed

    def _state(self) -> str | None:
        """Of status.json; `running` if it was not written since this process started."""
        status = self.run.read_status()
        return "running" if status == self._found else status.get("state")

    def other_claimed(self) -> bool:
        """Whether a rank reports a failure or an early stop. Raises RuntimeError if the store
        fails."""
        return bool(self.store.check([_CLAIMS]))

    def notice(self) -> None:
        """Announces that this rank runs and has noticed the claim."""
        self.store.set(_NOTICED(self.rank), "")

    def stopped(self) -> bool:
        """Whether a rank has ended the run on request before the first step."""
        return self.store.check([_REPORTED]) and self.wait_for_report() == self._stopped_status

    def wait_for_report(self) -> int:
        """Waits for the rank that claimed, and returns the exit status for all.

        torchrun's agent kills the ranks of a node soon after one of them has ended.
        """
        deadline = time.monotonic() + _REPORT_SECONDS
        with contextlib.suppress(Exception):
            while not self.store.check([_REPORTED]) and time.monotonic() < deadline:
                time.sleep(0.2)
            return int(self.store.get(_REPORTED))
        return EXIT_FAILED

    def _set_reported(self, status: int) -> None:
        if not self.store_blocked:
            with contextlib.suppress(Exception):
                self.store.set(_REPORTED, str(status))

    # Reports

    def report(
        self, reason: str, text: str, account: Account | None = None, *, status: int = EXIT_FAILED
    ) -> None:
        """Reports a claimed failure: console, status.json, events.jsonl, torchrun's agent.

        account: of exhausted memory; the memory plan's answer follows. status: exit status of all.
        """
        self._print(text)
        step = self.progress.step
        noted = account.noted if account is not None else {}
        try:
            self.run.write_status("failed", step=step, reason=reason, error=text)
            self.run.note("failed", ranks=self.ranks, step=step, reason=reason, **noted)
        except (OSError, TrainingError) as error:  # the disk is full, or another job has the folder
            if str(error) not in text:
                self._print(str(error))
        self.environment.tell_agent(text)
        if account is not None:
            self._add_conclusion(account, text)
        self._set_reported(status)

    def _add_conclusion(self, account: Account, text: str) -> None:
        if not account.restarts_now:
            self._print("asking the memory plan what would fit ...")
        try:
            more = account.conclude(_REPORT_SECONDS)
        except Exception as error:
            more = f"what would fit could not be found out: {describe(error)}"
        self._print(more)
        text = f"{text}\n{more}"
        self.environment.tell_agent(text)
        with contextlib.suppress(OSError, TrainingError):
            step = self.progress.step
            self.run.write_status("failed", step=step, reason="out_of_memory", error=text)

    def _print(self, text: str) -> None:
        with contextlib.suppress(OSError):  # the reader of the console may be gone
            print(text, file=self.console, flush=True)

    def report_exception(self, error: BaseException) -> int:
        """Writes the traceback to the rank's log; the first rank that failed reports the cause.

        Returns the exit status.
        """
        log_file = self.run.log / f"rank_{self.rank}.log"
        unexpected = not isinstance(error, (RecipeError, TrainingError))
        if unexpected:
            with contextlib.suppress(OSError), log_file.open("a", encoding="utf-8") as log:
                traceback.print_exception(error, file=log)
            error = first_cause(error)
        if not self.claim():
            if self.claimed:  # the watchdog of this rank reports, and ends the process
                threading.Event().wait()
            return self.wait_for_report()
        reason, text, account = self._cause(error)
        if unexpected:
            text += f"\nThe traceback of rank {self.rank} is in {log_file}"
        status = EXIT_USAGE if isinstance(error, RecipeError) else EXIT_FAILED
        self.report(reason, text, account, status=status)
        return status

    def _cause(self, error: BaseException) -> tuple[str, str, Account | None]:
        """Reason and message, and what is known about memory if it ran out."""
        name, step = f"rank {self.rank} of {self.ranks}", self.progress.step + 1
        if isinstance(error, TrainingError):
            return error.reason, f"failed after step {step - 1}: {error}", None
        if isinstance(error, RecipeError):
            return "recipe", str(error), None
        if ran_out_of_memory(error):
            account = self._examine(error)
            text = f"{name} ran out of memory in step {step}: {describe(error)}"
            return "out_of_memory", account.told if account else text, account
        if "DataLoader worker" in str(error) and host_memory.killed_since(self._killed):
            return self._killed_by_kernel(f"a loader process of {name}")
        if lost_a_peer(error):
            late = timed_out(error)
            silent = self._silent_ranks(running=late)
            if silent is None:
                text = f"{name} lost the other ranks and their store in step {step}. Is the "
                return "rank_lost", f"{text}network down, or the node of rank 0?", None
            if silent and late:
                text = f"{self._names(silent)} did not answer in step {step} "
                text += "within the time limit of a collective (run.timeout)"
                return "timeout", text, None
            if silent:
                return self._loss(silent)
        return "error", f"{name} failed in step {step}: {describe(error)}", None

    def _examine(self, error: BaseException) -> Account | None:
        """None: the memory is not known yet, or the examination fails."""
        progress = self.progress
        with contextlib.suppress(Exception):
            if self.post_mortem is not None:
                return self.post_mortem.examine(
                    error,
                    step=progress.step,
                    phase=progress.phase,
                    micro_batch=progress.micro_batch,
                )
        return None

    # Lost ranks

    def report_lost(self, lost: list[int], *, ask_store: bool = True) -> None:
        """Reports neighbours that were killed, and ends this process.

        Returns if another rank reports or, by the store, they ended in order. Raises RuntimeError
        if the store fails.
        """
        if ask_store:
            lost = [rank for rank in lost if not self.store.check([_ENDED(rank)])]
        if lost and self.claim():
            reason, text, account = self._loss(lost)
            text += f"\nRank {self.rank}, on the same node, found its process gone"
            self.report(reason, text, account)
            self.end(EXIT_FAILED)

    def _loss(self, lost: list[int]) -> tuple[str, str, Account | None]:
        """As `_cause`, for ranks that were killed."""
        names = self._names(lost)
        if host_memory.killed_since(self._killed):
            return self._killed_by_kernel(names)
        text = f"{names} ended without an error message in step {self.progress.step + 1}. "
        text += "Exit code -9 means killed, for example by the kernel when host memory ran out"
        return "rank_lost", text, None

    def _killed_by_kernel(self, name: str) -> tuple[str, str, Account | None]:
        account = None
        with contextlib.suppress(Exception):
            if self.post_mortem is not None:
                account = self.post_mortem.killed(name, self.progress.step)
        text = f"{name} was killed by the kernel because host memory ran out"
        return "out_of_memory", account.told if account else text, account

    def _names(self, ranks: list[int]) -> str:
        return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))} of {self.ranks}"

    def _silent_ranks(self, *, running: bool) -> list[int] | None:
        """Ranks that do not notice the failure within three seconds, so were probably killed.

        running: includes ranks that run but have not failed. None: the store does not answer.
        """
        key, deadline = _ENDED if running else _NOTICED, time.monotonic() + 3.0
        with contextlib.suppress(Exception):
            while True:
                silent = [rank for rank in range(self.ranks) if not self.store.check([key(rank)])]
                if not silent or time.monotonic() > deadline:
                    return silent
                time.sleep(0.1)
        return None

    # The end

    def stop_before_training(self, source: str) -> NoReturn:
        """Ends this rank, and with it all others, as stopped: there is nothing to save."""
        with contextlib.suppress(Exception):
            # torchrun ends the ranks with the same signal after one of them has failed
            self.report_lost(self.neighbours.lost())
        if not self.claim():
            self.end(self.wait_for_report())
        step = self.progress.step
        self._print(f"stopped by {source} before the first step: there is nothing to save")
        with contextlib.suppress(OSError, TrainingError):
            self.run.write_status("stopped", step=step, reason=source)
            self.run.note("stopped", ranks=self.ranks, step=step, reason=source)
        # The others may end only now: rank 0 releases the folder, and with that ends the writing
        self._set_reported(self._stopped_status)
        self.end(self._stopped_status)

    def end(self, status: int) -> NoReturn:
        """Ends this process and releases the folder. Only the first thread that calls it does."""
        self._ending.acquire()
        closing = threading.Thread(target=self.on_end, name="closing", daemon=True)
        with contextlib.suppress(RuntimeError):  # no thread can be started where memory ran out
            closing.start()
            closing.join(_CLOSE_SECONDS)
        self.run.release()
        end_process(status)


@contextlib.contextmanager
def failing_together(
    store: Store, *, environment: Environment, run: RunFolder, console: TextIO, progress: Progress
) -> Iterator[FailureWatch]:
    """An exception inside ends this process and all other ranks."""
    failures = FailureWatch(
        store, environment=environment, run=run, console=console, progress=progress
    )
    try:
        failures.share_owner()
        yield failures
    except SystemExit:
        raise
    except BaseException as error:
        failures.end(failures.report_exception(error))
    finally:
        failures.close()


def end_process(status: int) -> NoReturn:
    """Ends at once, with the loader processes; no clean-up that may wait for lost ranks."""
    for child in multiprocessing.active_children():
        child.terminate()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(status)
