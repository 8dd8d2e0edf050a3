"""Trains Gemma 3n and 4 with each strategy, and in a plain loop over single documents.

    torchrun --nproc-per-node 2 gemma_worker.py FOLDER [CASE ...]

Reads train.jsonl from FOLDER, and writes losses and gradient norms to results.json, or the messages
of cases that are refused. Layers share the keys of others, heads differ by layer, and there are
embeddings for the inputs of layers.
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import transformers

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from launcher.errors import RecipeError
from launcher.recipe.load import load_recipe
from launcher.training.setup import assemble
from tests import multimodal
from tests.distributed.launching import end_worker
from tests.distributed.recurrent_worker import RECIPE, plain_loop, start_ranks, train
from tests.run_files import write_lines

transformers.logging.set_verbosity_error()
TEXT = multimodal.TEXT | multimodal.SHARED_KEYS | {"vocab_size": 96}
TEXT |= {"vocab_size_per_layer_input": 96, "max_position_embeddings": 128}
THREE_N = {key: value for key, value in TEXT.items() if key != "global_head_dim"}
THREE_N |= {"laurel_rank": 8, "altup_num_inputs": 2, "intermediate_size": [48] * 4}
THREE_N |= {"activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0], "pad_token_id": None}
"""A padding token has an embedding of zeros, whose norm has a gradient that is not a number."""
EXPERTS = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2}
EXPERTS |= {"moe_intermediate_size": 16, "attention_k_eq_v": True, "num_global_key_value_heads": 1}
MODELS = {
    "gemma4_text": TEXT,
    "gemma4_text, experts": TEXT | EXPERTS | {"tie_word_embeddings": False},
    "gemma4_text, one key head": TEXT | {"num_key_value_heads": 1},
    "gemma4, untied": multimodal.MODELS["gemma4"]
    | {"text_config": TEXT | {"tie_word_embeddings": False}, "tie_word_embeddings": False},
    "gemma4": multimodal.MODELS["gemma4"] | {"text_config": TEXT},
    "gemma3n_text": THREE_N,
}
FSDP = "strategy.kind=fsdp"
CHECKPOINTING = "activation_checkpointing="
PAIRS = [
    *("data.kind=preference", "data.train=FOLDER/pairs.jsonl", "preference.loss=dpo"),
    *("data.tokenizer=bytes", "data.prompt_format=text", "data.sequence_length=64"),
]
VARIANTS = {
    "ddp": ["strategy.kind=ddp"],
    "fsdp": [FSDP],
    "fsdp full": [FSDP, CHECKPOINTING + "{mode: full}"],
    "fsdp selective": [FSDP, CHECKPOINTING + "{mode: selective}"],
    "offload": [FSDP, "strategy.cpu_offload={}", CHECKPOINTING + "{mode: full}"],
    "copies": [FSDP, "strategy.replicate=2"],
    "compile": [FSDP, "model.compile=true"],
    "lora ddp": ["strategy.kind=ddp", "lora={rank: 4}"],
    "lora fsdp": [FSDP, "lora={rank: 4}"],
    "nf4 ddp": ["strategy.kind=ddp", "lora={rank: 4, quantize: nf4}"],
    "nf4 fsdp": [FSDP, "lora={rank: 4, quantize: nf4}"],
    "dpo": [FSDP, *PAIRS],
    "tensor": [FSDP, "strategy.tensor_parallel_size=2"],
    "tensor eager": [FSDP, "strategy.tensor_parallel_size=2", "model.attention=eager"],
    "experts": [FSDP, "strategy.expert_parallel_size=2"],
}
PLAIN = ["ddp", "fsdp", "fsdp full", "fsdp selective", "offload", "copies", "compile"]
PLAIN += ["tensor", "tensor eager", "experts"]
"""Variants that must have the losses of the plain loop."""


def class_of(model_type):
    if model_type in multimodal.MODELS:
        return transformers.AutoModelForImageTextToText
    return transformers.AutoModelForCausalLM


def plain_model(config, weights):
    """transformers' own model with the weights of the launcher's."""
    model = class_of(config["model_type"]).from_config(
        transformers.AutoConfig.for_model(**config), dtype=torch.float32
    )
    model.load_state_dict({name.removeprefix("module."): weights[name] for name in weights})
    return model.train()


def cache_difference(model, ids):
    """The largest difference of logits with and without a cache, and whether generation chooses the
    tokens that logits without a cache choose."""
    model.eval()
    with torch.no_grad():
        cached, plain = (model(input_ids=ids, use_cache=use).logits for use in (True, False))
        options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
        made, chosen = model.generate(ids[:1], **options), ids[:1]
        for _ in range(6):
            logits = model(input_ids=chosen, use_cache=False).logits
            chosen = torch.cat([chosen, logits[:, -1:].argmax(-1)], dim=1)
    model.train()
    return (cached - plain).abs().max().item(), torch.equal(made, chosen)


def main(folder, *chosen):
    ranks = start_ranks()
    results = {}
    for name, fields in MODELS.items():
        config = {"model_type": name.split(",")[0]} | fields
        file = folder / f"{name}.yaml"
        if ranks.rank == 0:
            text = RECIPE.replace("FOLDER", str(folder)).replace("CONFIG", json.dumps(config))
            file.write_text(text)
            pairs = [
                {
                    "prompt": f"def f{n}():\n ",
                    "chosen": f"return {n}",
                    "rejected": "pass" + " no" * n,
                }
                for n in range(24)
            ]
            write_lines(folder / "pairs.jsonl", pairs)
        dist.barrier()
        for variant, overrides in VARIANTS.items():
            case = f"{name} {variant}"
            if chosen and case not in chosen and name not in chosen:
                continue
            overrides = [each.replace("FOLDER", str(folder)) for each in overrides]
            if variant == "dpo":  # its tokenizer has 260 tokens
                sizes = config.get("text_config", config)
                larger = {"vocab_size": 260, "vocab_size_per_layer_input": 260}
                prefix = "model.config.text_config." if sizes is not config else "model.config."
                overrides += [f"{prefix}{key}={value}" for key, value in larger.items()]
            words = [f"recipe={file}", *overrides]
            try:
                recipe = load_recipe(words, ranks=ranks.size).recipe
                training = assemble(recipe, ranks=ranks, build_data=ranks.rank == 0)
                if variant == "ddp":
                    model = plain_model(config, training.wrapped.module.state_dict())
                    ids = torch.randint(3, 96, (2, 20), generator=torch.Generator().manual_seed(1))
                    results[f"{name} cache"] = cache_difference(model, ids)
                    results[name] = plain_loop(model, training.data.training)
                    transformers.set_seed(7)
                results[case] = train(training)
            except RecipeError as error:
                results[case] = {"refused": str(error)}
            if ranks.rank == 0:
                print(case, results[case], flush=True)
    end_worker(folder, results)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
