"""Trains tiny models with rows that ranks share, and on one rank with whole rows.

    torchrun --nproc-per-node RANKS context_worker.py FOLDER

Reads train.jsonl from FOLDER and writes losses, gradient norms and deviations to results.json. On two
ranks, one model is trained.
"""

import json
import os
import sys
from pathlib import Path

import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from launcher.data.dataset import SequenceDataset
from launcher.models import chunked_loss
from tests.distributed.equivalence_worker import GPT2, LLAMA, STRATEGIES, ZERO, Worker

MODELS = {
    "llama": LLAMA,
    "qwen3, one key head, tied": LLAMA.replace("llama", "qwen3")
    .replace("key_value_heads: 2", "key_value_heads: 1, head_dim: 8")
    .replace("embeddings: false", "embeddings: true"),
    "mistral, windows": LLAMA.replace("llama", "mistral").replace(
        "tie_", "sliding_window: 9, tie_"
    ),
    "gpt2": GPT2.replace("0.1", "0.0"),
}
CONTEXTS = {
    "fsdp 1 x 2": (["strategy.kind=fsdp"], 2),
    "fsdp 2 x 2": (["strategy.kind=fsdp"], 2),
    "ddp 2 x 2": (["strategy.kind=ddp"], 2),
    "fsdp 1 x 4": (["strategy.kind=fsdp"], 4),
    "2 copies x 2": (["strategy.kind=fsdp", "strategy.replicate=2"], 2),
    "ZeRO-1": (ZERO, 4),
    "offload": (STRATEGIES["offload"], 2),
    "selective": (["strategy.kind=fsdp", "activation_checkpointing={mode: selective}"], 4),
    "budget": (
        ["strategy.kind=fsdp", "activation_checkpointing={mode: selective, budget: 0.6}"],
        2,
    ),
    "held back": (["strategy.kind=fsdp", "strategy.sync_every_micro_batch=false"], 2),
}
"""Overrides and strategy.context_parallel_size."""
CASES = [
    *(("llama", context, True) for context in CONTEXTS if context != "fsdp 1 x 2"),
    ("llama", "fsdp 2 x 2", False),
    ("qwen3, one key head, tied", "fsdp 1 x 4", True),
    ("mistral, windows", "fsdp 1 x 4", True),
    ("gpt2", "fsdp 2 x 2", False),
]
"""Model, key of CONTEXTS, and data.packing."""
QUICK_CASES = [("llama", "fsdp 1 x 2", True)]
"""On two ranks."""


def positions_of_the_part(training):
    """Injects a fault: positions start at 0 in the part of each rank."""
    original = SequenceDataset.loss

    def loss(self, model, micro_batch):
        positions = micro_batch["position_ids"]
        return original(self, model, micro_batch | {"position_ids": positions - positions[:, :1]})

    SequenceDataset.loss = loss


def train_cases(worker, cases, ranks):
    """Trains with shared rows, and the same on one rank."""

    def train(name, overrides, model, packing, *, ranks, rows, mutate=None):
        data = [f"data.packing={str(packing).lower()}", f"batch.micro_batch_size={rows}"]
        data.append(f"data.validation={worker.folder}/train.jsonl")
        data += ["data.weights_column=weights"] * packing
        config = MODELS[model]
        options = {"ranks": ranks, "config": config, "compare": False, "mutate": mutate}
        worker.train(name, [*overrides, *data], evaluate=True, **options)

    references = {}
    for model, _, packing in cases:
        if (model, packing) not in references:
            train(f"{model} {packing}", ["strategy.kind=ddp"], model, packing, ranks=1, rows=4)
            references[model, packing] = worker.last if worker.rank == 0 else None
    for model, context, packing in cases:
        overrides, size = CONTEXTS[context]
        overrides = [*overrides, f"strategy.context_parallel_size={size}"]
        name = f"{model} {context} {packing}"
        train(name, overrides, model, packing, ranks=ranks, rows=2)
        if worker.rank == 0:
            reference = references[model, packing]
            worker.results[name]["from_one_rank"] = max(
                (worker.last[k] - reference[k]).abs().max().item() for k in reference
            )
    if ranks < 4:
        return
    original = SequenceDataset.loss
    overrides = ["strategy.context_parallel_size=4"]
    train(
        "mutation: positions",
        overrides,
        "llama",
        False,
        ranks=4,
        rows=2,
        mutate=positions_of_the_part,
    )
    SequenceDataset.loss = original


def main(folder):
    # Chunks of 16 vocabulary entries
    chunked_loss.WIDTH_MULTIPLE = chunked_loss.CHUNK_ELEMENTS = 16
    worker = Worker(folder)
    worker.run_plain_loop = lambda training: None  # the reference is one rank
    ranks = dist.get_world_size()
    train_cases(worker, CASES if ranks == 4 else QUICK_CASES, ranks)
    if worker.rank == 0:
        (folder / "results.json").write_text(json.dumps(worker.results))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # like the launcher: threads of torch can abort a normal exit of the interpreter


if __name__ == "__main__":
    main(Path(sys.argv[1]))
