"""Small models of images and text."""

TEXT = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
TEXT |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
TEXT |= {"max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
VISION = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
VISION |= {"num_attention_heads": 4, "image_size": 28, "patch_size": 14}
QWEN_VISION = {
    "depth": 2,
    "hidden_size": 32,
    "num_heads": 4,
    "patch_size": 14,
    "intermediate_size": 48,
}
QWEN_VISION |= {"out_hidden_size": 32, "spatial_merge_size": 1}
MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
QWEN_TOKENS = {"image_token_id": 60, "video_token_id": 61, "vision_start_token_id": 62}
QWEN_TOKENS |= {"vision_end_token_id": 63}
HYBRID = {"layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2}
HYBRID |= {"linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
SHARED_KEYS = {"num_hidden_layers": 4, "num_kv_shared_layers": 2, "global_head_dim": 16}
SHARED_KEYS |= {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 8}
SHARED_KEYS |= {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 64}

MODELS = {
    "gemma3": {
        "text_config": TEXT
        | {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
        "vision_config": VISION,
        "mm_tokens_per_image": 1,
        "image_token_index": 63,
        "boi_token_index": 62,
        "eoi_token_index": 61,
    },
    "gemma4": {
        "text_config": TEXT | SHARED_KEYS,
        "vision_config": VISION | {"num_key_value_heads": 4, "head_dim": 8},
        "image_token_id": 63,
        "video_token_id": 62,
        "audio_token_id": 61,
        "boi_token_id": 60,
        "eoi_token_id": 59,
    },
    "glm4v_moe": {
        "text_config": TEXT
        | EXPERTS
        | {"rope_parameters": MROPE | {"partial_rotary_factor": 1.0}, "n_routed_experts": 4}
        | {"first_k_dense_replace": 1, "n_group": 1, "topk_group": 1},
        "vision_config": QWEN_VISION,
        "image_token_id": 60,
        "video_token_id": 61,
        "image_start_token_id": 62,
        "image_end_token_id": 63,
    },
    "mllama": {
        "text_config": {k: v for k, v in TEXT.items() if k != "head_dim"}
        | {"num_hidden_layers": 3, "cross_attention_layers": [1]},
        "vision_config": VISION
        | {"attention_heads": 4, "num_global_layers": 1, "max_num_tiles": 1}
        | {"intermediate_layers_indices": [0], "vision_output_dim": 64}
        | {"supported_aspect_ratios": [[1, 1]]},
        "image_token_index": 63,
    },
    "qwen2_5_vl": {
        "text_config": {k: v for k, v in TEXT.items() if k != "head_dim"}
        | {"rope_parameters": MROPE},
        "vision_config": QWEN_VISION | {"fullatt_block_indexes": [1], "window_size": 28},
        **QWEN_TOKENS,
    },
    "qwen3_5": {
        "text_config": TEXT | HYBRID | {"rope_parameters": MROPE | {"partial_rotary_factor": 1.0}},
        "vision_config": QWEN_VISION | {"num_position_embeddings": 16},
        **QWEN_TOKENS,
    },
    "qwen3_vl": {
        "text_config": TEXT | {"rope_parameters": MROPE},
        "vision_config": QWEN_VISION
        | {"deepstack_visual_indexes": [0], "num_position_embeddings": 16},
        **QWEN_TOKENS,
    },
    "qwen3_vl_moe": {
        "text_config": TEXT | EXPERTS | {"rope_parameters": MROPE},
        "vision_config": QWEN_VISION
        | {"deepstack_visual_indexes": [0], "num_position_embeddings": 16},
        **QWEN_TOKENS,
    },
    "mistral3": {
        "text_config": TEXT | {"model_type": "mistral", "sliding_window": None},
        "vision_config": VISION | {"model_type": "pixtral", "head_dim": 8},
        "image_token_index": 10,
    },
    "llama4": {
        "text_config": TEXT
        | {"num_local_experts": 2, "intermediate_size_mlp": 48, "attention_chunk_size": 16},
        "vision_config": VISION
        | {"vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32},
        "image_token_index": 60,
        "boi_token_index": 62,
        "eoi_token_index": 61,
    },
}
"""Configs by model type, without the type."""
