"""Averages of the trained weights: checkpoints, other ranks and strategies, evaluation, export."""

import sys

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests import REPOSITORY
from tests.distributed.launching import run, torchrun
from tests.run_files import read_lines, write_lines

TRAIN = REPOSITORY / "launcher/train.py"
RECIPE = """
run: {name: x, max_steps: 6, seed: 7}
model: {config: {model_type: llama, vocab_size: 257, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2,
  num_attention_heads: 2, num_key_value_heads: 1, max_position_embeddings: 256}}
data: {train: [rows.jsonl], validation: [rows.jsonl], tokenizer: bytes, sequence_length: 64, packing: false,
  workers: 0, cache: cache}
batch: {global_batch_size: 8, micro_batch_size: 2}
strategy: {kind: fsdp, mixed_precision: null}
optimizer: {learning_rate: 1.0e-2, ema: 0.7}
schedule: {warmup_steps: 1, kind: constant}
evaluation: {every_steps: 3, ema: true}
checkpoint: {every_steps: 3, export: at_end}
"""


def train(folder, name, *overrides, ranks):
    words = ["recipe=x.yaml", f"run.dir=runs/{name}", *overrides]
    if ranks == 1:
        return run([sys.executable, TRAIN, *words], cwd=folder).check()
    return torchrun(TRAIN, *words, ranks=ranks, cwd=folder).check()


def export(folder, name, *words):
    command = [
        sys.executable,
        "-m",
        "launcher",
        "export",
        f"runs/{name}",
        f"out=out/{name}",
        *words,
    ]
    return run(command, cwd=folder).check().output


@pytest.mark.long
def test_averages_of_a_run(folder):
    """They are the same bits after a resume on the same ranks, and equal over strategies and ranks;
    evaluations have their loss, and an export holds them."""
    (folder / "out").mkdir()
    train(folder, "whole", ranks=2)
    train(folder, "parts", "run.max_steps=3", ranks=2)
    train(folder, "parts", "run.max_steps=6", ranks=2)
    train(folder, "one", "run.max_steps=3", "strategy.kind=ddp", ranks=1)
    zero = ("strategy={kind: ddp, shard_optimizer: true, mixed_precision: null}",)
    train(folder, "one", *zero, "evaluation.ema=false", "run.max_steps=6", ranks=2)
    exported = {}
    for name in ("whole", "parts", "one"):
        assert "matches" in export(folder, name, "weights=ema", "--verify")
        exported[name] = load_file(folder / f"out/{name}/model.safetensors")
    trained = load_file(folder / "runs/whole/hf/model.safetensors")
    assert exported["whole"].keys() == trained.keys()
    for key, average in exported["whole"].items():
        assert torch.equal(average, exported["parts"][key])
        torch.testing.assert_close(average, exported["one"][key], rtol=1e-5, atol=1e-6)
        assert (average - trained[key]).abs().max() > 1e-3, key
    metrics = {name: list(read_lines(folder / f"runs/{name}/metrics.jsonl")) for name in exported}
    losses = [line["eval_loss"] for line in metrics["whole"] if "eval_loss" in line]
    assert losses == [line["eval_loss"] for line in metrics["parts"] if "eval_loss" in line]
    assert losses[0] == pytest.approx(
        next(line["eval_loss"] for line in metrics["one"] if "eval_loss" in line), rel=1e-6
    )
    assert losses[-1] == pytest.approx(loss_of(folder, "out/whole"), rel=1e-5)


def loss_of(folder, export):
    """The mean loss of the rows, by transformers alone."""
    model = AutoModelForCausalLM.from_pretrained(folder / export)
    sums = tokens = 0
    for line in read_lines(folder / "rows.jsonl"):
        ids = torch.tensor([[*line["text"].encode(), 256]])
        with torch.no_grad():
            sums += model(input_ids=ids, labels=ids).loss.item() * (ids.numel() - 1)
        tokens += ids.numel() - 1
    return sums / tokens


@pytest.mark.long
def test_a_schedule_free_run_evaluates_and_exports_its_averages(folder):
    (folder / "out").mkdir()
    own = ["evaluation.ema=false", "optimizer={name: schedule_free_adamw, ema: null}"]
    train(folder, "whole", *own, ranks=2)
    train(folder, "one", *own, "run.max_steps=3", "strategy.kind=ddp", ranks=1)
    train(folder, "one", *own, "run.max_steps=6", ranks=2)
    metrics = {n: list(read_lines(folder / f"runs/{n}/metrics.jsonl")) for n in ("whole", "one")}
    losses = [[line["loss"] for line in lines if "loss" in line] for lines in metrics.values()]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    exported = load_file(folder / "runs/whole/hf/model.safetensors")
    parts = sorted((folder / "runs/whole/checkpoints").glob("step_*6/*.safetensors"))
    held = [load_file(part) for part in parts]
    for name, tensor in exported.items():
        averages, trained = (
            torch.cat([part[key] for part in held if key in part])
            for key in (f"optimizer.{name}.ema", f"model.{name}")
        )
        assert torch.equal(tensor, averages)
        assert not torch.equal(tensor, trained)
    last = [line["eval_loss"] for line in metrics["whole"] if "eval_loss" in line][-1]
    assert last == pytest.approx(loss_of(folder, "runs/whole/hf"), rel=1e-5)
    assert "matches" in export(folder, "whole", "--verify")


@pytest.fixture
def folder(tmp_path):
    write_lines(tmp_path / "rows.jsonl", [{"text": f"{n} plus {n} is {n + n}"} for n in range(40)])
    (tmp_path / "x.yaml").write_text(RECIPE)
    return tmp_path
