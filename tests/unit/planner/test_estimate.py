"""Tests of the analytic memory estimate, against hand-calculated values and the trace."""

import dataclasses
import json

import pytest
import torch

from launcher.models import head as head_module
from launcher.models.head import chunk_width
from launcher.planner import profile
from launcher.planner.estimate import estimate_memory
from launcher.planner.machine import known_machine
from launcher.planner.memory import CUBLAS_WORKSPACES, Components, Moment, StepMemory
from launcher.planner.plan import estimated_plan, make_plan
from launcher.planner.profile import profile_model
from launcher.planner.trace import trace_step, with_compiled_blocks
from launcher.planner.work import Work
from launcher.recipe.schema import Lora

LLAMA_8B = """\
run: {name: llama, max_steps: 10}
model:
  config: {model_type: llama, vocab_size: 128256, hidden_size: 4096, intermediate_size: 14336, num_hidden_layers: 32,
           num_attention_heads: 32, num_key_value_heads: 8, max_position_embeddings: 8192}
data: {train: [train.txt], tokenizer: bytes, sequence_length: 4096}
batch: {global_batch_size: 128, micro_batch_size: 1}
"""
PARAMETERS = (
    2 * 128256 * 4096 + 4096 + 32 * (2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 14336 + 2 * 4096)
)
EMBEDDING = 128256 * 4096
HEAD = EMBEDDING + 4096  # includes the final norm
BLOCK = (PARAMETERS - EMBEDDING - HEAD) // 32
GIB = 2**30
SMALL = ("model.config.hidden_size=64", "model.config.intermediate_size=96", "model.config.num_attention_heads=4",
         "model.config.num_key_value_heads=2", "model.config.vocab_size=300", "data.sequence_length=64")  # fmt: skip
DDP, FULL = "strategy.kind=ddp", "activation_checkpointing.mode=full"
SELECTIVE, OFFLOAD = (
    "activation_checkpointing.mode=selective",
    "strategy.cpu_offload.pin_memory=true",
)
ACTIVATION_OFFLOAD = "activation_checkpointing={mode: full, offload_to_cpu: true}"


@pytest.fixture(scope="module")
def load(loader):
    return loader("llama", LLAMA_8B)


@pytest.fixture(scope="module")
def llama(load):
    return profile_model(load(), device="cuda")


@pytest.fixture(scope="module")
def step(llama, load):
    """Return a function that estimates a step of the 8B model on 8 ranks."""
    return lambda *overrides: estimate_memory(Work(llama, load(*overrides), ranks=8))


def test_parameters_are_counted(llama):
    assert llama.parameters == llama.trained == PARAMETERS == 8_030_261_248
    assert (llama.embedding.count, llama.root.count) == (EMBEDDING, HEAD)
    assert llama.block_classes == (0,) * 32


def test_states_take_16_bytes_per_parameter(llama, load, step):
    for ranks in (8, 64):
        found = estimate_memory(Work(llama, load(ranks=ranks), ranks=ranks))
        end = found.phases["optimizer"].components
        states = end.parameters - llama.buffers + end.gradients + end.optimizer
        assert states == 16 * PARAMETERS // ranks
    ddp = step(DDP).phases["optimizer"].components
    assert ddp.total == 16 * PARAMETERS + llama.buffers + CUBLAS_WORKSPACES


def test_memory_for_checkpoints_is_their_exact_size(llama, load):
    machine = known_machine(
        "h100", nodes=1, gpus_per_node=8, memory=None, host_memory=None, overrides=None
    )
    saves = "checkpoint.every_steps=10"
    plan = estimated_plan(Work(llama, load(saves), ranks=machine.ranks), machine)
    assert plan.host.staging == plan.checkpoint_bytes == 12 * PARAMETERS
    for without in (
        load(saves, "checkpoint.asynchronous=false"),
        load("checkpoint.every_steps=null"),
    ):
        assert estimated_plan(Work(llama, without, ranks=machine.ranks), machine).host.staging == 0


