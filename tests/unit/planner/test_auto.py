"""Tests of `auto`: the choice, its explanation, and earlier failures. The search is mocked."""

import dataclasses
import itertools
import math
import re
import sys
from types import SimpleNamespace

import pytest
import torch

from launcher.checkpoint.resume import Fresh
from launcher.console import bytes_as_text
from launcher.distributed.separate_process import run_in_process
from launcher.errors import RecipeError, TrainingError
from launcher.planner import auto
from launcher.planner.facts import Facts, profiled
from launcher.planner.machine import known_machine
from launcher.planner.memory import HostMemory
from launcher.planner.plan import estimated_plan, make_plan
from launcher.planner.profile import profile_model
from launcher.planner.work import Work, with_most_saved
from launcher.recipe.load import load_recipe
from launcher.recipe.schema import (
    ActivationCheckpointing,
    Batch,
    CpuOffload,
    Lora,
    Model,
    Strategy,
)
from launcher.run import resolve
from tests.unit.planner.example_plans import (
    AUTO_RECIPE,
    GIB,
    RECIPE,
    configuration,
    example_plan,
    example_search,
    machine,
)

FAILED = {"event": "failed", "reason": "out_of_memory", "ranks": 8}
FAILED |= auto.recorded_settings(RECIPE, machine())


def searched(recipe, machine, *events, **more):
    """The configuration that a search chooses, and why."""
    facts = Facts(ranks=machine.ranks, machine=machine, events=events, **more)
    return auto.choose_configuration(recipe, facts)


def test_recipe_without_auto_is_unchanged():
    assert (
        resolve.resolve_by_machine(RECIPE, machine(), start=Fresh(), ranks=None, run=None) is RECIPE
    )
    assert auto.SEARCH.open(RECIPE) == []
    assert auto.SEARCH.open(AUTO_RECIPE) == ["strategy.kind", "batch.micro_batch_size"]


def test_choose_takes_the_fastest_that_fits(monkeypatch):
    limits = []

    def fastest(recipe, machine, *, limit_micro_batch):
        limits.append(limit_micro_batch)
        return configuration((), example_plan(), 74_000, micro=2)

    monkeypatch.setattr(auto, "fastest_that_fits", fastest)
    recipe, why = searched(AUTO_RECIPE, machine(), FAILED)
    assert (limits, recipe.batch.micro_batch_size) == ([3], 2)
    assert why == (
        "fsdp (ZeRO-3), bf16; 2 sequences of 4,096 tokens x 4 micro-batches x 8 ranks = 64 a step. "
        "The fastest that fits: by plan 46.9 GiB of 80.0 GiB a rank, about 74,000 tokens/s "
        "(59,000 to 93,000); "
        "micro-batches of 4 and more ran out of memory before"
    )


def on_cpu(memory, cores=2):
    return known_machine(
        "cpu", nodes=1, gpus_per_node=1, memory=memory, host_memory=memory, cores=cores
    )


@pytest.mark.slow
def test_on_a_cpu_half_of_the_memory_stays_free_and_micro_batches_are_short(monkeypatch):
    """As long as that is possible. The choice does not depend on what was measured, so that a
    resume makes the same one."""
    wide = loaded(*LARGE, "batch.micro_batch_size=auto", "batch.global_batch_size=16")
    chosen, why = searched(wide, on_cpu(64 * GIB))
    small = chosen.batch.micro_batch_size
    assert re.search("; a step takes about .* by plan, with batch.global_batch_size=[0-9]+ ", why)
    monkeypatch.setattr(auto, "CPU_SECONDS", 1e6)
    chosen, why = searched(wide, on_cpu(64 * GIB))
    assert chosen.batch.micro_batch_size > small
    needs = estimated_plan(
        Work(profile_model(chosen, device="cpu"), chosen, ranks=on_cpu(64 * GIB).ranks),
        on_cpu(64 * GIB),
    ).needed
    assert needs < 32 * GIB
    assert searched(wide, on_cpu(2 * GIB)) is not None, "nothing fits into half of it"


def test_choice_with_little_room_says_so(monkeypatch):
    plan = dataclasses.replace(example_plan(), room=40 * GIB)
    chosen = configuration(("strategy.kind=fsdp",), plan, 74_000)
    monkeypatch.setattr(auto, "fastest_that_fits", lambda *_, **__: chosen)
    _, why = searched(AUTO_RECIPE, machine())
    assert why.endswith("(59,000 to 93,000); slow, because less than 40.0 GiB are to spare")


