"""The watchdog in real processes.

Hanging ranks, killed and stopped agents, the `save` and `stop` files, early signals, lost locks.
"""

import contextlib
import os
import pickle
import re
import signal
import sys
import threading
from pathlib import Path

import pytest

from launcher.distributed.environment import Environment
from launcher.reliability.lock import Ownership
from tests import REPOSITORY
from tests.distributed.launching import free_port, run, wait_until
from tests.run_files import read_lines, status

WATCHED = REPOSITORY / "tests/distributed/watched.py"


def start(run_dir, fault, *, during, hang_timeout=2, restarts=0, **options):
    options = {"timeout": 200, **options}
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "--max-restarts",
        restarts,
    ]
    return run(
        [*torchrun, "--tee", "3", WATCHED, run_dir, hang_timeout, fault], during=during, **options
    )


def events(run_dir):
    return read_lines(run_dir / "events.jsonl")


def wait_for(condition, seconds=100):
    assert wait_until(condition, seconds=seconds), (
        "the condition did not become true before the time limit"
    )


def is_training(run_dir):
    return (run_dir / "status.json").exists() and status(run_dir)["step"] >= 20


def workers(agent):
    """Returns the process id of each rank."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if int((folder / "stat").read_text().rsplit(")", 1)[1].split()[1]) == agent:
                variables = dict(
                    pair.split("=", 1)
                    for pair in (folder / "environ").read_text().split("\0")
                    if "=" in pair
                )
                found[int(variables["RANK"])] = int(folder.name)
        except (OSError, KeyError):
            continue
    return found


@pytest.mark.long
def test_hanging_ranks_are_reported_and_restarted(tmp_path):
    """Three attempts of one run.

    In the first one, rank 1 is in an endless loop. In the second one, rank 0 is stopped with
    SIGSTOP. In the third one, files request to save and to stop.
    """
    run_dir = tmp_path / "run"

    def attempts():
        return (
            [event["event"] for event in events(run_dir)].count("started")
            if (run_dir / "events.jsonl").exists()
            else 0
        )

    def during(process):
        # events.jsonl is written before status.json
        wait_for((run_dir / "status.json").exists)
        wait_for(lambda: attempts() == 1 and status(run_dir)["state"] == "failed")
        check_endless_loop(status(run_dir), run_dir)
        wait_for(
            lambda: (
                attempts() == 2 and status(run_dir)["state"] == "running" and is_training(run_dir)
            )
        )
        stopped = workers(process.pid)[0]
        wait_for((run_dir / "knows_neighbours_2_1").exists)
        os.kill(stopped, signal.SIGSTOP)
        wait_for(lambda: status(run_dir)["state"] == "failed")
        check_stopped_process(status(run_dir), run_dir, stopped)
        os.kill(stopped, signal.SIGKILL)  # as torchrun's agent does after 30 s
        wait_for(lambda: status(run_dir)["state"] == "running" and is_training(run_dir))
        (run_dir / "save").touch()
        wait_for(lambda: not (run_dir / "save").exists())
        (run_dir / "stop").touch()

    # On a loaded machine a rank can be seconds late because it waits for a core
    options = {"hang_timeout": 6, "restarts": 2, "TORCH_FR_BUFFER_SIZE": "100"}
    result = start(run_dir, "loop", during=during, **options).check(0)
    assert result.output.count("no sign of life for 6 s (run.hang_timeout)") == 2, (
        "each hang must be reported once"
    )
    assert (status(run_dir)["state"], status(run_dir)["reason"]) == (
        "stopped",
        f"the file {run_dir}/stop",
    )
    assert not (run_dir / "stop").exists()
    recorded = [(event["event"], event["attempt"]) for event in events(run_dir)]
    assert recorded == [
        ("started", 1),
        ("failed", 1),
        ("started", 2),
        ("failed", 2),
        ("started", 3),
        ("saved", 3),
    ]
    assert events(run_dir)[2]["found"] == "failed"


def test_stopped_loader_processes_do_not_make_another_rank_the_culprit(tmp_path):
    """Each process that cannot write its stack took a second, one after the other; meanwhile the
    other ranks waited for the report and did not answer, and were reported for it."""
    run_dir = tmp_path / "run"
    try:
        result = start(run_dir, "loaders", during=None, hang_timeout=3)
    finally:
        for pid in stopped_processes():
            os.kill(pid, signal.SIGKILL)
    assert result.status != 0
    error = status(run_dir)["error"]
    assert re.search(r"rank 0 of 2 \(.*\) is behind: it runs without progress; in step 5", error)
    assert error.count("its loader process") == 4
    assert "rank 1 waits in step 5, backward; at " in error
    assert "does not answer" not in error
    text = (run_dir / "log/hang/rank_0.txt").read_text()
    assert text.count(", which loads data for rank 0") == 8


def stopped_processes():
    """Process ids of stopped processes of this program that have lost their parent."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            state = (folder / "stat").read_text().rsplit(")", 1)[1].split()[0]
            if state == "T" and str(WATCHED) in (folder / "cmdline").read_text():
                found.append(int(folder.name))
    return found


