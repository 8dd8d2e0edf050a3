"""Tests of GPU rates, step times, and the search for the fastest configuration that fits."""

import dataclasses
import json
import math

import pytest

from launcher.distributed.hardware import GPUS, find_gpu
from launcher.errors import RecipeError
from launcher.planner import search
from launcher.planner.auto import choose_saves
from launcher.planner.candidates import (
    BUDGETS,
    PARALLEL_KEYS,
    larger_sizes,
    smallest,
    variants,
)
from launcher.planner.facts import Facts
from launcher.planner.formatting import configuration_cells
from launcher.planner.machine import Rates, known_machine, read_rates
from launcher.planner.plan import estimated_plan
from launcher.planner.plan_as_json import as_json
from launcher.planner.profile import profile_model
from launcher.planner.recipe_values import cache_key
from launcher.planner.search import (
    EQUAL_SPEED,
    concrete,
    fastest_that_fits,
    search_configurations,
)
from launcher.planner.speed import LATENCY, _collective, estimate_time, tokens_per_step
from launcher.planner.stages import blocks_that_fit
from launcher.planner.work import Work
from launcher.recipe.load import load_recipe
from launcher.recipe.schema import ActivationCheckpointing, Lora
from launcher.recipe.yaml_text import overrides_between
from tests import REPOSITORY

RECIPES = REPOSITORY / "recipes"
GIB = 2**30

SMALL = """\
run: {name: small, max_steps: 10}
model:
  config: {model_type: llama, vocab_size: 8000, hidden_size: 512, intermediate_size: 1536, num_hidden_layers: 8,
           num_attention_heads: 8, num_key_value_heads: 4}
data: {train: [train.txt], tokenizer: bytes, sequence_length: 1024}
batch: {global_batch_size: 64, micro_batch_size: 4}
"""
DDP, OFFLOAD = "strategy.kind=ddp", "strategy.cpu_offload.pin_memory=true"
UNSYNCED = "strategy.sync_every_micro_batch=false"


@pytest.fixture(scope="module")
def load(loader):
    return loader("small", SMALL)


def by_estimate(recipe, on, *, stages=True):
    return estimated_plan(Work(profile_model(recipe, device=on.device), recipe, ranks=on.ranks), on)


@pytest.fixture
def estimated_plans(monkeypatch):
    """Make the search use estimated plans instead of traced plans."""
    monkeypatch.setattr(search, "make_plan", by_estimate)
    monkeypatch.setattr(search, "trace_ahead", lambda recipes, machine: None)


def machine(memory=80 * GIB, nodes=1, gpus=8, **settings):
    return known_machine("h100", nodes=nodes, gpus_per_node=gpus, memory=memory, **settings)


def test_search_offers_compiled_blocks_on_gpus(load):
    recipe = load()
    settings = {"strategies": False, "micro_batches": False, "compiles": True}
    (_, compiled) = variants(recipe, machine(), **settings)
    assert overrides_between(recipe, compiled) == ("model.compile=true",)
    on_cpus = known_machine("cpu", nodes=1, gpus_per_node=2)
    for written, where in ((recipe, on_cpus), (compiled, machine())):
        assert variants(written, where, **settings) == [written]


@pytest.mark.slow
def test_a_recipe_that_is_as_fast_as_the_fastest_stays(load, estimated_plans):
    """`auto` had chosen another configuration than the one with the star."""
    where = machine(gpus=1)
    found = search_configurations(load("model.compile=true"), where)
    fastest, limit = found.best, found.best.seconds.total * (1 + EQUAL_SPEED)
    equal = [row.recipe for row in found.configurations if row.seconds.total <= limit]
    assert len(equal) > 1
    for recipe in equal:
        result = search_configurations(recipe, where, keep_written=True)
        assert result.best.recipe == recipe
        table = list(configuration_cells(as_json(recipe, result.written.plan, result)))
        starred = [row for row in table if row[0].startswith("*")]
        assert [row[-1] for row in starred] == ["fastest that fits, as written"]
        assert not any("fsdp" in row[1] for row in table), "one GPU shards nothing"
    slow = dataclasses.replace(
        fastest.recipe, activation_checkpointing=ActivationCheckpointing(mode="full")
    )
    result = search_configurations(slow, where, keep_written=True)
    assert result.best.recipe != slow