def test_error_has_suggestions_if_nothing_fits(monkeypatch):
    monkeypatch.setattr(auto, "fastest_that_fits", lambda *_, **__: None)
    monkeypatch.setattr(auto, "search_configurations", lambda *_, **__: example_search(fits=False))
    with pytest.raises(RecipeError) as caught:
        searched(AUTO_RECIPE, machine(memory=8 * GIB), must_fit=True)
    assert caught.value.problems == [
        "strategy.kind: auto: no configuration fits 8 x H100 with 8.0 GiB each",
        "  16 GPUs instead of 8: gpus_per_node=8 nodes=2",
        "  LoRA: lora={rank: 16}",
    ]
    here = machine(memory=8 * GIB, host_memory=64 * GIB)
    with pytest.raises(RecipeError, match=r"8\.0 GiB each and 64\.0 GiB of host memory a node"):
        searched(AUTO_RECIPE, here, must_fit=True)
    other = example_search()
    monkeypatch.setattr(auto, "search_configurations", lambda *_, **__: other)
    with pytest.raises(RecipeError) as caught:
        searched(AUTO_RECIPE, machine(memory=8 * GIB), must_fit=True)
    assert caught.value.problems[1].endswith(f": {' '.join(other.best.overrides)}")
    with pytest.raises(RecipeError, match="a micro-batch of 1 ran out of memory in an earlier"):
        searched(AUTO_RECIPE, machine(), FAILED | {"micro_batch_size": 1}, must_fit=True)


def failed_before(recipe, *events):
    return auto.failed_micro_batches(recipe, Facts(ranks=8, machine=machine(), events=events))


def test_only_failures_with_the_same_settings_count():
    changes = {"ranks": 4, "device": "A100", "sequence_length": 512, "reason": "hang", "micro_batch_size": None}  # fmt: skip
    others = [FAILED | {name: value} for name, value in changes.items()]
    others += [{"event": "failed", "reason": "out_of_memory", "ranks": 8}, {"event": "started"}]
    assert failed_before(AUTO_RECIPE, *others) == []
    assert failed_before(AUTO_RECIPE, *others, FAILED, FAILED | {"micro_batch_size": 2}) == [4, 2]
    assert failed_before(RECIPE, FAILED) == [], "the recipe sets its micro-batch size"


def test_failures_before_a_recipe_change_are_ignored():
    batch = Batch(global_batch_size=64, micro_batch_size="auto")
    written = dataclasses.replace(RECIPE, batch=batch)
    assert failed_before(written, FAILED) == [4]
    for change in (
        {"activation_checkpointing": ActivationCheckpointing(mode="full")},
        {"strategy": Strategy(kind="fsdp", cpu_offload=CpuOffload())},
        {"lora": Lora()},
    ):
        assert failed_before(dataclasses.replace(written, **change), FAILED) == []


@pytest.mark.slow
def test_separate_process_receives_recipe_and_machine():
    """The model path does not exist, so the process returns a RecipeError that names it."""
    missing = dataclasses.replace(RECIPE, model=Model(path="/no/such/folder"))
    with pytest.raises(RecipeError, match="/no/such/folder"):
        run_in_process(300, make_plan, missing, machine())
    with pytest.raises(TrainingError, match=r"planning took more than 0\.01 s"):
        run_in_process(0.01, make_plan, RECIPE, machine())
    with pytest.raises(TrainingError, match="planning ended with status 0"):
        run_in_process(300, sys.exit, 0)


# When gradients are reduced and weights freed


SYNC, RESHARD = auto.COLLECTIVE_KEYS
NAMED = ["recipe=quickstart", "strategy.kind=fsdp", "batch.micro_batch_size=2"]


def loaded(*overrides):
    return load_recipe([*NAMED, *overrides], ranks=2, files=False).recipe


def gpus(memory):
    return dataclasses.replace(machine(memory=memory), gpus_per_node=2)


def with_collectives(recipe, *values):
    chosen = dict(zip(auto.COLLECTIVE_KEYS, values, strict=True))
    return dataclasses.replace(recipe, strategy=dataclasses.replace(recipe.strategy, **chosen))


def with_profile(recipe, machine, **more):
    """What a plan knows."""
    profiles = profiled(machine)
    return recipe, Facts(ranks=machine.ranks, machine=machine, **{"profiles": profiles} | more)


def collectives(recipe, memory, **more):
    """The values chosen for the two keys, and why."""
    chosen, why = auto.choose_collectives(*with_profile(recipe, gpus(memory), **more))
    return tuple(getattr(chosen.strategy, key) for key in auto.COLLECTIVE_KEYS), why


