"""When one rank fails, all ranks end within seconds, and one of them reports the cause.

The first rank that fails claims the failure in the store that the ranks share. The others fail
next because they lost a peer. A rank that is stuck in a collective raises nothing (under NCCL the
CPU waits for the device): its watchdog sees the claim in the store and ends the process.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import NoReturn, TextIO

from torch.distributed import HashStore, Store

from launcher.distributed import host_memory
from launcher.distributed.environment import Environment
from launcher.distributed.processes import is_running, process_start, this_machine
from launcher.distributed.spawn import end_process, kernel_exit
from launcher.errors import (
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_STOPPED,
    EXIT_USAGE,
    RecipeError,
    TrainingError,
    line_of,
    message_of,
)
from launcher.reliability.causes import (
    Account,
    PostMortem,
    describe,
    first_cause,
    lost_a_loader,
    lost_a_peer,
    printable,
    ran_out_of_memory,
    timed_out,
)
from launcher.reliability.file_calls import bounded
from launcher.reliability.hang_report import nccl_status
from launcher.reliability.lock import Ownership
from launcher.reliability.nodes import LostNode, Nodes
from launcher.reliability.progress import Progress
from launcher.reliability.run_directory import RunFolder
from launcher.reliability.store_calls import absent

# Keys of the store
CLAIMS, _REPORTED, _OWNER = "failed/claims", "failed/reported", "owner"
_MACHINE = "failed/machine"
"""The first rank of the machine whose console has the report."""
_PROCESS = "process/{}".format
NOTICED, ENDED = "failed/noticed_{}".format, "failed/rank_{}".format
"""Keys by rank: the rank runs and has noticed another rank's claim; it has failed or ended in
order."""

_REPORT_SECONDS = 60.0
"""Time for the memory plan to find what would fit."""
_TURN_SECONDS = 5.0
"""Time for another rank of this node to report, if the store does not answer."""
_NOTICE_SECONDS = 3.0
"""Time for a rank that runs to notice a failure."""
_CLOSE_SECONDS = 10.0
"""Time for the metrics services to take the last records. torchrun kills a rank after 30."""

_LOSSES = ("rank_lost", "timeout", "hang")
"""Reasons of a failure about which NCCL may know more."""
Cause = tuple[str, str, Account | None]
"""Reason and message of a failure, and what is known about memory if it ran out."""


class Neighbours:
    """The other ranks on this node, whose end the kernel shows at once."""

    def __init__(self, environment: Environment) -> None:
        self._rank = environment.rank
        first = max(0, environment.rank - environment.local_rank)  # a node's ranks are consecutive
        last = min(environment.world_size, first + environment.local_world_size)
        self._others = [rank for rank in range(first, last) if rank != self._rank]
        self.processes: dict[int, tuple[int, int]] = {}
        """Process id and start by rank."""
        self.known = False
        """Whether `find` has succeeded."""

    def find(self, store: Store) -> None:
        """Publishes this rank's process, and reads the processes of the other ranks once all are
        published."""
        machine, own = this_machine(), os.getpid()
        store.set(_PROCESS(self._rank), f"{machine} {own} {process_start(own)}")
        if store.check([_PROCESS(rank) for rank in self._others]):
            for rank in self._others:
                where, pid, start = store.get(_PROCESS(rank)).decode().split()
                if where == machine:
                    self.processes[rank] = int(pid), int(start)
            self.known = True

    def lost(self) -> list[int]:
        """Ranks whose processes have ended, for any reason."""
        processes = self.processes.items()
        return [rank for rank, (pid, start) in processes if not is_running(pid, start)]


class FailureWatch:
    """Reports a failure and ends the run: an exception inside its context ends all ranks. So does
    code that ends this process itself, by `sys.exit` or `os._exit`, with any status.

    Methods that use the store raise RuntimeError if it fails.
    """

    def __init__(
        self,
        store: Store,
        *,
        environment: Environment,
        run: RunFolder,
        console: TextIO,
        progress: Progress,
        post_mortem: PostMortem,
    ) -> None:
        self.environment, self.run, self.console = environment, run, console
        self.progress, self.rank, self.ranks = progress, environment.rank, environment.world_size
        self._post_mortem = post_mortem
        self.on_end = contextlib.ExitStack()
        """Callbacks that flush and close what the run writes, before a failure ends this
        process."""
        self.explain_timeout: Callable[[list[int]], list[str]] = lambda silent: []
        """Lines about what these ranks do; set by the watchdog."""
        self.neighbours, self.nodes = Neighbours(environment), Nodes(environment)
        self._lost_nodes: list[LostNode] = []
        self.claimed = False
        """A thread of this rank reports; meanwhile no other thread may end the process."""
        self._found = run.read_status()
        self._shared, self.store = store, self._connect(store)
        self._killed = host_memory.killed()
        self._claiming, self._ending = threading.Lock(), threading.Lock()

    def _connect(self, shared: Store) -> Store:
        """A separate connection: the process group's own may wait for a lost rank."""
        if self.ranks == 1:
            return HashStore()
        store: Store = shared.clone()  # type: ignore[attr-defined]
        store.set_timeout(timedelta(seconds=10))
        return store

    def __enter__(self) -> FailureWatch:
        self._process, os._exit = os.getpid(), self._exited
        # Shares rank 0's record in RUN_DIR/owner: any rank may have to write a failure there
        if self.ranks > 1 and self.rank == 0:
            ownership = self.run.ownership
            self._shared.set(_OWNER, ownership.name if ownership is not None else "")
        elif self.ranks > 1 and (name := self._shared.get(_OWNER).decode()):
            self.run.ownership = Ownership.follow(self.run.path, name)
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        os._exit = kernel_exit
        if error is not None:
            self.end(self.report_exception(error))
        self.announce_end()

    def _exited(self, status: int) -> NoReturn:
        """In the place of `os._exit`, which the launcher itself calls only as `kernel_exit`."""
        if os.getpid() != self._process:  # a process that this rank has forked
            kernel_exit(status)
        caller = traceback.extract_stack(limit=2)[0]
        where = f"{os.path.relpath(caller.filename)}:{caller.lineno}"
        if self.claim():
            self.report("exit", self._exit_text(f"os._exit({status})", where))
        elif self.claimed:  # another thread of this rank reports, and ends the process
            threading.Event().wait()
        self.end(EXIT_FAILED)

    def _exit_text(self, call: str, where: str) -> str:
        name, step = self._names([self.rank]), self._last_step() + 1
        return f"{name} ended itself in step {step}: {call} was called at {where}"

    def announce_end(self) -> None:
        """This rank ends in order or has failed: its neighbours must not report it as lost."""
        with contextlib.suppress(Exception):
            self.notice()
            self.store.set(ENDED(self.rank), "")

    def notice(self) -> None:
        """This rank runs, and has noticed a failure."""
        self.store.set(NOTICED(self.rank), "")
        self.nodes.notice(self.store)

    def is_set(self, key: str) -> bool:
        """Whether the store has the key."""
        return bool(self.store.check([key]))

    # Claims

    def claim(self, *, ask_store: bool = True, ends: bool = True) -> bool:
        """Claims the failure. Returns True in one thread of one rank, which must then `report`. If
        the store fails, status.json decides. With `ends`, this rank ends in any case."""
        with self._claiming:
            if self.claimed:
                return False
            first = None
            if ask_store:
                with contextlib.suppress(Exception):
                    first = self.store.add(CLAIMS, 1) == 1
            if ends and first is not None:  # first: the file system may not answer
                self.announce_end()
            if first is None:
                self._wait_for_turn()
            status = bounded(self.run.read_status, self._found)
            state = None if status == self._found else status.get("state")  # of this start
            if first is None:
                self.claimed = state in (None, "running")
            else:
                self.claimed = first and state != "failed"
            if first and not self.claimed:  # a rank that the store did not answer has reported
                self._set_reported(EXIT_FAILED)
            if self.claimed or (ends and first is None):
                self.announce_end()
            return self.claimed

    def _wait_for_turn(self) -> None:
        """Without the store: one rank after the other. The ranks of a node also take a lock, which
        this one holds until it ends, so that the next one sees its report in status.json."""
        time.sleep(min(5.0, 0.2 * self.rank))

        def lock() -> None:
            deadline = time.monotonic() + _TURN_SECONDS
            self._turn = (self.run.log / "failure.lock").open("w")
            while time.monotonic() < deadline:
                with contextlib.suppress(BlockingIOError):
                    fcntl.flock(self._turn, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    return
                time.sleep(0.1)

        with contextlib.suppress(OSError):
            bounded(lock, None)

    def wait_for_report(self, *, lost: int = EXIT_FAILED) -> int:
        """Waits for the rank that claimed, and returns the exit status for all, or `lost` if the
        store is gone: torchrun's agent kills the ranks of a node soon after one of them has
        ended."""
        deadline = time.monotonic() + _REPORT_SECONDS
        with contextlib.suppress(Exception):
            while not self.is_set(_REPORTED) and time.monotonic() < deadline:
                time.sleep(0.2)
            return int(self.store.get(_REPORTED))
        return lost

    def reported(self) -> int | None:
        """The exit status for all ranks, or None if the rank that claimed has not reported yet."""
        return int(self.store.get(_REPORTED)) if self.is_set(_REPORTED) else None

    def _set_reported(self, status: int) -> None:
        with contextlib.suppress(Exception):
            self.store.set(_REPORTED, str(status))

    # Reports

    def report(
        self, reason: str, text: str, account: Account | None = None, *, status: int = EXIT_FAILED
    ) -> None:
        """Reports a claimed failure on the console, in status.json and events.jsonl, and to
        torchrun's agent. If memory ran out, the suggestions of the memory plan follow. All ranks
        end with `status`."""
        if reason in _LOSSES and (seen := nccl_status()):
            text += f"\nNCCL's RAS says:\n{seen}"
        self._print(text)
        with contextlib.suppress(Exception):  # of the store
            self.store.set(_MACHINE, str(self.rank - self.environment.local_rank))
        step = self._last_step()
        noted = account.noted if account is not None else {}
        lost = {"lost_nodes": [node.name for node in self._lost_nodes]} if self._lost_nodes else {}

        def record() -> bool:
            self.run.write_status("failed", step=step, reason=reason, error=text, **lost)
            self.run.note("failed", ranks=self.ranks, step=step, reason=reason, **lost, **noted)
            return True

        try:
            if not bounded(record, False):
                self._print(
                    f"the file system of {self.run.path} does not answer: not recorded there"
                )
        except (OSError, TrainingError) as error:  # the disk is full, or another job has the folder
            if str(error) not in text:
                self._print(str(error))
        self.environment.tell_agent(text)
        if account is not None:
            if not account.restarts_now:
                self._print("searching for a configuration that fits by the memory plan ...")
            answer = account.explain(_REPORT_SECONDS)
            self._print(answer)
            text = f"{text}\n{answer}"
            self.environment.tell_agent(text)
            with contextlib.suppress(OSError, TrainingError):
                bounded(
                    lambda: self.run.write_status("failed", step=step, reason=reason, error=text),
                    None,
                )
        self._set_reported(status)

    def _last_step(self) -> int:
        """The last finished step. Until this start has loaded its checkpoint, it is the last step
        of the previous start."""
        return self.progress.step or bounded(self.run.last_step, 0)

    def _print(self, text: str) -> None:
        with contextlib.suppress(OSError):  # the reader of the console may be gone
            bounded(lambda: print(printable(text), file=self.console, flush=True), None)

    def report_exception(self, error: BaseException) -> int:
        """Writes the traceback to the rank's log; reports the cause if no other rank does. Returns
        the exit status."""
        log_file = self.run.log / f"rank_{self.rank}.log"
        unexpected = not isinstance(error, (RecipeError, TrainingError))
        claims = self.claim()  # before the log, whose file system may not answer
        if unexpected:
            thrown = error

            def write() -> None:
                with log_file.open("a", encoding="utf-8", errors="backslashreplace") as log:
                    traceback.print_exception(thrown, file=log)

            with contextlib.suppress(OSError):
                bounded(write, None)
            error = first_cause(error)
        if not claims:
            if self.claimed:  # the watchdog of this rank reports, and ends the process
                threading.Event().wait()
            if not isinstance(error, RecipeError):
                return self.wait_for_report()
            if self.environment.local_rank == 0:  # the agent may lose the store before it knows
                self.environment.tell_job(str(error))
            if self.environment.local_rank == 0 and not self._reported_here():
                self._print(str(error))  # each machine may have a console
            return self.wait_for_report(lost=EXIT_USAGE)
        reason, text, account = self._cause(error)
        if unexpected:
            text += f"\nThe traceback of rank {self.rank} is in {log_file}"
        status = EXIT_USAGE if isinstance(error, RecipeError) else EXIT_FAILED
        if status == EXIT_USAGE:
            self.environment.tell_job(text)
        self.report(reason, text, account, status=status)
        return status

    def _reported_here(self) -> bool:
        """On the first rank of a machine: whether a rank of this machine reports."""
        with contextlib.suppress(Exception):  # of the store, whose machine may have ended already
            return int(self.store.get(_MACHINE)) == self.rank
        return False

    def _cause(self, error: BaseException) -> Cause:
        name, step = self._names([self.rank]), self._last_step() + 1
        if isinstance(error, TrainingError):
            return error.reason, f"failed after step {step - 1}: {error}", None
        if isinstance(error, RecipeError):
            return "recipe", str(error), None
        if isinstance(error, SystemExit):
            return "exit", self._exit_text(f"sys.exit({error.code})", line_of(error)), None
        if ran_out_of_memory(error):
            phase, number = self.progress.phase, self.progress.micro_batch
            return self._out_of_memory(
                f"{name} ran out of memory in step {step}: {describe(error)}",
                lambda: self._post_mortem.examine(
                    error, step=step - 1, phase=phase, micro_batch=number
                ),
            )
        if "DataLoader worker" in message_of(error) and host_memory.killed_since(self._killed):
            return self._killed_by_kernel(f"a loader process of {name}")
        if "DataLoader worker" in message_of(error) and "Bus error" in message_of(error):
            text = f"a loader process of {name} found no shared memory in step {step}. "
            return "error", f"{text}{host_memory.shared_text()}", None
        if lost_a_loader(error):
            text = (
                f"a loader process of {name} ended in step {step} without an error. Does code that "
            )
            return "error", f"{text}it runs call sys.exit or os._exit, or was it killed?", None
        if lost_a_peer(error):
            late = timed_out(error)
            silent = self._silent_ranks(running=late)
            if silent is None:
                text = f"{name} lost the other ranks and their store in step {step}. Is the "
                return "rank_lost", f"{text}network down, or the node of rank 0?", None
            if silent and late:
                key = "run.timeout" if self.progress.started else "run.init_timeout"
                text = f"{self._names(silent)} did not answer in step {step} within the time limit "
                lines = [*self.lost_nodes(), f"{text}of a collective ({key})"]
                with contextlib.suppress(Exception):  # of the store
                    lines += self.explain_timeout(silent)
                return "timeout", "\n".join(lines), None
            if silent:
                return self._loss(silent)
        return "error", f"{name} failed in step {step}: {describe(error)}", None

    def _out_of_memory(self, text: str, examine: Callable[[], Account | None]) -> Cause:
        """The cause. `text` is the message if nothing is known yet, or if the examination fails."""
        account = None
        with contextlib.suppress(Exception):  # memory may run out again
            account = examine()
        return "out_of_memory", account.message if account else text, account

    # Lost ranks

    def report_lost(self, lost: list[int], *, ask_store: bool = True) -> None:
        """Reports neighbours that were killed, and ends this process. Returns if another rank
        reports, or if the store shows that they ended in order."""
        if ask_store:
            lost = [rank for rank in lost if not self.is_set(ENDED(rank))]
        if lost and self.claim(ask_store=ask_store):
            reason, text, account = self._loss(lost)
            text += f"\nRank {self.rank}, on the same node, found its process gone"
            self.report(reason, text, account)
            self.end(EXIT_FAILED)

    def _loss(self, lost: list[int]) -> Cause:
        names = self._names(lost)
        if host_memory.killed_since(self._killed):
            return self._killed_by_kernel(names)
        lines = self.lost_nodes()
        lost = [rank for rank in lost if not any(rank in node.ranks for node in self._lost_nodes)]
        if lost:
            lines.append(
                f"{self._names(lost)} ended without an error message in step "
                f"{self.progress.step + 1}. Exit code -9 means killed, for example by the kernel when "
                "host memory ran out"
            )
        return "rank_lost", "\n".join(lines), None

    def lost_nodes(self) -> list[str]:
        """A line that names the nodes from which nothing is heard, for the beginning of a report, and
        notes them for status.json; no line if there is none. Must be called after a claim."""
        with contextlib.suppress(Exception):  # of the store
            self._lost_nodes = self.nodes.lost(self.store)
        if not self._lost_nodes:
            return []
        names = [f"{node.name} ({self._names([*node.ranks])})" for node in self._lost_nodes]
        noun = "node" if len(names) == 1 else "nodes"
        text = f"nothing is heard from {noun} {', '.join(names)} any more: the probable cause is there, "
        return [f"{text}or in the network to it"]

    def _killed_by_kernel(self, name: str) -> Cause:
        step = self.progress.step
        text = f"{name} was ended in step {step + 1} by the kernel: host memory ran out"
        return self._out_of_memory(text, lambda: self._post_mortem.killed(name, step))

    def _names(self, ranks: list[int]) -> str:
        noun = "rank" if len(ranks) == 1 else "ranks"
        return f"{noun} {', '.join(map(str, ranks))} of {self.ranks}"

    def _silent_ranks(self, *, running: bool) -> list[int] | None:
        """Ranks that do not notice the failure in time, so were probably killed; None if the store
        does not answer. `running` includes ranks that run but have not failed."""
        key = ENDED if running else NOTICED
        ranks = {key(rank): rank for rank in range(self.ranks)}
        with contextlib.suppress(Exception):
            silent = absent(self.store, list(ranks), seconds=_NOTICE_SECONDS)
            return [ranks[name] for name in silent]
        return None

    # The end

    def stop_before_training(self, source: str) -> NoReturn:
        """Ends this rank, and with it all others, as stopped, before the first step or between two
        rounds. Nothing is saved now."""
        with contextlib.suppress(Exception):
            # torchrun ends the ranks with the same signal after one of them has failed
            self.neighbours.find(self.store)
            self.report_lost(self.neighbours.lost())
        if not self.claim():
            self.end(self.wait_for_report())
        step = self._last_step()
        kept = bounded(self.run.kept_before_training, None)
        what = "there is nothing to save"
        if kept is not None:
            what = f"the next start continues with what has been computed in {kept}"
        # Before a round of distillation, the checkpoint of the last step is there
        when = f"after step {step}" if self.progress.started else "before the first step"
        self._print(f"stopped by {source} {when}: {what}")

        def record() -> None:
            self.run.write_status("stopped", step=step, reason=source)
            self.run.note("stopped", ranks=self.ranks, step=step, reason=source)

        with contextlib.suppress(OSError, TrainingError):
            bounded(record, None)
        # The others may end only now: rank 0 releases the folder, after which no rank may write
        status = EXIT_DONE if self.environment.torchrun else EXIT_STOPPED
        self._set_reported(status)
        self.end(status)

    def end(self, status: int) -> NoReturn:
        """Ends this process and releases the folder. Only the first thread that calls it does."""
        self._ending.acquire()
        closing = threading.Thread(target=self.on_end.close, name="closing", daemon=True)
        with contextlib.suppress(RuntimeError):  # no thread can be started where memory ran out
            closing.start()
            closing.join(_CLOSE_SECONDS)
        with contextlib.suppress(OSError):
            bounded(self.run.release, None)
        end_process(status)
