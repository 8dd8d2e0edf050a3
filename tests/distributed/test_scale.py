"""A run on many ranks: its start, its agreements, checkpoints, a file system that stalls, and a resume on
fewer ranks.

`SCALE_RANKS=256 pytest -m long -s tests/distributed/test_scale.py` prints the table of docs/engineering/scale.md.
The ranks are processes on this machine, eight to a "node", which share its cores: the times are those of
hundreds of processes on a few cores. Asserted are no times, but that a rank waits for files that stall,
and the memory of a rank beside what it shares with the others: 256 ranks need 12 GiB.
"""

import os
import resource
import time
from pathlib import Path

import pytest

from launcher.checkpoint.files import list_checkpoints
from launcher.reliability.json_files import read_jsonl
from tests.distributed.launching import forked

RANKS = int(os.environ.get("SCALE_RANKS", "72"))
NODE = 8
STALL_SECONDS = 30
"""For which the calls of all ranks on files of the run wait, in the second save."""
MOST_PRIVATE = 52 << 20
"""Bytes of memory that a rank does not share with the others, in the mean over all."""
RECIPE = """\
run: {name: scale, max_steps: 2, dir: run, hang_timeout: 300, init_timeout: 900}
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
    (path / "private").mkdir()
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
    stall = {"STALLS": f"{folder}/run", "STALL_AT": "step_00000002", "STALL_SECONDS": STALL_SECONDS}
    stall["STALL_UNTIL"] = folder / "stalls_until"
    result = forked(
        Path(__file__).with_name("stalling_train.py"),
        f"recipe={folder}/recipe.yaml",
        f"run.dir={folder}/run",
        f"batch.global_batch_size={RANKS}",
        *overrides,
        ranks=ranks,
        timeout=seconds,
        cwd=folder,
        of_node=min(NODE, ranks),
        PRIVATE=f"{folder}/private",
        **{name: str(value) for name, value in stall.items()},
    )
    return result, time.monotonic() - began


def steps(run):
    return [line["step"] for line in read_jsonl(run / "metrics.jsonl") if "loss" in line]


@pytest.mark.long
def test_many_ranks_train_save_and_resume_on_fewer(folder):
    result, seconds = train(folder, RANKS)
    result.check()
    events = read_jsonl(folder / "run/events.jsonl")
    saved = [event["seconds"] for event in events if event["event"] == "saved"]
    private = [int(file.read_text()) for file in (folder / "private").glob("*[0-9]")]
    assert not [event for event in events if event["event"] == "failed"]
    newest = list_checkpoints(folder / "run/checkpoints")[-1]
    rows = {
        "ranks": RANKS,
        "start to end of two steps, s": round(seconds),
        "memory of a rank beside what all share, MiB": round(sum(private) / RANKS / 2**20),
        "a save, s": round(saved[0], 1),
        f"a save in which all files stall for {STALL_SECONDS} s, s": round(saved[1], 1),
        "files of a checkpoint": len([*newest.iterdir()]),
        "its index, bytes": (newest / "index.json").stat().st_size,
    }
    assert steps(folder / "run") == [1, 2]
    assert rows["files of a checkpoint"] >= RANKS
    assert len(private) == RANKS
    assert sum(private) < RANKS * MOST_PRIVATE
    assert saved[1] > STALL_SECONDS - 5
    result, seconds = train(folder, RANKS // 2, "run.max_steps=3")
    result.check()
    rows["resumed on half of them, s"] = round(seconds)
    assert steps(folder / "run") == [1, 2, 3]
    print()
    for name, value in rows.items():
        print(f"| {name} | {value:,} |")
