"""Detection and report of a failed rank, with killed processes and failing stores."""

import io
import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from launcher import console
from launcher.distributed import process_group
from launcher.distributed.environment import Environment
from launcher.distributed.processes import process_start, this_machine
from launcher.reliability import failures as failures_module
from launcher.reliability import file_calls, hang_report, watchdog
from launcher.reliability import nodes as nodes_module
from launcher.reliability.causes import describe, first_cause, lost_a_loader
from launcher.reliability.failures import FailureWatch
from launcher.reliability.nodes import Nodes
from launcher.reliability.progress import Progress
from launcher.reliability.run_directory import RunFolder
from launcher.reliability.signals import StopRequest
from launcher.reliability.store_calls import absent
from launcher.reliability.watchdog import Watch

pytestmark = pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnhandledThreadExceptionWarning"
)  # the replaced `end` raises SystemExit in the watch thread


class FlakyStore:
    """A store. The calls whose numbers are in `failing` raise after `delay` seconds."""

    def __init__(self, store, failing=()):
        self.store, self.failing, self.calls, self.delay = store, failing, 0, 0.0

    def __getattr__(self, name):
        self.calls += 1
        if self.calls in self.failing:
            time.sleep(self.delay)
            raise RuntimeError("Broken pipe")
        return getattr(self.store, name)


@pytest.fixture
def neighbour():
    """A process that takes the place of rank 1."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


class Rank0:
    """Rank 0 of two ranks on a node.

    When the watch would end the process, the exit status is appended to `ended`.
    """

    def __init__(self, folder, monkeypatch, failing=(), **timeouts):
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.ended, self.end = [], threading.Event()
        monkeypatch.setattr(watchdog, "_ROUND_SECONDS", 0.02)
        monkeypatch.setattr(watchdog, "_GRACE_SECONDS", 0.1)
        monkeypatch.setattr(
            FailureWatch, "_connect", lambda failures, store: FlakyStore(store.clone(), failing)
        )
        monkeypatch.setattr(FailureWatch, "end", lambda watch, status: self._end(status))
        self.run, progress = RunFolder(folder), Progress()
        self.run.log.mkdir()
        self.run.write_status("running", step=4)
        progress.step = 4
        self.failures = FailureWatch(
            self.store,
            environment=Environment(world_size=2, local_world_size=2),
            run=self.run,
            console=io.StringIO(),
            progress=progress,
            post_mortem=None,
        )
        timeouts = {"hang_timeout": 60, "timeout": 600, "init_timeout": 1800} | timeouts
        self.watch = Watch(self.failures, stop=StopRequest(), **timeouts)
        self.watch.__enter__()

    def _end(self, status):
        self.ended.append(status)
        self.end.set()
        sys.exit()

    def register_neighbour(self, process):
        """Announces the process as rank 1. Waits until the watch has registered it."""
        self.store.set("process/1", f"{this_machine()} {process.pid} {process_start(process.pid)}")
        while not self.failures.neighbours.known:
            assert not self.end.wait(0.02)

    def wait_for_status(self):
        """Waits until the watch ends the process. Returns the status of the run."""
        assert self.end.wait(120)
        return self.run.read_status()


@pytest.fixture
def start(tmp_path, monkeypatch):
    started = []

    def start(failing=(), **more):
        started.append(Rank0(tmp_path, monkeypatch, failing, **more))
        return started[-1]

    yield start
    for rank in started:
        rank.watch.__exit__()


def test_failure_before_the_checkpoint_is_loaded_keeps_the_last_step(start):
    rank = start()
    rank.failures.progress.step = 0
    rank.run.metrics.write_text('{"step": 10}\n')
    assert rank.failures.report_exception(ValueError("oops")) == 1
    status = rank.run.read_status()
    assert (status["state"], status["step"]) == ("failed", 10)
    assert "failed in step 11: ValueError: oops" in status["error"]


class WithoutMessageError(RuntimeError):
    def __str__(self):
        raise ValueError("no text")


def test_an_exception_that_cannot_be_printed_is_reported(start):
    """The report failed as well, and status.json stayed at running."""
    rank = start()
    assert rank.failures.report_exception(WithoutMessageError()) == 1
    status = rank.run.read_status()
    assert (status["state"], status["reason"]) == ("failed", "error")
    assert "failed in step 5: WithoutMessageError: no message" in status["error"]


def test_a_folder_is_no_request(start):
    """RUN_DIR/stop as a folder would stop every start."""
    rank = start()
    for name in ("stop", "save"):
        (rank.run.path / name).mkdir()
    rank.watch._look_for_files()
    assert (rank.watch._stop.requested(), rank.watch.save_requested()) == (False, False)
    for name in ("stop", "save"):
        (rank.run.path / name).rmdir()
        (rank.run.path / name).touch()
    rank.watch._look_for_files()
    assert (rank.watch._stop.requested(), rank.watch.save_requested()) == (True, True)


def test_killed_neighbour_is_reported_despite_store_errors(start, neighbour):
    rank = start(failing=(1, 3, 4, 12, 13))
    rank.register_neighbour(neighbour)
    neighbour.kill()
    status = rank.wait_for_status()
    assert rank.ended == [1]
    assert (status["state"], status["reason"], status["step"]) == ("failed", "rank_lost", 4)
    assert status["error"].startswith("rank 1 of 2 ended without an error message in step 5")


def test_failed_watchdog_ends_the_run(start, monkeypatch):
    def overflow(*_, **more):
        raise OverflowError("timeout value is too large")

    monkeypatch.setattr(watchdog.faulthandler, "dump_traceback_later", overflow)
    status = start().wait_for_status()
    assert (status["state"], status["reason"]) == ("failed", "watchdog")
    assert status["error"].startswith("the watchdog of rank 0 failed: OverflowError")


def test_helper_processes_survive_signals_to_the_group_of_a_rank(tmp_path):
    """A program inherits blocked signals. A forked process is in a group of its own, ends by
    SIGTERM, and is killed with its parent."""
    script = tmp_path / "rank.py"
    script.write_text(HELPERS)
    rank = subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    forked, program = map(int, rank.stdout.readline().split())
    try:
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
            os.killpg(rank.pid, number)
        assert rank.stdout.readline().endswith("others run: True\n")
        assert process_start(program) is not None
        rank.kill()
        rank.wait()
        while process_start(forked) is not None:
            time.sleep(0.02)
    finally:
        rank.kill()
        os.kill(program, signal.SIGKILL)
        rank.stdout.close()


HELPERS = """
import multiprocessing, subprocess, sys, time
from launcher.reliability.signals import StopRequest

