"""The same losses, proved on the user's own recipe and machine.

Started by `launcher selftest` under torchrun: trains a few steps per strategy, accumulation and number of ranks, and
holds losses and gradient norms against one of them.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from launcher.distributed import process_group
from launcher.distributed.environment import read_environment
from launcher.distributed.process_group import DataParallel
from launcher.errors import EXIT_DONE, EXIT_NO, EXIT_USAGE, RecipeError
from launcher.recipe import schema
from launcher.recipe.hub import model_folder
from launcher.recipe.load import load_recipe
from launcher.recipe.schema import ActivationCheckpointing, Batch, CpuOffload, MixedPrecision, Recipe, Strategy
from launcher.reliability.failures import end_process
from launcher.training.setup import assemble

SEQUENCES_PER_RANK = 4
"""A self-test's global batch is this many sequences a rank: one micro-batch of four, or four of one."""


@dataclass(frozen=True)
class Variant:
    """One way to train."""

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
    """Dropout draws per rank, so other numbers of ranks draw otherwise: it is off in the self-test.

    As modules, and as probabilities that a module keeps for its forward pass (`attention_dropout`).
    """
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in list(vars(module).items()):
            if isinstance(value, float) and ("dropout" in name or name.endswith("pdrop")):
                setattr(module, name, 0.0)


def shrunk_model(model: schema.Model) -> schema.Model:
    """The same architecture with random weights, made small; that of a checkpoint by its config."""
    config = model.config
    if model.path is not None:
        folder = model_folder(model.path, key="model.path", weights=False)
        told = json.loads((folder / "config.json").read_text())
        config = {key: value for key, value in told.items() if key not in ("architectures", "dtype", "torch_dtype", "transformers_version")}
    return dataclasses.replace(model, path=None, init=None, config=None if config is None else shrunk(config))


def make_variants(recipe: Recipe, *, ranks: int) -> list[Variant]:
    """The first one is the reference: fsdp in float32 on all ranks, one micro-batch a step."""
    own = recipe.strategy
    half = own.mixed_precision if own.mixed_precision is not None and own.mixed_precision.param_dtype != "float32" else None
    checkpointing = recipe.activation_checkpointing or ActivationCheckpointing()
    sharding: dict[str, Any] = {"reshard_after_forward": own.reshard_after_forward, "reshard_after_backward": own.reshard_after_backward}
    strategies: list[tuple[str, Strategy, ActivationCheckpointing | None]] = [
        ("fsdp", Strategy(kind="fsdp", mixed_precision=None, **sharding), None),
        ("ddp", Strategy(kind="ddp", mixed_precision=None), None),
        (
            "fsdp, offload, checkpointing",
            Strategy(kind="fsdp", mixed_precision=None, cpu_offload=CpuOffload(), **sharding),
            checkpointing,
        ),
    ]
    replicate = own.replicate if own.replicate > 1 else 2
    if ranks > replicate and ranks % replicate == 0:
        hybrid = Strategy(kind="fsdp", mixed_precision=None, replicate=replicate, **sharding)
        strategies.append((f"fsdp, hybrid {replicate} x {ranks // replicate}", hybrid, None))

    def variant(
        name: str, strategy: Strategy, mode: ActivationCheckpointing | None, precision: MixedPrecision | None, n: int, micro: int
    ) -> Variant:
        batch = Batch(global_batch_size=SEQUENCES_PER_RANK * ranks, micro_batch_size=micro)
        if strategy.kind == "ddp" and precision is not None:
            precision = MixedPrecision(param_dtype=precision.param_dtype)  # it reduces in float32
        changed = dataclasses.replace(
            recipe, batch=batch, strategy=dataclasses.replace(strategy, mixed_precision=precision), activation_checkpointing=mode
        )
        accumulation = batch.global_batch_size // (micro * n)
        tolerances = (1e-5, 1e-5) if precision is None else (1e-3, 2e-2)
        return Variant(name, n, accumulation, changed, *tolerances)

    variants = []
    for name, strategy, mode in strategies:
        for n in sorted({1, ranks}, reverse=True):
            if "hybrid" in name and n != ranks:
                continue
            variants += [variant(name, strategy, mode, None, n, micro) for micro in (SEQUENCES_PER_RANK, 1)]
    if half is not None:
        variants += [variant(name, strategy, mode, half, ranks, SEQUENCES_PER_RANK) for name, strategy, mode in strategies]
    return variants


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
    """Relative; infinite where a value is not finite."""
    differences = [abs(a - b) / abs(b) if b else abs(a) for a, b in zip(values, reference, strict=True)]
    return max(difference if difference == difference else float("inf") for difference in differences)