def test_a_hang_is_reported_where_the_file_system_does_not_answer(tmp_path):
    """The ranks answer before they write, no rank is to blame, and the run ends."""
    run_dir = tmp_path / "run"
    result = start(run_dir, "files", during=None, hang_timeout=3)
    assert result.status != 0
    assert "rank 1 of 2" in result.output
    assert f"the file system of {run_dir} does not answer on 2 of 2 ranks" in result.output
    assert "): it runs without progress; in step 5, forward" in result.output
    assert "is behind" not in result.output
    assert "rank 0 waits in step 5, backward; at " in result.output
    assert "does not answer: stacks are not written there" in result.output
    assert f"the file system of {run_dir} does not answer: not recorded there" in result.output
    assert status(run_dir)["state"] == "running"


def test_an_exception_is_reported_where_the_file_system_does_not_answer(tmp_path):
    """The rank waited for its log before it said that it had failed, and the hang of the others was
    reported."""
    result = start(tmp_path / "run", "raise", during=None, hang_timeout=10)
    assert result.status != 0
    assert "rank 1 of 2 failed in step 5: ValueError: a fault of this test" in result.output
    assert "no sign of life" not in result.output


def two_nodes(run_dir, fault):
    """Ranks of two nodes with this fault. Returns the result of the first node."""
    port = free_port()

    def agent(name):
        words = [
            "--nnodes",
            "2",
            "--nproc-per-node",
            "2",
            "--rdzv-backend",
            "c10d",
            "--rdzv-id",
            "n",
        ]
        words += [
            "--rdzv-endpoint",
            f"127.0.0.1:{port}",
            "--rdzv-conf",
            f"is_host={int(name == 'n1')}",
        ]
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            *words,
            WATCHED,
            run_dir,
            "60",
            fault,
        ]
        return run(command, timeout=200, SLURMD_NODENAME=name)

    other = threading.Thread(target=agent, args=("n2",))
    other.start()
    result = agent("n1")
    other.join()
    assert result.status != 0
    return result


@pytest.mark.long
def test_a_killed_rank_does_not_make_its_node_a_lost_one(tmp_path):
    """The first rank of a node, which gives the signs of life of the node, is killed. The other rank of
    the node notices that."""
    run_dir = tmp_path / "run"
    result = two_nodes(run_dir, "first")
    outcome = status(run_dir)
    assert outcome["reason"] == "rank_lost", result.output
    assert outcome["error"].startswith("rank 2 of 4 ended without an error message in step 5")
    assert "lost_nodes" not in outcome


def test_a_lost_node_is_named_before_the_ranks_that_end_because_of_it(tmp_path):
    run_dir = tmp_path / "run"
    result = two_nodes(run_dir, "node")
    outcome = status(run_dir)
    assert outcome["reason"] == "rank_lost", result.output
    lost = (run_dir / "lost").read_text()
    first, second = outcome["error"].splitlines()[:2]
    assert first.startswith(f"nothing is heard from node {lost} (ranks 2, 3 of 4) any more")
    assert second.startswith("rank 1 of 4 ended without an error message in step 5")
    assert outcome["lost_nodes"] == [lost]
    assert events(run_dir)[-1]["lost_nodes"] == [lost]


def check_endless_loop(outcome, run_dir):
    assert (outcome["reason"], outcome["step"]) == ("hang", 4)
    assert "is behind: it runs without progress; in step 5, forward" in outcome["error"]
    assert "at spin (" in outcome["error"]
    assert "rank 0 waits in step 5, backward; at " in outcome["error"]
    assert "in spin" in (run_dir / "log/hang/rank_1.txt").read_text()
    assert "dist.all_reduce(asked)" in (run_dir / "log/hang/rank_0.txt").read_text()
    assert pickle.loads((run_dir / "log/hang/flight_recorder_1").read_bytes())["entries"]


def check_stopped_process(outcome, run_dir, pid):
    assert outcome["reason"] == "hang"
    assert "rank 0 of 2 is behind: its process does not answer" in outcome["error"]
    assert f"  process {pid}\n  State: T (stopped)" in outcome["error"]
    assert "rank 1 waits in step" in outcome["error"]
    seen = (run_dir / "log/hang/rank_1.txt").read_text()
    assert "rank 0, as seen by rank 1" in seen
    assert "State: T (stopped)" in seen


