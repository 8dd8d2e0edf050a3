"""Describes a run in a few lines, before its first step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from launcher.data.loader import expected_padding
from launcher.data.setup import RunData
from launcher.distributed.process_group import DataParallel
from launcher.metrics.console import bytes_as_text
from launcher.recipe.schema import ActivationCheckpointing, Recipe
from launcher.strategies.activation_checkpointing import (
    is_checkpointed,
    recomputation_changes_state,
)
from launcher.training.setup import Training


def summarize(recipe: Recipe, training: Training, ranks: DataParallel) -> list[str]:
    """Model, data and batch of a run, for the console."""
    return [
        "\n".join(_model(training, recipe.activation_checkpointing, ranks.device)),
        "\n".join(_data(training.data, shuffled=recipe.data.shuffle)),
        "\n".join(_batch(recipe, training.data, ranks=ranks.size)),
    ]


def _bytes(tensors: list[nn.Parameter]) -> int:
    local = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    return sum(tensor.numel() * tensor.element_size() for tensor in local)


def _model(
    training: Training, checkpointing: ActivationCheckpointing | None, device: torch.device
) -> Iterator[str]:
    """Model, strategy and memory: read off the wrapped model, not off the recipe."""
    module, blocks = training.wrapped.module, training.blocks
    parameters = list(module.parameters())
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    config: Any = getattr(module, "config", None)
    name = getattr(config, "model_type", type(module).__name__)
    kind = next((type(block).__name__.removeprefix("FSDP") for block in blocks.values()), "none")
    total = sum(parameter.numel() for parameter in parameters)
    updates = sum(parameter.numel() for parameter in trained)
    share = f", {_count(updates)} of them trained ({updates / total:.2%})"
    processor = f"CPU with {torch.get_num_threads()} thread(s)"
    if device.type == "cuda":
        processor = torch.cuda.get_device_name(device)
    yield (
        f"model: {name}, {_count(total)} parameters{share if updates < total else ''}, "
        f"{len(blocks)} blocks ({kind}); a rank is a {processor}"
    )
    yield training.wrapped.description()
    if not blocks:
        yield (
            "note: the model's class names no blocks (_no_split_modules): it is sharded as one "
            "group, and nothing is checkpointed"
        )
    if checkpointing is not None:
        wrapped = sum(is_checkpointed(module) for module in module.modules())
        yield (f"activation checkpointing: {checkpointing.mode}, {wrapped} of {len(blocks)} blocks")
        unwrapped = sum(recomputation_changes_state(block) for block in blocks.values())
        if unwrapped:
            yield (
                f"note: {unwrapped} blocks are not checkpointed, recomputation would update their "
                "BatchNorm twice"
            )
    held, gradients = _bytes(parameters), _bytes(trained)
    yield (
        f"a rank holds {bytes_as_text(held + 3 * gradients)}: parameters {bytes_as_text(held)}, "
        f"gradients {bytes_as_text(gradients)}, optimizer {bytes_as_text(2 * gradients)}; "
        "plus activations and unsharded blocks"
    )


def _data(data: RunData, *, shuffled: bool) -> Iterator[str]:
    """Size of the training data, truncation, and padding."""
    dataset = data.training
    first, *rest = dataset.describe()
    padding = expected_padding(dataset, data.sampler)
    if not dataset.packed and padding is not None:
        first += f", padded to the longest of a micro-batch ({padding:.1%} padding)"
    yield f"data: {first}, {'shuffled' if shuffled else 'in the order of the files'}"
    for line in rest:
        yield line if line.startswith(("warning", "note")) else f"      {line}"


def _batch(recipe: Recipe, data: RunData, *, ranks: int) -> Iterator[str]:
    """How the global batch is divided, and how often the run sees the data."""
    batch, sampler, steps = recipe.batch, data.sampler, data.steps
    if batch.micro_batch_size is not None:
        parts = (
            f"{batch.micro_batch_size} per micro-batch x {sampler.micro_batches(0)} accumulation "
            f"steps x {ranks} ranks"
        )
    else:
        counts = [sampler.micro_batches(step) for step in range(min(steps, 20))]
        number = str(counts[0]) if min(counts) == max(counts) else f"{min(counts)} to {max(counts)}"
        parts = (
            f"micro-batches of up to {batch.micro_batch_tokens} tokens, "
            f"{number} a step on each of {ranks} ranks"
        )
    text = f"batch: {batch.global_batch_size} sequences = {parts}; {steps} steps"
    passes = data.order.passes(steps * batch.global_batch_size)
    if passes:
        numbers = (f"{number:,.0f}" if number >= 10 else f"{number:.2g}" for number in passes)
        text += f" are {' and '.join(numbers)} passes over the data"
    yield text
    warmup = recipe.schedule.warmup_steps
    if warmup >= steps:
        yield f"note: the warm-up of {warmup} steps does not end within the run's {steps}"


def _count(number: int) -> str:
    for unit, size in (("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if number >= size:
            return f"{number / size:.2f} {unit}"
    return str(number)