@pytest.mark.long
def test_reduction_in_bfloat16_is_shown_and_never_chosen(load, estimated_plans):
    """With a slow network it is the fastest; `auto` and the best configuration are exact."""
    slow = machine(overrides={"intra_node_bandwidth": 5e9})
    for written in (load(), load("strategy.kind=auto")):
        result = search_configurations(written, slow)
        options = [
            one
            for one in result.configurations
            if "strategy.mixed_precision.reduce_dtype=bfloat16" in one.overrides
        ]
        assert len(options) == 1
        assert options[0].seconds.total < result.best.seconds.total
        assert result.best.recipe.strategy.mixed_precision.reduce_dtype == "float32"
        chosen = fastest_that_fits(written, slow).recipe.strategy
        assert chosen.mixed_precision.reduce_dtype == "float32"
    cells = configuration_cells(as_json(result.written.recipe, result.written.plan, result))
    (row,) = (row for row in cells if "reduced in bf16" in row[1])
    assert row[-1] == "gradients less exact, never chosen by auto"
    fast = search_configurations(load("batch.global_batch_size=2048"), machine())
    assert all("reduce_dtype" not in " ".join(one.overrides) for one in fast.configurations)


def test_search_offers_to_compute_kept_logits_again(load):
    settings = {"strategies": False, "micro_batches": False, "logits": True}
    written = load("model.keep_logits=true")
    _, again = variants(written, machine(), **settings)
    assert overrides_between(written, again) == ("model.keep_logits=false",)
    assert variants(load(), machine(), **settings) == [load()]
    assert next(smallest(written, machine())).model.keep_logits is False


def test_one_rank_may_offload_the_optimizer_state(load):
    """Beside FSDP, which casts weights for each block: it is slower, with less memory."""
    alone = machine(gpus=1)
    found = variants(load(ranks=1), alone)
    offloaded = [
        r for r in found if r.strategy.cpu_offload and r.strategy.cpu_offload.what == "optimizer"
    ]
    assert {recipe.uses_one_rank(1) for recipe in offloaded} == {True, False}
    plain = [r for r in found if r.strategy.cpu_offload is None and r.uses_one_rank(1)]
    assert {recipe.strategy.kind for recipe in plain} == {"ddp"}, "each configuration once"


# Rates

# fmt: off
GPU_NAMES = {
    "h100": "H100", "NVIDIA H100 80GB HBM3": "H100", "H100-PCIe": "H100 PCIe", "NVIDIA H100 NVL": "H100 NVL",
    "a100-40gb": "A100 40GB", "NVIDIA A100-SXM4-40GB": "A100 40GB", "NVIDIA A100 80GB PCIe": "A100 80GB PCIe", "a100": "A100 80GB",
    "NVIDIA L40S": "L40S", "NVIDIA L4": "L4", "NVIDIA GeForce RTX 4090": "RTX 4090", "rtx4090": "RTX 4090", "NVIDIA L40": "L40",
    "Tesla T4": "T4", "Tesla V100-SXM2-16GB": "V100 16GB", "Tesla V100-PCIE-32GB": "V100 32GB PCIe", "v100": "V100 32GB",
    "NVIDIA A10": "A10", "NVIDIA A10G": "A10G", "NVIDIA A30": "A30", "NVIDIA A40": "A40", "NVIDIA RTX A6000": "A6000",
    "NVIDIA RTX 6000 Ada Generation": None, "NVIDIA GeForce RTX 5090": "RTX 5090",
    "NVIDIA RTX PRO 6000 Blackwell Workstation Edition": "RTX PRO 6000",
    "NVIDIA RTX PRO 6000 Blackwell Server Edition": "RTX PRO 6000 Server",
    "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition": None,
    "NVIDIA H20": "H20", "NVIDIA H800": "H800", "NVIDIA A800-SXM4-80GB": "A800 80GB", "NVIDIA A800 40GB Active": "A800 40GB",
    "NVIDIA GH200 480GB": "GH200 480GB", "NVIDIA GH200 144G HBM3e": "GH200 144G", "NVIDIA GB200": "GB200",
    "NVIDIA B300 SXM6 AC": "B300", "AMD Instinct MI250X": "MI250X", "AMD Instinct MI300X": "MI300X",
    "AMD Instinct MI325X": "MI325X", "AMD Instinct MI355X": "MI355X", "AMD Radeon Graphics": None,
    "NVIDIA GeForce RTX 4090 Laptop GPU": None, "NVIDIA GeForce RTX 4090 D": None, "NVIDIA GeForce RTX 5090 D": None,
    "rtx4090d": None, "NVIDIA A100-SXM4-40GB MIG 1g.5gb": None, "NVIDIA H100 80GB HBM3 MIG 3g.40gb": None,
    "NVIDIA A40-8Q": None, "NVIDIA GeForce RTX 2080": None,
}
# fmt: on


@pytest.mark.parametrize("name", GPU_NAMES)
def test_find_gpu_accepts_user_and_cuda_names(name):
    found = find_gpu(name)
    assert (found.name if found else None) == GPU_NAMES[name]


def test_memory_size_selects_the_gpu_variant():
    assert [find_gpu(gpu.name) for gpu in GPUS] == list(GPUS)
    assert find_gpu("a100", memory=40 * GIB).name.startswith("A100 40GB")
    found = known_machine(None, nodes=1, gpus_per_node=2, memory=45 * GIB)
    assert found.memory == 45 * GIB
    assert found.rates.source.startswith("L40S data sheet"), "the GPU with the nearest memory size"
    known = r"gpu=h1000: is not known; give one of .*h100-pcie.*rtx-3090.*mi355x, cpu"
    with pytest.raises(RecipeError, match=known):
        known_machine("h1000", nodes=1, gpus_per_node=8)