@pytest.mark.parametrize(
    ("overrides", "per_parameter"),
    [
        ([DDP], 8),
        ([DDP, "strategy.shard_optimizer=true"], 1),
        (["strategy.reshard_after_forward=false"], 1),
        (["optimizer.state_dtype=bfloat16"], 0.5),
        (["optimizer.state_dtype=int8"], 2 * (1 + 4 / 256) / 8),
        (["optimizer.name=sgd"], 0.5),
        (["optimizer.name=sgd", "optimizer.momentum=0"], 0),
        (["optimizer.name=adafactor"], 0),
        (["optimizer.name=lion"], 0.5),
        (["optimizer.name=schedule_free_adamw", "schedule.kind=constant"], 1),
        (["optimizer.name=muon"], 0.5 + 0.5 * (EMBEDDING + HEAD) / PARAMETERS),
    ],
    ids=str,
)
def test_optimizer_state_size_by_optimizer_and_sharding(step, overrides, per_parameter):
    expected = per_parameter * PARAMETERS
    assert step(*overrides).held.optimizer == pytest.approx(expected, rel=1e-3, abs=2e7)


def test_chunked_logits_take_6_bytes_per_element(step):
    found = step("batch.micro_batch_size=2")
    elements = 2 * 4096 * chunk_width(2 * 4096, 128256)
    (loss,) = (m.components for m in found.timeline if m.phase == "forward" and not m.where)
    assert loss.logits == found.peak.components.logits == 6 * elements
    assert found.after_forward.logits == 0


@pytest.mark.parametrize(("precision", "size"), [("{}", 2), ("null", 4)])
def test_kept_logits_count_until_the_backward_pass(step, precision, size):
    mixed = "batch.micro_batch_size=2", f"strategy.mixed_precision={precision}"
    found, again = (step(*mixed, f"model.keep_logits={keep}") for keep in ("true", "false"))
    every, chunk = (2 * 4096 * n for n in (128256, chunk_width(2 * 4096, 128256)))
    (loss,) = (m.components for m in found.timeline if m.phase == "forward" and not m.where)
    assert loss.logits == size * every + 4 * chunk
    assert found.after_forward.logits == size * every
    assert found.peak.components.logits == size * every + (4 * chunk if size == 2 else 0)
    assert step(*mixed, "model.keep_logits=auto") == again, "auto that nothing replaces is off"


def test_full_logits_take_10_bytes_forward_12_backward(load):
    recipe = load("batch.micro_batch_size=2", "model.chunked_loss=false")
    step = estimate_memory(Work(profile_model(recipe, device="cuda"), recipe, ranks=8))
    elements = 2 * 4096 * 128256
    assert step.phases["forward"].components.logits == 10 * elements
    assert step.phases["backward"].components.logits == 12 * elements
    assert step.after_forward.logits == 4 * elements


def test_llama_block_saves_49_hidden_sizes_per_token(llama):
    assert llama.saved[torch.bfloat16][0].kept / 4096 / 4096 == pytest.approx(49, abs=0.3)


def test_unsharded_weights_and_communication_at_the_peak(step):
    peak = step().peak
    assert (peak.phase, peak.micro_batch) == ("backward", 1)
    assert peak.components.gathered == 2 * HEAD  # in bfloat16
    # The float32 embedding gradients of the previous micro-batch are still being reduced
    assert peak.components.communication == 4 * EMBEDDING


def test_unsynced_gradients_are_kept_unsharded(step):
    unsynced = step("strategy.sync_every_micro_batch=false")
    assert unsynced.peak.components.gradients >= 4 * PARAMETERS
    # DDP keeps its buckets and the gradients that are not reduced yet
    assert step(DDP).peak.components.gradients == 8 * PARAMETERS
    synced = step(DDP, "strategy.sync_every_micro_batch=true")
    assert synced.peak.components.gradients == 4 * PARAMETERS


def test_offload_moves_states_to_the_host(llama, step):
    found = step(OFFLOAD)
    assert found.phases["optimizer"].total == llama.buffers + CUBLAS_WORKSPACES
    # Pinned memory of master weights and gradients is rounded up to a power of two: from 250.5 to
    # 256 MiB for each embedding, from 28 to 32 MiB for each MLP matrix
    rounded = 2 * (2 * (256 - 250.5) + 32 * 3 * (32 - 28)) * 2**20
    # Gradients of the head, of a block and of two norms, before they are added to the sums
    block = 2 * 8 + 2 * 2 + 3 * 32
    added = (256 + block) * 2**20 + 3 * 4 * 4096 // 8
    assert found.host == 16 * PARAMETERS // 8 + rounded + added
    once = step(OFFLOAD, "strategy.sync_every_micro_batch=false")
    assert once.host == 16 * PARAMETERS // 8 + rounded
    pageable = step(
        "strategy.cpu_offload.pin_memory=false", "strategy.sync_every_micro_batch=false"
    )
    assert pageable.host == 16 * PARAMETERS // 8


