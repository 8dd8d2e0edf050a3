"""Tests of the memory trace, against hand-calculated values, and of its extrapolation."""

import dataclasses
import functools
import json
import types

import pytest
import torch
import torch.distributed as dist
from torch import nn

from launcher.console import bytes_as_text
from launcher.models import head as head_module
from launcher.models import linear_chunks, tracing
from launcher.models.micro_batch import MicroBatch
from launcher.planner import plan, trace
from launcher.planner.estimate import estimate_memory
from launcher.planner.machine import known_machine
from launcher.planner.profile import profile_model
from launcher.planner.trace import UntraceableError, trace_step
from launcher.planner.work import Work
from launcher.recipe.schema import (
    ActivationCheckpointing,
    Batch,
    CpuOffload,
    Data,
    Distillation,
    Images,
    MixedPrecision,
    Model,
    MultiToken,
    Recipe,
    Run,
    Strategy,
)
from launcher.training import fake_tensors
from tests.image_models import make_model

LAYERS, HIDDEN, VOCABULARY, LENGTH = 3, 64, 512, 64
DEEP = 7
"""Blocks of a model that is extrapolated."""
CONFIG = {
    "model_type": "llama", "vocab_size": VOCABULARY, "hidden_size": HIDDEN, "intermediate_size": 128,
    "num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}  # fmt: skip
BLOCK = HIDDEN * HIDDEN * 2 + HIDDEN * HIDDEN // 2 * 2 + 3 * HIDDEN * 128 + 2 * HIDDEN
PARAMETERS = LAYERS * BLOCK + 2 * VOCABULARY * HIDDEN + HIDDEN
LOGITS = LENGTH * VOCABULARY * 4
"""Bytes of the float32 logits of one sequence."""


def recipe(*, checkpointing=None, micro_batch_size=2, packing=False, layers=LAYERS, **strategy):
    strategy = {"kind": "fsdp", "mixed_precision": None} | strategy
    return Recipe(
        run=Run(name="small", max_steps=3),
        model=Model(config=CONFIG | {"num_hidden_layers": layers}),
        data=Data(train=("README.md",), tokenizer="bytes", sequence_length=LENGTH, packing=packing),
        batch=Batch(global_batch_size=8, micro_batch_size=micro_batch_size),
        strategy=Strategy(**strategy),
        activation_checkpointing=None
        if checkpointing is None
        else ActivationCheckpointing(mode=checkpointing),
    )


@functools.cache
def step(changed=None, *, ranks=2, device="cpu", micro_batches=1, **settings):
    """Return the trace of a recipe. Tests share it."""
    return trace_step(
        changed or recipe(**settings), ranks=ranks, device=device, micro_batches=micro_batches
    )


def near(value, expected, *, by=0.005):
    assert value == pytest.approx(expected, rel=by)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("packing", [True, False])
def test_more_ranks_of_a_row_than_heads_are_a_ring(device, packing):
    """Partial results in float32 are in place of the rest of the row."""
    precision = None if device == "cpu" else MixedPrecision()
    one = recipe(packing=packing, mixed_precision=precision, micro_batch_size=1)
    found = []
    for size in (4, 8):
        strategy = dataclasses.replace(one.strategy, context_parallel_size=size)
        changed = dataclasses.replace(one, strategy=strategy)
        found.append(trace_step(changed, ranks=8, device=device, micro_batches=1))
        estimated = estimate_memory(
            Work(profile_model(changed, device=device), changed, ranks=8)
        ).after_forward.activations
        near(estimated, found[-1].after_forward.activations, by=0.5)
    heads, ring = (step.after_forward.activations for step in found)
    assert 0.4 * heads < ring < 0.7 * heads


def test_sharded_states_and_logits():
    found = step()
    near(found.held.parameters, PARAMETERS * 4 / 2)  # plus the rotary frequencies
    near(found.held.optimizer, PARAMETERS * 8 / 2)
    assert found.held.gradients == 0
    # In float32 the loss saves only log-probabilities. The backward pass adds their gradient and
    # the gradient of the logits.
    near(found.after_forward.logits, 2 * LOGITS)
    near(found.peak.components.logits, 3 * 2 * LOGITS)
    near(found.phases["optimizer"].components.gradients, PARAMETERS * 4 / 2)
    assert found.peak.phase == "backward"
    assert found.peak.where == "lm_head"
    assert not dist.is_initialized()


def test_ddp_keeps_unreduced_gradients_and_buckets():
    found = step(kind="ddp", micro_batches=2)
    near(found.held.parameters, PARAMETERS * 4)
    near(found.held.gradients, PARAMETERS * 4)
    near(found.peak.components.gradients, 2 * PARAMETERS * 4)
    synced = step(kind="ddp", micro_batches=2, sync_every_micro_batch=True)
    near(synced.peak.components.gradients, PARAMETERS * 4)


def test_checkpointing_keeps_block_inputs():
    none, selective, attention, full = (
        step(checkpointing=mode).after_forward.activations
        for mode in (None, "selective", "all_but_attention", "full")
    )
    assert full < attention < selective < none
    # Its outputs, and in float32 a number for each head and token
    near(attention - full, LAYERS * 2 * LENGTH * HIDDEN * 4, by=0.15)
    # The inputs of the blocks, the output of the last block and the final norm, each
    # (2, tokens, hidden) in float32, and the rotary embedding
    near(full, (LAYERS + 4) * 2 * LENGTH * HIDDEN * 4, by=0.15)


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(
            {"checkpointing": "full", "sync_every_micro_batch": False}, marks=pytest.mark.long
        ),
        {"kind": "ddp", "mixed_precision": MixedPrecision()},
        {"kind": "ddp", "mixed_precision": MixedPrecision(), "ranks": 1},
        pytest.param(
            {"reshard_after_backward": False, "mixed_precision": MixedPrecision(), "packing": True},
            marks=pytest.mark.long,
        ),
        pytest.param(
            {"checkpointing": "full", "cpu_offload": CpuOffload(pin_memory=True)},
            marks=pytest.mark.long,
        ),
    ],
    ids=["full, unsynced", "ddp bf16", "one rank", "packed, kept unsharded", "offload"],
)
def test_extrapolation_matches_a_full_trace(settings, monkeypatch):
    settings |= {"device": "cuda", "micro_batches": 2, "layers": DEEP}
    extrapolated = step(**settings)
    monkeypatch.setattr(trace, "EDGE", 100)
    whole = step.__wrapped__(**settings)
    near(extrapolated.peak.total, whole.peak.total, by=0.001)
    peaks = [(step.peak.phase, step.peak.where) for step in (extrapolated, whole)]
    assert peaks[0] == peaks[1]
    for phase, moment in whole.phases.items():
        near(extrapolated.phases[phase].total, moment.total, by=0.001)
    assert extrapolated.held == whole.held
    assert extrapolated.host == whole.host


