"""Runs started as by a user: with torchrun, plain python, on several nodes, in other folders."""

import io
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import threading

import pytest
import yaml

from launcher.cli import main
from tests import REPOSITORY
from tests.datasets import objective_of
from tests.distributed.launching import PATIENCE, forked, free_port, run, torchrun, wait_until
from tests.run_files import read_lines, status, write_lines
from tests.wandb_files import history, read_records

TRAIN = REPOSITORY / "launcher/train.py"
SHRUNK = [
    *(
        "model.config.hidden_size=64",
        "model.config.intermediate_size=176",
        "model.config.num_hidden_layers=2",
    ),
    *(
        "model.config.num_attention_heads=4",
        "model.config.num_key_value_heads=2",
        "model.config.head_dim=16",
    ),
    *("data.sequence_length=128", "batch.global_batch_size=16", "batch.micro_batch_size=4"),
]
"""The overrides that the comments at the top of the recipes suggest for a CPU."""
SMALL = [
    "recipe=quickstart",
    "data.sequence_length=64",
    "model.config.num_hidden_layers=2",
    "data.validation=null",
]
KEYS = {
    *(
        "step",
        "loss",
        "grad_norm",
        "learning_rate",
        "tokens",
        "loss_tokens",
        "step_seconds",
        "tokens_per_second",
        "mfu",
    ),
    *("peak_memory_bytes", "samples_seen", "time"),
}


def read_metrics(run_dir):
    return read_lines(run_dir / "metrics.jsonl")


def training_metrics(run_dir):
    return [line for line in read_metrics(run_dir) if "loss" in line]


def run_python(*arguments, **options):
    return run([sys.executable, TRAIN, *arguments], **options)


@pytest.fixture(scope="module")
def ddp(tmp_path_factory):
    """A small run of the recipe ddp, started in another folder, with all outputs enabled."""
    folder = tmp_path_factory.mktemp("elsewhere")
    extra = [
        "logging.tensorboard=true",
        "logging.wandb={project: test, mode: offline}",
        "evaluation={every_steps: 2, at_start: true}",
        'data.validation=["${stdlib:}/[u-z]*.py"]',
    ]
    overrides = [
        *SHRUNK,
        *extra,
        "run.max_steps=5",
        "evaluation.max_batches=3",
        "profile={start_step: 2, steps: 1}",
    ]
    result = torchrun(TRAIN, "recipe=ddp", *overrides, ranks=2, cwd=folder).check()
    return folder / "runs/ddp", result


@pytest.mark.long
def test_report_shows_the_recorded_run(ddp, tmp_path):
    run_dir, _ = ddp
    events = read_lines(run_dir / "events.jsonl")
    (built,) = [event for event in events if event["event"] == "built"]
    assert (built["device"], built["ranks_per_node"]) == ("cpu", 2)
    assert built["versions"]["python"] == platform.python_version()
    sizes = built["held"]
    assert sizes["parameters"] == sizes["gradients"]
    assert sizes["optimizer"] == pytest.approx(2 * sizes["parameters"], rel=0.01)
    out = tmp_path / "report.html"
    assert main.main(["report", str(run_dir), f"out={out}"]) == 0
    page = out.read_text()
    for shown in ("Memory at the peak", "recipes/ddp.yaml", "batch.micro_batch_size"):
        assert shown in page


def test_metrics_have_the_documented_fields(ddp):
    run_dir, _ = ddp
    steps = training_metrics(run_dir)
    assert [line["step"] for line in steps] == [1, 2, 3, 4, 5]
    for line in steps:
        assert set(line) >= KEYS
        assert line["tokens"] == 16 * 128
        assert 0 < line["loss_tokens"] <= line["tokens"]
        assert line["samples_seen"] == 16 * line["step"]
        assert line["mfu"] is None, "the peak FLOP/s of a CPU is unknown"
        assert line["peak_memory_bytes"] > 2**27
        assert line["tokens_per_second"] == pytest.approx(line["tokens"] / line["step_seconds"])
    assert steps[0]["learning_rate"] == pytest.approx(3e-4 / 100)
    assert steps[-1]["loss"] < steps[0]["loss"]
    evaluations = [line for line in read_metrics(run_dir) if "eval_loss" in line]
    assert [line["step"] for line in evaluations] == [0, 2, 4, 5]
    assert all(line["eval_tokens"] == evaluations[0]["eval_tokens"] > 2000 for line in evaluations)
    assert evaluations[-1]["eval_loss"] < evaluations[0]["eval_loss"]


