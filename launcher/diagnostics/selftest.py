"""Trains a few steps of a recipe with each strategy, accumulation and number of ranks, and compares
losses and gradient norms. `launcher selftest` starts this module under torchrun."""

from __future__ import annotations

import json
import logging
import math
import sys
import zlib
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from launcher.console import aligned
from launcher.distributed import process_group
from launcher.distributed.environment import read_environment
from launcher.distributed.process_group import gather
from launcher.distributed.rank_layout import (
    CONTEXT,
    PARALLEL_SIZES,
    RankLayout,
    layout_sizes,
    sizes_of,
)
from launcher.distributed.spawn import end_process, rank_main
from launcher.errors import EXIT_DONE, EXIT_NO, EXIT_USAGE, RecipeError
from launcher.models.build import make_config
from launcher.models.config_keys import check_config_keys
from launcher.models.names import clean_name
from launcher.models.shards import local_columns, local_rows
from launcher.recipe.load import load_recipe
from launcher.recipe.schema import (
    ActivationCheckpointing,
    Batch,
    Checkpoint,
    CpuOffload,
    Evaluation,
    MixedPrecision,
    Model,
    Recipe,
    Strategy,
)
from launcher.reliability.json_files import Json
from launcher.sources.hub import model_folder
from launcher.sources.layouts import ATTACHMENTS
from launcher.training.setup import assemble
from launcher.training.sum_check import SumCheck, check_sum, dropout_off

SEQUENCES_PER_RANK = 4
"""Sequences per rank in a global batch."""
FLOAT32_TOLERANCES, MIXED_TOLERANCES, FLOAT8_TOLERANCES = (1e-5, 1e-5), (1e-3, 2e-2), (2e-2, 2e-1)
"""Largest relative differences of losses and of gradient norms from the reference in float32."""
SMALL = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "n_layer": 2,
    "n_embd": 64,
    "n_head": 4,
}
"""Sizes of a shrunk model, if its config has these keys."""
_FIRST = slice(SMALL["num_hidden_layers"])
_UNUSED = ("architectures", "dtype", "torch_dtype", "transformers_version", "_name_or_path")


@dataclass(frozen=True)
class Values:
    """What a variant computed."""

    losses: list[float]
    norms: list[float]
    """Norms of the gradients."""
    differing: list[str]
    """The result of `differing_copies`."""
    check: SumCheck | None = None
    """Of the reference, whether the user's own loss is a sum."""


@dataclass(frozen=True)
class Variant:
    """A configuration that must give the losses of the first one."""

    name: str
    ranks: int
    accumulation: int
    recipe: Recipe


def shrunk(model: Model) -> Model:
    """The same architecture with random weights, a few layers deep and a few heads wide."""
    config = dict(model.config or {})
    if model.path is not None:
        folder = model_folder(model.path, key="model.path", weights=False)
        config = json.loads((folder / "config.json").read_text())
        if model.config:
            config = make_config(model, folder).to_dict()
    # The last layers of a hybrid have the attention that multi-token prediction takes
    kinds = slice(-SMALL["num_hidden_layers"], None) if model.mtp else _FIRST
    return replace(model, path=None, init=None, config=_shrunk(config, kinds))


def _shrunk(config: dict[str, Any], kinds: slice) -> dict[str, Any]:
    small = {key: SMALL.get(key, value) for key, value in config.items() if key not in _UNUSED}
    for key, value in small.items():
        if isinstance(value, dict) and key.endswith("_config"):
            small[key] = _shrunk(value, kinds)
        elif isinstance(value, dict) and "mrope_section" in value:  # of half a head
            small[key] = value | {"mrope_section": [4, 2, 2]}
        elif key == "layer_types" and value is not None:
            small[key] = value[kinds]
    return small


def make_variants(recipe: Recipe, *, ranks: int) -> list[Variant]:
    """The first one is the reference: fsdp in float32 on all ranks, one micro-batch a step. On one
    rank its own strategy takes the place of several, and is there once."""
    own, sequences, variants = recipe.strategy.mixed_precision, SEQUENCES_PER_RANK * ranks, []
    seen: set[tuple[str, int, int, bool]] = set()
    for name, (strategy, checkpointing) in _strategies(recipe, ranks=ranks).items():
        alone = all(size == 1 for size in sizes_of(strategy).values())
        counts = (ranks, 1) if ranks > 1 and alone else (ranks,)
        cases: list[tuple[MixedPrecision | None, int, int]]
        cases = [(None, count, size) for count in counts for size in (SEQUENCES_PER_RANK, 1)]
        if own is not None and own.param_dtype != "float32":
            # ddp reduces in float32
            ddp = MixedPrecision(param_dtype=own.param_dtype, float8=own.float8)
            cases.append((ddp if strategy.kind == "ddp" else own, ranks, SEQUENCES_PER_RANK))
        for precision, count, size in cases:
            changed = replace(
                recipe,
                strategy=replace(strategy, mixed_precision=precision),
                activation_checkpointing=checkpointing,
                distillation=None,  # a teacher has another vocabulary than a shrunk model
                batch=Batch(global_batch_size=sequences, micro_batch_size=size),
            )
            groups = layout_sizes(strategy, ranks=count).data_parallel_size
            accumulation, label = sequences // (size * groups), name
            if changed.uses_one_rank(count):  # neither DDP nor FSDP
                offloads = strategy.cpu_offload is not None
                label = f"one rank{', optimizer state offloaded' if offloads else ''}"
            found = (label, count, accumulation, precision is None)
            if found not in seen:
                seen.add(found)
                variants.append(Variant(label, count, accumulation, changed))
    return variants


