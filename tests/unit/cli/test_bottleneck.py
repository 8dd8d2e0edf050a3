"""Tests of what limits the speed of a run, as `launcher report` shows it."""

import pytest

from launcher.cli.bottleneck import (
    TOLERATED,
    StepProfile,
    bottleneck,
    profile_of_run,
    step_shares,
)
from launcher.recipe.load import load_recipe

BOTTLENECKS = [
    ("strategy.kind=ddp", {}, {}, "compute, 100% of a step; no override"),
    ("strategy.kind=fsdp", {}, {"free_memory": 0.5}, "try model.compile=true"),
    ("strategy.tensor_parallel_size=2", {}, {"free_memory": 0.5}, "no override"),
    ("lora.quantize=nf4", {}, {"free_memory": 0.5}, "no override"),
    ("strategy.kind=ddp", {"data": 0.2}, {}, "data, 20% of a step; try data.workers=4"),
    ("data.workers=8", {"data": 0.2}, {}, "try data.prefetch_factor=4"),
    ("strategy.kind=fsdp", {"communication": 0.3}, {"nodes": 2, "ranks": 4}, "try strategy.replicate=2"),
    ("strategy.expert_parallel_size=4", {"communication": 0.3}, {"nodes": 2, "ranks": 4}, "try strategy.reshard_after_forward="),
    ("strategy.kind=fsdp", {"communication": 0.3}, {"micro_batches": 2}, "try strategy.sync_every_micro_batch=false"),
    ("strategy.kind=fsdp", {"communication": 0.3}, {}, "try strategy.reshard_after_forward=false"),
    ("strategy.kind=fsdp", {"communication": 0.3}, {"free_memory": 0.1}, "try batch.global_batch_size=128"),
    ("strategy.kind=fsdp", {"communication": 0.3}, {"slow_rank": "rank 3"}, "wait for: rank 3"),
    ("strategy.pipeline_parallel_size=2", {"stages": 0.3}, {}, "waits for other stages, 30% of a step; try batch.micro_batch_size="),
    ("strategy.cpu_offload={}", {"communication": 0.3}, {}, "host copies and communication, 30% of a step; try strategy.cpu_offload="),
    ("activation_checkpointing={mode: full}", {"recomputation": 0.25}, {}, "25% of a step; try activation_checkpointing.mode=sel"),
    ("activation_checkpointing={mode: selective}", {"recomputation": 0.25}, {"free_memory": 0.1}, "no override"),
    ("strategy.kind=ddp", {"optimizer": 0.3}, {"ranks": 2}, "optimizer, 30% of a step; try strategy.shard_optimizer=true"),
    ("strategy.kind=fsdp", {"optimizer": 0.3, "data": 0.04}, {}, "optimizer, 30% of a step; try batch.global_batch_size=128"),
    ("logging.every_steps=2", {"logging": 0.2}, {}, "logging, 20% of a step; try logging.every_steps=20"),
]  # fmt: skip


@pytest.mark.parametrize(("override", "shares", "shape", "expected"), BOTTLENECKS)
def test_names_bottleneck_and_one_override(override, shares, shape, expected, folder):
    recipe = load_recipe(["recipe=x.yaml", "strategy.kind=fsdp", override], ranks=None).recipe
    whole = dict.fromkeys(TOLERATED, 0.0) | shares
    text = bottleneck(StepProfile(whole | {"compute": 1 - sum(shares.values())}, **shape), recipe)
    assert expected in text
    assert text.count("=") <= 1


SMALLER = [
    (["strategy.reshard_after_forward=false", "batch.micro_batch_size=2"], "strategy.reshard_after_forward=true"),
    (["strategy.reshard_after_backward=false"], "strategy.reshard_after_backward=true"),
    (["batch.micro_batch_size=4"], "batch.micro_batch_size=2"),
    (["data.packing=false", "batch.micro_batch_size=null", "batch.micro_batch_tokens=512"], "batch.micro_batch_tokens=256"),
    ([], "activation_checkpointing.mode=selective"),
    (["activation_checkpointing.mode=selective"], "activation_checkpointing.mode=full"),
    (["activation_checkpointing={mode: selective, budget: 0.5}"], "activation_checkpointing={mode: full, budget: null}"),
    (["activation_checkpointing.mode=full"], "strategy.cpu_offload={}"),
    (["activation_checkpointing.mode=full", "strategy.kind=ddp"], "strategy.shard_optimizer=true"),
    (["activation_checkpointing.mode=full", "strategy.kind=ddp", "strategy.shard_optimizer=true"], "strategy.kind=fsdp"),
]  # fmt: skip


@pytest.mark.parametrize(("overrides", "expected"), SMALLER)
def test_advice_against_retried_allocations_is_a_valid_recipe(overrides, expected, folder):
    usual = ["strategy.kind=fsdp", "data.sequence_length=256", "batch.micro_batch_size=1"]
    overrides = ["recipe=x.yaml", *usual, *overrides]
    profile = StepProfile({}, ranks=2, free_memory=0.1, retries=12)
    text = bottleneck(profile, load_recipe(overrides, ranks=2).recipe)
    assert text == (
        f"memory, 12 retried allocations a step, which wait for the GPU; try {expected}"
    )
    changed = [] if "shard_optimizer=true" in str(overrides) else [expected]
    load_recipe([*overrides, *changed], ranks=2)


def test_growing_segments_come_first_where_a_user_has_turned_them_off(folder):
    recipe = load_recipe(["recipe=x.yaml"], ranks=1).recipe
    text = bottleneck(StepProfile({}, retries=12, segments_grow=False), recipe)
    assert text.endswith("try the environment variable PYTORCH_ALLOC_CONF=expandable_segments:True")


def test_step_shares():
    seconds = {"forward": 0.3, "backward": 0.45, "optimizer": 0.1, "logging": 0.05, "data": 0.1}
    shares = step_shares(seconds | {"communication": 0.2}, recomputed_share=0.2)
    assert sum(shares.values()) == pytest.approx(1.0)
    assert shares["communication"] == pytest.approx(0.2)
    assert shares["recomputation"] == pytest.approx(0.2 * (0.75 - 0.2))


def test_profile_of_a_run_by_its_files():
    slow = {"slowest_rank": 3, "slowest_rank_seconds": 0.9, "fastest_rank_seconds": 0.3}
    usual = {"peak_memory_bytes": 60}
    records = [{"step": step, **usual, **slow} for step in range(10, 31)]
    built = {"device_memory": 80, "ranks_per_node": 4, "micro_batches": 2, "segments_grow": False}
    profile = profile_of_run(records, {"forward": 1.0}, built, ranks=8, retries=42)
    assert profile == StepProfile(
        {"data": 0.0, "optimizer": 0.0, "logging": 0.0, "stages": 0.0, "communication": 0.0}
        | {"compute": 1.0, "recomputation": 0.0},
        ranks=8,
        nodes=2,
        micro_batches=2,
        free_memory=0.25,
        slow_rank="rank 3 takes 3.0 times as long as the fastest",
        retries=2.1,
        segments_grow=False,
    )
    records[-3]["slowest_rank"] = 1
    assert profile_of_run(records, {"forward": 1.0}, built, ranks=8, retries=42).slow_rank is None
    assert profile_of_run([], {}, built, ranks=8, retries=42) is None