HYBRID = {
    "model_type": "qwen3_5_text",
    "num_hidden_layers": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "head_dim": 16,
}


@pytest.mark.long
def test_blocks_that_differ_periodically_are_extrapolated(monkeypatch):
    """Three of four have other weights. All were traced, which takes minutes for 32 of them."""
    config = CONFIG | HYBRID
    hybrid = dataclasses.replace(
        recipe(checkpointing="full", mixed_precision=MixedPrecision()),
        model=Model(config=config),
    )
    settings = {"ranks": 2, "device": "cuda", "micro_batches": 2}
    depths, extrapolate = [], trace._extrapolated

    def recorded(small, large, found, names):
        depths.append(found)
        return extrapolate(small, large, found, names)

    monkeypatch.setattr(trace, "_extrapolated", recorded)
    extrapolated = trace_step(hybrid, **settings)
    assert depths == [(4, 8)]
    monkeypatch.setattr(trace, "EDGE", 100)
    whole = trace_step(hybrid, **settings)
    near(extrapolated.peak.total, whole.peak.total, by=0.001)
    for phase, moment in whole.phases.items():
        near(extrapolated.phases[phase].total, moment.total, by=0.001)
    assert extrapolated.held == whole.held


GEMMA4 = {
    "text_config": {
        "num_hidden_layers": 12,
        "layer_types": ["sliding_attention", "full_attention"] * 6,
    },
    "vision_config": {"num_hidden_layers": 12},
}
"""Parts of one embedding for all layers, layers with heads of two sizes, and a tower of as many blocks as
the text model."""


