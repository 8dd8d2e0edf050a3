"""The analytic estimate: against numbers calculated by hand, and against the trace."""

import dataclasses

import pytest
import torch

from launcher.models.chunked_loss import chunk_width
from launcher.planner import profile
from launcher.planner.estimate import step_memory
from launcher.planner.memory import CUBLAS_WORKSPACES
from launcher.planner.profile import profile_model
from launcher.planner.trace import trace_step
from launcher.recipe.load import load_recipe

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
HEAD = EMBEDDING + 4096  # with the last norm
BLOCK = (PARAMETERS - EMBEDDING - HEAD) // 32
GIB = 2**30


@pytest.fixture(scope="module")
def load(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recipe")
    (folder / "llama.yaml").write_text(LLAMA_8B)
    (folder / "train.txt").write_text("text")

    def loaded(*overrides, ranks=8):
        return load_recipe(
            [f"recipe={folder}/llama.yaml", f"data.train=[{folder}/train.txt]", *overrides],
            ranks=ranks,
        ).recipe

    return loaded


@pytest.fixture(scope="module")
def llama(load):
    return profile_model(load(), device="cuda")


def peak(known, recipe, ranks=8):
    return step_memory(known, recipe, ranks=ranks).peak.components.total


def test_parameters_are_counted(llama):
    assert llama.parameters == llama.trained == PARAMETERS == 8_030_261_248
    assert llama.embedding.count == EMBEDDING
    assert llama.root.count == HEAD
    assert llama.block_classes == (0,) * 32


def test_states_are_sixteen_bytes_a_parameter_over_the_ranks(llama, load):
    for ranks in (8, 64):
        step = step_memory(llama, load(ranks=ranks), ranks=ranks)
        end = step.phases["optimizer"].components
        assert (
            end.parameters - llama.buffers + end.gradients + end.optimizer
            == 16 * PARAMETERS // ranks
        )
    ddp = step_memory(llama, load("strategy.kind=ddp"), ranks=8).phases["optimizer"].components
    assert ddp.total == 16 * PARAMETERS + llama.buffers + CUBLAS_WORKSPACES


@pytest.mark.parametrize(
    ("overrides", "per_parameter"),
    [
        (["strategy.kind=ddp"], 8),
        (["strategy.kind=ddp", "strategy.shard_optimizer=true"], 1),
        (["strategy.reshard_after_forward=false"], 1),
        (["optimizer.state_dtype=bfloat16"], 0.5),
        (["optimizer.state_dtype=int8"], 2 * (1 + 4 / 256) / 8),
        (["optimizer.name=sgd"], 0.5),
        (["optimizer.name=sgd", "optimizer.momentum=0"], 0),
        (["optimizer.name=adafactor"], 0),
        (["optimizer.name=muon"], 0.5 + 0.5 * (EMBEDDING + HEAD) / PARAMETERS),
    ],
    ids=str,
)
def test_optimizer_state_by_optimizer_and_sharding(llama, load, overrides, per_parameter):
    held = step_memory(llama, load(*overrides), ranks=8).held
    assert held.optimizer == pytest.approx(per_parameter * PARAMETERS, rel=1e-3, abs=2e7)


@pytest.mark.parametrize(
    "overrides",
    [
        ("strategy.kind=ddp", "strategy.shard_optimizer=true"),
        ("optimizer.state_dtype=bfloat16",),
        ("optimizer.state_dtype=int8", "strategy.cpu_offload.pin_memory=false"),
        ("optimizer.name=sgd", "strategy.kind=ddp"),
        ("optimizer.name=adafactor",),
        ("strategy.cpu_offload.what=optimizer",),
        ("strategy.cpu_offload={what: optimizer, optimizer_path: a}",),
        ("optimizer.name=muon", "optimizer.state_dtype=int8"),
        ("optimizer.name=muon", "strategy.cpu_offload.pin_memory=false"),
    ],
    ids=str,
)
def test_optimizer_state_is_what_the_trace_finds(load, overrides):
    recipe = load(*SMALL, "model.config.num_hidden_layers=2", *overrides, ranks=4)
    traced = trace_step(recipe, ranks=4, device="cuda", micro_batches=1)
    estimated = step_memory(profile_model(recipe, device="cuda"), recipe, ranks=4)
    # Norms keep float32 moments, and each tensor has a step count
    assert estimated.held.optimizer == pytest.approx(traced.held.optimizer, abs=7000)
    files = "optimizer_path" in overrides[0]  # of whole pages
    assert estimated.host == pytest.approx(traced.host, abs=50000 if files else 7000)
    assert estimated.disk == pytest.approx(traced.disk, abs=7000)
    assert files == (traced.disk > 0)


def test_logits_are_six_bytes_of_a_part_of_the_vocabulary(llama, load):
    step = step_memory(llama, load("batch.micro_batch_size=2"), ranks=8)
    elements = 2 * 4096 * chunk_width(2 * 4096, 128256)
    (loss,) = (m.components for m in step.timeline if m.phase == "forward" and not m.where)
    assert loss.logits == 6 * elements
    assert step.peak.components.logits == 6 * elements
    assert step.after_forward.logits == 0


def test_full_logits_are_ten_bytes_forward_and_twelve_backward(load):
    recipe = load("batch.micro_batch_size=2", "model.chunked_loss=false")
    step = step_memory(profile_model(recipe, device="cuda"), recipe, ranks=8)
    elements = 2 * 4096 * 128256
    assert step.phases["forward"].components.logits == 10 * elements
    assert step.phases["backward"].components.logits == 12 * elements
    assert step.after_forward.logits == 4 * elements


def test_a_llama_block_keeps_49_hidden_sizes_a_token(llama):
    assert llama.saved[torch.bfloat16][0].kept / 4096 / 4096 == pytest.approx(49, abs=0.3)


def test_gathered_weights_and_communication_at_the_peak(llama, load):
    step = step_memory(llama, load(), ranks=8)
    at = step.peak.components
    assert (step.peak.phase, step.peak.micro_batch) == ("backward", 1)
    assert at.gathered == 2 * HEAD  # in bfloat16
    # The embedding's gradients of the micro-batch before, on their way in float32
    assert at.communication == 4 * EMBEDDING


def test_without_sync_whole_gradients_are_kept(llama, load):
    step = step_memory(llama, load("strategy.sync_every_micro_batch=false"), ranks=8)
    assert step.peak.components.gradients >= 4 * PARAMETERS
    ddp = step_memory(llama, load("strategy.kind=ddp"), ranks=8)
    assert (
        ddp.peak.components.gradients == 8 * PARAMETERS
    )  # buckets, and gradients that are not reduced yet
    synced = step_memory(
        llama, load("strategy.kind=ddp", "strategy.sync_every_micro_batch=true"), ranks=8
    )
    assert synced.peak.components.gradients == 4 * PARAMETERS


def test_offload_moves_states_to_the_host(llama, load):
    step = step_memory(llama, load("strategy.cpu_offload.pin_memory=true"), ranks=8)
    end = step.phases["optimizer"].components
    assert end.total == llama.buffers + CUBLAS_WORKSPACES
    # Pinned masters and gradients are rounded up to a power of two: 250.5 MiB of each
    # embedding, 28 of an MLP's matrix
    rounded = 2 * (2 * (256 - 250.5) + 32 * 3 * (32 - 28)) * 2**20
    assert step.host == 16 * PARAMETERS // 8 + rounded
    pageable = step_memory(llama, load("strategy.cpu_offload.pin_memory=false"), ranks=8)
    assert pageable.host == 16 * PARAMETERS // 8


def test_checkpointing_keeps_inputs(llama, load):
    none, selective, full = (
        step_memory(llama, load(*overrides), ranks=8).after_forward.activations
        for overrides in (
            (),
            ("activation_checkpointing.mode=selective",),
            ("activation_checkpointing.mode=full",),
        )
    )
    assert full < selective < none
    inputs = 32 * 2 * 4096 * 4096
    assert inputs <= full < inputs + 0.2 * GIB
    host = step_memory(
        llama,
        load("activation_checkpointing.mode=full", "activation_checkpointing.offload_to_cpu=true"),
        ranks=8,
    )
    assert host.host == inputs
    assert host.after_forward.activations == full - inputs


@pytest.mark.parametrize(
    ("less", "more"),
    [
        (("activation_checkpointing.mode=full",), ()),
        (
            ("activation_checkpointing.mode=full", "activation_checkpointing.every_n_blocks=1"),
            ("activation_checkpointing.every_n_blocks=4",),
        ),
        ((), ("batch.micro_batch_size=2",)),
        ((), ("strategy.kind=ddp",)),
        ((), ("strategy.reshard_after_forward=false",)),
        ((), ("strategy.reshard_after_backward=false",)),
        ((), ("strategy.replicate=2",)),
        ((), ("strategy.sync_every_micro_batch=false",)),
        (("strategy.cpu_offload.pin_memory=true",), ()),
        (("strategy.mixed_precision.reduce_dtype=bfloat16",), ()),
        (
            ("activation_checkpointing.mode=full", "activation_checkpointing.offload_to_cpu=true"),
            ("activation_checkpointing.mode=full",),
        ),
    ],
    ids=str,
)
def test_settings_that_save_memory_do(llama, load, less, more):
    assert peak(llama, load(*less)) < peak(llama, load(*more))


def test_more_ranks_never_need_more(llama, load):
    recipe = load("activation_checkpointing.mode=full", "batch.global_batch_size=2048", ranks=8)
    peaks = [peak(llama, recipe, ranks) for ranks in (2, 4, 8, 16, 64, 512)]
    assert peaks == sorted(peaks, reverse=True)


SMALL = ("model.config.hidden_size=64", "model.config.intermediate_size=96", "model.config.num_attention_heads=4",
         "model.config.num_key_value_heads=2", "model.config.vocab_size=300", "data.sequence_length=64")  # fmt: skip


def test_lora_trains_only_the_adapters(load):
    recipe = load(*SMALL, "lora.rank=4", "model.config.num_hidden_layers=6")
    known = profile_model(recipe, device="cuda")
    rank = 4 * (2 * 64 + 64 + 64 + 2 * (64 + 32) + 3 * (64 + 96))  # q, o; k, v; gate, up, down
    assert known.trained == 6 * rank
    held = step_memory(known, recipe, ranks=1).held
    frozen = known.parameters - known.trained
    assert held.parameters == 2 * frozen + 4 * known.trained + known.buffers
    assert held.optimizer == 8 * known.trained


def test_tied_embeddings_count_once(load):
    tied = profile_model(
        load(*SMALL, "model.config.tie_word_embeddings=true", "strategy.mixed_precision=null"),
        device="cpu",
    )
    assert set(tied.saved) == {torch.float32, torch.bfloat16}, "the search offers bfloat16"
    assert tied.embedding.count == 0
    assert tied.root.count == 300 * 64 + 64


def test_a_classifier_has_no_logits_over_a_vocabulary(load):
    recipe = load(*SMALL, "model.task=sequence_classification", "model.num_labels=3", "data.kind=classification",
                  "model.config.pad_token_id=0", "strategy.mixed_precision=null")  # fmt: skip
    known = profile_model(recipe, device="cpu")
    assert step_memory(known, recipe, ranks=2).phases["backward"].components.logits == 0


def test_a_model_without_blocks_is_one_group(load, monkeypatch):
    recipe = load(*SMALL, "model.config.num_hidden_layers=2")
    prepare = profile.prepare_model
    split = profile_model(recipe, device="cpu")
    monkeypatch.setattr(profile, "_PROFILES", {})
    monkeypatch.setattr(
        profile,
        "prepare_model",
        lambda *args, **kwargs: dataclasses.replace(prepare(*args, **kwargs), blocks={}),
    )
    whole = profile_model(recipe, device="cpu")
    assert whole.block_classes == ()
    assert whole.parameters == split.parameters
    assert step_memory(whole, recipe, ranks=2).held == step_memory(split, recipe, ranks=2).held


def test_a_model_that_does_not_run_on_fake_tensors_is_estimated_by_shapes(load, llama, monkeypatch):
    def refuse(*args, **kwargs):
        raise RuntimeError("it asks for a number")

    monkeypatch.setattr(profile, "_PROFILES", {})
    monkeypatch.setattr(profile, "saved_of_blocks", refuse)
    estimated = profile_model(load(), device="cuda")
    assert estimated.saved == {}
    for overrides in (
        (),
        ("strategy.kind=ddp",),
        ("activation_checkpointing.mode=full",),
        ("activation_checkpointing.mode=selective",),
    ):
        assert peak(estimated, load(*overrides)) == pytest.approx(
            peak(llama, load(*overrides)), rel=0.1
        )


@pytest.mark.parametrize(
    "overrides",
    [
        ("strategy.replicate=2", "activation_checkpointing.mode=selective"),
        ("strategy.cpu_offload.pin_memory=true", "activation_checkpointing.mode=full"),
        ("lora.rank=4", "activation_checkpointing.mode=full"),
        ("strategy.cpu_offload.what=optimizer", "batch.micro_batch_size=1"),
        ("activation_checkpointing={mode: selective, budget: 0.5}",),
        ("strategy.kind=ddp", "activation_checkpointing={mode: selective, budget: 40MiB}"),
        ("activation_checkpointing={mode: full, offload_to_cpu: true}",),
    ],
    ids=str,
)
def test_estimate_agrees_with_the_trace(load, overrides):
    sizes = ("model.config.hidden_size=256", "model.config.intermediate_size=512", "model.config.num_attention_heads=4",
             "model.config.num_key_value_heads=2", "model.config.vocab_size=600", "model.config.num_hidden_layers=4",
             "data.sequence_length=256", "batch.micro_batch_size=8", "batch.global_batch_size=64")  # fmt: skip
    recipe = load(*sizes, *overrides, ranks=4)
    traced = trace_step(recipe, ranks=4, device="cuda", micro_batches=2)
    estimated = step_memory(profile_model(recipe, device="cuda"), recipe, ranks=4)
    assert estimated.peak.components.total == pytest.approx(traced.peak.components.total, rel=0.1)
    assert estimated.host == pytest.approx(
        traced.host, rel=0.001
    )  # AdamW's step count: 4 bytes a parameter tensor
