"""Models, rows and layouts of row_worker.py."""

import json

from tests.unit.models.recurrent_families import FAMILIES

_LLAMA = {
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
_SPECIAL = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2}
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8}
_LATENT |= {"v_head_dim": 16, "num_key_value_heads": 4, "n_routed_experts": 4, "n_group": 1}
_LATENT |= {"topk_group": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_LAYERS = ["sliding_attention", "full_attention"]


def _family(name, **more):
    return {"model_type": name, **FAMILIES[name], **more}


MODELS = {
    "llama": _LLAMA,
    "llama, 4 blocks": _LLAMA | {"num_hidden_layers": 4},
    "llama, one key head": _LLAMA | {"num_key_value_heads": 1},
    "mistral": _LLAMA | {"model_type": "mistral", "sliding_window": 23},
    "gemma3": _LLAMA
    | _SPECIAL
    | {"model_type": "gemma3_text", "head_dim": 8, "sliding_window": 9, "layer_types": _LAYERS}
    | {"tie_word_embeddings": True},
    "gpt_oss": _LLAMA
    | {"model_type": "gpt_oss", "head_dim": 8, "sliding_window": 9, "layer_types": _LAYERS}
    | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": _LLAMA | _EXPERTS | {"model_type": "qwen3_moe", "head_dim": 8},
    "deepseek_v3": _LLAMA | _LATENT | {"model_type": "deepseek_v3", "first_k_dense_replace": 1},
    "deepseek_v3, 2 depths": _LLAMA
    | _LATENT
    | {"model_type": "deepseek_v3", "first_k_dense_replace": 1, "num_nextn_predict_layers": 2},
    "glm4_moe": _LLAMA
    | {"model_type": "glm4_moe", "head_dim": 8, "first_k_dense_replace": 1, "n_routed_experts": 4}
    | {"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 16}
    | {"num_nextn_predict_layers": 1},
    **{name: _family(name) for name in FAMILIES},
    "qwen3_5_text, one key head": _family("qwen3_5_text", linear_num_key_heads=1),
}
"""The configs of models. Their windows end within a piece of a document, and span several."""
ROWS = {"mixed": (2, 7, 20, 45, 60), "many": (3, 5, 9, 14, 30), "one": (64,), "short": (41, 64, 30)}
ROWS["weighted"] = ROWS["mixed"]
"""Tokens of the documents, in turn; rows have 64. Those of `weighted` have weights."""
EP, TP = "strategy.expert_parallel_size=2", "strategy.tensor_parallel_size=2"
PP = "strategy.pipeline_parallel_size=2"
FULL = "activation_checkpointing={mode: full}"
SELECTIVE = "activation_checkpointing={mode: selective}"
BUDGET = "activation_checkpointing={mode: selective, budget: 0.6}"
UNPACKED = "data.packing=false"
WEIGHTS = "data.weights_column=weights"
MTP = "model={mtp: {weight: 0.5, detach: false}, chunked_loss: true}"
LORA = "lora={rank: 2}"
TWO_ROWS = "batch.micro_batch_size=2"


def case(model, rows, heads, groups, *overrides):
    """heads x groups: the ranks that divide the heads, and the groups of the ring."""
    return model, rows, heads, groups, overrides


_SHAPES = ((2, 2), (1, 4), (4, 1))
LAUNCHES = {
    "quick": [
        case("gpt_oss", "mixed", 2, 2),
        case("qwen3_5_text", "mixed", 2, 2),
    ],
    "attention, 1": [
        *(
            case(model, rows, *shape)
            for model in ("llama", "gemma3")
            for rows in ("mixed", "one")
            for shape in _SHAPES
        ),
    ],
    "attention, 2": [
        *(case("gpt_oss", rows, *shape) for rows in ("mixed", "one") for shape in _SHAPES),
        *(case("qwen3_moe", rows, *shape, EP) for rows in ("mixed", "one") for shape in _SHAPES),
    ],
    "attention, 3": [
        case("llama", "many", 2, 2, TWO_ROWS),
        case("llama", "short", 1, 4, UNPACKED, TWO_ROWS),
        case("llama, one key head", "mixed", 2, 2),
        case("llama, one key head", "one", 1, 4),
        case("mistral", "mixed", 1, 4),
        case("mistral", "one", 2, 2),
        case("mistral", "short", 2, 2, UNPACKED),
        case("gpt_oss", "short", 1, 4, UNPACKED),
        case("deepseek_v3", "mixed", 2, 2),
        case("qwen3_moe", "mixed", 1, 2, EP),
    ],
    "options": [
        case("llama", "mixed", 2, 2, FULL),
        case("llama", "mixed", 2, 2, SELECTIVE),
        case("llama", "mixed", 2, 2, BUDGET),
        case("gemma3", "one", 1, 4, FULL),
        case("llama", "mixed", 1, 2, TP),
        case("llama", "mixed", 1, 2, "strategy.replicate=2"),
        case("llama, 4 blocks", "mixed", 1, 2, PP, FULL, "model.chunked_loss=true"),
        case("llama", "mixed", 2, 2, "strategy.kind=ddp"),
        case("llama", "mixed", 2, 2, "data.workers=1"),
        case("llama", "mixed", 2, 2, "strategy.sync_every_micro_batch=false"),
        case("qwen3_5_text", "mixed", 2, 2, BUDGET),
    ],
    "recurrent, 1": [
        *(
            case(model, rows, *shape)
            for model in ("qwen3_5_text", "nemotron_h")
            for rows in ("mixed", "one")
            for shape in _SHAPES
        ),
    ],
    "recurrent, 2": [
        case("lfm2", "mixed", 4, 1),
        case("lfm2", "one", 2, 2),
        case("lfm2", "mixed", 1, 4, FULL),
        case("lfm2_moe", "mixed", 2, 2),
        case("lfm3", "mixed", 2, 2),
        case("qwen3_next", "mixed", 4, 1),
        case("qwen3_next", "many", 1, 4, FULL),
        case("qwen3_5_text, one key head", "mixed", 2, 2),
        case("qwen3_5_text", "short", 2, 2, UNPACKED),
        case("qwen3_5_moe_text", "mixed", 2, 1, EP),
        case("bamba", "mixed", 4, 1),
        case("granitemoehybrid", "mixed", 2, 2),
        case("nemotron_h", "mixed", 2, 2, FULL),
        case("nemotron_h", "short", 4, 1, UNPACKED),
        case("zamba2", "mixed", 2, 2),
    ],
    "multi-token": [
        case("deepseek_v3, 2 depths", "mixed", 2, 2, MTP),
        case("deepseek_v3, 2 depths", "many", 1, 4, MTP, FULL),
        case("deepseek_v3, 2 depths", "short", 2, 1, MTP, UNPACKED),
        case("deepseek_v3, 2 depths", "weighted", 4, 1, MTP, WEIGHTS),
        case("deepseek_v3, 2 depths", "weighted", 1, 2, MTP, WEIGHTS, "model.mtp.detach=true"),
        case("glm4_moe", "mixed", 4, 1, MTP),
        case("glm4_moe", "one", 2, 2, MTP),
        case("glm4_moe", "short", 1, 4, MTP, UNPACKED, SELECTIVE),
        case("glm4_moe", "mixed", 2, 1, MTP, "strategy.replicate=2"),
        case("glm4_moe", "mixed", 1, 2, MTP, "strategy.kind=ddp", "data.workers=1"),
        case("glm4_moe", "many", 2, 2, MTP, LORA),
        case("glm4_moe", "many", 2, 2, MTP, "model.mtp.only=true"),
        case("qwen3_next", "mixed", 2, 1, MTP, TWO_ROWS),
        case("qwen3_next", "many", 1, 4, MTP, FULL),
        case("qwen3_next", "short", 2, 2, MTP, UNPACKED),
        case("qwen3_5_text", "mixed", 2, 2, MTP, BUDGET),
    ],
}
"""What one launch compares with one rank."""


def text_of(config):
    """The config for a recipe."""
    return json.dumps(config)


def name_of(model, rows, heads, groups, overrides):
    """The name of a case in the results."""
    return " ".join([f"{model}, {rows}, {heads} x {groups}", *overrides])
