"""The same losses, proved on the user's own recipe and machine.

`launcher selftest` starts this module under torchrun. It trains a few steps with each strategy,
accumulation and number of ranks, and compares losses and gradient norms with the first of them.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import sys
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from launcher.distributed import process_group
from launcher.distributed.environment import read_environment
from launcher.distributed.process_group import DataParallel
from launcher.distributed.spawn import rank_main
from launcher.errors import EXIT_DONE, EXIT_NO, EXIT_USAGE, RecipeError
from launcher.recipe import schema
from launcher.recipe.hub import model_folder
from launcher.recipe.load import load_recipe
from launcher.recipe.schema import (
    ActivationCheckpointing,
    Batch,
    CpuOffload,
    MixedPrecision,
    Recipe,
    Strategy,
)
from launcher.reliability.failures import end_process
from launcher.training.setup import assemble

SEQUENCES_PER_RANK = 4
"""Size of the global batch per rank: one micro-batch of four sequences, or four of one."""


@dataclass(frozen=True)
class Variant:
    """A combination of strategy, precision, ranks and accumulation."""

    name: str
    ranks: int
    accumulation: int
    recipe: Recipe
    loss_tolerance: float
    norm_tolerance: float


def shrunk(config: dict[str, Any]) -> dict[str, Any]:
    """A model.config with the same architecture, a few layers deep and a few heads wide."""
    small = {
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
    return config | {key: value for key, value in small.items() if key in config}


def switch_off_dropout(model: nn.Module) -> None:
    """Sets all dropout probabilities to zero: each rank draws its own, so losses would differ.

    Of `nn.Dropout`, and of modules that keep a probability themselves (`attention_dropout`).
    """
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in list(vars(module).items()):
            if isinstance(value, float) and ("dropout" in name or name.endswith("pdrop")):
                setattr(module, name, 0.0)


def shrunk_model(model: schema.Model) -> schema.Model:
    """The same architecture, made small, with random weights."""
    config = model.config
    if model.path is not None:
        folder = model_folder(model.path, key="model.path", weights=False)
        told = json.loads((folder / "config.json").read_text())
        config = {
            key: value
            for key, value in told.items()
            if key not in ("architectures", "dtype", "torch_dtype", "transformers_version")
        }
    return dataclasses.replace(
        model, path=None, init=None, config=None if config is None else shrunk(config)
    )


def make_variants(recipe: Recipe, *, ranks: int) -> list[Variant]:
    """The first one is the reference: fsdp in float32 on all ranks, one micro-batch a step."""
    strategies = _strategies(recipe, ranks=ranks)
    variants = []
    for name, changed in strategies:
        alone = ranks > 1 and changed.strategy.replicate == 1
        counts = (ranks, 1) if alone else (ranks,)
        sizes = itertools.product(counts, (SEQUENCES_PER_RANK, 1))
        variants += [_variant(name, changed, None, ranks, *size) for size in sizes]
    precision = recipe.strategy.mixed_precision
    if precision is not None and precision.param_dtype != "float32":
        variants += [
            _variant(name, changed, precision, ranks, ranks, SEQUENCES_PER_RANK)
            for name, changed in strategies
        ]
    return variants


def _strategies(recipe: Recipe, *, ranks: int) -> list[tuple[str, Recipe]]:
    """The recipe under each strategy that it could name, in float32."""
    own = recipe.strategy
    fsdp = Strategy(
        kind="fsdp",
        mixed_precision=None,
        reshard_after_forward=own.reshard_after_forward,
        reshard_after_backward=own.reshard_after_backward,
    )
    offload = dataclasses.replace(fsdp, cpu_offload=CpuOffload())
    checkpointing = recipe.activation_checkpointing or ActivationCheckpointing()
    found: list[tuple[str, Strategy, ActivationCheckpointing | None]] = [
        ("fsdp", fsdp, None),
        ("ddp", Strategy(kind="ddp", mixed_precision=None), None),
        ("fsdp, offload, checkpointing", offload, checkpointing),
    ]
    replicate = own.replicate if own.replicate > 1 else 2
    if ranks > replicate and ranks % replicate == 0:
        hybrid = dataclasses.replace(fsdp, replicate=replicate)
        found.append((f"fsdp, hybrid {replicate} x {ranks // replicate}", hybrid, None))
    return [
        (name, dataclasses.replace(recipe, strategy=strategy, activation_checkpointing=mode))
        for name, strategy, mode in found
    ]


def _variant(
    name: str,
    recipe: Recipe,
    precision: MixedPrecision | None,
    all_ranks: int,
    ranks: int,
    micro_batch_size: int,
) -> Variant:
    """The same global batch on `ranks` of all ranks."""
    sequences = SEQUENCES_PER_RANK * all_ranks
    batch = Batch(global_batch_size=sequences, micro_batch_size=micro_batch_size)
    if recipe.strategy.kind == "ddp" and precision is not None:
        precision = MixedPrecision(param_dtype=precision.param_dtype)  # it reduces in float32
    strategy = dataclasses.replace(recipe.strategy, mixed_precision=precision)
    recipe = dataclasses.replace(recipe, batch=batch, strategy=strategy)
    tolerances = (1e-5, 1e-5) if precision is None else (1e-3, 2e-2)
    return Variant(name, ranks, sequences // (micro_batch_size * ranks), recipe, *tolerances)


def train_variant(variant: Variant, ranks: DataParallel) -> tuple[list[float], list[float]]:
    """Losses and gradient norms of its steps."""
    training = assemble(variant.recipe, ranks=ranks, build_data=ranks.rank == 0)
    switch_off_dropout(training.wrapped.module)
    losses, norms = [], []
    for step in training.all_steps:
        loss = step.loss.detach().clone()
        dist.all_reduce(loss, group=ranks.group)
        losses.append(float(loss))
        norms.append(float(step.grad_norm))
    return losses, norms


def largest_difference(values: list[float], reference: list[float]) -> float:
    """The largest relative difference; infinite where a value is not finite."""
    differences = [
        abs(a - b) / abs(b) if b else abs(a) for a, b in zip(values, reference, strict=True)
    ]
    return max(
        difference if difference == difference else float("inf") for difference in differences
    )


def _table(
    variants: list[Variant], results: list[tuple[list[float], list[float]]]
) -> tuple[list[str], bool]:
    width = max(len(variant.name) for variant in variants)
    head = f"{'strategy':<{width}}  precision  ranks  accumulation"
    head += f"  {'loss differs by':>22}  {'grad_norm differs by':>22}"
    lines, good = [head, "-" * len(head)], True
    for variant, (losses, norms) in zip(variants, results, strict=True):
        loss = largest_difference(losses, results[0][0])
        norm = largest_difference(norms, results[0][1])
        fine = loss <= variant.loss_tolerance and norm <= variant.norm_tolerance
        good = good and fine
        mixed = variant.recipe.strategy.mixed_precision
        precision = mixed.param_dtype if mixed is not None else "float32"
        if variant is variants[0]:
            cells = f"{'reference':>22}  {'reference':>22}"
        else:
            of_loss = f"{loss:.1e} of {variant.loss_tolerance:.0e}"
            of_norm = f"{norm:.1e} of {variant.norm_tolerance:.0e}"
            cells = f"{of_loss:>22}  {of_norm:>22}"
        mark = "" if fine else "  TOO MUCH"
        name = f"{variant.name:<{width}}  {precision:<9}"
        lines.append(f"{name}  {variant.ranks:>5}  {variant.accumulation:>12}  {cells}{mark}")
    return lines, good


def selftest_recipe(setting: dict[str, Any]) -> Recipe:
    """The user's recipe for a few steps, without validation data. Raises RecipeError."""
    recipe = load_recipe(setting["recipe"], ranks=None).recipe
    data, model = recipe.data, recipe.model
    tokenizer = data.tokenizer if data.tokenizer is not None else model.path
    schedule: dict[str, Any] = {"kind": "constant", "warmup_steps": 1, "decay_steps": None}
    return dataclasses.replace(
        recipe,
        run=dataclasses.replace(recipe.run, max_steps=setting["steps"], epochs=None),
        model=shrunk_model(model) if setting["shrink"] else model,
        data=dataclasses.replace(data, validation=None, workers=0, tokenizer=tokenizer),
        schedule=dataclasses.replace(recipe.schedule, **schedule),
    )


