"""One rank of a node looks at the files of data, and the other nodes take what rank 0 has found."""

import json
from collections import Counter
from pathlib import Path

import pytest

from tests.distributed.launching import forked

FILES, NODE, NODES = 30, 3, 2
RECIPE = """\
run: {name: files, max_steps: 1, dir: run}
model:
  config: {model_type: llama, vocab_size: 260, hidden_size: 8, intermediate_size: 16, num_hidden_layers: 1,
           num_attention_heads: 1, num_key_value_heads: 1}
  compile: false
data: {train: [files], validation: {held_out: ["files/*0.jsonl"]}, kind: chat, tokenizer: bytes,
       sequence_length: auto, workers: 0, cache: cache}
batch: {global_batch_size: 6, micro_batch_size: 1}
strategy: {mixed_precision: null}
schedule: {kind: constant, warmup_steps: 0}
checkpoint: {every_steps: null}
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "files").mkdir()
    (tmp_path / "counts").mkdir()
    for number in range(FILES):
        row = {"messages": [{"role": r, "content": str(number)} for r in ("user", "assistant")]}
        (tmp_path / f"files/{number:02}.jsonl").write_text(f"{json.dumps(row)}\n" * 5)
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    return tmp_path


def train(folder, *overrides):
    for file in (folder / "counts").iterdir():
        file.unlink()
    variables = {"COUNTS": str(folder / "counts"), "COUNTED": str(folder / "files")}
    return forked(
        Path(__file__).with_name("counting_train.py"),
        f"recipe={folder}/recipe.yaml",
        f"run.dir={folder}/run",
        *overrides,
        ranks=NODE * NODES,
        of_node=NODE,
        cwd=folder,
        timeout=200,
        **variables,
    )


def counts(folder):
    """Opened files, listed folders and stats of each rank."""
    files = sorted((folder / "counts").iterdir(), key=lambda file: int(file.name))
    found = [Counter(file.read_text()) for file in files]
    return [tuple(each[mark] for mark in "ols") for each in found]


def test_one_rank_looks_at_the_files(folder):
    """Each rank looked at each file twice, and rank 0 three times: it also counts the rows (`auto`)."""
    train(folder).check()
    tokenized, *others = counts(folder)
    assert tokenized[2] < 15 * FILES
    first_of_other_node = others.pop(NODE - 1)
    assert first_of_other_node[2] < FILES, "it compares the first and the last file with rank 0's"
    assert all(opened == 0 and stats < 5 for opened, _, stats in others)
    train(folder, "run.dir=again").check()
    again = counts(folder)
    assert [opened for opened, _, _ in again[1:]] == [0] * (NODE * NODES - 1)
    assert max(stats for _, _, stats in again[1:]) < FILES


def test_the_error_of_the_rank_that_looks_appears_once_on_each_node(folder):
    (folder / "files/zz.jsonl").symlink_to(folder / "gone")
    result = train(folder)
    assert result.status == 2
    text = f"files/zz.jsonl: a link to {folder}/gone, which is not there; mend or remove the link"
    assert result.output.count(text) == NODES, result.output