def test_rates_are_read_from_doctor_output(tmp_path):
    file = tmp_path / "rates.json"
    measured = {"half_flops": 5e14, "inter_node_bandwidth": None, "source": "measured"}
    file.write_text(json.dumps({"fit": True, "rates": measured}))
    rates = machine(overrides=read_rates(file)).rates
    assert (rates.half_flops, rates.source) == (5e14, "measured")
    assert rates.inter_node_bandwidth == machine().rates.inter_node_bandwidth
    for content in ("{}", "[", '{"half_flops": "fast"}', '{"half_flops": -1}', "[1]"):
        file.write_text(content)
        with pytest.raises(RecipeError, match=r"rates\.json: cannot be read: .*launcher doctor"):
            read_rates(file)
    with pytest.raises(RecipeError, match="No such file"):
        read_rates(tmp_path / "none.json")


# Step times


def unlimited_machine(**rates):
    plain = Rates(
        half_flops=1e15, float32_flops=5e14, memory_bandwidth=1e30, intra_node_bandwidth=1e30, inter_node_bandwidth=1e30,
        host_bandwidth=1e30, host_adamw=1e30, source="",
    )  # fmt: skip
    return dataclasses.replace(machine(), rates=dataclasses.replace(plain, **rates))


def step_time(recipe, **rates):
    machine = unlimited_machine(**rates)
    work = Work(profile_model(recipe, device="cuda"), recipe, ranks=machine.ranks)
    return estimate_time(work, machine)


def parameters(recipe):
    return profile_model(recipe, device="cuda").parameters


def test_compute_time_is_flops_divided_by_rate(load):
    wide = ("model.config.hidden_size=4096", "model.config.intermediate_size=8192", "model.config.num_attention_heads=32",
            "batch.micro_batch_size=8", "data.sequence_length=2048")  # fmt: skip
    seconds = step_time(load(*wide))
    matrices = 8 * (2 * 4096**2 + 2 * 4096 * 512 + 3 * 4096 * 8192) + 4096 * 8000
    # Attention scores and values of 8 blocks: the causal half, at half the rate
    attention = 8 * 2 * 2 * 2048 * 4096 / 2
    tokens = 64 * 2048 / 8
    operations = tokens * (2 * matrices + 2 * attention)
    assert seconds.forward == pytest.approx(operations / 1e15, rel=0.02)
    assert seconds.backward == pytest.approx(2 * seconds.forward, rel=0.05)
    head = tokens * 2 * 4096 * 8000 / 1e15  # the chunked loss recomputes the head
    assert seconds.recomputation == pytest.approx(head)
    again = step_time(load(*wide, "activation_checkpointing.mode=full"))
    assert 0.9 * seconds.forward < again.recomputation - head < seconds.forward


def test_slow_links_increase_communication_time(load):
    def with_slow_links(*overrides):
        return step_time(load("batch.micro_batch_size=1", *overrides), intra_node_bandwidth=1e9)

    seconds = with_slow_links()
    # One byte per parameter, in each of eight micro-batches
    moved = parameters(load()) * 7 / 8 / 1e9 * 8
    total = 2 * 2 * moved + 4 * moved  # two all-gathers in bfloat16, one reduction in float32
    hidden = seconds.forward + seconds.backward
    assert seconds.communication == pytest.approx(total - hidden, rel=0.02)
    kept = with_slow_links("strategy.reshard_after_backward=false").total
    assert kept < with_slow_links("strategy.reshard_after_forward=false").total < seconds.total
    assert with_slow_links("strategy.reshard_after_backward=false", UNSYNCED).total < kept
    assert with_slow_links(DDP).total < seconds.total


def test_offload_time_includes_copies_and_host_adamw(load):
    recipe = load(OFFLOAD)
    adamw = parameters(recipe) / 8 / 1e6
    assert step_time(recipe, host_adamw=1e6).optimizer == pytest.approx(adamw, rel=0.01)
    assert step_time(recipe, host_bandwidth=1e6).offload > 100
    assert step_time(recipe).offload == pytest.approx(0, abs=1e-12)


def test_offloaded_gradients_are_added_from_the_second_reduction_on(load):
    """The backward pass hides copies and additions only as far as it computes meanwhile."""
    every, once = (load("batch.micro_batch_size=2", OFFLOAD, *more) for more in ((), (UNSYNCED,)))
    slow = {"host_bandwidth": 1e9}
    assert step_time(every, **slow).offload > step_time(once, **slow).offload
    exposed = 3 * 12 / 28 * parameters(every) / 8 / 1e6
    assert step_time(every, host_adamw=1e6).offload == pytest.approx(exposed, rel=0.01)
    assert step_time(once, host_adamw=1e6).offload == 0