def train_all(
    variants: list[Variant], everyone: DataParallel
) -> list[tuple[list[float], list[float]]]:
    """Losses and gradient norms of each variant; on rank 0 also of those on one rank."""
    group = dist.new_group([0])
    alone = DataParallel(rank=0, size=1, group=group, device=everyone.device)
    results = []
    for variant in variants:
        if everyone.rank == 0:
            live = f"\r\x1b[2K{variant.name}, {variant.ranks} ranks ..."
            print(live if sys.stdout.isatty() else ".", end="", flush=True)
        if variant.ranks == everyone.size or everyone.rank == 0:
            ranks = everyone if variant.ranks == everyone.size else alone
            results.append(train_variant(variant, ranks))
        dist.barrier()
    return results


def run(setting: dict[str, Any]) -> int:
    """On every rank: trains all variants; rank 0 prints the table. Returns the exit status."""
    environment = read_environment()
    process_group.set_numerics(deterministic=False, float32_matmul="highest")
    group = process_group.process_group(environment, device=setting["device"], init_timeout=600)
    with group as (ranks, _):
        process_group.set_threads(environment, device=ranks.device, cpu_offload=True)
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
        print("\r\x1b[2K" if sys.stdout.isatty() else "")
        print("\n".join([*lines, "", f"{sequences} on {ranks.size} x {where}, dropout off."]))
        same = "Every way of training gives the same losses."
        print(same if good else "Not the same: see the lines marked TOO MUCH.")
        return EXIT_DONE if good else EXIT_NO


if __name__ == "__main__":
    rank_main(run)
    end_process(EXIT_DONE)