def test_checkpointing_keeps_block_inputs(step):
    none, selective, full, offloaded = (
        step(*mode) for mode in ((), (SELECTIVE,), (FULL,), (ACTIVATION_OFFLOAD,))
    )
    kept = full.after_forward.activations
    assert kept < selective.after_forward.activations < none.after_forward.activations
    inputs = 32 * 2 * 4096 * 4096
    assert inputs <= kept < inputs + 0.2 * GIB
    assert offloaded.host == inputs
    assert offloaded.after_forward.activations == kept - inputs


@pytest.mark.parametrize(
    ("less", "more"),
    [
        ([FULL], []),
        ([FULL], [FULL, "activation_checkpointing.every_n_blocks=4"]),
        ([], ["batch.micro_batch_size=2"]),
        ([], [DDP]),
        ([], ["strategy.reshard_after_forward=false"]),
        ([], ["strategy.reshard_after_backward=false"]),
        ([], ["strategy.replicate=2"]),
        ([], ["strategy.sync_every_micro_batch=false"]),
        ([OFFLOAD], []),
        (["strategy.mixed_precision.reduce_dtype=bfloat16"], []),
        ([ACTIVATION_OFFLOAD], [FULL]),
    ],
    ids=str,
)
def test_memory_saving_settings_lower_the_peak(step, less, more):
    assert step(*less).peak.total < step(*more).peak.total


def test_more_ranks_never_raise_the_peak(llama, load):
    recipe = load(FULL, "batch.global_batch_size=2048")
    steps = (estimate_memory(Work(llama, recipe, ranks=ranks)) for ranks in (2, 4, 8, 16, 64, 512))
    peaks = [step.peak.total for step in steps]
    assert peaks == sorted(peaks, reverse=True)


def test_lora_trains_only_the_adapters(load):
    recipe = load(*SMALL, "lora.rank=4", "model.config.num_hidden_layers=6")
    profiled = profile_model(recipe, device="cuda")
    rank = 4 * (2 * 64 + 64 + 64 + 2 * (64 + 32) + 3 * (64 + 96))  # q, o; k, v; gate, up, down
    assert profiled.trained == 6 * rank
    held = estimate_memory(Work(profiled, recipe, ranks=1)).held
    frozen = profiled.parameters - profiled.trained
    assert held.parameters == 2 * frozen + 4 * profiled.trained + profiled.buffers
    assert held.optimizer == 8 * profiled.trained