@pytest.mark.slow
def test_blocks_of_gemma4_are_profiled_alone_and_traced(tmp_path):
    folder = make_model(tmp_path / "gemma4", "gemma4", sections=GEMMA4, shape_only=True)
    plain = recipe(micro_batch_size=1)
    data = dataclasses.replace(plain.data, tokenizer=None, kind="chat", sequence_length=300)
    small = dataclasses.replace(
        plain, model=Model(path=str(folder)), data=data, images=Images(train="all")
    )
    profile = profile_model(small, device="cuda")
    assert len(profile.tower.blocks) == 12
    assert profile.saved
    assert profile.tower.saved
    traced = trace_step(small, ranks=2, device="cuda", micro_batches=1)
    estimated = estimate_memory(Work(profile, small, ranks=2))
    near(estimated.peak.total, traced.peak.total, by=0.1)


def test_offload_moves_states_to_the_host():
    found = step(device="cuda", cpu_offload=CpuOffload(), checkpointing="full")
    assert found.held.total < PARAMETERS * 4 * 0.05
    near(found.host, PARAMETERS * 16 / 2)
    to_host = ActivationCheckpointing(mode="full", offload_to_cpu=True)
    offloaded = dataclasses.replace(
        recipe(cpu_offload=CpuOffload()), activation_checkpointing=to_host
    )
    further = step.__wrapped__(offloaded, device="cuda")
    assert further.after_forward.activations < found.after_forward.activations
    assert further.host + further.after_forward.activations >= found.host


class ReadsValue(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4, 4))

    def reset_parameters(self):
        nn.init.ones_(self.weight)

    def forward(self, input_ids, **kwargs):
        if self.weight.sum().item() > 0:
            raise AssertionError
        return input_ids


def value_reading_model():
    return ReadsValue()


def keeping_logits(written, keep):
    return dataclasses.replace(written, model=dataclasses.replace(written.model, keep_logits=keep))


@pytest.mark.slow
def test_kept_logits_are_traced(monkeypatch):
    monkeypatch.setattr(head_module, "CHUNK_ELEMENTS", 2**15)
    settings = {"ranks": 2, "device": "cuda", "micro_batches": 2}
    for precision, size in ((None, 4), (MixedPrecision(), 2)):
        changed = recipe(layers=1, mixed_precision=precision)
        again = trace_step(keeping_logits(changed, False), **settings)
        kept = trace_step(keeping_logits(changed, True), **settings)
        every = 2 * LENGTH * VOCABULARY * size
        assert again.after_forward.logits == 0
        assert kept.after_forward.logits == every
        estimate = estimate_memory(
            Work(profile_model(changed, device="cuda"), keeping_logits(changed, True), ranks=2)
        )
        for phase in ("forward", "backward"):
            most = max(m.components.logits for m in kept.timeline if m.phase == phase)
            of_estimate = max(m.components.logits for m in estimate.timeline if m.phase == phase)
            assert every <= most <= of_estimate <= most + 2**15 * 4


@pytest.mark.parametrize("keep_logits", [False, True], ids=["", "kept"])
def test_chunks_of_the_loss_that_are_left_out_change_nothing(monkeypatch, keep_logits):
    monkeypatch.setattr(head_module, "CHUNK_ELEMENTS", 2**12)
    settings = {"ranks": 2, "device": "cuda", "micro_batches": 2}
    changed, calls = keeping_logits(recipe(layers=1), keep_logits), []
    fewer = trace_step(changed, **settings)
    no_trace = types.SimpleNamespace(current=lambda: calls.append(1))
    monkeypatch.setattr(linear_chunks, "tracing", no_trace)
    assert trace_step(changed, **settings) == fewer
    assert calls


def test_a_trace_replaces_nothing_of_the_launcher(monkeypatch):
    owners, replace = [], fake_tensors.Replacements.set

    def record(replaced, owner, *arguments):
        owners.append(getattr(owner, "__module__", owner.__name__))
        replace(replaced, owner, *arguments)

    monkeypatch.setattr(fake_tensors.Replacements, "set", record)
    trace_step(recipe(layers=1), ranks=2, device="cuda", micro_batches=1)
    assert owners
    assert not [owner for owner in owners if owner.startswith("launcher")]