def _strategies(
    recipe: Recipe, *, ranks: int
) -> dict[str, tuple[Strategy, ActivationCheckpointing | None]]:
    """The strategies that the recipe could name, in float32."""
    own = recipe.strategy
    ddp = Strategy(kind="ddp", mixed_precision=None)
    fsdp = Strategy(
        kind="fsdp",
        mixed_precision=None,
        # What `auto` is for a model that leaves most of the memory free
        reshard_after_forward=own.reshard_after_forward is True,
        sync_every_micro_batch=own.sync_every_micro_batch is True,
        reshard_after_backward=own.reshard_after_backward,
    )
    offload = replace(fsdp, cpu_offload=CpuOffload())
    checkpointing = recipe.activation_checkpointing or ActivationCheckpointing()
    strategies: dict[str, tuple[Strategy, ActivationCheckpointing | None]] = {
        "fsdp": (fsdp, None),
        "ddp": (ddp, None),
        "ddp, ZeRO-1": (replace(ddp, shard_optimizer=True), None),
        "fsdp, offload, checkpointing": (offload, checkpointing),
    }
    if recipe.optimizer.name in ("adamw", "sgd", "lion"):
        only_state = replace(fsdp, cpu_offload=CpuOffload(what="optimizer"))
        strategies["fsdp, optimizer state offloaded"] = only_state, None
    copies = own.replicate if own.replicate > 1 else 2
    if ranks > copies and ranks % copies == 0:
        name = f"fsdp, hybrid {copies} x {ranks // copies}"
        strategies[name] = replace(fsdp, replicate=copies), None
    for each in PARALLEL_SIZES:
        size = getattr(own, each.key)
        if size > 1 and ranks % size == 0:
            changed: Any = {each.key: size}
            name = f"fsdp, {each.divides} over {size} ranks"
            if each is CONTEXT and (ring := own.context_parallel_ring) is not None:
                changed["context_parallel_ring"] = ring
                name += f" in {ring} groups" if ring > 1 else ""
            strategies[name] = replace(fsdp, **changed), None
    return strategies


def train_variant(variant: Variant, ranks: RankLayout, *, checks: bool = False) -> Values:
    """Trains the steps of a variant; every one of its ranks must call this. checks: also find out
    whether the user's own loss is a sum."""
    training = assemble(variant.recipe, ranks=ranks, build_data=ranks.rank == 0)
    module, losses, norms = training.wrapped.module, [], []
    check = check_sum(training) if checks else None
    try:
        with dropout_off(module):
            for step in training.all_steps:
                loss = step.loss.detach().clone()
                dist.all_reduce(loss, group=ranks.group)
                losses.append(float(loss))
                norms.append(float(step.grad_norm))
    except ValueError as error:
        # Batch norm refuses micro-batches of one sample, on all ranks alike: the table goes on
        if "more than 1 value per channel" not in str(error):
            raise
        return Values([math.nan] * training.data.steps, [math.nan] * training.data.steps, [], check)
    return Values(losses, norms, differing_copies(module, ranks.group), check)


def differing_copies(model: nn.Module, group: dist.ProcessGroup) -> list[str]:
    """Parameters of which several ranks hold the same part, such as copies of the model or tensor
    parallel ranks, but not the same bits. Every rank must call this."""
    mine: dict[tuple[object, ...], int] = {}
    for name, parameter in model.named_parameters():
        (local, row), columns = local_rows(parameter.detach()), local_columns(parameter)
        data: Any = local.cpu().contiguous().flatten().view(torch.uint8).numpy()
        part = clean_name(name), row, columns and columns.start, tuple(local.shape)
        mine[part] = zlib.crc32(data)
    first: dict[tuple[object, ...], int] = {}
    found = set()
    for parts in gather(mine, group):
        found |= {
            str(part[0]) for part, bits in parts.items() if first.setdefault(part, bits) != bits
        }
    return sorted(found)


def largest_difference(values: list[float], reference: list[float]) -> float:
    """The largest relative difference; infinite if a value is not finite."""
    pairs = zip(values, reference, strict=True)
    differences = [abs(a - b) / abs(b) if b else abs(a) for a, b in pairs]
    return max(math.inf if math.isnan(off) else off for off in differences)