def test_offload_uploads_are_not_overlapped_on_one_gpu(load):
    batch = ("batch.global_batch_size=8", "batch.micro_batch_size=8")
    recipe = load(OFFLOAD, *batch, ranks=1)
    profile = profile_model(recipe, device="cuda")
    one = dataclasses.replace(unlimited_machine(host_bandwidth=1e12), gpus_per_node=1)
    uploads = 2 * 4 * profile.parameters / 1e12  # float32 master weights, forward and backward
    assert estimate_time(Work(profile, recipe, ranks=one.ranks), one).offload == pytest.approx(
        uploads, rel=0.01
    )


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_activation_offload_overlaps_copies_with_compute(load, kind):
    mode = "activation_checkpointing={mode: full, offload_to_cpu: true}"
    recipe = load(f"strategy.kind={kind}", mode)
    assert step_time(recipe).offload == 0
    slow = step_time(recipe, host_bandwidth=1e6)
    copies = 2 * 8 * 2 * 512 * tokens_per_step(recipe) / 8 / 1e6  # inputs of 8 blocks, copied twice
    hidden = slow.forward + slow.backward + slow.recomputation
    assert slow.offload == pytest.approx(copies - hidden, rel=1e-3)


def test_larger_budget_recomputes_less(load):
    budgets = [f"{{mode: selective, budget: {share}}}" for share in (0.1, 0.4, 0.9)]
    modes = [f"activation_checkpointing={mode}" for mode in ("{mode: full}", *budgets)]
    compiled = [step_time(load(mode, "model.compile=true")).recomputation for mode in modes]
    assert compiled == sorted(set(compiled), reverse=True)
    # Eager, the host decides about each operator, of so small a model for longer than it computes
    full, *eager = [step_time(load(mode)).recomputation for mode in modes]
    assert set(eager) == {max(eager)}
    assert full < max(eager)


def test_sharding_divides_muon_time_by_ranks(load):
    def extra(*overrides):
        muon, adamw = load("optimizer.name=muon", *overrides), load(*overrides)
        rates = {"half_flops": 1e12}  # on GPUs products are in bfloat16
        return step_time(muon, **rates).optimizer - step_time(adamw, **rates).optimizer

    attention = 2 * (4 * 512**3 + 2 * 512**3) + 2 * (4 * 256**2 * 512 + 2 * 256**3)
    block = attention + 3 * (4 * 512**2 * 1536 + 2 * 512**3)
    whole = 8 * 5 * block / 1e12
    assert extra(DDP) == pytest.approx(whole, rel=0.01)
    assert extra(DDP, "strategy.shard_optimizer=true") == pytest.approx(whole / 8, rel=0.01)
    assert extra() == pytest.approx(whole / 8, rel=0.01)


# The search


@pytest.mark.slow
def test_configurations_are_sorted_without_dominated_configurations(load, estimated_plans):
    recipe = concrete(load(), machine())
    result = search_configurations(recipe, machine())
    rows = result.configurations
    assert result.evaluated > 100
    assert result.best.plan.fits
    assert (result.written.recipe, result.written.overrides) == (recipe, ())
    assert 2 <= len(rows) <= 8
    assert result.best in rows
    assert result.suggestions == ()
    assert any(one.recipe == recipe for one in rows)
    for one in rows:
        assert one.tokens_per_second == tokens_per_step(recipe) / one.seconds.total
        for other in rows:
            device = other.plan.needed < one.plan.needed
            host = other.plan.host.offload <= one.plan.host.offload
            beaten = device and host and other.seconds.total < one.seconds.total
            assert not beaten or one.recipe == recipe
    speeds = [one.tokens_per_second for one in rows]
    assert speeds == sorted(speeds, reverse=True)


def test_auto_reshards_only_if_memory_requires_it(load, estimated_plans):
    key, sync = "strategy.reshard_after_forward", "strategy.sync_every_micro_batch=true"
    written, *given = (load(f"{key}={x}", sync) for x in ("auto", "true", "false"))
    true, false = (by_estimate(recipe, machine()).needed for recipe in given)
    assert true < false
    for memory, reshards in ((false, False), (true, True)):
        best = fastest_that_fits(written, machine(memory=memory + 2**20))
        assert best.overrides == (f"{key}={str(reshards).lower()}",)
        strategy = dataclasses.replace(written.strategy, reshard_after_forward=reshards)
        assert best.recipe == dataclasses.replace(written, strategy=strategy)
    assert fastest_that_fits(written, machine(memory=true - 2**28)) is None


