"""Resuming runs in real processes.

After kills and stops, with other numbers of ranks and strategies, with full disks, damaged
checkpoints and divergence.
"""

import json
import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from launcher.cli.main import main
from launcher.recipe.load import recorded_recipe
from tests import REPOSITORY
from tests.distributed.launching import forked, run, torchrun, wait_until
from tests.full_disk import full_disk
from tests.run_files import read_lines, status, write_lines, write_texts

KILL_TRAIN = REPOSITORY / "tests/distributed/kill_train.py"
RECIPE = """
run: {name: resume, max_steps: 12, seed: 3}
model: {config: {model_type: llama, vocab_size: 260, hidden_size: 32, intermediate_size: 48, num_hidden_layers: 2, num_attention_heads: 4,
  num_key_value_heads: 2, max_position_embeddings: 64, attention_dropout: DROPOUT}}
data: {train: [FOLDER/text.jsonl], tokenizer: bytes, sequence_length: 32, workers: 1, cache: FOLDER/cache}
batch: {global_batch_size: 8, micro_batch_size: 2}
strategy: {kind: fsdp, mixed_precision: null}
optimizer: {learning_rate: 2.0e-3}
schedule: {kind: constant, warmup_steps: 2}
checkpoint: {every_steps: 4, keep_last: 20}
"""
WHOLE_BATCH = ["strategy.kind=ddp", "batch.micro_batch_size=8"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("resume")
    write_texts(folder / "text.jsonl", seed=1)
    for name, dropout in (("recipe", 0.0), ("dropout", 0.1)):
        (folder / f"{name}.yaml").write_text(
            RECIPE.replace("FOLDER", str(folder)).replace("DROPOUT", str(dropout))
        )
    return folder


def records(run_dir):
    return read_lines(run_dir / "metrics.jsonl")


def events(run_dir, name):
    return [
        line
        for line in map(json.loads, (run_dir / "events.jsonl").read_text().splitlines())
        if line["event"] == name
    ]


def samples(folder, rank):
    """Returns the digest of each step's samples, from the last time that the step was trained."""
    return {
        line["step"]: line["ids"]
        for line in map(json.loads, (folder / f"rank_{rank}.jsonl").read_text().splitlines())
    }


def final_state(run_dir):
    newest = sorted((run_dir / "checkpoints").glob("step_*"))[-1]
    return {
        f"{file.name}/{name}": tensor
        for file in newest.glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }


def assert_same_bits(run_dir, whole, *, steps):
    """Losses, norms and tokens of each step, and all tensors of the last checkpoint."""
    mine, other = records(run_dir), records(whole)
    assert [line["step"] for line in mine if "loss" in line] == list(range(1, steps + 1)), (
        "each step must be recorded once"
    )
    for a, b in zip(mine, other, strict=True):
        assert [a.get(key) for key in ("step", "loss", "grad_norm", "tokens")] == [
            b.get(key) for key in ("step", "loss", "grad_norm", "tokens")
        ]
    state, expected = final_state(run_dir), final_state(whole)
    assert state.keys() == expected.keys()
    assert len(state) > 60
    for key, tensor in state.items():
        assert torch.equal(
            tensor.reshape(-1).view(torch.uint8), expected[key].reshape(-1).view(torch.uint8)
        ), key


def train(folder, run_dir, *overrides, ranks=2, recipe="recipe", **more):
    """Trains; with torchrun if a test signals the processes or gives its options."""
    words = [KILL_TRAIN, f"recipe={folder}/{recipe}.yaml", f"run.dir={run_dir}", *overrides]
    if {"during", "options"}.isdisjoint(more):
        return forked(*words, ranks=ranks, **more)
    return torchrun(*more.pop("options", ()), *words, ranks=ranks, **more)


# Kills


def workers(agent):
    """Returns the process ids of the ranks that torchrun has started."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rsplit(")", 1)[1].split()
            if int(fields[1]) == agent and "kill_train.py" in (folder / "cmdline").read_text():
                found.append(int(folder.name))
        except (OSError, IndexError):
            continue
    return found


def killer(run_dir, times, seed):
    """Kills a random rank at random times, every third time while a checkpoint is being written."""
    generator, killed = random.Random(seed), []

    def wait_for_event(event, count, process):
        wait_until(lambda: len(events(run_dir, event)) >= count, seconds=40, process=process)

    def during(process):
        for number in range(times):
            log = run_dir / "events.jsonl"

            def trains():
                """This start has trained a step. Otherwise most kills would come during imports."""
                if not log.exists() or len(starts := events(run_dir, "started")) <= number:  # noqa: B023
                    return False
                try:
                    return any(line["time"] > starts[-1]["time"] for line in records(run_dir))
                except (
                    ValueError,
                    OSError,
                ):  # the last line was truncated by a kill and is not removed yet
                    return False

            if not wait_until(trains, process=process):
                return
            if number % 3 == 2:
                writing = wait_until(
                    lambda: list((run_dir / "checkpoints").glob("*.writing-*")),
                    seconds=20,
                    process=process,
                )
                time.sleep(generator.random() * 0.4)
                where = "in a save" if writing else "no save came"
            else:
                if number % 3 == 1:  # ensures that some starts write a checkpoint
                    saved = len(events(run_dir, "saved"))
                    wait_for_event("saved", saved + 1, process)
                time.sleep(generator.random() * 1.5)
                where = "anywhere"
            ranks = workers(process.pid)
            if process.poll() is not None or not ranks:
                return
            os.kill(generator.choice(ranks), signal.SIGKILL)
            killed.append(where)
            # The agent ends the other ranks and restarts all; wait for this before the next kill
            wait_for_event("started", number + 2, process)

    during.killed = killed  # type: ignore[attr-defined]
    return during


@pytest.fixture(scope="module")
def undisturbed(folder):
    train(folder, folder / "undisturbed", "run.max_steps=40", recipe="dropout").check()
    return folder / "undisturbed"


@pytest.fixture(scope="module")
def one_rank(folder):
    """An undisturbed run on one rank, with one micro-batch per step, and its samples by step."""
    seen = folder / "alone-samples"
    seen.mkdir()
    train(folder, folder / "alone", *WHOLE_BATCH, ranks=1, SAMPLES=str(seen)).check()
    return folder / "alone", samples(seen, 0)


@pytest.mark.parametrize(
    ("times", "asynchronous"),
    [
        pytest.param(12, "true", marks=pytest.mark.long),
        pytest.param(9, "false", marks=pytest.mark.long),
    ],
)
def test_randomly_killed_run_is_bit_identical(folder, times, asynchronous):
    """Dropout, order of samples, optimizer state and metrics equal those of an undisturbed run.

    The killed run offloads its optimizer state to files, which are lost with each kill.
    """
    steps, whole = 10 * times, folder / f"whole-{times}"
    whole_samples = folder / f"whole-{times}-samples"
    whole_samples.mkdir()
    words = [f"run.max_steps={steps}"]
    train(folder, whole, *words, recipe="dropout", SAMPLES=str(whole_samples)).check()
    name = f"killed-{times}-{asynchronous}"
    run_dir, seen = folder / name, folder / f"{name}-samples"
    seen.mkdir()
    during = killer(run_dir, times, seed=times)
    result = train(
        folder,
        run_dir,
        *words,
        f"checkpoint.asynchronous={asynchronous}",
        f"strategy.cpu_offload={{what: optimizer, optimizer_path: {folder}/state}}",
        recipe="dropout",
        options=["--max-restarts", str(times + 1)],
        during=during,
        timeout=60 + 30 * times,
        SAMPLES=str(seen),
        SLOW_SAVE="0.2",
        SLOW_STEP="0.08",
    )
    result.check()
    print(during.killed, [event.get("step") for event in events(run_dir, "resumed")])
    assert len(during.killed) >= 3, during.killed
    assert "in a save" in during.killed
    assert len(events(run_dir, "started")) == len(during.killed) + 1
    assert events(run_dir, "resumed")
    assert status(run_dir)["state"] == "finished"
    assert list((folder / "state").iterdir()) == []
    for rank in range(2):
        assert samples(seen, rank) == samples(whole_samples, rank)
    assert_same_bits(run_dir, whole, steps=steps)


@pytest.mark.parametrize(
    ("strategy", "step", "target"),
    [
        ("fsdp", 7, "agent"),
        pytest.param("ddp", 7, "rank", marks=pytest.mark.long),
        pytest.param("fsdp", 5, "rank", marks=pytest.mark.long),  # step 4 is saved anyway
        pytest.param("fsdp", 1, "agent", marks=pytest.mark.long),
    ],
)
def test_a_stop_does_not_wait_for_the_step(folder, strategy, step, target):
    """A step of eight micro-batches of three seconds ends between two of them. The state of the step
    before is saved, and the resumed run has the bits of an undisturbed one."""
    options = [f"strategy.kind={strategy}", "batch.micro_batch_size=1", "run.max_steps=9"]
    options += ["batch.global_batch_size=16", "optimizer.learning_rate=2e-3"]
    whole, run_dir = folder / f"whole-{strategy}-16", folder / f"stopped-{strategy}-{step}"
    if not whole.exists():
        train(folder, whole, *options, recipe="dropout").check()
    reached = folder / f"reached-{strategy}-{step}"

    def during(process):
        assert wait_until(reached.exists, process=process)
        if target == "rank":
            os.kill(workers(process.pid)[1], signal.SIGTERM)
        else:
            process.send_signal(signal.SIGTERM)

    slow = f"{8 * (step - 1) + 2},3,{reached}"
    result = train(
        folder, run_dir, *options, recipe="dropout", during=during, SLOW_FORWARD=slow, timeout=200
    )
    if target == "rank":
        result.check(0)
    if step > 1:
        assert f"step {step} is not finished; the resumed run repeats it" in result.output
        saved = [event["step"] for event in events(run_dir, "saved")]
        assert saved == ([4] if step == 5 else [4, step - 1])
    else:
        assert "stopped by SIGTERM before the first step: there is nothing" in result.output
    assert (status(run_dir)["state"], status(run_dir)["step"]) == ("stopped", step - 1)
    train(folder, run_dir, *options, recipe="dropout").check()
    assert_same_bits(run_dir, whole, steps=9)


QWEN3_MOE = """model.config={model_type: qwen3_moe, vocab_size: 260, hidden_size: 32, intermediate_size: 48,
  num_hidden_layers: 2, num_attention_heads: 4, num_key_value_heads: 2, head_dim: 8, num_experts: 8,
  num_experts_per_tok: 2, moe_intermediate_size: 16, attention_dropout: 0.1}"""


@pytest.mark.long
@pytest.mark.parametrize(
    "layout",
    [
        ["strategy.tensor_parallel_size=2", "strategy.context_parallel_size=2"],
        ["strategy.expert_parallel_size=2", "strategy.context_parallel_size=2", QWEN3_MOE],
        ["strategy.tensor_parallel_size=4"],
    ],
    ids=["tensor, context", "experts, context", "tensor"],
)
def test_killed_and_stopped_run_on_divided_ranks_is_bit_identical(folder, layout):
    """Three ranks are killed, one of them in a save, and one gets SIGTERM; then the run is started
    again. The sizes stay the same."""
    name, steps = "".join(filter(str.isalnum, "".join(layout[:2]))), 30
    words = [*layout, f"run.max_steps={steps}", "checkpoint.every_steps=5"]
    whole, run_dir = folder / f"{name}-whole", folder / f"{name}-killed"
    train(folder, whole, *words, recipe="dropout", ranks=4).check()
    kill = killer(run_dir, 3, seed=1)

    def kill_and_stop(process):
        kill(process)
        trained = len(records(run_dir))
        wait_until(lambda: len(records(run_dir)) > trained, process=process)
        os.kill(workers(process.pid)[2], signal.SIGTERM)

    options = {"recipe": "dropout", "ranks": 4, "SLOW_STEP": "0.1", "SLOW_SAVE": "0.1"}
    restarts = ["--max-restarts", "4"]
    train(folder, run_dir, *words, options=restarts, during=kill_and_stop, **options).check()
    assert len(kill.killed) == 3
    assert "in a save" in kill.killed
    assert status(run_dir)["state"] == "stopped"
    assert status(run_dir)["step"] < steps
    train(folder, run_dir, *words, recipe="dropout", ranks=4).check()
    assert len(events(run_dir, "started")) == 5
    assert_same_bits(run_dir, whole, steps=steps)


def test_balance_of_experts_is_resumed_bit_for_bit(folder):
    """The shares of the experts are in the checkpoint: those of the last step are in the loss of the
    next one."""
    routed = "output_router_logits: true, router_aux_loss_coef: 1.0, attention_dropout"
    words = [QWEN3_MOE.replace("attention_dropout", routed), "strategy.expert_parallel_size=2"]
    whole, run_dir = folder / "balance-whole", folder / "balance-stopped"
    train(folder, whole, *words, "run.max_steps=8", recipe="dropout").check()
    train(folder, run_dir, *words, "run.max_steps=4", recipe="dropout").check()
    train(folder, run_dir, *words, "run.max_steps=8", recipe="dropout").check()
    assert_same_bits(run_dir, whole, steps=8)
    for number in (4, 8):
        of_runs = (each / f"checkpoints/step_{number:08}/state.json" for each in (whole, run_dir))
        first, second = (json.loads(file.read_text())["router_shares"] for file in of_runs)
        assert first == second
        assert sum(first) == pytest.approx(2)


# Resuming with other numbers of ranks and strategies


@pytest.mark.long
def test_run_resumes_with_other_ranks_and_strategies(folder, one_rank):
    """4 -> 2 -> 1 -> 3 ranks with context and tensor parallelism, fsdp, offloading and ddp. All losses equal those of
    one rank."""
    elastic = folder / "elastic"
    offload = ["strategy.cpu_offload={pin_memory: false}", "activation_checkpointing={mode: full}"]
    in_files = f"strategy.cpu_offload={{what: optimizer, optimizer_path: {folder}/state}}"
    for ranks, steps, changes in (
        (4, 3, ["strategy.context_parallel_size=2", "strategy.tensor_parallel_size=2"]),
        (2, 6, [in_files, "strategy.tensor_parallel_size=2"]),
        (1, 9, offload),
        (3, 12, ["strategy.kind=ddp", "batch.micro_batch_size=1"]),
    ):
        output = (
            train(folder, elastic, f"run.max_steps={steps}", *changes, ranks=ranks).check().output
        )
        assert ("resumed from" in output) == (ranks != 4)
    mine, other = records(elastic), records(one_rank[0])
    assert [line["step"] for line in mine] == list(range(1, 13))
    for a, b in zip(mine, other, strict=True):
        assert (a["tokens"], a["loss_tokens"], a["samples_seen"]) == (
            b["tokens"],
            b["loss_tokens"],
            b["samples_seen"],
        )
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-5)


WALK = (0, 1, 0, 2, 0, 3, 1, 2, 1, 3, 2, 3, 0)
"""Has each ordered pair of four layouts once."""
TP, CP, EP = (f"strategy.{name}_parallel_size=" for name in ("tensor", "context", "expert"))


@pytest.mark.long
@pytest.mark.parametrize(
    ("model", "divided"),
    [
        ([], ([CP + "4"], [TP + "2"], [TP + "4"])),
        ([QWEN3_MOE.replace("0.1", "0.0")], ([EP + "2"], [EP + "4"], [EP + "2", CP + "2"])),
    ],
    ids=["layers", "experts"],
)
def test_run_resumes_from_each_layout_in_each_other(folder, model, divided):
    """One step in each layout. The samples and losses are those of one rank."""
    name = f"walk-{len(model)}"
    alone, walk = folder / f"{name}-alone", folder / name
    steps = f"run.max_steps={len(WALK)}"
    train(folder, alone, steps, *WHOLE_BATCH, *model, ranks=1).check()
    layouts = [(1, WHOLE_BATCH), *((4, ["batch.micro_batch_size=1", *own]) for own in divided)]
    for step, (ranks, own) in enumerate((layouts[number] for number in WALK), start=1):
        train(folder, walk, f"run.max_steps={step}", *own, *model, ranks=ranks).check()
    for a, b in zip(records(walk), records(alone), strict=True):
        for key in ("step", "tokens", "loss_tokens", "samples_seen"):
            assert a[key] == b[key]
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-5)


# Starting from a checkpoint of another run


@pytest.mark.long
def test_run_from_path_resumes_its_own_newest_checkpoint(folder, undisturbed):
    """This must hold after a killed rank and after a requeue by Slurm.

    A path is refused if the run in the folder was not started from it.
    """
    run_dir, source = folder / "branch", folder / "older/step_00000008"
    shutil.copytree(undisturbed / "checkpoints/step_00000008", source)
    words = [
        KILL_TRAIN,
        f"recipe={folder}/dropout.yaml",
        f"run.dir={run_dir}",
        f"checkpoint.resume={source}",
        "checkpoint.every_steps=2",
    ]
    saved, go_on = run_dir / "checkpoints/step_00000012/commit.json", folder / "go_on"

    def kill(process):
        os.kill(workers(process.pid)[-1], signal.SIGKILL)
        go_on.touch()  # the second start is not held

    options = {"during": call_when(saved.exists, kill), "HOLD": f"13,{go_on}"}
    torchrun("--max-restarts", "1", *words, "run.max_steps=14", ranks=1, **options).check()
    first, second = [event["step"] for event in events(run_dir, "resumed")]
    assert first == 8
    assert second == 12, "resumed from the path instead of its own checkpoint"
    assert [line["step"] for line in records(run_dir)] == list(range(9, 15))

    run(
        [sys.executable, *words, "run.max_steps=15"], SLURM_JOB_ID="7", SLURM_RESTART_COUNT="1"
    ).check()
    assert [event["step"] for event in events(run_dir, "resumed")][2:] == [14], (
        "the requeued run must resume from its last checkpoint"
    )
    assert [line["step"] for line in records(run_dir)] == list(range(9, 16))

    def files():
        found = [
            run_dir / "metrics.jsonl",
            run_dir / "recipe.yaml",
            *run_dir.glob("checkpoints/*/*"),
        ]
        return {path: path.stat().st_mtime_ns for path in found}

    before = files()
    other = f"checkpoint.resume={undisturbed}/checkpoints/step_00000004"
    refused = train(folder, run_dir, other, ranks=1, recipe="dropout").check(2)
    assert (
        f"holds a run already (finished, step 15), and it was not started from {other}"
        in refused.output
    )
    assert files() == before, "files were deleted or written"


# Damaged checkpoints and full disks


def test_damaged_checkpoint_is_reported_and_older_one_used(folder, one_rank):
    run_dir = shutil.copytree(one_rank[0], folder / "damaged")
    before = records(run_dir)
    (run_dir / "status.json").write_text('{"state": "running", "step": 12}')
    file = run_dir / "checkpoints/step_00000012/rank_00000.safetensors"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    output = train(folder, run_dir, *WHOLE_BATCH, ranks=1).check().output
    assert (
        "step_00000012 is damaged: rank_00000.safetensors has changed since it was written"
        in output
    )
    assert "resumed from" in output
    assert "step_00000008, step 8" in output
    assert [(line["step"], line["loss"]) for line in records(run_dir)] == [
        (line["step"], line["loss"]) for line in before
    ]
    for marker in run_dir.glob("checkpoints/*/commit.json"):
        marker.unlink()
    stopped = train(folder, run_dir, *WHOLE_BATCH, ranks=1).check(1)
    assert "none of the 3 checkpoints" in stopped.output
    assert status(run_dir)["reason"] == "no_valid_checkpoint"
    assert len(records(run_dir)) == 12, "metrics were lost"


@pytest.mark.long
def test_run_survives_full_disk_but_not_repeated_failures(folder):
    run_dir = folder / "full"
    words = ["run.max_steps=24", "checkpoint.max_failures=2"]
    output = train(folder, run_dir, *words, options=(), FULL_DISK="4,16,20").output
    assert "warning: checkpoint of step 4 failed" in output
    assert "No space left on device" in output
    assert [event["step"] for event in events(run_dir, "saved")] == [8, 12]
    assert status(run_dir)["state"] == "failed"
    assert status(run_dir)["reason"] == "checkpoint_failed"
    assert "2 checkpoints in a row could not be written (checkpoint.max_failures=2)" in output
    complete = sorted((run_dir / "checkpoints").glob("*/commit.json"))
    assert [path.parent.name for path in complete] == ["step_00000008", "step_00000012"]


@pytest.mark.long
def test_run_on_a_full_file_system(folder):
    """The disk is full in steps 6 to 13, and from step 22 on. The run continues, writes what was
    kept, and ends with its reason after three failed saves; with space, it resumes."""
    with full_disk(folder / "disk", mebibytes=12) as disk:
        run_dir = disk / "run"
        words = [
            *("run.max_steps=40", "checkpoint.max_failures=3", "checkpoint.keep_last=2"),
            *("logging.tensorboard=true", "checkpoint.export=at_end"),
        ]
        output = train(folder, run_dir, *words, FILL=f"{disk}:5,13,21").check(1).output
        assert "checkpoint of step 8 failed: rank 0: [Errno 28] No space left" in output
        assert f"{run_dir}/metrics.jsonl cannot be written: No space left on device" in output
        assert f"{run_dir}/metrics.jsonl can be written again" in output
        assert "tensorboard is disabled from now on, training continues" in output
        assert [event["step"] for event in events(run_dir, "saved")] == [4, 16, 20]
        steps = [line["step"] for line in records(run_dir)]
        assert steps == list(range(1, len(steps) + 1))
        assert len(steps) >= 20
        found = status(run_dir)
        assert (found["state"], found["reason"]) == ("failed", "checkpoint_failed")
        assert "3 checkpoints in a row could not be written" in found["error"]
        left = {path.name for path in (run_dir / "checkpoints").iterdir()}
        assert left == {"step_00000016", "step_00000020"}, "a failed save left files"
        (disk / "filler").unlink()
        # The disk is full again before the export
        output = train(folder, run_dir, *words, FILL=f"{disk}:40").check(1).output
        found = status(run_dir)
        assert (found["state"], found["reason"]) == ("failed", "export_failed")
        assert "the trained weights could not be exported" in found["error"]
        assert not list(run_dir.glob("hf*"))
        (disk / "filler").unlink()
        assert [line["step"] for line in records(run_dir)][-1] in (39, 40)
        before = os.umask(0o027)
        try:
            train(folder, run_dir, *words, options=()).check()  # torchrun, which inherits it
        finally:
            os.umask(before)
        assert status(run_dir)["state"] == "finished"
        assert [line["step"] for line in records(run_dir)] == list(range(1, 41))
        assert {file.stat().st_mode & 0o777 for file in (run_dir / "hf").iterdir()} == {0o640}


# Requests to save and to stop


def call_when(condition, action):
    def during(process):
        if wait_until(condition, process=process):
            action(process)

    return during


def test_run_stopped_by_signal_resumes_exactly(folder, undisturbed):
    run_dir = folder / "signalled"
    trained = lambda: (run_dir / "metrics.jsonl").exists() and len(records(run_dir)) >= 2  # noqa: E731

    def save_then_stop(process):
        (run_dir / "save").touch()
        wait_until(lambda: events(run_dir, "saved"), seconds=30, process=process)
        os.killpg(workers(process.pid)[-1], signal.SIGTERM)  # loader processes too

    words = ["run.max_steps=40", "checkpoint.every_steps=39"]
    during = call_when(trained, save_then_stop)
    train(folder, run_dir, *words, recipe="dropout", during=during, SLOW_STEP="0.1").check()
    recipe = run_dir / "recipe.yaml"
    strategy = recorded_recipe(recipe.read_text(), file=recipe).strategy
    assert (strategy.sync_every_micro_batch, strategy.reshard_after_forward) == (False, False)
    assert status(run_dir)["state"] == "stopped"
    assert not (run_dir / "save").exists()
    first, last = [event["step"] for event in events(run_dir, "saved")]
    assert 2 <= first < last == status(run_dir)["step"] < 39
    assert (run_dir / f"checkpoints/step_{last:08}/commit.json").exists()
    resumed = train(folder, run_dir, *words, recipe="dropout").check()
    choice = "strategy.reshard_after_forward=false strategy.sync_every_micro_batch=false"
    assert f"auto: {choice}: as in the checkpoint, so that the resume is exact" in resumed.output
    assert "changed since: strategy" not in resumed.output
    assert [(a["step"], a["loss"]) for a in records(run_dir)] == [
        (b["step"], b["loss"]) for b in records(undisturbed)
    ]


# Changed recipes and data, divergence, exports


def test_changed_recipe_or_data_is_refused_with_diff(folder, undisturbed):
    before = (undisturbed / "metrics.jsonl").read_bytes()
    result = train(
        folder, undisturbed, "run.max_steps=50", "run.seed=4", ranks=1, recipe="dropout"
    ).check(2)
    assert "run.seed: 3 -> 4" in result.output
    assert "run.max_steps" not in result.output
    assert "Traceback" not in result.output
    assert (undisturbed / "metrics.jsonl").read_bytes() == before
    text = (folder / "text.jsonl").read_text()
    (folder / "text.jsonl").write_text(text + '{"text": "abc"}\n')
    grown = train(folder, undisturbed, "run.max_steps=50", ranks=1, recipe="dropout").check(2)
    (folder / "text.jsonl").write_text(text)
    assert f"  {folder}/text.jsonl: {len(text)} -> {len(text) + 16}\n" in grown.output
    assert "  documents: 200 -> 201\n" in grown.output
    assert "Traceback" not in grown.output
    assert (undisturbed / "metrics.jsonl").read_bytes() == before


def test_diverged_run_rewinds_and_skips_batches(folder, one_rank, capsys):
    run_dir, seen = folder / "rewound", folder / "rewound-samples"
    seen.mkdir()
    rewind = ["run.on_divergence=rewind", "run.max_skipped_steps=1", *WHOLE_BATCH]
    phases = folder / "rewound-phases"
    output = (
        train(folder, run_dir, *rewind, ranks=1, SAMPLES=str(seen), NAN="6", PHASES=str(phases))
        .check()
        .output
    )
    assert "back to the checkpoint of step 4; the samples of steps 5 to 6 are skipped" in output
    assert [line["step"] for line in records(run_dir)] == list(range(1, 13))
    assert all(line["loss"] is not None for line in records(run_dir))
    (plain, expected), trained = one_rank, samples(seen, 0)
    assert [trained[step] for step in (3, 4)] == [expected[step] for step in (3, 4)]
    assert [trained[step] for step in (5, 6, 10)] == [expected[step] for step in (7, 8, 12)]
    for step, without in ((4, 4), (5, 7), (10, 12)):
        listed = []
        for path, number in ((run_dir, step), (plain, without)):
            assert main(["rows", str(path), f"step={number}"]) == 0
            listed.append(capsys.readouterr().out.splitlines()[1:])
        assert listed[0] == listed[1]
    # Hang detection is suspended during the load and until the next step is done, for example while
    # samples of a stream are skipped
    noted = phases.read_text().splitlines()
    at = noted.index("load rewind")
    assert noted[:2] == ["load start", "forward start"]
    assert noted[at - 1 : at + 3] == [
        "forward None",
        "load rewind",
        "forward rewind",
        "forward None",
    ]


@pytest.mark.long
def test_stream_resumes_exactly_and_rewinds(folder, capsys):
    """Two ranks with loader processes train first; then one rank resumes and also rewinds.

    The samples equal those of an undisturbed run on one rank.
    """
    file, run_dir, plain, seen = (
        folder / name for name in ("stream.jsonl", "stream", "stream-plain", "stream-seen")
    )
    write_lines(file, [{"text": f"{number} " * 20} for number in range(4000)])
    plain.mkdir()
    seen.mkdir()
    stream = ["data.streaming=true", "data.shard_size=1KB", f"data.train=[{file}]"]
    train(
        folder,
        folder / "stream-whole",
        *stream,
        "batch.micro_batch_size=8",
        ranks=1,
        SAMPLES=str(plain),
    ).check()
    train(folder, run_dir, *stream, "data.workers=2", "run.max_steps=6").check()
    state = json.loads((run_dir / "checkpoints/step_00000006/state.json").read_text())["stream"]
    whole = json.loads((folder / "stream-whole/checkpoints/step_00000008/state.json").read_text())[
        "stream"
    ]
    assert (state["samples"], state["order"]) == (48, whole["order"])
    assert state["shard"] >= 1, "the checkpoint must be in a later shard"
    shutil.rmtree(folder / "cache/streams", ignore_errors=True)
    rewind = ["run.on_divergence=rewind", "run.max_skipped_steps=1", "batch.micro_batch_size=8"]
    rewind += ["run.max_steps=12"]  # a finished run continues only with more steps
    output = (
        train(folder, run_dir, *stream, *rewind, ranks=1, SAMPLES=str(seen), NAN="4").check().output
    )
    assert "back to the checkpoint of step 8; the samples of steps 9 to 10 are skipped" in output
    trained, expected = samples(seen, 0), samples(plain, 0)
    assert [trained[step] for step in (7, 8)] == [expected[step] for step in (7, 8)]
    assert [trained[step] for step in (9, 10)] == [expected[step] for step in (11, 12)]
    for step, without in ((7, 7), (9, 11)):
        listed = []
        for path, number in ((run_dir, step), (folder / "stream-whole", without)):
            assert main(["rows", str(path), f"step={number}"]) == 0
            listed.append(
                [line for line in capsys.readouterr().out.splitlines() if "jsonl" in line]
            )
        assert listed[0] == listed[1] != []


def test_checkpoint_export_has_the_trained_weights(undisturbed, tmp_path, capsys):
    from transformers import LlamaForCausalLM

    assert main(["export", str(undisturbed), f"out={tmp_path}/out"]) == 0
    assert "step_00000040" in capsys.readouterr().out
    weights = LlamaForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).state_dict()
    state = final_state(undisturbed)
    parts = [[f"rank_{rank:05}.safetensors/model.{name}" for rank in range(2)] for name in weights]
    for name, files in zip(weights, parts, strict=True):
        assert torch.equal(
            weights[name], torch.cat([state[file] for file in files if file in state])
        ), name
    assert len(weights) > 20
    assert (tmp_path / "out/tokenizer.json").exists()
