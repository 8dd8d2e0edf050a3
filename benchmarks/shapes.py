"""Shapes of models from their model cards, as fields of the configuration in transformers."""

from __future__ import annotations

from typing import Any

_LLAMA_3 = {"vocab_size": 128256, "num_attention_heads": 32, "num_key_value_heads": 8}
LLAMA_1B: dict[str, Any] = _LLAMA_3 | {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "head_dim": 64,
    "tie_word_embeddings": True,
}
"""Llama-3.2-1B."""
LLAMA_8B: dict[str, Any] = _LLAMA_3 | {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "head_dim": 128,
    "tie_word_embeddings": False,
}
"""Llama-3.1-8B."""
QWEN3_30B_A3B: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "vocab_size": 151936,
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "tie_word_embeddings": False,
}
"""Qwen3-30B-A3B."""
