"""When one rank fails, all end within seconds, and one of them says why.

The first rank that raises claims the failure in the store that the ranks met at; what the others raise afterwards,
having lost a peer, is a consequence and stays in their logs. A rank that is stuck in a collective raises nothing: each
rank therefore watches the store from a thread, and ends itself when a peer has failed and it does not get away.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from datetime import timedelta
from typing import NoReturn, TextIO

from torch._C._distributed_c10d import Store

from launcher.environment import Environment
from launcher.errors import EXIT_FAILED, EXIT_USAGE, RecipeError, TrainingError
from launcher.run_folder import RunFolder

_KEY = "failed"
_POLL_SECONDS = 0.5
_GRACE_SECONDS = 4.0
_TIMEOUT_SIGNS = ("timed out waiting", "collective operation timeout")


class FailureWatch:
    """One rank's part in agreeing on a failure."""

    def __init__(self, store: Store, *, rank: int, ranks: int) -> None:
        # A connection of its own: the group's may be busy, waiting for a rank that is gone.
        self._store = store.clone() if ranks > 1 else store  # type: ignore[attr-defined]
        self._store.set_timeout(timedelta(seconds=10))
        self._rank, self._ranks = rank, ranks
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="failure-watch", daemon=True)
        if ranks > 1:
            self._thread.start()

    def close(self) -> None:
        """This rank got through. A thread that were still in the store when the interpreter ends would abort it."""
        self._done.set()
        if self._thread.is_alive():
            self._thread.join(timeout=11)

    def claim(self) -> bool:
        """True for the first rank that failed, or where nobody can be asked."""
        try:
            return bool(self._store.add(f"{_KEY}/claims", 1) == 1)
        except Exception:
            return True
        finally:
            with contextlib.suppress(Exception):
                self._store.set(f"{_KEY}/rank_{self._rank}", "")

    def silent_ranks(self) -> list[int]:
        """Ranks that have not said that they failed too, after a moment to do so: killed, most likely."""
        with contextlib.suppress(Exception):
            deadline = time.monotonic() + 2.0
            while True:
                silent = [r for r in range(self._ranks) if not self._store.check([f"{_KEY}/rank_{r}"])]
                if not silent or time.monotonic() > deadline:
                    return silent
                time.sleep(0.1)
        return []

    def _watch(self) -> None:
        with contextlib.suppress(Exception):
            while not self._done.wait(_POLL_SECONDS):
                if self._store.check([f"{_KEY}/claims"]):
                    if not self._done.wait(_GRACE_SECONDS):
                        print(f"rank {self._rank}: another rank failed while this one was busy; ending", file=sys.stderr, flush=True)
                        end_process(EXIT_FAILED)
                    return


def lost_a_peer(error: BaseException) -> bool:
    """Whether an exception says no more than that another rank is gone."""
    text = str(error).lower()
    signs = ("connection closed by peer", "connection reset by peer", "broken pipe", "remote process exited", *_TIMEOUT_SIGNS)
    return isinstance(error, RuntimeError) and not isinstance(error, TrainingError) and any(sign in text for sign in signs)


def describe(error: BaseException) -> str:
    """One line: the exception's type and message, and the line of code that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({os.path.relpath(frames[-1].filename)}:{frames[-1].lineno})" if frames else ""
    message = str(error).strip().splitlines()
    return f"{type(error).__name__}: {message[0] if message else 'no message'}{where}"


def report(
    error: BaseException, *, progress: Progress, watch: FailureWatch, environment: Environment, run: RunFolder, console: TextIO
) -> int:
    """Writes the whole traceback to the rank's log, and, from the first rank that failed, the cause to the console, to
    status.json and to torchrun's agent. Returns the exit status."""
    rank, ranks = environment.rank, environment.world_size
    log_file = run.log / f"rank_{rank}.log"
    user = isinstance(error, RecipeError)
    if not isinstance(error, (RecipeError, TrainingError)):
        with log_file.open("a", encoding="utf-8") as log:
            traceback.print_exception(error, file=log)
    if not watch.claim():
        return EXIT_USAGE if user else EXIT_FAILED
    reason, told = "error", f"rank {rank} of {ranks} failed in step {progress.step + 1}: {describe(error)}\nThe traceback is in {log_file}"
    if isinstance(error, TrainingError):
        reason, told = error.reason, f"failed after step {progress.step}: {error}"
    elif user:
        reason, told = "recipe", str(error)
    elif lost_a_peer(error) and (silent := watch.silent_ranks()):
        who = ("rank " if len(silent) == 1 else "ranks ") + ", ".join(str(r) for r in silent)
        if any(sign in str(error).lower() for sign in _TIMEOUT_SIGNS):
            reason = "timeout"
            what = f"did not answer in step {progress.step + 1} within the time a collective may take (run.timeout)"
        else:
            reason = "rank_lost"
            what = (
                f"ended without a word in step {progress.step + 1}. Killed? Exit code -9 is what the kernel does where host memory runs out"
            )
        told = f"{who} of {ranks} {what}.\nHow rank {rank} noticed is in {log_file}"
    print(told, file=console, flush=True)
    run.write_status("failed", step=progress.step, reason=reason, error=told)
    environment.tell_agent(told)
    return EXIT_USAGE if user else EXIT_FAILED


class Progress:
    """How far this rank is, for who reports a failure."""

    step = 0
    """The last finished step."""


@contextlib.contextmanager
def failing_together(store: Store, *, environment: Environment, run: RunFolder, console: TextIO, progress: Progress) -> Iterator[None]:
    """Whatever is raised inside ends this process, told as `report` tells it, and the other ranks with it."""
    watch = FailureWatch(store, rank=environment.rank, ranks=environment.world_size)
    try:
        yield
    except BaseException as error:
        if isinstance(error, SystemExit):
            raise
        end_process(report(error, progress=progress, watch=watch, environment=environment, run=run, console=console))
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
