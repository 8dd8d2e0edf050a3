"""Everything that is done to a model between its class and its strategy: one list, in order.

The functions below are called from top to bottom, and so are the steps in each of them. A comment
says why a step has its place. `record_of(model)` says which steps a model has behind it. The ranks then
divide the model (`division.py`). Activation checkpointing, compilation and the strategy follow
(`strategies/wrap.py`).
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from launcher.errors import RecipeError
from launcher.models.adapter_files import adapter_loader
from launcher.models.attention import drop_causal_mask, isolate_documents, use_tower_attention
from launcher.models.build import build_model, is_pretrained
from launcher.models.description import embeddings, parts_without_text
from launcher.models.embedding_noise import add_noise
from launcher.models.expert_load import make_biases_buffers, watch_experts
from launcher.models.float8 import use_float8
from launcher.models.head import Head, Transform, logits_transform
from launcher.models.load import Load, ModelCheckpoint, starting_weights
from launcher.models.lora import add_adapters
from launcher.models.multi_token import KEY as MULTI_TOKEN
from launcher.models.multi_token import add_layers, prediction_layers, train_only, without_layers
from launcher.models.new_rows import grow_vocabulary
from launcher.models.nf4_layers import quantize_blocks
from launcher.models.precision import kept_in_float32
from launcher.models.quantization_aware import check_names, use_qat
from launcher.models.record import record_of
from launcher.models.recurrent import separate_documents, use_operators_without_values
from launcher.models.tiled_mlp import tile_mlps
from launcher.models.towers import Trained, use_towers
from launcher.recipe import schema
from launcher.sources.adapter import ADAPTER_CONFIG, PEFT_KEYS, other_base
from launcher.sources.layouts import nouns_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)


def build_with_tokens(
    section: schema.Model,
    *,
    sequence_length: int,
    labels: Sequence[str] | None,
    new_ids: range,
) -> PreTrainedModel:
    """The model of `build_model` on the meta device, whose embeddings have rows for the tokens of
    `new_ids`. Raises RecipeError as `build_model`."""
    # First: all later steps name, count and divide these rows, and checkpoints are compared with
    # their number
    model = build_model(section, sequence_length=sequence_length, labels=labels)
    use_operators_without_values(model)
    grow_vocabulary(model, new_ids)
    record_of(model).new_tokens = new_ids
    if section.mtp is not None:
        # Before the weights, which are read into these layers, too
        add_layers(model, section.mtp)
    if section.builder is None:
        # Before the weights, which are read into them; and with any rate, so that a checkpoint does
        # not depend on it
        make_biases_buffers(model, needed=section.router_bias_update_rate > 0)
    return model


@dataclass(frozen=True)
class WeightSource:
    """Where the weights of a model come from."""

    init_fn: Load
    dtype: torch.dtype
    """Their dtype on disk."""
    source: ModelCheckpoint | None
    """The checkpoint that has them; None: they are random."""


def change_weights(
    model: PreTrainedModel,
    blocks: Mapping[str, nn.Module],
    section: schema.Model,
    *,
    seed: int,
    new_ids: range,
    attachments: Mapping[str, Trained],
    blank: Mapping[str, Mapping[str, torch.Tensor]],
    lora: schema.Lora | None,
    float8: str | None,
    fsdp: bool,
    dtype: torch.dtype,
    device: torch.device,
) -> WeightSource:
    """Decides what the weights of a meta model are, in which dtype, and which are trained.

    float8: a name of torchao's recipes, for the blocks. fsdp: whether the strategy is. dtype: of
    computation, in which frozen weights are held. device: the kind that computes. attachments, blank:
    see `use_towers`. Raises
    RecipeError if the model cannot be changed so, or if a checkpoint or an adapter does not fit.
    """
    # Before adapters, which are linear layers, too, and stay in their own dtype
    if float8 is not None:
        use_float8(blocks, float8, device=device, dtype=dtype, model=model)
        record_of(model).float8 = True
    # So that the model rounds as its export
    if section.qat is not None:
        use_qat(model, blocks, section.qat, dtype=dtype)
    # Before adapters: a checkpoint has the names of the layers without them, and it may untie the
    # embeddings
    init_fn, stored_dtype, source = starting_weights(section, model, seed=seed, new_ids=new_ids)
    # After the checkpoint, by which transformers' conversions of names are known
    if section.qat is not None:
        check_names(model)
    # After the checkpoint, which sets anew what is trained
    if attachments:
        use_towers(model, attachments, blank)
    else:  # DDP would wait for their gradients
        for name in parts_without_text(model):
            model.get_parameter(name).requires_grad_(False)
    if section.mtp is not None and section.mtp.only:
        train_only(model)
    if lora is not None:
        path = lora.path if is_pretrained(section) else None
        with _naming_adapter(path):
            # After the checkpoint, which says what stays in float32
            adapt(
                model,
                lora,
                base_dtype=dtype,
                kept=kept_in_float32(model, dtype, source),
                base=section.path,
                new_ids=new_ids,
            )
            # After adapters: peft knows the class of the layers, and this changes it
            if lora.quantize is not None:
                _refuse_old_torch(fsdp=fsdp)
                # For 16 bits, whatever the dtype is: exports quantize the same weights again
                quantize_blocks(blocks, kept_in_float32(model, torch.bfloat16, source))
                record_of(model).nf4 = True
        if path is not None and (other := other_base(Path(path), str(section.path))):
            what = f"the adapter in {path} was trained on {other} (base_model_name_or_path)"
            logger.info(f"note: lora.path: {what}; model.path is {section.path}")
        # Magnitudes of DoRA are norms of the loaded weights, so this is after them
        init_fn = adapter_loader(init_fn, model, None if path is None else Path(path))
    return WeightSource(init_fn, stored_dtype, source)


def adapt(
    model: nn.Module,
    lora: schema.Lora,
    *,
    base_dtype: torch.dtype,
    kept: Collection[str] = (),
    base: str | None,
    new_ids: range,
) -> None:
    """Adds the adapters of a recipe: see `add_adapters`."""
    with without_layers(model):
        add_adapters(model, lora, base_dtype=base_dtype, kept=kept, base=base, new_ids=new_ids)
    record_of(model).adapters = True


def change_forward(
    model: PreTrainedModel,
    blocks: Mapping[str, nn.Module],
    *,
    mlp_tile: int | None,
    neftune_noise_alpha: float | None,
    packed: bool,
    drops_causal_mask: bool,
    transforms: bool,
    chunked_loss: bool,
    compile: bool,
    sequence_length: int,
    dtype: torch.dtype,
    device: torch.device,
    attention: str,
) -> Transform | None:
    """Decides how a meta model computes, after the objective has changed what the model returns
    (`Objective.change_model`; after adapters, because the head may have one, or be trained whole).
    Returns the transform of the model's logits, if it has a linear head and `transforms` asks for
    it.

    mlp_tile, neftune_noise_alpha: keys of section model. packed: rows hold several documents. drops_causal_mask:
    make no mask where it is only causal. chunked_loss: compute the loss without full logits.
    compile: compile this loss. attention: model.attention. Raises RecipeError if the model cannot keep documents apart.
    """
    # After everything that adds or replaces layers: these run a copy of the model on meta
    if mlp_tile is not None:
        tile_mlps(model, blocks, mlp_tile)
    towers = record_of(model).towers
    if packed and towers is not None and not towers.keeps_documents_apart:
        nouns = nouns_of(towers.kinds)
        what = f"{type(model).__name__} makes masks of its {nouns} that are not known"
        raise RecipeError(f"data.packing: {what}; use data.packing=false")
    for tower in () if towers is None else towers.kinds.values():
        if tower.inputs is not None:
            use_tower_attention(model, tower.inputs.form, device=device, compute_dtype=dtype)
    if towers is not None and towers.both_ways:
        pass  # attention keeps its masks
    elif packed:
        # Before attention, whose trial passes the bounds of documents to all layers
        record_of(model).documents = separate_documents(model, device)
        record_of(model).document_masking = isolate_documents(
            model,
            sequence_length=sequence_length,
            device=device,
            compute_dtype=dtype,
            attention=attention,
        )
    elif drops_causal_mask:
        drop_causal_mask(model, attention)
    # Last: it calls the head's forward method as it is by then, with new rows or an adapter
    transform = logits_transform(model) if transforms else None
    if transform is not None and chunked_loss:
        record_of(model).head = Head(embeddings(model)[1], transform, compile=compile)
    if prediction_layers(model) and record_of(model).head is None:
        what = f"the output layer of {type(model).__name__} is not a linear one alone"
        raise RecipeError(f"{MULTI_TOKEN}: {what}, by which they predict; set it to null")
    # After all that runs a copy of the model
    if neftune_noise_alpha is not None:
        add_noise(model, neftune_noise_alpha)
    # Whatever computes them now, they receive the choices of the routers
    record_of(model).expert_load = watch_experts(model)
    return transform


def _refuse_old_torch(*, fsdp: bool) -> None:
    if fsdp and torch.__version__ < "2.12":
        raise RecipeError(
            "lora.quantize: nf4 with strategy.kind: fsdp needs torch 2.12 or newer, because FSDP2 "
            f"of {torch.__version__} fails on frozen parameters of uint8; update it, or use "
            "strategy.kind=ddp"
        )


@contextmanager
def _naming_adapter(path: str | None) -> Iterator[None]:
    """Errors about keys that the adapter in lora.path sets name its file."""
    try:
        yield
    except RecipeError as error:
        if path is None:
            raise
        problems, file = list[str](), Path(path) / ADAPTER_CONFIG
        for problem in error.problems:
            key = problem.partition(":")[0].removeprefix("lora.")
            if key in PEFT_KEYS.values():
                hint = "merge the adapter with peft, and train from the merged model"
                problem = f"lora.path: {file}: {problem.removeprefix('lora.')}; {hint}"
            problems.append(problem)
        raise RecipeError(problems) from None