with StopRequest() as stop:
    context = multiprocessing.get_context("fork")
    ended, forked = (context.Process(target=time.sleep, args=(1000,)) for _ in range(2))
    ended.start(), forked.start()
    program = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
    time.sleep(0.5)
    print(forked.pid, program.pid, flush=True)
    while not stop.requested():
        time.sleep(0.02)
    ended.terminate()
    ended.join()
    print(f"{stop.signal}, others run:", forked.is_alive() and program.poll() is None, flush=True)
    time.sleep(1000)
"""


def test_killed_neighbour_is_reported_without_the_store(start, neighbour, monkeypatch):
    monkeypatch.setattr(watchdog, "_NEIGHBOUR_LOST_SECONDS", 0.3)
    rank = start()
    rank.register_neighbour(neighbour)
    rank.failures.store.failing = range(10**6)
    neighbour.kill()
    assert rank.wait_for_status()["reason"] == "rank_lost"


def test_one_rank_reports_without_the_store(start):
    """Two ranks notice a failure at the same time. The second one waits for the first's report."""
    rank, claims = start(), []
    other = FailureWatch(
        rank.store,
        environment=Environment(world_size=2, local_world_size=2),
        run=RunFolder(rank.run.path),
        console=io.StringIO(),
        progress=Progress(),
        post_mortem=None,
    )
    assert rank.failures.claim(ask_store=False)
    late = threading.Thread(target=lambda: claims.append(other.claim(ask_store=False)))
    late.start()
    late.join(0.5)
    rank.run.write_status("failed", step=4)
    late.join(120)
    assert claims == [False]


@pytest.mark.parametrize(
    ("seconds", "source", "line"),
    [
        (90, "SIGTERM", "step (1 min 30 s a step); a second SIGTERM ends it at once"),
        (90, "SIGUSR1", "and saves the last finished step (1 min 30 s a step)"),
        (None, "SIGINT", "finished step; a second SIGINT ends it at once"),
        (0.1, "SIGINT", None),
    ],
)
def test_a_request_to_stop_says_how_long_the_step_may_take(start, caplog, seconds, source, line):
    caplog.set_level("INFO")
    rank = start()
    rank.failures.progress.preparing = False
    rank.failures.progress.step_seconds = seconds
    rank.watch._stop.ask(source)

    def shown():
        return [text for text in caplog.messages if "stops after the current micro-batch" in text]

    deadline = time.monotonic() + (0.5 if line is None else 60)
    while not shown() and time.monotonic() < deadline:
        assert not rank.end.wait(0.05)
    assert bool(shown()) == (line is not None)
    if line is not None:
        assert shown()[0].startswith(f"{source}: ")
        assert shown()[0].endswith(line)


