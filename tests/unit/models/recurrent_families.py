"""Tiny models with recurrent layers, one of each family of transformers."""

import torch
import transformers

BASE = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
BASE |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}
BASE |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8}
DELTA |= {"linear_value_head_dim": 8, "head_dim": 8}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
SHARED = EXPERTS | {"shared_expert_intermediate_size": 16}
LINEAR = {"layer_types": ["linear_attention", "full_attention"]}
LATENT = {"linear_head_dim": 8, "linear_num_heads": 4, "num_key_value_heads": 4}
LATENT |= {"kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8}
LATENT |= {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 16}
MAMBA |= {"mamba_chunk_size": 16}
STATES = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2}
STATES |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
CONVOLUTION = {"layer_types": ["conv", "full_attention"], "block_multiple_of": 8}
FAMILIES: dict[str, dict] = {
    "bailing_hybrid": BASE
    | LINEAR
    | LATENT
    | {"num_experts": 4, "n_group": 1, "topk_group": 1, "q_lora_rank": None, "head_dim": 8},
    "bamba": BASE | MAMBA | {"attn_layer_indices": [1]},
    "falcon_h1": BASE | MAMBA | {"mamba_d_ssm": 64, "head_dim": 8},
    "falcon_mamba": STATES | {"state_size": 8},
    "granitemoehybrid": BASE
    | MAMBA
    | {"layer_types": ["mamba", "attention"], "num_local_experts": 4, "num_experts_per_tok": 2}
    | {"shared_intermediate_size": 32},
    "inkling_text": BASE
    | {"head_dim": 8, "n_routed_experts": 4, "sliding_window": 16, "num_experts_per_tok": 2}
    | {"moe_intermediate_size": 16},
    "jamba": BASE
    | {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8, "num_experts": 2}
    | {"num_experts_per_tok": 1, "expert_layer_period": 2, "use_mamba_kernels": False},
    "kimi_linear": BASE | LINEAR | LATENT | {"num_local_experts": 4},
    "lfm2": BASE | CONVOLUTION | {"block_ff_dim": 48},
    "lfm2_moe": BASE | CONVOLUTION | EXPERTS | {"num_dense_layers": 1},
    "lfm3": BASE | CONVOLUTION,
    "mamba": STATES | {"state_size": 8},
    "mamba2": STATES
    | {"num_heads": 8, "head_dim": 8, "state_size": 16, "n_groups": 2, "chunk_size": 16},
    "nemotron_h": BASE
    | {"layers_block_type": ["mamba", "moe", "attention", "mlp"], "num_hidden_layers": 4}
    | {"mamba_num_heads": 8, "mamba_head_dim": 8, "ssm_state_size": 16, "n_groups": 2}
    | {"chunk_size": 16, "head_dim": 8, "n_routed_experts": 4, "n_group": 1, "topk_group": 1}
    | {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
    | {"moe_shared_expert_intermediate_size": 16},
    "olmo_hybrid": BASE | DELTA | LINEAR | {"linear_num_key_heads": 4},
    "qwen3_5_moe_text": BASE | DELTA | SHARED | LINEAR,
    "qwen3_5_text": BASE | DELTA | LINEAR,
    "qwen3_next": BASE | DELTA | SHARED | LINEAR,
    "zaya": BASE | EXPERTS | {"num_experts_per_tok": 1, "head_dim": 8},
    "zamba2": BASE
    | {"mamba_d_state": 16, "n_mamba_heads": 8, "mamba_ngroups": 1, "chunk_size": 16}
    | {"layers_block_type": ["mamba", "hybrid", "mamba"], "num_hidden_layers": 3}
    | {"num_mem_blocks": 1, "hybrid_layer_ids": [1], "attention_hidden_size": 64}
    | {"attention_head_dim": 16, "adapter_rank": 4},
}


def build(model_type, device="cpu", attention=None):
    """A model of a family in float32, on the meta device without values."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(model_type, **FAMILIES[model_type])
    with torch.device(device):
        options = {"dtype": torch.float32, "attn_implementation": attention}
        model = transformers.AutoModelForCausalLM.from_config(config, **options)
    if device == "meta":
        return model
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            values = torch.randn(parameter.shape, generator=generator)
            if name.endswith("A_log"):  # states that are kept for 1 to 30 tokens
                parameter.copy_(values.sigmoid().mul(15).add(0.1).log())
            elif name.endswith((".D", "dt_bias")):
                parameter.copy_(values * 0.7)
            elif parameter.ndim > 1:
                parameter.copy_(values * 0.06)
            else:
                parameter.add_(values * 0.05)
    return model
