"""Measures on null GPUs how much more memory PyTorch's allocator reserves than the peak of tensors,
and how often it repeats allocations on a GPU with little more than that peak.

    .venv-cuda/bin/python benchmarks/room.py --output table.md    # FSDP over 8 ranks: some minutes

One process trains one of the ranks: the process group does nothing, and neither do the GPUs of
tests/nullgpu. The table has the room of the plan (docs/memory.md) beside the measurements.
"""

from __future__ import annotations

import argparse
import gc
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench import ROOT, publish
from overhead import use_null_gpus
from shapes import LLAMA_1B, LLAMA_8B, QWEN3_30B_A3B

sys.path.insert(0, str(ROOT))

SHARES = (1.04, 1.2)
"""Sizes of the GPU, in peaks, with which retries are counted."""
STEPS = 5
FULL, SELECTIVE = "activation_checkpointing.mode=full", "activation_checkpointing.mode=selective"
BUDGET = "activation_checkpointing={mode: selective, budget: 0.5}"
EXPERTS = "strategy.expert_parallel_size=8"
LONG = ("data.packing=false", "data.sequence_length=16384")
NARROW = {"vocab_size": 32000, "hidden_size": 512, "intermediate_size": 1536} | {
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
}
CASES: dict[str, tuple[dict[str, Any], int, tuple[str, ...]]] = {
    "1B, selective": (LLAMA_1B, 1, (SELECTIVE,)),
    "1B, budget 0.5": (LLAMA_1B, 1, (BUDGET,)),
    "1B, ZeRO-2, selective": (LLAMA_1B, 1, (SELECTIVE, "strategy.reshard_after_forward=false")),
    "1B, full, 2 micro-batches": (LLAMA_1B, 2, (FULL,)),
    "1B, full, padded rows of 16k": (LLAMA_1B, 1, (FULL, *LONG)),
    "1B, full, LoRA": (LLAMA_1B, 1, (FULL, "lora.rank=16")),
    "8B, full": (LLAMA_8B, 1, (FULL,)),
    "8B, full, 2 micro-batches": (LLAMA_8B, 2, (FULL,)),
    "30B-A3B, experts over 8 ranks": (QWEN3_30B_A3B, 1, (FULL, EXPERTS)),
    "30B-A3B, experts over 8 ranks, 2 micro-batches": (QWEN3_30B_A3B, 2, (FULL, EXPERTS)),
    "8B, budget 0.5, padded rows of 16k": (LLAMA_8B, 1, (BUDGET, *LONG)),
    "narrow, optimizer state on the host": (NARROW, 2, (FULL, "strategy.cpu_offload.what=optimizer")),
    "narrow, CPU offload, 2 micro-batches": (NARROW, 2, (FULL, "strategy.cpu_offload.pin_memory=true")),
}  # fmt: skip
"""For each row: the model's config, micro-batches a step, and overrides."""


def train(recipe: Any, ranks: Any, gib: float) -> list[tuple[int, int, int]] | None:
    """Peak, reserved bytes and retries of each step on a GPU of this size; None: out of memory."""
    import torch

    from launcher.optimizers.optimizer import LossScale
    from launcher.planner.recipe_values import micro_batches_of, with_random_weights
    from launcher.training.loop import Update, train_steps
    from launcher.training.model import prepare_model

    os.environ["NULLGPU_GIB"] = str(gib)  # the library reads it in each call
    found, before = [], 0
    try:
        random = with_random_weights(recipe, compile=False)
        prepared = prepare_model(random, device=ranks.device)
        data = prepared.synthetic_data(recipe.data, recipe.batch)
        wrapped = prepared.wrap(random, ranks)
        optimizer = prepared.make_optimizer(wrapped, recipe)
        count = micro_batches_of(recipe, ranks=ranks.size)
        scale = LossScale(ranks.device, enabled=False)
        update = Update(optimizer, lambda step: 1e-4, scale, 1.0)
        batches = data.batches(ranks, micro_batches=count, steps=STEPS)
        for _ in train_steps(
            wrapped, batches, loss=data.loss, update=update, averaged_over=ranks.size
        ):
            stats = torch.cuda.memory_stats()
            peaks = stats["allocated_bytes.all.peak"], stats["reserved_bytes.all.peak"]
            found.append((*peaks, stats["num_alloc_retries"] - before))
            before = stats["num_alloc_retries"]
            torch.cuda.reset_peak_memory_stats()
    except torch.OutOfMemoryError:
        return None
    return found


