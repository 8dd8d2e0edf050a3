"""A plan where there is no torch, as on a login node: by the formulas that people know, from the model's config alone.

Standard library only. Good to some 15 % for the models it knows; it is there to stop what cannot fit, not to promise what does.
"""

from __future__ import annotations

import dataclasses
import glob
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from launcher.data.batching import accumulation_steps
from launcher.recipe.schema import ActivationCheckpointing, CpuOffload, Recipe, Strategy

GATED = {"llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "phi3", "smollm3", "olmo", "olmo2", "granite", "starcoder"}
"""Model types with three matrices in the feed-forward."""
PLAIN = {"gpt2", "gpt_neox", "opt", "phi", "starcoder2", "gpt_bigcode"}
"""With two."""
CERTAIN = 1.3
"""So many times what there is does not fit, whatever the formulas miss."""
_BESIDE, _MARGIN = 2**30, 1.04


def find_config(recipe: Recipe) -> dict[str, Any] | None:
    """The model's config: the recipe's, the folder's, or that in the hub's cache; None where there is none."""
    if recipe.model.config is not None:
        return dict(recipe.model.config)
    if recipe.model.path is None:
        return None
    cache = Path(os.environ.get("HF_HOME") or Path.home() / ".cache/huggingface", "hub")
    places = [f"{glob.escape(recipe.model.path)}/config.json"]
    places.append(f"{glob.escape(str(cache))}/models--{recipe.model.path.replace('/', '--')}/snapshots/*/config.json")
    for file in (Path(name) for place in places for name in sorted(glob.glob(place))):
        try:
            found = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        if isinstance(found, dict):
            return found
    return None


def _sizes(config: Mapping[str, Any]) -> dict[str, int] | None:
    def first(*names: str) -> int | None:
        return next((config[name] for name in names if isinstance(config.get(name), int)), None)

    hidden, layers = first("hidden_size", "n_embd"), first("num_hidden_layers", "n_layer")
    heads, vocabulary = first("num_attention_heads", "n_head"), first("vocab_size")
    if config.get("model_type") not in GATED | PLAIN or hidden is None or layers is None or heads is None or vocabulary is None:
        return None
    size = first("head_dim") or hidden // heads
    return {
        "hidden": hidden,
        "layers": layers,
        "vocabulary": vocabulary,
        "inner": first("intermediate_size", "n_inner", "ffn_dim") or 4 * hidden,
        "queries": heads * size,
        "keys": (first("num_key_value_heads") or heads) * size,
        "matrices": 3 if config["model_type"] in GATED else 2,
    }


def count_parameters(config: Mapping[str, Any]) -> tuple[int, int] | None:
    """Of a block, and of everything else (embedding and head); None for models that are not known here.

    Four attention matrices, two or three of the feed-forward; biases and norms left out.
    """
    sizes = _sizes(config)
    if sizes is None:
        return None
    hidden = sizes["hidden"]
    block = 2 * hidden * (sizes["queries"] + sizes["keys"]) + sizes["matrices"] * hidden * sizes["inner"]
    tied = config.get("tie_word_embeddings", config["model_type"] == "gpt2")
    return block, sizes["vocabulary"] * hidden * (1 if tied else 2)


def rough_bytes(recipe: Recipe, *, ranks: int) -> int | None:
    """Of one GPU at its peak, what is `auto` as frugal as can be; None where the model, or how it is trained, is not known here.

    16 bytes a parameter (float32 weights, gradients, AdamW), over the ranks that share a copy, none of them with offload; 4 more where
    whole gradients wait for the last micro-batch; two blocks and the embeddings in the compute dtype, gradients of one block and
    the embeddings in float32;
    34 or, with a gated feed-forward, 49 bytes x hidden size a token and block, of which full checkpointing keeps 2, and one block
    computed again; 12 bytes x vocabulary a token for logits and loss.
    """
    config = find_config(recipe)
    sizes = _sizes(config) if config is not None else None
    if config is None or sizes is None or recipe.model.freeze is not None:
        return None
    if recipe.strategy.kind == "auto":
        frugal = Strategy(kind="fsdp", mixed_precision=recipe.strategy.mixed_precision, cpu_offload=CpuOffload())
        recipe = dataclasses.replace(recipe, strategy=frugal, activation_checkpointing=ActivationCheckpointing(mode="full"))
    block, rest = count_parameters(config) or (0, 0)
    strategy, batch = recipe.strategy, recipe.batch
    rows = batch.micro_batch_size if isinstance(batch.micro_batch_size, int) else 1
    tokens = rows * recipe.data.sequence_length if batch.micro_batch_tokens is None else batch.micro_batch_tokens
    whole = block * sizes["layers"] + rest
    shards = 1 if strategy.kind == "ddp" else max(1, ranks // strategy.replicate)
    compute = 4 if strategy.mixed_precision is None or strategy.mixed_precision.param_dtype == "float32" else 2
    accumulates = accumulation_steps(global_batch_size=batch.global_batch_size, micro_batch_size=rows, ranks=ranks) > 1
    states = 16.0 * whole / shards
    if recipe.lora is not None:
        states = compute * whole / shards
    elif strategy.kind == "ddp" and accumulates:
        states += 4 * whole
    if strategy.cpu_offload is not None:
        states = 0
    reduced = 4 if recipe.lora is None else 0
    gathered = compute * whole if strategy.kind == "ddp" else compute * (2 * block + rest) + reduced * (block + rest)
    a_block = (49 if sizes["matrices"] == 3 else 34) * sizes["hidden"] * tokens * compute / 2
    checkpointing = recipe.activation_checkpointing
    again = 0 if checkpointing is None else math.ceil(sizes["layers"] / checkpointing.every_n_blocks)
    activations = a_block * (sizes["layers"] - again)
    if checkpointing is not None:
        kept = 2 * sizes["hidden"] * tokens * (1 if checkpointing.mode == "full" else 8)
        away = checkpointing.offload_to_cpu and checkpointing.mode == "full"
        activations += a_block + (0 if away else kept * again)
    logits = 12.0 * sizes["vocabulary"] * tokens
    return round((states + gathered + activations + logits) * _MARGIN + _BESIDE)
