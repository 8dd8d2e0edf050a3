"""Compares planned and measured memory of training on this machine, for models of 0.1B to 8B.

    python benchmarks/memory.py                                   # all GPUs, one rank per GPU
    python benchmarks/memory.py --sizes 0.1b 1b --ranks 1 --output table.md
    python benchmarks/memory.py --sizes tiny --ranks 2            # without a GPU

Prints a Markdown table. Configurations that do not fit according to the plan are skipped. On a GPU,
`measured` is `max_memory_allocated` over all steps, and `reserved` is `max_memory_reserved`, which
includes memory that the allocator caches. The exit status is 3 if the plan is more than 5 % above
or more than 2 % below a measured peak.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from bench import publish
from shapes import LLAMA_1B, LLAMA_8B

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from launcher.cli.plan import detect_gpus
from launcher.console import bytes_as_text
from launcher.errors import EXIT_DONE, EXIT_NO
from launcher.planner.machine import known_machine
from launcher.planner.measurement import measure_recipes
from launcher.planner.memory import OVER, UNDER, peak_holds
from launcher.planner.plan import make_plan
from launcher.recipe.load import load_recipe

SIZES: dict[str, tuple[dict[str, Any], int]] = {
    "tiny": (
        {"vocab_size": 4096, "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 8}
        | {"num_attention_heads": 4, "num_key_value_heads": 2},
        256,
    ),
    "0.1b": (
        {"vocab_size": 32000, "hidden_size": 768, "intermediate_size": 2048}
        | {"num_hidden_layers": 12, "num_attention_heads": 12, "num_key_value_heads": 4},
        2048,
    ),
    "1b": (LLAMA_1B, 4096),
    "3b": (
        LLAMA_1B
        | {"hidden_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 24}
        | {"head_dim": 128},
        4096,
    ),
    "8b": (LLAMA_8B, 4096),
}
"""For each model: its config and the sequence length in tokens."""
STRATEGIES = {
    "ddp": ["strategy.kind=ddp"],
    "ddp, full": ["strategy.kind=ddp", "activation_checkpointing.mode=full"],
    "fsdp": [],
    "fsdp, fp32": ["strategy.mixed_precision=null"],
    "fsdp, selective": ["activation_checkpointing.mode=selective"],
    "fsdp, full": ["activation_checkpointing.mode=full"],
    "fsdp, full to host": ["activation_checkpointing={mode: full, offload_to_cpu: true}"],
    "fsdp, full, offload": [
        "activation_checkpointing.mode=full",
        "strategy.cpu_offload.pin_memory=true",
    ],
    "fsdp, padded rows": ["data.packing=false"],
    "fsdp, LoRA": ["lora.rank=16"],
    "fsdp, 2 micro-batches held back": ["strategy.sync_every_micro_batch=false"],
}


def main() -> int:
    """Prints the table and returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["0.1b", "1b", "8b"])
    parser.add_argument(
        "--rows", nargs="+", type=int, default=[1, 4], help="sequences per micro-batch"
    )
    parser.add_argument("--strategies", nargs="+", choices=STRATEGIES, default=list(STRATEGIES))
    parser.add_argument("--ranks", type=int, default=max(1, torch.cuda.device_count()))
    parser.add_argument("--limit", type=float, default=540, help="time limit in seconds, in total")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    present = detect_gpus()
    name, memory = ("cpu", None) if present is None else present[:2]
    machine = known_machine(
        name, nodes=1, gpus_per_node=options.ranks, memory=memory, host_memory=None, overrides=None
    )
    lines = [
        "| model | strategy | sequences | planned | measured | plan is | plan and margin | reserved |",
        "|---|---|---|---|---|---|---|---|",
    ]
    with tempfile.TemporaryDirectory() as folder:
        plans = []
        for size in options.sizes:
            shape, length = SIZES[size]
            config = {"model_type": "llama", "bos_token_id": None, "eos_token_id": 1} | shape
            config |= {"tie_word_embeddings": False, "max_position_embeddings": 8192}
            file = Path(folder, f"{size}.yaml")
            file.write_text(
                f"run: {{name: measured, max_steps: 3}}\n"
                f"model: {{config: {json.dumps(config)}}}\n"
                f"data: {{train: [none.txt], tokenizer: bytes, sequence_length: {length}}}\n"
                "batch: {global_batch_size: 1, micro_batch_size: 1}\n"
            )
            for strategy in options.strategies:
                for rows in options.rows:
                    accumulated = 2 if "micro-batches" in strategy else 1
                    batch = [
                        f"batch.micro_batch_size={rows}",
                        f"batch.global_batch_size={rows * accumulated * options.ranks}",
                    ]
                    arguments = [f"recipe={file}", *batch, *STRATEGIES[strategy]]
                    plan = make_plan(
                        load_recipe(arguments, ranks=options.ranks, files=False).recipe, machine
                    )
                    if plan.spare is None or plan.spare >= 0:
                        plans.append((size, strategy, rows, arguments, plan))
                    else:
                        print(
                            f"skipped: {size}, {strategy}, {rows}: {bytes_as_text(plan.needed)} by plan",
                            file=sys.stderr,
                        )
        measured = measure_recipes(
            [arguments for *_, arguments, _ in plans], ranks=options.ranks, timeout=options.limit
        )
    good = True
    for (size, strategy, rows, _, plan), found in zip(plans, measured, strict=True):
        planned = plan.step.peak.components.total
        true = peak_holds(plan.step, found)
        good = good and true
        reserved = "" if found.reserved is None else bytes_as_text(found.reserved)
        lines.append(
            f"| {size} | {strategy} | {rows} | {bytes_as_text(planned)} | {bytes_as_text(found.peak)} | {planned / found.peak - 1:+.1%}"
            f"{'' if true else ' **off**'} | {bytes_as_text(planned + plan.margin)} | {reserved} |"
        )
    where = f"{options.ranks} x {machine.name}, torch {torch.__version__}"
    verdict = f"{'All' if good else 'Not all'} peaks are within {OVER:.0%} over and {UNDER:.0%} under ({where})."
    text = "\n".join([*lines, "", verdict])
    publish(text + "\n", options.output)
    return EXIT_DONE if good else EXIT_NO


if __name__ == "__main__":
    sys.exit(main())