@pytest.mark.slow
def test_weights_in_nf4_are_counted_by_their_bytes(load):
    layers = ("model.config.num_hidden_layers=6", "model.config.intermediate_size=128")
    recipe = load(*SMALL, "lora={rank: 4, quantize: nf4}", *layers)
    profiled = profile_model(recipe, device="cuda")
    plain = profile_model(load(*SMALL, "lora.rank=4", *layers), device="cuda")
    assert (profiled.parameters, profiled.trained) == (plain.parameters, plain.trained)
    widths = {64: 2 * 64 + 2 * 32 + 2 * 128, 128: 64}  # q, o; k, v; gate, up; down
    packed = 6 * sum(rows * (33 * width // 64 + 4) for width, rows in widths.items())
    dense = 6 * sum(rows * width for width, rows in widths.items())
    held, whole = (
        estimate_memory(Work(p, recipe, ranks=1)).held.parameters for p in (profiled, plain)
    )
    assert held == whole - 2 * dense + packed
    assert trace_step(recipe, ranks=1, device="cuda", micro_batches=1).held.parameters == held


def test_tied_embeddings_are_counted_once(load):
    tied = ("model.config.tie_word_embeddings=true", "strategy.mixed_precision=null")
    profiled = profile_model(load(*SMALL, *tied), device="cpu")
    assert set(profiled.saved) == {torch.float32, torch.bfloat16}, "the search also tries bfloat16"
    assert (profiled.embedding.count, profiled.root.count) == (0, 300 * 64 + 64)


def test_classifier_has_no_vocabulary_logits(load):
    recipe = load(*SMALL, "model.task=sequence_classification", "model.num_labels=3", "data.kind=classification",
                  "model.config.pad_token_id=0", "strategy.mixed_precision=null")  # fmt: skip
    profiled = profile_model(recipe, device="cpu")
    assert (
        estimate_memory(Work(profiled, recipe, ranks=2)).phases["backward"].components.logits == 0
    )
    divided = dataclasses.replace(recipe.strategy, kind="fsdp", tensor_parallel_size=2)
    recipe = dataclasses.replace(recipe, strategy=divided)
    assert profile_model(recipe, device="cpu").vocabulary == 0


@pytest.mark.long
@pytest.mark.parametrize("task", ["masked_lm", "sequence_classification"])
def test_encoders(load, task):
    """Their embeddings are no block, and the head of a masked language model computes logits for the
    predicted tokens only."""
    config = {"model_type": "bert", "vocab_size": 30522, "hidden_size": 768, "intermediate_size": 3072,
              "num_hidden_layers": 6, "num_attention_heads": 12, "num_key_value_heads": 12, "pad_token_id": 0}  # fmt: skip
    masked = task == "masked_lm"
    recipe = load(f"model.config={json.dumps(config)}", f"model.task={task}", "data.sequence_length=512",
                  f"data.kind={'text' if masked else 'classification'}", "data.packing=false",
                  *(() if masked else ["model.num_labels=3"]), "batch.micro_batch_size=8")  # fmt: skip
    profiled = profile_model(recipe, device="cuda")
    assert len(profiled.block_classes) == 6
    assert profiled.vocabulary == masked * 4578
    estimated = estimate_memory(Work(profiled, recipe, ranks=2))
    traced = trace_step(recipe, ranks=2, device="cuda", micro_batches=2)
    assert estimated.peak.total == pytest.approx(traced.peak.total, rel=0.1)
    logits = (step.phases["forward"].components.logits > 0 for step in (estimated, traced))
    assert list(logits) == [masked, masked]


@pytest.mark.filterwarnings("error")
def test_profile_in_float32_does_not_try_autocast(load):
    """torch warns of it, at the start of runs without mixed precision."""
    recipe = load(*SMALL, "strategy.mixed_precision=null", "model.config.num_hidden_layers=2")
    prepared = profile.prepare_model(recipe, device=torch.device("cpu"))
    shapes = profile.profile_of_shapes(prepared, recipe, device="cpu")
    found = profile.with_saved(shapes, prepared, recipe, dtypes={torch.float32})
    assert found.saved.keys() == {torch.float32}
    assert not found.autocast


COMPILED = "model.compile=true"


@pytest.mark.long
def test_compiled_blocks_save_what_the_partition_keeps(load):
    """256 MiB less in a block of Llama-3.2-1B: an H100 measured 36.93 GiB eager, and 32.80 GiB for 16
    compiled blocks."""
    sizes = ("model.config.hidden_size=2048", "model.config.intermediate_size=8192", "batch.micro_batch_size=2",
             "model.config.num_hidden_layers=4", "batch.global_batch_size=32")  # fmt: skip
    eager, compiled = (load(*sizes, *more, ranks=1) for more in ((), (COMPILED,)))
    machine = known_machine("h100", nodes=1, gpus_per_node=1)
    plans = [make_plan(recipe, machine) for recipe in (eager, compiled)]
    for pick in (lambda plan: plan.step, lambda plan: plan.arithmetic):
        without, fewer = (pick(plan).after_forward.activations for plan in plans)
        assert without - fewer == pytest.approx(4 * 256 * 2**20, rel=0.02)
    assert plans[1].step.peak.total < plans[0].step.peak.total
    # Blocks that are recomputed save no less
    full = [make_plan(load(*sizes, FULL, *more, ranks=1), machine) for more in ((), (COMPILED,))]
    assert full[0].step.peak.total == full[1].step.peak.total


def test_compiled_moments_count_the_blocks_before_them():
    """In the backward pass of a block, what it did not save is computed again."""

    def moment(phase, where):
        components = Components(parameters=7, activations=100)
        return Moment(phase=phase, micro_batch=0, where=where, components=components)

    places = [("forward", ""), ("forward", "a"), ("forward", "b"), ("forward", "head"), ("backward", "head"),
              ("backward", "b"), ("backward", "a"), ("optimizer", "")]  # fmt: skip
    held = Components(activations=100)
    step = StepMemory(
        timeline=tuple(moment(*place) for place in places), held=held, after_forward=held, host=3
    )
    found = with_compiled_blocks(step, [10, 20], ["a", "b"])
    activations = [moment.components.activations for moment in found.timeline]
    assert activations == [100, 90, 70, 70, 70, 90, 100, 100]
    assert found.after_forward.activations == 70
    assert (found.held, found.host) == (held, 3)


def test_profile_of_a_compiled_model_compiles_nothing(load, monkeypatch):
    """The compiled loss of a small vocabulary read the memory of fake tensors: the process crashed."""

    def backend(graph, inputs):
        raise AssertionError("compiled")

    monkeypatch.setattr(head_module, "_compiled", lambda f: torch.compile(f, backend=backend))
    recipe = load(*SMALL, "model.compile=true", "model.config.num_hidden_layers=2")
    prepared = profile.prepare_model(recipe, device=torch.device("cpu"))
    shapes = profile.profile_of_shapes(prepared, recipe, device="cpu")
    found = profile.with_saved(shapes, prepared, recipe, dtypes={torch.bfloat16})
    assert found.saved.keys() == {torch.bfloat16}


def test_model_without_blocks_is_one_group(load, monkeypatch):
    recipe = load(*SMALL, "model.config.num_hidden_layers=2")
    split = profile_model(recipe, device="cpu")
    prepared = profile.prepare_model(recipe, device=torch.device("cpu"))
    prepared.description.blocks.clear()
    monkeypatch.setattr(profile, "_PROFILES", {})
    monkeypatch.setattr(profile, "_PREPARED", {})
    monkeypatch.setattr(profile, "prepare_model", lambda *_, **__: prepared)
    whole = profile_model(recipe, device="cpu")
    assert whole.block_classes == ()
    assert whole.parameters == split.parameters
    assert (
        estimate_memory(Work(whole, recipe, ranks=2)).held
        == estimate_memory(Work(split, recipe, ranks=2)).held
    )


def test_prepared_models_are_copies(load):
    recipe = load(*SMALL)
    first = profile.prepared_model(recipe, device="cpu")
    second = profile.prepared_model(recipe, device="cpu")
    for prepared in (first, second):
        modules = set(prepared.model.modules())
        assert modules.issuperset(
            [*prepared.description.blocks.values(), *(m for u in prepared.units for m in u.modules)]
        )
    assert not set(first.model.modules()) & set(second.model.modules())


def test_untraceable_model_is_estimated_from_shapes(load, step, monkeypatch):
    def refuse(*args, **kwargs):
        raise RuntimeError("it reads the value of a tensor")

    monkeypatch.setattr(profile, "_PROFILES", {})
    monkeypatch.setattr(profile, "saved_of_blocks", refuse)
    profiled = profile_model(load(), device="cuda")
    assert profiled.saved == {}
    for overrides in ([], [DDP], [FULL], [SELECTIVE]):
        estimated = estimate_memory(Work(profiled, load(*overrides), ranks=8)).peak.total
        assert estimated == pytest.approx(step(*overrides).peak.total, rel=0.1)


IN_FILES = "strategy.cpu_offload={what: optimizer, optimizer_path: a}"


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param(
            ["strategy.replicate=2", SELECTIVE, "optimizer.name=adafactor"],
            marks=pytest.mark.long,
        ),
        [OFFLOAD, FULL],
        pytest.param(
            ["strategy.cpu_offload.pin_memory=false", "optimizer.state_dtype=int8"],
            marks=pytest.mark.long,
        ),
        ["strategy.cpu_offload.pin_memory=false", "optimizer.name=muon"],
        pytest.param(["lora.rank=4", FULL, "optimizer.ema=0.999"], marks=pytest.mark.long),
        pytest.param(["lora={rank: 4, quantize: nf4}", FULL], marks=pytest.mark.long),
        pytest.param(
            ["lora={rank: 4, quantize: nf4}", "strategy.tensor_parallel_size=2"],
            marks=pytest.mark.long,
        ),
        pytest.param(
            ["lora={rank: 4, dora: true, modules_to_save: [embed_tokens, lm_head]}"],
            marks=pytest.mark.long,
        ),
        pytest.param([DDP, "lora={rank: 4, quantize: nf4}"], marks=pytest.mark.long),
        ["strategy.cpu_offload.what=optimizer", "batch.micro_batch_size=1"],
        [IN_FILES, FULL],
        ["activation_checkpointing={mode: selective, budget: 0.5}", "optimizer.state_dtype=bfloat16"],
        pytest.param(
            [DDP, "activation_checkpointing={mode: selective, budget: 40MiB}", "optimizer.name=sgd"],
            marks=pytest.mark.long,
        ),
        [DDP, "strategy.shard_optimizer=true", "optimizer.ema=0.999"],
        [ACTIVATION_OFFLOAD, "optimizer.name=muon", "optimizer.state_dtype=int8"],
    ],
    ids=str,
)  # fmt: skip
def test_estimate_agrees_with_the_trace(load, overrides):
    sizes = ("model.config.hidden_size=256", "model.config.intermediate_size=512", "model.config.num_attention_heads=4",
             "model.config.num_key_value_heads=2", "model.config.vocab_size=600", "model.config.num_hidden_layers=4",
             "data.sequence_length=256", "batch.micro_batch_size=8", "batch.global_batch_size=64")  # fmt: skip
    recipe = load(*sizes, *overrides, ranks=4)
    traced = trace_step(recipe, ranks=4, device="cuda", micro_batches=2)
    estimated = estimate_memory(Work(profile_model(recipe, device="cuda"), recipe, ranks=4))
    assert estimated.peak.total == pytest.approx(traced.peak.total, rel=0.1)
    # The tolerances cover float32 moments of norms, step counts, and whole pages of files
    assert estimated.held.optimizer == pytest.approx(traced.held.optimizer, abs=60_000)
    assert estimated.host == pytest.approx(traced.host, rel=0.001, abs=100_000)
    assert estimated.disk == pytest.approx(traced.disk, abs=40_000)
    assert (traced.disk > 0) == (IN_FILES in overrides)


