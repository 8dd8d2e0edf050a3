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
    "qwen2_5_vl": {
        "text_config": {k: v for k, v in TEXT.items() if k != "head_dim"}
        | {"rope_parameters": MROPE},
        "vision_config": QWEN_VISION | {"fullatt_block_indexes": [1], "window_size": 28},
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