def _table(variants: list[Variant], results: list[Values]) -> tuple[list[str], bool]:
    """Lines, and whether all differences are within their tolerances and no copies differ."""
    differs = ("loss differs by", "grad_norm differs by")
    rows, good = [["strategy", "precision", "ranks", "accumulation", *differs, ""]], True
    for variant, values in zip(variants, results, strict=True):
        mixed = variant.recipe.strategy.mixed_precision
        if mixed is None:
            limits, precision = FLOAT32_TOLERANCES, "float32"
        elif mixed.float8 is None:
            limits, precision = MIXED_TOLERANCES, mixed.param_dtype
        else:
            limits, precision = FLOAT8_TOLERANCES, "float8"
        first = results[0]
        differences = (
            largest_difference(values.losses, first.losses),
            largest_difference(values.norms, first.norms),
        )
        pairs = list(zip(differences, limits, strict=True))
        fine = all(off <= limit for off, limit in pairs)
        cells = [f"{off:.1e} of {limit:.0e}" for off, limit in pairs]
        if variant is variants[0]:
            cells = ["reference", "reference"]
        counts = (str(variant.ranks), str(variant.accumulation))
        faults = ["TOO MUCH"] * (not fine)
        if values.differing:
            some = ", ".join(values.differing[:3])
            faults.append(f"COPIES DIFFER ({len(values.differing)} parameters, such as {some})")
        rows.append([variant.name, precision, *counts, *cells, "; ".join(faults)])
        good = good and not faults
    return list(aligned(rows, "<<>>>><")), good


def selftest_recipe(setting: Json) -> Recipe:
    """The user's recipe for a few steps, without validation data. Raises RecipeError."""
    loaded = load_recipe(setting["recipe"], ranks=None)
    check_config_keys(loaded)
    recipe = loaded.recipe
    if recipe.attachments and setting["shrink"]:
        names = [ATTACHMENTS[kind] for kind in recipe.attachments]
        what = f"a small model would not fit its processor of {names[0]}; leave it out"
        text = " ".join(f"{name}=null" for name in names)
        raise RecipeError(f"command line: shrink: {what}, or set {text} and data of text")
    data, model, schedule = recipe.data, recipe.model, recipe.schedule
    built = model.path is None and model.config is None  # by the user's own function
    return replace(
        recipe,
        run=replace(recipe.run, max_steps=setting["steps"], epochs=None),
        model=shrunk(model) if setting["shrink"] and not built else model,
        data=replace(
            data,
            validation=None,
            validation_split=None,
            workers=0,
            tokenizer=data.tokenizer or model.path,
        ),
        schedule=replace(
            schedule,
            kind="constant",
            warmup_steps=1,
            warmup_ratio=None,
            decay_steps=None,
        ),
        evaluation=Evaluation(),  # these two may need a tokenizer, which rows of ids do not
        checkpoint=Checkpoint(),
    )


def train_all(variants: list[Variant], everyone: RankLayout) -> list[Values]:
    """Results of the variants, in order. Rank 0 alone trains the variants that have one rank."""
    group = dist.new_group([0])
    alone = RankLayout(rank=0, size=1, group=group, device=everyone.device)
    results = []
    for variant in variants:
        if everyone.rank == 0:
            live = f"\r\x1b[2K{variant.name}, {variant.ranks} ranks ..."
            print(live if sys.stdout.isatty() else ".", end="", flush=True)
        if variant.ranks == everyone.size or everyone.rank == 0:
            ranks = everyone if variant.ranks == everyone.size else alone
            results.append(train_variant(variant, ranks, checks=variant is variants[0]))
        dist.barrier()
    return results


def run(setting: Json) -> int:
    """Runs on every rank; rank 0 prints the table. Returns the exit status."""
    environment = read_environment()
    logging.disable(logging.WARNING)  # each variant would warn again, between the dots of progress
    process_group.set_numerics(deterministic=False, float32_matmul="highest")
    group = process_group.process_group(environment, device=setting["device"], init_timeout=600)
    with group as (ranks, _):
        process_group.prepare_cpu(environment, device=ranks.device, cpu_offload=True)
        try:
            variants = make_variants(selftest_recipe(setting), ranks=ranks.size)
            results = train_all(variants, ranks)
        except RecipeError as error:
            if environment.main:
                print(error, file=sys.stderr, flush=True)
            dist.barrier()
            return EXIT_USAGE
        if not environment.main:
            return EXIT_DONE
        lines, good = _table(variants, results)
        cuda = ranks.device.type == "cuda"
        where = torch.cuda.get_device_name(ranks.device) if cuda else "CPU"
        sequences = f"{setting['steps']} steps of {SEQUENCES_PER_RANK * ranks.size} sequences"
        same = "All configurations give the same losses.\n"
        same += "Parts of weights that several ranks hold have the same bits."
        print("\r\x1b[2K" if sys.stdout.isatty() else "")
        print(*lines, "", f"{sequences} on {ranks.size} x {where}, dropout off.", sep="\n")
        print(same if good else "Some configurations differ: see the marks in the last column.")
        cause = None if good or results[0].check is None else results[0].check.describe()
        if not good and variants[0].recipe.model.router_balance == "micro_batch":
            cause = (
                "model.router_balance: micro_batch, a loss that depends on the division of a batch"
            )
        if cause is not None:
            print(f"Likely cause: {cause}.")
        return EXIT_DONE if good else EXIT_NO


if __name__ == "__main__":
    rank_main(run)
    end_process(EXIT_DONE)