def test_the_time_of_a_step_is_known_after_the_second_one():
    progress = Progress()
    progress.step_done(1)
    assert progress.step_seconds is None  # the first step also compiles
    time.sleep(0.05)
    progress.step_done(2)
    assert 0.05 <= progress.step_seconds < 5


def test_single_slow_store_error_is_ignored(start, monkeypatch):
    monkeypatch.setattr(watchdog, "_STORE_LOST_SECONDS", 0.2)
    rank = start()
    store = rank.failures.store
    store.delay, store.failing = 0.3, {store.calls + 3}
    while store.calls < max(store.failing) + 5:
        assert not rank.end.wait(0.02)
    store.delay, store.failing = 0.0, range(10**6)
    assert rank.wait_for_status()["reason"] == "agent_lost"


def test_neighbour_that_reported_its_end_is_not_lost(start, neighbour):
    """A rank sets this key when it has finished or has reported a failure itself."""
    rank = start()
    rank.register_neighbour(neighbour)
    rank.store.set("failed/rank_1", "")
    neighbour.kill()
    neighbour.wait()
    assert not rank.end.wait(0.3)
    assert rank.run.read_status()["state"] == "running"


def test_neighbour_stopped_before_training_stops_this_rank(start):
    rank = start()
    rank.store.set("failed/reported", "75")
    rank.store.add("failed/claims", 1)
    assert rank.wait_for_status()["state"] == "running", "only the neighbour writes the status"
    assert rank.ended == [75]


def test_slow_phase_of_another_rank_suspends_hang_detection(start):
    """Rank 0 sends no heartbeats while it waits for rank 1 to write a checkpoint."""
    rank = start(hang_timeout=0.3)
    rank.store.add("watch/slow", 1)
    rank.failures.progress.slow_phase = None
    assert not rank.end.wait(1.0)
    rank.store.add("watch/slow", -1)
    rank.store.set("failed/rank_1", "")
    assert rank.wait_for_status()["reason"] == "hang"


def test_wait_for_a_slow_rank_ends_with_the_timeout_of_collectives(start):
    """Under NCCL, a collective that exceeds its timeout ends the process without a report."""
    rank = start(hang_timeout=0.3, timeout=1.0)
    rank.store.add("watch/slow", 1)
    rank.failures.progress.slow_phase = None
    rank.store.set("failed/rank_1", "")
    status = rank.wait_for_status()
    assert status["reason"] == "hang"
    assert "no sign of life for 1 s (run.timeout, while another rank" in status["error"]


@pytest.mark.parametrize("started", [False, True])
def test_every_slow_phase_has_a_limit(start, started):
    """The start, a checkpoint or an export in which no rank gets further ran for ever."""
    rank = start(hang_timeout=0.2, init_timeout=1.0)
    rank.failures.progress.started = started
    rank.failures.progress.slow_phase = "export"
    rank.store.set("failed/rank_1", "")
    status = rank.wait_for_status()
    assert status["reason"] == "hang"
    which = "for slow phases" if started else "until the first step is done"
    assert f"no sign of life for 1 s (run.init_timeout, {which})" in status["error"]


def test_signs_of_life_of_any_rank_extend_a_slow_phase(start):
    """Of this rank, whose task advances, and of the others, which say so in the store."""
    rank = start(hang_timeout=0.2, init_timeout=1.0)
    rank.store.set("failed/rank_1", "")
    for sign in (console.advanced, lambda: rank.store.add("watch/life", 1)):
        for _ in range(20):
            sign()
            assert not rank.end.wait(0.1)
    assert rank.wait_for_status()["reason"] == "hang"


def test_the_rank_that_does_not_wait_for_others_is_behind():
    """In the start all ranks may have as many heartbeats."""
    waits = [True, False, True]
    answers = {rank: {"position": [0, 3], "waits": wait} for rank, wait in enumerate(waits)}
    assert watchdog._behind(answers) == [1]
    answers[2]["position"] = [0, 2]
    assert watchdog._behind(answers) == [2]


