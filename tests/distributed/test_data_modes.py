"""Batching does not change the training.

Mixtures, token budgets, packing, streaming, classification and custom data train to equal losses on
any number of ranks and under every strategy.
"""

import json
import sys

import pytest

from tests import REPOSITORY
from tests.distributed.launching import forked, run, torchrun
from tests.run_files import read_lines, write_lines

pytestmark = pytest.mark.long  # tests/unit/data compares the order of samples on any ranks


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("modes")
    forked(REPOSITORY / "tests/distributed/data_worker.py", folder, ranks=2, timeout=240).check()
    return json.loads((folder / "results.json").read_text())


def assert_same_training(one, other, *, tolerance=1e-5):
    assert len(one["losses"]) == len(other["losses"]) > 0
    assert one["losses"] == pytest.approx(other["losses"], rel=tolerance)
    assert one["norms"] == pytest.approx(other["norms"], rel=tolerance)
    assert one["counts"] == other["counts"], "numbers of targets and tokens differ"


def test_mixture_is_independent_of_rank_count(results):
    both, alone = results["mixture, 2 ranks"], results["mixture, 1 rank"]
    assert_same_training(both, alone)
    # The part of each source in the loss of a step, and in its targets
    for step, loss in enumerate(both["losses"]):
        parts = both["parts"][step]
        assert parts == pytest.approx(alone["parts"][step], rel=1e-5)
        assert sum(parts[:2]) == pytest.approx(loss, rel=1e-5)
        assert sum(parts[2:]) == pytest.approx(1.0, rel=1e-5)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_token_budget_does_not_change_losses(results, strategy):
    by_tokens = results[f"by tokens, 2 ranks, {strategy}"]
    assert_same_training(by_tokens, results["by rows, 1 rank"])
    assert results["by rows, 1 rank"]["micro_batches"] == [1, 1, 1, 1]


def test_token_budget_handles_the_incomplete_last_step(results):
    assert_same_training(
        results["by tokens, 2 ranks, two passes"], results["by tokens, 1 rank, two passes"]
    )
    assert len(results["by tokens, 1 rank, two passes"]["losses"]) == 15, (
        "60 sequences, two epochs, 8 per step"
    )
    assert len(set(results["by tokens, 1 rank, two passes"]["micro_batches"])) > 1, (
        "the number of micro-batches must depend on the lengths"
    )


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("model", ["llama", "mistral", "gpt2"])
def test_packing_does_not_change_the_loss(results, model, attention):
    packed, unpacked = results[f"packed, {model}, {attention}"], results[f"not packed, {model}"]
    assert packed["tokens"] == unpacked["tokens"] > 300
    assert packed["loss"] == pytest.approx(unpacked["loss"], rel=1e-5)
    method = "variable-length attention" if attention == "sdpa" else "a mask"
    assert f"kept apart by {method}" in packed["described"][0]


def test_packing_does_not_change_the_gradient(results):
    unpacked = results["a step of all, not packed"]
    for name in ("a step of all, packed", "a step of all, packed, offload and checkpointing"):
        assert results[name]["losses"] == pytest.approx(unpacked["losses"], rel=1e-5)
        assert results[name]["norms"] == pytest.approx(unpacked["norms"], rel=1e-5)
        assert results[name]["micro_batches"] == unpacked["micro_batches"]


def test_validation_sets_are_evaluated_separately(results):
    sets = results["two sets"]["sets"]
    assert list(sets) == ["a", "b"]
    assert sets["a"][1] > sets["b"][1] > 30
    assert sets["a"] == pytest.approx(
        [results["packed, llama, sdpa"]["loss"], results["packed, llama, sdpa"]["tokens"]]
    )
    whole = sum(loss * tokens for loss, tokens in sets.values()) / sum(
        tokens for _, tokens in sets.values()
    )
    assert results["two sets"]["loss"] == pytest.approx(whole)


def test_stream_is_independent_of_ranks_and_workers(results):
    one_rank = results["stream, 1 rank"]
    assert_same_training(results["stream, 2 ranks"], one_rank)
    assert_same_training(results["stream, 2 ranks, loader processes"], one_rank)
    assert results["stream, another seed"]["counts"] != one_rank["counts"]


