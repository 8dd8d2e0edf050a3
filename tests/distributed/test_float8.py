"""Training with linear layers in float8, emulated: the same losses on one rank and on two."""

import random

import pytest

from tests import REPOSITORY
from tests.distributed.launching import forked
from tests.run_files import read_lines

RECIPE = """
run: {name: float8, max_steps: 4, seed: 7}
model: {config: {model_type: llama, vocab_size: 64, hidden_size: 32, intermediate_size: 48, num_hidden_layers: 2, \
num_attention_heads: 4, num_key_value_heads: 2, tie_word_embeddings: false}}
data: {kind: tokens, train: [FOLDER/train.jsonl], sequence_length: 32, packing: false, workers: 0, cache: FOLDER/cache}
batch: {global_batch_size: 4, micro_batch_size: 2}
strategy: {kind: fsdp, mixed_precision: {float8: rowwise}}
activation_checkpointing: {mode: selective}
optimizer: {learning_rate: 1.0e-3}
schedule: {warmup_steps: 1}
"""


@pytest.mark.long
def test_losses_are_the_same_on_one_rank_and_on_two(tmp_path):
    pytest.importorskip("torchao")
    draw = random.Random(0)
    rows = [f'{{"input_ids": {[draw.randrange(64) for _ in range(31)]}}}\n' for _ in range(40)]
    (tmp_path / "train.jsonl").write_text("".join(rows))
    recipe = tmp_path / "float8.yaml"
    recipe.write_text(RECIPE.replace("FOLDER", str(tmp_path)))
    losses = {}
    for ranks in (1, 2):
        folder = tmp_path / f"run{ranks}"
        words = [f"recipe={recipe}", f"run.dir={folder}"]
        forked(REPOSITORY / "launcher" / "train.py", *words, ranks=ranks).check()
        losses[ranks] = [line["loss"] for line in read_lines(folder / "metrics.jsonl")]
    assert len(losses[1]) == 4
    assert losses[1] == pytest.approx(losses[2], rel=1e-6)
