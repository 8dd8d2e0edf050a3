"""Tests of the predicted speed: against published figures, and of what it includes."""

import dataclasses

import numpy as np
import pytest

from launcher.models.ring import make_plan
from launcher.models.row_division import RowDivision
from launcher.planner.machine import known_machine
from launcher.planner.profile import profile_model
from launcher.planner.speed import RANGE, SHARED, estimate_time, ring_exchange
from launcher.planner.work import Work
from tests.unit.planner.published_speeds import errors

SMALL = """\
run: {name: small, max_steps: 10}
model:
  config: {model_type: llama, vocab_size: 8000, hidden_size: 512, intermediate_size: 1536, num_hidden_layers: 8,
           num_attention_heads: 8, num_key_value_heads: 4}
data: {train: [train.txt], tokenizer: bytes, sequence_length: 1024}
batch: {global_batch_size: 8, micro_batch_size: 1}
strategy: {kind: fsdp}
"""


@pytest.fixture(scope="module")
def load(loader):
    return loader("small", SMALL)


def step_time(recipe, gpus=8, **rates):
    machine = known_machine("h100", nodes=1, gpus_per_node=gpus, overrides=rates)
    return estimate_time(
        Work(profile_model(recipe, device="cuda"), recipe, ranks=machine.ranks), machine
    )


@pytest.mark.long
def test_predictions_are_close_to_published_figures(tmp_path):
    """The bounds, and the range that a plan prints, are those that docs/engineering/speed.md names."""
    found = errors(tmp_path)
    low, high = RANGE
    within = [low <= 1 / (1 + error) <= high for error in found]
    assert sum(within) >= 0.9 * len(found)
    assert max(map(abs, found)) < 0.30
    assert sum(map(abs, found)) / len(found) < 0.12


@pytest.mark.slow
def test_compiled_blocks_move_less_and_launch_faster(load):
    """The small model waits for the host; with large rows its traffic matters."""
    for rows in ((), ("batch.global_batch_size=256", "batch.micro_batch_size=32")):
        eager, compiled = step_time(load(*rows)), step_time(load(*rows, "model.compile=true"))
        assert compiled.forward < eager.forward
        assert compiled.backward < eager.backward


def test_small_blocks_take_the_time_of_their_launches(load):
    seconds = step_time(load())
    assert step_time(load(), half_flops=1e18).forward == pytest.approx(seconds.forward, rel=0.2)
    (saved,) = profile_model(load(), device="cuda").saved.values()
    blocks = 8 * saved[0].launches * 15e-6
    assert blocks < seconds.forward < 1.5 * blocks


def test_collectives_slow_compute_down(load):
    """Collectives that compute hides still take a share of its rate."""
    recipe = load("batch.global_batch_size=512", "batch.micro_batch_size=64")
    free = {"memory_bandwidth": 1e30, "intra_node_bandwidth": 1e12}
    weights = profile_model(recipe, device="cuda").parameters
    moved = (2 + 2 + 4) * weights * 7 / 8 / 1e12  # two all-gathers, and a reduction in float32
    latency = 3 * 9 * 20e-6
    expected = SHARED * (moved + latency)
    assert step_time(recipe, **free).communication == pytest.approx(expected, rel=0.01)
    alone = dataclasses.replace(
        recipe, batch=dataclasses.replace(recipe.batch, global_batch_size=64)
    )
    assert step_time(alone, gpus=1, **free).communication < 1e-9


def test_copies_of_fsdp_and_casts_of_ddp_take_bandwidth(load):
    slow = {"memory_bandwidth": 1e9, "intra_node_bandwidth": 1e30}
    weights = profile_model(load(), device="cuda").parameters
    latency = SHARED * 3 * 9 * 20e-6
    fsdp = step_time(load(), **slow).communication - latency
    assert fsdp == pytest.approx((2 * 4 + 6) * weights / 1e9, rel=0.01)
    ddp = step_time(load("strategy.kind=ddp"), **slow).communication
    buckets = 8 + 8  # a copy to them, and a division there
    assert ddp == pytest.approx((2 * 6 + buckets) * weights / 1e9, rel=0.01)


@pytest.mark.slow
def test_one_rank_copies_less_than_fsdp(load):
    """Bytes of a trained parameter in steps of one and of three micro-batches; of FSDP those of two
    all-gathers (a cast and a copy) and a reduction (a cast, a copy, and an addition to those of
    earlier micro-batches). Adapters are all that is copied with LoRA."""
    slow = {"memory_bandwidth": 1e9}
    weights = profile_model(load(), device="cuda").parameters

    def moved(count, *overrides):
        recipe = load(f"batch.global_batch_size={count}", *overrides, ranks=1)
        return step_time(recipe, gpus=1, **slow).communication * 1e9

    one = "strategy.reshard_after_forward=false"
    assert moved(1, one) == moved(1, "strategy.kind=ddp") == pytest.approx(12 * weights)
    assert moved(3, one) == pytest.approx((12 + 2 * 10) * weights)
    fsdp = "strategy.reshard_after_forward=true"
    assert moved(1, fsdp) == pytest.approx((2 * 10 + 14) * weights, rel=0.01)
    assert moved(3, fsdp) == pytest.approx((3 * (2 * 10 + 14) + 2 * 12) * weights, rel=0.01)
    trained = profile_model(load("lora.rank=8", ranks=1), device="cuda").trained
    assert moved(1, "lora.rank=8") == pytest.approx(12 * trained)


