"""Compares planned memory with the CPU allocator's in real runs on two ranks.

A few configurations run by default; the grid is marked `long`. With LAUNCHER_MEMORY_TABLE=FILE the
grid's results are written to FILE as a Markdown table, for the docs.
"""

import os
from pathlib import Path

import pytest

from launcher.planner.measurement import measure_recipes
from launcher.planner.memory import compare
from launcher.planner.recipe_values import micro_batches_of
from launcher.planner.trace import trace_step
from launcher.recipe.load import load_recipe

RANKS = 2
TOLERANCE, TOLERANCE_OF_PEAK = 0.05, 0.002
TOLERANCE_OF_ZERO = 0.1
"""Gloo runs several all-gathers of ZeRO-1's step at the same time, and copies the tensors of each;
the plan counts the copies of one. This is not the peak of a step."""

MODELS = {
    "llama": "{model_type: llama, vocab_size: 4096, hidden_size: 256, intermediate_size: 704, num_hidden_layers: 4, num_attention_heads: 4,"
    " num_key_value_heads: 2, max_position_embeddings: 512, tie_word_embeddings: false, bos_token_id: null, eos_token_id: 1}",
    "gpt2": "{model_type: gpt2, vocab_size: 4096, n_embd: 256, n_layer: 4, n_head: 4, n_positions: 512, bos_token_id: null,"
    " eos_token_id: 1}",
}
DEEP = {"llama": ["model.config.num_hidden_layers=12"], "gpt2": ["model.config.n_layer=12"]}
STRATEGIES = {"ddp": ["kind=ddp"], "fsdp": [], "fsdp, offload": ["cpu_offload={}"]}
ZERO = {"other": "ZeRO-1", "more": ["strategy.shard_optimizer=true"]}
INT8 = {"other": "int8 moments", "more": ["optimizer.state_dtype=int8"]}
STATE = {
    "other": "optimizer state on the host",
    "more": ["strategy.cpu_offload={what: optimizer}"],
}
IN_FILES = {
    "other": "optimizer state in files",
    "more": ["strategy.cpu_offload={what: optimizer, optimizer_path: FOLDER}"],
}
BFLOAT16 = {"other": "bfloat16 moments", "more": ["optimizer.state_dtype=bfloat16"]}
PRECISIONS = {"fp32": ["mixed_precision=null"], "bf16": ["mixed_precision={param_dtype: bfloat16}"]}
CHECKPOINTING = {
    "none": [],
    "selective": ["activation_checkpointing.mode=selective"],
    "full": ["activation_checkpointing.mode=full"],
}


class Case:
    """A configuration: cells of its table row and overrides of its recipe."""

    def __init__(
        self,
        architecture,
        strategy="fsdp",
        precision="bf16",
        checkpointing="none",
        rows=4,
        accumulated=1,
        *,
        other="",
        more=(),
    ):
        self.architecture = architecture
        self.cells = [
            architecture,
            strategy,
            precision,
            checkpointing,
            f"{accumulated} x {rows}",
            other,
        ]
        self.accumulated = accumulated
        self.overrides = [
            f"batch.micro_batch_size={rows}",
            f"batch.global_batch_size={rows * accumulated * RANKS}",
            *(f"strategy.{setting}" for setting in STRATEGIES[strategy] + PRECISIONS[precision]),
            *CHECKPOINTING[checkpointing],
            *more,
        ]


def sync(when):
    return {
        "other": f"reduced every micro-batch: {when}",
        "more": [f"strategy.sync_every_micro_batch={when}"],
    }


PACKED = {"other": "packing", "more": ["data.packing=true"]}
LORA = {"other": "LoRA", "more": ["lora.rank=8"]}
BUDGET = {
    "other": "budget of 0.5",
    "more": ["activation_checkpointing={mode: selective, budget: 0.5}"],
}
KEPT = {"other": "kept after forward", "more": ["strategy.reshard_after_forward=false"]}

FEW = [
    Case("llama", "ddp", "bf16", "selective", rows=1, accumulated=2, **sync("false")),
    Case("llama", "fsdp", "bf16", "selective", rows=2, **PACKED),
    Case("llama", "fsdp, offload", "bf16", "full", rows=4),
    Case("llama", "fsdp", "bf16", rows=2, **LORA),
    Case("llama", "fsdp", "fp32", rows=1, **INT8),
    Case("gpt2", "ddp", "fp32", rows=1, **BFLOAT16),
    Case("llama", "fsdp", "bf16", rows=1, **IN_FILES),
]

