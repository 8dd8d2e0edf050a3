"""`launcher plan --measure` on two CPU ranks, with a valid and a failing configuration."""

import dataclasses

import pytest

from launcher.planner import search, trials
from launcher.planner.machine import known_machine
from launcher.planner.measurement import measure_recipes
from launcher.planner.plan import make_plan
from launcher.recipe.load import load_recipe
from launcher.recipe.schema import Batch, Strategy


@pytest.mark.long
def test_auto_uses_the_measured_configuration(tmp_path, monkeypatch):
    (tmp_path / "small.yaml").write_text(
        "run: {name: small, max_steps: 3}\n"
        "model: {config: {model_type: llama, vocab_size: 300, hidden_size: 64, intermediate_size: 128,\n"
        "  num_hidden_layers: 2, num_attention_heads: 4, num_key_value_heads: 2}}\n"
        f"data: {{train: [none.txt], tokenizer: bytes, sequence_length: 64, cache: {tmp_path / 'cache'}}}\n"
        "batch: {global_batch_size: 16, micro_batch_size: 1}\n"
        "strategy: {kind: ddp, mixed_precision: null}\n"
    )
    arguments = [f"recipe={tmp_path / 'small.yaml'}"]
    recipe = load_recipe(arguments, ranks=2, files=False).recipe
    machine = known_machine("cpu", nodes=1, gpus_per_node=2, memory=2**33)
    (written,) = search.fastest_of_each_kind(recipe, machine, most=1)
    broken = dataclasses.replace(written, overrides=("model.attention=unknown",))
    monkeypatch.setattr(trials, "fastest_of_each_kind", lambda *_, **__: [broken, written])
    found = trials.measure_fastest(arguments, recipe, machine)
    failed, good = found["rows"]
    assert failed["measured"] is None
    assert "unknown" in failed["problem"]
    assert good["problem"] == ""
    assert 0.95 < good["measured"]["peak"] / good["planned_peak"] < 1.05
    # Three steps of 8 micro-batches are measured. A micro-batch of 64 tokens takes 1 ms or more
    assert 0 < good["measured"]["tokens_per_second"] < 2 * 64 * 1000
    assert found["best"] == 1
    opened = dataclasses.replace(
        recipe,
        strategy=Strategy(kind="auto", mixed_precision=None),
        batch=Batch(global_batch_size=16, micro_batch_size="auto"),
    )
    chosen, why = trials.measured_choice(opened, machine)
    assert chosen == written.recipe
    assert found["file"] in why


@pytest.mark.long
def test_plan_of_weights_that_are_gathered_in_float32(tmp_path):
    """FSDP has a second group for A_log, dt_bias and D. The plan runs the same code."""
    (tmp_path / "hybrid.yaml").write_text(
        "run: {name: hybrid, max_steps: 3}\n"
        "model: {config: {model_type: nemotron_h, vocab_size: 8000, hidden_size: 512,\n"
        "  intermediate_size: 2048, num_attention_heads: 8, num_key_value_heads: 2, head_dim: 64,\n"
        "  mamba_num_heads: 16, mamba_head_dim: 64, ssm_state_size: 16, n_groups: 2,\n"
        "  layers_block_type: [mamba, attention, mamba, mlp], num_hidden_layers: 4}}\n"
        "data: {train: [none.txt], tokenizer: bytes, sequence_length: 128, packing: false}\n"
        "batch: {global_batch_size: 2, micro_batch_size: 1}\n"
    )
    arguments = [f"recipe={tmp_path / 'hybrid.yaml'}"]
    recipe = load_recipe(arguments, ranks=2, files=False).recipe
    planned = make_plan(recipe, known_machine("cpu", nodes=1, gpus_per_node=2)).tensors
    (measured,) = measure_recipes([arguments], ranks=2, gpus=False)
    assert planned == pytest.approx(measured.peak, rel=0.01)
