"""Runs on two nodes. One of them is slow, lost or disconnected.

If a node is lost, the other one resumes with the same global batches.
"""

import sys

import pytest

from tests.distributed.launching import run, wait_until
from tests.distributed.namespaces import two_nodes, unavailable
from tests.distributed.test_resumed_runs import KILL_TRAIN, RECIPE, events, records
from tests.run_files import read_lines, status, write_texts

STEPS = 14
PORT = 29417


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    if (reason := unavailable()) is not None:
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("nodes")
    write_texts(folder / "text.jsonl", seed=2)
    (folder / "recipe.yaml").write_text(
        RECIPE.replace("FOLDER", str(folder)).replace("DROPOUT", "0.0")
    )
    return folder


@pytest.fixture(scope="module")
def one_rank(folder):
    """Metrics of an undisturbed run on one rank."""
    run(
        [
            sys.executable,
            KILL_TRAIN,
            f"recipe={folder}/recipe.yaml",
            f"run.dir={folder}/alone",
            f"run.max_steps={STEPS}",
        ]
    ).check()
    return records(folder / "alone")


def start(nodes, host, folder, run_dir, *overrides, least=1, **variables):
    """Starts torchrun on both nodes; `host` hosts the rendezvous. least: number of nodes."""
    for node in nodes:
        timeouts = "keep_alive_interval=1,keep_alive_max_attempt=10,last_call_timeout=6,join_timeout=60,close_timeout=5"
        command = [
            *(
                sys.executable,
                "-m",
                "launcher.distributed.torchrun",
                "--nnodes",
                f"{least}:2",
                "--nproc-per-node",
                1,
                "--max-restarts",
                5,
            ),
            *(
                "--rdzv-backend",
                "c10d",
                "--rdzv-endpoint",
                f"{host.address}:{PORT}",
                "--rdzv-id",
                run_dir.name,
            ),
            *(
                "--rdzv-conf",
                f"is_host={int(node is host)},{timeouts}",
                "--local-addr",
                node.address,
            ),
            *(
                KILL_TRAIN,
                f"recipe={folder}/recipe.yaml",
                f"run.dir={run_dir}",
                f"run.max_steps={STEPS}",
            ),
            *("run.timeout=10", "run.hang_timeout=20", "run.init_timeout=60"),
            *overrides,
        ]
        log, variables = (
            folder / f"{run_dir.name}-{node.name}.log",
            variables or {"SLOW_STEP": "0.25"},
        )
        node.start(command, log=log, **variables)


def wait_until_both_train(nodes, run_dir, *, step, ranks=2):
    def both_train():
        return (
            (run_dir / "metrics.jsonl").exists()
            and len(records(run_dir)) >= step
            and events(run_dir, "started")[-1]["ranks"] == ranks
        )

    assert wait_until(both_train, process=nodes[0].process), (
        "the two nodes did not reach the step:\n"
        + "\n".join(node.output()[-6000:] for node in nodes)
    )


@pytest.mark.parametrize("strategy", ["fsdp", pytest.param("ddp", marks=pytest.mark.long)])
@pytest.mark.long
def test_slow_rank_is_reported(folder, strategy):
    """Rank 1 is slow in steps 25 to 49. Exactly one warning names it, and one reports the end."""
    run_dir = folder / f"slow-{strategy}"
    overrides = (
        f"strategy.kind={strategy}",
        "batch.micro_batch_size=4",
        "checkpoint.every_steps=null",
    )
    overrides += ("run.timeout=60", "run.hang_timeout=60", "run.max_steps=75")
    with two_nodes() as nodes:
        start(nodes, nodes[0], folder, run_dir, *overrides, least=2, SLOW_RANK="1,25,49,0.06")
        assert [node.wait(240) for node in nodes] == [0, 0], nodes[0].output()[-8000:]
        printed = nodes[0].output()
    named = [line for line in printed.splitlines() if "rank 1 on " in line]
    first, second = (line.partition("warning: ")[2] for line in named)
    assert first.startswith(f"slow: rank 1 on {nodes[1].name} takes 3.0 times as long")
    assert "since step 25 (3 s)" in first
    assert second.startswith(f"rank 1 on {nodes[1].name} is no longer slow, after ")
    assert "rank 0 on" not in printed
    lines = {line["step"]: line for line in records(run_dir)}
    slow, usual = ([lines[step] for step in steps] for steps in (range(25, 50), range(2, 25)))
    assert {line["slowest_rank"] for line in slow} == {1}
    for part, own, waits in ((slow, 0.18, 0.12), (usual, 0.06, 0.0)):
        for line in part:
            assert line["slowest_rank_seconds"] == pytest.approx(own)
            assert line["fastest_rank_seconds"] == pytest.approx(0.06)
            assert line["communication_seconds"] == pytest.approx(waits, abs=1e-6), (
                "rank 0 must wait for rank 1"
            )
            assert line["step_seconds"] == pytest.approx(own)


