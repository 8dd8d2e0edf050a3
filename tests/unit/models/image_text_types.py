"""Tiny models of images and text, one of each type of transformers.

Configs are the defaults of transformers with small sizes. SETTINGS has what such a config needs.
"""

from typing import Any

import transformers

from tests import multimodal

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "d_model": 32,
    "embed_dim": 32,
    "out_hidden_size": 32,
    "mm_hidden_size": 32,
    "vision_output_dim": 32,
    "projector_input_dim": 32,
    "projector_output_dim": 32,
    "intermediate_size": 48,
    "intermediate_size_mlp": 48,
    "block_ff_dim": 48,
    "moe_intermediate_size": 16,
    "moe_shared_expert_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_layers": 2,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "depth": 2,
    "num_attention_heads": 4,
    "num_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "global_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "num_experts": 4,
    "n_routed_experts": 4,
    "num_local_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "mamba_num_heads": 8,
    "mamba_head_dim": 8,
    "ssm_state_size": 16,
    "n_groups": 2,
    "chunk_size": 16,
    "sliding_window": 16,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 64,
    "max_position_embeddings": 64,
    "image_size": 28,
    "patch_size": 14,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "fullatt_block_indexes": [1],
    "deepstack_visual_indexes": [0],
}
_LEFT_OUT = {"architectures", "dtype", "transformers_version", "_name_or_path", "per_layer_config"}
_MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
_MROPE |= {"partial_rotary_factor": 1.0}
_SECTIONS = {"text_config": {"rope_parameters": _MROPE}}
_THINKER = _SECTIONS | {"audio_config": {"encoder_attention_heads": 4, "output_dim": 32}}
SETTINGS: dict[str, dict[str, Any]] = {
    "cohere_compass": {
        "text_config": {
            "rope_parameters": {
                kind: {"rope_type": "default", "rope_theta": 10000.0}
                for kind in ("full_attention", "sliding_attention")
            }
        }
    },
    "deepseek_ocr2": {
        "text_config": {"mlp_layer_types": ["dense", "sparse"], "num_experts_per_tok": 2}
    },
    "emu3": {
        "vocabulary_map": {"<image>": 60},
        "vq_config": {"base_channels": 32, "hidden_size": 32, "channel_multiplier": [1, 1]},
    },
    "ernie4_5_vl_moe": {
        "text_config": {"moe_intermediate_size": [16, 16], "moe_k": 2}
        | {"rope_parameters": _MROPE | {"mrope_section": [1, 1, 2]}}
    },
    "glm46v": _SECTIONS,
    "glm4v": _SECTIONS,
    "glm4v_moe": _SECTIONS,
    "glm_ocr": _SECTIONS,
    "glmga": _SECTIONS,
    "hunyuan_vl": {
        "text_config": {"head_dim": 8, "rope_parameters": _MROPE | {"mrope_section": [1, 1, 1, 1]}}
    },
    "inkling_mm_model": {
        "text_config": {"layer_types": ["hybrid_sliding", "hybrid"]},
        "vision_config": {"n_layers": 2, "text_hidden_size": 32},
        "audio_config": {"text_hidden_size": 32},
    },
    "janus": {
        "vq_config": {"base_channels": 32, "channel_multiplier": [1, 1], "latent_channels": 8}
    },
    "kimi_k25": {"text_config": {"head_dim": 4, "num_key_value_heads": 4}},
    "mllama": {
        "text_config": {"num_hidden_layers": 3, "cross_attention_layers": [1]},
        "vision_config": {"attention_heads": 4, "num_global_layers": 1, "max_num_tiles": 1}
        | {"intermediate_layers_indices": [0], "vision_output_dim": 64}
        | {"supported_aspect_ratios": [[1, 1]]},
    },
    "molmo2": {
        "vision_config": {"image_size": [28, 28], "num_key_value_heads": 4},
        "adapter_config": {"vision_feature_layer": [-1, -2], "num_key_value_heads": 4}
        | {"text_hidden_size": 32},
    },
    "paddleocr_vl": _SECTIONS,
    "qwen2_5_omni_thinker": _THINKER,
    "qwen2_vl": _SECTIONS,
    "qwen3_omni_moe_thinker": _THINKER,
}
"""By type: values that replace those of the small config, also inside of its parts."""


def small_config(model_type: str) -> dict[str, Any]:
    """The fields of a small config of this type."""
    if model_type in multimodal.MODELS:
        return multimodal.MODELS[model_type]
    config = transformers.AutoConfig.for_model(model_type).to_dict()
    del config["model_type"]
    return _with(_small(config), SETTINGS.get(model_type, {}))


def _small(config: dict[str, Any]) -> dict[str, Any]:
    small = {}
    for key, value in config.items():
        if key in _LEFT_OUT:
            continue
        if isinstance(value, dict):
            small[key] = _small(value) if "config" in key else _rotary(value)
        elif key in SIZES and value is not None and not isinstance(value, bool):
            small[key] = SIZES[key]
        elif key in ("layer_types", "mlp_layer_types", "layers_block_type") and value:
            small[key] = [value[0], value[-1]]
        else:
            small[key] = value
    return small


def _rotary(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings of rotary positions for a head of 8."""
    if "mrope_section" not in settings:
        return settings
    return settings | {"mrope_section": [2, 1, 1], "partial_rotary_factor": 1.0}


def _with(config: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    for key, value in settings.items():
        part = config.get(key)
        inner = isinstance(value, dict) and isinstance(part, dict) and key.endswith("_config")
        config[key] = _with(part, value) if inner else value
    return config
