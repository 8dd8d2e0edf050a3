"""`launcher plan --measure` on two CPU ranks, with a valid and a failing configuration."""

import dataclasses

import pytest

from launcher.planner import fastest, search
from launcher.planner.machine import known_machine
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
    monkeypatch.setattr(fastest, "fastest_of_each_kind", lambda *_, **__: [broken, written])
    found = fastest.measure_fastest(arguments, recipe, machine)
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
    chosen, _, why = fastest.measured_choice(opened, machine)
    assert chosen == written.recipe
    assert found["file"] in why
