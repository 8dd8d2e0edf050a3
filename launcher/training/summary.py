"""Describes a run in a few lines, before its first step."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from launcher.data.batching import BatchSampler
from launcher.data.loader import TrainingData, expected_padding
from launcher.distributed.process_group import DataParallel
from launcher.metrics.console import bytes_as_text
from launcher.recipe.schema import Batch, Recipe
from launcher.strategies.activation_checkpointing import (
    is_checkpointed,
    recomputation_changes_state,
)
from launcher.strategies.base import WrappedModel
from launcher.training.setup import Training


def summarize(recipe: Recipe, training: Training, ranks: DataParallel) -> list[str]:
    """Model, data and batch of a run, for the console."""
    data = training.data
    checkpointing = recipe.activation_checkpointing
    return [
        describe_model(
            training.wrapped,
            ranks=ranks,
            blocks=training.blocks,
            mode=None if checkpointing is None else checkpointing.mode,
        ),
        describe_data(
            data.training,
            shuffled=recipe.data.shuffle,
            padding=expected_padding(data.training, data.sampler),
        ),
        describe_batch(
            recipe.batch,
            sampler=data.sampler,
            ranks=ranks.size,
            steps=data.steps,
            passes=data.order.passes(data.steps * recipe.batch.global_batch_size),
            warmup=recipe.schedule.warmup_steps,
        ),
    ]


def _bytes(tensors: list[nn.Parameter]) -> int:
    local = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    return sum(tensor.numel() * tensor.element_size() for tensor in local)


def describe_model(
    wrapped: WrappedModel, *, ranks: DataParallel, blocks: dict[str, nn.Module], mode: str | None
) -> str:
    """Model, strategy and memory, for the console: read off the wrapped model, not off the recipe.

    blocks: of `find_blocks`. mode: of activation checkpointing; None: off.
    """
    parameters = list(wrapped.module.parameters())
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    parameter_bytes, trained_bytes = _bytes(parameters), _bytes(trained)
    config: Any = getattr(wrapped.module, "config", None)
    total = sum(parameter.numel() for parameter in parameters)
    device = (
        torch.cuda.get_device_name(ranks.device)
        if ranks.device.type == "cuda"
        else f"CPU with {torch.get_num_threads()} thread(s)"
    )
    name = getattr(config, "model_type", type(wrapped.module).__name__)
    kind = next((type(block).__name__.removeprefix("FSDP") for block in blocks.values()), "none")
    updates = sum(parameter.numel() for parameter in trained)
    share = (
        f", {_count(updates)} of them trained ({updates / total:.2%})" if updates < total else ""
    )
    lines = [
        f"model: {name}, {_count(total)} parameters{share}, {len(blocks)} blocks ({kind}); a rank "
        f"is a {device}",
        wrapped.description(),
    ]
    if not blocks:
        lines.append(
            "note: the model's class names no blocks (_no_split_modules): it is sharded as one "
            "group, and nothing is checkpointed"
        )
    if mode is not None:
        wrapped_blocks = sum(is_checkpointed(module) for module in wrapped.module.modules())
        lines.append(f"activation checkpointing: {mode}, {wrapped_blocks} of {len(blocks)} blocks")
        left_alone = sum(recomputation_changes_state(block) for block in blocks.values())
        if left_alone:
            lines.append(
                f"note: {left_alone} blocks are not checkpointed, recomputation would update their "
                "BatchNorm twice"
            )
    lines.append(
        f"a rank holds {bytes_as_text(parameter_bytes + 3 * trained_bytes)}: parameters "
        f"{bytes_as_text(parameter_bytes)}, gradients {bytes_as_text(trained_bytes)}, optimizer "
        f"{bytes_as_text(2 * trained_bytes)}; activations and unsharded blocks come on top"
    )
    return "\n".join(lines)


def describe_data(dataset: TrainingData, *, shuffled: bool, padding: float | None) -> str:
    """Size of a data set, truncation, and padding.

    padding: expected share, if rows are padded to the longest of a micro-batch.
    """
    first, *rest = dataset.describe()
    if not dataset.packed and padding is not None:
        first += f", padded to the longest of a micro-batch ({padding:.1%} padding)"
    first += ", shuffled" if shuffled else ", in the order of the files"
    return "\n".join(
        [
            f"data: {first}",
            *(line if line.startswith(("warning", "note")) else f"      {line}" for line in rest),
        ]
    )


def describe_batch(
    batch: Batch, *, sampler: BatchSampler, ranks: int, steps: int, passes: list[float], warmup: int
) -> str:
    """How the global batch is divided, and how often the run sees the data."""
    if batch.micro_batch_size is not None:
        accumulation = sampler.micro_batches(0)
        parts = (
            f"{batch.micro_batch_size} a micro-batch x {accumulation} accumulation steps "
            f"x {ranks} ranks"
        )
    else:
        counts = [sampler.micro_batches(step) for step in range(min(steps, 20))]
        number = str(counts[0]) if min(counts) == max(counts) else f"{min(counts)} to {max(counts)}"
        parts = (
            f"micro-batches of up to {batch.micro_batch_tokens} tokens, "
            f"{number} a step on each of {ranks} ranks"
        )
    text = f"batch: {batch.global_batch_size} sequences = {parts}; {steps} steps"
    if passes:
        text += f" are {' and '.join(f'{number:.2g}' for number in passes)} passes over the data"
    return text + (
        f"\nnote: the warm-up of {warmup} steps is not over within the run's {steps}"
        if warmup >= steps
        else ""
    )


def _count(number: int) -> str:
    for unit, size in (("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if number >= size:
            return f"{number / size:.2f} {unit}"
    return str(number)
