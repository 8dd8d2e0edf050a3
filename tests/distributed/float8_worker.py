"""Trains with linear layers in float8 (emulated) and in bfloat16, on one and two ranks.

    torchrun --nproc-per-node 2 float8_worker.py FOLDER CASES

CASES is "quick" or "all". Reads train.jsonl from FOLDER and writes losses and gradient norms to
results.json.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from launcher.models import head as head_module
from tests.distributed.equivalence_worker import EXPERTS, LLAMA, OFFLOAD, ZERO, Worker
from tests.distributed.launching import end_worker

MODELS = {"llama": LLAMA, "mixtral": EXPERTS.replace("logits: true", "logits: false")}
FSDP, DDP = ["strategy.kind=fsdp"], ["strategy.kind=ddp"]
CASES = {
    "llama": {
        "ddp": (DDP, 2, 2),
        "fsdp": (FSDP, 2, 4),
        "offload": ([*FSDP, *OFFLOAD], 2, 2),
        "context": ([*FSDP, "strategy.context_parallel_size=2"], 2, 2),
        "ZeRO-1": (ZERO, 2, 2),
        "state offloaded": ([*FSDP, "strategy.cpu_offload={what: optimizer}"], 2, 2),
        "held back": ([*FSDP, "strategy.sync_every_micro_batch=false"], 2, 4),
        "two copies": ([*FSDP, "strategy.replicate=2"], 2, 2),
        "full": ([*FSDP, "activation_checkpointing={mode: full}"], 2, 2),
        "selective": ([*FSDP, "activation_checkpointing={mode: selective}"], 2, 2),
        "budget": ([*FSDP, "activation_checkpointing={mode: selective, budget: 0.5}"], 2, 2),
        "ddp, selective": ([*DDP, "activation_checkpointing={mode: selective}"], 2, 2),
        "compiled": ([*FSDP, "model.compile=true"], 2, 2),
    },
    "mixtral": {
        "fsdp": (FSDP, 2, 2),
        "ddp": (DDP, 2, 2),
        "experts": ([*FSDP, "strategy.expert_parallel_size=2"], 2, 2),
    },
}
"""Overrides, number of ranks and of micro-batches."""
QUICK = ("ddp", "fsdp", "offload", "context")
PRECISIONS = {
    "rowwise": "{param_dtype: bfloat16, float8: rowwise}",
    "rowwise_with_gw_hp": "{param_dtype: bfloat16, float8: rowwise_with_gw_hp}",
    "bfloat16": "{param_dtype: bfloat16}",
}


def selected(cases):
    """The models and cases of a launch: the first model's QUICK ones, or all."""
    quick = {name: case for name, case in CASES["llama"].items() if name in QUICK}
    return {"llama": quick} if cases == "quick" else CASES


def main(folder, cases):
    # Chunks of 16 vocabulary entries
    head_module.WIDTH_MULTIPLE = head_module.CHUNK_ELEMENTS = 16
    worker = Worker(folder)
    worker.run_plain_loop = lambda training: None  # the reference is one rank
    for precision, section in PRECISIONS.items():
        own = [f"strategy.mixed_precision={section}"]
        for model, variants in selected(cases).items():
            for kind in (FSDP, DDP):
                name = f"{model} {precision} alone {kind[0].rpartition('=')[2]}"
                options = {"config": MODELS[model], "compare": False, "ranks": 1}
                worker.train(name, [*kind, *own], accumulation=1, **options)
            for name, (overrides, ranks, accumulation) in variants.items():
                options = {"config": MODELS[model], "compare": False, "ranks": ranks}
                case = f"{model} {precision} {name}"
                worker.train(case, [*overrides, *own], accumulation=accumulation, **options)
    end_worker(folder, worker.results)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
