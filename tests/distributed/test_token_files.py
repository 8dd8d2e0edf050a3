"""A run on token ids of another tool learns what a run on rows with the same ids does."""

import json

import numpy as np
import pytest

from tests import REPOSITORY
from tests.distributed.launching import forked
from tests.unit.data.rows import write
from tests.unit.data.test_token_files import megatron

RECIPE = """\
run: {name: ids, max_steps: 6, dir: run}
model:
  config: {model_type: llama, vocab_size: 320, hidden_size: 8, intermediate_size: 16, num_hidden_layers: 1,
           num_attention_heads: 1, num_key_value_heads: 1}
  compile: false
data: {train: [a_text_document], tokenizer: bytes, sequence_length: 16, workers: 1, cache: cache,
       validation_split: 0.2}
batch: {global_batch_size: 4, micro_batch_size: 1}
strategy: {kind: ddp, mixed_precision: null}
optimizer: {learning_rate: 0.01}
schedule: {kind: constant, warmup_steps: 0}
evaluation: {every_steps: 3}
checkpoint: {every_steps: 3}
"""

pytestmark = pytest.mark.slow


@pytest.fixture
def folder(tmp_path):
    numbers = np.random.default_rng(0)
    documents = [[*numbers.integers(0, 256, n).tolist(), 256] for n in numbers.integers(1, 50, 60)]
    megatron(tmp_path / "a_text_document", documents, parts=2)
    write(tmp_path / "a.jsonl", [{"input_ids": ids} for ids in documents])
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    return tmp_path


def train(folder, name, *overrides, status=0):
    done = forked(
        REPOSITORY / "launcher/train.py",
        f"recipe={folder}/recipe.yaml",
        f"run.dir={folder}/{name}",
        *overrides,
        ranks=2,
        cwd=folder,
    ).check(status)
    if status:
        return done.output
    lines = (folder / name / "metrics.jsonl").read_text().splitlines()
    return [(row["step"], row.get("loss"), row.get("eval_loss")) for row in map(json.loads, lines)]


def test_losses_are_those_of_rows_also_after_a_resume(folder):
    of_ids = train(folder, "ids")
    assert of_ids == train(folder, "rows", "data.train=a.jsonl", "data.kind=tokens")
    assert len(of_ids) == 8
    train(folder, "resumed", "run.max_steps=3")
    assert train(folder, "resumed", "run.max_steps=6") == of_ids
    ids = folder / "a_text_document.bin"
    content = bytearray(ids.read_bytes())
    content[0] ^= 1
    ids.write_bytes(content)
    output = train(folder, "resumed", "run.max_steps=7", status=2)
    assert "resume with the changes" in output