def test_run_folder_has_all_outputs(ddp):
    run_dir, result = ddp
    assert status(run_dir)["state"] == "finished"
    assert status(run_dir)["step"] == 5
    assert status(run_dir)["error"] is None
    assert yaml.safe_load((run_dir / "recipe.yaml").read_text())["batch"] == {
        "global_batch_size": 16,
        "micro_batch_size": 4,
        "micro_batch_tokens": None,
    }
    assert "finished after 5 of 5 steps" in (run_dir / "log/rank_0.log").read_text()
    assert (run_dir / "log/rank_1.log").exists()
    assert list((run_dir / "tensorboard").glob("events*"))
    assert list((run_dir / "wandb").glob("offline-run-*"))
    traces = sorted(path.name for path in (run_dir / "profile").iterdir())
    assert traces == [
        f"rank_{rank}{end}"
        for rank in (0, 1)
        for end in (".pt.trace.json", "_memory.txt", "_time.txt")
    ]
    assert "runs/ddp/metrics.jsonl" in result.output


def test_start_log_describes_the_configuration(ddp):
    _, result = ddp
    for text in (
        "2 blocks (LlamaDecoderLayer)",
        "ddp: whole model on each rank, float32 masters, compute in bfloat16",
        "x 2 accumulation steps x 2 ranks",
        "auto: model.compile=false: the ranks compute on CPUs",
    ):
        assert text in result.output


def test_exported_weights_give_the_evaluation_loss(ddp):
    """The loss of the model that `from_pretrained` loads equals that of the last evaluation."""
    import torch
    from transformers import AutoModelForCausalLM

    run_dir, _ = ddp
    model = AutoModelForCausalLM.from_pretrained(run_dir / "hf", dtype=torch.float32)
    recipe = yaml.safe_load((run_dir / "recipe.yaml").read_text())
    from launcher.data.opening import open_dataset
    from launcher.data.token_store import ModelTraits
    from launcher.objectives.loss import summed_loss
    from launcher.recipe.load import load_recipe

    data = load_recipe([f"recipe={run_dir}/recipe.yaml"], ranks=2).recipe.data
    dataset = open_dataset(
        data,
        tuple(recipe["data"]["validation"]),
        objective=objective_of(data),
        tokenizer="bytes",
        model=ModelTraits(vocabulary=512),
        build=True,
    )
    total = tokens = 0
    with torch.no_grad():
        for first in range(0, 24, 8):  # three micro-batches on each of the two ranks
            batch = dataset.collate([dataset[index] for index in range(first, first + 8)])
            total += summed_loss(model, batch.micro_batch).item()
            tokens += batch.loss_tokens
    last = [line for line in read_metrics(run_dir) if "eval_loss" in line][-1]
    assert tokens == last["eval_tokens"]
    assert total / tokens == pytest.approx(last["eval_loss"], rel=1e-3), (
        "the run evaluated in bfloat16"
    )


@pytest.mark.long
@pytest.mark.parametrize("recipe", ["fsdp", "fsdp_offload"])
def test_other_recipes_train_to_equal_losses(ddp, recipe, tmp_path):
    overrides = [
        *SHRUNK,
        "run.max_steps=3",
        "evaluation.max_batches=3",
        "evaluation.every_steps=null",
        f"run.dir={tmp_path}/run",
    ]
    result = torchrun(
        "-m", "launcher.train", f"recipe={recipe}", *overrides, "checkpoint.export=null", ranks=2
    ).check()
    measured, expected = training_metrics(tmp_path / "run"), training_metrics(ddp[0])
    for mine, other in zip(measured, expected, strict=False):
        assert mine["loss"] == pytest.approx(other["loss"], rel=1e-3)
        assert mine["grad_norm"] == pytest.approx(other["grad_norm"], rel=2e-2)
    assert "fsdp: 4 groups over a mesh of 2 shard, float32 masters" in result.output
    assert "gathered in bfloat16, gradients reduced in float32" in result.output
    if recipe == "fsdp_offload":
        assert "(offloaded)" in result.output
        assert "activation checkpointing: full, 2 of 2 blocks" in result.output
    assert not (tmp_path / "run/hf").exists()


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    """A run in one process, without torchrun."""
    run_dir = tmp_path_factory.mktemp("alone") / "run"
    forked(TRAIN, *SMALL, "run.max_steps=3", f"run.dir={run_dir}").check()
    return run_dir


