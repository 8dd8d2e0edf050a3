"""Runs whose blocks are divided over the stages of a pipeline."""

import re
import signal
import sys

import pytest
from safetensors.torch import load_file

from tests import REPOSITORY
from tests.distributed.launching import forked, run, torchrun, wait_until
from tests.run_files import read_lines, status, write_texts

TRAIN = REPOSITORY / "launcher/train.py"
FAULTY = REPOSITORY / "tests/distributed/faulty_train.py"
RECIPE = """
run: {name: stages, max_steps: 6, seed: 3, device: cpu}
model: {config: {model_type: llama, vocab_size: 260, hidden_size: 32, intermediate_size: 48, num_hidden_layers: 4,
  num_attention_heads: 4, num_key_value_heads: 2, max_position_embeddings: 64, tie_word_embeddings: true}}
data: {train: [FOLDER/text.jsonl], validation: [FOLDER/text.jsonl], tokenizer: bytes, sequence_length: 32, workers: 0,
  cache: FOLDER/cache}
batch: {global_batch_size: 6, micro_batch_size: 1}
strategy: {kind: fsdp, mixed_precision: null}
optimizer: {learning_rate: 2.0e-3, max_grad_norm: 0.5}
schedule: {kind: constant, warmup_steps: 2}
evaluation: {every_steps: 3, max_batches: 4}
checkpoint: {every_steps: 3, keep_last: 20, export: at_end}
logging: {every_steps: 1}
"""
STAGES = "strategy.pipeline_parallel_size=2"
INTERLEAVED = "strategy.pipeline_schedule=interleaved_1f1b"
LAYOUTS = {
    "one rank": (1,),
    "2 stages": (2, STAGES),
    "4 stages on 2 ranks": (2, STAGES, INTERLEAVED),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stages")
    write_texts(folder / "text.jsonl", seed=1)
    (folder / "recipe.yaml").write_text(RECIPE.replace("FOLDER", str(folder)))
    return folder


def train(folder, run_dir, ranks, *overrides, **options):
    arguments = [f"recipe={folder}/recipe.yaml", f"run.dir={run_dir}", *overrides]
    return forked(TRAIN, *arguments, ranks=ranks, **options)


@pytest.fixture(scope="module")
def trained(folder):
    """A function that trains a layout, once."""
    done = {}

    def trained(name):
        if name not in done:
            done[name] = folder / name.replace(" ", "_")
            train(folder, done[name], *LAYOUTS[name]).check()
        return done[name]

    return trained


def numbers(run_dir, *, first=1):
    """Losses, norms and evaluations of the steps from the first one on."""
    keys = ("step", "loss", "grad_norm", "tokens", "loss_tokens", "eval_loss")
    found = []
    for line in read_lines(run_dir / "metrics.jsonl"):
        if line.get("step", 0) >= first:
            found += [line[key] for key in keys if key in line]
    return found


def exported(run_dir):
    return load_file(run_dir / "hf/model.safetensors")


@pytest.mark.parametrize(
    "name", ["4 stages on 2 ranks", pytest.param("2 stages", marks=pytest.mark.long)]
)
def test_a_run_of_stages_is_that_of_one_rank(trained, name):
    """Six micro-batches, which four stages on two ranks take in groups of two."""
    run_dir, alone = trained(name), trained("one rank")
    assert numbers(run_dir) == pytest.approx(numbers(alone), rel=1e-6)
    mine, other = exported(run_dir), exported(alone)
    assert mine.keys() == other.keys()
    assert max((mine[key] - other[key]).abs().max().item() for key in mine) < 1e-6
    config = "hf/config.json"
    assert (run_dir / config).read_text() == (alone / config).read_text()
    assert status(run_dir)["state"] == "finished"
    parts = (alone / "checkpoints/step_00000006", run_dir / "checkpoints/step_00000006")
    alone_bytes, own_bytes = (sum(f.stat().st_size for f in part.iterdir()) for part in parts)
    assert own_bytes < 1.2 * alone_bytes  # the shared weight is written once


@pytest.mark.long
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("one rank", "2 stages"),
        ("2 stages", "one rank"),
        ("2 stages", "4 stages on 2 ranks"),
        ("4 stages on 2 ranks", "4 stages on 2 ranks"),
    ],
)
def test_a_run_is_resumed_with_other_stages(trained, folder, tmp_path, before, after):
    start = trained(before) / "checkpoints/step_00000003"
    ranks, *overrides = LAYOUTS[after]
    train(folder, tmp_path / "run", ranks, *overrides, f"checkpoint.resume={start}").check()
    expected = numbers(trained("one rank"), first=4)
    assert numbers(tmp_path / "run", first=4) == pytest.approx(expected, rel=1e-6)


