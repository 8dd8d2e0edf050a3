"""One step of bfloat16 of a small model of each type of transformers, on two ranks.

    torchrun --nproc-per-node 2 families_worker.py FOLDER [TYPE ...]

Writes results.json to FOLDER: for each type and strategy the loss, or the text of the error. A type
without a small config, or that the launcher refuses, has the reason as `refused`.
"""

import logging
import math
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
os.environ |= {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}

import torch
import torch.distributed as dist
import transformers
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from launcher.distributed.rank_layout import RankLayout
from launcher.errors import RecipeError
from launcher.optimizers.optimizer import LossScale
from launcher.recipe.decode import decode
from launcher.recipe.model_config import why_not_packed
from launcher.training.loop import Update, train_steps
from launcher.training.model import prepare_model
from tests.distributed.launching import end_worker
from tests.unit.models.image_text_types import small_config

TYPES = sorted(
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys() | MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.keys()
)
CPU = torch.device("cpu")
LENGTH = 16
MLA = {"num_key_value_heads": 4, "head_dim": 4}
GPT2 = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
GPT2 |= {"bos_token_id": 1, "eos_token_id": 2}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 16, "mamba_n_groups": 1}
MAMBA |= {"layer_types": ["mamba", "attention"], "attn_layer_indices": [1]}
OTHERS = {
    **dict.fromkeys(("axk1", "axk2", "bailing_hybrid", "deepseek_v2", "deepseek_v3"), MLA),
    **dict.fromkeys(("deepseek_v32", "glm4_moe_lite", "glm_moe_dsa", "minicpm3", "youtu"), MLA),
    **dict.fromkeys(("gpt2", "gpt-sw3", "gpt_bigcode", "openai-gpt"), GPT2),
    **dict.fromkeys(("codegen", "gptj"), GPT2 | {"rotary_dim": 4}),
    **dict.fromkeys(("bamba", "granitemoehybrid"), MAMBA),
    "ernie4_5_moe": {"moe_k": 2},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "vocab_size": 64},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 8, "head_dim": 8},
    "ministral": {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8},
    "nemotron": {"num_key_value_heads": 2, "head_dim": 8},
    "recurrent_gemma": {"lru_width": 32},
}
"""What the small config of a type needs besides the common sizes."""
MOST_PARAMETERS = 8_000_000
"""Of a model that is trained here."""


def recipe_of(model_type, strategy):
    config = {"model_type": model_type} | small_config(model_type) | OTHERS.get(model_type, {})
    values = {
        "run": {"name": "family", "max_steps": 1},
        "model": {"config": config, "compile": False},
        "data": {
            "kind": "tokens",
            "train": ["none.jsonl"],
            "sequence_length": LENGTH,
            "packing": why_not_packed(config) is None,
        },
        "batch": {"global_batch_size": 4, "micro_batch_size": 1},
        "strategy": {"kind": strategy, "mixed_precision": {"param_dtype": "bfloat16"}},
        "optimizer": {"learning_rate": 1e-3},
    }
    recipe, problems, _ = decode(values)
    assert not problems, problems
    return recipe


def step(model_type, strategy, ranks):
    """The loss of two micro-batches, forward and backward."""
    torch.manual_seed(1)
    recipe = recipe_of(model_type, strategy)
    prepared = prepare_model(recipe, device=CPU)
    count = sum(parameter.numel() for parameter in prepared.model.parameters())
    if count > MOST_PARAMETERS:
        raise RecipeError(f"no small config: {count:,} parameters")
    wrapped = prepared.wrap(recipe, ranks)
    optimizer = prepared.make_optimizer(wrapped, recipe)
    data = prepared.synthetic_data(recipe.data, recipe.batch)
    update = Update(optimizer, lambda step: 1e-3, LossScale(CPU, enabled=False), 1.0)
    batches = data.batches(ranks, micro_batches=2, steps=1)
    (done,) = train_steps(wrapped, batches, loss=data.loss, update=update, averaged_over=ranks.size)
    norm = float(done.grad_norm)
    assert math.isfinite(norm), f"the gradient norm is {norm}"
    return float(done.loss)


def main(folder, chosen):
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    ranks = RankLayout(
        rank=dist.get_rank(), size=dist.get_world_size(), group=dist.group.WORLD, device=CPU
    )
    results = {}
    for model_type in chosen or TYPES:
        found = {}
        for strategy in ("ddp", "fsdp"):
            try:
                found[strategy] = step(model_type, strategy, ranks)
            except RecipeError as error:
                found["refused"] = str(error)
            except Exception as error:
                found[strategy] = f"{type(error).__name__}: {error}"
        results[model_type] = found
        if ranks.rank == 0:
            print(model_type, found, flush=True)
    end_worker(Path(folder), results)


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    main(sys.argv[1], sys.argv[2:])
