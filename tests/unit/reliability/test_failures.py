"""How a rank notices that another one failed, and what it reports: with processes that are killed and stores that fail."""

import io
import json
import subprocess
import sys
import threading
import time

import pytest
import torch.distributed as dist

from launcher.distributed import process_group
from launcher.distributed.environment import Environment
from launcher.reliability import watchdog
from launcher.reliability.causes import first_cause
from launcher.reliability.failures import FailureWatch
from launcher.reliability.hang_report import collectives, compare_collectives
from launcher.reliability.lock import process_start, this_machine
from launcher.reliability.progress import Progress
from launcher.reliability.run_directory import RunFolder
from launcher.reliability.signals import StopRequest
from launcher.reliability.watchdog import Watch

pytestmark = pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnhandledThreadExceptionWarning"
)  # SystemExit, of what ends a process


class Flaky:
    """A store, some of whose calls fail."""

    def __init__(self, store, failing=()):
        self.store, self.failing = store, set(failing)
        self.calls, self.delay, self.error = 0, 0.0, "Broken pipe"

    def __getattr__(self, name):
        self.calls += 1
        if self.calls in self.failing:
            time.sleep(self.delay)
            raise RuntimeError(self.error)
        return getattr(self.store, name)


@pytest.fixture
def neighbour():
    """A process that stands for rank 1."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


class Rank0:
    """Of two ranks on a node. `ended` has the exit status once the watch has ended the process."""

    def __init__(self, folder, monkeypatch, failing=(), hang_timeout=60):
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.ended, self.end = [], threading.Event()
        monkeypatch.setattr(watchdog, "_ROUND_SECONDS", 0.02)
        monkeypatch.setattr(watchdog, "_GRACE_SECONDS", 0.1)
        monkeypatch.setattr(
            FailureWatch, "_connect", lambda failures, store: Flaky(store.clone(), failing)
        )
        monkeypatch.setattr(FailureWatch, "end", lambda watch, status: self._end(status))
        self.run = RunFolder(folder)
        self.run.log.mkdir()
        self.run.write_status("running", step=4)
        environment = Environment(world_size=2, local_world_size=2)
        progress = Progress()
        progress.step = 4
        self.failures = FailureWatch(
            self.store,
            environment=environment,
            run=self.run,
            console=io.StringIO(),
            progress=progress,
        )
        self.watch = Watch(self.failures, stop=StopRequest(), hang_timeout=hang_timeout)
        self.watch.__enter__()

    def _end(self, status):
        self.ended.append(status)
        self.end.set()
        sys.exit()

    def meet(self, process):
        """Rank 1 says which process it is; returns once the watch knows."""
        self.store.set("process/1", f"{this_machine()} {process.pid} {process_start(process.pid)}")
        for _ in range(500):
            if self.failures.neighbours.known or self.end.wait(0.02):
                return
        raise AssertionError("the neighbours were not found")


@pytest.fixture
def start(tmp_path, monkeypatch):
    started = []

    def start(failing=(), **more):
        started.append(Rank0(tmp_path, monkeypatch, failing, **more))
        return started[-1]

    yield start
    for rank in started:
        rank.watch.__exit__()


@pytest.mark.parametrize(
    "failing", [(), (1, 3, 4, 12, 13)], ids=["store answers", "store fails now and then"]
)
def test_a_killed_neighbour_is_reported(start, neighbour, failing):
    rank = start(failing)
    rank.meet(neighbour)
    neighbour.kill()
    assert rank.end.wait(30)
    assert rank.ended == [1]
    status = rank.run.read_status()
    assert (status["state"], status["reason"], status["step"]) == ("failed", "rank_lost", 4)
    assert status["error"].startswith("rank 1 of 2 ended without an error message in step 5")


def test_a_killed_neighbour_is_reported_without_the_store(start, neighbour):
    rank = start()
    rank.meet(neighbour)
    rank.failures.store.failing = set(range(10**6))
    neighbour.kill()
    assert rank.end.wait(30)
    assert rank.run.read_status()["reason"] == "rank_lost"


def test_a_single_slow_error_of_the_store_is_ignored(start, monkeypatch):
    monkeypatch.setattr(watchdog, "_STORE_LOST_SECONDS", 0.3)
    rank = start()
    store = rank.failures.store
    store.delay, store.failing = 0.5, {store.calls + 3}
    assert not rank.end.wait(1.0)
    assert store.calls > max(store.failing)
    store.failing = set(range(10**6))
    assert rank.end.wait(30)
    assert rank.run.read_status()["reason"] == "agent_lost"


def test_a_neighbour_that_ends_in_order_is_not_lost(start, neighbour):
    """It finished, or reported a failure itself."""
    rank = start()
    rank.meet(neighbour)
    rank.store.set("failed/rank_1", "")
    neighbour.kill()
    neighbour.wait()
    assert not rank.end.wait(0.5)
    assert rank.run.read_status()["state"] == "running"


def test_a_neighbour_that_was_stopped_before_training_stops_this_rank(start):
    rank = start()
    rank.store.set("failed/reported", "75")
    rank.store.add("failed/claims", 1)
    assert rank.end.wait(10)
    assert rank.ended == [75]
    assert rank.run.read_status()["state"] == "running", "the neighbour writes the status"


def test_a_hang_is_reported_while_the_store_does_not_answer(start):
    """torchrun's agent, which hosts the store, is stopped (SIGSTOP)."""
    rank = start()
    store = rank.failures.store
    store.error, store.failing = "Socket Timeout", set(range(10**6))
    assert rank.end.wait(30)
    status = rank.run.read_status()
    assert (status["state"], status["reason"]) == ("failed", "hang")
    assert "the ranks' store does not answer" in status["error"]
    assert (rank.run.log / "hang/rank_0.txt").exists()