def test_saved_recipe_repeats_run_and_used_folder_is_refused(one_process, tmp_path):
    again = [f"recipe={one_process}/recipe.yaml", f"run.dir={tmp_path}/second"]
    forked(TRAIN, *again).check()
    for a, b in zip(
        training_metrics(one_process), training_metrics(tmp_path / "second"), strict=True
    ):
        assert (a["loss"], a["grad_norm"], a["learning_rate"]) == (
            b["loss"],
            b["grad_norm"],
            b["learning_rate"],
        )
    files = ("metrics.jsonl", "events.jsonl", "status.json", "recipe.yaml")
    before = [(tmp_path / "second" / name).read_bytes() for name in files]
    finished = forked(TRAIN, *again, ranks=2).check()
    assert finished.output.count(f"{tmp_path}/second is finished: 3 of 3 steps") == 1
    assert [(tmp_path / "second" / name).read_bytes() for name in files] == before, (
        "no step was left to train, so nothing must be written"
    )
    before = before[0]
    refused = forked(TRAIN, *again, "checkpoint.resume=never").check(2)
    assert f"{tmp_path}/second holds a run already (finished, step 3)" in refused.output
    assert "Traceback" not in refused.output
    assert (tmp_path / "second/metrics.jsonl").read_bytes() == before


@pytest.mark.long
def test_two_nodes_train_to_equal_losses(one_process, tmp_path):
    """Two torchrun agents form one run, as on two machines. Losses equal those of one process."""
    port = free_port()
    node = [
        "--nnodes",
        "2",
        "--nproc-per-node",
        "1",
        "--rdzv-backend",
        "c10d",
        "--rdzv-endpoint",
        f"127.0.0.1:{port}",
        "--rdzv-id",
        "t",
    ]
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        *node,
        TRAIN,
        *SMALL,
        "run.max_steps=3",
        f"run.dir={tmp_path}/two",
    ]
    second = []
    other = threading.Thread(target=lambda: second.append(run(command)))
    other.start()
    run(command).check()
    other.join()
    second[0].check()
    for a, b in zip(training_metrics(tmp_path / "two"), training_metrics(one_process), strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-5)


FAULTY = REPOSITORY / "tests/distributed/faulty_train.py"


@pytest.mark.parametrize(
    ("fault", "shown"),
    [
        (
            "raise:1:3",
            "rank 1 of 2 failed in step 3: ValueError: a fault of this test (tests/distributed/faulty_train.py",
        ),
        pytest.param(
            "exit:1:3",
            "rank 1 of 2 ended itself in step 3: sys.exit(0) was called at tests/distributed/faulty_train.py",
            marks=pytest.mark.long,
        ),
        pytest.param(
            "kill:1:3",
            "rank 1 of 2 ended without an error message in step 3",
            marks=pytest.mark.long,
        ),
        pytest.param(
            "hang:1:3",
            "rank 1 of 2 did not answer in step 3 within the time limit of a collective (run.timeout)",
            marks=pytest.mark.long,
        ),
    ],
)
def test_failure_of_one_rank_ends_all_ranks(fault, shown, tmp_path):
    overrides = [
        "run.max_steps=10000",
        "run.timeout=15",  # one step takes seconds on a busy machine
        f"run.dir={tmp_path}/run",
        "logging.tensorboard=true",
    ]
    # The ranks must not wait for the default time limit of collectives, 10 minutes
    result = torchrun(FAULTY, *SMALL, *overrides, ranks=2, timeout=90, FAULT=fault)
    assert result.status == 1
    ours = [line for line in result.output.splitlines() if shown in line]
    assert 1 <= len(ours) <= 3, (
        f"expected on the console and once or twice in torchrun's summary:\n{result.output[-8000:]}"
    )
    outcome = status(tmp_path / "run")
    assert outcome["state"] == "failed"
    assert outcome["step"] == 2
    assert outcome["error"].startswith(shown)
    assert (
        outcome["reason"]
        == {"raise": "error", "exit": "exit", "kill": "rank_lost", "hang": "timeout"}[
            fault.split(":")[0]
        ]
    )
    raised = "ValueError: a fault of this test"
    assert (raised in (tmp_path / "run/log/rank_1.log").read_text()) == ("raise" in fault)
    assert "Traceback" in (tmp_path / "run/log/rank_0.log").read_text(), (
        "rank 0 must write its own exception to its log"
    )
    assert [line["step"] for line in training_metrics(tmp_path / "run")] == [1, 2]
    assert [event.step for event in scalars(tmp_path / "run", "training/loss")] == [1, 2]