def test_a_trace_inside_of_another_is_for_its_device():
    """The budget of activation checkpointing traces blocks for the device of the rank, a CPU."""
    data = types.SimpleNamespace(micro_batch=MicroBatch({}))
    with fake_tensors.computing_as_on("cuda", data):
        outer = tracing.current()
        with fake_tensors.computing_as_on("cpu", data):
            assert tracing.current() is outer
            assert outer.cuda
    assert tracing.current() is None


@pytest.mark.slow
def test_traces_in_other_processes_are_the_same(monkeypatch):
    monkeypatch.setattr(plan.os, "sched_getaffinity", lambda process: {0, 1})
    monkeypatch.setattr(plan, "_STEPS", {})
    machine = known_machine("h100", nodes=1, gpus_per_node=2)
    recipes = [recipe(layers=1, micro_batch_size=size) for size in (1, 2)]
    wrong = dataclasses.replace(recipes[0], model=Model(builder="tests.no:model"))
    plan.trace_ahead([*recipes, wrong, recipes[0]], machine)
    assert len(plan._STEPS) == 2, "what fails there is left to make_plan"
    for each, count in zip(recipes, (4, 2), strict=True):
        traced = plan._STEPS[plan._key(each, machine)]
        assert traced == trace_step(each, ranks=2, device="cuda", micro_batches=count)


def test_model_that_reads_values_is_untraceable():
    model = Model(builder=f"{__name__}:value_reading_model")
    value_reading = dataclasses.replace(recipe(), model=model)
    with pytest.raises(UntraceableError, match="DataDependent"):
        step.__wrapped__(value_reading)
    assert not dist.is_initialized()


@pytest.mark.slow
def test_hybrid_sharding_keeps_averages_between_micro_batches():
    """In a third micro-batch, memory holds the averages of the second one and the gradients."""
    two, three = (
        step(device="cuda", ranks=4, micro_batches=count, replicate=2).phases["forward"].components
        for count in (2, 3)
    )
    near(three.communication - two.communication, PARAMETERS * 4 / 2)


EXPERTS = {
    "model_type": "qwen3_moe", "vocab_size": 512, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "moe_intermediate_size": 32, "num_experts": 16,
    "num_experts_per_tok": 2, "max_position_embeddings": 256, "tie_word_embeddings": False,
}  # fmt: skip