@pytest.mark.parametrize("adapters", [[], ["lora.rank=4"]], ids=str)
def test_ddp_keeps_what_autocast_casts(load, adapters):
    """Norms and sums in float32, or inputs of adapters: FSDP keeps 20 % less."""
    recipe = load(*SMALL, *adapters, DDP, "model.config.num_hidden_layers=2", ranks=4)
    kept = trace_step(recipe, ranks=4, device="cuda", micro_batches=1).after_forward.activations
    profiled = profile_model(recipe, device="cuda")
    estimated = estimate_memory(Work(profiled, recipe, ranks=4)).after_forward
    assert estimated.activations == pytest.approx(kept, rel=0.07)
    (saved,), (cast,) = profiled.saved.values(), [profiled.autocast]
    assert saved[0].kept < 0.9 * cast[0].kept


@pytest.mark.parametrize(
    ("method", "noted"),
    [("preference.loss=dpo", True), ("preference.loss=simpo", False), ("model.task=reward", False)],
)
def test_plan_of_pairs_names_the_reference_pass(load, method, noted):
    """Only losses that compare with a reference need the pass. The step is traced with pairs."""
    recipe = load(*SMALL, "model.config.num_hidden_layers=2", "data.kind=preference", method)
    machine = known_machine("h100", nodes=1, gpus_per_node=2)
    plan = make_plan(recipe, machine)
    assert plan.traced
    assert any("the reference pass" in note for note in plan.notes) == noted


@pytest.mark.slow
def test_weights_kept_in_float32_are_gathered_with_four_bytes(load):
    """The decay of recurrent layers, which fsdp gathers in float32, also beside adapters."""
    sizes = {"vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 4}
    states = ("key_head_dim", "value_head_dim", "num_key_heads", "num_value_heads")
    linear = dict.fromkeys((f"linear_{name}" for name in states), 8)
    config = {"model_type": "qwen3_5_text"} | sizes | heads | linear
    recipe = load(f"model.config={json.dumps(config)}", "data.sequence_length=64")
    exact = 3 * 2 * 8  # three layers, A_log and dt_bias, eight heads
    for adapted in (recipe, dataclasses.replace(recipe, lora=Lora())):
        own = profile_model(adapted, device="cuda")
        assert own.unsharded(2) == 2 * own.parameters + 2 * exact
        assert own.unsharded(4) == 4 * own.parameters
        frozen = own.parameters - own.trained
        held = 4 * own.parameters - (2 * (frozen - exact) if adapted.lora else 0)
        assert own.held(2) == held
        copied = own.parameters - exact if adapted.lora is None else own.trained
        assert sum(group.copied(2) for group in own.groups) == 2 * copied
