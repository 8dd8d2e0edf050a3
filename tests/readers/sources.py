"""Small models with the tokenizers and the config.json of published ones, and their exports."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers

from launcher.data.run_data import tokenizer_to_keep
from launcher.data.tokenizer import new_token_ids, tokenizer_name
from launcher.models.build import build_model
from launcher.models.hugging_face_files import export_hugging_face
from launcher.models.initialization import random_weights
from launcher.models.load import open_checkpoint, pretrained_weights
from launcher.models.lora import add_adapters
from launcher.models.new_rows import grow_vocabulary
from launcher.recipe.schema import Data, Lora, Model

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 16}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096}
SCALING = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}
SCALING |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 256}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
EXPERTS |= {"norm_topk_prob": True}  # as in published models; llama.cpp does not read it
QWEN = {"vocab_size": 151936, "rope_theta": 1e6, "bos_token_id": 151643, "eos_token_id": 151645}
LAYERS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 512}
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "Llama 3.1": (
        "llama",
        "llama3_1",
        {"vocab_size": 128256, "rope_theta": 5e5, "rope_scaling": SCALING, "bos_token_id": 128000}
        | {"eos_token_id": [128001, 128008, 128009], "tie_word_embeddings": False},
    ),
    "Qwen3": ("qwen3", "qwen3", QWEN | {"tie_word_embeddings": True}),
    "Qwen3 with experts": ("qwen3_moe", "qwen3", QWEN | EXPERTS | {"tie_word_embeddings": False}),
    "Gemma 3": (
        "gemma3_text",
        "gemma3",
        {"vocab_size": 262144, "rope_theta": 1e6, "rope_local_base_freq": 1e4}
        | {"bos_token_id": 2, "eos_token_id": 1, "tie_word_embeddings": True, **LAYERS},
    ),
}
"""By name: the type of transformers, the tokenizer, and keys of config.json as on the hub."""
FROM_SCRATCH: dict[str, dict[str, Any]] = {
    "llama": {"rope_theta": 5e5, "rope_scaling": SCALING},
    "gemma3_text": {
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 3e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 5e3},
        },
        **LAYERS,
    },
    "gpt_neox": {"rotary_pct": 0.5, "rotary_emb_base": 7e3},
}
"""model.config by type."""
EXPORTS = ("full", "new tokens", "merged", "adapter")
NEW_TOKENS = ("<tool_call_made_up>", "<|turn_made_up|>")


def make_source(folder: Path, name: str, tokenizers: Path) -> Path:
    """A checkpoint in bfloat16 with random weights, as transformers 4 wrote it."""
    kind, tokenizer, keys = MODELS[name]
    config = transformers.AutoConfig.for_model(kind, **json.loads(json.dumps(SIZES | keys)))
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    model.to(torch.bfloat16).save_pretrained(folder)
    written = {"torch_dtype": "bfloat16", "transformers_version": "4.51.0", "model_type": kind}
    architectures = {"architectures": [type(model).__name__]}
    text = json.dumps(SIZES | keys | written | architectures, indent=2)
    (folder / "config.json").write_text(text)
    (folder / "generation_config.json").unlink(missing_ok=True)
    for file in (tokenizers / f"tokenizer-{tokenizer}/models").iterdir():
        shutil.copyfile(file, folder / file.name)
    return folder


def export_from_scratch(out: Path, kind: str) -> Path:
    """An export of a model that has no source, with the tokenizer `bytes`."""
    cpu = torch.device("cpu")
    config = json.loads(json.dumps(SIZES | FROM_SCRATCH[kind]))
    section = Model(config={"model_type": kind, "vocab_size": 260, **config})
    model = build_model(section, sequence_length=16)
    random_weights(model, cpu, cpu, seed=0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    tokenizer = tokenizer_to_keep(Data(tokenizer="bytes"), section)
    export_hugging_face(model, out, rank=0, device=cpu, tokenizer=tokenizer)
    return out


def export(source: Path, out: Path, kind: str, data: Data | None = None) -> Path:
    """An export of a model that has been trained: its trained weights are changed."""
    cpu = torch.device("cpu")
    section = Model(path=str(source))
    if kind == "new tokens":
        section = replace(section, new_tokens=NEW_TOKENS)
    new_ids = new_token_ids(tokenizer_name(Data(), section))
    model: Any = build_model(section, sequence_length=16)
    grow_vocabulary(model, new_ids)
    found = open_checkpoint(source, model, new_ids=new_ids)
    if kind in ("merged", "adapter"):
        add_adapters(model, Lora(rank=4), base_dtype=torch.float32, base=str(source))
    pretrained_weights(model, cpu, cpu, checkpoint=found, seed=0)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.02)
    export_hugging_face(
        model,
        out,
        rank=0,
        device=cpu,
        dtype=torch.float32 if kind == "adapter" else found.stored.dtype(),
        merged=kind == "merged",
        source=found,
        tokenizer=tokenizer_to_keep(data or Data(), section),
    )
    return out