def needed(recipe, *values):
    """Memory of which the estimate leaves 15 % free."""
    full = profile_model(recipe, device="cuda")
    plan = estimated_plan(
        Work(full, with_collectives(recipe, *values), ranks=gpus(80 * GIB).ranks), gpus(80 * GIB)
    )
    return math.ceil(plan.needed / 0.85)


@pytest.mark.parametrize("overrides", [(), ("activation_checkpointing.mode=full",)], ids=str)
def test_collectives_are_as_few_as_leave_room(overrides):
    # Wide enough that the two settings cost more than what is rounded
    wide = "model.config.hidden_size=2048"
    recipe = loaded(wide, "model.config.intermediate_size=8192", *overrides)
    every = list(itertools.product((False, True), repeat=2))
    sizes = {values: needed(recipe, *values) for values in every}
    assert sizes[False, False] > max(sizes[False, True], sizes[True, False])
    assert min(sizes.values()) == sizes[True, True]
    for size in sizes.values():
        for memory in (size - 2**20, size + 2**20):
            fits = [values for values in every if sizes[values] <= memory]
            values, why = collectives(recipe, memory)
            assert values == (fits[0] if fits else (True, True))
            text = "less than 15%" if values == (True, True) else "by estimate 15%"
            assert why.startswith(text) or why.endswith("free")
            assert text in why
    assert collectives(recipe, sizes[False, False] + 2**20)[0] == (False, False)
    assert collectives(recipe, sizes[True, True] + 2**20)[0] == (True, True)


def test_collectives_stay_if_the_memory_is_not_known_or_too_small():
    values, why = collectives(loaded(), None)
    assert (values, why) == ((True, True), "the size of the memory is not known")
    own = dataclasses.replace(loaded(), model=Model(builder="package.module:build"))
    full = profile_model(loaded(), device="cuda")
    profiles = dataclasses.replace(full, saved={}), lambda: full
    chosen, _ = auto.choose_collectives(
        *with_profile(own, gpus(80 * GIB), profiles=lambda _: profiles)
    )
    assert chosen == with_collectives(own, True, True), "what the user's own model saves is unknown"
    # The quick estimate is too high to say that it fits, and the model cannot be traced
    blocks_of_unknown_size = dataclasses.replace(full, saved={}, packed_attention=False)
    profiles = blocks_of_unknown_size, lambda: blocks_of_unknown_size
    chosen, _ = auto.choose_collectives(
        *with_profile(loaded(), gpus(80 * GIB), profiles=lambda _: profiles)
    )
    assert chosen == with_collectives(loaded(), True, True)


def test_the_reason_names_the_memory_that_decides():
    """On GPUs the collectives take no host memory. On CPUs a checkpoint takes some beside a rank's."""
    recipe = loaded("model.config.hidden_size=1024", "checkpoint.every_steps=5")
    here = dataclasses.replace(gpus(80 * GIB), host_memory=GIB)
    chosen, why = auto.choose_collectives(*with_profile(recipe, here))
    assert chosen == with_collectives(recipe, False, False)
    assert why.endswith("by estimate 15% of 80.0 GiB of GPU memory or more stay free")
    small = dataclasses.replace(here, memory=GIB)
    _, why = auto.choose_collectives(*with_profile(recipe, small))
    assert why.endswith("fewer collectives would leave less than 15% of 1.0 GiB of GPU memory free")

    full = profile_model(recipe, device="cpu")
    cpus = dataclasses.replace(here, name="CPU", device="cpu", memory=8 * GIB)
    chosen, why = auto.choose_collectives(*with_profile(recipe, cpus))
    assert chosen == with_collectives(recipe, True, True)
    needed = min(
        estimated_plan(
            Work(full, with_collectives(recipe, *values), ranks=cpus.ranks), cpus
        ).host.total
        for values in ((False, False), (False, True), (True, False))
    )
    assert why.endswith(
        f"fewer collectives would need {bytes_as_text(needed)} of a node's 1.0 GiB of host memory"
    )
    cpus = dataclasses.replace(cpus, memory=2**28, host_memory=16 * GIB)
    _, why = auto.choose_collectives(*with_profile(recipe, cpus))
    assert why.endswith("less than 15% of 256.0 MiB of host memory a rank free")


@pytest.fixture
def node(monkeypatch):
    """Two ranks on a node of 64 GiB, of which 50 are free."""
    monkeypatch.setattr(resolve, "gather", lambda value, group: [value, value])
    monkeypatch.setattr(resolve.host_memory, "allowed", lambda: 64 * GIB)
    monkeypatch.setattr(resolve.host_memory, "available", lambda: 50 * GIB)
    monkeypatch.setattr(resolve.host_memory, "resident", lambda: GIB)
    ranks = SimpleNamespace(device=torch.device("cpu"), size=2, rank=0, group=None)
    return ranks, SimpleNamespace(local_world_size=2)


