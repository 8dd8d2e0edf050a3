"""Biases of routers that a run updates (model.router_bias_update_rate): on other divisions, resumed and
exported."""

import json

import pytest
import torch
from safetensors.torch import load_file

from tests import REPOSITORY
from tests.distributed.launching import forked
from tests.run_files import read_lines, write_texts

TRAIN = REPOSITORY / "launcher/train.py"
RECIPE = """
run: {name: bias, max_steps: 6, seed: 3}
model:
  router_bias_update_rate: 0.01
  config: {model_type: KIND, vocab_size: 260, hidden_size: 32, intermediate_size: 48, moe_intermediate_size: 16, num_hidden_layers: 4,
    num_attention_heads: 4, num_key_value_heads: 2, head_dim: 8, max_position_embeddings: 64, EXPERTS}
data: {train: [FOLDER/text.jsonl], tokenizer: bytes, sequence_length: 32, cache: FOLDER/cache}
batch: {global_batch_size: 8, micro_batch_size: 2}
strategy: {kind: fsdp, mixed_precision: null}
optimizer: {learning_rate: 2.0e-3}
schedule: {kind: constant, warmup_steps: 2}
checkpoint: {every_steps: 3, export: at_end}
"""
GLM = "n_routed_experts: 8, num_experts_per_tok: 2, n_group: 1, topk_group: 1, first_k_dense_replace: 1"
# Its biases are frozen parameters, which a checkpoint would not hold
AFMOE = "num_experts: 8, num_experts_per_tok: 2, num_dense_layers: 1"
EXPORT = "strategy.mixed_precision.param_dtype=bfloat16"
DIVISIONS = {
    "two ranks": (2, ["strategy.kind=ddp"]),
    "experts divided": (2, ["strategy.expert_parallel_size=2", "batch.micro_batch_size=1"]),
    "stages": (2, ["strategy.pipeline_parallel_size=2", "activation_checkpointing.mode=full"]),
}


def trained(folder, name, *overrides, ranks=1):
    found = folder / name
    words = [TRAIN, f"recipe={folder}/recipe.yaml", f"run.dir={found}", *overrides]
    forked(*words, ranks=ranks, timeout=60).check()
    return found


def values(run):
    lines = [line for line in read_lines(run / "metrics.jsonl") if "loss" in line]
    keys = ("loss", "grad_norm", "expert_load_max", "expert_load_min", "experts_idle")
    return torch.tensor([[line[key] for key in keys] for line in lines], dtype=torch.float64)


def biases(run):
    found = {}
    for file in (run / "hf").glob("*.safetensors"):
        found |= {name: t for name, t in load_file(file).items() if name.endswith("_bias")}
    return found


def check(folder, expected, run):
    torch.testing.assert_close(values(run), values(expected), rtol=1e-5, atol=0)
    own = biases(run)
    assert own.keys() == biases(expected).keys()
    for name, bias in biases(expected).items():
        assert torch.equal(own[name], bias), name


def prepare(folder, kind, experts):
    write_texts(folder / "text.jsonl", seed=1)
    text = RECIPE.replace("FOLDER", str(folder)).replace("KIND", kind).replace("EXPERTS", experts)
    (folder / "recipe.yaml").write_text(text)


def test_resumed_on_two_ranks_with_divided_experts(tmp_path):
    prepare(tmp_path, "afmoe", AFMOE)
    expected = trained(tmp_path, "whole")
    found = biases(expected)
    assert len(found) == 3
    for bias in found.values():
        assert bias.dtype == torch.float32
        assert bias.abs().max() <= 6 * 0.01 * 1.0001
        steps = bias.double() / 0.01
        torch.testing.assert_close(steps, steps.round(), rtol=0, atol=1e-4)
    assert all(bias.abs().sum() > 0 for bias in found.values())
    trained(tmp_path, "resumed", "run.max_steps=3")
    ranks, words = DIVISIONS["experts divided"]
    run = trained(tmp_path, "resumed", *words, "run.max_steps=6", ranks=ranks)
    check(tmp_path, expected, run)
    shown = json.loads((run / "experts.json").read_text())
    assert shown["step"] == 6
    assert [len(layer) for layer in shown["layers"].values()] == [8] * 3
    mean = torch.tensor(list(shown["layers"].values())).mean(1)
    torch.testing.assert_close(mean, torch.ones(3), rtol=0, atol=1e-3)


def test_a_resume_may_begin_and_end_to_update_them(tmp_path):
    """A checkpoint holds frozen biases, too."""
    prepare(tmp_path, "afmoe", AFMOE)
    kept = ("model.router_bias_update_rate=0", "checkpoint.allow_changes=true")
    trained(tmp_path, "run", "run.max_steps=3", *kept)
    begun = biases(trained(tmp_path, "run", "run.max_steps=6", kept[1]))
    assert 0 < max(bias.abs().max() for bias in begun.values()) <= 3 * 0.01 * 1.0001
    ended = biases(trained(tmp_path, "run", "run.max_steps=9", *kept))
    assert all(torch.equal(ended[name], bias) for name, bias in begun.items())


@pytest.mark.long
def test_other_divisions(tmp_path):
    prepare(tmp_path, "glm4_moe", GLM)
    expected = trained(tmp_path, "whole")
    assert len(biases(expected)) == 3
    for name, (ranks, words) in DIVISIONS.items():
        check(tmp_path, expected, trained(tmp_path, name, *words, ranks=ranks))
    rounded = trained(tmp_path, "bf16", EXPORT, "checkpoint.export_dtype=bfloat16")
    for bias in biases(rounded).values():
        assert bias.dtype == torch.float32, "an export keeps them as they are trained"
        assert bias.abs().sum() > 0
