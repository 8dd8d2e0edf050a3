"""Trains with the variable-length attention of GPUs, computed on the CPU (tests/varlen_on_cpu.py).

    torchrun --nproc-per-node 2 varlen_worker.py FOLDER [all]

Reads train.jsonl from FOLDER and writes results.json to it. With `all` it trains every combination,
also with compilation, which takes minutes.
"""

import sys
from functools import partialmethod
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from launcher.distributed.rank_layout import RankLayout
from launcher.models import attention
from launcher.recipe.load import load_recipe
from launcher.training.setup import assemble
from tests import varlen_on_cpu
from tests.distributed.launching import end_worker

STEPS = 3
RECIPE = f"""
run: {{name: varlen, max_steps: {STEPS}, seed: 7}}
model: {{config: {{model_type: llama, vocab_size: 64, hidden_size: 32, intermediate_size: 48, num_hidden_layers: 2, num_attention_heads: 4,
  num_key_value_heads: 2, max_position_embeddings: 64}}}}
data: {{kind: tokens, train: FOLDER/train.jsonl, sequence_length: 32, workers: 0, cache: FOLDER/cache}}
batch: {{global_batch_size: 8, micro_batch_size: 2}}
strategy: {{mixed_precision: null}}
optimizer: {{learning_rate: 2.0e-3}}
schedule: {{warmup_steps: 2}}
"""
LATENT = (
    "{model_type: minicpm3, vocab_size: 64, hidden_size: 32, intermediate_size: 48, num_hidden_layers: 2, num_attention_heads: 4, "
    "num_key_value_heads: 4, max_position_embeddings: 64, q_lora_rank: 16, kv_lora_rank: 16, qk_nope_head_dim: 12, "
    "qk_rope_head_dim: 8, v_head_dim: 12}"
)
EXPERTS = (
    "{model_type: qwen3_moe, vocab_size: 64, hidden_size: 32, intermediate_size: 48, num_hidden_layers: 2, num_attention_heads: 4, "
    "num_key_value_heads: 2, head_dim: 8, max_position_embeddings: 64, num_experts: 4, num_experts_per_tok: 2, "
    "moe_intermediate_size: 16}"
)
STRATEGIES = {
    "ddp": ["strategy.kind=ddp"],
    "fsdp": ["strategy.kind=fsdp"],
    "offload": ["strategy.kind=fsdp", "strategy.cpu_offload={pin_memory: true}"],
}
CHECKPOINTING = ("null", "{mode: full}", "{mode: selective}")
CASES = [
    ("ddp", "null", False),
    ("fsdp", "{mode: full}", False),
    ("offload", "{mode: selective}", False),
    ("fsdp", "null", True),
]
"""Strategy, activation checkpointing, whether blocks are compiled."""
ALL = [
    (strategy, mode, compiled)
    for strategy in STRATEGIES
    for mode in CHECKPOINTING
    for compiled in (False, True)
]


def train(folder, overrides, ranks):
    """Returns losses, gradient norms and the number of calls of the kernel."""
    torch._dynamo.reset()
    recipe = load_recipe([f"recipe={folder}/recipe.yaml", *overrides], ranks=ranks.size).recipe
    before = dict(varlen_on_cpu.CALLS)
    training = assemble(recipe, ranks=ranks, build_data=ranks.rank == 0)
    losses, norms = [], []
    for step in training.all_steps:
        loss = step.loss.clone()
        dist.all_reduce(loss)
        losses.append(loss.item())
        norms.append(step.grad_norm.item())
    calls = {name: count - before[name] for name, count in varlen_on_cpu.CALLS.items()}
    return {"losses": losses, "norms": norms, "calls": calls}


def main(folder, cases):
    dist.init_process_group("gloo")
    ranks = RankLayout(
        rank=dist.get_rank(),
        size=dist.get_world_size(),
        group=dist.group.WORLD,
        device=torch.device("cpu"),
    )
    if ranks.rank == 0:
        (folder / "recipe.yaml").write_text(RECIPE.replace("FOLDER", str(folder)))
    dist.barrier()
    latent = [f"model.config={LATENT}"]
    results = {
        "document by document": train(folder, ["strategy.kind=ddp"], ranks),
        "latent document by document": train(folder, ["strategy.kind=ddp", *latent], ranks),
    }
    varlen_on_cpu.register()
    attention.has_varlen_kernel = lambda tensor: True
    # The test covers the graphs only; compiling them with a C++ compiler would take a minute
    compile_block = nn.Module.compile
    nn.Module.compile = partialmethod(compile_block, backend="aot_eager", fullgraph=True)
    for strategy, mode, compiled in cases:
        overrides = [
            *STRATEGIES[strategy],
            f"activation_checkpointing={mode}",
            f"model.compile={str(compiled).lower()}",
        ]
        results[f"{strategy} {mode} compile={compiled}"] = train(folder, overrides, ranks)
    results["latent fsdp"] = train(
        folder, ["strategy.kind=fsdp", "activation_checkpointing={mode: selective}", *latent], ranks
    )
    attention.missing_for_varlen = lambda model, device, compute_dtype: None  # in bfloat16 too
    shared = [*STRATEGIES["fsdp"], "strategy.context_parallel_size=2"]
    bfloat16 = ["strategy.mixed_precision={param_dtype: bfloat16}"]
    results["context parallel"] = train(folder, shared, ranks)
    results["bfloat16"] = train(folder, [*STRATEGIES["fsdp"], *bfloat16], ranks)
    results["bfloat16, context parallel"] = train(folder, [*shared, *bfloat16], ranks)
    layers = [*STRATEGIES["fsdp"], "strategy.tensor_parallel_size=2"]
    results["bfloat16, tensor parallel"] = train(folder, [*layers, *bfloat16], ranks)
    mixture = [*STRATEGIES["fsdp"], f"model.config={EXPERTS}", *bfloat16]
    results["bfloat16, all experts"] = train(folder, mixture, ranks)
    divided = [*mixture, "strategy.expert_parallel_size=2"]
    results["bfloat16, divided experts"] = train(folder, divided, ranks)
    end_worker(folder, results)


if __name__ == "__main__":
    main(Path(sys.argv[1]), ALL if "all" in sys.argv else CASES)