def test_the_machine_does_not_depend_on_free_host_memory(node, monkeypatch):
    before = resolve.detect_machine(*node)
    assert (before.memory, before.host_memory) == (32 * GIB, 64 * GIB)
    monkeypatch.setattr(resolve.host_memory, "available", lambda: GIB)
    assert resolve.detect_machine(*node) == before
    monkeypatch.setattr(resolve.host_memory, "allowed", lambda: None)
    assert resolve.detect_machine(*node).host_memory is None


@pytest.mark.parametrize(
    ("needed", "line"),
    [
        (52, None),
        (53, "by estimate a node needs 53.0 GiB, and 52.0 GiB of its 64.0 GiB are free"),
        (65, "by estimate a node needs 65.0 GiB, and has 64.0 GiB"),
        (None, None),
    ],
)
def test_little_free_host_memory_is_a_warning(node, monkeypatch, caplog, needed, line):
    def estimates(*arguments):
        for size in () if needed is None else (100, needed):
            host = HostMemory(processes=size * GIB, offload=0, workers=0, staging=0)
            yield dataclasses.replace(example_plan(), host=host)

    monkeypatch.setattr(resolve, "estimates", estimates)
    ranks, environment = node
    resolve.warn_of_memory(
        RECIPE,
        lambda: None,
        resolve.detect_machine(*node),
        exact=True,
        ranks=ranks,
        environment=environment,
    )
    assert caplog.messages == ([] if line is None else [f"host memory: {line}"])


def test_a_gpu_that_is_too_small_is_a_warning_before_the_start(node, caplog):
    """Without a trace, what is held without activations is compared."""
    recipe = with_collectives(loaded("model.keep_logits=false"), True, True)
    full = profile_model(recipe, device="cuda")
    shapes = dataclasses.replace(full, saved={})
    ranks, environment = node

    def warn(memory, *, exact):
        caplog.clear()
        resolve.warn_of_memory(
            recipe,
            lambda: (shapes, lambda: full if exact else pytest.fail("traced")),
            gpus(memory),
            exact=exact,
            ranks=ranks,
            environment=environment,
        )
        return [line for line in caplog.messages if not line.startswith("host memory")]

    plan = estimated_plan(Work(shapes, recipe, ranks=gpus(GIB).ranks), gpus(GIB))
    held = plan.context + plan.step.held.total
    needed = estimated_plan(Work(full, recipe, ranks=gpus(GIB).ranks), gpus(GIB)).needed
    assert held < needed
    assert warn(80 * GIB, exact=False) == []
    assert warn(held, exact=False) == []
    assert warn(held - 1, exact=False) == [
        f"memory: by estimate a GPU needs at least {bytes_as_text(held)}, and "
        f"{bytes_as_text(held - 1)} are free; `launcher plan` names what fits"
    ]
    assert warn(needed, exact=True) == []
    assert warn(needed - 1, exact=True)[0].startswith("memory: by estimate a GPU needs ")


def test_only_auto_that_matters_is_replaced():
    assert auto.open_collectives(loaded(), ranks=2) == [SYNC, RESHARD]
    assert auto.open_collectives(loaded("batch.micro_batch_size=8"), ranks=2) == [RESHARD]
    assert auto.open_collectives(loaded("strategy.kind=ddp"), ranks=2) == []
    assert auto.open_collectives(loaded("strategy.kind=auto"), ranks=2) == [], "the search does"
    assert collectives(loaded("batch.micro_batch_size=8"), 80 * GIB)[0] == ("auto", False)
    assert collectives(loaded(f"strategy.{SYNC}=true"), 80 * GIB)[0] == (True, False)
    given = loaded(f"strategy.{SYNC}=true", f"strategy.{RESHARD}=true", "model.keep_logits=false")
    assert resolve.resolve_by_model(given, None, gpus(GIB), start=Fresh(), ranks=None, run=None) is given  # fmt: skip


def test_resume_keeps_the_collectives_of_the_checkpoint():
    recipe = loaded()
    for values in itertools.product((False, True), repeat=2):
        earlier = dict(zip(auto.COLLECTIVE_KEYS, values, strict=True))
        kept, why = collectives(recipe, 80 * GIB, exact=earlier)
        assert (kept, why) == (values, "as in the checkpoint, so that the resume is exact")  # fmt: skip
    # Earlier versions recorded their default, which meant true
    assert collectives(recipe, 80 * GIB, exact={SYNC: "auto", RESHARD: True})[0] == (True, True)
    # 15 % need not stay free, but it must fit
    faster = dict.fromkeys(auto.COLLECTIVE_KEYS, False)
    fits = needed(recipe, False, False)
    assert collectives(recipe, round(0.9 * fits), exact=faster)[0] == (False, False)
    assert collectives(recipe, round(0.8 * fits), exact=faster)[0] != (False, False)


