"""A rank is killed while other ranks wait for a collective that never completes, as with NCCL."""

import json
import pickle

import pytest

from tests.distributed.launching import torchrun
from tests.nullgpu.devices import TRAIN
from tests.run_files import read_lines

RECIPE = """
run: {{name: small, dir: {folder}/run, max_steps: 8, max_skipped_steps: 100}}
model:
  config: {{model_type: llama, vocab_size: 512, hidden_size: 128, intermediate_size: 256, num_hidden_layers: 2,
           num_attention_heads: 2, num_key_value_heads: 2, eos_token_id: 1}}
data: {{train: [{folder}/text.txt], tokenizer: bytes, sequence_length: 128, workers: 0}}
batch: {{global_batch_size: 4, micro_batch_size: 1}}
strategy: {{kind: fsdp, mixed_precision: {{param_dtype: bfloat16}}}}
checkpoint: {{every_steps: 2}}
"""


def train(gpus, folder, *overrides, ranks=2, restarts=0, **options):
    (folder / "text.txt").write_text("All ranks read the same text. " * 2000)
    recipe = folder / "recipe.yaml"
    recipe.write_text(RECIPE.format(folder=folder))
    started = [f"--max-restarts={restarts}", TRAIN, f"recipe={recipe}", *overrides]
    return torchrun(*started, ranks=ranks, timeout=150, device="cuda", **gpus.variables, **options)


@pytest.mark.long
def test_killed_rank_is_reported_and_run_restarts(null_gpus, tmp_path):
    """Rank 0 waits for a collective of rank 1, unless it learns of the failure before, on a busy
    machine: then the run is repeated."""
    gpus = null_gpus(count=2)
    for attempt in range(3):
        folder = tmp_path / str(attempt)
        folder.mkdir()
        check_killed_rank(train(gpus, folder, restarts=1, FAULT="kill:1:5"), folder)
        if any(log.rank == 0 and log.of_kind("stuck") for log in gpus.logs()):
            return
    pytest.fail("rank 0 did not wait for a collective of rank 1")


def check_killed_rank(result, folder):
    result.check()
    events = read_lines(folder / "run/events.jsonl")
    (failed,) = (event for event in events if event["event"] == "failed")
    assert failed["reason"] == "rank_lost"
    assert "rank 1 of 2" in result.output
    status = json.loads((folder / "run/status.json").read_text())
    assert (status["state"], status["step"]) == ("finished", 8)
    steps = [
        json.loads(line)["step"] for line in (folder / "run/metrics.jsonl").read_text().splitlines()
    ]
    assert steps == list(range(1, 9))


@pytest.mark.long
def test_hang_is_reported_with_the_last_collectives(null_gpus, tmp_path):
    """One collective of rank 1 never completes."""
    result = train(
        null_gpus(count=2),
        tmp_path,
        "run.hang_timeout=8",
        "checkpoint.every_steps=null",
        FAULT="block:1:3",
    ).check(1)
    status = json.loads((tmp_path / "run/status.json").read_text())
    assert (status["state"], status["reason"]) == ("failed", "hang"), result.output
    assert "no sign of life for 8 s (run.hang_timeout)" in status["error"]
    recorded = pickle.loads((tmp_path / "run/log/hang/flight_recorder_1").read_bytes())
    waiting = [entry for entry in recorded["entries"] if entry["state"] != "completed"]
    assert any(entry["profiling_name"].startswith("nccl:") for entry in waiting)