def _table(variants: list[Variant], results: list[tuple[list[float], list[float]]]) -> tuple[list[str], bool]:
    width = max(len(variant.name) for variant in variants)
    head = f"{'strategy':<{width}}  precision  ranks  accumulation  {'loss differs by':>22}  {'grad_norm differs by':>22}"
    lines, good = [head, "-" * len(head)], True
    for variant, (losses, norms) in zip(variants, results, strict=True):
        loss, norm = largest_difference(losses, results[0][0]), largest_difference(norms, results[0][1])
        fine = loss <= variant.loss_tolerance and norm <= variant.norm_tolerance
        good = good and fine
        mixed = variant.recipe.strategy.mixed_precision
        precision = mixed.param_dtype if mixed is not None else "float32"
        if variant is variants[0]:
            cells = f"{'reference':>22}  {'reference':>22}"
        else:
            cells = f"{f'{loss:.1e} of {variant.loss_tolerance:.0e}':>22}  {f'{norm:.1e} of {variant.norm_tolerance:.0e}':>22}"
        mark = "" if fine else "  TOO MUCH"
        lines.append(f"{variant.name:<{width}}  {precision:<9}  {variant.ranks:>5}  {variant.accumulation:>12}  {cells}{mark}")
    return lines, good


def run(setting: dict[str, Any]) -> int:
    """Trains all variants and prints the table; returns the exit status (on every rank)."""
    environment = read_environment()
    process_group.set_numerics(deterministic=False, float32_matmul="highest")
    main = environment.main
    with process_group.process_group(environment, device=setting["device"], init_timeout=600) as (everyone, _):
        device = everyone.device
        process_group.set_threads(environment, device=device, cpu_offload=True)
        try:
            recipe = load_recipe(setting["recipe"], ranks=None).recipe
            recipe = dataclasses.replace(
                recipe,
                run=dataclasses.replace(recipe.run, max_steps=setting["steps"], epochs=None),
                model=shrunk_model(recipe.model) if setting["shrink"] else recipe.model,
                data=dataclasses.replace(
                    recipe.data,
                    validation=None,
                    workers=0,
                    tokenizer=recipe.data.tokenizer if recipe.data.tokenizer is not None else recipe.model.path,
                ),
                schedule=dataclasses.replace(recipe.schedule, kind="constant", warmup_steps=1, decay_steps=None),
            )
            variants = make_variants(recipe, ranks=everyone.size)
            alone = dist.new_group([0])
            results = []
            for variant in variants:
                if main:
                    print(f"\r\x1b[2K{variant.name}, {variant.ranks} ranks ..." if sys.stdout.isatty() else ".", end="", flush=True)
                if variant.ranks == everyone.size:
                    results.append(train_variant(variant, everyone))
                elif main:
                    results.append(train_variant(variant, DataParallel(rank=0, size=1, group=alone, device=device)))
                dist.barrier()
        except RecipeError as error:
            if main:
                print(error, file=sys.stderr, flush=True)
            dist.barrier()
            return EXIT_USAGE
        if not main:
            return EXIT_DONE
        lines, good = _table(variants, results)
        where = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
        print("\r\x1b[2K" if sys.stdout.isatty() else "")
        print("\n".join(lines))
        print(f"\n{setting['steps']} steps of {SEQUENCES_PER_RANK * everyone.size} sequences on {everyone.size} x {where}, dropout off.")
        print("Every way of training gives the same losses." if good else "Not the same: see the lines marked TOO MUCH.")
        return EXIT_DONE if good else EXIT_NO


if __name__ == "__main__":
    _setting = json.loads(sys.argv[1])
    _status = run(_setting)
    if read_environment().main:
        Path(_setting["verdict"]).write_text(str(_status))
    end_process(EXIT_DONE)