def scalars(run_dir, name):
    """Returns the events that TensorBoard shows for a scalar."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(str(run_dir / "tensorboard")).Reload().Scalars(name)


def check_lost_rank(run_dir, rank, output):
    """Asserts that the lost rank is the only failure in events.jsonl."""
    events = read_lines(run_dir / "events.jsonl")
    assert [(event["reason"], event["step"]) for event in events if event["event"] == "failed"] == [
        ("rank_lost", 2)
    ], output
    assert f"{rank} ended without an error message in step 3. Exit code -9" in output
    assert "on the same node, found its process gone" in output


@pytest.mark.long
def test_killed_rank_is_reported_while_peer_is_blocked(tmp_path):
    """As under NCCL, the blocked rank raises no exception.

    The failure is reported before torchrun kills the blocked rank (30 s). Then the run restarts.
    """
    strategy = [
        "strategy.kind=fsdp",
        "strategy.replicate=2",
        "run.init_timeout=777",
        "run.max_steps=4",
        f"run.dir={tmp_path}/run",
    ]
    variables = {"FAULT": "block:1:3", "ONCE": f"{tmp_path}/once", "TIMEOUTS": str(tmp_path)}
    result = torchrun(
        "--max-restarts",
        "1",
        FAULTY,
        *SMALL,
        *strategy,
        "checkpoint.export=null",
        ranks=2,
        timeout=180,
        **variables,
    ).check()
    check_lost_rank(tmp_path / "run", "rank 1 of 2", result.output)
    assert status(tmp_path / "run")["state"] == "finished"
    # All groups have the recipe's timeouts, except the checkpoint group: it waits for slow disks
    day = 24 * 3600
    for step, seconds in ((1, 777), (3, 600)):
        timeouts = dict(json.loads((tmp_path / f"step_{step}.json").read_text()))
        assert timeouts == {"default_pg": seconds, "mesh_shard": seconds, "checkpoint": day}


@pytest.mark.long
@pytest.mark.parametrize("fault", ["block:3:3", "ignore:2:3", "ignore:0:3"])
def test_killed_rank_is_reported_on_two_nodes(fault, tmp_path):
    port = free_port()
    node = [
        "--nnodes",
        "2",
        "--nproc-per-node",
        "2",
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
        FAULTY,
        *SMALL,
    ]
    command += [
        "run.max_steps=4",
        "batch.micro_batch_size=4",
        f"run.dir={tmp_path}/run",
        "checkpoint.export=null",
    ]
    results = []
    options = {"timeout": 150, "FAULT": fault, "ONCE": f"{tmp_path}/once"}
    threads = [
        threading.Thread(target=lambda: results.append(run(command, **options))) for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    output = "".join(result.check().output for result in results)
    check_lost_rank(tmp_path / "run", f"rank {fault.split(':')[1]} of 4", output)
    assert status(tmp_path / "run")["state"] == "finished"


@pytest.mark.long
def test_stuck_rank_is_ended_by_its_watchdog(tmp_path):
    """Rank 0 sleeps and gets no exception when rank 1 fails. Its watchdog ends the process."""
    code = f"""
