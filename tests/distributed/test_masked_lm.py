"""A masked language model: strategies, ranks, resumes, evaluation and export."""

import sys

import pytest
import torch
from transformers import AutoModelForMaskedLM

from launcher.data.opening import open_dataset
from launcher.data.token_store import ModelTraits
from launcher.objectives.masked import Masked
from launcher.recipe.load import load_recipe
from tests import REPOSITORY
from tests.distributed.launching import run, torchrun
from tests.run_files import read_lines, write_lines
from tests.unit.objectives.test_masked_lm import save_tokenizer

TRAIN = REPOSITORY / "launcher/train.py"
RECIPE = """
run: {name: x, epochs: 2, seed: 7}
model: {task: masked_lm, config: {model_type: MODEL, vocab_size: 100, hidden_size: 32, intermediate_size: 64,
  num_hidden_layers: 2, num_attention_heads: 2, max_position_embeddings: 70, pad_token_id: 0DROPOUT}}
data: {train: [rows.jsonl], validation: [far.jsonl], tokenizer: tokenizer, sequence_length: 64, packing: false,
  workers: 0, cache: cache}
batch: {global_batch_size: 8, micro_batch_size: 2}
strategy: {kind: fsdp, mixed_precision: null}
optimizer: {learning_rate: 1.0e-2}
schedule: {warmup_steps: 1, kind: constant}
evaluation: {every_steps: 2}
checkpoint: {every_steps: 5, export: at_end}
"""


def train(folder, name, *overrides, ranks):
    words = ["recipe=x.yaml", f"run.dir=runs/{name}", *overrides]
    if ranks == 1:
        return run([sys.executable, TRAIN, *words], cwd=folder).check()
    return torchrun(TRAIN, *words, ranks=ranks, cwd=folder).check()


def lines(folder, name):
    """The values of each step, without the evaluation at the end of the stopped run."""
    kept = ("loss", "eval_loss", "loss_tokens", "eval_tokens")
    read = read_lines(folder / f"runs/{name}/metrics.jsonl")
    named = ((line["step"], key, line[key]) for line in read for key in kept if key in line)
    return {(step, key): value for step, key, value in named if (step, key[:4]) != (5, "eval")}


@pytest.mark.long
@pytest.mark.parametrize("model", ["bert", "modernbert"])
def test_a_masked_language_model(model, tmp_path, monkeypatch):
    """Masks and losses do not depend on strategy, ranks, micro-batches or a resume, and those of an
    evaluation are fixed: transformers computes its loss from the export."""
    monkeypatch.chdir(tmp_path)
    save_tokenizer(tmp_path / "tokenizer")
    for name, numbers in (("rows", range(44)), ("far", range(44, 54))):
        rows = [{"text": " ".join(f"w{(n + i) % 9}" for i in range(5 + n % 7))} for n in numbers]
        write_lines(tmp_path / f"{name}.jsonl", rows)
    dropout = ", hidden_dropout_prob: 0.0, attention_probs_dropout_prob: 0.0"
    recipe = RECIPE.replace("MODEL", model).replace("DROPOUT", dropout * (model == "bert"))
    if model == "modernbert":
        recipe = recipe.replace(
            "pad_token_id: 0", "pad_token_id: 0, cls_token_id: 2, sep_token_id: 3"
        )
    (tmp_path / "x.yaml").write_text(recipe)
    train(tmp_path, "one", "strategy.kind=ddp", "batch.micro_batch_size=8", ranks=1)
    stopped = ("batch.micro_batch_size=null", "batch.micro_batch_tokens=64", "data.workers=1")
    train(tmp_path, "two", *stopped, "run.epochs=null", "run.max_steps=5", ranks=2)
    train(tmp_path, "two", "run.epochs=2", ranks=2)
    one, two = lines(tmp_path, "one"), lines(tmp_path, "two")
    assert one == pytest.approx(two, rel=1e-6)
    assert one[11, "loss"] < one[1, "loss"]
    exported = AutoModelForMaskedLM.from_pretrained(tmp_path / "runs/one/hf").eval()
    command = [
        sys.executable,
        "-m",
        "launcher",
        "export",
        "runs/one",
        "out=runs/one/hf",
        "--verify",
    ]
    assert "matches" in run(command, cwd=tmp_path).check().output
    data = load_recipe([f"recipe={tmp_path}/x.yaml"], ranks=1, files=False).recipe.data
    opened = open_dataset(
        data,
        (str(tmp_path / "far.jsonl"),),
        objective=Masked(),
        tokenizer=str(tmp_path / "tokenizer"),
        model=ModelTraits(tokenizer=str(tmp_path / "tokenizer")),
        build=True,
        validation=True,
    )
    assert isinstance(opened.objective, Masked)
    made = opened.collate([opened[index] for index in range(len(opened))]).micro_batch
    with torch.no_grad():
        loss = exported(**made.inputs, labels=made.targets).loss.item()
    assert one[11, "eval_loss"] == pytest.approx(loss, rel=1e-5)