@pytest.mark.parametrize("model", ["llama", "bert"])
def test_classification_is_independent_of_rank_count(results, model):
    one_rank = results[f"classes, {model}, 1 rank"]
    assert_same_training(results[f"classes, {model}, 2 ranks"], one_rank)
    assert_same_training(results[f"classes, {model}, 2 ranks, by tokens, fsdp"], one_rank)
    assert all(targets == 8 for targets, _ in one_rank["counts"]), "expected one target per text"
    assert results["classes"]["tokens"] == 40
    scores = results["classes"]["scores"]
    assert scores == results["classes, 1 rank"]["scores"]
    assert 0 < scores["accuracy"] <= 1
    assert 0 < scores["f1"] <= 1


def test_custom_model_and_data_train(results):
    """The loss is a sum over the batch, divided by the number of targets in the step.

    This must hold for any number of ranks and micro-batches, and for the incomplete last step.
    """
    one_rank = results["images, 1 rank"]
    assert_same_training(results["images, 2 ranks"], one_rank)
    assert_same_training(results["images, 2 ranks, fsdp"], one_rank)
    assert [targets for targets, _ in one_rank["counts"]] == [8] * 12 + [4]
    assert one_rank["losses"][-1] < 0.7 * one_rank["losses"][0]
    assert results["images"]["tokens"] == 10


BLEND = """
run: {name: blend, max_steps: 8, seed: 3}
model: {config: {model_type: llama, vocab_size: 257, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 1,
  num_attention_heads: 2, num_key_value_heads: 1, max_position_embeddings: 64}}
data: {kind: text, tokenizer: bytes, sequence_length: 32, workers: 0, cache: cache, packing: false, mixture_unit: tokens,
  train: {a: {files: [a.jsonl], weight: 1, loss_weight: 0.5}, b: {files: [b.jsonl], weight: 2, max_epochs: 1.5},
    c: {files: [c.jsonl], weight: 1}},
  mixture_stages: [{until_step: 2, weights: {a: 1, b: 1, c: 0}}, {until_step: 4, weights: {a: 0, b: 1, c: 1}}]}
batch: {global_batch_size: 8, micro_batch_size: 2}
strategy: {kind: ddp, mixed_precision: null}
optimizer: {learning_rate: 1.0e-3}
checkpoint: {every_steps: 3}
logging: {every_steps: 1}
"""


def test_a_blend_is_exact_under_resume_and_other_ranks(tmp_path):
    """With a stage that ends behind the checkpoint, and a source that is used up."""
    for name, count, size in (("a", 30, 9), ("b", 12, 25), ("c", 40, 14)):
        rows = [{"text": f"{name}{number} " + name * size} for number in range(count)]
        write_lines(tmp_path / f"{name}.jsonl", rows)
    (tmp_path / "blend.yaml").write_text(BLEND)
    train, recipe = REPOSITORY / "launcher/train.py", "recipe=blend.yaml"
    run([sys.executable, train, recipe, "run.dir=whole"], cwd=tmp_path).check()
    torchrun(train, recipe, "run.dir=parts", "run.max_steps=3", ranks=2, cwd=tmp_path).check()
    output = (
        torchrun(train, recipe, "run.dir=parts", "run.max_steps=8", ranks=2, cwd=tmp_path)
        .check()
        .output
    )
    assert "until step 2 (data.mixture_stages): " in output
    whole, parts = (
        [line for line in read_lines(tmp_path / name / "metrics.jsonl") if "loss" in line]
        for name in ("whole", "parts")
    )
    assert [line["step"] for line in parts] == [line["step"] for line in whole] == [*range(1, 9)]
    for one, other in zip(whole, parts, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-5)
        assert one["shares"] == pytest.approx(other["shares"])
        assert one["loss_tokens"] == other["loss_tokens"]
    assert [line["shares"]["c"] for line in whole[:2]] == [0, 0]
    assert [line["shares"]["a"] for line in whole[2:4]] == [0, 0]
    listed = [
        run([sys.executable, "-m", "launcher", "rows", "parts", f"step={step}"], cwd=tmp_path)
        for step in range(1, 9)
    ]
    texts = [each.check().output for each in listed]
    assert "shares of the 8 sequences: a " in texts[0]
    assert "c 0.0% (planned 0.0%)" in texts[1]
    used = [line for text in texts for line in text.splitlines() if "b.jsonl:" in line]
    assert len(used) == 18, "of 12 rows, one and a half times"
    refused = run([sys.executable, train, recipe, "run.dir=long", "data.train.a.max_epochs=1",
                   "data.train.c.max_epochs=0.1"], cwd=tmp_path).check(2)  # fmt: skip
    assert "all sources are used up (max_epochs) after 52 sequences, 6 steps" in refused.output