def check_resumed_on_one_node(run_dir, survivor, one_rank, output):
    assert status(run_dir)["state"] == "finished", output
    lines = read_lines(run_dir / "events.jsonl")
    last = max(index for index, line in enumerate(lines) if line["event"] == "started")
    assert [line["ranks"] for line in lines if line["event"] == "started"][-2:] == [2, 1], lines
    assert lines[last + 1]["event"] == "built", lines
    assert lines[last + 2]["event"] == "resumed", lines
    assert {line["host"] for line in lines[last:]} == {survivor.name}, (
        "the lost node must not write after the restart"
    )
    mine = records(run_dir)
    assert [line["step"] for line in mine] == list(range(1, STEPS + 1)), (
        "each step must be recorded once"
    )
    for a, b in zip(mine, one_rank, strict=True):
        assert (a["tokens"], a["loss_tokens"], a["samples_seen"]) == (
            b["tokens"],
            b["loss_tokens"],
            b["samples_seen"],
        )
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-5)


@pytest.mark.parametrize("rank", [1, pytest.param(0, marks=pytest.mark.long)])
@pytest.mark.long
def test_run_survives_a_lost_node(folder, one_rank, rank):
    """If the node with rank 0 is lost, the lock on the run's folder is lost with it.

    The other node takes it over after two minutes without a heartbeat.
    """
    run_dir = folder / f"lost-{rank}"
    with two_nodes() as nodes:
        other, host = nodes[rank], nodes[1 - rank]
        start(nodes, host, folder, run_dir)
        wait_until_both_train(nodes, run_dir, step=6)
        assert events(run_dir, "started")[-1]["host"] == nodes[0].name, (
            "rank 0 must be on the node with the lower address"
        )
        other.kill()
        assert host.wait(240 if rank == 0 else 120) == 0, host.output()[-8000:]
        if rank == 1:  # with rank 0 the ranks' store is lost, too
            assert events(run_dir, "failed")[0]["lost_nodes"] == [other.name]
        check_resumed_on_one_node(run_dir, host, one_rank, host.output()[-8000:])


@pytest.mark.long
def test_run_survives_a_disconnected_node(folder, one_rank):
    """The disconnected node has rank 0, hosts the store and holds the lock on the run's folder.

    It can still write to the folder.
    """
    run_dir = folder / "cut"
    with two_nodes() as (other, host):
        start((other, host), host, folder, run_dir)
        wait_until_both_train((other, host), run_dir, step=6)
        assert events(run_dir, "started")[-1]["host"] == other.name, (
            "rank 0 must be on the node with the lower address"
        )
        other.disconnect()
        assert host.wait(120) == 0, host.output()[-8000:]
        assert other.wait(60) != 0
        # Both nodes can write to the folder, and either may report first
        assert events(run_dir, "failed")[-1]["reason"] in ("rank_lost", "timeout")
        check_resumed_on_one_node(
            run_dir, host, one_rank, host.output()[-8000:] + other.output()[-8000:]
        )