def test_ranks_with_different_experts_exchange_tokens_in_place_of_weights(load):
    """The network is so slow that neither latency nor compute matters."""
    config = {"model_type": "qwen3_moe", "num_experts": 64, "num_experts_per_tok": 4}
    config |= {"moe_intermediate_size": 128}
    written = load(*(f"model.config.{key}={value}" for key, value in config.items()))
    slow = {"memory_bandwidth": 1e30, "intra_node_bandwidth": 1e3, "half_flops": 1e30}
    profile = profile_model(written, device="cuda")
    experts = 8 * 64 * 3 * 512 * 128
    for size in (1, 4, 8):
        strategy = dataclasses.replace(written.strategy, expert_parallel_size=size)
        recipe = dataclasses.replace(written, strategy=strategy)
        # Two all-gathers in bfloat16, and a reduction in float32
        moved = (2 + 2 + 4) * (profile.parameters - experts) * 7 / 8
        moved += (2 + 2 + 4) * experts / size * (1 - size / 8)
        # Four exchanges of each layer, of the rows for four experts
        moved += 4 * 8 * 1024 * 4 * 512 * 2 * (1 - 1 / size)
        assert step_time(recipe, **slow).communication == pytest.approx(moved / 1e3, rel=0.01)


def test_tensor_parallel_ranks_sum_results_and_gather_less(load):
    """The network is so slow that neither latency nor compute matters."""
    slow = {"memory_bandwidth": 1e30, "intra_node_bandwidth": 1e3, "half_flops": 1e30}
    for size in (1, 2, 4):
        strategy = dataclasses.replace(load().strategy, tensor_parallel_size=size)
        recipe = dataclasses.replace(load(), strategy=strategy)
        part = profile_model(recipe, device="cuda").parameters
        # Two all-gathers in bfloat16, and a reduction in float32, of each micro-batch
        moved = size * (2 + 2 + 4) * part * (1 - size / 8)
        # Four sums in each layer: each is a reduction and an all-gather
        moved += size * 8 * 4 * 2 * 1024 * 512 * 2 * (1 - 1 / size)
        assert step_time(recipe, **slow).communication == pytest.approx(moved / 1e3, rel=0.01)


SLOW = {"memory_bandwidth": 1e30, "intra_node_bandwidth": 1e3, "half_flops": 1e30}

POSITIONS = "model.config.max_position_embeddings=65536"


def of_sizes(recipe, **sizes):
    return dataclasses.replace(recipe, strategy=dataclasses.replace(recipe.strategy, **sizes))


def work_of(recipe, gpus=8):
    machine = known_machine("h100", nodes=1, gpus_per_node=gpus, overrides=SLOW)
    return Work(profile_model(recipe, device="cuda"), recipe, ranks=gpus), machine


def test_context_parallel_ranks_exchange_as_few_key_heads_as_they_need(load):
    """8 query heads of 64 features, and 4 of keys and values, of which 8 ranks need copies."""
    parameters = profile_model(load(), device="cuda").parameters
    for size in (1, 2, 4, 8):
        recipe = of_sizes(load(), context_parallel_size=size)
        # Two all-gathers in bfloat16, and a reduction in float32, of each micro-batch
        moved = size * (2 + 2 + 4) * parameters * 7 / 8
        # An exchange of each layer and back in the forward pass, and both in the backward pass
        features = 64 * 2 * (8 + max(4, size))
        moved += size * 8 * 2 * 1024 / size * features * 2 * (1 - 1 / size)
        assert step_time(recipe, **SLOW).communication == pytest.approx(moved / 1e3, rel=0.01)


def test_a_ring_sends_what_its_plan_says(load):
    """The busiest group of a row of one document."""
    length = 1024
    for size, ring in ((2, 2), (8, 2), (8, 8)):
        recipe = of_sizes(load(), context_parallel_size=size, context_parallel_ring=ring)
        sent = []
        for group in range(ring):
            division = RowDivision(size, ring, group * (size // ring))
            rows = division.place(np.array([0, length]), rows=1, width=length)
            plan = make_plan(rows, None)
            sent.append(sum(end - start for step in plan.steps for start, end in step.sent))
        heads = max(4, size // ring) / (size // ring)
        found = ring_exchange(*work_of(recipe))
        assert found is not None
        assert found.sent == max(sent) * heads * 2 * 64 * 2


def test_compute_waits_for_a_ring_only_if_its_network_is_slow(load):
    recipe = of_sizes(load("data.sequence_length=65536", POSITIONS), context_parallel_size=8)
    assert ring_exchange(*work_of(recipe)) is None
    recipe = of_sizes(recipe, context_parallel_ring=4)
    slow = ring_exchange(*work_of(recipe))
    assert slow is not None
    assert slow.wait == pytest.approx(slow.sent / 1e3, rel=0.01)
    assert slow.wait_backward == pytest.approx(2 * slow.wait, rel=0.01)
    machine = known_machine("h100", nodes=1, gpus_per_node=8)
    fast = ring_exchange(work_of(recipe)[0], machine)
    assert (fast.sent, fast.wait, fast.wait_backward) == (slow.sent, 0, 0)
    times = step_time(recipe, **SLOW), step_time(of_sizes(recipe, context_parallel_ring=2), **SLOW)
    assert times[0].communication != times[1].communication


def test_the_ring_of_a_plan_follows_from_the_heads(load):
    for size, ring, tensor in ((4, 1, 1), (8, 1, 1), (16, 2, 1), (4, 1, 2), (8, 2, 2)):
        recipe = of_sizes(load(), context_parallel_size=size, tensor_parallel_size=tensor)
        work = Work(profile_model(recipe, device="cuda"), recipe, ranks=16)
        assert (work.ring, work.heads_ranks) == (ring, size // ring)
