"""Checkpoints load exactly under every other strategy and number of ranks. Failing saves."""

import json
from pathlib import Path

import pytest

from tests.distributed.checkpoint_worker import RUNS
from tests.distributed.launching import amount, cases, forked

WORKER = Path(__file__).with_name("checkpoint_worker.py")


@pytest.fixture(scope="module")
def results(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints")
    forked(WORKER, folder, amount(request), ranks=4, timeout=240).check()
    return json.loads((folder / "results.json").read_text())


@pytest.mark.parametrize("of", cases(list(RUNS), ["quick"]))
def test_checkpoint_loads_under_any_strategy_and_rank_count(results, of):
    found = results["deviations0"][0]
    count = len(RUNS[of])
    assert len(found) >= count * (count - 1) + count - 1
    assert {
        name: value
        for by_rank in results["deviations0"]
        for name, value in by_rank.items()
        if value != 0.0
    } == {}


def test_tied_weights_are_saved_once(results):
    names = results["names0"][0]
    assert "model.model.embed_tokens.weight" in names
    assert not any("lm_head" in name or "_checkpoint_wrapped" in name for name in names)
    assert "optimizer.model.layers.0.mlp.up_proj.weight.exp_avg_sq" in names


def test_lora_checkpoint_holds_only_the_adapters(results):
    found = results["deviations1"][0]
    assert len(found) == 9
    assert set(found.values()) == {0.0}
    assert all(".lora_" in name for name in results["names1"][0])


def test_int8_optimizer_state_loads_exactly(results):
    found = results["deviations2"][0]
    assert len(found) == 9
    assert set(found.values()) == {0.0}
    adamw = {"step", "exp_avg", "exp_avg_scale", "exp_avg_sq", "exp_avg_sq_scale"}
    for name, keys in {"layers.0.mlp.up_proj": {"momentum_buffer"}, "embed_tokens": adamw}.items():
        start = f"optimizer.model.{name}.weight."
        found = {key.removeprefix(start) for key in results["names2"][0] if key.startswith(start)}
        assert found == keys


def test_asynchronous_save_holds_state_at_its_start(results):
    assert results["changed"][0] > 0
    assert results["snapshot"] == [0.0] * 4, "training changed tensors before they were copied"
    assert min(results["blocked"]) > 0, "the optimizer step did not wait for the copy"
    assert results["early"] == [0] * 4
    assert results["ended"] == [[1, None, 2, None]] * 4
    assert results["random"] == [True] * 4
    assert results["same_bytes"] == [True] * 4
    assert results["listed"][0] == ["step_00000003", "step_00000004"], "keep_last: 2"


def test_failed_save_keeps_older_checkpoints_on_all_ranks(results):
    assert all(notes == results["failed_saves"][0] for notes in results["failed_saves"])
    before = ["step_00000003", "step_00000004"]
    full, again, no_folder, lost_lock, good = results["failed_saves"][0]
    assert full == ["rank 2: [Errno 28] No space left on device", True, 1, "step_00000004", before]
    assert again == [full[0], True, 2, "step_00000004", before]
    assert "rank 0: [Errno 20] Not a directory" in no_folder[0]
    assert no_folder[1:] == [True, 3, "step_00000004", before]
    assert lost_lock == ["rank 0: another job owns this folder", True, 4, "step_00000004", before]
    assert good == [None, False, 0, "step_00000014", ["step_00000004", "step_00000014"]]
    assert results["threads"] == [[]] * 4


def test_damaged_checkpoint_is_rejected_on_all_ranks(results):
    for messages, (first, then) in zip(results["messages"], results["found"], strict=True):
        assert first == "step_00000004"
        assert "none of the 2 checkpoints" in then
        assert len(messages) == 3
    assert "rank_00003.safetensors has changed since it was written" in results["messages"][0][0]