def test_ranks_stop_evaluation_together_and_detect_killed_agent(tmp_path):
    run_dir = tmp_path / "run"
    ranks = {}

    def during(process):
        wait_for(lambda: all((run_dir / f"evaluating_{rank}").exists() for rank in (0, 1)))
        os.kill(workers(process.pid)[1], signal.SIGUSR1)
        wait_for(lambda: is_training(run_dir))
        seen = [int((run_dir / f"evaluated_{rank}").read_text()) for rank in (0, 1)]
        assert seen[0] == seen[1]
        ranks.update(workers(process.pid))
        process.kill()
        wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in ranks.values()))

    ended = start(run_dir, "evaluate", during=during, hang_timeout=60)
    assert ended.status == -signal.SIGKILL
    assert len(ranks) == 2
    # The stacks of the store's client, 60 lines, are in the log only
    assert "frame #" not in ended.output
    assert "Exception raised from" in (run_dir / "log/rank_0.log").read_text()
    assert (status(run_dir)["state"], status(run_dir)["reason"]) == ("failed", "agent_lost")
    assert [e["event"] for e in events(run_dir)] == ["started", "failed"]


@pytest.mark.long
def test_hang_is_reported_while_the_agent_is_stopped(tmp_path):
    """The agent hosts the store. While it is stopped, calls of the store block without an error."""
    run_dir = tmp_path / "run"

    def during(process):
        wait_for(lambda: is_training(run_dir))
        stopped = [process.pid, workers(process.pid)[1]]
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        try:
            wait_for(lambda: status(run_dir)["state"] == "failed")
        finally:
            for pid in stopped:
                os.kill(pid, signal.SIGCONT)

    assert start(run_dir, "none", during=during, hang_timeout=8).status == 1
    assert (status(run_dir)["state"], status(run_dir)["reason"]) == ("failed", "hang")
    assert "the ranks' store does not answer" in status(run_dir)["error"]
    assert "rank 0 of 2 is in step" in status(run_dir)["error"]
    assert "dist.all_reduce(asked)" in (run_dir / "log/hang/rank_0.txt").read_text()


@pytest.mark.long
def test_signal_before_the_first_step_stops_all_ranks(tmp_path):
    """The signalled rank waits in a collective, where Python runs no signal handlers."""
    run_dir = tmp_path / "run"

    def during(process):
        wait_for((run_dir / "ready_0").exists)
        os.kill(workers(process.pid)[1], signal.SIGUSR1)

    start(run_dir, "prepare", during=during, hang_timeout=60).check(0)
    assert (status(run_dir)["state"], status(run_dir)["reason"], status(run_dir)["step"]) == (
        "stopped",
        "SIGUSR1",
        0,
    )
    assert [e["event"] for e in events(run_dir)] == ["started", "stopped"]
    assert list((run_dir / "owner").glob("*.released"))


def test_rank_killed_at_start_is_reported(tmp_path):
    """The rank dies before the first check of the watchdogs."""
    result = start(tmp_path / "run", "early", during=lambda process: None, hang_timeout=60)
    outcome = status(tmp_path / "run")
    assert (outcome["state"], outcome["reason"]) == ("failed", "rank_lost"), result.output


def test_fenced_off_owner_ends_and_writes_nothing(tmp_path):
    """A requeued Slurm job takes the lock while a process of its first start is still alive."""
    run_dir = tmp_path / "run"
    again = Environment(job="9", job_restart_count=1)

    def during(process):
        wait_for(lambda: is_training(run_dir))
        owner = Ownership.take(run_dir, again)
        wait_for(lambda: process.poll() is not None)
        assert owner.name in os.listdir(run_dir / "owner")
        owner.release()

    result = run(
        [sys.executable, WATCHED, run_dir, "60", "none"],
        during=during,
        timeout=200,
        SLURM_JOB_ID="9",
    ).check(1)
    assert "Slurm job 9" in result.output
    assert "writes nothing more" in result.output
    assert status(run_dir)["state"] == "running", "the old owner must not report its end"
    assert [e["event"] for e in events(run_dir)] == ["started"]


@pytest.mark.long
def test_ranks_connect_despite_different_restart_counts(tmp_path):
    """The agent of the killed rank's node counts a restart.

    The other agent may restart because that node rejoins, and then counts none.
    """
    run_dir = tmp_path / "run"
    port = free_port()
    node = [
        "--nnodes",
        "2",
        "--nproc-per-node",
        "1",
        "--max-restarts",
        "2",
        "--rdzv-backend",
        "c10d",
        "--rdzv-id",
        "t",
    ]
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        *node,
        "--rdzv-endpoint",
        f"127.0.0.1:{port}",
        WATCHED,
        run_dir,
        "60",
        "none",
    ]
    agents, second = [], []

    def during(process):
        agents.append(process.pid)
        if len(agents) < 2:
            return
        wait_for(lambda: is_training(run_dir))
        os.kill(
            next(pid for agent in agents for rank, pid in workers(agent).items() if rank == 1),
            signal.SIGKILL,
        )
        wait_for(lambda: [event["event"] for event in events(run_dir)].count("started") == 2)
        wait_for(lambda: status(run_dir)["state"] == "running" and is_training(run_dir))
        (run_dir / "stop").touch()

    other = threading.Thread(target=lambda: second.append(run(command, timeout=90, during=during)))
    other.start()
    run(command, timeout=90, during=during).check()
    other.join()
    second[0].check()
    assert status(run_dir)["state"] == "stopped"
