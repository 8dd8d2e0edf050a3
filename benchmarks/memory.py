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
import itertools
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from shapes import LLAMA_1B, LLAMA_8B

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from launcher.cli.plan import detect_gpus
from launcher.console import bytes_as_text
from launcher.errors import EXIT_DONE, EXIT_NO, TrainingError
from launcher.planner.machine import Machine, known_machine
from launcher.planner.measurement import Measurement, measure_recipes
from launcher.planner.memory import OVER, UNDER, peak_holds
from launcher.planner.plan import Plan, make_plan
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
AT_ONCE = 6
"""Configurations that one start of the ranks measures. Their rows are printed before the next ones
are planned, so that an interrupted run keeps them, and one that fails takes few others with it."""
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
    good, end = True, time.monotonic() + options.limit
    print(*lines, sep="\n", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        cases = planned(options, machine, Path(folder))
        while some := list(itertools.islice(cases, AT_ONCE)):
            recipes = [case.arguments for case in some]
            left = end - time.monotonic()
            try:
                measured = measure_recipes(recipes, ranks=options.ranks, timeout=left)
            except TrainingError as error:  # the others are measured all the same
                names = "; ".join(case.name for case in some)
                print(f"not measured: {names}: {error}", file=sys.stderr, flush=True)
                good = False
                continue
            for case, found in zip(some, measured, strict=True):
                good = good and peak_holds(case.plan.step, found)
                lines.append(row(case, found))
                print(lines[-1], flush=True)
    where = f"{options.ranks} x {machine.name}, torch {torch.__version__}"
    verdict = f"{'All' if good else 'Not all'} peaks are within {OVER:.0%} over and {UNDER:.0%} under ({where})."
    print(f"\n{verdict}")
    if options.output is not None:
        options.output.write_text("\n".join([*lines, "", verdict, ""]), encoding="utf-8")
    return EXIT_DONE if good else EXIT_NO


@dataclass(frozen=True)
class Case:
    """A configuration that fits by plan."""

    name: str
    """Its first cells of the table."""
    arguments: list[str]
    plan: Plan


def planned(options: argparse.Namespace, machine: Machine, folder: Path) -> Iterator[Case]:
    """Plans the configurations; those that do not fit are skipped. Recipes are in the folder."""
    for size, strategy, rows in itertools.product(options.sizes, options.strategies, options.rows):
        shape, length = SIZES[size]
        config = {"model_type": "llama", "bos_token_id": None, "eos_token_id": 1} | shape
        config |= {"tie_word_embeddings": False, "max_position_embeddings": 8192}
        file = folder / f"{size}.yaml"
        file.write_text(
            f"run: {{name: measured, max_steps: 3}}\n"
            f"model: {{config: {json.dumps(config)}}}\n"
            f"data: {{train: [none.txt], tokenizer: bytes, sequence_length: {length}}}\n"
            "batch: {global_batch_size: 1, micro_batch_size: 1}\n"
        )
        accumulated = 2 if "micro-batches" in strategy else 1
        batch = [
            f"batch.micro_batch_size={rows}",
            f"batch.global_batch_size={rows * accumulated * options.ranks}",
        ]
        arguments = [f"recipe={file}", *batch, *STRATEGIES[strategy]]
        plan = make_plan(load_recipe(arguments, ranks=options.ranks, files=False).recipe, machine)
        name = f"{size} | {strategy} | {rows}"
        if plan.spare is None or plan.spare >= 0:
            yield Case(name, arguments, plan)
        else:
            what = f"{bytes_as_text(plan.needed)} by plan"
            print(f"skipped: {name}: {what}", file=sys.stderr, flush=True)


def row(case: Case, found: Measurement) -> str:
    """A row of the table."""
    plan = case.plan.step.peak.components.total
    off = "" if peak_holds(case.plan.step, found) else " **off**"
    cells = (
        case.name,
        bytes_as_text(plan),
        bytes_as_text(found.peak),
        f"{plan / found.peak - 1:+.1%}{off}",
        bytes_as_text(plan + case.plan.margin),
        "" if found.reserved is None else bytes_as_text(found.reserved),
    )
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    sys.exit(main())