import os, sys, time
sys.path.insert(0, {str(REPOSITORY)!r})
from tests.distributed import faulty_train
os.environ["FAULT"] = "hang:0:3" if os.environ["RANK"] == "0" else "raise:1:3"
faulty_train.start()
"""
    script = tmp_path / "stuck.py"
    script.write_text(code)
    shown = ["logging.tensorboard=true", "logging.wandb={project: test, mode: offline}"]
    # No torchrun agent: srun and other launchers do not end the remaining processes
    port = free_port()
    common = {
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "LOCAL_WORLD_SIZE": "2",
        **os.environ,
    }
    processes = [
        subprocess.Popen(
            [
                sys.executable,
                script,
                *SMALL,
                "run.max_steps=100",
                f"run.dir={tmp_path}/run",
                *shown,
            ],
            env=common | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for rank in (0, 1)
    ]
    try:
        assert [process.wait(100 * PATIENCE) for process in processes] == [1, 1]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert status(tmp_path / "run")["error"].startswith("rank 1 of 2 failed in step 3: ValueError")
    assert [line["step"] for line in training_metrics(tmp_path / "run")] == [1, 2], (
        "the last line must be written, although it was not due before step 3"
    )
    assert [event.step for event in scalars(tmp_path / "run", "training/loss")] == [1, 2]
    assert [row["step"] for row in history(tmp_path / "run/wandb")] == [1, 2]
    assert [
        message.exit_code
        for kind, message in read_records(tmp_path / "run/wandb")
        if kind == "exit"
    ] == [1]


def when_training(run_dir, action):
    """Returns a function that calls the action after the run has logged two steps."""

    def during(process):
        metrics = run_dir / "metrics.jsonl"
        trains = lambda: metrics.exists() and len(metrics.read_text().splitlines()) >= 2  # noqa: E731
        if wait_until(trains, process=process):
            action(process)

    return during


@pytest.mark.long
@pytest.mark.parametrize(
    ("ask", "reason"),
    [
        (lambda process, run_dir: (run_dir / "stop").touch(), "the file {run_dir}/stop"),
        *(
            pytest.param(
                lambda process, run_dir, number=number: process.send_signal(number),
                number.name,
                marks=pytest.mark.long,
            )
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
        ),
    ],
    ids=["file", "SIGINT", "SIGTERM", "SIGUSR1"],
)
def test_single_process_stops_on_request(ask, reason, tmp_path):
    run_dir = tmp_path / "run"
    stop = when_training(run_dir, lambda process: ask(process, run_dir))
    result = run_python(
        *SMALL, "run.max_steps=100000", f"run.dir={run_dir}", "data.workers=1", during=stop
    ).check(75)
    assert status(run_dir)["state"] == "stopped"
    assert status(run_dir)["reason"] == reason.format(run_dir=run_dir)
    assert status(run_dir)["step"] == training_metrics(run_dir)[-1]["step"]
    assert not (run_dir / "stop").exists()
    assert "Traceback" not in result.output


@pytest.mark.long
def test_torchrun_stops_all_ranks_at_the_same_step(tmp_path):
    """The agent forwards SIGTERM; both ranks stop at the same step."""
    run_dir = tmp_path / "run"
    stop = when_training(run_dir, lambda process: process.send_signal(signal.SIGTERM))
    workers = "data.workers=2"  # they get the signal too
    torchrun(
        TRAIN, *SMALL, workers, "run.max_steps=100000", f"run.dir={run_dir}", ranks=2, during=stop
    )
    assert status(run_dir)["state"] == "stopped"
    assert (run_dir / f"checkpoints/step_{status(run_dir)['step']:08}/commit.json").exists()
    assert status(run_dir)["step"] == training_metrics(run_dir)[-1]["step"]
    assert "Traceback" not in (run_dir / "log/rank_1.log").read_text()


@pytest.mark.long
def test_launcher_train_returns_exit_status_of_the_run(tmp_path):
    """Ctrl-C stops the run; its ranks refuse the next start. torchrun prints no traceback."""
    run_dir = tmp_path / "run"
    launcher = [
        sys.executable,
        "-m",
        "launcher.cli.main",
        "train",
        "gpus=2",
        "run.device=cpu",
        *SMALL,
    ]
    launcher += ["run.device=cpu", "run.max_steps=100000", f"run.dir={run_dir}"]
    stop = when_training(run_dir, lambda process: os.killpg(process.pid, signal.SIGINT))
    stopped = run(launcher, during=stop).check(75)
    assert (status(run_dir)["state"], status(run_dir)["reason"]) == ("stopped", "SIGINT")
    refused = run([*launcher, "checkpoint.resume=never"]).check(2)
    assert refused.output.count(f"{run_dir} holds a run already") == 1
    for result in (stopped, refused):
        assert "Traceback" not in result.output
        assert "message format" not in result.output
        assert "exitcode" not in result.output
    assert (
        "\nstopping after the next step at the latest, saving; press again to stop now\n"
        in stopped.output
    )
    assert re.fullmatch(r"run.dir: [^\n]*\n", refused.output)


def test_too_many_skipped_steps_end_the_run(tmp_path):
    wild = ["optimizer.learning_rate=1.0e+30", "schedule.warmup_steps=0", "run.max_skipped_steps=3"]
    result = forked(TRAIN, *SMALL, *wild, "run.max_steps=50", f"run.dir={tmp_path}/run").check(1)
    steps = training_metrics(tmp_path / "run")
    assert [line.get("skipped", False) for line in steps] == [False, True, True, True]
    assert all(line["grad_norm"] is None for line in steps[1:])
    assert status(tmp_path / "run")["reason"] == "not_finite"
    assert (
        "gradients not finite in 3 steps in a row (run.max_skipped_steps=3); try a lower optimizer.learning_rate"
        in result.output
    )
    assert "Traceback" not in result.output


def test_invalid_recipe_is_reported_once_under_torchrun(tmp_path):
    overrides = [
        "batch.micro_batchsize=3",
        "optimizer.learning_rate=fast",
        f"run.dir={tmp_path}/run",
    ]
    result = torchrun(TRAIN, *SMALL, *overrides, ranks=2)
    assert result.status == 1, "torchrun exits with status 1 after any failure"
    before_agent = result.output.split("Traceback")[0]
    assert (
        before_agent.count(
            "command line: optimizer.learning_rate=fast: must be a number; got 'fast'"
        )
        == 1
    )
    assert (
        before_agent.count(
            "command line: batch.micro_batchsize=3: unknown key; did you mean micro_batch_size?"
        )
        == 1
    )
    assert not (tmp_path / "run").exists()


@pytest.mark.long
def test_show_and_selftest_commands(tmp_path):
    launcher = [sys.executable, "-m", "launcher.cli.main"]
    shown = run([*launcher, "show", "recipe=fsdp", "optimizer.learning_rate=1e-3"]).check().output
    assert yaml.safe_load(shown)["optimizer"]["learning_rate"] == 0.001
    assert any(
        "learning_rate: 0.001" in line and line.endswith("# command line")
        for line in shown.splitlines()
    )
    assert any(
        "global_batch_size: 64" in line and "recipes/fsdp.yaml:" in line
        for line in shown.splitlines()
    )
    result = run(
        [*launcher, "selftest", "recipe=fsdp", "--shrink", "data.sequence_length=32", "steps=2"],
        timeout=150,
    ).check()
    assert "All configurations give the same losses." in result.output
    assert result.output.count(" of 1e-05") == 2 * 15
    assert result.output.count("bfloat16") == 5
    assert "Failed to load" not in result.output, "a warning of torchao"


MEAN_OF_MEANS = """
    from launcher.objectives.next_token import NextToken
    from launcher.data.loader import StepStatistics
    original = NextToken.loss
    NextToken.loss = lambda self, model, batch: (
        original(self, model, batch) / (batch.targets != -100).sum()
    )
    StepStatistics.loss_weight = lambda self: torch.tensor(8.0)
