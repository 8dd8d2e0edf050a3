"""What can be checked of `model.config` without transformers, whose import takes seconds.

`models/config_keys.py` compares the keys with the config class.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from launcher.recipe.section import LARGEST_INT

IMAGE_TEXT = ("gemma3", "llama4", "mistral3", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
"""Model types of images and text whose text model can be trained, with their own class."""
_SIZES = {
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "head_dim"),
    *("num_attention_heads", "num_key_value_heads", "max_position_embeddings"),
    *("n_embd", "n_layer", "n_head", "n_positions"),
}
"""Keys whose errors transformers finds late, without naming the key."""
_SET_ELSEWHERE = {
    "attn_implementation": "model.attention",
    "_attn_implementation": "model.attention",
    "dtype": "strategy.mixed_precision",
}


def config_problems(config: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    """Yields each wrong key of `model.config` and what is wrong with it."""
    if not isinstance(model_type := config.get("model_type"), str):
        what = "must be a model type of transformers, such as llama, qwen3 or gpt2"
        yield "model_type", f"{what}; got {model_type}"
    for key in config.keys() & _SET_ELSEWHERE:
        yield key, f"is set by {_SET_ELSEWHERE[key]}"
    yield from value_problems(config)


def size_problems(config: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    """Yields each size and token id that no model can have, and what is wrong with it."""
    for key in _SIZES & config.keys():
        value, most = config[key], 10_000 if "layer" in key else LARGEST_INT
        if isinstance(value, int) and value < 1:
            yield key, f"must be at least 1; got {value}"
        if isinstance(value, int) and value > most:
            yield key, f"must be at most {most}; got {value}"
    size = config.get("vocab_size")
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        value = config.get(key)
        ids = [id for id in (value if isinstance(value, list) else [value]) if isinstance(id, int)]
        if isinstance(size, int) and max(ids, default=0) >= size > 0:
            yield key, f"{max(ids)} is beyond the vocabulary of {size} (model.config.vocab_size)"


def value_problems(config: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    """Yields each key with a value that transformers accepts and no model can compute with.

    config: the keys of a recipe, or all keys of a config.
    """
    for key, value in config.items():
        if not isinstance(value, (int, float)):
            continue
        if not math.isfinite(value):
            yield key, f"must be a finite number; got {value}"
        elif "drop" in key and not 0 <= value <= 1:
            yield key, f"must be from 0 to 1; got {value}"
    heads, groups = config.get("num_attention_heads"), config.get("num_key_value_heads")
    if isinstance(heads, int) and isinstance(groups, int) and 0 < groups < heads and heads % groups:
        yield "num_key_value_heads", f"{groups} does not divide {heads} (num_attention_heads)"
    rope, size = config.get("rope_parameters"), config.get("head_dim")
    whole = isinstance(rope, dict) and "partial_rotary_factor" not in rope
    if whole and isinstance(size, int) and size % 2:
        yield "head_dim", f"must be even for rotary positions; got {size}"
