"""What can be checked of `model.config` without transformers, whose import takes seconds.

`models/config_keys.py` compares the keys with the config class.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping

from launcher.libraries import families
from launcher.recipe.section import LARGEST_INT

_SET_ELSEWHERE = {
    "attn_implementation": "model.attention",
    "_attn_implementation": "model.attention",
    "dtype": "strategy.mixed_precision",
}
_SET_WITH_PATH = {
    **dict.fromkeys(("num_labels", "id2label", "label2id"), "model.num_labels or data.labels"),
    "torch_dtype": "strategy.mixed_precision",
}
QUANTIZATION = "quantization_config"
"""The key of config.json that says how weights are quantized."""

Problems = Iterator[tuple[tuple[str, ...], str, str]]
"""For each wrong key its path, the name of the rule, and what is wrong."""


def of_text(config: Mapping[str, object]) -> tuple[str, Mapping[str, object]]:
    """The part of a config that describes the text model, and what its keys begin with: the section
    `text_config` of a model of more than text, else the whole config."""
    text = config.get("text_config")
    return ("text_config.", text) if isinstance(text, Mapping) else ("", config)


def _parts(config: Mapping[str, object]) -> dict[str, Mapping[str, object]]:
    """The config and its part for text, by what their keys begin with."""
    return {"": config, **dict([of_text(config)])}


def why_not_packed(config: Mapping[str, object]) -> str | None:
    """Why causal models with this config, of config.json or model.config, cannot keep the documents of
    a packed row apart; None: they can, or the type is not known. Read in transformers 5.23; those with
    masks were tried."""
    for model_type in (part.get("model_type") for part in _parts(config).values()):
        if not isinstance(model_type, str):
            continue
        if model_type in families.CARRY_A_STATE:
            return f"layers of {model_type} carry a state from one document to the next"
        if model_type in families.SELECT_TOKENS:
            return f"attention of {model_type} selects tokens without regard to documents"
        if model_type in families.MASK_WITHOUT_DOCUMENTS:
            return f"attention masks of {model_type} do not tell documents apart"
        if model_type in families.SHIFTED_POSITIONS:
            return f"positions of {model_type} begin after the id of its padding token"
        if model_type in families.ROW_POSITIONS:
            return f"positions of {model_type} are those of a row, not of its documents"
    return None


def attends_both_ways(config: Mapping[str, object]) -> bool:
    """Whether tokens of a model without a head see the ones after them: of encoders, and of decoders
    whose config says so."""
    text = of_text(config)[1]
    both = text.get("is_causal") is False or text.get("use_bidirectional_attention") in (
        True,
        "all",
    )
    return both or (
        text.get("model_type") in families.ENCODERS and text.get("is_decoder") is not True
    )


def config_problems(config: Mapping[str, object]) -> Problems:
    """Yields the path of each wrong key of `model.config` and what is wrong with it."""
    if not isinstance(model_type := config.get("model_type"), str):
        what = "must be a model type of transformers, such as llama, qwen3 or gpt2"
        yield ("model_type",), "choice", f"{what}; got {model_type}"
    for key in config.keys() & _SET_ELSEWHERE:
        yield (key,), "set-elsewhere", f"is set by {_SET_ELSEWHERE[key]}"
    yield from value_problems(config)
    yield from rotary_problems(config)


def change_problems(config: Mapping[str, object], path: tuple[str, ...] = ()) -> Problems:
    """Yields the path of each wrong key of a `model.config` that changes the config of model.path,
    and what is wrong with it."""
    if "model_type" in config:
        what = "model.path has its own; give only keys that change, or set model.config to null"
        yield (*path, "model_type"), "not-with-model.path", what
        return
    for key, value in config.items():
        if where := (_SET_ELSEWHERE | _SET_WITH_PATH).get(key):
            yield (*path, key), "set-elsewhere", f"is set by {where}"
        elif key in families.WEIGHT_KEYS:
            what = "cannot change: the weights in model.path are made for their own"
            yield (*path, key), "not-with-model.path", what
        elif key.endswith("_config") and isinstance(value, Mapping):
            yield from change_problems(value, (*path, key))
    if not path:
        yield from value_problems(config)
        yield from rotary_problems(config)


def rotary_problems(config: Mapping[str, object]) -> Problems:
    """Yields the path of each base and factor of rotary positions that is not a number in its range,
    and what is wrong with it. transformers would not name the key, or reverse the positions."""
    for key, value in config.items():
        if key.endswith("_config") and isinstance(value, Mapping):
            yield from (((key, *path), name, what) for path, name, what in rotary_problems(value))
    yield from _of_settings({key: config[key] for key in families.ROTARY if key in config})


def _of_settings(settings: Mapping[str, object]) -> Problems:
    """`rotary_problems` of settings, which may hold others: those of each kind of layers."""
    scales = settings.get("rope_type", settings.get("type")) in families.STRETCHED_ROTARY
    for key, value in settings.items():
        if isinstance(value, Mapping):
            yield from (((key, *path), name, what) for path, name, what in _of_settings(value))
        elif key in ("rope_theta", "factor"):
            number = value if isinstance(value, (int, float)) and value is not True else 0
            at_least_1 = scales and key == "factor"
            too_small = number < 1 if at_least_1 else number <= 0
            if too_small or not number <= sys.float_info.max:  # also what is not a number (NaN)
                limit = "of at least 1" if at_least_1 else "greater than 0"
                yield (key,), "range", f"must be a number {limit}; got {value!r}"


def size_problems(config: Mapping[str, object]) -> Problems:
    """Yields the path of each size and token id that no model can have, and what is wrong with it."""
    start, text = of_text(config)
    size, vocabulary = text.get("vocab_size"), f"{start}vocab_size"
    for name, part in _parts(config).items():
        path = tuple(name.split(".")[:-1])
        for key in families.SIZE_KEYS & part.keys():
            value, most = part[key], 10_000 if "layer" in key else LARGEST_INT
            if isinstance(value, int) and value < 1:
                yield (*path, key), "range", f"must be at least 1; got {value}"
            if isinstance(value, int) and value > most:
                yield (*path, key), "range", f"must be at most {most}; got {value}"
        for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
            value = part.get(key)
            ids = value if isinstance(value, list) else [value]
            largest = max((id for id in ids if isinstance(id, int)), default=0)
            if isinstance(size, int) and largest >= size > 0:
                what = f"{largest} is beyond the vocabulary of {size} (model.config.{vocabulary})"
                yield (*path, key), "beyond-vocab_size", what


def value_problems(config: Mapping[str, object]) -> Problems:
    """Yields the path of each value that transformers accepts and no model can compute with, and
    what is wrong with it.

    config: the keys of a recipe, or all keys of a config.
    """
    for section, value in config.items():
        inside = section.endswith("_config") and section != QUANTIZATION
        if inside and isinstance(value, Mapping):
            yield from (
                ((section, *path), name, what) for path, name, what in value_problems(value)
            )
    for key, value in config.items():
        if not isinstance(value, (int, float)) or key == "rope_theta":  # of rotary_problems
            continue
        if not math.isfinite(value):
            yield (key,), "finite", f"must be a finite number; got {value}"
        elif "drop" in key and not 0 <= value <= 1:
            yield (key,), "range", f"must be from 0 to 1; got {value}"
    heads, groups = config.get("num_attention_heads"), config.get("num_key_value_heads")
    if isinstance(heads, int) and isinstance(groups, int) and 0 < groups < heads and heads % groups:
        what = f"{groups} does not divide {heads} (num_attention_heads)"
        yield ("num_key_value_heads",), "does-not-divide", what
    rope, size = config.get("rope_parameters"), config.get("head_dim")
    whole = isinstance(rope, dict) and "partial_rotary_factor" not in rope
    if whole and isinstance(size, int) and size % 2:
        yield ("head_dim",), "odd", f"must be even for rotary positions; got {size}"