@pytest.mark.slow
@pytest.mark.parametrize("call", ["sys.exit(0)", "os._exit(0)", "sys.exit('no')", "os._exit(75)"])
def test_a_process_that_ends_itself_has_failed(call, tmp_path):
    """It counted as done, or as stopped, and another rank looked guilty."""
    script = tmp_path / "rank.py"
    script.write_text(ENDS_ITSELF.format(folder=str(tmp_path), call=call))
    ended = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, check=False, timeout=300
    )
    assert ended.returncode == 1, ended
    status = RunFolder(tmp_path).read_status()
    assert (status["state"], status["reason"]) == ("failed", "exit")
    said = call.replace("'", "")
    text = f"rank 0 of 1 ended itself in step 5: {said} was called at "
    assert status["error"].startswith(text), status
    assert status["error"].splitlines()[0].endswith("rank.py:17")
    assert text in ended.stderr


ENDS_ITSELF = """
import os, pathlib, sys
from launcher.distributed.environment import Environment
from launcher.reliability.failures import FailureWatch
from launcher.reliability.progress import Progress
from launcher.reliability.run_directory import RunFolder

run, progress = RunFolder(pathlib.Path({folder!r})), Progress()
run.log.mkdir()
progress.step = 4
alone = Environment()
watch = FailureWatch(
    None, environment=alone, run=run, console=sys.stderr, progress=progress, post_mortem=None
)
with watch:
    if os.fork():
        {call}
    os._exit(9)  # a process that the rank has forked may end itself
"""


def test_a_claim_is_announced_before_files_are_read(start, monkeypatch):
    """Where the file system did not answer, other ranks took this one for lost."""
    rank, answers = start(), threading.Event()
    monkeypatch.setattr(rank.run, "read_status", lambda: {} if answers.wait(60) else None)
    claiming = threading.Thread(target=rank.failures.claim)
    claiming.start()
    assert not absent(rank.store, ["failed/noticed_0", "failed/rank_0"], seconds=5)
    assert claiming.is_alive()
    answers.set()
    claiming.join()


def test_a_log_that_does_not_answer_delays_no_report(start, monkeypatch):
    rank = start()
    monkeypatch.setattr(file_calls, "FILE_SECONDS", 0.2)
    os.mkfifo(rank.run.log / "rank_0.log")  # nobody reads it, so it cannot be opened
    reporting = threading.Thread(
        target=rank.failures.report_exception, args=(ValueError("oops"),), daemon=True
    )
    reporting.start()
    reporting.join(60)
    assert not reporting.is_alive()
    assert rank.run.read_status()["error"].startswith("rank 0 of 2 failed in step 5: ValueError")


def test_all_keys_are_asked_for_at_once():
    store = FlakyStore(dist.HashStore())
    for number in range(100):
        store.store.set(str(number), "")
    assert absent(store, list(map(str, range(100))), seconds=5) == []
    assert store.calls == 1
    assert absent(store, ["7", "x", "8"], seconds=0) == ["x"]
    assert absent(store, [], seconds=0) == []


@pytest.mark.parametrize(
    ("beats", "notice", "lost"),
    [
        ("0120202", "02", ["n1"]),
        ("0120202", "0", ["n1"]),  # NCCL has aborted all ranks of the third node
        ("02100", "0", ["n2", "n1"]),
        ("01202", "012", []),
        ("0202", "02", []),  # it has not started yet
    ],
)
def test_the_nodes_that_were_silent_first_are_lost(monkeypatch, beats, notice, lost):
    """beats: three nodes of two ranks, in the order of their signs of life."""
    monkeypatch.setattr(nodes_module, "_SILENT_SECONDS", 0.0)
    monkeypatch.setattr(nodes_module, "_BEAT_SECONDS", 0.0)
    store = dist.HashStore()
    nodes = [Nodes(Environment(rank=r, world_size=6, local_world_size=2)) for r in (0, 2, 4)]
    for node in beats:
        monkeypatch.setenv("SLURMD_NODENAME", f"n{node}")
        nodes[int(node)].beat(store)
    for node in notice:
        nodes[int(node)].notice(store)
    found = nodes[0].lost(store)
    assert [node.name for node in found] == lost
    assert all(node.ranks[0] == 2 * int(node.name[1]) for node in found)