def measure(ranks: int, files: dict[str, Path], cases: list[str]) -> list[str]:
    """The table, in a process with null GPUs."""
    from launcher.distributed.environment import prepare_cuda

    prepare_cuda(deterministic=False)
    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from launcher.distributed.rank_layout import RankLayout
    from launcher.models import experts
    from launcher.planner.machine import known_machine
    from launcher.planner.plan import estimated_plan
    from launcher.planner.profile import profile_model
    from launcher.recipe.load import load_recipe

    def exchange_counts(
        ranked: torch.Tensor, here: int, group: dist.ProcessGroup
    ) -> tuple[list[int], list[int], torch.Tensor]:
        counts = experts.uniform_counts(ranked.numel(), group.size())
        return counts, counts, ranked

    experts.exchange_counts = exchange_counts  # null GPUs have no routing
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    assert dist.group.WORLD is not None
    group = RankLayout(rank=0, size=ranks, group=dist.group.WORLD, device=device)
    machine = known_machine("a100", nodes=1, gpus_per_node=ranks)
    lines = [
        f"| FSDP, {ranks} ranks | peak, GiB | reserved beyond it | margin and room | retries a step |",
        "|---|---|---|---|---|",
    ]
    for name in cases:
        _, count, overrides = CASES[name]
        batch = ["batch.micro_batch_size=1", f"batch.global_batch_size={count * ranks}"]
        arguments = [f"recipe={files[name]}", *batch, *overrides]
        recipe = load_recipe(arguments, ranks=ranks, files=False).recipe
        plan = estimated_plan(profile_model(recipe, device="cuda"), recipe, machine)
        retries: list[str] = []
        peak = reserved = 0
        for share in (None, *SHARES):
            found = train(recipe, group, 4096 if share is None else share * peak / 2**30)
            gc.collect()
            torch._C._cuda_clearCublasWorkspaces()
            torch.cuda.empty_cache()
            torch.cuda.reset_accumulated_memory_stats()
            torch.cuda.reset_peak_memory_stats()
            if share is None:
                assert found is not None
                peak, reserved = (max(step[index] for step in found[1:]) for index in (0, 1))
            else:
                retries.append("out of memory" if found is None else str(found[-1][2]))
        beyond = f"{(reserved - peak) / 2**30:.2f} ({reserved / peak - 1:.0%})"
        room = (0.04 * peak + plan.room) / 2**30
        row = f"| {name} | {peak / 2**30:.2f} | {beyond} | {room:.2f} | {', '.join(retries)} |"
        print(row, file=sys.stderr, flush=True)
        lines.append(row)
    return lines


def main() -> int:
    """Prints the table and returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--cases", nargs="+", choices=CASES, metavar="CASE", default=list(CASES))
    parser.add_argument("--output", type=Path)
    parser.add_argument("--files", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.files is not None:
        files = {name: options.files / f"{number}.yaml" for number, name in enumerate(CASES)}
        publish("\n".join([*measure(options.ranks, files, options.cases), ""]), options.output)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        for number, (config, *_) in enumerate(CASES.values()):
            llama = {"model_type": "llama", "bos_token_id": None, "eos_token_id": 1} | config
            llama |= {"tie_word_embeddings": False, "max_position_embeddings": 16384}
            Path(folder, f"{number}.yaml").write_text(
                f"run: {{name: room, max_steps: 5}}\nmodel: {{config: {llama}}}\n".replace(
                    "None", "null"
                ).replace("False", "false")
                + "data: {train: [none.txt], tokenizer: bytes, sequence_length: 4096}\n"
                "strategy: {kind: fsdp, mixed_precision: {param_dtype: bfloat16}}\n"
                "batch: {global_batch_size: 1, micro_batch_size: 1}\n"
            )
        use_null_gpus(Path(folder), 1)
        command = [sys.executable, __file__, *sys.argv[1:], "--files", folder]
        return subprocess.run(command, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