@pytest.mark.slow
def test_room_is_gradient_shards_and_two_all_gathers(load):
    recipe, embedding = load("batch.global_batch_size=32"), 8000 * 512
    plan = by_estimate(recipe, machine())
    shards = 4 * parameters(recipe) // 8
    assert plan.room == pytest.approx(max(2**28, shards + 2 * 2 * embedding), rel=0.01)
    sizes = ["model.config.vocab_size=200000", "model.config.hidden_size=2048"]
    large = load(*sizes, "batch.global_batch_size=32")
    plan = by_estimate(large, machine())
    shards = 4 * parameters(large) // 8
    assert plan.room == pytest.approx(shards + 2 * 2 * 200_000 * 2048, rel=0.01)
    # Two micro-batches: the shards of the first one are part of the peak, if it is reduced
    assert by_estimate(load(*sizes), machine()).room == pytest.approx(plan.room - shards, rel=0.01)
    assert by_estimate(load(*sizes, UNSYNCED), machine()).room == plan.room
    frozen = dataclasses.replace(large, lora=Lora())
    assert by_estimate(frozen, machine()).room == pytest.approx(2 * 200_000 * 2048, rel=0.05)
    assert by_estimate(load(DDP), machine()).room == 0
    assert by_estimate(recipe, known_machine("cpu", nodes=1, gpus_per_node=8)).room == 0


def test_no_room_is_needed_for_gradients_that_exist_at_the_peak(load):
    """Large weights and few activations: the peak is at the end of the backward pass."""
    sizes = ["model.config.vocab_size=260", "model.config.num_hidden_layers=32",
             "model.config.hidden_size=2048", "model.config.intermediate_size=6144"]  # fmt: skip
    few = ["data.sequence_length=16", "batch.global_batch_size=8", "batch.micro_batch_size=1"]
    plan = by_estimate(load(*sizes, *few), machine())
    shards = plan.step.phases["optimizer"].components.gradients
    assert shards + plan.step.phases["forward"].total < plan.tensors + plan.room
    assert plan.room < shards
    # Gradients that are reduced once a step are not shards before
    unsynced = by_estimate(load(*sizes, *few, UNSYNCED), machine())
    assert unsynced.room > shards


@pytest.mark.slow
def test_search_prefers_configurations_with_room(load, estimated_plans):
    recipe = load()
    fastest = search_configurations(recipe, machine()).best
    assert fastest.plan.has_room
    # A GPU on which the fastest of FSDP fits, but without its room
    best = dataclasses.replace(recipe.batch, micro_batch_size="auto")
    auto = dataclasses.replace(recipe, batch=best)
    wide = fastest_that_fits(auto, machine())
    assert wide.plan.room > 0
    on = machine(memory=wide.plan.needed + wide.plan.room - 1)
    found = fastest_that_fits(auto, on)
    assert by_estimate(wide.recipe, on).fits
    assert by_estimate(wide.recipe, on).has_room is False
    assert found.plan.has_room
    assert found.recipe != wide.recipe
    # One on which nothing has room
    every = variants(search.concrete(auto, on), on, strategies=False)
    plan = min((by_estimate(one, on) for one in every), key=lambda plan: plan.needed)
    tight = fastest_that_fits(auto, machine(memory=plan.needed + plan.room // 2))
    assert tight.plan.fits
    assert tight.plan.has_room is False


@pytest.mark.slow
def test_cpu_offload_is_chosen_only_if_needed(load, estimated_plans):
    recipe = load(ranks=1)
    tight = {"gpus": 1, "memory": 16 * parameters(recipe) + 600 * 2**20}
    assert search_configurations(recipe, machine(gpus=1)).best.recipe.strategy.cpu_offload is None
    best = search_configurations(recipe, machine(**tight)).best
    assert best.recipe.strategy.cpu_offload is not None
    assert best.plan.fits
    assert search_configurations(recipe, machine(**tight, host_memory=3 * GIB)).best is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("fsdp", ()),
        ("fsdp_offload", ("strategy.replicate=2", "activation_checkpointing.every_n_blocks=2")),
        ("ddp", ("strategy.sync_every_micro_batch=true",)),
        ("quickstart", ("batch.micro_batch_size=4",)),
        ("fsdp", ("batch.micro_batch_size=null", "batch.micro_batch_tokens=4096", "data.packing=false",
                  "strategy.mixed_precision.reduce_dtype=bfloat16")),
    ],
    ids=str,
)  # fmt: skip
def test_overrides_reproduce_the_configuration(name, overrides):
    base = [f"recipe={RECIPES / name}.yaml", *overrides]
    written = load_recipe(base, ranks=4).recipe
    found = variants(written, machine(nodes=2, gpus=2))
    by_overrides = {overrides_between(written, recipe): recipe for recipe in found}
    assert len(by_overrides) == len(found)
    kinds = {(r.strategy.kind, r.strategy.cpu_offload is None) for r in by_overrides.values()}
    assert kinds == {("ddp", True), ("fsdp", True), ("fsdp", False)}
    assert {r.batch.global_batch_size for r in by_overrides.values()} == {
        written.batch.global_batch_size
    }
    tried = set()
    for pairs, recipe in by_overrides.items():
        if not tried.issuperset(pairs):  # each override once
            tried.update(pairs)
            assert load_recipe([*base, *pairs], ranks=4).recipe == recipe, pairs