GRID = [
    # memory in the optimizer step
    Case("llama", "ddp", "fp32", rows=2, **ZERO),
    Case("llama", "ddp", "fp32", rows=2),
    Case("llama", "fsdp", "bf16", rows=4, **BUDGET),
    Case("llama", "fsdp", "fp32", rows=1, **STATE),
    *(
        Case(
            "llama",
            strategy,
            precision,
            checkpointing,
            rows=8 if (number + (precision == "bf16")) % 2 else 2,
        )
        for number, (strategy, checkpointing) in enumerate(
            (s, c) for s in STRATEGIES for c in CHECKPOINTING
        )
        for precision in PRECISIONS
    ),
    *(
        Case(
            "gpt2",
            strategy,
            "bf16" if number % 2 else "fp32",
            checkpointing,
            rows=2 if number % 2 else 8,
        )
        for number, (strategy, checkpointing) in enumerate(
            (s, c) for s in STRATEGIES for c in CHECKPOINTING
        )
    ),
    *(
        Case("llama", strategy, "bf16", accumulated=3, **sync(when))
        for strategy in ("ddp", "fsdp")
        for when in ("true", "false")
    ),
    Case("gpt2", "fsdp", "fp32", accumulated=2, **sync("false")),
    *(Case("llama", strategy, "bf16", "full", **PACKED) for strategy in ("ddp", "fsdp")),
    Case("llama", "ddp", "fp32", **PACKED),
    *(
        Case("llama", strategy, precision, **LORA)
        for strategy in ("ddp", "fsdp")
        for precision in PRECISIONS
    ),
    Case("gpt2", "fsdp", "bf16", "selective", **LORA),
    *(Case("llama", "fsdp", precision, **KEPT) for precision in PRECISIONS),
    *(Case("llama", "ddp", precision, rows=8, **BUDGET) for precision in PRECISIONS),
    Case("gpt2", "fsdp", "bf16", **BUDGET),
    Case(
        "llama",
        "fsdp",
        accumulated=3,
        other="kept after backward",
        more=["strategy.reshard_after_backward=false"],
    ),
    Case(
        "llama",
        "fsdp",
        checkpointing="full",
        other="every 2nd block",
        more=["activation_checkpointing.every_n_blocks=2"],
    ),
    Case(
        "llama", "fsdp", checkpointing="full", other="12 layers: extrapolated", more=DEEP["llama"]
    ),
    Case("gpt2", "ddp", checkpointing="none", other="12 layers: extrapolated", more=DEEP["gpt2"]),
]


@pytest.fixture
def folder(tmp_path):
    """A folder with a recipe for each architecture."""
    (tmp_path / "data.txt").write_text("It is not read.")
    for name, config in MODELS.items():
        (tmp_path / f"{name}.yaml").write_text(
            f"run: {{name: measured, max_steps: 3}}\nmodel: {{config: {config}}}\n"
            f"data: {{train: [{tmp_path / 'data.txt'}], tokenizer: bytes, sequence_length: 256, packing: false}}\n"
            "batch: {global_batch_size: 2, micro_batch_size: 1}\n"
        )
    return tmp_path


def compare_with_plan(folder, cases, *, timeout):
    """Yields (case, rows of planned and measured bytes, measurement). One launch measures all."""
    arguments = [
        [
            f"recipe={folder / case.architecture}.yaml",
            *(override.replace("FOLDER", str(folder)) for override in case.overrides),
        ]
        for case in cases
    ]
    for case, own, measured in zip(
        cases, arguments, measure_recipes(arguments, ranks=RANKS, timeout=timeout), strict=True
    ):
        loaded = load_recipe(own, ranks=RANKS).recipe
        assert micro_batches_of(loaded, ranks=RANKS) == case.accumulated
        planned = trace_step(loaded, ranks=RANKS, device="cpu", micro_batches=case.accumulated)
        yield case, compare(planned, measured), measured


def deviation(planned, measured, peak):
    """Deviation relative to the measured bytes, or to 1 % of the peak if that is larger."""
    return abs(planned - measured) / max(measured, 0.01 * peak)


def markdown(results):
    head = [
        "model",
        "strategy",
        "precision",
        "checkpointing",
        "micro-batches",
        "",
        "measured peak",
        "planned peak",
        "plan is",
        "worst component",
    ]
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for case, rows, _ in results:
        *others, (_, planned, peak) = rows
        what, own, found = max(others, key=lambda row: deviation(row[1], row[2], peak))
        numbers = [
            f"{peak / 2**20:,.1f} MiB",
            f"{planned / 2**20:,.1f} MiB",
            f"{planned / peak - 1:+.2%}",
        ]
        lines.append(
            f"| {' | '.join([*case.cells, *numbers, f'{what} {own / max(found, 1) - 1:+.1%}'])} |"
        )
    return "\n".join(lines) + "\n"


def tolerance(case, what):
    if what == "peak in optimizer" and "ZeRO-1" in case.cells:
        return TOLERANCE_OF_ZERO
    return TOLERANCE_OF_PEAK if what == "peak" else TOLERANCE


def check(results):
    off = [
        f"{case.cells}: {what}: planned {planned:,}, measured {found:,}"
        for case, rows, measured in results
        for what, planned, found in rows
        if deviation(planned, found, measured.peak) > tolerance(case, what)
    ]
    assert not off, "planned and measured memory differ:\n" + "\n".join(off)
    for case, _, measured in results:  # valid only if all memory is freed at the end
        assert abs(measured.residue) <= 0.001 * measured.peak, (case.cells, measured)


@pytest.mark.long
def test_planned_memory_matches_the_allocator(folder):
    check(list(compare_with_plan(folder, FEW, timeout=400)))


@pytest.mark.long
def test_planned_memory_matches_the_allocator_on_the_grid(folder):
    results = list(compare_with_plan(folder, GRID, timeout=1800))
    if file := os.environ.get("LAUNCHER_MEMORY_TABLE"):
        Path(file).write_text(markdown(results))
    check(results)