def with_experts(size):
    mixed = MixedPrecision(param_dtype="bfloat16", reduce_dtype="float32")
    written = recipe(reshard_after_forward=False, mixed_precision=mixed, expert_parallel_size=size)
    return dataclasses.replace(written, model=Model(config=EXPERTS))


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_with_different_experts_gather_their_own(size):
    """Routing takes values, in whose place a trace sends as many tokens to each expert."""
    whole, divided = (
        trace_step(with_experts(n), ranks=4, device="cuda", micro_batches=1) for n in (1, size)
    )
    assert divided.held == whole.held
    experts = 2 * 2 * 16 * 3 * 64 * 32  # bytes in bfloat16, of two layers
    gathered = whole.after_forward.gathered - divided.after_forward.gathered
    assert gathered == pytest.approx(experts - experts // size, rel=0.01)
    estimate = estimate_memory(
        Work(profile_model(with_experts(size), device="cuda"), with_experts(size), ranks=4)
    )
    assert estimate.after_forward.gathered == pytest.approx(
        divided.after_forward.gathered, rel=0.05
    )


def test_plan_compares_expert_parallelism_with_whole_experts():
    machine = known_machine(
        "h100", nodes=1, gpus_per_node=4, memory=None, host_memory=None, overrides=None
    )

    def notes(size):
        found = plan.make_plan(with_experts(size), machine).notes
        return [note for note in found if "expert_parallel_size" in note]

    profile = profile_model(with_experts(1), device="cuda")
    estimates = [
        plan.estimated_plan(Work(profile, with_experts(size), ranks=machine.ranks), machine)
        for size in (1, 4)
    ]
    whole, divided = (bytes_as_text(estimate.step.peak.total) for estimate in estimates)
    assert notes(1) == []
    (note,) = notes(4)
    assert note.startswith("without strategy.expert_parallel_size: 4 the peak of tensors would be ")
    assert f"{whole} instead of {divided}, and in each step compute would wait " in note


@pytest.mark.parametrize(("nodes", "noted"), [(1, False), (2, True)])
def test_plan_names_tensor_parallel_ranks_on_different_nodes(nodes, noted):
    machine = known_machine("h100", nodes=nodes, gpus_per_node=4 // nodes)
    notes = plan._notes(recipe(tensor_parallel_size=4), machine)
    note = "strategy.tensor_parallel_size=4: tensor parallel ranks are on different nodes"
    assert any(note in text for text in notes) == noted


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_tensor_parallel_ranks_hold_and_gather_their_parts(size):
    mixed = MixedPrecision(param_dtype="bfloat16", reduce_dtype="float32")

    def written(n):
        return recipe(reshard_after_forward=False, mixed_precision=mixed, tensor_parallel_size=n)

    whole, divided = (
        trace_step(written(n), ranks=4, device="cuda", micro_batches=1) for n in (1, size)
    )
    common = (2 * LAYERS + 1) * HIDDEN  # norms, and projections to fewer heads than ranks
    common += LAYERS * 2 * HIDDEN * HIDDEN // 2 if size == 4 else 0
    assert divided.held.parameters - whole.held.parameters == pytest.approx(
        4 * common * (size - 1) / 4, abs=64
    )
    gathered = 2 * (PARAMETERS - common) / size + 2 * common
    assert divided.after_forward.gathered == pytest.approx(gathered, rel=0.01)
    assert divided.after_forward.activations < whole.after_forward.activations
    profile = profile_model(written(size), device="cuda")
    assert profile.undivided.parameters == PARAMETERS
    estimate = estimate_memory(Work(profile, written(size), ranks=4))
    assert estimate.after_forward.gathered == pytest.approx(
        divided.after_forward.gathered, rel=0.05
    )
    assert estimate.peak.total == pytest.approx(divided.peak.total, rel=0.1)


@pytest.mark.slow
def test_the_plan_of_distillation_counts_its_loss_and_names_the_teacher(tmp_path, monkeypatch):
    monkeypatch.setattr(plan, "_STEPS", {})
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": 1}))
    plain = recipe(layers=1)
    taught = dataclasses.replace(plain, distillation=Distillation(teacher=str(tmp_path), top_k=64))
    machine = known_machine("h100", nodes=1, gpus_per_node=2)
    plans = [plan.make_plan(each, machine) for each in (plain, taught)]
    assert plans[0].step.peak.total < plans[1].step.peak.total
    (note,) = set(plans[1].notes) - set(plans[0].notes)
    assert "teacher" in note
    assert "512 bytes for each token" in note
    # A larger teacher, whose pass decides
    (folder := tmp_path / "large").mkdir()
    config = CONFIG | {"num_hidden_layers": 4, "hidden_size": 2048}
    (folder / "config.json").write_text(json.dumps(config))
    distillation = Distillation(teacher=str(folder), top_k=64)
    large = plan.make_plan(dataclasses.replace(plain, distillation=distillation), machine)
    assert plans[1].before < plans[1].tensors
    assert plans[1].needed == plans[1].tensors + plans[1].margin + plans[1].context
    assert large.before > 2 * large.tensors
    assert large.needed == large.before + large.context
    # In rounds the teacher is beside the model
    rounds = dataclasses.replace(distillation, answers="student", rounds=3)
    large_rounds = plan.make_plan(dataclasses.replace(plain, distillation=rounds), machine)
    assert large_rounds.before == large.before + large.step.held.total
    assert any("3 times, prompts are answered" in note for note in large_rounds.notes)


STAGED = {
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_attention_heads": 8,
    "num_hidden_layers": 8,
}
STAGED |= {"vocab_size": 4096, "num_key_value_heads": 8, "max_position_embeddings": 1024}


@pytest.fixture
def staged():
    """A recipe with four stages on 16 GPUs."""

    def make(schedule="1f1b", *, checkpointing=None):
        return Recipe(
            run=Run(name="staged", max_steps=3),
            model=Model(config=CONFIG | STAGED, compile=False),
            data=Data(train=("README.md",), tokenizer="bytes", sequence_length=1024, packing=False),
            batch=Batch(global_batch_size=64, micro_batch_size=1),
            strategy=Strategy(
                kind="fsdp",
                pipeline_parallel_size=4,
                pipeline_schedule=schedule,
                reshard_after_forward=True,
                sync_every_micro_batch=True,
            ),
            activation_checkpointing=checkpointing,
        )

    return make


def of_stages(made, machine):
    """Bytes of tensors of each stage: traced, and estimated."""
    work = Work(profile_model(made, device="cuda"), made, ranks=machine.ranks)
    traced = [plan._traced(stage, made, machine).peak.total for stage in work.pipeline]
    return traced, [estimate_memory(stage).peak.total for stage in work.pipeline]


@pytest.mark.slow
@pytest.mark.parametrize("mode", [None, "full"])
def test_the_stages_of_a_pipeline_are_traced(staged, mode):
    """The first ones hold the activations of most micro-batches, the last one has the logits."""
    machine = known_machine("h100", nodes=4, gpus_per_node=4, overrides={})
    made = staged(checkpointing=None if mode is None else ActivationCheckpointing(mode=mode))
    traced, estimated = of_stages(made, machine)
    assert estimated == pytest.approx(traced, rel=0.12)
    assert mode is not None or traced[0] > traced[1] > traced[2]
    planned = plan.make_plan(made, machine)
    assert planned.tensors == max(traced)
    assert planned.traced
    (note,) = (
        note for note in planned.notes if note.startswith("a GPU at the start of the pipeline")
    )
    assert bytes_as_text(planned.needed) in note


@pytest.mark.slow
def test_few_micro_batches_in_flight_are_extrapolated(staged, monkeypatch):
    machine = known_machine("h100", nodes=4, gpus_per_node=4, overrides={})
    short, _ = of_stages(staged(), machine)
    monkeypatch.setattr(plan, "_STEPS", {})
    monkeypatch.setattr(trace, "_IN_FLIGHT", 4)
    assert short == pytest.approx(of_stages(staged(), machine)[0], rel=0.04)


@pytest.mark.slow
def test_interleaved_stages_hold_more(staged):
    machine = known_machine("h100", nodes=4, gpus_per_node=4, overrides={})
    traced, estimated = of_stages(staged("interleaved_1f1b"), machine)
    assert estimated == pytest.approx(traced, rel=0.25)
    assert traced[0] > of_stages(staged(), machine)[0][0]


PREDICTING = {
    "model_type": "qwen3_5_text", "vocab_size": 4096, "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 32,
    "linear_value_head_dim": 32, "max_position_embeddings": 256,
}  # fmt: skip


def predicting(layers, mtp, **strategy):
    config = PREDICTING | {"num_hidden_layers": layers}
    small = recipe(**strategy)
    return dataclasses.replace(small, model=Model(config=config, mtp=mtp))


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy",
    [{}, {"kind": "ddp"}, {"context_parallel_size": 2}],
    ids=["fsdp", "ddp", "context"],
)
@pytest.mark.parametrize("detach", [True, False])
def test_layers_of_multi_token_prediction_are_counted(strategy, detach):
    """Extrapolated from eight blocks to twelve, too, whose last one has the attention of the layers."""
    peaks = {}
    for mtp in (None, MultiToken(detach=detach)):
        small = predicting(12, mtp, **strategy)
        traced = trace_step(small, ranks=2, device="cuda", micro_batches=2)
        work = Work(profile_model(small, device="cuda"), small, ranks=2)
        peaks[mtp] = traced.peak.total
        assert estimate_memory(work).peak.total == pytest.approx(traced.peak.total, rel=0.02)
    without, found = peaks.values()
    assert found > without
    frozen = predicting(12, MultiToken(train=False), **strategy)
    held = trace_step(frozen, ranks=2, device="cuda", micro_batches=2)
    none = trace_step(predicting(12, None, **strategy), ranks=2, device="cuda", micro_batches=2)
    assert held.held.gradients == none.held.gradients
    assert held.held.parameters > none.held.parameters