"""
DRIFTED_COPY = """
    from launcher.strategies.fsdp import Fsdp
    original = Fsdp.grad_norm
    def grad_norm(self):
        norm = original(self)
        if self._ranks.tensor_parallel_size > 1 and torch.distributed.get_rank() == 1:
            self.module.model.norm.weight.to_local().data.mul_(1 + 2**-22)
        return norm
    Fsdp.grad_norm = grad_norm
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("fault", "overrides", "mark"),
    [
        (MEAN_OF_MEANS, [], "TOO MUCH"),
        (
            DRIFTED_COPY,
            ["strategy.tensor_parallel_size=2", "model.compile=false"],
            "COPIES DIFFER (1 parameters, such as ",
        ),
    ],
    ids=["losses", "copies"],
)
def test_selftest_sees_a_planted_fault(tmp_path, fault, overrides, mark):
    start = "import sys\nif 'launcher.diagnostics.selftest' in sys.orig_argv:\n    import torch"
    (tmp_path / "sitecustomize.py").write_text(start + fault)
    rows = tmp_path / "rows.jsonl"
    write_lines(rows, [{"input_ids": list(range(2 + 5 * (i % 4), 30))} for i in range(8)])
    command = [
        *(sys.executable, "-m", "launcher.cli.main", "selftest", "recipe=fsdp", "--shrink"),
        *("steps=2", "data.kind=tokens", f"data.train={rows}", "data.validation=null"),
        *("data.packing=false", "strategy.mixed_precision=null", *overrides),
    ]
    result = run(command, PYTHONPATH=f"{tmp_path}:{REPOSITORY}", timeout=90).check(3)
    marked = [line for line in result.output.splitlines() if mark in line]
    assert marked
    if overrides:  # by less than the tolerance of losses
        assert all("fsdp, layers over 2 ranks" in line for line in marked)
        assert "TOO MUCH" not in result.output


