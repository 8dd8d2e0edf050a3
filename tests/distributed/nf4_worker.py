"""Trains adapters on weights in NF4 on one and two ranks, and on the same rounded weights in float32.

    torchrun --nproc-per-node 2 nf4_worker.py FOLDER

Reads train.jsonl from FOLDER and writes losses, gradient norms and deviations to results.json.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
import transformers

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from launcher.models import head as head_module
from launcher.models import nf4, nf4_layers
from launcher.models.description import describe
from tests.distributed.equivalence_worker import OFFLOAD, Worker
from tests.distributed.launching import end_worker

SIZES = {"vocab_size": 64, "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "max_position_embeddings": 64, "tie_word_embeddings": False}
MODELS = {
    "llama": SIZES | {"intermediate_size": 128},
    "mixtral": SIZES | {"intermediate_size": 64, "num_local_experts": 4},
}
FSDP, DDP = ["strategy.kind=fsdp"], ["strategy.kind=ddp"]
FULL = "activation_checkpointing={mode: full}"
CONTEXT = "strategy.context_parallel_size=2"
TENSOR = "strategy.tensor_parallel_size=2"
CASES = {
    "llama": {
        "ddp": (DDP, 2, 2),
        "fsdp": (FSDP, 2, 4),
        "held back": ([*FSDP, "strategy.sync_every_micro_batch=false"], 2, 4),
        "offload": ([*FSDP, *OFFLOAD], 2, 2),
        "budget": ([*FSDP, "activation_checkpointing={mode: selective, budget: 0.5}"], 2, 1),
        "context": ([*FSDP, CONTEXT], 2, 2),
        "tensor": ([*FSDP, TENSOR, FULL], 2, 2),
    },
    "mixtral": {
        "fsdp": ([*FSDP, FULL], 2, 2),
        "ddp": (DDP, 2, 1),
        "experts": ([*FSDP, "strategy.expert_parallel_size=2"], 2, 2),
    },
    "llama with options": {
        "ddp": (DDP, 2, 2),
        "ZeRO-1": ([*DDP, "strategy.shard_optimizer=true"], 2, 1),
        "fsdp": ([*FSDP, FULL], 2, 4),
        "offload": ([*FSDP, *OFFLOAD], 2, 2),
        "selective": ([*FSDP, "activation_checkpointing={mode: selective}"], 2, 1),
        "context": ([*FSDP, CONTEXT], 2, 2),
    },
}
"""Overrides, number of ranks and of micro-batches."""
OPTIONS = "dora: true, rank_stabilized: true, b_ratio: 4, modules_to_save: [embed_tokens, lm_head]"


def save_models(folder):
    """Writes each model with its own weights, and with those that NF4 rounds them to."""
    for name, config in MODELS.items():
        torch.manual_seed(3)
        made = transformers.AutoConfig.for_model(name, **config)
        model = transformers.AutoModelForCausalLM.from_config(made)
        model.save_pretrained(folder / name)
        for module, weight in nf4_layers.packable(describe(model).blocks):
            parameter = module.get_parameter(weight)
            parameter.data = nf4.round_trip(parameter.data)
        model.save_pretrained(folder / f"{name} rounded")


def main(folder):
    # Chunks of 16 vocabulary entries
    head_module.WIDTH_MULTIPLE = head_module.CHUNK_ELEMENTS = 16
    worker = Worker(folder)
    worker.run_plain_loop = lambda training: None  # the reference is one rank without NF4
    if worker.rank == 0:
        save_models(folder)
    dist.barrier()

    def train(name, model, overrides, *, lora, ranks, accumulation):
        overrides = [*overrides, "model.config=null", f"model.path={folder}/{model}", lora]
        options = {"ranks": ranks, "accumulation": accumulation, "compare": False}
        worker.train(name, overrides, **options)

    for name, cases in CASES.items():
        model, _, more = name.partition(" ")
        rounded, section = f"{model} rounded", "rank: 4" + (f", {OPTIONS}" if more else "")
        train(name, rounded, DDP, lora=f"lora={{{section}}}", ranks=1, accumulation=1)
        for case, (overrides, ranks, accumulation) in cases.items():
            quantized = f"lora={{{section}, quantize: nf4}}"
            options = {"lora": quantized, "ranks": ranks, "accumulation": accumulation}
            train(f"{name} {case}", model, overrides, **options)
    end_worker(folder, worker.results)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