def test_collectives_that_ran_out_of_memory_are_not_chosen_again():
    recipe, here = loaded(), gpus(80 * GIB)
    noted = {"event": "failed", "reason": "out_of_memory", "ranks": 2}
    noted |= auto.recorded_settings(with_collectives(recipe, False, False), here)

    earlier = dict.fromkeys(auto.COLLECTIVE_KEYS, False)

    def failed(**changes):
        values, why = collectives(recipe, 80 * GIB, exact=earlier, events=[noted | changes])
        assert (values == (True, True)) is ("ran out of memory" in why)
        return values == (True, True)

    assert failed()
    assert not failed(**dict.fromkeys(auto.COLLECTIVE_KEYS, True))
    assert not failed(ranks=4)
    assert not failed(micro_batch_size=4)


# Whether the logits are kept for the backward pass


LARGE = (
    "model.config.vocab_size=128256",
    "model.config.max_position_embeddings=4096",
    "data.sequence_length=4096",
)


def logits(recipe, memory, **more):
    return auto.choose_logits(*with_profile(recipe, gpus(memory), **more))


def test_logits_are_kept_where_that_leaves_room():
    recipe = loaded(*LARGE)
    full = profile_model(recipe, device="cuda")
    kept = dataclasses.replace(recipe, model=dataclasses.replace(recipe.model, keep_logits=True))
    size = math.ceil(
        estimated_plan(Work(full, kept, ranks=gpus(80 * GIB).ranks), gpus(80 * GIB)).needed / 0.85
    )
    chosen, why = logits(recipe, size + 2**20)
    assert chosen == kept
    assert why.startswith("by estimate 15% of ")
    chosen, why = logits(recipe, size - 2**20)
    assert chosen.model.keep_logits is False
    assert "less than 15%" in why


def test_logits_are_left_alone_where_nothing_is_to_be_chosen():
    assert logits(loaded(), 80 * GIB) is None, "they are one chunk, which is kept anyway"
    assert logits(loaded(*LARGE), None) is None, "the size of the memory is not known"
    assert logits(loaded(*LARGE, "model.chunked_loss=false"), 80 * GIB) is None


def test_kept_logits_that_ran_out_of_memory_are_not_chosen_again():
    recipe, here = loaded(*LARGE), gpus(80 * GIB)
    noted = {"event": "failed", "reason": "out_of_memory", "ranks": 2}
    kept = dataclasses.replace(recipe, model=dataclasses.replace(recipe.model, keep_logits=True))
    noted |= auto.recorded_settings(kept, here)

    def failed(**changes):
        chosen, why = logits(recipe, 80 * GIB, events=[noted | changes])
        assert chosen.model.keep_logits is not ("ran out of memory" in why)
        return not chosen.model.keep_logits

    assert failed()
    assert failed(**dict.fromkeys(auto.COLLECTIVE_KEYS, True)), "collectives may differ"
    assert not failed(keep_logits=False)
    assert not failed(micro_batch_size=4)
    # Micro-batches that ran out of memory with kept logits may fit without them
    sized = loaded(*LARGE, "batch.micro_batch_size=auto")
    facts = Facts(ranks=2, machine=here, events=[noted])
    assert auto.failed_micro_batches(sized, facts) == [2]


@pytest.mark.parametrize("device", ["cuda", "cpu"])
@pytest.mark.parametrize("mode", ["null", "{mode: selective}", "{mode: full}"])
@pytest.mark.parametrize("model", ["llama", "qwen3_moe", "gemma3_text"])
def test_quick_estimate_is_never_too_low(device, mode, model):
    precision = "{param_dtype: bfloat16}" if device == "cuda" else "null"
    recipe = loaded(
        f"model.config.model_type={model}",
        f"strategy.mixed_precision={precision}",
        f"activation_checkpointing={mode}",
        "data.sequence_length=256",
    )
    full = profile_model(recipe, device=device)
    assert full.packed_attention
    high, good = (
        estimated_plan(Work(profile, recipe, ranks=gpus(80 * GIB).ranks), gpus(80 * GIB)).needed
        for profile in (with_most_saved(dataclasses.replace(full, saved={}), recipe), full)
    )
    assert full.saved
    assert high >= good