@pytest.mark.long
def test_best_values_of_other_validation_data_are_not_compared(tmp_path):
    """The best checkpoint on the data before is kept, and noted."""
    run_dir, easy, hard = tmp_path / "run", tmp_path / "easy.jsonl", tmp_path / "hard.jsonl"
    write_lines(easy, [{"text": "a" * 50}])
    write_lines(hard, [{"text": "".join(map(chr, range(33, 83)))}])
    arguments = [*SMALL[:3], f"run.dir={run_dir}", f"data.cache={tmp_path / 'cache'}"]
    arguments += ["data.kind=text", f"data.train=[{easy}]", "batch.global_batch_size=1"]
    arguments += ["batch.micro_batch_size=1", "evaluation.every_steps=1", "evaluation.stop_after=2"]
    arguments += ["checkpoint.every_steps=1", "checkpoint.keep_last=1", "schedule.warmup_steps=0"]
    arguments += ["checkpoint.keep_best=eval_loss", "checkpoint.export=null", "model.compile=false"]
    run_python(*arguments, f"data.validation=[{easy}]", "run.max_steps=2").check()

    def state():
        folder = max((run_dir / "checkpoints").iterdir())
        return json.loads((folder / "state.json").read_text())

    first = state()["best"]
    shown = run_python(*arguments, f"data.validation=[{hard}]", "run.max_steps=4").check().output
    assert f"changed since: data.validation, set 'validation': {easy}: " in shown
    assert f"the best value starts anew; that on the other data is of step {first['step']}" in shown
    kept = {folder.name for folder in (run_dir / "checkpoints").iterdir()}
    assert f"step_{first['step']:08}" in kept
    assert "step_00000004" in kept, "two evaluations without a better value did not end it"
    last = state()
    assert last["earlier_best"] == [first["step"]]
    assert last["best"]["step"] > 2
    assert last["best"]["eval_loss"] > first["eval_loss"]
    again = run_python(*arguments, f"data.validation=[{hard}]", "run.max_steps=5").check().output
    assert "starts anew" not in again
    assert f"step_{first['step']:08}" in {f.name for f in (run_dir / "checkpoints").iterdir()}


@pytest.mark.long
def test_export_and_chat_need_no_data(tmp_path, capsys, monkeypatch):
    """The template of a run is recorded when its rows are tokenized, and the data moves."""
    rows = [{"instruction": f"Say {n}", "output": f"{n}"} for n in range(8)]
    file, run_dir = tmp_path / "a.jsonl", tmp_path / "run"
    write_lines(file, rows)
    arguments = [*SMALL, f"data.train={file}", "data.kind=instruct", "data.prompt_format=text"]
    arguments += ["run.max_steps=1", f"run.dir={run_dir}", f"data.cache={tmp_path / 'cache'}"]
    arguments += [
        "data.tokenizer=bytes",
        "model.config.vocab_size=260",
        "model.config.eos_token_id=256",
    ]
    run_python(*arguments, "batch.global_batch_size=2", "batch.micro_batch_size=2").check()
    file.unlink()
    out = tmp_path / "out"
    assert main.main(["export", str(run_dir), f"out={out}", "--verify"]) == 0
    template = (out / "chat_template.jinja").read_text()
    assert "### Instruction" in template
    (state,) = run_dir.glob("checkpoints/*/state.json")
    assert json.loads(state.read_text())["prompts"]["template"] == template
    capsys.readouterr()
    monkeypatch.setattr(sys, "stdin", io.StringIO("Say 3\n"))
    assert main.main(["chat", str(run_dir), "max_new_tokens=2"]) == 0
    assert "### Instruction:\\nLINE\\n\\n### Response:\\n" in capsys.readouterr().err