def test_only_the_first_rank_of_a_node_gives_signs_of_life(monkeypatch):
    monkeypatch.setattr(nodes_module, "_BEAT_SECONDS", 60)
    store = dist.HashStore()
    Nodes(Environment(rank=3, local_rank=1, world_size=4, local_world_size=2)).beat(store)
    Nodes(Environment(world_size=2, local_world_size=2)).beat(store)  # one node
    assert store.num_keys() == 0
    first = Nodes(Environment(rank=2, world_size=4, local_world_size=2))
    first.beat(store)
    first.beat(store)  # not due yet
    assert store.add("node/beats", 0) == 1


@pytest.mark.parametrize(("answer", "expected"), [(b"Job summary\n", "Job summary"), (None, "")])
def test_the_view_of_nccl_is_asked_for(monkeypatch, answer, expected):
    """With a time limit: None does not answer."""
    monkeypatch.setattr(hang_report, "_RAS_SECONDS", 0.5 if answer is None else 60)
    monkeypatch.setattr(hang_report.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(hang_report.dist, "get_backend_config", lambda: "cpu:gloo,cuda:nccl")
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("NCCL_RAS_ADDR", f"127.0.0.1:{server.getsockname()[1]}")

        def serve():
            connection, _ = server.accept()
            with connection:
                assert connection.recv(100) == b"status\n"
                if answer is None:
                    assert connection.recv(100) == b"", "the client waits no longer"
                else:
                    connection.sendall(answer)

        serving = threading.Thread(target=serve)
        serving.start()
        assert hang_report.nccl_status() == expected
        serving.join(60)
    assert hang_report.nccl_status() == "", "nothing listens"
    monkeypatch.setattr(hang_report.dist, "get_backend_config", lambda: "cpu:gloo")
    assert hang_report.nccl_status() == ""


NCCL_ABORT = "NCCL communicator was aborted on rank 0. Original reason for failure was: timeout"


def test_what_nccl_says_is_in_the_report_of_a_loss(start, monkeypatch):
    monkeypatch.setattr(failures_module, "nccl_status", lambda: "rank 1 is missing")
    rank = start()
    assert rank.failures.report_exception(RuntimeError(NCCL_ABORT)) == 1
    status = rank.run.read_status()
    assert status["reason"] == "rank_lost"
    assert status["error"].splitlines()[-2:] == ["NCCL's RAS says:", "rank 1 is missing"]


def test_stop_request_after_rank_loss_reports_the_loss(start, neighbour, monkeypatch):
    """torchrun sends SIGTERM to the other ranks as soon as a rank has died."""
    rank = start()
    rank.register_neighbour(neighbour)
    monkeypatch.setattr(watchdog, "_ROUND_SECONDS", 60)
    rank.watch.__exit__()
    neighbour.kill()
    neighbour.wait()
    with pytest.raises(SystemExit):
        rank.failures.stop_before_training("SIGTERM")
    assert rank.run.read_status()["reason"] == "rank_lost"


@pytest.mark.parametrize("age", [-60, 60])
@pytest.mark.parametrize(
    ("last", "kept"),
    [
        ("reference.safetensors", "reference.safetensors"),
        ("teacher_top_k.json", "teacher_top_k.npy"),
    ],
)
def test_a_stop_names_what_a_pass_of_this_start_has_computed(start, age, last, kept):
    """A file of an earlier start may be of other weights."""
    rank = start()
    for name, change in (("recipe.yaml", 0), (last, age)):
        (rank.run.path / name).touch()
        os.utime(rank.run.path / name, times=(1e9, 1e9 + change))
    with pytest.raises(SystemExit):
        rank.failures.stop_before_training("SIGTERM")
    what = "there is nothing to save"
    if age > 0:
        what = f"the next start continues with what has been computed in {rank.run.path / kept}"
    printed = rank.failures.console.getvalue()
    assert printed == f"stopped by SIGTERM before the first step: {what}\n"
    assert rank.run.read_status()["state"] == "stopped"


def chained_exception(first, then, *, cause_hidden=False):
    try:
        try:
            raise first
        except Exception:
            if cause_hidden:
                raise then from None
            raise then  # noqa: B904
    except Exception as error:
        return error


CONNECTION_LOST = "[gloo] Connection closed by peer [127.0.0.1]:4"
WORKER_KILLED = "DataLoader worker (pid 7) is killed by signal: Terminated."


@pytest.mark.parametrize("interrupted", [False, True])
def test_terminated_loader_process_is_reported_as_rank_lost(start, interrupted):
    """The exception is raised while a lost connection is handled, or interrupts a training step."""
    rank, error = start(), RuntimeError(WORKER_KILLED)
    error = error if interrupted else chained_exception(RuntimeError(CONNECTION_LOST), error)
    assert rank.failures.report_exception(error) == 1
    status = rank.run.read_status()
    assert status["reason"] == "rank_lost"
    assert "rank 1 of 2 ended without an error message" in status["error"]
    assert "DataLoader worker" in (rank.run.log / "rank_0.log").read_text()


def test_other_exceptions_are_their_own_first_cause():
    error = chained_exception(KeyError("a"), RuntimeError(WORKER_KILLED))
    assert first_cause(error) is error
    error = chained_exception(RuntimeError(CONNECTION_LOST), ValueError("b"), cause_hidden=True)
    assert first_cause(error) is error


# Hang reports


# The interface of gloo


def test_gloo_uses_the_interface_to_the_other_nodes(monkeypatch):
    environment = Environment(world_size=2, torchrun=True, meeting_point="127.0.0.1:1")
    variables = {}
    monkeypatch.setattr(os, "environ", variables)
    assert process_group.interface_to("127.0.0.1") == "lo"
    assert process_group.interface_to("no.such.host.invalid") is None
    process_group._prepare_gloo(environment)
    assert variables == {"GLOO_SOCKET_IFNAME": "lo"}, "other machines must not connect to it"
    variables.clear()
    monkeypatch.setattr(process_group, "interface_to", lambda host: {"127.0.0.1": "ib0"}[host])
    process_group._prepare_gloo(environment)
    assert variables == {"GLOO_SOCKET_IFNAME": "ib0"}
    variables["GLOO_SOCKET_IFNAME"] = "eth7"
    process_group._prepare_gloo(environment)
    assert variables == {"GLOO_SOCKET_IFNAME": "eth7"}, "the value of the user must be kept"


class Samples(torch.utils.data.Dataset):
    """Five samples; the one at `bad` is not given."""

    def __init__(self, bad, how):
        self.bad, self.how = bad, how

    def __len__(self):
        return 5

    def __getitem__(self, index):
        if index == self.bad:
            self.how()
        return torch.zeros(1 << 16)


def raise_key_error():
    raise KeyError("no such column")


def read_missing():
    Path("missing.txt").read_text()


def failure_of(how, workers):
    loader = torch.utils.data.DataLoader(Samples(3, how), num_workers=workers)
    with pytest.raises(Exception) as caught:
        list(loader)
    return caught.value


def told_of(how, workers):
    """What is said of the failure, and whether it counts as a lost loader process."""
    error = failure_of(how, workers)
    return describe(error), lost_a_loader(error)


@pytest.fixture(scope="module")
def fresh_process():
    """A process without the threads of other tests, with which a loader process that was forked from
    it crashed once."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield pool


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    ("how", "text", "line"),
    [(raise_key_error, "KeyError: ", "raise KeyError"), (read_missing, "FileNotFoundError: ", "")],
)
def test_an_exception_of_a_loader_process_has_its_own_line(how, text, line, workers, fresh_process):
    """It named a line of torch, which raises the exception again."""
    told, lost = fresh_process.submit(told_of, how, workers).result(timeout=100)
    assert not lost
    assert told.startswith(text)
    assert "Traceback" not in told
    assert "no such" in told.lower()
    if line:
        file, number = re.search(r"\((.*):(\d+)\)$", told).groups()
        assert Path(file).read_text().splitlines()[int(number) - 1].strip().startswith(line)


def test_a_loader_process_that_ends_itself_is_named():
    """Its connection was gone: `FileNotFoundError` of a line of Python's multiprocessing."""
    assert lost_a_loader(failure_of(partial(os._exit, 0), 1))


def test_a_message_that_no_encoding_has_is_reported(start, tmp_path):
    """A name of a file that is not UTF-8, as Python decodes it, ended in a second traceback."""
    failures = start().failures
    with (tmp_path / "console.txt").open("w", encoding="utf-8") as failures.console:
        failures.report_exception(ValueError("no file \udcff.txt"))
    assert "ValueError: no file \\udcff.txt" in (tmp_path / "console.txt").read_text()
    assert failures.run.read_status()["reason"] == "error"