def test_no_hang_is_reported_while_a_rank_is_in_a_phase_without_a_time_limit(start):
    """Rank 1 writes a checkpoint, for which this one waits without heartbeats."""
    rank = start(hang_timeout=0.3)
    rank.store.add("watch/slow", 1)
    rank.failures.progress.slow_phase = None
    assert not rank.end.wait(1.5)
    rank.store.add("watch/slow", -1)
    rank.store.set("failed/rank_1", "")
    assert rank.end.wait(30)
    assert rank.run.read_status()["reason"] == "hang"


def test_a_stop_request_after_a_lost_rank_is_reported_as_the_loss(start, neighbour, monkeypatch):
    """torchrun sends SIGTERM to the others at once when a rank has died."""
    rank = start()
    rank.meet(neighbour)
    monkeypatch.setattr(watchdog, "_ROUND_SECONDS", 60)
    rank.watch.__exit__()
    neighbour.kill()
    neighbour.wait()
    with pytest.raises(SystemExit):
        rank.failures.stop_before_training("SIGTERM")
    assert rank.run.read_status()["reason"] == "rank_lost"


def raised(act):
    try:
        act()
    except Exception as error:
        return error


LOST = RuntimeError("[gloo] Connection closed by peer [127.0.0.1]:4")
WORKER = RuntimeError("DataLoader worker (pid 7) is killed by signal: Terminated.")


def test_the_first_cause_of_an_exception_is_reported(start):
    rank = start()

    def act():
        try:
            raise LOST
        except RuntimeError:
            raise WORKER  # noqa: B904

    assert rank.failures.report_exception(raised(act)) == 1
    status = rank.run.read_status()
    assert status["reason"] == "rank_lost"
    assert "rank 1 of 2 ended without an error message" in status["error"]
    assert "DataLoader worker" in (rank.run.log / "rank_0.log").read_text()


def test_a_loader_process_that_torchrun_terminated_means_a_lost_rank(start):
    """The exception interrupts the training step, and has no context."""
    rank = start()
    assert rank.failures.report_exception(RuntimeError(*WORKER.args)) == 1
    status = rank.run.read_status()
    assert status["reason"] == "rank_lost"
    assert "rank 1 of 2 ended without an error message" in status["error"]


def test_other_exceptions_are_their_own_first_cause():
    def handled():
        try:
            raise KeyError("a")
        except KeyError:
            raise WORKER  # noqa: B904

    def hidden():
        try:
            raise LOST
        except RuntimeError:
            raise ValueError("b") from None

    assert first_cause(raised(handled)) is WORKER
    assert isinstance(first_cause(raised(hidden)), ValueError)


# Hang reports


def recorded(*entries, state="started"):
    """A flight recorder of collectives, each (number, name, whether it is finished) of group `shard`."""
    keys = [
        {"collective_seq_id": n, "profiling_name": name, "state": "completed" if done else state}
        for n, name, done in entries
    ]
    common = {
        "process_group": ["1", "shard"],
        "input_sizes": [[8]],
        "retired": False,
        "is_p2p": False,
    }
    return json.dumps({"entries": [common | entry for entry in keys]}).encode()


def test_the_oldest_unfinished_collective_is_compared_over_the_ranks():
    """Ranks 0 and 2 have enqueued one more than the one that hangs; rank 1 has begun another; rank 3 none."""
    ranks = {
        0: recorded(
            (6, "nccl:all_gather", True),
            (7, "nccl:all_reduce", False),
            (8, "nccl:reduce_scatter", False),
        ),
        1: recorded((6, "nccl:all_gather", True), (7, "nccl:broadcast", False)),
        2: recorded(
            (7, "nccl:all_reduce", False), (8, "nccl:reduce_scatter", False), state="scheduled"
        ),
        3: recorded((6, "nccl:all_gather", True)),
        4: recorded((7, "nccl:all_reduce", True)),
        5: None,
    }
    (line,) = compare_collectives({rank: collectives(entries) for rank, entries in ranks.items()})
    assert line == (
        "oldest unfinished collective of group 1 shard, number 7: finished: rank 4; nccl:all_reduce [[8]]: rank 0, 2; "
        "nccl:broadcast [[8]]: rank 1; not begun: rank 3"
    )
    assert compare_collectives({0: collectives(ranks[3])}) == [], "nothing waits"
    assert collectives(b"no JSON") == {}


# The interface of gloo


def test_gloo_listens_on_the_interface_that_leads_to_the_others(monkeypatch):
    environment = Environment(world_size=2, torchrun=True, meeting_point="127.0.0.1:1")
    assert process_group.interface_to("127.0.0.1") == "lo"
    assert process_group.interface_to("no.such.host.invalid") is None
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    process_group._choose_gloo_interface(environment)
    assert "GLOO_SOCKET_IFNAME" not in process_group.os.environ, "all on one machine: left to gloo"
    monkeypatch.setattr(process_group, "interface_to", lambda host: {"127.0.0.1": "ib0"}[host])
    with monkeypatch.context() as patch:
        patch.setenv("GLOO_SOCKET_IFNAME", "eth7")
        process_group._choose_gloo_interface(environment)
        assert process_group.os.environ["GLOO_SOCKET_IFNAME"] == "eth7", "the user's"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "")  # so that it is removed after the test
    del process_group.os.environ["GLOO_SOCKET_IFNAME"]
    process_group._choose_gloo_interface(environment)
    assert process_group.os.environ["GLOO_SOCKET_IFNAME"] == "ib0"