@pytest.mark.long
@pytest.mark.skipif(
    shutil.which("g++") is None and "CI" not in os.environ,
    reason="torch.compile needs g++ on a CPU (Debian: apt-get install g++)",
)
def test_second_start_reuses_compiled_blocks(tmp_path):
    """Both ranks compile at once. The second start compiles nothing and gives equal losses."""
    (tmp_path / "short.jsonl").write_text('{"text": "packed with others"}\n' * 500)
    losses, kept, variables = [], [], {"XDG_CACHE_HOME": tmp_path}
    for start in ("cold", "warm"):
        words = [*SMALL, "model.compile=true", "model.config.num_hidden_layers=1"]
        words += [
            f"data.train=[{tmp_path}/short.jsonl]",
            "run.max_steps=2",
            f"run.dir={tmp_path / start}",
            "checkpoint.every_steps=null",
        ]
        printed = torchrun(TRAIN, *words, ranks=2, timeout=400, **variables).check().output
        assert printed.count("compile: the graph of a block is split") == 1, (
            "only rank 0 must log this, once"
        )
        assert start == "cold" or "of them from the cache" in printed
        losses.append([line["loss"] for line in training_metrics(tmp_path / start)])
        folder = tmp_path / "launcher/inductor"
        kept.append(
            {file for kind in ("fxgraph", "aotautograd") for file in (folder / kind).rglob("*")}
        )
    assert kept[0]
    assert kept[0] == kept[1]
    assert losses[0] == losses[1]


BUILDER = """
import torch
from launcher.data.custom import CustomData

class Rows:
    def __len__(self): return 64
    def __getitem__(self, index): return torch.full((4,), float(index % 7))

def loss(model, batch): return model(batch["x"]).square().sum()
def targets(batch): return batch["x"].shape[0]
def collate(rows): return {"x": torch.stack(rows)}
def model(): return torch.nn.Linear(4, 2)

def data(password):
    assert password.startswith("secret")
    return CustomData(train=Rows(), collate=collate, loss=loss, targets=targets)
"""


@pytest.mark.long
def test_a_secret_from_the_environment_is_in_no_file_of_the_run(tmp_path):
    (tmp_path / "built.py").write_text(BUILDER)
    (tmp_path / "built.yaml").write_text(
        "run: {name: built, dir: run, max_steps: 2}\nmodel: {builder: 'built:model'}\n"
        "data: {builder: 'built:data', arguments: {password: '${oc.env:PASSWORD}'}, workers: 0}\n"
        "batch: {global_batch_size: 4, micro_batch_size: 4}\n"
        "strategy: {kind: ddp, mixed_precision: null}\n"
        "checkpoint: {every_steps: 2, export: null}\n"
        "logging: {tensorboard: true, wandb: {project: p, mode: offline}}\n"
    )
    words = (TRAIN, f"recipe={tmp_path}/built.yaml")
    first = forked(*words, cwd=tmp_path, PASSWORD="secret-word").check()
    requests = [sys.executable, "-m", "launcher.cli.main", "report", "run"]
    run(requests, cwd=tmp_path, PASSWORD="secret-word").check()
    files = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert {"status.json", "report.html", "state.json"} <= {file.name for file in files}
    assert [file for file in files if b"secret-word" in file.read_bytes()] == []
    assert "secret-word" not in first.output
    more = (*words, "run.max_steps=4")
    changed = forked(*more, cwd=tmp_path, PASSWORD="secret-other").check(2)
    assert "data.arguments.password: " in changed.output
    assert "secret" not in changed.output
    forked(*more, cwd=tmp_path, PASSWORD="secret-word").check()