@pytest.mark.slow
def test_search_offers_mixed_precision_for_float32(load, estimated_plans):
    result = search_configurations(load("strategy.mixed_precision=null"), machine())
    changed = "strategy.mixed_precision.param_dtype=bfloat16"
    assert any(changed in one.overrides for one in result.configurations)
    assert result.written.recipe.strategy.mixed_precision is None


def test_trace_overrides_the_estimate(load, monkeypatch):
    traced = []

    def plan_of(recipe, on, *, stages=True):
        plan = by_estimate(recipe, on)
        if recipe.activation_checkpointing is not None:
            return plan
        traced.append(recipe)  # the trace finds more memory than the estimate
        large = dataclasses.replace(plan.step.held, temporary=100 * GIB)
        peak = dataclasses.replace(plan.step.peak, components=large)
        step = dataclasses.replace(plan.step, timeline=(*plan.step.timeline, peak))
        return dataclasses.replace(plan, step=step)

    monkeypatch.setattr(search, "make_plan", plan_of)
    monkeypatch.setattr(search, "trace_ahead", lambda recipes, machine: None)
    best = search_configurations(load(), machine()).best
    assert traced
    assert best.plan.fits
    assert best.recipe.activation_checkpointing is not None


@pytest.mark.long
def test_search_gives_suggestions_if_nothing_fits(load, estimated_plans):
    wide = ("model.config.hidden_size=4096", "model.config.intermediate_size=14336", "model.config.num_attention_heads=32")  # fmt: skip
    few = machine(gpus=2, memory=4 * GIB, host_memory=20 * GIB)
    result = search_configurations(load(*wide, ranks=2), few)
    assert result.best is None
    assert result.configurations[0].plan.fits is False
    assert any(text.startswith("more GPUs: ") and "nodes=" in text for text in result.suggestions)
    assert any("lora.rank=16" in text for text in result.suggestions)
    on_cpu = known_machine("cpu", nodes=1, gpus_per_node=2, memory=4 * GIB)
    texts = search_configurations(load(*wide, ranks=2), on_cpu).suggestions
    assert any(text.startswith("more CPU ranks: ") for text in texts)
    long = ("model.chunked_loss=false", "model.config.vocab_size=200000", "data.sequence_length=8192",
            "model.config.max_position_embeddings=8192")  # fmt: skip
    large = search_configurations(load(*long, ranks=2), machine(gpus=2, memory=8 * GIB))
    assert "a GPU with more memory: 256 of these are not enough" in large.suggestions
    assert any("data.sequence_length=" in text for text in large.suggestions)


@pytest.mark.long
def test_suggestions_are_what_the_recipe_allows(load):
    lora = ("model.config.hidden_size=4096", "model.config.intermediate_size=14336", "model.config.num_attention_heads=32",
            "lora={rank: 4}", "batch={global_batch_size: 6, micro_batch_size: 1}")  # fmt: skip
    few = machine(gpus=2, memory=3 * GIB, host_memory=7 * GIB)

    def suggested(*own):
        return list(search.suggestions(concrete(load(*lora, *own, ranks=2), few), few))

    compiled, divided = (
        suggested("model.compile=true"),
        suggested("strategy.tensor_parallel_size=2"),
    )
    (quantized,) = (text for text in compiled if "lora.quantize=nf4" in text)
    assert "model.compile=false" in quantized
    assert any("lora.quantize=nf4" in text for text in divided)
    (more,) = (text for text in divided if text.startswith("more GPUs: 4 of them"))
    assert "must be a multiple" not in more  # 6 rows a step, for two groups of ranks


LONG = ("data.sequence_length=65536", "model.config.max_position_embeddings=65536",
        "batch.micro_batch_size=1")  # fmt: skip


def sizes_of(recipe):
    return [getattr(recipe.strategy, key) for key in PARALLEL_KEYS]


