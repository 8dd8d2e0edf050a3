"""Describes a run in a few lines, before its first step."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, cast

import torch
import transformers
from torch import nn

from launcher import __version__
from launcher.console import bytes_as_text, count_as_text
from launcher.data.batching import BatchSampler, JoinedBatchSampler
from launcher.data.dataset import SequenceDataset
from launcher.data.loader import expected_padding
from launcher.distributed.environment import segments_grow
from launcher.libraries.private import attention_implementation
from launcher.models.attention import attention_kernels
from launcher.models.config_overrides import config_changes
from launcher.models.description import describe, parts_without_text
from launcher.models.float8 import describe_float8
from launcher.models.head import computes_loss
from launcher.models.multi_token import prediction_layers
from launcher.models.names import clean_name
from launcher.models.nf4 import shapes
from launcher.models.nf4_layers import describe_nf4
from launcher.models.quantization_aware import describe_qat
from launcher.models.record import record_of, whole_model
from launcher.models.recurrent import missing_kernels
from launcher.models.shards import local_bytes
from launcher.models.tower_inputs import TOWERS
from launcher.objectives.base import dataset_objective
from launcher.optimizers.groups import describe_groups
from launcher.optimizers.optimizer import warmup_steps
from launcher.recipe import schema
from launcher.recipe.data_sets import named_models
from launcher.recipe.decode import KeyPath, dotted
from launcher.recipe.derived import Derived
from launcher.recipe.schema import Recipe
from launcher.reliability.json_files import Json
from launcher.sources.hub import commit_of, is_model_id, model_folder
from launcher.sources.layouts import ATTACHMENTS
from launcher.strategies.activation_checkpointing import (
    is_checkpointed,
    recomputation_changes_state,
)
from launcher.strategies.base import compute_dtype
from launcher.strategies.one_rank import OneRank
from launcher.training.model import learning_rate_ratios
from launcher.training.setup import Training


def summarize(training: Training, derived: Mapping[KeyPath, Derived]) -> Iterator[str]:
    """Paragraphs on model, data and batch, for the console. `derived` are `Origins.derived`."""
    yield "\n".join(_model(training))
    lines = list(_data(training))
    lines += [f"      {dotted(key)}: {value}" for key, value in derived.items()]
    yield "\n".join(lines)
    yield "\n".join(_batch(training))


def describe_start(training: Training, ranks_per_node: int) -> Json:
    """What events.jsonl records of a start; `held` are the bytes of parameters, gradients and
    optimizer state that this rank holds on its device."""
    device, nccl = training.ranks.device, cast(Any, torch.cuda.nccl)
    on_gpu = device.type == "cuda"
    held = {
        name: local_bytes(tensor for tensor in tensors if tensor.device.type == device.type)
        for name, tensors in _held(training).items()
    }
    return {
        "device": torch.cuda.get_device_name(device) if on_gpu else "cpu",
        "device_memory": torch.cuda.mem_get_info(device)[1] if on_gpu else None,
        "ranks_per_node": ranks_per_node,
        "versions": {
            "launcher": __version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "cuda": torch.version.cuda,
            "nccl": ".".join(map(str, nccl.version())) if on_gpu else None,
        },
        "revisions": _revisions(training.recipe),
        "held": held,
        # For `launcher report`, which names what limits the speed
        "recomputed_share": training.flops.recomputed_share(training.recipe.data.sequence_length),
        "micro_batches": training.data.sampler.micro_batches(training.data.start.step),
        "stages": _stages(training),
        "segments_grow": segments_grow() if on_gpu else None,
        "global_batch_size": training.recipe.batch.global_batch_size,
        "batch_unit": training.recipe.data.batch_unit,
    }


def _stages(training: Training) -> list[str] | None:
    """The blocks of each rank along the stages of a pipeline; None: there is none."""
    stages = record_of(training.wrapped.module).stages
    return None if stages is None else [*map(stages.blocks_text, range(stages.links.size))]


def _revisions(recipe: Recipe) -> Json:
    """The commits of models and tokenizers that come from the hub, by key."""
    names = {key: name for key, name, _ in named_models(recipe)}
    return {
        key: commit_of(model_folder(name, key=key, weights=False))
        for key, name in names.items()
        if is_model_id(name)
    }


def _about_towers(module: nn.Module, names: list[str], kind: str, train: str) -> Iterator[str]:
    """Which of the parameters that only attachments of a kind use are trained."""
    section = ATTACHMENTS[kind]
    of = dict(module.named_parameters())
    trained = [name for name in names if of[name].requires_grad]
    count = sum(of[name].numel() for name in trained)
    tower = TOWERS[kind].tower
    what = f"the {tower} tower and its projector are frozen"
    if trained:
        what = f"{len(trained)} of {len(names)} tensors of the {tower} tower and its projector are "
        what += f"trained ({count_as_text(count)} parameters), such as {clean_name(trained[0])}"
    yield f"{section}: {what} ({section}.train: {train})"


def _held(training: Training) -> dict[str, list[torch.Tensor]]:
    """What a rank holds between steps. Parameters stand for their gradients, which have the same
    sizes."""
    parameters = list(training.wrapped.module.parameters())
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    state = [tensor for each in training.optimizer.state.values() for tensor in each.values()]
    return {"parameters": parameters, "gradients": trained, "optimizer": state}


def _model(training: Training) -> Iterator[str]:
    """Lines on model, strategy and memory. They describe the wrapped model, not the recipe."""
    recipe, device, held = training.recipe, training.ranks.device, _held(training)
    module, blocks = training.wrapped.module, training.blocks
    name = getattr(getattr(module, "config", None), "model_type", type(module).__name__)
    kind = next((type(block).__name__.removeprefix("FSDP") for block in blocks.values()), "none")
    whole = whole_model(module)
    total = sum(shape.numel() for shape in shapes(whole).values())
    updates = sum(each.numel() for each in whole.parameters() if each.requires_grad)
    share = f", {count_as_text(updates)} of them trained ({updates / total:.2%})"
    cpu = f"CPU with {torch.get_num_threads()} thread(s)"
    yield (
        f"model: {name}, {count_as_text(total)} parameters{share if updates < total else ''}, "
        f"{describe(module).depth} blocks ({kind}); a rank is a "
        f"{torch.cuda.get_device_name(device) if device.type == 'cuda' else cpu}"
    )
    if layers := prediction_layers(module).values():
        count = sum(shapes(layer)[p].numel() for layer in layers for p in layer.parameters())
        form = "trained" if recipe.model.mtp is not None and recipe.model.mtp.train else "frozen"
        yield f"multi-token prediction: {len(layers)} layers, {count_as_text(count)} parameters, {form}"
    for change in config_changes(recipe.model):
        yield f"model.config: {change}"
    yield training.wrapped.summary()
    if recipe.lora is not None and recipe.lora.quantize is not None:
        yield describe_nf4(blocks.values())
    precision = recipe.strategy.mixed_precision
    if precision is not None and precision.float8 is not None:
        yield describe_float8(module, blocks.values())
    if recipe.model.qat is not None:
        yield describe_qat(module)
    predicts = dataset_objective(training.data.training).predicts_tokens
    sequences = recipe.data.builder is None and predicts
    if recipe.model.chunked_loss and sequences and not computes_loss(module):
        yield "note: full logits are computed: they are not the output of a single linear layer"
    if (unused := parts_without_text(module)) and not recipe.attachments:
        first = clean_name(unused[0])
        yield f"note: {len(unused)} tensors that text does not use are frozen, such as {first}"
    for kind, section in recipe.attachments.items():
        yield from _about_towers(module, unused, kind, section.train)
    attention = attention_implementation(module)
    if recipe.model.attention == "auto" and attention == "eager":
        yield (
            f"note: model.attention: auto is eager, because transformers has no sdpa for {name}; "
            "it computes and keeps all scores"
        )
    if device.type == "cuda":
        data, dtype = training.data.training, compute_dtype(recipe.strategy)
        packed = data.packed or data.joined
        kernels = attention_kernels(module, packed=packed, device=device, compute_dtype=dtype)
        yield f"attention: {kernels}"
        if missing := missing_kernels(module):
            yield (
                "note: recurrent layers run in PyTorch's operators, several times slower than in "
                f"kernels: install {' and '.join(missing)}"
            )
    yield from describe_groups(whole, recipe.optimizer, learning_rate_ratios(whole, recipe))
    if not blocks:
        yield (
            "note: the model's class names no blocks (_no_split_modules): it is sharded as one "
            "group, and nothing is checkpointed or compiled"
        )
    if (checkpointing := recipe.activation_checkpointing) is not None:
        wrapped = sum(map(is_checkpointed, module.modules()))
        count = len(blocks) + len(prediction_layers(module))
        yield f"activation checkpointing: {checkpointing.mode}, {wrapped} of {count} blocks"
        if unwrapped := sum(map(recomputation_changes_state, blocks.values())):
            yield (
                f"note: {unwrapped} blocks are not checkpointed, recomputation would update their "
                "BatchNorm twice"
            )
    sizes = {name: local_bytes(tensors) for name, tensors in held.items()}
    parts = ", ".join(f"{name} {bytes_as_text(size)}" for name, size in sizes.items())
    together = bytes_as_text(sum(sizes.values()))
    beside = "unsharded blocks"
    if isinstance(training.wrapped, OneRank):
        beside = f"{bytes_as_text(training.wrapped.copied_bytes)} of weights to compute with"
    yield f"a rank holds {together}: {parts}; plus activations and {beside}"


def _data(training: Training) -> Iterator[str]:
    data, shuffled = training.data, training.recipe.data.shuffle
    first, *rest = data.training.describe()
    padding = expected_padding(data.training, data.sampler)
    if data.training.joined:
        first += f" ({padding:.1%} padding)"
    elif not data.training.packed and padding is not None:
        first += f", padded to the longest of a micro-batch ({padding:.1%} padding)"
    yield f"data: {first}, {'shuffled' if shuffled else 'in the order of the files'}"
    if (share := training.recipe.data.validation_split) is not None:
        sets: Iterable[Any] = data.validation.values()
        documents = sum(each.sequences.documents for each in sets)
        rest.append(
            f"validation: {documents:,} held-out documents (data.validation_split: {share})"
        )
    if share is None:  # else they are those of the training data
        for each in data.validation.values():
            of_files = each.store.file_notes if isinstance(each, SequenceDataset) else ()
            rest += [f"note: data.validation, {line.removeprefix('note: ')}" for line in of_files]
    for line in rest:
        yield line if line.startswith(("warning", "note")) else f"      {line}"


def _counts(sampler: BatchSampler, steps: int) -> str:
    """Micro-batches of a rank in the first steps."""
    counts = [sampler.micro_batches(step) for step in range(min(steps, 20))]
    return " to ".join(map(str, sorted({min(counts), max(counts)})))


def _every(section: schema.Evaluation | schema.Checkpoint) -> str:
    """`200 steps` or `0.25 epochs`; empty: never."""
    if section.every_epochs is not None:
        return f"{section.every_epochs:g} epochs"
    return f"{section.every_steps} steps" if section.every_steps else ""


def _batch(training: Training) -> Iterator[str]:
    recipe, data = training.recipe, training.data
    batch, sampler, steps = recipe.batch, data.sampler, data.steps
    ranks = f"{training.ranks.data_parallel_size} ranks"
    if together := training.ranks.same_sequences:
        groups = training.ranks.data_parallel_size
        sizes = " x ".join(f"{size} {each.term}" for each, size in together)
        ranks = f"{groups} {'group' if groups == 1 else 'groups'} of {sizes} ranks"
    unit = recipe.data.batch_unit
    if isinstance(sampler, JoinedBatchSampler):
        parts = (
            f"up to {sampler.rows} x {sampler.row_length:,} tokens per micro-batch x "
            f"{_counts(sampler, steps)} accumulation steps x {ranks}"
        )
    elif batch.micro_batch_size is not None:
        parts = (
            f"{batch.micro_batch_size} per micro-batch x {sampler.micro_batches(0)} accumulation "
            f"steps x {ranks}"
        )
    else:
        parts = (
            f"micro-batches of up to {batch.micro_batch_tokens} tokens, "
            f"{_counts(sampler, steps)} a step on each of {ranks}"
        )
    count, verb = ("1 step", "is") if steps == 1 else (f"{steps} steps", "are")
    text = f"batch: {batch.global_batch_size} {unit} = {parts}; {count}"
    samples = data.start.samples + (steps - data.start.step) * batch.global_batch_size
    if passes := data.order.epochs_seen(samples):
        numbers = [f"{number:,.0f}" if number >= 10 else f"{number:.2g}" for number in passes]
        noun = "pass" if numbers == ["1"] else "passes"
        text += f" {verb} {' and '.join(numbers)} {noun} over the data"
    yield text
    lora, model = recipe.lora, recipe.model
    if (
        lora is not None
        and model.path is None
        and recipe.checkpoint.export
        and not recipe.checkpoint.export_merged
    ):
        yield (
            "warning: the export holds the adapter only, and its base is random weights that are "
            "stored nowhere; set checkpoint.export_merged=true, or model.path"
        )
    if (objective := recipe.objective) is not None:
        given = f" with {objective.arguments}" if objective.arguments else ""
        yield f"loss: {objective.loss}{given} (objective.loss)"
    plans = []
    if data.validation and (every := _every(recipe.evaluation)):
        plans.append(f"evaluation every {every}")
    if every := _every(recipe.checkpoint):
        plans.append(f"checkpoint every {every}")
    if recipe.checkpoint.export:
        of_best = " of the best checkpoint" if recipe.checkpoint.export == "best" else ""
        plans.append(f"export{of_best} at the end")
    yield f"plan: {', '.join(plans) or 'no evaluation and no checkpoints'}"
    warmup = warmup_steps(recipe.schedule, steps)
    if warmup >= steps:
        shorter = "schedule.warmup_steps=0"
        if recipe.schedule.warmup_ratio is not None:
            shorter = "a smaller schedule.warmup_ratio"
        longer = "more run.epochs" if recipe.run.max_steps is None else "a larger run.max_steps"
        more = [shorter, longer, "a smaller batch.global_batch_size"]
        if recipe.data.packing and not recipe.data.joins_rows:
            more.append("data.packing=false, with one document a sequence")
        yield (
            f"note: the warm-up of {warmup} steps does not end within the run's {steps}, so the "
            f"learning rate stays low; {', '.join(more[:-1])} or {more[-1]} changes that"
        )
