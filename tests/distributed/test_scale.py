"""A run on many ranks: its start, its agreements, a checkpoint, a resume on fewer ranks, and a lost rank.

`SCALE_RANKS=256 pytest -m long -s tests/distributed/test_scale.py` prints the table of docs/engineering/scale.md.
The ranks are processes on this machine, eight to a "node", which share its cores: the times are those of
hundreds of processes on a few cores. What is asserted does not depend on time.
"""

import os
import resource
import time

import pytest

from launcher.checkpoint.files import list_checkpoints
from launcher.reliability.json_files import read_jsonl
from tests import REPOSITORY
from tests.distributed.launching import forked

RANKS = int(os.environ.get("SCALE_RANKS", "72"))
NODE = 8
RECIPE = """\
run: {name: scale, max_steps: 2, dir: run, hang_timeout: 600, init_timeout: 900}
model:
  config: {model_type: llama, vocab_size: 260, hidden_size: 8, intermediate_size: 16, num_hidden_layers: 1,
           num_attention_heads: 1, num_key_value_heads: 1}
  compile: false
data: {train: [text.txt], tokenizer: bytes, sequence_length: 16, workers: 0, cache: cache}
batch: {global_batch_size: 1, micro_batch_size: 1}
strategy: {kind: fsdp, mixed_precision: null}
schedule: {kind: constant, warmup_steps: 0}
checkpoint: {every_steps: 1, keep_last: 3}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("scale")
    (path / "recipe.yaml").write_text(RECIPE)
    (path / "text.txt").write_text("all ranks read the same few words. " * 2000)
    return path


@pytest.fixture(autouse=True)
def few_open_files():
    """The usual limit of a login shell, which the launcher raises."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(1024, before[0]), before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def train(folder, ranks, *overrides, seconds=1500):
    """Trains on this number of ranks in nodes of eight. Returns the result and the seconds it took."""
    began = time.monotonic()
    result = forked(
        REPOSITORY / "launcher/train.py",
        f"recipe={folder}/recipe.yaml",
        f"run.dir={folder}/run",
        f"batch.global_batch_size={RANKS}",
        *overrides,
        ranks=ranks,
        timeout=seconds,
        cwd=folder,
        of_node=NODE,
    )
    return result, time.monotonic() - began


def steps(run):
    return [line["step"] for line in read_jsonl(run / "metrics.jsonl") if "loss" in line]


@pytest.mark.long
def test_many_ranks_train_save_and_resume_on_fewer(folder):
    result, seconds = train(folder, RANKS)
    result.check()
    events = read_jsonl(folder / "run/events.jsonl")
    saved = [event for event in events if event["event"] == "saved"]
    newest = list_checkpoints(folder / "run/checkpoints")[-1]
    rows = {
        "ranks": RANKS,
        "start to end of two steps, s": round(seconds),
        "a save, s": round(saved[-1]["seconds"], 1),
        "files of a checkpoint": len([*newest.iterdir()]),
        "its index, bytes": (newest / "index.json").stat().st_size,
    }
    assert steps(folder / "run") == [1, 2]
    assert rows["files of a checkpoint"] >= RANKS
    result, seconds = train(folder, RANKS // 2, "run.max_steps=3")
    result.check()
    rows["resumed on half of them, s"] = round(seconds)
    assert steps(folder / "run") == [1, 2, 3]
    print()
    for name, value in rows.items():
        print(f"| {name} | {value:,} |")