@pytest.mark.long
def test_context_or_tensor_parallelism_is_tried_if_nothing_else_fits(load, estimated_plans, folder):
    written = concrete(load(*LONG), machine())
    plain, *_ = smallest(written, machine())
    largest = {each.name: found[-1] for each, found in larger_sizes(written, machine()) if found}
    wide, layers = largest["context"], largest["tensor"]
    assert [sizes_of(wide), sizes_of(layers)] == [[1, 8, 1, 1], [1, 1, 1, 8]]
    least, divided = (by_estimate(recipe, machine()).needed for recipe in (plain, wide))
    assert divided < least
    roomy = search_configurations(written, machine())
    assert all(one.speed_measured and sizes_of(one.recipe) == [1, 1, 1, 1] for one in roomy.configurations)  # fmt: skip
    result = search_configurations(written, machine(memory=(divided + least) // 2))
    found = [one for one in result.configurations if not one.speed_measured]
    assert found
    assert result.best.plan.fits
    assert result.evaluated > roomy.evaluated
    for one in found:
        assert one.plan.fits
        assert not one.offloads
        assert sum(size > 1 for size in sizes_of(one.recipe)) == 1
        loaded = load(*LONG, *one.overrides)
        assert concrete(loaded, machine()) == concrete(one.recipe, machine())


def test_sizes_are_those_that_the_rules_allow(load):
    def found(*overrides, **settings):
        every = larger_sizes(concrete(load(*overrides), machine(**settings)), machine(**settings))
        return {each.name: [max(sizes_of(r)) for r in recipes] for each, recipes in every}

    none = {"pipeline": [], "context": [], "expert": [], "tensor": []}
    sizes = [2, 4, 8]
    assert found() == none | {"context": sizes, "expert": sizes, "tensor": sizes}
    assert found(gpus=1, nodes=8) == none | {"pipeline": sizes}
    assert found("optimizer.name=adafactor") == none | {"context": sizes}
    assert found("optimizer.name=muon") == none | {"context": sizes, "expert": sizes}
    more = found("strategy.tensor_parallel_size=2", "batch.global_batch_size=32")
    assert more == none | {"context": [2, 4], "tensor": [4, 8]}


def test_copies_of_several_nodes_are_tried(load):
    """A ring of all nodes takes long for the way around."""
    recipe = load("batch.global_batch_size=1024", "batch.micro_batch_size=1")
    on = machine(gpus=8, nodes=32)
    tried = {256 // each.strategy.replicate for each in variants(concrete(recipe, on), on)}
    assert tried >= {2, 4, 8, 16, 32, 64, 128, 256}


def test_a_share_of_the_activations_is_offered_between_all_and_none(load):
    recipe, on = load(), machine()
    tried = {each.activation_checkpointing for each in variants(concrete(recipe, on), on)}
    assert {each.budget for each in tried if each is not None} == {None, *BUDGETS}
    on = machine(gpus=1, nodes=8)
    staged = concrete(load("strategy.pipeline_parallel_size=2"), on)
    tried = {each.activation_checkpointing for each in variants(staged, on)}
    assert {each.budget for each in tried if each is not None} == {None}


def saves(recipe, on):
    """What is chosen for checkpoint.every_steps: None if the rows' choice stays."""
    profile = profile_model(recipe, device=on.device)
    facts = Facts(ranks=on.ranks, machine=on, profiles=lambda _: (profile, lambda: profile))
    found = choose_saves(recipe, facts)
    return found and (found[0].checkpoint.every_steps, found[1])


def test_many_gpus_save_more_often(load):
    """1,024 GPUs fail every 44 hours: a save of about 0.5 s is best every 400 s."""
    keys = [
        "batch.global_batch_size=1024",
        "batch.micro_batch_size=1",
        "checkpoint.every_steps=auto",
    ]
    many = machine(gpus=8, nodes=128)
    recipe = concrete(load(*keys), many)
    long = dataclasses.replace(
        recipe, checkpoint=dataclasses.replace(recipe.checkpoint, every_steps=100_000)
    )
    every, why = saves(long, many)
    step = estimate_time(Work(profile_model(long, device="cuda"), long, ranks=1024), many).total
    assert every * step == pytest.approx(math.sqrt(2 * 0.5 * 45_000 / 1024 * 3600), rel=0.1)
    assert "one of 1,024 GPUs fails about every 44 hours" in why
    assert saves(recipe, many) is None, "200 steps of these are shorter"
    at_once = dataclasses.replace(long.checkpoint, asynchronous=False)
    assert saves(dataclasses.replace(long, checkpoint=at_once), many)[0] >= every
    assert saves(recipe, machine()) is None


def test_the_way_around_a_ring_of_all_nodes():
    """Of NCCL's model: 4.3 ms for 1,024 ranks on 128 nodes; 24 us in one node are a part of LATENCY."""

    def seconds(ranks, **options):
        return _collective(0.0, ranks, machine(gpus=8, nodes=128), 1, **options)

    assert seconds(8) == LATENCY
    assert seconds(1024) - LATENCY == pytest.approx(4.3e-3, rel=0.02)
    assert seconds(128, sharing=8) - LATENCY == pytest.approx(127 * 9.6e-6)
    assert seconds(128, sharing=8, ring=False) - LATENCY == pytest.approx(14 * 9.6e-6)


@pytest.mark.slow
def test_stages_are_tried_where_the_network_is_slow(load, estimated_plans):
    """A stage in each node gathers weights inside of nodes only."""
    recipe = load("batch.global_batch_size=64", "batch.micro_batch_size=1")

    def fastest(bandwidth):
        on = known_machine(
            "h100", nodes=4, gpus_per_node=8, overrides={"inter_node_bandwidth": bandwidth}
        )
        return search_configurations(concrete(recipe, on), on).best.recipe.strategy

    assert fastest(1e9).pipeline_parallel_size == 4
    assert fastest(400e9).pipeline_parallel_size == 1


def test_fewer_blocks_in_the_first_stages_where_only_they_fit(load):
    """The first of four stages holds the activations of four micro-batches."""
    blocks = ["model.config.num_hidden_layers=16", "strategy.pipeline_parallel_size=4"]
    long = ["data.sequence_length=2048", "batch.global_batch_size=64", "batch.micro_batch_size=1"]
    recipe = load(*blocks, *long)

    def needed(on, pipeline_blocks=None):
        strategy = dataclasses.replace(recipe.strategy, pipeline_blocks=pipeline_blocks)
        changed = concrete(dataclasses.replace(recipe, strategy=strategy), on)
        work = Work(profile_model(changed, device="cuda"), changed, ranks=on.ranks)
        return work, [estimated_plan(stage, on).needed for stage in work.pipeline]

    roomy = machine(gpus=1, nodes=4)
    work, each = needed(roomy)
    memory = int(0.95 * max(each))
    small = dataclasses.replace(roomy, memory=memory)
    found = blocks_that_fit(work, small)
    assert sum(found) == 16
    assert found[0] < found[2]
    assert max(needed(small, found)[1]) <= memory
    assert blocks_that_fit(work, dataclasses.replace(roomy, memory=memory // 8)) is None


@pytest.mark.slow
def test_a_size_that_the_model_refuses_is_not_offered(load, monkeypatch):
    written = concrete(load(*LONG), machine())

    def refuse(recipe, on, *, stages=True):
        raise RecipeError("strategy.context_parallel_size: use 1")

    monkeypatch.setattr(search, "make_plan", refuse)
    monkeypatch.setattr(search, "trace_ahead", lambda recipes, machine: None)
    searched = search._Search(written, machine())
    groups = searched.divided()
    assert groups
    assert searched.fastest_of(groups) == []


def test_auto_varies_only_auto_keys(load, estimated_plans):
    written = concrete(load("activation_checkpointing.mode=full"), machine())

    def fastest(*, kind="auto", micro="auto", memory=80 * GIB, **settings):
        strategy = dataclasses.replace(written.strategy, kind=kind)
        batch = dataclasses.replace(written.batch, micro_batch_size=micro)
        recipe = dataclasses.replace(written, strategy=strategy, batch=batch)
        return fastest_that_fits(recipe, machine(memory=memory), **settings)

    micro = fastest(kind="fsdp")
    assert micro.recipe.strategy == written.strategy
    assert micro.recipe.activation_checkpointing == written.activation_checkpointing
    assert [text.partition("=")[0] for text in micro.overrides] == ["batch.micro_batch_size"]
    assert micro.plan.fits
    limited = fastest(kind="fsdp", limit_micro_batch=2)
    assert limited.recipe.batch.micro_batch_size <= 2
    kind = fastest(micro=4)
    assert kind.recipe.batch == written.batch
    assert kind.recipe.strategy.kind in ("ddp", "fsdp")
    assert kind.recipe.strategy.mixed_precision == written.strategy.mixed_precision
    assert fastest(memory=GIB // 2) is None


def test_fastest_of_each_kind_returns_distinct_configurations(load, estimated_plans):
    found = search.fastest_of_each_kind(load(), machine(), most=6)
    assert len(found) == 6
    assert found[0].overrides == (), "the first one is the recipe as written"
    assert {one.recipe.strategy.kind for one in found} == {"ddp", "fsdp"}
    recipes = [one.recipe for one in found[1:]]
    kinds = {(r.strategy.kind, r.strategy.reshard_after_forward, r.activation_checkpointing) for r in recipes}  # fmt: skip
    assert len(kinds) == 5
    small = search.fastest_of_each_kind(load(), machine(memory=3 * GIB), most=6)
    assert all(one.plan.fits for one in [*found, *small])


def test_a_cache_key_has_every_field_of_every_section():
    """A field without `repr` makes another key, too: else a plan would be that of another recipe."""

    @dataclasses.dataclass
    class Section:
        shown: int = 1
        hidden: int = dataclasses.field(default=1, repr=False)
        inner: object = None

    keys = {
        cache_key(section)
        for section in (
            Section(),
            Section(hidden=2),
            Section(inner=Section()),
            Section(inner={"a": [Section(hidden=2)]}),
            Section(inner={"a": [Section(hidden=3)]}),
        )
    }
    assert len(keys) == 5
    assert cache_key(Section(inner={"a": 1, "b": 2})) == cache_key(Section(inner={"b": 2, "a": 1}))
