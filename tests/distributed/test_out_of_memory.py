"""Handling of out-of-memory errors, with and without `auto`, in real processes.

A rank raises the error that a full device causes.
"""

import re
import sys

import pytest
import yaml

from launcher.recipe.load import load_recipe
from tests import REPOSITORY
from tests.distributed.launching import run, torchrun
from tests.run_files import read_lines, status, write_texts

FAULTY = REPOSITORY / "tests/distributed/faulty_train.py"
RECIPE = """
run: {name: memory, max_steps: 6, seed: 3}
model: {config: {model_type: llama, vocab_size: 260, hidden_size: 32, intermediate_size: 48, num_hidden_layers: 2, num_attention_heads: 4,
  num_key_value_heads: 2, max_position_embeddings: 64}}
data: {train: [FOLDER/text.jsonl], tokenizer: bytes, sequence_length: 32, workers: 1, cache: FOLDER/cache}
batch: {global_batch_size: 16, micro_batch_size: auto}
strategy: {kind: auto, mixed_precision: null}
optimizer: {learning_rate: 2.0e-3}
schedule: {kind: constant, warmup_steps: 2}
checkpoint: {every_steps: 2, keep_last: 20, asynchronous: false}
"""
FIXED = ["strategy.kind=ddp", "batch.micro_batch_size=8"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("memory")
    write_texts(folder / "text.jsonl", seed=1)
    (folder / "recipe.yaml").write_text(RECIPE.replace("FOLDER", str(folder)))
    return folder


def read(run_dir, name):
    lines = read_lines(run_dir / f"{name}.jsonl")
    return lines if name == "events" else [line for line in lines if "loss" in line]


def losses(run_dir):
    return [line["loss"] for line in read(run_dir, "metrics")]


@pytest.fixture(scope="module")
def fixed(folder):
    """A run of two ranks without `auto`; rank 1 runs out of memory in step 9."""
    run_dir = folder / "fixed"
    words = [
        f"recipe={folder}/recipe.yaml",
        f"run.dir={run_dir}",
        *FIXED,
        "run.max_steps=10000",
        "checkpoint.every_steps=null",
    ]
    # The ranks must not wait for the default time limit of collectives, 10 minutes
    result = torchrun(FAULTY, *words, ranks=2, FAULT="memory:1:9:4", timeout=120)
    assert result.status == 1
    return run_dir


@pytest.fixture(scope="module")
def undisturbed(fixed):
    """The losses of eight steps of the same recipe."""
    return losses(fixed)


@pytest.fixture(scope="module")
def restarted(folder):
    """A run of two ranks with `auto`, which restarts once.

    Rank 1 runs out of memory in step 3 if a micro-batch has more than four rows.
    """
    words = [FAULTY, f"recipe={folder}/recipe.yaml", f"run.dir={folder}/auto"]
    result = torchrun(
        "--max-restarts", "1", *words, ranks=2, FAULT="memory:1:3:4", timeout=250
    ).check()
    return folder / "auto", result.output


@pytest.mark.long
def test_auto_restarts_with_a_smaller_micro_batch(restarted, undisturbed):
    run_dir, output = restarted
    assert status(run_dir)["state"] == "finished"
    events = read(run_dir, "events")
    (failed,) = [event for event in events if event["event"] == "failed"]
    assert (failed["reason"], failed["step"], failed["micro_batch_size"], failed["ranks"]) == (
        "out_of_memory",
        2,
        8,
        2,
    )
    (resumed,) = [event for event in events if event["event"] == "resumed"]
    assert resumed["step"] == 2
    recipe = yaml.safe_load((run_dir / "recipe.yaml").read_text())
    assert recipe["batch"]["micro_batch_size"] in (1, 2, 4)
    assert recipe["batch"]["global_batch_size"] == 16
    assert recipe["strategy"]["kind"] in ("ddp", "fsdp")
    assert losses(run_dir) == pytest.approx(undisturbed[:6], rel=1e-5)
    for shown in (
        "The fastest that fits: by plan",
        "rank 1 of 2 ran out of memory in step 3: in the forward pass of micro-batch 1 of 1 (input_ids 8 x 32)",
        "it requested 64.0 MiB",
        "batch.micro_batch_size is auto: the next start takes a smaller one, and resumes from the last checkpoint",
        "micro-batches of 8 and more ran out of memory before",
    ):
        assert shown in output


@pytest.mark.long
def test_auto_chooses_again_on_other_hardware(restarted, folder, undisturbed):
    """One rank resumes a run of two. Micro-batch sizes that failed on two ranks are allowed."""
    run_dir, _ = restarted
    words = [f"recipe={folder}/recipe.yaml", f"run.dir={run_dir}", "run.max_steps=8"]
    result = run([sys.executable, FAULTY, *words], FAULT="none:0:0").check()
    assert "ran out of memory before" not in result.output
    assert yaml.safe_load((run_dir / "recipe.yaml").read_text())["batch"]["micro_batch_size"] > 4
    assert losses(run_dir) == pytest.approx(undisturbed, rel=1e-5)


@pytest.mark.long
def test_fixed_recipe_ends_with_report_and_suggestions(fixed):
    outcome = status(fixed)
    assert (outcome["state"], outcome["reason"], outcome["step"]) == ("failed", "out_of_memory", 8)
    shown = outcome["error"]
    assert shown.startswith(
        "rank 1 of 2 ran out of memory in step 9: in the forward pass of micro-batch 1 of 1 (input_ids 8 x 32)\n"
    )
    assert re.search(r"\noptimizer state +\d+\.\d KiB +\d+\.\d KiB\n", shown), (
        "the table must have measured and planned sizes"
    )
    suggestions = shown.partition("what fits by plan, the fastest first, as overrides:\n")[
        2
    ].splitlines()
    overrides = [line.split("#")[0].split() for line in suggestions if line.startswith("  ")]
    assert 1 <= len(overrides) <= 3
    for suggestion in overrides:
        load_recipe([f"recipe={fixed.parent}/recipe.yaml", *FIXED, *suggestion], ranks=2)
    assert "Traceback" in (fixed / "log/rank_1.log").read_text()
    assert "Traceback" not in shown
