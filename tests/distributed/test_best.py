"""Evaluations and checkpoints by parts of an epoch, and the export of the best checkpoint."""

import sys

import pytest
from safetensors.numpy import load_file

from tests import REPOSITORY
from tests.distributed.launching import run
from tests.run_files import read_lines, write_lines

TRAIN = REPOSITORY / "launcher/train.py"
RECIPE = """
run: {name: best, epochs: 2, dir: run, device: cpu}
model: {config: {model_type: llama, vocab_size: 257, hidden_size: 16, intermediate_size: 32, num_hidden_layers: 1,
  num_attention_heads: 2, num_key_value_heads: 1, max_position_embeddings: 64}}
data: {kind: text, train: [train.jsonl], validation: [other.jsonl], tokenizer: bytes, sequence_length: 16,
  packing: false, workers: 0, cache: cache}
batch: {global_batch_size: 4, micro_batch_size: 4}
strategy: {kind: ddp, mixed_precision: null}
optimizer: {learning_rate: 0.05}
schedule: {warmup_steps: 0, kind: constant}
evaluation: {every_epochs: 0.25}
checkpoint: {every_epochs: 0.25, keep_best: eval_loss, keep_last: 1, export: best}
"""


@pytest.mark.long
def test_the_best_checkpoint_is_exported_also_after_a_resume(tmp_path):
    """What is trained differs from what is evaluated, so that the loss falls and then rises."""
    write_lines(tmp_path / "train.jsonl", [{"text": "aaaaaaab"} for _ in range(40)])
    write_lines(tmp_path / "other.jsonl", [{"text": "aaaacc"}])
    (tmp_path / "best.yaml").write_text(RECIPE)
    command = [sys.executable, TRAIN, "recipe=best.yaml"]
    run([*command, "run.epochs=1"], cwd=tmp_path).check()
    output = run([*command, "run.epochs=2"], cwd=tmp_path).check().output
    assert (
        "plan: evaluation every 0.25 epochs, checkpoint every 0.25 epochs, export of the" in output
    )
    lines = read_lines(tmp_path / "run/metrics.jsonl")
    losses = {line["step"]: line["eval_loss"] for line in lines if "eval_loss" in line}
    assert list(losses) == [3, 5, 8, 10, 13, 15, 18, 20]
    best = min(losses, key=losses.get)
    assert best < 20, "the last step must not be the best"
    assert f"those of step {best}, the best" in output
    kept = sorted(path.name for path in (tmp_path / "run/checkpoints").iterdir())
    assert kept == [f"step_{step:08d}" for step in (best, 20)]
    for step in (best, 20):
        export = [sys.executable, "-m", "launcher.cli.main", "export", "run", f"out=out{step}"]
        run([*export, f"step={step}"], cwd=tmp_path).check()
    (tensor, *_) = found = load_file(tmp_path / "run/hf/model.safetensors")
    best_one, last = (load_file(tmp_path / f"out{step}/model.safetensors") for step in (best, 20))
    assert all((found[name] == best_one[name]).all() for name in found)
    assert (found[tensor] != last[tensor]).any()


@pytest.mark.long
def test_parts_of_epochs_count_from_the_checkpoint_of_a_resume(tmp_path):
    """With another batch, evaluations and checkpoints come after the same steps."""
    write_lines(tmp_path / "train.jsonl", [{"text": "aaaaaaab"} for _ in range(40)])
    write_lines(tmp_path / "other.jsonl", [{"text": "aaaacc"}])
    (tmp_path / "best.yaml").write_text(RECIPE)
    command = [sys.executable, TRAIN, "recipe=best.yaml", "checkpoint.allow_changes=true"]
    command += [
        "evaluation.every_epochs=0.5",
        "checkpoint.every_epochs=0.5",
        "checkpoint.keep_last=9",
    ]
    run([*command, "run.epochs=1"], cwd=tmp_path).check()
    larger = ["batch.global_batch_size=16", "batch.micro_batch_size=16"]
    run([*command, "run.epochs=2", *larger], cwd=tmp_path).check()
    folders = sorted(path.name for path in (tmp_path / "run/checkpoints").glob("step_*"))
    # 20 samples are half an epoch: 5 and 10 steps of 4; then 16 + 16 reach 60, and the rest 80
    assert [int(name[-8:]) for name in folders] == [5, 10, 12, 13]