@pytest.mark.long
@pytest.mark.parametrize("name", ["2 stages", "4 stages on 2 ranks"])
def test_stages_share_the_rows_of_new_tokens(folder, tmp_path, name):
    """Adapters freeze the shared embedding, but not these rows, which both stages train."""
    rows = ["model.new_tokens=['<new>']", "lora={rank: 4, target_modules: [q_proj, o_proj]}"]
    for run_name in ("one rank", name):
        ranks, *overrides = LAYOUTS[run_name]
        train(folder, tmp_path / run_name, ranks, *overrides, *rows).check()
    alone, run_dir = tmp_path / "one rank", tmp_path / name
    assert numbers(run_dir) == pytest.approx(numbers(alone), rel=1e-6)
    file = "hf/adapter_model.safetensors"
    mine, other = load_file(run_dir / file), load_file(alone / file)
    assert mine.keys() == other.keys()
    assert max((mine[key] - other[key]).abs().max().item() for key in mine) < 1e-6


@pytest.mark.long
@pytest.mark.parametrize("name", ["2 stages", "4 stages on 2 ranks"])
def test_a_stopped_run_of_stages_saves_and_continues(folder, tmp_path, name):
    ranks, *overrides = LAYOUTS[name]
    run_dir = tmp_path / "run"
    arguments = [f"recipe={folder}/recipe.yaml", f"run.dir={run_dir}", *overrides]
    command = [sys.executable, "-m", "launcher", "train", f"gpus={ranks}", *arguments]
    metrics = run_dir / "metrics.jsonl"

    def stop(process):
        assert wait_until(lambda: metrics.exists() and metrics.stat().st_size, process=process)
        process.send_signal(signal.SIGTERM)

    run([*command, "run.max_steps=100000", "checkpoint.export=null"], during=stop).check(75)
    assert status(run_dir)["state"] == "stopped"
    steps = status(run_dir)["step"]
    run([*command, f"run.max_steps={steps + 2}", "checkpoint.export=null"]).check()
    assert [line["step"] for line in read_lines(metrics) if "loss" in line] == [
        *range(1, steps + 3)
    ]


@pytest.mark.long
@pytest.mark.parametrize(
    ("fault", "says"),
    [
        # In the second micro-batch of the second step; the other stage waits
        ("raise:1:8", "rank 1 of 2 failed in step 2: ValueError: a fault of this test"),
        ("raise:0:8", "rank 0 of 2 failed in step 2: ValueError: a fault of this test"),
        ("memory:1:8:0", "rank 1 of 2 ran out of"),
        ("kill:1:8", "rank 1 of 2 ended without an error message"),
    ],
)
def test_a_stage_that_fails_is_named_with_its_error(folder, tmp_path, fault, says):
    arguments = [f"recipe={folder}/recipe.yaml", f"run.dir={tmp_path}/run", STAGES]
    failed = torchrun(FAULTY, *arguments, ranks=2, timeout=90, FAULT=fault)
    assert failed.status not in (0, 75)
    assert says in failed.output, failed.output


def test_each_stage_has_its_times(trained, folder):
    run_dir = trained("4 stages on 2 ranks")
    records = [line for line in read_lines(run_dir / "metrics.jsonl") if "loss" in line]
    for record in records:
        assert len(record["stages"]) == 2
        for stage in record["stages"]:
            assert all(seconds > 0 for seconds in stage.values()), stage
            assert sum(stage.values()) < record["step_seconds"]
    log = (run_dir / "log/rank_0.log").read_text()
    assert re.search(r"stage [12] of 2 computes longest, \d+% of a step; the stages wait for", log)
    page = folder / "report.html"
    run([sys.executable, "-m", "launcher", "report", run_dir, f"out={page}"]).check()
    assert "Stages of the pipeline" in (text := page.read_text())
    assert "stage 1, blocks 0 and 2" in text
    assert "stage 2, blocks 1 and 3" in text
