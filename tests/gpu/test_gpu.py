"""What has a GPU side, on the GPUs that are here: `pytest -m gpu tests/gpu`. One GPU is enough; with more, more is tried."""

import json
import sys

import pytest
import torch

from tests.distributed.launching import REPOSITORY, run, torchrun

GPUS = torch.cuda.device_count()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(GPUS == 0, reason="no CUDA device here")]
TRAIN = REPOSITORY / "launcher/train.py"
MODEL = [
    *("model.config.hidden_size=512", "model.config.intermediate_size=1536", "model.config.num_hidden_layers=4"),
    *("model.config.num_attention_heads=8", "model.config.num_key_value_heads=4", "data.sequence_length=512"),
    *("batch.global_batch_size=16", "batch.micro_batch_size=4", "data.validation=null", "checkpoint.export=null"),
]


def train(recipe, run_dir, *overrides, ranks=1):
    result = torchrun(TRAIN, f"recipe={recipe}", *MODEL, "run.max_steps=12", f"run.dir={run_dir}", *overrides, ranks=ranks, timeout=300)
    result.check()
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()], result.output


@pytest.mark.parametrize("ranks", sorted({1, GPUS}))
@pytest.mark.parametrize("precision", ["null", "{param_dtype: bfloat16}", "{param_dtype: float16}"])
def test_same_losses(precision, ranks):
    command = [sys.executable, "-m", "launcher.cli", "selftest", "recipe=fsdp", "shrink=true", "data.sequence_length=128"]
    result = run([*command, f"ranks={ranks}", f"strategy.mixed_precision={precision}"], timeout=300).check()
    print(result.output)
    assert torch.cuda.get_device_name(0) in result.output


@pytest.mark.parametrize("recipe", ["ddp", "fsdp", "fsdp_offload"])
def test_recipes(recipe, tmp_path):
    records, output = train(recipe, tmp_path / "run", ranks=GPUS)
    print(output)
    assert records[-1]["loss"] < records[0]["loss"]
    if any(name in torch.cuda.get_device_name(0) for name in ("A100", "H100", "H200", "B200")):
        assert 0 < records[-1]["mfu"] < 1
    assert 0 < records[-1]["peak_memory_bytes"] < torch.cuda.get_device_properties(0).total_memory


def test_offload_takes_less_memory_of_the_gpu(tmp_path):
    kept = train("fsdp", tmp_path / "fsdp")[0][-1]["peak_memory_bytes"]
    offloaded = train("fsdp_offload", tmp_path / "offload")[0][-1]["peak_memory_bytes"]
    assert offloaded < kept


@pytest.mark.parametrize("recipe", ["ddp", "fsdp"])
def test_deterministic_runs_are_bit_identical(recipe, tmp_path):
    first, second = (train(recipe, tmp_path / name, "run.deterministic=true")[0] for name in ("a", "b"))
    assert [(r["loss"], r["grad_norm"]) for r in first] == [(r["loss"], r["grad_norm"]) for r in second]


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_compiled_blocks_train_alike(kind, tmp_path):
    plain = train("fsdp", tmp_path / "plain", f"strategy.kind={kind}")[0]
    compiled = train("fsdp", tmp_path / "compiled", f"strategy.kind={kind}", "model.compile=true")[0]
    for a, b in zip(plain, compiled, strict=True):
        assert b["loss"] == pytest.approx(a["loss"], rel=5e-3)


def test_memory_snapshot(tmp_path):
    train("fsdp", tmp_path / "run", "profile={start_step: 3, steps: 2, memory_snapshot: true}")
    assert (tmp_path / "run/profile/memory_rank_0.pickle").stat().st_size > 0
    assert (tmp_path / "run/profile/rank_0.json").stat().st_size > 0
